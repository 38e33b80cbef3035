"""Collectives by hand: all_reduce and its family, from sends and receives.

A collective is an operation that all ranks of a group call in the same order. A tensor of n bytes
is cut into N chunks (torch.tensor_split, so any n); rank r owns chunk r. Sent by each rank:

    reduce_scatter    each rank ends with the sum of its own chunk        n (N-1)/N
    all_gather        each rank's own chunk is copied to all ranks        n (N-1)/N
    all_reduce        all ranks end with the sum of all: the two above    2 n (N-1)/N

No all-reduce can send less (Patarasuk and Yuan 2009). The ring takes 2 (N-1) hops (in a hop each
rank sends one message); a small tensor takes fewer, by the butterfly. All ranks end with the same
bits. "Backward of X": if a layer's forward calls X, its backward calls this (WithBackward).

    python collectives.py        a ring of 4 processes, hop by hop, and the bytes it sends
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from group import Work, queued, wait_all

# In each hop of a ring every rank sends one chunk to the next rank and receives another one from
# the rank before, so all links are busy all the time. Reduce-scatter on four ranks, whose tensors
# are a b c d (sends 2: d+a means: sends chunk 2, which holds the sum of d's and a's terms):
#
#             rank 0           rank 1           rank 2           rank 3
#    hop 0    sends 3: a       sends 0: b       sends 1: c       sends 2: d
#    hop 1    sends 2: d+a     sends 3: a+b     sends 0: b+c     sends 1: c+d
#    hop 2    sends 1: c+d+a   sends 2: d+a+b   sends 3: a+b+c   sends 0: b+c+d
#    at last  0 is complete    1 is complete    2 is complete    3 is complete


def plain_reduce_scatter(tensor, group):
    """In: every rank a full tensor. Out: chunk r of rank r is the sum over all ranks; the other
    chunks hold partial sums."""
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    for hop in range(N - 1):  # N = 4, r = 1: sends chunks 0 3 2, receives and adds 3 2 1
        out, into = chunks[(r - 1 - hop) % N], chunks[(r - 2 - hop) % N]
        received = torch.empty_like(into)
        group.exchange(out, group.next, received, group.prev).wait()
        into.add_(received)
    return tensor


def plain_all_gather(tensor, group):
    """In: chunk r of rank r is valid. Out: every rank has all chunks."""
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    for hop in range(N - 1):  # N = 4, r = 1: sends chunks 1 0 3, receives 0 3 2
        out, into = chunks[(r - hop) % N], chunks[(r - 1 - hop) % N]
        group.exchange(out, group.next, into, group.prev).wait()
    return tensor


def plain_all_reduce(tensor, group):
    """In: every rank a full tensor. Out: every rank the sum, in place."""
    return plain_all_gather(plain_reduce_scatter(tensor, group), group)


# ---- the same ring, fast: 64 MB at 1.2 to 2.2 times the speed on 2 ranks, at 0.9 to 1.1 on 4 ----
#
#   pieces          a chunk travels in pieces, and a piece is added while the next one travels
#   early receives  the receives of the next pieces are posted ahead: a gloo send completes when it
#                   meets its receive, so a receive that is already there saves a round trip

# 64 MB on 2 ranks: pieces of 256 KB take 1.6 to 1.8 times as long as pieces of 1 MB; pieces of 2 MB
# take 5 to 15% less than pieces of 1 MB.
PIECE = 2 << 20  # bytes
AHEAD = 8  # receives posted ahead

OPS = {"sum": (torch.Tensor.add_, dist.ReduceOp.SUM),  # ours, in place; the library's
       "max": (lambda a, b: torch.maximum(a, b, out=a), dist.ReduceOp.MAX)}


class Step(NamedTuple):
    """Send `out` to rank dst, receive from rank src as many elements as `into` has."""
    dst: int
    src: int
    out: torch.Tensor
    into: torch.Tensor
    reduce: bool  # True: add what arrives to `into`; False: receive in place


def start_steps(steps, group, op, K=1):
    """Start a list of steps. A chunk travels in K pieces, so a hop is K steps, and step i + K sends
    the piece that step i received. Posts the first receives and K sends here, all others in wait()
    of the Work that it returns.

    The all-gather's receives land in place, perhaps while this rank's partial sum in that place is
    still to be sent. That is safe: the complete sum has the partial sum as a term, so it cannot
    arrive before the partial sum has left. (all_gather alone receives only what this rank lacks.)
    """
    combine, _ = OPS[op]
    sizes = [step.into.numel() for step in steps if step.reduce]
    # Buffers for arriving terms, used in turn: as many as receives can be pending
    num_buffers = min(AHEAD, len(sizes))
    buffers = [steps[0].into.new_empty(max(sizes)) for _ in range(num_buffers)]
    receives, landings = [], []  # landings: where each step receives

    def post_receive(**first_send):
        i = len(receives)
        if i < len(steps):
            _, src, _, into, reduce = steps[i]
            landings.append(buffers[i % num_buffers].narrow(0, 0, len(into)) if reduce else into)
            receives.append(group.exchange(recv=landings[i], src=src, **first_send))

    post_receive(send=steps[0].out, dst=steps[0].dst)  # one operation: 7 us less than two
    for _ in range(AHEAD - 1):
        post_receive()
    # receives[0] is the Work of both
    sends = [receives[0], *(group.send(step.out, step.dst) for step in steps[1:K])]

    def finish():
        with group.span("wait"):
            for i, step in enumerate(steps):
                receives[i].wait()
                if step.out is step.into:  # the butterfly's swap: combine() overwrites what is sent
                    sends[i].wait()
                if step.reduce:
                    combine(step.into, landings[i])
                post_receive()  # the buffer of step i is free
                if i + K < len(steps):
                    sends.append(group.send(steps[i + K].out, steps[i + K].dst))
            wait_all(sends)

    return Work([finish], f"group {group.name}")


def ring_steps(tensor, group, hops, K):
    """The steps of a ring with K pieces per chunk. Hops 0 .. N-2 are the reduce-scatter, hops N-1
    .. 2N-3 the all-gather."""
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    steps = []
    for hop in hops:  # N = 4, r = 1: sends chunks 0 3 2, then 1 0 3; receives 3 2 1, then 0 3 2
        out = chunks[(r - 1 - hop) % N].tensor_split(K)
        into = chunks[(r - 2 - hop) % N].tensor_split(K)
        steps += [Step(group.next, group.prev, *pair, reduce=hop < N - 1)
                  for pair in zip(out, into, strict=True)]
    return steps


def ring(tensor, group, op, hops):
    """Run some hops of the ring."""
    assert tensor.is_contiguous(), "collectives take contiguous tensors"
    chunk = tensor.view(-1).tensor_split(group.size)[0]
    if not group.in_order:
        K = max(1, chunk.nbytes // PIECE)
        start_steps(ring_steps(tensor, group, hops, K), group, op, K).wait()
        return
    # no early receives; then pieces do not pay either
    buffer = torch.empty_like(chunk) if 0 in hops else None  # for the terms to add
    combine, _ = OPS[op]
    for dst, src, out, into, reduce in ring_steps(tensor, group, hops, K=1):
        landing = buffer[: into.numel()] if reduce else into
        group.exchange(out, dst, landing, src).wait()
        if reduce:
            combine(into, landing)


# ---- fewer hops for small tensors ----
# Up to SMALL bytes the ring's many hops cost more than its pieces save. 4 KB on 4 ranks: the
# butterfly takes 2.6 to 3.0 ms, the ring 3.9, gloo 5.3. 2 MB: 6.0, 6.6, 7.4; on 8 ranks 13.5, 24.9,
# 15.5. At 4 MB on 4 ranks butterfly, ring and gloo are even.
SMALL = 4 << 20  # bytes


def takes_butterfly(tensor, group):
    """All ranks give the same answer."""
    power_of_two = group.size & (group.size - 1) == 0
    return tensor.nbytes <= SMALL and power_of_two and not group.in_order and not group.native


def butterfly(tensor, group):
    """The steps of an all-reduce of N = 2^k ranks in 2k - 1 hops instead of 2 (N-1), with the bytes
    of the ring: halve the part to sum, then double the complete part. All ranks get the same bits,
    as a + b = b + a. Rabenseifner 2004. N = 4, rank 1, a tensor of the quarters q0 q1 q2 q3:

        distance 2, with rank 3    sends q2 q3, adds what arrives to q0 q1
        distance 1, with rank 0    swaps q0 q1: both ranks add, q0 q1 is complete on both
        distance 2, with rank 3    sends q0 q1, receives q2 q3
    """
    kept, halving, distance = tensor.view(-1), [], group.size // 2
    while distance > 1:
        lower, upper = kept.tensor_split(2)
        keeps_upper = bool(group.rank & distance)
        kept, given = (upper, lower) if keeps_upper else (lower, upper)
        peer = group.rank ^ distance
        halving.append(Step(peer, peer, given, kept, reduce=True))
        distance //= 2
    swap = Step(group.rank ^ 1, group.rank ^ 1, kept, kept, reduce=True)
    doubling = [Step(step.dst, step.src, step.into, step.out, reduce=False)
                for step in reversed(halving)]
    return [*halving, swap, *doubling]


# ---- the family ----


def own_chunk(tensor, group):
    """The chunk of a tensor that this rank owns, flat."""
    return tensor.view(-1).tensor_split(group.size)[group.rank]


@queued
def reduce_scatter(tensor, group, op="sum"):
    """In: every rank a full tensor. Out: chunk r of rank r is the reduction over all ranks; the
    other chunks hold partial sums. Backward of all_gather. Sends (N-1)/N of the bytes."""
    if group.native and tensor.numel() % group.size == 0:
        own = own_chunk(tensor, group)
        group.run_native("reduce_scatter", own, tensor.view(-1), OPS[op][1])
    else:
        ring(tensor, group, op, range(group.size - 1))


@queued
def all_gather(tensor, group):
    """In: chunk r of rank r is valid. Out: every rank has all chunks. Backward of reduce_scatter.
    Sends (N-1)/N of the bytes."""
    if group.native and tensor.numel() % group.size == 0:
        own = own_chunk(tensor, group).clone()  # the library wants input and output apart
        group.run_native("all_gather", tensor.view(-1), own)
    else:
        ring(tensor, group, "sum", range(group.size - 1, 2 * group.size - 2))


@queued
def _all_reduce(tensor, group, op):
    if group.native:
        group.run_native("all_reduce", tensor, OPS[op][1])
    elif takes_butterfly(tensor, group):
        start_steps(butterfly(tensor, group), group, op).wait()
    else:
        ring(tensor, group, op, range(2 * group.size - 2))


def all_reduce(tensor, group, op="sum", async_op=False):
    """In: every rank a full tensor. Out: every rank the same bits of the reduction, in place. Sends
    2 (N-1)/N of the bytes. Backward: see sum_over_ranks in tensor_parallel.py."""
    # Between two ranks the butterfly is one exchange: post it here, without submit()'s thread, if
    # no earlier work is pending. (Otherwise its messages could overtake those of earlier work.)
    if async_op and group.size == 2 and takes_butterfly(tensor, group) and not group.last.waits:
        return start_steps(butterfly(tensor, group), group, op)
    return _all_reduce(tensor, group, op, async_op=async_op)


@queued
def scatter(tensor, group, root=0):
    """In: `root` a full tensor. Out: chunk r of rank r is root's. Backward of gather."""
    parts = enumerate(tensor.view(-1).tensor_split(group.size))
    if group.rank == root:
        wait_all([group.send(part, peer) for peer, part in parts if peer != root])
    else:
        group.recv(own_chunk(tensor, group), root).wait()


@queued
def gather(tensor, group, root=0):
    """In: chunk r of rank r is valid. Out: `root` has all chunks. Backward of scatter."""
    parts = enumerate(tensor.view(-1).tensor_split(group.size))
    if group.rank == root:
        wait_all([group.recv(part, peer) for peer, part in parts if peer != root])
    else:
        group.send(own_chunk(tensor, group), root).wait()


def broadcast(tensor, group, root=0):
    """In: `root` a full tensor. Out: every rank has it. Backward of reduce. Scatter, then
    all_gather: no rank sends more than 2 (N-1)/N of the bytes."""
    return all_gather(scatter(tensor, group, root), group)


def reduce(tensor, group, root=0, op="sum"):
    """In: every rank a full tensor. Out: `root` has the reduction. Backward of broadcast.
    Reduce_scatter, then gather: no rank sends more than its tensor."""
    return gather(reduce_scatter(tensor, group, op), group, root)


@queued
def _all_to_all(outputs, group, inputs):  # in the order of arguments that @queued wants
    r, N = group.rank, group.size
    parts = []
    for distance in range(1, N):
        to, source = (r + distance) % N, (r - distance) % N
        parts.append((inputs[to], to, outputs[source], source))
    group.exchange(*parts[0], more=parts[1:]).wait()


def all_to_all(outputs, inputs, group, async_op=False):
    """In: lists of N tensors; inputs[j] is for rank j. Out: outputs[i] is what rank i sent to this
    rank. Its own backward. Sends all inputs but this rank's own."""
    outputs[group.rank].copy_(inputs[group.rank])
    return _all_to_all(outputs, group, inputs, async_op=async_op)


def barrier(group):
    """Return only after all ranks have called: the sum needs every rank's term."""
    all_reduce(torch.zeros(1, device=group.device), group)


class WithBackward(torch.autograd.Function):
    """How messages become part of a model: WithBackward.apply(x, forward, backward) is forward(x),
    and if `grad` is the gradient of that, backward(grad) is the gradient of x."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_of_x = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_of_x(grad), None, None


if __name__ == "__main__":
    from planner.ring import demo
    from run.demonstrations import demonstrate, ranks_asked
    demonstrate(demo, dp=ranks_asked(4))
