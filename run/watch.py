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
from pathlib import Path
from typing import NamedTuple

from collectives import Group
from mesh import DATA
from run.processes import all_gather_text
from transport.background import Background


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
COLLECTIVES = str(ROOT / "collectives.py")
BACKGROUND = str(ROOT / "transport/background.py")


def qualified_name(code):
    """A function's name, behind those of its class and of the functions around it: "DDP.reduce";
    "send_rows.move" for a move() inside of send_rows(); "sum_over_ranks" for a lambda in
    sum_over_ranks(). (Python 3.10 knows the last part only, and a lambda is "<lambda>".)"""
    full = getattr(code, "co_qualname", code.co_name)  # "send_rows.<locals>.move"
    return ".".join(part for part in full.split(".") if part[0] != "<") or code.co_name


def origin(started_by=""):
    """Which collective sends the message, and which function called the collective, read from the
    call stack: "all_reduce, ddp.py DDP.reduce". The end of this stack, the innermost call last:

        DDP.reduce                 ddp.py            the innermost call of another file
        all_reduce                 collectives.py    the outermost collective inside of it
        reduce_scatter             collectives.py
        exchange, note, origin     run/watch.py

    Without a collective: the group's method, send or exchange. started_by: the function that has
    started what this thread runs, if the stack has no other: "zero.py ZeRO1.publish"."""
    frame = sys._getframe(1)
    carrier = "exchange"
    while frame:
        path = frame.f_code.co_filename
        if path == COLLECTIVES:
            carrier = frame.f_code.co_name
        elif path != __file__:
            break
        frame = frame.f_back
    if path == BACKGROUND:
        return f"{carrier}, {started_by}"
    return f"{carrier}, {function_of(frame)}"


def function_of(frame):
    """The file and the name of the function that runs in a frame: "ddp.py DDP.reduce"."""
    file = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
    return f"{file} {qualified_name(frame.f_code)}"


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


class Watch:
    """One rank's notes of a step. Each thread has a list of its events, of two kinds:

        ("did", key, 0)          the thread sent a message, or started or ended a job, which is a
                                 function that runs in the background
        ("awaited", key, n)      the thread waited for the event `key`. From here on its clock
                                 shows at least the tick of that event + n; n is 1 for a message,
                                 0 for a job
    """

    def __init__(self, mesh):
        self.mesh = mesh
        self.sent = {}  # key -> Sent, of this rank
        # The events of the rank's own thread, and of its jobs (on a GPU the rank's own thread runs
        # these, too, as they are started)
        self.lanes = {"own": [], "background": []}
        self.numbers = Counter()  # messages so far, by group, sender and receiver
        self.jobs = []  # of each job the function that waits for its end
        # In a thread that runs a job: here.started_by, the function that started the job
        self.here = threading.local()

    @contextmanager
    def step(self):
        """Note what this rank sends in this context: Group.exchange and Background.start, which all
        messages and all jobs pass, are replaced meanwhile."""
        exchange, start = Group.exchange, Background.start

        def noted_exchange(group, send=None, dst=None, recv=None, src=None, combine=None):
            awaited = self.note(group, send, dst, recv, src)
            work = exchange(group, send, dst, recv, src, combine)
            finish = work.finish

            def finish_and_note():
                finish()
                for key in awaited:
                    self.event("awaited", key, 1)

            work.finish = finish_and_note
            return work

        def noted_start(background, function, *args):
            name = f"job {len(self.jobs)} of rank {self.mesh.rank}"
            self.event("did", f"start of {name}")
            job = self.job(function, name, function_of(sys._getframe(1)))
            wait = start(background, job, *args)
            self.jobs.append(wait)

            def wait_and_note():
                wait()
                self.event("awaited", f"end of {name}", 0)

            return wait_and_note

        Group.exchange, Background.start = noted_exchange, noted_start
        try:
            yield
            for wait in self.jobs:
                wait()
        finally:
            Group.exchange, Background.start = exchange, start

    def event(self, kind, key, ticks=0):
        lane = "background" if hasattr(self.here, "started_by") else "own"
        self.lanes[lane].append((kind, key, ticks))

    def key(self, group, src, dst):
        """A name for the next message from one rank of a group to another. Both ranks count the
        messages between them; these arrive in the order of sending, so both find the same name."""
        pair = f"{group.name} {group.ranks[src]} -> {group.ranks[dst]}"
        self.numbers[pair] += 1
        return f"{pair} {self.numbers[pair]}"

    def note(self, group, send, dst, recv, src):
        """Note a call of exchange(). Returns the keys of the messages that arrive by it: one or
        none."""
        if send is not None and send.numel() > 0:
            key = self.key(group, group.rank, dst)
            self.event("did", key)
            self.sent[key] = Sent(key, self.mesh.rank, group.ranks[dst],
                                  axis_of(group, self.mesh.sizes),
                                  origin(getattr(self.here, "started_by", "")),
                                  list(send.shape), send.numel() * send.element_size())
        arrives = recv is not None and recv.numel() > 0
        return [self.key(group, src, group.rank)] if arrives else []

    def job(self, function, name, started_by):
        """Returns a function that runs `function` as a job, and notes its beginning and its end."""
        def job(*args):
            self.here.started_by = started_by
            self.event("awaited", f"start of {name}", 0)
            function(*args)
            self.event("did", f"end of {name}")
            del self.here.started_by

        return job

    def story(self, which):
        """Collective: on rank 0 the lines of the step, elsewhere "". which: "all", the number of a
        rank, or an axis."""
        # Lane by lane: the same order in every run, whichever thread was first
        lanes = [*self.lanes.values()]
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
