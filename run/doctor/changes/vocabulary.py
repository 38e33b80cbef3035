"""Changes of the vocabulary that is split over the tensor ranks: embedding, head, loss."""

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from collectives import WithBackward
from run.doctor.step import Change
from tensor_parallel import sum_of_copy, sum_over_ranks, to_local


def moved(distance):
    return lambda words, rank, rows: (words[0] + distance, words[1] + distance)


def equal_slices(words, rank, rows):
    """As if all ranks had as many rows as this one."""
    return rank * rows, (rank + 1) * rows


def loss_by_owner(logits, targets, words, group):
    local, outside = to_local(targets, *words)
    at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
    sums = sum_over_ranks(torch.stack([logits.exp().sum(-1), at_target]), group)
    losses = sums[0].log() - at_target
    counted = sum_of_copy(losses.detach().masked_fill(outside, 0).sum(), group)
    total = (sums[0].log() - sums[1]).sum()
    return WithBackward.apply(total, lambda total: counted, lambda grad: grad)


def other_words(change, ends, by_owner=False):
    """change(words, rank, rows): the words that a rank takes for its own, in the embedding, the
    head, or both. by_owner: a token's loss is added by the rank that has its target, so a target
    that no rank has adds nothing."""
    def after(model, mesh):
        embedding, head = model.layers[0].wte, model.layers[-1]
        group = mesh.group("tp")
        words = change(embedding.words, group.rank, embedding.weight.size(0))
        if "embedding" in ends:
            embedding.words = words
        if "head" in ends:
            head.loss = partial(loss_by_owner if by_owner else head.loss, words=words)
            if by_owner:
                head.loss = partial(head.loss, group=group)
    return after


def unmasked_embedding(model, mesh):
    """Ranks that lack a token's row add their row 0 to it."""
    def forward(self, idx):
        local, _ = to_local(idx, *self.words)
        return self.g(F.embedding(local, self.weight), self.group)

    embedding = model.layers[0].wte
    embedding.forward = partial(forward, embedding)


def unmasked_targets(in_loss):
    """Ranks that lack a target's row take their row 0 for it: in the loss, or in its gradient."""
    def after(model, mesh):
        head = model.layers[-1]
        right = head.loss
        group = mesh.group("tp")
        words = model.layers[0].wte.words

        def loss(logits, targets):
            local, outside = to_local(targets, *words)
            row = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
            total = right(logits, targets)
            if in_loss:  # such a rank adds the loss of its row 0
                lse = sum_of_copy(logits.detach().exp().sum(-1), group).log()
                more = sum_of_copy((lse - row.detach()).masked_fill(~outside, 0).sum(), group)
                return WithBackward.apply(total, lambda total: total + more, lambda grad: grad)
            extra = row.masked_fill(~outside, 0).sum()
            return total - WithBackward.apply(extra, torch.zeros_like, lambda grad: grad)

        head.loss = loss
    return after


def own_words_only(model, mesh):
    """Each rank normalizes over its own words only."""
    group = mesh.group("tp")

    def loss(logits, targets, words):
        local, outside = to_local(targets, *words)
        at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
        own = logits.logsumexp(-1) - at_target
        # A token's loss is that of the rank that has its target
        counted = sum_of_copy(own.detach().masked_fill(outside, 0).sum(), group)
        return WithBackward.apply(own.sum(), lambda own: counted, lambda grad: grad)

    head = model.layers[-1]
    head.loss = partial(loss, words=model.layers[0].wte.words)


def loss_sums_both_ways(model, mesh):
    """The sums of the vocabulary-parallel loss are summed again in backward: T times."""
    head = model.layers[-1]
    right = head.loss
    size = mesh.group("tp").size

    def loss(logits, targets):
        times = WithBackward.apply(logits, lambda x: x, lambda grad: size * grad)
        return right(times, targets)

    head.loss = loss


def vocabulary_changes():
    found = [
        Change("words of other ranks are not masked in the embedding", after=unmasked_embedding),
        Change("the loss normalizes over a rank's own words only (tp)", after=own_words_only),
        Change("the gradient of the logits is tp times too large: the loss's sums are summed in "
               "backward, too", after=loss_sums_both_ways, forward=False)]
    for ends in (["embedding"], ["head"], ["embedding", "head"]):
        where = " and ".join(ends)
        found += [Change(f"the words of a rank's slice are off by {distance:+d} in the {where}",
                         after=other_words(moved(distance), ends, by_owner))
                  for distance, by_owner in product((1, -1), {False, "head" in ends})]
        found.append(Change("a rank takes all slices of the vocabulary for as long as its own, in "
                            f"the {where}", after=other_words(equal_slices, ends)))
    found += [Change("words of other ranks are not masked in the loss",
                     after=unmasked_targets(in_loss=True)),
              Change("words of other ranks are not masked in the gradient of the logits",
                     after=unmasked_targets(in_loss=False), forward=False)]
    return found
