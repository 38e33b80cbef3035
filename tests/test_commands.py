"""Commands: bad flags and bad environments are one line and exit code 2."""

import json
import math
import re
import socket
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import train
from collectives import naming
from run import processes, signals
from run.config import check
from run.launch import start
from run.processes import out_of_memory
from sizes import peak_flops
from tests.harness import HERE, config
from tests.runs import Run, command, flags, one_line


@pytest.mark.parametrize("flags,says", [
    ("--tp 3", "--tp 3 must divide --n-head 4; try 1 or 2 or 4"),
    ("--pp 7", "--pp 7 x --chunks 1 must be at most --n-layer + 2 = 6"),
    ("--dp 3", "--dp 3 must divide --batch-size 32"),
    ("--microbatches 5", "must divide --batch-size 32"),
    ("--schedule wave", "invalid choice: 'wave'"),
    ("--block-size 9999", "--block-size 9999 is longer than"),
    ("--out /proc/nowhere", "cannot be written"),
    ("--device cuda", "--device cuda"),
    *((f"--lr {value}", f"--lr {value} must be from 0 to 1e+308")
      for value in ("nan", "inf", "-1.0")),
    ("--n-embd 130", "--n-head 4 must divide --n-embd 130; try 1 or 2 or 5 or 10"),
    ("--n-embd 100000000", "--n-embd 100000000 must be from 1 to 1,000,000"),
    ("--n-layer 1000000000", "must be from 1 to 1,000,000"),
    ("--batch-size 1000000000", "must be from 1 to 1,000,000"),
    ("--stepz 3", "unrecognized arguments"),
    ("--steps many", "invalid int value"),
    ("--schedule interleaved --pp 2 --microbatches 1", "1 must be a multiple of --pp 2"),
    ("--cp 3", "--block-size 8 must be a multiple of 6, for --cp 3, --tp 1, --sp False; try "
               "12"),
    ("--tp 4 --sp --block-size 6", "--block-size 6 must be a multiple of 4, for --cp 1, --tp "
                                   "4, --sp True; try 8"),
    ("--cp 2 --tp 4 --sp --block-size 12", "12 must be a multiple of 8, for --cp 2, --tp 4, "
                                           "--sp True; try 16"),
    ("--cp 4 --tp 2 --cp-attention all-to-all", "--tp 2 x --cp 4 must divide --n-head 4; "
     "try 1 or 2 or 4"),
    ("--cp 0", "--cp 0 must be from 1 to 1,000,000"),
    ("--ep 2 --dp 2", "--ep 2 is for --experts"),
    ("--ep 2 --dp 1 --experts 4", "--ep 2 must divide --dp 1; try 1"),
    ("--ep 4 --dp 4 --shard 2 --experts 4", "--ep 4 must divide --shard 2; try 1 or 2"),
    ("--dp 4 --shard 3", "--shard 3 must divide --dp 4; try 1 or 2 or 4"),
    ("--shard 1000000000", "--shard 1000000000 must be from 0 to 1,000,000"),
    ("--ep 2 --dp 2 --experts 5", "--experts 5 must be a multiple of 2, for --ep 2, --tp 1; "
                                  "try 6"),
    ("--experts 4 --top-k 5", "--top-k 5 must be at most --experts 4"),
    ("--experts 8 --top-k 7", "--top-k 7 must divide 4 x --n-embd 128"),
    (f"--resume {'x' * 5000}", "File name too long"),
])
def test_bad_input_is_one_line_and_exit_code_2(corpus, tmp_path, flags, says, capsys, monkeypatch):
    if flags == "--device cuda" and torch.cuda.is_available():
        flags += " --dp 32"
    base = f"train.py --device cpu --block-size 8 --data {corpus} --out {tmp_path}/out {flags}"
    monkeypatch.setattr(train, "train", lambda *args: pytest.fail("went on"))
    assert says in one_line(train.main, base.split(), capsys, monkeypatch)


TWO_RANKS = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("words", [
    "train.py --help", "train.py --stepz 3", "train.py --tp 3", "train.py --tp 2 --dp 2 --zero 9",
    "sample.py --bogus", "-m run.export --bogus", "data/prepare.py --bogus"])
def test_help_and_wrong_flags_do_not_wait_for_torch(words):
    run = command("-X", "importtime", *words.split())
    imported = re.findall(r"^import time:.*\| +(\S+)$", run.stderr, re.MULTILINE)
    said = [line for line in run.stderr.splitlines() if not line.startswith("import time:")]
    helped = words.endswith("--help")
    assert (run.returncode, len(said)) == ((0, 0) if helped else (2, 1)), said
    assert "argparse" in imported and "torch" not in imported


@pytest.mark.parametrize("env,says", [
    ({"WORLD_SIZE": "2"}, "RANK= in the environment is not a whole number from 0 to 1; unset"),
    ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc in the environment is not a whole number from 1 to"),
    ({"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1 in"), ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in"),
    ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE=2.0 in"), ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE=999"),
    ({"WORLD_SIZE": "\u0662"}, "WORLD_SIZE=\u0662 in"),  # a digit, but not of ASCII
    ({**TWO_RANKS, "RANK": "5"}, "RANK=5 in the environment is not a whole number from 0 to 1"),
    ({**TWO_RANKS, "RANK": "5", "LOCAL_RANK": "5"}, "RANK=5 in"),  # nobody's rank: it speaks
    ({**TWO_RANKS, "RANK": "-1"}, "RANK=-1 in"),
    ({**TWO_RANKS, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 in"),
    ({**TWO_RANKS, "LOCAL_RANK": "abc"}, "LOCAL_RANK=abc in"),
    *(({**TWO_RANKS, "MASTER_PORT": port}, f"MASTER_PORT={port} in the environment is not a whole "
       "number from 1 to 65535") for port in ("99999", "abc", "-1", "", "0")),
    ({**TWO_RANKS, "MASTER_ADDR": ""}, "WORLD_SIZE=2 in the environment, but no MASTER_ADDR"),
    ({**TWO_RANKS, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 in"),
    ({**TWO_RANKS, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 in"),
    ({"TORCHELASTIC_RESTART_COUNT": "abc"}, "TORCHELASTIC_RESTART_COUNT=abc in"),
    ({"NANOPARALLEL_PARENT": "abc"}, "NANOPARALLEL_PARENT=abc in"),
    ({"NANOPARALLEL_PARENT": "-5"}, "NANOPARALLEL_PARENT=-5 in"),
    ({**TWO_RANKS, "NANOPARALLEL_STORE": "file:///a?rank=1&world_size=2"},
     "NANOPARALLEL_STORE=file:///a?rank=1&world_size=2 in the environment is not the store"),
    ({"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": ""}, "--tp 0 must be from 1")],
    ids=lambda x: str(x)[:60])
def test_an_environment_that_is_not_torchruns_is_one_line(env, says, capsys, monkeypatch):
    """... of each process, because none of them is a rank whose first rank could speak."""
    for name in (*TWO_RANKS, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT",
                 "NANOPARALLEL_PARENT", "NANOPARALLEL_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert says in one_line(lambda: start("", ["--tp", "0"]), ["train.py"], capsys, monkeypatch)


def test_a_pod_without_local_rank_is_the_first_of_its_machine(monkeypatch):
    """RANK and WORLD_SIZE alone: a process for each machine, whose errors are to be printed."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert signals.local_rank() == 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert signals.local_rank() == 1


def test_more_ranks_than_gpus_fall_back_to_the_cpu_and_say_so(corpus, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    cfg = config(corpus, dp=2, device="auto")
    check(cfg, 2)
    assert cfg.device == "cpu" and "2 processes for 1 GPUs" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--device cuda"):
        check(config(corpus, dp=2, device="cuda"), 2)


def test_a_full_gpu_is_one_line_that_says_what_to_try(corpus, tmp_path, monkeypatch):
    def full(*args):
        with naming("rank 0: all_reduce of group dp"):  # which is not to blame
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 "
                                         "has a total capacity of 79.11 GiB of which ...")

    def end(error, timeout):
        raise SystemExit(error)

    monkeypatch.setattr(train, "train", full)
    monkeypatch.setattr(processes, "give_up", end)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 79.1e9)
    monkeypatch.setattr(sys, "argv", f"train.py --device cpu --data {corpus} --block-size 8 --out "
                        f"{tmp_path} --batch-size 6".split())
    says = "rank 0: out of memory on the GPU; peak so far 79.1 GB; try "
    with pytest.raises(SystemExit, match=f"^{says}--recompute or --microbatches 2$"):
        train.main()
    cfg = config(corpus, dp=2, zero=2, batch_size=2, microbatches=1, recompute=True)
    assert out_of_memory(cfg).endswith("79.1 GB; try --zero 3")
    cfg.zero = 3
    assert out_of_memory(cfg).endswith("; try a smaller --batch-size")


def test_heads_that_the_rings_gpu_kernels_refuse_are_refused(corpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    shape = {"device": "cuda", "cp": 2, "n_head": 4}
    for dtype, size in (("float64", 8), ("bfloat16", 4), ("float16", 264), ("float32", 6)):
        with pytest.raises(ValueError, match=f"^--cp 2, --dtype {dtype}: heads have {size} "):
            check(config(corpus, dtype=dtype, n_embd=4 * size, **shape), 1)
        check(config(corpus, dtype=dtype, n_embd=4 * size, cp_attention="all-to-all", **shape), 1)
    for dtype, size in (("bfloat16", 256), ("float16", 8), ("float32", 260)):
        check(config(corpus, dtype=dtype, n_embd=4 * size, **shape), 1)


@pytest.mark.parametrize("gpu,tflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835),
    ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312), ("Quadro P400", 0),
    ("Tesla V100-PCIE-16GB", 112), ("Tesla V100-SXM2-32GB", 125)])
def test_each_card_has_its_own_peak(gpu, tflops):
    assert peak_flops(gpu) == 1e12 * tflops


def test_bad_input_under_torchrun_speaks_from_one_rank(corpus):
    runs = [command("train.py", "--dp", 3, "--data", corpus, env={
        "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1"}) for rank in "01"]
    assert [run.returncode for run in runs] == [2, 2]
    assert "= 3 does not match the 2 processes" in runs[0].stderr and runs[1].stderr == ""


def test_no_folder_for_temporary_files_is_one_line(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    argv = ["train.py", *flags(corpus, tmp_path / "out", dp=2)]
    assert "let TMPDIR name a folder" in one_line(
        lambda: start("", [str(word) for word in argv[1:]]), argv, capsys, monkeypatch)


def test_two_ranks_without_local_rank_train(corpus, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    argv = ["train.py", *flags(corpus, tmp_path / "out", dp=2, steps=2)]
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(command, *argv, env={
            "WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port})
                 for rank in "01"]
    assert [rank.result().returncode for rank in ranks] == [0, 0], ranks[0].result().stderr


def test_a_safe_path_finds_the_files_all_the_same(corpus, tmp_path):
    argv = flags(corpus, tmp_path / "out", dp=2, steps=1)
    for words in (["train.py", *argv], ["sample.py", "--help"]):
        run = command(HERE / words[0], *words[1:], env={"PYTHONSAFEPATH": "1"}, cwd=tmp_path)
        assert run.returncode == 0, run.stderr


def test_one_command_relaunches_itself_and_has_the_losses_of_one_process(corpus, tmp_path):
    """It says at once what it trains: the launcher does not import torch, which takes a second. A
    rank imports no compiler, and for a sample none: torch._dynamo and sympy take another one."""
    def argv(name, **more):
        return flags(corpus, tmp_path / name, **more)

    def train_py(name, **more):
        """What it prints, and the modules that its processes import (ranks get -X, too)."""
        run = command("-X", "importtime", "train.py", *argv(name, **more),
                      env={"TMPDIR": str(tmp_path / "a name with spaces")})
        assert run.returncode == 0 and run.stdout.endswith("replicas agree\n"), run.stderr
        return run.stdout, Counter(re.findall(r"\| +(\S+)", run.stderr))

    more = dict(steps=12, eval_interval=6, eval_batches=2)
    (tmp_path / "a name with spaces").mkdir()
    with ThreadPoolExecutor(2) as threads:
        runs = (threads.submit(train_py, "alone", eval_interval=9),
                threads.submit(train_py, "four", tp=2, pp=2, **more))
    (_, rank), (said, four_and_launcher) = (run.result() for run in runs)
    assert four_and_launcher["argparse"] == 5 and four_and_launcher["torch"] == 4
    assert rank["torch"] == 1 and not rank.keys() & {"torch._dynamo", "sympy"}
    assert said.startswith("GPT of 2 layers, 8 wide, on 4 ranks: 2 pipeline x 2 tensor; "
                           "loading torch\n")
    assert [int(n) for n in re.findall(r"^step +(\d+)  loss", said, re.MULTILINE)] == [
        *range(10), 11]  # the first ten, and the last
    assert "validation: " in said and "--" not in said

    one = Run(1, argv("one", **more), tmp_path)
    assert one.wait() == [0], one.read()
    logs = [[json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
            for name in ("one/metrics.jsonl", "four/metrics.jsonl")]
    assert len(logs[0]) == len(logs[1]) == 12 + 2
    for one, four in zip(*logs, strict=True):
        assert one.keys() == four.keys()
        for key in {"loss", "grad_norm", "lr", "val_loss", "val_bits_per_byte"} & one.keys():
            assert math.isclose(one[key], four[key], rel_tol=1e-10), (key, one, four)
        if "ms" in one:
            assert math.isclose(one["tokens_per_s"] * one["ms"] / 1e3, 4 * 8)
