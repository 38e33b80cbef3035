"""A device as fast as your own runs: python plan.py --calibrate FILE ..., or --measured "..."

One factor lengthens all compute (products and memory), such that the prediction of the run's step
equals the measured time. Messages keep their time, so layouts may change places. Of several runs
the median factor counts. `python plan.py --published` prints how well some runs of a program so
predict its others."""

import json
import math
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from planner.costs import Costs
from planner.memory import Layout
from planner.search import as_config, layout_of
from run.config import check_layout, require

SKIPPED = 3  # the first steps of a run, which warm up
MOST = 64  # compute is this many times as slow, or as fast, at most


class Measured(NamedTuple):
    seconds: float  # of a step
    layout: Layout


def slower(device, factor):
    """The device with compute that takes `factor` times as long."""
    return replace(device, f_products=device.f_products / factor,
                   f_attention=device.f_attention / factor, f_hbm=device.f_hbm / factor)


def factor_of(seconds_with, seconds):
    """The factor with which seconds_with(factor), which grows with it, is `seconds`. ValueError if
    there is none."""
    low, high = 1 / MOST, MOST
    require(seconds_with(low) <= seconds <= seconds_with(high), f"a step of {seconds:g} s: no "
            f"speed of compute explains it; predicted are {seconds_with(1):.4g} s, of them "
            f"{seconds_with(low):.4g} messages")
    for _ in range(40):
        middle = math.sqrt(low * high)
        if seconds_with(middle) < seconds:
            low = middle
        else:
            high = middle
    return high


def factor_of_runs(job, device, runs):
    """The median of the factors that Measured runs of a job show."""
    return median(factor_of(lambda factor, run=run: Costs(job, slower(device, factor))
                            .step_time(run.layout), run.seconds) for run in runs)


def measured_in(text, job, gpus):
    """The Measured that --measured describes, like `shape`. ValueError if it is none."""
    seconds, _, words = text.partition(" s:")
    flags, names = {}, words.split()
    shape = f'--measured "{text}" must be like "48.2 s: dp 8 tp 4 sp zero 1"'
    while names:
        name = names.pop(0).replace("-", "_")
        require(name in Layout._fields, f"{shape}; {name} is no flag of a layout")
        kind = type(Layout._field_defaults[name])
        if kind is bool:
            flags[name] = True
        else:
            try:
                flags[name] = kind(names.pop(0))
            except (IndexError, ValueError):
                raise ValueError(f"{shape}; {name} needs a value") from None
    try:
        value = float(seconds)
    except ValueError:
        raise ValueError(shape) from None
    require(0 < value < math.inf, shape)
    return Measured(value, chosen(job, gpus, flags))


def chosen(job, gpus, flags):
    """The Layout of flags, where train.py chooses what they leave open."""
    cfg = as_config(job, flags)
    ranks = check_layout(cfg, gpus)
    require(ranks == gpus, f"the measured layout has {ranks} ranks, not --gpus {gpus}")
    return layout_of(cfg)


def seconds_in(path):
    """The median seconds of a step in a file of train.py's --metrics. ValueError if it has none."""
    times = []
    with open(path) as lines:
        for line in lines:
            try:
                milliseconds = json.loads(line).get("ms")
            except (ValueError, AttributeError):
                raise ValueError(f"--calibrate {path} is not a file of train.py's --metrics"
                                 ) from None
            if milliseconds:
                times.append(milliseconds / 1e3)
    require(len(times) > SKIPPED, f"--calibrate {path} has {len(times)} steps; the first {SKIPPED} "
            "warm up, so it needs more")
    return median(times[SKIPPED:])
