"""extras/forks/muon.py: a step of Muon on pieces of matrices is the step on whole ones."""

import math
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from data.batches import Data
from engine.parts import OPTIMIZERS
from extras.forks import muon
from shard import Tag
from sizes import MOMENTS
from tests.cover import named
from tests.harness import PLAIN, VOCAB, PlainAdamW, _train, config, equals_one_process, mesh_of
from tests.pool import pool
from tests.trainer import Trainer


@contextmanager
def hook():
    """What extras/forks/muon.patch changes."""
    with (patch.dict(OPTIMIZERS, muon=muon.Muon),
          patch.dict(MOMENTS, muon=("exp_avg", "exp_avg_sq"))):
        yield


class PlainMuon:
    """By the singular values, on whole matrices."""

    def __init__(self, params):
        self.matrices = {name: param for name, param in params.items()
                         if param.dim() == 2 and ".h." in name and name.endswith("weight")}
        self.adamw = PlainAdamW({name: param for name, param in params.items()
                                 if name not in self.matrices})
        self.means = {name: torch.zeros_like(x) for name, x in self.matrices.items()}

    def step(self, lr):
        self.adamw.step(lr)
        for name, x in self.matrices.items():
            self.means[name] = 0.9 * self.means[name] + 0.1 * x.grad
            left, values, right = torch.linalg.svd(0.1 * x.grad + 0.9 * self.means[name],
                                                   full_matrices=False)
            values = values / (values.norm() + 1e-7)
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            update = 0.2 * max(x.shape) ** 0.5 * (left * values) @ right
            x -= lr * (update + 0.1 * x)
        return {}


PLAIN["muon"] = PlainMuon

BUGS = {  # name: (owner, attribute, what a mistake would put there, a layout that shows it)
    "each rank orthogonalizes its slice": (
        muon, "all_reduce", lambda tensor, group: tensor, {"tp": 2}),
    "a piece is taken for the slice": (
        muon, "all_reduce", lambda tensor, group: tensor, {"dp": 2, "zero": 2}),
    "each piece is taken for the first one": (
        muon, "whole_matrix", lambda piece, tag, start, sharded, usual=muon.whole_matrix: usual(
            piece, tag, 0, sharded), {"dp": 2, "zero": 1}),
    "q, k and v are placed as one range": (
        Tag, "place", lambda tag, part, full: full.narrow(
            tag.dim, tag.ranges[0][0], part.size(tag.dim)).copy_(part), {"tp": 3}),
    "the scale is that of another side": (
        muon, "update_scale", lambda shape: 0.2 * min(shape) ** 0.5, {}),
    "AdamW steps the matrices, too": (
        muon.Muon, "settings", lambda optimizer, tag: (0.1, 1.0), {"pp": 2})}


def _muon(rank, cfg, bug=None):
    owner, name, wrong, _ = BUGS.get(bug, (muon, "update_scale", muon.update_scale, {}))
    with hook(), patch.object(owner, name, wrong):
        return _train(rank, cfg)


@pytest.mark.parametrize("flags", [
    {}, {"dp": 3, "zero": 2, "microbatches": 3}, {"tp": 3, "pp": 2, "microbatches": 2},
    {"dp": 2, "tp": 2, "sp": True, "zero": 1}, {"dp": 4, "zero": 3, "n_embd": 25, "n_head": 5},
    {"dp": 2, "cp": 2, "bucket_mb": 0.02}, {"tp": 2, "pp": 2, "dp": 2, "zero": 3},
    {"dp": 2, "pp": 2, "schedule": "zb-v", "microbatches": 3, "zero": 1},
    {"dp": 2, "ep": 2, "tp": 2, "experts": 4, "zero": 2},
    {"dp": 4, "shard": 2, "zero": 3}], ids=named)
def test_muon_equals_one_process(corpus, flags):
    with hook():
        equals_one_process(corpus, _muon, optimizer="muon", **flags)


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(corpus, bug):
    with hook(), pytest.raises(AssertionError, match="weights|copies of|replicas"):
        equals_one_process(corpus, _muon, bug, optimizer="muon", **BUGS[bug][-1])


def test_newton_schulz_brings_all_singular_values_near_one():
    for shape in ((24, 72), (72, 24), (24, 24)):
        x = torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(muon.newton_schulz(x))
        assert 0.6 < values.min() and values.max() < 1.25, (shape, values)


def test_a_step_that_is_not_finite_changes_no_bit(corpus):
    cfg = config(corpus, optimizer="muon", microbatches=1)
    with hook():
        trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
    trainer.gradients(Data(cfg).training(cfg, 0, trainer.mesh))
    optimizer = trainer.optimizer
    held = [x for kind in (trainer.reducer.weights, optimizer.masters, *optimizer.moments.values())
            for x in kind]
    before = [x.clone() for x in held]
    for grad in trainer.grads:
        grad[0] = math.nan
    trainer.update(torch.tensor(math.nan), 1e-2)
    assert all(map(torch.equal, held, before))


def _bytes(rank, cfg):
    """Bytes that this rank sends in a step of Muon and in a step of AdamW, less; the elements of
    the whole matrices."""
    sent = []
    for name in ("muon", "adamw"):
        cfg.optimizer = name
        with hook():
            trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
        norm, _ = trainer.gradients(Data(cfg).training(cfg, 0, trainer.mesh))
        groups = trainer.mesh.group("tp"), trainer.mesh.group("shard", "ep", "cp")
        before = [group.bytes_sent for group in groups]
        trainer.update(norm, 1e-2)
        for _ in trainer.reducer.whole():  # waits until the new weights have arrived
            pass
        sent.append([group.bytes_sent - b for group, b in zip(groups, before, strict=True)])
    whole = sum(tag.shape.numel() for tag in trainer.reducer.tags if muon.is_for_muon(tag))
    return [a - b for a, b in zip(*sent, strict=True)], whole


@pytest.mark.parametrize("D,T,stage", [(2, 2, 1), (1, 4, 0), (4, 1, 2)])
def test_a_step_sends_the_formula(corpus, D, T, stage):
    cfg = config(corpus, dp=D, tp=T, zero=stage, microbatches=1)
    got = pool(D * T, _bytes, cfg)
    _, whole = got[0]
    tp, dp = (sum(more[i] for more, _ in got) for i in (0, 1))
    assert tp == 8 * 2 * (T - 1) * whole * D
    assert dp == (8 * 2 * (D - 1) * whole if stage else 0)
