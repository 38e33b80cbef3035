"""ZeRO: shards over the D data ranks what data parallelism (ddp.py) replicates.

A layer's parameters lie side by side in one tensor, a Flat, which is cut into D chunks, and rank
d's optimizer steps chunk d only. ZeRO-1 keeps only this chunk of the optimizer states, ZeRO-2 also
of the gradients, ZeRO-3 also of the weights. For Psi parameters and m microbatches:

      sharded                    bytes per parameter (16-bit training)   elements sent per step
    0 nothing: DDP               16 = 2 weights + 2 gradients + 12 Adam   2 Psi (D-1)/D
    1 optimizer states           4 + 12/D                                 2 Psi (D-1)/D
    2 gradients too              2 + 14/D                           (1 + m) Psi (D-1)/D
    3 weights too (FSDP)         16/D                          at most 3 m Psi (D-1)/D

(D counts all ranks that see different tokens: with --cp the context ranks too. ZeRO-3 gathers an
embedding once per microbatch, not twice; so, too, a stage's last layer, if its backward follows at
once.)
ZeRO-2 and 3 reduce the gradients of every microbatch, because a sum kept until the last microbatch
would be a whole gradient. ("Whole" in this file: not cut into chunks. With --tp a whole parameter
is this rank's slice.) arXiv 1910.02054; FSDP, arXiv 2304.11277.

Hybrid sharding (--shard R): shards over R of the D ranks, so R stands for D in the table, and the
chunks of the n = D/R replicas of a shard are all-reduced once a step: 2 (n-1)/n Psi/R more.

    python train.py --dp 4 --zero 3
    python -m extras.show zero      each stage, on 4 ranks
"""

import torch

from collectives import all_gather, own_chunk, reduce_scatter
from ddp import DDP

# Which chunks of a block's Flat a rank has in memory, D = 2. #: all the time; o: part of a step
#
#                        DDP       ZeRO-1    ZeRO-2    ZeRO-3
#    chunk                0 1       0 1       0 1       0 1
#    rank 0
#      weights            # #       # #       # #       # o
#      gradients          # #       # #       # o       # o
#      optimizer states   # #       #         #         #
#    rank 1
#      weights            # #       # #       # #       o #
#      gradients          # #       # #       o #       o #
#      optimizer states   # #         #         #         #
#
# o of weights: while this block computes, or the one before it in the pass. o of gradients: from
# backward until the ranks have reduced them
#
# A step of ZeRO-3 with three blocks. F2: forward of block 2; B2: its backward
#
#    computes              |     | F1  | F2  | F3  | B3  | B2  | B1  |     | AdamW
#    gathers weights       | 1   | 2   | 3   |     | 2   | 1   |     |     |
#    has whole weights     |     | 1 2 | 2 3 | 3   | 3 2 | 2 1 | 1   | 1   | 1
#    reduces gradients     |     |     |     |     |     | 3   | 2   | 1   |
#
# (A rank of one thread gathers and reduces when it waits for the result: transport/background.py)


def first_of_chunk(flat):
    """Index of the first element of this rank's chunk."""
    return flat.group.rank * (flat.weights.numel() // flat.group.size)


class ZeRO1(DDP):
    """Shards the optimizer states. The all-reduce of data parallelism is cut into its two halves,
    and the optimizer steps between them. So a rank sends no more than before.

    The new weights travel while the next forward begins: a layer waits for its own."""

    sharded = True

    def __init__(self, stages, *args):
        super().__init__(stages, *args)
        self.gathers = {}  # Flat -> a function that waits until its weights are whole
        for layers in stages.values():
            for i, layer in enumerate(layers):
                previous = layers[i - 1] if i > 0 else None
                following = layers[i + 1] if i + 1 < len(layers) else None
                self.register_hooks(layer, previous, following)

    def pieces_to_step(self, flat):
        if not flat.is_trained:
            return super().pieces_to_step(flat)
        # Views: to step a chunk in place changes the parameter
        return flat.pieces(own_chunk(flat.weights, flat.group), first_of_chunk(flat))

    def register_hooks(self, layer, previous, following):
        """Register hooks that call this reducer before the layer computes. previous, following
        (for ZeRO-3): the neighbours of the layer in its stage, or None."""
        def in_forward(layer, args):
            for flat in self.flats_in(layer):
                self.make_whole(flat)

        layer.register_forward_pre_hook(in_forward)

    def flats_in(self, layer):
        """The Flats of a layer. (A dict and not a set: all replicas need one order.)"""
        return [*dict.fromkeys(self.home[param] for param in layer.parameters())]

    def reduce(self, flat):
        reduce_scatter(flat.grads, flat.group)

    def wait_for_reduction(self, flat):
        self.reductions.pop(flat)()
        return own_chunk(flat.grads, flat.group), first_of_chunk(flat)

    def gather(self, flat):
        all_gather(flat.weights, flat.group)

    def publish(self):
        for flats in self.flats.values():
            for flat in reversed(flats):  # in the order in which forward needs them
                self.gathers[flat] = self.background.start(self.gather, flat)

    def make_whole(self, flat):
        """Wait until the weights of a Flat are whole: they may be on their way."""
        if flat in self.gathers:
            self.gathers.pop(flat)()

    def whole(self):
        for flat in self.trained_flats:
            self.make_whole(flat)
        return super().whole()


class ZeRO2(ZeRO1):
    """Shards gradients too. As soon as a backward has computed the gradients of a Flat, they are
    reduce-scattered, while backward goes on to the next Flat. When the next Flat's gradients are
    there, this rank's chunk is added to the sum, and the rest is freed. So whole gradients exist of
    two layers at most. (More exist where gradients come early: the head's matrix's, which its
    forward computes; under zb-h1 those of a stage.)"""

    every_microbatch = True

    def __init__(self, *args):
        super().__init__(*args)
        self.reducing = None  # the Flat whose gradients travel now
        self.sums = {}  # Flat -> this rank's chunk of its gradient, summed over microbatches

    def collect(self, param, flat):
        """Move a gradient into its Flat. Unlike in DDP param.grad does not become a view of it,
        because keep_chunk() frees the memory."""
        # A stage of one Flat: its gradients of the microbatch before may still be on their way
        if flat is self.reducing:
            self.keep_chunk()
        if flat.grads is None:
            flat.grads = torch.zeros_like(flat.weights)  # a parameter without gradient: zeros
        if param.grad is not None:
            flat.view(flat.grads, param).copy_(param.grad)
            param.grad = None

    def start_reduction(self, flat):
        super().start_reduction(flat)
        self.keep_chunk()  # the Flat before has travelled meanwhile
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

    def wait_for_reduction(self, flat):
        self.keep_chunk()
        return self.sums.pop(flat), first_of_chunk(flat)


class ZeRO3(ZeRO2):
    """Shards weights too. A layer's weights are gathered while the layer before it in the pass
    computes, and freed when the next one does: at most two layers' whole weights exist at a time.

    They are gathered once more for backward, which goes through the layers from the last to the
    first; all but the embedding's, because its backward reads no weights. free() resizes the
    Flat's storage to 0, and a gather resizes the same storage back, so tensors that autograd has
    saved in forward see the gathered values in backward.

    The background runs gathers and reductions in the order in which they were started, and that
    order must be the same on all replicas. So if a parameter gets a gradient on one replica, it
    must get one on all. (DDP, ZeRO-1 and 2 only start reductions in backward, one per Flat: there a
    missing gradient counts as zeros, and the order stays.)"""

    def __init__(self, *args):
        # Flat -> this rank's chunk of its weights. Now, because __init__ calls pieces_to_step
        self.chunks = {}
        super().__init__(*args)

    def pieces_to_step(self, flat):
        chunk = self.chunks[flat] = own_chunk(flat.weights, flat.group).clone()
        flat.weights.untyped_storage().resize_(0)
        return flat.pieces(chunk, first_of_chunk(flat))

    def register_hooks(self, layer, previous, following):
        if previous is not None and not reads_weights(previous):
            previous = None  # nothing to gather for its backward

        def in_forward(layer, args):
            self.use(layer, following)

        def in_backward(grad):
            self.use(layer, previous)

        # The gradient of a layer's output is there before any node of its backward that reads
        # weights runs
        def register_in_backward(layer, args, out):
            if out.requires_grad:  # else this is a validation, which has no backward
                out.register_hook(in_backward)

        layer.register_forward_pre_hook(in_forward)
        if reads_weights(layer):
            layer.register_forward_hook(register_in_backward)

    def use(self, layer, neighbour):
        """Before a layer computes: wait for its weights, start to gather those of the neighbour
        that computes next (None: no layer does), and free all others."""
        wanted = self.flats_in(layer)
        if neighbour is not None:
            wanted += self.flats_in(neighbour)
        self.free([flat for flat in self.gathers if flat not in wanted])
        for flat in wanted:
            self.start_gather(flat)
        for flat in self.flats_in(layer):
            self.make_whole(flat)

    def start_gather(self, flat):
        if flat not in self.gathers:
            flat.weights.untyped_storage().resize_(flat.weights.nbytes)
            own_chunk(flat.weights, flat.group).copy_(self.chunks[flat])
            self.gathers[flat] = self.background.start(self.gather, flat)

    def make_whole(self, flat):
        self.start_gather(flat)
        self.gathers[flat]()  # a second wait returns at once

    def free(self, flats):
        for flat in flats:
            self.gathers.pop(flat)()
            flat.weights.untyped_storage().resize_(0)

    def publish(self):
        """Nothing to send. The weights that are still whole are those before the step: free them,
        and the next forward gathers the new ones."""
        self.free([*self.gathers])

    def whole(self):
        for flat in self.trained_flats + self.frozen_flats:
            self.make_whole(flat)
            yield from flat.slices()
            self.free([flat])


def reads_weights(layer):
    """Does the backward of this layer read its weights? (model.Embedding says: no.)"""
    return getattr(layer, "backward_reads_weights", True)


REDUCERS = (DDP, ZeRO1, ZeRO2, ZeRO3)  # by --zero; 0 is DDP
