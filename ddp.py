"""Data parallelism: D replicas of the model, each with 1/D of the batch; gradients are summed.

Split: the batch. Replicated: weights, gradients, optimizer states. Sent per rank and step:
2 (D-1)/D Psi elements for Psi parameters, whatever the number of microbatches.

No average is taken. The loss was divided by the number of tokens in the whole batch before
backward, so the sum of the ranks' gradients is the gradient of the whole batch. PyTorch
Distributed, arXiv 2006.15704.

    python -m extras.show ddp                  a small GPT on 4 ranks
    torchrun train.py --dp 2       train.py on 2 ranks

For a model of your own: DDP(model, replicas), three lines of a loop (docs/your-own-model.md).
"""

import torch

from collectives import all_reduce, broadcast
from group import Group
from shard import Tag


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


def as_stages(model, replicas):
    """What a reducer is given, as {stage: [layers]}. From train.py it is that already, with tags. A
    model of your own, a module or a list of layers, comes with its replicas: all get the parameters
    of the first (each keeps its own buffers), and tags that say: whole, to be summed over
    `replicas`."""
    if replicas is None and isinstance(model, dict):
        return model
    if not isinstance(replicas, Group):
        raise TypeError("a model of your own needs the group of its replicas, "
                        'Mesh(dp=number of ranks).group("dp"), as the second argument')
    layers = [model] if isinstance(model, torch.nn.Module) else model
    for name, param in torch.nn.ModuleList(layers).named_parameters():
        param.data = param.data.contiguous()  # in another order (channels_last) no chunk is a view
        broadcast(param.data, replicas)
        name = name.removeprefix("0.") if layers is not model else name
        rows = param.size(0) if param.dim() else 1
        param.tag = Tag(name, param.shape, 0, ((0, rows),), sum_over=(replicas,))
    return {0: layers}


def take_gradient(param):
    """Returns a parameter's gradient, and clears param.grad for the next step. Zeros if no layer
    has used the parameter, because another replica may have."""
    grad, param.grad = param.grad, None
    return torch.zeros_like(param) if grad is None else grad


def used_by_any(used, replicas):
    """[is it used by any replica]. used: for each parameter, does this replica use it? replicas:
    None: the model is train.py's, every rank uses every parameter, and nothing is sent."""
    if replicas is None:
        return [True] * len(used)
    used = torch.tensor(used, dtype=torch.float, device=replicas.device)
    return (all_reduce(used, replicas) > 0).tolist()


class DDP:
    """Sums gradients over the replicas.

    In, from train.py: this rank's pipeline stages, {stage: [layers]}, whose parameters are tagged
    (shard.py). value(tag): this rank's slice of the initial value of the parameter with this tag.
    None: the parameters have their values already, the same on all replicas.
    In, from you: any module, or a list of layers; and the group of replicas.
    ZeRO (zero.py) shards what is replicated here. All four classes have the same members:

        weights        what this rank's optimizer steps, in place: whole parameters (ZeRO: chunks)
        tags           the tag of each of `weights`
        expect()       before each backward of a stage. last: the stage's last one in this step
                       (during which engine/ddp.py starts to send gradients)
        gradients()    after the last backward of a step: the gradient of each of `weights`, summed
                       over the ranks that the tag names. Clears the gradients for the next step.
                       None for a parameter of your model that no replica has used in this step
        publish()      after the optimizer's step: sends new weights where the next forward needs
                       them on every rank (ZeRO-1, 2; ZeRO-3 gathers them in forward)
        sharded        True under ZeRO: each replica's optimizer steps different parts. Read for
                       the global norm (optimizer.py) and for checkpoints
    """

    sharded = False

    def __init__(self, model, replicas=None, value=None):
        self.replicas = replicas
        every = parameters_of(as_stages(model, replicas))
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
        return [self.summed(param) if used else None
                for param, used in zip(self.params, self.used(), strict=True)]

    def used(self):
        """For each parameter: has any replica used it since the last call of gradients()?"""
        return used_by_any([param.grad is not None for param in self.params], self.replicas)

    def summed(self, param):
        grad = take_gradient(param)
        for group in param.tag.sum_over:  # the replicas, then other ranks with terms of the sum
            all_reduce(grad, group)
        return grad

    def publish(self):
        """Nothing to send: every rank has stepped every weight, with the same gradients."""

    # For checkpoints, tests and the final comparison of the replicas

    def whole(self):
        """Yields (tag, this rank's whole slice) of every parameter. Collective in ZeRO3."""
        for param in self.params:
            yield param.tag, param.data
        for weights, tag, _ in self.frozen:
            yield tag, weights
