"""Ranks and groups: who talks to whom, and the one method that every message passes through.

N processes are laid out on a mesh of named axes, as arange(N).view(D/E, E, P, C, T):

    dp  data parallel     talks once a step, so it may cross the slowest links; E of D share experts
    ep  expert parallel   talks in each layer's experts
    pp  pipeline          talks once per microbatch and stage
    cp  context parallel  talks in each layer's attention
    tp  tensor parallel   talks several times per layer: innermost, on the fastest links

A group is the ranks that share a place on every axis but the named ones. With D = P = T = 2
`mesh.group("tp")` of rank 5 is [4, 5], and `mesh.group("pp", "tp")` its whole replica, [4, 5, 6,
7]. In a group of one a collective does nothing, so most code need not ask how large a group is.

    python mesh.py 2 1 2 1 2        who sits where, and every group of the mesh
"""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from itertools import product

import torch
import torch.distributed as dist


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
        raise CommunicationError(f"{what}: {str(error).splitlines()[0]}") from None


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


def wait_all(works):
    for work in works:
        work.wait()


class Group:
    """Some ranks in ring order, with a communicator of their own (none if there is but one).

    `rank` and every peer named to a method count within the group.
    """

    def __init__(self, name, ranks, rank, pg=None, device="cpu", native=False):
        self.name, self.ranks, self.rank, self.size = name, list(ranks), rank, len(ranks)
        self.next, self.prev = (rank + 1) % self.size, (rank - 1) % self.size
        self.pg, self.device = pg, torch.device(device)  # pg: its communicator, a ProcessGroup
        self.native = native  # collectives.py is to call the library's own
        # NCCL (CUDA) runs operations in the order they are posted, so no receive is posted early,
        # and the two directions of an exchange leave as one operation. With gloo (CPU) a send ends
        # once its receive is posted, so receives are posted early.
        self.in_order = self.device.type == "cuda"
        self.bytes_sent = 0  # by this rank, over all messages
        self.sequence = 0  # number of the last operation, for error messages
        self.thread = self.stream = None  # where submitted work runs: on CPU, on CUDA
        self.last = Work()  # submitted last
        self.span = no_span

    def exchange(self, send=None, dst=None, recv=None, src=None):
        """Post a receive into `recv` from `src` and a send of `send` to `dst`; either may be None.
        Returns a Work, to which both tensors belong until it was waited for. The two directions
        cannot block each other: they are one operation, or else the receive is posted first."""
        self.sequence += 1
        sending = send is not None and send.numel() > 0
        receiving = recv is not None and recv.numel() > 0
        if sending:
            self.bytes_sent += send.numel() * send.element_size()
        what = (f"rank {self.ranks[self.rank]}: operation {self.sequence} of group {self.name}"
                + (f", receive from rank {self.ranks[src]}" if receiving else "")
                + (f", send to rank {self.ranks[dst]}" if sending else ""))
        with naming(what):
            if self.in_order:
                ends = ((receiving, dist.irecv, recv, src), (sending, dist.isend, send, dst))
                ops = [dist.P2POp(op, tensor, group=self.pg, group_peer=peer)
                       for present, op, tensor, peer in ends if present]
                works = dist.batch_isend_irecv(ops) if ops else []
            else:
                works = [self.pg.recv([recv], src, 0)] if receiving else []
                works += [self.pg.send([send], dst, 0)] if sending else []
        return Work([work.wait for work in works], what)

    def send(self, tensor, dst):
        return self.exchange(send=tensor, dst=dst)

    def recv(self, tensor, src):
        return self.exchange(recv=tensor, src=src)

    def submit(self, job, name):
        """Start job(), which sends and receives, behind all earlier work of this group; returns its
        Work at once. On CPU it runs on the group's own thread, on CUDA on a side stream. Every rank
        submits in the same order, so messages match although they carry no tags."""
        if self.device.type == "cuda":
            self.stream = self.stream or torch.cuda.Stream(self.device)
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


def lay_out(sizes, axes):
    """The groups along `axes` of a mesh {axis: size}: lists of the ranks that differ there only. An
    axis that the mesh does not have has size 1."""
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    along = [list(sizes).index(axis) for axis in axes if axis in sizes]
    rows = ranks.movedim(along, list(range(-len(along), 0)))  # the named axes are the last now
    return rows.reshape(-1, math.prod(sizes.get(axis, 1) for axis in axes)).tolist()


class Mesh:
    """The world's ranks on named axes, the outermost first: Mesh(dp=2, pp=2, tp=2). Making a group
    is a collective: all ranks ask for the same groups in the same order."""

    def __init__(self, device="cpu", native=False, timeout=600, **sizes):
        self.sizes, self.device, self.native = sizes, torch.device(device), native
        self.timeout = timeout  # seconds
        alone = not dist.is_initialized()  # a world of one process needs no communicator
        self.rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        assert world == math.prod(sizes.values()), f"{world} processes for a mesh of {sizes}"
        self.groups = {}  # made so far, by name
        self.world = self.join("world", [list(range(world))])

    def group(self, *axes):
        """This rank's group along these axes, with a communicator and a queue of its own."""
        return self.join("_".join(axes), lay_out(self.sizes, axes))

    def place(self, *axes):
        """(index, number): this rank's place among those along these axes, and how many they are.
        Needs no communicator."""
        row = next(row for row in lay_out(self.sizes, axes) if self.rank in row)
        return row.index(self.rank), len(row)

    def ends(self, axis):
        """The first and the last rank along an axis. A rank between them is in a group of one."""
        rows = [sorted({row[0], row[-1]}) for row in lay_out(self.sizes, [axis])]
        return self.join(axis + "_ends", rows)

    def join(self, name, rows):
        """This rank's group called `name`. rows: the ranks of each group of that name."""
        if name not in self.groups:
            mine = Group(name, [self.rank], 0, None, self.device, self.native)
            for ranks in rows:
                pg = self.communicator(name, ranks) if len(ranks) > 1 else None
                if self.rank in ranks:
                    at = ranks.index(self.rank)
                    mine = Group(name, ranks, at, pg, self.device, self.native)
            self.groups[name] = mine
        return self.groups[name]

    def communicator(self, name, ranks):
        with naming(f"rank {self.rank}: joining group {name}"):
            return dist.new_group(ranks, timeout=timedelta(seconds=self.timeout))


def grid(sizes):
    """The ranks as text: the innermost axis across, a row for each place on the others that have
    more than one."""
    *outer, inner = sizes
    outer = [axis for axis in outer if sizes[axis] > 1]
    places = product(*([f"{axis[0]}={i}" for i in range(sizes[axis])] for axis in outer))
    return "\n".join(f"  {' '.join(place)}  ranks {' '.join(f'{r:2d}' for r in ranks)}"
                     for place, ranks in zip(places, lay_out(sizes, [inner]), strict=True))


def main():
    given = sys.argv[1:] or ["2", "1", "2", "1", "2"]
    if len(given) != 5 or not all(size.isdigit() and int(size) for size in given):
        print("mesh.py: give the sizes of dp, ep, pp, cp and tp, as in 2 1 2 1 2", file=sys.stderr)
        sys.exit(2)
    sizes = dict(zip(("dp", "ep", "pp", "cp", "tp"), map(int, given), strict=True))
    print(grid(sizes))
    for axes in (*([axis] for axis in sizes if sizes[axis] > 1), ["dp", "ep", "cp"], ["pp", "tp"]):
        print(f"group({', '.join(axes)}):", *lay_out(sizes, axes))


if __name__ == "__main__":
    main()
