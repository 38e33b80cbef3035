"""ZeRO: shards over the D data ranks what data parallelism (ddp.py) replicates.

A parameter of n elements is cut into D chunks, and rank d's optimizer steps chunk d only. ZeRO-1
keeps only this chunk of the optimizer states, ZeRO-2 also of the gradients, ZeRO-3 also of the
weights. For Psi parameters and m microbatches:

      sharded                    bytes per parameter (16-bit training)   elements sent per step
    0 nothing: DDP               16 = 2 weights + 2 gradients + 12 Adam   2 Psi (D-1)/D
    1 optimizer states           4 + 12/D                                 2 Psi (D-1)/D
    2 gradients too              2 + 14/D                           (1 + m) Psi (D-1)/D
    3 weights too (FSDP)         16/D                                  3 m Psi (D-1)/D

ZeRO-2 and 3 reduce the gradients of every microbatch, because keeping their sum until the last one
would keep a whole gradient. ("Whole" in this file: not cut into chunks. With --tp a whole parameter
is this rank's slice.) arXiv 1910.02054.

Hybrid sharding (--shard R): shards over R of the D ranks, so R stands for D in the table, and the
chunks of the D/R replicas of a shard are summed once a step: 2 (D/R - 1)/(D/R) Psi/R elements more.

    python -m extras.show zero              each stage, on 4 ranks
    python -m extras.show sizes 7e9         the bytes of a rank, for 7e9 parameters
"""

from itertools import chain, repeat

import torch
from torch.func import functional_call

from collectives import WithBackward, all_gather, all_reduce, own_chunk, reduce_scatter
from ddp import DDP, as_stages, parameters_of, take_gradient, used_by_any
from recompute import recompute
from shard import bounds


class ZeRO1(DDP):
    """Shards the optimizer states. The all-reduce of data parallelism is cut into its two halves,
    and the optimizer steps between them. So a rank sends no more than before."""

    sharded = True
    is_published = True  # has publish() been called since the last call of gradients()?

    def __init__(self, model, replicas=None, value=None):
        super().__init__(model, replicas, value)
        # Views: to step a chunk in place changes the parameter
        self.weights = [own_chunk(param.data, param.tag.sum_over[0]) for param in self.params]
        self.starts = [bounds(param.numel(), param.tag.sum_over[0])[0] for param in self.params]

    def summed(self, param):
        """This rank's chunk of the sum."""
        replicas, *others = param.tag.sum_over
        grad = reduce_scatter(take_gradient(param), replicas)  # other chunks: partial sums
        return sum_over_others(own_chunk(grad, replicas), others)

    def gradients(self):
        if self.replicas and not self.is_published:
            raise RuntimeError("ZeRO-1 and 2: call publish() after each step of the optimizer, "
                               "which has stepped only this replica's chunks")
        self.is_published = False
        return super().gradients()

    def publish(self):
        for param in self.params:
            all_gather(param.data, param.tag.sum_over[0])
        self.is_published = True


def sum_over_others(chunk, groups):
    """Sum a chunk over the groups of its tag other than the replicas. (The reduce-scatter that made
    the chunk has summed it over the replicas.)"""
    for group in groups:
        all_reduce(chunk, group)
    return chunk


class ZeRO2(ZeRO1):
    """Shards gradients too. As soon as a backward has computed a parameter's gradient, the gradient
    is reduce-scattered, this rank's chunk is added to the sum, and the rest is freed.

    All replicas reduce in one order, else two would wait for each other forever: the last parameter
    first. A gradient that comes early waits for those before it in this order. One that does not
    come, because this replica has not used the parameter, counts as zeros at the end of
    backward."""

    def __init__(self, model, replicas=None, value=None):
        super().__init__(model, replicas, value)
        self.sums = {}  # parameter -> this rank's chunk of its gradient, summed over microbatches
        self.seen = set()  # parameters that this replica has used in this step
        self.waiting = []  # those that the current backward has yet to reduce, in order
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.keep_own_chunk)

    def keep_own_chunk(self, param):
        """Called by autograd when param.grad is complete, once in each backward."""
        if not self.waiting:  # the first gradient of this backward
            self.waiting = self.params[::-1]
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)
        self.seen.add(param)
        while self.waiting and self.waiting[0].grad is not None:
            self.reduce(self.waiting.pop(0))

    def end_of_backward(self):
        for param in self.waiting:
            self.reduce(param)
        self.waiting = []

    def reduce(self, param):
        replicas = param.tag.sum_over[0]
        chunk = own_chunk(reduce_scatter(take_gradient(param), replicas), replicas)
        # Not `chunk` itself: a view, which would keep the whole gradient in memory
        self.sums[param] = self.sums.get(param, 0) + chunk

    def used(self):
        used = used_by_any([param in self.seen for param in self.params], self.replicas)
        self.seen.clear()
        return used

    def summed(self, param):
        return sum_over_others(self.sums[param], param.tag.sum_over[1:])

    def gradients(self):
        grads = super().gradients()
        self.sums = {}
        return grads


def keep_in_step(number, what, replicas):
    """Tell the next replica the number of the message that this one sends next. RuntimeError if the
    replica before is at another message: its values would be taken for those of `what`."""
    if replicas.size > 1:
        theirs = torch.empty(1, dtype=torch.long)
        mine = torch.tensor([number])
        replicas.exchange(mine, replicas.next, theirs, replicas.prev).wait()
        if theirs.item() != number:
            raise RuntimeError(
                f"ZeRO-3: replica {replicas.rank} is at {what}, replica {replicas.prev} elsewhere: "
                "all must run the same layers, and use the same parameters, in the same order")


def gather_weight(chunk, shape, replicas):
    """This rank's chunk of a parameter -> the whole parameter, of this shape. In backward each rank
    has the whole gradient of its own tokens: a reduce-scatter sums them, and leaves each rank its
    own chunk of the sum."""
    # Only a chunk of a model of your own has a number. train.py's replicas run the same layers
    number = getattr(chunk, "number", 0)

    def forward(values):
        if number:
            keep_in_step(number, f"the weights of {chunk.tag.name}", replicas)
        whole = values.new_empty(shape)
        own_chunk(whole, replicas).copy_(values)
        return all_gather(whole, replicas)

    def backward(grad):
        if number:
            keep_in_step(-number, f"the gradient of {chunk.tag.name}", replicas)
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

    def __getattr__(self, name):
        """The layer's attributes are its own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args, **kwargs):
        # The repetition gets copies of the layer's buffers (BatchNorm's means) as they are now, and
        # may change these
        copies = {name: buffer.clone() for name, buffer in self.layer.named_buffers()}
        buffers = chain([{}], repeat(copies))
        return recompute(lambda *args, **kwargs: self.run(next(buffers), args, kwargs),
                         *args, **kwargs)

    def run(self, buffers, args, kwargs):
        whole = {name: gather_weight(chunk, shape, chunk.tag.sum_over[0])
                 for name, (chunk, shape) in self.chunks.items()}
        # The layer, with these weights
        return functional_call(self.layer, {**whole, **buffers}, args, kwargs)


def places_of_layers(module):
    """[(container, index)] of the layers that a module of your own calls one by one: the elements
    of each ModuleList or Sequential in it, but not of those inside of such an element."""
    containers = (torch.nn.ModuleList, torch.nn.Sequential)
    found = []
    for name, child in module._modules.items():  # (named_children() lists a child once)
        if type(module) in containers and type(child) is not torch.nn.ModuleList:
            found.append((module, int(name)))
        else:
            found += places_of_layers(child)
    return found


def outside_of(layers, module):
    """[(owner, name, parameter)] of a module's parameters that are not inside of these layers."""
    inside = {one for layer in layers for one in layer.modules()}
    return [(owner, name, param) for owner in module.modules() if owner not in inside
            for name, param in owner.named_parameters(recurse=False)]


class ZeRO3(DDP):
    """Shards weights too: while it trains, at most one layer's whole weights exist at a time.

    Replaces each layer of the stages, in place, by a Gathered one. Sends 3 m Psi (D-1)/D: two
    gathers and one reduce-scatter for each microbatch. (A weight that two layers share, the tied
    matrix, is sent for each of them.)

    In a module of your own the layers are those of places_of_layers(). The weights outside of them
    are gathered once, when the module is called, and are freed after backward. While the module
    does not run, its parameters are this rank's chunks."""

    sharded = True

    def __init__(self, model, replicas=None, value=None):
        self.replicas = replicas
        stages = as_stages(model, replicas)
        chunk_of = {}  # whole parameter -> (this rank's chunk, shape of the whole)
        for param in parameters_of(stages):
            if param._backward_hooks:
                raise ValueError(f"ZeRO-3 replaces {param.tag.name} by a chunk, which has none of "
                                 "its hooks: register them on reducer.params instead")
            group = param.tag.sum_over[0]
            whole = value(param.tag) if value else param.data
            chunk = torch.nn.Parameter(own_chunk(whole, group).clone(), param.requires_grad)
            chunk.tag = param.tag
            chunk.number = 1 + len(chunk_of) if replicas else 0  # for keep_in_step()
            chunk_of[param] = chunk, param.shape

        if isinstance(model, torch.nn.Module):
            self.gather_layers(places_of_layers(model), chunk_of)
            self.gather_the_rest(model, chunk_of)
        else:
            self.gather_layers([(layers, i) for layers in stages.values()
                                for i in range(len(layers))], chunk_of)
        # A layer's parameters become the chunks; the whole ones are freed
        for layer in (layer for layers in stages.values() for layer in layers):
            for owner in layer.modules():
                for name, param in owner.named_parameters(recurse=False):
                    owner.register_parameter(name, chunk_of[param][0])
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

    def gather_layers(self, places, chunk_of):
        """Replace the layers at these places, [(list of layers, index)], by Gathered ones."""
        gathered = {layers[i]: None for layers, i in places}  # a list may have a layer twice
        for layer in gathered:
            gathered[layer] = Gathered(layer, {name: chunk_of[param]
                                               for name, param in layer.named_parameters()})
        for layers, i in places:
            layers[i] = gathered[layers[i]]

    def gather_the_rest(self, module, chunk_of):
        """Before each call of the module gather the weights outside of its Gathered layers; after
        it put the chunks back. (Autograd keeps the whole weights until backward has used them.)"""
        layers = [layer for layer in module.modules() if isinstance(layer, Gathered)]
        places = [(owner, name, *chunk_of[param])
                  for owner, name, param in outside_of(layers, module)]

        def before(module, args):
            whole = {chunk: gather_weight(chunk, shape, chunk.tag.sum_over[0])
                     for _, _, chunk, shape in places}
            for owner, name, chunk, _ in places:
                owner._parameters[name] = whole[chunk]

        def after(module, args, out):
            for owner, name, chunk, _ in places:
                owner._parameters[name] = chunk

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, always_call=True)

    def used(self):
        if self.replicas:
            keep_in_step(0, "the end of backward", self.replicas)
        return super().used()

    def summed(self, chunk):
        """The backward of gather_weight() has reduce-scattered, and autograd has added up
        microbatches: chunk.grad is summed over the replicas already."""
        return sum_over_others(take_gradient(chunk), chunk.tag.sum_over[1:])

    def publish(self):
        """Nothing to send: the next forward gathers the new weights."""

    def whole(self):
        for chunk, shape in self.chunks:
            yield chunk.tag, gather_weight(chunk, shape, chunk.tag.sum_over[0]).detach()


REDUCERS = (DDP, ZeRO1, ZeRO2, ZeRO3)  # by ZeRO stage
