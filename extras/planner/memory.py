"""Bytes that each rank holds in a layout.

    weights, gradients, optimizer    by sizes.bytes_per_parameter; train.py prints them, too
    activations    saved for backward by the blocks and heads in flight, at the peak along the
                   rank's list of actions (arXiv 2205.05198; a test measures what autograd saves)
    buffers        the head's logits for a chunk of tokens, or a block's gradients in its backward;
                   pipeline messages; whole layers' gradients (ZeRO-2, 3) and weights (ZeRO-3). In
                   the optimizer's step, if larger: some of the 16-bit gradients, scaled, in 32
                   bits. And ring attention's four tensors for messages

A block of GPT-2 saves, per token:

    whole on each of T ranks (1/T with --sp)     4 h + 4 numbers
    split over T ranks                           12 h numbers; for each head a 32-bit logsumexp
    with --recompute instead                     its input, h; the rest is held only for the block
                                                 whose backward runs

Left out: unevenly chosen experts, a Llama's cosines and sines; memory of CUDA and NCCL, and
fragmentation, for which a Device's `reserve` (hardware.py) leaves room.
In this file h is the model's width, w the bytes of a weight, n a number of tokens; T = layout.tp.
"""

import operator
from functools import cache
from typing import NamedTuple

from extras.planner.mixture import Mixture
from schedules import SCHEDULES, actions_of, cut, placement
from sizes import GPTConfig, LlamaConfig, bytes_per_parameter

BUCKET = 25 * 2**20  # bytes of weights in a bucket of DDP (engine/ddp.py)
CONVERTED = 2**25  # gradients that AdamW converts at a time, without the last one's rest
cut_once = cache(cut)  # train.py's cut into stages


class Layout(NamedTuple):
    """The values of train.py's flags of these names. One difference: --dp 0, --chunks 0 and
    --microbatches 0 leave the number open. A Layout has the number: the search's or, in layout_of()
    (search.py), the one that train.py chooses. (shard 0 is all data ranks, like --shard 0.)"""
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    recompute: bool = False
    cp_attention: str = "ring"
    shard: int = 0

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp * self.cp

    @property
    def copies(self):
        """How many data ranks hold the same shard."""
        return self.dp // (self.shard or self.dp)

    @property
    def replicas(self):
        """The ranks over which ZeRO shards all parameters but the experts': R data ranks, and
        their context ranks. (Experts: over every E-th of these.)"""
        return self.dp // self.copies * self.cp


class Part(NamedTuple):
    """The layers of a stage, or of a rank."""
    embedding: int
    blocks: int
    head: int


class Job(NamedTuple):
    """A training, independent of its layout."""
    model: GPTConfig
    batch_size: int  # sequences of a step, on all ranks
    width: int = 2  # bytes of a weight
    grad_width: int = 2  # bytes of a gradient
    moments: int = 2  # numbers that the optimizer keeps per parameter: AdamW's mean and square


def tokens_of(job, layout):
    """Tokens of a microbatch that one rank computes. With --sp a rank has all of these tokens only
    in attention and in the MLP, and 1/T of them elsewhere."""
    sequences = job.batch_size / (layout.dp * layout.microbatches)
    return sequences * job.model.block_size / layout.cp


class Shape(NamedTuple):
    """The sizes in which blocks of GPT-2, of Llama and of a Mixture differ."""
    q: int  # width of a token's queries, all heads together, and of attention's result
    kv: int  # width of a token's keys, all heads together; its values are as wide
    inner: int  # width inside the MLP
    up: int  # matrices from h to inner: 1, or 2 with a gate (SwiGLU)
    # norm: 2 if norms are LayerNorms: each has a weight and a bias, of h parameters each, and saves
    # two numbers per token, mean and deviation. 1 if they are RMSNorms: a weight, and one number
    norm: int
    bias: int  # 1 if linear layers have a bias, else 0
    shared: int = 0  # width inside an MLP beside the experts


def shape_of(model):
    """The Shape of a model's blocks."""
    h = model.n_embd
    if isinstance(model, Mixture):
        return Shape(model.query_width, model.kv_width, model.n_hidden, up=2, norm=1, bias=0,
                     shared=model.shared_width)
    if isinstance(model, LlamaConfig):
        return Shape(h, model.kv_width, model.n_hidden, up=2, norm=1, bias=0)
    return Shape(h, h, 4 * h, up=1, norm=2, bias=1)


def matrices(model):
    """Elements of the matrices of attention and of the MLP: (column-parallel, row-parallel). With
    experts, the top_k experts of a token count in place of the MLP, because together they are as
    large. An MLP beside the experts counts, too."""
    h = model.n_embd
    q, kv, inner, up, _, _, shared = shape_of(model)
    inner += shared
    columns = h * (q + 2 * kv) + up * h * inner  # to queries, keys and values; into the MLP
    rows = q * h + inner * h  # out of attention; out of the MLP
    return columns, rows


def block_parameters(model, T=1, E=1, only_matrices=False):
    """Parameters of a block on one rank: (all but the experts', the experts'). The T tensor ranks
    split attention's and the MLP's matrices. Experts are not split but spread, each whole on one of
    E x T ranks. (In a Mixture with split_experts they are spread over E ranks, and T ranks hold 1/T
    of each. Either way a rank holds as many parameters.) only_matrices: without norms and biases.
    """
    h, n_experts = model.n_embd, model.n_experts
    q, kv, inner, up, norm, bias, shared = shape_of(model)
    if only_matrices:
        norm = bias = 0
    # The bias of a column is split like its outputs. The bias of a row, h, is whole on every rank.
    # (Column, row: a column-parallel and a row-parallel layer)
    attention = (2 * h * (q + kv) + bias * (q + 2 * kv)) / T + bias * h
    norms = 2 * norm * h
    if not n_experts:
        mlp = ((up + 1) * h * inner + bias * inner) / T + bias * h
        return attention + norms + mlp, 0
    router = h * n_experts
    width = inner // model.top_k  # inside an expert
    expert = (up + 1) * h * width + bias * (width + h)
    beside = (up + 1) * h * shared / T  # the MLP beside the experts
    return attention + norms + router + beside, n_experts / E * expert / T


def is_tied(model):
    """Are embedding and head one matrix?"""
    return getattr(model, "tied", True)


def end_parameters(model, part, T):
    """Parameters of the model's two ends, embedding and head, on one of T ranks: (vocabulary: the
    matrices with a row per token of the vocabulary; others: positions, and the head's norm). Tied
    ends share a matrix, so a rank with both ends holds it once. In a Llama the two ends may have a
    matrix each."""
    h = model.n_embd
    vocabulary = model.vocab_size * h / T
    norm = shape_of(model).norm * h
    positions = 0 if isinstance(model, LlamaConfig) else model.block_size * h
    num_matrices = part.embedding + part.head
    if is_tied(model):
        num_matrices = min(num_matrices, 1)
    return (num_matrices * vocabulary,
            part.embedding * positions + part.head * norm)


def n_parameters(model):
    """Parameters of the whole model. GPT-2's: 12 L h^2 (1 + 13/(12 h)) + (V + S) h + 2 h."""
    ends = sum(end_parameters(model, Part(1, 0, 1), 1))
    return model.n_layer * sum(block_parameters(model)) + ends


@cache
def stages_of(model, schedule, P, v):
    """A list with {stage: Part} for each pipeline rank."""
    where = placement(schedule, P, v)  # where[stage]: its rank
    head = model.n_layer + 1  # the layers: 0 the embedding, 1 .. n_layer the blocks, then the head
    ranks = [{} for _ in range(P)]
    for stage, (start, stop) in enumerate(cut_once(tuple(model.layer_costs()), len(where))):
        blocks = min(stop, head) - max(start, 1)
        ranks[where[stage]][stage] = Part(int(start == 0), blocks, int(stop > head))
    return ranks


@cache
def parts_of(model, schedule, P, v):
    """A list with one Part for each pipeline rank: all its stages together."""
    ranks = [stages.values() for stages in stages_of(model, schedule, P, v)]
    return [Part(sum(stage.embedding for stage in stages), sum(stage.blocks for stage in stages),
                 sum(stage.head for stage in stages)) for stages in ranks]


def saved_by_block(job, layout, recompute):
    """Bytes that a block saves on a rank for backward, per token of tokens_of(). recompute: is the
    block to be recomputed in backward?"""
    model, w, T = job.model, job.width, layout.tp
    h = model.n_embd
    wide = max(w, 4)  # bytes of numbers that have at least 32 bits
    q, kv, inner, up, norm, _, shared = shape_of(model)
    T_sp = T if layout.sp else 1  # number of parts of a tensor that only --sp splits
    if recompute:
        return h * w / T_sp
    # Split by --sp only: inputs and outputs of the two norms (the columns read these outputs), and
    # the norms' statistics
    whole = (4 * h + 2 * norm) * w
    # Always split by T, numbers in attention and in the MLP:
    #     queries, and attention's result      2 q
    #     keys and values                      2 kv
    #     GELU's input and output              2 inner
    #     or SwiGLU's gate, its activation,
    #     the other factor and the product     4 inner
    # And for each head the logsumexp of each token. `shared`: an MLP beside the experts
    split = (2 * q + 2 * kv + 2 * up * (inner + shared)) * w + model.n_head * wide
    if layout.cp > 1 and layout.cp_attention == "all-to-all":
        split += q * w  # attention's result once more, before the swap back
    if model.n_experts:
        # For each chosen expert: its input, its output, and the output times the gate
        split += 3 * model.top_k * h * w
        # `whole` counts the second norm's output in w bytes per number (one h of its 4 h). If w is
        # less than `wide`, the router saves a copy in `wide` bytes per number. Then only an MLP
        # beside the experts saves the output in w bytes: without such an MLP take it off
        if w < wide:
            whole += h * wide
            if not shared:
                whole -= h * w
        whole += model.n_experts * wide  # the router's scores
        # For each chosen expert three indices of 8 bytes, and the gate twice
        whole += (3 * 8 + 2 * wide) * model.top_k
    return whole / T_sp + split / T


class Held(NamedTuple):
    """Activations on a rank at one moment, counted in pairs of a block (or a head) and a
    microbatch: a block that has run F for three microbatches counts three."""
    blocks: int = 0  # pairs between F and B (or I): each holds the block's saved_by_block
    heads: int = 0  # pairs of a head and a microbatch between F and B (or I)
    deferred: int = 0  # pairs between I and W: each holds the tensors that W needs
    recomputed: int = 0  # 1 while a block's activations are computed again, else 0


@cache
def occupancy(model, schedule, P, m, v, rank):
    """[Held] of a rank: after each action, and at the fullest moment of each backward. A Held is
    left out if another Held of the list has at least as much of everything."""
    stages = stages_of(model, schedule, P, v)[rank]
    now = Held()
    found = set()
    for kind, stage, _ in actions_of(schedule, P, m, v, rank):
        part = stages[stage]
        if kind in ("B", "I") and part.blocks:
            # With --recompute a stage's backward begins with the head's, which frees the head's
            # tensors. Then, from the last block to the first: recompute the block, run its backward
            #     B    frees the block's input: memory is fullest at the stage's last block, which
            #          runs first
            #     I    frees the input, but keeps more, for W: memory is fullest at the stage's
            #          first block, which runs when the others are `done`
            # (Without --recompute `recomputed` costs 0 bytes: see activations)
            done = part.blocks - 1 if kind == "I" else 0
            found.add(Held(now.blocks - done, now.heads - part.head, now.deferred + done, 1))
        if kind == "F":
            now = now._replace(blocks=now.blocks + part.blocks, heads=now.heads + part.head)
        elif kind in ("B", "I"):
            now = now._replace(blocks=now.blocks - part.blocks, heads=now.heads - part.head)
        if kind in ("I", "W"):
            more = part.blocks if kind == "I" else -part.blocks
            now = now._replace(deferred=now.deferred + more)
        found.add(now)
    fullest = []
    for held in sorted(found, reverse=True):  # a Held with more comes first
        if not any(all(map(operator.le, held, other)) for other in fullest):
            fullest.append(held)
    return fullest


@cache
def activations(job, layout, rank):
    """Bytes of activations at the peak, on one pipeline rank."""
    model, w, T = job.model, job.width, layout.tp
    h, n = model.n_embd, tokens_of(job, layout)
    q, kv, inner, up, norm, _, shared = shape_of(model)
    T_sp = T if layout.sp else 1
    saved = saved_by_block(job, layout, layout.recompute)
    recomputed = saved_by_block(job, layout, recompute=False) - saved
    # Between I and W: inputs of the matrices, and gradients of their outputs.
    #                          input             gradient of the output
    #     attention's column    h, whole          q + 2 kv, split by T
    #     attention's row       q, split by T     h, whole
    #     the MLP's column      h, whole          up * inner, split by T
    #     the MLP's row         inner, split      h, whole
    # Experts compute their weight gradients in I, so they hold nothing for W. An MLP beside experts
    # holds its tensors like any other MLP. --sp splits none of these tensors
    deferred = (2 * h + (2 * q + 2 * kv) / T) * w
    in_mlp = shared if model.n_experts else inner
    if in_mlp:
        deferred += (2 * h + (up + 1) * in_mlp / T) * w
    # A head saves its norm's input, h, and statistics. It computes gradients in its forward, so it
    # also saves the gradient of the norm's output, h, and the gradient of its matrix
    head = n * (2 * h + norm) * w / T_sp + model.vocab_size * h / T * max(w, 4)
    m = layout.microbatches
    # Without GPipe at most 2P microbatches are in flight: more than 2P do not raise the peak
    if not SCHEDULES[layout.schedule].grows:
        m = min(m, 2 * layout.pp)
    return max(n * (held.blocks * saved + held.deferred * deferred + held.recomputed * recomputed)
               + held.heads * head
               for held in occupancy(model, layout.schedule, layout.pp, m, layout.chunks, rank))


def model_states(job, layout, part):
    """[bytes of weights, of gradients, of the optimizer] of a Part."""
    dense, experts = block_parameters(job.model, layout.tp, layout.ep)
    # Other parameters of the Part: all but the experts'
    num_others = part.blocks * dense + sum(end_parameters(job.model, part, layout.tp))

    def bytes_each(replicas):
        """(weights, gradients, optimizer): bytes on a rank for each parameter that has this number
        of replicas."""
        return bytes_per_parameter(layout.zero, replicas, job.width, job.grad_width, job.moments)

    per_other = bytes_each(layout.replicas)
    per_expert = bytes_each(layout.replicas / layout.ep)
    return [num_others * other_bytes + part.blocks * experts * expert_bytes
            for other_bytes, expert_bytes in zip(per_other, per_expert, strict=True)]


def work_buffers(job, layout, part):
    """Bytes of buffers in forward and backward."""
    model, w, T, gw = job.model, job.width, layout.tp, job.grad_width
    n, h, shape = tokens_of(job, layout), model.n_embd, shape_of(model)
    # A rank with a head (part.head is 1, else 0) takes a chunk of max(h, 256) tokens at a time
    # (ChunkedLoss in engine/vocabulary_parallel.py). Its buffers are the chunk's logits and their
    # log-softmax, which first copies 16-bit logits in 32 bits. Not counted: on a GPU ChunkedLoss
    # takes more tokens, if their logits have at most 256 MiB. (In 16 bits the buffers then have
    # 1.3 GB)
    chunk = min(n, max(h, 256)) * part.head
    wide = max(w, 4)
    copy = wide if w == 2 else 0
    per_logit = w + copy + wide
    logits = chunk * per_logit * model.vocab_size / T
    # Gradients in the backward of a block's MLP: of the columns' outputs, up * inner; of the row's
    # input, inner; of the MLP's own input and output, h each
    gradients = n * ((shape.up + 1) * shape.inner / T + 2 * h) * w
    # An activation and a gradient that arrive, and one of each that leaves
    messages = 4 * n * h * w / (T if layout.sp else 1) if layout.pp > 1 else 0
    # engine/zero.py holds one layer's whole gradient at a time; a test measures that on a CPU. On a
    # GPU two, because one is reduced while the next fills. ZeRO-3: two layers' whole weights, too
    per_parameter = {0: 0, 1: 0, 2: 2 * gw, 3: 2 * gw + 2 * w}[layout.zero]
    whole_layers = per_parameter * largest_layer(job, layout, part)
    return max(logits, gradients) + messages + whole_layers


def largest_layer(job, layout, part):
    """Parameters of a block or, if the Part has an end whose matrix is larger, of that matrix."""
    vocabulary, _ = end_parameters(job.model, part, layout.tp)
    matrix = job.model.vocab_size * job.model.n_embd / layout.tp if vocabulary else 0
    return max(sum(block_parameters(job.model, layout.tp, layout.ep)), matrix)


def ring_buffers(job, layout, part):
    """Bytes of the four tensors in which ring attention has what goes around (two_buffers() in
    engine/context_parallel.py). Two are for keys and values, two for their gradients, which have
    at least 32 bits: one of each travels while the rank computes with the other. All blocks and
    microbatches use the same four, and the rank keeps them until the run ends."""
    if layout.cp == 1 or layout.cp_attention != "ring" or not part.blocks:
        return 0.0
    numbers = 2 * tokens_of(job, layout) * shape_of(job.model).kv / layout.tp  # in one tensor
    return numbers * (2 * job.width + 2 * max(job.width, 4))


def optimizer_buffer(job, layout, part):
    """Bytes of the buffer in which AdamW multiplies 16-bit gradients by the clipping factor: a copy
    of some of them in 32 bits. (When AdamW steps, activations are freed already.)

    It takes one gradient after the other, of those with weight decay, until it has CONVERTED
    elements: so the buffer has less than CONVERTED and the largest gradient together. Vectors,
    which it takes separately, are few."""
    if job.grad_width >= 4:  # 32-bit gradients are multiplied in place
        return 0.0
    model, T, E = job.model, layout.tp, layout.ep
    dense, experts = block_parameters(model, T, E, only_matrices=True)
    vocabulary, others = end_parameters(model, part, T)
    positions = others - part.head * shape_of(model).norm * model.n_embd
    matrix = model.vocab_size * model.n_embd / T if vocabulary else 0
    if layout.zero:
        # Of a layer's gradients this rank has a shard, so none is larger. Experts have E times
        # fewer replicas, so their shards are E times larger
        shards = layout.replicas
        largest = max(dense, experts * E, matrix) / shards
    else:
        # The largest tensor of a block is attention's column, or the MLP's, which in a Llama has
        # gate and factor in one tensor. The experts of a rank have their columns in one tensor,
        # too; top_k experts are as wide as an MLP
        h, shape, shards = model.n_embd, shape_of(model), 1
        mlps = model.n_experts / E / model.top_k if model.n_experts else 1
        largest = max(h * (shape.q + 2 * shape.kv), mlps * shape.up * h * shape.inner) / T
        largest = max(largest, matrix)
    everything = (part.blocks * dense + vocabulary + positions) / shards
    everything += part.blocks * experts * (E if layout.zero else 1) / shards
    return 4 * min(CONVERTED + largest, everything)


def memory_of_rank(job, layout, rank):
    """{weights, gradients, optimizer, activations, buffers, total} of one pipeline rank."""
    part = parts_of(job.model, layout.schedule, layout.pp, layout.chunks)[rank]
    weights, gradients, optimizer = model_states(job, layout, part)
    # zero=0: activations do not depend on the stage of ZeRO, so all stages share one cached value
    saved = activations(job, layout._replace(zero=0), rank)
    # The optimizer's buffer exists once the activations are freed: count the bytes by which it
    # exceeds them
    buffers = max(work_buffers(job, layout, part), optimizer_buffer(job, layout, part) - saved)
    buffers += ring_buffers(job, layout, part)
    held = {"weights": weights, "gradients": gradients, "optimizer": optimizer,
            "activations": saved, "buffers": buffers}
    return {**held, "total": sum(held.values())}


def memory(job, layout, ranks=None):
    """memory_of_rank of the fullest pipeline rank. ranks: those to look at; None: all."""
    if ranks is None:
        ranks = range(layout.pp)
    return max((memory_of_rank(job, layout, rank) for rank in ranks),
               key=lambda held: held["total"])
