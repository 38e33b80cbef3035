"""Bytes that each rank holds in a layout.

    weights, gradients, optimizer    sizes.bytes_per_parameter, as train.py itself predicts
    activations    what the blocks and heads in flight save for backward, at the peak along the
                   rank's list of actions. A block of GPT-2 saves 4 h + 4 numbers per token, and 1/T
                   of 12 h and of 2 per head; with --sp 1/T of all. With --recompute it saves its
                   input, h; all is held for the block under way only. (arXiv 2205.05198; a test
                   measures what autograd saves)
    buffers        a chunk's logits, pipeline messages, layers that ZeRO-2 and 3 gather; or, in the
                   optimizer's step, the scaled gradients of a bucket

Left out: memory of CUDA and NCCL, fragmentation (some percent), unevenly chosen experts.
In this file h is the model's width, w the bytes of a weight, n a number of tokens; T = layout.tp.
"""

from functools import cache
from operator import mul
from typing import NamedTuple

from engine.schedules import actions_of
from planner.hardware import Llama
from schedules import SCHEDULES, cut, placement
from sizes import GPTConfig, bytes_per_parameter

cut_once = cache(cut)  # into stages, as train.py does


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
    moments: int = 2  # numbers of the optimizer per parameter


def tokens_of(job, layout):
    """Tokens of a microbatch, on one rank."""
    sequences = job.batch_size / (layout.dp * layout.microbatches)
    return sequences * job.model.block_size / layout.cp


class Shape(NamedTuple):
    """What differs between GPT-2's blocks and Llama's."""
    kv: int  # width of the keys; of the values
    inner: int  # width inside the MLP
    up: int  # matrices from h to inner: 1, or 2 with a gate (SwiGLU)
    norm: int  # parameters of a norm / h, and numbers that it saves per token: 2 in a LayerNorm
    # (weight and bias; mean and deviation), 1 in an RMSNorm
    bias: int  # 1 if linear layers have a bias, else 0


def shape_of(model):
    if isinstance(model, Llama):
        kv = model.n_embd // model.n_head * model.n_kv_head
        return Shape(kv, model.mlp_width, up=2, norm=1, bias=0)
    return Shape(model.n_embd, 4 * model.n_embd, up=1, norm=2, bias=1)


def matrices(model):
    """Elements of a block's matrices, with one MLP: (column-parallel, row-parallel)."""
    h, (kv, inner, up, *_) = model.n_embd, shape_of(model)
    return h * (h + 2 * kv + up * inner), h * (h + inner)


def block_parameters(model, T=1, E=1):
    """Parameters of a block on one of T tensor ranks, and of E ranks that share the experts:
    (all others, experts)."""
    h, n_experts = model.n_embd, model.n_experts
    kv, inner, up, norm, bias = shape_of(model)
    attention = (2 * h * (h + kv) + bias * (h + 2 * kv)) / T + bias * h
    norms = 2 * norm * h
    if not n_experts:
        mlp = ((up + 1) * h * inner + bias * inner) / T + bias * h
        return attention + norms + mlp, 0
    router = h * n_experts
    width = inner // model.top_k  # of an expert
    expert = (up + 1) * h * width + bias * (width + h)
    return attention + norms + router, n_experts / E * expert / T


def end_parameters(model, part, T):
    """Parameters of the first and last layer on one of T ranks: (vocabulary, others). Llama's two
    ends have a matrix each; GPT-2's share one, if both are on one rank."""
    vocabulary, h = model.vocab_size * model.n_embd / T, model.n_embd
    if isinstance(model, Llama):
        return (part.embedding + part.head) * vocabulary, part.head * h
    return (max(part.embedding, part.head) * vocabulary,
            part.embedding * model.block_size * h + part.head * 2 * h)


def n_parameters(model):
    """Parameters of the whole model. GPT-2's: 12 L h^2 (1 + 13/(12 h)) + (V + S) h + 2 h."""
    ends = sum(end_parameters(model, Part(1, 0, 1), 1))
    return model.n_layer * sum(block_parameters(model)) + ends


@cache
def stages_of(model, schedule, P, v):
    """[{stage: Part}] of each pipeline rank."""
    where = placement(schedule, P, v)
    head = model.n_layer + 1  # the layers: 0 the embedding, 1 .. n_layer the blocks, then the head
    ranks = [{} for _ in range(P)]
    for stage, (start, stop) in enumerate(cut_once(tuple(model.layer_costs()), len(where))):
        blocks = min(stop, head) - max(start, 1)
        ranks[where[stage]][stage] = Part(int(start == 0), blocks, int(stop > head))
    return ranks


@cache
def parts_of(model, schedule, P, v):
    """[Part] of each pipeline rank: all its stages together."""
    return [Part(*map(sum, zip(*stages.values(), strict=True)))
            for stages in stages_of(model, schedule, P, v)]


def saved_by_block(job, layout, recompute):
    """Bytes that a block saves for backward, per token of the rank."""
    model, w, T = job.model, job.width, layout.tp
    h = model.n_embd
    kv, inner, up, norm, _ = shape_of(model)
    T_sp = T if layout.sp else 1  # what --sp splits
    if recompute:
        return h * w / T_sp
    # Whole on every rank without --sp: inputs of the two norms and of the matrices behind them
    whole = (4 * h + 2 * norm) * w
    # Split by T: queries, keys, values, attention's result; inputs and output of the activation
    # function; the logsumexp of each row of scores, in at least 32 bits
    split = (2 * h + 2 * kv + 2 * up * inner) * w + model.n_head * max(w, 4)
    if layout.cp > 1 and layout.cp_attention == "all-to-all":
        split += h * w
    if model.n_experts:
        # For each chosen expert: input, output, and output times the gate; three 64-bit indices,
        # and the gate twice. The router's input and its scores are in at least 32 bits
        split += 3 * model.top_k * h * w
        whole += h * (max(w, 4) - w) + model.n_experts * max(w, 4)
        whole += (24 + 2 * max(w, 4)) * model.top_k
    return whole / T_sp + split / T


class Held(NamedTuple):
    """Numbers of blocks and heads whose activations a rank holds at one moment."""
    blocks: int = 0  # between F and B, or F and I: all activations
    heads: int = 0
    deferred: int = 0  # blocks between I and W: what the weight gradients need (of a head, nothing)
    recomputed: int = 0  # 1 while a block's activations are made again, else 0


@cache
def occupancy(model, schedule, P, m, v, rank):
    """The set of Held of a rank: after each action, and while a block is recomputed in it."""
    stages = stages_of(model, schedule, P, v)[rank]
    now, moments = Held(), set()
    for kind, stage, _ in actions_of(schedule, P, m, v, rank):
        part = stages[stage]
        if kind in ("B", "I") and part.blocks:
            # A block is recomputed after the head's backward. B frees block after block, so its
            # peak is at the first. I leaves more behind of a block than the input that it frees,
            # so its peak is at the last
            done = part.blocks - 1 if kind == "I" else 0  # blocks whose I is over
            moments.add(Held(now.blocks - done, now.heads - part.head, now.deferred + done, 1))
        if kind == "F":
            now = now._replace(blocks=now.blocks + part.blocks, heads=now.heads + part.head)
        elif kind in ("B", "I"):
            now = now._replace(blocks=now.blocks - part.blocks, heads=now.heads - part.head)
        if kind in ("I", "W"):
            more = part.blocks if kind == "I" else -part.blocks
            now = now._replace(deferred=now.deferred + more)
        moments.add(now)
    return moments


@cache
def activations(job, layout, rank):
    """Bytes at the peak, on one pipeline rank."""
    model, w, T, h = job.model, job.width, layout.tp, job.model.n_embd
    kv, inner, up, norm, _ = shape_of(model)
    n, T_sp = tokens_of(job, layout), T if layout.sp else 1
    saved = saved_by_block(job, layout, layout.recompute)
    again = saved_by_block(job, layout, recompute=False) - saved
    # Between I and W: inputs of the matrices and gradients of their outputs, which --sp does not
    # split; with experts only those of attention
    if model.n_experts:
        deferred = (2 * h + (2 * h + 2 * kv) / T) * w
    else:
        deferred = (4 * h + (2 * h + 2 * kv + (up + 1) * inner) / T) * w
    # A head saves the input of its norm and, as it makes gradients in its forward, those of the
    # norm's output and of its matrix
    head = n * (2 * h + norm) * w / T_sp + model.vocab_size * h / T * max(w, 4)
    of_each = Held(n * saved, head, n * deferred, n * again)  # bytes
    m = layout.microbatches
    if not SCHEDULES[layout.schedule].grows:  # no more are held, however many microbatches follow
        m = min(m, 2 * layout.pp)
    moments = occupancy(model, layout.schedule, layout.pp, m, layout.chunks, rank)
    return max(sum(map(mul, held, of_each)) for held in moments)


def model_states(job, layout, part):
    """Bytes of (weights, gradients, optimizer) of a Part."""
    dense, experts = block_parameters(job.model, layout.tp, layout.ep)
    others = part.blocks * dense + sum(end_parameters(job.model, part, layout.tp))
    data = layout.dp * layout.cp  # ranks that share the states; of experts' states, 1/E as many
    of_others = bytes_per_parameter(layout.zero, data, job.width, job.grad_width, job.moments)
    of_experts = bytes_per_parameter(layout.zero, data / layout.ep, job.width, job.grad_width,
                                     job.moments)
    return [others * of_other + part.blocks * experts * of_expert
            for of_other, of_expert in zip(of_others, of_experts, strict=True)]


def work_buffers(job, layout, part):
    """Bytes of buffers in forward and backward."""
    model, w, T, gw = job.model, job.width, layout.tp, job.grad_width
    n, h, shape = tokens_of(job, layout), model.n_embd, shape_of(model)
    # The head's logits of a chunk of tokens (16-bit ones copied to 32), and log of their softmax
    chunk = min(n, max(h, 256)) * part.head
    logits = chunk * (w + max(w, 4) * (2 if w == 2 else 1)) * model.vocab_size / T
    inside_a_block = n * ((shape.up + 1) * shape.inner * w / T + 2 * h * w)
    messages = 4 * n * h * w / (T if layout.sp else 1) if layout.pp > 1 else 0
    # ZeRO-2 holds the whole gradients of two layers at a time, ZeRO-3 their whole weights, too
    per_parameter = {0: 0, 1: 0, 2: 2 * gw, 3: 2 * gw + 2 * w}[layout.zero]
    gathered = per_parameter * largest_layer(job, layout, part)
    return max(logits, inside_a_block) + messages + gathered


def largest_layer(job, layout, part):
    """Parameters of a block, or of an end's matrix if the Part has one."""
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
    if layout.zero:  # a layer's shard
        bucket = max(dense, experts * E, matrix) / (layout.dp * layout.cp)
    else:  # DDP's 25 MiB of weights or, if larger, the largest tensor; at most all parameters
        experts_here = model.n_experts / E / model.top_k if model.n_experts else 1  # in MLPs
        tensor = experts_here * model.n_embd * shape_of(model).inner / T
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
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer,
             "activations": saved, "buffers": buffers}
    return {**parts, "total": sum(parts.values())}


def memory(job, layout, ranks=None):
    """memory_of_rank of the fullest pipeline rank. ranks: those to look at; None: all."""
    if ranks is None:
        ranks = range(layout.pp)
    return max((memory_of_rank(job, layout, rank) for rank in ranks),
               key=lambda parts: parts["total"])
