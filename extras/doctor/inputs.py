"""What goes into MINE's steps, compared with REFERENCE's: initial weights, tokens, settings, rates.

The cause of wrong initial weights is named only if all wrong tensors are of one kind, such as
transposed, or drawn with one seed (kinds() lists them). A wrong map of names shows here, and is
not taken for a bug of the trainer.
"""

import math

import torch

from extras.doctor.examined import eps_of
from extras.doctor.finding import Finding, first_difference, first_of, norm_of, off
from extras.doctor.foreign import q_k_v
from extras.doctor.groups import block_of, cut_by_layout, layer_number
from extras.doctor.step import SimulatedStep

# ---- initial weights ----

WRONG_MAP = "a wrong map"  # in the words of a cause: tensors have other names or orders


def is_constant(tensor):
    """Are all elements the same? No generator has drawn them."""
    return bool((tensor == tensor.flatten()[0]).all())


def looks_drawn_anew(tensor, right):
    """Do two tensors look like two draws from the same distribution?"""
    tensor = tensor - tensor.mean()  # the gains of a LayerNorm are around 1
    right = right - right.mean()
    norm = norm_of(tensor)
    right_norm = norm_of(right)
    if norm == 0 or right_norm == 0:  # a constant
        return False
    cosine = (tensor * right).sum().item() / (norm * right_norm)
    return abs(cosine) < 0.8 and 0.5 < norm / right_norm < 2


class InitialWeights:
    """Initial weights that differ, and questions about one of their tensors."""

    def __init__(self, reference, mine, wrong, eps):
        """wrong: names of the tensors that differ. eps: one rounding, relative to the number."""
        self.model = mine.model
        self.layout = mine.layout
        self.given = mine.weights(0)
        self.right = reference.weights(0)
        self.wrong = wrong
        self.eps = eps
        name = min(wrong)
        right_norm = norm_of(self.right[name])
        # Norm of one wrong tensor / norm of REFERENCE's. Are the others off by the same factor?
        self.factor = norm_of(self.given[name]) / right_norm if right_norm else 0.0
        self.tags = []  # {name: tag} of each tensor rank; empty for a model of another form
        self.starts = []  # numbers of the layers that begin a pipeline stage, without stage 0's
        if self.model:
            self.tags = SimulatedStep(self.model, self.layout, 0.0, dict(self.given)).tags()
            if self.layout["pp"] > 1:
                self.starts = cut_by_layout(self.model, self.layout)

    def is_close(self, tensor, right):
        same_shape = tensor.shape == right.shape
        return same_shape and off(tensor, right) <= 2 * self.eps * norm_of(right)

    def slices(self, name, tensors):
        """For each tensor rank its slice of a tensor, flat."""
        return [tags[name].slice(tensors[name]).flatten() for tags in self.tags]

    def is_transposed(self, name):
        return self.given[name].dim() == 2 and self.is_close(self.given[name], self.right[name].mT)

    def is_times_factor(self, name):
        return self.is_close(self.given[name], self.factor * self.right[name])

    def is_interleaved(self, name):
        """Are q, k and v of a head side by side, like Megatron's? For 2 heads: q0 k0 v0 q1 k1 v1 in
        place of q0 q1 k0 k1 v0 v1."""
        if ".c_attn." not in name or self.given[name].shape != self.right[name].shape:
            return False
        return self.is_close(q_k_v(self.given[name], self.model), self.right[name])

    def is_later_matrix(self, name):
        """Is this a matrix of a block after block 0?"""
        is_matrix = not name.endswith("bias") and ".ln_" not in name
        return is_matrix and 0 < block_of(name) < self.model.n_layer

    def is_like_block_0(self, name):
        """Is a matrix of a later block equal to block 0's? (True of all other tensors: embedding
        and head have no twin in block 0, and most trainers do not draw biases and gains.)"""
        if not self.is_later_matrix(name):
            return True
        if is_constant(self.given[name]):
            return False
        twin = name.replace(f".h.{block_of(name)}.", ".h.0.")
        given = self.given[name]
        return off(given, self.given[twin]) <= 1e-6 * norm_of(given)

    def repeats(self, name):
        """Do the slices of the first two tensor ranks begin with the same values? (A constant, or a
        tensor of which each of these ranks has the whole, says nothing: False.)"""
        first, second = self.slices(name, self.given)[:2]
        if is_constant(self.given[name]) or len(first) == self.given[name].numel():
            return False
        n = min(len(first), len(second))
        return torch.equal(first[:n], second[:n])

    def is_in_later_stage(self, name):
        """Is the tensor in a pipeline stage after stage 0?"""
        if not self.starts:
            return False
        return layer_number(name, self.model.n_layer) >= self.starts[0]

    def is_first_ranks(self, name):
        """In stage 0: is only the first tensor rank's slice right? In a later stage: does the
        tensor look drawn anew? (Each later stage counts as another rank's, even one that --chunks
        or zb-v gives to pipeline rank 0.)"""
        if self.is_in_later_stage(name):
            return looks_drawn_anew(self.given[name], self.right[name])
        slices = zip(self.slices(name, self.given), self.slices(name, self.right), strict=True)
        is_right = [self.is_close(given, right) for given, right in slices]
        return is_right[0] and len(is_right) > 1 and not any(is_right[1:])

    def factor_words(self):
        digits = 6 if self.eps < 1e-6 else 3
        words = f"are {self.factor:.{digits}g} times REFERENCE's"
        if self.model and abs(self.factor / math.sqrt(2 * self.model.n_layer) - 1) < self.eps:
            words += ": not divided by sqrt(2 n_layer)"
        return words

    def kinds(self):
        """{words: is a tensor of this kind?}, for this model and layout."""
        found = {f"are transposed: {WRONG_MAP} of names": self.is_transposed,
                 self.factor_words(): self.is_times_factor}
        if not self.model:
            return found
        found[f"have q, k and v of a head side by side (Megatron's order): {WRONG_MAP}"] = (
            self.is_interleaved)
        if any(map(self.is_later_matrix, self.wrong)):
            found["are the same in all blocks: all drawn with one seed, or all are block 0's"] = (
                self.is_like_block_0)
        if len(self.tags) > 1:
            found["are the same in each tensor rank's slice (tp): each draws its slice, with one "
                  "seed, or all have the first rank's"] = self.repeats
        # With a seed of its own a rank draws no tensor right (a constant is not drawn)
        later = {name for name in self.given
                 if self.is_in_later_stage(name) and not is_constant(self.right[name])}
        if (len(self.tags) > 1 or self.starts) and later <= self.wrong:
            found["are REFERENCE's on the first rank only: each rank draws with a seed of its own"
                  ] = self.is_first_ranks
        return found

    def causes(self):
        """[words of the first kind that all wrong tensors have], or []."""
        for words, is_kind in self.kinds().items():
            if all(map(is_kind, self.wrong)):
                return [f"the initial values of {first_of(self.wrong)} {words}"]
        return []


def check_initial_weights(reference, mine):
    """A Finding: are MINE's initial weights REFERENCE's, to the rounding of their dtypes?"""
    given = mine.weights(0)
    right = reference.weights(0)
    eps = max(eps_of(reference), eps_of(mine))
    wrong = {name for name in given if given[name].shape != right[name].shape
             or not off(given[name], right[name]) <= eps * norm_of(right[name])}
    if not wrong:
        return Finding("initial weights", True)
    return Finding("initial weights", False, first_difference(given, right, wrong),
                   InitialWeights(reference, mine, wrong, eps).causes())


# ---- tokens ----


def rows_by_rank(tokens):
    """(D, m, B, S) -> for each data rank the list of its sequences, each a tuple of S numbers."""
    return [[tuple(row.tolist()) for row in rank.flatten(0, 1)] for rank in tokens]


def all_rows(tokens):
    """The sequences of all data ranks, sorted: it does not matter which rank has a sequence."""
    return sorted(row for rank in rows_by_rank(tokens) for row in rank)


def with_targets(dump, number):
    """Like all_rows, but each sequence is followed by its targets: tuples of 2 S numbers."""
    return all_rows(torch.cat([dump.ids(number), dump.targets(number)], dim=-1))


def first_twelve(numbers):
    text = " ".join(map(str, numbers[:12]))
    return text + (" ..." if len(numbers) > 12 else "")


def repeated_rows(right, ranks):
    """[words for sequences that several ranks or microbatches have], or [] if MINE has a sequence
    that REFERENCE does not have. right: REFERENCE's sequences by rank; ranks: MINE's."""
    batch = [row for rank in right for row in rank]
    if any(row not in batch for rank in ranks for row in rank):
        return []
    places = [first_twelve([batch.index(row) for row in rank]) for rank in ranks]
    texts = "; ".join(f"data rank {d} has rows {rows}" for d, rows in enumerate(places))
    if all(len(set(rank)) == len(rank) for rank in ranks):
        return [f"the data ranks' parts of the batch overlap: {texts}"]
    return [f"a data rank's microbatches repeat sequences: {texts}"]


def causes_of_tokens(reference, mine, number):
    """Words for a step in which MINE does not have REFERENCE's sequences, each once, with its
    targets."""
    right = all_rows(reference.ids(number))
    ranks = rows_by_rank(mine.ids(number))
    had = all_rows(mine.ids(number))
    if len(ranks) > 1 and all(rank == ranks[0] for rank in ranks):
        return ["every data rank (dp) has the same sequences"]
    if had == right:
        targets = all_rows(mine.targets(number))
        if targets == had:
            return ["targets are the tokens themselves, not the next ones"]
        if targets == all_rows(reference.targets(number)):
            n_wrong = len(set(with_targets(mine, number)) - set(with_targets(reference, number)))
            which = f"{n_wrong} of {len(had)} sequences have"
            if n_wrong == len(had):
                which = "each sequence has"
            return [f"{which} the targets of another sequence"]
        return []
    if number == 2 and mine.ids(1) is not None and all_rows(mine.ids(1)) == had:
        return ["the second step has the first step's sequences again"]
    other = 3 - number  # the other step
    if reference.ids(2) is not None and had == all_rows(reference.ids(other)):
        return [f"the sequences are those of step {other}"]
    if len(set(had)) < len(had):
        return repeated_rows(rows_by_rank(reference.ids(number)), ranks)
    is_first_right = set(ranks[0]) <= set(right)
    if len(ranks) > 1 and is_first_right and not any(set(rank) & set(right) for rank in ranks[1:]):
        return ["only data rank 0 has sequences of REFERENCE: each data rank (dp) draws a batch of "
                "its own"]
    return []


def check_tokens(reference, mine, number):
    """A Finding: did MINE's ranks have REFERENCE's sequences, each once, with the right targets?"""
    stage = f"step {number} tokens"
    right = all_rows(reference.ids(number))
    had = all_rows(mine.ids(number))
    if with_targets(mine, number) == with_targets(reference, number):
        return Finding(stage, True)
    missing = len(set(right) - set(had))
    differs = f"{missing} of {len(right)} sequences are missing"
    if had == right:
        differs = "the sequences are right, the targets are not"
    return Finding(stage, False, differs, causes_of_tokens(reference, mine, number))


# ---- settings and rates ----


def settings_of(dump):
    """{name: value} of what a step's numbers depend on beside weights, tokens and rate."""
    names = ("beta1", "beta2", "eps", "weight_decay", "grad_clip")
    return {"loss": dump.loss, "balance": dump.balance, "optimizer": dump.optimizer["name"],
            **{name: dump.optimizer[name] for name in names}}


def check_settings(reference, mine):
    """A Finding: are the settings that MINE's dump gives REFERENCE's? (Whether MINE has trained
    with them shows in the other stages.)"""
    right = settings_of(reference)
    wrong = [f"{name} is {value}, not {right[name]}"
             for name, value in settings_of(mine).items() if value != right[name]]
    return Finding("settings", not wrong, "; ".join(wrong))


def causes_of_rate(reference, mine, number):
    """Words for a rate that is not REFERENCE's."""
    rate = mine.steps[number - 1]["lr"]
    first, second = (step["lr"] for step in reference.steps)
    right, other = (first, second) if number == 1 else (second, first)
    if abs(rate - other) <= 1e-6 * other:
        return [f"it is that of step {3 - number}"]
    sizes = {axis: mine.layout[axis] for axis in ("dp", "cp", "tp", "pp", "microbatches")
             if mine.layout[axis] > 1}
    found = []
    if number == 2 and second != first:
        # The rates of a warm-up are a line: how many steps on the line did step 1 advance?
        advance = (rate - first) / (second - first)
        axes = [axis for axis, size in sizes.items() if abs(advance - size) < 1e-3]
        if axes:
            found.append(f"the warm-up advanced {sizes[axes[0]]} steps in step 1 "
                         f"({' or '.join(axes)})")
    axes = [axis for axis, size in sizes.items() if abs(rate - size * right) <= 1e-6 * rate]
    if axes:
        found.append(f"it is {sizes[axes[0]]} times REFERENCE's ({' or '.join(axes)})")
    return found


def check_rate(reference, mine, number):
    """A Finding: is the rate that MINE's dump gives REFERENCE's?"""
    stage = f"step {number} rate"
    rate = mine.steps[number - 1]["lr"]
    right = reference.steps[number - 1]["lr"]
    if abs(rate - right) <= 1e-6 * right:
        return Finding(stage, True)
    return Finding(stage, False, f"{rate:.6g}, not {right:.6g}",
                   causes_of_rate(reference, mine, number))
