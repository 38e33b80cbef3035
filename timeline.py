"""Where a step's time goes, on every rank, from one clock.

A Tracer records spans: F, B, I, W of each stage and microbatch, sends, waits, collectives (those
under way behind the computation on lanes of their own), optimizer. Rank 0 writes those of all ranks
into one file in Chrome's trace format, for ui.perfetto.dev, and sums them up per rank:

    compute   inside F, B, I, W and the optimizer, less what they wait
    exposed   waits for data that had been sent, for collectives and for sends to be taken
    bubble    waits for data whose sender had not yet got to sending it
    other     the rest: Python between actions, reading batches

beside what pipeline.simulate makes of the measured F, B and W. Off, a span is one call of no_span.

    torchrun train.py --pp 2 --trace trace.json
"""

import json
import threading
import time
from collections import defaultdict
from contextlib import contextmanager

import torch

import pipeline
from collectives import all_reduce, gather, no_span

ACTIONS = ("F", "B", "I", "W")


class Tracer:
    """The spans of one rank: [name, lane, start, end, args], in seconds of the machine's clock."""

    def __init__(self, mesh):
        self.groups = [mesh.dp, mesh.pp, mesh.tp, mesh.tie, mesh.world]
        self.device, self.events, self.step = mesh.world.device, [], None

    @contextmanager
    def span(self, name, **args):
        self.settle()
        lane = threading.current_thread().name
        lane = lane if lane.startswith("ring-") else "main"  # or autograd's thread: one after other
        event = [name, lane, time.time(), None, {**args, "step": self.step}]
        self.events.append(event)
        yield
        self.settle()
        event[3] = time.time()

    def settle(self):
        if self.device.type == "cuda":  # show when work ends; while tracing, nothing overlaps
            torch.cuda.synchronize(self.device)

    def at(self, step, on):
        """Switch tracing on or off for a step; returns the span for the code outside of groups."""
        self.step = step
        for group in self.groups:
            group.span = self.span if on else no_span
        return self.span if on else no_span


def collect(events, group):
    """[the events of each rank] on rank 0 of the group, None elsewhere."""
    data = torch.tensor(list(json.dumps(events).encode()), dtype=torch.uint8, device=group.device)
    size = all_reduce(torch.tensor([len(data)], device=group.device), group, "max").item()
    every = torch.full((group.size, size), ord(" "), dtype=torch.uint8, device=group.device)
    every[group.rank, : len(data)] = data
    gather(every, group)
    if group.rank == 0:
        return [json.loads(row.cpu().numpy().tobytes()) for row in every]


def write(path, every):
    """Chrome's trace format: a process per rank, a lane per thread, microseconds."""
    records = []
    for rank, events in enumerate(every):
        records.append({"name": "process_name", "ph": "M", "pid": rank,
                        "args": {"name": f"rank {rank}"}})
        for name, lane, start, end, args in events:
            label = f"{name} {args['microbatch']}" if name in ACTIONS else name
            records.append({"name": label, "cat": name, "ph": "X", "pid": rank, "tid": lane,
                            "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args})
    with open(path, "w") as file:
        json.dump({"traceEvents": records}, file)


def split(every, rank_of_stage):
    """(per rank {"compute", "exposed", "bubble", "other"}, {kind: mean seconds of an action}).

    every: the events of each rank, of some steps. rank_of_stage(rank, stage): who runs the stage in
    the rank's own replica; a wait is matched with the sending of what it waits for.
    """
    sent = {(rank, a["stage"], a["to"], a["microbatch"], a["step"]): start
            for rank, events in enumerate(every)
            for name, _, start, _, a in events if name == "send"}
    rows, actions = [], defaultdict(list)
    for rank, events in enumerate(every):
        main = [event for event in events if event[1] == "main"]
        outer = [event for event in main if event[0] in (*ACTIONS, "optimizer")]
        busy = [end - start for _, _, start, end, _ in outer]
        bubble = exposed = until = 0.0
        for name, _, start, end, a in main:
            if name in (*ACTIONS, "optimizer", "send") or end <= until:
                continue
            until = end  # what lies inside of this wait is counted with it
            if "sender" in a:
                peer = rank_of_stage(rank, a["sender"])
                at = sent.get((peer, a["sender"], a["stage"], a["microbatch"], a["step"]), 0.0)
                bubble += min(max(at - start, 0.0), end - start)
                exposed -= min(max(at - start, 0.0), end - start)
            exposed += end - start
            for i, o in enumerate(outer):
                if o[2] <= start and end <= o[3]:
                    busy[i] -= end - start
        for event, seconds in zip(outer, busy, strict=True):
            actions[event[0]].append(seconds)
        total = max(end for *_, end, _ in main) - min(start for _, _, start, _, _ in main)
        rows.append({"compute": sum(busy), "exposed": exposed, "bubble": bubble,
                     "other": total - sum(busy) - exposed - bubble})
    return rows, {kind: sum(times) / len(times) for kind, times in actions.items()}


def report(path, tracer, mesh, lists, where):
    """Collective. Rank 0 writes the file and returns the text to print, the others None."""
    every = collect(tracer.events, mesh.world)
    if every is None:
        return None
    write(path, every)
    P, T = mesh.pp.size, mesh.tp.size

    def rank_of_stage(rank, stage):
        return (rank // (P * T) * P + where[stage]) * T + rank % T

    rows, mean = split(every, rank_of_stage)
    steps = {e[4]["step"] for e in every[0]}
    lines = [f"trace of {len(steps)} steps of all ranks in {path}",
             "rank      compute   exposed    bubble     other   of the time"]
    for rank, row in enumerate(rows):
        total = sum(row.values())
        lines.append(f"{rank:4d}   " + "".join(f"{row[k] / total:10.1%}" for k in row)
                     + f"   {1e3 * total:.0f} ms")
    spans = []
    for step in steps:
        acts = [[e for e in events if e[0] in ACTIONS and e[4]["step"] == step] for events in every]
        spans.append(max(a[-1][3] - a[0][2] for a in acts))
    measured = sum(spans) / len(spans)
    v = len(where) // len(lists)
    f, b, w = (v * mean.get(kind, 0.0) for kind in "FIW")
    if "B" in mean:
        b = w = v * mean["B"] / 2
    t = pipeline.simulate(lists, where, (f, b, w, 0))
    lines.append(f"pipeline: {1e3 * measured:.1f} ms a step measured, {1e3 * t.makespan:.1f} ms "
                 f"simulated from F {1e3 * f:.2f}, B + W {1e3 * (b + w):.2f} ms, with a bubble of "
                 f"{t.bubble:.1%}: ratio {measured / t.makespan:.2f}")
    return "\n".join(lines)
