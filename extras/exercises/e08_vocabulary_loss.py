"""Exercise 8: cross-entropy whose logits are split by words. Rank t has the logits of its words
[start, stop). Return the sum over tokens of log(sum(exp(logits))) - logits[target], the same on
all ranks: they may all-reduce three numbers per token, never the logits. exp can overflow, so
subtract the largest logit of all words first. Targets of ABSENT are padding: they add nothing.
"""

from collectives import all_reduce, maximum
from model import ABSENT
from tensor_parallel import sum_over_ranks, to_local


def vocabulary_loss(logits, targets, words, group):
    """logits (B, S, V/T), targets (B, S), words = (start, stop). Returns a number with a backward.

    Two ranks, one token: logits [0 0] and [0 0], target 3: each rank's sum of exp is 2, the logit
    of word 3 is on rank 1; the loss is log(4) - 0. Given: all_reduce(x, group, maximum), in place,
    without a backward; sum_over_ranks(x, group), with a backward; to_local(ids, start, stop), which
    returns each id's index in this rank's slice, and a mask of the ids outside of the slice."""
    raise NotImplementedError
