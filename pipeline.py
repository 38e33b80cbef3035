"""Pipeline parallelism: cut the list of layers into stages, one per rank, and the batch into
microbatches, which flow through the stages as on an assembly line.

Split: the layers; all ranks work at once, each on another microbatch. Sent, per microbatch of b
sequences and boundary between two ranks: the activation forward, its gradient backward, b S C
elements each. Held: 1/P of the layers, and the saved activations of microbatches in flight (forward
done, backward not yet). The price is the bubble: while the pipeline fills and drains, ranks idle,
(P-1)/(m+P-1) of the time for P ranks and m microbatches, or less with the later schedules.

GPipe, arXiv 1811.06965; 1F1B, PipeDream 1806.03377. A schedule lists which rank runs which
microbatch when: schedules.py makes these lists, Pipeline below executes them.

    python pipeline.py        plain and fast on 4 ranks        torchrun train.py --pp 2
"""

from collections import Counter, deque
from contextlib import contextmanager

import torch

from engine.schedules import DIRECTION, lower, make_schedule
from group import Work, wait_all
from model import Head, extra_loss
from schedules import cut, placement


def plain_1f1b(stage, group, batches, shape, tokens):
    """1F1B (one forward, one backward) at its plainest, with one stage on each rank.

    In: stage, this rank's Stage (below); batches, the (ids, targets) of each microbatch of this
    replica, the same on all ranks of the group; shape of an activation, (b, S, C); tokens, the
    number of tokens in the batch of all replicas.
    Out: this rank's parameters have their gradients. Returns this replica's part of the loss per
    token on the last rank, 0 on all others.

    P = 4, rank 1, m = 6, F3 the forward of microbatch 3 and B3 its backward:
    warm up F0 F1, steady state F2 B0 F3 B1 F4 B2 F5 B3, cool down B4 B5.
    """
    # On NCCL (messages between GPUs) two ranks that each send first would wait forever
    assert not group.in_order, "NCCL runs messages in the order they are posted: use Pipeline"
    m, rank, last = len(batches), group.rank, group.size - 1
    in_flight = deque()  # (input, output) of each microbatch between its forward and its backward
    sends, total_loss = [], 0.0  # sends: pending; the library holds the tensors until they left

    def receive(src):
        tensor = torch.empty(shape, dtype=next(stage.parameters()).dtype, device=group.device)
        group.recv(tensor, src).wait()
        return tensor

    def forward(ids, targets):
        nonlocal total_loss
        x = ids  # (b, S)
        if rank > 0:
            x = receive(rank - 1).requires_grad_()  # (b, S, C); backward computes x.grad
        activation, loss = stage(x, targets)
        if rank < last:
            output = activation  # (b, S, C)
            sends.append(group.send(output.detach(), rank + 1))
        else:
            output = loss / tokens
            total_loss += output.item()
        in_flight.append((x, output))

    def backward():  # of the oldest microbatch in flight
        x, output = in_flight.popleft()
        grad_output = receive(rank + 1) if rank < last else None  # None: d(loss)/d(loss) = 1
        output.backward(grad_output)
        if rank > 0:
            sends.append(group.send(x.grad, rank - 1))

    # The backward of a microbatch returns to this rank only after all later ranks have run its
    # forward: until then run forwards, one per later rank. With num_warmup = m this is GPipe.
    num_warmup = min(last - rank, m)
    for batch in batches[:num_warmup]:  # warm up: fill the later stages
        forward(*batch)
    for batch in batches[num_warmup:]:  # steady state: one forward, one backward
        forward(*batch)
        backward()
    for _ in range(num_warmup):  # cool down: drain the later stages
        backward()
    # gloo is torch's message library for CPUs. There a send completes only when its receive is
    # posted. If each rank waited for each send at once, two ranks that send to each other would
    # deadlock: wait here, after all receives.
    wait_all(sends)
    return total_loss


class Stage(torch.nn.Module):
    """A slice of the list of layers. stage(x, targets) returns (activation, loss): the activation
    is None on the last stage; the loss is None on all others, unless their experts have a balance
    loss to add (extra_loss)."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, targets):  # x: token ids (b, S) on the first stage, else (b, S, C)
        for layer in self.layers:
            x = layer(x, targets) if isinstance(layer, Head) else layer(x)
        extra = extra_loss(self.layers)
        if not isinstance(self.layers[-1], Head):
            return x, extra
        return None, x if extra is None else x + extra  # the head returns the loss


def tie_ends(layers, group):
    """Tag the tied embedding, which the first and the last stage both hold: its gradient is the sum
    of two terms, the embedding's on the first stage and the head's on the last. group: the ranks of
    those two stages (Mesh.ends); any other rank is alone in its group, and has nothing to tag."""
    weight = layers[0].wte.weight  # the same object as the head's lm_head.weight
    if group.size > 1:
        weight.shard.shared_by += (group,)
        weight.shard.sum_over += (group,)


# ---- zero bubble: the backward in two parts ----
# The backward of a linear layer is two matrix products: I computes the input's gradient, for which
# the previous rank waits; W computes the weight's gradient, which only the optimizer needs. Zero
# bubble schedules run I at once and defer W to a time when the rank would idle.


class Deferred:
    """Where linear layers leave their weight gradients. The backwards in tensor_parallel.py call
    add(): inside of `with deferred.collect() as queue` add() queues the computation, for
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


# ---- any schedule, fast ----


def receive_early(actions):
    """Move each receive to the place of the receive before it, the first to the front: RF0 F0 RF1
    F1 becomes RF0 RF1 F0 F1."""
    receives = iter([action for action in actions if action.kind in ("RF", "RB")])
    early = [next(receives, None)]
    for action in actions:
        early.append(next(receives, None) if action.kind in ("RF", "RB") else action)
    return [action for action in early if action]


class Pipeline:
    """Executes one rank's list of actions, of any schedule. 1F1B takes as long as plain_1f1b: two
    tricks make up for the generality.

        early receives   on gloo a send completes only when its receive is posted, so receives are
                         posted one ahead of the list: 10% off the step time of tiny stages
        freed outputs    a stage ends in a sum (Block's residual), which saves no values, so
                         backward needs the output's graph only: free the values once sent

    Everywhere below, s is a stage, k a microbatch, and data "F", an activation, or "B", a gradient.
    """

    def __init__(self, stages, where, group, shape, dtype, reducer, deferred):
        self.stages, self.where = stages, where  # {s: Stage} of this rank; where[s]: rank of s
        self.group = group  # the ranks of the pipeline
        self.shape, self.dtype = shape, dtype  # of an activation, (b, S, C)
        self.reducer = reducer  # DDP or ZeRO: sums gradients over the replicas
        self.deferred = deferred  # of the layers: holds weight gradients between I and W
        # (data, s, k) -> the tensor that another stage sends to s, and the Work of its receive
        self.arriving = {}
        self.leaving = {}  # (data, s, k) -> the tensor that s is to send
        self.in_flight = {}  # (s, k) -> (input, output, loss), from F to B or I
        self.weight_work = {}  # (s, k) -> the queue of deferred weight gradients, from I to W
        self.sends = deque()  # pending sends: (Work, tensor)

    def execute(self, actions, batches, tokens, scale=1.0):
        """Execute the actions of engine/schedules.py in order; without autograd if no backward is
        among them. batches: the (ids, targets) of each microbatch. The loss is divided by `tokens`,
        the global number of tokens; its gradient is multiplied by `scale` (float16). Returns this
        rank's part of the loss."""
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
                # ZeRO-2 and 3 reduce gradients after every microbatch, the others after the last
                completes = kind in ("B", "W") and (
                    self.reducer.every_microbatch or action == last[s])
                # B adds all gradients of the stage (None); W only those of matrices that its I
                # deferred: I has added those of LayerNorm, embedding, head and experts
                if completes:
                    self.reducer.expect(s, uses_in(self.weight_work[s, k]) if kind == "W" else None)
                with (self.group.span(kind, stage=s, microbatch=k),
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
                if completes:
                    self.reducer.flush()
                self.reducer.release_weights()
        while self.sends:
            self.finish_send()
        return loss

    def forward(self, s, k, ids, targets, tokens, training):
        x = ids  # (b, S)
        if s > 0:
            x = self.take("F", s, k).requires_grad_(training)  # (b, S, C)
        y, loss = self.stages[s](x, targets)
        if y is not None:
            y = y.contiguous()  # (b, S, C)
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
            grads.append(self.take("B", s, k))  # (b, S, C)
        if loss is not None:
            outputs.append(loss * scale)
            grads.append(None)  # stands for 1; for a tensor of 1 torch would import 0.5 s of code
        torch.autograd.backward(outputs, grads)
        if s > 0 and self.where[s - 1] == self.group.rank:
            self.arriving["B", s - 1, k] = x.grad, Work()
        elif s > 0:
            self.leaving["B", s, k] = x.grad  # (b, S, C)

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
        Unlike in plain_1f1b this is safe: in lower()'s order even sends that block cannot
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
    """Gradients of a GPT cut into 4 or 8 stages, compared with one process's."""
    from show.demonstrations import NoReducer, show_difference, small_gpt
    group, P, m, shape = mesh.group("pp"), 4, 8, (1, 8, 16)
    for name, v in (("plain", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        model, ids = small_gpt(mesh, n_layer=6)
        tie_ends(model.layers, mesh.ends("pp"))
        batches, where = [(row, row) for row in ids.split(1)], placement(name, P, v)
        stages = {s: Stage(model.layers[start:stop]) for s, (start, stop) in enumerate(
            cut(model.config.layer_costs(), P * v)) if where[s] == group.rank}
        if name == "plain":
            plain_1f1b(stages[group.rank], group, batches, shape, tokens=1)
        else:
            actions = lower(make_schedule(name, P, m, v), where)[group.rank]
            pipeline = Pipeline(stages, where, group, shape, torch.double, NoReducer(), Deferred())
            pipeline.execute(actions, batches, tokens=1)
        show_difference(name, mesh, model)


if __name__ == "__main__":
    from show.demonstrations import demonstrate
    demonstrate(demo, pp=4)
