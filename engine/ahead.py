"""Computes values on threads, some of them before they are asked for.

For initial values: torch draws a tensor on one thread, and a rank of a large model has many tensors
to draw before its first step. Each has a generator of its own, so the order of drawing does not
matter.
"""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

# Each thread draws a full tensor, of which a rank may keep a slice: more threads take more memory
MAX_THREADS = 8


def threads_per_rank():
    """The cores that this process may use, shared with the other ranks of its machine. (Not
    OMP_NUM_THREADS, which torchrun sets to 1.)"""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(MAX_THREADS, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def compute_ahead(function, arguments, threads):
    """Yield function(x) for each x of arguments, in order; meanwhile threads compute the next ones,
    at most `threads` besides the one that is yielded. An error of function(x) is raised in turn.
    With one thread nothing is ahead, and the caller computes."""
    if threads == 1:
        yield from map(function, arguments)
        return
    with ThreadPoolExecutor(threads) as executor:
        computing = deque()
        for x in arguments:
            computing.append(executor.submit(function, x))
            if len(computing) > threads:
                yield computing.popleft().result()
        while computing:
            yield computing.popleft().result()
