"""Tensor parallelism: the root's columns and rows (tensor_parallel.py), with hand-written backward
passes, which the tricks need:

    overlap    the all-reduce of grad_x travels while grad_W is computed (gain: docs/measured.md)
    --sp       the column saves its input with 1/T of the tokens, and backward gathers it again,
               while grad_x is computed: less memory
    deferral   zero bubble schedules compute grad_W later (engine/pipeline.py)

A column enters and a row leaves through a Region (engine/sequence_parallel.py), which all-reduces,
or under --sp gathers and scatters tokens. Elements sent: as in tensor_parallel.py, but for the loss
(engine/vocabulary_parallel.py). --sp adds half an all-reduce per column, for the second gather, and
once a step the sum of the replicated gradients, 2 (T-1)/T (6 C L + 2 C + S C).

    python -m extras.show engine.tensor_parallel            a GPT on 4 ranks
    torchrun train.py --tp 2 --fast tp          train.py with this file
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from engine.sequence_parallel import Region
from engine.vocabulary_parallel import ChunkedHead, VocabularyEmbedding
from experts import MixtureOfExperts
from sequence_parallel import positions_of_own_tokens
from shard import split, tag_replicated
from tensor_parallel import refuse_too_many_ranks

# Elements that each rank keeps for backward, per token and block:
#
#                                                        without --sp      with --sp
#    two LayerNorms: input, output, two statistics       4 C + 4           (4 C + 4)/T
#    q, k, v; attention's output and logsumexps          (4 C + nh)/T      (4 C + nh)/T
#    c_fc's output and GELU's                            8 C/T             8 C/T
#    or, with --recompute, only the block's input        C                 C/T


def weight_gradients(grad, x, weight, bias):
    """Gradients of W (out, in) and b (out,), given the output's gradient (B, S, out). The values of
    weight and bias are not read. A None there means that no gradient is needed; and if the
    computation is deferred, finish_weights (engine/pipeline.py) adds the results to their .grad."""
    grad = grad.flatten(0, -2)
    grad_weight = None if weight is None else grad.t() @ x.flatten(0, -2)
    return grad_weight, None if bias is None else grad.sum(0)


def trained(*params):
    """The parameters; None for one that needs no gradient."""
    return [param if param is not None and param.requires_grad else None for param in params]


def compute_now(fn, *args):
    """The usual `defer`: returns the weight gradients fn(*args). The other one, Deferred.add
    (engine/pipeline.py), keeps fn and args for later, and returns None for each gradient."""
    return fn(*args)


class ColumnLinear(torch.autograd.Function):
    """x W^T + b for this rank's rows of W. The backward of the plain Column multiplies twice, then
    all-reduces grad_x. Here the all-reduce starts between the two products.

    Under --sp the tokens inside the region stand as the messages bring them, rank by rank:
    (T B, S/T, C). For attention by_sequence sorts them into sequences; by_rank sorts them back."""

    @staticmethod
    def forward(ctx, x, weight, bias, region, defer):
        ctx.save_for_backward(x)  # under --sp before it is gathered
        ctx.weight, ctx.bias = weight, bias  # parameters: a deferred gradient goes to their .grad
        ctx.region = region
        ctx.defer = defer
        return region.by_sequence(F.linear(region.enter(x), weight, bias))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = ctx.region.by_rank(grad).contiguous()
        entering = ctx.region.start_enter(x)  # --sp: gather x during the product for grad_x
        grad_x = grad @ ctx.weight  # (B, S, in), partial over tp
        x = entering()
        leaving = ctx.region.start_leave(grad_x)  # reduce grad_x during the product for grad_W
        grads = ctx.defer(weight_gradients, grad, x, *trained(ctx.weight, ctx.bias))
        return leaving(), *grads, None, None


class RowLinear(torch.autograd.Function):
    """x W^T for this rank's columns of W, summed over the ranks."""

    @staticmethod
    def forward(ctx, x, weight, region, defer):
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.region = region
        ctx.defer = defer
        return region.leave(F.linear(region.by_rank(x), weight))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = ctx.region.enter(grad.contiguous())
        grad_weight, _ = ctx.defer(weight_gradients, grad, ctx.region.by_rank(x),
                                   *trained(ctx.weight, None))
        return ctx.region.by_sequence(grad @ ctx.weight), grad_weight, None, None


class Column(nn.Module):
    """Whole x -> a slice of y. parts: sizes of the matrices that are in one, such as q, k and v."""

    def __init__(self, linear, region, defer, parts=()):
        super().__init__()
        self.weight = split(linear.weight, 0, region.group, parts)
        self.bias = split(linear.bias, 0, region.group, parts)
        self.region = region
        self.defer = defer

    def forward(self, x):
        # (B, S, in) -> (B, S, out/T). Under --sp (B, S/T, in) -> (T B, S/T, out/T) or, for
        # attention, (B, S, out/T)
        return ColumnLinear.apply(x, self.weight, self.bias, self.region, self.defer)


class Row(nn.Module):
    """A slice of x -> whole y. The bias, if any, is replicated, and added once, after the sum."""

    def __init__(self, linear, region, defer):
        super().__init__()
        self.weight = split(linear.weight, 1, region.group)
        self.bias = linear.bias
        self.region = region
        self.defer = defer

    def forward(self, x):
        # (B, S, in/T) -> (B, S, out). Under --sp (T B, S/T, in/T) or, from attention, (B, S, in/T)
        # -> (B, S/T, out)
        y = RowLinear.apply(x, self.weight, self.region, self.defer)
        return y if self.bias is None else y.add_(self.bias)


def parallelize(model, group, sp=False, defer=None):
    """Replace the layers of a whole, tagged model by their parallel versions.

    After: each parameter is this rank's slice, tagged as such, or is tagged as replicated over the
    group. With sp the ranks hold different tokens outside of the matrices, so the gradients of
    replicated parameters are to be summed over the group. defer: see compute_now.
    With sp T must divide the tokens of a sequence on this rank. Call it after split_sequences
    (engine/context_parallel.py).

    A group of one keeps torch's own linear layers, because an autograd function in Python costs
    time; unless `defer` is given, which only ColumnLinear and RowLinear know."""
    refuse_too_many_ranks(model.config, group)
    sp = sp and group.size > 1
    region = Region(group, sp)
    with_attention = Region(group, sp, has_attention=True)
    embedding, *blocks, head = model.layers
    if group.size > 1 or defer:
        now_or_later = defer or compute_now
        embedding.wte = VocabularyEmbedding(embedding.wte, region)
        for block in blocks:
            attn, mlp = block.attn, block.mlp
            attn.c_attn = Column(attn.c_attn, with_attention, now_or_later, attn.parts)
            attn.c_proj = Row(attn.c_proj, with_attention, now_or_later)
            if not isinstance(mlp, MixtureOfExperts):  # experts: engine/expert_parallel.py
                mlp.c_fc = Column(mlp.c_fc, region, now_or_later, mlp.parts)
                mlp.c_proj = Row(mlp.c_proj, region, now_or_later)
        # a tied weight: the embedding's slice
        head.lm_head.weight = split(head.lm_head.weight, 0, group)
    model.layers[-1] = ChunkedHead(head, region)
    tag_replicated(model, group, sum_gradients=sp)
    if sp:
        positions_of_own_tokens(model, group)
