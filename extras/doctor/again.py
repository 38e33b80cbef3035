"""Two runs of MINE with the same flags, compared bit by bit: is the trainer deterministic?

A rank that does not wait for a message computes with whatever its buffer holds by then, so two runs
of the same command differ. The first difference is told; all later ones follow from it.
"""

from collections.abc import Mapping

import torch

from extras.doctor.finding import Finding, first_difference

SETTINGS = ("model", "names", "dtype", "grad_dtype", "layout", "loss", "optimizer", "balance")
MISSING_WAIT = "not deterministic: look for a missing wait"
OTHER_INPUTS = ("other weights or tokens go into the two runs: another seed, or a missing wait "
                "where they are sent")


def refuse_other_run(mine, again):
    """ValueError, one line, unless AGAIN has MINE's settings, rates, files and names."""
    for name in SETTINGS:
        if getattr(mine, name) != getattr(again, name):
            raise ValueError(f"{again.folder}: its {name} is not that of {mine.folder}; run MINE's "
                             "command again")
    if [step["lr"] for step in mine.steps] != [step["lr"] for step in again.steps]:
        raise ValueError(f"{again.folder}: its rates are not those of {mine.folder}; run MINE's "
                         "command again")
    files = [{*dump.tensors, *dump.tokens} for dump in (mine, again)]
    if files[0] != files[1] or mine.weights(0).keys() != again.weights(0).keys():
        raise ValueError(f"{again.folder}: has other files or tensors than {mine.folder}")


def tokens_to_compare(dump, number):
    """{"ids", "targets": (D, m, B, S)} of a step; {} if the file is not there."""
    if dump.ids(number) is None:
        return {}
    return {"ids": dump.ids(number).double(), "targets": dump.targets(number).double()}


def values_in_order(dump):
    """Yields (words, value, is it an input?) of all that a dump has, in the order in which a run
    makes it. value: {name: tensor}, a number, or a list of names."""
    yield "initial weights", dump.weights(0), True
    yield "initial masters", dump.masters(0), True
    for number, step in enumerate(dump.steps, 1):
        yield f"step {number} tokens", tokens_to_compare(dump, number), True
        yield f"step {number} loss", step["loss"], False
        yield f"step {number} gradients", dump.gradients(number), False
        yield f"step {number} gradients with unequal copies", step["gradients_differ"], False
        yield f"step {number} norm", step["norm"], False
        yield f"step {number} weights", dump.weights(number), False
        yield f"step {number} masters", dump.masters(number), False
        yield f"step {number} weights with unequal copies", step["weights_differ"], False


def has_same_bits(first, second):
    """Compared as integers, because nan is not equal to nan."""
    return torch.equal(first.view(torch.int64), second.view(torch.int64))


def difference(first, second):
    """Words for the first difference of two values of values_in_order(); "" if there is none."""
    if not isinstance(first, Mapping):
        return "" if repr(first) == repr(second) else f"{first} and {second}"
    wrong = {name for name in first if not has_same_bits(first[name], second[name])}
    return first_difference(second, first, wrong) if wrong else ""


def check_again(mine, again):
    """A Finding: have two runs of MINE the same bits? mine, again: Dumps. ValueError if AGAIN is
    not a second run of MINE."""
    refuse_other_run(mine, again)
    pairs = zip(values_in_order(mine), values_in_order(again), strict=True)
    for (words, first, is_input), (_, second, _) in pairs:
        differs = difference(first, second)
        if differs:
            return Finding("MINE, run again", False, f"{words}: {differs}",
                           [OTHER_INPUTS if is_input else MISSING_WAIT])
    return Finding("MINE, run again", True)
