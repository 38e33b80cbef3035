"""The optimizer's step on the shards that DDP or ZeRO leaves to this rank, the global gradient norm
and the learning rate.

AdamW (plain.py spells it out) is torch's own fused kernel, one call for many pieces; torch.optim
would import 2 s of torch.compile first. 16-bit weights have a 32-bit master copy: the step changes
the master and rounds it to the weights. Wider weights are their own master. Held per parameter:
sizes.bytes_per_parameter. Norm, clipping and the decision to skip a step stay on the device: the
host waits for none of them.
"""

import math

import torch

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
    """The factor that brings gradients of this norm, a tensor, to at most grad_clip; 0: no clip."""
    return (grad_clip / (norm + 1e-6)).clamp(max=1.0) if grad_clip else torch.ones_like(norm)


class Optimizer:
    """AdamW on this rank's shards. norm_group: the ranks that together hold every gradient."""

    def __init__(self, reducer, norm_group, betas, weight_decay):
        self.reducer, self.norm_group = reducer, norm_group
        self.betas, self.weight_decay = betas, weight_decay
        self.groups = {}  # bucket -> its pieces with and without weight decay: see below
        # How many ranks of norm_group hold the same piece: the tag's copies, times the piece's data
        # ranks in norm_group. Those are 1 under ZeRO and for experts, else E: with --ep norm_group
        # has E data ranks, as only together they hold all experts' gradients.
        copies = []
        for bucket in reducer.buckets:
            wide = bucket.weight_shard.element_size() > 2
            bucket.master = bucket.weight_shard if wide else bucket.weight_shard.float()
            bucket.exp_avg = torch.zeros_like(bucket.master)  # mean of the gradients so far
            bucket.exp_avg_sq = torch.zeros_like(bucket.master)  # of their squares
            data_ranks = len({*bucket.group.ranks} & {*norm_group.ranks}) / bucket.num_shards
            # Lists of pieces of the masters, of exp_avg and of exp_avg_sq
            self.groups[bucket] = {True: ([], [], []), False: ([], [], [])}
            for i, buffer in enumerate((bucket.master, bucket.exp_avg, bucket.exp_avg_sq)):
                for param, piece in bucket.pieces(buffer):
                    self.groups[bucket][decays(param.shard)][i].append(piece)
            copies += [param.shard.copies * data_ranks for param, _ in bucket.pieces(bucket.master)]
        device = reducer.buckets[0].full.device
        self.copies = torch.tensor(copies, dtype=torch.double, device=device)
        self.updates = torch.zeros((), device=device)  # steps so far, skipped ones not counted

    def grad_square(self):
        """This rank's part of the squared global norm, to be summed over norm_group. Ranks that
        hold the same piece each add an equal part of its square: so each element counts once, and
        an overflow on any rank reaches the sum."""
        grads = [grad for bucket in self.reducer.buckets
                 for _, grad in self.reducer.grad_pieces(bucket)]
        if not grads:  # fewer parameters than ranks
            return torch.zeros((), dtype=torch.double, device=self.copies.device)
        wide = self.reducer.buckets[0].master.dtype  # 32 bits at least
        norms = torch._foreach_norm(grads, 2, dtype=wide)  # one kernel
        return (torch.stack(norms).double().square() / self.copies).sum()

    def step(self, lr, scale, finite):
        """Step this rank's shards, with gradients times `scale`, and start to send the new weights,
        bucket by bucket, those first that forward uses first. Nothing changes if not `finite`. Both
        are tensors of no dimension on the device. After: every rank has the new weights, or gathers
        them before it uses them (ZeRO). The scaled gradients of a bucket live until it has stepped:
        so on a GPU they mostly stay in the cache."""
        self.updates += finite
        skip = (~finite).float()
        # with a dimension, so that its product with gradients is as wide as the masters
        scale = scale.to(self.reducer.buckets[0].master.dtype).view(1)
        for bucket in reversed(self.reducer.buckets):
            if bucket.grad_shard is None:
                scaled = [(p, grad * scale) for p, grad in self.reducer.grad_pieces(bucket)]
            else:
                scaled = bucket.pieces(bucket.grad_shard * scale)
            grads = {True: [], False: []}  # with and without weight decay
            for param, grad in scaled:
                grads[decays(param.shard)].append(grad)
            for decay, (masters, exp_avgs, exp_avg_sqs) in self.groups[bucket].items():
                if masters:
                    torch._fused_adamw_(
                        masters, grads[decay], exp_avgs, exp_avg_sqs, [],
                        [self.updates] * len(masters), lr=lr, beta1=self.betas[0],
                        beta2=self.betas[1], eps=1e-8, amsgrad=False, maximize=False,
                        weight_decay=decay * self.weight_decay, found_inf=skip)
            if bucket.master is not bucket.weight_shard:
                bucket.weight_shard.copy_(bucket.master)
            self.reducer.publish(bucket)

    def finite(self):
        """Are all weights and moments of this rank finite?"""
        held = [x for bucket in self.reducer.buckets
                for x in (bucket.master, bucket.exp_avg, bucket.exp_avg_sq)]
        norms = torch._foreach_norm(held, math.inf)  # makes no copy
        return bool(torch.stack(norms).isfinite().all())

    def state_bytes(self):
        """Bytes of the model states on this rank: (by the formula, in live storages)."""
        first = self.reducer.buckets[0]
        width, grad_width = first.full.element_size(), first.grad_dtype.itemsize
        formula, live = 0, {}  # live: address of a storage -> its bytes, as tensors share storages
        for bucket in self.reducer.buckets:
            formula += bucket.numel * sum(bytes_per_parameter(
                self.reducer.zero, bucket.num_shards, width, grad_width))
            for x in (bucket.full, bucket.grad, bucket.weight_shard, bucket.grad_shard,
                      bucket.master, bucket.exp_avg, bucket.exp_avg_sq,
                      *(param.grad for param in bucket.params)):
                if x is not None:
                    live[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return round(formula), sum(live.values())
