"""Published runs beside their predictions: python plan.py --published

published.txt has the runs, their sources and what their software does ("traits"). The fractions in
hardware.py are fitted to all but those held out. Beside each prediction stands a baseline: one
constant MFU for each kind of GPU, the median of the fitted runs. What a source leaves open (?) is
what predicts the fastest step that fits. What only these runs do, and train.py does not, is here.
"""

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
    "flash1": 0.55, "fa3": 1.6}  # before July 2023, fitted; FlashAttention-3's and cuDNN's


class Run(NamedTuple):
    source: str  # with its year
    status: str  # fitted, or held out third: the hold-outs before are fitted by now
    traits: tuple  # of its software, as published.txt explains them
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
        """Of a step: the published value, or what it follows from."""
        if self.unit in ("s", "t/s"):
            tokens = self.job.batch_size * self.job.model.block_size
            return self.value if self.unit == "s" else tokens / self.value / self.layout.ranks
        rate = self.value * 1e12 * (self.machine.tflops / 100 if self.unit == "MFU" else 1)
        again = self.unit == "TF" and self.layout.recompute
        return step_flops(self.job, again) / self.layout.ranks / rate

    @property
    def mfu(self):
        """The published one, without FLOPs that are computed again."""
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
        device, self.run, traits = run.machine, run, run.traits
        ports = next((int(trait[0]) for trait in traits if trait[1:] == "ports"), 1)
        # a ring takes as many ports as it has ranks on a node, and all rings of the node the same
        # of fewer ports than GPUs: NCCL looks for each ring's alone
        network = device.network * min(1.0, on_node(device, run.layout.tp, run.layout.dp) / ports)
        speed, = [ATTENTION[trait] for trait in traits if trait in ATTENTION] or [1.0]
        device = replace(device, network=network, f_attention=device.f_attention * speed)
        super().__init__(run.job, device)
        if "eager" in traits:  # counted in PyTorch's own operations: RMSNorm in 32 bits moves 18
            # numbers of 16 bits for each element, rotary positions 10 for each of queries and keys
            h, (kv, inner, *_) = run.job.model.n_embd, shape_of(run.job.model)
            self.moved_by_norms = (2 * 18 + RESIDUALS) * h
            self.moved_inside = 5 * inner + (10 + 2) * (h + kv)

    def exposed(self, messages, computing, axis):
        if axis == "tp" and "overlapped" in self.run.traits:  # in pieces, beside their own product
            return self.device.unhidden * messages
        alone = {"tp": "alone", "dp": "after"}.get(axis) in self.run.traits
        return messages if alone else super().exposed(messages, computing, axis)

    def parts(self, layout):
        """Pipeline ranks have as many blocks each; "counted": the ends count as blocks, too."""
        counted = "counted" in self.run.traits
        each = (self.job.model.n_layer + 2 * counted) / layout.pp
        if layout.pp == 1 or not (counted or "even" in self.run.traits):
            return super().parts(layout)
        return {Part(1, each - counted, 0), Part(0, each, 0), Part(0, each - counted, 1)}

    def boundary(self, layout):
        """Ranks each send 1/T of a message and gather the rest (arXiv 2104.04473, section 4.1)."""
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
    less 1, so above 0 is too fast."""
    fitted = [(run.machine.tflops, run.mfu) for run in RUNS if run.status == "fitted"]
    return [(run, run.seconds / PublishedCosts(run).step_time(run.layout) - 1,
             median([mfu for tflops, mfu in fitted if tflops == run.machine.tflops]
                    or [mfu for _, mfu in fitted]) / run.mfu - 1) for run in runs]


def main():
    found = errors(RUNS)
    for (source, status), group in groupby(found, lambda row: row[0][:2]):
        why, rows = [], ["model GPUs device S dp tp pp cp zero chunks b recompute published "
                         "predicted in error baseline".split()]
        for run, error, baseline in group:
            to, layout = run.value * (1 + error) ** (1 - 2 * (run.unit == "s")), run.layout
            rows.append([*map(str, (
                run.model, layout.ranks, run.device, run.job.model.block_size, *layout[:4],
                layout.zero, layout.chunks, run.job.batch_size // layout.dp // layout.microbatches,
                run.recompute, f"{run.value:g}", f"{to:.4g}", run.unit, f"{error:+.1%}",
                f"{baseline:+.0%}"))])
            why += [f"  {error:+.1%}: {run.reason}"] * bool(run.reason)
        print(table(f"{source}: {status}", rows), *why, sep="\n")
    for name in dict.fromkeys(run.status for run in RUNS):
        rows = [row for row in found if row[0].status == name]
        sizes, baseline = ([abs(row[i]) for row in rows] for i in (1, 2))
        print(f"{name}: {len(rows)} rows of {len({row[0].source for row in rows})} sources, median "
              f"error {median(sizes):.1%}, {sum(size <= 0.15 for size in sizes)} within 15%, "
              f"largest {max(sizes):.0%}; baseline {median(baseline):.1%}")
