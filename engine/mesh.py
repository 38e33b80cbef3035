"""The root's Mesh with the engine's groups: on CPU or GPU, with shared memory between ranks of one
machine, and torch's own collectives (--collectives native).
"""

from collections import deque

import torch.distributed as dist

import mesh
from engine.group import Group
from engine.nccl_group import CudaGroup, InOrderGroup
from engine.shared_memory import Neighbours
from group import naming
from mesh import connection_options


class Mesh(mesh.Mesh):
    """Mesh("cuda", dp=2, pp=2, tp=2). native: call torch's own collectives. in_order: post messages
    in the order that NCCL demands (engine/nccl_group.py), also on CPU, for tests. transport="auto":
    messages take shared memory where both ranks can; "gloo": none does."""

    neighbours = None  # whom this rank reaches through shared memory

    def __init__(self, device="cpu", timeout=600, native=False, in_order=False, transport="auto",
                 **sizes):
        self.native = native
        self.pending = deque()  # operations posted on a GPU and not known to be done: CudaGroup
        # On GPUs: {rows of join(), such as ((0, 1), (2, 3)): the Group of this rank's row}, so that
        # names for the same ranks share a Group
        self.shared = {}
        cuda = str(device).startswith("cuda")
        self.group_class = CudaGroup if cuda else InOrderGroup if in_order else Group
        super().__init__(device, timeout, **sizes)
        if transport == "auto" and self.group_class is Group and self.world.size > 1:
            self.neighbours = Neighbours(self.world, timeout)
            self.world.bytes_sent = 0  # what was sent so far is none of the training's

    def join(self, name, rows):
        """On GPUs names for the same ranks, such as world and shard_ep_cp, are one group, because
        each communicator takes memory of the GPU. It has the name that was asked for first."""
        if not self.group_class.is_shared:
            return super().join(name, rows)
        if name not in self.groups:
            same = tuple(map(tuple, rows))
            if same not in self.shared:
                self.shared[same] = super().join(name, rows)
            self.groups[name] = self.shared[same]
        return self.groups[name]

    def communicator(self, name, ranks):
        if self.group_class.is_shared and len(ranks) == dist.get_world_size():
            return dist.group.WORLD  # connected in init (run/processes.py)
        with naming(f"rank {self.rank}: joining group {name}"):
            return dist.new_group(ranks, **connection_options(self.device, self.timeout))

    def close(self):
        """Close the links through shared memory. No message may be under way."""
        if self.neighbours:
            self.neighbours.close()
