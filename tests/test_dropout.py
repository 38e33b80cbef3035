"""engine/dropout.py: every layout drops what one process drops; other steps, sequences and places
drop others; a resumed run goes on with its masks; validation drops nothing."""

import json
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from engine.dropout import Dropout
from model import build
from run.config import check
from sizes import GPTConfig
from tests.cover import named
from tests.harness import BATCH, VOCAB, _train, close, config, equals_one_process
from tests.runs import Run, flags

usual = Dropout.is_dropped
attach = Dropout.attach

BUGS = {  # name: (attribute of Dropout, what a mistake would put there, a layout that shows it)
    "each step has the masks of the first": (
        "is_dropped", lambda self, place, number, width: usual(self, place, number % BATCH, width),
        {}),
    "each microbatch has the masks of the first": (
        "is_dropped", lambda self, place, number, width: usual(
            self, place, number - self.first % BATCH, width), {"microbatches": 2}),
    "data ranks have the same masks": (
        "is_dropped", lambda self, place, number, width: usual(
            self, place, number - number % BATCH + number % (BATCH // 2), width), {"dp": 2}),
    "a block is recomputed with the masks of a later microbatch": (
        "again", lambda self: nullcontext(),
        {"pp": 2, "microbatches": 3, "recompute": True}),
    "ranks with other tokens take the masks of the first tokens": (
        "attach", lambda self, model, positions: attach(
            self, model, torch.arange(len(positions))), {"tp": 2, "sp": True}),
    "the others are not divided by 1 - rate": (
        "drop", lambda self, place, module, inputs, x: x.masked_fill(torch.stack(
            [usual(self, place, self.first + i, x.size(-1)) for i in range(len(x))]), 0.0),
        {"tp": 2}),
    "all layers have the same masks": (
        "is_dropped", lambda self, place, number, width: usual(self, "", number, width), {})}


def _dropping(rank, cfg, bug):
    name, wrong, _ = BUGS[bug]
    with patch.object(Dropout, name, wrong):
        return _train(rank, cfg)


@pytest.mark.parametrize("flags", [
    {}, {"dp": 3, "zero": 2, "microbatches": 2}, {"tp": 2, "pp": 3, "microbatches": 3},
    {"dp": 2, "tp": 2, "sp": True, "zero": 3}, {"tp": 2, "sp": True, "cp": 2, "recompute": True},
    {"pp": 2, "schedule": "zb-h1", "microbatches": 3, "recompute": True},
    {"dp": 2, "pp": 2, "schedule": "zb-v", "microbatches": 3, "zero": 1},
    {"dp": 2, "ep": 2, "tp": 2, "experts": 4, "zero": 1},
    {"cp": 2, "cp_attention": "all-to-all", "arch": "llama", "n_kv_head": 6, "n_hidden": 37}],
    ids=named)
def test_dropout_equals_one_process(corpus, flags):
    got, _ = equals_one_process(corpus, dropout=0.3, **flags)


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(corpus, bug):
    with pytest.raises(AssertionError, match="off by|copies of|clipping"):
        equals_one_process(corpus, _dropping, bug, dropout=0.3, **BUGS[bug][-1])


def test_masks_have_the_rate_and_are_independent():
    """Share of dropped elements, and of those that two masks both drop: within 4 deviations."""
    dropout, other = (Dropout(0.3, seed) for seed in (1, 2))
    for each in (dropout, other):
        each.block_size, each.positions, each.first = 100, torch.arange(100), 7
    mask = dropout.is_dropped("0 MLP", 7, 50)
    dropped = dropout.drop("0 MLP", None, (), torch.ones(2, 100, 50))
    assert torch.equal(dropped[0] == 0, mask)
    assert dropped.unique().tolist() == [0, pytest.approx(1 / 0.7)]
    assert abs(mask.double().mean() - 0.3) < 4 * (0.3 * 0.7 / 5000) ** 0.5
    for same in (dropout.is_dropped("0 MLP", 8, 50), dropout.is_dropped("1 MLP", 7, 50),
                 dropout.is_dropped("0 attention", 7, 50), other.is_dropped("0 MLP", 7, 50)):
        assert abs((mask & same).double().mean() - 0.09) < 4 * (0.09 * 0.91 / 5000) ** 0.5
    assert torch.equal(mask, dropout.is_dropped("0 MLP", 7, 50))


def test_it_drops_everywhere():
    """At the embedding and at both branches of each block: with rate near 1 nothing is left."""
    model = build(GPTConfig(VOCAB, 8, n_layer=2, n_head=2, n_embd=8))
    for param in model.parameters():  # no bias is 0, or a branch of nothing would be nothing
        param.data.add_(1.0)
    dropout = Dropout(1 - 1e-9, seed=0)
    dropout.attach(model, torch.arange(8))
    dropout.first = 0
    seen = []
    for module in (model.layers[0], *(part for block in model.layers[1:-1]
                                      for part in (block.attn, block.mlp))):
        module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(torch.zeros(3, 8, dtype=torch.long))
    assert len(seen) == 5 and not any(output.any() for output in seen)


def test_a_resumed_run_goes_on_with_its_masks_and_validation_drops_nothing(corpus, tmp_path):
    """In another layout. The validation loss is that of the same weights without --dropout."""
    log = tmp_path / "log"

    def run(size, **more):
        """What the log has: (loss, norm) of each step, and the last validation loss."""
        argv = flags(corpus, tmp_path / "out", **{"dropout": 0.2, "metrics": log, **more})
        started = Run(size, argv, tmp_path)
        assert started.wait() == [0] * size, started.read()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        log.unlink()
        validation = [line["val_loss"] for line in lines if "val_loss" in line]
        return [(r["loss"], r["grad_norm"]) for r in lines if "loss" in r], validation[-1:]

    whole, _ = run(1)
    run(2, tp=2, steps=2)
    resumed, validation = run(2, pp=2, microbatches=2, eval_interval=9,
                              resume=tmp_path / "out/step-00000002")
    close(torch.tensor(resumed), torch.tensor(whole[2:]), "losses and norms")
    _, alone = run(1, dropout=0.0, eval_interval=9, resume="auto")
    close(validation[0], alone[0], "validation loss")


def test_what_cannot_be_dropped_is_refused(corpus):
    for more, says in (({"compile": True}, "--compile cannot compile"),
                       ({"dropout": 1.0}, "dropout")):
        with pytest.raises(ValueError, match=says):
            check(config(corpus, **{"dropout": 0.1, **more}), 1)
