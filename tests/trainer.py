"""train.Trainer, whose step tests can take in two halves."""

from types import SimpleNamespace

import torch

import train
from run.copies import replicas_agree


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
        numbers. After: self.grads has the gradients, those of reducer.weights."""
        taken = []
        # Instance attributes hide the methods meanwhile
        self.optimizer.step = lambda *args: taken.append(args)
        self.reducer.publish = lambda: None
        try:
            norm, sums = self.step(batches, 0.0)
        finally:
            del self.optimizer.step, self.reducer.publish
        ((self.grads, _, _),) = taken
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

