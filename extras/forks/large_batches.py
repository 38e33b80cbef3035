"""SGD, and the optimizers for large batches that give each matrix a rate of its own; rates and
warm-up that follow the batch. For clipped gradients g, weights w, decay d (of matrices only),
momentum m:

    SGD    v = m v + lr (g + d w);  w = w - v
    LARS   arXiv 1708.03888: SGD, each matrix with lr |w| / (|g| + d |w|). Left out: the paper's
           trust coefficient of 0.001; it is a factor of --lr
    LAMB   arXiv 1904.00962: u = mean / (sqrt(square) + 1e-6) + d w, both means bias corrected like
           Adam's; w = w - lr (|w| / |u|) u. Left out: limits for |w|, which the paper allows

The papers scale each layer. A layer is one tensor here: c_attn (q, k, v) has one ratio. Biases and
LayerNorm gains have no decay and no ratio. A ratio is 1 where |w| or the gradient (LAMB: u) is 0.

The square of a whole matrix's norm is the sum of the squares of its pieces, over all ranks that
hold one, each divided by the number of ranks that hold the same piece (Optimizer.holders): one
all-reduce of two numbers per tensor.

    git apply extras/forks/large_batches.patch && torchrun train.py --dp 4 --optimizer lamb
"""

import math

import torch

from engine.collectives import all_reduce
from engine.optimizer import Optimizer, exact_norms
from optimizer import decays
from shard import Tag


class Layerwise(Optimizer):
    """Steps tensor by tensor:  w = w - step,  where step comes from a direction (a tensor for each
    of the weights), times lr, times a trust ratio per tensor.

    To skip a step every change is multiplied by `go`, 0 or 1, a tensor: the host does not wait."""

    def __init__(self, cfg, reducer, scale, shapes, world):
        """shapes: {name: full shape} of all tensors of the model, in one order on all ranks. world:
        the group of all ranks."""
        super().__init__(cfg, reducer, scale)
        self.world = world
        self.ratios = None  # trust ratio of each tensor in the last step
        self.index_of = {name: i for i, name in enumerate(shapes)}
        # For each of the weights: index_of its tensor
        self.indices = torch.tensor([self.index_of[tag.name] for tag in self.tags],
                                    dtype=torch.long, device=self.device)
        self.is_matrix = torch.tensor([decays(Tag(name, shape))
                                       for name, shape in shapes.items()], device=self.device)

    def update(self, grads, factor, finite, lr):
        go = finite.double()

        # A function, not a list: LARS needs each gradient twice, and a list would hold a copy of
        # all gradients in between
        def gradient(i):
            """Gradient i times factor, a new tensor of the masters' dtype; zeros if not finite."""
            return (grads[i] * factor.view(1)).masked_fill_(~finite, 0.0)

        self.update_moments(gradient, go)
        self.ratios = self.trust_ratios(gradient)
        rates = lr * go * self.ratios  # go: a skipped step adds nothing to the velocity
        for i, tag in enumerate(self.tags):
            _, rate = self.settings(tag)
            change = self.direction(i, gradient)
            change = self.with_momentum(i, change * (rate * rates[self.index_of[tag.name]]), go)
            # Times go: a skipped step must not move the weights by the old velocity, either
            self.masters[i].addcmul_(change, go.to(change.dtype), value=-1)

    def update_moments(self, gradient, go):
        """Update moments that the direction depends on."""

    def direction(self, i, gradient):
        """What to subtract from weights i at a rate of 1, a new tensor of the masters' dtype."""
        raise NotImplementedError

    def trust_ratios(self, gradient):
        """A factor for each tensor, the same bits on all ranks."""
        raise NotImplementedError

    def with_momentum(self, i, change, go):
        return change

    def with_decay(self, i, change):
        decay, _ = self.settings(self.tags[i])
        return change.add_(self.masters[i].view_as(change), alpha=decay)

    def whole_norms(self, other_of):
        """(norms of the weights, norms of other_of(i) for weights i) of all whole tensors, wherever
        they lie. Each rank adds the squares of its pieces, divided by the number of ranks that hold
        them."""
        squares = torch.zeros(2, len(self.is_matrix), dtype=torch.double, device=self.device)
        if self.masters:  # else there are fewer parameters than ranks
            # A part at a time: exact_norms takes many tensors at once, and not all need to exist
            others = torch.cat([exact_norms([other_of(i) for i in some], self.wide)
                                for some in self.in_parts(range(len(self.masters)))])
            norms = torch.stack([exact_norms(self.masters, self.wide), others])
            squares.index_add_(1, self.indices, norms.square() / self.holders)
        return all_reduce(squares, self.world).sqrt()

    def ratio_of(self, numerator, denominator, given):
        """numerator / denominator for each matrix; 1 for other tensors, and where the weights'
        norm (numerator) or the `given` norm is 0."""
        has_ratio = self.is_matrix & (numerator > 0) & (given > 0)
        return torch.where(has_ratio, numerator / denominator, 1.0)


class SGD(Layerwise):
    def direction(self, i, gradient):
        return self.with_decay(i, gradient(i))

    def trust_ratios(self, gradient):
        return torch.ones(len(self.is_matrix), dtype=torch.double, device=self.device)

    def with_momentum(self, i, change, go):
        """v = m v + change; to skip the step, v stays."""
        momentum = 1 - (1 - self.cfg.beta1) * go
        return self.moments["velocity"][i].mul_(momentum).add_(change)


class LARS(SGD):
    def trust_ratios(self, gradient):
        weight, grad = self.whole_norms(gradient)
        return self.ratio_of(weight, grad + self.cfg.weight_decay * weight, grad)


class LAMB(Layerwise):
    def __init__(self, *args):
        super().__init__(*args)
        self.corrections = None  # of the two means' bias, in the current step

    def update_moments(self, gradient, go):
        # How far each mean moves toward the new term: 0 if the step is skipped. Computed once, not
        # for each tensor: on a GPU each number is a kernel
        toward_mean = ((1 - self.cfg.beta1) * go).to(self.wide)
        toward_square = ((1 - self.cfg.beta2) * go).to(self.wide)
        # at least 1: `updates` is still 0 if the first step is skipped
        steps = self.updates.double().clamp(min=1)
        self.corrections = 1 - self.cfg.beta1**steps, 1 - self.cfg.beta2**steps
        for i in range(len(self.weights)):
            grad = gradient(i)
            self.moments["exp_avg"][i].lerp_(grad, toward_mean)
            self.moments["exp_avg_sq"][i].lerp_(grad.square_(), toward_square)

    def direction(self, i, gradient):
        of_mean, of_square = self.corrections
        mean = self.moments["exp_avg"][i] / of_mean
        square = self.moments["exp_avg_sq"][i] / of_square
        return self.with_decay(i, mean.div_(square.sqrt_().add_(1e-6)))

    def trust_ratios(self, gradient):
        weight, change = self.whole_norms(lambda i: self.direction(i, gradient))
        return self.ratio_of(weight, change, change)


OPTIMIZERS = {"sgd": SGD, "lars": LARS, "lamb": LAMB}
MOMENTS = {"sgd": ("velocity",), "lars": ("velocity",), "lamb": ("exp_avg", "exp_avg_sq")}


def with_optimizers(engine):
    """A subclass of Engine (engine/parts.py) that makes these optimizers, too."""
    class WithOptimizers(engine):

        def split_sequences(self, model, group, kind):  # the model is still whole
            self.shapes = {name: param.shape for name, param in model.canonical_parameters()}
            self.world = group.mesh.world
            return super().split_sequences(model, group, kind)

        def Optimizer(self, cfg, reducer):
            if cfg.optimizer not in OPTIMIZERS:
                return super().Optimizer(cfg, reducer)
            make = OPTIMIZERS[cfg.optimizer]
            return make(cfg, reducer, self.scale, self.shapes, self.world)

    return WithOptimizers


def scale_rates(cfg):
    """Multiply --lr and --min-lr by --batch-size / --base-batch-size (--scale-lr linear) or by its
    root (sqrt); turn --warmup-tokens into steps."""
    if cfg.scale_lr != "none":
        ratio = cfg.batch_size / cfg.base_batch_size
        factor = ratio if cfg.scale_lr == "linear" else math.sqrt(ratio)
        cfg.lr *= factor
        cfg.min_lr *= factor
        cfg.scale_lr = "none"  # done: from now on --lr is the rate of this batch
    if cfg.warmup_tokens:
        cfg.warmup_steps = round(cfg.warmup_tokens / (cfg.batch_size * cfg.block_size))
