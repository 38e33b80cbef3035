"""Muon: momentum, made orthogonal, for the matrices of the blocks; AdamW for all other tensors.
https://kellerjordan.github.io/posts/muon/; rate and decay like in arXiv 2502.16982.

    m = beta1 m + (1 - beta1) g;   u = (1 - beta1) g + beta1 m            momentum, Nesterov's form
    O = newton_schulz(u)                                 u's singular values become about 1
    W = W - lr (0.2 sqrt(max(rows, columns)) O + decay W)      updates as large as AdamW's

What the fork shows: the tag is enough. O is a function of the whole matrix, but a rank may hold a
slice of the matrix (--tp), and a shard of the slice (--zero). Bucket.whole gathers the shards,
tag.place puts the slices together, tag.slice takes this rank's part of O: no line asks which
technique has split the matrix. (c_attn, which is q, k and v, is one matrix here; experts step by
AdamW.)

Held: AdamW's states; the second moments of the matrices are kept, but not used. Beside what AdamW
sends, each rank sends under ZeRO (D-1)/D of the elements of all buckets that have such a matrix,
biases and norms of these buckets too; under --tp 2 (T-1)/T M, where M is the number of elements of
the whole matrices of a stage. All D x T ranks of a stage orthogonalize each of its matrices: the
same work, D x T times.

    git apply forks/muon.patch && torchrun train.py --tp 2 --zero 1 --optimizer muon --beta1 0.95
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


def whole_matrix(held, tag):
    """The whole matrix, of which this rank holds a slice."""
    full = held.new_zeros(tag.shape)
    tag.place(held, full)
    return all_reduce(full, tag.split_over) if tag.split_over else full


class Muon(AdamW):
    """Muon for the matrices of the blocks, whose momentum is AdamW's first moment; else AdamW."""

    def settings(self, shard):
        """Decay and rate 0 for the matrices: AdamW's kernel updates their moments only."""
        return (0.0, 0.0) if is_for_muon(shard) else super().settings(shard)

    def step_bucket(self, bucket, lr, grads, skip):
        super().step_bucket(bucket, lr, grads, skip)
        if not any(is_for_muon(param.shard) for param in bucket.params):
            return
        # u for this rank's shard, a piece for each parameter
        means = bucket.pieces(bucket.moments["exp_avg"])
        pieces = [(param, grads[param].lerp(mean, self.beta1)) for param, mean in means]
        # Shards -> slices -> whole matrices -> O -> this rank's slice of O
        changes = torch.zeros(bucket.numel, dtype=self.wide, device=self.device)  # in bucket order
        for param, held in bucket.whole(pieces, self.wide):
            if is_for_muon(param.shard):
                full = whole_matrix(held, param.shard)
                change = newton_schulz(full) * update_scale(full.shape)
                bucket.view(changes, param).copy_(param.shard.slice(change))
        # This rank's shard of the changes
        masters = dict(bucket.pieces(bucket.master))
        for param, change in bucket.pieces(changes[bucket.own]):
            if is_for_muon(param.shard):
                change = lr * (change + self.weight_decay * masters[param])
                masters[param].sub_(change.masked_fill_(skip.bool(), 0.0))
