"""The root's Mesh with the engine's groups: for CPU or GPU, with spans of time for --trace.

Axes, outermost first: dp ep pp cp tp. The D data ranks are two axes, because E of them may share
the experts (--ep E): dp has D/E ranks here, ep has E. `summed` names the axes over which gradients
are summed, `model_axes` those that cut the model. These groups follow from the two:

    replicas()       data and context ranks: the ranks that see other tokens with the same weights
    same_experts()   replicas that also hold the same experts
    one_replica()    the fewest ranks that together hold every gradient: one replica; with --ep the
                     E replicas that share the experts. Several of these ranks may hold the same
                     gradient (engine/optimizer.py, holders)
    in_step()        the ranks that step together: the world, unless a fork takes an axis out of
                     `summed` (forks/diloco.py)
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

    def __init__(self, device="cpu", native=False, timeout=600, in_order=False, **sizes):
        self.native = native
        self.pending = deque()  # operations posted on a GPU and not known to be done: CudaGroup
        # The rows of join(), such as ((0, 1), (2, 3)) -> the Group of the row that has this rank.
        # Filled on GPUs only
        self.shared = {}
        cuda = str(device).startswith("cuda")
        group_class = CudaGroup if cuda else InOrderGroup if in_order else Group
        super().__init__(group_class, device, timeout, **sizes)

    # The axes over which gradients are summed: their ranks see other tokens with the same weights
    summed = ("dp", "ep", "cp")
    model_axes = ("pp", "tp")  # the axes whose ranks hold other parts of the model

    def replicas(self):
        return self.group(*self.summed)

    def same_experts(self):
        return self.group(*(axis for axis in self.summed if axis != "ep"))

    def one_replica(self):
        return self.group(*(axis for axis in self.summed if axis == "ep"), *self.model_axes)

    def in_step(self):
        axes = [axis for axis in self.sizes if axis in self.summed + self.model_axes]
        return self.world if axes == list(self.sizes) else self.group(*axes)

    def span(self, name, **args):
        """A span is a named stretch of time, for --trace. This one records nothing: replaced in
        Tracer.at (run/timeline.py)."""
        return nullcontext()

    def join(self, name, rows):
        """On GPUs names for the same ranks, such as world and dp_ep_cp, are one group, because each
        communicator takes memory of the GPU. It has the name that was asked for first."""
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
