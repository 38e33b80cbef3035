"""Pipeline schedules as data: which rank runs which microbatch of which stage, in which order.

P ranks have v stages each (called the rank's chunks); the batch is cut into m microbatches. A
schedule is a list of actions per rank: make_schedule makes the lists, validate checks them, lower
adds the messages, simulate times them. A forward takes F and a backward B = I + W (I: gradient of
the stage's input, W: of its weights).

                 bubble, share of the time          in flight on a rank (forward done, backward not)
    gpipe        (P-1)/(m+P-1)                      m                   arXiv 1811.06965
    1f1b         (P-1)/(m+P-1)                      min(P-rank, m)      arXiv 1806.03377
    interleaved  (P-1)/(vm+P-1)                     P + (P-1)/v * **    arXiv 2104.04473
    zb-h1, -h2   idle: (P-1)(F+I-W), (P-1)(F+I-2W)  P, 2P-1             arXiv 2401.10241
    zb-v         0 if F = I = W and m >= 2P-1       P *                 arXiv 2405.15362

    * a microbatch in one of v chunks counts 1/v (simulate counts it as 1)    ** of rank 0, if v > 1

    python schedules.py 1f1b 4 8    or    python schedules.py 4 8 --compare
"""

from collections import Counter, deque
from functools import partial
from itertools import accumulate
from typing import NamedTuple

# Each schedule is a function of P, m, v and the rank, and names kind and chunk of each action: "F1"
# is a forward of the rank's chunk 1, and the k-th "F1", from 0, is for microbatch k. Kinds: F
# forward, B backward. Zero bubble splits B into I, the gradient of the stage's input, for which the
# previous rank waits, and W, the gradients of the stage's weights, for which no rank waits.


def gpipe(P, m, v, rank):
    """All forwards, then all backwards. In between all m microbatches are in flight: their forward
    is done, their backward not yet, so their saved activations are held."""
    return ["F0"] * m + ["B0"] * m


def one_f_one_b(P, m, v, rank):
    """Run each backward as soon as it can run, and free its activations. The bubble is GPipe's, the
    memory no longer grows with m. P = 4, rank 1, m = 4: F F, F B, F B, B B."""
    num_warmup = min(P - 1 - rank, m)  # one forward for each later rank
    warm_up = ["F0"] * num_warmup
    steady = ["F0", "B0"] * (m - num_warmup)
    return warm_up + steady + ["B0"] * num_warmup


def weave(forwards, backwards, num_warmup):
    """1F1B of any two lists: num_warmup forwards, then one forward, one backward, then the rest.
    (one_f_one_b is weave of m "F0" and m "B0", spelled out.)"""
    actions, steady = forwards[:num_warmup], forwards[num_warmup:]
    for forward, backward in zip(steady, backwards[: len(steady)], strict=True):
        actions += [forward, backward]
    return actions + backwards[len(steady) :]


def interleaved(P, m, v, rank):
    """1F1B with v chunks per rank: the pipeline fills in 1/v of the time, for v times the messages.
    P microbatches go through chunk 0, then through chunk 1, ...: for P = 2, v = 2 the forwards are
    F0 F0 F1 F1 F0 F0 F1 F1 ..., the backwards B1 B1 B0 B0 ..."""
    if m % P:
        fits = [str(n * P) for n in (m // P, m // P + 1) if n > 0]
        raise ValueError(f"--microbatches {m} must be a multiple of --pp {P} for interleaved; "
                         f"try {' or '.join(fits)}")
    chunks = [i // P % v for i in range(m * v)]
    num_warmup = P - 1 - rank
    if v > 1:  # P forwards of each chunk before the last, without which no backward can start; then
        # twice 1F1B's warm-up, to hide the latency of v times the messages (saves 4 to 8% of the
        # step if the latency is 0.1 F, nothing if it is 0)
        num_warmup = (v - 1) * P + 2 * (P - 1 - rank)
    return weave([f"F{chunk}" for chunk in chunks], [f"B{v - 1 - chunk}" for chunk in chunks],
                 num_warmup)


def zero_bubble(depth, P, m, v, rank):
    """1F1B with B split into I and W. W of microbatch k waits until I of microbatch k + lag has
    run, so `lag` Ws are left for the end: rank r runs its last I r hops before rank 0 does, which
    leaves it time for r Ws. That is depth 1, zb-h1. depth 2, zb-h2, fills the warm-up too, with
    more forwards. Rank r starts r forwards after rank 0, and ends as much later, with r Ws more. As
    the bubble counts each rank from its first action to its last (simulate), this is none; but then
    rank 0 waits for the last rank's gradients in the all-reduce of the norm (train.py). (The paper
    steps first, and checks the norm later.) In flight: depth * (P-1) + 1 microbatches at most.
    depth 1, P = 4, rank 1, m = 4: num_warmup 2, lag 1: F F, F I, F I W, I W, I W, W."""
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


def zb_v(P, m, v, rank):
    """Two chunks per rank: stages 0 .. P-1 go down the ranks and P .. 2P-1 back up, a V. Rank 0 has
    the first and the last stage, so a microbatch's backward starts on the rank where it entered.
    P = 2, rank 0, m = 3: F0 F0 F0, F1 I1 W1 F1 I1 W1, I0 W0 F1 I1 W1, I0 W0 I0 W0. The paper's
    pattern, counted out, not derived here: validate() proves each list."""
    n = max(m, 2 * P - 1)  # fewer would not reach the steady state; actions_of drops those >= m
    later = P - 1 - rank  # ranks
    warm_up = ["F0"] * (2 * later + 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * (later + 1)
    steady = ["F0", "I0", "W0", "F1", "I1", "W1"] * (n - 2 * P + 1 + rank)
    drain = ["I0", "W0", "F1", "I1", "W1"] * later + ["I0", "I1"] * rank
    return warm_up + steady + drain + ["I0", "W0"] * (later + 1) + ["W1"] * rank + ["W0"] * rank


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved,
             "zb-h1": partial(zero_bubble, 1), "zb-h2": partial(zero_bubble, 2), "zb-v": zb_v}
MESSAGES = ("SF", "RF", "SB", "RB")  # the kinds of actions that send or receive
DIRECTION = {"F": 1, "B": -1}  # activations (F) go from stage s to s + 1, gradients (B) to s - 1


class Action(NamedTuple):
    """One entry of a rank's list. `stage` is the stage that acts:

        SF  sends the output of `stage`            to stage + 1
        RF  receives the input of `stage`          from stage - 1
        SB  sends the gradient of stage's input    to stage - 1
        RB  receives the gradient of its output    from stage + 1
    """
    kind: str  # F, B, I, W; SF RF SB RB
    stage: int  # 0 .. P*v-1
    microbatch: int

    def __str__(self):
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


def placement(name, P, v=1):
    """The list `where`: where[s] is the rank of stage s. P = 3: zb-v 0 1 2 2 1 0; interleaved with
    two chunks 0 1 2 0 1 2; all others 0 1 2."""
    return [*range(P), *reversed(range(P))] if name == "zb-v" else [s % P for s in range(P * v)]


def cut(costs, n):
    """Cut the layers into n stages, [(start, stop)], none empty, with the costliest as cheap as
    possible: it sets the pace. cut([0, 5, 5, 5, 5, 20], 3) = [(0, 3), (3, 5), (5, 6)]."""
    total = list(accumulate(costs, initial=0))  # total[i]: cost of the first i layers
    # Dynamic programming. best[stop]: the best cut of the first `stop` layers into k stages, as
    # (cost of the costliest stage, [(start, stop)]); at first k = 1
    best = {stop: (total[stop], [(0, stop)]) for stop in range(1, len(costs) + 1)}
    for k in range(2, n + 1):
        shorter, best = best, {}  # shorter: into k - 1 stages
        for stop in range(k, len(costs) + 1 - (n - k)):  # later stages need a layer each
            # the last stage is [start, stop), ever longer; k - 1 stages before have a layer each
            for start in range(stop - 1, k - 2, -1):
                last = total[stop] - total[start]
                if stop in best and last > best[stop][0]:
                    break  # too costly, and longer ones cost no less
                cost, stages = shorter[start]
                candidate = max(cost, last), [*stages, (start, stop)]
                best[stop] = min(best.get(stop, candidate), candidate)
    return best[len(costs)][1]


def make_schedule(name, P, m, v=1):
    """One list of F, B, I, W actions per rank. interleaved has v chunks per rank, zb-v always two,
    the others one. ValueError, in one line, for a combination that does not exist."""
    if name not in SCHEDULES:
        raise ValueError(f"--schedule {name} is unknown; try {', '.join(SCHEDULES)}")
    for flag, value in (("--pp", P), ("--microbatches", m), ("--chunks", v)):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    chunks = {"interleaved": v, "zb-v": 2}.get(name, 1)
    if v not in (1, chunks):
        raise ValueError(f"--chunks {v} does not fit {name}; try --chunks {chunks}")
    return [actions_of(name, P, m, v, rank) for rank in range(P)]


def actions_of(name, P, m, v, rank):
    """One rank's list. interleaved, P = 2, v = 2, rank 0: the first two "F1" become
    F(stage 2, microbatch 0) and F(stage 2, microbatch 1)."""
    stages = [s for s, owner in enumerate(placement(name, P, v)) if owner == rank]  # of each chunk
    count, actions = Counter(), []  # count["F1"]: how many came so far
    for token in SCHEDULES[name](P, m, v, rank):
        kind, chunk = token[0], int(token[1:])
        if count[token] < m:  # see zb_v
            actions.append(Action(kind, stages[chunk], count[token]))
        count[token] += 1
    return actions


def transfers(action, where):
    """The send and the receive that bring an action's result to the next rank; () if there is none.
    F(0, k) -> SF(0, k), RF(1, k). B(1, k) or I(1, k) -> SB(1, k), RB(0, k)."""
    kind, s, k = action
    data = "F" if kind == "F" else "B"
    to = s + DIRECTION[data]
    if kind == "W" or not 0 <= to < len(where) or where[to] == where[s]:
        return ()
    return Action("S" + data, s, k), Action("R" + data, to, k)


def needs(action, where, lowered):
    """The actions that must be done before this one can start. B also stands for I, which play()
    records as B.

        W(s, k)     B(s, k)
        F(s, k)     its input: RF(s, k), or F(s-1, k) if not `lowered` or both are on one rank
        B(s, k)     F(s, k), and its gradient: RB(s, k), or likewise B(s+1, k)
        SF(s, k)    F(s, k), and its receive RF(s+1, k); SB(s, k) likewise
        RF(s, k)    its send SF(s-1, k); RB(s, k) likewise

    A send and its receive need each other: each blocks until the other rank has reached its own (a
    rendezvous). The first stage needs no input, the last no gradient."""
    kind, s, k = action
    if kind == "W":
        return [Action("B", s, k)]
    data = "F" if kind in ("F", "SF", "RF") else "B"
    step = DIRECTION[data]
    if kind in ("SF", "SB"):
        return [Action(data, s, k), Action("R" + data, s + step, k)]
    if kind in ("RF", "RB"):
        return [Action("S" + data, s - step, k)]
    needed = [] if kind == "F" else [Action("F", s, k)]
    source = s - step  # the stage that computes this action's input or gradient
    if 0 <= source < len(where):
        producer = Action(data, source, k)
        messages = transfers(producer, where) if lowered else ()
        needed.append(messages[1] if messages else producer)
    return needed


def play(lists, where, costs=(1, 1, 1, 0)):
    """Play the lists against a clock. Yields (rank, action, start, end): an action starts when its
    rank is free and all that it needs has arrived. costs: F, I, W and comm, the time between ranks.
    In lists without messages, data takes comm to arrive and blocks no rank. In lowered lists, sends
    and receives block, and a receive takes comm. ValueError if the lists come to a halt."""
    f, i, w, comm = costs
    cost = {"F": f, "B": i + w, "I": i, "W": w, "RF": comm, "RB": comm, "SF": 0, "SB": 0}
    lowered = any(action.kind in MESSAGES for actions in lists for action in actions)
    delay = 0 if lowered else comm
    done = {}  # action -> when it ended; for a message: when its rank reached it (rendezvous)
    free = [0] * len(lists)  # when the last action of each rank ended
    queues = [deque(actions) for actions in lists]
    # Round after round, each rank goes on until its next action needs something that is missing.
    # A round that ends with the same waits as the one before made no progress.
    waits, before = [], None  # (rank, its next action, the first thing missing); at the end both []
    while waits != before:
        before, waits = waits, []
        for rank, queue in enumerate(queues):
            while queue:
                action = queue[0]
                if action.kind in MESSAGES:
                    done.setdefault(action, free[rank])
                needed = needs(action, where, lowered)
                missing = [need for need in needed if need not in done]
                if missing:
                    waits.append((rank, action, missing[0]))
                    break
                arrived = [done[need] + delay * (where[need.stage] != rank) for need in needed]
                start = max([free[rank], *arrived])
                free[rank] = start + cost[action.kind]
                yield rank, queue.popleft(), start, free[rank]
                if action.kind == "I":  # needs() calls it B
                    action = Action("B", action.stage, action.microbatch)
                done.setdefault(action, free[rank])
    if waits:
        # A rank that waits for a later action of its own is the cause; else ranks wait in a circle
        own = [(rank, action, need) for rank, action, need in waits if where[need.stage] == rank]
        raise ValueError(("misordered: " if own else "deadlock: ") + "; ".join(
            f"rank {rank} at {action} waits for {need}" for rank, action, need in own or waits))


def lower(lists, where):
    """Add the sends and receives between stages of different ranks.

    The result cannot deadlock, although a send and its receive block until both ranks have reached
    them: sort all actions by their start in play(), and put each pair where its data is ready. Each
    rank runs its actions in this one global order. So the earliest action not yet done is next in
    the list of every rank that takes part in it, and can run."""
    # (time, 0 for messages or 1, start, rank, action): at one time messages come before actions,
    # which may need them
    events = []
    for rank, action, start, end in play(lists, where):
        events.append((start, 1, start, rank, action))
        events += [(end, 0, start, rank, message) for message in transfers(action, where)]
    lowered = [[] for _ in lists]
    for *_, action in sorted(events, key=lambda event: event[:4]):  # stable: a pair stays together
        lowered[where[action.stage]].append(action)
    return lowered


def validate(lists, where):
    """Check that every stage runs every microbatch once, on its own rank, after all that it needs,
    and that no rank waits forever when sends and receives block. ValueError, with rank and action,
    if not. Lists without messages are lowered first; lists with messages are checked as given."""
    got = Counter((rank, action) for rank, actions in enumerate(lists) for action in actions)
    split = {(a.stage, a.microbatch) for _, a in got if a.kind in ("I", "W")}  # split backwards
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
    times: list  # per rank: [(action, start, end)], without messages
    makespan: float  # the largest over ranks of (last end - that rank's first start)
    bubble: float  # (makespan - m(F+I+W)) / makespan
    peak_in_flight: list  # per rank: most (stage, microbatch) pairs whose activations are held


def simulate(lists, where, costs=(1, 1, 1, 0)):
    """Time the lists. Costs: F, I, W of one microbatch through all v stages of a rank (B = I + W),
    and comm, the latency between ranks; integers give exact figures. Activations are held from a
    stage's F to the end of its B, or of its W if the backward is split."""
    if len(costs) != 4 or not all(0 <= c < float("inf") for c in costs) or 0 in costs[:3]:
        raise ValueError(f"--costs {','.join(map(str, costs))} must be F,I,W,comm, finite, "
                         "the first three above 0; try 1,1,1,0")
    (f, i, w, comm), v = costs, len(where) // len(lists)
    # A stage costs 1/v of F, I, W. To stay with integers, play in units of 1/v: only comm changes.
    times, held, peak = [[] for _ in lists], [0] * len(lists), [0] * len(lists)
    for rank, action, start, end in play(lists, where, (f, i, w, comm * v)):
        if action.kind not in MESSAGES:
            times[rank].append((action, start, end))
            held[rank] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak[rank] = max(peak[rank], held[rank])
    span = max(row[-1][2] - row[0][1] for row in times)
    m = 1 + max(action.microbatch for action, _, _ in times[0])
    work = m * v * (f + i + w)  # of one rank
    times = [[(action, start / v, end / v) for action, start, end in row] for row in times]
    return Timeline(times, span / v, max(0, span - work) / span, peak)


if __name__ == "__main__":
    from planner.draw import schedules_command
    schedules_command()
