"""Curves of runs, as SVG. (Schedules: python schedules.py 1f1b 4 8 --svg FILE. All else is live, in
lab.html.)

    python -m planner.pictures --svg pictures --metrics one.jsonl eight.jsonl
"""

import argparse
import json
import math
from pathlib import Path
from statistics import fmean

from planner.draw import curves_svg
from run.config import MARKS
from run.signals import end_quietly


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
    parser.add_argument("--svg", metavar="FOLDER", required=True, help="write the picture there")
    parser.add_argument("--metrics", nargs="+", metavar="FILE", required=True,
                        help="draw loss.svg or, of runs with experts, balance.svg")
    args = parser.parse_args()
    try:
        Path(args.svg).mkdir(parents=True, exist_ok=True)
        for name, svg in metrics_svg(args.metrics).items():
            Path(args.svg, name).write_text(svg)
    except (ValueError, OSError) as error:
        parser.error(error)


if __name__ == "__main__":
    end_quietly()
    main()
