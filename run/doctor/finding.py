"""A Finding: what one stage of one step says; and the words for a difference."""

import math
from dataclasses import dataclass, field

NOISE = 5  # how many times the noise of one process still counts as equal


@dataclass
class Finding:
    """What one stage of one step says."""
    stage: str
    equal: bool
    differs: str = ""  # where, and by how much
    causes: list = field(default_factory=list)  # words; several fit the same numbers

    @property
    def named(self):
        return bool(self.causes)


def norm_of(tensor):
    return tensor.double().norm().item()


def off(mine, right):
    """How far two tensors are apart; infinite if mine is not finite."""
    error = norm_of(mine - right)
    return error if math.isfinite(error) else math.inf


def first_of(names):
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def ratio_words(mine, right):
    return f"{mine:.8g}, not {right:.8g}: {mine / right:.6g} times"


def first_difference(given, right, wrong):
    """Where the first tensor that differs does: by how much, in which rows."""
    name = next(name for name in right if name in wrong)
    if given[name].shape != right[name].shape:
        return (f"{len(wrong)} of {len(given)} tensors; first {name}, of shape "
                f"{list(given[name].shape)}, not {list(right[name].shape)}")
    error = given[name] - right[name]
    if not given[name].isfinite().all():
        return f"{name} is not finite"
    relative = norm_of(error) / max(norm_of(right[name]), 1e-300)
    rows = error.flatten(1).norm(dim=1) if error.dim() > 1 else error.abs()
    bad = (rows > rows.max() / 1000).nonzero().flatten().tolist()
    where = f"rows {bad[0]} to {bad[-1]}" if len(bad) > 1 else f"row {bad[0]}"
    return (f"{len(wrong)} of {len(given)} tensors; first {name}, off by {relative:.2g} of its "
            f"norm, {where} of {len(rows)}")
