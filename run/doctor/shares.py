"""Shares: bugs that count the right step's terms with other weights."""

from dataclasses import dataclass

import torch

from model import UNTIED
from run.doctor.step import EMBEDDING


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


def gradient(terms, name, share):
    """The sampled gradient (n,) of the mean loss that a share gives for a tensor. None if the share
    is about terms that the tensor does not have."""
    if name == EMBEDDING and terms.tied:
        embedding = summed_terms(terms, EMBEDDING, share)
        head = summed_terms(terms, UNTIED, share)
        return share.tied[0] * embedding + share.tied[1] * head
    return summed_terms(terms, name, share)


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
