"""Which layout trains a model on many GPUs fastest, of those that fit? Bytes, messages, seconds.

    python -m extras.plan --model gpt3-175b --gpus 1024 --gpu h100
    python -m extras.plan --model FOLDER --gpus 64 --gpu h100     reads config.json (Hugging Face)
    python -m extras.plan published                               published step times, predicted

    memory      weights, gradients, optimizer, activations that backward needs: the bytes that
                train.py holds on a CPU (extras/test_plan.py counts them)
    messages    the bytes that a rank sends in a step along each axis (counted, too)
    seconds     a roofline: FLOPs and bytes over shares of what data sheets say. An estimate

Not counted: padding, numbers per step, unevenly chosen experts, latency, stragglers.
"""

import math
import statistics
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from operator import mul
from pathlib import Path
from typing import NamedTuple

from data.files import read_json
from run.flags import Config, Parser, fail, parse
from schedules import SCHEDULES, actions_of, cut, placement
from sizes import WIDTHS, GPTConfig, LlamaConfig, bytes_per_parameter, config_of, peak_flops

# A layout is a Config, train.py's flags. Letters are those of docs/memory.md. w: bytes of a weight
# and of an activation; `wide`: bytes of numbers that have at least 32 bits


class Count(NamedTuple):
    """Layers of a stage; or what a rank holds at one moment, once for each microbatch in flight."""
    embeddings: int = 0
    blocks: int = 0
    heads: int = 0
    deferred: int = 0  # blocks between I and W
    again: int = 0  # 1 while a block is computed again


@cache
def stages_of(model, schedule, P):
    """[{stage: Count}] of the pipeline ranks, cut as in train.py."""
    where = placement(schedule, P)
    ranks = [{} for _ in range(P)]
    last = model.n_layer + 1  # layers: 0 the embedding, 1 to n_layer the blocks, then the head
    for stage, (start, stop) in enumerate(cut(model.layer_costs(), len(where))):
        blocks = min(stop, last) - max(start, 1)
        ranks[where[stage]][stage] = Count(int(start == 0), blocks, int(stop > last))
    return ranks


@cache
def moments(model, schedule, P, m, rank):
    """The different Counts of what a rank holds along its list of actions."""
    now = Count()
    found = set()
    for kind, stage, _ in actions_of(schedule, P, m, SCHEDULES[schedule].stages_per_rank, rank):
        layers = stages_of(model, schedule, P)[rank][stage]
        if kind in ("B", "I") and layers.blocks:
            # The head's backward comes first; then the stage's last block is computed again
            found.add(now._replace(heads=now.heads - layers.heads, again=1))
        more = {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
        now = Count(*(n + more * each for n, each in zip(now, layers, strict=True)))
        later = {"F": 0, "B": 0, "I": 1, "W": -1}[kind]
        now = now._replace(deferred=now.deferred + later * layers.blocks)
        found.add(now)
    return found


def half(ranks):
    """The share of a tensor that a rank sends in half an all-reduce."""
    return (ranks - 1) / ranks


class Rank:
    """What a pipeline rank of a layout holds and sends. (The first of its tensor and data ranks,
    where their numbers do not divide.)"""

    def __init__(self, model, layout, rank):
        x = self.layout = layout
        self.model, self.rank = model, rank
        stages = stages_of(model, x.schedule, x.pp)[rank].values()
        self.embeddings, self.blocks, self.heads, *_ = map(sum, zip(*stages, strict=True))
        self.w = WIDTHS[x.dtype]
        self.wide = max(self.w, 4)
        self.slices = x.tp if x.sp else 1  # parts of a tensor that only --sp splits
        self.sequences = x.batch_size / (x.dp * x.microbatches)  # sequences of a microbatch
        self.n = self.sequences * model.block_size / x.cp  # tokens of a microbatch
        self.replicas = x.dp * x.cp  # over which ZeRO shards; experts: over every E-th of them
        # ZeRO's first sum leaves each replica a chunk of the gradients
        self.shards = self.replicas if x.zero else 1
        llama = isinstance(model, LlamaConfig)
        self.q = model.query_width
        self.kv = model.kv_width if llama else self.q
        self.hidden = model.n_hidden if llama else 4 * model.n_embd
        self.up = 2 if llama else 1  # matrices into an MLP; the second is the gate's
        self.norm = 1 if llama else 2  # vectors of a norm
        self.tied = getattr(model, "tied", True)

        # Parameters. Columns' biases are split like their outputs, rows' are whole. (Left out: a
        # Qwen's biases, and its norms of heads)
        C, bias = model.n_embd, not llama
        split = 2 * C * (self.q + self.kv) + bias * (self.q + 2 * self.kv)
        self.whole = 2 * self.norm * C + bias * C  # in a block, on each of T ranks
        self.experts = 0  # in a block
        if model.n_experts:
            self.whole += C * model.n_experts  # the router
            self.experts = model.n_experts / (x.ep * self.slices) * model.expert_parameters()
        else:
            split += (self.up + 1) * C * self.hidden + bias * self.hidden
            self.whole += bias * C
        self.split = split / x.tp
        self.matrix = math.ceil(model.vocab_size / x.tp) * C  # a row for each word
        matrices = self.embeddings + self.heads
        self.matrices = self.matrix * (min(matrices, 1) if self.tied else matrices)
        self.positions = self.embeddings * bias * model.block_size * C
        self.last_norm = self.heads * self.norm * C
        self.others = (self.blocks * (self.split + self.whole) + self.matrices + self.positions
                       + self.last_norm)

    def memory(self):
        """{what: bytes}."""
        x = self.layout
        others = bytes_per_parameter(x.zero, self.replicas, self.w)
        experts = bytes_per_parameter(x.zero, self.replicas / x.ep, self.w)
        states = [self.others * a + self.blocks * self.experts * b
                  for a, b in zip(others, experts, strict=True)]
        return dict(zip(("weights", "gradients", "optimizer", "activations", "buffers"),
                        (*states, self.activations(), self.buffers()), strict=True))

    # ---- activations: bytes of a microbatch ----

    def block(self):
        """What a block's forward saves, in numbers per token:

            2 C                     the inputs of two columns; --sp has gathered them
            2 C + 4, 1/T by --sp    the inputs of two norms, their means and deviations; RMSNorm:
                                    4 C + 2, because a CPU saves the normalized inputs, too
            2 q + 2 kv, 1/T         queries, keys, values, result; and a number for each head
            2 up hidden, 1/T        in and out of GELU; or gate, SiLU, other factor, product

        Experts, with whole tokens: each choice's input, output, and output times gate; gates
        before and after sorting; indices; the router's probabilities, and counts of a sequence.
        A Llama: sines and cosines of all positions, for queries and for keys."""
        model, w, wide, T = self.model, self.w, self.wide, self.layout.tp
        C, k = model.n_embd, model.top_k
        inside = (2 * self.q + 2 * self.kv) * w + model.n_head * wide
        mlp = 2 * self.up * self.hidden * w
        tables = 2 * model.block_size / self.layout.cp * model.hs * w if self.norm == 1 else 0
        if not model.n_experts:
            return self.n * (2 * C * w + 2 * self.norms() + (inside + mlp) / T) + tables
        indices = 24 if self.layout.ep * self.slices == 1 else 48
        routed = C * wide + mlp + k * (3 * C * w + w + wide + indices) + model.n_experts * wide
        counts = self.sequences * model.n_experts * wide
        return (self.n * (C * w + 2 * self.norms() + inside / T + routed / self.slices) + counts
                + tables)

    def norms(self):
        """What a norm saves of a token."""
        return (self.model.n_embd * (3 - self.norm) + self.norm) * self.w / self.slices

    def deferred(self):
        """What a block keeps between I and W: inputs of matrices, gradients of their outputs."""
        C, T = self.model.n_embd, self.layout.tp
        numbers = 2 * C + (2 * self.q + 2 * self.kv) / T
        if not self.model.n_experts:
            numbers += 2 * C + (self.up + 1) * self.hidden / T
        return self.n * numbers * self.w

    def activations(self):
        """The most along the rank's list of actions."""
        x, C, block = self.layout, self.model.n_embd, self.block()
        kept = self.n * C * self.w / self.slices if x.recompute else block  # a block's input
        # Where words are split: the row of each id, and is it on another rank?
        embedding = 9 * self.n * (x.tp > 1 or SCHEDULES[x.schedule].splits_backward)
        # The forward of the head has computed the gradients of its input and of its matrix
        head = self.n * (self.norms() + C * self.w) + self.matrix * self.wide
        # But for GPipe more than 2 P microbatches do not raise the peak
        m = x.microbatches if x.schedule == "gpipe" else min(x.microbatches, 2 * x.pp)
        each = (embedding, kept, head, self.deferred(), block - kept)
        return max(sum(map(mul, held, each))
                   for held in moments(self.model, x.schedule, x.pp, m, self.rank))

    def buffers(self):
        """What exists for a moment, roughly: logits (tensor_parallel.py); ZeRO-2 and 3: a layer's
        gradients; ZeRO-3: the weights of two layers."""
        logits = min(self.n * self.model.vocab_size / self.layout.tp, 2**27)
        layer = max(self.split + self.whole + self.experts, self.matrices)
        layers = {2: 1, 3: 3}.get(self.layout.zero, 0)
        return self.heads * logits * (self.w + 2 * self.wide) + layers * layer * self.w

    # ---- messages: bytes of a step ----

    def messages(self):
        """{axis: bytes that the rank sends}."""
        return {"tp": self.sent_tp(), "cp": self.sent_cp(), "ep": self.sent_ep(),
                "pp": self.sent_pp(), "dp": self.sent_dp()}

    def counts(self):
        """Experts' counts for each sequence of a microbatch, which --sp and --cp sum."""
        numbers = self.blocks * self.sequences * self.model.n_experts
        return 2 * (1 + self.layout.recompute) * numbers * self.wide

    def sent_tp(self):
        """In halves of all-reduces of an activation: a block has 2 forward and 2 backward for each
        of attention and MLP, each end one and one. Recompute needs no message after the last
        product. The loss: a number for each token. Once, with --sp: gradients of what is whole."""
        x, T = self.layout, self.layout.tp
        halves = 4 if self.model.n_experts else 8
        if x.recompute:
            halves += 3 if x.sp and not self.model.n_experts else 2
        halves = self.blocks * halves + 2 * (self.embeddings + self.heads)
        activations = halves * half(T) * self.n * self.model.n_embd * self.w
        loss = self.heads * ((T - 1) * self.n + 2 * half(T)) * self.wide
        total = x.microbatches * (activations + loss)
        if x.sp:
            whole = self.blocks * self.whole + self.positions + self.last_norm
            total += 2 * half(T) * whole * self.w / self.shards
            total += x.microbatches * half(T) * self.counts()
        return total

    def sent_cp(self):
        """Keys and values go around the ring in forward and backward, their gradients in backward.
        """
        x = self.layout
        around = (x.cp - 1) * 2 * self.n * self.kv / x.tp
        ring = self.blocks * around * ((2 + x.recompute) * self.w + self.wide)
        return x.microbatches * (ring + half(x.cp) * self.counts())

    def sent_ep(self):
        """Tokens to their k experts and back, in forward and backward; how many will come."""
        x, ranks = self.layout, self.layout.ep * self.slices
        if not self.model.n_experts:
            return 0
        rows = self.model.top_k * self.n / self.slices
        nbytes = 2 * (2 + x.recompute) * rows * self.model.n_embd * self.w
        nbytes += 8 * (1 + x.recompute) * self.model.n_experts
        return x.microbatches * self.blocks * half(ranks) * nbytes

    def sent_pp(self):
        """Activations to the next stage, gradients to the one before. Once: the gradient of the
        tied matrix to the other end."""
        x = self.layout
        where = placement(x.schedule, x.pp)
        ends = [rank for pair in zip(where, where[1:], strict=False) if len({*pair}) > 1
                for rank in pair]
        activation = self.n * self.model.n_embd * self.w / self.slices
        total = x.microbatches * ends.count(self.rank) * activation
        if self.tied and x.pp > 1 and self.rank in (where[0], where[-1]):
            total += self.matrix * self.w / self.shards
        return total

    def sent_dp(self):
        """zero.py's table. ZeRO-3 gathers only once what backward does not read (positions) or
        finds still there (the head's), and the first block stays for the next microbatch. (That
        holds without a pipeline.)"""
        x, m = self.layout, self.layout.microbatches
        once = self.positions + self.last_norm + (0 if self.tied else self.matrices)
        total = 0
        for n, less, first, ranks in (
                (self.others, once, self.split + self.whole, self.replicas),
                (self.blocks * self.experts, 0, self.experts, self.replicas / x.ep)):
            elements = (2 * n, 2 * n, (1 + m) * n, m * (3 * n - less) - (m - 1) * first)[x.zero]
            total += half(ranks) * elements * self.w
        return total


# ---- seconds ----


class GPU(NamedTuple):
    """Data sheets of NVIDIA's SXM cards; network: a port for each GPU of a node."""
    flops: float  # per second, dense 16-bit products
    gb: float  # memory; this and the rest in 10^9 bytes (per second)
    hbm: float  # GB/s of the GPU's memory
    nvlink: float  # to another GPU of the node, each way
    network: float  # to another node, each way
    node: int = 8  # GPUs of a node
    share: float = 0.74  # of flops, in products and attention, masked scores counted


GPUS = {
    "a100-40": GPU(peak_flops("a100"), 40, 1555, 300, 25),
    "a100-80": GPU(peak_flops("a100"), 80, 2039, 300, 25),
    "h100": GPU(peak_flops("h100"), 80, 3350, 450, 50, share=0.62),
    "gb200": GPU(2.45e15, 186, 8000, 900, 50, node=72, share=0.62),  # share: the H100's
}
# Shares of these figures that programs reach: with `share` and MFU fitted to 238 published runs of
# 47 sources (Megatron-LM, arXiv 2104.04473 and 2205.05198; Llama 3, 2407.21783; MosaicML's
# llm-foundry; ...), with a median error of 8%. None of these runs is in published.txt
MFU = 0.44  # the median of these runs: the guess without a plan
HBM, NVLINK, NETWORK = 0.66, 0.52, 0.65
UNHIDDEN = 0.27  # of its own time a message costs, though compute goes on beside it
USABLE = 0.93  # of gb: CUDA, NCCL and fragmentation take the rest
# Bytes that kernels read and write in forward and backward, for each byte saved. Per token a GPT's
# block saves 16 C numbers, and moves 38 C in each of three passes: 7.1; a Llama's 20 C, 40 C: 6
MOVED = 6.6


def link_seconds(layout, axis, gpu, nbytes):
    """A rank's messages along an axis. Between nodes the rings of a collective use the ports of all
    its ranks on a node; a ring of keys, or a pipeline, the port of one."""
    T, N, E, P, node = layout.tp, layout.cp, layout.ep, layout.pp, gpu.node
    slices = T if layout.sp else 1
    # (ranks of a group, those on a node: mesh.py lays out tp innermost, then cp, ep, pp)
    group, near = {"tp": (T, node), "cp": (N, node // T),
                   "ep": (E * slices, node // (T * N) * slices), "pp": (P, node // (T * N * E)),
                   "dp": (layout.dp * N, max(node // (T * P), min(N * E, node // T)))}[axis]
    near = max(1, min(near, group))
    inside = 1e9 * NVLINK * gpu.nvlink
    port = 1e9 * NETWORK * gpu.network
    if near == group:  # also alone
        return nbytes / inside
    if axis == "ep":  # a part to each rank, to near and far ones at once
        far = nbytes * (group - near) / (group - 1)
        return max(far / port, (nbytes - far) / inside)
    return nbytes / min(inside, port * (near if axis in ("tp", "dp") else 1))


def exposed(messages, compute):
    """Seconds by which messages lengthen the compute beside them."""
    return max(messages - compute, UNHIDDEN * messages)


def compute_seconds(rank, gpu, scores):
    """Forward and backward of a microbatch on a Rank. scores: 1 if attention has all scores in
    memory, as in programs before FlashAttention: 5 bytes for each (arXiv 2205.05198)."""
    model, x = rank.model, rank.layout
    *_, block, head = model.layer_costs()
    passes = 3 + x.recompute  # a backward is two
    flops = rank.n / x.tp * (rank.blocks * passes * block + 3 * rank.heads * head)
    saved = rank.block() + scores * 5 * rank.n * model.block_size * model.n_head / x.tp
    moved = rank.blocks * saved * MOVED * passes / 3
    moved += rank.heads * 2 * rank.n * model.vocab_size / x.tp * (rank.w + 3 * rank.wide)
    # Weights are read in each pass but that of their gradients, which are read and written
    moved += (passes + 1) * rank.w * (rank.others + rank.blocks * rank.experts)
    return flops / (gpu.share * gpu.flops) + moved / (1e9 * HBM * gpu.hbm)


def step_seconds(model, layout, gpu, v=0, scores=0):
    """(seconds of a step, the bubble, what the slowest pipeline rank sends). v: stages of a rank,
    if not the schedule's. Beside compute travel keys and values, the pipeline's activations, the
    gradients of the last microbatch (ZeRO-2, 3: all messages of all). Compute waits for tp and ep.
    """
    m = layout.microbatches
    ranks = [Rank(model, layout, rank) for rank in range(layout.pp)]
    slowest = max(ranks, key=lambda rank: compute_seconds(rank, gpu, scores))
    each = compute_seconds(slowest, gpu, scores)
    sent = slowest.messages()
    seconds = {axis: link_seconds(layout, axis, gpu, nbytes) for axis, nbytes in sent.items()}
    pipeline = m * each + seconds["tp"] + seconds["ep"]
    pipeline += exposed(seconds["cp"], m * each) + exposed(seconds["pp"], m * each)
    # The table of schedules.py
    v = v or SCHEDULES[layout.schedule].stages_per_rank
    rounds = m * (3 if layout.schedule == "zb-h1" else v)
    bubble = (layout.pp - 1) / (rounds + layout.pp - 1)
    # AdamW reads and writes its states, reads gradients, writes weights
    optimizer = 2.5 * slowest.memory()["optimizer"] / (1e9 * HBM * gpu.hbm)
    data = exposed(seconds["dp"], m * each if layout.zero >= 2 else each)
    return pipeline / (1 - bubble) + data + optimizer, bubble, sent


# ---- all layouts ----


def divisors(n, most):
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def layouts(model, gpus, gpu, batch_size):
    """Yields those to compare. Left out because others are never worse: tensor ranks without --sp,
    GPipe, context ranks for short sequences, ZeRO-2 and 3 in a pipeline (a message a microbatch).
    """
    heads = math.gcd(model.n_head, getattr(model, "n_kv_head", 0))
    for tp, cp, pp in product(divisors(heads, gpu.node), (1, 2, 4, 8, 16), divisors(gpus, 128)):
        dp, rest = divmod(gpus, tp * cp * pp)
        if rest or cp > max(1, model.block_size // 4096):
            continue
        expert_ranks = [ep for ep in divisors(dp, model.n_experts) if
                        model.n_experts % (ep * tp) == 0] if model.n_experts else [1]
        schedules = ("1f1b", "interleaved", "zb-h1") if pp > 1 else ("1f1b",)
        for ep, zero, schedule, recompute, sequences in product(
                expert_ranks, range(2 if pp > 1 else 4), schedules, (False, True), (1, 2, 4, 8)):
            m, rest = divmod(batch_size, dp * sequences)
            fits = pp * SCHEDULES[schedule].stages_per_rank <= model.n_layer + 2
            if rest == 0 and m and fits and not (SCHEDULES[schedule].in_rounds and m % pp):
                yield Config(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, sp=tp > 1, zero=zero,
                             schedule=schedule, microbatches=m, recompute=recompute,
                             batch_size=batch_size, dtype="bfloat16")


def search(model, gpus, gpu, batch_size):
    """([(seconds, layout, memory of its fullest rank, bubble, messages)], the fastest first, of
    layouts that fit; [bytes] of those that do not)."""
    found, too_large = [], []
    for layout in layouts(model, gpus, gpu, batch_size):
        held = max((Rank(model, layout, rank).memory() for rank in range(layout.pp)),
                   key=lambda held: sum(held.values()))
        total = sum(held.values())
        if total > 1e9 * USABLE * gpu.gb:
            too_large.append(total)
        else:
            seconds, bubble, sent = step_seconds(model, layout, gpu)
            found.append((seconds, layout, held, bubble, sent))
    return sorted(found, key=lambda row: row[0]), too_large


# ---- models, and published runs ----


def model_of(words):
    """The model of a name in MODELS, of a folder with a config.json, or of numbers: layers, heads,
    width, vocabulary; a Llama: also MLP width, heads of keys; a mixture: these, of an expert, then
    head width, experts, experts per token."""
    words = MODELS.get(words, words)
    if Path(words, "config.json").is_file():
        given = read_json(Path(words, "config.json"))
        model = config_of(parse(["--init-from", words]), given["vocab_size"])
        longest = given.get("max_position_embeddings", model.block_size)
        return replace(model, block_size=min(longest, 4096))
    if not words.replace(",", "").isdigit():
        raise ValueError(f"--model {words} must be a folder with a config.json, or one of "
                         f"{', '.join(MODELS)}")
    L, heads, C, V, *llama = map(int, words.split(","))
    if not llama:
        return GPTConfig(V, 2048, L, heads, C)
    width, kv_heads, head_dim, experts, k = (*llama, 0, 0, 1)[:5]
    return LlamaConfig(V, 4096, L, heads, C, experts, k, n_kv_head=kv_heads, n_hidden=k * width,
                       head_dim=head_dim, tied=False)


MODELS = {"gpt2-xl": "48,25,1600,50257", "gpt3-13b": "40,40,5120,51200",
          "gpt3-175b": "96,96,12288,51200", "llama3-8b": "32,32,4096,128256,14336,8",
          "llama3-70b": "80,64,8192,128256,28672,8", "llama3-405b": "126,128,16384,128256,53248,8",
          "mixtral-8x7b": "32,32,4096,32000,14336,8,128,8,2",
          "qwen3-235b": "94,64,4096,151936,1536,4,128,128,8"}


def flops_of(model, tokens):
    """Without what is recomputed, masked scores counted."""
    return 3 * sum(model.layer_costs()) * tokens


def published():
    """Print the runs of published.txt, our seconds, and those of one MFU for all runs."""
    rows = []
    for line in Path(__file__).with_name("published.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, gpu, seconds, v, scores, again, words, source = map(str.strip, line.split("|"))
        card, _, network = gpu.partition("@")
        gpu = GPUS[card]._replace(**{"network": float(network)} if network else {})
        layout = parse(["--dtype", "bfloat16", *words.split()])
        layout.recompute = float(again)
        model = replace(model_of(name), block_size=layout.block_size)
        ours, *_ = step_seconds(model, layout, gpu, int(v), int(scores))
        gpus = layout.dp * layout.tp * layout.pp * layout.cp
        ideal = flops_of(model, layout.batch_size * layout.block_size) / (gpus * gpu.flops)
        rows.append((source, float(seconds), ours, ideal, bool(model.n_experts)))
    print(f"{'published run':42} seconds     plan  error    MFU  at {MFU:.0%}  error")
    for source, seconds, ours, ideal, _ in rows:
        print(f"{source:42} {seconds:7.2f} {ours:8.2f} {ours / seconds - 1:+6.0%} "
              f"{ideal / seconds:6.0%} {ideal / MFU:7.2f} {ideal / MFU / seconds - 1:+6.0%}")
    own = statistics.median(ideal / seconds for _, seconds, _, ideal, _ in rows)
    for words, mixtures in (("dense", False), ("mixtures", True)):
        seconds, ours, ideal = zip(*(row[1:4] for row in rows if row[4] == mixtures), strict=True)
        plan, guess, hindsight = (
            statistics.median(abs(b / a - 1) for a, b in zip(seconds, predicted, strict=True))
            for predicted in (ours, [t / MFU for t in ideal], [t / own for t in ideal]))
        print(f"median error, {len(seconds)} {words}: plan {plan:.0%}, one MFU {guess:.0%} "
              f"({hindsight:.0%} in hindsight, at {own:.0%}, the median of all {len(rows)})")


# ---- the screen ----

ROWS = 20
HEAD = ("  dp tp pp cp ep zero schedule       m  b again | GB held: w    g  opt  act  buf  all | "
        "GB sent: tp    cp    ep    pp    dp | bubble seconds MFU")


def show(model, gpus, gpu, batch_size):
    tokens = batch_size * model.block_size
    whole = Rank(model, Config(dp=1, microbatches=1), 0)
    print(f"{(whole.others + whole.blocks * whole.experts) / 1e9:.1f}e9 parameters, {tokens:,} "
          f"tokens per step, sequences of {model.block_size}, 16 bits. Reached: {gpu.share:.0%} of "
          f"{gpu.flops / 1e12:.0f} TFLOP/s,\n{HBM:.0%} of memory's {gpu.hbm} GB/s, {NVLINK:.0%} of "
          f"NVLink's {gpu.nvlink}, {NETWORK:.0%} of the network's {gpu.network}; "
          f"{USABLE:.0%} of {gpu.gb} GB can be filled\n")
    found, too_large = search(model, gpus, gpu, batch_size)
    best, by_stages = {}, {}  # the fastest layout of each place; of each P
    for row in found:
        x = row[1]
        best.setdefault((x.dp, x.tp, x.pp, x.cp, x.ep), row)
        by_stages.setdefault(x.pp, row)
    print(HEAD)
    for seconds, x, held, bubble, sent in [*best.values()][:ROWS]:
        held = [*held.values()]
        mfu = flops_of(model, tokens) / (gpus * gpu.flops * seconds)
        print(f"{x.dp:4} {x.tp:2} {x.pp:2} {x.cp:2} {x.ep:2} {x.zero:4} {x.schedule:11}"
              f"{x.microbatches:5} {batch_size // (x.dp * x.microbatches):2} "
              f"{'all' if x.recompute else '-':5} |     "
              + " ".join(f"{n / 1e9:4.1f}" for n in (*held, sum(held))) + " |    "
              + " ".join(f"{n / 1e9:5.1f}" for n in sent.values())
              + f" | {bubble:6.1%} {seconds:7.2f} {mfu:3.0%}")
    print(f"\nof {len(found) + len(too_large)} layouts {len(too_large)} do not fit (they take "
          f"{min(too_large, default=0) / 1e9:.0f} GB or more), {len(found) - len(best)} are slower "
          f"than another one of the same ranks, {max(0, len(best) - ROWS)} slower than these rows")
    # Alpa (arXiv 2201.12023): how to split between operators, and how within? Our blocks are all
    # alike, so all stages are split alike, and P is the only choice between operators
    print("between operators pp, within them dp x tp: " + "; ".join(
        f"{P}: {x.dp} x {x.tp} in {seconds:.2f} s"
        for P, (seconds, x, *_) in sorted(by_stages.items())))


def main():
    if sys.argv[1:] == ["published"]:
        published()
        return
    parser = Parser(__doc__)
    parser.add_argument("--model", default="gpt3-175b", help=", ".join(MODELS) + ", or a folder")
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--batch-size", type=int, default=1536, help="sequences of a step")
    parser.add_argument("--block-size", type=int, default=0, help="tokens of a sequence")
    args = parser.parse_args()
    try:
        model = model_of(args.model)
    except ValueError as error:
        fail(error)
    model = replace(model, block_size=args.block_size or model.block_size)
    show(model, args.gpus, GPUS[args.gpu], args.batch_size)


if __name__ == "__main__":
    main()
