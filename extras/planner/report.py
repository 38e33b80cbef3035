"""The text of a plan: table of layouts, trades of each row, parts of the first row."""

from dataclasses import fields

from extras.planner.calibrate import factor_of_runs
from extras.planner.costs import LEFT_OUT, Costs, step_flops
from extras.planner.habits import trade
from extras.planner.memory import Layout, memory, n_parameters
from extras.planner.mixture import Mixture
from extras.planner.programs import PROGRAMS
from extras.planner.search import NOT_SEARCHED, Search, as_config, departures
from extras.planner.table import table
from schedules import SCHEDULES

# The planner's median error on all published runs to which nothing was fitted, 141 of 46 sources.
# python -m extras.planner --published prints it, in the line "all held out"
BAND = 0.10
# Columns of every table. Another field of Layout has a column if its value in some row is not that
# of one process
ALWAYS = ("dp", "tp", "pp", "zero", "microbatches")


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
    is_mixture = isinstance(job.model, Mixture)  # train.py has no such model
    cfg = as_config(job, layout._asdict())
    if SCHEDULES[layout.schedule].chunks:
        cfg.chunks = 0  # the schedule has its own number: the command need not name it
    return {**layout._asdict(), "step_s": seconds,
            "tflops_per_gpu": step_flops(job, layout.recompute) / gpu_seconds / 1e12,
            "mfu": step_flops(job) / gpu_seconds / 1e12 / device.tflops,
            "bubble": breakdown["bubble"] / seconds,
            "memory_gb": {kind: size / 1e9 for kind, size in memory(job, layout).items()},
            "time_s": breakdown,
            "command": "" if is_mixture else command(cfg, layout.ranks, device.node)}


def layout_in(row):
    """The Layout of figures()."""
    return Layout(*(row[name] for name in Layout._fields))


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
    """The fields of a layout that differ from those of one process, like in --measured: "dp 16 tp 4
    sp zero 1"."""
    return " ".join(name if value is True else f"{name} {value}"
                    for name, value in departures(layout).items())


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
    """For each row of figures(): how it differs from the first, in words (habits.py)."""
    layouts = [layout_in(row) for row in rows]
    first = rows[0]
    return [trade(job, layout, layouts[0], 1 - row["step_s"] / first["step_s"],
                  row["memory_gb"]["total"] - first["memory_gb"]["total"])
            for layout, row in zip(layouts, rows, strict=True)]


def for_program(program, job, layout):
    """Lines of text: a layout in another program's words, notes for the user, and the features that
    the program lacks."""
    yield f"for {program.name} {program.version}, planned with train.py's seconds and bytes:"
    yield program.written(job, layout)
    for note in program.notes(job, layout):
        yield f"({note})"
    for text in program.cannot:
        yield f"(not searched: {program.name} cannot run {text})"


def calibration(args, job, device, runs):
    """Lines of text: own runs beside their predictions, and the factor of compute that follows."""
    for run in runs:
        predicted = Costs(job, device).step_time(run.layout)
        yield (f"measured {run.seconds:.4g} s, predicted {predicted:.4g} s "
               f"({run.seconds / predicted - 1:+.1%}): {described_layout(run.layout)}")
    yield (f"so compute takes {factor_of_runs(job, device, runs):.3g} times as long as on a "
           f"{args.gpu}; messages take as long")


def places(search, device, top, rows):
    """Where the rows were in the list before own runs changed the device. "new": that list had
    another layout of the row's kind, or none."""
    before = Search(search.job, search.gpus, device, search.fixed, search.program).best(top, BAND)
    number = {layout: str(i) for i, (_, layout) in enumerate(before, 1)}
    return " ".join(number.get(layout_in(row), "new") for row in rows)


def print_list(args, device, runs, search, rows):
    """Print the order of the table's rows, how each row differs from the first, and how own runs
    moved the rows."""
    job = search.job
    seconds, fastest = search.fastest
    near = sum(row["step_s"] <= seconds * (1 + BAND) for row in rows)
    print(f"within {BAND:.0%} of the fastest (the planner's own median error): the first {near}; "
          "order: time x price (extras/planner/habits.py); one row per kind of layout")
    print(f"the fastest, {seconds:.4g} s: {described_layout(fastest)}")
    print("the first row: what makes it hard to run; the others, compared with the first:")
    for i, words in enumerate(trades(job, rows), 1):
        print(f"{i:4}  {words}")
    other = search.at_round_batch()
    if other:
        batch, at_batch, layout = other
        faster = seconds / job.batch_size / (at_batch / batch) - 1  # for each sequence
        if faster > BAND:
            print(f"--batch-size {batch} would be {faster:.0%} faster: {described_layout(layout)}")
    if runs:
        print(f"the rows' places before own runs: {places(search, device, args.top, rows)}")


def print_first(args, job, device, first):
    """Print the first row's bytes and seconds by part; then its command or, with --for, the layout
    in the words of the program."""
    print()
    if first["memory_gb"]["total"] > device.usable:
        print("the layout of the first row DOES NOT FIT:")
    print(f"GB on the fullest rank, of {usable(device)}: {listed(first['memory_gb'], 1)}")
    print(f"seconds: {listed(first['time_s'], 3)}  (tp, cp, ep, pp, dp: exposed messages of that "
          "axis)")
    if args.program:
        print(*for_program(PROGRAMS[args.program], job, layout_in(first)), sep="\n")
    elif isinstance(job.model, Mixture):
        print("(train.py has no such model: --for writes the layout for another program)")
    else:
        print(first["command"])
        print(f"(train.py takes the vocabulary of its --data, not the planned "
              f"{job.model.vocab_size})")


def print_plan(args, device, runs, search, rows):
    """Print the table; the first row's bytes and seconds by part; its command; the numbers of
    layouts not shown. device: before own runs changed its speed; search.device: after."""
    job = search.job
    title = (f"{n_parameters(job.model) / 1e9:.4g} billion parameters, {job.batch_size} sequences "
             f"of {job.model.block_size} tokens a step, on {args.gpus} x {args.gpu}; days for "
             f"{args.tokens:g} tokens")
    print(summary(rows, job, args.tokens, title))
    if runs:
        print(*calibration(args, job, device, runs), sep="\n")
    if not args.layout:
        print_list(args, device, runs, search, rows)
    print_first(args, job, search.device, rows[0])
    if args.layout and len(rows) > 1:
        slower = rows[0]["step_s"] / rows[1]["step_s"] - 1
        word = "slower" if slower >= 0 else "faster"  # if it does not fit or is not searched
        band = "within" if abs(slower) <= BAND else "outside"
        print(f"seconds of the fastest: {listed(rows[1]['time_s'], 3)}")
        print(f"{abs(slower):.1%} {word} than the fastest that fits: {band} the band of "
              f"{BAND:.0%}, the planner's own median error")
    print("\nnot shown:")
    print(*fell_out(search), sep="\n")
    print(f"not searched unless named: {NOT_SEARCHED}")
    print(f"left out: {LEFT_OUT}")
