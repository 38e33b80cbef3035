"""Four pictures, as tables and SVG: the memory wall, the time of an all-reduce by the number of
ranks, model states under each ZeRO stage, the bubble of each schedule. The figures come from the
functions that train.py and plan.py use. A function for each picture returns (table, SVG).

    python -m planner.pictures --svg pictures      prints tables; the folder is for SVG files
    python -m planner.pictures --svg pictures --metrics one.jsonl eight.jsonl    curves of runs
"""

import argparse
import json
import math
from pathlib import Path
from statistics import fmean

from planner import costs
from planner.draw import bars_svg, curves_svg, table
from planner.hardware import DEVICES
from run.config import MARKS
from run.signals import end_quietly
from schedules import SCHEDULES, make_schedule, placement, simulate
from sizes import bytes_per_parameter


def memory_wall():
    names = ("weights", "gradients", "optimizer")
    rows = [["parameters", *names, "in all"]]
    bars = {}
    for billions in (1.5, 7, 13, 70, 175):
        name, sizes = f"{billions:g} billion", [billions * n for n in bytes_per_parameter(0, 1)]
        bars[name] = dict(zip(names, sizes, strict=True))  # GB
        rows.append([name, *(f"{size:,.0f} GB" for size in (*sizes, sum(sizes)))])
    limits = {}
    for gb in sorted({device.gb for device in DEVICES.values()}):
        same = [name for name, device in DEVICES.items() if device.gb == gb]
        limits[f"{', '.join(same)}: {gb} GB"] = gb
    title = "Model states of 16-bit training with Adam"
    return (table(title, rows),
            bars_svg(bars, title, "GB", [1, 10, 100, 1000, 10_000], limits))


def curves(title, x_name, y_name, x_ticks, y_ticks, points, log=False):
    """points: {name: [(x, y)]}, all for the same x."""
    rows = [[x_name, *points]]
    for row in zip(*points.values(), strict=True):
        rows.append([f"{row[0][0]}", *(f"{y:.3g}" for _, y in row)])
    return (table(f"{title}, {y_name}", rows),
            curves_svg(points, title, x_name, y_name, x_ticks, y_ticks, log))


def ring_cost(name="h100", nbytes=4_000_000_000):
    """Three all-reduces. In each hop of the ring all links are busy, with a chunk each. The other
    two send 2 (N-1) messages one after another, each of them the whole tensor."""
    device, worlds = DEVICES[name], [2, 4, 8, 16, 32, 64]
    ring = [(N, costs.ring_time(device, 1, N, nbytes, rounds=2)) for N in worlds]
    in_turn = [(N, costs.ring_time(device, 1, N, N * nbytes, rounds=2)) for N in worlds]
    return curves(f"All-reduce of {nbytes / 1e9:g} GB on {name}s, {device.node} in a node",
                  "ranks", "seconds", worlds, [0.01, 0.1, 1, 10, 20],
                  {"ring": ring, "sequential": in_turn, "parameter server": in_turn}, log=True)


def zero_memory():
    held = {}
    for stage, name in enumerate(("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        held[name] = [(2**i, 7 * sum(bytes_per_parameter(stage, 2**i))) for i in range(11)]
    return curves("Model states of 7 billion parameters, 16-bit training with Adam", "data ranks",
                  "GB per rank", [4**i for i in range(6)], [0.1, 1, 10, 100, 200], held, log=True)


def bubble_curves(P=8):
    """Each schedule with F, I and W that cost the same, and messages that cost nothing."""
    microbatches, bubbles = [P * n for n in range(1, 9)], {}
    for name in SCHEDULES:
        v = 2 if name == "interleaved" else 1
        lists = [(m, make_schedule(name, P, m, v)) for m in microbatches]
        bubbles[name] = [(m, 100 * simulate(ranks, placement(name, P, v)).bubble)
                         for m, ranks in lists]
    return curves(f"Bubble of {P} pipeline ranks", "microbatches", "% of the step", microbatches,
                  range(0, 60, 10), bubbles)


def metrics_svg(paths):
    """{file name: SVG} of files that train.py --metrics wrote: losses or, of experts, the load of
    the busiest. ValueError."""
    runs = {}
    for path in map(Path, paths):
        lines = path.read_text().splitlines()
        if not all(line.startswith(MARKS["metrics"]) for line in lines):
            raise ValueError(f"{path}: not a file that train.py --metrics wrote")
        runs[path.stem] = [json.loads(line) for line in lines]
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
    means = {name: [(x, fmean(y for _, y in points[max(0, i - 12): i + 13]))
                    for i, (x, _) in enumerate(points)] for name, points in raw.items()}
    title, y_name = (("Load of the busiest expert of any block", "times the mean") if experts
                     else ("The same training in different layouts", "loss, nats per token"))
    svg = curves_svg(means, f"{title} (pale: each step; thick: mean of 25)", "step", y_name,
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
