"""Schedules as train.py runs them: lists of actions, checked, timed, and with their messages.

    make_schedule   "F0" "B0" ... of schedules.py -> lists of Actions, one list per rank
    play            runs lists against a clock, by what each action needs
    lower           adds the sends and receives between ranks, in an order that cannot deadlock
    validate        checks any lists, those that you wrote by hand too
    simulate        makespan, bubble, and microbatches in flight

Pipeline (engine/pipeline.py) executes these lists (on gloo with each receive posted one earlier);
the planner times the same lists before lower() has added messages.
"""

from collections import Counter, deque
from typing import NamedTuple

from schedules import SCHEDULES, chunks_of, placement

MESSAGES = ("SF", "RF", "SB", "RB")  # the kinds of actions that send or receive
DIRECTION = {"F": 1, "B": -1}  # activations (F) go from stage s to s + 1, gradients (B) to s - 1


class Action(NamedTuple):
    """One entry of a rank's list. `stage` is the stage that acts:

        F, B, I, W   compute; see schedules.py
        SF           sends the output of `stage`            to stage + 1
        RF           receives the input of `stage`          from stage - 1
        SB           sends the gradient of stage's input    to stage - 1
        RB           receives the gradient of its output    from stage + 1
    """
    kind: str
    stage: int  # 0 .. P*v-1
    microbatch: int

    def __str__(self):
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


def make_schedule(name, P, m, v=0):
    """One list of F, B, I, W actions per rank. v: stages per rank, as chunks_of takes it.
    ValueError, in one line, for a combination that does not exist."""
    v = chunks_of(name, v)
    for flag, value in (("--pp", P), ("--microbatches", m)):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    if SCHEDULES[name].in_rounds and m % P:
        fits = [str(n * P) for n in (m // P, m // P + 1) if n > 0]
        raise ValueError(f"--microbatches {m} must be a multiple of --pp {P} for {name}; "
                         f"try {' or '.join(fits)}")
    return [actions_of(name, P, m, v, rank) for rank in range(P)]


def actions_of(name, P, m, v, rank):
    """One rank's list. interleaved, P = 2, v = 2, rank 0, whose chunk 1 is stage 2: the first two
    "F1" become F(stage 2, microbatch 0) and F(stage 2, microbatch 1). B and I count together,
    because each is a microbatch's backward: "B0" "I0" are B of microbatch 0 and I of microbatch 1.
    A W is of the oldest I whose W has not run: after these two, "W0" is W of microbatch 1."""
    stages = [s for s, owner in enumerate(placement(name, P, v)) if owner == rank]
    count = Counter()  # count["F", 1]: number of "F1" so far
    deferred = {chunk: deque() for chunk in range(v)}  # microbatches between I and W
    actions = []
    for code in SCHEDULES[name].actions(P, m, v, rank):  # such as "F1"
        kind, chunk = code[0], int(code[1:])
        if kind == "W" and deferred[chunk]:
            k = deferred[chunk].popleft()
        else:  # F, B, I; or a W without an I: a wrong list, which validate() refuses
            letter = "B" if kind == "I" else kind  # B and I count together
            turn = letter, chunk
            k = count[turn]
            count[turn] += 1
        if kind == "I":
            deferred[chunk].append(k)
        actions.append(Action(kind, stages[chunk], k))
    return actions


# ---- what an action needs ----
# From here to the end of play(), I counts as B: both turn the gradient of a stage's output into
# the gradient of its input. When an I ends, play() records it as a B.


def transfers(action, where):
    """The send and the receive that bring an action's result to the next rank; () if there is none.
    F(0, k) -> SF(0, k), RF(1, k). B(1, k) or I(1, k) -> SB(1, k), RB(0, k)."""
    kind, s, k = action
    if kind == "W":
        return ()
    data = "F" if kind == "F" else "B"
    to = s + DIRECTION[data]
    if not 0 <= to < len(where) or where[to] == where[s]:
        return ()
    return Action("S" + data, s, k), Action("R" + data, to, k)


def needs_of_compute(action, where, lowered):
    """The actions that must have ended before F, B, I or W can start:

        F(s, k)    its input: F(s-1, k)
        B(s, k)    F(s, k), and the gradient of its output: B(s+1, k)
        W(s, k)    B(s, k)

    In lists with messages (lowered) what another rank computes is replaced by its receive:
    F(s-1, k) by RF(s, k), B(s+1, k) by RB(s, k)."""
    kind, s, k = action
    if kind == "W":
        return [Action("B", s, k)]
    needed = []
    source = Action("F", s - 1, k)
    if kind != "F":
        needed = [Action("F", s, k)]
        source = Action("B", s + 1, k)
    if 0 <= source.stage < len(where):  # the first stage needs no input, the last no gradient
        pair = transfers(source, where) if lowered else ()
        needed.append(pair[1] if pair else source)
    return needed


def needs_of_message(action):
    """SF(s, k) needs its data, F(s, k), and its receive, RF(s+1, k); RF(s+1, k) needs SF(s, k). SB
    and RB likewise, to stage s-1. A send and its receive need each other: each blocks until the
    other rank has reached its own (a rendezvous)."""
    (way, data), s, k = action
    step = DIRECTION[data]
    if way == "S":
        return [Action(data, s, k), Action("R" + data, s + step, k)]
    return [Action("S" + data, s - step, k)]


def play(lists, where, costs=(1, 1, 1, 0)):
    """Play the lists against a clock. Yields (rank, action, start, end): an action starts when its
    rank is free and all that it needs has arrived. costs: F, I, W and comm, the time between ranks.
    In lists without messages, data takes comm to arrive and blocks no rank. In lowered lists, sends
    and receives block, and a receive takes comm. ValueError if the lists come to a halt."""
    f, i, w, comm = costs
    cost = {"F": f, "B": i + w, "I": i, "W": w, "RF": comm, "RB": comm, "SF": 0, "SB": 0}
    lowered = any(action.kind in MESSAGES for actions in lists for action in actions)
    delay = 0 if lowered else comm
    # a compute action -> when it ended; a message -> when its rank reached it (the other end waits
    # for that; what follows on its own rank waits for free[rank])
    done = {}
    free = [0] * len(lists)  # when the last action of each rank ended
    queues = [deque(actions) for actions in lists]
    # Round after round, each rank goes on until its next action needs something that is missing.
    # A round in which no rank went on is the last.
    went_on = True
    while went_on:
        went_on = False
        waits = []  # (rank, its next action, the first thing missing); empty at the end
        for rank, queue in enumerate(queues):
            while queue:
                action = queue[0]
                if action.kind in MESSAGES:
                    done.setdefault(action, free[rank])
                    needed = needs_of_message(action)
                else:
                    needed = needs_of_compute(action, where, lowered)
                missing = [need for need in needed if need not in done]
                if missing:
                    waits.append((rank, action, missing[0]))
                    break
                arrived = [done[need] + (delay if where[need.stage] != rank else 0)
                           for need in needed]
                start = max([free[rank], *arrived])
                free[rank] = start + cost[action.kind]
                yield rank, action, start, free[rank]
                queue.popleft()
                went_on = True
                ended = action._replace(kind="B") if action.kind == "I" else action
                done.setdefault(ended, free[rank])
    if waits:
        # A rank that waits for a later action of its own is the cause; else ranks wait in a circle
        own = [(rank, action, need) for rank, action, need in waits if where[need.stage] == rank]
        raise ValueError(("misordered: " if own else "deadlock: ") + "; ".join(
            f"rank {rank} at {action} waits for {need}" for rank, action, need in own or waits))


class Event(NamedTuple):
    """An action or a message in lower(), which sorts by the first three entries."""
    time: float  # an action's start; of a message: when its data is ready
    # An action: its start once more. A message: the start of the action that made its data, which
    # is earlier than `time`. So among equal times a message sorts before an action that starts
    # then, and the action may need the message
    start: float
    rank: int  # the rank that runs the action, or made the data
    action: Action


def lower(lists, where):
    """Add the sends and receives between stages of different ranks.

    The result cannot deadlock, although a send and its receive block until both ranks have reached
    them: sort all actions by their start in play(), and put each pair where its data is ready. Each
    rank runs its actions in this one global order. So the earliest action not yet done is next in
    the list of every rank that takes part in it, and can run."""
    events = []
    for rank, action, start, end in play(lists, where):
        events.append(Event(start, start, rank, action))
        for message in transfers(action, where):
            events.append(Event(end, start, rank, message))
    lowered = [[] for _ in lists]
    for event in sorted(events, key=lambda event: event[:3]):  # stable: a pair stays together
        lowered[where[event.action.stage]].append(event.action)
    return lowered


def validate(lists, where):
    """Check that every stage runs every microbatch once, on its own rank, after all that it needs,
    and that no rank waits forever when sends and receives block. ValueError, with rank and action,
    if not. Lists without messages are lowered first; lists with messages are checked as given."""
    got = Counter((rank, action) for rank, actions in enumerate(lists) for action in actions)
    split = {(a.stage, a.microbatch) for _, a in got if a.kind in ("I", "W")}  # split backwards
    lowered = any(a.kind in MESSAGES for _, a in got)
    m = 1 + max((a.microbatch for _, a in got), default=0)
    due = []
    for k in range(m):
        for s in range(len(where)):
            kinds = ("F", "I", "W") if (s, k) in split else ("F", "B")
            due += [Action(kind, s, k) for kind in kinds]
    if lowered:
        due += [message for action in due for message in transfers(action, where)]
    want = {(where[a.stage], a) for a in due}
    for rank, a in sorted(want | set(got)):
        if (rank, a) not in want:
            raise ValueError(f"rank {rank}: {a} is misplaced")
        if got[rank, a] != 1:
            raise ValueError(f"rank {rank}: {a} is {'doubled' if got[rank, a] else 'missing'}")
    if not lowered:
        lists = lower(lists, where)
    for _ in play(lists, where):  # raises if the lists come to a halt
        pass


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
    f, i, w, comm = costs
    v = len(where) // len(lists)
    # A stage costs 1/v of its rank's F, I, W. Count time in units of 1/v, so that integer costs
    # stay integers: a stage then costs F, I, W, and comm becomes comm * v.
    times = [[] for _ in lists]
    held = [0] * len(lists)
    peak = [0] * len(lists)
    for rank, action, start, end in play(lists, where, (f, i, w, comm * v)):
        if action.kind not in MESSAGES:
            times[rank].append((action, start, end))
            held[rank] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak[rank] = max(peak[rank], held[rank])
    span = max(row[-1][2] - row[0][1] for row in times)
    m = 1 + max(action.microbatch for action, _, _ in times[0])
    work = m * v * (f + i + w)  # one rank's time busy
    times = [[(action, start / v, end / v) for action, start, end in row] for row in times]
    return Timeline(times, span / v, max(0, span - work) / span, peak)
