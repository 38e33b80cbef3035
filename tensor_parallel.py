"""Tensor parallelism: each matrix of a block is split over T ranks.

    c_attn, c_fc   column (of W^T): rank t computes some heads or hidden units  (out/T, in)
    c_proj         row: rank t multiplies what it has, the partial sums are added (out, in/T)
    wte, lm_head   rows of the vocabulary, any size; logits are never gathered      (V/T, C)
    LayerNorm, wpe, biases of c_proj are replicated.

Sent per rank, block and microbatch: four all-reduces, 4 * 2 (T-1)/T b S C elements; the embedding
adds one forward, the head one backward, the loss two, of 3 b S. --sp adds half an all-reduce for
each column. A block saves for backward, per token, 4 C + 4 elements, and 1/T of 12 C and of nh in
32 bits or more (attention's); under --sp 1/T of it all; with --recompute only its input, C.
Megatron-LM, arXiv 1909.08053.

    python tensor_parallel.py        a GPT on 4 ranks        torchrun train.py --tp 2
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from collectives import all_reduce, own_chunk
from group import Group
from model import ABSENT, build
from run.demonstrations import demonstrate, report_difference
from sequence_parallel import Crossing, Leave
from shard import bounds, tag_whole
from sizes import GPTConfig

#   x (B, S, C)  ->  column: W1 (4C/T, C)  ->  GELU  ->  row: W2 (C, 4C/T)  ->  sum over ranks
#
#   rank 0   x  [ W1 upper ]   h, left half    [ W2 left  ]   partial y \
#   rank 1   x  [ W1 lower ]   h, right half   [ W2 right ]   partial y /  + = y on both
#
# Hidden units do not meet before the second matrix adds them up: one all-reduce forward (g, behind
# the row), one backward (f, before the column). shard(W, dim): this rank's slice of W (Sharder).


class CopyToRanks(torch.autograd.Function):
    """Megatron's f: forward does nothing. Every rank used x, so backward sums x's gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """Megatron's g: forward adds up the ranks' partial sums. All ranks compute the same loss from
    the sum, and it counts once: so each has the gradient of the sum, which is that of its term."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x.clone(), group)  # which works in place

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class PlainColumn(nn.Module):
    """x whole -> y a shard: this rank's rows of W, which are the columns of W^T in y = x W^T."""

    def __init__(self, linear, shard, parts=1):
        super().__init__()
        self.crossing, self.put_off = shard.crossing, shard.put_off  # plain: only its .group
        self.weight, self.bias = shard(linear.weight, 0, parts), shard(linear.bias, 0, parts)

    def forward(self, x):  # (B, S, in) -> (B, S, out/T)
        return F.linear(CopyToRanks.apply(x, self.crossing.group), self.weight, self.bias)


class PlainRow(nn.Module):
    """x a shard -> y whole. The bias is replicated, and added once, after the sum."""

    def __init__(self, linear, shard):
        super().__init__()
        self.crossing, self.put_off = shard.crossing, shard.put_off  # plain: only its .group
        self.weight, self.bias = shard(linear.weight, 1), linear.bias

    def forward(self, x):  # (B, S, in/T) -> (B, S, out)
        return SumOverRanks.apply(F.linear(x, self.weight), self.crossing.group) + self.bias


# ---- the same two, 2 to 8% faster: backward sends the input's gradient, computes the weights' ----
# Nobody waits for them, so they may be put off for long (pipeline.py, zero bubble): put_off(
# weight_gradients, grad, x, W, b) returns those of W and b, or None for each, to come later. Under
# --sp x enters by an all-gather, y leaves by a reduce-scatter: crossing.enter(x) starts the one or
# nothing, crossing.leave(y) the other or an all-reduce, and what they return waits for it.


def weight_gradients(grad, x, weight, bias):
    """Gradients of W (out, in) and b (out,) from those of the output (B, S, out)."""
    grad = grad.flatten(0, -2)
    return grad.t() @ x.flatten(0, -2), None if bias is None else grad.sum(0)


def at_once(fn, *args):
    return fn(*args)


class ColumnLinear(torch.autograd.Function):
    """What PlainColumn does. Saves x as it came: under --sp own tokens, to be gathered again."""

    @staticmethod
    def forward(ctx, x, weight, bias, crossing, put_off):
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias  # the parameters themselves, whose .grad put_off fills
        ctx.crossing, ctx.put_off = crossing, put_off
        return F.linear(crossing.enter(x)(), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,), grad = ctx.saved_tensors, grad.contiguous()
        entering = ctx.crossing.enter(x, async_op=True)
        grad_x = grad @ ctx.weight.detach()  # (B, S, in), partial over tp
        x = entering()
        leaving = ctx.crossing.leave(grad_x, async_op=True)
        del entering, grad_x  # under --sp these were copied, and hold b S C each
        grads = ctx.put_off(weight_gradients, grad, x, ctx.weight, ctx.bias)
        return leaving(), *grads, None, None


class RowLinear(torch.autograd.Function):
    """What PlainRow does, without the bias."""

    @staticmethod
    def forward(ctx, x, weight, crossing, put_off):
        ctx.save_for_backward(x)
        ctx.weight, ctx.crossing, ctx.put_off = weight, crossing, put_off
        return crossing.leave(F.linear(x, weight))()

    @staticmethod
    def backward(ctx, grad):
        (x,), grad = ctx.saved_tensors, ctx.crossing.enter(grad.contiguous())()
        grad_weight, _ = ctx.put_off(weight_gradients, grad, x, ctx.weight, None)
        return grad @ ctx.weight.detach(), grad_weight, None, None


class Column(PlainColumn):
    @torch.compiler.disable  # which sees neither messages nor work that is put off
    def forward(self, x):
        return ColumnLinear.apply(x, self.weight, self.bias, self.crossing, self.put_off)


class Row(PlainRow):
    @torch.compiler.disable
    def forward(self, x):
        return RowLinear.apply(x, self.weight, self.crossing, self.put_off).add_(self.bias)


# ---- the two ends, split along the vocabulary ----


def to_local(idx, start, stop):
    """Token ids as rows of the shard [start, stop), 0 for those outside, and a mask of these."""
    outside = (idx < start) | (idx >= stop)
    return (idx - start).masked_fill(outside, 0), outside


class VocabEmbedding(nn.Module):
    """Each token's row is on one rank; the others add zero to it."""

    def __init__(self, embedding, shard):
        super().__init__()
        self.crossing, self.weight = shard.crossing, shard(embedding.weight, 0)

    @torch.compiler.disable
    def forward(self, idx):  # (B, S)
        local, outside = to_local(idx, *self.weight.shard.ranges[0])
        x = F.embedding(local, self.weight).masked_fill(outside.unsqueeze(-1), 0)
        return Leave.apply(x, self.crossing)  # (B, S, C), under --sp (B, S/T, C)


class VocabCrossEntropyFunction(torch.autograd.Function):
    """Three numbers a token are exchanged, where gathering the logits would exchange V: the largest
    logit, the sum of the exponentials, and the target's logit."""

    @staticmethod
    def forward(ctx, logits, targets, start, stop, group):
        local, outside = to_local(targets, start, stop)
        wide = logits.float() if logits.element_size() == 2 else logits
        top = all_reduce(wide.amax(-1), group, "max")  # (B, S)
        shifted = wide - top.unsqueeze(-1)  # (B, S, V/T)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
        softmax = shifted.exp_()
        sums, picked = all_reduce(torch.stack([softmax.sum(-1), picked]), group)  # (B, S) each
        ctx.dtype, absent = logits.dtype, targets == ABSENT  # which has neither loss nor gradient
        softmax.div_(sums.masked_fill(absent, torch.inf).unsqueeze(-1))
        ctx.save_for_backward(softmax, local, outside)
        return (sums.log() - picked).masked_fill(absent, 0).sum()

    @staticmethod
    def backward(ctx, grad):  # softmax - onehot(target)
        softmax, local, outside = ctx.saved_tensors
        here = (~outside).to(softmax.dtype).unsqueeze(-1)  # 1 if the target is on this rank
        grad_logits = softmax.scatter_add_(-1, local.unsqueeze(-1), -here).mul_(grad)
        return grad_logits.to(ctx.dtype), None, None, None, None


class VocabCrossEntropy(nn.Module):
    """Sum over tokens of log(sum(exp(logits))) - logits[target], from each rank's (B, S, V/T)."""

    def __init__(self, loss, shard):
        super().__init__()
        self.group = shard.crossing.group
        self.bounds = bounds(loss.vocab_size, self.group)

    def forward(self, logits, targets):
        return VocabCrossEntropyFunction.apply(logits, targets, *self.bounds, self.group)


# The whole decision: which part of which layer is split, and how. c_attn is three matrices in one.
PLAN = {"wte": VocabEmbedding, "attn.c_attn": partial(Column, parts=3), "attn.c_proj": Row,
        "mlp.c_fc": Column, "mlp.c_proj": Row, "lm_head": Column, "loss": VocabCrossEntropy}
PLAIN = PLAN | {"attn.c_attn": partial(PlainColumn, parts=3), "attn.c_proj": PlainRow,
                "mlp.c_fc": PlainColumn, "mlp.c_proj": PlainRow, "lm_head": PlainColumn}


class Sharder:
    """Makes this rank's shard of a full parameter, tagged, without values. A weight that is used
    twice is made once, so what is tied stays tied."""

    def __init__(self, crossing, put_off):
        self.crossing, self.put_off = crossing, put_off  # for the layers
        self.made = {None: None}  # full parameter -> its shard; no bias (None) stays no bias

    def __call__(self, full, dim, parts=1):
        if full not in self.made:
            n = full.size(dim) // parts
            start, stop = bounds(n, self.crossing.group)
            ranges = tuple((part * n + start, part * n + stop) for part in range(parts))
            like = full.narrow(dim, 0, parts * (stop - start))
            self.made[full] = nn.Parameter(torch.empty_like(like))
            self.made[full].shard = replace(full.shard, dim=dim, ranges=ranges)
        return self.made[full]


def parallelize(model, group, plan=PLAN, sp=False, put_off=None):
    """Swap the parts of a whole, tagged model for their parallel versions.

    After: each parameter has the shape of this rank's shard, without values, and its tag says which
    slice that is, or that all ranks of the group hold the same. With sp the ranks have different
    tokens between blocks, so the gradients of what they all hold are to be summed over them, too.
    Without put_off (ColumnLinear) nothing is swapped in a group of one: torch's own layers are 45
    us faster each than an autograd function in Python. T must divide n_head, and with sp the tokens
    of a sequence on this rank; after split_sequences (context_parallel.py)."""
    sp = sp and group.size > 1
    shard = Sharder(Crossing(group, sp), put_off or at_once)
    for layer in model.layers if group.size > 1 or put_off else ():
        for path, kind in plan.items():
            owner, _, leaf = path.rpartition(".")
            parent = getattr(layer, owner, None) if owner else layer
            if hasattr(parent, leaf):
                setattr(parent, leaf, kind(getattr(parent, leaf), shard))
    for param in model.parameters():
        if not any(param is made for made in shard.made.values()):
            param.shard.shared_by += (group,)
            param.shard.sum_over += (group,) if sp else ()
    if sp:
        at = model.layers[0].positions
        at = torch.arange(model.config.block_size, device=group.device) if at is None else at
        model.layers[0].positions = own_chunk(at, group)


def demo(mesh):
    """A GPT of one block: what rank 0 holds of it, and its gradients against the whole model's."""
    config = GPTConfig(50, block_size=8, n_layer=1, n_head=4, n_embd=16)
    ids = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))
    alone = Group(mesh, "alone", [mesh.rank], 0)

    def gradients(plan, group, sp=False):
        model = build(config, dtype=torch.double)
        whole = dict(model.canonical_parameters())
        tag_whole(model, alone)
        parallelize(model, group, plan, sp)
        for p in model.parameters():
            p.data.copy_(p.shard.slice(whole[p.shard.name].data))
        model(ids, ids).backward()
        for p in model.parameters():
            for summed_over in p.shard.sum_over:
                all_reduce(p.grad, summed_over)
        return list(model.parameters())

    want = {p.shard.name: p.grad for p in gradients(PLAN, alone)}
    for form, plan in (("plain", PLAIN), ("fast", PLAN), ("fast --sp", PLAN)):
        mine = gradients(plan, mesh.group("tp"), sp="--sp" in form)
        for p in mine if mesh.rank == 0 and form == "plain" else ():
            print(f"{p.shard.name:34} {[*p.shard.shape]!s:>9} on rank 0: {[*p.shape]}")
        report_difference(form, mesh.rank, [(p.grad, p.shard.slice(want[p.shard.name]))
                                            for p in mine])


if __name__ == "__main__":
    demonstrate(demo, tp=4)
