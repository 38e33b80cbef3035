"""Seconds that a training step takes in a layout, on a device that need not be here.

    kernel     FLOPs / rate + bytes that it reads and writes / memory bandwidth + a launch
    ring       of N ranks: rounds (N-1) (n/N / link + latency), for n bytes. An all-reduce has two
               rounds, a reduce-scatter or an all-gather one
    link       NVLink on a node; between nodes each rank of the group has a network port of its own
    overlap    messages beside compute cost the time by which they are longer, and at least a
               fraction (`unhidden`) of their own time
    step       the makespan of the schedule, with F, I and W of the busiest rank; then data-parallel
               messages and the optimizer. What is left out: LEFT_OUT in plan.py

In this file h is the model's width, w the bytes of a weight, n a number of tokens; T = layout.tp.
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
    blocks = L * forwards * (2 * sum(matrices(model)) + 4 * h * S)
    head = 6 * h * V
    return tokens * blocks + tokens * head


def on_node(device, stride, size):
    """How many ranks of a group share a node. The group's `size` ranks are `stride` apart. Nodes of
    8, tp 2, dp 16: a dp group has stride 2 and covers 32 ranks; gcd(8, 32) // 2 = 4 of its ranks
    share a node. (Exact where sizes divide the node or are multiples of it.)"""
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
    if comm != 0 or name not in IDLE:
        return None
    idle = IDLE[name](P, m, f, i, w)
    if idle is None:
        return None
    return idle / (idle + v * m * (f + i + w))


# ---- the makespan, by the clock ----
# engine/schedules.py's simulate() again, 40 times faster, because a search plays many costs on the
# same lists: in_order() sorts the actions once, makespan() then needs one pass. A test compares.


@cache
def in_order(schedule, P, m, v):
    """[(rank, kind, i)] of all actions of a schedule, each behind the actions that it needs. i: the
    index in this list of the action on another rank whose result the action needs, or None. What it
    needs of its own rank is earlier in the rank's list. The order holds for all costs."""
    where = placement(schedule, P, v)
    queues = [deque(actions) for actions in make_schedule(schedule, P, m, v)]
    rows = []
    forward, backward = {}, {}  # (stage, microbatch) -> the index of its F, of its B or I
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, k = queue[0]
                computed, source = (forward, stage - 1) if kind == "F" else (backward, stage + 1)
                needed = None
                if kind != "W" and 0 <= source < len(where) and where[source] != rank:
                    if (source, k) not in computed:
                        break  # not there yet: the next rank goes on
                    needed = computed[source, k]
                rows.append((rank, kind, needed))
                if kind != "W":
                    computed[stage, k] = len(rows) - 1
                queue.popleft()
    return rows


def played(schedule, P, m, v, costs):
    """Makespan for costs F, I, W, comm: one pass over in_order()."""
    f, i, w, comm = costs
    cost = {"F": f / v, "B": (i + w) / v, "I": i / v, "W": w / v}
    # When the first forward reaches a rank: stage r < P is on rank r
    begin = [rank * (f / v + comm) for rank in range(P)]
    free = list(begin)  # when the last action of each rank ended
    ends = []
    for rank, kind, needed in in_order(schedule, P, m, v):
        start = free[rank]
        if needed is not None and ends[needed] + comm > start:
            start = ends[needed] + comm
        free[rank] = start + cost[kind]
        ends.append(free[rank])
    return max(end - start for start, end in zip(begin, free, strict=True))


@cache
def makespan(schedule, P, m, v, costs):
    """Makespan for costs F, I, W, comm. Once the pipeline is full each P microbatches more add the
    same time, so two short runs predict a long one."""
    few = (2 if splits_backward(schedule) else 1) * P + m % P  # microbatches that fill it
    if m <= few + P:
        return played(schedule, P, m, v, costs)
    start = played(schedule, P, few, v, costs)
    later = played(schedule, P, few + P, v, costs)
    return later + (m - few - P) * (later - start) / P


@cache
def stages_behind_rank_0(schedule, P, v):
    """Number of stages after the last one of rank 0. A V has none: the last stage is on rank 0."""
    where = placement(schedule, P, v)
    return len(where) - 1 - max(s for s, rank in enumerate(where) if rank == 0)


# ---- a step ----

# kernels of a block in its forward, and in the two halves of its backward
KERNELS = {"F": 20, "I": 25, "W": 12}
NORMS = 4  # numbers that two norms read and write, for each of a token's h
RESIDUALS = 6  # numbers that two additions read and write, for each of a token's h


class Costs:
    """Seconds of a job on a device. Remembers what layouts share, by what it depends on."""

    def __init__(self, job, device):
        self.job, self.device = job, device
        self.known = {}  # layers()
        self.parts_of = cache(lambda *stages: set(parts_of(job.model, *stages)))
        shape, h = shape_of(job.model), job.model.n_embd
        # Numbers that the forward kernels of a block read and write per token, beside its matrix
        # products. --sp leaves each rank 1/T of the first sort; T always splits the second.
        self.moved_by_norms = (NORMS + RESIDUALS) * h
        in_mlp = shape.up * shape.inner + shape.inner  # the activation function reads, and writes
        in_attention = h + 2 * shape.kv + h  # reads queries, keys and values, writes the result
        self.moved_inside = in_mlp + in_attention

    def compute(self, products=0.0, attention=0.0, moved=0.0, kernels=0):
        """Seconds for FLOPs of matrix products, FLOPs of fused attention, bytes moved, kernels."""
        device = self.device
        return (products / (1e12 * device.tflops * device.f_products)
                + attention / (1e12 * device.tflops * device.f_attention)
                + moved / (1e9 * device.hbm * device.f_hbm) + kernels * device.launch)

    def exposed(self, messages, computing, axis):
        """Seconds of an axis' messages that compute beside them does not hide. (published.py has
        programs that overlap some axes more, or less.)"""
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
        """Seconds that (F, I, W) of a block wait for tensor-parallel ranks. A block has two pairs
        of a column and a row. Each pair all-reduces its output forward, and the gradient of its
        input backward; --sp has a gather and a scatter, half an all-reduce each, in their place,
        and gathers the column's input x once more for its gradient.

                              F waits for       I waits for                  W waits for
            --sp off          2 all-reduces     -                            2 all-reduces, beside W
            --sp on           as many halves    2 gathers                    2 scatters, beside W
                                                2 gathers of x, beside I
            `split`, sp off   2 all-reduces     2 all-reduces                -
            `split`, sp on    as many halves    2 gathers, 2 scatters        -
                                                2 gathers of x, beside I

        split: I and W are separate (zero bubble), and W comes too late to hide I's messages.
        products: FLOPs of the block's forward."""
        model = self.job.model
        one = self.ring(1, layout.tp, n * model.n_embd * self.job.width, rounds=2)  # an all-reduce
        two_alone = 2 * self.exposed(one, 0.0, "tp")  # two of them, beside no compute
        # what hides a message: I or W of one of the two columns
        share_of_column = matrices(model)[0] / sum(matrices(model)) / 2
        column = self.compute(share_of_column * products)
        halves_beside = 2 * self.exposed(one / 2, column, "tp") if layout.sp else 0.0
        if split:
            return two_alone, two_alone + halves_beside, 0.0
        if layout.sp:
            return two_alone, two_alone / 2 + halves_beside, halves_beside
        return two_alone, 0.0, 2 * self.exposed(one, column, "tp")

    def context_messages(self, n, layout, attention, attention_back):
        """(forward, backward) seconds that attention waits for context-parallel ranks. Its compute,
        attention and attention_back, hides the ring's messages."""
        T, ranks, w, device = layout.tp, layout.cp, self.job.width, self.device
        h, kv = self.job.model.n_embd, shape_of(self.job.model).kv
        members = on_node(device, T, ranks)
        if ranks > 1 and layout.cp_attention == "all-to-all":  # queries, keys, values; the result
            swap = swap_time(device, members, ranks, 2 * n * (h + kv) / T * w)
            return swap, swap
        # Seconds of a hop for each byte of a number. From node to node it goes through one port
        hop = 2 * n * kv / T / link(device, ranks if members == ranks else 1, ranks)
        forward = self.exposed(hop * w, attention / ranks, "cp") + device.latency
        # keys and values, and their gradients in at least 32 bits
        bytes_back = hop * (w + max(4, w))
        backward = self.exposed(bytes_back, attention_back / ranks, "cp") + device.latency
        return (ranks - 1) * forward, (ranks - 1) * backward

    def block(self, n, layout, split):
        """F, I and W of a block, each a Time, for a microbatch of n tokens. split: I and W are
        separate."""
        model, w, T, E = self.job.model, self.job.width, layout.tp, layout.ep
        h, n_experts, shape = model.n_embd, model.n_experts, shape_of(model)
        router = 2 * n * h * n_experts  # FLOPs
        products = 2 * n * sum(matrices(model)) / T + router
        # Bytes of the products' inputs and outputs. h: of two columns' inputs, two rows' outputs
        inside = 2 * h + 2 * shape.kv + (shape.up + 1) * shape.inner
        operands = n * w * (4 * h + inside / T)
        moved = n * w * (self.moved_by_norms / (T if layout.sp else 1) + self.moved_inside / T)
        dense, experts = block_parameters(model, T, E)
        weights = w * (dense + experts)
        attention, attention_back = self.attention(n, T)
        F = self.compute(products, moved=operands + moved + weights, kernels=KERNELS["F"])
        F += attention
        I = attention_back + self.compute(  # noqa: E741
            products, moved=operands + 2 * moved + weights, kernels=KERNELS["I"])
        W = self.compute(products, moved=operands + 2 * weights, kernels=KERNELS["W"])
        if split and n_experts:  # weight gradients of experts are not deferred
            of_one = experts * E / n_experts  # parameters of an expert on one tensor rank
            at_once = self.compute(2 * n * model.top_k * of_one, moved=2 * w * experts)
            I += at_once  # noqa: E741
            W -= at_once
        tp_F, tp_I, tp_W = self.tensor_messages(n, layout, split, products)
        cp_F, cp_I = self.context_messages(n, layout, attention, attention_back)
        # Tokens to the experts and back. Ranks that share experts are neighbours on the data axis
        members = on_node(self.device, T * layout.cp * layout.pp, E)
        ep = 2 * swap_time(self.device, members, E, model.top_k * n * h * w / T)
        forward, backward = Time(F, tp_F, cp_F, ep), Time(I, tp_I, cp_I, ep)
        again = self.recomputed(layout, forward, attention)
        return forward, backward.plus(again), Time(W, tp_W)

    def recomputed(self, layout, forward, attention):
        """The Time of a block's forward that runs again in backward. attention: seconds of the
        attention in it (published.py has programs that recompute only that)."""
        return forward if layout.recompute else Time()

    def ends(self, n, T):
        """(F, I, W) of the embedding, and of the head. The head computes its gradients in its
        forward, chunk by chunk of the logits. Its softmax is in at least 32 bits."""
        h, w, words = self.job.model.n_embd, self.job.width, self.job.model.vocab_size / T
        reduce = self.ring(1, T, n * h * w, rounds=2)  # of embedded tokens; of the head's gradient
        moved = 2 * n * words * (w + 3 * max(w, 4)) + 3 * w * h * words
        head = self.compute(6 * n * h * words, moved=moved, kernels=20)
        return ((Time(self.compute(moved=2 * n * h * w), reduce),
                 Time(self.compute(moved=3 * n * h * w)), Time()),
                (Time(head, reduce), Time(), Time()))

    def layers(self, layout):
        """(F, I, W) of the embedding, of a block, of the head."""
        n, split = tokens_of(self.job, layout), splits_backward(layout.schedule)
        pp = layout.pp if layout.ep > 1 else 0  # decides whether experts share a node
        key = (n, split, layout.tp, layout.cp, layout.ep, pp, layout.sp, layout.recompute,
               layout.cp_attention)
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
        # layers[i]: seconds of F, I and W of a layer of sort i: embedding, block, head
        layers = [[sum(time) for time in layer] for layer in self.layers(layout)]
        times = [sum(layer) for layer in layers]
        part = max(self.parts(layout), key=lambda part: sum(map(mul, part, times)))
        actions = [sum(map(mul, part, action)) for action in zip(*layers, strict=True)]
        return actions, part

    def boundary(self, layout):
        """Seconds of a message to the next stage: each rank's, through a port of its own."""
        nbytes = tokens_of(self.job, layout) * self.job.model.n_embd * self.job.width
        P, T = layout.pp, layout.tp
        members = P if self.device.node % (T * layout.cp * P) == 0 else 1
        return (nbytes / (T if layout.sp else 1) / link(self.device, members, P)
                + self.device.latency)

    def pipeline_time(self, layout, messages=True):
        """Seconds from the first forward to the last backward, on the slowest rank. messages: do
        those between stages take time?"""
        actions, _ = self.busiest_rank(layout)
        comm = self.boundary(layout) if messages and layout.pp > 1 else 0.0
        return makespan(layout.schedule, layout.pp, layout.microbatches, layout.chunks,
                        (*actions, comm))

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

    # ---- data-parallel messages and the optimizer ----

    def gather_time(self, layout, part, numel):
        """Seconds in which the data-parallel ranks gather numel weights, and those of the part's
        experts; or scatter as many sums."""
        w, device, outer = self.job.width, self.device, layout.tp * layout.cp * layout.pp
        ranks = layout.dp * layout.cp
        members = on_node(device, layout.tp, layout.cp) * on_node(device, outer, layout.dp)
        seconds = ring_time(device, members, ranks, numel * w)
        experts = part.blocks * block_parameters(self.job.model, layout.tp, layout.ep)[1]
        if experts:
            seconds += self.ring(outer * layout.ep, ranks // layout.ep, experts * w)
        # one message for each layer or, DDP, for each bucket of 25 MiB
        messages = max(1, sum(part) if layout.zero else numel * w / (25 * 2**20))
        return seconds + (messages - 1) * (ranks - 1) * device.latency

    def exposed_data_messages(self, layout, part, forward, backward):
        """Seconds of a step. forward, backward: compute of a microbatch, beside which they run."""
        model, m, T = self.job.model, layout.microbatches, layout.tp
        blocks = part.blocks * block_parameters(model, T, layout.ep)[0]
        weights = self.gather_time(layout, part, blocks + end_parameters(model, part, T)[0])
        grads = self.job.grad_width / self.job.width * weights
        if layout.zero == 0:  # an all-reduce beside the last backward
            return self.exposed(2 * grads, backward, "dp")
        if layout.zero == 1:  # a reduce-scatter there; new weights beside the next forward
            return self.exposed(grads, backward, "dp") + self.exposed(weights, forward, "dp")
        if layout.zero == 2:  # a reduce-scatter beside every backward
            return m * self.exposed(grads, backward, "dp") + self.exposed(weights, forward, "dp")
        # ZeRO-3 gathers the weights beside every forward, and again beside every backward, which
        # reads neither end's matrix: with a matrix for each end of the part
        vocabulary = model.vocab_size * model.n_embd / T
        ends = (part.embedding + part.head) * vocabulary
        in_forward = self.gather_time(layout, part, blocks + ends)
        in_backward = self.gather_time(layout, part, blocks) + grads
        return m * (self.exposed(in_forward, forward, "dp")
                    + self.exposed(in_backward, backward, "dp"))

    def tied_ends_time(self, layout):
        """Seconds in which the first and the last stage sum the gradient of the tied embedding."""
        model, device, T = self.job.model, self.device, layout.tp
        where = placement(layout.schedule, layout.pp, layout.chunks)
        if where[0] == where[-1] or isinstance(model, Llama):  # on one rank; or not tied
            return 0.0
        outer = T * layout.cp * layout.pp
        members = 2 if device.node % outer == 0 else 1  # is the whole pipeline on a node?
        shards = layout.dp * layout.cp if layout.zero else 1
        nbytes = model.vocab_size * model.n_embd / T * self.job.grad_width / shards
        return ring_time(device, members, 2, nbytes, rounds=2)

    def optimizer_time(self, layout, part):
        """Seconds in which AdamW reads and writes what this rank owns."""
        model, w, ranks = self.job.model, self.job.width, layout.dp * layout.cp
        dense, experts = (part.blocks * each
                          for each in block_parameters(model, layout.tp, layout.ep))
        numel = dense + end_parameters(model, part, layout.tp)[0]
        owned = numel / ranks + experts * layout.ep / ranks if layout.zero else numel + experts
        bytes_moved = 28 if w == 2 else 7 * w  # per parameter
        return self.compute(moved=owned * bytes_moved, kernels=8 * part.blocks)

    def data_time(self, layout):
        """(exposed time of data-parallel messages, time of the optimizer)."""
        (f, i, w), part = self.busiest_rank(layout)
        sent = self.exposed_data_messages(layout, part, f, i + w)
        return sent + self.tied_ends_time(layout), self.optimizer_time(layout, part)

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
