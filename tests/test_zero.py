"""DDP and ZeRO: how Flats lie, the bytes sent and held, what runs beside what, odd parameters."""

import itertools
import threading
import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sizes
import train
import zero
from collectives import Group
from data.batches import Data
from ddp import flats_of
from experts import kind_of
from mesh import Mesh
from model import build
from run import checkpoint
from run.config import check
from run.copies import whole_slices
from shard import Tag, tag_whole
from sizes import GPTConfig
from tests.harness import VOCAB, config, equals_one_process, train_with
from tests.pool import pool


def trainer_of(cfg):
    return train.Trainer(cfg, train.make_mesh(cfg, cfg.device), VOCAB)


def batch(trainer, step=0):
    return Data(trainer.cfg).training(trainer.cfg, step, trainer.mesh)


# ---- Flats ----

SMALL = GPTConfig(VOCAB, block_size=8, n_layer=2, n_head=5, n_embd=25)


def flats(D, rank=0):
    """{name: value} of a GPT, and the Flats of one of D replicas. No process is started."""
    model = build(SMALL, dtype=torch.double)
    values = {name: p.detach().clone() for name, p in model.canonical_parameters()}
    tag_whole(model, Group("replicas", torch.device("cpu"), range(D), rank))
    found = flats_of({0: list(model.layers)}, lambda tag: values[tag.name], torch.double, "cpu")
    return values, [flat for _, flat in found]


def test_a_flat_is_a_layer_and_they_come_in_backwards_order_the_tied_weight_alone_and_last():
    _, found = flats(3)
    names = [[param.tag.name for param in flat.params] for flat in found]
    assert [len(flat) for flat in names] == [2, 12, 12, 1, 1]
    for flat, prefix in zip(names, ("ln_f.", "h.1.", "h.0.", "wpe.", "wte."), strict=True):
        assert all(name.startswith(f"transformer.{prefix}") for name in flat)


@pytest.mark.parametrize("D", [1, 3, 4])
def test_parameters_are_views_of_their_flat_which_is_padded_by_less_than_d_zeros(D):
    values, found = flats(D)
    for flat in found:
        padding = flat.weights.numel() - sum(param.numel() for param in flat.params)
        assert flat.weights.numel() % D == 0 and 0 <= padding < D
        assert not flat.weights[flat.weights.numel() - padding :].any()
        for param in flat.params:
            assert torch.equal(param, values[param.tag.name])
            with torch.no_grad():
                param.add_(1)
            assert torch.equal(flat.view(flat.weights, param), values[param.tag.name] + 1)


def test_the_pieces_of_all_chunks_are_the_parameters_and_every_replica_lists_the_same():
    D = 4
    values, found = flats(D)
    for flat in found:
        whole = {param.tag.name: torch.full((param.numel(),), torch.nan) for param in flat.params}
        whole = {name: tensor.double() for name, tensor in whole.items()}
        for r, chunk in enumerate(flat.weights.chunk(D)):
            pieces = flat.pieces(chunk, r * chunk.numel())
            assert [tag.name for tag, _, _ in pieces] == [*whole]
            for tag, start, piece in pieces:
                assert whole[tag.name][start : start + piece.numel()].isnan().all(), "twice"
                whole[tag.name][start : start + piece.numel()] = piece
        for name, tensor in whole.items():
            assert torch.equal(tensor.view_as(values[name]), values[name])


def _names_in_flats(rank, cfg):
    return [([param.tag.name for param in flat.params], flat.group.name)
            for flat in trainer_of(cfg).reducer.trained]


def test_experts_are_a_flat_of_their_own_with_the_replicas_of_the_same_experts(corpus):
    cfg = config(corpus, dp=2, ep=2, experts=4, n_layer=1, microbatches=1)
    for found in pool(2, _names_in_flats, cfg):
        groups = {name: group for names, group in found for name in names}
        of_experts = [names for names, _ in found if any("experts" in name for name in names)]
        assert len(of_experts) == 1 and all("experts" in name for name in of_experts[0])
        assert groups["transformer.h.0.mlp.experts.c_fc.weight"] == "shard_cp"
        assert groups["transformer.h.0.mlp.router.weight"] == "shard_ep_cp"


# ---- bytes sent ----


def _sent(rank, cfg):
    """Elements that this rank sends in the first step among the ranks of its shards, and to those
    with the same shard; {name of a Flat's first parameter: its elements, padded}."""
    trainer = trainer_of(cfg)
    trainer.step(batch(trainer), 1e-3)
    reducer = trainer.reducer
    numels = {flat.params[0].tag.name: flat.weights.numel() for flat in reducer.trained}
    if cfg.zero in (1, 2):
        list(reducer.whole())  # new weights are on their way after a step
    groups = trainer.mesh.groups
    return groups["shard_ep_cp"].bytes_sent / 8, groups["rep"].bytes_sent / 8, numels


def elements(stage, m, numels):
    """zero.py's table, times D / (D-1): elements that all ranks send in a step. ZeRO-3: 3 m Psi,
    but the embedding's backward reads no weights; the head's find those of its forward, and the
    next microbatch's first block those of its backward; the tied weight is gathered for both ends.
    """
    psi = sum(numels.values())
    if stage < 2:
        return 2 * psi
    if stage == 2:
        return (1 + m) * psi
    once = numels["transformer.wpe.weight"] + numels["transformer.ln_f.weight"]
    return m * (3 * psi - once) - (m - 1) * numels["transformer.h.0.ln_1.weight"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("D,m", [(2, 1), (3, 3)])
def test_zero_sends_the_formula(corpus, stage, D, m):
    """DDP, too: one all-reduce a step, whatever the number of microbatches."""
    got = pool(D, _sent, config(corpus, zero=stage, dp=D, microbatches=m, n_embd=25, n_head=5))
    numels = got[0][2]
    total = sum(sent for sent, _, _ in got)
    assert total == (D - 1) * elements(stage, m, numels)
    assert total <= (D - 1) * (2, 2, 1 + m, 3 * m)[stage] * sum(numels.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hybrid_sharding_sends_between_copies_only_the_sum_of_a_ranks_chunks(corpus, stage):
    """--shard 2 of --dp 4: two copies of the shards. A rank all-reduces its chunk with its copy
    once a step: Psi/2 elements under ZeRO, Psi without (2 (N-1)/N = 1 for N = 2)."""
    m = 3
    got = pool(4, _sent, config(corpus, dp=4, shard=2, zero=stage, microbatches=m))
    numels = got[0][2]
    psi = sum(numels.values())
    assert sum(sent for _, sent, _ in got) == 4 * psi // (2 if stage else 1)
    assert sum(sent for sent, _, _ in got) == 2 * elements(stage, m, numels)


# ---- bytes held ----


class Watch(TorchDispatchMode):
    """After each operation of this thread: which Flats have whole weights, which have whole
    gradients."""

    def __init__(self, reducer):
        super().__init__()
        self.reducer = reducer
        self.whole = set()  # frozensets of Flats
        self.with_grads = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **kwargs or {})
        flats = self.reducer.trained
        self.whole.add(frozenset(f for f in flats if f.weights.untyped_storage().nbytes()))
        self.with_grads.add(frozenset(f for f in flats if f.grads is not None))
        return result


def storages(tensors):
    """Bytes of the memory of these tensors, each once: tensors may share memory."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
             for x in tensors if x is not None}
    return sum(found.values())


def held(trainer):
    """(weights, gradients, optimizer states): bytes in memory."""
    flats = trainer.reducer.trained
    masters = [x for x, weights in zip(trainer.optimizer.masters, trainer.reducer.weights,
                                       strict=True) if x is not weights]
    chunks = getattr(trainer.reducer, "chunks", {})  # ZeRO-3's
    return (storages([f.weights for f in flats] + [*chunks.values()]),
            storages(trainer.grads + [f.grads for f in flats]
                     + [p.grad for f in flats for p in f.params]),
            storages([*masters, *trainer.optimizer.means, *trainer.optimizer.squares]))


def _memory(rank, cfg):
    """Of a step: bytes held at its end; the most bytes allocated during forward and backward; the
    layers whose weights, and the number of Flats whose gradients, were whole at one time."""
    trainer = trainer_of(cfg)
    reducer = trainer.reducer
    batches = batch(trainer)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        trainer.pipeline.run(trainer.own(batches), reducer)
    memory = [e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]"]
    reducer.gradients()
    reducer.publish()
    with Watch(reducer) as watch:
        trainer.step(batches, 1e-3)
    layers = [layer for layers in trainer.pipeline.stages.values() for layer in layers]
    uses = [set(reducer.flats_in(layer)) for layer in layers] if cfg.zero else []
    pairs = [a | b for a, b in itertools.pairwise(uses)]
    two_layers = all(any(flats <= pair for pair in pairs) for flats in watch.whole)
    return {"held": held(trainer), "peak": max(itertools.accumulate(memory)),
            "two layers": two_layers, "grads": max(map(len, watch.with_grads)),
            "flats": [(f.weights.numel(), f.weights.itemsize, sum(p.numel() for p in f.params))
                      for f in reducer.trained]}


@pytest.mark.parametrize("dtype,recompute", [("float32", False), ("bfloat16", True)])
def test_memory_held_is_the_formula_and_the_peak_what_the_stage_allows(corpus, dtype, recompute):
    """Wide and short, so that weights and gradients outweigh activations. 65: there is padding.
    ZeRO-2 has one whole gradient at a time, ZeRO-3 the weights of two layers."""
    D = 4
    flags = {"dp": D, "n_embd": 65, "n_head": 5, "n_layer": 4, "block_size": 4, "batch_size": 8,
             "dtype": dtype, "recompute": recompute, "microbatches": 2}
    peaks = {}
    for stage in range(4):
        got = pool(D, _memory, config(corpus, zero=stage, **flags))
        flats = got[0]["flats"]
        padded = sum(numel * width for numel, width, _ in flats)
        psi = sum(numel for _, _, numel in flats)
        states = psi * sum(sizes.bytes_per_parameter(0, 1, flats[0][1])[2:])
        for rank in got:
            weights, grads, _ = rank["held"]
            assert weights == padded // (D if stage == 3 else 1)
            assert grads == padded // (D if stage >= 2 else 1)
            assert rank["two layers"] == (stage == 3)
            assert rank["grads"] == (1 if stage >= 2 else len(flats))
        # Padding has no optimizer states: a rank whose chunk ends with it holds less
        assert sum(rank["held"][2] for rank in got) == states * (1 if stage else D)
        peaks[stage] = max(rank["peak"] for rank in got)
    block = max(numel * width for numel, width, _ in flats)
    others = peaks[0] - padded  # activations, and what autograd holds for a moment
    assert peaks[1] == peaks[0]
    assert peaks[2] <= others + padded / D + block
    assert peaks[3] <= others + padded / D + 3 * block
    assert padded / D + 3 * block < padded, "the bound must be able to fail"


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


def _whole_weights(rank, cfg):
    """Bytes of whole weights after a step, a validation and the step after it, and whole()."""
    trainer = trainer_of(cfg)
    found = []
    silent = SimpleNamespace(validating=lambda done, total: None)

    def step():
        trainer.step(batch(trainer), 1e-3)

    for uses in ([step], [lambda: trainer.validate(Data(cfg), silent, 2), step],
                 [lambda: list(trainer.reducer.whole())]):
        for use in uses:
            use()
        found.append(sum(f.weights.untyped_storage().nbytes() for f in trainer.reducer.trained))
    return found


def test_zero3_frees_the_last_weights_that_a_step_or_whole_has_gathered(corpus):
    cfg = config(corpus, pp=2, dp=2, zero=3, microbatches=2)
    assert pool(4, _whole_weights, cfg) == [[0, 0, 0]] * 4


# ---- what runs beside what ----


def _overlap(rank, cfg):
    """(did the first reductions end within backward, and in another thread; had each layer's
    forward and backward found the next layer's weights on their way)"""
    trainer = trainer_of(cfg)
    reducer = trainer.reducer
    inside = []  # for each Flat: did it start within autograd's backward?
    threads = []  # in which reductions ran
    ahead = []
    in_backward = [False]
    backward = torch.autograd.backward

    def watched_backward(*args):
        in_backward[0] = True
        backward(*args)
        in_backward[0] = False

    def reduce(flat):
        threads.append(threading.current_thread())
        type(reducer).reduce(reducer, flat)

    def start(flat):
        type(reducer).start(reducer, flat)
        inside.append(in_backward[0])
        # That the reduction can end before backward goes on is the claim, so backward waits
        reducer.reductions[flat]()
        assert len(threads) == len(inside)

    reducer.start, reducer.reduce = start, reduce
    if cfg.zero == 3:
        layers = trainer.pipeline.stages[0]

        def look(layer, following):
            flats = reducer.flats_in(following)
            layer.register_forward_pre_hook(lambda *args: ahead.append(
                all(flat in reducer.gathers for flat in flats)))

        for layer, following in itertools.pairwise(layers):
            look(layer, following)
        for layer, before in itertools.pairwise(reversed(layers[1:])):
            flats = reducer.flats_in(before)
            layer.register_forward_hook(lambda module, args, out, flats=flats: out.register_hook(
                lambda grad: ahead.append(all(flat in reducer.gathers for flat in flats))) and None)
    torch.autograd.backward = watched_backward
    try:
        trainer.step(batch(trainer), 1e-3)
    finally:
        torch.autograd.backward = backward
    alone = threading.main_thread() in threads
    return inside, alone, ahead


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reductions_start_while_backward_runs_and_weights_are_gathered_ahead(corpus, stage):
    m, n_layer = 2, 3
    cfg = config(corpus, dp=2, zero=stage, microbatches=m, n_layer=n_layer)
    for inside, in_main_thread, ahead in pool(2, _overlap, cfg):
        # All Flats, in one backward of the step, or in each
        assert inside == [True] * (n_layer + 3) * (m if stage >= 2 else 1)
        assert not in_main_thread
        # In forward all layers but the last; in backward all but the first block
        assert ahead == [True] * (m * (2 * n_layer + 1) if stage == 3 else 0)


@contextmanager
def late(background, seconds):
    """What a Background is given begins late."""
    def wait_and_run(function, *args):
        time.sleep(seconds)
        function(*args)

    usual = background.start
    background.start = lambda *args: usual(wait_and_run, *args)
    yield
    del background.start


def _late(rank, cfg, seconds, load):
    """Losses and norms of three steps with messages that start late, and of a validation between
    them. load: the last step after all weights were saved, overwritten and loaded."""
    trainer = trainer_of(cfg)
    silent = SimpleNamespace(validating=lambda done, total: None)
    found = []
    with late(trainer.reducer.background, seconds):
        for step in range(3):
            if step == 2:
                found.append(trainer.validate(Data(cfg), silent, 1))
            if step == 2 and load:
                folder = checkpoint.save(trainer, step)
                for flat in trainer.reducer.trained:
                    flat.weights.zero_()
                checkpoint.load(trainer, folder)
            norm, sums = trainer.step(batch(trainer, step), 1e-2)
            found.append((norm.item(), sums[0].item()))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_layer_waits_for_its_weights_after_a_step_a_validation_and_a_load(corpus, tmp_path,
                                                                           stage):
    cfg = config(corpus, dp=2, zero=stage, n_layer=2, microbatches=2, out=str(tmp_path))
    load = stage < 3
    assert pool(2, _late, cfg, 0.01, load) == pool(2, _late, cfg, 0.0, False)


@pytest.mark.parametrize("flags", [{}, {"schedule": "interleaved", "chunks": 2}], ids=str)
def test_new_weights_are_sent_in_the_order_in_which_forward_uses_them(corpus, flags):
    """Also where a rank has two stages: the first stage's weights go first."""
    trainer = trainer_of(config(corpus, zero=1, microbatches=2, **flags))
    sent = []
    background = trainer.reducer.background
    usual = background.start

    def start(function, *args):
        if function is zero.all_gather:
            sent.append(args[0])
        return usual(function, *args)

    background.start = start
    trainer.step(batch(trainer), 1e-3)
    del background.start
    stages = trainer.pipeline.stages
    uses = [flat for s in sorted(stages) for layer in stages[s]
            for flat in trainer.reducer.flats_in(layer)]
    in_order = [flat.weights for flat in dict.fromkeys(uses)]
    assert len(sent) == len(in_order)
    assert all(a is b for a, b in zip(sent, in_order, strict=True))


# ---- odd parameters ----


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_hook_of_a_tied_weight_is_called_once_in_each_backward(corpus, stage):
    trainer = trainer_of(config(corpus, zero=stage, microbatches=3))
    calls = Counter()
    hook = trainer.reducer.grad_added
    for flat in trainer.reducer.trained:
        for param in flat.params:
            param._post_accumulate_grad_hooks.clear()
            param.register_post_accumulate_grad_hook(
                lambda p: (calls.update([p.tag.name]), hook(p)) and None)
    trainer.step(batch(trainer), 1e-3)
    assert calls == dict.fromkeys(trainer.shapes, 3)


def _unused(rank, world, stage, n):
    """{name: gradient} of a layer with a parameter that the loss does not depend on, and one that
    only rank 0 uses; and of a layer of which other ranks use nothing. (Under ZeRO-3 all ranks use
    the same: its gathers and reductions go in one order.)"""
    uses = rank == 0 or stage == 3
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
            return x * self.used + (self.sometimes if uses else 0)

    class Lonely(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = parameter("lonely")

        def forward(self, x):
            return x + (3 * self.weight if uses else 0)

    mesh = Mesh(dp=world)
    group = mesh.group("dp")
    layers = [Layer(), Lonely()]
    reducer = zero.REDUCERS[stage]({0: layers}, lambda tag: torch.ones(n), torch.float64,
                                   mesh.device, mesh.background)
    found = []
    for _ in range(2):  # the second step must not see the first one's gradients
        for last in (False, True):
            y = layers[1](layers[0](torch.full((n,), rank + 1.0))).sum()
            reducer.expect(0, last)
            y.backward()
        wholes = whole_slices(reducer, reducer.gradients())
        found.append({tag.name: gradient.tolist() for tag, gradient in wholes})
        reducer.publish()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world,n", [(1, 3), (2, 5), (4, 1)])  # n < world: empty chunks
def test_a_parameter_without_gradient_counts_as_zeros_and_hangs_nobody(world, n, stage):
    total = 2.0 * sum(range(1, world + 1))
    users = world if stage == 3 else 1
    want = {"used": [total] * n, "unused": [0.0] * n, "sometimes": [2.0 * users] * n,
            "lonely": [6.0 * users] * n}
    for got in pool(world, _unused, world, stage, n):
        assert got == [want, want]


def freeze(model):
    """Train the last block only."""
    for name, param in model.canonical_parameters():
        param.requires_grad_(".h.2." in name)


def frozen_kind(config):
    def made(config):
        model = kind_of(config)(config)
        freeze(model)
        return model

    return made


def frozen_build(*args):
    model = build(*args)
    freeze(model)
    return model


def _frozen(rank, cfg):
    return train_with(rank, cfg, train, "kind_of", frozen_kind)


@pytest.mark.parametrize("flags", [
    {"dp": 2, "zero": 1, "recompute": True}, {"dp": 4, "shard": 2, "zero": 3, "microbatches": 3},
    {"pp": 4, "microbatches": 3}], ids=str)
def test_frozen_parameters_stay_and_the_others_train_like_one_process(corpus, flags):
    got, want = equals_one_process(corpus, _frozen, build=frozen_build, **flags)
    for name, value in want[0]["weights"].items():
        assert torch.equal(value, want[-1]["weights"][name]) != (".h.2." in name)


def _disagree(rank, cfg, where):
    """replicas_agree() before and after rank 1 changes one bit of a weight."""
    trainer = trainer_of(cfg)
    before = train.replicas_agree(trainer)
    for flat in trainer.reducer.trained if rank == 1 else ():
        for param in flat.params:
            if where in param.tag.name:
                piece = flat.view(flat.weights, param).view(-1)
                piece[-1] = torch.nextafter(piece[-1], torch.tensor(1.0).double())
    return before, train.replicas_agree(trainer)


@pytest.mark.parametrize("flags,where", [
    ({"dp": 2}, "h.1.mlp.c_fc.bias"), ({"dp": 2, "zero": 1}, "h.1.mlp.c_fc.bias"),
    ({"cp": 2}, "h.0.ln_1.bias"), ({"tp": 2}, "h.0.attn.c_proj.bias"), ({"pp": 2}, "wte"),
    ({"dp": 2, "shard": 1, "zero": 1}, "wte"), ({"tp": 2}, "h.1.mlp.c_fc.bias")], ids=str)
def test_replicas_that_differ_in_one_bit_do_not_agree(corpus, flags, where):
    """Data ranks, tensor ranks where they are replicated, both ends of the tied embedding, replicas
    of shards (--shard); what a tensor rank holds alone, the last case, may differ."""
    cfg = config(corpus, n_layer=2, microbatches=1, **flags)
    alone = "tp" in flags and "c_fc" in where
    assert pool(check(cfg, 1), _disagree, cfg, where) == [(True, alone)] * 2
