"""placements.py: each transition equals its definition and sends the formula; the techniques
of the repository are transitions; layers whose messages are derived equal one process."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import context_parallel
import sequence_parallel
import tensor_parallel
import zero
from extras.forks import placements
from extras.forks.placements import (
    COLUMN,
    DDP_PLAN,
    PARTIAL,
    REPLICATE,
    ROW,
    SP_COLUMN,
    SP_ROW,
    TOKENS,
    ZERO3_PLAN,
    Linear,
    Plan,
    Split,
    dual,
    product,
    redistribute,
)
from mesh import Mesh
from tests.harness import close
from tests.pool import pool


def random(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.double, generator=rng)


def given(full, placement, group):
    """What this rank holds of a tensor, by the definition of placements."""
    if placement == REPLICATE:
        return full.clone()
    if placement == PARTIAL:  # random terms whose sum is the tensor
        terms = [random(*full.shape, seed=r + 1) for r in range(group.size - 1)]
        return [*terms, full - sum(terms)][group.rank]
    return full.tensor_split(group.size, placement.dim)[group.rank].clone()


# ---- the table ----

EVERY = [REPLICATE, PARTIAL, Split(0), Split(1), Split(2)]


def _table(rank, world):
    """{(source, target): bytes that this rank has sent}"""
    group = Mesh(dp=world).group("dp")
    full = random(world, 2 * world, 3 * world)
    sent = {}
    for source in EVERY:
        for target in EVERY:
            x = given(full, source, group)
            kept, before = x.clone(), group.bytes_sent
            got = redistribute(x, source, target, group)
            sent[source, target] = group.bytes_sent - before
            assert torch.equal(x, kept), "the input has changed"
            if target == PARTIAL:
                got, want = redistribute(got, PARTIAL, REPLICATE, group), full
            else:
                want = given(full, target, group)
            close(got, want, f"{source} to {target}")
    return sent


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_each_transition_equals_its_definition_and_sends_the_formula(N):
    n = 8 * 6 * N**3
    for sent in pool(N, _table, N):
        for (source, target), nbytes in sent.items():
            kinds = [place if isinstance(place, str) else "split" for place in (source, target)]
            gather, to_all = n * (N - 1) // N, n * (N - 1) // N**2
            want = {("partial", "replicate"): 2 * gather, ("partial", "split"): gather,
                    ("split", "replicate"): gather, ("split", "split"): to_all}
            usual = 0 if source == target else want.get(tuple(kinds), 0)
            assert nbytes == usual, (source, target)


# ---- the techniques of the repository are transitions ----


def by_hand(x, group, forward, grad):
    """(result, gradient of x, bytes) of a function that the repository has."""
    before = group.bytes_sent
    x = x.clone().requires_grad_()
    y = forward(x)
    y.backward(grad)
    return y.detach(), x.grad, group.bytes_sent - before


def _same(rank, world):
    group = Mesh(tp=world).group("tp")
    B, S, C = 2, 2 * world, 3 * world
    full, full_grad = random(B, S, C, seed=90), random(B, S, C, seed=91)
    # name: (the function, source, target, how the gradient of its result arrives)
    techniques = {
        "f": (tensor_parallel.copy_to_ranks, REPLICATE, REPLICATE, PARTIAL),
        "g": (tensor_parallel.sum_over_ranks, PARTIAL, REPLICATE, REPLICATE),
        "--sp's enter": (sequence_parallel.gather_tokens, TOKENS, REPLICATE, PARTIAL),
        "--sp's leave": (sequence_parallel.scatter_tokens, PARTIAL, TOKENS, TOKENS)}
    for name, (function, source, target, arrives) in techniques.items():
        x = given(full, source, group)
        grad = given(full_grad, arrives, group)
        y, grad_x, nbytes = by_hand(x, group, lambda x: function(x, group), grad)  # noqa: B023
        before = group.bytes_sent
        close(redistribute(x, source, target, group), y, name)
        close(redistribute(grad, arrives, dual(source), group), grad_x, f"gradient of {name}")
        assert group.bytes_sent - before == nbytes, name

    # Ulysses: tokens for heads. (context_parallel.py deals tokens to ranks by zigzag.)
    heads = random(2, 2 * world, 4 * world, 3, seed=92)  # (B, nh, S, hs)
    own = context_parallel.zigzag(4 * world, world, group.rank)
    whole = context_parallel.to_whole_sequences(heads[:, :, own].contiguous(), group,
                                                context_parallel.all_to_all)
    mine = given(heads, Split(2), group)
    close(redistribute(mine, Split(2), Split(1), group), whole, "Ulysses")

    # ZeRO: gradients come as terms and stay as parts; weights are gathered from their parts
    flat = random(6 * world, seed=93)
    term = given(flat, PARTIAL, group)
    param = torch.nn.Parameter(torch.zeros(6 * world, dtype=torch.double))
    param.grad = term.clone()
    sent = []
    for reduce in (lambda: zero_chunk(param, group),
                   lambda: redistribute(term, PARTIAL, Split(0), group)):
        before = group.bytes_sent
        close(reduce(), given(flat, Split(0), group), "a gradient under ZeRO")
        sent.append(group.bytes_sent - before)
    chunk = given(flat, Split(0), group)
    for gather in (lambda: zero.gather_weight(chunk, flat.shape, group),
                   lambda: redistribute(chunk, Split(0), REPLICATE, group)):
        before = group.bytes_sent
        close(gather(), flat, "weights under ZeRO-3")
        sent.append(group.bytes_sent - before)
    assert len(set(sent)) == 1


def zero_chunk(param, group):
    """This rank's chunk of a gradient, as zero.py's ZeRO1 leaves it."""
    return zero.own_chunk(zero.reduce_scatter(param.grad.clone(), group), group)


@pytest.mark.parametrize("N", [2, 3, 4])
def test_f_g_enter_leave_ulysses_and_zero_are_transitions_with_their_bytes(N):
    pool(N, _same, N)


# ---- the rule for products ----


@pytest.mark.parametrize("equation,first,second,result", [
    ("bsi,oi->bso", REPLICATE, Split(0), Split(2)),  # a column
    ("bsi,oi->bso", Split(2), Split(1), PARTIAL),  # a row: g follows
    ("bso,oi->bsi", Split(2), Split(0), PARTIAL),  # backward of a column: f follows
    ("bso,bsi->oi", Split(0), Split(0), PARTIAL),  # data parallelism: sum the gradients
    ("bso,bsi->oi", Split(1), Split(1), PARTIAL),  # --sp: sum those of replicated parameters
    ("bhqd,bhkd->bhqk", Split(1), Split(1), Split(1)),  # attention, heads split
    ("bsi,oi->bso", PARTIAL, REPLICATE, PARTIAL)])
def test_the_placement_of_a_product(equation, first, second, result):
    assert product(equation, first, second) == result


@pytest.mark.parametrize("equation,first,second", [
    ("bsi,oi->bso", Split(0), Split(0)),  # ZeRO-3: gather the weights first
    ("bsi,oi->bso", Split(1), Split(0)),  # --sp before a column: gather the tokens first
    ("bhqd,bhkd->bhqk", Split(2), Split(2)),  # split sequences: a ring, or an all-to-all first
    ("bsi,oi->bso", Split(2), REPLICATE), ("bsi,oi->bso", PARTIAL, PARTIAL)])
def test_products_that_need_a_message_first_are_refused(equation, first, second):
    with pytest.raises(ValueError, match="do not meet|sum of products"):
        product(equation, first, second)


# ---- layers whose messages are derived ----

BATCH = DDP_PLAN
LAYOUTS = {  # name: (sizes of the mesh, {axis: (plan of the first layer, of the second)})
    "one process": ({"dp": 1}, {"dp": (Plan(), Plan())}),
    "data": ({"dp": 3}, {"dp": (BATCH, BATCH)}),
    "ZeRO-3": ({"dp": 4}, {"dp": (ZERO3_PLAN, ZERO3_PLAN)}),
    "tensor": ({"tp": 4}, {"tp": (COLUMN, ROW)}),
    "sequence": ({"tp": 3}, {"tp": (SP_COLUMN, SP_ROW)}),
    "data x tensor": ({"dp": 2, "tp": 3}, {"dp": (BATCH, BATCH), "tp": (COLUMN, ROW)}),
    "ZeRO-3 x sequence": ({"dp": 2, "tp": 2}, {"dp": (ZERO3_PLAN, ZERO3_PLAN),
                                               "tp": (SP_COLUMN, SP_ROW)}),
    "context": ({"cp": 2}, {"cp": (Plan(x=TOKENS, used_x=TOKENS, y=TOKENS),) * 2}),
    "rows, then columns": ({"tp": 2}, {"tp": (
        ROW._replace(x=REPLICATE), Plan(weight=Split(0), used_weight=Split(0)))})}


BUGS = {  # name: (attribute of placements, a mistake, a layout that shows it)
    "a gradient of a sum is taken for a term": ("dual", lambda place: place, "tensor"),
    "a product that is summed is taken for whole": (
        "product", lambda *args: product(*args).replace(PARTIAL, REPLICATE)
        if isinstance(product(*args), str) else product(*args), "data"),
    "all-gather puts parts together along another dim": (
        "torch.cat", None, "sequence"),
    "a rank takes its neighbour's part": (
        "own_part", lambda x, dim, group: x.chunk(group.size, dim)[group.rank - 1],
        "rows, then columns")}


def _mlp(rank, layout, bug=None):
    sizes, axes = LAYOUTS[layout]
    mesh = Mesh(**sizes)
    B, S, C, H = 12, 12, 12, 24
    whole = [random(B, S, C, seed=1), random(H, C, seed=2), random(C, H, seed=3)]
    plans = [[(mesh.group(axis), pair[layer]) for axis, pair in axes.items()]
             for layer in (0, 1)]

    def part(full, placement_of, layer):
        for group, plan in reversed(plans[layer]):
            full = given(full, placement_of(plan), group)
        return full

    def back(x, placement_of, layer):
        for group, plan in plans[layer]:
            x = redistribute(x, placement_of(plan), REPLICATE, group)
        return x

    leaves = [part(whole[0], lambda p: p.x, 0), part(whole[1], lambda p: p.weight, 0),
              part(whole[2], lambda p: p.weight, 1)]
    x, w1, w2 = (leaf.requires_grad_() for leaf in leaves)
    with ExitStack() as stack:
        if bug and BUGS[bug][1]:
            stack.enter_context(patch.object(placements, *BUGS[bug][:2]))
        if bug and not BUGS[bug][1]:
            cat = torch.cat
            stack.enter_context(patch.object(torch, "cat", lambda parts, dim=0: cat(parts, 0)))
        y = Linear.apply(F.gelu(Linear.apply(x, w1, plans[0])), w2, plans[1])
        y.backward(part(random(B, S, C, seed=4), lambda p: dual(p.y), 1))
    results = [back(y.detach(), lambda p: p.y, 1), back(x.grad, lambda p: dual(p.x), 0),
               back(w1.grad, lambda p: dual(p.weight), 0),
               back(w2.grad, lambda p: dual(p.weight), 1)]

    x, w1, w2 = (full.clone().requires_grad_() for full in whole)
    y = F.linear(F.gelu(F.linear(x, w1)), w2)
    y.backward(random(B, S, C, seed=4))
    for got, want, name in zip(results, (y, x.grad, w1.grad, w2.grad),
                               ("y", "grad x", "grad W1", "grad W2"), strict=True):
        assert got.shape == want.shape, name
        close(got, want.detach(), name)


def trains(layout, bug=None):
    world = torch.tensor(list(LAYOUTS[layout][0].values())).prod().item()
    pool(world, _mlp, layout, bug)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_mlp_whose_messages_are_derived_equals_one_process(layout):
    trains(layout)


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(bug):
    with pytest.raises(AssertionError, match="off by|grad|y"):
        trains(BUGS[bug][2], bug)
