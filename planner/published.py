"""Published runs beside their predictions: python plan.py --published

A star marks the rows on which the fractions in hardware.py were fitted: four numbers on six rows
of A100s, one number on one row of H100s. The others are predictions. Microbatches and chunks that a
paper does not give (?) are those with the fastest prediction. (2205.05198 gives chunks for 175B and
530B. With one chunk instead of two, 1T would be off by 18% and 13%; 530B by 20% and 14%.)
"""

import math
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from planner.costs import lower_bound, step_flops, step_time
from planner.hardware import DEVICES, MODELS
from planner.memory import Job, Layout

# arXiv and table; model, GPUs, sequences of a step, tokens of a sequence; tp, pp, cp, ZeRO stage;
# chunks, sequences of a microbatch; recompute; TFLOP/s per GPU (TF) or seconds of a step (s)
TABLE = """
2104.04473:t1   megatron-1.7b     32   512   2048   1   1   1   0    1   ?  full         137 TF *
2104.04473:t1   megatron-3.6b     64   512   2048   2   1   1   0    1   ?  full         138 TF
2104.04473:t1   megatron-7.5b    128   512   2048   4   1   1   0    1   ?  full         142 TF
2104.04473:t1   megatron-18b     256  1024   2048   8   1   1   0    1   ?  full         135 TF
2104.04473:t1   megatron-39b     512  1536   2048   8   2   1   0    ?   ?  full         138 TF
2104.04473:t1   megatron-76b    1024  1792   2048   8   4   1   0    ?   ?  full         140 TF
2104.04473:t1   megatron-146b   1536  2304   2048   8   8   1   0    ?   ?  full         148 TF *
2104.04473:t1   megatron-310b   1920  2160   2048   8  16   1   0    ?   ?  full         155 TF
2104.04473:t1   megatron-530b   2520  2520   2048   8  35   1   0    ?   ?  full         163 TF
2104.04473:t1   megatron-1t     3072  3072   2048   8  64   1   0    ?   ?  full         163 TF
2104.04473:t2   gpt3-175b        384  1536   2048   8  12   1   0    ?   ?  full         153 TF
2104.04473:t2   gpt3-175b        768  1536   2048   8  12   1   0    ?   ?  full         149 TF
2104.04473:t2   gpt3-175b       1536  1536   2048   8  12   1   0    ?   ?  full         141 TF *
2104.04473:t2   megatron-530b    560  2240   2048   8  35   1   0    ?   ?  full         171 TF
2104.04473:t2   megatron-530b   1120  2240   2048   8  35   1   0    ?   ?  full         167 TF
2104.04473:t2   megatron-530b   2240  2240   2048   8  35   1   0    ?   ?  full         159 TF
2104.04473:t2   gpt3-175b        384  1536   2048   1   1   1   3    1   4  full         144 TF
2104.04473:t2   gpt3-175b        768  1536   2048   1   1   1   3    1   2  full          88 TF *
2104.04473:t2   gpt3-175b       1536  1536   2048   1   1   1   3    1   1  full          44 TF
2104.04473:t2   megatron-530b    640  2560   2048   1   1   1   3    1   4  full         138 TF
2104.04473:t2   megatron-530b   1120  2240   2048   1   1   1   3    1   2  full          98 TF
2104.04473:t2   megatron-530b   2240  2240   2048   1   1   1   3    1   1  full          48 TF
2205.05198:t5   megatron-22b       8     4   2048   8   1   1   0    1   4  full        1.42 s  *
2205.05198:t5   megatron-22b       8     4   2048   8   1   1   0    1   4  selective    1.1 s
2205.05198:t5   gpt3-175b         64    64   2048   8   8   1   0    3   1  full       18.13 s
2205.05198:t5   gpt3-175b         64    64   2048   8   8   1   0    3   1  selective  13.75 s
2205.05198:t5   megatron-530b    280   280   2048   8  35   1   0    3   1  full       49.05 s  *
2205.05198:t5   megatron-530b    280   280   2048   8  35   1   0    3   1  selective  37.83 s
2205.05198:t5   megatron-1t      512   512   2048   8  64   1   0    ?   1  full       94.42 s
2205.05198:t5   megatron-1t      512   512   2048   8  64   1   0    ?   1  selective  71.49 s
2205.05198:s6.3  megatron-530b   2240  2240   2048   8  35   1   0    3   1  selective  39.15 s
2407.21783:t4   llama-405b      8192  2048   8192   8  16   1   1    ?   1  none         430 TF *
2407.21783:t4   llama-405b     16384  2048   8192   8  16   1   1    ?   1  none         400 TF
2407.21783:t4   llama-405b     16384   128 131072   8  16  16   1    ?   1  none         380 TF
"""


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


RUNS = [read(line) for line in TABLE.strip().splitlines()]


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


def predict(run, device=None):
    """(prediction in the run's unit, layout)."""
    job, device = run.job, device or DEVICES[run.device]
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
