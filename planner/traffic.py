"""Bytes that a rank sends in a step, by message: the table of docs/costs.md, for one layout.

A ring all-reduce of n bytes over R ranks sends 2 (R-1)/R n from each rank, a reduce-scatter or an
all-gather half of that. Left out: the loss, the norm and the stop flag, a few numbers for all
ranks; the routers' statistics; padding. Experts are taken as evenly chosen. A test counts what
train.py sends.
"""

from typing import NamedTuple

from planner.hardware import Llama
from planner.memory import block_parameters, end_parameters, parts_of, tokens_of
from schedules import placement


class Message(NamedTuple):
    axis: str  # tp, cp, ep, pp or dp
    name: str
    times: float  # in a step
    nbytes: float  # that one rank sends each time

    @property
    def total(self):
        return self.times * self.nbytes


def tensor_traffic(job, layout, part):
    model, w, T, m = job.model, job.width, layout.tp, layout.microbatches
    n, h = tokens_of(job, layout), model.n_embd
    half = (T - 1) / T * n * h * w  # an all-gather or a reduce-scatter of b S C
    forwards = 2 if layout.recompute == "full" else 1
    wide = 2 * (T - 1) / T * n * max(w, 4)  # an all-reduce of a number per token
    yield Message("tp", "largest logit, sums, target's logit of each token", m * part.head,
                  3 * wide)
    if not layout.sp:
        yield Message("tp", "all-reduce of activations, 2 a block",
                      m * (part.blocks * 2 * forwards + part.embedding), 2 * half)
        yield Message("tp", "all-reduce of their gradients, 2 a block",
                      m * (part.blocks * 2 + part.head), 2 * half)
        return
    # Each rank sees other tokens: norms, biases of rows and positions sum their gradients over tp
    of_block, of_head = (2, 1) if isinstance(model, Llama) else (6, 2)
    of_embedding = 0 if isinstance(model, Llama) else model.block_size
    if model.n_experts:
        of_block += model.n_experts - 1
    numel = part.blocks * of_block + part.embedding * of_embedding + part.head * of_head
    yield Message("tp", "all-reduce of the gradients of norms, biases, positions", 1, 2 * (T - 1) / T
                  * numel * h / (layout.dp * layout.cp if layout.zero else 1) * job.grad_width)
    again = 1 if model.n_experts else 2  # column-parallel layers gather their input once more
    yield Message("tp", "all-gather or reduce-scatter of activations, 4 a block",
                  m * (part.blocks * 4 * forwards + part.embedding + part.head), half)
    yield Message("tp", f"the same of their gradients, 4 a block, and {again} inputs once more",
                  m * (part.blocks * (4 + again) + part.embedding + 2 * part.head), half)


def context_traffic(job, layout, part):
    w, C, m = job.width, layout.cp, layout.microbatches
    elements = tokens_of(job, layout) * job.model.n_embd / layout.tp
    forwards = 2 if layout.recompute == "full" else 1
    if layout.cp_attention == "all-to-all":
        yield Message("cp", "all-to-all of queries, keys, values and results",
                      m * part.blocks * (forwards + 1), 4 * (C - 1) / C * elements * w)
        return
    yield Message("cp", "keys and values to the next rank",
                  m * part.blocks * (forwards + 1) * (C - 1), 2 * elements * w)
    yield Message("cp", "their gradients, in 32 bits at least", m * part.blocks * (C - 1),
                  2 * elements * max(w, 4))


def expert_traffic(job, layout, part):
    model, E = job.model, layout.ep
    rows = model.top_k * tokens_of(job, layout) * model.n_embd / layout.tp
    forwards = 2 if layout.recompute == "full" else 1
    yield Message("ep", "tokens to their experts and back",
                  2 * layout.microbatches * part.blocks * (forwards + 1),
                  (E - 1) / E * rows * job.width)


def pipeline_traffic(job, layout, rank, part):
    model, m, where = job.model, layout.microbatches, placement(
        layout.schedule, layout.pp, layout.chunks)
    activation = tokens_of(job, layout) * model.n_embd * job.width
    activation /= layout.tp if layout.sp else 1
    pairs = list(zip(where, where[1:], strict=False))  # ranks of neighbouring stages
    onward = sum(a == rank != b for a, b in pairs)
    back = sum(b == rank != a for a, b in pairs)
    yield Message("pp", "activations to the next stage", m * onward, activation)
    yield Message("pp", "gradients to the previous stage", m * back, activation)
    if where[0] != where[-1] and rank in (where[0], where[-1]) and not isinstance(model, Llama):
        shards = layout.dp * layout.cp if layout.zero else 1
        yield Message("pp", "gradient of the tied embedding, between its two ends", 1,
                      model.vocab_size * model.n_embd / layout.tp / shards * job.grad_width)


def data_traffic(job, layout, part):
    """Experts are summed over D N / E ranks, all else over D N."""
    model, w, gw, T, m = job.model, job.width, job.grad_width, layout.tp, layout.microbatches
    dense, expert = block_parameters(model, T)
    tied = not isinstance(model, Llama)
    vocabulary, others = end_parameters(model, part, T)
    one = model.vocab_size * model.n_embd / T  # the matrix of either end
    positions = part.embedding * model.block_size * model.n_embd * tied
    experts = part.blocks * expert * model.n_experts / (layout.ep * T)
    body, ranks = part.blocks * dense + others, layout.dp * layout.cp
    # ZeRO-3: each end gathers the matrix, and the embedding's backward reads no weights
    forward = body + (part.embedding + part.head) * one
    backward = body - positions + part.head * one
    for name, R, numel, gathered in (
            ("", ranks, body + vocabulary, forward + backward),
            (" of experts", ranks // layout.ep, experts, 2 * experts)):
        if not numel:
            continue
        half = (R - 1) / R
        if layout.zero == 0:
            yield Message("dp", "all-reduce of gradients" + name, 1, 2 * half * numel * gw)
            continue
        yield Message("dp", "reduce-scatter of gradients" + name, m if layout.zero > 1 else 1,
                      half * numel * gw)
        if layout.zero < 3:
            yield Message("dp", "all-gather of new weights" + name, 1, half * numel * w)
        else:
            yield Message("dp", "all-gather of weights, forward and backward" + name, m,
                          half * gathered * w)


def messages(job, layout, rank=0):
    """[Message] of a step, of each rank with this place on the pipeline axis."""
    part = parts_of(job.model, layout.schedule, layout.pp, layout.chunks)[rank]
    found = [*tensor_traffic(job, layout, part), *context_traffic(job, layout, part),
             *expert_traffic(job, layout, part), *pipeline_traffic(job, layout, rank, part),
             *data_traffic(job, layout, part)]
    return [message for message in found if message.total]


def bytes_by_axis(job, layout, rank=0):
    """{axis: bytes that the rank sends in a step}, of the axes along which it sends."""
    totals = {}
    for message in messages(job, layout, rank):
        totals[message.axis] = totals.get(message.axis, 0) + message.total
    return totals
