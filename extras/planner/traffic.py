"""Bytes that a rank sends in a step, message by message: the table of docs/costs.md for one layout.

In a reduce-scatter or an all-gather of b bytes over R ranks each rank sends (R-1)/R b bytes, in an
all-reduce twice as many. The formulas assume that experts are chosen evenly. A test counts the
bytes that train.py sends.

Left out, because they are small:

    all ranks            loss, norm and stop flag: a few numbers
    experts              the routers' statistics; how many tokens each rank will send
    experts and --tp     gates and chosen experts: top_k numbers each per token
    vocabulary, ZeRO     padding
"""

from typing import NamedTuple

from extras.planner.memory import (
    block_parameters,
    end_parameters,
    is_tied,
    parts_of,
    shape_of,
    tokens_of,
)
from schedules import placement
from sizes import LlamaConfig


class Message(NamedTuple):
    axis: str  # tp, cp, ep, pp or dp
    name: str
    times: float  # how often the rank sends it in a step
    nbytes: float  # bytes that the rank sends each time


# Each function *_messages returns rows with the fields of a Message. In these functions:
#     n       tokens of a microbatch that one rank computes (memory.tokens_of). With --sp a rank has
#             all n tokens only in attention and in the MLP, and n/T elsewhere
#     h       the model's width
#     w       bytes of a weight, and of an activation
#     T       layout.tp
#     part    the rank's layers
#     shape   memory.Shape: shape.norm vectors of h parameters per norm (LayerNorm 2, RMSNorm 1),
#             shape.bias 1 or 0


def forwards_and_backwards(layout, part):
    """(how often a rank runs the forward of a block in a step, how often its backward)."""
    backwards = layout.microbatches * part.blocks
    return (2 if layout.recompute else 1) * backwards, backwards


def n_positions(model):
    """Parameters of the embedding of positions; Llama's are rotary and have none."""
    return 0 if isinstance(model, LlamaConfig) else model.block_size * model.n_embd


def data_shards(layout):
    """How many shards a gradient has when it is summed over further groups of ranks. The sum over
    the replicas comes first, and under ZeRO it leaves each of them a shard."""
    return layout.replicas if layout.zero else 1


def tp_messages(job, layout, part):
    """Tensor parallelism: in blocks and in both ends of the model."""
    model, w, T, m = job.model, job.width, layout.tp, layout.microbatches
    n, h = tokens_of(job, layout), model.n_embd
    forwards, backwards = forwards_and_backwards(layout, part)
    embeddings = m * part.embedding  # how often this rank runs the embedding in a step
    heads = m * part.head  # how often it runs the head
    half = (T - 1) / T * n * h * w  # bytes of half an all-reduce of activations
    # The loss: an all-gather of one number per token from each rank, and an all-reduce of one
    # number
    loss = (T - 1) * n * max(w, 4) + 2 * (T - 1) / T * max(w, 4)
    loss_row = ("tp", "a number for each token, and the loss", heads, loss)
    # Recomputing a block stops as soon as all tensors that backward needs exist. In a block with
    # experts the last all-reduce (--sp: the last reduce-scatter) comes after that point, so each
    # recomputed forward skips it. In a block with an MLP no all-reduce is skipped: the last one
    # runs inside of the MLP's row, an autograd function, and torch saves the row's input only when
    # the row returns
    recomputed = forwards - backwards
    skipped = recomputed if model.n_experts else 0
    if not layout.sp:
        # The ends add an all-reduce of the embedding's output, and one of the gradient of the
        # head's input
        return [("tp", "all-reduces of activations", 2 * forwards - skipped + embeddings, 2 * half),
                ("tp", "all-reduces of gradients", 2 * backwards + heads, 2 * half), loss_row]
    # --sp: a block's forward all-gathers before each of two columns and reduce-scatters after each
    # of two rows; its backward reduce-scatters and all-gathers. The embedding's output is
    # reduce-scattered, and the head's input all-gathered; in backward the other way round
    ends = embeddings + heads
    # Moreover a block's backward all-gathers its columns' inputs once more: attention's and the
    # MLP's. (Experts have no column)
    gathered_again = 1 if model.n_experts else 2
    # Each rank sees other tokens, so gradients of parameters that all tp ranks hold are summed over
    # tp. Such parameters of a block, in units of h: two norms, and the biases of two rows. With
    # experts the router (n_experts units) replaces the bias of the MLP's row
    shape = shape_of(model)
    per_block = 2 * shape.norm + 2 * shape.bias
    if model.n_experts:
        per_block += model.n_experts - shape.bias
    replicated = part.blocks * per_block * h
    replicated += part.embedding * n_positions(model) + part.head * shape.norm * h
    # Under ZeRO each data rank has a shard of these gradients, and sums only this shard over tp
    nbytes = 2 * (T - 1) / T * replicated / data_shards(layout) * job.grad_width
    in_backwards = (4 + gathered_again) * backwards + ends
    return [("tp", "halves of all-reduces of activations", 4 * forwards - skipped + ends, half),
            ("tp", "halves of all-reduces of gradients", in_backwards, half),
            ("tp", "all-reduce of gradients of norms, biases and positions", 1, nbytes), loss_row]


def cp_messages(job, layout, part):
    """Context parallelism: ring attention or all-to-all."""
    model, w, T, ranks = job.model, job.width, layout.tp, layout.cp
    n, shape = tokens_of(job, layout), shape_of(model)
    kv = shape.kv
    forwards, backwards = forwards_and_backwards(layout, part)
    if layout.cp_attention == "all-to-all":
        return [("cp", "all-to-all of queries, keys, values and results", forwards + backwards,
                 2 * (ranks - 1) / ranks * n * (shape.q + kv) / T * w)]
    return [("cp", "keys and values to the next rank", (forwards + backwards) * (ranks - 1),
             2 * n * kv / T * w),
            ("cp", "gradients of keys and values to the next rank", backwards * (ranks - 1),
             2 * n * kv / T * max(w, 4))]


def ep_messages(job, layout, part):
    """Expert parallelism: each token goes to top_k experts, and their outputs come back."""
    model, E = job.model, layout.ep
    nbytes = model.top_k * tokens_of(job, layout) * model.n_embd / layout.tp * job.width
    times = 2 * sum(forwards_and_backwards(layout, part))  # there and back
    return [("ep", "all-to-all of tokens, to experts and back", times, (E - 1) / E * nbytes)]


def pp_messages(job, layout, rank):
    """Pipeline parallelism, for one pipeline rank."""
    model, m = job.model, layout.microbatches
    h = model.n_embd
    where = placement(layout.schedule, layout.pp, layout.chunks)  # where[stage]: its rank
    # (rank of a stage, rank of the next stage) where the two differ
    borders = [(a, b) for a, b in zip(where, where[1:], strict=False) if a != b]
    nbytes = tokens_of(job, layout) * h * job.width / (layout.tp if layout.sp else 1)
    rows = [("pp", "activations to the next stage", m * sum(a == rank for a, _ in borders), nbytes),
            ("pp", "gradients to the previous stage", m * sum(b == rank for _, b in borders),
             nbytes)]
    first, last = where[0], where[-1]
    if first != last and rank in (first, last) and is_tied(model):
        # An all-reduce over two ranks: each sends as many bytes as the tensor has
        rows.append(("pp", "gradient of the tied embedding, between its two ends", 1,
                     model.vocab_size * h / layout.tp / data_shards(layout) * job.grad_width))
    return rows


def dp_messages(job, layout, numel, replicas, gathered, suffix=""):
    """Messages between the ranks that train the same `numel` parameters: they sum gradients and,
    under ZeRO, gather weights. replicas: number of these ranks. gathered: number of weights that
    ZeRO-3 gathers for a forward and a backward together. suffix: words that end the rows' names."""
    m = layout.microbatches
    # Share of a tensor that each rank sends in a reduce-scatter, or in an all-gather
    share = (replicas - 1) / replicas
    gradients, weights = share * numel * job.grad_width, share * numel * job.width
    if layout.zero == 0:
        return [("dp", f"all-reduce of gradients{suffix}", 1, 2 * gradients)]
    rows = [("dp", f"reduce-scatter of gradients{suffix}", m if layout.zero > 1 else 1, gradients)]
    if layout.zero < 3:
        rows.append(("dp", f"all-gather of new weights{suffix}", 1, weights))
    else:
        rows.append(("dp", f"all-gathers of weights{suffix}", m, share * gathered * job.width))
    return rows


def copies_messages(job, layout, numel, replicas, suffix=""):
    """--shard: the data ranks that hold the same shard, of the same `numel` parameters, sum their
    gradients. replicas, suffix: like in dp_messages."""
    copies = layout.copies
    nbytes = numel / (replicas if layout.zero else 1) * job.grad_width
    return [("dp", f"all-reduce of gradients{suffix} over copies of a shard", 1,
             2 * (copies - 1) / copies * nbytes)]


def messages(job, layout, rank=0):
    """[Message] of a step. rank: a pipeline rank; all ranks with its stages send as much."""
    model, T, E = job.model, layout.tp, layout.ep
    part = parts_of(model, layout.schedule, layout.pp, layout.chunks)[rank]
    dense, experts = (part.blocks * each for each in block_parameters(model, T, E))
    vocabulary, others = end_parameters(model, part, T)
    # ZeRO-3 gathers each end's matrix and the positions for forward only, all else for backward too
    gathered = (part.embedding + part.head) * model.vocab_size * model.n_embd / T
    gathered += 2 * (dense + others) - part.embedding * n_positions(model)
    replicas, others = layout.replicas, dense + vocabulary + others
    rows = [*tp_messages(job, layout, part), *cp_messages(job, layout, part),
            *ep_messages(job, layout, part), *pp_messages(job, layout, rank),
            *dp_messages(job, layout, others, replicas, gathered),
            *copies_messages(job, layout, others, replicas)]
    if experts:
        rows += dp_messages(job, layout, experts, replicas // E, 2 * experts, " of experts")
        rows += copies_messages(job, layout, experts, replicas // E, " of experts")
    # row[2] * row[3]: times * nbytes. Rows without bytes are left out
    return [Message(*row) for row in rows if row[2] * row[3] > 0]
