"""ZeRO: of what D data-parallel ranks hold D times over, each holds 1/D. Rank r owns slice r of
every layer's flat buffer and steps it; ZeRO-1, 2 and 3 each split one thing more.

      split over the ranks     bytes per parameter (16-bit training)   elements sent per step
    0 nothing: DDP             16 = 2 weights + 2 gradients + 12 Adam  2 Psi (D-1)/D
    1 optimizer states         4 + 12/D                                2 Psi (D-1)/D
    2 and gradients            2 + 14/D                          (1 + m) Psi (D-1)/D
    3 and weights              16/D                                 3 m Psi (D-1)/D

for m microbatches: 2 and 3 reduce each of them, or the gradient would be held whole after all.
ZeRO, arXiv 1910.02054.

    python zero.py 7e9 --gpu-gb 80         torchrun train.py --dp 4 --zero 3
"""

import argparse
import math

import torch

from collectives import all_gather, own_chunk, reduce_scatter
from ddp import DDP
from group import Work, wait_all
from run.signals import end_quietly
from sizes import bytes_per_parameter


def plain_zero_step(weights, grad, group, step):
    """ZeRO-1 at its plainest: the all-reduce of data parallelism cut into its two halves, with the
    optimizer's step, on one D-th of everything, between them. Nobody sends more than before.
    ZeRO-2 keeps only its own chunk of the gradient, ZeRO-3 also of the weights, between their uses.
    In: weights, the same on every rank, and each rank's own gradient, both flat and whole.
    Out: every rank has the new weights. step(w, g) changes w in place."""
    reduce_scatter(grad, group)  # chunk r of rank r is now the sum; the rest is left over
    step(own_chunk(weights, group), own_chunk(grad, group))  # its states exist on this rank only
    all_gather(weights, group)


class ZeRO1(DDP):
    """Optimizer states are split: gradients are reduce-scattered, new weights gathered."""

    zero = 1

    def partition(self, users):
        """A bucket holds what the same layers use: one layer's weights, or a weight tied between
        two. So ZeRO-3 can gather just what a layer needs. In reverse order of use."""
        units = {}  # (groups to sum over, users) -> parameters
        for param, where in users.items():
            units.setdefault((param.shard.sum_over, tuple(where)), []).append(param)
        # A unit belongs to the stage of its first user, which backward reaches last.
        return [(where[0][0], params) for (_, where), params in reversed(units.items())]

    def launch(self, bucket):
        super().launch(bucket, reduce_scatter)

    def publish(self, bucket):
        return all_gather(bucket.full, bucket.group, async_op=True)


class ZeRO2(ZeRO1):
    """And gradients: each microbatch's are reduce-scattered layer by layer, and this rank keeps its
    slice of them only. No more than one layer's gradients exist whole."""

    zero, every_microbatch = 2, True

    def __init__(self, *args):
        self.landing = None  # the bucket whose reduction is under way
        super().__init__(*args)

    def place(self, bucket):
        bucket.grad_shard = torch.zeros_like(bucket.weight_shard, dtype=bucket.grad_dtype)

    def zero_grad(self):
        super().zero_grad()
        for bucket in self.buckets:
            bucket.grad_shard.zero_()

    def collect(self, param, bucket):
        """A gradient moves into its bucket; one ahead of its layer (LayerNorm's, zero bubble) waits
        in param.grad."""
        if bucket in self.filling:
            self.move(param, bucket)

    def move(self, param, bucket):
        """From param.grad into a whole gradient of the bucket, which lives until it is reduced."""
        if bucket.grad is None or bucket is self.landing:  # no two layers' are whole at a time
            self.land()
            bucket.grad = bucket.grad_shard.new_zeros(bucket.numel)
        bucket.view(bucket.grad, param).add_(param.grad)
        param.grad = None

    def launch(self, bucket):
        for param in bucket.params:
            if param.grad is not None:
                self.move(param, bucket)
        self.land()
        if bucket.grad is None:  # a layer without gradient here may have one on another rank
            bucket.grad = bucket.grad_shard.new_zeros(bucket.numel)
        self.works.append(reduce_scatter(bucket.grad, bucket.group, async_op=True))
        self.landing = bucket

    def land(self):
        """Wait for the reduction under way, and keep this rank's slice of it only."""
        if self.landing:
            self.works.pop().wait()
            bucket, self.landing = self.landing, None
            bucket.grad_shard.add_(bucket.grad[bucket.own])
            bucket.grad = None

    def finish(self):
        self.land()
        super().finish()


class ZeRO3(ZeRO2):
    """And weights: a layer's are gathered just before it needs them, while the layer before it
    computes, and freed behind it. No more than two layers' weights exist whole."""

    zero = 3

    def __init__(self, stages, *args):
        self.gathered = {}  # bucket -> Work of its all_gather
        super().__init__(stages, *args)
        for stage, layers in stages.items():
            first = 1 if stage == 0 else 0  # the embedding's backward reads no weights
            for i, layer in enumerate(layers):
                self.watch(layer, following=layers[i + 1 : i + 2],
                           preceding=layers[max(i - 1, first) : i], reads_weights=i >= first)

    def place(self, bucket):
        super().place(bucket)
        bucket.weight_shard = bucket.weight_shard.clone()
        bucket.full.untyped_storage().resize_(0)

    def watch(self, layer, following, preceding, reads_weights):
        """Have the layer's weights there in forward and backward, and those of the one after it in
        that direction on their way."""
        def after_forward(module, args, out):
            if out.requires_grad and reads_weights:
                out.register_hook(lambda grad: self.use([layer], preceding))

        layer.register_forward_pre_hook(lambda module, args: self.use([layer], following))
        layer.register_forward_hook(after_forward)

    def use(self, layers, ahead=()):
        """Have the weights of `layers`, start to gather those of `ahead`, free all others."""
        # Dicts, unlike sets, have one order on all ranks
        now = {self.home[param]: None for layer in layers for param in layer.parameters()}
        keep = now | {self.home[param]: None for layer in ahead for param in layer.parameters()}
        for bucket in [b for b in self.gathered if b not in keep]:
            self.gathered.pop(bucket).wait()
            bucket.full.untyped_storage().resize_(0)
        for bucket in keep:
            if bucket not in self.gathered:
                # The same storage again: what autograd has saved of these weights points into it
                bucket.full.untyped_storage().resize_(bucket.full.nbytes)
                bucket.full[bucket.own].copy_(bucket.weight_shard)
                self.gathered[bucket] = all_gather(bucket.full, bucket.group, async_op=True)
        for bucket in now:
            self.gathered[bucket].wait()

    def publish(self, bucket):
        return Work()  # nothing to send: use() gathers the new weights when a layer needs them


REDUCERS = (DDP, ZeRO1, ZeRO2, ZeRO3)


class Optimizer:
    """torch's AdamW, one for the shards that any stage leaves to this rank; only matrices decay.
    16-bit weights have an fp32 master, from which a step rounds them; wider ones are their own."""

    def __init__(self, reducer, norm_group, lr, betas, weight_decay):
        self.reducer, self.norm_group = reducer, norm_group
        groups = [{"params": [], "weight_decay": decay} for decay in (weight_decay, 0)]
        for bucket in reducer.buckets:
            wide = bucket.weight_shard.element_size() > 2
            bucket.master = bucket.weight_shard if wide else bucket.weight_shard.float()
            bucket.owned = []  # (parameter of the model, its master on this rank, its gradient)
            for (param, part), (_, grad) in zip(bucket.pieces(bucket.master),
                                                bucket.pieces(bucket.grad_shard), strict=True):
                master = torch.nn.Parameter(part)
                matrix = len(param.shard.shape) > 1 and param.shard.name.endswith("weight")
                groups[0 if matrix else 1]["params"].append(master)
                bucket.owned.append((param, master, grad))
        self.owned = [entry for bucket in reducer.buckets for entry in bucket.owned]
        self.adam = None  # a rank may own nothing
        if self.owned:
            self.adam = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
        # Ranks of the norm's group that hold the same: by the tag, and of those that a gradient is
        # summed over, all that are in the group, unless they split it
        self.copies = torch.tensor([
            param.shard.copies * len({*bucket.group.ranks} & {*norm_group.ranks}) / bucket.shards
            for bucket in reducer.buckets for param, *_ in bucket.owned],
            dtype=torch.double, device=reducer.buckets[0].full.device)

    def grad_square(self):
        """This rank's part of the squared global norm, to be summed over the norm's group. If
        several ranks hold a slice, each adds its share of it: elements count once, and all see an
        overflow on any of them."""
        if not self.owned:
            return torch.zeros((), dtype=torch.double, device=self.copies.device)
        grads = [grad for *_, grad in self.owned]  # one kernel for many of them
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=self.owned[0][1].dtype))
        return (norms.double().square() / self.copies).sum()

    def step(self, lr, scale=1.0):
        """One step, gradients times `scale` (16-bit ones in a copy, which lives until the end of
        the step, others in place). Afterwards every rank has the new weights, or gathers them when
        it uses them (ZeRO-3)."""
        for bucket in self.reducer.buckets:
            wide = bucket.grad_shard.to(bucket.master.dtype)  # itself, if it is that wide
            if scale != 1.0:
                wide.mul_(scale)
            for (_, master, _), (_, grad) in zip(bucket.owned, bucket.pieces(wide), strict=True):
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
        """Whether all of this rank's weights and moments are numbers."""
        held = [master.detach() for _, master, _ in self.owned]
        for _, master, _ in self.owned:
            state = self.adam.state[master]
            held += [state[name] for name in ("exp_avg", "exp_avg_sq") if state]
        norms = torch._foreach_norm(held, math.inf) if held else []  # without a copy of anything
        return not norms or bool(torch.stack(norms).isfinite().all())

    def state_bytes(self):
        """Bytes of the model states on this rank: (by the formula, as the live storages have it).
        Padding counts, but has no moments; those exist from the first step on."""
        width, zero = self.reducer.buckets[0].full.element_size(), self.reducer.zero
        grad_width = self.reducer.buckets[0].grad_dtype.itemsize
        formula, live = 0, {}  # live: address of a storage -> its bytes; tensors may share one
        for bucket in self.reducer.buckets:
            n = sum(master.numel() for _, master, _ in bucket.owned)
            formula += bucket.numel * sum(bytes_per_parameter(zero, bucket.shards, width,
                                                               grad_width))
            formula -= (len(bucket.master) - n) * 2 * bucket.master.element_size()
            held = [bucket.full, bucket.grad, bucket.weight_shard, bucket.grad_shard, bucket.master]
            for _, master, _ in bucket.owned:
                state = self.adam.state[master]
                held += [state["exp_avg"], state["exp_avg_sq"]] if state else []
            for storage in [x.untyped_storage() for x in held if x is not None]:
                live[storage.data_ptr()] = storage.nbytes()
        return round(formula), sum(live.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"zero.py: {message}\n")
    parser.add_argument("parameters", nargs="?", type=float, default=7e9)
    parser.add_argument("--gpu-gb", type=float, default=80, help="memory of one device, 10^9 bytes")
    parser.add_argument("--width", type=int, default=2, choices=(2, 4, 8), help="bytes per weight")
    args = parser.parse_args()
    if not (0 < args.parameters < 1e18 and 0 < args.gpu_gb < 1e18):
        parser.error("parameters and --gpu-gb must be above 0")
    print(f"GB of model states per rank, {args.parameters:g} parameters of {args.width} bytes with "
          f"Adam; * fits into {args.gpu_gb:g} GB")
    print(f"{'ranks':>6}" + "".join(f"{'ZeRO-' + str(z):>14}" for z in range(4)))
    for ranks in (2**i for i in range(11)):
        row = f"{ranks:6d}"
        for z in range(4):
            gb = args.parameters * sum(bytes_per_parameter(z, ranks, args.width)) / 1e9
            row += f"{gb:12.4g} {'*' if gb <= args.gpu_gb else ' '}"
        print(row)


if __name__ == "__main__":
    end_quietly()
    main()
