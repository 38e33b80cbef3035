"""The flags of a run: one dataclass, validated at the door, before any process group exists.

Bad input gets one line that names flag, values and fix, from one rank, and exit code 2.
"""

import argparse
import math
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

import checkpoint
import pipeline

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def flag(default, group, help, choices=None):
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass
class Config:
    dp: int = flag(0, "layout", "data-parallel replicas; 0: what is left of the processes")
    tp: int = flag(1, "layout", "tensor-parallel ranks, which split each layer")
    pp: int = flag(1, "layout", "pipeline stages, which split the list of layers")
    zero: int = flag(0, "layout", "split optimizer states (1), gradients (2), weights (3) over dp",
                     (0, 1, 2, 3))
    schedule: str = flag("1f1b", "layout", "pipeline schedule", tuple(pipeline.SCHEDULES))
    chunks: int = flag(0, "layout", "stages per pipeline rank, for interleaved; 0: chosen")
    microbatches: int = flag(0, "layout", "per step and replica; 0: chosen")
    recompute: bool = flag(False, "layout", "recompute each block's activations in backward")
    collectives: str = flag("ring", "layout", "hand-written, or the library's", ("ring", "native"))
    bucket_mb: float = flag(25.0, "layout", "size of a DDP gradient bucket (--zero 0), MiB")
    n_layer: int = flag(4, "model", "transformer blocks")
    n_head: int = flag(4, "model", "attention heads")
    n_embd: int = flag(128, "model", "width")
    block_size: int = flag(128, "model", "tokens per sequence")
    dtype: str = flag("float32", "model", "of weights, gradients and activations", tuple(DTYPES))
    steps: int = flag(600, "training", "optimizer steps")
    batch_size: int = flag(32, "training", "sequences per step, over all ranks")
    lr: float = flag(3e-3, "training", "peak learning rate")
    min_lr: float = flag(3e-4, "training", "learning rate at the end of the cosine")
    warmup_steps: int = flag(50, "training", "steps of linear warm-up")
    weight_decay: float = flag(0.1, "training", "AdamW's, on matrices only")
    beta1: float = flag(0.9, "training", "AdamW")
    beta2: float = flag(0.95, "training", "AdamW")
    grad_clip: float = flag(1.0, "training", "largest global gradient norm; 0: no clipping")
    seed: int = flag(1337, "training", "of initial weights and batches")
    data: str = flag("stdlib", "run", "folder with train.bin and val.bin, or stdlib, shakespeare")
    out: str = flag("out", "run", "folder for what the run leaves behind")
    save_interval: int = flag(0, "run", "steps between checkpoints in --out; 0: only at the end")
    keep: int = flag(0, "run", "checkpoints to keep in --out, the last ones; 0: all")
    resume: str = flag("no", "run", "no, auto (the last complete checkpoint of --out, if there is "
                       "one) or the path of one")
    init_from: str = flag("", "run", "model.safetensors to start from: ours, nanoGPT's or GPT-2's")
    timeout: float = flag(600.0, "run", "seconds to wait for another rank before giving up")
    log: str = flag("", "run", "file for one JSON line per step")
    trace: str = flag("", "run", "file for a Chrome trace of the third to fifth step, all ranks")
    log_interval: int = flag(20, "run", "steps between printed lines")
    eval_interval: int = flag(200, "run", "steps between validations; 0: never")
    eval_batches: int = flag(8, "run", "batches of a validation on the way; the last takes all")
    device: str = flag("auto", "run", "where to compute", ("auto", "cpu", "cuda"))
    compile: bool = flag(False, "run", "torch.compile each layer")


def parse(args, description=None):
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message}; --help lists the flags")
    groups = {}
    for f in fields(Config):
        name = f.metadata["group"]
        groups[name] = groups.get(name) or parser.add_argument_group(name)
        kind = {"action": "store_true"} if f.type in (bool, "bool") else {
            "type": type(f.default), "choices": f.metadata["choices"]}
        groups[name].add_argument("--" + f.name.replace("_", "-"), default=f.default,
                                  help=f"{f.metadata['help']} ({f.default})", **kind)
    return Config(**vars(parser.parse_args(args)))


def fail(message):
    """The one line that bad input gets, from one rank of each machine, and exit code 2."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


def check(cfg, world):
    """Resolve and validate the flags for `world` processes, before any process group is made.
    Returns the number of processes that the layout takes. ValueError: flag, values, fix."""
    for name in ("tp", "pp", "n_layer", "n_head", "n_embd", "block_size", "batch_size",
                 "log_interval", "eval_batches"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)} must be at least 1")
    for name in ("dp", "chunks", "microbatches", "steps", "warmup_steps", "eval_interval", "lr",
                 "min_lr", "weight_decay", "grad_clip", "seed", "save_interval", "keep"):
        if not 0 <= getattr(cfg, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)} must be 0 or more")
    if cfg.seed >= 2**63:
        raise ValueError(f"--seed {cfg.seed} must be below 2^63")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(cfg, name) < 1:
            raise ValueError(f"--{name} {getattr(cfg, name)} must lie in [0, 1)")
    if not 0 < cfg.bucket_mb < math.inf:
        raise ValueError(f"--bucket-mb {cfg.bucket_mb} must be above 0")
    if not 0.001 <= cfg.timeout <= 1e6:
        raise ValueError(f"--timeout {cfg.timeout} must lie between 0.001 and 1e6 seconds")
    if cfg.init_from and cfg.resume not in ("no", "auto"):
        raise ValueError(f"--init-from {cfg.init_from} and --resume {cfg.resume}: take one of them")
    model_ranks = cfg.tp * cfg.pp
    if cfg.dp == 0:
        if world > 1 and world % model_ranks:
            raise ValueError(f"--tp {cfg.tp} x --pp {cfg.pp} = {model_ranks} does not divide the "
                             f"{world} processes; start {model_ranks} or a multiple")
        cfg.dp = max(1, world // model_ranks)
    ranks = cfg.dp * model_ranks
    if world > 1 and ranks != world:
        raise ValueError(f"--dp {cfg.dp} x --tp {cfg.tp} x --pp {cfg.pp} = {ranks} does not match "
                         f"the {world} processes; start {ranks}, or one, which starts the others")
    if cfg.n_head % cfg.tp:
        fits = [n for n in range(1, cfg.n_head + 1) if cfg.n_head % n == 0]
        raise ValueError(f"--tp {cfg.tp} must divide --n-head {cfg.n_head}; try "
                         f"{' or '.join(map(str, fits[:4]))}")
    if cfg.n_embd % cfg.n_head:
        raise ValueError(f"--n-head {cfg.n_head} must divide --n-embd {cfg.n_embd}")
    if cfg.pp > cfg.n_layer:
        raise ValueError(f"--pp {cfg.pp} must be at most --n-layer {cfg.n_layer}")
    if cfg.batch_size % cfg.dp:
        raise ValueError(f"--dp {cfg.dp} must divide --batch-size {cfg.batch_size}")
    if cfg.microbatches == 0:  # a bubble of a third or less, as the batch allows
        most = 2 * cfg.pp if cfg.pp > 1 else 1
        fits = [m for m in range(1, most + 1) if cfg.batch_size // cfg.dp % m == 0]
        if cfg.schedule == "interleaved":
            fits = [m for m in fits if m % cfg.pp == 0] or fits
        cfg.microbatches = max(fits)
    if cfg.batch_size % (cfg.dp * cfg.microbatches):
        raise ValueError(f"--dp {cfg.dp} x --microbatches {cfg.microbatches} must divide "
                         f"--batch-size {cfg.batch_size}")
    cfg.chunks = cfg.chunks or (2 if cfg.schedule in ("interleaved", "zb-v") else 1)
    pipeline.make_schedule(cfg.schedule, cfg.pp, cfg.microbatches, cfg.chunks)
    if cfg.pp * cfg.chunks > cfg.n_layer + 2:
        raise ValueError(f"--pp {cfg.pp} x --chunks {cfg.chunks} must be at most --n-layer + 2 = "
                         f"{cfg.n_layer + 2}: embedding, blocks, head")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world > 1 else ranks
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cfg.device == "cuda" and gpus < local:
        raise ValueError(f"--device cuda: {local} processes here but {gpus} GPUs; use --device cpu")
    if cfg.device == "auto":
        if 0 < gpus < local and os.environ.get("RANK", "0") == "0" and world == ranks:
            print(f"{local} processes for {gpus} GPUs: falling back to the CPU", file=sys.stderr)
        cfg.device = "cuda" if gpus >= local else "cpu"
    for name, path in (("out", cfg.out), ("log", cfg.log), ("trace", cfg.trace)):
        if not path:
            continue
        folder = Path(path) if name == "out" else Path(path).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = Path(folder, f".writable-{os.getpid()}")
            probe.touch()
            probe.unlink()
            if name != "out" and Path(path).exists():
                open(path, "a").close()
        except OSError as error:
            raise ValueError(f"--{name} {path} cannot be written ({error.strerror}); "
                             "choose another") from None
    if cfg.trace and cfg.steps < 3:
        raise ValueError(f"--steps {cfg.steps} must be at least 3 for --trace, which takes the "
                         "third to the fifth")
    if cfg.resume != "no":
        auto = cfg.resume == "auto"
        found = checkpoint.newest(cfg.out) if auto else checkpoint.find(cfg.resume)
        cfg.resume = str(found or "no")
    return ranks
