"""Seconds that a step takes in a layout, on a device that need not exist.

    a kernel      FLOPs / rate, or bytes / bandwidth (as elements read and written)
    a ring        rounds (N-1) (n/N / slowest link + latency), rounds: 2 for an all-reduce, 1 for
                  its halves. Ranks stand in order: one link of each ring leaves a node
    both at once  hypot(messages, computing): the longer if they differ much, 1.4 times if not
    a step        the makespan, by the simulator, of the schedule that a run executes, for F, I, W
                  of the busiest rank; then what data parallelism and the optimizer add

Left out: whatever is not the same on all ranks (stragglers, unevenly chosen experts), other traffic
on the network, which shapes kernels like, the loading of data, checkpoints, failures.
"""

import math
import operator
from functools import cache
from typing import NamedTuple

from planner.memory import block_parameters, parts_of, tokens_of
from schedules import closed_form, make_schedule, placement, simulate


def step_flops(job, recompute="none"):
    """Of one step on all ranks, as arXiv 2104.04473 counts: a backward is two forwards, S x S
    scores count whole, and with recompute "full" the second forward of the blocks, too."""
    model = job.model
    L, h, S, V = model.n_layer, model.n_embd, model.block_size, model.vocab_size
    forwards = 4 if recompute == "full" else 3
    tokens = job.batch_size * S
    return 24 * tokens * L * h * h * forwards * (1 + S / (6 * h)) + 6 * tokens * h * V


def link(device, stride, size):
    """Bytes per second of the slowest link of a ring whose `size` ranks stand `stride` apart."""
    inside = device.node % (stride * size) == 0  # else one such ring lies across two nodes
    return 1e9 * (device.nvlink * device.f_nvlink if inside else device.network * device.f_network)


def ring_time(device, stride, size, nbytes, rounds=1):
    """Seconds of a collective on `nbytes`: rounds 2 for an all-reduce, 1 for either half."""
    hop = nbytes / size / link(device, stride, size) + device.latency
    return rounds * (size - 1) * hop + device.late * (size > 1 and nbytes > 0)


def exposed(device, messages, computing):
    """What messages add to the computing that goes on beside them. Processors have no engine of
    their own for messages."""
    return messages if device.cores else math.hypot(messages, computing) - computing


def compute(device, products=0.0, attention=0.0, moved=0.0, kernels=0):
    """Seconds for FLOPs of matrix products, FLOPs of fused attention, bytes read and written."""
    return (products / (1e12 * device.tflops * device.f_products)
            + attention / (1e12 * device.tflops * device.f_attention)
            + moved / (1e9 * device.hbm * device.f_hbm) + kernels * device.launch)


class Time(NamedTuple):
    """Seconds: of computing, and of messages that computing waits for, by axis."""
    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def plus(self, other, times=1):
        return Time(*(a + times * b for a, b in zip(self, other, strict=True)))


@cache
def block_time(job, layout, device, split):
    """F, I and W of a block, for one microbatch. split: I and W are actions of their own."""
    model, w, T, C, E = job.model, job.width, layout.tp, layout.cp, layout.ep
    n, h, S = tokens_of(job, layout), model.n_embd, model.block_size
    products = 24 * n * h * h / T + 2 * n * h * model.n_experts
    # elementwise, as elements read and written: norms and residuals; GELU, and heads put in order
    moved = n * h * w * (10 / (T if layout.sp else 1) + 12 / T)
    if job.attention == "flash":  # half of the scores are masked; backward makes them once more
        core = compute(device, attention=2 * n * S * h / T)
        core_back = 2.5 * core
    else:  # scores are written or read five and a half times forward, nine times backward
        scores, size = 4 * n * S * h / T, n * S * model.n_head / T * w
        core = compute(device, scores, moved=5.5 * size)
        core_back = compute(device, 2 * scores, moved=9 * size)
    dense, expert = block_parameters(model, T)
    grads = dense + expert * model.n_experts / (E * T)
    forward = compute(device, products, moved=moved, kernels=20) + core
    input_grad = compute(device, products, moved=2 * moved, kernels=25) + core_back
    weight_grad = compute(device, products, moved=3 * w * grads, kernels=12)
    if split and model.n_experts:  # experts' weight gradients are not put off
        theirs = compute(device, 16 * n * h * h / T, moved=3 * w * (grads - dense))
        input_grad, weight_grad = input_grad + theirs, weight_grad - theirs

    half = ring_time(device, 1, T, n * h * w)
    reduce = 2 * half if layout.sp else ring_time(device, 1, T, n * h * w, rounds=2)
    column = compute(device, 7 / 24 * products)  # in each of two, either half of backward
    if split:  # nothing goes on beside them, but what gathers x again
        tp_input = 2 * reduce + 2 * layout.sp * exposed(device, half, column)
        tp_weight = 0.0
    elif layout.sp:  # x is gathered beside one half, its gradient scattered beside the other
        tp_input = reduce + 2 * exposed(device, half, column)
        tp_weight = 2 * exposed(device, half, column)
    else:  # x's gradient is summed beside the weight gradient
        tp_input, tp_weight = 0.0, 2 * exposed(device, reduce, column)
    pass_on = pass_back = 0.0
    if C > 1 and layout.cp_attention == "ring":  # keys and values; then their gradients, too
        hop, start = 2 * n * h / T / link(device, T, C), device.latency + device.late
        pass_on = (C - 1) * (exposed(device, hop * w, core / C) + start)
        pass_back = (C - 1) * (exposed(device, hop * (w + max(4, w)), core_back / C) + start)
    elif C > 1:  # q, k, v and the result
        pass_on = 4 * ring_time(device, T, C, n * h * w / T)
        pass_back = pass_on
    # tokens to experts and back; rank e and e + 1 are one data rank apart
    swap = 2 * ring_time(device, T * C * layout.pp, E, model.top_k * n * h * w / T)
    forward = Time(forward, 2 * reduce, pass_on, swap)
    backward = Time(input_grad, tp_input, pass_back, swap)
    if layout.recompute == "full":
        backward = backward.plus(forward)
    elif layout.recompute == "selective" and job.attention == "naive":
        backward = backward.plus(Time(core))
    return forward, backward, Time(weight_grad, tp_weight)


@cache
def ends_time(job, layout, device):
    """(F, I, W) of the embedding and of the head. The softmax is in 32 bits."""
    n, h, words = tokens_of(job, layout), job.model.n_embd, job.model.vocab_size / layout.tp
    w = job.width
    products, moved = 2 * n * h * words, n * words * (w + 3 * max(w, 4))
    reduce = ring_time(device, 1, layout.tp, n * h * w, rounds=2)  # of rows found; of x's gradient
    logits = compute(device, products, moved=moved, kernels=10)
    embedding = Time(compute(device, moved=2 * n * h * w), reduce)
    head_W = Time(compute(device, products, moved=3 * w * h * words))
    return ((embedding, Time(compute(device, moved=3 * n * h * w)), Time()),
            (Time(logits), Time(logits, reduce), head_W))


@cache
def kinds_of_ranks(model, schedule, P, v):
    return {*parts_of(model, schedule, P, v)}


@cache
def busiest_rank(job, layout, device):
    """(F, I, W) of a microbatch through all stages of the pipeline rank that takes longest, and
    that rank's Part."""
    split = layout.schedule.startswith("zb")
    alike = layout._replace(zero=0, schedule="", chunks=1)  # nothing of a block depends on these
    embedding, head = ends_time(job, alike, device)
    each = embedding, block_time(job, alike, device, split), head  # in the order of Part's fields
    sums = [sum(map(sum, times)) for times in each]
    part = max(kinds_of_ranks(job.model, layout.schedule, layout.pp, layout.chunks),
               key=lambda part: sum(map(operator.mul, part, sums)))
    return [Time().plus(a, part.embedding).plus(b, part.blocks).plus(c, part.head)
            for a, b, c in zip(*each, strict=True)], part


@cache
def makespan(schedule, P, m, v, costs):
    """The simulator's, for costs F, I, W, comm; or the formula's where it holds. From 3 P
    microbatches on, P more always add the same, so two short runs tell of all longer ones."""
    rate = closed_form(schedule, P, m, v, costs)
    if rate is not None:
        return m * sum(costs[:3]) / (1 - rate)

    def simulated(m):
        return simulate(make_schedule(schedule, P, m, v), placement(schedule, P, v), costs).makespan

    few = 2 * P + m % P
    if m <= few + P:
        return simulated(m)
    start, later = simulated(few), simulated(few + P)
    return later + (m - few - P) * (later - start) / P


def data_time(job, layout, device):
    """(what sums and gathers over data ranks add to a step, the optimizer)."""
    times, part = busiest_rank(job, layout._replace(zero=0), device)
    forward, input_grad, weight_grad = map(sum, times)
    backward = input_grad + weight_grad  # messages go on beside these
    model, w, m, T = job.model, job.width, layout.microbatches, layout.tp
    wider = job.grad_width / w  # a gradient than a weight
    ranks = layout.dp * layout.cp
    stride = T if layout.dp == 1 else layout.ranks // ranks  # the axes: dp, pp, cp, tp
    dense, expert = block_parameters(model, T)
    ends = part.embedding + part.head if layout.zero == 3 else max(part.embedding, part.head)
    numel = part.blocks * dense + ends * model.vocab_size * model.n_embd / T
    experts = part.blocks * expert * model.n_experts / (layout.ep * T)
    half = ring_time(device, stride, ranks, numel * w)
    if experts:
        half += ring_time(device, stride * layout.ep, ranks // layout.ep, experts * w)
    if ranks > 1:  # one for each layer or, DDP, for each bucket of 25 MiB
        count = max(1, sum(part) if layout.zero else numel * w / (25 * 2**20))
        half += (count - 1) * ((ranks - 1) * device.latency + device.late)
    grads = wider * half
    sent = {0: exposed(device, 2 * grads, backward),  # beside the last backward
            1: exposed(device, grads, backward) + half,  # and then the new weights
            2: m * exposed(device, grads, backward) + half,  # beside every backward
            3: m * (exposed(device, half, forward) + exposed(device, half + grads, backward))}
    tied = 0.0  # the gradient of the embedding, between its two ends
    if layout.pp > 1 and layout.schedule != "zb-v":
        tied = ring_time(device, layout.ranks, 2, model.vocab_size / T * model.n_embd * w, rounds=2)
    owned = numel + experts
    if layout.zero:
        owned = numel / ranks + experts / (ranks // layout.ep)
    step = compute(device, moved=owned * (28 if w == 2 else 7 * w), kernels=8 * part.blocks)
    return sent[layout.zero] + tied, step


def lower_bound(job, layout, device):
    """Seconds that a step takes at least: nothing is exposed, and the bubble is by its formula."""
    times, _ = busiest_rank(job, layout, device)
    costs = *map(sum, times), 0.0
    P, m, v = layout.pp, layout.microbatches, layout.chunks
    return m * sum(costs) / (1 - (closed_form(layout.schedule, P, m, v, costs) or 0.0))


def action_costs(job, layout, device):
    """F, I, W of the busiest rank and comm: what the simulator takes."""
    times, _ = busiest_rank(job, layout, device)
    elements = tokens_of(job, layout) * job.model.n_embd / (layout.tp if layout.sp else 1)
    hop = elements * job.width / link(device, layout.tp * layout.cp, layout.pp)
    hop += device.latency + device.late
    return *map(sum, times), hop if layout.pp > 1 else 0.0


def pipeline_time(job, layout, device, messages=True):
    """Seconds from the first forward to the last backward, on the rank that takes longest."""
    F, I, W, hop = action_costs(job, layout, device)  # noqa: E741
    return makespan(layout.schedule, layout.pp, layout.microbatches, layout.chunks,
                    (F, I, W, hop * messages))


def step_time(job, layout, device):
    """Seconds of a step."""
    pipeline, data = pipeline_time(job, layout, device), sum(data_time(job, layout, device))
    if device.cores:  # ranks share them: while one waits, another computes
        P, m = layout.pp, layout.microbatches
        all_stages, _ = busiest_rank(job, layout._replace(pp=1, chunks=1), device)
        passed_on = 2 * m * (P * layout.chunks - 1) * action_costs(job, layout, device)[-1]
        work = m * sum(map(sum, all_stages)) + passed_on + P * data  # of the P ranks of a pipeline
        return max(pipeline + data, work * layout.ranks / P / device.cores)
    return pipeline + data


def time_by_part(job, layout, device):
    """{compute, tp, cp, ep, pp, dp, optimizer, bubble}: seconds that add up to step_time's, if each
    rank has a device of its own. tp, cp, ep, pp, dp: messages of these axes that are waited for."""
    times, _ = busiest_rank(job, layout, device)
    busy = Time()
    for time in times:
        busy = busy.plus(time, layout.microbatches)
    ideal = pipeline_time(job, layout, device, messages=False)
    sent, optimizer = data_time(job, layout, device)
    return {**busy._asdict(), "pp": pipeline_time(job, layout, device) - ideal, "dp": sent,
            "optimizer": optimizer, "bubble": ideal - sum(busy)}
