"""The forks of extras/forks/: each patch applies to this repository, and trains like one process in
another layout; and each computes what its paper says."""

import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from data.batches import Data
from extras.forks import diloco, large_batches, muon
from mesh import Mesh
from model import build
from optimizer import LossScale, learning_rate
from run.config import check_layout, parse
from shard import Tag
from sizes import config_of
from tests.harness import HERE, VOCAB

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="git applies the patches")
WORDS = """--n-layer 2 --n-head 2 --n-embd 8 --block-size 8 --batch-size 8 --dtype float64 --steps 3
    --warmup-steps 0 --microbatches 1 --eval-interval 0 --device cpu""".split()
RUNS = {  # patch: (flags of one layout, of others that have to give the same weights)
    "muon": ("--muon", "--muon --tp 2 --dp 2 --zero 1"),
    "large_batches": ("--layerwise lamb", "--layerwise lamb --tp 2 --pp 2",
                      "--layerwise lamb --dp 2 --zero 2"),
    "lora": ("--lora 2", "--lora 2 --tp 2 --dp 2 --sp --zero 3",
             "--lora 2 --pp 2 --schedule zb-h1 --microbatches 2"),
    "diloco": ("--diloco 2 --dp 2 --shard 1", "--diloco 2 --dp 4 --shard 2 --zero 1")}


def close(got, want, name):
    """Equal to 1e-10 of the largest element: float64, and sums in another order. c_attn.bias: to
    1e-8, because the gradients of the keys' biases are 0 but for rounding, and AdamW divides them
    by their size or, if that is smaller, by 1e-8."""
    off = (got - want).abs().max() / want.abs().max().clamp(min=1e-300)
    assert off < (1e-8 if name.endswith("c_attn.bias") else 1e-10), (name, off)


@pytest.fixture(scope="module", params=RUNS)
def trained(request, corpus, tmp_path_factory):
    """(name of the patch, [{name: tensor} of the last checkpoint of each of its runs])."""
    name = request.param
    tree = tmp_path_factory.mktemp(name) / "fork"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "out", "stdlib", "shakespeare")
    shutil.copytree(HERE, tree, ignore=hidden)
    subprocess.run(["git", "init", "-q", tree], check=True)
    subprocess.run(["git", "apply", f"extras/forks/{name}.patch"], cwd=tree, check=True)
    ended = []
    for i, words in enumerate(RUNS[name]):
        command = [sys.executable, "train.py", *WORDS, *words.split(), "--data", corpus,
                   "--out", str(tree / f"out{i}")]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert i == 0 or "replicas agree" in done.stdout
        ended.append(weights_of(tree / f"out{i}" / "step-00000003" / "model.safetensors"))
    return name, ended


def weights_of(path):
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    weights = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            raw = bytearray(data[start + begin : start + end])
            weights[name] = torch.frombuffer(raw, dtype=torch.double).view(entry["shape"])
    return weights


def flags(corpus, words=""):
    cfg = parse([*WORDS, *words.split(), "--data", corpus])
    check_layout(cfg, 1)
    return cfg


def initial_model(cfg):
    return build(config_of(cfg, VOCAB), cfg.seed, torch.double)


def test_a_fork_trains_alike_in_any_layout(trained, corpus):
    name, (one, *others) = trained
    start = dict(initial_model(flags(corpus)).canonical_parameters())
    assert one.keys() >= start.keys()
    for other in others:
        assert other.keys() == one.keys()
        for tensor, value in one.items():
            close(other[tensor], value, tensor)
    if name == "lora":  # only the adapters have moved
        assert all(torch.equal(one[tensor], value) for tensor, value in start.items())
        assert all(one[tensor].any() for tensor in one.keys() - start.keys())
    if name == "diloco":
        for tensor, value in two_workers(corpus).items():
            close(one[tensor], value, tensor)


def two_workers(corpus):
    """{name: weights} of three steps of --diloco 2 with two workers, by the paper, in one process.
    The workers meet after two steps, and once more before the checkpoint."""
    cfg = flags(corpus)
    data = Data(cfg)
    *workers, outer = (initial_model(cfg) for _ in range(3))
    optimizers = []
    for model in workers:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": cfg.weight_decay},
                  {"params": others, "weight_decay": 0.0}]
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95)))
    velocity = [torch.zeros_like(p) for p in outer.parameters()]
    for step in range(3):
        (batch,) = data.training(cfg, step, Mesh())
        parts = zip(batch[0].chunk(2), batch[1].chunk(2), strict=True)
        for model, optimizer, (ids, targets) in zip(workers, optimizers, parts, strict=True):
            model.zero_grad()
            (model(ids, targets) / targets.numel()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(cfg, step)
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
