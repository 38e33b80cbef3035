"""Changes of sequence parallelism (--sp): its all-gather and reduce-scatter, positions."""

import torch

from collectives import WithBackward
from run.doctor.changes.tensor import WHERE, replace_f, replace_g
from run.doctor.step import Change
from sequence_parallel import all_tokens, own_tokens_of_sum


def enter_without_sum(x, group):
    """--sp's all-gather, whose backward takes this rank's tokens without the other ranks' terms."""
    def own(grad):
        return grad.chunk(group.size, dim=1)[group.rank].contiguous()
    return WithBackward.apply(x, lambda x: all_tokens(x, group), own)


def enter_with_mean(x, group):
    return WithBackward.apply(x, lambda x: all_tokens(x, group),
                              lambda grad: own_tokens_of_sum(grad, group) / group.size)


def leave_without_sum(x, group):
    def own(x):
        return x.chunk(group.size, dim=1)[group.rank].contiguous()
    return WithBackward.apply(x, own, lambda grad: all_tokens(grad, group))


def leave_backward_alone(x, group):
    """--sp's reduce-scatter, whose backward has this rank's tokens' gradient only."""
    def backward(grad):
        parts = torch.zeros(group.size, *grad.shape, dtype=grad.dtype)
        parts[group.rank] = grad
        return parts.movedim(0, 1).flatten(1, 2)
    return WithBackward.apply(x, lambda x: own_tokens_of_sum(x, group), backward)


def scatter_only(model, mesh):
    """The reduce-scatter of rows in forward, and of columns in backward, scatters and does not sum.
    """
    replace_f("model", enter_without_sum)(model, mesh)
    replace_g("model", leave_without_sum)(model, mesh)


def from_zero(own, cp, tp):
    return torch.arange(len(own))


def positions_from(make):
    """Positions of this rank's tokens: make(number of tokens a rank has, its index, ranks)."""
    def after(model, mesh):
        cp, tp = mesh.group("cp"), mesh.group("tp")
        for module in model.positioned():
            right = module.positions

            def positions(x, right=right):
                own = right(x)
                return make(own, cp, tp)
            module.positions = positions
    return after


def sequence_changes():
    found = []
    for place in ("attention", "MLP", "head", "blocks", "model"):
        where = WHERE.get(place, f"in the {place}")
        found += [Change(f"--sp's all-gather has no reduce-scatter in backward {where}",
                         after=replace_f(place, enter_without_sum), forward=False),
                  Change(f"--sp's all-gather averages in backward {where}",
                         after=replace_f(place, enter_with_mean), forward=False)]
    for place in ("attention", "MLP", "embedding", "blocks", "model"):
        where = WHERE.get(place, f"in the {place}")
        found += [Change(f"--sp's reduce-scatter does not sum {where}",
                         after=replace_g(place, leave_without_sum)),
                  Change(f"--sp's reduce-scatter has no all-gather in backward {where}",
                         after=replace_g(place, leave_backward_alone), forward=False)]
    found.append(Change("--sp's reduce-scatter does not sum, forward or in backward, everywhere",
                        after=scatter_only))
    found.append(Change("all tensor ranks (--sp) take the positions of the first tokens",
                        after=positions_from(from_zero)))
    return found
