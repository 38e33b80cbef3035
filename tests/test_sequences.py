"""Split sequences: ring attention and all-to-all compute what plain formulas say, and send what the
head of their file says; a block holds what the heads of the files say, also under --sp."""

import math
from unittest.mock import Mock, patch

import pytest
import torch

import context_parallel
from context_parallel import ATTENTIONS, kernel, kernel_backward, merge, zigzag
from mesh import Mesh
from model import causal_attention
from tests.harness import close, in_layout, make_trainer, random, ranks

# ---- attention over tokens of several ranks ----


def plain_attention(q, k, v):
    """By the formula: softmax(q k^T / sqrt(hs)) v, where no token sees a later one."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.size(3))
    hidden = torch.ones(scores.shape[2:]).triu(1).bool()
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def inputs(N, nh, n_kv, hs):
    """q, k, v and the gradient of the output: two sequences of 8 N tokens."""
    return [random(2, heads, 8 * N, hs, seed=i) for i, heads in enumerate((nh, n_kv, n_kv, nh))]


def _attention(rank, N, attention, nh, n_kv, hs):
    """(positions; this rank's tokens of the result and of the gradients of q, k, v; elements sent
    forward and backward; (queries, keys, causal) of each call of the kernel forward, backward)"""
    group = Mesh(cp=N).group("cp")
    at = zigzag(8 * N, N, rank)
    q, k, v, grad = (x[:, :, at] for x in inputs(N, nh, n_kv, hs))
    for x in (q, k, v):
        x.requires_grad_()
    with (patch.object(context_parallel, "kernel", Mock(wraps=kernel)) as forward,
          patch.object(context_parallel, "kernel_backward", Mock(wraps=kernel_backward)) as back):
        out = ATTENTIONS[attention](q, k, v, group)
        sent = group.bytes_sent // 8
        out.backward(grad)
    found = [x.detach() for x in (out, q.grad, k.grad, v.grad)]
    calls = [[(call.args[at].size(2), call.args[at + 1].size(2), call.args[-1])
              for call in mock.call_args_list] for mock, at in ((forward, 1), (back, 2))]
    return at, found, (sent, group.bytes_sent // 8 - sent), calls


@pytest.mark.parametrize("attention,N,nh,n_kv,hs", [
    ("ring", 2, 3, 3, 4), ("ring", 3, 6, 2, 5), ("ring", 4, 4, 1, 16), ("ring", 5, 2, 2, 2),
    ("all-to-all", 2, 4, 2, 5), ("all-to-all", 3, 6, 3, 4), ("all-to-all", 4, 4, 4, 2)])
def test_attention_of_split_tokens_is_plain_attention_and_sends_what_its_file_says(
        attention, N, nh, n_kv, hs):
    """Forward and all gradients; also with fewer heads of keys than of queries.

    The ring skips hidden segments, and its ranks do equal work. A rank's own keys: a causal kernel
    of its 8 tokens. Those of another rank: 8 x 4 pairs of a query and a key, half of all, because
    the other half is hidden."""
    q, k, v, grad = inputs(N, nh, n_kv, hs)
    for x in (q, k, v):
        x.requires_grad_()
    out = plain_attention(q, k, v)
    out.backward(grad)
    want = [out.detach(), q.grad, k.grad, v.grad]
    kv, qkv_out = k.numel() + v.numel(), 2 * (q.numel() + k.numel())
    hops, swaps = (N - 1) * kv // N, (N - 1) * qkv_out // N**2
    # the ring's backward: the keys and values once more, and their gradients
    want_sent = (hops, 2 * hops) if attention == "ring" else (swaps, swaps)
    for at, found, sent, calls in ranks(N, _attention, N, attention, nh, n_kv, hs):
        for name, got, whole in zip(("out", "q", "k", "v"), found, want, strict=True):
            close(got, whole[:, :, at], name)
        assert sent == want_sent
        for own, *others in calls if attention == "ring" else ():
            assert own == (8, 8, True) and len(others) == N - 1
            assert all(queries * keys == 32 and not causal for queries, keys, causal in others)


def test_a_merge_of_scores_that_exp_cannot_take_is_exact():
    """Scores of +-2000, whose exp is inf or 0 in float64: the part with the lower ones adds
    nothing, and is no nan."""
    for shift in (-2000, 0, 2000):
        scores, values = random(2, 3, 4, 10) + 1000, random(2, 3, 10, 5, seed=1)
        scores[..., 6:] += shift
        parts = [(s.softmax(-1) @ v, s.logsumexp(-1)) for s, v in
                 zip(scores.split([6, 4], -1), values.split([6, 4], -2), strict=True)]
        (out, lse), part = parts
        merge(out, lse, *part)
        close(out, scores.softmax(-1) @ values, "out")
        close(lse, scores.logsumexp(-1), "logsumexp")


def _rounding(rank, N):
    """How far the gradients of q, k, v in bfloat16 are from float64's: (on the ring, alone)."""
    group = Mesh(cp=N).group("cp")
    at = zigzag(16 * N, N, rank)
    q, k, v, grad = (random(2, 3, 16 * N, 8, seed=i).bfloat16() for i in range(4))

    def gradients(dtype, attention, at=slice(None)):
        parts = [x[:, :, at].to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        attention(*parts).backward(grad[:, :, at].to(dtype))
        return [part.grad.double() for part in parts]

    exact = [x[:, :, at] for x in gradients(torch.double, causal_attention)]
    alone = [x[:, :, at] for x in gradients(torch.bfloat16, causal_attention)]
    ring = gradients(torch.bfloat16, lambda *qkv: ATTENTIONS["ring"](*qkv, group), at)
    return [[(x - y).norm() for x, y in zip(got, exact, strict=True)] for got in (ring, alone)]


def test_the_ring_rounds_no_more_than_one_kernel():
    """The sums that go around have 32 bits. In 16, errors here are 1.2 to 1.4 of one kernel's; that
    a part is rounded before it is added makes 1.15."""
    errors = torch.tensor(ranks(8, _rounding, 8)).norm(dim=0)  # of q, k and v, all ranks together
    assert (errors[0] < 1.25 * errors[1]).all(), errors


# ---- memory ----


def _saved(rank, cfg):
    """How many elements a block saves for backward, weights apart."""
    trainer, _ = make_trainer(cfg)
    block = trainer.pipeline.stages[0][1]
    weights = {param.untyped_storage().data_ptr() for param in block.parameters()}
    saved = {}

    def note(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            saved[memory.data_ptr()] = memory
        return tensor

    x = torch.ones(trainer.pipeline.shape, dtype=torch.double, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = block(x)  # whose graph keeps the memory
    assert result.shape == x.shape
    return sum(memory.nbytes() for memory in saved.values()) // 8


@pytest.mark.parametrize("words", [
    "--cp 1", "--cp 2", "--cp 4", "--cp 4 --cp-attention all-to-all", "--tp 4", "--tp 4 --sp",
    "--cp 2 --tp 2 --sp"])
def test_a_block_holds_what_the_files_say(corpus, words):
    """A block saves 16 B S C: 4 inputs (of each norm and each column), q, k, v, the output of
    attention, 8 of the MLP. And for each token two numbers of each norm, and one of each head.

    Context parallelism: all of this by C; all-to-all has the output of attention twice. Tensor
    parallelism: q, k, v, the output and the MLP's by T; under --sp the norms' inputs and numbers,
    too. A column's input is whole: backward has no need to gather it again."""
    cfg, saved = in_layout(f"--batch-size 2 --block-size 16 {words}", corpus, _saved)
    N, T, heads = cfg.cp, cfg.tp, cfg.n_head
    activation = 2 * cfg.block_size * cfg.n_embd // N
    tokens = 2 * cfg.block_size // N
    twice = activation if cfg.cp_attention == "all-to-all" else 0
    of_norms = T if cfg.sp else 1  # by how many ranks they are divided
    want = (2 * activation + 12 * activation // T + 2 * activation // of_norms + twice
            + tokens * heads // T + 4 * tokens // of_norms)
    assert saved == [want] * (N * T)
