"""Changes of experts: gates, capacity, the balance loss, gradients of tokens and gates under --tp.

An expert layer gives run_experts the tokens x (B, S, C) and, for each token, its experts and their
gates: chosen and gates (B, S, k). A bug of gates or capacity gives it other gates.
"""

from functools import partial

import torch
import torch.nn.functional as F

from experts import MixtureOfExperts
from extras.doctor.changes.tensor import unsummed
from extras.doctor.finding import axes_by_size
from extras.doctor.groups import cut_by_layout
from extras.doctor.step import Change, served
from tensor_parallel import copy_to_ranks


def mixtures(model):
    return [layer for layer in model.modules() if isinstance(layer, MixtureOfExperts)]


# ---- gates and capacity ----


def replace_gates(change):
    """change(x, gates, chosen, layer): the gates (B, S, k) in place of the right ones."""
    def run(x, gates, chosen, right, layer):
        return right(x, change(x, gates, chosen, layer), chosen)

    def before(model):
        for layer in mixtures(model):
            layer.run_experts = partial(run, right=layer.run_experts, layer=layer)

    return before


def all_ones(x, gates, chosen, layer):
    return torch.ones_like(gates)


def detached_gates(x, gates, chosen, layer):
    return gates.detach()


def other_order(x, gates, chosen, layer):
    return gates.flip(-1)


def softmax_over_all(x, gates, chosen, layer):
    """The chosen experts' gates from the softmax over all experts, not over the chosen ones."""
    return layer.router(x).softmax(-1).gather(-1, chosen).to(x.dtype)


def gates_in_order_of_tokens(T, E):
    """Each tensor rank sorts its experts' rows by expert, but takes as many gates from the start of
    the list of all tokens. For four tokens with one expert each, T = 1:

        chosen    2 0 1 0          rows sorted by expert: tokens 1 3 2 0
        gates     a b c d          so token 1 gets a, 3 gets b, 2 gets c, 0 gets d: d a c b

    For T = 2 and four experts, tensor rank 1 has experts 2 and 3: its only row, token 0, gets a.
    """
    def change(x, gates, chosen, layer):
        flat = gates.flatten()  # (B S k,)
        experts = chosen.flatten()
        wrong = torch.zeros_like(flat)
        for t in range(T):
            is_served = served(layer.n_experts, E, T, t)[experts]
            order = experts.masked_fill(~is_served, layer.n_experts).argsort(stable=True)
            rows = order[: int(is_served.sum())]  # those of this rank, sorted by expert
            wrong = wrong.index_copy(0, rows, flat[: len(rows)])
        return wrong.view_as(gates)
    return change


def with_capacity(factor):
    """An expert takes at most `factor` times its share of an even spread; later tokens of the
    microbatch are dropped: gate 0."""
    def change(x, gates, chosen, layer):
        experts = chosen.flatten()  # (B S k,)
        one_hot = F.one_hot(experts, layer.n_experts)  # (B S k, n_experts)
        before = one_hot.cumsum(0) - one_hot  # how often each expert was chosen before
        place = before.gather(1, experts.unsqueeze(1)).squeeze(1)  # in the expert's queue, from 0
        is_kept = place < int(factor * len(experts)) // layer.n_experts
        return gates * is_kept.view_as(gates)
    return change


def gates_of_token(distance):
    """Each row has the gates of the token `distance` places after its own, in the microbatch."""
    return lambda x, gates, chosen, layer: gates.flatten(0, 1).roll(-distance, 0).view_as(gates)


def sigmoid_gates(x, gates, chosen, layer):
    return layer.router(x).sigmoid().gather(-1, chosen)


def routers_in(dtype):
    """The routers' scores are computed in this dtype: a token may choose other experts."""
    def scores(x, router):
        wide = torch.promote_types(x.dtype, torch.float)
        return F.linear(x.to(dtype), router.weight.to(dtype)).to(wide)

    def before(model):
        for layer in mixtures(model):
            layer.router.forward = partial(scores, router=layer.router)

    return before


# ---- the order of rows ----


def replace_order(order):
    """order(chosen, n_experts): which assignment (a token and one of its experts) each row is for,
    once the rows, sorted by expert, have come back. chosen: (B S k,), the expert of each
    assignment."""
    def run(x, gates, chosen, layer):
        tokens = x.flatten(0, 1)  # (B S, C)
        k = chosen.size(-1)
        chosen = chosen.flatten()
        by_expert = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=layer.n_experts)
        rows = torch.cat(layer.experts(tokens[by_expert // k].split(counts.tolist())))
        assignments = order(chosen, layer.n_experts)
        y = torch.zeros_like(tokens)
        y.index_add_(0, assignments // k, gates.flatten()[assignments].unsqueeze(1) * rows)
        return y.view_as(x)

    def before(model):
        for layer in mixtures(model):
            layer.run_experts = partial(run, layer=layer)

    return before


def still_sorted(chosen, n_experts):
    """Row i is taken for assignment i."""
    return torch.arange(len(chosen))


def sorted_once_more(chosen, n_experts):
    """The order in which rows were sorted is taken for the inverse one."""
    return chosen.argsort(stable=True).argsort()


def sorted_at_owner(E, n_owners, again):
    """The rank of an expert gets rows sorted by the E ranks that they come from, then by expert;
    they are run sorted by expert, and go back in that order or (again) in the one that the same
    permutation makes of it. n_owners: ranks that have experts. Two ranks, whose rows for experts 0
    and 1 of one rank are a0 a1 | b0 b1: a0 b0 | a1 b1 goes back."""
    def order(chosen, n_experts):
        source = torch.arange(len(chosen)) * E // len(chosen)  # data ranks follow one another
        owner = chosen * n_owners // n_experts
        came = ((owner * E + source) * n_experts + chosen).argsort(stable=True)
        by_expert = chosen[came].argsort(stable=True)
        return came[by_expert.argsort()] if again else came
    return order


# ---- gradients of tokens and gates ----


def spread_over_tensor_ranks(E, f_of_tokens, f_of_gates):
    """In backward a tensor rank has the gradients of tokens and gates from its own experts only. f
    adds these gradients up over the ranks: copy_to_ranks is right, unsummed the bug."""
    def run(x, gates, chosen, right, is_served, group):
        own = is_served[chosen]  # (B, S, k)
        # Here each rank runs all experts. Those of other tensor ranks add their outputs, so that
        # forward is right, but pass no gradient to tokens and gates, like in a run
        outputs = right(f_of_tokens(x, group), f_of_gates(gates, group) * own, chosen)
        return outputs + right(x.detach(), (gates * ~own).detach(), chosen)

    def after(model, mesh):
        group = mesh.group("tp")
        for layer in mixtures(model):
            is_served = served(layer.n_experts, E, group.size, group.rank)
            layer.run_experts = partial(run, right=layer.run_experts, is_served=is_served,
                                        group=group)

    return after


# ---- the balance loss ----


def balance_times(factor):
    def after(model, mesh):
        for layer in mixtures(model):
            layer.balance_weight *= factor
    return after


def balance_of_last_stage(first):
    """Without the balance loss of the layers before the last pipeline stage, whose first layer is
    model.layers[first]."""
    def after(model, mesh):
        for layer in model.layers[:first]:
            for mixture in mixtures(layer):
                mixture.balance_weight = 0.0
    return after


def balance_of_own_tokens(model, mesh):
    for layer in mixtures(model):
        layer.sum_counts = lambda counts: counts


def balance_changes(config, layout):
    found = [Change("the experts' balance loss is missing", after=balance_times(0.0),
                    forward=False)]
    if layout["pp"] > 1:
        found.append(Change("the balance loss of all pipeline stages but the last is missing (pp)",
                            after=balance_of_last_stage(cut_by_layout(config, layout)[-1]),
                            forward=False))
    sharing = layout["cp"] * (layout["tp"] if layout["sp"] else 1)  # ranks that share a sequence
    if sharing > 1:
        found.append(Change("the balance loss counts a rank's own tokens of a sequence only",
                            after=balance_of_own_tokens, forward=False))
    axes_of = axes_by_size(layout, ("dp", "ep", "tp", "cp", "pp", "microbatches"))
    microbatches = layout["dp"] * layout["microbatches"]
    if microbatches > 1:
        axes_of.setdefault(microbatches, ["dp x microbatches"])
    for size, axes in axes_of.items():
        which = " or ".join(axes)
        found += [Change(f"the balance loss counts {size} times ({which})",
                         after=balance_times(size), forward=False),
                  Change(f"the balance loss is divided by {size} ({which})",
                         after=balance_times(1 / size), forward=False)]
    return found


def expert_changes(config, layout):
    T = layout["tp"]
    E = layout["ep"]
    found = [
        Change("experts' outputs are not multiplied by their gates",
               before=replace_gates(all_ones)),
        Change("no gradient reaches the router through the gates",
               before=replace_gates(detached_gates), forward=False),
        Change("gates are not normalized over the chosen experts (softmax over all)",
               before=replace_gates(softmax_over_all)),
        Change("gates are in the wrong order", before=replace_gates(other_order)),
        Change("gates are in the order of the tokens, rows in that of the experts",
               before=replace_gates(gates_in_order_of_tokens(T, E)), by_microbatch=True)]
    for distance in (1, -1):
        found.append(Change(f"each token has the gates of the token {distance:+d} from it",
                            before=replace_gates(gates_of_token(distance)), by_microbatch=True))
    found += [
        Change("gates are the sigmoids of the scores, not their softmax",
               before=replace_gates(sigmoid_gates)),
        Change("the routers' scores are computed in bfloat16",
               before=routers_in(torch.bfloat16), by_microbatch=True, rounds=True),
        Change("experts' rows stay sorted by expert when they are combined",
               before=replace_order(still_sorted), by_microbatch=True),
        Change("experts' rows are put in order by the permutation that sorted them, not by its "
               "inverse", before=replace_order(sorted_once_more), by_microbatch=True)]
    if E > 1:
        for again, words in ((False, "sorted by expert"),
                             (True, "sorted by the permutation that sorts by expert twice")):
            found.append(Change(f"experts' rows go back to their ranks (ep) {words}, not in the "
                                "order in which they came",
                                before=replace_order(sorted_at_owner(E, E * T, again)),
                                by_microbatch=True, together=E))
    for factor in (1.0, 1.25, 1.5, 2.0):
        found.append(Change("experts drop tokens beyond a capacity: "
                            f"{factor:g} times the tokens per expert",
                            before=replace_gates(with_capacity(factor)), by_microbatch=True))
    if T > 1 and not layout["sp"]:
        found += [
            Change("f is missing before the experts: the gradient of their tokens is not summed "
                   "over the tensor ranks (tp)",
                   after=spread_over_tensor_ranks(E, unsummed, copy_to_ranks), forward=False),
            Change("the gates' gradient is not summed over the tensor ranks (tp)",
                   after=spread_over_tensor_ranks(E, copy_to_ranks, unsummed), forward=False)]
    return found + balance_changes(config, layout)
