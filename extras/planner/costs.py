"""Seconds that a training step takes in a layout, on a device that need not be here.

    kernel     FLOPs / rate + bytes read and written / memory bandwidth + a launch
    ring       of N ranks: rounds x (N-1) x (nbytes/N / link + latency), for nbytes bytes. An
               all-reduce has two rounds, a reduce-scatter or an all-gather one
    tree       an all-reduce over many nodes, if faster: latencies grow with log2 of the nodes
    link       NVLink on a node; between nodes each rank of the group has a network port of its own
    overlap    messages beside compute cost the time by which they take longer than the compute, and
               at least a fraction (`unhidden`) of their own time
    step       the makespan of the schedule, with F, I and W of the busiest rank; then data-parallel
               messages and the optimizer

Names in this file: h is the model's width, w the bytes of a weight, n a number of tokens. P is the
number of pipeline ranks, v the stages of each, m the number of microbatches. T is the number of
tensor ranks, N of context ranks, E of expert ranks; R is the number of data ranks over which ZeRO
shards. The mesh has these axes, from the innermost outwards: T, N, E, P, R/E, copies of shards
(mesh.py). F, I and W are the actions of schedules.py: forward,
gradients of inputs, gradients of weights. Where f, i and w stand together, they are the seconds of
F, I and W for one microbatch and all stages of a rank.
"""

import math
import operator
from collections import deque
from functools import cache
from typing import NamedTuple

import schedules
from extras.planner.memory import (
    BUCKET,
    block_parameters,
    end_parameters,
    is_tied,
    matrices,
    parts_of,
    shape_of,
    tokens_of,
)
from extras.planner.mixture import splits_experts
from schedules import make_schedule, placement, splits_backward

LEFT_OUT = """\
stragglers, other traffic on the network, unevenly chosen experts, failures, shapes that
kernels dislike, launches of small kernels (--launch). For memory of CUDA and NCCL, and for
fragmentation, --reserve leaves room"""


def step_flops(job, recompute=False):
    """FLOPs of a step on all ranks, counted like in arXiv 2104.04473: a backward is two forwards,
    all S x S scores count, masked ones too, and recompute adds a second forward of the blocks."""
    model = job.model
    L, h, S, V = model.n_layer, model.n_embd, model.block_size, model.vocab_size
    forwards = 4 if recompute else 3  # a backward counts as two
    tokens = job.batch_size * S
    # Products with the keys, and with the values
    attention = 2 * 2 * shape_of(model).q * S
    blocks = L * forwards * (2 * sum(matrices(model)) + attention)
    head = 3 * 2 * h * V
    return tokens * blocks + tokens * head


def on_node(device, stride, size):
    """How many of a group's ranks are on one node. The group's `size` ranks are `stride` apart.
    Nodes of 8, tp 2, dp 16: a dp group has stride 2 and reaches over 32 ranks; on each node it has
    gcd(8, 32) // 2 = 4 ranks. (The number is exact where sizes divide the node or are multiples
    of the node.)"""
    return max(1, math.gcd(device.node, stride * size) // stride)


def link(device, members, size):
    """Bytes per second at which a group of `size` ranks, `members` of them on each node, passes
    data around its rings, all rings together. If all are on one node, the rings go over NVLink.
    Between nodes NCCL runs `members` rings at once. Each ring leaves the node at another member,
    through that member's port: so `members` ports carry the collective. (A collective with a single
    ring, like ring attention, has one port between nodes: its caller passes 1 for members.)"""
    inside = device.nvlink * device.f_nvlink
    if members >= size:
        return 1e9 * inside
    return 1e9 * min(inside, members * device.network * device.f_network)


def pipelines_beside(layout):
    """T N E P: the ranks of all pipelines that lie next to each other, those of neighbouring
    tensor, context and expert ranks. It is the distance of neighbours on the axis shard, too."""
    return layout.tp * layout.cp * layout.ep * layout.pp


def ring_time(device, members, size, nbytes, rounds=1):
    """Seconds of a collective on a tensor of `nbytes`. rounds: 2 for an all-reduce; 1 for either
    half of it, a reduce-scatter or an all-gather."""
    return rounds * (size - 1) * (nbytes / size / link(device, members, size) + device.latency)


TREE_SPEED = 0.92  # the share of a link's bandwidth that a tree reaches (NCCL's tuning.cc)


def tree_time(device, members, size, nbytes):
    """Seconds of an all-reduce in a tree: partial sums go up to its root, and the sum comes down
    again. Each node's members are a chain; the nodes are a binary tree. (NCCL runs two trees at
    once, each with half of the tensor: so every port sends and receives all the time.)"""
    hops = members - 1 + math.ceil(math.log2(size / members))
    return 2 * (nbytes / (TREE_SPEED * link(device, members, size)) + hops * device.latency)


def all_reduce_time(device, members, size, nbytes):
    """Seconds of an all-reduce in a ring or, if faster, in a tree. NCCL also takes a tree for short
    tensors on many nodes."""
    ring = ring_time(device, members, size, nbytes, rounds=2)
    return min(ring, tree_time(device, members, size, nbytes))


def swap_time(device, members, size, nbytes):
    """Seconds of an all-to-all of a tensor of `nbytes` on each rank. 1/size of the tensor goes to
    each rank: over NVLink to the ranks of the same node and, at the same time, through the sender's
    own network port to all others."""
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


# ---- the makespan, by the clock ----
# The makespan is the longest time from the start of a rank's first action to the end of its last.
# simulate() of schedules.py computes it, too. The functions here are faster, because a search
# plays the same lists of actions with many costs:
#     in_order()    sorts the actions of a schedule, once for all costs
#     played()      needs one pass over the sorted actions
#     makespan()    plays short runs only, and predicts long ones
# A test compares them with simulate().


@cache
def in_order(schedule, P, m, v):
    """[(rank, kind, needed)] of all actions of a schedule, sorted: each comes after the actions
    whose results it needs. needed: the index in this list of the action on another rank that
    computes the input. None: no other rank computes it. (The actions of one rank keep the order
    of its list.) The sorted list serves all costs."""
    where = placement(schedule, P, v)
    queues = [deque(actions) for actions in make_schedule(schedule, P, m, v)]
    rows = []
    forward, backward = {}, {}  # (stage, microbatch) -> the index of its F, of its B or I
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, k = queue[0]
                needed = None
                if kind != "W":  # W needs its own rank's I only
                    # F needs the F of the stage before, B and I the B or I of the stage after.
                    # known: the dict to look that action up in, and to record this action in
                    if kind == "F":
                        known, source = forward, stage - 1
                    else:
                        known, source = backward, stage + 1
                    if 0 <= source < len(where) and where[source] != rank:
                        if (source, k) not in known:
                            break  # not computed yet: the next rank goes on
                        needed = known[source, k]
                    known[stage, k] = len(rows)
                rows.append((rank, kind, needed))
                queue.popleft()
    return rows


def played(schedule, P, m, v, costs):
    """Makespan in seconds for costs (f, i, w, seconds of a message): one pass over in_order()."""
    f, i, w, comm = costs
    cost = {"F": f / v, "B": (i + w) / v, "I": i / v, "W": w / v}  # seconds of one stage
    # When the first forward reaches each rank: stages 0 .. P-1 are on ranks 0 .. P-1
    begin = [rank * (f / v + comm) for rank in range(P)]
    free = list(begin)  # when each rank's last action so far ended
    ends = []  # when each action of in_order() ended
    for rank, kind, needed in in_order(schedule, P, m, v):
        start = free[rank]
        if needed is not None and ends[needed] + comm > start:
            start = ends[needed] + comm
        free[rank] = start + cost[kind]
        ends.append(free[rank])
    return max(end - start for start, end in zip(begin, free, strict=True))


@cache
def makespan(schedule, P, m, v, costs):
    """Makespan in seconds for costs (f, i, w, seconds of a message). Once the pipeline is full,
    each P further microbatches add nearly the same time. So two short runs, one of `few`
    microbatches and one of few + P, predict a long one within 0.5% (a test compares). m - few is a
    multiple of P."""
    few = (2 if splits_backward(schedule) else 1) * P + m % P  # microbatches that fill the pipeline
    if m <= few + P:
        return played(schedule, P, m, v, costs)
    short = played(schedule, P, few, v, costs)
    longer = played(schedule, P, few + P, v, costs)
    return longer + (m - few - P) * (longer - short) / P


@cache
def stages_behind_rank_0(schedule, P, v):
    """Number of stages after the last stage of rank 0. In zb-v it is 0: rank 0 has the last of all
    stages."""
    where = placement(schedule, P, v)
    last_of_rank_0 = max(stage for stage, rank in enumerate(where) if rank == 0)
    return len(where) - 1 - last_of_rank_0


# ---- a step ----


def dot(numbers, values):
    """The sum of the products of two lists."""
    return sum(map(operator.mul, numbers, values))


# Roughly how many kernels are launched: in a block's forward, in the two halves of its backward, in
# the head, and in the optimizer for each block
KERNELS = {"F": 20, "I": 25, "W": 12, "head": 20, "optimizer": 8}
# In a block's forward, numbers read or written for each element of an activation
NORMS = 4  # two norms: each reads the element and writes it
RESIDUALS = 6  # two additions: each reads two elements and writes one
# Roughly how often a router's score is read or written: by product, softmax, top-k, balance loss
SCORES = 6


class Costs:
    """Seconds of a job on a device. The times of a layer, and the busiest rank, are computed once
    for all layouts that have them in common."""

    def __init__(self, job, device):
        self.job = job
        self.device = device
        # numbers_of(layout) -> (F, I, W) of the embedding, of a block, of the head
        self.known = {}
        # (numbers_of(layout), schedule, P, v) -> ([F, I, W], Part) of the slowest pipeline rank
        self.busiest = {}
        # (schedule, P, v) -> the different Parts of the pipeline ranks
        self.different_parts = cache(
            lambda schedule, P, v: set(parts_of(job.model, schedule, P, v)))
        shape, h = shape_of(job.model), job.model.n_embd
        # Numbers per token that the kernels of a block's forward move, that is, read from memory or
        # write to it. Matrix products are not among these kernels. Tensor ranks split the work of
        # the second and the third row. They split the work of the first row only under --sp:
        #     moved_by_norms      norms and residual additions
        #     moved_inside        attention, and the MLP's activation function
        #     moved_by_routing    a router's scores; tokens to their experts and back
        # (In train.py only --sp splits the scores. They are few, so here they always count as
        # split)
        self.moved_by_norms = (NORMS + RESIDUALS) * h
        inner = shape.inner + shape.shared
        in_mlp = shape.up * inner + inner  # the activation function reads, and writes
        # Attention reads queries, keys and values, and writes the result
        in_attention = shape.q + 2 * shape.kv + shape.q
        self.moved_inside = in_mlp + in_attention
        # moved_by_routing: each choice of an expert moves a row of h numbers
        #     out to the expert     read and written   2
        #     back                  read and written   2
        #     times its gate        read and written   2
        #     into the sum          read               1 (the sum is written once for all choices)
        # And each of the router's scores is read or written SCORES times. A score has 32 bits, and
        # counts as two numbers
        self.moved_by_routing = 0
        if job.model.n_experts:
            choices = (2 + 2 + 2 + 1) * job.model.top_k * h
            self.moved_by_routing = choices + SCORES * 2 * job.model.n_experts

    def compute(self, products=0.0, attention=0.0, moved=0.0, kernels=0):
        """Seconds for FLOPs of matrix products, FLOPs of fused attention, bytes moved (read from
        memory, or written to it), and launches of kernels."""
        device = self.device
        return (products / (1e12 * device.tflops * device.f_products)
                + attention / (1e12 * device.tflops * device.f_attention)
                + moved / (1e9 * device.hbm * device.f_hbm)
                + kernels * device.launch)

    def exposed(self, messages, computing, axis):
        """Seconds by which an axis' messages lengthen the compute that runs beside them. messages,
        computing: seconds of either alone. (published.py replaces this method for programs that
        overlap more, or less.)"""
        return max(messages - computing, self.device.unhidden * messages)

    def all_gather(self, stride, size, nbytes):
        """Seconds of an all-gather, or of a reduce-scatter, in a group of `size` ranks, `stride`
        apart."""
        return ring_time(self.device, on_node(self.device, stride, size), size, nbytes)

    def all_reduce(self, stride, size, nbytes):
        """Seconds of an all-reduce in a group of `size` ranks, `stride` apart."""
        return all_reduce_time(self.device, on_node(self.device, stride, size), size, nbytes)

    def attention(self, n, T):
        """(forward, backward) seconds of attention for n tokens. Forward has two products over the
        S x S scores, and the mask halves them. Backward has five: it computes the scores again."""
        model = self.job.model
        products = 2 * 2 * n * model.block_size * shape_of(model).q / T
        forward = self.compute(attention=products / 2)
        return forward, 5 / 2 * forward

    def tensor_messages(self, n, layout, split, products):
        """Seconds that (F, I, W) of a block wait for tensor-parallel ranks. A block has two pairs
        of a column and a row. Each pair all-reduces its output in forward, and the gradient of its
        input in backward. --sp has an all-gather (AG) and a reduce-scatter (RS), half an all-reduce
        each, in place of an all-reduce. And --sp all-gathers the column's input x once more, for
        the gradient of the column's weights.

                              F waits for       I waits for                  W waits for
            --sp off          2 all-reduces     -                            2 all-reduces, beside W
            --sp on           2 AG, 2 RS        2 AG; 2 AG of x, beside I    2 RS, beside W
            `split`, sp off   2 all-reduces     2 all-reduces                -
            `split`, sp on    2 AG, 2 RS        2 AG, 2 RS;                  -
                                                2 AG of x, beside I

        split: I and W are separate (zero bubble), and W comes too late to hide I's messages.
        products: FLOPs of the block's forward. Experts take the place of the second pair, and are
        counted like it. (In fact nothing hides the experts' messages in backward, and no x is
        all-gathered a second time.)"""
        model = self.job.model
        all_reduce = self.all_reduce(1, layout.tp, n * model.n_embd * self.job.width)
        # Two all-reduces beside no compute. Here all of their time is exposed; for some programs
        # published.py exposes only a share of this time
        two_alone = 2 * self.exposed(all_reduce, 0.0, "tp")
        # A message beside I (or W) travels during the I (or W) of one column. A block has two
        # columns, whose share of the block's products is:
        share_of_columns = matrices(model)[0] / sum(matrices(model))
        product = self.compute(share_of_columns / 2 * products)  # seconds of one column's I, or W
        halves_beside = 2 * self.exposed(all_reduce / 2, product, "tp") if layout.sp else 0.0
        if split:
            return two_alone, two_alone + halves_beside, 0.0
        if layout.sp:
            return two_alone, two_alone / 2 + halves_beside, halves_beside
        return two_alone, 0.0, 2 * self.exposed(all_reduce, product, "tp")

    def context_messages(self, n, layout, attention, attention_back):
        """(forward, backward) seconds that attention waits for context-parallel ranks. attention,
        attention_back: seconds of its compute in forward and in backward, beside which the ring's
        messages travel."""
        T, ranks, w, device = layout.tp, layout.cp, self.job.width, self.device
        q, kv = shape_of(self.job.model)[:2]
        ranks_on_node = on_node(device, T, ranks)
        if ranks > 1 and layout.cp_attention == "all-to-all":
            # Queries and the result, 2 q; keys and values, 2 kv. Backward swaps their gradients
            swap = swap_time(device, ranks_on_node, ranks, 2 * n * (q + kv) / T * w)
            return swap, swap
        # link()'s members. On one node: all ranks. On several nodes: 1, because keys and values go
        # around one ring, in which only the last rank of a node sends to the next node
        members = ranks if ranks_on_node == ranks else 1
        # A hop passes on keys and values, 2 kv numbers per token. per_byte: seconds of a hop if a
        # number had one byte
        per_byte = 2 * n * kv / T / link(device, members, ranks)
        # A rank attends to its own keys and values, then to those of one other rank after another.
        # Each of these parts takes 1/ranks of the compute. Beside each part but the last, a hop
        # brings the keys and values of the next part
        forward = self.exposed(per_byte * w, attention / ranks, "cp") + device.latency
        # In backward a hop also passes on the gradients of keys and values, in at least 32 bits
        hop_back = per_byte * (w + max(w, 4))
        backward = self.exposed(hop_back, attention_back / ranks, "cp") + device.latency
        return (ranks - 1) * forward, (ranks - 1) * backward

    def block(self, n, layout, split):
        """F, I and W of a block, each a Time, for a microbatch of n tokens. split: I and W are
        separate."""
        model, w, T, E = self.job.model, self.job.width, layout.tp, layout.ep
        h, n_experts, shape = model.n_embd, model.n_experts, shape_of(model)
        # FLOPs of the router. (In train.py --sp splits them over tensor ranks. They are few, so
        # here each tensor rank always counts all of them, unlike the bytes in moved_by_routing)
        router = 2 * n * h * n_experts
        products = 2 * n * sum(matrices(model)) / T + router
        # Bytes of activations that the products read and write. Whole on each rank: inputs of two
        # columns and outputs of two rows, 4 h per token. Split by T: outputs of the columns,
        # q + 2 kv and up * inner, and inputs of the rows, q and inner
        inner = shape.inner + shape.shared
        inside = (shape.q + 2 * shape.kv + shape.up * inner) + (shape.q + inner)
        operands = n * w * (4 * h + inside / T)
        # Bytes that the other kernels move in a forward
        moved = n * w * (self.moved_by_norms / (T if layout.sp else 1)
                         + (self.moved_inside + self.moved_by_routing) / T)
        dense, experts = block_parameters(model, T, E)
        weights = w * (dense + experts)
        gradients = self.job.grad_width * (dense + experts)
        attention, attention_back = self.attention(n, T)
        F = self.compute(products, moved=operands + moved + weights, kernels=KERNELS["F"])
        F += attention
        # I: the backward of the other kernels moves about twice as much as their forward, because
        # it reads gradients and saved inputs, and writes gradients
        I = self.compute(  # noqa: E741
            products, moved=operands + 2 * moved + weights, kernels=KERNELS["I"])
        I += attention_back  # noqa: E741
        # W reads the inputs of columns and rows and the gradients of their outputs, together as
        # large as the operands. And W adds to the weights' gradients: it reads and writes them, in
        # their own width
        W = self.compute(products, moved=operands + 2 * gradients, kernels=KERNELS["W"])
        if split and n_experts:
            # Experts do not defer their weight gradients: move their seconds from W to I. The n
            # tokens have made n top_k choices, and T ranks share the work. So for each choice this
            # rank has the work of 1/T of an expert
            share_of_expert = experts * E / n_experts  # parameters of an expert, divided by T
            at_once = self.compute(2 * n * model.top_k * share_of_expert,
                                   moved=2 * self.job.grad_width * experts)
            I += at_once  # noqa: E741
            W -= at_once
        tp_F, tp_I, tp_W = self.tensor_messages(n, layout, split, products)
        cp_F, cp_I = self.context_messages(n, layout, attention, attention_back)
        # Tokens go to the experts and back; in backward their gradients do
        members = on_node(self.device, T * layout.cp, E)
        ep = 2 * swap_time(self.device, members, E, model.top_k * n * h * w / T)
        if T > 1 and splits_experts(model):
            # Each of T ranks has 1/T of the tokens that came: all-gather them, reduce-scatter the
            # outputs
            ep += 2 * self.all_gather(1, T, model.top_k * n * h * w)
        forward, backward = Time(F, tp_F, cp_F, ep), Time(I, tp_I, cp_I, ep)
        again = self.recomputed(layout, forward, attention)
        return forward, backward.plus(again), Time(W, tp_W)

    def recomputed(self, layout, forward, attention):
        """The Time that recompute adds to a block's backward. forward: the Time of its forward.
        attention: the seconds of attention in that forward (published.py has programs that
        recompute attention only)."""
        return forward if layout.recompute else Time()

    def ends(self, n, T):
        """(F, I, W) of the embedding, and (F, I, W) of the head; each a Time. The head computes its
        gradients in its forward, chunk by chunk of the logits. Its softmax has at least 32 bits."""
        h, w = self.job.model.n_embd, self.job.width
        words = self.job.model.vocab_size / T  # tokens of the vocabulary on this rank
        # Each end has one all-reduce: the embedding sums the embedded tokens, and the head sums the
        # gradient of its input
        reduce = self.all_reduce(1, T, n * h * w)
        # Bytes moved, if four tensors are written once and read once: in w bytes the logits; in at
        # least 32 bits their copy, their log-softmax and their gradient. Most published programs,
        # to which the fractions of hardware.py are fitted, have these four. (train.py writes the
        # gradient over the logits, in w bytes)
        logits = 2 * n * words * (w + 3 * max(w, 4))
        # Bytes moved of the matrix, which is read for the logits and for grad_x, and of its
        # gradient, which is written
        matrix = 3 * w * h * words
        products = 3 * 2 * n * h * words  # FLOPs of logits, grad_x, and the matrix's gradient
        head = self.compute(products, moved=logits + matrix, kernels=KERNELS["head"])
        # The embedding's forward reads a row per token, and writes it
        look_up = self.compute(moved=2 * n * h * w)
        # The embedding's backward adds to the matrix's gradient, in I, because W has only the
        # deferred weight gradients of blocks. Per token a gradient and a row's sum are read, and
        # the sum is written
        add = self.compute(moved=3 * n * h * w)
        return ((Time(look_up, reduce), Time(add), Time()),
                (Time(head, reduce), Time(), Time()))

    def numbers_of(self, layout):
        """The numbers of a layout on which layers() depends."""
        return (tokens_of(self.job, layout), splits_backward(layout.schedule), layout.tp, layout.cp,
                layout.ep, layout.sp, layout.recompute, layout.cp_attention)

    def layers(self, layout):
        """(F, I, W) of the embedding, of a block, of the head; each a Time."""
        numbers = self.numbers_of(layout)
        if numbers not in self.known:
            n, split, *_ = numbers
            embedding, head = self.ends(n, layout.tp)
            self.known[numbers] = embedding, self.block(n, layout, split), head
        return self.known[numbers]

    def parts(self, layout):
        """The different Parts (memory.py) of the pipeline ranks. A Part says how many
        layers of each kind a rank has: embedding, blocks, head."""
        return self.different_parts(layout.schedule, layout.pp, layout.chunks)

    def busiest_rank(self, layout):
        """([f, i, w], Part) of the slowest pipeline rank. f, i, w: seconds of F, I and W for one
        microbatch and all stages of this rank. Part: the layers of these stages."""
        key = self.numbers_of(layout), layout.schedule, layout.pp, layout.chunks
        if key not in self.busiest:
            # seconds[action][layer]. action: 0 to 2 for F, I, W. layer: 0 to 2 for the embedding,
            # one block, the head
            layers = self.layers(layout)
            seconds = [[sum(times[action]) for times in layers] for action in range(3)]
            # For each layer, the seconds of F, I and W together
            layer_seconds = [sum(each) for each in zip(*seconds, strict=True)]
            # A Part has part[0] embeddings, part[1] blocks, part[2] heads
            slowest = max(self.parts(layout), key=lambda part: dot(part, layer_seconds))
            action_seconds = [dot(slowest, by_layer) for by_layer in seconds]
            self.busiest[key] = action_seconds, slowest
        return self.busiest[key]

    def boundary(self, layout):
        """Seconds of a message from a rank to the next stage. All ranks of a stage send at once,
        each through its own port."""
        nbytes = tokens_of(self.job, layout) * self.job.model.n_embd * self.job.width
        P, T = layout.pp, layout.tp
        # If a node has room for all pipelines that lie next to each other, messages go over NVLink,
        # else over the network
        members = P if self.device.node % pipelines_beside(layout) == 0 else 1
        return (nbytes / (T if layout.sp else 1) / link(self.device, members, P)
                + self.device.latency)

    def pipeline_time(self, layout, messages=True):
        """Seconds of the schedule: the longest time from a rank's first action to its last.
        messages: do messages between stages take time?"""
        seconds, _ = self.busiest_rank(layout)
        comm = self.boundary(layout) if messages and layout.pp > 1 else 0.0
        return makespan(layout.schedule, layout.pp, layout.microbatches, layout.chunks,
                        (*seconds, comm))

    def lower_bound(self, layout):
        """A lower bound of pipeline_time, in seconds. Messages between stages are assumed to take
        no time. If closed_form() knows the bubble, the bound follows from the bubble. Else the
        bound is the shortest time that rank 0 can take."""
        seconds, _ = self.busiest_rank(layout)  # [f, i, w]
        P, m, v = layout.pp, layout.microbatches, layout.chunks
        bubble = schedules.closed_form(layout.schedule, P, m, v, (*seconds, 0.0))
        if bubble is not None:
            return m * sum(seconds) / (1 - bubble)
        # trip: seconds in which the first microbatch goes forward through all stages, and back
        # through the stages behind rank 0's last stage. Only then can rank 0 start its first I (or
        # B). By then rank 0 may have run all its m F, but no I and no W: m I and m W are left
        f, i, w = seconds
        trip = P * f + stages_behind_rank_0(layout.schedule, P, v) * i / v
        return max(m * f, trip) + m * (i + w)

    # ---- a step's end: data-parallel messages and the optimizer ----

    def replicas(self, layout):
        """[(members, ranks)]: how many of a group's ranks are on one node, and how many it has.
        First the group over which ZeRO shards all parameters but the experts'; then the group of
        the experts: its ranks have the same ones, so they are every E-th data rank of R, each with
        its context ranks."""
        device, T, N, E = self.device, layout.tp, layout.cp, layout.ep
        R = layout.replicas // N
        distant = on_node(device, pipelines_beside(layout), R // E)
        return [(on_node(device, T, N * E) * distant, R * N),
                (on_node(device, T, N) * distant, R // E * N)]

    def data_messages(self, layout, part, numel, collective):
        """Seconds of the collectives in which the data-parallel ranks of a Part exchange weights,
        or gradients. numel: the number of parameters exchanged, without those of experts, which are
        added here. Each parameter counts w bytes, like a weight; for gradients of another width the
        caller scales the seconds. collective: the function that returns the seconds of one
        collective. It is ring_time for an all-gather or a reduce-scatter, else all_reduce_time.

        Under ZeRO each layer has one collective; under DDP each bucket has one. With --ep the
        experts have collectives of their own: one for each layer (ZeRO) or bucket (DDP), too."""
        w, device, E = self.job.width, self.device, layout.ep
        (members, ranks), of_experts = self.replicas(layout)
        experts = part.blocks * block_parameters(self.job.model, layout.tp, E)[1]  # parameters
        if E == 1:  # the experts are in their layer's collective
            numel, experts = numel + experts, 0
        times = max(1, sum(part) if layout.zero else numel * w / BUCKET)  # number of collectives
        seconds = times * collective(device, members, ranks, numel * w / times)
        if experts:
            times = max(1, part.blocks if layout.zero else experts * w / BUCKET)
            seconds += times * collective(device, *of_experts, experts * w / times)
        return seconds

    def copies_messages(self, layout, part, numel):
        """Seconds in which the data ranks that hold the same shard (--shard) sum its gradients: in
        as many all-reduces as data_messages has collectives. numel: like there."""
        copies = layout.copies
        # Between two of these ranks are the ranks that hold the other shards
        distance = pipelines_beside(layout) * (layout.replicas // layout.cp // layout.ep)
        members = on_node(self.device, distance, copies)

        def of_shard(device, _, ranks, nbytes):
            shard = nbytes / ranks if layout.zero else nbytes
            return all_reduce_time(device, members, copies, shard)

        return self.data_messages(layout, part, numel, of_shard) if copies > 1 else 0.0

    def exposed_data_messages(self, layout, part, forward, backward):
        """Seconds by which data-parallel messages lengthen a step. part: the Part of a rank.
        forward, backward: seconds of this rank's forward and backward of one microbatch; the
        messages travel beside them."""
        model, m, T = self.job.model, layout.microbatches, layout.tp
        # Parameters on this rank. Those of experts are added in data_messages(). Left out, because
        # they are few: positions, and the head's norm
        dense, _ = block_parameters(model, T, layout.ep)  # one block's parameters
        vocabulary, _ = end_parameters(model, part, T)
        numel = part.blocks * dense + vocabulary
        wider = self.job.grad_width / self.job.width  # bytes of a gradient per byte of its weight
        # When backward is over, beside no compute
        copies = self.exposed(wider * self.copies_messages(layout, part, numel), 0.0, "dp")
        if layout.zero == 0:  # gradients are all-reduced beside the last backward
            grads = wider * self.data_messages(layout, part, numel, all_reduce_time)
            return self.exposed(grads, backward, "dp") + copies
        weights = self.data_messages(layout, part, numel, ring_time)  # seconds to all-gather them
        grads = wider * weights  # seconds to reduce-scatter the gradients
        # ZeRO-1 and 2: new weights are all-gathered beside the next step's first forward
        new_weights = self.exposed(weights, forward, "dp") + copies
        if layout.zero == 1:  # gradients are reduce-scattered beside the last backward
            return self.exposed(grads, backward, "dp") + new_weights
        if layout.zero == 2:  # gradients are reduce-scattered beside every backward
            return m * self.exposed(grads, backward, "dp") + new_weights
        # ZeRO-3 reduce-scatters gradients beside every backward, and all-gathers weights beside
        # every forward and every backward. Forward needs the weights of the blocks, and the matrix
        # of the embedding or the head where the Part has one. Backward needs the weights of the
        # blocks only: the backward of the embedding, and that of the head, read no matrix
        matrices_of_ends = (part.embedding + part.head) * model.vocab_size * model.n_embd / T
        in_forward = self.data_messages(layout, part, part.blocks * dense + matrices_of_ends,
                                        ring_time)
        in_backward = grads + self.data_messages(layout, part, part.blocks * dense, ring_time)
        return copies + m * (self.exposed(in_forward, forward, "dp")
                             + self.exposed(in_backward, backward, "dp"))

    def tied_ends_time(self, layout):
        """Seconds in which the ranks of the first and the last stage sum the gradients of the
        matrix that embedding and head share (tied weights)."""
        model, device, T = self.job.model, self.device, layout.tp
        where = placement(layout.schedule, layout.pp, layout.chunks)  # where[stage]: its rank
        # Nothing to send if one rank has both stages, or if the ends have two matrices
        if where[0] == where[-1] or not is_tied(model):
            return 0.0
        # If a node has room for all pipelines that lie next to each other (see boundary), the two
        # ranks that sum a gradient are on one node
        members = 2 if device.node % pipelines_beside(layout) == 0 else 1
        # Under ZeRO the replicas have summed the gradient before, and each has a shard of the sum
        shards = layout.replicas if layout.zero else 1
        nbytes = model.vocab_size * model.n_embd / T * self.job.grad_width / shards
        return all_reduce_time(device, members, 2, nbytes)

    def optimizer_time(self, layout, part):
        """Seconds in which AdamW reads and writes the states of the parameters that a rank steps.
        These are all parameters of its Part or, under ZeRO, its shard of them."""
        job, model, replicas = self.job, self.job.model, layout.replicas
        dense, experts = (part.blocks * each
                          for each in block_parameters(model, layout.tp, layout.ep))
        vocabulary, _ = end_parameters(model, part, layout.tp)
        numel = dense + vocabulary
        owned = numel + experts  # parameters that this rank steps
        if layout.zero:
            # The rank's shard. Experts have E times fewer replicas, so shards of experts are E
            # times larger
            owned = numel / replicas + experts * layout.ep / replicas
        # Bytes per parameter. The states are a master weight and two moments, of at least 32 bits
        # each. (A weight of at least 32 bits is its own master)
        states = 3 * max(job.width, 4)
        moved = 2 * states + job.grad_width  # states are read and written, the gradient is read
        if job.width == 2:
            moved += job.width  # the 16-bit weight is written
        return self.compute(moved=owned * moved, kernels=KERNELS["optimizer"] * part.blocks)

    def update_time(self, layout):
        """(sent, optimizer) in seconds. sent: exposed data-parallel messages, and the messages of
        tied_ends_time. optimizer: the optimizer's step."""
        (f, i, w), part = self.busiest_rank(layout)
        sent = self.exposed_data_messages(layout, part, f, i + w)
        return sent + self.tied_ends_time(layout), self.optimizer_time(layout, part)

    def step_time(self, layout):
        """Seconds of a step."""
        return self.pipeline_time(layout) + sum(self.update_time(layout))

    def breakdown(self, layout):
        """{part of a step: seconds}; their sum is step_time. compute: forwards and backwards of the
        busiest rank. tp, cp, ep, pp, dp: exposed messages of that axis. optimizer: the
        optimizer's step. bubble: the seconds that the busiest rank idles."""
        _, part = self.busiest_rank(layout)
        busy = Time()  # seconds of the busiest rank's actions, all microbatches together
        for number, layer in zip(part, self.layers(layout), strict=True):
            for time in layer:
                busy = busy.plus(time, number * layout.microbatches)
        without_messages = self.pipeline_time(layout, messages=False)
        sent, optimizer = self.update_time(layout)
        # `sent` has the messages of tied ends, too. They travel along pp: count them there
        tied = self.tied_ends_time(layout)
        return {**busy._asdict(), "pp": self.pipeline_time(layout) - without_messages + tied,
                "dp": sent - tied, "optimizer": optimizer,
                "bubble": max(0.0, without_messages - sum(busy))}
