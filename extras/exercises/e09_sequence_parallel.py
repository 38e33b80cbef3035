"""Exercise 9: sequence parallelism. Between its matrices each of T ranks has S/T of the tokens. In
the place of f stands gather_tokens: this rank's tokens -> all tokens. In the place of g stands
scatter_tokens: partial sums of all tokens -> the sum for this rank's tokens. The backward of one
is the forward of the other. The collectives cut a contiguous tensor, flattened, into T chunks: if
its shape is (T, ...), chunk t is its entry t.
"""

from collectives import WithBackward, all_gather, reduce_scatter


def gather_tokens(x, group):
    """(B, S/T, C) -> (B, S, C). Two ranks with tokens [[a]] and [[b]]: both get [[a b]]. Backward:
    both have a gradient of a and b; rank 0 gets the sum of both gradients of a."""
    raise NotImplementedError


def scatter_tokens(x, group):
    """(B, S, C), partial sums -> (B, S/T, C). Two ranks with [[1 2]] and [[10 20]]: rank 0 gets
    [[11]], rank 1 gets [[22]]. Backward: each rank gets the gradients of all tokens."""
    raise NotImplementedError
