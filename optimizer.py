"""The optimizer's step on the shards that DDP or ZeRO leaves to this rank, the global gradient norm
and the learning rate. For clipped gradients g, weights w, decay d (of matrices only), momentum m:

    AdamW  torch's fused kernel (torch.optim imports 2 s of torch.compile); spelled out in plain.py
    SGD    v = m v + lr (g + d w);  w = w - v
    LARS   arXiv 1708.03888: SGD, each matrix with lr |w| / (|g| + d |w|). Not taken: the paper's
           factor of 0.001 for all, which --lr can hold
    LAMB   arXiv 1904.00962: u = mean / (sqrt(square) + 1e-6) + d w, bias corrected as in Adam;
           w = w - lr |w| / |u| u. Not taken: limits for |w|, which the paper allows

The papers scale each layer. A layer is one tensor here: c_attn (q, k, v) has one ratio. Biases and
LayerNorm gains have no decay and no ratio. 16-bit weights have a 32-bit master copy. Held
per parameter: sizes.bytes_per_parameter. The host waits for no norm and no decision to skip a step.
"""

import math
from functools import partial

import torch

from collectives import all_reduce
from shard import Shard
from sizes import MOMENTS, bytes_per_parameter


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
    """cfg.optimizer on this rank's shards. norm_group: the ranks that together hold every gradient.
    shapes: {name: full shape} of all tensors, in one order on all ranks."""

    def __init__(self, reducer, norm_group, cfg, shapes):
        self.reducer, self.norm_group, self.kind = reducer, norm_group, cfg.optimizer
        self.betas, self.weight_decay = (cfg.beta1, cfg.beta2), cfg.weight_decay
        self.ratios = None  # LARS, LAMB: trust ratio of each tensor in the last step
        copies = []  # of each piece: how many ranks of norm_group hold it
        self.in_order_of_use = [bucket for stage in reducer.stages.values()
                                for bucket in reversed(stage)]
        self.index_of = {name: i for i, name in enumerate(shapes)}
        indices = []  # of each piece: index_of its tensor
        for bucket in reducer.buckets:
            wide = bucket.weight_shard.element_size() > 2
            bucket.master = bucket.weight_shard if wide else bucket.weight_shard.float()
            bucket.moments = {name: torch.zeros_like(bucket.master) for name in MOMENTS[self.kind]}
            # How many data ranks of norm_group hold these pieces: 1 under ZeRO (D ranks, D shards),
            # and 1 under DDP, where norm_group is one replica. DDP with --ep: norm_group has the E
            # data ranks that share the experts, and all E hold what is no expert's.
            data_ranks = len({*bucket.group.ranks} & {*norm_group.ranks}) / bucket.num_shards
            tags = [param.shard for param, _ in bucket.pieces(bucket.master)]
            copies += [tag.copies * data_ranks for tag in tags]
            indices += [self.index_of[tag.name] for tag in tags]
        device = reducer.buckets[0].full.device
        self.copies = torch.tensor(copies, dtype=torch.double, device=device)
        self.indices = torch.tensor(indices, dtype=torch.long, device=device)
        matrices = [decays(Shard(name, shape)) for name, shape in shapes.items()]
        self.is_matrix = torch.tensor(matrices, device=device)
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

    def step(self, lr, factor, finite):
        """Step this rank's shards, with gradients times `factor`, and start to send the weights,
        bucket by bucket, those first that forward uses first. Nothing changes if not `finite`. Both
        are 0-dim tensors on the device. After: each layer's forward waits for its new weights."""
        self.updates += finite
        # 1-dim: a float32 factor makes float32 of 16-bit gradients; one without dimension would not
        factor = factor.to(self.reducer.buckets[0].master.dtype).view(1)
        if self.kind != "adamw":
            return self.step_by_tensor(lr, partial(self.gradient, factor, finite), finite)
        same = self.reducer.buckets[0].grad_dtype == factor.dtype
        times = torch.Tensor.mul_ if same else torch.mul  # in place, where gradients are as wide
        skip = (~finite).float()
        for bucket in self.in_order_of_use:
            if bucket.grad_shard is None:
                scaled = [(p, times(grad, factor)) for p, grad in self.reducer.grad_pieces(bucket)]
            else:
                scaled = bucket.pieces(times(bucket.grad_shard, factor))
            # rows: gradients, masters, exp_avg, exp_avg_sq, each a list of (parameter, piece)
            buffers = (bucket.master, *bucket.moments.values())
            rows = [[*scaled], *([*bucket.pieces(buffer)] for buffer in buffers)]
            for decay in (True, False):  # a call has one weight decay: matrices, then the rest
                grads, masters, exp_avgs, exp_avg_sqs = [
                    [piece for param, piece in row if decays(param.shard) == decay] for row in rows]
                if masters:
                    torch._fused_adamw_(
                        masters, grads, exp_avgs, exp_avg_sqs, [],
                        [self.updates] * len(masters), lr=lr, beta1=self.betas[0],
                        beta2=self.betas[1], eps=1e-8, amsgrad=False, maximize=False,
                        weight_decay=decay * self.weight_decay, found_inf=skip)
            self.publish(bucket)

    def publish(self, bucket):
        """Round the masters to the weights, and start to send these."""
        if bucket.master is not bucket.weight_shard:
            bucket.weight_shard.copy_(bucket.master)
        self.reducer.publish(bucket)

    def finite(self):
        """Are all weights and moments of this rank finite?"""
        held = [x for bucket in self.reducer.buckets
                for x in (bucket.master, *bucket.moments.values())]
        norms = torch._foreach_norm(held, math.inf)  # makes no copy
        return bool(torch.stack(norms).isfinite().all())

    def state_bytes(self):
        """Bytes of the model states on this rank: (by the formula, in live storages)."""
        first = self.reducer.buckets[0]
        width, grad_width = first.full.element_size(), first.grad_dtype.itemsize
        formula, live = 0, {}  # live: address of a storage -> its bytes, as tensors share storages
        for bucket in self.reducer.buckets:
            formula += bucket.numel * sum(bytes_per_parameter(
                self.reducer.zero, bucket.num_shards, width, grad_width, len(bucket.moments)))
            for x in (bucket.full, bucket.grad, bucket.weight_shard, bucket.grad_shard,
                      bucket.master, *bucket.moments.values(),
                      *(param.grad for param in bucket.params)):
                if x is not None:
                    live[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return round(formula), sum(live.values())

    def step_by_tensor(self, lr, gradient, finite):
        """SGD, LARS, LAMB. gradient(bucket): a new flat tensor, zeros if not finite."""
        go = finite.double()  # 0: skip. Every factor below is such that 0 changes nothing
        if self.kind == "lamb":
            for bucket in self.reducer.buckets:
                grad, (mean, square) = gradient(bucket), bucket.moments.values()
                # by how much each mean moves to the new term
                moves = [((1 - beta) * go).to(grad.dtype) for beta in self.betas]
                mean.lerp_(grad, moves[0])
                square.lerp_(grad.square_(), moves[1])
        self.ratios = self.trust_ratios(gradient)
        rates = lr * go * self.ratios
        for bucket in self.in_order_of_use:
            change = self.change(bucket, gradient)
            for param, piece in bucket.pieces(change):
                piece.mul_(rates[self.index_of[param.shard.name]])
            if self.kind != "lamb":
                velocity, = bucket.moments.values()
                # times m = beta1; to skip, times 1
                change = velocity.mul_(1 - (1 - self.betas[0]) * go).add_(change)
            bucket.master.addcmul_(change, go, value=-1)
            self.publish(bucket)

    def gradient(self, factor, finite, bucket):
        grad = bucket.grad_shard
        if grad is None:
            grad = torch.cat([piece for _, piece in self.reducer.grad_pieces(bucket)])
        return (grad * factor).masked_fill_(~finite, 0.0)

    def change(self, bucket, gradient):
        """What to subtract at a rate of 1, flat. LAMB computes it twice: its norm comes first."""
        if self.kind == "lamb":
            steps = self.updates.double().clamp(min=1)  # the first step may be skipped
            mean, square = (moment / (1 - beta**steps) for moment, beta in zip(
                bucket.moments.values(), self.betas, strict=True))
            change = mean.div_(square.sqrt_().add_(1e-6))  # in place: of new tensors
        else:
            change = gradient(bucket)
        for (param, piece), (_, weight) in zip(
                bucket.pieces(change), bucket.pieces(bucket.master), strict=True):
            piece.add_(weight, alpha=self.weight_decay * decays(param.shard))
        return change

    def trust_ratios(self, gradient):
        """|w| / |change| of each whole matrix (LARS: see the top of the file); 1 for other tensors,
        where w or change is zero, and for SGD. The same bits on all ranks: each adds the squares of
        its pieces, divided by the number of ranks that hold them, in one all-reduce."""
        squares = torch.zeros(2, len(self.is_matrix), dtype=torch.double, device=self.copies.device)
        if self.kind == "sgd":
            return torch.ones_like(squares[0])
        decay = self.weight_decay if self.kind == "lars" else 0.0
        norms = [[], []]  # of the pieces: of weights, of changes
        for bucket in self.reducer.buckets:
            flat = gradient(bucket) if self.kind == "lars" else self.change(bucket, gradient)
            for found, x in zip(norms, (bucket.master, flat), strict=True):
                found += [piece.norm() for _, piece in bucket.pieces(x)]
        if norms[0]:  # else there are fewer parameters than ranks
            terms = torch.stack(sum(norms, [])).view(2, -1).double().square() / self.copies
            squares.index_add_(1, self.indices, terms)
        weight, change = all_reduce(squares, self.norm_group).sqrt()
        ratios = weight / (change + decay * weight)
        return torch.where(self.is_matrix & (weight > 0) & (change > 0), ratios, 1.0)
