"""A device as fast as your own runs: python -m extras.planner --calibrate FILE ..., or --measured
"..."

One factor lengthens products, attention and memory traffic, such that the prediction of the run's
step equals the measured time. Messages and launches of kernels keep their time, so layouts may
change places. With several runs the median of their factors counts. `python -m extras.planner
--published` prints how well a published run is predicted by the factor of one other run of its
source, and by the median factor of all others."""

import math
from dataclasses import fields, replace
from functools import partial
from statistics import median
from typing import NamedTuple

from data.foreign import POSITIVE, open_file, parse_json, require_fields
from extras.planner.costs import Costs
from extras.planner.memory import Layout
from extras.planner.search import as_config, layout_of, settle
from run.config import Config, require

SKIPPED = 3  # the first steps of a run, which warm up
MOST = 64  # compute is this many times as slow, or as fast, at most
LONGEST = 1 << 20  # bytes of a line of metrics
CHOICES = {f.name: f.metadata["choices"] for f in fields(Config)}  # the values of a flag; None: any


class Measured(NamedTuple):
    seconds: float  # seconds of a step
    layout: Layout


def slower(device, factor):
    """The device whose products, attention and memory traffic take `factor` times as long."""
    return replace(device, f_products=device.f_products / factor,
                   f_attention=device.f_attention / factor, f_hbm=device.f_hbm / factor)


def factor_of(seconds_with, seconds):
    """Find the factor at which seconds_with(factor) equals `seconds`. seconds_with grows with the
    factor. ValueError if no factor from 1 / MOST to MOST fits."""
    low, high = 1 / MOST, MOST
    fastest = seconds_with(low)
    slowest = seconds_with(high)
    require(fastest <= seconds <= slowest, f"a step of {seconds:g} s: no speed of compute explains "
            f"it; predicted are {seconds_with(1):.4g} s, {fastest:.4g} s with compute {MOST} times "
            f"as fast, {slowest:.4g} s with compute {MOST} times as slow")
    for _ in range(40):
        middle = math.sqrt(low * high)
        if seconds_with(middle) < seconds:
            low = middle
        else:
            high = middle
    return high


def factor_of_runs(job, device, runs):
    """The median of the factors that Measured runs of a job show."""
    def seconds_of(layout, factor):
        return Costs(job, slower(device, factor)).step_time(layout)

    return median(factor_of(partial(seconds_of, run.layout), run.seconds) for run in runs)


def measured_in(text, job, gpus):
    """The Measured that a text of --measured describes: seconds of a step, flags of its layout.
    ValueError for any other text."""
    seconds, _, words = text.partition(" s:")
    flags, names = {}, words.split()
    expected = f'--measured "{text}" must be like "48.2 s: dp 8 tp 4 sp zero 1"'
    require(names, f"{expected}: say the layout, too")
    while names:
        name = names.pop(0).replace("-", "_")
        require(name in Layout._fields, f"{expected}; {name} is no flag of a layout")
        kind = type(Layout._field_defaults[name])
        if kind is bool:
            flags[name] = True
            continue
        try:
            flags[name] = kind(names.pop(0))
        except (IndexError, ValueError):
            raise ValueError(f"{expected}; {name} needs a value") from None
        choices = CHOICES[name]
        require(not choices or flags[name] in choices, f"{expected}; {name} {flags[name]} is none "
                f"of {', '.join(map(str, choices or ()))}")
    try:
        value = float(seconds)
    except ValueError:
        raise ValueError(expected) from None
    require(0 < value < math.inf, expected)
    return Measured(value, chosen(job, gpus, flags))


def chosen(job, gpus, flags):
    """The Layout of flags. Values that they leave open are chosen like in train.py."""
    cfg = as_config(job, flags)
    settle(cfg, gpus)
    return layout_of(cfg)


def seconds_in(path):
    """The median seconds of a step in a file of train.py's --metrics, without the first SKIPPED
    steps. ValueError if no steps are left, or if the file is not one of --metrics."""
    times = []
    number = 0
    try:
        with open_file(path) as file:
            while line := file.readline(LONGEST + 1):
                number += 1
                require(len(line) <= LONGEST, f"more than {LONGEST:,} bytes")
                record = parse_json(line)
                require_fields(record, known={"ms": POSITIVE})
                if "ms" in record:  # else a line of a validation
                    times.append(record["ms"] / 1e3)
    except OSError as error:
        raise ValueError(f"--calibrate {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--calibrate {path} is not a file of train.py's --metrics: line "
                         f"{number}: {error}") from None
    require(len(times) > SKIPPED, f"--calibrate {path} has {len(times)} steps; the first {SKIPPED} "
            "warm up, so it needs more")
    return median(times[SKIPPED:])
