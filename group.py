"""A group of ranks, and the one method that every message passes through.

A rank is one process. A Group is some ranks in a ring order: each has a next and a previous one.
Group.exchange posts a send, a receive or both, and returns a Work to wait for. Collectives
(collectives.py) and pipelines (pipeline.py) are made of it, so bytes are counted here. A message of
n bytes takes latency + n / bandwidth.

The messages are carried by gloo, torch's library for CPUs. Two of its manners matter:

    a send completes when the peer has posted the receive for it, so post receives before waiting
    wait() blocks the process, so wait as late as possible
"""


class Work:
    """A pending operation. Do not touch its tensors before wait() has returned."""

    def __init__(self, waits=()):
        self.waits = waits  # functions; each blocks until one part of the operation is complete

    def wait(self):
        """Block until the operation is complete. A second call returns at once."""
        waits, self.waits = self.waits, ()
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
        posted = []
        if recv is not None and recv.numel() > 0:
            posted.append(self.communicator.recv([recv], src, 0))  # 0: messages carry no tag
        if send is not None and send.numel() > 0:
            posted.append(self.communicator.send([send], dst, 0))
            self.bytes_sent += send.numel() * send.element_size()
        return Work([part.wait for part in posted])

    def send(self, tensor, dst):
        return self.exchange(send=tensor, dst=dst)

    def recv(self, tensor, src):
        return self.exchange(recv=tensor, src=src)
