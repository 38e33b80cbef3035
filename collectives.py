"""Collectives by hand: all_reduce and its family, from sends and receives.

A tensor of n bytes is cut into N chunks (torch.tensor_split: any size, also below N); chunk r is
rank r's own. Two walks around the ring make the whole family, and a rank sends exactly

    reduce_scatter, all_gather    (N-1)/N n
    all_reduce = one, then other  2 (N-1)/N n, in 2 (N-1) hops

No all-reduce can send less (Patarasuk & Yuan 2009). Small ones take fewer hops: the butterfly. All
ranks end with the same bits. Two simpler ways, which the ring beats, end this file.

    python collectives.py        a ring of 4 processes, hop by hop, and the bytes it takes
"""

import torch
import torch.distributed as dist

from group import Work, queued, wait_all
from run.demonstrations import demonstrate, ranks_asked

OPS = {"sum": (torch.Tensor.add_, dist.ReduceOp.SUM),  # ours, in place; the library's name
       "max": (lambda a, b: torch.maximum(a, b, out=a), dist.ReduceOp.MAX)}


def plain_all_reduce(tensor, group, after_hop=lambda hop: None):
    """The ring at its plainest. In each hop every rank sends one chunk to the next rank and
    receives another from the rank before it: all links are busy, all the time.

    In: every rank a full tensor. Out: every rank the sum, in place. after_hop is for the demo.
    """
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    for hop in range(2 * (N - 1)):
        out, into = chunks[(r - 1 - hop) % N], chunks[(r - 2 - hop) % N]
        received = torch.empty_like(into)
        group.exchange(out, group.next, received, group.prev).wait()
        if hop < N - 1:  # reduce-scatter: partial sums travel; chunk r ends complete on rank r
            into.add_(received)
        else:  # all-gather: the complete chunks go around once more
            into.copy_(received)
        after_hop(hop)
    return tensor


# ---- the same ring, fast: two tricks, which make 64 MB on 2 ranks 1.86 times as fast ----
# A piece of a hop is added while the next ones travel. 64 MB on 2 ranks: pieces of 256 KB take 1.6
# to 1.8 times as long as those of 1 MB, and those of 2 MB 5 to 15% less than those of 1 MB.
PIECE = 2 << 20  # bytes
# Receives stand ready so many pieces ahead: a gloo send ends when it meets its receive, and if that
# is there already, a round trip is saved.
AHEAD = 8


def ring(tensor, group, op, hops):
    """The hops, of 0 .. 2N-3, of plain_all_reduce: the same chunks take the same way. A receive may
    be posted into a chunk that this rank has yet to send. That is safe: what will land there cannot
    exist before that send has gone around the ring."""
    assert tensor.is_contiguous(), "collectives take contiguous tensors"
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    K = 1 if group.in_order else max(1, chunks[0].nbytes // PIECE)  # pieces per chunk
    cut = [chunk.tensor_split(K) for chunk in chunks]
    # (hop, what goes out, what comes in) for each piece of each hop; what came in with entry j goes
    # out with entry j + K. spare: where terms wait to be added; the all-gather needs none of it.
    plan = [(h, cut[(r - 1 - h) % N][p], cut[(r - 2 - h) % N][p]) for h in hops for p in range(K)]
    most = 1 if group.in_order else min(AHEAD, (N - 1 - hops[0]) * K)
    spare, receives, sends = [torch.empty_like(cut[0][0]) for _ in range(most)], [], []

    def landing(j):  # where entry j's data arrive: beside what they are added to, or in place
        hop, _, into = plan[j]
        return spare[j % len(spare)][: into.numel()] if hop < N - 1 else into

    def post():  # the next receive of the plan
        if not group.in_order and len(receives) < len(plan):
            receives.append(group.recv(landing(len(receives)), group.prev))

    def land(j):
        receives[j].wait()
        hop, _, into = plan[j]
        if hop < N - 1:
            OPS[op][0](into, landing(j))
        post()

    for _ in range(AHEAD):
        post()
    for j, (_, out, _) in enumerate(plan):
        if j >= K:
            land(j - K)
        if group.in_order:
            receives.append(group.exchange(out, group.next, landing(j), group.prev))
        else:
            sends.append(group.send(out, group.next))
    for j in range(len(plan) - K, len(plan)):
        land(j)
    wait_all(sends)


# ---- few hops for small tensors ----
# Up to SMALL bytes a hop costs more than its data, so take fewer: 4 KB on 4 ranks need 2.6 to
# 3.0 ms, the ring 3.9, gloo 5.3. A step of --tp 2 --pp 2: 450 ms, with a limit of 256 KB 518.
SMALL = 1 << 20  # bytes


def few_hops(tensor, group):
    """Whether to take the butterfly; all ranks say the same."""
    power_of_two = group.size & (group.size - 1) == 0
    return tensor.nbytes <= SMALL and power_of_two and not group.in_order and not group.native


def butterfly(tensor, group, op):
    """All_reduce of N = 2^k ranks in 2k - 1 hops, where the ring takes 2 (N-1), for as many bytes.
    Starts here, goes on in wait(). Rabenseifner 2004.
    With partners at distance N/2, N/4, ... 1 a rank keeps one half of what it has and gives away
    the other; the last two swap all that they kept (a + b = b + a to the bit). The way back doubles
    what is complete. All receives are posted at once, also those into the half that is on its way
    out: what they wait for is sent after that half has arrived."""
    # steps: (what goes out, where the answer lands, what that is added to or None, with whom)
    kept, steps, distance = tensor.view(-1), [], group.size // 2
    while distance:
        upper, peer = bool(group.rank & distance), group.rank ^ distance
        halves = kept.tensor_split(2) if distance > 1 else (kept, kept)
        kept, given = halves[upper], halves[not upper]
        steps.append((given, torch.empty_like(kept), kept, peer))
        distance //= 2
    steps += [(kept, given, None, peer) for given, _, kept, peer in steps[-2::-1]]
    out, into, _, peer = steps[0]
    works = [group.exchange(out, peer, into, peer)]  # works[i]: what step i receives; then sends
    works += [group.recv(into, peer) for _, into, _, peer in steps[1:]]

    def finish():
        with group.span("wait", group=group.name):
            for i, (out, into, total, peer) in enumerate(steps):
                if i > 0:
                    works.append(group.send(out, peer))
                works[i].wait()
                if total is not None:
                    if out is total:
                        works[-1].wait()  # it must have left before it is added to
                    OPS[op][0](total, into)
            wait_all(works)

    return Work([finish], f"group {group.name}")


def own_chunk(tensor, group):
    return tensor.view(-1).tensor_split(group.size)[group.rank]


@queued
def reduce_scatter(tensor, group, op="sum"):
    """In: every rank a full tensor. Out: chunk r of rank r's tensor holds the reduction over all
    ranks, the others partial sums. Backward of all_gather. Sends (N-1)/N of the bytes."""
    if group.native and tensor.numel() % group.size == 0:
        own = own_chunk(tensor, group)
        group.run_native("reduce_scatter", own, tensor.view(-1), OPS[op][1])
    else:
        ring(tensor, group, op, range(group.size - 1))


@queued
def all_gather(tensor, group):
    """In: chunk r of rank r's tensor is valid. Out: all chunks are, on every rank. Backward of
    reduce_scatter. Sends (N-1)/N of the bytes."""
    if group.native and tensor.numel() % group.size == 0:
        own = own_chunk(tensor, group).clone()
        group.run_native("all_gather", tensor.view(-1), own)
    else:
        ring(tensor, group, "sum", range(group.size - 1, 2 * group.size - 2))


@queued
def _all_reduce(tensor, group, op):
    if group.native:
        group.run_native("all_reduce", tensor, OPS[op][1])
    elif few_hops(tensor, group):
        butterfly(tensor, group, op).wait()
    else:
        ring(tensor, group, op, range(2 * group.size - 2))


def all_reduce(tensor, group, op="sum", async_op=False):
    """In: every rank a full tensor. Out: every rank the same bits of the reduction, in place. Its
    own backward. Sends 2 (N-1)/N of the bytes."""
    # The butterfly of two ranks is one exchange, posted by this thread at once. It may pass the
    # queue only when that is empty: then both ranks post their messages in the same order.
    if async_op and group.size == 2 and few_hops(tensor, group) and not group.last.waits:
        return butterfly(tensor, group, op)
    return _all_reduce(tensor, group, op, async_op=async_op)


@queued
def scatter(tensor, group, root=0):
    """In: `root` a full tensor. Out: chunk r of rank r's tensor is root's. Backward of gather."""
    parts = enumerate(tensor.view(-1).tensor_split(group.size))
    if group.rank == root:
        wait_all([group.send(part, peer) for peer, part in parts if peer != root])
    else:
        group.recv(own_chunk(tensor, group), root).wait()


@queued
def gather(tensor, group, root=0):
    """In: chunk r of rank r's tensor. Out: `root` holds all chunks. Backward of scatter."""
    parts = enumerate(tensor.view(-1).tensor_split(group.size))
    if group.rank == root:
        wait_all([group.recv(part, peer) for peer, part in parts if peer != root])
    else:
        group.send(own_chunk(tensor, group), root).wait()


def broadcast(tensor, group, root=0):
    """In: `root` a full tensor. Out: every rank has it. Backward of reduce. Scatter, then
    all_gather: nobody sends more than 2 (N-1)/N of the bytes."""
    return all_gather(scatter(tensor, group, root), group)


def reduce(tensor, group, root=0, op="sum"):
    """In: every rank a full tensor. Out: `root` holds the reduction. Backward of broadcast.
    Reduce_scatter, then gather: a rank sends at most the bytes once."""
    return gather(reduce_scatter(tensor, group, op), group, root)


@queued
def _all_to_all(outputs, group, inputs):
    r, N = group.rank, group.size
    wait_all([group.exchange(inputs[(r + d) % N], (r + d) % N, outputs[(r - d) % N], (r - d) % N)
              for d in range(1, N)])


def all_to_all(outputs, inputs, group, async_op=False):
    """In: inputs[j] is for rank j. Out: outputs[i] is what rank i had for this one. Lists of N
    tensors. Its own backward. Each step pairs ranks one place further apart."""
    outputs[group.rank].copy_(inputs[group.rank])
    return _all_to_all(outputs, group, inputs, async_op=async_op)


def barrier(group):
    """Nobody leaves before all have entered: the sum needs every rank's term."""
    all_reduce(torch.zeros(1, device=group.device), group)


# ---- for comparison: the two that the ring beats, one message at a time ----

def hand(tensor, group, src, dst, add=False):  # dst gets src's tensor, or adds it to its own
    if group.rank == src:
        group.send(tensor, dst).wait()
    elif group.rank == dst:
        received = torch.empty_like(tensor)
        group.recv(received, src).wait()
        tensor.copy_(tensor + received if add else received)


def sequential_all_reduce(tensor, group):
    """Once around to be summed and once to be told; the busiest rank sends 2 n."""
    for r in range(1, group.size):
        hand(tensor, group, r - 1, r, add=True)
    for r in range(group.size - 1):
        hand(tensor, group, (r - 1) % group.size, r)
    return tensor


def parameter_server_all_reduce(tensor, group):
    """Rank 0 sums all that the others send, and sends N-1 copies back: (N-1) n."""
    for r in range(1, group.size):
        hand(tensor, group, r, 0, add=True)
    for r in range(1, group.size):
        hand(tensor, group, 0, r)
    return tensor


def demo(mesh):
    """One ring all-reduce, hop by hop, then bytes against the formulas."""
    group, N = mesh.world, mesh.world.size
    x = torch.full((N,), 10.0 ** group.rank)  # digit r of a sum says whether rank r is in it

    def show(hop):
        rows = [torch.zeros(N) for _ in range(N)]
        all_to_all(rows, [x.clone() for _ in range(N)], group)
        phase = ["start", *["reduce-scatter"] * (N - 1), *["all-gather"] * (N - 1)][hop + 1]
        if group.rank == 0:
            print(f"{phase:14}", *(f"  rank {r}: " + " ".join(
                f"{int(v):0{N}d}" for v in row) for r, row in enumerate(rows)))

    show(-1)
    plain_all_reduce(x, group, after_hop=show)
    n, walk = 3360, (N - 1) * 3360 // N  # bytes; what one walk around the ring sends
    for fn, formula in ((plain_all_reduce, 2 * walk), (all_reduce, 2 * walk),
                        (reduce_scatter, walk), (all_gather, walk),
                        (sequential_all_reduce, 2 * n), (parameter_server_all_reduce, N * walk)):
        before = group.bytes_sent
        fn(torch.ones(n // 4), group)
        busiest = all_reduce(torch.tensor([group.bytes_sent - before]), group, "max").item()
        if group.rank == 0:
            print(f"{fn.__name__:28}the busiest rank sent {busiest:5} bytes, formula {formula:5}")


if __name__ == "__main__":
    demonstrate(demo, dp=ranks_asked(4))
