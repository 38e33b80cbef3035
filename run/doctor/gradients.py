"""Loss and gradients of a step: where they differ, and which causes give the same numbers."""

import math

import torch

from run.doctor.changes.by_layout import changes
from run.doctor.finding import Finding, first_difference, norm_of, off, ratio_words
from run.doctor.groups import group_words
from run.doctor.shares import RIGHT, Share, factors, gradient, known_shares
from run.doctor.step import sampled

# How large the tolerance may be in what a cause changes, for the cause to have a name
RESOLVED = 0.2


def is_resolved(examined, share, wrong):
    """Is what the share changes in the wrong tensors much larger than the noise? If not, shares of
    other sizes would fit as well."""
    terms = examined.terms
    changed = math.hypot(*(off(gradient(terms, name, share), gradient(terms, name, RIGHT))
                           for name in wrong))
    noise = math.hypot(*(examined.tolerance(name, share.largest(name)) for name in wrong))
    return noise <= RESOLVED * changed


def fitted_weights(examined, mine):
    """Words, if MINE's gradients are the right step's terms, with a weight for each data rank's
    microbatch: those weights, found by least squares."""
    terms = examined.terms
    D, m = terms.tokens.shape
    if D * m == 1:
        return []
    shares = [Share("", data=torch.eye(D * m, dtype=torch.double)[i].view(D, m))
              for i in range(D * m)]
    columns = torch.stack([torch.cat([gradient(terms, name, share) / examined.tolerance(name)
                                      for name in mine]) for share in shares], dim=1)
    wanted = torch.cat([mine[name] / examined.tolerance(name) for name in mine])
    if not wanted.isfinite().all():
        return []
    weights = torch.linalg.lstsq(columns, wanted.unsqueeze(1)).solution.view(D, m)
    share = Share("", data=weights)
    for name in mine:
        error = off(mine[name], gradient(terms, name, share))
        if not error <= examined.tolerance(name, share.largest(name)):
            return []
    rows = "; ".join(f"data rank {d} {' '.join(f'{w:.3g}' for w in row.tolist())}"
                     for d, row in enumerate(weights))
    return [f"all gradients: the microbatches' terms count this often: {rows}"]


def is_loss(examined, terms, loss):
    """Is it the loss that train.py prints, or the one of tensor rank 0?"""
    return (examined.loss_is(loss, terms.loss())
            or examined.loss_is(loss, terms.losses[..., 0].sum().item() / terms.divisor))


def fits_change(examined, change, mine, loss):
    """Are MINE's loss and all its gradients those of the changed step?"""
    step = examined.step if change.by_microbatch else examined.step.merged()
    if change.forward:
        terms = step.run(change, losses_only=True)
        if not is_loss(examined, terms, loss):
            return False
    terms = step.run(change)
    if not is_loss(examined, terms, loss):
        return False
    for name, values in mine.items():
        predicted = gradient(terms, name, RIGHT)
        right = norm_of(gradient(examined.terms, name, RIGHT))
        size = max(1.0, norm_of(predicted) / right) if right else 1.0
        if not off(values, predicted) <= examined.tolerance(name, size):
            return False
    return True


def fitting_changes(examined, mine, loss, known):
    """Words of the Changes that give MINE's loss and (sampled) gradients."""
    loss_is_right = examined.loss_is(loss, examined.loss)
    return [change.words for change in changes(examined.step)
            if (not known or change.words in known) and change.forward != loss_is_right
            and fits_change(examined, change, mine, loss)]


def causes_of_gradients(examined, given, wrong, deep, known):
    """Words of the causes that fit MINE's loss and gradients. known: those of step 1, if that was
    wrong: no others are tried in step 2."""
    terms, layout = examined.terms, examined.mine.layout
    mine = {name: sampled(given[name]) for name in given}
    found = []
    for share in known_shares(layout, terms, examined.numbers["scale"]):
        if known and not any(words.endswith(share.words) for words in known):
            continue

        def fits(name, share=share):
            error = off(mine[name], gradient(terms, name, share))
            return error <= examined.tolerance(name, share.largest(name))
        if not any(map(fits, wrong)) or not is_resolved(examined, share, wrong):
            continue
        words = group_words(wrong, mine, fits)
        if words:
            found.append(f"{words}: {share.words}")
    found = found or fitted_weights(examined, mine)
    if found or not deep:
        return found
    return fitting_changes(examined, mine, examined.numbers["loss"], known)


def causes_of_loss(examined, loss):
    """Words of what MINE's loss may be, where its gradients are right."""
    terms, layout = examined.terms, examined.mine.layout
    losses = terms.losses.mean(-1)  # (D, m, C)
    divisor = terms.divisor
    found = {}
    total = int(terms.tokens.sum())
    for factor, words in factors(layout, total, examined.numbers["scale"]):
        found[f"the loss is {words}"] = factor * examined.loss
    for axis, parts in (("data rank", losses.sum((1, 2))),
                        ("microbatch", losses.sum((0, 2))),
                        ("context rank", losses.sum((0, 1)))):
        for i, part in enumerate(parts if len(parts) > 1 else ()):
            words = f"the printed loss is {axis} {i}'s own"
            found[f"{words} part"] = part.item() / divisor
            found[f"{words} mean"] = part.item() / divisor * len(parts)
    return [words for words, value in found.items() if examined.loss_is(loss, value)
            and examined.loss_tolerance(value) <= RESOLVED * abs(value - examined.loss)]


def keeps_first_step(examined, given):
    """Words, if MINE's gradients are this step's and a share of the first step's."""
    first = examined.mine.gradients(1)
    if set(first) != set(given):
        return []
    errors = {name: given[name] - examined.gradients[name] for name in given}
    squares = sum(first[name].square().sum().item() for name in given)
    share = sum((errors[name] * first[name]).sum().item() for name in given) / squares
    left = (off(errors[name], share * first[name]) <= 2 * examined.tolerance(name)
            for name in given)
    noise = math.hypot(*(examined.tolerance(name) for name in given))
    if noise > RESOLVED * abs(share) * math.sqrt(squares) or not all(left):
        return []
    return [f"{share:.3g} of the first step's gradients is still in them: they were not zeroed"]


def wrong_gradients(examined, given):
    """Names of MINE's gradients that differ from one process's."""
    return {name for name in given
            if not off(given[name], examined.gradients[name]) <= examined.tolerance(name)}


def check_gradients(examined, number, deep, known):
    """Findings on loss and gradients of a step. known: the causes found in step 1."""
    given = examined.mine.gradients(number)
    loss = examined.numbers["loss"]
    findings = []
    loss_is_right = examined.loss_is(loss, examined.loss)
    if not math.isfinite(loss):
        findings.append(Finding(f"step {number} loss", False, "not finite"))
    wrong = wrong_gradients(examined, given)
    causes = causes_of_gradients(examined, given, wrong, deep, known) if wrong else []
    if number == 2 and wrong and not known:
        causes = causes or keeps_first_step(examined, given)
    if not math.isfinite(loss):
        pass
    elif loss_is_right:
        findings.append(Finding(f"step {number} loss", True))
    else:
        fitting = [] if wrong else causes_of_loss(examined, loss)
        if not wrong and not fitting and deep:
            mine = {name: sampled(given[name]) for name in given}
            fitting = fitting_changes(examined, mine, loss, known)
        findings.append(Finding(f"step {number} loss", False, ratio_words(loss, examined.loss),
                                fitting or causes))
    if not wrong:
        findings.append(Finding(f"step {number} gradients", True))
        return findings
    return findings + [Finding(f"step {number} gradients", False,
                               first_difference(given, examined.gradients, wrong), causes)]
