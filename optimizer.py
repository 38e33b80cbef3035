"""AdamW (arXiv 1711.05101), clipping by the global gradient norm, and the learning rate of a step.

For the gradient g, the learning rate lr and the decay d of a weight w, step t is

    m = beta1 m + (1 - beta1) g                       mean of the gradients so far
    v = beta2 v + (1 - beta2) g^2                     mean of their squares
    w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + 1e-8) + d w)

computed by torch's fused kernel, for many weights at once. Held for each weight that this rank
steps: m, v and, if weights have 16 bits, a master copy of 32 bits. Sent: one number per step, this
rank's part of the squared norm, in one message with the loss (train.py). Nothing here waits for a
GPU: norm, clipping and the decision to skip a step stay on the device.
"""

import math

import torch
from torch.optim.adamw import adamw

BETAS = (0.9, 0.95)


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


def segments_of(tensor):
    """Flat views of a tensor, of 65,536 elements at most."""
    return tensor.flatten().split(1 << 16)


def sums_of_squares(segments, dtype):
    """(len(segments),): the sum of squares of each segment, float64. Added up one after the other
    in float32, 4e7 squares come out wrong by 2e-3 of the sum; the 65,536 of a segment, by 3e-7."""
    return torch.stack(torch._foreach_norm(segments, dtype=dtype)).double().square()


def widened(tensors, dtype):
    """Tensors of one dtype in another: copies, or the tensors themselves if they have it. (A GPU
    runs one kernel for many tensors, as in all functions called _foreach.)"""
    if tensors[0].dtype == dtype:
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


class LossScale:
    """The factor of the loss, and so of the gradients: float16 has a narrow range. Halved when a
    norm is not finite, doubled after 1000 finite ones in a row. Other dtypes: always 1."""

    def __init__(self, dtype, device):
        self.changes = dtype == torch.float16
        self.value = torch.tensor(2.0**16 if self.changes else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.long, device=device)  # finite ones in a row

    def update(self, finite):
        if self.changes:
            self.good_steps.copy_((self.good_steps + 1) * finite)
            grow = torch.where(self.good_steps % 1000 == 0, 2.0, 1.0)
            self.value.mul_(torch.where(finite, grow, 0.5)).clamp_(min=1.0)


class AdamW:
    """Steps the weights of a reducer, DDP or ZeRO (ddp.py), in place."""

    def __init__(self, cfg, reducer, scale):
        """scale: the LossScale, by which gradients are divided."""
        self.cfg = cfg
        self.weights = reducer.weights
        self.tags = reducer.tags
        self.scale = scale
        device = scale.value.device
        self.wide = torch.promote_types(getattr(torch, cfg.dtype), torch.float32)
        # Weights of 16 bits: a copy of 32 bits; wider ones: the weights themselves
        self.has_masters = self.wide != getattr(torch, cfg.dtype)
        self.masters = [weights.to(self.wide) for weights in self.weights]
        self.means = [torch.zeros_like(master) for master in self.masters]
        self.mean_squares = [torch.zeros_like(master) for master in self.masters]
        self.num_steps = torch.zeros((), device=device)  # so far; skipped ones do not count
        # How many ranks hold the same gradient: without ZeRO all replicas hold each gradient; all T
        # tensor ranks hold a LayerNorm's; two stages hold the tied matrix's
        self.holders = [tag.holders(reducer.sharded) for tag in self.tags]
        # A gradient must count once in the global norm, so each of its n holders adds 1/n of its
        # square. shares: this 1/n for each segment of each gradient
        shares = []
        for n, weights in zip(self.holders, self.weights, strict=True):
            shares += [1 / n] * len(segments_of(weights))
        self.shares = torch.tensor(shares, dtype=torch.double, device=device)

    def square(self, grads):
        """This rank's part of the squared global norm, to be summed over all ranks."""
        segments = [segment for grad in grads for segment in segments_of(grad)]
        if not segments:  # a rank without trained weights, in a fork that freezes the embedding
            return torch.zeros((), dtype=torch.double, device=self.shares.device)
        square = sums_of_squares(segments, self.wide) @ self.shares
        return square / self.scale.value.double().square()

    def step(self, grads, norm, lr):
        """Clip the gradients to cfg.grad_clip (in place; those of 16 bits in copies of 32 bits),
        then take a step at the learning rate lr. norm: their global norm, a tensor, the same on
        every rank. If the norm is not finite, nothing changes but the loss scale."""
        finite = norm.isfinite()
        factor = clip_coefficient(norm, self.cfg.grad_clip) / self.scale.value
        for has_decay in (True, False):
            decay = self.cfg.weight_decay if has_decay else 0.0
            for indices in self.index_lists(grads, has_decay):
                scaled = widened([grads[i] for i in indices], self.wide)
                torch._foreach_mul_(scaled, factor.to(self.wide))
                # adamw adds 1 to a step count per weight, in place: give it copies
                steps = [*self.num_steps.repeat(len(indices))]
                adamw([self.masters[i] for i in indices], scaled, [self.means[i] for i in indices],
                      [self.mean_squares[i] for i in indices], [], steps, fused=True,
                      found_inf=(~finite).float(), lr=lr, beta1=BETAS[0], beta2=BETAS[1], eps=1e-8,
                      weight_decay=decay, amsgrad=False, maximize=False)
        self.num_steps += finite
        if self.has_masters and self.weights:
            torch._foreach_copy_(self.weights, self.masters)
        self.scale.update(finite)

    def index_lists(self, grads, has_decay):
        """Yields lists of indices of the weights with decay, or of those without. A list has some
        3e7 elements, so that only so many 16-bit gradients are copied to 32 bits at a time."""
        indices, room = [], 1 << 25
        for i, tag in enumerate(self.tags):
            if decays(tag) == has_decay and grads[i].numel() > 0:
                indices.append(i)
                room -= grads[i].numel()
                if room <= 0:
                    yield indices
                    indices, room = [], 1 << 25
        if indices:
            yield indices

    # For checkpoints

    def named_states(self):
        """{name in a checkpoint: a tensor for each of the reducer's weights}."""
        states = {"exp_avg": self.means, "exp_avg_sq": self.mean_squares}
        return states | ({"master": self.masters} if self.has_masters else {})

    def numbers(self):
        """{name in a checkpoint: a tensor of one number}."""
        return {"updates": self.num_steps, "scale": self.scale.value,
                "good_steps": self.scale.good_steps}
