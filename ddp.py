"""Data parallelism: D replicas, each with its slice of the batch; gradients are summed over them.
(Ranks that split sequences, --cp, are replicas, too: then D counts them all.)

Sent per rank and step: 2 (D-1)/D Psi elements for Psi parameters, whatever the number of
microbatches. Held: weights, gradients and optimizer states, all whole. Nothing is averaged: the
loss was divided by the number of tokens in the whole batch before backward, so the sum over all
ranks is the gradient. PyTorch Distributed, arXiv 2006.15704.

    python ddp.py        a small GPT on 4 ranks        torchrun train.py --dp 2
"""

from weakref import WeakMethod

import torch

from collectives import all_reduce
from group import Work, wait_all
from model import build
from run.demonstrations import demonstrate, report_difference
from shard import tag_whole
from sizes import GPTConfig


def plain_data_parallel(params, group):
    """Data parallelism at its plainest. Each rank has run backward on its own part of the batch.
    After: every rank has the gradient of the whole batch."""
    for param in params:
        all_reduce(param.grad, group)


# ---- the same, fast: 1.37 times the speed where messages rule, 1.05 where computing does ----
#   buckets  Parameters lie side by side in flat buffers of 25 MB, in the order in which backward
#            reaches them, and each param.grad becomes a view into one, by one copy a step.
#   overlap  A bucket that is full is all-reduced at once, while backward goes on through earlier
#            layers. With accumulation, only in the last microbatch.


class Bucket:
    """Parameters side by side in one flat buffer, with the same groups to sum gradients over. If it
    is `split` (ZeRO), it is padded and cut into equal shards, one per rank. Makes the parameters
    (torch's meta ones have a shape only) real: views into `full`, filled by initial(its tag)."""

    def __init__(self, params, split, dtype, device, initial, grad_dtype=None):
        self.params, self.grad_dtype = params, grad_dtype or dtype
        self.group, *self.sum_at_end = params[0].shard.sum_over
        self.starts, self.numel = {}, 0  # parameter -> where it begins; length of the buffer
        for param in params:
            self.starts[param] = self.numel
            self.numel += param.numel()
        self.shards = self.group.size if split else 1  # how many ranks it is split over
        self.numel += -self.numel % self.shards  # padding
        self.offset = self.group.rank * self.numel // self.shards if split else 0
        self.own = slice(self.offset, self.offset + self.numel // self.shards)  # this rank's shard
        self.full = torch.zeros(self.numel, dtype=dtype, device=device)  # weights
        self.grad = None  # gradients, laid out alike
        self.views = {}  # parameter -> its part of `grad`, if that lives on from step to step
        self.weight_shard, self.grad_shard = self.full[self.own], None
        self.missing = 0  # gradients yet to come in the backward under way
        for param in params:
            view, value = self.view(self.full, param), initial(param.shard)
            view.narrow(param.shard.dim, 0, value.size(param.shard.dim)).copy_(value)
            real = torch.nn.Parameter(view.data)  # .data: autograd does not see ZeRO-3 refill it
            real.shard = param.shard
            torch.utils.swap_tensors(param, real)  # in place: layers keep the same object

    def view(self, flat, param):
        """What belongs to the parameter in a buffer with this layout, in its shape."""
        return flat.narrow(0, self.starts[param], param.numel()).view(param.shape)

    def pieces(self, flat):
        """(parameter, view) of what this rank's shard, `flat`, holds of each parameter."""
        for param, start in self.starts.items():
            a = max(start - self.offset, 0)
            b = min(start + param.numel() - self.offset, flat.numel())
            if a < b:
                yield param, flat[a:b]


class DDP:
    """Sums gradients over the replicas. stages: {stage: [layers]}, in order of use; the parameters
    are tagged, and become real here. Whoever runs backward calls expect() before and flush() after
    the backward that completes a stage's gradients, then finish(). Then each bucket's `grad_shard`
    has the sums for its `weight_shard`, which this rank's optimizer steps; here both are whole.
    """

    zero, every_microbatch = 0, False  # its ZeRO stage; whether each microbatch is reduced

    def __init__(self, stages, dtype, device, initial, bucket_bytes=25 << 20, grad_dtype=None):
        self.bucket_numel = bucket_bytes // dtype.itemsize
        self.stages = {stage: [] for stage in stages}  # buckets, in the order of backward
        self.home = {}  # parameter -> its bucket
        self.filling = []  # buckets to be launched by the backward under way, in order
        self.works = []  # reductions under way
        users = {}  # parameter -> the layers that use it, as (stage, index); all in order of use
        for stage, layers in stages.items():
            for i, layer in enumerate(layers):
                for param in layer.parameters():
                    users.setdefault(param, []).append((stage, i))
        hook = WeakMethod(self.ready)  # a strong one would be a cycle that no collector sees
        for stage, params in self.partition(users):
            bucket = Bucket(params, self.zero > 0, dtype, device, initial, grad_dtype)
            self.place(bucket)
            self.stages[stage].append(bucket)
            for param in params:
                self.home[param] = bucket
                param.register_post_accumulate_grad_hook(lambda param: hook()(param))
        self.buckets = [bucket for stage in self.stages.values() for bucket in stage]

    def partition(self, users):
        """[(stage, parameters)] in reverse order of use: bucket_bytes at most, or one parameter."""
        found, room = [], {}  # room: (stage, groups to sum over) -> (open bucket, elements left)
        for param, where in reversed(users.items()):
            stage = where[0][0]  # of those that use it, the one that backward reaches last
            bucket, left = room.get((stage, param.shard.sum_over), (None, -1))
            if param.numel() > left:
                bucket, left = [], self.bucket_numel
                found.append((stage, bucket))
            bucket.append(param)
            room[stage, param.shard.sum_over] = bucket, left - param.numel()
        return found

    def place(self, bucket):
        """Where gradients live: here whole, all the time."""
        bucket.grad = torch.zeros_like(bucket.full, dtype=bucket.grad_dtype)
        bucket.grad_shard = bucket.grad[bucket.own]
        if bucket.grad_dtype == bucket.full.dtype:  # else autograd cannot add to them itself
            bucket.views = {param: bucket.view(bucket.grad, param) for param in bucket.params}

    def zero_grad(self):
        """The gradients are gone. The next are copied over them: clearing took 3 ms of 70."""
        for param in self.home:
            param.grad = None
        for bucket in self.buckets:
            if bucket.grad is not None and not bucket.views:
                bucket.grad.zero_()

    def expect(self, stage, params=None):
        """What runs next is the last to add to a stage's gradients: all, or those of `params`."""
        self.filling = list(self.stages[stage])
        for bucket in self.filling:
            bucket.missing = sum(params is None or p in params for p in bucket.params)

    def ready(self, param):
        """A gradient was added to param.grad. autograd calls this, or who has put gradients off."""
        bucket = self.home[param]
        if param.grad is not None:
            self.collect(param, bucket)
        bucket.missing -= 1
        # A bucket waits for those before it, also if it is full: all ranks reduce in one order.
        while self.filling and self.filling[0].missing <= 0:
            self.launch(self.filling.pop(0))

    def collect(self, param, bucket):
        """Have param.grad lie in its bucket; or add it there, if gradients are wider there."""
        if not bucket.views:
            bucket.view(bucket.grad, param).add_(param.grad)
            param.grad = None
        elif param.grad is not bucket.views[param]:
            param.grad = bucket.views[param].copy_(param.grad)

    def flush(self):
        """Backward is over. What has not been launched by now has parameters without gradient."""
        while self.filling:
            self.launch(self.filling.pop(0))

    def launch(self, bucket, reduction=all_reduce):
        for param, view in bucket.views.items():
            if param.grad is None:  # unused in this step: it counts as zero
                param.grad = view.zero_()
        self.works.append(reduction(bucket.grad, bucket.group, async_op=True))

    def finish(self):
        """Wait for the reductions; then sum over the groups that come at the end."""
        wait_all(self.works)
        self.works.clear()
        for bucket in self.buckets:
            for group in bucket.sum_at_end:
                all_reduce(bucket.grad_shard, group)

    def use(self, layers):
        """These layers' weights are about to be read, no others'. DDP always has them all."""

    def release(self):
        self.use([])

    def publish(self, bucket):
        """This shard has new weights. After the Work every rank has them (ZeRO-3: see use)."""
        return Work()


def demo(mesh):
    """One backward of a small GPT: 4 sequences on each rank, against all of them in one process."""
    group, config = mesh.group("dp"), GPTConfig(50, block_size=8, n_layer=2, n_head=2, n_embd=16)
    ids = torch.randint(50, (4 * group.size, 8), generator=torch.Generator().manual_seed(0))
    mine = ids.chunk(group.size)[group.rank]
    alone, plain, fast = (build(config, dtype=torch.double) for _ in range(3))
    alone(ids, ids).backward()
    plain(mine, mine).backward()
    plain_data_parallel(plain.parameters(), group)
    tag_whole(fast, group)
    values = dict(plain.canonical_parameters())  # all three models start alike
    ddp = DDP({0: fast.layers}, torch.double, "cpu", lambda shard: values[shard.name].data, 20_000)
    ddp.expect(0)
    fast(mine, mine).backward()
    under_way = len(ddp.works)
    ddp.flush()
    ddp.finish()
    for name, model in (("plain", plain), ("buckets", fast)):
        report_difference(name, mesh.rank, [(p.grad, q.grad) for p, q in zip(
            model.parameters(), alone.parameters(), strict=True)])
    print(f"rank {mesh.rank}: {under_way} of {len(ddp.buckets)} buckets were on their way when "
          "backward ended")


if __name__ == "__main__":
    demonstrate(demo, dp=4)
