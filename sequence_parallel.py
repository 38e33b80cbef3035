"""Sequence parallelism, on top of tensor parallelism: 1/T of the tokens between the matrices.

Between a row-parallel layer and the next column-parallel one (tensor_parallel.py) T ranks hold the
same activations and repeat the same work: bias, residual, LayerNorm. But an all-reduce is a
reduce-scatter and an all-gather, and bias, residual and LayerNorm treat each token by itself. So
place them between the two halves, on 1/T of the tokens per rank:

    without    row -> all-reduce     -> LayerNorm of S tokens                 -> column
    with       row -> reduce-scatter -> LayerNorm of S/T tokens -> all-gather -> column

Sent: as many elements of activations as tensor parallelism alone sends. In addition, once per step,
an all-reduce of the gradients of replicated parameters (LayerNorm, wpe, biases of rows), because
each of the T ranks computes these gradients from 1/T of the tokens: 2 (T-1)/T (6 C L + 2 C + S C)
elements. Held: 1/T of the activations from a row's output to the next all-gather. What the
all-gather returns, a column's input, is saved whole for backward. arXiv 2205.05198.

    python -m extras.show sequence_parallel        a GPT on 4 ranks
"""

import torch

from collectives import WithBackward, all_gather, own_chunk, reduce_scatter
from shard import tag_replicated
from tensor_parallel import split_layers


def all_tokens(x, group):
    """Every rank's tokens (B, S/T, C) -> all tokens (B, S, C)."""
    parts = x.new_empty((group.size, *x.shape))  # (T, B, S/T, C): chunk r is rank r's
    parts[group.rank] = x
    return all_gather(parts, group).movedim(0, 1).flatten(1, 2)


def own_tokens_of_sum(x, group):
    """(B, S, C), partial over tp -> this rank's tokens of the sum, (B, S/T, C)."""
    parts = x.unflatten(1, (group.size, -1)).movedim(1, 0)  # (T, B, S/T, C)
    summed = reduce_scatter(parts.clone(memory_format=torch.contiguous_format), group)
    return summed[group.rank]


def gather_tokens(x, group):
    """f of sequence parallelism: all-gather the tokens. Backward is a reduce-scatter: each rank has
    a term of every token's gradient (from its part of W), and gets the sum for its own tokens."""
    return WithBackward.apply(x, lambda x: all_tokens(x, group),
                              lambda grad: own_tokens_of_sum(grad, group))


def scatter_tokens(x, group):
    """g of sequence parallelism: reduce-scatter the partial sums. Backward is an all-gather: x has
    a term of every token's sum, so its gradient is the gradients of all tokens."""
    return WithBackward.apply(x, lambda x: own_tokens_of_sum(x, group),
                              lambda grad: all_tokens(grad, group))


def sequence_parallel(model, group):
    """tensor_parallel() with a different f and g. In: a whole, tagged model. After: the slices and
    tags of tensor_parallel(), and the gradients of replicated parameters are to be summed over the
    group. T must divide S (with context parallelism over N ranks: S/N)."""
    split_layers(model, group, f=gather_tokens, g=scatter_tokens)
    tag_replicated(model, group, sum_gradients=True)
    positions_of_own_tokens(model, group)


def positions_of_own_tokens(model, group):
    """wte, whose g is scatter_tokens, returns this rank's S/T tokens. GPT-2 adds positions to them,
    those of the same tokens. (A Llama uses positions inside of attention, where all tokens are.)"""
    embedding = model.layers[0]
    if embedding in model.positioned():
        positions = embedding.positions  # gives the positions of all tokens
        embedding.positions = lambda idx: own_chunk(positions(idx), group)
