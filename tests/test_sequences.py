"""Split sequences: ring attention, all-to-all and sequence parallelism compute what plain formulas
say, and send and hold what their files say; so does the loss over a split vocabulary."""

import itertools
import math
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import context_parallel
import ddp
import pipeline
import train
from collectives import Group, all_reduce
from context_parallel import KINDS, split_sequences, zigzag
from data.batches import Data
from experts import kind_of
from mesh import Mesh
from model import ABSENT, build, causal_attention
from run.config import check
from shard import bounds, tag_whole
from sizes import GPTConfig, LlamaConfig
from tensor_parallel import (
    VocabularyLoss,
    copy_to_ranks,
    gather_tokens,
    scatter_tokens,
    split_matrices,
    sum_over_ranks,
)
from tests.harness import BATCH, SHAPE, VOCAB, close, config, equals_one_process, train_with
from tests.pool import pool
from tests.test_schedules import _live

SOLO = Group("solo", torch.device("cpu"), [0], 0)


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


# ---- attention over tokens of several ranks ----


def plain_attention(q, k, v):
    """By the formula: softmax(q k^T / sqrt(hs)) v, where no token sees a later one."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.size(3))
    hidden = torch.ones(scores.shape[2:]).triu(1).bool()
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


class Events(list):
    """What a rank does, in order: "post" and "await" of a message; the queries and keys of each
    call of the kernel, and whether it is causal."""

    def __init__(self, group):
        exchange = group.exchange

        def noted_exchange(*args, **more):
            self.append("post")
            work = exchange(*args, **more)
            wait = work.wait
            work.wait = lambda: (self.append("await"), wait())
            return work

        group.exchange = noted_exchange

    def noting(self, function, q_at):
        def run(*args):
            q, k = args[q_at : q_at + 2]
            self.append((q.size(2), k.size(2), args[-1]))
            return function(*args)

        return run


def _attention(rank, N, kind, nh, n_kv, strided=False):
    """This rank's tokens of the result and of the gradients of q, k, v; its positions; elements
    sent forward and backward; its Events of both."""
    group = Mesh(cp=N).group("cp")
    S = 8 * N
    at = zigzag(S, N, rank)
    q, k, v, grad = (random(2, heads, S, 4, seed=i)[:, :, at]
                     for i, heads in enumerate((nh, n_kv, n_kv, nh)))
    if strided:  # the same numbers; those of a head do not lie side by side
        q, k, v, grad = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v, grad))
        assert q.stride(-1) > 1
    for x in (q, k, v):
        x.requires_grad_()
    events = Events(group)
    with (patch.object(context_parallel, "kernel", events.noting(context_parallel.kernel, 1)),
          patch.object(context_parallel, "kernel_backward",
                       events.noting(context_parallel.kernel_backward, 2))):
        out = KINDS[kind](q, k, v, group)
        sent, forward = group.bytes_sent // 8, len(events)
        out.backward(grad)
    found = [x.detach() for x in (out, q.grad, k.grad, v.grad)]
    return at, found, (sent, group.bytes_sent // 8 - sent), (events[:forward], events[forward:])


@pytest.mark.parametrize("N,kind,nh,n_kv,strided", [
    (2, "ring", 3, 3, False), (3, "ring", 3, 3, False), (4, "ring", 4, 4, False),
    (3, "ring", 6, 2, False), (2, "ring", 4, 1, False), (2, "ring", 4, 2, True),
    (2, "all-to-all", 4, 2, False), (3, "all-to-all", 6, 3, False), (4, "all-to-all", 4, 4, True)])
def test_attention_of_split_tokens_is_the_plain_formula(N, kind, nh, n_kv, strided):
    """Forward and backward, in float64; with fewer heads of keys than of queries; for tensors of
    any strides."""
    q, k, v, grad = (random(2, heads, 8 * N, 4, seed=i)
                     for i, heads in enumerate((nh, n_kv, n_kv, nh)))
    for x in (q, k, v):
        x.requires_grad_()
    out = plain_attention(q, k, v)
    out.backward(grad)
    want = [out.detach(), q.grad, k.grad, v.grad]
    for at, found, _, _ in pool(N, _attention, N, kind, nh, n_kv, strided):
        for name, got, whole in zip(("out", "q", "k", "v"), found, want, strict=True):
            close(got, whole[:, :, at], name, 1e-13)


@pytest.mark.parametrize("N", [2, 3, 4])
def test_attention_sends_what_its_file_says(N):
    """Each rank, of B S C = 2 x 8N x 16 elements."""
    whole = 2 * 8 * N * 16
    ring = 2 * (N - 1) * whole // N, 4 * (N - 1) * whole // N  # backward: keys and their gradients
    for _, _, sent, _ in pool(N, _attention, N, "ring", 4, 4):
        assert sent == ring
    if 4 % N == 0:
        swaps = 4 * (N - 1) * whole // N**2
        for _, _, sent, _ in pool(N, _attention, N, "all-to-all", 4, 4):
            assert sent == (swaps, swaps)


@pytest.mark.parametrize("N", [2, 3, 4])
def test_ranks_of_the_ring_do_equal_work_and_skip_hidden_segments(N):
    """A rank's own keys take a causal kernel of its 8 tokens; those of another rank have 8 x 4
    pairs of a query and a key, half of all: the other half is hidden from all of its queries."""
    for _, _, _, halves in pool(N, _attention, N, "ring", 2, 2):
        for events in halves:
            work = [event for event in events if event not in ("post", "await")]
            own, *others = work
            assert own == (8, 8, True) and len(others) == N - 1
            assert all(queries * keys == 32 and not causal for queries, keys, causal in others)


@pytest.mark.parametrize("N", [2, 4])
def test_the_next_keys_travel_while_attention_computes(N):
    """Posted before a hop's kernel, awaited after it. Backward: the sum of the keys' gradients
    that was posted after a hop is awaited after the next one's kernel."""
    for _, _, _, halves in pool(N, _attention, N, "ring", 2, 2):
        forward, backward = (["compute" if isinstance(event, tuple) else event for event in events]
                             for events in halves)
        assert forward == ["post", "compute", "await"] * (N - 1) + ["compute"]
        for i, event in enumerate(backward):
            if event == "compute":
                under_way = backward[:i].count("post") - backward[:i].count("await")
                hop = backward[:i].count("compute")
                # the next keys; from hop 2 on the gradients of the keys before
                assert under_way == (hop < N - 1) + (hop > 1)


def _largest(rank, N, S):
    """Bytes of the largest tensor that forward and backward of a ring allocate."""
    group = Mesh(cp=N).group("cp")
    q, k, v = (torch.randn(1, 1, S // N, 8, requires_grad=True) for _ in range(3))
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        KINDS["ring"](q, k, v, group).sum().backward()
    return max(event.nbytes() for event in profile.kineto_results.events()
               if event.name() == "[memory]")


def test_no_rank_has_a_matrix_of_scores_in_memory():
    """Not even that of a hop, 2048 x 2048 numbers, of which a quarter would fail here. (The kernel
    has 1 MB of its own.)"""
    for largest in pool(2, _largest, 2, 4096):
        assert 2 * 2048 * 8 * 4 <= largest < 4 * 2048 * 2048 // 4


@pytest.mark.parametrize("N", [1, 2, 3, 5])
def test_zigzag_gives_each_token_to_one_rank_and_each_rank_an_early_and_a_late_segment(N):
    each = [zigzag(8 * N, N, rank) for rank in range(N)]
    assert torch.cat(each).sort().values.tolist() == [*range(8 * N)]
    assert each[0].tolist() == [0, 1, 2, 3, *range(8 * N - 4, 8 * N)]
    assert {at.sum().item() for at in each} == {4 * (8 * N - 1)}  # the mean is the same


def _positioned(rank, arch):
    """A model's logits of this rank's tokens, and the whole model's of the same tokens."""
    group = Mesh(cp=3).group("cp")
    cfg = config("", arch=arch, block_size=12, **{"n_kv_head": 4, "n_hidden": 64} if
                 arch == "llama" else {})
    shape = train.config_of(cfg, VOCAB)
    model, alone = (build(shape, dtype=torch.double, kind=kind_of(shape)) for _ in range(2))
    at = split_sequences(model, group)
    ids = torch.arange(24).view(2, 12) * 7 % VOCAB
    return model(ids[:, at]).detach(), alone(ids).detach()[:, at]


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_positions_travel_with_the_tokens(arch):
    for got, want in pool(3, _positioned, arch):
        close(got, want, "logits", 1e-13)


def _rounding(rank, C, narrow=torch.bfloat16):
    """How far the gradients of attention are from float64's: in `narrow` on the ring; alone."""
    group = Mesh(cp=C).group("cp")
    at = zigzag(16 * C, C, group.rank)
    wide = [random(2, 3, 16 * C, 8, seed=i).to(narrow) for i in range(4)]

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


# ---- a GPU's kernels, on stand-ins ----

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


# ---- sequence parallelism ----


def _f_and_g(rank, T):
    """{operator: (its result, the gradient of its input)} on this rank."""
    group = Mesh(tp=T).group("tp")
    S = 2 * T
    found = {}
    for name, operator, tokens in (("copy", copy_to_ranks, S), ("sum", sum_over_ranks, S),
                                   ("gather", gather_tokens, 2), ("scatter", scatter_tokens, S)):
        x = random(3, tokens, 5, seed=rank).requires_grad_()
        y = operator(x, group)
        y.backward(random(*y.shape, seed=10 + rank))
        found[name] = y.detach(), x.grad
    return found


@pytest.mark.parametrize("T", [2, 3])
def test_f_and_g_and_their_gradients_are_sums_and_pieces(T):
    """x of rank r is x_r, the gradient of its result is g_r."""
    S = 2 * T
    whole_x = [random(3, S, 5, seed=r) for r in range(T)]
    whole_g = [random(3, S, 5, seed=10 + r) for r in range(T)]
    own_x = torch.cat([random(3, 2, 5, seed=r) for r in range(T)], dim=1)
    own_g = torch.cat([random(3, 2, 5, seed=10 + r) for r in range(T)], dim=1)
    for rank, found in enumerate(pool(T, _f_and_g, T)):
        tokens = slice(2 * rank, 2 * rank + 2)
        want = {"copy": (whole_x[rank], sum(whole_g)), "sum": (sum(whole_x), whole_g[rank]),
                "gather": (own_x, sum(whole_g)[:, tokens]),
                "scatter": (sum(whole_x)[:, tokens], own_g)}
        for name, (y, grad) in want.items():
            close(found[name][0], y, name, 1e-14)
            close(found[name][1], grad, f"gradient of {name}", 1e-14)


def _shapes(rank, cfg):
    """{layer: shape of its input} in a step."""
    mesh = train.make_mesh(cfg, cfg.device)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    seen = {}
    block = trainer.pipeline.stages[0][1]
    for name in ("ln_1", "ln_2", "attn.c_proj", "mlp.c_proj"):
        block.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: seen.update({name: tuple(args[0].shape)}))
    head = trainer.pipeline.stages[0][-1]
    head.ln_f.register_forward_pre_hook(
        lambda module, args: seen.update({"ln_f": tuple(args[0].shape)}))
    trainer.step(Data(cfg).training(cfg, 0, mesh), 1e-3)
    return seen


@pytest.mark.parametrize("sp", [False, True])
def test_under_sp_a_rank_has_a_slice_of_the_tokens_outside_of_matrices(corpus, sp):
    cfg = config(corpus, tp=4, sp=sp, microbatches=1)
    S, C = cfg.block_size, cfg.n_embd
    outside = (BATCH, S // 4 if sp else S, C)
    for seen in pool(check(cfg, 1), _shapes, cfg):
        assert seen == {"ln_1": outside, "ln_2": outside, "ln_f": outside,
                        "attn.c_proj": (BATCH, S, C // 4), "mlp.c_proj": (BATCH, S, C)}


def _bytes(rank, cfg):
    """({group: bytes sent in a step}, elements of this rank's Flats that are summed over tp)"""
    mesh = train.make_mesh(cfg, cfg.device)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    before = {name: group.bytes_sent for name, group in mesh.groups.items()}
    trainer.step(Data(cfg).training(cfg, 0, mesh), 1e-3)
    sent = {name: group.bytes_sent - before.get(name, 0) for name, group in mesh.groups.items()}
    return sent, sum(flat.weights.numel() for flat in trainer.reducer.trained
                     if mesh.group("tp") in flat.others)


@pytest.mark.parametrize("flags", [
    {"cp": 2, "tp": 2, "sp": True, "microbatches": 3}, {"tp": 4, "microbatches": 2},
    {"tp": 4, "sp": True}, {"cp": 2, "recompute": True}], ids=str)
def test_a_step_of_split_sequences_sends_the_formulas(corpus, flags):
    """All ranks together, because of a number that T does not divide some send more."""
    cfg = config(corpus, **{"microbatches": 1, **flags})
    C, T, m, S, L = cfg.cp, cfg.tp, cfg.microbatches, cfg.block_size, cfg.n_layer
    activation = BATCH * S // C * cfg.n_embd  # elements of a step on one rank's tokens
    tokens = BATCH * S // C
    got = pool(check(cfg, 1), _bytes, cfg)
    for sent, _ in got:
        hops = 2 * (C - 1) * (1 + 1 * cfg.recompute + 2)  # forward, again; backward: twice as much
        assert sent["cp"] == L * hops * activation // T * 8
    if T > 1:
        over_tp = got[0][1]
        assert (over_tp > 0) == cfg.sp
        # A half of an all-reduce has (T-1)/T n. With --sp each column's backward gathers x, no
        # more: autograd has kept the whole x
        all_reduces = (4 * L + 2) * activation + over_tp
        want = 2 * (T - 1) * all_reduces + T * (T - 1) * tokens + m * 2 * (T - 1)
        assert sum(sent["tp"] for sent, _ in got) == C * want * 8


def test_peak_memory_of_a_long_sequence_falls_with_c_and_with_sp(long_corpus):
    """Four blocks, one sequence of 1024: what a step takes at its peak, parameters apart."""
    peak = {}
    for name, flags in {"alone": {}, "cp": {"cp": 4}, "tp": {"tp": 4},
                        "sp": {"tp": 4, "sp": True}}.items():
        cfg = config(long_corpus, n_layer=4, n_embd=96, n_head=4, block_size=1024, batch_size=1,
                     microbatches=1, dtype="float32", **flags)
        peak[name] = max(got[2] for got in pool(check(cfg, 1), _live, cfg))
    # a block saves 16 or, under tp alone, 4 + 12/4 of B S C; there are transients beside that
    assert peak["cp"] < 0.4 * peak["alone"] and peak["tp"] < 0.7 * peak["alone"], peak
    assert peak["sp"] < 0.8 * peak["tp"], peak


@pytest.mark.parametrize("shape,says", [
    (GPTConfig(3, 4, 1, 4, 16), "^--tp 4 must be at most the 3 words of the vocabulary$"),
    (GPTConfig(67, 4, 1, 2, 16), "^--tp 4 must divide the 2 heads$"),
    (LlamaConfig(67, 4, 1, 4, 16, n_kv_head=2, n_hidden=32), "^--tp 4 must divide the 2 heads$")],
    ids=["words", "heads", "heads of keys"])
def test_more_tensor_ranks_than_words_or_heads_are_refused(shape, says):
    """Before a message: a rank without words would fail in its first step, and its peers wait."""
    model = build(shape, kind=kind_of(shape))
    tag_whole(model, SOLO)
    with pytest.raises(ValueError, match=says):
        split_matrices(model, Group("tp", SOLO.device, [0, 1, 2, 3], 0))


# ---- bugs of the field ----


def _bug_of_split_sequences(rank, cfg, bug):
    def from_zero(model, group, kind):
        own = split_sequences(model, group, kind)
        model.layers[0].positions = lambda idx: torch.arange(len(own))
        return own

    def shifted_late(self, batches):
        rows = [torch.cat([ids[:, self.positions], targets[:, self.positions[-1:]]], dim=1)
                for ids, targets in batches]
        return [(row[:, :-1], row[:, 1:]) for row in rows]

    def divided_twice(self, *args, run=pipeline.Pipeline.run):
        self.tokens = cfg.batch_size * cfg.block_size * cfg.cp
        return run(self, *args)

    def gradients(self, averaged):
        self.start_rest()
        found = []
        for flat in self.trained:
            part, begin = self.reduced(flat)
            for group in flat.others:
                if averaged:
                    all_reduce(part, group).div_(group.size)
            found += [values for _, _, values in flat.pieces(part, begin)]
            for param in flat.params:
                param.grad = None
        return found

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
        "replicated gradients not reduced": (ddp.DDP, "gradients",
                                             lambda self: gradients(self, False)),
        "replicated gradients averaged": (ddp.DDP, "gradients",
                                          lambda self: gradients(self, True)),
        "positions start at 0": (train, "split_sequences", from_zero),
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


# ---- the loss over a split vocabulary ----


def _vocabulary_loss(rank, T, case, dtype):
    """(loss, this rank's term of the gradient of x, the gradient of its words' rows, its words, the
    loss alone, without gradients)"""
    group = Mesh(tp=T).group("tp")
    x, weight, targets = vocabulary_case(case, dtype)
    words = bounds(len(weight), group)
    rows = weight[slice(*words)].clone().requires_grad_()
    x.requires_grad_()
    loss = VocabularyLoss.apply(x, rows, targets, words, group)
    (loss / 8).backward()
    with torch.no_grad():
        again = VocabularyLoss.apply(x, rows, targets, words, group)
    return loss.detach(), x.grad, rows.grad, words, again


def vocabulary_case(case, dtype):
    """(x, weight, targets), with absent targets, and likely ones, in the first tenth."""
    tokens, C, V = case
    x, weight = (random(n, C, seed=n).to(dtype) for n in (tokens, V))
    targets = torch.randint(V, (tokens,), generator=torch.Generator().manual_seed(0))
    targets[: tokens // 10] = (x @ weight.t())[: tokens // 10].argmax(-1)
    targets[::7] = ABSENT
    return x, weight, targets


CASES = {"chunks": (600, 24, VOCAB),  # of 256 tokens at a time, and 88
         "words fewer than width": (40, 90, 7), "one chunk": (50, 24, VOCAB)}


@pytest.mark.parametrize("T", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_of_a_split_vocabulary_is_cross_entropy(case, T):
    """T divides none of the numbers of words."""
    x, weight, targets = vocabulary_case(CASES[case], torch.double)
    for each in (x, weight):
        each.requires_grad_()
    want = F.cross_entropy(x @ weight.t(), targets, reduction="sum", ignore_index=ABSENT)
    (want / 8).backward()
    got = pool(T, _vocabulary_loss, T, CASES[case], torch.double)
    for loss, _, rows, words, again in got:
        close(loss, want.detach(), "loss", 1e-13)
        assert torch.equal(loss, again)
        close(rows, weight.grad[slice(*words)], "gradient of the words", 1e-13)
    close(sum(grad for _, grad, *_ in got), x.grad, "gradient of x", 1e-13)
    assert sum(grad for _, grad, *_ in got)[::7].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 3])
def test_the_loss_of_16_bits_is_summed_in_32(T, dtype):
    """The loss of logits of 16 bits, to 2^-8 (bfloat16 keeps 8 bits of a logit), but all chunks
    summed in 32; gradients are rounded to 16 at last."""
    x, weight, targets = (each.requires_grad_() if each.is_floating_point() else each
                          for each in (y.double() if y.is_floating_point() else y
                                       for y in vocabulary_case(CASES["chunks"], dtype)))
    want = F.cross_entropy(x @ weight.t(), targets, reduction="sum", ignore_index=ABSENT)
    (want / 8).backward()
    got = pool(T, _vocabulary_loss, T, CASES["chunks"], dtype)
    for loss, _, rows, words, _ in got:
        assert loss.dtype == torch.float and rows.dtype == dtype
        close(loss, want.detach(), "loss", 2**-8)
        close(rows, weight.grad[slice(*words)], "gradient of the words", 2**-6)
    close(sum(grad.double() for _, grad, *_ in got), x.grad, "gradient of x", 2**-6)


def test_the_gradient_of_the_words_stays_in_float16s_range():
    """The sum over 1024 tokens is -89600, beyond float16's 65504; divided by them it is small."""
    weight = torch.zeros(8, 1024).half().requires_grad_()
    x = torch.zeros(1024, 1024).half().requires_grad_()
    x.data[:, 0] = 100
    targets = torch.zeros(1024, dtype=torch.long)
    (VocabularyLoss.apply(x, weight, targets, (0, 8), SOLO) / 1024).backward()
    close(weight.grad[0, 0], -87.5, "gradient", 1e-3)


def test_the_logits_of_all_tokens_are_never_in_memory_at_once():
    x, weight = torch.randn(2048, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    targets = torch.zeros(2048, dtype=torch.long)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        VocabularyLoss.apply(x, weight, targets, (0, 1000), SOLO).backward()
    memory = [e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]"]
    chunk = 256 * 1000 * 4  # bytes of logits; their shares, and the mask, are as large
    assert chunk <= max(itertools.accumulate(memory)) < 4 * chunk < 2048 * 1000 * 4


# ---- validation ----


def _validation(rank, cfg):
    mesh = train.make_mesh(cfg, cfg.device)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    log = SimpleNamespace(validating=lambda done, batches: None)
    return [trainer.validate(data, log, batches) for batches in (1, 9, None)]


@pytest.mark.parametrize("flags", [
    {"cp": 2, "dp": 2, "zero": 3, "microbatches": 1}, {"cp": 2, "pp": 2, "microbatches": 3},
    {"dp": 3, "tp": 2, "microbatches": 4},  # one rank's last batch is empty
    {"tp": 2, "sp": True, "dp": 2, "ep": 2, "experts": 4}], ids=str)
def test_validation_takes_each_window_once(corpus, flags):
    """87 windows of 8 in 700 tokens, 36 in a batch: the first batch alone and all of them."""
    val = torch.from_numpy(np.fromfile(f"{corpus}/val.bin", "<u2").astype(np.int64))
    cfg = config(corpus, **{"microbatches": 2, **flags})
    shape = GPTConfig(VOCAB, **SHAPE, n_experts=cfg.experts, top_k=cfg.top_k)
    model, S = build(shape, cfg.seed, torch.double, kind_of(shape)), cfg.block_size
    with torch.no_grad():
        logits = model(val[: 87 * S].view(87, S))
        targets = val[1 : 87 * S + 1].view(87, S)
        each = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none").mean(1)
    want = [each[:36].mean(), each.mean(), each.mean()]
    for losses in pool(check(cfg, 1), _validation, cfg):
        close(losses, torch.stack(want), str(flags))
