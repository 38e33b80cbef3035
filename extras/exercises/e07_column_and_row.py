"""Exercise 7: a linear layer y = x W^T + b split over T ranks. Column: each rank has some rows of W
(columns of W^T) and of b; whole x in, a slice of y out; f(x, group) comes before W. Row: each rank
has some columns of W; a slice of x in, whole y out; g(partial, group) sums the partial sums.
split(parameter, dim, group, parts) of shard.py returns this rank's slice; None if there is no bias.
"""

import torch.nn as nn
import torch.nn.functional as F

from shard import split


class Column(nn.Module):
    """parts: if W is several matrices in one, such as q, k and v, the rows of each: split each of
    them. linear.bias may be None (lm_head has none). Two ranks, W = [[1], [2], [3], [4]], parts
    (2, 2): rank 0 has [[1], [3]], rank 1 has [[2], [4]]."""

    def __init__(self, linear, group, f, parts=()):
        super().__init__()
        raise NotImplementedError  # self.weight and self.bias

    def forward(self, x):  # (B, S, in) -> (B, S, out/T)
        raise NotImplementedError


class Row(nn.Module):
    """Two ranks, W = [[1, 2]], b = [10], x = [3, 4]: rank 0 has W = [[1]] and x = [3], rank 1 has
    [[2]] and [4]. The partial sums are 3 and 8; y = 21 on both. The bias is whole on both."""

    def __init__(self, linear, group, g):
        super().__init__()
        raise NotImplementedError

    def forward(self, x):  # (B, S, in/T) -> (B, S, out)
        raise NotImplementedError
