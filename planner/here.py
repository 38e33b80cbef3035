"""Predicts a step of train.py on this machine's processors, and runs it: python plan.py --here

    a device     what primitive operations take here: matrix products, attention, what a block does
                 between its matrices, small operations, messages. Each is timed while as many
                 processes as the layout has do the same, with train.py's number of threads
    predicted    seconds by costs.py, bytes by memory.py; nothing is fitted to a layout
    measured     the same Trainer, on the tokens of --data: the mean step; model states, and the
                 most that autograd keeps at a time (and zero bubble, for W), on the fullest rank

No machine is at rest: all this is done in several rounds, and of each figure the least counts.
"""

import json
import os
import tempfile
import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import correlation, mean, median

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from collectives import all_reduce, barrier
from data.batches import Data
from group import no_span
from mesh import Mesh
from model import Block
from planner.costs import step_time
from planner.draw import table
from planner.hardware import Device
from planner.memory import Job, Layout, memory
from run.config import DTYPES, Config, check
from run.processes import init, shutdown
from sizes import GPTConfig
from train import Trainer

CORES, ROUNDS, STEPS = os.cpu_count() or 1, 3, 2
MODEL = {"n_layer": 6, "n_head": 8, "n_embd": 256, "block_size": 256, "batch_size": 8}
LAYOUTS = [
    {}, {"recompute": True}, {"dp": 2}, {"dp": 2, "zero": 3, "microbatches": 4}, {"tp": 2},
    {"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2}, {"pp": 2, "recompute": True},
    {"pp": 2, "microbatches": 1}, {"dp": 4}, {"tp": 4}, {"pp": 4},
    {"pp": 4, "schedule": "interleaved"}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2},
    {"dp": 2, "pp": 2, "tp": 2}, {"tp": 8}]


# ---- measured: a run ----


class Watch:
    """The most bytes at a time that autograd keeps for backward, parameters apart."""

    def __init__(self, trainer):
        self.pipeline, self.buckets = trainer.pipeline, trainer.reducer.buckets
        self.recomputed = [layer for stage in trainer.stages.values() for layer in stage.layers
                           if trainer.cfg.recompute and isinstance(layer, Block)]
        self.saved = weakref.WeakSet()  # storages; one that is freed leaves by itself
        self.peak = 0

    def note(self, tensor):
        """Autograd saves this tensor, which may be a part of its storage."""
        storage = tensor.untyped_storage()
        if all(storage.data_ptr() != b.full.untyped_storage().data_ptr() for b in self.buckets):
            self.saved.add(storage)
            self.look()
        return tensor

    def look(self):
        left_for_W = {x.untyped_storage() for queue in self.pipeline.weight_work.values()
                      for _, grad, x, _ in queue for x in (grad, x)}
        self.peak = max(self.peak, sum(x.nbytes() for x in left_for_W.union(self.saved)))

    @contextmanager
    def span(self, *args, **kwargs):
        """Around each action of the pipeline."""
        yield
        self.look()

    @contextmanager
    def again(self):
        """A second forward saves into hooks that torch's checkpoint has set: look on the way."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
        with saved_tensors_hooks(lambda tensor: pack(self.note(tensor)), unpack):
            yield

    @contextmanager
    def watching(self):
        self.pipeline.span = self.span
        for block in self.recomputed:  # train.py made its forward a functools.partial
            block.forward.keywords["context_fn"] = lambda: (nullcontext(), self.again())
        with saved_tensors_hooks(self.note, lambda tensor: tensor):
            yield
        self.pipeline.span = no_span
        for block in self.recomputed:
            del block.forward.keywords["context_fn"]


def run(cfg, mesh):
    """[seconds of each step, bytes of states on each rank, of activations on each rank]."""
    data, times = Data(cfg), []
    trainer = Trainer(cfg, mesh, data.vocab_size)
    watch = Watch(trainer)

    def step(i):
        _, norm = trainer.gradients(data.training(cfg, i, mesh))
        trainer.update(norm, cfg.lr)
        barrier(mesh.world)

    with watch.watching():
        step(0)
    step(1)  # after the first ones memory is where it stays
    for i in range(STEPS):
        start = time.perf_counter()
        step(2 + i)
        times.append(time.perf_counter() - start)
    held = torch.zeros(2, mesh.world.size, dtype=torch.double)
    held[:, mesh.rank] = torch.tensor([trainer.optimizer.state_bytes()[1], watch.peak])
    return [times, *all_reduce(held, mesh.world).tolist()]


def seconds(mesh, work, times=8):
    """What work() takes, the mean of some times and over ranks, which all do the same. If they are
    more than the cores: as if a rank had one to itself."""
    work()
    barrier(mesh.world)
    start = time.perf_counter()
    for _ in range(times):
        work()
    taken = torch.tensor([(time.perf_counter() - start) / times])
    return all_reduce(taken, mesh.world).item() / max(mesh.world.size, mesh.world.size**2 / CORES)


def sizes_of(cfg):
    """(sequences, tokens) of a primitive operation: half a step's, 2048 tokens at most; and how
    many ranks talk together, along the axis that has most."""
    b = max(1, min(cfg.batch_size // 2, 2048 // cfg.block_size))
    return b, b * cfg.block_size, max(cfg.dp // cfg.ep, cfg.pp, cfg.cp, cfg.tp)


def measure(cfg, mesh):
    """{name: seconds} of primitive operations, forward and backward."""
    (b, n, G), C, dtype = sizes_of(cfg), cfg.n_embd, DTYPES[cfg.dtype]

    def both_ways(fn, *shapes):
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        grad = torch.randn_like(fn(*inputs))
        return seconds(mesh, lambda: torch.autograd.grad(fn(*inputs), inputs, grad))

    def between(x, wide):  # what a block does besides: two norms, two residuals, GELU
        for _ in range(2):
            x = x + F.layer_norm(x, (C,))
        return torch.cat([x, F.gelu(wide, approximate="tanh")], 1)

    heads = (b, cfg.n_head, cfg.block_size, C // cfg.n_head)
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    tiny = Block(GPTConfig(n_head=1, n_embd=8)).to(dtype)
    found = {"up": both_ways(F.linear, (n, C), (4 * C, C)),
             "down": both_ways(F.linear, (n, 4 * C), (C, 4 * C)),
             "attention": both_ways(attention, heads, heads, heads),
             "between": both_ways(between, (n, C), (n, 4 * C)),
             "tiny": both_ways(tiny, (1, 1, 8))}
    groups = [mesh.group(axis) for axis in ("dp", "pp", "cp", "tp")]
    group = next(group for group in groups if group.size == G)
    x, weight = torch.randn(n // 2, C), torch.randn(4 * C, C)

    def product(size):
        F.linear(x, weight)
        return torch.zeros(size)

    def message(size):  # behind a product, as in a model: never are two ranks ready at once
        all_reduce(product(size), group)

    for name, size in (("small", 1), ("large", 2 * n * C)):
        found[name] = seconds(mesh, partial(message, size), 16)
        found["before " + name] = seconds(mesh, partial(product, size), 16)
    return found


def device_of(cfg, rounds):
    """A Device, of the least seconds of any round: what disturbs only ever adds to them. By what
    costs.py counts for such operations: FLOPs, bytes, kernels, hops."""
    (_, n, G), C, w = sizes_of(cfg), cfg.n_embd, DTYPES[cfg.dtype].itemsize
    least = {name: min(found[name] for found in rounds) for name in rounds[0]}
    flops = 48 * n * C * C / (least["up"] + least["down"])
    late, link = 0.0, 1.0
    if G > 1:
        late = max(0.0, least["small"] - least["before small"])
        large = max(1e-6, least["large"] - least["before large"] - late)
        link = 8 * n * C / G * 2 * (G - 1) / large / 1e9
    return Device(
        tflops=flops / 1e12, f_products=1, hbm=66 * n * C * w / least["between"] / 1e9, f_hbm=1,
        f_attention=7 * n * cfg.block_size * C / least["attention"] / flops, gb=0, nvlink=link,
        f_nvlink=1, network=link, f_network=1, latency=0, late=late, launch=least["tiny"] / 57,
        cores=CORES)


def predicted(cfg, device):
    """(seconds of a step, bytes of states and activations on the fullest rank)."""
    experts = {"n_experts": cfg.experts, "top_k": cfg.top_k} if cfg.experts else {}
    model = GPTConfig(Data(cfg).vocab_size, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd,
                      **experts)
    layout = Layout(**{name: getattr(cfg, name) for name in Layout._fields}
                    | {"recompute": "full" if cfg.recompute else "none"})
    job = Job(model, cfg.batch_size, "flash", DTYPES[cfg.dtype].itemsize, cfg.grad_dtype != "same")
    ranks = [memory(job, layout, [rank]) for rank in range(cfg.pp)]
    return step_time(job, layout, device), max(
        r["weights"] + r["gradients"] + r["optimizer"] + r["activations"] for r in ranks)


def worker(rank, tasks, folder):
    """One process of all tasks: takes part in those that are for so many ranks."""
    for i, (task, n, cfg) in enumerate(tasks):
        if rank < n:
            torch.set_num_threads(max(1, CORES // n))  # as processes.launch has it
            init(url=f"file://{folder}/{i}", rank=rank, size=n)
            mesh = Mesh(dp=cfg.dp // cfg.ep, ep=cfg.ep, pp=cfg.pp, cp=cfg.cp, tp=cfg.tp)
            result = task(cfg, mesh)
            if rank == 0:
                Path(folder, f"{i}.json").write_text(json.dumps(result))
            shutdown()


def in_turn(tasks):
    """Do each (function, ranks, Config) in each round: a list of results for each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (tasks * ROUNDS, folder), max(n for _, n, _ in tasks))
        results = [json.loads(Path(folder, f"{i}.json").read_text())
                   for i in range(len(tasks) * ROUNDS)]
    return [results[i :: len(tasks)] for i in range(len(tasks))]


def name_of(cfg):
    """The flags of its layout."""
    words = []
    for f in (f for f in fields(Config) if f.metadata["group"] == "layout"):
        value = getattr(cfg, f.name)
        one = value == 1 and f.name in ("dp", "microbatches", "chunks")  # as if it were not named
        if value != f.default and not one and f.name not in ("collectives", "pad_vocab"):
            words += ["--" + f.name.replace("_", "-")] + [str(value)] * (value is not True)
    return " ".join(words) or "one process"


def spearman(x, y):
    """The rank correlation."""
    return correlation(*([sorted(values).index(value) for value in values] for values in (x, y)))


def compare(cfgs):
    """Predict and run layouts, and print a table. cfgs: Configs, checked."""
    def kind(cfg):  # what a measured device depends on; ranks come first
        return (cfg.dp * cfg.pp * cfg.cp * cfg.tp, *sizes_of(cfg), cfg.n_embd, cfg.n_head,
                cfg.block_size, cfg.dtype)

    kinds = {kind(cfg): cfg for cfg in cfgs}
    n = len(kinds)
    results = in_turn([(measure, kind(cfg)[0], cfg) for cfg in kinds.values()]
                      + [(run, kind(cfg)[0], cfg) for cfg in cfgs])
    devices = {key: device_of(cfg, rounds)
               for (key, cfg), rounds in zip(kinds.items(), results, strict=False)}
    rows = [["ranks", "threads", "in groups of", "GFLOP/s", "attention", "GB/s", "us an operation",
             "ms to meet", "GB/s between"]]
    rows += [[f"{size}", f"{max(1, CORES // size)}", f"{together}", f"{1e3 * d.tflops:.0f}",
              f"{1e3 * d.tflops * d.f_attention:.0f}", f"{d.hbm:.1f}", f"{1e6 * d.launch:.1f}",
              *([f"{1e3 * d.late:.2f}", f"{d.network:.2f}"] if size > 1 else ["", ""])]
             for (size, _, _, together, *_), d in devices.items()]
    print(table(f"measured for each rank, on {CORES} cores", rows))
    times, held, rows = [], [], []
    for cfg, rounds in zip(cfgs, results[n:], strict=True):
        want, want_bytes = predicted(cfg, devices[kind(cfg)])
        took = min(mean(steps) for steps, _, _ in rounds)
        _, states, activations = rounds[0]
        most = max(map(sum, zip(states, activations, strict=True)))
        times.append((want, took))
        held.append((want_bytes, most))
        rows.append([name_of(cfg), f"{1e3 * want:.0f}", f"{1e3 * took:.0f}",
                     f"{want / took - 1:+.0%}", f"{want_bytes / 1e6:.1f}", f"{most / 1e6:.1f}",
                     f"{want_bytes / most - 1:+.1%}"])
    width = max(len(name) for name, *_ in rows)
    head = ["", "predicted ms", "measured", "error", "predicted MB", "measured", "error"]
    print(table("a step, and model states with activations on the fullest rank",
                [head, *([name.ljust(width), *cells] for name, *cells in rows)]))
    late, off = ([abs(a / b - 1) for a, b in pairs] for pairs in (times, held))
    order = f", rank correlation {spearman(*zip(*times, strict=True)):.3f}" if len(cfgs) > 2 else ""
    print(f"time: median error {median(late):.1%}, largest {max(late):.1%}{order}; "
          f"memory: largest error {max(off):.1%}")


def here(cfgs=None):
    """What plan.py --here does. cfgs: Configs, checked; None: a list of 1 to 8 processes."""
    if cfgs is None:
        folder = tempfile.gettempdir()
        cfgs = [Config(**MODEL, **layout, device="cpu", out=folder) for layout in LAYOUTS]
        for cfg in cfgs:
            check(cfg, 1)
    compare(cfgs)
