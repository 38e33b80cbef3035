"""AdamW's step, computed again from a run's own weights, gradients and norms, with known bugs.

Everything here is arithmetic on whole tensors: no rank takes part. So a bug before (a gradient that
is wrong) does not make the new weights wrong here.
"""

from dataclasses import dataclass

import torch

from optimizer import decays
from shard import Shard


@dataclass
class Way:
    """How a step is taken. The defaults are the right way; None: as the run's dump says."""
    words: str = "right"
    rate: float | None = None
    clip: str = "norm"  # "norm"; "none"; "twice"; "always": also gradients below the limit
    decay: str = "matrices"  # "matrices", "all", "none", "coupled" (L2), "without rate"
    eps: float | None = None
    eps_inside: bool = False  # sqrt(square + eps)
    corrected: tuple = (True, True)  # is the bias of mean and square corrected?
    late_count: int = 0  # added to the step's number in the corrections
    counts: bool = True  # False: the corrections stay at the first step's
    betas: tuple | None = None
    keeps_moments: bool = True
    grad_factor: float = 1.0  # what gradients are multiplied by before the step
    norm_factor: float = 1.0  # what the norm is multiplied by before clipping
    moves: bool = True  # False: the weights stay as they are


def ways(rates, optimizer, sizes, scale):
    """Known mistakes. rates: (of this step, others that it may have been taken for)."""
    beta1, beta2 = optimizer["beta1"], optimizer["beta2"]
    found = [
        Way("gradients are not clipped", clip="none"),
        Way("gradients are clipped twice", clip="twice"),
        Way("gradients below the limit are scaled up to it", clip="always"),
        Way("biases and norms decay, too", decay="all"),
        Way("nothing decays", decay="none"),
        Way("the decay is added to the gradient (L2, as in Adam, not AdamW)", decay="coupled"),
        Way("the decay is not multiplied by the rate", decay="without rate"),
        Way("epsilon is inside of the root", eps_inside=True),
        Way("the bias of the moments is not corrected", corrected=(False, False)),
        Way("the bias of the first moment is not corrected", corrected=(False, True)),
        Way("the bias of the second moment is not corrected", corrected=(True, False)),
        Way("the corrections count one step too many", late_count=1),
        Way("the corrections stay at the first step's", counts=False),
        Way("beta1 and beta2 are swapped", betas=(beta2, beta1)),
        Way("moments are not kept from step to step", keeps_moments=False),
        Way("the weights are not updated", moves=False)]
    found += [Way(f"epsilon is {eps:g}", eps=eps)
              for eps in (1e-5, 1e-6, 1e-7, 1e-10, 1e-12, 0.0) if eps != optimizer["eps"]]
    found += [Way(f"beta2 is {value:g}", betas=(beta1, value))
              for value in (0.9, 0.95, 0.98, 0.99, 0.999, 0.9999) if value != beta2]
    found += [Way(f"beta1 is {value:g}", betas=(value, beta2))
              for value in (0.0, 0.5, 0.8, 0.9, 0.95, 0.99) if value != beta1]
    found += [Way(f"the rate is {rate:.6g}: {words}", rate=rate) for words, rate in rates]
    for words, factor in sizes:
        found.append(Way(f"gradients are {words} before the step", grad_factor=factor))
    if scale != 1:
        found += [Way("the loss scale is not taken out of the gradients", grad_factor=scale),
                  Way("gradients are clipped by a norm with the loss scale in it",
                      norm_factor=scale)]
    return found


class Replay:
    """AdamW on whole tensors, with the gradients and norms of a run."""

    def __init__(self, optimizer, dtype=torch.double):
        self.optimizer = optimizer
        self.dtype = dtype

    def step(self, number, name, weights, grads, norms, rate, way):
        """The weight after step `number`, 1 or 2. weights, grads, norms: before and of the steps 1
        to `number`; rate: of this step."""
        beta1, beta2 = way.betas or (self.optimizer["beta1"], self.optimizer["beta2"])
        eps = self.optimizer["eps"] if way.eps is None else way.eps
        weight = weights[-1].to(self.dtype)
        decay = self.optimizer["weight_decay"]
        tag = Shard(name, weight.shape)
        if way.decay == "none" or (way.decay != "all" and not decays(tag)):
            decay = 0.0
        rate = rate if way.rate is None else way.rate
        mean = torch.zeros_like(weight)
        square = torch.zeros_like(weight)
        for before, grad, norm in zip(weights, grads, norms, strict=True):
            if not way.keeps_moments:
                mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
            grad = self.clipped(grad.to(self.dtype) * way.grad_factor, norm, way)
            if way.decay == "coupled":
                grad = grad + decay * before.to(self.dtype)
            mean = beta1 * mean + (1 - beta1) * grad
            square = beta2 * square + (1 - beta2) * grad.square()
        count = (number if way.counts else 1) + way.late_count
        mean = mean / (1 - beta1**count) if way.corrected[0] else mean
        square = square / (1 - beta2**count) if way.corrected[1] else square
        root = (square + eps).sqrt() if way.eps_inside else square.sqrt() + eps
        change = mean / root
        if not way.moves:
            return weight
        if way.decay == "coupled":
            return weight - rate * change
        if way.decay == "without rate":
            return weight - rate * change - decay * weight
        return weight - rate * (change + decay * weight)

    def clipped(self, grad, norm, way):
        limit = self.optimizer["grad_clip"]
        if not limit or way.clip == "none":
            return grad
        coefficient = limit / (norm * way.norm_factor + 1e-6)
        if way.clip != "always":
            coefficient = min(1.0, coefficient)
        return grad * (coefficient**2 if way.clip == "twice" else coefficient)
