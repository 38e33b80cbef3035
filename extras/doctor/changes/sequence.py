"""Changes of sequence parallelism (--sp): its all-gather, its reduce-scatter, its positions.

    in place of f    all-gather (B, S/T, C) -> (B, S, C)        backward: reduce-scatter
    in place of g    reduce-scatter (B, S, C) -> (B, S/T, C)    backward: all-gather
"""

import torch

from collectives import WithBackward
from extras.doctor.changes.tensor import COLUMNS, ROWS, replace_f, replace_g, where_words
from extras.doctor.step import Change
from sequence_parallel import all_tokens, own_tokens_of_sum


def own_tokens_unsummed(x, group):
    """(B, S, C) -> this rank's tokens (B, S/T, C), without the other ranks' terms."""
    return x.chunk(group.size, dim=1)[group.rank].contiguous()


def own_tokens_among_zeros(x, group):
    """(B, S/T, C) -> (B, S, C), with zeros in the place of the other ranks' tokens."""
    parts = torch.zeros(group.size, *x.shape, dtype=x.dtype)  # (T, B, S/T, C)
    parts[group.rank] = x
    return parts.movedim(0, 1).flatten(1, 2)


def enter_without_sum(x, group):
    """For f: backward takes this rank's tokens and sums nothing."""
    return WithBackward.apply(x, lambda x: all_tokens(x, group),
                              lambda grad: own_tokens_unsummed(grad, group))


def enter_with_mean(x, group):
    """For f: backward averages."""
    return WithBackward.apply(x, lambda x: all_tokens(x, group),
                              lambda grad: own_tokens_of_sum(grad, group) / group.size)


def leave_without_sum(x, group):
    """For g: forward takes this rank's tokens and sums nothing."""
    return WithBackward.apply(x, lambda x: own_tokens_unsummed(x, group),
                              lambda grad: all_tokens(grad, group))


def leave_backward_alone(x, group):
    """For g: backward has the gradient of this rank's tokens only."""
    return WithBackward.apply(x, lambda x: own_tokens_of_sum(x, group),
                              lambda grad: own_tokens_among_zeros(grad, group))


def scatter_only(model, mesh):
    """The reduce-scatters, of g in forward and of f in backward, sum nothing."""
    replace_f("model", enter_without_sum)(model, mesh)
    replace_g("model", leave_without_sum)(model, mesh)


def positions_from(make):
    """make(own, mesh): the positions that take the place of a rank's own (those of its tokens)."""
    def after(model, mesh):
        for module in model.positioned():
            right = module.positions

            def positions(x, right=right):
                return make(right(x), mesh)
            module.positions = positions
    return after


def from_zero(own, mesh):
    return torch.arange(len(own))


def targets_in_turn(ids, targets, k, mesh, positions):
    """Feeds targets in the order of ranks that have every T-th token; the tokens' parts are
    contiguous. T = 2, S = 4: the targets of 0 2 1 3."""
    T = mesh.group("tp").size
    of_ranks = [targets[k][:, positions[t::T]] for t in range(T)]
    return ids[k][:, positions], torch.cat(of_ranks, dim=1)


def sequence_changes():
    found = []
    for place in COLUMNS:
        where = where_words(place)
        found += [Change(f"--sp's all-gather has no reduce-scatter in backward {where}",
                         after=replace_f(place, enter_without_sum), forward=False),
                  Change(f"--sp's all-gather averages in backward {where}",
                         after=replace_f(place, enter_with_mean), forward=False)]
    for place in ROWS:
        where = where_words(place)
        found += [Change(f"--sp's reduce-scatter does not sum {where}",
                         after=replace_g(place, leave_without_sum)),
                  Change(f"--sp's reduce-scatter has no all-gather in backward {where}",
                         after=replace_g(place, leave_backward_alone), forward=False)]
    return found + [
        Change("--sp's reduce-scatter sums nothing anywhere, neither in forward nor in backward",
               after=scatter_only),
        Change("all tensor ranks (--sp) take the positions of the first tokens",
               after=positions_from(from_zero)),
        Change("targets are split over the tensor ranks (--sp) in turn, tokens in contiguous parts",
               feed=targets_in_turn)]
