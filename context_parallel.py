"""Context parallelism: each sequence is split over C ranks (the width is h here). Only attention
lets tokens meet.

Under the causal mask late tokens meet more keys than early ones. So rank c has chunks c and 2C-1-c
of 2C, and all have the same to do; with one of C each, the last would have (2C-1)/C times the mean.
Elements sent per layer and microbatch, h the width of a rank's heads:

    ring        keys and values go around: 2 (C-1)/C b S h forward; twice that backward, where
                their gradients follow them (those in 32 bits at least). arXiv 2310.01889
    all-to-all  heads for tokens, and back: 4 (C-1)/C^2 b S h forward, the same backward. C divides
                the heads of a rank. arXiv 2309.14509 (Ulysses)

Held: what a block saves, / C (all-to-all: h more per token, the result before it is swapped back).

    python context_parallel.py        who meets whom, on 4 ranks        torchrun train.py --cp 2
"""

import math
from functools import partial

import torch

from collectives import all_to_all
from group import Work
from model import causal_attention
from run.demonstrations import demonstrate, ranks_asked, report_difference


def zigzag(S, C, c):
    """The positions, of 0 .. S-1, of rank c's tokens: chunks c and 2C-1-c of 2C."""
    chunks = torch.arange(S).tensor_split(2 * C)
    return torch.cat([chunks[c], chunks[2 * C - 1 - c]])


class PassOn(torch.autograd.Function):
    """Every rank's x goes to the next rank; in backward its gradient comes back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, received = group, torch.empty_like(x)
        group.exchange(x, group.next, received, group.prev).wait()
        return received

    @staticmethod
    def backward(ctx, grad):
        group, received = ctx.group, torch.empty_like(grad)
        group.exchange(grad.contiguous(), group.prev, received, group.next).wait()
        return received, None


def plain_ring_attention(q, k, v, positions, group):
    """Ring attention at its plainest: keys and values go around, and each rank adds up what they
    mean to its own queries. Any split into equal parts will do: positions travel with them.

    In: q, k, v (B, nh, S/C, hs) of this rank's tokens, and where these stand in the sequence.
    Out: (B, nh, S/C, hs), what attention over all S tokens gives for this rank's."""
    kv, key_positions = torch.stack([k, v]), positions
    top = q.new_full((*q.shape[:-1], 1), -math.inf)  # the largest score so far, against overflow
    total = 0.0  # sum of exp(score - top)
    out = 0.0  # sum of exp(score - top) * value
    for hop in range(group.size):  # in hop i the keys are those of the rank i before this one
        scores = q @ kv[0].mT / math.sqrt(q.size(-1))
        ahead = key_positions > positions.unsqueeze(1)
        scores = scores.masked_fill(ahead, -math.inf)
        # finite from hop 0 on: a token sees itself. It cancels, so no gradient flows through it.
        new_top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        weights, shrink = (scores - new_top).exp(), (top - new_top).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ kv[1]
        top = new_top
        if hop < group.size - 1:
            kv, key_positions = PassOn.apply(kv, group), PassOn.apply(key_positions, group)
    return out / total


# ---- the same, fast: torch's kernels compute, while the next keys and values travel ----
# No S x S matrix is made: a kernel returns the logsumexp of each query's scores, by which parts are
# merged, and the kernel's backward takes the merged one. Whole blocks of the mask are skipped.


def kernel(q, k, v, causal):
    """Attention of q (B, nh, Sq, hs) over k, v (B, nh, Sk, hs) -> (out, logsumexp (B, nh, Sq), what
    kernel_backward needs besides)."""
    aten = torch.ops.aten
    if q.is_cuda:  # 32 or 16 bits. Has been read, never run: no GPU was at hand
        out, lse, *rest = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal)
        return out, lse[..., : q.size(2)], rest
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse, ()


def kernel_backward(grad, q, k, v, out, lse, rest, causal):
    """Gradients of q, k, v, given those of `out`. q, k, v may be a part of the queries and keys:
    with `out` and `lse` of all keys the weights exp(score - lse) are right, and parts' gradients
    add up."""
    aten = torch.ops.aten
    if q.is_cuda:  # the kernel wants its rows padded to 32
        lse = torch.nn.functional.pad(lse, (0, -lse.size(-1) % 32), value=math.inf)
        return aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, *rest, 0.0, [True, True, True, False], causal)[:3]
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal)


def meets(mine, theirs, half):
    """(queries, keys, causal): which of rank `mine`'s tokens, as a slice, look at which of rank
    `theirs`'s. half: tokens in a chunk."""
    if theirs == mine:  # chunks in their order, so the ordinary mask
        return slice(None), slice(None), True
    if theirs < mine:  # their first chunk is before both of mine, their second behind both
        return slice(None), slice(half), False
    return slice(half, None), slice(None), False  # both of theirs are between mine


def merge(out, lse, part, part_lse):
    """Take further keys into out and lse, in place: of the softmax's sum, exp(lse) + exp(part_lse),
    theirs is the share sigmoid(part_lse - lse). In 32 bits or more, as each merge rounds."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def start_passing(x, group):
    """Start to hand x to the next rank. Returns what the rank before hands on, and its Work."""
    received = torch.empty_like(x)
    return received, group.submit(
        lambda: group.exchange(x, group.next, received, group.prev).wait(), "pass on")


class RingAttentionFunction(torch.autograd.Function):
    """In: q, k, v (B, nh, S/C, hs) of zigzag's tokens. Out: what attention over all S tokens gives
    for these. Each rank passes keys and values on C-1 times."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        kv, half = torch.stack([k, v]), q.size(2) // 2
        wide = torch.promote_types(q.dtype, torch.float)  # for sums: 32 bits at least
        for hop in range(group.size):
            if hop < group.size - 1:  # the next keys and values travel while these are used
                next_kv, work = start_passing(kv, group)
            rows, columns, causal = meets(group.rank, (group.rank - hop) % group.size, half)
            with group.span("attention", hop=hop):
                part, part_lse, rest = kernel(q[:, :, rows], *kv[..., columns, :], causal)
                if hop == 0:
                    out, lse, ctx.rest = part.to(wide), part_lse, rest
                else:
                    merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
            if hop < group.size - 1:
                work.wait()
                kv = next_kv
        out = out.to(q.dtype)  # in the kernel's order of memory, on which its backward relies
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad):
        """Keys and values go around once more, the sums of their gradients one hop behind them: in
        hop i > 0 this rank adds its share for the keys it has to the sum that followed them, and
        sends that on. The last sum to come is for its own keys, and it adds its share of hop 0."""
        (q, k, v, out, lse), group = ctx.saved_tensors, ctx.group
        kv, half = torch.stack([k, v]), q.size(2) // 2
        wide = torch.promote_types(q.dtype, torch.float)
        sums, sums_work = torch.zeros_like(kv, dtype=wide), Work()  # hop 1 begins a sum
        for hop in range(group.size):
            if hop < group.size - 1:
                next_kv, work = start_passing(kv, group)
            rows, columns, causal = meets(group.rank, (group.rank - hop) % group.size, half)
            with group.span("attention", hop=hop):
                dq, dk, dv = kernel_backward(grad[:, :, rows], q[:, :, rows], *kv[..., columns, :],
                                             out[:, :, rows], lse[:, :, rows], ctx.rest, causal)
            if hop == 0:
                grad_q, own = dq.to(wide), (dk, dv)
            else:
                grad_q[:, :, rows] += dq
                sums_work.wait()
                sums[0][:, :, columns] += dk
                sums[1][:, :, columns] += dv
                sums, sums_work = start_passing(sums, group)
            if hop < group.size - 1:
                work.wait()
                kv = next_kv
        sums_work.wait()
        grad_k, grad_v = (total.add_(part) for total, part in zip(sums, own, strict=True))
        return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), None


@torch.compiler.disable  # which sees no messages
def ring_attention(q, k, v, group):  # (B, nh, S/C, hs) each, and so the result
    return RingAttentionFunction.apply(q, k, v, group)


# ---- all-to-all: for attention, a rank gives up heads, and gets all tokens of the others ----


def swap(parts, group):
    """parts[j] is for rank j, which has one of the same shape for this rank; returns these."""
    parts = [part.contiguous() for part in parts]
    received = [torch.empty_like(part) for part in parts]
    all_to_all(received, parts, group)
    return received


def to_whole_sequences(x, group):
    """(..., nh, S/C, hs), zigzag's tokens -> (..., nh/C, S, hs), all tokens in their order."""
    received = swap(x.chunk(group.size, dim=-3), group)
    # from rank j: chunks j and 2C-1-j, so the second ones run backwards
    first, second = zip(*(part.chunk(2, dim=-2) for part in received), strict=True)
    return torch.cat([*first, *reversed(second)], dim=-2)


def to_own_tokens(x, group):
    """(..., nh/C, S, hs) -> (..., nh, S/C, hs)."""
    chunks = x.chunk(2 * group.size, dim=-2)
    by_rank = zip(chunks[: group.size], reversed(chunks[group.size :]), strict=True)
    return torch.cat(swap([torch.cat(both, dim=-2) for both in by_rank], group), dim=-3)


class Swap(torch.autograd.Function):
    """there(x), which only moves numbers, so that gradients take the way back(gradient)."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad, ctx.group), None, None, None


@torch.compiler.disable
def all_to_all_attention(q, k, v, group):  # (B, nh, S/C, hs) each, and so the result
    qkv = torch.stack([q, k, v])
    q, k, v = Swap.apply(qkv, group, to_whole_sequences, to_own_tokens)
    return Swap.apply(causal_attention(q, k, v), group, to_own_tokens, to_whole_sequences)


KINDS = {"ring": ring_attention, "all-to-all": all_to_all_attention}


def split_sequences(model, group, kind="ring"):
    """Have a model take zigzag's tokens on each rank of the group, and attend over all. Returns
    their positions. block_size must be a multiple of 2C, and sequences that long."""
    at = zigzag(model.config.block_size, group.size, group.rank).to(group.device)
    model.layers[0].positions = at
    for layer in model.layers[1:-1] if group.size > 1 else ():
        layer.attn.core = partial(KINDS[kind], group=group)
    return at


def pairs(queries, keys):
    """How many pairs there are of a query and a key that it may see, by their positions."""
    return int((queries.unsqueeze(1) >= keys).sum())


def demo(mesh):
    """Who holds which chunk, who meets whom, what each hop takes; then each form against torch."""
    group, C, S = mesh.group("cp"), mesh.sizes["cp"], 8 * mesh.sizes["cp"]
    every = [zigzag(S, C, c) for c in range(C)]
    if group.rank == 0:
        hops = torch.full((S, S), -1)
        for mine, queries in enumerate(every):
            for theirs, keys in enumerate(every):
                hops[queries.unsqueeze(1), keys] = (mine - theirs) % C
        print(f"{S} tokens in {2 * C} chunks; a digit is the hop in which queries (rows) meet keys")
        for chunk in range(2 * C):
            row = " ".join(str(int(hops[4 * chunk, 4 * key])) if key <= chunk else "."
                           for key in range(2 * C))
            print(f"  chunk {chunk:2d} of rank {min(chunk, 2 * C - 1 - chunk)}   {row}")
        naive = list(torch.arange(S).chunk(C))
        for name, split in (("zigzag", every), ("one chunk of C each", naive)):
            print(f"{name}: pairs of query and key on ranks 0 to {C - 1}")
            for hop in range(C):
                work = [pairs(split[c], split[(c - hop) % C]) for c in range(C)]
                print(f"  hop {hop}  " + "".join(f"{n:6d}" for n in work))
            busiest = max(sum(pairs(mine, keys) for keys in split) for mine in split)
            print(f"  the busiest rank has {busiest * C / pairs(*[torch.arange(S)] * 2):.2f} times "
                  "the mean")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, C, S, 8, dtype=torch.double, generator=generator) for _ in "qkv")
    mine = every[group.rank]
    plain = partial(plain_ring_attention, positions=mine)
    for name, core in {"plain": plain, **KINDS}.items():
        grads = []
        for attention, at in ((causal_attention, slice(None)), (partial(core, group=group), mine)):
            parts = [x[:, :, at].clone().requires_grad_() for x in (q, k, v)]
            attention(*parts).sin().sum().backward()
            grads.append([part.grad for part in parts])
        report_difference(name, group.rank, [(part, whole[:, :, mine]) for whole, part in zip(
            *grads, strict=True)])


if __name__ == "__main__":
    demonstrate(demo, cp=ranks_asked(4))
