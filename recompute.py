"""Activation recomputation: backward runs a block once more instead of keeping what it computed.

Held for backward: the block's input, B S C elements, instead of all that autograd would save in the
block: some 16 times as much on one rank, (4 + 12/T) times under tensor parallelism (the table in
engine/tensor_parallel.py). Paid: a second forward of each block, a third more FLOPs per step; the
block's forward messages are sent again (on the root's parts without tensor parallelism's last
all-reduce, which comes after the last saved tensor). Also called activation checkpointing: Chen et
al., arXiv 1604.06174. ZeRO-3 (zero.py) frees weights in the same way.

    torchrun train.py --pp 2 --recompute
"""

import weakref
from contextlib import nullcontext
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

# torch has this as torch.utils.checkpoint, which imports torch.compile: two seconds in each process


class Enough(Exception):
    """All that backward needs has been computed again."""


class StandIn:
    """What autograd saves for backward instead of a tensor."""

    value = None  # the tensor, once it has been computed again


def recompute(run, *args, **kwargs):
    """run(*args, **kwargs), but autograd saves StandIns. At backward's first request for one of
    their values, run is repeated, from the same state of torch's random numbers and of autocast,
    and its i-th tensor to save becomes the value of the i-th StandIn. A value is freed when
    autograd frees its StandIn.

    Tensors among the arguments, in lists and dicts too, must not be changed in place before
    backward."""
    stand_ins = []  # weak references: autograd alone keeps the StandIns
    random_state = torch.get_rng_state()
    inputs, form = tree_flatten((args, kwargs))
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    versions = [x._version for x in tensors]
    kind = tensors[0].device.type if tensors else "cpu"
    autocast = nullcontext()
    if torch.amp.is_autocast_available(kind):
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        autocast = torch.autocast(kind, dtype, enabled)

    def stand_in(tensor):
        saved = StandIn()
        stand_ins.append(weakref.ref(saved))
        return saved

    def repeat():
        if [x._version for x in tensors] != versions:
            raise RuntimeError("an input of recompute() was changed in place before backward")
        num_computed = 0

        def keep(tensor):
            nonlocal num_computed
            saved = stand_ins[num_computed]()
            num_computed += 1
            if saved is not None:  # else autograd needs it no more
                saved.value = tensor.detach()
            if num_computed == len(stand_ins):
                raise Enough

        # detached: the repetition has a graph of its own, which is dropped
        alone = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
                 for x in inputs]
        args, kwargs = tree_unflatten(alone, form)
        now = torch.get_rng_state()
        torch.set_rng_state(random_state)
        try:
            with autocast, torch.enable_grad(), saved_tensors_hooks(keep, lambda kept: kept):
                run(*args, **kwargs)
        except Enough:
            pass
        finally:
            torch.set_rng_state(now)

    def value_of(saved):
        if saved.value is None:
            repeat()
        return saved.value

    with saved_tensors_hooks(stand_in, value_of):
        return run(*args, **kwargs)


def recompute_blocks(stages):
    """Recompute every block of these stages, {stage: [layers]}. Call it after the reducer is made:
    the root's ZeRO-3 has then replaced each block by a Gathered, which recomputes anyway and is
    left as it is. (The engine's ZeRO-3 keeps the blocks: they are recomputed.)"""
    for layers in stages.values():
        for layer in layers:
            if "attn" in dict(layer.named_children()):  # a block, of model.py or of llama.py
                layer.forward = partial(recompute, layer.forward)
