"""The tag on each parameter: which slice of which full parameter this is.

The sum of gradients, the global norm, ZeRO, initial values and checkpoints read the tag, and know
no technique by name. Each technique writes into the tag:

    data and context     gradients are to be summed over the ranks that see different tokens: the
                         ZeRO group (of an expert, a part of it: see below)
    tensor parallelism   a rank holds these rows or columns, or all T ranks hold the whole
                         (replicated); under sequence parallelism the T ranks see different tokens,
                         so gradients of replicated parameters are summed over them
    expert parallelism   a rank holds these experts; their ZeRO group is the ranks that hold the
                         same experts
    pipeline             two stages hold the tied embedding, each with one term of its gradient
"""

import math
from dataclasses import dataclass, replace

import torch

# Four tags for D = T = 2, with four experts on two data ranks (--ep 2). Letters: the part of the
# full parameter that a rank holds. Z: the ZeRO group, here the data ranks, [0 2] and [1 3]; tp:
# [0 1] and [2 3]; alone: a group of one rank
#
#                                       rank 0   rank 1   rank 2   rank 3
#   parameter   full     split by       d=0 t=0  d=0 t=1  d=1 t=0  d=1 t=1   sum_over   shared_by
#   c_attn      QQKKVV   rows of q k v  Q.K.V.   .Q.K.V   Q.K.V.   .Q.K.V    Z          -
#   LayerNorm   LLLL     replicated     LLLL     LLLL     LLLL     LLLL      Z          tp
#   wte         WWWW     rows           WW..     ..WW     WW..     ..WW      Z          -
#   experts     ABCD     experts        AB..     AB..     ..CD     ..CD      alone      tp
#
# With --sp, where tensor ranks see different tokens:
#
#   LayerNorm   LLLL     replicated     LLLL     LLLL     LLLL     LLLL      Z, tp      tp
#   experts     ABCD     experts        A...     .B..     ..C.     ...D      alone      -


@dataclass
class Tag:
    name: str  # canonical name in the full model
    shape: torch.Size  # full shape
    dim: int = 0  # the dim that is split; 0 if none is
    ranges: tuple = ()  # the [start, stop) of the full dim that this rank holds, in order
    # Groups whose ranks all hold this slice. The ZeRO group is not listed here, because ZeRO may
    # leave each of its ranks only a chunk of the slice
    shared_by: tuple = ()
    # Groups over which the terms of the gradient are to be summed. First the ZeRO group: ranks that
    # see different tokens, and over which ZeRO shards
    sum_over: tuple = ()

    @property
    def slice_shape(self):
        """The shape of the slice that this rank holds."""
        length = sum(stop - start for start, stop in self.ranges)
        return torch.Size((*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]))

    def holders(self, sharded):
        """How many ranks end with the same gradient after all sums. Without ZeRO: all that hold
        the slice. With ZeRO (sharded) each rank of the ZeRO group has another chunk, so only those
        of shared_by count. In the picture: c_attn 2 without ZeRO, 1 with; LayerNorm 4 and 2."""
        shared_by = math.prod(group.size for group in self.shared_by)
        return shared_by * (1 if sharded else self.sum_over[0].size)

    def slice(self, full):
        """The part of the full tensor that this rank holds. One range: a view."""
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            return full.narrow(self.dim, start, stop - start)
        indices = [i for start, stop in self.ranges for i in range(start, stop)]
        # index_select, because torch.cat on train.py's meta device would import torch.compile,
        # which takes seconds
        return full.index_select(self.dim, torch.tensor(indices, device=full.device))


def bounds(n, group):
    """[start, stop) of this rank's part of n things. The group's size need not divide n: as in
    torch.tensor_split, the first ranks get one more."""
    each, more = divmod(n, group.size)
    start = group.rank * each + min(group.rank, more)
    return start, start + each + (1 if group.rank < more else 0)


def tag_whole(model, zero_group, rep):
    """Tag every parameter of a model as whole, its gradient to be summed over the ZeRO group and
    over `rep`: the group along the mesh's axis of this name, whose ranks hold the same chunk under
    ZeRO (--shard, zero.py)."""
    others = (rep,) if rep.size > 1 else ()
    for name, param in model.canonical_parameters():
        param.tag = Tag(name, param.shape, 0, ((0, param.size(0)),), shared_by=others,
                        sum_over=(zero_group, *others))


def take_slice(full, tag):
    """A new parameter: the tag's slice of `full`, tagged with `tag`. On the meta device it has a
    shape only."""
    values = tag.slice(full.detach()).clone(memory_format=torch.contiguous_format)
    part = torch.nn.Parameter(values, full.requires_grad)
    part.tag = tag
    return part


def split(full, dim, group, parts=()):
    """This rank's slice of a tagged parameter: 1/T of `dim`, or 1/T of each part, if `dim` has
    parts of these sizes (c_attn is three matrices in one: q, k, v). None, a bias that is not there,
    stays None."""
    if full is None:
        return None
    ranges = []
    offset = 0  # where the part begins
    for size in parts or (full.size(dim),):
        start, stop = bounds(size, group)
        ranges.append((offset + start, offset + stop))
        offset += size
    return take_slice(full, replace(full.tag, dim=dim, ranges=tuple(ranges)))
