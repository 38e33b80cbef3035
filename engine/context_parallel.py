"""Context parallelism: the root's ring (context_parallel.py), faster, and without a matrix of
scores (at 2048 tokens on 2 ranks a fifth of the memory: docs/measured.md).

    kernels   torch's fused attention computes each hop: no matrix of scores is in memory. It also
              returns each query's logsumexp, log(sum(exp(score))), by which results are merged.
    overlap   the next keys and values travel during the computation
    skip      segments of keys that the mask hides entirely are left out

Sent by the ring. Forward: as much as the plain ring. Backward: twice that, because keys and values
go around once more, and their gradients (in fp32 at least) follow them. Held for backward: q, k, v,
the output and one logsumexp per query. The all-to-all form is that of context_parallel.py with the
engine's all_to_all; it saves attention's output twice, before and after the swap back.

    torchrun train.py --cp 2 --fast        torchrun train.py --cp 2 --cp-attention all-to-all --fast
"""

import math
from functools import partial

import torch
from torch.nn.attention import SDPBackend

import context_parallel
from context_parallel import all_to_all_attention
from engine.collectives import all_to_all
from engine.group import Work

# ---- one hop ----


CUDNN, FLASH, EFFICIENT = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
                           SDPBackend.EFFICIENT_ATTENTION)


def choose_kernel(q, k, v):
    """The kernel that computes the hops of q (B, nh, S/N, hs) and k, v (B, n_kv, S/N, hs). It must
    take half of them, too: a hop has half of the queries or half of the keys (visible), and cuDNN
    takes no length of 1. On a GPU the kernel that torch's own attention would
    choose: cuDNN's on Hopper and Blackwell, FlashAttention on other cards since the A100, both in
    16 bits; else EFFICIENT. None on a CPU, which has only one kernel."""
    if not q.is_cuda:
        return None
    q, k, v = (x[:, :, : x.size(2) // 2] for x in (q, k, v))
    chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True))
    return chosen if chosen in (CUDNN, FLASH) else EFFICIENT


def kernel(chosen, q, k, v, causal):
    """Attention of q (B, nh, Sq, hs) over k, v (B, n_kv, Sk, hs), n_kv <= nh. Returns out (B, nh,
    Sq, hs), the logsumexp (B, nh, Sq), and what else kernel_backward takes: the state of dropout,
    unused."""
    aten = torch.ops.aten
    if chosen == CUDNN:  # the three GPU kernels have been read, never run: no GPU was at hand
        out, lse, _, _, _, _, *rest = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal)
        return out, lse.squeeze(-1), rest[:2]
    if chosen == FLASH:
        out, lse, _, _, _, _, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse, rest[:2]
    if chosen == EFFICIENT:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        out, lse, *rest = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal)
        return out, lse[..., : q.size(2)], rest  # the kernel pads lse
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse, ()


def kernel_backward(chosen, grad, q, k, v, out, lse, rest, causal):
    """Gradients of q, k, v from the gradient of out. q may be some of the queries, k and v some of
    their keys: given out and lse over all keys, the kernel recomputes the right weights,
    exp(score - lse), and returns these keys' terms of the gradients."""
    aten = torch.ops.aten
    if chosen == CUDNN:  # None: no bias, and all sequences of a batch are of one length
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.contiguous().unsqueeze(-1), *rest, None, None, None, q.size(2),
            k.size(2), 0.0, causal)
    if chosen == FLASH:
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.size(2), k.size(2), 0.0, causal,
            *rest)
    if chosen == EFFICIENT:  # the kernel wants the rows of lse padded to a multiple of 32
        lse = torch.nn.functional.pad(lse, (0, -lse.size(-1) % 32), value=math.inf)
        n_kv = k.size(1)
        k, v = (x.repeat_interleave(q.size(1) // n_kv, dim=1) for x in (k, v))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, *rest, 0.0, [True, True, True, False], causal)
        # n_kv heads, each used by several heads of q: the sum of their gradients
        return dq, *(x.unflatten(1, (n_kv, -1)).sum(2) for x in (dk, dv))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal)


def visible(rank, key_rank, half):
    """(queries, keys, causal): slices of this rank's queries and of key_rank's keys. If not causal,
    each of these queries attends to all of these keys; if causal, the ordinary causal mask applies.
    half: the tokens in a segment. Rank 1 of 4 has segments 1 and 6:

        its own keys             segments 1 6: in order, so the causal mask is right
        keys of rank 0 (before)  segments 0 7: 0 is earlier than both of 1 6, 7 is later than both
        keys of rank 2 (after)   segments 2 5: both are later than 1 and earlier than 6"""
    if key_rank == rank:
        return slice(None), slice(None), True
    if key_rank < rank:  # all queries, the first segment of keys
        return slice(None), slice(half), False
    return slice(half, None), slice(None), False  # the second segment of queries, all keys


def merge(out, lse, part, part_lse):
    """Add further keys to out (B, nh, Sq, hs) and lse (B, nh, Sq), in place. The further keys hold
    exp(part_lse) / (exp(lse) + exp(part_lse)) = sigmoid(part_lse - lse) of the softmax's weight.
    out and lse have 32 bits at least, because each merge rounds."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def start_passing(x, received, group):
    """Start to send x to the next rank. Returns the Work of the two messages: after its wait()
    `received` has the previous rank's x."""
    return group.submit(
        lambda: group.exchange(x, group.next, received, group.prev).wait(), "pass on")


def two_buffers(what, like, dtype, group):
    """Two tensors for what goes around the ring, (2, *like.shape): what a rank has now, and what it
    receives meanwhile. All layers use the same two, one layer after the other."""
    return [group.kept_buffer(f"{what} {i}", (2, *like.shape), dtype) for i in (0, 1)]


def ring_hops(k, v, group):
    """Pass keys and values (B, n_kv, S/N, hs) around the ring. Yields (hop, kv, queries, keys,
    causal) for each hop. hop: its number; queries, keys, causal: the result of visible(). kv (2, B,
    n_kv, Sk, hs): the keys and values to compute with, selected by `keys`. Sk is S/N, or S/(2N) for
    keys of an earlier rank. The next keys and values travel meanwhile (overlap)."""
    kv, next_kv = two_buffers("keys and values", k, k.dtype, group)
    torch.stack([k, v], out=kv)
    for hop in range(group.size):
        if hop < group.size - 1:
            passing = start_passing(kv, next_kv, group)
        # N = 4, rank 1: in hops 0 1 2 3, kv belongs to ranks 1 0 3 2
        key_rank = (group.rank - hop) % group.size
        queries, keys, causal = visible(group.rank, key_rank, half=kv.size(-2) // 2)
        yield hop, kv[..., keys, :], queries, keys, causal
        if hop < group.size - 1:
            passing.wait()
            kv, next_kv = next_kv, kv


class RingAttentionFunction(torch.autograd.Function):
    """In: q (B, nh, S/N, hs) and k, v (B, n_kv, S/N, hs) of this rank's tokens, split by zigzag
    over N ranks. Out: (B, nh, S/N, hs), attention over all S tokens for this rank's queries. Sends
    N-1 messages, each with keys and values."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        wide = torch.promote_types(q.dtype, torch.float)  # for sums: 32 bits at least
        ctx.chosen = choose_kernel(q, k, v)
        for hop, kv, queries, _, causal in ring_hops(k, v, group):
            part, part_lse, rest = kernel(ctx.chosen, q[:, :, queries], *kv, causal)
            if hop == 0:
                out = part.to(wide)
                lse = part_lse
                ctx.rest = rest  # the same in all hops
            else:
                merge(out[:, :, queries], lse[:, :, queries], part, part_lse)
        out = out.to(q.dtype)  # keeps the kernel's memory layout, which its backward relies on
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad):
        """Keys and values go around once more. In each hop this rank computes one term of their
        gradient, from its own queries. The sum of the terms follows its keys around the ring, one
        hop behind. Three ranks, as rank 0 sees them:

            hop   has the keys of   receives the sum so far   adds    sends the sum
            0     rank 0            -                         -       -  (keeps its own term)
            1     rank 2            - (starts one)            a term  to rank 1
            2     rank 1            from rank 2               a term  to rank 1
            end   -                 from rank 2, for rank 0's own keys: adds the term of hop 0
        """
        q, k, v, out, lse = ctx.saved_tensors
        group = ctx.group
        wide = torch.promote_types(q.dtype, torch.float)
        # grad_kv: the sum that this rank starts in hop 1, (2, B, n_kv, S/N, hs)
        grad_kv, next_grad_kv = two_buffers("their gradients", k, wide, group)
        grad_kv.zero_()
        passing_grad = Work()  # the last start_passing(grad_kv): none yet
        for hop, kv, queries, keys, causal in ring_hops(k, v, group):
            dq, dk, dv = kernel_backward(
                ctx.chosen, grad[:, :, queries], q[:, :, queries], *kv,
                out[:, :, queries], lse[:, :, queries], ctx.rest, causal)
            if hop == 0:
                grad_q, own_dk, own_dv = dq.to(wide), dk, dv
            else:
                grad_q[:, :, queries] += dq
                passing_grad.wait()
                grad_kv[0][:, :, keys] += dk
                grad_kv[1][:, :, keys] += dv
                passing_grad = start_passing(grad_kv, next_grad_kv, group)
                grad_kv, next_grad_kv = next_grad_kv, grad_kv
        passing_grad.wait()
        grad_k, grad_v = grad_kv[0] + own_dk, grad_kv[1] + own_dv
        return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), None


# ---- both forms, for split_sequences ----


def ring_attention(q, k, v, group):
    """causal_attention over tokens split by zigzag. q, k, v, result: (B, nh, S/N, hs)."""
    # The kernels read the last dim with stride 1, and give wrong numbers for others
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return RingAttentionFunction.apply(q, k, v, group)


# NCCL gets the messages of the engine's all_to_all as one operation
KINDS = {"ring": ring_attention, "all-to-all": partial(all_to_all_attention, all_to_all=all_to_all)}


def split_sequences(model, group, kind="ring"):
    """context_parallel.split_sequences with one of KINDS."""
    return context_parallel.split_sequences(model, group, kind, KINDS)
