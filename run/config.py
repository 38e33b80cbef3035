"""The flags of a run: one dataclass, validated before any process group exists.

    parse                   command line -> Config; also --help
    check_layout            chooses the value of each flag that is 0 ("0: chosen" in --help), then
                            refuses a layout that cannot be; needs neither torch nor this machine's
                            devices
    check                   check_layout, then the devices of this machine
    check_out               can --out be written?
    read_command_line       parse, check_layout

Bad input gets one line that names flag, values and fix, from one rank of each machine, and exit
code 2. The functions that check raise it as a ValueError; fail() prints it.
"""

import argparse
import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from data.foreign import OBJECT, read_json
from run.signals import in_words, launched, local_rank, note, program
from run.weights import CONFIG, sizes_of
from schedules import (
    SCHEDULES,
    chunks_of,
    make_schedule,
    placement,
    validate,
)
from sizes import WIDTHS

MANIFEST = "manifest.json"  # makes the folder of a checkpoint complete (run/checkpoint.py)
LOCK = ".lock"  # in --out: locked by the run that writes there (claim in run/checkpoint.py)


def flag(default, group, help, choices=None, alone=None):
    """A field of Config. group: the heading of --help under which the flag is listed; "": no flag.
    alone: the value that the flag has if it is given without one (--watch); None: it needs a
    value."""
    return field(default=default, metadata={"group": group, "help": help, "choices": choices,
                                            "alone": alone})


@dataclass
class Config:
    dp: int = flag(0, "layout", "data-parallel ranks, which split the batch; 0: all processes that "
                   "the other axes leave")
    tp: int = flag(1, "layout", "tensor-parallel ranks, which split each layer")
    pp: int = flag(1, "layout", "pipeline ranks, which split the list of layers")
    cp: int = flag(1, "layout", "context-parallel ranks, which split each sequence")
    sp: bool = flag(False, "layout", "each tensor-parallel rank has 1/tp of the tokens where no "
                     "matrix is split")
    ep: int = flag(1, "layout", "data-parallel ranks that share the experts")
    cp_attention: str = flag("ring", "details", "how keys meet queries", ("ring", "all-to-all"))
    zero: int = flag(0, "layout", "shard optimizer (1), gradients (2), weights (3); 0: DDP",
                     (0, 1, 2, 3))
    schedule: str = flag("1f1b", "layout", "pipeline schedule",
                         tuple(SCHEDULES))
    chunks: int = flag(0, "details", "stages per pipeline rank, for interleaved; 0: 2")
    microbatches: int = flag(0, "layout", "microbatches per step and data rank; 0: 1, or up to "
                             "2 pp")
    recompute: bool = flag(False, "layout", "recompute each block's activations in backward")
    collectives: str = flag("auto", "details", "ring: ours; native: torch's; auto: native "
                            "on GPUs, else ring", ("auto", "ring", "native"))
    transport: str = flag("auto", "details", "auto: shared memory between ranks of one machine, "
                          "else gloo; gloo: gloo for all", ("auto", "gloo"))
    shard: int = flag(0, "details", "data ranks over which ZeRO shards; the others hold replicas "
                      "of the shards; 0: all --dp")
    arch: str = flag("gpt2", "model", "model.py's GPT-2 or llama.py's Llama, Qwen2, Qwen3",
                     ("gpt2", "llama", "qwen2", "qwen3"))
    n_layer: int = flag(4, "model", "transformer blocks")
    n_head: int = flag(4, "model", "attention heads")
    n_embd: int = flag(128, "model", "width")
    n_kv_head: int = flag(0, "model", "llama: heads of keys and values; 0: as many as --n-head")
    experts: int = flag(0, "model", "experts in each block, in place of its MLP; 0: none")
    top_k: int = flag(2, "model", "experts that a token goes through, each 1/top-k as wide as "
                      "an MLP")
    block_size: int = flag(128, "model", "tokens per sequence")
    dtype: str = flag("float32", "model", "number format of weights, gradients and activations",
                      tuple(WIDTHS))
    steps: int = flag(600, "training", "optimizer steps")
    batch_size: int = flag(32, "training", "sequences per step, over all ranks")
    lr: float = flag(4e-3, "training", "peak learning rate")
    min_lr: float = flag(0.0, "details", "learning rate at the end of the cosine")
    warmup_steps: int = flag(150, "training", "steps of linear warm-up")
    weight_decay: float = flag(0.1, "training", "weight decay, of matrices only")
    grad_clip: float = flag(1.0, "training", "largest global gradient norm; 0: no clipping")
    balance: float = flag(0.01, "training", "weight of the experts' balance in the loss")
    seed: int = flag(1337, "details", "number from which initial weights and batches follow")
    data: str = flag("stdlib", "run", "folder with train.bin and val.bin, or stdlib, shakespeare")
    out: str = flag("out", "run", "folder for checkpoints")
    save_interval: int = flag(0, "run", "steps between checkpoints in --out; 0: only at the end")
    resume: str = flag("no", "run", "no, auto (the last complete checkpoint of --out) or a path")
    init_from: str = flag("", "run", "weights to start from: a model.safetensors, or a folder of "
                          "Hugging Face, which also gives the sizes")
    timeout: float = flag(600.0, "details", "seconds to wait for another rank before giving up")
    watch: str = flag("", "run", "print every message of the first step, then train on; "
                      "--watch 3: those of rank 3; --watch tp: those along one axis", alone="all")
    eval_interval: int = flag(200, "run", "steps between validations; 0: never")
    eval_batches: int = flag(8, "run", "batches of each validation but the last, which takes all")
    device: str = flag("auto", "details", "where to compute", ("auto", "cpu", "cuda"))
    compile: bool = flag(False, "details", "torch.compile each layer")
    # Sizes of a Llama without a flag: those of the folder or checkpoint of --init-from or --resume
    n_hidden: int = flag(0, "", "hidden units of an MLP; 0: 8/3 of the width, rounded up to a "
                         "multiple of 64")
    head_dim: int = flag(0, "", "width of a head; 0: the width / --n-head")
    rope_theta: float = flag(10000.0, "", "base of the rotary frequencies")
    rope_scaling: str = flag("", "", "FACTOR, or Llama 3.1's FACTOR,LOW,HIGH,TOKENS: lower "
                             "frequencies, for longer sequences")
    norm_eps: float = flag(1e-5, "", "RMSNorm's epsilon")
    untied: bool = flag(False, "", "lm_head has a matrix of its own")


LIMITS = {  # (least, most): flags
    (1, 10**6): "tp pp cp ep top_k n_layer n_head n_embd batch_size eval_batches",
    (1, 2**31): "block_size",
    (0, 10**6): "dp shard experts chunks microbatches n_kv_head n_hidden head_dim",
    (0, 2**63 - 1): "steps warmup_steps save_interval eval_interval seed",
    (0, 1e308): "lr min_lr weight_decay grad_clip balance",
    (1e-6, 1e6): "timeout",
    (1.0, 1e12): "rope_theta",
    (0, 1): "norm_eps",
}


# ---- the command line ----


class Parser(argparse.ArgumentParser):
    """ArgumentParser, but a wrong command line prints one line and exits with code 2, and flags
    cannot be abbreviated."""

    def __init__(self, description):
        super().__init__(prog=program(), description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        """Called by argparse, with a text, and by main() of a command, with an exception."""
        self.exit(2, f"{self.prog}: {in_words(message)}\n")


def add_flags(parser, names, defaults=None, **options):
    """Add the flags of these fields to a parser, or to a group of its flags. defaults: {field:
    default}, which replace the fields' own. options: arguments for add_argument, such as
    action=..., which replace those made from the field."""
    for f in fields(Config):
        if f.name not in names:
            continue
        name = "--" + f.name.replace("_", "-")
        default = (defaults or {}).get(f.name, f.default)
        text = f.metadata["help"]
        if "default" not in options and default != "" and f.type is not bool:
            text += f" ({default})"
        settings = {"default": default, "help": text}
        if f.type is bool:
            settings["action"] = "store_true"
        else:
            settings["type"] = f.type
            settings["choices"] = f.metadata["choices"]
        if f.metadata["alone"]:
            settings.update(nargs="?", const=f.metadata["alone"], metavar="WHAT")
        parser.add_argument(name, **{**settings, **options})


def fail(error):
    """Print one line, on one rank of each machine, and exit with code 2. error: a text or an
    exception."""
    if local_rank() == 0:
        note(f"{program()}: {in_words(error)}")
    sys.exit(2)


def parse(args, description=None):
    """The Config of these arguments (None: sys.argv[1:]); a wrong one ends the process (fail)."""
    parser = Parser(description)
    parser.error = lambda message: fail(f"{message}; --help lists the flags")
    parser.usage = "%(prog)s [flags]"
    for title in ("layout", "training", "run", "model", "details"):
        names = [f.name for f in fields(Config) if f.metadata["group"] == title]
        add_flags(parser.add_argument_group(title), names)
    cfg = Config(**vars(parser.parse_args(args)))
    # Sizes that no flag gives are those of the folder of Hugging Face, or of the checkpoint
    if cfg.init_from and os.path.lexists(Path(cfg.init_from, CONFIG)):
        try:
            sizes = sizes_of(cfg.init_from)
        except ValueError as error:
            fail(error)
    else:
        sizes = sizes_of_checkpoint(cfg.init_from if cfg.resume in ("no", "auto") else cfg.resume)
    parser.set_defaults(**sizes)
    return Config(**vars(parser.parse_args(args)))


def sizes_of_checkpoint(path):
    """{name: value} of the sizes without a flag in the manifest of the checkpoint at this path (or
    of the file model.safetensors in it, or of the last one in a run's folder); {} if there is none.
    (A damaged manifest is refused later, in run/checkpoint.py.)"""
    if not path:
        return {}
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
    manifests = [folder / MANIFEST, *sorted(folder.glob(f"step-*/{MANIFEST}"), reverse=True)]
    model = {}
    for manifest in manifests:
        if manifest.exists():
            with suppress(ValueError):
                model = read_json(manifest, {"model": OBJECT})["model"]
            break
    if "tied" in model:
        model["untied"] = not model["tied"]
    return {f.name: model[f.name] for f in fields(Config)
            if f.metadata["group"] == "" and type(model.get(f.name)) is f.type}


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
    """ValueError unless the flag `name` is a multiple of `part`. of: the flags that decide `part`,
    named in the message."""
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


def check_layout(cfg, world):
    """Settle the flags (resolve), then refuse a wrong layout for `world` processes. Returns the
    number of ranks. ValueError: flag, values, fix.

    Each process of a run calls this up to three times: start() (run/launch.py) and main()
    (train.py) each for a Config of their own; then check(), for main()'s Config, in which nothing
    is left to choose."""
    check_limits(cfg)
    resolve(cfg, world)
    return refuse_wrong_layout(cfg, world)


def resolve(cfg, world):
    """Fill in the flags that are left to choose. ValueError for a wrong --chunks only (chunks_of).
    If --dp does not divide the batch, no number of microbatches fits: resolve chooses one all the
    same, and refuse_wrong_layout then refuses the layout."""
    if cfg.dp == 0:
        model_ranks = cfg.tp * cfg.pp * cfg.cp
        if world == 1:  # one process starts as few ranks as the other flags allow
            cfg.dp = cfg.ep
        else:  # all processes take part
            cfg.dp = max(1, world // model_ranks)
    if cfg.microbatches == 0:
        cfg.microbatches = choose_microbatches(cfg)
    cfg.chunks = chunks_of(cfg.schedule, cfg.chunks)
    cfg.shard = cfg.shard or cfg.dp
    if cfg.arch != "gpt2":
        if cfg.head_dim * cfg.n_head == cfg.n_embd:
            cfg.head_dim = 0
        cfg.n_kv_head = cfg.n_kv_head or cfg.n_head
        cfg.n_hidden = cfg.n_hidden or math.ceil(8 * cfg.n_embd / 3 / 64) * 64


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
    require(not cfg.init_from or cfg.resume in ("no", "auto"), f"--init-from {cfg.init_from} and "
            f"--resume {cfg.resume}: take one of them")
    if cfg.watch:
        refuse_nothing_to_watch(cfg, ranks)
    return ranks


def refuse_wrong_sizes(cfg):
    """Heads, tokens and experts must divide over the ranks that split them; n_embd over the heads,
    and an MLP's hidden units over top_k experts."""
    refuse_wrong_model(cfg)
    heads = ["n_head"]
    if cfg.arch != "gpt2":
        heads.append("n_kv_head")
    for whole in heads:
        require_divides(cfg, "tp", whole=whole)
        if cfg.cp_attention == "all-to-all":  # gives each context rank 1/cp of the heads
            require_divides(cfg, "tp", "cp", whole=whole)
    # Under --cp a sequence is cut into 2 cp segments, two per rank; under --sp each of the cp x tp
    # ranks that share a sequence has one slice of it
    zigzag = 2 * cfg.cp if cfg.cp > 1 else 1
    slices = cfg.cp * cfg.tp if cfg.sp else 1
    require_multiple(cfg, "block_size", math.lcm(zigzag, slices), "cp", "tp", "sp")
    require(cfg.ep == 1 or cfg.experts, f"{given(cfg, 'ep')} is for --experts; say how many")
    require_divides(cfg, "shard", whole="dp")
    require_divides(cfg, "ep", whole="dp" if cfg.shard == cfg.dp else "shard")
    if cfg.experts:
        require_multiple(cfg, "experts", cfg.ep * cfg.tp, "ep", "tp")
        require(cfg.top_k <= cfg.experts, f"{given(cfg, 'top_k')} must be at most "
                f"{given(cfg, 'experts')}")
        if cfg.arch != "gpt2":  # an expert's hidden width: n_hidden / top_k
            require_divides(cfg, "top_k", whole="n_hidden")
        else:
            require(4 * cfg.n_embd % cfg.top_k == 0,  # an expert's hidden width: 4 n_embd / top_k
                    f"{given(cfg, 'top_k')} must divide 4 x {given(cfg, 'n_embd')}; try 1, 2 or 4")


def refuse_nothing_to_watch(cfg, ranks):
    """ValueError if the run has one rank, or if --watch neither stands alone nor names a rank or an
    axis of several ranks."""
    require(ranks > 1, f"{given(cfg, 'watch')}: one rank sends no messages; try --tp 2")
    sizes = {"dp": cfg.dp, "ep": cfg.ep, "pp": cfg.pp, "cp": cfg.cp, "tp": cfg.tp}
    axes = [axis for axis, size in sizes.items() if size > 1]
    require(cfg.watch in ("all", *axes, *map(str, range(ranks))), f"{given(cfg, 'watch')} must be "
            f"a rank, 0 to {ranks - 1}, or an axis of several ranks: {' '.join(axes)}; alone: all "
            "messages")


def refuse_wrong_model(cfg):
    """--n-head must divide --n-embd, unless the model has a width of heads. In a Llama --n-kv-head
    must divide --n-head, and rotary positions need heads of even width."""
    if not cfg.head_dim:
        require_divides(cfg, "n_head", whole="n_embd")
    if cfg.arch != "gpt2":
        require_divides(cfg, "n_kv_head", whole="n_head")
        width = cfg.head_dim or cfg.n_embd // cfg.n_head  # numbers of a head
        require(width % 2 == 0, f"{given(cfg, 'n_embd')} / {given(cfg, 'n_head')}: heads of "
                f"{width} numbers; rotary positions need an even number")
        require(not cfg.rope_scaling or is_scaling(cfg.rope_scaling),
                f"rope_scaling {cfg.rope_scaling} must be one number above 0, or four such as "
                "8,1,4,8192, the second below the third")
        return
    require(cfg.n_kv_head == 0, f"{given(cfg, 'n_kv_head')} is for --arch llama, qwen2 or qwen3")


def is_scaling(text):
    """Is the text FACTOR or FACTOR,LOW,HIGH,TOKENS: finite numbers above 0, with LOW below HIGH?"""
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        return False
    ordered = len(numbers) == 1 or (len(numbers) == 4 and numbers[1] < numbers[2])
    return ordered and all(0 < number < math.inf for number in numbers)


def refuse_wrong_pipeline(cfg):
    """Each stage needs a layer, each microbatch a sequence. A schedule in rounds, such as
    interleaved, also needs a multiple of --pp microbatches."""
    require_divides(cfg, "dp", whole="batch_size")
    require_divides(cfg, "dp", "microbatches", whole="batch_size")
    lists = make_schedule(cfg.schedule, cfg.pp, cfg.microbatches, cfg.chunks)
    # A fork's own schedule may lack an action
    validate(lists, placement(cfg.schedule, cfg.pp, cfg.chunks), cfg.microbatches)
    require(cfg.pp * cfg.chunks <= cfg.n_layer + 2, f"{given(cfg, 'pp', 'chunks')} must be at most "
            f"--n-layer + 2 = {cfg.n_layer + 2}: embedding, blocks, head")


# ---- this machine: files, devices ----


def choose_gpu_or_cpu(cfg, local, gpus, warn):
    """Fill in --device auto for `local` ranks on this machine, which has `gpus` GPUs. ValueError if
    --device cuda asks for more GPUs than there are. warn: print notes about a fall-back to the CPU
    and about slow choices."""
    require(cfg.device != "cuda" or gpus >= local,
            f"--device cuda: {local} processes here but {gpus} GPUs; use --device cpu")
    if cfg.device == "auto":
        if 0 < gpus < local and warn:
            note(f"{local} processes for {gpus} GPUs: falling back to the CPU")
        cfg.device = "cuda" if gpus >= local else "cpu"
    if cfg.device == "cuda" and warn:
        note_slow_choices(cfg, local, gpus)


def note_slow_choices(cfg, local, gpus):
    """Print a line if more replicas fit on this machine's GPUs, and a line if 16 bits would be
    faster."""
    nodes = cfg.dp * cfg.tp * cfg.pp * cfg.cp // local
    # The number of ranks is a multiple of ep tp pp cp = M, so the number of ranks on each of N
    # nodes is a multiple of M / gcd(M, N). --tp 3 on one node of 8 GPUs: 6 ranks fit
    multiple = cfg.ep * cfg.tp * cfg.pp * cfg.cp
    per_node = multiple // math.gcd(multiple, nodes)
    fits = gpus // per_node * per_node
    if local < fits:
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        replicas = nodes * fits // (cfg.tp * cfg.pp * cfg.cp)
        more = f"torchrun --nproc-per-node {fits}" if by_torchrun else f"--dp {replicas}"
        divides = cfg.batch_size % replicas == 0
        note(f"{local} of this machine's {gpus} GPUs in use; {more} takes "
             f"{'all' if fits == gpus else fits}"
             + ("" if divides else f", if {replicas} divides --batch-size"))
    if cfg.dtype == "float32":
        note("--dtype float32: activations and messages take twice the memory of --dtype bfloat16, "
             "and products at least twice the time")


def check_ring_kernels(cfg):
    """ValueError if ring attention's GPU kernels (kernel() in context_parallel.py) do not
    take these heads. A head's row is a multiple of 16 bytes: 8 numbers of 16 bits, or 4 of 32.
    Heads of 16 bits have up to 256 numbers. There is no kernel for 64 bits."""
    size = cfg.head_dim or cfg.n_embd // cfg.n_head
    fits = {8: False,  # bytes of a number: do the kernels take such heads?
            4: size % 4 == 0,
            2: size % 8 == 0 and size <= 256}
    require(fits[WIDTHS[cfg.dtype]], f"{given(cfg, 'cp')}, {given(cfg, 'dtype')}: heads have "
            f"{size} numbers, but the ring's GPU kernels take 8, 16, .. 256 numbers of 16 bits, or "
            "4, 8, 12, .. of 32 bits; try --cp-attention all-to-all")


def check(cfg, world):
    """check_layout, then the flags that depend on this machine. Returns the number of ranks."""
    import torch  # here, because run/launch.py imports this file and is not to wait for torch

    ranks = check_layout(cfg, world)
    local = launched().local_size if world > 1 else ranks
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Only a rank warns. (A test may check flags before it starts the ranks: then world < ranks.)
    is_first_rank = world == ranks and launched().rank == 0
    choose_gpu_or_cpu(cfg, local, gpus, warn=is_first_rank)
    cuda = cfg.device == "cuda"
    if cuda and cfg.cp > 1 and cfg.cp_attention == "ring":
        check_ring_kernels(cfg)
    if cfg.collectives == "auto":
        cfg.collectives = "native" if cuda else "ring"
    require(not cfg.watch or cfg.collectives == "ring", f"{given(cfg, 'watch')} does not see the "
            "messages of torch's own collectives; add --collectives ring")
    return ranks


def check_out(cfg):
    """Make --out. ValueError if no file can be written there."""
    path = Path(cfg.out, LOCK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        open(path, "ab").close()
    except OSError as error:
        raise ValueError(f"--out {path} cannot be written ({error.strerror})") from None


def checked(cfg, world, open_data):
    """check() and check_out(), then open_data(cfg, local rank), whose result is returned. What
    is wrong ends the process with one line."""
    try:
        check(cfg, world)
        check_out(cfg)
        return open_data(cfg, local_rank())
    except (ValueError, OSError) as error:
        fail(error)


def read_command_line(description, args=None):
    """Returns (Config, number of processes, number of ranks) of these arguments; None: those of
    this command line. Wrong flags end the process with one line (fail)."""
    cfg = parse(args, description)
    try:
        world = launched().size
        ranks = check_layout(cfg, world)
        return cfg, world, ranks
    except (ValueError, OSError) as error:
        fail(error)
