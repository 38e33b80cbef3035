"""Sequence parallelism, on top of tensor parallelism: 1/T of the tokens between the matrices.

Between a row-parallel layer and the next column-parallel one (tensor_parallel.py) T ranks hold the
same activations and repeat the same work: bias, residual, LayerNorm. But an all-reduce is a
reduce-scatter and an all-gather, and bias, residual and LayerNorm treat each token by itself. So
place them between the two halves, on 1/T of the tokens per rank:

    without --sp   row -> all-reduce     -> LayerNorm of S tokens                 -> column
    with --sp      row -> reduce-scatter -> LayerNorm of S/T tokens -> all-gather -> column

Sent per pair of a row and the next column, in forward and again in backward: as much as one
all-reduce, 2 (T-1)/T b S C elements; and in backward half of that once more, to gather the column's
x, of which only 1/T was saved. Held: all that a block saves / T (zero bubble keeps the gathered x).
Korthikanti et al., arXiv 2205.05198.

    python sequence_parallel.py        both ways on 4 ranks        torchrun train.py --tp 2 --sp
"""

import torch
import torch.nn.functional as F

from collectives import WithBackward, all_gather, all_reduce, reduce_scatter

# How activations cross the border of the tensor-parallel region, between a column and its row:
#
#               entering (before a column)       leaving (after a row)
#    no --sp    nothing: all ranks hold x        all-reduce
#    --sp       all-gather of the tokens         reduce-scatter of the tokens
#
# In each line one is the backward of the other: every rank multiplies what enters by its own part
# of W, so the gradients of the input are partial sums.


class Region:
    """The border of the tensor-parallel region of a group, with or without --sp. x may be
    overwritten."""

    def __init__(self, group, sp=False):
        self.group, self.sp = group, sp

    def enter(self, x):
        """With --sp this rank's tokens (B, S/T, C) -> all tokens (B, S, C)."""
        return self.start_enter(x, async_op=False)()

    def leave(self, x):
        """(B, S, C), partial over tp -> the sum, (B, S, C) or, with --sp, this rank's tokens of it,
        (B, S/T, C)."""
        return self.start_leave(x, async_op=False)()

    def start_enter(self, x, async_op=True):
        """Start the messages of enter(), in the background if async_op. Returns a function that
        waits and returns the result."""
        if not self.sp:
            return lambda: x
        parts = x.new_empty((self.group.size, *x.shape))  # (T, B, S/T, C): each chunk is contiguous
        parts[self.group.rank] = x
        gathered = self.start(all_gather, parts, async_op)
        return lambda: gathered().movedim(0, 1).flatten(1, 2)

    def start_leave(self, x, async_op=True):
        """The same for leave()."""
        if not self.sp:
            return self.start(all_reduce, x, async_op)
        parts = x.unflatten(1, (self.group.size, -1)).movedim(1, 0).contiguous()  # (T, B, S/T, C)
        summed = self.start(reduce_scatter, parts, async_op)
        return lambda: summed()[self.group.rank].clone()  # a copy: the other chunks are freed

    def start(self, collective, tensor, async_op):
        """Returns a function that waits for the collective, and returns the tensor."""
        work = collective(tensor, self.group, async_op=async_op)

        def finish():
            if async_op:
                work.wait()
            return tensor

        return finish


# For experts and embedding, whose backward is autograd's. Columns and rows call the region
# themselves.


def enter_region(x, region):
    """f of tensor_parallel.py; under --sp an all-gather of the tokens."""
    return WithBackward.apply(x, region.enter, lambda grad: region.leave(
        grad.clone(memory_format=torch.contiguous_format)))


def leave_region(x, region):
    """g of tensor_parallel.py; under --sp a reduce-scatter of the tokens. Each rank's term is part
    of the sums of all tokens, so backward needs the gradients of all tokens: under --sp it gathers
    them."""
    return WithBackward.apply(x, lambda x: region.leave(x.clone()), region.enter)


def demo(mesh):
    """LayerNorm between a row and a column: of all tokens on every rank, or each rank's own."""
    group, C = mesh.group("tp"), 16
    x, results = torch.randn(2, 8, C, dtype=torch.double), []  # a different x on each rank
    for sp in (False, True):
        region, before = Region(group, sp), group.bytes_sent
        y = F.layer_norm(region.leave(x.clone()), (C,))
        results.append(region.enter(y))
        if mesh.rank == 0:
            print(f"{'--sp   ' if sp else 'without'} LayerNorm of {[*y.shape]} on each rank, "
                  f"{group.bytes_sent - before} bytes sent")
    same = torch.allclose(*results, rtol=1e-12, atol=1e-12)
    print(f"rank {mesh.rank}: the column gets {'the same' if same else 'something ELSE'}")


if __name__ == "__main__":
    from show.demonstrations import demonstrate
    demonstrate(demo, tp=4)
