"""What is right in one step of MINE, and how far rounding may be from it."""

import math
from functools import cached_property

import torch

from model import ABSENT
from run.doctor.finding import NOISE, norm_of, off
from run.doctor.step import SimulatedStep, Terms, sampled

# Floor of the tolerance, in roundings of the dtype, relative to a tensor's norm
FLOOR = 8


def eps_of(dump):
    return torch.finfo(getattr(torch, dump.dtype)).eps


def distance_of(given, wanted):
    """How far MINE's tensors are from REFERENCE's, relative to their norm."""
    if any(given[name].shape != wanted[name].shape for name in given):
        return math.inf
    errors = [off(given[name], wanted[name]) for name in given]
    return math.hypot(*errors) / math.hypot(*(norm_of(wanted[name]) for name in given))


class Examined:
    """One step of MINE: what one process computes from MINE's weights and tokens, and the noise."""

    def __init__(self, mine, number):
        self.mine = mine
        self.numbers = mine.steps[number - 1]
        self.step = SimulatedStep(mine.model, mine.layout, mine.balance,
                                  dict(mine.weights(number - 1)), mine.ids(number),
                                  mine.targets(number), mine.loss == "mean")
        self.terms = self.step.run()
        self.dtype = getattr(torch, mine.dtype)
        self.grad_dtype = getattr(torch, mine.grad_dtype)
        self.loss = self.terms.loss()
        # {name: full gradient}
        self.gradients = {name: full / self.terms.divisor for name, full in self.terms.full.items()}

    @cached_property
    def noise(self):
        """(loss, {name: norm}): how far one process in MINE's dtype is from float64."""
        # In 16 bits a token may choose other experts: try more than one rounding of the weights
        runs = 3 if self.mine.model.n_experts and self.dtype != torch.double else 1
        losses = []
        errors = dict.fromkeys(self.gradients, 0.0)
        for seed in range(runs):
            terms = self.rounded(seed).run(dtype=self.dtype, grad_dtype=self.grad_dtype,
                                           scale=self.numbers["scale"])
            losses.append((terms.losses - self.terms.losses).abs().sum().item())
            for name, full in terms.full.items():
                error = off(full, self.terms.full[name]) / self.terms.divisor
                errors[name] = max(errors[name], error)
        sizes = {name: norm_of(grad) for name, grad in self.gradients.items()}
        relative = sorted(errors[name] / size for name, size in sizes.items() if size)
        # A tensor's noise may be small by chance: take the middle one of all tensors at least
        floor = max(relative[len(relative) // 2], FLOOR * torch.finfo(self.dtype).eps / NOISE)
        floors = {name: floor * size for name, size in sizes.items()}
        return (max(losses) / self.terms.divisor,
                {name: max(error, floors[name]) for name, error in errors.items()})

    def rounded(self, seed):
        """The step with weights that differ by a rounding. Seed 0: the step itself."""
        if seed == 0:
            return self.step
        generator = torch.Generator().manual_seed(seed)
        eps = torch.finfo(self.dtype).eps
        weights = {name: weight * (1 + eps * torch.randn(weight.shape, generator=generator,
                                                         dtype=torch.double))
                   for name, weight in self.step.weights.items()}
        return SimulatedStep(self.mine.model, self.mine.layout, self.mine.balance, weights,
                             self.step.ids, self.step.targets, self.step.is_mean)

    def tolerance(self, name, size=1.0):
        """How far MINE's gradient may be off. size: the largest weight of a term in it."""
        return NOISE * self.noise[1][name] * size

    def loss_tolerance(self, loss):
        """How far MINE's loss may be off, if it is this number."""
        wide = torch.promote_types(self.dtype, torch.float)  # a loss is a sum in 32 bits at least
        floor = FLOOR * torch.finfo(wide).eps * abs(loss)
        size = max(1.0, abs(loss / self.loss))
        return max(NOISE * self.noise[0] * size, floor)

    def loss_is(self, mine, loss):
        """Is MINE's loss this number?"""
        return abs(mine - loss) <= self.loss_tolerance(loss)


class LikeReference(Examined):
    """One step of MINE, a model of another form: REFERENCE's loss and gradients are the right ones.
    Nothing is computed, so a gradient is one term, and the noise is a multiple of the dtype's
    rounding."""

    def __init__(self, reference, mine, number):
        self.mine = mine
        self.numbers = mine.steps[number - 1]
        self.loss = reference.steps[number - 1]["loss"]
        self.gradients = dict(reference.gradients(number))
        coarsest = max((reference, mine), key=eps_of)
        self.dtype = getattr(torch, coarsest.dtype)
        self.grad_dtype = getattr(torch, coarsest.grad_dtype)
        self.distance = distance_of(mine.weights(number - 1), reference.weights(number - 1))
        tokens = (reference.targets(number) != ABSENT).sum().view(1, 1)
        self.terms = Terms(
            losses=torch.full((1, 1, 1, 1), self.loss, dtype=torch.double),
            gradients={name: sampled(grad).view(1, 1, 1, 1, -1)
                       for name, grad in self.gradients.items()},
            is_summed=dict.fromkeys(self.gradients, False), full=self.gradients, tokens=tokens,
            positions=reference.targets(number).numel(), divisor=1, tied=False)

    @cached_property
    def noise(self):
        """(loss, {name: norm}). Weights that are apart, because rounding errors of a first step
        were, move loss and gradients about as far."""
        relative = FLOOR * torch.finfo(self.dtype).eps + self.distance
        sizes = {name: norm_of(grad) for name, grad in self.gradients.items()}
        # A gradient that is zero in exact arithmetic (of a key's bias) is rounding errors of others
        least = 1e-2 * max(sizes.values())
        return (relative * abs(self.loss),
                {name: relative * max(size, least) for name, size in sizes.items()})
