"""Published runs beside their predictions: python plan.py --published

published.txt has the runs and their sources. The fractions in hardware.py were fitted on whole
sources; the others are held out. Beside each prediction stands that of a baseline: one constant MFU
for each kind of GPU, the median of the fitted runs. What a source leaves open (?) is what predicts
the fastest step that fits. What only these runs do, and train.py does not, is here.
"""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from planner.costs import Costs, Time, step_flops
from planner.hardware import DEVICES, MODELS, Llama, gpt
from planner.memory import (Job, Layout, Part, memory_of_rank, parts_of, saved_by_block, shape_of,
                            tokens_of)
from sizes import GPTConfig

FLASH1 = 0.64  # fitted: speed of fused attention before July 2023 to that of FlashAttention-2's
SLOW = 0.093  # fitted: what 2021's ZeRO-3 reaches of a node's ports; one is an eighth


class Source(NamedTuple):
    name: str
    year: str
    fitted: bool
    traits: tuple[str, ...]  # of its software, as published.txt explains them


class Run(NamedTuple):
    source: Source
    model: str
    device: str
    gpus: int
    job: Job
    layout: Layout  # microbatches and chunks are 0 if the source does not give them
    recompute: str  # "selective": the S x S scores, which Layout does not know
    value: float
    unit: str
    reason: str  # why the prediction is off by more than 15%

    @property
    def tokens(self):
        return self.job.batch_size * self.job.model.block_size

    def in_unit(self, seconds):
        """Seconds of a step in the unit of the published value, and the other way round."""
        if self.unit == "s":
            return seconds
        per_gpu = seconds * self.gpus
        if self.unit == "t/s":
            return self.tokens / per_gpu
        flops = step_flops(self.job, "full" if self.unit == "TF" and self.recompute == "full"
                           else "none")
        peak = DEVICES[self.device.split("@")[0]].tflops
        return flops / per_gpu / 1e12 * (100 / peak if self.unit == "MFU" else 1)


def model_of(words, S):
    """The model of a name, or of gpt:layers,heads,width,vocabulary[,MLP,key-value heads]."""
    kind, _, numbers = words.partition(":")
    if not numbers:
        return replace(MODELS[kind], block_size=S)
    L, heads, h, V, *more = map(int, numbers.split(","))
    return Llama(V, S, L, heads, h, 0, 2, *more) if more else gpt(L, heads, h, V, S)


def read(source, line):
    """A Run from a line of the table."""
    line, _, reason = line.partition("|")
    model, gpus, device, batch, S, tp, *numbers, recompute, grads, value, unit = line.split()
    pp, cp, zero, chunks, b = (int(n.replace("?", "0")) for n in numbers)
    gpus, batch, T = int(gpus), int(batch), int(tp.rstrip("s"))
    dp = gpus // (T * pp * cp)
    layout = Layout(dp, T, pp, cp, sp="s" in tp, zero=zero, chunks=chunks,
                    schedule="1f1b" if chunks == 1 else "interleaved",
                    microbatches=b and batch // dp // b,
                    recompute="full" if recompute == "full" else "none")
    job = Job(model_of(model, int(S)), batch, wide=grads == "32")
    return Run(source, model, device, gpus, job, layout, recompute, float(value), unit, reason.strip())


def read_all(lines):
    for line in lines:
        if line.startswith("="):
            name, year, fitted, traits = line.strip("= ").split(" | ")
            source = Source(name, year, fitted == "fitted", tuple(traits.split()))
        elif line.strip() and not line.startswith("#"):
            yield read(source, line)


RUNS = list(read_all(Path(__file__).with_suffix(".txt").read_text().splitlines()))


class PublishedCosts(Costs):
    """Costs of a program that is not train.py."""

    def __init__(self, run, device):
        super().__init__(run.job, device)
        if "flash1" in run.source.traits:
            self.device = replace(device, f_attention=device.f_attention * FLASH1)
        self.run, self.naive = run, "naive" in run.source.traits
        if "eager" in run.source.traits:  # see published.txt; counted in PyTorch's own operations:
            # RMSNorm in 32 bits moves 18 numbers of 16 bits for each element, rotary positions 10
            # for each of queries and keys, SwiGLU 5
            h, (kv, inner, *_) = run.job.model.n_embd, shape_of(run.job.model)
            self.moved = (2 * 18 + 6) * h, 5 * inner + 12 * (h + kv)

    def parts(self, layout):
        """Pipeline ranks have as many blocks each; "counted": the ends count as blocks, too."""
        counted = "counted" in self.run.source.traits
        each = (self.job.model.n_layer + 2 * counted) / layout.pp
        if layout.pp == 1 or not (counted or "even" in self.run.source.traits):
            return super().parts(layout)
        return {Part(1, each - counted, 0), Part(0, each, 0), Part(0, each - counted, 1)}

    def attention(self, n, T):
        if not self.naive:
            return super().attention(n, T)
        model = self.job.model  # S x S scores are moved 5.5 times forward, 9 times backward
        flops = 4 * n * model.block_size * model.n_embd / T
        moved = n * model.block_size * model.n_head / T * self.job.width
        return (self.compute(flops, moved=5.5 * moved), self.compute(2 * flops, moved=9 * moved))

    def recomputed(self, layout, forward, backward, attention):
        if self.run.recompute == "selective":
            return forward, backward.plus(Time(attention))
        return super().recomputed(layout, forward, backward, attention)


def saved_by_naive(model, layout, recompute):
    """Bytes per token that a block of 2021 saves beyond memory.saved_by_block: masks of dropout
    and, unless they are recomputed, scores; not the logsumexp (arXiv 2205.05198: 34 h + 5 S heads
    at T = 1)."""
    T, scores = layout.tp, 0 if recompute == "selective" else 5 * model.block_size
    masks = 2 * model.n_embd / (T if layout.sp else 1)
    return masks + model.n_head * (scores - 4) / T


def held(run, layout):
    """Bytes on the fullest rank. Published programs hold other things than train.py: the logits of
    all tokens and not of a chunk, in 16 bits, in 32, and a gradient ("inplace": the first only); no
    32-bit copy of all gradients; under ZeRO-3 no 16-bit copy of the master weights."""
    model, n, most = run.job.model, tokens_of(run.job, layout), 0
    of_logit = 2 if "inplace" in run.source.traits else 2 + 4 + 4
    for rank in (0, layout.pp - 1):
        parts = memory_of_rank(run.job._replace(wide=True), layout, rank)  # makes no such copy
        head = parts_of(model, layout.schedule, layout.pp, layout.chunks)[rank].head
        need = parts["total"] + head * n * model.vocab_size / layout.tp * of_logit
        need -= parts["weights"] * (layout.zero == 3) + parts["gradients"] / 2 * (not run.job.wide)
        if "naive" in run.source.traits:
            saved = saved_by_block(run.job, layout, layout.recompute)
            more = saved_by_naive(model, layout, run.recompute) / saved
            need += n * saved_by_naive(model, layout, "none")  # of a block under way
            need += (run.recompute != "full") * parts["activations"] * more
        most = max(most, need)
    return most


def candidates(run):
    """All layouts that agree with the source."""
    layout, layers = run.layout, run.job.model.n_layer + 2
    share = run.job.batch_size // layout.dp  # sequences of a data rank
    counts, chunks = [layout.microbatches], [layout.chunks]
    if not layout.microbatches:
        counts = [share // b for b in (1, 2, 4, 8, 16) if share % b == 0]
    if not layout.chunks:  # of blocks, without its ends in "counted"
        blocks = layers - 2 * ("counted" not in run.source.traits)
        chunks = [v for v in range(1, 9) if blocks % (v * layout.pp) == 0]
    for m, v, how in product(counts, chunks, ("ring", "all-to-all")[:layout.cp]):
        schedule = "1f1b" if v == 1 else "interleaved"
        if v == 1 or m % layout.pp == 0:
            yield layout._replace(microbatches=m, chunks=v, schedule=schedule, cp_attention=how)


def device_of(run):
    name, _, network = run.device.partition("@")
    device = DEVICES[name]
    return replace(device, network=float(network)) if network else device


def predict(run):
    """(seconds of a step, layout)."""
    device = device_of(run)
    if "slow" in run.source.traits:
        device = replace(device, f_network=device.f_network * SLOW)
    costs = PublishedCosts(run, device)
    seconds, layout = math.inf, None
    agree = list(candidates(run))
    fit = [c for c in agree if held(run, c) <= 1e9 * device.gb]
    for bound, candidate in sorted((costs.lower_bound(c), c) for c in fit or agree):
        if bound < seconds:
            seconds, layout = min((seconds, layout), (costs.step_time(candidate), candidate))
    return seconds, layout


def mfu(run, seconds):
    """Of a step: FLOPs of the model, without those computed again, over the device's peak."""
    peak = DEVICES[run.device.split("@")[0]].tflops
    return step_flops(run.job) / run.gpus / seconds / 1e12 / peak


def baselines(runs):
    """{kind of GPU: the median MFU of its fitted runs}."""
    kinds = {kind_of(run) for run in runs}
    return {kind: median(mfu(run, run.in_unit(run.value)) for run in runs
                         if run.source.fitted and kind_of(run) == kind) for kind in kinds}


def kind_of(run):
    return run.device.split("-")[0].split("@")[0]


def errors(runs):
    """[(run, layout, error of the prediction, error of the baseline)]: predicted speed over the
    published, less 1, so above 0 is too fast."""
    constant = baselines(RUNS)
    for run in runs:
        seconds, layout = predict(run)
        published = run.in_unit(run.value)
        yield (run, layout, published / seconds - 1,
               constant[kind_of(run)] / mfu(run, published) - 1)


def line(run, layout, error, baseline):
    """A row of the table, below HEAD."""
    predicted = run.value * (1 / (1 + error) if run.unit == "s" else 1 + error)
    b = run.job.batch_size / layout.dp / layout.microbatches
    return (f"  {run.model:33}{run.gpus:5} {run.device:13}{run.job.model.block_size:6}{layout.dp:5}"
            f"{layout.tp:3}{layout.pp:3}{layout.cp:3}{layout.zero:5}{layout.chunks:7}{b:4g} "
            f"{run.recompute:10}{run.value:9g}{predicted:10.4g} {run.unit:3}{error:+8.1%}"
            f"{baseline:+8.0%}")


HEAD = ("  model                             GPUs device            S   dp tp pp cp zero chunks   b "
        "recompute published predicted      error baseline")


def summed_up(found):
    """Lines of text about fitted or held-out rows."""
    for name, fitted in (("fitted", True), ("held out", False)):
        chosen = [row for row in found if row[0].source.fitted == fitted]
        sizes, baseline = ([abs(row[i]) for row in chosen] for i in (2, 3))
        near = sum(size <= 0.15 for size in sizes)
        yield (f"{name}: {len(chosen)} rows of {len({row[0].source for row in chosen})} sources, "
               f"median error {median(sizes):.1%}, {near} within 15%, largest {max(sizes):.0%}; "
               f"baseline {median(baseline):.1%}")


def main():
    found, source = list(errors(RUNS)), None
    for row in found:
        if row[0].source != source:
            source = row[0].source
            print(f"{source.name}, {source.year}: {'fitted' if source.fitted else 'held out'}", HEAD,
                  sep="\n")
        print(line(*row))
        if abs(row[2]) > 0.15:
            print(f"    {row[0].reason or 'no reason is known'}")
    print(*summed_up(found), sep="\n")
