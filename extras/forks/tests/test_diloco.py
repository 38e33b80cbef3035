"""diloco.py: workers in any layout train like workers of one process each; with H = 1 and SGD
they are data parallelism; what they send; stops between meetings."""

from unittest.mock import patch

import pytest
import torch

import train
from data.batches import Data
from experts import kind_of
from extras.forks import diloco
from extras.forks.tests.test_large_batches import ByThePaper, hook, hooked
from model import build
from run import checkpoint, tensorfile
from run.config import check
from run.copies import replicas_agree
from sizes import config_of
from tests.cover import named
from tests.harness import PLAIN, VOCAB, assemble, close, config, local_tensors, mesh_of, whole_batch
from tests.pool import pool
from tests.trainer import Trainer

assert issubclass(PLAIN["sgd"].func, ByThePaper)
LR = (5e-3, 1e-2, 5e-3)  # of the three steps


class Plain(torch.nn.Module):
    """By the paper, in one process: D models, and the outer weights."""

    def __init__(self, corpus, cfg):
        super().__init__()
        shape = config_of(cfg, VOCAB)
        self.count = cfg.dp // cfg.shard
        made = [build(shape, cfg.seed, torch.double, kind_of(shape)) for _ in range(self.count + 1)]
        *self.workers, self.outer = made
        self.optimizers = [PLAIN[cfg.optimizer](dict(model.canonical_parameters()))
                           for model in self.workers]
        self.velocity = [torch.zeros_like(p) for p in self.outer.parameters()]
        self.corpus, self.cfg = corpus, cfg

    def step(self, step):
        ids, targets = whole_batch(self.corpus, step)
        parts = zip(ids.chunk(self.count), targets.chunk(self.count), strict=True)
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


class Workers(Trainer):
    """What --diloco changes: workers that meet every `every` steps; 0: the usual Trainer."""

    def __init__(self, cfg, every):
        mesh = mesh_of(cfg)

        def choose(cfg, usual=train.choose):
            parts = usual(cfg)
            make_reducer = parts.Reducer

            def reducer_of_workers(stages, value=None):
                diloco.keep_apart(stages, mesh.group("rep"))
                return make_reducer(stages, value=value)

            if every:
                parts.Reducer = reducer_of_workers
            return parts

        with patch.object(train, "choose", choose):
            super().__init__(cfg, mesh, VOCAB)
        if every:
            self.optimizer = diloco.DiLoCo(self, every)


def clip_by_the_mean(self, grads, norm, lr, usual=diloco.DiLoCo.step):
    self.norm = norm
    usual(self, grads, norm, lr)


BUGS = {  # name: (owner, attribute, what a mistake would put there)
    "the outer step forgets its momentum": (diloco, "MOMENTUM", 0.0),
    "terms are not divided by the workers": (
        diloco.DiLoCo, "mean_change",
        lambda self, start, master: self.all_reduce(start - master, self.workers)),
    "workers do not send": (
        diloco.DiLoCo, "mean_change", lambda self, start, master: start - master),
    "gradients are summed over the workers, too": (
        diloco, "keep_apart", lambda stages, workers: None),
    "workers clip by the mean of their norms": (diloco.DiLoCo, "step", clip_by_the_mean),
    "new weights are not published": (
        diloco.DiLoCo, "meet_early", lambda self: self.apart and self.meet())}


@hooked
def _workers(rank, cfg, every, settings, bug):
    """(the weights after three steps and a last meeting, do all workers have the same?)"""
    rate, momentum = settings
    with (patch.multiple(diloco, OUTER_LR=rate, MOMENTUM=momentum),
          patch.object(*BUGS.get(bug, (diloco, "OUTER_LR", rate)))):
        trainer = Workers(cfg, every)
        data = Data(cfg)
        for step in range(3):
            trainer.step(data.training(cfg, step, trainer.mesh), train.learning_rate(cfg, step))
        if every:
            trainer.optimizer.meet_early()
            trainer.optimizer.meet_early()  # at once again: nothing
        return local_tensors(trainer, "weights"), replicas_agree(trainer)


def trained(cfg, every, settings=(0.7, 0.9), bug=None):
    """{name: weights} after three steps of all ranks."""
    weights, agree = zip(*pool(check(cfg, 1), _workers, cfg, every, settings, bug), strict=True)
    assert all(agree), "replicas disagree"
    return assemble(weights)


def equals_workers(corpus, every, settings=(0.7, 0.9), bug=None, **flags):
    cfg = config(corpus, **{"shard": 1, **flags})
    got = trained(cfg, every, settings, bug)
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
    {"dp": 4, "shard": 2, "zero": 1}, {"dp": 2, "cp": 2, "zero": 2, "microbatches": 3},
    {"dp": 2, "cp": 2, "zero": 3}, {"dp": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 3},
    {"dp": 2, "pp": 2, "tp": 2, "microbatches": 2}, {"dp": 4, "shard": 2, "ep": 2, "experts": 4},
    {"dp": 4, "shard": 2, "tp": 2, "zero": 1, "fast": ""},
    {"dp": 4, "shard": 2, "zero": 3, "fast": ""},
    {"dp": 6, "shard": 2, "microbatches": 2, "fast": "optimizer"}], ids=named)
def test_workers_in_any_layout_equal_workers_of_one_process(corpus, flags):
    equals_workers(corpus, 2, **flags)


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(corpus, bug):
    layout = {"dp": 4, "shard": 2, "zero": 2} if "published" in bug else {"dp": 2}
    with pytest.raises(AssertionError, match="off by|copies of|replicas"):
        equals_workers(corpus, 2, bug=bug, **layout)


def test_meeting_after_each_step_of_sgd_is_data_parallelism(corpus):
    """... without clipping, which each worker does by its own norm."""
    flags = {"dp": 3, "shard": 1, "optimizer": "sgd", "grad_clip": 0.0, "microbatches": 1}
    with hook():
        got = equals_workers(corpus, 1, (1.0, 0.0), **flags)
        for name, value in trained(config(corpus, **flags), 0).items():
            close(got[name], value, name)


def test_with_sgd_rate_one_and_no_momentum_it_is_federated_averaging(corpus):
    with hook():
        equals_workers(corpus, 3, (1.0, 0.0), dp=4, optimizer="sgd")


def _norm(rank, cfg):
    """(the norm of a step with workers, that of this worker's gradients)"""
    trainer = Workers(cfg, 2)
    norm, _ = trainer.step(Data(cfg).training(cfg, 0, trainer.mesh), 1e-2)
    return norm.item(), trainer.optimizer.norm.item()


def test_the_norm_is_the_root_of_the_mean_square(corpus):
    got = pool(4, _norm, config(corpus, dp=4, shard=2, zero=1, microbatches=1))
    logged, own = zip(*got, strict=True)
    assert len({*own}) == 2 and len({*logged}) == 1  # two workers of two ranks
    close(logged[0] ** 2, sum(norm**2 for norm in own) / 4, "mean square")


def _not_finite(rank, cfg):
    """Does a step change the weights, if one worker's gradient is not finite?"""
    trainer = Workers(cfg, 2)
    before = [weights.clone() for weights in trainer.reducer.weights]
    if rank == 1:
        trainer.reducer.weights[0].view(-1)[0] = before[0].view(-1)[0] = float("inf")
    trainer.step(Data(cfg).training(cfg, 0, trainer.mesh), 1e-2)
    return not all(map(torch.equal, trainer.reducer.weights, before))


@pytest.mark.parametrize("fast", ["", "all"])
def test_a_step_that_is_not_finite_is_skipped_by_all(corpus, fast):
    cfg = config(corpus, dp=2, shard=1, microbatches=1, fast=fast)
    check(cfg, 1)
    assert pool(2, _not_finite, cfg) == [False, False]


def _sent(rank, cfg):
    """Elements that this rank has sent to other workers after each step; elements of its model."""
    trainer, data, sent = Workers(cfg, 2), Data(cfg), []
    for step in range(3):
        trainer.step(data.training(cfg, step, trainer.mesh), 1e-2)
        sent.append(trainer.optimizer.workers.bytes_sent // 8)
    return sent, sum(weights.numel() for weights in trainer.reducer.weights)


def test_workers_send_their_weights_once_in_h_steps(corpus):
    got = pool(4, _sent, config(corpus, dp=4, shard=1, microbatches=1))
    n = got[0][1]
    assert [sum(sent[step] for sent, _ in got) for step in range(3)] == [0, 6 * n, 6 * n]


def _stopped(rank, cfg):
    """One step of two, then what a stop does: meet and save. (weights, folder, why no --resume)"""
    trainer = Workers(cfg, 2)
    trainer.step(Data(cfg).training(cfg, 0, trainer.mesh), 1e-2)
    trainer.optimizer.meet_early()
    folder = checkpoint.save(trainer, 1)
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.load(trainer, folder)
    return local_tensors(trainer, "weights"), folder, str(error.value)


def test_a_run_that_stops_between_meetings_saves_the_weights_of_all_workers(corpus, tmp_path):
    cfg = config(corpus, dp=2, shard=1, tp=2, microbatches=1, out=str(tmp_path))
    got = pool(4, _stopped, cfg)
    weights = assemble([rank[0] for rank in got])  # copies have the same bits
    _, folder, said = got[0]
    entries = tensorfile.read_header(folder / checkpoint.MODEL)
    for name, value in weights.items():
        raw = (folder / checkpoint.MODEL).read_bytes()[entries[name].begin : entries[name].end]
        assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.double), value.flatten())
    assert said.endswith("has no moments of --diloco, because each data rank has its own; "
                         "--init-from takes its weights alone")
