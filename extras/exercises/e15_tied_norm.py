"""Exercise 15: the tied matrix, and the global norm. tie_ends: the first and the last stage hold
one matrix, the embedding's and the head's; each stage has a term of its gradient. Write into its
tag that the terms are summed over both stages, and that both hold the matrix. square: a rank's part
of the squared norm of all gradients. train.py adds up the parts of all ranks and takes the root.
Each gradient must count once, although several ranks may hold it.
"""

import torch


def tie_ends(all_layers, group):
    """If the matrix is tied, all_layers[0].wte.weight and all_layers[-1].lm_head.weight are one
    Parameter; else there is nothing to do. Its tag, .tag, has two tuples of groups: sum_over and
    shared_by. group: the two stages that hold it. Any other rank is alone in its group, and has
    nothing to do."""
    raise NotImplementedError


def square(grads, holders):
    """A float64 tensor, one number. holders[i]: how many ranks, this one among them, hold grads[i].

    Two ranks with [3] and [4] of one matrix, and both with the same [12] of a LayerNorm: holders
    are 1 and 2. Rank 0 returns 9 + 144 / 2 = 81, rank 1 returns 16 + 144 / 2 = 88; the norm is the
    root of 169, 13."""
    raise NotImplementedError
