"""Kills, hangs, signals, full disks, nan, nodes that differ: a run survives or says why it ends."""

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import pipeline
import sample
import schedules
import train
from collectives import CommunicationError
from data.batches import Data
from run import checkpoint, processes, signals
from run.config import Config, check, fail, parse
from run.copies import replicas_agree
from run.launch import launch
from tests.harness import (
    VOCAB,
    close,
    config,
    local_tensors,
    pool,
)
from tests.isolation import as_it_was
from tests.pool import HANG
from tests.runs import (
    Run,
    _main,
    command,
    contents,
    flags,
    gone,
    launched,
    losses,
    one_line,
    start,
)
from tests.test_checkpoint import spoil


def _main_on_a_slow_disk(*args):
    """A save takes a quarter of a second: a kill meets it, or steps before it, on any machine."""
    sync = checkpoint.sync

    def sync_slowly(path):
        time.sleep(0.05)
        sync(path)

    checkpoint.sync = sync_slowly
    _main(*args)


def test_a_storm_of_kills_leaves_the_trace_of_the_uninterrupted_run(corpus, tmp_path):
    """Three kills, one of them while a checkpoint is saved."""
    kills, layout = 3, {"zero": 2, "dp": 2}
    args = {"steps": 2 + 7 * kills, "save_interval": 2, **layout}
    whole = Run(2, flags(corpus, tmp_path / "whole", **args), tmp_path)
    out = tmp_path / "killed"
    out.mkdir()
    log = out / "metrics.jsonl"
    log.touch()
    rng, in_a_save = np.random.default_rng(1), 0
    for kill in range(kills):
        run = Run(2, flags(corpus, out, resume="auto", **args), tmp_path, fn=_main_on_a_slow_disk)
        lines = log.read_bytes().count(b"\n") if kill else 0
        more, pause = int(rng.integers(1, 4)), rng.uniform(0, 0.01)
        run.until(lambda run=run: "step " in run.read("stdout"))  # its log is open
        lines = min(lines, log.read_bytes().count(b"\n"))
        run.until(lambda n=lines + more: log.read_bytes().count(b"\n") >= n)
        if kill % 2:  # while files are written
            run.until(lambda: any(out.glob("step-*.tmp")))
        else:
            time.sleep(pause)
        run.signal(int(rng.integers(2)), signal.SIGKILL)
        codes = run.wait()
        in_a_save += any(out.glob("step-*.tmp"))
        assert -signal.SIGKILL in codes and not {0, 2} & set(codes), (codes, run.read())
        assert run.read().count("\n") <= 1 and "Traceback" not in run.read(), run.read()
    assert in_a_save >= 1, in_a_save
    last = Run(2, flags(corpus, out, resume="auto", **args), tmp_path)
    assert last.wait() == [0, 0], last.read()
    assert whole.wait() == [0, 0], whole.read()
    assert losses(log) == losses(tmp_path / "whole/metrics.jsonl")
    end = f"step-{args['steps']:08d}"
    assert max(p.name for p in out.glob("step*")) == end
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        one, other = (tmp_path / run / end / name for run in ("whole", "killed"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux")
def test_ranks_end_with_the_process_that_started_them(corpus, tmp_path):
    """Killed while they train; told to stop while they are being started."""
    argv = flags(corpus, tmp_path / "out", dp=2, steps=10**6)
    run, ranks = launched(argv)
    for line in run.stdout:
        if line.startswith("step      2"):
            break
    run.kill()
    assert gone(ranks) and run.wait() == -signal.SIGKILL
    assert run.stderr.read() == ("train.py: the process that started the ranks has gone, so they "
                                 "end\n")
    run, ranks = launched(argv)
    run.terminate()
    _, said = run.communicate(timeout=HANG)
    assert run.returncode == 128 + signal.SIGTERM and gone(ranks)
    assert said == "train.py: stopped by SIGTERM before the first step\n"


def test_a_stopped_rank_ends_the_run_within_two_timeouts(corpus, tmp_path):
    """One line names who waited for whom, another the stopped rank; no process is left."""
    run, ranks = launched(flags(corpus, tmp_path / "out", dp=2, steps=10**6, timeout=20))
    for line in run.stdout:
        if line.startswith("step      2"):
            break
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.time()
    _, said = run.communicate(timeout=HANG)
    assert run.returncode == 1 and gone(ranks)
    assert time.time() - began < 2 * 20 + 10
    waited, ended = [line for line in said.splitlines() if line.startswith("train.py: rank")]
    stopped = re.search(r"(?:waiting for|receive from) rank (\d)", waited)[1]
    assert ended == f"train.py: rank {stopped} was ended by SIGKILL"


def test_a_rank_that_dies_ends_the_run_with_one_message(corpus, tmp_path):
    """Its peers notice its closed connections, long before --timeout."""
    run = Run(4, flags(corpus, tmp_path / "out", tp=2, pp=2, steps=10**6), tmp_path)
    run.until(lambda: "step      2" in run.read("stdout"))
    run.signal(1, signal.SIGKILL)
    started = time.time()
    assert run.wait(but=[1]) == [1, 1, 1]
    assert time.time() - started < HANG / 4
    assert run.read().count("\n") == 1, run.read()
    assert re.match(r"train.py: (group \w+: )?rank \d: .*(receive from|send to) rank \d",
                    run.read()), run.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_any_rank_saves_after_the_step_and_exits_0(corpus, tmp_path, number):
    args = dict(dp=2, steps=10**6)
    run = Run(2, flags(corpus, tmp_path / "out", **args), tmp_path)
    run.until(lambda: "step      1" in run.read("stdout"))
    run.signal(1, number)
    assert run.wait() == [0, 0] and run.read() == ""
    last = checkpoint.newest(tmp_path / "out")
    assert f"goes on from {last}\n" in run.read("stdout")


def _main_with_ctrl_c(rank, *args):
    """Rank 1 gets Ctrl-C in its second batch of a validation; rank 0 prints each batch."""
    def validation(self, cfg, mesh, batches=None, real=Data.validation):
        windows, each = real(self, cfg, mesh, batches)

        def watched():
            for i, batch in enumerate(each):
                if batches == 8 and rank == 1 and i == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                if batches == 8 and rank == 0:
                    print("batch", i, flush=True)
                yield batch

        return windows, watched()

    Data.validation = validation
    _main(rank, *args)


def test_ctrl_c_during_a_validation_ends_the_run_with_its_checkpoint(corpus, tmp_path):
    argv = flags(corpus, tmp_path / "out", dp=2, eval_interval=2, eval_batches=8, save_interval=2)
    run = Run(2, argv, tmp_path, fn=_main_with_ctrl_c)
    assert run.wait() == [0, 0] and run.read() == ""
    said = run.read("stdout")
    assert re.findall(r"batch \d+", said) == ["batch 0", "batch 1"]
    newest = checkpoint.newest(tmp_path / "out")
    assert said.endswith(f"stopped by a signal; --resume auto goes on from {newest}\n")


def _main_into_a_fifo(rank, size, port, argv, folder, limit):
    """stdout is a pipe, whose reader goes."""
    pipe = Path(folder, "stdout")  # _main opens it
    if rank == 0:
        os.mkfifo(pipe)
    while not pipe.exists():
        time.sleep(0.01)
    _main(rank, size, port, argv, folder, limit)


def test_a_run_whose_reader_has_gone_saves_and_ends(corpus, tmp_path):
    """... like a run whose terminal is closed: | head."""
    run = Run(2, flags(corpus, tmp_path / "out", dp=2, steps=10**6), tmp_path,
              fn=_main_into_a_fifo)
    run.until((run.folder / "stdout").exists)
    with open(run.folder / "stdout") as pipe:
        for line in pipe:
            if line.startswith("step      2"):
                break
    assert run.wait() == [0, 0] and run.read() == ""
    assert checkpoint.newest(tmp_path / "out")


@pytest.mark.parametrize("how", ["missing", "cut off"])
def test_resume_auto_goes_to_the_last_whole_checkpoint(trained, tmp_path, how, capsys):
    out = shutil.copytree(trained, tmp_path / "out")
    path = out / "step-00000004" / checkpoint.OPTIMIZER
    path.unlink() if how == "missing" else os.truncate(path, path.stat().st_size - 1)
    assert checkpoint.newest(out).name == "step-00000002"
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "step-00000004 skipped: " in error and path.name in error


def test_a_full_disk_is_one_line_and_leaves_the_checkpoints_before(corpus, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    before = contents(out)
    args = dict(dp=2, steps=6, resume="auto")
    run = Run(2, flags(corpus, out, **args), tmp_path, limit=30_000)
    assert run.wait() == [2, 2], run.read()
    assert run.read().count("\n") == 1 and "optimizer.safetensors, tensor " in run.read()
    assert "File too large" in run.read() and before.items() <= contents(out).items()
    again = Run(2, flags(corpus, out, **args), tmp_path)
    assert again.wait() == [0, 0] and "resumed from" in again.read("stdout")
    assert not [*out.glob("*.tmp")]


def _main_with_nan(rank, *args):
    """From its fourth step on, rank 1 has a loss that is not finite."""
    calls = []

    def run(self, *args, run=pipeline.Pipeline.run):
        calls.append(args)
        return run(self, *args) * (math.nan if rank == 1 and len(calls) > 3 else 1)

    pipeline.Pipeline.run = run
    _main(rank, *args)


def test_five_steps_that_are_not_finite_end_the_run(corpus, tmp_path):
    argv = flags(corpus, tmp_path / "out", dp=2, steps=50, save_interval=2)
    run = Run(2, argv, tmp_path, fn=_main_with_nan)
    assert run.wait() == [1, 1]
    assert "not finite for 5 steps up to step 7; last good checkpoint: " in run.read()
    assert run.read().endswith("/out/step-00000006; a lower --lr may help\n")
    assert run.read().count("\n") == 1
    four, six = (tmp_path / f"out/step-{step:08d}" for step in (4, 6))
    assert [checkpoint.read_manifest(f)["updates"] for f in (four, six)] == [3, 3]
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        assert (four / name).read_bytes() == (six / name).read_bytes()


def test_what_is_not_finite_is_never_saved_over_what_is(corpus, tmp_path):
    """A step of 1e300 and the next ones: weights are infinite, or their squares are."""
    out, args = tmp_path / "out", dict(save_interval=1, dp=2, zero=1, warmup_steps=0)
    assert Run(2, flags(corpus, out, steps=2, **args), tmp_path).wait() == [0, 0]
    before = contents(out)
    run = Run(2, flags(corpus, out, steps=5, lr=1e308, min_lr=1e308, weight_decay=1e9,
                       resume="auto", **args), tmp_path)
    assert run.wait() == [1, 1] and "saved nothing: weights or moments" in run.read("stdout")
    assert contents(out) == before and run.read().count("\n") <= 1


def test_a_damaged_checkpoint_is_in_nobodys_way(corpus, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    spoil(out / "step-00000002", "manifest")
    run = Run(2, flags(corpus, out, dp=2, steps=6, resume="auto"), tmp_path)
    assert run.wait() == [0, 0] and "resumed from" in run.read("stdout")
    second = f"{out}/step-00000002"
    assert run.read() == (f"{second} skipped: {second}/manifest.json: damaged (it has no scale); "
                          "take another checkpoint\n")
    assert sorted(path.name for path in out.glob("step*")) == [
        f"step-{step:08d}" for step in (2, 4, 6)]
    assert checkpoint.newest(out).name == "step-00000006"


def test_a_second_run_in_one_folder_is_refused(corpus, tmp_path):
    one = Run(2, flags(corpus, tmp_path / "out", dp=2, steps=10**6), tmp_path)
    one.until(lambda: "step      2" in one.read("stdout"))
    two = Run(2, flags(corpus, tmp_path / "out", dp=2), tmp_path)
    assert two.wait() == [2, 2] and two.read() == (
        f"train.py: --out {tmp_path}/out: another run writes there; name another folder\n")
    one.signal(0, signal.SIGHUP)  # a closed terminal
    assert one.wait() == [0, 0] and "stopped by a signal" in one.read("stdout")


RANKS = """import os, sys, time
from pathlib import Path
rank, folder = os.environ["RANK"], Path(sys.argv[1])
# One write for a line: under python -u print() writes a line in parts, and three ranks write here
os.write(1, (os.environ["OMP_NUM_THREADS"] + " " + rank + "\\n").encode())
(folder / rank).touch()
while len([*folder.iterdir()]) < 3:
    time.sleep(0.01)
if rank == "0":
    {first}
time.sleep({others})
os.write(1, b"went on\\n")
"""


def launched_ranks(tmp_path, monkeypatch, capfd, first, others=0, grace=10):
    """(exit code of launch(), what its three ranks print). first: what rank 0 does when all ranks
    have started; others: seconds that the others sleep then."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(first=first, others=others))
    (tmp_path / "started").mkdir()
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, str(script), str(tmp_path / "started")])
    with as_it_was():
        returned = launch(3, grace)
    return returned, sorted(capfd.readouterr().out.splitlines())


def test_the_launcher_ends_ranks_that_go_on_after_one_has_failed(tmp_path, monkeypatch, capfd):
    """... when they have had their time. Ranks share the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    got = launched_ranks(tmp_path, monkeypatch, capfd, "sys.exit(3)", others=60, grace=0.3)
    assert got == (3, ["2 0", "2 1", "2 2"])


def test_the_launcher_waits_for_all_ranks_if_none_fails(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # the user's own
    got = launched_ranks(tmp_path, monkeypatch, capfd, "sys.exit(0)", others=0.5, grace=0)
    assert got == (0, ["5 0", "5 1", "5 2", "went on", "went on"])


def test_a_rank_that_is_killed_is_exit_code_1(tmp_path, monkeypatch, capfd):
    assert launched_ranks(tmp_path, monkeypatch, capfd, "os.kill(os.getpid(), 9)")[0] == 1


def test_a_second_signal_ends_and_nohup_stays_ignored():
    asked = []
    with as_it_was():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signals.save_on_stop(lambda: asked.append("save"))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGTERM)
        assert asked == ["save"] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signals.save_on_stop(lambda: asked.append("save"))
        signal.raise_signal(signal.SIGHUP)
        assert asked == ["save"] * 2


def _main_that_stops(rank, *args):
    """Rank 1 hangs before it has told its data."""
    def fingerprint(self, tell=Data.fingerprint):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return tell(self)

    Data.fingerprint = fingerprint
    _main(rank, *args)


def _main_with_bad_ids(rank, *args):
    """From its third batch on, rank 1 reads what is not in the vocabulary."""
    def check_ids(self, ids, path, check=Data.check_ids, calls=[0]):  # noqa: B006
        calls[0] += 1
        check(self, ids + VOCAB * (rank == 1 and calls[0] > 4), path)

    Data.check_ids = check_ids
    _main(rank, *args)


@pytest.mark.parametrize("fn,but,says,timeout", [
    (_main_that_stops, [1], "receive from rank 1", 25),
    (_main_with_bad_ids, [], " holds token id ", HANG)], ids=["stopped", "bad ids"])
def test_what_one_rank_meets_late_ends_all_with_one_line(
        corpus, tmp_path, fn, but, says, timeout):
    run = Run(3, flags(corpus, tmp_path / "out", dp=3, batch_size=6, timeout=timeout), tmp_path,
              fn=fn)
    assert set(run.wait(but=but)) == {1}
    lines = [line for line in run.read().splitlines() if "c10d" not in line]
    assert len(lines) == 1 and says in lines[0], lines


def test_ranks_that_meet_are_those_of_this_attempt(monkeypatch):
    """Restarted one after the other, over a store that has all of the last attempt, which some
    ranks of it never joined."""
    store, met = torch.distributed.HashStore(), []

    def attempt(restarts, delays):
        def come(delay):
            time.sleep(delay)
            return processes.name_attempt(store, 3)

        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        with ThreadPoolExecutor(3) as threads:
            names = {*threads.map(come, delays)}
        assert len(names) == 1
        met.extend(names)

    for restarts, delays in enumerate(((0, 0, 0), (0.3, 0), (0, 0.3, 0), (0.1,), (0.1, 0, 0.3))):
        attempt(restarts, delays)
    attempt(4, (0.1, 0.3, 0))  # not counted by torchrun: nodes have joined or left
    assert len({*met}) == 6


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_starts_is_named(rank, monkeypatch):
    server = torch.distributed.HashStore()
    monkeypatch.setattr(processes, "store", torch.distributed.PrefixStore("attempt 0", server))
    monkeypatch.setattr(processes, "place", (rank, 2))
    with pytest.raises(CommunicationError, match=f"^rank {rank}: waiting for rank {1 - rank} to "):
        processes.wait_for_start(server, 0.1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # on the other node
    processes.name_attempt(server, 2)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    with pytest.raises(CommunicationError, match=f"^rank {rank}: another node has restarted"):
        processes.wait_for_start(server, 60)


def test_a_library_that_never_comes_back_is_one_line(tmp_path):
    late = command("-c", "from run import processes\nimport sys, time\nsys.argv = ['train.py']\n"
                         "processes.dist.init_process_group = lambda *_, **more: time.sleep(999)\n"
                         f"processes.init('cpu', 0.2, 'file://{tmp_path}/store', 0, 1)")
    assert (late.returncode, late.stderr) == (
        1, "train.py: rank 0: waiting for all ranks to join: not within 0.2 s\n")


def _gives_up(rank, waits):
    time.sleep(waits[rank])
    return processes.speaks_for_all(f"receive from rank {(rank + 1) % 3}", 2)


def _meets_and_gives_up(rank, size, port, waits, folder, limit):
    processes.place = rank, size
    processes.last_words = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    os._exit(_gives_up(rank, waits))


@pytest.mark.parametrize("waits", [(0, 0.25, 0.6), (0, 0, 0)])
def test_one_of_all_that_give_up_says_why(tmp_path, waits):
    """... though each waits for the next one, and some are gone when others look."""
    assert sorted(Run(3, waits, tmp_path, fn=_meets_and_gives_up).wait()) == [0, 0, 1]


@pytest.mark.parametrize("log", ["full", "garbage"])
def test_outputs_that_fail_do_not_end_a_run(corpus, trained, tmp_path, log):
    """garbage: what a crash of a machine may leave."""
    out = shutil.copytree(trained, tmp_path / "out")
    path = out / "metrics.jsonl"
    if log == "full":
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/full")
    else:
        path.write_bytes(b'{"step": 0, "loss": 1}\n{"step": "x"}\n\xff\xfe[null]\n{"step": 3')
    run = Run(1, flags(corpus, out, steps=7, resume="auto"), tmp_path)
    assert run.wait() == [0] and "saved" in run.read("stdout"), run.read()
    lost = f"train.py: {path}: No space left on device; the run goes on without\n"
    assert run.read() == (lost if log == "full" else "")
    if log == "garbage":
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 4, 5, 6]


def _nan_on_one_rank(rank, cfg):
    trainer, data = train.Trainer(cfg, train.make_mesh(cfg, cfg.device), VOCAB), Data(cfg)
    before = [(tag.name, x.clone()) for tag, x in local_tensors(trainer, "weights")]
    param = next(iter(trainer.reducer.home))
    param.register_hook(lambda grad: grad * math.nan if rank == 1 else grad)
    norm, sums = trainer.step(data.training(cfg, 0, trainer.mesh), 1.0)
    after = local_tensors(trainer, "weights")
    assert math.isnan(norm) and math.isfinite(sums[0]) and replicas_agree(trainer)
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(before, after, strict=True))


@pytest.mark.parametrize("layout", [
    dict(dp=2, tp=2, pp=2), dict(dp=2, pp=2, zero=1), dict(dp=4, shard=2, zero=3)], ids=str)
def test_nan_in_one_ranks_gradients_changes_no_weight_anywhere(corpus, layout):
    cfg = config(corpus, **layout)
    pool(check(cfg, 1), _nan_on_one_rank, cfg)


def _node(rank, size, port, argv, folder, limit):
    """A rank alone on its node, in a working folder of its own."""
    os.chdir(Path(folder).parent / str(rank))
    _main(rank, size, port, argv, folder, limit)


@pytest.mark.parametrize("how,says", [
    ("flags", "has other flags than rank 0; all need the same"),
    ("out", "has other files in --out out than rank 0; all need the same"),
    ("checkpoint", "has other files in --resume last than rank 0; all need the same"),
    ("data", "has other data in data than rank 0; all need the same"),
])
def test_nodes_that_differ_are_refused_before_the_first_step(
        corpus, trained, tmp_path, how, says):
    for rank, step in enumerate((4, 2 if how == "checkpoint" else 4)):
        shutil.copytree(trained / f"step-{step:08d}", tmp_path / str(rank) / "last")
        shutil.copytree(corpus, tmp_path / str(rank) / "data")
    if how == "data":  # one token of 5000
        ids = np.memmap(tmp_path / "1" / "data" / "train.bin", "<u2", "r+")
        ids[4321] = (ids[4321] + 1) % VOCAB
        ids.flush()
    more = {"resume": "last"} if how == "checkpoint" else {}
    out = "out" if how == "out" else tmp_path / "out"
    argvs = [flags("data", out, dp=2, lr=lr, **more)
             for lr in (0.1, 0.2 if how == "flags" else 0.1)]
    run = Run(2, argvs, tmp_path, fn=_node)
    assert run.wait() == [2, 2]
    assert run.read() == f"train.py: rank 1 {says}\n" and "step" not in run.read("stdout")
    assert not list(tmp_path.rglob("out/step*"))


def _one_step(rank, cfg):
    trainer = train.Trainer(cfg, train.make_mesh(cfg, cfg.device), VOCAB)
    norm, sums = trainer.step(Data(cfg).training(cfg, 0, trainer.mesh), train.learning_rate(cfg, 0))
    return sums[0].item(), norm.item()


def test_random_flags_train_a_step_or_get_one_line(corpus, tmp_path, capsys):
    """... and where they train, loss and norm are those of one process."""
    rng = np.random.default_rng(5)
    values = {"dp": (0, 1, 2, 3, -1), "tp": (1, 1, 2, 4, 3, 0), "pp": (1, 1, 2, 3, 9),
              "zero": (0, 1, 2, 3, 4), "schedule": (*schedules.SCHEDULES, "wave"),
              "chunks": (0, 0, 1, 2),
              "microbatches": (0, 1, 2, 3, 5), "n_layer": (1, 2, 3), "n_head": (1, 2, 4, 6),
              "n_embd": (12, 24, 8, "x"), "block_size": (4, 8, 10**6), "batch_size": (4, 6, 12),
              "grad_clip": (0.0, 1.0, -1.0), "seed": (0, 7),
              "lr": (0.001, "nan"), "steps": (0, 3), "save_interval": (0, -2),
              "resume": ("no", "auto", "nowhere"), "timeout": (60.0, 0.0, 1e300),
              "recompute": (True, False), "sp": (True, True, False), "cp": (1, 2, 2, 2),
              "cp_attention": ("ring", "all-to-all"), "experts": (0, 4, 4, 6), "ep": (1, 1, 2),
              "top_k": (1, 2, 3), "shard": (0, 1, 2),
              "bogus": (1,)}
    refused, trained = [], []
    for _ in range(300):
        names = rng.choice(list(values), rng.integers(2, 9), replace=False)
        picked = {name: values[name][rng.integers(len(values[name]))] for name in names}
        if "shard" in picked:
            picked.setdefault("dp", 4)
        on = [name for name in ("recompute", "sp") if picked.pop(name, False)]
        argv = [*map(str, flags(corpus, tmp_path, **picked)), *("--" + name for name in on)]
        try:
            cfg = parse(argv)
            try:
                ranks = check(cfg, 1)
                Data(cfg)
            except ValueError as error:
                fail(error)
        except SystemExit as stop:
            line = capsys.readouterr().err
            assert stop.code == 2 and line.count("\n") == 1, (picked, line)
            refused.append(line)
        else:
            if ranks <= 8 and len(trained) < 40:
                trained.append((cfg, ranks))
    assert len(refused) > 100 and len(trained) == 40
    for cfg, ranks in trained:
        got = pool(ranks, _one_step, cfg)
        alone = Config(**{**vars(cfg), "dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0,
                          "shard": 1, "schedule": "1f1b", "chunks": 1, "microbatches": 1,
                          "recompute": False})
        (want,) = pool(1, _one_step, alone)
        for pair in got:
            close(pair, want, str(cfg))
    assert any(cfg.shard < cfg.dp for cfg, _ in trained)


def test_one_command_is_stopped_by_ctrl_c_and_sampled_from(tmp_path):
    (tmp_path / "text").write_text("".join(f"def f{i}(x): return x\n" for i in range(200)))
    done = command("data/prepare.py", tmp_path / "text", "--out", tmp_path / "data", "--tokenizer",
                   "bytes")
    assert done.returncode == 0, done.stderr
    argv = flags(tmp_path / "data", tmp_path / "out", tp=2, steps=10**6)
    run = start("train.py", *argv)
    for line in run.stdout:
        if line.startswith("step "):
            break
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=HANG)
    assert run.returncode == 0 and "stopped by a signal" in out and not err, err
    text = command("sample.py", "--out", tmp_path / "out", "--prompt", "\u00e9 def f", "--samples",
                   2, env={"PYTHONIOENCODING": "ascii"})
    assert text.stdout.count("def f") >= 2 and text.returncode == 0, text.stderr


@pytest.mark.parametrize("name,value,says", [
    ("out", "nowhere", "nowhere: no complete checkpoint there"),
    ("seed", -1, "--seed -1 must be at least 0, and below 2^63"),
    ("device", "xyz", "argument --device: invalid choice: 'xyz' "),
    ("data", "typo", "typo: no such folder of prepared data"),
    ("samples", 0, "--samples 0 must be from 1 to 1000"),
    ("temperature", "nan", "--temperature nan must be from 0 to 1e+308")])
def test_a_wrong_flag_of_sample_is_one_line(trained, name, value, says, capsys, monkeypatch):
    argv = ["sample.py", "--out", trained, f"--{name}", value]
    assert one_line(sample.main, argv, capsys, monkeypatch).startswith(f"sample.py: {says}")


def test_resuming_a_finished_run_ends_well(corpus, tmp_path):
    argv = flags(corpus, tmp_path / "out", dp=2, eval_interval=2, eval_batches=1, resume="auto")
    for _ in range(2):
        run = Run(2, argv, tmp_path)
        assert run.wait() == [0, 0], run.read()
        assert run.read("stdout").endswith("replicas agree\n") and "sample:" in run.read("stdout")
        assert re.search(r"MB on rank [01], the fullest, .* peak of the process \d+ MB, on rank "
                         r"[01]\n", run.read("stdout"))
    assert "resumed from" in run.read("stdout") and "nothing left to do" in run.read("stdout")
    run = Run(2, [*argv, "--steps", 3], tmp_path)
    assert run.wait() == [2, 2]
    assert run.read().endswith("step-00000004: is at step 4, past --steps 3\n"), run.read()


def test_a_resumed_run_says_how_its_learning_rate_jumps(corpus, trained, tmp_path):
    """4 steps lead to a rate of 0; in a schedule of 8 it is still high."""
    folder = trained / "step-00000004"
    rates = {}
    for steps in (8, 4):
        out = tmp_path / f"{steps}"
        run = Run(1, flags(corpus, out, resume=folder, steps=steps), tmp_path)
        assert run.wait() == [0], run.read()
        rates[steps] = run.read("stdout")
    assert "the learning rate goes on at 0.003, the checkpoint's run would have gone on at 0: " \
        "--steps was 4, is 8\n" in rates[8], rates[8]
    assert "learning rate goes on" not in rates[4]
