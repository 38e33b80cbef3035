"""Ranks and groups: which process talks to which.

N processes (ranks) are laid out on a mesh of named axes, as arange(N).view(D/E, E, P, C, T) for D
data, P pipeline, C context (here not the width) and T tensor ranks. The D data ranks are two axes,
dp of D/E and ep of E (E = 1 without experts):

    dp  data parallel     talks once per step (ZeRO-2, 3: in every microbatch): on the slowest links
    ep  expert parallel   talks in each layer's experts; E of the D data ranks share the experts
    pp  pipeline          talks twice per microbatch and boundary of stages: forward, backward
    cp  context parallel  talks in each layer's attention
    tp  tensor parallel   talks several times per layer: innermost, on the fastest links

A group along some axes: the ranks that differ in these axes only. With D = P = T = 2 and rank 5,
mesh.group("tp") is [4, 5], and mesh.group("pp", "tp") is [4, 5, 6, 7], which is one full copy of
the model (a replica). A collective (an operation that all ranks of a group call together) does
nothing in a group of one, so code need not ask for sizes.

    python mesh.py 2 1 2 1 2        sizes of dp ep pp cp tp: prints the ranks and every group
"""

import math
from collections import deque
from contextlib import nullcontext
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from group import Group, naming
from nccl_group import CudaGroup, InOrderGroup


def lay_out(sizes, axes):
    """The groups along `axes` of a mesh {axis: size}: lists of ranks, one list for each group. An
    axis that the mesh does not have has size 1.

    sizes = {dp: 2, pp: 2, tp: 2}: axes [tp] gives [0 1] [2 3] [4 5] [6 7]; [pp] gives [0 2] [1 3]
    [4 6] [5 7]; [dp, tp] gives [0 1 4 5] [2 3 6 7]."""
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    dims = [list(sizes).index(axis) for axis in axes if axis in sizes]
    last = list(range(-len(dims), 0))
    size = math.prod(sizes.get(axis, 1) for axis in axes)
    return ranks.movedim(dims, last).reshape(-1, size).tolist()


class Mesh:
    """The world's ranks on named axes, the outermost first: Mesh(dp=2, pp=2, tp=2). All ranks make
    the same groups in the same order. in_order: post messages in the order that NCCL demands
    (nccl_group.py), also on CPU, for tests."""

    def __init__(self, device="cpu", native=False, timeout=600, in_order=False, **sizes):
        self.sizes, self.device = sizes, torch.device(device)
        self.native = native  # True: call torch's own collectives, not collectives.py's
        self.timeout = timeout  # seconds to wait for another rank
        cuda = self.device.type == "cuda"
        self.group_class = CudaGroup if cuda else InOrderGroup if in_order else Group
        self.pending = deque()  # operations posted on a GPU and not known to be done: CudaGroup
        alone = not dist.is_initialized()  # then no group needs a communicator
        self.rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        assert world == math.prod(sizes.values()), f"{world} processes for a mesh of {sizes}"
        self.groups = {}  # made so far, by name
        self.world = self.join("world", [list(range(world))])

    def group(self, *axes):
        """This rank's group along these axes, with a communicator of its own, so its
        messages do not wait behind those of another group."""
        return self.join("_".join(axes), lay_out(self.sizes, axes))

    def place(self, *axes):
        """(index, size): this rank's index in its group along these axes, and how many ranks the
        group has. Needs no communicator."""
        row = next(row for row in lay_out(self.sizes, axes) if self.rank in row)
        return row.index(self.rank), len(row)

    def ends(self, axis):
        """The first and the last rank along an axis, as a group; a rank between them is alone."""
        rows = [sorted({row[0], row[-1]}) for row in lay_out(self.sizes, [axis])]
        return self.join(axis + "_ends", rows)

    def span(self, name, **args):
        """A span is a named stretch of time, for --trace. This one records nothing: replaced in
        Tracer.at (run/timeline.py)."""
        return nullcontext()

    def join(self, name, rows):
        """This rank's group called `name`. rows: the ranks of every group of that name. All ranks
        make all communicators, as torch demands."""
        if name not in self.groups:
            mine = self.group_class(self, name, [self.rank], 0)  # alone, unless a row has it
            for ranks in rows:
                communicator = self.communicator(name, ranks) if len(ranks) > 1 else None
                if self.rank in ranks:
                    mine = self.group_class(self, name, ranks, ranks.index(self.rank), communicator)
            self.groups[name] = mine
        return self.groups[name]

    def communicator(self, name, ranks):
        with naming(f"rank {self.rank}: joining group {name}"):
            # NCCL's watchdog aborts the process at this limit; CudaGroup.start_read raises earlier
            limit = self.timeout * (2 if self.device.type == "cuda" else 1)
            return dist.new_group(ranks, timeout=timedelta(seconds=limit))


def grid(sizes):
    """The ranks as text. One row per index of the outer axes (those of size 1 are left out); in a
    row, the innermost axis."""
    *outer, inner = sizes
    outer = [axis for axis in outer if sizes[axis] > 1]
    places = product(*([f"{axis[0]}={i}" for i in range(sizes[axis])] for axis in outer))
    return "\n".join(f"  {' '.join(place)}  ranks {' '.join(f'{r:2d}' for r in ranks)}"
                     for place, ranks in zip(places, lay_out(sizes, [inner]), strict=True))


if __name__ == "__main__":
    from show.tables import mesh_command
    mesh_command()
