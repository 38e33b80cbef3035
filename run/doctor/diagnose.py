"""Goes through the two steps of a dump, stage by stage, and says where it differs and why.

    initial weights    against REFERENCE's
    tokens             against REFERENCE's: which rows each data rank had
    of each step:
        loss           against one process, from MINE's own weights and tokens
        gradients      the same
        norm           against the norm of MINE's own gradients
        weights        against AdamW, from MINE's own weights, gradients and norms

Each stage begins with MINE's own state, so a finding never follows from an earlier one. Tolerance
is measured: five times what one process in MINE's dtype differs from float64.
"""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property

import torch

from model import ABSENT, UNTIED
from run.doctor.causes import RIGHT, Share, changes, cut_by_layout, factors, gradient, known_shares
from run.doctor.step import EMBEDDING, SimulatedStep, Terms, sampled
from run.doctor.update import Replay, Way, norms, ways

NOISE = 5  # how many times the noise of one process still counts as equal
# Floor of the tolerance, in roundings of the dtype, relative to a tensor's norm
FLOOR = 8
# How large the tolerance may be in what a cause changes, for the cause to have a name
RESOLVED = 0.2
# How far weights may be from REFERENCE's, relative to their norm, where its gradients are the right
# ones (a model of another form)
FAR = 1e-2


@dataclass
class Finding:
    """What one stage of one step says."""
    stage: str
    equal: bool
    differs: str = ""  # where, and by how much
    causes: list = field(default_factory=list)  # words; several fit the same numbers

    @property
    def named(self):
        return bool(self.causes)


def norm_of(tensor):
    return tensor.double().norm().item()


def off(mine, right):
    """How far two tensors are apart; infinite if mine is not finite."""
    error = norm_of(mine - right)
    return error if math.isfinite(error) else math.inf


def group_words(wrong, tensors, fits):
    """Words for the set of tensors that a share explains. wrong: those that differ; fits(name):
    does the share give MINE's tensor? None: no group that has a name."""
    groups = {
        "all gradients": lambda name: True,  # (or all that the cause can change)
        "the gradients of LayerNorms, row biases and positions": lambda name: is_replicated(name),
        "the gradients of LayerNorms and row biases":
            lambda name: is_replicated(name) and "wpe" not in name,
        "the gradients of LayerNorms": lambda name: ".ln_" in name,
        "the gradients of the rows' biases": lambda name: name.endswith("c_proj.bias"),
        "the gradients of biases": lambda name: name.endswith("bias"),
        "the gradients of matrices": lambda name: name.endswith("weight") and ".ln_" not in name,
        "the gradients of tensors that are split over tp": lambda name: not is_replicated(name),
        "the gradient of the positions": lambda name: "wpe" in name,
        "the gradient of the embedding": lambda name: name == EMBEDDING,
        "the gradients of experts": lambda name: ".experts." in name,
        "the gradients of routers": lambda name: ".router." in name,
        "the gradients of all but experts": lambda name: ".experts." not in name,
    }
    blocks = sorted({block_of(name) for name in tensors} - {-1, math.inf})
    for i in blocks:
        groups[f"the gradients before block {i}"] = lambda name, i=i: block_of(name) < i
        groups[f"the gradients from block {i} on"] = lambda name, i=i: block_of(name) >= i
        groups[f"the gradients of block {i}"] = lambda name, i=i: block_of(name) == i
    groups["the gradients before the head"] = lambda name: block_of(name) < len(blocks)
    fitting = {}  # words -> number of members
    for words, has in groups.items():
        members = [name for name in tensors if has(name)]
        if members and wrong <= set(members) and all(map(fits, members)):
            fitting[words] = len(members)
    if fitting:
        return min(fitting, key=fitting.get)
    if all(map(fits, wrong)):
        names = sorted(wrong)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"the gradients of {', '.join(names[:3])}{more}"
    return None


def is_replicated(name):
    """Do all tensor ranks hold the whole parameter?"""
    return ".ln_" in name or "wpe" in name or name.endswith("c_proj.bias") or ".router." in name


def block_of(name):
    """The number of a parameter's block; -1 for the embedding, infinite for what follows."""
    number = re.search(r"\.(\d+)\.", name)  # transformer.h.0.ln_1.weight
    if number:
        return int(number[1])
    return -1 if re.search(r"\b(wte|wpe|\w*embed\w*)\b", name) else math.inf


class Examined:
    """One step of MINE: what one process computes from MINE's weights and tokens, and the noise."""

    def __init__(self, mine, number):
        self.mine = mine
        self.numbers = mine.steps[number - 1]
        self.step = SimulatedStep(mine.model, mine.layout, mine.balance,
                                  dict(mine.weights(number - 1)), mine.ids(number),
                                  mine.targets(number), mine.loss == "mean")
        self.terms = self.step.run()
        self.dtype = getattr(torch, mine.dtype)
        self.grad_dtype = getattr(torch, mine.grad_dtype)
        self.loss = self.terms.loss()
        # {name: full gradient}
        self.gradients = {name: full / self.terms.divisor for name, full in self.terms.full.items()}

    @cached_property
    def noise(self):
        """(loss, {name: norm}): how far one process in MINE's dtype is from float64."""
        # In 16 bits a token may choose other experts: try more than one rounding of the weights
        runs = 3 if self.mine.model.n_experts and self.dtype != torch.double else 1
        losses = []
        errors = dict.fromkeys(self.gradients, 0.0)
        for seed in range(runs):
            terms = self.rounded(seed).run(None, self.dtype, self.grad_dtype,
                                           self.numbers["scale"])
            losses.append((terms.losses - self.terms.losses).abs().sum().item())
            for name, full in terms.full.items():
                error = off(full, self.terms.full[name]) / self.terms.divisor
                errors[name] = max(errors[name], error)
        sizes = {name: norm_of(grad) for name, grad in self.gradients.items()}
        relative = sorted(errors[name] / size for name, size in sizes.items() if size)
        # A tensor's noise may be small by chance: take the middle one of all tensors at least
        floor = max(relative[len(relative) // 2], FLOOR * torch.finfo(self.dtype).eps / NOISE)
        floors = {name: floor * size for name, size in sizes.items()}
        return (max(losses) / self.terms.divisor,
                {name: max(error, floors[name]) for name, error in errors.items()})

    def rounded(self, seed):
        """The step with weights that differ by a rounding. Seed 0: the step itself."""
        if seed == 0:
            return self.step
        generator = torch.Generator().manual_seed(seed)
        eps = torch.finfo(self.dtype).eps
        weights = {name: weight * (1 + eps * torch.randn(weight.shape, generator=generator,
                                                         dtype=torch.double))
                   for name, weight in self.step.weights.items()}
        return SimulatedStep(self.mine.model, self.mine.layout, self.mine.balance, weights,
                             self.step.ids, self.step.targets, self.step.is_mean)

    def tolerance(self, name, size=1.0):
        """How far MINE's gradient may be off. size: the largest weight of a term in it."""
        return NOISE * self.noise[1][name] * size

    def loss_tolerance(self, loss):
        """How far MINE's loss may be off, if it is this number."""
        wide = torch.promote_types(self.dtype, torch.float)  # a loss is a sum in 32 bits at least
        floor = FLOOR * torch.finfo(wide).eps * abs(loss)
        size = max(1.0, abs(loss / self.loss))
        return max(NOISE * self.noise[0] * size, floor)

    def loss_is(self, mine, loss):
        """Is MINE's loss this number?"""
        return abs(mine - loss) <= self.loss_tolerance(loss)


class LikeReference(Examined):
    """One step of MINE, a model of another form: REFERENCE's loss and gradients are the right ones.
    Nothing is computed, so a gradient is one term, and the noise is a multiple of the dtype's
    rounding."""

    def __init__(self, reference, mine, number):
        self.mine = mine
        self.numbers = mine.steps[number - 1]
        self.loss = reference.steps[number - 1]["loss"]
        self.gradients = dict(reference.gradients(number))
        coarsest = max((reference, mine), key=eps_of)
        self.dtype = getattr(torch, coarsest.dtype)
        self.grad_dtype = getattr(torch, coarsest.grad_dtype)
        self.distance = distance_of(mine.weights(number - 1), reference.weights(number - 1))
        tokens = (reference.targets(number) != ABSENT).sum().view(1, 1)
        self.terms = Terms(
            losses=torch.full((1, 1, 1, 1), self.loss, dtype=torch.double),
            gradients={name: sampled(grad).view(1, 1, 1, 1, -1)
                       for name, grad in self.gradients.items()},
            is_summed=dict.fromkeys(self.gradients, False), full=self.gradients, tokens=tokens,
            positions=reference.targets(number).numel(), divisor=1, tied=False)

    @cached_property
    def noise(self):
        """(loss, {name: norm}). Weights that are apart, because rounding errors of a first step
        were, move loss and gradients about as far."""
        relative = FLOOR * torch.finfo(self.dtype).eps + self.distance
        sizes = {name: norm_of(grad) for name, grad in self.gradients.items()}
        # A gradient that is zero in exact arithmetic (of a key's bias) is rounding errors of others
        least = 1e-2 * max(sizes.values())
        return (relative * abs(self.loss),
                {name: relative * max(size, least) for name, size in sizes.items()})


def eps_of(dump):
    return torch.finfo(getattr(torch, dump.dtype)).eps


def distance_of(given, wanted):
    """How far MINE's tensors are from REFERENCE's, relative to their norm."""
    if any(given[name].shape != wanted[name].shape for name in given):
        return math.inf
    errors = [off(given[name], wanted[name]) for name in given]
    return math.hypot(*errors) / math.hypot(*(norm_of(wanted[name]) for name in given))


# ---- loss and gradients ----


def wrong_gradients(examined, given):
    """Names of MINE's gradients that differ from one process's."""
    return {name for name in given
            if not off(given[name], examined.gradients[name]) <= examined.tolerance(name)}


def causes_of_gradients(examined, given, wrong, deep, known):
    """Words of the causes that fit MINE's loss and gradients. known: those of step 1, if that was
    wrong: no others are tried in step 2."""
    terms, layout = examined.terms, examined.mine.layout
    mine = {name: sampled(given[name]) for name in given}
    found = []
    for share in known_shares(layout, terms, examined.numbers["scale"]):
        if known and not any(words.endswith(share.words) for words in known):
            continue

        def fits(name, share=share):
            error = off(mine[name], gradient(terms, name, share))
            return error <= examined.tolerance(name, share.largest(name))
        if not any(map(fits, wrong)) or not is_resolved(examined, share, wrong):
            continue
        words = group_words(wrong, mine, fits)
        if words:
            found.append(f"{words}: {share.words}")
    found = found or fitted_weights(examined, mine)
    if found or not deep:
        return found
    return fitting_changes(examined, mine, examined.numbers["loss"], known)


def is_resolved(examined, share, wrong):
    """Is what the share changes in the wrong tensors much larger than the noise? If not, shares of
    other sizes would fit as well."""
    terms = examined.terms
    changed = math.hypot(*(off(gradient(terms, name, share), gradient(terms, name, RIGHT))
                           for name in wrong))
    noise = math.hypot(*(examined.tolerance(name, share.largest(name)) for name in wrong))
    return noise <= RESOLVED * changed


def fitting_changes(examined, mine, loss, known):
    """Words of the Changes that give MINE's loss and (sampled) gradients."""
    loss_is_right = examined.loss_is(loss, examined.loss)
    return [change.words for change in changes(examined.step)
            if (not known or change.words in known) and change.forward != loss_is_right
            and fits_change(examined, change, mine, loss)]


def fitted_weights(examined, mine):
    """Words, if MINE's gradients are the right step's terms, with a weight for each data rank's
    microbatch: those weights, found by least squares."""
    terms = examined.terms
    D, m = terms.tokens.shape
    if D * m == 1:
        return []
    shares = [Share("", data=torch.eye(D * m, dtype=torch.double)[i].view(D, m))
              for i in range(D * m)]
    columns = torch.stack([torch.cat([gradient(terms, name, share) / examined.tolerance(name)
                                      for name in mine]) for share in shares], dim=1)
    wanted = torch.cat([mine[name] / examined.tolerance(name) for name in mine])
    if not wanted.isfinite().all():
        return []
    weights = torch.linalg.lstsq(columns, wanted.unsqueeze(1)).solution.view(D, m)
    share = Share("", data=weights)
    for name in mine:
        error = off(mine[name], gradient(terms, name, share))
        if not error <= examined.tolerance(name, share.largest(name)):
            return []
    rows = "; ".join(f"data rank {d} {' '.join(f'{w:.3g}' for w in row.tolist())}"
                     for d, row in enumerate(weights))
    return [f"all gradients: the microbatches' terms count this often: {rows}"]


def fits_change(examined, change, mine, loss):
    """Are MINE's loss and all its gradients those of the changed step?"""
    step = examined.step if change.by_microbatch else examined.step.merged()
    if change.forward:
        terms = step.run(change, losses_only=True)
        if not is_loss(examined, terms, loss):
            return False
    terms = step.run(change)
    if not is_loss(examined, terms, loss):
        return False
    for name, values in mine.items():
        predicted = gradient(terms, name, RIGHT)
        right = norm_of(gradient(examined.terms, name, RIGHT))
        size = max(1.0, norm_of(predicted) / right) if right else 1.0
        if not off(values, predicted) <= examined.tolerance(name, size):
            return False
    return True


def is_loss(examined, terms, loss):
    """Is it the loss that train.py prints, or the one of tensor rank 0?"""
    return (examined.loss_is(loss, terms.loss())
            or examined.loss_is(loss, terms.losses[..., 0].sum().item() / terms.divisor))


def causes_of_loss(examined, loss):
    """Words of what MINE's loss may be, where its gradients are right."""
    terms, layout = examined.terms, examined.mine.layout
    losses = terms.losses.mean(-1)  # (D, m, C)
    divisor = terms.divisor
    found = {}
    total = int(terms.tokens.sum())
    for factor, words in factors(layout, total, examined.numbers["scale"]):
        found[f"the loss is {words}"] = factor * examined.loss
    for axis, parts in (("data rank", losses.sum((1, 2))),
                        ("microbatch", losses.sum((0, 2))),
                        ("context rank", losses.sum((0, 1)))):
        for i, part in enumerate(parts if len(parts) > 1 else ()):
            words = f"the printed loss is {axis} {i}'s own"
            found[f"{words} part"] = part.item() / divisor
            found[f"{words} mean"] = part.item() / divisor * len(parts)
    return [words for words, value in found.items() if examined.loss_is(loss, value)
            and examined.loss_tolerance(value) <= RESOLVED * abs(value - examined.loss)]


# ---- the stages ----


def first_difference(given, right, wrong):
    """Where the first tensor that differs does: by how much, in which rows."""
    name = next(name for name in right if name in wrong)
    if given[name].shape != right[name].shape:
        return (f"{len(wrong)} of {len(given)} tensors; first {name}, of shape "
                f"{list(given[name].shape)}, not {list(right[name].shape)}")
    error = given[name] - right[name]
    if not given[name].isfinite().all():
        return f"{name} is not finite"
    relative = norm_of(error) / max(norm_of(right[name]), 1e-300)
    rows = error.flatten(1).norm(dim=1) if error.dim() > 1 else error.abs()
    bad = (rows > rows.max() / 1000).nonzero().flatten().tolist()
    where = f"rows {bad[0]} to {bad[-1]}" if len(bad) > 1 else f"row {bad[0]}"
    return (f"{len(wrong)} of {len(given)} tensors; first {name}, off by {relative:.2g} of its "
            f"norm, {where} of {len(rows)}")


def keeps_first_step(examined, given):
    """Words, if MINE's gradients are this step's and a share of the first step's."""
    first = examined.mine.gradients(1)
    if set(first) != set(given):
        return []
    errors = {name: given[name] - examined.gradients[name] for name in given}
    squares = sum(first[name].square().sum().item() for name in given)
    share = sum((errors[name] * first[name]).sum().item() for name in given) / squares
    left = (off(errors[name], share * first[name]) <= 2 * examined.tolerance(name)
            for name in given)
    noise = math.hypot(*(examined.tolerance(name) for name in given))
    if noise > RESOLVED * abs(share) * math.sqrt(squares) or not all(left):
        return []
    return [f"{share:.3g} of the first step's gradients is still in them: they were not zeroed"]


def check_gradients(examined, number, deep, known):
    """Findings on loss and gradients of a step. known: the causes found in step 1."""
    given = examined.mine.gradients(number)
    loss = examined.numbers["loss"]
    findings = []
    loss_is_right = examined.loss_is(loss, examined.loss)
    if not math.isfinite(loss):
        findings.append(Finding(f"step {number} loss", False, "not finite"))
    wrong = wrong_gradients(examined, given)
    causes = causes_of_gradients(examined, given, wrong, deep, known) if wrong else []
    if number == 2 and wrong and not known:
        causes = causes or keeps_first_step(examined, given)
    if not math.isfinite(loss):
        pass
    elif loss_is_right:
        findings.append(Finding(f"step {number} loss", True))
    else:
        fitting = [] if wrong else causes_of_loss(examined, loss)
        if not wrong and not fitting and deep:
            mine = {name: sampled(given[name]) for name in given}
            fitting = fitting_changes(examined, mine, loss, known)
        findings.append(Finding(f"step {number} loss", False, ratio_words(loss, examined.loss),
                                fitting or causes))
    if not wrong:
        findings.append(Finding(f"step {number} gradients", True))
        return findings
    return findings + [Finding(f"step {number} gradients", False,
                               first_difference(given, examined.gradients, wrong), causes)]


def ratio_words(mine, right):
    return f"{mine:.8g}, not {right:.8g}: {mine / right:.6g} times"


# ---- what goes in: initial weights, tokens ----


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


def kinds_of_model(mine, given, wanted, wrong, is_close):
    """{words: function of a name} for a model of a known form."""
    heads = mine.model.n_head
    layout, L = mine.layout, mine.model.n_layer
    step = SimulatedStep(mine.model, layout, 0.0, dict(given), None, None)
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


def drawn_anew(tensor, right):
    """Do two tensors look like two draws from one distribution?"""
    tensor, right = tensor - tensor.mean(), right - right.mean()  # a LayerNorm's gains are around 1
    cosine = (tensor * right).sum().item() / (norm_of(tensor) * norm_of(right))
    return abs(cosine) < 0.8 and 0.5 < norm_of(tensor) / norm_of(right) < 2


def first_of(names):
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def rows_of(tokens):
    """The sequences of a step as tuples, by data rank."""
    return [[tuple(row.tolist()) for row in rank.flatten(0, 1)] for rank in tokens]


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


def compact(numbers):
    text = " ".join(map(str, numbers[:12]))
    return text + (" ..." if len(numbers) > 12 else "")


# ---- norm and weights ----


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
    known = dict(norms(squares, split, mine.layout))
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


def norms_of_parts(mine, given):
    """{words: norm} of the gradients that single pipeline stages or tensor ranks hold."""
    layout, L = mine.layout, mine.model.n_layer
    T, P = layout["tp"], layout["pp"]
    starts = [0, *(cut_by_layout(mine.model, layout) if P > 1 else [])]
    step = SimulatedStep(mine.model, layout, 0.0, dict(mine.weights(0)), None, None)
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


def layer_number(name, n_layer):
    """The number of a parameter's layer: 0 the embedding, n_layer + 1 the head."""
    return min(block_of(name), n_layer) + 1


class Steps:
    """MINE's two steps of the optimizer, tensor by tensor."""

    def __init__(self, reference, mine):
        self.reference = reference
        self.mine = mine
        self.uses_masters = len(mine.masters(1)) > 0
        self.held = mine.masters if self.uses_masters else mine.weights
        dtype = getattr(torch, mine.dtype)
        wide = torch.promote_types(dtype, torch.float)
        # Without masters too the weights may have more digits than the dtype: under autocast
        self.are_wide = dtype == wide or self.uses_masters or not all(
            torch.equal(weight.to(dtype).double(), weight) for weight in mine.weights(1).values())
        self.eps = torch.finfo(wide).eps
        self.replay = Replay(mine.optimizer)
        self.rounded = Replay(mine.optimizer, wide)

    def numbers(self):
        """The steps of which there are weights and gradients."""
        return [n for n in (1, 2) if self.held(n) and self.held(n - 1) and self.mine.gradients(n)]

    def after(self, replay, number, name, way):
        """The weight after a step, from MINE's weight before it. rate: of MINE's dump."""
        steps = self.mine.steps[:number]
        grads = [self.mine.gradients(n)[name] for n in range(1, number + 1)]
        weights = [self.held(n)[name] for n in range(number)]
        return replay.step(number, name, weights, grads,
                           [step["norm"] for step in steps], steps[-1]["lr"], way)

    def is_right(self, number, name, way):
        predicted = self.after(self.replay, number, name, way)
        noise = off(self.after(self.rounded, number, name, way), predicted)
        noise = max(noise, self.eps * norm_of(predicted))
        return off(self.held(number)[name], predicted) <= NOISE * noise


def check_updates(reference, mine):
    """Findings on the weights after each step."""
    steps = Steps(reference, mine)
    numbers = steps.numbers()
    if mine.optimizer["name"] != "adamw":
        return [Finding("weights", True, f"not examined: {mine.optimizer['name']} is not replayed")]
    if not steps.are_wide:
        return [Finding("weights", True, f"{mine.dtype} weights without masters say nothing about "
                        "the optimizer")]
    findings = []
    right = Way()
    names = [name for name in mine.gradients(1) if name in steps.held(1)]
    for number in numbers:
        stage = f"step {number} weights"
        if not math.isfinite(mine.steps[number - 1]["norm"]):
            findings.append(Finding(stage, True, "not examined: the norm is not finite"))
            break
        wrong = {name for name in names if not steps.is_right(number, name, right)}
        if not wrong:
            findings.append(Finding(stage, True))
            continue
        predicted = {name: steps.after(steps.replay, number, name, right) for name in names}
        given = {name: steps.held(number)[name] for name in names}
        finding = Finding(stage, False, first_difference(given, predicted, wrong))
        finding.causes = causes_of_updates(steps, number, numbers, names, wrong)
        findings.append(finding)
        break  # the moments of step 2 are those of step 1: nothing to add
    return findings


def causes_of_updates(steps, number, numbers, names, wrong):
    """Words of the ways of taking a step that fit all of MINE's steps."""
    mine = steps.mine
    rates = [(f"the one of {whose} step {n}", dump.steps[n - 1]["lr"])
             for whose, dump in (("MINE's", mine), ("REFERENCE's", steps.reference))
             for n in (1, 2) if dump.steps[n - 1]["lr"] != mine.steps[number - 1]["lr"]]
    scale = mine.steps[0]["scale"]
    sizes = []
    for axis in ("dp", "tp", "pp", "cp", "microbatches"):
        size = mine.layout[axis]
        if size > 1:
            sizes += [(f"divided by {axis} = {size}", 1 / size),
                      (f"multiplied by {axis} = {size}", size)]
    found = []
    right = Way()
    for way in ways(rates, mine.optimizer, sizes, scale):
        fitting = {name for name in wrong if steps.is_right(number, name, way)}
        if not fitting:
            continue
        # a rate belongs to one step, any other way of stepping to both
        others = [n for n in numbers if n != number] if way.rate is None else []
        def fits(name, way=way, others=others):
            return steps.is_right(number, name, way) and all(
                steps.is_right(n, name, way) for n in others)
        if all(map(fits, names)):
            found.append(way.words)
        elif all(map(fits, wrong)) and all(
                steps.is_right(n, name, right) for n in others for name in set(names) - wrong):
            found.append(f"{way.words}: {first_of(wrong)}")
    if not found:
        found = fitted_rate(steps, number, names)
    if not found and all(keeps_old(steps, number, name) for name in wrong):
        found = [f"a part of {first_of(wrong)} keeps its old values: new weights were not sent to "
                 "the ranks that need them"]
    return sorted(set(found), key=found.index)


def fitted_rate(steps, number, names):
    """Would another rate explain all weights? Weights move in proportion to it."""
    right = Way()
    moved = stepped = 0.0
    for name in names:
        before = steps.held(number - 1)[name]
        predicted = steps.after(steps.replay, number, name, right) - before
        moved += ((steps.held(number)[name] - before) * predicted).sum().item()
        stepped += predicted.square().sum().item()
    if not stepped or not math.isfinite(moved):
        return []
    said = steps.mine.steps[number - 1]["lr"]
    rate = said * moved / stepped
    if rate <= 0 or not all(steps.is_right(number, name, Way(rate=rate)) for name in names):
        return []
    return [f"the weights moved with a rate of {rate:.6g}, the dump says {said:.6g}"]


def keeps_old(steps, number, name):
    """Is each element that differs still its old value?"""
    given = steps.held(number)[name]
    predicted = steps.after(steps.replay, number, name, Way())
    differs = (given - predicted).abs() > 1e-3 * (given - predicted).abs().max()
    return bool((given == steps.held(number - 1)[name])[differs].all())


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


# ---- all of it ----


def comparable(reference, mine):
    """ValueError, one line, if two dumps cannot be compared."""
    if mine.model != reference.model:
        raise ValueError(f"{mine.folder} and {reference.folder}: models of other sizes")
    missing = set(mine.weights(0)) - set(reference.weights(0))
    if missing:
        raise ValueError(f"{mine.folder}: {first_of(missing)} is not in {reference.folder}")
    if reference.ids(1) is None:
        raise ValueError(f"{reference.folder}: has no tokens-1.safetensors")
    if not mine.model and not reference.gradients(1):
        raise ValueError(f"{reference.folder}: has no gradients-1.safetensors; a model of another "
                         "form is compared with them")


def check_step(reference, mine, number, deep, known):
    """Findings on loss and gradients of a step; none if MINE has not what it takes."""
    if not mine.gradients(number) or not mine.weights(number - 1):
        return []
    if mine.model:
        can = mine.ids(number) is not None
        return check_gradients(Examined(mine, number), number, deep, known) if can else []
    if not reference.gradients(number) or not reference.weights(number - 1):
        return []
    examined = LikeReference(reference, mine, number)
    if examined.distance > FAR:
        return [Finding(f"step {number} gradients", True,
                        "not examined: MINE's weights before the step are not REFERENCE's")]
    return check_gradients(examined, number, False, known)


def diagnose(reference, mine, deep=True):
    """Yields Findings, stage by stage. reference, mine: Dumps (dump.py). deep: also run the step
    again with each known bug. Ends where ranks hold different weights: what follows is the work of
    no single model."""
    comparable(reference, mine)
    yield check_initial_weights(reference, mine)
    for number in (1, 2):
        if mine.ids(number) is not None and reference.ids(number) is not None:
            yield check_tokens(reference, mine, number)
    known = []  # causes that step 1 has shown
    for number in (1, 2):
        for finding in check_step(reference, mine, number, deep, known):
            repeats = number == 2 and set(finding.causes) & set(known)
            known += finding.causes
            if not repeats:
                yield finding
        differ = mine.steps[number - 1]["gradients_differ"]
        if differ:
            yield Finding(f"step {number} copies", False,
                          f"ranks hold different gradients of {first_of(differ)}")
        else:
            finding = judge_norm(mine, number)
            if finding:
                repeats = number == 2 and set(finding.causes) & set(known)
                known += finding.causes
                if not repeats:
                    yield finding
        differ = mine.steps[number - 1]["weights_differ"]
        if differ and not mine.steps[number - 1]["gradients_differ"]:
            yield from check_updates(reference, mine)
        if differ:
            yield Finding(f"step {number} copies", False, f"ranks hold different weights of "
                          f"{first_of(differ)}; the rest is not examined")
            return
    for number in (1, 2):
        finding = check_rate(reference, mine, number)
        if not finding.equal:
            yield finding
    yield from check_updates(reference, mine)
