"""Messages: the one method that each of them passes through, and work that goes on beside others.

A Group is some ranks in a ring order. `exchange` posts a send, a receive or both, and returns a
Work; `submit` starts several of them behind all earlier ones of the group, while the caller goes
on. Everything else that ranks tell each other is made of these two (collectives.py). A message of n
bytes takes latency + n / bandwidth.

What differs between the two libraries stands here, and nowhere else:

    gloo (CPU)   a send ends when it meets its receive, and a wait holds the process
    NCCL (CUDA)  operations run in the order they are posted, and a wait holds the stream
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from types import SimpleNamespace

import torch
import torch.distributed as dist

LIBRARY = {  # by their names from torch 2.13 on, or before
    "all_reduce": dist.all_reduce,
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor}


class CommunicationError(RuntimeError):
    """A rank died, hung or never came: one line that names rank, operation and peer."""


@contextmanager
def naming(what):
    """A RuntimeError of the library inside becomes a CommunicationError about `what`."""
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:
        # Without the library's place in its sources, and without its advice
        text = re.sub(r"^\[\S*\] |\. (This is|Check) .*|, keys: .*", "", str(error).splitlines()[0])
        raise CommunicationError(f"{what}: {text}") from None


NOTHING = nullcontext()


def no_span(name, **args):
    """What stands in for Tracer.span (timeline.py) where nobody traces."""
    return NOTHING


class Work:
    """Something under way. `wait()` returns when it is done, and may be called more than once."""

    def __init__(self, waits=(), what=""):
        self.waits = waits  # functions that each return when a part of it is done
        self.what = what  # named by the error if one of them fails

    def wait(self):
        waits, self.waits = self.waits, ()
        with naming(self.what):
            for wait in waits:
                wait()


def seen(work):
    """Whether the device has done it. An error that it ended with is raised."""
    done = work.is_completed()
    if done:
        work.wait()
    return done


def wait_all(works):
    for work in works:
        work.wait()


class Group:
    """Some ranks in ring order, with a communicator of their own (none if there is but one).

    `rank` and every peer named to a method count within the group.
    """

    def __init__(self, mesh, name, ranks, rank, pg=None):
        self.name, self.ranks, self.rank, self.size = name, list(ranks), rank, len(ranks)
        self.next, self.prev = (rank + 1) % self.size, (rank - 1) % self.size
        self.pg, self.device = pg, mesh.device  # pg: its communicator, a ProcessGroup
        self.native = mesh.native  # collectives.py is to call the library's own
        self.in_order = mesh.in_order
        self.posted, self.timeout = mesh.posted, mesh.timeout
        self.bytes_sent = 0  # by this rank, over all messages
        self.sequence = 0  # number of the last operation, for error messages
        self.thread = self.stream = None  # where submitted work runs: on CPU, on CUDA
        self.receiving = None  # on CUDA, the stream of recv_new
        self.last = Work()  # submitted last
        self.span = no_span

    def exchange(self, send=None, dst=None, recv=None, src=None):
        """Post a receive into `recv` from `src` and a send of `send` to `dst`; either may be None.
        Returns a Work, to which both tensors belong until it was waited for. The two directions
        cannot block each other: they are one operation, or else the receive is posted first."""
        sending = send is not None and send.numel() > 0
        receiving = recv is not None and recv.numel() > 0
        if sending:
            self.bytes_sent += send.numel() * send.element_size()
        ends, what = [], []
        if receiving:
            ends.append((dist.irecv, recv, src))
            what.append(f"receive from rank {self.ranks[src]}")
        if sending:
            ends.append((dist.isend, send, dst))
            what.append(f"send to rank {self.ranks[dst]}")
        return self.note(", ".join(what), lambda: self.post(ends))

    def post(self, ends):
        """Hand (dist.isend or dist.irecv, tensor, peer) over to the library; returns its works."""
        if not self.in_order:
            return [self.pg.recv([tensor], peer, 0) if op is dist.irecv else
                    self.pg.send([tensor], peer, 0) for op, tensor, peer in ends]
        ops = [dist.P2POp(op, tensor, group=self.pg, group_peer=peer) for op, tensor, peer in ends]
        return dist.batch_isend_irecv(ops) if ops else []

    def note(self, what, post):
        """The Work of an operation that post() starts, returning the library's works."""
        self.sequence += 1
        what = (f"rank {self.ranks[self.rank]}: operation {self.sequence} of group {self.name}, "
                f"{what}")
        with naming(what):
            works = post()
        if self.posted is not None:
            while self.posted and self.posted[0][1]():
                self.posted.popleft()
            self.posted.extend((what, partial(seen, work)) for work in works)
        return Work([work.wait for work in works], what)

    def run_native(self, name, *args):
        """One of the library's own collectives, waited for. On CUDA by the current stream: a Work
        would keep its tensors until it is looked at."""
        def post():
            if self.posted is None:
                return [LIBRARY[name](*args, group=self.pg, async_op=True)]
            LIBRARY[name](*args, group=self.pg)
            done = torch.cuda.current_stream().record_event()
            return [SimpleNamespace(wait=lambda: None, is_completed=done.query)]

        self.note(f"native {name}", post).wait()

    def send(self, tensor, dst):
        return self.exchange(send=tensor, dst=dst)

    def recv(self, tensor, src):
        return self.exchange(recv=tensor, src=src)

    def recv_new(self, shape, dtype, src):
        """(tensor, Work): a receive into a new tensor. On CUDA it has a stream of its own, or it
        would begin only where all computation posted before it has ended."""
        if self.device.type != "cuda":
            tensor = torch.empty(shape, dtype=dtype)
            return tensor, self.recv(tensor, src)
        self.receiving = self.receiving or torch.cuda.Stream(self.device, priority=-1)
        with torch.cuda.stream(self.receiving):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            work = self.recv(tensor, src)
        # its memory is the receiving stream's: that one must not give it away while we compute
        use = partial(tensor.record_stream, torch.cuda.current_stream())
        return tensor, Work([work.wait, use])

    def read(self, tensor):
        """tensor.tolist(). On CUDA all that was posted must be done first: here a rank that died or
        hangs is noticed, as nothing before this waits on the host."""
        deadline = time.monotonic() + self.timeout
        while self.posted:
            what, done = self.posted[0]
            with naming(what):
                if done():
                    self.posted.popleft()
                elif time.monotonic() > deadline:
                    raise CommunicationError(f"{what}: not done within {self.timeout:g} s")
                else:
                    time.sleep(0.0002)
        return tensor.tolist()

    def submit(self, job, name):
        """Start job(), which sends and receives, behind all earlier work of this group; returns its
        Work at once. On CPU it runs on the group's own thread, on CUDA on a side stream. Every rank
        submits in the same order, so messages match although they carry no tags."""
        if self.device.type == "cuda":
            self.stream = self.stream or torch.cuda.Stream(self.device, priority=-1)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream), self.span(name, group=self.name):
                job()
                event = self.stream.record_event()

            def wait():
                torch.cuda.current_stream().wait_event(event)
                return job  # unused; while this function lives, the job's tensors do, too
        else:
            def traced():
                with self.span(name, group=self.name):
                    job()

            def wait():
                with self.span("wait", group=self.name):
                    result()

            self.thread = self.thread or ThreadPoolExecutor(1, f"ring-{self.name}")
            result = self.thread.submit(traced).result
        self.last = Work([wait], f"group {self.name}")
        return self.last


def queued(collective):
    """Run a collective behind all earlier work of its group. With async_op the caller goes on at
    once, with a Work to wait for; until then the tensor belongs to the collective."""
    name = collective.__name__.strip("_")

    @wraps(collective)
    def queue(tensor, group, *args, async_op=False, **more):
        if group.size == 1:
            return Work() if async_op else tensor
        if async_op:
            return group.submit(lambda: collective(tensor, group, *args, **more), name)
        group.last.wait()
        with (group.span(name, group=group.name),
              naming(f"rank {group.ranks[group.rank]}: {name} of group {group.name}")):
            collective(tensor, group, *args, **more)
        return tensor

    return queue
