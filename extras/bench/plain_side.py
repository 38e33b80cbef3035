"""Peers of the engine that are ours, too: the root's parts, the same layout in another way, and
one process or rank as a limit."""

import torch

import collectives
import context_parallel
import engine.context_parallel
from engine.collectives import PIECE
from extras.bench.job import repeated, trainer
from extras.bench.torch_side import adamw, loop, whole_model
from extras.bench.without import swapped
from run.config import PARTS

# ---- the root's parts ----


def plain_ring(job):
    """The root's all_reduce."""
    tensor = torch.zeros(256 * job.row.size)  # 4 bytes each: row.size KiB
    group = job.mesh(plain=True).group("dp")
    return repeated(job, lambda: collectives.all_reduce(tensor, group))


def copies_and_sums(job):
    """What an all-reduce through shared memory copies and adds, on each rank, without a message: a
    hop copies what it sends into a buffer, and adds or copies what it receives out of one."""
    tensor, n = torch.zeros(256 * job.row.size), job.n
    chunks, hops = (tensor.chunk(n), 2 * (n - 1)) if n > 2 else ([tensor], 1)  # two ranks swap
    buffer = torch.empty(PIECE // 4)

    def call():
        for hop in range(hops):
            take = torch.Tensor.add_ if hop < n - 1 else torch.Tensor.copy_
            for piece in chunks[hop % len(chunks)].split(buffer.numel()):
                message = buffer[: piece.numel()]
                message.copy_(piece)
                take(piece, message)

    return repeated(job, call)


def other_flags(**flags):
    """The trainer with other flags."""
    def peer(job):
        job.plan({**job.row.layout, **flags})
        return trainer(job)

    return peer


def root_has(*names):
    """The trainer with these parts of the root (names of PARTS in run/config.py), and with the
    engine's for all else."""
    return other_flags(fast=",".join(part for part in PARTS if part not in names))


all_of_the_root = other_flags(fast="")

# ---- the same layout in another way ----


def naive_split(job):
    """Ring attention without zigzag: rank r has segment r of N. Its queries attend to all segments
    before, and to none behind."""
    def in_order(S, size, rank):
        return torch.arange(S).chunk(size)[rank]

    def visible(rank, key_rank, half):
        seen = slice(None) if key_rank <= rank else slice(0)  # all of the segment, or nothing
        return seen, seen, key_rank == rank

    compute = engine.context_parallel.kernel
    compute_backward = engine.context_parallel.kernel_backward

    # In a hop in which nothing is visible q, k and v are empty: return empty results, and do not
    # call torch's kernels

    def kernel(chosen, q, k, v, causal):
        if q.size(2) == 0:
            return q, q[..., 0], ()  # out, logsumexp, the rest
        return compute(chosen, q, k, v, causal)

    def kernel_backward(chosen, grad, q, k, v, *args):
        if q.size(2) == 0:
            return q, k, v  # their gradients
        return compute_backward(chosen, grad, q, k, v, *args)

    with swapped(context_parallel, zigzag=in_order):
        step = trainer(job)

    def naive_step():
        with swapped(engine.context_parallel, visible=visible, kernel=kernel,
                     kernel_backward=kernel_backward):
            return step()

    return naive_step


# ---- limits: rank 0 does the work, and the other ranks wait ----


def one_process(job):
    """A plain loop with as many threads as there are ranks."""
    # flags of the row; all others are one process's
    kept = ("microbatches", "experts", "balance", "arch", "n_kv_head", "n_hidden")
    job.plan({name: getattr(job.cfg, name) for name in kept})
    if job.rank > 0:
        return lambda: 0.0
    model = whole_model(job)
    step = loop(job, model, adamw(model.parameters(), job.cfg))

    def threaded():
        torch.set_num_threads(job.n)
        loss = step()
        torch.set_num_threads(1)
        return loss

    return threaded


def one_rank(job):
    """The trainer on one rank. Its batch: the row's or, if the row's grows with the number of
    ranks, one rank's share."""
    job.n = 1
    job.plan({})
    return trainer(job) if job.rank == 0 else lambda: 0.0
