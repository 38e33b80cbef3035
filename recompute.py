"""Activation recomputation: backward runs a block once more instead of keeping what it computed.

Held for backward: the block's input, B S C elements, instead of all that autograd would save in the
block: some 16 times as much on one rank, (4 + 12/T) times under tensor parallelism (the table in
engine/tensor_parallel.py). Paid: a second forward of each block, a third more FLOPs per step; the
block's forward messages are sent again, except those after the last saved tensor (tensor
parallelism's last all-reduce). Also called activation checkpointing: Chen et al., arXiv 1604.06174.
ZeRO-3 (zero.py) frees weights in the same way.

    torchrun train.py --pp 2 --recompute
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from model import Block

# torch has this as torch.utils.checkpoint, which imports torch.compile: two seconds in each process


class Enough(Exception):
    """All that backward needs has been computed again."""


def recompute(run, *inputs, again=nullcontext):
    """run(*inputs), but autograd saves numbers instead of tensors: i for the i-th tensor that run
    saves. At backward's first request, whichever number it is for, run is repeated from the same
    state of torch's random numbers, and this time its tensors are kept.

    inputs: tensors. again() is called now; it returns a context for the repetition."""
    num_saved = 0
    saved = []
    repeating = again()
    random_state = torch.get_rng_state()

    def number(tensor):
        nonlocal num_saved
        num_saved += 1
        return num_saved - 1

    def keep(tensor):
        saved.append(tensor.detach())
        if len(saved) == num_saved:
            raise Enough

    def tensor_of(i):
        if not saved:
            now = torch.get_rng_state()
            torch.set_rng_state(random_state)
            # detached: the repetition has a graph of its own, which nobody uses
            alone = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
            try:
                with repeating, torch.enable_grad(), saved_tensors_hooks(keep, lambda kept: kept):
                    run(*alone)
            except Enough:
                pass
            torch.set_rng_state(now)
        return saved[i]

    with saved_tensors_hooks(number, tensor_of):
        return run(*inputs)


def recompute_blocks(stages, again=nullcontext):
    """Recompute every block of these stages, {stage: [layers]}. Call it after the reducer is made:
    the root's ZeRO-3 has then replaced each block by a Gathered, which recomputes anyway and is
    left as it is. (The engine's ZeRO-3 keeps the blocks: they are recomputed.)"""
    for layers in stages.values():
        for layer in layers:
            if isinstance(layer, Block):
                layer.forward = partial(recompute, layer.forward, again=again)
