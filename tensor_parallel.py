"""Tensor parallelism: each matrix is split over T ranks.

    matrix W       y = x W^T + b, split                                             W on a rank
    c_attn, c_fc   by columns of W^T: rank t computes some heads or hidden units    (out/T, in)
    c_proj         by rows of W^T: rank t multiplies its part of the input          (out, in/T)
    wte, lm_head   by words (T need not divide V); logits are never gathered        (V/T, C)
    LayerNorm, wpe and the biases of c_proj are replicated.

Sent per rank, block and microbatch: four all-reduces of the activation (two forward, two backward),
4 * 2 (T-1)/T B S C elements. Embedding and head all-reduce one activation each, the loss three
numbers per token.
Held: 1/T of the matrices, and of the activations inside of attention and MLP (between c_attn or
c_fc and the c_proj that follows). Megatron-LM, arXiv 1909.08053.

    python -m extras.show tensor_parallel        a GPT on 4 ranks
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from collectives import WithBackward, all_reduce, maximum
from experts import MixtureOfExperts
from model import ABSENT
from shard import split, tag_replicated

#   x (B, S, C)  ->  column: W1 (4C/T, C)  ->  GELU  ->  row: W2 (C, 4C/T)  ->  sum over ranks
#
#   rank 0   x  [ W1 upper ]   h, left half    [ W2 left  ]   partial y \
#   rank 1   x  [ W1 lower ]   h, right half   [ W2 right ]   partial y /  + = y on both
#
# A hidden unit is a column of W1^T and a row of W2^T. Hidden units do not meet before W2 adds them
# up. So a block's MLP needs one all-reduce forward, after the row (g), and one in backward, of the
# gradient of the column's input (f). Attention is the same, with heads for hidden units.


def sum_of_copy(x, group):
    """The sum of the ranks' x. Works on a copy, because all_reduce works in place."""
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group)


def copy_to_ranks(x, group):
    """Megatron's f. Forward: nothing, all ranks hold x. Backward: every rank used x, so the
    gradient of x is the sum of the ranks' gradients."""
    return WithBackward.apply(x, lambda x: x, lambda grad: sum_of_copy(grad, group))


def sum_over_ranks(x, group):
    """Megatron's g. Forward: the sum of the ranks' partial sums. Backward: nothing. All ranks
    compute the same loss from the sum, and that loss counts once, so each term's gradient is the
    sum's: d(sum)/d(term) = 1."""
    return WithBackward.apply(x, lambda x: sum_of_copy(x, group), lambda grad: grad)


class Column(nn.Module):
    """Whole x -> a slice of y = x W^T + b. Holds this rank's rows of W, which are columns of W^T.
    """

    def __init__(self, linear, group, f, parts=()):
        super().__init__()
        self.group = group
        self.f = f
        self.weight = split(linear.weight, 0, group, parts)
        self.bias = split(linear.bias, 0, group, parts)

    def forward(self, x):  # (B, S, in) -> (B, S, out/T)
        return F.linear(self.f(x, self.group), self.weight, self.bias)


class Row(nn.Module):
    """A slice of x -> whole y. The bias, if any, is replicated, and added once, after the sum."""

    def __init__(self, linear, group, g):
        super().__init__()
        self.group = group
        self.g = g
        self.weight = split(linear.weight, 1, group)
        self.bias = linear.bias

    def forward(self, x):  # (B, S, in/T) -> (B, S, out)
        partial_y = F.linear(x, self.weight)  # (B, S, out), partial over tp
        y = self.g(partial_y, self.group)
        return y if self.bias is None else y + self.bias


# ---- the two ends of the model, split along the vocabulary ----


def to_local(idx, start, stop):
    """Token ids as row numbers of this rank's slice [start, stop) of the vocabulary, and which ids
    are outside of it (they get row 0). For the slice [10, 20) the ids 12 9 19 give the rows 2 0 9,
    and outside False True False."""
    outside = (idx < start) | (idx >= stop)
    return (idx - start).masked_fill(outside, 0), outside


class VocabularyEmbedding(nn.Module):
    """Each token's row is on one rank; the remaining ranks add zero to it."""

    def __init__(self, embedding, group, g):
        super().__init__()
        self.group = group
        self.g = g
        self.weight = split(embedding.weight, 0, group)  # (V/T, C)
        self.words = self.weight.tag.ranges[0]  # start and stop in the vocabulary

    def forward(self, idx):  # (B, S)
        local, outside = to_local(idx, *self.words)
        rows = F.embedding(local, self.weight)
        return self.g(rows.masked_fill(outside.unsqueeze(-1), 0), self.group)  # (B, S, C)


def vocabulary_loss(logits, targets, words, group):
    """cross_entropy. In: logits (B, S, V/T), for this rank's words [start, stop); targets (B, S).
    Returns the sum over tokens of log(sum(exp(logits))) - logits[target], the same on all ranks.
    The ranks all-reduce three numbers per token, never the logits of all words."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float))  # sums in fp32 at least
    # The largest logit is subtracted, because exp could overflow. It cancels, so its gradient is 0.
    largest = all_reduce(logits.detach().amax(-1), group, maximum)  # (B, S)
    sum_exp = (logits - largest.unsqueeze(-1)).exp().sum(-1)  # (B, S), partial over tp
    local, outside = to_local(targets, *words)
    at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    at_target = at_target.masked_fill(outside, 0)  # (B, S), partial: one rank has the target
    sum_exp, at_target = sum_over_ranks(torch.stack([sum_exp, at_target]), group)
    losses = sum_exp.log() + largest - at_target  # (B, S)
    return losses.masked_fill(targets == ABSENT, 0).sum()


def refuse_too_many_ranks(config, group):
    """ValueError unless each rank gets a word, and T divides n_head (and a Llama's n_kv_head)."""
    heads = getattr(config, "n_kv_head", config.n_head)
    if heads % group.size:
        raise ValueError(f"--tp {group.size} must divide the {heads} heads")
    if config.vocab_size < group.size:
        raise ValueError(f"--tp {group.size} must be at most the {config.vocab_size} words of the "
                         "vocabulary")


def split_layers(model, group, f, g):
    """Replace the layers of a whole, tagged model by their parallel versions. f: what happens to
    an activation before a column; g: to a partial sum, after a row or after the embedding."""
    refuse_too_many_ranks(model.config, group)
    embedding, *blocks, head = model.layers
    embedding.wte = VocabularyEmbedding(embedding.wte, group, g)
    for block in blocks:
        block.attn.c_attn = Column(block.attn.c_attn, group, f, block.attn.parts)  # q, k, v
        block.attn.c_proj = Row(block.attn.c_proj, group, g)
        if not isinstance(block.mlp, MixtureOfExperts):  # experts: expert_parallel.py
            block.mlp.c_fc = Column(block.mlp.c_fc, group, f, block.mlp.parts)
            block.mlp.c_proj = Row(block.mlp.c_proj, group, g)
    head.lm_head = Column(head.lm_head, group, f)  # a tied weight: the embedding's slice
    head.loss = partial(vocabulary_loss, words=embedding.wte.words, group=group)


def tensor_parallel(model, group):
    """In: a whole, tagged model. After: each parameter is this rank's slice, tagged as such, or is
    tagged as held by all ranks of the group."""
    split_layers(model, group, f=copy_to_ranks, g=sum_over_ranks)
    tag_replicated(model, group, sum_gradients=False)
