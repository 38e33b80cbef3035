"""Collectives written by hand on point-to-point messages, and the mesh of ranks they run on.

A tensor of n bytes is seen as N chunks (torch.tensor_split: any size, also below N). Chunk r is
rank r's own. Two walks around the ring make the whole family; a rank sends exactly

    reduce_scatter, all_gather     (N-1)/N n      all_reduce = both walks   2 (N-1)/N n

which is the least that any all-reduce can send (Patarasuk & Yuan 2009), in 2 (N-1) hops; a small
tensor takes a butterfly's 2 log2(N) - 1. Every replica ends with the same bits because each chunk
is summed once, in one order. The two that the ring beats are here to compare: the busiest rank of
`sequential_all_reduce` sends 2 n, one after the other; of `parameter_server_all_reduce` (N-1) n.

    python collectives.py        walks a ring of 4 processes and counts the bytes
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

PIECE = 2 << 20  # bytes; one piece is reduced while the next ones are on the way
AHEAD = 8  # pieces whose receives are posted before they are needed
SMALL = 1 << 20  # bytes; up to here hops cost more than bytes
OPS = {"sum": (torch.Tensor.add_, "SUM"), "max": (lambda a, b: torch.maximum(a, b, out=a), "MAX")}


def no_span(name, **args):
    """Where nobody traces: see timeline.py."""
    return NOTHING


NOTHING = nullcontext()


class CommunicationError(RuntimeError):
    """A rank died, hung or never came: one line that names rank, operation and peer."""


@contextmanager
def naming(what):
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise CommunicationError(f"{what}: {str(error).splitlines()[0]}") from None


class Work:
    """Something under way; `wait()` returns when it is done and can be called more than once."""

    def __init__(self, waits=(), what=""):
        self.waits, self.what = waits, what

    def wait(self):
        waits, self.waits = self.waits, ()
        with naming(self.what):
            for wait in waits:
                wait()


class Group:
    """Ranks along one axis of the mesh, in ring order, with a communicator of their own.

    `rank` and every peer named to a method count within the group. `bytes_sent` is the sum over all
    messages of this rank; they all pass through `exchange`. A group of size 1 has no
    communicator and all its collectives are the identity.
    """

    def __init__(self, name, ranks, rank, pg=None, device="cpu", native=False):
        self.name, self.ranks, self.size, self.rank = name, list(ranks), len(ranks), rank
        self.next, self.prev = (rank + 1) % self.size, (rank - 1) % self.size
        self.pg, self.device, self.native = pg, torch.device(device), native
        self.bytes_sent = self.sequence = 0
        self.worker = self.stream = None
        self.last = Work()
        self.span = no_span

    def exchange(self, send=None, dst=None, recv=None, src=None):
        """Post a receive into `recv` from `src` and a send of `send` to `dst`; either may be None.

        Returns a Work; both tensors belong to it until it was waited for. On NCCL the two are one
        fused operation, so opposite directions cannot block each other; on gloo the receive stands
        first, because a send completes only when its receive is posted.
        """
        self.sequence += 1
        sending, receiving = send is not None and send.numel(), recv is not None and recv.numel()
        if sending:
            self.bytes_sent += send.numel() * send.element_size()
        what = (f"rank {self.ranks[self.rank]}: operation {self.sequence} of group {self.name}"
                + (f", receive from rank {self.ranks[src]}" if receiving else "")
                + (f", send to rank {self.ranks[dst]}" if sending else ""))
        with naming(what):
            if self.device.type == "cuda":
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

    def submit(self, fn, *args):
        """Start fn(*args) behind all earlier work of this group and return its Work at once.

        On CPU it runs on the group's worker thread, on CUDA on the group's side stream. Since every
        rank submits in the same order, the group's messages match without tags.
        """
        def traced():
            with self.span(fn.__name__.strip("_"), group=self.name):
                fn(*args)

        def wait_for(job):
            with self.span("wait", group=self.name):
                job()

        if self.size == 1:
            fn(*args)
        elif self.device.type == "cuda":
            self.stream = self.stream or torch.cuda.Stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                traced()
                event = self.stream.record_event()
            # args stay referenced until the wait, so their memory is not reused before it
            self.last = Work([lambda args=args: torch.cuda.current_stream().wait_event(event)])
        else:
            self.worker = self.worker or ThreadPoolExecutor(1, f"ring-{self.name}")
            job = self.worker.submit(traced).result
            self.last = Work([partial(wait_for, job)], f"group {self.name}")
        return self.last

    def run(self, fn, *args):
        """fn(*args) behind all earlier work of this group, and wait for it."""
        self.last.wait()
        name = fn.__name__.strip("_")
        with (self.span(name, group=self.name),
              naming(f"rank {self.ranks[self.rank]}: {name} of group {self.name}")):
            fn(*args)


def _ring(tensor, group, op, hops):
    """Walk around the ring. In hop h every rank sends chunk `rank - 1 - h` to the next rank and
    receives chunk `rank - 2 - h` from the previous one, which it reduces into its own in hops
    0 .. N-2 (reduce-scatter) and overwrites in hops N-1 .. 2N-3 (all-gather).

    A hop is cut into K pieces; what piece p of a hop received is what piece p of the next hop
    sends, so others are under way while one is reduced. On gloo receives stand AHEAD pieces early:
    a send that finds its receive posted saves a round trip. One posted into a chunk that this rank
    has yet to send is safe, as its data come around the ring through that very send.
    """
    assert tensor.is_contiguous(), "collectives take contiguous tensors"
    N, r, reduce, fused = group.size, group.rank, OPS[op][0], group.device.type == "cuda"
    chunks = tensor.view(-1).tensor_split(N)
    K = 1 if fused else max(1, chunks[0].numel() * tensor.element_size() // PIECE)
    cut = [chunk.tensor_split(K) for chunk in chunks]
    plan = [(h, cut[(r - 1 - h) % N][p], cut[(r - 2 - h) % N][p]) for h in hops for p in range(K)]
    spare = [torch.empty_like(cut[0][0]) for _ in range(min(AHEAD, (N - 1 - hops[0]) * K))]
    receives, sends = [], []

    def landing(j):
        h, _, into = plan[j]
        return spare[j % len(spare)][: into.numel()] if h < N - 1 else into

    def land(j):
        receives[j].wait()
        h, _, into = plan[j]
        if h < N - 1:
            reduce(into, landing(j))
        if not fused and len(receives) < len(plan):
            receives.append(group.recv(landing(len(receives)), group.prev))

    if not fused:
        receives = [group.recv(landing(j), group.prev) for j in range(min(AHEAD, len(plan)))]
    for j, (_, out, _) in enumerate(plan):
        if j >= K:
            land(j - K)
        if fused:  # NCCL: opposite ends of one hop leave in one operation
            receives.append(group.exchange(out, group.next, landing(j), group.prev))
        else:
            sends.append(group.send(out, group.next))
    for j in range(len(plan) - K, len(plan)):
        land(j)
    for send in sends:
        send.wait()


def _few_hops(tensor, group):
    """Whether to take `_butterfly`. Every rank must say the same."""
    small = tensor.numel() * tensor.element_size() <= SMALL
    power_of_two = group.size & (group.size - 1) == 0
    return small and power_of_two and group.device.type == "cpu" and not group.native


def _butterfly(tensor, group, op):
    """All_reduce of N = 2^k ranks in 2k - 1 hops, where the ring takes 2 (N-1), for as many bytes.

    With partners ever nearer a rank keeps one half and gives away the other, until the last two
    swap all they have kept (a + b = b + a to the bit); the way back doubles what is complete. All
    receives are posted at once, also those into the half that is on its way out: what they wait
    for is sent after that half has arrived. Starts here, goes on in wait(). Rabenseifner 2004.
    """
    kept, steps, distance = tensor.view(-1), [], group.size // 2
    while distance:
        upper, peer = bool(group.rank & distance), group.rank ^ distance
        halves = kept.tensor_split(2) if distance > 1 else (kept, kept)
        kept, given = halves[upper], halves[not upper]
        steps.append((given, torch.empty_like(kept), kept, peer))
        distance //= 2
    steps += [(kept, given, None, peer) for given, _, kept, peer in steps[-2::-1]]
    out, into, _, peer = steps[0]
    under_way = [group.exchange(out, peer, into, peer)]
    under_way += [group.recv(into, peer) for _, into, _, peer in steps[1:]]

    def finish():
        with group.span("wait", group=group.name):
            sends = []
            for i, (out, into, total, peer) in enumerate(steps):
                if i > 0:
                    sends.append(group.send(out, peer))
                under_way[i].wait()
                if total is not None:
                    if out is total and i > 0:
                        sends[-1].wait()
                    OPS[op][0](total, into)
            for send in sends:
                send.wait()

    return Work([finish], f"group {group.name}")


def _own_chunk(tensor, group):
    return tensor.view(-1).tensor_split(group.size)[group.rank]


def _reduce_scatter(tensor, group, op):
    if group.native and tensor.numel() % group.size == 0:
        dist.reduce_scatter_tensor(_own_chunk(tensor, group), tensor.view(-1),
                                   getattr(dist.ReduceOp, OPS[op][1]), group=group.pg)
    else:
        _ring(tensor, group, op, range(group.size - 1))


def _all_gather(tensor, group):
    if group.native and tensor.numel() % group.size == 0:
        own = _own_chunk(tensor, group)
        dist.all_gather_into_tensor(tensor.view(-1), own.clone(), group=group.pg)
    else:
        _ring(tensor, group, "sum", range(group.size - 1, 2 * group.size - 2))


def _all_reduce(tensor, group, op):
    if group.native:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, OPS[op][1]), group=group.pg)
    elif _few_hops(tensor, group):
        _butterfly(tensor, group, op).wait()
    else:
        _ring(tensor, group, op, range(2 * group.size - 2))


def _run(fn, tensor, group, *args, async_op=False):
    if group.size == 1:
        return Work() if async_op else tensor
    if async_op:
        return group.submit(fn, tensor, group, *args)
    group.run(fn, tensor, group, *args)
    return tensor


def reduce_scatter(tensor, group, op="sum", async_op=False):
    """In: every rank a full tensor. Out: chunk r of rank r's tensor holds the reduction over all
    ranks; the other chunks hold partial sums. Backward of all_gather. Sends (N-1)/N of the bytes.
    """
    return _run(_reduce_scatter, tensor, group, op, async_op=async_op)


def all_gather(tensor, group, async_op=False):
    """In: chunk r of rank r's tensor is valid. Out: all chunks are, on every rank.
    Backward of reduce_scatter. Sends (N-1)/N of the bytes.
    """
    return _run(_all_gather, tensor, group, async_op=async_op)


def all_reduce(tensor, group, op="sum", async_op=False):
    """In: every rank a full tensor. Out: every rank the same bits of the reduction, in place.
    Its own backward. Sends 2 (N-1)/N of the bytes. With async_op returns a Work at once.
    """
    if async_op and group.size == 2 and _few_hops(tensor, group) and not group.last.waits:
        return _butterfly(tensor, group, op)  # its only hop starts here, not in the worker
    return _run(_all_reduce, tensor, group, op, async_op=async_op)


def scatter(tensor, group, root=0):
    """In: `root` a full tensor. Out: chunk r of rank r's tensor is root's. Backward of gather."""
    parts = tensor.view(-1).tensor_split(group.size)
    peers = [p for p in range(group.size) if p != root]
    if group.rank == root:
        works = [group.send(parts[peer], peer) for peer in peers]
    else:
        works = [group.recv(parts[group.rank], root)]
    for work in works:
        work.wait()
    return tensor


def gather(tensor, group, root=0):
    """In: chunk r of rank r's tensor. Out: `root` holds all chunks. Backward of scatter."""
    parts = tensor.view(-1).tensor_split(group.size)
    peers = [p for p in range(group.size) if p != root]
    if group.rank == root:
        works = [group.recv(parts[peer], peer) for peer in peers]
    else:
        works = [group.send(parts[group.rank], root)]
    for work in works:
        work.wait()
    return tensor


def broadcast(tensor, group, root=0):
    """In: `root` a full tensor. Out: every rank has it. Backward of reduce.
    Scatter, then all_gather: nobody sends more than 2 (N-1)/N of the bytes.
    """
    return all_gather(scatter(tensor, group, root), group)


def reduce(tensor, group, root=0, op="sum"):
    """In: every rank a full tensor. Out: `root` holds the reduction, the others partial sums.
    Backward of broadcast. Reduce_scatter, then gather: a rank sends at most the bytes once.
    """
    return gather(reduce_scatter(tensor, group, op), group, root)


def all_to_all(outputs, inputs, group):
    """In: inputs[j] is for rank j. Out: outputs[i] is what rank i had for this one. Lists of N
    tensors; its own backward. Step s pairs each rank with those s before and behind it.
    """
    outputs[group.rank].copy_(inputs[group.rank])
    works = []
    for s in range(1, group.size):
        dst, src = (group.rank + s) % group.size, (group.rank - s) % group.size
        works.append(group.exchange(inputs[dst], dst, outputs[src], src))
    for work in works:
        work.wait()
    return outputs


def barrier(group):
    """Nobody leaves before all have entered: the sum needs every rank's term."""
    all_reduce(torch.zeros(1, device=group.device), group)


def sequential_all_reduce(tensor, group):
    """For comparison only: the full tensor goes once around to be summed and once to be told."""
    if group.rank > 0:
        received = torch.empty_like(tensor)
        group.recv(received, group.prev).wait()
        tensor.add_(received)
    if group.rank < group.size - 1:
        group.send(tensor, group.next).wait()
    if group.size > 1:
        if group.rank != group.size - 1:
            group.recv(tensor, group.prev).wait()
        if group.rank != group.size - 2:
            group.send(tensor, group.next).wait()
    return tensor


def parameter_server_all_reduce(tensor, group):
    """For comparison only: rank 0 receives every tensor, sums, and sends N-1 copies back."""
    if group.rank > 0:
        group.send(tensor, 0).wait()
        group.recv(tensor, 0).wait()
        return tensor
    for peer in range(1, group.size):
        received = torch.empty_like(tensor)
        group.recv(received, peer).wait()
        tensor.add_(received)
    for work in [group.send(tensor, peer) for peer in range(1, group.size)]:
        work.wait()
    return tensor


@dataclass
class Mesh:
    """The rank's coordinates (d, p, t) and the groups that vary one of them."""

    dp: Group
    pp: Group
    tp: Group
    tie: Group  # first and last pipeline stage, where the two ends of the tied embedding live
    world: Group

    def grid(self):
        """The ranks as text, one row per (d, p), t across."""
        D, P, T = self.dp.size, self.pp.size, self.tp.size
        rows = torch.arange(D * P * T).view(D, P, T).tolist()
        return "\n".join(f"  d={d} p={p}  ranks {' '.join(f'{r:2d}' for r in rows[d][p])}"
                         for d in range(D) for p in range(P))


def init(device="cpu", timeout=600, **rendezvous):
    """Join the process group that torchrun's environment (or `rendezvous`) describes."""
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    with naming(f"rank {os.environ.get('RANK', '')}: not all ranks came within {timeout} s"):
        wait = timedelta(seconds=timeout)
        if not rendezvous:  # torchrun's store outlives a restart: no addresses of dead ranks
            store, rank, size = next(dist.rendezvous("env://", timeout=wait))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            rendezvous = {"store": dist.PrefixStore(f"attempt {attempt}", store), "rank": rank,
                          "world_size": size}
        dist.init_process_group(backend, timeout=wait, **rendezvous)


def shutdown(together=True):
    """Leave the process group; `together`: not before all have come, as one may still be joining a
    group or reading what was sent to it."""
    if dist.is_initialized():
        if together:
            with naming(f"rank {dist.get_rank()}: waiting for all ranks to leave"):
                dist.barrier()
        dist.destroy_process_group()


def unlike_rank_0(value):
    """The ranks whose `value`, some bytes, is not rank 0's; needs no mesh, which may be at odds."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"value of rank {dist.get_rank()}", value)
    values = [store.get(f"value of rank {r}") for r in range(dist.get_world_size())]
    return [r for r, other in enumerate(values) if other != values[0]]


def first_to_fail():
    """Whether no other rank has asked this before: one rank speaks for all. Where the store went
    down with the process that held it, every rank does."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=5))
        return store.add("failed", 1) == 1
    except (RuntimeError, ValueError):
        return True


def launch(size):
    """Run this command again as `size` ranks on this machine and return the exit code: 0 if all
    ranks' is, else the highest. Signals are passed on; once a rank has failed, the others have 10 s
    to end. This process holds the store, so that it outlives every rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)), **os.environ,
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size),
           "LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], start_new_session=True,
                              env={**env, "RANK": str(r), "LOCAL_RANK": str(r)})
             for r in range(size)]  # sessions of their own: Ctrl-C reaches them once, from here
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: [rank.send_signal(number) for rank in ranks])
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.05)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and None in [rank.poll() for rank in ranks]:
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
    codes = [rank.wait() for rank in ranks]
    return int(max(*codes, any(codes)))  # killed by a signal, a code is negative


def make_mesh(dp, pp, tp, device="cpu", native=False, timeout=600):
    """Lay the world out as arange(dp*pp*tp).view(dp, pp, tp): T innermost, on the fastest links.

    Every rank calls it. A group of one needs no communicator, so a world of one process needs
    none either and `init` may be left out.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    assert world == dp * pp * tp, f"{world} processes for a mesh of {dp} x {pp} x {tp}"
    grid = torch.arange(world).view(dp, pp, tp)
    ends = grid[:, [0, -1]] if pp > 1 else grid[:, :1]
    # the last axis of each table runs along the group: its ranks share the other coordinates
    axes = {
        "dp": grid.permute(1, 2, 0).reshape(-1, dp),
        "pp": grid.permute(0, 2, 1).reshape(-1, pp),
        "tp": grid.reshape(-1, tp),
        "tie": ends.permute(0, 2, 1).reshape(-1, ends.size(1)),
        "world": grid.reshape(1, -1),
    }
    groups = {}
    for name, table in axes.items():
        groups[name] = Group(name, [rank], 0, None, device, native)
        for ranks in table.tolist():  # new_group is a collective: all ranks make all groups
            pg = None
            if len(ranks) > 1:
                pg = dist.new_group(ranks, timeout=timedelta(seconds=timeout))
            if rank in ranks:
                groups[name] = Group(name, ranks, ranks.index(rank), pg, device, native)
    return Mesh(**groups)


def _walk(rank, size, port):
    """The demonstration: one ring all-reduce, hop by hop, then bytes against the formulas."""
    torch.set_num_threads(1)
    init(rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}")
    group = make_mesh(size, 1, 1).dp
    x = torch.full((size,), 10.0 ** rank)  # digit r of a sum says whether rank r is in it
    parts = list(x.tensor_split(size))

    def show(title):
        rows = [torch.zeros(size) for _ in range(size)]
        all_to_all(rows, [x.clone() for _ in range(size)], group)
        if rank == 0:
            print(f"{title:38s}" + "   ".join(
                f"rank {r}: " + " ".join(f"{int(v):0{size}d}" for v in row)
                for r, row in enumerate(rows)))

    show("start: digit r = rank r's term")
    for phase, first, reduce_ in (("reduce-scatter", rank - 1, True), ("all-gather", rank, False)):
        for hop in range(size - 1):
            into = parts[(first - hop - 1) % size]
            received = torch.empty_like(into)
            group.exchange(parts[(first - hop) % size], group.next, received, group.prev).wait()
            into.copy_(into + received if reduce_ else received)
            show(f"{phase} hop {hop + 1}")
    n = 4 * 1000
    for fn, formula in ((all_reduce, 2 * (size - 1) * n // size),
                        (reduce_scatter, (size - 1) * n // size),
                        (all_gather, (size - 1) * n // size),
                        (sequential_all_reduce, 2 * n),
                        (parameter_server_all_reduce, (size - 1) * n)):
        group.bytes_sent = 0
        fn(torch.ones(n // 4), group)
        busiest = all_reduce(torch.tensor([group.bytes_sent]), group, "max").item()
        if rank == 0:
            print(f"{fn.__name__:28s} of {n} bytes: the busiest rank sent {busiest:6d}, "
                  f"formula {formula:6d}")
    shutdown()


if __name__ == "__main__":
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free_port = s.getsockname()[1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    torch.multiprocessing.spawn(_walk, (ranks, free_port), nprocs=ranks)
