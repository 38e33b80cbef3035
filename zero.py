"""ZeRO: shards what data parallelism replicates. Each layer's weights are a flat buffer (partition
names the exceptions), and each of D ranks runs the optimizer on 1/D of it. ZeRO-1, 2 and 3 each
keep one thing more as 1/D only.

      sharded                    bytes per parameter (16-bit training)   elements sent per step
    0 nothing: DDP               16 = 2 weights + 2 gradients + 12 Adam  2 Psi (D-1)/D
    1 optimizer states           4 + 12/D                                2 Psi (D-1)/D
    2 gradients too              2 + 14/D                          (1 + m) Psi (D-1)/D
    3 weights too                16/D                                 3 m Psi (D-1)/D

for m microbatches: ZeRO-2 and 3 reduce the gradients of each microbatch, as keeping their sum would
keep a full gradient; ZeRO-3 also gathers the weights for each forward and each backward
(wpe's and, under --pp, the tied matrix's for forward only). ZeRO, arXiv 1910.02054.

    python sizes.py 7e9 --gpu-gb 80        torchrun train.py --dp 4 --zero 3
"""

import torch

from collectives import (
    all_gather,
    own_chunk,
    plain_all_gather,
    plain_reduce_scatter,
    reduce_scatter,
)
from ddp import DDP
from group import Work
from model import Embedding, Head


def plain_zero_step(weights, grad, group, step):
    """ZeRO-1 at its plainest: the all-reduce of data parallelism, cut into its two halves, with the
    optimizer's step on 1/D of everything between them. A rank sends no more than before. (ZeRO-2
    also frees the other chunks of the gradient, ZeRO-3 those of the weights between their uses.)

    In: flat weights, the same on every rank; this rank's own flat gradient. step(w, g) changes this
    rank's chunk w in place, given its gradient g, and may return something.
    Out: every rank has the new weights. Returns what step returned."""
    plain_reduce_scatter(grad, group)  # chunk r of rank r is now the sum; the rest is left over
    result = step(own_chunk(weights, group), own_chunk(grad, group))
    plain_all_gather(weights, group)
    return result


# ---- the same, layer by layer, during backward and the next forward: three differences to DDP ----


class ZeRO1(DDP):
    """Shards optimizer states: reduce-scatters gradients, and all-gathers new weights while the
    next forward begins."""

    zero = 1

    def __init__(self, stages, *args):
        # bucket -> Work of its all_gather, until waited for; under ZeRO-3 until freed
        self.gathered = {}
        super().__init__(stages, *args)
        self.watch(stages)

    def watch(self, stages):
        """Have each layer wait for its new weights, which travel while the layers before it run."""
        for layers in stages.values():
            for layer in layers:
                layer.register_forward_pre_hook(lambda layer, args: self.gather_weights([layer]))

    def partition(self, users):
        """Make one bucket of what the same layers use: one layer's parameters, or a weight that two
        layers share. Then ZeRO-3 can gather just what a layer needs. In reverse order of use."""
        units = {}  # (groups to sum over, users) -> parameters
        for param, where in users.items():
            units.setdefault((param.shard.sum_over, tuple(where)), []).append(param)
        found = []
        for (_, where), params in reversed(units.items()):
            stage, _ = where[0]  # the first user, which backward reaches last
            found.append((stage, params))
        return found

    def launch(self, bucket):
        super().launch(bucket, reduce_scatter)

    def publish(self, bucket):
        self.gathered[bucket] = all_gather(bucket.full, bucket.group, async_op=True)

    def gather_weights(self, layers):
        for layer in layers:
            for param in layer.parameters():
                self.gathered.pop(self.home[param], Work()).wait()


class ZeRO2(ZeRO1):
    """Shards gradients too: reduce-scatters each microbatch's, layer by layer, and adds this rank's
    shard of the sum to grad_shard. At most one layer's full gradient exists at a time, but for the
    tied embedding's, complete only after its second use, and those that collect() leaves in
    param.grad."""

    zero, every_microbatch = 2, True

    def __init__(self, *args):
        self.reducing = None  # the bucket whose reduction is pending
        super().__init__(*args)

    def allocate_gradients(self, bucket):
        bucket.grad_shard = torch.zeros_like(bucket.weight_shard, dtype=bucket.grad_dtype)

    def zero_grad(self):
        super().zero_grad()
        for bucket in self.buckets:
            bucket.grad_shard.zero_()

    def collect(self, param, bucket):
        """Move param.grad into its bucket, if the bucket is filling. If not, leave it until launch:
        zero bubble (pipeline.py) defers the gradients of linear layers to W. Autograd adds the
        others, as LayerNorm's, before that, in I, when no bucket is filling."""
        if bucket in self.filling:
            self.move(param, bucket)

    def move(self, param, bucket):
        """Add param.grad to the bucket's full gradient, which lives until it is reduced."""
        if bucket.grad is None or bucket is self.reducing:
            # Start a new full gradient: there is none, or it is being reduced, for an earlier
            # microbatch. First end the pending reduction, of whatever bucket, and free its gradient
            self.keep_shard()
            bucket.grad = bucket.grad_shard.new_zeros(bucket.numel)
        bucket.view(bucket.grad, param).add_(param.grad)
        param.grad = None

    def launch(self, bucket):
        for param in bucket.params:
            if param.grad is not None:
                self.move(param, bucket)
        self.keep_shard()
        if bucket.grad is None:  # no gradient here, but other ranks may have one to sum
            bucket.grad = bucket.grad_shard.new_zeros(bucket.numel)
        self.works.append(reduce_scatter(bucket.grad, bucket.group, async_op=True))
        self.reducing = bucket

    def keep_shard(self):
        """Wait for the pending reduction, add this rank's shard of the sum, and free the rest."""
        if self.reducing:
            self.works.pop().wait()
            bucket, self.reducing = self.reducing, None
            bucket.grad_shard.add_(bucket.grad[bucket.own])
            bucket.grad = None

    def finish(self):
        self.keep_shard()
        super().finish()


class ZeRO3(ZeRO2):
    """Shards weights too: gathers a layer's weights while the layer before it computes, and frees
    them after the layer has run. At most two layers' full weights exist at a time."""

    zero = 3

    def allocate_gradients(self, bucket):
        """Called when the bucket has its values: keep this rank's shard of the weights too, and
        free the rest."""
        super().allocate_gradients(bucket)
        bucket.weight_shard = bucket.weight_shard.clone()
        bucket.full.untyped_storage().resize_(0)

    def watch(self, stages):
        for layers in stages.values():
            # What backward reads: of the embedding no weights, of the head those of its LayerNorm:
            # train.py's loss, ChunkedLoss, computes the gradients of the matrix in forward
            read = [[] if isinstance(layer, Embedding) else
                    [layer.ln_f] if isinstance(layer, Head) else [layer] for layer in layers]
            for i, layer in enumerate(layers):
                previous = read[i - 1] if i > 0 else []
                self.watch_layer(layer, layers[i + 1 : i + 2], read[i], previous)

    def watch_layer(self, layer, next_layers, read_in_backward, previous):
        """Gather the layer's weights before its forward, and what backward reads of them before its
        backward; start to gather the next layer's, in backward what the previous one reads."""
        def before_forward(module, args):
            self.gather_weights([layer], next_layers)

        def after_forward(module, args, out):
            if out.requires_grad and read_in_backward:
                out.register_hook(before_backward)

        def before_backward(grad):
            self.gather_weights(read_in_backward, previous)

        layer.register_forward_pre_hook(before_forward)
        layer.register_forward_hook(after_forward)

    def gather_weights(self, layers, prefetch=()):
        """Make the weights of `layers` whole, start to gather those of `prefetch`, and free all
        others. A bucket is refilled in the same storage, as tensors that autograd saved point into
        it."""
        # dicts, not sets: all ranks need the same order
        needed = {self.home[param]: None for layer in layers for param in layer.parameters()}
        kept = dict(needed)
        kept.update({self.home[param]: None for layer in prefetch for param in layer.parameters()})
        for bucket in [bucket for bucket in self.gathered if bucket not in kept]:
            self.gathered.pop(bucket).wait()
            bucket.full.untyped_storage().resize_(0)
        for bucket in kept:
            if bucket not in self.gathered:
                bucket.full.untyped_storage().resize_(bucket.full.nbytes)
                bucket.full[bucket.own].copy_(bucket.weight_shard)
                self.gathered[bucket] = all_gather(bucket.full, bucket.group, async_op=True)
        for bucket in needed:
            self.gathered[bucket].wait()

    def publish(self, bucket):
        """Nothing to send: gather_weights gathers the new weights."""


REDUCERS = (DDP, ZeRO1, ZeRO2, ZeRO3)  # by ZeRO stage
