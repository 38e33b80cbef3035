"""Causes: known bugs, as what they make of a step. Of two kinds:

    a Share    other weights for the right step's terms (step.py): terms left out, counted twice,
               averaged. Costs a sum, so each tensor is compared with each share
    a Change   another line in the plain forms. Costs a step, which is run again with that line

A cause is named only if its loss and all its gradients are those of the run.
"""

from dataclasses import dataclass
from functools import partial
from itertools import count, product

import torch
import torch.nn.functional as F

from collectives import WithBackward, all_gather
from context_parallel import zigzag
from experts import MixtureOfExperts
from model import UNTIED, causal_attention
from run.doctor.step import EMBEDDING, served
from schedules import cut, placement
from sequence_parallel import all_tokens, own_tokens_of_sum
from sizes import LlamaConfig
from tensor_parallel import Row, copy_to_ranks, sum_of_copy, sum_over_ranks, to_local

# ---- shares: which terms are in a gradient, and how often ----


@dataclass
class Share:
    """The terms of some ranks and microbatches. None: all of that axis, as it is right."""
    words: str
    factor: float = 1.0
    data: torch.Tensor | None = None  # (D, m): weight of each data rank's microbatches
    context: int | None = None  # only this context rank's terms
    tensor: int | None = None  # only this tensor rank's terms
    tied: tuple = (1, 1)  # how often the embedding's and the head's term count

    def largest(self, name):
        """The largest weight of a term in a tensor: rounding errors grow with it."""
        weight = 1.0 if self.data is None else self.data.abs().max().item()
        tied = max(self.tied) if name == EMBEDDING else 1
        return max(1.0, abs(self.factor) * weight * tied)


RIGHT = Share("right")


def gradient(terms, name, share):
    """The sampled gradient (n,) of the mean loss that a share gives for a tensor. None if the share
    is about terms that the tensor does not have."""
    if name == EMBEDDING and terms.tied:
        embedding = summed_terms(terms, EMBEDDING, share)
        head = summed_terms(terms, UNTIED, share)
        return share.tied[0] * embedding + share.tied[1] * head
    return summed_terms(terms, name, share)


def summed_terms(terms, name, share):
    grad = terms.gradients[name]  # (D, m, C, R, n)
    if share.data is not None:
        grad = grad * share.data[:, :, None, None, None]
    grad = grad.sum((0, 1))  # (C, R, n)
    grad = grad.sum(0) if share.context is None else grad[share.context]
    if not terms.is_summed[name]:
        grad = grad[0]
    else:
        grad = grad.sum(0) if share.tensor is None else grad[share.tensor]
    return share.factor / terms.divisor * grad


def factors(layout, tokens, scale):
    """[(factor, words)] of what a gradient or a loss may be multiplied by."""
    D, P, C, T = (layout[axis] for axis in ("dp", "pp", "cp", "tp"))
    m = layout["microbatches"]
    named = [
        (1 / D, f"averaged over the {D} data ranks (dp), though the loss is already divided by all "
                "tokens"),
        (D, f"{D} times: each data rank (dp) divides by its own tokens, and the {D} gradients are "
            "summed; or they are summed twice"),
        (m, f"{m} times: not divided by the microbatches"),
        (1 / m, f"divided by the {m} microbatches once too often"),
        (T, f"{T} times: summed over the tensor ranks (tp), which all have it"),
        (1 / T, f"divided by the {T} tensor ranks (tp), which all have the same"),
        (C, f"{C} times: summed twice over the context ranks (cp), or divided by a rank's own "
            "tokens"),
        (1 / C, f"averaged over the {C} context ranks (cp), though the loss is already divided by "
                "all tokens"),
        (P, f"{P} times: counted by each pipeline rank (pp)"),
        (1 / P, f"divided by the {P} pipeline ranks (pp)"),
        (tokens, f"{tokens} times: a sum over the tokens, not a mean"),
        (1 / tokens, f"divided by the {tokens} tokens twice"),
        (0.0, "zero: no gradient arrives (detached, or never computed)"),
        (-1.0, "of the wrong sign"),
    ]
    if D > 1 and C > 1:
        named += [(D * C, f"{D * C} times: divided by a rank's own tokens, and summed over dp and "
                          "cp"),
                  (1 / (D * C), f"averaged over the {D * C} data and context ranks (dp, cp)")]
    if D > 1 and m > 1:
        named += [(D * m, f"{D * m} times: divided by the tokens of one microbatch only"),
                  (1 / (D * m), f"divided by dp x microbatches = {D * m} once too often")]
    if scale != 1:
        named += [(scale, f"{scale:g} times: the loss scale is still in it"),
                  (1 / scale, f"divided by the loss scale {scale:g} twice")]
    return [(factor, words) for factor, words in named if factor != 1]


def known_shares(layout, terms, scale):
    """The Shares of a layout."""
    D, m, C, _ = next(iter(terms.gradients.values())).shape[:4]
    T = layout["tp"]
    total = int(terms.tokens.sum())
    found = [Share(words, factor=factor)
             for factor, words in factors(layout, total, scale)]
    for d in range(D if D > 1 else 0):
        only = torch.zeros(D, m, dtype=torch.double)
        only[d] = 1
        words = f"not summed over the data ranks (dp): data rank {d}'s own gradient"
        found += [Share(words, data=only), Share(f"{words}, divided by its own tokens", D, only),
                  Share(f"{words}, divided by dp = {D}", 1 / D, only)]
    if D > 1 and m > 1:
        found += sums_too_often_or_seldom(D, m)
    E = layout["ep"]
    if 1 < E < D:
        first = torch.zeros(D, m, dtype=torch.double)
        first[:E] = 1
        found.append(Share(f"not summed over the {D // E} data ranks with the same experts (dp, "
                           f"not ep): those of the first {E} ranks' tokens", data=first))
    for k in range(m if m > 1 else 0):
        only = torch.zeros(D, m, dtype=torch.double)
        only[:, k] = 1
        which = {0: "first", m - 1: "last"}.get(k, f"{k + 1}.")
        words = f"only the {which} microbatch counts, of {m}"
        found += [Share(words, data=only), Share(f"{words}, as if it were all", m, only)]
        if k in (0, m - 1):
            found.append(Share(f"the {which} microbatch is missing, of {m}", data=1 - only))
    for c in range(C if C > 1 else 0):
        words = f"not summed over the context ranks (cp): context rank {c}'s own gradient"
        found += [Share(words, context=c), Share(f"{words}, divided by its own tokens", C,
                                                 context=c)]
    for t in range(T if T > 1 else 0):
        found.append(Share(f"not summed over the tensor ranks (tp), which see different tokens: "
                           f"tensor rank {t}'s own gradient", tensor=t))
    if total < terms.positions:
        found.append(Share("padding tokens count in the mean", total / terms.positions))
    if terms.tokens.min() < terms.tokens.max():
        found += uneven(terms.tokens.double())
    if terms.tied:
        found += [Share("the tied matrix lacks the head's term: only the embedding's", tied=(1, 0)),
                  Share("the tied matrix lacks the embedding's term: only the head's", tied=(0, 1)),
                  Share("the tied matrix's two terms are summed twice", tied=(2, 2)),
                  Share("the tied matrix has the head's term twice", tied=(1, 2)),
                  Share("the tied matrix has the embedding's term twice", tied=(2, 1))]
    return found


def sums_too_often_or_seldom(D, m):
    """Gradients are to be summed over the data ranks once per step, or one microbatch's at a time.
    """
    found = []
    for k, which in ((0, "first"), (m - 1, "last")):
        own = torch.zeros(D, m, dtype=torch.double)
        own[0] = 1
        own[:, k] = 1
        found.append(Share(f"only the {which} microbatch's gradients are summed over the data "
                           "ranks (dp); data rank 0's own of the others", data=own))
    again = D ** torch.arange(m - 1, -1, -1, dtype=torch.double).expand(D, m)
    found.append(Share("the sum so far is summed over the data ranks (dp) again after each "
                       "microbatch", data=again))
    return found


def uneven(tokens):
    """Means of means, where microbatches have different numbers of tokens. tokens: (D, m)."""
    D, m = tokens.shape
    return [Share("a mean of the microbatches' means, which have different numbers of tokens",
                  data=tokens.sum() / (D * m * tokens)),
            Share("a mean of the data ranks' means, which have different numbers of tokens",
                  data=tokens.sum() / (D * tokens.sum(1, keepdim=True).expand(D, m)))]


# ---- changes: another line in the plain forms ----


@dataclass
class Change:
    words: str
    before: object = None  # before(model): changes the whole model
    after: object = None  # after(model, mesh): changes a rank's part of it
    forward: bool = True  # does the loss change, too?
    by_microbatch: bool = False  # does the change depend on what a microbatch is?
    feed: object = None  # feed(ids, targets, k, mesh, positions): in the place of step.own_tokens


def unsummed(x, group):
    return x


def averaged(forward, backward):
    """f or g with a mean in place of a sum: forward and backward say which way sums."""
    def mean(x, group):
        return sum_of_copy(x, group) / group.size

    def apply(x, group):
        way = partial(mean, group=group)
        return WithBackward.apply(x, way if forward else lambda x: x,
                                  way if backward else lambda x: x)
    return apply


def sums_both_ways(x, group):
    return WithBackward.apply(x, lambda x: sum_of_copy(x, group), lambda x: sum_of_copy(x, group))


WHERE = {"blocks": "in all blocks", "model": "everywhere"}
PLACES = {"blocks": ["attention", "MLP"], "model": ["attention", "MLP", "head", "embedding"]}


def columns(model, place):
    blocks = model.layers[1:-1]
    found = {"attention": [block.attn.c_attn for block in blocks],
             "MLP": [block.mlp.c_fc for block in blocks if hasattr(block.mlp, "c_fc")],
             "head": [model.layers[-1].lm_head]}
    return sum((found[part] for part in PLACES.get(place, [place]) if part in found), [])


def rows(model, place):
    blocks = model.layers[1:-1]
    found = {"attention": [block.attn.c_proj for block in blocks],
             "MLP": [block.mlp.c_proj for block in blocks if hasattr(block.mlp, "c_proj")],
             "embedding": [model.layers[0].wte]}
    return sum((found[part] for part in PLACES.get(place, [place]) if part in found), [])


def replace_f(place, f):
    def after(model, mesh):
        for column in columns(model, place):
            column.f = f
    return after


def replace_g(place, g):
    def after(model, mesh):
        for row in rows(model, place):
            row.g = g
    return after


def biased_rows(place, f):
    """Row.forward with the bias inside of the sum: it is added on each of the T ranks. f: what
    becomes of the bias's gradient."""
    def after(model, mesh):
        for row in rows(model, place):
            if isinstance(row, Row) and row.bias is not None:
                row.forward = partial(forward, row)

    def forward(row, x):
        return row.g(F.linear(x, row.weight) + f(row.bias, row.group), row.group)
    return after


def in_one_part(layer):
    """The matrices in the first tensor of each block's layer ("attn", "mlp") are split as one."""
    def before(model):
        for block in model.layers[1:-1]:
            getattr(block, layer).parts = ()
    return before


def other_words(change, ends, by_owner=False):
    """change(words, rank, rows): the words that a rank takes for its own, in the embedding, the
    head, or both. by_owner: a token's loss is added by the rank that has its target, so a target
    that no rank has adds nothing."""
    def after(model, mesh):
        embedding, head = model.layers[0].wte, model.layers[-1]
        group = mesh.group("tp")
        words = change(embedding.words, group.rank, embedding.weight.size(0))
        if "embedding" in ends:
            embedding.words = words
        if "head" in ends:
            head.loss = partial(loss_by_owner if by_owner else head.loss, words=words)
            if by_owner:
                head.loss = partial(head.loss, group=group)
    return after


def loss_by_owner(logits, targets, words, group):
    local, outside = to_local(targets, *words)
    at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
    sums = sum_over_ranks(torch.stack([logits.exp().sum(-1), at_target]), group)
    losses = sums[0].log() - at_target
    counted = sum_of_copy(losses.detach().masked_fill(outside, 0).sum(), group)
    total = (sums[0].log() - sums[1]).sum()
    return WithBackward.apply(total, lambda total: counted, lambda grad: grad)


def moved(distance):
    return lambda words, rank, rows: (words[0] + distance, words[1] + distance)


def equal_slices(words, rank, rows):
    """As if all ranks had as many rows as this one."""
    return rank * rows, (rank + 1) * rows


def unmasked_targets(in_loss):
    """Ranks that lack a target's row take their row 0 for it: in the loss, or in its gradient."""
    def after(model, mesh):
        head = model.layers[-1]
        right = head.loss
        group = mesh.group("tp")
        words = model.layers[0].wte.words

        def loss(logits, targets):
            local, outside = to_local(targets, *words)
            row = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
            total = right(logits, targets)
            if in_loss:  # such a rank adds the loss of its row 0
                lse = sum_of_copy(logits.detach().exp().sum(-1), group).log()
                more = sum_of_copy((lse - row.detach()).masked_fill(~outside, 0).sum(), group)
                return WithBackward.apply(total, lambda total: total + more, lambda grad: grad)
            extra = row.masked_fill(~outside, 0).sum()
            return total - WithBackward.apply(extra, torch.zeros_like, lambda grad: grad)

        head.loss = loss
    return after


def unmasked_embedding(model, mesh):
    """Ranks that lack a token's row add their row 0 to it."""
    def forward(self, idx):
        local, _ = to_local(idx, *self.words)
        return self.g(F.embedding(local, self.weight), self.group)

    embedding = model.layers[0].wte
    embedding.forward = partial(forward, embedding)


def own_words_only(model, mesh):
    """Each rank normalizes over its own words only."""
    group = mesh.group("tp")

    def loss(logits, targets, words):
        local, outside = to_local(targets, *words)
        at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
        own = logits.logsumexp(-1) - at_target
        # A token's loss is that of the rank that has its target
        counted = sum_of_copy(own.detach().masked_fill(outside, 0).sum(), group)
        return WithBackward.apply(own.sum(), lambda own: counted, lambda grad: grad)

    head = model.layers[-1]
    head.loss = partial(loss, words=model.layers[0].wte.words)


def loss_sums_both_ways(model, mesh):
    """The sums of the vocabulary-parallel loss are summed again in backward: T times."""
    head = model.layers[-1]
    right = head.loss
    size = mesh.group("tp").size

    def loss(logits, targets):
        times = WithBackward.apply(logits, lambda x: x, lambda grad: size * grad)
        return right(times, targets)

    head.loss = loss


def padded_rows(multiple):
    """The rows that pad a rank's slice of the vocabulary count in the loss, with logits of 0."""
    def after(model, mesh):
        head = model.layers[-1]
        right = head.loss

        def loss(logits, targets):
            return right(F.pad(logits, (0, -logits.size(-1) % multiple)), targets)

        head.loss = loss
    return after


# sequence parallelism


def enter_without_sum(x, group):
    """--sp's all-gather, whose backward takes this rank's tokens without the other ranks' terms."""
    def own(grad):
        return grad.chunk(group.size, dim=1)[group.rank].contiguous()
    return WithBackward.apply(x, lambda x: all_tokens(x, group), own)


def enter_with_mean(x, group):
    return WithBackward.apply(x, lambda x: all_tokens(x, group),
                              lambda grad: own_tokens_of_sum(grad, group) / group.size)


def leave_without_sum(x, group):
    def own(x):
        return x.chunk(group.size, dim=1)[group.rank].contiguous()
    return WithBackward.apply(x, own, lambda grad: all_tokens(grad, group))


def scatter_only(model, mesh):
    """The reduce-scatter of rows in forward, and of columns in backward, scatters and does not sum.
    """
    replace_f("model", enter_without_sum)(model, mesh)
    replace_g("model", leave_without_sum)(model, mesh)


def leave_backward_alone(x, group):
    """--sp's reduce-scatter, whose backward has this rank's tokens' gradient only."""
    def backward(grad):
        parts = torch.zeros(group.size, *grad.shape, dtype=grad.dtype)
        parts[group.rank] = grad
        return parts.movedim(0, 1).flatten(1, 2)
    return WithBackward.apply(x, lambda x: own_tokens_of_sum(x, group), backward)


def positions_from(make):
    """Positions of this rank's tokens: make(number of tokens a rank has, its index, ranks)."""
    def after(model, mesh):
        cp, tp = mesh.group("cp"), mesh.group("tp")
        for module in model.positioned():
            right = module.positions

            def positions(x, right=right):
                own = right(x)
                return make(own, cp, tp)
            module.positions = positions
    return after


def from_zero(own, cp, tp):
    return torch.arange(len(own))


def in_one_piece(own, cp, tp):
    """As if each context rank had one contiguous part of the sequence."""
    return torch.arange(len(own)) + cp.rank * len(own)


# context parallelism


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


def contiguous(ids, targets, k, mesh, positions):
    """Tokens of one contiguous part of the sequence for each context rank."""
    own = torch.arange(len(positions)) + mesh.group("cp").rank * len(positions)
    return ids[k][:, own], targets[k][:, own]


def targets_from_own(ids, targets, k, mesh, positions):
    """Targets made of the rank's own tokens, after the sequence was split."""
    own = ids[k][:, positions]
    return own, own.roll(-1, 1)


# the model itself, and experts


def each_attention(attend):
    def after(model, mesh):
        for block in model.layers[1:-1]:
            block.attn.attend = attend
    return after


def all_tokens_seen(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def unscaled_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)


def shifted_targets(model, mesh):
    """The loss shifts targets that are the next tokens already, and leaves out the last place."""
    head = model.layers[-1]
    right = head.loss

    def loss(logits, targets):
        S = targets.size(1)
        return right(logits[:, :-1], targets[:, 1:]) * S / (S - 1)

    head.loss = loss


def exact_gelu(model):
    for block in model.layers[1:-1]:
        block.mlp.forward = partial(lambda mlp, x: mlp.c_proj(F.gelu(mlp.c_fc(x))), block.mlp)


def norms_with(eps):
    def before(model):
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
                module.eps = eps
    return before


def routed(change):
    """Change what an expert layer gives to run_experts: change(x, gates, chosen, layer)."""
    def before(model):
        for layer in mixtures(model):
            right = layer.run_experts

            def run(x, gates, chosen, right=right, layer=layer):
                return right(x, *change(x, gates, chosen, layer))
            layer.run_experts = run
    return before


def softmax_over_all(x, gates, chosen, layer):
    """Gates from the softmax over all experts, of which the chosen ones are taken."""
    wide = torch.promote_types(x.dtype, torch.float)
    scores = F.linear(x.to(wide), layer.router.weight.to(wide)).softmax(-1)
    return scores.gather(-1, chosen).to(x.dtype), chosen


def gates_in_order_of_tokens(T, E):
    """A rank sorts its rows by expert, and takes the gates in the order of the tokens."""
    def change(x, gates, chosen, layer):
        flat, experts = gates.flatten(), chosen.flatten()
        wrong = torch.zeros_like(flat)
        for t in range(T):
            is_served = served(layer.n_experts, E, T, t)[experts]
            order = experts.masked_fill(~is_served, layer.n_experts).argsort(stable=True)
            rows = order[: int(is_served.sum())]
            wrong = wrong.index_copy(0, rows, flat[: len(rows)])
        return wrong.view_as(gates), chosen
    return change


def with_capacity(factor):
    """An expert takes `factor` times the tokens that it has if all experts are even; later tokens
    of the microbatch are dropped."""
    def change(x, gates, chosen, layer):
        experts = chosen.flatten()
        one_hot = F.one_hot(experts, layer.n_experts)
        before = (one_hot.cumsum(0) - one_hot).gather(1, experts.unsqueeze(1)).squeeze(1)
        is_kept = before < int(factor * len(experts)) // layer.n_experts
        return gates * is_kept.view_as(gates), chosen
    return change


def spread_over_tensor_ranks(E, f_of_tokens, f_of_gates):
    """In backward each tensor rank has the gradients of its own experts' tokens and gates; f sums
    them over the ranks, if it is right."""
    def after(model, mesh):
        group = mesh.group("tp")
        for layer in mixtures(model):
            is_served = served(layer.n_experts, E, group.size, group.rank)

            layer.run_experts = partial(run, layer.run_experts, is_served, group)

    def run(right, is_served, group, x, gates, chosen):
        own = is_served[chosen]
        outputs = right(f_of_tokens(x, group), f_of_gates(gates, group) * own, chosen)
        return outputs + right(x.detach(), (gates * ~own).detach(), chosen)
    return after


def mixtures(model):
    return [layer for layer in model.modules() if isinstance(layer, MixtureOfExperts)]


def balance_times(factor):
    def after(model, mesh):
        for layer in mixtures(model):
            layer.balance_weight *= factor
    return after


def balance_of_own_tokens(model, mesh):
    for layer in mixtures(model):
        layer.sum_counts = lambda counts: counts


# pipelines: what crosses a boundary


def cut_by_layout(config, layout):
    """The layers before which a boundary of the pipeline lies, as train.py cuts it."""
    stages = len(placement(layout["schedule"], layout["pp"], layout["chunks"]))
    return [start for start, _ in cut(config.layer_costs(), stages)[1:]]


def at_boundary(i, change):
    """change(x, rank, n): what becomes of the activation that enters layer i, in a rank's forward
    number n (which is a microbatch's)."""
    def after(model, mesh):
        layer = model.layers[i]
        right = layer.forward
        numbers = count()
        layer.forward = lambda x, *targets: right(change(x, mesh.rank, next(numbers)), *targets)
    return after


class Crossing:
    """The activations and gradients that cross a boundary in the right step."""

    def __init__(self, step, i):
        self.i = i
        self.x = {}  # (rank, n): activation
        self.grad = {}
        step.run(Change("", after=at_boundary(i, self.record)))

    def record(self, x, rank, n):
        self.x[rank, n] = x.detach()
        x.register_hook(lambda grad: self.grad.update({(rank, n): grad}))
        return x

    def swapped(self, m, order, forward):
        """Another microbatch's activation (forward) or gradient. order(k): whose, of the same data
        rank, microbatch k gets."""
        def change(x, rank, n):
            other = n // m * m + order(n % m)
            if forward:
                return WithBackward.apply(x, lambda x: self.x[rank, other], lambda grad: grad)
            return WithBackward.apply(x, lambda x: x, lambda grad: self.grad[rank, other])
        return at_boundary(self.i, change)


def pipeline_changes(step):
    """What a message between two pipeline ranks may carry in the place of the right one."""
    m = step.layout["microbatches"]
    orders = {"the one before": lambda k: (k - 1) % m, "the one after": lambda k: (k + 1) % m,
              "the opposite one in order": lambda k: m - 1 - k, "the first one": lambda k: 0,
              "the last one": lambda k: m - 1}
    found = []
    boundaries = cut_by_layout(step.config, step.layout)
    found.append(Change("no gradient goes back over the pipeline's boundaries", forward=False,
                        after=scaled(boundaries, 1, 0)))
    for i in boundaries:
        found.append(Change(f"no gradient goes back over the boundary before layer {i}",
                            forward=False, after=scaled([i], 1, 0)))
        crossing = Crossing(step, i)
        for forward, (whose, order) in product((True, False), orders.items() if m > 1 else ()):
            what = "activation" if forward else "gradient"
            found.append(Change(f"at the boundary before layer {i} a microbatch gets the {what} of "
                                f"another microbatch: {whose}", forward=forward,
                                after=crossing.swapped(m, order, forward),
                                by_microbatch=True))
    if m > 1:
        found += [Change(f"a microbatch's activation meets the targets of another one: {whose}",
                         feed=targets_of(order), by_microbatch=True)
                  for whose, order in orders.items()]
    sizes = {1 / m: "divided by the microbatches", m: "times the microbatches"}
    for axis in ("dp", "pp", "tp"):
        size = step.layout[axis]
        sizes |= {1 / size: f"divided by {axis}", size: f"times {axis}"}
    sizes |= {0.5: "halved", 2.0: "doubled", 0.1: "divided by 10", 10.0: "times 10"}
    sizes.pop(1, None)
    for factor, words in sizes.items():
        for name, ways in (("gradients are", (1, factor)), ("activations are", (factor, 1)),
                           ("activations and gradients are", (factor, factor))):
            found.append(Change(f"{name} {words} at each boundary of the pipeline",
                                forward=ways[0] != 1, after=scaled(boundaries, *ways)))
    return found


def targets_of(order):
    def feed(ids, targets, k, mesh, positions):
        return ids[k][:, positions], targets[order(k)][:, positions]
    return feed


def scaled(boundaries, ahead, back):
    """Multiply what crosses each boundary: activations by `ahead`, gradients by `back`."""
    def change(x, rank, n):
        return WithBackward.apply(x, lambda x: ahead * x, lambda grad: back * grad)

    def after(model, mesh):
        for i in boundaries:
            at_boundary(i, change)(model, mesh)
    return after


def changes(step):
    """The Changes of a step's layout."""
    config, layout = step.config, step.layout
    found = []
    T, C = layout["tp"], layout["cp"]
    sp = layout["sp"] and T > 1
    if T > 1:
        found += tensor_changes(config, sp)
    if sp:
        found += sequence_changes()
    if C > 1:
        found += context_changes()
    if config.n_experts:
        found += expert_changes(layout)
    if layout["pp"] > 1:
        found += pipeline_changes(step)
    found += [
        Change("attention sees later tokens", after=each_attention(all_tokens_seen)),
        Change("attention scores are not divided by sqrt(head width)",
               after=each_attention(unscaled_attention)),
        Change("targets are shifted twice: the loss shifts labels that are the next tokens already",
               after=shifted_targets),
        *(Change(f"the rows that pad the vocabulary to a multiple of {multiple} count in the loss",
                 after=padded_rows(multiple)) for multiple in (2, 4, 8, 16, 32, 64, 128)),
        *(Change(f"the norms' epsilon is {eps:g}", before=norms_with(eps))
          for eps in (1e-6, 1e-8, 1e-12, 1e-5))]
    if not isinstance(config, LlamaConfig) and not config.n_experts:
        found.append(Change("GELU is computed exactly (erf), not by tanh", before=exact_gelu))
    if C > 1:  # attention is replaced there, and a rank has no run of tokens
        found = [change for change in found
                 if not change.words.startswith(("attention s", "targets are shifted"))]
    return found


def tensor_changes(config, sp):
    found = []
    for place in ("attention", "MLP", "head", "blocks", "model"):
        where = WHERE.get(place, f"in the {place}")
        if not sp:
            found += [
                Change(f"f is missing {where}: the gradient of a column's input is not summed over "
                       "the tensor ranks (tp)", after=replace_f(place, unsummed), forward=False),
                Change(f"f averages over the tensor ranks (tp), and does not sum, {where}",
                       after=replace_f(place, averaged(False, True)), forward=False)]
    for place in ("attention", "MLP", "embedding", "blocks", "model"):
        where = WHERE.get(place, f"in the {place}")
        if not sp:
            found += [
                Change(f"g is missing {where}: partial sums are not summed over the tensor ranks "
                       "(tp)", after=replace_g(place, unsummed)),
                Change(f"g sums in backward, too, {where}: gradients are tp times too large there",
                       after=replace_g(place, sums_both_ways), forward=False),
                Change(f"g averages over the tensor ranks (tp), and does not sum, {where}",
                       after=replace_g(place, averaged(True, False)))]
        if place not in ("embedding", "model") and not sp:
            found += [
                Change(f"a row's bias is added on each tensor rank (tp) {where}",
                       after=biased_rows(place, unsummed)),
                Change(f"a row's bias is added on each tensor rank (tp) {where}, and its gradient "
                       "is summed over them", after=biased_rows(place, copy_to_ranks))]
    found += [
        Change("q, k and v are split over the tensor ranks (tp) as one matrix",
               before=in_one_part("attn")),
        Change("words of other ranks are not masked in the embedding", after=unmasked_embedding),
        Change("the loss normalizes over a rank's own words only (tp)", after=own_words_only),
        Change("the gradient of the logits is tp times too large: the loss's sums are summed in "
               "backward, too", after=loss_sums_both_ways, forward=False)]
    if isinstance(config, LlamaConfig) and not config.n_experts:
        found.append(Change("gate and up are split over the tensor ranks (tp) as one matrix",
                            before=in_one_part("mlp")))
    for ends in (["embedding"], ["head"], ["embedding", "head"]):
        where = " and ".join(ends)
        found += [Change(f"the words of a rank's slice are off by {distance:+d} in the {where}",
                         after=other_words(moved(distance), ends, by_owner))
                  for distance, by_owner in product((1, -1), {False, "head" in ends})]
        found.append(Change("a rank takes all slices of the vocabulary for as long as its own, in "
                            f"the {where}", after=other_words(equal_slices, ends)))
    found += [Change("words of other ranks are not masked in the loss",
                     after=unmasked_targets(in_loss=True)),
              Change("words of other ranks are not masked in the gradient of the logits",
                     after=unmasked_targets(in_loss=False), forward=False)]
    return found


def sequence_changes():
    found = []
    for place in ("attention", "MLP", "head", "blocks", "model"):
        where = WHERE.get(place, f"in the {place}")
        found += [Change(f"--sp's all-gather has no reduce-scatter in backward {where}",
                         after=replace_f(place, enter_without_sum), forward=False),
                  Change(f"--sp's all-gather averages in backward {where}",
                         after=replace_f(place, enter_with_mean), forward=False)]
    for place in ("attention", "MLP", "embedding", "blocks", "model"):
        where = WHERE.get(place, f"in the {place}")
        found += [Change(f"--sp's reduce-scatter does not sum {where}",
                         after=replace_g(place, leave_without_sum)),
                  Change(f"--sp's reduce-scatter has no all-gather in backward {where}",
                         after=replace_g(place, leave_backward_alone), forward=False)]
    found.append(Change("--sp's reduce-scatter does not sum, forward or in backward, everywhere",
                        after=scatter_only))
    found.append(Change("all tensor ranks (--sp) take the positions of the first tokens",
                        after=positions_from(from_zero)))
    return found


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


def expert_changes(layout):
    T, E = layout["tp"], layout["ep"]
    found = [
        Change("experts' outputs are not multiplied by their gates",
               before=routed(lambda x, gates, chosen, layer: (torch.ones_like(gates), chosen))),
        Change("no gradient reaches the router through the gates",
               before=routed(lambda x, gates, chosen, layer: (gates.detach(), chosen)),
               forward=False),
        Change("gates are not normalized over the chosen experts (softmax over all)",
               before=routed(softmax_over_all)),
        Change("gates are in the wrong order",
               before=routed(lambda x, gates, chosen, layer: (gates.flip(-1), chosen))),
        Change("gates are in the order of the tokens, rows in that of the experts",
               before=routed(gates_in_order_of_tokens(T, E)), by_microbatch=True),
        *(Change("experts drop tokens beyond a capacity: "
                 f"{factor:g} times the tokens per expert", by_microbatch=True,
                 before=routed(with_capacity(factor))) for factor in (1.0, 1.25, 1.5, 2.0)),
        Change("the experts' balance loss is missing", after=balance_times(0.0), forward=False)]
    if layout["cp"] * (T if layout["sp"] else 1) > 1:
        found.append(Change("the balance loss counts a rank's own tokens of a sequence only",
                            after=balance_of_own_tokens, forward=False))
    if T > 1:
        found += [Change("f is missing before the experts: the gradient of their tokens is not "
                         "summed over the tensor ranks (tp)", forward=False,
                         after=spread_over_tensor_ranks(E, unsummed, copy_to_ranks)),
                  Change("the gates' gradient is not summed over the tensor ranks (tp)",
                         after=spread_over_tensor_ranks(E, copy_to_ranks, unsummed), forward=False)]
    sizes = {}  # size -> the axes that have it
    for axis in ("dp", "ep", "tp", "cp", "pp", "microbatches"):
        sizes.setdefault(layout[axis], []).append(axis)
    sizes.pop(1, None)
    for size, axes in sizes.items():
        which = " or ".join(axes)
        found += [Change(f"the balance loss counts {size} times ({which})",
                         after=balance_times(size), forward=False),
                  Change(f"the balance loss is divided by {size} ({which})",
                         after=balance_times(1 / size), forward=False)]
    return found
