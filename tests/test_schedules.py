"""Schedules: valid, with published bubbles and memory; executed as simulated."""

import itertools
import weakref
from unittest.mock import patch

import numpy as np
import pytest
import torch

import engine.pipeline as pipeline
import engine.tensor_parallel as tensor_parallel
import schedules
from data.batches import Data
from engine.group import Group
from engine.mesh import Mesh
from engine.sequence_parallel import Region
from schedules import Action, lower, make_schedule, simulate, validate
from tests.harness import (
    FULL,
    VOCAB,
    _train,
    close,
    config,
    equals_one_process,
    mesh_of,
    pool,
)
from tests.trainer import Trainer

# ---- schedules: pure lists ----


def _cases():
    for P, m in itertools.product((1, 2, 3, 4, 7, 16), (1, 2, 3, 8, 33, *[9, 64] * FULL)):
        for name, schedule in schedules.SCHEDULES.items():
            for v in (1, 2, 3, 4) if schedule.chunks == 0 else (schedule.chunks,):
                if m % P == 0 or not schedule.in_rounds:
                    yield name, P, m, v


def test_every_schedule_is_valid_and_deadlock_free_under_rendezvous():
    for name, P, m, v in _cases():
        lists, where = make_schedule(name, P, m, v), schedules.placement(name, P, v)
        validate(lower(lists, where), where)


def test_weight_gradients_are_computed_in_the_order_of_the_input_gradients():
    """W of the oldest I comes first: its tensors have been held longest."""
    for name, P, m, v in _cases():
        for actions in make_schedule(name, P, m, v):
            for stage in {action.stage for action in actions}:
                order = [a.microbatch for a in actions if a.kind == "W" and a.stage == stage]
                assert order == sorted(order), (name, P, m, v)


def test_validation_rejects_damaged_lists():
    rng = np.random.default_rng(0)
    for name, P, m, v in [("1f1b", 4, 6, 1), ("gpipe", 3, 4, 1), ("zb-h1", 3, 5, 1),
                          ("interleaved", 2, 4, 2), ("zb-v", 3, 6, 1)]:
        where = schedules.placement(name, P, v)
        for lowered in (False, True):
            whole = make_schedule(name, P, m, v)
            whole = lower(whole, where) if lowered else whole
            for _ in range(40):
                lists = [list(actions) for actions in whole]
                actions = lists[rng.integers(P)]
                i = int(rng.integers(len(actions)))
                kind = rng.integers(3)
                if kind == 0:
                    del actions[i]
                elif kind == 1:
                    actions.insert(int(rng.integers(len(actions))), actions[i])
                else:  # a backward before its own forward
                    i = next(j for j, a in enumerate(actions) if a.kind in "BI")
                    j = actions.index(Action("F", *actions[i][1:]))
                    actions[i], actions[j] = actions[j], actions[i]
                with pytest.raises(ValueError, match="missing|doubled|misordered|deadlock"):
                    validate(lists, where)


def test_opposite_blocking_sends_are_rejected():
    A = Action
    lists = [[A("F", 0, 0), A("SF", 0, 0), A("F", 0, 1), A("SF", 0, 1), A("RB", 0, 0), A("B", 0, 0),
              A("RB", 0, 1), A("B", 0, 1)],
             [A("RF", 1, 0), A("F", 1, 0), A("B", 1, 0), A("SB", 1, 0), A("RF", 1, 1), A("F", 1, 1),
              A("B", 1, 1), A("SB", 1, 1)]]
    with pytest.raises(ValueError, match="deadlock: rank 0 at SF"):
        validate(lists, [0, 1])


@pytest.mark.parametrize("P", [2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 16, 33])
def test_gpipe_and_1f1b_have_the_published_bubble_and_peak(P, m):
    for name, peaks in (("gpipe", [m] * P), ("1f1b", [min(P - r, m) for r in range(P)])):
        lists, where = make_schedule(name, P, m), schedules.placement(name, P)
        timeline = simulate(lists, where)
        assert timeline.bubble == (P - 1) / (m + P - 1)
        assert timeline.peak_in_flight == peaks


@pytest.mark.parametrize("P,m,costs,rates", [  # Zero Bubble, arXiv 2401.10241, tables 5 and 9
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672))])
def test_simulator_reproduces_the_published_bubble_rates(P, m, costs, rates):
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates, strict=True):
        lists, where = make_schedule(name, P, m), schedules.placement(name, P)
        assert round(simulate(lists, where, costs).bubble, 4) == rate


def _live(rank, cfg):
    """(most microbatches whose activations live at once, as executed; as simulated; peak bytes)"""
    mesh = mesh_of(cfg)
    trainer, data = Trainer(cfg, mesh, VOCAB), Data(cfg)
    batches, live, most = data.training(cfg, 0, mesh), weakref.WeakSet(), 0

    def count(module, args):
        nonlocal most
        live.add(args[0])  # saved for the weight gradient
        most = max(most, len(live))

    for stage in trainer.pipeline.stages.values():
        block = next(layer for layer in stage.layers if hasattr(layer, "mlp"))
        block.mlp.c_fc.register_forward_pre_hook(count)
    trainer.gradients(batches)
    simulated = simulate(trainer.pipeline.lists, trainer.where).peak_in_flight
    simulated = simulated[mesh.group("pp").rank]
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        trainer.gradients(batches)
    memory = [e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]"]
    return most, simulated, max(itertools.accumulate(memory))


@pytest.mark.parametrize("schedule", list(schedules.SCHEDULES))
def test_the_executed_pipeline_holds_as_many_microbatches_as_the_simulated(corpus, schedule):
    chunks = schedules.chunks_of(schedule)
    cfg = config(corpus, pp=3, schedule=schedule, chunks=chunks, microbatches=9, n_layer=6)
    for most, simulated, _ in pool(3, _live, cfg):
        assert most == simulated


def _sent(rank, cfg):
    """(what is left of each tensor that was sent; most that a send found not yet freed)."""
    mesh = mesh_of(cfg)
    trainer, data = Trainer(cfg, mesh, VOCAB), Data(cfg)
    pp = mesh.group("pp")
    kept, held, send = [], [], pp.send

    def send_and_look(tensor, dst):
        held.append(sum(other.untyped_storage().nbytes() > 0 for other in kept))
        kept.append(tensor)
        return send(tensor, dst)

    pp.send = send_and_look
    trainer.gradients(data.training(cfg, 0, mesh))
    return [tensor.untyped_storage().nbytes() for tensor in kept], max(held)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_was_sent_is_freed(corpus, schedule):
    """... and while a rank sends, two tensors that it sent before are left at most."""
    got = pool(3, _sent, config(corpus, pp=3, schedule=schedule, microbatches=4, n_layer=6))
    assert [left for left, _ in got] == [[0] * 4, [0] * 8, [0] * 4]
    assert [most for _, most in got] == [2, 2, 2]


def test_activations_of_1f1b_are_flat_in_m_and_those_of_gpipe_grow(corpus):
    peak = {}
    for schedule, m in itertools.product(("gpipe", "1f1b"), (4, 12)):
        cfg = config(corpus, pp=2, schedule=schedule, microbatches=m, batch_size=8 * m,
                     block_size=64)
        peak[schedule, m] = pool(2, _live, cfg)[0][2]
    assert peak["1f1b", 12] < 1.15 * peak["1f1b", 4]
    assert peak["gpipe", 12] > 2.5 * peak["gpipe", 4]


def test_a_weight_used_twice_gets_both_gradients_when_they_are_deferred():
    solo, deferred = Group(Mesh(dp=1), "solo", [0], 0), pipeline.Deferred()
    x, w = torch.randn(3, 4, dtype=torch.double), torch.randn(4, 4, dtype=torch.double)
    w.requires_grad_()
    (x @ w.t() @ w.t()).square().sum().backward()
    want, w.grad = w.grad, None

    def linear(x):
        return tensor_parallel.ColumnLinear.apply(x, w, None, Region(solo), deferred.add)

    y = linear(linear(x.requires_grad_())).square().sum()
    with deferred.collect() as queue:
        y.backward()
    assert w.grad is None and len(queue) == 2
    with torch.no_grad():
        done = list(pipeline.finish_weights(queue))  # ready once, when both are in
    assert len(done) == 1 and done[0] is w
    close(w.grad, want, "gradient of x @ w @ w")


@pytest.mark.parametrize("P,m,v", [(2, 8, 1), (4, 8, 2), (4, 12, 3), (8, 16, 4)])
def test_schedules_have_the_published_bubble_and_memory(P, m, v):
    """Of the schedules of papers. One of a fork's own has no formula."""
    peak = {"gpipe": m, "1f1b": P, "interleaved": v * P + P - 1 if v > 1 else P, "zb-h1": P,
            "zb-h2": 2 * P - 1, "zb-v": 2 * P}
    assert peak.keys() == {name for name, one in schedules.SCHEDULES.items() if one.idle}
    for name, most in peak.items():
        chunks = schedules.chunks_of(name, v if name == "interleaved" else 0)
        lists = make_schedule(name, P, m, chunks)
        t = simulate(lists, schedules.placement(name, P, chunks))
        assert t.bubble == schedules.closed_form(name, P, m, chunks, (1, 1, 1, 0))
        assert max(t.peak_in_flight) == most
    for name, depth in (("zb-h1", 1), ("zb-h2", 2)):  # one more would fill the pipeline
        assert schedules.closed_form(name, P, depth * (P - 1), 1, (1, 1, 1, 0)) is None
    assert schedules.closed_form("interleaved", P, m, v, (1, 1, 1, 0)) == (P - 1) / (v * m + P - 1)


# ---- a schedule of one's own: some backwards whole, some in two parts ----


def _every_other(P, m, v, rank):
    """1F1B whose odd microbatches have I, and W one forward later."""
    num_warmup = min(P - 1 - rank, m)
    actions = ["F"] * num_warmup
    for k in range(m):
        if num_warmup + k < m:
            actions.append("F")
        if k % 2 == 0 and k > 0:
            actions.append("W")
        actions.append("I" if k % 2 else "B")
    return actions + ["W"] * (m % 2 == 0)


MIXED = {"mixed": schedules.Schedule(_every_other)}


def test_a_chunk_may_have_whole_and_split_backwards():
    with patch.dict(schedules.SCHEDULES, MIXED):
        lists, where = make_schedule("mixed", 2, 4), schedules.placement("mixed", 2)
        validate(lower(lists, where), where)
        assert schedules.splits_backward("mixed") and not schedules.splits_backward("1f1b")
        schedules.splits_backward.cache_clear()
    assert [str(a.kind) + str(a.microbatch) for a in lists[1]] == [
        "F0", "B0", "F1", "I1", "F2", "W1", "B2", "F3", "I3", "W3"]


def _mixed(rank, cfg):
    with patch.dict(schedules.SCHEDULES, MIXED):
        try:
            return _train(rank, cfg)
        finally:
            schedules.splits_backward.cache_clear()


@pytest.mark.parametrize("flags", [
    {"pp": 2, "microbatches": 4}, {"pp": 3, "dp": 2, "microbatches": 3, "zero": 2},
    {"tp": 2, "dp": 2, "microbatches": 3, "zero": 1}], ids=str)
def test_mixed_backwards_equal_one_process(corpus, flags):
    with patch.dict(schedules.SCHEDULES, MIXED):
        equals_one_process(corpus, _mixed, schedule="mixed", **flags)
    schedules.splits_backward.cache_clear()
