"""Split sequences (--sp, --cp) equal one process; bytes, saved memory and overlap as claimed."""

import math
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import engine.context_parallel as context_parallel
import engine.ddp as ddp
import engine.parts as parts
import engine.pipeline as pipeline
import train
from context_parallel import ring_attention, zigzag
from data.batches import Data
from engine.mesh import Mesh
from experts import kind_of
from model import build, causal_attention
from run.config import check
from sizes import GPTConfig
from tests.harness import (
    BATCH,
    SHAPE,
    VOCAB,
    _train,
    close,
    config,
    equals_one_process,
    mesh_of,
    pool,
    train_with,
)
from tests.pool import Pool
from tests.test_layouts import _bytes
from tests.test_schedules import _live
from tests.test_zero import _under_limit
from tests.trainer import Trainer


def _plain_attention(rank, cfg):
    return train_with(rank, cfg, context_parallel, "KINDS", {"ring": ring_attention})


@pytest.mark.parametrize("flags", [{"cp": 3, "block_size": 24}, {"cp": 2, "tp": 2}], ids=str)
def test_the_plain_ring_attention_gives_the_same(corpus, flags):
    equals_one_process(corpus, _plain_attention, microbatches=1, **flags)


def _strided(rank):
    """Outputs of both rings for a q whose numbers of a head do not lie side by side."""
    group = Mesh(cp=2).group("cp")
    q, k, v = (torch.randn(2, 3, 8, 4, dtype=torch.double,
                           generator=torch.Generator().manual_seed(i)) for i in range(3))
    q = q.transpose(2, 3).contiguous().transpose(2, 3)  # the same numbers, last stride 8
    assert q.stride(-1) == 8
    return context_parallel.ring_attention(q, k, v, group), ring_attention(q, k, v, group)


def test_the_ring_takes_any_strides():
    """torch's kernel reads the last dim with stride 1, whatever it is, and says nothing."""
    for fast, plain in pool(2, _strided):
        close(fast, plain, "attention")


def _validation(rank, cfg):
    trainer, data = Trainer(cfg, mesh_of(cfg), VOCAB), Data(cfg)
    return [trainer.validation_loss(data, batches) for batches in (1, 9, None)]


VALIDATIONS = [(0, {"microbatches": 1}), (0, {"cp": 4, "dp": 2, "zero": 3}),
               (0, {"cp": 2, "pp": 2, "schedule": "zb-v", "chunks": 2, "microbatches": 3,
                    "cp_attention": "all-to-all"}),
               (0, {"dp": 3, "tp": 2, "microbatches": 4}),  # one rank's last batch is empty
               (4, {"cp": 2, "tp": 2, "sp": True, "dp": 2, "ep": 2})]


@pytest.mark.parametrize("experts,flags", VALIDATIONS, ids=str)
def test_validation_takes_each_window_once(corpus, experts, flags):
    """87 windows, 36 in a batch, the first batch alone and all of them."""
    val = torch.from_numpy(np.fromfile(f"{corpus}/val.bin", "<u2").astype(np.int64))
    cfg = config(corpus, **{"microbatches": 2, "experts": experts, **flags})
    shape = GPTConfig(VOCAB, **SHAPE, n_experts=experts, top_k=cfg.top_k)
    model, S = build(shape, cfg.seed, torch.double, kind_of(shape)), cfg.block_size
    with torch.no_grad():
        each = [F.cross_entropy(model(val[i : i + S].view(1, S))[0], val[i + 1 : i + S + 1])
                for i in range(0, len(val) - S, S)]
    assert len(each) == 87
    want = [sum(each[:36]) / 36, sum(each) / 87, sum(each) / 87]
    for losses in pool(check(cfg, 1), _validation, cfg):
        close(losses, torch.stack(want), str(flags))


def _rounding(rank, C, narrow=torch.bfloat16):
    """How far the gradients of attention are from float64's: in `narrow` on the ring; alone."""
    group = Mesh(cp=C).group("cp")
    at = zigzag(16 * C, C, group.rank)
    wide = [torch.randn(2, 3, 16 * C, 8, dtype=torch.double,
                        generator=torch.Generator().manual_seed(i)).to(narrow) for i in range(4)]

    def gradients(dtype, core, at):
        q, k, v, given = (x[:, :, at].to(dtype) for x in wide)
        parts = [x.clone().requires_grad_() for x in (q, k, v)]
        core(*parts).backward(given)
        return [part.grad.double() for part in parts]

    every = slice(None)
    exact = gradients(torch.double, causal_attention, every)
    alone = gradients(narrow, causal_attention, every)
    ring = gradients(narrow, partial(context_parallel.ring_attention, group=group), at)
    return [[(x - y[:, :, at]).norm().item() for x, y in zip(got, exact, strict=True)]
            for got in (ring, [x[:, :, at] for x in alone])]


def test_the_ring_rounds_no_more_than_one_kernel():
    """The sums that go around have 32 bits. In 16, errors here are 1.2 to 1.4 of one kernel's; that
    a part is rounded before it is added makes 1.15."""
    got = pool(8, _rounding, 8)
    ring, alone = ([math.hypot(*errors) for errors in zip(*(rank[i] for rank in got), strict=True)]
                   for i in (0, 1))  # of q, k and v
    assert all(a < 1.25 * b for a, b in zip(ring, alone, strict=True)), (ring, alone)


aten = torch.ops.aten


def flash(q, k, v, dropout=0.0, causal=False, *, scale=None):
    assert q.itemsize == 2 and q.size(3) % 8 == 0
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse, None, None, q.size(2), k.size(2), torch.zeros(2), torch.zeros(2), None


def flash_backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed,
                   offset, *, scale=None):
    assert lse.is_contiguous() and lse.shape == q.shape[:3] and seed.shape == offset.shape == (2,)
    assert (max_q, max_k) == (q.size(2), k.size(2)) and (cum_q, cum_k) == (None, None)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal)


def cudnn(q, k, v, bias, needs_lse, dropout=0.0, causal=False, return_mask=False, *, scale=None):
    assert q.itemsize == 2 and q.size(3) % 8 == 0 and bias is None and needs_lse
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    seed = torch.zeros((), dtype=torch.long)
    return out, lse.unsqueeze(-1), None, None, q.size(2), k.size(2), seed, seed.clone(), None


def cudnn_backward(grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k,
                   dropout, causal, *, scale=None):
    assert lse.is_contiguous() and lse.shape == (*q.shape[:3], 1) and seed.dtype == torch.long
    assert (max_q, max_k) == (q.size(2), k.size(2)) and (bias, cum_q, cum_k) == (None, None, None)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse.squeeze(-1), 0.0, causal)


def efficient(q, k, v, bias, needs_lse, dropout=0.0, causal=False, *, scale=None):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, F.pad(lse, (0, -lse.size(2) % 32)), torch.zeros(1), torch.zeros(1)


def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, mask, causal=False, *,
                       scale=None):
    assert lse.is_contiguous() and lse.size(2) == -(-q.size(2) // 32) * 32
    lse, padding = lse.split([q.size(2), lse.size(2) - q.size(2)], dim=2)
    assert (padding == math.inf).all() and mask == [True, True, True, False]
    return *aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal), None


STAND_INS = {"cudnn": (cudnn, cudnn_backward), "flash": (flash, flash_backward),
             "efficient": (efficient, efficient_backward)}


def _gpu_kernels(rank, C, narrow, torchs_choice):
    kernels = torch.library.Library("aten", "IMPL")
    called = set()

    def noting(name, stand_in):
        def run(*args, **more):
            called.add(name)
            return stand_in(*args, **more)
        return run

    for name, pair in STAND_INS.items():
        for ending, stand_in in zip(("", "_backward"), pair, strict=True):
            kernels.impl(f"_scaled_dot_product_{name}_attention{ending}",
                         noting(name + ending, stand_in), "CPU")
    number = getattr(SDPBackend, torchs_choice).value
    with (patch.object(torch, "_fused_sdp_choice", lambda *args, **more: number),
          patch.object(torch.Tensor, "is_cuda", True)):
        errors = _rounding(rank, C, narrow)
        # torch's own shapes of what these kernels return, and its check of the arguments
        q, k, v = (torch.empty(2, 3, size, 8, dtype=narrow, device="meta") for size in (5, 7, 7))
        chosen = context_parallel.choose_kernel(q, k, v)
        out, lse, rest = context_parallel.kernel(chosen, q, k, v, False)
        assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float
        grads = context_parallel.kernel_backward(chosen, out, q, k, v, out, lse, rest, False)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    kernels._destroy()
    return called, errors


@pytest.mark.parametrize("narrow,torchs_choice,name", [
    (torch.bfloat16, "CUDNN_ATTENTION", "cudnn"),
    (torch.float16, "CUDNN_ATTENTION", "cudnn"),
    (torch.bfloat16, "FLASH_ATTENTION", "flash"),
    (torch.float16, "FLASH_ATTENTION", "flash"),
    (torch.float32, "EFFICIENT_ATTENTION", "efficient"),
    (torch.float32, "MATH", "efficient")], ids=str)
def test_the_ring_hands_a_gpus_kernels_what_they_take(narrow, torchs_choice, name):
    """The kernels' arguments, on stand-ins that compute on the CPU, and on the meta device. The
    kernel is the one that torch chooses. (MATH: torch takes no fused kernel if keys have fewer
    heads than queries, in 32 bits. The ring repeats the heads.)"""
    for called, (ring, alone) in pool(2, _gpu_kernels, 2, narrow, torchs_choice):
        assert called == {name, f"{name}_backward"}
        assert all(a < 1.5 * b for a, b in zip(ring, alone, strict=True)), (ring, alone)


def test_the_kernel_of_the_ring_takes_what_each_hop_gives_it(monkeypatch):
    """A rank with 2 tokens gives single ones in the hops of others' keys: cuDNN takes none of
    length 1, though it would take the rank's own 2."""
    def choice(q, k, v, **more):
        refused = 1 in (q.size(2), k.size(2), v.size(2))
        return (SDPBackend.FLASH_ATTENTION if refused else SDPBackend.CUDNN_ATTENTION).value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for tokens, kernel in ((2, "FLASH_ATTENTION"), (4, "CUDNN_ATTENTION")):
        q, k = (torch.empty(1, heads, tokens, 8, dtype=torch.bfloat16) for heads in (4, 2))
        assert context_parallel.choose_kernel(q, k, k).name == kernel


def test_torch_chooses_a_kernel_from_these_arguments():
    """The real _fused_sdp_choice, on CPU tensors: what it returns is an SDPBackend."""
    q, k = (torch.randn(1, heads, 4, 8) for heads in (4, 2))
    number = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=True)
    assert SDPBackend(number).name in ("MATH", "FLASH_ATTENTION")
    assert context_parallel.choose_kernel(q, k, k) is None


def _bug_of_split_sequences(rank, cfg, bug):
    def from_zero(model, group, kind, split=context_parallel.split_sequences):
        own = split(model, group, kind)
        model.layers[0].positions = lambda idx: torch.arange(len(own))
        return own

    def shifted_late(self, batches):
        rows = [torch.cat([ids[:, self.positions], targets[:, self.positions[-1:]]], dim=1)
                for ids, targets, _ in batches]
        return [(row[:, :-1], row[:, 1:], None) for row in rows]

    def divided_twice(self, *args, run=pipeline.Pipeline.run):
        self.tokens = cfg.batch_size * cfg.block_size * cfg.cp
        return run(self, *args)

    def finish(self, averaged, finish=ddp.DDP.finish):
        groups = {bucket: bucket.sum_at_end for bucket in self.buckets}
        for bucket in self.buckets:
            bucket.sum_at_end = [g for g in groups[bucket] if averaged or g.name != "tp"]
        finish(self)
        for bucket in self.buckets:
            bucket.sum_at_end = groups[bucket]
            for group in groups[bucket] if averaged else ():
                bucket.grad_shard.div_(group.size)

    def another_owner(mine, theirs, half, visible=context_parallel.visible):
        return visible(mine, theirs if mine == theirs else cfg.cp - 1 - theirs, half)

    def narrow(out, lse, part, part_lse, merge=context_parallel.merge):
        short, short_lse = out.bfloat16(), lse.bfloat16()
        merge(short, short_lse, part, part_lse.bfloat16())
        out.copy_(short)
        lse.copy_(short_lse)

    def last_part_only(out, lse, part, part_lse):
        out.copy_(part)
        lse.copy_(part_lse)

    patches = {
        "replicated gradients not reduced": (ddp.DDP, "finish", lambda self: finish(self, False)),
        "replicated gradients averaged": (ddp.DDP, "finish", lambda self: finish(self, True)),
        "positions start at 0": (parts, "split_sequences", from_zero),
        "targets shifted after the split": (train.Trainer, "own", shifted_late),
        "loss divided twice": (pipeline.Pipeline, "run", divided_twice),
        "keys of another owner": (context_parallel, "visible", another_owner),
        "merged in bfloat16": (context_parallel, "merge", narrow),
        "merged without rescaling": (context_parallel, "merge", last_part_only),
    }
    return train_with(rank, cfg, *patches[bug])


@pytest.mark.parametrize("bug,flags", [
    ("replicated gradients not reduced", {"tp": 2, "sp": True}),
    ("replicated gradients averaged", {"tp": 2, "sp": True}),
    ("positions start at 0", {"cp": 2}), ("targets shifted after the split", {"cp": 2}),
    ("loss divided twice", {"cp": 2}), ("keys of another owner", {"cp": 4}),
    ("merged in bfloat16", {"cp": 2}), ("merged without rescaling", {"cp": 2})], ids=str)
def test_bugs_of_split_sequences_are_noticed(corpus, bug, flags):
    with pytest.raises(AssertionError, match="off by|copies of .* differ|replicas disagree"):
        equals_one_process(corpus, _bug_of_split_sequences, bug, microbatches=1, **flags)


@pytest.mark.parametrize("flags", [
    {"cp": 2, "tp": 2, "sp": True, "microbatches": 3}, {"cp": 4, "microbatches": 2},
    {"cp": 3, "block_size": 24}, {"cp": 4, "cp_attention": "all-to-all"}, {"tp": 4, "sp": True},
    {"cp": 2, "recompute": True}, {"pp": 2, "tp": 2, "sp": True, "microbatches": 3}], ids=str)
def test_split_sequences_send_the_formulas(corpus, flags):
    cfg = config(corpus, **{"microbatches": 1, **flags})
    got, width = pool(check(cfg, 1), _bytes, cfg), 8
    C, T, m, S, L = cfg.cp, cfg.tp, cfg.microbatches, cfg.block_size, cfg.n_layer
    bSC = BATCH // m * S // C * cfg.n_embd  # elements of a microbatch's activation, on all of T
    h = cfg.n_embd // T  # the width of this rank's heads
    by_tp = want_tp = 0  # of all ranks: between four, some send more of the loss, a single number
    for rank, (sent, numels) in enumerate(got):
        if C > 1:
            forward, backward = 2 * (C - 1) * bSC // T, 4 * (C - 1) * bSC // T
            assert forward == 2 * (C - 1) * (BATCH // m * S * h) // C  # of the file's head
            if cfg.cp_attention == "all-to-all":
                forward = backward = 4 * (C - 1) * (BATCH // m * S * h) // C**2
            again = forward if cfg.recompute else 0
            assert sent["cp"] == m * L * (forward + again + backward) * width
        if T > 1:
            stage = rank // (C * T)
            first, last = stage == 0, stage == cfg.pp - 1
            tokens = bSC // cfg.n_embd
            reduced = (4 * numels["blocks"] + first + last) * bSC + last  # last: the loss
            gathered_again = 2 * numels["blocks"] * bSC  # half an all-reduce each
            for_loss = last * T * tokens  # a number per token of each rank
            by_tp += sent["tp"] * T
            want_tp += (T - 1) * width * (
                m * (2 * reduced + gathered_again + for_loss) + 2 * numels["over_tp"])
        if cfg.pp > 1:
            assert sent["pp"] == m * bSC // T * width
    assert by_tp == want_tp


def test_peak_memory_of_a_long_sequence_falls_with_c_and_with_sp(long_corpus):
    """Four blocks, one sequence of 1024: what a step takes at its peak, parameters apart."""
    peak = {}
    for name, flags in {"alone": {}, "cp": {"cp": 4}, "all-to-all": {
            "cp": 4, "cp_attention": "all-to-all"}, "tp": {"tp": 4},
            "sp": {"tp": 4, "sp": True}}.items():
        cfg = config(long_corpus, n_layer=4, n_embd=96, n_head=4, block_size=1024, batch_size=1,
                     microbatches=1, dtype="float32", **flags)
        peak[name] = max(got[2] for got in pool(check(cfg, 1), _live, cfg))
    # a block saves 16 or, under tp alone, 4 + 12/4 of B S C; there are transients beside that
    assert peak["cp"] < 0.33 * peak["alone"] and peak["all-to-all"] < 0.36 * peak["alone"], peak
    assert peak["sp"] < 0.75 * peak["tp"] and peak["tp"] < 0.6 * peak["alone"], peak


@pytest.mark.parametrize("C,outcome", [(1, "out of memory"), (4, "trains")])
def test_a_sequence_too_long_for_one_rank_trains_on_four(long_corpus, C, outcome):
    cfg = config(long_corpus, cp=C, n_layer=8, n_embd=96, n_head=2, block_size=4096, batch_size=1,
                 microbatches=1, dtype="float32")
    block = 16 * 4096 * 96 * 4  # bytes that one saves: 25 MB
    fresh = Pool()  # address space that an old process has freed would be used again
    fresh.start(C)
    try:
        # A step on four ranks takes 3.6 blocks, and what shared memory has mapped at both ends
        assert fresh(C, _under_limit, cfg, 5 * block) == [outcome] * C
    finally:
        fresh.stop()


def _landings(rank, cfg):
    """Where the ring's messages of two steps arrive: [(address, bytes)]."""
    mesh = mesh_of(cfg)
    group, seen = mesh.group("cp"), set()
    exchange = group.exchange

    def noting(send, dst, recv, src):
        seen.add((recv.data_ptr(), recv.nbytes))
        return exchange(send, dst, recv, src)

    with patch.object(group, "exchange", noting):
        _train(rank, cfg, steps=2, mesh=mesh, kinds=())
    return seen


def test_the_rings_messages_arrive_in_the_same_four_tensors(corpus):
    """Two of keys and values, two of their gradients, for all layers, microbatches and steps. New
    ones would pile up on a GPU: their memory comes back late."""
    cfg = config(corpus, cp=3, block_size=12, microbatches=2)
    for seen in pool(3, _landings, cfg):
        assert len(seen) == 4, seen
