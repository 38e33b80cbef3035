"""AdamW as train.py runs it: on the shards that DDP or ZeRO leaves to this rank, with torch's
fused kernel (torch.optim would import torch.compile, which takes long), and without a wait of the
host: the norm, the clipping and the decision to skip a step stay on the device.

The root's optimizer.py spells AdamW out. SGD, LARS and LAMB: engine/layerwise.py. 16-bit weights
have a 32-bit master copy. Held per parameter: sizes.bytes_per_parameter.
"""

import math

import torch

from optimizer import decays
from sizes import MOMENTS, bytes_per_parameter


def holders(bucket, tag, norm_group):
    """How many ranks of the norm group hold each element of this rank's piece of a parameter.

    Within a replica: tag.copies. Times the replicas in the norm group that hold the same shard:
        DDP                 1: the norm group is one replica
        ZeRO                1: the norm group is all ranks, and D replicas hold D shards
        DDP with --ep E     1 for experts. E for any other parameter: each of the E replicas in the
                            norm group holds it"""
    # How many replicas of this bucket are in the norm group; under ZeRO they hold as many shards
    replicas = len({*bucket.group.ranks} & {*norm_group.ranks})
    return tag.copies * replicas / bucket.num_shards


def exact_norms(tensors, dtype):
    """The 2-norm of each flat tensor, a float64 tensor (n,). `dtype`: that of the sums."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).double()
    # On a CPU torch adds up all squares one after the other. In float32 the norm of 4e7 elements
    # comes out 0.3% too small; of 2^16, 2e-7
    parts = [x.split(1 << 16) for x in tensors]  # views
    owner = torch.tensor([i for i, views in enumerate(parts) for _ in views])
    found = torch._foreach_norm([view for views in parts for view in views], 2, dtype=dtype)
    squares = torch.zeros(len(tensors), dtype=torch.double)
    return squares.index_add_(0, owner, torch.stack(found).double().square()).sqrt()


class Optimizer:
    """What all optimizers share: masters, moments, the norm. norm_group: the ranks that together
    hold every gradient. shapes: {name: full shape} of all tensors, in one order on all ranks."""

    def __init__(self, reducer, norm_group, cfg, shapes):
        self.reducer = reducer
        self.norm_group = norm_group
        self.beta1, self.beta2 = cfg.beta1, cfg.beta2
        self.weight_decay = cfg.weight_decay
        self.kinds = list(MOMENTS[cfg.optimizer])  # names of what each bucket's `moments` has
        self.in_order_of_use = [bucket for stage in reducer.stages.values()
                                for bucket in reversed(stage)]
        for bucket in reducer.buckets:
            is_wide = bucket.weight_shard.element_size() > 2
            bucket.master = bucket.weight_shard if is_wide else bucket.weight_shard.float()
            bucket.moments = {name: torch.zeros_like(bucket.master) for name in self.kinds}
        first, *_ = reducer.buckets + reducer.frozen
        self.wide = torch.promote_types(first.full.dtype, torch.float32)
        self.device = first.full.device
        # For each piece of a parameter on this rank: how many ranks hold the same piece
        self.copies = torch.tensor([holders(bucket, param.shard, norm_group)
                                    for bucket in reducer.buckets
                                    for param, _ in bucket.pieces(bucket.master)],
                                   dtype=torch.double, device=self.device)
        self.updates = torch.zeros((), device=self.device)  # steps so far, without skipped ones

    def settings(self, shard):
        """(weight decay, factor of the learning rate) of the parameter of this tag. The factor is 1
        here; forks/mup.py and forks/muon.py override this."""
        return self.weight_decay * decays(shard), 1.0

    def add_state(self, name):
        """Give each bucket one more tensor beside its moments: zeros, which checkpoints save and
        load like the moments. For a technique that has a state of its own."""
        self.kinds.append(name)
        for bucket in self.reducer.buckets:
            bucket.moments[name] = torch.zeros_like(bucket.master)

    def grad_square(self):
        """This rank's part of the squared global norm, to be summed over norm_group. Ranks that
        hold the same piece each add an equal part of its square: so each element counts once, and
        an overflow on any rank reaches the sum."""
        grads = [grad for bucket in self.reducer.buckets
                 for _, grad in self.reducer.grad_pieces(bucket)]
        if not grads:  # fewer trained parameters than ranks
            return torch.zeros((), dtype=torch.double, device=self.device)
        return (exact_norms(grads, self.wide).square() / self.copies).sum()

    def step(self, lr, factor, finite):
        """Step this rank's shards, with gradients times `factor`, and start to send the weights,
        bucket by bucket, in the order in which forward uses them. `factor` and `finite` are 0-dim
        tensors on the device; if `finite` is false nothing changes. After: each layer's forward
        waits for its new weights."""
        raise NotImplementedError

    def publish(self, bucket):
        """Round the masters to the weights, and start to send these."""
        if bucket.master is not bucket.weight_shard:
            bucket.weight_shard.copy_(bucket.master)
        self.reducer.publish(bucket)

    def finite(self):
        """Are all weights and moments of this rank finite?"""
        held = [x for bucket in self.reducer.buckets + self.reducer.frozen
                for x in (bucket.master, *bucket.moments.values())]
        norms = torch._foreach_norm(held, math.inf)  # makes no copy
        return bool(torch.stack(norms).isfinite().all())

    def state_bytes(self):
        """Bytes of the model states on this rank: (by the formula, in live storages)."""
        formula = 0
        live = {}  # address of a storage -> its bytes, because tensors share storages
        for bucket in self.reducer.buckets + self.reducer.frozen:
            weights, *others = bytes_per_parameter(
                self.reducer.zero, bucket.num_shards, bucket.full.element_size(),
                bucket.grad_dtype.itemsize, len(bucket.moments))
            formula += bucket.numel * (weights + bucket.trained * sum(others))
            for x in (bucket.full, bucket.grad, bucket.weight_shard, bucket.grad_shard,
                      bucket.master, *bucket.moments.values(),
                      *(param.grad for param in bucket.params)):
                if x is not None:
                    live[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return round(formula), sum(live.values())


class AdamW(Optimizer):
    def step(self, lr, factor, finite):
        self.updates += finite
        # A 1-dim float32 factor makes torch promote 16-bit gradients to float32; a 0-dim one
        # does not
        factor = factor.to(self.wide).view(1)
        skip = (~finite).float()
        for bucket in self.in_order_of_use:
            self.step_bucket(bucket, lr, self.scaled(bucket, factor), skip)
            self.publish(bucket)

    def scaled(self, bucket, factor):
        """{parameter: this rank's piece of its gradient, times factor}; in place if the gradients
        are as wide as the factor."""
        times = torch.Tensor.mul_ if bucket.grad_dtype == factor.dtype else torch.mul
        if bucket.grad_shard is None:
            return {p: times(grad, factor) for p, grad in self.reducer.grad_pieces(bucket)}
        return dict(bucket.pieces(times(bucket.grad_shard, factor)))

    def step_bucket(self, bucket, lr, grads, skip):
        masters = dict(bucket.pieces(bucket.master))
        means = dict(bucket.pieces(bucket.moments["exp_avg"]))
        squares = dict(bucket.pieces(bucket.moments["exp_avg_sq"]))
        alike = {}  # (decay, rate) -> the parameters that have them, for one call of the kernel
        for param in masters:
            alike.setdefault(self.settings(param.shard), []).append(param)
        for (decay, rate), params in alike.items():
            torch._fused_adamw_(
                [masters[p] for p in params], [grads[p] for p in params],
                [means[p] for p in params], [squares[p] for p in params], [],
                [self.updates] * len(params), lr=lr * rate, beta1=self.beta1, beta2=self.beta2,
                eps=1e-8, amsgrad=False, maximize=False, found_inf=skip, weight_decay=decay)
