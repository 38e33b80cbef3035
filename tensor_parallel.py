"""Tensor parallelism: each matrix is split over T ranks. Sequence parallelism (--sp): so are the
tokens wherever no matrix is split.

    matrix W       y = x W^T + b, split                                             W on a rank
    c_attn, c_fc   by columns of W^T: rank t computes some heads or hidden units    (out/T, in)
    c_proj         by rows of W^T: rank t multiplies its part of the input          (out, in/T)
    wte, lm_head   by words (T need not divide V); logits are not gathered          (V/T, C)
    LayerNorm, wpe and the biases of c_proj are replicated.

Sent per rank, block and microbatch: four all-reduces of the activation (two forward, two backward),
4 * 2 (T-1)/T B S C elements. Embedding and head all-reduce one activation each, the loss gathers
T-1 numbers per token. --sp sends as much, in other pieces, and once a step the gradients of
replicated parameters. Held: 1/T of the matrices, and of the activations inside of attention and
MLP. --sp also splits the activations outside of these; each Column layer, two per block, still
holds its whole gathered input. Megatron-LM, arXiv 1909.08053; sequence parallel, 2205.05198.

    python train.py --tp 2 --sp
    python -m extras.show tensor_parallel       a small GPT on 4 ranks
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from collectives import WithBackward, all_gather, all_reduce, own_chunk, reduce_scatter
from experts import MixtureOfExperts
from model import ABSENT
from shard import split

#   x (B, S, C)  ->  column: W1 (4C/T, C)  ->  GELU  ->  row: W2 (C, 4C/T)  ->  sum over ranks
#
#   rank 0   x  [ W1 upper ]   h, left half    [ W2 left  ]   partial y \
#   rank 1   x  [ W1 lower ]   h, right half   [ W2 right ]   partial y /  + = y on both
#
# A hidden unit is a column of W1^T and a row of W2^T. Hidden units do not meet before W2 adds them
# up. So a block's MLP needs one all-reduce forward, after the row (g, below), and one in backward:
# the gradient of the column's input is summed (f). Attention is the same, with heads for hidden
# units.


def sum_in_place(x, group):
    """The sum of the ranks' x, written over x (if x is not contiguous: over a copy). Autograd does
    not know, and need not: nobody else reads x. In forward it is the fresh output of a product or
    of a mask; in backward the fresh gradient of a product's input."""
    return all_reduce(x.contiguous(), group)


def copy_to_ranks(x, group):
    """Megatron's f. Forward: nothing, all ranks hold x. Backward: every rank used x, so the
    gradient of x is the sum of the ranks' gradients."""
    return WithBackward.apply(x, lambda x: x, lambda grad: sum_in_place(grad, group))


def sum_over_ranks(x, group):
    """Megatron's g. Forward: the sum of the ranks' partial sums. Backward: nothing. All ranks
    compute the same loss from the sum, and that loss counts once, so each term's gradient is the
    sum's: d(sum)/d(term) = 1."""
    return WithBackward.apply(x, lambda x: sum_in_place(x, group), lambda grad: grad)


# ---- sequence parallelism: the same f and g, cut into halves ----
# Between a row and the next column T ranks hold the same activations and repeat the same work:
# bias, residual, LayerNorm. But an all-reduce is a reduce-scatter and an all-gather, and bias,
# residual and LayerNorm treat each token by itself. So place them between the two halves, on 1/T of
# the tokens per rank:
#
#     without    row -> all-reduce     -> LayerNorm of S tokens                 -> column
#     with       row -> reduce-scatter -> LayerNorm of S/T tokens -> all-gather -> column


def all_tokens(x, group):
    """Every rank's tokens (B, S/T, C) -> all tokens (B, S, C)."""
    parts = x.new_empty((group.size, *x.shape))  # (T, B, S/T, C): chunk r is rank r's
    parts[group.rank] = x
    return all_gather(parts, group).movedim(0, 1).flatten(1, 2)


def own_tokens_of_sum(x, group):
    """(B, S, C), this rank's term of a sum -> this rank's tokens of the sum, (B, S/T, C)."""
    parts = x.unflatten(1, (group.size, -1)).movedim(1, 0)  # (T, B, S/T, C)
    summed = reduce_scatter(parts.clone(memory_format=torch.contiguous_format), group)
    return summed[group.rank].clone()  # a view would keep the other ranks' tokens in memory


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


# ---- matrices ----


class DeferredProduct(torch.autograd.Function):
    """x W^T, whose backward computes the gradient of x, and leaves that of W for later: it appends
    (W, gradient of the product, x) to a list. For zero-bubble schedules (pipeline.py)."""

    @staticmethod
    def forward(ctx, x, weight, deferred):
        ctx.save_for_backward(x)
        ctx.weight = weight  # the Parameter itself: pipeline.py adds to its .grad
        ctx.deferred = deferred
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.weight.requires_grad:
            ctx.deferred.append((ctx.weight, grad, x))
        return grad @ ctx.weight, None, None


def product(x, weight, deferred, bias=None):
    """x W^T + b. deferred: the list of DeferredProduct; None: autograd computes W's gradient at
    once."""
    if deferred is None:
        return F.linear(x, weight, bias)
    y = DeferredProduct.apply(x, weight, deferred)
    return y if bias is None else y + bias


class Column(nn.Module):
    """x, whole in width -> a slice of y = x W^T + b. Holds this rank's rows of W, which are columns
    of W^T."""

    uncompiled = ("forward",)  # it sends messages (model.compile_layers)

    def __init__(self, linear, group, f, parts=(), deferred=None):
        super().__init__()
        self.group, self.f, self.deferred = group, f, deferred
        self.weight = split(linear.weight, 0, group, parts)
        self.bias = split(linear.bias, 0, group, parts)

    def forward(self, x):  # (B, S, in), with --sp (B, S/T, in) -> (B, S, out/T)
        return product(self.f(x, self.group), self.weight, self.deferred, self.bias)


class Row(nn.Module):
    """A slice of x -> whole y. The bias, if any, is replicated, and added once, after the sum."""

    uncompiled = ("forward",)

    def __init__(self, linear, group, g, deferred=None):
        super().__init__()
        self.group, self.g, self.deferred = group, g, deferred
        self.weight = split(linear.weight, 1, group)
        self.bias = linear.bias

    def forward(self, x):  # (B, S, in/T) -> (B, S, out), with --sp (B, S/T, out)
        partial_y = product(x, self.weight, self.deferred)  # (B, S, out), a term of the sum
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
    """Each token's row is on one rank; the other ranks add zero to it."""

    uncompiled = ("forward",)

    def __init__(self, embedding, group, g):
        super().__init__()
        self.group, self.g = group, g
        self.weight = split(embedding.weight, 0, group)  # (V/T, C)

    def forward(self, idx):  # (B, S)
        local, outside = to_local(idx, *self.weight.tag.ranges[0])
        rows = F.embedding(local, self.weight)
        # (B, S, C), with --sp (B, S/T, C)
        return self.g(rows.masked_fill(outside.unsqueeze(-1), 0), self.group)


def tokens_at_a_time(x, vocab_size, group):
    """How many tokens VocabularyLoss takes at a time, the same on all ranks, which gather together:
    as many as the model is wide, so that their logits are as large as the gradient of the matrix;
    at least 512, because each pass of the loop costs launches and messages. On a GPU as many as
    have 1.3e8 logits, if those are more."""
    tokens = max(x.size(-1), 512)
    if x.device.type == "cpu":
        return tokens
    most_words = math.ceil(vocab_size / group.size)  # rank 0's; other ranks may have one less
    return max(tokens, (1 << 27) // most_words)


def add_product(total, grad, x):
    """total += grad^T x, the gradient of a matrix. Total has 32 bits also for 16-bit inputs."""
    if total.dtype == x.dtype:
        total.addmm_(grad.t(), x)
    elif total.is_cuda:
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)
    else:  # a CPU has no such product
        total.addmm_(grad.to(total.dtype).t(), x.to(total.dtype))


def loss_of_logits(logits, targets, words, group):
    """Cross-entropy of some tokens, whose logits are spread over the ranks by words.

    In: logits (n, V/T), of this rank's words; targets (n,), any words; words: (start, stop).
    Out: the sum over tokens of the targets' logits, this rank's term of it; the sum over tokens of
    log(sum(exp(logits))) over all words, the same on all ranks; and the gradient of the loss,
    (n, V/T): softmax(logits), less 1 at the target. Sent: T-1 numbers per token."""
    local, outside = (each.unsqueeze(-1) for each in to_local(targets, *words))  # (n, 1) each
    absent = (targets == ABSENT).unsqueeze(-1)
    target_logits = logits.gather(-1, local).masked_fill(outside, 0).sum()
    log_probs = logits.log_softmax(-1)  # among this rank's words: each logit less log_sum
    # (n, 1): log_probs is logits - log_sum, so each word gives log_sum; here word 0
    log_sum = logits[:, :1] - log_probs[:, :1]
    probs = log_probs.exp_()
    if group.size > 1:
        rank_log_sums = log_sum.new_empty(group.size, len(logits))  # (T, n)
        rank_log_sums[group.rank] = log_sum.squeeze(-1)
        full_log_sum = all_gather(rank_log_sums, group).logsumexp(0).unsqueeze(-1)
        probs *= (log_sum - full_log_sum).exp()  # among all words
        log_sum = full_log_sum
    # -1 at the target, if this rank has that word
    grad = probs.scatter_add_(-1, local, outside.to(logits.dtype) - 1).masked_fill_(absent, 0)
    return target_logits, log_sum.masked_fill(absent, 0).sum(), grad


class VocabularyLoss(torch.autograd.Function):
    """cross_entropy of the logits x W^T, for some tokens at a time: their logits, then at once
    their loss and its gradient. So the logits of all tokens, often the largest tensor of a step,
    never exist at once (1.3 times as fast as F.cross_entropy, and half of the memory, at 50,257
    words).

    In: x (tokens, C); weight (V/T, C), this rank's words; targets (tokens,); words: (start, stop);
    n: how many tokens at a time. Out: the sum over tokens of log(sum(exp(logits))) -
    logits[target], the same on all ranks. Forward also computes both gradients, and holds them for
    backward: W's, of 32 bits, for each microbatch in flight. With G (tokens,
    V/T), the gradient of the logits, G W is this rank's term of x's gradient, and G^T x is W's.
    Backward multiplies both by the gradient of the loss."""

    @staticmethod
    def forward(ctx, x, weight, targets, words, n, group):
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        wide = torch.promote_types(x.dtype, torch.float)  # sums have 32 bits at least
        grad_x = []  # gradients of x, for some tokens each
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        log_sums = x.new_zeros((), dtype=wide)  # sums over all tokens, as in loss_of_logits
        target_logits = x.new_zeros(1, dtype=wide)
        for x_part, targets_part in zip(x.split(n), targets.split(n), strict=True):  # (n, C), (n,)
            logits = (x_part @ weight.t()).to(wide)  # (n, V/T)
            some_target_logits, some_log_sums, grad = loss_of_logits(logits, targets_part, words,
                                                                     group)
            target_logits += some_target_logits
            log_sums += some_log_sums
            grad = grad.to(x.dtype)
            if needs_x:
                grad_x.append(grad @ weight)
            if needs_weight:
                add_product(grad_weight, grad, x_part)
        grad_x = torch.cat(grad_x) if needs_x else None
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtype = weight.dtype
        return log_sums - all_reduce(target_logits, group)[0]

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x * grad.to(grad_x.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad).to(ctx.dtype)
        return grad_x, grad_weight, None, None, None, None


class VocabularyHead(nn.Module):
    """model.Head, whose matrix is split along the vocabulary: rank t computes the logits of its
    words. The matrix stays in head.lm_head, where split_matrices replaces it by this rank's slice.
    """

    def __init__(self, head, group, f):
        super().__init__()
        self.group, self.f = group, f
        self.ln_f = head.ln_f
        self.lm_head = head.lm_head

    def forward(self, x, targets):  # (B, S, C), with --sp (B, S/T, C); (B, S)
        weight = self.lm_head.weight
        words = weight.tag.ranges[0]
        x = self.f(self.ln_f(x), self.group)  # (B, S, C)
        n = tokens_at_a_time(x, weight.tag.shape[0], self.group)
        # A validation needs no gradient. Without detach() VocabularyLoss would compute that of the
        # weight: ctx.needs_input_grad ignores no_grad
        weight = weight if torch.is_grad_enabled() else weight.detach()
        x, targets = x.flatten(0, 1), targets.flatten()
        return VocabularyLoss.apply(x, weight, targets, words, n, self.group)


# ---- a whole model ----


def tag_replicated(model, group, sum_gradients):
    """Tag each parameter that is still whole as held by all ranks of the group. sum_gradients: the
    ranks see different tokens, so gradients of whole parameters are to be summed over the group.
    Gradients of the norms of queries and keys (Qwen3) are always summed: each rank's norms see only
    its heads."""
    head_norms = {param for block in model.layers[1:-1]
                  for name, param in block.attn.named_parameters() if name.startswith("ln_")}
    for param in model.parameters():
        # Whole: of its full shape. (Experts are, too; spread_experts adapts their tags)
        if param.shape == param.tag.shape:
            param.tag.shared_by += (group,)
            if sum_gradients or param in head_norms:
                param.tag.sum_over += (group,)


def split_matrices(model, group, sp=False, deferred=None):
    """Replace the matrices of a model by this rank's slices.

    In: a whole, tagged model, whose positions split_sequences has set (also without --cp). With sp
    (sequence parallelism) T divides S (with context parallelism over N ranks: S/N).
    deferred: a list to which backward appends its deferred products (DeferredProduct), or None.
    After: each parameter is this rank's slice, tagged as such, or is tagged as held by all ranks of
    the group; its layers are the parallel ones above. With sp the gradients of replicated
    parameters are to be summed over the group. In a group of one only the head is replaced, unless
    gradients are deferred."""
    heads = getattr(model.config, "n_kv_head", model.config.n_head)
    assert heads % group.size == 0 and model.config.vocab_size >= group.size
    # f: what happens to an activation before a column; g: to a partial sum, after a row or after
    # the embedding
    sp = sp and group.size > 1
    f, g = (gather_tokens, scatter_tokens) if sp else (copy_to_ranks, sum_over_ranks)
    embedding, *blocks, head = model.layers
    model.layers[-1] = head = VocabularyHead(head, group, f)
    if group.size == 1 and deferred is None:
        return
    is_tied = head.lm_head.weight is embedding.wte.weight
    embedding.wte = VocabularyEmbedding(embedding.wte, group, g)
    if is_tied:
        head.lm_head.weight = embedding.wte.weight
    else:
        head.lm_head.weight = split(head.lm_head.weight, 0, group)
    for block in blocks:
        block.attn.c_attn = Column(block.attn.c_attn, group, f, block.attn.parts, deferred)
        block.attn.c_proj = Row(block.attn.c_proj, group, g, deferred)
        if not isinstance(block.mlp, MixtureOfExperts):  # experts: spread_experts
            block.mlp.c_fc = Column(block.mlp.c_fc, group, f, block.mlp.parts, deferred)
            block.mlp.c_proj = Row(block.mlp.c_proj, group, g, deferred)
    if group.size > 1:
        tag_replicated(model, group, sum_gradients=sp)
    if sp and embedding in model.positioned():
        # wte, whose g is scatter_tokens, returns this rank's S/T tokens. GPT-2 adds the positions
        # of these tokens. (A Llama uses positions inside of attention, where all tokens are)
        embedding.positions = own_chunk(embedding.positions, group)
