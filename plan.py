"""Which layout? Lists the fastest layouts that fit, for a model and a cluster, with their memory.

    python plan.py --model gpt3-175b --gpus 1024 --gpu a100-80
    python plan.py --model gpt3-175b --gpus 1024 --tp 8 --pp 8 --layout
    python plan.py --published                published runs beside their predictions
    python plan.py --here --tp 2 --pp 2       predicts train.py on this machine, and runs it

Flags are train.py's: those given stay, the rest is searched. In planner/: bytes in memory.py,
seconds in costs.py, devices in hardware.py, the search in search.py.
"""

import argparse
import json
import tempfile
from dataclasses import fields, replace

from planner import draw
from planner.costs import step_flops, step_time, time_by_part
from planner.hardware import DEVICES, MODELS, Device
from planner.memory import Job, Layout, memory, n_parameters
from planner.search import Search, as_config
from run import config
from run.signals import end_quietly
from sizes import MOMENTS, WIDTHS, GPTConfig


def planned(cfg):
    """The (Job, Layout) of a Config."""
    from data.batches import Data  # here, as Data imports torch: a plan without --here does not

    experts = {"n_experts": cfg.experts, "top_k": cfg.top_k} if cfg.experts else {}
    model = GPTConfig(Data(cfg).vocab_size, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd,
                      **experts)
    names = {name: getattr(cfg, name) for name in Layout._fields}
    layout = Layout(**{**names, "recompute": "full" if cfg.recompute else "none"})
    width = WIDTHS[cfg.dtype]
    return Job(model, cfg.batch_size, "flash", width, cfg.grad_dtype != "same",
               len(MOMENTS[cfg.optimizer])), layout


def command(cfg, ranks, node):
    """The command of a Config, on each node: the flags that differ from their defaults."""
    nodes = ""
    if ranks > node:  # HOST: one of them
        nodes = (f" --nnodes {ranks // node} --nproc-per-node {node} --rdzv-backend c10d "
                 "--rdzv-endpoint HOST:29500")
    words = [f"torchrun{nodes} train.py"]
    for f in fields(cfg):
        if (value := getattr(cfg, f.name)) != f.default:
            words += ["--" + f.name.replace("_", "-")] + [str(value)] * (value is not True)
    return " ".join(words)


def figures(job, layout, device):
    """The figures of a layout, for the table and --json."""
    seconds, parts = step_time(job, layout, device), time_by_part(job, layout, device)
    per_gpu = 1e12 * layout.ranks * seconds
    cfg = as_config(job, layout._asdict())
    if layout.schedule != "interleaved":
        cfg.chunks = 0  # follows from the schedule
    return {**layout._asdict(), "step_s": seconds,
            "tflops_per_gpu": step_flops(job, layout.recompute) / per_gpu,
            "mfu": step_flops(job) / per_gpu / device.tflops,
            "bubble": parts["bubble"] / seconds,
            "memory_gb": {part: size / 1e9 for part, size in memory(job, layout).items()},
            "time_s": parts,
            "command": command(cfg, layout.ranks, device.node)}


# ---- the command line ----

SMALL = {"n_layer": 6, "n_head": 8, "n_embd": 256, "block_size": 256, "batch_size": 8}
HERE = [  # --here runs these if no layout is named
    {}, {"recompute": True}, {"dp": 2}, {"dp": 2, "zero": 3, "microbatches": 4}, {"tp": 2},
    {"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2}, {"pp": 2, "recompute": True},
    {"pp": 2, "microbatches": 1}, {"dp": 4}, {"tp": 4}, {"pp": 4},
    {"pp": 4, "schedule": "interleaved"}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2},
    {"dp": 2, "pp": 2, "tp": 2}, {"tp": 8}]
COLUMNS = ("dp", "tp", "pp", "cp", "ep", "sp", "zero", "schedule", "chunks", "microbatches",
           "recompute")
LEFT_OUT = """not searched unless named: tp beyond a node, cp with fewer than 512 tokens on a rank,
gpipe, more than 16 sequences in a microbatch
left out: stragglers, other traffic on the network, unevenly chosen experts, failures, shapes that
kernels dislike, memory of CUDA and NCCL, fragmentation; a group is one ring, so one port of a node
carries all that leaves it; attention is fused and the vocabulary that of --data in train.py"""


def summary(rows, job, tokens, title):
    """A table as text. tokens: how many the whole training takes."""
    steps = tokens / (job.batch_size * job.model.block_size)
    lines = [[*COLUMNS, "step s", "TF/GPU", "MFU", "bubble", "GB", "days"]]
    for row in rows:
        lines.append([{True: "yes", False: "-"}[row[c]] if c == "sp" else str(row[c])
                      for c in COLUMNS] + [
            f"{row['step_s']:.4g}", f"{row['tflops_per_gpu']:.1f}", f"{row['mfu']:.1%}",
            f"{row['bubble']:.1%}", f"{row['memory_gb']['total']:.1f}",
            f"{steps * row['step_s'] / 86400:.4g}"])
    return draw.table(title, lines)


def listed(values, digits):
    """Names and values, without those that round to 0."""
    return "  ".join(f"{name} {value:.{digits}f}" for name, value in values.items()
                     if round(abs(value), digits))


def explain(row, device):
    """Lines of text about one layout."""
    if row["memory_gb"]["total"] > device.gb:
        yield "it DOES NOT FIT:"
    yield f"GB on the fullest rank, of {device.gb:g}: {listed(row['memory_gb'], 1)}"
    yield (f"seconds: {listed(row['time_s'], 3)}  (tp, cp, ep, pp, dp: exposed messages of that "
           "axis)")
    yield row["command"]


def why(ours, other):
    """The parts of a step in which a layout is faster than another."""
    less = {part: other["time_s"][part] - ours["time_s"][part] for part in ours["time_s"]}
    return (f"{other['step_s'] / ours['step_s']:.3f} times as fast; seconds less of: "
            + listed(less, 3))


def fell_out(search):
    """Lines of text: layouts that were not shown."""
    yield f"{search.slower:9,d}  slower, or pruned by the lower bound"
    if search.smallest:
        size, layout = search.smallest
        yield (f"{search.misfits:9,d}  do not fit into {search.device.gb:g} GB; the smallest tried "
               f"has {size / 1e9:.1f}: dp {layout.dp} tp {layout.tp} pp {layout.pp} cp {layout.cp} "
               f"zero {layout.zero} recompute {layout.recompute}")


def flags():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"plan.py: {message}\n")
    named = {"default": argparse.SUPPRESS}
    group = parser.add_argument_group("cluster")
    group.add_argument("--gpus", type=int, default=8, help="how many (8)")
    group.add_argument("--gpu", choices=DEVICES, default="a100-80", help="which (a100-80)")
    for f in fields(Device):
        group.add_argument("--" + f.name.replace("_", "-"), type=f.type, metavar="X",
                           help=f"replaces {f.name} of hardware.py")
    group = parser.add_argument_group("model")
    group.add_argument("--model", choices=MODELS, default="gpt2", metavar="NAME",
                       help=", ".join(MODELS))
    config.add_flags(group, ("n_layer", "n_head", "n_embd", "experts", "top_k", "block_size",
                             "grad_dtype"), **named)
    group.add_argument("--vocab-size", type=int, help="tokens in the vocabulary", **named)
    group.add_argument("--attention", choices=("flash", "naive"), default="flash", help="naive: "
                       "as in 2021, S x S scores are written to memory, and there is dropout")
    group.add_argument("--batch-size", type=int, help="sequences a step (3 million "
                       "tokens, as GPT-3)")
    group = parser.add_argument_group("layout: flags not given are searched")
    config.add_flags(group, {*Layout._fields} - {"recompute", "sp"}, **named)
    group.add_argument("--sp", action=argparse.BooleanOptionalAction, help="tensor-parallel ranks "
                       "split the tokens between layers, too", **named)
    group.add_argument("--recompute", choices=("none", "full", "selective"), nargs="?",
                       const="full", help="selective: the S x S scores only", **named)
    group = parser.add_argument_group("what to do")
    group.add_argument("--layout", action="store_true", help="explain this one layout, with "
                       "train.py's defaults for flags not given, and the best layout beside it")
    group.add_argument("--top", type=int, default=6, help="ways to split the GPUs to show, each "
                       "with its best schedule, ZeRO stage, ... (6)")
    group.add_argument("--tokens", type=float, default=300e9, help="for the days (300e9, as GPT-3)")
    group.add_argument("--json", action="store_true", help="figures for programs")
    group.add_argument("--here", action="store_true", help="measure this machine, predict train.py "
                       "on it, and run it; a dozen layouts if none is named")
    group.add_argument("--published", action="store_true", help="published runs, and predictions")
    return parser


def described(args):
    """(job, device, fixed) of the flags."""
    given = vars(args)
    names = {"vocab_size", "n_layer", "n_head", "n_embd", "top_k", "block_size"} & given.keys()
    model = replace(MODELS[args.model], n_experts=given.get("experts", 0),
                    **{name: given[name] for name in names})
    device = replace(DEVICES[args.gpu], **{f.name: given[f.name] for f in fields(Device)
                                           if given[f.name] is not None})
    for name, value in vars(device).items():
        config.require(value > 0 or name in ("latency", "late", "launch", "cores"),
                       f"--{name.replace('_', '-')} {value} must be above 0")
    config.require(args.gpus <= device.node or args.gpus % device.node == 0, f"--gpus {args.gpus} "
                   f"must be a multiple of --node {device.node}")
    device = replace(device, node=min(device.node, args.gpus))
    batch = args.batch_size
    if batch is None:
        batch = max(1, 3 * 2**20 // max(1, model.block_size))
    fixed = {name: given[name] for name in Layout._fields if name in given}
    for name in ("dp", "chunks", "microbatches"):
        if fixed.get(name) == 0:  # chosen
            del fixed[name]
    wide = given.get("grad_dtype") == "float32"
    return Job(model, batch, args.attention, wide=wide), device, fixed


def run_here(args):
    """Runs the given layout, with train.py's defaults for the rest; or those of HERE."""
    from planner.here import here
    from train import Trainer

    named = {f.name: getattr(args, f.name) for f in fields(config.Config) if f.name in args}
    named = {name: value for name, value in named.items() if value is not None}  # --batch-size
    if named:
        choices = [{**named, "recompute": named.get("recompute") == "full"}]
    else:
        choices = [{**SMALL, **layout} for layout in HERE]
    cases = {}
    for choice in choices:
        cfg = config.Config(**choice, device="cpu", out=tempfile.gettempdir())
        name = " ".join(f"{name} {value}" for name, value in choice.items()
                        if name in Layout._fields and value is not False)
        config.check(cfg, 1)
        cases[name or "one process"] = cfg, *planned(cfg)
    here(cases, Trainer)


def searched(args):
    """(job, device, search, figures of layouts): the named one first (--layout), then the best."""
    for name in ("gpus", "top"):
        config.require(getattr(args, name) >= 1, f"--{name} {getattr(args, name)} must be at "
                       "least 1")
    job, device, fixed = described(args)
    config.check_limits(as_config(job, fixed))
    rows = []
    if args.layout:
        cfg = as_config(job, fixed)
        ranks = config.check_layout(cfg, args.gpus)
        config.require(ranks == args.gpus, f"the layout has {ranks} ranks, not --gpus {args.gpus}")
        values = {name: getattr(cfg, name) for name in Layout._fields}
        layout = Layout(**{**values, "recompute": fixed.get("recompute", "none")})
        rows, fixed = [figures(job, layout, device)], {}
    search = Search(job, args.gpus, device, fixed)
    rows += [figures(job, layout, device) for _, layout in search.best(
        1 if args.layout else args.top)]
    if not rows:  # a ValueError says why if train.py takes no such layout
        config.check_layout(as_config(job, fixed), args.gpus)
        config.require(search.smallest, f"no layout with these flags has --gpus {args.gpus} ranks")
        raise ValueError("no layout fits: " + "; ".join(map(str.strip, fell_out(search))))
    return job, device, search, rows


def main():
    parser = flags()
    args = parser.parse_args()
    try:
        if args.published:
            from planner.published import main as published_runs
            return published_runs()
        if args.here:
            return run_here(args)
        job, device, search, rows = searched(args)
    except (ValueError, OSError) as error:
        parser.error(error)
    if args.json:
        more = {"best": rows.pop()} if args.layout and len(rows) > 1 else {}
        print(json.dumps({"layouts": rows, **more}))
        return
    print(summary(rows, job, args.tokens, f"{n_parameters(job.model) / 1e9:.4g} billion parameters,"
                  f" {job.batch_size} sequences of {job.model.block_size} tokens a step, on "
                  f"{args.gpus} x {args.gpu}; days for {args.tokens:g} tokens"))
    print("", *explain(rows[0], device), sep="\n")
    if args.layout and len(rows) > 1:
        print("the best of all is", why(rows[1], rows[0]))
    print("", "not shown:", *fell_out(search), LEFT_OUT, sep="\n")


if __name__ == "__main__":
    end_quietly()
    main()
