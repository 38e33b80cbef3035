"""What is right in one step of MINE, and how far rounding errors may be from it.

    InOwnDtype       a model that step.py can compute: one process in MINE's dtype, from MINE's
                     weights and tokens; the tolerance is so small that the noise need not be known
    Computed         the same in float64; the noise is measured: how far one process in MINE's dtype
                     is off
    LikeReference    a model of another form: REFERENCE's loss and gradients; the noise follows from
                     the dtype

A number of MINE is equal to the right one if it is off by at most NOISE times the noise, or by at
most `floor` roundings.

A gradient is known as its terms (step.py), a tensor (D, m, N, R, n): n sampled elements for each
data rank, microbatch and context rank, and for each of R tensor ranks (R is T, or 1 for a tensor
that is split over them).
"""

import math
from functools import cached_property

import torch

from extras.doctor.finding import NOISE, norm_of, off
from extras.doctor.step import SimulatedStep, Terms, sampled
from model import ABSENT

# Least tolerance, relative to the right number, in roundings of the dtype. In float64 it is larger:
# with one thread or several, torch adds in another order, and a bug is never so small
FLOOR = {torch.float64: 64, torch.float32: 8, torch.bfloat16: 8, torch.float16: 8}
UNMEASURED = 8  # noise where noise is not measured, in roundings of the dtype


def eps_of(dump):
    """One rounding, relative to the number, in the dtype in which a dump's forward computes."""
    return torch.finfo(getattr(torch, dump.dtype)).eps


def distance_of(given, right):
    """The norm of the differences of all tensors together, relative to that of the right ones;
    infinite if a shape differs."""
    if any(given[name].shape != right[name].shape for name in given):
        return math.inf
    error = math.hypot(*(off(given[name], right[name]) for name in given))
    size = math.hypot(*(norm_of(right[name]) for name in given))
    if size == 0:
        return math.inf if error else 0.0
    return error / size


class Examined:
    """One step of MINE. Subclasses say what is right, and give `noise`, the errors that rounding
    alone makes (InOwnDtype: less): (error of the loss, {name: norm of the gradient's error})."""

    def __init__(self, mine, number, dtypes_of, terms, loss, gradients):
        """dtypes_of: the dump whose dtypes make the noise. terms: Terms of the right step
        (step.py). loss: the right one. gradients: {name: the right full gradient}."""
        self.mine = mine
        self.step_numbers = mine.steps[number - 1]  # MINE's loss, norm, lr, scale
        self.dtype = getattr(torch, dtypes_of.dtype)
        self.grad_dtype = getattr(torch, dtypes_of.grad_dtype)
        self.floor = FLOOR[self.dtype]  # (InOwnDtype: less)
        self.terms = terms
        self.loss = loss
        self.gradients = gradients

    def tolerance(self, name, size=1.0):
        """How far MINE's gradient may be off. size: a factor on the tolerance, for a wrong
        gradient whose rounding errors are larger than the right one's: 3 for a sum that counts a
        term 3 times."""
        return NOISE * self.noise[1][name] * size

    def is_near(self, name, given, predicted, size=1.0):
        """Is MINE's gradient the predicted one, but for rounding? All elements, or the same sample
        of both."""
        error = off(given, predicted)
        return math.isfinite(error) and error <= self.tolerance(name, size)

    def loss_floor(self, loss):
        """The least tolerance of a loss."""
        wide = torch.promote_types(self.dtype, torch.float)  # a loss is a sum in 32 bits at least
        return self.floor * torch.finfo(wide).eps * abs(loss)

    def loss_tolerance(self, loss):
        """How far MINE's loss may be off from this number, and still be equal to it."""
        size = max(1.0, abs(loss / self.loss)) if self.loss else 1.0
        return max(NOISE * self.noise[0] * size, self.loss_floor(loss))

    # To measure the noise takes a run of the step. Where a number is off by less than the least
    # tolerance, the noise need not be known

    def loss_is(self, mine, loss):
        """Is MINE's loss this number?"""
        error = abs(mine - loss)
        if not math.isfinite(error):
            return False
        return error <= self.loss_floor(loss) or error <= self.loss_tolerance(loss)

    def gradient_is_right(self, name, given):
        """Is MINE's full gradient the right one?"""
        right = self.gradients[name]
        error = off(given, right)
        if not math.isfinite(error):
            return False
        floor = self.floor * torch.finfo(self.dtype).eps * norm_of(right)
        return error <= floor or error <= self.tolerance(name)


def step_of(mine, number):
    """The SimulatedStep of MINE's step `number`."""
    return SimulatedStep(mine.model, mine.layout, mine.balance, dict(mine.weights(number - 1)),
                         mine.ids(number), mine.targets(number), mine.loss == "mean")


def run_in_own_dtype(step, mine, number):
    """The Terms of a step, computed and summed in the dtypes of MINE's step `number`."""
    # A run divides its loss by the tokens, which step.py does not: float16 has no room for the
    # scaled gradients of a sum. A power of two near the divisor changes no digits
    scale = mine.steps[number - 1]["scale"] / 2.0 ** round(math.log2(step.divisor()))
    return step.run(dtype=getattr(torch, mine.dtype), grad_dtype=getattr(torch, mine.grad_dtype),
                    scale=scale)


class InOwnDtype(Examined):
    """One step of MINE, computed again by one process in MINE's dtype.

    Its tolerance is `floor` roundings, and what is within it is within Computed's, too. For let d
    be MINE's distance from this process, e this process's from float64, which is a part of
    Computed's noise, and r Computed's floor. MINE is at most d + e from float64, and its tolerance
    there is r or NOISE e, the larger one. Here d <= (1 - 1/NOISE) r, so

        for e <= r / NOISE    d + e <= r
        for e >  r / NOISE    d <= (NOISE - 1) e, so d + e <= NOISE e

    (Nearly: here r is relative to this process's numbers, in Computed to those of float64. They
    differ by about a rounding of r.)
    """

    def __init__(self, mine, number, step):
        """step: the SimulatedStep of MINE's step `number`."""
        terms = run_in_own_dtype(step, mine, number)
        super().__init__(mine, number, mine, terms, terms.loss(), terms.full)
        self.floor = self.floor * (1 - 1 / NOISE)

    @cached_property
    def noise(self):
        """As much as makes the tolerance `floor` roundings."""
        relative = self.floor * torch.finfo(self.dtype).eps / NOISE
        sizes = {name: norm_of(grad) for name, grad in self.gradients.items()}
        return 0.0, {name: relative * size if math.isfinite(size) else 0.0
                     for name, size in sizes.items()}


class Computed(Examined):
    """One step of MINE, computed again by one process in float64."""

    def __init__(self, mine, number, step, terms_in_own_dtype=None):
        """step: the SimulatedStep of MINE's step `number`. terms_in_own_dtype: its Terms in MINE's
        dtype; None: they are computed when they are asked for."""
        self.step = step
        self.number = number
        self.terms_in_own_dtype = terms_in_own_dtype
        # Is MINE's dtype float64? Then one run serves as both
        self.is_exact = mine.dtype == mine.grad_dtype == "float64"
        terms = terms_in_own_dtype if self.is_exact and terms_in_own_dtype else step.run()
        super().__init__(mine, number, mine, terms, terms.loss(), terms.full)

    @cached_property
    def noise(self):
        loss_error, errors = self.measured()
        return loss_error, self.floored(errors)

    def measured(self):
        """How far one process in MINE's dtype is from float64: (error of the loss, {name: norm of
        the gradient's error}). For the loss the errors of all terms are added up without their
        signs, so that none cancels another."""
        seeds = [0]
        if self.is_exact:
            # Nothing is more exact than this process itself. From other weights, off by a rounding
            # each, another process makes other rounding errors, which are as large as these
            seeds = [1]
        elif self.mine.model.n_experts:
            # Rounding may make a token choose other experts: try several roundings of the weights
            seeds = [0, 1, 2]
        loss_error = 0.0
        errors = dict.fromkeys(self.gradients, 0.0)
        for seed in seeds:
            terms = self.terms_in_own_dtype
            if seed > 0 or terms is None:
                terms = run_in_own_dtype(self.perturbed(seed), self.mine, self.number)
            differences = (terms.losses - self.terms.losses).mean(-1)  # (D, m, N): mean of T copies
            sum_of_errors = differences.abs().sum().item()
            if math.isfinite(sum_of_errors):  # else one process overflows: only the floor is left
                loss_error = max(loss_error, sum_of_errors)
            for name, full in terms.full.items():
                error = off(full, self.terms.full[name])
                if math.isfinite(error):
                    errors[name] = max(errors[name], error)
        return loss_error / self.terms.divisor, errors

    def floored(self, errors):
        """Errors of gradients, with a least one for each tensor."""
        sizes = {name: norm_of(grad) for name, grad in self.gradients.items()}
        relative = sorted(errors[name] / size for name, size in sizes.items() if size)
        # The error of a tensor may be small by chance: take the median of all tensors at least
        median = relative[len(relative) // 2]
        # The tolerance, NOISE times the noise, is to be `floor` roundings at least
        least = max(median, self.floor * torch.finfo(self.dtype).eps / NOISE)
        return {name: max(error, least * sizes[name]) for name, error in errors.items()}

    def perturbed(self, seed):
        """The same step from weights that are off by about a rounding each; for seed 0 from the
        weights themselves."""
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
    are not known: each gradient is a single term, D = m = N = R = 1."""

    def __init__(self, reference, mine, number):
        loss = reference.steps[number - 1]["loss"]
        gradients = dict(reference.gradients(number))
        targets = reference.targets(number)
        terms = Terms(
            losses=torch.full((1, 1, 1, 1), loss, dtype=torch.double),
            gradients={name: sampled(grad).view(1, 1, 1, 1, -1)
                       for name, grad in gradients.items()},
            is_summed=dict.fromkeys(gradients, False), full=gradients,
            tokens=(targets != ABSENT).sum().view(1, 1), n_tokens=targets.numel(), divisor=1,
            tied=False)
        coarser = max((reference, mine), key=eps_of)
        super().__init__(mine, number, coarser, terms, loss, gradients)
        # Distance between MINE's and REFERENCE's weights before the step, relative to their norm
        self.distance = distance_of(mine.weights(number - 1), reference.weights(number - 1))

    @cached_property
    def noise(self):
        """UNMEASURED roundings plus the distance of the weights. Rounding errors of step 1 move the
        weights, and weights that are off by 1% move loss and gradients by about 1%."""
        relative = UNMEASURED * torch.finfo(self.dtype).eps + self.distance
        sizes = {name: norm_of(grad) for name, grad in self.gradients.items()}
        # A gradient that is 0 in exact arithmetic, such as that of a key's bias, has errors as
        # large as those of other gradients
        least = 1e-2 * max(sizes.values())
        return (relative * abs(self.loss),
                {name: relative * max(size, least) for name, size in sizes.items()})
