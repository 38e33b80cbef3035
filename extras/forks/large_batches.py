"""Optimizers for large batches, which give each matrix a rate of its own. For clipped gradients g,
weights w, decay d (of matrices only), momentum m:

    LARS   arXiv 1708.03888: v = m v + lr r (g + d w);  w = w - v;  r = |w| / (|g| + d |w|). Left
           out: the paper's trust coefficient of 0.001; it is a factor of --lr
    LAMB   arXiv 1904.00962: u = mean / (sqrt(square) + 1e-6) + d w, both means bias corrected like
           Adam's; w = w - lr r u;  r = |w| / |u|. Left out: limits for |w|, which the paper allows

r, the trust ratio: 1 for biases and LayerNorm gains, and where |w|, or |g| (LAMB: |u|), is 0. The
papers scale each layer. A layer is one tensor here: c_attn (q, k, v) has one ratio.

What the fork shows: the square of a whole matrix's norm is the sum of the squares of its pieces,
over all ranks that hold one, each divided by the number of ranks that hold the same piece
(AdamW.holders). Sent, beside what AdamW sends: one all-reduce of two numbers per tensor. Held:
AdamW's states; LARS uses one of the two moments.

    git apply extras/forks/large_batches.patch && torchrun train.py --dp 4 --layerwise lamb
"""

import torch

from collectives import all_reduce
from optimizer import BETAS, AdamW, clip_coefficient, decays

MOMENTUM = 0.9  # decay of LARS's momentum


class Layerwise(AdamW):
    def __init__(self, cfg, reducer, scale, names, world):
        """names: all tensors of the model, in one order on all ranks. world: the group of all
        ranks."""
        super().__init__(cfg, reducer, scale)
        self.world = world
        self.indices = [names.index(tag.name) for tag in self.tags]
        self.num_tensors = len(names)
        self.decays = [cfg.weight_decay * decays(tag) for tag in self.tags]

    @torch.no_grad()
    def step(self, grads, norm, lr):
        finite = norm.isfinite()
        if finite:
            self.num_steps += 1
            factor = clip_coefficient(norm, self.cfg.grad_clip) / self.scale.value
            grads = [grad.to(self.wide) * factor.to(self.wide) for grad in grads]
            # what to subtract from the weights at a rate of 1
            directions = [self.direction(i, grad) for i, grad in enumerate(grads)]
            weight_norms = self.whole_norms(self.masters)
            other_norms = self.whole_norms(self.measured(grads, directions))
            for i, direction in enumerate(directions):
                weight, other = weight_norms[self.indices[i]], other_norms[self.indices[i]]
                ratio = 1.0
                if decays(self.tags[i]) and weight > 0 and other > 0:
                    ratio = self.trust_ratio(weight, other)
                self.move(i, lr * ratio * direction)
                self.weights[i].copy_(self.masters[i])
        self.scale.update(finite)

    def whole_norms(self, pieces):
        """The norms of all whole tensors of the model, wherever they lie. pieces: this rank's."""
        squares = torch.zeros(self.num_tensors, dtype=torch.double, device=self.scale.value.device)
        for i, piece in enumerate(pieces):
            squares[self.indices[i]] += piece.double().square().sum() / self.holders[i]
        return all_reduce(squares, self.world).sqrt().tolist()


class LARS(Layerwise):
    """The velocity v is in AdamW.means."""

    def direction(self, i, grad):
        return grad + self.decays[i] * self.masters[i]

    def measured(self, grads, directions):
        return grads

    def trust_ratio(self, weight, grad):
        return weight / (grad + self.cfg.weight_decay * weight)

    def move(self, i, change):
        self.means[i].mul_(MOMENTUM).add_(change)
        self.masters[i].sub_(self.means[i])


class LAMB(Layerwise):
    def direction(self, i, grad):
        beta1, beta2 = BETAS
        self.means[i].lerp_(grad, 1 - beta1)
        self.mean_squares[i].lerp_(grad.square(), 1 - beta2)
        t = self.num_steps.item()
        mean = self.means[i] / (1 - beta1**t)  # both means began at 0
        square = self.mean_squares[i] / (1 - beta2**t)
        return mean / (square.sqrt() + 1e-6) + self.decays[i] * self.masters[i]

    def measured(self, grads, directions):
        return directions

    def trust_ratio(self, weight, direction):
        return weight / direction

    def move(self, i, change):
        self.masters[i].sub_(change)


OPTIMIZERS = {"lars": LARS, "lamb": LAMB}
