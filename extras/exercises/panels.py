"""The picture of python -m extras.exercises break: a panel for each wrong line, with its loss curve
and those of the right runs."""

from extras.exercises.break_it import SMOOTH, running_means, shown_from
from extras.show.draw import CURVES, GRID, INK, Picture, scale

ACROSS = 3  # panels side by side
WIDTH, HEIGHT = 310, 150  # a panel's size in pixels
LOSSES = (2, 3, 4)  # ticks of the vertical axis; a larger loss is drawn at the last tick
WRONG = CURVES[1]  # color of a wrong line's curve


def panels_svg(rows, rights):
    """The picture as SVG text. rows: the Outcomes of break_it.break_all; rights: the losses of each
    row's right runs."""
    down = -(-len(rows) // ACROSS)
    picture = Picture("Fifteen wrong lines (orange), and right runs of eight seeds (grey)",
                      ACROSS * WIDTH + 20, 64 + down * HEIGHT)
    picture.text(12, 42, f"Loss of {len(rows[0].losses)} steps, a running mean of {SMOOTH}. A "
                         "dashed bar: the step from which the curve shows it. Above 4: drawn at 4.")
    for i, (row, right) in enumerate(zip(rows, rights, strict=True)):
        left = 30 + i % ACROSS * WIDTH
        top = 62 + i // ACROSS * HEIGHT
        draw_panel(picture, left, top, f"{i + 1}  {row.line.name}", row.losses, right)
    return str(picture)


def draw_panel(picture, left, top, title, losses, rights):
    """Draw one panel: its title from `top` on, its axes from `left` on. losses: the wrong line's;
    rights: lists of losses, one for each right run."""
    across = scale((1, len(losses)), left, left + WIDTH - 30)
    level = scale(LOSSES, top + HEIGHT - 30, top + 24)

    def pixels(curve):
        return [(across(step), level(min(loss, LOSSES[-1])))
                for step, loss in enumerate(running_means(curve), 1)]

    picture.text(left - 18, top + 10, title, style='font-size="11.5"')
    for tick in LOSSES:
        picture.line([(left, level(tick)), (left + WIDTH - 30, level(tick))], GRID)
        picture.text(left - 4, level(tick) + 4, tick, "end", style='font-size="10"')
    for curve in rights:
        picture.line(pixels(curve), INK, 'stroke-width="1.2" opacity="0.5"')
    picture.line(pixels(losses), WRONG, 'stroke-width="2"')
    shown = shown_from(losses, rights)
    if shown:
        x = across(shown)
        picture.line([(x, level(LOSSES[-1])), (x, level(LOSSES[0]))], WRONG,
                     'stroke-dasharray="3 3"')
        picture.text(x + 5, level(LOSSES[-1]) + 12, f"step {shown}", color=WRONG,
                     style='font-size="10.5"')
