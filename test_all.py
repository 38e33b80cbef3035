"""What is promised, as tests: `python test_all.py` or `pytest test_all.py`.

Any layout is the same computation. In float64 loss, every raw gradient, the global norm and the
weights after three steps equal those of a plain one-process loop (which shares nothing with the
parallel code but model.py) to 1e-10 of the tensor's own norm. Distributed tests run as functions
in one pool of 8 processes that serves the whole file.
"""

import gc
import graphlib
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import agreement
import checkpoint
import collectives as c
import context_parallel
import costs
import ddp
import draw
import expert_parallel
import export as export_file
import hardware
import here as here_file
import memory
import mesh as mesh_file
import model as model_file
import pictures
import pipeline
import plan
import processes
import published
import sample
import schedules
import search as search_file
import signals
import tensor_parallel
import tensorfile
import timeline
import train
import zero
from config import Config, check, check_layout, parse
from data import batches
from data import prepare as prepare_file
from data.batches import Data, load_tokenizer
from data.prepare import prepare
from group import CommunicationError, Group, Work, naming
from log import peak_of_process
from mesh import Mesh
from model import GPTConfig, build, causal_attention
from processes import init, shutdown
from sequence_parallel import Crossing
from shard import Shard, tag_whole
from tensorfile import CheckpointError
from weights import CONV1D, read_weights

# This file is imported where processes are forked from: CUDA is not to be touched there
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-10  # float64 has 16 digits; sums in another order cost a few of them
# All groups in NCCL's manner, on gloo: IN_ORDER=1 python test_all.py -k "equal or collective"
IN_ORDER = True if os.environ.get("IN_ORDER") else None
# FULL=1: what would take the file beyond six minutes, too: all layouts on queues, twenty kills, ...
FULL = bool(os.environ.get("FULL"))


def two_thirds(layouts):
    """Of them, or with FULL=1 all."""
    return [layout for i, layout in enumerate(layouts) if i % 3 or FULL]


needs_minutes = pytest.mark.skipif(not FULL, reason="only with FULL=1")


# ---- the pool: 8 processes, each waits for a function to run as one rank of a world ----


def _worker(rank, jobs, results):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Several ranks on one GPU: NCCL takes them for different machines
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    while True:
        number, fn, world, rendezvous, args = jobs.get()
        try:
            device = next((arg.device for arg in args if isinstance(arg, Config)), "cpu")
            init(device, 60, f"file://{rendezvous}", rank, world)
            value = fn(rank, *args)
            shutdown()
            results.put((number, rank, value, None))
        except BaseException:
            results.put((number, rank, None, traceback.format_exc()))
            shutdown(together=False)


def forkserver():
    """Processes start from one that has imported torch: in a tenth of a second."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "test_all"])
    return context


class Pool:
    def __init__(self):
        self.processes, self.number, self.folder = [], 0, tempfile.mkdtemp()

    def start(self, size=8):
        context = forkserver()
        self.results = context.SimpleQueue()
        self.jobs = [context.SimpleQueue() for _ in range(size)]
        self.processes = [context.Process(target=_worker, args=(r, q, self.results), daemon=True)
                          for r, q in enumerate(self.jobs)]
        for process in self.processes:
            process.start()

    def __call__(self, world, fn, *args, timeout=120):
        """Run fn(rank, *args) on ranks 0 .. world-1 and return the list of what they returned."""
        if not self.processes:
            self.start()
        self.number += 1
        for jobs in self.jobs[:world]:
            jobs.put((self.number, fn, world, f"{self.folder}/{self.number}", args))
        values, deadline = {}, time.time() + timeout
        while len(values) < world:
            if self.results._reader.poll(max(0, deadline - time.time())):
                number, rank, value, error = self.results.get()
                if error is None:
                    values[rank] = value
                    continue
                message = f"rank {rank} of {world}:\n{error}"
            else:
                message = f"ranks {set(range(world)) - set(values)} did not answer in {timeout} s"
            self.stop()
            raise AssertionError(message)
        return [values[r] for r in range(world)]

    def stop(self):
        for process in self.processes:
            process.kill()
        self.processes = []


pool = Pool()


@pytest.fixture(scope="session", autouse=True)
def _stop_pool():
    yield
    pool.stop()


# ---- collectives ----

SIZES = (0, 1, 2, 5, 8, 67)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)


def _mesh_group(world):
    return Mesh(dp=world, in_order=IN_ORDER).group("dp")


def _values(rank, n, dtype):  # small integers: exact in every dtype and in every order
    return (torch.arange(n) * (rank + 1) % 7 + rank).to(dtype)


def _all_collectives(rank, world):
    g = _mesh_group(world)
    for dtype, n in itertools.product(DTYPES, SIZES):
        every = [_values(r, n, dtype) for r in range(world)]
        total, chunk = sum(every), [x.tensor_split(world) for x in every]
        own = torch.stack(every).sum(0).to(dtype).tensor_split(world)[rank]
        for reduce in (c.plain_all_reduce, c.all_reduce, c.sequential_all_reduce,
                       c.parameter_server_all_reduce):
            assert torch.equal(reduce(every[rank].clone(), g), total), (reduce, dtype, n)
        x = every[rank].clone()
        c.all_reduce(x, g, "max")
        assert torch.equal(x, torch.stack(every).amax(0) if n else total)
        x = c.reduce_scatter(every[rank].clone(), g)
        assert torch.equal(x.tensor_split(world)[rank], own)
        gathered = torch.cat([chunk[r][r] for r in range(world)])
        assert torch.equal(c.all_gather(every[rank].clone(), g), gathered)
        for root in range(world):
            assert torch.equal(c.broadcast(every[rank].clone(), g, root), every[root])
            x = c.scatter(every[rank].clone(), g, root)
            assert torch.equal(x.tensor_split(world)[rank], chunk[root][rank])
            x, y = c.gather(every[rank].clone(), g, root), c.reduce(every[rank].clone(), g, root)
            assert rank != root or torch.equal(x, gathered) and torch.equal(y, total)
        out = [torch.empty_like(every[r]) for r in range(world)]
        c.all_to_all(out, [every[rank] + j for j in range(world)], g)
        assert all(torch.equal(out[r], every[r] + rank) for r in range(world))
        works = [c.all_reduce(every[rank].clone(), g, async_op=True) for _ in range(3)]
        assert all(work.wait() is None for work in works)
    c.barrier(g)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_collectives_equal_their_definition(world):
    pool(world, _all_collectives, world)


def _bytes_and_bits(rank, world, n):
    g, out = _mesh_group(world), {}
    for name in ("reduce_scatter", "all_gather", "all_reduce"):
        g.bytes_sent = 0
        x = getattr(c, name)(torch.randn(n, generator=torch.Generator().manual_seed(rank)), g)
        out[name] = g.bytes_sent
    return out, x


@pytest.mark.parametrize("world,n", [
    (2, 1000), (3, 1000), (4, 1), (4, 3), (4, 1000), (8, 1000), (2, 1 << 20), (8, 1 << 20)])
def test_ring_sends_the_formula_and_replicas_get_the_same_bits(world, n):
    got = pool(world, _bytes_and_bits, world, n)
    size = [len(part) * 4 for part in torch.arange(n).tensor_split(world)]
    for r, (sent, x) in enumerate(got):
        # all but one chunk each; the ring's total is exactly 2 (N-1) times the bytes
        assert sent["reduce_scatter"] == 4 * n - size[r]
        assert sent["all_gather"] == 4 * n - size[(r + 1) % world]
        if n % world == 0 or world & (world - 1):  # a butterfly cuts odd sizes otherwise
            assert sent["all_reduce"] == sent["reduce_scatter"] + sent["all_gather"]
        assert torch.equal(x, got[0][1])
    assert sum(sent["all_reduce"] for sent, _ in got) == 2 * (world - 1) * 4 * n


def _plain_and_fast(rank, world, n):
    g = _mesh_group(world)
    x = torch.randn(n, generator=torch.Generator().manual_seed(rank))
    plain, fast = c.plain_all_reduce(x.clone(), g), x.clone()
    c.ring(fast, g, "sum", range(2 * world - 2))
    return torch.equal(plain, fast)


@pytest.mark.parametrize("world,n", [(2, 5), (3, 1000), (4, 3 << 20), (6, 67)])
def test_the_fast_ring_has_the_bits_of_the_plain_one(world, n):
    assert pool(world, _plain_and_fast, world, n) == [True] * world


def _behind_a_ring(rank, world):
    """What every other collective gives when a ring is still under way in its group."""
    g, n = _mesh_group(world), 1 << 20  # 4 MB: hundreds of messages' time
    for _ in range(3):
        big = torch.full((n,), 1.0)
        work = c.all_reduce(big, g, async_op=True)
        rows = [torch.zeros(1) for _ in range(world)]
        c.all_to_all(rows, [torch.tensor([10.0 * rank + j]) for j in range(world)], g)
        assert torch.cat(rows).tolist() == [10.0 * r + rank for r in range(world)]
        again = c.all_reduce(torch.full((n,), 1.0), g, async_op=True)
        part = c.scatter(torch.arange(float(world)), g, 1)[rank].item()
        all_of_it = c.gather(torch.full((world,), float(rank)), g, 1)
        assert part == rank and (rank != 1 or all_of_it.tolist() == [*range(world)])
        work.wait()
        again.wait()
        assert torch.equal(big, torch.full((n,), float(world)))
    return True


def test_no_collective_overtakes_earlier_work_of_its_group():
    assert pool(3, _behind_a_ring, 3) == [True] * 3


def _operations(rank, world):
    g = _mesh_group(world)
    c.all_reduce(torch.ones(1000), g)
    return g.sequence


@pytest.mark.parametrize("world,hops", [(2, 1), (3, 4), (4, 3), (8, 5)])
def test_small_all_reduces_take_few_hops(world, hops):
    apart = 0 if world == 3 else 1  # of a butterfly's first hop, send and receive are one operation
    assert pool(world, _operations, world) == [2 * hops - apart] * world


def _mesh(rank, outer, **sizes):
    mesh = Mesh(**sizes)
    groups = [mesh.group(axis) for axis in mesh.sizes]
    groups += [mesh.ends("pp"), mesh.group("pp", "tp"), mesh.group(outer, "tp"), mesh.world]
    assert all(mesh.place(axis)[0] == mesh.group(axis).rank for axis in sizes)
    return {group.name: group.ranks for group in groups}


def test_groups_vary_one_coordinate_t_innermost():
    got = pool(8, partial(_mesh, dp=2, pp=2, tp=2), "dp")
    assert got[5] == {"dp": [1, 5], "pp": [5, 7], "tp": [4, 5], "pp_ends": [5, 7],
                      "pp_tp": [4, 5, 6, 7], "dp_tp": [0, 1, 4, 5], "world": [*range(8)]}
    got = pool(8, partial(_mesh, pp=2, cp=2, tp=2), "cp")
    assert got[5] == {"pp": [1, 5], "cp": [5, 7], "tp": [4, 5], "pp_ends": [1, 5],
                      "pp_tp": [0, 1, 4, 5], "cp_tp": [4, 5, 6, 7], "world": [*range(8)]}
    got = pool(6, partial(_mesh, dp=1, pp=3, tp=2), "dp")
    assert [groups["pp_ends"] for groups in got] == [[0, 4], [1, 5], [2], [3], [0, 4], [1, 5]]


# ---- equivalence: any layout against one process ----

SHAPE = {"n_layer": 5, "n_head": 12, "n_embd": 24, "block_size": 8}
VOCAB = 67  # divides by no T
STEPS, BATCH = 3, 36


def random_corpus(folder, **tokens):
    rng = np.random.default_rng(0)
    for split, n in tokens.items():
        rng.integers(0, VOCAB, n).astype("<u2").tofile(folder / f"{split}.bin")
    meta = {"vocab_size": VOCAB, "tokenizer": "bytes", "bytes_per_token": 1.0}
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return random_corpus(tmp_path_factory.mktemp("corpus"), train=5000, val=700)


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory):
    return random_corpus(tmp_path_factory.mktemp("corpus"), train=9000, val=9000)


def config(corpus, **flags):
    base = dict(SHAPE, data=corpus, dtype="float64", batch_size=BATCH, steps=STEPS, lr=1e-2,
                dp=1, chunks=1, warmup_steps=1, grad_clip=0.2, device="cpu", eval_interval=0,
                out=tempfile.gettempdir())
    return Config(**{**base, **flags})


def sizes_of(cfg):
    return {"dp": cfg.dp // cfg.ep, "ep": cfg.ep, "pp": cfg.pp, "cp": cfg.cp, "tp": cfg.tp}


def mesh_of(cfg, in_order=IN_ORDER):
    return Mesh(cfg.device, native=cfg.collectives == "native", in_order=in_order, **sizes_of(cfg))


_reference = {}


def reference(corpus, **flags):
    """The plain loop: GPT, autograd, clip_grad_norm_, AdamW on whole batches."""
    key = tuple(sorted(flags.items()))
    if key in _reference:
        return _reference[key]
    cfg = config(corpus, microbatches=1, **flags)
    shape = GPTConfig(VOCAB, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.experts,
                      cfg.top_k)
    model = build(shape, cfg.seed, torch.double)
    names = dict(model.canonical_parameters())
    matrices = [n for n, p in names.items() if p.dim() >= 2 and n.endswith("weight")]
    decay = [{"params": [names[n] for n in matrices], "weight_decay": 0.1},
             {"params": [p for n, p in names.items() if n not in matrices], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay, betas=(cfg.beta1, cfg.beta2))
    data, trace = Data(cfg), [{"weights": {n: p.detach().clone() for n, p in names.items()}}]
    for step in range(STEPS):
        ((ids, targets),) = data.training(cfg, step, Mesh(dp=1))
        loss = model(ids, targets) / targets.numel()
        optimizer.zero_grad()
        loss.backward()
        blocks = model.layers[1:-1]
        loss = loss - (model_file.extra_loss(blocks) or 0.0) / targets.numel()
        balance = sum(block.mlp.balance.item() for block in blocks) / targets.numel() / len(
            blocks) if cfg.experts else None
        grads = {n: p.grad.clone() for n, p in names.items()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip).item()
        assert norm > cfg.grad_clip, "clipping must fire"
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(cfg, step)
        optimizer.step()
        trace.append({"loss": loss.item(), "norm": norm, "grads": grads, "balance": balance,
                      "weights": {n: p.detach().clone() for n, p in names.items()}})
    return _reference.setdefault(key, trace)


def bare(shard):
    """A tag without its groups, which cannot go from process to process."""
    return replace(shard, shared_by=(), sum_over=())


def local_tensors(trainer, kind):
    """[(tag, this rank's whole tensor)] of weights or gradients, gathered over ZeRO's shards."""
    found = []
    for bucket in trainer.reducer.buckets:
        shard = bucket.weight_shard if kind == "weights" else bucket.grad_shard
        flat = shard.new_zeros(bucket.numel)
        flat[bucket.offset : bucket.offset + shard.numel()] = shard
        if bucket.shards > 1:
            c.all_gather(flat, bucket.group)
        found += [(bare(p.shard), bucket.view(flat.cpu(), p)) for p in bucket.params]
    return found


def _train(rank, cfg, steps=STEPS, mesh=None):
    mesh = mesh or mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    trace = [{"weights": local_tensors(trainer, "weights")}]
    for step in range(steps):
        loss, norm = trainer.gradients(data.training(cfg, step, mesh))
        grads = local_tensors(trainer, "grads")
        trainer.update(norm, train.learning_rate(cfg, step))
        trace.append({"loss": loss, "norm": norm, "grads": grads,
                      "balance": trainer.routing.balance,
                      "weights": local_tensors(trainer, "weights")})
    trace[0]["agree"] = trainer.replicas_agree()
    return trace


def train_with(rank, cfg, owner, name, value):
    """_train, with something else in the place of what a module or class has under a name."""
    kept = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        return _train(rank, cfg)
    finally:
        setattr(owner, name, kept)


def assemble(per_rank):
    """{name: full tensor} from every rank's shards; what is held twice must have the same bits."""
    full = {}
    for tag, local in itertools.chain(*per_rank):
        tensor = full.setdefault(tag.name, torch.full(tag.shape, math.nan, dtype=local.dtype))
        sizes = [b - a for a, b in tag.ranges]
        assert local.narrow(tag.dim, sum(sizes), local.size(tag.dim) - sum(sizes)).eq(0).all()
        local = local.narrow(tag.dim, 0, sum(sizes))
        for (a, b), part in zip(tag.ranges, local.split(sizes, tag.dim), strict=True):
            place = tensor.narrow(tag.dim, a, b - a)
            assert place.isnan().all() or torch.equal(place, part), f"copies of {tag.name} differ"
            place.copy_(part)
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full


def close(got, want, what):
    """AssertionError unless two tensors, or numbers, are the same but for rounding of float64."""
    got, want = (torch.as_tensor(x, dtype=torch.double) for x in (got, want))
    error, size = (got - want).norm().item(), want.norm().item()
    # a gradient that is zero in exact arithmetic (attention's key bias) is compared absolutely
    assert error <= TOLERANCE * max(size, 1e-3), f"{what}: off by {error:.1e} of {size:.1e}"


def same_model(cfg):
    names = ("n_layer", "n_head", "n_embd", "block_size", "experts", "top_k")
    return {name: getattr(cfg, name) for name in names}


def matches(cfg, got, step, kinds, want):
    """AssertionError unless what all ranks have of a step is what one process has."""
    for trace in got:
        for name in ("loss", "norm", *["balance"] * bool(cfg.experts)):
            close(trace[step][name], want[step][name], name)
    for kind in kinds:
        full = assemble([trace[step][kind] for trace in got])
        assert full.keys() == want[step][kind].keys()
        for name, value in want[step][kind].items():
            close(full[name], value, f"step {step} {kind} {name}")


def equals_one_process(corpus, run=_train, *args, **flags):
    cfg = config(corpus, **flags)
    world = check(cfg, 1) if cfg.device == "cpu" else check_layout(cfg, 1)
    got = pool(world, run, cfg, *args)
    want = reference(corpus, **same_model(cfg))
    weights = assemble([trace[0]["weights"] for trace in got])
    for name, value in want[0]["weights"].items():
        assert torch.equal(weights[name], value), f"initial {name} differs"
    for step in range(1, STEPS + 1):
        matches(cfg, got, step, ("grads", "weights"), want)
    assert all(trace[0]["agree"] for trace in got), "replicas disagree"


LAYOUTS = [  # dp, tp, pp, schedule, microbatches
    (1, 1, 1, "gpipe", 1), (1, 1, 1, "1f1b", 4), (3, 1, 1, "1f1b", 2), (2, 1, 1, "gpipe", 1),
    (2, 2, 1, "1f1b", 3), (1, 2, 1, "gpipe", 1), (1, 3, 1, "1f1b", 1), (1, 4, 1, "1f1b", 2),
    (1, 1, 2, "1f1b", 1), (1, 3, 2, "1f1b", 4), (1, 3, 2, "gpipe", 2), (1, 1, 4, "1f1b", 2),
    (1, 1, 4, "1f1b", 4), (1, 1, 4, "1f1b", 9), (1, 1, 4, "gpipe", 3), (2, 2, 2, "1f1b", 3),
    (2, 2, 2, "gpipe", 2), (1, 2, 4, "1f1b", 6), (1, 2, 4, "gpipe", 9), (2, 1, 4, "1f1b", 2),
    (4, 1, 2, "1f1b", 9), (8, 1, 1, "1f1b", 1) if BATCH % 8 == 0 else (6, 1, 1, "1f1b", 2),
]


@pytest.mark.parametrize("dp,tp,pp,schedule,m", two_thirds(LAYOUTS))
def test_layout_equals_one_process(corpus, dp, tp, pp, schedule, m):
    equals_one_process(corpus, dp=dp, tp=tp, pp=pp, schedule=schedule, microbatches=m)


SCHEDULE_LAYOUTS = [  # schedule, chunks, dp, tp, pp, m, zero, n_layer
    ("interleaved", 2, 1, 1, 2, 4, 0, 5), ("interleaved", 3, 1, 1, 2, 2, 0, 5),
    ("interleaved", 2, 1, 1, 3, 9, 0, 5), ("interleaved", 3, 1, 1, 4, 4, 0, 10),
    ("interleaved", 2, 2, 2, 2, 6, 1, 5), ("interleaved", 2, 2, 1, 2, 2, 3, 5),
    ("interleaved", 2, 1, 1, 1, 3, 2, 5),
    *((name, 1, 1, 1, P, m, 0, 5) for name in ("zb-h1", "zb-h2")
      for P, m in ((2, 1), (3, 3), (4, 9))),
    *((name, 1, 2, 2, 2, 3, zero, 5)
      for name, zero in (("zb-h1", 2), ("zb-h2", 3), *[("zb-h1", 0)] * FULL)),
    ("zb-h1", 1, 3, 1, 2, 4, 1, 5), ("zb-h1", 1, 1, 1, 1, 4, 0, 5),
    *(("zb-v", 2, 1, 1, P, m, 0, n) for P, m, n in ((2, 1, 5), (2, 4, 5), (3, 6, 5), (4, 9, 6))),
    *(("zb-v", 2, 2, T, 2, 3, zero, 5) for T, zero in ((2, 2), (1, 3), *[(2, 0), (1, 1)] * FULL)),
    ("zb-v", 2, 1, 1, 1, 2, 3, 5),
]


@pytest.mark.parametrize("schedule,chunks,dp,tp,pp,m,zero,n_layer", two_thirds(SCHEDULE_LAYOUTS))
def test_schedule_equals_one_process(corpus, schedule, chunks, dp, tp, pp, m, zero, n_layer):
    equals_one_process(corpus, schedule=schedule, chunks=chunks, dp=dp, tp=tp, pp=pp,
                       microbatches=m, zero=zero, n_layer=n_layer, recompute=zero == 3)


ZERO_LAYOUTS = [  # zero, dp, tp, pp, microbatches, recompute
    *((zero, dp, 1, 1, m, m == 4) for zero in (1, 2, 3)
      for dp, m in ((1, 4), (2, 1), (3, 4), (4, 3))),
    *((zero, 2, 2, 1, 3, False) for zero in (1, 2, 3)),
    *((zero, 2, 1, 2, 3, False) for zero in (1, 2, 3)),
    *((zero, 2, 2, 2, 3, True) for zero in (1, 2, 3)),
    (0, 1, 2, 2, 4, True),
]


@pytest.mark.parametrize("zero,dp,tp,pp,m,recompute", two_thirds(ZERO_LAYOUTS))
def test_zero_equals_one_process(corpus, zero, dp, tp, pp, m, recompute):
    odd = {"n_embd": 25, "n_head": 5} if tp == 1 else {}  # D divides few of these layers' sizes
    equals_one_process(corpus, zero=zero, dp=dp, tp=tp, pp=pp, microbatches=m,
                       recompute=recompute, **odd)


@pytest.mark.parametrize("flags", [{"dp": 3}, {"dp": 2, "zero": 3, "tp": 2}], ids=str)
def test_the_librarys_collectives_give_the_same(corpus, flags):
    equals_one_process(corpus, collectives="native", microbatches=2, **flags)


@pytest.mark.parametrize("flags", [
    {}, {"dp": 2, "tp": 2, "zero": 3, "recompute": True}, {"tp": 3, "pp": 2, "schedule": "zb-h1"},
    {"tp": 2, "pp": 2, "sp": True, "schedule": "zb-v", "dp": 2, "zero": 2}], ids=str)
def test_rows_that_pad_the_vocabulary_are_not_there(corpus, tmp_path, flags):
    """67 tokens: 80, or 2 x 40, or 3 x 32 rows."""
    equals_one_process(corpus, pad_vocab=8 if "tp" in flags else 16, microbatches=3, **flags)


def _plain_layers(rank, cfg):
    plain = partial(train.parallelize, plan=tensor_parallel.PLAIN)
    return train_with(rank, cfg, train, "parallelize", plain)


@pytest.mark.parametrize("flags", [{"tp": 3}, {"tp": 2, "pp": 2, "microbatches": 3}], ids=str)
def test_the_plain_tensor_parallel_layers_give_the_same(corpus, flags):
    equals_one_process(corpus, _plain_layers, **flags)


PLAIN_SHAPE = GPTConfig(VOCAB, block_size=8, n_layer=4, n_head=2, n_embd=12)


def _ids(n):
    return torch.randint(VOCAB, (n, 8), generator=torch.Generator().manual_seed(0))


def _plain_data_parallel(rank, world):
    group, ids = _mesh_group(world), _ids(2 * world)
    alone, mine = (build(PLAIN_SHAPE, dtype=torch.double) for _ in range(2))
    alone(ids, ids).backward()
    part = ids.chunk(world)[rank]
    mine(part, part).backward()
    ddp.plain_data_parallel(mine.parameters(), group)
    for p, q in zip(mine.parameters(), alone.parameters(), strict=True):
        close(p.grad, q.grad, "gradient")


def test_plain_data_parallelism_equals_one_process():
    pool(3, _plain_data_parallel, 3)


def _plain_zero(rank, world):
    """Three steps, the flat parameters padded so that they can be cut."""
    group, ids = _mesh_group(world), _ids(2 * world)
    alone, mine = (build(PLAIN_SHAPE, dtype=torch.double) for _ in range(2))
    whole = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1)
    flat = torch.nn.utils.parameters_to_vector(mine.parameters()).detach()
    length = len(flat)
    flat = torch.nn.functional.pad(flat, (0, -length % world))
    own = torch.nn.Parameter(c.own_chunk(flat, group))
    optimizer = torch.optim.AdamW([own], lr=0.01, weight_decay=0.1)

    def step(weights, grad):
        own.grad = grad
        optimizer.step()
        assert weights.data_ptr() == own.data_ptr()

    for _ in range(3):
        whole.zero_grad()
        alone(ids, ids).backward()
        whole.step()
        mine.zero_grad()
        part = ids.chunk(world)[rank]
        mine(part, part).backward()
        grad = torch.nn.utils.parameters_to_vector([p.grad for p in mine.parameters()])
        zero.plain_zero_step(flat, torch.nn.functional.pad(grad, (0, -length % world)), group, step)
        torch.nn.utils.vector_to_parameters(flat[:length], mine.parameters())
    for p, q in zip(mine.parameters(), alone.parameters(), strict=True):
        close(p.detach(), q.detach(), "weights")
    assert optimizer.state[own]["exp_avg"].numel() == -(-length // world)


def test_the_plain_zero_step_equals_adamw_on_everything():
    pool(3, _plain_zero, 3)


class _Adds(pipeline.Stage):
    """A stage before the last that has something to add to the loss."""

    def forward(self, x, targets):
        y, loss = super().forward(x, targets)
        return (y, y.square().sum()) if loss is None else (y, loss)


def _plain_pipeline(rank, P, m, name):
    """A pipeline's gradients against one process's; `name` plain, or a schedule whose stages all
    add to the loss."""
    mesh, rows = Mesh(pp=P), _ids(m).unsqueeze(1)
    group = mesh.group("pp")
    batches, tokens = [(ids, ids) for ids in rows], rows.numel()
    alone, mine = (build(PLAIN_SHAPE, dtype=torch.double) for _ in range(2))
    cuts = schedules.cut(PLAIN_SHAPE.layer_costs(), P)
    kind = pipeline.Stage if name == "plain" else _Adds
    total = 0.0
    for ids, targets in batches:
        x = ids
        for a, b in cuts:
            x, loss = kind(alone.layers[a:b])(x, targets)
            total = total + (0.0 if loss is None else loss / tokens)
    total.backward()
    a, b = cuts[rank]
    if name == "plain":
        loss = pipeline.plain_1f1b(kind(mine.layers[a:b]), group, batches, (1, 8, 12), tokens)
    else:
        deferred, where = pipeline.Deferred(), schedules.placement(name, P)
        mine.layers = mine.layers[a:b]
        tag_whole(mine, group)
        tensor_parallel.parallelize(mine, Group(mesh, "solo", [0], 0), put_off=deferred.add)
        values = dict(zip(mine.parameters(), alone.layers[a:b].parameters(), strict=True))
        for p, q in values.items():
            p.data.copy_(q.data)
        actions = schedules.lower(schedules.make_schedule(name, P, m), where)[rank]
        pipe = pipeline.Pipeline({rank: kind(mine.layers)}, where, group, (1, 8, 12), torch.double,
                                 pipeline.NoReducer(), deferred)
        loss = pipe.execute(actions, batches, tokens).item()
    loss = c.all_reduce(torch.tensor(loss, dtype=torch.double), group)
    close(loss, total.detach(), "loss")
    for p, q in zip(mine.layers[a:b].parameters() if name == "plain" else mine.parameters(),
                    alone.layers[a:b].parameters(), strict=True):
        if p.size(0) != VOCAB:  # the ends of the tied embedding hold a term each
            close(p.grad, q.grad, "gradient")


@pytest.mark.parametrize("P,m,name", [(1, 2, "plain"), (3, 1, "plain"), (3, 7, "plain"),
                                      (3, 4, "1f1b"), (3, 4, "zb-h1")])
def test_plain_pipelines_and_stages_that_add_to_the_loss_equal_one_process(P, m, name):
    pool(P, _plain_pipeline, P, m, name)


def _in_order(rank, cfg):
    """As on NCCL: sends and receives leave as one operation, and no receive is posted early."""
    return _train(rank, cfg, mesh=mesh_of(cfg, in_order=True))


@pytest.mark.parametrize("flags", [
    {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4, "dp": 3},
    {"cp": 2, "tp": 2, "sp": True, "cp_attention": "all-to-all", "zero": 3}], ids=str)
def test_nccls_manner_gives_the_same(corpus, flags):
    """Two of what IN_ORDER=1 does with all."""
    equals_one_process(corpus, _in_order, **{"microbatches": 3, **flags})


# ---- NCCL's manner, on a transport that has nothing else ----


class Deadlock(AssertionError):
    pass


class Queues:
    """One first-in-first-out queue per rank and group, no tags, sends that block until received:
    what may be relied on with NCCL. Ranks are threads. `posted` has what each rank posted, in its
    order, as (group, index); `matched` the pairs of operations that met."""

    def __init__(self, patience=20.0):
        self.lock, self.queues = threading.Lock(), {}
        self.posted, self.matched = {}, []
        self.patience = patience  # seconds without any progress: a deadlock, as nobody computes

    def post(self, group, ends):
        """ends: [("send" or "recv", tensor, peer)]. Returns a Work."""
        with self.lock:
            key = group.name, *group.ranks
            queues = self.queues.setdefault(key, [[] for _ in group.ranks])
            mine = self.posted.setdefault(group.ranks[group.rank], [])
            name = (key, group.rank, group.sequence)
            mine.append(name)
            op = SimpleNamespace(name=name, ends=list(ends), done=threading.Event())
            queues[group.rank].append(op)
            while any(self.meet(queues, r) for r in range(len(queues))):
                pass

        def wait():
            before = -1
            while not op.done.is_set() and before < len(self.matched):
                before = len(self.matched)
                op.done.wait(self.patience)
            with self.lock:
                if op.ends:
                    left = [(kind, group.ranks[peer]) for kind, _, peer in op.ends]
                    raise Deadlock(f"rank {group.ranks[group.rank]} in {op.name}: {left}")

        return SimpleNamespace(wait=wait, is_completed=lambda: not op.ends)

    def meet(self, queues, rank):
        """Let one send at the head of a queue meet a receive at the head of another."""
        if not queues[rank]:
            return False
        out = queues[rank][0]
        for kind, tensor, peer in out.ends:
            into = queues[peer][0] if kind == "send" and queues[peer] else None
            for end in into.ends if into else ():
                if (end[0], end[2]) == ("recv", rank):
                    assert end[1].numel() == tensor.numel(), "messages in another order"
                    end[1].copy_(tensor.view_as(end[1]))
                    self.matched.append((out.name, into.name))
                    out.ends.remove(next(e for e in out.ends if e[1] is tensor and e[2] == peer))
                    into.ends.remove(end)
                    for r in (rank, peer):
                        if not queues[r][0].ends:
                            queues[r].pop(0).done.set()
                    return True
        return False


class QueueGroup(Group):
    """Submitted work is posted by the host at once, as on CUDA, and here even waited for."""

    def post(self, ends):
        kinds = {torch.distributed.isend: "send", torch.distributed.irecv: "recv"}
        ends = [(kinds[op], tensor, peer) for op, tensor, peer in ends]
        parts = [ends] if self.in_order else [[end] for end in ends]
        return [self.queues.post(self, part) for part in parts if part]

    def submit(self, job, name):
        job()
        return Work()


class QueueMesh(Mesh):
    def __init__(self, queues, rank, **sizes):
        self.sizes, self.device, self.native = sizes, torch.device("cpu"), False
        self.timeout, self.in_order, self.posted = 60, True, None
        self.queues, self.rank, self.groups = queues, rank, {}
        self.world = self.join("world", [list(range(math.prod(sizes.values())))])

    def join(self, name, rows):
        if name not in self.groups:
            row = next((row for row in rows if self.rank in row), [self.rank])
            self.groups[name] = QueueGroup(self, name, row, row.index(self.rank))
            self.groups[name].queues = self.queues
        return self.groups[name]


def on_queues(cfg, run, queues=None):
    """[run(rank, cfg, mesh)] of ranks that are threads, and the Queues that they used."""
    sizes, queues = sizes_of(cfg), queues or Queues()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(math.prod(sizes.values())) as ranks:
        jobs = [ranks.submit(run, rank, cfg, QueueMesh(queues, rank, **sizes))
                for rank in range(math.prod(sizes.values()))]
    return [job.result() for job in jobs], queues


def one_order(queues):
    """Whether all operations can be put into one order that is every rank's. Those that meet are
    one: each waits for the other. Then no choice of streams can make ranks wait in a circle."""
    met = {}

    def root(name):
        while met.setdefault(name, name) != name:
            name = met[name]
        return name

    for a, b in queues.matched:
        met[root(a)] = root(b)
    after = {}
    for names in queues.posted.values():
        for a, b in itertools.pairwise(map(root, names)):
            after.setdefault(b, set()).add(a)
    try:
        graphlib.TopologicalSorter(after).prepare()
    except graphlib.CycleError:
        return False
    return True


def _step(rank, cfg, mesh):
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    loss, norm = trainer.gradients(data.training(cfg, 0, mesh))
    grads = local_tensors(trainer, "grads")
    trainer.update(norm, cfg.lr)
    if cfg.zero == 3:
        trainer.validation_loss(data, 1)
    assert trainer.replicas_agree()
    return [{}, {"loss": loss, "norm": norm, "grads": grads, "balance": trainer.routing.balance}]


AXES = ({"dp": 2, "pp": 2, "tp": 2}, {"dp": 1, "pp": 2, "cp": 2, "tp": 2, "sp": True},
        {"dp": 2, "ep": 2, "pp": 2, "cp": 2, "experts": 4})
# Every second schedule and ZeRO stage with one of these; with FULL=1 every one with each
QUEUE_LAYOUTS = [{"schedule": name, "chunks": v, "zero": zero, **more}
                 for i, (name, v) in enumerate((("gpipe", 1), ("1f1b", 1), ("interleaved", 2),
                                                ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)))
                 for zero in range(4) for j, more in enumerate(AXES)
                 if FULL or ((i + zero) % 3 == j and (i + zero // 2) % 2)]


@pytest.mark.parametrize("flags", QUEUE_LAYOUTS, ids=lambda flags: " ".join(
    f"{k} {v}" for k, v in flags.items()))
def test_first_in_first_out_queues_without_tags_are_enough(corpus, flags):
    """Equal to one process; and all that ranks post can be put into one order."""
    cfg = config(corpus, microbatches=4, batch_size=8, **flags)
    check(cfg, 1)
    got, queues = on_queues(cfg, _step)
    matches(cfg, got, 1, ("grads",), reference(corpus, batch_size=8, **same_model(cfg)))
    assert one_order(queues)


def _ahead(rank, cfg, mesh):
    """As on gloo: the pipeline posts a receive one ahead of its list."""
    mesh.group("pp").in_order = False
    return _step(rank, cfg, mesh)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_receive_posted_ahead_would_deadlock_on_nccl(corpus, schedule):
    cfg = config(corpus, microbatches=4, batch_size=4, pp=2, schedule=schedule)
    with pytest.raises(Deadlock):
        on_queues(cfg, _ahead, Queues(patience=1.0))


class OnAStream(QueueGroup):
    """A wait holds the stream: this thread goes on."""

    def post(self, ends):
        return [SimpleNamespace(wait=lambda: None, is_completed=work.is_completed)
                for work in super().post(ends)]


def test_a_dead_peer_is_noticed_where_the_host_waits_for_the_device():
    queues, meshes = Queues(), []
    for rank in range(3):
        mesh = QueueMesh(queues, rank, dp=3)
        mesh.posted, mesh.timeout = deque(), 0.3
        mesh.world = OnAStream(mesh, "world", range(3), rank)
        mesh.world.queues = queues
        meshes.append(mesh)
    x, world = torch.zeros(4), [mesh.world for mesh in meshes]
    for group in world:
        c.reduce_scatter(x, group)
    assert world[0].read(torch.arange(3)) == [0, 1, 2] and not meshes[0].posted
    for group in world[:2]:  # rank 2 has died
        c.reduce_scatter(x, group)
    for rank in range(2):
        start = time.time()
        with pytest.raises(CommunicationError) as error:
            world[rank].read(x)
        assert str(error.value) == (
            f"rank {rank}: operation 3 of group world, receive from rank {(rank - 1) % 3}, "
            f"send to rank {(rank + 1) % 3}: not done within 0.3 s")
        assert 0.3 <= time.time() - start < 0.6


def test_two_groups_used_in_opposite_orders_have_no_one_order():
    queues = Queues()
    queues.posted = {0: ["a0", "b0"], 1: ["b1", "a1"]}
    queues.matched = [("a0", "a1"), ("b0", "b1")]
    assert not one_order(queues)
    queues.posted[1].reverse()
    assert one_order(queues)


def _compiled(rank, cfg):
    eager = partial(torch.compile, backend="aot_eager")
    return train_with(rank, cfg, torch, "compile", eager)


@pytest.mark.parametrize("flags", [
    {"tp": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 4},  # puts weight gradients off
    {"dp": 2, "zero": 3, "microbatches": 2, "ep": 2, "experts": 4},  # weights come and go
    pytest.param({"cp": 2, "tp": 2, "sp": True}, marks=needs_minutes)], ids=str)
def test_compiled_layers_give_the_same(corpus, flags):
    equals_one_process(corpus, _compiled, compile=True, **flags)


def _memory(rank, cfg):
    """Bytes of the states against the formula, and the most that a step holds beyond them."""
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    batch = data.training(cfg, 0, mesh)
    for _ in range(2):
        _, norm = trainer.gradients(batch)
        trainer.update(norm, 1e-3)
    formula, measured = trainer.optimizer.state_bytes()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        trainer.gradients(batch)
    memory = [e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]"]
    layers = {}
    for i, layer in enumerate(trainer.stages[0].layers):
        buckets = {trainer.reducer.home[p] for p in layer.parameters()}
        layers[i] = sum(b.full.nbytes for b in buckets)
    empty = all(b.full.untyped_storage().nbytes() == 0 for b in trainer.reducer.buckets)
    return formula, measured, max(itertools.accumulate(memory)), layers, empty


@pytest.mark.parametrize("dtype,schedule,recompute", [
    ("float32", "1f1b", False), ("bfloat16", "1f1b", True), ("float32", "zb-h1", False),
    *[("float32", "1f1b", True), ("bfloat16", "1f1b", False)] * FULL])
def test_memory_held_is_the_formula_and_the_peak_what_the_stage_allows(
        corpus, dtype, schedule, recompute):
    """Wide and short, so that weights and gradients outweigh activations. 125: there is padding."""
    flags = {"dp": 4, "n_embd": 125, "n_head": 5, "n_layer": 6, "block_size": 4, "batch_size": 8,
             "dtype": dtype, "recompute": recompute, "microbatches": 2, "schedule": schedule}
    width = 2 if dtype == "bfloat16" else 4
    beyond = {}
    for stage in range(4):
        got = pool(4, _memory, config(corpus, zero=stage, **flags))
        for formula, measured, _, _, empty in got:
            assert measured == formula
            assert empty == (stage == 3)
        layers = got[0][3]
        beyond[stage] = max(peak for _, _, peak, _, _ in got)
    psi = sum(layers.values()) // width - layers[0] // width  # the tied weight is in two layers
    gathered = max(layers[i] + layers[i + 1] for i in range(len(layers) - 1))
    grads = max(layers.values())
    if schedule == "zb-h1":  # those of LayerNorm, row biases and embedding come with I, wait for W
        grads += (6 * 6 + 2) * 125 * width + layers[0]
    # a step of stage 0 shows what activations and autograd's own temporaries take
    assert beyond[2] <= beyond[0] + grads
    assert beyond[3] <= beyond[0] + gathered + grads
    assert gathered + 2 * grads < psi * width, "the bound must be able to fail"


@pytest.mark.parametrize("gb,psi", [
    ({1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
      256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)}, 7.5e9),
    ({1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000),
      64: (4187, 2218, 250), 256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)}, 1e12)])
def test_bytes_per_parameter_are_the_published_ones(gb, psi):
    """ZeRO, arXiv 1910.02054, table 1: its digits are rounded or cut."""
    for ranks, row in gb.items():
        for stage, want in zip((1, 2, 3), row, strict=True):
            got = psi * sum(zero.bytes_per_parameter(stage, ranks)) / 1e9
            assert abs(got - want) < (1 if want > 1000 else 0.06)


def _zero_bytes(rank, cfg):
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    _, norm = trainer.gradients(data.training(cfg, 0, mesh))
    trainer.update(norm, 1e-3)
    units = {b: b.full.numel() * 8 for b in trainer.reducer.buckets}
    first, last = (trainer.stages[0].layers[i] for i in (0, -1))
    tied, wpe = (units[trainer.reducer.home[p]] for p in (last.lm_head.weight, first.wpe.weight))
    return mesh.group("dp", "ep", "cp").bytes_sent, sum(units.values()), tied, wpe


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("D,m", [(2, 1), (4, 3)])
def test_zero_sends_the_formula(corpus, stage, D, m):
    got = pool(D, _zero_bytes, config(corpus, zero=stage, dp=D, microbatches=m))
    total, psi, tied, wpe = (sum(column) for column in zip(*got, strict=True))
    psi, tied, wpe = psi // D, tied // D, wpe // D
    # Stage 3: 3 Psi, but for the layer of the token ids, whose backward reads no weights, and the
    # tied weight, which embedding and head gather each for themselves in forward
    want = {0: 2 * psi, 1: 2 * psi, 2: (1 + m) * psi, 3: m * (3 * psi + tied - wpe)}[stage]
    assert total == (D - 1) * want


def _overlap(rank, cfg):
    """(spans of a step, times of the launched reductions, whether each layer's forward began with
    the gathering of the next layer's weights under way)"""
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    tracer, ahead = timeline.Tracer(mesh), []
    if cfg.zero == 3:
        layers = list(trainer.stages[0].layers)
        for layer, following in itertools.pairwise(layers):
            bucket = trainer.reducer.home[next(iter(following.parameters()))]
            layer.register_forward_pre_hook(lambda *_, b=bucket: ahead.append(
                b in trainer.reducer.gathered))
    launched, launch = [], trainer.reducer.launch
    trainer.reducer.launch = lambda bucket: (launched.append(time.time()), launch(bucket))
    loss_under_way, finish = [], trainer.reducer.finish
    trainer.reducer.finish = lambda: (loss_under_way.append(bool(mesh.world.last.waits)), finish())
    trainer.trace(tracer, 0, on=True)
    trainer.gradients(data.training(cfg, 0, mesh))
    return tracer.events, launched, ahead, loss_under_way


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_reductions_start_while_backward_runs_and_weights_are_gathered_ahead(corpus, zero):
    cfg = config(corpus, dp=3, zero=zero, microbatches=2, bucket_mb=0.02)
    got = pool(3, _overlap, cfg)  # two ranks would start reductions this small from the main lane
    for events, launched, ahead, loss_under_way in got:
        assert loss_under_way == [True]  # while the gradients are waited for
        start, end = [e for e in events if e[0] == "B"][-1][2:4]
        launched = [t for t in launched if t > start]
        assert len(launched) >= 6 and sum(t < end for t in launched) >= len(launched) - 1
        running = [e for e in events if e[0] in ("all_reduce", "reduce_scatter")
                   and e[1] != "main" and start < e[2] < end]
        assert running, "on a lane of its own, before backward has ended"
        assert all(ahead) and len(ahead) == (2 * (SHAPE["n_layer"] + 1) if zero == 3 else 0)


def _under_limit(rank, cfg, limit):
    """Whether one step of the layout fits into `limit` bytes of address space beyond the idle."""
    mesh = mesh_of(cfg)
    for group in (mesh.group("dp", "ep", "cp"), mesh.group("cp"), mesh.world):
        # its threads have their stacks by now
        c.all_reduce(torch.zeros(1), group, async_op=True).wait()
    idle = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (idle + limit, limits[1]))
    try:
        trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
        _, norm = trainer.gradients(data.training(cfg, 0, mesh))
        trainer.update(norm, 1e-3)
        return "trains"
    except RuntimeError as error:
        return "out of memory" if "allocate memory" in str(error) else str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("stage,outcome", [(0, "out of memory"), (3, "trains")])
def test_zero3_trains_what_does_not_fit_into_one_rank(corpus, stage, outcome):
    flags = {"n_layer": 12, "n_embd": 384, "batch_size": 4, "dtype": "float32", "microbatches": 1}
    psi = 12 * 12 * 384**2  # 21 million parameters, 340 MB of states
    cfg = config(corpus, dp=4, zero=stage, **flags)
    fresh = Pool()  # address space that an old process has freed would be used again
    fresh.start(4)
    try:
        assert fresh(4, _under_limit, cfg, 12 * psi) == [outcome] * 4
    finally:
        fresh.stop()


def _overflow(rank, cfg):
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    before = [w.clone() for _, w in local_tensors(trainer, "weights")]
    launch, scale = trainer.reducer.launch, trainer.scale

    def poisoned(bucket):
        if rank == 1:
            bucket.grad[0] = math.inf
        launch(bucket)

    trainer.reducer.launch = poisoned
    loss, norm = trainer.gradients(data.training(cfg, 0, mesh))
    trainer.update(norm, 1e-2)
    after = [w for _, w in local_tensors(trainer, "weights")]
    unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    halved = trainer.scale == scale / 2
    trainer.reducer.launch = launch
    _, norm = trainer.gradients(data.training(cfg, 1, mesh))
    trainer.update(norm, 1e-2)
    stepped = not torch.equal(before[0], local_tensors(trainer, "weights")[0][1])
    return unchanged, halved, math.isfinite(norm) and stepped


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overflow_on_one_rank_skips_the_step_on_all(corpus, stage):
    cfg = config(corpus, zero=stage, dp=2, tp=2, dtype="float16", microbatches=2)
    got = pool(4, _overflow, cfg)
    assert got == [(True, True, True)] * 4


def _losses(rank, cfg):
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    losses = []
    for step in range(cfg.steps):
        loss, norm = trainer.gradients(data.training(cfg, step, mesh))
        trainer.update(norm, train.learning_rate(cfg, step))
        losses.append(loss)
    return losses


@pytest.mark.parametrize("flags", [
    {"dp": 2, "zero": 3, "tp": 2}, {"pp": 4}, {"cp": 4}, {"tp": 4, "sp": True},
    *[{"dp": 4, "zero": 3}, {"tp": 4}, {"dp": 2, "zero": 2, "tp": 2}] * FULL], ids=str)
def test_bfloat16_layouts_agree_as_far_as_rounding_allows(corpus, flags):
    """bfloat16 keeps 8 bits: a rounding is off by up to 2^-9 of the value, and layouts round
    partial sums in other places. The loss is a mean over 288 tokens, in which these errors mostly
    cancel: layouts stay within 2^-8 of one another, while training changes it by several times
    that."""
    flags = {"dtype": "bfloat16", "steps": 12, "lr": 3e-3, "warmup_steps": 0, **flags}
    one = pool(1, _losses, config(corpus, **{**flags, "dp": 1, "tp": 1, "pp": 1, "cp": 1,
                                                "zero": 0, "microbatches": 1}))[0]
    cfg = config(corpus, **flags)
    got = pool(check(cfg, 1), _losses, cfg)
    assert all(losses == got[0] for losses in got)
    for a, b in zip(one, got[0], strict=True):
        assert abs(a - b) <= 2**-8 * abs(a), (one, got[0])


def _grads(rank, cfg):
    trainer = train.Trainer(cfg, mesh_of(cfg), VOCAB)
    for _ in range(2):  # the second one must not add to the first
        trainer.gradients(Data(cfg).training(cfg, 0, trainer.mesh))
    grads = local_tensors(trainer, "grads")
    trainer.update(1.0, 1e-3)
    return grads, trainer.optimizer.state_bytes(), trainer.reducer.buckets[0].numel


def test_16_bit_training_may_sum_its_gradients_in_32(corpus):
    """Each microbatch's have the same bits in each of these layouts; sums of 16 bits do not."""
    def off(layouts, **more):
        sums = []
        for dp, m, stage in layouts:
            cfg = config(corpus, dtype="bfloat16", dp=dp, microbatches=m, zero=stage, **more)
            got = pool(check(cfg, 1), _grads, cfg)
            assert all(live == formula for _, (formula, live), _ in got)
            sums.append(assemble([grads for grads, *_ in got]))
        return max((sums[0][name] - value).norm() / value.norm()
                   for other in sums[1:] for name, value in other.items())

    layouts = [(1, 6, 0), (2, 3, 1), (3, 2, 2), (2, 3, 3)]
    assert off(layouts, grad_dtype="float32") < 1e-6
    assert off(layouts[:2]) > 1e-3


READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class Launches(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the operations that are not just another view."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if not op.is_view and "record_function" not in name and name not in ("detach", "empty"):
            self.counts[name] += 1
        return op(*args, **kwargs or {})


def _counted(rank, cfg):
    """(what a step calls to look into a tensor, operations of norm and optimizer, buckets)."""
    trainer, data = train.Trainer(cfg, mesh_of(cfg), VOCAB), Data(cfg)
    batches = [data.training(cfg, step, trainer.mesh) for step in range(2)]
    _, norm = trainer.gradients(batches[0])
    trainer.update(norm, 1e-3)
    reads, kept = [], {name: getattr(torch.Tensor, name) for name in READS}
    for name, method in kept.items():
        setattr(torch.Tensor, name, lambda self, *args, method=method, name=name: (
            reads.append(name), method(self, *args))[1])
    try:
        _, norm = trainer.gradients(batches[1])
        with Launches() as launches:
            trainer.optimizer.grad_square()
            trainer.update(norm, 1e-3)
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)
    return reads, launches.counts, len(trainer.reducer.buckets)


@pytest.mark.parametrize("flags", [
    {"dp": 2, "grad_clip": 1e-6}, {"dp": 2, "zero": 3, "dtype": "bfloat16"},
    {"dp": 2, "pp": 2, "zero": 1, "dtype": "bfloat16", "grad_dtype": "float32"},
    {"tp": 2, "cp": 2, "sp": True}], ids=str)
def test_a_step_looks_at_the_device_once_and_the_optimizer_has_few_kernels(corpus, flags):
    cfg = config(corpus, microbatches=2, **flags)
    for reads, counts, buckets in pool(check(cfg, 1), _counted, cfg):
        assert reads == ["tolist"]
        # two groups, with and without decay: AdamW, and its step counters
        assert counts.pop("_fused_adamw_") == 2 and counts.pop("_foreach_add_") == 2
        assert counts.pop("_foreach_norm") == 1
        of_buckets = [counts.pop(name, 0) for name in ("mul_", "_to_copy", "copy_", "clone")]
        assert sum(of_buckets) <= 4 * buckets
        assert sum(counts.values()) <= 6, counts  # of the norm's sum


def test_18_bytes_per_parameter():
    assert [sum(zero.bytes_per_parameter(stage, 1, 2, 4)) for stage in range(4)] == [18] * 4
    assert [sum(zero.bytes_per_parameter(stage, 4, 2, 4)) for stage in range(4)] == [
        18, 9, 6, 4.5]


def _patched(rank, cfg, bug):
    """_train with a bug of the field put in, to see that the comparison would notice it."""
    def divide(self, finish=ddp.DDP.finish):
        finish(self)
        for bucket in self.buckets:
            bucket.grad_shard.div_(2)

    def update_twice(self, norm, lr, update=train.Trainer.update):
        update(self, norm * 1.5, lr)

    def biased(self, x, forward=tensor_parallel.Row.forward):
        return forward(self, x) + self.bias * (self.crossing.group.size - 1)

    patches = {
        "gradients averaged, not summed": (ddp.DDP, "finish", divide),
        "ends of the tied embedding not summed": (
            train, "tie_ends", lambda layers, group: None),
        "a wrong norm": (train.Trainer, "update", update_twice),
        "row bias added by every rank": (tensor_parallel.Row, "forward", biased),
        "replicated gradients counted T times": (zero.Optimizer, "grad_square", lambda self: sum(
            grad.square().sum() for b in self.reducer.buckets for _, _, grad in b.owned)),
        "nothing reduced": (ddp.DDP, "launch", lambda self, bucket: None),
    }
    return train_with(rank, cfg, *patches[bug])


@pytest.mark.parametrize("bug", [
    "gradients averaged, not summed", "ends of the tied embedding not summed", "a wrong norm",
    "row bias added by every rank", "replicated gradients counted T times", "nothing reduced"])
def test_the_comparison_notices(corpus, bug):
    with pytest.raises(AssertionError, match="off by|copies of .* differ|replicas disagree"):
        equals_one_process(corpus, _patched, bug, dp=2, tp=2, pp=2, microbatches=3)


def _bytes(rank, cfg):
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    trainer.gradients(data.training(cfg, 0, mesh))
    blocks = sum(0 < i <= cfg.n_layer for s, (a, b) in enumerate(trainer.cuts)
                 if trainer.where[s] == mesh.group("pp").rank for i in range(a, b))
    numels = {"all": sum(b.numel for b in trainer.reducer.buckets), "blocks": blocks,
              "tied": sum(b.numel for b in trainer.reducer.buckets if b.sum_at_end),
              "over_tp": sum(b.numel for b in trainer.reducer.buckets
                             if mesh.group("tp") in b.sum_at_end)}
    return {name: group.bytes_sent for name, group in mesh.groups.items()}, numels


def test_bytes_sent_equal_the_formulas(corpus):
    D, T, P, m, layers = 2, 2, 2, 3, SHAPE["n_layer"]
    got = pool(8, _bytes, config(corpus, dp=D, tp=T, pp=P, microbatches=m))
    b, S, C, width = BATCH // D // m, SHAPE["block_size"], SHAPE["n_embd"], 8
    boundary = b * S * C * width
    for rank, (sent, numels) in enumerate(got):
        stage = rank // T % P
        assert sent["pp"] == m * boundary  # stage 0 sends activations, stage 1 their gradients
        ends = boundary + (3 * b * S * width if stage == 1 else 0)  # embedding; head and loss
        assert sent["tp"] == m * (4 * numels["blocks"] * boundary + ends) * 2 * (T - 1) // T
        # one all-reduce a step, whatever m: a rank of two sends each bucket once
        assert sent["dp_ep_cp"] == numels["all"] * width * 2 * (D - 1) // D
        assert sent["pp_ends"] == numels["tied"] * width
    assert sum(numels["blocks"] for _, numels in got) == layers * D * T
    assert sum(sent["world"] for sent, _ in got) == 2 * (8 - 1) * 2 * 8  # loss, stop
    assert sum(sent["ep_pp_tp"] for sent, _ in got) == D * 2 * (4 - 1) * 8  # norm, in each replica


# ---- split sequences ----

SEQUENCES = [
    {"dp": 4, "tp": 2, "sp": True, "microbatches": 9 if FULL else 3},  # 9: one sequence
    {"tp": 3, "sp": True, "block_size": 24, "microbatches": 2},
    {"cp": 2}, {"cp": 3, "block_size": 24, "microbatches": 3}, {"cp": 4},  # chunks of one token
    {"cp": 2, "cp_attention": "all-to-all", "recompute": True},
    {"cp": 4, "cp_attention": "all-to-all", "microbatches": 2},
    {"cp": 2, "tp": 2, "pp": 2, "sp": True, "microbatches": 3},
    {"cp": 2, "tp": 2, "pp": 2, "cp_attention": "all-to-all", "schedule": "zb-v", "chunks": 2,
     "microbatches": 3, "sp": True},
    {"cp": 2, "tp": 2, "pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4,
     "sp": True, "recompute": True},
    {"dp": 2, "cp": 3, "block_size": 24, "zero": 1}, {"dp": 2, "cp": 3, "block_size": 24,
                                                      "zero": 3, "recompute": True},
    {"dp": 2, "cp": 3, "block_size": 24, "zero": 2, "cp_attention": "all-to-all",
     "microbatches": 3},
    {"tp": 2, "cp": 3, "block_size": 24, "sp": True, "zero": 3, "cp_attention": "all-to-all"},
    {"dp": 2, "tp": 2, "pp": 2, "sp": True, "schedule": "zb-v", "chunks": 2, "zero": 2,
     "microbatches": 3}, {"tp": 4, "cp": 2, "sp": True, "zero": 1},
    {"tp": 3, "pp": 2, "sp": True, "block_size": 24, "schedule": "zb-h1", "microbatches": 4},
    {"dp": 2, "pp": 2, "cp": 2, "schedule": "zb-h2", "zero": 1, "microbatches": 3},
    {"pp": 4, "cp": 2, "schedule": "interleaved", "chunks": 1, "microbatches": 4},
    {"dp": 2, "tp": 2, "sp": True, "zero": 3, "recompute": True, "microbatches": 3},
    {"cp": 2, "tp": 2, "sp": True, "collectives": "native"},
]


@pytest.mark.parametrize("flags", two_thirds(SEQUENCES), ids=lambda flags: " ".join(
    f"{name} {value}" for name, value in flags.items()))
def test_split_sequences_equal_one_process(corpus, flags):
    equals_one_process(corpus, **{"microbatches": 1, **flags})


def _plain_attention(rank, cfg):
    at = context_parallel.zigzag(cfg.block_size, cfg.cp, rank // cfg.tp % cfg.cp)
    plain = partial(context_parallel.plain_ring_attention, positions=at)
    return train_with(rank, cfg, context_parallel, "KINDS", {"ring": plain})


@pytest.mark.parametrize("flags", [{"cp": 3, "block_size": 24}, {"cp": 2, "tp": 2}], ids=str)
def test_the_plain_ring_attention_gives_the_same(corpus, flags):
    equals_one_process(corpus, _plain_attention, microbatches=1, **flags)


def _validation(rank, cfg):
    trainer, data = train.Trainer(cfg, mesh_of(cfg), VOCAB), Data(cfg)
    return [trainer.validation_loss(data, batches) for batches in (1, 9, None)]


VALIDATIONS = [(0, {"microbatches": 1}), (0, {"cp": 4, "dp": 2, "zero": 3}),
               (0, {"cp": 2, "pp": 2, "schedule": "zb-v", "chunks": 2, "microbatches": 3,
                    "cp_attention": "all-to-all"}),
               (0, {"dp": 3, "tp": 2, "microbatches": 4}),  # one rank's last batch is empty
               (4, {"cp": 2, "tp": 2, "sp": True, "dp": 2, "ep": 2})]


@pytest.mark.parametrize("experts,flags", VALIDATIONS, ids=str)
def test_validation_takes_each_window_once(corpus, experts, flags):
    """87 windows, 36 in a batch, the first batch alone and all of them."""
    val = torch.from_numpy(np.fromfile(f"{corpus}/val.bin", "<u2").astype(np.int64))
    cfg = config(corpus, **{"microbatches": 2, "experts": experts, **flags})
    shape = GPTConfig(VOCAB, **SHAPE, n_experts=experts, top_k=cfg.top_k)
    model, S = build(shape, cfg.seed, torch.double), cfg.block_size
    with torch.no_grad():
        each = [F.cross_entropy(model(val[i : i + S].view(1, S))[0], val[i + 1 : i + S + 1])
                for i in range(0, len(val) - S, S)]
    assert len(each) == 87
    want = [sum(each[:36]) / 36, sum(each) / 87, sum(each) / 87]
    for losses in pool(check(cfg, 1), _validation, cfg):
        close(losses, torch.stack(want), str(flags))


def _rounding(rank, C):
    """How far the gradients of attention are from float64's: in bfloat16 on the ring; alone."""
    group = Mesh(cp=C).group("cp")
    at = context_parallel.zigzag(16 * C, C, group.rank)
    wide = [torch.randn(2, 3, 16 * C, 8, dtype=torch.double,
                        generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)]

    def gradients(dtype, core, at):
        q, k, v, given = (x[:, :, at].to(dtype) for x in wide)
        parts = [x.clone().requires_grad_() for x in (q, k, v)]
        core(*parts).backward(given)
        return [part.grad.double() for part in parts]

    every = slice(None)
    exact = gradients(torch.double, causal_attention, every)
    alone = gradients(torch.bfloat16, causal_attention, every)
    ring = gradients(torch.bfloat16, partial(context_parallel.ring_attention, group=group), at)
    return [[(x - y[:, :, at]).norm().item() for x, y in zip(got, exact, strict=True)]
            for got in (ring, [x[:, :, at] for x in alone])]


def test_the_ring_rounds_no_more_than_one_kernel():
    """The sums that go around have 32 bits. In 16, errors here are 1.2 to 1.4 of one kernel's; that
    a part is rounded before it is added makes 1.15."""
    got = pool(8, _rounding, 8)
    ring, alone = ([math.hypot(*errors) for errors in zip(*(rank[i] for rank in got), strict=True)]
                   for i in (0, 1))  # of q, k and v
    assert all(a < 1.25 * b for a, b in zip(ring, alone, strict=True)), (ring, alone)


def _bug_of_split_sequences(rank, cfg, bug):
    def from_zero(model, group, kind, split=train.split_sequences):
        own = split(model, group, kind)
        model.layers[0].positions = torch.arange(len(own))
        return own

    def shifted_late(self, batches):
        rows = [torch.cat([ids[:, self.positions], targets[:, self.positions[-1:]]], dim=1)
                for ids, targets in batches]
        return [(row[:, :-1], row[:, 1:]) for row in rows]

    def divided_twice(self, actions, batches, tokens, *scale, execute=pipeline.Pipeline.execute):
        return execute(self, actions, batches, tokens * cfg.cp, *scale)

    def finish(self, averaged, finish=ddp.DDP.finish):
        groups = {bucket: bucket.sum_at_end for bucket in self.buckets}
        for bucket in self.buckets:
            bucket.sum_at_end = [g for g in groups[bucket] if averaged or g.name != "tp"]
        finish(self)
        for bucket in self.buckets:
            bucket.sum_at_end = groups[bucket]
            for group in groups[bucket] if averaged else ():
                bucket.grad_shard.div_(group.size)

    def another_owner(mine, theirs, half, meets=context_parallel.meets):
        return meets(mine, theirs if mine == theirs else cfg.cp - 1 - theirs, half)

    def narrow(out, lse, part, part_lse, merge=context_parallel.merge):
        short, short_lse = out.bfloat16(), lse.bfloat16()
        merge(short, short_lse, part, part_lse.bfloat16())
        out.copy_(short)
        lse.copy_(short_lse)

    def last_part_only(out, lse, part, part_lse):
        out.copy_(part)
        lse.copy_(part_lse)

    patches = {
        "replicated gradients not reduced": (ddp.DDP, "finish", lambda self: finish(self, False)),
        "replicated gradients averaged": (ddp.DDP, "finish", lambda self: finish(self, True)),
        "positions start at 0": (train, "split_sequences", from_zero),
        "targets shifted after the split": (train.Trainer, "own", shifted_late),
        "loss divided twice": (pipeline.Pipeline, "execute", divided_twice),
        "keys of another owner": (context_parallel, "meets", another_owner),
        "merged in bfloat16": (context_parallel, "merge", narrow),
        "merged without rescaling": (context_parallel, "merge", last_part_only),
    }
    return train_with(rank, cfg, *patches[bug])


@pytest.mark.parametrize("bug,flags", [
    ("replicated gradients not reduced", {"tp": 2, "sp": True}),
    ("replicated gradients averaged", {"tp": 2, "sp": True}),
    ("positions start at 0", {"cp": 2}), ("targets shifted after the split", {"cp": 2}),
    ("loss divided twice", {"cp": 2}), ("keys of another owner", {"cp": 4}),
    ("merged in bfloat16", {"cp": 2}), ("merged without rescaling", {"cp": 2})], ids=str)
def test_bugs_of_split_sequences_are_noticed(corpus, bug, flags):
    with pytest.raises(AssertionError, match="off by|copies of .* differ|replicas disagree"):
        equals_one_process(corpus, _bug_of_split_sequences, bug, microbatches=1, **flags)


@pytest.mark.parametrize("flags", [
    {"cp": 2, "tp": 2, "sp": True, "microbatches": 3}, {"cp": 4, "microbatches": 2},
    {"cp": 3, "block_size": 24}, {"cp": 4, "cp_attention": "all-to-all"}, {"tp": 4, "sp": True},
    {"cp": 2, "recompute": True}, {"pp": 2, "tp": 2, "sp": True, "microbatches": 3}], ids=str)
def test_split_sequences_send_the_formulas(corpus, flags):
    cfg = config(corpus, **{"microbatches": 1, **flags})
    got, width = pool(check(cfg, 1), _bytes, cfg), 8
    C, T, m, S, L = cfg.cp, cfg.tp, cfg.microbatches, cfg.block_size, cfg.n_layer
    bSC = BATCH // m * S // C * cfg.n_embd  # elements of a microbatch's activation, on all of T
    h = cfg.n_embd // T  # the width of this rank's heads
    for rank, (sent, numels) in enumerate(got):
        if C > 1:
            forward, backward = 2 * (C - 1) * bSC // T, 4 * (C - 1) * bSC // T
            assert forward == 2 * (C - 1) * (BATCH // m * S * h) // C  # of the file's head
            if cfg.cp_attention == "all-to-all":
                forward = backward = 4 * (C - 1) * (BATCH // m * S * h) // C**2
            again = forward if cfg.recompute else 0
            assert sent["cp"] == m * L * (forward + again + backward) * width
        if T > 1:
            stage = rank // (C * T)
            first, last = stage == 0, stage == cfg.pp - 1
            tokens = bSC // cfg.n_embd
            alone = (4 * numels["blocks"] + first + last) * bSC + last * 3 * tokens  # all-reduces
            gathered_again = (2 * numels["blocks"] + last) * bSC  # half an all-reduce each
            assert sent["tp"] * T == (T - 1) * width * (
                m * (2 * alone + gathered_again) + 2 * numels["over_tp"])
        if cfg.pp > 1:
            assert sent["pp"] == m * bSC // T * width


def _saved_by_a_block(rank, cfg):
    """Bytes that one block's forward leaves for backward, parameters not counted."""
    trainer = train.Trainer(cfg, mesh_of(cfg), VOCAB)
    block = trainer.stages[0].layers[1]
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    x = torch.randn(trainer.pipeline.shape, dtype=trainer.dtype, requires_grad=True)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # kept alive: no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items()
               if at not in parameters)


@pytest.mark.parametrize("flags", [
    {}, {"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"cp": 3, "block_size": 24},
    {"cp": 2, "cp_attention": "all-to-all"}, {"tp": 2, "sp": True, "cp": 2},
    {"recompute": True}, {"tp": 2, "sp": True, "cp": 2, "recompute": True}], ids=str)
def test_a_block_saves_the_formula(corpus, flags):
    for dtype, w in (("float64", 8), ("float32", 4), ("bfloat16", 2)):
        cfg = config(corpus, dtype=dtype, microbatches=3, **flags)
        got = pool(check(cfg, 1), _saved_by_a_block, cfg)
        model = GPTConfig(VOCAB, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd)
        layout = memory.Layout(tp=cfg.tp, cp=cfg.cp, sp=cfg.sp, cp_attention=cfg.cp_attention,
                               microbatches=cfg.microbatches)
        job = memory.Job(model, BATCH, width=w)
        recompute = "full" if cfg.recompute else "none"
        want = memory.tokens_of(job, layout) * memory.saved_by_block(job, layout, recompute)
        assert got == [want] * len(got), (dtype, got, want)


def test_peak_memory_of_a_long_sequence_falls_with_c_and_with_sp(long_corpus):
    """Four blocks, one sequence of 1024: what a step takes at its peak, parameters apart."""
    peak = {}
    for name, flags in {"alone": {}, "cp": {"cp": 4}, "all-to-all": {
            "cp": 4, "cp_attention": "all-to-all"}, "tp": {"tp": 4},
            "sp": {"tp": 4, "sp": True}}.items():
        cfg = config(long_corpus, n_layer=4, n_embd=96, block_size=1024, batch_size=1,
                     microbatches=1, dtype="float32", **flags)
        peak[name] = max(got[2] for got in pool(check(cfg, 1), _live, cfg))
    # a block saves 16 or, under tp alone, 4 + 12/4 of b S C; there are transients beside that
    assert peak["cp"] < 0.33 * peak["alone"] and peak["all-to-all"] < 0.36 * peak["alone"], peak
    assert peak["sp"] < 0.75 * peak["tp"] and peak["tp"] < 0.6 * peak["alone"], peak


@pytest.mark.parametrize("C,outcome", [(1, "out of memory"), (4, "trains")])
def test_a_sequence_too_long_for_one_rank_trains_on_four(long_corpus, C, outcome):
    cfg = config(long_corpus, cp=C, n_layer=8, n_embd=96, block_size=4096, batch_size=1,
                 microbatches=1, dtype="float32")
    block = 16 * 4096 * 96 * 4  # bytes that one saves: 25 MB
    fresh = Pool()  # address space that an old process has freed would be used again
    fresh.start(C)
    try:
        assert fresh(C, _under_limit, cfg, 4 * block) == [outcome] * C
    finally:
        fresh.stop()


def test_a_columns_messages_overlap_with_its_backward(corpus):
    """x is gathered beside the input gradient, that is scattered beside the weight gradient: both
    on the group's own lane, and once in each of 2 L + 1 columns. What waits stays in the main."""
    cfg = config(corpus, tp=3, sp=True, block_size=24, microbatches=1)
    columns = 2 * cfg.n_layer + 1
    for events, *_ in pool(3, _overlap, cfg):
        start, end = next(e[2:4] for e in events if e[0] == "B")
        for name, waiting in (("all_gather", columns), ("reduce_scatter", 0)):  # rows, embedding
            lanes = [e[1].startswith("ring-tp") for e in events
                     if e[0] == name and e[4]["group"] == "tp" and start < e[2] < end]
            assert lanes.count(True) == columns and lanes.count(False) == waiting, name


def test_the_next_keys_are_under_way_while_attention_computes(long_corpus):
    cfg = config(long_corpus, cp=3, block_size=960, batch_size=1, microbatches=1, dtype="float32",
                 n_embd=96, n_head=4)
    for _ in range(3):  # on a busy machine one trace may show few
        if all([_passing(cfg, events) for events, *_ in pool(3, _overlap, cfg)]):
            return
    pytest.fail("no message was under way in half of the hops, in three traces")


def _passing(cfg, events):
    """Whether messages go on beside attention in half of the hops, forward and backward."""
    seen = []
    for kind, messages in (("F", 2), ("B", 4)):
        start, end = next(e[2:4] for e in events if e[0] == kind)
        computing = [e for e in events if e[0] == "attention" and start < e[2] < end]
        passing = [e for e in events if e[0] == "pass on" and start < e[2] < end]
        assert len(computing) == 3 * cfg.n_layer and len(passing) == messages * cfg.n_layer
        assert all(e[1] == "main" for e in computing)
        assert all(e[1].startswith("ring-cp") for e in passing)
        # three ranks on two cores: a thread may come late, so not every one is seen to overlap
        together = [a for a in computing if a[4]["hop"] < 2 and any(
            p[2] < a[3] and p[3] > a[2] for p in passing)]
        seen.append(len(together) >= cfg.n_layer)
    return all(seen)


# ---- experts ----

EXPERTS = [
    {"dp": 2, "ep": 2, "experts": 4}, {"dp": 4, "ep": 4, "experts": 8, "zero": 2},
    {"dp": 4, "ep": 2, "experts": 4, "zero": 3, "microbatches": 3},
    {"dp": 6, "ep": 2, "experts": 4, "zero": 1}, {"dp": 3, "ep": 3, "experts": 3, "top_k": 1},
    {"dp": 3, "experts": 3, "top_k": 3, "microbatches": 2},  # k = E
    {"tp": 2, "experts": 4, "microbatches": 2}, {"dp": 4, "ep": 2, "tp": 2, "experts": 4},
    {"dp": 2, "ep": 2, "tp": 2, "sp": True, "experts": 4, "zero": 2, "recompute": True},
    {"dp": 2, "ep": 2, "cp": 2, "tp": 2, "sp": True, "experts": 4, "zero": 3},
    {"dp": 2, "ep": 2, "pp": 2, "experts": 4, "schedule": "zb-h1", "microbatches": 3},
    {"dp": 2, "ep": 2, "pp": 4, "experts": 4, "microbatches": 3},
    {"dp": 2, "ep": 2, "pp": 2, "experts": 4, "schedule": "interleaved", "chunks": 2,
     "microbatches": 2, "zero": 1},
    {"dp": 2, "ep": 2, "pp": 2, "tp": 2, "sp": True, "experts": 4, "schedule": "zb-v", "chunks": 2,
     "microbatches": 3, "zero": 2},
    {"dp": 2, "ep": 2, "experts": 4, "collectives": "native", "recompute": True},
    {"cp": 2, "experts": 4, "cp_attention": "all-to-all", "zero": 1},
    {"experts": 4, "microbatches": 3}, {"tp": 3, "experts": 3, "top_k": 3},
    {"dp": 2, "ep": 2, "tp": 2, "cp": 2, "experts": 4, "top_k": 4},
    *[{"dp": 2, "ep": 2, "tp": 2, "pp": 2, "experts": 4, "schedule": "zb-h1", "microbatches": 3},
      {"dp": 4, "ep": 4, "pp": 2, "experts": 4, "microbatches": 3}] * FULL,
]


@pytest.mark.parametrize("flags", two_thirds(EXPERTS), ids=lambda flags: " ".join(
    f"{name} {value}" for name, value in flags.items()))
def test_experts_equal_one_process(corpus, flags):
    equals_one_process(corpus, **{"microbatches": 1, **flags})


def lopsided(name, shape, config, seed, usual=model_file.initial_value):
    """Initial values by which every token goes to expert 0 first, and none to expert 1."""
    value = usual(name, shape, config, seed)
    if name.endswith("ln_2.bias"):
        value += 1
    if name.endswith("router.weight"):
        value[0] += 2 / 24  # the input of the router has a mean of 1 over its 24 numbers
        value[1] -= 2 / 24
    return value


def _lopsided(rank, cfg):
    return train_with(rank, cfg, train, "initial_value", lopsided)


@pytest.mark.parametrize("flags", [
    {"dp": 2, "ep": 2, "top_k": 1}, {"dp": 2, "ep": 2, "zero": 3, "microbatches": 2},
    {"dp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 2, "zero": 2, "top_k": 1},
    {"tp": 2, "top_k": 1}, {"dp": 4, "ep": 4, "recompute": True},
    {"dp": 2, "ep": 2, "tp": 2, "microbatches": 2}], ids=str)
def test_an_expert_without_tokens_and_one_with_all(corpus, flags, monkeypatch):
    monkeypatch.setattr(model_file, "initial_value", lopsided)
    monkeypatch.setattr(sys.modules[__name__], "_reference", {})
    equals_one_process(corpus, _lopsided, experts=4, **{"microbatches": 1, **flags})


def test_experts_are_what_a_loop_over_tokens_says():
    """Values, gradients, balance: of all N experts by their definition, token by token."""
    config = GPTConfig(VOCAB, 8, 1, 2, 12, n_experts=5, top_k=3)
    layer = build(config, dtype=torch.double).layers[1].mlp
    x = torch.randn(2, 8, 12, dtype=torch.double)
    results = []
    for naive in (False, True):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        if naive:
            stacks = layer.experts.c_fc, layer.experts.c_proj
            y, balance = torch.zeros_like(x), 0.0
            for b, sequence in enumerate(given):
                chosen = torch.zeros(5, dtype=torch.double)
                for s, token in enumerate(sequence):
                    logits = layer.router.weight @ token
                    best = sorted(range(5), key=lambda i, z=logits: -z[i])[:3]
                    for i, gate in zip(best, torch.softmax(logits[best], 0), strict=True):
                        h = stacks[0].weight[i] @ token + stacks[0].bias[i]
                        h = torch.nn.functional.gelu(h, approximate="tanh")
                        y[b, s] = y[b, s] + gate * (stacks[1].weight[i] @ h + stacks[1].bias[i])
                        chosen[i] += 1
                for token in sequence:
                    p = torch.softmax(layer.router.weight @ token, 0)
                    balance = balance + (chosen * 5 / (3 * 8) * p).sum()
        else:
            y, balance = layer(given), None
            balance = layer.balance
        (y.sin().sum() + balance).backward()
        results.append([y.detach(), balance.detach(), given.grad,
                        *(p.grad.clone() for p in layer.parameters())])
    for got, want in zip(*results, strict=True):
        close(got, want, "experts")


def _left_behind(rank, cfg):
    """Whether blocks still hold what their routers added to the loss, when backward is over."""
    mesh = mesh_of(cfg)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    trainer.gradients(Data(cfg).training(cfg, 0, mesh))
    return [block.mlp.balance is None for stage in trainer.stages.values()
            for block in stage.layers if hasattr(block, "mlp")]


def test_recomputing_experts_leaves_nothing_behind(corpus):
    """The graph of a recomputed block would live on in it, with all its activations."""
    got = pool(2, _left_behind, config(corpus, pp=2, experts=4, recompute=True, microbatches=3))
    assert all(map(all, got)) and sum(map(len, got)) == SHAPE["n_layer"]


def test_flops_are_those_of_the_experts_that_a_token_meets():
    dense, routed = GPTConfig(50, 8, 2, 2, 16), GPTConfig(50, 8, 2, 2, 16, n_experts=8, top_k=2)
    flops = [config.flops_per_token(sum(p.numel() for p in build(config).parameters()))
             for config in (dense, routed)]
    # a block has a router of 16 x 8 more, and a second bias of c_proj: 16
    assert flops[1] - flops[0] == 6 * 2 * (16 * 8 + 16)


def _bug_of_experts(rank, cfg, bug):
    def averaged(self, finish=ddp.DDP.finish):
        finish(self)
        for bucket in self.buckets:
            if any("experts" in p.shard.name for p in bucket.params):
                bucket.grad_shard.div_(cfg.dp)

    def fixed_gates(self, x, gates, chosen, call=expert_parallel.SpreadExperts.__call__):
        return call(self, x, gates.detach(), chosen)

    def rolled(*args, run=expert_parallel.run_at_owners):
        return run(*args).roll(1, 0)

    seen = []

    def another_microbatch(model, mesh, sp, spread=train.spread_experts):
        spread(model, mesh, sp)
        for block in model.layers[1:-1]:
            def last(counts):
                seen.append(counts)
                return seen[max(0, len(seen) - 1 - cfg.n_layer)]
            block.mlp.all_tokens = last

    patches = {"averaged over the data ranks": (ddp.DDP, "finish", averaged),
               "gates not differentiated": (expert_parallel.SpreadExperts, "__call__",
                                            fixed_gates),
               "combined in another order": (expert_parallel, "run_at_owners", rolled),
               "counts of another microbatch": (train, "spread_experts", another_microbatch)}
    return train_with(rank, cfg, *patches[bug])


@pytest.mark.parametrize("bug", ["averaged over the data ranks", "gates not differentiated",
                                 "combined in another order", "counts of another microbatch"])
def test_bugs_of_experts_are_noticed(corpus, bug):
    with pytest.raises(AssertionError, match="off by|copies of .* differ|replicas disagree"):
        equals_one_process(corpus, _bug_of_experts, bug, dp=2, ep=2, experts=4, microbatches=3)


def _expert_bytes(rank, cfg):
    """(bytes sent in the expert group, rows that went to other ranks or came back from this one,
    forwards of a layer, tokens counted by the routers of all ranks, experts in each weight)"""
    mesh = mesh_of(cfg)
    trainer, moved, calls = train.Trainer(cfg, mesh, VOCAB), 0, 0
    group, run = mesh.group("ep"), c.all_to_all

    def counting(outputs, inputs, group, run=expert_parallel.all_to_all):
        nonlocal moved, calls
        if inputs[0].dtype == torch.double:
            moved += sum(len(part) for i, part in enumerate(inputs) if i != group.rank)
        else:
            calls += 1
        return run(outputs, inputs, group)

    run, expert_parallel.all_to_all = expert_parallel.all_to_all, counting
    trainer.gradients(Data(cfg).training(cfg, 0, mesh))
    expert_parallel.all_to_all = run
    loads = c.all_reduce(trainer.routing.sums[:, 1:].sum().view(1), mesh.world).item()
    held = {len(param) for layer in trainer.stages[0].layers[1:-1]
            for param in layer.mlp.experts.parameters()}
    return group.bytes_sent, moved, calls, loads, held


@pytest.mark.parametrize("flags", [{"dp": 4, "ep": 4}, {"dp": 4, "ep": 2, "tp": 2, "sp": True},
                                   {"dp": 2, "ep": 2, "recompute": True}], ids=str)
def test_no_token_is_lost_and_bytes_sent_are_those_of_the_counts(corpus, flags):
    cfg = config(corpus, experts=8, microbatches=3, **flags)
    got = pool(check(cfg, 1), _expert_bytes, cfg)
    each = cfg.experts // (cfg.ep * cfg.tp)
    visits = BATCH * cfg.block_size * cfg.n_layer * 2
    for sent, moved, calls, loads, held in got:
        assert loads == visits and held == {each}
        assert calls == cfg.n_layer * 3 * (2 if cfg.recompute else 1)
        assert sent == (moved * cfg.n_embd + calls * (cfg.ep - 1) * each) * 8
    # out and back, forward and backward; what was chosen is not even, but not far from it
    away = sum(moved for _, moved, *_ in got) / (6 if cfg.recompute else 4)
    assert 0.8 * visits < away / (1 - 1 / cfg.ep) < 1.2 * visits and away == int(away)


def _unused(rank, world, stage, n):
    """A layer with a parameter that the loss does not depend on, and one that only rank 0 uses."""
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.sometimes = (
                torch.nn.Parameter(torch.empty(n, device="meta")) for _ in range(3))
            for p in self.parameters():
                p.shard = Shard("", p.shape, 0, ((0, n),), sum_over=(group,))

        def forward(self, x):
            return x * self.used + (self.sometimes if rank == 0 else 0)

    group = Mesh(dp=world).group("dp")
    layer = Layer()
    reducer = zero.REDUCERS[stage]({0: [layer]}, torch.float64, "cpu", lambda shard: torch.ones(n))
    for bucket in reducer.buckets:
        bucket.grad_shard.fill_(7.0)  # as a step before might have left it
    reducer.zero_grad()
    for last in (False, True):
        y = layer(torch.full((n,), rank + 1.0)).sum()
        reducer.release()
        if last or reducer.every_microbatch:
            reducer.expect(0)
        y.backward()
        reducer.flush()
        reducer.release()
    reducer.finish()
    bucket = reducer.buckets[0]
    full = torch.zeros(bucket.numel, dtype=torch.float64)
    full[bucket.offset : bucket.offset + len(bucket.grad_shard)] = bucket.grad_shard
    c.all_gather(full, group) if stage else None
    return [bucket.view(full, p).tolist() for p in layer.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world,n", [(2, 5), (4, 1), (8, 2)])  # the smaller ones leave empty shards
def test_unused_parameter_counts_as_zero_and_never_hangs(world, n, stage):
    total = 2.0 * sum(range(1, world + 1))
    for got in pool(world, _unused, world, stage, n):
        assert got == [[total] * n, [0.0] * n, [2.0] * n]


# ---- schedules: pure lists ----


def _cases():
    for P, m in itertools.product((1, 2, 3, 4, 7, 16), (1, 2, 3, 8, 33, *[9, 64] * FULL)):
        for name in schedules.SCHEDULES:
            for v in (1, 2, 3, 4) if name == "interleaved" and m % P == 0 else (1,):
                if name != "interleaved" or m % P == 0:
                    yield name, P, m, v


def test_every_schedule_is_valid_and_deadlock_free_under_rendezvous():
    for name, P, m, v in _cases():
        lists, where = schedules.make_schedule(name, P, m, v), schedules.placement(name, P, v)
        schedules.validate(schedules.lower(lists, where), where)


def test_validation_rejects_damaged_lists():
    rng = np.random.default_rng(0)
    for name, P, m, v in [("1f1b", 4, 6, 1), ("gpipe", 3, 4, 1), ("zb-h1", 3, 5, 1),
                          ("interleaved", 2, 4, 2), ("zb-v", 3, 6, 1)]:
        where = schedules.placement(name, P, v)
        for lowered in (False, True):
            whole = schedules.make_schedule(name, P, m, v)
            whole = schedules.lower(whole, where) if lowered else whole
            for _ in range(40):
                lists = [list(actions) for actions in whole]
                actions = lists[rng.integers(P)]
                i = int(rng.integers(len(actions)))
                kind = rng.integers(3)
                if kind == 0:
                    del actions[i]
                elif kind == 1:
                    actions.insert(int(rng.integers(len(actions))), actions[i])
                else:  # a backward before its own forward
                    i = next(j for j, a in enumerate(actions) if a.kind in "BI")
                    j = actions.index(schedules.Action("F", *actions[i][1:]))
                    actions[i], actions[j] = actions[j], actions[i]
                with pytest.raises(ValueError, match="missing|doubled|misordered|deadlock"):
                    schedules.validate(lists, where)


def test_opposite_blocking_sends_are_rejected():
    A = schedules.Action
    lists = [[A("F", 0, 0), A("SF", 0, 0), A("F", 0, 1), A("SF", 0, 1), A("RB", 0, 0), A("B", 0, 0),
              A("RB", 0, 1), A("B", 0, 1)],
             [A("RF", 1, 0), A("F", 1, 0), A("B", 1, 0), A("SB", 1, 0), A("RF", 1, 1), A("F", 1, 1),
              A("B", 1, 1), A("SB", 1, 1)]]
    with pytest.raises(ValueError, match="deadlock: rank 0 at SF"):
        schedules.validate(lists, [0, 1])


@pytest.mark.parametrize("P", [2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 16, 33])
def test_gpipe_and_1f1b_have_the_published_bubble_and_peak(P, m):
    for name, peaks in (("gpipe", [m] * P), ("1f1b", [min(P - r, m) for r in range(P)])):
        lists, where = schedules.make_schedule(name, P, m), schedules.placement(name, P)
        timeline = schedules.simulate(lists, where)
        assert timeline.bubble == (P - 1) / (m + P - 1)
        assert timeline.peak_in_flight == peaks


@pytest.mark.parametrize("P,m,costs,rates", [  # Zero Bubble, arXiv 2401.10241, tables 5 and 9
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672))])
def test_simulator_reproduces_the_published_bubble_rates(P, m, costs, rates):
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates, strict=True):
        lists, where = schedules.make_schedule(name, P, m), schedules.placement(name, P)
        assert round(schedules.simulate(lists, where, costs).bubble, 4) == rate


def _live(rank, cfg):
    """(most microbatches whose activations live at once, as executed; as simulated; peak bytes)"""
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    batches, live, most = data.training(cfg, 0, mesh), weakref.WeakSet(), 0

    def count(module, args):
        nonlocal most
        live.add(args[0])  # saved for the weight gradient
        most = max(most, len(live))

    for stage in trainer.stages.values():
        block = next(layer for layer in stage.layers if hasattr(layer, "mlp"))
        block.mlp.c_fc.register_forward_pre_hook(count)
    trainer.gradients(batches)
    simulated = schedules.simulate(trainer.lists, trainer.where).peak_in_flight
    simulated = simulated[mesh.group("pp").rank]
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        trainer.gradients(batches)
    memory = [e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]"]
    return most, simulated, max(itertools.accumulate(memory))


@pytest.mark.parametrize("schedule", list(schedules.SCHEDULES))
def test_the_executed_pipeline_holds_as_many_microbatches_as_the_simulated(corpus, schedule):
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    cfg = config(corpus, pp=3, schedule=schedule, chunks=chunks, microbatches=9, n_layer=6)
    for most, simulated, _ in pool(3, _live, cfg):
        assert most == simulated


def _sent(rank, cfg):
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    pp = mesh.group("pp")
    kept, send = [], pp.send
    pp.send = lambda tensor, dst: kept.append(tensor) or send(tensor, dst)
    trainer.gradients(data.training(cfg, 0, mesh))
    return [tensor.untyped_storage().nbytes() for tensor in kept]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_was_sent_is_freed(corpus, schedule):
    got = pool(3, _sent, config(corpus, pp=3, schedule=schedule, microbatches=4, n_layer=6))
    assert got == [[0] * 4, [0] * 8, [0] * 4]


def test_activations_of_1f1b_are_flat_in_m_and_those_of_gpipe_grow(corpus):
    peak = {}
    for schedule, m in itertools.product(("gpipe", "1f1b"), (4, 12)):
        cfg = config(corpus, pp=2, schedule=schedule, microbatches=m, batch_size=8 * m,
                     block_size=64)
        peak[schedule, m] = pool(2, _live, cfg)[0][2]
    assert peak["1f1b", 12] < 1.15 * peak["1f1b", 4]
    assert peak["gpipe", 12] > 2.5 * peak["gpipe", 4]


def test_a_weight_used_twice_gets_both_gradients_when_they_are_put_off():
    solo, deferred = Group(Mesh(dp=1), "solo", [0], 0), pipeline.Deferred()
    x, w = torch.randn(3, 4, dtype=torch.double), torch.randn(4, 4, dtype=torch.double)
    w.requires_grad_()
    (x @ w.t() @ w.t()).square().sum().backward()
    want, w.grad = w.grad, None

    def linear(x):
        return tensor_parallel.ColumnLinear.apply(x, w, None, Crossing(solo, False), deferred.add)

    y = linear(linear(x.requires_grad_())).square().sum()
    with deferred.collect() as queue:
        y.backward()
    assert w.grad is None and len(queue) == 2
    with torch.no_grad():
        done = list(pipeline.finish_weights(queue))  # ready once, when both are in
    assert len(done) == 1 and done[0] is w
    close(w.grad, want, "gradient of x @ w @ w")


def _traced(rank, cfg):
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    tracer = timeline.Tracer(mesh)
    for step in range(2):
        trainer.trace(tracer, step, on=True)
        _, norm = trainer.gradients(data.training(cfg, step, mesh))
        trainer.update(norm, 1e-3)
    trainer.trace(tracer, None, on=False)
    every = timeline.collect(tracer.events, mesh.world)
    return every and (every, timeline.shares(every, lambda rank, s: trainer.where[s]))


def test_trace_has_every_action_of_every_rank_and_accounts_for_all_time(corpus, tmp_path):
    cfg = config(corpus, pp=2, schedule="zb-h1", microbatches=4)
    (every, (rows, mean)), _ = pool(2, _traced, cfg)
    for events, row in zip(every, rows, strict=True):
        for kind in "FIW":
            done = sorted((e[4]["step"], e[4]["microbatch"]) for e in events if e[0] == kind)
            assert done == [(step, k) for step in range(2) for k in range(4)]
        main = [e for e in events if e[1] == "main"]
        assert sum(e[0] == "optimizer" for e in main) == 2
        span = max(e[3] for e in main) - min(e[2] for e in main)
        assert math.isclose(sum(row.values()), span) and min(row.values()) >= 0
    assert mean.keys() == {"F", "I", "W", "optimizer"} and rows[1]["bubble"] > 0
    timeline.write_chrome(tmp_path / "trace.json", every)
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {r["pid"] for r in records} == {0, 1}


def _clock(rank, offset):
    kept = time.time
    time.time = lambda: kept() + offset * rank
    try:
        return timeline.Tracer(Mesh(dp=3)).ahead
    finally:
        time.time = kept


def test_clocks_of_nodes_are_aligned():
    assert [round(ahead, 2) for ahead in pool(3, _clock, 100.0)] == [0, 100, 200]


def test_a_wait_inside_of_a_wait_counts_once():
    a = {"stage": 0, "microbatch": 0, "step": 0}
    events = [["F", "main", 0.0, 4.0, a], ["all_reduce", "main", 1.0, 3.0, {"step": 0}],
              ["wait", "main", 1.5, 2.5, {"step": 0}], ["wait", "main", 5.0, 6.0, {"step": 0}]]
    (row,), mean = timeline.shares([events], None)
    assert row == {"compute": 2.0, "exposed": 3.0, "bubble": 0.0, "other": 1.0} and mean == {"F": 2}


@pytest.mark.parametrize("P,m,v", [(2, 8, 1), (4, 8, 2), (4, 12, 3), (8, 16, 4)])
def test_schedules_have_the_published_bubble_and_memory(P, m, v):
    for name in schedules.SCHEDULES:
        chunks = {"interleaved": v, "zb-v": 2}.get(name, 1)
        lists = schedules.make_schedule(name, P, m, chunks)
        t = schedules.simulate(lists, schedules.placement(name, P, chunks))
        assert t.bubble == schedules.closed_form(name, P, m, chunks, (1, 1, 1, 0))
        limit = {"gpipe": m, "zb-h2": 2 * P - 1, "zb-v": 2 * P, "interleaved": chunks * P + P - 1}
        assert max(t.peak_in_flight) <= limit.get(name, P)
    assert schedules.closed_form("interleaved", P, m, v, (1, 1, 1, 0)) == (P - 1) / (v * m + P - 1)


def test_pipeline_py_draws_compares_and_writes(tmp_path, capsys, monkeypatch):
    def run(line):
        monkeypatch.setattr(sys, "argv", ["pipeline.py", *line.split()])
        draw.schedules_command()
        return capsys.readouterr().out

    assert json.loads(run("1f1b 4 8 --json")) == {
        "makespan": 33, "bubble": 3 / 11, "peak_in_flight": [4, 3, 2, 1]}
    assert run("gpipe 2 2").splitlines()[1] == "rank 1  ...F0 F1 B0--- B1--- ......"
    assert len(run("4 8 --compare").splitlines()) == len(schedules.SCHEDULES)
    # rank 1: F0 3-5, B0 5-7, F1 7-9, B1 9-11; rank 0 has its gradient one later
    assert "makespan 14 " in run("1f1b 2 2 --costs 2,1,1,1")
    run(f"zb-v 2 4 --svg {tmp_path}/x.svg")
    assert (tmp_path / "x.svg").read_text().count('stroke="white"') == 2 * 2 * 4 * 3
    assert json.loads(run("interleaved 4 8 --json"))["bubble"] == 3 / 19  # two chunks
    for bad in ("1f1b 0 8", "interleaved 4 6", "wave 2 2", "1f1b 2 2 --costs 1", "1f1b 2"):
        with pytest.raises(SystemExit) as stop:
            run(bad)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


TALKERS = ("mesh.py", "group.py", "collectives.py", "processes.py")
HOUSE = [path for path in HERE.glob("*.py") if path.name not in ("bench.py", "test_all.py")]


@pytest.mark.parametrize("line,says", [
    ("collectives.py --help", "say how many ranks, 1 to 64"), ("collectives.py 0", "say how many"),
    ("context_parallel.py abc", "say how many ranks"), ("zero.py nan", "must be above 0"),
    ("zero.py -5", "must be above 0"), ("mesh.py 0 1 1 1 1", "give the sizes"),
    ("export.py --out /nowhere --to x", "/nowhere: no complete checkpoint"),
    ("prepare.py README.md --out /proc/x", "/proc/x: cannot be written"),
    ("prepare.py --vocab-size many", "invalid int value: 'many'")])
def test_every_command_answers_nonsense_with_one_line(line, says, capsys, monkeypatch):
    mains = {"zero.py": zero.main, "mesh.py": mesh_file.main, "export.py": export_file.main,
             "prepare.py": prepare_file.main}
    main = mains.get(line.split()[0], lambda: processes.ranks_asked(4))
    assert says in one_line(main, line.split(), capsys, monkeypatch)


@pytest.mark.skipif(not shutil.which("git"), reason="git applies the patch")
def test_the_readmes_patch_is_one_that_git_takes(tmp_path):
    shutil.copy(HERE / "schedules.py", tmp_path)
    patch = re.search(r"```diff\n(.*?)```", (HERE / "README.md").read_text(), re.S)[1]
    subprocess.run(["git", "apply"], input=patch.encode(), cwd=tmp_path, check=True,
                   env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)})
    assert "def eager(P, m, v, rank)" in (tmp_path / "schedules.py").read_text()


def test_the_librarys_line_is_cut_to_what_it_says():
    with (pytest.raises(CommunicationError, match=r"^rank 0: sending: Connection closed by peer$"),
          naming("rank 0: sending")):
        raise RuntimeError("[/w/pair.cc:5] Connection closed by peer. This is likely a ... GLHF!")


def test_a_peak_is_that_of_the_process_and_not_of_its_parent():
    held = bytearray(b"x") * (600 << 20)
    child = command("-c", "import log; print(log.peak_of_process())")
    assert int(child.stdout) < len(held) < peak_of_process()


def test_preparing_the_corpus_is_said(corpus, tmp_path, monkeypatch, capsys):
    def prepare(sources, folder):
        shutil.copytree(corpus, folder)

    monkeypatch.setattr(batches, "__file__", str(tmp_path / "batches.py"))
    monkeypatch.setattr(batches, "prepare", prepare)
    Data(config("stdlib"))
    assert capsys.readouterr().out == "preparing stdlib as a corpus, once\n"


def test_the_house_is_in_order():
    """No file above 300 lines; messages pass through four files only; the model knows of none."""
    for path in HOUSE:
        text = path.read_text()
        assert text.count("\n") <= 300, path.name
        talks = "torch.distributed" in text.replace("torch.distributed's", "")
        assert talks == (path.name in TALKERS), path.name
    assert not re.search(r"^(import|from) (?!torch|math|hashlib|dataclasses)",
                         (HERE / "model.py").read_text(), re.MULTILINE)


def test_one_name_means_one_thing():
    """No two top-level functions or classes of one name, but for what every file may have."""
    where = {}
    for path in [*HOUSE, *(HERE / "data").glob("*.py")]:
        for name in re.findall(r"^(?:def|class) (\w+)", path.read_text(), re.MULTILINE):
            where.setdefault(name, []).append(path.name)
    twice = {name: files for name, files in where.items() if len(files) > 1}
    assert set(twice) <= {"main", "demo"}, twice


def test_stages_are_cut_by_cost():
    assert schedules.cut([0, 5, 5, 5, 5, 20], 3) == [(0, 3), (3, 5), (5, 6)]
    assert [b - a for a, b in schedules.cut([1] * 7, 3)] in ([2, 2, 3], [2, 3, 2], [3, 2, 2])


# ---- the planner ----


def test_published_runs_are_predicted_within_10_percent():
    for run in published.RUNS:
        if run.gpus > 2000 and run.layout.pp > 16 and not FULL:
            continue  # seconds each: plan.py --published has all
        value, _ = published.predict(run)
        assert abs(value / run.value - 1) < 0.1, run


def test_most_published_runs_are_predictions():
    for device in ("a100-80", "h100"):
        runs = [run for run in published.RUNS if run.device == device]
        assert sum(run.fitted for run in runs) <= len(runs) / 2


def _held(rank, cfg):
    """Bytes of (states, activations) on each rank, at the peak of a step."""
    return here_file.run(cfg, mesh_of(cfg))[1:]


@pytest.mark.parametrize("flags", [
    {"dp": 2, "zero": 3, "microbatches": 2}, {"tp": 2, "pp": 2, "sp": True, "schedule": "gpipe"},
    {"pp": 2, "schedule": "zb-h1", "recompute": True}, {"cp": 2, "pp": 2, "dtype": "bfloat16"},
    {"dp": 2, "tp": 2, "schedule": "interleaved", "chunks": 1}], ids=str)
def test_memory_is_predicted_within_5_percent(long_corpus, flags):
    cfg = config(long_corpus, **{"n_layer": 4, "n_embd": 96, "n_head": 4, "block_size": 128,
                                 "microbatches": 4, "batch_size": 8, "dtype": "float32", **flags})
    ranks = check(cfg, 1)
    states, saved = pool(ranks, _held, cfg)[0]
    _, want = here_file.predicted(cfg, hardware.DEVICES["a100-80"])
    most = max(map(sum, zip(states, saved, strict=True)))
    assert abs(want / most - 1) < 0.05, (want, most)


@pytest.mark.parametrize("schedule,v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 3),
                                        ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)])
def test_memory_is_that_of_all_microbatches(schedule, v):
    """For few of them occupancy is as for many, but under GPipe."""
    job = memory.Job(hardware.MODELS["gpt3-1.3b"], 64)
    layout = memory.Layout(pp=4, schedule=schedule, chunks=v, microbatches=64)
    stages = memory.stages_of(job.model, schedule, 4, v)
    for rank in range(4):
        held, few = (max(memory.occupancy(schedule, 4, m, v, rank, tuple(stages[rank].items())))
                     for m in (64, 8))
        assert held == few or schedule == "gpipe"
    less = memory.memory(memory.Job(job.model, 32), layout._replace(microbatches=32))
    ratio = memory.memory(job, layout)["activations"] / less["activations"]
    assert ratio > 1.9 if schedule == "gpipe" else ratio == 1


@pytest.mark.parametrize("experts", [0, 4])
def test_the_planner_counts_parameters_as_the_model_has_them(experts):
    config = GPTConfig(1003, block_size=24, n_layer=3, n_head=4, n_embd=16, n_experts=experts)
    with torch.device("meta"):
        model = model_file.GPT(config)
    assert memory.n_parameters(config) == sum(p.numel() for p in model.parameters())


def test_activations_are_those_of_korthikanti_et_al():
    """arXiv 2205.05198, per token and layer, with dropout: ours are 8 bytes more, LayerNorm's."""
    model, T = GPTConfig(51200, 2048, 48, 64, 6144), 8
    job, h, five = memory.Job(model, 4, "naive"), 6144, 5 * 64 * 2048
    for layout, want in {
            memory.Layout(): 34 * h + five,
            memory.Layout(tp=T): 10 * h + 24 * h / T + five / T,
            memory.Layout(tp=T, sp=True): (34 * h + five) / T,
            memory.Layout(tp=T, sp=True, recompute="selective"): 34 * h / T,
            memory.Layout(recompute="full"): 2 * h}.items():
        norms = 0 if layout.recompute == "full" else 8 / (T if layout.sp else 1)
        assert memory.saved_by_block(job, layout, layout.recompute) == want + norms


def test_flops_are_those_of_narayanan_et_al():
    """arXiv 2104.04473, section 3, and days of training = 8 tokens P / (GPUs x FLOP/s)."""
    model, B = hardware.MODELS["gpt3-175b"], 1536
    L, h, S, V = 96, 12288, 2048, 51200
    want = 96 * B * S * L * h * h * (1 + S / (6 * h) + V / (16 * L * h))
    job = memory.Job(model, B)
    assert math.isclose(costs.step_flops(job, "full"), want, rel_tol=1e-12)
    head = 6 * B * S * h * V  # is not recomputed
    assert math.isclose(costs.step_flops(job), 0.75 * (want - head) + head, rel_tol=1e-12)
    days = 300e9 / (B * S) * want / (1024 * 140e12) / 86400
    assert 33 < days < 35


@pytest.mark.parametrize("schedule,P,m,v", [("1f1b", 4, 23, 1), ("interleaved", 4, 32, 3),
                                            ("zb-h1", 4, 21, 1), ("zb-h2", 3, 17, 1),
                                            ("zb-v", 4, 30, 2), ("gpipe", 3, 20, 1)])
def test_two_short_simulations_tell_of_a_long_one(schedule, P, m, v):
    for times in ((1, 1, 1, 0), (1, 1, 1, 0.125), (1, 1.5, 0.75, 0.5)):
        lists, where = schedules.make_schedule(schedule, P, m, v), schedules.placement(
            schedule, P, v)
        long = schedules.simulate(lists, where, times).makespan
        assert math.isclose(costs.makespan(schedule, P, m, v, times), long, rel_tol=5e-3)


def test_the_search_finds_the_fastest_that_fits():
    """Against trying them all, for a model of which little fits."""
    job = memory.Job(GPTConfig(51200, 1024, 10, 12, 3072), 48)
    device = replace(hardware.DEVICES["a100-80"], gb=4, node=4)
    search = search_file.Search(job, 12, device, {})
    every = [layout._replace(zero=zero) for layout in search.layouts() for zero in range(4)]
    fit = [(costs.step_time(job, layout, device), layout) for layout in every
           if memory.memory(job, layout)["total"] <= 4e9 and (layout.dp * layout.cp > 1
                                                               or layout.zero == 0)]
    best = {}
    for seconds, layout in sorted(fit, reverse=True):
        best[layout[:6]] = seconds
    found = search.best(8)
    assert len(fit) < len(every) / 2 and len(every) > 1000
    assert [seconds for seconds, _ in found] == sorted(best.values())[:8]


@pytest.mark.parametrize("flags", [
    "--model gpt3-1.3b --gpus 32 --batch-size 64", "--model gpt3-1.3b --gpus 8 --tp 4 --cp 2",
    "--model gpt3-1.3b --gpus 16 --experts 8 --pp 2 --ep 2 --batch-size 64",
    "--model megatron-7.5b --gpus 16 --pp 4 --schedule interleaved --gpu h100 --attention naive",
    "--n-layer 6 --n-head 8 --n-embd 512 --gpus 6 --tp 1 --dp 3 --zero 2 --recompute",
    "--model gpt3-1.3b --chunks 2 --pp 4 --no-sp"])
def test_the_planner_prints_commands_that_train_takes(flags, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan.py", *flags.split(), "--json", "--top", "4"])
    plan.main()
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert layouts == sorted(layouts, key=lambda row: row["step_s"])
    named = dict(re.findall(r"--(dp|tp|pp|cp|ep|zero|schedule) (\S+)", flags))
    for row in layouts:
        cfg = parse(row["command"].split("train.py ")[1].split())
        nodes = re.search(r"--nnodes (\d+) --nproc-per-node 8 ", row["command"])
        ranks = row["dp"] * row["tp"] * row["pp"] * row["cp"]
        assert int(nodes[1]) * 8 == ranks if nodes else ranks <= 8
        assert cfg.dtype == "bfloat16" and cfg.recompute == (row["recompute"] == "full")
        assert check_layout(cfg, ranks) == ranks
        for name in ("dp", "tp", "pp", "cp", "ep", "sp", "zero", "schedule", "microbatches"):
            assert getattr(cfg, name) == row[name]
        assert all(str(row[name]) == value for name, value in named.items())
        parts = [size for part, size in row["memory_gb"].items() if part != "total"]
        assert math.isclose(sum(parts), row["memory_gb"]["total"])
        assert math.isclose(sum(row["time_s"].values()), row["step_s"])


@pytest.mark.parametrize("flags,line", [
    ("--gpus 64 --tp 3", "--tp 3"), ("--gpus 8 --tp 16", "--tp 16"),
    ("--model gpt3-175b --gpus 8", "no layout fits"), ("--gpu a1", "--gpu"),
    ("--gpus 8 --pp 2 --dp 3 --layout", "does not match"), ("--gpus 0", "--gpus 0"),
    ("--gpus 12", "--node 8"), ("--ep 2", "--ep 2"), ("--n-embd 100", "--n-embd 100"),
    ("--gpus 1 --tp 2", "--gpus 1"), ("--tp 0", "--tp 0"), ("--tflops 0", "--tflops 0"),
    ("--gpus 8 --svg /nowhere/at/all", "/nowhere/at/all"), ("--batch-size -3", "--batch-size -3")])
def test_the_planner_answers_bad_flags_with_one_line(flags, line, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan.py", *flags.split()])
    with pytest.raises(SystemExit) as end:
        plan.main()
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2 and line in said and said.count("\n") == 0


def test_worked_figures_of_memory_and_of_the_ring():
    def states(parameters, stage, ranks):
        return parameters * sum(zero.bytes_per_parameter(stage, ranks)) / 1e9

    assert states(7e9, 0, 1) == 112 and states(70e9, 0, 1) == 1120
    assert [round(states(7e9, stage, 64), 2) for stage in (1, 2, 3)] == [29.31, 15.53, 1.75]
    assert states(13e9 / 4, 3, 16) == 3.25  # P = 4
    assert pictures.bytes_sent(c.all_reduce, 8, 4_000_000_000) == 7_000_000_000


def test_pictures_are_tables_and_svg(capsys, monkeypatch, tmp_path):
    Path(tmp_path, "run.jsonl").write_text('{"step": 0, "loss": 4.5}\n{"step": 1, "loss": 3.5}\n')
    for flags, files in (("", "memory-wall ring memory bubble grid"),
                         (f"--metrics {tmp_path}/run.jsonl", "loss")):
        monkeypatch.setattr(sys, "argv", ["pictures.py", "--svg", str(tmp_path), *flags.split()])
        pictures.main()
        for name in files.split():
            ElementTree.parse(tmp_path / f"{name}.svg")
    said = capsys.readouterr().out
    for figure in ("112 GB", "1,120 GB", "29.3    15.5    1.75", "8          1.7500         7 ",
                   "46.7%  46.7%"):
        assert figure in said


def test_the_planner_explains_a_layout_and_draws_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [
        "plan.py", "--model", "gpt3-1.3b", "--gpus", "8", "--pp", "4", "--layout", "--recompute",
        "--svg", str(tmp_path)])
    plan.main()
    said = capsys.readouterr().out
    assert "torchrun train.py --dp 2 --pp 4" in said and "times as fast; seconds less of" in said
    for name in ("memory", "timeline"):
        ElementTree.parse(tmp_path / f"layout-{name}.svg")


# ---- the command line ----


def command(*args, env=None, timeout=120):
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True,
                          timeout=timeout, cwd=HERE, env={**os.environ, **(env or {})})


def one_line(main, argv, capsys, monkeypatch):
    """What a command says, run in this process, that ends with one line and exit code 2."""
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    return error


FORGED = {  # meta.json: a text, or what is put into a sound one
    "meta": "{}", "deep": "[" * 100_000, "list": "[1]", "binary": "\\x00\u2028",
    "twice": '{"vocab_size": 67, "vocab_size": 68}', "huge": {"vocab_size": 10**12},
    "infinite": {"vocab_size": math.inf}, "negative": {"vocab_size": -5},
    "float": {"vocab_size": 67.0}, "true": {"vocab_size": True}, "tokenizer": {"tokenizer": 7},
    "gone-vocabulary": {"tokenizer": "bpe"}, "zero": {"bytes_per_token": 0},
    "letters": {"bytes_per_token": "abc"}, "gzip": {"gzip_bits_per_byte": []}}


def damaged(corpus, tmp_path, how):
    folder = tmp_path / "data"
    folder.mkdir()
    for path in Path(corpus).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if how == "missing":
        (folder / "val.bin").unlink()
    elif how in FORGED:
        meta = json.loads((folder / "meta.json").read_text())
        text = FORGED[how]
        (folder / "meta.json").write_text(text if type(text) is str else json.dumps(meta | text))
    elif how == "vocabulary":
        (folder / "vocab.tiktoken").write_text("AAAA 0\nAAAB x\n")
        (folder / "meta.json").write_text('{"vocab_size": 67, "tokenizer": "bpe"}')
    elif how == "truncated":
        (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-3])
    else:
        np.full(5000, 67, "<u2").tofile(folder / "train.bin")
    return folder


@pytest.mark.parametrize("flags,says", [
    ("--tp 3", "--tp 3 must divide --n-head 4; try 1 or 2 or 4"),
    ("--pp 5", "--pp 5 must be at most --n-layer 4"),
    ("--dp 3", "--dp 3 must divide --batch-size 32"),
    ("--microbatches 5", "must divide --batch-size 32"),
    ("--schedule wave", "invalid choice: 'wave'"),
    ("--block-size 9999", "--block-size 9999 is longer than"),
    ("--data missing", "val.bin is missing"),
    ("--data truncated", "is truncated"),
    ("--data beyond", "beyond the vocabulary"),
    ("--out /proc/nowhere", "cannot be written"),
    ("--device cuda", "--device cuda"),
    *((f"--lr {value}", f"--lr {value} must be finite, and 0 or more")
      for value in ("nan", "inf", "-1.0")),
    ("--n-embd 130", "--n-head 4 must divide --n-embd 130; try --n-embd 132"),
    ("--n-embd 100000000", "--n-embd 100000000 must be at most 1,000,000"),
    ("--n-embd 1000000", "of this machine's"), ("--n-layer 1000000", "of this machine's"),
    ("--batch-size 1000000 --block-size 4000", "of this machine's"),
    ("--n-layer 1000000000", "must be at most 1,000,000"),
    ("--batch-size 1000000000", "must be at most 1,000,000"),
    ("--stepz 3", "unrecognized arguments"),
    ("--steps many", "invalid int value"),
    ("--schedule interleaved --pp 2 --microbatches 1", "1 must be a multiple of --pp 2"),
    ("--metrics /tmp", "--metrics /tmp cannot be written"),
    ("--trace /tmp", "--trace /tmp cannot be written"),
    *((f"--data {how}", "meta.json is damaged (") for how in FORGED),
    ("--data vocabulary", "meta.json is damaged ("),
    ("--cp 3", "--block-size 8 must be a multiple of 6, for 2 pieces on each rank of --cp 3; try 6 "
               "or 12"),
    ("--tp 4 --sp --block-size 6", "--block-size 6 must be a multiple of 4, for --sp on --tp 4; "
                                   "try 4 or 8"),
    ("--cp 2 --tp 4 --sp --block-size 12", "12 must be a multiple of 8, for 2 pieces on each rank "
                                           "of --cp 2 and --sp on --tp 4; try 8 or 16"),
    ("--cp 4 --tp 2 --cp-attention all-to-all", "--cp 4 must divide the 2 heads of a rank, "
     "--n-head 4 over --tp 2, for --cp-attention all-to-all; try 1 or 2, or ring"),
    ("--cp 0", "--cp 0 must be at least 1"),
    ("--ep 2 --dp 2", "--ep 2 is for --experts"),
    ("--ep 2 --dp 1 --experts 4", "--ep 2 must divide --dp 1, whose ranks share the experts; try "
                                  "--dp 2"),
    ("--ep 2 --dp 2 --experts 5", "--experts 5 must be a multiple of --ep 2 x --tp 1 = 2; try 4 or "
                                  "6"),
    ("--experts 4 --top-k 5", "--top-k 5 must be at most --experts 4"),
    ("--experts 8 --top-k 7", "--top-k 7 must divide 4 x --n-embd 128"),
])
def test_bad_input_is_one_line_and_exit_code_2(corpus, tmp_path, flags, says, capsys, monkeypatch):
    if flags == "--device cuda" and torch.cuda.is_available():
        flags += " --dp 32"
    how = flags.split()[-1]
    if flags.startswith("--data"):
        flags = f"--data {damaged(corpus, tmp_path, how)}"
    else:
        flags += f" --data {corpus}"
    base = f"train.py --device cpu --block-size 8 --out {tmp_path}/out {flags}"  # the last counts
    monkeypatch.setattr(train, "train", lambda *args: pytest.fail("went on"))
    assert says in one_line(train.main, base.split(), capsys, monkeypatch)


@pytest.mark.parametrize("env,says", [
    ({"WORLD_SIZE": "2"}, "RANK='' MASTER_ADDR='' MASTER_PORT='', which is not torchrun's"),
    ({"WORLD_SIZE": "abc"}, "the environment has WORLD_SIZE='abc'"),
    ({"WORLD_SIZE": "2", "RANK": "5", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
     "RANK='5'"),
    ({"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": ""}, "--tp 0 must be at least 1")], ids=str)
def test_an_environment_that_is_not_torchruns_is_one_line(corpus, env, says, capsys, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    tp = ["--tp", "0"] if "--tp" in says else []
    argv = ["train.py", "--data", corpus, "--device", "cpu", *tp]
    monkeypatch.setattr(train, "train", lambda *args: pytest.fail("went on"))
    assert says in one_line(train.main, argv, capsys, monkeypatch)


def test_nanogpts_folders_of_characters_have_their_own_vocabulary(corpus, tmp_path):
    for name in ("train.bin", "val.bin"):
        shutil.copy(Path(corpus, name), tmp_path)
    assert Data(config(str(tmp_path))).vocab_size == 50257
    (tmp_path / "meta.pkl").touch()
    assert Data(config(str(tmp_path))).vocab_size == VOCAB


def test_more_ranks_than_gpus_fall_back_to_the_cpu_and_say_so(corpus, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cfg = config(corpus, dp=2, device="auto")
    check(cfg, 2)
    assert cfg.device == "cpu" and "2 processes for 1 GPUs" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--device cuda"):
        check(config(corpus, dp=2, device="cuda"), 2)


@needs_minutes
def test_bad_input_under_torchrun_speaks_from_one_rank(corpus):
    runs = [command("train.py", "--dp", 3, "--data", corpus, env={
        "WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
            for rank in "01"]
    assert [run.returncode for run in runs] == [2, 2]
    assert "= 3 does not match the 2 processes" in runs[0].stderr and runs[1].stderr == ""


def test_one_command_relaunches_itself_and_has_the_losses_of_one_process(corpus, tmp_path):
    logs = []
    for flags in ("--dp 1", "--tp 2 --pp 2"):
        log = tmp_path / f"{len(logs)}.jsonl"
        flags += (f" --data {corpus} --dtype float64 --steps 4 --block-size 8 --n-embd 16"
                  f" --metrics {log} --batch-size 8 --eval-interval 2 --eval-batches 2"
                  f" --out {tmp_path}/out")
        run = command("train.py", *flags.split())
        assert run.returncode == 0 and run.stdout.endswith("replicas agree\n"), run.stderr
        logs.append([json.loads(line) for line in log.read_text().splitlines()])
    assert len(logs[0]) == len(logs[1]) == 4 + 2
    for one, four in zip(*logs, strict=True):
        assert one.keys() == four.keys()
        for key in {"loss", "grad_norm", "lr", "val_loss", "val_bits_per_byte"} & one.keys():
            assert math.isclose(one[key], four[key], rel_tol=1e-10), (key, one, four)


def test_the_next_batch_is_read_while_this_one_is_computed(corpus):
    cfg, mesh, asked = config(corpus, microbatches=2, steps=3), Mesh(dp=1), []
    data = Data(cfg)
    training = data.training
    data.training = lambda cfg, step, mesh: (asked.append(step), training(cfg, step, mesh))[1]
    batches = data.ahead(cfg, mesh, 0)
    for step in range(3):
        for (ids, targets), (want, shifted) in zip(batches(step), training(cfg, step, mesh),
                                                   strict=True):
            assert torch.equal(ids, want) and torch.equal(targets, shifted)
        deadline = time.time() + 10
        while len(asked) < min(step + 2, 3) and time.time() < deadline:
            time.sleep(0.001)
        assert asked == [*range(min(step + 2, 3))]  # and nobody has asked for the next one yet


def test_prepare_splits_learns_and_decodes_to_the_same_text(tmp_path):
    text = "".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(400))
    (tmp_path / "corpus.txt").write_text(text)
    for tokenizer in ("bpe", "bytes"):
        metas = [prepare([tmp_path / "corpus.txt"], tmp_path / name, tokenizer, 300)
                 for name in ("a", "b")]
        assert metas[0] == metas[1] and metas[0]["vocab_size"] <= 300
        ids = [np.fromfile(tmp_path / "a" / f"{s}.bin", "<u2").tolist() for s in ("train", "val")]
        decoded = "".join(load_tokenizer(tmp_path / "a").decode(part) for part in ids)
        assert decoded == text + "\n"
        assert math.isclose(metas[0]["bytes_per_token"],
                            len(load_tokenizer(tmp_path / "a").decode(ids[1])) / len(ids[1]))


# ---- checkpoints and faults ----


def gathered_state(trainer):
    """{kind: [(tag, this rank's whole tensor)]} of what a checkpoint holds, over ZeRO's shards."""
    found = {"weights": local_tensors(trainer, "weights"), "exp_avg": [], "exp_avg_sq": []}
    for kind, bucket in itertools.product(("exp_avg", "exp_avg_sq"), trainer.reducer.buckets):
        flat = torch.zeros(bucket.numel, dtype=bucket.master.dtype)
        shard = flat[bucket.offset : bucket.offset + len(bucket.weight_shard)]
        pieces = bucket.pieces(shard)
        for (_, view), (_, master, _) in zip(pieces, bucket.owned, strict=True):
            view.copy_(trainer.optimizer.adam.state[master][kind])
        if bucket.shards > 1:
            c.all_gather(flat, bucket.group)
        found[kind] += [(bare(p.shard), bucket.view(flat, p)) for p in bucket.params]
    steps = {int(trainer.optimizer.adam.state[master]["step"]) for bucket in trainer.reducer.buckets
             for _, master, _ in bucket.owned}
    return found, steps


def _hop(rank, cfg, folder):
    """Load, take one step, save: (state as loaded, loss, state as saved, the new folder)."""
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    step = checkpoint.load(trainer, folder) if folder else 0
    before = gathered_state(trainer) if folder else None
    loss, norm = trainer.gradients(data.training(cfg, step, mesh))
    trainer.update(norm, train.learning_rate(cfg, step))
    folder = checkpoint.save(trainer, step + 1)
    return before, loss, gathered_state(trainer), folder


WALK = [dict(dp=2, tp=2), dict(pp=4, microbatches=3), dict(dp=3, zero=3, pad_vocab=16),
        dict(tp=3, pp=2, zero=1), dict(dp=2, pp=2, tp=2, zero=3, microbatches=2), dict(),
        dict(dp=2, pp=3, zero=2),
        dict(tp=4, pp=2, microbatches=2), dict(dp=4, tp=2, zero=1, batch_size=36), dict(pp=5),
        dict(dp=2, pp=2, schedule="zb-v", chunks=2, microbatches=3, zero=2),
        dict(pp=3, schedule="interleaved", chunks=2, microbatches=3),
        dict(cp=2, tp=2, sp=True, pp=2), dict(cp=4, dp=2, zero=3)]


WALK_WITH_EXPERTS = [dict(dp=4, ep=4), dict(), dict(dp=2, ep=2, zero=3), dict(tp=2, pp=2),
                     dict(dp=4, ep=2, tp=2, sp=True, zero=1)]


@pytest.mark.parametrize("dtype,experts,walk", [
    ("float64", 0, WALK if FULL else WALK[1::2]),
    ("bfloat16", 0, WALK if FULL else WALK[::2]), ("float64", 4, WALK_WITH_EXPERTS)],
    ids=["float64", "bfloat16", "experts"])
def test_any_layout_reads_any_others_checkpoint_bit_for_bit(corpus, tmp_path, dtype, experts, walk):
    """A walk in random order. Losses: to 1e-10 those of the run that never stopped."""
    order = np.random.default_rng(0).permutation(len(walk))
    flags = dict(dtype=dtype, out=str(tmp_path), n_head=12, steps=len(walk), experts=experts)
    cfg = config(corpus, **flags)
    want = pool(check(cfg, 1), _train, cfg, len(walk))[0][1:]
    folder = last = None
    for i, layout in enumerate(walk[j] for j in order):
        cfg = config(corpus, **flags, **{k: v for k, v in layout.items() if k not in flags})
        got = pool(check(cfg, 1), _hop, cfg, folder)
        folder = got[0][3]
        for which, want_steps in ((0, {i}), (2, {i + 1})):
            if which == 0 and not i:
                continue
            assert set().union(*(rank[which][1] for rank in got)) == want_steps
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            if i:
                loaded = assemble([rank[0][0][kind] for rank in got])
                assert loaded.keys() == last[kind].keys()
                for name, value in last[kind].items():
                    assert torch.equal(loaded[name], value), (layout, kind, name)
        last = {kind: assemble([rank[2][0][kind] for rank in got]) for kind in got[0][2][0]}
        if dtype == "float64":
            close(got[0][1], want[i]["loss"], f"loss {layout}")


def _growth(rank, cfg):
    """Bytes by which this rank's memory peaked above what it held, in save and in load."""
    trainer = train.Trainer(cfg, mesh_of(cfg), VOCAB)
    own = sum(t.nbytes for *_, tensors, _ in checkpoint.slices(trainer) for t in tensors.values())
    largest = max(p.nbytes for layer in trainer.stages[0].layers for p in layer.parameters())

    def status(key):
        line = next(x for x in open("/proc/self/status") if x.startswith(key))
        return 1024 * int(line.split()[1])

    grown = []
    for fn, arg in ((checkpoint.save, 0), (checkpoint.load, Path(cfg.out, "step-00000000"))):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status("VmRSS")
        fn(trainer, arg)
        grown.append(status("VmHWM") - before)
    return own, largest, grown


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux measures it")
@pytest.mark.parametrize("layout", [dict(dp=2, tp=2, zero=3), dict(dp=2, tp=2)])
def test_no_rank_holds_more_than_its_slices_and_one_buffer(corpus, tmp_path, layout):
    cfg = config(corpus, n_layer=8, n_embd=384, dtype="float32", out=str(tmp_path), **layout)
    for own, largest, grown in pool(check(cfg, 1), _growth, cfg):
        assert own > 4 * (largest + (8 << 20))  # so that a second copy of the slices would show
        assert all(peak < largest + (8 << 20) for peak in grown), (own, largest, grown)


def _main(rank, size, port, argv, folder, limit):
    """One rank of a run, as torchrun would start it, forked from a process that has torch."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port,
                        "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
                        "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        os.environ[name] = str(value)
    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    sys.argv = ["train.py", *map(str, argv[rank] if isinstance(argv[0], list) else argv)]
    train.main()


class Run:
    """train.py's main in `size` forked ranks, under a wall limit; argv for all, or one for each."""

    def __init__(self, size, argv, folder, limit=0, fn=_main):
        context = forkserver()
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True,
                                                wait_for_workers=False)
        self.ranks = [context.Process(target=fn, args=(r, size, self.store.port, argv,
                                                       str(self.folder), limit))
                      for r in range(size)]
        for rank in self.ranks:
            rank.start()

    def until(self, condition, seconds=60):
        deadline = time.time() + seconds
        while not condition():
            assert time.time() < deadline and any(r.is_alive() for r in self.ranks), self.read()
            time.sleep(0.002)

    def signal(self, rank, number):
        os.kill(self.ranks[rank].pid, number)

    def wait(self, seconds=60, but=()):
        """Exit codes of all ranks but some; those are killed."""
        deadline = time.time() + seconds
        for i, rank in enumerate(self.ranks):
            rank.join(0 if i in but else max(0, deadline - time.time()))
        late = [i for i, rank in enumerate(self.ranks) if rank.is_alive() and i not in but]
        for rank in self.ranks:
            rank.kill()
            rank.join()
        assert not late, (late, self.read())
        return [rank.exitcode for i, rank in enumerate(self.ranks) if i not in but]

    def read(self, name="stderr"):
        path = self.folder / name
        return path.read_text() if path.exists() else ""


def flags(corpus, out, **more):
    every = dict(data=corpus, out=out, n_layer=2, n_head=2, n_embd=8, block_size=8, batch_size=4,
                 dtype="float64", eval_interval=0, device="cpu", warmup_steps=2, log_interval=1,
                 steps=4, timeout=30)
    return [x for k, v in {**every, **more}.items() for x in (f"--{k.replace('_', '-')}", v)]


def losses(log):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in
            map(json.loads, Path(log).read_text().splitlines())]


STORM = [(8 if FULL else 5, {"zero": 2, "dp": 2}), (4, {"tp": 2, "sp": True}),
         (4, {"cp": 2, "zero": 3}), (4, {"dp": 2, "ep": 2, "experts": 4, "zero": 3})]


@pytest.mark.parametrize("kills,layout", STORM if FULL else STORM[:1], ids=str)
def test_a_storm_of_kills_leaves_the_trace_of_the_uninterrupted_run(
        corpus, tmp_path, kills, layout):
    """Five of them; with FULL=1 eight, and three times four."""
    args = {"steps": 2 + 5 * kills, "save_interval": 2, "keep": 2, **layout}
    sp = ["--sp"] if args.pop("sp", False) else []
    whole = Run(2, flags(corpus, tmp_path / "whole", metrics=tmp_path / "whole.log", **args) + sp,
                tmp_path)
    out, log = tmp_path / "killed", tmp_path / "killed.log"
    log.touch()
    assert whole.wait() == [0, 0], whole.read()
    rng, in_a_save = np.random.default_rng(1), 0
    for kill in range(kills):
        run = Run(2, flags(corpus, out, metrics=log, resume="auto", **args) + sp, tmp_path)
        lines = log.read_bytes().count(b"\n") if kill else 0
        more, pause = int(rng.integers(1, 4)), rng.uniform(0, 0.01)
        run.until(lambda run=run: "step " in run.read("stdout"))  # its log is open
        lines = min(lines, log.read_bytes().count(b"\n"))
        run.until(lambda n=lines + more: log.read_bytes().count(b"\n") >= n)
        if kill % 2:  # while files are written
            run.until(lambda: any(out.glob("step-*.tmp")))
        else:
            time.sleep(pause)
        run.signal(int(rng.integers(2)), signal.SIGKILL)
        codes = run.wait()
        in_a_save += any(out.glob("step-*.tmp"))
        assert -signal.SIGKILL in codes and not {0, 2} & set(codes), (codes, run.read())
        assert run.read().count("\n") <= 1 and "Traceback" not in run.read(), run.read()
    assert in_a_save >= 1, in_a_save
    last = Run(2, flags(corpus, out, metrics=log, resume="auto", **args) + sp, tmp_path)
    assert last.wait() == [0, 0], last.read()
    assert losses(log) == losses(tmp_path / "whole.log")
    end = f"step-{args['steps']:08d}"
    assert max(p.name for p in out.glob("step*")) == end and len([*out.glob("step*")]) == 2
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        one, other = (tmp_path / run / end / name for run in ("whole", "killed"))
        assert one.read_bytes() == other.read_bytes()


def launched(argv, agent=False):
    """A process that starts two ranks of train.py, itself or as torchrun's agent, and their pids,
    in no order."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] * agent
    run = subprocess.Popen([sys.executable, *torchrun, "train.py", *map(str, argv)], cwd=HERE,
                           text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ranks():
        said = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True)
        return list(map(int, said.stdout.split()))

    while len(ranks()) < 2 and run.poll() is None:
        time.sleep(0.05)
    return run, ranks()


def gone(pids, seconds):
    deadline = time.time() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.time() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux")
def test_ranks_end_with_the_process_that_started_them(corpus, tmp_path):
    """Killed while they train; told to stop while they are being started."""
    argv = flags(corpus, tmp_path / "out", dp=2, steps=10**6)
    run, ranks = launched(argv)
    for line in run.stdout:
        if line.startswith("step      2"):
            break
    run.kill()
    assert gone(ranks, 5) and run.wait() == -signal.SIGKILL
    assert run.stderr.read() == ("train.py: the process that started the ranks has gone, so they "
                                 "end\n")
    run, ranks = launched(argv)
    run.terminate()
    _, said = run.communicate(timeout=20)
    assert run.returncode == 128 + signal.SIGTERM and gone(ranks, 1)
    assert said == "train.py: stopped by SIGTERM before the first step\n"


@needs_minutes
@pytest.mark.parametrize("agent", [False, True], ids=["launcher", "torchrun's agent"])
def test_ten_kills_of_who_started_the_ranks(corpus, tmp_path, agent):
    """At random moments. All ranks are gone soon, and the run goes on to the same trace."""
    args = dict(dp=2, zero=1, steps=400, save_interval=2, keep=2, n_embd=32)
    assert Run(2, flags(corpus, tmp_path / "whole", metrics=tmp_path / "want", **args),
               tmp_path).wait() == [0, 0]
    argv = flags(corpus, tmp_path / "out", metrics=tmp_path / "log", resume="auto", **args)
    rng, slowest = np.random.default_rng(3), 0.0
    for _ in range(10):
        run, ranks = launched(argv, agent)
        for line in run.stdout:
            if line.startswith("step") and "loss" in line:
                break
        assert len(ranks) == 2
        time.sleep(rng.uniform(0, 0.1))
        run.kill()
        began = time.time()
        assert gone(ranks, 10), "orphans"
        slowest = max(slowest, time.time() - began)
        run.communicate()
    print(f"ranks were gone within {slowest:.2f} s")
    run, _ = launched(argv, agent)
    said = run.communicate()
    assert run.returncode == 0, said
    assert losses(tmp_path / "log") == losses(tmp_path / "want")


@needs_minutes
@pytest.mark.parametrize("agent", [False, True], ids=["launcher", "torchrun's agent"])
@pytest.mark.parametrize("pause", [0, 1.5, None], ids=["at once", "imports", "training"])
def test_a_stopped_rank_ends_the_run_within_two_timeouts(corpus, tmp_path, agent, pause):
    """... and one line names it. (Two timeouts from when the others have been started.)"""
    run, ranks = launched(flags(corpus, tmp_path / "out", dp=2, steps=10**6, timeout=5), agent)
    if pause is None:
        for line in run.stdout:
            if line.startswith("step      2"):
                break
    time.sleep(pause or 0)
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.time()
    _, said = run.communicate(timeout=60)
    assert run.returncode == 1 and gone(ranks, 1)
    assert time.time() - began < 10 + (5 if pause == 0 else 0), time.time() - began
    lines = [line for line in said.splitlines() if line.startswith("train.py: rank")]
    assert len(lines) == 1 + (not agent), said
    assert re.search(r"(waiting for|receive from) rank (\d)", lines[0]), said
    if not agent:
        assert lines[1].endswith(" was ended by SIGKILL") and lines[1][15] == re.search(
            r"(?:waiting for|receive from) rank (\d)", lines[0])[1], said


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_hangs_or_dies_ends_the_run_with_one_message(corpus, tmp_path, number):
    run = Run(4, flags(corpus, tmp_path / "out", tp=2, pp=2, steps=10**6, timeout=2), tmp_path)
    run.until(lambda: "step      2" in run.read("stdout"))
    run.signal(1, number)
    started = time.time()
    assert run.wait(but=[1]) == [1, 1, 1]
    assert time.time() - started < 2 + 5
    assert run.read().count("\n") == 1, run.read()
    assert re.match(r"train.py: (group \w+: )?rank \d: operation \d+ of group \w+, "
                          r"(receive from|send to) rank \d", run.read()), run.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_any_rank_saves_after_the_step_and_exits_0(corpus, tmp_path, number):
    args = dict(dp=2, steps=10**6)
    run = Run(2, flags(corpus, tmp_path / "out", **args), tmp_path)
    run.until(lambda: "step      1" in run.read("stdout"))
    run.signal(1, number)
    assert run.wait() == [0, 0] and run.read() == ""
    last = checkpoint.newest(tmp_path / "out")
    assert f"goes on from {last}\n" in run.read("stdout")


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4 of a small run on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    run = Run(2, flags(corpus, folder / "out", tp=2, save_interval=2), folder)
    assert run.wait() == [0, 0], run.read()
    return folder / "out"


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("step*/*") if path.is_file()}


def rewrite(path, change):
    """A safetensors file again, with change({name: (shape, bytes)}) in it."""
    entries, raw = tensorfile.read_header(path), path.read_bytes()
    tensors = {n: (e.shape, raw[e.begin : e.end]) for n, e in entries.items()}
    change(tensors)
    head, _ = tensorfile.make_header({n: torch.Size(s) for n, (s, _) in tensors.items()}, "F64")
    path.write_bytes(head + b"".join(data for _, data in tensors.values()))


HEADERS = {  # what becomes of the header's text
    "a dtype that is a list": lambda text: text.replace('"F64"', "[1]", 1),
    "a float offset": lambda text: re.sub(r"\[(\d+), (\d+)\]}", r"[\1.5, \2]}", text, count=1),
    "an overlap": lambda text: re.sub(r"\[(\d+), (\d+)\]}}$", r"[0, \2]}}", text.rstrip()),
    "an offset into the header": lambda text: text.replace("[0, ", "[-8, ", 1),
    "a name twice": lambda text: text.rstrip()[:-1] + ', "lm_head.weight": {}}',
    "a header that is deep": lambda text: "[" * 100_000}


MANIFESTS = {  # what is put into a manifest
    "forged step": {"step": "4"}, "forged depth": {"model": {"n_layer": "two"}},
    "forged heads": {"model": {"n_head": 0}}, "forged name": {"model": {"n_heads": 2}},
    "forged size": {"model": {"n_embd": 2**60}}, "forged scale": {"scale": None},
    "forged infinity": {"scale": 10**400}, "forged number": {"number": 2**63 - 1},
    "forged checksums": {"checksums": [1]}, "forged checksum files": {"checksums": {}}}


def spoil(folder, how):
    model, optimizer = folder / checkpoint.MODEL, folder / checkpoint.OPTIMIZER
    manifest = folder / checkpoint.MANIFEST
    if how == "truncated":
        os.truncate(optimizer, optimizer.stat().st_size - 100)
    elif how == "gone":
        model.unlink()
    elif how == "a tensor missing":
        rewrite(model, lambda tensors: tensors.pop("transformer.ln_f.weight"))
    elif how == "wrong shape":
        rewrite(model, lambda tensors: tensors.update({
            "transformer.wpe.weight": ((4, 16), tensors["transformer.wpe.weight"][1])}))
    elif how in MANIFESTS:  # with a right seal
        changed = json.loads(manifest.read_text())
        for name, value in MANIFESTS[how].items():
            changed[name] = changed[name] | value if name == "model" else value
        manifest.write_text(json.dumps({**changed, "seal": checkpoint.seal(changed)}))
    elif how == "forged sums":  # with a right seal
        changed = json.loads(manifest.read_text())
        changed["checksums"][checkpoint.MODEL] = {}
        manifest.write_text(json.dumps({**changed, "seal": checkpoint.seal(changed)}))
    elif how == "deep":
        manifest.write_text("[" * 100_000)
    elif how in HEADERS:
        raw = model.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        text = HEADERS[how](raw[8 : 8 + length].decode()).encode()
        model.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    elif how == "another model":
        changed = json.loads(manifest.read_text())
        changed["model"]["n_layer"] = 3
        manifest.write_text(json.dumps({**changed, "seal": checkpoint.seal(changed)}))
    else:  # a bit flipped, in that file, so many bytes from its start or end
        path, at = {"manifest": (manifest, 30), "header": (model, 40), "data": (optimizer, -1),
                    "weights": (model, -VOCAB * 64 - 1)}[how]
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)


@pytest.mark.parametrize("how,says", [
    ("truncated", "optimizer.safetensors, tensor transformer.ln_f.bias.exp_avg: cut off"),
    ("data", "optimizer.safetensors, tensor transformer.ln_f.bias.exp_avg_sq: damaged, the check"),
    ("weights", "model.safetensors, tensor transformer.ln_f.bias: damaged, the check"),
    ("header", "model.safetensors: not a safetensors file, or its header is damaged"),
    ("manifest", "manifest.json: damaged"),
    ("gone", "model.safetensors: No such file or directory"),
    ("a tensor missing", "model.safetensors, tensor transformer.ln_f.weight: missing"),
    ("wrong shape", "model.safetensors, tensor transformer.wpe.weight: "),
    ("another model", ": its n_layer is 3, this run's is 2"),
    ("forged sums", "model.safetensors, tensor transformer.wte.weight: damaged, the checksum"),
    *((how, "manifest.json: damaged") for how in ("deep", *MANIFESTS)),
    *((how, "model.safetensors: not a safetensors file, or its header is damaged")
      for how in HEADERS),
])
def test_damage_is_one_line_that_names_file_and_tensor(
        corpus, trained, tmp_path, how, says, capsys, monkeypatch):
    """... to whoever reads it: training that resumes, training that starts from weights, sample."""
    out = shutil.copytree(trained, tmp_path / "out")
    last = out / "step-00000004"
    spoil(last, how)
    before = contents(out)
    run = Run(2, flags(corpus, out, dp=2, steps=6, resume=last), tmp_path)
    assert run.wait() == [2, 2] and says in run.read(), run.read()
    assert run.read().count("\n") == 1 and contents(out) == before
    if "optimizer" not in says:
        argv = flags(corpus, tmp_path / "new", init_from=last / checkpoint.MODEL)
        error = one_line(train.main, ["train.py", *argv], capsys, monkeypatch)
        assert error.startswith("train.py: ") and says in error, error
        error = one_line(sample.main, ["sample.py", "--out", last], capsys, monkeypatch)
        says = "h.2.ln_1.weight: missing" if how == "another model" else says
        assert error.startswith("sample.py: ") and says in error, error
        assert contents(out) == before and not contents(tmp_path / "new")


def test_a_full_disk_is_one_line_and_leaves_the_checkpoints_before(corpus, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    before = contents(out)
    args = dict(dp=2, steps=6, resume="auto")
    run = Run(2, flags(corpus, out, **args), tmp_path, limit=30_000)
    assert run.wait() == [2, 2], run.read()
    assert run.read().count("\n") == 1 and "optimizer.safetensors, tensor " in run.read()
    assert "File too large" in run.read() and contents(out) == before
    again = Run(2, flags(corpus, out, **args), tmp_path)
    assert again.wait() == [0, 0] and "resumed from" in again.read("stdout")


def _main_with_nan(rank, *args):
    """From its fourth step on, rank 1 has a loss, and so gradients, that are not finite."""
    def execute(self, *args, execute=pipeline.Pipeline.execute, calls=[0]):  # noqa: B006
        calls[0] += 1
        return execute(self, *args) * (math.nan if rank == 1 and calls[0] > 3 else 1)

    pipeline.Pipeline.execute = execute
    _main(rank, *args)


def test_five_steps_that_are_not_finite_end_the_run(corpus, tmp_path):
    argv = flags(corpus, tmp_path / "out", dp=2, steps=50, save_interval=2)
    run = Run(2, argv, tmp_path, fn=_main_with_nan)
    assert run.wait() == [1, 1]
    assert "not finite for 5 steps up to step 7; last good checkpoint: " in run.read()
    assert run.read().endswith("/out/step-00000006\n") and run.read().count("\n") == 1
    four, six = (tmp_path / f"out/step-{step:08d}" for step in (4, 6))
    assert [checkpoint.read_manifest(f)["updates"] for f in (four, six)] == [3, 3]
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        assert (four / name).read_bytes() == (six / name).read_bytes()


def test_what_is_not_finite_is_never_saved_over_what_is(corpus, tmp_path):
    """A step of 1e300 and the next ones: weights are infinite, or their squares are."""
    out, args = tmp_path / "out", dict(save_interval=1, keep=1, dp=2, zero=1, warmup_steps=0)
    assert Run(2, flags(corpus, out, steps=2, **args), tmp_path).wait() == [0, 0]
    before = contents(out)
    run = Run(2, flags(corpus, out, steps=5, lr=1e308, min_lr=1e308, weight_decay=1e9,
                       resume="auto", **args), tmp_path)
    assert run.wait() == [1, 1] and "saved nothing: weights or moments" in run.read("stdout")
    assert contents(out) == before and run.read().count("\n") <= 1


def test_a_damaged_checkpoint_is_in_nobodys_way(corpus, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    spoil(out / "step-00000002", "manifest")
    run = Run(2, flags(corpus, out, dp=2, steps=6, resume="auto", keep=1), tmp_path)
    assert run.wait() == [0, 0] and "resumed from" in run.read("stdout")
    assert run.read() == f"{out}/step-00000002: its manifest.json is damaged; skipped\n"
    assert sorted(path.name for path in out.glob("step*")) == ["step-00000002", "step-00000006"]
    assert checkpoint.newest(out).name == "step-00000006"


def test_a_save_that_died_between_its_two_names_loses_nothing(corpus, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    last = out / "step-00000004"
    shutil.copytree(last, f"{last}.tmp")  # the same step once more, complete
    last.rename(f"{last}.old.tmp")
    assert checkpoint.newest(out).name == "step-00000004.old.tmp"
    run = Run(2, flags(corpus, out, dp=2, steps=6, resume="auto", keep=2), tmp_path)
    assert run.wait() == [0, 0] and "4  resumed from" in run.read("stdout"), run.read()
    assert sorted(path.name for path in out.glob("step*")) == [
        "step-00000004.old.tmp", "step-00000006"]


def test_a_second_run_in_one_folder_is_refused(corpus, tmp_path):
    one = Run(2, flags(corpus, tmp_path / "out", dp=2, steps=10**6), tmp_path)
    one.until(lambda: "step      2" in one.read("stdout"))
    two = Run(2, flags(corpus, tmp_path / "out", dp=2, timeout=2), tmp_path)
    assert two.wait() == [2, 2] and two.read() == (
        f"train.py: --out {tmp_path}/out: another run writes there; name another folder\n")
    one.signal(0, signal.SIGHUP)  # a closed terminal
    assert one.wait() == [0, 0] and "stopped by a signal" in one.read("stdout")


def test_auto_is_looked_up_once_the_folder_is_ours(corpus, trained, tmp_path, monkeypatch):
    """... as the run before may have been about to save."""
    cfg = config(corpus, out=str(tmp_path / "out"), resume="auto")
    monkeypatch.setattr(agreement, "claim", lambda out, _: shutil.copytree(trained, out))
    agreement.agree(cfg, None)
    assert cfg.resume == f"{cfg.out}/step-00000004"


def test_the_lock_follows_no_link(tmp_path):
    (tmp_path / "precious").write_text("content")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="/.lock: Too many levels"):
        agreement.claim(tmp_path, 1)
    assert (tmp_path / "precious").read_text() == "content"


def _main_that_stops(rank, *args):
    """Rank 1 hangs before it has told its data."""
    def fingerprint(self, tell=Data.fingerprint):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return tell(self)

    Data.fingerprint = fingerprint
    _main(rank, *args)


def _main_with_bad_ids(rank, *args):
    """From its third batch on, rank 1 reads what is not in the vocabulary."""
    def check_ids(self, ids, path, check=Data.check_ids, calls=[0]):  # noqa: B006
        calls[0] += 1
        check(self, ids + VOCAB * (rank == 1 and calls[0] > 4), path)

    Data.check_ids = check_ids
    _main(rank, *args)


@pytest.mark.parametrize("fn,but,says", [
    (_main_that_stops, [1], "rank 0: waiting for rank 1 to tell its data: "),
    (_main_with_bad_ids, [], " holds token id ")], ids=["stopped", "bad ids"])
def test_what_one_rank_meets_late_ends_all_with_one_line(corpus, tmp_path, fn, but, says):
    run = Run(3, flags(corpus, tmp_path / "out", dp=3, batch_size=6, timeout=3), tmp_path, fn=fn)
    assert set(run.wait(but=but)) == {1}
    lines = [line for line in run.read().splitlines() if "c10d" not in line]
    assert len(lines) == 1 and says in lines[0], lines


def test_ranks_that_meet_are_those_of_this_attempt():
    """Restarted one after the other, over a store that has all of the last attempt."""
    store, met = torch.distributed.HashStore(), []

    def attempt(delays):
        def come(rank, delay):
            time.sleep(delay)
            return processes.meet(store, rank, 3, 5)

        with ThreadPoolExecutor(3) as threads:
            names = {*threads.map(come, range(3), delays)}
        assert len(names) == 1
        met.extend(names)

    for delays in ((0, 0, 0), (0.3, 0, 0.1), (0, 0.3, 0), (0.1, 0, 0.3)):
        attempt(delays)
    assert len({*met}) == 4
    with pytest.raises(CommunicationError, match="rank 1: waiting for rank 0 to start: not there "
                                                 "within 0.1 s"):
        processes.meet(torch.distributed.HashStore(), 1, 2, 0.1)


def test_a_library_that_never_comes_back_is_one_line():
    late = command("-c", "import processes, time\nwith processes.in_time(0.2, 'rank 0: joining'):\n"
                         "    time.sleep(60)", timeout=30)
    assert (late.returncode, late.stderr) == (
        1, "train.py: rank 0: joining: not done within 0.2 s\n")


def _gives_up(rank, waits):
    time.sleep(waits[rank])
    return processes.speaks_for_all(f"receive from rank {(rank + 1) % 3}", 2)


@pytest.mark.parametrize("waits", [(0, 0.25, 0.6), (0.6, 0, 0.25), (0, 0, 0), (0.3, 0.6, 0)])
def test_one_of_all_that_give_up_says_why(waits):
    """... though each waits for the next one, and some are gone when others look."""
    assert sum(pool(3, _gives_up, waits)) == 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux")
def test_stopped_siblings_are_found_among_processes_of_any_name(monkeypatch):
    say = "open('/proc/self/comm', 'wb').write(b') T \\xe9'); print(flush=True); input()"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    ours = [subprocess.Popen([sys.executable, "-c", say], **pipes) for _ in range(2)]
    for process in ours:
        process.stdout.readline()
    ours[0].send_signal(signal.SIGSTOP)
    monkeypatch.setattr(signals, "parent", os.getpid())
    time.sleep(0.2)
    processes.kill_stopped()
    assert ours[0].wait(5) == -signal.SIGKILL and ours[1].poll() is None
    ours[1].kill()


@pytest.mark.parametrize("path", ["full", "null", "stdout", "garbage"])
def test_outputs_that_fail_do_not_end_a_run(corpus, trained, tmp_path, path):
    out, log = shutil.copytree(trained, tmp_path / "out"), f"/dev/{path}"
    if path == "garbage":  # what a crash of a machine may leave
        log = tmp_path / "log"
        log.write_bytes(b'{"step": 0, "loss": 1}\n{"step": "x"}\n\xff\xfe[null]\n{"step": 3')
    run = Run(1, flags(corpus, out, steps=7, resume="auto", metrics=log, trace="/dev/full"),
              tmp_path)
    assert run.wait() == [0] and "saved" in run.read("stdout"), run.read()
    assert "LOST, No space left on device" in run.read("stdout")
    lost = f"train.py: --metrics {log}: No space left on device; the run goes on without\n"
    assert run.read() == (lost if path == "full" else "")
    if path == "garbage":
        assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 4, 5, 6]
    elif path == "stdout":
        assert run.read("stdout").count('"step"') == 3


def _nan_on_one_rank(rank, cfg):
    trainer, data = train.Trainer(cfg, mesh_of(cfg), VOCAB), Data(cfg)
    before = [(tag.name, x.clone()) for tag, x in local_tensors(trainer, "weights")]
    param = next(trainer.stages[max(trainer.stages)].parameters())
    param.register_hook(lambda grad: grad * math.nan if rank == 1 else grad)
    _, norm = trainer.gradients(data.training(cfg, 0, trainer.mesh))
    trainer.update(norm, 1.0)
    after = local_tensors(trainer, "weights")
    assert math.isnan(norm) and trainer.replicas_agree()
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(before, after, strict=True))


@pytest.mark.parametrize("layout", [dict(dp=2, tp=2, pp=2), dict(dp=2, pp=2, zero=1),
                                    dict(dp=3, zero=3)])
def test_nan_in_one_ranks_gradients_changes_no_weight_anywhere(corpus, layout):
    cfg = config(corpus, **layout)
    pool(check(cfg, 1), _nan_on_one_rank, cfg)


def _node(rank, size, port, argv, folder, limit):
    """A rank alone on its node, in a working folder of its own."""
    os.chdir(Path(folder).parent / str(rank))
    _main(rank, size, port, argv, folder, limit)


@pytest.mark.parametrize("how,says", [
    ("flags", "has other flags than rank 0; start all with the same"),
    ("out", "does not see what rank 0 writes to --out out; all nodes need to share that folder"),
    ("checkpoint", "has another checkpoint than rank 0 in --resume last; start all with the same"),
    ("data", "has other data in data than rank 0; prepare it once, then share or copy the folder"),
])
def test_nodes_that_differ_are_refused_before_the_first_step(
        corpus, trained, tmp_path, how, says):
    for rank, step in enumerate((4, 2 if how == "checkpoint" else 4)):
        shutil.copytree(trained / f"step-{step:08d}", tmp_path / str(rank) / "last")
        shutil.copytree(corpus, tmp_path / str(rank) / "data")
    if how == "data":  # one token of 5000
        ids = np.memmap(tmp_path / "1" / "data" / "train.bin", "<u2", "r+")
        ids[4321] = (ids[4321] + 1) % VOCAB
        ids.flush()
    more = {"resume": "last"} if how == "checkpoint" else {}
    out = "out" if how == "out" else tmp_path / "out"
    argvs = [flags("data", out, dp=2, lr=lr, **more)
             for lr in (0.1, 0.2 if how == "flags" else 0.1)]
    run = Run(2, argvs, tmp_path, fn=_node)
    assert run.wait() == [2, 2]
    assert run.read() == f"train.py: rank 1 {says}\n" and "step" not in run.read("stdout")
    assert not list(tmp_path.rglob("out/step*"))


def agents(folder, argv):
    """Two torchrun agents, as on two nodes, each in a folder of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    runs = []
    for node in range(2):
        (folder / str(node)).mkdir(exist_ok=True)
        runs.append(subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
             str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port",
             str(port), HERE / "train.py", *map(str, argv)], cwd=folder / str(node), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"}))
    return runs


@needs_minutes
@pytest.mark.parametrize("shared_out", [True, False], ids=["shared", "own folders"])
@pytest.mark.parametrize("same_data", [True, False], ids=["same data", "other data"])
def test_two_agents_train_only_with_one_folder_and_one_data(
        corpus, tmp_path, same_data, shared_out):
    for node in range(2):
        shutil.copytree(corpus, tmp_path / str(node) / "data")
    if not same_data:
        random_corpus(tmp_path / "1/data", train=5000, val=701)
    runs = agents(tmp_path, flags("data", tmp_path / "out" if shared_out else "out", dp=2))
    said = [run.communicate(timeout=100) for run in runs]
    good = same_data and shared_out
    complaint = "does not see what rank 0 writes" if not shared_out else "has other data in data"
    assert [run.returncode for run in runs] == [not good] * 2
    assert ("replicas agree" in said[0][0]) == good == bool([*tmp_path.rglob("out/step*")])
    for _, err in said:  # each machine says so, and torchrun that its rank has failed
        ours = [line for line in err.splitlines() if line.startswith("train.py: ")]
        assert len(ours) == (not good) and all(f"rank 1 {complaint}" in line for line in ours), err


@needs_minutes
def test_two_agents_with_a_shared_folder_are_like_one(corpus, tmp_path):
    """They train, are killed (one, the other, both), end whatever is left of them, and are started
    again: the trace of one node that did all at once."""
    argv = dict(dp=2, zero=1, steps=300, save_interval=2, keep=2, n_embd=32)
    rng, slowest = np.random.default_rng(7), 0.0
    both = flags(corpus, tmp_path / "out", resume="auto", metrics=tmp_path / "log", **argv)
    for kill in ([0], [1], [0, 1], [1, 0], [1], [0]):
        runs = agents(tmp_path, both)
        for line in runs[0].stdout:
            if line.startswith("step") and "loss" in line:
                break
        ranks = [int(pid) for run in runs for pid in subprocess.run(
            ["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()]
        assert len(ranks) == 2
        time.sleep(rng.uniform(0, 0.1))
        for node in kill:
            runs[node].kill()
        began = time.time()
        assert gone(ranks, 10), "orphans"
        slowest = max(slowest, time.time() - began)
        for run in runs:
            run.communicate(timeout=60)
            assert run.returncode != 0
    print(f"ranks were gone within {slowest:.2f} s")
    runs = agents(tmp_path, both)
    (out, _), (other, _) = (run.communicate(timeout=100) for run in runs)
    assert [run.returncode for run in runs] == [0, 0] and "replicas agree" in out and not other
    alone = flags(corpus, tmp_path / "one", metrics=tmp_path / "want", **argv)
    assert Run(2, alone, tmp_path).wait() == [0, 0]
    assert losses(tmp_path / "log") == losses(tmp_path / "want")


def _one_step(rank, cfg):
    trainer = train.Trainer(cfg, mesh_of(cfg), VOCAB)
    loss, norm = trainer.gradients(Data(cfg).training(cfg, 0, trainer.mesh))
    trainer.update(norm, train.learning_rate(cfg, 0))
    return loss, norm


def test_random_flags_train_a_step_or_get_one_line(corpus, tmp_path, capsys):
    """... and where they train, loss and norm are those of one process."""
    rng = np.random.default_rng(5)
    values = {"dp": (0, 1, 2, 3, -1), "tp": (1, 1, 2, 4, 3, 0), "pp": (1, 1, 2, 3, 9),
              "zero": (0, 1, 2, 3, 4), "schedule": (*schedules.SCHEDULES, "wave"),
              "chunks": (0, 0, 1, 2),
              "microbatches": (0, 1, 2, 3, 5), "n_layer": (1, 2, 3), "n_head": (1, 2, 4, 6),
              "n_embd": (12, 24, 8, "x"), "block_size": (4, 8, 10**6), "batch_size": (4, 6, 12),
              "grad_clip": (0.0, 1.0, -1.0), "beta1": (0.9, 1.0), "seed": (0, 7),
              "lr": (0.001, "nan"), "steps": (0, 3), "save_interval": (0, -2), "keep": (0, -1),
              "resume": ("no", "auto", "nowhere"), "timeout": (60.0, 0.0, 1e300),
              "recompute": (True, False), "sp": (True, True, False), "cp": (1, 2, 2, 2),
              "cp_attention": ("ring", "all-to-all"), "experts": (0, 4, 4, 6), "ep": (1, 1, 2),
              "top_k": (1, 2, 3),
              "bucket_mb": (25.0, 0.001, 0.0), "bogus": (1,)}
    refused, trained = [], []
    for _ in range(300):
        names = rng.choice(list(values), rng.integers(2, 9), replace=False)
        picked = {name: values[name][rng.integers(len(values[name]))] for name in names}
        on = [name for name in ("recompute", "sp") if picked.pop(name, False)]
        argv = [*map(str, flags(corpus, tmp_path, **picked)), *("--" + name for name in on)]
        try:
            cfg = parse(argv)
            try:
                ranks = check(cfg, 1)
                Data(cfg)
            except ValueError as error:
                train.fail(error)
        except SystemExit as stop:
            line = capsys.readouterr().err
            assert stop.code == 2 and line.count("\n") == 1, (picked, line)
            refused.append(line)
        else:
            if ranks <= 8 and len(trained) < 40:
                trained.append((cfg, ranks))
    assert len(refused) > 100 and len(trained) == 40
    for cfg, ranks in trained:
        got = pool(ranks, _one_step, cfg)
        alone = Config(**{**vars(cfg), "dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0,
                          "schedule": "1f1b", "chunks": 1, "microbatches": 1, "recompute": False})
        for pair in got:
            close(pair, pool(1, _one_step, alone)[0], str(cfg))


def nanogpt_shapes(V, S, L, C):
    """state_dict of nanoGPT's GPT with biases (github.com/karpathy/nanoGPT, model.py)."""
    block = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "ln_2": (C,),
             "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    parts = {**{f"h.{i}.{k}": v for i in range(L) for k, v in block.items()}, "ln_f": (C,)}
    return {"lm_head.weight": (V, C), "transformer.wte.weight": (V, C),
            "transformer.wpe.weight": (S, C),
            **{f"transformer.{k}.weight": v for k, v in parts.items()},
            **{f"transformer.{k}.bias": v[:1] for k, v in parts.items()}}


def test_the_model_file_is_nanogpts_by_name_and_shape_and_opens_with_safetensors(trained):
    path = trained / "step-00000004" / checkpoint.MODEL
    found = {name: e.shape for name, e in tensorfile.read_header(path).items()}
    assert found == nanogpt_shapes(VOCAB, 8, 2, 8)
    tensors = pytest.importorskip("safetensors.torch").load_file(path)
    config = GPTConfig(VOCAB, 8, 2, 2, 8)
    get = read_weights(path, {n: torch.Size(s) for n, s in found.items()}, config)
    assert all(torch.equal(tensors[name], get(name)) for name in found)
    assert torch.equal(tensors["lm_head.weight"], tensors["transformer.wte.weight"])


@pytest.mark.parametrize("kind", ["ours", "gpt2"])
def test_a_run_starts_from_a_weights_file(corpus, trained, tmp_path, kind):
    def as_hugging_face_has_it(tensors):
        del tensors["lm_head.weight"]
        for name, (shape, data) in list(tensors.items()):
            del tensors[name]
            if name.endswith(CONV1D):
                data = np.frombuffer(data).reshape(shape).T.tobytes()
                shape = shape[::-1]
            tensors[name.removeprefix("transformer.")] = shape, data
        tensors["h.0.attn.bias"] = (1, 1, 8, 8), bytes(512)

    ours = trained / "step-00000004" / checkpoint.MODEL
    path = shutil.copy(ours, tmp_path / "weights.safetensors")
    if kind == "gpt2":
        rewrite(path, as_hugging_face_has_it)
    run = Run(4, flags(corpus, tmp_path / "out", pp=2, tp=2, steps=0, init_from=path), tmp_path)
    assert run.wait() == [0] * 4, run.read()
    assert (tmp_path / "out/step-00000000" / checkpoint.MODEL).read_bytes() == ours.read_bytes()
    other = Run(1, flags(corpus, tmp_path / "o", n_embd=12, init_from=path), tmp_path)
    assert other.wait() == [2] and "wte.weight: F64 [67, 8], not " in other.read()


def _untied(tensors):
    shape, data = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = shape, data[::-1]


OTHERS = {  # what becomes of the file's tensors -> what the run says, or nothing
    "compiled": (lambda tensors: [tensors.update({"_orig_mod." + name: tensors.pop(name)})
                                  for name in list(tensors)], ""),
    "head only": (lambda tensors: tensors.pop("transformer.wte.weight"), ""),
    "untied": (_untied, "lm_head.weight is not transformer.wte.weight; this model ties them"),
    "deeper": (lambda tensors: tensors.update({"transformer.h.2.ln_1.weight": tensors[
        "transformer.ln_f.weight"]}), "has transformer.h.2.ln_1.weight, which a model of these"),
    "no bias": (lambda tensors: tensors.pop("transformer.ln_f.bias"),
                "tensor transformer.ln_f.bias: missing"),
    "heads": (None, "config.json: its n_head is 4, here it is 2"),
    "activation": (None, "config.json: its activation_function is relu, here it is gelu_new"),
    "pickle": (None, "ckpt.pt: a pickle could run anything, so none is loaded"),
}


@pytest.mark.parametrize("how", OTHERS)
def test_weights_of_others_are_taken_or_refused_in_one_line(corpus, trained, tmp_path, how):
    change, says = OTHERS[how]
    ours = trained / "step-00000004" / checkpoint.MODEL
    path = shutil.copy(ours, tmp_path / ("ckpt.pt" if how == "pickle" else "model.safetensors"))
    if change:
        rewrite(path, change)
    elif how != "pickle":
        value = {"heads": {"n_head": 4}, "activation": {"activation_function": "relu"}}[how]
        (tmp_path / "config.json").write_text(json.dumps(value))
    run = Run(1, flags(corpus, tmp_path / "out", steps=0, init_from=path), tmp_path)
    assert run.wait() == [2 if says else 0] and says in run.read(), run.read()
    assert run.read().count("\n") == bool(says)
    if not says:
        assert (tmp_path / "out/step-00000000" / checkpoint.MODEL).read_bytes() == ours.read_bytes()


def test_a_checkpoint_becomes_a_hugging_face_folder(trained, tmp_path):
    export_file.export(trained / "step-00000004", tmp_path)
    model = sample.load_model(trained / "step-00000004")
    shapes = {name: p.shape for name, p in model.canonical_parameters()}
    get = read_weights(tmp_path / "model.safetensors", shapes, model.config)
    assert all(torch.equal(get(name), p.data) for name, p in model.canonical_parameters())
    theirs = pytest.importorskip("transformers").GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert (theirs(ids).logits - model(ids)).abs().max() < 1e-5


@pytest.mark.parametrize("experts", [0, 4])
def test_sampling_with_kept_keys_is_sampling_without_them(trained, experts):
    model, ids = sample.load_model(trained / "step-00000004").double(), [1, 2, 3]
    if experts:
        model = build(GPTConfig(VOCAB, 8, 2, 2, 12, n_experts=experts), dtype=torch.double)
    got = sample.generate(model, ids, 12, samples=3, top_k=20)  # beyond the window of 8
    out, rng = torch.tensor([ids] * 3), torch.Generator().manual_seed(1337)
    for _ in range(12):
        top, index = model(out[:, -8:])[:, -1].topk(20)
        pick = torch.multinomial((top / 0.8).softmax(1), 1, generator=rng)
        out = torch.cat([out, index.gather(1, pick)], 1)
    assert out.tolist() == got and got[0] != got[1]


def test_one_command_is_stopped_by_ctrl_c_and_sampled_from(tmp_path, capsys, monkeypatch):
    (tmp_path / "text").write_text("".join(f"def f{i}(x): return x\n" for i in range(200)))
    prepare([tmp_path / "text"], tmp_path / "data", "bytes")
    argv = flags(tmp_path / "data", tmp_path / "out", tp=2, steps=10**6)
    run = subprocess.Popen([sys.executable, "train.py", *map(str, argv)], cwd=HERE, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in run.stdout:
        if line.startswith("step "):
            break
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and "stopped by a signal" in out and not err, err
    text = command("sample.py", "--out", tmp_path / "out", "--prompt", "\u00e9 def f", "--samples",
                   2, env={"PYTHONIOENCODING": "ascii"})
    assert text.stdout.count("def f") >= 2 and text.returncode == 0, text.stderr
    for argv, says in ((["--out", tmp_path / "nowhere"],
                        f"{tmp_path}/nowhere: no complete checkpoint there"),
                       (["--seed", -1], "--seed -1 must be at least 0, and below 2^63"),
                       (["--device", "xyz"], "argument --device: invalid choice: 'xyz' "),
                       (["--data", "typo"], "typo: no such folder of prepared data"),
                       (["--samples", 0], "--samples 0 must be at least 1"),
                       (["--temperature", "nan"], "--temperature nan must be at least 0")):
        error = one_line(sample.main, ["sample.py", "--out", tmp_path / "out", *argv], capsys,
                         monkeypatch)
        assert error.startswith(f"sample.py: {says}"), error


def test_resuming_a_finished_run_ends_well(corpus, tmp_path):
    argv = flags(corpus, tmp_path / "out", dp=2, eval_interval=2, eval_batches=1, resume="auto")
    for _ in range(2):
        run = Run(2, argv, tmp_path)
        assert run.wait() == [0, 0], run.read()
        assert run.read("stdout").endswith("replicas agree\n") and "sample:" in run.read("stdout")
        assert re.search(r"peak of the process \d+ MB, on rank [01]\n", run.read("stdout"))
    assert "resumed from" in run.read("stdout") and "nothing left to do" in run.read("stdout")
    run = Run(2, [*argv, "--steps", 3], tmp_path)
    assert run.wait() == [2, 2]
    assert run.read().endswith("step-00000004: is at step 4, past --steps 3\n"), run.read()


@needs_minutes
@pytest.mark.parametrize("started", [2, 1], ids=["of a rank", "of a launcher of its ranks"])
def test_torchruns_restart_rides_over_a_crash(corpus, tmp_path, started):
    log = tmp_path / "log"
    argv = flags(corpus, tmp_path / "out", dp=2, steps=400, save_interval=20, keep=1, resume="auto",
                 metrics=log, log_interval=100)
    run = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(started),
         "--max-restarts", "3", "train.py", *map(str, argv)], cwd=HERE, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for line in run.stdout:
        if line.startswith("step    100  loss"):
            break
    children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True)
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 0 and "resumed from" in out
    assert [step for step, *_ in losses(log)] == [*range(400)]


# ---- on a GPU: python test_all.py -k cuda ----

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("flags", [
    {}, {"recompute": True, "pad_vocab": 16}, {"schedule": "zb-h1", "microbatches": 3},
    {"experts": 4}, {"compile": True}, {"dp": 2}, {"dp": 2, "zero": 1, "microbatches": 2},
    {"dp": 2, "zero": 2, "microbatches": 3}, {"dp": 4, "zero": 3, "recompute": True},
    {"dp": 3, "collectives": "native"}, {"dp": 2, "zero": 3, "collectives": "native"},
    {"tp": 2, "pad_vocab": 8}, {"tp": 2, "sp": True}, {"tp": 2, "cp": 2,
                                                       "cp_attention": "all-to-all"},
    *({"pp": 2, "schedule": name, "chunks": v, "microbatches": 4}
      for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))),
    {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "microbatches": 3}, {"dp": 2, "ep": 2, "experts": 4},
], ids=str)
def test_cuda_equals_one_process_on_the_cpu(corpus, flags):
    equals_one_process(corpus, device="cuda", **flags)


def _saved(rank, cfg, folder, load):
    trainer = train.Trainer(cfg, mesh_of(cfg), VOCAB)
    data = Data(cfg)
    if load:
        checkpoint.load(trainer, folder)
    else:
        _, norm = trainer.gradients(data.training(cfg, 0, trainer.mesh))
        trainer.update(norm, 0.01)
        folder = checkpoint.save(trainer, 1)
    loss, norm = trainer.gradients(data.training(cfg, 1, trainer.mesh))
    return str(folder), loss, norm


@needs_gpu
def test_cuda_saves_and_resumes_anywhere(corpus, tmp_path):
    gpu = config(corpus, device="cuda", dp=2, tp=2, zero=3, out=str(tmp_path))
    (folder, *want), *_ = pool(check_layout(gpu, 1), _saved, gpu, "", False)
    for cfg in (gpu, config(corpus), config(corpus, device="cuda")):
        got = pool(check_layout(cfg, 1), _saved, cfg, folder, True)[0][1:]
        close(got, want, "loss and norm")


def _reserved(rank, cfg):
    """Most bytes that the allocator held in three steps, with messages slowed down."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    submit = Group.submit

    def slow(self, job, name):
        return submit(self, lambda: (torch.cuda._sleep(10_000_000), job()), name)

    Group.submit = slow
    try:
        for step in range(3):
            _, norm = trainer.gradients(data.training(cfg, step, mesh))
            trainer.update(norm, 1e-3)
    finally:
        Group.submit = submit
    states = trainer.optimizer.state_bytes()[1]
    layers = [sum(p.numel() for p in layer.parameters()) * 4
              for stage in trainer.stages.values() for layer in stage.layers]
    return torch.cuda.max_memory_reserved(), states, max(layers)


@needs_gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_cuda_zero_holds_few_layers_though_the_host_runs_ahead(corpus, stage):
    cfg = config(corpus, device="cuda", dtype="float32", dp=2, zero=stage, n_layer=12, n_embd=768,
                 batch_size=2, collectives="native")
    for reserved, states, layer in pool(check_layout(cfg, 1), _reserved, cfg):
        # whole layers: two of weights, two of gradients; then activations and the allocator's rest
        assert reserved < states + 6 * layer + (64 << 20), (reserved, states, layer)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-x", __file__, *sys.argv[1:]]))
