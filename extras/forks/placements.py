"""A sharding algebra, like in GSPMD (arXiv 2105.04663), JAX's pjit and torch's DTensor: code says
where each tensor lies, and the messages follow.

On each axis of the mesh a tensor has one placement. REPLICATE: all N ranks hold the tensor.
Split(dim): rank r holds part r of that dim. PARTIAL: each rank holds a term, and the tensor is the
sum of the terms.

redistribute    from \\ to    REPLICATE     Split(j)                          PARTIAL
                REPLICATE    -             own part                          rank 0's term, zeros
                Split(i)     all-gather    i = j: -, else all-to-all         own part among zeros
                PARTIAL      all-reduce    reduce-scatter                    -
    A rank sends for a tensor of n bytes: all-reduce 2 (N-1)/N n; all-gather and reduce-scatter
    (N-1)/N n; all-to-all (N-1)/N^2 n; own part, zeros and - send nothing

product         the placement of an einsum's result, from those of its inputs, with no message: a
                split letter that the result has stays split; a split letter that is summed over
                makes the result PARTIAL

dual            the placement that a tensor's gradient must get: REPLICATE for a PARTIAL tensor,
                because a term of a sum has the sum's gradient; else the tensor's own placement.
                The rule of product says how the gradient arrives: behind an all-gather each rank
                has used the whole tensor for its own part of the result, so the gradient arrives
                PARTIAL. From there to Split is a reduce-scatter: the backward of an all-gather.

Megatron's f and g, --sp's enter and leave, ZeRO's messages and Ulysses' all-to-all are transitions
in this table (tests/test_placements.py). Linear, below, names none of them, and derives all.
Sizes must be multiples of N.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from collectives import all_gather, all_reduce, all_to_all, reduce_scatter


class Split(NamedTuple):
    dim: int


REPLICATE = "replicate"
PARTIAL = "partial"


def dual(placement):
    return REPLICATE if placement == PARTIAL else placement


def own_part(x, dim, group):
    return x.chunk(group.size, dim)[group.rank]


def redistribute(x, source, target, group):
    """x: this rank's part of a tensor whose placement on the group is `source`. Returns its part
    under the placement `target`. x stays as it was."""
    if source == target or group.size == 1:
        return x
    if source == REPLICATE:
        if target == PARTIAL:
            return x if group.rank == 0 else torch.zeros_like(x)
        return own_part(x, target.dim, group)
    if source == PARTIAL:
        if target == REPLICATE:
            return all_reduce(x.clone(memory_format=torch.contiguous_format), group)
        parts = torch.stack(x.chunk(group.size, target.dim))
        return reduce_scatter(parts, group)[group.rank]
    if target == REPLICATE:
        parts = x.new_empty(group.size, *x.shape)
        parts[group.rank] = x
        return torch.cat(all_gather(parts, group).unbind(), source.dim)
    if target == PARTIAL:
        parts = [torch.zeros_like(x) for _ in range(group.size)]
        parts[group.rank] = x
        return torch.cat(parts, source.dim)
    parts = [part.contiguous() for part in x.chunk(group.size, target.dim)]
    received = [torch.empty_like(part) for part in parts]
    all_to_all(received, parts, group)
    return torch.cat(received, source.dim)


def product(equation, first, second):
    """The placement of torch.einsum(equation, a, b), where a has the placement `first`, b the
    placement `second`, and each rank multiplies its own parts. ValueError if a rank would need the
    parts of other ranks."""
    inputs, output = equation.split("->")
    placed = list(zip(inputs.split(","), (first, second), strict=True))
    if PARTIAL in (first, second):
        if (first, second) not in ((PARTIAL, REPLICATE), (REPLICATE, PARTIAL)):
            raise ValueError(f"{equation}: the product of sums is not the sum of products")
        return PARTIAL
    # One letter may be split, in each input that has it
    split = {letters[place.dim] for letters, place in placed if place != REPLICATE}
    if not split:
        return REPLICATE
    letter, *others = split
    whole = [letters for letters, place in placed if letter in letters and place == REPLICATE]
    if others or whole:
        raise ValueError(f"{equation}: {first} and {second} do not meet; redistribute one")
    return Split(output.index(letter)) if letter in output else PARTIAL


class Plan(NamedTuple):
    """How one axis of the mesh takes part in y = x W^T: placements of x (B, S, in) and W (out, in),
    as they lie (x, weight) and as they are multiplied (used_x, used_weight), and of y (B, S, out),
    as the next layer wants it."""
    x: object = REPLICATE
    used_x: object = REPLICATE
    weight: object = REPLICATE
    used_weight: object = REPLICATE
    y: object = REPLICATE


def along(plans, x, source_of, target_of):
    """Redistribute x on each axis: plans is [(group, plan)]. Where two axes split one dim, list the
    axis first that was split last, because it must be gathered first: ZeRO's chunk of a
    tensor-parallel slice is gathered to the slice."""
    for group, plan in plans:
        x = redistribute(x, source_of(plan), target_of(plan), group)
    return x


def of_y(plan):
    return product("bsi,oi->bso", plan.used_x, plan.used_weight)


def of_grad_x(plan):
    return product("bso,oi->bsi", dual(of_y(plan)), plan.used_weight)


def of_grad_weight(plan):
    return product("bso,bsi->oi", dual(of_y(plan)), plan.used_x)


class Linear(torch.autograd.Function):
    """y = x W^T on any plan. The gradient of a tensor gets the dual of its placement: the same for
    Split and REPLICATE. So the gradient of a replicated W, which arrives PARTIAL, is summed."""

    @staticmethod
    def forward(ctx, x, weight, plans):
        x = along(plans, x, lambda p: p.x, lambda p: p.used_x)
        weight = along(plans, weight, lambda p: p.weight, lambda p: p.used_weight)
        ctx.save_for_backward(x, weight)
        ctx.plans = plans
        return along(plans, F.linear(x, weight), of_y, lambda p: p.y)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        plans = ctx.plans
        grad = along(plans, grad, lambda p: dual(p.y), lambda p: dual(of_y(p)))
        grad_x = torch.einsum("bso,oi->bsi", grad, weight)
        grad_weight = torch.einsum("bso,bsi->oi", grad, x)
        return (along(plans, grad_x, of_grad_x, lambda p: dual(p.x)),
                along(plans, grad_weight, of_grad_weight, lambda p: dual(p.weight)), None)


# Four techniques, as placements of a layer
TOKENS = Split(1)  # cuts S of x (B, S, in) and y (B, S, out)
DDP_PLAN = Plan(x=Split(0), used_x=Split(0), y=Split(0))
ZERO3_PLAN = DDP_PLAN._replace(weight=Split(0))
COLUMN = Plan(weight=Split(0), used_weight=Split(0), y=Split(2))
ROW = Plan(x=Split(2), used_x=Split(2), weight=Split(1), used_weight=Split(1))
SP_COLUMN = COLUMN._replace(x=TOKENS)
SP_ROW = ROW._replace(y=TOKENS)
