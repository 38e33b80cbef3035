"""Pictures as SVG: the drawings of the chapters, or curves of runs, from the files that
train.py --metrics wrote. Drawn elsewhere: schedules by python -m extras.show schedules 1f1b 4 8
--svg FILE; large-batches.svg and ranks.svg by the files of these names; wrong-lines.svg by
python -m extras.exercises break --svg FILE. Pictures that move are in docs/lab.html.

    python -m extras.show.pictures --svg docs/pictures
    python -m extras.show.pictures --svg docs/pictures --metrics one.jsonl eight.jsonl
"""

import math
from pathlib import Path
from statistics import fmean

from data.foreign import open_file, parse_json
from extras.show.chapters import DRAWINGS
from extras.show.draw import CURVES, curves_svg
from run.config import MARKS, Parser
from run.files import write_new
from run.signals import end_quietly


def running_mean(points):
    """[(x, y)] -> the same x, each with the mean y from 12 points before it to 12 points after."""
    return [(x, fmean(y for _, y in points[max(0, i - 12) : i + 13]))
            for i, (x, _) in enumerate(points)]


def is_drawable(value):
    """Is the value a number that a chart can show?"""
    return type(value) in (int, float) and abs(value) < 1e300


def is_record(record):
    """Does this record of --metrics have a step, and are all its figures drawable? (null: no
    figure)"""
    figures = [record[key] for key in ("loss", "busiest") if record.get(key) is not None]
    return is_drawable(record["step"]) and record["step"] >= 0 and all(map(is_drawable, figures))


def read_metrics(path):
    """The records of a file of --metrics. ValueError for any other file."""
    try:
        with open_file(path) as file:
            lines = file.read().decode().splitlines()
        records = [parse_json(line) for line in lines]
        # Each line begins with '{"step": '. MARKS has it as the first characters of the whole file
        marked = all(line.startswith(MARKS["metrics"]) for line in lines)
        ours = marked and all(map(is_record, records))
    except (ValueError, TypeError, KeyError):
        ours = False
    if not ours:
        raise ValueError(f"{path}: not a file that train.py --metrics wrote")
    return records


def metrics_svg(paths):
    """(file name, SVG) of the losses in files of --metrics or, if the runs have experts, of the
    busiest expert's load. ValueError if a file is not one of --metrics, or has nothing to draw; if
    there are more files than colors, or two of one name."""
    runs = {path.stem: read_metrics(path) for path in map(Path, paths)}
    if len(runs) < len(paths) or len(runs) > len(CURVES):
        raise ValueError(f"--metrics takes up to {len(CURVES)} files, of different names")
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
    # Distance of neighbouring ticks, a whole number such that there are at most 21 ticks
    between = max(1, math.ceil((max(values) - low) / 20))
    high = low + between * max(1, math.ceil((max(values) - low) / between))
    means = {name: running_mean(points) for name, points in raw.items()}
    file = "balance.svg" if experts else "loss.svg"
    title = ("Load of the busiest expert of any block" if experts
             else "The same training in different layouts")
    y_name = "times the mean" if experts else "loss, nats per token"
    x_ticks = [round(steps * i / 4) for i in range(5)]
    difference = None
    if len(runs) == 2 and not experts:
        first, second = raw
        losses = dict(raw[first])
        difference = (f"loss of {second} - loss of {first}, each step",
                      [(x, y - losses[x]) for x, y in raw[second] if x in losses])
    return file, curves_svg(means, f"{title} (pale: each step; thick: mean of 25)", "step", y_name,
                            x_ticks, range(low, high + 1, between), raw=raw,
                            difference=difference if difference and difference[1] else None)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--svg", metavar="FOLDER", required=True, help="write the pictures there")
    parser.add_argument("--metrics", nargs="+", metavar="FILE",
                        help="draw loss.svg or, of runs with experts, balance.svg. Without this "
                             "flag: " + ", ".join(DRAWINGS))
    args = parser.parse_args()
    try:
        Path(args.svg).mkdir(parents=True, exist_ok=True)
        if args.metrics:
            pictures = dict([metrics_svg(args.metrics)])
        else:
            pictures = {file: draw() for file, draw in DRAWINGS.items()}
        write_new("--svg", {Path(args.svg, file): svg for file, svg in pictures.items()})
    except (ValueError, OSError) as error:
        parser.error(error)


if __name__ == "__main__":
    end_quietly()
    main()
