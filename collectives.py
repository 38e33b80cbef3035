"""Collectives by hand: all_reduce and its family, from sends and receives.

A collective is an operation that all ranks of a group call in the same order. A tensor of n bytes
is cut into N chunks (torch.tensor_split, so any n); rank r owns chunk r. Sent by each rank:

    reduce_scatter    each rank ends with the sum of its own chunk        n (N-1)/N
    all_gather        each rank's own chunk is copied to all ranks        n (N-1)/N
    all_reduce        all ranks end with the sum of all: the two above    2 n (N-1)/N

No all-reduce can send less (Patarasuk and Yuan 2009). The ring takes 2 (N-1) hops (in a hop each
rank sends one message); a small tensor takes fewer, by the butterfly. All ranks end with the same
bits. "Backward of X": if a layer's forward calls X, its backward calls this collective.

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


class RingStep(NamedTuple):
    """One piece in one hop."""
    reduce: bool  # True: add what arrives to `into`; False: receive in place
    out: torch.Tensor  # sent to the next rank
    into: torch.Tensor


def ring_steps(tensor, group, hops, K):
    """The steps of a ring with K pieces per chunk. The piece that step i receives is the piece that
    step i + K sends. Hops 0 .. N-2 are the reduce-scatter, hops N-1 .. 2N-3 the all-gather."""
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    steps = []
    for hop in hops:  # N = 4, r = 1: sends chunks 0 3 2, then 1 0 3; receives 3 2 1, then 0 3 2
        out = chunks[(r - 1 - hop) % N].tensor_split(K)
        into = chunks[(r - 2 - hop) % N].tensor_split(K)
        steps += [RingStep(hop < N - 1, *pair) for pair in zip(out, into, strict=True)]
    return steps


def ring(tensor, group, op, hops):
    """Run some hops of the ring. The all-gather's receives land in place, perhaps while this rank's
    partial sum in that place is still to be sent. That is safe: the complete sum has the partial
    sum as a term, so it cannot arrive before that has left. (all_gather alone receives only chunks
    that this rank lacks.)"""
    assert tensor.is_contiguous(), "collectives take contiguous tensors"
    chunk = tensor.view(-1).tensor_split(group.size)[0]
    # pieces pay only with early receives
    K = 1 if group.in_order else max(1, chunk.nbytes // PIECE)
    steps = ring_steps(tensor, group, hops, K)
    num_reduce = sum(step.reduce for step in steps)
    # Buffers for arriving terms, used in turn: as many as receives can be pending
    num_buffers = min(1 if group.in_order else AHEAD, num_reduce)
    buffers = [torch.empty_like(chunk.tensor_split(K)[0]) for _ in range(num_buffers)]
    receives, sends = [], []

    def landing(i):
        """Where step i receives: in a buffer if it reduces, else in place."""
        into = steps[i].into
        return buffers[i % num_buffers][: into.numel()] if steps[i].reduce else into

    def post_receive():
        i = len(receives)
        if i < len(steps):
            receives.append(group.recv(landing(i), group.prev))

    def finish(i):
        """Complete step i; its buffer is free for the next receive."""
        receives[i].wait()
        if steps[i].reduce:
            combine, _ = OPS[op]
            combine(steps[i].into, landing(i))
        if not group.in_order:
            post_receive()

    if not group.in_order:
        for _ in range(AHEAD):
            post_receive()
    for i, step in enumerate(steps):
        if i >= K:
            finish(i - K)  # step i sends what step i - K received
        if group.in_order:
            receives.append(group.exchange(step.out, group.next, landing(i), group.prev))
        else:
            sends.append(group.send(step.out, group.next))
    for i in range(len(steps) - K, len(steps)):
        finish(i)
    wait_all(sends)


# ---- fewer hops for small tensors ----
# Up to SMALL bytes the ring's many hops cost more than its pieces save. 4 KB on 4 ranks: the
# butterfly takes 2.6 to 3.0 ms, the ring 3.9, gloo 5.3. 2 MB: 6.0, 6.6, 7.4; on 8 ranks 13.5, 24.9,
# 15.5. At 4 MB on 4 ranks butterfly, ring and gloo are even.
SMALL = 4 << 20  # bytes


def takes_butterfly(tensor, group):
    """All ranks give the same answer."""
    power_of_two = group.size & (group.size - 1) == 0
    return tensor.nbytes <= SMALL and power_of_two and not group.in_order and not group.native


class ButterflyStep(NamedTuple):
    peer: int
    out: torch.Tensor
    into: torch.Tensor  # receives
    total: torch.Tensor | None  # `into` is added to it; None: `into` is complete


def butterfly_steps(tensor, group):
    """Halve the part to sum, then double the complete part. N = 4, rank 1, a tensor of the quarters
    q0 q1 q2 q3:

        distance 2, with rank 3    sends q2 q3, adds what arrives to q0 q1
        distance 1, with rank 0    swaps q0 q1: both ranks add, q0 q1 is complete on both
        distance 2, with rank 3    sends q0 q1, receives q2 q3
    """
    kept, halving, distance = tensor.view(-1), [], group.size // 2
    while distance > 1:
        lower, upper = kept.tensor_split(2)
        keeps_upper = bool(group.rank & distance)
        kept, given = (upper, lower) if keeps_upper else (lower, upper)
        halving.append(ButterflyStep(group.rank ^ distance, given, torch.empty_like(kept), kept))
        distance //= 2
    swap = ButterflyStep(group.rank ^ 1, kept, torch.empty_like(kept), kept)
    doubling = [ButterflyStep(step.peer, step.total, step.out, None) for step in reversed(halving)]
    return [*halving, swap, *doubling]


def butterfly(tensor, group, op):
    """All-reduce of N = 2^k ranks in 2k - 1 hops instead of 2 (N-1), with the bytes of the ring.
    Posts all receives and the first send here, the other sends in wait(). All ranks get the same
    bits, as a + b = b + a. Rabenseifner 2004.

    All receives are posted at once, also a receive into a half that this rank has yet to send: the
    peer sends its complete half only after it has received that half's terms."""
    steps = butterfly_steps(tensor, group)
    combine, _ = OPS[op]
    first = steps[0]
    receives = [group.exchange(first.out, first.peer, first.into, first.peer)]
    receives += [group.recv(step.into, step.peer) for step in steps[1:]]

    def finish():
        sends = []
        with group.span("wait"):
            for step, receive in zip(steps, receives, strict=True):
                if step is not first:
                    sends.append(group.send(step.out, step.peer))
                receive.wait()
                # The swap sends what combine() overwrites: wait for its send. (`first` is an
                # exchange, whose Work has waited for the send, too)
                if step.out is step.total and step is not first:
                    sends[-1].wait()
                if step.total is not None:
                    combine(step.total, step.into)
            wait_all(sends)

    return Work([finish], f"group {group.name}")


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
        butterfly(tensor, group, op).wait()
    else:
        ring(tensor, group, op, range(2 * group.size - 2))


def all_reduce(tensor, group, op="sum", async_op=False):
    """In: every rank a full tensor. Out: every rank the same bits of the reduction, in place. Sends
    2 (N-1)/N of the bytes. Backward: see sum_over_ranks in tensor_parallel.py."""
    # Between two ranks the butterfly is one exchange: post it here, without submit()'s thread, if
    # no earlier work is pending. (Otherwise its messages could overtake those of earlier work.)
    if async_op and group.size == 2 and takes_butterfly(tensor, group) and not group.last.waits:
        return butterfly(tensor, group, op)
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
    from show.demonstrations import demonstrate, ranks_asked
    from show.ring import demo
    demonstrate(demo, dp=ranks_asked(4))
