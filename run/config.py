"""The flags of a run: one dataclass, validated before any process group exists.

    parse                   command line -> Config; also --help
    check_layout            chooses the value of each flag that is 0 ("0: chosen" in --help), then
                            refuses a layout that cannot be; needs neither torch nor this machine's
                            devices
    check                   check_layout, then device, memory and files of this machine
    read_command_line       parse and check_layout, for a command

Bad input gets one line that names flag, values and fix, from one rank of each machine, and exit
code 2. The functions that check raise it as a ValueError; fail() prints it.
"""

import argparse
import math
import os
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from engine.schedules import make_schedule
from run.signals import STORE, local_rank
from schedules import SCHEDULES, chunks_of, is_plain
from sizes import MOMENTS, WIDTHS, bytes_per_parameter


def flag(default, group, help, choices=None):
    """A field of Config. group: the heading of --help under which the flag is listed."""
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass
class Config:
    dp: int = flag(0, "layout", "data-parallel ranks, which split the batch; 0: chosen")
    tp: int = flag(1, "layout", "tensor-parallel ranks, which split each layer")
    pp: int = flag(1, "layout", "pipeline ranks, which split the list of layers")
    cp: int = flag(1, "layout", "context-parallel ranks, which split each sequence")
    sp: bool = flag(False, "layout", "each tensor-parallel rank has 1/tp of the tokens where no "
                     "matrix is split")
    ep: int = flag(1, "layout", "data-parallel ranks that share the experts")
    cp_attention: str = flag("ring", "layout", "how keys meet queries", ("ring", "all-to-all"))
    zero: int = flag(0, "layout", "shard optimizer (1), gradients (2), weights (3)", (0, 1, 2, 3))
    schedule: str = flag("1f1b", "layout", "pipeline schedule", tuple(SCHEDULES))
    chunks: int = flag(0, "layout", "stages per pipeline rank, for interleaved; 0: chosen")
    microbatches: int = flag(0, "layout", "microbatches per step and data rank; 0: chosen")
    recompute: bool = flag(False, "layout", "recompute each block's activations in backward")
    collectives: str = flag("auto", "layout", "ring: ours; native: torch's; auto: native on "
                            "GPUs, else ring", ("auto", "ring", "native"))
    pad_vocab: int = flag(0, "layout", "pad a rank's rows of the vocabulary to a multiple of "
                          "this; 0: 64 on GPUs, 1 on CPUs")
    bucket_mb: float = flag(25.0, "layout", "size of a DDP gradient bucket (--zero 0), MiB")
    n_layer: int = flag(4, "model", "transformer blocks")
    n_head: int = flag(4, "model", "attention heads")
    n_embd: int = flag(128, "model", "width")
    experts: int = flag(0, "model", "experts in each block, in place of its MLP; 0: none")
    top_k: int = flag(2, "model", "experts that a token goes through, each 1/top-k as wide as "
                      "an MLP")
    block_size: int = flag(128, "model", "tokens per sequence")
    dtype: str = flag("float32", "model", "number format of weights, gradients and activations",
                      tuple(WIDTHS))
    grad_dtype: str = flag("same", "model", "number format of summed gradients",
                           ("same", "float32"))
    steps: int = flag(600, "training", "optimizer steps")
    batch_size: int = flag(32, "training", "sequences per step, over all ranks")
    lr: float = flag(4e-3, "training", "peak learning rate")
    min_lr: float = flag(0.0, "training", "learning rate at the end of the cosine")
    warmup_steps: int = flag(150, "training", "steps of linear warm-up")
    warmup_tokens: int = flag(0, "training", "warm-up in tokens; 0: --warmup-steps counts")
    optimizer: str = flag("adamw", "training", "lars and lamb: a rate per matrix", tuple(MOMENTS))
    scale_lr: str = flag("none", "training", "multiply --lr and --min-lr by --batch-size / "
                         "--base-batch-size, or by its root", ("none", "linear", "sqrt"))
    base_batch_size: int = flag(32, "training", "the batch that --lr was chosen for")
    weight_decay: float = flag(0.1, "training", "weight decay, of matrices only")
    beta1: float = flag(0.9, "training", "decay of AdamW's and LAMB's first moment; momentum of "
                        "SGD and LARS")
    beta2: float = flag(0.95, "training", "decay of AdamW's and LAMB's second moment")
    grad_clip: float = flag(1.0, "training", "largest global gradient norm; 0: no clipping")
    balance: float = flag(0.01, "training", "weight of the experts' balance in the loss")
    seed: int = flag(1337, "training", "number from which initial weights and batches follow")
    data: str = flag("stdlib", "run", "folder with train.bin and val.bin, or stdlib, shakespeare")
    out: str = flag("out", "run", "folder for checkpoints")
    save_interval: int = flag(0, "run", "steps between checkpoints in --out; 0: only at the end")
    keep: int = flag(0, "run", "number of last checkpoints to keep in --out; 0: all")
    resume: str = flag("no", "run", "no, auto (the last complete checkpoint of --out) or a path")
    init_from: str = flag("", "run", "model.safetensors to start from: ours, nanoGPT's or GPT-2's")
    timeout: float = flag(600.0, "run", "seconds to wait for another rank before giving up")
    metrics: str = flag("", "run", "file for one JSON line per step")
    trace: str = flag("", "run", "file for a Chrome trace of the third to fifth step, all ranks")
    verbose: bool = flag(False, "run", "print all flags as they were resolved")
    log_interval: int = flag(20, "run", "steps between printed lines, after the first ten")
    eval_interval: int = flag(200, "run", "steps between validations; 0: never")
    eval_batches: int = flag(8, "run", "batches of each validation but the last, which takes all")
    device: str = flag("auto", "run", "where to compute", ("auto", "cpu", "cuda"))
    compile: bool = flag(False, "run", "torch.compile each layer")
    plain: bool = flag(False, "run", "train with the plain files of the root (plain.py)")


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


# The first characters of the files that these flags write: a file that begins otherwise is not ours
MARKS = {"metrics": '{"step": ', "trace": '{"traceEvents": '}


# ---- the command line ----


def add_flags(parser, names, **options):
    """Add the flags of these fields to a parser, or to a group of its flags. options: arguments of
    add_argument that replace the field's own, such as default=None."""
    for f in fields(Config):
        if f.name not in names:
            continue
        name = "--" + f.name.replace("_", "-")
        text = f.metadata["help"]
        if "default" not in options:
            text += f" ({f.default})"
        settings = {"default": f.default, "help": text}
        if f.type is bool:
            settings["action"] = "store_true"
        else:
            settings["type"] = f.type
            settings["choices"] = f.metadata["choices"]
        parser.add_argument(name, **{**settings, **options})


def fail(message):
    """Print one line, on one rank of each machine, and exit with code 2."""
    if local_rank() == 0:
        print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse(args, description=None):
    """The Config of these command line arguments; a wrong one ends the process by fail()."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message}; --help lists the flags")
    for title in ("layout", "model", "training", "run"):
        names = [f.name for f in fields(Config) if f.metadata["group"] == title]
        add_flags(parser.add_argument_group(title), names)
    return Config(**vars(parser.parse_args(args)))


def as_text(cfg):
    """All flags with their values, for --verbose, in one line."""
    return " ".join(f"{name}={value}" for name, value in asdict(cfg).items() if value != "")


# ---- what the checks below are made of ----


def require(condition, message):
    if not condition:
        raise ValueError(message)


def given(cfg, *names):
    """Flags with their values for a message: given(cfg, "tp", "n_head") = --tp 3 x --n-head 4."""
    return " x ".join(f"--{name.replace('_', '-')} {getattr(cfg, name)}" for name in names)


def require_divides(cfg, *names, whole):
    """ValueError unless the product of these flags divides the flag `whole`."""
    total = getattr(cfg, whole)
    if total % math.prod(getattr(cfg, name) for name in names):
        divisors = [str(n) for n in range(1, total + 1) if total % n == 0]
        raise ValueError(f"{given(cfg, *names)} must divide {given(cfg, whole)}; "
                         f"try {' or '.join(divisors[:4])}")


def require_multiple(cfg, name, part, *of):
    """ValueError unless the flag `name` is a multiple of `part`, which follows from the flags `of`.
    """
    flags = ", ".join(given(cfg, other) for other in of)
    value = getattr(cfg, name)
    next_multiple = math.ceil(value / part) * part
    require(value % part == 0, f"{given(cfg, name)} must be a multiple of {part}, for "
            f"{flags}; try {next_multiple}")


def check_limits(cfg, limits=LIMITS):
    """ValueError for a value that is out of range, whatever the other flags are."""
    for (least, most), names in limits.items():
        for name in names.split():
            require(least <= getattr(cfg, name) <= most,  # false for nan
                    f"{given(cfg, name)} must be from {least:,} to {most:,}")


# ---- how many ranks share the work, and how ----


def world_size():
    """The number of processes in the environment that torchrun or run/launch.py made; 1 without
    them. ValueError if the environment is not theirs."""
    world = os.environ.get("WORLD_SIZE") or "1"
    rank = os.environ.get("RANK", "")
    if world == "1":
        return 1
    numbered = world.isdecimal() and rank.isdecimal() and int(rank) < int(world)
    # where the ranks meet: at our launcher's store, or at torchrun's address
    has_place = STORE in os.environ or {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    require(numbered and has_place, f"WORLD_SIZE={world} RANK={rank} in the environment is not "
            "torchrun's; unset WORLD_SIZE, or use torchrun")
    return int(world)


def check_layout(cfg, world):
    """Fill in the flags that are left to choose, then refuse a wrong layout for `world` processes.
    Returns the number of ranks. ValueError: flag, values, fix.

    Each process of a run calls it up to three times: in start() (run/launch.py) and in main()
    (train.py), each time on a new Config, and in check(), on main's: there nothing is left to
    choose."""
    check_limits(cfg)
    resolve(cfg, world)
    return refuse_wrong_layout(cfg, world)


def resolve(cfg, world):
    """Fill in the flags that are left to choose; turn --scale-lr into rates, and --warmup-tokens
    into steps. Checks nothing: where no choice fits (microbatches for a batch that --dp does not
    divide) refuse_wrong_layout refuses the one that was made here."""
    if cfg.dp == 0:
        model_ranks = cfg.tp * cfg.pp * cfg.cp
        if world == 1:  # one process starts as few ranks as the other flags allow
            cfg.dp = cfg.ep
        else:  # all processes take part
            cfg.dp = max(1, world // model_ranks)
    if cfg.microbatches == 0:
        cfg.microbatches = choose_microbatches(cfg)
    cfg.chunks = chunks_of(cfg.schedule, cfg.chunks)
    if cfg.scale_lr != "none":
        ratio = cfg.batch_size / cfg.base_batch_size
        factor = ratio if cfg.scale_lr == "linear" else math.sqrt(ratio)
        cfg.lr *= factor
        cfg.min_lr *= factor
        cfg.scale_lr = "none"  # done: from now on --lr is the rate of this batch
    if cfg.warmup_tokens:
        cfg.warmup_steps = round(cfg.warmup_tokens / (cfg.batch_size * cfg.block_size))


def choose_microbatches(cfg):
    """1 without a pipeline; else the largest number up to 2 P that divides a data rank's sequences.
    With 2 P microbatches the bubble of 1F1B, (P-1)/(2P+P-1), is less than a third of the time. A
    schedule in rounds, such as interleaved, needs a multiple of P: take the largest one, if there
    is one."""
    sequences = cfg.batch_size // cfg.dp
    most = 2 * cfg.pp if cfg.pp > 1 else 1
    fits = [m for m in range(1, most + 1) if sequences % m == 0]
    wanted = cfg.pp if SCHEDULES[cfg.schedule].in_rounds else 1
    return max(fits, key=lambda m: (m % wanted == 0, m))


def refuse_wrong_layout(cfg, world):
    """ValueError unless `world` processes can share the work as a resolved Config says. Returns the
    number of ranks; the Config stays as it is."""
    ranks = cfg.dp * cfg.tp * cfg.pp * cfg.cp
    require(world in (1, ranks), f"{given(cfg, 'dp', 'tp', 'pp', 'cp')} = {ranks} does not match "
            f"the {world} processes; start {ranks}, or one, which starts the others")
    refuse_wrong_sizes(cfg)
    refuse_wrong_pipeline(cfg)
    refuse_wrong_files(cfg)
    if cfg.plain:
        refuse_what_plain_lacks(cfg)
    require(cfg.grad_dtype == "same" or cfg.dtype != "float64",
            f"--grad-dtype {cfg.grad_dtype} is narrower than --dtype {cfg.dtype}; leave it out")
    return ranks


# Flags that --plain takes. Some have no effect there: top_k and balance (no experts),
# eval_interval and eval_batches (no validation)
PLAIN_FLAGS = """plain dp tp pp zero schedule chunks microbatches n_layer n_head n_embd block_size
    dtype steps batch_size lr min_lr warmup_steps warmup_tokens scale_lr base_batch_size
    weight_decay beta1 beta2 grad_clip top_k balance seed data timeout verbose log_interval
    eval_interval eval_batches device""".split()


def refuse_what_plain_lacks(cfg):
    """ValueError for a flag that the plain files of the root do not have."""
    for f in fields(cfg):
        require(f.name in PLAIN_FLAGS or getattr(cfg, f.name) == f.default,
                f"--plain has no --{f.name.replace('_', '-')}; leave out one of the two")
    require(is_plain(cfg.schedule), f"--plain has no --schedule {cfg.schedule}; try "
            f"{' or '.join(name for name in SCHEDULES if is_plain(name))}")
    require(cfg.dtype != "float16", "--plain has no loss scaling, which --dtype float16 needs; try "
            "bfloat16")
    require(cfg.device != "cuda", "--plain runs on CPUs; leave out --device cuda")


def refuse_wrong_sizes(cfg):
    """Heads, tokens and experts must divide over the ranks that split them; n_embd over the heads,
    and an MLP's 4 n_embd over top_k experts."""
    require_divides(cfg, "tp", whole="n_head")
    if cfg.cp_attention == "all-to-all":  # gives each context rank 1/cp of the heads
        require_divides(cfg, "tp", "cp", whole="n_head")
    # Under --cp a sequence is cut into 2 cp segments, two per rank; under --sp each of the cp x tp
    # ranks that share a sequence has one slice of it
    zigzag = 2 * cfg.cp if cfg.cp > 1 else 1
    slices = cfg.cp * cfg.tp if cfg.sp else 1
    require_multiple(cfg, "block_size", math.lcm(zigzag, slices), "cp", "tp", "sp")
    require(cfg.ep == 1 or cfg.experts, f"{given(cfg, 'ep')} is for --experts; say how many")
    require_divides(cfg, "ep", whole="dp")
    if cfg.experts:
        require_multiple(cfg, "experts", cfg.ep * cfg.tp, "ep", "tp")
        require(cfg.top_k <= cfg.experts, f"{given(cfg, 'top_k')} must be at most "
                f"{given(cfg, 'experts')}")
        require(4 * cfg.n_embd % cfg.top_k == 0,  # an expert's hidden width: 4 n_embd / top_k
                f"{given(cfg, 'top_k')} must divide 4 x {given(cfg, 'n_embd')}; try 1, 2 or 4")
    require_divides(cfg, "n_head", whole="n_embd")


def refuse_wrong_pipeline(cfg):
    """Stages need layers, microbatches need sequences, and the schedule may ask for more."""
    require_divides(cfg, "dp", whole="batch_size")
    require_divides(cfg, "dp", "microbatches", whole="batch_size")
    make_schedule(cfg.schedule, cfg.pp, cfg.microbatches, cfg.chunks)  # for its ValueError
    # Each stage has a layer at least
    require(cfg.pp * cfg.chunks <= cfg.n_layer + 2, f"{given(cfg, 'pp', 'chunks')} must be at most "
            f"--n-layer + 2 = {cfg.n_layer + 2}: embedding, blocks, head")


def refuse_wrong_files(cfg):
    """Refuse two sources of weights, a trace of too few steps, and two outputs in one file. (With
    --resume auto the weights of --init-from count until --out has a checkpoint.)"""
    require(not cfg.init_from or cfg.resume in ("no", "auto"), f"--init-from {cfg.init_from} and "
            f"--resume {cfg.resume}: take one of them")
    require(not cfg.trace or cfg.steps >= 3, f"--steps {cfg.steps} must be at least 3 for --trace")
    require(not cfg.trace or cfg.trace != cfg.metrics, f"--trace {cfg.trace} and --metrics: take "
            "two files")


# ---- this machine: memory, files, devices ----


def check_memory(cfg, share):
    """ValueError if this machine cannot hold its share (0 to 1) of the least that a model needs:
    weights, gradients and optimizer states (AdamW: 16 bytes per parameter, in 16 or 32 bits), and
    one activation of n_embd numbers for each block and token of a microbatch."""
    # Parameters of a block: 4 n_embd^2 in attention, 8 n_embd^2 in an MLP. An expert is 1/top_k as
    # wide as an MLP.
    mlps = cfg.experts / cfg.top_k if cfg.experts else 1
    parameters = (4 + 8 * mlps) * cfg.n_embd**2
    width = WIDTHS[cfg.dtype]  # bytes of a number
    n_moments = len(MOMENTS[cfg.optimizer])
    states = parameters * sum(bytes_per_parameter(0, 1, width, moments=n_moments))
    tokens = cfg.batch_size * cfg.block_size / cfg.microbatches
    activations = width * tokens * cfg.n_embd
    need = share * cfg.n_layer * (states + activations)
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    require(need < have, f"the model needs {need / 1e9:,.0f} GB of this machine's {have / 1e9:,.0f}"
            "; take a smaller --n-layer, --n-embd, --block-size, --batch-size or --experts")


def check_writable(name, path, mark=""):
    """ValueError unless the flag's file can be written and, if it has content, is ours: begins with
    the mark (see MARKS)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opening a pipe would wait for its reader; /dev/stdout may be a pipe, and has one
        require(not path.is_fifo() or path.parent == Path("/dev"),
                f"--{name} {path} is a pipe; name a file")
        open(path, "ab").close()
        begin = open(path, "rb").read(len(mark)) if path.is_file() else b""
    except OSError as error:
        raise ValueError(f"--{name} {path} cannot be written ({error.strerror})") from None
    # a file that is empty, or that a crash has cut off within the mark, is ours, too
    require(mark.encode().startswith(begin), f"--{name} {path} holds something else than "
            f"--{name} writes; name another file")


def choose_gpu_or_cpu(cfg, local, gpus, warn):
    """Fill in --device auto for `local` ranks on this machine, which has `gpus` GPUs. ValueError if
    --device cuda asks for more than there are. warn: this process prints a fall-back to the CPU."""
    require(cfg.device != "cuda" or gpus >= local,
            f"--device cuda: {local} processes here but {gpus} GPUs; use --device cpu")
    if cfg.device == "auto":
        if 0 < gpus < local and warn:
            print(f"{local} processes for {gpus} GPUs: falling back to the CPU", file=sys.stderr)
        cfg.device = "cuda" if gpus >= local and not cfg.plain else "cpu"


def check_ring_kernels(cfg):
    """ValueError if ring attention's GPU kernels (kernel() in engine/context_parallel.py) do not
    take these heads. A head's row is a multiple of 16 bytes: 8 numbers of 16 bits, or 4 of 32.
    Heads of 16 bits have up to 256 numbers. There is no kernel for 64 bits."""
    size = cfg.n_embd // cfg.n_head
    fits = {8: False,  # bytes of a number: do the kernels take such heads?
            4: size % 4 == 0,
            2: size % 8 == 0 and size <= 256}
    require(fits[WIDTHS[cfg.dtype]], f"{given(cfg, 'cp')}, {given(cfg, 'dtype')}: heads have "
            f"{size} numbers, but the ring's GPU kernels take 8, 16, .. 256 numbers of 16 bits, or "
            "4, 8, 12, .. of 32 bits; try --cp-attention all-to-all")


def check(cfg, world):
    """check_layout, then the flags that depend on this machine. Returns the number of ranks."""
    import torch  # here, so that run/launch.py, which imports this file, does without

    ranks = check_layout(cfg, world)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world > 1 else ranks
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Only a rank warns; a test that checks flags for ranks it will start (world < ranks) does not
    is_first_rank = world == ranks and os.environ.get("RANK", "0") == "0"
    choose_gpu_or_cpu(cfg, local, gpus, warn=is_first_rank)
    cuda = cfg.device == "cuda"
    if cuda and cfg.cp > 1 and cfg.cp_attention == "ring":
        check_ring_kernels(cfg)
    if not cuda:
        check_memory(cfg, local / ranks)
    if cfg.collectives == "auto":
        cfg.collectives = "native" if cuda else "ring"
    if cfg.pad_vocab == 0:
        cfg.pad_vocab = 64 if cuda else 1
    check_writable("out", Path(cfg.out, ".lock"))
    for name, mark in MARKS.items():
        path = getattr(cfg, name)
        if path:
            check_writable(name, Path(path), mark)
    return ranks


def read_command_line(description):
    """Returns (Config, number of processes, number of ranks) of this command line. Wrong flags end
    the process with one line (fail)."""
    cfg = parse(sys.argv[1:], description)
    try:
        world = world_size()
        return cfg, world, check_layout(cfg, world)
    except ValueError as error:
        fail(error)
