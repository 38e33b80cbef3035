"""Chooses few of many layouts, so that every pair of features is still tested in one of them.

A layout is a dict of flags, {"tp": 2, "zero": 3}. A feature is a flag and its value; the value is
the default where the layout leaves the flag out. Of a flag that counts (COUNTS) a pair tells apart
only 1 and more than 1. By itself a count of 1, of 2, and of 3 or more, is a feature, too. So one of
the chosen layouts has tp > 1 with ZeRO-3, one has tp > 1 without cp, one has a tp of 3.

With FULL=1 all layouts are run.
"""

import math
from dataclasses import fields
from itertools import combinations

from run.config import Config
from tests.harness import FULL

AXES = ("dp", "tp", "pp", "cp")
COUNTS = (*AXES, "ep", "microbatches", "chunks", "experts", "top_k")


def layouts(table):
    """[flags] of a table with a layout per line: "dp 2 sp zero 3" is {"dp": 2, "sp": True, "zero":
    3}. Empty lines and lines that begin with # are left out."""
    types = {field.name: field.type for field in fields(Config)}
    found = []
    for line in table.splitlines():
        words = line.partition("#")[0].split()
        flags = {}
        while words:
            name = words.pop(0)
            flags[name] = True if types[name] is bool else types[name](words.pop(0))
        if flags:
            found.append(flags)
    return found


def named(flags):
    """A line of such a table: the name of a layout's test."""
    return " ".join(name if value is True else f"{name} {value}" for name, value in flags.items())


def pairs(layout):
    """All pairs of features of a layout, and its counts: {(("tp", 2), ("zero", 3)), ("tp", 3)}."""
    flags = {**vars(Config()), **layout}
    counts = {name: max(1, flags[name]) for name in COUNTS}
    features = {**flags, **{name: min(count, 2) for name, count in counts.items()}}
    return {*combinations(sorted(features.items()), 2),
            *((name, min(count, 3)) for name, count in counts.items())}


def covering(layouts):
    """Few of the layouts, on few ranks, which have every pair that any layout has.

    Greedy: again and again the layout with the most missing pairs per rank."""
    if FULL:
        return layouts
    held = {i: pairs(layout) for i, layout in enumerate(layouts)}
    ranks = [math.prod(layout.get(axis, 1) for axis in AXES) for layout in layouts]
    missing = set().union(*held.values())
    kept = []
    while missing:
        kept.append(max(held, key=lambda i: len(held[i] & missing) / ranks[i]))
        missing -= held[kept[-1]]
    return [layouts[i] for i in sorted(kept)]
