"""Shares: bugs that add up the right step's terms with other weights.

The terms of a tensor's gradient are (D, m, N, R, n), one for each data rank, microbatch, context
rank and tensor rank (step.py). A Share says which terms are in the sum, and how often:

    D = 2, m = 3     right      only the last       data rank 0's own gradient,
                                microbatch          divided by its own tokens
    Share.data       1 1 1      0 0 1               1 1 1
                     1 1 1      0 0 1               0 0 0
    Share.factor     1          1                   2

known_shares() lists the Shares of a layout. To try a Share costs a sum, not a step: so each tensor
is compared with each Share, apart from the other tensors.
"""

from dataclasses import dataclass

import torch

from extras.doctor.step import EMBEDDING
from model import UNTIED


@dataclass
class Share:
    """Weights of a gradient's terms. The defaults are the right ones."""
    words: str  # what the doctor prints
    factor: float = 1.0  # multiplies the weights of all terms
    # (D, m): weight of the terms of each data rank's microbatches. None: all 1
    data: torch.Tensor | None = None
    context: int | None = None  # only this context rank's terms. None: all ranks'
    tensor: int | None = None  # only this tensor rank's terms. None: all ranks'
    tied: tuple = (1, 1)  # in a tied matrix: weights of the embedding's and of the head's terms

    def largest(self, name):
        """The largest weight of a term in a tensor, 1 at least: rounding errors grow with it."""
        weight = 1.0 if self.data is None else self.data.abs().max().item()
        tied = max(self.tied) if name == EMBEDDING else 1
        return max(1.0, abs(self.factor) * weight * tied)


RIGHT = Share("right")


def summed_terms(terms, name, share):
    """(n,): the sum of a tensor's terms, with a Share's weights. A tied matrix has a name for each
    end, EMBEDDING and UNTIED: only the terms of this end are summed."""
    grad = terms.gradients[name]  # (D, m, N, R, n)
    if share.data is not None:
        grad = grad * share.data[:, :, None, None, None]
    grad = grad.sum((0, 1))  # (N, R, n)
    grad = grad.sum(0) if share.context is None else grad[share.context]  # (R, n)
    if not terms.is_summed[name]:
        grad = grad[0]  # R is 1, or the R gradients are copies
    elif share.tensor is None:
        grad = grad.sum(0)
    else:
        grad = grad[share.tensor]
    return share.factor / terms.divisor * grad


def gradient(terms, name, share):
    """(n,): the gradient of the mean loss that a run with this Share's bug has, sampled."""
    if name == EMBEDDING and terms.tied:
        embedding = summed_terms(terms, EMBEDDING, share)
        head = summed_terms(terms, UNTIED, share)
        return share.tied[0] * embedding + share.tied[1] * head
    return summed_terms(terms, name, share)


def loss_of(terms, share):
    """The mean loss of a step whose losses are added up with a Share's weights, like its
    gradients."""
    losses = terms.losses.mean(-1)  # (D, m, N): the T ranks have the same losses
    if share.data is not None:
        losses = losses * share.data.unsqueeze(-1)
    if share.context is not None:
        losses = losses[:, :, share.context]
    return (share.factor / terms.divisor * losses.sum()).item()


def factors(layout, tokens, scale):
    """[(factor, words)]: factors by which a gradient may be wrong. tokens: number of tokens of the
    whole batch that count; scale: the loss scale."""
    D, P, N, T = (layout[axis] for axis in ("dp", "pp", "cp", "tp"))
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
        (N, f"{N} times: summed twice over the context ranks (cp), or divided by a rank's own "
            "tokens"),
        (1 / N, f"averaged over the {N} context ranks (cp), though the loss is already divided by "
                "all tokens"),
        (P, f"{P} times: counted by each pipeline rank (pp)"),
        (1 / P, f"divided by the {P} pipeline ranks (pp)"),
        (tokens, f"{tokens} times: a sum over the tokens, not a mean"),
        (1 / tokens, f"divided by the {tokens} tokens twice"),
        (0.0, "zero: no gradient arrives (detached, or never computed)"),
        (-1.0, "of the wrong sign"),
    ]
    if D > 1 and N > 1:
        named += [(D * N, f"{D * N} times: divided by a rank's own tokens, and summed over dp and "
                          "cp"),
                  (1 / (D * N), f"averaged over the {D * N} data and context ranks (dp, cp)")]
    if D > 1 and m > 1:
        named += [(D * m, f"{D * m} times: divided by the tokens of one microbatch only"),
                  (1 / (D * m), f"divided by dp x microbatches = {D * m} once too often")]
    if scale != 1:
        named += [(scale, f"{scale:g} times: the loss scale is still in it"),
                  (1 / scale, f"divided by the loss scale {scale:g} twice")]
    return [(factor, words) for factor, words in named if factor != 1]


def wrongly_summed_over_data(layout, D, m):
    """Shares of a sum over the data ranks that is missing, or taken at the wrong microbatches."""
    found = []
    for d in range(D):
        own = torch.zeros(D, m, dtype=torch.double)
        own[d] = 1
        words = f"not summed over the data ranks (dp): data rank {d}'s own gradient"
        found += [Share(words, data=own),
                  Share(f"{words}, divided by its own tokens", D, own),
                  Share(f"{words}, divided by dp = {D}", 1 / D, own)]
    if m > 1:
        found += summed_at_wrong_microbatches(D, m)
    E = layout["ep"]
    if 1 < E < D:
        first = torch.zeros(D, m, dtype=torch.double)
        first[:E] = 1
        found.append(Share(f"not summed over the {D // E} data ranks with the same experts (dp, "
                           f"not ep): the gradients have the terms of the first {E} data ranks' "
                           "tokens only", data=first))
    return found


def summed_at_wrong_microbatches(D, m):
    """Shares of bugs: the all-reduce over the data ranks runs for one microbatch only, for all but
    one, or after each microbatch, on the sum so far. For D = 2, m = 3 data rank 0 then has

        only the first microbatch summed    1 1 1      again after each microbatch    4 2 1
                                            1 0 0                                     4 2 1

    Where the ranks' gradients are averaged, as torch's DDP does, and each rank has divided its loss
    by its own tokens, the first one is 1 2 2, then 1 0 0."""
    found = []
    for k, which in ((0, "first"), (m - 1, "last")):
        data = torch.zeros(D, m, dtype=torch.double)
        data[0] = 1
        data[:, k] = 1
        found.append(Share(f"only the {which} microbatch's gradients are summed over the data "
                           "ranks (dp); data rank 0's own of the others", data=data))
        averaged = data.clone()
        averaged[0] = D
        averaged[:, k] = 1
        found.append(Share(f"only the {which} microbatch's gradients are averaged over the data "
                           "ranks (dp), as by DDP whose no_sync was decided too late; data rank "
                           "0's own of the others", data=averaged))
        if m > 2:  # with two the other one alone is summed, a Share above
            data = torch.ones(D, m, dtype=torch.double)
            data[1:, k] = 0
            found.append(Share(f"the {which} microbatch's gradients are not summed over the data "
                               "ranks (dp); data rank 0's own of it", data=data))
    # How often a microbatch's gradients are summed again: m - 1 ... 1 0
    sums = torch.arange(m - 1, -1, -1, dtype=torch.double)
    found.append(Share("the sum so far is summed over the data ranks (dp) again after each "
                       "microbatch", data=(D**sums).expand(D, m)))
    return found


def of_some_microbatches(D, m):
    """Shares with one microbatch only, or without the first or the last one."""
    found = []
    for k in range(m):
        only = torch.zeros(D, m, dtype=torch.double)
        only[:, k] = 1
        which = {0: "the first microbatch", m - 1: "the last microbatch"}.get(
            k, f"microbatch {k} (from 0)")
        words = f"only {which} counts, of {m}"
        found += [Share(words, data=only),
                  Share(f"{words}, as if it were all", m, only)]
        if k in (0, m - 1):
            found.append(Share(f"{which} is missing, of {m}", data=1 - only))
    return found


def not_summed_in_replica(N, T):
    """Shares with the terms of one context rank or one tensor rank."""
    found = []
    if N > 1:
        for c in range(N):
            words = f"not summed over the context ranks (cp): context rank {c}'s own gradient"
            found += [Share(words, context=c),
                      Share(f"{words}, divided by its own tokens", N, context=c)]
    if T > 1:
        for t in range(T):
            words = ("not summed over the tensor ranks (tp), which have different tokens or "
                     f"different experts: tensor rank {t}'s own gradient")
            found.append(Share(words, tensor=t))
    return found


def means_of_means(tokens):
    """Shares of microbatches with different numbers of tokens. tokens: (D, m)."""
    tokens = tokens.double()
    D, m = tokens.shape
    total = tokens.sum()
    of_rank = tokens.sum(1, keepdim=True).expand(D, m)  # tokens of the data rank, m times
    means = [Share("a mean of the microbatches' means, which have different numbers of tokens",
                   data=total / (D * m * tokens)),
             Share("a mean of the data ranks' means, which have different numbers of tokens",
                   data=total / (D * of_rank))]
    return [share for share in means if share.data.isfinite().all()]  # 0 tokens have no mean


TIED = [Share("the tied matrix lacks the head's term: only the embedding's", tied=(1, 0)),
        Share("the tied matrix lacks the embedding's term: only the head's", tied=(0, 1)),
        Share("the tied matrix's two terms are summed twice", tied=(2, 2)),
        Share("the tied matrix has the head's term twice", tied=(1, 2)),
        Share("the tied matrix has the embedding's term twice", tied=(2, 1))]


def known_shares(layout, terms, scale):
    """The Shares of a layout. terms: those of the right step; scale: the loss scale."""
    D, m, N, T = terms.losses.shape  # all 1 for a model of another form, whose terms are not known
    total = int(terms.tokens.sum())
    found = [Share(words, factor=factor) for factor, words in factors(layout, total, scale)]
    if D > 1:
        found += wrongly_summed_over_data(layout, D, m)
    if m > 1:
        found += of_some_microbatches(D, m)
    found += not_summed_in_replica(N, T)
    if total < terms.n_tokens:
        found.append(Share("padding tokens count in the mean", total / terms.n_tokens))
    if terms.tokens.min() < terms.tokens.max():
        found += means_of_means(terms.tokens)
    if terms.tied:
        found += TIED
    return found
