"""The flags of a run: one dataclass, checked before torch is imported and before a rank starts.

    parse           the command line -> Config
    check_layout    fills in what is left to choose, then refuses a layout that cannot be

A wrong flag is a ValueError of one line that names flag, value and fix. fail() prints it, on one
rank of each machine, and ends the process with exit code 2.
"""

import argparse
import math
import os
import sys
from dataclasses import dataclass, field, fields

from data.files import say
from run.weights import sizes_of
from schedules import SCHEDULES
from sizes import ITEMSIZES


def flag(default, help, choices=None):
    """A field of Config."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    # layout
    dp: int = flag(0, "data-parallel ranks, which split the batch; 0: all that the others leave")
    tp: int = flag(1, "tensor-parallel ranks, which split each layer")
    pp: int = flag(1, "pipeline ranks, which split the list of layers")
    cp: int = flag(1, "context-parallel ranks, which split each sequence")
    sp: bool = flag(False, "tensor-parallel ranks split the tokens where they split no matrix")
    ep: int = flag(1, "data-parallel ranks that share the experts")
    zero: int = flag(0, "shard optimizer (1), gradients (2), weights (3); 0: DDP", (0, 1, 2, 3))
    shard: int = flag(0, "data ranks over which ZeRO shards, the others hold replicas; 0: all")
    schedule: str = flag("1f1b", "pipeline schedule", tuple(SCHEDULES))
    microbatches: int = flag(0, "microbatches per step and data rank; 0: 1, or up to 2 pp")
    recompute: bool = flag(False, "recompute each block's activations in backward")
    cp_attention: str = flag("ring", "how keys meet queries", ("ring", "all-to-all"))
    # model
    arch: str = flag("gpt2", "architecture",
                     ("gpt2", "llama", "qwen2", "qwen3"))
    n_layer: int = flag(4, "transformer blocks")
    n_head: int = flag(4, "attention heads")
    n_kv_head: int = flag(0, "a Llama's heads of keys and values; 0: as many as --n-head")
    n_embd: int = flag(128, "width")
    block_size: int = flag(128, "tokens per sequence")
    experts: int = flag(0, "experts in each block, in place of its MLP; 0: none")
    top_k: int = flag(2, "experts that a token goes through, each 1/top-k as wide as an MLP")
    dtype: str = flag("float32", "number format", tuple(ITEMSIZES))
    # training
    steps: int = flag(600, "optimizer steps")
    batch_size: int = flag(32, "sequences per step, over all ranks")
    lr: float = flag(4e-3, "peak learning rate")
    min_lr: float = flag(0.0, "learning rate at the end of the cosine")
    warmup_steps: int = flag(150, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "weight decay, of matrices only")
    grad_clip: float = flag(1.0, "largest global gradient norm; 0: no clipping")
    seed: int = flag(1337, "number from which initial weights and batches follow")
    # run
    data: str = flag("stdlib", "folder with train.bin and val.bin, or stdlib")
    out: str = flag("out", "folder for checkpoints and metrics.jsonl")
    save_interval: int = flag(0, "steps between checkpoints; 0: only at the end")
    resume: str = flag("no", "no, auto (the last complete checkpoint of --out) or a path")
    init_from: str = flag("", "a model.safetensors, or a folder of Hugging Face, whose sizes count")
    eval_interval: int = flag(200, "steps between validations; 0: never")
    device: str = flag("auto", "where to compute", ("auto", "cpu", "cuda"))
    compile: bool = flag(False, "torch.compile each layer")
    collectives: str = flag("auto", "ours, torch's, or auto: native on GPUs, else ring",
                            ("auto", "ring", "native"))
    timeout: float = flag(600.0, "seconds to wait for another rank before giving up")
    watch: bool = flag(False, "print every message of the first step")
    # no flags: sizes of a Llama that the folder of --init-from gives
    n_hidden: int = 0  # hidden units of an MLP; 0: 8/3 of the width, up to a multiple of 64
    head_dim: int = 0  # width of a head; 0: the width / --n-head
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_scaling: str = ""  # FACTOR, or Llama 3.1's FACTOR,LOW,HIGH,TOKENS
    norm_eps: float = 1e-5  # RMSNorm's epsilon
    untied: bool = False  # lm_head has a matrix of its own


# {first flag of a group in --help: the group's heading}
HEADINGS = {"dp": "layout", "arch": "model", "steps": "training", "data": "run"}
# {flag: its least and its largest value}; of other numbers: 0 and 2^63 - 1
LIMITS = {name: (1, 2**63 - 1) for name in ("tp", "pp", "cp", "ep", "n_layer", "n_head", "n_embd",
                                            "block_size", "top_k", "batch_size")}
LIMITS["timeout"] = (1, 10**6)


# ---- lines for the user ----


def program():
    """The name with which this program's lines begin: train.py or, of python -m run.weights,
    weights.py."""
    return os.path.basename(sys.argv[0])


def in_words(error):
    """An error, or a text, in one line; an OSError without its number."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return text.replace("\n", "\\n")


def fail(error):
    """Print the error on one rank of each machine, and end this process with exit code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"{program()}: {in_words(error)}")
    sys.exit(2)


# ---- the command line ----


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose error is one line (fail). Flags cannot be abbreviated."""

    def __init__(self, description):
        super().__init__(prog=program(), description=description, allow_abbrev=False,
                         usage="%(prog)s [flags]", formatter_class=lambda prog: (
                             argparse.RawDescriptionHelpFormatter(prog, 2, 20, 110)))

    def error(self, message):
        if "--local" in message:  # torch.distributed.launch passes --local-rank
            message = "start the ranks by torchrun, which sets LOCAL_RANK, not --local-rank"
        fail(f"{in_words(message)}; --help lists the flags")


def parse(args=None, description=None):
    """The Config of these arguments; None: those of this command line."""
    parser = Parser(description)
    for f in fields(Config):
        if f.name in HEADINGS:
            group = parser.add_argument_group(HEADINGS[f.name])
        if not f.metadata:
            continue
        text = f.metadata["help"]
        if f.type is bool:
            options = {"action": "store_true"}
        else:
            # metavar: the choices stand in the help
            options = {"type": f.type, "choices": f.metadata["choices"], "metavar": ""}
            if f.metadata["choices"] and f.type is str:
                text += ": " + ", ".join(f.metadata["choices"])
            if f.default != "":
                text += f" ({f.default})"
        group.add_argument("--" + f.name.replace("_", "-"), default=f.default, help=text,
                           **options)
    values = parser.parse_args(args)
    if values.init_from and os.path.isfile(os.path.join(values.init_from, "config.json")):
        parser.set_defaults(**sizes_of(values.init_from))  # flags on the command line still count
        values = parser.parse_args(args)
    return Config(**vars(values))


def read_command_line(description, world):
    """(Config, number of ranks) of this command line, for `world` processes. What is wrong ends the
    process (fail)."""
    try:
        cfg = parse(None, description)
        return cfg, check_layout(cfg, world)
    except (OSError, ValueError) as error:
        fail(error)


def read_sample_flags():
    """The flags of sample.py's command line. A wrong one ends the process (fail)."""
    parser = Parser("Text from a checkpoint.")
    parser.add_argument("--prompt", default="def ", help="the text to go on from (def )")
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--data", help="folder of the tokenizer (the one of the training data)")
    parser.add_argument("--samples", type=int, default=1, help="number of continuations (1)")
    parser.add_argument("--max-tokens", type=int, default=200, help="length of each (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, default=50,
                        help="draw from the K likeliest tokens; 0: from all (50). (In train.py "
                             "--top-k is the experts of a token)")
    parser.add_argument("--seed", type=int, default=1337, help="decides all draws (1337)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(cpu)")
    args = parser.parse_args()
    for name, least in (("samples", 1), ("max_tokens", 1), ("temperature", 0), ("top_k", 0),
                        ("seed", 0)):
        value = getattr(args, name)
        if not value >= least:  # nan is not
            parser.error(f"--{name.replace('_', '-')} {value} must be at least {least}")
    return args


# ---- which layouts can be ----


def require(condition, message):
    if not condition:
        raise ValueError(message)


def given(cfg, *names):
    """Flags with their values: given(cfg, "tp", "n_head") is "--tp 3 x --n-head 4"."""
    return " x ".join(f"--{name.replace('_', '-')} {getattr(cfg, name)}" for name in names)


def require_divides(cfg, *names, whole):
    """ValueError unless the product of these flags divides the flag `whole`."""
    total = getattr(cfg, whole)
    if total % math.prod(getattr(cfg, name) for name in names):
        divisors = [str(n) for n in range(1, min(total, 10**6) + 1) if total % n == 0]
        raise ValueError(f"{given(cfg, *names)} must divide {given(cfg, whole)}; "
                         f"try {' or '.join(divisors[:4])}")


def require_multiple(cfg, name, part, *of):
    """ValueError unless the flag `name` is a multiple of `part`, which the flags `of` decide."""
    value = getattr(cfg, name)
    require(value % part == 0, f"{given(cfg, name)} must be a multiple of {part}, for "
            f"{given(cfg, *of)}; try {math.ceil(value / part) * part}")


def choose(cfg, world):
    """Fill in the flags whose 0 means: chosen here."""
    if cfg.dp == 0:
        # A lone process starts a data rank for each that shares the experts; several processes
        # all take part
        model_ranks = cfg.tp * cfg.pp * cfg.cp
        cfg.dp = cfg.ep if world == 1 else max(1, world // model_ranks)
    if cfg.microbatches == 0:
        # 1F1B with 2 P microbatches idles for (P-1)/(3P-1) of the time, less than a third of it
        sequences = cfg.batch_size // cfg.dp
        least = cfg.pp if SCHEDULES[cfg.schedule].in_rounds else 1
        fits = [m for m in range(least, 2 * cfg.pp + 1, least) if sequences % m == 0]
        cfg.microbatches = max(fits, default=least) if cfg.pp > 1 else 1
    cfg.shard = cfg.shard or cfg.dp
    if cfg.arch != "gpt2":
        cfg.n_kv_head = cfg.n_kv_head or cfg.n_head
        cfg.n_hidden = cfg.n_hidden or math.ceil(8 * cfg.n_embd / 3 / 64) * 64


def check_layout(cfg, world):
    """Fill in what is left to choose, then refuse what `world` processes cannot train. Returns the
    number of ranks. ValueError: flag, value, fix."""
    for f in fields(Config):
        least, most = LIMITS.get(f.name, (0, 2**63 - 1))
        if f.type in (int, float):  # nan is in no range
            require(least <= getattr(cfg, f.name) <= most,
                    f"{given(cfg, f.name)} must be from {least} to {most:g}")
    stages = cfg.pp * SCHEDULES[cfg.schedule].stages_per_rank
    require(stages <= cfg.n_layer + 2, f"{given(cfg, 'pp', 'schedule')}: {stages} stages must be "
            f"at most --n-layer + 2 = {cfg.n_layer + 2}: embedding, blocks, head")
    choose(cfg, world)
    ranks = cfg.dp * cfg.tp * cfg.pp * cfg.cp
    require(world in (1, ranks), f"{given(cfg, 'dp', 'tp', 'pp', 'cp')} = {ranks} does not match "
            f"the {world} processes; start {ranks}, or one, which starts the others")

    # The model: heads share the width; tensor ranks, and all-to-all's context ranks, share heads
    if not cfg.head_dim:
        require_divides(cfg, "n_head", whole="n_embd")
    split_heads = ("tp", "cp") if cfg.cp_attention == "all-to-all" else ("tp",)
    require_divides(cfg, *split_heads, whole="n_head")
    if cfg.arch == "gpt2":
        require(cfg.n_kv_head == 0, f"{given(cfg, 'n_kv_head')} is for --arch llama, qwen2, qwen3")
    else:
        require_divides(cfg, "n_kv_head", whole="n_head")
        require_divides(cfg, *split_heads, whole="n_kv_head")
        width = cfg.head_dim or cfg.n_embd // cfg.n_head
        require(width % 2 == 0, f"{given(cfg, 'n_embd')} / {given(cfg, 'n_head')}: heads of "
                f"{width} numbers, but rotary positions need an even number")

    # Tokens: a context rank has two of 2 cp segments; --sp cuts a rank's tokens into tp slices
    segments = 2 * cfg.cp if cfg.cp > 1 else 1
    slices = cfg.cp * cfg.tp if cfg.sp else 1
    require_multiple(cfg, "block_size", math.lcm(segments, slices), "cp", "tp")

    # Data ranks share the sequences of a batch, and the experts
    require_divides(cfg, "dp", "microbatches", whole="batch_size")
    require_divides(cfg, "shard", whole="dp")
    require_divides(cfg, "ep", whole="dp" if cfg.shard == cfg.dp else "shard")
    require(cfg.ep == 1 or cfg.experts, f"{given(cfg, 'ep')} is for --experts; say how many")
    if cfg.experts:
        tensor_ranks = ("tp",) if cfg.sp else ()  # with --sp they divide the experts, too
        require_multiple(cfg, "experts", cfg.ep * (cfg.tp if cfg.sp else 1), "ep", *tensor_ranks)
        require(cfg.top_k <= cfg.experts, f"{given(cfg, 'top_k')} must be at most "
                f"{given(cfg, 'experts')}")

    # A schedule in rounds has P microbatches in each
    if SCHEDULES[cfg.schedule].in_rounds:
        require_multiple(cfg, "microbatches", cfg.pp, "schedule", "pp")
    return ranks


def check_device(cfg, local_ranks, gpus):
    """Fill in --device and --collectives for this machine, which has `gpus` GPUs for its ranks.
    ValueError: a GPU for each rank is missing, or no kernel takes these heads."""
    if cfg.device == "auto":
        cfg.device = "cuda" if gpus >= local_ranks else "cpu"
    cuda = cfg.device == "cuda"
    require(not cuda or gpus >= local_ranks, f"--device cuda: {local_ranks} processes here but "
            f"{gpus} GPUs; use --device cpu")
    if cuda and cfg.cp > 1 and cfg.cp_attention == "ring":
        # A head's row is a multiple of 16 bytes, and of at most 256 numbers of 16 bits
        size = cfg.head_dim or cfg.n_embd // cfg.n_head
        itemsize = ITEMSIZES[cfg.dtype]
        fits = size * itemsize % 16 == 0 and (itemsize == 4 or (itemsize == 2 and size <= 256))
        require(fits, f"{given(cfg, 'cp', 'dtype')}: the ring's GPU kernels take no heads of "
                f"{size} such numbers; try --cp-attention all-to-all")
    if cfg.collectives == "auto":
        cfg.collectives = "native" if cuda else "ring"
    require(not cfg.watch or cfg.collectives == "ring", "--watch does not see the messages of "
            "torch's own collectives; add --collectives ring")
