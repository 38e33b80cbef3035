"""Bytes that a rank sends in a step, message by message: the table of docs/costs.md for one layout.

A reduce-scatter or an all-gather of b bytes over R ranks sends (R-1)/R b from each, an all-reduce
twice that. Left out: loss, norm and stop flag, a few numbers for all ranks; the routers'
statistics; padding. It counts on evenly chosen experts. A test counts what train.py sends."""

from typing import NamedTuple

from planner.hardware import Llama
from planner.memory import block_parameters, end_parameters, parts_of, shape_of, tokens_of
from schedules import placement


class Message(NamedTuple):
    axis: str  # tp, cp, ep, pp or dp
    name: str
    times: float  # in a step
    nbytes: float  # that the rank sends each time


# Each function returns rows with the fields of a Message. n is the tokens of a microbatch, h the
# model's width, w the bytes of a weight, T = layout.tp; part: the rank's layers.


def forwards_and_backwards(layout, part):
    """(how often a rank runs the forward of a block in a step, how often its backward)."""
    backwards = layout.microbatches * part.blocks
    return (2 if layout.recompute else 1) * backwards, backwards


def tp_messages(job, layout, part):
    model, w, T, m = job.model, job.width, layout.tp, layout.microbatches
    n, h = tokens_of(job, layout), model.n_embd
    forwards, backwards = forwards_and_backwards(layout, part)
    first, last = m * part.embedding, m * part.head  # times that the ends run
    # The embedding's output is all-reduced, and the gradient of the head's input. --sp scatters the
    # embedding's output and gathers the head's input instead; in backward the other way round
    half = (T - 1) / T * n * h * w  # half of an all-reduce of activations
    # An all-gather of one number per token from each rank, and an all-reduce of the loss
    loss = (T - 1) * n * max(w, 4) + 2 * (T - 1) / T * max(w, 4)
    loss_row = ("tp", "a number for each token, and the loss", last, loss)
    # Recomputing stops once all saved tensors exist. After the experts only the block's last
    # all-reduce is left (--sp: its last half), and is skipped: once for each recomputed forward, of
    # which there are forwards - backwards. Without experts none is skipped
    skipped = forwards - backwards if model.n_experts else 0
    if not layout.sp:
        return [("tp", "all-reduces of activations", 2 * forwards - skipped + first, 2 * half),
                ("tp", "all-reduces of gradients", 2 * backwards + last, 2 * half), loss_row]
    # Each rank sees other tokens, so parameters that all tp ranks hold sum their gradients over tp.
    # Per block, in units of h: two norms, and the biases of two rows; with experts a router,
    # n_experts, in the place of the bias of the MLP's row, 1
    shape = shape_of(model)
    per_block = 2 * shape.norm + 2 * shape.bias
    if model.n_experts:
        per_block += model.n_experts - 1
    replicated = part.blocks * per_block * h
    replicated += part.embedding * n_positions(model) + part.head * shape.norm * h
    shards = layout.dp * layout.cp if layout.zero else 1
    # Columns of a block whose input backward gathers again: attention's, and the MLP's
    gathered_again = 1 if model.n_experts else 2
    return [("tp", "halves of all-reduces of activations", 4 * forwards - skipped + first + last,
             half),
            ("tp", "the same of gradients", (4 + gathered_again) * backwards + first + last, half),
            ("tp", "all-reduce of gradients of norms, biases and positions", 1,
             2 * (T - 1) / T * replicated / shards * job.grad_width), loss_row]


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
    h = model.n_embd
    shards = layout.dp * layout.cp if layout.zero else 1
    where = placement(layout.schedule, layout.pp, layout.chunks)
    # (rank of a stage, rank of the next stage) where the two differ
    borders = [(a, b) for a, b in zip(where, where[1:], strict=False) if a != b]
    nbytes = tokens_of(job, layout) * h * job.width / (layout.tp if layout.sp else 1)
    rows = [("pp", "activations to the next stage", m * sum(a == rank for a, _ in borders), nbytes),
            ("pp", "gradients to the previous stage", m * sum(b == rank for _, b in borders),
             nbytes)]
    first, last = where[0], where[-1]
    if first != last and rank in (first, last) and not isinstance(model, Llama):
        # An all-reduce over two ranks: each sends as many bytes as the tensor has
        rows.append(("pp", "gradient of the tied embedding, between its two ends", 1,
                     model.vocab_size * h / layout.tp / shards * job.grad_width))
    return rows


def dp_messages(job, layout, numel, ranks, gathered, of=""):
    """Messages of `numel` parameters that `ranks` ranks share. gathered: number of weights that
    ZeRO-3 gathers for a forward and a backward together. of: ends the rows' names."""
    m = layout.microbatches
    share = (ranks - 1) / ranks  # of a tensor, that a reduce-scatter or an all-gather sends
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
    """[Message] of a step. rank: a pipeline rank; all ranks at that place send the same."""
    model, T, E = job.model, layout.tp, layout.ep
    part = parts_of(model, layout.schedule, layout.pp, layout.chunks)[rank]
    dense, experts = (part.blocks * each for each in block_parameters(model, T, E))
    vocabulary, others = end_parameters(model, part, T)
    # ZeRO-3 gathers each end's matrix and the positions for forward only, all else for backward too
    gathered = (part.embedding + part.head) * model.vocab_size * model.n_embd / T
    gathered += 2 * (dense + others) - part.embedding * n_positions(model)
    ranks = layout.dp * layout.cp
    rows = [*tp_messages(job, layout, part), *cp_messages(job, layout, part),
            *ep_messages(job, layout, part), *pp_messages(job, layout, rank),
            *dp_messages(job, layout, dense + vocabulary + others, ranks, gathered)]
    if experts:
        rows += dp_messages(job, layout, experts, ranks // E, 2 * experts, " of experts")
    return [Message(*row) for row in rows if row[2] * row[3] > 0]
