"""LoRA, arXiv 2106.09685: the model stays frozen; each matrix of the blocks gets two thin matrices.

    y = W x + (ALPHA / RANK) B A x        A (RANK, in) random, B (out, RANK) zeros at the start

A and B are trained: RANK (in + out) elements in place of in x out. What the fork shows: adapters
need no message of a new kind. If W is column-parallel, A is replicated and B is a Column. If W is
row-parallel, A is a Row and B is replicated. Tags say the rest, like for all parameters, also under
--sp, ZeRO, pipelines and zero bubble. A trap: the T gradients of a replicated matrix may differ in
their last bit, because a product's rounding depends on where in memory its factors lie. So each
rank takes 1/T of its gradient, and the T gradients are summed: otherwise the copies would drift
apart.

    held on a rank      gradients and optimizer states of A and B only
    sent, --dp          2 (D-1)/D of the elements of A and B, in place of the model's
    sent, --tp          more elements per matrix and microbatch, where n = B S RANK:
                        columns    2 (T-1)/T n in backward
                        rows       2 (T-1)/T n in forward
                        --sp       (T-1)/T n in forward; in backward (T-1)/T n for rows, and
                                   2 (T-1)/T n for columns
                        and per step an all-reduce of the gradients of the replicated A's and B's

Initial values of W: --init-from, or random. Left out: merging W + B A into one matrix.

    git apply extras/forks/lora.patch && torchrun train.py --tp 2 --lora 4 --init-from
    model.safetensors
"""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

import run.weights
from collectives import WithBackward
from experts import MixtureOfExperts
from shard import tag_replicated
from tensor_parallel import Column

ALPHA = 8
COLUMNS = ("c_attn", "c_fc")  # column-parallel; the others, c_proj, are row-parallel


def is_adapter(name):
    return name.endswith((".adapter_a.weight", ".adapter_b.weight"))


def matrices(model):
    """Yields (module, name) of each matrix that gets an adapter: module.name is the linear layer.
    Experts get none."""
    for block in model.layers[1:-1]:
        for part, columns in ((block.attn, "c_attn"), (block.mlp, "c_fc")):
            if not isinstance(part, MixtureOfExperts):
                yield part, columns
                yield part, "c_proj"


def add_output(linear, inputs, y):
    rank = linear.adapter_a.weight.size(0)
    return y + ALPHA / rank * linear.adapter_b(linear.adapter_a(*inputs))


def attach(linear, a, b):
    """Add the adapter's output to the layer's."""
    linear.adapter_a = a
    linear.adapter_b = b
    linear.register_forward_hook(add_output)


def add_adapters(model, rank):
    """Freeze a whole model, and attach an adapter to each matrix of its blocks. Returns the model.
    """
    model.requires_grad_(False)
    for part, name in matrices(model):
        linear = getattr(part, name)
        attach(linear, nn.Linear(linear.in_features, rank, bias=False),
               nn.Linear(rank, linear.out_features, bias=False))
    return model


# ---- initial values ----


def first_value(draw, name, shape, config, seed):
    return torch.zeros(shape) if name.endswith("_b.weight") else draw(name, shape, config, seed)


def usual(config):
    """The sizes of the model without adapters."""
    return replace(config, lora=0)


def initial_slices(cfg, shapes, config, mesh, draw):
    """That of run/weights.py, but a file of --init-from has no adapters, and B is 0."""
    in_file = {name: shape for name, shape in shapes.items() if not is_adapter(name)}
    of_model = run.weights.initial_slices(cfg, in_file, usual(config), mesh, draw)
    of_adapter = run.weights.initial_slices(replace(cfg, init_from=""), shapes, config, mesh,
                                            partial(first_value, draw))
    return lambda tag: of_adapter(tag) if is_adapter(tag.name) else of_model(tag)


# ---- adapters of matrices that are split ----


class Replicated(nn.Module):
    """A linear layer that all T ranks hold, and that has the same input on each."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight = linear.weight
        self.size = group.size

    def forward(self, x):
        weight = WithBackward.apply(self.weight, lambda weight: weight,
                                    lambda grad: grad / self.size)
        return nn.functional.linear(x, weight)


def split_like(linear, adapter, *parts):
    """The adapter's matrix as a Column or Row like the linear layer. parts: those of a Column."""
    crossing = linear.f if isinstance(linear, Column) else linear.g
    return type(linear)(adapter, linear.group, crossing, *parts, deferred=linear.deferred)


def adapters_of(model):
    """[(module, name, A, B)] of a whole model."""
    return [(part, name, getattr(part, name).adapter_a, getattr(part, name).adapter_b)
            for part, name in matrices(model)]


def split_adapters(adapters, group, sp):
    """After split_matrices, which has replaced the linear layers: split their adapters alike."""
    replicated = nn.ModuleList()
    for part, name, a, b in adapters:
        linear = getattr(part, name)
        if isinstance(linear, nn.Linear):  # not split: one tensor rank
            continue
        whole = a if name in COLUMNS else b  # the adapter's matrix that all T ranks hold
        if not sp:  # (under --sp their gradients are terms of a sum already)
            whole = Replicated(whole, group)
        replicated.append(whole)
        if name in COLUMNS:
            attach(linear, whole, split_like(linear, b, part.parts))
        else:
            attach(linear, split_like(linear, a), whole)
    tag_replicated(replicated, group, sum_gradients=True)
