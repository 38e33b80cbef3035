"""Data parallelism: D replicas of the model, each with 1/D of the batch; gradients are summed.

Split: the batch. Replicated: weights, gradients, optimizer states. Sent per rank and step:
2 (D-1)/D Psi elements for Psi parameters, whatever the number of microbatches.

No average is taken. The loss was divided by the number of tokens in the whole batch before
backward, so the sum of the ranks' gradients is the gradient of the whole batch. PyTorch
Distributed, arXiv 2006.15704.

    python -m extras.show ddp                  a small GPT on 4 ranks
    torchrun train.py --dp 2       train.py on 2 ranks
"""

import torch

from collectives import all_reduce


def parameters_of(stages):
    """The parameters of some stages, {stage: [layers]}, each once: two layers may share one (the
    tied embedding)."""
    return list(dict.fromkeys(param for layers in stages.values() for layer in layers
                              for param in layer.parameters()))


def give_values(param, values):
    """Give values to a parameter of the meta device, which has only a shape and a tag."""
    real = torch.nn.Parameter(values, param.requires_grad)
    real.tag = param.tag
    # Exchanges the contents: `param`, the object that layers refer to, becomes `real`, tag included
    torch.utils.swap_tensors(param, real)


def take_gradient(param):
    """Returns a parameter's gradient, and clears param.grad for the next step. Zeros if no layer
    has used the parameter, because another replica may have."""
    grad, param.grad = param.grad, None
    return torch.zeros_like(param) if grad is None else grad


class DDP:
    """Sums gradients over the replicas.

    In: this rank's pipeline stages, {stage: [layers]}, whose parameters are tagged (shard.py).
    value(tag): this rank's slice of the initial value of the parameter with this tag. None: the
    parameters have their values already, the same on all replicas.
    ZeRO (zero.py) shards what is replicated here. All four classes have the same members:

        weights        what this rank's optimizer steps, in place. Here: whole parameters
        tags           the tag of each of `weights`
        expect()       before each backward of a stage. last: the stage's last one in this step
                       (during which engine/ddp.py starts to send gradients)
        gradients()    after the last backward of a step: the gradient of each of `weights`, summed
                       over the ranks that the tag names. Clears the gradients for the next step
        publish()      after the optimizer's step: sends new weights where the next forward needs
                       them on every rank (ZeRO-1, 2; ZeRO-3 gathers them in forward)
        sharded        True under ZeRO: each replica's optimizer steps different parts. Read for
                       the global norm (optimizer.py) and for checkpoints
    """

    sharded = False

    def __init__(self, stages, value=None):
        every = parameters_of(stages)
        if value:
            for param in every:
                give_values(param, value(param.tag))
        self.params = [param for param in every if param.requires_grad]
        self.weights = [param.data for param in self.params]
        self.tags = [param.tag for param in self.params]
        # For checkpoints: where each of `weights` starts in the slice that its tag describes; and
        # (weights, tag, start) of parameters that are not trained
        self.starts = [0] * len(self.params)
        self.frozen = [(param.data, param.tag, 0) for param in every if not param.requires_grad]

    def expect(self, stage, last):
        """Nothing to prepare: gradients stay in param.grad until the last backward is over."""

    def gradients(self):
        grads = [take_gradient(param) for param in self.params]
        for grad, tag in zip(grads, self.tags, strict=True):
            for group in tag.sum_over:  # the replicas, then other ranks that have terms of the sum
                all_reduce(grad, group)
        return grads

    def publish(self):
        """Nothing to send: every rank has stepped every weight, with the same gradients."""

    # For checkpoints, tests and the final comparison of the replicas

    def whole(self):
        """Yields (tag, this rank's whole slice) of every parameter. Collective in ZeRO3."""
        for param in self.params:
            yield param.tag, param.data
        for weights, tag, _ in self.frozen:
            yield tag, weights
