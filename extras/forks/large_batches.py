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
from optimizer import AdamW, clip_coefficient, decays

MOMENTUM = 0.9  # of LARS
BETA1, BETA2 = 0.9, 0.95  # of LAMB


class Layerwise(AdamW):
    def __init__(self, cfg, reducer, names, world):
        """names: all tensors of the model, in one order on all ranks. world: the group of all
        ranks."""
        super().__init__(cfg, reducer)
        self.world = world
        self.indices = [names.index(tag.name) for tag in reducer.tags]
        self.num_tensors = len(names)
        self.has_ratio = [decays(tag) for tag in reducer.tags]

    def step(self, grads, norm, lr):
        if not norm.isfinite():
            return
        coefficient = clip_coefficient(norm, self.cfg.grad_clip)
        self.num_steps += 1
        grads = [grad.to(state.master.dtype) * coefficient
                 for grad, state in zip(grads, self.states, strict=True)]
        # direction: what to subtract from the weights at a rate of 1
        directions = [self.direction(state, grad)
                      for state, grad in zip(self.states, grads, strict=True)]
        weight_norms = self.whole_norms([state.master for state in self.states])
        other_norms = self.whole_norms(self.measured(grads, directions))
        for i, state in enumerate(self.states):
            weight, other = weight_norms[self.indices[i]], other_norms[self.indices[i]]
            ratio = 1.0
            if self.has_ratio[i] and weight > 0 and other > 0:
                ratio = self.trust_ratio(weight, other)
            self.move(state, lr * ratio * directions[i])
            state.weights.copy_(state.master)

    def whole_norms(self, pieces):
        """The norms of all whole tensors of the model, wherever they lie. pieces: this rank's."""
        squares = torch.zeros(self.num_tensors, dtype=torch.double)
        for i, piece in enumerate(pieces):
            squares[self.indices[i]] += piece.double().square().sum() / self.holders[i]
        return all_reduce(squares, self.world).sqrt().tolist()


class LARS(Layerwise):
    """The velocity v is AdamWState.mean."""

    def direction(self, state, grad):
        return grad + state.decay * state.master

    def measured(self, grads, directions):
        return grads

    def trust_ratio(self, weight, grad):
        return weight / (grad + self.cfg.weight_decay * weight)

    def move(self, state, change):
        state.mean.mul_(MOMENTUM).add_(change)
        state.master -= state.mean


class LAMB(Layerwise):
    def direction(self, state, grad):
        state.mean.lerp_(grad, 1 - BETA1)
        state.square.lerp_(grad.square(), 1 - BETA2)
        mean = state.mean / (1 - BETA1**self.num_steps)  # both means began at 0
        square = state.square / (1 - BETA2**self.num_steps)
        return mean / (square.sqrt() + 1e-6) + state.decay * state.master

    def measured(self, grads, directions):
        return directions

    def trust_ratio(self, weight, direction):
        return weight / direction

    def move(self, state, change):
        state.master -= change


OPTIMIZERS = {"lars": LARS, "lamb": LAMB}
