"""DDP and ZeRO: how Flats lie, the bytes sent and held, what runs beside what, odd parameters."""

import itertools
import threading
from unittest.mock import Mock, patch

import pytest
import torch

import sizes
import zero
from mesh import Mesh
from shard import Tag
from test_all import TOLERANCE, differences, whole_slices
from tests.harness import in_layout, make_trainer, peak_bytes, ranks, start_thread

STAGES = (0, 1, 2, 3)


# ---- bytes sent ----


def elements_sent(rank, cfg):
    """(elements that this rank sends in the first step among the ranks of its shards; to those with
    the same shard; {name of a Flat's first parameter: its elements, padded})"""
    trainer, data = make_trainer(cfg)
    trainer.step(data.training(cfg, 0, trainer.mesh), 1e-3)
    numels = {f.params[0].tag.name: f.weights.numel() for f in trainer.reducer.trained_flats}
    if cfg.zero in (1, 2):
        list(trainer.reducer.whole())  # waits for the new weights, which are on their way
    groups = trainer.mesh.groups
    return groups["shard_ep_cp"].bytes_sent / 8, groups["rep"].bytes_sent / 8, numels


def elements(stage, m, numels):
    """The table of zero.py, times D / (D-1). ZeRO-3's 3 m Psi, less what need not be gathered
    again: the embedding, whose backward reads no weights, and the head, whose backward follows its
    forward; and the first block for the forward after its backward."""
    psi = sum(numels.values())
    if stage < 2:
        return 2 * psi
    if stage == 2:
        return (1 + m) * psi
    once = numels["transformer.wpe.weight"] + numels["transformer.ln_f.weight"]
    return m * (3 * psi - once) - (m - 1) * numels["transformer.h.0.ln_1.weight"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("R,copies,m", [(2, 1, 1), (3, 1, 3), (2, 2, 3)])
def test_a_step_sends_the_formula(corpus, stage, R, copies, m):
    """R ranks share the shards. Hybrid sharding: a rank also all-reduces its chunk (DDP: all) with
    the ranks that have copies of it, once a step."""
    _, found = in_layout(f"--zero {stage} --dp {copies * R} --shard {R} --microbatches {m} "
                         "--n-embd 25 --n-head 5", corpus, elements_sent)
    numels = found[0][2]
    assert sum(sent for sent, _, _ in found) == copies * (R - 1) * elements(stage, m, numels)
    chunks = sum(numels.values()) * (1 if stage else R)  # of the ranks of a copy together
    assert sum(sent for _, sent, _ in found) == 2 * (copies - 1) * chunks


# ---- bytes held ----


def storages(tensors):
    """Bytes of the memory of these tensors, each once: tensors may share memory."""
    found = [x.untyped_storage() for x in tensors if x is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def memory_of_a_step(rank, cfg):
    """{what: bytes}: the peak of a forward and backward; held after a validation and a step."""
    trainer, data = make_trainer(cfg)
    reducer, optimizer = trainer.reducer, trainer.optimizer
    flats = reducer.trained_flats
    batches = data.training(cfg, 0, trainer.mesh)
    start_thread(reducer.background)  # the carrier's buffers are the thread's, and do not count
    peak = peak_bytes(lambda: trainer.pipeline.run(trainer.own(batches), reducer))
    reducer.gradients()
    reducer.publish()
    trainer.validate(data, 1)
    trainer.step(batches, 1e-3)
    list(reducer.whole())
    chunks = [*reducer.chunks.values()] if cfg.zero == 3 else []
    grads = [flat.grads for flat in flats] + [p.grad for flat in flats for p in flat.params]
    masters = [master for master, weights in zip(optimizer.masters, reducer.weights, strict=True)
               if master is not weights]
    return {"numel": [flat.weights.numel() for flat in flats],
            "padding": sum(f.weights.numel() - sum(p.numel() for p in f.params) for f in flats),
            "weights": storages([flat.weights for flat in flats] + chunks),
            "grads": storages(trainer.grads + grads),
            "states": storages([*masters, *optimizer.means, *optimizer.mean_squares]),
            "peak": peak}


@pytest.mark.parametrize("dtype,width,states,more", [("float32", 4, 8, ""),
                                                     ("bfloat16", 2, 12, "--recompute")])
def test_bytes_held_are_the_formula_and_the_peak_is_what_the_stage_allows(corpus, dtype, width,
                                                                         states, more):
    """Short sequences: weights and gradients outweigh activations. A width of 65: there is padding,
    which has no optimizer states. ZeRO-2 has the whole gradients of two layers at a time, ZeRO-3
    their weights, too."""
    D = 4
    words = (f"--dp {D} --microbatches 2 --n-embd 65 --n-head 5 --n-layer 8 --block-size 4 "
             f"--batch-size 8 --dtype {dtype} {more}")
    peaks = []
    for stage in STAGES:
        _, found = in_layout(f"{words} --zero {stage}", corpus, memory_of_a_step)
        numel, padding = found[0]["numel"], found[0]["padding"]
        for rank in found:
            assert rank["weights"] == width * sum(numel) // (D if stage == 3 else 1)
            assert rank["grads"] == width * sum(numel) // (D if stage >= 2 else 1)
        of_all = states * (sum(numel) - padding) * (1 if stage else D)
        assert padding > 0 and sum(rank["states"] for rank in found) == of_all
        peaks.append(max(rank["peak"] for rank in found))
    psi, block = width * sum(numel), width * max(numel)
    others = peaks[0] - psi  # activations, and what autograd holds for a moment
    assert psi / D + 4 * block < psi, "the bounds must be able to fail"
    assert peaks[1] == peaks[0]
    assert peaks[2] <= others + psi / D + 2 * block
    assert peaks[3] <= others + psi / D + 4 * block


@pytest.mark.parametrize("D,row", [(1, (120, 120, 120)), (4, (52.5, 41.3, 30)),
                                   (16, (35.6, 21.6, 7.5)), (64, (31.4, 16.6, 1.88))])
def test_bytes_per_parameter_are_the_published_ones(D, row):
    """ZeRO, arXiv 1910.02054, table 1, of 7.5e9 parameters: its digits are rounded or cut."""
    for stage, want in zip((1, 2, 3), row, strict=True):
        assert abs(7.5 * sum(sizes.bytes_per_parameter(stage, D)) - want) < 0.06


# ---- what runs beside what ----


def overlap(rank, cfg):
    """(of each reduction: did it start before backward had come to the embedding?; how many had
    started, itself included, when it was waited for?; of each forward and backward of a layer of
    ZeRO-3: were the next layer's weights on their way?)"""
    trainer, data = make_trainer(cfg)
    reducer = trainer.reducer
    early, travelled, ahead = [], [], []

    def start(function, *args, usual=reducer.background.start):
        wait = usual(function, *args)
        if function != reducer.reduce:
            return wait
        number = len(early)
        early.append(reducer.trained_flats[-1].missing > 0)
        wait()  # the claim: the reduction needs nothing of what backward has yet to do
        return lambda: travelled.append(len(early) - number)

    def look(following):
        ahead.append(all(flat in reducer.gathers for flat in reducer.flats_in(following)))

    reducer.background.start = start
    if cfg.zero == 3:
        layers = trainer.pipeline.stages[0]
        for layer, following in itertools.pairwise(layers):
            layer.register_forward_pre_hook(lambda *args, after=following: look(after))
        for before, layer in itertools.pairwise(layers[1:]):
            layer.register_forward_hook(lambda module, args, out, before=before: out.register_hook(
                lambda grad: look(before)) and None)
    trainer.step(data.training(cfg, 0, trainer.mesh), 1e-3)
    return early, travelled, ahead


@pytest.mark.parametrize("stage", STAGES)
def test_reductions_start_while_backward_runs_and_weights_are_gathered_ahead(corpus, stage):
    L, m = 3, 2
    words = f"--dp 2 --zero {stage} --n-layer {L} --microbatches {m}"
    for early, travelled, ahead in in_layout(words, corpus, overlap)[1]:
        # Each Flat, in one backward of the step or in each: the head, blocks, wpe and wte
        assert len(early) == (L + 3) * (m if stage >= 2 else 1) and all(early[: L + 1])
        # Nobody waits for a reduction before the next one has started, but for the last one
        assert len(travelled) == len(early) and all(started > 1 for started in travelled[:-1])
        # In forward all layers but the last; in backward all but embedding and first block
        assert ahead == [True] * m * (2 * L + 1) * (stage == 3)


def _with_thread(rank, cfg):
    torch.set_num_threads(2)  # as for a rank that has several cores
    with patch.object(threading, "Thread", Mock(wraps=threading.Thread)) as thread:
        worst, _ = differences(rank, cfg)
    assert thread.called
    return worst


@pytest.mark.parametrize("stage", STAGES)
def test_a_thread_that_carries_the_messages_changes_no_number(corpus, stage):
    """So whoever needs a message waits for it. (In the other tests a rank has one core, and each
    message begins when it is waited for.)"""
    words = f"--dp 2 --zero {stage} --microbatches 2"
    for worst in in_layout(words, corpus, _with_thread)[1]:
        assert (worst < TOLERANCE).all()


# ---- odd parameters ----


def gradients_of_unused(rank, world, stage, n):
    """[{name: gradient}] of two steps, for a layer with a parameter that the loss does not depend
    on, and one that only rank 0 uses; and for a layer of which other ranks use nothing. (Under
    ZeRO-3 all ranks use the same: its gathers and reductions go in one order.)"""
    uses = rank == 0 or stage == 3
    mesh = Mesh(dp=world)
    group = mesh.group("dp")

    class Layer(torch.nn.Module):
        def __init__(self, names, compute):
            super().__init__()
            self.compute = compute
            for name in names:
                param = torch.nn.Parameter(torch.empty(n, device="meta"))
                param.tag = Tag(name, param.shape, 0, ((0, n),), sum_over=(group,))
                self.register_parameter(name, param)

        def forward(self, x):
            return self.compute(self, x)

    layers = [Layer(["used", "unused", "sometimes"],
                    lambda layer, x: x * layer.used + (layer.sometimes if uses else 0)),
              Layer(["lonely"], lambda layer, x: x + (3 * layer.lonely if uses else 0))]
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


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world,n", [(1, 3), (2, 5), (4, 1)])  # n < world: empty chunks
def test_a_parameter_without_gradient_counts_as_zeros_and_hangs_nobody(corpus, world, n, stage):
    users = world if stage == 3 else 1
    want = {"used": [2.0 * sum(range(1, world + 1))] * n, "unused": [0.0] * n,
            "sometimes": [2.0 * users] * n, "lonely": [6.0 * users] * n}
    assert ranks(world, gradients_of_unused, world, stage, n) == [[want, want]] * world
