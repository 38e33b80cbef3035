"""On a GPU: python test_all.py -k cuda. Skipped where there is none."""

import gc
import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import train
from data.batches import Data
from engine.mesh import Mesh
from engine.nccl_group import CudaGroup
from run import checkpoint
from run.config import check_layout
from run.log import predicted_bytes
from tests.harness import (
    VOCAB,
    _train,
    assemble,
    close,
    config,
    equals_one_process,
    mesh_of,
    pool,
    reference,
    same_model,
)
from tests.trainer import Trainer

# ---- on a GPU: python test_all.py -k cuda ----

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# Layouts, in float64. Those without "collectives" take the ring; a run takes NCCL's, so most axes
# are here with these, too
CASES = [
    {}, {"recompute": True}, {"schedule": "zb-h1", "microbatches": 3},
    {"experts": 4}, {"compile": True}, {"dp": 2}, {"dp": 2, "zero": 1, "microbatches": 2},
    {"dp": 2, "zero": 2, "microbatches": 3}, {"dp": 4, "zero": 3, "recompute": True},
    {"dp": 3, "collectives": "native"}, {"dp": 2, "zero": 3, "collectives": "native"},
    {"tp": 2}, {"tp": 2, "sp": True}, {"tp": 2, "cp": 2,
                                                       "cp_attention": "all-to-all"},
    *({"pp": 2, "schedule": name, "chunks": v, "microbatches": 4}
      for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))),
    {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "microbatches": 3}, {"dp": 2, "ep": 2, "experts": 4},
    {"dp": 4, "shard": 2, "zero": 1}, {"dp": 4, "shard": 2, "zero": 3, "collectives": "native"},
    *({**flags, "collectives": "native"} for flags in (
        {"tp": 2}, {"tp": 2, "sp": True},
        {"pp": 2, "microbatches": 4}, {"cp": 2, "cp_attention": "all-to-all"},
        {"dp": 2, "ep": 2, "experts": 4}, {"dp": 2, "ep": 2, "pp": 2, "experts": 4},
        {"dp": 2, "tp": 2, "pp": 2, "microbatches": 3},
        {"dp": 2, "tp": 2, "sp": True, "zero": 3, "compile": True},
        {"pp": 2, "microbatches": 4, "compile": True}, {"dp": 2, "recompute": True,
                                                        "compile": True},
        {"dp": 2, "ep": 2, "experts": 4, "compile": True})),
]


def test_every_axis_meets_nccls_collectives(corpus):
    """Without a GPU: each case is a layout; a run's own choices are among them."""
    for flags in CASES:
        check_layout(config(corpus, device="cuda", **flags), 1)
    native = [flags for flags in CASES if flags.get("collectives") == "native"]
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        assert any(flags.get(axis, 1) > 1 for flags in native), axis
    for name in ("sp", "zero", "recompute", "experts", "compile"):
        assert any(flags.get(name) for flags in native), name


@needs_gpu
@pytest.mark.parametrize("flags", CASES, ids=str)
def test_cuda_equals_one_process_on_the_cpu(corpus, flags):
    equals_one_process(corpus, device="cuda", **flags)


def _near_float64(corpus, dtype, tolerance, **flags):
    """AssertionError unless loss, norm and gradients of a step are near those of `reference`."""
    cfg = config(corpus, dtype=dtype, n_embd=96, **flags)  # 12 heads of 8, the least for kernels
    got = pool(check_layout(cfg, 1), _train, cfg, 1)
    want = reference(corpus, **same_model(cfg))[1]
    for trace in got:
        close(trace[1]["loss"], want["loss"], "loss", tolerance)
        close(trace[1]["norm"], want["norm"], "norm", tolerance)
    for name, grad in assemble([trace[1]["grads"] for trace in got]).items():
        error = (grad.double() - want["grads"][name]).norm()
        assert error < tolerance * want["norm"], (name, error / want["norm"])


@needs_gpu
@pytest.mark.parametrize("dtype,tolerance", [
    ("float32", 1e-6), ("bfloat16", 0.015), ("float16", 0.002)])
@pytest.mark.parametrize("flags", [
    {}, {"cp": 2}, {"cp": 2, "tp": 2, "sp": True}, {"cp": 4, "recompute": True, "block_size": 16},
    {"cp": 2, "cp_attention": "all-to-all"}, {"cp": 2, "collectives": "native"},
    {"dp": 2, "zero": 3}, {"pp": 2, "microbatches": 3}], ids=str)
def test_cuda_in_32_and_16_bits_is_near_float64(corpus, dtype, tolerance, flags):
    """The ring takes the flash kernel in 16 bits, the memory-efficient one in 32. float16 scales
    the loss. Tolerances: three to four times the errors of the same layouts on a CPU."""
    _near_float64(corpus, dtype, tolerance, device="cuda", **flags)


def _scale(rank, cfg):
    trainer, data = Trainer(cfg, mesh_of(cfg), VOCAB), Data(cfg)
    trainer.scale.fill_(2.0**40)  # float16 has no such number: steps are skipped
    seen = []
    for step in range(30):
        norm, read = trainer.gradients(data.training(cfg, step, trainer.mesh))
        trainer.update(norm, 1e-3)
        seen.append(read())
    return seen


@needs_gpu
def test_cuda_float16_halves_the_scale_until_gradients_are_finite(corpus):
    cfg = config(corpus, device="cuda", dtype="float16", dp=2, n_embd=96)
    for seen in pool(check_layout(cfg, 1), _scale, cfg):
        losses, norms, scales = zip(*seen, strict=True)
        finite = [math.isfinite(norm) for norm in norms]
        assert not finite[0] and finite[-1] and finite == sorted(finite)
        assert scales[0] == 2.0**40 and scales[-1] == 2.0**40 / 2 ** finite.count(False)
        assert all(map(math.isfinite, losses))


def _saved(rank, cfg, folder, load):
    trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
    data = Data(cfg)
    if load:
        checkpoint.load(trainer, folder)
    else:
        trainer.step(data.training(cfg, 0, trainer.mesh), 0.01)
        folder = checkpoint.save(trainer, 1)
    _, read = trainer.gradients(data.training(cfg, 1, trainer.mesh))
    return str(folder), *read()[:2]


@needs_gpu
def test_cuda_saves_and_resumes_anywhere(corpus, tmp_path):
    gpu = config(corpus, device="cuda", dp=2, tp=2, zero=3, out=str(tmp_path))
    (folder, *want), *_ = pool(check_layout(gpu, 1), _saved, gpu, "", False)
    for cfg in (gpu, config(corpus), config(corpus, device="cuda")):
        got = pool(check_layout(cfg, 1), _saved, cfg, folder, True)[0][1:]
        close(got, want, "loss and norm")


@contextmanager
def slow_messages():
    """What is submitted begins late on the device: the host runs further ahead."""
    submit = CudaGroup.submit

    def slow(self, job, name):
        def late():
            torch.cuda._sleep(10_000_000)  # cycles of the current stream, the group's own
            job()

        return submit(self, late, name)

    with patch.object(CudaGroup, "submit", slow):
        yield


def test_the_memory_test_slows_the_messages_of_a_gpu(monkeypatch):
    """Without one: a submitted job begins after the sleep, on the group's own stream."""
    order = []
    event = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **more: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"), raising=False)
    group = CudaGroup(Mesh(dp=1), "solo", [0], 0)
    with slow_messages():
        group.submit(lambda: order.append("job"), "job")
    group.submit(lambda: order.append("job"), "job")
    assert order == ["sleep", "job", "job"]


def _reserved(rank, cfg):
    """Most bytes that the allocator held in three steps, with messages slowed down."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    mesh = mesh_of(cfg)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    with slow_messages():
        for step in range(3):
            trainer.step(data.training(cfg, step, mesh), 1e-3)
    layers = [sum(p.numel() for p in layer.parameters()) * 4
              for stage in trainer.pipeline.stages.values() for layer in stage.layers]
    return torch.cuda.max_memory_reserved(), predicted_bytes(trainer), max(layers)


@needs_gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_cuda_zero_holds_few_layers_though_the_host_runs_ahead(corpus, stage):
    cfg = config(corpus, device="cuda", dtype="float32", dp=2, zero=stage, n_layer=24, n_embd=768,
                 batch_size=2, collectives="native")
    # cuBLAS and cuBLASLt take workspaces from torch's allocator, 32 MB each on Hopper, for each
    # thread that multiplies: forward's and backward's
    workspaces = 4 * (32 << 20)
    for reserved, states, layer in pool(check_layout(cfg, 1), _reserved, cfg):
        # whole layers: two of weights, two of gradients; then activations and the allocator's rest
        bound = states + 6 * layer + (64 << 20) + workspaces
        assert reserved < bound < states + 24 * layer, (reserved, states, layer)
