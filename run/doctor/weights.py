"""The weights after each step, against AdamW's from a run's own weights, gradients and norms."""

import math

import torch

from run.doctor.finding import NOISE, Finding, first_difference, first_of, norm_of, off
from run.doctor.update import Replay, Way, ways


class Steps:
    """MINE's two steps of the optimizer, tensor by tensor."""

    def __init__(self, reference, mine):
        self.reference = reference
        self.mine = mine
        self.uses_masters = len(mine.masters(1)) > 0
        self.held = mine.masters if self.uses_masters else mine.weights
        dtype = getattr(torch, mine.dtype)
        wide = torch.promote_types(dtype, torch.float)
        # Without masters too the weights may have more digits than the dtype: under autocast
        self.are_wide = dtype == wide or self.uses_masters or not all(
            torch.equal(weight.to(dtype).double(), weight) for weight in mine.weights(1).values())
        self.eps = torch.finfo(wide).eps
        self.replay = Replay(mine.optimizer)
        self.rounded = Replay(mine.optimizer, wide)

    def numbers(self):
        """The steps of which there are weights and gradients."""
        return [n for n in (1, 2) if self.held(n) and self.held(n - 1) and self.mine.gradients(n)]

    def after(self, replay, number, name, way):
        """The weight after a step, from MINE's weight before it. rate: of MINE's dump."""
        steps = self.mine.steps[:number]
        grads = [self.mine.gradients(n)[name] for n in range(1, number + 1)]
        weights = [self.held(n)[name] for n in range(number)]
        return replay.step(number, name, weights, grads,
                           [step["norm"] for step in steps], steps[-1]["lr"], way)

    def is_right(self, number, name, way):
        predicted = self.after(self.replay, number, name, way)
        noise = off(self.after(self.rounded, number, name, way), predicted)
        noise = max(noise, self.eps * norm_of(predicted))
        return off(self.held(number)[name], predicted) <= NOISE * noise


def fitted_rate(steps, number, names):
    """Would another rate explain all weights? Weights move in proportion to it."""
    right = Way()
    moved = stepped = 0.0
    for name in names:
        before = steps.held(number - 1)[name]
        predicted = steps.after(steps.replay, number, name, right) - before
        moved += ((steps.held(number)[name] - before) * predicted).sum().item()
        stepped += predicted.square().sum().item()
    if not stepped or not math.isfinite(moved):
        return []
    said = steps.mine.steps[number - 1]["lr"]
    rate = said * moved / stepped
    if rate <= 0 or not all(steps.is_right(number, name, Way(rate=rate)) for name in names):
        return []
    return [f"the weights moved with a rate of {rate:.6g}, the dump says {said:.6g}"]


def keeps_old(steps, number, name):
    """Is each element that differs still its old value?"""
    given = steps.held(number)[name]
    predicted = steps.after(steps.replay, number, name, Way())
    differs = (given - predicted).abs() > 1e-3 * (given - predicted).abs().max()
    return bool((given == steps.held(number - 1)[name])[differs].all())


def causes_of_updates(steps, number, numbers, names, wrong):
    """Words of the ways of taking a step that fit all of MINE's steps."""
    mine = steps.mine
    rates = [(f"the one of {whose} step {n}", dump.steps[n - 1]["lr"])
             for whose, dump in (("MINE's", mine), ("REFERENCE's", steps.reference))
             for n in (1, 2) if dump.steps[n - 1]["lr"] != mine.steps[number - 1]["lr"]]
    scale = mine.steps[0]["scale"]
    sizes = []
    for axis in ("dp", "tp", "pp", "cp", "microbatches"):
        size = mine.layout[axis]
        if size > 1:
            sizes += [(f"divided by {axis} = {size}", 1 / size),
                      (f"multiplied by {axis} = {size}", size)]
    found = []
    right = Way()
    for way in ways(rates, mine.optimizer, sizes, scale):
        fitting = {name for name in wrong if steps.is_right(number, name, way)}
        if not fitting:
            continue
        # a rate belongs to one step, any other way of stepping to both
        others = [n for n in numbers if n != number] if way.rate is None else []
        def fits(name, way=way, others=others):
            return steps.is_right(number, name, way) and all(
                steps.is_right(n, name, way) for n in others)
        if all(map(fits, names)):
            found.append(way.words)
        elif all(map(fits, wrong)) and all(
                steps.is_right(n, name, right) for n in others for name in set(names) - wrong):
            found.append(f"{way.words}: {first_of(wrong)}")
    if not found:
        found = fitted_rate(steps, number, names)
    if not found and all(keeps_old(steps, number, name) for name in wrong):
        found = [f"a part of {first_of(wrong)} keeps its old values: new weights were not sent to "
                 "the ranks that need them"]
    return sorted(set(found), key=found.index)


def check_updates(reference, mine):
    """Findings on the weights after each step."""
    steps = Steps(reference, mine)
    numbers = steps.numbers()
    if mine.optimizer["name"] != "adamw":
        return [Finding("weights", True, f"not examined: {mine.optimizer['name']} is not replayed")]
    if not steps.are_wide:
        return [Finding("weights", True, f"{mine.dtype} weights without masters say nothing about "
                        "the optimizer")]
    findings = []
    right = Way()
    names = [name for name in mine.gradients(1) if name in steps.held(1)]
    for number in numbers:
        stage = f"step {number} weights"
        if not math.isfinite(mine.steps[number - 1]["norm"]):
            findings.append(Finding(stage, True, "not examined: the norm is not finite"))
            break
        wrong = {name for name in names if not steps.is_right(number, name, right)}
        if not wrong:
            findings.append(Finding(stage, True))
            continue
        predicted = {name: steps.after(steps.replay, number, name, right) for name in names}
        given = {name: steps.held(number)[name] for name in names}
        finding = Finding(stage, False, first_difference(given, predicted, wrong))
        finding.causes = causes_of_updates(steps, number, numbers, names, wrong)
        findings.append(finding)
        break  # the moments of step 2 are those of step 1: nothing to add
    return findings
