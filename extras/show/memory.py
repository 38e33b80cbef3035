"""What one process keeps for backward: measured, and by a formula. (docs/memory.md)

Per token, in bytes, for L blocks of width C with nh heads and V words, w bytes per number:

    a block         16 C w     inputs and outputs of two norms, q, k, v, attention's output, c_fc's
                               and GELU's
                  + 4 nh       attention's logsumexps, in 32 bits
                  + 4 w        mean and deviation of two norms
    recomputed      C w        its input
    the head        2 C w + 2 w + 4 V       its norm, and the softmax in 32 bits
"""

import gc
import itertools

import torch

from model import build
from recompute import recompute_blocks
from sizes import WIDTHS, GPTConfig

CONFIG = GPTConfig(vocab_size=1024, block_size=128, n_layer=6, n_head=4, n_embd=128)
ROWS = [  # (words, sequences of a microbatch, dtype, recompute?)
    ("8 sequences at once", 8, "float32", False),
    ("4 microbatches of 2, accumulated", 2, "float32", False),
    ("recompute", 8, "float32", True),
    ("bfloat16", 8, "bfloat16", False),
    ("bfloat16, 4 microbatches, recompute", 2, "bfloat16", True)]


def bytes_by_formula(config, sequences, width, recomputed):
    """Bytes that forward keeps for backward, by the formula."""
    C = config.n_embd
    block = C * width if recomputed else 16 * C * width + 4 * config.n_head + 4 * width
    head = 2 * C * width + 2 * width + 4 * config.vocab_size
    return sequences * config.block_size * (config.n_layer * block + head)


def kept_bytes(config, sequences, dtype, recomputed):
    """Bytes that the forward of a microbatch allocates and does not free, measured."""
    model = build(config, dtype=getattr(torch, dtype))
    if recomputed:
        recompute_blocks({0: list(model.layers)})
    ids, targets = torch.zeros(2, sequences, config.block_size, dtype=torch.long)
    gc.collect()  # else an earlier model may be freed, and counted, meanwhile
    gc.disable()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        loss = model(ids, targets)
    gc.enable()
    events = profile.kineto_results.events()
    *_, kept = itertools.accumulate(event.nbytes() for event in events
                                    if event.name() == "[memory]")
    assert loss.requires_grad  # it holds what is kept
    return kept


def memory_command():
    print(f"{'':38}kept for backward    by the formula")
    for words, sequences, dtype, recomputed in ROWS:
        kept = kept_bytes(CONFIG, sequences, dtype, recomputed)
        wanted = bytes_by_formula(CONFIG, sequences, WIDTHS[dtype], recomputed)
        print(f"{words:38}{kept / 1e6:14.2f} MB {wanted / 1e6:14.2f} MB", flush=True)
