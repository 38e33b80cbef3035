"""The global norm of MINE's gradients, computed again, and mistakes in it.

The right norm is the root of the sum of the squares of all elements of all full gradients. The
square of a gradient that several ranks hold must count once; the squares of slices must be summed
over the ranks. Every mistake here is arithmetic on the squares of MINE's own gradients, so wrong
gradients make no wrong norm.
"""

import math

import torch

from extras.doctor.finding import NOISE, RESOLVED, Finding, norm_of, ratio_words, unexamined
from extras.doctor.groups import cut_by_layout, is_replicated, layer_number
from extras.doctor.step import EMBEDDING, SimulatedStep, served
from model import UNTIED
from schedules import placement


def sum_of_squares(tensor):
    return tensor.square().sum().item()


def wrong_sums(squares, layout):
    """{words: the norm that this wrong way of adding squares gives}. squares: {name: sum of the
    squares of the gradient}."""
    D = layout["dp"]
    N = layout["cp"]
    T = layout["tp"]
    P = layout["pp"]
    E = layout["ep"]
    whole = sum(squares.values())
    # Squares of gradients that all T ranks hold, and of gradients that are split over the T ranks
    copies = sum(square for name, square in squares.items() if is_replicated(name))
    parts = sum(square for name, square in squares.items() if not is_replicated(name))
    experts = sum(square for name, square in squares.items() if ".experts." in name)
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
    if T > 1 and D * N > 1:
        found[f"all gradients count {D * N} times, for each replica (dp, cp), and replicated ones "
              f"{D * N * T} times (tp)"] = math.sqrt(D * N * (parts + T * copies))
    if T > 1 and experts:  # all T ranks hold whole experts, as in the root's expert_parallel.py
        found[f"replicated gradients and those of experts count {T} times (tp)"] = math.sqrt(
            whole + (T - 1) * (copies + experts))
    if E > 1:
        found[f"the gradients of all but experts count {E} times (ep)"] = math.sqrt(
            experts + E * (whole - experts))
        found[f"the gradients of experts count as 1/{E} (ep)"] = math.sqrt(
            experts / E + (whole - experts))
    for name, size in (("data", D), ("context", N), ("tensor", T), ("pipeline", P)):
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


def squares_by_rank(mine, given):
    """(P, T): for each pipeline rank and tensor rank the sum of the squares of its gradients. The
    square of a gradient that several ranks hold is shared among them, in equal parts."""
    model = mine.model
    layout = mine.layout
    P = layout["pp"]
    T = layout["tp"]
    starts = [0]  # first layer of each pipeline stage
    where = [0]  # pipeline rank of each pipeline stage
    if P > 1:
        starts += cut_by_layout(model, layout)
        where = placement(layout["schedule"], P, layout["chunks"])
    squares = torch.zeros(P, T, dtype=torch.double)
    step = SimulatedStep(model, layout, 0.0, dict(mine.weights(0)))
    for t, tags in enumerate(step.tags()):
        for name, grad in given.items():
            if ".experts." in name:  # (n_experts, ...): tags has all of them on each rank
                piece = grad[served(model.n_experts, layout["ep"], T, t)]
            else:
                piece = tags[name].slice(grad)
            copies = T if piece.shape == grad.shape else 1
            layer = layer_number(name, model.n_layer)
            stage = max(s for s, start in enumerate(starts) if start <= layer)  # pipeline stage
            ranks = {where[stage]}  # pipeline ranks that hold this gradient
            if name == EMBEDDING and UNTIED not in given:  # tied: the last pipeline stage has it
                ranks.add(where[-1])
            for p in ranks:
                squares[p, t] += piece.square().sum() / (copies * len(ranks))
    return squares


def norms_of_parts(mine, given):
    """{words: norm} of the gradients that one pipeline rank, one tensor rank, or one rank of both
    holds."""
    layout = mine.layout
    P = layout["pp"]
    T = layout["tp"]
    squares = squares_by_rank(mine, given)
    found = {}
    if P > 1:
        where = placement(layout["schedule"], P, layout["chunks"])
        for p, square in enumerate(squares.sum(1).tolist()):
            # The pipeline stages on the rank: "0" or, with --chunks 2, "0 and 2"
            stages = " and ".join(str(s) for s, rank in enumerate(where) if rank == p)
            found[f"that of pipeline stage {stages}'s part only (pp)"] = math.sqrt(square)
    if T > 1:
        for t, square in enumerate(squares.sum(0).tolist()):
            found[f"that of tensor rank {t}'s part only (tp)"] = math.sqrt(square)
    if P > 1 and T > 1:
        for p, of_tensor_ranks in enumerate(squares.tolist()):
            for t, square in enumerate(of_tensor_ranks):
                found[f"that of the part of one rank only (pp {p}, tp {t})"] = math.sqrt(square)
    return found


def norms_of_shards(mine, given):
    """{words: norm} of one data rank's shards only: FSDP's, each tensor cut along dim 0, or ZeRO's,
    each tensor cut as one row of elements."""
    D = mine.layout["dp"]
    if D == 1:
        return {}
    found = {}  # norm -> words: if D divides all rows both cuts are one
    for whose, cut in (("FSDP", lambda grad: grad.chunk(D)),  # fewer rows than D: fewer chunks
                       ("ZeRO", lambda grad: grad.flatten().tensor_split(D))):
        squares = [0.0] * D
        for grad in given.values():
            for d, shard in enumerate(cut(grad)):
                squares[d] += sum_of_squares(shard)
        for d, square in enumerate(squares):
            words = f"that of data rank {d}'s shards only ({whose}, dp)"
            found.setdefault(math.sqrt(square), words)
    return {words: norm for norm, words in found.items()}


def known_norms(mine, number, given, squares, right):
    """{words: norm} of all mistakes that MINE's layout can have. right: the right norm."""
    layout = mine.layout
    step = mine.steps[number - 1]
    found = wrong_sums(squares, layout) | norms_of_shards(mine, given)
    if mine.model and max(layout["pp"], layout["tp"]) > 1:
        found |= norms_of_parts(mine, given)
    if number == 2 and mine.gradients(1):
        found["that of the first step"] = mine.steps[0]["norm"]
    if mine.optimizer["grad_clip"]:
        found["that of the clipped gradients"] = min(mine.optimizer["grad_clip"], right)
    if step["scale"] != 1:
        found["that of gradients with the loss scale"] = step["scale"] * right
    return found


def noise_of_norm(given, grad_dtype):
    """How far the norm of one process may be off that adds up squares in 32 bits (or grad_dtype, if
    that is wider): in a large tensor small squares are lost beside the sum so far. The tensors'
    errors are added up without their signs, so that none cancels another."""
    wide = torch.promote_types(grad_dtype, torch.float)
    error = 0.0  # of half the sum of squares
    square = 0.0
    for grad in given.values():
        right = norm_of(grad)
        rounded = torch.linalg.vector_norm(grad.to(wide)).item()
        if math.isfinite(rounded):
            error += right * abs(rounded - right)
        square += right**2
    return error / math.sqrt(square) if square else 0.0


def judge_norm(mine, number):
    """[a Finding]: is MINE's norm that of MINE's gradients?"""
    given = mine.gradients(number)
    stage = f"step {number} norm"
    norm = mine.steps[number - 1]["norm"]
    if not given:
        why = f"MINE has no gradients-{number}.safetensors"
        return [unexamined(stage, why, math.isfinite(norm))]
    squares = {name: sum_of_squares(grad) for name, grad in given.items()}
    right = math.sqrt(sum(squares.values()))
    if not math.isfinite(norm) or not math.isfinite(right):
        neither_is_finite = math.isfinite(norm) == math.isfinite(right)
        return [Finding(stage, neither_is_finite, "not finite")]

    def is_near(value, limit):
        return math.isfinite(value) and abs(norm - value) <= limit

    least = 1e-10 if mine.grad_dtype == "float64" else 1e-5  # relative
    if is_near(right, least * right):
        return [Finding(stage, True)]
    grad_dtype = getattr(torch, mine.grad_dtype)
    tolerance = max(least * right, NOISE * noise_of_norm(given, grad_dtype))
    if is_near(right, tolerance):
        return [Finding(stage, True)]

    def fits(value):
        """Is MINE's norm this one, exactly? Or with noise, which is small beside the mistake?"""
        is_resolved = tolerance <= RESOLVED * abs(value - right)
        return is_near(value, least * value) or (is_resolved and is_near(value, tolerance))

    known = known_norms(mine, number, given, squares, right)
    causes = [f"the norm: {words}" for words, value in known.items() if fits(value)]
    rounding = torch.finfo(grad_dtype).eps
    if not causes and is_near(right, rounding * right):
        return [Finding(stage, True, f"{ratio_words(norm, right)}: it was computed in 16 bits")]
    return [Finding(stage, False, ratio_words(norm, right), causes)]
