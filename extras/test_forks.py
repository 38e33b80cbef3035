"""The forks of extras/forks/: each patch applies to this repository, and in each of its layouts
trains like its paper's formulas in one process."""

import math
import shutil
import subprocess
import tempfile

import pytest
import torch

from experts import kind_of
from extras.forks import diloco
from model import build
from sizes import config_of
from test_all import RATES, batch, flags_of, ranks, write_corpus
from tests.harness import HERE, VOCAB, close, command, make_trainer


def adam(name, w, g, state, decay, lr, t, eps=1e-8):
    """What AdamW subtracts from a tensor in step t."""
    state["mean"] = 0.9 * state.get("mean", 0) + 0.1 * g
    state["square"] = 0.95 * state.get("square", 0) + 0.05 * g * g
    mean, square = state["mean"] / (1 - 0.9**t), state["square"] / (1 - 0.95**t)
    return lr * (mean / (square.sqrt() + eps) + decay * w)


def muon(name, w, g, state, decay, lr, t):
    if w.dim() != 2 or ".h." not in name:
        return adam(name, w, g, state, decay, lr, t)
    state["mean"] = 0.95 * state.get("mean", 0) + 0.05 * g
    u, values, vt = torch.linalg.svd(0.05 * g + 0.95 * state["mean"], full_matrices=False)
    values = values / (values.norm() + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return lr * (0.2 * math.sqrt(max(w.shape)) * (u * values) @ vt + decay * w)


def lars(name, w, g, state, decay, lr, t):
    ratio = w.norm() / (g.norm() + decay * w.norm()) if w.dim() > 1 else 1.0
    state["v"] = 0.9 * state.get("v", 0) + lr * ratio * (g + decay * w)
    return state["v"]


def lamb(name, w, g, state, decay, lr, t):
    u = adam(name, w, g, state, decay, 1.0, t, eps=1e-6)
    return lr * u * (w.norm() / u.norm() if w.dim() > 1 else 1.0)


FORKS = {  # fork: [(the formula of a tensor's step, workers, layouts)]
    "muon": [(muon, 1, "--muon", "--muon --tp 2 --dp 2 --zero 1")],
    "large_batches": [(lars, 1, "--layerwise lars --dp 2"),
                      (lamb, 1, "--layerwise lamb", "--layerwise lamb --tp 2 --pp 2",
                       "--layerwise lamb --dp 2 --zero 2")],
    "lora": [(adam, 1, "--lora 2", "--lora 2 --tp 2 --dp 2 --sp --zero 3",
              "--lora 2 --tp 2 --pp 2 --schedule zb-h1 --microbatches 2")],
    "diloco": [(adam, 2, "--diloco 2 --dp 2 --shard 1", "--diloco 2 --dp 4 --shard 2 --zero 1")]}


@pytest.mark.skipif(not shutil.which("git"), reason="git applies the patches")
@pytest.mark.parametrize("name", FORKS)
def test_a_fork_trains_like_its_paper_in_any_layout(name, tmp_path):
    tree = tmp_path / "fork"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "out", "stdlib")
    shutil.copytree(HERE, tree, ignore=hidden)
    subprocess.run(["git", "init", "-q", tree], check=True)
    for each in FORKS:  # all of them, also where a short run of the tests takes one case
        patch = ["git", "apply", "--check", f"extras/forks/{each}.patch"]
        subprocess.run(patch, cwd=tree, check=True)
    subprocess.run(["git", "apply", f"extras/forks/{name}.patch"], cwd=tree, check=True)
    done = command("-c", f"from extras.test_forks import prove; prove({name!r})", cwd=tree)
    assert done.returncode == 0, done.stderr


def prove(name):
    """Compare a fork's layouts with its paper. Called in the fork's tree."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(folder)
        for formula, workers, *layouts in FORKS[name]:
            cfgs = [flags_of(words.split(), folder) for words in layouts]
            want = by_the_paper(cfgs[0], formula, workers)
            for cfg in cfgs:
                held = ranks(cfg.dp * cfg.pp * cfg.tp, three_steps, cfg, want)
                assert set().union(*held) == want.keys()
    ranks.stop()


def three_steps(rank, cfg, want):
    """Train on one rank, and compare its weights with {name: the full tensor}. Returns the names.
    """
    trainer, data = make_trainer(cfg)
    for step, lr in enumerate(RATES):
        trainer.step(data.training(cfg, step, trainer.mesh), lr)
    if getattr(cfg, "diloco", 0):
        trainer.optimizer.meet_early()
    held = []
    for tag, weight in trainer.reducer.whole():
        close(weight, tag.slice(want[tag.name]), tag.name)
        held.append(tag.name)
    return held


def by_the_paper(cfg, formula, workers):
    """{name: weights} after three steps in one process. Several workers each have a part of the
    batch, and meet after the second step and, before a checkpoint, after the third."""
    config = config_of(cfg, VOCAB)
    models = [build(config, cfg.seed, torch.double, kind_of(config)) for _ in range(workers)]
    params = [dict(model.canonical_parameters()) for model in models]
    states = {param: {} for named in params for param in named.values()}
    outer = {name: (p.detach().clone(), torch.zeros_like(p)) for name, p in params[0].items()}
    for t, lr in enumerate(RATES, 1):
        parts = zip(*(x.chunk(workers) for x in batch(cfg.data, t - 1, cfg.block_size)),
                    strict=True)
        for model, named, (ids, targets) in zip(models, params, parts, strict=True):
            model.zero_grad()
            (model(ids, targets) / targets.numel()).backward()
            torch.nn.utils.clip_grad_norm_(named.values(), cfg.grad_clip)
            with torch.no_grad():
                for name, p in named.items():
                    decay = cfg.weight_decay * (p.dim() > 1)
                    if p.requires_grad:
                        p -= formula(name, p, p.grad, states[p], decay, lr, t)
        if workers > 1 and t > 1:
            meet(params, outer)
    return {name: p.detach() for name, p in params[0].items()}


@torch.no_grad()
def meet(params, outer):
    """DiLoCo's workers go on from w0. outer: {name: (w0, velocity)}"""
    for name, (w0, v) in outer.items():
        change = w0 - sum(named[name] for named in params) / len(params)
        v.mul_(diloco.MOMENTUM).add_(change)
        w0 -= diloco.OUTER_LR * (change + diloco.MOMENTUM * v)
        for named in params:
            named[name].copy_(w0)
