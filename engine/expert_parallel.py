"""Expert parallelism: the root's (expert_parallel.py), with

    tensor ranks    Whole experts are spread over the T ranks of a tensor-parallel group too. All T
                    hold the same tokens, and each sends the tokens for 1/T of the experts: together
                    a token once per chosen expert. (If each expert were split over the T ranks: T
                    times.) A token's k experts lie on several of these ranks: each adds up the
                    outputs that it got, and the partial sums are all-reduced like after any
                    row-parallel layer.
    one wait        Per layer the host waits once for the device, for all counts together.

Zero bubble (schedules.py) does not defer the experts' weight gradients.

    torchrun train.py --experts 8 --ep 2 --tp 2 --fast
"""

from dataclasses import replace

import torch

from engine.collectives import all_reduce, all_to_all
from engine.sequence_parallel import Region, enter_region, leave_region
from expert_parallel import run_by_expert, send_rows
from shard import take_slice


class SpreadExperts:
    """MixtureOfExperts.run_experts where experts are spread over E ranks, or over E x T."""

    def __init__(self, layer, group, region):
        """group: the E ranks; region: of the T ranks (engine/sequence_parallel.py)."""
        self.experts = layer.experts
        self.group = group
        self.region = region
        if layer.n_experts % (group.size * region.group.size):
            raise ValueError(f"--ep {group.size} x --tp {region.group.size} must divide the "
                             f"{layer.n_experts} experts")
        # Which rank has which experts. For E = 2, T = 2 and 8 experts, on rank e = 1, t = 0:
        # owners[e][t], experts of that rank: [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        owners = torch.arange(layer.n_experts).view(group.size, region.group.size, -1)
        # own, experts on this rank: [4, 5]
        self.own = owners[group.rank, region.group.rank]
        # reached, experts that this rank sends tokens to, on all e with its t: [0, 1, 4, 5]
        reached = owners[:, region.group.rank].flatten()
        self.num_reached = len(reached)
        # place[expert], its index in `reached`, or num_reached if another of the T ranks serves
        # it: [0, 1, 4, 4, 2, 3, 4, 4]
        place = torch.full((layer.n_experts,), self.num_reached)
        place[reached] = torch.arange(self.num_reached)
        self.place = place.to(group.device)

    def __call__(self, x, gates, chosen):
        """x (B, S, C); gates, chosen (B, S, k); with --sp S/T tokens each. Returns x's shape."""
        k = chosen.size(-1)
        x = enter_region(x, self.region)  # (B, S, C); --sp: all tokens rank by rank, (T B, S/T, C)
        gates = enter_region(gates, self.region)
        chosen = self.region.enter(chosen)
        # An assignment is a token and one of its k experts: assignment a is of token a // k
        place = self.place[chosen.flatten()]  # (B * S * k,)
        to_send, to_run = self.count(place)
        # Sorted by expert. Those whose expert another of the T ranks serves come last: left out
        assignments = place.argsort(stable=True)[: int(to_send.sum())]
        source = assignments // k  # index of each row's token
        tokens = x.flatten(0, 1)  # (B * S, C)
        rows = self.run_at_owners(tokens.index_select(0, source), to_send, to_run)
        # combine: add up the outputs of a token's experts here, each times its gate
        y = torch.zeros_like(tokens)
        y.index_add_(0, source, gates.flatten()[assignments].unsqueeze(1) * rows)
        return leave_region(y.view_as(x), self.region)  # until here y is partial over tp

    def count(self, place):
        """Two tables (E, n) on the host: to_send, how many rows this rank has for each rank and its
        n experts; to_run, how many rows each rank has for each expert here."""
        # Not torch.bincount: it would ask the device for the largest value, a second wait
        counts = place.new_zeros(self.num_reached + 1).scatter_add_(0, place,
                                                                     torch.ones_like(place))
        to_send = counts[: self.num_reached].view(self.group.size, -1)
        tables = torch.stack([to_send, torch.empty_like(to_send)])
        all_to_all(list(tables[1]), list(tables[0]), self.group)
        return torch.tensor(self.group.read(tables))  # the layer's one wait for the device

    def run_at_owners(self, rows, to_send, to_run):
        """Run rows (R, C) on the experts of all ranks of the group. They are sorted by the rank
        they go to, then by its expert. Returns (R, C), in the same order. Two ranks with two
        experts each, to_send on rank 0 [[3, 0], [1, 2]]: rank 0 keeps 3 rows, and sends 3 to
        rank 1, of which 1 is for rank 1's first expert."""
        if self.group.size == 1:
            return torch.cat(self.experts(rows.split(to_run[0].tolist())))
        sent = to_send.sum(1).tolist()  # rows to each rank
        received = to_run.sum(1).tolist()  # rows from each rank
        rows = send_rows(rows, sent, received, self.group, all_to_all)  # dispatch
        outputs = run_by_expert(self.experts, rows, to_run)
        return send_rows(outputs, received, sent, self.group, all_to_all)  # to the tokens' rank


def spread_experts(model, mesh, sp=False):
    """Give each rank its experts: the ranks of the axes ep and tp share those of each block.

    In: a tagged model after parallelize, its experts still whole (tagged as held by all T ranks).
    After: parameters of experts are this rank's slices, tagged as such; fewer ranks hold the same
    slice, so gradients are summed over fewer. Where E = T = 1 a rank keeps all experts."""
    ep, cp, tp = (mesh.group(axis) for axis in ("ep", "cp", "tp"))
    sp = sp and tp.size > 1
    share_sequences = (cp, tp) if sp else (cp,)  # groups whose ranks have tokens of one sequence

    def sum_counts(counts):  # (B, n_experts), partial over cp (and tp) -> summed
        for group in share_sequences:
            all_reduce(counts, group)
        return counts

    for layer in (block.mlp for block in model.layers[1:-1]):
        layer.sum_counts = sum_counts
        layer.run_experts = SpreadExperts(layer, ep, Region(tp, sp))
        if ep.size * tp.size == 1:
            continue
        own = layer.run_experts.own.tolist()
        for stack in (layer.experts.c_fc, layer.experts.c_proj):
            for name, full in list(stack.named_parameters()):
                # rep: the group whose ranks hold the same shard (--shard)
                rep = [group for group in full.tag.shared_by if group is not tp]
                tag = replace(full.tag, ranges=((own[0], own[-1] + 1),), shared_by=(*rep,),
                              sum_over=(mesh.group("shard", "cp"), *rep))
                setattr(stack, name, take_slice(full, tag))
