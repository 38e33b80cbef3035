"""Tensor parallelism: each matrix of a block is split over T ranks, activations stay whole between.

    c_attn, c_fc   column: rank t computes some heads, or some hidden units     (out/T, in)
    c_proj         row: rank t multiplies what it has, the partial sums are added (out, in/T)
    wte, lm_head   rows of the vocabulary, any size; logits are never gathered      (V/T, C)
    LayerNorm, wpe, biases of c_proj are replicated.

Sent per rank, block and microbatch: four all-reduces of B S C (one forward and one backward in
each of attention and MLP), that is 4 * 2 (T-1)/T B S C elements; the embedding adds one forward,
the head one backward, the loss three of B S. Held: the split matrices / T. Megatron-LM, arXiv
1909.08053.

    torchrun train.py --tp 2
"""

from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from collectives import all_reduce


@dataclass
class Tag:
    """What a parameter tensor is of the full model. Everything that must know how a parameter is
    laid out (initial values, gradient sync, global norm, checkpoints) reads this and nothing else.
    """

    name: str  # canonical name in the full model
    shape: torch.Size  # full shape
    dim: int = 0  # dim along which it is split
    ranges: tuple = ()  # the [start, stop) of the full dim that this rank holds, in order
    copies: int = 1  # ranks of one data-parallel replica that hold this same element
    tied: bool = False  # used at two places of the model (the embedding)

    def slice(self, full):
        """The part of the full tensor that this rank holds."""
        parts = [full.narrow(self.dim, a, b - a) for a, b in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def bounds(n, group):
    """[lo, hi) of this rank's part of n things; n need not divide."""
    each, more = divmod(n, group.size)  # the first `more` get one extra, as in torch.tensor_split
    lo = group.rank * each + min(group.rank, more)
    return lo, lo + each + (group.rank < more)


def to_local(idx, lo, hi):
    """Token ids as rows of the shard [lo, hi), and where they lie outside of it (row 0 there)."""
    outside = (idx < lo) | (idx >= hi)
    return (idx - lo).masked_fill(outside, 0), outside


class Deferred:
    """Where backward leaves work on weight gradients that nothing downstream waits for. Outside of
    `collect` it is done at once and autograd accumulates; inside, it is queued and `run` does both.
    """

    def __init__(self):
        self.queue = None

    def add(self, fn, grad, x, *params):
        if self.queue is None:
            return fn(grad, x, *params)
        self.queue.append((fn, grad, x, params))
        return None, None

    @contextmanager
    def collect(self):
        self.queue = deque()
        try:
            yield self.queue
        finally:
            self.queue = None

    @staticmethod
    def params(queue):
        """How often each parameter is in the queue: a weight that is used twice has two entries."""
        return Counter(p for *_, params in queue for p in params if p is not None)

    def run(self, queue):
        """Does the queued work, and yields each parameter once its gradient is complete."""
        left = self.params(queue)
        while queue:
            fn, grad, x, params = queue.popleft()
            for param, value in zip(params, fn(grad, x, *params), strict=True):
                if param is not None:
                    param.grad = value if param.grad is None else param.grad.add_(value)
                    left[param] -= 1
                    if not left[param]:
                        yield param


class ReduceFromRanks(torch.autograd.Function):
    """Megatron's g: partial sums in, their sum out on every rank; backward is the identity."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x.clone() if group.size > 1 else x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelLinear(torch.autograd.Function):
    """y = x W^T + b on one rank's shard of W, with the all-reduce that its kind needs.

    column: x is whole, y is a shard. Forward sends nothing; backward all-reduces the input gradient
            (Megatron's f), and computes the weight gradient while it is on the way.
    row:    x is a shard, y a partial sum, all-reduced before the bias is added once (Megatron's g).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group, row, deferred):
        ctx.save_for_backward(x)
        ctx.group, ctx.row, ctx.deferred = group, row, deferred
        ctx.weight, ctx.bias = weight, bias  # the parameters themselves, also under recompute
        if not row or group.size == 1:
            return F.linear(x, weight, bias)
        y = all_reduce(F.linear(x, weight), group)  # (B, S, C), partial over tp until here
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad @ ctx.weight.detach()  # column: partial over tp
        work = None if ctx.row else all_reduce(grad_x, ctx.group, async_op=True)
        grads = ctx.deferred.add(weight_gradients, grad, x, ctx.weight, ctx.bias)
        if work:
            work.wait()
        return grad_x, *grads, None, None, None


def weight_gradients(grad, x, weight, bias):
    """Gradients of W (out, in) and b (out,) from those of the output (B, S, out)."""
    grad = grad.flatten(0, -2)
    return grad.t() @ x.flatten(0, -2), None if bias is None else grad.sum(0)


# Their forwards stay out of torch.compile, which can see neither messages nor work that is put off.


class Column(nn.Module):
    def __init__(self, linear, group, shard, parts=1):
        super().__init__()
        self.group, self.deferred = group, shard.deferred
        self.weight, self.bias = shard(linear.weight, 0, parts), shard(linear.bias, 0, parts)

    @torch.compiler.disable
    def forward(self, x):
        return ParallelLinear.apply(x, self.weight, self.bias, self.group, False, self.deferred)


class Row(nn.Module):
    def __init__(self, linear, group, shard):
        super().__init__()
        self.group, self.deferred = group, shard.deferred
        self.weight, self.bias = shard(linear.weight, 1), linear.bias

    @torch.compiler.disable
    def forward(self, x):
        return ParallelLinear.apply(x, self.weight, self.bias, self.group, True, self.deferred)


class VocabEmbedding(nn.Module):
    def __init__(self, embedding, group, shard):
        super().__init__()
        self.group, self.weight = group, shard(embedding.weight, 0)

    @torch.compiler.disable
    def forward(self, idx):  # (B, S)
        local, outside = to_local(idx, *self.weight.tag.ranges[0])
        x = F.embedding(local, self.weight).masked_fill(outside.unsqueeze(-1), 0)
        return ReduceFromRanks.apply(x, self.group)  # (B, S, C)


class VocabCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, lo, hi, group):
        local, outside = to_local(targets, lo, hi)
        wide = logits.float() if logits.element_size() == 2 else logits
        top = all_reduce(wide.amax(-1), group, "max")  # (B, S)
        shifted = wide - top.unsqueeze(-1)  # (B, S, V/T)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
        softmax = shifted.exp_()
        sums, picked = all_reduce(torch.stack([softmax.sum(-1), picked]), group)  # (B, S) each
        softmax.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, outside)
        ctx.dtype = logits.dtype
        return (sums.log() - picked).sum()

    @staticmethod
    def backward(ctx, grad):  # softmax - onehot(target)
        softmax, local, outside = ctx.saved_tensors
        onehot = (~outside).to(softmax.dtype).unsqueeze(-1)
        grad_logits = softmax.scatter_add_(-1, local.unsqueeze(-1), -onehot).mul_(grad)
        return grad_logits.to(ctx.dtype), None, None, None, None


class VocabCrossEntropy(nn.Module):
    """Sum over tokens of log(sum(exp(logits))) - logits[target], from each rank's (B, S, V/T)."""

    def __init__(self, loss, group, shard):
        super().__init__()
        self.group, self.bounds = group, bounds(loss.vocab_size, group)

    def forward(self, logits, targets):
        return VocabCrossEntropyFunction.apply(logits, targets, *self.bounds, self.group)


# The whole decision: which part of which layer is split, and how. c_attn is three matrices in one.
PLAN = {
    "wte": VocabEmbedding,
    "attn.c_attn": lambda *args: Column(*args, parts=3),
    "attn.c_proj": Row,
    "mlp.c_fc": Column,
    "mlp.c_proj": Row,
    "lm_head": Column,
    "loss": VocabCrossEntropy,
}


class Sharder:
    """Makes this rank's shard of a full parameter, both on the meta device, once for each."""

    def __init__(self, group):
        self.group, self.deferred, self.made = group, Deferred(), {None: None}

    def __call__(self, full, dim, parts=1):
        if full not in self.made:
            n = full.size(dim) // parts
            lo, hi = bounds(n, self.group)
            shape = list(full.shape)
            shape[dim] = parts * (hi - lo)
            self.made[full] = nn.Parameter(torch.empty(shape, device="meta"))
            ranges = tuple((part * n + lo, part * n + hi) for part in range(parts))
            self.made[full].tag = Tag("", full.shape, dim, ranges)
        return self.made[full]


def parallelize(model, group, canonical_name, split_backward=False):
    """Swap the parts of a whole model on the meta device for their parallel versions, by PLAN, and
    tag every parameter. After: each has the shape of this rank's shard, still on the meta device.
    Returns the Deferred that all linear layers share.

    In a group of one there is nothing to swap, unless backward is to be split: an autograd function
    in Python takes 45 us more than torch's own, a tenth of a step where layers are tiny.
    """
    shard = Sharder(group)
    for layer in model.layers if group.size > 1 or split_backward else ():
        for path, kind in PLAN.items():
            owner, _, leaf = path.rpartition(".")
            parent = getattr(layer, owner, None) if owner else layer
            if hasattr(parent, leaf):
                setattr(parent, leaf, kind(getattr(parent, leaf), group, shard))
    for name, param in model.named_parameters(remove_duplicate=False):
        if not hasattr(param, "tag"):  # replicated
            param.tag = Tag("", param.shape, 0, ((0, param.size(0)),), copies=group.size)
        param.tag.tied = bool(param.tag.name)  # met before
        param.tag.name = canonical_name(name)
    return shard.deferred
