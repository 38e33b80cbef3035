"""Data parallelism: D replicas, each with its slice of the batch; gradients are summed over them.

Parameters lie side by side in flat buckets, in reverse order of use, and each .grad is a view into
its bucket. During the backward of the last microbatch a bucket that is full is all-reduced at once,
behind the earlier ones, while backward goes on. One reduction a step, whatever the accumulation.

Sent per rank and step: 2 (D-1)/D Psi elements for Psi parameters. Held: weights and gradients
whole. Nothing is averaged here: the loss was divided by the global number of tokens before
backward, so the sum is the gradient. PyTorch Distributed, arXiv 2006.15704.

    torchrun train.py --dp 2
"""

from itertools import accumulate
from weakref import WeakMethod

import torch
import torch.nn as nn

from collectives import Work, all_reduce


class Bucket:
    """Parameters side by side in one flat buffer, padded to a multiple of `ranks`.

    Makes the (meta) parameters real: each becomes a view into `full`, filled by initial(tag), the
    values of this rank's shard. `view` finds the same layout in any buffer of that length.
    """

    def __init__(self, params, ranks, dtype, device, initial):
        self.params = params
        ends = list(accumulate(param.numel() for param in params))
        self.starts = dict(zip(params, [0, *ends], strict=False))
        self.numel = -(-ends[-1] // ranks) * ranks
        self.full = torch.zeros(self.numel, dtype=dtype, device=device)
        self.grad = self.grad_shard = None
        self.views = {}  # parameter -> its part of `grad`, where that lives on from step to step
        self.missing = 0  # gradients yet to come in the backward under way
        for param in params:
            view = self.view(self.full, param).copy_(initial(param.tag))
            real = nn.Parameter(view.data)  # .data: refilling `full` is no change to autograd
            real.tag = param.tag
            torch.utils.swap_tensors(param, real)

    def view(self, flat, param):
        """What belongs to the parameter in `flat`, in its shape."""
        start = self.starts[param]
        return flat[start : start + param.numel()].view(param.shape)

    def pieces(self, offset, shard):
        """(tag, view) of what a shard holds of each parameter, the shard beginning at `offset`."""
        for param, start in self.starts.items():
            a = max(start - offset, 0)
            b = min(start + param.numel() - offset, shard.numel())
            if a < b:
                yield param.tag, shard[a:b]


class DDP:
    """The gradients of one rank's layers, summed over `group`.

    stages: {stage: [layers]} with meta parameters, in order of use; they become real (see Bucket).
    The pipeline calls before() and after() around each action, then finish(): now each bucket's
    `grad_shard` holds the sums for its `weight_shard`, which this rank's optimizer steps.
    """

    zero, every_microbatch = 0, False
    shards = 1  # into how many equal parts a bucket is cut

    def __init__(self, stages, group, dtype, device, initial, bucket_bytes=25 << 20):
        self.group, self.bucket_bytes = group, bucket_bytes
        self.itemsize = torch.empty((), dtype=dtype).element_size()
        self.queue, self.works, self.home, self.stages = {}, [], {}, {}
        self.hooks, self.begun = {}, set()
        ready = WeakMethod(self.ready)  # a hook's reference is out of the garbage collector's sight
        self.arrived = lambda param: ready()(param)
        for stage, layers in stages.items():
            self.stages[stage] = []
            for params in self.partition(layers):
                bucket = Bucket(params, self.shards, dtype, device, initial)
                self.stages[stage].append(bucket)
                self.place(bucket)
                for param in params:
                    self.home[param] = stage, bucket
        self.buckets = [bucket for stage in self.stages.values() for bucket in stage]

    def unplaced(self, layers):
        """(layer, its parameters that no bucket has yet), in order of use."""
        seen = set(self.home)
        for layer in layers:
            yield layer, [p for p in layer.parameters() if not (p in seen or seen.add(p))]

    def partition(self, layers):
        """Lists of parameters in reverse order of use, each of at most bucket_bytes. A tied weight
        is a bucket of its own: the layout at its two ends must be the same."""
        params = [p for _, ps in self.unplaced(layers) for p in ps]
        groups, room = [], 0
        for param in reversed(params):
            size = param.numel() * self.itemsize
            if param.tag.tied or size > room:
                groups.append([])
                room = 0 if param.tag.tied else self.bucket_bytes
            groups[-1].append(param)
            room -= size
        return groups

    def place(self, bucket):
        """Where weights and gradients live: here both whole, all the time."""
        bucket.offset, bucket.weight_shard = 0, bucket.full
        bucket.grad = bucket.grad_shard = torch.zeros_like(bucket.full)
        bucket.views = {param: bucket.view(bucket.grad, param) for param in bucket.params}

    def zero_grad(self):
        """The first gradient of a step is copied over the old one: no bucket has to be cleared."""
        for bucket in self.buckets:
            for param in bucket.params:
                param.grad = None
        self.begun.clear()

    def before(self, kind, stage, last, params=None):
        """The pipeline is about to run F, B, I or W of a stage; `last`: its last B or W of a step.
        If that completes the gradients to be reduced, watch them arrive: for all parameters, or
        those of `params` (W: the others had theirs with I)."""
        if kind in "BW" and (last or self.every_microbatch):
            self.queue[stage] = list(self.stages[stage])
            for bucket in self.stages[stage]:
                bucket.missing = sum(params is None or p in params for p in bucket.params)
        if kind in "BI":
            self.listen(stage, stage in self.queue or stage not in self.begun)
            self.begun.add(stage)

    def listen(self, stage, wanted):
        """Have hooks call ready() where gradients are the first or the last of a step. In between
        they only add up; a call takes 8 us, which on tiny layers is 6% of a step."""
        hooks = self.hooks.setdefault(stage, [])
        if wanted and not hooks:
            hooks += [param.register_post_accumulate_grad_hook(self.arrived)
                      for bucket in self.stages[stage] for param in bucket.params]
        while hooks and not wanted:
            hooks.pop().remove()

    def after(self, kind, stage, last):
        """It has run. What has not been launched by now never will fill."""
        if kind in "BW" and (last or self.every_microbatch):
            for bucket in self.queue.pop(stage, self.stages[stage]):
                self.launch(bucket)

    def ready(self, param):
        """Hook: autograd, or W, has accumulated into param.grad, unless I has put that off."""
        stage, bucket = self.home[param]
        view = bucket.views.get(param)
        if view is not None and param.grad is not None and param.grad is not view:
            param.grad = view.copy_(param.grad)
        bucket.missing -= 1
        queue = self.queue.get(stage)
        while queue and queue[0].missing <= 0:  # in the one order that all ranks share
            self.launch(queue.pop(0))

    def launch(self, bucket, reduction=all_reduce):
        for param, view in bucket.views.items():
            if param.grad is None:  # unused in this step
                param.grad = view.zero_()
        self.works.append(reduction(bucket.grad, self.group, async_op=True))

    def finish(self, tie=None):
        """Wait for the reductions; then sum a tied weight's gradient over its two ends."""
        for work in self.works:
            work.wait()
        self.works.clear()
        for bucket in self.buckets:
            if tie and bucket.params[0].tag.tied:
                all_reduce(bucket.grad_shard, tie)

    def use(self, layers=(), ahead=()):
        """The weights of these layers are about to be read. Here they always can be."""

    def publish(self, bucket):
        """The optimizer has stepped this rank's shard of the weights. Here that is all of them.
        Returns a Work."""
        return Work()
