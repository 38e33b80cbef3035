"""Ranks and groups: which process talks to which.

N processes (ranks) are laid out on a mesh of named axes, like arange(N).view(D, P, T). Launchers
number ranks machine by machine: neighbours in number share the fast links of a machine, ranks far
apart talk over the network. So the axis that talks most comes last (innermost):

    rep    replicas of shards     once per step
    shard  data parallel          once per step (ZeRO-1: twice; ZeRO-2, 3: in every microbatch)
    pp     pipeline               twice per microbatch and boundary of stages: forward, backward
    ep     expert parallel        four all-to-alls of tokens per layer and microbatch
    cp     context parallel       in each hop of each attention layer, forward and backward
    tp     tensor parallel        four all-reduces per layer and microbatch, plus embedding and head

The D data ranks (--dp) are the axes rep, shard and ep together: mesh.group("dp") is all of them.
Without --shard and --ep the axis shard has all D. --shard R: ZeRO shards over R data ranks, so rep
has D/R; --ep E: E data ranks share the experts, so shard has R/E.

A group along some axes: the ranks that differ in these axes only. With D = P = T = 2 and rank 5,
mesh.group("tp") is [4, 5], and mesh.group("pp", "tp") is [4, 5, 6, 7], which is one full copy of
the model (a replica). A collective (an operation that all ranks of a group call together) does
nothing in a group of one, so the code that trains need not ask for sizes.

    python -m extras.show mesh 2 2 1 1 2    prints the ranks and groups of dp 2 pp 2 ep 1 cp 1 tp 2
"""

import math
from datetime import timedelta

import torch
import torch.distributed as dist

from collectives import Group, naming
from transport import shared_memory
from transport.background import Background
from transport.gloo import Gloo
from transport.nccl import Nccl

DATA = ("rep", "shard", "ep")  # the axes of the data ranks


def lay_out(sizes, axes):
    """The groups along `axes` of a mesh {axis: size}: lists of ranks, one list for each group. An
    axis that the mesh does not have has size 1; "dp" stands for the axes in DATA.

    sizes = {shard: 2, pp: 2, tp: 2}: axes [tp] gives [0 1] [2 3] [4 5] [6 7]; [pp] gives [0 2]
    [1 3] [4 6] [5 7]; [shard, tp], and [dp, tp] too, gives [0 1 4 5] [2 3 6 7]."""
    # "dp" becomes rep, shard, ep. Move the dims of the axes to the end, then each row is a group
    axes = [one for axis in axes for one in (DATA if axis == "dp" else (axis,))]
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    dims = [list(sizes).index(axis) for axis in axes if axis in sizes]
    last = list(range(-len(dims), 0))
    size = math.prod(sizes.get(axis, 1) for axis in axes)
    return ranks.movedim(dims, last).reshape(-1, size).tolist()


def connection_options(device, timeout):
    """How torch is to connect ranks on this device: keywords that init_process_group and new_group
    share. timeout: seconds. On GPUs NCCL carries the messages."""
    if device.type != "cuda":
        return {"timeout": timedelta(seconds=timeout)}
    # Twice: our own check (start_read in transport/nccl.py) is to fire first; at this limit NCCL's
    # watchdog kills the process
    limit = timedelta(seconds=2 * timeout)
    # Sends and receives run on a stream of NCCL's own. At normal priority a message would wait
    # behind the matrix products that the GPU already has to do, whatever the priority of the stream
    # that posts the message
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = limit  # torch warns if the two differ
    return {"timeout": limit, "pg_options": options}


class Mesh:
    """The world's ranks on named axes: Mesh(dp=2, pp=2, tp=2). A group is made when it is first
    asked for, by all ranks together: ask in the same order on all."""

    def __init__(self, device="cpu", timeout=600, native=False, dp=1, pp=1, cp=1, tp=1, ep=1,
                 shard=0):
        """The sizes are train.py's flags; shard=0: ZeRO shards over all data ranks. timeout:
        seconds to wait for another rank. native: collectives are torch's own."""
        self.device = torch.device(device)
        self.timeout = timeout
        self.native = native
        shard = shard or dp
        sizes = {"rep": dp // shard, "shard": shard // ep, "pp": pp, "ep": ep, "cp": cp, "tp": tp}
        self.sizes = sizes  # the outermost axis first
        # One process needs no communicator (torch's ProcessGroup, which connects some ranks)
        alone = not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank()
        world = 1 if alone else dist.get_world_size()
        assert world == math.prod(sizes.values()), f"{world} processes for a mesh of {sizes}"
        self.groups = {}  # groups made so far, by name
        self.world = self.join("world", [list(range(world))])
        # Runs what is to go on while the rank computes (ddp.py, zero.py)
        self.background = Background(self.device)

    def group(self, *axes):
        """This rank's group along these axes. It has a communicator of its own, so its messages do
        not wait behind those of another group."""
        return self.join("_".join(axes), lay_out(self.sizes, axes))

    def place(self, *axes):
        """(index, size): this rank's index in its group along these axes, and the number of ranks
        in that group. Needs no communicator."""
        row = next(row for row in lay_out(self.sizes, axes) if self.rank in row)
        return row.index(self.rank), len(row)

    def ends(self, axis):
        """The first and the last rank along an axis, as a group; a rank between them is alone."""
        rows = [sorted({row[0], row[-1]}) for row in lay_out(self.sizes, [axis])]
        return self.join(axis + "_ends", rows)

    def join(self, name, rows):
        """This rank's group called `name`. rows: the ranks of every group of that name. Every rank
        makes the communicators of all rows, also of those it is not in, because torch demands
        that."""
        if name not in self.groups:
            mine = Group(name, self.device, [self.rank], 0)  # alone, if no row has this rank
            for ranks in rows:
                if len(ranks) > 1:
                    with naming(f"rank {self.rank}: joining group {name}"):
                        # NCCL sends to higher and to lower ranks on two (transport/nccl.py)
                        ways = 2 if self.device.type == "cuda" else 1
                        communicators = [self.communicator(ranks) for _ in range(ways)]
                        if self.rank in ranks:
                            mine = self.connect(name, ranks, communicators)
            self.groups[name] = mine
        return self.groups[name]

    def communicator(self, ranks):
        """Returns a new ProcessGroup of torch. All ranks of the world call this, in the same order.
        """
        return dist.new_group(ranks, **connection_options(self.device, self.timeout))

    def connect(self, name, ranks, communicators):
        """This rank's group of these ranks, with what carries its messages. All of them call."""
        rank = ranks.index(self.rank)
        if self.device.type == "cuda":
            carrier = Nccl(*communicators, rank, self.timeout)
        else:
            links = shared_memory.connect(communicators[0], rank, self.timeout)
            carrier = shared_memory.SharedMemory(links, Gloo(*communicators), self.timeout)
        native = communicators[0] if self.native else None
        return Group(name, self.device, ranks, rank, carrier, native)


def grid(sizes):
    """The ranks as text: a row for each group of tensor ranks, with its places on the other axes
    (those of size 1 are left out). d: number of the data rank.
    {shard: 2, pp: 1, tp: 2} gives "  d=0  ranks  0  1" and "  d=1  ranks  2  3"."""
    rows = []
    for ranks in lay_out(sizes, ["tp"]):
        row = "  "
        for axis in ("dp", "pp", "cp"):
            mine = next(group for group in lay_out(sizes, [axis]) if ranks[0] in group)
            if len(mine) > 1:
                row += f"{axis[0]}={mine.index(ranks[0])} "
        rows.append(f"{row} ranks " + " ".join(f"{rank:2d}" for rank in ranks))
    return "\n".join(rows)
