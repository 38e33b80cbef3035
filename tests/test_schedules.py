"""Schedules keep their papers' promises; the pipeline runs their lists as they are simulated."""

import itertools
import weakref
from unittest.mock import patch

import numpy as np
import pytest
import torch

import schedules
import train
from data.batches import Data
from pipeline import Pipeline
from schedules import Action, lower, make_schedule, placement, simulate, validate
from tensor_parallel import product
from tests.harness import FULL, VOCAB, _train, close, config, equals_one_process
from tests.pool import pool

# ---- lists: no process is started ----


def _cases():
    for P, m in itertools.product((1, 2, 3, 4, 7, 16), (1, 2, 3, 8, 33, *[9, 64] * FULL)):
        for name, schedule in schedules.SCHEDULES.items():
            for v in (1, 2, 3, 4) if schedule.chunks == 0 else (schedule.chunks,):
                if m % P == 0 or not schedule.in_rounds:
                    yield name, P, m, v


def test_every_schedule_is_valid_and_cannot_deadlock_where_sends_block():
    for name, P, m, v in _cases():
        where = placement(name, P, v)
        validate(lower(make_schedule(name, P, m, v), where), where, m)


def test_weight_gradients_are_computed_in_the_order_of_the_input_gradients():
    """W of the oldest I comes first: its tensors have been held longest."""
    for name, P, m, v in _cases():
        for actions in make_schedule(name, P, m, v):
            for stage in {action.stage for action in actions}:
                order = [a.microbatch for a in actions if a.kind == "W" and a.stage == stage]
                assert order == sorted(order), (name, P, m, v)


def test_opposite_blocking_sends_are_rejected():
    A = Action
    lists = [[A("F", 0, 0), A("SF", 0, 0), A("F", 0, 1), A("SF", 0, 1), A("RB", 0, 0), A("B", 0, 0),
              A("RB", 0, 1), A("B", 0, 1)],
             [A("RF", 1, 0), A("F", 1, 0), A("B", 1, 0), A("SB", 1, 0), A("RF", 1, 1), A("F", 1, 1),
              A("B", 1, 1), A("SB", 1, 1)]]
    with pytest.raises(ValueError, match="deadlock: rank 0 at SF"):
        validate(lists, [0, 1])


def test_damaged_lists_are_rejected():
    """An action is missing, or doubled, or a backward comes before its own forward."""
    rng = np.random.default_rng(0)
    for name, P, m, v in [("1f1b", 4, 6, 1), ("gpipe", 3, 4, 1), ("zb-h1", 3, 5, 1),
                          ("interleaved", 2, 4, 2)]:
        where = placement(name, P, v)
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
                else:
                    i = next(j for j, a in enumerate(actions) if a.kind in "BI")
                    j = actions.index(Action("F", *actions[i][1:]))
                    actions[i], actions[j] = actions[j], actions[i]
                with pytest.raises(ValueError, match="missing|doubled|misordered|deadlock"):
                    validate(lists, where)


@pytest.mark.parametrize("args,says", [
    (("1f2b", 2, 4), "--schedule 1f2b is unknown; try gpipe, 1f1b"),
    (("interleaved", 4, 6), "--microbatches 6 must be a multiple of --pp 4 for interleaved; try 4"),
    (("1f1b", 2, 4, 3), "--chunks 3 does not fit 1f1b; try --chunks 1"),
    (("gpipe", 0, 4), "--pp 0 must be at least 1"),
    (("gpipe", 2, 0), "--microbatches 0 must be at least 1")], ids=str)
def test_lists_that_do_not_exist_are_refused_in_one_line(args, says):
    with pytest.raises(ValueError) as error:
        make_schedule(*args)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


@pytest.mark.parametrize("P,m,v", [(2, 8, 2), (4, 8, 2), (4, 12, 3), (8, 16, 4)])
def test_schedules_have_the_published_bubble_and_memory(P, m, v):
    """For F = I = W: the table of schedules.py, said again. A fork's own schedule has no formula.
    In flight are chunks: a rank of interleaved has v of each microbatch."""
    want = {"gpipe": ((P - 1) / (m + P - 1), m), "1f1b": ((P - 1) / (m + P - 1), P),
            "interleaved": ((P - 1) / (v * m + P - 1), v * P + P - 1),
            "zb-h1": ((P - 1) / (3 * m + P - 1), P)}
    for name, (bubble, most) in want.items():
        chunks = v if name == "interleaved" else 1
        timeline = simulate(make_schedule(name, P, m, chunks), placement(name, P, chunks))
        close(timeline.bubble, bubble, f"bubble of {name}", 1e-15)
        assert max(timeline.peak_in_flight) == most, name


@pytest.mark.parametrize("P,m", [*itertools.product((2, 4, 8), (1, 3, 8, 33))])
def test_each_rank_of_gpipe_and_1f1b_holds_the_published_number_of_microbatches(P, m):
    for name, peaks in (("gpipe", [m] * P), ("1f1b", [min(P - r, m) for r in range(P)])):
        timeline = simulate(make_schedule(name, P, m), placement(name, P))
        assert timeline.bubble == (P - 1) / (m + P - 1)
        assert timeline.peak_in_flight == peaks


@pytest.mark.parametrize("P,m,costs,rates", [  # Zero Bubble, arXiv 2401.10241, tables 5 and 9
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397))])
def test_the_simulator_reproduces_the_published_bubble_rates(P, m, costs, rates):
    for name, rate in zip(("1f1b", "zb-h1"), rates, strict=True):
        timeline = simulate(make_schedule(name, P, m), placement(name, P), costs)
        assert round(timeline.bubble, 4) == rate


# ---- the pipeline runs the lists ----


def _trainer(cfg):
    """(a Trainer; the batches of its first step)"""
    mesh = train.make_mesh(cfg, cfg.device)
    return train.Trainer(cfg, mesh, VOCAB), Data(cfg).training(cfg, 0, mesh)


def _live(rank, cfg):
    """(most microbatches whose activations live at once, as executed; as simulated; peak bytes)"""
    trainer, batches = _trainer(cfg)
    live, most = weakref.WeakSet(), 0

    def count(module, args):
        nonlocal most
        live.add(args[0])  # saved for the weight gradient
        most = max(most, len(live))

    for layers in trainer.pipeline.stages.values():
        block = next(layer for layer in layers if hasattr(layer, "mlp"))
        block.mlp.c_fc.register_forward_pre_hook(count)
    trainer.step(batches, 0.0)
    simulated = simulate(trainer.pipeline.lists, trainer.where).peak_in_flight
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        trainer.step(batches, 0.0)
    memory = [e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]"]
    return most, simulated[trainer.pipeline.group.rank], max(itertools.accumulate(memory))


@pytest.mark.parametrize("schedule", list(schedules.SCHEDULES))
def test_the_executed_pipeline_holds_as_many_microbatches_as_the_simulated(corpus, schedule):
    chunks = schedules.chunks_of(schedule)
    cfg = config(corpus, pp=3, schedule=schedule, chunks=chunks, microbatches=9, n_layer=6)
    for most, simulated, _ in pool(3, _live, cfg):
        assert most == simulated


def test_activations_of_1f1b_are_flat_in_m_and_those_of_gpipe_grow(corpus):
    peak = {}
    for schedule, m in itertools.product(("gpipe", "1f1b"), (4, 12)):
        cfg = config(corpus, pp=2, schedule=schedule, microbatches=m, batch_size=8 * m,
                     block_size=64)
        peak[schedule, m] = pool(2, _live, cfg)[0][2]
    assert peak["1f1b", 12] < 1.15 * peak["1f1b", 4]
    assert peak["gpipe", 12] > 2.5 * peak["gpipe", 4]


# ---- I and W: a backward cut in two ----


def _halves(rank, cfg):
    """What this rank's stage does in a step of a split backward: (what, microbatch, did a gradient
    of its matrices change since the last entry)."""
    trainer, batches = _trainer(cfg)
    pipe = trainer.pipeline
    matrices = [getattr(getattr(layer, part), name).weight
                for layer in pipe.stages[pipe.group.rank] if hasattr(layer, "mlp")
                for part, name in (("attn", "c_attn"), ("attn", "c_proj"), ("mlp", "c_fc"),
                                   ("mlp", "c_proj"))]
    events, before = [], [torch.zeros_like(matrix) for matrix in matrices]

    def note(what, k):
        nonlocal before
        now = [torch.zeros_like(m) if m.grad is None else m.grad.clone() for m in matrices]
        same = [*map(torch.equal, before, now)]
        assert len({*same}) == 1  # all of the stage's matrices or none
        before = now
        events.append((what, k, not same[0]))

    pass_on, add = pipe.pass_on, pipe.add_weight_gradients

    def note_sent(data, stage, k, tensor):
        if data == "B":
            note("send", k)
        pass_on(data, stage, k, tensor)

    def note_added(stage, k):
        note("I", k)  # of an earlier or of this microbatch: no matrix has changed
        add(stage, k)
        note("W", k)

    pipe.pass_on, pipe.add_weight_gradients = note_sent, note_added
    trainer.step(batches, 0.0)
    return events


def test_the_inputs_gradient_leaves_before_the_gradients_of_weights_are_computed(corpus):
    """zb-h1: no gradient of a matrix changes outside of W, and every W changes all of its stage's;
    each microbatch's gradient is sent before its W."""
    m = 4
    for rank, events in enumerate(pool(3, _halves, config(corpus, pp=3, schedule="zb-h1",
                                                          microbatches=m))):
        order = [(what, k) for what, k, _ in events]
        assert [changed for what, _, changed in events] == [what == "W" for what, _, _ in events]
        assert [k for what, k in order if what == "W"] == [*range(m)]
        assert [k for what, k in order if what == "send"] == [*range(m)] * (rank > 0)
        for k in range(m if rank > 0 else 0):
            assert order.index(("send", k)) < order.index(("W", k))
    # The last rank's W comes two microbatches late
    assert order.index(("send", 2)) < order.index(("W", 0))


@pytest.mark.parametrize("before", [0.0, 1.0])
def test_a_matrix_used_twice_gets_both_products_once(before):
    """x @ w @ w, for two microbatches, on top of what the gradient was before: as autograd adds."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 4, dtype=torch.double, generator=generator) for n in (3, 4))
    w.requires_grad_()
    pipe = object.__new__(Pipeline)
    results = []
    for split in (False, True):
        w.grad = torch.full_like(w, before) if before else None
        pipe.weight_work = {}
        for k in range(2):
            deferred = [] if split else None
            y = product(product((x + k).requires_grad_(), w, deferred), w, deferred)
            at_first = None if w.grad is None else w.grad.clone()
            y.square().sum().backward()
            if split:
                assert len(deferred) == 2
                assert w.grad is None if at_first is None else torch.equal(w.grad, at_first)
                pipe.weight_work[0, k] = deferred
                pipe.add_weight_gradients(0, k)
                assert not pipe.weight_work
        results.append(w.grad)
    close(results[1], results[0], "gradient of x @ w @ w", 1e-14)


def test_no_gradient_of_a_frozen_matrix_is_computed():
    frozen = torch.ones(2, 3)
    x = torch.ones(4, 3, requires_grad=True)
    deferred = []
    product(x, frozen, deferred).sum().backward()
    assert deferred == [] and x.grad is not None


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zb_h1_with_replicas_equals_one_process(corpus, zero):
    """The gradients of matrices come after backward's hooks have run."""
    equals_one_process(corpus, dp=2, pp=2, schedule="zb-h1", microbatches=3, zero=zero)


# ---- schedules of a fork's own ----


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


def _ahead(P, m, v, rank):
    """All forwards of the first chunk, then one forward and one backward of the second in turn.
    Two ranks, which have stages 0 2 and 1 3: rank 1 sends all activations for stage 2 before the
    first gradient. Rank 0 waits for that gradient when it has needed one of the activations; rank 1
    likewise."""
    return ["Fa"] * m + ["Fb", "Bb"] * m + ["Ba"] * m


OWN = {"mixed": schedules.Schedule(_every_other), "ahead": schedules.Schedule(_ahead, chunks=2)}


@pytest.fixture
def own():
    """Schedules that a fork adds."""
    with patch.dict(schedules.SCHEDULES, OWN):
        yield
    schedules.splits_backward.cache_clear()


def _of_own(rank, function, *args):
    with patch.dict(schedules.SCHEDULES, OWN):
        try:
            return function(rank, *args)
        finally:
            schedules.splits_backward.cache_clear()


def test_a_chunk_may_have_whole_and_split_backwards(own):
    lists, where = make_schedule("mixed", 2, 4), placement("mixed", 2)
    validate(lower(lists, where), where)
    assert schedules.splits_backward("mixed") and not schedules.splits_backward("1f1b")
    assert [a.kind + str(a.microbatch) for a in lists[1]] == [
        "F0", "B0", "F1", "I1", "F2", "W1", "B2", "F3", "I3", "W3"]


def _train_own(rank, cfg):
    return _of_own(rank, _train, cfg)


@pytest.mark.parametrize("flags", [
    {"schedule": "mixed", "pp": 3, "dp": 2, "microbatches": 3, "zero": 2},
    {"schedule": "mixed", "tp": 2, "dp": 2, "microbatches": 3, "zero": 1},
    {"schedule": "ahead", "pp": 2, "chunks": 2, "dp": 2, "microbatches": 3}], ids=str)
def test_a_schedule_of_a_forks_own_runs_and_equals_one_process(corpus, own, flags):
    equals_one_process(corpus, _train_own, **flags)


def _messages(rank, cfg):
    """(tensors that this rank sends in a step, to each rank, in order; those that it takes out of
    messages, from each rank, in order of arrival; most tensors that were kept for later). A tensor
    is (data, stage that needs it, microbatch)."""
    trainer, batches = _trainer(cfg)
    pipe = trainer.pipeline
    sent, came, most = {}, {}, 0
    pass_on, take, recv = pipe.pass_on, pipe.take, pipe.group.recv

    def note_sent(data, stage, k, tensor):
        to = stage + schedules.DIRECTION[data]
        sent.setdefault(pipe.where[to], []).append((data, to, k))
        pass_on(data, stage, k, tensor)

    def note_came(tensor, source):
        came.setdefault(source, []).append(pipe.incoming[source][0])
        return recv(tensor, source)

    def note_kept(data, stage, k):
        nonlocal most
        tensor = take(data, stage, k)
        most = max(most, len(pipe.arrived))
        return tensor

    pipe.pass_on, pipe.take, pipe.group.recv = note_sent, note_kept, note_came
    trainer.step(batches, 0.0)
    assert not pipe.arrived and not pipe.in_flight and not pipe.weight_work and not pipe.sends
    return sent, came, most


@pytest.mark.parametrize("flags", [
    {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4},
    {"pp": 3, "schedule": "zb-h1", "microbatches": 6},
    {"pp": 2, "schedule": "ahead", "chunks": 2, "microbatches": 3}], ids=str)
def test_messages_come_in_the_senders_order_and_what_is_not_needed_yet_is_kept(corpus, own, flags):
    """Messages have no names: the receiver reads their names from the sender's list."""
    cfg = config(corpus, **flags)
    got = pool(cfg.pp, _of_own, _messages, cfg)
    for (sender, (sent, _, _)), (receiver, (_, came, _)) in itertools.permutations(
            enumerate(got), 2):
        assert came.get(sender) == sent.get(receiver)
    boundaries = cfg.pp * cfg.chunks - 1
    total = sum(len(names) for _, came, _ in got for names in came.values())
    assert total == 2 * boundaries * cfg.microbatches
    most = [2, 2] if cfg.schedule == "ahead" else [0] * cfg.pp
    assert [kept for _, _, kept in got] == most
