"""Schedules keep their papers' promises, cannot deadlock, and are what the pipeline runs."""

import itertools
import weakref
from unittest.mock import patch

import numpy as np
import pytest

from schedules import SCHEDULES, Schedule, cut, make_lists, placement
from test_all import differences
from tests.harness import TOLERANCE, close, flags_of, in_layout, make_trainer, ranks
from tests.timeline import check_lists, simulate

# ---- lists: no process is started ----

CASES = [(name, P, m)
         for name, schedule in SCHEDULES.items()
         for P, m in itertools.product((1, 2, 3, 4, 7, 16), (1, 2, 3, 8, 33))
         if m % P == 0 or not schedule.in_rounds]


def test_every_schedule_is_valid_and_comes_to_its_end():
    for name, P, m in CASES:
        check_lists(make_lists(name, P, m), placement(name, P), m)


@pytest.mark.parametrize("name", SCHEDULES)
def test_damaged_lists_are_rejected(name):
    """An action that is missing, that is there twice, or a backward before its own forward."""
    where = placement(name, 3)
    whole = make_lists(name, 3, 6)
    for rank, actions in enumerate(whole):
        for i, action in enumerate(actions):
            damaged = [actions[:i] + actions[i + 1 :], actions[:i] + [action] + actions[i:]]
            if action.kind in "BI":
                swapped = [*actions]
                j = actions.index(action._replace(kind="F"))
                swapped[i], swapped[j] = actions[j], action
                damaged.append(swapped)
            for each in damaged:
                with pytest.raises(ValueError, match="missing|doubled|deadlock"):
                    check_lists([*whole[:rank], each, *whole[rank + 1 :]], where, 6)


@pytest.mark.parametrize("P,m", [(2, 8), (4, 8), (4, 12), (8, 16)])
def test_bubbles_and_peaks_are_the_papers_closed_forms(P, m):
    """The table of schedules.py. In flight are pairs of a stage and a microbatch."""
    v = SCHEDULES["interleaved"].stages_per_rank
    table = {"gpipe": ((P - 1) / (m + P - 1), m),
             "1f1b": ((P - 1) / (m + P - 1), P),
             "interleaved": ((P - 1) / (v * m + P - 1), v * P + P - 1),
             "zb-h1": ((P - 1) / (3 * m + P - 1), P)}
    for name, (bubble, peak) in table.items():
        timeline = simulate(make_lists(name, P, m), placement(name, P))
        close(timeline.bubble, bubble, name)
        assert max(timeline.peak_in_flight) == peak, name


def test_each_rank_of_gpipe_holds_m_microbatches_and_of_1f1b_p_minus_rank():
    """Also where m is less than P."""
    for P, m in itertools.product((2, 4, 8), (1, 3, 8, 33)):
        for name, peaks in (("gpipe", [m] * P), ("1f1b", [min(P - r, m) for r in range(P)])):
            timeline = simulate(make_lists(name, P, m), placement(name, P))
            assert timeline.peak_in_flight == peaks


@pytest.mark.parametrize("P,m,costs,rates", [  # Zero Bubble, arXiv 2401.10241, tables 5 and 9
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397))])
def test_the_simulator_reproduces_the_published_bubble_rates(P, m, costs, rates):
    for name, rate in zip(("1f1b", "zb-h1"), rates, strict=True):
        timeline = simulate(make_lists(name, P, m), placement(name, P), costs)
        assert round(timeline.bubble, 4) == rate


def test_stages_are_cut_so_that_the_costliest_is_as_cheap_as_possible():
    """Against all cuts; and the stages before the last are cut by the same rule."""
    rng = np.random.default_rng(0)
    for layers, n in itertools.product((1, 3, 6, 9), (1, 2, 3, 5)):
        costs = [int(cost) for cost in rng.integers(0, 9, layers)]
        if n > layers:
            continue
        stages = cut(costs, n)
        for k in range(n, 0, -1):  # the first k stages
            stop = stages[k - 1][1]
            assert [begin for begin, _ in stages[:k]] == [0, *(end for _, end in stages[: k - 1])]
            assert all(begin < end for begin, end in stages)
            every = [itertools.pairwise((0, *inner, stop))
                     for inner in itertools.combinations(range(1, stop), k - 1)]
            cheapest = min(max(sum(costs[a:b]) for a, b in one) for one in every)
            assert max(sum(costs[a:b]) for a, b in stages[:k]) == cheapest
        assert stages[-1][1] == layers
    assert cut([0, 5, 5, 5, 5, 20], 3) == [(0, 3), (3, 5), (5, 6)]


# ---- the pipeline runs the lists ----


def as_executed(rank, cfg):
    """(most microbatches whose activations this rank holds at once; [(kind, microbatch, did it
    change the gradient of a matrix?)] of each backward, B or I, and each W)."""
    trainer, data = make_trainer(cfg)
    pipe = trainer.pipeline
    live = weakref.WeakSet()
    numbers, events = [], []

    def count(module, args):
        live.add(args[0])  # saved for the weight gradient
        numbers.append(len(live))

    for layers in pipe.stages.values():
        matrix = next(layer for layer in layers if hasattr(layer, "mlp")).mlp.c_fc
        matrix.register_forward_pre_hook(count)

    def size():
        return 0.0 if matrix.weight.grad is None else matrix.weight.grad.norm().item()

    def noted(kind, usual):
        def run(stage, k):
            before = size()
            usual(stage, k)
            events.append((kind, k, size() != before))

        return run

    pipe.backward = noted("I", pipe.backward)
    pipe.add_weight_gradients = noted("W", pipe.add_weight_gradients)
    trainer.step(data.training(cfg, 0, trainer.mesh), 1e-3)
    return max(numbers), events


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_pipeline_holds_what_the_simulator_says_and_i_leaves_matrices_to_w(corpus, name):
    words = f"--pp 3 --schedule {name} --microbatches 9 --n-layer 6"
    _, found = in_layout(words, corpus, as_executed)
    lists = make_lists(name, 3, 9)
    peaks = simulate(lists, placement(name, 3)).peak_in_flight
    for (most, events), peak, actions in zip(found, peaks, lists, strict=True):
        assert most == peak
        assert not SCHEDULES[name].splits_backward or events == [
            (a.kind, a.microbatch, a.kind == "W") for a in actions if a.kind != "F"]


# ---- a fork's own schedules ----


def mixed(P, m, v, rank):
    """1F1B whose odd microbatches have I, and W one forward later."""
    num_warmup = min(P - 1 - rank, m)
    entries = ["F"] * num_warmup
    for k in range(m):
        if num_warmup + k < m:
            entries.append("F")
        if k % 2 == 0 and k > 0:
            entries.append("W")
        entries.append("I" if k % 2 else "B")
    return entries + ["W"] * (m % 2 == 0)


def ahead(P, m, v, rank):
    """All forwards of the first stage, then one forward and one backward of the second in turn.
    Two ranks have stages 0 2 and 1 3: rank 1 sends all activations for stage 2 before its first
    gradient, and rank 0 needs that gradient when it has used only one of the activations."""
    return [("F", 0)] * m + [("F", 1), ("B", 1)] * m + [("B", 0)] * m


OWN = {"mixed": Schedule(mixed, splits_backward=True),
       "ahead": Schedule(ahead, stages_per_rank=2)}


def _own(rank, words, corpus, schedule):
    with patch.dict(SCHEDULES, OWN):
        return differences(rank, flags_of(words.split(), corpus, schedule=schedule))


@pytest.mark.parametrize("schedule,world,words", [
    ("mixed", 6, "--pp 3 --dp 2 --microbatches 3 --zero 2"),
    ("mixed", 4, "--tp 2 --dp 2 --microbatches 3 --zero 1"),
    ("ahead", 2, "--pp 2 --microbatches 3")])
def test_a_forks_schedule_runs_and_equals_one_process(corpus, schedule, world, words):
    """mixed: whole and split backwards of one stage."""
    for worst, _ in ranks(world, _own, words, corpus, schedule):
        assert (worst < TOLERANCE).all()
