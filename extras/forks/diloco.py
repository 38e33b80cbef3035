"""DiLoCo, arXiv 2311.08105: workers train apart, and meet once in H steps. Between two meetings no
gradient travels between workers. --shard R of --dp D makes D/R workers of R data ranks, each with
its pipeline, context, tensor and expert ranks; a worker trains on its part of each batch.

    H times    each worker steps by AdamW on its own gradients
    meet       d = w0 - mean of the workers' w;  v = MOMENTUM v + d
               w0 = w0 - OUTER_LR (d + MOMENTUM v);  all go on from w0

w0: the weights after the last meeting. MOMENTUM v in the last line is Nesterov's form of momentum.
With OUTER_LR 1 and MOMENTUM 0 this is federated averaging (1602.05629). What the fork shows: the
tags alone say over which ranks gradients are summed; and an optimizer around an optimizer needs to
know no technique.

Sent between W workers: 2 (W-1)/W of the weights in H steps, in place of H times the gradients; and
in each step train.py's few sums. Held: w0 and v, two more numbers per weight. Each worker has its
own moments, so --resume is refused. Before a checkpoint workers meet once more, even if H steps are
not over. Logged are the mean loss and the root of the mean squared norm. A step that is not finite
on one worker is skipped by all.

    git apply extras/forks/diloco.patch && torchrun train.py --dp 4 --shard 1 --diloco 20
"""

import torch

from collectives import all_reduce
from data.files import FileError

OUTER_LR, MOMENTUM = 0.7, 0.9


def keep_apart(stages, workers):
    """Gradients of these stages, {stage: [layers]}, are not to be summed over `workers`."""
    for layer in (layer for layers in stages.values() for layer in layers):
        for param in layer.parameters():
            tag = param.tag
            tag.sum_over = tuple(group for group in tag.sum_over if group is not workers)


class DiLoCo:
    """Has the members of an optimizer, and calls those of the trainer's optimizer, which it is to
    replace."""

    def __init__(self, trainer, every):
        self.inner = trainer.optimizer
        self.reducer = trainer.reducer
        if trainer.cfg.resume != "no":
            raise FileError(f"{trainer.cfg.resume}: has no moments of --diloco, because each "
                            "worker has its own; start it anew with --init-from")
        # The ranks of this worker; and those that have this rank's place in the W workers
        self.worker = trainer.mesh.group("shard", "pp", "ep", "cp", "tp")
        self.workers = trainer.mesh.group("rep")
        self.every = every  # H
        self.apart = 0  # steps since the last meeting
        self.norm = None  # of this worker's gradients in the last step
        # The weights that `inner` steps: with 16 bits their masters
        self.masters = self.inner.masters
        self.start = [master.clone() for master in self.masters]  # w0
        self.velocity = [torch.zeros_like(master) for master in self.masters]

    def square(self, grads):
        """This rank's part of the mean squared norm. The loss was divided by the tokens of all W
        workers, but a worker's gradient is a sum over its own tokens only: it is to be multiplied
        by W. By their tags W workers hold the same gradient, so `inner` divides the square by W."""
        W = self.workers.size
        square = self.inner.square(grads) * W**2
        self.norm = all_reduce(square * W, self.worker).sqrt()
        return square

    def step(self, grads, norm, lr):
        for grad in grads:
            grad.mul_(self.workers.size)
        # Each worker clips by its own norm. `norm` says if all workers' norms are finite
        self.inner.step(grads, torch.where(norm.isfinite(), self.norm, norm), lr)
        self.apart += 1
        if self.apart == self.every:
            self.meet()

    @torch.no_grad()
    def meet(self):
        """Collective; publish() of the reducer is to follow."""
        self.apart = 0
        held = zip(self.reducer.weights, self.masters, self.start, self.velocity, strict=True)
        for weights, master, start, velocity in held:
            change = all_reduce(start - master, self.workers) / self.workers.size  # d
            velocity.mul_(MOMENTUM).add_(change)
            start.sub_(OUTER_LR * (change + MOMENTUM * velocity))
            master.copy_(start)
            weights.copy_(start)

    def meet_early(self):
        """Before a checkpoint. Collective; does nothing right after a meeting."""
        if self.apart:
            for _ in self.reducer.whole():  # waits for weights that the last step has published
                pass
            self.meet()
            self.reducer.publish()

    def named_states(self):
        return self.inner.named_states()

    def numbers(self):
        return self.inner.numbers()
