"""Traces where the time of a step goes, on every rank, by rank 0's clock.

A Tracer records spans: F, B, I, W of each stage and microbatch, sends, waits, collectives, the
optimizer. Rank 0 writes the spans of all ranks in Chrome's trace format, for ui.perfetto.dev, and
sums them up per rank, beside engine.schedules.simulate with the measured F, B and W.

    compute   inside F, B, I, W and the optimizer, less their waits
    exposed   waits for collectives, for sends, and for data that had been sent
    bubble    waits for data whose sender had not started to send it
    other     the rest: Python between actions, reading batches

    torchrun train.py --pp 2 --trace trace.json
"""

import json
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.schedules import simulate
from mesh import lay_out
from run.processes import all_gather_text

ACTIONS = ("F", "B", "I", "W")


def ahead_of_rank_0(group, pings=8):
    """Seconds by which this rank's clock is ahead, from the fastest of some pings: rank 0 read its
    own clock half-way between question and answer."""
    message, found = torch.zeros(1, dtype=torch.double, device=group.device), []
    for peer in range(1, group.size):
        for _ in range(pings):
            if group.rank == 0:
                group.recv(message, peer).wait()
                group.read(message)
                message.fill_(time.time())
                group.send(message, peer).wait()
            elif group.rank == peer:
                asked = time.time()
                group.send(message, 0).wait()
                group.recv(message, 0).wait()
                answer, = group.read(message)
                answered = time.time()
                found.append((answered - asked, (asked + answered) / 2 - answer))
    return min(found, default=(0.0, 0.0))[1]


class Tracer:
    """The spans of one rank. Making a Tracer is a collective."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.events = []  # [name, lane, start, end, args], in seconds of rank 0's clock
        self.step = None  # that is traced
        self.ahead = ahead_of_rank_0(mesh.world)

    @contextmanager
    def span(self, name, **args):
        lane = threading.current_thread().name
        lane = lane if lane.startswith("ring-") else "main"  # autograd's thread counts as main
        event = [name, lane, self.now(), None, {**args, "step": self.step}]
        self.events.append(event)
        yield
        event[3] = self.now()

    def now(self):
        # The end of the work on this stream; a wait for another stream is a span of its own. While
        # tracing, nothing overlaps.
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream(self.mesh.device).synchronize()
        return time.time() - self.ahead

    @contextmanager
    def at(self, step):
        """Record the spans inside of this context, as those of a step."""
        self.step, self.mesh.span = step, self.span
        yield
        del self.mesh.span  # Mesh's own, again


def write_chrome(path, every):
    """Chrome's trace format: a process per rank, a lane per thread, microseconds."""
    records = []
    for rank, events in enumerate(every):
        for name, lane, start, end, args in events:
            label = f"{name} {args['microbatch']}" if name in ACTIONS else name
            records.append({"name": label, "cat": name, "ph": "X", "pid": rank, "tid": lane,
                            "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args})
    Path(path).write_text(json.dumps({"traceEvents": records}))


def shares(every, rank_of_stage):
    """(per rank {"compute", "exposed", "bubble", "other"}, {kind: mean seconds of an action}).

    every: the events of each rank in the order of their starts. rank_of_stage(rank, stage): the
    rank that runs the stage in this rank's replica, to match a wait with the send of its data.
    """
    sent = {(rank, args["stage"], args["to"], args["microbatch"], args["step"]): start
            for rank, events in enumerate(every)
            for name, _, start, _, args in events if name == "send"}
    rows, actions = [], defaultdict(list)  # kind -> the seconds of each, less its waits
    for rank, events in enumerate(every):
        main = [event for event in events if event[1] == "main"]
        row = {"compute": 0.0, "exposed": 0.0, "bubble": 0.0}
        waited_until = acts_until = 0.0
        for name, _, start, end, args in main:
            took = end - start
            if name in (*ACTIONS, "optimizer"):
                current, acts_until = actions[name], end
                current.append(took)
                row["compute"] += took
            elif name not in ("send", "attention") and end > waited_until:
                waited_until = end  # a wait inside of this wait is counted with it
                late = 0.0
                if "sender" in args:
                    sender, *key = (args[k] for k in ("sender", "stage", "microbatch", "step"))
                    at = sent.get((rank_of_stage(rank, sender), sender, *key), start)
                    late = min(max(at - start, 0.0), took)
                row["bubble"] += late
                row["exposed"] += took - late
                if end <= acts_until:  # inside of the current action
                    current[-1] -= took
                    row["compute"] -= took
        row["other"] = max(event[3] for event in main) - main[0][2] - sum(row.values())
        rows.append(row)
    return rows, {kind: sum(times) / len(times) for kind, times in actions.items()}


def report(path, tracer, mesh, lists, where):
    """Collective. Rank 0 writes the file and returns the text to print, the others None."""
    every = all_gather_text(json.dumps(tracer.events), mesh.world)
    if mesh.rank > 0:
        return None
    every = [json.loads(text) for text in every]
    try:
        write_chrome(path, every)
    except OSError as error:
        path = f"{path}: LOST, {error.strerror}"
    pipeline = {rank: ranks for ranks in lay_out(mesh.sizes, ["pp"]) for rank in ranks}
    rows, mean = shares(every, lambda rank, stage: pipeline[rank][where[stage]])
    steps = {event[4]["step"] for event in every[0]}
    lines = [f"trace of {len(steps)} steps of all ranks in {path}",
             "rank      compute   exposed    bubble     other   of the time"]
    for rank, row in enumerate(rows):
        total = sum(row.values())
        parts = "".join(f"{part / total:10.1%}" for part in row.values())
        lines.append(f"{rank:4d}   {parts}   {1e3 * total:.0f} ms")
    measured = 0.0  # mean seconds from first to last action of a step, on the slowest rank
    for step in steps:
        acts = [[e for e in events if e[0] in ACTIONS and e[4]["step"] == step] for events in every]
        measured += max(a[-1][3] - a[0][2] for a in acts) / len(steps)
    chunks = len(where) // len(lists)
    f, b, i, w = (chunks * mean.get(kind, 0.0) for kind in ACTIONS)
    # A B that is not split counts half as I and half as W: only the sum of the two matters
    t = simulate(lists, where, (f, i + b / 2, w + b / 2, 0))
    lines.append(f"pipeline: {1e3 * measured:.1f} ms a step measured, {1e3 * t.makespan:.1f} ms "
                 f"simulated from F {1e3 * f:.2f}, B {1e3 * (b + i + w):.2f} ms, with a bubble of "
                 f"{t.bubble:.1%}: ratio {measured / t.makespan:.2f}")
    return "\n".join(lines)
