"""Ranks and groups: who talks to whom.

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
from collections import deque
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from group import Group, naming
from run.signals import end_quietly


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

    def __init__(self, device="cpu", native=False, timeout=600, in_order=None, **sizes):
        self.sizes, self.device, self.native = sizes, torch.device(device), native
        self.timeout = timeout  # seconds
        # NCCL (CUDA) runs operations in the order they are posted, so no receive is posted early,
        # and the two directions of an exchange leave as one operation. With gloo (CPU) a send ends
        # once its receive is posted, so receives are posted early. In order works on both.
        cuda = self.device.type == "cuda"
        self.in_order = cuda if in_order is None else in_order
        # On CUDA a wait holds the stream, not the process. What was posted and has not been seen
        # to be done, (what, whether it is done), is kept for `read`.
        self.posted = deque() if cuda else None
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
            mine = Group(self, name, [self.rank], 0)
            for ranks in rows:
                pg = self.communicator(name, ranks) if len(ranks) > 1 else None
                if self.rank in ranks:
                    mine = Group(self, name, ranks, ranks.index(self.rank), pg)
            self.groups[name] = mine
        return self.groups[name]

    def communicator(self, name, ranks):
        with naming(f"rank {self.rank}: joining group {name}"):
            patience = self.timeout * (1 if self.posted is None else 2)  # see processes.init
            return dist.new_group(ranks, timeout=timedelta(seconds=patience))


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
    end_quietly()
    main()
