"""Muon: momentum, made orthogonal, for the matrices of the blocks; AdamW for all other tensors.
https://kellerjordan.github.io/posts/muon/; rate and decay like in arXiv 2502.16982.

    m = M m + (1 - M) g;   u = (1 - M) g + M m                     momentum, Nesterov's form
    O = newton_schulz(u)                                 u's singular values become about 1
    W = W - lr (0.2 sqrt(max(rows, columns)) O + decay W)      updates as large as AdamW's

What the fork shows: the tag is enough. O is a function of the whole matrix, but a rank may hold a
slice of the matrix (--tp), and a piece of the slice (--zero). whole_matrix puts pieces and slices
together, tag.slice and `start` take this rank's piece of O: no line asks which technique has split
the matrix. (c_attn, which is q, k and v, is one matrix here; experts step by AdamW.)

Held: AdamW's states; the second moments of the matrices are not used. Where n is the number of
elements of the whole matrices of a stage, each rank sends, beside what AdamW sends, under --tp
2 (T-1)/T n, and under ZeRO 2 (D-1)/D n/T. (A gather of the pieces would send half of that.) All
D x T ranks of a stage orthogonalize each of its matrices: the same work, D x T times.

    git apply extras/forks/muon.patch && torchrun train.py --tp 2 --zero 1 --muon
"""

import math

from collectives import all_reduce
from optimizer import AdamW, AdamWState

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


class MuonState(AdamWState):
    """Muon of one matrix, or of this rank's piece of one."""

    def __init__(self, weights, decay, tag, start, sharded):
        super().__init__(weights, decay)
        self.tag = tag
        self.start = start
        self.sharded = sharded

    def step(self, grad, lr, *of_adamw):
        """Pieces of u -> the whole u -> O -> this rank's piece of O, which steps this rank's piece
        of the matrix. Collective: AdamW.step calls all states in one order on all ranks."""
        self.mean.lerp_(grad, 1 - MOMENTUM)
        u = grad.lerp(self.mean, MOMENTUM)
        full = whole_matrix(u, self.tag, self.start, self.sharded)
        update = 0.2 * math.sqrt(max(full.shape)) * newton_schulz(full)
        held = self.tag.slice(update).flatten()[self.start : self.start + grad.numel()]
        self.master -= lr * (held.view_as(self.master) + self.decay * self.master)
        self.weights.copy_(self.master)


class Muon(AdamW):
    """Muon for the matrices of the blocks, else AdamW."""

    def __init__(self, cfg, reducer):
        super().__init__(cfg, reducer)
        for i, tag in enumerate(reducer.tags):
            if len(tag.shape) == 2 and ".h." in tag.name and tag.name.endswith("weight"):
                self.states[i] = MuonState(reducer.weights[i], cfg.weight_decay, tag,
                                           reducer.starts[i], reducer.sharded)
