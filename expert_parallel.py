"""Expert parallelism: E data-parallel ranks share the N experts of each block; tokens are sent to
the ranks of the experts they chose, and the outputs back (all-to-all, dispatch and combine).

model.MixtureOfExperts is the plain form: all experts on one rank. Split: rank e of E has experts
e N/E .. (e+1) N/E - 1; gradients are summed over the D/E ranks with the same experts. Replicated:
the router. Sent per rank, layer and microbatch if the experts are even: k b S C (E-1)/E elements
for k experts per token, as many back, and in backward the same two again. GShard, arXiv 2006.16668.

With tensor parallelism, whole experts are spread over the T ranks too. All T hold the same tokens:
each sends those for 1/T of the experts, so together they send each token once per chosen expert.
(If each expert were split over the T ranks: T times.) A token's k experts lie on several of these
ranks: each adds up the outputs that it got, and the partial sums are all-reduced as after any
row-parallel layer. Zero bubble (schedules.py) does not defer the experts' weight gradients.

    python expert_parallel.py        who sends what, on 4 ranks
    torchrun train.py --experts 8 --ep 2
"""

from dataclasses import replace
from functools import partial

import torch

from collectives import WithBackward, all_reduce, all_to_all
from sequence_parallel import Region, enter_region, leave_region
from shard import take_slice


def send_rows(x, sent, received, group):
    """Send rows of x (n, C): the first sent[0] rows to rank 0, the next sent[1] to rank 1, ...
    Returns (sum(received), C): received[0] rows from rank 0, then received[1] from rank 1, ...
    In backward the gradients of the rows take the way back."""
    def move(x, sent, received):
        rows = x.new_empty((sum(received), x.size(1)))
        all_to_all(rows.split(received), x.contiguous().split(sent), group)
        return rows

    return WithBackward.apply(x, lambda x: move(x, sent, received),
                              lambda grad: move(grad, received, sent))


def run_at_owners(experts, group, rows, to_send, to_run):
    """Run rows on the experts of all ranks of the group, n experts on each. In: rows (R, C), sorted
    by rank and its expert; to_send[rank][its expert], how many; to_run[rank][expert of this rank],
    how many come from there. Out: (R, C), in the same order. Two ranks with two experts each,
    to_send on rank 0 [[3, 0], [1, 2]]: rank 0 keeps 3 rows, and sends 3 to rank 1, of which 1 is
    for rank 1's first expert."""
    E, n = group.size, len(to_run[0])
    if E == 1:
        return torch.cat(experts(rows.split(to_run[0])))
    sent = [sum(for_rank) for for_rank in to_send]  # to each rank
    received = [sum(of_rank) for of_rank in to_run]  # from each rank
    rows = send_rows(rows, sent, received, group)  # dispatch: sorted by rank, then by expert
    # Run: collect the rows of each expert from all ranks, run it, and restore the received order
    parts = rows.split([count for of_rank in to_run for count in of_rank])  # [rank * n + expert]
    inputs = [torch.cat([parts[rank * n + expert] for rank in range(E)]) for expert in range(n)]
    outputs = [output.split([to_run[rank][expert] for rank in range(E)])  # [expert][rank]
               for expert, output in enumerate(experts(inputs))]
    rows = torch.cat([outputs[expert][rank] for rank in range(E) for expert in range(n)])
    return send_rows(rows, received, sent, group)  # combine: each row back to its token's rank


class SpreadExperts:
    """MixtureOfExperts.core where experts are spread over E ranks, or over E x T."""

    def __init__(self, layer, group, region):
        self.experts, self.group, self.region = layer.experts, group, region
        # owners[e][t]: the experts of rank e of E and t of T. E = 2, T = 2, N = 8: rank e = 1,
        # t = 0 has experts 4 5, and its tokens go to experts 0 1 of e = 0 and 4 5 of e = 1.
        owners = torch.arange(layer.n_experts).view(group.size, region.group.size, -1)
        self.own = owners[group.rank, region.group.rank]  # experts on this rank
        reached = owners[:, region.group.rank].flatten()  # experts that this rank sends tokens to
        self.n_reached = len(reached)
        # place[expert]: its place in `reached`; n_reached if another of the T ranks serves it
        self.place = torch.full((layer.n_experts,), self.n_reached)
        self.place[reached] = torch.arange(self.n_reached)
        self.place = self.place.to(group.device)

    def __call__(self, x, gates, chosen):
        """x (B, S, C); gates, chosen (B, S, k); with --sp S/T tokens each. Returns x's shape."""
        k = chosen.size(-1)
        x, gates = enter_region(x, self.region), enter_region(gates, self.region)  # all S tokens
        chosen = self.region.enter(chosen)  # (B, S, k)
        # An assignment is a token and one of its k experts: number a is of token a // k
        place = self.place[chosen.flatten()]  # (B * S * k,)
        counts = place.new_zeros(self.n_reached + 1).scatter_add_(0, place, torch.ones_like(place))
        to_send = counts[: self.n_reached].view(self.group.size, -1)  # (E, n)
        both = torch.stack([to_send, torch.empty_like(to_send)])
        all_to_all(list(both[1]), list(both[0]), self.group)  # both[1]: what each rank sends here
        to_send, to_run = self.group.read(both)  # lists; the layer's one wait for the device
        # Sorted by expert; the assignments that other ranks serve come last, and are left out
        assignments = place.argsort(stable=True)[: sum(map(sum, to_send))]
        tokens, source = x.flatten(0, 1), assignments // k  # (B * S, C); index of each row's token
        rows = tokens.index_select(0, source)
        rows = run_at_owners(self.experts, self.group, rows, to_send, to_run)
        y = torch.zeros_like(tokens)
        y.index_add_(0, source, gates.flatten()[assignments].unsqueeze(1) * rows)
        return leave_region(y.view_as(x), self.region)  # until here y is partial over tp


def spread_experts(model, mesh, sp=False):
    """Give each rank its experts: the ranks of the axes ep and tp share those of each block.

    In: a whole, tagged model, after parallelize (whose tags say that all T ranks hold the experts).
    After: parameters of experts are this rank's slices, tagged as such; fewer ranks hold the same
    slice, so gradients are summed over fewer. Where E = T = 1 a rank keeps all experts."""
    ep, cp, tp = (mesh.group(axis) for axis in ("ep", "cp", "tp"))
    same_experts = mesh.group("dp", "cp")  # the mesh axis dp has D/E ranks
    sp = sp and tp.size > 1
    share_sequences = (cp, tp) if sp else (cp,)

    def all_tokens(counts):  # (B, N), partial over cp (and tp) -> summed
        for group in share_sequences:
            all_reduce(counts, group)
        return counts

    for layer in (block.mlp for block in model.layers[1:-1]):
        layer.all_tokens = all_tokens
        layer.core = SpreadExperts(layer, ep, Region(tp, sp))
        if ep.size * tp.size == 1:
            continue
        own = layer.core.own.tolist()
        for stack in (layer.experts.c_fc, layer.experts.c_proj):
            for name, full in list(stack.named_parameters()):
                tag = replace(full.shard, ranges=((own[0], own[-1] + 1),), shared_by=(),
                              sum_over=(same_experts,))
                setattr(stack, name, take_slice(full, tag))


class Routing:
    """Statistics of the routers, summed over the microbatches of a step, for the log."""

    def __init__(self, stages, cuts, cfg, mesh):
        """stages: {stage: its layers}, on this rank; cuts[stage]: (start, stop) of these layers."""
        # Per block: sum over tokens of the balance term, then each expert's number of tokens
        self.sums = torch.zeros(cfg.n_layer if cfg.experts else 0, 1 + cfg.experts,
                                dtype=torch.double, device=mesh.device)
        self.weight = cfg.balance
        self.copies = 1 if cfg.sp else cfg.tp  # ranks that hold the same tokens
        self.balance = None  # of the last step, per token: 1 if the experts were even
        self.busiest = None  # of the last step: the largest load over the mean load
        for stage, layers in stages.items():
            start, _ = cuts[stage]
            for i, layer in enumerate(layers, start - 1):  # block i of the model is layer i + 1
                if hasattr(layer, "mlp") and cfg.experts:
                    layer.mlp.balance_weight = cfg.balance
                    layer.register_forward_hook(partial(self.add, self.sums[i]))

    def add(self, sums, block, args, output):
        """Forward hook of a block. Recomputing does not call it: train.py wraps layer.forward, and
        hooks run outside of that, in __call__."""
        sums[0] += block.mlp.balance.detach() / self.copies
        sums[1:] += block.mlp.load / self.copies
        # With --recompute backward runs forward again, and mlp.balance keeps that graph alive: drop
        # it when the block's input has its gradient, the last of the block
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: setattr(block.mlp, "balance", None))

    def part_of_loss(self):
        """The balance loss already included in this rank's loss."""
        return self.weight * self.sums[:, 0].sum() * self.copies

    def read(self, sums, tokens):
        """Set balance and busiest. sums: self.sums as a flat list, summed over all ranks; tokens:
        their number in the step."""
        if sums:
            sums = torch.tensor(sums, dtype=torch.double).view(self.sums.shape)
            balance, loads = sums[:, 0], sums[:, 1:]  # (L,), (L, N)
            self.balance = balance.mean().item() / tokens
            self.busiest = (loads.amax(1) / loads.mean(1)).max().item()


def demo(mesh):
    """Print where 16 tokens of each rank go; then the gradients, compared with one process's."""
    from show.demonstrations import show_difference, small_gpt
    group, (spread, mine) = mesh.group("ep"), small_gpt(mesh, n_experts=8, top_k=2)
    spread_experts(spread, mesh)
    spread(mine, mine).backward()
    load = spread.layers[1].mlp.load.view(group.size, -1).long()  # [rank][its expert]
    loads = [torch.empty_like(load) for _ in range(group.size)]  # of each rank's tokens
    all_to_all(loads, [load] * group.size, group)
    if group.rank == 0:
        print("tokens of each rank (rows) for each expert, 2 a token; | parts the experts' ranks")
        for rank, row in enumerate(loads):
            away = int(row.sum() - row[rank].sum())
            table = " |".join("".join(f"{n:4d}" for n in part) for part in row.tolist())
            print(f"rank {rank}  {table}    {away} of 32 go elsewhere")
    show_difference("spread", mesh, spread)


if __name__ == "__main__":
    from show.demonstrations import demonstrate
    demonstrate(demo, dp=1, ep=4, pp=1, cp=1, tp=1)
