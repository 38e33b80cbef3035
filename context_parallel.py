"""Context parallelism: the tokens of each sequence are split over the ranks of a group.

Split: tokens, and so the activations of all layers. Replicated: weights; their gradients are summed
over the ranks, like those of data ranks. Only attention and experts' balance loss let tokens meet,
so only they send. Elements that each of N ranks sends for attention, per block and microbatch:

    ring        keys and values go around the ring, 2 (N-1)/N B S C forward; in backward they go
                around once more, and their gradients (32 bits at least) follow.  arXiv 2310.01889
    all-to-all  ranks swap tokens for heads, and back: 4 (N-1)/N^2 B S C forward, as many in
                backward; N must divide the number of heads. Ulysses,             arXiv 2309.14509

Held for backward: 1/N of what one process saves; of attention the ring saves q, k, v, the output,
and a number per query and head (lse). No rank has a matrix of scores.

    python train.py --cp 2
    python -m extras.show context_parallel  # on 4 ranks
"""

import math
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from collectives import WithBackward, all_to_all
from model import causal_attention


def zigzag(S, size, rank):
    """Positions, out of 0 .. S-1, of the tokens of one of `size` ranks. Zigzag: cut the sequence
    into 2 * size segments, and give rank r the segments r and 2 * size - 1 - r. For two ranks:
    segments 0 and 3 to rank 0, segments 1 and 2 to rank 1.

    Why: under the causal mask late tokens attend to more keys than early ones. A rank with an early
    and a late segment has as much to compute as any other: a query meets half of the keys on
    average, on every rank. If rank r of four had the r-th quarter of the sequence instead, a query
    of the last rank would meet 7/8 of them, one of the first rank 1/8."""
    segments = torch.arange(S).tensor_split(2 * size)
    return torch.cat([segments[rank], segments[2 * size - 1 - rank]])


# ---- ring: queries stay, keys and values go around ----
# Softmax needs the sum over all keys, but a rank sees S/N keys at a time. Attention over some keys
# is  out = sum(exp(score) v) / sum(exp(score)),  and its logsumexp is  lse = log(sum(exp(score))).
# (out, lse) of two sets of keys give (out, lse) of both: the outputs are averaged with weights
# exp(lse). So the ring takes N rounds, each with one call of torch's fused attention, which returns
# both, and a merge; in the N-1 hops between them keys and values move on by a rank.

# Skip choose_kernel, kernel and kernel_backward: how torch's kernels are called
CUDNN, FLASH, EFFICIENT = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
                           SDPBackend.EFFICIENT_ATTENTION)


def choose_kernel(q, k, v):
    """The kernel for all rounds of q (B, nh, S/N, hs) and k, v (B, n_kv, S/N, hs). On a GPU: the
    kernel that torch's own attention chooses, cuDNN's on Hopper and Blackwell, FlashAttention on
    other cards since the A100, both in 16 bits; else EFFICIENT. Torch is asked with half of the
    tokens, the fewest that a round takes (visible), because cuDNN takes no length of 1. None on a
    CPU, which has only one kernel."""
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
    if chosen == CUDNN:
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
    if chosen == EFFICIENT:  # lse: padded to a multiple of 32; exp(score - inf) = 0 adds nothing
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
    """Merge attention over further keys into out (B, nh, Sq, hs) and lse (B, nh, Sq), in place. The
    further keys have exp(part_lse) / (exp(lse) + exp(part_lse)) = sigmoid(part_lse - lse) of all
    weights. out and lse have 32 bits at least, because each merge rounds."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def start_passing(x, group):
    """Start to send x to the next rank. Returns (the tensor in which the previous rank's x arrives,
    the Work of the two messages)."""
    received = torch.empty_like(x)
    return received, group.exchange(x, group.next, received, group.prev)


def ring_rounds(k, v, group):
    """Pass keys and values (B, n_kv, S/N, hs) around the ring. Yields (i, kv, queries, keys,
    causal) for each round i. queries, keys, causal: the result of visible(). kv (2, B, n_kv, Sk,
    hs): the keys and values to compute with, selected by `keys`. Sk is S/N, or S/(2N) for keys of
    an earlier rank. Meanwhile the next ones travel."""
    kv = torch.stack([k, v])
    for i in range(group.size):
        if i < group.size - 1:
            next_kv, work = start_passing(kv, group)
        # N = 4, rank 1: in rounds 0 1 2 3, kv belongs to ranks 1 0 3 2
        key_rank = (group.rank - i) % group.size
        queries, keys, causal = visible(group.rank, key_rank, half=kv.size(-2) // 2)
        yield i, kv[..., keys, :], queries, keys, causal
        if i < group.size - 1:
            work.wait()
            kv = next_kv


class RingAttentionFunction(torch.autograd.Function):
    """In: q (B, nh, S/N, hs) and k, v (B, n_kv, S/N, hs) of this rank's tokens, split by zigzag
    over N ranks. Out: (B, nh, S/N, hs), attention over all S tokens for this rank's queries.
    Forward sends N-1 messages, each with keys and values; backward these again, and N-1 with sums
    of their gradients."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        wide = torch.promote_types(q.dtype, torch.float)  # for sums: 32 bits at least
        ctx.chosen = choose_kernel(q, k, v)
        for i, kv, queries, _, causal in ring_rounds(k, v, group):
            part, part_lse, rest = kernel(ctx.chosen, q[:, :, queries], *kv, causal)
            if i == 0:
                out = part.to(wide)
                lse = part_lse
                ctx.rest = rest  # the same in all rounds
            else:
                merge(out[:, :, queries], lse[:, :, queries], part, part_lse)
        out = out.to(q.dtype)  # keeps the kernel's memory layout, which its backward relies on
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad):
        """Keys and values go around once more. In each round this rank computes one term of their
        gradient, from its own queries. The sum of the terms follows its keys around the ring, one
        hop behind. Three ranks, as rank 0 sees them:

            round has the keys of   receives the sum so far   adds    sends the sum
            0     rank 0            -                         -       -  (keeps its own term)
            1     rank 2            - (starts one)            a term  to rank 1
            2     rank 1            from rank 2               a term  to rank 1
            end   -                 from rank 2, for rank 0's own keys: adds the term of round 0
        """
        q, k, v, out, lse = ctx.saved_tensors
        group = ctx.group
        wide = torch.promote_types(q.dtype, torch.float)
        # The sum that this rank starts in round 1, (2, B, n_kv, S/N, hs)
        grad_kv = k.new_zeros((2, *k.shape), dtype=wide)
        next_grad_kv, work = None, None  # the sum from the previous rank, on its way
        for i, kv, queries, keys, causal in ring_rounds(k, v, group):
            dq, dk, dv = kernel_backward(
                ctx.chosen, grad[:, :, queries], q[:, :, queries], *kv, out[:, :, queries],
                lse[:, :, queries], ctx.rest, causal)
            if i == 0:
                grad_q, own_dk, own_dv = dq.to(wide), dk, dv
            else:
                if work:
                    work.wait()
                    grad_kv = next_grad_kv
                grad_q[:, :, queries] += dq
                grad_kv[0][:, :, keys] += dk
                grad_kv[1][:, :, keys] += dv
                next_grad_kv, work = start_passing(grad_kv, group)
        work.wait()
        grad_kv = next_grad_kv
        grad_k, grad_v = grad_kv[0] + own_dk, grad_kv[1] + own_dv
        return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), None


def ring_attention(q, k, v, group):
    """causal_attention over tokens split by zigzag: a rank starts with its own keys, and after N-1
    hops every query has met all keys. q, result (B, nh, S/N, hs); k, v (B, n_kv, S/N, hs)."""
    # The kernels read the last dim with stride 1, and give wrong numbers for others. (The gradient
    # has stride 1: it is a view of the gradient of c_proj's input)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return RingAttentionFunction.apply(q, k, v, group)


# ---- all-to-all (Ulysses): for attention, a rank has all tokens of 1/N of the heads ----


def swap(parts, group):
    """Send parts[j] to rank j. Returns a list: entry j is from rank j, of the same shape."""
    parts = [part.contiguous() for part in parts]
    received = [torch.empty_like(part) for part in parts]
    all_to_all(received, parts, group)
    return received


def to_whole_sequences(x, group):
    """(..., nh, S/N, hs), tokens split by zigzag -> (..., nh/N, S, hs), all tokens in order."""
    # (..., nh/N, S/N, hs) from each rank
    received = swap(x.chunk(group.size, dim=-3), group)
    # Two ranks: segments 0 3 from rank 0, 1 2 from rank 1. early: 0 1, late: 3 2. Result: 0 1 2 3.
    early = [part.chunk(2, dim=-2)[0] for part in received]
    late = [part.chunk(2, dim=-2)[1] for part in received]
    return torch.cat([*early, *reversed(late)], dim=-2)


def to_own_tokens(x, group):
    """The way back: (..., nh/N, S, hs) -> (..., nh, S/N, hs)."""
    N = group.size
    segments = x.chunk(2 * N, dim=-2)
    parts = [torch.cat([segments[r], segments[2 * N - 1 - r]], dim=-2) for r in range(N)]
    return torch.cat(swap(parts, group), dim=-3)


def all_to_all_attention(q, k, v, group):
    """causal_attention over tokens split by zigzag. q, result (B, nh, S/N, hs); k, v (B, n_kv, S/N,
    hs)."""
    # there and back only permute elements, so each is the other's backward
    there = partial(to_whole_sequences, group=group)
    back = partial(to_own_tokens, group=group)
    # q, k and v travel in one message, heads in the order of the ranks that get them. For two ranks
    # q0 k0 v0 q1 k1 v1: q0 are the heads of q that rank 0 gets
    N = group.size
    q_parts, k_parts, v_parts = (x.chunk(N, dim=1) for x in (q, k, v))
    to_send = []
    for rank in range(N):
        to_send += [q_parts[rank], k_parts[rank], v_parts[rank]]
    qkv = WithBackward.apply(torch.cat(to_send, dim=1), there, back)
    # From (B, (nh + 2 n_kv)/N, S, hs): q (B, nh/N, S, hs), k and v (B, n_kv/N, S, hs)
    q, k, v = qkv.split([x.size(1) // N for x in (q, k, v)], dim=1)
    y = causal_attention(q, k, v)
    return WithBackward.apply(y, back, there)


ATTENTIONS = {"ring": ring_attention, "all-to-all": all_to_all_attention}


def split_sequences(model, group, attention="ring"):
    """Prepare a model for this rank's tokens of each sequence.

    In: a model whose block_size, which is also the length of all sequences, is a multiple of 2 N.
    attention: ring or all-to-all.
    After: its attention is over the tokens of all ranks, and it knows this rank's positions, which
    are returned: feed the model ids[:, positions].

    Like data ranks, the ranks see different tokens, so tag_whole was given a group with cp in it
    (train.py), and gradients are summed over it."""
    positions = zigzag(model.config.block_size, group.size, group.rank).to(group.device)
    for module in model.positioned():
        module.positions = positions

    def attend(q, k, v):
        """Takes the place of Attention.attend (model.py)."""
        return ATTENTIONS[attention](q, k, v, group)

    if group.size > 1:
        for block in model.layers[1:-1]:
            block.attn.attend = attend
            block.attn.uncompiled = ("attend",)  # it sends messages (model.compile_layers)
    return positions
