"""AdamW's step on one whole tensor, with known mistakes: a Way says how the step is taken.

    grad = clipping(norm) grad                               clip, ..._factor, rounded
    mean = beta1 mean + (1 - beta1) grad                     betas, keeps_moments
    square = beta2 square + (1 - beta2) grad^2
    mean / (1 - beta1^n), square / (1 - beta2^n)             corrected, count_offset, count_advances
    change = mean / (sqrt(square) + eps)                     eps, eps_inside
    weight = weight - rate (change + decay weight)           rate, decay, moves
"""

from dataclasses import dataclass

import torch


@dataclass
class Way:
    """How a step is taken. The defaults are the right way; None: the value in the run's dump."""
    words: str = "right"  # what the doctor prints
    rate: float | None = None
    clip: str = "norm"  # or "none", "twice"; "always": also gradients below the limit
    decay: str = "matrices"  # or "all", "none", "coupled" (L2), "without rate"
    eps: float | None = None
    eps_inside: bool = False  # sqrt(square + eps)
    corrected: tuple = (True, True)  # mean and square, for their start at 0
    count_offset: int = 0  # added to the step's number in the corrections
    count_advances: bool = True  # False: the corrections stay at the first step's
    betas: tuple | None = None
    keeps_moments: bool = True  # False: they start at 0 in each step
    grad_factor: float = 1.0  # what gradients are multiplied by before the step
    norm_factor: float = 1.0  # what the norm is multiplied by before clipping
    rounded: torch.dtype | None = None  # clipped gradients are rounded to it
    moves: bool = True  # False: the weights stay what they are


def ways(rates, optimizer, factors, scale):
    """The wrong Ways. rates: [(words, rate)] that may have been taken for the step's rate;
    optimizer: a dump's settings; factors: [(words, factor)] by which gradients may have been
    multiplied before the step; scale: the loss scale."""
    beta1 = optimizer["beta1"]
    beta2 = optimizer["beta2"]
    found = [
        Way("gradients are not clipped", clip="none"),
        Way("gradients are multiplied by the clipping factor twice", clip="twice"),
        Way("gradients below the limit are scaled up to it", clip="always"),
        Way("biases and norms decay, too", decay="all"),
        Way("nothing decays", decay="none"),
        Way("the decay is added to the gradient (L2, as in Adam, not AdamW)", decay="coupled"),
        Way("the decay is not multiplied by the rate", decay="without rate"),
        Way("epsilon is inside of the root", eps_inside=True),
        Way("the bias of the moments is not corrected", corrected=(False, False)),
        Way("the bias of the first moment is not corrected", corrected=(False, True)),
        Way("the bias of the second moment is not corrected", corrected=(True, False)),
        Way("the corrections count one step too many", count_offset=1),
        Way("the corrections stay at the first step's", count_advances=False),
        Way("beta1 and beta2 are swapped", betas=(beta2, beta1)),
        Way("moments are not kept from step to step", keeps_moments=False),
        Way("the weights are not updated", moves=False)]
    found += [Way(f"clipped gradients are rounded to {str(dtype).removeprefix('torch.')}",
                  rounded=dtype) for dtype in (torch.bfloat16, torch.float16)]
    found += [Way(f"epsilon is {eps:g}", eps=eps)
              for eps in (1e-5, 1e-6, 1e-7, 1e-10, 1e-12, 0.0) if eps != optimizer["eps"]]
    found += [Way(f"beta2 is {value:g}", betas=(beta1, value))
              for value in (0.9, 0.95, 0.98, 0.99, 0.999, 0.9999) if value != beta2]
    found += [Way(f"beta1 is {value:g}", betas=(value, beta2))
              for value in (0.0, 0.5, 0.8, 0.9, 0.95, 0.99) if value != beta1]
    found += [Way(f"the rate is {rate:.6g}: {words}", rate=rate) for words, rate in rates]
    found += [Way(f"gradients are {words} before the step", grad_factor=factor)
              for words, factor in factors]
    if scale != 1:
        found += [Way("the loss scale is not taken out of the gradients", grad_factor=scale),
                  Way("gradients are clipped by a norm with the loss scale in it",
                      norm_factor=scale)]
    return found


class Replay:
    """Takes steps of AdamW with a run's gradients and norms."""

    def __init__(self, optimizer, dtype=torch.double):
        """optimizer: a dump's settings. dtype: of the arithmetic."""
        self.optimizer = optimizer
        self.dtype = dtype

    def step(self, weights, grads, norms, rate, way, decay):
        """A tensor, or a part of it, after the last of the steps. weights: [tensor], before each
        step from the first one; grads: [tensor] and norms: [float], of each step; rate: of the last
        step; decay: see decay_of."""
        beta1, beta2 = way.betas or (self.optimizer["beta1"], self.optimizer["beta2"])
        eps = self.optimizer["eps"] if way.eps is None else way.eps
        rate = rate if way.rate is None else way.rate
        weight = weights[-1].to(self.dtype)
        mean = torch.zeros_like(weight)
        square = torch.zeros_like(weight)
        for before, grad, norm in zip(weights, grads, norms, strict=True):
            if not way.keeps_moments:
                mean = torch.zeros_like(weight)
                square = torch.zeros_like(weight)
            grad = grad.to(self.dtype) * (way.grad_factor * self.clipping(norm, way))
            if way.rounded:
                grad = grad.to(way.rounded).to(self.dtype)
            if way.decay == "coupled":
                grad = grad + decay * before.to(self.dtype)
            mean = mean.lerp(grad, 1 - beta1)  # beta1 mean + (1 - beta1) grad
            square = square.lerp(grad.square(), 1 - beta2)
        n = (len(weights) if way.count_advances else 1) + way.count_offset
        if way.corrected[0]:
            mean = mean / (1 - beta1**n)
        if way.corrected[1]:
            square = square / (1 - beta2**n)
        root = (square + eps).sqrt() if way.eps_inside else square.sqrt() + eps
        change = mean / root
        if not way.moves:
            return weight
        if way.decay == "coupled":
            return weight - rate * change
        if way.decay == "without rate":
            return weight - rate * change - decay * weight
        return weight - rate * (change + decay * weight)

    def decay_of(self, is_matrix, way):
        """The weight decay of a tensor. Right: of matrices only."""
        if way.decay == "none":
            return 0.0
        if way.decay == "all" or is_matrix:
            return self.optimizer["weight_decay"]
        return 0.0

    def clipping(self, norm, way):
        """The factor by which gradients are clipped. Right: min(1, limit / (norm + 1e-6)), like
        torch's clip_grad_norm_."""
        limit = self.optimizer["grad_clip"]
        if not limit or way.clip == "none":
            return 1.0
        coefficient = limit / (norm * way.norm_factor + 1e-6)
        if way.clip != "always":
            coefficient = min(1.0, coefficient)
        return coefficient**2 if way.clip == "twice" else coefficient
