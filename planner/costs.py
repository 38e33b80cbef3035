"""Seconds that a training step takes in a layout, on a device that need not be here.

    kernel     FLOPs / rate, or bytes / bandwidth (of elements read and written), and a launch
    ring       rounds (N-1) (n/N / link + latency); rounds: 2 for an all-reduce, 1 for either half.
               Of n members of a group on each node, all n have a port of their own ("rails")
    overlap    what travels longer than compute lasts, and at least the fraction `unhidden` of it
    step       the makespan of the schedule by the simulator, with F, I, W of the busiest rank;
               then data-parallel messages and the optimizer (left out: LEFT_OUT in plan.py)
"""

import math
from collections import deque
from functools import cache, partial
from operator import mul
from typing import NamedTuple

from engine.schedules import make_schedule
from planner.hardware import Llama
from planner.memory import block_parameters, end_parameters, matrices, parts_of, shape_of, tokens_of
from schedules import placement, splits_backward


def step_flops(job, recompute=False):
    """FLOPs of a step on all ranks, as arXiv 2104.04473 counts them: a backward is two forwards,
    S x S scores count whole, and recompute adds a second forward of the blocks."""
    model = job.model
    L, h, S, V = model.n_layer, model.n_embd, model.block_size, model.vocab_size
    forwards = 4 if recompute else 3
    tokens = job.batch_size * S
    return tokens * L * forwards * (2 * sum(matrices(model)) + 4 * h * S) + 6 * tokens * h * V


def on_node(device, stride, size):
    """How many of the ranks of a group, `stride` apart, share a node: all, or each node's share."""
    return max(1, math.gcd(device.node, stride * size) // stride)


def link(device, members, size):
    """Bytes per second between neighbours in a ring of `size` ranks, `members` on each node."""
    inside = device.nvlink * device.f_nvlink
    if members >= size:
        return 1e9 * inside
    return 1e9 * min(inside, members * device.network * device.f_network)


def ring_time(device, members, size, nbytes, rounds=1):
    """Seconds of a collective on `nbytes`: rounds 2 for an all-reduce, 1 for either half."""
    return rounds * (size - 1) * (nbytes / size / link(device, members, size) + device.latency)


def swap_time(device, members, size, nbytes):
    """Seconds of an all-to-all in which a rank swaps `nbytes`: what stays on the node goes over
    NVLink, the rest through the rank's own port, at the same time."""
    inside = nbytes * (members - 1) / size / link(device, members, members)
    outside = nbytes * (size - members) / size / (1e9 * device.network * device.f_network)
    return max(inside, outside) + (size - 1) * device.latency


class Time(NamedTuple):
    """Seconds of compute, and of messages that compute waits for, by axis."""
    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def plus(self, other, times=1):
        return Time(*(a + times * b for a, b in zip(self, other, strict=True)))


# ---- the bubble, by formula ----
# Each function returns the time that a rank idles, in units of 1/v of F, I and W, as the schedule's
# paper has it; or None where the paper's assumptions do not hold.


def idle_of_1f1b(P, m, f, i, w):
    """For each later rank, the time of an F and of a B."""
    return (P - 1) * (f + i + w)


def idle_of_zero_bubble(depth, P, m, f, i, w):
    """For each later rank, the time of an F and of an I, which zb-h1 (depth 1) fills with one W,
    and zb-h2 (depth 2) with two. Assumes W <= F, and microbatches that fill the pipeline."""
    idle = (P - 1) * (f + i - depth * w)
    return idle if w <= f and m > depth * (P - 1) and idle >= 0 else None


def idle_of_zb_v(P, m, f, i, w):
    return 0 if f == i == w and m >= 2 * P - 1 else None


IDLE = {"gpipe": idle_of_1f1b, "1f1b": idle_of_1f1b, "interleaved": idle_of_1f1b,
        "zb-h1": partial(idle_of_zero_bubble, 1), "zb-h2": partial(idle_of_zero_bubble, 2),
        "zb-v": idle_of_zb_v}


def closed_form(name, P, m, v, costs):
    """The published bubble, idle / (idle + work). None if messages take time (comm), if the
    schedule has no formula, or where its assumptions do not hold."""
    f, i, w, comm = costs
    idle = IDLE[name](P, m, f, i, w) if name in IDLE and comm == 0 else None
    return None if idle is None else idle / (idle + v * m * (f + i + w))


# ---- the makespan, by the clock ----


@cache
def in_order(schedule, P, m, v):
    """[(rank, kind, index of the action of another rank that it needs, or None)] of all actions of
    a schedule, each behind what it needs (schedules.needs; of its own rank all that is before it in
    the rank's list). Lists are static, so this holds for all costs."""
    lists, where, rows, done = make_schedule(schedule, P, m, v), placement(schedule, P, v), [], {}
    queues = [deque(actions) for actions in lists]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, k = queue[0]
                source = stage - 1 if kind == "F" else stage + 1
                far = kind != "W" and 0 <= source < len(where) and where[source] != rank
                if far and (kind == "F", source, k) not in done:
                    break  # the next rank goes on
                rows.append((rank, kind, done[kind == "F", source, k] if far else None))
                if kind != "W":
                    done[kind == "F", stage, k] = len(rows) - 1
                queue.popleft()
    return rows


@cache
def makespan(schedule, P, m, v, costs):
    """Makespan for costs F, I, W, comm, as simulate() has it. Beyond some P microbatches each P
    more add the same time: two short runs predict a long one."""
    f, i, w, comm = costs

    def simulated(m):
        cost = {"F": f / v, "B": (i + w) / v, "I": i / v, "W": w / v}
        free, ends = [rank * (f / v + comm) for rank in range(P)], []  # the first forward comes
        first = list(free)
        for rank, kind, need in in_order(schedule, P, m, v):
            start = free[rank]
            if need is not None and ends[need] + comm > start:
                start = ends[need] + comm
            free[rank] = start + cost[kind]
            ends.append(free[rank])
        return max(end - start for start, end in zip(first, free, strict=True))

    few = (2 if splits_backward(schedule) else 1) * P + m % P
    if m <= few + P:
        return simulated(m)
    start, later = simulated(few), simulated(few + P)
    return later + (m - few - P) * (later - start) / P


@cache
def stages_behind_rank_0(schedule, P, v):
    """Number of stages after the last one of rank 0. A V has none: the last stage is on rank 0."""
    where = placement(schedule, P, v)
    return len(where) - 1 - max(s for s, rank in enumerate(where) if rank == 0)


class Costs:
    """Seconds of a job on a device. Remembers what layouts share, by what it depends on."""

    def __init__(self, job, device):
        self.job, self.device, self.known = job, device, {}
        self.parts_of = cache(lambda *stages: set(parts_of(job.model, *stages)))
        # elements that the forward kernels of a block read and write, per token, beside products:
        # (norms and residuals, of which --sp leaves each rank 1/T; MLP and heads)
        kv, inner, up, *_ = shape_of(job.model)
        self.moved = 10 * job.model.n_embd, (1 + up) * inner + 2 * (job.model.n_embd + kv)

    def compute(self, products=0.0, attention=0.0, moved=0.0, kernels=0):
        """Seconds for FLOPs of matrix products, FLOPs of fused attention, bytes moved."""
        device = self.device
        return (products / (1e12 * device.tflops * device.f_products)
                + attention / (1e12 * device.tflops * device.f_attention)
                + moved / (1e9 * device.hbm * device.f_hbm) + kernels * device.launch)

    def exposed(self, messages, computing, axis):
        """Seconds of an axis' messages that compute beside them does not hide."""
        return max(messages - computing, self.device.unhidden * messages)

    def ring(self, stride, size, nbytes, rounds=1):
        return ring_time(self.device, on_node(self.device, stride, size), size, nbytes, rounds)

    def attention(self, n, T):
        """(forward, backward) seconds of attention for n tokens. The mask halves the scores;
        backward computes them once more."""
        model = self.job.model
        forward = self.compute(attention=2 * n * model.block_size * model.n_embd / T)
        return forward, 2.5 * forward

    def tensor_messages(self, n, layout, split, products):
        """Seconds that (F, I, W) of a block wait for tensor-parallel ranks. products: the FLOPs of
        the block's forward."""
        model = self.job.model
        whole = self.ring(1, layout.tp, n * model.n_embd * self.job.width, rounds=2)
        alone = 2 * self.exposed(whole, 0.0, "tp")
        share = matrices(model)[0] / sum(matrices(model)) / 2  # in one of two columns
        column = self.compute(share * products)  # either half of its backward
        waits = 2 * self.exposed(whole / 2, column, "tp") if layout.sp else 0.0
        if split:  # only the second all-gather of x (--sp) overlaps with compute
            return alone, alone + waits, 0.0
        if layout.sp:  # gathers x beside one half, scatters its gradient beside the other
            return alone, alone / 2 + waits, waits
        return alone, 0.0, 2 * self.exposed(whole, column, "tp")  # beside the weight gradient

    def context_messages(self, n, layout, attention, attention_back):
        """(forward, backward) seconds that attention waits for context-parallel ranks. Its compute,
        attention and attention_back, hides the ring's messages."""
        T, C, w, device = layout.tp, layout.cp, self.job.width, self.device
        h, (kv, *_) = self.job.model.n_embd, shape_of(self.job.model)
        members = on_node(device, T, C)
        if C > 1 and layout.cp_attention == "all-to-all":  # q, k, v and the result
            swap = swap_time(device, members, C, 2 * n * (h + kv) / T * w)
            return swap, swap
        # seconds for a byte of each key and value. A hop from node to node goes through one port
        hop = 2 * n * kv / T / link(device, C if members == C else 1, C)
        forward = self.exposed(hop * w, attention / C, "cp") + device.latency
        # keys and values, and their gradients in at least 32 bits
        bytes_back = hop * (w + max(4, w))
        backward = self.exposed(bytes_back, attention_back / C, "cp") + device.latency
        return (C - 1) * forward, (C - 1) * backward

    def block(self, n, layout, split):
        """F, I and W of a block, for a microbatch of n tokens. split: I and W are separate."""
        model, w, T, E = self.job.model, self.job.width, layout.tp, layout.ep
        h, N, (kv, inner, up, *_) = model.n_embd, model.n_experts, shape_of(model)
        products = 2 * n * sum(matrices(model)) / T + 2 * n * h * N
        # bytes of the products' inputs and outputs, outside and inside of what T splits
        operands = n * w * (4 * h + (2 * h + 2 * kv + (up + 1) * inner) / T)
        moved = n * w * (self.moved[0] / (T if layout.sp else 1) + self.moved[1] / T)
        dense, experts = block_parameters(model, T, E)
        weights = w * (dense + experts)
        attention, attention_back = self.attention(n, T)
        F = self.compute(products, moved=operands + moved + weights, kernels=20) + attention
        I = attention_back + self.compute(  # noqa: E741
            products, moved=operands + 2 * moved + weights, kernels=25)
        W = self.compute(products, moved=operands + 2 * weights, kernels=12)
        if split and N:  # weight gradients of experts are not deferred
            at_once = self.compute(2 * n * model.top_k * experts * E / N, moved=2 * w * experts)
            I, W = I + at_once, W - at_once  # noqa: E741
        tp_F, tp_I, tp_W = self.tensor_messages(n, layout, split, products)
        cp_F, cp_I = self.context_messages(n, layout, attention, attention_back)
        # tokens to the experts and back; rank e and e + 1 are one data rank apart
        members = on_node(self.device, T * layout.cp * layout.pp, E)
        ep = 2 * swap_time(self.device, members, E, model.top_k * n * h * w / T)
        forward, backward = Time(F, tp_F, cp_F, ep), Time(I, tp_I, cp_I, ep)
        again = self.recomputed(layout, forward, attention)
        return forward, backward.plus(again), Time(W, tp_W)

    def recomputed(self, layout, forward, attention):
        """What is computed again in backward. attention: seconds of its forward."""
        return forward if layout.recompute else Time()

    def ends(self, n, T):
        """(F, I, W) of the embedding and of the head. The head's forward has the gradients, too:
        of a chunk's logits at once. Its softmax is in at least 32 bits."""
        h, w, words = self.job.model.n_embd, self.job.width, self.job.model.vocab_size / T
        reduce = self.ring(1, T, n * h * w, rounds=2)  # of rows forward, of a gradient backward
        moved = 2 * n * words * (w + 3 * max(w, 4)) + 3 * w * h * words
        head = self.compute(6 * n * h * words, moved=moved, kernels=20)
        return ((Time(self.compute(moved=2 * n * h * w), reduce),
                 Time(self.compute(moved=3 * n * h * w)), Time()),
                (Time(head, reduce), Time(), Time()))

    def layers(self, layout):
        """(F, I, W) of the embedding, of a block, of the head."""
        n, split = tokens_of(self.job, layout), splits_backward(layout.schedule)
        key = (n, split, layout.tp, layout.ep > 1 and layout.pp, layout[3:6], layout[10:])
        if key not in self.known:
            embedding, head = self.ends(n, layout.tp)
            self.known[key] = embedding, self.block(n, layout, split), head
        return self.known[key]

    def parts(self, layout):
        """The different Parts of the pipeline ranks."""
        return self.parts_of(layout.schedule, layout.pp, layout.chunks)

    def busiest_rank(self, layout):
        """((F, I, W) in seconds of a microbatch through all stages of the slowest pipeline rank,
        its Part)."""
        layers = [[*map(sum, layer)] for layer in self.layers(layout)]
        times = [*map(sum, layers)]
        part = max(self.parts(layout), key=lambda part: sum(map(mul, part, times)))
        return [sum(map(mul, part, action)) for action in zip(*layers, strict=True)], part

    def boundary(self, layout):
        """Seconds of a message to the next stage: each rank's, through a port of its own."""
        nbytes = tokens_of(self.job, layout) * self.job.model.n_embd * self.job.width
        P, T = layout.pp, layout.tp
        members = P if self.device.node % (T * layout.cp * P) == 0 else 1
        return (nbytes / (T if layout.sp else 1) / link(self.device, members, P)
                + self.device.latency)

    def pipeline_time(self, layout, messages=True):
        """Seconds from the first forward to the last backward, on the slowest rank."""
        (actions, _), P = self.busiest_rank(layout), layout.pp
        comm = self.boundary(layout) if messages and P > 1 else 0.0
        return makespan(layout.schedule, P, layout.microbatches, layout.chunks, (*actions, comm))

    def lower_bound(self, layout):
        """Fewest seconds that a step can take: messages between stages cost nothing, the bubble is
        the formula's. Without a formula: before rank 0's first I (or B) a microbatch goes forward
        through all stages, and back through those behind rank 0's last."""
        (actions, _), P, m = self.busiest_rank(layout), layout.pp, layout.microbatches
        rate = closed_form(layout.schedule, P, m, layout.chunks, (*actions, 0.0))
        if rate is not None:
            return m * sum(actions) / (1 - rate)
        f, i, w = actions
        behind = stages_behind_rank_0(layout.schedule, P, layout.chunks)
        trip = P * f + behind * i / layout.chunks
        return max(m * f, trip) + m * (i + w)

    def data_time(self, layout):
        """(exposed time of data-parallel messages, time of the optimizer)."""
        (forward, *backward), part = self.busiest_rank(layout)  # of a microbatch
        job, device, backward = self.job, self.device, sum(backward)
        model, w, m = job.model, job.width, layout.microbatches
        D, T, P, C, E = layout.dp, layout.tp, layout.pp, layout.cp, layout.ep
        ranks, outer = D * C, T * C * P
        members = on_node(device, T, C) * on_node(device, outer, D)
        dense, experts = (part.blocks * each for each in block_parameters(model, T, E))
        vocabulary = model.vocab_size * model.n_embd / T
        ends, _ = end_parameters(model, part, T)
        numel = dense + ends

        def half(numel):  # seconds of a reduce-scatter, or of an all-gather
            seconds = ring_time(device, members, ranks, numel * w)
            if experts:
                seconds += self.ring(outer * E, ranks // E, experts * w)
            # one message for each layer or, DDP, for each bucket of 25 MiB
            count = max(1, sum(part) if layout.zero else numel * w / (25 * 2**20))
            return seconds + (count - 1) * (ranks - 1) * device.latency

        grads = job.grad_width / w * half(numel)
        if layout.zero == 0:  # an all-reduce beside the last backward
            sent = self.exposed(2 * grads, backward, "dp")
        elif layout.zero < 3:  # reduce-scatters there, of ZeRO-2 beside every backward; then an
            # all-gather of new weights beside the next forward
            sent = (m if layout.zero == 2 else 1) * self.exposed(grads, backward, "dp")
            sent += self.exposed(half(numel), forward, "dp")
        else:  # and an all-gather of the weights beside every forward, of each end's matrix, and
            # beside every backward, of neither
            whole = half(dense + (part.embedding + part.head) * vocabulary)
            sent = m * (self.exposed(whole, forward, "dp")
                        + self.exposed(half(dense) + grads, backward, "dp"))
        where = placement(layout.schedule, P, layout.chunks)
        if where[0] != where[-1] and not isinstance(model, Llama):  # tied ends
            members, of_shards = 2 if device.node % outer == 0 else 1, ranks if layout.zero else 1
            sent += ring_time(device, members, 2, vocabulary * job.grad_width / of_shards, rounds=2)
        owned = numel / ranks + experts * E / ranks if layout.zero else numel + experts
        bytes_moved = 28 if w == 2 else 7 * w  # per parameter, by AdamW
        return sent, self.compute(moved=owned * bytes_moved, kernels=8 * part.blocks)

    def step_time(self, layout):
        return self.pipeline_time(layout) + sum(self.data_time(layout))

    def time_by_part(self, layout):
        """{compute, tp, cp, ep, pp, dp, optimizer, bubble}: seconds that add up to step_time's.
        tp, cp, ep, pp, dp: exposed messages of that axis."""
        busy, (_, part) = Time(), self.busiest_rank(layout)
        for number, layer in zip(part, self.layers(layout), strict=True):
            for time in layer:
                busy = busy.plus(time, number * layout.microbatches)
        without_messages = self.pipeline_time(layout, messages=False)
        sent, optimizer = self.data_time(layout)
        return {**busy._asdict(), "pp": self.pipeline_time(layout) - without_messages, "dp": sent,
                "optimizer": optimizer, "bubble": max(0.0, without_messages - sum(busy))}
