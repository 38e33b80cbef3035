"""Bytes that a rank sends in a step, message by message: docs/costs.md's table for one layout.

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


def data_messages(layout, m, w, gw, R, params, gathered, of=""):
    """Messages of `params` parameters that R ranks hold. gathered: weights that ZeRO-3 gathers for
    a forward and a backward."""
    half, name = (R - 1) / R, "reduce-scatter" if layout.zero else "all-reduce"
    return [("dp", f"{name} of gradients{of}", m if layout.zero > 1 else 1,
             (1 if layout.zero else 2) * half * params * gw),
            ("dp", f"all-gather of new weights{of}", layout.zero in (1, 2), half * params * w),
            ("dp", f"all-gathers of weights{of}", m * (layout.zero == 3), half * gathered * w)]


def messages(job, layout, rank=0):
    """[Message] of a step, of each rank at this place of the pipeline axis."""
    model, w, gw, m = job.model, job.width, job.grad_width, layout.microbatches
    T, C, E, R = layout.tp, layout.cp, layout.ep, layout.dp * layout.cp
    part = parts_of(model, layout.schedule, layout.pp, layout.chunks)[rank]
    blocks, first, last = m * part.blocks, m * part.embedding, m * part.head
    again = blocks if layout.recompute else 0  # second forwards, which stop at the last
    forwards = blocks + again  # tensor that backward needs: without the reduction behind experts
    skipped = again if model.n_experts else 0
    n, h, llama = tokens_of(job, layout), model.n_embd, isinstance(model, Llama)
    kv, _, _, norm, bias = shape_of(model)
    matrix = model.vocab_size * h / T  # of the embedding, or of the head
    positions = 0 if llama else model.block_size * h
    shards = R if layout.zero else 1
    half = (T - 1) / T * n * h * w  # either half of an all-reduce over tp
    rows = []
    if layout.sp:
        regathers = 1 if model.n_experts else 2  # inputs of columns that backward gathers again
        # Each rank sees other tokens: norms, biases of rows and positions sum gradients over tp
        small = part.blocks * (2 * norm + 2 * bias + max(0, model.n_experts - 1)) * h
        small += part.embedding * positions + part.head * norm * h
        rows += [("tp", "halves of all-reduces of activations",
                  4 * forwards - skipped + first + last, half),
                 ("tp", "the same of gradients", (4 + regathers) * blocks + first + last, half),
                 ("tp", "all-reduce of gradients of norms, biases and positions", 1,
                  2 * (T - 1) / T * small / shards * gw)]
    else:
        rows += [("tp", "all-reduces of activations", 2 * forwards - skipped + first,
                  2 * half),
                 ("tp", "all-reduces of gradients", 2 * blocks + last, 2 * half)]
    loss = (T - 1) * (n + 2 / T) * max(w, 4)
    rows.append(("tp", "a number for each token, and the loss", last, loss))
    if layout.cp_attention == "ring":
        rows += [("cp", "keys and values to the next rank", (forwards + blocks) * (C - 1),
                  2 * n * kv / T * w),
                 ("cp", "their gradients", blocks * (C - 1), 2 * n * kv / T * max(w, 4))]
    else:
        rows.append(("cp", "all-to-all of queries, keys, values and results", forwards + blocks,
                     2 * (C - 1) / C * n * (h + kv) / T * w))
    rows.append(("ep", "all-to-all of tokens, to experts and back", 2 * (forwards + blocks),
                 (E - 1) / E * model.top_k * n * h / T * w))
    where = placement(layout.schedule, layout.pp, layout.chunks)
    borders = [(a, b) for a, b in zip(where, where[1:], strict=False) if a != b]
    one = n * h * w / (T if layout.sp else 1)
    rows += [("pp", "activations to the next stage", m * sum(a == rank for a, _ in borders), one),
             ("pp", "gradients to the previous stage", m * sum(b == rank for _, b in borders), one)]
    if where[0] != where[-1] and rank in (where[0], where[-1]) and not llama:
        rows.append(("pp", "gradient of the tied embedding, between its two ends", 1,
                     matrix / shards * gw))
    dense, experts = (part.blocks * each for each in block_parameters(model, T, E))
    vocabulary, others = end_parameters(model, part, T)
    # Each of the two ends gathers its matrix for its forward; backward reads neither
    gathered = (part.embedding + part.head) * matrix + 2 * (dense + others)
    gathered -= part.embedding * positions
    rows += data_messages(layout, m, w, gw, R, dense + vocabulary + others, gathered)
    if experts:
        rows += data_messages(layout, m, w, gw, R // E, experts, 2 * experts, " of experts")
    return [Message(*row) for row in rows if row[2] * row[3] > 0]

