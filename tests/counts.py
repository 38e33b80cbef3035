"""What a step of GPT-2 124M does on a GPU, counted without one: operations and bytes, on torch's
meta device, where tensors have shapes and no memory.

    python -m tests.counts        16 sequences of 1,024 tokens, bfloat16, one rank, no --compile

An operation that computes is about a kernel, which reads its arguments and writes its results once.
(gather and scatter_add_ are counted too high, operations in place too low.)
"""

from collections import Counter
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model
import train
from context_parallel import FLASH, kernel, kernel_backward
from mesh import Mesh
from sizes import config_of
from tests.first_gpu import GPT2, VOCAB
from tests.harness import flags_of


class Flash(torch.autograd.Function):
    """causal_attention by a GPU's kernel: on meta tensors torch would take plain formulas."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse, ctx.rest = kernel(FLASH, q, k, v, True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        return kernel_backward(FLASH, grad, q, k, v, out, lse, ctx.rest, True)


class Counting(TorchDispatchMode):
    """Counts operations and bytes by name. of_host: operations that take a tensor of the host,
    which a GPU would wait for."""

    def __init__(self):
        super().__init__()
        self.kernels, self.bytes, self.of_host = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        no_meta_kernel = func is torch.ops.aten.addmm.dtype_out  # in torch 2.11
        result = kwargs["out"] if no_meta_kernel else func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = {id(x): x for x in tree_leaves((args, kwargs, result))
                   if isinstance(x, torch.Tensor)}.values()
        if any(x.device.type == "cpu" and x.dim() > 0 for x in tensors):
            self.of_host[name] += 1
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "_unsafe_")):
            self.kernels[name] += 1
            self.bytes[name] += sum(x.nbytes for x in tensors)
        return result


def count_step():
    """The Counting of a step, and its FLOPs by the formula of sizes.py."""
    cfg = flags_of(GPT2.split(), "")
    config = config_of(cfg, VOCAB)
    trainer = train.Trainer(cfg, Mesh("meta"), config,
                            lambda tag: torch.empty(tag.slice_shape, device="meta"))
    ids = torch.empty(cfg.batch_size, cfg.block_size, dtype=torch.long, device="meta")
    with (patch.object(model, "causal_attention", Flash.apply), Counting() as counting,
          patch.object(torch.Tensor, "is_cuda", True)):
        trainer.step([(ids, ids)], cfg.lr)
    num_params = sum(shape.numel() for shape in trainer.shapes.values())
    return counting, config.flops_per_token(num_params) * ids.numel()


def main():
    counting, flops = count_step()
    total = counting.bytes.total()
    print(f"{counting.kernels.total()} operations\n"
          f"{total / 1e9:.0f} GB: {total / 3.35e9:.1f} ms of an H100's 3.35 TB/s\n"
          f"{flops / 1e12:.1f} TFLOP: {flops / 9.89e11:.1f} ms of its 989 TFLOP/s\n"
          "the operations that move most:")
    for name, moved in counting.bytes.most_common(10):
        print(f"{name:44}{counting.kernels[name]:5}{moved / 1e9:7.1f} GB")


if __name__ == "__main__":
    main()
