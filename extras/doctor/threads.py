"""Ranks as threads of one process: the root's plain forms run as on many processes, unchanged.

A communicator carries the messages of a Group (group.py). Here a communicator has a queue for each
ordered pair of ranks, in place of gloo's connections. So the doctor can run a step of any layout,
right or wrong, in one process, and look at the gradients of each rank before they are summed.

A queue has no limit, so a send never waits. A receive waits for its peer. A rank that fails puts
None into all queues, which wakes the ranks that wait for a message of the failed rank.
"""

import math
import queue
import threading
from itertools import product

import torch

from mesh import Mesh


class Posted:
    """A message that has been put into its queue."""

    def wait(self):
        pass


class Receiving:
    """A receive that has been posted. wait() fills the tensor."""

    def __init__(self, tensor, messages):
        self.tensor = tensor
        self.messages = messages

    def wait(self):
        message = self.messages.get()
        if message is None:  # put by World.run
            raise RuntimeError("another rank has failed")
        self.tensor.copy_(message)


class Communicator:
    """One rank's end of a group's queues, with those methods of torch's ProcessGroup that a Group
    calls: send and recv of one tensor."""

    def __init__(self, queues, rank):
        self.queues = queues  # {(source, destination): Queue}, shared by the group's ranks
        self.rank = rank

    def send(self, tensors, dst, tag):
        self.queues[self.rank, dst].put(tensors[0].clone())  # the sender may overwrite its tensor
        return Posted()

    def recv(self, tensors, src, tag):
        return Receiving(tensors[0], self.queues[src, self.rank])


class ThreadMesh(Mesh):
    """The Mesh of one thread. Mesh.group() calls communicator() in place of mesh.py's own."""

    def __init__(self, rank, world):
        """world: the World that has started the threads."""
        self.rank = rank
        self.device = torch.device("cpu")
        self.sizes = world.sizes
        self.queues_of = world.queues_of
        self.groups = {}
        self.world = self.join("world", [list(range(world.size))])

    def communicator(self, name, ranks):
        """This rank's end of a group's queues; None where the rank is not in the group."""
        if self.rank not in ranks:
            return None
        return Communicator(self.queues_of(name, ranks), ranks.index(self.rank))


class World:
    """Threads on a mesh."""

    def __init__(self, flags):
        """flags: sizes like those of train.py's flags, such as {"dp": 2, "tp": 3}; of dp, pp, ep,
        cp and tp those that are not 1."""
        inner = {axis: flags.get(axis, 1) for axis in ("pp", "ep", "cp", "tp")}
        # Like Mesh.sizes (mesh.py)
        self.sizes = {"shard": flags.get("dp", 1) // inner["ep"], **inner}
        self.size = math.prod(self.sizes.values())
        self.queues = {}  # (group's name, its ranks) -> {(source, destination): Queue}
        self.failed = False  # has a rank raised an error?
        self.barrier = threading.Barrier(self.size)  # for fn, to let ranks wait for one another
        self.lock = threading.Lock()

    def queues_of(self, name, ranks):
        """The queues of a group, the same for all its ranks: {(source, destination): Queue}."""
        with self.lock:
            if self.failed:
                raise RuntimeError("another rank has failed")
            key = (name, *ranks)
            if key not in self.queues:
                pairs = product(range(len(ranks)), repeat=2)
                self.queues[key] = {pair: queue.SimpleQueue() for pair in pairs}
            return self.queues[key]

    def run(self, fn):
        """Run fn(mesh) as each rank, and return the ranks' results. Raises the error of the first
        rank that failed."""
        results = [None] * self.size
        errors = []

        def run_rank(rank):
            try:
                results[rank] = fn(ThreadMesh(rank, self))
            except Exception as error:
                errors.append(error)
                with self.lock:  # wake the ranks that wait for this rank
                    self.failed = True
                    self.barrier.abort()
                    for queues in self.queues.values():
                        for messages in queues.values():
                            messages.put(None)

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
