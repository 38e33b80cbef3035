"""What is read is what runs: an edit of any file of the root, or of transport/, acts in every run
whose layout needs it."""

import ast
import importlib
import inspect
import shutil

import pytest

from run.config import check
from tests.harness import HERE, _train, config
from tests.pool import pool
from tests.runs import command
from tests.test_layouts import layouts


def broken(*args, **more):
    raise ZeroDivisionError("this file runs")


def function_of(file, name):
    """The function "file", "name", or "Class.name"."""
    owner = importlib.import_module(file)
    for part in name.split("."):
        owner = vars(owner)[part]
    return inspect.unwrap(owner)  # of a static method, or under torch.no_grad


def _with_broken(rank, cfg, file, name):
    """Does a step of train.py raise broken()'s error if this function has broken()'s code? Every
    file that has imported the function calls the broken one."""
    function = function_of(file, name)
    kept, function.__code__ = function.__code__, broken.__code__
    try:
        _train(rank, cfg, 1)
    except ZeroDivisionError as error:
        return str(error) == "this file runs"
    finally:
        function.__code__ = kept
    return False


# File, function: flags of a layout that needs the function. Every rank calls it before it needs an
# other rank's message, so none waits for one that has ended. (Lists of schedules: one rank, because
# schedules.splits_backward keeps what it has found)
PLACES = """
    train Trainer.step: dp 1
    model Block.compute: dp 1
    model Block.compute: recompute
    model Attention.forward: tp 2
    model causal_attention: dp 1
    model causal_attention: cp 2 cp_attention all-to-all
    model initial_value: zero 3 dp 2
    mesh lay_out: dp 1
    mesh Mesh.connect: dp 2
    collectives Group.exchange: dp 2
    collectives reduce_scatter: dp 2
    collectives reduce_scatter: dp 2 collectives native zero 1
    collectives all_gather: dp 2 zero 1
    collectives all_reduce: tp 2
    collectives all_to_all: dp 2 ep 2 experts 4
    shard tag_whole: dp 1
    shard split: tp 2
    shard Tag.holders: dp 1
    ddp flats_of: dp 1
    ddp Flat.pieces: dp 2 zero 3
    ddp DDP.grad_added: dp 1
    ddp DDP.start: dp 2
    ddp DDP.gradients: dp 2 zero 3
    zero ZeRO1.make_whole: dp 2 zero 1
    zero ZeRO1.reduce: dp 2 zero 1
    zero ZeRO1.publish: dp 2 zero 2
    zero ZeRO2.keep_chunk: dp 2 zero 2
    zero ZeRO2.keep_chunk: dp 2 zero 3 recompute
    zero ZeRO3.use: dp 2 zero 3
    zero ZeRO3.use: dp 2 zero 3 recompute
    optimizer AdamW.square: dp 1
    optimizer AdamW.step: dp 2 zero 2
    optimizer LossScale.update: dtype float16
    pipeline Pipeline.run: dp 1
    pipeline Pipeline.forward: pp 2
    pipeline Pipeline.backward: microbatches 2
    pipeline Pipeline.add_weight_gradients: schedule zb-h1 microbatches 2
    pipeline tie_ends: pp 2
    schedules make_schedule: dp 1
    schedules one_f_one_b: dp 1
    schedules gpipe: schedule gpipe
    schedules interleaved: schedule interleaved chunks 2 microbatches 2
    schedules zero_bubble: schedule zb-h1 microbatches 2
    tensor_parallel Column.forward: tp 2
    tensor_parallel Row.forward: tp 2
    tensor_parallel gather_tokens: tp 2 sp
    tensor_parallel VocabularyEmbedding.forward: tp 2
    tensor_parallel VocabularyLoss.forward: dp 1
    context_parallel split_sequences: dp 1
    context_parallel ring_attention: cp 2
    context_parallel visible: cp 2
    context_parallel all_to_all_attention: cp 2 cp_attention all-to-all
    experts Experts.forward: experts 4
    experts balance_loss: arch llama experts 4
    experts spread_experts: dp 2 ep 2 experts 4
    experts dispatch_and_combine: dp 2 ep 2 experts 4
    llama LlamaAttention.forward: arch llama
    llama rotate: arch qwen3 dp 2 zero 3
    transport.shared_memory connect: dp 2
    transport.shared_memory Link.send: tp 2
    transport.shared_memory Link.receive_piece: dp 2 zero 3
    transport.gloo Gloo.exchange: dp 2 transport gloo
    transport.background Background.start: dp 2
"""
ROWS = [(*place.split(), layouts(flags)[0])
        for place, flags in (line.split(":") for line in PLACES.strip().splitlines())]


@pytest.mark.parametrize("file,name,flags", ROWS, ids=[line.strip() for line in
                                                       PLACES.strip().splitlines()])
def test_an_edit_of_any_file_acts_in_the_run_that_needs_it(corpus, file, name, flags):
    cfg = config(corpus, **{"microbatches": 1, **flags})
    world = check(cfg, 1)
    assert pool(world, _with_broken, cfg, file, name) == [True] * world


def test_the_table_names_every_file_of_the_root_and_of_transport_that_trains():
    named = {file for file, _, _ in ROWS}
    root = {path.stem for path in HERE.glob("*.py")}
    transport = {f"transport.{path.stem}" for path in (HERE / "transport").glob("*.py")}
    # Neither samples, the proof, sizes that are only counted, nor NCCL run in a test on CPUs
    assert root | transport == named | {"sample", "test_all", "sizes", "transport.nccl",
                                        "transport.__init__"}


# ---- real runs, of a copy without the rooms that train.py does not need ----


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The root, transport/, data/ and run/, without extras/, docs/ and tests/."""
    folder = tmp_path_factory.mktemp("copy")
    hidden = shutil.ignore_patterns(".*", "__pycache__", "out", "stdlib", "shakespeare", "*.log")
    for path in HERE.glob("*.py"):
        shutil.copy(path, folder)
    for room in ("transport", "data", "run"):
        shutil.copytree(HERE / room, folder / room, ignore=hidden)
    return folder


def run(copy, corpus, out, *flags):
    """python train.py, two steps of a small model."""
    small = "--n-layer 2 --n-head 2 --n-embd 8 --block-size 8 --batch-size 4 --steps 2 --device cpu"
    return command("train.py", *small.split(), "--warmup-steps", 1, "--eval-interval", 0, "--data",
                   corpus, "--out", out, *flags, cwd=copy, env={"OMP_NUM_THREADS": "1"})


def test_without_extras_docs_and_tests_it_trains_and_resumes(copy, corpus, tmp_path):
    first = run(copy, corpus, tmp_path / "out", *"--dp 2 --zero 3".split())
    assert first.returncode == 0 and "replicas agree" in first.stdout, first.stdout + first.stderr
    more = run(copy, corpus, tmp_path / "out", *"--resume auto --steps 3".split())
    assert more.returncode == 0 and "replicas agree" in more.stdout, more.stdout + more.stderr


def with_raise(text, name):
    """A file's text with a raise at the head of a function, "name" or "Class.name"."""
    node = ast.parse(text)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", "") == part)
    body = node.body[1]  # after the docstring
    lines = text.splitlines()
    lines.insert(body.lineno - 1, " " * body.col_offset + 'raise RuntimeError("this file runs")')
    return "\n".join(lines)


@pytest.mark.parametrize("file,name,flags", [
    ("zero.py", "ZeRO2.collect", "--dp 2 --zero 2"),
    ("context_parallel.py", "ring_attention", "--cp 2"),
    ("transport/shared_memory.py", "SharedMemory.exchange", "--tp 2")])
def test_a_raise_planted_in_a_file_ends_the_run(copy, corpus, tmp_path, file, name, flags):
    path = copy / file
    text = path.read_text()
    path.write_text(with_raise(text, name))
    try:
        ended = run(copy, corpus, tmp_path / "out", *flags.split())
    finally:
        path.write_text(text)
    assert ended.returncode == 1 and "this file runs" in ended.stdout + ended.stderr, ended.stderr
