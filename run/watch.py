"""--watch: a line for every message of the first step, in the order of the step.

    origin     which function asked for a message, read from the call stack
    Watch      notes what one rank sends and waits for in a step
    ticks      puts the notes of all ranks in one order
    tell       the lines

The order is that of a clock that counts messages (Lamport 1978): a message has tick 3 if 3 messages
had to arrive, one after the other, before its rank could send it. Computing takes no ticks. So the
lines are the same in every run.

    torchrun train.py --dp 2 --tp 2 --pp 2 --watch        --watch 3: one rank        --watch tp
"""

import json
import sys
import threading
from collections import Counter, deque
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from group import wait_all
from mesh import DATA
from run.processes import all_gather_text


class Sent(NamedTuple):
    key: str  # the same on the sender and on the receiver
    src: int  # ranks of the world
    dst: int
    axis: str  # by axis_of()
    what: str  # by origin()
    shape: list
    nbytes: int


# ---- who asked for a message ----

ROOT = Path(__file__).parent.parent  # the repository
# These files, and torch, carry messages for the functions of other files
COLLECTIVES = [str(ROOT / name) for name in ("collectives.py", "engine/collectives.py")]
GROUPS = [str(ROOT / name) for name in (
    "group.py", "engine/group.py", "engine/nccl_group.py", "run/watch.py")]
TORCH = f"{Path(torch.__file__).parent}/"


def qualified_name(code):
    """A function's name, behind those of its class and of the functions around it:
    "DDP.gradients"; "gather_weight.backward" for a backward() inside of gather_weight();
    "sum_over_ranks" for a lambda in sum_over_ranks(). (Python 3.10 knows the last part only, and a
    lambda is "<lambda>".)"""
    full = getattr(code, "co_qualname", code.co_name)  # "gather_weight.<locals>.backward"
    return ".".join(part for part in full.split(".") if part[0] != "<") or code.co_name


def origin(carrier=""):
    """Which collective sends the message, and which function called the collective, read from the
    call stack: "all_reduce, ddp.py DDP.gradients". The end of this stack, the innermost call last:

        DDP.gradients                    ddp.py            the innermost call of another file
        all_reduce                       collectives.py    the outermost collective inside of it
        reduce_scatter                   collectives.py
        exchange, note, message, origin  run/watch.py

    Without a collective: the group's method, send or exchange. carrier: the name of the collective,
    if the caller knows it."""
    frame = sys._getframe(1)
    collective = method = ""
    while frame:
        path = frame.f_code.co_filename
        if path in COLLECTIVES:
            collective = frame.f_code.co_name
        elif path in GROUPS:
            method = frame.f_code.co_name
        elif not path.startswith(TORCH):
            break
        frame = frame.f_back
    carrier = carrier or collective or method
    if frame is None:  # a thread of autograd, on a GPU: its stack begins in torch
        return carrier
    file = path.removeprefix(f"{ROOT}/")
    return f"{carrier}, {file} {qualified_name(frame.f_code)}"


# ---- note ----


def axis_of(group, sizes):
    """The axes along which the ranks of a group differ, under the names of train.py's flags: "tp",
    or "dp+cp" for several. The mesh splits --dp into three axes (DATA in mesh.py), each of which is
    "dp" here. One exception: a group along ep alone, the ranks that share the experts, is "ep"."""
    names = group.name.split("_")  # such as shard_ep_cp, pp_ends, world
    if names == ["ep"]:
        return "ep"
    axes = []
    for axis, size in sizes.items():
        is_data = axis in DATA
        in_group = names == ["world"] or axis in names or (is_data and "dp" in names)
        if size > 1 and in_group:
            axes.append("dp" if is_data else axis)
    return "+".join(axis for axis in ("dp", "pp", "cp", "tp") if axis in axes)


def watched(group_class, watch):
    """A subclass of group_class, which is the root's Group or one of engine/'s. Its groups report
    each message and each job to `watch`."""

    class Watched(group_class):

        def exchange(self, send=None, dst=None, recv=None, src=None, **options):
            # A group of engine/ has a thread, which sends the messages of submitted jobs. Let it
            # send them before this message is numbered: key() counts in the order of sending
            if hasattr(self, "wait_for_jobs"):
                self.wait_for_jobs()
            ends = [(send, dst, recv, src), *options.get("more", ())]  # more: an option of engine/
            keys = watch.note(self, ends)
            work = super().exchange(send, dst, recv, src, **options)
            # work.wait() calls the functions in waits, in order. The last one notes that these
            # messages have arrived
            work.waits = [*work.waits, partial(watch.awaited, keys, 1)]
            return work

        # Only groups of engine/ have submit(). A thread of the group runs the job; on a GPU the
        # rank's own thread runs it, at once
        def submit(self, job, name):
            # origin(name) here, because the job's thread has another stack
            job, ended = watch.job(self, origin(name), job)
            work = super().submit(job, name)
            work.waits = [*work.waits, partial(watch.awaited, [ended], 0)]
            watch.submitted.append(work)
            return work

    return Watched


class Watch:
    """One rank's notes of a step. Each thread has a list of its events, of two kinds:

        ("did", key, 0)          the thread sent a message, or submitted or ended a job
        ("awaited", key, n)      the thread waited for the event `key`. From here on its clock
                                 shows at least the tick of that event + n; n is 1 for a message,
                                 0 for a job
    """

    def __init__(self, mesh):
        self.mesh = mesh
        self.sent = {}  # key -> Sent, of this rank
        # The events of each thread. Key "": the rank's own thread; the name of a group: its thread
        self.lanes = {"": []}
        self.numbers = Counter()  # messages so far, by group, sender and receiver
        self.submitted = []  # the Works of jobs
        # In a thread that runs a job: here.events, its list in lanes, and here.what, of the job's
        # messages. Else both are unset
        self.here = threading.local()

    @contextmanager
    def step(self):
        """Note what this rank sends in this context: meanwhile the mesh's groups are Watched."""
        usual = self.mesh.group_class
        self.become(watched(usual, self))
        yield
        wait_all(self.submitted)
        self.become(usual)

    def become(self, group_class):
        self.mesh.group_class = group_class  # for groups that are made during the step
        for group in self.mesh.groups.values():
            group.__class__ = group_class

    def did(self, key):
        getattr(self.here, "events", self.lanes[""]).append(("did", key, 0))

    def awaited(self, keys, ticks):
        events = getattr(self.here, "events", self.lanes[""])
        events += [("awaited", key, ticks) for key in keys]

    def key(self, group, src, dst):
        """A name for the next message from one rank of a group to another. Both ranks count the
        messages between them; these arrive in the order of sending, so both find the same name."""
        pair = f"{group.name} {group.ranks[src]} -> {group.ranks[dst]}"
        self.numbers[pair] += 1
        return f"{pair} {self.numbers[pair]}"

    def note(self, group, ends):
        """Note a call of exchange(). ends: [(send, dst, recv, src)] of the call, several if it has
        the option `more`. Returns the keys of the messages that its Work waits for."""
        keys = []
        for send, dst, recv, src in ends:
            if recv is not None and recv.numel() > 0:
                keys.append(self.key(group, src, group.rank))
            if send is not None and send.numel() > 0:
                keys.append(self.key(group, group.rank, dst))
                self.did(keys[-1])
                self.sent[keys[-1]] = self.message(keys[-1], group, send, dst)
        return keys

    def message(self, key, group, send, dst):
        what = getattr(self.here, "what", "") or origin()
        return Sent(key, self.mesh.rank, group.ranks[dst], axis_of(group, self.mesh.sizes), what,
                    list(send.shape), send.numel() * send.element_size())

    def job(self, group, what, run):
        """Returns (job, key). job() calls run(), and notes its beginning and its end. key: the
        name of the end's event. what: of the job's messages."""
        name = f"job {len(self.submitted)} of rank {self.mesh.rank}"
        self.did(f"submit {name}")

        def job():
            before = vars(self.here).copy()  # restored below: the rank's own thread may run the job
            self.here.events = self.lanes.setdefault(group.name, [])
            self.here.what = what
            self.awaited([f"submit {name}"], 0)
            run()
            self.did(f"end {name}")
            vars(self.here).clear()
            vars(self.here).update(before)

        return job, f"end {name}"

    def story(self, which):
        """Collective: on rank 0 the lines of the step, elsewhere "". which: "all", the number of a
        rank, or an axis."""
        # sorted: the same order in every run, whichever thread was first
        lanes = [self.lanes[name] for name in sorted(self.lanes)]
        sent = [self.sent[key] for lane in lanes for kind, key, _ in lane
                if kind == "did" and key in self.sent]
        texts = all_gather_text(json.dumps([sent, lanes]), self.mesh.world)
        if self.mesh.rank > 0:
            return ""
        messages, threads = [], []
        for of_rank, lanes in map(json.loads, texts):
            messages += [Sent(*message) for message in of_rank]
            threads += lanes
        return tell(messages, ticks(threads), which)


# ---- order ----


def ticks(threads):
    """{key: the tick at which a thread did it}. threads: the events of each thread of each rank."""
    done = {}
    clocks = [0] * len(threads)
    queues = [deque(events) for events in threads]
    while any(queues):
        left = sum(map(len, queues))
        for i, events in enumerate(queues):
            while events:
                kind, key, more = events[0]
                if kind == "did":
                    done[key] = clocks[i]
                elif key in done:
                    clocks[i] = max(clocks[i], done[key] + more)
                else:  # another thread will do it, when its turn comes
                    break
                events.popleft()
        assert sum(map(len, queues)) < left, "a thread waits for an event that no thread has"
    return done


# ---- tell ----


def is_asked(message, which):
    ends = str(message.src), str(message.dst)
    return which == "all" or which in ends or which in message.axis.split("+")


def aligned(rows, left):
    """The rows as lines; the columns whose numbers are in `left` begin on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(width) if i in left else word.rjust(width)
                      for i, (word, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in rows]


def tell(sent, tick, which):
    """The lines of --watch, and the sums of each axis."""
    rows = [("tick", "ranks", "axis", "what", "shape", "bytes")]
    times, nbytes = Counter(), Counter()
    for message in sorted(sent, key=lambda message: tick[message.key]):
        if is_asked(message, which):
            rows.append((str(tick[message.key]), f"{message.src} -> {message.dst}", message.axis,
                         message.what, "x".join(map(str, message.shape)), f"{message.nbytes:,}"))
            times[message.axis] += 1
            nbytes[message.axis] += message.nbytes
    sums = [f"{axis}: {times[axis]:,} messages, {nbytes[axis]:,} bytes" for axis in sorted(times)]
    return "\n".join([*aligned(rows, left=(2, 3)), *sums])
