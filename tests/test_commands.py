"""Commands: a wrong flag is one line with its fix, before torch is imported; what a run says of
itself is true, line by line and message by message."""

import math
import re
import shlex
import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest

import sample
import train
from mesh import Mesh
from pipeline import Pipeline
from run.flags import check_device, check_layout, parse, read_command_line, read_sample_flags
from run.log import METRICS, Log, axis_of, story, watched
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
    ("--cp 0", "--cp 0 must be from 1 to 9.22337e+18"),
    ("--lr nan", "--lr nan must be from 0 to 9.22337e+18"),
    ("--timeout 1e10", "--timeout 10000000000.0 must be from 1 to 1e+06"),
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
    ("--ep 2 --dp 2 --experts 5", "--experts 5 must be a multiple of 2, for --ep 2; try 6"),
    ("--tp 2 --sp --experts 5", "--experts 5 must be a multiple of 2, for --ep 1 x --tp 2; try 6"),
    ("--experts 4 --top-k 5", "--top-k 5 must be at most --experts 4"),
    ("--pp 7", "--pp 7 x --schedule 1f1b: 7 stages must be at most --n-layer + 2 = 6"),
    ("--pp 4 --schedule interleaved", "--pp 4 x --schedule interleaved: 8 stages must be at most"),
    ("--schedule interleaved --pp 2 --microbatches 1", "--microbatches 1 must be a multiple of 2"),
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
                        ("--tp 2 --watch", "--watch does not see .* add --collectives ring"),
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
    ("sample.py --temperature nan", "sample.py: --temperature nan must be at least 0"),
    ("sample.py --seed -1", "sample.py: --seed -1 must be at least 0"),
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


@pytest.mark.parametrize("env,says", [
    ({"WORLD_SIZE": "x"}, "WORLD_SIZE, RANK in the environment are not torchrun's .*'x'"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE, RANK in the environment are not torchrun's .*RANK"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, ".* MASTER_PORT expected")])
def test_an_environment_of_no_launcher_is_one_line(env, says):
    assert re.match(f"train.py: {says}", refused("train.py", "--device", "cpu", env=env))


def test_what_sample_cannot_read_is_one_line(trained, tmp_path, capsys, monkeypatch):
    argv = ["sample.py", "--out", trained, "--data", tmp_path]
    line = one_line(lambda: sample.main(read_sample_flags()), argv, capsys, monkeypatch)
    assert line == (f"sample.py: {tmp_path}: no prepared data there; python data/prepare.py SOURCE "
                    f"--out {tmp_path} writes this folder\n")


def test_the_commands_of_the_readme(tmp_path):
    """train.py takes its lines; those of "Your data" work one after the other, with small sizes."""
    readme = (HERE / "README.md").read_text()
    lines = re.findall(r"^    (?:.*python |torchrun .*)train\.py(.*)$", readme, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        check_layout(parse(shlex.split(line, comments=True)), 1)

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a").write_text("".join(f"def f{i}(x): return x\n" for i in range(200)))
    (tmp_path / "book.txt").write_text("A book. " * 500)
    small = "--n-layer 2 --n-embd 24 --block-size 16 --batch-size 4 --device cpu --eval-interval 2"
    steps = ["4", "6"]
    section = readme.partition("## Your data, resume, sample\n")[2].partition("\n## ")[0]
    commands = re.findall(r"^    python (.*)$", section, re.MULTILINE)
    assert len(commands) == 5
    for line in commands:
        words = shlex.split(line, comments=True)
        if words[0] == "train.py":
            words += [*small.split(), "--steps", steps.pop(0)]
        if words[0] != "-m":
            words[0] = HERE / words[0]
        done = command(*words, cwd=tmp_path, env={"PYTHONPATH": str(HERE)})
        assert done.returncode == 0, done.stderr
        if line.startswith("train.py"):
            assert "replicas agree\na sample:\n  | " in done.stdout
            assert "bits per byte" in done.stdout and not done.stderr
    assert (tmp_path / "gpt2-folder").is_dir()
    out = tmp_path / "out"
    assert refused("sample.py", "--out", out, "--prompt", "").endswith("be empty\n")
    with open("/dev/full", "w") as full:
        process = start("sample.py", "--out", out, "--max-tokens", 1, stdout=full)
    assert process.communicate(timeout=60) == (None, "sample.py: No space left on device\n")


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
                       r"[\d,]+ tokens/s  comm \d+%$", said, re.MULTILINE)
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

    with patch.object(Pipeline, "run", slow):
        train_here(cfg, train.make_mesh(cfg, cfg.device))


@pytest.mark.parametrize("words", ["--dp 2", "--tp 2", "--dp 2 --collectives native"])
def test_comm_is_the_share_of_a_step_in_which_its_rank_waits(corpus, tmp_path, words):
    cfg = flags_of([*words.split(), "--eval-interval", "0"], corpus, out=str(tmp_path))
    ranks(2, slow_peer, cfg)
    shares = [record.get("comm") for record in records(tmp_path)]
    if "native" in words:  # the log cannot see where torch's own collectives wait
        assert shares == [None] * 3
    else:
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


def test_a_validation_is_in_bits_per_byte():
    written, said = [], []
    data = SimpleNamespace(meta={"bytes_per_token": 4.0})
    log = SimpleNamespace(write=lambda **record: written.append(record), say=said.append, data=data)
    Log.note_validation(log, 7, 6 * math.log(2))
    assert math.isclose(written[0]["val_bits_per_byte"], 1.5)
    assert said[0].endswith("4.1589 nats per token, 1.5000 bits per byte")


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
    "--dp 2 --tp 2 --pp 2 --microbatches 3", "--dp 4 --shard 2 --zero 3", "--cp 2 --tp 2 --sp",
    "--dp 2 --ep 2 --tp 2 --experts 4"])
def test_watch_tells_every_message_that_the_groups_count(corpus, words):
    cfg = flags_of(words.split(), corpus)
    found = ranks(cfg.dp * cfg.pp * cfg.cp * cfg.tp, watch_a_step, cfg)
    sent = [message for messages, _ in found for message in messages]
    counted = sum((counter for _, counter in found), Counter())
    told = story(sent).splitlines()
    lines = [line for line in told if " -> " in line]
    sums = dict(re.findall(r"^([a-z+]+): (.*)$", "\n".join(told), re.MULTILINE))
    assert len(lines) == len(sent)
    assert sums == {axis: f"{sum(message[3] == axis for message in sent):,} messages, {nbytes:,} "
                          "bytes" for axis, nbytes in counted.items()}
    # A line names a collective, a file of the root, and a function or method in the file
    for what in {message[4] for message in sent}:
        collective, file, function = re.fullmatch(r"(\w+), (\S+) (\S+)", what).groups()
        assert re.search(rf"^ *def {collective}\b", (HERE / "collectives.py").read_text(), re.M)
        for name in function.split("."):
            assert re.search(rf"^ *(def|class) {name}\b", (HERE / file).read_text(), re.M), what


@pytest.mark.parametrize("name,axes", [
    ("ep_tp", "ep+tp"), ("ep", "ep"), ("dp", "dp"), ("shard_ep_cp", "dp+cp"), ("shard_cp", "dp+cp"),
    ("rep", "dp"), ("pp_ends", "pp"), ("world", "dp+pp+cp+tp")])
def test_a_group_is_told_by_the_flags_along_which_its_ranks_differ(name, axes):
    """Experts' ranks alone are ep, also beside tensor ranks (--sp)."""
    sizes = {"rep": 2, "shard": 2, "pp": 2, "ep": 2, "cp": 2, "tp": 2}
    assert axis_of(SimpleNamespace(name=name), sizes) == axes


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
