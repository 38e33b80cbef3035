"""Loss and gradients of a step: where they differ, and which known bugs give the same numbers.

    1  shares    each wrong tensor is compared with each Share (shares.py): sums of known terms
    2  weights   is there a weight for each microbatch of each data rank that fits? Least squares
    3  changes   the step is run with each Change (changes/), the loss first. Only if `deep`

The first of the three that fits ends the search. A Change has to give MINE's loss and all its
gradients. A Share has to give the gradients of a group that contains all wrong tensors; a wrong
loss has this cause only if the Share gives the loss, too. And what a cause changes has to be larger
than the noise: otherwise a bug too small to see would fit every run.

In step 2 of a run whose step 1 is wrong, only the Shares and Changes found in step 1 are tried
again, and weights are fitted anew.
"""

import math

import torch

from extras.doctor.changes.by_layout import changes
from extras.doctor.finding import (
    NOISE,
    RESOLVED,
    Finding,
    first_difference,
    first_of,
    norm_of,
    off,
    ratio_words,
)
from extras.doctor.groups import group_words
from extras.doctor.shares import RIGHT, Share, gradient, known_shares, loss_of
from extras.doctor.step import sampled

# RESOLVED for a Change: twice as large, because a Change has to give the loss and the gradients of
# all tensors at once, and a Share only those of a few tensors, where it fits by chance more often
RESOLVED_CHANGE = 0.4
# How far two float64 gradients may be apart, relative to their norm, that are the same but for the
# order of sums
EXACT = 1e-9


def sampled_gradients(given):
    """{name: (n,)} of full gradients."""
    return {name: sampled(grad) for name, grad in given.items()}


# ---- 1: shares ----


def is_resolved(examined, share, wrong):
    """Does a Share change the wrong tensors by much more than the tolerance?"""
    changed = []
    tolerances = []
    for name in wrong:
        predicted = gradient(examined.terms, name, share)
        changed.append(off(predicted, gradient(examined.terms, name, RIGHT)))
        tolerances.append(examined.tolerance(name, share.largest(name)))
    return math.hypot(*tolerances) <= RESOLVED * math.hypot(*changed)


def fitting_shares(examined, mine, wrong, known):
    """{"a group of tensors: the share's words": Share} of the Shares that fit. mine: {name: sampled
    gradient}. known: words of the causes found in step 1; if there are any, only these are
    tried."""
    found = {}
    scale = examined.step_numbers["scale"]
    for share in known_shares(examined.mine.layout, examined.terms, scale):
        if known and not any(words.endswith(share.words) for words in known):
            continue

        def fits(name, share=share):
            predicted = gradient(examined.terms, name, share)
            return examined.is_near(name, mine[name], predicted, share.largest(name))

        if all(map(fits, wrong)) and is_resolved(examined, share, wrong):
            found[f"{group_words(wrong, mine, fits)}: {share.words}"] = share
    return found


# ---- 2: weights of microbatches ----


def fitted_weights(examined, mine, wrong):
    """Find a weight for each of the D x m microbatches, so that the weighted terms sum up to MINE's
    gradients. Returns {words: Share}; {} if no weights fit, if noise alone could move the weights
    as far from 1 as they are, or if one factor fits, which no size of the layout explains: it would
    be a known Share. mine: {name: sampled gradient}."""
    terms = examined.terms
    D, m = terms.tokens.shape
    if D * m == 1:
        return {}

    def in_tolerances(gradients):  # so that a tensor weighs more the more exactly it is known
        return torch.cat([gradients[name] / examined.tolerance(name) for name in mine])

    wanted = in_tolerances(mine)  # (all elements of all tensors,)
    if not wanted.isfinite().all():
        return {}
    columns = []
    for one_microbatch in torch.eye(D * m, dtype=torch.double):
        share = Share("one microbatch only", data=one_microbatch.view(D, m))
        columns.append(in_tolerances({name: gradient(terms, name, share) for name in mine}))
    columns = torch.stack(columns, dim=1)  # (all elements, D m)
    weights = torch.linalg.lstsq(columns, wanted.unsqueeze(1)).solution
    share = Share("fitted", data=weights.view(D, m))
    right = columns.sum(1)
    # The factor with the least squares: <wanted, right> / <right, right>
    one_factor = Share("one factor", factor=(wanted @ right / (right @ right)).item())

    def fits(share):
        return all(examined.is_near(name, mine[name], gradient(terms, name, share),
                                    share.largest(name)) for name in mine)

    if not fits(share) or fits(one_factor) or not is_resolved(examined, share, wrong):
        return {}
    rows = [f"data rank {d}: {' '.join(f'{weight:.3g}' for weight in row)}"
            for d, row in enumerate(share.data.tolist())]
    words = f"all gradients: the microbatches' terms count this often ({'; '.join(rows)})"
    return {words: share}


# ---- 3: changes ----


def is_loss(examined, terms, loss):
    """Is MINE's loss that of the changed step? A trainer may print the mean over its tensor ranks,
    like train.py, or tensor rank 0's loss."""
    of_rank_0 = terms.losses[..., 0].sum().item() / terms.divisor
    return examined.loss_is(loss, terms.loss()) or examined.loss_is(loss, of_rank_0)


def changes_loss_alone(examined, terms):
    """Has the changed step the right gradients, while the tolerance is much smaller than what the
    Change does to the loss? (A Change whose gradients are only near the right ones does not explain
    a wrong loss of right gradients: a loss that is printed with few digits would fit, too.)"""
    for name in examined.gradients:
        right = gradient(examined.terms, name, RIGHT)
        if not off(gradient(terms, name, RIGHT), right) <= EXACT * norm_of(right):
            return False
    loss = terms.loss()
    return examined.loss_tolerance(loss) <= RESOLVED * abs(loss - examined.loss)


def step_with(step, change):
    """The SimulatedStep in which a Change is run: for speed with all sequences in one microbatch,
    unless the bug depends on the microbatches."""
    if not change.by_microbatch:
        return step.merged()
    return step.together(change.together) if change.together > 1 else step


def scale_of(examined, change):
    """What the loss is multiplied by before a Change's backward. Gradients that are rounded to 16
    bits have to be MINE's: of a loss that is divided by the tokens, times the loss scale."""
    return examined.step_numbers["scale"] / examined.terms.divisor if change.rounds else 1.0


def noise_of_rounding(examined, step, change, terms):
    """How far a Change that rounds to 16 bits is from itself in MINE's dtype: (error of the loss,
    {name: norm of the gradient's error}). Its noise is larger than the right step's, because a
    number near the middle between two of 16 bits may be rounded up or down."""
    own = step.run(change, examined.dtype, examined.grad_dtype, scale_of(examined, change))
    errors = {name: off(gradient(own, name, RIGHT), gradient(terms, name, RIGHT))
              for name in examined.gradients}
    return abs(own.loss() - terms.loss()), errors


def may_be_loss(examined, change, terms, loss):
    """May MINE's loss be that of the changed step? Of a Change that rounds, whose noise is not
    known yet: is MINE's loss nearer to it than to the right one?"""
    if not change.rounds:
        return is_loss(examined, terms, loss)
    changed = terms.loss()
    near = RESOLVED_CHANGE * abs(changed - examined.loss)
    return abs(loss - changed) <= near + examined.loss_tolerance(changed)


def fits_change(examined, change, mine, loss, wrong):
    """Are MINE's loss and all its gradients those of the changed step, and is what the Change does
    to the wrong ones, or to the loss alone, much larger than the tolerance?"""
    step = step_with(examined.step, change)
    if change.forward:
        forward = step.run(change, losses_only=True)
        if not may_be_loss(examined, change, forward, loss):
            return False
    terms = step.run(change, scale=scale_of(examined, change))
    loss_noise = 0.0
    noise = dict.fromkeys(mine, 0.0)
    if change.rounds:
        loss_noise, noise = noise_of_rounding(examined, step, change, terms)
    if not (is_loss(examined, terms, loss) or abs(loss - terms.loss()) <= NOISE * loss_noise):
        return False
    changed = []
    tolerances = []
    for name, values in mine.items():
        predicted = gradient(terms, name, RIGHT)
        right = gradient(examined.terms, name, RIGHT)
        size = max(1.0, norm_of(predicted) / norm_of(right)) if right.any() else 1.0
        tolerance = max(examined.tolerance(name, size), NOISE * noise[name])
        if not off(values, predicted) <= tolerance < math.inf:
            return False
        if name in wrong:
            changed.append(off(predicted, right))
            tolerances.append(tolerance)
    if not wrong:
        return changes_loss_alone(examined, terms)
    return math.hypot(*tolerances) <= RESOLVED_CHANGE * math.hypot(*changed)


def fitting_changes(examined, mine, loss, known, wrong=()):
    """Words of the Changes that give MINE's loss and its {name: sampled gradient}. wrong: names of
    the gradients that differ."""
    # Only a Change of forward can explain a wrong loss. With a right loss one of backward alone
    # comes first
    changes_forward = not examined.loss_is(loss, examined.loss)

    def fitting(forward):
        return [change.words for change in changes(examined.step)
                if (not known or change.words in known) and change.forward == forward
                and fits_change(examined, change, mine, loss, wrong)]

    # A right loss with wrong gradients: a Change of forward may do less to the loss than its
    # tolerance, as exact GELU does
    return fitting(changes_forward) or (fitting(True) if wrong and not changes_forward else [])


# ---- other causes ----


def loss_factors(layout, tokens, scale):
    """[(factor, words)]: factors by which a printed loss may be wrong. tokens: number of tokens of
    the whole batch that count; scale: the loss scale."""
    D, N, T, P, m = (layout[axis] for axis in ("dp", "cp", "tp", "pp", "microbatches"))
    sizes = [(D, "data ranks (dp)"), (N, "context ranks (cp)"), (T, "tensor ranks (tp)"),
             (P, "pipeline ranks (pp)"), (m, "microbatches"), (tokens, "tokens")]
    if D > 1 and N > 1:
        sizes.append((D * N, "data and context ranks (dp, cp)"))
    if D > 1 and m > 1:
        sizes.append((D * m, "microbatches of all data ranks (dp)"))
    found = [(-1.0, "of the wrong sign"),
             (scale, f"{scale:g} times the right one: the loss scale is still in it"),
             (1 / scale, f"divided by the loss scale {scale:g} once too often")]
    for size, what in sizes:
        found += [(size, f"{size} times the right one: summed over the {size} {what}, or not "
                         "divided by their number"),
                  (1 / size, f"1/{size} of the right one: divided by the {size} {what} once too "
                             "often, or not summed over them")]
    return [(factor, words) for factor, words in found if factor != 1]


def constants(examined):
    """{words: loss} of losses that are too large by a constant per token."""
    T = examined.mine.layout["tp"]
    per_token = math.log(T) * int(examined.terms.tokens.sum()) / examined.terms.divisor
    return {f"the loss is log({T}) too large per token: the {T} tensor ranks (tp) sum the "
            "exponentials of logits that each of them has whole": examined.loss + per_token}


def causes_of_loss(examined, loss):
    """Words for a wrong loss that no cause of the gradients explains (they may be right, or wrong
    for a reason that leaves the loss right): the trainer prints a multiple or a part of the right
    loss."""
    terms = examined.terms
    losses = terms.losses.mean(-1)  # (D, m, N)
    total = int(terms.tokens.sum())
    predicted = {}  # words -> loss
    for factor, words in loss_factors(examined.mine.layout, total, examined.step_numbers["scale"]):
        predicted[f"the printed loss is {words}"] = factor * examined.loss
    for axis, parts in (("data rank", losses.sum((1, 2))),
                        ("microbatch", losses.sum((0, 2))),
                        ("context rank", losses.sum((0, 1)))):
        if len(parts) == 1:
            continue
        for i, part in enumerate(parts.tolist()):
            words = f"the printed loss is {axis} {i}'s own"
            predicted[f"{words} part"] = part / terms.divisor
            predicted[f"{words} mean"] = part / terms.divisor * len(parts)
    predicted.update(constants(examined))
    return [words for words, value in predicted.items() if examined.loss_is(loss, value)
            and examined.loss_tolerance(value) <= RESOLVED * abs(value - examined.loss)]


def keeps_first_step(examined, given):
    """[words] if MINE's gradients of step 2 are the right gradients plus a multiple of MINE's
    gradients of step 1; else []."""
    first = examined.mine.gradients(1)
    if set(first) != set(given):
        return []
    errors = {name: given[name] - examined.gradients[name] for name in given}
    squares = sum(first[name].square().sum().item() for name in given)
    if squares == 0:
        return []
    # The multiple with the least squares: <errors, first> / <first, first>
    multiple = sum((errors[name] * first[name]).sum().item() for name in given) / squares
    noise = math.hypot(*(examined.tolerance(name) for name in given))
    if noise > RESOLVED * abs(multiple) * math.sqrt(squares):
        return []
    for name in given:
        # Twice the tolerance: the rounding errors of both steps are in it
        if not off(errors[name], multiple * first[name]) <= 2 * examined.tolerance(name):
            return []
    return [f"{multiple:.3g} of the first step's gradients is still in them: they were not zeroed"]


CLIPPED = "all gradients: clipped already; dump them before clipping"


def are_clipped(examined, given):
    """Are MINE's gradients the right ones, clipped by MINE's norm?"""
    limit = examined.mine.optimizer["grad_clip"]
    norm = examined.step_numbers["norm"]
    if not limit or not limit < norm < math.inf:
        return False
    factor = limit / (norm + 1e-6)  # like torch's clip_grad_norm_
    tolerance = math.hypot(*(examined.tolerance(name) for name in given))
    size = math.hypot(*(norm_of(examined.gradients[name]) for name in given))
    # A wrong factor on all gradients is in MINE's norm, too; clipping is not
    if max(tolerance, abs(norm - size)) > RESOLVED * (1 - factor) * size:
        return False
    return all(examined.is_near(name, given[name], factor * examined.gradients[name])
               for name in given)


def with_other_experts(examined, given, wrong):
    """[words] if an expert's gradients are summed over the ranks (ep) that have other experts."""
    E = examined.mine.layout["ep"]
    stacks = {name for name in given if ".experts." in name}
    if E == 1 or not wrong or not wrong <= stacks:
        return []
    for name in stacks:
        right = examined.gradients[name]  # (n_experts, ...): rank 0's experts, then rank 1's, ...
        summed = right.unflatten(0, (E, -1)).sum(0, keepdim=True)
        predicted = summed.expand(E, *summed.shape[1:]).reshape(right.shape)
        size = max(1.0, norm_of(predicted) / norm_of(right))
        if not examined.is_near(name, given[name], predicted, size):
            return []
        if examined.tolerance(name, size) > RESOLVED * off(predicted, right):
            return []
    return ["the gradients of experts: summed over the ranks (ep) with other experts, too"]


def lacks_last_elements(examined, given, wrong):
    """[words] if the last n % N elements of n are not summed over N ranks: of each tensor, or of
    each bucket of several tensors, whose last tensor then is wrong."""
    layout = examined.mine.layout
    found = []
    for N, axes, share in ((layout["dp"], "data ranks (dp)", own_data(examined.terms)),
                           (layout["cp"], "context ranks (cp)", Share("own", context=0))):
        if N > 1 and all(lacks_end(examined, name, given[name], N, share) for name in wrong):
            found.append(f"the last n % {N} elements are not summed over the {N} {axes}, of "
                         f"{first_of(wrong)}")
    return found


def own_data(terms, d=0):
    """The Share of data rank d's own terms."""
    own = torch.zeros(terms.tokens.shape, dtype=torch.double)
    own[d] = 1
    return Share("own", data=own)


def has_own_chunks(examined, given, wrong):
    """[words] if each data rank's chunk of the gradients is of its own terms only: of FSDP's chunks
    (rows) or of ZeRO's (elements). Large tensors, of which only some elements are known, are left
    out."""
    D = len(examined.terms.tokens)  # 1 for a model of another form, whose terms are not known
    names = [name for name in wrong if len(gradient(examined.terms, name, RIGHT))
             == given[name].numel()]
    if D == 1 or not names:
        return []
    for whose in ("FSDP", "ZeRO"):
        if all(are_own_chunks(examined, name, given[name], whose) for name in names):
            return [f"the chunks that ZeRO or FSDP keeps of {first_of(wrong)} are not summed over "
                    "the data ranks (dp): each is its rank's own"]
    return []


def are_own_chunks(examined, name, given, whose):
    """Is the gradient made of the data ranks' own chunks? given: a whole gradient of MINE."""
    D = len(examined.terms.tokens)
    places = torch.arange(given.numel())
    if whose == "FSDP":
        chunks = [rows.flatten() for rows in places.view(given.shape).chunk(D)]
    else:
        chunks = places.tensor_split(D)
    predicted = torch.empty_like(places, dtype=torch.double)
    for d, chunk in enumerate(chunks):
        predicted[chunk] = gradient(examined.terms, name, own_data(examined.terms, d))[chunk]
    right = gradient(examined.terms, name, RIGHT)
    return (examined.is_near(name, given.flatten(), predicted)
            and examined.tolerance(name) <= RESOLVED * off(predicted, right))


def lacks_end(examined, name, given, N, share):
    """Are only fewer than N elements wrong, the last ones, and are they those of this Share?"""
    right = gradient(examined.terms, name, RIGHT)
    own = gradient(examined.terms, name, share)
    if given.shape != examined.gradients[name].shape or len(right) != given.numel():
        return False  # a large tensor: only some elements are known
    values = given.flatten()
    for n in range(1, min(N, len(right) + 1)):
        predicted = torch.cat([right[:-n], own[-n:]])
        if examined.is_near(name, values, predicted):
            return examined.tolerance(name) <= RESOLVED * off(predicted, right)
    return False


# ---- causes of both ----


def causes_of_both(examined, given, wrong, deep, known):
    """(words of the causes of MINE's loss, words of the causes of its gradients); the first is
    empty if the loss is right. given: MINE's gradients; wrong: names of the wrong ones."""
    mine = sampled_gradients(given)
    loss = examined.step_numbers["loss"]
    is_right = examined.loss_is(loss, examined.loss)
    shares = (fitting_shares(examined, mine, wrong, known)
              or fitted_weights(examined, mine, wrong))
    if not shares:
        if is_right:
            found = (with_other_experts(examined, given, wrong)
                     or lacks_last_elements(examined, given, wrong)
                     or has_own_chunks(examined, given, wrong))
            if found:
                return [], found
        found = fitting_changes(examined, mine, loss, known, wrong) if deep else []
        if is_right or found:
            return [] if is_right else found, found
        # (not the other causes of a loss, which might fit by chance: its gradients are unexplained)
        return [words for words, value in constants(examined).items()
                if examined.loss_is(loss, value) and value != examined.loss], []
    if is_right:
        return [], list(shares)
    of_both = [words for words, share in shares.items()
               if examined.loss_is(loss, loss_of(examined.terms, share))]
    if of_both:
        return of_both, of_both
    return causes_of_loss(examined, loss), list(shares)


# ---- the stages ----


def wrong_gradients(examined, given):
    """Names of MINE's gradients that differ from the right ones. (A gradient that is not finite
    differs.)"""
    return {name for name in given if not examined.gradient_is_right(name, given[name])}


def check_loss(examined, number, causes):
    """A Finding. causes: words for a loss that differs."""
    stage = f"step {number} loss"
    loss = examined.step_numbers["loss"]
    if not math.isfinite(loss):
        return Finding(stage, False, "not finite")
    if examined.loss_is(loss, examined.loss):
        return Finding(stage, True)
    return Finding(stage, False, ratio_words(loss, examined.loss), causes)


def check_in_own_dtype(examined, number, known):
    """Findings, if loss and gradients of a step are equal, or if a Share that was found in step 1
    explains the wrong ones. Else None: the caller computes the step in float64, to measure how far
    rounding errors may be. examined: an InOwnDtype; known: words of the causes found in step 1."""
    given = examined.mine.gradients(number)
    loss = examined.step_numbers["loss"]
    is_loss_right = examined.loss_is(loss, examined.loss)
    wrong = wrong_gradients(examined, given)
    if not wrong:
        if not is_loss_right:
            return None
        return [Finding(f"step {number} loss", True), Finding(f"step {number} gradients", True)]
    shares = fitting_shares(examined, sampled_gradients(given), wrong, known) if known else {}
    causes = [words for words, share in shares.items()
              if is_loss_right or examined.loss_is(loss, loss_of(examined.terms, share))]
    if not causes:
        return None
    finding = Finding(f"step {number} gradients", False,
                      first_difference(given, examined.gradients, wrong), causes)
    return [check_loss(examined, number, causes), finding]


def check_gradients(examined, number, deep, known):
    """Findings on loss and gradients of a step. deep: also try the Changes. known: words of the
    causes found in step 1."""
    given = examined.mine.gradients(number)
    loss = examined.step_numbers["loss"]
    wrong = wrong_gradients(examined, given)
    if wrong and are_clipped(examined, given):
        finding = Finding(f"step {number} gradients", False,
                          first_difference(given, examined.gradients, wrong), [CLIPPED])
        return [check_loss(examined, number, causes_of_loss(examined, loss)), finding]
    if wrong:
        of_loss, of_gradients = causes_of_both(examined, given, wrong, deep, known)
        if number == 2 and not known and not of_gradients:  # a bug that begins in step 2
            of_gradients = keeps_first_step(examined, given)
        finding = Finding(f"step {number} gradients", False,
                          first_difference(given, examined.gradients, wrong), of_gradients)
        return [check_loss(examined, number, of_loss), finding]
    causes = []
    if math.isfinite(loss) and not examined.loss_is(loss, examined.loss):
        causes = causes_of_loss(examined, loss)
        if deep and not causes:
            causes = fitting_changes(examined, sampled_gradients(given), loss, known)
    return [check_loss(examined, number, causes), Finding(f"step {number} gradients", True)]
