"""DDP and ZeRO: memory held, bytes sent, overlap, overflow, the optimizer's few kernels."""

import itertools
import math
import resource
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import engine.collectives as c
import engine.ddp as ddp
import engine.zero as zero
import sizes
from data.batches import Data
from engine.group import Group
from engine.mesh import Mesh
from engine.optimizer import exact_norms
from run import checkpoint
from run.config import check
from run.copies import whole_slices
from shard import Tag
from tests.harness import (
    FULL,
    VOCAB,
    config,
    local_tensors,
    mesh_of,
    pool,
)
from tests.pool import Pool
from tests.trainer import Trainer, state_bytes


def _memory(rank, cfg):
    """Bytes of the states against the formula, and the most that a step holds beyond them."""
    mesh = mesh_of(cfg)
    trainer, data = Trainer(cfg, mesh, VOCAB), Data(cfg)
    batch = data.training(cfg, 0, mesh)
    norm, read = trainer.gradients(batch)
    trainer.update(norm, 1e-3)
    formula, measured = state_bytes(trainer)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        trainer.gradients(batch)
    memory = [e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]"]
    layers = {}
    for i, layer in enumerate(trainer.pipeline.stages[0].layers):
        buckets = {trainer.reducer.home[p] for p in layer.parameters()}
        layers[i] = sum(b.full.nbytes for b in buckets)
    empty = all(b.full.untyped_storage().nbytes() == 0 for b in trainer.reducer.buckets)
    return formula, measured, max(itertools.accumulate(memory)), layers, empty


@pytest.mark.parametrize("dtype,schedule,recompute", [
    ("float32", "1f1b", False), ("bfloat16", "1f1b", True), ("float32", "zb-h1", False),
    *[("float32", "1f1b", True), ("bfloat16", "1f1b", False)] * FULL])
def test_memory_held_is_the_formula_and_the_peak_what_the_stage_allows(
        corpus, dtype, schedule, recompute):
    """Wide and short, so that weights and gradients outweigh activations. 65: there is padding."""
    flags = {"dp": 4, "n_embd": 65, "n_head": 5, "n_layer": 6, "block_size": 4, "batch_size": 8,
             "dtype": dtype, "recompute": recompute, "microbatches": 2, "schedule": schedule}
    width = 2 if dtype == "bfloat16" else 4
    beyond = {}
    for stage in range(4):
        got = pool(4, _memory, config(corpus, zero=stage, **flags))
        for formula, measured, _, _, empty in got:
            assert measured == formula
            assert empty == (stage == 3)
        layers = got[0][3]
        beyond[stage] = max(peak for _, _, peak, _, _ in got)
    psi = sum(layers.values()) // width - layers[0] // width  # the tied weight is in two layers
    gathered = max(layers[i] + layers[i + 1] for i in range(len(layers) - 1))
    grads = max(layers.values())
    if schedule == "zb-h1":  # those of LayerNorm, row biases and embedding come with I, wait for W
        grads += (6 * 6 + 2) * 65 * width + layers[0]
    # a step of stage 0 shows what activations and autograd's own temporaries take
    assert beyond[2] <= beyond[0] + grads
    assert beyond[3] <= beyond[0] + gathered + grads
    assert gathered + 2 * grads < psi * width, "the bound must be able to fail"


def _whole_weights(rank, cfg):
    """Bytes of whole weights on this rank: after the last backward of a step, and after whole()."""
    trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
    held = []
    batch = trainer.own(Data(cfg).training(cfg, 0, trainer.mesh))
    for use in (lambda: trainer.pipeline.run(batch, trainer.reducer),
                lambda: list(trainer.reducer.whole())):
        use()
        held.append(sum(b.full.untyped_storage().nbytes() for b in trainer.reducer.buckets))
        trainer.reducer.gradients()
    return held


def test_zero3_frees_the_last_weights_that_a_backward_or_whole_has_gathered(corpus):
    assert pool(2, _whole_weights, config(corpus, pp=2, zero=3, microbatches=2)) == [[0, 0]] * 2


@pytest.mark.parametrize("gb,psi", [
    ({1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
      256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)}, 7.5e9),
    ({1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000),
      64: (4187, 2218, 250), 256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)}, 1e12)])
def test_bytes_per_parameter_are_the_published_ones(gb, psi):
    """ZeRO, arXiv 1910.02054, table 1: its digits are rounded or cut."""
    for ranks, row in gb.items():
        for stage, want in zip((1, 2, 3), row, strict=True):
            got = psi * sum(sizes.bytes_per_parameter(stage, ranks)) / 1e9
            assert abs(got - want) < (1 if want > 1000 else 0.06)


def _zero_bytes(rank, cfg):
    mesh = mesh_of(cfg)
    trainer, data = Trainer(cfg, mesh, VOCAB), Data(cfg)
    norm, read = trainer.gradients(data.training(cfg, 0, mesh))
    trainer.update(norm, 1e-3)
    units = {b: b.full.numel() * 8 for b in trainer.reducer.buckets}
    first = trainer.pipeline.stages[0].layers[0]
    wpe = units[trainer.reducer.home[first.wpe.weight]]
    if cfg.zero < 3:  # new weights are on their way after a step
        trainer.reducer.gather_weights(trainer.pipeline.stages[0].layers)
    return mesh.group("shard", "ep", "cp").bytes_sent, sum(units.values()), wpe


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("D,m", [(2, 1), (4, 3)])
def test_zero_sends_the_formula(corpus, stage, D, m):
    got = pool(D, _zero_bytes, config(corpus, zero=stage, dp=D, microbatches=m))
    total, psi, wpe = (sum(column) for column in zip(*got, strict=True))
    psi, wpe = psi // D, wpe // D
    # Stage 3: 3 Psi. The tied weight is gathered twice too, but both times in forward, for each of
    # its ends; backward does not read it. The embedding's backward does not read wpe either
    want = {0: 2 * psi, 1: 2 * psi, 2: (1 + m) * psi, 3: m * (3 * psi - wpe)}[stage]
    assert total == (D - 1) * want


def _under_limit(rank, cfg, limit):
    """Whether one step of the layout fits into `limit` bytes of address space beyond the idle."""
    mesh = mesh_of(cfg)
    for group in (mesh.group("shard", "ep", "cp"), mesh.group("cp"), mesh.world):
        # its threads have their stacks by now
        c.all_reduce(torch.zeros(1), group, async_op=True).wait()
    idle = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (idle + limit, limits[1]))
    try:
        # no threads that draw: malloc reserves address space for each
        with patch.object(ddp, "threads_per_rank", lambda: 1):
            trainer, data = Trainer(cfg, mesh, VOCAB), Data(cfg)
        norm, read = trainer.gradients(data.training(cfg, 0, mesh))
        trainer.update(norm, 1e-3)
        return "trains"
    except RuntimeError as error:
        return "out of memory" if "allocate memory" in str(error) else str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("stage,outcome", [(0, "out of memory"), (3, "trains")])
def test_zero3_trains_what_does_not_fit_into_one_rank(corpus, stage, outcome):
    flags = {"n_layer": 12, "n_embd": 384, "batch_size": 4, "dtype": "float32", "microbatches": 1}
    psi = 12 * 12 * 384**2  # 21 million parameters, 340 MB of states
    cfg = config(corpus, dp=4, zero=stage, **flags)
    fresh = Pool()  # address space that an old process has freed would be used again
    fresh.start(4)
    try:
        assert fresh(4, _under_limit, cfg, 12 * psi) == [outcome] * 4
    finally:
        fresh.stop()


def _overflow(rank, cfg):
    mesh = mesh_of(cfg)
    trainer, data = Trainer(cfg, mesh, VOCAB), Data(cfg)
    before = [w.clone() for _, w in local_tensors(trainer, "weights")]
    launch, scale = trainer.reducer.launch, float(trainer.scale)

    def poisoned(bucket):
        if rank == 1:
            bucket.grad[0] = math.inf
        launch(bucket)

    trainer.reducer.launch = poisoned
    norm, read = trainer.gradients(data.training(cfg, 0, mesh))
    trainer.update(norm, 1e-2)
    after = [w for _, w in local_tensors(trainer, "weights")]
    unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    halved = trainer.scale == scale / 2
    trainer.reducer.launch = launch
    norm, read = trainer.gradients(data.training(cfg, 1, mesh))
    trainer.update(norm, 1e-2)
    stepped = not torch.equal(before[0], local_tensors(trainer, "weights")[0][1])
    return unchanged, halved, math.isfinite(norm) and stepped


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overflow_on_one_rank_skips_the_step_on_all(corpus, stage):
    cfg = config(corpus, zero=stage, dp=2, tp=2, dtype="float16", microbatches=2)
    got = pool(4, _overflow, cfg)
    assert got == [(True, True, True)] * 4


def _grads(rank, cfg):
    trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
    for _ in range(2):  # the second one must not add to the first
        trainer.gradients(Data(cfg).training(cfg, 0, trainer.mesh))
    grads = local_tensors(trainer, "grads")
    trainer.update(torch.tensor(1.0), 1e-3)
    return grads, state_bytes(trainer)


READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class Launches(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the operations that are not just another view."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if not op.is_view and "record_function" not in name and name not in ("detach", "empty"):
            self.counts[name] += 1
        return op(*args, **kwargs or {})


def _counted(rank, cfg):
    """(what a step calls to look into a tensor, operations of norm and optimizer, weights)"""
    trainer, data = Trainer(cfg, mesh_of(cfg), VOCAB), Data(cfg)
    batches = [data.training(cfg, step, trainer.mesh) for step in range(2)]
    trainer.step(batches[0], 1e-3)
    reads, kept = [], {name: getattr(torch.Tensor, name) for name in READS}
    for name, method in kept.items():
        setattr(torch.Tensor, name, lambda self, *args, method=method, name=name: (
            reads.append(name), method(self, *args))[1])
    try:
        norm, sums = trainer.step(batches[1], 1e-3)
        read = trainer.mesh.world.start_read(torch.cat([norm.view(1), sums]))  # as in run/log.py
        norm, _ = trainer.gradients(batches[0])
        with Launches() as launches:
            trainer.optimizer.square(trainer.grads)
            trainer.optimizer.step(trainer.grads, norm, 1e-3)
        read()
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)
    return reads, launches.counts, len(trainer.reducer.weights)


@pytest.mark.parametrize("flags", [
    {"dp": 2, "grad_clip": 1e-6}, {"dp": 2, "zero": 3, "dtype": "bfloat16"},
    {"dp": 2, "pp": 2, "zero": 1, "dtype": "bfloat16"},
    {"tp": 2, "cp": 2, "sp": True}], ids=str)
def test_a_step_looks_at_the_device_once_and_the_optimizer_has_few_kernels(corpus, flags):
    cfg = config(corpus, microbatches=2, **flags)
    for reads, counts, weights in pool(check(cfg, 1), _counted, cfg):
        assert reads == ["tolist"]
        is_narrow = cfg.dtype == "bfloat16"
        # Once for weights with decay, once for those without
        assert counts.pop("_fused_adamw_") == 2
        assert counts.pop("_foreach_mul_", 0) == (0 if is_narrow else 2)  # scaled in place
        assert counts.pop("mul") <= 2 + is_narrow * weights  # scaled, and wider, one by one
        assert counts.pop("_foreach_copy_", 0) == (cfg.dtype == "bfloat16")  # rounded
        assert counts.pop("_foreach_norm") == 1 and counts.pop("add_") == 1  # the counter of steps
        # The rest are of single numbers: norm, clipping, whether to skip
        assert counts.pop("_to_copy") <= 4 and sum(counts.values()) <= 20, counts


def test_a_norm_of_many_elements_is_exact():
    """torch's CPU kernel adds up squares one after the other: 7e-4 too small here, in float32."""
    x = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
    found, least = exact_norms([x, x[:7]], torch.float)
    assert found == pytest.approx(x.double().norm().item(), rel=1e-6)
    assert least == pytest.approx(x[:7].double().norm().item(), rel=1e-6)


def test_18_bytes_per_parameter():
    assert [sum(sizes.bytes_per_parameter(stage, 1, 2, 4)) for stage in range(4)] == [18] * 4
    assert [sum(sizes.bytes_per_parameter(stage, 4, 2, 4)) for stage in range(4)] == [
        18, 9, 6, 4.5]


def _unused(rank, world, stage, n):
    """{name: gradient} of a layer with a parameter that the loss does not depend on, and one that
    only rank 0 uses; and of a layer of which other ranks use nothing."""
    def parameter(name):
        param = torch.nn.Parameter(torch.empty(n, device="meta"))
        param.tag = Tag(name, param.shape, 0, ((0, n),), sum_over=(group,))
        return param

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.sometimes = map(
                parameter, ("used", "unused", "sometimes"))

        def forward(self, x):
            return x * self.used + (self.sometimes if rank == 0 else 0)

    class Lonely(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = parameter("lonely")

        def forward(self, x):
            return x + (3 * self.weight if rank == 0 else 0)

    group = Mesh(dp=world).group("dp")
    layers = [Layer(), Lonely()]
    reducer = zero.REDUCERS[stage]({0: layers}, None, lambda tag: torch.ones(n), torch.float64)
    for bucket in reducer.buckets:
        if bucket.grad_shard is not None:  # None: a rank alone, under DDP
            bucket.grad_shard.fill_(7.0)  # as a step before might have left it
    for last in (False, True):
        y = layers[1](layers[0](torch.full((n,), rank + 1.0))).sum()
        reducer.expect(0, last)
        y.backward()
    wholes = whole_slices(reducer, reducer.gradients())
    return {tag.name: gradient.tolist() for tag, gradient in wholes}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world,n", [(1, 3), (2, 5), (4, 1), (8, 2)])  # n < world: empty shards
def test_unused_parameter_counts_as_zero_and_never_hangs(world, n, stage):
    total = 2.0 * sum(range(1, world + 1))
    for got in pool(world, _unused, world, stage, n):
        assert got == {"used": [total] * n, "unused": [0.0] * n, "sometimes": [2.0] * n,
                       "lonely": [6.0] * n}


def _late(rank, cfg, seconds, load):
    """Loss and norm of three steps with collectives that start late. load: the last step after all
    weights were saved, overwritten and loaded."""
    trainer, data = Trainer(cfg, mesh_of(cfg), VOCAB), Data(cfg)
    group, submit = trainer.reducer.buckets[0].group, Group.submit
    group.submit = lambda job, name: submit(group, lambda: (time.sleep(seconds), job()), name)
    found = []
    for step in range(3):
        if step == 2 and load:
            folder = checkpoint.save(trainer, step)
            group.last.wait()
            for bucket in trainer.reducer.buckets:
                bucket.full.zero_()
            checkpoint.load(trainer, folder)
        norm, read = trainer.gradients(data.training(cfg, step, trainer.mesh))
        found.append(read())
        trainer.update(norm, 1e-2)
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_layer_waits_for_its_new_weights_after_a_step_and_a_load(corpus, tmp_path, stage):
    cfg = config(corpus, dp=2, zero=stage, n_layer=2, microbatches=1, out=str(tmp_path))
    assert pool(2, _late, cfg, 0.02, True) == pool(2, _late, cfg, 0.0, False)


def test_no_storage_is_freed_while_an_all_gather_writes_into_it(corpus):
    """A layer's weights were gathered ahead, but the layer does not run."""
    cfg = config(corpus, zero=3, microbatches=1)
    reducer = Trainer(cfg, mesh_of(cfg), VOCAB).reducer
    home = reducer.home[next(reducer.layers[1].parameters())]
    freed = []
    arriving = SimpleNamespace(wait=lambda: freed.append(home.full.untyped_storage().nbytes() == 0))
    with patch.object(zero, "all_gather", lambda full, group, async_op: arriving):
        reducer.gather_weights([], prefetch=[reducer.layers[1]])
    assert not freed
    reducer.gather_weights([])
    assert freed and not any(freed) and not home.full.untyped_storage().nbytes()


def test_new_weights_are_sent_in_the_order_in_which_forward_uses_them(corpus):
    """Also where a rank has two stages: the first stage's weights go first."""
    cfg = config(corpus, zero=1, schedule="interleaved", chunks=2, microbatches=2)
    trainer, sent = Trainer(cfg, mesh_of(cfg), VOCAB), []
    with patch.object(zero, "all_gather", lambda full, group, async_op: sent.append(full)):
        trainer.step(Data(cfg).training(cfg, 0, trainer.mesh), 1e-3)
    stages = trainer.pipeline.stages
    layers = [layer for s in sorted(stages) for layer in stages[s].layers]
    uses = [trainer.reducer.home[param] for layer in layers for param in layer.parameters()]
    in_order = [bucket.full for bucket in dict.fromkeys(uses)]
    assert len(stages) == 2 and len(sent) == len(in_order)
    assert all(a is b for a, b in zip(sent, in_order, strict=True))


def _disagree(rank, cfg, where):
    """replicas_agree() before and after rank 1 changes one bit of a weight."""
    trainer = Trainer(cfg, mesh_of(cfg), VOCAB)
    before = trainer.replicas_agree()
    for bucket in trainer.reducer.buckets if rank == 1 else ():
        for param in bucket.params:
            if where in param.tag.name:
                piece = bucket.full.narrow(0, bucket.starts[param], param.numel())
                piece[-1] = math.nextafter(piece[-1], 1)
    return before, trainer.replicas_agree()


@pytest.mark.parametrize("flags,where", [
    ({"dp": 2}, "h.1.mlp.c_fc.bias"), ({"dp": 2, "zero": 1}, "h.1.mlp.c_fc.bias"),
    ({"cp": 2}, "h.0.ln_1.bias"), ({"tp": 2}, "h.0.attn.c_proj.bias"), ({"pp": 2}, "wte"),
    ({"dp": 2, "shard": 1, "zero": 1}, "wte"), ({"tp": 2}, "h.1.mlp.c_fc.bias")], ids=str)
def test_replicas_that_differ_in_one_bit_do_not_agree(corpus, flags, where):
    """Data ranks, tensor ranks where they are replicated, both ends of the tied embedding, replicas
    of shards (--shard); what a tensor rank holds alone, the last case, may differ."""
    cfg = config(corpus, n_layer=2, microbatches=1, **flags)
    alone = "tp" in flags and "c_fc" in where
    assert pool(2, _disagree, cfg, where) == [(True, alone)] * 2
