"""Counts what a step does on a GPU, without one: kernels and bytes, on torch's meta device, where
tensors have shapes and no memory.

    counts = count_step(n_layer=12, batch_size=16)      {operation: (kernels, bytes)}

An operation of torch that computes is a kernel here. It reads each of its arguments once, and
writes its results once: what it changes in place is read and written. On a GPU a few operations are
two or three kernels, and --compile puts several into one.
"""

import math
from collections import Counter
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import model
import train
from engine import vocabulary_parallel
from engine.dropout import Dropout
from engine.group import Group, Work
from engine.mesh import Mesh
from run.config import Config, check_layout

GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": 16,
        "dtype": "bfloat16", "pad_vocab": 64, "microbatches": 1, "dp": 1}
VOCABULARY = 50257
# Operations that start no kernel, though torch calls them no views
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach",
        "_unsafe_view", "resize_", "scalar_tensor", "lift_fresh")
PRODUCTS = ("mm", "addmm", "addmm_", "bmm")
OVERWRITE = ("copy_", "zero_", "fill_")  # write in place without reading
PICK = ("gather", "scatter_")  # read or write a few elements of their largest tensor


class FlashAttention(torch.autograd.Function):
    """causal_attention by the kernel that a GPU takes; meta tensors would get the plain formulas.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse, _, _, _, _, *rest, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, lse, *rest)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, *rest = ctx.saved_tensors
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, True, *rest)


def tensors_in(values):
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, torch.Tensor):
            yield value


class Counting(TorchDispatchMode):
    """Counts kernels and bytes on a device."""

    def __init__(self, device="meta"):
        super().__init__()
        self.device = device
        self.kernels = Counter()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [*tensors_in(args), *tensors_in((kwargs or {}).values())]
        new = [x for x in tensors_in([result]) if not any(x is other for other in given)]
        on_device = [x for x in given + new if x.device.type == self.device]
        if on_device and not func.is_view and name not in FREE:
            self.kernels[name] += 1
            moved = [x.nbytes for x in on_device]
            if name in PICK:
                moved.remove(max(moved))
            if name.endswith("_") and name not in OVERWRITE + PICK:
                changed = [x for x, to in zip(args, func._schema.arguments, strict=False)
                           if to.alias_info and to.alias_info.is_write]
                moved += [x.nbytes for x in tensors_in(changed) if x.device.type == self.device]
            self.bytes[name] += sum(moved)
        return result

    @property
    def num_kernels(self):
        return self.kernels.total()

    def gigabytes(self, but=()):
        """10^9 bytes of all operations, or of all but some."""
        return sum(n for name, n in self.bytes.items() if name not in but) / 1e9


class OneOfMany(Mesh):
    """The mesh of rank 0 of several, on the meta device. Its messages do nothing."""

    def __init__(self, **sizes):
        with (patch.object(dist, "is_initialized", lambda: True),
              patch.object(dist, "get_rank", lambda: 0),
              patch.object(dist, "get_world_size", lambda: math.prod(sizes.values()))):
            super().__init__("meta", native=True, **sizes)

    def communicator(self, name, ranks):
        return None


def meta_tensor(shape):
    return torch.empty(shape, device="meta")


def run_at_once(group, job, name):
    job()
    return Work()


@contextmanager
def on_meta():
    """What a Trainer needs to be built and run on the meta device."""
    with (patch.object(model, "causal_attention", FlashAttention.apply),
          patch.object(train, "initial_value", lambda name, shape, *more: meta_tensor(shape)),
          patch.object(Dropout, "attach", lambda *args: None),
          patch.object(Group, "run_native", lambda *args: None),
          patch.object(Group, "submit", run_at_once)):
        yield


def positions_on_a_cpu(x, weight, rows):
    """positions_of_chunk, for x on a CPU."""
    return max(1, max(x.size(-1), 256) // rows)


def fused_log_likelihood(head, logits, *args):
    """What --compile makes of ChunkedHead.log_likelihood, for counting: one kernel reads the
    logits, for the sum of their exponentials; another reads them and writes the gradient."""
    total = logits.sum()
    logits.mul_(2.0)
    return total


@cache
def count_step(cpu_chunks=False, fused_loss=False, **flags):
    """The Counting of one step of rank 0: gradients and update. cpu_chunks: the loss takes as
    many tokens at a time as on a CPU. fused_loss: by fused_log_likelihood."""
    cfg = Config(**{**GPT2, **flags})
    check_layout(cfg, 1)
    mesh = OneOfMany(dp=cfg.dp, ep=1, pp=1, cp=1, tp=cfg.tp)
    positions = positions_on_a_cpu if cpu_chunks else vocabulary_parallel.positions_of_chunk
    head = vocabulary_parallel.ChunkedHead
    log_likelihood = fused_log_likelihood if fused_loss else head.log_likelihood
    with (on_meta(), patch.object(vocabulary_parallel, "positions_of_chunk", positions),
          patch.object(head, "log_likelihood", log_likelihood)):
        trainer = train.Trainer(cfg, mesh, VOCABULARY)
        ids = torch.empty(cfg.batch_size, cfg.block_size, dtype=torch.long, device="meta")
        with Counting() as counting:
            norm, _ = trainer.gradients([(ids, ids, 0)])
            trainer.update(norm, cfg.lr)
    return counting
