"""ZeRO: shards over the D data ranks what data parallelism (ddp.py) replicates.

A parameter of n elements is cut into D chunks, and rank d's optimizer steps chunk d only. ZeRO-1
keeps only this chunk of the optimizer states, ZeRO-2 also of the gradients, ZeRO-3 also of the
weights. For Psi parameters and m microbatches:

      sharded                    bytes per parameter (16-bit training)   elements sent per step
    0 nothing: DDP               16 = 2 weights + 2 gradients + 12 Adam   2 Psi (D-1)/D
    1 optimizer states           4 + 12/D                                 2 Psi (D-1)/D
    2 gradients too              2 + 14/D                           (1 + m) Psi (D-1)/D
    3 weights too                16/D                                  3 m Psi (D-1)/D

ZeRO-2 and 3 reduce the gradients of every microbatch, because keeping their sum until the last one
would keep a whole gradient. ("Whole" in this file: not cut into chunks. With --tp a whole parameter
is this rank's slice.) arXiv 1910.02054.

Hybrid sharding (--shard R): shards over R of the D ranks, so R stands for D in the table, and the
chunks of the D/R copies are summed once a step: 2 (D/R - 1)/(D/R) Psi/R elements more.

    python -m extras.show zero              each stage, on 4 ranks
    python -m extras.show sizes 7e9         the bytes of a rank, for 7e9 parameters
"""

import torch
from torch.func import functional_call

from collectives import WithBackward, all_gather, all_reduce, own_chunk, reduce_scatter
from ddp import DDP, parameters_of, take_gradient
from recompute import recompute
from shard import bounds


def sum_over_others(chunks, tags):
    """Sum the chunks over the groups of their tags other than the replicas. (The reduce-scatter
    that made a chunk has summed it over the replicas.)"""
    for chunk, tag in zip(chunks, tags, strict=True):
        for group in tag.sum_over[1:]:  # sum_over[0] is the replicas
            all_reduce(chunk, group)
    return chunks


class ZeRO1(DDP):
    """Shards the optimizer states. The all-reduce of data parallelism is cut into its two halves,
    and the optimizer steps between them. So a rank sends no more than before."""

    sharded = True

    def __init__(self, stages, value=None):
        super().__init__(stages, value)
        # Views: to step a chunk in place changes the parameter
        self.weights = [own_chunk(param.data, param.tag.sum_over[0]) for param in self.params]
        self.starts = [bounds(param.numel(), param.tag.sum_over[0])[0] for param in self.params]

    def gradients(self):
        chunks = []
        for param in self.params:
            replicas = param.tag.sum_over[0]
            grad = reduce_scatter(take_gradient(param), replicas)  # other chunks: partial sums
            chunks.append(own_chunk(grad, replicas))
        return sum_over_others(chunks, self.tags)

    def publish(self):
        for param in self.params:
            all_gather(param.data, param.tag.sum_over[0])


class ZeRO2(ZeRO1):
    """Shards gradients too. As soon as a backward has computed a parameter's gradient, the gradient
    is reduce-scattered, this rank's chunk is added to the sum, and the rest is freed."""

    def __init__(self, stages, value=None):
        super().__init__(stages, value)
        self.sums = {}  # parameter -> this rank's chunk of its gradient, summed over microbatches
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.keep_own_chunk)

    def keep_own_chunk(self, param):
        """Called by autograd when param.grad is complete, once in each backward. All replicas run
        the same graph, so they call this in the same order, and no rank waits forever."""
        replicas = param.tag.sum_over[0]
        chunk = own_chunk(reduce_scatter(param.grad, replicas), replicas)
        # Not `chunk` itself: a view, which would keep the whole gradient in memory
        self.sums[param] = self.sums.get(param, 0) + chunk
        param.grad = None

    def gradients(self):
        """Every trained parameter must have had a gradient in this step, else KeyError."""
        return sum_over_others([self.sums.pop(param) for param in self.params], self.tags)


def gather(chunk, shape, replicas):
    """This rank's chunk of a parameter -> the whole parameter, of this shape. Backward: every rank
    has computed the gradient of the whole from its own tokens, so reduce-scatter: the sum, of which
    each rank gets its own chunk."""
    def forward(chunk):
        whole = chunk.new_empty(shape)
        own_chunk(whole, replicas).copy_(chunk)
        return all_gather(whole, replicas)

    def backward(grad):
        whole = grad.clone(memory_format=torch.contiguous_format)
        return own_chunk(reduce_scatter(whole, replicas), replicas).clone()

    return WithBackward.apply(chunk, forward, backward)


class Gathered(torch.nn.Module):
    """A layer that gathers its weights when it runs. It runs under recompute (recompute.py), which
    keeps only the layer's input for backward. So the whole weights are freed after forward, and
    backward runs the layer again, which gathers them again."""

    def __init__(self, layer, chunks):
        """chunks: {name of a parameter in the layer: (this rank's chunk, shape of the whole)}."""
        super().__init__()
        self.layer = layer
        self.chunks = chunks

    def forward(self, *inputs):
        return recompute(self.run, *inputs)

    def run(self, *inputs):
        whole = {name: gather(chunk, shape, chunk.tag.sum_over[0])
                 for name, (chunk, shape) in self.chunks.items()}
        return functional_call(self.layer, whole, inputs)  # the layer, with these weights


class ZeRO3(DDP):
    """Shards weights too: in training at most one layer's whole weights exist at a time.

    Replaces each layer of the stages, in place, by a Gathered one. Sends 3 m Psi (D-1)/D: two
    gathers and one reduce-scatter for each microbatch. (A weight that two layers share, the tied
    matrix, is sent for each of them.)"""

    sharded = True

    def __init__(self, stages, value=None):
        chunk_of = {}  # whole parameter -> (this rank's chunk, shape of the whole)
        for param in parameters_of(stages):
            replicas = param.tag.sum_over[0]
            whole = value(param.tag) if value else param.data
            chunk = torch.nn.Parameter(own_chunk(whole, replicas).clone(), param.requires_grad)
            chunk.tag = param.tag
            chunk_of[param] = chunk, param.shape
        for layers in stages.values():
            for i, layer in enumerate(layers):
                layers[i] = Gathered(layer, {name: chunk_of[param]
                                             for name, param in layer.named_parameters()})
        if not value:  # else the layers are on the meta device, where weights have no memory
            for param in chunk_of:
                param.data = param.data.new_empty(0)
        self.chunks = list(chunk_of.values())  # (this rank's chunk, shape of the whole)
        self.params = [chunk for chunk, _ in self.chunks if chunk.requires_grad]
        self.weights = [chunk.data for chunk in self.params]
        self.tags = [chunk.tag for chunk in self.params]
        start_of = {}  # chunk -> where it starts in the flattened whole parameter
        for chunk, shape in self.chunks:
            start_of[chunk], _ = bounds(shape.numel(), chunk.tag.sum_over[0])
        self.starts = [start_of[chunk] for chunk in self.params]
        self.frozen = [(chunk.data, chunk.tag, start_of[chunk]) for chunk, _ in self.chunks
                       if not chunk.requires_grad]

    def gradients(self):
        """The backward of gather() has reduce-scattered, and autograd has added up microbatches:
        chunk.grad is summed over the replicas already."""
        return sum_over_others([take_gradient(chunk) for chunk in self.params], self.tags)

    def publish(self):
        """Nothing to send: the next forward gathers the new weights."""

    def whole(self):
        for chunk, shape in self.chunks:
            yield chunk.tag, gather(chunk.data, shape, chunk.tag.sum_over[0])


REDUCERS = (DDP, ZeRO1, ZeRO2, ZeRO3)  # by ZeRO stage
