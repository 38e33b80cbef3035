"""Published runs beside their predictions: python -m extras.planner --published

published.txt has the runs, their sources and the traits of their software; trials.txt has trials of
many layouts of one model. The fractions in hardware.py are fitted to all runs of published.txt but
those held out. Beside each prediction stands a baseline: one constant MFU for each kind of GPU, the
median of the fitted runs. Where a source leaves a value open (?), published.txt has a chosen value,
and says how it was chosen: mostly, the value of the fastest prediction that fits into memory.
PublishedCosts models how these programs differ from train.py.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

from extras.planner.calibrate import factor_of, slower
from extras.planner.costs import RESIDUALS, Costs, Time, on_node, step_flops
from extras.planner.hardware import DEVICES, MODELS, gpt, llama
from extras.planner.memory import (
    Job,
    Layout,
    Part,
    block_parameters,
    end_parameters,
    shape_of,
    tokens_of,
)
from extras.planner.mixture import Mixture
from extras.planner.table import table

ATTENTION = {  # speed of fused attention, relative to FlashAttention-2
    "flash1": 0.55,  # before July 2023; fitted
    "fa3": 1.6}  # FlashAttention-3, and cuDNN


class Run(NamedTuple):
    source: str  # name, place and year
    # "fitted": the fractions in hardware.py are fitted to this run. Any other status: the run was
    # held out, and nothing is fitted to it; published.txt explains these statuses
    status: str
    traits: tuple  # words that describe the program; published.txt explains them
    model: str
    device: str
    job: Job
    layout: Layout
    # "full", "none", "half": every other product of a block, or "selective": attention only, so its
    # S x S scores need not be saved. Layout has no value for the last two: there they count as no
    # recompute, and recomputed() adds their time
    recompute: str
    value: float  # the published speed, or seconds of a step
    unit: str  # the value's unit: s, t/s, MFU, TF or mTF; see `seconds`
    reason: str  # why the prediction is off by more than 15%; empty if it is within 15%

    @property
    def machine(self):
        """The Device, with the source's own network: "a100-80@6.25" has 6.25 GB/s for a GPU."""
        name, _, network = self.device.partition("@")
        device = DEVICES[name]
        return replace(device, network=float(network)) if network else device

    @property
    def seconds(self):
        """Seconds of a step, from the published value in its unit."""
        ranks = self.layout.ranks
        if self.unit == "s":
            return self.value
        if self.unit == "t/s":  # tokens per second and GPU
            return self.job.batch_size * self.job.model.block_size / self.value / ranks
        # rate: FLOPs per second and GPU
        if self.unit == "MFU":  # percent
            rate = self.value * 1e12 * (self.machine.tflops / 100)
        else:  # TF or mTF
            rate = self.value * 1e12
        again = self.unit == "TF" and self.layout.recompute  # TF counts recomputed FLOPs, too
        return step_flops(self.job, again) / ranks / rate

    @property
    def mfu(self):
        """The published run's MFU: FLOPs that are computed again do not count."""
        done = step_flops(self.job) / self.layout.ranks / self.seconds
        return done / 1e12 / self.machine.tflops


def model_of(words, S):
    """The model that a cell of published.txt describes, with S tokens in a sequence. A cell is a
    name of hardware.py, or a kind and sizes with commas between them:

        gpt:    layers, heads, width, vocabulary
        llama:  these four, MLP width, key-value heads
        mix:    the four of gpt, key-value heads, head width, experts, experts per token, expert
                width (each expert is whole on one rank); perhaps the width of an MLP beside them
        mixT:   the sizes of mix (the tensor ranks split each expert)
    """
    if words in MODELS:
        return replace(MODELS[words], block_size=S)
    kind, _, sizes = words.partition(":")
    if kind == "gpt":
        L, heads, h, V = map(int, sizes.split(","))
        return gpt(L, heads, h, V, S)
    if kind in ("mix", "mixT"):
        L, heads, h, V, n_kv_head, head_width, experts, top_k, width, *shared = map(
            int, sizes.split(","))
        return Mixture(V, S, L, heads, h, experts, top_k, n_kv_head=n_kv_head,
                       n_hidden=top_k * width, tied=False, head_width=head_width,
                       shared_width=sum(shared), split_experts=kind == "mixT")
    L, heads, h, V, n_hidden, n_kv_head = map(int, sizes.split(","))
    return llama(L, heads, h, n_hidden, n_kv_head, V, S)


def read(lines):
    """Yields the Runs of published.txt."""
    for line in lines:
        if line.startswith("="):  # a source, whose runs follow
            source, status, traits = line.strip("= ").rsplit(" | ", 2)
        elif line.strip() and not line.startswith("#"):
            row, _, reason = line.partition("|")
            # The columns of published.txt. A ? may stand behind the five numbers of `middle`
            model, gpus, device, batch, S, tp, *middle, recompute, grads, value, unit = row.split()
            pp, cp, zero, chunks, b = (int(number.rstrip("?")) for number in middle)
            # 8s: 8 tensor ranks with --sp. 4se8: 4 tensor ranks with --sp, and 8 expert ranks
            tp, _, ep = tp.partition("e")
            T = int(tp.rstrip("s"))
            dp = int(gpus) // (T * pp * cp)
            layout = Layout(dp=dp, tp=T, pp=pp, cp=cp, ep=int(ep or 1), sp="s" in tp, zero=zero,
                            schedule="1f1b" if chunks == 1 else "interleaved", chunks=chunks,
                            microbatches=int(batch) // dp // b, recompute=recompute == "full")
            job = Job(model_of(model, int(S)), int(batch), grad_width=int(grads) // 8)
            yield Run(source=source, status=status, traits=tuple(traits.split()), model=model,
                      device=device, job=job, layout=layout, recompute=recompute,
                      value=float(value), unit=unit, reason=reason.strip())


RUNS = list(read(Path(__file__).with_suffix(".txt").read_text().splitlines()))
# Runs of one model on one cluster in many layouts, by sheet
TRIALS = list(read(Path(__file__).with_name("trials.txt").read_text().splitlines()))


class PublishedCosts(Costs):
    """Costs of a program that is not train.py."""

    def __init__(self, run):
        self.run = run
        device, traits = run.machine, run.traits
        # "4ports": the GPUs of a node share 4 ports. (Else each GPU has its own port.) A
        # data-parallel group uses one port for each rank that it has on the node. NCCL chooses each
        # group's ports by the same rule, without regard to other groups, so all groups get the same
        # ports, and with fewer than 4 ranks on the node the other ports are idle
        network = device.network
        if "4ports" in traits:
            # The node has 8 GPUs and 4 ports of p GB/s, so `network` is p/2 per GPU. If a group has
            # r <= 4 ranks on the node, 8/r groups share r ports:
            #
            #     one of these groups has         r p / (8/r) = r^2 p/8 GB/s
            #     link() gives a group            r network
            #     equal, if `network` becomes     r p/8 = (p/2) (r/4)
            ranks_on_node = on_node(device, run.layout.tp, run.layout.dp)  # r
            network *= min(1.0, ranks_on_node / 4)
            # Two approximations, with which the fractions of hardware.py were fitted. With pp > 1
            # link() gets another r than this one: here it is counted in the order of Megatron's
            # axes (tp, dp, pp, from the innermost outwards), there in the order of train.py's
            # (tp, pp, dp). And a Device has one network, so the messages of pipeline, tensor and
            # context ranks get the factor, too
        speed = math.prod(ATTENTION[trait] for trait in traits if trait in ATTENTION)  # 1 if none
        device = replace(device, network=network, f_attention=device.f_attention * speed)
        super().__init__(run.job, device)
        if "eager" in traits:
            # Numbers that PyTorch's own operations move, counted in 16 bits: a number of 32 bits
            # counts as two.
            #     RMSNorm (in 32 bits)   18 per element of its input
            #     SwiGLU                 5 per hidden unit
            #     rotary positions       10 per element of queries and of keys
            h, shape = run.job.model.n_embd, shape_of(run.job.model)
            self.moved_by_norms = (2 * 18 + RESIDUALS) * h
            in_attention = shape.q + 2 * shape.kv + shape.q  # the same as in Costs
            self.moved_inside = 5 * shape.inner + 10 * (shape.q + shape.kv) + in_attention

    def exposed(self, messages, computing, axis):
        """Costs.exposed, for programs that overlap more or less than train.py."""
        traits = self.run.traits
        # A message travels in pieces, each beside a part of the message's own product
        if axis == "tp" and "overlapped" in traits:
            return self.device.unhidden * messages
        # No product runs beside a message
        if axis == "tp" and "alone" in traits:
            return messages
        # Messages travel when backward is over
        if axis == "dp" and "after" in traits:
            return messages
        return super().exposed(messages, computing, axis)

    def exposed_data_messages(self, layout, part, forward, backward):
        """Costs.exposed_data_messages, also for programs with the trait "hsdp": they shard over the
        ranks of a node, and sum each shard's gradient over the nodes."""
        node = self.device.node
        if "hsdp" not in self.run.traits or layout.dp <= node:
            return super().exposed_data_messages(layout, part, forward, backward)
        inside = super().exposed_data_messages(layout._replace(dp=node), part, forward, backward)
        dense, _ = block_parameters(self.job.model, layout.tp)
        vocabulary, _ = end_parameters(self.job.model, part, layout.tp)
        shard = (part.blocks * dense + vocabulary) / node * self.job.grad_width
        nodes = layout.dp // node
        return inside + self.exposed(self.all_reduce(node, nodes, shard), backward, "dp")

    def parts(self, layout):
        """The Parts of the pipeline ranks. Trait "even": all ranks have the same number of blocks.
        Trait "counted": embedding and head count as a block each, so their ranks have one block
        less. Without these traits: train.py's cut. (Numbers of blocks may be fractions here.)"""
        traits, L, P = self.run.traits, self.job.model.n_layer, layout.pp
        if P > 1 and "counted" in traits:
            each = (L + 2) / P
            between = [Part(0, each, 0)] * (P - 2)
            return {Part(1, each - 1, 0), *between, Part(0, each - 1, 1)}
        if P > 1 and "even" in traits:
            between = [Part(0, L / P, 0)] * (P - 2)
            return {Part(1, L / P, 0), *between, Part(0, L / P, 1)}
        return super().parts(layout)

    def boundary(self, layout):
        """Costs.boundary, but each tensor-parallel rank sends 1/T of a message; without --sp the
        receivers then gather the whole (arXiv 2104.04473, section 4.1)."""
        seconds = super().boundary(layout._replace(sp=True))
        if not layout.sp:
            nbytes = tokens_of(self.job, layout) * self.job.model.n_embd * self.job.width
            seconds += self.all_gather(1, layout.tp, nbytes)
        return seconds

    def attention(self, n, T):
        """Costs.attention, also for programs with the trait "naive": S x S scores in memory."""
        if "naive" not in self.run.traits:
            return super().attention(n, T)
        model = self.job.model
        flops = 2 * 2 * n * model.block_size * model.n_embd / T  # two products, nothing masked
        # Bytes of the scores. Products, softmax and dropout (whose mask has one byte per score)
        # move about 5.5 times as many in forward, and 9 times as many in backward
        scores = n * model.block_size * model.n_head / T * self.job.width
        forward = self.compute(flops, moved=5.5 * scores)
        backward = self.compute(2 * flops, moved=9 * scores)
        return forward, backward

    def recomputed(self, layout, forward, attention):
        """Costs.recomputed, also for programs that recompute attention only, or half of a block."""
        if self.run.recompute == "selective":
            return Time(attention)
        if self.run.recompute == "half":
            return Time().plus(forward, 0.5)
        return super().recomputed(layout, forward, attention)


def errors(runs):
    """[(run, error of the prediction, error of the baseline)]. An error is the predicted speed over
    the published speed, minus 1: above 0 is too fast. The baseline predicts the median MFU of the
    fitted runs on this GPU or, if there are none, of all fitted runs."""
    fitted = [(run.machine.tflops, run.mfu) for run in RUNS if run.status == "fitted"]
    rows = []
    for run in runs:
        # GPUs with the same tflops are of one kind
        same_gpu = [mfu for tflops, mfu in fitted if tflops == run.machine.tflops]
        usual = median(same_gpu or [mfu for _, mfu in fitted])
        seconds = PublishedCosts(run).step_time(run.layout)
        rows.append((run, run.seconds / seconds - 1, usual / run.mfu - 1))
    return rows


def seconds_with(run, factor):
    """Seconds of a run's step, predicted for compute that takes `factor` times as long."""
    costs = PublishedCosts(run)
    costs.device = slower(costs.device, factor)
    return costs.step_time(run.layout)


def by_other_runs(status):
    """[(error, error by one, error by all)], three absolute errors for each run with this status
    whose source has other runs on the same GPU. calibrate.py calibrates the device:

        error           no calibration
        error by one    calibrated by one other run: the median error over the other runs
        error by all    calibrated by the median factor of all other runs
    """
    sources = {}
    for run in RUNS:
        if run.status == status:
            sources.setdefault((run.source, run.machine.tflops), []).append(run)
    rows = []
    for runs in sources.values():
        factors = [factor_of(partial(seconds_with, run), run.seconds) for run in runs]
        for i, run in enumerate(runs):
            others = factors[:i] + factors[i + 1 :]
            if others:
                by_one = [abs(run.seconds / seconds_with(run, factor) - 1) for factor in others]
                by_all = abs(run.seconds / seconds_with(run, median(others)) - 1)
                rows.append((abs(run.seconds / seconds_with(run, 1) - 1), median(by_one), by_all))
    return rows


def choices():
    """[(sheet, number of its trials, longer by plan, longer by rule)] of TRIALS. longer: how much
    longer the chosen trial took than the fastest, as a share. The plan chooses the trial that is
    predicted to be the fastest; the rule, which predicts nothing, the one with the fewest tensor
    and pipeline ranks (T x P), and of those the smallest microbatch."""
    rows = []
    for sheet, trials in groupby(TRIALS, lambda run: run.source):
        trials = list(trials)
        fastest = min(run.seconds for run in trials)
        plan = min(trials, key=lambda run: PublishedCosts(run).step_time(run.layout))
        rule = min(trials, key=lambda run: (run.layout.tp * run.layout.pp,
                                            tokens_of(run.job, run.layout), run.layout.tp))
        rows.append((sheet, len(trials), plan.seconds / fastest - 1, rule.seconds / fastest - 1))
    return rows


HEAD = ("model GPUs device S dp tp pp cp ep zero chunks b recompute published predicted in error "
        "baseline").split()


def row_of(run, error, baseline):
    """A run's cells of the table."""
    layout = run.layout
    # 1 + error = predicted speed / published speed, and so published seconds / predicted seconds
    predicted = run.value / (1 + error) if run.unit == "s" else run.value * (1 + error)
    b = run.job.batch_size // layout.dp // layout.microbatches
    cells = (run.model, layout.ranks, run.device, run.job.model.block_size, layout.dp, layout.tp,
             layout.pp, layout.cp, layout.ep, layout.zero, layout.chunks, b, run.recompute,
             f"{run.value:g}", f"{predicted:.4g}", run.unit, f"{error:+.1%}", f"{baseline:+.0%}")
    return [str(cell) for cell in cells]


def kind_of_run(run):
    """A word for what a run's software and layout are like."""
    layout = run.layout
    if run.job.model.n_experts:
        return "mixtures of experts"
    if run.source.startswith(("Pax", "MaxText")):
        return "dense, compiled by XLA"
    if layout.pp > 1 and layout.tp > 1:
        return "dense, tensor ranks in a pipeline"
    if layout.pp > 1:
        return "dense, a pipeline alone"
    if layout.tp > 1:
        return "dense, tensor ranks alone"
    if layout.cp > 1:
        return "dense, context ranks alone"
    return "dense, data parallelism or ZeRO"


def size_of_errors(name, rows):
    """A line of text about rows of errors()."""
    sources = {run.source for run, _, _ in rows}
    sizes = [abs(error) for _, error, _ in rows]
    baseline = [abs(error) for _, _, error in rows]
    return (f"{name}: {len(rows)} rows of {len(sources)} sources, median error "
            f"{median(sizes):.1%}, {sum(size <= 0.15 for size in sizes)} within 15%, largest "
            f"{max(sizes):.0%}; baseline {median(baseline):.1%}")


def main():
    """Print a table for each source; then, for each status, the size of the errors."""
    found = errors(RUNS)
    for (source, status), group in groupby(found, lambda row: (row[0].source, row[0].status)):
        group = list(group)
        print(table(f"{source}: {status}", [HEAD, *(row_of(*row) for row in group)]))
        for run, error, _ in group:
            if run.reason:
                print(f"  {error:+.1%}: {run.reason}")
    print("trials of layouts: longer than the fastest by")
    for sheet, number, by_plan, by_rule in choices():
        print(f"  the planner's choice {by_plan:.1%}, that of fewest T x P {by_rule:.1%}: {sheet}, "
              f"{number} layouts")
    print(size_of_errors("trials", errors(TRIALS)))
    calibrated = by_other_runs("held out third")
    plain, by_one, by_all = (median(errors) for errors in zip(*calibrated, strict=True))
    print(f"held out third, {len(calibrated)} rows whose source has others: median error "
          f"{plain:.1%}; calibrated by one other run {by_one:.1%}, by all others {by_all:.1%}")
    for status in dict.fromkeys(run.status for run in RUNS):  # each once, in the file's order
        print(size_of_errors(status, [row for row in found if row[0].status == status]))
    held_out = [row for row in found if row[0].status != "fitted"]
    for kind in sorted({kind_of_run(run) for run, _, _ in held_out}):
        print(size_of_errors(kind, [row for row in held_out if kind_of_run(row[0]) == kind]))
    print(size_of_errors("all held out", held_out))
