"""LoRA, arXiv 2106.09685: the model stays frozen; each matrix of the blocks gets two thin matrices.

    y = W x + (ALPHA / RANK) B A x        A (RANK, in) random, B (out, RANK) zeros at the start

A and B are trained: RANK (in + out) elements in place of in x out. What the fork shows: adapters
send nothing while a step computes. B A x is added to W x between f and g (tensor_parallel.py). If W
is column-parallel, so is B, and A is replicated; if W is row-parallel, so is A, and B is
replicated. What is replicated sees a part of the sum on each rank: its gradients are summed over
the T ranks, as its tag says. Tags say the rest, also under ZeRO, pipelines and zero bubble.

    held on a rank      gradients and optimizer states of A and B only
    sent, --dp          2 (D-1)/D of the elements of A and B, in place of the model's
    sent, --tp          once a step an all-reduce of the gradients of the replicated A's and B's

Initial values of W: --init-from, or random. Left out: merging W + B A into one matrix; experts.

    git apply extras/forks/lora.patch && torchrun train.py --tp 2 --lora 4 --init-from FOLDER
"""

import torch
from torch import nn

from experts import MixtureOfExperts
from shard import split
from tensor_parallel import Column, product

ALPHA = 8


def matrices(model):
    """Yields (module, name) of each matrix that gets an adapter: module.name is the linear layer.
    """
    for block in model.layers[1:-1]:
        for part, columns in ((block.attn, "c_attn"), (block.mlp, "c_fc")):
            if not isinstance(part, MixtureOfExperts):
                yield part, columns
                yield part, "c_proj"


# ---- a whole model ----


def add_output(linear, inputs, y):
    a, b = linear.adapter_a.weight, linear.adapter_b.weight
    return y + ALPHA / len(a) * inputs[0] @ a.t() @ b.t()


def add_adapters(model, rank):
    """Freeze a whole model, and attach an adapter to each matrix of its blocks. Returns the model.
    """
    model.requires_grad_(False)
    for part, name in matrices(model):
        linear = getattr(part, name)
        linear.adapter_a = nn.Linear(linear.in_features, rank, bias=False)
        linear.adapter_b = nn.Linear(rank, linear.out_features, bias=False)
        linear.register_forward_hook(add_output)
    return model


def adapters_of(model):
    """[(module, name, A, B)] of a whole model."""
    return [(part, name, getattr(part, name).adapter_a.weight, getattr(part, name).adapter_b.weight)
            for part, name in matrices(model)]


# ---- matrices that are split ----


class Adapted(nn.Module):
    """A Column or Row with its adapter."""

    def __init__(self, linear, a, b, parts):
        super().__init__()
        self.linear = linear
        self.is_column = isinstance(linear, Column)
        self.a = a if self.is_column else split(a, 1, linear.group)
        self.b = split(b, 0, linear.group, parts) if self.is_column else b

    @torch.compiler.disable  # it sends messages
    def forward(self, x):
        linear, group, deferred = self.linear, self.linear.group, self.linear.deferred
        if self.is_column:
            x = linear.f(x, group)
        thin = product(x, self.a, deferred)  # (B, S, RANK)
        y = product(x, linear.weight, deferred)
        y = y + ALPHA / len(self.a) * product(thin, self.b, deferred)
        if not self.is_column:
            y = linear.g(y, group)
        return y if linear.bias is None else y + linear.bias


def split_adapters(adapters, group):
    """After split_matrices, which has replaced the linear layers."""
    for part, name, a, b in adapters:
        linear = getattr(part, name)
        if not isinstance(linear, nn.Linear):  # else one rank has all
            adapted = Adapted(linear, a, b, part.parts if name != "c_proj" else ())
            setattr(part, name, adapted)
            whole = adapted.a if adapted.is_column else adapted.b
            whole.tag.shared_by += (group,)
            whole.tag.sum_over += (group,)
