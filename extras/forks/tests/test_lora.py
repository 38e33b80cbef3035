"""lora.py: adapters train like one process's in any layout; the rest stays as it was."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn

import experts
import model as model_file
import train
from data.batches import Data
from extras.forks import lora
from run import checkpoint, tensorfile
from run.config import check
from shard import tag_replicated
from sizes import GPTConfig
from tests.cover import named
from tests.harness import (
    VOCAB,
    _train,
    close,
    config,
    equals_one_process,
    local_tensors,
    mesh_of,
    reference,
    same_model,
)
from tests.pool import pool
from tests.trainer import Trainer

RANK = 4
SIZES = GPTConfig(VOCAB, 8, n_layer=2, n_head=2, n_embd=8)


def with_adapters(config):
    """experts.kind_of in the fork."""
    return lambda config: lora.add_adapters(experts.kind_of(config)(config), RANK)


@contextmanager
def hook():
    """What --lora changes."""
    def choose(cfg, usual=train.choose):
        parts = usual(cfg)
        lora.split_adapters(parts)
        return parts

    with (patch.multiple(train, kind_of=with_adapters, choose=choose,
                         initial_slices=lora.initial_slices),
          patch.object(lora, "usual", lambda config: config)):
        yield


def build_whole(shape, seed, dtype, kind):
    """The whole model of one process. B is not zero, so that A has a gradient."""
    model = lora.add_adapters(kind(shape), RANK).to(dtype)
    for name, param in model.canonical_parameters():
        param.data.copy_(model_file.initial_value(name, param.shape, shape, seed))
    return model


class OwnPart(nn.Module):
    """A Row without its sum."""

    def __init__(self, row):
        super().__init__()
        self.weight = row.weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def split_wrongly(linear, adapter, *parts, usual=lora.split_like):
    split = usual(linear, adapter, *parts)
    return split if parts else OwnPart(split)


BUGS = {  # name: (owner, attribute, what a mistake would put there, a layout that shows it)
    "B of a column takes rows of q, k and v as they come": (
        lora, "split_like", lambda linear, adapter, *parts, usual=lora.split_like: usual(
            linear, adapter), {"tp": 2}),
    "gradients of A are not summed over the tokens": (
        lora, "tag_replicated", lambda model, group, sum_gradients: tag_replicated(
            model, group, False), {"tp": 2, "sp": True}),
    "replicated halves count T times in the norm": (
        lora, "tag_replicated", lambda model, group, sum_gradients: None, {"tp": 2}),
    "the matrices are trained, too": (
        nn.Module, "requires_grad_", lambda module, on=True: module, {"dp": 2}),
    "A of a row is applied to a slice, and not summed": (
        lora, "split_like", split_wrongly, {"tp": 2, "fast": ""})}


def _lora(rank, cfg, bug=None):
    owner, name, wrong, _ = BUGS.get(bug, (lora, "ALPHA", lora.ALPHA, {}))
    with (hook(), patch.object(lora, "first_value", lambda draw, *args: draw(*args)),
          patch.object(owner, name, wrong)):
        return _train(rank, cfg)


LAYOUTS = [
    {}, {"dp": 3, "zero": 3, "microbatches": 2}, {"tp": 3, "pp": 2, "microbatches": 2},
    {"dp": 2, "tp": 2, "sp": True, "zero": 2}, {"tp": 2, "sp": True, "cp": 2, "recompute": True},
    {"tp": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 3},
    {"dp": 2, "pp": 2, "schedule": "zb-v", "microbatches": 3, "zero": 1},
    {"tp": 2, "arch": "llama", "n_kv_head": 6, "n_hidden": 37, "dp": 2, "zero": 1},
    {"schedule": "zb-h1", "microbatches": 2}, {"dp": 2, "tp": 2, "zero": 3, "fast": ""},
    {"tp": 3, "pp": 2, "microbatches": 2, "fast": ""},
    {"tp": 2, "sp": True, "cp": 2, "recompute": True, "fast": ""},
    {"tp": 2, "dp": 2, "zero": 2, "fast": "tp"}]


@pytest.mark.parametrize("flags", LAYOUTS, ids=named)
def test_lora_equals_one_process(corpus, flags):
    got, want = equals_one_process(corpus, _lora, build=build_whole, **flags)
    for name, value in want[0]["weights"].items():
        assert torch.equal(value, want[-1]["weights"][name]) != lora.is_adapter(name)


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(corpus, bug):
    with pytest.raises(AssertionError, match="off by|copies of|replicas|keys|rank"):
        equals_one_process(corpus, _lora, bug, build=build_whole, **BUGS[bug][-1])


def test_a_layer_with_an_adapter_is_the_layer_of_one_sum():
    """W + (ALPHA / RANK) B A in the place of W."""
    model = build_whole(SIZES, 0, torch.double, model_file.GPT)
    ids = torch.randint(VOCAB, (3, 8), generator=torch.Generator().manual_seed(0))
    want = model(ids)
    plain = model_file.build(SIZES, 0, torch.double)
    adapters = dict(model.named_modules())
    with torch.no_grad():
        for name, linear in plain.named_modules():
            if name.endswith(("c_attn", "c_fc", "c_proj")):
                a, b = (adapters[f"{name}.adapter_{which}"].weight for which in "ab")
                linear.weight += 8 / RANK * b @ a
    close(plain(ids), want, "logits")


def _from(rank, cfg):
    """(weights at the start, loss of the first step, names in optimizer.safetensors)"""
    with hook():
        trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
    weights = local_tensors(trainer, "weights")
    norm, read = trainer.gradients(Data(cfg).training(cfg, 0, trainer.mesh))
    trainer.update(norm, 1e-2)
    folder = checkpoint.save(trainer, 1)
    assert checkpoint.load(trainer, folder) == 1
    return weights, read()[0], list(tensorfile.read_header(folder / checkpoint.OPTIMIZER))


def _saved(rank, cfg):
    """A checkpoint of the usual model."""
    return checkpoint.save(Trainer(cfg, mesh_of(cfg), VOCAB), 0)


def test_adapters_start_from_a_file_without_them_and_change_no_loss(corpus, tmp_path):
    """B is 0, so the first loss is that of the file's model. Saved are states of adapters only."""
    folder, = pool(1, _saved, config(corpus, microbatches=1, out=str(tmp_path)))
    cfg = config(corpus, tp=2, microbatches=1, init_from=str(folder / checkpoint.MODEL), seed=1337,
                 out=str(tmp_path))
    want = reference(corpus, **same_model(cfg))[1]["loss"]
    for weights, loss, names in pool(2, _from, cfg):
        close(loss, want, "loss")
        for tag, value in weights:
            assert not tag.name.endswith("adapter_b.weight") or not value.any()
        assert names and all(lora.is_adapter(name.rpartition(".")[0]) for name in names)


def _sent(rank, cfg, adapted):
    """Bytes that this rank sends to tensor ranks in forward and backward of a step."""
    with hook() if adapted else nullcontext():
        trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
    group = trainer.mesh.group("tp")
    batches = Data(cfg).training(cfg, 0, trainer.mesh)
    before = group.bytes_sent
    trainer.pipeline.run(trainer.own(batches), trainer.reducer)
    return group.bytes_sent - before


@pytest.mark.parametrize("fast", ["", "all"])
def test_adapters_send_the_formula(corpus, fast):
    """An all-reduce of RANK elements per token for each matrix more; and one of C less, because
    nothing below the first block's column is trained."""
    T = 3
    cfg = config(corpus, tp=T, microbatches=1, n_layer=2, fast=fast)
    check(cfg, 1)
    usual, with_adapters = (sum(pool(T, _sent, cfg, adapted)) for adapted in (False, True))
    tokens = cfg.batch_size * cfg.block_size
    more = 4 * cfg.n_layer * RANK - cfg.n_embd
    assert with_adapters - usual == 8 * 2 * (T - 1) * tokens * more
