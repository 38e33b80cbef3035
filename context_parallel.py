"""Context parallelism: the tokens of each sequence are split over the ranks of a group.

Split: tokens, and so the activations of all layers. Replicated: weights; the ranks count among the
replicas over which gradients are summed. In a layer only attention lets tokens meet, so only
attention sends. Elements that each of N ranks sends per block and microbatch:

    ring        keys and values go around the ring, 2 (N-1)/N B S C forward; their gradients come
                back, as many.                                              arXiv 2310.01889
    all-to-all  ranks swap tokens for heads, and back: 4 (N-1)/N^2 B S C forward, as many in
                backward; N must divide the number of heads. Ulysses,       arXiv 2309.14509

Held: 1/N of what a block saves for backward. This plain ring saves more on each rank: the scores of
all N hops, B nh S^2/N, and the keys and values of all ranks, 2 B S C elements.

    python -m extras.show context_parallel        who meets whom, on 4 ranks
"""

import math
from functools import partial

import torch

from collectives import WithBackward, all_to_all
from model import causal_attention


def zigzag(S, size, rank):
    """Positions, out of 0 .. S-1, of the tokens of one of `size` ranks. Zigzag: cut the sequence
    into 2 * size segments, and give rank r the segments r and 2 * size - 1 - r. For two ranks:
    segments 0 and 3 to rank 0, segments 1 and 2 to rank 1.

    Why: under the causal mask late tokens attend to more keys than early ones. A rank with an early
    and a late segment has as much to compute as any other: of four ranks, a query of each meets 2
    quarters of the keys on average. If rank r had the r-th quarter of the sequence instead, a query
    of the last rank would meet 3.5 quarters."""
    segments = torch.arange(S).tensor_split(2 * size)
    return torch.cat([segments[rank], segments[2 * size - 1 - rank]])


# ---- ring: queries stay, keys and values go around ----


def pass_on(x, group):
    """Send x to the next rank, return the previous rank's x. In backward the gradient takes the way
    back."""
    def move(x, dst, src):
        x = x.contiguous()
        received = torch.empty_like(x)
        group.exchange(x, dst, received, src).wait()
        return received

    return WithBackward.apply(x, lambda x: move(x, group.next, group.prev),
                              lambda grad: move(grad, group.prev, group.next))


def ring_attention(q, k, v, group):
    """causal_attention over tokens split by zigzag. A rank starts with its own keys. After N - 1
    hops, one message each, every query has met all keys.

    In: q, k, v (B, nh, S/N, hs) of this rank's tokens. Out: (B, nh, S/N, hs), attention over all S
    tokens for this rank's queries.

    Softmax needs the sum over all keys, but a rank sees S/N keys at a time. So keep numerator and
    denominator of   out = sum(exp(score) v) / sum(exp(score))   apart, and add to both."""
    N = group.size
    S = N * q.size(2)
    positions = zigzag(S, N, group.rank)  # positions of this rank's queries
    kv = torch.stack([k, v])  # (2, B, nh, S/N, hs); a Llama's have n_kv heads
    shared_by = q.size(1) // k.size(1)  # heads of q for each head of k and v: 1 in GPT-2
    # The largest score so far is subtracted from all scores, because exp(score) could overflow
    largest = q.new_full((*q.shape[:-1], 1), -math.inf)
    numerator = 0.0  # (B, nh, S/N, hs): sum of exp(score - largest) * value
    denominator = 0.0  # (B, nh, S/N, 1): sum of exp(score - largest)
    for hop in range(N):
        # N = 4, rank 1: after 0 1 2 3 hops it has the keys of ranks 1 0 3 2
        key_positions = zigzag(S, N, (group.rank - hop) % N)
        keys, values = kv.repeat_interleave(shared_by, dim=2)  # (B, nh, S/N, hs) each
        scores = q @ keys.mT / math.sqrt(q.size(-1))  # (B, nh, S/N, S/N)
        is_later = key_positions > positions.unsqueeze(1)  # (S/N, S/N)
        scores = scores.masked_fill(is_later, -math.inf)
        # new_largest cancels in numerator / denominator, so its gradient is 0: detach() it. It is
        # finite, because each token meets itself first.
        new_largest = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
        weights = (scores - new_largest).exp()
        shrink = (largest - new_largest).exp()  # brings the sums so far to the new largest
        numerator = numerator * shrink + weights @ values
        denominator = denominator * shrink + weights.sum(-1, keepdim=True)
        largest = new_largest
        if hop < N - 1:
            kv = pass_on(kv, group)
    return numerator / denominator


# ---- all-to-all (Ulysses): for attention, a rank has all tokens of 1/N of the heads ----
# all_to_all: the function that sends. engine/context_parallel.py passes its own.


def swap(parts, group, all_to_all):
    """Send parts[j] to rank j. Returns a list: entry j is from rank j, of the same shape."""
    parts = [part.contiguous() for part in parts]
    received = [torch.empty_like(part) for part in parts]
    all_to_all(received, parts, group)
    return received


def to_whole_sequences(x, group, all_to_all):
    """(..., nh, S/N, hs), tokens split by zigzag -> (..., nh/N, S, hs), all tokens in order."""
    # (..., nh/N, S/N, hs) from each rank
    received = swap(x.chunk(group.size, dim=-3), group, all_to_all)
    # Two ranks: segments 0 3 from rank 0, 1 2 from rank 1. early: 0 1, late: 3 2. Result: 0 1 2 3.
    early = [part.chunk(2, dim=-2)[0] for part in received]
    late = [part.chunk(2, dim=-2)[1] for part in received]
    return torch.cat([*early, *reversed(late)], dim=-2)


def to_own_tokens(x, group, all_to_all):
    """The way back: (..., nh/N, S, hs) -> (..., nh, S/N, hs)."""
    N = group.size
    segments = x.chunk(2 * N, dim=-2)
    parts = [torch.cat([segments[r], segments[2 * N - 1 - r]], dim=-2) for r in range(N)]
    return torch.cat(swap(parts, group, all_to_all), dim=-3)


def all_to_all_attention(q, k, v, group, all_to_all=all_to_all):
    """causal_attention over tokens split by zigzag. q, k, v, result: (B, nh, S/N, hs)."""
    there = partial(to_whole_sequences, group=group, all_to_all=all_to_all)
    back = partial(to_own_tokens, group=group, all_to_all=all_to_all)
    # q, k and v travel in one message, heads in the order of the ranks that get them. For two ranks
    # q0 k0 v0 q1 k1 v1: q0 are the heads of q that rank 0 gets
    N = group.size
    q_parts, k_parts, v_parts = (x.chunk(N, dim=1) for x in (q, k, v))
    to_send = []
    for rank in range(N):
        to_send += [q_parts[rank], k_parts[rank], v_parts[rank]]
    qkv = WithBackward.apply(torch.cat(to_send, dim=1), there, back)  # (B, 3 nh/N, S, hs)
    q, k, v = qkv.split([x.size(1) // N for x in (q, k, v)], dim=1)  # (B, nh/N, S, hs) each
    y = causal_attention(q, k, v)
    return WithBackward.apply(y, back, there)


KINDS = {"ring": ring_attention, "all-to-all": all_to_all_attention}


def split_sequences(model, group, kind="ring", kinds=KINDS):
    """Prepare a model for this rank's tokens of each sequence. In: a model; its block_size, which
    is also the length of all sequences, is a multiple of 2 N; one of KINDS. After: its attention is
    over the tokens of all ranks, and it knows this rank's positions, which are returned: feed the
    model ids[:, positions]. kinds: engine/context_parallel.py gives its own.

    Like replicas, the ranks see different tokens: tag_whole(model, mesh.group("shard", "ep", "cp"))
    has their gradients summed."""
    positions = zigzag(model.config.block_size, group.size, group.rank).to(group.device)
    for module in model.positioned():
        module.positions = lambda x: positions
    if group.size > 1:
        for block in model.layers[1:-1]:
            block.attn.attend = partial(kinds[kind], group=group)
    return positions
