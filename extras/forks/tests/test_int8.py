"""int8.py does not equal one process. Without rounding it does; it sends the formula; what
rounding loses is not lost; the loss falls as without."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

import engine.parts
from data.batches import Data
from engine.zero import REDUCERS
from extras.forks import int8
from run import checkpoint
from run.config import check
from tests.cover import named
from tests.harness import VOCAB, _train, close, config, equals_one_process, mesh_of
from tests.pool import pool
from tests.trainer import Trainer


def exact_pack(x):
    return x.view(torch.uint8).clone()


def exact_unpack(packed, dtype):
    return packed.view(dtype).clone()


@contextmanager
def hook():
    """What --int8 changes."""
    with patch.object(engine.parts, "REDUCERS", (int8.Int8DDP, *REDUCERS[1:])):
        yield


def forget(error, x, packed):
    pass


def forget_owned(error, x, packed, keep=int8.keep):
    if len(packed) > 1:
        keep(error, x, packed)


BUGS = {  # name: (attribute of int8, what a mistake would put there)
    "no error feedback": ("keep", forget),
    "the owner's error is forgotten": ("keep", forget_owned),
    "codes belong to other scales": ("keep", lambda error, x, packed: error.copy_(
        x - torch.cat([int8.unpack(part.flip(0), x.dtype) for part in packed]))),
    "chunks go to no other rank": ("all_to_all", lambda outputs, inputs, group: [
        out.copy_(own) for out, own in zip(outputs, inputs, strict=True)]),
    "sums come back from no other rank": ("all_gather", lambda chunks, group: chunks.copy_(
        chunks[group.rank].expand_as(chunks)))}


def _exact(rank, cfg, bug=None):
    with (hook(), patch.multiple(int8, pack=exact_pack, unpack=exact_unpack),
          patch.object(int8, *BUGS.get(bug, ("BLOCK", int8.BLOCK)))):
        return _train(rank, cfg)


@pytest.mark.parametrize("flags", [
    {"dp": 2}, {"dp": 3, "microbatches": 2}, {"dp": 4, "bucket_mb": 0.02},
    {"dp": 2, "tp": 2, "sp": True, "microbatches": 2}, {"dp": 2, "cp": 2, "n_embd": 36},
    {"dp": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 3},
    {"dp": 2, "ep": 2, "tp": 2, "experts": 4}, {"dp": 2, "pp": 2, "tp": 2, "microbatches": 2},
    {"dp": 2, "pp": 2, "tp": 2, "microbatches": 2, "fast": "ddp"}], ids=named)
def test_without_rounding_it_equals_one_process(corpus, flags):
    equals_one_process(corpus, _exact, **flags)


def _telescoped(rank, n, bug=None):
    """(sums of the steps' results, of this rank's tensors, of this rank's errors; bytes sent)"""
    mesh = mesh_of(config("", dp=4))
    group = mesh.group("dp")
    rng = torch.Generator().manual_seed(rank)
    errors = int8.Errors(torch.zeros(n, dtype=torch.double), group)
    results, given = torch.zeros(2, n, dtype=torch.double)
    with patch.object(int8, *BUGS.get(bug, ("BLOCK", int8.BLOCK))):
        for _ in range(5):
            x = torch.randn(n, dtype=torch.double, generator=rng).mul_(
                torch.logspace(-3, 0, n, dtype=torch.double))
            given += x
            results += int8.int8_all_reduce(x, group, errors)
    lost = errors.sent.clone()
    lost.view(4, -1)[rank] += errors.owned
    return results, given, lost[:n], group.bytes_sent


def telescopes(n, bug=None):
    got = pool(4, _telescoped, n, bug)
    want = sum(given for _, given, _, _ in got)
    lost = sum(error for *_, error, _ in got)
    for results, *_ in got:
        assert torch.equal(results, got[0][0]), "ranks have other bits"
        close(results + lost, want, "sums and errors")
    assert 1e-4 < (lost.norm() / want.norm()).item() < 0.02
    return [sent for *_, sent in got]


@pytest.mark.parametrize("n", [256, 1000, 4097])
def test_the_errors_telescope_and_the_bytes_are_the_formula(n):
    padded = n + -n % (4 * int8.BLOCK)
    assert telescopes(n) == [5 * 2 * 3 * padded // 4 * (int8.BLOCK + 4) // int8.BLOCK] * 4


@pytest.mark.parametrize("bug", BUGS)
def test_the_telescope_notices(bug):
    with pytest.raises(AssertionError, match="off by|other bits"):
        telescopes(1000, bug)


def test_blocks_of_zeros_and_of_extremes_come_back():
    x = torch.zeros(2 * int8.BLOCK, dtype=torch.double)
    x[: int8.BLOCK] = torch.linspace(-1e30, 1e30, int8.BLOCK)
    back = int8.unpack(int8.pack(x), x.dtype)
    assert back[int8.BLOCK :].eq(0).all() and (x - back).abs().max() <= 1e30 / 127 / 2 * 1.001


def _losses_of(rank, cfg, rounded):
    with hook() if rounded else patch.object(engine.parts, "REDUCERS", REDUCERS):
        return [step["loss"] for step in _train(rank, cfg, cfg.steps, kinds=())[1:]]


def test_the_loss_falls_as_without(learnable_corpus):
    """Within a tenth in each of the last steps; there it is less than a tenth of the first."""
    cfg = config(learnable_corpus, dp=2, steps=60, dtype="float32", microbatches=1, warmup_steps=5)
    with_int8, without = (pool(2, _losses_of, cfg, rounded)[0] for rounded in (True, False))
    assert without[-1] < without[0] / 10
    for a, b in zip(with_int8[-10:], without[-10:], strict=True):
        assert a != b and abs(a / b - 1) < 0.1, (with_int8, without)


def _refused(rank, cfg):
    with hook():
        trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
    norm, _ = trainer.gradients(Data(cfg).training(cfg, 0, trainer.mesh))
    trainer.update(norm, 1e-2)
    folder = checkpoint.save(trainer, 1)
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.load(trainer, folder)
    return str(error.value)


def test_resuming_is_refused_in_one_line(corpus, tmp_path):
    cfg = config(corpus, dp=2, microbatches=1, out=str(tmp_path))
    for line in pool(check(cfg, 1), _refused, cfg):
        assert line.endswith("has no rounding errors of --int8, because each data rank has "
                             "its own; --init-from takes its weights alone")
