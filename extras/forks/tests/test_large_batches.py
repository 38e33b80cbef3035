"""SGD, LARS and LAMB equal a loop written from the papers, each with each feature of the layouts;
rates and warm-up that are scaled to the batch; bytes, skipped steps, checkpoints, memory."""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import engine.parts
import engine.zero as zero
import sizes
import train
from data.batches import Data
from engine.collectives import all_reduce
from engine.mesh import Mesh
from engine.optimizer import LossScale
from extras.forks import large_batches
from extras.forks.large_batches import OPTIMIZERS, scale_rates, with_optimizers
from extras.forks.large_batches_curves import TOKENS, curve, noise_scale
from model import build, initial_value
from run import checkpoint
from run.config import check
from run.tensorfile import CheckpointError
from shard import Tag
from tests.cover import covering, named
from tests.harness import (
    PLAIN,
    VOCAB,
    assemble,
    close,
    config,
    mesh_of,
    pool,
    reference,
    same_model,
    train_with,
)
from tests.test_zero import _counted
from tests.trainer import Trainer, state_bytes

KINDS = ("sgd", "lars", "lamb")


@contextmanager
def hook():
    """What extras/forks/large_batches.patch changes, but for the flags."""
    with (patch.object(engine.parts, "Engine", with_optimizers(engine.parts.Engine)),
          patch.dict(sizes.MOMENTS, large_batches.MOMENTS)):
        yield


@pytest.fixture(autouse=True)
def _hooked():
    with hook():
        yield


def hooked(run):
    """run, a function of a rank, inside of hook()."""
    @wraps(run)
    def inside(*args):
        with hook():
            return run(*args)

    return inside


def with_a_zero(name, *rest):
    """Initial values with a matrix of zeros, by which that of c_attn has a gradient of zeros."""
    value = initial_value(name, *rest)
    return value.zero_() if name.endswith("h.1.attn.c_proj.weight") else value


draws_a_zero = partial(Trainer, draw=with_a_zero)


class ByThePaper:
    """Of PLAIN: SGD, LARS or LAMB. step() returns ratios and norms (of weights, change). Decay 0.1
    and betas are said again here."""

    def __init__(self, kind, params):
        self.kind = kind
        self.w = params
        self.t = 0
        self.v, self.m, self.s = ({name: torch.zeros_like(x) for name, x in params.items()}
                                  for _ in range(3))

    def step(self, lr):
        kind, v, m, s = self.kind, self.v, self.m, self.s
        self.t += 1
        ratios, norms = [], []
        for name, x in self.w.items():
            g = x.grad
            matrix = x.dim() > 1 and name.endswith("weight")
            d = 0.1 if matrix else 0.0
            m[name] = 0.9 * m[name] + 0.1 * g
            s[name] = 0.95 * s[name] + 0.05 * g * g
            mean, square = m[name] / (1 - 0.9**self.t), s[name] / (1 - 0.95**self.t)
            r = mean / (square.sqrt() + 1e-6) + d * x
            u = r if kind == "lamb" else g
            norms.append([x.norm().item(), u.norm().item()])
            usual = kind == "sgd" or not matrix or x.norm() == 0 or u.norm() == 0
            below = r.norm() if kind == "lamb" else g.norm() + d * x.norm()
            ratios.append(1.0 if usual else (x.norm() / below).item())
            v[name] = 0.9 * v[name] + lr * ratios[-1] * (g + d * x)
            x -= lr * ratios[-1] * r if kind == "lamb" else v[name]
        return {"ratios": ratios, "norms": norms}


PLAIN.update({kind: partial(ByThePaper, kind) for kind in KINDS})


def build_with_a_zero(*args):
    model = build(*args)
    model.layers[2].attn.c_proj.weight.data.zero_()
    return model


@hooked
def _trained(rank, cfg, bug):
    """_train's trace with ratios and norms of each tensor in each step, of a model with a matrix of
    zeros."""
    ratios, norms = [], []
    kind = OPTIMIZERS[cfg.optimizer]
    original = kind.trust_ratios

    def reduced(squares, group):
        if bug != "the norm of the shard":
            all_reduce(squares, group)
        norms.append(squares.sqrt().t())  # (tensors, 2)
        return squares

    def recorded(self, gradient):
        kept = self.cfg, self.holders
        if bug == "decay outside of the norm":
            self.cfg = replace(cfg, weight_decay=0.0)
        if bug == "a replicated slice counted twice":
            self.holders = torch.ones_like(self.holders)
        ratios.append(original(self, gradient))
        self.cfg, self.holders = kept
        return ratios[-1]

    kind.trust_ratios = recorded
    large_batches.all_reduce = reduced
    try:
        trace = train_with(rank, cfg, train, "Trainer", draws_a_zero, kinds=("weights",))
    finally:
        kind.trust_ratios = original
        large_batches.all_reduce = all_reduce
    norms = norms or [None] * len(ratios)  # SGD
    assert trace[0]["agree"]
    return [{**step, "ratios": x, "norms": y}
            for step, x, y in zip(trace[1:], ratios, norms, strict=True)]


def equals_the_paper(corpus, bug=None, **flags):
    cfg = config(corpus, **{"microbatches": 1, **flags})
    got = pool(check(cfg, 1), _trained, cfg, bug)
    _, *steps = reference(corpus, build_with_a_zero, **same_model(cfg))
    for step, want in enumerate(steps):
        ranks = [rank[step] for rank in got]
        for rank in ranks:
            assert torch.equal(rank["ratios"], ranks[0]["ratios"]), "ratios differ in bits"
            for name in ("loss", "norm"):
                close(rank[name], want[name], name)
        for i, name in enumerate(want["weights"]):
            for each in ("ratios", "norms")[: 1 + (cfg.optimizer != "sgd")]:
                close(ranks[0][each][i], want[each][i], f"step {step} {each} of {name}")
        full = assemble([rank["weights"] for rank in ranks])
        for name, value in want["weights"].items():
            close(full[name], value, f"step {step} {name}")


LAYOUTS = [
    {"microbatches": 2}, {"tp": 3, "pp": 2, "microbatches": 2, "pad_vocab": 16},
    {"dp": 2, "tp": 2, "zero": 1}, {"dp": 3, "zero": 2, "microbatches": 3},
    {"dp": 4, "zero": 3, "n_embd": 25, "n_head": 5}, {"pp": 4, "microbatches": 3},
    {"dp": 2, "cp": 2, "bucket_mb": 0.02}, {"cp": 2, "tp": 2, "sp": True, "zero": 1},
    {"tp": 2, "pp": 2, "sp": True, "dp": 2}, {"dp": 2, "ep": 2, "experts": 4},
    {"dp": 4, "ep": 2, "experts": 4, "zero": 2},
    {"dp": 2, "ep": 2, "tp": 2, "sp": True, "experts": 4},
    {"dp": 2, "tp": 2, "pp": 2, "schedule": "zb-v", "chunks": 2, "microbatches": 3, "zero": 2},
    {"dp": 2, "cp": 2, "pp": 2, "zero": 3, "schedule": "zb-h1", "microbatches": 2}]


@pytest.mark.parametrize("flags", covering(
    [{**layout, "optimizer": kind} for layout in LAYOUTS for kind in KINDS]), ids=named)
def test_each_layout_equals_the_papers_loop(corpus, flags):
    equals_the_paper(corpus, **flags)


BUGS = ["the norm of the shard", "decay outside of the norm",
        "a replicated slice counted twice"]  # the last changes both norms: not their ratio


@pytest.mark.parametrize("kind", ["lars", "lamb"])
@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(corpus, bug, kind):
    with pytest.raises(AssertionError, match="ratios|norms"):
        equals_the_paper(corpus, bug, optimizer=kind, tp=2, pp=2, microbatches=2)


class Small(torch.nn.Module):
    """One matrix of n rows of one number, and a bias."""

    def __init__(self, n, group):
        super().__init__()
        self.shapes = {"weight": torch.Size((n, 1)), "bias": torch.Size((1,))}
        for name, shape in self.shapes.items():
            param = torch.nn.Parameter(torch.empty(shape, device="meta"))
            param.tag = Tag(name, shape, 0, ((0, shape[0]),), sum_over=(group,))
            setattr(self, name, param)


@hooked
def _empty(rank, cfg, n):
    """(ratios, pieces on this rank) of a layer of fewer numbers than ranks."""
    mesh = mesh_of(cfg)
    layer = Small(n, mesh.group("dp"))
    reducer = zero.REDUCERS[cfg.zero]({0: [layer]}, None, lambda tag: torch.full(tag.shape, 3.0),
                                      torch.float64)
    scale = LossScale(torch.float64, "cpu")
    optimizer = OPTIMIZERS[cfg.optimizer](cfg, reducer, scale, layer.shapes, mesh.world)
    grads = [torch.full_like(weights, 0.5) for weights in reducer.weights]
    optimizer.step(grads, torch.zeros((), dtype=torch.double), 0.1)  # a norm that clips nothing
    return optimizer.ratios.tolist(), sum(weights.numel() > 0 for weights in reducer.weights)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind,ratio", [("lars", 3 / (0.5 + 0.3)), ("lamb", 3 / (1 + 0.3))])
def test_a_rank_with_an_empty_shard_has_the_same_ratios(corpus, kind, ratio, stage):
    got = pool(4, _empty, config(corpus, dp=4, zero=stage, optimizer=kind), 1)
    assert [pieces for _, pieces in got].count(0) == 2
    for ratios, _ in got:
        close(ratios, [ratio, 1.0], "ratios", 1e-5 if kind == "lamb" else 1e-10)  # 1e-6 below it


# ---- what a step costs, and steps that are skipped ----


@hooked
def _bytes(rank, cfg, kind):
    """({group: bytes that its ranks send in a step of the optimizer}, all-reduces of trust ratios,
    tensors)"""
    trainer, calls = Trainer(replace(cfg, optimizer=kind), mesh_of(cfg), VOCAB), []
    norm, read = trainer.gradients(Data(cfg).training(cfg, 0, trainer.mesh))
    before = {name: other.bytes_sent for name, other in trainer.mesh.groups.items()}
    large_batches.all_reduce = lambda *args: (calls.append(1), all_reduce(*args))[1]
    try:
        trainer.update(norm, 1e-3)
        if cfg.zero in (1, 2):
            trainer.reducer.gather_weights(trainer.pipeline.stages[0].layers)
    finally:
        large_batches.all_reduce = all_reduce
    sent = {name: other.bytes_sent - before[name] for name, other in trainer.mesh.groups.items()}
    return sent, len(calls), len(trainer.shapes)


@pytest.mark.parametrize("flags", [
    {"dp": 2, "tp": 2}, {"tp": 3}, {"dp": 4, "zero": 1}], ids=str)
def test_a_step_sends_one_small_all_reduce_more(corpus, flags):
    """Two numbers of each tensor of the model, among all ranks."""
    cfg = config(corpus, microbatches=1, **flags)
    ranks, usual = check(cfg, 1), None
    for kind in ("adamw", *KINDS):
        got = pool(ranks, _bytes, cfg, kind)
        total = {name: sum(sent[name] for sent, *_ in got) for name in got[0][0]}
        usual = usual or total
        _, calls, tensors = got[0]
        adaptive = kind in ("lars", "lamb")
        assert calls == adaptive and all(row[1] == calls for row in got)
        small = 2 * (ranks - 1) * 2 * tensors * 8 if adaptive else 0
        assert total == {**usual, "world": usual["world"] + small}


hooked_counted = hooked(_counted)
hooked_counted.__qualname__ = hooked_counted.__name__ = "hooked_counted"
hooked_counted.__module__ = __name__


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_looks_at_the_device_once(corpus, kind):
    """For the loss: not for a norm, nor to know whether to skip."""
    cfg = config(corpus, dp=2, zero=1, microbatches=2, optimizer=kind)
    for reads, *_ in pool(2, hooked_counted, cfg):
        assert reads == ["tolist"]


@hooked
def _skipped(rank, cfg):
    """For each optimizer: did a step that is not finite change a bit? Does the next one change all?
    With which skipped first, as float16's first steps are."""
    found = {}
    for kind in KINDS:
        one = replace(cfg, optimizer=kind)
        trainer, data = Trainer(one, mesh_of(one), VOCAB), Data(one)

        def state(trainer=trainer):
            kinds = [trainer.reducer.weights, *trainer.optimizer.named_states().values()]
            return [x.clone() for values in kinds for x in values if x.numel() > 0]

        changed = []
        for step in range(4):
            norm, read = trainer.gradients(data.training(one, step, trainer.mesh))
            before = state()
            if step % 2 == 0 and rank == 0:
                for grad in trainer.grads:
                    grad.view(-1)[:1] = math.inf
            trainer.update(torch.tensor(math.nan) if step % 2 == 0 else norm, 1e-2)
            after = state()
            assert all(x.isfinite().all() for x in after)
            changed.append(sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        found[kind] = changed, len(after), int(trainer.optimizer.updates)
        formula, live = state_bytes(trainer)
        assert formula == live, (kind, formula, live)
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_skipped_step_changes_no_bit(corpus, zero):
    cfg = config(corpus, dp=2, zero=zero, dtype="float16", microbatches=1)
    for found in pool(2, _skipped, cfg):
        for kind, (changed, tensors, updates) in found.items():
            assert changed[0] == changed[2] == 0 and updates == 2, kind
            assert min(changed[1], changed[3]) > tensors * 2 // 3, kind  # some are rounded away


def test_sgd_and_lars_hold_one_moment():
    """Per parameter: 16-bit training 2 + 2 + 4 + 4 bytes, float32 4 + 4 + 4."""
    for kind, sixteen, wide in (("sgd", 12, 12), ("lars", 12, 12), ("adamw", 16, 16),
                                ("lamb", 16, 16)):
        n = len(sizes.MOMENTS[kind])
        assert sum(sizes.bytes_per_parameter(0, 1, 2, moments=n)) == sixteen
        assert sum(sizes.bytes_per_parameter(0, 1, 4, moments=n)) == wide


# ---- rates, warm-up, checkpoints ----


def test_rates_and_warm_up_are_scaled_to_the_batch():
    for how, factor in (("none", 1), ("linear", 4), ("sqrt", 2)):
        cfg = SimpleNamespace(batch_size=128, base_batch_size=32, block_size=8, scale_lr=how,
                              lr=1e-3, min_lr=1e-4, warmup_tokens=20 * 1024, warmup_steps=1)
        for _ in range(2):  # the command line is checked twice
            scale_rates(cfg)
        assert (cfg.lr, cfg.min_lr, cfg.warmup_steps) == (1e-3 * factor, 1e-4 * factor, 20)
    for tokens, steps in ((20 * 1024, 80), (20 * 1024 + 127, 80), (20 * 1024 + 129, 81)):
        small = SimpleNamespace(batch_size=32, block_size=8, scale_lr="none", warmup_tokens=tokens)
        scale_rates(small)
        assert small.warmup_steps == steps  # as many tokens, to the nearest step of 256


def test_a_checkpoint_of_another_optimizer_is_refused(corpus, tmp_path):
    cfg = config(corpus, n_layer=1, microbatches=1, out=str(tmp_path), optimizer="lars")
    folder = checkpoint.save(train.Trainer(cfg, Mesh(dp=1), VOCAB), 1)
    other = train.Trainer(replace(cfg, optimizer="sgd"), Mesh(dp=1), VOCAB)
    with pytest.raises(CheckpointError, match=f"{folder}: its --optimizer is lars, this run's is "):
        checkpoint.load(other, folder)


# ---- the experiment ----


def test_the_noise_scale_is_the_variance_over_the_squared_mean():
    """Gradients of one sequence: 1 in each of 40,000 coordinates, and noise of variance 2: a scale
    of 2. Of means over b sequences the variance is 2/b. Random: 2% off at 400,000 numbers."""
    rng, squares = torch.Generator().manual_seed(0), {}
    for batch in (4, 16):
        noise = torch.randn(10, 40_000, dtype=torch.double, generator=rng) * math.sqrt(2 / batch)
        squares[batch] = (1 + noise).square().sum(1).mean().item()
    close(noise_scale(squares[4], squares[16], 4, 16), 2, "scale", 0.02)


def test_a_curve_has_means_in_bits_of_all_steps():
    records = [{"step": i, "loss": 2 * math.log(2) * (1 + i % 2)} for i in range(100)]
    points = curve([*records, {"step": 100, "val_loss": 1.0}], 125, 2.0)
    assert len(points) == 50 and all(math.isclose(bits, 1.5) for _, bits in points)
    assert math.isclose(points[-1][0], 100 * (100 * 125 * 32) / TOKENS)
