"""Plays the lists of schedules.py against a clock, without a process: refuses wrong ones, and tells
a schedule's time, bubble, and microbatches in flight.

    python -m extras.show schedules 1f1b 4 8
"""

from collections import Counter, deque
from typing import NamedTuple

from schedules import Action


def needs(action, where):
    """The actions that must have ended before an action can start:

        F(s, k)          its input: F(s-1, k)
        B(s, k), I(s, k) F(s, k), and the gradient of its output: B(s+1, k) or I(s+1, k)
        W(s, k)          I(s, k)

    The kind "B or I" stands for either: both send the gradient of a stage's input."""
    kind, s, k = action
    if kind == "W":
        return [Action("I", s, k)]
    if kind == "F":
        return [Action("F", s - 1, k)] if s > 0 else []
    later = [Action("B or I", s + 1, k)] if s + 1 < len(where) else []
    return [Action("F", s, k), *later]


def play(lists, where, costs=(1, 1, 1, 0)):
    """Play the lists against a clock. Yields (rank, action, start, end): an action starts when its
    rank is free and all that it needs has arrived. costs: F, I, W and comm, the time that a message
    takes; it blocks no rank, as in pipeline.py. ValueError if a rank would wait forever."""
    f, i, w, comm = costs
    cost = {"F": f, "B": i + w, "I": i, "W": w}
    done = {}  # action -> when it ended
    free = [0] * len(lists)  # when the last action of each rank ended
    queues = [deque(actions) for actions in lists]
    # Round after round, each rank goes on until its next action needs something that is missing.
    # A round in which no rank went on is the last
    went_on = True
    while went_on:
        went_on = False
        waits = []  # (rank, its next action, the first thing missing); empty at the end
        for rank, queue in enumerate(queues):
            while queue:
                action = queue[0]
                needed = needs(action, where)
                missing = [need for need in needed if need not in done]
                if missing:
                    waits.append((rank, action, missing[0]))
                    break
                arrived = [done[need] + (comm if where[need.stage] != rank else 0)
                           for need in needed]
                start = max([free[rank], *arrived])
                free[rank] = start + cost[action.kind]
                yield rank, action, start, free[rank]
                queue.popleft()
                went_on = True
                done[action] = free[rank]
                if action.kind in ("B", "I"):
                    done[action._replace(kind="B or I")] = free[rank]
    if waits:
        raise ValueError("deadlock: " + "; ".join(
            f"rank {rank} at {action} waits for {need}" for rank, action, need in waits))


def check_lists(lists, where, m=0):
    """Check that every stage runs every microbatch once, on its own rank, after all that it needs,
    and that no rank waits forever. ValueError, with rank and action, if not. m: the number of
    microbatches; 0: as many as the lists name."""
    got = Counter((rank, action) for rank, actions in enumerate(lists) for action in actions)
    split = {(a.stage, a.microbatch) for _, a in got if a.kind in ("I", "W")}  # split backwards
    m = m or 1 + max((a.microbatch for _, a in got), default=0)
    want = set()
    for k in range(m):
        for s, rank in enumerate(where):
            kinds = ("F", "I", "W") if (s, k) in split else ("F", "B")
            want |= {(rank, Action(kind, s, k)) for kind in kinds}
    for rank, a in sorted(want | set(got)):
        if (rank, a) not in want:
            raise ValueError(f"rank {rank}: {a} is misplaced")
        if got[rank, a] != 1:
            raise ValueError(f"rank {rank}: {a} is {'doubled' if got[rank, a] else 'missing'}")
    for _ in play(lists, where):  # raises if a rank would wait forever
        pass


class Timeline(NamedTuple):
    times: list  # per rank: [(action, start, end)]
    # From a rank's first start to its last end, on the rank for which that is longest: the measure
    # of the Zero Bubble paper, in which ranks may begin and end a step at different times
    makespan: float
    bubble: float  # (makespan - m(F+I+W)) / makespan
    peak_in_flight: list  # per rank: most (stage, microbatch) pairs whose activations are held


def simulate(lists, where, costs=(1, 1, 1, 0)):
    """Time the lists. Costs: F, I, W of one microbatch through all v stages of a rank (B = I + W),
    and comm, the latency between ranks; integers give exact figures. Activations are held from a
    stage's F to the end of its B, or of its W if the backward is split."""
    f, i, w, comm = costs
    v = len(where) // len(lists)
    # A stage costs 1/v of its rank's F, I, W. Count time in units of 1/v, so that integer costs
    # stay integers: a stage then costs F, I, W, and comm becomes comm * v.
    times = [[] for _ in lists]
    held = [0] * len(lists)
    peak = [0] * len(lists)
    for rank, action, start, end in play(lists, where, (f, i, w, comm * v)):
        times[rank].append((action, start, end))
        held[rank] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak[rank] = max(peak[rank], held[rank])
    span = max(row[-1][2] - row[0][1] for row in times)
    m = 1 + max(action.microbatch for action, _, _ in times[0])
    work = m * v * (f + i + w)  # one rank's time busy
    times = [[(action, start / v, end / v) for action, start, end in row] for row in times]
    bubble = max(0, span - work) / span  # 0: a rounding could make it negative
    return Timeline(times, span / v, bubble, peak)
