"""Statistics of the routers of a run with experts, for the log; sets the weight of their balance in
the loss."""

import torch

from experts import MixtureOfExperts


class Routing:
    """The routers of one rank's blocks. The sums are over the microbatches of a step."""

    def __init__(self, stages, cuts, cfg, mesh):
        """stages: {stage: its layers}, on this rank; cuts[stage]: (start, stop) of these layers."""
        # (L, 1 + n_experts). Row i: block i of the whole model; 0 if another rank has the block.
        # Column 0: the balance term, summed over tokens. The others: an expert's number of tokens.
        # balance_loss (experts.py) adds to the rows; train.py sums over all ranks
        self.table = torch.zeros(cfg.n_layer if cfg.experts else 0, 1 + cfg.experts,
                                 dtype=torch.double, device=mesh.device)
        self.copies = 1 if cfg.sp else cfg.tp  # ranks that hold the same tokens
        for stage, layers in stages.items():
            start, _ = cuts[stage]
            for i, layer in enumerate(layers, start - 1):  # block i of the model is layer i + 1
                mlp = getattr(layer, "mlp", None)
                if isinstance(mlp, MixtureOfExperts):
                    mlp.balance_weight = cfg.balance
                    mlp.statistics = self.table[i]

    def clear(self):
        self.table.zero_()

    def sums(self):
        """This rank's part of the statistics, a flat tensor. `copies` ranks have the same tokens:
        each of them gives 1/copies, so that a token counts once."""
        return self.table.flatten() / self.copies

    def read(self, sums, tokens):
        """{name: value} for the log. sums: those of all ranks, added up, as a list; tokens: number
        of tokens in the step, on all ranks. balance: the balance term per token, 1 if the experts
        were even; busiest: largest load / mean load, of the worst block."""
        if not sums:
            return {}
        sums = torch.tensor(sums, dtype=torch.double).view(self.table.shape)
        balance, loads = sums[:, 0], sums[:, 1:]  # (L,), (L, n_experts)
        return {"balance": balance.mean().item() / tokens,
                "busiest": (loads.amax(1) / loads.mean(1)).max().item()}
