"""forks/diloco.py: workers in any layout train like workers of one process each; with H = 1 and SGD
they are data parallelism; what they send; stops between meetings."""

from unittest.mock import patch

import pytest
import torch

import train
from data.batches import Data
from experts import kind_of
from forks import diloco
from model import build
from run import checkpoint, tensorfile
from run.config import check
from sizes import config_of
from tests.cover import named
from tests.harness import (
    PLAIN,
    VOCAB,
    assemble,
    close,
    config,
    equals_one_process,
    local_tensors,
    mesh_of,
    whole_batch,
)
from tests.pool import pool
from tests.test_optimizers import ByThePaper

assert issubclass(PLAIN["sgd"].func, ByThePaper)
LR = (5e-3, 1e-2, 5e-3)  # of the three steps


class Plain(torch.nn.Module):
    """By the paper, in one process: D models, and the outer weights."""

    def __init__(self, corpus, cfg):
        super().__init__()
        shape = config_of(cfg, VOCAB)
        made = [build(shape, cfg.seed, torch.double, kind_of(shape)) for _ in range(cfg.dp + 1)]
        *self.workers, self.outer = made
        self.optimizers = [PLAIN[cfg.optimizer](dict(model.canonical_parameters()))
                           for model in self.workers]
        self.velocity = [torch.zeros_like(p) for p in self.outer.parameters()]
        self.corpus, self.cfg = corpus, cfg

    def step(self, step):
        ids, targets = whole_batch(self.corpus, step)
        parts = zip(ids.chunk(self.cfg.dp), targets.chunk(self.cfg.dp), strict=True)
        for model, optimizer, (x, y) in zip(self.workers, self.optimizers, parts, strict=True):
            model.zero_grad()
            (model(x, y) / y.numel()).backward()
            if self.cfg.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.cfg.grad_clip)
            with torch.no_grad():
                optimizer.step(LR[step])

    @torch.no_grad()
    def meet(self, rate, momentum):
        models = zip(*(model.parameters() for model in self.workers), strict=True)
        for w, v, own in zip(self.outer.parameters(), self.velocity, models, strict=True):
            d = w - sum(own) / len(own)
            v.copy_(momentum * v + d)
            w -= rate * (d + momentum * v)
            for p in own:
                p.copy_(w)

    def weights(self):
        return {name: p.detach().clone() for name, p in self.outer.canonical_parameters()}


def trainer_of(cfg):
    usual = train.Trainer.__mro__[-2]  # in a patched copy Trainer is a DiLoCo already
    return diloco.diloco(usual)(cfg, mesh_of(cfg), VOCAB)


BUGS = {  # name: (owner, attribute, what a mistake would put there)
    "the outer step forgets its momentum": (diloco, "MOMENTUM", 0.0),
    "terms are not divided by the workers": (
        diloco, "all_reduce", lambda x, group, usual=diloco.all_reduce: usual(x, group) * 2),
    "workers do not send": (diloco, "all_reduce", lambda x, group: x * group.size),
    "new weights are not published": (
        train.OPTIMIZERS["adamw"], "publish", lambda optimizer, bucket: None)}


def _workers(rank, cfg, settings, bug):
    """The weights after three steps and a last meeting."""
    rate, momentum = settings
    with (patch.multiple(diloco, OUTER_LR=rate, MOMENTUM=momentum),
          patch.object(*BUGS.get(bug, (diloco, "OUTER_LR", rate)))):
        trainer = trainer_of(cfg)
        data = Data(cfg)
        for step in range(3):
            norm, _ = trainer.gradients(data.training(cfg, step, trainer.mesh))
            trainer.update(norm, train.learning_rate(cfg, step))
        trainer.meet()
        trainer.meet()  # at once again: nothing
        return local_tensors(trainer, "weights")


def equals_workers(corpus, every, settings=(0.7, 0.9), bug=None, **flags):
    cfg = config(corpus, **flags)
    world = check(cfg, 1)
    cfg.diloco = every
    got = assemble(pool(world, _workers, cfg, settings, bug))
    plain = Plain(corpus, cfg)
    for step in range(3):
        plain.step(step)
        if (step + 1) % every == 0:
            plain.meet(*settings)
    if 3 % every:
        plain.meet(*settings)
    for name, value in plain.weights().items():
        close(got[name], value, name)
    return got


@pytest.mark.parametrize("flags", [
    {"dp": 2}, {"dp": 3, "microbatches": 2, "bucket_mb": 0.02}, {"dp": 2, "tp": 2, "sp": True},
    {"dp": 2, "cp": 2, "zero": 1}, {"dp": 2, "cp": 2, "zero": 2, "microbatches": 3},
    {"dp": 2, "cp": 2, "zero": 3}, {"dp": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 3},
    {"dp": 2, "pp": 2, "tp": 2, "microbatches": 2}], ids=named)
def test_workers_in_any_layout_equal_workers_of_one_process(corpus, flags):
    equals_workers(corpus, 2, **flags)


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(corpus, bug):
    layout = {"dp": 2, "cp": 2, "zero": 2} if "published" in bug else {"dp": 2}
    with pytest.raises(AssertionError, match="off by|copies of"):
        equals_workers(corpus, 2, bug=bug, **layout)


def test_meeting_after_each_step_of_sgd_is_data_parallelism(corpus):
    """... without clipping, which each worker does by its own norm."""
    flags = {"dp": 3, "optimizer": "sgd", "grad_clip": 0.0, "microbatches": 1}
    got = equals_workers(corpus, 1, (1.0, 0.0), **flags)
    cfg = config(corpus, **flags)
    cfg.diloco = 0
    want = assemble(pool(3, _workers, cfg, (1.0, 0.0), None))
    for name, value in want.items():
        close(got[name], value, name)


def test_with_sgd_rate_one_and_no_momentum_it_is_federated_averaging(corpus):
    equals_workers(corpus, 3, (1.0, 0.0), dp=4, optimizer="sgd")


def _switched_off(rank, cfg):
    from tests.harness import train_with
    cfg.diloco = 0
    return train_with(rank, cfg, train, "Trainer", diloco.diloco(train.Trainer.__mro__[-2]))


def test_without_the_flag_nothing_changes(corpus):
    equals_one_process(corpus, _switched_off, dp=2, tp=2, zero=1)


def _sent(rank, cfg):
    """Elements that this rank has sent to other workers after each step; elements of its model."""
    trainer, data, sent = trainer_of(cfg), Data(cfg), []
    for step in range(3):
        norm, _ = trainer.gradients(data.training(cfg, step, trainer.mesh))
        trainer.update(norm, 1e-2)
        sent.append(trainer.workers.bytes_sent // 8)
    return sent, sum(bucket.numel for bucket in trainer.reducer.buckets)


def test_workers_send_their_weights_once_in_h_steps(corpus):
    cfg = config(corpus, dp=4, microbatches=1)
    cfg.diloco = 2
    got = pool(4, _sent, cfg)
    n = got[0][1]
    assert [sum(sent[step] for sent, _ in got) for step in range(3)] == [0, 6 * n, 6 * n]


def _stopped(rank, cfg):
    """One step of two, then what a stop does: meet and save. (weights, folder, why no --resume)"""
    trainer = trainer_of(cfg)
    norm, _ = trainer.gradients(Data(cfg).training(cfg, 0, trainer.mesh))
    trainer.update(norm, 1e-2)
    trainer.meet()
    folder = checkpoint.save(trainer, 1)
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.load(trainer, folder)
    return local_tensors(trainer, "weights"), folder, str(error.value)


def test_a_run_that_stops_between_meetings_saves_the_weights_of_all_workers(corpus, tmp_path):
    cfg = config(corpus, dp=2, tp=2, microbatches=1, out=str(tmp_path))
    cfg.diloco = 2
    got = pool(4, _stopped, cfg)
    weights = assemble([rank[0] for rank in got])  # copies have the same bits
    _, folder, said = got[0]
    entries = tensorfile.read_header(folder / checkpoint.MODEL)
    for name, value in weights.items():
        raw = (folder / checkpoint.MODEL).read_bytes()[entries[name].begin : entries[name].end]
        assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.double), value.flatten())
    assert said.endswith("has no moments of --diloco, because each data rank has its own; "
                         "--init-from takes its weights alone")
