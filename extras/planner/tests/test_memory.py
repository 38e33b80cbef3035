"""The planner's formulas of memory, against a block and an optimizer."""

import weakref

import pytest
import torch

import sizes
import train
from extras.planner import memory
from run.config import check
from sizes import config_of
from tests.harness import BATCH, VOCAB, config, mesh_of
from tests.pool import pool


def _saved_by_a_block(rank, cfg):
    """Bytes that one block's forward leaves for backward, parameters not counted."""
    trainer = train.Trainer(cfg, mesh_of(cfg), VOCAB)
    block = trainer.pipeline.stages[0].layers[1]
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    # Not a leaf, which a graph would hold, whether backward needs its values or not
    x = torch.randn(trainer.pipeline.shape, dtype=trainer.dtype, requires_grad=True).clone()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # kept alive: no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x)
    saved = {at: tensor.untyped_storage().nbytes() for at, tensor in kept.items()
             if at not in parameters}
    # recompute.py keeps the input, and its hooks hide what autograd saves in the block
    at, size = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
    is_kept = weakref.ref(x)
    del x
    if is_kept() is not None:
        saved[at] = size
    assert y.requires_grad  # keeps y, and so its graph, alive until here
    return sum(saved.values())


def beside_the_formula(cfg, tokens, w):
    """What a Llama's block saves beside the planner's formula: on CPUs torch composes RMSNorm of
    simple operations, which save the normalized input, too, all in 32 bits at least; and, once for
    all sequences, cosine and sine of each position's angles, for queries and for keys."""
    C, wide = cfg.n_embd, max(w, 4)
    norms = 2 * C * wide  # the normalized inputs of two norms
    norms += 2 * (C + 1) * (wide - w)  # the inputs and a statistic, in 32 bits and not in 16
    tables = 2 * (cfg.block_size // cfg.cp) * C // cfg.n_head * w
    return norms * tokens / (cfg.tp if cfg.sp else 1) + tables


@pytest.mark.parametrize("flags", [
    {"arch": "llama", "n_kv_head": 4}, {"arch": "llama", "n_kv_head": 3, "tp": 3, "n_hidden": 66},
    {"arch": "llama", "n_kv_head": 4, "tp": 2, "sp": True, "cp": 2},
    {}, {"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"cp": 3, "block_size": 24},
    {"cp": 2, "cp_attention": "all-to-all"}, {"tp": 2, "sp": True, "cp": 2},
    {"recompute": True}, {"tp": 2, "sp": True, "cp": 2, "recompute": True}], ids=str)
def test_a_block_saves_the_formula(corpus, flags):
    for dtype, w in (("float64", 8), ("float32", 4), ("bfloat16", 2)):
        cfg = config(corpus, dtype=dtype, microbatches=3, **flags)
        got = pool(check(cfg, 1), _saved_by_a_block, cfg)
        model = config_of(cfg, VOCAB)
        layout = memory.Layout(tp=cfg.tp, cp=cfg.cp, sp=cfg.sp, cp_attention=cfg.cp_attention,
                               microbatches=cfg.microbatches)
        job = memory.Job(model, BATCH, width=w)
        want = memory.tokens_of(job, layout) * memory.saved_by_block(job, layout, cfg.recompute)
        if cfg.arch == "llama" and not cfg.recompute:
            want += beside_the_formula(cfg, memory.tokens_of(job, layout), w)
        assert got == [want] * len(got), (dtype, got, want)


def test_an_optimizer_with_one_moment_takes_half_the_bytes():
    job = memory.Job(sizes.GPTConfig(), 8, width=4, grad_width=4)
    two, one = (memory.memory(job._replace(moments=n), memory.Layout(dp=2, zero=1)) for n in (2, 1))
    assert one["optimizer"] == two["optimizer"] / 2 and one["weights"] == two["weights"]
