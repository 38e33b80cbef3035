"""Seconds that a training step takes in a layout, on a device that need not be here.

    kernel     FLOPs / rate, or bytes / bandwidth (as elements read and written), and a launch
    ring       rounds (N-1) (n/N / slowest link + latency); rounds: 2 for an all-reduce, 1 for
               either half. Ranks stand in order: one link of each ring leaves a node
    overlap    hypot(messages, compute): the longer if they differ much, 1.4 times if not
    step       the makespan of the schedule by the simulator, with F, I, W of the busiest rank;
               then data-parallel messages and the optimizer

Left out: LEFT_OUT in plan.py; also data loading and checkpoints.
"""

import math
from functools import cache
from typing import NamedTuple

from planner.hardware import Llama
from planner.memory import block_parameters, end_parameters, matrices, parts_of, tokens_of
from schedules import make_schedule, placement, simulate


def step_flops(job, recompute="none"):
    """FLOPs of a step on all ranks, as arXiv 2104.04473 counts them: a backward is two forwards,
    S x S scores count whole, and recompute "full" adds a second forward of the blocks."""
    model = job.model
    L, h, S, V = model.n_layer, model.n_embd, model.block_size, model.vocab_size
    forwards = 4 if recompute == "full" else 3
    tokens = job.batch_size * S
    return tokens * L * forwards * (2 * sum(matrices(model)) + 4 * h * S) + 6 * tokens * h * V


def compute(device, products=0.0, attention=0.0, moved=0.0, kernels=0):
    """Seconds for FLOPs of matrix products, FLOPs of fused attention, bytes read and written."""
    return (products / (1e12 * device.tflops * device.f_products)
            + attention / (1e12 * device.tflops * device.f_attention)
            + moved / (1e9 * device.hbm * device.f_hbm) + kernels * device.launch)


def link(device, stride, size):
    """Bytes per second of the slowest link in a ring of `size` ranks, `stride` ranks apart."""
    inside_nodes = device.node % (stride * size) == 0
    return 1e9 * (device.nvlink * device.f_nvlink if inside_nodes
                  else device.network * device.f_network)


def ring_time(device, stride, size, nbytes, rounds=1):
    """Seconds of a collective on `nbytes`: rounds 2 for an all-reduce, 1 for either half."""
    hop = nbytes / size / link(device, stride, size) + device.latency
    return rounds * (size - 1) * hop + device.late * (size > 1 and nbytes > 0)


def exposed(device, messages, computing):
    """Communication time not hidden by compute. A CPU hides none: it copies messages itself."""
    return messages if device.cores else math.hypot(messages, computing) - computing


class Time(NamedTuple):
    """Seconds of compute, and of messages that compute waits for, by axis."""
    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def plus(self, other, times=1):
        return Time(*(a + times * b for a, b in zip(self, other, strict=True)))


def tensor_messages(job, layout, device, split, products):
    """Seconds that (F, I, W) of a block wait for tensor-parallel ranks. products: the FLOPs of the
    block's forward."""
    nbytes = tokens_of(job, layout) * job.model.n_embd * job.width
    half = ring_time(device, 1, layout.tp, nbytes)
    whole = 2 * half if layout.sp else ring_time(device, 1, layout.tp, nbytes, rounds=2)
    share = matrices(job.model)[0] / sum(matrices(job.model)) / 2  # in one of two columns
    column = compute(device, share * products)  # either half of its backward
    if split:  # only the second all-gather of x (--sp) overlaps with compute
        gather_again = 2 * exposed(device, half, column) if layout.sp else 0.0
        return 2 * whole, 2 * whole + gather_again, 0.0
    if layout.sp:  # gathers x beside one half, scatters its gradient beside the other
        waits = 2 * exposed(device, half, column)
        return 2 * whole, whole + waits, waits
    return 2 * whole, 0.0, 2 * exposed(device, whole, column)  # beside the weight gradient


def context_messages(job, layout, device, attention, attention_back):
    """(forward, backward) seconds that attention waits for context-parallel ranks. Its compute,
    attention and attention_back, hides the ring's messages."""
    T, C, w = layout.tp, layout.cp, job.width
    # Keys and values of all heads, as train.py sends them; of grouped heads fewer could travel
    elements = tokens_of(job, layout) * job.model.n_embd / T
    if C > 1 and layout.cp_attention == "all-to-all":  # q, k, v and the result
        swap = 4 * ring_time(device, T, C, elements * w)
        return swap, swap
    hop = 2 * elements / link(device, T, C)  # seconds for a byte each of keys and values
    start = device.latency + device.late
    forward = exposed(device, hop * w, attention / C) + start
    # keys and values, and their gradients in at least 32 bits
    backward = exposed(device, hop * (w + max(4, w)), attention_back / C) + start
    return (C - 1) * forward, (C - 1) * backward


@cache
def block_time(job, layout, device, split):
    """F, I and W of a block, for one microbatch. split: I and W are separate actions."""
    model, w, T, E = job.model, job.width, layout.tp, layout.ep
    n, h, N = tokens_of(job, layout), model.n_embd, model.n_experts
    products = 2 * n * sum(matrices(model)) / T + 2 * n * h * N
    # elements of norms and residuals; of GELU and of reordering the heads
    moved = n * h * w * (10 / (T if layout.sp else 1) + 12 / T)
    if job.attention == "flash":  # the mask halves the scores; backward computes them once more
        attention = compute(device, attention=2 * n * model.block_size * h / T)
        attention_back = 2.5 * attention
    else:  # S x S scores are moved 5.5 times forward, 9 times backward
        flops, scores = 4 * n * model.block_size * h / T, n * model.block_size * model.n_head / T
        attention = compute(device, flops, moved=5.5 * scores * w)
        attention_back = compute(device, 2 * flops, moved=9 * scores * w)
    dense, expert = block_parameters(model, T)
    experts = expert * N / (E * T)
    F = compute(device, products, moved=moved, kernels=20) + attention
    I = compute(device, products, moved=2 * moved, kernels=25) + attention_back  # noqa: E741
    W = compute(device, products, moved=3 * w * (dense + experts), kernels=12)
    if split and N:  # weight gradients of experts are not deferred
        at_once = compute(device, 2 * n * model.top_k * expert / T, moved=3 * w * experts)
        I, W = I + at_once, W - at_once  # noqa: E741

    tp_F, tp_I, tp_W = tensor_messages(job, layout, device, split, products)
    cp_F, cp_I = context_messages(job, layout, device, attention, attention_back)
    # tokens to the experts and back; rank e and e + 1 are one data rank apart
    ep = 2 * ring_time(device, T * layout.cp * layout.pp, E, model.top_k * n * h * w / T)
    forward, backward = Time(F, tp_F, cp_F, ep), Time(I, tp_I, cp_I, ep)
    if layout.recompute == "full":
        backward = backward.plus(forward)
    elif layout.recompute == "selective" and job.attention == "naive":
        backward = backward.plus(Time(attention))
    return forward, backward, Time(W, tp_W)


@cache
def ends_time(job, layout, device):
    """(F, I, W) of the embedding and of the head. The softmax is in at least 32 bits."""
    n, h, w = tokens_of(job, layout), job.model.n_embd, job.width
    words = job.model.vocab_size / layout.tp
    # of the embedding's rows forward; of the head's input gradient backward
    reduce = ring_time(device, 1, layout.tp, n * h * w, rounds=2)
    embedding = (Time(compute(device, moved=2 * n * h * w), reduce),
                 Time(compute(device, moved=3 * n * h * w)), Time())
    products = 2 * n * h * words
    logits = compute(device, products, moved=n * words * (w + 3 * max(w, 4)), kernels=10)
    head = (Time(logits), Time(logits, reduce),
            Time(compute(device, products, moved=3 * w * h * words)))
    return embedding, head


@cache
def kinds_of_ranks(model, schedule, P, v):
    return set(parts_of(model, schedule, P, v))


@cache
def busiest_rank(job, layout, device):
    """(F, I, W) of a microbatch through all stages of the slowest pipeline rank, and its Part."""
    split = layout.schedule.startswith("zb")
    alike = layout._replace(zero=0, schedule="", chunks=1)  # layers take as long under each of them
    embedding, head = ends_time(job, alike, device)
    block = block_time(job, alike, device, split)
    in_embedding, in_block, in_head = (
        sum(sum(time) for time in times) for times in (embedding, block, head))

    def seconds(part):
        return part.embedding * in_embedding + part.blocks * in_block + part.head * in_head

    part = max(kinds_of_ranks(job.model, layout.schedule, layout.pp, layout.chunks), key=seconds)
    times = [Time().plus(e, part.embedding).plus(b, part.blocks).plus(h, part.head)
             for e, b, h in zip(embedding, block, head, strict=True)]
    return times, part


def closed_form(name, P, m, v, costs):
    """The published bubble, idle / (idle + work). None where its assumptions do not hold: comm = 0;
    for zb-h1 and zb-h2 W <= F and enough microbatches to fill the pipeline, for zb-v F = I = W."""
    f, i, w, comm = costs
    depth = {"zb-h1": 1, "zb-h2": 2, "zb-v": 2}.get(name, 0)
    # For each later rank, 1F1B idles during an F, an I and a W; zb-h1 idles for F and I only, and
    # fills one W's time of it with a W; zb-h2 and zb-v fill two
    idle = (P - 1) * (f + i + {0: w, 1: -w, 2: -2 * w}[depth])
    full = depth == 0 or (w <= f and m > depth * (P - 1))
    if comm != 0 or idle < 0 or not full or (name == "zb-v" and not f == i == w):
        return None
    return idle / (idle + m * (f + i + w) * (v if name == "interleaved" else 1))


@cache
def makespan(schedule, P, m, v, costs):
    """Makespan for costs F, I, W, comm, by the formula if there is one, else by the simulator.
    Beyond 3 P microbatches each P more add the same time, so two short runs predict a long one."""
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


def action_costs(job, layout, device):
    """F, I, W of the busiest rank, and the latency between ranks: what simulate() takes."""
    times, _ = busiest_rank(job, layout, device)
    comm = 0.0
    if layout.pp > 1:
        elements = tokens_of(job, layout) * job.model.n_embd / (layout.tp if layout.sp else 1)
        comm = elements * job.width / link(device, layout.tp * layout.cp, layout.pp)
        comm += device.latency + device.late
    return *(sum(time) for time in times), comm


def pipeline_time(job, layout, device, messages=True):
    """Seconds from the first forward to the last backward, on the slowest rank."""
    F, I, W, comm = action_costs(job, layout, device)  # noqa: E741
    return makespan(layout.schedule, layout.pp, layout.microbatches, layout.chunks,
                    (F, I, W, comm if messages else 0.0))


def lower_bound(job, layout, device):
    """Fewest seconds that a step can take: no message is exposed, the bubble is the formula's."""
    F, I, W, _ = action_costs(job, layout, device)  # noqa: E741
    m = layout.microbatches
    rate = closed_form(layout.schedule, layout.pp, m, layout.chunks, (F, I, W, 0.0))
    return m * (F + I + W) / (1 - (rate or 0.0))


def data_time(job, layout, device):
    """(exposed time of data-parallel messages, time of the optimizer)."""
    times, part = busiest_rank(job, layout._replace(zero=0), device)
    forward, backward = sum(times[0]), sum(times[1]) + sum(times[2])  # of a microbatch
    model, w, m, T = job.model, job.width, layout.microbatches, layout.tp
    ranks = layout.dp * layout.cp
    stride = T if layout.dp == 1 else layout.ranks // ranks  # the axes: dp, pp, cp, tp
    dense, expert = block_parameters(model, T)
    experts = part.blocks * expert * model.n_experts / (layout.ep * T)
    vocabulary = model.vocab_size * model.n_embd / T
    ends, _ = end_parameters(model, part, T)
    if layout.zero == 3:  # gathers a tied matrix once for each of its two ends
        ends = (part.embedding + part.head) * vocabulary
    numel = part.blocks * dense + ends

    half = ring_time(device, stride, ranks, numel * w)  # a reduce-scatter, or an all-gather
    if experts:
        half += ring_time(device, stride * layout.ep, ranks // layout.ep, experts * w)
    if ranks > 1:  # in one message for each layer or, DDP, for each bucket of 25 MiB
        count = max(1, sum(part) if layout.zero else numel * w / (25 * 2**20))
        half += (count - 1) * ((ranks - 1) * device.latency + device.late)
    grads = job.grad_width / w * half
    if layout.zero == 0:  # an all-reduce beside the last backward
        sent = exposed(device, 2 * grads, backward)
    elif layout.zero == 1:  # a reduce-scatter there, then an all-gather of new weights
        sent = exposed(device, grads, backward) + half
    elif layout.zero == 2:  # a reduce-scatter beside every backward
        sent = m * exposed(device, grads, backward) + half
    else:  # and an all-gather of the weights beside every forward and backward
        sent = m * (exposed(device, half, forward) + exposed(device, half + grads, backward))
    if layout.pp > 1 and layout.schedule != "zb-v" and not isinstance(model, Llama):  # tied ends
        sent += ring_time(device, layout.ranks, 2, vocabulary * w, rounds=2)

    owned = numel + experts
    if layout.zero:
        owned = numel / ranks + experts / (ranks // layout.ep)
    bytes_moved = 28 if w == 2 else 7 * w  # per parameter, by AdamW
    return sent, compute(device, moved=owned * bytes_moved, kernels=8 * part.blocks)


def step_time(job, layout, device):
    """Seconds of a step."""
    data = sum(data_time(job, layout, device))
    step = pipeline_time(job, layout, device) + data
    if device.cores:  # shared by all ranks: while one waits, another computes
        P, m = layout.pp, layout.microbatches
        all_stages, _ = busiest_rank(job, layout._replace(pp=1, chunks=1), device)
        boundaries = P * layout.chunks - 1
        work = m * sum(sum(time) for time in all_stages) + P * data  # of P ranks
        work += 2 * m * boundaries * action_costs(job, layout, device)[-1]
        step = max(step, work * layout.ranks / P / device.cores)
    return step


def time_by_part(job, layout, device):
    """{compute, tp, cp, ep, pp, dp, optimizer, bubble}: seconds that add up to step_time's if each
    rank has a device of its own. tp, cp, ep, pp, dp: exposed messages of that axis."""
    (F, I, W), _ = busiest_rank(job, layout, device)  # noqa: E741
    busy = Time().plus(F.plus(I).plus(W), layout.microbatches)
    without_messages = pipeline_time(job, layout, device, messages=False)
    sent, optimizer = data_time(job, layout, device)
    return {**busy._asdict(), "pp": pipeline_time(job, layout, device) - without_messages,
            "dp": sent, "optimizer": optimizer, "bubble": without_messages - sum(busy)}
