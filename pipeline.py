"""Pipeline parallelism: cut the list of layers into stages, one per rank, and the batch into
microbatches, which flow through the stages as on an assembly line.

Split: the layers; all ranks work at once, each on a different microbatch. Sent, per microbatch and
boundary between two ranks: the activation forward, its gradient backward, B S C elements each.
Held: 1/P of the layers, and the saved activations of microbatches in flight (forward done, backward
not yet): all m under GPipe, at most P - rank under 1F1B. (Here also the gradients that were sent,
until the step ends.)

The price is the bubble: while the pipeline fills and drains, ranks idle, (P-1)/(m+P-1) of the time
for P ranks and m microbatches. GPipe, arXiv 1811.06965; 1F1B, PipeDream 1806.03377.

    python -m extras.show pipeline        both on 4 ranks
"""

from collections import deque

import torch

from experts import balance_loss
from group import Work, wait_all
from schedules import SCHEDULES


class Pipeline:
    """Runs this rank's stage, {number: [layers]}, on the microbatches of a step.

    group: the ranks of the pipeline, one for each stage. From cfg: the schedule, the number of
    microbatches, and the tokens of a whole batch (of all replicas), by which the loss is divided.
    shape, dtype: those of an activation, (B, S, C).

    P = 4, rank 1, m = 6, F3 the forward of microbatch 3 and B3 its backward. GPipe runs
    F0 F1 F2 F3 F4 F5, then B0 B1 B2 B3 B4 B5. 1F1B: warm up F0 F1, steady state F2 B0 F3 B1 F4 B2
    F5 B3, cool down B4 B5.
    """

    def __init__(self, stages, group, cfg, shape, dtype):
        [(self.stage, self.layers)] = stages.items()  # one stage per rank
        self.group = group
        self.is_first = group.rank == 0
        self.is_last = group.rank == group.size - 1
        self.shape = shape
        self.dtype = dtype
        self.tokens = cfg.batch_size * cfg.block_size
        # "F", a forward, and "B", a backward, in their order
        self.order = SCHEDULES[cfg.schedule].actions(group.size, cfg.microbatches, 1, group.rank)

    def receive(self, source):
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.group.device)
        self.group.recv(tensor, source).wait()
        return tensor

    def forward(self, ids, targets):
        """Returns (input, outputs for backward, pending send) of a microbatch."""
        # (B, S) token ids on the first rank; else (B, S, C), and backward computes its gradient
        x = ids if self.is_first else self.receive(self.group.rank - 1).requires_grad_()
        *before, last = self.layers
        y = x
        for layer in before:
            y = layer(y)
        if self.is_last:  # `last` is the model's head, which returns the loss
            y = last(y, targets) / self.tokens
        else:
            y = last(y)
        outputs = [y]  # last rank: this microbatch's part of the loss per token; else (B, S, C)
        balance = balance_loss(self.layers)  # that of this stage's experts
        if balance is not None:
            outputs.append(balance / self.tokens)
        if self.is_last:
            return x, outputs, Work()
        return x, outputs, self.group.send(y.detach().contiguous(), self.group.rank + 1)

    def backward(self, x, outputs, send):
        """Backward of a microbatch, given what forward() returned. Returns x, with its gradient."""
        grads = [None] * len(outputs)  # autograd takes None as 1, the gradient of a loss
        if not self.is_last:
            grads[0] = self.receive(self.group.rank + 1)  # (B, S, C)
            send.wait()  # returns at once: the gradient came back, so the output has arrived
        if outputs[0].requires_grad:  # else nothing up to here is trained
            torch.autograd.backward(outputs, grads)
        return x

    def run(self, batches, reducer=None):
        """Forward and backward of all microbatches of a step; without a reducer forward only.

        In: the (ids, targets) of each microbatch of this replica, the same on all ranks of the
        group; the reducer of this rank's gradients (ddp.py), which is told of each backward before
        it runs.
        Out: the reducer can give the gradients. Returns this replica's part of the loss per token,
        without the balance loss, on the last rank, 0 on all others: a float64 tensor.
        """
        to_forward = deque(batches)
        in_flight = deque()  # what forward() returned for microbatches without a backward yet
        # Pending sends of gradients. A send of gloo completes only when its receive is posted: if
        # each rank waited for each send at once, two ranks that send to each other would deadlock.
        # A pending send keeps its tensor alive, so these take memory until the step ends
        grad_sends = []
        loss = torch.zeros((), dtype=torch.double, device=self.group.device)
        num_backwards = 0
        with torch.set_grad_enabled(reducer is not None):
            for action in self.order:
                if action == "F":
                    x, outputs, send = self.forward(*to_forward.popleft())
                    in_flight.append((x, outputs, send))
                    if self.is_last:
                        loss += outputs[0].detach()
                elif reducer is not None:
                    num_backwards += 1
                    reducer.expect(self.stage, last=num_backwards == len(batches))
                    x = self.backward(*in_flight.popleft())  # the oldest microbatch in flight
                    if not self.is_first:
                        grad_sends.append(self.group.send(x.grad, self.group.rank - 1))
        # Only in validation: in training each backward has waited for its microbatch's send
        wait_all([send for _, _, send in in_flight])
        wait_all(grad_sends)
        return loss


def tie_ends(all_layers, group):
    """Tag the tied embedding, which the first and the last stage both hold: its gradient is the sum
    of two terms, the embedding's on the first stage and the head's on the last. all_layers: the
    whole model's, before they are cut into stages. group: the ranks of those two stages
    (Mesh.ends); any other rank is alone in its group, and has nothing to tag."""
    weight = all_layers[0].wte.weight
    is_tied = weight is all_layers[-1].lm_head.weight
    if is_tied and group.size > 1:
        weight.tag.shared_by += (group,)
        weight.tag.sum_over += (group,)
