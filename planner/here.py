"""Predicts a step of train.py on this machine's processors, and runs it: python plan.py --here

    device       seconds of primitive operations here: matrix products, attention, elementwise work,
                 small operations, messages; timed in as many processes as the layout has, with as
                 many threads
    predicted    seconds by costs.py; nothing is fitted to a layout
    measured     the mean step of the same Trainer on the tokens of --data

Other programs disturb: everything is done in several rounds, and the least of each figure counts.
"""

import json
import os
import tempfile
import time
from dataclasses import fields
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
from planner.memory import Job, Layout
from run.config import DTYPES, Config
from run.processes import init, shutdown
from sizes import GPTConfig

CORES, ROUNDS, STEPS = os.cpu_count() or 1, 3, 2
MODEL = {"n_layer": 6, "n_head": 8, "n_embd": 256, "block_size": 256, "batch_size": 8}
LAYOUTS = [  # of plan.py --here alone
    {}, {"recompute": True}, {"dp": 2}, {"dp": 2, "zero": 3, "microbatches": 4}, {"tp": 2},
    {"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2}, {"pp": 2, "recompute": True},
    {"pp": 2, "microbatches": 1}, {"dp": 4}, {"tp": 4}, {"pp": 4},
    {"pp": 4, "schedule": "interleaved"}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2},
    {"dp": 2, "pp": 2, "tp": 2}, {"tp": 8}]


# ---- measured ----


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
    """(sequences, tokens) of a primitive operation: half a step's, 2048 tokens at most; and the
    ranks of the largest axis, which exchange messages."""
    b = max(1, min(cfg.batch_size // 2, 2048 // cfg.block_size))
    return b, b * cfg.block_size, max(cfg.dp // cfg.ep, cfg.pp, cfg.cp, cfg.tp)


def measure(cfg, mesh):
    """{name: seconds} of primitive operations, forward and backward."""
    (b, n, G), C, dtype = sizes_of(cfg), cfg.n_embd, DTYPES[cfg.dtype]

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
    (_, n, G), C, w = sizes_of(cfg), cfg.n_embd, DTYPES[cfg.dtype].itemsize
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


# ---- processes ----


def worker(rank, tasks, folder):
    """One process of all tasks: takes part in those that are for so many ranks."""
    for i, (task, n, cfg) in enumerate(tasks):
        if rank < n:
            torch.set_num_threads(max(1, CORES // n))  # as run/processes.py does
            init(url=f"file://{folder}/{i}", rank=rank, size=n)
            mesh = Mesh(dp=cfg.dp // cfg.ep, ep=cfg.ep, pp=cfg.pp, cp=cfg.cp, tp=cfg.tp)
            result = task(cfg, mesh)
            if rank == 0:
                Path(folder, f"{i}.json").write_text(json.dumps(result))
            shutdown()


def in_turn(tasks):
    """Runs each (function, ranks, Config) once in each round. Returns its results, by task."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (tasks * ROUNDS, folder), max(n for _, n, _ in tasks))
        results = [json.loads(Path(folder, f"{i}.json").read_text())
                   for i in range(len(tasks) * ROUNDS)]
    return [results[i :: len(tasks)] for i in range(len(tasks))]


# ---- predicted and measured, side by side ----


def planned(cfg):
    """A Config as (Job, Layout) of the planner."""
    experts = {"n_experts": cfg.experts, "top_k": cfg.top_k} if cfg.experts else {}
    model = GPTConfig(Data(cfg).vocab_size, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd,
                      **experts)
    names = {name: getattr(cfg, name) for name in Layout._fields}
    layout = Layout(**{**names, "recompute": "full" if cfg.recompute else "none"})
    width = DTYPES[cfg.dtype].itemsize
    return Job(model, cfg.batch_size, "flash", width, cfg.grad_dtype != "same"), layout


def name_of(cfg):
    """The layout's flags."""
    words = []
    for f in fields(Config):
        value = getattr(cfg, f.name)
        default = (0, 1) if f.name in ("dp", "microbatches", "chunks") else (f.default,)
        if f.name in Layout._fields and value not in default:
            words += ["--" + f.name.replace("_", "-")] + [str(value)] * (value is not True)
    return " ".join(words) or "one process"


def ranks(cfg):
    return cfg.dp * cfg.pp * cfg.cp * cfg.tp


def here(cfgs, make_trainer):
    """Predicts and runs layouts, and prints a table. cfgs: Configs, checked. make_trainer(cfg,
    mesh, vocab_size): train.Trainer."""
    def kind(cfg):  # all that a measured device depends on
        return (ranks(cfg), *sizes_of(cfg), cfg.n_embd, cfg.n_head, cfg.block_size, cfg.dtype)

    kinds = {kind(cfg): cfg for cfg in cfgs}
    results = in_turn([(measure, ranks(cfg), cfg) for cfg in kinds.values()]
                      + [(partial(run, make_trainer), ranks(cfg), cfg) for cfg in cfgs])
    devices = {key: device_of(cfg, rounds)
               for (key, cfg), rounds in zip(kinds.items(), results, strict=False)}
    rows = [["ranks", "threads", "in groups of", "GFLOP/s", "attention", "GB/s", "us an operation",
             "ms to meet", "GB/s between"]]
    for (n, _, _, group, *_), d in devices.items():
        cells = [n, max(1, CORES // n), group, 1e3 * d.tflops, 1e3 * d.tflops * d.f_attention,
                 d.hbm, 1e6 * d.launch, *([1e3 * d.late, d.network] if n > 1 else [])]
        rows.append([f"{cell:.4g}" for cell in cells] + [""] * (len(rows[0]) - len(cells)))
    print(table(f"measured for each rank, on {CORES} cores", rows))
    want = [step_time(*planned(cfg), devices[kind(cfg)]) for cfg in cfgs]
    got = [min(rounds) for rounds in results[len(kinds):]]
    errors = [a / b - 1 for a, b in zip(want, got, strict=True)]
    names = [name_of(cfg) for cfg in cfgs]
    width = max(map(len, names))
    rows = [["", "predicted ms", "measured", "error"]]
    for name, a, b, error in zip(names, want, got, errors, strict=True):
        rows.append([name.ljust(width), f"{1e3 * a:.0f}", f"{1e3 * b:.0f}", f"{error:+.0%}"])
    print(table("a step", rows))
    sizes = [abs(error) for error in errors]
    order = ""
    if len(cfgs) > 2:
        places = [[sorted(times).index(time) for time in times] for times in (want, got)]
        order = f", rank correlation {correlation(*places):.3f}"
    print(f"median error {median(sizes):.1%}, largest {max(sizes):.1%}{order}")
