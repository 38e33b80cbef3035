"""Every layout equals one process: a table of flags beyond test_all.py's page; fewer bits within
their rounding; the bytes of a step; and the comparison notices the field's bugs."""

from dataclasses import fields

import pytest
import torch

import ddp
import optimizer
import tensor_parallel
import train
from data.batches import Data
from model import initial_value
from run.config import Config, check
from sizes import GPTConfig
from tests.harness import (
    BATCH,
    SHAPE,
    VOCAB,
    _train,
    assemble,
    config,
    equals_one_process,
    local_tensors,
    reference,
    same_model,
    train_with,
)
from tests.pool import pool


def layouts(table):
    """[flags] of a table with a layout per line: "dp 2 sp zero 3" is {"dp": 2, "sp": True, "zero":
    3}."""
    types = {field.name: field.type for field in fields(Config)}
    found = []
    for line in table.strip().splitlines():
        words = line.split()
        flags = {}
        while words:
            name = words.pop(0)
            flags[name] = True if types[name] is bool else types[name](words.pop(0))
        found.append(flags)
    return found


def named(flags):
    """A line of such a table: the name of a layout's test."""
    return " ".join(name if value is True else f"{name} {value}" for name, value in flags.items())


# 36 sequences of 8 tokens, 67 words; 3 blocks of width 24 unless the line says so. A width of 25:
# D divides few sizes. A fork adds lines
EVERY = layouts("""
    dp 3 zero 1 microbatches 4 recompute n_embd 25 n_head 5
    dp 3 zero 2 microbatches 4 recompute n_embd 25 n_head 5
    dp 3 zero 3 microbatches 4 recompute n_embd 25 n_head 5
    dp 4 zero 3 microbatches 3 n_embd 25 n_head 5
    zero 3 microbatches 4 recompute
    dp 6 shard 3 zero 1 microbatches 2
    dp 4 shard 2 zero 2 microbatches 3 n_embd 25 n_head 5
    dp 4 shard 1 zero 3
    dp 4 shard 2 ep 2 experts 4 zero 3 microbatches 3
    tp 3 pp 2 schedule gpipe microbatches 2
    tp 3 sp block_size 24 microbatches 2 recompute
    pp 3 microbatches 4
    pp 4 microbatches 3 n_embd 25 n_head 5 recompute
    dp 2 pp 4 microbatches 2 zero 2
    pp 3 schedule interleaved chunks 2 microbatches 9 zero 1
    dp 2 pp 2 schedule interleaved chunks 2 microbatches 2 zero 1
    dp 2 pp 2 schedule interleaved chunks 2 microbatches 6 zero 3 recompute
    schedule interleaved chunks 2 microbatches 3 zero 2
    dp 2 tp 2 pp 2 schedule zb-h1 microbatches 3 zero 2
    dp 2 pp 2 schedule zb-h1 microbatches 1 zero 3
    dp 2 cp 3 block_size 24 zero 2 cp_attention all-to-all microbatches 3
    cp 3 block_size 24 tp 2 sp zero 3
    cp 2 tp 2 pp 2 sp microbatches 3 recompute
    dp 2 ep 2 tp 2 experts 4 zero 1
    dp 2 ep 2 tp 2 sp experts 4 zero 3 recompute
    dp 3 ep 3 experts 3 top_k 1 pp 2 microbatches 2
    tp 3 experts 3 top_k 3
    dp 2 tp 2 zero 3 collectives native microbatches 2
    dp 3 zero 2 transport gloo microbatches 2
    arch llama n_kv_head 3 tp 3 untied n_hidden 37 zero 2
    arch llama n_kv_head 4 dp 2 pp 2 tp 2 sp zero 3 untied recompute microbatches 2
    arch qwen3 n_kv_head 3 cp 2 dp 2 head_dim 6 zero 1
""")


@pytest.mark.parametrize("flags", EVERY, ids=named)
def test_layout_equals_one_process(corpus, flags):
    """In float64, to 1e-10: loss, raw gradients, norm and weights of three steps. The initial
    weights have one process's bits."""
    equals_one_process(corpus, **{"microbatches": 1, **flags})


@pytest.mark.parametrize("name", ["h.0.attn.c_attn.weight", "h.0.ln_1.weight", "h.0.ln_1.bias"])
def test_initial_values_do_not_depend_on_torchs_default_dtype(name):
    """A draw of float64 numbers is another draw: the same seed would give other weights."""
    single = initial_value(name, (3, 5), GPTConfig(VOCAB), seed=0)
    torch.set_default_dtype(torch.double)
    try:
        double = initial_value(name, (3, 5), GPTConfig(VOCAB), seed=0)
    finally:
        torch.set_default_dtype(torch.float)
    assert single.dtype == double.dtype == torch.float and torch.equal(single, double)


# ---- fewer bits ----


def norm_of(tensors):
    return torch.stack([tensor.double().norm() for tensor in tensors]).norm()


NARROW = layouts("""
    dp 2 zero 3 tp 2 microbatches 2
    dp 2 pp 2 zero 1 microbatches 3
    cp 2 tp 2 sp
    dp 2 ep 2 experts 4 zero 2
""")


@pytest.mark.parametrize("flags", NARROW, ids=named)
@pytest.mark.parametrize("dtype,tolerance", [
    ("float32", 2**-18), ("bfloat16", 2**-4), ("float16", 2**-7)])
def test_fewer_bits_train_as_far_as_rounding_allows(corpus, flags, dtype, tolerance):
    """A rounding is off by 2^-24 of the value in float32, 2^-12 in float16, 2^-9 in bfloat16. A
    gradient passes some thirty roundings here: 2^5 or 2^6 times that is allowed, of all gradients
    together. (Single ones, such as those of key biases, are nothing but rounding.) The loss, a mean
    over 288 tokens, is four times as exact."""
    cfg = config(corpus, dtype=dtype, **flags)
    got = pool(check(cfg, 1), _train, cfg, 1)
    want = reference(corpus, **same_model(cfg))
    assert all(trace[0]["agree"] for trace in got)
    initial = assemble([trace[0]["weights"] for trace in got])
    for name, value in want[0]["weights"].items():
        assert torch.equal(initial[name], value.to(getattr(torch, dtype))), name
    grads = assemble([trace[1]["grads"] for trace in got])
    off = norm_of(grads[name].double() - value for name, value in want[1]["grads"].items())
    assert off <= tolerance * norm_of(want[1]["grads"].values())
    for trace in got:
        assert abs(trace[1]["loss"] / want[1]["loss"] - 1) <= tolerance / 4
        assert abs(trace[1]["norm"] / want[1]["norm"] - 1) <= tolerance


def _overflow(rank, cfg):
    """(are weights and step count as before a step in which a gradient of rank 1 overflowed, the
    loss scale's factor, did a second step train)"""
    mesh = train.make_mesh(cfg, cfg.device)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    reducer = trainer.reducer
    numbers = trainer.optimizer.numbers()
    before = local_tensors(trainer, "weights")
    scale = numbers["scale"].item()
    data = Data(cfg)

    def poisoned(flat):
        if rank == 1:
            flat.grads[0] = torch.inf
        type(reducer).reduce(reducer, flat)

    reducer.reduce = poisoned
    norm, _ = trainer.step(data.training(cfg, 0, mesh), 1e-2)
    after = local_tensors(trainer, "weights")
    unchanged = all(torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))
    skipped = not norm.isfinite() and unchanged and numbers["updates"] == 0
    factor = numbers["scale"].item() / scale
    del reducer.reduce
    norm, _ = trainer.step(data.training(cfg, 1, mesh), 1e-2)
    changed = not torch.equal(before[0][1], local_tensors(trainer, "weights")[0][1])
    return skipped, factor, bool(norm.isfinite()) and changed and numbers["updates"] == 1


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_loss_scale(corpus, zero):
    cfg = config(corpus, zero=zero, dp=2, tp=2, dtype="float16", microbatches=2)
    assert pool(4, _overflow, cfg) == [(True, 0.5, True)] * 4


# ---- bytes ----


def _bytes(rank, cfg):
    """Of a step: {group: bytes sent}; elements that the groups sum."""
    mesh = train.make_mesh(cfg, cfg.device)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    trainer.step(Data(cfg).training(cfg, 0, mesh), 1e-3)
    blocks = sum(0 < i <= cfg.n_layer for s, (a, b) in enumerate(trainer.cuts)
                 if trainer.where[s] == mesh.group("pp").rank for i in range(a, b))
    flats = trainer.reducer.trained
    ends = mesh.ends("pp")
    numels = {"blocks": blocks, "all": sum(flat.weights.numel() for flat in flats),
              "tied": sum(flat.weights.numel() for flat in flats if ends in flat.others)}
    return {name: group.bytes_sent for name, group in mesh.groups.items()}, numels


def test_bytes_sent_equal_the_formulas(corpus):
    D, T, P, m, layers = 2, 2, 2, 3, SHAPE["n_layer"]
    got = pool(8, _bytes, config(corpus, dp=D, tp=T, pp=P, microbatches=m))
    b, S, C, width = BATCH // D // m, SHAPE["block_size"], SHAPE["n_embd"], 8
    boundary = b * S * C * width
    for rank, (sent, numels) in enumerate(got):
        stage = rank // T % P
        assert sent["pp"] == m * boundary  # stage 0 sends activations, stage 1 their gradients
        # An all-reduce at each end; the head also gathers a number per token, and sums the loss
        reduced = (4 * numels["blocks"] + 1) * boundary + (width if stage == 1 else 0)
        gathered = b * S * width if stage == 1 else 0
        total = m * (reduced * 2 * (T - 1) / T + gathered * (T - 1))
        # The sum of one number: one of two ranks sends it to the other, and gets it back
        assert abs(sent["tp"] - total) <= m * width
        # An all-reduce a step, whatever m: a rank of two sends each Flat once
        assert sent["shard_ep_cp"] == numels["all"] * width * 2 * (D - 1) // D
        assert sent["pp_ends"] == numels["tied"] * width
    assert sum(numels["blocks"] for _, numels in got) == layers * D * T
    assert sum(sent["world"] for sent, _ in got) == 2 * (8 - 1) * 3 * 8  # loss, stop, norm
    silent = got[0][0].keys() - {"pp", "tp", "shard_ep_cp", "pp_ends", "world"}
    assert not any(sent[name] for sent, _ in got for name in silent)


# ---- the comparison ----


def _with_bug(rank, cfg, bug):
    """_train with a bug of the field."""
    def divide(self, gradients=ddp.DDP.gradients):
        return [grad / 2 for grad in gradients(self)]

    def square(self, grads):  # of one replica
        return sum(grad.square().sum() / tag.sum_over[0].size
                   for grad, tag in zip(grads, self.tags, strict=True))

    def biased(self, x, forward=tensor_parallel.Row.forward):
        return forward(self, x) + self.bias * (self.group.size - 1)

    def forgetful(self, stage, last, expect=ddp.DDP.expect):
        expect(self, stage, last)
        for flat in self.flats[stage]:
            for param in flat.params:
                param.grad = None

    owner, name, value = {
        "gradients averaged, not summed": (ddp.DDP, "gradients", divide),
        "microbatches forgotten but for the last": (ddp.DDP, "expect", forgetful),
        "ends of the tied embedding not summed": (train, "tie_ends", lambda layers, group: None),
        "a wrong norm": (optimizer, "clip_coefficient",
                         lambda norm, clip, usual=optimizer.clip_coefficient:
                         usual(norm * 1.5, clip)),
        "row bias added by every rank": (tensor_parallel.Row, "forward", biased),
        "replicated gradients counted T times": (optimizer.AdamW, "square", square),
        "nothing reduced": (ddp.DDP, "reduce", lambda self, flat: None),
    }[bug]
    return train_with(rank, cfg, owner, name, value)


@pytest.mark.parametrize("bug,notices", [
    ("gradients averaged, not summed", "norm: off by"),
    ("microbatches forgotten but for the last", "norm: off by"),
    ("ends of the tied embedding not summed", "norm: off by|copies of .*wte.* differ"),
    ("a wrong norm", "step 1 weights .* off by"),
    ("row bias added by every rank", "off by"),
    ("replicated gradients counted T times", "norm: off by"),
    ("nothing reduced", "norm: off by|copies of .* differ")])
def test_the_comparison_notices(corpus, bug, notices):
    with pytest.raises(AssertionError, match=notices):
        equals_one_process(corpus, _with_bug, bug, dp=2, tp=2, pp=2, microbatches=3)
