"""Judges data parallelism and ZeRO: exercises 3 to 5."""

import torch

import plain
from exercises.catalogue import RANKS
from exercises.judge import Wrong, factor, in_numbers, same, trains
from model import build
from shard import tag_whole
from sizes import GPTConfig

SMALL = GPTConfig(21, block_size=4, n_layer=2, n_head=4, n_embd=8)


def small_model(group):
    """A tagged GPT, and its parameters' gradients if all ranks' tokens are in one process; this
    rank's tokens."""
    model = build(SMALL, dtype=torch.double)
    tag_whole(model, group)
    tokens = torch.randint(21, (group.size, 1, 4), generator=torch.Generator().manual_seed(0))
    alone = build(SMALL, dtype=torch.double)
    alone(tokens.flatten(0, 1), tokens.flatten(0, 1)).backward()
    whole = {name: param.grad for name, param in alone.canonical_parameters()}
    return model, whole, tokens[group.rank]


def explain_gradient(got, want, own, N):
    """How a gradient differs from the sum over N replicas, of which `own` is this rank's term."""
    if got is None:
        return "is None"
    if got.shape != want.shape:
        return f"has shape {[*got.shape]}, and should have {[*want.shape]}"
    k = factor(got, want)
    if k is not None and abs(k - 1 / N) < 1e-9:
        return f"is divided by {N}: gradients are summed, never averaged"
    if k is not None:
        return f"is {in_numbers(k)} times the sum: summed once too often?"
    if same(got, own):
        return "is this rank's own term: not summed over the replicas"
    return "differs from the sum over the replicas"


def judge_buckets(make_mesh, forms):
    form = forms["BucketDDP"]
    mesh = make_mesh(dp=RANKS)
    group = mesh.group("dp")
    model, whole, mine = small_model(group)
    own = build(SMALL, dtype=torch.double)
    own(mine, mine).backward()
    terms = {name: param.grad for name, param in own.canonical_parameters()}
    ours = form(model.layers)
    model(mine, mine).backward()
    on_their_way = group.submitted
    grads = ours.gradients()
    left = group.unjoined
    if grads is None or len(grads) != len(ours.params):
        raise Wrong("gradients() returns a list: a summed gradient for each of self.params")
    if left:
        raise Wrong(f"rank {group.rank}: gradients() has returned, and {left} of "
                    f"{group.submitted} all-reduces were not waited for")
    for grad, param in zip(grads, ours.params, strict=True):
        name = param.shard.name
        said = "" if grad is not None and same(grad, whole[name]) else explain_gradient(
            grad, whole[name], terms[name], group.size)
        if said:
            raise Wrong(f"rank {group.rank}: the gradient of {name} {said}")
    psi = sum(param.numel() for param in ours.params)
    if group.submitted == 0:
        raise Wrong("right sums, but no all-reduce ran in the background: async_op=True")
    if group.submitted >= len(ours.params):
        raise Wrong(f"right sums, but {group.submitted} all-reduces for {len(ours.params)} "
                    "parameters: put parameters side by side into buckets")
    if on_their_way == 0:
        raise Wrong("right sums, but no bucket was on its way when backward ended: no overlap")
    facts = [f"buckets: {group.submitted} for {len(ours.params)} parameters; on their way when "
             f"backward ended: {on_their_way}",
             f"bytes sent by this rank: {group.bytes_sent}    formula 2 (N-1)/N n = "
             f"{2 * (RANKS - 1) * 8 * psi // RANKS}"]
    reducers = (form, *plain.REDUCERS[1:])
    return [*facts, trains(make_mesh, [(plain, "REDUCERS", reducers)], {"dp": 4})[1]]
