"""Exercise 5: ZeRO-3 keeps a chunk of each weight. gather_weight() makes the whole weight from the
ranks' chunks. In backward each rank has a gradient of the whole weight, from its own tokens; a
chunk's gradient is the sum of the ranks' gradients. Gathered runs a layer with gathered weights,
which must be free after forward: recompute() keeps only the inputs, and in backward runs the layer
again.
"""

import torch
from torch.func import functional_call

from collectives import WithBackward, all_gather, own_chunk, reduce_scatter
from recompute import recompute


def gather_weight(chunk, shape, replicas):
    """Returns the whole parameter, of this shape and of the chunk's dtype and device.
    WithBackward.apply(x, forward, backward) computes forward(x), and in backward
    grad_x = backward(grad_y); both may send messages.

    Two ranks with chunks [1 2] and [3 4]: both get [1 2 3 4]. With gradients [1 1 1 1] and
    [2 2 2 2] of the whole, the chunks' gradients are [3 3] on both. The collectives work in place,
    on contiguous tensors. Do not change the gradient that autograd gives you, which may be
    transposed: clone(memory_format=torch.contiguous_format)."""
    raise NotImplementedError


class Gathered(torch.nn.Module):
    """functional_call(layer, {name: weight}, inputs) runs the layer with these weights. chunks:
    {name: (this rank's chunk, shape of the whole)}; chunk.tag.sum_over[0] is the group of
    replicas. recompute(run, *inputs) runs run(*inputs) in forward, and again in backward."""

    def __init__(self, layer, chunks):
        super().__init__()
        raise NotImplementedError

    def forward(self, *inputs):
        raise NotImplementedError
