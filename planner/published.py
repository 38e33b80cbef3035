"""Published runs beside their predictions: python plan.py --published

published.txt has the runs. A star marks the rows on which the fractions in hardware.py were fitted:
four numbers on six rows of A100s, one number on one row of H100s. The others are predictions.
Microbatches and chunks that a paper does not give (?) are those with the fastest prediction.
(2205.05198 gives chunks for 175B and 530B. With one chunk instead of two, 1T would be off by 18%
and 13%; 530B by 20% and 14%.)
"""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from planner.costs import lower_bound, step_flops, step_time
from planner.hardware import DEVICES, MODELS
from planner.memory import Job, Layout


class Run(NamedTuple):
    source: str
    model: str
    gpus: int
    job: Job
    layout: Layout  # microbatches and chunks are 0 if the source does not give them
    value: float
    unit: str
    fitted: bool
    device: str


def read(line):
    """A Run from a line of the table."""
    source, model, *numbers, recompute, value, unit = line.rstrip("* ").split()
    gpus, batch, S, tp, pp, cp, zero, chunks, b = (int(n.replace("?", "0")) for n in numbers)
    dp = gpus // (tp * pp * cp)
    llama = model.startswith("llama")
    layout = Layout(dp, tp, pp, cp, sp=llama or recompute == "selective", zero=zero,
                    schedule="interleaved" if pp > 1 else "1f1b", chunks=chunks,
                    microbatches=b and batch // dp // b, recompute=recompute)
    job = Job(replace(MODELS[model], block_size=S), batch, "flash" if llama else "naive")
    return Run(source, model, gpus, job, layout, float(value), unit, "*" in line,
               "h100" if llama else "a100-80")


TABLE = Path(__file__).with_suffix(".txt").read_text().splitlines()
RUNS = [read(line) for line in TABLE if not line.startswith("#")]


def candidates(run):
    """All layouts that agree with the source."""
    layout, layers = run.layout, run.job.model.n_layer + 2
    share = run.job.batch_size // layout.dp  # sequences of a data rank
    counts, chunks = [layout.microbatches], [layout.chunks]
    if not layout.microbatches:
        counts = [share // b for b in (1, 2, 4, 8, 16) if share % b == 0]
    if layout.schedule == "interleaved":
        counts = [m for m in counts if m % layout.pp == 0]
    if not layout.chunks:
        chunks = [v for v in (1, 2, 3, 4, 5, 8) if v * layout.pp <= layers]
    for m, v in product(counts, chunks):
        for how in ("ring", "all-to-all") if layout.cp > 1 else ("ring",):
            yield layout._replace(microbatches=m, chunks=v, cp_attention=how)


def predict(run):
    """(prediction in the run's unit, layout)."""
    job, device = run.job, DEVICES[run.device]
    seconds, layout = math.inf, None
    for bound, candidate in sorted((lower_bound(job, c, device), c) for c in candidates(run)):
        if bound < seconds:
            seconds, layout = min((seconds, layout), (step_time(job, candidate, device), candidate))
    if run.unit == "s":
        return seconds, layout
    return step_flops(job, run.layout.recompute) / seconds / run.gpus / 1e12, layout


def main():
    print(f"{'arXiv':15}{'model':15}{'GPUs':>6} {'dp':>4} {'tp':>2} {'pp':>3} {'cp':>3} "
          f"{'zero':>4}  {'recompute':10}{'published':>10} {'predicted':>10} {'error':>7}")
    errors = []
    for run in RUNS:
        value, layout = predict(run)
        error = value / run.value - 1
        if not run.fitted:
            errors.append(abs(error))
        print(f"{run.source:15}{run.model:15}{run.gpus:6} {layout.dp:4} {layout.tp:2} "
              f"{layout.pp:3} {layout.cp:3} {layout.zero:4}  {layout.recompute:10}"
              f"{run.value:7g} {run.unit:2} {value:7.4g} {run.unit:2} {error:+7.1%}"
              + " *" * run.fitted, flush=True)
    errors.sort()
    print(f"{len(errors)} predicted: median error {errors[len(errors) // 2]:.1%}, largest "
          f"{errors[-1]:.1%}, {sum(e <= 0.1 for e in errors)} within 10%; * fitted, "
          f"{len(RUNS) - len(errors)} of {len(RUNS)}")
