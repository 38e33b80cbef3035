"""AdamW (arXiv 1711.05101), the global gradient norm, and the learning rate of a step.

Held for each weight that this rank steps: two moments (exponential means of the gradients and of
their squares) and, if weights have 16 bits, a master copy of 32 bits. All-reduced: one number per
step, this rank's part of the squared norm.
"""

import math

import torch

from collectives import all_reduce


def learning_rate(cfg, step):
    """Linear warm-up over cfg.warmup_steps to cfg.lr, then a cosine down to cfg.min_lr."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / (cfg.warmup_steps + 1)
    progress = (step - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps)  # from 0 to below 1
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to above 0
    return cfg.min_lr + cosine * (cfg.lr - cfg.min_lr)


def decays(shard):
    """Does weight decay apply to the parameter of this tag? To matrices only. (The name is asked,
    too: the biases of all experts of a layer are one tensor of two dims.)"""
    return len(shard.shape) > 1 and shard.name.endswith("weight")


def clip_coefficient(norm, grad_clip):
    """The factor that brings gradients of norm `norm` (a tensor) down to the norm grad_clip; 1 if
    their norm is smaller, or if grad_clip is 0 (never clip)."""
    return (grad_clip / (norm + 1e-6)).clamp(max=1.0) if grad_clip else torch.ones_like(norm)


def global_norm(grads, tags, group):
    """The norm of all gradients of the model, a float64 tensor, the same on every rank.

    group: the ranks that together hold every gradient. Without ZeRO, one replica: the other
    replicas hold the same. Under ZeRO all ranks: each data rank holds other chunks.
    Some gradients are on several ranks of a replica: a LayerNorm weight's on all T tensor ranks,
    the tied matrix's on two stages. Each must count once: so each of the `copies` ranks that hold
    the gradient adds 1/copies of the gradient's square."""
    square = torch.zeros((), dtype=torch.double)
    for grad, tag in zip(grads, tags, strict=True):
        square += grad.double().square().sum() / tag.copies
    return all_reduce(square, group).sqrt()


class AdamWState:
    """AdamW of one tensor: a parameter, or this rank's chunk of one."""

    def __init__(self, weights, decay):
        self.weights = weights
        self.decay = decay
        wide = torch.promote_types(weights.dtype, torch.float32)  # 32 bits at least
        self.master = weights.to(wide)  # `weights` itself, if they are that wide
        self.mean = torch.zeros_like(self.master)  # mean of the gradients so far
        self.square = torch.zeros_like(self.master)  # mean of their squares

    def step(self, grad, lr, beta1, beta2, num_steps):
        self.mean.lerp_(grad, 1 - beta1)
        self.square.lerp_(grad.square(), 1 - beta2)
        mean = self.mean / (1 - beta1**num_steps)  # both means began at 0
        square = self.square / (1 - beta2**num_steps)
        self.master -= lr * (mean / (square.sqrt() + 1e-8) + self.decay * self.master)
        self.weights.copy_(self.master)


class AdamW:
    """Steps a list of tensors in place. tags[i]: the tag of the parameter of weights[i]."""

    def __init__(self, cfg, weights, tags):
        self.cfg = cfg
        self.num_steps = 0
        self.states = [AdamWState(weight, cfg.weight_decay if decays(tag) else 0.0)
                       for weight, tag in zip(weights, tags, strict=True)]

    def step(self, grads, norm):
        """One step, with the gradients clipped to a norm of cfg.grad_clip."""
        lr = learning_rate(self.cfg, self.num_steps)
        coefficient = clip_coefficient(norm, self.cfg.grad_clip)
        self.num_steps += 1
        for state, grad in zip(self.states, grads, strict=True):
            clipped = grad.to(state.master.dtype) * coefficient
            state.step(clipped, lr, self.cfg.beta1, self.cfg.beta2, self.num_steps)


# plain.py trains with this AdamW; train.py with engine/optimizer.py: torch's fused kernel, and the
# host does not wait for the GPU. engine/layerwise.py has SGD, LARS and LAMB.
