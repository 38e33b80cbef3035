"""Tables and timelines for a terminal; charts and timelines as SVG on white; and the command line
that shows schedules.

    python schedules.py 1f1b 4 8 --svg schedule.svg        python -m planner.pictures
"""

import argparse
import json
import math
import shutil
from html import escape
from pathlib import Path

import schedules
from engine.schedules import make_schedule, simulate, validate
from planner.costs import closed_form
from run.signals import end_quietly

COLORS = {"F": "#6aa0e8", "B": "#6cc08b", "I": "#6cc08b", "W": "#e8b04a"}  # of actions
LINES = ("#2f6fd0", "#d9822b", "#2f9e5f", "#b0408f", "#1aa3b5", "#777777")
LEFT, RIGHT, TOP, BOTTOM = 60, 570, 70, 310  # of a chart's plot


def table(title, rows):
    """Text: rows of cells below a title, each column as wide as its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [title]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells))
    return "\n".join(lines)


class Picture:
    """Collects shapes; str() is an SVG file. x goes right, y down."""

    def __init__(self, title, width=720, height=360):
        self.shapes = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                       'font-size="12" font-family="sans-serif">']
        self.box(0, 0, width, height, "white")
        self.text(12, 22, title, style='font-size="14" font-weight="bold"')

    def text(self, x, y, words, anchor="start", color="#222", style=""):
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" '
                           f'{style}>{escape(str(words))}</text>')

    def box(self, x, y, width, height, color, style=""):
        self.shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                           f'height="{height:.1f}" fill="{color}" {style}/>')

    def line(self, points, color, style=""):
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" {style}/>')

    def __str__(self):
        return "\n".join([*self.shapes, "</svg>\n"])


def schedule_text(times, width=160):
    """One row per rank, time from left to right, cut at the width: F3 B3 I3 W3 for microbatch 3, in
    lower case on every second chunk. A dot is idle time."""
    actions = [entry for row in times for entry in row]
    makespan = max(end for *_, end in actions)
    shortest = min(end - start for _, start, end in actions)
    name_length = 2 + max(len(str(action.microbatch)) for action, *_ in actions)
    columns = name_length / shortest  # per unit of time
    rows = []
    for rank, row in enumerate(times):
        line, at = f"rank {rank:<3}", 0
        for (kind, stage, k), start, end in row:
            left, right = round(start * columns), round(end * columns)
            name = kind.lower() if stage // len(times) % 2 else kind
            shown = f"{name}{k}".ljust(right - left - 1, "-")
            line += "." * (left - at) + shown.ljust(right - left)
            at = right
        line += "." * (round(makespan * columns) - at)
        rows.append(line if len(line) <= width else line[:width - 3] + "...")
    return "\n".join(rows)


def schedule_svg(times, title):
    """The same as SVG; later chunks are paler."""
    makespan = max(row[-1][2] for row in times)
    picture = Picture(title, 952, 76 + 26 * len(times))
    for rank, row in enumerate(times):
        y = 36 + 26 * rank
        picture.text(12, y + 16, f"rank {rank}")
        for (kind, stage, k), start, end in row:
            x, wide = 60 + 880 * start / makespan, 880 * (end - start) / makespan
            pale = 2 / (2 + stage // len(times))
            picture.box(x, y, wide, 22, COLORS[kind], f'stroke="white" opacity="{pale:.2f}"')
            size = min(12, 1.5 * wide / len(str(k)))
            picture.text(x + wide / 2, y + 15, k, "middle", style=f'font-size="{size:.1f}"')
    picture.text(60, 60 + 26 * len(times), "blue: forward; green: backward, or the input gradient "
                 "alone; yellow: weight gradient")
    return str(picture)


def scale(ticks, low, high):
    """A function from values to pixels: the first tick lies at low, the last at high."""
    first, last = ticks[0], ticks[-1]
    return lambda value: round(low + (value - first) / (last - first) * (high - low), 1)


def curves_svg(curves, title, x_name, y_name, x_ticks, y_ticks, raw=None):
    """curves: {name: [(x, y)]}; dashed if another curve is below. raw: pale ones behind them."""
    picture, down = Picture(title), scale(y_ticks, BOTTOM, TOP)
    picture.text(12, 52, y_name)
    for tick in y_ticks:
        picture.line([(LEFT, down(tick)), (RIGHT, down(tick))], "#e4e4e4")
        picture.text(LEFT - 8, down(tick) + 4, f"{tick:,g}", "end")
    across, colors = scale(x_ticks, LEFT, RIGHT), dict(zip(curves, LINES, strict=False))
    for x in x_ticks:
        picture.text(across(x), BOTTOM + 18, x, "middle")
    picture.text((LEFT + RIGHT) / 2, BOTTOM + 42, x_name, "middle")
    for name, points in (raw or {}).items():
        picture.line([(across(x), down(y)) for x, y in points], colors[name],
                     'stroke-width="0.7" opacity="0.35"')
    drawn, ends = [], []
    for name, points in curves.items():
        pixels = [(across(x), down(y)) for x, y in points]
        hides = any(all(math.dist(a, b) < 1 for a, b in zip(pixels, other, strict=False))
                    for other in drawn)
        dashes = ' stroke-dasharray="7 7"' if hides else ""
        picture.line(pixels, colors[name], 'stroke-width="2"' + dashes)
        drawn.append(pixels)
        ends.append((pixels[-1][1], name, colors[name]))
    y = math.inf
    for at, name, color in sorted(ends, reverse=True):  # from the lowest up, a line of text apart
        y = min(at, y - 15)
        picture.line([(RIGHT, at), (RIGHT + 10, y)], color)
        picture.text(RIGHT + 14, y + 4, name, color=color)
    return str(picture)


def schedules_command():
    end_quietly()
    parser = argparse.ArgumentParser(description=schedules.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("schedule", nargs="?", default="1f1b", help=", ".join(schedules.SCHEDULES))
    parser.add_argument("P", type=int, help="ranks")
    parser.add_argument("m", type=int, help="microbatches")
    parser.add_argument("--chunks", type=int, metavar="v", default=0,
                        help="stages per rank (interleaved: 2)")
    parser.add_argument("--costs", default=(1, 1, 1, 0), metavar="F,I,W,comm",
                        type=lambda words: tuple(map(float, words.split(","))))
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--compare", action="store_true", help="every schedule, one line each")
    output.add_argument("--json", action="store_true", help="print the figures only")
    output.add_argument("--svg", metavar="FILE", help="write the picture there as well")
    args = parser.parse_args()
    P, m = args.P, args.m
    if P * m > 10**6:
        parser.error(f"{P} ranks x {m} microbatches are more than a million actions")
    for name in schedules.SCHEDULES if args.compare else [args.schedule]:
        try:
            if args.compare and schedules.SCHEDULES[name].chunks:  # --chunks is for the others
                v = schedules.chunks_of(name)
            else:
                v = schedules.chunks_of(name, args.chunks)
            lists, where = make_schedule(name, P, m, v), schedules.placement(name, P, v)
            validate(lists, where)
            timeline = simulate(lists, where, args.costs)
            if args.svg:
                title = f"{name}: {P} ranks, {m} microbatches, bubble {timeline.bubble:.1%}"
                Path(args.svg).write_text(schedule_svg(timeline.times, title))
        except (ValueError, OSError) as error:
            if not args.compare or not schedules.SCHEDULES[name].in_rounds:
                parser.error(error)
            print(f"{name:11}  skipped: {error}")
            continue
        if args.json:
            print(json.dumps(dict(zip(timeline._fields[1:], timeline[1:], strict=True))))
            continue
        if not args.compare:
            width = min(160, shutil.get_terminal_size((120, 24)).columns)
            print(schedule_text(timeline.times, width))
        rate = closed_form(name, P, m, v, args.costs)
        formula = "     -" if rate is None else f"{rate:6.2%}"
        chunks = f" of 1/{len(where) // P} rank each" if len(where) > P else ""
        print(f"{name:11}  makespan {timeline.makespan:<8.6g} bubble {timeline.bubble:6.2%}  "
              f"formula {formula}  in flight {timeline.peak_in_flight}{chunks}")
