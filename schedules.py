"""Pipeline schedules: which rank runs which microbatch of which stage, in which order.

The model is cut into stages, P ranks have v stages each (a rank's chunks), and the batch is cut
into m microbatches. A forward takes the time F, a backward B = I + W: I for the gradient of the
stage's input, W for the gradients of its weights. The two columns hold for F = I = W and
m >= 2P - 1. "Bubble": take the rank that needs the longest from its first action to its last; the
bubble is the share of that time in which the rank idles. "In flight": microbatches whose forward
is done and whose backward is not, on the rank with the most of them, which holds their activations.

                 bubble                             in flight
    gpipe        (P-1) / (m+P-1)                    m                 arXiv 1811.06965
    1f1b         (P-1) / (m+P-1)                    P                 arXiv 1806.03377
    interleaved  (P-1) / (vm+P-1)                   P + (P-1)/v (1)   arXiv 2104.04473
    zb-h1        (P-1) / (3m+P-1)                   P                 arXiv 2401.10241
    zb-h2        0                                  2P - 1            arXiv 2401.10241
    zb-v         0                                  P (1)             arXiv 2401.10241
    (1) a microbatch in one of v chunks counts 1/v

    python schedules.py 1f1b 4 8        python schedules.py 4 8 --compare
"""

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

# A schedule is a function of P, m, v and the rank. It returns the rank's list of actions. "F1" is a
# forward of the rank's chunk 1; the first "F1" of a list is for microbatch 0, the second "F1" for
# microbatch 1, and so on. The letters:
#     F   forward
#     B   backward
#     I   half a backward: the gradient of the stage's input. The previous stage waits for it
#     W   the other half: the gradients of the stage's weights. Only the optimizer waits for them
# In quotes the digit is the chunk. Without quotes, as `python schedules.py` prints an action, it is
# the microbatch: F0 F1 B0 B1 are the actions "F0" "F0" "B0" "B0".


def gpipe(P, m, v, rank):
    """All forwards, then all backwards. In between, all m microbatches are in flight, and the rank
    holds the activations of each."""
    return ["F0"] * m + ["B0"] * m


def one_f_one_b(P, m, v, rank):
    """1F1B: run each backward as soon as it can run, and free its activations. The bubble is
    GPipe's, but the memory no longer grows with m.

    P = 4, rank 1, m = 4:   warm up F0 F1   steady F2 B0 F3 B1   cool down B2 B3"""
    num_warmup = min(P - 1 - rank, m)  # one forward for each later rank
    warm_up = ["F0"] * num_warmup
    steady = ["F0", "B0"] * (m - num_warmup)
    cool_down = ["B0"] * num_warmup
    return warm_up + steady + cool_down


def weave(forwards, backwards, num_warmup):
    """1F1B of any two lists: num_warmup forwards, then one forward and one backward in turn, then
    the backwards that are left. one_f_one_b is weave(["F0"] * m, ["B0"] * m, num_warmup)."""
    actions = forwards[:num_warmup]
    steady = forwards[num_warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(steady) :]


def interleaved(P, m, v, rank):
    """1F1B with v chunks per rank: the pipeline fills in 1/v of the time, for v times the messages.
    P microbatches go through chunk 0, then the same P through chunk 1, and so on; m is a multiple
    of P.

    P = 2, v = 2, m = 4:
        forwards  "F0" "F0" "F1" "F1" "F0" "F0" "F1" "F1"
        backwards "B1" "B1" "B0" "B0" "B1" "B1" "B0" "B0" """
    chunks = [i // P % v for i in range(m * v)]  # P = 2, v = 2, m = 4: 0 0 1 1 0 0 1 1
    forwards = [f"F{chunk}" for chunk in chunks]
    backwards = [f"B{v - 1 - chunk}" for chunk in chunks]
    if v == 1:
        return weave(forwards, backwards, P - 1 - rank)
    # A backward starts with the last chunk: first come P forwards of each chunk before the last ...
    num_warmup = (v - 1) * P
    # ... then twice 1F1B's warm-up. If messages took no time, 1F1B's own would do. If a message
    # takes 0.1 F, a step is 7% longer with 1F1B's own than with this (simulated, P 4, v 2, m 16)
    num_warmup += 2 * (P - 1 - rank)
    return weave(forwards, backwards, num_warmup)


def zero_bubble(depth, P, m, v, rank):
    """1F1B with B split into I and W. I runs at once. W runs `lag` microbatches later, so `lag` Ws
    are left for the end, when the rank would idle. depth: forwards of the warm-up for each later
    rank (1F1B: 1). zb-h1 is depth 1; P = 4, m = 4:

        rank 0  F0 F1 F2 F3 .. .. .. I0 W0 I1 W1 I2 W2 I3 W3        num_warmup 3, lag 0
        rank 1  .. F0 F1 F2 .. .. I0 F3 I1 W0 I2 W1 I3 W2 W3                   2      1
        rank 2  .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 I3 W1 W2 W3                   1      2
        rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3                   0      3

    zb-h2 is depth 2: more forwards fill the dots between a rank's actions. Those before its first
    action stay, so rank r ends r ticks after rank 0. Up to depth * (P-1) + 1 microbatches are
    in flight.

    Caveat of bubble 0 (zb-h2, zb-v): each rank is timed from its own first action to its own last.
    In train.py rank 0 then waits for the last rank, in the all-reduce of the gradients' norm.
    (The paper steps first and checks the norm later.)"""
    num_warmup = min(depth * (P - 1 - rank), m)
    lag = min(depth * rank, m)
    actions = ["F0"] * num_warmup
    for k in range(m):
        if num_warmup + k < m:
            actions.append("F0")
        actions.append("I0")
        if k >= lag:
            actions.append("W0")
    return actions + ["W0"] * lag


# ---- zb-v ----
# Two chunks per rank: stages 0 .. P-1 go down the ranks and P .. 2P-1 back up, a V. Rank 0 has the
# first and the last stage, so a microbatch's backward starts on the rank where its forward started.
# P = 3, m = 5, chunk 1 in lower case:
#
#     rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 I2 w4 I3 ...
#     rank 1  .. F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 I2 i4 I3 w3 ...
#     rank 2  .. .. F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 I2 i3 I3 i4 I4 ...


@cache
def zb_v_lists(P, m):
    """The lists of all ranks, played on a clock: F, I and W take one tick each. In each tick a
    rank runs, of the actions that can run, the first in this order:

        while it has forwards to run   "W1" "W0", to free memory; "F1" "F0", to use it; "I0" "I1"
        after its last forward         "I1" "I0", for which other ranks wait; "W1" "W0"

    A forward can run if there is memory: a rank holds at most 2P pairs of chunk and microbatch,
    from their F to their W, as much as P whole microbatches. (The paper, in its
    section 6, counts out a fixed pattern. This order and this limit come to the same bubble and the
    same memory.)"""
    last = 2 * P - 1  # the last stage
    done = Counter()  # done["F", s]: number of microbatches that have run F of stage s

    def waiting(kind, s):
        """The number of microbatches for which stage s could run this kind now. F needs the F of
        the stage before, I the I of the stage after, W the stage's own I."""
        if kind == "F":
            ready = done["F", s - 1] if s > 0 else m
        elif kind == "I":
            ready = done["I", s + 1] if s < last else done["F", s]
        else:
            ready = done["I", s]
        return ready - done[kind, s]

    def choose(rank):
        """(action, its stage): the rank's next, or None."""
        stages = [rank, last - rank]  # of its chunks 0 and 1
        held = sum(done["F", s] - done["W", s] for s in stages)
        has_forwards = done["F", stages[1]] < m
        for action in ("W1 W0 F1 F0 I0 I1" if has_forwards else "I1 I0 W1 W0").split():
            kind, s = action[0], stages[int(action[1])]
            if waiting(kind, s) and (kind != "F" or held < 2 * P):
                return action, s
        return None

    lists = [[] for _ in range(P)]
    while any(len(actions) < 6 * m for actions in lists):
        chosen = [choose(rank) for rank in range(P)]  # by what was done before this tick
        for actions, choice in zip(lists, chosen, strict=True):
            if choice:
                action, s = choice
                actions.append(action)
                done[action[0], s] += 1
    return lists


def zb_v(P, m, v, rank):
    """1F1B on a V of 2P stages, with I and W: no bubble, and the memory of P microbatches."""
    return zb_v_lists(P, m)[rank]


# ---- what each schedule declares ----


def in_turn(P, v):
    """The rank of each stage. P = 3: 0 1 2; with two chunks 0 1 2 0 1 2."""
    return [s % P for s in range(P * v)]


def v_shape(P, v):
    """The rank of each stage. P = 3: 0 1 2 2 1 0."""
    return [*range(P), *reversed(range(P))]


class Schedule(NamedTuple):
    """What a schedule declares. Other files ask these fields, and compare no names."""
    actions: Callable  # actions(P, m, v, rank): the rank's list, as above
    chunks: int = 1  # stages per rank; 0: as many as --chunks asks for
    place: Callable = in_turn  # place(P, v): the list `where`; where[s] is the rank of stage s
    in_rounds: bool = False  # microbatches go round in groups of P: m must be a multiple of P
    grows: bool = False  # microbatches in flight grow with m, not only with P


SCHEDULES = {
    "gpipe": Schedule(gpipe, grows=True),
    "1f1b": Schedule(one_f_one_b),
    "interleaved": Schedule(interleaved, chunks=0, in_rounds=True),
    "zb-h1": Schedule(partial(zero_bubble, 1)),
    "zb-h2": Schedule(partial(zero_bubble, 2)),
    "zb-v": Schedule(zb_v, chunks=2, place=v_shape),
}


def chunks_of(name, asked=0):
    """Returns v, the number of stages per rank. asked: the value of --chunks; 0: the flag was not
    given. If the schedule has a fixed number, asked may be that number, too, or 1, the default of a
    planner's Layout. If the number is free (interleaved), 0 gives 2. Raises a ValueError of one
    line for an unknown schedule, and for any other number."""
    if name not in SCHEDULES:
        raise ValueError(f"--schedule {name} is unknown; try {', '.join(SCHEDULES)}")
    if asked < 0:
        raise ValueError(f"--chunks {asked} must be at least 1")
    chunks = SCHEDULES[name].chunks
    if chunks == 0:
        return asked or 2
    if asked not in (0, 1, chunks):
        raise ValueError(f"--chunks {asked} does not fit {name}; try --chunks {chunks}")
    return chunks


def placement(name, P, v=1):
    """The list `where`: where[s] is the rank of stage s."""
    return SCHEDULES[name].place(P, v)


@cache
def splits_backward(name):
    """Does the schedule run I and W instead of B, at least for some microbatches? The lists of four
    microbatches on two ranks tell."""
    v = SCHEDULES[name].chunks or 1
    return any(action[0] == "W" for rank in range(2)
               for action in SCHEDULES[name].actions(2, 4, v, rank))


def is_plain(name):
    """Has each rank one stage, whose backwards are whole? pipeline.py runs such schedules."""
    return SCHEDULES[name].chunks == 1 and not splits_backward(name)


def cut(costs, n):
    """Cut the layers into n stages, [(start, stop)], none empty, with the costliest as cheap as
    possible: it sets the pace. The stages before the last are cut by the same rule, so of several
    cuts with a costliest of 20, cut([0, 5, 5, 5, 5, 20], 3) is [(0, 3), (3, 5), (5, 6)]."""
    total = [0, *accumulate(costs)]  # total[i]: cost of the first i layers
    layers = len(costs)

    def add_stage(shorter, stop, k):
        """The best cut of the first `stop` layers into k stages: the last one is [start, stop), and
        shorter[start] is the best cut of the layers before it into k - 1 stages."""
        found = None  # (cost of its costliest stage, its stages)
        for start in reversed(range(k - 1, stop)):  # k - 1 stages before have a layer each
            last = total[stop] - total[start]
            if found and last > found[0]:
                break  # too costly, and a last stage that starts earlier costs no less
            costliest, stages = shorter[start]
            candidate = (max(costliest, last), [*stages, (start, stop)])
            # Cheaper or, on a tie, with shorter first stages
            if found is None or candidate < found:
                found = candidate
        return found

    # Dynamic programming. best[stop]: (cost of the costliest stage, stages); at first one stage
    best = {stop: (total[stop], [(0, stop)]) for stop in range(1, layers + 1)}
    for k in range(2, n + 1):
        later = n - k  # stages that follow, and need a layer each
        best = {stop: add_stage(best, stop, k) for stop in range(k, layers - later + 1)}
    return best[layers][1]


if __name__ == "__main__":
    from show.draw import schedules_command
    schedules_command()
