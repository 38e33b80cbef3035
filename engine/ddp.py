"""Data parallelism, overlapped. How much faster than the plain DDP: docs/measured.md.

    buckets  Parameters lie side by side in flat buffers of 25 MB, in the order in which backward
             reaches them. A bucket is one collective. In a step's first backward autograd makes a
             new param.grad: it is copied into the bucket, and param.grad becomes a view of the
             bucket, into which later microbatches add. (Clearing the bucket first took longer.)
    overlap  A full bucket is all-reduced at once, while backward continues through earlier layers.
             With several microbatches, in the last one only.

Sent: as by the root's DDP. Held: the same, and a gradient until it is copied into its bucket.

    python -m extras.show engine.ddp                        a small GPT on 4 ranks
    torchrun train.py --dp 2 --fast ddp         train.py with this file
"""

from weakref import WeakMethod

import torch

from ddp import as_stages, used_by_any
from engine.collectives import all_gather, all_reduce
from group import wait_all
from zero import outside_of, places_of_layers


class Bucket:
    """Parameters side by side in one flat buffer, with the same groups to sum gradients over, and
    either all trained or all frozen (requires_grad is False). Under ZeRO (`split`) the buffer is
    padded and cut into equal shards, one per replica.

    Here each parameter gets its memory, a view into `full`, and its value: the next one of the
    iterator `values`. (train.py makes the model on the meta device: shapes, no memory.)

    Where the gradients are (gradients() completes their sums):
                                          grad              views    grad_shard
      ZeRO-2, 3                           until reduced     {}       a buffer of its own
      DDP, ZeRO-1:
        nothing to sum over               None              {}       None: stay in param.grad
        else                              a buffer          views    part of grad
    With views, param.grad is a view of `grad`. Without views but with `grad` (ZeRO-2, 3),
    param.grad is copied into it, and dropped."""

    def __init__(self, params, split, values, dtype, device):
        self.params = params
        self.trained = params[0].requires_grad  # else frozen: no gradients, no optimizer states
        self.group, *self.sum_at_end = params[0].tag.sum_over  # the replicas; then others
        self.starts = {}  # parameter -> its first element in the buffer
        self.numel = 0  # length of the buffer
        for param in params:
            self.starts[param] = self.numel
            self.numel += param.numel()
        self.filled = self.numel  # beyond are no parameters
        self.num_shards = self.group.size if split else 1  # DDP: one, the whole buffer
        self.numel += -self.numel % self.num_shards  # padding
        shard_numel = self.numel // self.num_shards
        self.offset = self.group.rank * shard_numel if split else 0  # where the shard starts
        self.own = slice(self.offset, self.offset + shard_numel)
        self.full = torch.zeros(self.numel, dtype=dtype, device=device)  # weights
        self.grad = None
        self.views = {}  # parameter -> its view into `grad`
        self.grad_shard = None  # gradients of weight_shard
        self.weight_shard = self.full[self.own]  # what this rank's optimizer steps
        self.missing = 0  # gradients that the current backward has yet to add
        for param in params:
            self.allocate(param, next(values))

    def allocate(self, param, values):
        """Turn a parameter into a view of the buffer that holds these values. The layers keep the
        same Parameter object."""
        view = self.view(self.full, param)
        view.copy_(values)
        # .data: a tensor with a version counter of its own, so that ZeRO-3 may refill the buffer
        # between forward and backward without an error of autograd
        if not param.is_meta:
            param.data = view.data
            return
        real = torch.nn.Parameter(view.data, param.requires_grad)
        real.tag = param.tag
        # swap_tensors: `param` itself, the object that layers and dicts refer to, becomes `real`
        torch.utils.swap_tensors(param, real)

    def view(self, flat, param):
        """The part of a buffer, arranged like `full`, that belongs to the parameter."""
        return flat.narrow(0, self.starts[param], param.numel()).view(param.shape)

    def start_of_piece(self, param):
        """Index of this rank's piece of a parameter in the parameter: 0, or later if the shard cuts
        it. Parameter 100 to 159 of the bucket, shard 120 to 239: 20."""
        return min(max(0, self.offset - self.starts[param]), param.numel())

    def pieces(self, shard):
        """(parameter, view) for each parameter: the piece of it that this rank's shard holds, which
        may be empty. So all replicas list the same parameters."""
        for param, start in self.starts.items():
            first = min(max(start - self.offset, 0), shard.numel())
            last = max(first, min(start + param.numel() - self.offset, shard.numel()))
            yield param, shard[first:last]

    def whole(self, own_pieces, dtype):
        """Put the shards of all replicas together: [(parameter, whole tensor)] of all parameters.
        own_pieces: the (parameter, piece) pairs of this rank's shard, such as those of
        self.pieces(self.weight_shard). All replicas call this together (extras/forks/muon.py)."""
        flat = self.full.new_zeros(self.numel, dtype=dtype)
        for param, piece in own_pieces:
            start = self.starts[param] + self.start_of_piece(param)
            flat[start : start + piece.numel()] = piece
        if self.num_shards > 1:
            all_gather(flat, self.group)
        return [(param, self.view(flat, param)) for param in self.params]


class DDP:
    """Sums gradients over the replicas, in buckets, during backward.

    In, from train.py: this rank's pipeline stages (as many as the schedule has chunks), {stage:
    [layers]} in order of use, with tagged parameters of the meta device. value(tag): this rank's
    slice of an initial value. dtype: of weights. In, from you:
    any module, or a list of layers; and the group of replicas. Members: those in the table of the
    root's DDP (ddp.py), and flush() and grad_added() for pipelines that split the backward
    (engine/pipeline.py). Nobody need call expect() for a model of your own; if expect(0, last=True)
    comes before a step's last backward, DDP and ZeRO-1 send during that backward, else after it.
    Frozen parameters lie in buckets of their own: `frozen_buckets`; `buckets` are the trained ones,
    in the order in which forward uses them.
    Here gradients and weights are whole; ZeRO-1, 2 and 3 (engine/zero.py) override what they split.
    """

    sharded = False
    # True: reduce each microbatch's gradients. False: reduce their sum, in the last microbatch
    every_microbatch = False
    # Names a state that differs from data rank to data rank, such as "rounding errors of --int8"
    # (extras/forks/int8.py). A checkpoint leaves it out, so --resume is refused. "": there is none
    unsaved = ""

    def __init__(self, model, replicas=None, value=None, dtype=None, device="cpu",
                 bucket_bytes=25 << 20):
        self.replicas = replicas
        self.bucket_bytes = bucket_bytes
        self.dtype = dtype  # None: each parameter's own
        # Of a model of your own: is a backward under way? Has expect() been called for the next,
        # and for the last of this step?
        self.in_backward = self.is_expected = self.is_last = False
        self.used = set()  # parameters that this replica has used in this step
        self.model = model
        self.outside = None  # the parameters outside of a module's layers, as one layer more
        stages = self.as_stages(model)
        self.layers = [layer for layers in stages.values() for layer in layers]
        self.stages = {stage: [] for stage in stages}  # buckets, in the order of backward
        self.frozen_buckets = []  # buckets of parameters without gradients
        self.home = {}  # parameter -> its bucket
        self.is_new_step = True  # the gradients in the buckets are those of the step before
        self.filling = []  # buckets that the current backward has yet to launch, in order
        self.works = []  # pending reductions
        users = {}  # parameter -> [(stage, index)] of the layers that use it, in order of use
        for stage, layers in stages.items():
            for i, layer in enumerate(layers):
                for param in layer.parameters():
                    users.setdefault(param, []).append((stage, i))
        # The hook hangs on a parameter that self holds. A strong reference to self would be a cycle
        # through C++, which the gc cannot see
        hook = WeakMethod(self.grad_added)
        partition = self.partition(users)
        values = (value(param.tag) if value else param.data
                  for _, params in partition for param in params)
        for stage, params in partition:
            split = self.is_split(params[0].requires_grad)
            bucket = Bucket(params, split, values, dtype or params[0].dtype, device)
            self.allocate_shards(bucket)
            self.home.update(dict.fromkeys(params, bucket))
            if not bucket.trained:
                self.frozen_buckets.append(bucket)
                continue
            self.stages[stage].append(bucket)
            for param in params:
                param.register_post_accumulate_grad_hook(lambda param: hook()(param))
        self.buckets = [bucket for stage in self.stages.values() for bucket in reversed(stage)]
        self.index = {bucket: i for i, bucket in enumerate(self.buckets + self.frozen_buckets)}
        held = self.held(self.buckets)
        self.params = [param for bucket in self.buckets for param in bucket.params]
        self.weights = [weights for weights, _, _ in held]
        self.tags = [tag for _, tag, _ in held]
        self.starts = [start for _, _, start in held]
        self.frozen = self.held(self.frozen_buckets)

    def as_stages(self, model):
        """The root's as_stages(). But a module's layers are those of places_of_layers() (zero.py),
        and its parameters outside of them are one layer more, the first."""
        stages = as_stages(model, self.replicas)
        if isinstance(model, torch.nn.Module):
            layers = list(dict.fromkeys(parts[i] for parts, i in places_of_layers(model)))
            params = dict.fromkeys(param for _, _, param in outside_of(layers, model))
            self.outside = torch.nn.ParameterList(params)
            stages[0] = [self.outside, *layers]
        return stages

    def is_split(self, trained):
        """Are the buckets of trained, or of frozen, parameters cut into shards?"""
        return False

    def held(self, buckets):
        """[(piece of a parameter that this rank holds, the parameter's tag, start of the piece)]"""
        return [(weights, param.tag, bucket.start_of_piece(param)) for bucket in buckets
                for param, weights in bucket.pieces(bucket.weight_shard)]

    def partition(self, users):
        """Cut the parameters into buckets: [(stage, parameters)], in reverse order of use. A bucket
        has bucket_bytes at most, or one parameter."""
        found = []
        still_open = {}  # (stage, groups to sum over, trained?) -> the bucket that takes more
        for param, where in reversed(users.items()):
            stage, _ = where[0]  # a tied weight: its first user, which backward reaches last
            key = (stage, param.tag.sum_over, param.requires_grad, param.dtype)
            bucket = still_open.get(key)
            limit = self.bucket_bytes // (self.dtype or param.dtype).itemsize
            if bucket is None or sum(p.numel() for p in bucket) + param.numel() > limit:
                bucket = still_open[key] = []
                found.append((stage, bucket))
            bucket.append(param)
        return found

    def allocate_shards(self, bucket):
        """Allocate what this rank keeps of a bucket in addition to its weights: here a buffer for
        whole gradients, for the whole run; none if gradients stay in param.grad (the table of
        Bucket)."""
        nothing_to_sum = bucket.group.size == 1 and not bucket.sum_at_end
        if not bucket.trained or nothing_to_sum:
            return
        bucket.grad = torch.zeros_like(bucket.full)
        bucket.grad_shard = bucket.grad[bucket.own]
        bucket.views = {param: bucket.view(bucket.grad, param) for param in bucket.params}

    def zero_grad(self):
        """Nothing to clear: the next gradients are copied over the old ones."""

    def expect(self, stage, last, params=None):
        """Call before a backward of this stage. last: the stage's last one in a step. params: the
        parameters whose gradients come; None: all of the stage. (A split backward, zero bubble in
        engine/pipeline.py, brings those of matrices later than the rest.) A bucket that waits for
        no gradient is launched at once."""
        self.flush()
        self.is_expected = True
        self.is_last = last
        if last or self.every_microbatch:
            self.filling = list(self.stages[stage])
            for bucket in self.filling:
                bucket.missing = sum(params is None or param in params for param in bucket.params)
            self.launch_full()

    def grad_added(self, param):
        """A hook: autograd is done with this parameter. (If a split backward has deferred the
        gradient, param.grad is None or the sum so far; the pipeline calls grad_added again once
        the gradient is computed.) While `filling` is empty the hook only collects, and the next
        expect() sets the counts again: in the I of a split backward and, unless every_microbatch,
        in all microbatches but the last."""
        self.begin_backward()
        bucket = self.home[param]
        if param.grad is not None:
            self.used.add(param)
            self.collect(param, bucket)
        bucket.missing -= 1
        self.launch_full()

    def begin_backward(self):
        """A model of your own has no pipeline, which would call expect()."""
        if self.replicas and not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            if not self.is_expected:
                self.expect(0, last=False)

    def end_backward(self):
        self.in_backward = self.is_expected = False
        self.launch_rest()

    def launch_full(self):
        """A full bucket waits for the buckets before it, so that all ranks reduce in one order."""
        while self.filling and self.filling[0].missing <= 0:
            self.launch(self.filling.pop(0))

    def collect(self, param, bucket):
        """Move param.grad into its bucket."""
        if bucket.grad is None:  # alone: nothing to sum
            return
        if param.grad is not bucket.views[param]:
            param.grad = bucket.views[param].copy_(param.grad)

    def flush(self):
        """Launch the buckets that the previous backward has left. Before the first backward of a
        step also clear the buckets, where they are to be cleared."""
        self.launch_rest()
        if self.is_new_step:
            self.is_new_step = False
            self.zero_grad()

    def launch_rest(self):
        """Launch the buckets that a backward has left, because a parameter got no gradient."""
        while self.filling:
            self.launch(self.filling.pop(0))

    def launch(self, bucket, reduction=all_reduce):
        """Start the reduction of a bucket."""
        if bucket.grad is None:  # alone: nothing to sum
            return
        for param, view in bucket.views.items():
            if param.grad is None:  # unused in this step: its gradient is zero
                param.grad = view.zero_()
        self.works.append(reduction(bucket.grad, bucket.group, async_op=True))

    def finish(self):
        """Wait for the reductions; then sum over the groups other than the replicas."""
        wait_all(self.works)
        self.works.clear()
        for bucket in self.buckets:
            for group in bucket.sum_at_end:
                all_reduce(bucket.grad_shard, group)

    def gradients(self):
        """After the last backward of a step: the gradient of each of `weights`, summed over the
        ranks that the tag names. They stay as they are until the next expect() or flush()."""
        if self.replicas and not (self.is_last or self.every_microbatch):
            self.expect(0, last=True, params=())  # all buckets wait for nothing: launched
        self.flush()
        self.finish()
        self.is_new_step = True
        self.is_last = False
        used = used_by_any([param in self.used for param in self.params], self.replicas)
        self.used.clear()
        used = dict(zip(self.params, used, strict=True))
        grads = [grad if used[param] else None
                 for bucket in self.buckets for param, grad in self.grad_pieces(bucket)]
        for param in self.home:
            param.grad = None
        return grads

    def grad_pieces(self, bucket):
        """(parameter, this rank's piece of its summed gradient) for a bucket, after finish()."""
        if bucket.grad_shard is not None:
            return bucket.pieces(bucket.grad_shard)
        return [(param, torch.zeros_like(piece) if param.grad is None else param.grad.flatten())
                for param, piece in bucket.pieces(bucket.full)]

    def publish(self):
        """Start to send this rank's new weights to the other replicas. Here every rank has stepped
        every weight."""

    def whole(self):
        """Yields (tag, a copy of this rank's whole slice) of each weight, as forward uses it.
        Collective under ZeRO."""
        seen = set()  # two layers may share a weight
        for layer in self.layers:
            self.gather_weights([layer])
            for param in layer.parameters():
                if param not in seen:
                    seen.add(param)
                    # A copy: callers make a numpy array of it, and torch cannot resize a storage
                    # that numpy shares; but ZeRO-3 resizes this one, to free the weights
                    yield param.tag, param.detach().clone()
        self.gather_weights([])

    def gather_weights(self, layers):
        """Return when the weights of `layers` are whole: ZeRO1 waits for those on their way, ZeRO3
        gathers them and frees all others. Called before a layer runs, by ZeRO's hooks."""
