"""The flags of a run: one dataclass, validated before any process group exists. Bad input gets one
line that names flag, values and fix, from one rank of each machine, and exit code 2."""

import argparse
import math
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

from engine.schedules import make_schedule
from run.signals import STORE, local_rank
from schedules import SCHEDULES, chunks_of
from sizes import MOMENTS, WIDTHS


def flag(default, group, help, choices=None):
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass
class Config:
    dp: int = flag(0, "layout", "data-parallel ranks, which split the batch; 0: chosen")
    tp: int = flag(1, "layout", "tensor-parallel ranks, which split each layer")
    pp: int = flag(1, "layout", "pipeline ranks, which split the list of layers")
    cp: int = flag(1, "layout", "context-parallel ranks, which split each sequence")
    sp: bool = flag(False, "layout", "tensor-parallel ranks split the tokens between layers, too")
    ep: int = flag(1, "layout", "data-parallel ranks that share the experts")
    cp_attention: str = flag("ring", "layout", "how keys meet queries", ("ring", "all-to-all"))
    zero: int = flag(0, "layout", "shard optimizer (1), gradients (2), weights (3)", (0, 1, 2, 3))
    schedule: str = flag("1f1b", "layout", "pipeline schedule", tuple(SCHEDULES))
    chunks: int = flag(0, "layout", "stages per pipeline rank, for interleaved; 0: chosen")
    microbatches: int = flag(0, "layout", "per step and data rank; 0: chosen")
    recompute: bool = flag(False, "layout", "recompute each block's activations in backward")
    collectives: str = flag("auto", "layout", "auto: native on GPUs", ("auto", "ring", "native"))
    pad_vocab: int = flag(0, "layout", "pad a rank's vocabulary to a multiple; 0: 64 on GPUs")
    bucket_mb: float = flag(25.0, "layout", "size of a DDP gradient bucket (--zero 0), MiB")
    n_layer: int = flag(4, "model", "transformer blocks")
    n_head: int = flag(4, "model", "attention heads")
    n_embd: int = flag(128, "model", "width")
    experts: int = flag(0, "model", "in each block, in the place of an MLP; 0: none")
    top_k: int = flag(2, "model", "experts that a token goes through, each 4/top-k as wide")
    block_size: int = flag(128, "model", "tokens per sequence")
    dtype: str = flag("float32", "model", "of weights, gradients and activations", tuple(WIDTHS))
    grad_dtype: str = flag("same", "model", "of summed gradients", ("same", "float32"))
    steps: int = flag(600, "training", "optimizer steps")
    batch_size: int = flag(32, "training", "sequences per step, over all ranks")
    lr: float = flag(4e-3, "training", "peak learning rate")
    min_lr: float = flag(0.0, "training", "learning rate at the end of the cosine")
    warmup_steps: int = flag(150, "training", "steps of linear warm-up")
    warmup_tokens: int = flag(0, "training", "warm-up in tokens, whatever the batch; 0: in steps")
    optimizer: str = flag("adamw", "training", "lars, lamb: a rate per matrix", tuple(MOMENTS))
    scale_lr: str = flag("none", "training", "--lr and --min-lr times --batch-size / "
                         "--base-batch-size, or its root", ("none", "linear", "sqrt"))
    base_batch_size: int = flag(32, "training", "the batch that --lr was chosen for")
    weight_decay: float = flag(0.1, "training", "on matrices only")
    beta1: float = flag(0.9, "training", "AdamW, LAMB; SGD's and LARS's momentum")
    beta2: float = flag(0.95, "training", "AdamW, LAMB")
    grad_clip: float = flag(1.0, "training", "largest global gradient norm; 0: no clipping")
    balance: float = flag(0.01, "training", "weight of the experts' balance in the loss")
    seed: int = flag(1337, "training", "of initial weights and batches")
    data: str = flag("stdlib", "run", "folder with train.bin and val.bin, or stdlib, shakespeare")
    out: str = flag("out", "run", "folder for checkpoints")
    save_interval: int = flag(0, "run", "steps between checkpoints in --out; 0: only at the end")
    keep: int = flag(0, "run", "checkpoints to keep in --out, the last ones; 0: all")
    resume: str = flag("no", "run", "no, auto (the last complete checkpoint of --out) or a path")
    init_from: str = flag("", "run", "model.safetensors to start from: ours, nanoGPT's or GPT-2's")
    timeout: float = flag(600.0, "run", "seconds to wait for another rank before giving up")
    metrics: str = flag("", "run", "file for one JSON line per step")
    trace: str = flag("", "run", "file for a Chrome trace of the third to fifth step, all ranks")
    verbose: bool = flag(False, "run", "print all flags as they were resolved")
    log_interval: int = flag(20, "run", "steps between printed lines, after the first ten")
    eval_interval: int = flag(200, "run", "steps between validations; 0: never")
    eval_batches: int = flag(8, "run", "batches of a validation on the way; the last takes all")
    device: str = flag("auto", "run", "where to compute", ("auto", "cpu", "cuda"))
    compile: bool = flag(False, "run", "torch.compile each layer")


LIMITS = {  # (least, most): flags
    (1, 10**6): "tp pp cp ep top_k n_layer n_head n_embd batch_size base_batch_size log_interval "
    "eval_batches",
    (1, 2**31): "block_size",
    (0, 10**6): "dp pad_vocab experts chunks microbatches",
    (0, 2**63 - 1): "steps warmup_steps warmup_tokens save_interval keep eval_interval seed",
    (0, 1e308): "lr min_lr weight_decay grad_clip balance",
    (0, 1 - 1e-9): "beta1 beta2",
    (1e-6, 1e6): "bucket_mb timeout",
}


MARKS = {"metrics": '{"step": ', "trace": '{"traceEvents": '}  # how what these flags write begins


def add_flags(parser, names, **options):
    """Add the flags of these fields to a parser, or to a group of its flags."""
    for f in fields(Config):
        if f.name in names:
            kind = {"type": f.type, "choices": f.metadata["choices"]}
            kind = {"action": "store_true"} if f.type is bool else kind
            help = f.metadata["help"] + ("" if "default" in options else f" ({f.default})")
            parser.add_argument("--" + f.name.replace("_", "-"),
                                **{"default": f.default, "help": help, **kind, **options})


def fail(message):
    """Print one line, on one rank of each machine, and exit with code 2."""
    if local_rank() == 0:
        print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse(args, description=None):
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message}; --help lists the flags")
    for title in ("layout", "model", "training", "run"):
        names = [f.name for f in fields(Config) if f.metadata["group"] == title]
        add_flags(parser.add_argument_group(title), names)
    return Config(**vars(parser.parse_args(args)))


def require(condition, message):
    if not condition:
        raise ValueError(message)


def given(cfg, *names):
    return " x ".join(f"--{name.replace('_', '-')} {getattr(cfg, name)}" for name in names)


def require_divides(cfg, *names, whole):
    """ValueError unless the product of these flags divides another flag."""
    total = getattr(cfg, whole)
    if total % math.prod(getattr(cfg, name) for name in names):
        tries = [str(n) for n in range(1, total + 1) if total % n == 0][:4]
        raise ValueError(f"{given(cfg, *names)} must divide {given(cfg, whole)}; "
                         f"try {' or '.join(tries)}")


def require_multiple(cfg, name, part, *of):
    """ValueError unless a flag is a multiple of `part`, which follows from other flags."""
    value = getattr(cfg, name)
    require(value % part == 0, f"{given(cfg, name)} must be a multiple of {part}, for "
            f"{given(cfg, *of)}; try {-(-value // part) * part}")


def check_limits(cfg, limits=LIMITS):
    """ValueError for a value that is out of range, whatever the other flags are."""
    for (least, most), names in limits.items():
        for name in names.split():
            require(least <= getattr(cfg, name) <= most,  # false for nan
                    f"{given(cfg, name)} must be from {least:,} to {most:,}")


def world_size():
    """The number of processes in the environment that torchrun makes; 1 without. ValueError."""
    world, rank = os.environ.get("WORLD_SIZE") or "1", os.environ.get("RANK", "")
    met = STORE in os.environ or {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    require(world == "1" or met and world.isdecimal() and rank.isdecimal() and
            int(rank) < int(world), f"WORLD_SIZE={world} RANK={rank} in the environment is not "
            "torchrun's; unset WORLD_SIZE, or use torchrun")
    return int(world)


def check_layout(cfg, world):
    """Validate how `world` processes share the work, and choose the flags that are 0: chosen.
    Returns the number of ranks. ValueError: flag, values, fix."""
    check_limits(cfg)
    model_ranks = cfg.tp * cfg.pp * cfg.cp
    cfg.dp = cfg.dp or (cfg.ep if world == 1 else max(1, world // model_ranks))
    ranks = cfg.dp * model_ranks
    require(world in (1, ranks), f"{given(cfg, 'dp', 'tp', 'pp', 'cp')} = {ranks} does not match "
            f"the {world} processes; start {ranks}, or one, which starts the others")
    require_divides(cfg, "tp", whole="n_head")
    if cfg.cp_attention == "all-to-all":
        require_divides(cfg, "tp", "cp", whole="n_head")
    part = math.lcm(2 * cfg.cp if cfg.cp > 1 else 1, cfg.cp * cfg.tp if cfg.sp else 1)
    require_multiple(cfg, "block_size", part, "cp", "tp", "sp")
    require(cfg.ep == 1 or cfg.experts, f"{given(cfg, 'ep')} is for --experts; say how many")
    require_divides(cfg, "ep", whole="dp")
    if cfg.experts:
        require_multiple(cfg, "experts", cfg.ep * cfg.tp, "ep", "tp")
        require(cfg.top_k <= cfg.experts, f"{given(cfg, 'top_k')} must be at most "
                f"{given(cfg, 'experts')}")
        require(4 * cfg.n_embd % cfg.top_k == 0,
                f"{given(cfg, 'top_k')} must divide 4 x {given(cfg, 'n_embd')}; try 1, 2 or 4")
    require_divides(cfg, "n_head", whole="n_embd")
    require(cfg.pp <= cfg.n_layer, f"{given(cfg, 'pp')} must be at most {given(cfg, 'n_layer')}")
    require_divides(cfg, "dp", whole="batch_size")
    if cfg.microbatches == 0:  # a bubble of a third or less, if the batch allows it
        most = 2 * cfg.pp if cfg.pp > 1 else 1
        fits = [m for m in range(1, most + 1) if cfg.batch_size // cfg.dp % m == 0]
        wanted = cfg.pp if SCHEDULES[cfg.schedule].in_rounds else 1
        cfg.microbatches = max(fits, key=lambda m: (m % wanted == 0, m))
    require_divides(cfg, "dp", "microbatches", whole="batch_size")
    if cfg.scale_lr != "none":
        ratio = cfg.batch_size / cfg.base_batch_size
        factor = ratio if cfg.scale_lr == "linear" else math.sqrt(ratio)
        cfg.lr, cfg.min_lr = cfg.lr * factor, cfg.min_lr * factor
        cfg.base_batch_size = cfg.batch_size  # of the new rates: a second call changes nothing
    if cfg.warmup_tokens:
        cfg.warmup_steps = round(cfg.warmup_tokens / (cfg.batch_size * cfg.block_size))
    cfg.chunks = chunks_of(cfg.schedule, cfg.chunks)
    make_schedule(cfg.schedule, cfg.pp, cfg.microbatches, cfg.chunks)
    require(not cfg.init_from or cfg.resume in ("no", "auto"), f"--init-from {cfg.init_from} and "
            f"--resume {cfg.resume}: take one of them")
    require(not cfg.trace or cfg.steps >= 3, f"--steps {cfg.steps} must be at least 3 for --trace")
    require(not cfg.trace or cfg.trace != cfg.metrics, f"--trace {cfg.trace} and --metrics: take "
            "two files")
    require(cfg.grad_dtype == "same" or cfg.dtype != "float64",
            f"--grad-dtype {cfg.grad_dtype} is narrower than --dtype {cfg.dtype}; leave it out")
    require(cfg.pp * cfg.chunks <= cfg.n_layer + 2, f"{given(cfg, 'pp', 'chunks')} must be at most "
            f"--n-layer + 2 = {cfg.n_layer + 2}: embedding, blocks, head")
    return ranks


def check_memory(cfg, share):
    """ValueError if this machine cannot hold its share of weights and AdamW's states in float32,
    and of one activation per block and token of a microbatch."""
    mlps = cfg.experts / cfg.top_k if cfg.experts else 1  # an expert is 1/top_k as wide as an MLP
    states = 16 * (4 + 8 * mlps) * cfg.n_embd**2
    activations = 4 * cfg.batch_size * cfg.block_size / cfg.microbatches * cfg.n_embd
    need = share * cfg.n_layer * (states + activations)
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    require(need < have, f"the model needs {need / 1e9:,.0f} GB of this machine's {have / 1e9:,.0f}"
            "; take a smaller --n-layer, --n-embd, --block-size, --batch-size or --experts")


def check_writable(name, path, mark=""):
    """ValueError unless the file can be written and, if it has content, is ours: begins with the
    mark."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # /dev/stdout may be a pipe; to open any other one would wait for its reader
        require(not path.is_fifo() or path.parent == Path("/dev"),
                f"--{name} {path} is a pipe; name a file")
        open(path, "ab").close()
        begin = open(path, "rb").read(len(mark)) if path.is_file() else b""
    except OSError as error:
        raise ValueError(f"--{name} {path} cannot be written ({error.strerror})") from None
    require(mark.encode().startswith(begin), f"--{name} {path} holds something else than "
            f"--{name} writes; name another file")


def read_command_line(description):
    """(Config, number of processes, number of ranks) of this command line, or exit in one line."""
    cfg = parse(sys.argv[1:], description)
    try:
        world = world_size()
        return cfg, world, check_layout(cfg, world)
    except ValueError as error:
        fail(error)


def check(cfg, world):
    """check_layout, then the flags that depend on this machine. Returns the number of ranks."""
    import torch  # here, so that run/launch.py does without

    ranks = check_layout(cfg, world)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world > 1 else ranks
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(cfg.device != "cuda" or gpus >= local,
            f"--device cuda: {local} processes here but {gpus} GPUs; use --device cpu")
    if cfg.device == "auto":
        if 0 < gpus < local and os.environ.get("RANK", "0") == "0" and world == ranks:
            print(f"{local} processes for {gpus} GPUs: falling back to the CPU", file=sys.stderr)
        cfg.device = "cuda" if gpus >= local else "cpu"
    cuda = cfg.device == "cuda"
    if cuda and cfg.cp > 1 and cfg.cp_attention == "ring":  # what context_parallel.kernel takes
        size, part = cfg.n_embd // cfg.n_head, 16 // WIDTHS[cfg.dtype]
        require(part > 2 and size % part == 0 and (size <= 256 or part < 8),
                f"{given(cfg, 'cp', 'dtype')} with heads of {size}: the ring's GPU kernels take 16 "
                "bits and 8, 16, .. 256, or 32 and 4, 8, ..; try --cp-attention all-to-all")
    if not cuda:
        check_memory(cfg, local / ranks)
    if cfg.collectives == "auto":
        cfg.collectives = "native" if cuda else "ring"
    cfg.pad_vocab = cfg.pad_vocab or (64 if cuda else 1)
    check_writable("out", Path(cfg.out, ".lock"))
    for name, mark in MARKS.items():
        if path := getattr(cfg, name):
            check_writable(name, Path(path), mark)
    return ranks
