"""Goes through the two steps of a dump, stage by stage, and says where MINE differs and why.

                         MINE's                       are compared with
    inputs.py            initial weights, tokens,     REFERENCE's
                         settings
    of step 1, then of step 2:
        gradients.py     loss, gradients              one process's, from MINE's weights and tokens
        norm.py          norm                         that of MINE's gradients
    inputs.py            rates                        REFERENCE's
    of step 1, then of step 2:
        weights.py       weights after the step       AdamW's, from MINE's weights, gradients, norm

Each stage begins with MINE's own state, so no finding follows from an earlier one. (A bug that acts
in both steps is printed once.) How far equal numbers may be apart is measured for loss, gradients
(examined.py), norm and weights, and fixed for rates and initial weights. For a model of another
form, which step.py cannot compute, loss and gradients are compared with REFERENCE's: there other
tokens or weights make them differ, too.
"""

import math

from extras.doctor.examined import Computed, InOwnDtype, LikeReference, step_of
from extras.doctor.finding import Finding, first_of, unexamined
from extras.doctor.gradients import CLIPPED, check_gradients, check_in_own_dtype
from extras.doctor.inputs import (
    WRONG_MAP,
    check_initial_weights,
    check_rate,
    check_settings,
    check_tokens,
)
from extras.doctor.norm import judge_norm
from extras.doctor.weights import check_updates

# How far weights of a model of another form may be from REFERENCE's, relative to their norm, for
# REFERENCE's gradients to be the right ones
FAR = 1e-2
WITHOUT_GRADIENTS = "the dump has clipped gradients, not those from which this follows"


def comparable(reference, mine):
    """ValueError, one line, if two dumps cannot be compared."""
    if mine.model != reference.model:
        raise ValueError(f"{mine.folder} and {reference.folder}: models of other sizes")
    missing = set(mine.weights(0)) - set(reference.weights(0))
    if missing:
        raise ValueError(f"{mine.folder}: {first_of(missing)} is not in {reference.folder}")
    if reference.ids(1) is None:
        raise ValueError(f"{reference.folder}: has no tokens-1.safetensors")
    if not mine.model and not reference.gradients(1):
        raise ValueError(f"{reference.folder}: has no gradients-1.safetensors; a model of another "
                         "form is compared with them")


def why_unexamined(reference, mine, number):
    """Why loss and gradients of a step cannot be compared: a file that is missing; else None."""
    own = [f"weights-{number - 1}", f"gradients-{number}"]
    tokens = f"tokens-{number}"
    needed = [("MINE", mine, [*own, tokens])]
    if not mine.model:
        needed = [("MINE", mine, own), ("REFERENCE", reference, [*own, tokens])]
    for whose, dump, files in needed:
        missing = dump.first_missing(*files)
        if missing:
            return f"{whose} has no {missing}.safetensors"
    return None


def not_examined(mine, number, why):
    """Findings on loss and gradients of a step that cannot be compared."""
    given = mine.gradients(number)
    loss = unexamined(f"step {number} loss", why, math.isfinite(mine.steps[number - 1]["loss"]))
    gradients = unexamined(f"step {number} gradients", why)
    infinite = [name for name in given if not given[name].isfinite().all()]
    if infinite:
        gradients = Finding(gradients.stage, False, f"{first_of(infinite)}: not finite")
    return [loss, gradients]


def check_computed(mine, number, deep, known):
    """Like check_step, for a step that step.py can compute."""
    step = step_of(mine, number)
    # A step in float32 takes half as long as in float64, so it comes first. (For a run in float64
    # both are one step.) A step in 16 bits may take longer on a CPU, and its loss is too inexact
    if mine.dtype not in ("float32", "float64"):
        return check_gradients(Computed(mine, number, step), number, deep, known)
    own = InOwnDtype(mine, number, step)
    findings = check_in_own_dtype(own, number, known)
    if findings:
        return findings
    return check_gradients(Computed(mine, number, step, own.terms), number, deep, known)


def check_step(reference, mine, number, deep, known):
    """Findings on loss and gradients of a step. known: words of the causes of the loss and
    gradients of the step before; none for step 1."""
    why = why_unexamined(reference, mine, number)
    if why:
        return not_examined(mine, number, why)
    if mine.model:
        return check_computed(mine, number, deep, known)
    examined = LikeReference(reference, mine, number)
    if examined.distance > FAR:
        return not_examined(mine, number, "MINE's weights before the step are not REFERENCE's")
    # Not deep: a step of such a model cannot be run again with a bug
    return check_gradients(examined, number, deep=False, known=known)


def check_new_weights(reference, mine, told):
    """Findings on the weights after each step. told: words of the causes found so far."""
    if CLIPPED in told:
        return [unexamined("weights", WITHOUT_GRADIENTS)]
    return check_updates(reference, mine)


def differing_copies(number, what, names):
    return Finding(f"step {number} copies", False, f"ranks hold different {what} of {names}")


def diagnose(reference, mine, deep=True):
    """Yields Findings, stage by stage. reference, mine: Dumps (dump.py). deep: also run the step
    again with each known bug. ValueError if the dumps cannot be compared.

    Loss, gradients and norm are examined up to the step after which ranks hold different weights,
    because from there on MINE has no single model."""
    comparable(reference, mine)
    initial = check_initial_weights(reference, mine)
    yield initial
    is_map_wrong = any(WRONG_MAP in words for words in initial.causes)
    for number in (1, 2):
        file = f"tokens-{number}"
        if mine.first_missing(file):
            yield unexamined(f"step {number} tokens", f"MINE has no {file}.safetensors")
        elif reference.first_missing(file):
            yield unexamined(f"step {number} tokens", f"REFERENCE has no {file}.safetensors")
        else:
            yield check_tokens(reference, mine, number)
    finding = check_settings(reference, mine)
    if not finding.equal:
        yield finding
    known = []  # words of the causes of the loss and gradients of the latest step
    told = set()  # words of the causes of loss, gradients and norm of all steps so far
    for number in (1, 2):
        step = mine.steps[number - 1]
        findings = check_step(reference, mine, number, deep and not is_map_wrong, known)
        if is_map_wrong and not all(finding.equal for finding in findings):
            findings = not_examined(mine, number, "the map of names is wrong")
        known = [words for finding in findings for words in finding.causes]
        # Where copies of a gradient differ, MINE's norm was computed from copies that are not in
        # the dump, so it cannot be checked
        if CLIPPED in known:
            findings.append(unexamined(f"step {number} norm", WITHOUT_GRADIENTS))
        elif not step["gradients_differ"]:
            findings += judge_norm(mine, number)
        for finding in findings:
            if not told & set(finding.causes):  # else it is the same bug again
                yield finding
        told.update(words for finding in findings for words in finding.causes)
        if step["gradients_differ"]:
            yield differing_copies(number, "gradients", first_of(step["gradients_differ"]))
        if step["weights_differ"]:
            # Copies of weights differ though those of gradients are the same: check_updates may
            # find the cause, such as new weights that were not sent
            if not step["gradients_differ"]:
                yield from check_new_weights(reference, mine, told)
            names = first_of(step["weights_differ"])
            yield differing_copies(number, "weights", f"{names}; the rest is not examined")
            return
    for number in (1, 2):
        finding = check_rate(reference, mine, number)
        if not finding.equal:
            yield finding
    yield from check_new_weights(reference, mine, told)
