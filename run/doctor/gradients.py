"""Loss and gradients of a step: where they differ, and which known bugs give the same numbers.

    1  shares    each wrong tensor is compared with each Share (shares.py): sums of known terms
    2  weights   is there a weight for each microbatch of each data rank that fits? Least squares
    3  changes   the step is run with each Change (changes/), the loss first. Only if `deep`

The first of the three that fits ends the search. A cause has to give MINE's loss and all of its
gradients or, a Share, those of a group of tensors that has all wrong ones; and what it changes has
to be larger than the noise, because else causes of other sizes would fit as well.

In step 2 of a run whose step 1 is wrong, only the causes of step 1 are tried again.
"""

import math

import torch

from run.doctor.changes.by_layout import changes
from run.doctor.finding import Finding, first_difference, norm_of, off, ratio_words
from run.doctor.groups import group_words
from run.doctor.shares import RIGHT, Share, factors, gradient, known_shares
from run.doctor.step import sampled

# How large the tolerance may be, relative to what a cause changes, for the cause to have a name
RESOLVED = 0.2


def sampled_gradients(given):
    """{name: (n,)} of full gradients."""
    return {name: sampled(grad) for name, grad in given.items()}


# ---- 1: shares ----


def is_resolved(examined, share, wrong):
    """Is what a Share changes in the wrong tensors much larger than the tolerance?"""
    changed = []
    tolerances = []
    for name in wrong:
        predicted = gradient(examined.terms, name, share)
        changed.append(off(predicted, gradient(examined.terms, name, RIGHT)))
        tolerances.append(examined.tolerance(name, share.largest(name)))
    return math.hypot(*tolerances) <= RESOLVED * math.hypot(*changed)


def fitting_shares(examined, mine, wrong, known):
    """["a group of tensors: the share's words"]. mine: {name: sampled gradient}."""
    found = []
    scale = examined.numbers["scale"]
    for share in known_shares(examined.mine.layout, examined.terms, scale):
        if known and not any(words.endswith(share.words) for words in known):
            continue

        def fits(name, share=share):
            error = off(mine[name], gradient(examined.terms, name, share))
            return error <= examined.tolerance(name, share.largest(name))

        if any(map(fits, wrong)) and is_resolved(examined, share, wrong):
            words = group_words(wrong, mine, fits)
            if words:
                found.append(f"{words}: {share.words}")
    return found


# ---- 2: weights of microbatches ----


def fitted_weights(examined, mine):
    """Words for the weights of all D x m microbatches with which the right step's terms are MINE's
    gradients, if there are such weights. mine: {name: sampled gradient}."""
    terms = examined.terms
    D, m = terms.tokens.shape
    if D * m == 1:
        return []

    def in_tolerances(gradients):  # so that each tensor counts as much as it is known
        return torch.cat([gradients[name] / examined.tolerance(name) for name in mine])

    wanted = in_tolerances(mine)  # (all elements of all tensors,)
    if not wanted.isfinite().all():
        return []
    columns = []
    for one_microbatch in torch.eye(D * m, dtype=torch.double):
        share = Share("one microbatch only", data=one_microbatch.view(D, m))
        columns.append(in_tolerances({name: gradient(terms, name, share) for name in mine}))
    weights = torch.linalg.lstsq(torch.stack(columns, dim=1), wanted.unsqueeze(1)).solution
    share = Share("fitted", data=weights.view(D, m))
    for name in mine:
        error = off(mine[name], gradient(terms, name, share))
        if not error <= examined.tolerance(name, share.largest(name)):
            return []
    rows = [f"data rank {d} {' '.join(f'{weight:.3g}' for weight in row)}"
            for d, row in enumerate(share.data.tolist())]
    return [f"all gradients: the microbatches' terms count this often: {'; '.join(rows)}"]


# ---- 3: changes ----


def is_loss(examined, terms, loss):
    """Is MINE's loss that of the changed step? A trainer may print the mean over its tensor ranks,
    like train.py, or what tensor rank 0 has."""
    of_rank_0 = terms.losses[..., 0].sum().item() / terms.divisor
    return examined.loss_is(loss, terms.loss()) or examined.loss_is(loss, of_rank_0)


def fits_change(examined, change, mine, loss):
    """Are MINE's loss and all its gradients those of the changed step?"""
    step = examined.step if change.by_microbatch else examined.step.merged()
    if change.forward and not is_loss(examined, step.run(change, losses_only=True), loss):
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
    """Words of the Changes that give MINE's loss and its {name: sampled gradient}."""
    loss_is_right = examined.loss_is(loss, examined.loss)
    return [change.words for change in changes(examined.step)
            if (not known or change.words in known) and change.forward != loss_is_right
            and fits_change(examined, change, mine, loss)]


# ---- other causes ----


def causes_of_gradients(examined, given, wrong, deep, known):
    """Words of the causes that fit MINE's loss and gradients."""
    mine = sampled_gradients(given)
    found = fitting_shares(examined, mine, wrong, known) or fitted_weights(examined, mine)
    if found or not deep:
        return found
    return fitting_changes(examined, mine, examined.numbers["loss"], known)


def causes_of_loss(examined, loss):
    """Words for a wrong loss beside right gradients."""
    terms = examined.terms
    losses = terms.losses.mean(-1)  # (D, m, C)
    total = int(terms.tokens.sum())
    predicted = {}  # words -> loss
    for factor, words in factors(examined.mine.layout, total, examined.numbers["scale"]):
        predicted[f"the loss is {words}"] = factor * examined.loss
    for axis, parts in (("data rank", losses.sum((1, 2))),
                        ("microbatch", losses.sum((0, 2))),
                        ("context rank", losses.sum((0, 1)))):
        for i, part in enumerate(parts.tolist() if len(parts) > 1 else ()):
            words = f"the printed loss is {axis} {i}'s own"
            predicted[f"{words} part"] = part / terms.divisor
            predicted[f"{words} mean"] = part / terms.divisor * len(parts)
    return [words for words, value in predicted.items() if examined.loss_is(loss, value)
            and examined.loss_tolerance(value) <= RESOLVED * abs(value - examined.loss)]


def keeps_first_step(examined, given):
    """Words, if MINE's gradients of step 2 are right but for a multiple of those of step 1."""
    first = examined.mine.gradients(1)
    if set(first) != set(given):
        return []
    errors = {name: given[name] - examined.gradients[name] for name in given}
    squares = sum(first[name].square().sum().item() for name in given)
    # The multiple of least squares: <errors, first> / <first, first>
    share = sum((errors[name] * first[name]).sum().item() for name in given) / squares
    noise = math.hypot(*(examined.tolerance(name) for name in given))
    if noise > RESOLVED * abs(share) * math.sqrt(squares):
        return []
    for name in given:
        if not off(errors[name], share * first[name]) <= 2 * examined.tolerance(name):
            return []
    return [f"{share:.3g} of the first step's gradients is still in them: they were not zeroed"]


# ---- the stages ----


def wrong_gradients(examined, given):
    """Names of MINE's gradients that differ from the right ones. (One that is not finite does.)"""
    return {name for name in given
            if not off(given[name], examined.gradients[name]) <= examined.tolerance(name)}


def check_loss(examined, number, causes):
    """A Finding. causes: words for a loss that differs."""
    stage = f"step {number} loss"
    loss = examined.numbers["loss"]
    if not math.isfinite(loss):
        return Finding(stage, False, "not finite")
    if examined.loss_is(loss, examined.loss):
        return Finding(stage, True)
    return Finding(stage, False, ratio_words(loss, examined.loss), causes)


def check_gradients(examined, number, deep, known):
    """Findings on loss and gradients of a step. deep: also try the Changes. known: words of the
    causes found in step 1."""
    given = examined.mine.gradients(number)
    loss = examined.numbers["loss"]
    wrong = wrong_gradients(examined, given)
    if wrong:
        causes = causes_of_gradients(examined, given, wrong, deep, known)
        if number == 2 and not known:
            causes = causes or keeps_first_step(examined, given)
        finding = Finding(f"step {number} gradients", False,
                          first_difference(given, examined.gradients, wrong), causes)
        return [check_loss(examined, number, causes), finding]
    causes = []
    if math.isfinite(loss) and not examined.loss_is(loss, examined.loss):
        causes = causes_of_loss(examined, loss)
        if deep and not causes:
            causes = fitting_changes(examined, sampled_gradients(given), loss, known)
    return [check_loss(examined, number, causes), Finding(f"step {number} gradients", True)]
