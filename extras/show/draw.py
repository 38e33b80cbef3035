"""Timelines for a terminal; charts and timelines as SVG, on a transparent background; and the
command line that shows schedules.

    python -m extras.show schedules 1f1b 4 8 --svg schedule.svg
    python -m extras.show.pictures --svg docs/pictures --metrics one.jsonl eight.jsonl
"""

import json
import math
import shutil
from html import escape
from pathlib import Path

import schedules
from run.config import Parser
from run.files import refuse_foreign
from schedules import make_schedule, simulate, validate

# Colors of actions
COLORS = {"F": "#6aa0e8", "B": "#6cc08b", "I": "#6cc08b", "W": "#e8b04a"}
LEGEND = {"F": "blue: forward", "B": "green: backward", "I": "green: gradient of the input",
          "W": "yellow: gradient of the weights"}
# Colors of curves, and of arrows
CURVES = ("#2f6fd0", "#d9822b", "#2f9e5f", "#b0408f", "#1aa3b5", "#777777")
INK, GRID = "#7d7d7d", "#80808050"  # visible on a white page and on a dark one
LEFT, RIGHT, TOP, BOTTOM = 60, 570, 70, 310  # the edges of a chart's plot, in pixels


class Picture:
    """Collects shapes; str() is an SVG file. x goes right, y down, in pixels."""

    def __init__(self, title, width=720, height=360):
        self.shapes = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                       'font-size="12" font-family="sans-serif">']
        self.text(12, 22, title, style='font-size="14" font-weight="bold"')

    def text(self, x, y, words, anchor="start", color=INK, style=""):
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" '
                           f'{style}>{escape(str(words))}</text>')

    def box(self, x, y, width, height, color, style=""):
        self.shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                           f'height="{height:.1f}" fill="{color}" {style}/>')

    def line(self, points, color, style=""):
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" {style}/>')

    def arrow(self, start, end, color=INK):
        """A line from point to point, with a head at its end."""
        (x, y), (to_x, to_y) = start, end
        length = math.dist(start, end)
        across, down = (to_x - x) / length, (to_y - y) / length  # one pixel along the arrow
        foot_x, foot_y = to_x - 7 * across, to_y - 7 * down  # here the head begins
        self.line([start, (foot_x, foot_y)], color, 'stroke-width="1.6"')
        head = [end, (foot_x - 3.5 * down, foot_y + 3.5 * across),
                (foot_x + 3.5 * down, foot_y - 3.5 * across)]
        self.shapes.append('<polygon points="{}" fill="{}"/>'.format(
            " ".join(f"{x:.1f},{y:.1f}" for x, y in head), color))

    def __str__(self):
        return "\n".join([*self.shapes, "</svg>\n"])


# ---- schedules ----
# times: Timeline.times of schedules.py, per rank [(action, start, end)]


LETTERS = """\
F0: forward of microbatch 0. B0: its backward; or its halves, I0 for the gradient of the input, W0
for those of the weights. Lower case: a rank's second chunk. Dashes: the action goes on. Dots: the
rank waits."""


def schedule_text(times, width=160):
    """One row per rank, time from left to right, cut at the width. LETTERS explains it."""
    entries = [entry for row in times for entry in row]  # (action, start, end)
    last_end = max(end for _, _, end in entries)
    shortest = min(end - start for _, start, end in entries)
    # A column is a character. The shortest action has room for its name and a space
    widest_name = 1 + max(len(str(action.microbatch)) for action, _, _ in entries)
    columns_per_time = (widest_name + 1) / shortest
    rows = []
    for rank, row in enumerate(times):
        line = f"rank {rank:<3}"
        drawn = 0  # columns of time in the line so far
        for (kind, stage, k), start, end in row:
            left, right = round(start * columns_per_time), round(end * columns_per_time)
            chunk = stage // len(times)
            name = kind.lower() if chunk % 2 else kind
            line += "." * (left - drawn)
            # "F3--- ": of 6 columns the first 5 are filled with dashes, the last is a space
            line += f"{name}{k}".ljust(right - left - 1, "-").ljust(right - left)
            drawn = right
        line += "." * (round(last_end * columns_per_time) - drawn)
        rows.append(line if len(line) <= width else line[:width - 3] + "...")
    return "\n".join(rows)


def schedule_svg(times, title):
    """The timelines of schedule_text as SVG; later chunks are paler."""
    left, right, row_height = 60, 940, 26
    last_end = max(end for row in times for _, _, end in row)
    pixels_per_time = (right - left) / last_end
    picture = Picture(title, right + 12, 76 + row_height * len(times))
    for rank, row in enumerate(times):
        y = 36 + row_height * rank
        picture.text(12, y + 16, f"rank {rank}")
        for (kind, stage, k), start, end in row:
            x = left + start * pixels_per_time
            wide = (end - start) * pixels_per_time
            chunk = stage // len(times)
            picture.box(x, y, wide - 1, 22, COLORS[kind], f'opacity="{2 / (2 + chunk):.2f}"')
            font_size = min(12, 1.5 * wide / len(str(k)))
            picture.text(x + wide / 2, y + 15, k, "middle", "#222", f'font-size="{font_size:.1f}"')
    kinds = {action.kind for row in times for action, *_ in row}
    words = [meaning for kind, meaning in LEGEND.items() if kind in kinds]
    if any(action.stage >= len(times) for row in times for action, *_ in row):
        words.append("paler: later chunks")
    picture.text(left, 60 + row_height * len(times), "; ".join(words))
    return str(picture)


# ---- curves ----


def scale(ticks, low, high):
    """A function from values to pixels: the first tick lies at low, the last at high."""
    first, last = ticks[0], ticks[-1]
    return lambda value: round(low + (value - first) / (last - first) * (high - low), 1)


def difference_strip(picture, points, title, across):
    """Draw points [(x, y)] below a chart, on a scale of their own with 0 in its middle. across: the
    chart's function from x to pixels."""
    largest = max(abs(y) for _, y in points)
    top, middle, bottom = BOTTOM + 80, BOTTOM + 105, BOTTOM + 130
    limit = largest or 1  # if all y are 0, any scale will do
    down = scale((-limit, limit), bottom, top)
    picture.text(12, top - 16, f"{title}, at most {largest:.2g}")
    for y, tick in ((top, f"{largest:.2g}"), (middle, "0"), (bottom, f"{-largest:.2g}")):
        picture.line([(LEFT, y), (RIGHT, y)], GRID)
        picture.text(LEFT - 8, y + 4, tick, "end")
    picture.line([(across(x), down(y)) for x, y in points], CURVES[0])


def curves_svg(curves, title, x_name, y_name, x_ticks, y_ticks, raw=None, difference=None):
    """A chart as SVG. curves: {name: [(x, y)]}; a curve that coincides with an earlier one is
    dashed. raw: {name: [(x, y)]}, drawn pale behind all curves, in the color of that name.
    difference: (title, [(x, y)]), drawn in a strip below the chart."""
    picture = Picture(title, height=460 if difference else 360)
    across, down = scale(x_ticks, LEFT, RIGHT), scale(y_ticks, BOTTOM, TOP)
    colors = dict(zip(curves, CURVES, strict=False))
    picture.text(12, 52, y_name)
    for tick in y_ticks:
        picture.line([(LEFT, down(tick)), (RIGHT, down(tick))], GRID)
        picture.text(LEFT - 8, down(tick) + 4, f"{tick:,g}", "end")
    for tick in x_ticks:
        picture.text(across(tick), BOTTOM + 18, tick, "middle")
    picture.text((LEFT + RIGHT) / 2, BOTTOM + 42, x_name, "middle")
    for name, points in (raw or {}).items():
        picture.line([(across(x), down(y)) for x, y in points], colors[name],
                     'stroke-width="0.7" opacity="0.35"')
    drawn = []  # the curves so far, in pixels
    names = []  # (y of the curve's right end, name)
    for name, points in curves.items():
        pixels = [(across(x), down(y)) for x, y in points]
        coincides = any(all(math.dist(a, b) < 1 for a, b in zip(pixels, other, strict=False))
                        for other in drawn)
        dashes = ' stroke-dasharray="7 7"' if coincides else ""
        picture.line(pixels, colors[name], 'stroke-width="2"' + dashes)
        drawn.append(pixels)
        names.append((pixels[-1][1], name))
    y = math.inf  # y of the name written last. Names are written from the bottom of the page up
    for end, name in sorted(names, reverse=True):
        y = min(end, y - 15)  # at the curve's end, or 15 pixels above the last name
        picture.line([(RIGHT, end), (RIGHT + 10, y)], colors[name])
        picture.text(RIGHT + 14, y + 4, name, color=colors[name])
    if difference:
        difference_strip(picture, difference[1], difference[0], across)
    return str(picture)


# ---- the command schedules ----

FIGURES = """\
Makespan: time of a step. The bubble is the share of it in which the slowest rank waits. In flight:
microbatches whose activations rank 0, 1, ... holds at most."""


def time_schedule(name, P, m, v, costs):
    """The Timeline of a schedule. Raises ValueError, one line, if there is no such schedule, or if
    its lists are not valid."""
    lists = make_schedule(name, P, m, v)
    where = schedules.placement(name, P, v)
    validate(lists, where)
    return simulate(lists, where, costs)


def in_flight(timeline, v):
    """How much each rank holds at most, in words. peak_in_flight counts pairs of a stage and a
    microbatch: a pair holds the activations of one stage, 1/v of the rank's layers."""
    share = f", each in 1/{v} of a rank's layers" if v > 1 else ""
    return f"in flight {timeline.peak_in_flight}{share}"


def line_of_figures(name, P, m, v, costs, timeline):
    """A schedule's figures, in one line."""
    bubble = schedules.closed_form(name, P, m, v, costs)
    formula = "     -" if bubble is None else f"{bubble:6.2%}"
    return (f"{name:11}  makespan {timeline.makespan:<8.6g} bubble {timeline.bubble:6.2%}  "
            f"formula {formula}  {in_flight(timeline, v)}")


def compare(P, m, asked, costs):
    """Yields lines of text: the figures of every schedule, and what they are. asked: the value of
    --chunks, for schedules without a number of their own. Raises ValueError for wrong arguments;
    but a schedule in rounds that m does not fit is skipped, and its line says why."""
    if asked < 0:
        raise ValueError(f"--chunks {asked} must be at least 1")
    for name, declared in schedules.SCHEDULES.items():
        try:
            v = schedules.chunks_of(name, 0 if declared.chunks else asked)
            yield line_of_figures(name, P, m, v, costs, time_schedule(name, P, m, v, costs))
        except ValueError as error:
            if not declared.in_rounds:
                raise
            yield f"{name:11}  skipped: {error}"
    yield FIGURES


def shown(args):
    """The lines to print for these flags; also writes the file of --svg. Raises ValueError for
    wrong arguments, OSError for a file that cannot be written."""
    if args.compare:
        return list(compare(args.P, args.m, args.chunks, args.costs))
    name, P, m = args.schedule, args.P, args.m
    v = schedules.chunks_of(name, args.chunks)
    timeline = time_schedule(name, P, m, v, args.costs)
    if args.svg:
        title = f"{name}: {P} ranks, {m} microbatches, bubble {timeline.bubble:.1%}"
        # ValueError if this file exists and does not begin like an SVG: it may be the user's own
        refuse_foreign("--svg", args.svg, "<svg ")
        Path(args.svg).write_text(schedule_svg(timeline.times, title))
    if args.json:
        numbers = timeline._asdict()
        del numbers["times"]
        return [json.dumps(numbers)]
    width = min(160, shutil.get_terminal_size((120, 24)).columns)
    return [schedule_text(timeline.times, width),
            line_of_figures(name, P, m, v, args.costs, timeline), LETTERS, FIGURES]


def schedules_command(words):
    """schedules 1f1b 4 8: the timeline of a schedule, and its figures."""
    parser = Parser(schedules.__doc__)
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
    args = parser.parse_args(words)
    if args.P * args.m > 10**6:
        parser.error(f"{args.P} ranks x {args.m} microbatches are more than a million actions")
    try:
        lines = shown(args)
    except (ValueError, OSError) as error:
        parser.error(error)
    print(*lines, sep="\n")
