"""Ranks and groups: which process talks to which.

N processes (ranks) are laid out on a mesh of named axes, like arange(N).view(D, P, T): neighbours
in number differ in the last axis. Launchers number ranks machine by machine, so these neighbours
share the fast links of a machine; ranks far apart talk over the network. So the axis that talks
most comes last (innermost), ZeRO-3 aside:

    axis   splits                  messages
    rep    the batch               once per step, if ZeRO shards over fewer ranks (--shard)
    shard  the batch               once per step (ZeRO-1: twice; ZeRO-2, 3: in every microbatch)
    pp     the layers              twice per microbatch and boundary of stages: forward, backward
    ep     the batch, the experts  four all-to-alls of tokens per block and microbatch
    cp     a sequence's tokens     in each block's attention, forward and backward (ring: each hop)
    tp     matrices                four all-reduces per block and microbatch, one each for
                                   embedding and head

The D data ranks (--dp) lie along three axes, rep x shard x ep: mesh.group("dp") is all of them.
ZeRO shards over the R ranks of shard x ep (and those of cp). For D = 8:

    no flag                 1 x 8 x 1
    --shard 4               2 x 4 x 1     ZeRO shards over 4 ranks: two copies of each shard
    --ep 2                  1 x 4 x 2     two data ranks divide the experts
    --shard 4 --ep 2        2 x 2 x 2

A group along some axes: the ranks that differ in these axes only (drawn below).

    python -c "from mesh import lay_out; print(lay_out({'shard': 2, 'pp': 2, 'tp': 2}, ['pp']))"
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

# D = P = T = 2. A rank's number is 4 d + 2 p + t:
#
#                        d = 0                        d = 1
#                 t = 0       t = 1            t = 0       t = 1
#                +-----+     +-----+          +-----+     +-----+
#      p = 0     |  0  | tp  |  1  |          |  4  | tp  |  5  |
#                +-----+     +-----+          +-----+     +-----+
#                  pp          pp               pp          pp
#                +-----+     +-----+          +-----+     +-----+
#      p = 1     |  2  | tp  |  3  |          |  6  | tp  |  7  |
#                +-----+     +-----+          +-----+     +-----+
#
#   group("tp")         rows                         [0 1] [2 3] [4 5] [6 7]
#   group("pp")         columns                      [0 2] [1 3] [4 6] [5 7]
#   group("dp")         the same place on each side  [0 4] [1 5] [2 6] [3 7]
#   group("pp", "tp")   a side: one full copy of the model, a replica      [0 1 2 3] [4 5 6 7]
#   group("dp", "tp")   the same row on each side                          [0 1 4 5] [2 3 6 7]


def lay_out(sizes, axes):
    """The groups along `axes` of a mesh {axis: size}: lists of ranks, one list for each group. An
    axis that the mesh does not have has size 1; "dp" stands for the axes in DATA.

    sizes = {shard: 2, pp: 2, tp: 2}, axes [dp, tp]: [[0, 1, 4, 5], [2, 3, 6, 7]]."""
    wanted = []
    for axis in axes:
        wanted += DATA if axis == "dp" else [axis]
    wanted = [axis for axis in wanted if axis in sizes]
    # Move the dims of the wanted axes to the end: then each row is a group
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    dims = [list(sizes).index(axis) for axis in wanted]
    last = list(range(-len(dims), 0))
    size = math.prod(sizes[axis] for axis in wanted)
    return ranks.movedim(dims, last).reshape(-1, size).tolist()


def connection_options(device, timeout):
    """How torch is to connect ranks on this device: keywords that init_process_group and new_group
    share. timeout: seconds. On GPUs NCCL carries the messages."""
    if device.type != "cuda":
        return {"timeout": timedelta(seconds=timeout)}
    # Twice our timeout, so that our own check (start_read in transport/nccl.py) reports first: at
    # this limit NCCL's watchdog kills the process
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
        # One process alone has no communicator (torch's ProcessGroup, which connects some ranks)
        alone = not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank()
        world = 1 if alone else dist.get_world_size()
        assert world == math.prod(sizes.values()), f"{world} processes for a mesh of {sizes}"
        self.groups = {}  # groups made so far, by name
        self.world = self.join("world", [list(range(world))])
        # Runs messages while the rank computes (ddp.py, zero.py)
        self.background = Background(self.device)

    def group(self, *axes):
        """This rank's group along these axes. It has a communicator of its own, so its messages do
        not wait behind those of another group."""
        return self.join("_".join(axes), lay_out(self.sizes, axes))

    def index_and_size(self, *axes):
        """(index, size): this rank's index in its group along these axes, and the number of ranks
        in that group. Needs no communicator."""
        ranks = next(ranks for ranks in lay_out(self.sizes, axes) if self.rank in ranks)
        return ranks.index(self.rank), len(ranks)

    def ends(self, axis):
        """The first and the last rank along an axis, as a group; a rank between them is alone."""
        pairs = [sorted({ranks[0], ranks[-1]}) for ranks in lay_out(self.sizes, [axis])]
        return self.join(axis + "_ends", pairs)

    def join(self, name, all_ranks):
        """This rank's group called `name`. all_ranks: the ranks of every group of that name. Every
        rank makes the communicators of all of these groups, also of those that it is not in,
        because torch demands that."""
        if name not in self.groups:
            # Alone, if no group has this rank. A lone GPU has a carrier, which sends nothing, for
            # its start_read: so the host can post the next step before it reads this step's loss
            carrier = Nccl(None, None, 0, self.timeout) if self.device.type == "cuda" else None
            mine = Group(name, self.device, [self.rank], 0, carrier)
            for ranks in all_ranks:
                if len(ranks) > 1:
                    with naming(f"rank {self.rank}: joining group {name}"):
                        # NCCL: one communicator for sends to higher ranks, one for sends to lower
                        # ranks (transport/nccl.py)
                        ways = 2 if self.device.type == "cuda" else 1
                        communicators = [self.new_communicator(ranks) for _ in range(ways)]
                        if self.rank in ranks:
                            mine = self.connect(name, ranks, communicators)
            self.groups[name] = mine
        return self.groups[name]

    def new_communicator(self, ranks):
        """Returns a new ProcessGroup of torch. All ranks of the world call this, in the same order.
        """
        return dist.new_group(ranks, **connection_options(self.device, self.timeout))

    def connect(self, name, ranks, communicators):
        """This rank's group of these ranks, with the carrier of its messages. Every rank of the
        group calls this."""
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
    lines = []
    for ranks in lay_out(sizes, ["tp"]):
        line = "  "
        for axis in ("dp", "pp", "cp"):
            mine = next(group for group in lay_out(sizes, [axis]) if ranks[0] in group)
            if len(mine) > 1:
                line += f"{axis[0]}={mine.index(ranks[0])} "
        lines.append(f"{line} ranks " + " ".join(f"{rank:2d}" for rank in ranks))
    return "\n".join(lines)
