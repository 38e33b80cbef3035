"""Context parallelism: the tokens of each sequence are split over C ranks.

Split: tokens, and so the activations of all layers. Replicated: weights, whose gradients are summed
over the ranks. Only attention lets tokens meet, so only attention sends, in one of two ways. Each
rank sends per layer and microbatch, in elements, for h the width of its heads together (the width
of the model / T):

    ring        keys and values go around: 2 (C-1)/C b S h forward; in backward twice as many, as
                their gradients (in fp32 at least) follow them.         arXiv 2310.01889
    all-to-all  ranks swap tokens for heads, and back: 4 (C-1)/C^2 b S h forward, as many backward;
                C must divide the heads of a rank. Ulysses, arXiv 2309.14509

Held: 1/C of what a block saves; all-to-all saves h elements per token more: attention's output,
before and after the swap back.

    python context_parallel.py        who meets whom, on 4 ranks        torchrun train.py --cp 2
"""

import math
from functools import partial

import torch

from collectives import WithBackward, all_to_all
from group import Work
from model import causal_attention


def zigzag(S, C, rank):
    """Positions, out of 0 .. S-1, of a rank's tokens. Zigzag: cut the sequence into 2C chunks, and
    give rank c chunks c and 2C-1-c. For C = 2: chunks 0 and 3 to rank 0, chunks 1 and 2 to rank 1.

    Why: under the causal mask late tokens attend to more keys than early ones. A rank with an early
    and a late chunk has as much to compute as any other. If each rank had one of C chunks, the last
    would meet C - 1/2 chunks of keys, (2C-1)/C times the mean of C/2."""
    chunks = torch.arange(S).tensor_split(2 * C)
    return torch.cat([chunks[rank], chunks[2 * C - 1 - rank]])


def pass_on(x, group):
    """Send x to the next rank, return the previous rank's x. In backward the gradient takes the way
    back."""
    def move(x, dst, src):
        received = torch.empty_like(x)
        group.exchange(x.contiguous(), dst, received, src).wait()
        return received

    return WithBackward.apply(x, lambda x: move(x, group.next, group.prev),
                              lambda grad: move(grad, group.prev, group.next))


def plain_ring_attention(q, k, v, positions, group):
    """Ring attention at its plainest. Queries stay; keys and values go around the ring, and after C
    hops each query has met all keys. Works for any split into equal parts, as positions travel too.

    In: q, k, v (B, nh, S/C, hs) of this rank's tokens; positions (S/C,) of these in the sequence.
    Out: (B, nh, S/C, hs), attention over all S tokens for this rank's queries.

    Softmax needs the sum over all keys, but a rank sees S/C keys at a time. So keep numerator and
    denominator of   out = sum(exp(score) v) / sum(exp(score))   apart, and add to both."""
    kv, key_positions = torch.stack([k, v]), positions  # (2, B, nh, S/C, hs)
    # The largest score so far; subtracted from all scores, as exp(score) could overflow
    largest = q.new_full((*q.shape[:-1], 1), -math.inf)
    numerator = 0.0  # (B, nh, S/C, hs): sum of exp(score - largest) * value
    denominator = 0.0  # (B, nh, S/C, 1): sum of exp(score - largest)
    for hop in range(group.size):  # kv now belongs to the rank `hop` places before this one
        scores = q @ kv[0].mT / math.sqrt(q.size(-1))  # (B, nh, S/C, S/C)
        is_later = key_positions > positions.unsqueeze(1)  # (S/C, S/C)
        scores = scores.masked_fill(is_later, -math.inf)
        # In hop 0 each token meets itself, so new_largest is finite. It cancels: no gradient.
        new_largest = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
        weights, shrink = (scores - new_largest).exp(), (largest - new_largest).exp()
        numerator = numerator * shrink + weights @ kv[1]
        denominator = denominator * shrink + weights.sum(-1, keepdim=True)
        largest = new_largest
        if hop < group.size - 1:
            kv, key_positions = pass_on(kv, group), pass_on(key_positions, group)
    return numerator / denominator


# ---- the same, fast: 1.6 to 2.4 times the speed, in less than a quarter of the memory ----
#   kernels   torch's fused attention computes each hop: no matrix of scores is in memory. It also
#             returns each query's logsumexp, log(sum(exp(score))), by which results are merged.
#   overlap   the next keys and values travel during the computation
#   skip      chunks of keys that the mask hides entirely are left out


def takes_flash(q):
    """FlashAttention takes 16 bits, on GPUs since the A100."""
    return q.is_cuda and q.itemsize == 2 and torch.cuda.get_device_capability() >= (8, 0)


def kernel(q, k, v, causal):
    """Attention of q (B, nh, Sq, hs) over k, v (B, nh, Sk, hs). Returns out (B, nh, Sq, hs), the
    logsumexp (B, nh, Sq), and what else kernel_backward takes: the state of dropout, unused."""
    aten = torch.ops.aten
    if takes_flash(q):  # both GPU kernels have been read, never run: no GPU was at hand
        out, lse, _, _, _, _, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse, rest[:2]
    if q.is_cuda:
        out, lse, *rest = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal)
        return out, lse[..., : q.size(2)], rest  # the kernel pads lse
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse, ()


def kernel_backward(grad, q, k, v, out, lse, rest, causal):
    """Gradients of q, k, v from the gradient of out. q may be some of the queries, k and v some of
    their keys: given out and lse over all keys, the kernel recomputes the right weights,
    exp(score - lse), and returns these keys' terms of the gradients."""
    aten = torch.ops.aten
    if takes_flash(q):  # None: all sequences of a batch are of one length
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.size(2), k.size(2), 0.0, causal,
            *rest)
    if q.is_cuda:  # the kernel wants its rows padded to a multiple of 32
        lse = torch.nn.functional.pad(lse, (0, -lse.size(-1) % 32), value=math.inf)
        return aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, *rest, 0.0, [True, True, True, False], causal)[:3]
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal)


def visible(rank, key_rank, half):
    """(queries, keys, causal): slices of this rank's queries and of key_rank's keys such that each
    of these queries attends to all of these keys, or, if causal, under the ordinary causal mask.
    half: the tokens in a chunk. Rank 1 of C = 4 has chunks 1 and 6:

        its own keys             chunks 1 6: in order, so the causal mask is right
        keys of rank 0 (before)  chunks 0 7: 0 is earlier than both of 1 6, 7 is later than both
        keys of rank 2 (after)   chunks 2 5: both are later than 1 and earlier than 6"""
    if key_rank == rank:
        return slice(None), slice(None), True
    if key_rank < rank:  # all queries, the first chunk of keys
        return slice(None), slice(half), False
    return slice(half, None), slice(None), False  # the second chunk of queries, all keys


def merge(out, lse, part, part_lse):
    """Add further keys to out (B, nh, Sq, hs) and lse (B, nh, Sq), in place. The further keys hold
    exp(part_lse) / (exp(lse) + exp(part_lse)) = sigmoid(part_lse - lse) of the softmax's weight.
    out and lse have 32 bits at least, as each merge rounds."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def start_passing(x, group):
    """Start to send x to the next rank. Returns (tensor, Work): the previous rank's x, valid after
    work.wait()."""
    received = torch.empty_like(x)
    return received, group.submit(
        lambda: group.exchange(x, group.next, received, group.prev).wait(), "pass on")


def ring_hops(kv, group):
    """Pass keys and values kv (2, B, nh, S/C, hs) around the ring. Yields for each hop: its number;
    the keys and values to compute with, which this rank now has; and what visible() returned. The
    next ones travel meanwhile (overlap)."""
    for hop in range(group.size):
        if hop < group.size - 1:
            next_kv, passing = start_passing(kv, group)
        # C = 4, rank 1: in hops 0 1 2 3, kv belongs to ranks 1 0 3 2
        key_rank = (group.rank - hop) % group.size
        queries, keys, causal = visible(group.rank, key_rank, half=kv.size(-2) // 2)
        yield hop, kv[..., keys, :], queries, keys, causal
        if hop < group.size - 1:
            passing.wait()
            kv = next_kv


class RingAttentionFunction(torch.autograd.Function):
    """In: q, k, v (B, nh, S/C, hs) of this rank's tokens, split by zigzag. Out: (B, nh, S/C, hs),
    attention over all S tokens for this rank's queries. C-1 sends each of keys and values."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        wide = torch.promote_types(q.dtype, torch.float)  # for sums: 32 bits at least
        for hop, kv, queries, _, causal in ring_hops(torch.stack([k, v]), group):
            with group.span("attention", hop=hop):
                part, part_lse, rest = kernel(q[:, :, queries], *kv, causal)
                if hop == 0:
                    out, lse, ctx.rest = part.to(wide), part_lse, rest  # rest: the same in all hops
                else:
                    merge(out[:, :, queries], lse[:, :, queries], part, part_lse)
            del kv  # else it would keep a third buffer: ring_hops makes one before its next yield
        out = out.to(q.dtype)  # keeps the kernel's memory layout, which its backward relies on
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad):
        """Keys and values go around once more. In each hop this rank computes one term of their
        gradient, from its own queries. The sum of the terms follows its keys around the ring, one
        hop behind. C = 3, rank 0: hop 1 has rank 2's keys, and sends its term to rank 1. Hop 2 has
        rank 1's keys: receives rank 2's sum for these, adds its term, sends the sum to rank 1. At
        last the sum for rank 0's own keys arrives from rank 2, and lacks rank 0's term, of hop 0.

        So hop 1 starts a sum, for the previous rank's keys; hop i > 1 receives the sum for the keys
        that this rank has now, adds, and passes the sum on."""
        (q, k, v, out, lse), group = ctx.saved_tensors, ctx.group
        wide = torch.promote_types(q.dtype, torch.float)
        # (2, B, nh, S/C, hs); hop 1 starts a new sum
        grad_kv, passing_grad = q.new_zeros((2, *k.shape), dtype=wide), Work()
        for hop, kv, queries, keys, causal in ring_hops(torch.stack([k, v]), group):
            with group.span("attention", hop=hop):
                dq, dk, dv = kernel_backward(
                    grad[:, :, queries], q[:, :, queries], *kv,
                    out[:, :, queries], lse[:, :, queries], ctx.rest, causal)
            del kv
            if hop == 0:
                grad_q, own_dk, own_dv = dq.to(wide), dk, dv
            else:
                grad_q[:, :, queries] += dq
                passing_grad.wait()
                grad_kv[0][:, :, keys] += dk
                grad_kv[1][:, :, keys] += dv
                grad_kv, passing_grad = start_passing(grad_kv, group)
        passing_grad.wait()
        grad_k, grad_v = grad_kv[0].add_(own_dk), grad_kv[1].add_(own_dv)
        return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), None


def ring_attention(q, k, v, group):
    """causal_attention over tokens split by zigzag. q, k, v, result: (B, nh, S/C, hs)."""
    return RingAttentionFunction.apply(q, k, v, group)


# ---- all-to-all (Ulysses): for attention, a rank has all tokens of 1/C of its heads ----


def swap(parts, group):
    """Send parts[j] to rank j. Returns a list: entry j is from rank j, of the same shape."""
    parts = [part.contiguous() for part in parts]
    received = [torch.empty_like(part) for part in parts]
    all_to_all(received, parts, group)
    return received


def to_whole_sequences(x, group):
    """(..., nh, S/C, hs), tokens split by zigzag -> (..., nh/C, S, hs), all tokens in order."""
    received = swap(x.chunk(group.size, dim=-3), group)  # (..., nh/C, S/C, hs) from each rank
    # C = 2: chunks 0 3 from rank 0, 1 2 from rank 1. early: 0 1, late: 3 2. Result: 0 1 2 3.
    early, late = zip(*(part.chunk(2, dim=-2) for part in received), strict=True)
    return torch.cat([*early, *reversed(late)], dim=-2)


def to_own_tokens(x, group):
    """The way back: (..., nh/C, S, hs) -> (..., nh, S/C, hs)."""
    C, chunks = group.size, x.chunk(2 * group.size, dim=-2)
    parts = [torch.cat([chunks[c], chunks[2 * C - 1 - c]], dim=-2) for c in range(C)]
    return torch.cat(swap(parts, group), dim=-3)


def all_to_all_attention(q, k, v, group):
    """causal_attention over tokens split by zigzag. q, k, v, result: (B, nh, S/C, hs)."""
    qkv = torch.stack([q, k, v])  # (3, B, nh, S/C, hs)
    there, back = partial(to_whole_sequences, group=group), partial(to_own_tokens, group=group)
    q, k, v = WithBackward.apply(qkv, there, back)  # (B, nh/C, S, hs)
    y = causal_attention(q, k, v)
    return WithBackward.apply(y, back, there)


KINDS = {"ring": ring_attention, "all-to-all": all_to_all_attention}


def split_sequences(model, group, kind="ring"):
    """Prepare a model for this rank's tokens of each sequence, split by zigzag over the group. In:
    a model whose block_size, which is also the length of all sequences, is a multiple of 2C. After:
    its attention is over the tokens of all ranks. Returns the positions of this rank's tokens."""
    positions = zigzag(model.config.block_size, group.size, group.rank).to(group.device)
    model.layers[0].positions = positions
    if group.size > 1:
        for block in model.layers[1:-1]:
            block.attn.core = partial(KINDS[kind], group=group)
            block.attn.uncompiled = ("core",)  # sends messages: not for torch.compile
    return positions


def demo(mesh):
    """Print which rank attends to which keys in which hop (show/tables.py); then the gradients
    of each form, compared with one process's."""
    from show.demonstrations import report_difference
    from show.tables import zigzag_table

    group, C, S = mesh.group("cp"), mesh.sizes["cp"], 8 * mesh.sizes["cp"]
    if group.rank == 0:
        print(zigzag_table(S, C))
    generator, mine = torch.Generator().manual_seed(0), zigzag(S, C, group.rank)
    q, k, v = (torch.randn(2, C, S, 8, dtype=torch.double, generator=generator) for _ in "qkv")

    def gradients(attention, tokens):  # of q, k, v at these positions
        parts = [x[:, :, tokens].clone().requires_grad_() for x in (q, k, v)]
        attention(*parts).sin().sum().backward()
        return [part.grad for part in parts]

    alone = gradients(causal_attention, torch.arange(S))
    plain = partial(plain_ring_attention, positions=mine)
    for name, core in {"plain": plain, **KINDS}.items():
        split = gradients(partial(core, group=group), mine)
        report_difference(name, group.rank, [
            (part, whole[:, :, mine]) for part, whole in zip(split, alone, strict=True)])


if __name__ == "__main__":
    from show.demonstrations import demonstrate, ranks_asked
    demonstrate(demo, cp=ranks_asked(4))
