"""Watches the routers of a run with experts: sets the weight of the balance loss, says how much of
this rank's loss is balance loss, and gathers statistics for the log."""

from functools import partial

import torch


class Routing:
    """The routers of one rank's blocks. The sums are over the microbatches of a step."""

    def __init__(self, stages, cuts, cfg, mesh):
        """stages: {stage: its layers}, on this rank; cuts[stage]: (start, stop) of these layers."""
        # (L, 1 + n_experts). Row i: block i of the whole model; 0 if another rank has the block.
        # Column 0: the balance term, summed over tokens. The others: an expert's number of tokens.
        # train.py sums over all ranks. `copies` ranks have the same tokens, and each of them adds
        # 1/copies, so that a token counts once
        self.sums = torch.zeros(cfg.n_layer if cfg.experts else 0, 1 + cfg.experts,
                                dtype=torch.double, device=mesh.device)
        self.weight = cfg.balance
        self.copies = 1 if cfg.sp else cfg.tp  # ranks that hold the same tokens
        self.balance = None  # balance term per token in the last step: 1 if the experts were even
        self.busiest = None  # largest load / mean load in the last step, of the worst block
        for stage, layers in stages.items():
            start, _ = cuts[stage]
            for i, layer in enumerate(layers, start - 1):  # block i of the model is layer i + 1
                if hasattr(layer, "mlp") and cfg.experts:
                    layer.mlp.balance_weight = cfg.balance
                    layer.register_forward_hook(partial(self.add, self.sums[i]))

    def add(self, sums, block, args, output):
        """Forward hook of a block. Recomputing does not call this hook: recompute repeats
        layer.forward, which train.py has wrapped, and hooks run outside of forward, in __call__."""
        sums[0] += block.mlp.balance.detach() / self.copies
        sums[1:] += block.mlp.load / self.copies
        # With --recompute backward runs forward again, and mlp.balance keeps that graph alive. Free
        # it once backward has left the block: the input's gradient is the last one computed
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: setattr(block.mlp, "balance", None))

    def part_of_loss(self):
        """The balance loss in this rank's loss, times the tokens of a step (train.py divides by
        them). Each of the `copies` ranks has all of the balance loss in its loss, but only 1/copies
        of it in its `sums`: multiply by `copies`."""
        return self.weight * self.sums[:, 0].sum() * self.copies

    def read(self, sums, tokens):
        """Set balance and busiest. sums: self.sums as a flat list, summed over all ranks; tokens:
        number of tokens in the step, on all ranks."""
        if sums:
            sums = torch.tensor(sums, dtype=torch.double).view(self.sums.shape)
            balance, loads = sums[:, 0], sums[:, 1:]  # (L,), (L, n_experts)
            self.balance = balance.mean().item() / tokens
            self.busiest = (loads.amax(1) / loads.mean(1)).max().item()
