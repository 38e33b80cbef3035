"""Pipeline parallelism: which rank runs which microbatch of which stage, and when.

The layers are cut into P*v stages, v on each of P ranks, and the batch into m microbatches. One
list of actions per rank is validated, lowered to sends and receives, timed and drawn. Moved: an
activation and a gradient per microbatch and cut. Bubble, as a rate or as idle time, and the most
microbatches a rank holds, with forward F, input gradient B, weight gradient W:

    gpipe        (P-1)/(m+P-1)                  m                      arXiv 1811.06965
    1f1b         (P-1)/(m+P-1)                  min(P-rank, m)         arXiv 1806.03377
    interleaved  (P-1)/(vm+P-1)                 P + (P-1)/v if v > 1   arXiv 2104.04473
    zb-h1, -h2   (P-1)(F+B-W), (P-1)(F+B-2W)    P, 2P-1                arXiv 2401.10241
    zb-v         0 if F = B = W and m >= 2P-1   P                      arXiv 2405.15362

    python pipeline.py 1f1b 4 8    or    python pipeline.py 4 8 --compare
"""
import argparse
import json
import shutil
import sys
from collections import Counter, defaultdict, deque
from heapq import heappop, heappush
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import torch

from collectives import Work, no_span


class Action(NamedTuple):
    """What one rank does next. The stage is always the one that acts: SF sends stage's output to
    stage + 1, RF receives stage's input; SB sends the gradient of that input to stage - 1, RB
    receives the gradient of stage's output."""
    kind: str  # F forward, B whole backward, I input gradient, W weight gradient; SF RF SB RB
    stage: int  # 0 .. P*v-1
    microbatch: int

    def __str__(self):
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


PEER = {"SF": ("RF", 1), "RF": ("SF", -1), "SB": ("RB", -1), "RB": ("SB", 1)}  # kind, stage offset


# What a rank does, as "F0 F0 B0 ...": kind and local chunk; the k-th F0 is for microbatch k.

def weave(forwards, backwards, warmup):
    w = min(warmup, len(forwards))
    steady = [a for pair in zip(forwards[w:], backwards, strict=False) for a in pair]
    return " ".join(forwards[:w] + steady + backwards[len(forwards) - w:])  # last part: cool-down


def interleaved(P, m, v, rank):
    if m % P:
        fits = " or ".join(str(n * P) for n in (m // P, m // P + 1) if n)
        raise ValueError(f"--microbatches {m} must be a multiple of --pp {P} for interleaved; "
                         f"try {fits}")
    chunks = [k // P % v for k in range(m * v)]  # P microbatches through one chunk, then the next
    warmup = 2 * (P - 1 - rank) + (v - 1) * P if v > 1 else P - 1 - rank
    return weave([f"F{c}" for c in chunks], [f"B{v - 1 - c}" for c in chunks], warmup)


def zb_h(depth, P, m, rank):
    lag = min(depth * rank, m)  # weight gradients put off until the cool-down, which they fill
    backwards = ["I0"] * lag + ["I0 W0"] * (m - lag)
    return weave(["F0"] * m, backwards, depth * (P - 1 - rank)) + " W0" * lag


def zb_v(P, m, rank):
    n = max(m, 2 * P - 1)  # make_schedule strikes out the microbatches from m on
    return ("F0 " * (2 * (P - rank) - 1) + "F1 F0 " * rank + "F1 I1 W1 " * (P - rank)  # warm-up
            + "F0 I0 W0 F1 I1 W1 " * (n - 2 * P + 1 + rank) + "I0 W0 F1 I1 W1 " * (P - 1 - rank)
            + "I0 I1 " * rank + "I0 W0 " * (P - rank) + "W1 " * rank + "W0 " * rank)  # cool-down


SCHEDULES = {
    "gpipe": lambda P, m, v, rank: weave(["F0"] * m, ["B0"] * m, m),
    "1f1b": lambda P, m, v, rank: weave(["F0"] * m, ["B0"] * m, P - 1 - rank),
    "interleaved": interleaved,
    "zb-h1": lambda P, m, v, rank: zb_h(1, P, m, rank),
    "zb-h2": lambda P, m, v, rank: zb_h(2, P, m, rank),
    "zb-v": lambda P, m, v, rank: zb_v(P, m, rank),
}


def placement(name, P, v=1):
    """Rank that owns each virtual stage. zb-v goes down the ranks and back up, so that rank 0 has
    both the first and the last stage; all others go round (stage s on rank s % P)."""
    return [*range(P), *reversed(range(P))] if name == "zb-v" else [s % P for s in range(P * v)]


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
    where, lists = placement(name, P, v), []
    for rank in range(P):
        stages = [s for s, owner in enumerate(where) if owner == rank]
        nth, actions = Counter(), []
        for token in SCHEDULES[name](P, m, v, rank).split():
            actions.append(Action(token[0], stages[int(token[1:])], nth[token]))
            nth[token] += 1
        lists.append([a for a in actions if a.microbatch < m])
    return lists


def needs(action, last_stage):
    """The actions that must have happened before this one; B stands for B or I, whichever gives the
    input gradient. A send and its receive need each other to have been reached: a rendezvous."""
    kind, s, k = action
    if kind in PEER:
        peer, offset = PEER[kind]
        own = [Action(kind[1], s, k)] if kind[0] == "S" else []
        return own + [Action(peer, s + offset, k)]
    if kind == "F":
        return [Action("F", s - 1, k)] if s > 0 else []
    if kind == "W":
        return [Action("B", s, k)]
    return [Action("F", s, k)] + ([Action("B", s + 1, k)] if s < last_stage else [])


def walk(lists, where, costs=(1, 1, 1, 0)):
    """Yields (rank, action, start, end), ordered by start, each action as early as its list and its
    needs allow. Without sends in the lists, data takes comm to cross ranks and blocks nobody; with
    them, sends and receives block. ValueError if the lists come to a halt."""
    f, b, w, comm = costs
    cost = {"F": f, "B": b + w, "I": b, "W": w, "RF": comm, "RB": comm, "SF": 0, "SB": 0}
    lowered = any(a.kind in PEER for actions in lists for a in actions)
    free, cursor = [0] * len(lists), [0] * len(lists)
    done, ready, waiting = {}, [], defaultdict(list)  # waiting: action -> ranks held up by it

    def happened(action, time):
        key = Action("B", *action[1:]) if action.kind == "I" else action
        done[key] = time
        for rank in waiting.pop(key, ()):
            look(rank)

    def look(rank):  # queue the rank's next action, or note what it waits for
        if cursor[rank] == len(lists[rank]):
            return
        action, start = lists[rank][cursor[rank]], free[rank]
        if action.kind in PEER and action not in done:
            happened(action, start)  # posted, which is what its peer needs
        for need in needs(action, len(where) - 1):
            away = where[need.stage] != rank and action.kind not in PEER
            if away and lowered:
                need = Action("R" + need.kind, *action[1:])
            if need not in done:
                waiting[need].append(rank)
                return
            start = max(start, done[need] + comm * away)
        heappush(ready, (start, rank))

    for rank in range(len(lists)):
        look(rank)
    while ready:
        start, rank = heappop(ready)
        action = lists[rank][cursor[rank]]
        cursor[rank] += 1
        free[rank] = start + cost[action.kind]
        yield rank, action, start, free[rank]
        if action.kind not in PEER:
            happened(action, free[rank])
        look(rank)
    stuck = [(where[need.stage] != r, r, need) for need, ranks in waiting.items() for r in ranks]
    if stuck:  # a rank that waits for itself is the cause; otherwise they wait in a circle
        elsewhere, _, _ = min(stuck)
        raise ValueError(("deadlock: " if elsewhere else "misordered: ") + "; ".join(
            f"rank {r} at {lists[r][cursor[r]]} waits for {need}" for e, r, need in sorted(stuck)
            if e == elsewhere))


def transfers(action, where):
    """The send and the receive that take an action's result to another rank; () if it stays."""
    kind, s, k = action
    kind, to = ("F", s + 1) if kind == "F" else ("B", s - 1)
    if action.kind == "W" or not 0 <= to < len(where) or where[to] == where[s]:
        return ()
    return Action("S" + kind, s, k), Action("R" + kind, to, k)


def lower(lists, where):
    """The same lists with sends and receives put in; none between stages that share a rank."""
    # Send and receive enter both lists at one moment, the end of the action that made the data. So
    # every list is a subsequence of one global order, and the earliest entry of it still to be done
    # is at the head of every list that holds it: it can run, even if sends and receives block.
    events = []
    for _, action, start, end in walk(lists, where):
        events.append((start, 1, action))
        events += [(end, 0, a) for a in transfers(action, where)]
    lowered = [[] for _ in lists]
    for _, _, action in sorted(events, key=lambda e: e[:2]):  # stable: a pair stays together
        lowered[where[action.stage]].append(action)
    return lowered


def validate(lists, where):
    """ValueError, naming rank and action, unless every stage runs every microbatch once, on its own
    rank, after all it needs, and nobody waits forever when sends and receives block. Lists without
    sends are lowered first; lists with sends are taken as they stand."""
    got = Counter((rank, a) for rank, actions in enumerate(lists) for a in actions)
    split = {(a.stage, a.microbatch) for _, a in got if a.kind in ("I", "W")}
    lowered = any(a.kind in PEER for _, a in got)
    want = set()
    for k in range(1 + max((a.microbatch for _, a in got), default=0)):
        for s in range(len(where)):
            for kind in "FIW" if (s, k) in split else "FB":
                action = Action(kind, s, k)
                with_it = transfers(action, where) if lowered else ()
                want |= {(where[a.stage], a) for a in (action, *with_it)}
    for rank, a in sorted(want | set(got)):
        if (rank, a) not in want:
            raise ValueError(f"rank {rank}: {a} is misplaced")
        if got[rank, a] != 1:
            raise ValueError(f"rank {rank}: {a} is {'doubled' if got[rank, a] else 'missing'}")
    for _ in walk(lists if lowered else lower(lists, where), where):
        pass


def cut(costs, n):
    """[start, stop) of n consecutive slices of the layers, none empty, such that the costliest is
    as cheap as can be: a stage waits for the slowest one."""
    total = list(accumulate(costs, initial=0))
    best = {(0, 0): (0, [])}  # (slices, layers in them) -> (costliest, the cuts)
    for k in range(1, n + 1):
        for stop in range(k, len(costs) - n + k + 1):
            best[k, stop] = min(
                (max(best[k - 1, i][0], total[stop] - total[i]), [*best[k - 1, i][1], (i, stop)])
                for i in range(k - 1, stop) if (k - 1, i) in best)
    return best[n, len(costs)][1]


class Timeline(NamedTuple):
    times: list  # per rank: (action, start, end), sends and receives left out
    makespan: float  # the largest over ranks of (last end - that rank's first start)
    bubble: float  # (makespan - m(F+B+W)) / makespan
    peak_in_flight: list  # per rank: most (stage, microbatch) activations alive at once


def simulate(lists, where, costs=(1, 1, 1, 0)):
    """Times the lists for costs F, B, W (one microbatch through all of a rank's stages, each of v
    takes 1/v) and comm (latency between ranks). An activation is in flight from its F to the end of
    its B, or of its W where the backward is split. Integer costs give exact figures."""
    if len(costs) != 4 or not all(0 <= c < float("inf") for c in costs) or 0 in costs[:3]:
        raise ValueError(f"--costs {','.join(map(str, costs))} must be F,B,W,comm, finite, "
                         "the first three above 0; try 1,1,1,0")
    f, b, w, comm = costs
    v = len(where) // len(lists)
    times, alive, peak = [[] for _ in lists], [0] * len(lists), [0] * len(lists)
    for rank, action, start, end in walk(lists, where, (f, b, w, comm * v)):  # in units of 1/v
        if action.kind not in PEER:
            times[rank].append((action, start, end))
            alive[rank] += {"F": 1, "I": 0}.get(action.kind, -1)
            peak[rank] = max(peak[rank], alive[rank])
    span = max(row[-1][2] - row[0][1] for row in times)
    work = (1 + max(a.microbatch for a, _, _ in times[0])) * v * (f + b + w)
    times = [[(a, start / v, end / v) for a, start, end in row] for row in times]
    return Timeline(times, span / v, max(0, span - work) / span, peak)


def run(actions, stages, where, group, batches, shape, dtype, reducer, deferred, tokens, scale=1.0,
        span=no_span):
    """Executes one rank's lowered list. A list of forwards only runs without gradients.

    stages: {stage: module}, this rank's own; module(x) -> (b, S, C), the last module(x, targets) ->
    summed loss. batches: (ids, targets) per microbatch, the same on every rank of the group.
    shape, dtype: of an activation. The loss is divided by `tokens`, the global count, before
    backward; `scale` multiplies the gradients (float16). reducer: DDP or ZeRO, told before and
    after each action. deferred: where linear layers leave their weight gradients between I and W.
    span(name, ...): a context for whoever traces.
    Returns the sum of this rank's losses, over tokens: 0 but on the rank of the last stage.
    """
    final = {a.stage: i for i, a in enumerate(actions) if a.kind in "BW"}
    inputs, outputs, grads, weight_grads, sent = {}, {}, {}, {}, deque()
    loss = torch.zeros((), dtype=torch.double, device=group.device)

    coming = iter([a for a in actions if a.kind in ("RF", "RB")])

    def receive():  # the next one in the list, into a buffer of its own
        for kind, s, k in islice(coming, 1):
            store, src = (inputs, s - 1) if kind == "RF" else (grads, s + 1)
            buffer = torch.empty(shape, dtype=dtype, device=group.device)
            store[s, k] = buffer, group.recv(buffer, where[src]), src

    def send(tensor, s, k, to):
        with span("send", stage=s, microbatch=k, to=to):
            sent.append((group.send(tensor, where[to]), tensor))
            while len(sent) > 2:
                settle()

    def settle():
        work, tensor = sent.popleft()
        with span("wait", group="pp"):
            work.wait()
        tensor.untyped_storage().resize_(0)  # backward needs an output's graph, not its numbers

    def take(store, s, k):
        tensor, work, sender = store.pop((s, k))
        with span("wait", stage=s, microbatch=k, sender=sender):
            work.wait()
        return tensor

    def forward(s, k):
        x = take(inputs, s, k).requires_grad_(bool(final)) if s else batches[k][0]
        if s < len(where) - 1:
            y = stages[s](x).contiguous()
            if where[s + 1] == group.rank:
                inputs[s + 1, k] = y.detach(), Work(), s
        else:
            y = stages[s](x, batches[k][1]) / tokens
            loss.add_(y.detach())
            grads[s, k] = torch.full_like(y, scale), Work(), s
        if final or transfers(Action("F", s, k), where):
            outputs[s, k] = x, y

    def backward(s, k):
        x, y = outputs.pop((s, k))
        torch.autograd.backward(y, take(grads, s, k))
        if s and where[s - 1] == group.rank:
            grads[s - 1, k] = x.grad, Work(), s
        elif s:
            inputs[s, k] = x.grad

    if group.device.type == "cpu":  # one ahead of the list: gloo's send waits for its receive
        receive()
    for i, (kind, s, k) in enumerate(actions):
        if kind in ("RF", "RB"):
            receive()
        elif kind == "SF":
            _, y = outputs[s, k] if final else outputs.pop((s, k))
            send(y.detach(), s, k, s + 1)
        elif kind == "SB":
            send(inputs.pop((s, k)), s, k, s - 1)
        else:
            work = weight_grads.pop((s, k)) if kind == "W" else None
            reducer.before(kind, s, i == final.get(s), work and deferred.params(work))
            recorded = bool(final) and kind != "W"
            with span(kind, stage=s, microbatch=k), torch.set_grad_enabled(recorded):
                if kind == "F":
                    forward(s, k)
                elif kind == "B":
                    backward(s, k)
                elif kind == "I":
                    with deferred.collect() as weight_grads[s, k]:
                        backward(s, k)
                elif kind == "W":
                    for param in deferred.run(work):
                        reducer.ready(param)
            reducer.after(kind, s, i == final.get(s))
    while sent:
        settle()
    return loss


COLORS = {"F": (44, "#6aa0e8"), "B": (42, "#6cc08b"), "I": (42, "#6cc08b"), "W": (43, "#e8b04a")}


def draw(timeline, width=160, color=False):
    """Text, one row per rank, time from left to right, as wide as fits: F3 B3 I3 W3 for microbatch
    3, in lower case on every second chunk. Where narrow, F is the microbatch's last digit, B and I
    the letter for it (a is 0), W a w. A dot is idle time."""
    actions = [entry for row in timeline.times for entry in row]
    total, unit = max(end for *_, end in actions), min(end - start for _, start, end in actions)
    wide, width = 2 + max(len(str(a.microbatch)) for a, _, _ in actions), width - 8
    cell = next((c for c in (wide, 1) if c * total / unit <= width), width * unit / total)
    rows = []
    for rank, row in enumerate(timeline.times):
        line, at = f"rank {rank:<3}", 0
        for (kind, stage, k), start, end in row:
            left, right = round(start * cell / unit), round(end * cell / unit)
            text = {"F": str(k % 10), "W": "w"}.get(kind, "abcdefghij"[k % 10]) * (right - left)
            if cell == wide:
                name = kind.lower() if stage // len(timeline.times) % 2 else kind
                text = f"{name}{k}".ljust(right - left - 1, "-").ljust(right - left)
            shown = f"\033[30;{COLORS[kind][0]}m{text}\033[0m" if color else text
            line += "." * (left - at) + shown
            at = right
        rows.append(line + "." * (round(total * cell / unit) - at))
    return "\n".join(rows)


def svg(timeline):
    """The same picture for a page, later chunks paler."""
    P, scale = len(timeline.times), 1200 / max(row[-1][2] for row in timeline.times)
    shapes = []
    for rank, row in enumerate(timeline.times):
        y = 24 * rank
        shapes.append(f'<text x="2" y="{y + 16}">rank {rank}</text>')
        for (kind, stage, k), start, end in row:
            x, w, pale = 50 + start * scale, (end - start) * scale, 2 / (2 + stage // P)
            shapes.append(f'<rect x="{x:.2f}" y="{y + 2}" width="{w:.2f}" height="20" '
                          f'stroke="white" fill="{COLORS[kind][1]}" opacity="{pale:.2f}"/>')
            if w > 7 * len(str(k)) + 2:
                shapes.append(f'<text x="{x + 2:.2f}" y="{y + 16}">{k}</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1260 {24 * P}" font-size="11" '
            'font-family="sans-serif">\n' + "\n".join(shapes) + "\n</svg>\n")


def closed_form(name, P, m, v, costs):
    """The published bubble rate, or None where what it assumes does not hold: comm is 0; zb-h1 and
    zb-h2 also take W <= F and enough microbatches to fill the pipe, zb-v equal costs."""
    f, b, w, comm = costs
    depth = {"zb-h1": 1, "zb-h2": 2, "zb-v": 2}.get(name, 0)
    idle = (P - 1) * (f + b + (w, -w, -2 * w)[depth])
    holds = comm == 0 <= idle and (depth == 0 or w <= f and m > depth * (P - 1))
    if not holds or name == "zb-v" and not f == b == w:
        return None
    return idle / (idle + m * (f + b + w) * (v if name == "interleaved" else 1))


def numbers(text):
    return tuple(int(x) if x.is_integer() else x for x in map(float, text.split(",")))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"pipeline.py: {message}\n")
    parser.add_argument("schedule", nargs="?", default="1f1b", help=", ".join(SCHEDULES))
    parser.add_argument("P", type=int, help="ranks")
    parser.add_argument("m", type=int, help="microbatches")
    parser.add_argument("--chunks", type=int, default=1, metavar="v", help="stages per rank")
    parser.add_argument("--costs", type=numbers, default=(1, 1, 1, 0), metavar="F,B,W,comm")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--compare", action="store_true", help="every schedule, one line each")
    output.add_argument("--json", action="store_true", help="print the figures only")
    output.add_argument("--svg", metavar="FILE", help="write the picture there as well")
    args = parser.parse_args()
    P, m = args.P, args.m
    width, color = min(160, shutil.get_terminal_size((120, 24)).columns), sys.stdout.isatty()
    for name in SCHEDULES if args.compare else [args.schedule]:
        v = args.chunks
        if args.compare:
            v = max(2, v) if name == "interleaved" else 1
        try:
            lists, where = make_schedule(name, P, m, v), placement(name, P, v)
            validate(lists, where)
            t = simulate(lists, where, args.costs)
            if args.svg:
                with open(args.svg, "w") as file:
                    file.write(svg(t))
        except (ValueError, OSError) as error:
            if not args.compare or name == "gpipe":  # gpipe takes any P and m
                parser.error(error)
            print(f"{name:11}  skipped: {error}")
            continue
        if args.json:
            print(json.dumps(dict(zip(t._fields[1:], t[1:], strict=True))))
            continue
        cuts = sum(a != b for a, b in pairwise(where))
        if not args.compare:
            print(draw(t, width, color))
            print(f"{cuts} boundaries between ranks; each carries {m} activations and {m} gradients"
                  " of b S C elements, for microbatches of b sequences")
        formula = closed_form(name, P, m, v, args.costs)
        formula = "     -" if formula is None else f"{formula:6.2%}"
        chunks = f" of 1/{len(where) // P} rank each" if len(where) > P else ""
        print(f"{name:11}  makespan {t.makespan:<8.6g} bubble {t.bubble:6.2%}  formula {formula}  "
              f"in flight {t.peak_in_flight}{chunks}")


if __name__ == "__main__":
    main()
