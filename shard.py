"""The tag on each parameter: what a tensor on this rank is of the full model.

Initial values, the summing of gradients, the global norm, ZeRO and checkpoints read the tag and
nothing else: none of them knows a technique by name. Each technique adds to it what it does.

    data and context    gradients are to be summed over the replicas, which see other tokens
    tensor parallelism  a rank holds these rows or columns, or all its ranks hold the same; under
                        --sp these see other tokens, and their gradients are to be summed, too
    expert parallelism  a rank holds these experts, and fewer replicas hold the same
    pipeline            two ends hold the tied embedding, and each sees a part of its gradient
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class Shard:
    name: str  # canonical name in the full model
    shape: torch.Size  # full shape
    dim: int = 0  # the dim along which it is split
    ranges: tuple = ()  # the [start, stop) of the full dim that this rank holds, in order
    shared_by: tuple = ()  # groups, other than the data ranks, whose ranks all hold this slice
    # Groups over which the terms of the gradient are to be summed. The first are the data ranks:
    # that sum overlaps with backward, and ZeRO splits over them. The others follow at its end.
    sum_over: tuple = ()

    @property
    def copies(self):
        """How many ranks of one replica hold this slice."""
        return math.prod(group.size for group in self.shared_by)

    @property
    def first(self):
        """Whether this rank is the first of the ranks in its replica that hold this slice."""
        return all(group.rank == 0 for group in self.shared_by)

    def slice(self, full):
        """The part of the full tensor that this rank holds."""
        parts = [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def runs(self, start, stop):
        """Where elements [start, stop) of this slice, flattened, lie in the flattened full tensor:
        (index in the full tensor, index counted from `start`, length) of each contiguous run."""
        width, inner = self.shape[self.dim], self.shape[self.dim + 1 :].numel()
        at = 0
        for row in range(self.shape[: self.dim].numel()):
            for a, b in self.ranges:
                lo, hi = max(at, start), min(at + (b - a) * inner, stop)
                if lo < hi:
                    yield (row * width + a) * inner + lo - at, lo - start, hi - lo
                at += (b - a) * inner


def tag_whole(model, data):
    """Tag every parameter of a model as whole, its gradient to be summed over the group `data`."""
    for name, param in model.canonical_parameters():
        param.shard = Shard(name, param.shape, 0, ((0, param.size(0)),), sum_over=(data,))


def pad_vocabulary(model, multiple):
    """Give the tied embedding more rows, of zeros, up to a multiple: GPUs are slow at products of
    odd sizes. No token has such an id, their logits are minus infinity, and the tag does not know
    of them: for the norm, the count and checkpoints they are not there."""
    head, embedding = model.layers[-1].lm_head, model.layers[0].wte
    weight = embedding.weight
    rows = weight.size(0)
    if rows % multiple:
        padded = weight.new_empty(rows + -rows % multiple, weight.size(1))
        embedding.weight = head.weight = torch.nn.Parameter(padded)
        head.weight.shard = weight.shard
        head.register_forward_hook(lambda module, x, logits: logits.index_fill_(
            -1, torch.arange(rows, logits.size(-1), device=logits.device), -math.inf))


def bounds(n, group):
    """[start, stop) of this rank's part of n things, as torch.tensor_split cuts: n need not divide,
    the first ranks have one more."""
    each, more = divmod(n, group.size)
    start = group.rank * each + min(group.rank, more)
    return start, start + each + (group.rank < more)
