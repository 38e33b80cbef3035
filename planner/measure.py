"""Measures this node and prints the flags to plan with: python plan.py --measure

    tflops       a square matrix product, in bfloat16 on GPUs, in float32 on processors
    attention    fused, forward and backward: f_attention is its fraction of tflops
    hbm          a sum of two long tensors
    nvlink       a long all-reduce over all ranks, less the time of a short one
    latency      that short one, by its hops
    unhidden     the part of an all-reduce that the product beside it does not hide
    launch       a product of nothing much, on processors; a GPU hides it behind the kernel before

Each rank does all of it at the same time, as in training. The least of five rounds counts.
"""

import os
import tempfile
import time

import torch
import torch.nn.functional as F

from collectives import all_reduce, barrier
from mesh import Mesh
from run.processes import init, shutdown

ROUNDS = 5


def seconds(mesh, work, times=1):
    """Seconds of work() on the slowest rank."""
    best = []
    for _ in range(ROUNDS + 1):  # the first is to warm up
        barrier(mesh.world)
        mesh.world.read(torch.zeros(1, device=mesh.device))  # the device has done what came before
        start = time.perf_counter()
        for _ in range(times):
            out = work()
        mesh.world.read(out.flatten()[:1].float())
        best.append((time.perf_counter() - start) / times)
    return max(mesh.world.read(all_reduce(torch.tensor(
        [min(best[1:])], device=mesh.device), mesh.world, "max")))


def measure(mesh):
    """{flag: value} of this node, on every rank."""
    cuda, n = mesh.device.type == "cuda", mesh.world.size
    size, S, dtype = (8192, 4096, torch.bfloat16) if cuda else (1024, 512, torch.float)

    def new(*shape):
        return torch.randn(shape, device=mesh.device, dtype=dtype)

    a, long, tiny = new(size, size), new(16 * size * size), new(4, 4)
    product = seconds(mesh, lambda: a @ a)
    tflops = 2 * size**3 / product / 1e12
    q = new(1, 16, S, 128).requires_grad_()

    def attention():
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return torch.autograd.grad(out, q, out)[0]

    of_attention = 7 * S * S * 16 * 128 / seconds(mesh, attention) / 1e12  # the mask halves them
    flags = {"tflops": tflops, "f-products": 1, "f-attention": min(1, of_attention / tflops),
             "hbm": 3 * long.nbytes / seconds(mesh, lambda: long.add_(long)) / 1e9, "f-hbm": 1,
             "launch": 0 if cuda else seconds(mesh, lambda: tiny @ tiny, 200), "node": n}
    memory = (torch.cuda.mem_get_info()[1] if cuda else
              os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / n)
    flags["gb"] = memory / 1e9
    if n > 1:
        short = seconds(mesh, lambda: all_reduce(tiny, mesh.world), 10)
        alone = seconds(mesh, lambda: all_reduce(long, mesh.world))
        times = max(1, round(alone / product))

        def both():
            work = all_reduce(long, mesh.world, async_op=True)
            for _ in range(times):
                out = a @ a
            work.wait()
            return out

        beside = seconds(mesh, both) - times * product
        link = 2 * (n - 1) / n * long.nbytes / max(1e-9, alone - short) / 1e9
        flags |= {"nvlink": link, "f-nvlink": 1, "latency": short / (2 * (n - 1)),
                  "unhidden": min(1, max(0, beside / alone))}
    return flags


def worker(rank, folder, device, n):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // n))
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    init(device, url=f"file://{folder}/store", rank=rank, size=n)
    flags = measure(Mesh(device, native="cuda" in device, dp=n))
    if rank == 0:
        print(" ".join(f"--{name} {value:.4g}" for name, value in flags.items()))
    shutdown()


def main():
    gpus = torch.cuda.device_count()
    n = gpus or min(8, os.cpu_count() or 1)
    print(f"plan with these flags, measured on {n} {'GPUs' if gpus else 'processors'}"
          f"{'' if n > 1 else '; with one, no messages'}; --network is another node's to measure:")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (folder, "cuda" if gpus else "cpu", n), n)
