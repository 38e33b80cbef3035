"""The plain forms, and plain.py, equal one process and the fast forms."""


import pytest
import torch

import collectives as c
import ddp
import pipeline
import plain
import schedules
import tensor_parallel
import train
import zero
from data.batches import Data
from engine.schedules import lower, make_schedule
from group import Group
from mesh import Mesh
from model import build
from run.config import Config, check
from shard import tag_whole
from show.demonstrations import NoReducer
from sizes import GPTConfig
from tests.harness import (
    STEPS,
    VOCAB,
    _train,
    close,
    config,
    equals_one_process,
    pool,
    reference,
    same_model,
    train_with,
)
from tests.test_collectives import _mesh_group


def _plain_layers(rank, cfg):
    def parallelize(model, group, sp, defer):
        tensor_parallel.plain_tensor_parallel(model, group)

    return train_with(rank, cfg, train, "parallelize", parallelize)


@pytest.mark.parametrize("flags", [{"tp": 3}, {"tp": 2, "pp": 2, "microbatches": 3}], ids=str)
def test_the_plain_tensor_parallel_layers_give_the_same(corpus, flags):
    equals_one_process(corpus, _plain_layers, **flags)


PAGES = [  # of plain.py: layouts, with sizes that do not divide
    {}, {"dp": 3}, {"tp": 2}, {"tp": 3, "dp": 2, "zero": 1}, {"pp": 2, "microbatches": 3},
    {"pp": 4, "microbatches": 2}, {"dp": 2, "pp": 3, "zero": 1, "microbatches": 9},
    {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "microbatches": 6}, {"dp": 4, "zero": 1, "tp": 2}]


def _plain_page(rank, cfg):
    return list(plain.training_steps(cfg, Mesh(dp=cfg.dp, pp=cfg.pp, tp=cfg.tp), Data(cfg)))


@pytest.mark.parametrize("flags", PAGES, ids=str)
def test_plain_py_equals_one_process_and_train_py(corpus, flags):
    """Losses and norms of three steps; the second and third depend on the steps before."""
    cfg = config(corpus, **flags)
    world = check(cfg, 1)
    want = reference(corpus, **same_model(cfg))
    pages, traces = pool(world, _plain_page, cfg), pool(world, _train, cfg, STEPS, None, ())
    for page, trace in zip(pages, traces, strict=True):
        for step, (loss, norm) in enumerate(page, 1):
            for other in (want[step], trace[step]):
                close(loss, other["loss"], "loss", 1e-12)
                close(norm, other["norm"], "norm", 1e-12)


def test_plain_py_has_train_pys_defaults():
    flags = {name: value for name, value in plain.FLAGS.items()
             if name not in ("dp", "microbatches", "steps")}
    assert flags == {name: getattr(Config(), name) for name in flags}


PLAIN_SHAPE = GPTConfig(VOCAB, block_size=8, n_layer=4, n_head=2, n_embd=12)


def _ids(n):
    return torch.randint(VOCAB, (n, 8), generator=torch.Generator().manual_seed(0))


def _plain_data_parallel(rank, world):
    group, ids = _mesh_group(world), _ids(2 * world)
    alone, mine = (build(PLAIN_SHAPE, dtype=torch.double) for _ in range(2))
    alone(ids, ids).backward()
    part = ids.chunk(world)[rank]
    mine(part, part).backward()
    ddp.plain_data_parallel(mine.parameters(), group)
    for p, q in zip(mine.parameters(), alone.parameters(), strict=True):
        close(p.grad, q.grad, "gradient")


def test_plain_data_parallelism_equals_one_process():
    pool(3, _plain_data_parallel, 3)


def _plain_zero(rank, world):
    """Three steps, the flat parameters padded so that they can be cut."""
    group, ids = _mesh_group(world), _ids(2 * world)
    alone, mine = (build(PLAIN_SHAPE, dtype=torch.double) for _ in range(2))
    whole = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1)
    flat = torch.nn.utils.parameters_to_vector(mine.parameters()).detach()
    length = len(flat)
    flat = torch.nn.functional.pad(flat, (0, -length % world))
    own = torch.nn.Parameter(c.own_chunk(flat, group))
    optimizer = torch.optim.AdamW([own], lr=0.01, weight_decay=0.1)

    def step(weights, grad):
        own.grad = grad
        optimizer.step()
        assert weights.data_ptr() == own.data_ptr()

    for _ in range(3):
        whole.zero_grad()
        (alone(ids, ids) / ids.numel()).backward()
        whole.step()
        mine.zero_grad()
        part = ids.chunk(world)[rank]
        (mine(part, part) / ids.numel()).backward()
        grad = torch.nn.utils.parameters_to_vector([p.grad for p in mine.parameters()])
        zero.plain_zero_step(flat, torch.nn.functional.pad(grad, (0, -length % world)), group, step)
        torch.nn.utils.vector_to_parameters(flat[:length], mine.parameters())
    for p, q in zip(mine.parameters(), alone.parameters(), strict=True):
        close(p.detach(), q.detach(), "weights")
    assert optimizer.state[own]["exp_avg"].numel() == -(-length // world)


def test_the_plain_zero_step_equals_adamw_on_everything():
    pool(3, _plain_zero, 3)


class _Adds(pipeline.Stage):
    """A stage before the last that has something to add to the loss."""

    def forward(self, x, targets):
        y, loss = super().forward(x, targets)
        return (y, y.square().sum()) if loss is None else (y, loss)


def _plain_pipeline(rank, P, m, name):
    """A pipeline's gradients against one process's; `name` plain, or a schedule whose stages all
    add to the loss."""
    mesh, rows = Mesh(pp=P), _ids(m).unsqueeze(1)
    group = mesh.group("pp")
    batches, tokens = [(ids, ids) for ids in rows], rows.numel()
    alone, mine = (build(PLAIN_SHAPE, dtype=torch.double) for _ in range(2))
    cuts = schedules.cut(PLAIN_SHAPE.layer_costs(), P)
    kind = pipeline.Stage if name == "plain" else _Adds
    total = 0.0
    for ids, targets in batches:
        x = ids
        for a, b in cuts:
            x, loss = kind(alone.layers[a:b])(x, targets)
            total = total + (0.0 if loss is None else loss / tokens)
    total.backward()
    a, b = cuts[rank]
    if name == "plain":
        loss = pipeline.plain_1f1b(kind(mine.layers[a:b]), group, batches, (1, 8, 12), tokens)
    else:
        deferred, where = pipeline.Deferred(), schedules.placement(name, P)
        tag_whole(mine, group)
        tensor_parallel.parallelize(mine, Group(mesh, "solo", [0], 0), defer=deferred.add)
        actions = lower(make_schedule(name, P, m), where)[rank]
        pipe = pipeline.Pipeline({rank: kind(mine.layers[a:b])}, where, group, (1, 8, 12),
                                 torch.double, NoReducer(), deferred)
        loss = pipe.execute(actions, batches, tokens).item()
    loss = c.all_reduce(torch.tensor(loss, dtype=torch.double), group)
    close(loss, total.detach(), "loss")
    for p, q in zip(mine.layers[a:b].parameters(), alone.layers[a:b].parameters(), strict=True):
        if p.size(0) != VOCAB:  # the ends of the tied embedding hold a term each
            close(p.grad, q.grad, "gradient")


@pytest.mark.parametrize("P,m,name", [(1, 2, "plain"), (3, 1, "plain"), (3, 7, "plain"),
                                      (3, 4, "1f1b"), (3, 4, "zb-h1")])
def test_plain_pipelines_and_stages_that_add_to_the_loss_equal_one_process(P, m, name):
    pool(P, _plain_pipeline, P, m, name)
