"""SGD, and the optimizers for large batches that give each matrix a rate of its own. For clipped
gradients g, weights w, decay d (of matrices only), momentum m:

    SGD    v = m v + lr (g + d w);  w = w - v
    LARS   arXiv 1708.03888: SGD, each matrix with lr |w| / (|g| + d |w|). Left out: the paper's
           trust coefficient of 0.001; it is a factor of --lr
    LAMB   arXiv 1904.00962: u = mean / (sqrt(square) + 1e-6) + d w, both means bias corrected like
           Adam's; w = w - lr (|w| / |u|) u. Left out: limits for |w|, which the paper allows

The papers scale each layer. A layer is one tensor here: c_attn (q, k, v) has one ratio. Biases and
LayerNorm gains have no decay and no ratio. A ratio is 1 where |w| or the gradient (LAMB: u) is 0.

The square of a whole matrix's norm is the sum of the squares of its pieces, over all ranks that
hold one, each divided by the number of ranks that hold the same piece (holders() in
engine/optimizer.py): one all-reduce of two numbers per tensor.
"""

from functools import partial

import torch

from engine.collectives import all_reduce
from engine.optimizer import AdamW, Optimizer, exact_norms
from optimizer import decays
from shard import Shard


class Layerwise(Optimizer):
    """Steps tensor by tensor:  w = w - step,  where step comes from a direction (a flat tensor per
    bucket), times lr, times a trust ratio per tensor.

    To skip a step every change is multiplied by `go`, 0 or 1, a tensor: the host does not wait."""

    def __init__(self, reducer, norm_group, cfg, shapes):
        super().__init__(reducer, norm_group, cfg, shapes)
        self.ratios = None  # trust ratio of each tensor in the last step
        self.index_of = {name: i for i, name in enumerate(shapes)}
        # For each piece of a parameter on this rank: index_of its tensor
        self.indices = torch.tensor([self.index_of[param.shard.name] for bucket in reducer.buckets
                                     for param, _ in bucket.pieces(bucket.master)],
                                    dtype=torch.long, device=self.device)
        self.is_matrix = torch.tensor([decays(Shard(name, shape))
                                       for name, shape in shapes.items()], device=self.device)

    def step(self, lr, factor, finite):
        self.updates += finite
        go = finite.double()
        # A function, not a list: LARS needs each bucket's gradient twice, and a list would hold a
        # copy of all gradients in between
        gradient = partial(self.gradient, factor.to(self.wide).view(1), finite)
        self.update_moments(gradient, go)
        self.ratios = self.trust_ratios(gradient)
        rates = lr * go * self.ratios  # go: a skipped step adds nothing to the velocity
        for bucket in self.in_order_of_use:
            change = self.direction(bucket, gradient)
            for param, piece in bucket.pieces(change):
                _, rate = self.settings(param.shard)
                piece.mul_(rate * rates[self.index_of[param.shard.name]])
            change = self.with_momentum(bucket, change, go)
            # Times go: a skipped step must not move the weights by the old velocity, either
            bucket.master.addcmul_(change, go, value=-1)
            self.publish(bucket)

    def gradient(self, factor, finite, bucket):
        """A bucket's gradient times factor, a new flat tensor; zeros if not finite."""
        grad = bucket.grad_shard
        if grad is None:
            grad = torch.cat([piece for _, piece in self.reducer.grad_pieces(bucket)])
        return (grad * factor).masked_fill_(~finite, 0.0)

    def update_moments(self, gradient, go):
        """Update moments that the direction depends on."""

    def direction(self, bucket, gradient):
        """What to subtract at a rate of 1, a new flat tensor."""
        raise NotImplementedError

    def trust_ratios(self, gradient):
        """A factor for each tensor, the same bits on all ranks."""
        raise NotImplementedError

    def with_momentum(self, bucket, change, go):
        return change

    def add_decay(self, bucket, change):
        weights = dict(bucket.pieces(bucket.master))
        for param, piece in bucket.pieces(change):
            decay, _ = self.settings(param.shard)
            piece.add_(weights[param], alpha=decay)
        return change

    def whole_norms(self, flat_of):
        """(norms of the weights, norms of flat_of(bucket)) of all whole tensors, wherever they lie.
        Each rank adds the squares of its pieces, divided by the number of ranks that hold them."""
        squares = torch.zeros(2, len(self.is_matrix), dtype=torch.double, device=self.device)
        weight_norms = []  # for each bucket the norms of its pieces on this rank
        other_norms = []
        for bucket in self.reducer.buckets:
            weights = [piece for _, piece in bucket.pieces(bucket.master)]
            others = [piece for _, piece in bucket.pieces(flat_of(bucket))]
            if weights:
                weight_norms.append(exact_norms(weights, self.wide))
                other_norms.append(exact_norms(others, self.wide))
        if weight_norms:  # else there are fewer parameters than ranks
            norms = torch.stack([torch.cat(weight_norms), torch.cat(other_norms)])
            squares.index_add_(1, self.indices, norms.square() / self.copies)
        return all_reduce(squares, self.norm_group).sqrt()

    def ratio_of(self, numerator, denominator, given):
        """numerator / denominator for each matrix; 1 for other tensors, and where the weights'
        norm (numerator) or the `given` norm is 0."""
        has_ratio = self.is_matrix & (numerator > 0) & (given > 0)
        return torch.where(has_ratio, numerator / denominator, 1.0)


class SGD(Layerwise):
    def direction(self, bucket, gradient):
        return self.add_decay(bucket, gradient(bucket))

    def trust_ratios(self, gradient):
        return torch.ones(len(self.is_matrix), dtype=torch.double, device=self.device)

    def with_momentum(self, bucket, change, go):
        """v = m v + change; to skip the step, v stays."""
        momentum = 1 - (1 - self.beta1) * go
        return bucket.moments["velocity"].mul_(momentum).add_(change)


class LARS(SGD):
    def trust_ratios(self, gradient):
        weight, grad = self.whole_norms(gradient)
        return self.ratio_of(weight, grad + self.weight_decay * weight, grad)


class LAMB(Layerwise):
    def update_moments(self, gradient, go):
        for bucket in self.reducer.buckets:
            grad = gradient(bucket)
            # how far each mean moves toward the new term: 0 if the step is skipped
            toward_mean = ((1 - self.beta1) * go).to(grad.dtype)
            toward_square = ((1 - self.beta2) * go).to(grad.dtype)
            bucket.moments["exp_avg"].lerp_(grad, toward_mean)
            bucket.moments["exp_avg_sq"].lerp_(grad.square_(), toward_square)

    def direction(self, bucket, gradient):
        # at least 1: `updates` is still 0 if the first step is skipped
        steps = self.updates.double().clamp(min=1)
        mean = bucket.moments["exp_avg"] / (1 - self.beta1**steps)
        square = bucket.moments["exp_avg_sq"] / (1 - self.beta2**steps)
        return self.add_decay(bucket, mean.div_(square.sqrt_().add_(1e-6)))

    def trust_ratios(self, gradient):
        weight, change = self.whole_norms(lambda bucket: self.direction(bucket, gradient))
        return self.ratio_of(weight, change, change)


OPTIMIZERS = {"adamw": AdamW, "sgd": SGD, "lars": LARS, "lamb": LAMB}
