"""Is my parallel trainer right? Compares what its ranks compute with what one process computes.

    python -m extras.compare ONE OTHER                    two records: equal, or what differs first
    python -m extras.compare record FOLDER                records two steps of our trainer
    python -m extras.compare record FOLDER --tp 2 --pp 2  ... on four ranks; other flags: train.py's

A trainer of your own calls record() in a run of one process and in a run of several, in float64, in
which what differs by more than rounding is a bug. (Copy this file: record() and the comparison need
torch alone.) Compared: initial weights, tokens, loss, gradients, norm, weights after the step. A
cause is named only if one of this table fits to nearly all digits, else the line says FITS_NONE:

    loss        ONE's, times or divided by a size of the layout
    gradient    the same, or 2: summed twice, 1/D: averaged; terms of some ranks or microbatches
                missing, or counted twice
    norm        of one rank's own tensors; copies counted
"""

import math
import re
import sys
import tempfile
from functools import partial
from itertools import combinations
from pathlib import Path

import torch

FITS_NONE = "fits none of these"
# In parts of the largest number
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}


# ---- record ----


def record(folder, step, loss=None, gradients=(), weights=(), rank=0, norm=None, tokens=None,
           terms=(), layout=()):
    """Save what this rank has in a step into a file of the folder. Call it on every rank, once the
    gradients are summed over the ranks, and before they are clipped and the weights stepped; after
    the last step once more, with the weights.

    loss        as your trainer prints it; None on a rank that does not know it
    gradients   {name: tensor}, or pairs; a name means the same parameter in both records. A slice
                of the full tensor is (tensor, dim, [(start, stop), ...]): the ranges of dim that
                this rank has, in order
    weights     alike: those with which the gradients were computed
    norm        your trainer's global gradient norm
    tokens      (ids, targets), (B, S) each, all sequences of this rank. It has some tokens of each
                sequence: (ids, targets, their positions)
    terms       {name: the gradient in each microbatch, of this rank alone, before any sum}
    layout      {name: size}, such as {"dp": 2, "microbatches": 3}: what a factor may come from.
                Take sizes that differ, so that each factor has one meaning"""
    def kept(named):
        found = {}
        for name, value in dict(named).items():
            tensor, dim, ranges = value if isinstance(value, tuple) else (value, 0, ())
            found[name] = (tensor.detach().cpu().clone(), dim, list(ranges))
        return found

    if tokens:
        ids, targets, *positions = tokens
        tokens = [ids.cpu(), targets.cpu(), *(positions or [torch.arange(ids.size(1))])]
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save({"loss": None if loss is None else float(loss),
                "norm": None if norm is None else float(norm),
                "gradients": kept(gradients),
                "weights": kept(weights),
                "tokens": tokens,
                "terms": dict(terms),
                "layout": dict(layout)}, Path(folder, f"step-{step}-rank-{rank}.pt"))


def load(folder):
    """{step: {rank: what record() has saved}}, both in order."""
    found = {}
    for path in Path(folder).glob("step-*-rank-*.pt"):
        step, rank = (int(number) for number in re.findall(r"\d+", path.name))
        found.setdefault(step, {})[rank] = torch.load(path, weights_only=True)
    if not found:
        sys.exit(f"{folder}: no record here")
    return {step: dict(sorted(found[step].items())) for step in sorted(found)}


# ---- a number: the factors of the table ----


def factors(one, ranks):
    """{words: factor} of the table: the sizes of OTHER's layout, the products of two of these, and
    the sizes of the batch."""
    sizes = {name: size for saved in ranks.values() for name, size in saved["layout"].items()
             if size > 1}
    sizes |= {f"{a} x {b}": sizes[a] * sizes[b] for a, b in combinations(sizes, 2)}
    if one["tokens"]:
        ids = one["tokens"][0]
        sizes |= {"sequences": len(ids), "tokens": ids.numel()}
    rows = {"no gradient arrives": 0, "the sign is wrong": -1, "summed twice": 2}
    for name, size in sizes.items():
        rows[f"{size} = {name}: each counts the whole, or it was not divided by them"] = size
        rows[f"{size} = {name}: divided by them (averaged) once too often"] = 1 / size
    return rows


def fitting(got, rows, tolerance):
    """The words of the rows {words: number} that a number fits, joined; "" if none does."""
    return " or ".join(words for words, number in rows.items()
                       if abs(got - number) <= tolerance * abs(number))


# ---- a gradient: a factor, or terms that count too often or not at all ----

NOTHING = (FITS_NONE, "")  # (how a tensor differs, the table's words for it; "": it has none)


def near(got, want, tolerance):
    return (got - want).norm() <= 10 * tolerance * want.norm()


def terms_of(name, rank, ranks, tolerance):
    """{(rank, microbatch): vector}: the terms of the slice of a gradient that this rank has, its
    own first; without zeros and copies, because T tensor ranks may have one term."""
    _, *where = ranks[rank]["gradients"][name]
    found = {}
    for other in sorted(ranks, key=lambda other: other != rank):
        _, *there = ranks[other]["gradients"].get(name, [None])
        for k, term in enumerate(ranks[other]["terms"].get(name, ()) if there == where else ()):
            term = term.cpu().double().flatten()
            if term.any() and not any(near(term, each, tolerance) for each in found.values()):
                found[other, k] = term
    return found


def counts(got, want, terms, tolerance):
    """{label: how often `got` counts the term}. {} if the terms do not add up to `want`, or if no
    weights, or several, make them `got`."""
    if not terms or len(got) < 2 * len(terms) or not got.isfinite().all():
        return {}
    matrix = torch.stack([*terms.values()], 1)  # (elements, terms)
    total = matrix.sum(1)
    matrix *= total @ want / (total @ total)  # by 1; by 1/D if the trainer averages over D ranks
    sizes = matrix.norm(dim=0)
    slack = math.sqrt(tolerance)
    if not near(matrix.sum(1), want, tolerance) or torch.linalg.svdvals(matrix / sizes)[-1] < slack:
        return {}
    weights = torch.linalg.lstsq(matrix / sizes, got.unsqueeze(1)).solution.flatten() / sizes
    if not near(matrix @ weights, got, tolerance):
        return {}
    return {label: round(weight) if abs(weight - round(weight)) < slack else weight
            for label, weight in zip(terms, weights.tolist(), strict=True)}


def explain_gradient(got, want, terms, rank, rows, tolerance):
    """(how a gradient of this rank differs, its cause). rows: factors() of the layout."""
    if near(got, want, tolerance):
        return NOTHING
    factor = (got @ want / (want @ want)).item()
    if len(got) > 1 and near(got, factor * want, tolerance):
        return f"{factor:.6g} times ONE's", fitting(factor, rows, math.sqrt(tolerance))
    times = counts(got, want, terms, tolerance)
    others = [number for (whose, _), number in times.items() if whose != rank]
    if others and not any(others):
        return "this rank's own terms only", "not summed over the ranks"
    words = {}  # rank -> how often, of each microbatch
    for (whose, _), number in sorted(times.items()):
        words[whose] = words.get(whose, f"rank {whose}:") + f" {number:.4g}"
    return (f"terms of microbatches count ({', '.join(words.values())}) times",
            "each has to count once") if times else NOTHING


# ---- checks: each returns the lines that say how OTHER differs, none if it is equal ----


def pieces(full, dim, ranges):
    """Views of a full tensor that are a rank's slice together; no ranges: the whole."""
    return [full.narrow(dim, start, stop - start) for start, stop in ranges] or [full]


def check_tensors(kind, one, ranks):
    """kind: "weights" or "gradients". Only a gradient's difference is explained."""
    full = {name: tensor.double() for name, (tensor, *_) in one[kind].items()}
    largest = max(tensor.abs().max().item() for tensor in full.values())
    absent = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in full.items()}
    rows = factors(one, ranks)
    differing = {}  # (fact, cause) -> [(name, rank, difference)]
    for rank, saved in ranks.items():
        for name, (tensor, dim, ranges) in saved[kind].items():
            got = tensor.double().flatten()
            want = torch.cat(pieces(full[name], dim, ranges), dim) if name in full else got[:0]
            want = want.flatten()
            if len(got) != len(want):
                return [f"{name} on rank {rank}: ONE has none of this name and shape"]
            for piece in pieces(absent[name], dim, ranges):
                piece.fill_(False)
            error = (got - want).abs().max().item() / max(want.abs().max().item(), 1e-3 * largest)
            tolerance = TOLERANCE[tensor.dtype]
            if not error <= tolerance:  # a nan is not
                how = NOTHING
                if kind == "gradients":
                    terms = terms_of(name, rank, ranks, tolerance)
                    how = explain_gradient(got, want, terms, rank, rows, tolerance)
                differing.setdefault(how, []).append((name, rank, error))
    lines = [f"{name}: no rank has {int(elements.sum())} of its {elements.numel()} elements"
             for name, elements in absent.items() if elements.any()]
    # What fits none may be the cause of the others: then facts, but no causes
    known = all(cause for _, cause in differing)
    if differing:
        names = {name for found in differing.values() for name, *_ in found}
        lines.append(f"{len(names)} of {len(full)}" + ("" if known else f": {FITS_NONE}"))
    for (fact, cause), found in differing.items():
        names = dict.fromkeys(re.sub(r"\d+", "*", name) for name, *_ in found)
        on = sorted({rank for _, rank, _ in found})
        name, rank, error = found[0]
        lines += [f"{fact}: {cause}" if known else fact,
                  f"    {' '.join(names)}",
                  f"    on ranks {' '.join(map(str, on))}; {name} on rank {rank} is off by "
                  f"{error:.1e} of its largest number"]
    return lines


def check_tokens(one, ranks):
    """In any order of the sequences: does each rank have ONE's, and do all ranks have all?"""
    given = {rank: saved["tokens"] for rank, saved in ranks.items() if saved["tokens"]}
    if not one["tokens"] or not given:
        return []
    ids, targets, _ = one["tokens"]
    absent = torch.ones(ids.shape, dtype=torch.bool)
    for rank, (own_ids, own_targets, positions) in given.items():
        for row, aims in zip(own_ids, own_targets, strict=True):
            same = (ids[:, positions] == row).all(1)  # (sequences,)
            wrong = targets[:, positions] != aims  # (sequences, tokens of this rank)
            if not same.any():
                return [f"{FITS_NONE}: rank {rank} has ids {row[:4].tolist()}..., ONE has not"]
            if wrong[same].any(1).all():
                places = positions[wrong[same][0]].tolist()
                return [f"{FITS_NONE}: rank {rank}'s targets at positions {places}"]
            found = (same & ~wrong.any(1)).nonzero()
            absent[found, positions] = False
    lost = absent.any(1).nonzero().flatten().tolist()
    return [f"sequences {lost} of ONE are on no rank"] if lost else []


def check_number(kind, want, rows, one, ranks):
    """rows: {words of the table: what the number would be}"""
    tolerance = max(TOLERANCE[full.dtype] for full, *_ in one["gradients"].values())
    for rank, saved in ranks.items():
        got = saved[kind]
        if got is not None and not abs(got - want) <= tolerance * abs(want):  # a nan is not
            cause = fitting(got, rows, tolerance) or FITS_NONE
            return [f"{got:.10g} on rank {rank}, not {want:.10g}: {cause}"]
    return []


def check_loss(one, ranks):
    rows = {words: factor * one["loss"] for words, factor in factors(one, ranks).items()}
    return check_number("loss", one["loss"], rows, one, ranks)


def norm_of(saved):
    return math.hypot(*(grad.double().norm().item() for grad, *_ in saved["gradients"].values()))


def check_norm(one, ranks):
    """The gradients are equal, so the right norm is that of ONE's."""
    own = {f"of rank {rank}'s own tensors": norm_of(saved) for rank, saved in ranks.items()}
    rows = own | {"each rank with a copy counts it": math.hypot(*own.values())}
    return check_number("norm", norm_of(one), rows, one, ranks)


CHECKS = {"tokens": check_tokens, "loss": check_loss,
          "gradients": partial(check_tensors, "gradients"), "norm": check_norm}


# ---- compare ----


def compare(one_run, other_run):
    """Yields (what, the lines that say how it differs), in the order of the docstring, and ends
    with what differs first; after a loss that differs come the gradients, which tell more."""
    what = "initial weights"
    for step, processes in one_run.items():
        assert len(processes) == 1, "ONE has to be the record of one process"
        if step not in other_run:
            yield f"step {step}", ["OTHER has no record of the step"]
            return
        one, ranks = processes[0], other_run[step]
        found = check_tensors("weights", one, ranks)
        yield what, found
        if found or not one["gradients"]:  # none: the record after the last step
            return
        what = f"step {step} weights"
        for name, check in CHECKS.items():
            lines = check(one, ranks)
            yield f"step {step} {name}", lines
            found += lines
            if found and name != "loss":
                return


def report(one, other):
    """Print the comparison of two folders. Returns whether all is equal."""
    differs = []
    for what, lines in compare(load(one), load(other)):
        print(f"{what:18} " + ("differs: " + "\n    ".join(lines) if lines else "equal"))
        if lines:
            differs.append(what)
    print(f"first difference: {differs[0]}" if differs else "equal")
    return not differs


# ---- our trainer ----


def record_ours(rank, cfg, folder):
    """One rank of our trainer: train two steps, and record them."""
    import train
    from data.batches import Data
    from model import from_seed
    from sizes import config_of
    from test_all import whole_slices

    mesh = train.make_mesh(cfg, cfg.device)
    data = Data(cfg)
    config = config_of(cfg, data.vocab_size)
    trainer = train.Trainer(cfg, mesh, config, from_seed(config, cfg.seed))
    reducer, clip_and_step = trainer.reducer, trainer.optimizer.step
    gradients = {}
    terms = {}

    def slices(pairs):
        return {tag.name: (tensor, tag.dim, tag.ranges) for tag, tensor in pairs}

    def keep_term(name, grad):  # called by autograd with the gradient of a microbatch
        if grad is not None:  # a zero-bubble schedule computes those of matrices without autograd
            terms.setdefault(name, []).append(grad.clone())

    def keep_gradients(grads, norm, lr):
        gradients.update(slices(whole_slices(reducer, grads)))  # copies, before clipping
        clip_and_step(grads, norm, lr)

    for flat in reducer.trained_flats:
        for param in flat.params:
            param.register_hook(partial(keep_term, param.tag.name))
    trainer.optimizer.step = keep_gradients
    layout = {name: getattr(cfg, name) for name in ("dp", "pp", "cp", "tp", "microbatches")}
    for step in (0, 1):
        weights = slices(reducer.whole())
        terms.clear()
        batches = data.training(cfg, step, mesh)
        loss, norm, _ = trainer.step(batches, train.learning_rate(cfg, step))
        ids, targets = map(torch.cat, zip(*trainer.own(batches), strict=True))
        record(folder, step, loss, gradients, weights, rank, norm,
               (ids, targets, trainer.positions), terms, layout)
    record(folder, 2, weights=slices(reducer.whole()), rank=rank)


def record_command(folder, words):
    """Record our trainer in the layout of these flags, with the sizes and data of test_all.py."""
    from run.flags import fail
    from test_all import flags_of, ranks, write_corpus

    with tempfile.TemporaryDirectory() as corpus:
        write_corpus(corpus)
        try:
            cfg = flags_of(words, corpus)
            Path(folder).mkdir(parents=True)
        except (ValueError, OSError) as error:
            fail(error)
        world = cfg.dp * cfg.pp * cfg.cp * cfg.tp
        ranks(world, record_ours, cfg, str(Path(folder).resolve()))
        ranks.stop()
    print(f"{folder}: two steps of {world} rank" + "s" * (world > 1))


def main():
    if sys.argv[1:2] == ["record"] and len(sys.argv) > 2:
        record_command(sys.argv[2], sys.argv[3:])
    elif len(sys.argv) == 3:
        sys.exit(0 if report(*sys.argv[1:]) else 1)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
