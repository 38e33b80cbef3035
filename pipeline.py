"""Pipeline parallelism: the list of layers is cut into stages, and microbatches flow through them.

A rank holds a stage's layers (or several stages', its chunks). Forward it passes on activations,
backward their gradients: b S C elements per microbatch of b sequences and boundary, each way.
Held: layers / P, and the activations of the microbatches under way. While the pipe fills and
drains, ranks idle: (P-1)/(m+P-1) of the time for m microbatches, less with the other schedules.

GPipe, arXiv 1811.06965; 1F1B, PipeDream 1806.03377. Which rank does what and when is data, and
stands in schedules.py; here it is run.

    python pipeline.py        plain and fast on 4 ranks        python pipeline.py 1f1b 4 8
"""

import sys
from collections import Counter, deque
from contextlib import contextmanager
from itertools import islice

import torch

from group import Work, no_span, wait_all
from model import build, extra_loss
from run.demonstrations import demonstrate, report_difference
from run.signals import end_quietly
from schedules import cut, lower, make_schedule, placement
from sizes import GPTConfig


def plain_1f1b(stage, group, batches, shape, tokens):
    """Pipeline parallelism at its plainest, one stage on each rank: warm up, steady, cool down.

    In: batches, (ids, targets) of each microbatch, the same on every rank; shape, of an
    activation; tokens, the number of them in all batches. Out: gradients in the stage's parameters.
    Returns the loss, which is 0 but on the last rank.
    """
    assert not group.in_order, "NCCL needs sends and receives in a matching order: see Pipeline"
    m, last = len(batches), group.size - 1
    kept, sent, total = deque(), [], 0.0

    def receive(src):
        tensor = torch.empty(shape, dtype=next(stage.parameters()).dtype, device=group.device)
        group.recv(tensor, src).wait()
        return tensor

    def forward(ids, targets):
        nonlocal total
        x = ids if group.rank == 0 else receive(group.rank - 1).requires_grad_()
        y, loss = stage(x, targets)
        if group.rank < last:
            sent.append(group.send(y.detach(), group.rank + 1))
        else:
            y = loss / tokens
            total += y.item()
        kept.append((x, y))

    def backward():  # of the oldest microbatch that is kept
        x, y = kept.popleft()
        torch.autograd.backward(y, receive(group.rank + 1) if group.rank < last else None)
        if group.rank > 0:
            sent.append(group.send(x.grad, group.rank - 1))

    ahead = min(last - group.rank, m)  # with m here instead, this would be GPipe
    for batch in batches[:ahead]:  # warm up: fill the ranks behind this one
        forward(*batch)
    for batch in batches[ahead:]:  # steady: one forward, one backward
        forward(*batch)
        backward()
    for _ in range(ahead):  # cool down
        backward()
    # Nobody waits for its sends before this, so on gloo two that send to each other cannot block.
    wait_all(sent)
    return total


class Stage(torch.nn.Module):
    """A slice of the list of layers. stage(x, targets) -> (activation, None), or (None, loss) on
    the last. Or both: experts want a balance term from each stage."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, targets):
        for layer in self.layers:
            x = layer(x)
        extra = extra_loss(self.layers)
        if not hasattr(layer, "loss"):
            return x, extra
        loss = layer.loss(x, targets)
        return None, loss if extra is None else loss + extra


def tie_ends(layers, group):
    """The first and the last stage each hold the tied embedding, and see a part of its gradient.
    group: the ranks of those two; a rank between them is alone in its group, and ties nothing."""
    weight = layers[0].wte.weight  # the head's lm_head.weight is the same object
    if group.size > 1:
        weight.shard.shared_by += (group,)
        weight.shard.sum_over += (group,)


class Deferred:
    """For zero bubble: where backward leaves work on weight gradients, which no other rank waits
    for. Outside of `collect` it is done at once, and autograd accumulates; inside, it is queued."""

    def __init__(self):
        self.queue = None  # of the microbatch whose I is running

    def add(self, fn, grad, x, *params):
        """Gradients fn(grad, x, *params) of the params, or None for each if they come later."""
        if self.queue is None:
            return fn(grad, x, *params)
        self.queue.append((fn, grad, x, params))
        return (None,) * len(params)

    @contextmanager
    def collect(self):
        self.queue = deque()
        try:
            yield self.queue
        finally:
            self.queue = None


def uses_in(queue):
    """How often each parameter is in a queue: a weight that is used twice has two entries."""
    return Counter(p for *_, params in queue for p in params if p is not None)


def finish_weights(queue):
    """Does the queued work, and yields each parameter once its gradient is complete."""
    left = uses_in(queue)
    while queue:
        fn, grad, x, params = queue.popleft()
        for param, value in zip(params, fn(grad, x, *params), strict=True):
            if param is not None:
                param.grad = value if param.grad is None else param.grad.add_(value)
                left[param] -= 1
                if not left[param]:
                    yield param


class NoReducer:
    """What a Pipeline has for a reducer where nothing is summed: in the demonstration and tests."""

    every_microbatch = False
    expect = grad_added = flush = release_weights = lambda self, *args: None


# ---- any schedule, fast ----


class Pipeline:
    """Runs one rank's list of actions, any schedule's; 1F1B at the plain form's speed. Two tricks:

        receives  on gloo are posted one ahead of the list, as a send there ends only when it meets
                  its receive: saves a tenth of a step on tiny stages
        memory    a stage's output is freed once sent: backward needs its graph, not its numbers

    stages: {stage: Stage}, this rank's own. where: the rank of each stage. shape, dtype: of an
    activation (b, S, C). reducer: DDP or ZeRO, which sums gradients over data ranks as they come.
    deferred: where linear layers leave their weight gradients between I and W.
    """

    def __init__(self, stages, where, group, shape, dtype, reducer, deferred):
        self.stages, self.where, self.group = stages, where, group
        self.shape, self.dtype = shape, dtype
        self.reducer, self.deferred = reducer, deferred
        self.span = no_span  # span(name, ...): a context for whoever traces
        # What is under way, by (stage, microbatch). Tensors that arrive: (tensor, Work, sender)
        self.activations_in, self.grads_in = {}, {}  # a stage's input; the gradient of its output
        self.activations_out, self.grads_out = {}, {}  # its output; the gradient of its input
        self.kept = {}  # (input, output, loss), from forward to backward
        self.weight_work = {}  # what I has left for W
        self.coming = None  # the receives of the list that are yet to be posted
        self.sent = deque()  # (Work, tensor)

    def execute(self, actions, batches, tokens, scale=1.0):
        """Runs the actions in order; without gradients if they have no backward. batches: (ids,
        targets) of each microbatch. The loss is divided by `tokens`, the global count; `scale`
        multiplies the gradients (float16). Returns this rank's part of the loss."""
        training = any(kind in ("B", "I") for kind, _, _ in actions)
        last = {a.stage: a for a in actions if a.kind in "BW"}  # completes a stage's gradients
        loss = torch.zeros((), dtype=torch.double, device=self.group.device)
        self.coming = iter([a for a in actions if a.kind in ("RF", "RB")])
        if not self.group.in_order:  # gloo: one ahead of the list
            self.receive()
        for action in actions:
            kind, s, k = action
            if kind in ("RF", "RB"):
                self.receive()  # on gloo this one is posted already, and the next is posted now
            elif kind == "SF":
                self.send(self.activations_out.pop((s, k)), s, k, s + 1)
            elif kind == "SB":
                self.send(self.grads_out.pop((s, k)), s, k, s - 1)
            else:
                complete = kind in "BW" and (self.reducer.every_microbatch or action == last[s])
                if complete:
                    self.reducer.expect(s, uses_in(self.weight_work[s, k]) if kind == "W" else None)
                with (self.span(kind, stage=s, microbatch=k),
                      torch.set_grad_enabled(training and kind != "W")):
                    if kind == "F":
                        loss += self.forward(s, k, *batches[k], tokens, training)
                    elif kind == "B":
                        self.backward(s, k, scale)
                    elif kind == "I":
                        with self.deferred.collect() as self.weight_work[s, k]:
                            self.backward(s, k, scale)
                    elif kind == "W":
                        for param in finish_weights(self.weight_work.pop((s, k))):
                            self.reducer.grad_added(param)
                if complete:
                    self.reducer.flush()
                self.reducer.release_weights()
        while self.sent:
            self.settle()
        return loss

    def forward(self, s, k, ids, targets, tokens, training):
        x = self.take(self.activations_in, s, k).requires_grad_(training) if s > 0 else ids
        y, loss = self.stages[s](x, targets)
        if y is not None:
            y = y.contiguous()
            out = y.detach()
            if self.where[s + 1] == self.group.rank:
                self.activations_in[s + 1, k] = out, Work(), s
            else:  # sending frees `out`; a loss made of it (see Stage) still needs the numbers
                self.activations_out[s, k] = out if loss is None else out.clone()
        if loss is not None:
            loss = loss / tokens
        if training:
            self.kept[s, k] = x, y, loss
        return 0.0 if loss is None else loss.detach()

    def backward(self, s, k, scale):
        x, y, loss = self.kept.pop((s, k))
        roots = [] if y is None else [(y, self.take(self.grads_in, s, k))]
        if loss is not None:
            roots.append((loss, torch.full_like(loss, scale)))
        torch.autograd.backward(*zip(*roots, strict=True))
        if s > 0 and self.where[s - 1] == self.group.rank:
            self.grads_in[s - 1, k] = x.grad, Work(), s
        elif s > 0:
            self.grads_out[s, k] = x.grad

    def receive(self):
        """Post the next receive of the list, into a buffer of its own."""
        for kind, s, k in islice(self.coming, 1):  # the next one, or none if all are posted
            arriving, sender = self.activations_in, s - 1
            if kind == "RB":
                arriving, sender = self.grads_in, s + 1
            peer = self.where[sender]
            arriving[s, k] = *self.group.recv_new(self.shape, self.dtype, peer), sender

    def take(self, arriving, s, k):
        tensor, work, sender = arriving.pop((s, k))
        with self.span("wait", stage=s, microbatch=k, sender=sender):
            work.wait()
        return tensor

    def send(self, tensor, s, k, to):
        with self.span("send", stage=s, microbatch=k, to=to):
            self.sent.append((self.group.send(tensor, self.where[to]), tensor))
            while len(self.sent) > 2:
                self.settle()

    def settle(self):
        """Wait for the oldest send, and free what it sent."""
        work, tensor = self.sent.popleft()
        with self.span("wait", group="pp"):
            work.wait()
        tensor.untyped_storage().resize_(0)


def demo(mesh):
    """The gradients of a GPT cut into 4 or 8 stages, against the same model in one process."""
    group, config = mesh.group("pp"), GPTConfig(50, block_size=8, n_layer=6, n_head=2, n_embd=16)
    rows = torch.randint(50, (8, 1, 8), generator=torch.Generator().manual_seed(0))
    batches, shape = [(ids, ids) for ids in rows], (1, 8, 16)
    alone = build(config, dtype=torch.double)
    (alone(rows[:, 0], rows[:, 0]) / rows.numel()).backward()
    for name, v in (("plain", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        model, where = build(config, dtype=torch.double), placement(name, 4, v)
        stages = {s: Stage(model.layers[a:b]) for s, (a, b) in enumerate(
            cut(config.layer_costs(), 4 * v)) if where[s] == group.rank}
        if name == "plain":
            plain_1f1b(stages[group.rank], group, batches, shape, rows.numel())
        else:
            actions = lower(make_schedule(name, 4, 8, v), where)[group.rank]
            Pipeline(stages, where, group, shape, torch.double, NoReducer(), Deferred()).execute(
                actions, batches, rows.numel())
        report_difference(name, mesh.rank, [  # without wte: each of the two ends has a term of it
            (p.grad, alone.get_parameter(n).grad) for n, p in model.named_parameters()
            if p.grad is not None and "wte" not in n])


if __name__ == "__main__":
    from planner.draw import schedules_command

    end_quietly()
    if len(sys.argv) > 1:
        schedules_command()
    else:
        demonstrate(demo, pp=4)
