"""Ranks and groups: which process talks to which.

N processes (ranks) are laid out on a mesh of named axes, like arange(N).view(D, P, T). Launchers
number ranks machine by machine: neighbours in number share the fast links of a machine, ranks far
apart talk over the network. So the axis that talks most comes last (innermost):

    dp  data parallel      talks once per step (ZeRO-2, 3: once or more per microbatch)
    pp  pipeline           talks twice per microbatch and boundary of stages: forward, backward
    tp  tensor parallel    talks several times per layer

Further axes: cp, context parallel, before tp; ep, expert parallel, after dp. With ep the D data
ranks are two axes, dp of D/E and ep of E ranks.

A group along some axes: the ranks that differ in these axes only. With D = P = T = 2 and rank 5,
mesh.group("tp") is [4, 5], and mesh.group("pp", "tp") is [4, 5, 6, 7], which is one full copy of
the model (a replica). A collective (an operation that all ranks of a group call together) does
nothing in a group of one, so the code that trains need not ask for sizes.

    python mesh.py 2 1 2 1 2        sizes of dp ep pp cp tp: prints ranks, and groups of each axis
"""

if __name__ == "__main__":  # before torch is imported: a wrong command line need not wait for that
    from show.tables import mesh_command
    mesh_command()

import math
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist


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


def connection_options(device, timeout):
    """How torch is to connect ranks on this device: keywords that init_process_group and new_group
    share. timeout: seconds. On GPUs NCCL carries the messages."""
    if device.type != "cuda":
        return {"timeout": timedelta(seconds=timeout)}
    # Twice: our own check (start_read in engine/nccl_group.py) is to fire first; at this limit
    # NCCL's watchdog kills the process
    limit = timedelta(seconds=2 * timeout)
    # Sends and receives run on a stream of NCCL's own. At normal priority a message would wait
    # behind the matrix products that the GPU already has to do, whatever the priority of the stream
    # that posts the message
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = limit  # torch warns if the two differ
    return {"timeout": limit, "pg_options": options}


class Mesh:
    """The world's ranks on named axes, the outermost first: Mesh(Group, dp=2, pp=2, tp=2). A group
    is made when it is first asked for, by all ranks together: ask in the same order on all."""

    def __init__(self, group_class, device="cpu", timeout=600, **sizes):
        """group_class: group.Group, or a subclass. timeout: seconds to wait for another rank."""
        self.group_class = group_class
        self.device = torch.device(device)
        self.timeout = timeout
        self.sizes = sizes
        # One process needs no communicator (torch's ProcessGroup, which carries the messages)
        alone = not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank()
        world = 1 if alone else dist.get_world_size()
        assert world == math.prod(sizes.values()), f"{world} processes for a mesh of {sizes}"
        self.groups = {}  # groups made so far, by name
        self.world = self.join("world", [list(range(world))])

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
            mine = self.group_class(self, name, [self.rank], 0)  # this rank alone, if no row has it
            for ranks in rows:
                communicator = self.communicator(name, ranks) if len(ranks) > 1 else None
                if self.rank in ranks:
                    mine = self.group_class(self, name, ranks, ranks.index(self.rank), communicator)
            self.groups[name] = mine
        return self.groups[name]

    def communicator(self, name, ranks):
        """Returns a new ProcessGroup of torch. All ranks of the world call this, in the same order.
        """
        return dist.new_group(ranks, **connection_options(self.device, self.timeout))


def grid(sizes):
    """The ranks as text: a row for each index of the outer axes (those of size 1 are left out).
    {dp: 2, pp: 1, tp: 2} gives "  d=0  ranks  0  1" and "  d=1  ranks  2  3"."""
    *outer, inner = sizes
    names = []  # for each outer axis: d=0 d=1 ...
    for axis in outer:
        if sizes[axis] > 1:
            names.append([f"{axis[0]}={i}" for i in range(sizes[axis])])
    rows = []
    for place, ranks in zip(product(*names), lay_out(sizes, [inner]), strict=True):
        numbers = " ".join(f"{rank:2d}" for rank in ranks)
        rows.append(f"  {' '.join(place)}  ranks {numbers}")
    return "\n".join(rows)
