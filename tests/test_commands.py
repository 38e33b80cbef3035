"""Commands: a wrong flag is one line with its fix, before torch is imported; what a run says of
itself is true, line by line and message by message."""

import argparse
import io
import math
import re
import shlex
import time
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import patch

import pytest

import sample
import test_all
import train
from data import prepare
from mesh import Mesh
from pipeline import Pipeline
from run import weights
from run.flags import check_device, check_layout, parse, read_command_line
from run.log import METRICS, Log, peak_of_process
from run.watch import axis_of, story, watched
from tests.harness import (
    HERE,
    command,
    flags_of,
    make_trainer,
    one_line,
    ranks,
    records,
    refused,
    start,
)

# ---- flags ----

REFUSED = [  # words -> what the line says; where it says "try N", N has to be accepted
    ("--stepz 3", "unrecognized arguments: --stepz 3; --help lists the flags"),
    ("--step 3", "unrecognized arguments: --step 3"),
    ("--steps many", "argument --steps: invalid int value: 'many'"),
    ("--schedule wave", "argument --schedule: invalid choice: 'wave'"),
    ("--cp 0", "--cp 0 must be at least 1, and below 2^63"),
    ("--seed 9223372036854775808", "--seed 9223372036854775808 must be at least 0, and below 2^63"),
    ("--lr nan", "--lr nan must be at least 0, and below 2^63"),
    ("--tp 3", "--tp 3 must divide --n-head 4; try 1 or 2 or 4"),
    ("--n-embd 130", "--n-head 4 must divide --n-embd 130; try 1 or 2 or 5 or 10"),
    ("--tp 2 --cp 4 --cp-attention all-to-all", "--tp 2 x --cp 4 must divide --n-head 4; try 1 or"),
    ("--n-kv-head 2", "--n-kv-head 2 is for --arch llama, qwen2, qwen3"),
    ("--arch llama --n-kv-head 2 --tp 4", "--tp 4 must divide --n-kv-head 2; try 1 or 2"),
    ("--arch qwen3 --n-embd 12", "--n-embd 12 / --n-head 4: heads of 3 numbers, but rotary"),
    ("--cp 3", "--block-size 128 must be a multiple of 6, for --cp 3 x --tp 1; try 132"),
    ("--tp 4 --sp --block-size 6", "--block-size 6 must be a multiple of 4, for"),
    ("--dp 3", "--dp 3 x --microbatches 1 must divide --batch-size 32; try 1 or 2 or 4 or 8"),
    ("--dp 4 --shard 3", "--shard 3 must divide --dp 4; try 1 or 2 or 4"),
    ("--ep 3 --dp 4 --experts 12", "--ep 3 must divide --dp 4; try 1 or 2 or 4"),
    ("--ep 4 --dp 4 --shard 2 --experts 4", "--ep 4 must divide --shard 2; try 1 or 2"),
    ("--ep 2 --dp 2", "--ep 2 is for --experts; say how many"),
    ("--ep 2 --dp 2 --experts 5", "--experts 5 must be a multiple of 2, for --ep 2 x --tp 1; try"),
    ("--experts 4 --top-k 5", "--top-k 5 must be at most --experts 4"),
    ("--experts 8 --top-k 7", "--top-k 7 must divide 512, the hidden units of an MLP; try 1, 2"),
    ("--pp 7", "--pp 7 x --schedule 1f1b: 7 stages must be at most --n-layer + 2 = 6"),
    ("--pp 4 --schedule interleaved", "--pp 4 x --schedule interleaved: 8 stages must be at most"),
    ("--schedule interleaved --pp 2 --microbatches 1", "--microbatches 1 must be a multiple of 2"),
    ("--timeout 0", "--timeout 0.0 must be from 1 to 1000000 seconds"),
    ("--timeout 1e10", "--timeout 10000000000.0 must be from 1 to 1000000 seconds"),
    ("--pp 1000000000", "--pp 1000000000 x --schedule 1f1b: 1000000000 stages must be at most --n"),
    ("--pp 2000000 --n-layer 2000000", "--dp 1 x --tp 1 x --pp 2000000 x --cp 1 must be at most"),
    ("--watch", "--watch all: one rank sends no messages; try --tp 2"),
    ("--dp 2 --tp 2 --watch 9", "--watch 9 must be a rank, 0 to 3, or an axis of several"),
    ("--local-rank=0", "start the ranks by torchrun, which sets LOCAL_RANK, not --local-rank")]


@pytest.mark.parametrize("words,says", REFUSED)
def test_a_wrong_flag_is_one_line_whose_fix_is_accepted(words, says, capsys, monkeypatch):
    line = one_line(lambda: read_command_line("", 1), ["train.py", *words.split()], capsys,
                    monkeypatch)
    assert line.startswith(f"train.py: {says}"), line
    reason, _, fixes = line.partition("; try ")
    if fixes.startswith("--"):
        check_layout(parse([*words.split(), *fixes.split()]), 1)
        return
    # The flags whose product has to divide: the first gets the number, the others 1
    first, *others = re.findall(r"(--\S+) \d+", reason.partition(" must ")[0]) or [None]
    ones = [word for other in others for word in (other, "1")]
    for number in re.findall(r"\d+", fixes):
        check_layout(parse([*words.split(), first, number, *ones]), 1)


@pytest.mark.parametrize("words,world,want", [
    ("", 1, (1, 1)), ("--pp 2", 1, (1, 4)), ("--tp 2 --pp 2", 8, (2, 4)), ("--cp 2", 8, (4, 1)),
    ("--pp 2 --batch-size 6", 1, (1, 3)), ("--dp 4 --pp 3", 12, (4, 4)),
    ("--pp 3 --schedule interleaved --batch-size 36", 3, (1, 6)),
    ("--ep 2 --experts 4", 1, (2, 1))])
def test_data_ranks_and_microbatches_that_are_left_out_are_chosen(words, world, want):
    """Data ranks: all that the model leaves. Microbatches: the most that divide a data rank's
    sequences, up to 2 P; for interleaved, of the multiples of P."""
    cfg = parse(words.split())
    check_layout(cfg, world)
    assert (cfg.dp, cfg.microbatches) == want


def test_the_device_is_refused_where_gpus_or_kernels_are_missing():
    def device(words, gpus=8):
        cfg = parse(words.split())
        check_device(cfg, check_layout(cfg, 1), gpus)
        return cfg.device, cfg.collectives

    assert device("--dp 2", gpus=2) == ("cuda", "native")
    assert device("--dp 2", gpus=1) == ("cpu", "ring")
    for words, says in (("--dp 9 --batch-size 9 --device cuda", "9 processes here but 8 GPUs"),
                        ("--tp 2 --watch", "--watch all does not see .* add --collectives ring"),
                        ("--cp 2 --dtype float64", "--cp 2 x --dtype float64: .* heads of 32 such"),
                        ("--cp 2 --dtype bfloat16 --n-embd 16", "no heads of 4 such numbers")):
        with pytest.raises(ValueError, match=says):
            device(words)
    assert device("--tp 2 --watch --collectives ring")[0] == "cuda"
    assert device("--cp 2 --dtype float64 --cp-attention all-to-all")[0] == "cuda"


@pytest.fixture
def no_torch(tmp_path):
    """An environment in which `import torch` ends the process."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    return {"PYTHONPATH": str(tmp_path)}


def test_help_fits_a_screen_and_waits_for_no_torch(no_torch):
    done = command("train.py", "--help", env=no_torch)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) <= 70 and max(map(len, lines)) <= 110
    assert command("sample.py", "--help", env=no_torch).returncode == 0


@pytest.mark.parametrize("words,says", [
    ("train.py --tp 3", "train.py: --tp 3 must divide --n-head 4"),
    ("train.py --tp 2 --dp 2 --zero 9", "train.py: argument --zero: invalid choice: 9"),
    ("sample.py --tp 64", "sample.py: unrecognized arguments: --tp 64"),
    ("sample.py --device xyz", "sample.py: argument --device: invalid choice: 'xyz'"),
    ("sample.py --temperature nan", "sample.py: --temperature nan must be from 0 to 1e+308"),
    ("sample.py --seed -1", "sample.py: --seed -1 must be at least 0, and below 2^63"),
    ("-m run.weights --bogus", "weights.py: the following arguments are required: --to"),
    ("data/prepare.py --bogus", "prepare.py: unrecognized arguments: --bogus")])
def test_a_wrong_flag_of_any_command_waits_for_no_torch(words, says, no_torch):
    assert refused(*words.split(), env=no_torch).startswith(says)


def test_only_the_first_rank_of_a_machine_says_what_is_wrong():
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = [command("train.py", "--dp", 3, env={**env, "RANK": rank, "LOCAL_RANK": rank})
            for rank in "01"]
    assert [run.returncode for run in done] == [2, 2] and done[1].stderr == ""
    assert "= 3 does not match the 2 processes" in done[0].stderr
    assert "WORLD_SIZE=x in the environment is not a number; unset" in refused(
        "train.py", env={"WORLD_SIZE": "x"})


def test_what_sample_cannot_read_is_one_line(trained, tmp_path, capsys, monkeypatch):
    for words, says in (
            (["--out", "nowhere"], "nowhere: no complete checkpoint there"),
            (["--out", trained, "--data", tmp_path], f"{tmp_path}: no prepared data there; python "
             f"data/prepare.py SOURCE --out {tmp_path} writes this folder")):
        argv = ["sample.py", *words]
        assert one_line(sample.main, argv, capsys, monkeypatch) == f"sample.py: {says}\n"


class Parsed(Exception):
    """A command line was accepted."""


def stop_after(parser, args=None, parse_args=argparse.ArgumentParser.parse_args):
    parse_args(parser, args)
    raise Parsed


def test_the_commands_of_the_readme_parse(monkeypatch):
    mains = {"sample.py": sample.main, "data/prepare.py": prepare.main, "run.weights": weights.main}
    lines = re.findall(r"^    (?:pip .* && )?(python \S+ .*|torchrun .*)$",
                       (HERE / "README.md").read_text(), re.MULTILINE)
    seen = Counter()
    for line in lines:
        line = line.replace("--nproc-per-node 8 ", "")
        program, *words = [word for word in shlex.split(line, comments=True)[1:] if word != "-m"]
        seen[program] += 1
        if program == "train.py":
            check_layout(parse(words), 1)
        elif program in mains:
            monkeypatch.setattr("sys.argv", [program, *words])
            with (patch("argparse.ArgumentParser.parse_args", stop_after), pytest.raises(Parsed)):
                mains[program]()
        else:
            assert (HERE / program).exists() or find_spec(program), program
    assert seen["train.py"] >= 3 and seen["data/prepare.py"] and seen["sample.py"]


# ---- the log ----


def train_here(cfg, mesh=None):
    """Train in this process; mesh: alone. Returns the Log."""
    with patch("run.launch.on_stop"):  # which takes Ctrl-C
        return train.train(cfg, mesh or Mesh(), 0)


def nan_from(first):
    """A context in which the loss is nan from that step on."""
    run, calls = Pipeline.run, Counter()

    def diverging(pipeline, batches, *reducer):
        calls["step"] += 1
        return run(pipeline, batches, *reducer) * (math.nan if calls["step"] > first else 1)

    return patch.object(Pipeline, "run", diverging)


def late(log, *args, init=Log.__init__):
    """A Log that believes to be on a GPU."""
    init(log, *args)
    log.is_cuda = True


def test_the_first_ten_steps_every_twentieth_and_the_last_are_printed(corpus, tmp_path, capsys):
    train_here(flags_of(["--steps", "45", "--eval-interval", "0"], corpus, out=str(tmp_path)))
    said = capsys.readouterr().out
    steps = re.findall(r"^step +(\d+)  loss \d\.\d{4}  norm \d+\.\d{3}  lr \d\.\d\de-\d\d  \d+ ms  "
                       r"[\d,]+ tokens/s  comm \d+%  \d+ min \d+ s left$", said, re.MULTILINE)
    assert [*map(int, steps)] == [*range(10), 20, 40, 44]
    for step, record in enumerate(records(tmp_path)):
        assert record["step"] == step and 0 <= record["comm"] <= 1
        assert math.isclose(record["tokens_per_s"] * record["ms"] / 1e3, 36 * 8)


def slow_peer(rank, cfg):
    """Rank 1 begins each step 0.3 s late."""
    run = Pipeline.run

    def slow(*args):
        time.sleep(0.3 * rank)
        return run(*args)

    with patch.object(Pipeline, "run", slow), patch("run.launch.on_stop"):
        train.train(cfg, train.make_mesh(cfg, cfg.device), 0)


@pytest.mark.parametrize("words", ["--dp 2", "--dp 2 --zero 1", "--tp 2"])
def test_comm_is_the_share_of_a_step_in_which_its_rank_waits(corpus, tmp_path, words):
    cfg = flags_of([*words.split(), "--eval-interval", "0"], corpus, out=str(tmp_path))
    ranks(2, slow_peer, cfg)
    shares = [record["comm"] for record in records(tmp_path)]
    assert len(shares) == 3 and min(shares) >= 0 and 0.5 < max(shares) <= 1


def test_a_gpus_steps_are_read_one_step_late_and_are_the_same(corpus, tmp_path):
    found = []
    for out in (tmp_path / "at once", tmp_path / "late"):
        words = "--steps 7 --eval-interval 3 --save-interval 2"
        cfg = flags_of(words.split(), corpus, out=str(out))
        with patch.object(Log, "__init__", late) if out.name == "late" else nullcontext():
            assert train_here(cfg).ended_well
        found.append([{name: value for name, value in record.items()
                       if name not in ("ms", "tokens_per_s", "comm")} for record in records(out)])
    assert found[0] == found[1]
    assert [record["step"] for record in found[0]] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_run_gives_up_after_five_steps_that_are_not_finite(corpus, tmp_path, is_late, capsys):
    """It validates and saves no more, and names the last good checkpoint."""
    cfg = flags_of("--steps 50 --save-interval 5".split(), corpus, out=str(tmp_path))
    with nan_from(3), patch.object(Log, "__init__", late if is_late else Log.__init__):
        log = train_here(cfg)
    said = capsys.readouterr()
    assert log.gave_up and not log.ended_well and "validation" not in said.out
    assert said.err.endswith(f"up to step {7 + is_late}; last good checkpoint: "
                             f"{tmp_path}/step-00000005; a lower --lr may help\n")
    values = [record["loss"] for record in records(tmp_path)]
    assert values[3:] == [None] * (5 + is_late) and None not in values[:3]


def test_a_validation_is_in_bits_per_byte_beside_gzips():
    written, said = [], []
    data = SimpleNamespace(meta={"bytes_per_token": 4.0, "gzip_bits_per_byte": 2.0})
    log = SimpleNamespace(write=lambda **record: written.append(record), say=said.append, data=data)
    Log.validation(log, 7, 6 * math.log(2), last=True)
    assert math.isclose(written[0]["val_bits_per_byte"], 1.5)
    assert said[0].endswith("4.1589 nats per token, 1.5000 bits per byte (gzip -9: 2.0000)")


def test_one_command_trains_and_another_continues_a_text(tmp_path):
    """... with the losses of one process."""
    (tmp_path / "text").write_text("".join(f"def f{i}(x): return x\n" for i in range(200)))
    done = command("data/prepare.py", tmp_path / "text", "--out", tmp_path / "data", "--tokenizer",
                   "bytes")
    assert done.returncode == 0, done.stderr
    same = ["--data", tmp_path / "data", *"--n-layer 2 --n-embd 24 --block-size 16 --dtype float64 "
            "--batch-size 4 --steps 4 --device cpu --eval-interval 2".split()]
    for out, layout in (("four", "--tp 2 --pp 2"), ("one", "")):
        done = command("train.py", *same, "--out", tmp_path / out, *layout.split())
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert "replicas agree\na sample:\n  | " in done.stdout and "bits per byte" in done.stdout
    for four, one in zip(records(tmp_path / "four"), records(tmp_path / "one"), strict=True):
        for name in {"loss", "grad_norm", "lr", "val_loss"} & one.keys():
            assert math.isclose(four[name], one[name], rel_tol=1e-10), (four, one)
    done = command("sample.py", "--out", tmp_path / "four", "--prompt", "def é", "--samples", 2,
                   "--max-tokens", 20)
    assert done.returncode == 0 and done.stdout.count("def é") == 2, done.stderr
    assert refused("sample.py", "--out", tmp_path / "four", "--prompt", "").endswith("be empty\n")
    with open("/dev/full", "w") as full:
        process = start("sample.py", "--out", tmp_path / "four", "--max-tokens", 1, stdout=full)
    assert process.communicate(timeout=60) == (None, "sample.py: No space left on device\n")


# ---- --watch ----


def watch_a_step(rank, cfg):
    """(messages that this rank sent in its first step, {axis: bytes that its groups counted})."""
    trainer, data = make_trainer(cfg)
    mesh = trainer.mesh
    before = {group: group.bytes_sent for group in mesh.groups.values()}
    with watched(mesh) as sent:
        trainer.step(data.training(cfg, 0, mesh), 0.01)
    counted = Counter()
    for group, nbytes in before.items():
        counted[axis_of(group, mesh.sizes)] += group.bytes_sent - nbytes
    return sent, +counted


@pytest.mark.parametrize("words", [
    "--dp 2 --tp 2 --pp 2 --microbatches 3", "--dp 2 --zero 3 --microbatches 2",
    "--dp 4 --shard 2 --zero 2", "--tp 2 --sp --pp 2 --schedule zb-h1", "--cp 2 --tp 2",
    "--dp 2 --ep 2 --tp 2 --experts 4"])
def test_watch_tells_every_message_that_the_groups_count(corpus, words):
    cfg = flags_of(words.split(), corpus)
    found = ranks(cfg.dp * cfg.pp * cfg.cp * cfg.tp, watch_a_step, cfg)
    sent = [message for messages, _ in found for message in messages]
    counted = sum((counter for _, counter in found), Counter())
    told = story(sent, "all").splitlines()
    lines = [line for line in told if " -> " in line]
    sums = dict(re.findall(r"^([a-z+]+): (.*)$", "\n".join(told), re.MULTILINE))
    assert len(lines) == len(sent)
    assert sums == {axis: f"{sum(message[3] == axis for message in sent):,} messages, {nbytes:,} "
                          "bytes" for axis, nbytes in counted.items()}
    # A line names a collective, a file of the repository, and a function or method in the file
    for what in {message[4] for message in sent}:
        collective, file, function = re.fullmatch(r"(\w+), (\S+) (\S+)", what).groups()
        assert re.search(rf"^ *def {collective}\b", (HERE / "collectives.py").read_text(), re.M)
        source, = [*HERE.glob(file), *HERE.glob(f"transport/{file}")]
        for name in function.split("."):
            assert re.search(rf"^ *(def|class) {name}\b", source.read_text(), re.M), what
    # One rank's or one axis's lines are those in which it stands
    axes = {axis for key in counted for axis in key.split("+")}
    for which in ("1", *sorted(axes)):
        told = [line for line in story(sent, which).splitlines() if " -> " in line]
        places = {line: line.split(" ms ")[1].split()[:4] for line in lines}  # 0 -> 1 dp+tp
        assert told == [line for line, (src, _, dst, axis) in places.items()
                        if which in (src, dst, *axis.split("+"))] and told


@pytest.mark.parametrize("name,axes", [
    ("ep_tp", "ep+tp"), ("ep", "ep"), ("dp", "dp"), ("shard_ep_cp", "dp+cp"), ("shard_cp", "dp+cp"),
    ("rep", "dp"), ("pp_ends", "pp"), ("world", "dp+pp+cp+tp")])
def test_a_group_is_told_by_the_flags_along_which_its_ranks_differ(name, axes):
    """Experts' ranks alone are ep, also beside tensor ranks (--sp)."""
    sizes = {"rep": 2, "shard": 2, "pp": 2, "ep": 2, "cp": 2, "tp": 2}
    assert axis_of(SimpleNamespace(name=name), sizes) == axes


def train_natively(rank, cfg):
    train_here(cfg, train.make_mesh(cfg, cfg.device))


def test_comm_is_left_out_where_torchs_own_collectives_wait(corpus, tmp_path):
    words = "--dp 2 --collectives native --eval-interval 0".split()
    ranks(2, train_natively, flags_of(words, corpus, out=str(tmp_path)))
    assert len(records(tmp_path)) == 3 and not any("comm" in line for line in records(tmp_path))


def test_a_later_run_loses_no_line_of_an_earlier_one(corpus, tmp_path):
    """A run that goes on keeps the last validation; one that begins anew puts the file aside."""
    def metrics_after(*words):
        with patch("run.checkpoint.lock"):  # which is held until this process ends
            train_here(flags_of([*words, "--eval-interval", "2"], corpus, out=str(tmp_path)))
        return (tmp_path / METRICS).read_text()

    first = metrics_after("--steps", "3")
    assert [line["step"] for line in records(tmp_path)] == [0, 1, 2, 2, 3]
    second = metrics_after("--steps", "4", "--resume", "auto")
    assert second.startswith(first)
    assert [line["step"] for line in records(tmp_path)] == [0, 1, 2, 2, 3, 3, 4]
    metrics_after("--steps", "2")
    assert (tmp_path / f"{METRICS}.old-1").read_text() == second


def test_a_config_json_that_cannot_be_read_is_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").touch()
    words = ["train.py", "--init-from", str(tmp_path)]
    with patch("run.flags.sizes_of", side_effect=PermissionError(13, "Permission denied", "file")):
        said = one_line(lambda: read_command_line("", 1), words, capsys, monkeypatch)
    assert said == "train.py: file: Permission denied\n"


def test_a_peak_is_found_without_the_line_of_linux():
    with patch("builtins.open", lambda path: io.StringIO("Name: python\n")):
        assert peak_of_process() > 1 << 20


# ---- test_all.py ----


@pytest.mark.parametrize("words,page,given", [
    ("-n 0", True, ["tests", "-n", "0", "--quick"]),
    ("--full --maxfail 1", True, ["tests", "--maxfail", "1"]),
    ("-k zero", False, ["tests", "-k", "zero"]),
    ("tests/test_zero.py::test_x", False, ["tests/test_zero.py::test_x"])])
def test_only_k_and_files_choose_tests_and_leave_out_the_page(words, page, given, monkeypatch):
    called = []
    monkeypatch.chdir(HERE)
    monkeypatch.setattr("sys.argv", ["test_all.py", *words.split()])
    monkeypatch.setattr(test_all, "prove", lambda layouts: called.append("page"))
    monkeypatch.setattr(pytest, "main", lambda words: called.append(words))
    with pytest.raises(SystemExit):
        test_all.main()
    paths = [str(HERE / word) if word == "tests" else word for word in given]
    assert called[:-1] == ["page"] * page and called[-1][-len(paths):] == paths


def test_more_ranks_than_processes_are_refused_at_once():
    with pytest.raises(ValueError, match="9 ranks are more than"):
        ranks(9, print)
