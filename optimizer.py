"""The optimizer's step on the shards that DDP or ZeRO leaves to this rank, the global gradient norm
and the learning rate.

AdamW (plain.py spells it out) is torch's own, fused, one call for all shards. 16-bit weights have a
32-bit master copy: the step changes the master and rounds it to the weights. Wider weights are
their own master. Held per parameter: sizes.bytes_per_parameter.
"""

import math

import torch

from group import wait_all
from sizes import bytes_per_parameter


def learning_rate(cfg, step):
    """Linear warm-up over cfg.warmup_steps to cfg.lr, then a cosine down to cfg.min_lr."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / (cfg.warmup_steps + 1)
    progress = (step - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps)  # from 0 to below 1
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to above 0
    return cfg.min_lr + cosine * (cfg.lr - cfg.min_lr)


def decays(shard):
    """Does weight decay apply to the parameter of this tag? To matrices only."""
    return len(shard.shape) > 1 and shard.name.endswith("weight")


def clip_coefficient(norm, grad_clip):
    """The factor that brings gradients of this norm to at most grad_clip; 0: no clipping."""
    return min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0


class Optimizer:
    """AdamW on this rank's shards. norm_group: the ranks that together hold every gradient."""

    def __init__(self, reducer, norm_group, lr, betas, weight_decay):
        self.reducer, self.norm_group = reducer, norm_group
        groups = [{"params": [], "weight_decay": decay} for decay in (weight_decay, 0)]
        for bucket in reducer.buckets:
            wide = bucket.weight_shard.element_size() > 2
            bucket.master = bucket.weight_shard if wide else bucket.weight_shard.float()
            bucket.owned = []  # (parameter, this rank's piece of its master, of its gradient)
            for (param, piece), (_, grad) in zip(bucket.pieces(bucket.master),
                                                 bucket.pieces(bucket.grad_shard), strict=True):
                master = torch.nn.Parameter(piece)
                groups[0 if decays(param.shard) else 1]["params"].append(master)
                bucket.owned.append((param, master, grad))
        self.owned = [entry for bucket in reducer.buckets for entry in bucket.owned]
        self.adam = None  # a rank may own nothing: fewer parameters than ranks
        if self.owned:
            self.adam = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
        # How many ranks of norm_group hold the same piece: the tag's copies, times the piece's data
        # ranks in norm_group. Those are 1 under ZeRO and for experts, else E: with --ep norm_group
        # has E data ranks, as only together they hold all experts' gradients.
        copies = []
        for bucket in reducer.buckets:
            data_ranks = len({*bucket.group.ranks} & {*norm_group.ranks}) / bucket.num_shards
            copies += [param.shard.copies * data_ranks for param, *_ in bucket.owned]
        device = reducer.buckets[0].full.device
        self.copies = torch.tensor(copies, dtype=torch.double, device=device)

    def grad_square(self):
        """This rank's part of the squared global norm, to be summed over norm_group. Ranks that
        hold the same piece each add an equal part of its square: so each element counts once, and
        an overflow on any rank reaches the sum."""
        if not self.owned:
            return torch.zeros((), dtype=torch.double, device=self.copies.device)
        grads = [grad for *_, grad in self.owned]
        wide = self.owned[0][1].dtype  # 32 bits at least
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=wide))  # one kernel for many
        return (norms.double().square() / self.copies).sum()

    def step(self, lr, scale=1.0):
        """Step this rank's shards, with gradients times `scale`, and send the new weights. After:
        every rank has the new weights, or gathers them before it uses them (ZeRO-3). The scale is
        applied in place; 16-bit gradients are scaled in a 32-bit copy, freed after the step."""
        for bucket in self.reducer.buckets:
            grad_shard = bucket.grad_shard.to(bucket.master.dtype)  # itself, if as wide
            if scale != 1.0:
                grad_shard.mul_(scale)
            for (_, master, _), (_, grad) in zip(bucket.owned, bucket.pieces(grad_shard),
                                                 strict=True):
                master.grad = grad
        if self.adam:
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
            self.adam.zero_grad()
        works = []
        for bucket in self.reducer.buckets:
            if bucket.master is not bucket.weight_shard:
                bucket.weight_shard.copy_(bucket.master)
            works.append(self.reducer.publish(bucket))
        wait_all(works)

    def finite(self):
        """Are all weights and moments of this rank finite?"""
        held = [master.detach() for _, master, _ in self.owned]
        for _, master, _ in self.owned:
            state = self.adam.state[master]
            held += [state[name] for name in ("exp_avg", "exp_avg_sq") if state]
        norms = torch._foreach_norm(held, math.inf) if held else []  # makes no copy
        return not norms or bool(torch.stack(norms).isfinite().all())

    def state_bytes(self):
        """Bytes of the model states on this rank: (by the formula, in live storages). Padding
        counts but has no moments; moments exist from the first step on."""
        first = self.reducer.buckets[0]
        width, grad_width = first.full.element_size(), first.grad_dtype.itemsize
        formula, live = 0, {}  # live: address of a storage -> its bytes, as tensors share storages
        for bucket in self.reducer.buckets:
            owned = sum(master.numel() for _, master, _ in bucket.owned)
            padding = len(bucket.master) - owned
            formula += bucket.numel * sum(bytes_per_parameter(
                self.reducer.zero, bucket.num_shards, width, grad_width))
            formula -= padding * 2 * bucket.master.element_size()
            held = [bucket.full, bucket.grad, bucket.weight_shard, bucket.grad_shard, bucket.master]
            for _, master, _ in bucket.owned:
                state = self.adam.state[master]
                held += [state["exp_avg"], state["exp_avg_sq"]] if state else []
            for storage in [x.untyped_storage() for x in held if x is not None]:
                live[storage.data_ptr()] = storage.nbytes()
        return round(formula), sum(live.values())
