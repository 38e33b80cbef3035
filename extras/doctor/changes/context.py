"""Changes of context parallelism: masks and sums of attention; positions and targets.

Here attention is computed without a ring: each rank gathers all keys and values, and a table says
which of them a query sees at which hop. A wrong ring is a wrong table. N = 2, S = 4, zigzag (rank 0
has tokens 0 3, rank 1 has 1 2), the right table of rank 1:

                 hop 0, own keys      hop 1, keys of rank 0
    keys         0 1 2 3              0 1 2 3
    query 1      . x . .              x . . .
    query 2      . x x .              x . . .
"""

from functools import partial

import torch

from collectives import WithBackward, all_gather
from context_parallel import zigzag
from extras.doctor.changes.sequence import from_zero, positions_from
from extras.doctor.step import Change
from model import ABSENT, causal_attention
from tensor_parallel import sum_of_copy

# ---- positions and targets ----


def context_positions_from(make):
    """make(own, mesh): the positions (S/N,) that take the place of a context rank's own; make reads
    only how many there are. Where --sp cuts the right positions, these are cut, too."""
    def after(model, mesh):
        # As many positions as a context rank has: make reads only their number
        as_many = torch.arange(model.config.block_size // mesh.group("cp").size)

        def part(own, mesh):
            n_parts = len(as_many) // len(own)  # T where --sp cuts, else 1
            whole = make(as_many, mesh)
            return whole.chunk(n_parts)[mesh.group("tp").rank % n_parts]

        positions_from(part)(model, mesh)
    return after


def in_contiguous_parts(own, mesh):
    """Positions as if context rank r had the r-th part of the sequence. own: a context rank's."""
    return torch.arange(len(own)) + mesh.group("cp").rank * len(own)


def tokens_of_contiguous_parts(ids, targets, k, mesh, positions):
    """Feeds rank r the r-th part of the sequence."""
    own = in_contiguous_parts(positions, mesh)
    return ids[k][:, own], targets[k][:, own]


def targets_from_own(ids, targets, k, mesh, positions):
    """Feeds targets that are made of the rank's own tokens, after the sequence was split."""
    own = ids[k][:, positions]
    return own, own.roll(-1, 1)


def targets_from_own_but_last(ids, targets, k, mesh, positions):
    """Like targets_from_own, but the last target of the rank is right. With zigzag the target at
    the end of the early half is then the first token of the late half."""
    own, wrong = targets_from_own(ids, targets, k, mesh, positions)
    return own, torch.cat([wrong[:, :-1], targets[k][:, positions[-1:]]], dim=1)


def targets_from_halves(ids, targets, k, mesh, positions):
    """Like targets_from_own, in each half of zigzag: its last target is its first token."""
    own = ids[k][:, positions]
    return own, torch.cat([half.roll(-1, 1) for half in own.chunk(2, dim=1)], dim=1)


# ---- the loss ----


def mean_of_own_tokens(total, parts):
    """Divides a context rank's loss by its own tokens that count, then by the number of such
    `parts` of the batch. total: the number of all tokens that count, by which step.py divides."""
    def after(model, mesh):
        head = model.layers[-1]
        loss = head.loss

        def own_mean(logits, targets):
            return loss(logits, targets) * (total / (parts * (targets != ABSENT).sum()))

        head.loss = own_mean
    return after


def means_of_context_ranks(step):
    """Changes of a step whose context ranks have different numbers of tokens, because some are
    padding."""
    D, m, _, _ = step.ids.shape
    N = step.layout["cp"]
    total = step.divisor()
    different = "which have different numbers of tokens"
    return [Change(f"a mean of the context ranks' (cp) means, {different}",
                   after=mean_of_own_tokens(total, N)),
            Change(f"a mean of the context ranks' (cp) means of each microbatch, {different}",
                   after=mean_of_own_tokens(total, D * m * N), by_microbatch=True)]


# ---- attention ----


def replace_attention(attend):
    """attend(q, k, v, group): takes the place of ring_attention. Each (B, nh, S/N, hs)."""
    def after(model, mesh):
        for block in model.layers[1:-1]:
            block.attn.attend = partial(attend, group=mesh.group("cp"))
    return after


def own_keys_only(q, k, v, group):
    return causal_attention(q, k, v)


def gather_keys(x, group, comes_back):
    """x (B, nh, S/N, hs) of each rank -> (B, nh, S, hs) of all, in the order of positions.
    comes_back: does a key's gradient have the terms of other ranks' queries?"""
    N = group.size

    def gather(x):
        parts = x.new_empty((N, *x.shape))
        parts[group.rank] = x
        parts = all_gather(parts, group)
        S = N * x.size(2)
        full = x.new_empty((*x.shape[:2], S, x.size(3)))
        for rank, part in enumerate(parts):
            full[:, :, zigzag(S, N, rank)] = part
        return full

    def own_gradient(grad):
        summed = sum_of_copy(grad, group) if comes_back else grad
        return summed[:, :, zigzag(grad.size(2), N, group.rank)].contiguous()

    return WithBackward.apply(x, gather, own_gradient)


# How a hop's result is merged into the result so far. lse, hop_lse: the logsumexps (B, nh, S/N) of
# both; -inf for a query that sees no key of the hop. Returns the weight of the hop's result, and
# the logsumexp of both together


def merge_by_lse(lse, hop_lse):
    """The right merge."""
    # exp(hop_lse) / (exp(lse) + exp(hop_lse))
    return torch.sigmoid(hop_lse - lse), torch.logaddexp(lse, hop_lse)


def merge_half(lse, hop_lse):
    sees_any = hop_lse > -torch.inf
    return sees_any.to(lse.dtype) / 2, torch.logaddexp(lse, hop_lse)


def merge_swapped(lse, hop_lse):
    """The result so far has the weight of the hop's result."""
    sees_any = hop_lse > -torch.inf
    return torch.sigmoid(lse - hop_lse) * sees_any, torch.logaddexp(lse, hop_lse)


def merge_late(lse, hop_lse):
    """The logsumexps are merged first, and the weight is made of the merged one."""
    merged = torch.logaddexp(lse, hop_lse)
    return torch.sigmoid(hop_lse - merged), merged


def merge_last(lse, hop_lse):
    """A hop's result takes the place of the result so far."""
    sees_any = hop_lse > -torch.inf
    return sees_any.to(lse.dtype), torch.logaddexp(lse, hop_lse)


def keep_first_lse(lse, hop_lse):
    """The result is merged, the logsumexp is not."""
    return torch.sigmoid(hop_lse - lse), lse


class Hops(torch.autograd.Function):
    """Attention of a rank's queries to all keys, hop by hop, like a ring of flash attention: each
    hop's result is merged into the result so far by their logsumexps, and backward computes the
    softmax again, from the last logsumexp."""

    @staticmethod
    def forward(ctx, q, k, v, seen, seen_back, merge):
        """q: (B, nh, S/N, hs); k, v: (B, nh, S, hs). seen, seen_back: (N, S/N, S), the keys that a
        query sees at each hop, in forward and in backward. merge: one of the functions below."""
        scores = q @ k.mT / q.size(-1) ** 0.5  # (B, nh, S/N, S)
        out = None  # (B, nh, S/N, hs), merged so far
        lse = None  # (B, nh, S/N)
        for seen_now in seen:
            hop_scores = scores.masked_fill(~seen_now, -torch.inf)
            hop_lse = hop_scores.logsumexp(-1)  # -inf for a query that sees no key
            hop_out = (hop_scores - hop_lse.unsqueeze(-1)).exp().nan_to_num(0) @ v
            if out is None:
                out = hop_out
                lse = hop_lse
                continue
            weight, lse = merge(lse, hop_lse)
            out = torch.lerp(out, hop_out, weight.unsqueeze(-1))
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


def hop_table(see, group, S):
    """(N, S/N, S) bool: which keys this rank's queries see at each hop. see: one of the functions
    below."""
    N = group.size
    own = zigzag(S, N, group.rank)
    seen = torch.zeros(N, len(own), S, dtype=torch.bool)
    for hop in range(N):
        key_rank = (group.rank - hop) % N  # N = 4, rank 1: after 0 1 2 3 hops the keys of 1 0 3 2
        keys = zigzag(S, N, key_rank)
        seen[hop][:, keys] = see(own, keys, group.rank, key_rank, hop == N - 1)
    return seen


def ring_that_sees(see, see_back=None, comes_back=True, merge=merge_by_lse):
    """The `after` of a Change: attention whose hops see what see() says, and in backward what
    see_back() says, if that is given. comes_back: see gather_keys. merge: see Hops."""
    def attend(q, k, v, group):
        S = group.size * q.size(2)
        seen = hop_table(see, group, S)
        seen_back = hop_table(see_back or see, group, S)
        shared_by = q.size(1) // k.size(1)  # heads of q that share one of k and v: a Llama's
        keys = gather_keys(k, group, comes_back).repeat_interleave(shared_by, 1)
        values = gather_keys(v, group, comes_back).repeat_interleave(shared_by, 1)
        return Hops.apply(q, keys, values, seen, seen_back, merge)
    return replace_attention(attend)


# Which keys a query sees, (S/N, S/N) bool. own, keys: positions (S/N,) of the rank's queries and of
# the keys of key_rank; is_last: is it the ring's last hop?


def see_earlier(own, keys, rank, key_rank, is_last):
    """The right mask."""
    return keys <= own.unsqueeze(1)


def see_but_last_hop(own, keys, rank, key_rank, is_last):
    return see_earlier(own, keys, rank, key_rank, is_last) & (not is_last)


def see_all_of_others(own, keys, rank, key_rank, is_last):
    return see_earlier(own, keys, rank, key_rank, is_last) | (key_rank != rank)


def see_ranks_before(own, keys, rank, key_rank, is_last):
    """The mask of a split in which rank r has the r-th part of the sequence."""
    if key_rank == rank:
        return see_earlier(own, keys, rank, key_rank, is_last)
    return torch.full((len(own), len(keys)), key_rank < rank)


def see_as_of_other_way(N):
    """The mask of the keys that come around the ring the other way: after hop 1 those of the rank
    after, not of the rank before."""
    def see(own, keys, rank, key_rank, is_last):
        taken_for = zigzag(N * len(own), N, (2 * rank - key_rank) % N)
        return taken_for <= own.unsqueeze(1)
    return see


def see_swapped(own, keys, rank, key_rank, is_last):
    """Zigzag's two cases, swapped. Right: all queries see the early half of an earlier rank's keys;
    the late half of the queries sees all keys of a later rank."""
    if key_rank == rank:
        return see_earlier(own, keys, rank, key_rank, is_last)
    half = len(own) // 2
    seen = torch.zeros(len(own), len(keys), dtype=torch.bool)
    if key_rank > rank:
        seen[:, :half] = True
    else:
        seen[half:] = True
    return seen


def context_changes(step):
    N = step.layout["cp"]
    found = means_of_context_ranks(step) if (step.targets == ABSENT).any() else []
    if N > 2:  # with two ranks each is before and after the other
        found.append(Change("the mask takes a hop's keys for those of the rank on the other side "
                            "of the ring (cp)", after=ring_that_sees(see_as_of_other_way(N))))
    return found + [
        Change("each context rank (cp) counts positions from 0",
               after=context_positions_from(from_zero)),
        Change("positions are those of contiguous parts, the tokens are split by zigzag (cp)",
               after=context_positions_from(in_contiguous_parts)),
        Change("tokens and positions are those of contiguous parts, the mask is zigzag's (cp)",
               after=context_positions_from(in_contiguous_parts), feed=tokens_of_contiguous_parts),
        Change("targets are shifted after the sequence was split (cp): the last one of a rank is "
               "its first token", feed=targets_from_own),
        Change("targets are shifted after the sequence was split (cp): at zigzag's seam, the "
               "target of a rank's early half is the first token of the late half",
               feed=targets_from_own_but_last),
        Change("targets are shifted after each half of zigzag was cut (cp): the last target of a "
               "half is the half's first token", feed=targets_from_halves),
        Change("each context rank (cp) attends to its own keys only",
               after=replace_attention(own_keys_only)),
        Change("gradients of keys and values do not come back to their context rank (cp)",
               after=ring_that_sees(see_earlier, comes_back=False), forward=False),
        Change("the ring's last hop is lost in forward and backward (cp)",
               after=ring_that_sees(see_but_last_hop)),
        Change("the ring's last hop is lost in forward (cp)",
               after=ring_that_sees(see_but_last_hop, see_earlier)),
        Change("the ring's last hop is lost in backward (cp)",
               after=ring_that_sees(see_earlier, see_but_last_hop), forward=False),
        Change("partial results of attention are merged half and half, not weighted by their "
               "logsumexps (cp)",
               after=ring_that_sees(see_earlier, merge=merge_half)),
        Change("partial results of attention are merged with swapped weights (cp)",
               after=ring_that_sees(see_earlier, merge=merge_swapped)),
        Change("partial results of attention are weighted by the logsumexp that is merged already "
               "(cp)", after=ring_that_sees(see_earlier, merge=merge_late)),
        Change("a hop's result takes the place of the partial result of attention (cp)",
               after=ring_that_sees(see_earlier, merge=merge_last)),
        Change("the logsumexps of partial results of attention are not merged (cp)",
               after=ring_that_sees(see_earlier, merge=keep_first_lse),
               forward=N > 2),  # with one merge the first logsumexp is right there
        Change("keys of other context ranks (cp) are not masked",
               after=ring_that_sees(see_all_of_others)),
        Change("the mask takes the tokens of context ranks (cp) for contiguous parts",
               after=ring_that_sees(see_ranks_before)),
        Change("the mask swaps earlier and later context ranks (cp)",
               after=ring_that_sees(see_swapped))]
