"""Goes through the two steps of a dump, stage by stage, and says where it differs and why.

    initial weights    against REFERENCE's
    tokens             against REFERENCE's: which rows each data rank had
    of each step:
        loss           against one process, from MINE's own weights and tokens
        gradients      the same
        norm           against the norm of MINE's own gradients
        weights        against AdamW, from MINE's own weights, gradients and norms

Each stage begins with MINE's own state, so a finding never follows from an earlier one. Tolerance
is measured: five times what one process in MINE's dtype differs from float64.
"""


from run.doctor.examined import Examined, LikeReference
from run.doctor.finding import Finding, first_of
from run.doctor.gradients import check_gradients
from run.doctor.inputs import check_initial_weights, check_rate, check_tokens
from run.doctor.norm import judge_norm
from run.doctor.weights import check_updates

# How far weights may be from REFERENCE's, relative to their norm, where its gradients are the right
# ones (a model of another form)
FAR = 1e-2


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


def check_step(reference, mine, number, deep, known):
    """Findings on loss and gradients of a step; none if MINE has not what it takes."""
    if not mine.gradients(number) or not mine.weights(number - 1):
        return []
    if mine.model:
        can = mine.ids(number) is not None
        return check_gradients(Examined(mine, number), number, deep, known) if can else []
    if not reference.gradients(number) or not reference.weights(number - 1):
        return []
    examined = LikeReference(reference, mine, number)
    if examined.distance > FAR:
        return [Finding(f"step {number} gradients", True,
                        "not examined: MINE's weights before the step are not REFERENCE's")]
    return check_gradients(examined, number, False, known)


def diagnose(reference, mine, deep=True):
    """Yields Findings, stage by stage. reference, mine: Dumps (dump.py). deep: also run the step
    again with each known bug. Ends where ranks hold different weights: what follows is the work of
    no single model."""
    comparable(reference, mine)
    yield check_initial_weights(reference, mine)
    for number in (1, 2):
        if mine.ids(number) is not None and reference.ids(number) is not None:
            yield check_tokens(reference, mine, number)
    known = []  # causes that step 1 has shown
    for number in (1, 2):
        for finding in check_step(reference, mine, number, deep, known):
            repeats = number == 2 and set(finding.causes) & set(known)
            known += finding.causes
            if not repeats:
                yield finding
        differ = mine.steps[number - 1]["gradients_differ"]
        if differ:
            yield Finding(f"step {number} copies", False,
                          f"ranks hold different gradients of {first_of(differ)}")
        else:
            finding = judge_norm(mine, number)
            if finding:
                repeats = number == 2 and set(finding.causes) & set(known)
                known += finding.causes
                if not repeats:
                    yield finding
        differ = mine.steps[number - 1]["weights_differ"]
        if differ and not mine.steps[number - 1]["gradients_differ"]:
            yield from check_updates(reference, mine)
        if differ:
            yield Finding(f"step {number} copies", False, f"ranks hold different weights of "
                          f"{first_of(differ)}; the rest is not examined")
            return
    for number in (1, 2):
        finding = check_rate(reference, mine, number)
        if not finding.equal:
            yield finding
    yield from check_updates(reference, mine)
