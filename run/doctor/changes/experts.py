"""Changes of experts: gates, capacity, the balance loss, f before the experts."""

from functools import partial

import torch
import torch.nn.functional as F

from experts import MixtureOfExperts
from run.doctor.changes.tensor import unsummed
from run.doctor.step import Change, served
from tensor_parallel import copy_to_ranks


def mixtures(model):
    return [layer for layer in model.modules() if isinstance(layer, MixtureOfExperts)]


def routed(change):
    """Change what an expert layer gives to run_experts: change(x, gates, chosen, layer)."""
    def before(model):
        for layer in mixtures(model):
            right = layer.run_experts

            def run(x, gates, chosen, right=right, layer=layer):
                return right(x, *change(x, gates, chosen, layer))
            layer.run_experts = run
    return before


def softmax_over_all(x, gates, chosen, layer):
    """Gates from the softmax over all experts, of which the chosen ones are taken."""
    wide = torch.promote_types(x.dtype, torch.float)
    scores = F.linear(x.to(wide), layer.router.weight.to(wide)).softmax(-1)
    return scores.gather(-1, chosen).to(x.dtype), chosen


def gates_in_order_of_tokens(T, E):
    """A rank sorts its rows by expert, and takes the gates in the order of the tokens."""
    def change(x, gates, chosen, layer):
        flat, experts = gates.flatten(), chosen.flatten()
        wrong = torch.zeros_like(flat)
        for t in range(T):
            is_served = served(layer.n_experts, E, T, t)[experts]
            order = experts.masked_fill(~is_served, layer.n_experts).argsort(stable=True)
            rows = order[: int(is_served.sum())]
            wrong = wrong.index_copy(0, rows, flat[: len(rows)])
        return wrong.view_as(gates), chosen
    return change


def with_capacity(factor):
    """An expert takes `factor` times the tokens that it has if all experts are even; later tokens
    of the microbatch are dropped."""
    def change(x, gates, chosen, layer):
        experts = chosen.flatten()
        one_hot = F.one_hot(experts, layer.n_experts)
        before = (one_hot.cumsum(0) - one_hot).gather(1, experts.unsqueeze(1)).squeeze(1)
        is_kept = before < int(factor * len(experts)) // layer.n_experts
        return gates * is_kept.view_as(gates), chosen
    return change


def spread_over_tensor_ranks(E, f_of_tokens, f_of_gates):
    """In backward each tensor rank has the gradients of its own experts' tokens and gates; f sums
    them over the ranks, if it is right."""
    def after(model, mesh):
        group = mesh.group("tp")
        for layer in mixtures(model):
            is_served = served(layer.n_experts, E, group.size, group.rank)

            layer.run_experts = partial(run, layer.run_experts, is_served, group)

    def run(right, is_served, group, x, gates, chosen):
        own = is_served[chosen]
        outputs = right(f_of_tokens(x, group), f_of_gates(gates, group) * own, chosen)
        return outputs + right(x.detach(), (gates * ~own).detach(), chosen)
    return after


def balance_times(factor):
    def after(model, mesh):
        for layer in mixtures(model):
            layer.balance_weight *= factor
    return after


def balance_of_own_tokens(model, mesh):
    for layer in mixtures(model):
        layer.sum_counts = lambda counts: counts


def expert_changes(layout):
    T, E = layout["tp"], layout["ep"]
    found = [
        Change("experts' outputs are not multiplied by their gates",
               before=routed(lambda x, gates, chosen, layer: (torch.ones_like(gates), chosen))),
        Change("no gradient reaches the router through the gates",
               before=routed(lambda x, gates, chosen, layer: (gates.detach(), chosen)),
               forward=False),
        Change("gates are not normalized over the chosen experts (softmax over all)",
               before=routed(softmax_over_all)),
        Change("gates are in the wrong order",
               before=routed(lambda x, gates, chosen, layer: (gates.flip(-1), chosen))),
        Change("gates are in the order of the tokens, rows in that of the experts",
               before=routed(gates_in_order_of_tokens(T, E)), by_microbatch=True),
        *(Change("experts drop tokens beyond a capacity: "
                 f"{factor:g} times the tokens per expert", by_microbatch=True,
                 before=routed(with_capacity(factor))) for factor in (1.0, 1.25, 1.5, 2.0)),
        Change("the experts' balance loss is missing", after=balance_times(0.0), forward=False)]
    if layout["cp"] * (T if layout["sp"] else 1) > 1:
        found.append(Change("the balance loss counts a rank's own tokens of a sequence only",
                            after=balance_of_own_tokens, forward=False))
    if T > 1:
        found += [Change("f is missing before the experts: the gradient of their tokens is not "
                         "summed over the tensor ranks (tp)", forward=False,
                         after=spread_over_tensor_ranks(E, unsummed, copy_to_ranks)),
                  Change("the gates' gradient is not summed over the tensor ranks (tp)",
                         after=spread_over_tensor_ranks(E, copy_to_ranks, unsummed), forward=False)]
    sizes = {}  # size -> the axes that have it
    for axis in ("dp", "ep", "tp", "cp", "pp", "microbatches"):
        sizes.setdefault(layout[axis], []).append(axis)
    sizes.pop(1, None)
    for size, axes in sizes.items():
        which = " or ".join(axes)
        found += [Change(f"the balance loss counts {size} times ({which})",
                         after=balance_times(size), forward=False),
                  Change(f"the balance loss is divided by {size} ({which})",
                         after=balance_times(1 / size), forward=False)]
    return found
