"""A Finding: the result of one stage. And the helpers with which all stages measure and print.

A stage of the doctor is one comparison, such as that of step 1's gradients. (A stage of the
model is called a pipeline stage, or the text around it speaks of pipeline ranks or boundaries.)
`given` is what MINE's dump has, `right` what it should have, both {name: tensor}; `wrong` is the
set of names in which they differ by more than rounding.
"""

import math
from dataclasses import dataclass, field

NOISE = 5  # a difference of up to 5 times the rounding errors of one process counts as equal
# How large the tolerance may be, relative to what a cause changes, for the cause to have a name
RESOLVED = 0.2


@dataclass
class Finding:
    """The result of one stage of one step."""
    stage: str  # "step 1 gradients"
    equal: bool
    differs: str = ""  # where, and by how much; for an equal stage: a remark
    causes: list = field(default_factory=list)  # words of the bugs that give MINE's numbers


def unexamined(stage, why, is_finite=True):
    """The Finding of a stage that cannot be compared, and why. is_finite: are MINE's numbers? If
    not, they are wrong, whatever the right ones are."""
    if is_finite:
        return Finding(stage, True, f"not examined: {why}")
    return Finding(stage, False, "not finite")


def norm_of(tensor):
    return tensor.double().norm().item()


def off(mine, right):
    """The norm of the difference of two tensors; infinite if that norm is not finite."""
    error = norm_of(mine - right)
    return error if math.isfinite(error) else math.inf


def first_of(names):
    """Words for some names: "a, b, c and 4 more"."""
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def ratio_words(mine, right):
    ratio = f": {mine / right:.6g} times" if right else ""
    return f"{mine:.8g}, not {right:.8g}{ratio}"


def axes_by_size(layout, axes):
    """{size: the axes of this size}, without size 1. Bugs of axes of one size may give the same
    numbers."""
    found = {}
    for axis in axes:
        if layout[axis] > 1:
            found.setdefault(layout[axis], []).append(axis)
    return found


def first_difference(given, right, wrong):
    """Words for the first wrong tensor, in the model's order: how far it is off, and in which
    rows."""
    name = next(name for name in right if name in wrong)
    if given[name].shape != right[name].shape:
        return (f"{len(wrong)} of {len(given)} tensors; first {name}, of shape "
                f"{list(given[name].shape)}, not {list(right[name].shape)}")
    error = given[name] - right[name]
    if not error.isfinite().all():
        return f"{name} is not finite"
    relative = norm_of(error) / max(norm_of(right[name]), 1e-300)
    rows = error.flatten(1).norm(dim=1) if error.dim() > 1 else error.abs().flatten()
    # Rounding errors are in all rows: name rows with at least 1/1000 of the largest row's error
    bad = (rows >= rows.max() / 1000).nonzero().flatten().tolist()
    where = f"rows {bad[0]} to {bad[-1]}" if len(bad) > 1 else f"row {bad[0]}"
    return (f"{len(wrong)} of {len(given)} tensors; first {name}, off by {relative:.2g} of its "
            f"norm, {where} of {len(rows)}")
