"""The global norm, computed again from a run's own gradients, with known mistakes."""

import math

import torch

from model import UNTIED
from run.doctor.finding import Finding, ratio_words
from run.doctor.groups import cut_by_layout, is_replicated, layer_number
from run.doctor.step import EMBEDDING, SimulatedStep


def known_norms(squares, split, layout):
    """{words: norm} of known mistakes. squares: {name: sum of squares of the gradient}; split:
    names of the tensors that are split over the tensor ranks."""
    T, P, D = layout["tp"], layout["pp"], layout["dp"]
    whole = sum(squares.values())
    parts = sum(squares[name] for name in split)
    copies = whole - parts
    found = {"its square: the root is missing": whole,
             "the root of the sum of the tensors' norms, not of their squares":
             math.sqrt(sum(math.sqrt(square) for square in squares.values())),
             "the sum of the tensors' norms, not the root of the sum of their squares":
             sum(math.sqrt(square) for square in squares.values())}
    if T > 1:
        found |= {
            f"replicated gradients count {T} times (tp)": math.sqrt(parts + T * copies),
            f"replicated gradients count {T * T} times (tp)": math.sqrt(parts + T * T * copies),
            "split gradients are left out (tp)": math.sqrt(copies),
            "replicated gradients are left out (tp)": math.sqrt(parts),
            f"split gradients count as 1/{T} (tp)": math.sqrt(parts / T + copies),
            f"replicated gradients count as 1/{T} (tp)": math.sqrt(parts + copies / T)}
    for name, size in (("data", D), ("tensor", T), ("pipeline", P)):
        if size > 1:
            found |= {f"all gradients count {size} times, for each {name} rank":
                      math.sqrt(size * whole),
                      f"the sum of squares is divided by the {size} {name} ranks":
                      math.sqrt(whole / size),
                      f"it is {size} times too large": size * math.sqrt(whole),
                      f"it is 1/{size} of what it should be": math.sqrt(whole) / size}
    tied = squares.get("transformer.wte.weight", 0)
    found["the tied matrix counts twice"] = math.sqrt(whole + tied)
    found["the tied matrix is left out"] = math.sqrt(whole - tied)
    return found


def norms_of_parts(mine, given):
    """{words: norm} of the gradients that single pipeline stages or tensor ranks hold."""
    layout, L = mine.layout, mine.model.n_layer
    T, P = layout["tp"], layout["pp"]
    starts = [0, *(cut_by_layout(mine.model, layout) if P > 1 else [])]
    step = SimulatedStep(mine.model, layout, 0.0, dict(mine.weights(0)))
    parts = torch.zeros(len(starts), T, dtype=torch.double)  # squares of each stage's rank
    for t, tags in enumerate(step.tags()):
        for name, grad in given.items():
            piece = tags[name].slice(grad)
            copies = T if piece.shape == grad.shape else 1
            stages = {max(i for i, start in enumerate(starts) if start <= layer_number(name, L))}
            if name == EMBEDDING and UNTIED not in given:
                stages.add(len(starts) - 1)  # the tied head
            for stage in stages:
                parts[stage, t] += piece.square().sum() / copies / len(stages)
    found = {}
    for i, row in enumerate(parts if P > 1 else ()):
        found[f"that of pipeline stage {i}'s part only (pp)"] = row.sum().sqrt().item()
    for t, column in enumerate(parts.T if T > 1 else ()):
        found[f"that of tensor rank {t}'s part only (tp)"] = column.sum().sqrt().item()
    if P > 1 and T > 1:
        found |= {f"that of the part of one rank only (pp {i}, tp {t})": parts[i, t].sqrt().item()
                  for i in range(len(starts)) for t in range(T)}
    return found


def shard_norms(mine, given):
    """{words: norm} of one data rank's shards only: FSDP's, which are cut along dim 0."""
    D = mine.layout["dp"]
    found = {}
    for d in range(D if D > 1 else 0):
        squares = [chunks[d].square().sum().item()
                   for chunks in (grad.chunk(D) for grad in given.values()) if d < len(chunks)]
        found[f"that of data rank {d}'s shards only (FSDP, dp)"] = math.sqrt(sum(squares))
    return found


def judge_norm(mine, number):
    """A Finding: is MINE's norm that of MINE's gradients? None if it has none to compare."""
    given = mine.gradients(number)
    if not given or len(given) < len(mine.weights(0)):
        return None
    stage = f"step {number} norm"
    norm = mine.steps[number - 1]["norm"]
    squares = {name: given[name].square().sum().item() for name in given}
    right = math.sqrt(sum(squares.values()))
    if not math.isfinite(norm) or not math.isfinite(right):
        same = math.isfinite(norm) == math.isfinite(right)
        return Finding(stage, same, "not finite")
    eps = 1e-10 if mine.grad_dtype == "float64" else 1e-5

    def is_it(value, eps=eps):
        return abs(norm - value) <= eps * abs(value)

    if is_it(right):
        return Finding(stage, True)
    finding = Finding(stage, False, ratio_words(norm, right))
    split = [name for name in given if not is_replicated(name)]
    known = dict(known_norms(squares, split, mine.layout))
    known |= shard_norms(mine, given)
    if mine.model and max(mine.layout["pp"], mine.layout["tp"]) > 1:
        known |= norms_of_parts(mine, given)
    if number == 2 and mine.gradients(1):
        known["that of the first step"] = mine.steps[0]["norm"]
    clip = mine.optimizer["grad_clip"]
    if clip:
        known["that of the clipped gradients"] = min(clip, right)
    scale = mine.steps[number - 1]["scale"]
    if scale != 1:
        known["that of gradients with the loss scale"] = scale * right
    finding.causes = [f"the norm: {words}" for words, value in known.items() if is_it(value)]
    # a trainer that computes norms in 16 bits
    if not finding.causes and is_it(right, torch.finfo(getattr(torch, mine.grad_dtype)).eps):
        return Finding(stage, True)
    return finding
