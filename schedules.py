"""Pipeline schedules: which rank runs which microbatch of which stage, in which order.

The model is cut into stages, P ranks have v stages each, and the batch is cut into m microbatches.
A forward takes the time F, a backward B = I + W: I for the gradient of the stage's input, W for the
gradients of its weights.

                 bubble              in flight
    gpipe        (P-1) / (m+P-1)     m                 arXiv 1811.06965
    1f1b         (P-1) / (m+P-1)     P                 arXiv 1806.03377
    interleaved  (P-1) / (vm+P-1)    P + (P-1)/v (a)   arXiv 2104.04473
    zb-h1        (P-1) / (3m+P-1)    P                 arXiv 2401.10241
    (a) a microbatch in one of the rank's v stages counts 1/v

Both columns hold for F = I = W and m >= 2P - 1. Bubble: the share of time that a rank is idle
between its first action and its last, on the rank for which that time is longest. In flight:
microbatches whose forward is done and whose backward is not, on the rank with the most of them,
which holds their activations.

make_lists lists each rank's Actions, which pipeline.py runs. tests/timeline.py checks such lists
and plays them against a clock:

    python -m extras.show schedules 1f1b 4 8
    python -m extras.show schedules 4 8
"""

from collections import Counter, deque
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

# A schedule's order is a function of P, m, v and the rank. It returns the rank's list of entries,
# of which make_lists makes the Actions that pipeline.py runs. If a rank has one stage, an entry is
# a kind:
#     "F"   forward
#     "B"   backward
#     "I"   half a backward: the gradient of the stage's input. The previous stage waits for it
#     "W"   the other half: the gradients of the matrices in attention and MLP. Only the optimizer
#           waits for them. (The gradient of the head's matrix is computed in F, by VocabularyLoss;
#           those of experts and of small weights come with I)
# If a rank has several stages, an entry is a pair: ("F", 0) is a forward of the rank's first
# stage, ("F", 1) of its second. A stage takes its microbatches in their order, forward and
# backward: its first "F" is the forward of microbatch 0, its second that of microbatch 1. In the
# examples below, as in `python -m extras.show schedules`, a digit is a microbatch: "F" "F" "B" "B"
# is F0 F1 B0 B1.


def gpipe(P, m, v, rank):
    """All forwards, then all backwards. In between, all m microbatches are in flight, and the rank
    holds the activations of each."""
    return ["F"] * m + ["B"] * m


def one_f_one_b(P, m, v, rank):
    """1F1B: run each backward as soon as it can run, and free its activations. The bubble is
    GPipe's, but the memory no longer grows with m.

    P = 4, rank 1, m = 4:   warm up F0 F1   steady F2 B0 F3 B1   cool down B2 B3"""
    num_warmup = min(P - 1 - rank, m)  # one forward for each later rank
    warm_up = ["F"] * num_warmup
    steady = ["F", "B"] * (m - num_warmup)
    cool_down = ["B"] * num_warmup
    return warm_up + steady + cool_down


def weave(forwards, backwards, num_warmup):
    """1F1B of any two lists: num_warmup forwards, then one forward and one backward in turn, then
    the backwards that are left. So num_warmup + 1 forwards come before the first backward."""
    entries = forwards[:num_warmup]
    steady = forwards[num_warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        entries += [forward, backward]
    return entries + backwards[len(steady) :]


def interleaved(P, m, v, rank):
    """1F1B with v stages per rank: the pipeline fills in 1/v of the time, for (v P - 1)/(P - 1)
    times the messages. P microbatches go through a rank's first stage, then the same P through its
    second, and so on; m is a multiple of P.

    P = 2, v = 2, m = 4 (0: the rank's first stage):
        stage of each forward    0 0 1 1 0 0 1 1
        stage of each backward   1 1 0 0 1 1 0 0"""
    forwards = [("F", i // P % v) for i in range(m * v)]
    backwards = [("B", v - 1 - i // P % v) for i in range(m * v)]
    # The first backward is of the rank's last stage. Before it run P forwards of each earlier
    # stage, and twice 1F1B's warm-up. If messages took no time, one warm-up would do. If they take
    # 0.1 F, a step with one is 7% longer than with two (simulated: P 4, v 2, m 16)
    num_warmup = (v - 1) * P + 2 * (P - 1 - rank)
    return weave(forwards, backwards, num_warmup)


def zero_bubble(P, m, v, rank):
    """1F1B with B split into I and W. I runs at once. W runs `lag` microbatches later, so `lag` Ws
    remain for the end, when the rank would idle. P = 4, m = 4 (..: idle):

        rank 0  F0 F1 F2 F3 .. .. .. I0 W0 I1 W1 I2 W2 I3 W3        num_warmup 3, lag 0
        rank 1  .. F0 F1 F2 .. .. I0 F3 I1 W0 I2 W1 I3 W2 W3                   2      1
        rank 2  .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 I3 W1 W2 W3                   1      2
        rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3                   0      3"""
    num_warmup = min(P - 1 - rank, m)
    lag = min(rank, m)
    entries = ["F"] * num_warmup
    for k in range(m):
        if num_warmup + k < m:
            entries.append("F")
        entries.append("I")
        if k >= lag:
            entries.append("W")
    return entries + ["W"] * lag


# ---- what each schedule declares ----


class Schedule(NamedTuple):
    """What a schedule declares. Other files ask these fields, and compare no names."""
    order: Callable  # order(P, m, v, rank): the rank's list of entries, as above
    stages_per_rank: int = 1
    in_rounds: bool = False  # microbatches go round in groups of P: m must be a multiple of P
    splits_backward: bool = False  # has I and W instead of B, at least for some microbatches


SCHEDULES = {
    "gpipe": Schedule(gpipe),
    "1f1b": Schedule(one_f_one_b),
    "interleaved": Schedule(interleaved, stages_per_rank=2, in_rounds=True),
    "zb-h1": Schedule(zero_bubble, splits_backward=True),
}


def placement(name, P):
    """The list `where`: where[s] is the rank of stage s. P = 3: 0 1 2; with two stages per rank
    0 1 2 0 1 2."""
    return [s % P for s in range(P * SCHEDULES[name].stages_per_rank)]


def cut(layer_costs, n):
    """Cut the layers into n stages, [(start, stop)], none empty, with the costliest as cheap as
    possible, because it sets the pace. The stages before the last are cut by the same rule:
    cut([0, 5, 5, 5, 5, 20], 3) is [(0, 3), (3, 5), (5, 6)], not [(0, 2), (2, 5), (5, 6)].

    Dynamic programming: the best cut of the first `stop` layers into `count` stages is a last stage
    [start, stop) after the best cut of the first `start` layers into count - 1. cut([1, 1, 2], 2):

        best         stop = 1      stop = 2                 stop = 3
        count = 1    1: [(0, 1)]   2: [(0, 2)]              4: [(0, 3)]
        count = 2                  1: [(0, 1), (1, 2)]      2: [(0, 2), (2, 3)]

    A number is the cost of the costliest stage."""
    total = [0, *accumulate(layer_costs)]  # total[i]: cost of the first i layers
    num_layers = len(layer_costs)
    best = {stop: (total[stop], [(0, stop)]) for stop in range(1, num_layers + 1)}  # count = 1
    for count in range(2, n + 1):
        shorter = best
        best = {}
        for stop in range(count, num_layers + 1):
            candidates = []
            for start in reversed(range(count - 1, stop)):
                costliest, stages = shorter[start]
                last = total[stop] - total[start]
                candidates.append((max(costliest, last), [*stages, (start, stop)]))
                if last > costliest:
                    break  # with an earlier start the last stage costs no less
            best[stop] = min(candidates)  # the cheapest or, on a tie, with shorter first stages
    _, stages = best[num_layers]
    return stages


# ---- the lists as pipeline.py runs them ----


class Action(NamedTuple):
    """One entry of a rank's list: F, B, I or W (the top of this file) of a stage."""
    kind: str
    stage: int  # 0 .. P*v-1
    microbatch: int

    def __str__(self):
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


def make_lists(name, P, m):
    """One list of Actions per rank, for P ranks and m microbatches."""
    return [actions_of(name, P, m, rank) for rank in range(P)]


def actions_of(name, P, m, rank):
    """One rank's list. interleaved, P = 2, v = 2, rank 0, which has stages 0 and 2: the first
    ("F", 1) becomes F(stage 2, microbatch 0), the second F(stage 2, microbatch 1). "B" "I" "W" are
    B of microbatch 0, then I and W of microbatch 1: B and I count together, because each is a
    microbatch's backward, and W takes the oldest microbatch between I and W."""
    stages = [s for s, owner in enumerate(placement(name, P)) if owner == rank]
    count = Counter()  # count["F", s]: number of forwards of stage s so far
    waiting = {s: deque() for s in stages}  # stage -> microbatches between I and W
    actions = []
    schedule = SCHEDULES[name]
    for entry in schedule.order(P, m, schedule.stages_per_rank, rank):
        kind, number = entry if isinstance(entry, tuple) else (entry, 0)
        s = stages[number]
        if kind == "W" and waiting[s]:
            k = waiting[s].popleft()
        else:  # F, B, I (or a W without an I, which check_lists of tests/timeline.py refuses)
            counted = "B" if kind == "I" else kind
            k = count[counted, s]
            count[counted, s] += 1
        if kind == "I":
            waiting[s].append(k)
        actions.append(Action(kind, s, k))
    return actions


# Where a result goes from stage s: an activation to s + 1, a gradient to s - 1
SHIFT = {"activation": 1, "gradient": -1}


def message_name(action, where):
    """The name of the message that carries an action's result: (what, stage that needs it,
    microbatch). F(0, k) -> ("activation", 1, k); B(1, k) or I(1, k) -> ("gradient", 0, k). None for
    W, at the ends of the pipeline, and if that stage is on the same rank."""
    kind, s, k = action
    if kind == "W":
        return None
    what = "activation" if kind == "F" else "gradient"
    to = s + SHIFT[what]
    if not 0 <= to < len(where) or where[to] == where[s]:
        return None
    return what, to, k
