"""Exercise 13: interleaved 1F1B. A rank has v stages (chunks): "Fb" is a forward of chunk 1.
P microbatches go through chunk 0, then the same P through chunk 1, ..., then the next P; backwards
likewise, from the last chunk to the first; m is a multiple of P. How many forwards warm up? P for
each chunk but the last; and twice as many as in 1F1B, so that messages may take time.
"""

from schedules import letter, weave


def interleaved(P, m, v, rank):
    """weave(forwards, backwards, num_warmup) is 1F1B of two lists: num_warmup forwards, a forward
    and a backward in turn, the backwards that are left. If v = 1, warm up like 1F1B, once.

    P = 2, v = 2, m = 2:   rank 0  Fa Fa Fb Fb Bb Bb Ba Ba
                           rank 1  Fa Fa Fb Bb Fb Bb Ba Ba"""
    raise NotImplementedError
