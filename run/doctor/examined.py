"""What is right in one step of MINE, and how far rounding errors may be from it.

    Computed         a model that step.py can compute: one process in float64, from MINE's weights
                     and tokens; the noise is measured, in another run of MINE's dtype
    LikeReference    a model of another form: REFERENCE's loss and gradients; the noise follows from
                     the dtype

A number of MINE is equal to the right one if it is off by at most NOISE times the noise.
"""

import math
from functools import cached_property

import torch

from model import ABSENT
from run.doctor.finding import NOISE, norm_of, off
from run.doctor.step import SimulatedStep, Terms, sampled

FLOOR = 8  # least tolerance of a measured number, in roundings of its dtype
UNMEASURED = 8  # noise of a number whose noise is not measured, in roundings of its dtype


def eps_of(dump):
    """A rounding, relative to a number, of the dtype in which a dump's forward computes."""
    return torch.finfo(getattr(torch, dump.dtype)).eps


def distance_of(given, right):
    """How far all tensors together are apart, relative to their norm."""
    if any(given[name].shape != right[name].shape for name in given):
        return math.inf
    errors = [off(given[name], right[name]) for name in given]
    return math.hypot(*errors) / math.hypot(*(norm_of(right[name]) for name in given))


class Examined:
    """One step of MINE. Subclasses say what is right, and give `noise`, which rounding alone makes:
    (error of the loss, {name: norm of the gradient's error})."""

    def __init__(self, mine, number, dump, terms, loss, gradients):
        """dump: the one whose dtypes make the noise. terms: the right step's Terms (step.py). loss:
        the right one. gradients: {name: the right full gradient}."""
        self.mine = mine
        self.numbers = mine.steps[number - 1]  # MINE's loss, norm, lr, scale
        self.dtype = getattr(torch, dump.dtype)
        self.grad_dtype = getattr(torch, dump.grad_dtype)
        self.terms = terms
        self.loss = loss
        self.gradients = gradients

    def tolerance(self, name, size=1.0):
        """How far MINE's gradient may be off. size: the largest weight of a term in it."""
        return NOISE * self.noise[1][name] * size

    def loss_tolerance(self, loss):
        """How far MINE's loss may be off, if it should be this number."""
        wide = torch.promote_types(self.dtype, torch.float)  # a loss is a sum in 32 bits at least
        floor = FLOOR * torch.finfo(wide).eps * abs(loss)
        size = max(1.0, abs(loss / self.loss))
        return max(NOISE * self.noise[0] * size, floor)

    def loss_is(self, mine, loss):
        """Is MINE's loss this number?"""
        return abs(mine - loss) <= self.loss_tolerance(loss)


class Computed(Examined):
    """One step of MINE, computed again in one process."""

    def __init__(self, mine, number):
        self.step = SimulatedStep(mine.model, mine.layout, mine.balance,
                                  dict(mine.weights(number - 1)), mine.ids(number),
                                  mine.targets(number), mine.loss == "mean")
        terms = self.step.run()
        gradients = {name: full / terms.divisor for name, full in terms.full.items()}
        super().__init__(mine, number, mine, terms, terms.loss(), gradients)

    @cached_property
    def noise(self):
        """How far one process in MINE's dtype is from float64."""
        # Rounding may make a token choose other experts: try several roundings of the weights
        n_runs = 3 if self.mine.model.n_experts and self.dtype != torch.double else 1
        # A run divides its loss by the tokens, which step.py does not: float16 has no room for the
        # scaled gradients of a sum. A power of two near the divisor changes no digits
        scale = self.numbers["scale"] / 2.0 ** round(math.log2(self.terms.divisor))
        loss_error = 0.0
        errors = dict.fromkeys(self.gradients, 0.0)
        for seed in range(n_runs):
            terms = self.rounded(seed).run(dtype=self.dtype, grad_dtype=self.grad_dtype,
                                           scale=scale)
            error = (terms.losses - self.terms.losses).abs().sum().item()
            loss_error = max(loss_error, error)
            for name, full in terms.full.items():
                error = off(full, self.terms.full[name]) / self.terms.divisor
                if math.isfinite(error):  # else one process overflows: only the floor is left
                    errors[name] = max(errors[name], error)
        sizes = {name: norm_of(grad) for name, grad in self.gradients.items()}
        relative = sorted(errors[name] / size for name, size in sizes.items() if size)
        # The error of a tensor may be small by chance: take the median of all tensors at least
        median = relative[len(relative) // 2]
        floor = max(median, FLOOR * torch.finfo(self.dtype).eps / NOISE)
        return (loss_error / self.terms.divisor,
                {name: max(error, floor * sizes[name]) for name, error in errors.items()})

    def rounded(self, seed):
        """The step from weights that are off by about a rounding; for seed 0 the step itself."""
        if seed == 0:
            return self.step
        generator = torch.Generator().manual_seed(seed)
        eps = torch.finfo(self.dtype).eps
        weights = {}
        for name, weight in self.step.weights.items():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.double)
            weights[name] = weight * (1 + eps * noise)
        return SimulatedStep(self.mine.model, self.mine.layout, self.mine.balance, weights,
                             self.step.ids, self.step.targets, self.step.is_mean)


class LikeReference(Examined):
    """One step of MINE, a model of another form. Nothing is computed, so the terms of a gradient
    are not known: it is one term, D = m = C = R = 1."""

    def __init__(self, reference, mine, number):
        loss = reference.steps[number - 1]["loss"]
        gradients = dict(reference.gradients(number))
        targets = reference.targets(number)
        terms = Terms(
            losses=torch.full((1, 1, 1, 1), loss, dtype=torch.double),
            gradients={name: sampled(grad).view(1, 1, 1, 1, -1)
                       for name, grad in gradients.items()},
            is_summed=dict.fromkeys(gradients, False), full=gradients,
            tokens=(targets != ABSENT).sum().view(1, 1), positions=targets.numel(), divisor=1,
            tied=False)
        coarser = max((reference, mine), key=eps_of)
        super().__init__(mine, number, coarser, terms, loss, gradients)
        # between MINE's weights before the step and REFERENCE's, relative to their norm
        self.distance = distance_of(mine.weights(number - 1), reference.weights(number - 1))

    @cached_property
    def noise(self):
        """UNMEASURED roundings plus the distance of the weights: rounding errors of step 1 move the
        weights, which move loss and gradients of step 2 about as far, relative to their size."""
        relative = UNMEASURED * torch.finfo(self.dtype).eps + self.distance
        sizes = {name: norm_of(grad) for name, grad in self.gradients.items()}
        # Where a gradient is 0 in exact arithmetic (a key's bias), errors are as large as those in
        # other gradients
        least = 1e-2 * max(sizes.values())
        return (relative * abs(self.loss),
                {name: relative * max(size, least) for name, size in sizes.items()})
