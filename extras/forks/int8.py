"""Data parallelism that sends gradients in 8 bits, with error feedback (arXiv 1901.09847). Both
directions have errors of their own, like in 1-bit Adam (2102.02888). Rank r of D owns chunk r.

    x = g + e;  q = round(x);  e = x - q                 on each rank: e is added to the next g
    y = sum of all ranks' q + e';  z = round(y);  e' = y - z      on the owner of each chunk
    all ranks step with z

round: blocks of BLOCK elements, each with a scale (its largest |x| / 127) and codes of 8 bits.
What rounding drops is not lost, only late: over all steps the sum of z plus the last errors is the
sum of the gradients (the errors telescope).

Sent per rank: 2 (D-1)/D Psi (1 + 4 / BLOCK) bytes, in place of 2 (D-1)/D 4 Psi in float32.
Held: e, as large as the gradients, and e', 1/D as large. Each data rank has its own errors, so a
checkpoint has no place for them: --resume is refused.

What the fork shows: how to test a run that does not equal one process. Without rounding the run
equals one process; the bytes are the formula; the errors telescope; the loss falls like in 32 bits.
Left out: ZeRO.

    git apply extras/forks/int8.patch && torchrun train.py --dp 2 --int8
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from engine.collectives import all_gather, all_to_all
from engine.ddp import DDP
from engine.group import queued

BLOCK = 64


def pack(x):
    """(n,) -> the bytes of n codes and of n / BLOCK scales."""
    blocks = x.view(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).float()
    smallest = torch.finfo(torch.float32).tiny  # divisor of a block of zeros, against 0 / 0
    codes = (blocks / scales.clamp(min=smallest)).round().to(torch.int8)
    return torch.cat([codes.flatten().view(torch.uint8), scales.flatten().view(torch.uint8)])


def unpack(packed, dtype):
    """The inverse of pack, but for rounding errors: (n,)."""
    n = len(packed) * BLOCK // (BLOCK + 4)
    codes = packed[:n].view(torch.int8).view(-1, BLOCK)
    return (codes * packed[n:].view(torch.float32).view(-1, 1).to(dtype)).flatten()


class Errors:
    """The rounding errors of one tensor, to be added to the next step's tensor. They are padded, so
    that each rank owns a whole number of blocks."""

    def __init__(self, tensor, group):
        unit = group.size * BLOCK
        padded = math.ceil(tensor.numel() / unit) * unit
        self.sent = tensor.new_zeros(padded)  # e: errors of what this rank sends to the owners
        self.owned = tensor.new_zeros(padded // group.size)  # e': errors of this rank's own chunk


def keep(error, x, packed):
    """error = x - unpacked x; 0 where that is not finite, for the optimizer skips such a step."""
    error.copy_(x - torch.cat([unpack(part, x.dtype) for part in packed]))
    error.nan_to_num_(0.0, 0.0, 0.0)


@queued  # adds async_op: run in the background, after all earlier work of the group
def int8_all_reduce(tensor, group, errors):
    """In: every rank a full tensor. Out: every rank the same bits, nearly the sum, in place."""
    N, n, dtype = group.size, tensor.numel(), tensor.dtype
    x = F.pad(tensor.flatten(), (0, len(errors.sent) - n)) + errors.sent
    to_owners = [pack(chunk) for chunk in x.chunk(N)]
    keep(errors.sent, x, to_owners)
    of_ranks = [torch.empty_like(packed) for packed in to_owners]  # this rank's chunk, from each
    all_to_all(of_ranks, to_owners, group)

    total = sum(unpack(packed, dtype) for packed in of_ranks) + errors.owned
    packed = pack(total)
    keep(errors.owned, total, [packed])
    chunks = packed.new_empty(N, len(packed))
    chunks[group.rank] = packed
    all_gather(chunks, group)
    tensor.copy_(torch.cat([unpack(row, dtype) for row in chunks])[:n].view_as(tensor))


class Int8DDP(DDP):
    unsaved = "rounding errors of --int8"

    def __init__(self, *args):
        self.errors = {}  # bucket -> its Errors
        super().__init__(*args)

    def launch(self, bucket):
        if bucket not in self.errors:
            self.errors[bucket] = Errors(bucket.full, bucket.group)
        # DDP.launch calls the reduction with async_op=True
        super().launch(bucket, partial(int8_all_reduce, errors=self.errors[bucket]))
