"""mup.py: rates by the full tensor in any layout; a step moves activations as much in a wide
model as in a narrow one."""

import math
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from data.batches import Data
from engine.optimizer import AdamW
from engine.parts import OPTIMIZERS
from extras.forks import mup
from shard import Tag
from sizes import MOMENTS
from tests.cover import named
from tests.harness import PLAIN, VOCAB, _train, config, equals_one_process, mesh_of, whole_batch
from tests.trainer import Trainer

FACTOR = 128 / 24  # of the tests' width


@contextmanager
def hook():
    """What extras/forks/mup.patch changes."""
    with (patch.dict(OPTIMIZERS, mup=mup.MuP), patch.dict(MOMENTS, mup=MOMENTS["adamw"])):
        yield


class PlainMuP:
    def __init__(self, params):
        matrix = {name: x.dim() == 2 and name.endswith("weight") for name, x in params.items()}
        groups = [{"params": [x], "weight_decay": 0.1 * matrix[name], "name": name}
                  for name, x in params.items()]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)

    def step(self, lr):
        for group in self.optimizer.param_groups:
            scaled = ".h." in group["name"] and "c_" in group["name"]
            is_weight = group["name"].endswith("weight")
            group["lr"] = lr * FACTOR if scaled and is_weight else lr
        self.optimizer.step()
        return {}


PLAIN["mup"] = PlainMuP

BUGS = {  # name: a mistake in the place of settings
    "the rate of the slice": lambda self, tag: (
        0.1 * (len(tag.shape) > 1),
        128 / min(stop - start for start, stop in tag.ranges) if mup.hidden(tag) else 1.0),
    "the embedding is scaled, too": lambda self, tag: (
        (0.1, FACTOR) if len(tag.shape) > 1 else (0.0, 1.0)),
    "decay and rate change places": lambda self, tag: AdamW.settings(self, tag)[::-1]}


def _mup(rank, cfg, bug=None):
    with hook(), patch.object(mup.MuP, "settings", BUGS.get(bug, mup.MuP.settings)):
        return _train(rank, cfg)


@pytest.mark.parametrize("flags", [
    {}, {"tp": 3}, {"dp": 2, "tp": 2, "sp": True, "zero": 1}, {"pp": 4, "microbatches": 3},
    {"dp": 3, "zero": 3, "microbatches": 2}, {"dp": 2, "cp": 2, "bucket_mb": 0.02},
    {"dp": 2, "pp": 2, "schedule": "zb-v", "microbatches": 3, "zero": 2}], ids=named)
def test_mup_equals_one_process(corpus, flags):
    with hook():
        equals_one_process(corpus, _mup, optimizer="mup", **flags)


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(corpus, bug):
    with hook(), pytest.raises(AssertionError, match="weights|copies of|clipping"):
        equals_one_process(corpus, _mup, bug, optimizer="mup", tp=2)


def test_at_the_base_width_the_rates_are_adamws():
    usual = SimpleNamespace(cfg=SimpleNamespace(weight_decay=0.1))
    optimizer = object.__new__(mup.MuP)
    optimizer.cfg = usual.cfg
    for shape in ((384, 128), (128, 128), (512, 128), (128, 512), (128,)):
        tag = Tag("transformer.h.0.mlp.c_fc.weight", torch.Size(shape))
        assert optimizer.settings(tag) == AdamW.settings(usual, tag)


def moved(corpus, width, optimizer):
    """RMS of what four steps add to the last block's output."""
    cfg = config(corpus, n_embd=width, n_head=4, n_layer=2, optimizer=optimizer, microbatches=1,
                 lr=2e-3, warmup_steps=0, grad_clip=1.0, weight_decay=0.0)
    with hook(), patch.object(mup, "BASE_WIDTH", 32):
        trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
        ids, _ = whole_batch(corpus, 0)
        layers = trainer.pipeline.stages[0].layers

        @torch.no_grad()
        def output():
            x = ids
            for layer in layers[:-1]:
                x = layer(x)
            return x

        before = output()
        for step in range(4):
            norm, _ = trainer.gradients(Data(cfg).training(cfg, step, trainer.mesh))
            trainer.update(norm, cfg.lr)
        return (output() - before).square().mean().sqrt().item()


def test_a_step_moves_a_wide_model_as_much_as_a_narrow_one(learnable_corpus):
    """From width 32 to 256 AdamW's steps grow with the width; muP's stay within a factor of 2."""
    adamw, scaled = ([moved(learnable_corpus, width, name) for width in (32, 256)]
                     for name in ("adamw", "mup"))
    assert math.isclose(adamw[0], scaled[0], rel_tol=1e-9)  # the base width
    growth = [b / a for a, b in (adamw, scaled)]
    assert growth[0] > 2 and 0.5 < growth[1] < 1.6 and growth[0] > 2 * growth[1], growth
