"""Published runs beside their predictions: python plan.py --published

A star marks the rows on which the fractions in hardware.py were fitted: four numbers on six rows
of A100s, one number on one row of H100s. The others are predictions. Microbatches and chunks that a
paper does not give are those with the fastest prediction. (2205.05198 gives chunks for 175B and
530B. With one chunk instead of two, 1T would be off by 18% and 13%; 530B by 20% and 14%.)
"""

import math
from dataclasses import replace
from typing import NamedTuple

from planner.costs import lower_bound, step_flops, step_time
from planner.hardware import DEVICES, MODELS
from planner.memory import Job, Layout


class Run(NamedTuple):
    source: str
    model: str
    gpus: int
    batch: int
    layout: Layout  # microbatches and chunks are 0 if the source does not give them
    value: float  # published
    unit: str  # "TF": TFLOP/s per GPU; "s": seconds of a step
    fitted: bool = False
    device: str = "a100-80"
    attention: str = "naive"
    block_size: int = 2048


def megatron(model, gpus, batch, tp, pp, value, fitted=False, source="2104.04473, table 1"):
    layout = Layout(gpus // tp // pp, tp, pp, schedule="interleaved" if pp > 1 else "1f1b",
                    chunks=0, microbatches=0, recompute="full")
    return Run(source, model, gpus, batch, layout, value, "TF", fitted)


def ptd(model, gpus, batch, pp, value, fitted=False):
    return megatron(model, gpus, batch, 8, pp, value, fitted, "2104.04473, table 2")


def zero3(model, gpus, batch, b, value, fitted=False):
    layout = Layout(gpus, zero=3, microbatches=batch // gpus // b, recompute="full")
    return Run("2104.04473, table 2", model, gpus, batch, layout, value, "TF", fitted)


def korthikanti(model, pp, chunks, batch, b, full, selective, fitted=(), dp=1):
    layout = Layout(dp, 8, pp, schedule="interleaved" if pp > 1 else "1f1b", chunks=chunks,
                    microbatches=batch // dp // b, recompute="full")
    source = "2205.05198, table 5" if dp == 1 else "2205.05198, section 6.3"
    both = {"full": layout, "selective": layout._replace(sp=True, recompute="selective")}
    values = {"full": full, "selective": selective}
    return [Run(source, model, dp * 8 * pp, batch, both[how], value, "s", how in fitted)
            for how, value in values.items() if value]


def llama3(gpus, dp, cp, block_size, batch, value, fitted=False):
    layout = Layout(dp, 8, 16, cp, sp=True, zero=1, schedule="interleaved", chunks=0,
                    microbatches=batch)
    return Run("2407.21783, table 4", "llama-405b", gpus, batch * dp, layout, value, "TF", fitted,
               "h100", "flash", block_size)


RUNS = [
    megatron("megatron-1.7b", 32, 512, 1, 1, 137, True),
    megatron("megatron-3.6b", 64, 512, 2, 1, 138),
    megatron("megatron-7.5b", 128, 512, 4, 1, 142),
    megatron("megatron-18b", 256, 1024, 8, 1, 135),
    megatron("megatron-39b", 512, 1536, 8, 2, 138),
    megatron("megatron-76b", 1024, 1792, 8, 4, 140),
    megatron("megatron-146b", 1536, 2304, 8, 8, 148, True),
    megatron("megatron-310b", 1920, 2160, 8, 16, 155),
    megatron("megatron-530b", 2520, 2520, 8, 35, 163),
    megatron("megatron-1t", 3072, 3072, 8, 64, 163),
    ptd("gpt3-175b", 384, 1536, 12, 153), ptd("gpt3-175b", 768, 1536, 12, 149),
    ptd("gpt3-175b", 1536, 1536, 12, 141, True),
    ptd("megatron-530b", 560, 2240, 35, 171), ptd("megatron-530b", 1120, 2240, 35, 167),
    ptd("megatron-530b", 2240, 2240, 35, 159),
    zero3("gpt3-175b", 384, 1536, 4, 144), zero3("gpt3-175b", 768, 1536, 2, 88, True),
    zero3("gpt3-175b", 1536, 1536, 1, 44),
    zero3("megatron-530b", 640, 2560, 4, 138), zero3("megatron-530b", 1120, 2240, 2, 98),
    zero3("megatron-530b", 2240, 2240, 1, 48),
    *korthikanti("megatron-22b", 1, 1, 4, 4, 1.42, 1.10, ("full",)),
    *korthikanti("gpt3-175b", 8, 3, 64, 1, 18.13, 13.75),
    *korthikanti("megatron-530b", 35, 3, 280, 1, 49.05, 37.83, ("full",)),
    *korthikanti("megatron-1t", 64, 0, 512, 1, 94.42, 71.49),
    *korthikanti("megatron-530b", 35, 3, 2240, 1, 0, 39.15, dp=8),
    llama3(8192, 64, 1, 8192, 32, 430, True), llama3(16384, 128, 1, 8192, 16, 400),
    llama3(16384, 8, 16, 131072, 16, 380),
]


def candidates(run):
    """All layouts that agree with the source."""
    layout, layers = run.layout, MODELS[run.model].n_layer + 2
    share = run.batch // layout.dp  # sequences of a data rank
    counts, chunks = [layout.microbatches], [layout.chunks]
    if not layout.microbatches:
        counts = [share // b for b in (1, 2, 4, 8, 16) if share % b == 0]
    if not layout.chunks:
        fitting = [v for v in (1, 2, 3, 4, 5, 8) if v * layout.pp <= layers]
        chunks = fitting if layout.pp > 1 else [1]
    for m in counts:
        for v in chunks:
            if layout.schedule != "interleaved" or m % layout.pp == 0:
                for how in ("ring", "all-to-all") if layout.cp > 1 else ("ring",):
                    yield layout._replace(microbatches=m, chunks=v, cp_attention=how)


def predict(run, device=None):
    """(prediction in the run's unit, layout)."""
    model = replace(MODELS[run.model], block_size=run.block_size)
    job, device = Job(model, run.batch, run.attention), device or DEVICES[run.device]
    seconds, layout = math.inf, None
    for bound, candidate in sorted((lower_bound(job, c, device), c) for c in candidates(run)):
        if bound < seconds:
            seconds, layout = min((seconds, layout), (step_time(job, candidate, device), candidate))
    if run.unit == "s":
        return seconds, layout
    return step_flops(job, run.layout.recompute) / seconds / run.gpus / 1e12, layout


def main():
    print(f"{'arXiv':24}{'model':15}{'GPUs':>6} {'dp':>4} {'tp':>2} {'pp':>3} {'cp':>3} "
          f"{'zero':>4}  {'recompute':10}{'published':>10} {'predicted':>10} {'error':>7}")
    errors = []
    for run in RUNS:
        value, layout = predict(run)
        error = value / run.value - 1
        if not run.fitted:
            errors.append(abs(error))
        print(f"{run.source:24}{run.model:15}{run.gpus:6} {layout.dp:4} {layout.tp:2} "
              f"{layout.pp:3} {layout.cp:3} {layout.zero:4}  {layout.recompute:10}"
              f"{run.value:7g} {run.unit:2} {value:7.4g} {run.unit:2} {error:+7.1%}"
              + " *" * run.fitted, flush=True)
    errors.sort()
    print(f"{len(errors)} predicted: median error {errors[len(errors) // 2]:.1%}, largest "
          f"{errors[-1]:.1%}, {sum(e <= 0.1 for e in errors)} within 10%; * fitted, "
          f"{len(RUNS) - len(errors)} of {len(RUNS)}")
