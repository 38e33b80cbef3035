"""Which layout? Lists layouts that fit, for a model and a cluster: fast and easy to run ones first.

    python -m extras.planner --model gpt3-175b --gpus 1024 --gpu a100-80
        --model gpt3-175b --gpus 1024 --tp 8 --pp 8 --layout    this one layout
        --model llama-70b --gpus 64 --for megatron              in Megatron-LM's flags
        --model gpt2 --gpus 8 --measured "SECONDS s: dp 8"      with the speed of your run
        --published                                             published runs, and predictions
        --measure               measures this node; prints the flags to plan with

Flags of the layout are train.py's, and so are most flags of the model. The planner adds --model,
--vocab-size, the flags that --help lists under "experts and heads of a Llama", --no-sp and
--no-recompute. A layout flag that is given stays; the planner searches values for the others. Bytes
are in memory.py, seconds in costs.py, devices in hardware.py, the search in search.py, the order
of the list in habits.py, other programs' words in programs.py, the text in report.py.
"""

import argparse
import gc
import json
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path

from extras.planner import memory
from extras.planner.calibrate import (
    Measured,
    chosen,
    factor_of_runs,
    measured_in,
    seconds_in,
    slower,
)
from extras.planner.folder import model_of_folder
from extras.planner.hardware import DEVICES, MODELS, Device
from extras.planner.memory import Job, Layout
from extras.planner.mixture import Mixture
from extras.planner.programs import PROGRAMS, TRAIN_PY, lacks_stage
from extras.planner.report import (
    BAND,
    described_layout,
    fell_out,
    figures,
    print_plan,
    trades,
    usable,
)
from extras.planner.search import Search, as_config, layout_of, require_few_actions, settle
from run import config
from run.config import Parser
from run.signals import end_quietly
from sizes import LlamaConfig, bytes_per_parameter

LIMITS = {  # (least, most): the planner's own flags, and sizes of a model. Others: run/config.py
    (1, 10**6): "gpus top", (1, 10**18): "tokens", (1, 2**31): "vocab_size block_size expert_width",
    (0, 2**31): "shared_width head_width",
    (1, 1000): "n_layer", (0, 10**9): "latency launch",
    (1e-9, 10**9): "tflops gb hbm nvlink network node",
    (1e-9, 1): "f_products f_attention f_hbm f_nvlink f_network",
    (0, 1): "unhidden", (0, 0.9): "reserve"}
MOST_GPUS = 2**15  # that are tried if no layout fits
# Sizes that train.py has no flags for. expert_width sets n_hidden; the other two make the model a
# Mixture (extras/planner/mixture.py)
LLAMA_SIZES = {
    "expert_width": "hidden units of an expert (else n-hidden / top-k)",
    "shared_width": "hidden units of an MLP beside the experts, for all tokens",
    "head_width": "width of a head (else n-embd / n-head)"}


def flags():
    parser = Parser(__doc__)
    unset = {"default": argparse.SUPPRESS}  # a flag that is not given is no attribute of args
    group = parser.add_argument_group("cluster")
    group.add_argument("--gpus", type=int, default=8, help="how many (8)")
    group.add_argument("--gpu", type=str.lower, choices=DEVICES, default="a100-80",
                       help="which (a100-80)")
    for f in fields(Device):
        group.add_argument("--" + f.name.replace("_", "-"), type=f.type, metavar="X",
                           help=f"replaces {f.name} of hardware.py", **unset)
    group = parser.add_argument_group("model; a step of 3 million tokens, like GPT-3's, if no "
                                      "--batch-size is given")
    group.add_argument("--model", default="gpt2", metavar="NAME", help="a folder with the "
                       "config.json of a GPT-2, Llama, Qwen or Mixtral; or " + ", ".join(MODELS))
    config.add_flags(group, ("n_layer", "n_head", "n_embd", "n_kv_head", "n_hidden", "experts",
                             "top_k", "block_size", "batch_size", "grad_dtype"), **unset)
    group.add_argument("--vocab-size", type=int, help="tokens in the vocabulary", **unset)
    group = parser.add_argument_group("experts and heads of a Llama (--shared-width, --head-width "
                                      "and --split-experts: no such model in train.py; use --for)")
    for name, help in LLAMA_SIZES.items():
        group.add_argument("--" + name.replace("_", "-"), type=int, help=help, **unset)
    group.add_argument("--split-experts", action="store_true", help="tensor ranks split each "
                       "expert (else each expert is whole on one of ep x tp ranks)", **unset)
    group = parser.add_argument_group("layout: flags not given are searched")
    config.add_flags(group, {*Layout._fields} - {"sp", "recompute"}, **unset)
    config.add_flags(group, ("sp", "recompute"), action=argparse.BooleanOptionalAction, **unset)
    group = parser.add_argument_group("what to do")
    group.add_argument("--layout", action="store_true", help="explain this one layout, with "
                       "train.py's defaults for flags not given, beside the fastest")
    group.add_argument("--top", type=int, default=6, help="kinds of layouts to show, "
                       "the best layout of each (6)")
    group.add_argument("--for", choices=PROGRAMS, dest="program", help="search only layouts that "
                       "this program can run, and print the first one in its words")
    group.add_argument("--measured", action="append", default=[], metavar="RUN",
                       help='a run of your own, such as "48.2 s: dp 8 tp 4 sp": scales the speed '
                       "of compute until the prediction equals this time; with several runs the "
                       "median of their factors counts")
    group.add_argument("--calibrate", metavar="FILE", help="calibrate with one run of train.py: "
                       "seconds from its --metrics file, layout from the layout flags (which then "
                       "do not limit the search)")
    group.add_argument("--tokens", type=float, default=300e9,
                       help="tokens of the training, for the column of days (300e9, like GPT-3)")
    group.add_argument("--json", action="store_true", help="print figures for programs")
    group.add_argument("--measure", action="store_true", help="time products, attention, memory "
                       "and messages on this node, and print the flags of such a device")
    group.add_argument("--published", action="store_true", help="print published runs beside their "
                       "predictions")
    return parser


def named_in(given, start):
    """`start`, a Device or a model, with the values of those flags that have the names of its
    fields."""
    return replace(start, **{f.name: given[f.name] for f in fields(start) if f.name in given})


def model_named(name):
    """The model of --model: of a name in hardware.py, or of a folder's config.json."""
    if name in MODELS:
        return MODELS[name]
    config.require(Path(name).is_dir(), f"--model {name} is neither a folder nor one of "
                   f"{', '.join(MODELS)}")
    return model_of_folder(name)


def model_of_flags(name, given):
    """The model of this name, with the sizes that flags give."""
    model = model_named(name)
    llama_only = [flag for flag in (*LLAMA_SIZES, "split_experts", "n_kv_head", "n_hidden")
                  if given.get(flag)]
    config.require(not llama_only or isinstance(model, LlamaConfig), f"--model {name} is a GPT; "
                   f"--{' --'.join(llama_only).replace('_', '-')} is for a Llama")
    n_experts = given.get("experts", model.n_experts)  # the flag has another name than the field
    sizes = {**given, "n_experts": n_experts}
    with_experts = [flag for flag in ("expert_width", "shared_width", "split_experts")
                    if given.get(flag)]
    config.require(n_experts or not with_experts,
                   f"--{' --'.join(with_experts).replace('_', '-')} is for --experts; say how many")
    top_k = given.get("top_k", model.top_k)
    if given.get("expert_width"):
        sizes["n_hidden"] = given["expert_width"] * top_k
    elif model.n_experts and isinstance(model, LlamaConfig) and "n_hidden" not in given:
        # Other experts per token leave the experts of a named mixture as wide as they are
        sizes["n_hidden"] = model.n_hidden // model.top_k * top_k
    # Only a Mixture has fields for these three flags. (--expert-width needs none: it has become
    # n_hidden, a field of every Llama)
    if given.get("shared_width") or given.get("head_width") or given.get("split_experts"):
        model = Mixture(**asdict(model))
    return named_in(sizes, model)


def described(args):
    """(job, device, {field of Layout: value}) of the flags. The search keeps these values."""
    given = vars(args)
    model = model_of_flags(args.model, given)
    device = named_in(given, DEVICES[args.gpu])
    gpus = args.gpus
    # check_limits reads every name in LIMITS, so a flag that is not given needs a value, too: one
    # within its limits
    sizes = {"expert_width": 1, "shared_width": 0, "head_width": 0}
    config.check_limits(argparse.Namespace(**{**sizes, **given, **vars(model), **vars(device)}),
                        LIMITS)
    config.require(gpus <= device.node or gpus % device.node == 0, f"--gpus {gpus} must be a "
                   f"multiple of --node {device.node}")
    # With the value 0 these flags leave the choice to train.py: here to the search
    open_if_0 = ("dp", "chunks", "microbatches")
    fixed = {name: given[name] for name in Layout._fields
             if name in given and (given[name] or name not in open_if_0)}
    require_few_actions(fixed)
    job = Job(model, given.get("batch_size", max(1, 3 * 2**20 // model.block_size)),
              grad_width=4 if given.get("grad_dtype") == "float32" else 2)
    config.check_limits(as_config(job, fixed))
    device = replace(device, node=min(device.node, gpus))  # few GPUs: a small node
    return job, device, fixed


def own_runs(args, job, fixed):
    """[Measured] of the flags --measured and --calibrate."""
    runs = [measured_in(text, job, args.gpus) for text in args.measured]
    if args.calibrate:
        runs.append(Measured(seconds_in(args.calibrate), chosen(job, args.gpus, fixed)))
    return runs


def require_has(args, job, cfg):
    """ValueError if the program of --for cannot run the layout of a Config."""
    program = PROGRAMS.get(args.program, TRAIN_PY)
    layout = layout_of(cfg)
    lacking = program.lacks(job, layout)
    if args.layout or "zero" in vars(args):  # else the search chooses the ZeRO stage
        lacking = lacking + lacks_stage(program, layout)
    config.require(not lacking, f"--for {args.program} cannot run {'; '.join(lacking)}")


def least_bytes(job):
    """Bytes of a job's weights, gradients and optimizer on all ranks together, at least: as if no
    rank held what another holds."""
    return memory.n_parameters(job.model) * sum(
        bytes_per_parameter(0, 1, job.width, job.grad_width, job.moments))


def gpus_that_would_do(args):
    """"; --gpus N would do", for the least N of 2, 4, 8, ... times --gpus on which a layout with
    these flags fits; "" if that is more than MOST_GPUS."""
    gpus = 2 * args.gpus
    while gpus <= MOST_GPUS:
        with suppress(ValueError):  # no multiple of a node
            job, device, fixed = described(argparse.Namespace(**{**vars(args), "gpus": gpus}))
            search = Search(job, gpus, device, fixed, PROGRAMS.get(args.program, TRAIN_PY))
            if least_bytes(job) <= device.usable * 1e9 * gpus and search.best(1):
                return f"; --gpus {gpus} would do"
        gpus *= 2
    return ""


def searched(args):
    """(device before own runs changed its speed, own runs, Search on the changed device, figures of
    layouts). With --layout the figures are those of the flags' layout, then those of the fastest of
    all layouts. Else they are those of the best layouts: with --calibrate of all layouts, without
    it of those that have the flags' values."""
    job, device, fixed = described(args)
    cfg = as_config(job, fixed)
    rows = []
    runs = own_runs(args, job, fixed)
    if args.calibrate:
        fixed = {}  # the flags described the run that was measured, not the layouts to search
    calibrated = slower(device, factor_of_runs(job, device, runs)) if runs else device
    if args.layout:
        settle(cfg, args.gpus)
        require_has(args, job, cfg)
        rows.append(figures(job, layout_of(cfg), calibrated))
        fixed = {}  # for the search: the layout stands beside the fastest of all layouts
    states = least_bytes(job) / args.gpus / 1e9
    if states > device.usable and not args.layout:  # no need to try
        raise ValueError(f"no layout fits: weights, gradients and optimizer alone take {states:.1f}"
                         f" GB of each GPU, which has {usable(device)}{gpus_that_would_do(args)}")
    search = Search(job, args.gpus, calibrated, fixed, PROGRAMS.get(args.program, TRAIN_PY))
    best = search.best(1) if args.layout else search.best(args.top, BAND)
    rows += [figures(job, layout, calibrated) for _, layout in best]
    if not rows and search.smallest is None:  # no candidate at all: which flag is to blame?
        batch = job.batch_size
        if other := search.at_round_batch():
            near, _, layout = other
            raise ValueError(f"no layout of --gpus {args.gpus} divides --batch-size {batch}; "
                             f"--batch-size {near} would allow {described_layout(layout)}")
        if not {"dp", "microbatches"} & {*fixed}:  # do not blame the --dp that train.py chooses
            cfg.batch_size = args.gpus
        settle(cfg, args.gpus)  # ValueError if train.py takes no such layout
        require_has(args, job, cfg)
        raise ValueError(f"no layout with these flags has --gpus {args.gpus} ranks and divides "
                         f"--batch-size {batch}")
    if not rows:
        *_, misfits = fell_out(search)
        raise ValueError(f"no layout fits: {' '.join(misfits.split())}{gpus_that_would_do(args)}")
    return device, runs, search, rows


def main():
    gc.disable()  # a plan makes many objects but no reference cycles: collecting only takes time
    parser = flags()
    args = parser.parse_args()
    if args.published:
        from extras.planner.published import main as published_runs
        return published_runs()
    if args.measure:
        from extras.planner.measure import main as measure
        return measure()
    try:
        device, runs, search, rows = searched(args)
    except (ValueError, OSError) as error:
        parser.error(error)
    if args.json:
        for row, words in zip(rows, trades(search.job, rows), strict=True):
            row["trades"] = words
        shown = {"layouts": rows}
        if args.layout and len(rows) > 1:  # searched() puts the flags' layout first
            shown = {"layouts": rows[:1], "best": rows[1]}
        print(json.dumps(shown))
        return
    print_plan(args, device, runs, search, rows)


if __name__ == "__main__":
    end_quietly()
    main()
