"""Chooses few of many layouts: those that together hold each pair of features."""

from itertools import combinations

from tests.harness import FULL


def named(flags):
    return " ".join(f"{name} {value}" for name, value in flags.items())


def features(layout):
    """{(flag, value)} of a dict of flags. Numbers are 1, 2 or more; microbatches 1 or more."""
    most = {"microbatches": 2, "block_size": 1}
    return {(flag, min(value, most.get(flag, 3)) if type(value) is int else value)
            for flag, value in layout.items()}


def pairs(layout):
    found = sorted(features(layout), key=str)
    return {*combinations(found, 2), *found}


def covering(layouts):
    """The fewest, nearly, that hold each pair of features which any of the layouts holds. With
    FULL=1 all."""
    missing, kept = set().union(*map(pairs, layouts)), []
    while missing and not FULL:
        kept.append(max(layouts, key=lambda layout: len(pairs(layout) & missing)))
        missing -= pairs(kept[-1])
    return kept or layouts
