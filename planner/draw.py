"""Pictures as text for a terminal and as SVG for a page: schedules, tables, curves, bars, grids of
ranks; and the command line that shows schedules. The ground of each SVG is white, so that it reads
the same on a dark page.

    python pipeline.py 1f1b 4 8 --svg schedule.svg        python -m planner.pictures
"""

import argparse
import json
import math
import shutil
import sys
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path

import schedules

COLORS = {"F": (44, "#6aa0e8"), "B": (42, "#6cc08b"), "I": (42, "#6cc08b"), "W": (43, "#e8b04a")}
LINES = ("#2f6fd0", "#d9822b", "#2f9e5f", "#b0408f", "#1aa3b5", "#777777")
WIDTH, HEIGHT = 720, 360  # of curves and bars; their plot is 60 from the left, 70 from the top


def page(title, shapes, width=WIDTH, height=HEIGHT, title_y=22):
    """An SVG file's text."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-size="12" font-family="sans-serif" fill="#222">\n'
        f'<rect width="{width}" height="{height}" rx="6" fill="white"/>\n'
        f'<text x="12" y="{title_y}" font-size="14" font-weight="bold">{title}</text>',
        *shapes, "</svg>\n"])


def table(title, rows):
    """Rows of cells, which are text, below a title; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
             for row in rows]
    return "\n".join([title, *("  " + line for line in lines)])


def schedule_text(times, width=160, color=False):
    """One row per rank, time from left to right, as wide as fits: F3 B3 I3 W3 for microbatch 3, in
    lower case on every second chunk. Where narrow, F is the microbatch's last digit, B and I the
    letter for it (a is 0), W a w. A dot is idle time."""
    actions = [entry for row in times for entry in row]
    total, unit = max(end for *_, end in actions), min(end - start for _, start, end in actions)
    wide, room = 2 + max(len(str(a.microbatch)) for a, _, _ in actions), width - 8
    cell = next((c for c in (wide, 1) if c * total / unit <= room), room * unit / total)
    rows = []
    for rank, row in enumerate(times):
        line, at = f"rank {rank:<3}", 0
        for (kind, stage, k), start, end in row:
            left, right = round(start * cell / unit), round(end * cell / unit)
            text = {"F": str(k % 10), "W": "w"}.get(kind, "abcdefghij"[k % 10]) * (right - left)
            if cell == wide:
                name = kind.lower() if stage // len(times) % 2 else kind
                text = f"{name}{k}".ljust(right - left - 1, "-").ljust(right - left)
            line += "." * (left - at)
            line += f"\033[30;{COLORS[kind][0]}m{text}\033[0m" if color else text
            at = right
        rows.append(line + "." * (round(total * cell / unit) - at))
    return "\n".join(rows)


def schedule_svg(times, title):
    """The same as SVG, with a legend; later chunks are paler."""
    P, scale, shapes = len(times), 1150 / max(row[-1][2] for row in times), []
    used, x = {a.kind for row in times for a, *_ in row}, 1200
    for kind, name in (("W", "weight gradient"), ("I", "input gradient"), ("B", "backward"),
                       ("F", "forward")):
        if kind in used:
            x -= 30 + 7 * len(name)
            shapes.append(f'<rect x="{x}" y="9" width="12" height="12" fill="{COLORS[kind][1]}"/>'
                          f'<text x="{x + 16}" y="20">{name}</text>')
    for rank, row in enumerate(times):
        y = 30 + 24 * rank
        shapes.append(f'<text x="12" y="{y + 16}">rank {rank}</text>')
        for (kind, stage, k), start, end in row:
            x, w, pale = 60 + start * scale, (end - start) * scale, 2 / (2 + stage // P)
            shapes.append(f'<rect x="{x:.2f}" y="{y + 2}" width="{w:.2f}" height="20" '
                          f'stroke="white" fill="{COLORS[kind][1]}" opacity="{pale:.2f}"/>')
            size = min(11, 1.5 * w / len(str(k)))
            shapes.append(f'<text x="{x + w / 2:.2f}" y="{y + 16}" font-size="{size:.1f}" '
                          f'text-anchor="middle">{k}</text>')
    return page(title, shapes, 1220, 40 + 24 * P, title_y=20)


def legend_places(names):
    """Where each entry of a legend begins, in the line of the vertical axis' name."""
    wide = [60 + 7 * len(name) for name in names]
    return list(accumulate(wide, initial=min(200, WIDTH - sum(wide))))[:-1]


def curves_svg(series, title, x_name, y_name, x_ticks, y_ticks, log=False):
    """series: {name: [(x, y)]}. Later lines are narrower, so that equal ones can all be seen."""
    to = math.log10 if log else float
    x0, x1, y0, y1 = (to(end) for ticks in (x_ticks, y_ticks) for end in (ticks[0], ticks[-1]))

    def left(x):
        return round(60 + (to(x) - x0) / (x1 - x0) * (WIDTH - 85), 1)

    def down(y):
        return round(HEIGHT - 45 - (to(y) - y0) / (y1 - y0) * (HEIGHT - 115), 1)

    shapes = [f'<text x="{left(x)}" y="{HEIGHT - 28}" text-anchor="middle">{x}</text>'
              for x in x_ticks]
    shapes += [f'<path d="M60,{down(y)} H{WIDTH - 25}" stroke="#ddd"/>'
               f'<text x="52" y="{down(y) + 4}" text-anchor="end">{y}</text>' for y in y_ticks]
    shapes.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_name}</text>'
                  f'<text x="12" y="52">{y_name}</text>')
    narrower = 3.8 / max(1, len(series) - 1)
    for i, (at, (name, points)) in enumerate(zip(legend_places(series), series.items(),
                                                 strict=True)):
        wide = 2 if log else round(5 - narrower * i, 2)
        style = f'stroke="{LINES[i % len(LINES)]}" stroke-width="{wide}"'
        path = " ".join(f"{left(x)},{down(y)}" for x, y in points)
        shapes.append(f'<polyline points="{path}" fill="none" {style}/>'
                      f'<path d="M{at},48 h24" {style}/>'
                      f'<text x="{at + 30}" y="52">{escape(name)}</text>')
    return page(title, shapes)


def bars_svg(bars, title, unit, limit=None):
    """bars: {name: {part: value}}, the parts of a bar on top of one another and their sum above it.
    limit: (name, value) of a line across all bars."""
    totals = {name: sum(parts.values()) for name, parts in bars.items()}
    top = max([*totals.values(), limit[1] if limit else 0])
    power = 10 ** math.floor(math.log10(top / 5))
    tick = next(n * power for n in (1, 2, 5, 10) if 5 * n * power >= top)
    right = WIDTH - (120 if limit else 25)
    slot = (right - 60) / len(bars)

    def down(y):
        return round(HEIGHT - 45 - y / (tick * math.ceil(top / tick)) * (HEIGHT - 115), 1)

    shapes = [f'<path d="M60,{down(y)} H{right}" stroke="#ddd"/>'
              f'<text x="52" y="{down(y) + 4}" text-anchor="end">{y:,g}</text>'
              for y in (tick * i for i in range(math.ceil(top / tick) + 1))]
    shapes.append(f'<text x="12" y="52">{unit}</text>')
    kinds = list(dict.fromkeys(part for parts in bars.values() for part in parts))
    for i, (at, part) in enumerate(zip(legend_places(kinds), kinds, strict=True)):
        shapes.append(f'<rect x="{at + 12}" y="42" width="12" height="12" fill="{LINES[i]}"/>'
                      f'<text x="{at + 30}" y="52">{part}</text>')
    names = []
    for i, (name, parts) in enumerate(bars.items()):
        middle, below = round(60 + (i + 0.5) * slot, 1), 0
        for part, value in parts.items():
            shapes.append(f'<rect x="{middle - 24:.1f}" y="{down(below + value)}" width="48" '
                          f'height="{down(below) - down(below + value):.1f}" '
                          f'fill="{LINES[kinds.index(part)]}"/>')
            below += value
        total = f"{below:,.0f}" if below >= 100 else f"{below:.3g}"
        names.append(f'<text x="{middle}" y="{down(below) - 5:.1f}" text-anchor="middle" '
                     f'stroke="white" stroke-width="3" paint-order="stroke">{total}</text>'
                     f'<text x="{middle}" y="{HEIGHT - 28}" '
                     f'text-anchor="middle">{escape(name)}</text>')
    if limit:
        shapes.append(f'<path d="M60,{down(limit[1])} H{right}" stroke="#c22" '
                      'stroke-dasharray="6 3"/>'
                      f'<text x="{right + 6}" y="{down(limit[1]) + 4}" fill="#c22">'
                      f'{escape(limit[0])}</text>')
    return page(title, shapes + names)


def grid_svg(groups, title):
    """groups: {axis: its groups of ranks}, of three axes, the outermost first: that one goes from
    block to block, the next one down, the innermost across. All ranks are drawn once for each axis;
    those of one group have one color, and the legend below lists them."""
    place = {axis: {rank: i for ranks in rows for i, rank in enumerate(ranks)}
             for axis, rows in groups.items()}  # of each rank on the axis
    first, second, third = groups
    D, P, T = (1 + max(of_rank.values()) for of_rank in place.values())
    block, bottom = 40 * T + 16, 94 + 40 * P
    panel, shapes = max(D * block + 44, 200), []
    for n, (axis, rows) in enumerate(groups.items()):
        corner = 50 + n * panel
        labels = [(corner + d * block + 20 * T - 2, 68, f"{first[0]}={d}") for d in range(D)]
        labels += [(corner + d * block + 40 * t + 18, 86, f"{third[0]}={t}")
                   for d in range(D) for t in range(T)]
        labels += [(corner - 20, 117 + 40 * p, f"{second[0]}={p}") for p in range(P)]
        shapes.append(f'<text x="{corner}" y="46" font-weight="bold">groups along {axis}</text>')
        shapes += [f'<text x="{x}" y="{y}" text-anchor="middle">{text}</text>'
                   for x, y, text in labels]
        for i, ranks in enumerate(rows):
            color, y = LINES[i % len(LINES)], bottom + 14 + 20 * i
            shapes.append(f'<rect x="{corner}" y="{y}" width="12" height="12" fill="{color}"/>'
                          f'<text x="{corner + 20}" y="{y + 11}">ranks '
                          f'{", ".join(map(str, ranks))}</text>')
            for rank in ranks:
                x = corner + block * place[first][rank] + 40 * place[third][rank]
                y = 94 + 40 * place[second][rank]
                shapes.append(f'<rect x="{x}" y="{y}" width="36" height="36" rx="4" '
                              f'fill="{color}"/><text x="{x + 18}" y="{y + 24}" fill="white" '
                              f'font-size="16" text-anchor="middle">{rank}</text>')
    most = max(map(len, groups.values()))
    return page(title, shapes, 50 + 3 * panel, bottom + 20 + 20 * most)


def numbers(text):
    return tuple(int(x) if x.is_integer() else x for x in map(float, text.split(",")))


def schedules_command():
    """The command line of pipeline.py."""
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
    chunks = args.chunks or (2 if args.schedule == "interleaved" else 1)
    P, m, wanted = args.P, args.m, {args.schedule: chunks}  # name -> chunks
    if args.compare:
        wanted = {**dict.fromkeys(schedules.SCHEDULES, 1), "interleaved": max(2, chunks)}
    for name, v in wanted.items():
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
            print(schedule_text(timeline.times, width, color=sys.stdout.isatty()))
            cuts = sum(a != b for a, b in pairwise(where))
            print(f"{cuts} boundaries between ranks; each carries {m} activations and {m} gradients"
                  " of b S C elements, for microbatches of b sequences")
        formula = schedules.closed_form(name, P, m, v, args.costs)
        formula = "     -" if formula is None else f"{formula:6.2%}"
        chunks = f" of 1/{len(where) // P} rank each" if len(where) > P else ""
        print(f"{name:11}  makespan {timeline.makespan:<8.6g} bubble {timeline.bubble:6.2%}  "
              f"formula {formula}  in flight {timeline.peak_in_flight}{chunks}")
