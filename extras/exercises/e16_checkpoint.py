"""Exercise 16: a checkpoint for any layout. A file has the full tensor, flattened. A rank holds a
slice of it (tag.ranges of dim tag.dim), and writes or reads elements [start, stop) of its flattened
slice (its chunk under ZeRO). Where in the file do they lie? Yield contiguous runs, as long as
possible: then any layout can read what any other wrote.
"""


def runs(tag, start, stop):
    """Yields (index in the full tensor, index counted from `start`, length), in order. tag.shape:
    shape of the full tensor; tag.ranges: ((begin, end), ...) along tag.dim, in order, without end.

    Shape (2, 6), dim 1, ranges ((1, 3),): the slice holds elements 1 2 7 8 of the full tensor, so
    runs(tag, 1, 4) yields (2, 0, 1), then (7, 1, 2). A row: the elements that share all indexes
    before dim; there are tag.shape[: tag.dim].numel() rows."""
    raise NotImplementedError
