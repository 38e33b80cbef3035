"""The flags of a run: one dataclass, validated at the door, before any process group exists. Bad
input gets one line that names flag, values and fix, from one rank, and exit code 2."""

import argparse
import math
import os
import sys
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from run import checkpoint
from run.signals import local_rank
from schedules import SCHEDULES, make_schedule
from sizes import bytes_per_parameter

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def flag(default, group, help, choices=None):
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass
class Config:
    dp: int = flag(0, "layout", "data-parallel ranks, which split the batch; 0: what is left")
    tp: int = flag(1, "layout", "tensor-parallel ranks, which split each layer")
    pp: int = flag(1, "layout", "pipeline ranks, which split the list of layers")
    cp: int = flag(1, "layout", "context-parallel ranks, which split each sequence")
    sp: bool = flag(False, "layout", "tensor-parallel ranks split the tokens between layers, too")
    ep: int = flag(1, "layout", "data-parallel ranks that share the experts")
    cp_attention: str = flag("ring", "layout", "keys and values go around, or heads are swapped "
                             "for tokens", ("ring", "all-to-all"))
    zero: int = flag(0, "layout", "split optimizer states (1), gradients (2), weights (3) over dp "
                     "and cp", (0, 1, 2, 3))
    schedule: str = flag("1f1b", "layout", "pipeline schedule", tuple(SCHEDULES))
    chunks: int = flag(0, "layout", "stages per pipeline rank, for interleaved; 0: chosen")
    microbatches: int = flag(0, "layout", "per step and data rank; 0: chosen")
    recompute: bool = flag(False, "layout", "recompute each block's activations in backward")
    collectives: str = flag("auto", "layout", "ring: hand-written; native: the library's; auto: "
                            "ring, but native on GPUs", ("auto", "ring", "native"))
    pad_vocab: int = flag(0, "layout", "each rank's rows of the vocabulary are padded to a "
                          "multiple of this; 0: of 64 on GPUs")
    bucket_mb: float = flag(25.0, "layout", "size of a DDP gradient bucket (--zero 0), MiB")
    n_layer: int = flag(4, "model", "transformer blocks")
    n_head: int = flag(4, "model", "attention heads")
    n_embd: int = flag(128, "model", "width")
    experts: int = flag(0, "model", "in each block, in the place of an MLP; 0: none")
    top_k: int = flag(2, "model", "experts that a token goes through, each 4/top-k as wide (with 1 "
                     "the gate is always 1, and the router learns from balance alone)")
    block_size: int = flag(128, "model", "tokens per sequence")
    dtype: str = flag("float32", "model", "of weights, gradients and activations", tuple(DTYPES))
    grad_dtype: str = flag("same", "model", "of gradients while they are summed; float32: 18 bytes "
                           "per parameter in 16-bit training, not 16", ("same", "float32"))
    steps: int = flag(600, "training", "optimizer steps")
    batch_size: int = flag(32, "training", "sequences per step, over all ranks")
    lr: float = flag(3e-3, "training", "peak learning rate")
    min_lr: float = flag(3e-4, "training", "learning rate at the end of the cosine")
    warmup_steps: int = flag(50, "training", "steps of linear warm-up")
    weight_decay: float = flag(0.1, "training", "AdamW's, on matrices only")
    beta1: float = flag(0.9, "training", "AdamW")
    beta2: float = flag(0.95, "training", "AdamW")
    grad_clip: float = flag(1.0, "training", "largest global gradient norm; 0: no clipping")
    balance: float = flag(0.01, "training", "weight of the experts' balance in the loss")
    seed: int = flag(1337, "training", "of initial weights and batches")
    data: str = flag("stdlib", "run", "folder with train.bin and val.bin, or stdlib, shakespeare")
    out: str = flag("out", "run", "folder for what the run leaves behind")
    save_interval: int = flag(0, "run", "steps between checkpoints in --out; 0: only at the end")
    keep: int = flag(0, "run", "checkpoints to keep in --out, the last ones; 0: all")
    resume: str = flag("no", "run", "no, auto (the last complete checkpoint of --out, if there is "
                       "one) or the path of one")
    init_from: str = flag("", "run", "model.safetensors to start from: ours, nanoGPT's or GPT-2's")
    timeout: float = flag(600.0, "run", "seconds to wait for another rank before giving up")
    metrics: str = flag("", "run", "file for one JSON line per step")
    trace: str = flag("", "run", "file for a Chrome trace of the third to fifth step, all ranks")
    log_interval: int = flag(20, "run", "steps between printed lines")
    eval_interval: int = flag(200, "run", "steps between validations; 0: never")
    eval_batches: int = flag(8, "run", "batches of a validation on the way; the last takes all")
    device: str = flag("auto", "run", "where to compute", ("auto", "cpu", "cuda"))
    compile: bool = flag(False, "run", "torch.compile each layer")


def add_flags(parser, names, **options):
    """Adds the flags of these fields to a parser, or to a group of one."""
    for f in fields(Config):
        if f.name in names:
            kind = {"action": "store_true"} if f.type is bool else {
                "type": f.type, "choices": f.metadata["choices"]}
            help = f.metadata["help"] + ("" if "default" in options else f" ({f.default})")
            parser.add_argument("--" + f.name.replace("_", "-"), **{
                "default": f.default, "help": help, **kind, **options})


def parse(args, description=None):
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message}; --help lists the flags")
    for title in ("layout", "model", "training", "run"):
        add_flags(parser.add_argument_group(title),
                  [f.name for f in fields(Config) if f.metadata["group"] == title])
    return Config(**vars(parser.parse_args(args)))


def fail(message):
    """The one line that bad input gets, from one rank of each machine, and exit code 2."""
    if local_rank() == 0:
        print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


LIMITS = {  # what a value must do: (the flags, the test)
    "be at least 1": ("tp pp cp ep top_k n_layer n_head n_embd block_size batch_size log_interval "
                      "eval_batches", lambda x: x >= 1),
    "be at most 1,000,000": ("n_layer n_head n_embd batch_size microbatches",
                             lambda x: x <= 1_000_000),
    "be finite, and 0 or more": ("dp pad_vocab experts balance chunks microbatches steps seed keep "
                                 "warmup_steps eval_interval lr min_lr weight_decay grad_clip "
                                 "save_interval", lambda x: 0 <= x < math.inf),
    "lie in [0, 1)": ("beta1 beta2", lambda x: 0 <= x < 1),
    "be below 2^63": ("seed", lambda x: x < 2**63),
    "be above 0": ("bucket_mb", lambda x: 0 < x < math.inf),
    "lie between 0.001 and 1e6 seconds": ("timeout", lambda x: 0.001 <= x <= 1e6),
}


def require(condition, message):
    """ValueError with the message, unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_limits(cfg):
    """ValueError for a flag that makes no sense, whatever the others say."""
    for limit, (names, holds) in LIMITS.items():
        for name in names.split():
            value = getattr(cfg, name)
            require(holds(value), f"--{name.replace('_', '-')} {value} must {limit}")


def least_bytes(cfg, local):
    """(bytes that the ranks of this machine hold at least: model states, and the activations of
    one microbatch; bytes of memory that it has)."""
    width, share = DTYPES[cfg.dtype].itemsize, cfg.tp * cfg.pp
    states = 12 * cfg.n_layer * cfg.n_embd**2 / share / (cfg.ep if cfg.experts else 1)
    states *= sum(bytes_per_parameter(cfg.zero, cfg.dp * cfg.cp, width))
    tokens = cfg.batch_size * cfg.block_size / (cfg.dp * cfg.microbatches * cfg.cp)
    saved = tokens * cfg.n_embd * width * cfg.n_layer / share * (1 if cfg.recompute else 16)
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cfg.device == "cuda":
        have = local * torch.cuda.get_device_properties(0).total_memory
    return local * (states + saved), have


def world_size():
    """Of the environment that torchrun makes; 1 without. ValueError."""
    given = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR",
                                                         "MASTER_PORT")}
    if given["WORLD_SIZE"] in ("", "1"):
        return 1
    said = " ".join(f"{name}={value!r}" for name, value in given.items())
    numbers = [given[name] for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")]
    require(all(map(str.isdecimal, numbers)) and given["MASTER_ADDR"]
            and int(given["RANK"]) < int(given["WORLD_SIZE"]) and int(given["MASTER_PORT"]) < 2**16,
            f"the environment has {said}, which is not torchrun's; unset WORLD_SIZE, or use it")
    return int(given["WORLD_SIZE"])


def check_layout(cfg, world):
    """Resolve and validate what says how `world` processes share the work. Returns the number of
    processes that the layout takes. ValueError: flag, values, fix."""
    def given(*names):
        return " x ".join(f"--{n.replace('_', '-')} {getattr(cfg, n)}" for n in names)

    check_limits(cfg)
    model_ranks = cfg.tp * cfg.pp * cfg.cp
    require(cfg.dp or world == 1 or world % model_ranks == 0,
            f"{given('tp', 'pp', 'cp')} = {model_ranks} does not divide the {world} processes; "
            f"start {model_ranks} or a multiple")
    cfg.dp = cfg.dp or (cfg.ep if world == 1 else world // model_ranks)  # what is left of them
    ranks = cfg.dp * model_ranks
    require(world in (1, ranks), f"{given('dp', 'tp', 'pp', 'cp')} = {ranks} does not match the "
            f"{world} processes; start {ranks}, or one, which starts the others")
    tries = " or ".join([str(n) for n in range(1, cfg.n_head + 1) if cfg.n_head % n == 0][:4])
    require(cfg.n_head % cfg.tp == 0, f"{given('tp')} must divide {given('n_head')}; try {tries}")
    heads = cfg.n_head // cfg.tp
    tries = " or ".join([str(n) for n in range(1, heads + 1) if heads % n == 0][:4])
    require(cfg.cp_attention == "ring" or heads % cfg.cp == 0,
            f"{given('cp')} must divide the {heads} heads of a rank, {given('n_head')} over "
            f"{given('tp')}, for --cp-attention all-to-all; try {tries}, or ring")
    part = math.lcm(2 * cfg.cp if cfg.cp > 1 else 1, cfg.cp * cfg.tp if cfg.sp else 1)
    fits = [str(n * part) for n in (cfg.block_size // part, cfg.block_size // part + 1) if n]
    require(cfg.block_size % part == 0, f"{given('block_size')} must be a multiple of {part}, for "
            + " and ".join([f"2 pieces on each rank of {given('cp')}"] * (cfg.cp > 1)
                           + [f"--sp on {given('tp')}"] * (cfg.sp and cfg.tp > 1))
            + f"; try {' or '.join(fits)}")
    require(cfg.ep == 1 or cfg.experts, f"{given('ep')} is for --experts; say how many")
    require(cfg.dp % cfg.ep == 0, f"{given('ep')} must divide {given('dp')}, whose ranks share the "
            f"experts; try --dp {cfg.ep}")
    if cfg.experts:
        spread = cfg.ep * cfg.tp
        fits = [str(n * spread) for n in (cfg.experts // spread, cfg.experts // spread + 1) if n]
        require(cfg.experts % spread == 0, f"{given('experts')} must be a multiple of "
                f"{given('ep', 'tp')} = {spread}; try {' or '.join(fits)}")
        require(cfg.top_k <= cfg.experts, f"{given('top_k')} must be at most {given('experts')}")
        require(4 * cfg.n_embd % cfg.top_k == 0,
                f"{given('top_k')} must divide 4 x {given('n_embd')}, which the experts of a token "
                "share; try 1, 2 or 4")
    require(cfg.n_embd % cfg.n_head == 0, f"{given('n_head')} must divide "
            f"{given('n_embd')}; try --n-embd {-(-cfg.n_embd // cfg.n_head) * cfg.n_head}")
    require(cfg.pp <= cfg.n_layer, f"{given('pp')} must be at most {given('n_layer')}")
    require(cfg.batch_size % cfg.dp == 0, f"{given('dp')} must divide {given('batch_size')}")
    if cfg.microbatches == 0:  # a bubble of a third or less, as the batch allows
        most = 2 * cfg.pp if cfg.pp > 1 else 1
        fits = [m for m in range(1, most + 1) if cfg.batch_size // cfg.dp % m == 0]
        wanted = cfg.pp if cfg.schedule == "interleaved" else 1  # it takes multiples of --pp only
        cfg.microbatches = max(fits, key=lambda m: (m % wanted == 0, m))
    require(cfg.batch_size % (cfg.dp * cfg.microbatches) == 0,
            f"{given('dp', 'microbatches')} must divide {given('batch_size')}")
    if cfg.schedule == "zb-v":
        cfg.chunks = 2 if cfg.chunks in (0, 1) else cfg.chunks  # has two in any case
    cfg.chunks = cfg.chunks or (2 if cfg.schedule == "interleaved" else 1)
    make_schedule(cfg.schedule, cfg.pp, cfg.microbatches, cfg.chunks)
    require(cfg.pp * cfg.chunks <= cfg.n_layer + 2, f"{given('pp', 'chunks')} must be at most "
            f"--n-layer + 2 = {cfg.n_layer + 2}: embedding, blocks, head")
    return ranks


def check(cfg, world):
    """The same for all flags, before any process group is made."""
    ranks = check_layout(cfg, world)
    require(not cfg.init_from or cfg.resume in ("no", "auto"), f"--init-from {cfg.init_from} and "
            f"--resume {cfg.resume}: take one of them")
    require(not cfg.trace or cfg.steps >= 3, f"--steps {cfg.steps} must be at least 3 for --trace, "
            "which takes the third to the fifth")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world > 1 else ranks
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(cfg.device != "cuda" or gpus >= local,
            f"--device cuda: {local} processes here but {gpus} GPUs; use --device cpu")
    if cfg.device == "auto":
        if 0 < gpus < local and os.environ.get("RANK", "0") == "0" and world == ranks:
            print(f"{local} processes for {gpus} GPUs: falling back to the CPU", file=sys.stderr)
        cfg.device = "cuda" if gpus >= local else "cpu"
    require((cfg.device, cfg.dtype, cfg.cp_attention) != ("cuda", "float64", "ring") or cfg.cp == 1,
            f"--dtype {cfg.dtype} x --cp {cfg.cp}: the ring's kernel on a GPU has 32 bits at most; "
            "try --cp-attention all-to-all")
    need, have = least_bytes(cfg, local)
    require(need < have, f"--n-layer {cfg.n_layer}, --n-embd {cfg.n_embd}, --block-size "
            f"{cfg.block_size} and --batch-size {cfg.batch_size} need {need / 1e9:,.1f} GB of this "
            f"machine's {have / 1e9:,.1f}; take smaller ones, or more machines")
    if cfg.collectives == "auto":
        cfg.collectives = "native" if cfg.device == "cuda" else "ring"
    cfg.pad_vocab = cfg.pad_vocab or (64 if cfg.device == "cuda" else 1)
    require(cfg.grad_dtype == "same" or cfg.dtype != "float64",
            f"--grad-dtype {cfg.grad_dtype} is narrower than --dtype {cfg.dtype}; leave it out")
    for name in [name for name in ("out", "metrics", "trace") if getattr(cfg, name)]:
        path = Path(getattr(cfg, name))
        folder = path if name == "out" else path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            if name != "out" and path.exists():
                open(path, "a").close()
        except OSError as error:
            raise ValueError(f"--{name} {path} cannot be written ({error.strerror}); "
                             "choose another") from None
    if cfg.resume not in ("no", "auto"):  # auto: agreement.py looks once --out is this run's
        cfg.resume = str(checkpoint.find(cfg.resume))
    return ranks
