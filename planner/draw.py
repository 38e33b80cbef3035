"""Tables and timelines for a terminal; charts, timelines and rank grids as SVG on white; and the
command line that shows schedules.

    python pipeline.py 1f1b 4 8 --svg schedule.svg        python -m planner.pictures
"""

import argparse
import json
import math
import shutil
from html import escape
from pathlib import Path

import schedules

COLORS = {"F": "#6aa0e8", "B": "#6cc08b", "I": "#6cc08b", "W": "#e8b04a"}  # of actions
LINES = ("#2f6fd0", "#d9822b", "#2f9e5f", "#b0408f", "#1aa3b5", "#777777")
WIDTH, HEIGHT = 720, 360  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 60, 570, 70, 310  # of its plot


def table(title, rows):
    """Text: rows of cells below a title, each column as wide as its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [title]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells))
    return "\n".join(lines)


def page(title, shapes, width=WIDTH, height=HEIGHT):
    """The text of an SVG file."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-size="12" font-family="sans-serif" fill="#222">\n'
        f'<rect width="{width}" height="{height}" rx="6" fill="white"/>',
        text(12, 22, title, 'font-size="14" font-weight="bold"'), *shapes, "</svg>\n"])


def text(x, y, words, style=""):
    return f'<text x="{x}" y="{y}" {style}>{escape(str(words))}</text>'


def box(x, y, width, height, color, style=""):
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{color}" {style}/>')


# ---- schedules ----


def schedule_text(times, width=160):
    """One row per rank, time from left to right: F3 B3 I3 W3 for microbatch 3, in lower case on
    every second chunk; only the letters if that is too wide. A dot is idle time."""
    actions = [entry for row in times for entry in row]
    makespan = max(end for *_, end in actions)
    shortest = min(end - start for _, start, end in actions)
    name_length = 2 + max(len(str(action.microbatch)) for action, *_ in actions)
    columns, room = name_length / shortest, width - 8  # columns per unit of time
    named = columns * makespan <= room
    if not named:
        columns = min(1 / shortest, room / makespan)
    rows = []
    for rank, row in enumerate(times):
        line, at = f"rank {rank:<3}", 0
        for (kind, stage, k), start, end in row:
            left, right = round(start * columns), round(end * columns)
            name = kind.lower() if stage // len(times) % 2 else kind
            if named:
                name = f"{name}{k}".ljust(right - left - 1, "-").ljust(right - left)
            else:
                name *= right - left
            line += "." * (left - at) + name
            at = right
        rows.append(line + "." * (round(makespan * columns) - at))
    return "\n".join(rows)


def schedule_svg(times, title):
    """The same as SVG; later chunks are paler."""
    makespan = max(row[-1][2] for row in times)
    used = {action.kind for row in times for action, *_ in row}
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    shapes, x = [], 60
    y = 50 + 26 * len(times)
    for kind, name in names.items():
        if kind in used:
            shapes += [box(x, y, 12, 12, COLORS[kind]), text(x + 18, y + 10, name)]
            x += 130
    for rank, row in enumerate(times):
        y = 36 + 26 * rank
        shapes.append(text(12, y + 16, f"rank {rank}"))
        for (kind, stage, k), start, end in row:
            x, wide = 60 + 880 * start / makespan, 880 * (end - start) / makespan
            pale = 2 / (2 + stage // len(times))
            shapes.append(box(x, y, wide, 22, COLORS[kind],
                              f'stroke="white" opacity="{pale:.2f}"'))
            size = min(12, 1.5 * wide / len(str(k)))
            shapes.append(text(round(x + wide / 2, 1), y + 15, k,
                               f'font-size="{size:.1f}" text-anchor="middle"'))
    return page(title, shapes, 952, 76 + 26 * len(times))


# ---- charts ----


def scale(ticks, low, high, log=False):
    """A function from values to pixels: the first tick lies at low, the last at high."""
    to = math.log10 if log else float
    first, last = to(ticks[0]), to(ticks[-1])
    return lambda value: round(low + (to(value) - first) / (last - first) * (high - low), 1)


def grid_lines(ticks, down, name):
    """Horizontal lines with their values; the name of the axis above."""
    shapes = [text(12, 52, name)]
    for tick in ticks:
        shapes += [f'<path d="M{LEFT},{down(tick)} H{RIGHT}" stroke="#e4e4e4"/>',
                   text(LEFT - 8, down(tick) + 4, f"{tick:,g}", 'text-anchor="end"')]
    return shapes


def labels(entries):
    """Labels at the right of the plot. entries: [(y, words, color)]; moved apart if closer than a
    line of text, with a stroke from each label to its own height."""
    shapes, y = [], math.inf
    for at, words, color in sorted(entries, reverse=True):  # from the lowest up
        y = min(at, y - 15)
        shapes += [f'<path d="M{RIGHT},{at} L{RIGHT + 10},{y}" stroke="{color}" fill="none"/>',
                   text(RIGHT + 14, round(y + 4, 1), words, f'fill="{color}"')]
    return shapes


def curves_svg(curves, title, x_name, y_name, x_ticks, y_ticks, log=False, raw=None):
    """curves: {name: [(x, y)]}; one that hides another is dashed. raw: pale curves behind them, of
    the same names."""
    across, down = scale(x_ticks, LEFT, RIGHT, log), scale(y_ticks, BOTTOM, TOP, log)
    shapes = grid_lines(y_ticks, down, y_name)
    shapes += [text(across(x), BOTTOM + 18, x, 'text-anchor="middle"') for x in x_ticks]
    shapes.append(text((LEFT + RIGHT) / 2, HEIGHT - 8, x_name, 'text-anchor="middle"'))
    colors = dict(zip(curves, LINES, strict=False))

    def line(points, style):
        path = " ".join(f"{x},{y}" for x, y in points)
        return f'<polyline points="{path}" fill="none" {style}/>'

    for name, points in (raw or {}).items():
        pixels = [(across(x), down(y)) for x, y in points]
        shapes.append(line(pixels, f'stroke="{colors[name]}" stroke-width="0.7" opacity="0.35"'))
    drawn, ends = [], []
    for name, points in curves.items():
        pixels = [(across(x), down(y)) for x, y in points]
        hides = any(len(pixels) == len(other) and all(
            x == x2 and abs(y - y2) < 1 for (x, y), (x2, y2) in zip(pixels, other, strict=True))
            for other in drawn)
        shapes.append(line(pixels, f'stroke="{colors[name]}" stroke-width="2"'
                           + ' stroke-dasharray="7 7"' * hides))
        drawn.append(pixels)
        ends.append((pixels[-1][1], name, colors[name]))
    return page(title, shapes + labels(ends))


def bars_svg(bars, title, unit, ticks, limits):
    """bars: {name: {part: value}}, parts on top of one another on a log scale, their sum below the
    name. limits: {name: value} of lines across all bars."""
    down, slot = scale(ticks, BOTTOM, TOP, log=True), (RIGHT - LEFT) / len(bars)
    shapes = grid_lines(ticks, down, unit)
    shapes += [f'<path d="M{LEFT},{down(value)} H{RIGHT}" stroke="#c22" stroke-dasharray="5 4"/>'
               for value in limits.values()]
    colors = dict(zip(next(iter(bars.values())), LINES, strict=False))
    for i, (part, color) in enumerate(colors.items()):
        shapes += [box(130 + 95 * i, 42, 12, 12, color), text(148 + 95 * i, 52, part)]
    for i, (name, parts) in enumerate(bars.items()):
        middle, bottom, total = round(LEFT + (i + 0.5) * slot, 1), BOTTOM, 0
        for part, value in parts.items():
            total += value
            shapes.append(box(middle - 20, down(total), 40, bottom - down(total), colors[part]))
            bottom = down(total)
        shapes += [text(middle, BOTTOM + 18, name, 'text-anchor="middle"'),
                   text(middle, BOTTOM + 34, f"{total:,.0f} {unit}",
                        'text-anchor="middle" font-weight="bold"')]
    return page(title, shapes + labels([(down(value), name, "#c22")
                                        for name, value in limits.items()]))


def grid_svg(groups, title):
    """groups: {axis: its groups of ranks}, of two ranks on each of three axes. One panel per axis:
    all ranks, with one color per group."""
    shapes = []
    for n, (axis, rows) in enumerate(groups.items()):
        corner = 50 + 230 * n
        shapes.append(text(corner, 50, f"groups along {axis}", 'font-weight="bold"'))
        for i in (0, 1):
            shapes += [text(corner + 38 + 96 * i, 74, f"d={i}", 'text-anchor="middle"'),
                       text(corner - 32, 120 + 40 * i, f"p={i}")]
            for t in (0, 1):
                shapes.append(text(corner + 18 + 96 * i + 40 * t, 92, f"t={t}",
                                   'text-anchor="middle"'))
        for ranks, color in zip(rows, LINES, strict=False):
            for rank in ranks:
                d, p, t = rank // 4, rank // 2 % 2, rank % 2
                x, y = corner + 96 * d + 40 * t, 98 + 40 * p
                shapes += [box(x, y, 36, 36, color, 'rx="4"'),
                           text(x + 18, y + 24, rank,
                                'fill="white" font-size="16" text-anchor="middle"')]
    return page(title, shapes, 720, 192)


# ---- the command line of pipeline.py ----


def numbers(words):
    values = [float(word) for word in words.split(",")]
    return tuple(int(x) if x.is_integer() else x for x in values)


def schedules_command():
    parser = argparse.ArgumentParser(description=schedules.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("schedule", nargs="?", default="1f1b", help=", ".join(schedules.SCHEDULES))
    parser.add_argument("P", type=int, help="ranks")
    parser.add_argument("m", type=int, help="microbatches")
    parser.add_argument("--chunks", type=int, metavar="v", help="stages per rank (interleaved: 2)")
    parser.add_argument("--costs", type=numbers, default=(1, 1, 1, 0), metavar="F,I,W,comm")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--compare", action="store_true", help="every schedule, one line each")
    output.add_argument("--json", action="store_true", help="print the figures only")
    output.add_argument("--svg", metavar="FILE", help="write the picture there as well")
    args = parser.parse_args()
    P, m = args.P, args.m
    for name in schedules.SCHEDULES if args.compare else [args.schedule]:
        v = args.chunks if name == args.schedule else None
        v = v or (2 if name == "interleaved" else 1)
        try:
            lists, where = schedules.make_schedule(name, P, m, v), schedules.placement(name, P, v)
            schedules.validate(lists, where)
            timeline = schedules.simulate(lists, where, args.costs)
            if args.svg:
                title = f"{name}: {P} ranks, {m} microbatches, bubble {timeline.bubble:.1%}"
                Path(args.svg).write_text(schedule_svg(timeline.times, title))
        except (ValueError, OSError) as error:
            if not args.compare or name == "gpipe":  # gpipe takes any P and m
                parser.error(error)
            print(f"{name:11}  skipped: {error}")
            continue
        if args.json:
            print(json.dumps(dict(zip(timeline._fields[1:], timeline[1:], strict=True))))
            continue
        if not args.compare:
            width = min(160, shutil.get_terminal_size((120, 24)).columns)
            print(schedule_text(timeline.times, width))
        rate = schedules.closed_form(name, P, m, v, args.costs)
        formula = "     -" if rate is None else f"{rate:6.2%}"
        chunks = f" of 1/{len(where) // P} rank each" if len(where) > P else ""
        print(f"{name:11}  makespan {timeline.makespan:<8.6g} bubble {timeline.bubble:6.2%}  "
              f"formula {formula}  in flight {timeline.peak_in_flight}{chunks}")
