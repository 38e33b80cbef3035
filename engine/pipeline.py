"""The pipeline as train.py runs it: executes one rank's list of actions, of any schedule.

    any schedule      schedules.py makes the list: F, B, I, W, and the messages between them
    zero bubble       a backward in two parts, I now and W later
    early receives    on gloo a send completes only when its receive is posted, so receives are
                      posted one ahead of the list
    freed outputs     a stage's output is freed once it was sent. Backward needs its graph, not its
                      values: the last operation is the residual sum, which saves no inputs

1F1B is as fast as in pipeline.py (docs/measured.md): what this engine earns is the other schedules,
and memory.

    python -m engine.pipeline        three schedules on 4 ranks        torchrun train.py --pp 2
"""

from collections import Counter, deque
from contextlib import contextmanager
from itertools import pairwise

import torch

from engine.dropout import Dropout
from engine.group import Work
from engine.vocabulary_parallel import ChunkedHead
from experts import balance_loss
from model import Head
from pipeline import tie_ends
from schedules import DIRECTION, cut, lower, make_schedule, placement


class Stage(torch.nn.Module):
    """Consecutive layers. stage(x, targets) returns (activation, loss): the activation is None on
    the last stage; the loss is None on all others, unless their experts have a balance loss to
    add."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, targets):  # x: token ids (B, S) on the first stage, else (B, S, C)
        for layer in self.layers:
            x = layer(x, targets) if isinstance(layer, (Head, ChunkedHead)) else layer(x)
        extra = balance_loss(self.layers)
        if not isinstance(self.layers[-1], (Head, ChunkedHead)):
            return x, extra
        loss = x  # the head returns the loss
        if extra is not None:
            loss = loss + extra
        return None, loss


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


def receive_early(actions):
    """Post each receive in the place of the receive before it, the first at the front: RF0 F0 RF1
    F1 becomes RF0 RF1 F0 F1."""
    places = [i for i, action in enumerate(actions) if action.kind in ("RF", "RB")]
    if not places:
        return actions
    early = list(actions)
    for here, following in pairwise(places):
        early[here] = actions[following]
    early.pop(places[-1])
    return [actions[places[0]], *early]


class Pipeline:
    """Executes one rank's list of actions. Everywhere below, s is a stage, k a microbatch, and data
    "F", an activation, or "B", a gradient."""

    def __init__(self, stages, where, group, shape, dtype, reducer, deferred, dropout):
        self.stages = stages  # {s: Stage} of this rank
        self.where = where  # where[s]: the pipeline rank of stage s
        self.group = group  # the ranks of the pipeline
        self.shape, self.dtype = shape, dtype  # shape of an activation, (B, S, C); its dtype
        self.reducer = reducer  # DDP or ZeRO: sums gradients over the replicas
        self.deferred = deferred  # where linear layers queue weight gradients while I runs
        self.dropout = dropout  # is told which sequences run forward
        # (data, s, k) -> the tensor that another stage sends to s, and the Work of its receive
        self.arriving = {}
        self.leaving = {}  # (data, s, k) -> the tensor that s is to send
        self.in_flight = {}  # (s, k) -> (input, output, loss), from F to B or I
        self.weight_work = {}  # (s, k) -> the queue of deferred weight gradients, from I to W
        self.sends = deque()  # pending sends: (Work, tensor)

    def execute(self, actions, batches, tokens, scale=1.0):
        """Execute the actions (schedules.py) in order; on gloo receives are posted one ahead.
        Without autograd if no backward is among them. batches: the (ids, targets, first) of each
        microbatch (data/batches.py). The loss is divided by `tokens`, the global number of
        tokens; its gradient is multiplied by `scale` (float16). Returns this rank's part of the
        loss."""
        training = any(action.kind in ("B", "I") for action in actions)
        # {stage: the action that completes its gradients, the last B or W}
        last = {action.stage: action for action in actions if action.kind in ("B", "W")}
        loss = torch.zeros((), dtype=torch.double, device=self.group.device)
        for action in actions if self.group.in_order else receive_early(actions):
            kind, s, k = action
            if kind in ("RF", "RB"):
                self.post_receive(kind[1], s, k)
            elif kind in ("SF", "SB"):
                self.send(kind[1], s, k)
            else:
                with (self.reducing(action, last),
                      self.group.span(kind, stage=s, microbatch=k),
                      torch.set_grad_enabled(training and kind != "W")):
                    if kind == "F":
                        loss += self.forward(s, k, *batches[k], tokens, training)
                    elif kind == "B":
                        self.backward(s, k, scale)
                    elif kind == "I":
                        self.input_backward(s, k, scale)
                    else:
                        self.weight_backward(s, k)
                self.reducer.release_weights()
        while self.sends:
            self.finish_send()
        return loss

    @contextmanager
    def reducing(self, action, last):
        """A context around each action. If the action completes gradients of its stage, the reducer
        sums them over the replicas meanwhile: DDP and ZeRO-1 in the last microbatch, ZeRO-2 and 3
        in each."""
        kind, s, k = action
        completes = kind in ("B", "W") and (self.reducer.every_microbatch or action == last[s])
        if completes:
            # W brings what its I deferred: matrices, and the biases of columns. I has brought the
            # rest: LayerNorm, biases of rows, embedding, head, experts. B brings all (None).
            params = uses_in(self.weight_work[s, k]) if kind == "W" else None
            self.reducer.expect(s, params)
        yield
        if completes:
            self.reducer.flush()

    def forward(self, s, k, ids, targets, first, tokens, training):
        self.dropout.first = first
        x = ids  # (B, S)
        if s > 0:
            x = self.take("F", s, k).requires_grad_(training)  # (B, S, C)
        y, loss = self.stages[s](x, targets)
        if y is not None:
            y = y.contiguous()  # (B, S, C)
            if self.where[s + 1] == self.group.rank:  # no message between stages of one rank
                self.arriving["F", s + 1, k] = y.detach(), Work()
            else:
                # finish_send() frees what was sent. Send a copy if this stage has a loss, whose
                # backward may need y's values. (The balance loss does not; one that you add may.)
                self.leaving["F", s, k] = y.detach() if loss is None else y.detach().clone()
        if loss is not None:
            loss = loss / tokens
        if training:
            self.in_flight[s, k] = x, y, loss
        return 0.0 if loss is None else loss.detach()

    def backward(self, s, k, scale):
        x, y, loss = self.in_flight.pop((s, k))
        outputs, grads = [], []
        if y is not None:
            outputs.append(y)
            grads.append(self.take("B", s, k))  # (B, S, C)
        if loss is not None:
            outputs.append(loss * scale)
            # None stands for 1. Given a tensor, backward() would import torch.fx's symbolic shapes,
            # which takes long: None saves the import where the loss is the only output
            grads.append(None)
        if outputs[0].requires_grad:  # else nothing up to here is trained
            torch.autograd.backward(outputs, grads)
        if s > 0 and self.where[s - 1] == self.group.rank:
            self.arriving["B", s - 1, k] = x.grad, Work()
        elif s > 0:
            self.leaving["B", s, k] = x.grad  # (B, S, C)

    def input_backward(self, s, k, scale):
        """I: backward, with the weight gradients of linear layers left in a queue."""
        with self.deferred.collect() as queue:
            self.backward(s, k, scale)
        self.weight_work[s, k] = queue

    def weight_backward(self, s, k):
        """W: compute the weight gradients that I has left."""
        for param in finish_weights(self.weight_work.pop((s, k))):
            self.reducer.grad_added(param)

    def post_receive(self, data, s, k):
        """Post a receive into a new buffer."""
        sender = self.where[s - DIRECTION[data]]
        self.arriving[data, s, k] = self.group.recv_new(self.shape, self.dtype, sender)

    def take(self, data, s, k):
        """Wait for the tensor that arrives for stage s and microbatch k, and return it."""
        tensor, work = self.arriving.pop((data, s, k))
        with self.group.span("wait", stage=s, microbatch=k, sender=s - DIRECTION[data]):
            work.wait()
        return tensor

    def send(self, data, s, k):
        """Start to send; wait for earlier sends until at most two are pending, to bound memory.
        Unlike in the root's pipeline this is safe: in lower()'s order even sends that block cannot
        deadlock."""
        tensor, to = self.leaving.pop((data, s, k)), s + DIRECTION[data]
        with self.group.span("send", stage=s, microbatch=k, to=to):
            self.sends.append((self.group.send(tensor, self.where[to]), tensor))
            while len(self.sends) > 2:
                self.finish_send()

    def finish_send(self):
        """Wait for the oldest pending send, and free the tensor that was sent."""
        work, tensor = self.sends.popleft()
        with self.group.span("wait"):
            work.wait()
        tensor.untyped_storage().resize_(0)


def demo(mesh):
    """Gradients of three schedules, compared with one process's."""
    from show.demonstrations import NoReducer, show_difference, small_gpt
    group = mesh.group("pp")
    P = group.size
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        model, ids = small_gpt(mesh, n_layer=6)
        tie_ends(model.layers, mesh.ends("pp"))
        batches = [(row, row, None) for row in ids.split(1)]
        where = placement(name, P, v)
        cuts = cut(model.config.layer_costs(), P * v)
        stages = {s: Stage(model.layers[start:stop]) for s, (start, stop) in enumerate(cuts)
                  if where[s] == group.rank}
        actions = lower(make_schedule(name, P, len(batches), v), where)[group.rank]
        pipeline = Pipeline(stages, where, group, (1, 8, 16), torch.double, NoReducer(), Deferred(),
                            Dropout())
        pipeline.execute(actions, batches, tokens=1)
        show_difference(name, mesh, model)


if __name__ == "__main__":
    from show.demonstrations import demonstrate_engine
    demonstrate_engine(demo, pp=4)
