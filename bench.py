"""Side by side with torch's own: same model, same weights, same data, same processes, in one run.

Each row is a race of two step functions that take turns, step by step, each after a barrier; a step
takes as long as on its slowest rank. ratio = torch's time / ours in neighbouring steps, its median
and quartiles: 1.2 means that we do 1.2 steps while torch does one. The first losses are compared,
so what is timed is the same training. A rank is a process with one thread. Peak memory is what a
process grows by while it builds one side and takes two steps (Linux; resident bytes, all included).

    python bench.py                  every row, in a quarter of an hour on two cores
    python bench.py --quick          does it run? two steps each of a smaller model: no figures
    python bench.py --only ddp       rows with that in their name; --only scaling: 1 to 8 ranks
    python bench.py --only growth    step and memory against the length of a sequence (1 to 4 ranks)
    python bench.py --json out.json  the figures for a program
    python bench.py --gpu            one GPU, bfloat16: against a loop as nanoGPT's, and the peak
"""

import argparse
import ctypes
import gc
import json
import math
import os
import tempfile
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

import collectives
import context_parallel
import tensor_parallel
import train
from ddp import plain_data_parallel
from group import Group
from mesh import Mesh
from model import build, cross_entropy
from pipeline import Stage, plain_1f1b
from planner.hardware import MODELS, peak_flops
from run import checkpoint
from run.config import Config
from run.processes import init, shutdown
from run.signals import end_quietly
from schedules import cut
from sizes import GPTConfig
from tensor_parallel import plain_tensor_parallel

SMALL = dict(n_layer=6, n_head=6, n_embd=384)
SIZES = {  # model, tokens per sequence, sequences in all or, where negative, on each data rank
    "compute": dict(SMALL, block_size=128, batch_size=16),
    "communication": dict(SMALL, block_size=32, batch_size=-1),
    "tiny": dict(n_layer=4, n_head=4, n_embd=128, block_size=32, batch_size=8),
    "2 sequences a rank": dict(SMALL, block_size=128, batch_size=-2),
    "8 sequences in all": dict(SMALL, block_size=128, batch_size=8),
    "long": dict(SMALL, block_size=2048, batch_size=1),
    "50257 words": dict(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=4),
} | {f"S = {S}": dict(n_layer=2, n_head=4, n_embd=128, block_size=S, batch_size=1)
     for S in (256, 512, 1024, 2048, 4096, 8192)}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Row(NamedTuple):
    name: str
    n: int  # ranks
    size: object  # a key of SIZES, or the KB of a collective
    ours: object  # Job -> step function, which returns this rank's share of the loss
    peer: object
    goal: float | None
    layout: dict = {}  # of Config
    limit: float = 1.0  # times the peer's time is what n ranks could at best take


class Job:
    """What one rank builds a side of a row from. groups: {n: {name: ProcessGroup}}."""

    def __init__(self, row, rank, groups, folder):
        self.row, self.n, self.rank, self.groups, self.folder = row, row.n, rank, groups, folder
        self.pg = groups[row.n]["peer"]
        self.vocabulary = 50257 if row.size == "50257 words" else 256
        if row.size in SIZES:
            self.plan(row.layout)

    def plan(self, layout):
        cfg = Config(**{"dp": 1, "microbatches": 1, "chunks": 1, **SIZES[self.row.size], **layout})
        if cfg.batch_size < 0:
            cfg.batch_size *= -cfg.dp
        generator = torch.Generator().manual_seed(0)
        shape = cfg.batch_size, cfg.block_size + 1
        ids = torch.randint(self.vocabulary, shape, generator=generator)
        mine = ids.chunk(cfg.dp)[self.rank % cfg.dp].chunk(cfg.microbatches)
        self.cfg, self.batches = cfg, [(rows[:, :-1], rows[:, 1:]) for rows in mine]

    def mesh(self):
        """The row's ranks along the one axis that its layout has."""
        axes = "ep", "dp", "pp", "cp", "tp"  # experts are shared by all of a row's data ranks
        layout = self.row.layout or {"dp": self.n}
        axis = max(axes, key=lambda axis: layout.get(axis, 1))
        sizes = {"dp": 1, "ep": 1, "pp": 1, "cp": 1, "tp": 1, axis: self.n}
        self.made = RowMesh(self.rank, self.groups[self.n], sizes)
        return self.made


class RowMesh(Mesh):
    """The first n ranks of the bench, with communicators that all rows share."""

    def __init__(self, rank, communicators, sizes):
        self.rank, self.sizes, self.device, self.native = rank, sizes, torch.device("cpu"), False
        self.group_class = Group
        self.communicators, self.groups = communicators, {}
        self.world = self.join("world", [list(range(math.prod(sizes.values())))])

    def communicator(self, name, ranks):
        return self.communicators[name]

    def bytes_sent(self):
        return sum(group.bytes_sent for group in self.groups.values())


# ---- our side: what train.py and its parts run ----


def trainer(job):
    t = train.Trainer(job.cfg, job.mesh(), job.vocabulary)

    def step():
        norm, read = t.gradients(job.batches)
        t.update(norm, job.cfg.lr)
        loss, *_ = read()
        return loss if job.rank == 0 else 0.0

    return step


def save_and_load(job):
    """With the moments that a first step makes."""
    cfg = replace(job.cfg, out=f"{job.folder}/ours")
    os.makedirs(cfg.out, exist_ok=True)
    t = train.Trainer(cfg, job.mesh(), job.vocabulary)
    norm, read = t.gradients(job.batches)
    t.update(norm, job.cfg.lr)
    return lambda: checkpoint.load(t, checkpoint.save(t, 1, job.folder)) * 0.0


def repeats(row):
    """Small messages are timed several at once."""
    return 1 if row.size in SIZES else max(1, 256 // row.size)


def ring(job):
    fn = getattr(collectives, job.row.name, collectives.all_reduce)
    x, group = torch.zeros(256 * job.row.size), job.mesh().group("dp")
    assert group.size == job.n  # or nothing would be sent, very fast
    return lambda: [fn(x, group) for _ in range(repeats(job.row))] and 0.0


# ---- torch's side: what its tutorials write. The loss is a mean over the rank's own tokens ----


def plain(job):
    """model.GPT with the same initial weights."""
    cfg = job.cfg
    model = build(GPTConfig(job.vocabulary, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd,
                            cfg.experts, cfg.top_k), cfg.seed)
    for block in model.layers[1:-1]:
        block.mlp.balance_weight = cfg.balance  # of experts
    return model


def adamw(params, cfg, kind=torch.optim.AdamW, **more):
    params = list(params)
    groups = [{"params": [p for p in params if (p.dim() > 1) == matrix], "weight_decay": decay}
              for matrix, decay in ((True, cfg.weight_decay), (False, 0.0))]
    return kind(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), fused=True, **more)


def loop(job, model, optimizer, share=1.0):
    """The plain step, for models that hide their parallelism."""
    tokens = sum(ids.numel() for ids, _ in job.batches)

    def step():
        total = 0.0
        for ids, targets in job.batches:
            loss = model(ids, targets) / tokens
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), job.cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return total * share

    return step


def ddp(job, zero=False):
    model = plain(job)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=job.pg,
                                                  gradient_as_bucket_view=True)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = adamw(model.parameters(), job.cfg, ZeroRedundancyOptimizer,
                          optimizer_class=torch.optim.AdamW, process_group=job.pg,
                          parameters_as_bucket_view=True)
    else:
        optimizer = adamw(model.parameters(), job.cfg)
    return loop(job, wrapped, optimizer, 1 / job.n)


def ddp_zero1(job):
    return ddp(job, zero=True)


def fsdp(job):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    mesh, model = DeviceMesh.from_group(job.pg, "cpu"), plain(job)
    for block in model.layers[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(job, model, adamw(model.parameters(), job.cfg), 1 / job.n)


def dtensor(job, sp=False):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel as Col
    from torch.distributed.tensor.parallel import RowwiseParallel as Row
    from torch.distributed.tensor.parallel import (
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )
    mesh, model, (ids, targets) = DeviceMesh.from_group(job.pg, "cpu"), plain(job), job.batches[0]
    tokens = Shard(1) if sp else Replicate()  # how activations lie between blocks
    first, *blocks, last = model.layers
    for block in blocks:
        for p in block.attn.c_attn.parameters():  # each rank's rows hold its heads of q, k and v
            p.data = p.data.view(3, job.n, -1, *p.shape[1:]).transpose(0, 1).reshape(p.shape)
        parallelize_module(block, mesh, {
            "attn.c_attn": Col(input_layouts=tokens), "attn.c_proj": Row(output_layouts=tokens),
            "mlp.c_fc": Col(input_layouts=tokens), "mlp.c_proj": Row(output_layouts=tokens)})
    parallelize_module(first, mesh, {"wte": Row(input_layouts=Replicate(),
                                                output_layouts=tokens)})
    parallelize_module(last, mesh, {"lm_head": Col(
        input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)})
    last.lm_head.weight = first.wte.weight  # tied again
    if sp:
        for layer in (*blocks, last):
            parallelize_module(layer, mesh, {name: SequenceParallel() for name, _ in
                                             layer.named_children() if name.startswith("ln_")})
        first.positions = torch.arange(job.cfg.block_size).chunk(job.n)[job.rank]
        first.wpe.weight.register_post_accumulate_grad_hook(
            lambda param: dist.all_reduce(param.grad, group=job.pg))
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == split]
             for split in (True, False)]
    optimizers = [adamw(params, job.cfg) for params in kinds]

    def step():
        with loss_parallel():
            loss = model(ids, targets) / targets.numel()
            loss.backward()
        split, whole = (nn.utils.get_total_norm([p.grad for p in params]) for params in kinds)
        norm = torch.hypot(split.full_tensor(), whole)
        for params, optimizer in zip(kinds, optimizers, strict=True):
            nn.utils.clip_grads_with_norm_(params, job.cfg.grad_clip, norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss.full_tensor().item() / job.n

    return step


def pipelining(job):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    cfg, model, last = job.cfg, plain(job), job.rank == job.n - 1
    tokens = cfg.batch_size * cfg.block_size
    a, b = cut(model.config.layer_costs(), job.n)[job.rank]
    part, loss_fn = nn.Sequential(*model.layers[a:b]), cross_entropy
    stage = PipelineStage(part, job.rank, job.n, torch.device("cpu"), group=job.pg)
    schedule = Schedule1F1B(stage, cfg.microbatches, lambda y, t: loss_fn(y, t) / tokens,
                            scale_grads=False)
    del model
    ids, targets = (torch.cat(parts) for parts in zip(*job.batches, strict=True))
    params = list(part.parameters())
    tied = {0: lambda: part[0].wte.weight, job.n - 1: lambda: part[-1].lm_head.weight}
    tied = tied[job.rank]() if job.rank in tied else None
    optimizer = adamw(params, cfg)

    def step():
        losses = []
        if last:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step(*([ids] if job.rank == 0 else []))
        if tied is not None:  # two ranks, as these rows have: the ends are the whole group
            dist.all_reduce(tied.grad, group=job.pg)
        grads = [p.grad for p in params if last or p is not tied]
        square = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(square, group=job.pg)
        nn.utils.clip_grads_with_norm_(params, cfg.grad_clip, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().item() if last else 0.0

    return step


def library(job):
    x, own = torch.zeros(256 * job.row.size), torch.zeros(256 * job.row.size // job.n)
    fn, args = {"all_reduce": (dist.all_reduce, [x]),
                "reduce_scatter": (dist.reduce_scatter_tensor, [own, x]),
                "all_gather": (dist.all_gather_into_tensor, [x, own])}[job.row.name]
    return lambda: [fn(*args, group=job.pg) for _ in range(repeats(job.row))] and 0.0


def dcp(job):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    model = plain(job)
    optimizer = adamw(model.parameters(), job.cfg)
    loop(job, model, optimizer)()

    def step():
        names = ("model", "optimizer")
        state = dict(zip(names, get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=f"{job.folder}/torch", process_group=job.pg)
        dcp.load(state, checkpoint_id=f"{job.folder}/torch", process_group=job.pg)
        set_state_dict(model, optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        return 0.0

    return step


# ---- our plain forms: what the tricks of the fast ones earn ----


@contextmanager
def swapped(module, **others):
    kept = {name: getattr(module, name) for name in others}
    try:
        vars(module).update(others)
        yield
    finally:
        vars(module).update(kept)


def plain_ring(job):
    x, group = torch.zeros(256 * job.row.size), job.mesh().group("dp")
    return lambda: [collectives.plain_all_reduce(x, group) for _ in range(repeats(job.row))] and 0.0


def plain_ddp(job):
    """A plain loop; behind each backward the gradients are summed, one by one."""
    model, group = plain(job), job.mesh().group("dp")
    optimizer = adamw(model.parameters(), job.cfg)
    ((ids, targets),) = job.batches

    def step():
        loss = model(ids, targets) / (targets.numel() * job.n)
        loss.backward()
        plain_data_parallel(model.parameters(), group)
        nn.utils.clip_grad_norm_(model.parameters(), job.cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def plain_layers(job):
    """The trainer with tensor-parallel layers that wait for their messages."""
    def parallelize(model, group, sp, defer):
        plain_tensor_parallel(model, group)

    with swapped(train, parallelize=parallelize):
        return trainer(job)


def plain_loss(job):
    """The trainer with the logits of all tokens at once."""
    def loss(lm_head, region, x, targets):
        return cross_entropy(lm_head(x), targets)

    with swapped(tensor_parallel, chunked_loss=loss):
        return trainer(job)


def plain_pipeline(job):
    cfg, mesh, last = job.cfg, job.mesh(), job.rank == job.n - 1
    model, group = plain(job), mesh.group("pp")
    a, b = cut(model.config.layer_costs(), job.n)[job.rank]
    stage, tied = Stage(model.layers[a:b]), model.layers[0].wte.weight
    params, tokens = list(stage.parameters()), cfg.batch_size * cfg.block_size
    optimizer = adamw(params, cfg)
    shape = (cfg.batch_size // cfg.microbatches, cfg.block_size, cfg.n_embd)

    def step():
        loss = plain_1f1b(stage, group, job.batches, shape, tokens)
        collectives.all_reduce(tied.grad, group)  # two ranks: both are ends
        grads = [p.grad for p in params if last or p is not tied]
        square = collectives.all_reduce(nn.utils.get_total_norm(grads).square(), group)
        nn.utils.clip_grads_with_norm_(params, cfg.grad_clip, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def plain_attention(job):
    at = context_parallel.zigzag(job.cfg.block_size, job.n, job.rank)
    core = partial(context_parallel.plain_ring_attention, positions=at)
    with swapped(context_parallel, KINDS={"ring": core}):
        return trainer(job)


# ---- the same layout in another way ----


def without_sp(job):
    job.plan({**job.row.layout, "sp": False})
    return trainer(job)


def all_to_all(job):
    job.plan({**job.row.layout, "cp_attention": "all-to-all"})
    return trainer(job)


def naive_split(job):
    """Rank c has chunk c of C: it meets all of those before it, and none of those behind it."""
    def in_order(S, C, c):
        return torch.arange(S).chunk(C)[c]

    def visible(mine, theirs, half):
        seen = slice(None) if theirs <= mine else slice(0)
        return seen, seen, theirs == mine

    def kernel(q, k, v, causal, compute=context_parallel.kernel):
        return compute(q, k, v, causal) if q.size(2) else (q, q[..., 0], ())

    def kernel_backward(grad, q, k, v, *args, compute=context_parallel.kernel_backward):
        return compute(grad, q, k, v, *args) if q.size(2) else (q, k, v)

    with swapped(context_parallel, zigzag=in_order):
        step = trainer(job)

    def naive_step():
        with swapped(context_parallel, visible=visible, kernel=kernel,
                     kernel_backward=kernel_backward):
            return step()

    return naive_step


# ---- limits: one process does the work while the other ranks look on ----


def one_process(job):
    """A plain loop with as many threads as there are ranks."""
    same = ("microbatches", "experts", "balance")
    job.plan({name: getattr(job.cfg, name) for name in same})
    if job.rank > 0:
        return lambda: 0.0
    model = plain(job)
    step = loop(job, model, adamw(model.parameters(), job.cfg))

    def threaded():
        torch.set_num_threads(job.n)
        loss = step()
        torch.set_num_threads(1)
        return loss

    return threaded


def one_rank(job):
    """train.py's path: the whole batch, or one rank's share if the batch grows with the ranks."""
    job.n = 1
    job.plan({})
    return trainer(job) if job.rank == 0 else lambda: 0.0


# ---- the rows ----

ROWS = [Row("all_reduce", n, kb, ring, library, 1.25 if kb <= 256 else 0.85)
        for n in (2, 4) for kb in (4, 64, 256, 1024, 4096, 16384, 65536)]
ROWS += [Row(name, n, 65536, ring, library, goal)
         for name, goal in (("reduce_scatter", 1.5), ("all_gather", 1.0)) for n in (2, 4)]
for name, peer, layouts, sizes, goal in (
        ("DDP", ddp, [{"dp": 2}, {"dp": 4}], ("compute", "communication"), 1.0),
        ("ZeRO-1", ddp_zero1, [{"dp": 2, "zero": 1}], ("compute", "communication"), 1.0),
        ("ZeRO-3", fsdp, [{"dp": 2, "zero": 3}, {"dp": 4, "zero": 3}],
         ("compute", "communication"), 1.15),
        ("1F1B", pipelining, [{"pp": 2, "microbatches": 8}], ("compute", "tiny"), 1.0),
        ("tensor parallel", dtensor, [{"tp": 2}], ("compute", "tiny"), 1.05),
        ("sequence parallel", partial(dtensor, sp=True), [{"tp": 2, "sp": True}],
         ("compute", "tiny"), 1.1)):
    ROWS += [Row(name, next(iter(layout.values())), size, trainer, peer, goal, layout)
             for layout in layouts for size in sizes]
ROWS += [Row("D = 2, to 2 threads", 2, "compute", trainer, one_process, 0.95, {"dp": 2}),
         Row("P = 2, to that + bubble", 2, "compute", trainer, one_process, 0.95,
             {"pp": 2, "microbatches": 8}, 9 / 8),
         Row("C = 2, to 2 threads", 2, "long", trainer, one_process, 0.95, {"cp": 2}),
         Row("E = 2, to 2 threads", 2, "compute", trainer, one_process, None,
             {"dp": 2, "ep": 2, "experts": 8, "balance": 0.0}),
         Row("one rank, to a plain loop", 1, "compute", trainer, one_process, 0.95)]
ROWS += [Row("--sp, to --tp alone", 2, size, trainer, without_sp, None, {"tp": 2, "sp": True})
         for size in ("compute", "tiny")]
ROWS += [Row(f"attention, to {name}", 2, "long", trainer, peer, None, {"cp": 2})
         for name, peer in (("plain", plain_attention), ("naive split", naive_split),
                            ("all-to-all", all_to_all))]
ROWS += [Row("all_reduce, to plain", n, kb, ring, plain_ring, None)
         for n in (2, 4) for kb in (4096, 65536)]
ROWS += [Row(f"{name}, to plain", 2, size, trainer, peer, None, layout)
         for name, peer, layout, sizes in (
             ("DDP", plain_ddp, {"dp": 2}, ("compute", "communication")),
             ("tensor parallel", plain_layers, {"tp": 2}, ("compute", "tiny")),
             ("1F1B", plain_pipeline, {"pp": 2, "microbatches": 8}, ("compute", "tiny")))
         for size in sizes]
ROWS += [Row("head in chunks, to plain", n, "50257 words", trainer, plain_loss, None, layout)
         for n, layout in ((1, {}), (2, {"pp": 2, "microbatches": 4}))]
ROWS.append(Row("checkpoint", 2, "compute", save_and_load, dcp, 1.0, {"dp": 2}))
for n in (1, 2, 4, 8):  # the limit is one rank's time, the work shared evenly by the cores
    ROWS += [Row("scaling", n, size, trainer, one_rank, None, {"dp": n}, limit) for size, limit in (
        ("2 sequences a rank", max(1, n / CORES)), ("8 sequences in all", 1 / min(n, CORES)))]
ROWS += [Row("growth", n, size, trainer, one_process, None, {"cp": n})  # only if asked for
         for size in SIZES if size.startswith("S =") for n in (1, 2, 4)]


# ---- the race ----


def race(row, rank, groups, folder, seconds, least):
    """The row's figures, the same on each of its ranks."""
    pg, sides = groups[row.n]["peer"], (row.ours, row.peer)

    def highest(values):
        values = torch.tensor(values, dtype=torch.double)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=pg)
        return values

    def clock(step):
        dist.barrier(pg)
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    job = Job(row, rank, groups, folder)
    steps = row.ours(job), row.peer(Job(row, rank, groups, folder))
    losses = torch.tensor([[step() for step in steps] for _ in range(2)])
    dist.all_reduce(losses, group=pg)
    assert row.name == "scaling" or torch.allclose(*losses.unbind(1), rtol=1e-3), (row, losses)
    before = job.made.bytes_sent()
    times, pairs = [], 1
    while len(times) < pairs:
        i = len(times)
        pair = {side: clock(steps[side]) for side in (i % 2, 1 - i % 2)}
        times.append([pair[0], pair[1] * row.limit])
        if i == 0:
            sent = job.made.bytes_sent() - before
            pairs = min(max(seconds / highest([sum(pair.values())]).item(), least), 200)
    times = highest(times) / repeats(row)
    ratio = (times[:, 1] / times[:, 0]).quantile(torch.tensor([.5, .25, .75]).double()).tolist()
    del steps, job
    peaks = highest([peak(lambda side=side: side(Job(row, rank, groups, folder)))
                     for side in sides])
    return (*ratio, *(1e3 * times).median(0).values.tolist(), *peaks.tolist(),
            highest([sent]).item() / repeats(row) / 1e6)


def peak(build):
    """MB by which this process grows at most while it builds a side and takes two steps."""
    def status(field):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024

    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what others freed is given back
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark starts anew
    except (OSError, AttributeError):  # not Linux, and so on every rank
        return float("nan")
    before, step = status("VmRSS"), build()
    step(), step()
    return status("VmHWM") - before


def worker(rank, world, chosen, quick, path, folder):
    end_quietly()  # with the process that started this one
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers'
    init(timeout=1800, url=f"file://{folder}/rendezvous", rank=rank, size=world)
    rows = [ROWS[i] for i in chosen]
    names = "axis", "dp_cp", "dp_ep_cp", "pp_ends", "ep_pp_tp", "world", "peer"
    groups = {n: {name: dist.new_group(range(n)) for name in names}
              for n in sorted({1, *(row.n for row in rows)})}
    for named in groups.values():
        named.update(dict.fromkeys(("dp", "ep", "pp", "cp", "tp"), named["axis"]))
    for size in SIZES.values() if quick else ():
        size.update(n_layer=2, block_size=32)
    results = []
    for row in rows:
        seconds = 5 if row.size in SIZES else 2
        figures = race(row, rank, groups, folder, *((0, 2) if quick else (seconds, 5))) \
            if rank < row.n else ()
        dist.barrier()
        if rank == 0:
            ratio, low, high, ms, peer_ms, *peaks, sent = figures
            size = row.size if row.size in SIZES else f"{row.size} KB"
            goal = f"{row.goal:.2f}" if row.goal else ""
            print(f"{row.name:26}{row.n:2}  {size:19}{ms:9.2f}{peer_ms:9.2f}{ratio:7.2f}  "
                  f"{low:.2f} - {high:.2f}{goal:>6}{peaks[0]:8.0f}{peaks[1]:6.0f}{sent:9.2f}",
                  flush=True)
            peaks = [None if x != x else x for x in peaks]
            results.append(dict(row=row.name, n=row.n, size=size, ratio=ratio, low=low, high=high,
                                goal=row.goal, peak_mb=peaks[0], peer_peak_mb=peaks[1],
                                ms=ms, peer_ms=peer_ms, sent_mb=sent))
    if rank == 0 and path:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)
    shutdown()


# ---- on one GPU ----


def plain_gpu_loop(cfg, batch, device):
    """As nanoGPT trains: float32 weights, products in bfloat16 by autocast, fused AdamW. The
    vocabulary is padded to a multiple of 64, as nanoGPT's is."""
    model = build(GPTConfig(-(-50257 // 64) * 64, cfg.block_size, cfg.n_layer, cfg.n_head,
                            cfg.n_embd), cfg.seed).to(device)
    optimizer, (ids, targets) = adamw(model.parameters(), cfg), batch
    run = torch.compile(model) if cfg.compile else model

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            loss = run(ids, targets) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def our_gpu_step(cfg, batch, device):
    one = dict.fromkeys(("dp", "ep", "pp", "cp", "tp"), 1)
    t = train.Trainer(cfg, Mesh(device, native=True, **one), 50257)

    def step():
        norm, read = t.gradients([batch])
        t.update(norm, cfg.lr)
        return read()[0]

    return step, t.model_config.flops_per_token(t.n_params)


def on_gpu(quick, steps=30):
    """A row for each model, with and without torch.compile. The two sides take turns, step by step;
    a step ends when the device has done it all. held: by both sides."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak = peak_flops(gpu) or math.nan
    torch.set_float32_matmul_precision("high")
    print(f"torch {torch.__version__}, {gpu}, bfloat16\n{'model':10}{'compile':>8}{'sequences':>10}"
          f"{'ours ms':>9}{'tokens/s':>10}{'mfu':>7}{'peer ms':>9}{'ratio':>7}  {'quartiles':>11}"
          f"{'goal':>6}{'held MB':>9}")
    for name, sequences in (("gpt2", 16), ("gpt2-xl", 4)):
        shape = replace(MODELS[name], n_layer=2, n_embd=64, n_head=2, block_size=32) if quick \
            else MODELS[name]
        for compiled in (False, True):
            cfg = Config(dp=1, n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd,
                         block_size=shape.block_size, batch_size=sequences, dtype="bfloat16",
                         compile=compiled and not quick, pad_vocab=64, microbatches=1, chunks=1)
            rows = torch.randint(50257, (sequences, shape.block_size + 1), device=device)
            batch = rows[:, :-1], rows[:, 1:]
            step, flops = our_gpu_step(cfg, batch, device)
            sides = step, plain_gpu_loop(cfg, batch, device)
            times = [[], []]
            for _ in range(2 if quick else steps):
                for side, taken in zip(sides, times, strict=True):
                    start = time.perf_counter()
                    side()
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    taken.append(time.perf_counter() - start)
            times = [taken[len(taken) // 3 :] for taken in times]  # without the first ones
            ours, peer = (sorted(taken)[len(taken) // 2] for taken in times)
            ratios = sorted(b / a for a, b in zip(*times, strict=True))
            low, ratio, high = (ratios[len(ratios) * k // 4] for k in (1, 2, 3))
            rate = sequences * shape.block_size / ours
            held = torch.cuda.max_memory_reserved() / 1e6 if device.type == "cuda" else math.nan
            print(f"{name:10}{'yes' if compiled else 'no':>8}{sequences:10}{1e3 * ours:9.1f}"
                  f"{rate:10,.0f}{rate * flops / peak:7.1%}{1e3 * peer:9.1f}{ratio:7.2f}  "
                  f"{low:.2f} - {high:.2f}{1:6.2f}{held:9.0f}", flush=True)
            del step, sides, side
            torch.compiler.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps of each row, a small model")
    parser.add_argument("--only", default="", metavar="NAME", help="rows whose name contains it")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--gpu", action="store_true", help="rows for one GPU, by themselves")
    args = parser.parse_args()
    if args.gpu:
        if not torch.cuda.is_available() and not args.quick:
            parser.exit(2, "bench.py: --gpu: there is no GPU here, and no figure without one\n")
        return on_gpu(args.quick)
    chosen = [i for i, row in enumerate(ROWS) if args.only.lower() in row.name.lower()
              and not (args.quick and row.n > 4) and (args.only or row.name != "growth")]
    if not chosen:
        names = ", ".join(dict.fromkeys(row.name for row in ROWS))
        parser.exit(2, f"bench.py: --only {args.only} is in no row's name; try {names}\n")
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    world = max(ROWS[i].n for i in chosen)
    print(f"torch {torch.__version__}, {CORES} cores, {world} processes\n"
          f"{'row':26}{'n':>2}  {'size':19}{'ours ms':>9}{'peer ms':>9}{'ratio':>7}  "
          f"{'quartiles':>11}{'goal':>6}{'peak MB':>8}{'peer':>6}{'sent MB':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (world, chosen, args.quick, args.json, folder), world)


if __name__ == "__main__":
    main()
