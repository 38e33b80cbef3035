"""Judges tags, the global norm and the checkpoint: exercises 15 and 16."""

import os
from dataclasses import replace

import numpy as np
import torch

import train
from extras.exercises.catalogue import RANKS
from extras.exercises.judge import Wrong, check_shape, in_numbers, same, trains
from extras.exercises.slices import random_tensor
from model import build
from optimizer import AdamW
from shard import Tag, bounds, tag_whole
from sizes import GPTConfig


def judge_tied_norm(make_mesh, forms):
    mesh = make_mesh(pp=RANKS)
    check_tie(forms["tie_ends"], mesh)
    check_square(forms["square"], mesh.group("pp"))

    def square(optimizer, grads):  # replaces a method
        return forms["square"](grads, optimizer.holders)

    places = [(train, "tie_ends", forms["tie_ends"]), (AdamW, "square", square)]
    facts = [trains(make_mesh, places, {"pp": 4}, microbatches=2)[1]]
    return [*facts, trains(make_mesh, places, {"dp": 2, "tp": 2}, zero=1)[1]]


def check_tie(form, mesh):
    """Raise Wrong unless tie_ends tags the matrix of a tied model, and leaves that of an untied one
    alone."""
    model = build(GPTConfig(21, block_size=4, n_layer=2, n_head=2, n_embd=8), dtype=torch.double)
    ends = mesh.ends("pp")
    replicas = mesh.group("dp")
    for layers, tied in ((model.layers, True), (untied(model), False)):
        tag_whole(model, replicas)
        weight = layers[0].wte.weight
        form(layers, ends)
        tag = weight.tag
        at_end = tied and ends.size > 1
        if tag.sum_over[:1] != (replicas,):
            raise Wrong("tie_ends drops the replicas from sum_over: append to it")
        if not at_end and (len(tag.sum_over) > 1 or tag.shared_by):
            which = "a middle stage" if tied else "a matrix that is not tied"
            raise Wrong(f"tie_ends tags {which}: nothing to do there")
        if at_end and ends not in tag.sum_over:
            raise Wrong("the tied matrix's sum_over lacks the two stages: its two terms would not "
                        "be summed")
        if at_end and ends not in tag.shared_by:
            raise Wrong("the tied matrix's shared_by lacks the two stages: the norm would count "
                        "its gradient twice")


def untied(model):
    """The layers of a model whose head has a matrix of its own."""
    other = build(model.config, dtype=torch.double)
    return [*model.layers[:-1], other.layers[-1]]


def check_square(form, group):
    """Raise Wrong unless a rank's part of the squared norm is right for two gradients: its slice of
    a split matrix, and that of a LayerNorm, which all ranks hold."""
    T, t = group.size, group.rank
    parts = [random_tensor(1, 3, seed=r) for r in range(T)]
    replicated = random_tensor(5, seed=99)  # the same on all ranks
    grads = [parts[t], replicated]
    before = [grad.clone() for grad in grads]
    got = form(grads, [1, T])
    part = parts[t].square().sum()
    own = replicated.square().sum()
    want = part + own / T
    check_shape("what square returns", got, want)
    if not same(grads[0], before[0]) or not same(grads[1], before[1]):
        raise Wrong("square changes the gradients: work on copies")
    if same(got, want):
        return
    said = f"is {got.item():.6g}, and should be {want.item():.6g}"
    if same(got, want.sqrt()):
        said = "is a root: train.py takes the root, after the sum over all ranks"
    elif same(got, part + own):
        said = (f"counts the LayerNorm's gradient whole, and so do {T} ranks: each of its n "
                "holders adds 1/n of its square")
    elif same(got, part + own / T**2):
        said = ("counts the LayerNorm's gradient too little: divide the square of a gradient by n, "
                "not the gradient")
    elif same(got, want / T):
        said = f"is {in_numbers(1 / T)} of the right one: squares are never averaged"
    elif same(got, (part.sqrt() + own.sqrt() / T)) or same(got, part.sqrt() + (own / T).sqrt()):
        said = "is a sum of norms: add squares"
    raise Wrong(f"rank {t}: this rank's part of the square {said}")


# ---- the checkpoint ----


def tags_of(group):
    """{name: (tag of this rank's slice, start, stop)}: slices of rows, of columns, and of q, k, v;
    under ZeRO, a chunk of a whole tensor and a chunk of a slice of columns. [start, stop): elements
    of the flattened slice."""
    T, t = group.size, group.rank
    shape = torch.Size((6, 8))
    rows = Tag("rows", shape, 0, (bounds(6, group),))
    columns = Tag("columns", shape, 1, (bounds(8, group),))
    parts = Tag("q, k, v", torch.Size((3 * T, 2)), 0, tuple((T * i + t, T * i + t + 1)
                                                              for i in range(3)))
    whole = Tag("a chunk of the whole", shape, 0, ((0, 6),))
    half = replace(columns, name="a chunk of columns",
                   ranges=((0, 4),) if t < T // 2 else ((4, 8),))
    # Two ranks share four columns, 24 elements, cut at 11
    part_of_half = (0, 11) if t % 2 == 0 else (11, 24)
    return {rows.name: (rows, 0, rows.slice(torch.empty(shape)).numel()),
            columns.name: (columns, 0, 12),
            parts.name: (parts, 0, 6),
            whole.name: (whole, *bounds(48, group)),
            half.name: (half, *part_of_half)}


def judge_checkpoint(make_mesh, forms):
    form = forms["runs"]
    mesh = make_mesh(tp=RANKS)
    group = mesh.group("tp")
    facts = []
    for name, (tag, start, stop) in tags_of(group).items():
        full = torch.arange(tag.shape.numel(), dtype=torch.double).view(tag.shape)
        mine = tag.slice(full).flatten()[start:stop]
        found = form(tag, start, stop)
        found = list(found) if hasattr(found, "__iter__") else found
        said = explain_runs(found, mine)
        if said:
            raise Wrong(f"{name}, shape {[*tag.shape]}, dim {tag.dim}, ranges {tag.ranges}, "
                        f"elements {start} to {stop}: rank {group.rank}: {said}")
        fewest = len(list(tag.runs(start, stop)))
        if len(found) > fewest:
            raise Wrong(f"{name}: right, but {len(found)} runs, and {fewest} are enough: a run is "
                        "as long as elements lie side by side")
        facts.append(f"{name}: {len(found)} runs for {stop - start} elements")
    facts.append(through_a_file(form, mesh, group))
    return facts


def explain_runs(found, mine):
    """What is wrong with a list of runs; "" if nothing is wrong. mine: indexes in the full tensor
    of the elements from start to stop."""
    if not isinstance(found, list) or any(len(tuple(run)) != 3 for run in found):
        return "yield (index in the full tensor, index counted from start, length)"
    named = {}  # {index counted from start: index in the full tensor}
    for index, position, length in found:
        if length < 1:
            return f"a run has length {length}"
        for i in range(length):
            if position + i in named:
                return f"element {position + i} comes twice"
            named[position + i] = index + i
    want = dict(enumerate(map(int, mine.tolist())))
    if named == want:
        return ""
    if {p - min(named, default=0): i for p, i in named.items()} == want:
        return "count the second number from start"
    if set(want.values()) < set(named.values()):
        return "elements outside of start and stop are in the runs"
    missing = sorted(set(want.values()) - set(named.values()))
    if missing and set(named.values()) <= set(want.values()):
        return f"elements {missing} of the full tensor are missing"
    wrong = next(p for p in {**want, **named} if named.get(p) != want.get(p))
    return (f"element {wrong} is said to lie at {named.get(wrong)} of the full tensor, and lies at "
            f"{want.get(wrong)}")


def through_a_file(form, mesh, group):
    """Raise Wrong unless ranks that write their columns into a file read their rows from it.
    Returns a line that says what was compared."""
    tags = tags_of(group)
    path = f"{mesh.board.path}.weights"
    full = random_tensor(6, 8, seed=1)
    tag, start, stop = tags["columns"]
    mine = tag.slice(full).flatten().numpy()
    with open(os.open(path, os.O_CREAT | os.O_RDWR), "r+b") as file:
        for index, position, length in form(tag, start, stop):
            file.seek(8 * index)
            file.write(mine[position : position + length].tobytes())
    mesh.board.meet()  # all have written
    tag, start, stop = tags["rows"]
    read = np.zeros(stop - start)
    written = np.fromfile(path)
    for index, position, length in form(tag, start, stop):
        read[position : position + length] = written[index : index + length]
    if not same(torch.from_numpy(read), tag.slice(full).flatten()):
        raise Wrong(f"rank {group.rank}: columns written by four ranks are read as other rows")
    return "a file written by four ranks that hold columns, read by four that hold rows: the same"
