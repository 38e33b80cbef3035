"""Tables for a terminal."""


def table(title, rows):
    """Text: rows of cells below a title, each column as wide as its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [title]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells))
    return "\n".join(lines)
