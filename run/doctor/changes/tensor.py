"""Changes of tensor parallelism: f and g, the biases of rows, matrices that are several in one."""

from functools import partial

import torch.nn.functional as F

from collectives import WithBackward
from run.doctor.step import Change
from sizes import LlamaConfig
from tensor_parallel import Row, copy_to_ranks, sum_of_copy


def unsummed(x, group):
    return x


def averaged(forward, backward):
    """f or g with a mean in place of a sum: forward and backward say which way sums."""
    def mean(x, group):
        return sum_of_copy(x, group) / group.size

    def apply(x, group):
        way = partial(mean, group=group)
        return WithBackward.apply(x, way if forward else lambda x: x,
                                  way if backward else lambda x: x)
    return apply


def sums_both_ways(x, group):
    return WithBackward.apply(x, lambda x: sum_of_copy(x, group), lambda x: sum_of_copy(x, group))


WHERE = {"blocks": "in all blocks", "model": "everywhere"}
PLACES = {"blocks": ["attention", "MLP"], "model": ["attention", "MLP", "head", "embedding"]}


def columns(model, place):
    blocks = model.layers[1:-1]
    found = {"attention": [block.attn.c_attn for block in blocks],
             "MLP": [block.mlp.c_fc for block in blocks if hasattr(block.mlp, "c_fc")],
             "head": [model.layers[-1].lm_head]}
    return sum((found[part] for part in PLACES.get(place, [place]) if part in found), [])


def rows(model, place):
    blocks = model.layers[1:-1]
    found = {"attention": [block.attn.c_proj for block in blocks],
             "MLP": [block.mlp.c_proj for block in blocks if hasattr(block.mlp, "c_proj")],
             "embedding": [model.layers[0].wte]}
    return sum((found[part] for part in PLACES.get(place, [place]) if part in found), [])


def replace_f(place, f):
    def after(model, mesh):
        for column in columns(model, place):
            column.f = f
    return after


def replace_g(place, g):
    def after(model, mesh):
        for row in rows(model, place):
            row.g = g
    return after


def biased_rows(place, f):
    """Row.forward with the bias inside of the sum: it is added on each of the T ranks. f: what
    becomes of the bias's gradient."""
    def after(model, mesh):
        for row in rows(model, place):
            if isinstance(row, Row) and row.bias is not None:
                row.forward = partial(forward, row)

    def forward(row, x):
        return row.g(F.linear(x, row.weight) + f(row.bias, row.group), row.group)
    return after


def in_one_part(layer):
    """The matrices in the first tensor of each block's layer ("attn", "mlp") are split as one."""
    def before(model):
        for block in model.layers[1:-1]:
            getattr(block, layer).parts = ()
    return before


def tensor_changes(config, sp):
    found = []
    for place in ("attention", "MLP", "head", "blocks", "model"):
        where = WHERE.get(place, f"in the {place}")
        if not sp:
            found += [
                Change(f"f is missing {where}: the gradient of a column's input is not summed over "
                       "the tensor ranks (tp)", after=replace_f(place, unsummed), forward=False),
                Change(f"f averages over the tensor ranks (tp), and does not sum, {where}",
                       after=replace_f(place, averaged(False, True)), forward=False)]
    for place in ("attention", "MLP", "embedding", "blocks", "model"):
        where = WHERE.get(place, f"in the {place}")
        if not sp:
            found += [
                Change(f"g is missing {where}: partial sums are not summed over the tensor ranks "
                       "(tp)", after=replace_g(place, unsummed)),
                Change(f"g sums in backward, too, {where}: gradients are tp times too large there",
                       after=replace_g(place, sums_both_ways), forward=False),
                Change(f"g averages over the tensor ranks (tp), and does not sum, {where}",
                       after=replace_g(place, averaged(True, False)))]
        if place not in ("embedding", "model") and not sp:
            found += [
                Change(f"a row's bias is added on each tensor rank (tp) {where}",
                       after=biased_rows(place, unsummed)),
                Change(f"a row's bias is added on each tensor rank (tp) {where}, and its gradient "
                       "is summed over them", after=biased_rows(place, copy_to_ranks))]
    found += [
        Change("q, k and v are split over the tensor ranks (tp) as one matrix",
               before=in_one_part("attn"))]
    if isinstance(config, LlamaConfig) and not config.n_experts:
        found.append(Change("gate and up are split over the tensor ranks (tp) as one matrix",
                            before=in_one_part("mlp")))
    return found
