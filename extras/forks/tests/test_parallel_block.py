"""parallel_block.py equals one process, and sends half of what two halves of a block send."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest

import engine.parts
import experts
import model as model_file
import train
from data.batches import Data
from engine import tensor_parallel
from engine.sequence_parallel import Region, enter_region, leave_region
from extras.forks import parallel_block
from extras.forks.parallel_block import Inside, ParallelBlock, make_parallel, share_region
from tests.cover import named
from tests.harness import VOCAB, _train, config, equals_one_process, mesh_of
from tests.pool import pool


def kind_of(config):
    return lambda config: make_parallel(experts.kind_of(config)(config))


def parallelize(model, group, sp=False, defer=None):
    tensor_parallel.parallelize(model, group, sp, defer)
    share_region(model, group, sp)


@contextmanager
def hook():
    """What --parallel-block changes."""
    with (patch.object(train, "kind_of", kind_of),
          patch.object(engine.parts, "parallelize", parallelize)):
        yield


def build(shape, seed, dtype, kind):
    return model_file.build(shape, seed, dtype, kind_of(shape))


def biases_before_leaving(self, x):
    inputs = enter_region(self.ln_1(x), self.region)
    y = self.attn(inputs) + self.mlp(inputs) + sum(self.biases)
    return x + leave_region(y, self.region)


BUGS = {  # name: (owner, attribute, what a mistake would put there, a layout that shows it)
    "biases of rows count T times": (
        ParallelBlock, "forward", biases_before_leaving, {"tp": 2}),
    "rows leave the region, too": (
        Inside, "start_leave", Region.start_leave, {"tp": 2}),
    "the gradient of what entered is not summed": (
        parallel_block, "enter_region", lambda x, region: x, {"tp": 2}),
    "partial sums stay partial": (
        parallel_block, "leave_region", lambda y, region: y, {"tp": 2}),
    "with --sp all tokens are one rank's": (
        parallel_block, "Region", lambda group, sp: Region(group), {"tp": 2, "sp": True}),
    "the MLP follows the attention": (
        ParallelBlock, "forward", lambda self, x: x + self.attn(self.ln_1(x)) + self.mlp(
            self.ln_1(x + self.attn(self.ln_1(x)))), {})}


def _parallel(rank, cfg, bug=None):
    owner, name, wrong, _ = BUGS.get(bug, (parallel_block, "Block", model_file.Block, {}))
    with hook(), patch.object(owner, name, wrong):
        return _train(rank, cfg)


@pytest.mark.parametrize("flags", [
    {}, {"tp": 3, "dp": 2, "zero": 2}, {"tp": 2, "sp": True, "cp": 2, "recompute": True},
    {"pp": 2, "tp": 2, "schedule": "zb-h1", "microbatches": 2}, {"dp": 3, "zero": 3},
    {"tp": 2, "dp": 2, "sp": True, "zero": 3}, {"pp": 3, "microbatches": 4, "schedule": "zb-h2"},
    {"tp": 2, "arch": "llama", "n_kv_head": 6, "n_hidden": 37, "pad_vocab": 8},
    {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "microbatches": 2, "fast": "tp"}], ids=named)
def test_parallel_blocks_equal_one_process(corpus, flags):
    equals_one_process(corpus, _parallel, build=build, **flags)


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(corpus, bug):
    with pytest.raises((AssertionError, RuntimeError), match="off by|copies of|size|stack"):
        equals_one_process(corpus, _parallel, bug, build=build, **BUGS[bug][-1])


def _sent(rank, cfg, is_parallel):
    """Bytes that this rank sends to tensor ranks in forward and backward."""
    with hook() if is_parallel else patch.object(train, "kind_of", experts.kind_of):
        trainer = train.Trainer(cfg, mesh_of(cfg), VOCAB)
    group = trainer.mesh.group("tp")
    batches = Data(cfg).training(cfg, 0, trainer.mesh)
    before = group.bytes_sent
    trainer.pipeline.run(trainer.own(batches), trainer.reducer)
    return group.bytes_sent - before


@pytest.mark.parametrize("sp,fewer", [(False, 2 * 2), (True, (6 - 2) + (4 - 2))])
def test_a_block_sends_the_formula(corpus, sp, fewer):
    """Fewer: two all-reduces, of two passes each; under --sp four gathers and two scatters."""
    T = 3
    cfg = config(corpus, tp=T, sp=sp, microbatches=1, n_layer=2, block_size=9)
    usual, parallel = (sum(pool(T, _sent, cfg, is_parallel)) for is_parallel in (False, True))
    elements = cfg.batch_size * cfg.block_size * cfg.n_embd
    assert usual - parallel == 8 * cfg.n_layer * fewer * (T - 1) * elements
