"""Which layout trains a model on many GPUs fastest, of those that fit? Bytes, messages, seconds.

    python -m extras.plan --model gpt3-175b --gpus 1024 --gpu h100
    python -m extras.plan --model FOLDER --gpus 64 --gpu h100     reads config.json (Hugging Face)
    python -m extras.plan published                               published step times, predicted

    memory      weights, gradients, optimizer, activations that backward needs: the bytes that
                train.py holds on a CPU (extras/test_plan.py counts them)
    messages    the bytes that a rank sends in a step along each axis (counted, too)
    seconds     a roofline: FLOPs and bytes over shares of what data sheets say. An estimate

Not counted: padding, logits, numbers per step, unevenly chosen experts, latency, stragglers, what
the norms of a Qwen's heads save.
"""

import signal
import statistics
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import torch

from collectives import Group
from data.files import read_json
from experts import on_meta, shapes_of
from mesh import lay_out
from run.flags import Config, Parser, check_layout, fail, parse
from run.weights import number
from schedules import SCHEDULES, actions_of, cut, placement
from shard import tag_whole
from sizes import ITEMSIZES, GPTConfig, LlamaConfig, bytes_per_parameter, config_of, peak_flops
from tensor_parallel import split_matrices

# A layout is a Config, train.py's flags. Letters are those of docs/costs.md. w: bytes of a weight
# and of an activation; `wide`: bytes of numbers that have at least 32 bits


@cache
def stages_of(model, schedule, P):
    """The layers of each stage, cut as in train.py: ["EBB", "BBH"] is embedding, blocks, head."""
    layers = "E" + "B" * model.n_layer + "H"
    cuts = cut(model.layer_costs(), P * SCHEDULES[schedule].stages_per_rank)
    return [layers[start:stop] for start, stop in cuts]


cached_actions_of = cache(actions_of)  # many layouts have the same list


@cache
def sliced_layers(model, T):
    """[embedding, block, head], as train.py makes them for the first of T tensor ranks: on the meta
    device, where they have shapes but no memory."""
    small = on_meta(replace(model, n_layer=1))
    alone = Group("alone", torch.device("meta"), [0], 0)
    tag_whole(small, alone, rep=alone)
    split_matrices(small, Group("tp", torch.device("meta"), range(T), 0))
    return small.layers


@cache
def numbers(layer, whole=False):
    """How many numbers its parameters have. whole: only those that are on each tensor rank."""
    return sum(param.numel() for param in layer.parameters()
               if not whole or param.shape == param.tag.shape)


def half(ranks):
    """The share of a tensor that a rank sends in half an all-reduce."""
    return (ranks - 1) / ranks


class Rank:
    """What a pipeline rank of a layout holds and sends. (The first of its tensor and data ranks,
    where their numbers do not divide.)"""

    def __init__(self, model, layout, rank):
        x = self.layout = layout
        self.model, self.rank = model, rank
        self.where = placement(x.schedule, x.pp)
        stages = stages_of(model, x.schedule, x.pp)
        own = "".join(stages[s] for s, owner in enumerate(self.where) if owner == rank)
        self.embeddings, self.blocks, self.heads = map(own.count, "EBH")
        self.w = ITEMSIZES[x.dtype]
        self.wide = max(self.w, 4)
        self.slices = x.tp if x.sp else 1  # parts of a tensor that only --sp splits
        self.sequences = x.batch_size / (x.dp * x.microbatches)  # sequences of a microbatch
        self.n = self.sequences * model.block_size / x.cp  # tokens of a microbatch
        self.replicas = x.dp * x.cp  # over which ZeRO shards; experts: over every E-th of them

        # Numbers per token, before T splits them
        C = model.n_embd
        self.llama = isinstance(model, LlamaConfig)
        self.kv = model.kv_width if self.llama else C
        self.qkvo = 2 * (model.query_width + self.kv)  # queries, keys, values, result
        self.hidden = model.n_hidden if self.llama else 4 * C
        self.into = self.hidden * (2 if self.llama else 1)  # a Llama has two matrices into an MLP
        # Bytes that a norm saves of a token: its input, mean and deviation. RMSNorm: the normalized
        # input, too, on a CPU
        self.norm = (2 * C + 1 if self.llama else C + 2) * self.w / self.slices

        # Parameters: experts and others, of a block and of all layers
        embedding, block, head = sliced_layers(model, x.tp)
        experts = numbers(block.mlp.experts) if model.n_experts else 0
        self.experts = experts / (x.ep * self.slices)
        self.dense = numbers(block) - experts
        self.whole = numbers(block, whole=True) - experts  # of dense, on each of T ranks
        self.matrix = numbers(embedding.wte)
        self.tied = head.lm_head.weight is embedding.wte.weight
        matrices = self.embeddings + self.heads
        self.matrices = self.matrix * (min(matrices, 1) if self.tied else matrices)
        self.ends = (self.embeddings * (numbers(embedding) - self.matrix)  # positions
                     + self.heads * (numbers(head) - self.matrix))  # the last norm
        self.others = self.blocks * self.dense + self.matrices + self.ends

    # ---- memory ----

    def memory(self):
        """{what: bytes}."""
        zero = self.layout.zero
        others = bytes_per_parameter(zero, self.replicas, self.w)
        experts = bytes_per_parameter(zero, self.replicas / self.layout.ep, self.w)
        weights, gradients, optimizer = (self.others * a + self.blocks * self.experts * b
                                         for a, b in zip(others, experts, strict=True))
        # For a moment exist, under ZeRO-2 and 3, the gradients of two layers; ZeRO-3: their weights
        layer = max(self.dense + self.experts, self.matrices)
        buffers = {2: 2, 3: 4}.get(zero, 0) * layer * self.w
        return {"weights": weights, "gradients": gradients, "optimizer": optimizer,
                "activations": self.activations(), "buffers": buffers}

    def block(self):
        """Bytes that a block's forward saves of a microbatch. In numbers per token:

            2 C                     the inputs of two columns; --sp has gathered them
            2 C + 4, 1/T by --sp    two norms; of a Llama 4 C + 2
            2 q + 2 kv, 1/T         queries, keys, values, result; and a number for each head
            2 into, 1/T             in and out of GELU; or gate, SiLU, other factor, product

        Experts, with whole tokens: each choice's input, output, and output times gate; gates
        before and after sorting; indices; the router's probabilities, and counts of a sequence.
        A Llama: sines and cosines of all positions, for queries and for keys."""
        model, w, wide, T = self.model, self.w, self.wide, self.layout.tp
        C, k = model.n_embd, model.top_k
        mlp = 2 * self.into * w
        token = C * w + 2 * self.norm + (self.qkvo * w + model.n_head * wide) / T
        tables = 2 * model.block_size / self.layout.cp * model.hs * w if self.llama else 0
        if not model.n_experts:
            return self.n * (token + C * w + mlp / T) + tables
        indices = 24 if self.layout.ep * self.slices == 1 else 40
        routed = C * wide + mlp + k * (3 * C * w + w + wide + indices) + model.n_experts * wide
        counts = self.sequences * model.n_experts * wide
        return self.n * (token + routed / self.slices) + counts + tables

    def activations(self):
        """The most along the rank's list of actions."""
        x, C, block = self.layout, self.model.n_embd, self.block()
        kept = self.n * C * self.w / self.slices if x.recompute else block  # a block's input
        # Where words are split: the row of each id, and is it on another rank?
        embedding = 9 * self.n * (x.tp > 1 or SCHEDULES[x.schedule].splits_backward)
        # The forward of the head has computed the gradients of its input and of its matrix
        head = self.n * (self.norm + C * self.w) + self.matrix * self.wide
        # Between I and W a block keeps inputs of matrices, and gradients of their outputs
        deferred = 2 * C + self.qkvo / x.tp
        if not self.model.n_experts:
            deferred += 2 * C + (self.into + self.hidden) / x.tp
        deferred *= self.n * self.w
        # But for GPipe more than 2 P microbatches do not raise the peak
        m = x.microbatches if x.schedule == "gpipe" else min(x.microbatches, 2 * x.pp)
        held = most = 0
        for kind, stage, _ in cached_actions_of(x.schedule, x.pp, m, self.rank):
            layers = stages_of(self.model, x.schedule, x.pp)[stage]
            embeddings, blocks, heads = map(layers.count, "EBH")
            saved = embeddings * embedding + blocks * kept + heads * head
            if kind in ("B", "I") and blocks:
                # The head's backward comes first; then the stage's last block is computed again
                most = max(most, held - heads * head + block - kept)
            held += {"F": saved, "B": -saved, "I": blocks * deferred - saved,
                     "W": -blocks * deferred}[kind]
            most = max(most, held)
        return most

    # ---- messages ----

    def messages(self):
        """{axis: bytes that the rank sends in a step}."""
        x, model, T, w = self.layout, self.model, self.layout.tp, self.w
        m, forwards = x.microbatches, 1 + x.recompute
        activation = self.n * model.n_embd * w
        # ZeRO's first sum leaves each replica a chunk of the gradients
        shards = self.replicas if x.zero else 1
        # Experts' counts for each sequence, which --sp and --cp sum
        counts = 2 * forwards * self.blocks * self.sequences * model.n_experts * self.wide

        # Halves of all-reduces of an activation: 2 in forward and 2 in backward for each block's
        # attention and for its MLP, 1 in forward and 1 in backward for each end of the model.
        # Recompute needs none after a block's last product
        halves = 4 if model.n_experts else 8
        if x.recompute:
            halves += 3 if x.sp and not model.n_experts else 2
        halves = self.blocks * halves + 2 * (self.embeddings + self.heads)
        loss = self.heads * ((T - 1) * self.n + 2 * half(T)) * self.wide  # a number for each token
        tp = m * (halves * half(T) * activation + loss)
        if x.sp:  # once: gradients of what is whole
            tp += 2 * half(T) * (self.blocks * self.whole + self.ends) * w / shards
            tp += m * half(T) * counts

        # Keys and values go around the ring in each forward and in backward, where their gradients
        # go around, too
        ring = self.blocks * (x.cp - 1) * 2 * self.n * self.kv / T
        cp = m * (ring * ((1 + forwards) * w + self.wide) + half(x.cp) * counts)

        # Tokens go to their k experts and back, in forward and backward; and how many will come
        rows = 2 * (1 + forwards) * model.top_k * activation / self.slices
        ep = rows + 8 * forwards * model.n_experts if model.n_experts else 0
        ep *= m * self.blocks * half(x.ep * self.slices)

        # Activations go to the next stage, gradients to the one before. Once: the gradient of the
        # tied matrix goes to the other end
        borders = sum(a != b and self.rank in (a, b) for a, b in pairwise(self.where))
        pp = m * borders * activation / self.slices
        first, last = self.where[0], self.where[-1]
        if self.tied and first != last and self.rank in (first, last):
            pp += self.matrix * w / shards

        # zero.py's table. ZeRO-3 gathers only once what backward does not read (positions) or finds
        # still there (the head's), and the first block stays for the next microbatch. (That holds
        # without a pipeline)
        once = self.ends + (0 if self.tied else self.matrices)
        dp = 0
        for n, less, first, ranks in (
                (self.others, once, self.dense, self.replicas),
                (self.blocks * self.experts, 0, self.experts, self.replicas / x.ep)):
            elements = (2 * n, 2 * n, (1 + m) * n, m * (3 * n - less) - (m - 1) * first)[x.zero]
            dp += half(ranks) * elements * w
        return {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": dp}


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
USABLE = 0.93  # of gb: logits, CUDA, NCCL and fragmentation take the rest
# Bytes that kernels read and write in forward and backward, for each byte saved. Per token a GPT's
# block saves 16 C numbers, and moves 38 C in each of three passes: 7.1; a Llama's 20 C, 40 C: 6
MOVED = 6.6


def link_seconds(layout, axis, gpu, nbytes):
    """A rank's messages along an axis. Between nodes the rings of a collective use the ports of all
    its ranks on a node; a ring of keys, or a pipeline, the port of one."""
    axes = {"dp": ["shard", "ep", "cp"], "ep": ["ep", "tp"] if layout.sp else ["ep"]}
    mesh = {"shard": layout.dp // layout.ep, "pp": layout.pp, "ep": layout.ep, "cp": layout.cp,
            "tp": layout.tp}
    group = lay_out(mesh, axes.get(axis, [axis]))[0]  # rank 0's
    near = sum(rank < gpu.node for rank in group)  # ranks on its node
    inside = 1e9 * NVLINK * gpu.nvlink
    port = 1e9 * NETWORK * gpu.network
    if near == len(group):  # also alone
        return nbytes / inside
    if axis == "ep":  # as many bytes to each rank; those to far ones take longest
        nbytes *= (len(group) - near) / (len(group) - 1)
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


def step_seconds(ranks, gpu, scores=0):
    """(seconds of a step, the bubble, what the slowest rank sends) of the pipeline ranks of a
    layout. Beside compute travel keys and values, the pipeline's activations, the gradients of the
    last microbatch (ZeRO-2, 3: all messages of all). Compute waits for tp and ep."""
    layout = ranks[0].layout
    m = layout.microbatches
    slowest = max(ranks, key=lambda rank: compute_seconds(rank, gpu, scores))
    each = compute_seconds(slowest, gpu, scores)
    sent = slowest.messages()
    seconds = {axis: link_seconds(layout, axis, gpu, nbytes) for axis, nbytes in sent.items()}
    pipeline = m * each + seconds["tp"] + seconds["ep"]
    pipeline += exposed(seconds["cp"], m * each) + exposed(seconds["pp"], m * each)
    # The table of schedules.py
    schedule = SCHEDULES[layout.schedule]
    rounds = m * (3 if schedule.splits_backward else schedule.stages_per_rank)
    bubble = (layout.pp - 1) / (rounds + layout.pp - 1)
    # AdamW reads and writes its states, reads gradients, writes weights
    optimizer = 2.5 * slowest.memory()["optimizer"] / (1e9 * HBM * gpu.hbm)
    data = exposed(seconds["dp"], m * each if layout.zero >= 2 else each)
    return pipeline / (1 - bubble) + data + optimizer, bubble, sent


# ---- all layouts ----


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(model, gpus, gpu, batch_size):
    """Yields those to compare, of all that train.py accepts. Left out because others are never
    worse: tensor ranks without --sp, GPipe, context ranks for short sequences, ZeRO-2 and 3 in a
    pipeline (a message a microbatch). A fork's schedule, too, of which activations() and
    step_seconds() do not know the memory and the bubble."""
    sizes = {name: value for name, value in vars(model).items() if hasattr(Config, name)}
    sizes.update(arch=model.arch, experts=model.n_experts, dtype="bfloat16")
    for tp, cp, pp, ep, zero, schedule, recompute, sequences in product(
            divisors(gpu.node), (1, 2, 4, 8, 16), divisors(gpus), divisors(model.n_experts or 1),
            range(4), ("1f1b", "interleaved", "zb-h1"), (False, True), (1, 2, 4, 8)):
        dp = gpus // (tp * cp * pp)
        m = batch_size // (dp * sequences) if dp else 0
        divides = dp * tp * cp * pp == gpus and m * dp * sequences == batch_size
        worse = cp > max(1, model.block_size // 4096) or (pp > 1 and zero > 1)
        if not divides or worse or (pp == 1 and schedule != "1f1b"):
            continue
        layout = Config(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, sp=tp > 1, zero=zero, schedule=schedule,
                        microbatches=m, recompute=recompute, batch_size=batch_size, **sizes)
        try:
            check_layout(layout, world=1)
        except ValueError:
            continue
        yield layout


# ---- models, and published runs ----

MODELS = {"gpt3-175b": "96,96,12288,51200", "llama3-8b": "32,32,4096,128256,14336,8",
          "llama3-70b": "80,64,8192,128256,28672,8", "llama3-405b": "126,128,16384,128256,53248,8",
          "mixtral-8x7b": "32,32,4096,32000,14336,8,128,8,2",
          "qwen3-235b": "94,64,4096,151936,1536,4,128,128,8"}


def model_of(words):
    """The model of a name in MODELS, of a folder with a config.json, or of numbers: layers, heads,
    width, vocabulary; a Llama: also MLP width, heads of keys; a mixture: these, of an expert, then
    head width, experts, experts per token. The caller sets block_size."""
    if Path(words, "config.json").is_file():
        settings = read_json(Path(words, "config.json"))
        vocab_size = number(settings, "vocab_size", whole=True)
        return config_of(parse(["--init-from", words]), vocab_size)
    words = MODELS.get(words, words)
    if not words.replace(",", "").isdigit():
        raise ValueError(f"--model {words} must be a folder with a config.json, or one of "
                         f"{', '.join(MODELS)}")
    L, heads, C, V, *llama = map(int, words.split(","))
    if not llama:
        return GPTConfig(V, 0, L, heads, C)
    width, kv_heads, head_dim, experts, k = (*llama, 0, 0, 1)[:5]
    return LlamaConfig(V, 0, L, heads, C, n_experts=experts, top_k=k, n_kv_head=kv_heads,
                       n_hidden=k * width, head_dim=head_dim, tied=False)


def ideal_seconds(model, gpus, gpu, batch_size):
    """A step at an MFU of 1: nothing computed twice, masked scores counted."""
    tokens = batch_size * model.block_size
    return 3 * sum(model.layer_costs()) * tokens / (gpus * gpu.flops)


def published():
    """Print the runs of published.txt, our seconds, and those of one MFU for all runs."""
    errors = {}  # dense, or mixtures -> [(plan's, the MFU's)]
    print(f"{'published run':42} seconds     plan  error  at {MFU:.0%}  error")
    for line in Path(__file__).with_name("published.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, card, network, seconds, scores, again, words, source = map(str.strip, line.split("|"))
        gpu = GPUS[card]._replace(network=float(network))
        layout = parse(["--dtype", "bfloat16", *words.split()])
        layout.recompute = float(again)
        model = replace(model_of(name), block_size=layout.block_size)
        ranks = [Rank(model, layout, rank) for rank in range(layout.pp)]
        plan, *_ = step_seconds(ranks, gpu, int(scores))
        gpus = layout.dp * layout.tp * layout.pp * layout.cp
        guess = ideal_seconds(model, gpus, gpu, layout.batch_size) / MFU
        off = [predicted / float(seconds) - 1 for predicted in (plan, guess)]
        print(f"{source:42} {float(seconds):7.2f} {plan:8.2f} {off[0]:+6.0%} {guess:7.2f} "
              f"{off[1]:+6.0%}")
        errors.setdefault("mixtures" if model.n_experts else "dense", []).append(map(abs, off))
    for kind, rows in errors.items():
        plan, guess = map(statistics.median, zip(*rows, strict=True))
        print(f"median error, {len(rows)} {kind}: plan {plan:.0%}, one MFU {guess:.0%}")


# ---- the screen ----

ROWS = 20
COLUMNS = ("dp", "tp", "pp", "cp", "ep", "zero", "schedule", "m", "b", "again", "w", "g", "opt",
           "act", "buf", "all", "tp", "cp", "ep", "pp", "dp", "bubble", "seconds", "MFU")
ROW = ("{:>4} {:>2} {:>2} {:>2} {:>2} {:>4} {:11} {:>4} {:>2} {:5} | {:>4} {:>4} {:>4} {:>4} {:>4} "
       "{:>4} | {:>5} {:>5} {:>5} {:>5} {:>6} | {:>6} {:>7} {:>3}")


def show(model, gpus, gpu, batch_size):
    """Print the layouts that fit, the fastest first, one of each split. ValueError: none fits."""
    found = []  # (seconds, layout, memory of its fullest rank, bubble, messages)
    for layout in layouts(model, gpus, gpu, batch_size):
        ranks = [Rank(model, layout, rank) for rank in range(layout.pp)]
        held = max((rank.memory() for rank in ranks), key=lambda held: sum(held.values()))
        if sum(held.values()) <= 1e9 * USABLE * gpu.gb:
            seconds, bubble, sent = step_seconds(ranks, gpu)
            found.append((seconds, layout, held, bubble, sent))
    if not found:
        raise ValueError(f"no layout of --gpus {gpus} fits; try more, or a smaller --batch-size")
    best = {}
    for row in sorted(found, key=lambda row: row[0]):
        x = row[1]
        best.setdefault((x.dp, x.tp, x.pp, x.cp, x.ep), row)
    parameters = sum(shape.numel() for shape in shapes_of(on_meta(model)).values())
    print(f"{parameters / 1e9:.1f}e9 parameters, {batch_size} sequences of {model.block_size} "
          f"tokens, 16 bits. {len(found)} layouts fit; the fastest of each split, {ROWS} at most.\n"
          "Between the bars: GB that the fullest rank holds; GB that the slowest sends in a step\n")
    print(ROW.format(*COLUMNS))
    for split, (seconds, x, held, bubble, sent) in [*best.items()][:ROWS]:
        gb = [f"{nbytes / 1e9:.1f}" for nbytes in (*held.values(), sum(held.values()),
                                                   *sent.values())]
        mfu = ideal_seconds(model, gpus, gpu, batch_size) / seconds
        print(ROW.format(*split, x.zero, x.schedule, x.microbatches,
                         batch_size // (x.dp * x.microbatches), "all" if x.recompute else "-", *gb,
                         f"{bubble:.1%}", f"{seconds:.2f}", f"{mfu:.0%}"))


def main():
    parser = Parser(__doc__)
    parser.add_argument("published", nargs="?", choices=["published"])
    parser.add_argument("--model", default="gpt3-175b", help=", ".join(MODELS) + ", or a folder")
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--batch-size", type=int, default=1536, help="sequences of a step")
    parser.add_argument("--block-size", type=int, default=2048, help="tokens of a sequence")
    args = parser.parse_args()
    if args.published:
        published()
        return
    try:
        model = replace(model_of(args.model), block_size=args.block_size)
        show(model, args.gpus, GPUS[args.gpu], args.batch_size)
    except ValueError as error:
        fail(error)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process quietly
    main()
