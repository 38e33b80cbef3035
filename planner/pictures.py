"""What decides about a layout, in five pictures: tables for a terminal, SVG for a page. The figures
come out of the functions that train.py runs; no formula stands here a second time.

    memory-wall   bytes of training a model, against the memory of one device
    ring          what an all-reduce sends, and how long it takes, against the number of ranks
    zero          model states per rank under each ZeRO stage, against the number of ranks
    bubble        the share of a step that pipeline ranks wait, against the number of microbatches
    grid          which rank stands where on the mesh, and the groups along each axis

    python -m planner.pictures                     all five tables
    python -m planner.pictures bubble --pp 4       one of them
    python -m planner.pictures --svg pictures      the tables, and SVG files in that folder
    python -m planner.pictures --svg pictures --metrics one.jsonl eight.jsonl    curves of runs
"""

import argparse
import json
import math
from functools import partial
from pathlib import Path

import torch

from collectives import all_reduce, parameter_server_all_reduce, sequential_all_reduce
from group import Group, Work
from mesh import Mesh, grid, lay_out
from planner import costs
from planner.draw import bars_svg, curves_svg, grid_svg, schedule_svg, table
from planner.hardware import DEVICES
from planner.memory import memory
from run.signals import end_quietly
from schedules import SCHEDULES, closed_form, make_schedule, placement, simulate
from sizes import bytes_per_parameter

# Each picture is a function that returns its (text, SVG).


def memory_wall():
    """Model states on a single device, and how many devices have that much memory."""
    names, sizes = ("weights", "gradients", "optimizer"), (7, 70)  # billions of parameters
    bars = {f"{size} billion": {part: size * per_parameter for part, per_parameter in zip(
        names, bytes_per_parameter(0, 1), strict=True)} for size in sizes}  # GB
    totals = {name: sum(parts.values()) for name, parts in bars.items()}
    states = [["parameters", *names, "in all"]]
    states += [[name, *(f"{gb:,.0f} GB" for gb in (*parts.values(), totals[name]))]
               for name, parts in bars.items()]
    devices = [["device", "memory", *(f"for {name}" for name in totals)]]
    devices += [[name, f"{device.gb:g} GB",
                 *(f"{math.ceil(gb / device.gb)}" for gb in totals.values())]
                for name, device in DEVICES.items()]
    title = "Model states of 16-bit training with Adam"
    text = (table(f"memory wall: {title}", states) + "\n"
            + table("devices that have as much memory, at least:", devices))
    bars |= {name: {"memory of one device": device.gb} for name, device in DEVICES.items()}
    name, largest = max(DEVICES.items(), key=lambda item: item[1].gb)
    return text, bars_svg(bars, title, "GB", limit=(f"{name}: {largest.gb:g} GB", largest.gb))


class Silent:
    """A communicator that delivers nothing."""

    def send(self, *args):
        return Work()

    recv = send


def bytes_sent(collective, N, nbytes):
    """By rank 0 of N, and no rank sends more. The collective itself runs, and its Group counts, but
    in one process: the messages go nowhere, and meta tensors have a shape but no memory."""
    group = Group(Mesh(dp=1), "ring", range(N), 0, Silent())
    collective(torch.empty(nbytes // 2, dtype=torch.bfloat16, device="meta"), group)
    return group.bytes_sent


def ring_cost(name="h100", nbytes=4_000_000_000):
    """Three all-reduces. In each of the ring's hops all links are busy, each with one chunk. The
    other two send as many messages, 2 (N-1), one after another, and each is the whole tensor."""
    device, worlds = DEVICES[name], [2, 4, 8, 16, 32, 64]
    ways = {"ring": all_reduce, "sequential": sequential_all_reduce,
            "parameter server": parameter_server_all_reduce}
    sent = {way: [(N, bytes_sent(collective, N, nbytes) / nbytes) for N in worlds]
            for way, collective in ways.items()}
    rows = [["ranks", "ring, per byte", *(f"{way}, GB" for way in ways), "ring, ms", "others, ms"]]
    for i, N in enumerate(worlds):
        ratios = [points[i][1] for points in sent.values()]
        times = [costs.ring_time(device, 1, N, size, rounds=2) for size in (nbytes, N * nbytes)]
        rows.append([f"{N}", f"{ratios[0]:.4f}", *(f"{r * nbytes / 1e9:g}" for r in ratios),
                     *(f"{1e3 * seconds:,.1f}" for seconds in times)])
    title = f"Sent by the busiest rank in an all-reduce of {nbytes / 1e9:g} GB"
    return (table(f"ring: {title}; times for {name}, {device.node} in a node", rows),
            curves_svg(sent, title, "ranks", "times the tensor", worlds,
                       [1, 2, 4, 8, 16, 32, 64], log=True))


def zero_memory():
    held = {name: [(2**i, 7 * sum(bytes_per_parameter(stage, 2**i))) for i in range(11)]
              for stage, name in enumerate(("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"))}
    rows = [["data ranks", *held]]
    rows += [[f"{points[0][0]}", *(f"{gb:.3g}" for _, gb in points)]
             for points in zip(*held.values(), strict=True)]
    title = "Model states of 7 billion parameters, 16-bit training with Adam"
    return (table(f"zero: {title}, GB per rank", rows),
            curves_svg(held, title, "data ranks", "GB per rank", [4**i for i in range(6)],
                       [0.1, 1, 10, 100, 200], log=True))


def bubble_curves(P=8):
    """Every schedule for m = P, 2 P, ... 8 P microbatches. F, I and W cost the same, and messages
    nothing. A formula is printed where there is one."""
    microbatches, equal = [P * n for n in range(1, 9)], (1, 1, 1, 0)
    curves, cells = {}, [["m", *map(str, microbatches)]]
    for name in SCHEDULES:
        v = 2 if name == "interleaved" else 1
        curves[name], column = [], [f"{name}, formula"]
        for m in microbatches:
            timeline = simulate(make_schedule(name, P, m, v), placement(name, P, v), equal)
            formula = closed_form(name, P, m, v, equal)
            formula = "-" if formula is None else f"{formula:.1%}"
            curves[name].append((m, 100 * timeline.bubble))
            column.append(f"{timeline.bubble:.1%} {formula:>6}")
        cells.append(column)
    title = f"Bubble of {P} pipeline ranks"
    most = 10 * math.ceil(max(y for points in curves.values() for _, y in points) / 10)
    return (table(f"bubble: {title}, m microbatches", [*zip(*cells, strict=True)]),
            curves_svg(curves, title, "microbatches", "bubble, %",
                       [P * n for n in (1, 2, 4, 6, 8)], range(0, most + 1, 10)))


def rank_grid():
    sizes = {"dp": 2, "pp": 2, "tp": 2}
    groups = {axis: lay_out(sizes, [axis]) for axis in sizes}
    title = f"{' x '.join(map(str, sizes.values()))} ranks on the axes {', '.join(sizes)}"
    lines = [f"  groups along {axis}  {' '.join(map(str, rows))}" for axis, rows in groups.items()]
    return "\n".join([f"grid: {title}", grid(sizes), *lines]), grid_svg(groups, title)


def layout_svgs(job, layout, device):
    """{file name: SVG} of a layout: memory by part on each pipeline rank (if there are more than 8,
    on the one that holds most), and a step's timeline, with 2 P microbatches at most."""
    P, m = layout.pp, min(layout.microbatches, 2 * layout.pp)
    ways = f"dp {layout.dp}, tp {layout.tp}, pp {P}, cp {layout.cp}"
    shown = {f"p={p}": {p} for p in range(P)} if P <= 8 else {"the fullest rank": None}
    held = {name: {part: size / 1e9 for part, size in memory(job, layout, ranks).items()
                   if part != "total"} for name, ranks in shown.items()}
    lists = make_schedule(layout.schedule, P, m, layout.chunks)
    times = simulate(lists, placement(layout.schedule, P, layout.chunks),
                     costs.action_costs(job, layout, device)).times
    seconds = max(row[-1][2] for row in times)
    part = "" if m == layout.microbatches else f"a step of {m} instead of "
    return {"layout-memory.svg": bars_svg(
                held, f"Memory by part: {ways}", "GB", (f"device: {device.gb:g} GB", device.gb)),
            "layout-timeline.svg": schedule_svg(
                times, f"{layout.schedule}: {part}{layout.microbatches} microbatches, "
                       f"{seconds:.3g} s; {ways}")}


def metrics_svg(paths):
    """(file name, SVG) of what train.py --metrics wrote: losses or, of experts, their balance."""
    runs = {Path(path).stem: [json.loads(line) for line in Path(path).read_text().splitlines()]
            for path in paths}
    if len(runs) < len(paths):
        raise ValueError(f"--metrics {' '.join(paths)}: files need names of their own")
    curves = {key: {name: [(r["step"], r[key]) for r in records if r.get(key) is not None]
                    for name, records in runs.items()} for key in ("busiest", "loss")}
    key = "busiest" if any(curves["busiest"].values()) else "loss"
    series = {name: points for name, points in curves[key].items() if points}
    if not series:
        raise ValueError(f"--metrics {' '.join(paths)}: no step has a loss")
    file, title, y_name = {
        "busiest": ("balance.svg", "Load of the busiest expert of any block", "times the mean"),
        "loss": ("loss.svg", "The same training in different layouts", "loss, nats per token")}[key]
    steps = 1 + max(step for points in series.values() for step, _ in points)
    values = [y for points in series.values() for _, y in points]
    low, high = math.floor(min(values)), math.ceil(max(values))
    return file, curves_svg(series, title, "step", y_name, [round(steps * i / 4) for i in range(5)],
                            range(low, max(high, low + 1) + 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"pictures.py: {message}\n")
    names = ("memory-wall", "ring", "zero", "bubble", "grid")
    parser.add_argument("picture", nargs="?", choices=names, help="only this one")
    parser.add_argument("--device", choices=DEVICES, default="h100", help="whose links ring takes")
    parser.add_argument("--pp", type=int, default=8, metavar="P", help="ranks of bubble")
    parser.add_argument("--svg", metavar="FOLDER", help="write the pictures there as well")
    parser.add_argument("--metrics", nargs="+", metavar="FILE",
                        help="draw loss.svg or, of runs with experts, balance.svg instead")
    args = parser.parse_args()
    if args.metrics and (args.picture or not args.svg):
        parser.error("--metrics needs --svg FOLDER, and no picture's name")
    make = dict(zip(names, (memory_wall, partial(ring_cost, args.device), zero_memory,
                            partial(bubble_curves, args.pp), rank_grid), strict=True))
    try:
        if args.metrics:
            file, svg = metrics_svg(args.metrics)
            Path(args.svg, file).write_text(svg)
            return
        for name in [args.picture] if args.picture else names:
            text, svg = make[name]()
            print(text)
            if args.svg:
                Path(args.svg, "memory.svg" if name == "zero" else f"{name}.svg").write_text(svg)
    except (ValueError, OSError) as error:
        parser.error(error)


if __name__ == "__main__":
    end_quietly()
    main()
