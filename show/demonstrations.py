"""Runs the demonstration at the end of a technique's file: demo(mesh), on several processes of this
machine. And the model, the sequences and the comparison that the demonstrations share."""

import math
import os
import sys
import tempfile
from pathlib import Path

import torch

from collectives import all_reduce
from mesh import Mesh
from model import build
from run import signals
from run.processes import init, shutdown
from shard import tag_whole
from sizes import GPTConfig


def ranks_asked(default):
    """The number of ranks on the command line, or the default."""
    given = sys.argv[1:] or [str(default)]
    if len(given) > 1 or not given[0].isdecimal() or not 0 < int(given[0]) <= 64:
        print(f"{sys.argv[0]}: say how many ranks, 1 to 64", file=sys.stderr)
        sys.exit(2)
    return int(given[0])


def _demonstrate(rank, fn, sizes, folder):
    """One of the processes: fn(mesh), with print() to a file."""
    signals.end_quietly()
    sys.stdout = open(f"{folder}/printed", "a", buffering=1)
    init(url=f"file://{folder}/rendezvous", rank=rank, size=math.prod(sizes.values()))
    fn(Mesh(**sizes))
    shutdown()


def demonstrate(fn, **sizes):
    """Run fn(mesh) on as many processes as the mesh has ranks; print their lines at the end."""
    signals.end_quietly()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_demonstrate, (fn, sizes, folder), math.prod(sizes.values()))
        print(Path(folder, "printed").read_text(), end="")


class NoReducer:
    """Takes the place of DDP or ZeRO where there are no replicas: each method does nothing."""

    every_microbatch = False

    def nothing(self, *args):
        pass

    expect = grad_added = flush = release_weights = nothing


# 8 sequences of 8 token ids, the same on every rank
SEQUENCES = torch.randint(50, (8, 8), generator=torch.Generator().manual_seed(0))


def small_gpt(mesh, n_layer=2, **more):
    """A tagged GPT, the same on every rank, and the sequences of this data rank."""
    config = GPTConfig(50, block_size=8, n_layer=n_layer, n_head=4, n_embd=16, **more)
    model = build(config, dtype=torch.double)
    index, size = mesh.place("dp", "ep")
    tag_whole(model, mesh.group("dp", "ep"))
    return model, SEQUENCES.chunk(size)[index]


def report_difference(name, rank, pairs):
    """Print the largest relative difference. pairs: [(this rank's gradient, one process's)]."""
    off = max((mine - alone).abs().max() / alone.abs().max() for mine, alone in pairs)
    print(f"{name:12} rank {rank}: gradients differ from one process's by {off:.0e} of their size")


def show_difference(name, mesh, model, summed=False):
    """Compare the gradients of a small_gpt with those of one process that trains on all sequences.
    Unless they are `summed` already, sum them first over the groups in their tags. A parameter of
    another rank's stage has no gradient here, and is left out."""
    alone = build(model.config, dtype=torch.double)
    alone(SEQUENCES, SEQUENCES).backward()
    whole = {name: param.grad for name, param in alone.canonical_parameters()}
    held = [param for param in model.parameters() if param.grad is not None]
    for param in held:
        for group in param.shard.sum_over if not summed else ():
            all_reduce(param.grad, group)
    report_difference(name, mesh.rank, [
        (param.grad, param.shard.slice(whole[param.shard.name])) for param in held])
