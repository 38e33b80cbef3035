"""Sequence parallelism, on top of tensor parallelism: 1/T of the tokens between the matrices.

Between a row-parallel layer and the next column-parallel one (tensor_parallel.py) T ranks do the
same work on the same activations: bias, residual, LayerNorm. But an all-reduce is a reduce-scatter
and an all-gather, and each token is by itself there. So do that work between the two, 1/T on each:

    row -> all-reduce -> LayerNorm of S tokens -> column
    row -> reduce-scatter -> LayerNorm of S/T tokens -> all-gather -> column

Sent: the same 2 (T-1)/T b S C elements, and half of that again for each column in backward, which
gathers x once more as only 1/T of it was kept. Held: all that a block saves is divided by T (but
where weight gradients are put off, what was gathered waits with them). arXiv 2205.05198

    python sequence_parallel.py        both ways on 4 ranks        torchrun train.py --tp 2 --sp
"""

from functools import partial

import torch
import torch.nn.functional as F

from collectives import all_gather, all_reduce, reduce_scatter
from run.demonstrations import demonstrate

# Two pairs: all_have and add_up, gather_tokens and scatter_tokens. In each, one is the other's
# backward: every rank uses what enters with its own part of W, so gradients there are partial sums.
# A call starts the messages, calling what it returns waits for them: enter(x)(). Only with async_op
# does anything go on in between. x may be overwritten.


def all_have(x, group, async_op=False):
    """Entering a column without --sp: all ranks have x already."""
    return lambda: x


def add_up(x, group, async_op=False):
    """Leaving a row without --sp: (B, S, C), a term on each rank -> the sum, on every rank."""
    work = all_reduce(x, group, async_op=async_op)

    def total():
        if async_op:
            work.wait()
        return x

    return total


def gather_tokens(x, group, async_op=False):
    """Entering a column: each rank's tokens (B, S/T, C) -> all of them (B, S, C)."""
    parts = x.new_empty((group.size, *x.shape))  # (T, B, S/T, C): a chunk is one piece of memory
    parts[group.rank] = x
    work = all_gather(parts, group, async_op=async_op)

    def everyones():
        if async_op:
            work.wait()
        return parts.movedim(0, 1).flatten(1, 2)

    return everyones


def scatter_tokens(x, group, async_op=False):
    """Leaving a row: (B, S, C), a term on each rank -> the sum of own tokens' (B, S/T, C)."""
    parts = x.unflatten(1, (group.size, -1)).movedim(1, 0).contiguous()  # (T, B, S/T, C)
    work = reduce_scatter(parts, group, async_op=async_op)

    def own():
        if async_op:
            work.wait()
        return parts[group.rank].clone()  # the other chunks are freed

    return own


class Crossing:
    """How activations enter a tensor-parallel layer, and leave it; without sp, or with."""

    def __init__(self, group, sp):
        self.group = group
        self.enter = partial(gather_tokens if sp else all_have, group=group)
        self.leave = partial(scatter_tokens if sp else add_up, group=group)


class Enter(torch.autograd.Function):
    """CopyToRanks of tensor_parallel.py, or under --sp an all-gather."""

    @staticmethod
    def forward(ctx, x, crossing):
        ctx.crossing = crossing
        return crossing.enter(x)()

    @staticmethod
    def backward(ctx, grad):
        return ctx.crossing.leave(grad.clone(memory_format=torch.contiguous_format))(), None


class Leave(torch.autograd.Function):
    """SumOverRanks of tensor_parallel.py, or under --sp the half of it: a rank's term is a part of
    all tokens' sums, so backward needs the gradients of all, and has them or gathers them."""

    @staticmethod
    def forward(ctx, x, crossing):
        ctx.crossing = crossing
        return crossing.leave(x.clone())()

    @staticmethod
    def backward(ctx, grad):
        return ctx.crossing.enter(grad)(), None


def demo(mesh):
    """LayerNorm between a row and a column: of all tokens on every rank, or each rank's own."""
    group, C = mesh.group("tp"), 16
    x, results = torch.randn(2, 8, C, dtype=torch.double), []  # other numbers on each rank
    for sp in (False, True):
        crossing, before = Crossing(group, sp), group.bytes_sent
        y = F.layer_norm(crossing.leave(x.clone())(), (C,))
        results.append(crossing.enter(y)())
        if mesh.rank == 0:
            print(f"{'--sp   ' if sp else 'without'} LayerNorm of {[*y.shape]} on each rank, "
                  f"{group.bytes_sent - before} bytes sent")
    same = torch.allclose(*results, rtol=1e-12, atol=1e-12)
    print(f"rank {mesh.rank}: the column gets {'the same' if same else 'something ELSE'}")


if __name__ == "__main__":
    demonstrate(demo, tp=4)
