"""What all tests share: equality with one process, of layouts trained in the pool (pool.py).

In float64 loss, every raw gradient, the global norm and the weights after three steps equal those
of `reference`, a one-process loop that shares only the model, of model.py and experts.py
(test_values.py says what they compute), to 1e-10 of the tensor's own norm.

    equals_one_process(corpus, tp=2, pp=2)      trains a layout in the pool and compares all of it

What a fork adds here:
    a schedule           nothing
    a flag of the model  nothing, if its group in run/config.py is "model": `reference` gets it
    another model        build=, a function like model.build
    rounding of its own  tolerance=
"""

import itertools
import math
import os
import tempfile
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from data.batches import Data
from experts import balance_loss, kind_of
from model import build
from run.config import Config, check, check_layout
from run.copies import replicas_agree, whole_slices
from sizes import config_of
from tests.pool import pool

# This file is imported where processes are forked from: CUDA is not to be touched there
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
HERE = Path(__file__).resolve().parent.parent  # the repository
TOLERANCE = 1e-10  # float64 has 16 digits; sums in another order cost a few of them
FULL = bool(os.environ.get("FULL"))  # also tests that take long
needs_minutes = pytest.mark.skipif(not FULL, reason="only with FULL=1")


# ---- equivalence: any layout against one process ----

SHAPE = {"n_layer": 3, "n_head": 12, "n_embd": 24, "block_size": 8}
VOCAB = 67  # divides by no T
STEPS, BATCH = 3, 36


def config(corpus, **flags):
    """The Config of a small run in float64, with these flags. The model has enough blocks for the
    layout, unless n_layer is among the flags."""
    pp, chunks = flags.get("pp", 1), flags.get("chunks", 1)
    n_layer = max(SHAPE["n_layer"], pp, pp * chunks - 2)  # embedding and head are layers, too
    base = dict(SHAPE, n_layer=n_layer, data=corpus, dtype="float64",
                batch_size=BATCH, steps=STEPS, lr=1e-2, dp=1, chunks=1, warmup_steps=1,
                grad_clip=0.2, device="cpu",
                eval_interval=0, out=tempfile.gettempdir())
    return Config(**{**base, **flags})


def whole_batch(corpus, step, batch_size=BATCH, block_size=SHAPE["block_size"]):
    """(ids, targets), each (B, S): all sequences of a step, whatever the layout."""
    tokens = torch.from_numpy(np.fromfile(f"{corpus}/train.bin", "<u2").astype(np.int64))
    starts = np.random.default_rng([1337, step]).integers(0, len(tokens) - block_size, batch_size)
    ids = torch.stack([tokens[i : i + block_size] for i in starts])
    targets = torch.stack([tokens[i + 1 : i + 1 + block_size] for i in starts])
    return ids, targets


class PlainAdamW:
    """torch's AdamW, made of {name: parameter}. step(lr) steps the parameters by their clipped
    gradients."""

    def __init__(self, params):
        matrices = [n for n, p in params.items() if p.dim() >= 2 and n.endswith("weight")]
        others = [p for n, p in params.items() if n not in matrices]
        self.optimizer = torch.optim.AdamW(
            [{"params": [params[n] for n in matrices], "weight_decay": 0.1},
             {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8)

    def step(self, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


@cache
def reference(corpus, build=build, **flags):
    """The plain loop: GPT, autograd, clip_grad_norm_, AdamW on whole batches.
    Learning rate, betas and batches are said again here, so that no mistake in the code is compared
    with itself. Parameters that need no gradient stay as they are."""
    cfg = config(corpus, microbatches=1, **flags)
    shape = config_of(cfg, VOCAB)
    model = build(shape, cfg.seed, torch.double, kind_of(shape))
    params = dict(model.canonical_parameters())  # {name: parameter}
    trained = {n: p for n, p in params.items() if p.requires_grad}
    optimizer = PlainAdamW(trained)
    blocks = model.layers[1:-1]
    if cfg.experts:
        for block in blocks:
            block.mlp.balance_weight = cfg.balance
    trace = [{"weights": {n: p.detach().clone() for n, p in params.items()}}]
    for step, lr in enumerate((5e-3, 1e-2, 5e-3)):  # half the warm-up; its end; half the cosine
        ids, targets = whole_batch(corpus, step, cfg.batch_size, cfg.block_size)
        loss = model(ids, targets) / targets.numel()
        model.zero_grad()
        loss.backward()
        balance = busiest = None
        if cfg.experts:
            loss = loss - balance_loss(blocks) / targets.numel()  # logged is the loss without it
            balance = sum(block.mlp.balance.item() for block in blocks) / ids.numel() / len(blocks)
            busiest = max((b.mlp.load.max() / b.mlp.load.mean()).item() for b in blocks)
        grads = {n: p.grad.clone() for n, p in trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), cfg.grad_clip).item()
        assert norm > cfg.grad_clip, "clipping must fire"
        with torch.no_grad():
            optimizer.step(lr)
        trace.append({"loss": loss.item(), "norm": norm, "grads": grads, "balance": balance,
                      "busiest": busiest,
                      "weights": {n: p.detach().clone() for n, p in params.items()}})
    return trace


def bare(tag):
    """A tag without its groups, which cannot go from process to process."""
    return replace(tag, split_over=None, shared_by=(), sum_over=())


def local_tensors(trainer, kind):
    """[(tag, this rank's whole tensor)] of weights or, in a tests.trainer.Trainer, of the gradients
    of the last step."""
    reducer = trainer.reducer
    held = reducer.whole() if kind == "weights" else whole_slices(reducer, trainer.grads)
    return [(bare(tag), tensor.detach().cpu().clone()) for tag, tensor in held]


class Raw:
    """Stands in the place of a trainer's optimizer, and keeps the raw gradients of each step."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.optimizer = trainer.optimizer
        self.grads = None  # [(tag, this rank's whole gradient)] of the last step
        trainer.optimizer = self

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self, grads, norm, lr):
        scale = float(self.optimizer.numbers().get("scale", 1.0))
        self.grads = [(bare(tag), whole.cpu() / scale)
                      for tag, whole in whole_slices(self.trainer.reducer, grads)]
        self.optimizer.step(grads, norm, lr)


def _train(rank, cfg, steps=STEPS, mesh=None, kinds=("grads", "weights")):
    """Trains some steps on one rank. Returns what equals_one_process compares, step by step: first
    the initial weights. kinds: which tensors of each step to return."""
    mesh = mesh or train.make_mesh(cfg, cfg.device)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    raw = Raw(trainer) if "grads" in kinds else None
    data = Data(cfg)
    trace = [{"weights": local_tensors(trainer, "weights")}]
    for step in range(steps):
        norm, sums = trainer.step(data.training(cfg, step, mesh), train.learning_rate(cfg, step))
        norm, loss, _, _, *statistics = mesh.world.read(torch.cat([norm.view(1), sums]))
        weights = local_tensors(trainer, "weights") if "weights" in kinds else None
        trace.append({"loss": loss, "norm": norm, "grads": raw and raw.grads, "weights": weights,
                      **trainer.routing.read(statistics, cfg.batch_size * cfg.block_size)})
    trace[0]["agree"] = replicas_agree(trainer)
    return trace


def train_with(rank, cfg, owner, name, value, **more):
    """_train, while owner.name (owner: a module or a class) is `value`."""
    kept = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        return _train(rank, cfg, **more)
    finally:
        setattr(owner, name, kept)


def assemble(per_rank):
    """{name: full tensor} from every rank's [(tag, its slice)]; elements that several ranks hold
    must have the same bits."""
    full = {}
    for tag, local in itertools.chain(*per_rank):
        tensor = full.setdefault(tag.name, torch.full(tag.shape, math.nan, dtype=local.dtype))
        sizes = [b - a for a, b in tag.ranges]
        for (a, b), part in zip(tag.ranges, local.split(sizes, tag.dim), strict=True):
            place = tensor.narrow(tag.dim, a, b - a)
            assert place.isnan().all() or torch.equal(place, part), f"copies of {tag.name} differ"
            place.copy_(part)
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full


def close(got, want, what, tolerance=TOLERANCE):
    """AssertionError unless two tensors, or numbers, are the same but for rounding of float64."""
    got = torch.as_tensor(got, dtype=torch.double)
    want = torch.as_tensor(want, dtype=torch.double)
    error = (got - want).norm().item()
    size = want.norm().item()
    # a gradient that is zero in exact arithmetic (attention's key bias) is compared absolutely
    assert error <= tolerance * max(size, 1e-3), f"{what}: off by {error:.1e} of {size:.1e}"


def same_model(cfg):
    """The flags of a Config that `reference` takes: those that change the model, its loss or its
    steps."""
    names = [f.name for f in fields(cfg) if f.metadata["group"] in ("model", "")]
    names += ["balance"]
    return {name: getattr(cfg, name) for name in names if "dtype" not in name}


def matches(cfg, got, step, kinds, want, tolerance=TOLERANCE):
    """AssertionError unless the ranks' numbers and tensors of a step are those of one process.
    got: each rank's trace; kinds: which tensors to compare; want: one process's trace."""
    names = ["loss", "norm"]
    if cfg.experts:
        names += ["balance", "busiest"]
    for trace in got:
        for name in names:
            close(trace[step][name], want[step][name], name, tolerance)
    for kind in kinds:
        full = assemble([trace[step][kind] for trace in got])
        assert full.keys() == want[step][kind].keys()
        for name, value in want[step][kind].items():
            close(full[name], value, f"step {step} {kind} {name}", tolerance)


def equals_one_process(corpus, run=_train, *args, build=build, tolerance=TOLERANCE, **flags):
    """AssertionError unless the layout of these flags trains like one process. run(rank, cfg,
    *args): what each rank runs, _train or a function that returns the same; build: makes the model
    of the one process. Returns (each rank's trace, one process's)."""
    cfg = config(corpus, **flags)
    # check() would refuse several ranks on one GPU
    world = check(cfg, 1) if cfg.device == "cpu" else check_layout(cfg, 1)
    got = pool(world, run, cfg, *args)
    want = reference(corpus, build, **same_model(cfg))
    compare(cfg, got, want, tolerance)
    return got, want


def compare(cfg, got, want, tolerance):
    """AssertionError unless the ranks' traces are that of one process."""
    weights = assemble([trace[0]["weights"] for trace in got])
    for name, value in want[0]["weights"].items():
        assert torch.equal(weights[name], value), f"initial {name} differs"
    for step in range(1, STEPS + 1):
        matches(cfg, got, step, ("grads", "weights"), want, tolerance)
    assert all(trace[0]["agree"] for trace in got), "replicas disagree"
