"""ZeRO: what data-parallel ranks hold N times over, each holds 1/N of. Rank r owns slice r of every
layer's flat buffer and steps it; a stage says how much else is split.

      split over the ranks     bytes per parameter (16-bit training)   elements sent per step
    0 nothing: DDP             16 = 2 weights + 2 gradients + 12       2 Psi (N-1)/N
    1 optimizer states         4 + 12/N                                2 Psi (N-1)/N
    2 and gradients            2 + 14/N                          (1 + m) Psi (N-1)/N
    3 and weights              16/N                                 3 m Psi (N-1)/N

for m microbatches. The code is the same but for where gradients land (`place`, `launch`), where
weights live (`use`), and who learns the new ones (`publish`). ZeRO, arXiv 1910.02054.

    python zero.py 7e9 --gpu-gb 80         torchrun train.py --dp 4 --zero 3
"""

import argparse

import torch

from collectives import Work, all_gather, reduce_scatter
from ddp import DDP


def bytes_per_parameter(zero, ranks, width=2):
    """(weights, gradients, optimizer) bytes that a rank holds per parameter. 16-bit training keeps
    an fp32 master, exp_avg and exp_avg_sq: 12; wider weights are their own master."""
    adam = 12 if width == 2 else 2 * width
    parts = width, width, adam
    return tuple(part / (ranks if zero >= stage else 1)
                 for part, stage in zip(parts, (3, 2, 1), strict=True))


class ZeRO(DDP):
    """DDP whose buckets are whole layers cut into N equal shards. zero: 1, 2 or 3."""

    def __init__(self, zero, stages, group, *args):
        self.zero, self.shards, self.every_microbatch = zero, group.size, zero >= 2
        self.gathered = {}  # bucket -> Work of its all_gather
        super().__init__(stages, group, *args)
        for stage, layers in stages.items():
            for i, layer in enumerate(layers if zero == 3 else []):
                # the model's first layer takes token ids: its backward reads no weights
                self.watch(layer, layers[i + 1 : i + 2], layers[max(i - 1, stage == 0) : i],
                           reads_weights=stage + i > 0)

    def partition(self, layers):
        """One bucket per layer, in reverse; a tied weight is a unit of its own."""
        groups = []
        for _, params in self.unplaced(layers):
            groups.append([p for p in params if p.tag.tied])
            groups.append([p for p in params if not p.tag.tied])
        return [group for group in reversed(groups) if group]

    def own(self, flat):
        return flat.tensor_split(self.shards)[self.group.rank]

    def place(self, bucket):
        bucket.weight_shard = self.own(bucket.full)
        bucket.grad_shard = torch.zeros_like(bucket.weight_shard)
        if self.zero == 1:
            super().place(bucket)  # the gradient whole
            bucket.weight_shard, bucket.grad_shard = self.own(bucket.full), self.own(bucket.grad)
        if self.zero == 3:
            bucket.weight_shard = bucket.weight_shard.clone()
            bucket.full.untyped_storage().resize_(0)
        bucket.offset = self.group.rank * bucket.weight_shard.numel()

    def zero_grad(self):
        super().zero_grad()
        for bucket in self.buckets if self.zero >= 2 else ():
            bucket.grad_shard.zero_()

    def ready(self, param):
        """Stages 2 and 3: the gradient moves into a bucket that lives until it is reduced. What
        comes with I (LayerNorm, embedding), ahead of the rest of its layer, waits in param.grad.
        """
        if self.zero >= 2 and self.home[param][0] in self.queue:
            self.move(param)
        super().ready(param)

    def move(self, param):
        bucket = self.home[param][1]
        if bucket.grad is None:
            self.land()  # so that no more than one layer's gradients exist
            bucket.grad = bucket.grad_shard.new_zeros(bucket.numel)
        bucket.view(bucket.grad, param).add_(param.grad)
        param.grad = None

    def launch(self, bucket):
        if self.zero == 1:
            return super().launch(bucket, reduce_scatter)
        for param in bucket.params:
            if param.grad is not None:
                self.move(param)
        self.land()
        grad, bucket.grad = bucket.grad, None
        if grad is None:  # a layer without gradient here may have one on another rank
            grad = bucket.grad_shard.new_zeros(bucket.numel)
        self.works.append(reduce_scatter(grad, self.group, async_op=True))
        self.landing = bucket, grad

    def land(self):
        """Wait for the reduction under way and add this rank's slice of it to its shard."""
        while self.works:
            self.works.pop().wait()
            if self.zero >= 2:
                bucket, grad = self.landing
                bucket.grad_shard.add_(self.own(grad))
                self.landing = None

    def finish(self, tie=None):
        self.land()
        super().finish(tie)

    # Stage 3: weights have storage from just before a layer needs them until the next-but-one does

    def watch(self, layer, following, preceding, reads_weights):
        def before_backward(grad):
            self.use([layer], preceding)

        def after_forward(module, args, out):
            if out.requires_grad and reads_weights:
                out.register_hook(before_backward)

        layer.register_forward_pre_hook(lambda module, args: self.use([layer], following))
        layer.register_forward_hook(after_forward)

    def use(self, layers=(), ahead=()):
        """Have the weights of `layers`, start to gather those of `ahead`, free all others."""
        if self.zero < 3:
            return
        now, keep = ({self.home[p][1]: None for layer in ls for p in layer.parameters()}
                     for ls in (layers, [*layers, *ahead]))  # dicts: an order all ranks share
        for bucket in [b for b in self.gathered if b not in keep]:
            self.gathered.pop(bucket).wait()
            bucket.full.untyped_storage().resize_(0)
        for bucket in keep:
            if bucket not in self.gathered:
                # in place: autograd's saved tensors alias this storage
                bucket.full.untyped_storage().resize_(bucket.full.nbytes)
                self.own(bucket.full).copy_(bucket.weight_shard)
                self.gathered[bucket] = all_gather(bucket.full, self.group, async_op=True)
        for bucket in now:
            self.gathered[bucket].wait()

    def after(self, kind, stage, last):
        super().after(kind, stage, last)
        self.use()

    def publish(self, bucket):
        if self.zero == 3:
            return Work()
        return all_gather(bucket.full, self.group, async_op=True)


class Optimizer:
    """torch's AdamW on the shards that a DDP or ZeRO leaves to this rank, for every stage alike.

    16-bit weights have an fp32 master and are rounded from it after each step; wider ones are their
    own master. Decay is for matrices only. `replicas` ranks step the same shard: D in stage 0.
    """

    def __init__(self, dp, lr, betas, weight_decay):
        self.dp = dp
        self.replicas = dp.group.size // dp.shards
        for bucket in dp.buckets:
            weights = bucket.weight_shard
            wide = weights.element_size() > 2
            bucket.master = weights if wide else weights.float()
            groups = [{"params": [], "weight_decay": decay} for decay in (weight_decay, 0)]
            bucket.steps = []  # (tag, the master as the optimizer sees it, its gradient)
            for (tag, master), (_, grad) in zip(bucket.pieces(bucket.offset, bucket.master),
                                                bucket.pieces(bucket.offset, bucket.grad_shard),
                                                strict=True):
                param = torch.nn.Parameter(master)
                groups[len(tag.shape) < 2]["params"].append(param)
                bucket.steps.append((tag, param, grad))
            bucket.adam = None  # an empty shard
            if bucket.steps:
                bucket.adam = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)

    def grad_square(self):
        """This rank's part of the squared global norm: each element of the model counts once."""
        device = self.dp.buckets[0].full.device
        norms = [torch.linalg.vector_norm(grad, dtype=param.dtype)
                 for bucket in self.dp.buckets for _, param, grad in bucket.steps]
        if not norms:
            return torch.zeros((), dtype=torch.double, device=device)
        copies = [tag.copies * self.replicas
                  for bucket in self.dp.buckets for tag, *_ in bucket.steps]
        return (torch.stack(norms).double().square() / torch.tensor(copies, device=device)).sum()

    def step(self, lr, scale=1.0):
        """One AdamW step with the gradients times `scale` (in place, unless they are 16-bit); then
        every rank has the new weights."""
        works = []
        for bucket in self.dp.buckets:
            wide = bucket.master is bucket.weight_shard
            if wide and scale != 1.0:
                bucket.grad_shard.mul_(scale)
            for _, param, grad in bucket.steps:
                param.grad = grad if wide else grad.to(param.dtype).mul_(scale)
            if bucket.steps:
                for group in bucket.adam.param_groups:
                    group["lr"] = lr
                bucket.adam.step()
                bucket.adam.zero_grad()
            if not wide:
                bucket.weight_shard.copy_(bucket.master)
            works.append(self.dp.publish(bucket))
        for work in works:
            work.wait()

    def state_bytes(self):
        """Bytes of the model states on this rank: (by the formula, as the live storages have it).
        Padding counts, but has no moments; those exist from the first step on."""
        width = self.dp.buckets[0].full.element_size()
        per_parameter = sum(bytes_per_parameter(self.dp.zero, self.dp.shards, width))
        formula, live = 0, {}
        for bucket in self.dp.buckets:
            owned = sum(param.numel() for _, param, _ in bucket.steps)
            formula += bucket.numel * per_parameter
            formula -= (len(bucket.master) - owned) * 2 * bucket.master.element_size()
            moments = [state[key] for _, param, _ in bucket.steps
                       for state in [bucket.adam.state[param]]
                       for key in ("exp_avg", "exp_avg_sq") if key in state]
            for x in (bucket.full, bucket.grad, bucket.weight_shard, bucket.grad_shard,
                      bucket.master, *moments):
                if x is not None:
                    live[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return round(formula), sum(live.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"zero.py: {message}\n")
    parser.add_argument("parameters", nargs="?", type=float, default=7e9)
    parser.add_argument("--gpu-gb", type=float, default=80, help="memory of one device, 10^9 bytes")
    parser.add_argument("--width", type=int, default=2, choices=(2, 4, 8), help="bytes per weight")
    args = parser.parse_args()
    print(f"GB of model states per rank, {args.parameters:g} parameters of {args.width} bytes with "
          f"Adam; * fits into {args.gpu_gb:g} GB")
    print(f"{'ranks':>6}" + "".join(f"{'ZeRO-' + str(z):>14}" for z in range(4)))
    for ranks in (2**i for i in range(11)):
        row = [args.parameters * sum(bytes_per_parameter(z, ranks, args.width)) / 1e9
               for z in range(4)]
        print(f"{ranks:6d}" + "".join(f"{gb:12.4g} {'*' if gb <= args.gpu_gb else ' '}"
                                      for gb in row))


if __name__ == "__main__":
    main()
