"""Sampling on T ranks: the tokens of one process; what a rank holds and sends; the command.
(tests/test_weights.py has what one process draws.)"""

import math
from pathlib import Path

import pytest
import torch

import sample
import train
from data.prepare import prepare
from experts import kind_of
from mesh import Mesh
from model import build, initial_value
from run import checkpoint, launch
from run.weights import load_model
from sizes import GPTConfig, LlamaConfig
from tests.harness import VOCAB, assemble, bare, config
from tests.pool import pool
from tests.runs import Run, _main, command, one_line

C, HEADS, LAYERS, WINDOW = 24, 12, 3, 16
SHAPES = {
    "GPT": GPTConfig(VOCAB, WINDOW, LAYERS, HEADS, C),
    "experts": GPTConfig(VOCAB, WINDOW, LAYERS, HEADS, C, n_experts=4),
    "Llama": LlamaConfig(VOCAB, WINDOW, LAYERS, HEADS, C, n_kv_head=6, n_hidden=30, tied=False)}
PROMPT = [1, 2, 3]


def large(shape):
    """A model in float64 whose logits differ a lot, so that wrong ones draw other tokens."""
    model = build(shape, dtype=torch.double, kind=kind_of(shape))
    for param in model.parameters():
        param.data.mul_(3 if param.dim() > 1 else 1)
    return model


def _generate(rank, T, shape, n, samples):
    """On a rank of T: the tokens, the elements sent, the elements of keys and values kept."""
    caches = []

    class Noted(sample.CachedAttention):
        def __init__(self):
            super().__init__()
            caches.append(self)

    mesh = Mesh(tp=T)
    model = large(shape)
    sample.split_model(model, mesh)
    usual, sample.CachedAttention = sample.CachedAttention, Noted
    try:
        tokens = sample.generate(model, PROMPT, n, samples, temperature=2.0, top_k=0)
    finally:
        sample.CachedAttention = usual
    kept = sum(cache.keys.numel() + cache.values.numel() for cache in caches[-LAYERS:])
    return tokens, mesh.group("tp").bytes_sent / 8, kept


@pytest.mark.parametrize("T", [2, 3])
@pytest.mark.parametrize("kind", SHAPES)
def test_tensor_parallel_sampling_draws_the_tokens_of_one_process(kind, T):
    """... on every rank, with kept keys and beyond the window, where all are computed again."""
    n = WINDOW + 4
    want = sample.generate(large(SHAPES[kind]), PROMPT, n, 3, temperature=2.0, top_k=0)
    assert want[0] != want[1] != want[2]
    for tokens, _, _ in pool(T, _generate, T, SHAPES[kind], n, 3):
        assert tokens == want


@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_sampling_rank_sends_and_keeps_the_bytes_of_the_formula(kind, T):
    """sample.py's head: 2 L C / T kept; 2 (T-1)/T (2 L + 1) C sent for a token that enters the
    model, (T-1)/T V for one that is drawn (V rounded up to a multiple of T)."""
    shape, n, B = SHAPES[kind], 5, 2
    entered = len(PROMPT) + n - 1  # the last token is drawn only
    sums = 2 * LAYERS + 1 if kind != "experts" else LAYERS + 1  # experts are whole on each rank
    width = C // HEADS * 6 if kind == "Llama" else C
    logits = -(-VOCAB // T) * (T - 1)
    for _, sent, kept in pool(T, _generate, T, shape, n, B):
        assert sent == B * (2 * (T - 1) * C // T * sums * entered + logits * n)
        assert kept == B * 2 * LAYERS * width // T * entered


# ---- from a checkpoint ----


def _slices(rank, T, folder):
    model = sample.load_slices(folder, Mesh(tp=T))
    return [(bare(param.tag), param.detach()) for param in model.parameters()]


def test_each_rank_has_its_slices_of_a_checkpoint(trained):
    folder = trained / "step-00000004"
    per_rank = pool(2, _slices, 2, folder)
    whole = dict(load_model(folder).canonical_parameters())
    found = assemble(per_rank)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    split = sum(param.numel() for param in whole.values() if param.dim() > 1) - 8 * 8  # not wpe
    held = sum(tensor.numel() for tag, tensor in per_rank[1] if tensor.dim() > 1) - 8 * 8
    assert held == (split - 8) / 2  # of 67 words rank 1 has 33


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function: the folder with the checkpoint of an untrained model of 6 heads, whose tokens are
    bytes. draw: its initial values."""
    def save(draw=initial_value):
        folder = tmp_path_factory.mktemp("bytes")
        (folder / "text").write_text("def f(x): return x\n" * 100)
        (folder / "out").mkdir()
        prepare([folder / "text"], folder / "data", "bytes")
        cfg = config(str(folder / "data"), n_layer=2, n_head=6, microbatches=1, fast="",
                     out=str(folder / "out"))
        trainer = train.Trainer(cfg, Mesh(dp=1), 256, draw)
        return Path(checkpoint.save(trainer, 0, folder / "data")).parent

    return save


@pytest.fixture(scope="module")
def of_bytes(saved):
    return saved()


def _sample(*args):
    _main(*args, program=sample)


def test_tp_2_prints_what_one_process_prints(of_bytes, tmp_path):
    """By its own launcher; by torchrun's ranks, of which rank 0 alone prints."""
    argv = ["--out", of_bytes, "--samples", 2, "--max-tokens", 20]
    one, two = (command("sample.py", *argv, "--tp", T) for T in (1, 2))
    assert one.stdout.count("def ") == one.stdout.count("\n---\n") == 2, one.stderr
    assert two.stdout == one.stdout and two.returncode == 0, two.stderr
    assert one.stderr.startswith("1 rank: ") and "and 0 bytes sent" in one.stderr
    assert two.stderr.startswith("2 ranks: ") and two.stderr.count("\n") == 1
    run = Run(3, [*argv, "--tp", 3], tmp_path, fn=_sample)
    assert run.wait() == [0, 0, 0], run.read()
    assert run.read("stdout") == one.stdout and run.read().startswith("3 ranks: ")


def test_ranks_that_cannot_sample_end_with_one_line(of_bytes, tmp_path):
    for out, T, says in ((of_bytes, 4, "--tp 4 must divide the 6 heads"),
                         (tmp_path, 2, f"{tmp_path}: no complete checkpoint there")):
        argv = ["--out", out, "--tp", T]
        run = Run(T, argv, tmp_path, fn=_sample)
        assert run.wait() == [2] * T
        assert run.read() == f"sample.py: {says}\n"


def test_a_wrong_number_of_ranks_is_refused(capsys, monkeypatch):
    for argv, says in (("--tp 0", "--tp 0 must be from 1 to 64"), ("--tp 65", "--tp 65 must be"),
                       ("--tp 2 --device cuda", "--tp 2: tensor ranks sample on CPUs; leave out")):
        line = one_line(sample.main, ["sample.py", *argv.split()], capsys, monkeypatch)
        assert line.startswith(f"sample.py: {says}")
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "a",
                        "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    line = one_line(lambda: launch.start_ranks(2), ["sample.py"], capsys, monkeypatch)
    assert line == ("sample.py: --tp 2 does not match the 3 processes; start 2, or one, which "
                    "starts the others\n")
    assert launch.start_ranks(1) is launch.start_ranks(3) is None  # alone; a rank


def test_a_checkpoint_that_is_not_finite_is_refused_by_all_ranks(saved, tmp_path, monkeypatch):
    """... also if a single rank has the slice with the nan."""
    def draw(name, *args):
        values = initial_value(name, *args)
        if name == checkpoint.EMBEDDING:
            values[-1] = math.nan
        return values

    monkeypatch.setattr(checkpoint, "is_finite", lambda trainer: True)  # else it is not saved
    out = saved(draw)
    run = Run(2, ["--out", out, "--tp", 2], tmp_path, fn=_sample)
    assert run.wait() == [2, 2]
    assert run.read() == (f"sample.py: {out}/step-00000000: {checkpoint.EMBEDDING} is not finite; "
                          "take an earlier checkpoint\n")
