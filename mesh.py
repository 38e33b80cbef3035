"""Ranks and groups: which process talks to which.

N processes (ranks) are laid out on a mesh of named axes, like arange(N).view(rep, shard, pp, ep,
cp, tp): neighbours in number differ in the last axis. Launchers number ranks machine by machine, so
these neighbours share the fast links of a machine; ranks far apart talk over the network. So the
axis that talks most comes last (innermost). (shard is an exception: ZeRO-3 sends much, but this
axis usually has too many ranks for one machine.)

    axis   splits                  messages, besides the sum of gradients
    rep    the batch               none
    shard  the batch               under ZeRO the weights, with ep and cp: once per step, ZeRO-3 in
                                   every microbatch
    pp     the layers              twice per microbatch and boundary of stages: forward, backward
    ep     the batch, the experts  four all-to-alls of tokens per block and microbatch
    cp     a sequence's tokens     in each block's attention, forward and backward (ring: each hop)
    tp     matrices                four all-reduces per block and microbatch, one each for
                                   embedding and head, small ones for the loss

Gradients are summed over rep, shard, ep and cp, whose ranks see different tokens. (shard.py's tags
say more: an expert's not over ep; under --sp some over tp; a tied matrix's over two ranks of pp.)

The D data ranks (--dp) lie along three axes, rep x shard x ep: mesh.group("dp") is all of them. The
flag --shard R says over how many of them ZeRO shards (all D by default): those along shard and ep,
so the axis `shard` has R / ep ranks, also without ZeRO. For D = 8:

    no flag                 1 x 8 x 1     R = 8
    --shard 4               2 x 4 x 1     ZeRO shards over 4 ranks: two copies of each shard
    --ep 2                  1 x 4 x 2     two data ranks divide the experts; R = 8
    --shard 4 --ep 2        2 x 2 x 2     R = 4 again: 2 x 2 ranks

A group along some axes: the ranks that differ in these axes only (drawn under the imports).

    python -c "from mesh import lay_out; print(lay_out({'shard': 2, 'pp': 2, 'tp': 2}, ['pp']))"
"""

import math

import torch
import torch.distributed as dist

from collectives import Group, naming
from transport.background import Background
from transport.connect import connect_groups

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
        zero_ranks = shard or dp  # R above; along the axis shard lie R / ep of them
        sizes = {"rep": dp // zero_ranks, "shard": zero_ranks // ep,  # the outermost axis first
                 "pp": pp, "ep": ep, "cp": cp, "tp": tp}
        self.sizes = sizes
        # One process alone has no communicator (torch's ProcessGroup, which connects some ranks)
        alone = not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank()
        num_ranks = 1 if alone else dist.get_world_size()
        assert num_ranks == math.prod(sizes.values()), f"{num_ranks} ranks for a mesh of {sizes}"
        self.groups = {}  # groups made so far, by name
        self.world = self.join("world", [list(range(num_ranks))])
        # Runs messages while the rank computes (ddp.py, zero.py)
        self.background = Background(self.device)

    def group(self, *axes):
        """This rank's group along these axes. It has a communicator of its own (if it has two
        ranks), so its messages do not wait behind those of another group."""
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
        rank of the world calls this, in the same order."""
        if name not in self.groups:
            with naming(f"rank {self.rank}: joining group {name}"):
                carrier, communicator = connect_groups(all_ranks, self.rank, self.device,
                                                       self.timeout)
            ranks = next((ranks for ranks in all_ranks if self.rank in ranks), [self.rank])
            self.groups[name] = Group(name, self.device, ranks, ranks.index(self.rank), carrier,
                                      communicator if self.native else None)
        return self.groups[name]
