"""ZeRO: shards over the D data ranks what data parallelism (ddp.py) replicates.

A layer's parameters lie side by side in one tensor, a Flat, which is cut into D chunks, and rank
d's optimizer steps chunk d only. ZeRO-1 keeps only this chunk of the optimizer states, ZeRO-2 also
of the gradients, ZeRO-3 also of the weights. For Psi parameters and m microbatches:

      sharded                    bytes per parameter (16-bit training)   elements sent per step
    0 nothing: DDP               16 = 2 weights + 2 gradients + 12 Adam   2 Psi (D-1)/D
    1 optimizer states           4 + 12/D                                 2 Psi (D-1)/D
    2 gradients too              2 + 14/D                           (1 + m) Psi (D-1)/D
    3 weights too (FSDP)         16/D                                  3 m Psi (D-1)/D

(D counts all ranks over which a layer's gradients are summed: with --cp the context ranks too.)
ZeRO-2 and 3 reduce the gradients of every microbatch, because keeping their sum until the last one
would keep a whole gradient. ("Whole" in this file: not cut into chunks. With --tp a whole parameter
is this rank's slice.) arXiv 1910.02054; FSDP, arXiv 2304.11277.

Hybrid sharding (--shard R): shards over R of the D ranks, so R stands for D in the table, and the
chunks of the D/R replicas of a shard are summed once a step: 2 (D/R - 1)/(D/R) Psi/R elements more.

    torchrun train.py --dp 4 --zero 3        python -m extras.show zero: each stage, on 4 ranks
"""

import torch

from collectives import all_gather, own_chunk, reduce_scatter
from ddp import DDP

# A block's Flat, D = 2, on replica 0. #: held all the time; o: during a part of the step
#
#                       DDP    ZeRO-1  ZeRO-2  ZeRO-3
#    weights            ####   ####    ####    ##oo     oo: while this block runs, or a neighbour
#    gradients          ####   ####    ##oo    ##oo     oo: until they are reduced
#    optimizer states   ####   ##      ##      ##


def first_of_chunk(flat):
    """Index of the first element of this rank's chunk."""
    return flat.group.rank * (flat.weights.numel() // flat.group.size)


class ZeRO1(DDP):
    """Shards the optimizer states. The all-reduce of data parallelism is cut into its two halves,
    and the optimizer steps between them. So a rank sends no more than before.

    The new weights travel while the next forward begins: a layer waits for its own."""

    sharded = True

    def __init__(self, stages, *args):
        self.gathers = {}  # Flat -> a function that waits until its weights are whole
        super().__init__(stages, *args)
        for layers in stages.values():
            for i, layer in enumerate(layers):
                self.watch(layer, before=layers[:i][-1:], after=layers[i + 1 : i + 2])

    def held(self, flat):
        if not flat.trained:
            return super().held(flat)
        # Views: to step a chunk in place changes the parameter
        return flat.pieces(own_chunk(flat.weights, flat.group), first_of_chunk(flat))

    def watch(self, layer, before, after):
        """Register hooks of a layer. before, after (for ZeRO-3): the layer before this one in its
        stage, and the one after it, each as a list, which is empty where there is none."""
        def in_forward(layer, args):
            for flat in self.flats_in(layer):
                self.make_whole(flat)

        layer.register_forward_pre_hook(in_forward)

    def flats_in(self, layer):
        """The Flats of a layer. (A dict and not a set: all replicas need one order.)"""
        return [*dict.fromkeys(self.home[param] for param in layer.parameters())]

    def reduce(self, flat):
        reduce_scatter(flat.grads, flat.group)

    def reduced(self, flat):
        self.reductions.pop(flat)()
        return own_chunk(flat.grads, flat.group), first_of_chunk(flat)

    def publish(self):
        for flats in self.flats.values():  # of each stage, in the order of forward
            for flat in reversed(flats):
                self.gathers[flat] = self.background.start(all_gather, flat.weights, flat.group)

    def make_whole(self, flat):
        """Return when the weights of a Flat are whole: they may be on their way."""
        if flat in self.gathers:
            self.gathers.pop(flat)()

    def whole(self):
        for flat in self.trained:
            self.make_whole(flat)
        return super().whole()


class ZeRO2(ZeRO1):
    """Shards gradients too. As soon as a backward has computed the gradients of a Flat, they are
    reduce-scattered, this rank's chunk is added to the sum, and the rest is freed. About one
    layer's whole gradient exists at a time."""

    every_microbatch = True

    def __init__(self, *args):
        self.reducing = None  # the Flat whose gradients are on their way
        self.sums = {}  # Flat -> this rank's chunk of its gradient, summed over microbatches
        super().__init__(*args)

    def collect(self, param, flat):
        """Move a gradient into its Flat, which has memory for gradients only until start()."""
        # A stage of one Flat: its gradients of the microbatch before may still be on their way
        if flat.grads is None or flat is self.reducing:
            self.keep_chunk()
            flat.grads = torch.zeros_like(flat.weights)  # a parameter without gradient: zeros
        if param.grad is not None:
            flat.view(flat.grads, param).copy_(param.grad)
            param.grad = None

    def start(self, flat):
        super().start(flat)
        self.keep_chunk()  # a layer of two Flats: finish the first
        self.reducing = flat

    def keep_chunk(self):
        """Wait for the reduction under way, add this rank's chunk of the sum, and free the rest."""
        if self.reducing:
            flat, self.reducing = self.reducing, None
            self.reductions.pop(flat)()
            chunk = own_chunk(flat.grads, flat.group)
            if flat in self.sums:
                self.sums[flat] += chunk
            else:
                self.sums[flat] = chunk.clone()  # a view would keep the rest
            flat.grads = None

    def reduced(self, flat):
        self.keep_chunk()
        return self.sums.pop(flat), first_of_chunk(flat)


class ZeRO3(ZeRO2):
    """Shards weights too. A layer's weights are gathered while the layer before it computes, and
    freed when the layer after it does: at most two layers' whole weights exist at a time.

    They are gathered once more for backward, which goes through the layers from the last to the
    first; all but the embedding's, because its backward reads no weights. Freed is the memory of
    the Flat; gathering fills the same memory object, into which the tensors point that autograd has
    saved.

    Gathers and reductions share the background's one order. So a parameter that gets a gradient on
    one replica needs to get one on all."""

    def __init__(self, *args):
        self.chunks = {}  # Flat -> this rank's chunk of its weights
        super().__init__(*args)

    def held(self, flat):
        chunk = self.chunks[flat] = own_chunk(flat.weights, flat.group).clone()
        flat.weights.untyped_storage().resize_(0)
        return flat.pieces(chunk, first_of_chunk(flat))

    def watch(self, layer, before, after):
        def in_forward(layer, args):
            self.use(layer, after)

        def in_backward(grad):
            self.use(layer, [other for other in before if reads_weights(other)])

        # The gradient of a layer's output is there before any node of its backward that reads
        # weights runs: all of these nodes wait for that gradient, also a router's, whose scores
        # weight the outputs of its experts
        def watch_backward(layer, args, out):
            if out.requires_grad:  # else this is a validation, which has no backward
                out.register_hook(in_backward)

        layer.register_forward_pre_hook(in_forward)
        if reads_weights(layer):
            layer.register_forward_hook(watch_backward)

    def use(self, layer, next_layers):
        """Before a layer computes: have its weights whole, start to gather those of the next one,
        and free all others."""
        wanted = [flat for one in [layer, *next_layers] for flat in self.flats_in(one)]
        self.free([flat for flat in self.gathers if flat not in wanted])
        for flat in wanted:
            self.start_gather(flat)
        for flat in self.flats_in(layer):
            self.make_whole(flat)

    def start_gather(self, flat):
        if flat not in self.gathers:
            flat.weights.untyped_storage().resize_(flat.weights.nbytes)
            own_chunk(flat.weights, flat.group).copy_(self.chunks[flat])
            self.gathers[flat] = self.background.start(all_gather, flat.weights, flat.group)

    def make_whole(self, flat):
        self.start_gather(flat)
        self.gathers[flat]()

    def free(self, flats):
        for flat in flats:
            self.gathers.pop(flat)()
            flat.weights.untyped_storage().resize_(0)

    def publish(self):
        """Nothing to send. The weights that are still whole are those before the step: free them,
        and the next forward gathers the new ones."""
        self.free([*self.gathers])

    def whole(self):
        for flat in self.trained + self.frozen_flats:
            self.make_whole(flat)
            yield from flat.slices()
            self.free([flat])


def reads_weights(layer):
    """Does the backward of this layer read its weights? (model.Embedding says: no.)"""
    return getattr(layer, "backward_reads_weights", True)


REDUCERS = (DDP, ZeRO1, ZeRO2, ZeRO3)  # by ZeRO stage
