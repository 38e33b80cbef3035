"""The collectives of collectives.py, with the same results and bytes: a butterfly for small tensors
(fewer hops), a ring in pieces (less memory), torch's own on GPUs. op, "sum" or "max", replaces
combine, because torch's own collectives take a name. With async_op=True (not
broadcast, reduce, barrier) they run in the background, behind earlier work of the group, and return
their Work.

    pieces          a chunk travels in pieces, and a piece is added while the next one travels
    early receives  the receives of the next pieces are posted ahead: a gloo send completes when it
                    meets its receive, so a receive that is already there saves a round trip
    butterfly       a small tensor takes 2 log2 N - 1 hops, not 2 (N-1)
    native          torch's own collectives, the default on GPUs

What each trick gains: docs/measured.md.
"""

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from collectives import own_chunk
from engine.group import queued
from group import wait_all

# Chosen by time: smaller pieces take longer (docs/measured.md, "Pieces")
PIECE = 2 << 20  # bytes
AHEAD = 8  # receives posted ahead

# op -> (what our ring and butterfly call, in place; what torch's own collectives take)
OPS = {"sum": (torch.Tensor.add_, dist.ReduceOp.SUM),
       "max": (lambda a, b: torch.maximum(a, b, out=a), dist.ReduceOp.MAX)}


# ---- the ring ----


class RingStep(NamedTuple):
    """One piece in one hop."""
    reduce: bool  # True: add what arrives to `into`; False: receive in place
    out: torch.Tensor  # sent to the next rank
    into: torch.Tensor


def ring_steps(tensor, group, hops, num_pieces):
    """The steps of a ring, num_pieces for each hop. The piece that step i receives is the piece
    that step i + num_pieces sends. Hops 0 .. N-2 are the reduce-scatter, N-1 .. 2N-3 the
    all-gather."""
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    steps = []
    for hop in hops:  # N = 4, r = 1: sends chunks 0 3 2, then 1 0 3; receives 3 2 1, then 0 3 2
        out = chunks[(r - 1 - hop) % N].tensor_split(num_pieces)
        into = chunks[(r - 2 - hop) % N].tensor_split(num_pieces)
        steps += [RingStep(hop < N - 1, *pair) for pair in zip(out, into, strict=True)]
    return steps


def ring(tensor, group, op, hops):
    """Run some hops of the ring. A receive of the all-gather may overwrite this rank's partial sum
    of a chunk. That is safe: the complete sum was computed from that partial sum, which has been
    sent by then. (all_gather alone receives only chunks that this rank lacks.)"""
    assert tensor.is_contiguous(), "collectives take contiguous tensors"
    combine, _ = OPS[op]
    chunk = tensor.view(-1).tensor_split(group.size)[0]  # a largest one
    if group.in_order:
        ring_in_turn(ring_steps(tensor, group, hops, 1), group, combine, chunk)
    else:
        num_pieces = max(1, chunk.nbytes // PIECE)
        piece = chunk.tensor_split(num_pieces)[0]
        ring_ahead(ring_steps(tensor, group, hops, num_pieces), group, combine, piece, num_pieces)


def ring_in_turn(steps, group, combine, chunk):
    """Hop by hop, like the root's ring: NCCL allows no early receive."""
    buffer = torch.empty_like(chunk) if steps[0].reduce else None
    for step in steps:
        landing = buffer[: step.into.numel()] if step.reduce else step.into
        group.exchange(step.out, group.next, landing, group.prev).wait()
        if step.reduce:
            combine(step.into, landing)


def ring_ahead(steps, group, combine, piece, num_pieces):
    """Up to AHEAD receives are posted before their turn. Step i sends what step i - num_pieces has
    received. piece: a tensor as large as the largest piece."""
    num_reduce = sum(step.reduce for step in steps)
    # Buffers for arriving terms, used in turn: as many as receives can be pending
    buffers = [torch.empty_like(piece) for _ in range(min(AHEAD, num_reduce))]
    landings = [buffers[i % len(buffers)][: step.into.numel()] if step.reduce else step.into
                for i, step in enumerate(steps)]
    to_post = iter(landings)
    receives = deque()
    sends = []

    def post_receive():
        landing = next(to_post, None)
        if landing is not None:
            receives.append(group.recv(landing, group.prev))

    def finish(i):
        """Complete step i, and post the next receive: a buffer that step i used is free now."""
        receives.popleft().wait()
        if steps[i].reduce:
            combine(steps[i].into, landings[i])
        post_receive()

    for _ in range(AHEAD):
        post_receive()
    for i, step in enumerate(steps):
        if i >= num_pieces:
            finish(i - num_pieces)
        sends.append(group.send(step.out, group.next))
    for i in range(len(steps) - num_pieces, len(steps)):
        finish(i)
    wait_all(sends)


# ---- the butterfly: fewer hops for small tensors ----
# Up to SMALL bytes the ring's many hops cost more than its pieces save (docs/measured.md, "Where
# the butterfly ends")
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
    kept = tensor.view(-1)
    halving = []
    distance = group.size // 2
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
    All ranks get the same bits, because a + b = b + a. Rabenseifner 2004.

    All receives are posted first, even a receive into a half that this rank must still send. That
    is safe: the peer can complete that half only after it has received ours."""
    steps = butterfly_steps(tensor, group)
    swap = steps[len(steps) // 2]
    combine, _ = OPS[op]
    first, *others = steps
    # The first step sends what this rank has already, so its send and receive are one operation,
    # posted before the other receives. Its Work waits for both
    receives = [group.exchange(first.out, first.peer, first.into, first.peer)]
    receives += [group.recv(step.into, step.peer) for step in others]
    sends = []  # sends of the other steps
    for step, receive in zip(steps, receives, strict=True):
        if step is not first:
            sends.append(group.send(step.out, step.peer))
        receive.wait()
        if step is swap:
            wait_all(sends)  # combine() overwrites what the swap sends
        if step.total is not None:
            combine(step.total, step.into)
    wait_all(sends)


# ---- the family: beside the members of collectives.py, four with a root ----
#
#   scatter      the chunks of rank `root` go to their owners     n (N-1)/N sent by that rank
#   gather       the owners' chunks go to rank `root`             n/N
#   broadcast    that rank's tensor goes to all: scatter, then all_gather
#   reduce       the sum goes to that rank: reduce_scatter, then gather


@queued
def reduce_scatter(tensor, group, op="sum"):
    """In: every rank a full tensor. Out: chunk r of rank r is the reduction over all ranks; the
    other chunks are undefined (the ring leaves partial sums there)."""
    if group.native and tensor.numel() % group.size == 0:
        own = own_chunk(tensor, group)
        group.run_native("reduce_scatter", own, tensor.view(-1), OPS[op][1])
    else:
        ring(tensor, group, op, range(group.size - 1))


@queued
def all_gather(tensor, group):
    """In: chunk r of rank r is valid. Out: every rank has all chunks."""
    if group.native and tensor.numel() % group.size == 0:
        own = own_chunk(tensor, group)
        if not group.gathers_in_place:
            own = own.clone()
        group.run_native("all_gather", tensor.view(-1), own)
    else:
        ring(tensor, group, "sum", range(group.size - 1, 2 * group.size - 2))


@queued
def all_reduce(tensor, group, op="sum"):
    """In: every rank a full tensor. Out: every rank the same bits of the reduction, in place."""
    if group.native:
        group.run_native("all_reduce", tensor, OPS[op][1])
    elif takes_butterfly(tensor, group):
        butterfly(tensor, group, op)
    else:
        ring(tensor, group, op, range(2 * group.size - 2))


@queued
def scatter(tensor, group, root=0):
    """In: `root` a full tensor. Out: chunk r of rank r is root's."""
    parts = enumerate(tensor.view(-1).tensor_split(group.size))
    if group.rank == root:
        wait_all([group.send(part, peer) for peer, part in parts if peer != root])
    else:
        group.recv(own_chunk(tensor, group), root).wait()


@queued
def gather(tensor, group, root=0):
    """In: chunk r of rank r is valid. Out: `root` has all chunks."""
    parts = enumerate(tensor.view(-1).tensor_split(group.size))
    if group.rank == root:
        wait_all([group.recv(part, peer) for peer, part in parts if peer != root])
    else:
        group.send(own_chunk(tensor, group), root).wait()


def broadcast(tensor, group, root=0):
    """In: `root` a full tensor. Out: every rank has it. No rank sends more than 2 (N-1)/N of the
    bytes."""
    return all_gather(scatter(tensor, group, root), group)


def reduce(tensor, group, root=0, op="sum"):
    """In: every rank a full tensor. Out: `root` has the reduction. No rank sends more than its
    tensor."""
    return gather(reduce_scatter(tensor, group, op), group, root)


@queued
def _all_to_all(outputs, group, inputs):  # the order of arguments that @queued wants
    r, N = group.rank, group.size
    parts = []
    for distance in range(1, N):
        to = (r + distance) % N
        source = (r - distance) % N
        parts.append((inputs[to], to, outputs[source], source))
    group.exchange(*parts[0], more=parts[1:]).wait()  # one operation: NCCL gets all parts at once


def all_to_all(outputs, inputs, group, async_op=False):
    """In: lists of N tensors; inputs[j] is for rank j. Out: outputs[i] is what rank i sent to this
    rank."""
    outputs[group.rank].copy_(inputs[group.rank])
    return _all_to_all(outputs, group, inputs, async_op=async_op)


def barrier(group):
    """Go on only after all ranks have called: the sum needs every rank's term. (On a GPU it is the
    stream that waits, not the host.)"""
    all_reduce(torch.zeros(1, device=group.device), group)
