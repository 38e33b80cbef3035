"""Bytes that each rank holds in a layout.

    weights, gradients, optimizer    sizes.bytes_per_parameter, as train.py itself predicts
    activations    per token a block saves 4 h + 4 elements, and 1/T of 12 h and of heads in 32
                   bits; with --sp 1/T of all; with --recompute only its input, h, and all of the
                   block under way (a test measures what autograd saves)
                   (arXiv 2205.05198); the peak is along the rank's list of actions
    buffers        a chunk's logits, pipeline messages, layers that ZeRO-2 and 3 gather; or, in the
                   optimizer's step, the scaled gradients of a bucket

Left out: memory of CUDA and NCCL, fragmentation (some percent), unevenly chosen experts.
"""

from functools import cache
from operator import le, mul
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


def shape_of(model):
    """(width of the keys, width inside the MLP, matrices that lead there, parameters / h of a norm
    and numbers that it saves per token, biases / width of a linear layer)."""
    if isinstance(model, Llama):
        kv = model.n_embd // model.n_head * model.n_kv_head
        return kv, model.mlp_width, 2, 1, 0
    return model.n_embd, 4 * model.n_embd, 1, 2, 1


def matrices(model):
    """Elements of a block's matrices, with one MLP: (column-parallel, row-parallel)."""
    h, (kv, inner, up, *_) = model.n_embd, shape_of(model)
    return h * (h + 2 * kv + up * inner), h * (h + inner)


def block_parameters(model, T=1, E=1):
    """Parameters of a block on one of T ranks, of E that share experts: (others, experts)."""
    h, N, (kv, inner, up, norm, bias) = model.n_embd, model.n_experts, shape_of(model)
    attention = (2 * h * (h + kv) + bias * (h + 2 * kv)) / T + (bias + 2 * norm) * h
    if not N:
        return attention + ((up + 1) * h * inner + bias * inner) / T + bias * h, 0
    inside = inner // model.top_k
    return attention + h * N, N / E * ((up + 1) * h * inside + bias * (inside + h)) / T


def end_parameters(model, part, T):
    """Parameters of the first and last layer on one of T ranks: (vocabulary, others). Llama's two
    ends have a matrix each; GPT-2's share one, if both are on one rank."""
    vocabulary, h = model.vocab_size * model.n_embd / T, model.n_embd
    if isinstance(model, Llama):
        return (part.embedding + part.head) * vocabulary, part.head * h
    return (max(part.embedding, part.head) * vocabulary,
            part.embedding * model.block_size * h + part.head * 2 * h)


def n_parameters(model):
    """Of the whole model; without experts 12 L h^2 (1 + 13/(12 h)) + (V + S) h + 2 h."""
    ends = sum(end_parameters(model, Part(1, 0, 1), 1))
    return model.n_layer * sum(block_parameters(model)) + ends


@cache
def stages_of(model, schedule, P, v):
    """[{stage: Part}] of each pipeline rank."""
    where, last = placement(schedule, P, v), model.n_layer + 1
    ranks = [{} for _ in range(P)]
    for stage, (start, stop) in enumerate(
            cut_once(tuple(model.layer_costs()), len(where))):
        blocks = min(stop, last) - max(start, 1)
        ranks[where[stage]][stage] = Part(int(start == 0), blocks, int(stop > last))
    return ranks


@cache
def parts_of(model, schedule, P, v):
    """[Part] of each pipeline rank: all its stages together."""
    return [Part(*map(sum, zip(*stages.values(), strict=True)))
            for stages in stages_of(model, schedule, P, v)]


def saved_by_block(job, layout, recompute):
    """Bytes that a block saves for backward, per token of the rank."""
    model, w, T = job.model, job.width, layout.tp
    h, heads, T_sp = model.n_embd, model.n_head, T if layout.sp else 1
    kv, inner, up, norm, _ = shape_of(model)
    if recompute:
        return h * w / T_sp
    whole, split = (4 * h + 2 * norm) * w, (2 * h + 2 * kv + 2 * up * inner) * w
    split += heads * max(w, 4)  # the logsumexp of each row
    if layout.cp > 1 and layout.cp_attention == "all-to-all":
        split += h * w
    if model.n_experts:  # for each chosen expert: input, output, and output times the gate
        split += 3 * model.top_k * h * w
        whole += h * (max(w, 4) - w) + model.n_experts * max(w, 4)  # the router is in 32 bits
        whole += (24 + 2 * max(w, 4)) * model.top_k  # three 64-bit indices, and the gate twice
    return whole / T_sp + split / T


# {kind of an action: (+-1 of its stage's blocks and head are held, +-1 of its blocks deferred)}
HELD = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}


@cache
def occupancy(model, schedule, P, m, v, rank):
    """[(blocks, heads, deferred blocks, recomputed blocks)] whose activations a rank holds, at the
    moments that may be the peak: no other moment has as much of everything. Between F and B or I
    the whole is held; between I and W what is deferred, of which a head has nothing."""
    stages = stages_of(model, schedule, P, v)[rank]
    blocks, heads, deferred, moments = 0, 0, 0, set()
    for kind, stage, _ in actions_of(schedule, P, m, v, rank):
        (_, n, head), (held, later) = stages[stage], HELD[kind]
        if kind in "BI" and n:
            # The head is through when a block is recomputed. B frees blocks, so the first is the
            # peak. I leaves more behind than a block's input, so the last is.
            done = later * (n - 1)
            moments.add((blocks - done, heads - head, deferred + done, 1))
        blocks, heads, deferred = blocks + held * n, heads + held * head, deferred + later * n
        moments.add((blocks, heads, deferred, 0))
    front = []  # one that has as much of everything as another has a higher sum
    for x in sorted(moments, key=sum, reverse=True):
        if not any(all(map(le, x, y)) for y in front):
            front.append(x)
    return front


@cache
def activations(job, layout, rank):
    """Bytes at the peak, on one pipeline rank."""
    model, w, T, h = job.model, job.width, layout.tp, job.model.n_embd
    n, T_sp = tokens_of(job, layout), layout.tp if layout.sp else 1
    saved = saved_by_block(job, layout, layout.recompute)
    # Between I and W: inputs of the matrices and gradients of their outputs, without --sp's split;
    # with experts only those of attention
    kv, inner, up, norm, _ = shape_of(model)
    deferred = (4 * h + (2 * h + 2 * kv + (up + 1) * inner) / T) * w
    if model.n_experts:
        deferred = (2 * h + (2 * h + 2 * kv) / T) * w
    # A head saves the input of its norm and the gradient of its output, and that of its matrix
    head = n * (2 * h + norm) * w / T_sp + model.vocab_size * h / T * max(w, 4)
    again = saved_by_block(job, layout, recompute=False) - saved
    each = n * saved, head, n * deferred, n * again
    m = layout.microbatches
    if not SCHEDULES[layout.schedule].grows:  # no more are held, however many microbatches follow
        m = min(m, 2 * layout.pp)
    moments = occupancy(model, layout.schedule, layout.pp, m, layout.chunks, rank)
    return max(sum(map(mul, held, each)) for held in moments)


def memory_of_rank(job, layout, rank):
    """{weights, gradients, optimizer, activations, buffers, total} of one pipeline rank."""
    model, w, T, gw = job.model, job.width, layout.tp, job.grad_width
    n, h = tokens_of(job, layout), model.n_embd
    part = parts_of(model, layout.schedule, layout.pp, layout.chunks)[rank]
    dense, experts = block_parameters(model, T, layout.ep)
    vocabulary, others = end_parameters(model, part, T)
    params = part.blocks * dense + vocabulary + others
    data = layout.dp * layout.cp
    states = [params * each + part.blocks * experts * of_expert for each, of_expert in zip(
        bytes_per_parameter(layout.zero, data, w, gw, job.moments),
        bytes_per_parameter(layout.zero, data / layout.ep, w, gw, job.moments), strict=True)]
    saved = activations(job, layout._replace(zero=0), rank)

    # The head's logits of a chunk of tokens (16-bit ones copied to 32), and log of their softmax
    chunk = min(n, max(h, 256)) * part.head
    logits = chunk * (w + max(w, 4) * (2 if w == 2 else 1)) * model.vocab_size / T
    _, inner, up, *_ = shape_of(model)
    at_work = max(logits, n * ((up + 1) * inner * w / T + 2 * h * w))
    messages = 4 * n * h * w / (T if layout.sp else 1) if layout.pp > 1 else 0
    gathered = {2: 2 * gw, 3: 2 * gw + 2 * w}.get(layout.zero, 0)  # bytes per parameter
    matrix = model.vocab_size * h / T if vocabulary else 0
    gathered *= max(dense + experts, matrix)
    # The optimizer's scaled copy of one bucket's gradients, when activations are freed: a layer's
    # shard; of DDP those of 25 MiB of weights, or the largest tensor
    if layout.zero:
        bucket = max(dense, experts * layout.ep, matrix) / data
    else:
        mlps = model.n_experts / model.top_k / layout.ep if model.n_experts else 1
        bucket = min(max(25 * 2**20 / w, mlps * h * inner / T, matrix),
                     params + part.blocks * experts)
    copied = bucket * max(w, 4)
    parts = dict(zip(("weights", "gradients", "optimizer"), states, strict=True),
                 activations=saved, buffers=max(at_work + messages + gathered, copied - saved))
    return {**parts, "total": sum(parts.values())}


def memory(job, layout, ranks=None):
    """memory_of_rank of the fullest pipeline rank. ranks: those to look at; None: all."""
    return max((memory_of_rank(job, layout, rank) for rank in ranks or range(layout.pp)),
               key=lambda parts: parts["total"])
