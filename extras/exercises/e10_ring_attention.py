"""Exercise 10: attention over a sequence that N ranks share. zigzag gives each rank two of 2N
segments, an early one and a late one, so that under the causal mask all ranks compute as much.
ring_attention: queries stay, keys and values go around the ring (pass_on: one hop, with its
backward). Softmax needs all keys, so keep sum(exp(score) v) and sum(exp(score)) apart, relative to
the largest score so far: when a larger score comes, multiply both sums by exp(old - new)."""

import math

import torch

from context_parallel import pass_on


def zigzag(S, size, rank):
    """Positions (a tensor) of a rank's tokens. S = 8: rank 0 of 2 has 0 1 6 7, rank 1 has 2 3 4 5.
    """
    raise NotImplementedError


def ring_attention(q, k, v, group):
    """q, k, v: (B, nh, S/N, hs), of this rank's tokens. Returns attention over all S tokens for
    this rank's queries, (B, nh, S/N, hs). Scores are q @ k.mT / sqrt(hs); no token attends to a
    later token. pass_on(x, group) sends x to the next rank and returns the previous rank's x.

    A query that has met scores 0 and 0 with values 1 and 3, and then a score log 2 with value 7:
    the sums are 4 and 2, largest 0; then 4/2 + 7 = 9 and 2/2 + 1 = 2, largest log 2: result 4.5."""
    raise NotImplementedError
