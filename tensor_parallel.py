"""Tensor parallelism: each matrix of a block is split over T ranks.

    c_attn, c_fc   by columns of W^T: rank t computes some heads or hidden units    (out/T, in)
    c_proj         by rows of W^T: rank t multiplies its part of the input          (out, in/T)
    wte, lm_head   by rows of the vocabulary, any size; logits are never gathered   (V/T, C)
    LayerNorm, wpe and the biases of c_proj are replicated.

Sent per rank, block and microbatch: four all-reduces, 4 * 2 (T-1)/T b S C elements; --sp adds half
an all-reduce per column. Embedding and head send one all-reduce each, the loss (T-1) b S elements.
For backward each rank keeps, per block and token: of each of 2 LayerNorms input, output and 2
statistics, 4 C + 4 elements in all; and 1/T of q, k, v (3 C), attention (C, and a logsumexp per
head), c_fc and GELU (4 C each). --sp: 1/T of all. --recompute: C, the block's input. For the head:
2 C + 2 per token and, as ChunkedLoss computes gradients in forward, that of its matrix, V C/T
elements of at least 32 bits.
Megatron-LM, arXiv 1909.08053.

    python tensor_parallel.py        a GPT on 4 ranks        torchrun train.py --tp 2
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from collectives import WithBackward, all_gather, all_reduce, own_chunk, plain_all_reduce
from model import ABSENT, MLP
from sequence_parallel import Region, leave_region
from shard import split, tag_replicated

#   x (B, S, C)  ->  column: W1 (4C/T, C)  ->  GELU  ->  row: W2 (C, 4C/T)  ->  sum over ranks
#
#   rank 0   x  [ W1 upper ]   h, left half    [ W2 left  ]   partial y \
#   rank 1   x  [ W1 lower ]   h, right half   [ W2 right ]   partial y /  + = y on both
#
# A hidden unit is a column of W1^T and a row of W2^T. Hidden units do not meet before W2 adds them
# up. So a block's MLP needs one all-reduce forward, after the row (sum_over_ranks, Megatron's g),
# and one in backward, of the gradient of the column's input (copy_to_ranks, f). Attention is the
# same, with heads in the place of hidden units.


def sum_of_copy(x, group):
    """The ranks' sum. Of a copy, as plain_all_reduce works in place, on contiguous tensors."""
    return plain_all_reduce(x.clone(memory_format=torch.contiguous_format), group)


def copy_to_ranks(x, group):
    """Megatron's f. Forward: nothing, all ranks hold x. Backward: every rank used x, so the
    gradient of x is the sum of the ranks' gradients."""
    return WithBackward.apply(x, lambda x: x, lambda grad: sum_of_copy(grad, group))


def sum_over_ranks(x, group):
    """Megatron's g. Forward: the sum of the ranks' partial sums. Backward: all ranks compute the
    same loss from the sum, and it counts once; d(sum)/d(term) = 1, so the gradient passes through
    unchanged. (If each rank added a loss of its own, backward would be an all-reduce again.)"""
    return WithBackward.apply(x, lambda x: sum_of_copy(x, group), lambda grad: grad)


class PlainColumn(nn.Module):
    """Whole x -> a slice of y: this rank's rows of W, the columns of W^T in y = x W^T + b."""

    def __init__(self, linear, group, parts=1):
        super().__init__()
        self.group = group
        self.weight = split(linear.weight, 0, group, parts)
        self.bias = split(linear.bias, 0, group, parts)

    def forward(self, x):  # (B, S, in) -> (B, S, out/T)
        return F.linear(copy_to_ranks(x, self.group), self.weight, self.bias)


class PlainRow(nn.Module):
    """A slice of x -> whole y. The bias is replicated, and added once, after the sum."""

    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        self.weight, self.bias = split(linear.weight, 1, group), linear.bias

    def forward(self, x):  # (B, S, in/T) -> (B, S, out)
        return sum_over_ranks(F.linear(x, self.weight), self.group) + self.bias


def plain_tensor_parallel(model, group):
    """Tensor parallelism at its plainest: split the four matrices of each block of a whole, tagged
    model. Embedding and head stay whole on every rank. T must divide n_head."""
    for block in model.layers[1:-1]:
        block.attn.c_attn = PlainColumn(block.attn.c_attn, group, parts=3)  # q, k, v
        block.attn.c_proj = PlainRow(block.attn.c_proj, group)
        block.mlp.c_fc = PlainColumn(block.mlp.c_fc, group)
        block.mlp.c_proj = PlainRow(block.mlp.c_proj, group)
    tag_replicated(model, group, sum_gradients=False)


# ---- the same, 2 to 22% faster: overlaps the all-reduce of grad_x with computing grad_W ----
#
# region: how activations enter before a column and leave after a row. Without --sp: enter does
# nothing, leave all-reduces. With --sp, in the next file: all-gather and reduce-scatter of tokens.
# defer(fn, *args) returns fn(*args), the weight gradients: compute_now. A zero bubble pipeline
# (Deferred.add) keeps fn and args for later, and returns None for each gradient.


def weight_gradients(grad, x, weight, bias):
    """Gradients of W (out, in) and b (out,), given that of the output (B, S, out)."""
    grad = grad.flatten(0, -2)
    return grad.t() @ x.flatten(0, -2), None if bias is None else grad.sum(0)


def compute_now(fn, *args):
    return fn(*args)


class ColumnLinear(torch.autograd.Function):
    """PlainColumn's forward and backward. Saves x as passed in: under --sp only this rank's tokens,
    which backward gathers again."""

    @staticmethod
    def forward(ctx, x, weight, bias, region, defer):
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias  # parameters: a deferred gradient goes to their .grad
        ctx.region, ctx.defer = region, defer
        return F.linear(region.enter(x), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,), grad = ctx.saved_tensors, grad.contiguous()
        # Overlap: x is gathered (--sp) during the product for grad_x, and grad_x is reduced during
        # the product for grad_W. del: --sp sends a copy of grad_x, so free grad_x before grad_W
        entering = ctx.region.start_enter(x)
        grad_x = grad @ ctx.weight.detach()  # (B, S, in), partial over tp
        x = entering()
        leaving = ctx.region.start_leave(grad_x)
        del entering, grad_x
        grads = ctx.defer(weight_gradients, grad, x, ctx.weight, ctx.bias)
        return leaving(), *grads, None, None


class RowLinear(torch.autograd.Function):
    """PlainRow's forward and backward, without the bias."""

    @staticmethod
    def forward(ctx, x, weight, region, defer):
        ctx.save_for_backward(x)
        ctx.weight, ctx.region, ctx.defer = weight, region, defer
        return region.leave(F.linear(x, weight))

    @staticmethod
    def backward(ctx, grad):
        (x,), grad = ctx.saved_tensors, ctx.region.enter(grad.contiguous())
        grad_weight, _ = ctx.defer(weight_gradients, grad, x, ctx.weight, None)
        return grad @ ctx.weight.detach(), grad_weight, None, None


class Column(PlainColumn):
    """The same slices, fast."""

    uncompiled = ("forward",)  # --compile leaves it out: torch.compile cannot trace messages

    def __init__(self, linear, region, defer, parts=1):
        super().__init__(linear, region.group, parts)
        self.region, self.defer = region, defer

    def forward(self, x):  # (B, S, in), under --sp (B, S/T, in) -> (B, S, out/T)
        return ColumnLinear.apply(x, self.weight, self.bias, self.region, self.defer)


class Row(PlainRow):
    """The same slices, fast."""

    uncompiled = ("forward",)

    def __init__(self, linear, region, defer):
        super().__init__(linear, region.group)
        self.region, self.defer = region, defer

    def forward(self, x):  # (B, S, in/T) -> (B, S, out), under --sp (B, S/T, out)
        return RowLinear.apply(x, self.weight, self.region, self.defer).add_(self.bias)


# ---- the two ends of the model, split along the vocabulary ----


def to_local(idx, start, stop):
    """Token ids as rows of this rank's slice [start, stop) of the vocabulary, and a mask of the ids
    that lie outside, for which the row is 0."""
    outside = (idx < start) | (idx >= stop)
    return (idx - start).masked_fill(outside, 0), outside


class VocabEmbedding(nn.Module):
    """Each token's row is on one rank; the other ranks add zero to it."""

    uncompiled = ("forward",)

    def __init__(self, embedding, region):
        super().__init__()
        self.region, self.weight = region, split(embedding.weight, 0, region.group)

    def forward(self, idx):  # (B, S)
        local, outside = to_local(idx, *self.weight.shard.ranges[0])
        x = F.embedding(local, self.weight).masked_fill(outside.unsqueeze(-1), 0)
        return leave_region(x, self.region)  # (B, S, C), under --sp (B, S/T, C)


def log_share(logits, log_probs, group):
    """log of the total probability of this rank's words, (c, 1), for c tokens. log_probs (c, V/T):
    log-softmax over this rank's words only; with the result added, over all words."""
    # logit - log_prob is log(sum(exp(logits))) of this rank's words, at any of them; at the largest
    # it rounds least
    largest, word = logits.max(-1, keepdim=True)
    own = largest - log_probs.gather(-1, word)
    of_ranks = own.new_empty(group.size, len(own))
    of_ranks[group.rank] = own.squeeze(-1)
    all_gather(of_ranks, group)
    return own - of_ranks.logsumexp(0).unsqueeze(-1)


class ChunkedLoss(torch.autograd.Function):
    """Product with lm_head and cross-entropy, over chunks of tokens: for each chunk its logits,
    then at once their loss and gradient. So the logits of all tokens, often the largest tensor of a
    step, never exist at the same time. A chunk has as many tokens as the model is wide, so its
    logits are as large as the gradient of the matrix (at least 256 tokens: each chunk costs kernel
    launches and, under --tp, messages). Backward only multiplies the gradients of x and weight,
    which forward saves, by that of the loss, in place: it runs once.

    In: x (B, S, C), under --sp (B, S/T, C); weight (V/T, C), maybe padded; targets (B, S). Out: the
    loss, summed over tokens and words, the same on all ranks. Ranks exchange one number per token,
    log(sum(exp(logits))) of their words."""

    @staticmethod
    def forward(ctx, x, weight, targets, region, training):
        group, (start, stop) = region.group, weight.shard.ranges[0]  # this rank's words
        wide = torch.promote_types(x.dtype, torch.float)  # sums have 32 bits at least
        parts = group.size if region.sp else 1
        B, S, C = x.shape  # from here S is S/T under --sp
        targets = targets.unflatten(1, (parts, -1))  # (B, parts, S), one part per rank
        ctx.dtype, loss = x.dtype, x.new_zeros(1, dtype=wide)
        grad_x = torch.empty_like(x) if training else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if training else None
        # A chunk: n positions of each rank's part (without --sp there is one part), in the order in
        # which region.enter() gathers them: c = B * parts * n tokens
        n = max(1, max(C, 256) // (B * parts))
        for i in range(0, S, n):
            words = targets[:, :, i : i + n].flatten()  # (c,)
            # padding tokens: no word of any rank, so no loss; zero inputs, so no gradient
            present = (words != ABSENT).unsqueeze(-1)
            inputs = region.enter(x[:, i : i + n]).flatten(0, 1) * present  # (c, C)
            logits = inputs @ weight.t()  # (c, V/T)
            logits[:, stop - start :] = -torch.inf  # rows of --pad-vocab are no words
            log_probs = F.log_softmax(logits, -1, dtype=wide)
            if group.size > 1:
                log_probs += log_share(logits, log_probs, group)
            local, outside = (part.unsqueeze(-1) for part in to_local(words, start, stop))
            of_target = log_probs.gather(-1, local)  # (c, 1)
            loss -= of_target.masked_fill(outside, 0).sum()
            if training:  # grad = softmax - onehot(target)
                grad = torch.exp(log_probs, out=logits)  # (c, V/T)
                del log_probs
                # At the target p - 1, as expm1 in 32 bits, since a p of 16 bits might round to 1.
                # If another rank has the target, local is 0: word 0's p is written over itself
                of_target = torch.where(outside, of_target.exp(), of_target.expm1())
                grad.scatter_(-1, local, of_target.to(grad.dtype))
                grad_inputs = (grad @ weight) * present  # (c, C), partial over tp
                leaving = region.start_leave(grad_inputs.view(B, -1, C))
                del grad_inputs
                # overlaps with the reduction of grad_inputs
                if wide == x.dtype:
                    grad_weight.addmm_(grad.t(), inputs)
                else:  # float16's product of c tokens might overflow: divide by a power
                    # of two above c, and multiply in 32 bits
                    power = 2.0 ** len(words).bit_length()
                    grad_weight.add_(grad.t() @ (inputs / power), alpha=power)
                grad_x[:, i : i + n] = leaving()
        ctx.save_for_backward(grad_x, grad_weight)
        return all_reduce(loss, group)[0]

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight = ctx.saved_tensors
        grad = grad.view(1)  # CUDA would round a number without dimension to the width of grad_x
        return grad_x.mul_(grad), grad_weight.mul_(grad).to(ctx.dtype), None, None, None


def chunked_loss(lm_head, region, x, targets):
    return ChunkedLoss.apply(x, lm_head.weight, targets, region, torch.is_grad_enabled())


def parallelize(model, group, sp=False, defer=None):
    """Swap the layers of a whole, tagged model for their parallel versions.

    After: each parameter is this rank's slice, tagged as such, or is tagged as replicated over the
    group. With sp the ranks hold different tokens outside of the matrices, so the gradients of
    replicated parameters are to be summed over the group. defer: see above weight_gradients.
    T must divide n_head and, with sp, the tokens of a sequence on this rank. Call it after
    split_sequences (context_parallel.py).

    A group of one keeps torch's own layers, as an autograd function in Python costs 45 us; unless
    `defer` is given, which only ColumnLinear and RowLinear know."""
    sp = sp and group.size > 1
    region = Region(group, sp)
    embedding, *blocks, head = model.layers
    if group.size > 1 or defer:
        now_or_later = defer or compute_now
        embedding.wte = VocabEmbedding(embedding.wte, region)
        for block in blocks:
            block.attn.c_attn = Column(block.attn.c_attn, region, now_or_later, parts=3)
            block.attn.c_proj = Row(block.attn.c_proj, region, now_or_later)
            if isinstance(block.mlp, MLP):  # experts: see expert_parallel.py
                block.mlp.c_fc = Column(block.mlp.c_fc, region, now_or_later)
                block.mlp.c_proj = Row(block.mlp.c_proj, region, now_or_later)
        head.lm_head.weight = split(head.lm_head.weight, 0, group)  # the embedding's slice
    head.loss = partial(chunked_loss, head.lm_head, region)
    tag_replicated(model, group, sum_gradients=sp)
    if sp:
        positions = embedding.positions
        if positions is None:
            positions = torch.arange(model.config.block_size, device=group.device)
        embedding.positions = own_chunk(positions, group)


def demo(mesh):
    """Gradients of a small GPT, compared with one process's; and what rank 0 holds of it."""
    from show.demonstrations import show_difference, small_gpt
    group = mesh.group("tp")
    forms = {"plain": lambda model: plain_tensor_parallel(model, group),
             "fast": lambda model: parallelize(model, group),
             "fast --sp": lambda model: parallelize(model, group, sp=True)}
    for name, split_model in forms.items():
        model, ids = small_gpt(mesh)
        split_model(model)
        model(ids, ids).backward()
        show_difference(name, mesh, model)
    for param in model.parameters() if mesh.rank == 0 else ():
        full = str([*param.shard.shape])
        print(f"{param.shard.name:34} {full:>9} on rank 0: {[*param.shape]}")


if __name__ == "__main__":
    from show.demonstrations import demonstrate
    demonstrate(demo, dp=1, tp=4)
