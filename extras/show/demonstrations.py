"""Runs a function of a mesh on several processes of this machine; and what the demonstrations of
demos.py share: a small GPT, its sequences, the comparison with one process."""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from collectives import all_reduce, all_to_all, maximum
from context_parallel import zigzag
from experts import kind_of
from mesh import Mesh
from model import build, causal_attention
from run import signals
from run.copies import whole_slices
from run.processes import init, shutdown
from shard import tag_whole
from sizes import GPTConfig


def _demonstrate(rank, ranks, fn, make_mesh, sizes, folder):
    """Run fn(mesh) in this process, one of several; print() writes to the folder's file."""
    signals.end_quietly()
    sys.stdout = open(f"{folder}/printed", "a", buffering=1)
    init(url=f"file://{folder}/rendezvous", rank=rank, size=ranks)
    fn(make_mesh(**sizes))
    shutdown()


def demonstrate(fn, make_mesh=Mesh, dp=1, pp=1, cp=1, tp=1, ep=1):
    """Run fn(mesh) on as many processes as a mesh of these sizes has ranks; print their lines at
    the end. ep: how many of the data ranks share the experts (mesh.py)."""
    signals.end_quietly()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = dp * pp * cp * tp
    sizes = {"dp": dp, "pp": pp, "cp": cp, "tp": tp, "ep": ep}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_demonstrate, (ranks, fn, make_mesh, sizes, folder), ranks)
        print(Path(folder, "printed").read_text(), end="")


# 8 sequences of 8 token ids, the same on every rank
SEQUENCES = torch.randint(50, (8, 8), generator=torch.Generator().manual_seed(0))


def small_gpt(mesh, n_layer=2, **more):
    """A tagged GPT, the same on every rank, and the sequences of this data rank."""
    config = GPTConfig(50, block_size=8, n_layer=n_layer, n_head=4, n_embd=16, **more)
    model = build(config, dtype=torch.double, kind=kind_of(config))
    index, size = mesh.place("dp")
    tag_whole(model, mesh.group("dp"))
    return model, SEQUENCES.chunk(size)[index]


def pipeline_flags(schedule, microbatches, chunks=1):
    """The flags that a Pipeline reads. A batch of one sequence of one token: so nothing is divided,
    and the loss is a sum, like one process's below."""
    return SimpleNamespace(schedule=schedule, microbatches=microbatches, chunks=chunks,
                           batch_size=1, block_size=1)


def report_difference(name, group, pairs):
    """Print the largest relative difference on any rank of the group. pairs: [(this rank's
    gradient, one process's)]."""
    off = max((mine - alone).abs().max() / alone.abs().max() for mine, alone in pairs).view(1)
    all_reduce(off, group, maximum)
    if group.rank == 0:
        print(f"{name}: the gradients of {group.size} ranks differ from one process's by "
              f"{off.item():.0e} of their size")


def show_difference(name, mesh, model, summed=False):
    """Compare the gradients of a small_gpt with those of one process that trains on all sequences.
    Unless they are `summed` already, sum them first over the groups in their tags. A parameter of
    another rank's stage has no gradient here, and is left out."""
    alone = build(model.config, dtype=torch.double, kind=kind_of(model.config))
    alone(SEQUENCES, SEQUENCES).backward()
    whole = {name: param.grad for name, param in alone.canonical_parameters()}
    held = [param for param in model.parameters() if param.grad is not None]
    if not summed:
        for param in held:
            for group in param.tag.sum_over:
                all_reduce(param.grad, group)
    report_difference(name, mesh.world, [
        (param.grad, param.tag.slice(whole[param.tag.name])) for param in held])


# ---- comparisons for single techniques: DDP and ZeRO, context parallelism, experts ----


def compare_reducer(name, mesh, reducer):
    """Run two microbatches under DDP or a stage of ZeRO. Print how far the gradients differ from
    one process's, and how many parameters rank 0 keeps. reducer: the class."""
    model, mine = small_gpt(mesh)
    psi = sum(param.numel() for param in model.parameters())
    layers = model.layers
    ours = reducer({0: layers})
    *before_head, head = layers
    for rows in mine.chunk(2):
        x = rows
        for layer in before_head:
            x = layer(x)
        head(x, rows).backward()
    # Count elements in memory, of 8 bytes each. Under ZeRO-3 the model's parameters are empty, and
    # ours.params are chunks. Else ours.params are the model's parameters: the set has each once
    kept = {*model.parameters(), *ours.params}
    held = sum(param.untyped_storage().nbytes() // 8 for param in kept)
    stepped = sum(weight.numel() for weight in ours.weights)
    alone = build(model.config, dtype=torch.double)
    alone(SEQUENCES, SEQUENCES).backward()
    one_process = {name: param.grad for name, param in alone.canonical_parameters()}
    report_difference(name, mesh.world, [
        (whole, one_process[tag.name]) for tag, whole in whole_slices(ours, ours.gradients())])
    if mesh.rank == 0:
        print(f"{name}: of {psi} parameters rank 0 keeps {held}, and its optimizer steps {stepped}")


def compare_attention(name, attention, group):
    """Print how far the gradients of attention(q, k, v), over tokens split by zigzag, differ from
    one process's."""
    S = 8 * group.size
    generator = torch.Generator().manual_seed(0)
    mine = zigzag(S, group.size, group.rank)
    # (B, nh, S, hs): as many heads as ranks, because all-to-all gives each rank a head at least
    q, k, v = (torch.randn(2, group.size, S, 8, dtype=torch.double, generator=generator)
               for _ in "qkv")

    def gradients(attention, tokens):
        """The gradients of q, k and v at these positions."""
        parts = [x[:, :, tokens].clone().requires_grad_() for x in (q, k, v)]
        # sin: without it the gradient of every result would be 1
        attention(*parts).sin().sum().backward()
        return [part.grad for part in parts]

    alone = gradients(causal_attention, torch.arange(S))
    report_difference(name, group, [
        (part, whole[:, :, mine]) for part, whole in zip(gradients(attention, mine), alone,
                                                         strict=True)])


def show_routes(load, group):
    """Print how often the tokens of each rank of the group chose each expert. load (n_experts,):
    how often the tokens of this rank chose each."""
    load = load.view(group.size, -1).long()  # [rank][its expert]
    loads = [torch.empty_like(load) for _ in range(group.size)]
    all_to_all(loads, [load] * group.size, group)
    if group.rank == 0:
        choices = int(load.sum())  # a token counts once for each of its k experts
        print("how often the tokens of each rank (rows) chose each expert; | separates the experts "
              "of different ranks")
        for rank, row in enumerate(loads):
            away = int(row.sum() - row[rank].sum())
            table = " |".join("".join(f"{n:4d}" for n in part) for part in row.tolist())
            print(f"rank {rank}  {table}    {away} of {choices} choices go elsewhere")
