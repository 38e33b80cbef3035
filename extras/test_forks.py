"""The forks of extras/forks/: each patch applies to this repository, and trains like one process in
another layout; and each computes what its paper says."""

import math
import shutil
import subprocess
import tempfile
from types import SimpleNamespace

import pytest
import torch

from extras.forks import diloco, large_batches, muon
from mesh import Mesh
from model import build, initial_value
from optimizer import LossScale
from shard import Tag
from sizes import config_of
from test_all import RATES, batch, flags_of, ranks, write_corpus
from tests.harness import HERE, VOCAB, close, command, make_trainer

LAYOUTS = {  # fork: layouts that have to give the weights of the first one
    "muon": ("--muon", "--muon --tp 2 --dp 2 --zero 1"),
    "large_batches": ("--layerwise lamb", "--layerwise lamb --tp 2 --pp 2",
                      "--layerwise lamb --dp 2 --zero 2"),
    "lora": ("--lora 2", "--lora 2 --tp 2 --dp 2 --sp --zero 3",
             "--lora 2 --tp 2 --pp 2 --schedule zb-h1 --microbatches 2"),
    "diloco": ("--diloco 2 --dp 2 --shard 1", "--diloco 2 --dp 4 --shard 2 --zero 1")}


@pytest.mark.skipif(not shutil.which("git"), reason="git applies the patches")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fork_trains_alike_in_any_layout(name, tmp_path):
    tree = tmp_path / "fork"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "out", "stdlib", "shakespeare")
    shutil.copytree(HERE, tree, ignore=hidden)
    subprocess.run(["git", "init", "-q", tree], check=True)
    subprocess.run(["git", "apply", f"extras/forks/{name}.patch"], cwd=tree, check=True)
    done = command("-c", f"from extras.test_forks import prove; prove({name!r})", cwd=tree)
    assert done.returncode == 0, done.stderr


def prove(name):
    """Compare a fork's layouts with its first one. Called in the fork's tree."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(folder)
        first, *others = (flags_of(words.split(), folder) for words in LAYOUTS[name])
        want = two_workers(first) if name == "diloco" else {}
        got = ranks(first.dp, three_steps, first, want)[0]
        for cfg in others:
            ranks(cfg.dp * cfg.pp * cfg.tp, three_steps, cfg, got)
        if name == "lora":
            only_adapters_have_moved(got, config_of(first, VOCAB), first.seed)
    ranks.stop()


def three_steps(rank, cfg, want):
    """Train on one rank, and compare its weights with {name: the full tensor}, if given. Returns
    {name: this rank's slice}."""
    trainer, data = make_trainer(cfg)
    for step, lr in enumerate(RATES):
        trainer.step(data.training(cfg, step, trainer.mesh), lr)
    if getattr(cfg, "diloco", 0):
        trainer.optimizer.meet_early()
    held = {}
    for tag, weight in trainer.reducer.whole():
        held[tag.name] = weight
        if want:
            close(weight, tag.slice(want[tag.name]), tag.name)
    return held


def only_adapters_have_moved(weights, shape, seed):
    for name, value in weights.items():
        start = initial_value(name, value.shape, shape, seed)
        assert torch.equal(value, start.double()) != (".adapter_" in name), name


def two_workers(cfg):
    """{name: weights} of three steps of --diloco 2 with two workers, by the paper, in one process.
    The workers meet after two steps, and once more after the third."""
    *workers, outer = (build(config_of(cfg, VOCAB), cfg.seed, torch.double) for _ in range(3))
    optimizers = []
    for model in workers:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": cfg.weight_decay},
                  {"params": others, "weight_decay": 0.0}]
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95)))
    velocity = [torch.zeros_like(p) for p in outer.parameters()]
    for step, lr in enumerate(RATES):
        parts = zip(*(each.chunk(2) for each in batch(cfg.data, step, cfg.block_size)), strict=True)
        for model, optimizer, (ids, targets) in zip(workers, optimizers, parts, strict=True):
            model.zero_grad()
            (model(ids, targets) / targets.numel()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        if step == 0:
            continue
        with torch.no_grad():
            held = zip(outer.parameters(), velocity, *(m.parameters() for m in workers),
                       strict=True)
            for w, v, first, second in held:
                d = w - (first + second) / 2
                v.copy_(diloco.MOMENTUM * v + d)
                w -= diloco.OUTER_LR * (d + diloco.MOMENTUM * v)
                first.copy_(w)
                second.copy_(w)
    return {name: p.detach() for name, p in outer.canonical_parameters()}


# ---- two steps on one matrix and one bias, by the paper ----


def small_reducer():
    """One process's reducer of a matrix of a block and a bias: flat pieces."""
    alone = SimpleNamespace(size=1, rank=0)
    weights = [torch.randn(24, dtype=torch.double), torch.randn(6, dtype=torch.double)]
    names = ("transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.bias")
    tags = [Tag(name, torch.Size(shape), 0, ((0, 6),), sum_over=(alone,))
            for name, shape in zip(names, ((6, 4), (6,)), strict=True)]
    return SimpleNamespace(weights=weights, tags=tags, starts=[0, 0], sharded=False), names


def two_steps(make, lr=0.1):
    """(weights before both steps, gradients of each, weights after both), matrix and bias."""
    torch.manual_seed(0)
    cfg = SimpleNamespace(weight_decay=0.1, grad_clip=0.0, dtype="float64")
    reducer, names = small_reducer()
    optimizer = make(cfg, reducer, LossScale(torch.double, "cpu"), list(names))
    before = [w.clone() for w in reducer.weights]
    grads = [[torch.randn_like(w) for w in before] for _ in range(2)]
    for of_step in grads:
        optimizer.step([grad.clone() for grad in of_step], torch.tensor(1.0), lr)
    shapes = [tag.shape for tag in reducer.tags]
    return [[tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
            for tensors in (before, *grads, reducer.weights)]


def test_muon_orthogonalizes_the_momentum():
    (w, _), *grads, (got, _) = two_steps(lambda *args: muon.Muon(*args[:3]))
    m = torch.zeros_like(w)
    for g, _ in grads:
        m = 0.95 * m + 0.05 * g
        u, values, vt = torch.linalg.svd(0.05 * g + 0.95 * m, full_matrices=False)
        values = values / (values.norm() + 1e-7)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        w = w - 0.1 * (0.2 * math.sqrt(6) * (u * values) @ vt + 0.1 * w)
    close(got, w, "matrix")


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_each_matrix_has_its_rate(kind):
    world = Mesh().world
    before, *grads, got = two_steps(lambda *args: large_batches.OPTIMIZERS[kind](*args, world))
    for i, w in enumerate(before):
        decay = 0.1 if w.dim() > 1 else 0.0
        v, mean, square = (torch.zeros_like(w) for _ in range(3))
        for t in (1, 2):
            g = grads[t - 1][i]
            mean = 0.9 * mean + 0.1 * g
            square = 0.95 * square + 0.05 * g * g
            u = mean / (1 - 0.9**t) / ((square / (1 - 0.95**t)).sqrt() + 1e-6) + decay * w
            ratio = 1.0
            if w.dim() > 1:
                below = u.norm() if kind == "lamb" else g.norm() + decay * w.norm()
                ratio = w.norm() / below
            v = 0.9 * v + 0.1 * ratio * (g + decay * w)
            w = w - (0.1 * ratio * u if kind == "lamb" else v)
        close(got[i], w, kind)
