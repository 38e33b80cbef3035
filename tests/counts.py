"""Counts what a step does on a GPU, without one: kernels and bytes, on torch's meta device, where
tensors have shapes and no memory.

    counts = count_step(n_layer=12, batch_size=16)      {operation: (kernels, bytes)}
    python -m tests.counts                              changes of the engine, before and after

An operation of torch that computes is a kernel here. It reads each of its arguments once, and
writes its results once: what it changes in place is read and written. On a GPU a few operations are
two or three kernels, and --compile puts several into one.
"""

import math
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import cache
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import model
import train
from engine import vocabulary_parallel
from engine.group import Group, Work
from engine.mesh import Mesh
from engine.zero import ZeRO2
from run.config import Config, check_layout

GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": 16,
        "dtype": "bfloat16", "microbatches": 1, "dp": 1, "fast": "all"}
VOCABULARY = 50257
# Operations that start no kernel, though torch calls them no views
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach",
        "_unsafe_view", "resize_", "scalar_tensor", "lift_fresh")
PRODUCTS = ("mm", "addmm", "addmm_", "bmm")
OVERWRITE = ("copy_", "_foreach_copy_", "zero_", "fill_")  # write in place without reading
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
        if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 has it on GPUs, not on meta
            result = kwargs["out"]
        else:
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
            super().__init__("meta", native=True, transport="gloo", **sizes)

    def communicator(self, name, ranks):
        return None


def meta_value(name, shape, config, seed):
    """In the place of model.initial_value."""
    return torch.empty(shape, device="meta")


def run_at_once(group, job, name):
    job()
    return Work()


@contextmanager
def on_meta():
    """What a Trainer needs to be built and run on the meta device."""
    with (patch.object(model, "causal_attention", FlashAttention.apply),
          patch.object(Group, "run_native", lambda *args: None),
          patch.object(Group, "submit", run_at_once)):
        yield


def meta_config(**flags):
    cfg = Config(**{**GPT2, **flags})
    check_layout(cfg, 1)
    cfg.device = "meta"
    return cfg


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
def count_step(cpu_chunks=False, fused_loss=False, in_place=False, **flags):
    """The Counting of one step of rank 0. cpu_chunks: the loss takes as
    many tokens at a time as on a CPU. fused_loss: by fused_log_likelihood. in_place: collectives
    gather in place, like NCCL's."""
    cfg = meta_config(**flags)
    mesh = OneOfMany(dp=cfg.dp, tp=cfg.tp)
    positions = positions_on_a_cpu if cpu_chunks else vocabulary_parallel.positions_of_chunk
    head = vocabulary_parallel.ChunkedHead
    log_likelihood = fused_log_likelihood if fused_loss else head.log_likelihood
    with (on_meta(), patch.object(Group, "gathers_in_place", in_place),
          patch.object(vocabulary_parallel, "positions_of_chunk", positions),
          patch.object(head, "log_likelihood", log_likelihood)):
        trainer = train.Trainer(cfg, mesh, VOCABULARY, meta_value)
        local = cfg.batch_size // cfg.dp
        ids = torch.empty(local, cfg.block_size, dtype=torch.long, device="meta")
        with Counting() as counting:
            trainer.step([(ids, ids, 0)], cfg.lr)
    return counting


# ---- changes of the engine, before and after ----


def add_in_three(grad_weight, grad, inputs):
    """add_weight_gradient as a CPU does it in 16 bits."""
    power = 2.0 ** len(inputs).bit_length()
    grad_weight.add_(grad.t() @ (inputs / power), alpha=power)


def full_of_zeros(reducer, bucket, full_gradient=ZeRO2.full_gradient):
    given = bucket.grad
    grad = full_gradient(reducer, bucket)
    return grad if grad is given else grad.zero_()


def add_to_zeros(reducer, param, bucket):
    into = bucket.view(reducer.full_gradient(bucket), param)
    reducer.lacking.remove(param)
    into.add_(param.grad)
    param.grad = None


CHANGES = {  # name: (flags, how it was before: flags, or a context)
    "the loss in chunks of 256 MB": ({}, {"cpu_chunks": True}),
    "gradient of the matrix summed in 32 bits by one product": (
        {}, patch.object(vocabulary_parallel, "add_weight_gradient", add_in_three)),
    "--compile: the loss in two kernels": ({"fused_loss": True}, {"fused_loss": False}),
    "ZeRO-2: first gradients copied, not added to zeros": (
        {"zero": 2}, patch.multiple(ZeRO2, full_gradient=full_of_zeros, move=add_to_zeros)),
    "ZeRO-1, 8 ranks: weights gathered in place": (
        {"zero": 1, "dp": 8, "batch_size": 128, "in_place": True}, {"in_place": False})}


def count_change(name):
    """(the Counting before, the Counting after) of one of CHANGES."""
    flags, before = CHANGES[name]
    context = nullcontext()
    if isinstance(before, dict):
        flags_before = {**flags, **before}
    else:
        context, flags_before = before, flags
    with context:
        # not from the cache, which knows no contexts
        counted_before = count_step.__wrapped__(**flags_before)
    return counted_before, count_step(**flags)


def main():
    print(f"{'kernels before':>14}{'after':>7}{'GB before':>11}{'after':>7}   change")
    for name in CHANGES:
        before, after = count_change(name)
        print(f"{before.num_kernels:14,}{after.num_kernels:7,}{before.gigabytes():11.2f}"
              f"{after.gigabytes():7.2f}   {name}", flush=True)


if __name__ == "__main__":
    main()
