"""Traces where the time of a step goes, on every rank, by rank 0's clock.

A Tracer records spans (name, start, end): F, B, I, W of each stage and microbatch, sends, waits,
collectives, the optimizer. Rank 0 writes the spans of all ranks in Chrome's trace format, for
ui.perfetto.dev. report() also returns a text that train.py prints: each rank's time in four shares,
and the pipeline's time next to the time that simulate() (schedules.py) computes from the measured
F, B and W.

    compute   inside F, B, I, W and the optimizer, less their waits
    exposed   waits for collectives, for sends, and for data that had been sent
    bubble    waits for data whose sender had not started to send it
    other     the rest: Python between actions, reading batches

    torchrun train.py --pp 2 --trace trace.json
"""

import json
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from mesh import lay_out
from run.config import MARKS
from run.files import refuse_foreign
from run.processes import all_gather_text
from schedules import simulate

ACTIONS = ("F", "B", "I", "W")


# ---- record ----


def ahead_of_rank_0(group, pings=8):
    """Collective: seconds by which this rank's clock is ahead of rank 0's.

    A rank asks rank 0 for the time, and assumes that rank 0 read its clock half-way between
    question and answer. The fastest of some pings counts. A rank that asks at 100.0, and at 100.2
    has the answer 99.6, is ahead by 100.1 - 99.6 = 0.5."""
    message = torch.zeros(1, dtype=torch.double, device=group.device)
    found = []  # (seconds that the ping took, seconds ahead)
    for peer in range(1, group.size):
        for _ in range(pings):
            if group.rank == 0:
                group.recv(message, peer).wait()
                group.read(message)  # on a GPU recv() does not wait for the question, read() does
                message.fill_(time.time())
                group.send(message, peer).wait()
            elif group.rank == peer:
                asked = time.time()
                group.send(message, 0).wait()
                group.recv(message, 0).wait()
                answer, = group.read(message)
                answered = time.time()
                found.append((answered - asked, (asked + answered) / 2 - answer))
    _, ahead = min(found, default=(0.0, 0.0))  # rank 0 sends no pings
    return ahead


class Tracer:
    """The spans of one rank. Making a Tracer is a collective."""

    def __init__(self, mesh):
        self.mesh = mesh
        # [name, lane, start, end, args], sorted by start; start, end: seconds of rank 0's clock
        self.events = []
        self.step = None  # the step that is being traced
        # Seconds by which this rank's clock is ahead of rank 0's
        self.ahead = ahead_of_rank_0(mesh.world)

    @contextmanager
    def span(self, name, **args):
        """Record the time that this context takes. Replaces Mesh.span while a step is traced."""
        lane = threading.current_thread().name
        if not lane.startswith("ring-"):  # Group.submit calls a group's thread ring-NAME
            lane = "main"  # also autograd's thread, while the main thread waits for it
        event = [name, lane, self.now(), None, {**args, "step": self.step}]
        self.events.append(event)
        yield
        event[3] = self.now()

    def now(self):
        """Seconds of rank 0's clock. On a GPU: wait for this thread's stream first, so that a span
        ends when its work does. (So nothing overlaps while a GPU is traced: a collective on a
        stream of its own is waited for, too, in its span.)"""
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream(self.mesh.device).synchronize()
        return time.time() - self.ahead

    @contextmanager
    def at(self, step, optimizer):
        """Record the spans inside this context, as spans of `step`; optimizer.step() is one."""
        def recorded(*args, usual=optimizer.step):
            with self.span("optimizer"):
                usual(*args)

        self.step = step
        # These hide the methods of the classes, which record nothing
        self.mesh.span = self.span
        optimizer.step = recorded
        yield
        del self.mesh.span, optimizer.step


# ---- evaluate ----


class Span(NamedTuple):
    """An event of a Tracer."""
    name: str
    lane: str
    start: float
    end: float
    args: dict

    @property
    def seconds(self):
        return self.end - self.start


def write_chrome(path, every):
    """Chrome's trace format: a process per rank, a lane per thread, microseconds. every: the events
    of each rank."""
    records = []
    for rank, events in enumerate(every):
        for name, lane, start, end, args in events:
            label = f"{name} {args['microbatch']}" if name in ACTIONS else name
            records.append({"name": label, "cat": name, "ph": "X", "pid": rank, "tid": lane,
                            "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args})
    refuse_foreign("--trace", path, MARKS["trace"])  # again: it may be another file by now
    Path(path).write_text(json.dumps({"traceEvents": records}))


def actions_and_waits(spans):
    """The main thread's spans in two lists: F, B, I, W and the optimizer; and the waits, among them
    collectives, that do not lie inside another wait."""
    actions = []
    waits = []
    for span in spans:
        if span.name in (*ACTIONS, "optimizer"):
            actions.append(span)
        elif span.name not in ("send", "attention"):  # if these wait, the wait has its own span
            inside_last = waits and span.end <= waits[-1].end
            if not inside_last:
                waits.append(span)
    return actions, waits


def shares(every, rank_of_stage):
    """(per rank {"compute", "exposed", "bubble", "other"} in seconds, {kind: mean seconds of an
    action, without its waits}).

    every: the events of each rank in the order of their starts. rank_of_stage(rank, stage): the
    rank that runs the stage in this rank's pipeline, to match a wait with the send of its data."""
    every = [[Span(*event) for event in events] for events in every]
    sent = {}  # (rank, stage, to stage, microbatch, step) -> when this send started
    for rank, spans in enumerate(every):
        for span in spans:
            if span.name == "send":
                args = span.args
                key = rank, args["stage"], args["to"], args["microbatch"], args["step"]
                sent[key] = span.start

    def seconds_until_sent(rank, wait):
        """How much of a wait passed before the data was sent: 0 if the wait is for no data."""
        args = wait.args
        if "sender" not in args:
            return 0.0
        sender_rank = rank_of_stage(rank, args["sender"])
        key = sender_rank, args["sender"], args["stage"], args["microbatch"], args["step"]
        # A stage of the same rank sends no message: nothing to wait for
        sent_at = sent.get(key, wait.start)
        return min(max(sent_at - wait.start, 0.0), wait.seconds)

    rows = []
    seconds_of = defaultdict(list)  # kind -> seconds of each of its actions, without waits
    for rank, spans in enumerate(every):
        main = [span for span in spans if span.lane == "main"]
        actions, waits = actions_and_waits(main)
        # 1. computing: the actions, less the waits inside them
        computing = [action.seconds for action in actions]
        starts = [action.start for action in actions]
        for wait in waits:
            last = bisect_right(starts, wait.start) - 1  # the last action that has begun; -1: none
            if last >= 0 and wait.end <= actions[last].end:
                computing[last] -= wait.seconds
        for action, seconds in zip(actions, computing, strict=True):
            seconds_of[action.name].append(seconds)
        # 2. waiting: bubble until the data was sent, exposed from then on
        row = {"compute": sum(computing), "exposed": 0.0, "bubble": 0.0}
        for wait in waits:
            until_sent = seconds_until_sent(rank, wait)
            row["bubble"] += until_sent
            row["exposed"] += wait.seconds - until_sent
        whole = max(span.end for span in main) - main[0].start
        row["other"] = whole - sum(row.values())
        rows.append(row)
    return rows, {kind: sum(times) / len(times) for kind, times in seconds_of.items()}


def seconds_of_pipeline(every):
    """Mean over the steps: seconds from the first to the last action, on the slowest rank."""
    total = 0.0
    steps = {event[4]["step"] for event in every[0]}
    for step in steps:
        slowest = 0.0
        for events in every:
            actions = [Span(*event) for event in events
                       if event[0] in ACTIONS and event[4]["step"] == step]
            slowest = max(slowest, actions[-1].end - actions[0].start)
        total += slowest
    return total / len(steps)


def report(path, tracer, mesh, lists, where):
    """Collective. Rank 0 writes the file and returns the text to print, the others None. lists: the
    schedule's actions of each pipeline rank; where: the pipeline rank of each stage."""
    texts = all_gather_text(json.dumps(tracer.events), mesh.world)
    if mesh.rank > 0:
        return None
    every = [json.loads(text) for text in texts]
    try:
        write_chrome(path, every)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        path = f"{path}: LOST, {reason}"
    pipeline = {}  # rank -> the ranks of its pipeline
    for ranks in lay_out(mesh.sizes, ["pp"]):
        for rank in ranks:
            pipeline[rank] = ranks
    rows, mean = shares(every, lambda rank, stage: pipeline[rank][where[stage]])
    steps = {event[4]["step"] for event in every[0]}
    lines = [f"trace of {len(steps)} steps of all ranks in {path}",
             "rank      compute   exposed    bubble     other   of the time"]
    for rank, row in enumerate(rows):
        total = sum(row.values())
        parts = "".join(f"{part / total:10.1%}" for part in row.values())
        lines.append(f"{rank:4d}   {parts}   {1e3 * total:.0f} ms")

    # seconds of one microbatch through all stages of a rank, as simulate counts the costs
    stages_per_rank = len(where) // len(lists)
    f, b, i, w = (stages_per_rank * mean.get(kind, 0.0) for kind in ACTIONS)
    # simulate() takes the costs of I and W, and counts their sum as the cost of B. A schedule with
    # whole backwards has measured only B: count half of it as I, half as W. The 0: in the simulated
    # pipeline messages take no time.
    simulated = simulate(lists, where, (f, i + b / 2, w + b / 2, 0))
    measured = seconds_of_pipeline(every)
    lines.append(f"pipeline: {1e3 * measured:.1f} ms a step measured, "
                 f"{1e3 * simulated.makespan:.1f} ms simulated from F {1e3 * f:.2f}, B "
                 f"{1e3 * (b + i + w):.2f} ms, with a bubble of {simulated.bubble:.1%}: ratio "
                 f"{measured / simulated.makespan:.2f}")
    return "\n".join(lines)
