"""What decides about a layout, in four pictures: tables for a terminal, SVG for a page. The figures
come from the functions that train.py and plan.py use.

    memory-wall   bytes of training a model, against the memory of one device
    ring          seconds of an all-reduce, against the number of ranks
    memory        model states per rank under each ZeRO stage, against the number of ranks
    bubble        idle share of a pipeline's step, against the number of microbatches

    python -m planner.pictures                     the tables
    python -m planner.pictures --svg pictures      and SVG files in that folder
    python -m planner.pictures --svg pictures --metrics one.jsonl eight.jsonl    curves of runs
"""

import argparse
import json
import math
from pathlib import Path

from planner import costs
from planner.draw import bars_svg, curves_svg, table
from planner.hardware import DEVICES
from run.signals import end_quietly
from schedules import SCHEDULES, closed_form, make_schedule, placement, simulate
from sizes import bytes_per_parameter

# Each picture is a function that returns (text, SVG).


def memory_wall():
    """Model states on a single device, and how many devices have as much memory."""
    names = ("weights", "gradients", "optimizer")
    rows = [["parameters", *names, "in all", *(f"{device}s" for device in DEVICES)]]
    bars = {}
    for billions in (1.5, 7, 13, 70, 175):
        sizes = [billions * each for each in bytes_per_parameter(0, 1)]  # GB
        bars[f"{billions:g} billion"] = dict(zip(names, sizes, strict=True))
        rows.append([f"{billions:g} billion", *(f"{size:,.0f} GB" for size in (*sizes, sum(sizes))),
                     *(f"{math.ceil(sum(sizes) / device.gb)}" for device in DEVICES.values())])
    limits = {}
    for gb in sorted({device.gb for device in DEVICES.values()}):
        same = [name for name, device in DEVICES.items() if device.gb == gb]
        limits[f"{', '.join(same)}: {gb} GB"] = gb
    title = "Model states of 16-bit training with Adam"
    return (table(f"memory wall: {title}; devices that have as much memory, at least", rows),
            bars_svg(bars, title, "GB", [1, 10, 100, 1000, 10_000], limits))


def ring_cost(name="h100", nbytes=4_000_000_000):
    """Three all-reduces. In each hop of the ring all links are busy, with a chunk each. The other
    two send 2 (N-1) messages one after another, each of them the whole tensor."""
    device, worlds = DEVICES[name], [2, 4, 8, 16, 32, 64]
    times = {"ring": [], "sequential": [], "parameter server": []}
    for N in worlds:
        for way, points in times.items():
            size = nbytes if way == "ring" else N * nbytes  # a hop sends an N-th of it
            points.append((N, costs.ring_time(device, 1, N, size, rounds=2)))
    rows = [["ranks", *times]]
    for points in zip(*times.values(), strict=True):
        rows.append([f"{points[0][0]}", *(f"{seconds:.3g} s" for _, seconds in points)])
    title = f"All-reduce of {nbytes / 1e9:g} GB on {name}s, {device.node} in a node"
    return (table(f"ring: {title}", rows),
            curves_svg(times, title, "ranks", "seconds", worlds, [0.01, 0.1, 1, 10, 20], log=True))


def zero_memory():
    """Model states per rank."""
    held = {}
    for stage, name in enumerate(("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        held[name] = [(2**i, 7 * sum(bytes_per_parameter(stage, 2**i))) for i in range(11)]
    rows = [["data ranks", *held]]
    for points in zip(*held.values(), strict=True):
        rows.append([f"{points[0][0]}", *(f"{gb:.3g}" for _, gb in points)])
    title = "Model states of 7 billion parameters, 16-bit training with Adam"
    return (table(f"memory: {title}, GB per rank", rows),
            curves_svg(held, title, "data ranks", "GB per rank",
                       [4**i for i in range(6)], [0.1, 1, 10, 100, 200], log=True))


def bubble_curves(P=8):
    """Each schedule for m = P, 2 P, ... 8 P microbatches. F, I and W cost the same, messages
    nothing."""
    microbatches, equal = [P * n for n in range(1, 9)], (1, 1, 1, 0)
    curves, columns = {}, [["m", *map(str, microbatches)]]
    for name in SCHEDULES:
        v = 2 if name == "interleaved" else 1
        curves[name], column = [], [f"{name}, formula"]
        for m in microbatches:
            bubble = simulate(make_schedule(name, P, m, v), placement(name, P, v), equal).bubble
            rate = closed_form(name, P, m, v, equal)
            curves[name].append((m, 100 * bubble))
            column.append(f"{bubble:.1%} {'-' if rate is None else f'{rate:.1%}':>6}")
        columns.append(column)
    title = f"Bubble of {P} pipeline ranks"
    return (table(f"bubble: {title}, m microbatches", list(zip(*columns, strict=True))),
            curves_svg(curves, title, "microbatches", "% of the step", microbatches,
                       range(0, 60, 10)))


def running_mean(points, width=25):
    """Each y is the mean of the `width` values around it, of fewer at the ends."""
    means = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - width // 2): i + width // 2 + 1]]
        means.append((x, sum(near) / len(near)))
    return means


def metrics_svg(paths):
    """{file name: SVG} of files that train.py --metrics wrote: losses or, of experts, the load of
    the busiest. ValueError."""
    runs = {Path(path).stem: [json.loads(line) for line in Path(path).read_text().splitlines()]
            for path in paths}
    if len(runs) < len(paths):
        raise ValueError(f"--metrics {' '.join(paths)}: files need names of their own")
    experts = any(record.get("busiest") for records in runs.values() for record in records)
    key = "busiest" if experts else "loss"
    raw = {}
    for name, records in runs.items():
        raw[name] = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        if not raw[name]:
            raise ValueError(f"--metrics {' '.join(paths)}: no step of {name} has a {key}")
    steps = 1 + max(x for points in raw.values() for x, _ in points)
    values = [y for points in raw.values() for _, y in points]
    low = math.floor(min(values))
    high = max(low + 1, math.ceil(max(values)))
    curves = {name: running_mean(points) for name, points in raw.items()}
    title, y_name = "The same training in different layouts", "loss, nats per token"
    if experts:
        title, y_name = "Load of the busiest expert of any block", "times the mean"
    svg = curves_svg(curves, f"{title} (pale: each step; thick: mean of 25)", "step", y_name,
                     [round(steps * i / 4) for i in range(5)], range(low, high + 1), raw=raw)
    return {"balance.svg" if experts else "loss.svg": svg}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"pictures.py: {message}\n")
    parser.add_argument("--svg", metavar="FOLDER", help="write the pictures there")
    parser.add_argument("--metrics", nargs="+", metavar="FILE",
                        help="draw loss.svg or, of runs with experts, balance.svg instead")
    args = parser.parse_args()
    if args.metrics and not args.svg:
        parser.error("--metrics needs --svg FOLDER")
    try:
        if args.metrics:
            files = metrics_svg(args.metrics)
        else:
            pictures = {"memory-wall": memory_wall(), "ring": ring_cost(), "memory": zero_memory(),
                        "bubble": bubble_curves()}
            print("\n".join(text for text, _ in pictures.values()))
            files = {f"{name}.svg": svg for name, (_, svg) in pictures.items()}
        if args.svg:
            Path(args.svg).mkdir(parents=True, exist_ok=True)
            for name, svg in files.items():
                Path(args.svg, name).write_text(svg)
    except (ValueError, OSError) as error:
        parser.error(error)


if __name__ == "__main__":
    end_quietly()
    main()
