"""AdamW (arXiv 1711.05101), clipping by the global gradient norm, and the learning rate of a step.

Held for each weight that this rank steps: two moments (exponential means of the gradients and of
their squares) and, if weights have 16 bits, a master copy of 32 bits. Sent by train.py: one number
per step, this rank's part of the squared norm.
"""

import math

import torch

BETA1, BETA2 = 0.9, 0.95  # decay of the two moments per step


def learning_rate(cfg, step):
    """Linear warm-up over cfg.warmup_steps to cfg.lr, then a cosine down to cfg.min_lr."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / (cfg.warmup_steps + 1)
    progress = (step - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps)  # from 0 to below 1
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to above 0
    return cfg.min_lr + cosine * (cfg.lr - cfg.min_lr)


def decays(tag):
    """Does weight decay apply to the parameter of this tag? Only to matrices. (The name is checked
    too, because the stacked biases of a layer's experts are a tensor of two dims.)"""
    return len(tag.shape) > 1 and tag.name.endswith("weight")


def clip_coefficient(norm, grad_clip):
    """The factor that brings gradients of norm `norm` (a tensor) down to the norm grad_clip; 1 if
    their norm is smaller, or if grad_clip is 0 (never clip)."""
    return (grad_clip / (norm + 1e-6)).clamp(max=1.0) if grad_clip else torch.ones_like(norm)


class AdamWState:
    """AdamW of one tensor: a parameter, or this rank's chunk of one."""

    def __init__(self, weights, decay):
        self.weights = weights
        self.decay = decay
        wide = torch.promote_types(weights.dtype, torch.float32)  # 32 bits at least
        self.master = weights.to(wide)  # the same tensor, if the weights are that wide
        self.mean = torch.zeros_like(self.master)  # mean of the gradients so far
        self.square = torch.zeros_like(self.master)  # mean of their squares

    def step(self, grad, lr, num_steps):
        self.mean.lerp_(grad, 1 - BETA1)
        self.square.lerp_(grad.square(), 1 - BETA2)
        mean = self.mean / (1 - BETA1**num_steps)  # both means began at 0
        square = self.square / (1 - BETA2**num_steps)
        self.master -= lr * (mean / (square.sqrt() + 1e-8) + self.decay * self.master)
        self.weights.copy_(self.master)


class AdamW:
    """Steps the weights of a reducer, DDP or ZeRO (ddp.py), in place."""

    def __init__(self, cfg, reducer):
        self.cfg = cfg
        # Steps so far, skipped ones not counted. A tensor, because checkpoints save it
        self.num_steps = torch.zeros((), dtype=torch.double)
        self.states = [AdamWState(weights, cfg.weight_decay if decays(tag) else 0.0)
                       for weights, tag in zip(reducer.weights, reducer.tags, strict=True)]
        self.holders = [tag.holders(reducer.sharded) for tag in reducer.tags]

    def square(self, grads):
        """This rank's part of the squared global norm, to be summed over all ranks.

        Several ranks may hold the same gradient: without ZeRO all replicas hold each gradient; all
        T tensor ranks hold a LayerNorm's; two stages hold the tied matrix's. A gradient must count
        once, so each of its n holders adds 1/n of its square."""
        square = torch.zeros((), dtype=torch.double)
        for grad, n in zip(grads, self.holders, strict=True):
            square += grad.double().square().sum() / n
        return square

    def step(self, grads, norm, lr):
        """One step at the learning rate lr, with the gradients clipped to a norm of cfg.grad_clip.
        norm: their global norm, a tensor, the same on every rank. No step if it is not finite."""
        if not norm.isfinite():
            return
        coefficient = clip_coefficient(norm, self.cfg.grad_clip)
        self.num_steps += 1
        for state, grad in zip(self.states, grads, strict=True):
            clipped = grad.to(state.master.dtype) * coefficient
            state.step(clipped, lr, self.num_steps)

    # For checkpoints

    def named_states(self):
        """{name in a checkpoint: a tensor for each of the reducer's weights}."""
        states = {"exp_avg": [state.mean for state in self.states],
                  "exp_avg_sq": [state.square for state in self.states]}
        if any(state.master is not state.weights for state in self.states):  # weights of 16 bits
            states["master"] = [state.master for state in self.states]
        return states

    def numbers(self):
        """{name in a checkpoint: a tensor of one number}."""
        return {"updates": self.num_steps}
