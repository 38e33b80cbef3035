"""Which layout? Lists layouts that fit, for a model and a cluster: first what people would run.

    python plan.py --model gpt3-175b --gpus 1024 --gpu a100-80
    python plan.py --model gpt3-175b --gpus 1024 --tp 8 --pp 8 --layout
    python plan.py --model llama-70b --gpus 64 --for megatron    the layout in Megatron-LM's flags
    python plan.py --published                published runs beside their predictions
    python plan.py --measure                  measures this node; prints the flags to plan with

Flags of the model and of the layout are train.py's. Layout flags that are given stay, the others
are searched. In planner/: bytes in memory.py, seconds in costs.py, devices in hardware.py, the
search in search.py, its order in habits.py, other programs' words in programs.py.
"""

import argparse
import gc
import json
from dataclasses import asdict, fields, replace

from planner.costs import LEFT_OUT, Costs, step_flops
from planner.habits import trade
from planner.hardware import DEVICES, MODELS, Device
from planner.memory import Job, Layout, memory, n_parameters
from planner.mixture import Mixture
from planner.programs import PROGRAMS, TRAIN_PY
from planner.search import NOT_SEARCHED, Search, as_config, departures, layout_of
from planner.table import table
from run import config
from run.command import Parser
from run.signals import end_quietly
from schedules import SCHEDULES
from sizes import LlamaConfig


def command(cfg, ranks, node):
    """The command that trains with a Config, to be typed on each node: the flags that differ from
    their defaults. HOST is the name of one of the nodes."""
    words = ["torchrun"]
    if ranks > node:
        words += ["--nnodes", str(ranks // node), "--nproc-per-node", str(node),
                  "--rdzv-backend c10d --rdzv-endpoint HOST:29500"]
    words.append("train.py")
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        if value != f.default:
            words.append("--" + f.name.replace("_", "-"))
            if value is not True:
                words.append(f"{value:g}" if type(value) is float else str(value))
    return " ".join(words)


def figures(job, layout, device):
    """The figures of a layout, for the table and --json (docs/which-layout.md lists the keys)."""
    costs = Costs(job, device)
    seconds = costs.step_time(layout)
    breakdown = costs.breakdown(layout)
    gpu_seconds = layout.ranks * seconds  # seconds of a step, added up over the GPUs
    cfg = as_config(job, layout._asdict())
    if SCHEDULES[layout.schedule].chunks:
        cfg.chunks = 0  # the schedule has its own number: the command need not name it
    return {**layout._asdict(), "step_s": seconds,
            "tflops_per_gpu": step_flops(job, layout.recompute) / gpu_seconds / 1e12,
            "mfu": step_flops(job) / gpu_seconds / 1e12 / device.tflops,
            "bubble": breakdown["bubble"] / seconds,
            "memory_gb": {kind: size / 1e9 for kind, size in memory(job, layout).items()},
            "time_s": breakdown, "command": command(cfg, layout.ranks, device.node)}


# ---- the command line ----

LIMITS = {  # (least, most): plan.py's own flags, and sizes of a model. Others: run/config.py
    (1, 10**6): "gpus top", (1, 10**18): "tokens", (1, 2**31): "vocab_size block_size expert_width",
    (0, 2**31): "shared_width head_width",
    (1, 1000): "n_layer", (0, 10**9): "latency launch",
    (1e-9, 10**9): "tflops gb hbm nvlink network node",
    (1e-9, 1): "f_products f_attention f_hbm f_nvlink f_network",
    (0, 1): "unhidden", (0, 0.9): "reserve"}
# The planner's median error on published runs to which its fractions were not fitted ("held out
# third" in planner/published.txt): python plan.py --published
BAND = 0.14
# Columns of every table. Other fields of Layout have a column if a row differs from one process
ALWAYS = ("dp", "tp", "pp", "zero", "microbatches")


def summary(rows, job, tokens, title):
    """A table as text. rows: figures() of layouts. tokens: number of tokens in the training."""
    steps = tokens / (job.batch_size * job.model.block_size)
    plain = Layout()._asdict()
    columns = [name for name in plain
               if name in ALWAYS or any(row[name] != plain[name] for row in rows)]
    lines = [[*columns, "step s", "TF/GPU", "MFU", "bubble", "GB", "days"]]
    for row in rows:
        lines.append([*(str(row[name]) for name in columns),
                      f"{row['step_s']:.4g}", f"{row['tflops_per_gpu']:.1f}", f"{row['mfu']:.1%}",
                      f"{row['bubble']:.1%}", f"{row['memory_gb']['total']:.1f}",
                      f"{steps * row['step_s'] / 86400:.4g}"])
    return table(title, lines)


def listed(values, digits):
    """The names and values of {name: value} as text, without values that round to 0."""
    return "  ".join(f"{name} {value:.{digits}f}" for name, value in values.items()
                     if round(abs(value), digits))


def described_layout(layout):
    """The fields of a layout that differ from those of one process: "dp 16 tp 4 zero 1"."""
    return " ".join(f"{name} {value}" for name, value in departures(layout).items())


def fell_out(search):
    """Lines of text: how many layouts are not shown, and why."""
    yield f"{search.slower:9,d}  slower, not worth their trouble, or pruned by a lower bound"
    if search.smallest:
        size, layout = search.smallest
        yield (f"{search.misfits:9,d}  do not fit into {usable(search.device)}; the smallest tried "
               f"has {size / 1e9:.1f}: {described_layout(layout)}")


def usable(device):
    """The memory that a plan may fill, in words: "74.4 GB (80 less --reserve 0.07)"."""
    return f"{device.usable:.1f} GB ({device.gb:g} less --reserve {device.reserve:g})"


def trades(job, rows):
    """For each row of figures(): what it gives and takes beside the first (habits.py)."""
    layouts = [Layout(*(row[name] for name in Layout._fields)) for row in rows]
    first = rows[0]
    return [trade(job, layout, layouts[0], 1 - row["step_s"] / first["step_s"],
                  row["memory_gb"]["total"] - first["memory_gb"]["total"])
            for layout, row in zip(layouts, rows, strict=True)]


def for_program(program, job, layout):
    """Lines of text: a layout in another program's words, and what they leave to say."""
    yield f"for {program.name} {program.version}, planned with train.py's seconds and bytes:"
    yield program.written(job, layout)
    for note in program.notes(job, layout):
        yield f"({note})"


MIXTURE = {  # sizes of planner/mixture.py
    "expert_width": "hidden units of an expert (else n-hidden / top-k)",
    "shared_width": "hidden units of an MLP beside the experts, for all tokens",
    "head_width": "width of a head (else n-embd / n-head)"}


def flags():
    parser = Parser(__doc__)
    unset = {"default": argparse.SUPPRESS}
    group = parser.add_argument_group("cluster")
    group.add_argument("--gpus", type=int, default=8, help="how many (8)")
    group.add_argument("--gpu", choices=DEVICES, default="a100-80", help="which (a100-80)")
    for f in fields(Device):
        group.add_argument("--" + f.name.replace("_", "-"), type=f.type, metavar="X",
                           help=f"replaces {f.name} of hardware.py", **unset)
    group = parser.add_argument_group("model; a step of 3 million tokens, like GPT-3's, if no "
                                      "--batch-size is given")
    group.add_argument("--model", choices=MODELS, default="gpt2", metavar="NAME",
                       help=", ".join(MODELS))
    config.add_flags(group, ("n_layer", "n_head", "n_embd", "n_kv_head", "n_hidden", "experts",
                             "top_k", "block_size", "batch_size", "grad_dtype"), **unset)
    group.add_argument("--vocab-size", type=int, help="tokens in the vocabulary", **unset)
    group = parser.add_argument_group("model, where train.py has no such Llama: for --for")
    for name, help in MIXTURE.items():
        group.add_argument("--" + name.replace("_", "-"), type=int, help=help, **unset)
    group.add_argument("--split-experts", action="store_true", help="tensor ranks split each "
                       "expert (else each expert is whole on one of ep x tp ranks)", **unset)
    group = parser.add_argument_group("layout: flags not given are searched")
    config.add_flags(group, {*Layout._fields} - {"sp", "recompute"}, **unset)
    config.add_flags(group, ("sp", "recompute"), action=argparse.BooleanOptionalAction, **unset)
    group = parser.add_argument_group("what to do")
    group.add_argument("--layout", action="store_true", help="explain this one layout, with "
                       "train.py's defaults for flags not given, beside the fastest")
    group.add_argument("--top", type=int, default=6, help="kinds of layouts to show, each by "
                       "its best (6)")
    group.add_argument("--for", choices=PROGRAMS, dest="program", help="print the first layout for "
                       "this program, and search what it can run")
    group.add_argument("--tokens", type=float, default=300e9,
                       help="for the days (300e9, like GPT-3)")
    group.add_argument("--json", action="store_true", help="figures for programs")
    group.add_argument("--measure", action="store_true", help="time products, attention, memory "
                       "and messages on this node, and print the flags of such a device")
    group.add_argument("--published", action="store_true", help="published runs, and predictions")
    return parser


def named_in(given, start):
    """A Device or a model with the fields that flags name."""
    return replace(start, **{f.name: given[f.name] for f in fields(start) if f.name in given})


def model_of_flags(name, given):
    """The model with this name, and with the sizes that flags give it."""
    n_experts = given.get("experts", 0)  # the flag has another name than the model's field
    model = MODELS[name]
    beyond = [flag for flag in (*MIXTURE, "split_experts", "n_kv_head", "n_hidden")
              if given.get(flag)]
    config.require(not beyond or isinstance(model, LlamaConfig), f"--model {name} is a GPT; "
                   f"--{' --'.join(beyond).replace('_', '-')} is for a Llama")
    sizes = {**given, "n_experts": n_experts}
    if given.get("expert_width"):
        config.require(n_experts, "--expert-width is for --experts; say how many")
        sizes["n_hidden"] = given["expert_width"] * given.get("top_k", model.top_k)
    if {*beyond} & {*MIXTURE, "split_experts"} - {"expert_width"}:
        model = Mixture(**asdict(model))
    return named_in(sizes, model)


def described(args):
    """(job, device, {field of Layout: value}) of the flags. The search keeps these values."""
    given = vars(args)
    model = model_of_flags(args.model, given)
    device = named_in(given, DEVICES[args.gpu])
    gpus = args.gpus
    sizes = {"expert_width": 1, "shared_width": 0, "head_width": 0}  # where no flag names them
    config.check_limits(argparse.Namespace(**{**sizes, **given, **vars(model), **vars(device)}),
                        LIMITS)
    config.require(gpus <= device.node or gpus % device.node == 0, f"--gpus {gpus} must be a "
                   f"multiple of --node {device.node}")
    # With the value 0 these flags leave the choice to train.py: here to the search
    open_if_0 = ("dp", "chunks", "microbatches")
    fixed = {name: given[name] for name in Layout._fields
             if name in given and (given[name] or name not in open_if_0)}
    actions = fixed.get("pp", 1) * fixed.get("microbatches", 1) * fixed.get("chunks", 1)
    config.require(actions <= 10**6, f"--pp x --microbatches x --chunks = {actions:,} must be at "
                   "most a million for a plan")
    job = Job(model, given.get("batch_size", max(1, 3 * 2**20 // model.block_size)),
              grad_width=4 if given.get("grad_dtype") == "float32" else 2)
    config.check_limits(as_config(job, fixed))
    device = replace(device, node=min(device.node, gpus))  # few GPUs are a small node
    return job, device, fixed


def searched(args):
    """(job, device, Search, figures of layouts). With --layout the layout of the flags comes first,
    then the fastest of all; else the best of those that have the flags' values."""
    job, device, fixed = described(args)
    program = PROGRAMS.get(args.program, TRAIN_PY)
    cfg = as_config(job, fixed)
    rows = []
    if args.layout:
        ranks = config.check_layout(cfg, args.gpus)  # also chooses what no flag named
        config.require(ranks == args.gpus, f"the layout has {ranks} ranks, not --gpus {args.gpus}")
        lacking = program.lacks(job, layout_of(cfg))
        config.require(not lacking, f"--for {args.program} has not {'; '.join(lacking)}")
        rows.append(figures(job, layout_of(cfg), device))
        fixed = {}  # for the search: the layout stands beside the fastest of all layouts
    search = Search(job, args.gpus, device, fixed, program)
    best = search.best(1) if args.layout else search.best(args.top, BAND)
    rows += [figures(job, layout, device) for _, layout in best]
    if not rows:
        config.check_layout(cfg, args.gpus)  # a ValueError says why train.py takes no such layout
        lacking = program.lacks(job, layout_of(cfg))
        config.require(not lacking, f"--for {args.program} has not {'; '.join(lacking)}")
        config.require(search.smallest, f"no layout with these flags has --gpus {args.gpus} ranks")
        raise ValueError("no layout fits: " + "; ".join(map(str.strip, fell_out(search))))
    return job, device, search, rows


def print_plan(args, job, device, search, rows):
    """Print the table; where the first row's bytes and seconds go; its command; what is not shown.
    """
    title = (f"{n_parameters(job.model) / 1e9:.4g} billion parameters, {job.batch_size} sequences "
             f"of {job.model.block_size} tokens a step, on {args.gpus} x {args.gpu}; days for "
             f"{args.tokens:g} tokens")
    print(summary(rows, job, args.tokens, title))
    if not args.layout:
        seconds, fastest = search.fastest
        near = sum(row["step_s"] <= seconds * (1 + BAND) for row in rows)
        print(f"the first {near}: within {BAND:.0%} of the fastest, this planner's own error; what "
              "people run first, one row per kind")
        print(f"the fastest, {seconds:.4g} s: {described_layout(fastest)}")
        print("what each row gives and takes; the first alone, the others beside the first:")
        for i, words in enumerate(trades(job, rows), 1):
            print(f"{i:4}  {words}")
    first = rows[0]
    print()
    if first["memory_gb"]["total"] > device.usable:
        print("the layout of the first row DOES NOT FIT:")
    print(f"GB on the fullest rank, of {usable(device)}: {listed(first['memory_gb'], 1)}")
    print(f"seconds: {listed(first['time_s'], 3)}  (tp, cp, ep, pp, dp: exposed messages of that "
          "axis)")
    if args.program:
        layout = Layout(*(first[name] for name in Layout._fields))
        print(*for_program(PROGRAMS[args.program], job, layout), sep="\n")
    else:
        print(first["command"])
        print(f"(train.py takes the vocabulary of its --data, not the planned "
              f"{job.model.vocab_size})")
    if args.layout and len(rows) > 1:
        slower = first["step_s"] / rows[1]["step_s"] - 1
        band = "within" if slower <= BAND else "outside"
        print(f"seconds of the fastest: {listed(rows[1]['time_s'], 3)}")
        print(f"{slower:.1%} slower: {band} the band of {BAND:.0%}, the planner's own median error")
    print("\nnot shown:")
    print(*fell_out(search), sep="\n")
    print(f"not searched unless named: {NOT_SEARCHED}")
    print(f"left out: {LEFT_OUT}")


def main():
    gc.disable()  # a plan makes many objects but no reference cycles: collecting only takes time
    parser = flags()
    args = parser.parse_args()
    try:
        if args.published:
            from planner.published import main as published_runs
            return published_runs()
        if args.measure:
            from planner.measure import main as measure
            return measure()
        job, device, search, rows = searched(args)
    except (ValueError, OSError) as error:
        parser.error(error)
    if args.json:
        for row, words in zip(rows, trades(job, rows), strict=True):
            row["trades"] = words
        shown = {"layouts": rows}
        if args.layout and len(rows) > 1:  # searched() puts the fastest behind the asked one
            shown = {"layouts": rows[:1], "best": rows[1]}
        print(json.dumps(shown))
        return
    print_plan(args, job, device, search, rows)


if __name__ == "__main__":
    end_quietly()
    main()
