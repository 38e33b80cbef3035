"""The demonstrations of the techniques: python -m extras.show NAME runs one of DEMOS.

A demonstration is a function of a mesh, which every rank calls. Most of them train a small GPT in
float64, and print how far the gradients are from those of one process: 1e-15 is rounding."""

from collections.abc import Callable
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
from extras.show.draw import LETTERS, schedule_text, time_schedule
from extras.show.tables import zigzag_table
from mesh import Mesh
from schedules import cut, placement
from sequence_parallel import sequence_parallel
from tensor_parallel import tensor_parallel
from zero import REDUCERS

# ---- data parallelism ----


def demo_ddp(mesh):
    """DDP: each rank runs backward on its own 2 of 8 sequences; DDP sums the gradients."""
    model, mine = small_gpt(mesh)
    reducer = DDP({0: model.layers})
    model(mine, mine).backward()
    for param, grad in zip(reducer.params, reducer.gradients(), strict=True):
        param.grad = grad
    show_difference("DDP", mesh, model, summed=True)


def demo_fast_ddp(mesh):
    """The engine's DDP: how many buckets of gradients were sent before backward ended."""
    model, mine = small_gpt(mesh)
    # A small bucket, so that there are several
    reducer = engine.ddp.DDP({0: model.layers}, bucket_bytes=20_000)
    reducer.expect(0, last=True)
    model(mine, mine).backward()
    launched = len(reducer.works)
    for param, grad in zip(reducer.params, reducer.gradients(), strict=True):
        param.grad = grad.view_as(param)
    show_difference("DDP in buckets", mesh, model, summed=True)
    if mesh.rank == 0:
        print(f"{launched} of {len(reducer.buckets)} buckets were on their way when backward ended")


def demo_zero(mesh):
    """Each stage of ZeRO: how many numbers rank 0 keeps, and how many its optimizer steps."""
    for stage, reducer in enumerate(REDUCERS):
        compare_reducer(f"ZeRO-{stage}", mesh, reducer)


# ---- tensor and sequence parallelism ----


def demo_tensor_parallel(mesh):
    """Tensor parallelism: which part of each parameter rank 0 holds."""
    model, ids = small_gpt(mesh)
    tensor_parallel(model, mesh.group("tp"))
    model(ids, ids).backward()
    show_difference("tensor_parallel", mesh, model)
    if mesh.rank == 0:
        for param in model.parameters():
            full = str([*param.tag.shape])
            print(f"{param.tag.name:34} {full:>9} on rank 0: {[*param.shape]}")


def demo_fast_tensor_parallel(mesh):
    """The engine's layers, without --sp and with it."""
    for sp in (False, True):
        model, ids = small_gpt(mesh)
        engine.tensor_parallel.parallelize(model, mesh.group("tp"), sp)
        model(ids, ids).backward()
        show_difference("tensor_parallel, --sp" if sp else "tensor_parallel", mesh, model)


def demo_sequence_parallel(mesh):
    """Tensor parallelism alone, then with sequence parallelism: the bytes that rank 0 sends."""
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
    if mesh.rank == 0:
        print("as many: an all-reduce is a reduce-scatter, then an all-gather. Between the two, at "
              "the LayerNorms,\nsequence_parallel leaves each rank 1/4 of the tokens")


# ---- context and expert parallelism ----


def demo_context_parallel(mesh):
    """Which queries meet which keys in which hop of the ring; then both forms of attention."""
    group = mesh.group("cp")
    if group.rank == 0:
        print(zigzag_table(8 * group.size, group.size))
    for attention in (context_parallel.ring_attention, context_parallel.all_to_all_attention):
        compare_attention(attention.__name__, partial(attention, group=group), group)


def demo_fast_context_parallel(mesh):
    """The engine's ring attention."""
    group = mesh.group("cp")
    ring_attention = partial(engine.context_parallel.ring_attention, group=group)
    compare_attention("ring_attention", ring_attention, group)


def demo_expert_parallel(mesh):
    """Expert parallelism: which rank's tokens chose which of 8 experts."""
    model, mine = small_gpt(mesh, n_experts=8, top_k=2)
    spread_experts(model, mesh)
    model(mine, mine).backward()
    show_routes(model.layers[1].mlp.load, mesh.group("ep"))
    show_difference("expert_parallel", mesh, model)


# ---- pipelines ----


def demo_pipeline(make_pipeline, schedules, mesh):
    """Train 8 microbatches under each of the schedules, {name: chunks of a rank}. make_pipeline:
    the class Pipeline of the root or of engine/."""
    group = mesh.group("pp")
    for name, v in schedules.items():
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
        if group.rank == 0:
            timeline = time_schedule(name, group.size, len(batches), v, costs=(1, 1, 1, 0))
            print(schedule_text(timeline.times))
        show_difference(name, mesh, model, summed=True)
    if group.rank == 0:
        print(LETTERS)


PLAIN = {"gpipe": 1, "1f1b": 1}


class Demo(NamedTuple):
    run: Callable  # run(mesh), on every rank
    axis: str  # the axis of the mesh along which the ranks lie
    make_mesh: Callable = Mesh
    ep: int = 1  # how many of the data ranks share the experts
    any_number: bool = False  # runs on any number of ranks; else on 4


DEMOS = {
    "collectives": Demo(ring.demo, "dp", any_number=True),
    "ddp": Demo(demo_ddp, "dp"),
    "zero": Demo(demo_zero, "dp"),
    "tensor_parallel": Demo(demo_tensor_parallel, "tp"),
    "sequence_parallel": Demo(demo_sequence_parallel, "tp"),
    "context_parallel": Demo(demo_context_parallel, "cp", any_number=True),
    "expert_parallel": Demo(demo_expert_parallel, "dp", ep=4),
    "pipeline": Demo(partial(demo_pipeline, pipeline.Pipeline, PLAIN), "pp"),
    "engine.ddp": Demo(demo_fast_ddp, "dp", engine.mesh.Mesh),
    "engine.tensor_parallel": Demo(demo_fast_tensor_parallel, "tp", engine.mesh.Mesh),
    "engine.context_parallel": Demo(demo_fast_context_parallel, "cp", engine.mesh.Mesh,
                                    any_number=True),
    "engine.pipeline": Demo(partial(demo_pipeline, engine.pipeline.Pipeline,
                                    PLAIN | {"interleaved": 2}), "pp", engine.mesh.Mesh)}
