"""Predicts a step of train.py on this machine's processors, and runs it: python plan.py --here

    device       from seconds of matrix products, attention, elementwise work, small operations and
                 messages, in as many processes and threads as the layout has
    predicted    a step by costs.py; nothing is fitted to a layout
    measured     a step of train.py's Trainer; of all figures the least of three rounds counts
"""

import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import correlation, median

import torch
import torch.nn.functional as F

from collectives import all_reduce, barrier
from data.batches import Data
from mesh import Mesh
from model import Block
from planner.costs import step_time
from planner.draw import table
from planner.hardware import Device
from run.processes import init, shutdown
from sizes import WIDTHS, GPTConfig

CORES, ROUNDS, STEPS = os.cpu_count() or 1, 3, 2


def seconds(mesh, work, times=8):
    """Mean seconds of work() over calls and ranks, which all do the same. With more ranks than
    cores: as if each rank had a core to itself."""
    work()
    barrier(mesh.world)
    start = time.perf_counter()
    for _ in range(times):
        work()
    taken = torch.tensor([(time.perf_counter() - start) / times])
    return all_reduce(taken, mesh.world).item() / max(mesh.world.size, mesh.world.size**2 / CORES)


def sizes_of(cfg):
    """Of primitive operations: (sequences, tokens, ranks of the largest axis, for messages)."""
    b = max(1, min(cfg.batch_size // 2, 2048 // cfg.block_size))
    return b, b * cfg.block_size, max(cfg.dp // cfg.ep, cfg.pp, cfg.cp, cfg.tp)


def measure(cfg, mesh):
    """{name: seconds} of primitive operations, forward and backward."""
    (b, n, G), C, dtype = sizes_of(cfg), cfg.n_embd, getattr(torch, cfg.dtype)

    def both_ways(fn, *shapes):
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        grad = torch.randn_like(fn(*inputs))
        return seconds(mesh, lambda: torch.autograd.grad(fn(*inputs), inputs, grad))

    def elementwise(x, wide):  # a block's: two norms, two residuals, GELU
        for _ in range(2):
            x = x + F.layer_norm(x, (C,))
        return torch.cat([x, F.gelu(wide, approximate="tanh")], 1)

    heads = (b, cfg.n_head, cfg.block_size, C // cfg.n_head)
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    tiny = Block(GPTConfig(n_head=1, n_embd=8)).to(dtype)
    found = {"up": both_ways(F.linear, (n, C), (4 * C, C)),
             "down": both_ways(F.linear, (n, 4 * C), (C, 4 * C)),
             "attention": both_ways(attention, heads, heads, heads),
             "elementwise": both_ways(elementwise, (n, C), (n, 4 * C)),
             "tiny": both_ways(tiny, (1, 1, 8))}
    group = next(g for g in map(mesh.group, ("dp", "pp", "cp", "tp")) if g.size == G)
    x, weight = torch.randn(n // 2, C), torch.randn(4 * C, C)

    def product(size):
        F.linear(x, weight)
        return torch.zeros(size)

    def message(size):  # behind a product, as in a model: no two ranks are ready at once
        all_reduce(product(size), group)

    for name, size in (("small", 1), ("large", 2 * n * C)):
        found[name] = seconds(mesh, partial(message, size), 16)
        found["before " + name] = seconds(mesh, partial(product, size), 16)
    return found


def device_of(cfg, rounds):
    """A Device from the least seconds of any round, which hold the least disturbance, and from
    what costs.py counts for these operations: FLOPs, bytes, kernels, hops."""
    (_, n, G), C, w = sizes_of(cfg), cfg.n_embd, WIDTHS[cfg.dtype]
    least = {name: min(found[name] for found in rounds) for name in rounds[0]}
    flops = 48 * n * C * C / (least["up"] + least["down"])
    late, link = 0.0, 1.0
    if G > 1:
        late = max(0.0, least["small"] - least["before small"])
        large = max(1e-6, least["large"] - least["before large"] - late)
        link = 8 * n * C / G * 2 * (G - 1) / large / 1e9
    return Device(
        tflops=flops / 1e12, f_products=1, hbm=66 * n * C * w / least["elementwise"] / 1e9,
        f_hbm=1, f_attention=7 * n * cfg.block_size * C / least["attention"] / flops, gb=0,
        nvlink=link, f_nvlink=1, network=link, f_network=1, latency=0, late=late,
        launch=least["tiny"] / 57, cores=CORES)


def run(make_trainer, cfg, mesh):
    """Mean seconds of a step."""
    data = Data(cfg)
    trainer = make_trainer(cfg, mesh, data.vocab_size)
    for i in range(2 + STEPS):
        if i == 2:  # from now on memory is allocated
            start = time.perf_counter()
        _, norm = trainer.gradients(data.training(cfg, i, mesh))
        trainer.update(norm, cfg.lr)
        barrier(mesh.world)
    return (time.perf_counter() - start) / STEPS


def worker(rank, tasks, folder):
    """A process that takes part in all tasks of more than `rank` ranks."""
    for i, (task, cfg) in enumerate(tasks):
        n = cfg.dp * cfg.pp * cfg.cp * cfg.tp
        if rank < n:
            torch.set_num_threads(max(1, CORES // n))  # as run/processes.py does
            init(url=f"file://{folder}/{i}", rank=rank, size=n)
            mesh = Mesh(dp=cfg.dp // cfg.ep, ep=cfg.ep, pp=cfg.pp, cp=cfg.cp, tp=cfg.tp)
            result = task(cfg, mesh)
            if rank == 0:
                Path(folder, f"{i}.json").write_text(json.dumps(result))
            shutdown()


def in_turn(tasks, processes):
    """Runs each (function, Config) once in each round. Returns its results, by task."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (tasks * ROUNDS, folder), processes)
        results = [json.loads(Path(folder, f"{i}.json").read_text())
                   for i in range(len(tasks) * ROUNDS)]
    return [results[i :: len(tasks)] for i in range(len(tasks))]


def here(cases, make_trainer):
    """Predicts and runs layouts, and prints a table. cases: {name: (Config, Job, Layout)}.
    make_trainer(cfg, mesh, vocab_size): train.Trainer."""
    cfgs = [cfg for cfg, _, _ in cases.values()]
    tasks = [(task, cfg) for task in (measure, partial(run, make_trainer)) for cfg in cfgs]
    results = in_turn(tasks, max(layout.ranks for _, _, layout in cases.values()))
    devices = [device_of(cfg, rounds) for cfg, rounds in zip(cfgs, results, strict=False)]
    predicted = [step_time(job, layout, device)
                 for (_, job, layout), device in zip(cases.values(), devices, strict=True)]
    measured = [min(rounds) for rounds in results[len(cfgs):]]
    errors = [a / b - 1 for a, b in zip(predicted, measured, strict=True)]
    width = max(map(len, cases))
    rows = [["layout".ljust(width), "GFLOP/s", "GB/s", "us a kernel", "ms to meet", "GB/s between",
             "predicted ms", "measured", "error"]]
    for name, d, a, b, error in zip(cases, devices, predicted, measured, errors, strict=True):
        rows.append([name.ljust(width), f"{1e3 * d.tflops:.0f}", f"{d.hbm:.1f}",
                     f"{1e6 * d.launch:.1f}", f"{1e3 * d.late:.2f}", f"{d.network:.2f}",
                     f"{1e3 * a:.0f}", f"{1e3 * b:.0f}", f"{error:+.0%}"])
    print(table(f"measured for each rank on {CORES} cores, and a step", rows))
    sizes = [abs(error) for error in errors]
    print(f"median error {median(sizes):.1%}, largest {max(sizes):.1%}")
    if len(cfgs) > 2:
        places = [[sorted(times).index(t) for t in times] for times in (predicted, measured)]
        print(f"rank correlation {correlation(*places):.3f}")
