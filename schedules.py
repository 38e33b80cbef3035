"""Pipeline schedules as data: which rank runs which microbatch of which stage, and when.

The layers are cut into P*v stages, v on each of P ranks, and the batch into m microbatches. A list
of actions per rank is made, validated, lowered to sends and receives, and timed. The bubble, as a
rate or as idle time, and the most microbatches a rank holds, for costs F, I, W and B = I + W:

    gpipe        (P-1)/(m+P-1)                  m                      arXiv 1811.06965
    1f1b         (P-1)/(m+P-1)                  min(P-rank, m)         arXiv 1806.03377
    interleaved  (P-1)/(vm+P-1)                 P + (P-1)/v if v > 1   arXiv 2104.04473
    zb-h1, -h2   (P-1)(F+I-W), (P-1)(F+I-2W)    P, 2P-1                arXiv 2401.10241
    zb-v         0 if F = I = W and m >= 2P-1   P                      arXiv 2405.15362

    python pipeline.py 1f1b 4 8    or    python pipeline.py 4 8 --compare
"""

from collections import Counter, deque
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

# A schedule is a function of P ranks, m microbatches, v chunks and the rank. It returns "F0", "B0",
# ...: what to do, with which of the rank's stages (its chunks). The k-th F0 is for microbatch k.


def gpipe(P, m, v, rank):
    """All forwards, then all backwards: every microbatch's activations are held at once."""
    return ["F0"] * m + ["B0"] * m


def one_f_one_b(P, m, v, rank):
    """The same work in another order: as soon as a backward can run it does, and frees its
    activations. A rank is ahead by the microbatches that fill the ranks behind it."""
    ahead = min(P - 1 - rank, m)
    warm_up = ["F0"] * ahead
    steady = ["F0", "B0"] * (m - ahead)
    cool_down = ["B0"] * ahead
    return warm_up + steady + cool_down


def weave(forwards, backwards, ahead):
    """The same for any list of forwards and of backwards: warm up, take turns, cool down."""
    turns = max(0, len(forwards) - ahead)
    steady = chain(*zip(forwards[ahead:], backwards[:turns], strict=True))
    return [*forwards[:ahead], *steady, *backwards[turns:]]


def interleaved(P, m, v, rank):
    """1F1B with v smaller stages on a rank: the pipe fills in 1/v of the time, with v times the
    messages. P microbatches go through one chunk, then the next."""
    if m % P:
        fits = " or ".join(str(n * P) for n in (m // P, m // P + 1) if n)
        raise ValueError(f"--microbatches {m} must be a multiple of --pp {P} for interleaved; "
                         f"try {fits}")
    chunks = [k // P % v for k in range(m * v)]
    ahead = 2 * (P - 1 - rank) + (v - 1) * P if v > 1 else P - 1 - rank
    return weave([f"F{c}" for c in chunks], [f"B{v - 1 - c}" for c in chunks], ahead)


def zero_bubble(depth, P, m, v, rank):
    """1F1B with the backward cut in two. The rank before waits only for the input gradient I, so
    each W runs `lag` microbatches late, also in cool-down. Holds at most depth (P-1) + 1."""
    lag = min(depth * rank, m)
    woven = weave(["F0"] * m, ["I0"] * lag + ["I0 W0"] * (m - lag), depth * (P - 1 - rank))
    return " ".join(woven).split() + ["W0"] * lag


def zb_v(P, m, v, rank):
    """Two chunks on each rank, down the ranks and back up, so that rank 0 ends what it began."""
    n = max(m, 2 * P - 1)  # make_schedule strikes out the microbatches from m on
    warm_up = "F0 " * (2 * (P - rank) - 1) + "F1 F0 " * rank + "F1 I1 W1 " * (P - rank)
    steady = "F0 I0 W0 F1 I1 W1 " * (n - 2 * P + 1 + rank) + "I0 W0 F1 I1 W1 " * (P - 1 - rank)
    cool_down = "I0 I1 " * rank + "I0 W0 " * (P - rank) + "W1 " * rank + "W0 " * rank
    return (warm_up + steady + cool_down).split()


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved,
             "zb-h1": partial(zero_bubble, 1), "zb-h2": partial(zero_bubble, 2), "zb-v": zb_v}
MESSAGES = ("SF", "RF", "SB", "RB")  # kinds of Action that talk to another rank


class Action(NamedTuple):
    """What one rank does next. The stage is always the one that acts: SF sends stage's output to
    stage + 1, RF receives stage's input; SB sends the gradient of that input to stage - 1, RB
    receives the gradient of stage's output."""
    kind: str  # F forward, B whole backward, I input gradient, W weight gradient; SF RF SB RB
    stage: int  # 0 .. P*v-1
    microbatch: int

    def __str__(self):
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


def placement(name, P, v=1):
    """The rank that owns each stage. zb-v goes down the ranks and back up, so that rank 0 has
    both the first and the last stage; all others go round (stage s on rank s % P)."""
    return [*range(P), *reversed(range(P))] if name == "zb-v" else [s % P for s in range(P * v)]


def cut(costs, n):
    """[start, stop) of n consecutive slices of the layers, none empty, such that the costliest is
    as cheap as can be, as all stages wait for it."""
    total = list(accumulate(costs, initial=0))
    # {stop: (costliest, slices)}: the first `stop` layers in k slices, at first in one
    best = {stop: (total[stop], [(0, stop)]) for stop in range(1, len(costs) + 1)}
    for k in range(2, n + 1):
        shorter, best = best, {}
        for stop in range(k, len(costs) + 1):
            for start in range(stop - 1, k - 2, -1):
                last = total[stop] - total[start]
                if stop in best and last > best[stop][0]:
                    break  # and with a longer last slice even more so
                cost, slices = shorter[start]
                new = max(cost, last), [*slices, (start, stop)]
                best[stop] = min(best.get(stop, new), new)
    return best[len(costs)][1]


def make_schedule(name, P, m, v=1):
    """One list of F, B, I, W actions per rank. interleaved has v chunks on each rank, zb-v always
    two, the others one. ValueError, in one line, for a combination that does not exist."""
    if name not in SCHEDULES:
        raise ValueError(f"--schedule {name} is unknown; try {', '.join(SCHEDULES)}")
    for flag, value in (("--pp", P), ("--microbatches", m), ("--chunks", v)):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    fit = {"interleaved": v, "zb-v": 2}.get(name, 1)
    if v not in (1, fit):
        raise ValueError(f"--chunks {v} does not fit {name}; try --chunks {fit}")
    return [actions_of(name, P, m, v, rank) for rank in range(P)]


def actions_of(name, P, m, v, rank):
    """The list of one rank, of a combination that exists."""
    stages = [s for s, owner in enumerate(placement(name, P, v)) if owner == rank]
    nth, actions = Counter(), []  # nth: how often a token came, the microbatch of the next
    for token in SCHEDULES[name](P, m, v, rank):
        if nth[token] < m:
            actions.append(Action(token[0], stages[int(token[1:])], nth[token]))
        nth[token] += 1
    return actions


def transfers(action, where):
    """The send and the receive that take an action's result to another rank; () if it stays."""
    kind, s, k = action
    data, to = ("F", s + 1) if kind == "F" else ("B", s - 1)
    if kind == "W" or not 0 <= to < len(where) or where[to] == where[s]:
        return ()
    return Action("S" + data, s, k), Action("R" + data, to, k)


def needs(action, where, lowered):
    """The actions that must have happened before this one; B stands for B or I, whichever gives the
    input gradient. Data from another rank: the action that made it, or its receive if `lowered`.
    A send needs its receive to have been reached, and a receive its send: a rendezvous."""
    kind, s, k = action
    if kind == "W":
        return [Action("B", s, k)]
    data, step = ("F", 1) if kind[-1] == "F" else ("B", -1)  # activations go up, gradients down
    if kind[0] == "S":
        return [Action(data, s, k), Action("R" + data, s + step, k)]
    if kind[0] == "R":
        return [Action("S" + data, s - step, k)]
    own = [] if kind == "F" else [Action("F", s, k)]
    if not 0 <= s - step < len(where):  # token ids, or the loss
        return own
    giver = Action(data, s - step, k)
    messages = transfers(giver, where) if lowered else ()
    return own + [messages[1] if messages else giver]


def play(lists, where, costs=(1, 1, 1, 0)):
    """Yields (rank, action, start, end), each action as early as its list and its needs allow, in
    the order of each list. Without sends in the lists, data takes comm to cross ranks and blocks
    nobody; with them, sends and receives block. ValueError if the lists come to a halt."""
    f, i, w, comm = costs
    cost = {"F": f, "B": i + w, "I": i, "W": w, "RF": comm, "RB": comm, "SF": 0, "SB": 0}
    lowered = any(a.kind in MESSAGES for actions in lists for a in actions)
    hop = 0 if lowered else comm  # in lowered lists the receive has it
    done = {}  # action -> when it ended; a send or a receive: when its rank came to it
    free, queues = [0] * len(lists), [deque(actions) for actions in lists]
    stuck, before = [], None  # (rank, its action, what that waits for), of this round and the last
    while stuck != before:  # round after round: each rank goes on until something is missing
        before, stuck = stuck, []
        for rank, queue in enumerate(queues):
            while queue:
                action = queue[0]
                if action.kind in MESSAGES:
                    done.setdefault(action, free[rank])
                needed = needs(action, where, lowered)
                missing = [need for need in needed if need not in done]
                if missing:
                    stuck.append((rank, action, missing[0]))
                    break
                arrived = [done[need] + hop * (where[need.stage] != rank) for need in needed]
                start = max([free[rank], *arrived])
                free[rank] = start + cost[action.kind]
                yield rank, queue.popleft(), start, free[rank]
                gives = Action("B", *action[1:]) if action.kind == "I" else action
                done.setdefault(gives, free[rank])
    if stuck:  # a rank that waits for itself is the cause; otherwise they wait in a circle
        alone = [entry for entry in stuck if where[entry[2].stage] == entry[0]]
        raise ValueError(("misordered: " if alone else "deadlock: ") + "; ".join(
            f"rank {rank} at {action} waits for {need}" for rank, action, need in alone or stuck))


def lower(lists, where):
    """The same lists with sends and receives put in; none between stages that share a rank. Both
    enter their lists at one moment, the end of the action that made the data. So every list is a
    subsequence of one global order, and the earliest entry of it still to be done is at the head of
    every list that holds it: it can run, even if sends and receives block."""
    events = []  # (when, 0 for messages or 1, two more so that ties have one order, action)
    for rank, action, start, end in play(lists, where):
        events.append((start, 1, start, rank, action))
        events += [(end, 0, start, rank, pair) for pair in transfers(action, where)]
    lowered = [[] for _ in lists]
    for *_, action in sorted(events, key=lambda event: event[:4]):  # stable: a pair stays together
        lowered[where[action.stage]].append(action)
    return lowered


def validate(lists, where):
    """ValueError, naming rank and action, unless every stage runs every microbatch once, on its own
    rank, after all it needs, and nobody waits forever when sends and receives block. Lists without
    sends are lowered first; lists with sends are taken as they stand."""
    got = Counter((rank, a) for rank, actions in enumerate(lists) for a in actions)
    split = {(a.stage, a.microbatch) for _, a in got if a.kind in ("I", "W")}
    lowered = any(a.kind in MESSAGES for _, a in got)
    m = 1 + max((a.microbatch for _, a in got), default=0)
    want = [Action(kind, s, k) for k in range(m) for s in range(len(where))
            for kind in ("FIW" if (s, k) in split else "FB")]
    if lowered:
        want += [message for action in want for message in transfers(action, where)]
    want = {(where[a.stage], a) for a in want}
    for rank, a in sorted(want | set(got)):
        if (rank, a) not in want:
            raise ValueError(f"rank {rank}: {a} is misplaced")
        if got[rank, a] != 1:
            raise ValueError(f"rank {rank}: {a} is {'doubled' if got[rank, a] else 'missing'}")
    list(play(lists if lowered else lower(lists, where), where))  # raises if they come to a halt


class Timeline(NamedTuple):
    times: list  # per rank: (action, start, end), sends and receives left out
    makespan: float  # the largest over ranks of (last end - that rank's first start)
    bubble: float  # (makespan - m(F+I+W)) / makespan
    peak_in_flight: list  # per rank: most (stage, microbatch) activations alive at once


def simulate(lists, where, costs=(1, 1, 1, 0)):
    """Times the lists for costs F, I, W (one microbatch through a rank's v stages; B = I + W) and
    comm (latency between ranks). An activation is in flight from its F to the end of its B, or W
    where the backward is split. Integer costs give exact figures."""
    if len(costs) != 4 or not all(0 <= c < float("inf") for c in costs) or 0 in costs[:3]:
        raise ValueError(f"--costs {','.join(map(str, costs))} must be F,I,W,comm, finite, "
                         "the first three above 0; try 1,1,1,0")
    (f, i, w, comm), v = costs, len(where) // len(lists)
    times, alive, peak = [[] for _ in lists], [0] * len(lists), [0] * len(lists)
    for rank, action, start, end in play(lists, where, (f, i, w, comm * v)):  # in units of 1/v
        if action.kind not in MESSAGES:
            times[rank].append((action, start, end))
            alive[rank] += {"F": 1, "I": 0}.get(action.kind, -1)
            peak[rank] = max(peak[rank], alive[rank])
    span = max(row[-1][2] - row[0][1] for row in times)
    work = (1 + max(a.microbatch for a, _, _ in times[0])) * v * (f + i + w)
    times = [[(a, start / v, end / v) for a, start, end in row] for row in times]
    return Timeline(times, span / v, max(0, span - work) / span, peak)


def closed_form(name, P, m, v, costs):
    """The published bubble rate, or None where what it assumes does not hold: comm is 0; zb-h1 and
    zb-h2 also take W <= F and enough microbatches to fill the pipe, zb-v equal costs."""
    f, i, w, comm = costs
    depth = {"zb-h1": 1, "zb-h2": 2, "zb-v": 2}.get(name, 0)
    idle = (P - 1) * (f + i + (w, -w, -2 * w)[depth])
    full = depth == 0 or (w <= f and m > depth * (P - 1))
    if comm != 0 or idle < 0 or not full or (name == "zb-v" and not f == i == w):
        return None
    return idle / (idle + m * (f + i + w) * (v if name == "interleaved" else 1))
