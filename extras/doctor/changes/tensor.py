"""Changes of tensor parallelism: f and g, the biases of rows, matrices that are split as one.

    column    y = f(x) W        f: forward nothing, backward the sum of the ranks' grad_x
    row       y = g(x W) + b    g: forward the sum of the ranks' x W, backward nothing

A bug of f leaves the loss right; a bug of g in forward does not. Each is tried in the
attention of every block, in every MLP, in the head or the embedding, in attention and MLP of all
blocks, and everywhere.
"""

from functools import partial

import torch.nn.functional as F

from collectives import WithBackward
from extras.doctor.step import Change
from sizes import LlamaConfig
from tensor_parallel import Row, copy_to_ranks, sum_of_copy

# ---- where ----

BLOCKS = ("attention", "MLP")
COLUMNS = ("attention", "MLP", "head", "blocks", "model")  # places that have columns
ROWS = ("attention", "MLP", "embedding", "blocks", "model")  # places that have rows


def where_words(place):
    return {"blocks": "in all blocks", "model": "everywhere"}.get(place, f"in the {place}")


def layers_at(place, found):
    """The layers of a place. found: {part of the model: its layers}, with the parts "attention",
    "MLP", and "head" or "embedding"."""
    if place == "model":
        parts = list(found)
    elif place == "blocks":
        parts = BLOCKS
    else:
        parts = [place]
    return [layer for part in parts for layer in found[part]]


def columns(model, place):
    """The layers of a place that begin with f. (Experts, in the place of an MLP, have none.)"""
    blocks = model.layers[1:-1]
    return layers_at(place, {
        "attention": [block.attn.c_attn for block in blocks],
        "MLP": [block.mlp.c_fc for block in blocks if hasattr(block.mlp, "c_fc")],
        "head": [model.layers[-1].lm_head]})


def rows(model, place):
    """The layers of a place that end with g."""
    blocks = model.layers[1:-1]
    return layers_at(place, {
        "attention": [block.attn.c_proj for block in blocks],
        "MLP": [block.mlp.c_proj for block in blocks if hasattr(block.mlp, "c_proj")],
        "embedding": [model.layers[0].wte]})


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


# ---- wrong forms of f and g ----


def unsummed(x, group):
    """For f or g: no sum, neither forward nor backward."""
    return x


def mean_of_copy(x, group):
    return sum_of_copy(x, group) / group.size


def f_with_mean(x, group):
    return WithBackward.apply(x, lambda x: x, lambda grad: mean_of_copy(grad, group))


def g_with_mean(x, group):
    return WithBackward.apply(x, lambda x: mean_of_copy(x, group), lambda grad: grad)


def sums_both_ways(x, group):
    """For g, whose gradient is then T times too large."""
    return WithBackward.apply(x, lambda x: sum_of_copy(x, group),
                              lambda grad: sum_of_copy(grad, group))


# ---- biases, and matrices of several parts ----


def biased_rows(place, f):
    """Row.forward with the bias before g: y = g(x W + b), which has b T times. f: what becomes of
    the bias's gradient."""
    def forward(row, x):
        return row.g(F.linear(x, row.weight) + f(row.bias, row.group), row.group)

    def after(model, mesh):
        for row in rows(model, place):
            if isinstance(row, Row) and row.bias is not None:
                row.forward = partial(forward, row)

    return after


def in_one_part(layer):
    """The first matrix of each block's layer ("attn": q, k, v; "mlp": a Llama's gate and up) is
    split like one matrix. For T = 2 rank 0 gets all rows of q and half of k's; it should get half
    of q's, of k's and of v's."""
    def before(model):
        for block in model.layers[1:-1]:
            getattr(block, layer).parts = ()
    return before


# ---- all of them ----


def column_changes():
    found = []
    for place in COLUMNS:
        where = where_words(place)
        found += [
            Change(f"f is missing {where}: the gradient of a column's input is not summed over the "
                   "tensor ranks (tp)", after=replace_f(place, unsummed), forward=False),
            Change(f"f averages over the tensor ranks (tp), and does not sum, {where}",
                   after=replace_f(place, f_with_mean), forward=False)]
    return found


def row_changes():
    found = []
    for place in ROWS:
        where = where_words(place)
        found += [
            Change(f"g is missing {where}: partial sums are not summed over the tensor ranks (tp)",
                   after=replace_g(place, unsummed)),
            Change(f"g sums in backward, too, {where}: gradients are tp times too large there",
                   after=replace_g(place, sums_both_ways), forward=False),
            Change(f"g averages over the tensor ranks (tp), and does not sum, {where}",
                   after=replace_g(place, g_with_mean))]
        if place not in ("embedding", "model"):  # the embedding has no bias
            words = f"a row's bias is added on each tensor rank (tp) {where}"
            found += [Change(words, after=biased_rows(place, unsummed)),
                      Change(f"{words}, and its gradient is summed over them",
                             after=biased_rows(place, copy_to_ranks))]
    return found


def tensor_changes(config, T, sp):
    """sp: is it a run with --sp? Then all-gather and reduce-scatter take the place of f and g:
    see sequence.py."""
    found = [] if sp else [*column_changes(), *row_changes()]
    found.append(Change("q, k and v are split over the tensor ranks (tp) as one matrix",
                        before=in_one_part("attn")))
    # Uneven slices of one matrix would not fit those of the next, which fails in any trainer
    fits = isinstance(config, LlamaConfig) and config.n_hidden % T == 0
    if fits and not config.n_experts:
        found.append(Change("gate and up are split over the tensor ranks (tp) as one matrix",
                            before=in_one_part("mlp")))
    return found
