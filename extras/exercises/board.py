"""Who waits for whom: groups that report each message to a board, a file that all ranks map.

A rank writes on the board which messages it posts, and which message it waits for. So a waiting
rank sees when all ranks have ended or wait for messages that no rank has posted: then it raises
Stuck. Before a rank posts the messages of an exchange, it announces them, and compares their sizes
with those that the other end has announced. One rank announces at a time. If a send and its receive
differ in size, the rank that announces later raises OtherSize, and posts nothing.

    announced[g, way, src, dst]  messages announced so far in group g, from rank src to rank dst of
                                 the world; way 0: by the sender, way 1: by the receiver
    posted[g, way, src, dst]     messages posted so far
    sizes[g, way, src, dst, k]   bytes of message k
    state[rank, thread]          does the thread compute, or for what does it wait? thread 0: the
                                 rank's main thread, thread 1: the one that runs submitted jobs
    meetings[rank]               how often the rank has called meet()
    changes[rank]                how often the rank has written posted, state or meetings, which
                                 can_go_on() reads
"""

import fcntl
import math
import os
import threading
import time
import weakref
from collections import Counter
from datetime import timedelta
from functools import partial

import numpy as np
import torch.distributed as dist

import engine.group
import engine.mesh
import mesh
from extras.exercises.catalogue import RANKS

GROUPS = 64  # groups that all meshes of an attempt may have
KEPT = 1024  # sizes kept for each entry of `announced`; message k + KEPT takes the place of k
SEND, RECV = 0, 1  # ways
# Values of state[rank, thread, 0]:
#     RUNS    the thread computes; or it has not begun, because a new file is filled with zeros
#     IDLE    thread 1 has no job
#     ENDED   the rank's judge has returned, or raised an error
#     WAITS   the thread waits for the message state[rank, thread, 1:], (group, way, src, dst, k)
#     JOINS   the main thread waits for a job of thread 1
#     MEETS   the rank is in meet(): before a group is made, and in states.py
RUNS, IDLE, ENDED, WAITS, JOINS, MEETS = range(6)
MESSAGES = GROUPS, 2, RANKS, RANKS
SHAPES = {"announced": MESSAGES, "posted": MESSAGES, "sizes": (*MESSAGES, KEPT),
          "state": (RANKS, 2, 6), "meetings": (RANKS,), "changes": (RANKS,)}


class Stuck(Exception):
    """This rank waits for a message that cannot come: each rank that could send it has ended, or
    waits too."""


class OtherSize(Exception):
    """A send and its receive have different sizes."""


def open_board(path):
    """Open a board's file. A new file gets the size of all arrays, filled with zeros; the size of a
    file that another rank has made is that size already, so its content stays."""
    file = open(os.open(path, os.O_CREAT | os.O_RDWR), "r+b")
    os.truncate(file.fileno(), 8 * sum(map(math.prod, SHAPES.values())))
    return file


def map_board(path):
    """{name: array} of a board's file, one array behind the other. All processes that map the file
    share them."""
    arrays = {}
    offset = 0  # bytes
    for name, shape in SHAPES.items():
        arrays[name] = np.memmap(path, np.int64, "r+", offset, shape)
        offset += arrays[name].nbytes
    return arrays


def ranks_that_compute(path):
    """The ranks with a thread that computes, for a process that is no rank (start.py)."""
    with open_board(path):
        state = map_board(path)["state"]
        return [rank for rank in range(RANKS) if RUNS in state[rank, :, 0]]


class Board:
    def __init__(self, path, rank, size):
        self.path = path
        self.rank = rank
        self.size = size
        self.file = open_board(path)
        arrays = map_board(path)
        self.announced = arrays["announced"]
        self.posted = arrays["posted"]
        self.sizes = arrays["sizes"]
        self.state = arrays["state"]
        self.meetings = arrays["meetings"]
        self.changes = arrays["changes"]
        # (mesh, name) of each group, in the order in which the groups were made, which is the same
        # on all ranks: the index is the group's number
        self.groups = []
        self.main = threading.get_ident()
        self.lock = threading.RLock()  # held while a thread of this rank writes: there are two
        self.works = []  # every exchange's Work: a message travels only while both ends keep theirs
        self.write(IDLE, thread=1)

    def write(self, kind, *what, thread=None):
        """Write the state of a thread of this rank: `kind` and, if it WAITS, for `what`. thread
        None: the thread that calls."""
        if thread is None:
            thread = 0 if threading.get_ident() == self.main else 1
        with self.lock:
            self.state[self.rank, thread, 1 : 1 + len(what)] = what
            self.state[self.rank, thread, 0] = kind
            self.changes[self.rank] += 1

    def announce(self, group, messages):
        """Announce this rank's next messages, [(way, src, dst, nbytes)]. Returns the number k of
        each: how many the same way, from src to dst, came before it. Raises OtherSize if a message
        has another size at its other end; then none of them counts as announced."""
        numbers = []
        before = Counter()  # earlier messages of this call, by (way, src, dst)
        with self.lock:
            fcntl.flock(self.file, fcntl.LOCK_EX)  # no other rank announces meanwhile
            try:
                for way, src, dst, nbytes in messages:
                    k = int(self.announced[group, way, src, dst]) + before[way, src, dst]
                    self.sizes[group, way, src, dst, k % KEPT] = nbytes
                    if self.announced[group, 1 - way, src, dst] > k:  # by its other end, too
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
        """Return when the other rank has posted its end of message k; raise Stuck if no rank can go
        on."""
        self.write(WAITS, group, way, src, dst, k)
        while self.posted[group, 1 - way, src, dst] <= k:
            if self.all_are_stuck():
                raise Stuck(self.who_waits())
            time.sleep(0.0002)
        self.write(RUNS)

    def meet(self):
        """Return when every rank has called meet() as often as this rank; raise Stuck if no rank
        can go on."""
        with self.lock:
            self.meetings[self.rank] += 1
            self.write(MEETS)
        while min(self.meetings[: self.size]) < self.meetings[self.rank]:
            if self.all_are_stuck():
                raise Stuck(self.who_waits())
            time.sleep(0.0002)
        self.write(RUNS)

    def can_go_on(self, rank):
        """Does a thread of the rank compute, or is the wait of a thread over?"""
        main, worker = self.state[rank].tolist()
        for kind, group, way, src, dst, k in (main, worker):
            if kind == RUNS:
                return True
            if kind == WAITS and self.posted[group, 1 - way, src, dst] > k:
                return True
        if main[0] == MEETS:
            return min(self.meetings[: self.size]) >= self.meetings[rank]
        return main[0] == JOINS and worker[0] == IDLE  # the job is done

    def all_are_stuck(self):
        """Can no rank go on? Once True, it stays True: a rank that cannot go on writes nothing. (If
        a rank wrote while this function read, the answer is False: ask again.)"""
        before = self.changes.copy()
        stuck = not any(self.can_go_on(rank) for rank in range(self.size))
        return stuck and np.array_equal(before, self.changes)

    def wait_for_all(self):
        """Return when no rank can go on. Until then another rank may wait for a message that this
        rank has posted: it arrives only while this process lives."""
        while not self.all_are_stuck():
            time.sleep(0.0002)

    def wait_in_words(self, rank):
        """Which message, or which ranks, a rank waits for; "" if it does not wait."""
        main, worker = self.state[rank].tolist()
        kind, group, way, src, dst, k = worker if main[0] == JOINS else main
        if kind == MEETS:
            # Only judges and Mesh.join call meet(): the learner's code on this rank has returned
            return f"rank {rank} has ended its part, and waits for the other ranks"
        if kind != WAITS:
            return ""
        where = f" in group {self.groups[group][1]}"
        if way == RECV:
            return f"rank {rank} waits for message {k + 1} from rank {src}{where}"
        return f"rank {rank} waits until rank {dst} receives its message {k + 1}{where}"

    def who_waits(self):
        """The waits of all ranks, and which ranks have ended, in one line."""
        said = [self.wait_in_words(rank) for rank in range(self.size)]
        ended = [str(rank) for rank in range(self.size) if self.state[rank, 0, 0] == ENDED]
        if ended:
            said.append(f"rank {' and '.join(ended)} {'have' if ended[1:] else 'has'} returned")
        return "; ".join(line for line in said if line)


class WatchedGroup(engine.group.Group):
    """A Group whose messages are on the board, and counted. It is engine/group.py's Group because
    exercise 3 runs collectives in the background: submit(job, name) runs job() on a thread of the
    group, is_running_job() tells whether the caller is that thread, and exchange() takes `more`,
    further (send, dst, recv, src), and `combine`. Its Work has a wait for each receive and for each
    send; of one (send, dst, recv, src) the receive comes first."""

    def __init__(self, mesh, name, ranks, rank, communicator=None):
        super().__init__(mesh, name, ranks, rank, communicator)
        self.board = mesh.board
        self.hops = 0  # exchanges of this rank
        self.largest = 0  # bytes of the largest message that this rank has sent
        self.jobs = 0  # jobs submitted, and not yet done
        self.unjoined = 0  # jobs submitted, and not yet waited for
        self.submitted = 0  # jobs submitted, in all
        # Exchanges of the main thread that were not waited for, by number; the first exchange is 1
        self.not_waited_for = set()
        self.buffers = []  # weak references to the tensors that jobs have sent
        # Mesh.join makes two Groups of a name, this rank alone and its row: one number serves both
        if (mesh, name) not in self.board.groups:
            self.board.groups.append((mesh, name))
        self.number = self.board.groups.index((mesh, name))

    def exchange(self, send=None, dst=None, recv=None, src=None, more=(), combine=None):
        self.wait_for_jobs()  # all ranks number a job's messages before this one
        me = self.ranks[self.rank]
        messages = []  # (way, src, dst, bytes), in the order in which the Work waits for them
        sent = []
        for out, to, into, source in [(send, dst, recv, src), *more]:
            if into is not None and into.numel() > 0:
                messages.append((RECV, self.ranks[source], me, into.nbytes))
            if out is not None and out.numel() > 0:
                self.largest = max(self.largest, out.nbytes)
                messages.append((SEND, me, self.ranks[to], out.nbytes))
                sent.append(out)
        numbers = self.board.announce(self.number, messages)
        self.hops += 1
        hop = self.hops
        if self.is_running_job():
            # A job sends views of a bucket: remember the bucket, _base
            self.buffers += [weakref.ref(out if out._base is None else out._base) for out in sent]
        elif messages:
            self.not_waited_for.add(hop)
        work = super().exchange(send, dst, recv, src, more, combine)
        self.board.works.append(work)
        ends = [(way, source, to) for way, source, to, _ in messages]
        for end in ends:
            self.board.post(self.number, *end)
        arrive, after = work.waits[:len(ends)], work.waits[len(ends):]  # after: combine, if given
        work.waits = [partial(self.finish, (*end, k), wait, hop)
                      for end, k, wait in zip(ends, numbers, arrive, strict=True)] + list(after)
        return work

    def finish(self, message, wait, hop):
        """Wait for a message (way, src, dst, k) of exchange number `hop`: on the board, where a
        deadlock is noticed, and then by the library's wait()."""
        self.not_waited_for.discard(hop)
        self.board.wait(self.number, *message)
        wait()

    def submit(self, job, name):
        with self.board.lock:
            self.jobs += 1
            self.submitted += 1
            self.unjoined += 1
            self.board.write(RUNS, thread=1)

        def end_job():
            with self.board.lock:
                self.jobs -= 1
                if self.jobs == 0:
                    self.board.write(IDLE)

        def watched():
            try:
                job()
            except Stuck:  # no end_job(): the other ranks must see for what this thread waits
                raise
            except Exception:
                end_job()
                raise
            end_job()

        work = super().submit(watched, name)
        (wait_for_job,) = work.waits

        def join():
            self.board.write(JOINS)
            wait_for_job()
            self.unjoined -= 1
            self.board.write(RUNS)

        work.waits = [join]
        return work


class WatchedMesh(engine.mesh.Mesh):
    """A Mesh of watched groups."""

    group_class = WatchedGroup

    def __init__(self, board, **sizes):
        self.board = board
        # Not super().__init__: engine.mesh.Mesh chooses the class of the groups. Of the fields that
        # it would set, a group on CPUs reads only `native`
        self.native = False
        mesh.Mesh.__init__(self, **sizes)

    def join(self, name, rows):
        if name not in self.groups:
            # new_group() waits for all ranks, and cannot be given up: wait on the board before
            self.board.meet()
        return super().join(name, rows)

    def communicator(self, name, ranks):
        """New connections for each mesh. The tests run several attempts in a process, and replace
        this method of the other meshes by one that keeps connections (tests/pool.py): through these
        a message of a failed attempt could reach the next attempt."""
        return dist.new_group(ranks, timeout=timedelta(seconds=self.timeout))
