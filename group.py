"""Groups of ranks, and the one method that every message passes through.

A Group is some ranks in a ring order. Group.exchange posts a send, a receive or both, and returns a
Work to wait for; Group.submit runs a function in the background, after all earlier work of the
group, and the function exchanges messages. Collectives (collectives.py) and the pipeline are made
of these two, so bytes are counted and errors named here. A message of n bytes takes latency + n /
bandwidth.

This file is for gloo, torch's message library for CPUs: a send completes when its receive has been
posted, and wait() blocks the process. nccl_group.py has subclasses for NCCL, the one for GPUs.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps

import torch
import torch.distributed as dist

# The library's own collectives. torch 2.13 renamed two of them.
LIBRARY = {
    "all_reduce": dist.all_reduce,
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor}


class CommunicationError(RuntimeError):
    """A rank died, hung or never joined: one line that names rank, operation and peer."""


@contextmanager
def naming(what):
    """Re-raise a RuntimeError of the library as a CommunicationError that names `what`."""
    try:
        yield
    except (CommunicationError, torch.OutOfMemoryError):  # a full GPU is no error of a message
        raise
    except RuntimeError as error:
        # strip the C++ location and hints
        text = re.sub(r"^\[\S*\] |\. (This is|Check) .*|, keys: .*", "", str(error).splitlines()[0])
        raise CommunicationError(f"{what}: {text}") from None


class Work:
    """A pending operation. Do not touch its tensors before wait(), which may be called twice."""

    def __init__(self, waits=(), what=""):
        self.waits = waits  # functions that block until one part of the operation is complete
        self.what = what  # names the operation in an error

    def wait(self):
        waits, self.waits = self.waits, ()
        if waits:
            with naming(self.what):
                for wait in waits:
                    wait()


def wait_all(works):
    for work in works:
        work.wait()


class Group:
    """Some ranks in a ring order. `rank` and every peer given to a method count within the group.

    A group of one has no communicator: collectives and exchanges do nothing there.
    """

    # True: the library demands that two ranks post their messages in one order, both directions of
    # an exchange as one operation (nccl_group.py). False: a receive may be posted long before its
    # send, and the ring does so, for speed.
    in_order = False
    late = 0  # train.py reads a step's loss at the end of this step; 1 (NCCL): of the next step

    def __init__(self, mesh, name, ranks, rank, communicator=None):
        self.mesh, self.name, self.device = mesh, name, mesh.device
        self.ranks, self.rank, self.size = list(ranks), rank, len(ranks)  # ranks: in the world
        self.next, self.prev = (rank + 1) % self.size, (rank - 1) % self.size
        self.communicator = communicator  # torch's ProcessGroup
        self.native = mesh.native  # True: collectives.py calls the library's own collectives
        self.bytes_sent = 0  # by this rank, over all messages
        self.sequence = 0  # number of the last operation, for error messages
        self.last = Work()  # submitted last
        self.thread = None  # runs submitted work; started by the first submit()

    def span(self, name, **args):
        """A context: a named stretch of time, for --trace."""
        return self.mesh.span(name, group=self.name, **args)

    def exchange(self, send=None, dst=None, recv=None, src=None, more=()):
        """Post a receive into `recv` from `src` and a send of `send` to `dst`; either may be None.
        Return their Work. The two directions cannot block each other: on gloo both are posted
        before wait() waits for either, NCCL gets both as one operation. more: further (send, dst,
        recv, src) of this operation."""
        ends, names = [], []  # dist.irecv and isend only mark the direction, as dist.P2POp does
        for out, to, into, source in [(send, dst, recv, src), *more]:
            if into is not None and into.numel() > 0:
                ends.append((dist.irecv, into, source))
                names.append(f"receive from rank {self.ranks[source]}")
            if out is not None and out.numel() > 0:
                ends.append((dist.isend, out, to))
                names.append(f"send to rank {self.ranks[to]}")
                self.bytes_sent += out.numel() * out.element_size()
        return self.start(", ".join(names), lambda: self.post(ends))

    def post(self, ends):
        """Post [(dist.isend or dist.irecv, tensor, peer)]; return the library's works."""
        return [self.communicator.recv([tensor], peer, 0) if operation is dist.irecv else
                self.communicator.send([tensor], peer, 0) for operation, tensor, peer in ends]

    def start(self, what, post):
        """Call post(), which starts an operation and returns the library's works; return one Work.
        An error names rank, number of the operation, group and `what`."""
        self.sequence += 1
        what = f"rank {self.ranks[self.rank]}: operation {self.sequence} of group {self.name}, " \
               f"{what}"
        with naming(what):
            posted = post()
        work = Work([part.wait for part in posted], what)
        self.track(work, posted)
        return work

    def track(self, work, posted):
        """Remember a pending Work for start_read(). Needed by NCCL only: see CudaGroup.track."""

    def send(self, tensor, dst):
        return self.exchange(send=tensor, dst=dst)

    def recv(self, tensor, src):
        return self.exchange(recv=tensor, src=src)

    def recv_new(self, shape, dtype, src):
        """Post a receive into a new tensor. Return (tensor, Work)."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor, self.recv(tensor, src)

    def run_native(self, name, *args):
        """Run one of the library's own collectives and wait for it."""
        self.start(f"native {name}", lambda: [
            LIBRARY[name](*args, group=self.communicator, async_op=True)]).wait()

    def start_read(self, tensor):
        """Start to copy a tensor to the host. Returns a function that waits and returns the
        numbers; until then the tensor must not change. On CUDA the host waits nowhere else."""
        return tensor.tolist

    def read(self, tensor):
        return self.start_read(tensor)()

    def submit(self, job, name):
        """Run job(), which sends and receives, after all earlier work of this group, on a thread of
        the group; return its Work at once. All ranks submit in the same order, so each receive
        meets its own send; no message carries a number."""
        def run():
            with self.span(name):
                job()

        self.thread = self.thread or ThreadPoolExecutor(1, f"ring-{self.name}")
        future = self.thread.submit(run)

        def wait():
            with self.span("wait"):
                future.result()

        self.last = Work([wait], f"group {self.name}")
        return self.last


def queued(collective):
    """Make a collective(tensor, group, ...) run after all earlier work of its group. With async_op
    it runs in the background and returns its Work; without, it returns the tensor when complete. In
    a group of one it does nothing."""
    name = collective.__name__.strip("_")

    @wraps(collective)
    def queue(tensor, group, *args, async_op=False, **more):
        if group.size == 1:
            return Work() if async_op else tensor
        if async_op:
            return group.submit(lambda: collective(tensor, group, *args, **more), name)
        group.last.wait()
        with (group.span(name),
              naming(f"rank {group.ranks[group.rank]}: {name} of group {group.name}")):
            collective(tensor, group, *args, **more)
        return tensor

    return queue
