"""Prices that order layouts of nearly the same time by habit, and kinds of layouts.

The planner's own error is larger than the gap between its first dozen layouts. So a layout that is
harder to run must be clearly faster to come first. Layouts whose time is within BAND
(extras/planner/report.py) of the fastest are sorted by time x price. The price is 1 plus the sum of
the PRICES that the layout pays, each some percent. For example, a layout with a price of 1.05 comes
before one with a price of 1 only if its seconds x 1.05 are fewer. Slower layouts follow,
sorted likewise. The percents are chosen such that the first rows of six jobs are layouts that
published runs have, or that the guides of other programs (programs.py) recommend (a test
names them). They are fitted to no time.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from schedules import splits_backward

LONG = 32768  # tokens: sequences from here on are usually split over context ranks


class Price(NamedTuple):
    """The price of a feature of layouts. When layouts are compared, the time of a layout that has
    the feature counts as longer by percent x times(job, layout)."""
    percent: float
    words: str  # names the feature
    times: Callable  # times(job, layout): how often the layout pays the price; 0: not at all


PRICES = (
    Price(14, "a zero-bubble schedule (in few programs)",
          lambda job, layout: splits_backward(layout.schedule)),
    Price(14, "ZeRO-2 or 3 in a pipeline (in few programs)",
          lambda job, layout: layout.zero >= 2 and layout.pp > 1),
    Price(5, "no --sp: each tensor rank has whole activations",
          lambda job, layout: layout.tp > 1 and not layout.sp),
    Price(3, "attention by all-to-all",
          lambda job, layout: layout.cp_attention != "ring"),
    Price(2, "ZeRO-0: each replica has whole optimizer states",
          lambda job, layout: layout.zero == 0 and layout.dp * layout.cp > 1),
    Price(2, "pipeline stages to balance", lambda job, layout: math.log2(layout.pp)),
    Price(0.5, "chunks: more messages",
          lambda job, layout: math.log2(layout.chunks)),
    Price(2, "ZeRO-2 or 3: messages for each microbatch", lambda job, layout: layout.zero >= 2),
    Price(1, "context ranks: more messages", lambda job, layout: math.log2(layout.cp)),
    Price(8, "tensor ranks beside experts (Megatron's guide: rather more expert ranks)",
          lambda job, layout: layout.tp > 1 and job.model.n_experts > 0),
    Price(6, "short sequences cut for context ranks",
          lambda job, layout: job.model.block_size < LONG and math.log2(layout.cp)))


def price(job, layout):
    """The factor by which a layout's time is multiplied when layouts are compared."""
    return 1 + sum(each.percent * each.times(job, layout) for each in PRICES) / 100


def habits_against(job, layout):
    """The words of the prices that a layout pays."""
    return [each.words for each in PRICES if each.times(job, layout)]


class Kind(NamedTuple):
    """Which techniques a layout uses. A list of layouts has one row for each kind."""
    tensor: bool
    pipeline: bool
    context: bool
    expert: bool
    sharded: bool  # ZeRO-2 or 3: each replica holds a shard of the gradients, or weights, too
    zero_bubble: bool
    recompute: bool


def kind_of_layout(layout):
    """The Kind of a layout."""
    return Kind(layout.tp > 1, layout.pp > 1, layout.cp > 1, layout.ep > 1, layout.zero >= 2,
                splits_backward(layout.schedule), layout.recompute)


def trade(job, layout, first, faster, gb):
    """Describe in words how a row differs from the list's first row: time, memory, and the prices
    that only this row pays; for the first row itself, the prices that it pays. layout, first: the
    two Layouts. faster: how much shorter the row's time is, as a share of the first's; gb: how many
    GB more it holds."""
    if layout == first:
        return "; ".join(habits_against(job, layout)) or "nothing that is hard to run"
    speed = f"{abs(faster):.1%} {'faster' if faster > 0 else 'slower'}"
    size = f"{abs(gb):.1f} GB {'more' if gb > 0 else 'less'}"
    if abs(gb) < 0.05:
        size = "as much memory"
    new = [words for words in habits_against(job, layout)
           if words not in habits_against(job, first)]
    return "; ".join([f"{speed}, {size}", *new])
