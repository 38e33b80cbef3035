"""The global norm of MINE's gradients, computed again, and mistakes in it.

The right norm is the root of the sum of the squares of all elements of all full gradients. The
square of a gradient that several ranks hold must count once; the squares of slices must be summed
over the ranks. Every mistake here is arithmetic on the squares of MINE's own gradients, so wrong
gradients make no wrong norm.
"""

import math

import torch

from model import UNTIED
from run.doctor.finding import Finding, ratio_words
from run.doctor.groups import cut_by_layout, is_replicated, layer_number
from run.doctor.step import EMBEDDING, SimulatedStep


def sum_of_squares(tensor):
    return tensor.square().sum().item()


def norms_of_squares(squares, layout):
    """{words: norm} of mistakes in the sum. squares: {name: sum of squares of its gradient}."""
    D = layout["dp"]
    T = layout["tp"]
    P = layout["pp"]
    whole = sum(squares.values())
    copies = sum(square for name, square in squares.items() if is_replicated(name))  # on T ranks
    parts = sum(square for name, square in squares.items() if not is_replicated(name))
    sum_of_norms = sum(math.sqrt(square) for square in squares.values())
    found = {
        "its square: the root is missing": whole,
        "the root of the sum of the tensors' norms, not of their squares": math.sqrt(sum_of_norms),
        "the sum of the tensors' norms, not the root of the sum of their squares": sum_of_norms}
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
            found |= {
                f"all gradients count {size} times, for each {name} rank": math.sqrt(size * whole),
                f"the sum of squares is divided by the {size} {name} ranks":
                    math.sqrt(whole / size),
                f"it is {size} times too large": size * math.sqrt(whole),
                f"it is 1/{size} of what it should be": math.sqrt(whole) / size}
    if EMBEDDING in squares and UNTIED not in squares:
        tied = squares[EMBEDDING]
        found["the tied matrix counts twice"] = math.sqrt(whole + tied)
        found["the tied matrix is left out"] = math.sqrt(max(0.0, whole - tied))
    return found


def norms_of_parts(mine, given):
    """{words: norm} of the gradients that one pipeline stage, one tensor rank, or one rank of both
    holds. A part that several ranks hold is shared among them: each has 1/copies of its square."""
    layout = mine.layout
    T = layout["tp"]
    P = layout["pp"]
    starts = [0, *(cut_by_layout(mine.model, layout) if P > 1 else [])]  # of stages, in layers
    last = len(starts) - 1
    squares = torch.zeros(len(starts), T, dtype=torch.double)  # of each stage's tensor ranks
    step = SimulatedStep(mine.model, layout, 0.0, dict(mine.weights(0)))
    for t, tags in enumerate(step.tags()):
        for name, grad in given.items():
            piece = tags[name].slice(grad)
            copies = T if piece.shape == grad.shape else 1
            layer = layer_number(name, mine.model.n_layer)
            stages = {max(i for i, start in enumerate(starts) if start <= layer)}
            if name == EMBEDDING and UNTIED not in given:  # tied: the last stage has it, too
                stages.add(last)
            for i in stages:
                squares[i, t] += piece.square().sum() / (copies * len(stages))
    found = {}
    if P > 1:
        for i, square in enumerate(squares.sum(1).tolist()):
            found[f"that of pipeline stage {i}'s part only (pp)"] = math.sqrt(square)
    if T > 1:
        for t, square in enumerate(squares.sum(0).tolist()):
            found[f"that of tensor rank {t}'s part only (tp)"] = math.sqrt(square)
    if P > 1 and T > 1:
        for i, of_stage in enumerate(squares.tolist()):
            for t, square in enumerate(of_stage):
                found[f"that of the part of one rank only (pp {i}, tp {t})"] = math.sqrt(square)
    return found


def norms_of_shards(mine, given):
    """{words: norm} of one data rank's shards only: FSDP's, each tensor cut along dim 0."""
    D = mine.layout["dp"]
    if D == 1:
        return {}
    squares = [0.0] * D
    for grad in given.values():
        for d, shard in enumerate(grad.chunk(D)):  # a short tensor has fewer than D
            squares[d] += sum_of_squares(shard)
    return {f"that of data rank {d}'s shards only (FSDP, dp)": math.sqrt(square)
            for d, square in enumerate(squares)}


def known_norms(mine, number, given, squares, right):
    """{words: norm} of all mistakes that MINE's layout can have. right: the right norm."""
    layout = mine.layout
    step = mine.steps[number - 1]
    found = norms_of_squares(squares, layout) | norms_of_shards(mine, given)
    if mine.model and max(layout["pp"], layout["tp"]) > 1:
        found |= norms_of_parts(mine, given)
    if number == 2 and mine.gradients(1):
        found["that of the first step"] = mine.steps[0]["norm"]
    if mine.optimizer["grad_clip"]:
        found["that of the clipped gradients"] = min(mine.optimizer["grad_clip"], right)
    if step["scale"] != 1:
        found["that of gradients with the loss scale"] = step["scale"] * right
    return found


def judge_norm(mine, number):
    """[a Finding]: is MINE's norm that of MINE's gradients? Or [], if the dump lacks gradients."""
    given = mine.gradients(number)
    if not given or len(given) < len(mine.weights(0)):
        return []
    stage = f"step {number} norm"
    norm = mine.steps[number - 1]["norm"]
    squares = {name: sum_of_squares(grad) for name, grad in given.items()}
    right = math.sqrt(sum(squares.values()))
    if not math.isfinite(norm) or not math.isfinite(right):
        both_are_not = math.isfinite(norm) == math.isfinite(right)
        return [Finding(stage, both_are_not, "not finite")]

    def is_near(value, eps):
        return abs(norm - value) <= eps * abs(value)

    eps = 1e-10 if mine.grad_dtype == "float64" else 1e-5
    if is_near(right, eps):
        return [Finding(stage, True)]
    known = known_norms(mine, number, given, squares, right)
    causes = [f"the norm: {words}" for words, value in known.items() if is_near(value, eps)]
    rounding = torch.finfo(getattr(torch, mine.grad_dtype)).eps
    if not causes and is_near(right, rounding):  # a trainer that computes norms in 16 bits
        return [Finding(stage, True)]
    return [Finding(stage, False, ratio_words(norm, right), causes)]
