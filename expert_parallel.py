"""Expert parallelism: the MLP becomes a router and N experts, and E data-parallel ranks share them.

A token goes through k experts (model.MixtureOfExperts, the plain form). Rank e of E has experts e
N/E and on. Each sends its tokens to the ranks that have what they chose, and gets the results back:
if all are chosen alike, k b S C (E-1)/E elements per layer and microbatch out, as many back, and
twice that backward. Held: N/E experts, summed over the D/E ranks with the same ones. GShard, arXiv
2006.16668. Zero bubble does not put experts' weight gradients off: they come with I.

With tensor parallelism whole experts are spread over the T ranks, too. All T have the same tokens,
and each sends 1/T of the above: rank t to ranks t. Partial sums meet in the reduction that ends a
row-parallel layer anyway. (Were each expert split, a token would go out T times.)

    python expert_parallel.py        who sends what, on 4 ranks        train.py --experts 8 --ep 2
"""

from dataclasses import replace
from functools import partial

import torch

from collectives import all_reduce, all_to_all
from model import build
from run.demonstrations import demonstrate, report_difference
from sequence_parallel import Enter, Leave, Region
from shard import tag_whole
from sizes import GPTConfig


class SendRows(torch.autograd.Function):
    """Of x (n, C) the first given[0] rows go to rank 0, and so on; returned are taken[0] rows of
    rank 0, and so on. Backward: the same, the other way."""

    @staticmethod
    def forward(ctx, x, given, taken, group):
        ctx.given, ctx.taken, ctx.group = given, taken, group
        received = x.new_empty((sum(taken), x.size(1)))
        all_to_all(received.split(taken), x.contiguous().split(given), group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return SendRows.apply(grad, ctx.taken, ctx.given, ctx.group), None, None, None


def run_at_owners(experts, group, rows, counts):
    """rows (., C): counts[0] for the first expert of rank 0, and so on, for n experts on each rank
    of the group. The owners get them, run their experts, and send the results back: (., C)."""
    E = group.size
    given = torch.tensor(counts, device=rows.device).view(E, -1)  # [rank][its expert]
    taken = torch.empty_like(given)
    all_to_all(list(taken), list(given), group)  # taken[i][j]: rows that rank i has for expert j
    taken, n = group.read(taken), len(counts) // E
    given = [sum(counts[i * n : (i + 1) * n]) for i in range(E)]
    received = [sum(row) for row in taken]
    rows = SendRows.apply(rows, given, received, group)  # by rank, then by expert
    parts = rows.split([size for row in taken for size in row])
    said = experts([torch.cat([parts[i * n + j] for i in range(E)]) for j in range(n)])
    parts = [out.split([row[j] for row in taken]) for j, out in enumerate(said)]  # [expert][rank]
    rows = torch.cat([parts[j][i] for i in range(E) for j in range(n)])
    return SendRows.apply(rows, received, given, group)


class SpreadExperts:
    """What stands in for MixtureOfExperts.visit if experts are spread over E ranks, or E x T."""

    def __init__(self, layer, group, region):
        self.experts, self.group, self.region = layer.experts, group, region
        owners = torch.arange(layer.n_experts).view(group.size, region.group.size, -1)
        self.own = owners[group.rank, region.group.rank]  # the experts that this rank has
        asked = owners[:, region.group.rank].flatten()  # those that it sends tokens to
        self.n = len(asked)
        self.index = torch.full((layer.n_experts,), self.n)  # of an expert in `asked`; n: not there
        self.index[asked] = torch.arange(self.n)
        self.index = self.index.to(group.device)

    @torch.compiler.disable  # which sees no messages
    def __call__(self, x, gates, chosen):
        """As visit: x (B, S, C), gates and chosen (B, S, k); under --sp of S/T tokens."""
        x, gates = Enter.apply(x, self.region), Enter.apply(gates, self.region)
        chosen, k = self.region.enter(chosen), chosen.size(-1)
        tokens, index = x.flatten(0, 1), self.index[chosen.flatten()]
        counts = index.new_zeros(self.n + 1).scatter_add_(0, index, torch.ones_like(index))
        counts = self.group.read(counts[: self.n])
        visits = index.argsort(stable=True)[: sum(counts)]  # by expert; visit j is of token j // k
        at = visits // k
        out = run_at_owners(self.experts, self.group, tokens.index_select(0, at), counts)
        y = torch.zeros_like(tokens)
        y.index_add_(0, at, gates.flatten()[visits].unsqueeze(1) * out)
        return Leave.apply(y.view_as(x), self.region)  # until here partial over tp


def spread_experts(model, mesh, sp=False):
    """Give each rank its experts of a whole, tagged model: E of the D data ranks share them, and
    the T tensor-parallel ranks. What others have of them this rank has not, so gradients are to be
    summed over fewer ranks than others. To be called after parallelize, which tags what it does not
    split as held by all T. Nothing is swapped if E = T = 1."""
    ep, cp, tp = (mesh.group(axis) for axis in ("ep", "cp", "tp"))
    data, sp = mesh.group("dp", "cp"), sp and tp.size > 1  # of the mesh: D/E ranks along dp
    groups = (cp, tp) if sp else (cp,)

    @torch.compiler.disable  # which sees no messages
    def all_tokens(counts):  # (B, N), summed over the ranks that have other tokens of a sequence
        for group in groups:
            all_reduce(counts, group)
        return counts

    for layer in (block.mlp for block in model.layers[1:-1]):
        layer.all_tokens = all_tokens
        if ep.size * tp.size == 1:
            continue
        layer.core = SpreadExperts(layer, ep, Region(tp, sp))
        own = layer.core.own.tolist()
        for stack in (layer.experts.c_fc, layer.experts.c_proj):
            for name, full in list(stack.named_parameters()):
                part = torch.nn.Parameter(torch.empty_like(full[: len(own)]))
                part.shard = replace(full.shard, ranges=((own[0], own[-1] + 1),), shared_by=(),
                                     sum_over=(data,))
                setattr(stack, name, part)


class Routing:
    """What the routers did in a step, added up over its microbatches."""

    def __init__(self, stages, cuts, cfg, mesh):
        """stages: {stage: its layers} of this rank; cuts: where each begins and ends."""
        # Of each block: the sum over tokens of balance, and the number of tokens of each expert
        self.sums = torch.zeros(cfg.n_layer if cfg.experts else 0, 1 + cfg.experts,
                                dtype=torch.double, device=mesh.device)
        self.weight = cfg.balance
        self.copies = 1 if cfg.sp else cfg.tp  # ranks that see the same tokens
        # Of the last step: balance, 1 if all experts had the same to do; largest load over the mean
        self.balance = self.busiest = None
        for layers, (start, _) in ((layers, cuts[s]) for s, layers in stages.items()):
            for i, layer in enumerate(layers, start - 1):
                if hasattr(layer, "mlp") and cfg.experts:
                    layer.mlp.balance_weight = cfg.balance
                    layer.register_forward_hook(partial(self.add, self.sums[i]))

    def add(self, sums, block, args, out):  # recomputing does not come here a second time
        sums[0] += block.mlp.balance.detach() / self.copies
        sums[1:] += block.mlp.load / self.copies
        if args[0].requires_grad:  # when backward leaves, free what recomputing has made once more
            args[0].register_hook(lambda grad: setattr(block.mlp, "balance", None))

    def part_of_loss(self):
        """What this rank's loss has in it, of the sums so far."""
        return self.weight * self.sums[:, 0].sum() * self.copies

    def read(self, sums, tokens):
        """sums: over all ranks, a flat list. tokens: of the step."""
        if sums:
            sums = torch.tensor(sums, dtype=torch.double).view(self.sums.shape)
            self.balance = sums[:, 0].mean().item() / tokens
            self.busiest = (sums[:, 1:].amax(1) / sums[:, 1:].mean(1)).max().item()


def demo(mesh):
    """Where 16 tokens of each rank go; then gradients against all experts in one process."""
    group, config = mesh.group("ep"), GPTConfig(50, 8, 1, 2, 16, n_experts=8, top_k=2)
    ids = torch.randint(50, (2 * group.size, 8), generator=torch.Generator().manual_seed(0))
    mine = ids.chunk(group.size)[group.rank]
    alone, spread = build(config, dtype=torch.double), build(config, dtype=torch.double)
    alone(ids, ids).backward()
    whole = dict(spread.canonical_parameters())
    tag_whole(spread, mesh.group("dp", "ep", "cp"))
    spread_experts(spread, mesh)
    for name, param in spread.canonical_parameters():
        param.data.copy_(param.shard.slice(whole[name].data))
    spread(mine, mine).backward()
    load = spread.layers[1].mlp.load.view(group.size, -1).long()  # [rank][its expert]
    every = [torch.empty_like(load) for _ in range(group.size)]
    all_to_all(every, [load] * group.size, group)
    if group.rank == 0:
        print("tokens of each rank (rows) for each expert, 2 a token; | parts the experts' ranks")
        for rank, row in enumerate(every):
            away = int(row.sum() - row[rank].sum())
            print(f"rank {rank}  " + " |".join("".join(f"{n:4d}" for n in part) for part in
                                              row.tolist()) + f"    {away} of 32 go elsewhere")
    for param in spread.parameters():
        for summed_over in param.shard.sum_over:
            all_reduce(param.grad, summed_over)
    grads = {name: param.grad for name, param in alone.canonical_parameters()}
    report_difference("spread", mesh.rank, [(p.grad, p.shard.slice(grads[name])) for name, p in
                                            spread.canonical_parameters()])


if __name__ == "__main__":
    demonstrate(demo, dp=1, ep=4, pp=1, cp=1, tp=1)
