"""MINE's weights after each step, compared with AdamW's from MINE's own state.

The step is computed from MINE's numbers: the weights before the step (the 32-bit masters, if there
are some), the gradients, the norm and the rate of the dump. So wrong gradients make no wrong
weights. Moments are 0 before step 1. Step 2 is replayed from there, through step 1: a wrong step 1
ends the search, because the moments after it are unknown.

Where there are masters, the 16-bit weights after a step have to be the masters, rounded.

A known way of stepping wrongly (update.py) is named if it explains the steps that can be replayed
(a wrong rate: the step that differs) of all tensors, or of all wrong ones while the others are
right.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from extras.doctor.finding import (
    NOISE,
    Finding,
    first_difference,
    first_of,
    norm_of,
    off,
    unexamined,
)
from extras.doctor.norm import norms_of_parts, norms_of_shards
from extras.doctor.update import Replay, Way, ways
from optimizer import decays
from shard import Tag

RIGHT_WAY = Way()
# Elements of a tensor that one operation takes. torch shares longer operations among its threads,
# which here costs more time than it saves, and to allocate the temporaries of a large tensor would
# take longer than its arithmetic
PART = 1 << 15
TENSORS = 4  # at most so many tensors are compared side by side: each takes memory, in float64


class Steps:
    """MINE's two steps of the optimizer, tensor by tensor."""

    def __init__(self, reference, mine):
        self.reference = reference
        self.mine = mine
        self.has_masters = len(mine.masters(1)) > 0
        self.dtype = getattr(torch, mine.dtype)
        self.wide = torch.promote_types(self.dtype, torch.float)  # dtype of AdamW's arithmetic
        self.replay = Replay(mine.optimizer)
        self.rounded = Replay(mine.optimizer, self.wide)

    def held(self, number):
        """{name: tensor}: the weights or masters that the optimizer steps, before step 1 (number
        0), after step 1 or 2."""
        return self.mine.masters(number) if self.has_masters else self.mine.weights(number)

    def are_wide(self):
        """Have the weights enough digits to show a step? 16-bit ones have not, but under autocast
        the weights are of 32 bits, though the dump's dtype is that of forward."""
        if self.has_masters or self.dtype == self.wide:
            return True
        return any(not torch.equal(weight.to(self.dtype).double(), weight)
                   for weight in self.mine.weights(1).values())

    def missing(self, number):
        """The first file that MINE lacks for a replay of this step; None if all are there. A step
        needs the weights before it and after it, and its gradients; step 2 needs all of step 1,
        too."""
        kind = "masters" if self.has_masters else "weights"
        files = [f"{kind}-0"]
        for n in range(1, number + 1):
            files += [f"gradients-{n}", f"{kind}-{n}"]
        return self.mine.first_missing(*files)

    def before(self, number, name):
        """(weights, gradients) of a tensor that go into the steps up to this one."""
        weights = [self.held(n)[name] for n in range(number)]
        grads = [self.mine.gradients(n)[name] for n in range(1, number + 1)]
        return weights, grads

    def is_matrix(self, name, shape):
        """Does the right step decay this tensor? In a model of another form every tensor of two
        dims, like in the loops of docs/check-your-own-trainer.md: names of matrices are unknown."""
        return decays(Tag(name, shape)) if self.mine.model else len(shape) > 1

    def replay_of(self, replay, number, name, shape, way):
        """A function (weights, gradients) -> weights after the step, computed again. Its arguments
        are those of before(), whole or the same part of each."""
        steps = self.mine.steps[:number]
        norms = [step["norm"] for step in steps]
        decay = replay.decay_of(self.is_matrix(name, shape), way)
        return partial(replay.step, norms=norms, rate=steps[-1]["lr"], way=way, decay=decay)

    def after(self, number, name, way):
        """A tensor after a step of MINE, computed again."""
        weights, grads = self.before(number, name)
        replay = self.replay_of(self.replay, number, name, weights[0].shape, way)
        return replay(weights, grads)

    def fits(self, number, name, way):
        """Is MINE's tensor after a step that of this way? Compared part by part."""
        weights, grads = self.before(number, name)
        shape = weights[0].shape
        replay = self.replay_of(self.replay, number, name, shape, way)
        replay_rounded = self.replay_of(self.rounded, number, name, shape, way)
        parts = [tensor.flatten().split(PART)
                 for tensor in (self.held(number)[name], *weights, *grads)]
        error = 0.0
        size = 0.0
        for given, *inputs in zip(*parts, strict=True):
            predicted = replay(inputs[:number], inputs[number:])
            error = math.hypot(error, off(given, predicted))
            size = math.hypot(size, norm_of(predicted))
        if not math.isfinite(error):  # else a prediction of nan, whose noise is infinite, would fit
            return False
        if error <= NOISE * torch.finfo(self.wide).eps * size:
            return True
        # The step may round more than once: measure it
        noise = 0.0
        for _, *inputs in zip(*parts, strict=True):
            state = inputs[:number], inputs[number:]
            noise = math.hypot(noise, off(replay_rounded(*state), replay(*state)))
        return error <= NOISE * noise


# ---- causes ----


def known_ways(steps, number):
    """The wrong Ways that MINE's layout and rates allow."""
    mine = steps.mine
    sources = {}  # rate -> the steps that have it: MINE's other step, and both of REFERENCE
    for whose, dump in (("MINE's", mine), ("REFERENCE's", steps.reference)):
        for n in (1, 2):
            rate = dump.steps[n - 1]["lr"]
            if rate != mine.steps[number - 1]["lr"]:
                sources.setdefault(rate, []).append(f"that of {whose} step {n}")
    rates = [(" and ".join(words), rate) for rate, words in sources.items()]
    factors = []
    for axis in ("dp", "tp", "pp", "cp", "microbatches"):
        size = mine.layout[axis]
        if size > 1:
            factors += [(f"divided by {axis} = {size}", 1 / size),
                        (f"multiplied by {axis} = {size}", size)]
    return ways(rates, mine.optimizer, factors, mine.steps[0]["scale"])


def all_fit(steps, numbers, names, way):
    """Are MINE's tensors of these names, after these steps, those of this way?"""
    return all(steps.fits(number, name, way) for number in numbers for name in names)


def fitting_ways(steps, number, others, names, wrong):
    """Words of the Ways that fit all tensors in both steps, or all wrong tensors while the rest is
    right. number: the step that differs; others: [the other step], or [] if it cannot be replayed.
    names: those of all tensors; wrong: names of the tensors that differ in step `number`."""
    found = []
    rest = set(names) - wrong
    for way in known_ways(steps, number):
        # A wrong rate may be that of one step only, any other wrong way is that of both steps
        numbers = [number] if way.rate is not None else [number, *others]
        if not all_fit(steps, numbers, wrong, way):
            continue
        if all_fit(steps, numbers, rest, way):
            found.append(way.words)
        elif all_fit(steps, numbers, rest, RIGHT_WAY):
            found.append(f"{way.words}: {first_of(wrong)}")
    return found


def fitted_rate(steps, number, names):
    """[words] if one rate explains all weights of the step, else []. A weight moves in proportion
    to the rate."""
    moved = 0.0  # <MINE's change, predicted change>, over all tensors
    predicted = 0.0  # <predicted change, predicted change>
    for name in names:
        before = steps.held(number - 1)[name]
        step = steps.after(number, name, RIGHT_WAY) - before
        moved += ((steps.held(number)[name] - before) * step).sum().item()
        predicted += step.square().sum().item()
    if not predicted or not math.isfinite(moved):
        return []
    said = steps.mine.steps[number - 1]["lr"]
    rate = said * moved / predicted
    if rate <= 0 or not all(steps.fits(number, name, Way(rate=rate)) for name in names):
        return []
    return [f"the weights moved with a rate of {rate:.6g}, the dump says {said:.6g}"]


def keeps_old(steps, number, name):
    """Does each element that differs still have its value from before the step, though some of them
    have a gradient? (Without a gradient: a sparse optimizer leaves them what they are.)"""
    given = steps.held(number)[name]
    error = (given - steps.after(number, name, RIGHT_WAY)).abs()
    differs = ~(error <= 1e-3 * error.max())  # nan differs, too
    is_old = given == steps.held(number - 1)[name]
    has_gradient = steps.mine.gradients(number)[name] != 0
    return bool(is_old[differs].all() and has_gradient[differs].any())


def fitted_counts(steps, number, wrong):
    """[words] if each wrong tensor was corrected by a later step's count, and not all by the same:
    the count advances for each tensor or bucket, not for each step."""
    counts = set()
    for name in wrong:
        later = (offset for offset in range(1, len(steps.mine.gradients(number)) * number)
                 if steps.fits(number, name, Way(count_offset=offset)))
        counts.add(number + next(later, -number))
    if len(counts) == 1 or 0 in counts:
        return []
    return [f"the moments' corrections count up to step {max(counts)}, tensor by tensor, in step "
            f"{number}: the count advances for each tensor or bucket"]


def clipped_by_parts(steps, number, wrong):
    """[words] if each wrong tensor was clipped by the norm of a part of all gradients, which one
    rank, or the ranks of one pipeline stage, hold."""
    mine = steps.mine
    norm = mine.steps[number - 1]["norm"]
    if number > 1 or not mine.model or not norm > 0:
        return []
    given = dict(mine.gradients(number))
    parts = norms_of_shards(mine, given)
    if max(mine.layout["pp"], mine.layout["tp"]) > 1:
        parts |= norms_of_parts(mine, given)
    ways_of_parts = [Way(norm_factor=part / norm) for part in parts.values()]
    if all(any(steps.fits(number, name, way) for way in ways_of_parts) for name in wrong):
        return [f"{first_of(wrong)}: clipped by the norm of the gradients that one rank, or one "
                "pipeline stage, holds"]
    return []


def rounded_masters(steps, number, names):
    """[words] if all masters have only the digits of the 16-bit weights, and are off by a few
    roundings of the weights and of their change (whose moments may have 16 bits, too)."""
    eps = torch.finfo(steps.dtype).eps
    for name in names:
        master = steps.held(number)[name]
        right = steps.after(number, name, RIGHT_WAY)
        change = (right - steps.held(number - 1)[name]).abs()
        is_near = (master - right).abs() <= eps * (right.abs() + 4 * change)
        if not (torch.equal(master.to(steps.dtype).double(), master) and is_near.all()):
            return []
    return [f"the weights are stepped in {steps.mine.dtype}: masters of 32 bits are missing, or "
            "are rounded in each step"]


def causes_of_updates(steps, number, others, names, wrong):
    """Words of the causes of wrong weights after step `number`; see fitting_ways."""
    found = (fitting_ways(steps, number, others, names, wrong)
             or fitted_rate(steps, number, names)
             or fitted_counts(steps, number, wrong)
             or clipped_by_parts(steps, number, wrong)
             or (rounded_masters(steps, number, names) if steps.has_masters else []))
    if found:
        return found
    n_ranks = math.prod(steps.mine.layout[axis] for axis in ("dp", "pp", "cp", "tp"))
    if n_ranks > 1 and all(keeps_old(steps, number, name) for name in wrong):
        return [f"a part of {first_of(wrong)} keeps its old values: new weights were not sent to "
                "the ranks that need them, or were not waited for"]
    return []


# ---- 16-bit weights ----


def differs_from_master(weight, master, dtype):
    """(shape of a weight) bool: where is it further from its master than a rounding to dtype?"""
    limits = torch.finfo(dtype)
    roundings = limits.eps * master.abs().clamp(min=limits.smallest_normal)
    return ~((weight - master).abs() <= roundings)  # nan differs, too


def check_copies_of_masters(steps, number):
    """[a Finding], if 16-bit weights after a step are not the masters, rounded; else []."""
    weights = steps.mine.weights(number)
    masters = steps.mine.masters(number)
    before = steps.mine.weights(number - 1)
    wrong = set()
    keep_old = True  # have all elements that differ still the value before the step?
    for name in weights:
        differs = differs_from_master(weights[name], masters[name], steps.dtype)
        if differs.any():
            wrong.add(name)
            keep_old = keep_old and torch.equal(weights[name][differs], before[name][differs])
    if not wrong:
        return []
    causes = [f"{first_of(wrong)}: {steps.mine.dtype} weights keep their old values: new ones were "
              "not copied from the masters, or not sent to the ranks that need them"]
    return [Finding(f"step {number} weights", False, first_difference(weights, masters, wrong),
                    causes if keep_old else [])]


# ---- the stage ----


def are_finite(mine, number):
    """Are all weights after a step finite? (True if they are not there.)"""
    return all(weight.isfinite().all() for weight in mine.weights(number).values())


def wrong_weights(steps, number, names):
    """Names of the tensors that differ from the right ones after a step. Up to TENSORS threads, no
    more than torch uses, take the tensors in turn."""
    with ThreadPoolExecutor(min(TENSORS, torch.get_num_threads())) as threads:
        fits = threads.map(lambda name: steps.fits(number, name, RIGHT_WAY), names)
        return {name for name, is_right in zip(names, fits, strict=True) if not is_right}


def check_updates(reference, mine):
    """Yields Findings on the weights after each step, up to the first that differs."""
    if mine.optimizer["name"] != "adamw":
        why = f"{mine.optimizer['name']} is not replayed"
        yield unexamined("weights", why, are_finite(mine, 1) and are_finite(mine, 2))
        return
    steps = Steps(reference, mine)
    if not steps.missing(1) and not steps.are_wide():
        yield Finding("weights", True, f"{mine.dtype} weights without masters say nothing about "
                      "the optimizer")
        return
    numbers = [number for number in (1, 2) if not steps.missing(number)]
    names = [name for name in mine.gradients(1) if name in steps.held(1)]
    for number in (1, 2):
        stage = f"step {number} weights"
        if number not in numbers:
            why = f"MINE has no {steps.missing(number)}.safetensors"
            yield unexamined(stage, why, are_finite(mine, number))
            continue
        if not math.isfinite(mine.steps[number - 1]["norm"]):
            yield unexamined(stage, "the norm is not finite")
            return
        wrong = wrong_weights(steps, number, names)
        if wrong:
            given = {name: steps.held(number)[name] for name in names}
            right = {name: steps.after(number, name, RIGHT_WAY) for name in names}
            if not all(right[name].isfinite().all() for name in wrong):
                yield unexamined(stage, "gradients or weights before the step are not finite")
                return
            yield Finding(stage, False, first_difference(given, right, wrong),
                          causes_of_updates(steps, number, [n for n in numbers if n != number],
                                            names, wrong))
            return
        differing = check_copies_of_masters(steps, number) if steps.has_masters else []
        if differing:
            yield from differing
            return
        yield Finding(stage, True)
