"""The collectives of collectives.py, with the same results and bytes, in the background too, and
torch's own on GPUs. op, "sum" or "max", replaces combine, because torch's own collectives take a
name. With async_op=True (not broadcast, reduce, barrier) they run behind earlier work of the group
while the caller goes on, and return their Work.

    added where it lies    what arrives through shared memory is added from the sender's buffer: one
                           copy less, no landing buffer (combine, an option of Group.exchange)
    pieces                 a long message travels through shared memory in pieces
    swap                   two ranks' all-reduce takes one hop
    native                 torch's own collectives, the default on GPUs

What each trick gains: docs/measured.md.
"""

import math
from collections import deque

import torch
import torch.distributed as dist

import collectives
from collectives import flat, own_chunk, refuse_wrong_lists
from engine.group import queued
from group import wait_all

PIECE = 2 << 20  # bytes; a piece stays in the cache from one rank's copy to the next one's
# op -> (what our ring calls, in place; what torch's own collectives take)
OPS = {"sum": (torch.Tensor.add_, dist.ReduceOp.SUM),
       "max": (lambda a, b: torch.maximum(a, b, out=a), dist.ReduceOp.MAX)}


def ring(tensor, group, op, hops):
    """Run some hops of the root's ring: hops 0 .. N-2 are the reduce-scatter, N-1 .. 2N-3 the
    all-gather.

    A receive of the all-gather may overwrite this rank's partial sum of a chunk. That is safe: the
    complete sum was computed from that partial sum, which has been sent by then. (all_gather alone
    receives only chunks that this rank lacks.)"""
    N, r = group.size, group.rank
    chunks = flat(tensor).tensor_split(N)
    # N = 4, r = 1: sends chunks 0 3 2, then 1 0 3; receives 3 2 1, then 0 3 2
    pass_on([(chunks[(r - 1 - hop) % N], chunks[(r - 2 - hop) % N],
              OPS[op][0] if hop < N - 1 else None) for hop in hops], group, chunks[0].nbytes)


def swap(tensor, group, op):
    """All-reduce of two ranks in one hop, not two: each sends all that it has, and adds. The bytes
    are the ring's, and so are the bits, because a + b = b + a."""
    pass_on([(flat(tensor), flat(tensor), OPS[op][0])], group, tensor.nbytes)


def reduce_by_hand(tensor, group, op):
    """All-reduce: two ranks swap, more go around the ring."""
    if group.size == 2:
        swap(tensor, group, op)
    else:
        ring(tensor, group, op, range(2 * group.size - 2))


def pass_on(hops, group, largest):
    """Hops of a ring, [(out, into, combine)]: send `out` to the next rank, and combine `into` with
    what the rank before sends. Through shared memory a message travels in pieces: the next one
    leaves before this one is waited for. largest: bytes of the longest message of any rank, so that
    all ranks cut alike."""
    num_pieces = max(1, math.ceil(largest / PIECE)) if group.is_on_one_machine() else 1
    works = deque()
    for out, into, combine in hops:
        for sent, received in zip(out.tensor_split(num_pieces), into.tensor_split(num_pieces),
                                  strict=True):
            if len(works) == min(2, num_pieces):  # all that this hop sends has arrived by then
                works.popleft().wait()
            works.append(group.exchange(sent, group.next, received, group.prev, combine=combine))
    wait_all(works)


# ---- the family ----

scatter = queued(collectives.scatter)
gather = queued(collectives.gather)


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
    else:
        reduce_by_hand(tensor, group, op)


def broadcast(tensor, group, root=0):
    """In: `root` a full tensor. Out: every rank has it."""
    return all_gather(scatter(tensor, group, root), group)


def reduce(tensor, group, root=0, op="sum"):
    """In: every rank a full tensor. Out: `root` has the reduction."""
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
    refuse_wrong_lists(outputs, inputs, group)
    outputs[group.rank].copy_(inputs[group.rank])
    return _all_to_all(outputs, group, inputs, async_op=async_op)


def barrier(group):
    """Go on only after all ranks have called: the sum needs every rank's term. (On a GPU it is the
    stream that waits, not the host.)"""
    all_reduce(torch.zeros(1, device=group.device), group)
