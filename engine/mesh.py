"""The root's Mesh with the engine's groups: for CPU or GPU, with spans of time for --trace.

Axes, outermost first: dp ep pp cp tp. The D data ranks are two axes, because E of them may share
the experts (--ep E): dp has D/E ranks here, ep has E. So two groups have names:

    replicas()       data and context ranks: the ranks that see other tokens with the same weights
    same_experts()   replicas that also hold the same experts
"""

from collections import deque
from contextlib import nullcontext
from datetime import timedelta

import torch.distributed as dist

import mesh
from engine.group import Group, naming
from engine.nccl_group import CudaGroup, InOrderGroup


class Mesh(mesh.Mesh):
    """Mesh("cuda", dp=2, pp=2, tp=2). native: call torch's own collectives. in_order: post messages
    in the order that NCCL demands (engine/nccl_group.py), also on CPU, for tests."""

    def __init__(self, device="cpu", native=False, timeout=600, in_order=False, **sizes):
        self.native = native
        self.pending = deque()  # operations posted on a GPU and not known to be done: CudaGroup
        cuda = str(device).startswith("cuda")
        group_class = CudaGroup if cuda else InOrderGroup if in_order else Group
        super().__init__(group_class, device, timeout, **sizes)

    def replicas(self):
        return self.group("dp", "ep", "cp")

    def same_experts(self):
        return self.group("dp", "cp")

    def span(self, name, **args):
        """A span is a named stretch of time, for --trace. This one records nothing: replaced in
        Tracer.at (run/timeline.py)."""
        return nullcontext()

    def communicator(self, name, ranks):
        # Twice on GPUs: our own check (CudaGroup.start_read) is to fire first; at this limit NCCL's
        # watchdog kills the process
        limit = self.timeout * (2 if self.device.type == "cuda" else 1)
        with naming(f"rank {self.rank}: joining group {name}"):
            return dist.new_group(ranks, timeout=timedelta(seconds=limit))
