"""Measures this node and prints the flags to plan with: python -m extras.planner --measure

    tflops         a square matrix product, in bfloat16 on GPUs and float32 on processors
    f_attention    fused attention, forward and backward
    hbm            a sum of two long tensors
    latency        a short all-reduce, divided by the number of its hops
    nvlink         a long all-reduce, less the latency of its hops
    launch         a tiny product, on processors; a GPU hides the launch behind the kernel before

All ranks measure at the same time, like in training."""

import os
import sys
import time

import torch
import torch.nn.functional as F

from engine.collectives import all_reduce, barrier
from engine.mesh import Mesh
from run import signals
from run.launch import launch
from run.processes import choose_device, init, shutdown


def seconds(mesh, work, times=1):
    """Seconds of work() in the fastest of five rounds; the largest over the ranks. work() returns a
    tensor. times: calls in a round."""
    rounds = []
    for _ in range(6):  # the first warms up
        barrier(mesh.world)
        mesh.world.read(torch.zeros(1, device=mesh.device))  # wait until the device is idle
        start = time.perf_counter()
        for _ in range(times):
            out = work()
        mesh.world.read(out.flatten()[:1].float())  # wait until it has computed `out`
        rounds.append((time.perf_counter() - start) / times)
    least = torch.tensor([min(rounds[1:])], device=mesh.device)
    return mesh.world.read(all_reduce(least, mesh.world, "max"))[0]


def hops(group):
    """How many messages follow one another in an all-reduce of engine/collectives.py: those of a
    ring, but two ranks swap. GPUs use NCCL's all-reduce, in a ring or a tree; this function assumes
    a ring."""
    n = group.size
    return 1 if n == 2 and not group.native else 2 * (n - 1)


def measure(mesh):
    """{flag: value} of this node, on every rank."""
    cuda = mesh.device.type == "cuda"
    world, n = mesh.world, mesh.world.size
    size, S, dtype = (8192, 4096, torch.bfloat16) if cuda else (1024, 512, torch.float)

    def random(*shape):
        return torch.randn(shape, device=mesh.device, dtype=dtype)

    a, tiny = random(size, size), random(4, 4)
    long, other = random(16 * size, size), random(16 * size, size)
    q = random(1, 16, S, 128).requires_grad_()

    def attention():
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return torch.autograd.grad(out, q, out)[0]

    rate = 2 * size**3 / seconds(mesh, lambda: a @ a)  # FLOPs per second
    main_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Causal attention, forward and backward: 2 + 5 products of S x S x 128 for each of 16 heads, 2
    # FLOPs each, halved by the mask
    attention_flops = 7 * S * S * 128 * 16
    moved = 3 * long.nbytes  # bytes that a sum in place moves: two tensors read, one written
    flags = {
        "tflops": rate / 1e12, "f-products": 1,
        "f-attention": min(1, attention_flops / seconds(mesh, attention) / rate),
        "hbm": moved / seconds(mesh, lambda: long.add_(other)) / 1e9, "f-hbm": 1,
        "launch": 0 if cuda else seconds(mesh, lambda: tiny @ tiny, 200), "node": n,
        "gb": (torch.cuda.mem_get_info()[1] if cuda else main_memory / n) / 1e9}
    if n > 1:
        latency = seconds(mesh, lambda: all_reduce(tiny, world), 10) / hops(world)
        # Each rank sends 2 (n-1)/n of the long tensor (ring_time in costs.py)
        latency_seconds = hops(world) * latency
        transfer_seconds = max(
            1e-9, seconds(mesh, lambda: all_reduce(long, world)) - latency_seconds)
        flags |= {"nvlink": 2 * (n - 1) / n * long.nbytes / transfer_seconds / 1e9, "f-nvlink": 1,
                  "latency": latency}
    return flags


def main():
    """Start this command once more for each rank of the node; rank 0 prints the flags."""
    gpus = torch.cuda.device_count()
    n = gpus or min(8, os.cpu_count() or 1)
    if signals.STORE not in os.environ:  # no rank yet: launch() sets STORE for the ranks it starts
        ranks = f"{n} {'GPU' if gpus else 'processor'}"
        ranks += "s" if n > 1 else ", which measures no nvlink and no latency"
        print(f"plan with these flags, measured on {ranks}; for several nodes add --network:",
              flush=True)
        sys.exit(launch(n))
    device = choose_device("cuda" if gpus else "cpu")
    init(device)
    # native: on GPUs all_reduce() is NCCL's, like hops() assumes; else that of
    # engine/collectives.py
    mesh = Mesh(device, native=gpus > 0, dp=n)
    flags = measure(mesh)
    if mesh.rank == 0:
        print(" ".join(f"--{name} {value:.4g}" for name, value in flags.items()))
    shutdown()
