"""Changes of the vocabulary, which is split over the tensor ranks: embedding, head and loss.

Each rank has the rows of its own words [start, stop), in the embedding and in the head. A word that
it lacks has to be masked: as a token it adds nothing to the embedding's sum, as a target nothing to
the loss's.
"""

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from collectives import WithBackward
from extras.doctor.step import Change
from model import ABSENT
from tensor_parallel import sum_of_copy, sum_over_ranks, to_local

# ---- words of a rank's slice ----


def moved(distance):
    """All ranks' slices begin and end `distance` words too late."""
    return lambda own_range, rank, n_rows: (own_range[0] + distance, own_range[1] + distance)


def equal_slices(own_range, rank, n_rows):
    """The slice of a rank that takes all slices for as long as its own. For 5 words on 2 ranks,
    0 1 2 and 3 4, rank 1 begins at 2."""
    return rank * n_rows, (rank + 1) * n_rows


def logit_of_target(logits, targets, own_range):
    """(the logits of the targets (B, S), 0 where another rank has the target; a mask of those)."""
    local, outside = to_local(targets, *own_range)
    at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    return at_target.masked_fill(outside, 0), outside


def loss_by_owner(logits, targets, own_range, group):
    """The vocabulary-parallel loss of a trainer in which the rank that has a target adds the loss
    of its token, so that a target that no rank has adds nothing."""
    at_target, outside = logit_of_target(logits, targets, own_range)
    sums = sum_over_ranks(torch.stack([logits.exp().sum(-1), at_target]), group)
    losses = sums[0].log() - at_target
    counted = sum_of_copy(losses.detach().masked_fill(outside, 0).sum(), group)
    total = (sums[0].log() - sums[1]).sum()  # vocabulary_loss's gradients (without padding)
    return WithBackward.apply(total, lambda total: counted, lambda grad: grad)


def other_words(change, ends, by_owner=False):
    """change(own_range, rank, n_rows): the words [start, stop) that a rank takes for its own, in
    the ends "embedding", "head", or both. n_rows: rows of the rank's slice. by_owner: with
    loss_by_owner, in place of vocabulary_loss."""
    def after(model, mesh):
        embedding = model.layers[0].wte
        head = model.layers[-1]
        group = mesh.group("tp")
        own_range = change(embedding.words, group.rank, embedding.weight.size(0))
        if "embedding" in ends:
            embedding.words = own_range
        if "head" in ends and by_owner:
            head.loss = partial(loss_by_owner, own_range=own_range, group=group)
        elif "head" in ends:
            head.loss = partial(head.loss, words=own_range)
    return after


# ---- masks ----


def unmasked_embedding(model, mesh):
    """Ranks that lack a token's row add their row 0."""
    def forward(self, idx):
        local, _ = to_local(idx, *self.words)
        return self.g(F.embedding(local, self.weight), self.group)

    embedding = model.layers[0].wte
    embedding.forward = partial(forward, embedding)


def row_0_of_others(logits, targets, own_range):
    """(the logits of this rank's row 0 where another rank has the target, else 0: (B, S); a mask
    of those)."""
    local, outside = to_local(targets, *own_range)  # row 0, where outside
    row = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    return row.masked_fill(~outside, 0), outside


def unmasked_targets_in_loss(model, mesh):
    """Ranks that lack a target add the loss of their row 0. The gradient is right."""
    head = model.layers[-1]
    right = head.loss
    group = mesh.group("tp")
    own_range = model.layers[0].wte.words

    def loss(logits, targets):
        row, outside = row_0_of_others(logits.detach(), targets, own_range)
        lse = sum_of_copy(logits.detach().exp().sum(-1), group).log()
        more = sum_of_copy((lse - row).masked_fill(~outside, 0).sum(), group)
        total = right(logits, targets)
        return WithBackward.apply(total, lambda total: total + more, lambda grad: grad)

    head.loss = loss


def unmasked_targets_in_gradient(model, mesh):
    """Ranks that lack a target subtract 1 from the gradient of their row 0. The loss is right."""
    head = model.layers[-1]
    right = head.loss
    own_range = model.layers[0].wte.words

    def loss(logits, targets):
        row, _ = row_0_of_others(logits, targets, own_range)
        nothing = WithBackward.apply(row.sum(), torch.zeros_like, lambda grad: grad)
        return right(logits, targets) - nothing

    head.loss = loss


# ---- sums of the loss ----


def own_words_only(model, mesh):
    """Each rank's softmax is over its own words."""
    group = mesh.group("tp")

    def loss(logits, targets, own_range):
        at_target, outside = logit_of_target(logits, targets, own_range)
        own = logits.logsumexp(-1) - at_target
        # The loss of a token is that of the rank that has its target
        counted = sum_of_copy(own.detach().masked_fill(outside, 0).sum(), group)
        return WithBackward.apply(own.sum(), lambda own: counted, lambda grad: grad)

    head = model.layers[-1]
    head.loss = partial(loss, own_range=model.layers[0].wte.words)


def loss_sums_both_ways(model, mesh):
    """The sums of the vocabulary-parallel loss are summed again in backward: T times."""
    head = model.layers[-1]
    right = head.loss
    T = mesh.group("tp").size

    def loss(logits, targets):
        return right(WithBackward.apply(logits, lambda x: x, lambda grad: T * grad), targets)

    head.loss = loss


def own_largest(model, mesh):
    """Each rank subtracts the largest of its own logits before exp, and adds it to the logarithm of
    the sum over all ranks."""
    head = model.layers[-1]
    right = head.loss
    group = mesh.group("tp")
    own_range = model.layers[0].wte.words

    def loss(logits, targets):
        largest = logits.detach().amax(-1)  # (B, S)
        _, outside = to_local(targets, *own_range)
        of_owner = sum_of_copy(largest.masked_fill(outside, 0), group)  # the owner has the target
        more = (largest - of_owner).masked_fill(targets == ABSENT, 0).sum()
        return right(logits - largest.unsqueeze(-1), targets) + more

    head.loss = loss


def vocabulary_changes():
    found = [
        Change("words of other ranks are not masked in the embedding", after=unmasked_embedding),
        Change("the loss normalizes over a rank's own words only (tp)", after=own_words_only),
        Change("the largest logit that the loss subtracts is a rank's own (tp)", after=own_largest),
        Change("the gradient of the logits is tp times too large: the loss's sums are summed in "
               "backward, too", after=loss_sums_both_ways, forward=False)]
    for ends in (["embedding"], ["head"], ["embedding", "head"]):
        where = " and ".join(ends)
        by_owner_too = (False, True) if "head" in ends else (False,)  # two forms of the loss
        for distance, by_owner in product((1, -1), by_owner_too):
            found.append(Change(
                f"the words of a rank's slice are off by {distance:+d} in the {where}",
                after=other_words(moved(distance), ends, by_owner)))
        found.append(Change("a rank takes all slices of the vocabulary for as long as its own, in "
                            f"the {where}", after=other_words(equal_slices, ends)))
    return found + [
        Change("words of other ranks are not masked in the loss", after=unmasked_targets_in_loss),
        Change("words of other ranks are not masked in the gradient of the logits",
               after=unmasked_targets_in_gradient, forward=False)]
