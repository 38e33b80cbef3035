"""Dropout, the same in every layout: on the outputs of the embedding, of each
attention and of each MLP, as in GPT-2. JMLR 15 (2014), 1929. (GPT-2 drops weights of attention,
too; not here, because the fused kernels cannot be told which.)

Which elements of a sequence are dropped is a pure function of (seed, place in the model, number of
the sequence in the run). Each rank draws the mask of the whole sequence, and takes its own tokens
of it. So ranks with the same tokens drop the same elements; and microbatches, a recomputed block
and a resumed run have the masks of one process.

Held for backward: one byte for each element of those outputs. Sent: nothing. Masks are drawn on the
CPU, like initial values, so a GPU has the CPU's masks, and waits for them.

    torchrun train.py --tp 2 --pp 2 --dropout 0.1
"""

from contextlib import contextmanager
from functools import partial

import torch

from model import generator_of


class Dropout:
    """Sets a share `rate` of the elements to zero, and divides the others by 1 - rate."""

    def __init__(self, rate=0.0, seed=0):
        self.rate = rate
        self.seed = seed
        self.block_size = 0  # tokens of a whole sequence
        self.positions = None  # where this rank's tokens stand in their sequence
        # Number of the first sequence of the microbatch that is in forward, counted from the start
        # of the run (data/batches.py); None: nothing is dropped. The pipeline sets it for each
        # microbatch
        self.first = None

    def attach(self, model, positions):
        """Drop from the outputs of a model's layers. positions: of this rank's tokens."""
        self.block_size = model.config.block_size
        self.positions = positions.cpu()
        embedding, *blocks, _ = model.layers
        places = {"embedding": embedding}
        for i, block in enumerate(blocks):
            places[f"{i} attention"] = block.attn
            places[f"{i} MLP"] = block.mlp
        if self.rate > 0:
            for place, module in places.items():
                module.register_forward_hook(partial(self.drop, place))

    def is_dropped(self, place, number, width):
        """(tokens of this rank, C) bool: their rows of a sequence's mask, which is (S, C)."""
        rng = generator_of(self.seed, f"dropout {place} {number}")
        return (torch.rand(self.block_size, width, generator=rng) < self.rate)[self.positions]

    def drop(self, place, module, inputs, x):  # (B, S, C)
        if self.first is None:
            return x
        numbers = range(self.first, self.first + len(x))
        masks = [self.is_dropped(place, number, x.size(-1)) for number in numbers]
        return (x / (1 - self.rate)).masked_fill(torch.stack(masks).to(x.device), 0.0)

    def again(self):
        """For recompute.py: a context for the repetition. By then `first` is that of a later
        microbatch."""
        return self.at(self.first)

    @contextmanager
    def at(self, first):
        kept, self.first = self.first, first
        try:
            yield
        finally:
            self.first = kept
