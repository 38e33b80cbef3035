"""Pipeline parallelism: cut the list of layers into stages, one per rank, and the batch into
microbatches, which flow through the stages as on an assembly line.

Split: the layers; all ranks work at once, each on another microbatch. Sent, per microbatch and
boundary between two ranks: the activation forward, its gradient backward, B S C elements each.
Held: 1/P of the layers, and the saved activations of microbatches in flight (forward done, backward
not yet): all m under GPipe, at most P - rank under 1F1B. (Here also the gradients that were sent,
until the step ends.)

The price is the bubble: while the pipeline fills and drains, ranks idle, (P-1)/(m+P-1) of the time
for P ranks and m microbatches. GPipe, arXiv 1811.06965; 1F1B, PipeDream 1806.03377.

    python pipeline.py        both on 4 ranks
"""

from collections import deque

import torch

from group import wait_all
from schedules import SCHEDULES, cut


def run_layers(layers, x, *targets):
    """One layer after the other. The last one of the model, the head, takes the targets too."""
    *before, last = layers
    for layer in before:
        x = layer(x)
    return last(x, *targets)


def run_pipeline(layers, group, order, batches, shape, tokens, dtype):
    """Forward and backward of all microbatches of a step.

    In: this rank's layers (a stage); order, a schedule's list for this rank (schedules.py): "F0"
    for each forward, "B0" for each backward; batches, the (ids, targets, number of the first
    sequence, which dropout would need) of each microbatch of this replica, the same on all ranks of
    the group; shape of an activation, (B, S, C), and its dtype; tokens, the number of tokens in the
    batch of all replicas.
    Out: this rank's parameters have their gradients. Returns this replica's part of the loss per
    token on the last rank, 0 on all others.

    P = 4, rank 1, m = 6, F3 the forward of microbatch 3 and B3 its backward. GPipe runs
    F0 F1 F2 F3 F4 F5, then B0 B1 B2 B3 B4 B5. 1F1B: warm up F0 F1, steady state F2 B0 F3 B1 F4 B2
    F5 B3, cool down B4 B5.
    """
    rank = group.rank
    last = group.size - 1
    to_forward = deque(batches)
    in_flight = deque()  # (input, output, send) of microbatches whose backward has not run
    # Pending sends of gradients, waited for after the last receive. A pending send keeps its tensor
    # alive, so these gradients take memory until the step ends
    grad_sends = []
    total_loss = 0.0

    def receive(src):
        tensor = torch.empty(shape, dtype=dtype, device=group.device)
        group.recv(tensor, src).wait()
        return tensor

    for action in order:
        if action == "F0":
            ids, targets, _ = to_forward.popleft()
            # (B, S) token ids on the first rank; else (B, S, C), and backward computes its gradient
            x = ids if rank == 0 else receive(rank - 1).requires_grad_()
            if rank < last:
                output = run_layers(layers, x)  # (B, S, C)
                send = group.send(output.detach().contiguous(), rank + 1)
            else:
                output = run_layers(layers, x, targets) / tokens
                send = None
                total_loss += output.item()
            in_flight.append((x, output, send))
        else:
            x, output, send = in_flight.popleft()  # the oldest microbatch in flight
            if rank < last:
                output.backward(receive(rank + 1))
                send.wait()  # returns at once: the output has arrived, for its gradient came back
            else:
                output.backward()
            if rank > 0:
                grad_sends.append(group.send(x.grad, rank - 1))
    # A send of gloo completes only when its receive is posted. If each rank waited for each send at
    # once, two ranks that send to each other would deadlock: wait here, after all receives.
    wait_all(grad_sends)
    return total_loss


def tie_ends(all_layers, group):
    """Tag the tied embedding, which the first and the last stage both hold: its gradient is the sum
    of two terms, the embedding's on the first stage and the head's on the last. all_layers: the
    whole model's, before they are cut into stages. group: the ranks of those two stages
    (Mesh.ends); any other rank is alone in its group, and has nothing to tag."""
    weight = all_layers[0].wte.weight
    is_tied = weight is all_layers[-1].lm_head.weight
    if is_tied and group.size > 1:
        weight.shard.shared_by += (group,)
        weight.shard.sum_over += (group,)


# plain.py trains with this (--pp 4 --schedule gpipe); train.py with engine/pipeline.py, which runs
# every schedule of schedules.py: interleaved, zero bubble. 1F1B takes as long there as here.


def demo(mesh):
    """Gradients of both schedules, compared with one process's."""
    from show.demonstrations import show_difference, small_gpt
    group = mesh.group("pp")
    for name in ("gpipe", "1f1b"):
        model, ids = small_gpt(mesh, n_layer=6)
        tie_ends(model.layers, mesh.ends("pp"))
        start, stop = cut(model.config.layer_costs(), group.size)[group.rank]
        batches = [(row, row, None) for row in ids.split(1)]
        order = SCHEDULES[name].actions(group.size, len(batches), 1, group.rank)
        shape = (1, 8, 16)  # (B, S, C) of small_gpt
        tokens = 1  # no division: the loss of one process, too, is a sum here
        run_pipeline(model.layers[start:stop], group, order, batches, shape, tokens, torch.double)
        show_difference(name, mesh, model)


if __name__ == "__main__":
    from show.demonstrations import demonstrate
    demonstrate(demo, pp=4)
