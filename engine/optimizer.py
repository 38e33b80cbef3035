"""AdamW with torch's fused kernel (torch.optim would import torch.compile, which takes long), and
without a wait of the host: the norm, the clipping and the decision to skip a step stay on the
device. The root's optimizer.py spells AdamW out.

float16 has few exponents, so the loss is multiplied by a scale before backward (LossScale), and
gradients are divided by it here. Weights of 16 bits have a 32-bit master copy. Held per parameter:
sizes.bytes_per_parameter.
"""

import torch

from optimizer import BETA1, BETA2, clip_coefficient, decays

# Elements of 16-bit gradients that are converted to 32 bits at a time
CONVERTED = 1 << 25


def exact_norms(tensors, dtype):
    """The 2-norm of each flat tensor, a float64 tensor (n,). `dtype`: that of the sums."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).double()
    # On a CPU torch adds up all squares one after the other. In float32 the norm of 4e7 elements
    # comes out 0.3% too small; of 2^16, 2e-7
    parts = [x.flatten().split(1 << 16) for x in tensors]  # views
    owner = torch.tensor([i for i, views in enumerate(parts) for _ in views])
    found = torch._foreach_norm([view for views in parts for view in views], 2, dtype=dtype)
    squares = torch.zeros(len(tensors), dtype=torch.double)
    return squares.index_add_(0, owner, torch.stack(found).double().square()).sqrt()


class LossScale:
    """The factor of the loss, and so of the gradients. float16: halved when a norm is not finite,
    doubled after 1000 finite norms in a row, at least 1. Other dtypes: always 1. A tensor on the
    device, so that the host need not wait for a norm."""

    def __init__(self, dtype, device):
        self.changes = dtype == torch.float16
        self.value = torch.tensor(2.0**16 if self.changes else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.long, device=device)  # finite ones in a row

    def update(self, finite):
        if self.changes:
            self.good_steps.copy_((self.good_steps + 1) * finite)
            grow = torch.where(self.good_steps % 1000 == 0, 2.0, 1.0)
            factor = torch.where(finite, grow, 0.5)
            self.value.mul_(factor).clamp_(min=1.0)


class Optimizer:
    """What all optimizers share: masters, moments, the norm. The members are those of the root's
    AdamW (optimizer.py)."""

    def __init__(self, cfg, reducer, scale):
        """reducer: DDP or ZeRO, of the root or of engine/. scale: a LossScale."""
        self.cfg = cfg
        self.weights = reducer.weights
        self.tags = reducer.tags
        self.scale = scale
        self.device = scale.value.device
        self.dtype = getattr(torch, cfg.dtype)
        self.wide = torch.promote_types(self.dtype, torch.float32)
        # Weights of 16 bits: a copy of 32 bits; wider ones: the weights themselves
        self.masters = [weights.to(self.wide) for weights in self.weights]
        self.moments = {name: [torch.zeros_like(master) for master in self.masters]
                        for name in ("exp_avg", "exp_avg_sq")}
        # For each of the weights: how many ranks of the world hold the same
        self.holders = torch.tensor([tag.holders(reducer.sharded) for tag in self.tags],
                                    dtype=torch.double, device=self.device)
        self.updates = torch.zeros((), device=self.device)  # steps so far, without skipped ones

    def settings(self, tag):
        """(weight decay, factor of the learning rate) of the parameter of this tag. The factor is 1
        here; extras/forks/mup.py and extras/forks/muon.py override this."""
        return self.cfg.weight_decay * decays(tag), 1.0

    def square(self, grads):
        """This rank's part of the squared global norm, to be summed over all ranks. Ranks that hold
        the same piece each add an equal part of its square: so each element counts once, and an
        overflow on any rank reaches the sum."""
        if not grads:  # fewer trained parameters than ranks
            return torch.zeros((), dtype=torch.double, device=self.device)
        square = (exact_norms(grads, self.wide).square() / self.holders).sum()
        return square / self.scale.value.double().square()

    def step(self, grads, norm, lr):
        """One step at the learning rate lr, with the gradients clipped to a norm of cfg.grad_clip,
        in place. norm: their global norm, a tensor on the device, the same on every rank. If it is
        not finite nothing changes but the loss scale."""
        finite = norm.isfinite()
        self.updates += finite
        factor = clip_coefficient(norm, self.cfg.grad_clip) / self.scale.value
        self.update(grads, factor.to(self.wide), finite, lr)
        if self.masters and self.masters[0] is not self.weights[0]:
            torch._foreach_copy_(self.weights, self.masters)
        self.scale.update(finite)

    def update(self, grads, factor, finite, lr):
        """Step the masters, with gradients times `factor`; nothing if `finite` is false. Both are
        0-dim tensors on the device."""
        raise NotImplementedError

    def in_parts(self, indices):
        """Cut the list of indices into lists whose weights have about CONVERTED elements each."""
        parts = [[]]
        room = CONVERTED
        for i in indices:
            if room <= 0:
                parts.append([])
                room = CONVERTED
            parts[-1].append(i)
            room -= self.weights[i].numel()
        return parts

    def named_states(self):
        """{name in a checkpoint: a tensor for each of the reducer's weights}."""
        has_masters = self.wide != self.dtype
        return self.moments | ({"master": self.masters} if has_masters else {})

    def numbers(self):
        """{name in a checkpoint: a tensor of one number}."""
        return {"updates": self.updates, "scale": self.scale.value,
                "good_steps": self.scale.good_steps}


class AdamW(Optimizer):
    def update(self, grads, factor, finite, lr):
        skip = (~finite).float()
        alike = {}  # (decay, rate) -> indices of the weights that have them
        for i, tag in enumerate(self.tags):
            alike.setdefault(self.settings(tag), []).append(i)
        for (decay, rate), indices in alike.items():
            for some in self.in_parts(indices):
                masters = [self.masters[i] for i in some]
                torch._fused_adamw_(
                    masters, self.scaled([grads[i] for i in some], factor),
                    [self.moments["exp_avg"][i] for i in some],
                    [self.moments["exp_avg_sq"][i] for i in some], [],
                    [self.updates] * len(some), lr=lr * rate, beta1=BETA1,
                    beta2=BETA2, eps=1e-8, amsgrad=False, maximize=False, found_inf=skip,
                    weight_decay=decay)

    def scaled(self, grads, factor):
        """The gradients times factor; in place if they are as wide as the factor."""
        if grads[0].dtype == factor.dtype:
            torch._foreach_mul_(grads, factor)
            return grads
        # A 1-dim float32 factor makes torch promote 16-bit gradients to float32; a 0-dim one
        # does not
        return [grad * factor.view(1) for grad in grads]
