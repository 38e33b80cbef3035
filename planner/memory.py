"""Bytes that each rank holds in a layout.

    weights, gradients, optimizer    sizes.bytes_per_parameter, which train.py prints too
    activations    what the blocks and heads in flight save for backward, at the peak along the
                   rank's list of actions. A block of GPT-2 saves per token: whole, 4 h + 4 numbers
                   (1/T with --sp); split over T ranks, 12 h numbers and, for each head, a 32-bit
                   logsumexp. With --recompute it saves its input, h, and the rest is held only for
                   the block whose backward runs. (arXiv 2205.05198; a test measures what autograd
                   saves)
    buffers        the head's logits for a chunk of tokens, or a block's gradients in its backward;
                   pipeline messages; whole layers' gradients (ZeRO-2, 3) and weights (ZeRO-3). In
                   the optimizer's step, if larger: the scaled gradients of a bucket

Left out: memory of CUDA and NCCL, fragmentation (some percent), unevenly chosen experts.
In this file h is the model's width, w the bytes of a weight, n a number of tokens; T = layout.tp.
"""

from functools import cache
from typing import NamedTuple

from engine.schedules import actions_of
from planner.hardware import Llama
from schedules import SCHEDULES, cut, placement
from sizes import GPTConfig, bytes_per_parameter

cut_once = cache(cut)  # train.py's cut into stages


class Layout(NamedTuple):
    """train.py's flags of these names, all resolved."""
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

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp * self.cp


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
    """Tokens of a microbatch, on one rank."""
    sequences = job.batch_size / (layout.dp * layout.microbatches)
    return sequences * job.model.block_size / layout.cp


class Shape(NamedTuple):
    """What differs between GPT-2's blocks and Llama's."""
    kv: int  # width of a token's keys, all heads together; its values are as wide
    inner: int  # width inside the MLP
    up: int  # matrices from h to inner: 1, or 2 with a gate (SwiGLU)
    # 2 in a LayerNorm: it has a weight and a bias, of h parameters each, and saves two numbers per
    # token, mean and deviation. 1 in an RMSNorm: a weight, and one number per token
    norm: int
    bias: int  # 1 if linear layers have a bias, else 0


def shape_of(model):
    if isinstance(model, Llama):
        kv = model.n_embd // model.n_head * model.n_kv_head
        return Shape(kv, model.mlp_width, up=2, norm=1, bias=0)
    return Shape(model.n_embd, 4 * model.n_embd, up=1, norm=2, bias=1)


def matrices(model):
    """Elements of a block's matrices: (column-parallel, row-parallel). With experts: of those that
    one token runs through, which are together as large as an MLP."""
    h = model.n_embd
    kv, inner, up, _, _ = shape_of(model)
    columns = h * (h + 2 * kv) + up * h * inner  # to queries, keys and values; into the MLP
    rows = h * h + inner * h  # out of attention; out of the MLP
    return columns, rows


def block_parameters(model, T=1, E=1):
    """Parameters of a block on one rank: (all but the experts', the experts'). T tensor ranks split
    the matrices; the experts are spread, each whole, over E x T ranks."""
    h, n_experts = model.n_embd, model.n_experts
    kv, inner, up, norm, bias = shape_of(model)
    # The bias of a column-parallel layer is split like its outputs; a row-parallel one's, h, is
    # whole on every rank
    attention = (2 * h * (h + kv) + bias * (h + 2 * kv)) / T + bias * h
    norms = 2 * norm * h
    if not n_experts:
        mlp = ((up + 1) * h * inner + bias * inner) / T + bias * h
        return attention + norms + mlp, 0
    router = h * n_experts
    width = inner // model.top_k  # inside an expert
    expert = (up + 1) * h * width + bias * (width + h)
    return attention + norms + router, n_experts / E * expert / T


def end_parameters(model, part, T):
    """Parameters of the first and last layer on one of T ranks: (vocabulary, others). Llama's two
    ends have a matrix each; GPT-2's share one, if both are on one rank."""
    h = model.n_embd
    vocabulary = model.vocab_size * h / T
    if isinstance(model, Llama):
        return (part.embedding + part.head) * vocabulary, part.head * h
    positions, norm = model.block_size * h, 2 * h
    return (max(part.embedding, part.head) * vocabulary,
            part.embedding * positions + part.head * norm)


def n_parameters(model):
    """Parameters of the whole model. GPT-2's: 12 L h^2 (1 + 13/(12 h)) + (V + S) h + 2 h."""
    ends = sum(end_parameters(model, Part(1, 0, 1), 1))
    return model.n_layer * sum(block_parameters(model)) + ends


@cache
def stages_of(model, schedule, P, v):
    """[{stage: Part}] of each pipeline rank."""
    where = placement(schedule, P, v)  # where[stage]: its rank
    head = model.n_layer + 1  # the layers: 0 the embedding, 1 .. n_layer the blocks, then the head
    ranks = [{} for _ in range(P)]
    for stage, (start, stop) in enumerate(cut_once(tuple(model.layer_costs()), len(where))):
        blocks = min(stop, head) - max(start, 1)
        ranks[where[stage]][stage] = Part(int(start == 0), blocks, int(stop > head))
    return ranks


@cache
def parts_of(model, schedule, P, v):
    """[Part] of each pipeline rank: all its stages together."""
    ranks = [stages.values() for stages in stages_of(model, schedule, P, v)]
    return [Part(sum(stage.embedding for stage in stages), sum(stage.blocks for stage in stages),
                 sum(stage.head for stage in stages)) for stages in ranks]


def saved_by_block(job, layout, recompute):
    """Bytes that a block saves for backward, per token of the rank."""
    model, w, T = job.model, job.width, layout.tp
    h = model.n_embd
    wide = max(w, 4)  # bytes of numbers that have at least 32 bits
    kv, inner, up, norm, _ = shape_of(model)
    T_sp = T if layout.sp else 1  # tensor ranks that share what only --sp splits
    if recompute:
        return h * w / T_sp
    # Split by --sp only: inputs and outputs of the two norms (their outputs are what the columns
    # read), and the norms' statistics
    whole = (4 * h + 2 * norm) * w
    # Always split by T: queries and attention's result, 2 h; keys and values; in the MLP GELU's
    # input and output, or SwiGLU's gate, its activation, the other factor and the product. And the
    # logsumexp of each head
    split = (2 * h + 2 * kv + 2 * up * inner) * w + model.n_head * wide
    if layout.cp > 1 and layout.cp_attention == "all-to-all":
        split += h * w  # attention's result once more, before the swap back
    if model.n_experts:
        # For each chosen expert: its input, its output, and the output times the gate
        split += 3 * model.top_k * h * w
        # The router saves the norm's output in at least 32 bits, in place of the w bytes counted
        # above
        whole += h * (wide - w)
        whole += model.n_experts * wide  # the router's scores
        # For each chosen expert three indices of 8 bytes, and the gate twice
        whole += (3 * 8 + 2 * wide) * model.top_k
    return whole / T_sp + split / T


class Held(NamedTuple):
    """Numbers of blocks and heads whose tensors a rank holds at one moment, by what it holds."""
    blocks: int = 0  # between F and B, or F and I: what they save for backward
    heads: int = 0  # the same of heads
    deferred: int = 0  # blocks between I and W: what their weight gradients need. (A head: nothing)
    recomputed: int = 0  # 1 while a block's activations are computed again, else 0


@cache
def occupancy(model, schedule, P, m, v, rank):
    """The set of Held of a rank: after each action, and at its fullest inside of a backward, where
    blocks are recomputed."""
    stages = stages_of(model, schedule, P, v)[rank]
    now = Held()
    found = set()
    for kind, stage, _ in actions_of(schedule, P, m, v, rank):
        part = stages[stage]
        if kind in ("B", "I") and part.blocks:
            # --recompute: the head's backward is over when the first block is recomputed. During B
            # memory falls block by block, so the peak is at the first block. During I it rises: a
            # block's saved input is freed, but more is kept for W. So the peak is at the last block
            done = part.blocks - 1 if kind == "I" else 0  # blocks of this stage whose I is over
            found.add(Held(now.blocks - done, now.heads - part.head, now.deferred + done, 1))
        if kind == "F":
            now = now._replace(blocks=now.blocks + part.blocks, heads=now.heads + part.head)
        elif kind in ("B", "I"):
            now = now._replace(blocks=now.blocks - part.blocks, heads=now.heads - part.head)
        if kind in ("I", "W"):
            more = part.blocks if kind == "I" else -part.blocks
            now = now._replace(deferred=now.deferred + more)
        found.add(now)
    return found


@cache
def activations(job, layout, rank):
    """Bytes at the peak, on one pipeline rank."""
    model, w, T = job.model, job.width, layout.tp
    h, n = model.n_embd, tokens_of(job, layout)
    kv, inner, up, norm, _ = shape_of(model)
    T_sp = T if layout.sp else 1
    saved = saved_by_block(job, layout, layout.recompute)
    recomputed = saved_by_block(job, layout, recompute=False) - saved
    # Between I and W: inputs of the matrices, and gradients of their outputs. In attention:
    #     column    input h, whole; gradient of the output, h + 2 kv, over T
    #     row       input h, over T; gradient of the output, h, whole
    # The same for the MLP, with its own sizes. Experts do not wait for W. --sp splits none of it
    deferred = (2 * h + (2 * h + 2 * kv) / T) * w
    if not model.n_experts:
        deferred += (2 * h + (up + 1) * inner / T) * w
    # A head saves its norm's input, h, and statistics and, because it computes gradients in its
    # forward, the gradient of the norm's output, h, and that of its matrix
    head = n * (2 * h + norm) * w / T_sp + model.vocab_size * h / T * max(w, 4)
    m = layout.microbatches
    if not SCHEDULES[layout.schedule].grows:  # more than 2P microbatches hold no more than 2P
        m = min(m, 2 * layout.pp)
    return max(n * (held.blocks * saved + held.deferred * deferred + held.recomputed * recomputed)
               + held.heads * head
               for held in occupancy(model, layout.schedule, layout.pp, m, layout.chunks, rank))


def model_states(job, layout, part):
    """[bytes of weights, of gradients, of the optimizer] of a Part."""
    dense, experts = block_parameters(job.model, layout.tp, layout.ep)
    others = part.blocks * dense + sum(end_parameters(job.model, part, layout.tp))

    def bytes_each(replicas):
        """(weights, gradients, optimizer): bytes on a rank, per parameter that so many share."""
        return bytes_per_parameter(layout.zero, replicas, job.width, job.grad_width, job.moments)

    replicas = layout.dp * layout.cp
    of_others, of_experts = bytes_each(replicas), bytes_each(replicas / layout.ep)
    return [others * of_other + part.blocks * experts * of_expert
            for of_other, of_expert in zip(of_others, of_experts, strict=True)]


def work_buffers(job, layout, part):
    """Bytes of buffers in forward and backward."""
    model, w, T, gw = job.model, job.width, layout.tp, job.grad_width
    n, h, shape = tokens_of(job, layout), model.n_embd, shape_of(model)
    # The head, a chunk of tokens at a time: logits, their log-softmax, and between the two a copy
    # of 16-bit logits in 32 bits
    chunk = min(n, max(h, 256)) * part.head
    wide = max(w, 4)
    per_logit = w + (wide if w == 2 else 0) + wide
    logits = chunk * per_logit * model.vocab_size / T
    # In a block's backward, gradients: in the MLP of what its columns returned, up * inner, and of
    # what its row read, inner; of the MLP's input and output, 2 h
    gradients = n * ((shape.up + 1) * shape.inner / T + 2 * h) * w
    # An activation and a gradient that arrive, and one of each that leaves
    messages = 4 * n * h * w / (T if layout.sp else 1) if layout.pp > 1 else 0
    # engine/zero.py holds one layer's whole gradient at a time; a test measures that on a CPU. On a
    # GPU, where the host does not wait, count two. ZeRO-3: also two layers' whole weights
    per_parameter = {0: 0, 1: 0, 2: 2 * gw, 3: 2 * gw + 2 * w}[layout.zero]
    whole_layers = per_parameter * largest_layer(job, layout, part)
    return max(logits, gradients) + messages + whole_layers


def largest_layer(job, layout, part):
    """Parameters of a block or, if larger, of an end's matrix, if the Part has one."""
    vocabulary, _ = end_parameters(job.model, part, layout.tp)
    matrix = job.model.vocab_size * job.model.n_embd / layout.tp if vocabulary else 0
    return max(sum(block_parameters(job.model, layout.tp, layout.ep)), matrix)


def optimizer_buffer(job, layout, part):
    """Bytes of the optimizer's scaled copy of one bucket's gradients, made when the activations are
    freed."""
    model, w, T, E = job.model, job.width, layout.tp, layout.ep
    dense, experts = block_parameters(model, T, E)
    vocabulary, others = end_parameters(model, part, T)
    matrix = model.vocab_size * model.n_embd / T if vocabulary else 0
    if layout.zero:  # a layer's shard. Experts have E times fewer replicas, so larger shards
        replicas = layout.dp * layout.cp
        bucket = max(dense, experts * E, matrix) / replicas
    else:  # DDP's 25 MiB of weights or, if larger, the largest tensor; at most all parameters
        # The experts of a rank are one tensor. top_k experts together are as wide as an MLP
        mlps = model.n_experts / E / model.top_k if model.n_experts else 1
        tensor = mlps * model.n_embd * shape_of(model).inner / T
        everything = part.blocks * (dense + experts) + vocabulary + others
        bucket = min(max(25 * 2**20 / w, tensor, matrix), everything)
    return bucket * max(w, 4)


def memory_of_rank(job, layout, rank):
    """{weights, gradients, optimizer, activations, buffers, total} of one pipeline rank."""
    part = parts_of(job.model, layout.schedule, layout.pp, layout.chunks)[rank]
    weights, gradients, optimizer = model_states(job, layout, part)
    # zero=0: activations do not depend on the stage of ZeRO, so all stages share one cached value
    saved = activations(job, layout._replace(zero=0), rank)
    # The optimizer's buffer takes the place of the activations, so only its excess counts
    buffers = max(work_buffers(job, layout, part), optimizer_buffer(job, layout, part) - saved)
    held = {"weights": weights, "gradients": gradients, "optimizer": optimizer,
            "activations": saved, "buffers": buffers}
    return {**held, "total": sum(held.values())}


def memory(job, layout, ranks=None):
    """memory_of_rank of the fullest pipeline rank. ranks: those to look at; None: all."""
    if ranks is None:
        ranks = range(layout.pp)
    return max((memory_of_rank(job, layout, rank) for rank in ranks),
               key=lambda held: held["total"])
