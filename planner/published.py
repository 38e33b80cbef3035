"""Published runs beside their predictions: python plan.py --published

published.txt has the runs, their sources and what their software does ("traits"). The fractions in
hardware.py are fitted to all runs but those held out. Beside each prediction stands a baseline: one
constant MFU for each kind of GPU, the median of the fitted runs. Where a source leaves a value open
(?), the value is taken that predicts the fastest step that fits into memory. What these programs do
and train.py does not is in this file.
"""

import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

from planner.costs import RESIDUALS, Costs, Time, on_node, step_flops
from planner.hardware import DEVICES, MODELS, Llama, gpt
from planner.memory import Job, Layout, Part, shape_of, tokens_of
from planner.table import table

ATTENTION = {  # speed of fused attention to FlashAttention-2's
    "flash1": 0.55,  # before July 2023; fitted
    "fa3": 1.6}  # FlashAttention-3, and cuDNN


class Run(NamedTuple):
    source: str  # name, place and year
    status: str  # "fitted", "held out third" (the first two hold-outs are fitted by now), ...
    traits: tuple  # what its software does; published.txt explains them
    model: str
    device: str
    job: Job
    layout: Layout
    recompute: str  # "selective": the S x S scores, which Layout does not know
    value: float
    unit: str
    reason: str  # why the prediction is off by more than 15%

    @property
    def machine(self):
        """The Device, with the source's own network."""
        name, _, network = self.device.partition("@")
        return replace(DEVICES[name], **{"network": float(network)} if network else {})

    @property
    def seconds(self):
        """Seconds of a step, from the published value in its unit."""
        ranks = self.layout.ranks
        if self.unit == "s":
            return self.value
        if self.unit == "t/s":  # tokens per second and GPU
            return self.job.batch_size * self.job.model.block_size / self.value / ranks
        if self.unit == "MFU":  # percent
            rate = self.value * 1e12 * (self.machine.tflops / 100)
        else:  # TF, with the FLOPs that are computed again; mTF, without
            rate = self.value * 1e12
        again = self.unit == "TF" and self.layout.recompute
        return step_flops(self.job, again) / ranks / rate

    @property
    def mfu(self):
        """The published MFU: without FLOPs that are computed again."""
        done = step_flops(self.job) / self.layout.ranks / self.seconds
        return done / 1e12 / self.machine.tflops


def model_of(words, S):
    """The model of a name, or of gpt:layers,heads,width,vocabulary[,MLP,key-value heads]."""
    if words in MODELS:
        return replace(MODELS[words], block_size=S)
    L, heads, h, V, *more = map(int, words.split(":")[1].split(","))
    return Llama(V, S, L, heads, h, 0, 2, *more) if more else gpt(L, heads, h, V, S)


def read(lines):
    """The Runs of the table."""
    for line in lines:
        if line.startswith("="):
            source, status, traits = line.strip("= ").rsplit(" | ", 2)
        elif line.strip() and not line.startswith("#"):
            row, _, reason = line.partition("|")
            # the columns of published.txt; more: pp cp zero chunks b, some with a ? behind them
            model, gpus, device, batch, S, tp, *more, recompute, grads, value, unit = row.split()
            pp, cp, zero, chunks, b = (int(number.rstrip("?")) for number in more)
            T = int(tp.rstrip("s"))
            dp = int(gpus) // (T * pp * cp)
            schedule = "1f1b" if chunks == 1 else "interleaved"
            layout = Layout(dp, T, pp, cp, 1, "s" in tp, zero, schedule, chunks,
                            int(batch) // dp // b, recompute == "full")
            job = Job(model_of(model, int(S)), int(batch), grad_width=int(grads) // 8)
            yield Run(source, status, tuple(traits.split()), model, device, job, layout,
                      recompute, float(value), unit, reason.strip())


RUNS = list(read(Path(__file__).with_suffix(".txt").read_text().splitlines()))


class PublishedCosts(Costs):
    """Costs of a program that is not train.py."""

    def __init__(self, run):
        self.run = run
        device, traits = run.machine, run.traits
        # "4ports": GPUs of a node share 4 ports. A ring uses one port per rank that it has on the
        # node. NCCL chooses each ring's ports by itself, so all rings choose the same ones
        ports = next((int(trait[0]) for trait in traits if trait[1:] == "ports"), 1)
        network = device.network * min(1.0, on_node(device, run.layout.tp, run.layout.dp) / ports)
        speed = math.prod(ATTENTION[trait] for trait in traits if trait in ATTENTION)  # or 1
        device = replace(device, network=network, f_attention=device.f_attention * speed)
        super().__init__(run.job, device)
        if "eager" in traits:
            # Counted in PyTorch's own operations. For each element an RMSNorm in 32 bits moves 18
            # numbers of 16 bits, SwiGLU 5; rotary positions move 10 for each of queries and keys
            h, shape = run.job.model.n_embd, shape_of(run.job.model)
            self.moved_by_norms = (2 * 18 + RESIDUALS) * h
            in_attention = 2 * (h + shape.kv)  # as in Costs
            self.moved_inside = 5 * shape.inner + 10 * (h + shape.kv) + in_attention

    def exposed(self, messages, computing, axis):
        traits = self.run.traits
        if axis == "tp" and "overlapped" in traits:  # in pieces, beside their own product
            return self.device.unhidden * messages
        if axis == "tp" and "alone" in traits or axis == "dp" and "after" in traits:
            return messages  # beside nothing
        return super().exposed(messages, computing, axis)

    def parts(self, layout):
        """"even": each pipeline rank has as many blocks. "counted": the two ends count as blocks,
        so that their ranks have one block less. Else train.py's cut."""
        traits, L, P = self.run.traits, self.job.model.n_layer, layout.pp
        if P > 1 and "counted" in traits:
            each = (L + 2) / P
            return {Part(1, each - 1, 0), Part(0, each, 0), Part(0, each - 1, 1)}
        if P > 1 and "even" in traits:
            return {Part(1, L / P, 0), Part(0, L / P, 0), Part(0, L / P, 1)}
        return super().parts(layout)

    def boundary(self, layout):
        """Each tensor-parallel rank sends 1/T of a message; without --sp the receivers then gather
        the whole (arXiv 2104.04473, section 4.1)."""
        sent = super().boundary(layout._replace(sp=True))
        nbytes = tokens_of(self.job, layout) * self.job.model.n_embd * self.job.width
        return sent if layout.sp else sent + self.ring(1, layout.tp, nbytes)

    def attention(self, n, T):
        if "naive" not in self.run.traits:
            return super().attention(n, T)
        model = self.job.model  # S x S scores are moved 5.5 times forward, 9 times backward
        flops = 4 * n * model.block_size * model.n_embd / T
        moved = n * model.block_size * model.n_head / T * self.job.width
        return self.compute(flops, moved=5.5 * moved), self.compute(2 * flops, moved=9 * moved)

    def recomputed(self, layout, forward, attention):
        selective = self.run.recompute == "selective"
        return Time(attention) if selective else super().recomputed(layout, forward, attention)


def errors(runs):
    """[(run, error of the prediction, error of the baseline)]: predicted speed over the published,
    less 1. Above 0 is too fast. The baseline is the median MFU of the fitted runs on this GPU, or
    of all fitted runs if there are none."""
    fitted = [(run.machine.tflops, run.mfu) for run in RUNS if run.status == "fitted"]
    rows = []
    for run in runs:
        same_gpu = [mfu for tflops, mfu in fitted if tflops == run.machine.tflops]
        usual = median(same_gpu or [mfu for _, mfu in fitted])
        seconds = PublishedCosts(run).step_time(run.layout)
        rows.append((run, run.seconds / seconds - 1, usual / run.mfu - 1))
    return rows


HEAD = ("model GPUs device S dp tp pp cp zero chunks b recompute published predicted in error "
        "baseline").split()


def row_of(run, error, baseline):
    """A run's cells of the table."""
    layout = run.layout
    # error is of a speed: a unit that is a time has its inverse
    predicted = run.value / (1 + error) if run.unit == "s" else run.value * (1 + error)
    b = run.job.batch_size // layout.dp // layout.microbatches
    cells = (run.model, layout.ranks, run.device, run.job.model.block_size, layout.dp, layout.tp,
             layout.pp, layout.cp, layout.zero, layout.chunks, b, run.recompute, f"{run.value:g}",
             f"{predicted:.4g}", run.unit, f"{error:+.1%}", f"{baseline:+.0%}")
    return [str(cell) for cell in cells]


def main():
    found = errors(RUNS)
    for (source, status), group in groupby(found, lambda row: (row[0].source, row[0].status)):
        group = list(group)
        print(table(f"{source}: {status}", [HEAD, *(row_of(*row) for row in group)]))
        for run, error, _ in group:
            if run.reason:
                print(f"  {error:+.1%}: {run.reason}")
    for status in dict.fromkeys(run.status for run in RUNS):
        rows = [row for row in found if row[0].status == status]
        sources = {run.source for run, _, _ in rows}
        sizes = [abs(error) for _, error, _ in rows]
        baseline = [abs(error) for _, _, error in rows]
        print(f"{status}: {len(rows)} rows of {len(sources)} sources, median error "
              f"{median(sizes):.1%}, {sum(size <= 0.15 for size in sizes)} within 15%, largest "
              f"{max(sizes):.0%}; baseline {median(baseline):.1%}")
