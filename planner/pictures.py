"""Pictures of the README and of docs/: model states under each ZeRO stage, and curves of runs. (The
schedules: python schedules.py 1f1b 4 8 --svg FILE. All the others are live, in lab.html.)

    python -m planner.pictures --svg pictures      prints a table; the folder is for memory.svg
    python -m planner.pictures --svg pictures --metrics one.jsonl eight.jsonl    curves of runs
"""

import argparse
import json
import math
from pathlib import Path
from statistics import fmean

from planner.draw import curves_svg, table
from run.config import MARKS
from run.signals import end_quietly
from sizes import bytes_per_parameter


def zero_memory():
    """(table, SVG) of model states under each ZeRO stage."""
    title, ranks = "Model states of 7 billion parameters, 16-bit training with Adam", range(11)
    names = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    held = {name: [(2**i, 7 * sum(bytes_per_parameter(stage, 2**i))) for i in ranks]
            for stage, name in enumerate(names)}
    rows = [["data ranks", *names]]
    rows += [[f"{2**i}", *(f"{held[name][i][1]:.3g}" for name in names)] for i in ranks]
    return (table(f"{title}, GB per rank", rows),
            curves_svg(held, title, "data ranks", "GB per rank", [4**i for i in range(6)],
                       [0.1, 1, 10, 100, 200], log=True))


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
            text, svg = zero_memory()
            print(text)
            files = {"memory.svg": svg}
        if args.svg:
            Path(args.svg).mkdir(parents=True, exist_ok=True)
            for name, svg in files.items():
                Path(args.svg, name).write_text(svg)
    except (ValueError, OSError) as error:
        parser.error(error)


if __name__ == "__main__":
    end_quietly()
    main()
