"""Chooses few of many layouts: those that together hold each pair of features.

A feature is the value of a flag, its default where a layout leaves it out. Of what is counted, as
ranks of an axis, it is only whether there are more than one; each count by itself, of 1, 2, 3 and
more, is held, too. So tp > 1 meets each ZeRO stage, each schedule, cp > 1 and no cp, and there is a
tp of 3. Rooms share: what the layouts chosen in one hold is not asked for again in the next one.
With FULL=1 all layouts of all rooms are run.
"""

import math
from itertools import combinations

from run.config import Config
from tests.harness import FULL

AXES = ("dp", "tp", "pp", "cp")
COUNTS = (*AXES, "ep", "microbatches", "chunks", "experts", "top_k")


def named(flags):
    return " ".join(f"{name} {value}" for name, value in flags.items())


def pairs(layout):
    """The pairs of features of a dict of flags, and its counts."""
    flags = {**vars(Config()), **layout}
    counts = {name: max(1, flags[name]) for name in COUNTS}
    features = {**flags, **{name: min(count, 2) for name, count in counts.items()}}
    return {*combinations(sorted(features.items()), 2),
            *((name, min(count, 3)) for name, count in counts.items())}


def covering(layouts, besides=()):
    """Few of the layouts, on few ranks, that hold with `besides` each pair which any of them holds.
    With FULL=1 all."""
    if FULL:
        return layouts
    held = {i: pairs(layout) for i, layout in enumerate(layouts)}
    ranks = [math.prod(layout.get(axis, 1) for axis in AXES) for layout in layouts]
    missing = set().union(*held.values()).difference(*map(pairs, besides))
    kept = []
    while missing:
        kept.append(max(held, key=lambda i: len(held[i] & missing) / ranks[i]))
        missing -= held[kept[-1]]
    return [layouts[i] for i in sorted(kept)]
