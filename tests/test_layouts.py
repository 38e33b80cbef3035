"""Every layout equals one process: a table of flags, and one function (tests/harness.py)."""

import shlex
from functools import cache, partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import engine.ddp as ddp
import engine.tensor_parallel as tensor_parallel
import train
from data.batches import Data
from engine.optimizer import Optimizer
from experts import kind_of
from model import build, initial_value
from run import checkpoint, tensorfile
from run.config import check, check_layout, parse
from sizes import GPTConfig
from tests.cover import covering, layouts, named
from tests.harness import (
    BATCH,
    FULL,
    SHAPE,
    VOCAB,
    _train,
    config,
    equals_one_process,
    mesh_of,
    pool,
    train_with,
)
from tests.trainer import Trainer, state_bytes


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


# A layout per line: train.py's flags, without the dashes. tests/cover.py chooses the lines that are
# trained, so that every pair of features occurs; with FULL=1 all are. A fork adds lines.
EVERY = layouts("""
    schedule gpipe
    microbatches 4
    dp 3 microbatches 2
    dp 2 schedule gpipe
    dp 2 tp 2 microbatches 3
    tp 2 schedule gpipe
    tp 3
    tp 4 microbatches 2
    pp 2
    tp 3 pp 2 microbatches 4
    tp 3 pp 2 schedule gpipe microbatches 2
    pp 4 microbatches 2
    pp 4 microbatches 4
    pp 4 microbatches 9
    pp 4 schedule gpipe microbatches 3
    dp 2 tp 2 pp 2 microbatches 3
    dp 2 tp 2 pp 2 schedule gpipe microbatches 2
    tp 2 pp 4 microbatches 6
    tp 2 pp 4 schedule gpipe microbatches 9
    dp 2 pp 4 microbatches 2
    dp 4 pp 2 microbatches 9
    dp 6 microbatches 2

    # schedules
    pp 2 schedule interleaved chunks 2 microbatches 4
    pp 2 schedule interleaved chunks 3 microbatches 2
    pp 3 schedule interleaved chunks 2 microbatches 9
    pp 4 schedule interleaved chunks 3 microbatches 4
    dp 2 tp 2 pp 2 schedule interleaved chunks 2 microbatches 6 zero 1
    dp 2 pp 2 schedule interleaved chunks 2 microbatches 2 zero 3
    schedule interleaved chunks 2 microbatches 3 zero 2
    pp 2 schedule zb-h1
    pp 3 schedule zb-h1 microbatches 3
    pp 4 schedule zb-h1 microbatches 9
    pp 2 schedule zb-h2
    pp 3 schedule zb-h2 microbatches 3
    pp 4 schedule zb-h2 microbatches 9
    dp 2 tp 2 pp 2 schedule zb-h1 microbatches 3
    dp 2 tp 2 pp 2 schedule zb-h1 microbatches 3 zero 2
    dp 2 tp 2 pp 2 schedule zb-h2 microbatches 3 zero 3
    dp 3 pp 2 schedule zb-h1 microbatches 4 zero 1
    schedule zb-h1 microbatches 4
    pp 2 schedule zb-v chunks 2
    pp 2 schedule zb-v chunks 2 microbatches 4
    pp 3 schedule zb-v chunks 2 microbatches 6
    pp 4 schedule zb-v chunks 2 microbatches 9
    dp 2 tp 2 pp 2 schedule zb-v chunks 2 microbatches 3
    dp 2 tp 2 pp 2 schedule zb-v chunks 2 microbatches 3 zero 2
    dp 2 pp 2 schedule zb-v chunks 2 microbatches 3 zero 1
    dp 2 pp 2 schedule zb-v chunks 2 microbatches 3 zero 3
    schedule zb-v chunks 2 microbatches 2 zero 3
    dp 2 schedule zb-v chunks 2 microbatches 2

    # ZeRO; n_embd 25: D divides few of these layers' sizes
    zero 1 microbatches 4 recompute n_embd 25 n_head 5
    zero 2 microbatches 4 recompute n_embd 25 n_head 5
    zero 3 microbatches 4 recompute n_embd 25 n_head 5
    dp 2 zero 1 n_embd 25 n_head 5
    dp 2 zero 2 n_embd 25 n_head 5
    dp 2 zero 3 n_embd 25 n_head 5
    dp 3 zero 1 microbatches 4 recompute n_embd 25 n_head 5
    dp 3 zero 2 microbatches 4 recompute n_embd 25 n_head 5
    dp 3 zero 3 microbatches 4 recompute n_embd 25 n_head 5
    dp 4 zero 1 microbatches 3 n_embd 25 n_head 5
    dp 4 zero 2 microbatches 3 n_embd 25 n_head 5
    dp 4 zero 3 microbatches 3 n_embd 25 n_head 5
    dp 2 tp 2 zero 1 microbatches 3
    dp 2 tp 2 zero 2 microbatches 3
    dp 2 tp 2 zero 3 microbatches 3
    dp 2 pp 2 zero 1 microbatches 3 n_embd 25 n_head 5
    dp 2 pp 2 zero 2 microbatches 3 n_embd 25 n_head 5
    dp 2 pp 2 zero 3 microbatches 3 n_embd 25 n_head 5
    dp 2 tp 2 pp 2 zero 1 microbatches 3 recompute
    dp 2 tp 2 pp 2 zero 2 microbatches 3 recompute
    dp 2 tp 2 pp 2 zero 3 microbatches 3 recompute
    tp 2 pp 2 microbatches 4 recompute

    # split sequences
    dp 4 tp 2 sp microbatches 9
    dp 4 tp 2 sp microbatches 3
    tp 3 sp block_size 24 microbatches 2
    cp 2
    cp 3 block_size 24 microbatches 3
    cp 4
    cp 2 cp_attention all-to-all recompute
    cp 4 cp_attention all-to-all microbatches 2
    cp 2 tp 2 pp 2 sp microbatches 3
    cp 2 tp 2 pp 2 sp cp_attention all-to-all schedule zb-v chunks 2 microbatches 3
    cp 2 tp 2 pp 2 sp schedule interleaved chunks 2 microbatches 4 recompute
    dp 2 cp 3 block_size 24 zero 1
    dp 2 cp 3 block_size 24 zero 3 recompute
    dp 2 cp 3 block_size 24 zero 2 cp_attention all-to-all microbatches 3
    tp 2 cp 3 block_size 24 sp zero 3 cp_attention all-to-all
    dp 2 tp 2 pp 2 sp schedule zb-v chunks 2 zero 2 microbatches 3
    tp 4 cp 2 sp zero 1
    tp 3 pp 2 sp block_size 24 schedule zb-h1 microbatches 4
    dp 2 pp 2 cp 2 schedule zb-h2 zero 1 microbatches 3
    pp 4 cp 2 schedule interleaved chunks 1 microbatches 4
    dp 2 tp 2 sp zero 3 recompute microbatches 3

    # experts
    dp 2 ep 2 experts 4
    dp 4 ep 4 experts 8 zero 2
    dp 4 ep 2 experts 4 zero 3 microbatches 3
    dp 6 ep 2 experts 4 zero 1
    dp 3 ep 3 experts 3 top_k 1
    dp 3 experts 3 top_k 3 microbatches 2
    tp 2 experts 4 microbatches 2
    dp 4 ep 2 tp 2 experts 4
    dp 2 ep 2 tp 2 sp experts 4 zero 2 recompute
    dp 2 ep 2 cp 2 tp 2 sp experts 4 zero 3
    dp 2 ep 2 pp 2 experts 4 schedule zb-h1 microbatches 3
    dp 2 ep 2 pp 4 experts 4 microbatches 3
    dp 4 ep 4 pp 2 experts 4 microbatches 3
    dp 2 ep 2 pp 2 experts 4 schedule interleaved chunks 2 microbatches 2 zero 1
    dp 2 ep 2 pp 2 tp 2 sp experts 4 schedule zb-v chunks 2 microbatches 3 zero 2
    dp 2 ep 2 tp 2 pp 2 experts 4 schedule zb-h1 microbatches 3
    cp 2 experts 4 cp_attention all-to-all zero 1
    experts 4 microbatches 3 balance 0.5
    tp 3 experts 3 top_k 3
    dp 2 ep 2 tp 2 cp 2 experts 4 top_k 4

    # a Llama: 12 heads of queries, and as many of keys and values, or 6, 4, 3, or 1 (multi-query)
    arch llama microbatches 2
    arch llama n_kv_head 1 untied microbatches 3
    arch llama n_kv_head 3 dp 3 n_hidden 37
    arch llama n_kv_head 4 tp 2 n_hidden 37 microbatches 2
    arch llama n_kv_head 3 tp 3 untied n_hidden 37
    arch llama n_kv_head 4 tp 4 sp
    arch llama n_kv_head 6 tp 2 sp untied recompute rope_scaling 4,1,4,6
    arch llama n_kv_head 3 cp 2
    arch llama n_kv_head 1 cp 4 untied
    arch llama n_kv_head 4 cp 2 cp_attention all-to-all recompute
    arch llama n_kv_head 4 cp 4 cp_attention all-to-all
    arch llama n_kv_head 4 cp 2 tp 2 sp cp_attention all-to-all zero 3
    arch llama n_kv_head 3 cp 3 block_size 24 untied zero 1 dp 2
    arch llama n_kv_head 6 pp 2
    arch llama n_kv_head 6 pp 2 untied schedule gpipe microbatches 3
    arch llama n_kv_head 4 pp 4 tp 2 untied microbatches 4
    arch llama n_kv_head 4 pp 2 tp 2 sp schedule zb-h1 microbatches 3 zero 2 dp 2
    arch llama n_kv_head 4 pp 2 schedule zb-h2 microbatches 3 untied
    arch llama n_kv_head 4 dp 2 tp 2 pp 2 schedule zb-v chunks 2 microbatches 3 untied
    arch llama n_kv_head 3 pp 3 schedule interleaved chunks 2 microbatches 3 zero 1
    arch llama n_kv_head 4 dp 2 pp 2 tp 2 zero 3 untied recompute microbatches 2
    arch llama n_kv_head 4 dp 4 zero 3
    arch llama n_kv_head 4 dp 2 ep 2 experts 4 n_hidden 38
    arch llama n_kv_head 4 dp 2 ep 2 tp 2 sp experts 4 untied zero 2
    arch llama n_kv_head 4 tp 2 untied
    arch llama n_kv_head 4 tp 2 collectives native
    arch qwen2 n_kv_head 4 tp 2 untied microbatches 2
    arch qwen2 n_kv_head 3 cp 4 dp 2 zero 1
    arch qwen2 n_kv_head 4 tp 2 pp 2 schedule zb-v chunks 2 microbatches 3
    arch qwen2 n_kv_head 4 dp 2 tp 4 sp zero 3
    arch qwen3 n_kv_head 3 dp 3 head_dim 6
    arch qwen3 n_kv_head 4 tp 2 head_dim 6 untied
    arch qwen3 n_kv_head 4 tp 4 sp
    arch qwen3 n_kv_head 4 dp 2 tp 2 pp 2 zero 3 untied microbatches 2
    arch qwen3 n_kv_head 3 cp 2 dp 2 head_dim 6 zero 2 untied
    arch qwen3 n_kv_head 4 cp 2 tp 2 sp dp 2 cp_attention all-to-all zero 2
    arch qwen3 n_kv_head 4 tp 2 pp 2 schedule zb-h1 microbatches 3 recompute
    arch qwen3 n_kv_head 4 dp 2 ep 2 tp 2 experts 4 n_hidden 38

    # hybrid sharding: ZeRO shards over some of the data ranks, and the others hold copies
    dp 4 shard 2 microbatches 3
    dp 4 shard 2 zero 1
    dp 4 shard 2 zero 2 tp 2 microbatches 3
    dp 4 shard 2 zero 3 microbatches 2
    dp 4 shard 1 zero 3
    dp 6 shard 3 zero 1 microbatches 2
    dp 4 shard 2 cp 2 zero 3
    dp 4 shard 2 pp 2 zero 1 microbatches 3
    dp 4 shard 2 tp 2 sp zero 3 recompute
    dp 4 shard 2 ep 2 experts 4 zero 1
    dp 4 shard 2 ep 2 experts 4 zero 3 microbatches 3
    dp 4 shard 2 ep 2 tp 2 sp experts 4 zero 2

    # torch's own collectives
    dp 3 collectives native microbatches 2
    dp 2 tp 2 zero 3 collectives native microbatches 2
    cp 2 tp 2 sp collectives native
    dp 2 ep 2 experts 4 collectives native recompute

    # rows that pad the vocabulary are not there. 67 tokens: 80 rows, or 2 x 40, or 3 x 32
    microbatches 3
    dp 2 tp 2 zero 3 recompute microbatches 3
    tp 3 pp 2 schedule zb-h1 microbatches 3
    dp 2 tp 2 pp 2 sp schedule zb-v chunks 2 zero 2 microbatches 3
""")
CHOSEN = covering(EVERY)
# Three features at a time: replicas, no ZeRO, and a rank with both ends, one ready before the
# other; experts, several T ranks, and the same tokens on all of them
CHOSEN += layouts("""
    dp 2 pp 2 schedule zb-v chunks 2 microbatches 3
    tp 2 experts 4 microbatches 2
""")


@pytest.mark.parametrize("flags", CHOSEN, ids=named)
def test_layout_equals_one_process(corpus, flags):
    equals_one_process(corpus, **{"microbatches": 1, **flags})


# The same layouts on the root's parts. Where a flag needs a part of engine/ (a schedule, rows that
# pad the vocabulary, torch's collectives), that part is engine/'s: so these are mixed
ROOT = [flags for flags in EVERY if "native" not in flags.values()]


@pytest.mark.parametrize("flags", covering(ROOT), ids=named)
def test_layout_on_root_parts_equals_one_process(corpus, flags):
    equals_one_process(corpus, **{"microbatches": 1, "fast": "", **flags})


MIXED = [(parts.strip(), flags) for parts, row in (line.split(":") for line in """
    ddp: dp 3 microbatches 2
    ddp: dp 2 tp 2 pp 2 zero 1 microbatches 3
    ddp: dp 2 tp 2 sp zero 3 recompute microbatches 3
    ddp: dp 2 cp 2 experts 4 zero 2
    tp: tp 3 pp 2 microbatches 4
    tp: dp 2 tp 2 sp zero 2 microbatches 3
    tp,ddp: dp 2 tp 2 pp 2 zero 3 microbatches 3
    tp: tp 2 experts 4 microbatches 2
    tp: dp 2 ep 2 tp 2 sp experts 4
    cp: cp 4 dp 2 zero 3
    cp: cp 2 tp 2 sp cp_attention all-to-all
    cp,ep: dp 2 ep 2 cp 2 experts 4 zero 1
    ep: dp 2 ep 2 tp 2 experts 4 zero 3
    ep: dp 2 ep 2 tp 2 sp experts 4 zero 2 recompute
    optimizer: dp 3 zero 1 microbatches 4
    optimizer: dp 2 tp 2 pp 2 zero 3 microbatches 3
    pp: dp 2 pp 3 zero 2 microbatches 3
    pp: dp 2 pp 2 tp 2 zero 3 schedule interleaved chunks 2 microbatches 2
    pp: pp 4 experts 4 microbatches 3
    pp,ddp: dp 2 tp 2 pp 2 sp zero 3 microbatches 3 recompute
    mesh: dp 2 tp 2 pp 2 microbatches 3
    mesh,optimizer,pp: dp 2 ep 2 pp 2 experts 4 zero 1 microbatches 3
    tp,pp: arch llama n_kv_head 4 tp 2 pp 2 untied microbatches 3
    ddp,optimizer: arch llama n_kv_head 3 cp 2 dp 2 zero 1
""".strip().splitlines()) for flags in layouts(row)]


@pytest.mark.parametrize("parts,flags", MIXED, ids=lambda x: x if isinstance(x, str) else named(x))
def test_any_choice_of_parts_equals_one_process(corpus, parts, flags):
    equals_one_process(corpus, **{"microbatches": 1, "fast": parts, **flags})


def _in_order(rank, cfg):
    """As on NCCL: sends and receives leave as one operation, and no receive is posted early."""
    return _train(rank, cfg, mesh=mesh_of(cfg, in_order=True))


@pytest.mark.parametrize("flags", [
    {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4, "dp": 3},
    {"cp": 2, "tp": 2, "sp": True, "cp_attention": "all-to-all", "zero": 3}], ids=str)
def test_nccls_manner_gives_the_same(corpus, flags):
    """Two of what IN_ORDER=1 does with all."""
    equals_one_process(corpus, _in_order, **{"microbatches": 3, **flags})


def _compiled(rank, cfg):
    eager = partial(torch.compile, backend="aot_eager")
    return train_with(rank, cfg, torch, "compile", eager)


@pytest.mark.parametrize("flags", [
    {"tp": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 4},  # puts weight gradients off
    {"dp": 2, "zero": 3, "microbatches": 2, "ep": 2, "experts": 4},  # weights come and go
    {"arch": "llama", "n_kv_head": 4, "tp": 2, "untied": True},
    *[{"cp": 2, "tp": 2, "sp": True}] * FULL], ids=str)
def test_compiled_layers_give_the_same(corpus, flags):
    equals_one_process(corpus, _compiled, compile=True, **flags)


def _compiled_once(rank, cfg):
    """Two steps. RuntimeError if torch compiles a layer's code twice."""
    torch._dynamo.reset()  # what earlier tests have compiled
    with (patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
          torch._dynamo.config.patch(error_on_recompile=True)):
        losses = _losses(rank, cfg)
    torch._dynamo.reset()
    return losses


def test_all_blocks_of_a_deep_model_share_what_is_compiled_once(corpus):
    """After 8 recompilations of a function torch goes on without --compile, and says so in a log
    only: a model of 12 layers must not compile them one by one."""
    cfg = config(corpus, compile=True, n_layer=12, batch_size=4, tp=2, steps=2)
    losses = pool(check(cfg, 1), _compiled_once, cfg)
    assert losses[0] == losses[1]


def _losses(rank, cfg):
    mesh = mesh_of(cfg)
    trainer, data = Trainer(cfg, mesh, VOCAB), Data(cfg)
    losses = []
    for step in range(cfg.steps):
        norm, read = trainer.gradients(data.training(cfg, step, mesh))
        trainer.update(norm, train.learning_rate(cfg, step))
        losses.append(read()[0])
    return losses


@pytest.mark.parametrize("flags", [
    {"dp": 2, "zero": 3, "tp": 2}, {"pp": 4, "n_layer": 4}, {"cp": 4}, {"tp": 4, "sp": True},
    *[{"dp": 4, "zero": 3}, {"tp": 4}, {"dp": 2, "zero": 2, "tp": 2}] * FULL], ids=str)
def test_bfloat16_layouts_agree_as_far_as_rounding_allows(corpus, flags):
    """bfloat16 keeps 8 bits: a rounding is off by up to 2^-9 of the value, and layouts round
    partial sums in other places. The loss is a mean over 288 tokens, in which these errors mostly
    cancel: layouts stay within 2^-8 of one another, while training changes it by several times
    that."""
    flags = {"dtype": "bfloat16", "steps": 12, "lr": 3e-3, "warmup_steps": 0, **flags}
    one = pool(1, _losses, config(corpus, **{**flags, "dp": 1, "tp": 1, "pp": 1, "cp": 1,
                                                "zero": 0, "microbatches": 1}))[0]
    cfg = config(corpus, **flags)
    got = pool(check(cfg, 1), _losses, cfg)
    assert all(losses == got[0] for losses in got)
    for a, b in zip(one, got[0], strict=True):
        assert abs(a - b) <= 2**-8 * abs(a), (one, got[0])


def _patched(rank, cfg, bug):
    """_train with a bug of the field put in, to see that the comparison would notice it."""
    def divide(self, finish=ddp.DDP.finish):
        finish(self)
        for bucket in self.buckets:
            bucket.grad_shard.div_(2)

    def step(self, grads, norm, lr, step=Optimizer.step):
        step(self, grads, norm * 1.5, lr)

    def square(self, grads):  # of one replica
        return sum(grad.square().sum() / tag.sum_over[0].size
                   for grad, tag in zip(grads, self.tags, strict=True))

    def biased(self, x, forward=tensor_parallel.Row.forward):
        return forward(self, x) + self.bias * (self.region.group.size - 1)

    patches = {
        "gradients averaged, not summed": (ddp.DDP, "finish", divide),
        "ends of the tied embedding not summed": (
            train, "tie_ends", lambda layers, group: None),
        "a wrong norm": (Optimizer, "step", step),
        "row bias added by every rank": (tensor_parallel.Row, "forward", biased),
        "replicated gradients counted T times": (Optimizer, "square", square),
        "nothing reduced": (ddp.DDP, "launch", lambda self, bucket: None),
    }
    return train_with(rank, cfg, *patches[bug])


@pytest.mark.parametrize("bug", [
    "gradients averaged, not summed", "ends of the tied embedding not summed", "a wrong norm",
    "row bias added by every rank", "replicated gradients counted T times", "nothing reduced"])
def test_the_comparison_notices_and_names_commands_that_find_the_cause(corpus, bug):
    notices = "off by|copies of .* differ|replicas disagree"
    with pytest.raises(AssertionError, match=notices) as error:
        equals_one_process(corpus, _patched, bug, dp=2, tp=2, pp=2, microbatches=3)
    *_, one, many, last = str(error.value).splitlines()
    assert last == "python -m extras.doctor one many"
    for line, command, ranks in ((one, "record one ", 1), (many, "record many ", 8)):
        words = shlex.split(line.partition(f"python -m extras.doctor.{command}")[2])
        assert check_layout(parse(words), 1) == ranks
        assert words[words.index("--data") + 1] == corpus


def _bytes(rank, cfg):
    mesh = mesh_of(cfg)
    trainer, data = Trainer(cfg, mesh, VOCAB), Data(cfg)
    trainer.gradients(data.training(cfg, 0, mesh))
    blocks = sum(0 < i <= cfg.n_layer for s, (a, b) in enumerate(trainer.cuts)
                 if trainer.where[s] == mesh.group("pp").rank for i in range(a, b))
    numels = {"all": sum(b.numel for b in trainer.reducer.buckets), "blocks": blocks,
              "tied": sum(b.numel for b in trainer.reducer.buckets if b.sum_at_end),
              "over_tp": sum(b.numel for b in trainer.reducer.buckets
                             if mesh.group("tp") in b.sum_at_end)}
    return {name: group.bytes_sent for name, group in mesh.groups.items()}, numels


def test_bytes_sent_equal_the_formulas(corpus):
    D, T, P, m, layers = 2, 2, 2, 3, SHAPE["n_layer"]
    got = pool(8, _bytes, config(corpus, dp=D, tp=T, pp=P, microbatches=m))
    b, S, C, width = BATCH // D // m, SHAPE["block_size"], SHAPE["n_embd"], 8
    boundary = b * S * C * width
    for rank, (sent, numels) in enumerate(got):
        stage = rank // T % P
        assert sent["pp"] == m * boundary  # stage 0 sends activations, stage 1 their gradients
        # an all-reduce at each end; the head also gathers a number per token, and sums the loss
        reduced = (4 * numels["blocks"] + 1) * boundary + (width if stage == 1 else 0)
        gathered = b * S * width if stage == 1 else 0
        assert sent["tp"] == m * (reduced * 2 * (T - 1) // T + gathered * (T - 1))
        # one all-reduce a step, whatever m: a rank of two sends each bucket once
        assert sent["shard_ep_cp"] == numels["all"] * width * 2 * (D - 1) // D
        assert sent["pp_ends"] == numels["tied"] * width
    assert sum(numels["blocks"] for _, numels in got) == layers * D * T
    assert sum(sent["world"] for sent, _ in got) == 2 * (8 - 1) * 3 * 8  # loss, stop, norm
    silent = got[0][0].keys() - {"pp", "tp", "shard_ep_cp", "pp_ends", "world"}
    assert not any(sent[name] for sent, _ in got for name in silent)


# ---- parameters that need no gradient ----

FROZEN = {  # what is trained
    "biases": lambda name: name.endswith("bias"),
    "matrices": lambda name: "c_" in name and name.endswith("weight"),
    "the last block": lambda name: ".h.2." in name,
    "the embedding": lambda name: name.endswith("wte.weight"),
    "nothing but positions": lambda name: name.endswith("wpe.weight")}


def freeze(model, trained):
    for name, param in model.canonical_parameters():
        param.requires_grad_(FROZEN[trained](name))


def frozen_kind(trained):
    """What stands in the place of train.py's kind_of."""
    def made(config):
        model = kind_of(config)(config)
        freeze(model, trained)
        return model

    return lambda config: made


def _frozen(rank, cfg, trained, **more):
    return train_with(rank, cfg, train, "kind_of", frozen_kind(trained), **more)


@cache
def frozen_build(trained):
    def made(*args):
        model = build(*args)
        freeze(model, trained)
        return model

    return made


@pytest.mark.parametrize("trained,flags", [
    ("biases", {"tp": 3, "pp": 2, "schedule": "zb-h1", "microbatches": 3}),
    ("matrices", {"dp": 2, "tp": 2, "sp": True, "zero": 2, "microbatches": 2}),
    ("matrices", {"dp": 2, "pp": 2, "zero": 3, "schedule": "zb-v", "microbatches": 3}),
    ("the last block", {"pp": 4, "microbatches": 3}),
    ("the last block", {"dp": 2, "cp": 2, "zero": 1, "recompute": True}),
    ("the embedding", {"dp": 2, "tp": 2, "pp": 2, "zero": 2}),
    ("nothing but positions", {"pp": 3, "zero": 3, "dp": 2, "microbatches": 2}),
    ("nothing but positions", {"tp": 2, "sp": True}),
    ("the last block", {"dp": 4, "shard": 2, "zero": 3, "microbatches": 3}),
    # the root's parts
    ("biases", {"fast": "", "tp": 3, "pp": 2, "microbatches": 3}),
    ("matrices", {"fast": "", "dp": 2, "tp": 2, "sp": True, "zero": 2, "microbatches": 2}),
    ("the last block", {"fast": "", "pp": 4, "microbatches": 3, "schedule": "gpipe"}),
    ("the last block", {"fast": "", "dp": 2, "cp": 2, "zero": 1, "recompute": True}),
    ("the embedding", {"fast": "", "dp": 2, "pp": 2, "zero": 3, "microbatches": 3}),
    ("nothing but positions", {"fast": "", "pp": 3, "zero": 3, "dp": 2, "microbatches": 2})],
    ids=str)
def test_frozen_parameters_stay_and_the_others_train_like_one_process(corpus, trained, flags):
    got, want = equals_one_process(corpus, _frozen, trained, build=frozen_build(trained), **flags)
    for name, value in want[0]["weights"].items():
        assert torch.equal(value, want[-1]["weights"][name]) != FROZEN[trained](name)


def _held(rank, cfg, trained):
    """(bytes of the states by the formula, live; names in a checkpoint)"""
    with patch.object(train, "kind_of", frozen_kind(trained)):
        trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
    norm, read = trainer.gradients(Data(cfg).training(cfg, 0, trainer.mesh))
    if cfg.fast:
        frozen = [p for bucket in trainer.reducer.frozen_buckets for p in bucket.params]
    else:
        layers = trainer.pipeline.layers
        frozen = [p for layer in layers for p in layer.parameters() if not p.requires_grad]
    assert frozen and all(p.grad is None for p in frozen)
    trainer.update(norm, 1e-2)
    folder = checkpoint.save(trainer, 1)
    states = [x for values in trainer.optimizer.named_states().values() for x in values]
    weights = trainer.reducer.weights + [frozen for frozen, _, _ in trainer.reducer.frozen]
    saved = [x.clone() for x in states + weights]
    for x in states + weights:
        x.zero_()
    assert checkpoint.load(trainer, folder) == 1
    assert all(map(torch.equal, saved, states + weights))
    held = state_bytes(trainer) if cfg.fast else (0, 0)
    return held, tensorfile.read_header(folder / checkpoint.OPTIMIZER)


def test_no_gradient_of_a_frozen_matrix_is_computed():
    same = SimpleNamespace(**dict.fromkeys(("enter", "by_sequence", "by_rank"), lambda x: x),
                           **dict.fromkeys(("start_enter", "start_leave"), lambda x: lambda: x))
    frozen = torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)
    bias, asked = torch.nn.Parameter(torch.ones(2)), []

    def defer(compute, grad, x, *params):
        asked.extend(params)
        return None, None

    x = torch.ones(4, 3, requires_grad=True)
    tensor_parallel.ColumnLinear.apply(x, frozen, bias, same, defer).sum().backward()
    assert asked == [None, bias] and x.grad is not None


@pytest.mark.parametrize("more", [{"schedule": "zb-h1"}, {"fast": ""}], ids=["engine", "root"])
@pytest.mark.parametrize("stage,trained,part,number", [
    (0, "biases", ".bias.exp_avg", 19), (1, "biases", ".bias.exp_avg", 19),
    (3, "biases", ".bias.exp_avg", 19),
    (0, "the last block", ".h.2.", 12)])  # the first stage has no trained parameter
def test_frozen_parameters_have_neither_gradients_nor_moments_nor_entries(
        corpus, tmp_path, stage, trained, part, number, more):
    cfg = config(corpus, dp=2, pp=2, zero=stage, microbatches=2, out=str(tmp_path), **more)
    for (formula, live), entries in pool(check(cfg, 1), _held, cfg, trained):
        assert formula == live
        assert all(part in name for name in entries) and len(entries) == 2 * number
