"""Bytes that a rank sends in a step, message by message: the table of docs/costs.md for one layout.

A reduce-scatter or an all-gather of n bytes over R ranks sends (R-1)/R n from each, an all-reduce
twice that. Left out: loss, norm and stop flag, a few numbers for all ranks; the routers'
statistics; padding. Experts are taken as evenly chosen. A test counts what train.py sends."""

from typing import NamedTuple

from planner.hardware import Llama
from planner.memory import block_parameters, end_parameters, parts_of, shape_of, tokens_of
from schedules import placement


class Message(NamedTuple):
    axis: str  # tp, cp, ep, pp or dp
    name: str
    times: float  # in a step
    nbytes: float  # that the rank sends each time


# Each function returns rows (axis, name, times in a step, bytes each time). n is the tokens of a
# microbatch, h the model's width, w the bytes of a weight, T = layout.tp; part: the rank's layers.


def forwards_and_backwards(layout, part):
    """(how often a rank runs the forward of a block in a step, how often its backward)."""
    backwards = layout.microbatches * part.blocks
    return (2 if layout.recompute else 1) * backwards, backwards


def tp_messages(job, layout, part):
    model, w, T, m = job.model, job.width, layout.tp, layout.microbatches
    n, h = tokens_of(job, layout), model.n_embd
    forwards, backwards = forwards_and_backwards(layout, part)
    first, last = m * part.embedding, m * part.head  # times that the ends run
    half = (T - 1) / T * n * h * w  # of an all-reduce
    loss = (T - 1) * (n + 2 / T) * max(w, 4)
    loss_row = ("tp", "a number for each token, and the loss", last, loss)
    # A second forward stops at the last tensor that backward needs: before the experts' reduction
    skipped = forwards - backwards if model.n_experts else 0
    if not layout.sp:
        return [("tp", "all-reduces of activations", 2 * forwards - skipped + first, 2 * half),
                ("tp", "all-reduces of gradients", 2 * backwards + last, 2 * half), loss_row]
    # Each rank sees other tokens: norms, biases of rows and positions sum gradients over tp
    shape = shape_of(model)
    small = part.blocks * (2 * shape.norm + 2 * shape.bias + max(0, model.n_experts - 1)) * h
    small += part.embedding * n_positions(model) + part.head * shape.norm * h
    shards = layout.dp * layout.cp if layout.zero else 1
    gathered_again = 1 if model.n_experts else 2  # inputs of columns, in the backward of a block
    return [("tp", "halves of all-reduces of activations", 4 * forwards - skipped + first + last,
             half),
            ("tp", "the same of gradients", (4 + gathered_again) * backwards + first + last, half),
            ("tp", "all-reduce of gradients of norms, biases and positions", 1,
             2 * (T - 1) / T * small / shards * job.grad_width), loss_row]


def n_positions(model):
    """Parameters of the embedding of positions; Llama's are rotary and have none."""
    return 0 if isinstance(model, Llama) else model.block_size * model.n_embd


def cp_messages(job, layout, part):
    model, w, T, ranks = job.model, job.width, layout.tp, layout.cp
    n, kv = tokens_of(job, layout), shape_of(model).kv
    forwards, backwards = forwards_and_backwards(layout, part)
    if layout.cp_attention == "all-to-all":
        return [("cp", "all-to-all of queries, keys, values and results", forwards + backwards,
                 2 * (ranks - 1) / ranks * n * (model.n_embd + kv) / T * w)]
    return [("cp", "keys and values to the next rank", (forwards + backwards) * (ranks - 1),
             2 * n * kv / T * w),
            ("cp", "their gradients", backwards * (ranks - 1), 2 * n * kv / T * max(w, 4))]


def ep_messages(job, layout, part):
    model, E = job.model, layout.ep
    nbytes = model.top_k * tokens_of(job, layout) * model.n_embd / layout.tp * job.width
    times = 2 * sum(forwards_and_backwards(layout, part))  # there and back
    return [("ep", "all-to-all of tokens, to experts and back", times, (E - 1) / E * nbytes)]


def pp_messages(job, layout, rank):
    model, m = job.model, layout.microbatches
    h, shards = model.n_embd, layout.dp * layout.cp if layout.zero else 1
    where = placement(layout.schedule, layout.pp, layout.chunks)
    # (rank of a stage, rank of the next stage) where the two differ
    borders = [(a, b) for a, b in zip(where, where[1:], strict=False) if a != b]
    nbytes = tokens_of(job, layout) * h * job.width / (layout.tp if layout.sp else 1)
    rows = [("pp", "activations to the next stage", m * sum(a == rank for a, _ in borders), nbytes),
            ("pp", "gradients to the previous stage", m * sum(b == rank for _, b in borders),
             nbytes)]
    ends = where[0], where[-1]
    if where[0] != where[-1] and rank in ends and not isinstance(model, Llama):
        rows.append(("pp", "gradient of the tied embedding, between its two ends", 1,
                     model.vocab_size * h / layout.tp / shards * job.grad_width))
    return rows


def dp_messages(job, layout, numel, ranks, gathered, of=""):
    """Messages of `numel` parameters that so many ranks share. gathered: number of weights that
    ZeRO-3 gathers for a forward and a backward together."""
    m, share = layout.microbatches, (ranks - 1) / ranks  # of a tensor, in either half
    gradients, weights = share * numel * job.grad_width, share * numel * job.width
    if layout.zero == 0:
        return [("dp", f"all-reduce of gradients{of}", 1, 2 * gradients)]
    rows = [("dp", f"reduce-scatter of gradients{of}", m if layout.zero > 1 else 1, gradients)]
    if layout.zero < 3:
        rows.append(("dp", f"all-gather of new weights{of}", 1, weights))
    else:
        rows.append(("dp", f"all-gathers of weights{of}", m, share * gathered * job.width))
    return rows


def messages(job, layout, rank=0):
    """[Message] of a step, of each rank at this place of the pipeline axis."""
    model, T, E = job.model, layout.tp, layout.ep
    part = parts_of(model, layout.schedule, layout.pp, layout.chunks)[rank]
    dense, experts = (part.blocks * each for each in block_parameters(model, T, E))
    vocabulary, others = end_parameters(model, part, T)
    # Each of the two ends gathers its matrix, and the first its positions, for its forward only
    gathered = (part.embedding + part.head) * model.vocab_size * model.n_embd / T
    gathered += 2 * (dense + others) - part.embedding * n_positions(model)
    ranks = layout.dp * layout.cp
    rows = [*tp_messages(job, layout, part), *cp_messages(job, layout, part),
            *ep_messages(job, layout, part), *pp_messages(job, layout, rank),
            *dp_messages(job, layout, dense + vocabulary + others, ranks, gathered)]
    if experts:
        rows += dp_messages(job, layout, experts, ranks // E, 2 * experts, " of experts")
    return [Message(*row) for row in rows if row[2] * row[3] > 0]
