"""The root's Group with what a long, fast run needs: one trick or safeguard per method.

    carry           sends through shared memory where the peer is on this machine, else through gloo
    submit          runs a function in the background, after all earlier work of the group, so that
                    messages travel while the caller computes
    start           every operation gets a number, and an error names rank, operation and peer
    run_native      one of torch's own collectives (--collectives native): the default on GPUs.
                    Those bypass exchange(), and bytes_sent does not count them

This file is for CPUs: shared memory (engine/shared_memory.py) and gloo, torch's message library for
CPUs. engine/nccl_group.py has subclasses for NCCL, the one for GPUs.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps

import torch
import torch.distributed as dist

import group
from collectives import flat
from engine.shared_memory import Incoming, Outgoing
from group import naming

# The library's own collectives. torch 2.13 renamed two of them.
LIBRARY = {
    "all_reduce": dist.all_reduce,
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor}


class Work(group.Work):
    """The root's Work, which any thread may wait for. Each wait() returns only when the operation
    is complete (NCCL: when the stream that is current in the first wait() is ordered behind it)."""

    def __init__(self, waits=(), what=""):
        super().__init__(waits, what)
        self.lock = threading.RLock()  # held by the thread that waits; a second thread waits for it

    def wait(self):
        # Two may wait for one Work: its owner, and the group's next collective, which first waits
        # for the collective before it
        if not self.waits:  # complete
            return
        with self.lock, naming(self.what):
            for wait in self.waits:
                wait()
            self.waits = ()


class Group(group.Group):
    """Some ranks in a ring order."""

    # May several names have one group, if their ranks are the same? Here no: a thread of the group
    # posts what was submitted, and the caller's messages must not get between these
    is_shared = False
    # Do submitted collectives run during compute, without a thread and without the host waiting?
    runs_on_streams = False
    gathers_in_place = False  # gloo's all-gather wants input and output apart

    def __init__(self, mesh, name, ranks, rank, communicator=None):
        super().__init__(mesh, name, ranks, rank, communicator)
        self.mesh = mesh
        self.native = mesh.native  # True: collectives are the library's own
        self.sequence = 0  # number of the last operation, for error messages
        self.last = Work()  # the Work that was submitted last
        self.executor = None  # one thread, which runs submitted work; made by the first submit()
        self.worker = None  # identifies that thread, from its first job on
        self.kept = {}  # (name, shape, dtype) -> the tensor that kept_buffer() returns
        self.links = {}  # (Outgoing or Incoming, peer) -> this rank's end of the link

    def exchange(self, send=None, dst=None, recv=None, src=None, more=(), combine=None):
        """group.Group.exchange, after all submitted work: a message between those of a job would
        be taken for one of them. more: further (send, dst, recv, src) of the same operation.
        combine(recv, received): what to do with a received tensor, in place, once this rank's send
        has left; without it, recv is overwritten."""
        self.wait_for_jobs()
        landing = recv
        if combine and recv.numel() > 0 and not self.link(Incoming, src):
            landing = torch.empty_like(recv)
        ends = []  # (dist.irecv or dist.isend, tensor, peer): the form that dist.P2POp takes
        names = []
        for out, to, into, source in [(send, dst, landing, src), *more]:
            if into is not None and into.numel() > 0:
                ends.append((dist.irecv, into, source))
                names.append(f"receive from rank {self.ranks[source]}")
            if out is not None and out.numel() > 0:
                ends.append((dist.isend, out, to))
                names.append(f"send to rank {self.ranks[to]}")
                self.bytes_sent += out.numel() * out.element_size()
        work = self.start(", ".join(names), lambda: self.carry(ends, combine))
        if landing is not recv:
            work.waits.append(partial(combine, recv, landing))
        return work

    def carry(self, ends, combine):
        """Start these sends and receives: through shared memory where there is a link, else through
        the library. Returns objects to wait() for. combine: of what arrives through a link."""
        works, others = [], []
        for operation, tensor, peer in ends:
            link = self.link(Incoming if operation is dist.irecv else Outgoing, peer)
            if link is None:
                others.append((operation, tensor, peer))
            elif operation is dist.irecv:
                works.append(link.post(tensor, combine))
            else:
                link.send(tensor)
                works.append(link)
        return works + self.post(others)

    def post(self, ends):
        """Post these sends and receives; return the library's works."""
        return [self.communicator.recv([tensor], peer, 0) if operation is dist.irecv else
                self.communicator.send([tensor], peer, 0) for operation, tensor, peer in ends]

    def is_on_one_machine(self):
        """Does shared memory carry all messages of the ring? All ranks give the same answer."""
        neighbours = self.mesh.neighbours
        return neighbours is not None and all(
            neighbours.are(rank, self.ranks[i - 1]) for i, rank in enumerate(self.ranks))

    def link(self, end, peer):
        """This rank's end of the link to or from a peer; None if gloo carries their messages."""
        neighbours = self.mesh.neighbours
        if not neighbours or not neighbours.are(self.ranks[self.rank], self.ranks[peer]):
            return None
        if (end, peer) not in self.links:
            self.links[end, peer] = end(neighbours, self.name, self.ranks[peer])
        return self.links[end, peer]

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
        """Nothing here. On GPUs wait() does not block the host, so CudaGroup.track lists pending
        operations, and start_read()'s function looks at them, to notice a rank that died."""

    def kept_buffer(self, name, shape, dtype):
        """A tensor for messages, the same one in each call, with whatever values it has. (A new
        tensor for each message would take memory: torch reuses the memory of a sent or received
        tensor only when the device is past the message. By then the host, which runs ahead, has
        already allocated the next tensors.)"""
        key = name, torch.Size(shape), dtype
        if key not in self.kept:
            self.kept[key] = torch.empty(shape, dtype=dtype, device=self.device)
        return self.kept[key]

    def recv_new(self, shape, dtype, src):
        """Post a receive into a new tensor. Return (tensor, Work)."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor, self.recv(tensor, src)

    def run_native(self, name, *args):
        """Run one of the library's own collectives and wait for it."""
        self.start(f"native {name}", lambda: [
            LIBRARY[name](*args, group=self.communicator, async_op=True)]).wait()

    def submit(self, job, name):
        """Run job(), which sends and receives, after all earlier work of this group, on a thread of
        the group; return its Work at once. All ranks submit in the same order, so each receive
        meets its own send without a tag."""
        def run():
            self.worker = threading.get_ident()
            job()

        self.executor = self.executor or ThreadPoolExecutor(1, f"ring-{self.name}")
        future = self.executor.submit(run)
        self.last = Work([future.result], f"group {self.name}")
        return self.last

    def wait_for_jobs(self):
        """Wait until the group's thread has run all submitted jobs, unless the caller is a job. (A
        CudaGroup has no thread: submit() has posted a job's messages when it returns.)"""
        if self.executor and not self.is_running_job():
            self.last.wait()

    def is_running_job(self):
        """Is the caller a job on this group's thread? (CudaGroup: on its side stream?)"""
        return threading.get_ident() == self.worker


def queued(collective):
    """Make a collective(tensor, group, ...) run after all earlier work of its group. With async_op
    it runs in the background and returns its Work; without, it returns the tensor when complete. In
    a group of one it does nothing. A tensor that is not contiguous is refused here, not in the
    job, so that it fails the call, not the group's next wait. A queued collective may call others
    of its group: inside of a job these run at once, also with async_op; otherwise the job would
    wait for itself."""
    name = collective.__name__.strip("_")

    @wraps(collective)
    def queue(tensor, group, *args, async_op=False, **more):
        if torch.is_tensor(tensor):  # all_to_all has lists, and refuses by itself
            flat(tensor)
        if group.size == 1:
            return Work() if async_op else tensor
        inside = group.is_running_job()
        if async_op and not inside:
            return group.submit(lambda: collective(tensor, group, *args, **more), name)
        if not inside:
            group.last.wait()
        with naming(f"rank {group.ranks[group.rank]}: {name} of group {group.name}"):
            collective(tensor, group, *args, **more)
        return Work() if async_op else tensor

    return queue
