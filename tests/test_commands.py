"""Commands: bad flags, bad data and bad environments are one line and exit code 2."""

import gzip
import json
import math
import os
import random
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import torch

import train
from collectives import naming
from data.batches import Data, DataError, load_tokenizer
from data.prepare import (
    BYTES,
    PATTERN,
    encode,
    learn_bpe,
    make_encoding,
    prepare,
    read_source,
    token_type,
    train_and_val,
    write_whole,
)
from mesh import Mesh
from run import processes, signals
from run.config import check
from run.launch import start
from run.processes import out_of_memory
from sizes import peak_flops
from tests.harness import HERE, config
from tests.runs import Run, command, flags, one_line

FORGED = {  # meta.json: a text, or what is put into a sound one
    "meta": "{}", "deep": "[" * 100_000, "list": "[1]", "binary": "\\x00\u2028",
    "twice": '{"vocab_size": 67, "vocab_size": 68}', "huge": {"vocab_size": 10**12},
    "infinite": {"vocab_size": math.inf}, "negative": {"vocab_size": -5},
    "float": {"vocab_size": 67.0}, "true": {"vocab_size": True}, "tokenizer": {"tokenizer": 7},
    "gone-vocabulary": {"tokenizer": "bpe"}, "zero": {"bytes_per_token": 0},
    "letters": {"bytes_per_token": "abc"}, "gzip": {"gzip_bits_per_byte": []},
    "pattern": {"pattern": ""}, "bytes": {"tokenizer": "bytes", "vocab_size": 300}}


def damaged(corpus, tmp_path, how):
    folder = tmp_path / "data"
    folder.mkdir()
    for path in Path(corpus).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if how == "missing":
        (folder / "val.bin").unlink()
    elif how in FORGED:
        meta = json.loads((folder / "meta.json").read_text())
        text = FORGED[how]
        (folder / "meta.json").write_text(text if type(text) is str else json.dumps(meta | text))
    elif how == "pipe":
        (folder / "train.bin").unlink()
        os.mkfifo(folder / "train.bin")
    elif how == "device":
        (folder / "meta.json").unlink()
        (folder / "meta.json").symlink_to("/dev/null")
    elif how == "vocabulary":
        (folder / "vocab.tiktoken").write_text("AAAA 0\nAAAB x\n")
        (folder / "meta.json").write_text('{"vocab_size": 67, "tokenizer": "bpe"}')
    elif how == "truncated":
        (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-3])
    else:
        np.full(5000, 67, "<u2").tofile(folder / "train.bin")
    return folder


@pytest.mark.parametrize("flags,says", [
    ("--tp 3", "--tp 3 must divide --n-head 4; try 1 or 2 or 4"),
    ("--pp 7", "--pp 7 x --chunks 1 must be at most --n-layer + 2 = 6"),
    ("--dp 3", "--dp 3 must divide --batch-size 32"),
    ("--microbatches 5", "must divide --batch-size 32"),
    ("--schedule wave", "invalid choice: 'wave'"),
    ("--block-size 9999", "--block-size 9999 is longer than"),
    ("--data missing", "val.bin is missing"),
    ("--data truncated", "not a whole number of uint16; python data/prepare.py SOURCE --out"),
    ("--data pipe", "train.bin is not a regular file"),
    ("--data device", "meta.json is not a regular file"),
    ("--data beyond", "but the vocabulary of"),
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
    *((f"--data {how}", "data is damaged (") for how in FORGED),
    ("--data vocabulary", "data is damaged ("),
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
    how = flags.split()[-1]
    if flags.startswith("--data"):
        flags = f"--data {damaged(corpus, tmp_path, how)}"
    else:
        flags += f" --data {corpus}"
    base = f"train.py --device cpu --block-size 8 --out {tmp_path}/out {flags}"  # the last counts
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


def test_prepare_splits_learns_and_decodes_to_the_same_text(tmp_path):
    text = "".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(400))
    (tmp_path / "corpus.txt").write_text(text)
    for tokenizer in ("bpe", "bytes"):
        metas = [prepare([tmp_path / "corpus.txt"], tmp_path / name, tokenizer, 300)
                 for name in ("a", "b")]
        assert metas[0] == metas[1] and metas[0]["vocab_size"] <= 300
        ids = [np.fromfile(tmp_path / "a" / f"{s}.bin", "<u2").tolist() for s in ("train", "val")]
        decoded = "".join(load_tokenizer(tmp_path / "a").decode(part) for part in ids)
        assert decoded == text + "\n"
        assert math.isclose(metas[0]["bytes_per_token"],
                            len(load_tokenizer(tmp_path / "a").decode(ids[1])) / len(ids[1]))


def test_train_and_val_share_no_text_and_are_the_same_on_every_machine():
    """Files come in the order of a folder's listing, some of them twice."""
    docs = [(f"f{i}", f"text {i}\n" * (1 + i % 3)) for i in range(200)]
    copies = [(f"copy{i}", text) for i, (_, text) in enumerate(docs[::7])]
    train, val = train_and_val([*docs, *copies])
    assert sorted([*train, *val]) == sorted(text + "\n" for _, text in docs)
    assert train_and_val([*copies, *docs[::-1]]) == (train, val)
    total, held = (len("".join(texts)) for texts in ([*train, *val], val))
    assert total / 20 <= held <= total / 10


def test_one_large_text_is_cut_at_the_end_of_a_line():
    text = "".join(f"line {i}\n" for i in range(1000))
    (train,), (val,) = train_and_val([("a", text)])
    assert train + val == text + "\n" and train.endswith("\n") and val.startswith("line ")
    assert 0.89 < len(train) / len(text) < 0.901


def test_a_folders_own_products_and_hidden_files_are_no_text(tmp_path):
    for name in ("a.txt", "b/c.py", "train.bin", "b/meta.json", ".git/config", "b/.hidden",
                 "vocab.tiktoken", "b/val.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "image").write_bytes(b"\xff\xfe")
    assert sorted(read_source(tmp_path)) == [("a.txt", "a.txt"), ("b/c.py", "b/c.py")]


def test_files_of_a_folder_that_are_skipped_are_counted(tmp_path, capsys):
    for i in range(10):
        encoding = {0: "cp1252", 1: "utf-16", 2: "utf-16-le", 3: "utf-8-sig"}.get(i, "utf-8")
        (tmp_path / f"{i}.txt").write_text("a café\n" if i else "é", encoding=encoding)
    (tmp_path / "4.txt.gz").write_bytes(gzip.compress(b"text"))
    assert [text for _, text in read_source(tmp_path)] == ["a café\n"] * 7
    said = capsys.readouterr().out
    where = f"of 11 files of {tmp_path}"
    assert f"skipped 3 {where}: not UTF-8 text: has bytes of 0 (1.txt, ...)\n" in said
    assert f"skipped 1 {where}: not UTF-8 text (0.txt)\n" in said


def test_gpt2s_tokenizer_ends_each_text(tmp_path, monkeypatch):
    """Also where few texts are cut at a line."""
    words = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=BYTES,
                              special_tokens={"<|endoftext|>": 50256})
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: words)
    for number, end_tokens in ((40, 40), (3, 4)):
        docs = [tmp_path / f"{number}.{i}" for i in range(number)]
        for i, path in enumerate(docs):
            path.write_text(f"Story {i} says <|endoftext|>.\n" * 100)
        meta = prepare(docs, tmp_path / f"of {number}", "gpt2")
        ids = [np.fromfile(tmp_path / f"of {number}" / f"{split}.bin", "<u2")
               for split in ("train", "val")]
        assert sum((part == 50256).sum() for part in ids) == end_tokens
        assert ids[0][-1] == ids[1][-1] == 50256 and meta["val_tokens"] == len(ids[1])


@pytest.mark.parametrize("words,width", [(256, 2), (65536, 2), (65537, 4)])
def test_tokens_have_16_bits_where_these_are_enough(words, width):
    assert np.dtype(token_type(words)).itemsize == width


def test_gzips_bits_are_those_of_the_validation_text(tmp_path):
    (tmp_path / "text").write_text("".join(f"def f{i}(x): return x\n" for i in range(300)))
    meta = prepare([tmp_path / "text"], tmp_path / "data", "bytes")
    val = (tmp_path / "data" / "val.bin").read_bytes()[::2]  # tokens of 16 bits are bytes
    assert meta["gzip_bits_per_byte"] == 8 * len(gzip.compress(val, 9)) / len(val)
    assert meta["val_bytes"] == len(val) == meta["val_tokens"]


def test_a_folder_that_is_half_replaced_is_not_marked_as_complete(tmp_path, monkeypatch):
    """Other files are under way. If they are the same, other processes may go on to read."""
    old = {"train.bin": b"1", "val.bin": b"2", "meta.json": b"{}"}

    def replaced_until_it_fails(files, at):
        def replace(source, target, usual=os.replace):
            if Path(target).name == at:
                raise OSError(5, "Input/output error")
            usual(source, target)

        write_whole(tmp_path, old)
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replace)
            with pytest.raises(ValueError, match="cannot be written"):
                write_whole(tmp_path, files)
        return (tmp_path / "meta.json").exists()

    for at in old:
        assert not replaced_until_it_fails({**old, "meta.json": b'{"x": 1}'}, at)
        assert replaced_until_it_fails(old, at)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(old)


def test_a_file_that_is_cut_off_during_the_run_is_named(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "data")
    cfg, path = config(str(tmp_path / "data"), microbatches=1), tmp_path / "data" / "train.bin"
    data = Data(cfg)
    data.training(cfg, 0, Mesh(dp=1))
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(DataError, match="train.bin was cut off during the run"):
        data.training(cfg, 0, Mesh(dp=1))


def test_the_phases_of_prepare_are_lines_in_a_file_and_one_line_on_a_terminal(
        tmp_path, capsys, monkeypatch):
    (tmp_path / "text").write_text("some of these words come twice\n" * 100)
    phases = [f"reading {tmp_path}/text", "learning 270 tokens", "encoding train.bin",
              "encoding val.bin"]
    prepare([tmp_path / "text"], tmp_path / "file", "bpe", 270)
    assert capsys.readouterr().out.splitlines()[:-3] == phases
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    prepare([tmp_path / "text"], tmp_path / "terminal", "bpe", 270)
    shown, last = capsys.readouterr().out.rsplit("\r", 1)
    assert last.count("\n") == 3 and "\n" not in shown
    assert shown.split("\r")[:3] == [f"\x1b[K{phases[0]}", f"\x1b[K{phases[1]}",
                                     f"\x1b[K{phases[1]}: 257"]


def test_the_vocabulary_is_that_of_counting_every_pair_anew():
    rng = random.Random(1)
    for _ in range(50):
        text = "".join(rng.choices("aab ", k=400))
        words = [[bytes([b]) for b in word.encode()] for word in regex.findall(PATTERN, text)]
        learned, want = learn_bpe(text, 280), dict(BYTES)
        while len(want) < len(learned):
            count = Counter(a + b for word in words for a, b in pairwise(word))
            token = min(count, key=lambda token: (-count[token], token))
            want.setdefault(token, len(want))
            for word in words:
                for i in range(len(word)):
                    if b"".join(word[i : i + 2]) == token and len(word) > i + 1:
                        word[i : i + 2] = [token]
        assert learned == want


def test_a_long_text_is_encoded_in_pieces_as_it_is_whole():
    text = "def f(x):\n\n    return x_\n" * 20_000
    enc = make_encoding("bpe", learn_bpe(text, 270))
    with ThreadPoolExecutor(2) as pool:
        assert encode(enc, [text], "text", pool).tolist() == enc.encode_ordinary(text)
