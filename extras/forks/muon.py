"""Muon: momentum, made orthogonal, for the matrices of the blocks; AdamW for all other tensors.
https://kellerjordan.github.io/posts/muon/; rate and decay like in arXiv 2502.16982.

    m = M m + (1 - M) g;   u = (1 - M) g + M m                     momentum, Nesterov's form
    O = newton_schulz(u)                                 u's singular values become about 1
    W = W - lr (0.2 sqrt(max(rows, columns)) O + decay W)      updates as large as AdamW's

What the fork shows: the tag is enough. O is a function of the whole matrix, but a rank may hold a
slice of the matrix (--tp), and a piece of the slice (--zero). whole_matrix puts pieces and slices
together, tag.slice and `start` take this rank's piece of O, however the matrix was cut. (c_attn,
which is q, k and v, is one matrix here; experts step by AdamW.)

Held: AdamW's states; the second moments of the matrices are not used. Where n is the number of
elements of the whole matrices of a stage, each rank sends, beside what AdamW sends, under --tp
2 (T-1)/T n, and under ZeRO 2 (D-1)/D n/T. (A gather of the pieces would send half of that.) All
D x T ranks of a stage orthogonalize each of its matrices: the same work, D x T times.

    git apply extras/forks/muon.patch && torchrun train.py --tp 2 --zero 1 --muon
"""

import math

import torch

from collectives import all_reduce
from optimizer import AdamW, clip_coefficient

MOMENTUM = 0.95  # M


def newton_schulz(u):
    """U V^T of u = U S V^T, nearly: five steps bring the singular values between about 0.7 and 1.2.
    """
    wide = u.size(0) <= u.size(1)
    x = u if wide else u.t()  # X X^T is the smaller product
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.t()


def whole_matrix(piece, tag, start, sharded, tp):
    """The whole matrix, of which this rank holds a piece: elements from `start` on of its slice.
    Each sum puts pieces together, because every rank has zeros beside its own. tp: the group of the
    tensor ranks."""
    held = piece.new_zeros(tag.slice_shape.numel())
    held[start : start + piece.numel()] = piece
    if sharded:  # ZeRO: each replica has a piece of the slice, perhaps an empty one
        all_reduce(held, tag.sum_over[0])
    if tag.slice_shape == tag.shape:
        return held.view(tag.shape)
    full = piece.new_zeros(tag.shape)
    places = tag.slice(torch.arange(full.numel()).view(tag.shape))  # indices of its elements
    full.view(-1)[places.flatten().to(full.device)] = held
    return all_reduce(full, tp)


class Muon(AdamW):
    """Muon for the matrices of the blocks, else AdamW."""

    def __init__(self, cfg, reducer, scale, tp):
        super().__init__(cfg, reducer, scale)
        self.tp = tp
        self.starts = reducer.starts
        self.sharded = reducer.sharded
        self.matrices = [i for i, tag in enumerate(self.tags)
                         if len(tag.shape) == 2 and ".h." in tag.name]

    @torch.no_grad()
    def step(self, grads, norm, lr):
        if norm.isfinite():  # all ranks have the same norm, so all of them take part in the sums
            factor = clip_coefficient(norm, self.cfg.grad_clip) / self.scale.value
            for i in self.matrices:
                self.step_matrix(i, grads[i].to(self.wide) * factor.to(self.wide), lr)
        # AdamW skips what has no gradient here
        others = [grad[:0] if i in self.matrices else grad for i, grad in enumerate(grads)]
        super().step(others, norm, lr)  # copies all masters into the weights

    def step_matrix(self, i, grad, lr):
        """Pieces of u -> the whole u -> O -> this rank's piece of O, which steps this rank's piece
        of the matrix. Collective: all ranks list the matrices in one order."""
        master, mean, tag, start = self.masters[i], self.means[i], self.tags[i], self.starts[i]
        mean.lerp_(grad, 1 - MOMENTUM)
        u = grad.lerp(mean, MOMENTUM)
        full = whole_matrix(u, tag, start, self.sharded, self.tp)
        update = 0.2 * math.sqrt(max(full.shape)) * newton_schulz(full)
        held = tag.slice(update).flatten()[start : start + grad.numel()]
        master -= lr * (held + self.cfg.weight_decay * master)
