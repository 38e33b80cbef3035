"""Who waits for whom: groups that report each message to a board, a file that all ranks map.

A rank writes on the board what it posts and what it waits for. So each rank that waits can see that
no rank can ever send what it waits for, and says so at once. A rank announces all messages of an
exchange before it posts the first one, and one rank at a time announces: of a send and a receive
of different sizes the second is noticed, and nothing of its exchange is posted.

    announced[g, way, src, dst]  messages announced so far in group g; way 0: sends, way 1: receives
    posted[g, way, src, dst]     messages posted so far
    sizes[g, way, src, dst, k]   bytes of message k
    state[rank, thread]          what a thread of a rank does; thread 0: the main one, thread 1: the
                                 one that runs submitted collectives (engine/group.py)
    meetings[rank]               how many groups the rank has begun to make
    changes[rank]                how often the rank has written any of the above
"""

import fcntl
import math
import os
import threading
import time
import weakref
from collections import Counter
from datetime import timedelta

import numpy as np
import torch.distributed as dist

import engine.group
import engine.mesh
import mesh

GROUPS, RANKS, KEPT = 64, 4, 1024  # KEPT: sizes of messages that the board keeps per pair of ranks
SEND, RECV = 0, 1
# Values of state[rank, thread, 0]. RUNS: it computes. IDLE: no work was submitted. ENDED: the rank
# has returned or failed. WAITS: for a message; state[..., 1:] is (group, way, src, dst, k). JOINS:
# the main thread waits for what it has submitted. MEETS: it waits for all ranks to make a group
RUNS, IDLE, ENDED, WAITS, JOINS, MEETS = range(6)


class Stuck(Exception):
    """This rank waits for a message that cannot come: each rank that could send it has ended, or
    waits too."""


class OtherSize(Exception):
    """A send and its receive have different sizes."""


class Board:
    def __init__(self, path, rank, size):
        self.path = path
        self.rank = rank
        self.size = size
        messages = GROUPS, 2, RANKS, RANKS
        shapes = {"announced": messages, "posted": messages, "sizes": (*messages, KEPT),
                  "state": (RANKS, 2, 6), "meetings": (RANKS,), "changes": (RANKS,)}
        self.file = open(os.open(path, os.O_CREAT | os.O_RDWR), "r+b")
        os.truncate(self.file.fileno(), 8 * sum(map(math.prod, shapes.values())))  # zeros
        parts = {}
        offset = 0
        for name, shape in shapes.items():
            parts[name] = np.memmap(path, np.int64, "r+", offset, shape)
            offset += parts[name].nbytes
        self.announced = parts["announced"]
        self.posted = parts["posted"]
        self.sizes = parts["sizes"]
        self.state = parts["state"]
        self.meetings = parts["meetings"]
        self.changes = parts["changes"]
        # (mesh, name) of each group, in the order in which the groups were made, which is the same
        # on all ranks: the index is the group's number
        self.groups = []
        self.main = threading.get_ident()
        self.lock = threading.RLock()  # held while this rank writes: two threads may
        self.works = []  # every exchange's Work: a message travels only while both ends keep theirs
        self.write(IDLE, thread=1)

    def write(self, kind, *what, thread=None):
        """Say what a thread of this rank does; None: the thread that calls."""
        if thread is None:
            thread = 0 if threading.get_ident() == self.main else 1
        with self.lock:
            self.state[self.rank, thread, 1 : 1 + len(what)] = what
            self.state[self.rank, thread, 0] = kind
            self.changes[self.rank] += 1

    def announce(self, group, messages):
        """Write the sizes of this rank's next messages [(way, src, dst, nbytes)]: of all or, if one
        has another size at its other end, of none. Returns their numbers. Raises OtherSize."""
        numbers = []
        before = Counter()
        with self.lock:
            fcntl.flock(self.file, fcntl.LOCK_EX)  # no other rank announces meanwhile
            try:
                for way, src, dst, nbytes in messages:
                    k = int(self.announced[group, way, src, dst]) + before[way, src, dst]
                    self.sizes[group, way, src, dst, k % KEPT] = nbytes
                    if self.announced[group, 1 - way, src, dst] > k:
                        self.compare_sizes(group, src, dst, k)
                    before[way, src, dst] += 1
                    numbers.append(k)
                for way, src, dst, _ in messages:
                    self.announced[group, way, src, dst] += 1
            finally:
                fcntl.flock(self.file, fcntl.LOCK_UN)
        return numbers

    def compare_sizes(self, group, src, dst, k):
        """Raise OtherSize unless both ends of message k have one size."""
        sent, taken = self.sizes[group, [SEND, RECV], src, dst, k % KEPT].tolist()
        if sent != taken:
            raise OtherSize(f"rank {src} sends {sent} bytes to rank {dst}, and rank {dst} receives "
                            f"into a tensor of {taken} bytes (their message {k + 1}): do both mean "
                            "the same part?")

    def post(self, group, way, src, dst):
        """Count a message that this rank has posted."""
        with self.lock:
            self.posted[group, way, src, dst] += 1
            self.changes[self.rank] += 1

    def wait(self, group, way, src, dst, k):
        """Return when the other rank has posted its end of message k; raise Stuck if it never
        will."""
        self.write(WAITS, group, way, src, dst, k)
        while self.posted[group, 1 - way, src, dst] <= k:
            if self.all_are_stuck():
                raise Stuck(self.circle())
            time.sleep(0.0002)
        self.write(RUNS)

    def meet(self):
        """Return when all ranks have called this as often; raise Stuck if one never will."""
        with self.lock:
            self.meetings[self.rank] += 1
            self.write(MEETS)
        while min(self.meetings[: self.size]) < self.meetings[self.rank]:
            if self.all_are_stuck():
                raise Stuck(self.circle())
            time.sleep(0.0002)
        self.write(RUNS)

    def can_go_on(self, rank):
        """Does a thread of the rank compute, or wait for something that has been posted?"""
        main, worker = self.state[rank].tolist()
        for kind, group, way, src, dst, k in (main, worker):
            if kind == RUNS or kind == WAITS and self.posted[group, 1 - way, src, dst] > k:
                return True
        if main[0] == MEETS:
            return min(self.meetings[: self.size]) >= self.meetings[rank]
        return main[0] == JOINS and worker[0] == IDLE  # what it has waited for is done

    def all_are_stuck(self):
        """True only if it stays so: no rank has written anything while all were looked at."""
        before = self.changes.copy()
        stuck = not any(self.can_go_on(rank) for rank in range(self.size))
        return stuck and np.array_equal(before, self.changes)

    def wait_for_all(self):
        """Return when no rank can go on: until then another may wait for a message of this one."""
        while not self.all_are_stuck():
            time.sleep(0.0002)

    def waits_of(self, rank):
        """What a rank waits for, in words; "" if it does not wait."""
        main, worker = self.state[rank].tolist()
        kind, group, way, src, dst, k = worker if main[0] == JOINS else main
        if kind == MEETS:
            return f"rank {rank} has ended its part, and waits for the other ranks"
        if kind != WAITS:
            return ""
        where = f" in group {self.groups[group][1]}"
        if way == RECV:
            return f"rank {rank} waits for message {k + 1} from rank {src}{where}"
        return f"rank {rank} waits until rank {dst} receives its message {k + 1}{where}"

    def circle(self):
        """Which rank waits for whom, all of them, in one line."""
        said = [self.waits_of(rank) for rank in range(self.size)]
        ended = [str(rank) for rank in range(self.size) if self.state[rank, 0, 0] == ENDED]
        if ended:
            said.append(f"rank {' and '.join(ended)} {'have' if ended[1:] else 'has'} returned")
        return "; ".join(line for line in said if line)


class WatchedGroup(engine.group.Group):
    """A Group whose messages are on the board. Counts them, too."""

    def __init__(self, mesh, name, ranks, rank, communicator=None):
        super().__init__(mesh, name, ranks, rank, communicator)
        self.board = mesh.board
        self.hops = 0  # exchanges of this rank
        self.largest = 0  # bytes of the largest message that this rank has sent
        self.jobs = 0  # submitted, and not yet done
        self.unjoined = 0  # submitted, and not yet waited for
        self.submitted = 0
        self.not_waited_for = set()  # numbers of the main thread's exchanges; the first is 1
        self.buffers = []  # weak references to the tensors that submitted jobs have sent
        if (mesh, name) not in self.board.groups:
            self.board.groups.append((mesh, name))
        self.number = self.board.groups.index((mesh, name))

    def exchange(self, send=None, dst=None, recv=None, src=None, more=()):
        me = self.ranks[self.rank]
        messages = []  # (way, src, dst, bytes), in the order in which the Work waits for them
        for out, to, into, source in [(send, dst, recv, src), *more]:
            if into is not None and into.numel() > 0:
                messages.append((RECV, self.ranks[source], me, into.nbytes))
            if out is not None and out.numel() > 0:
                self.largest = max(self.largest, out.nbytes)
                messages.append((SEND, me, self.ranks[to], out.nbytes))
        numbers = self.board.announce(self.number, messages)
        self.hops += 1
        hop = self.hops
        if self.is_running_job():
            self.buffers += [weakref.ref(out if out._base is None else out._base)
                             for out in (send, *(out for out, *_ in more)) if out is not None]
        elif messages:
            self.not_waited_for.add(hop)
        work = super().exchange(send, dst, recv, src, more)
        self.board.works.append(work)
        ends = [message[:3] for message in messages]
        for message in ends:
            self.board.post(self.number, *message)
        work.waits = [lambda message=(*message, k), wait=wait: self.finish(message, wait, hop)
                      for message, k, wait in zip(ends, numbers, work.waits, strict=True)]
        return work

    def finish(self, message, wait, hop):
        self.not_waited_for.discard(hop)
        self.board.wait(self.number, *message)
        wait()

    def submit(self, job, name):
        with self.board.lock:
            self.jobs += 1
            self.submitted += 1
            self.unjoined += 1
            self.board.write(RUNS, thread=1)

        def done():
            with self.board.lock:
                self.jobs -= 1
                if self.jobs == 0:
                    self.board.write(IDLE)

        def watched():
            try:
                job()
            except Stuck:  # no done(): on the board this thread stays as waiting
                raise
            except Exception:
                done()
                raise
            done()

        work = super().submit(watched, name)
        ended, = work.waits

        def join():
            self.board.write(JOINS)
            ended()
            self.unjoined -= 1
            self.board.write(RUNS)

        work.waits = [join]
        return work


class WatchedMesh(engine.mesh.Mesh):
    """A Mesh of watched groups, with connections of its own: an attempt that fails may leave
    messages on their way, which no later attempt must receive."""

    def __init__(self, board, **sizes):
        self.board = board
        # Not super().__init__: engine.mesh.Mesh chooses the class of the groups by itself. Of its
        # fields the groups of a CPU read `native` only
        self.native = False
        mesh.Mesh.__init__(self, WatchedGroup, **sizes)

    def join(self, name, rows):
        if name not in self.groups:
            self.board.meet()  # torch has no way to give up the making of a group
        return super().join(name, rows)

    def communicator(self, name, ranks):
        return dist.new_group(ranks, timeout=timedelta(seconds=self.timeout))
