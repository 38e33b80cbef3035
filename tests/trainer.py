"""train.Trainer, whose step tests can take in two halves."""

from types import SimpleNamespace

import torch

import train
from run.copies import replicas_agree
from run.log import held_bytes, predicted_bytes
from sizes import bytes_per_parameter


class Trainer(train.Trainer):
    @property
    def tokens(self):
        return self.cfg.batch_size * self.cfg.block_size

    @property
    def n_params(self):
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def scale(self):
        return self.optimizer.numbers().get("scale", torch.ones(()))

    def gradients(self, batches):
        """Forward and backward. Returns (norm, read): read() gives loss, norm and loss scale as
        numbers."""
        # Instance attributes hide the methods meanwhile
        self.optimizer.step = lambda *args: None
        self.reducer.publish = lambda: None
        try:
            norm, sums = self.step(batches, 0.0)
        finally:
            del self.optimizer.step, self.reducer.publish
        numbers = torch.cat([torch.stack([norm, self.scale.to(norm.dtype)]), sums])
        reading = self.mesh.world.start_read(numbers)

        def read():
            norm, scale, loss, asked, _, *statistics = reading()
            self.stopping = bool(asked)
            self.statistics = self.routing.read(statistics, self.tokens)
            return loss, norm, scale

        return norm, read

    def update(self, norm, lr):
        self.optimizer.step(self.grads, norm, lr)
        self.reducer.publish()

    def validation_loss(self, data, batches=None, show=lambda done, batches: None):
        return self.validate(data, SimpleNamespace(validating=show), batches)

    def whole_weights(self):
        return self.reducer.whole()

    def replicas_agree(self):
        return replicas_agree(self)



def state_bytes(trainer):
    """Bytes of the model states of a Trainer of engine/'s parts on this rank: (by the formula, in
    live storages). After a step."""
    live = live_bytes(trainer)
    assert live == held_bytes(trainer)  # what the last lines of a run say
    return predicted_bytes(trainer) + padding_bytes(trainer), live


def padding_bytes(trainer):
    """Bytes of what buckets hold beside the formula: weights and gradients of the elements by which
    ZeRO's shards become equal. Optimizer states of the latter there
    are none, so a rank whose shard ends with them holds less than a D-th."""
    cfg, reducer = trainer.cfg, trainer.reducer
    total = 0.0
    for bucket in reducer.buckets + reducer.frozen_buckets:
        weights, grads, states = bytes_per_parameter(
            cfg.zero, bucket.group.size, bucket.full.itemsize)
        slices = sum(param.tag.slice_shape.numel() for param in bucket.params)
        total += (bucket.numel - slices) * (weights + bucket.trained * grads)
        if bucket.trained:
            pieces = sum(piece.numel() for _, piece in bucket.pieces(bucket.weight_shard))
            total += (pieces * bucket.num_shards - slices) * states
    return round(total)


def live_bytes(trainer):
    """Bytes of the storages that hold weights, gradients and optimizer states, each once, because
    tensors share storages."""
    reducer, optimizer = trainer.reducer, trainer.optimizer
    held = [*optimizer.masters, *(x for values in optimizer.moments.values() for x in values)]
    held += [*trainer.grads, *(param.grad for param in reducer.home)]
    for bucket in reducer.buckets + reducer.frozen_buckets:
        held += [bucket.full, bucket.grad, bucket.weight_shard, bucket.grad_shard]
    storages = [x.untyped_storage() for x in held if x is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
