"""Pictures of schedules: text for a terminal, SVG for a page, and the command line that shows them.

    python pipeline.py 1f1b 4 8 --svg schedule.svg
"""

import argparse
import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import schedules

COLORS = {"F": (44, "#6aa0e8"), "B": (42, "#6cc08b"), "I": (42, "#6cc08b"), "W": (43, "#e8b04a")}


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
    """The same as SVG, with a legend; later chunks are paler. The ground is white, so that it reads
    the same on a dark page."""
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
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1220 {40 + 24 * P}" '
            'font-size="12" font-family="sans-serif" fill="#222">\n'
            f'<rect width="1220" height="{40 + 24 * P}" rx="6" fill="white"/>\n'
            f'<text x="12" y="20" font-size="14" font-weight="bold">{title}</text>')
    return "\n".join([head, *shapes, "</svg>\n"])


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
    parser.add_argument("--chunks", type=int, default=1, metavar="v", help="stages per rank")
    parser.add_argument("--costs", type=numbers, default=(1, 1, 1, 0), metavar="F,I,W,comm")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--compare", action="store_true", help="every schedule, one line each")
    output.add_argument("--json", action="store_true", help="print the figures only")
    output.add_argument("--svg", metavar="FILE", help="write the picture there as well")
    args = parser.parse_args()
    P, m, wanted = args.P, args.m, {args.schedule: args.chunks}  # name -> chunks
    if args.compare:
        wanted = {**dict.fromkeys(schedules.SCHEDULES, 1), "interleaved": max(2, args.chunks)}
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
