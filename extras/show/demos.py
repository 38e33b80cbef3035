"""One demonstration of each technique, on a few processes: a small GPT, and how far its gradients
differ from those of one process. python -m extras.show NAME runs one; DEMOS has the names.

A demonstration is a function of a mesh, which every rank calls."""

from functools import partial
from typing import NamedTuple

import torch

import context_parallel
import engine.context_parallel
import engine.ddp
import engine.mesh
import engine.pipeline
import engine.tensor_parallel
import pipeline
from ddp import DDP
from expert_parallel import spread_experts
from extras.show import ring
from extras.show.demonstrations import (
    compare_attention,
    compare_reducer,
    pipeline_flags,
    show_difference,
    show_routes,
    small_gpt,
)
from extras.show.tables import zigzag_table
from mesh import Mesh
from schedules import cut, placement
from sequence_parallel import sequence_parallel
from tensor_parallel import tensor_parallel
from zero import REDUCERS


def ddp(mesh):
    """One backward: 2 sequences on each rank, against all of them in one process."""
    model, mine = small_gpt(mesh)
    reducer = DDP({0: model.layers})
    model(mine, mine).backward()
    for param, grad in zip(reducer.params, reducer.gradients(), strict=True):
        param.grad = grad
    show_difference("DDP", mesh, model, summed=True)


def buckets(mesh):
    """The same with the engine's DDP; and how many buckets were on their way in time."""
    model, mine = small_gpt(mesh)
    values = {name: param.data for name, param in model.canonical_parameters()}
    reducer = engine.ddp.DDP({0: model.layers}, lambda tag: values[tag.name], torch.double, "cpu",
                             20_000)
    reducer.expect(0, last=True)
    model(mine, mine).backward()
    launched = len(reducer.works)
    params = [param for bucket in reducer.buckets for param in bucket.params]
    for param, grad in zip(params, reducer.gradients(), strict=True):
        param.grad = grad.view_as(param)
    show_difference("buckets", mesh, model, summed=True)
    print(f"rank {mesh.rank}: {launched} of {len(reducer.buckets)} buckets were on their way when "
          "backward ended")


def zero(mesh):
    """Two microbatches under each stage: the gradients; and how many elements of the weights rank 0
    keeps, and how many of them its optimizer updates."""
    for stage, reducer in enumerate(REDUCERS):
        compare_reducer(f"ZeRO-{stage}", mesh, reducer)


def tensor(mesh):
    """What rank 0 holds of each matrix."""
    model, ids = small_gpt(mesh)
    tensor_parallel(model, mesh.group("tp"))
    model(ids, ids).backward()
    show_difference("tp", mesh, model)
    if mesh.rank == 0:
        for param in model.parameters():
            full = str([*param.tag.shape])
            print(f"{param.tag.name:34} {full:>9} on rank 0: {[*param.shape]}")


def fast_tensor(mesh):
    """The engine's layers, without --sp and with it."""
    for sp in (False, True):
        model, ids = small_gpt(mesh)
        engine.tensor_parallel.parallelize(model, mesh.group("tp"), sp)
        model(ids, ids).backward()
        show_difference("fast --sp" if sp else "fast", mesh, model)


def sequence(mesh):
    """Tensor parallelism and sequence parallelism, and the bytes that each sends."""
    group = mesh.group("tp")
    for technique in (tensor_parallel, sequence_parallel):
        model, ids = small_gpt(mesh)
        technique(model, group)
        before = group.bytes_sent
        model(ids, ids).backward()
        sent = group.bytes_sent - before
        show_difference(technique.__name__, mesh, model)
        if mesh.rank == 0:
            print(f"{technique.__name__}: {sent} bytes sent")


def context(mesh):
    """Which rank attends to which keys in which hop; then the gradients of each form."""
    group = mesh.group("cp")
    if group.rank == 0:
        print(zigzag_table(8 * group.size, group.size))
    for attention in (context_parallel.ring_attention, context_parallel.all_to_all_attention):
        compare_attention(attention.__name__, partial(attention, group=group), group)


def fast_context(mesh):
    """The engine's ring."""
    group = mesh.group("cp")
    ring_attention = partial(engine.context_parallel.ring_attention, group=group)
    compare_attention("fast ring", ring_attention, group)


def experts(mesh):
    """Where 16 tokens of each rank go."""
    model, mine = small_gpt(mesh, n_experts=8, top_k=2)
    spread_experts(model, mesh)
    model(mine, mine).backward()
    show_routes(model.layers[1].mlp.load, mesh.group("ep"))
    show_difference("spread", mesh, model)


def schedules(make_pipeline, names, mesh):
    """Pipeline schedules. names: {schedule: chunks of a rank}."""
    group = mesh.group("pp")
    for name, v in names.items():
        model, ids = small_gpt(mesh, n_layer=6)
        pipeline.tie_ends(model.layers, mesh.ends("pp"))
        where = placement(name, group.size, v)
        cuts = cut(model.config.layer_costs(), len(where))
        stages = {s: list(model.layers[start:stop]) for s, (start, stop) in enumerate(cuts)
                  if where[s] == group.rank}
        batches = [(row, row, None) for row in ids.split(1)]
        cfg = pipeline_flags(name, len(batches), v)
        shape = (1, 8, 16)  # (B, S, C) of small_gpt
        reducer = DDP(stages)
        make_pipeline(stages, group, cfg, shape, torch.double).run(batches, reducer)
        for param, grad in zip(reducer.params, reducer.gradients(), strict=True):
            param.grad = grad
        show_difference(name, mesh, model, summed=True)


class Demo(NamedTuple):
    run: object  # a function of a mesh
    axis: str  # the mesh has one axis longer than 1
    make_mesh: object = Mesh
    more: dict = {}  # other sizes of the mesh
    any_number: bool = False  # runs on any number of ranks; else on 4


PLAIN = {"gpipe": 1, "1f1b": 1}
DEMOS = {
    "collectives": Demo(ring.demo, "dp", any_number=True),
    "ddp": Demo(ddp, "dp"),
    "zero": Demo(zero, "dp"),
    "tensor_parallel": Demo(tensor, "tp"),
    "sequence_parallel": Demo(sequence, "tp"),
    "context_parallel": Demo(context, "cp", any_number=True),
    "expert_parallel": Demo(experts, "dp", more={"ep": 4}),
    "pipeline": Demo(partial(schedules, pipeline.Pipeline, PLAIN), "pp"),
    "engine.ddp": Demo(buckets, "dp", engine.mesh.Mesh),
    "engine.tensor_parallel": Demo(fast_tensor, "tp", engine.mesh.Mesh),
    "engine.context_parallel": Demo(fast_context, "cp", engine.mesh.Mesh, any_number=True),
    "engine.pipeline": Demo(partial(schedules, engine.pipeline.Pipeline,
                                    PLAIN | {"interleaved": 2}), "pp", engine.mesh.Mesh)}
