"""LoRA, arXiv 2106.09685: the model stays frozen; each matrix of the blocks gets two thin matrices.

    y = W x + (ALPHA / RANK) B A x        A (RANK, in) random, B (out, RANK) zeros at the start

A and B are trained: RANK (in + out) elements in place of in x out. What the fork shows: adapters
need no message of a new kind. If W is column-parallel, A is replicated and B is a Column. If W is
row-parallel, A is a Row and B is replicated. Tags say the rest, like for all parameters, also under
--sp, ZeRO, pipelines and zero bubble. A trap: the T gradients of a replicated matrix may differ in
their last bit, because a product's rounding depends on where in memory its factors lie. So each
rank takes 1/T of its gradient, and the T gradients are summed: otherwise the copies would drift
apart.

    held on a rank      gradients and optimizer states of A and B only (frozen: engine/ddp.py)
    sent, --dp          2 (D-1)/D of the elements of A and B, in place of the model's
    sent, --tp          more elements per matrix and microbatch, where n = B S RANK:
                        columns    2 (T-1)/T n in backward
                        rows       2 (T-1)/T n in forward
                        --sp       (T-1)/T n in forward; in backward (T-1)/T n for rows, and
                                   2 (T-1)/T n for columns
                        and per step an all-reduce of the gradients of the replicated A's and B's

Initial values of W: --init-from, or random. Left out: merging W + B A into one file, for sample.py.

    git apply forks/lora.patch && torchrun train.py --tp 2 --lora 4 --init-from model.safetensors
"""

from functools import partial

import torch
from torch import nn

import engine.tensor_parallel
import experts
import model as model_file
import run.weights
from collectives import WithBackward
from engine.tensor_parallel import Column, Row, compute_now
from experts import MixtureOfExperts
from shard import tag_replicated

RANK = 0  # --lora; 0: no adapters, the usual model
ALPHA = 8
SEED = 1337  # seed of A where W comes from a file
COLUMNS = ("c_attn", "c_fc")  # column-parallel; the others, c_proj, are row-parallel


def is_adapter(name):
    return name.endswith((".adapter_a.weight", ".adapter_b.weight"))


def adapted(blocks):
    """Yields (module, name) of each matrix of the blocks that has an adapter: module.name is the
    linear layer. Experts have no adapters."""
    if not RANK:
        return
    for block in blocks:
        for part in (block.attn, block.mlp):
            if not isinstance(part, MixtureOfExperts):
                columns = "c_attn" if part is block.attn else "c_fc"
                yield part, columns
                yield part, "c_proj"


def add_output(scale, linear, inputs, y):
    return y + scale * linear.adapter_b(linear.adapter_a(*inputs))


def attach(linear, a, b):
    """Add the adapter's output to the layer's."""
    linear.adapter_a = a
    linear.adapter_b = b
    linear.register_forward_hook(partial(add_output, ALPHA / RANK))


def add_adapters(model):
    """Freeze a whole model, and attach an adapter to each matrix of its blocks."""
    model.requires_grad_(False)
    for part, name in adapted(model.layers[1:-1]):
        linear = getattr(part, name)
        attach(linear, nn.Linear(linear.in_features, RANK, bias=False),
               nn.Linear(RANK, linear.out_features, bias=False))
    return model


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


# ---- the names that forks/lora.patch puts into train.py ----


def kind_of(config):
    """The class of the usual model or, with --lora, a function in its place, whose models have
    adapters."""
    usual = experts.kind_of(config)
    return (lambda config: add_adapters(usual(config))) if RANK else usual


def initial_value(name, shape, config, seed):
    if name.endswith(".adapter_b.weight"):
        return torch.zeros(shape)
    return model_file.initial_value(name, shape, config, seed)


def read_weights(path, shapes, config):
    """A function from a name to the tensor: A and B as at the start, all else from the file, which
    has no adapters."""
    given = run.weights.read_weights(
        path, {name: shape for name, shape in shapes.items() if not is_adapter(name)}, config)
    return lambda name: (initial_value(name, shapes[name], config, SEED) if is_adapter(name)
                         else given(name))


def parallelize(model, group, sp=False, defer=None):
    """The usual parallelize, which replaces the linear layers, and then their adapters."""
    adapters = [(part, name, getattr(part, name).adapter_a, getattr(part, name).adapter_b)
                for part, name in adapted(model.layers[1:-1])]
    engine.tensor_parallel.parallelize(model, group, sp, defer)
    if group.size == 1 and not defer:
        return  # the linear layers have not been replaced, and have their adapters
    sp = sp and group.size > 1
    replicated = nn.ModuleList()
    for part, name, a, b in adapters:
        linear = getattr(part, name)
        whole = a if name in COLUMNS else b  # the adapter's matrix that all T ranks hold
        if not sp:  # (under --sp the ranks see different tokens, so their gradients are terms)
            whole = Replicated(whole, group)
        replicated.append(whole)
        if name in COLUMNS:
            attach(linear, whole, Column(b, linear.region, defer or compute_now, part.parts))
        else:
            attach(linear, Row(a, linear.region, defer or compute_now), whole)
    tag_replicated(replicated, group, sum_gradients=True)
