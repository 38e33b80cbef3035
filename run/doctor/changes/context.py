"""Changes of context parallelism: masks, the ring, positions and targets of a rank's tokens."""

from functools import partial

import torch

from collectives import WithBackward, all_gather
from context_parallel import zigzag
from model import causal_attention
from run.doctor.changes.sequence import from_zero, positions_from
from run.doctor.step import Change
from tensor_parallel import sum_of_copy


def in_one_piece(own, cp, tp):
    """As if each context rank had one contiguous part of the sequence."""
    return torch.arange(len(own)) + cp.rank * len(own)


def contiguous(ids, targets, k, mesh, positions):
    """Tokens of one contiguous part of the sequence for each context rank."""
    own = torch.arange(len(positions)) + mesh.group("cp").rank * len(positions)
    return ids[k][:, own], targets[k][:, own]


def targets_from_own(ids, targets, k, mesh, positions):
    """Targets made of the rank's own tokens, after the sequence was split."""
    own = ids[k][:, positions]
    return own, own.roll(-1, 1)


def replace_attention(make):
    def after(model, mesh):
        group = mesh.group("cp")
        for block in model.layers[1:-1]:
            block.attn.attend = partial(make, right=block.attn.attend, group=group)
    return after


def whole_keys(x, group, comes_back=True):
    """All ranks' tokens of x (B, nh, S/N, hs), in the order of positions. comes_back: do gradients
    from other ranks' queries come back?"""
    N = group.size

    def forward(x):
        parts = x.new_empty((N, *x.shape))
        parts[group.rank] = x
        parts = all_gather(parts, group)
        S = N * x.size(2)
        full = x.new_empty((*x.shape[:2], S, x.size(3)))
        for rank, part in enumerate(parts):
            full[:, :, zigzag(S, N, rank)] = part
        return full

    def back(grad):
        summed = sum_of_copy(grad, group) if comes_back else grad
        return summed[:, :, zigzag(grad.size(2), N, group.rank)].contiguous()

    return WithBackward.apply(x, forward, back)


class Flash(torch.autograd.Function):
    """Attention of own queries to parts of the keys, merged part by part; backward computes the
    softmax again from its logsumexp, like the ring's. seen, seen_back: (parts, S/N, S), which key a
    query sees in forward, and in backward; even: parts are averaged, not weighted."""

    @staticmethod
    def forward(ctx, q, k, v, seen, seen_back, even):
        scores = q @ k.mT / q.size(-1) ** 0.5
        out = lse = None
        for part in seen:
            own = scores.masked_fill(~part, -torch.inf)
            own_lse = own.logsumexp(-1)
            own_out = (own - own_lse.unsqueeze(-1)).exp().nan_to_num(0) @ v
            if out is None:
                out, lse = own_out, own_lse
                continue
            weight = torch.sigmoid(own_lse - lse)
            if even:  # only queries that have a key in this part
                weight = (own_lse > -torch.inf).to(out.dtype) / 2
            out = torch.lerp(out, own_out, weight.unsqueeze(-1))
            lse = torch.logaddexp(lse, own_lse)
        ctx.save_for_backward(q, k, v, out, lse, seen_back.any(0))
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, seen = ctx.saved_tensors
        scale = q.size(-1) ** -0.5
        weights = (q @ k.mT * scale - lse.unsqueeze(-1)).exp().masked_fill(~seen, 0)
        grad_weights = grad @ v.mT - (grad * out).sum(-1, keepdim=True)
        grad_scores = weights * grad_weights * scale
        return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad, None, None, None


def ring_that_sees(see, see_back=None, comes_back=True, even=False):
    """An attention. see(own, keys, rank, key_rank, hop): (S/N, S/N), which of a rank's keys the own
    queries see, from the positions of both; see_back: in backward, if that differs."""
    def attend(q, k, v, right, group):
        N = group.size
        S = N * q.size(2)
        own = zigzag(S, N, group.rank)

        def table(see):
            seen = torch.zeros(N, len(own), S, dtype=torch.bool)
            for hop in range(N):
                key_rank = (group.rank - hop) % N
                keys = zigzag(S, N, key_rank)
                seen[hop][:, keys] = see(own, keys, group.rank, key_rank, hop, N)
            return seen

        shared_by = q.size(1) // k.size(1)
        k, v = (whole_keys(x, group, comes_back).repeat_interleave(shared_by, 1) for x in (k, v))
        return Flash.apply(q, k, v, table(see), table(see_back or see), even)
    return replace_attention(attend)


def earlier(own, keys, rank, key_rank, hop, N):
    """The right mask."""
    return keys <= own.unsqueeze(1)


def but_last_hop(own, keys, rank, key_rank, hop, N):
    return earlier(own, keys, rank, key_rank, hop, N) & (hop < N - 1 or N == 1)


def all_of_others(own, keys, rank, key_rank, hop, N):
    return earlier(own, keys, rank, key_rank, hop, N) | (key_rank != rank)


def in_contiguous_parts(own, keys, rank, key_rank, hop, N):
    """As if rank r had the r-th part of the sequence."""
    if key_rank == rank:
        return earlier(own, keys, rank, key_rank, hop, N)
    return torch.full((len(own), len(keys)), key_rank < rank)


def before_for_after(own, keys, rank, key_rank, hop, N):
    """The two cases of zigzag's mask are swapped: keys of ranks before and after."""
    if key_rank == rank:
        return earlier(own, keys, rank, key_rank, hop, N)
    half = len(own) // 2
    seen = torch.zeros(len(own), len(keys), dtype=torch.bool)
    if key_rank > rank:
        seen[:, :half] = True
    else:
        seen[half:] = True
    return seen


def context_changes():
    found = [
        Change("each context rank (cp) counts positions from 0", after=positions_from(from_zero)),
        Change("positions are those of contiguous parts, the tokens are split by zigzag (cp)",
               after=positions_from(in_one_piece)),
        Change("tokens and positions are those of contiguous parts, the mask is zigzag's (cp)",
               after=positions_from(in_one_piece), feed=contiguous),
        Change("targets are shifted after the sequence was split (cp): the last one of a rank is "
               "its first token", feed=targets_from_own),
        Change("each context rank (cp) attends to its own keys only",
               after=replace_attention(lambda q, k, v, right, group: causal_attention(q, k, v))),
        Change("gradients of keys and values do not come back to their context rank (cp)",
               after=ring_that_sees(earlier, comes_back=False), forward=False),
        Change("the ring's last hop is lost in forward and backward (cp)",
               after=ring_that_sees(but_last_hop)),
        Change("the ring's last hop is lost in forward (cp)",
               after=ring_that_sees(but_last_hop, earlier)),
        Change("the ring's last hop is lost in backward (cp)", forward=False,
               after=ring_that_sees(earlier, but_last_hop)),
        Change("partial results of attention are averaged, not weighted by their logsumexps (cp)",
               after=ring_that_sees(earlier, even=True))]
    masks = {"keys of other context ranks (cp) are not masked": all_of_others,
             "the mask takes the tokens of context ranks (cp) for contiguous parts":
             in_contiguous_parts,
             "the mask takes context ranks (cp) before for ranks after": before_for_after}
    return found + [Change(words, after=ring_that_sees(see)) for words, see in masks.items()]
