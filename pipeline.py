"""Pipeline parallelism: cut the list of layers into stages, one or several per rank, and the batch
into microbatches, which flow through the stages as on an assembly line.

Split: the layers; all ranks work at once, each on a different microbatch. Sent, per microbatch and
boundary between two ranks: the activation forward, its gradient backward, B S C elements each.
Held: 1/P of the layers, and the saved activations of microbatches in flight (forward done, backward
not yet): all m under GPipe, at most P - rank under 1F1B. (gloo and NCCL also hold what was sent,
until the step ends; shared memory does not.)

The price is the bubble: while the pipeline fills and drains, ranks idle, (P-1)/(m+P-1) of the time
for P ranks and m microbatches. This file runs the lists of schedules.py: GPipe, arXiv 1811.06965;
1F1B, PipeDream 1806.03377; interleaved, 2104.04473; zero bubble, 2401.10241.

    torchrun train.py --pp 2        python -m extras.show pipeline: on 4 ranks
"""

from collections import deque

import torch

from collectives import wait_all
from experts import balance_loss
from schedules import SHIFT, make_schedule, message_of, placement


def order_of_messages(lists, where, rank):
    """{other rank: the tensors that it sends to this rank, in the order in which it sends them}. A
    tensor is named (what, stage that needs it, microbatch), such as ("gradient", 0, 3)."""
    found = {other: [] for other in range(len(lists))}
    for other, actions in enumerate(lists):
        for action in actions:
            message = message_of(action, where)
            if message:
                _, stage, _ = message
                if where[stage] == rank:
                    found[other].append(message)
    return found


class Pipeline:
    """Runs this rank's stages, {number: [layers]}, on the microbatches of a step.

    group: the ranks of the pipeline. From cfg: the schedule, the number of microbatches, and the
    tokens of a whole batch (of all replicas), by which the loss is divided. shape, dtype: those of
    an activation, (B, S, C). deferred: the list to which a backward that is cut in two appends its
    deferred products (tensor_parallel.DeferredProduct). scale: the factor of the loss, a tensor
    (optimizer.LossScale).

    Zero bubble cuts B into I and W: I computes the gradient of the stage's input now, because the
    rank before waits for it; W computes the gradients of its matrices later."""

    def __init__(self, stages, group, cfg, shape, dtype, deferred, scale):
        self.stages = stages
        self.group = group
        self.shape, self.dtype = shape, dtype
        self.deferred = deferred
        self.scale = scale
        self.tokens = cfg.batch_size * cfg.block_size
        self.where = placement(cfg.schedule, group.size)  # the rank of each stage
        self.lists = make_schedule(cfg.schedule, group.size, cfg.microbatches)
        # In a validation only the forwards run
        self.forwards = [[a for a in actions if a.kind == "F"] for actions in self.lists]
        # {stage: the action that completes its gradients, the last B or W of the step}
        self.final_action = {a.stage: a for a in self.lists[group.rank] if a.kind in ("B", "W")}
        # What the other ranks send to this one, in training and in a validation
        self.all_messages = order_of_messages(self.lists, self.where, group.rank)
        self.forward_messages = order_of_messages(self.forwards, self.where, group.rank)
        self.incoming = {}  # other rank -> what it has yet to send in this step
        # (what, stage, microbatch) -> a tensor that has come and is not needed yet
        self.arrived = {}
        self.in_flight = {}  # (stage, microbatch) -> (input, outputs), from F to B or I
        self.weight_work = {}  # (stage, microbatch) -> deferred products, from I to W
        self.sends = []  # Works

    def run(self, microbatches, reducer=None):
        """Forward and backward of all microbatches of a step; without a reducer forward only.

        In: [(ids, targets)], the microbatches of this replica, the same on all ranks of the
        group; the reducer of this rank's gradients (ddp.py).
        Out: the reducer can give the gradients. Returns this rank's part of the loss per token,
        without the balance loss, 0 without the last stage: a float64 tensor.
        """
        if reducer:
            lists, messages = self.lists, self.all_messages
        else:
            lists, messages = self.forwards, self.forward_messages
        self.incoming = {other: deque(names) for other, names in messages.items()}
        loss = torch.zeros((), dtype=torch.double, device=self.group.device)
        for action in lists[self.group.rank]:
            kind, stage, k = action
            is_final = action == self.final_action[stage]
            if kind == "F":
                with torch.set_grad_enabled(reducer is not None):
                    loss += self.forward(stage, k, *microbatches[k])
            elif kind == "B" and self.deferred is None:
                reducer.expect(stage, is_final)
                self.backward(stage, k)
            else:  # a schedule that splits backwards: I, W or, in a fork, a whole B
                if kind in ("I", "B"):
                    self.backward(stage, k)
                    self.weight_work[stage, k] = [*self.deferred]
                    self.deferred.clear()
                if kind in ("W", "B"):
                    self.add_weight_gradients(stage, k)
                    reducer.complete(stage, is_final)
        # gloo completes a send only when its receive is posted: if each rank waited for each send
        # at once, two ranks that send to each other would wait forever
        wait_all(self.sends)
        self.sends.clear()
        return loss

    def forward(self, stage, k, ids, targets):
        """F. Returns this microbatch's part of the loss per token, 0 without the last stage."""
        x = ids  # (B, S)
        if stage > 0:
            x = self.take("activation", stage, k)  # (B, S, C); backward computes its gradient
            x.requires_grad_(torch.is_grad_enabled())
        *layers, last_layer = self.stages[stage]
        y = x
        for layer in layers:
            y = layer(y)
        has_head = stage == len(self.where) - 1
        if has_head:  # the model's last layer, which returns the loss
            y = last_layer(y, targets) / self.tokens
        else:
            y = last_layer(y).contiguous()
        outputs = [y]
        balance = balance_loss(self.stages[stage])  # the balance loss of this stage's experts
        if balance is not None:
            outputs.append(balance / self.tokens)
        if torch.is_grad_enabled():
            self.in_flight[stage, k] = x, outputs
        if has_head:
            return y.detach()
        self.pass_on("activation", stage, k, y.detach())
        return 0.0

    def backward(self, stage, k):
        """B, or I. In an I, DeferredProduct appends to self.deferred."""
        x, outputs = self.in_flight.pop((stage, k))
        # The gradient of a loss is 1, for which autograd takes None. (Given a tensor, as on the
        # other stages, autograd imports a part of the compiler: half a second, and 25 MB)
        grads = [None] * len(outputs)
        if stage < len(self.where) - 1:
            grads[0] = self.take("gradient", stage, k)  # (B, S, C)
        roots = []  # (output, its gradient)
        for y, grad in zip(outputs, grads, strict=True):
            if y.requires_grad:  # not, if a fork has frozen all weights before it
                roots.append((y * self.scale if grad is None else y, grad))
        if roots:
            torch.autograd.backward(*zip(*roots, strict=True))
        if stage > 0:
            self.pass_on("gradient", stage, k, x.grad)

    @torch.no_grad()
    def add_weight_gradients(self, stage, k):
        """W: compute the deferred products of this microbatch's I."""
        for weight, grad, x in self.weight_work.pop((stage, k)):
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
            weight.grad = grad_weight if weight.grad is None else weight.grad.add_(grad_weight)

    def pass_on(self, what, stage, k, tensor):
        """Give a stage's result, an activation or a gradient, to the stage after or before."""
        to = stage + SHIFT[what]
        if self.where[to] == self.group.rank:
            self.arrived[what, to, k] = tensor
        else:
            self.sends.append(self.group.send(tensor, self.where[to]))

    def take(self, what, stage, k):
        """Return the tensor that `stage` needs for microbatch k. A message carries no name: those
        of a rank come in the order of its actions, and a tensor that is not needed yet is kept."""
        source = self.where[stage - SHIFT[what]]
        while (what, stage, k) not in self.arrived:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.group.device)
            self.group.recv(tensor, source).wait()
            self.arrived[self.incoming[source].popleft()] = tensor
        return self.arrived.pop((what, stage, k))


def tie_ends(all_layers, group):
    """Tag the tied embedding, which the first and the last stage both hold: its gradient is the sum
    of two terms, the embedding's on the first stage and the head's on the last. all_layers: those
    of the whole model, before they are cut into stages. group: the ranks of those two stages
    (Mesh.ends); any other rank is alone in its group, and has nothing to tag."""
    weight = all_layers[0].wte.weight
    is_tied = weight is all_layers[-1].lm_head.weight
    if is_tied and group.size > 1:
        weight.tag.shared_by += (group,)
        weight.tag.sum_over += (group,)
