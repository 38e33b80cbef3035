"""What goes into a step: initial weights, tokens, rates."""

import math

import torch

from run.doctor.examined import eps_of
from run.doctor.finding import Finding, first_difference, first_of, norm_of, off
from run.doctor.groups import cut_by_layout, layer_number
from run.doctor.step import SimulatedStep

# ---- initial weights ----


def drawn_anew(tensor, right):
    """Do two tensors look like two draws from one distribution?"""
    tensor, right = tensor - tensor.mean(), right - right.mean()  # a LayerNorm's gains are around 1
    cosine = (tensor * right).sum().item() / (norm_of(tensor) * norm_of(right))
    return abs(cosine) < 0.8 and 0.5 < norm_of(tensor) / norm_of(right) < 2


def kinds_of_model(mine, given, wanted, wrong, is_close):
    """{words: function of a name} for a model of a known form."""
    heads = mine.model.n_head
    layout, L = mine.layout, mine.model.n_layer
    step = SimulatedStep(mine.model, layout, 0.0, dict(given))
    tags = step.tags()
    starts = cut_by_layout(mine.model, layout) if layout["pp"] > 1 else []

    def slices(name, tensors):
        return [rank[name].slice(tensors[name]).flatten() for rank in tags]

    def repeats(name):
        first, second = slices(name, given)[:2]
        n = min(len(first), len(second))
        return torch.equal(first[:n], second[:n])

    def first_rank_alone(name):
        """Are only the first tensor rank's and the first pipeline rank's values right?"""
        if starts and layer_number(name, L) >= starts[0]:
            return drawn_anew(given[name], wanted[name])
        both = zip(slices(name, given), slices(name, wanted), strict=True)
        right = [is_close(*pair) for pair in both]
        return right[0] and len(right) > 1 and not any(right[1:])

    def interleaved(name):
        """Are q, k and v of a head side by side, as in Megatron?"""
        if ".c_attn." not in name:
            return False
        tensor = wanted[name].unflatten(0, (3, heads, -1))
        return is_close(given[name], tensor.transpose(0, 1).flatten(0, 2))

    def like_next_block(name):
        twin = name.replace(".h.0.", ".h.1.")
        return name.endswith("bias") or ".ln_" in name or twin not in given or (
            off(given[name], given[twin]) <= 1e-6 * norm_of(given[name]))

    kinds = {"have q, k and v of a head side by side (Megatron's order): a wrong map": interleaved}
    if any(".h.0." in name for name in wrong):
        kinds["are the same in all blocks: all drawn with one seed"] = like_next_block
    if layout["tp"] > 1:
        kinds["are the same in each tensor rank's slice (tp): each draws its slice, with one seed"
              ] = repeats
    if layout["tp"] > 1 or starts:
        kinds["are REFERENCE's on the first rank only: each rank draws with a seed of its own"
              ] = first_rank_alone
    return kinds


def causes_of_weights(reference, mine, wrong, eps):
    """Words for what MINE's initial weights are, if all wrong ones are of one kind."""
    given = mine.weights(0)
    wanted = reference.weights(0)

    def is_close(tensor, right):
        return tensor.shape == right.shape and off(tensor, right) <= 2 * eps * norm_of(right)

    def ratio(name):
        return norm_of(given[name]) / norm_of(wanted[name])

    kinds = {"are transposed: a wrong map of names":
             lambda name: given[name].dim() == 2 and is_close(given[name], wanted[name].mT)}
    factor = ratio(min(wrong))
    times = f"{factor:.{6 if eps < 1e-6 else 3}g} times REFERENCE's"
    if mine.model and abs(factor / math.sqrt(2 * mine.model.n_layer) - 1) < eps:
        times += ": not divided by sqrt(2 n_layer)"
    kinds[f"are {times}"] = lambda name: is_close(given[name], factor * wanted[name])
    if mine.model:
        kinds |= kinds_of_model(mine, given, wanted, wrong, is_close)
    for words, is_kind in kinds.items():
        if all(map(is_kind, wrong)):
            return [f"the initial values of {first_of(wrong)} {words}"]
    return []


def check_initial_weights(reference, mine):
    """A Finding: are MINE's initial weights REFERENCE's, to the rounding of their dtypes?"""
    given = mine.weights(0)
    wanted = reference.weights(0)
    eps = max(map(eps_of, (reference, mine)))
    wrong = {name for name in given if given[name].shape != wanted[name].shape
             or not off(given[name], wanted[name]) <= eps * norm_of(wanted[name])}
    if not wrong:
        return Finding("initial weights", True)
    finding = Finding("initial weights", False, first_difference(given, wanted, wrong))
    finding.causes = causes_of_weights(reference, mine, wrong, eps)
    return finding


# ---- tokens ----


def rows_of(tokens):
    """The sequences of a step as tuples, by data rank."""
    return [[tuple(row.tolist()) for row in rank.flatten(0, 1)] for rank in tokens]


def compact(numbers):
    text = " ".join(map(str, numbers[:12]))
    return text + (" ..." if len(numbers) > 12 else "")


def repeated_rows(batch, ranks):
    """Words for sequences that come twice. batch: REFERENCE's; ranks: each of MINE's data ranks'.
    """
    batch = [row for rank in batch for row in rank]
    if any(row not in batch for rank in ranks for row in rank):
        return []
    places = [compact([batch.index(row) for row in rank]) for rank in ranks]
    texts = "; ".join(f"data rank {d} has rows {rows}" for d, rows in enumerate(places))
    if all(len(set(rank)) == len(rank) for rank in ranks):
        return [f"the data ranks' parts of the batch overlap: {texts}"]
    return [f"a data rank's microbatches repeat sequences: {texts}"]


def check_tokens(reference, mine, number):
    """A Finding: did MINE's ranks have REFERENCE's sequences, each once?"""
    stage = f"step {number} tokens"
    wanted = sorted(row for rank in rows_of(reference.ids(number)) for row in rank)
    ranks = rows_of(mine.ids(number))
    had = sorted(row for rank in ranks for row in rank)
    targets = sorted(row for rank in rows_of(mine.targets(number)) for row in rank)
    wanted_targets = sorted(row for rank in rows_of(reference.targets(number)) for row in rank)
    if had == wanted and targets == wanted_targets:
        return Finding(stage, True)
    missing = len(set(wanted) - set(had))
    finding = Finding(stage, False, f"{missing} of {len(wanted)} sequences are missing")
    if len(ranks) > 1 and all(rank == ranks[0] for rank in ranks):
        finding.causes = ["every data rank (dp) has the same sequences"]
    elif had == wanted:
        finding.differs = "the sequences are right, the targets are not"
        if targets == had:
            finding.causes = ["targets are the tokens themselves, not the next ones"]
    elif number == 2 and sorted(row for rank in rows_of(mine.ids(1)) for row in rank) == had:
        finding.causes = ["the second step has the first step's sequences again"]
    elif reference.ids(2) is not None and had == sorted(
            row for rank in rows_of(reference.ids(3 - number)) for row in rank):
        finding.causes = [f"the sequences are those of step {3 - number}"]
    elif len(set(had)) < len(had):
        finding.causes = repeated_rows(rows_of(reference.ids(number)), ranks)
    elif len(ranks) > 1 and set(ranks[0]) <= set(wanted) and not any(
            set(rank) & set(wanted) for rank in ranks[1:]):
        finding.causes = ["only data rank 0 has sequences of REFERENCE: each data rank (dp) draws "
                          "a batch of its own"]
    return finding


# ---- rates ----


def check_rate(reference, mine, number):
    """A Finding: is the rate that MINE's dump gives REFERENCE's?"""
    stage = f"step {number} rate"
    rate, right, other = (dump.steps[n - 1]["lr"] for dump, n in (
        (mine, number), (reference, number), (reference, 3 - number)))
    if abs(rate - right) <= 1e-6 * right:
        return Finding(stage, True)
    finding = Finding(stage, False, f"{rate:.6g}, not {right:.6g}")
    if abs(rate - other) <= 1e-6 * other:
        finding.causes = [f"it is that of step {3 - number}"]
        return finding
    first, second = (step["lr"] for step in reference.steps)
    steps = (rate - first) / (second - first) if second != first else 0  # that warm-up went
    sizes = {axis: mine.layout[axis] for axis in ("dp", "cp", "tp", "pp", "microbatches")
             if mine.layout[axis] > 1}
    went = [axis for axis, size in sizes.items() if number == 2 and abs(steps - size) < 1e-3]
    if went:
        finding.causes = [f"warm-up went {sizes[went[0]]} steps at the first one "
                          f"({' or '.join(went)})"]
    times = [axis for axis, size in sizes.items() if abs(rate - size * right) <= 1e-6 * rate]
    if times:
        finding.causes.append(f"it is {sizes[times[0]]} times REFERENCE's ({' or '.join(times)})")
    return finding
