"""ZeRO, overlapped. Three classes on top of engine/ddp.py's DDP, each built on the one before:

    ZeRO1    new weights are all-gathered while the next forward begins
    ZeRO2    one full gradient at a time (on GPUs two): a layer's is reduced while backward goes on
    ZeRO3    a layer's weights are gathered while the layer before it computes

A bucket is one layer's weights (partition names the exceptions), and each of D replicas runs the
optimizer on 1/D of it. Bytes held and elements sent are those of the table in zero.py, with one
difference: ZeRO3 gathers for backward only what backward reads, so not the embedding layer and, if
the head is a ChunkedHead (--fast tp), not the head's matrix. A tied matrix is gathered twice in
forward, once for each of its uses.

    torchrun train.py --dp 4 --zero 3 --fast ddp
"""

import torch
from torch.utils._pytree import tree_leaves

from engine.collectives import all_gather, all_reduce, reduce_scatter
from engine.ddp import DDP
from engine.group import Work


class ZeRO1(DDP):
    """Shards optimizer states: reduce-scatters gradients, and all-gathers new weights while the
    next forward begins."""

    sharded = True
    is_published = True  # has publish() been called since the last call of gradients()?

    def __init__(self, model, *args, **options):
        # bucket -> Work of its all_gather, until waited for; under ZeRO-3 until freed
        self.gathered = {}
        super().__init__(model, *args, **options)
        self.watch({0: self.layers} if self.replicas else model)

    def is_split(self, trained):
        return trained

    def watch(self, stages):
        """Have each layer wait for its new weights, which travel while the layers before it run."""
        for layers in stages.values():
            for layer in layers:
                # prepend: before a hook of the user's, which may read weights
                self.called(layer).register_forward_pre_hook(
                    lambda module, args, layer=layer: self.gather_weights([layer]), prepend=True)

    def called(self, layer):
        """The module whose call runs a layer: the layer itself; for the parameters outside of the
        layers of a model of your own, the model."""
        return self.model if layer is self.outside else layer

    def partition(self, users):
        """One bucket for the parameters that have the same users (layers) and the same groups to
        sum over: those of one layer (two buckets under --sp or --ep), or a weight that two layers
        share. Then ZeRO-3 can gather just what a layer needs. In reverse order of use."""
        units = {}  # common(...) of the parameters of one bucket -> these parameters
        for param, where in users.items():
            units.setdefault(self.common(param, where), []).append(param)
        found = []
        for params in reversed(units.values()):
            stage, _ = users[params[0]][0]  # the first user, which backward reaches last
            found.append((stage, params))
        return found

    def common(self, param, where):
        """(groups to sum over, users, trained?) of a parameter."""
        return param.tag.sum_over, tuple(where), param.requires_grad, param.dtype

    def launch(self, bucket):
        super().launch(bucket, reduce_scatter)

    def gradients(self):
        if self.replicas and not self.is_published:
            raise RuntimeError("ZeRO-1 and 2: call publish() after each step of the optimizer, "
                               "which has stepped only this replica's chunks")
        self.is_published = False
        return super().gradients()

    def publish(self):
        """Start to all-gather the new weights, in the order in which the next forward uses them."""
        self.is_published = True
        for bucket in self.buckets:
            self.gathered[bucket] = all_gather(bucket.full, bucket.group, async_op=True)
        if self.replicas:  # of your own model you may read weights without a forward
            self.gather_weights(self.layers)

    def gather_weights(self, layers):
        for layer in layers:
            for param in layer.parameters():
                self.gathered.pop(self.home[param], Work()).wait()


class ZeRO2(ZeRO1):
    """Shards gradients too: reduce-scatters each microbatch's, layer by layer, and adds this rank's
    shard of the sum to grad_shard. At most one layer's full gradient exists at a time, on a GPU
    two: one is reduced while the next fills. Exceptions: the tied embedding's, from its first use
    in backward to its second; and, under zero bubble, those that wait in param.grad (see collect).
    """

    every_microbatch = True

    def __init__(self, *args, **options):
        self.reducing = None  # the bucket whose reduction is pending
        self.lacking = set()  # parameters whose part of a full gradient has no values yet
        super().__init__(*args, **options)

    def allocate_shards(self, bucket):
        if bucket.trained:
            bucket.grad_shard = torch.zeros_like(bucket.weight_shard)

    def zero_grad(self):
        super().zero_grad()
        for bucket in self.buckets:
            bucket.grad_shard.zero_()

    def collect(self, param, bucket):
        """Move param.grad into its bucket. If the bucket is not filling (the I of a split backward,
        engine/pipeline.py), leave the gradient in param.grad until launch()."""
        if bucket in self.filling:
            self.move(param, bucket)

    def move(self, param, bucket):
        """Copy param.grad into the bucket's full gradient. (A backward brings each parameter's
        gradient once. KeyError if one came again: it would have to be added.)"""
        into = bucket.view(self.full_gradient(bucket), param)
        self.lacking.remove(param)
        into.copy_(param.grad)
        param.grad = None

    def full_gradient(self, bucket):
        """The bucket's full gradient, for move() to copy into. It lives until it is reduced.

        The bucket may have none, or only that of an earlier microbatch, which is still being
        reduced. Then a new gradient is made, without values. Before that keep_shard() ends the
        pending reduction, of any bucket, and frees the gradient that was reduced. (On a GPU the
        reduction of another bucket goes on until launch().)"""
        if bucket.grad is None or bucket is self.reducing:
            if bucket is self.reducing or not bucket.group.runs_on_streams:
                self.keep_shard()
            bucket.grad = bucket.grad_shard.new_empty(bucket.numel)
            self.lacking.update(bucket.params)
        return bucket.grad

    def launch(self, bucket):
        for param in bucket.params:
            if param.grad is not None:
                self.move(param, bucket)
        full = self.full_gradient(bucket)
        for param in bucket.params:
            if param in self.lacking:  # none came, but another rank may have a gradient
                self.lacking.remove(param)
                bucket.view(full, param).zero_()
        full[bucket.filled :].zero_()  # padding
        # One reduction at a time. If this layer has two buckets (--sp, --ep), the other one may
        # have been launched since full_gradient() made this gradient: end that reduction
        self.keep_shard()
        self.works.append(reduce_scatter(full, bucket.group, async_op=True))
        self.reducing = bucket

    def keep_shard(self):
        """Wait for the pending reduction, add this rank's shard of the sum, and free the rest."""
        if self.reducing:
            self.works.pop().wait()
            bucket = self.reducing
            self.reducing = None
            bucket.grad_shard.add_(bucket.grad[bucket.own])
            bucket.grad = None

    def finish(self):
        self.keep_shard()
        super().finish()


class ZeRO3(ZeRO2):
    """Shards weights too: gathers a layer's weights while the layer before it computes, and frees
    them after the layer has run. At most two layers' full weights exist at a time."""

    def is_split(self, trained):
        return True

    def partition(self, users):
        self.pinned = []  # layers whose weights stay whole until the end of the step
        self.order = 0  # stands for the buckets gathered in this step, in this order
        # Parameters that backward reads: they share no bucket with those that it does not
        self.for_backward = {param for layer in self.layers
                             for module in self.read_in_backward(layer)
                             for param in module.parameters()}
        return super().partition(users)

    def common(self, param, where):
        return *super().common(param, where), param in self.for_backward

    def allocate_shards(self, bucket):
        """The bucket has its values: keep this rank's shard of the weights too, free the rest."""
        super().allocate_shards(bucket)
        bucket.weight_shard = bucket.weight_shard.clone()
        bucket.full.untyped_storage().resize_(0)

    def watch(self, stages):
        if self.outside is not None:
            self.model.register_forward_pre_hook(self.pin_outside, prepend=True)
        for layers in stages.values():
            layers = [layer for layer in layers if layer is not self.outside]
            read = [self.read_in_backward(layer) for layer in layers]
            for i, layer in enumerate(layers):
                previous = read[i - 1] if i > 0 else []
                self.watch_layer(layer, layers[i + 1 : i + 2], read[i], previous)
            if not self.replicas:
                layers[0].register_forward_pre_hook(self.watch_input)

    def pin_outside(self, module, args):
        """Before a module of your own runs: gather its weights outside of the layers."""
        self.pinned = [self.outside]
        self.gather_weights([])

    def read_in_backward(self, layer):
        """The modules whose weights the layer's backward reads: all, if the layer does not say."""
        return list(getattr(layer, "read_in_backward", [layer]))

    def watch_layer(self, layer, next_layers, needed, previous):
        """Before the layer's forward gather its weights, and start to gather those of the next
        layer (next_layers: a list of one; [] for the last). Before its backward gather those of
        `needed`, the modules that this backward reads, and start to gather those of `previous`, the
        modules that the backward of the layer before it reads: that backward comes next."""
        def before_forward(module, args):
            if self.in_backward:  # activation checkpointing of yours runs the layer again
                self.gather_weights([layer], free=False)
                return
            # The previous backward is over, and another rank may have launched all its buckets in
            # it. Launch the rest before gathering more: so all ranks call collectives in one order
            self.launch_rest()
            self.gather_weights([layer], next_layers)

        def after_forward(module, args, out):
            # If there is no next layer, whose before_forward would free these weights
            if not next_layers and not self.in_backward:
                self.gather_weights([])
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(before_backward)

        def before_backward(grad):
            self.begin_backward()
            self.gather_weights(needed, previous)

        layer.register_forward_pre_hook(before_forward, prepend=True)
        layer.register_forward_hook(after_forward)

    def watch_input(self, layer, args):
        """Called before the forward of a stage's first layer. When the gradient of its input is
        there, backward needs no weights of the stage: free them. (The first stage of all gets token
        ids, which have no gradient. There the hook of the embedding's output frees the weights,
        because the embedding needs none.)"""
        x, *_ = args
        if x.requires_grad:
            x.register_hook(lambda grad: self.gather_weights([]))

    def gather_weights(self, layers, prefetch=(), free=True):
        """Make the weights of `layers` whole, start to gather those of `prefetch`, and free all
        others, except those of self.pinned. A bucket is refilled in the same storage, because
        tensors that autograd saved point into it."""
        # dicts, not sets: all ranks need the same order
        needed = {self.home[param]: None for layer in [*self.pinned, *layers]
                  for param in layer.parameters()}
        kept = dict(needed)
        kept.update({self.home[param]: None for layer in prefetch for param in layer.parameters()})
        for bucket in [bucket for bucket in self.gathered if free and bucket not in kept]:
            self.gathered.pop(bucket).wait()
            bucket.full.untyped_storage().resize_(0)
        for bucket in kept:
            if bucket not in self.gathered:
                self.order = (31 * self.order + 1 + self.index[bucket]) % 1_000_003
                bucket.full.untyped_storage().resize_(bucket.full.nbytes)
                bucket.full[bucket.own].copy_(bucket.weight_shard)
                self.gathered[bucket] = all_gather(bucket.full, bucket.group, async_op=True)
        for bucket in needed:
            self.gathered[bucket].wait()

    def finish(self):
        """Also free the weights that the last backward has gathered: the optimizer steps the
        shards, and the next forward gathers the new weights."""
        super().finish()
        self.publish()
        if self.replicas:
            order = torch.tensor([self.order], device=self.replicas.device, dtype=torch.double)
            if all_reduce(order, self.replicas).item() != self.order * self.replicas.size:
                raise RuntimeError("ZeRO-3: in this step the replicas have run other layers, or in "
                                   "another order: all must run the same")
            self.order = 0

    def publish(self):
        """Nothing to send: free all weights, and gather_weights gathers the new ones."""
        self.is_published = True
        self.pinned = []
        self.gather_weights([])


REDUCERS = (DDP, ZeRO1, ZeRO2, ZeRO3)  # by ZeRO stage
