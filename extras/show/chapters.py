"""The drawings of three chapters: who holds what, and who sends what.

    zero.svg    docs/data-parallelism.md      model states on four ranks, under each stage of ZeRO
    mlp.svg     docs/tensor-parallelism.md    one MLP on two ranks, and where they send
    way.svg     docs/pipelines.md             the way of one microbatch through four stages

    python -m extras.show.pictures --svg docs/pictures        writes all three
"""

from extras.show.draw import COLORS, CURVES, INK, Picture
from schedules import cut, make_schedule, simulate
from sizes import GPTConfig, bytes_per_parameter

BLUE, GREEN, YELLOW = COLORS["F"], COLORS["B"], COLORS["W"]
ORANGE = CURVES[1]
TO_NEXT, BACK = CURVES[0], CURVES[2]  # arrows of activations, and of gradients
DARK = "#222"  # words in a coloured box
HELD = f'stroke="{INK}" stroke-width="0.8"'
ELSEWHERE = f'stroke="{INK}" stroke-width="0.8" stroke-dasharray="2 3"'  # held by another rank
BOLD = 'font-weight="bold"'
SMALL = 'font-size="11"'
PARTS = {"weights": BLUE, "gradients": GREEN, "AdamW's states": YELLOW}  # model states
SHARDED = ("nothing: DDP", "AdamW's states", "gradients, too", "weights, too")  # by ZeRO stage


# ---- docs/data-parallelism.md ----


def held_by_rank(picture, x, y, width, rank, ranks, stage):
    """Draw a cell: the model states of one rank. Across: the parameters; down: their bytes."""
    whole = bytes_per_parameter(0, ranks)
    held = bytes_per_parameter(stage, ranks)
    for color, bytes_of_all, bytes_here in zip(PARTS.values(), whole, held, strict=True):
        height = 4.5 * bytes_of_all  # pixels
        if bytes_here == bytes_of_all:
            picture.box(x, y, width, height, color, HELD)
        else:  # the rank holds its own chunk
            picture.box(x, y, width, height, "none", ELSEWHERE)
            picture.box(x + rank * width / ranks, y, width / ranks, height, color, HELD)
        y += height


def zero_svg(ranks=4):
    """Who holds what of the model states, under each stage of ZeRO."""
    picture = Picture(f"Model states on {ranks} ranks, 16-bit training with AdamW", 720, 482)
    left, width, gap = 118, 96, 16  # the cells, in pixels
    right = left + ranks * (width + gap)
    for rank in range(ranks):
        picture.text(left + rank * (width + gap) + width / 2, 52, f"rank {rank}", "middle")
    picture.text(right, 52, "bytes per parameter")
    for stage in range(4):
        y = 64 + 92 * stage
        picture.text(12, y + 32, f"ZeRO-{stage}", style=BOLD)
        picture.text(12, y + 48, SHARDED[stage], style=SMALL)
        for rank in range(ranks):
            held_by_rank(picture, left + rank * (width + gap), y, width, rank, ranks, stage)
        held = bytes_per_parameter(stage, ranks)
        terms = " + ".join(f"{part:g}" for part in held)
        picture.text(right, y + 40, f"{terms} = {sum(held):g}")
    y = 440
    for i, (name, color) in enumerate([*PARTS.items(), ("on another rank", "none")]):
        x = left + i * (width + gap + 18)
        picture.box(x, y, 12, 12, color, HELD if color != "none" else ELSEWHERE)
        picture.text(x + 18, y + 10, name)
    picture.text(left, y + 34, "Across a cell: the parameters, first to last. Down: their bytes.")
    return str(picture)


# ---- docs/tensor-parallelism.md ----


def matrix(picture, x, y, width, height, color, words, half=None):
    """Draw a box with words, its middle line at y. half: (rank, "left-right" or "upper-lower") if
    the rank holds one half only."""
    top = y - height / 2
    if half:
        rank, way = half
        picture.box(x, top, width, height, "none", ELSEWHERE)
        if way == "left-right":
            width /= 2
            x += rank * width
        else:
            height /= 2
            top += rank * height
    picture.box(x, top, width, height, color, HELD)
    picture.text(x + width / 2, top + height / 2 + 4, words, "middle", DARK, SMALL)


def mlp_svg():
    """One MLP on two ranks: a column, then a row, and the two places where the ranks send."""
    picture = Picture("One MLP on two ranks: column, GELU, row; messages at f and g only", 720, 420)
    lanes = [118, 262]  # y of each rank's middle line
    for rank, y in enumerate(lanes):
        picture.text(12, y + 4, f"rank {rank}", style=BOLD)
        matrix(picture, 76, y, 40, 32, BLUE, "x")
        picture.arrow((120, y), (166, y))
        matrix(picture, 170, y, 128, 40, YELLOW, "columns", (rank, "left-right"))
        picture.arrow((302, y), (328, y))
        matrix(picture, 332, y, 128, 32, BLUE, "units", (rank, "left-right"))
        picture.arrow((464, y), (488, y))
        matrix(picture, 492, y, 40, 128, YELLOW, "rows", (rank, "upper-lower"))
        picture.arrow((536, y), (554, y))
        matrix(picture, 558, y, 40, 32, GREEN, "part")
        picture.arrow((602, y), (650, y))
        matrix(picture, 654, y, 40, 32, BLUE, "y")
    for x, name in ((143, "f"), (626, "g")):
        picture.line([(x, 72), (x, 308)], ORANGE, 'stroke-width="3"')
        picture.text(x, 64, name, "middle", ORANGE, 'font-size="16" font-weight="bold"')
    shapes = {96: "(S, C)", 234: "W1^T (C, 4C)", 396: "h (S, 4C)", 512: "W2^T (4C, C)",
              578: "(S, C)", 674: "(S, C)"}
    for x, words in shapes.items():
        picture.text(x, 346, words, "middle", style=SMALL)
    picture.text(12, 376, "forward")
    picture.arrow((76, 372), (116, 372))
    picture.text(136, 376, "f: no message")
    picture.text(694, 376, "g: all-reduce, the sum of the parts", "end", style=BOLD)
    picture.text(12, 402, "backward")
    picture.arrow((116, 398), (76, 398))
    picture.text(136, 402, "f: all-reduce, the sum of the gradients of x", style=BOLD)
    picture.text(694, 402, "g: no message", "end")
    return str(picture)


# ---- docs/pipelines.md ----


def names_of(start, stop, num_layers):
    """Layers [start, stop) of the model, in words."""
    blocks = min(stop, num_layers - 1) - max(start, 1)
    words = ["embedding"] if start == 0 else []
    words.append(f"{blocks} block{'s' if blocks > 1 else ''}")
    if stop == num_layers:
        words.append("head")
    return ", ".join(words)


def way_svg(P=4, m=4, followed=1):
    """The way of one microbatch through 1F1B, and its messages. Other microbatches are pale."""
    # vocab_size 1024, block_size 128, n_layer 6, n_head 4, n_embd 128
    costs = GPTConfig(1024, 128, 6, 4, 128).layer_costs()
    times = simulate(make_schedule("1f1b", P, m), range(P)).times  # per rank [(action, start, end)]
    left, right, row_height = 150, 706, 62
    last_end = max(end for row in times for _, _, end in row)
    scale = (right - left) / last_end
    bottom = 48 + row_height * P
    picture = Picture(f"The way of microbatch {followed}: 1F1B, {P} ranks, {m} microbatches", 720,
                      bottom + 46)
    spans = {}  # (kind, stage) -> left and right end of the followed microbatch's action
    for rank, (row, stage_cut) in enumerate(zip(times, cut(costs, P), strict=True)):
        y = 48 + row_height * rank
        picture.text(12, y + 13, f"rank {rank}: stage {rank}", style=BOLD)
        picture.text(12, y + 28, names_of(*stage_cut, len(costs)), style=SMALL)
        for (kind, stage, k), start, end in row:
            x = left + start * scale
            width = (end - start) * scale
            if k == followed:
                spans[kind, stage] = x, x + width
                opacity, ink = 1, DARK
            else:
                opacity, ink = 0.3, INK
            picture.box(x, y, width - 1.5, 30, COLORS[kind], f'opacity="{opacity}"')
            picture.text(x + width / 2, y + 19, f"{kind}{k}", "middle", ink)
    for stage in range(P - 1):
        upper = 48 + row_height * stage + 31  # the space between two rows
        lower = upper + row_height - 32
        picture.arrow((spans["F", stage][1] - 3, upper), (spans["F", stage + 1][0] + 4, lower),
                      TO_NEXT)
        picture.arrow((spans["B", stage + 1][1] - 3, lower), (spans["B", stage][0] + 4, upper),
                      BACK)
    picture.text(left, bottom + 6,
                 "Time goes right. A backward takes as long as two forwards; gaps are the bubble.")
    picture.arrow((left, bottom + 26), (left + 30, bottom + 26), TO_NEXT)
    picture.text(left + 38, bottom + 30, "activation (B, S, C), to the next stage")
    picture.arrow((left + 290, bottom + 26), (left + 320, bottom + 26), BACK)
    picture.text(left + 328, bottom + 30, "its gradient, back")
    return str(picture)


DRAWINGS = {"zero.svg": zero_svg, "mlp.svg": mlp_svg, "way.svg": way_svg}
