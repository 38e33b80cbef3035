"""Bytes that each rank holds in a layout.

    weights, gradients, optimizer    sizes.bytes_per_parameter, what train.py says of itself
    activations    what a block saves, per token: 4 h + 4 elements, and 1/T of 12 h and of heads in
                   32 bits; under --sp 1/T of it all; with --recompute only its input, h, and all
                   of the block under way (tests hold this against the saved tensors)
    in flight      the peak along the very list of actions that the rank executes
    buffers        logits, a pipeline's messages, layers that ZeRO-2 and 3 hold whole

Left out: CUDA's and NCCL's own, fragmentation (an allocator loses some percent), experts that are
chosen unevenly. Activations as in arXiv 2205.05198; h is the width, S the tokens of a sequence.
"""

from functools import cache
from typing import NamedTuple

from schedules import actions_of, cut, placement
from sizes import GPTConfig, bytes_per_parameter


class Layout(NamedTuple):
    """train.py's flags of these names, all resolved; recompute also knows "selective"."""
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
    recompute: str = "none"
    cp_attention: str = "ring"

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp * self.cp


class Job(NamedTuple):
    """What is trained, whatever the layout."""
    model: GPTConfig
    batch_size: int  # sequences of a step, on all ranks
    # flash: one kernel. naive, as in 2021: S x S scores are written out, and there is dropout
    attention: str = "flash"
    width: int = 2  # bytes of a weight
    wide: bool = False  # gradients of 16-bit weights are summed in 32 bits

    @property
    def grad_width(self):
        return max(4, self.width) if self.wide else self.width


def tokens_of(job, layout):
    """Of a microbatch, on one rank."""
    sequences = job.batch_size / (layout.dp * layout.microbatches)
    return sequences * job.model.block_size / layout.cp


# ---- parameters ----


def block_parameters(model, T=1):
    """(all but experts, one expert): parameters of a block that one of T ranks holds."""
    h = model.n_embd
    attention, mlp, norms = (4 * h * h + 3 * h) / T + h, (8 * h * h + 4 * h) / T + h, 4 * h
    if not model.n_experts:
        return attention + mlp + norms, 0
    inside = 4 * h // model.top_k
    return attention + norms + h * model.n_experts, 2 * h * inside + inside + h


def n_parameters(model):
    """Of the whole model; without experts 12 L h^2 (1 + 13/(12 h)) + (V + S) h + 2 h."""
    dense, expert = block_parameters(model)
    return (model.n_layer * (dense + model.n_experts * expert)
            + (model.vocab_size + model.block_size + 2) * model.n_embd)


# ---- stages ----


class Part(NamedTuple):
    """What of the model's layers is in a stage, or on a rank."""
    embedding: int
    blocks: int
    head: int


@cache
def slices_of(model, n):
    """The layers of n stages, as train.py cuts them."""
    return cut(model.layer_costs(), n)


@cache
def stages_of(model, schedule, P, v):
    """What each pipeline rank has: [{stage: Part}]."""
    where, last = placement(schedule, P, v), model.n_layer + 1
    ranks = [{} for _ in range(P)]
    for stage, (start, stop) in enumerate(slices_of(model, len(where))):
        blocks = min(stop, last) - max(start, 1)
        ranks[where[stage]][stage] = Part(int(start == 0), blocks, int(stop > last))
    return ranks


@cache
def parts_of(model, schedule, P, v):
    """The same, all stages of a rank together: [Part]."""
    return [Part(*map(sum, zip(*stages.values(), strict=True)))
            for stages in stages_of(model, schedule, P, v)]


# ---- activations ----


def saved_by_block(job, layout, recompute):
    """Bytes that a block keeps for backward, per token of the rank. arXiv 2205.05198 counts 34 h at
    T = 1, two of them the masks of dropout, and 5 S heads of naive attention."""
    model, w, T = job.model, job.width, layout.tp
    h, heads, T_sp = model.n_embd, model.n_head, T if layout.sp else 1
    if recompute == "full":
        return h * w / T_sp
    whole, split = (4 * h + 4) * w, 12 * h * w
    if layout.cp > 1 and layout.cp_attention == "all-to-all":
        split += h * w
    if job.attention == "flash":
        split += heads * max(w, 4)  # the logarithm of the sum of each row
    else:
        whole += 2 * h
        split += (2 * w + 1) * model.block_size * heads if recompute == "none" else 0
    if model.n_experts:  # a row for each chosen expert, what it says, and that times the gate
        split += 3 * model.top_k * h * w
        whole += h * (max(w, 4) - w) + model.n_experts * max(w, 4)  # the router is in 32 bits
        whole += (24 + 2 * max(w, 4)) * model.top_k  # three 64-bit indices, and the gate twice
    return whole / T_sp + split / T


def saved_by_head(job, layout):
    """The same for the head: input and output of its norm, and the softmax over its own words."""
    model, w, T_sp = job.model, job.width, layout.tp if layout.sp else 1
    return (2 * model.n_embd + 2) * w / T_sp + model.vocab_size / layout.tp * max(w, 4)


@cache
def occupancy(schedule, P, m, v, rank, parts):
    """How much is held at a time: (blocks, heads) between their F and B or I, (blocks, heads)
    between I and W, and blocks that are being recomputed. One entry for each time at which nothing
    else is larger in all five."""
    held = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}  # (before I, behind it)
    stages, now, times = dict(parts), (0,) * 5, set()
    for action in actions_of(schedule, P, m, v, rank):
        part, (a, b) = stages[action.stage], held[action.kind]
        if action.kind in "BI" and part.blocks:
            # The head is through when a block is recomputed. B frees blocks, so the first is the
            # worst time. I leaves more behind than a block's input: the last is.
            done = b * (part.blocks - 1)
            times.add((now[0] - done, now[1] - part.head, now[2] + done, now[3] + b * part.head, 1))
        change = a * part.blocks, a * part.head, b * part.blocks, b * part.head, 0
        now = tuple(map(sum, zip(now, change, strict=True)))
        times.add(now)
    return [x for x in times if not any(
        x != y and all(a <= b for a, b in zip(x, y, strict=True)) for y in times)]


@cache
def activations(job, layout, rank):
    """Bytes at the peak, on one pipeline rank."""
    model, w, T = job.model, job.width, layout.tp
    saved = saved_by_block(job, layout, layout.recompute)
    # behind I there are the inputs of the matrices and the gradients of their outputs, not split
    # (of attention's only, if there are experts)
    defer = (4 * model.n_embd + 12 * model.n_embd / T) * w
    if model.n_experts:
        defer = (2 * model.n_embd + 4 * model.n_embd / T) * w
    each = (saved, saved_by_head(job, layout), defer,
            (model.n_embd + model.vocab_size / T) * w, saved_by_block(job, layout, "none") - saved)
    few = layout.microbatches
    if layout.schedule != "gpipe":  # the others hold no more, however many microbatches follow
        few = min(few, 2 * layout.pp + few % layout.pp)
    peak = max(sum(n * size for n, size in zip(held, each, strict=True)) for held in occupancy(
        layout.schedule, layout.pp, few, layout.chunks, rank,
        tuple(stages_of(model, layout.schedule, layout.pp, layout.chunks)[rank].items())))
    return tokens_of(job, layout) * peak


# ---- all of it ----


def memory(job, layout, ranks=None):
    """{weights, gradients, optimizer, activations, buffers, total}: bytes on the pipeline rank that
    holds most. ranks: which of them to look at; None: all."""
    model, w, T = job.model, job.width, layout.tp
    n, h, words = tokens_of(job, layout), model.n_embd, model.vocab_size / T
    dense, expert = block_parameters(model, T)
    experts = expert * model.n_experts / (layout.ep * T)
    data = layout.dp * layout.cp
    gw = job.grad_width
    states = zip(bytes_per_parameter(layout.zero, data, w, gw),
                 bytes_per_parameter(layout.zero, data / layout.ep, w, gw), strict=True)
    states = list(states)  # bytes of a parameter, and of an expert's
    fullest = {"total": 0}
    for rank in ranks or range(layout.pp):
        part = parts_of(model, layout.schedule, layout.pp, layout.chunks)[rank]
        ends = max(part.embedding, part.head)  # on one rank both use one matrix
        params = (part.blocks * dense + ends * words * h + part.embedding * model.block_size * h
                  + part.head * 2 * h)
        held = [params * each + part.blocks * experts * of_expert for each, of_expert in states]
        logits = part.head * (w + 2 * max(w, 4)) * words  # in two widths, and the gradient
        at_work = n * max(logits, 8 * h * w / T + 2 * h * w)
        messages = 4 * n * h * w / (T if layout.sp else 1) if layout.pp > 1 else 0
        layers = {2: 2 * gw, 3: 2 * gw + 2 * w}.get(layout.zero, 0)  # per parameter
        layers *= max(dense + experts, ends * words * h)
        saved = activations(job, layout._replace(zero=0), rank)
        # the optimizer's copy of 16-bit gradients, in 32 bits, comes when the rest has gone
        copied = 2 * held[1] if gw == 2 else 0
        buffers = max(at_work + messages + layers, copied - saved)
        parts = dict(zip(("weights", "gradients", "optimizer"), held, strict=True),
                     activations=saved, buffers=buffers)
        fullest = max(fullest, {**parts, "total": sum(parts.values())}, key=lambda x: x["total"])
    return fullest
