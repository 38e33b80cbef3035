"""Pipeline parallelism: cut the list of layers into stages, one or several per rank, and the batch
into microbatches, which flow through the stages as on an assembly line.

Split: the layers; all ranks work at once, each on a different microbatch. Sent, per microbatch and
boundary between two ranks: the activation forward, its gradient backward, B S C elements each.
Held: 1/P of the layers, and the saved activations of microbatches in flight (forward done, backward
not yet): all m under GPipe, at most P - rank under 1F1B. (gloo and NCCL also hold what was sent,
until the step ends; shared memory does not.)

The price is the bubble: while the pipeline fills and drains, ranks idle, under GPipe and 1F1B
(P-1)/(m+P-1) of the time for P ranks and m microbatches. schedules.py has these and two others,
with their papers; this file runs the lists that it makes.

    python train.py --pp 2
    python -m extras.show pipeline  # on 4 ranks
"""

from collections import deque

import torch

from collectives import wait_all
from experts import balance_loss
from schedules import SHIFT, make_lists, message_name, placement


def names_of_messages(lists, where, rank):
    """{other rank: the names of the messages that it sends to this rank, in the order in which it
    sends them}. A name is (what, stage that needs it, microbatch), such as ("gradient", 0, 3)."""
    found = {other: [] for other in range(len(lists))}
    for other, actions in enumerate(lists):
        for action in actions:
            name = message_name(action, where)
            if name:
                _, stage, _ = name
                if where[stage] == rank:
                    found[other].append(name)
    return found


class Pipeline:
    """Runs this rank's stages, {number: [layers]}, on the microbatches of a step.

    group: the ranks of the pipeline. From cfg: the schedule, the number of microbatches, and the
    tokens of a whole batch (of all replicas), by which the loss is divided. shape, dtype: those of
    an activation, (B, S, C). deferred: the list to which a backward that is cut in two, I and W,
    appends its deferred products (tensor_parallel.DeferredProduct); None: backwards are whole.
    loss_factor: a tensor (optimizer.LossScale).

    No deadlock: a rank waits for its sends after its last action, and for a message when its next
    action needs the message."""

    def __init__(self, stages, group, cfg, shape, dtype, deferred, loss_factor):
        self.stages = stages
        self.group = group
        self.shape, self.dtype = shape, dtype
        self.deferred = deferred
        self.loss_factor = loss_factor
        self.num_tokens = cfg.batch_size * cfg.block_size
        self.where = placement(cfg.schedule, group.size)  # the rank of each stage
        self.lists = make_lists(cfg.schedule, group.size, cfg.microbatches)
        # In a validation only the forwards run
        self.forwards = [[a for a in actions if a.kind == "F"] for actions in self.lists]
        # {stage: the action that completes its gradients, the last B or W of the step}
        self.final_action = {a.stage: a for a in self.lists[group.rank] if a.kind in ("B", "W")}
        # What the other ranks send to this one, in training and in a validation
        self.all_names = names_of_messages(self.lists, self.where, group.rank)
        self.forward_names = names_of_messages(self.forwards, self.where, group.rank)
        self.incoming = {}  # other rank -> names of the messages still to be received, in order
        self.arrived = {}  # name -> a tensor that was received and is not needed yet
        self.awaiting_backward = {}  # (stage, microbatch) -> (input, outputs)
        self.weight_work = {}  # (stage, microbatch) -> deferred products, from I to W
        self.sends = []  # Works of the step's sends

    def run(self, microbatches, reducer=None):
        """Forward and backward of all microbatches of a step; without a reducer forward only.

        In: [(ids, targets)], this rank's tokens of the microbatches, the same on all ranks of the
        group; the reducer of this rank's gradients (ddp.py).
        After: reducer.gradients() may be called. Returns the loss of this rank's tokens, without
        the balance loss, over the tokens of the whole batch; 0 without the last stage; the same on
        all tensor ranks: a float64 tensor.
        """
        if reducer:
            lists, names_from = self.lists, self.all_names
        else:
            lists, names_from = self.forwards, self.forward_names
        self.incoming = {other: deque(names) for other, names in names_from.items()}
        loss = torch.zeros((), dtype=torch.double, device=self.group.device)
        for action in lists[self.group.rank]:
            kind, stage, k = action
            if kind == "F":
                with torch.set_grad_enabled(reducer is not None):
                    loss += self.forward(stage, k, *microbatches[k])
            elif self.deferred is None:  # B
                reducer.expect(stage, is_final=action == self.final_action[stage])
                self.backward(stage, k)
            else:  # a schedule with I and W. (A B among them runs both, one after the other)
                if kind in ("I", "B"):
                    self.backward(stage, k)
                    self.weight_work[stage, k] = [*self.deferred]
                    self.deferred.clear()
                if kind in ("W", "B"):
                    self.add_weight_gradients(stage, k)
                    reducer.complete(stage, is_final=action == self.final_action[stage])
        # A send may be complete only when its receive is posted (gloo, NCCL; shared memory does not
        # wait). If each rank waited for each send at once, two ranks that send to each other would
        # wait forever
        wait_all(self.sends)
        self.sends.clear()
        return loss

    def forward(self, stage, k, ids, targets):
        """F. Returns this microbatch's part of the loss per token, 0 without the last stage."""
        x = ids  # (B, S)
        if stage > 0:
            x = self.take("activation", stage, k)  # (B, S, C); backward computes its gradient
            x.requires_grad_(torch.is_grad_enabled())
        *layers, last_of_stage = self.stages[stage]
        y = x
        for layer in layers:
            y = layer(y)
        has_head = stage == len(self.where) - 1
        if has_head:  # the model's last layer, which returns the loss
            result = last_of_stage(y, targets) / self.num_tokens
        else:
            result = last_of_stage(y).contiguous()  # messages take contiguous tensors
        outputs = [result]
        balance = balance_loss(self.stages[stage])  # the balance loss of this stage's experts
        if balance is not None:
            outputs.append(balance / self.num_tokens)
        if torch.is_grad_enabled():
            self.awaiting_backward[stage, k] = x, outputs
        if has_head:
            return result.detach()
        self.pass_on("activation", stage, k, result.detach())
        return 0.0

    def backward(self, stage, k):
        """B, or I. In an I, DeferredProduct appends to self.deferred."""
        x, outputs = self.awaiting_backward.pop((stage, k))
        grads = [None] * len(outputs)  # None: 1, the gradient of a loss
        if stage < len(self.where) - 1:
            grads[0] = self.take("gradient", stage, k)  # (B, S, C)
        roots, grads_of_roots = [], []
        for y, grad in zip(outputs, grads, strict=True):
            if y.requires_grad:  # False if a fork has frozen all weights before it
                roots.append(y * self.loss_factor if grad is None else y)
                grads_of_roots.append(grad)
        if roots:
            torch.autograd.backward(roots, grads_of_roots)
        if stage > 0:
            self.pass_on("gradient", stage, k, x.grad)  # contiguous, like x

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
        """Return the tensor that `stage` needs for microbatch k. Messages do not carry their names:
        a rank's messages come in the order of its actions, so this rank knows the name of each. A
        tensor that is not needed yet is kept."""
        source = self.where[stage - SHIFT[what]]
        while (what, stage, k) not in self.arrived:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.group.device)
            self.group.recv(tensor, source).wait()
            self.arrived[self.incoming[source].popleft()] = tensor
        return self.arrived.pop((what, stage, k))


def tie_ends(all_layers, group):
    """Tag the tied embedding, which the first and the last stage both hold: its gradient is the sum
    of two terms, the embedding's on the first stage and the head's on the last. all_layers: the
    layers of the whole model, before they are cut into stages. group: the ranks of those two stages
    (Mesh.ends); any other rank is alone in its group, and has nothing to tag."""
    weight = all_layers[0].wte.weight
    is_tied = weight is all_layers[-1].lm_head.weight
    if is_tied and group.size > 1:
        weight.tag.shared_by += (group,)
        weight.tag.sum_over += (group,)
