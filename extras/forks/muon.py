"""Muon: momentum, made orthogonal, for the matrices of the blocks; AdamW for all other tensors.
https://kellerjordan.github.io/posts/muon/; rate and decay like in arXiv 2502.16982.

    m = beta1 m + (1 - beta1) g;   u = (1 - beta1) g + beta1 m            momentum, Nesterov's form
    O = newton_schulz(u)                                 u's singular values become about 1
    W = W - lr (0.2 sqrt(max(rows, columns)) O + decay W)      updates as large as AdamW's

What the fork shows: the tag is enough. O is a function of the whole matrix, but a rank may hold a
slice of the matrix (--tp), and a piece of the slice (--zero). whole_matrix puts pieces and slices
together, tag.slice and `start` take this rank's piece of O: no line asks which technique has split
the matrix. (c_attn, which is q, k and v, is one matrix here; experts step by AdamW.)

Held: AdamW's states; the second moments of the matrices are kept, but not used. Where M is the
number of elements of the whole matrices of a stage, each rank sends, beside what AdamW sends, under
--tp 2 (T-1)/T M, and under ZeRO 2 (D-1)/D M/T. (A gather of the pieces would send half of that.)
All D x T ranks of a stage orthogonalize each of its matrices: the same work, D x T times.

    git apply extras/forks/muon.patch && torchrun train.py --tp 2 --zero 1 --optimizer muon --beta1
    0.95
"""

import math

import torch

from engine.collectives import all_reduce
from engine.optimizer import AdamW


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


def is_for_muon(tag):
    return len(tag.shape) == 2 and ".h." in tag.name and tag.name.endswith("weight")


def update_scale(shape):
    return 0.2 * math.sqrt(max(shape))


def whole_matrix(piece, tag, start, sharded):
    """The whole matrix, of which this rank holds a piece: elements from `start` on of its slice.
    Each sum puts pieces together, because every rank has zeros beside its own."""
    held = piece.new_zeros(tag.slice_shape.numel())
    held[start : start + piece.numel()] = piece.flatten()
    if sharded:  # ZeRO: each replica has a piece of the slice
        all_reduce(held, tag.sum_over[0])
    full = piece.new_zeros(tag.shape)
    tag.place(held.view(tag.slice_shape), full)
    return all_reduce(full, tag.split_over) if tag.split_over else full


class Muon(AdamW):
    """Muon for the matrices of the blocks, whose momentum is AdamW's first moment; else AdamW."""

    def __init__(self, cfg, reducer, scale):
        super().__init__(cfg, reducer, scale)
        self.starts = reducer.starts
        self.sharded = reducer.sharded

    def settings(self, tag):
        """Decay and rate 0 for the matrices: AdamW's kernel updates their moments only."""
        return (0.0, 0.0) if is_for_muon(tag) else super().settings(tag)

    def update(self, grads, factor, finite, lr):
        grads = [grad * factor.view(1) for grad in grads]  # clipped, of the masters' dtype
        super().update(grads, torch.ones_like(factor), finite, lr)
        for i, tag in enumerate(self.tags):  # in one order on all ranks, which send to one another
            if is_for_muon(tag):
                u = grads[i].lerp(self.moments["exp_avg"][i], self.cfg.beta1)
                self.step_matrix(self.masters[i], u, tag, self.starts[i], finite, lr)

    def step_matrix(self, piece, u, tag, start, finite, lr):
        """Pieces of u -> the whole u -> O -> this rank's piece of O, which steps this rank's piece
        of the matrix."""
        full = whole_matrix(u, tag, start, self.sharded)
        held = tag.slice(newton_schulz(full) * update_scale(full.shape)).flatten()
        change = held[start : start + piece.numel()].view_as(piece) + self.cfg.weight_decay * piece
        piece.sub_((lr * change).masked_fill_(~finite, 0.0))
