"""Exercise 16: a checkpoint for any layout. A file has the full tensor, flattened. A rank holds a
slice of it (tag.ranges of dim tag.dim), and writes or reads elements [start, stop) of its flattened
slice (its chunk under ZeRO). Where in the file do they lie? Yield contiguous runs, as long as
possible: then any layout can read what any other wrote.
"""


def runs(tag, start, stop):
    """Yields (index in the full tensor, index counted from `start`, length), in order. tag.shape:
    full shape; tag.dim; tag.ranges: [(begin, end), ...] along dim, in order, `end` not included.

    Shape (2, 6), dim 1, ranges ((1, 3),): the slice holds elements 1 2 7 8 of the full tensor, so
    runs(tag, 1, 4) yields (2, 0, 1), then (7, 1, 2). shape[:d].numel() is the number of rows."""
    raise NotImplementedError
