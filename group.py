"""A group of ranks, and the one method that every message passes through.

A rank is one process. A Group is some ranks in a ring order: each has a next and a previous one.
Group.exchange posts a send, a receive or both, and returns a Work to wait for. Collectives
(collectives.py) and pipelines (pipeline.py) are made of it, so bytes are counted here.
Cost model: a message of n bytes takes latency + n / bandwidth.

The messages are carried by gloo, torch's library for CPUs. Two of its properties matter:

    a send completes when the peer has posted the receive for it, so post receives before waiting
    wait() blocks the process, so wait as late as possible
"""

import re
from contextlib import contextmanager
from functools import partial

import torch

# ---- errors of one line ----


class CommunicationError(RuntimeError):
    """A rank died, hung or never joined: one line that names rank, operation and peer."""


def reason_in(text):
    """An error of the library in one line: without the C++ location, hints and the store's keys.
    NCCL names the cause in the line after "Last error:"; the cause is put at the end.

        [/w/pair.cc:5] Connection closed by peer. This is likely ...    Connection closed by peer
        wait timeout after 600ms, keys: /a/b                            wait timeout after 600ms

        NCCL error in: /w/Nccl.cpp:77, unhandled cuda error (run ...
        Last error:
        Cuda failure 2 'out of memory'
            -> NCCL error, unhandled cuda error: Cuda failure 2 'out of memory'
    """
    first = text.splitlines()[0]
    first = re.sub(r"^\[\S*\] |\. (This is|Check) .*|, keys: .*| in: \S+(?=,)| \(run with .*", "",
                   first)
    _, _, last_error = text.partition("Last error:")
    return ": ".join([first, *last_error.strip().splitlines()[:1]])


@contextmanager
def naming(what):
    """Re-raise a RuntimeError, of the library or of a collective, as a CommunicationError that
    names `what`."""
    try:
        yield
    except (CommunicationError, torch.OutOfMemoryError):  # a full GPU is no error of a message
        raise
    except RuntimeError as error:
        raise CommunicationError(f"{what}: {reason_in(str(error))}") from None


# ---- messages ----


class Work:
    """A pending operation. Do not touch its tensors before wait() has returned."""

    def __init__(self, waits=(), what=""):
        self.waits = waits  # functions; each blocks until one part of the operation is complete
        self.what = what  # names the operation in an error

    def wait(self):
        """Block until the operation is complete. A second call returns at once."""
        waits, self.waits = self.waits, ()
        with naming(self.what):
            for wait in waits:
                wait()


def wait_all(works):
    for work in works:
        work.wait()


class Group:
    """Some ranks in a ring order. `rank`, and each peer that a method takes, counts within the
    group: 0 .. size - 1.

    A group of one has no communicator. Collectives send nothing there, so the code that trains need
    not ask for sizes; exchange() is for groups of two and more."""

    def __init__(self, mesh, name, ranks, rank, communicator=None):
        self.name = name
        self.device = mesh.device
        self.ranks = list(ranks)  # ranks of the group, numbered as in the world
        self.rank = rank  # this process's place in the group
        self.size = len(self.ranks)
        self.next = (rank + 1) % self.size
        self.prev = (rank - 1) % self.size
        self.communicator = communicator  # torch's ProcessGroup; None in a group of one
        self.bytes_sent = 0  # by this rank, in all its messages

    def exchange(self, send=None, dst=None, recv=None, src=None):
        """Post a send of the tensor `send` to rank dst, and a receive into `recv` from rank src;
        either may be None. Both are contiguous; an empty tensor is not sent. Returns their Work.

        The receive is posted first, and neither is waited for here, so two ranks that exchange
        cannot block each other."""
        what = f"rank {self.ranks[self.rank]}: group {self.name}"  # for an error
        posts = []
        if recv is not None and recv.numel() > 0:
            what += f", receive from rank {self.ranks[src]}"
            posts.append(partial(self.communicator.recv, [recv], src, 0))  # 0: messages have no tag
        if send is not None and send.numel() > 0:
            what += f", send to rank {self.ranks[dst]}"
            posts.append(partial(self.communicator.send, [send], dst, 0))
            self.bytes_sent += send.numel() * send.element_size()
        with naming(what):
            return Work([post().wait for post in posts], what)

    def send(self, tensor, dst):
        return self.exchange(send=tensor, dst=dst)

    def recv(self, tensor, src):
        return self.exchange(recv=tensor, src=src)

    def start_read(self, tensor):
        """Returns a function that returns the tensor's numbers. Until its call the tensor must not
        change: on a GPU the numbers are copied to the host meanwhile (engine/nccl_group.py)."""
        return tensor.tolist

    def read(self, tensor):
        """Wait for a tensor; return its numbers."""
        return self.start_read(tensor)()
