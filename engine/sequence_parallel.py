"""How activations enter and leave the tensor-parallel region, which lies between a column-parallel
layer and the next row-parallel one: with or without --sp, at once or in the background.

               entering (before a column)       leaving (after a row)
    no --sp    nothing: all ranks hold x        all-reduce
    --sp       all-gather of the tokens         reduce-scatter of the tokens

Entering is the backward of leaving, and the reverse: every rank multiplies what enters by its own
part of W, so the gradients of the input are partial sums.

Tokens inside stand as the messages bring them, rank by rank, (T B, S/T, C): row t B + b has rank
t's tokens of sequence b. Products and the MLP treat each token by itself, so any order will do, and
no tensor with C numbers per token has to be copied into another order. Attention alone needs
sequences: its column sorts what leaves it, 3 C/T numbers per token, and its row sorts back.

Held with --sp: 1/T of all that a block saves (zero bubble keeps the gathered x, which is whole).
"""

import torch

from collectives import WithBackward
from engine.collectives import all_gather, all_reduce, reduce_scatter


class Region:
    """Crosses the border of the tensor-parallel region of a group. x may be overwritten."""

    def __init__(self, group, sp=False, has_attention=False):
        """has_attention: the layers inside need whole sequences (by_sequence, by_rank)."""
        self.group = group
        self.sp = sp
        self.sorts = sp and has_attention

    def enter(self, x):
        """With --sp this rank's tokens (B, S/T, C) -> all tokens, rank by rank (T B, S/T, C)."""
        return self.start_enter(x, async_op=False)()

    def leave(self, x):
        """(B, S, C), partial over tp -> the sum, (B, S, C). With --sp (T B, S/T, C) -> this rank's
        tokens of the sum, (B, S/T, C)."""
        return self.start_leave(x, async_op=False)()

    def start_enter(self, x, async_op=True):
        """Start the messages of enter(), in the background if async_op. Returns a function that
        waits and returns the result."""
        if not self.sp:
            return lambda: x
        parts = x.new_empty((self.group.size, *x.shape))  # (T, B, S/T, C): each chunk is contiguous
        parts[self.group.rank] = x
        gathered = self.start(all_gather, parts, async_op)
        return lambda: gathered().flatten(0, 1)

    def start_leave(self, x, async_op=True):
        """The same for leave()."""
        if not self.sp:
            return self.start(all_reduce, x, async_op)
        parts = x.unflatten(0, (self.group.size, -1))  # (T, B, S/T, C)
        summed = self.start(reduce_scatter, parts, async_op)
        return lambda: summed()[self.group.rank].clone()  # a copy, so that the rest is freed

    def by_sequence(self, x):
        """In the region of attention, with --sp: (T B, S/T, C) -> (B, S, C)."""
        if not self.sorts:
            return x
        return x.unflatten(0, (self.group.size, -1)).movedim(0, 1).flatten(1, 2)

    def by_rank(self, x):
        """The way back."""
        if not self.sorts:
            return x
        return x.unflatten(1, (self.group.size, -1)).movedim(1, 0).flatten(0, 1)

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
    """The root's f (copy_to_ranks). Under --sp like the root's gather_tokens, but the result has
    the tokens rank by rank: (B, S/T, C) -> (T B, S/T, C)."""
    return WithBackward.apply(x, region.enter, lambda grad: region.leave(
        grad.clone(memory_format=torch.contiguous_format)))


def leave_region(x, region):
    """The root's g (sum_over_ranks). Under --sp like the root's scatter_tokens, but x has the
    tokens rank by rank: (T B, S/T, C) -> (B, S/T, C)."""
    return WithBackward.apply(x, lambda x: region.leave(
        x.clone(memory_format=torch.contiguous_format)), region.enter)
