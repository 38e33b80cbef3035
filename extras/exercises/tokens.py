"""Judges context and expert parallelism: exercises 10 and 11."""

import math
from unittest.mock import patch

import torch
from torch.nn.functional import normalize

import context_parallel
import expert_parallel
from context_parallel import zigzag as zigzag_of
from experts import MixtureOfExperts
from extras.exercises.catalogue import RANKS
from extras.exercises.judge import Wrong, beside, check_shape, factor, in_numbers, same, trains
from extras.exercises.slices import random_tensor
from model import causal_attention
from sizes import GPTConfig


class OneRank:
    """A group of one rank: an exchange copies."""

    size, rank, next, prev = 1, 0, 0, 0

    def exchange(self, out, dst, into, src):
        into.copy_(out)
        return self

    def wait(self):
        pass


def judge_ring_attention(make_mesh, forms):
    check_zigzag(forms["zigzag"])
    form = forms["ring_attention"]
    mesh = make_mesh(cp=RANKS)
    group = mesh.group("cp")
    N, r = group.size, group.rank
    S = 16
    mine = zigzag_of(S, N, r)
    whole = [random_tensor(2, 2, S, 3, seed=7 + i) for i in range(3)]
    # One thing after the other, so that Wrong says which one differs. On one rank nothing travels,
    # and nothing is merged
    check_attention(form(*whole, OneRank()), whole, 1, 0,
                    "on one rank, where nothing travels, the result ",
                    "differs: look at the scores, the mask and the division at the end")
    # q = k, of length 1: a query's largest score is that of its own key, which it meets first. So
    # no sum has to be rescaled
    q = normalize(whole[0], dim=-1)
    largest_first = [q, q, whole[2]]
    check_attention(form(*(x[:, :, mine] for x in largest_first), group), largest_first, N, r,
                    "where each query's largest score comes first, the result ",
                    "differs: whose keys are these after each hop, and which positions have they?")
    parts = [x[:, :, mine].clone().requires_grad_() for x in whole]
    before = group.bytes_sent
    got = form(*parts, group)
    sent = group.bytes_sent - before
    check_attention(got, whole, N, r, "the result ",
                    "differs, but only if a larger score comes in a later hop: then multiply both "
                    "sums by exp(old - new)")
    large = [900 * whole[0], *whole[1:]]
    check_attention(form(*(x[:, :, mine] for x in large), group), large, N, r,
                    "with large scores the result ", "differs")
    wholes = [x.clone().requires_grad_() for x in whole]
    causal_attention(*wholes).sin().sum().backward()
    if not got.requires_grad:
        raise Wrong("the result has no backward: is everything computed with autograd?")
    got.sin().sum().backward()
    for name, part, alone in zip(("q", "k", "v"), parts, wholes, strict=True):
        if part.grad is None or not same(part.grad, alone.grad[:, :, mine]):
            raise Wrong(f"rank {r}: right result, but the gradient of {name} differs from one "
                        "process's: pass_on has a backward; is largest detached?")
    n = 8 * 2 * 2 * S * 3  # bytes of q, k or v: (2, 2, S, 3), float64
    formula = 2 * (N - 1) * n // N
    facts = [beside("bytes sent forward by this rank", sent, "8 bytes x 2 (N-1)/N B S C", formula)]
    with patch.dict(context_parallel.KINDS, {"ring": form}):
        places = [(context_parallel, "zigzag", forms["zigzag"])]
        return [*facts, trains(make_mesh, places, {"cp": RANKS}, {"block_size": S})[1]]


def check_attention(got, whole, N, rank, what, otherwise):
    """Raise Wrong unless the result of a rank, one of N, is right. whole: q, k and v of all tokens;
    what: names the result in a message; otherwise: the message's end if no known mistake gives this
    result."""
    want = causal_attention(*whole)[:, :, zigzag_of(whole[0].size(2), N, rank)]
    check_shape("what ring_attention returns", got, want)
    if not same(got, want):
        said = explain_attention(got, whole, N, rank) or otherwise
        raise Wrong(f"rank {rank}: {what}{said}")


def check_zigzag(form):
    for S, N in ((8, 2), (16, 4), (12, 3)):
        parts = [form(S, N, rank).tolist() for rank in range(N)]
        if sorted(sum(parts, [])) != list(range(S)):
            raise Wrong(f"zigzag, S = {S}, N = {N}: the ranks have {parts}: each token must be "
                        "on one rank")
        # The query at position p meets p + 1 keys
        pairs = [sum(position + 1 for position in part) for part in parts]
        if len(set(pairs)) > 1:
            raise Wrong(f"zigzag, S = {S}, N = {N}: the ranks' queries meet {pairs} keys: all "
                        "ranks should meet as many")
        for rank, part in enumerate(parts):
            if part != zigzag_of(S, N, rank).tolist():
                raise Wrong(f"zigzag, S = {S}, N = {N}: rank {rank} has {part}, and segments "
                            f"{rank} and {2 * N - 1 - rank} are {zigzag_of(S, N, rank).tolist()}")


def attention_of(q, k, v, hidden):
    """Attention with this mask of hidden pairs; 0 for a query to which all keys are hidden."""
    scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(hidden, -math.inf)
    return scores.softmax(-1).nan_to_num() @ v


def merged(q, parts, shrink_numerator, shrink_denominator):
    """Attention merged hop by hop, in which a sum may miss its rescaling. parts: the keys, values
    and hidden pairs of each hop."""
    largest = q.new_full((*q.shape[:-1], 1), -math.inf)
    numerator = denominator = 0.0
    for k, v, hidden in parts:
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(hidden, -math.inf)
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights = (scores - new_largest).exp()
        shrink = (largest - new_largest).exp()
        numerator = numerator * (shrink if shrink_numerator else 1) + weights @ v
        denominator = (denominator * (shrink if shrink_denominator else 1)
                       + weights.sum(-1, keepdim=True))
        largest = new_largest
    return numerator / denominator


def explain_attention(got, whole, N, rank):
    """Which mistake gives this result of a rank, one of N; "" if none of these does."""
    if not got.isfinite().all():
        return ("is not finite: hide later tokens only, subtract the largest score so far, keep it "
                "for the next hop, and multiply the sums by exp(old - new)")
    q, k, v = whole
    S = q.size(2)
    mine = zigzag_of(S, N, rank)
    own = q[:, :, mine]
    later = torch.arange(S) > mine.unsqueeze(1)
    if same(got, attention_of(own, k, v, torch.zeros_like(later))):
        return "attends to later tokens: the causal mask is missing"
    if same(got, attention_of(own * math.sqrt(q.size(-1)), k, v, later)):
        return "has scores that are not divided by sqrt(hs)"
    parts = []  # in the order of the hops
    for hop in range(N):
        theirs = zigzag_of(S, N, (rank - hop) % N)
        parts.append((k[:, :, theirs], v[:, :, theirs], later[:, theirs]))
    if same(got, attention_of(own, *parts[0])):
        return "has met this rank's own keys only: N - 1 hops bring the others"
    partials = [attention_of(own, *part) for part in parts]
    if same(got, sum(partials)) or same(got, sum(partials) / N):
        return ("adds up softmaxes of single hops: keep numerator and denominator apart, and "
                "divide at the end")
    if same(got, merged(own, parts, False, False)):
        return ("has sums that are not rescaled: when a larger score comes, multiply both sums so "
                "far by exp(old - new)")
    for sums, left in (("numerator", "denominator"), ("denominator", "numerator")):
        if same(got, merged(own, parts, sums == "numerator", sums == "denominator")):
            return f"has a rescaled {sums}, but the {left} is not: both need exp(old - new)"
    return ""


# ---- experts ----


def judge_experts(make_mesh, forms):
    form = forms["dispatch_and_combine"]
    mesh = make_mesh(dp=RANKS, ep=RANKS)
    group = mesh.group("ep")
    E, e = group.size, group.rank
    # 8 experts, 2 on each rank
    layer = mixture_layer(range(8))
    own = mixture_layer(range(2 * e, 2 * e + 2))
    x = random_tensor(2, 5, 8, seed=20 + e)
    chosen = random_choices(e)
    gates = random_tensor(2, 5, 2, seed=30 + e).softmax(-1)
    want = layer.run_experts(x, gates, chosen)
    got = form(x, gates, chosen, own.experts, group)
    check_shape("what dispatch_and_combine returns", got, want)
    if not same(got, want):
        raise Wrong(f"rank {e}: the result " + explain_experts(got, want, layer, x, gates, chosen))
    away = int((chosen // 2 != e).sum())
    arriving = sum(int((random_choices(rank) // 2 == e).sum()) for rank in range(E) if rank != e)
    C, number = 8, 8  # elements of a row, bytes of a number
    counts = 2 * (E - 1)  # each other rank is told how many rows come for each of its 2 experts
    formula = number * (C * away + C * arriving + counts)
    facts = [beside("bytes sent by this rank", group.bytes_sent,
                    "rows out + outputs back + counts", formula)]
    places = [(expert_parallel, name, form) for name, form in forms.items()]
    sizes = {"dp": RANKS, "ep": RANKS}
    return [*facts, trains(make_mesh, places, sizes, {"experts": 8, "top_k": 2})[1]]


def random_choices(rank):
    """(2, 5, 2): for each token of a rank two of the 8 experts."""
    return torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(10 * rank + i))
                        [:2] for i in range(10)]).view(2, 5, 2)


def mixture_layer(experts):
    """A MixtureOfExperts that holds only these of its 8 experts. Expert i has the same values on
    every rank."""
    config = GPTConfig(21, n_layer=1, n_embd=8, n_experts=8, top_k=2)
    layer = MixtureOfExperts(config).double()
    for number, param in enumerate(layer.experts.parameters()):
        param.data = random_tensor(*param.shape, seed=number)[list(experts)]
    return layer


def explain_experts(got, want, layer, x, gates, chosen):
    """Which mistake gives this result. layer: has all experts."""
    ones = torch.ones_like(gates)
    if same(got, layer.run_experts(x, ones, chosen)):
        return "is the sum of the outputs without their gates"
    first = torch.cat([gates[..., :1], torch.zeros_like(gates[..., 1:])], -1)
    last = torch.cat([torch.zeros_like(gates[..., :1]), gates[..., 1:]], -1)
    if same(got, layer.run_experts(x, first, chosen)) or same(
            got, layer.run_experts(x, last, chosen)):
        return "has the output of one of a token's k experts only: add them up"
    if same(got.sum((0, 1)), want.sum((0, 1))):
        return "has the outputs at other tokens: put each row back where it came from"
    k = factor(got, want)
    if k is not None:
        return f"is {in_numbers(k)} times what it should be"
    right = [i for i in range(want[..., 0].numel())
             if same(got.flatten(0, 1)[i], want.flatten(0, 1)[i])]
    return (f"is right for tokens {right} only" if right else
            "differs for all tokens: has each row met its own expert, and its own gate?")
