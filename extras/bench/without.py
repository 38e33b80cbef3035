"""The engine without one of its tricks: all else is the same, so a row gives what the trick earns.

Each trick is switched off by replacing names of a module or class (a constant, a function or two)
while the side is built and during its steps: the two sides of a row take turns in one process.
"""

from contextlib import contextmanager

import torch

import engine.collectives
import engine.context_parallel
import engine.ddp
import engine.optimizer
import engine.parts
import engine.pipeline
import engine.sequence_parallel
import engine.tensor_parallel
import engine.vocabulary_parallel
import engine.zero
from engine.collectives import all_gather
from engine.group import Work
from extras.bench.job import RowMesh, collective, trainer
from model import cross_entropy
from optimizer import AdamWState


@contextmanager
def swapped(owner, **others):
    """Replace some names of a module, or methods of a class."""
    kept = {name: getattr(owner, name) for name in others}
    for name, other in others.items():
        setattr(owner, name, other)
    try:
        yield
    finally:
        for name, own in kept.items():
            setattr(owner, name, own)


def without(owner, build=trainer, **others):
    """A side with some names of a module or class replaced."""
    def peer(job):
        with swapped(owner, **others):
            step = build(job)

        def step_without():
            with swapped(owner, **others):
                return step()

        return step_without

    return peer


# ---- collectives ----

def ring_of_two(tensor, group, op):
    """swap() in two hops, like the ring of more ranks."""
    engine.collectives.ring(tensor, group, op, range(2))


shared_memory = without(RowMesh, collective, meet=lambda self: None)
shared_memory_in_training = without(RowMesh, meet=lambda self: None)
pieces = without(engine.collectives, collective, PIECE=1 << 62)
swap = without(engine.collectives, collective, swap=ring_of_two)
swap_in_training = without(engine.collectives, swap=ring_of_two)

# ---- data parallelism ----

overlap_of_buckets = without(engine.ddp.DDP, launch_full=lambda self: None)  # flush() launches


def clear_gradients(self):
    """zero_grad() that clears the buckets, into which autograd then adds."""
    for bucket in self.buckets:
        if bucket.grad is not None:
            bucket.grad.zero_()
        for param in bucket.params:
            param.grad = bucket.views.get(param)


first_gradient_copied = without(engine.ddp.DDP, zero_grad=clear_gradients)

# ---- ZeRO ----


def publish_and_wait(self):
    """ZeRO1.publish() that returns when all ranks have the new weights."""
    for bucket in self.buckets:
        all_gather(bucket.full, bucket.group)


weights_in_background = without(engine.zero.ZeRO1, publish=publish_and_wait)
gather_weights = engine.zero.ZeRO3.gather_weights
prefetch = without(engine.zero.ZeRO3, gather_weights=lambda self, layers, prefetch=(), **options:
                   gather_weights(self, layers, **options))
gathered_where_read = without(engine.zero.ZeRO3, read_in_backward=lambda self, layer: [layer])

# ---- tensor and sequence parallelism ----

Region = engine.sequence_parallel.Region
start_leave = Region.start_leave
start_enter = Region.start_enter
overlap_of_leaving = without(Region, start_leave=lambda self, x, async_op=True:
                             start_leave(self, x, async_op=False))
overlap_of_entering = without(Region, start_enter=lambda self, x, async_op=True:
                              start_enter(self, x, async_op=False))


class EnteredRegion:
    """Stands for a Region in the backward of a column that has saved its gathered input."""

    def __init__(self, region):
        self.start_leave = region.start_leave
        self.by_rank = region.by_rank

    def start_enter(self, x):
        return lambda: x


def save_gathered(ctx, x, weight, bias, region, defer):
    """ColumnLinear.forward that saves all tokens of its input under --sp, too."""
    x = region.enter(x)
    ctx.save_for_backward(x)
    ctx.weight, ctx.bias = weight, bias
    ctx.region = EnteredRegion(region)
    ctx.defer = defer
    return region.by_sequence(torch.nn.functional.linear(x, weight, bias))


input_gathered_again = without(engine.tensor_parallel.ColumnLinear, forward=save_gathered)


def columns_in_python(model, group, sp, defer):
    """parallelize() that replaces linear layers in a group of one, too. defer: None."""
    engine.tensor_parallel.parallelize(model, group, sp, engine.tensor_parallel.compute_now)


torchs_linear_layers = without(engine.parts, parallelize=columns_in_python)

# ---- pipeline ----

def keep_output(self):
    """finish_send() that keeps the tensor that was sent."""
    work, _ = self.sends.popleft()
    work.wait()


freed_outputs = without(engine.pipeline.Pipeline, finish_send=keep_output)

# ---- ring attention ----


def pass_and_wait(x, received, group):
    """start_passing() that returns when x has been passed on."""
    group.exchange(x, group.next, received, group.prev).wait()
    return Work()


overlap_of_hops = without(engine.context_parallel, start_passing=pass_and_wait)
kernel = engine.context_parallel.kernel
kernel_backward = engine.context_parallel.kernel_backward


# In each hop but a rank's own, half of the scores are hidden. To compute them too takes as long as
# to compute the visible half twice.


def kernel_twice(chosen, q, k, v, causal):
    if not causal:
        kernel(chosen, q, k, v, causal)
    return kernel(chosen, q, k, v, causal)


def kernel_backward_twice(chosen, grad, q, k, v, out, lse, rest, causal):
    if not causal:
        kernel_backward(chosen, grad, q, k, v, out, lse, rest, causal)
    return kernel_backward(chosen, grad, q, k, v, out, lse, rest, causal)


hidden_skipped = without(engine.context_parallel, kernel=kernel_twice,
                         kernel_backward=kernel_backward_twice)

# ---- head, optimizer ----


def loss_of_all_tokens(self, x, targets):
    """ChunkedHead.loss with the logits of all tokens at once."""
    return cross_entropy(self.lm_head(x), targets)


head_in_chunks = without(engine.vocabulary_parallel.ChunkedHead, loss=loss_of_all_tokens)


def update_plainly(self, grads, factor, finite, lr):
    """AdamW.update with the root's AdamW, tensor by tensor."""
    if not hasattr(self, "plain_states"):
        self.plain_states = [AdamWState(master, self.settings(tag)[0])
                             for master, tag in zip(self.masters, self.tags, strict=True)]
    if finite:
        for state, grad in zip(self.plain_states, self.scaled(grads, factor), strict=True):
            state.step(grad, lr, self.cfg.beta1, self.cfg.beta2, int(self.updates))


fused_adamw = without(engine.optimizer.AdamW, update=update_plainly)
