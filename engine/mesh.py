"""The root's Mesh with the engine's groups: on CPU or GPU, with spans of time for --trace, and with
torch's own collectives (--collectives native).
"""

from collections import deque
from contextlib import nullcontext

import torch.distributed as dist

import mesh
from engine.group import Group
from engine.nccl_group import CudaGroup, InOrderGroup
from group import naming
from mesh import connection_options


class Mesh(mesh.Mesh):
    """Mesh("cuda", dp=2, pp=2, tp=2). native: call torch's own collectives. in_order: post messages
    in the order that NCCL demands (engine/nccl_group.py), also on CPU, for tests."""

    def __init__(self, device="cpu", timeout=600, native=False, in_order=False, **sizes):
        self.native = native
        self.pending = deque()  # operations posted on a GPU and not known to be done: CudaGroup
        # The rows of join(), such as ((0, 1), (2, 3)) -> the Group of the row that has this rank.
        # Filled on GPUs only
        self.shared = {}
        cuda = str(device).startswith("cuda")
        self.group_class = CudaGroup if cuda else InOrderGroup if in_order else Group
        super().__init__(device, timeout, **sizes)

    def span(self, name, **args):
        """A span is a named stretch of time, for --trace. This one records nothing: replaced in
        Tracer.at (run/timeline.py)."""
        return nullcontext()

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
