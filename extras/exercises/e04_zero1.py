"""Exercise 4: ZeRO-1. Each of D replicas steps only its own chunk of each parameter, so it keeps
1/D of the optimizer states. Cut DDP's all-reduce into its two halves, and step between them:
gradients() reduce-scatters, publish() all-gathers the new weights. No rank sends more than before.
own_chunk(tensor, group) is this rank's chunk: a flat view.
"""

from collectives import all_gather, own_chunk, reduce_scatter
from ddp import DDP


class ZeRO1(DDP):
    """param.tag.sum_over[0] is the group of replicas. After backward gradients() is called; then
    the optimizer steps self.weights in place; then publish() is called.

    Two replicas, a parameter [1 2 3 4]: on rank 0 its entry of self.weights is a view of 1 2. With
    gradients [1 1 1 1] and [2 2 2 2], gradients() returns 3 3 on both. After a step on both and
    publish(), both have [-2 -1 0 1] (if a step subtracts the gradient)."""

    sharded = True  # the replicas' optimizers step different parts: the global norm asks

    def __init__(self, stages, value=None):  # the arguments of ddp.py's DDP
        super().__init__(stages, value=value)  # makes self.params, a list
        raise NotImplementedError  # self.weights: what this rank's optimizer steps, in place

    def gradients(self):
        """A list: the summed gradient of each of self.weights. Sets each param.grad to None."""
        raise NotImplementedError

    def publish(self):
        """Every rank gets the chunks that the other ranks have stepped."""
        raise NotImplementedError
