"""Exercise 6: f and g of tensor parallelism. T ranks hold the same x before a column-parallel
matrix, and have one partial sum each after a row-parallel one. f stands before the column: what
does its backward do, if each rank's gradient of x comes from its own slice of the matrix? g stands
after the row: what does its forward do? All ranks then compute the same loss, which counts once.
"""

import torch

from collectives import WithBackward, all_reduce


def copy_to_ranks(x, group):
    """f. Two ranks, x = 5 on both; backward brings 1 on rank 0, 2 on rank 1: the result is 5, and
    the gradient of x is 3 on both. all_reduce works in place, on contiguous tensors. But neither f
    nor g may change x, or the gradient that autograd gives it; and both may be transposed. So
    before an all_reduce: clone(memory_format=torch.contiguous_format)."""
    raise NotImplementedError


def sum_over_ranks(x, group):
    """g. Two ranks with x = 1 and x = 2: the result is 3 on both; backward brings 7 on both, and
    the gradient of x is 7 on both."""
    raise NotImplementedError
