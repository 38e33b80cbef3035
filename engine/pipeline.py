"""The pipeline for all schedules: executes one rank's list of actions.

    any schedule      schedules.py makes the list: F, B, I, W, and the messages between them
    zero bubble       a backward in two parts: I, the gradient of the input, now; W, the gradients
                      of the weights, later

    freed outputs     a stage's output is freed once it was sent. Backward needs its graph, not its
                      values: the last operation is the residual sum, which saves no inputs

1F1B takes 1 to 2% longer than in pipeline.py (docs/measured.md): what this file adds is the other
schedules, and memory.

    python -m extras.show engine.pipeline                   three schedules on 4 ranks
    torchrun train.py --pp 2 --fast pp          train.py with this file
"""

from collections import Counter, deque
from contextlib import contextmanager

import torch

from engine.group import Work
from engine.optimizer import LossScale
from experts import balance_loss
from schedules import DIRECTION, lower, make_schedule, placement, validate


class Stage:
    """Consecutive layers. stage(x, targets) returns (activation, loss, extra). The last stage of
    the model has a loss, any other an activation; the missing one is None. extra: what else the
    stage adds to the objective, the balance loss of its experts; None if it has no experts."""

    def __init__(self, layers, is_last):
        self.layers = layers
        self.is_last = is_last

    def __call__(self, x, targets):  # x: token ids (B, S) on the first stage, else (B, S, C)
        *before, last = self.layers
        for layer in before:
            x = layer(x)
        if self.is_last:
            return None, last(x, targets), balance_loss(self.layers)
        return last(x), None, balance_loss(self.layers)


# ---- zero bubble: the backward in two parts ----
# The backward of a linear layer is two matrix products: I computes the input's gradient, for which
# the previous rank waits; W computes the weight's gradient, which only the optimizer needs. Zero
# bubble schedules run I at once and defer W to a time when the rank would idle.


class Deferred:
    """Where linear layers leave their weight gradients. The backwards in engine/tensor_parallel.py
    call add(): inside of `with deferred.collect() as queue` add() queues the computation, for
    finish_weights(queue) to run later; anywhere else add() computes at once."""

    def __init__(self):
        self.queue = None  # the queue that collect() fills; None outside of collect()

    def add(self, compute, grad, x, *params):
        """Return compute(grad, x, *params), the gradients of params, for autograd to accumulate; or
        queue the computation, and return None for each. grad: of a layer's output; x: its input;
        params: its weight and bias (None for no bias)."""
        if self.queue is None:
            return compute(grad, x, *params)
        self.queue.append((compute, grad, x, params))
        return (None,) * len(params)

    @contextmanager
    def collect(self):
        self.queue = deque()
        try:
            yield self.queue
        finally:
            self.queue = None


def uses_in(queue):
    """{parameter: number of its entries in a queue}. A weight that two layers use has two."""
    return Counter(p for _, _, _, params in queue for p in params if p is not None)


def finish_weights(queue):
    """Compute the deferred gradients and add each to its param.grad. Yields a parameter when its
    gradient is complete, that is, after the last of its entries: the reducer may send it then."""
    remaining = uses_in(queue)
    while queue:
        compute, grad, x, params = queue.popleft()
        for param, value in zip(params, compute(grad, x, *params), strict=True):
            if param is not None:
                param.grad = value if param.grad is None else param.grad.add_(value)
                remaining[param] -= 1
                if remaining[param] == 0:
                    yield param


# ---- any schedule ----


class Pipeline:
    """Executes this rank's list of actions, of any schedule. Everywhere below, s is a stage, k a
    microbatch, and data "F", an activation, or "B", a gradient."""

    def __init__(self, stages, group, cfg, shape, dtype, deferred=None, scale=None):
        """The first five like those of the root's Pipeline (pipeline.py). deferred: where linear
        layers queue weight gradients while I runs (Deferred); scale: the factor of the loss
        (LossScale in engine/optimizer.py)."""
        # where[s]: the pipeline rank of stage s; lists: the actions of all ranks, without messages
        self.lists = make_schedule(cfg.schedule, group.size, cfg.microbatches, cfg.chunks)
        self.where = placement(cfg.schedule, group.size, cfg.chunks)
        validate(self.lists, self.where)
        forwards = [[a for a in actions if a.kind == "F"] for actions in self.lists]
        # This rank's actions, with the messages: in training, and forwards only
        self.actions = lower(self.lists, self.where)[group.rank]
        self.forwards = lower(forwards, self.where)[group.rank]
        # {stage: the action that completes its gradients, the last B or W}
        self.last = {action.stage: action for action in self.actions if action.kind in ("B", "W")}
        self.stages = {s: Stage(layers, is_last=s == len(self.where) - 1)
                       for s, layers in stages.items()}
        self.group = group  # the ranks of the pipeline
        self.shape, self.dtype = shape, dtype  # shape of an activation, (B, S, C); its dtype
        self.tokens = cfg.batch_size * cfg.block_size  # tokens of a step, all ranks
        self.deferred = deferred or Deferred()
        self.scale = scale or LossScale(dtype, group.device)
        # (data, s, k) -> the tensor that another stage sends to s, and the Work of its receive
        self.arriving = {}
        self.leaving = {}  # (data, s, k) -> the tensor that s is to send
        self.in_flight = {}  # (s, k) -> (input, output, losses), from F to B or I
        self.weight_work = {}  # (s, k) -> the queue of deferred weight gradients, from I to W
        self.sends = deque()  # pending sends: (Work, tensor)

    def run(self, batches, reducer=None):
        """Like the root's: forward and backward of all microbatches of a step or, without a
        reducer, forward only. The gradient of the loss is multiplied by the scale. Returns this
        rank's part of the loss."""
        training = reducer is not None
        actions = self.actions if training else self.forwards
        loss = torch.zeros((), dtype=torch.double, device=self.group.device)
        for action in actions:
            kind, s, k = action
            if kind in ("RF", "RB"):
                self.post_receive(kind[1], s, k)
            elif kind in ("SF", "SB"):
                self.send(kind[1], s, k)
            else:
                if training:
                    self.expect(action, reducer)
                with torch.set_grad_enabled(training and kind != "W"):
                    if kind == "F":
                        loss += self.forward(s, k, *batches[k], training)
                    elif kind == "B":
                        self.backward(s, k)
                    elif kind == "I":
                        self.input_backward(s, k)
                    else:
                        self.weight_backward(s, k, reducer)
        while self.sends:
            self.finish_send()
        return loss

    def expect(self, action, reducer):
        """Tell the reducer which gradients come next."""
        kind, s, k = action
        if kind == "B":
            reducer.expect(s, last=action == self.last[s])
        elif kind == "I":  # its gradients are completed by W
            reducer.flush()
        elif kind == "W":
            # W brings what its I deferred: matrices, and the biases of columns. I has brought the
            # rest: LayerNorm, biases of rows, embedding, head, experts
            reducer.expect(s, action == self.last[s], params=uses_in(self.weight_work[s, k]))

    def forward(self, s, k, ids, targets, training):
        """Returns the loss per token, 0 on any but the last stage."""
        x = ids  # (B, S)
        if s > 0:
            x = self.take("F", s, k).requires_grad_(training)  # (B, S, C)
        y, loss, extra = self.stages[s](x, targets)
        if y is not None:
            y = y.contiguous()  # (B, S, C)
            if self.where[s + 1] == self.group.rank:  # no message between stages of one rank
                self.arriving["F", s + 1, k] = y.detach(), Work()
            else:
                # finish_send() frees what was sent. Send a copy if this stage has a loss, whose
                # backward may need y's values. (The balance loss does not; one that you add may.)
                self.leaving["F", s, k] = y.detach() if extra is None else y.detach().clone()
        losses = [part / self.tokens for part in (loss, extra) if part is not None]
        if training:
            self.in_flight[s, k] = x, y, losses
        return 0.0 if loss is None else losses[0].detach()

    def backward(self, s, k):
        x, y, losses = self.in_flight.pop((s, k))
        outputs = [sum(losses) * self.scale.value] if losses else []
        # None stands for 1. Given a tensor, backward() would import torch.fx's symbolic shapes,
        # which takes long: None saves the import where the loss is the only output
        grads = [None] * len(outputs)
        if y is not None:
            outputs.append(y)
            grads.append(self.take("B", s, k))  # (B, S, C)
        if outputs[-1].requires_grad:  # else nothing up to here is trained
            torch.autograd.backward(outputs, grads)
        if s > 0 and self.where[s - 1] == self.group.rank:
            self.arriving["B", s - 1, k] = x.grad, Work()
        elif s > 0:
            self.leaving["B", s, k] = x.grad  # (B, S, C)

    def input_backward(self, s, k):
        """I: backward, with the weight gradients of linear layers left in a queue."""
        with self.deferred.collect() as queue:
            self.backward(s, k)
        self.weight_work[s, k] = queue

    def weight_backward(self, s, k, reducer):
        """W: compute the weight gradients that I has left."""
        for param in finish_weights(self.weight_work.pop((s, k))):
            reducer.grad_added(param)

    def post_receive(self, data, s, k):
        """Post a receive into a new buffer."""
        sender = self.where[s - DIRECTION[data]]
        self.arriving[data, s, k] = self.group.recv_new(self.shape, self.dtype, sender)

    def take(self, data, s, k):
        """Wait for the tensor that arrives for stage s and microbatch k, and return it."""
        tensor, work = self.arriving.pop((data, s, k))
        work.wait()
        return tensor

    def send(self, data, s, k):
        """Start to send; wait for earlier sends until at most two are pending, to bound memory.
        Unlike in the root's pipeline this is safe: in lower()'s order even sends that block cannot
        deadlock."""
        tensor, to = self.leaving.pop((data, s, k)), s + DIRECTION[data]
        self.sends.append((self.group.send(tensor, self.where[to]), tensor))
        while len(self.sends) > 2:
            self.finish_send()

    def finish_send(self):
        """Wait for the oldest pending send, and free the tensor that was sent."""
        work, tensor = self.sends.popleft()
        work.wait()
        tensor.untyped_storage().resize_(0)
