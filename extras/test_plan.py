"""extras/plan.py: the bytes that it predicts are those that our own runs hold and send, exactly."""

import weakref
from unittest.mock import patch

import pytest
import torch

from experts import Router
from extras import plan
from model import Block
from sizes import config_of
from test_all import VOCAB
from tests.harness import command, flags_of, make_trainer, ranks


def storages(tensors):
    """{storage: bytes} of these tensors: each once, because tensors may share memory."""
    found = [x.untyped_storage() for x in tensors if x is not None]
    return {storage._cdata: storage.nbytes() for storage in found}


class Pack:
    """What autograd holds in place of a tensor that it saves for backward."""

    def __init__(self, tensor):
        self.tensor = tensor


class Saved:
    """Counts the memory that autograd holds for backward. apart: tensors that exist anyhow."""

    def __init__(self, apart):
        self.apart = storages(apart)
        self.packs = weakref.WeakSet()

    def hooks(self):
        def pack(tensor):
            packed = Pack(tensor)
            self.packs.add(packed)
            return packed

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor)

    def now(self, beside=()):
        """Bytes of what is held, and of further tensors. (Numbers do not count.)"""
        held = storages([x for x in (*(pack.tensor for pack in self.packs), *beside) if x.dim()])
        return sum(nbytes for storage, nbytes in held.items() if storage not in self.apart)


def saved_by_block(trainer, apart):
    """Bytes that a block saves without recompute beside its input. Collective."""
    layers = [layer for some in trainer.pipeline.stages.values() for layer in some]
    block = next(layer for layer in layers if isinstance(layer, Block))
    x = torch.randn(trainer.pipeline.shape, dtype=trainer.dtype).requires_grad_()
    saved = Saved([*apart, x])
    block.recompute = False
    with saved.hooks():
        y = block(x)
        found = saved.now()
    block.recompute = trainer.cfg.recompute
    return found if y.requires_grad else None  # keeps y, and so what is saved, until here


def peak_and_sent(trainer, batches):
    """A step. Returns (the most bytes held for backward: after each forward and each backward, and
    while a block is computed again; {group: bytes sent})."""
    pipeline = trainer.pipeline
    apart = [*(flat.weights for flat in trainer.reducer.trained_flats), trainer.positions,
             *(tensor for pair in batches for tensor in pair)]
    saved = Saved(apart)
    found, again, in_backward = [0], [0], []
    forward, backward, compute = pipeline.forward, pipeline.backward, Block.compute

    def look(found):
        """Look at autograd's memory, and at what is deferred from I to W."""
        work = [*pipeline.weight_work.values(), pipeline.deferred or []]
        found.append(saved.now([tensor for some in work for _, *pair in some for tensor in pair]))

    def watched_forward(*args):
        loss = forward(*args)
        look(found)
        return loss

    def watched_backward(*args):
        in_backward.append(True)
        backward(*args)
        in_backward.clear()
        look(found)

    def watched_compute(layer, x):
        if in_backward:
            look(again)
        return compute(layer, x)

    pipeline.forward, pipeline.backward = watched_forward, watched_backward
    with saved.hooks(), patch.object(Block, "compute", watched_compute):
        trainer.step(batches, 1e-3)
    if trainer.cfg.zero in (1, 2):
        list(trainer.reducer.whole())  # waits for the new weights, which are on their way
    sent = {name: group.bytes_sent for name, group in trainer.mesh.groups.items()}
    if trainer.cfg.recompute:
        found.append(max(again) + saved_by_block(trainer, apart))
    return max(found), sent


def choose_evenly(router, x):
    """Takes the place of Router.forward: token i chooses experts 2 i and 2 i + 1, in a circle."""
    logits = torch.nn.functional.linear(x, router.weight)
    first = 2 * torch.arange(logits[..., 0].numel()).view(logits.shape[:-1])
    chosen = torch.stack([first, first + 1], -1) % logits.size(-1)
    return logits.scatter_add(-1, chosen, logits.new_full(chosen.shape, 100.0))


AXES = {"tp": ["tp"], "cp": ["cp"], "ep": ["ep", "ep_tp"], "pp": ["pp", "pp_ends"],
        "dp": ["shard_ep_cp", "shard_cp"]}


def held_and_sent(rank, cfg):
    """(place on the axes pp and tp, {what: bytes held}, {axis: bytes sent}) of a step."""
    with patch.object(Router, "forward", choose_evenly):
        trainer, data = make_trainer(cfg)
        reducer, optimizer = trainer.reducer, trainer.optimizer
        batches = trainer.own(data.training(cfg, 0, trainer.mesh))
        trainer.own = lambda batches: batches
        activations, sent = peak_and_sent(trainer, batches)
    flats = reducer.trained_flats
    chunks = [*reducer.chunks.values()] if cfg.zero == 3 else []
    grads = [flat.grads for flat in flats] + [p.grad for flat in flats for p in flat.params]
    masters = [master for master, weights in zip(optimizer.masters, reducer.weights, strict=True)
               if master is not weights]
    held = {"weights": [flat.weights for flat in flats] + chunks,
            "gradients": trainer.grads + grads,
            "optimizer": [*masters, *optimizer.means, *optimizer.mean_squares]}
    held = {what: sum(storages(tensors).values()) for what, tensors in held.items()}
    by_axis = {axis: sum(sent.get(name, 0) for name in names) for axis, names in AXES.items()}
    place = [trainer.mesh.index_and_size(axis)[0] for axis in ("pp", "tp")]
    return place, {**held, "activations": activations}, by_axis


@pytest.mark.parametrize("words", [
    "--pp 2 --tp 2 --sp --microbatches 3 --recompute",
    "--dp 2 --tp 2 --sp --zero 1 --microbatches 3 --recompute",
    "--dp 1",
    "--dp 2 --zero 2 --microbatches 3",
    "--dp 2 --zero 3 --microbatches 3 --dtype float32",
    "--tp 2 --dtype float32",
    "--tp 2 --pp 2 --microbatches 6",
    "--pp 2 --schedule interleaved --microbatches 4",
    "--pp 3 --schedule zb-h1 --microbatches 4",
    "--pp 2 --schedule gpipe --microbatches 9 --dtype float32",
    "--cp 2 --tp 2 --sp",
    "--experts 4",
    "--dp 2 --ep 2 --experts 4 --zero 1",
    "--dp 2 --ep 2 --tp 2 --sp --experts 4 --recompute",
    "--arch llama --n-kv-head 4 --dp 2 --tp 2 --sp",
    "--arch qwen2 --n-kv-head 4 --dp 2 --tp 2 --zero 1"])
def test_bytes_held_and_sent_are_the_predicted_ones(corpus, words):
    cfg = flags_of(words.split(), corpus)
    model = config_of(cfg, VOCAB)
    world = cfg.dp * cfg.pp * cfg.cp * cfg.tp
    for (stage, slice), held, sent in ranks(world, held_and_sent, cfg):
        if slice > 0:
            continue  # T does not divide the vocabulary, and the first rank has the most words
        rank = plan.Rank(model, cfg, stage)
        want = rank.memory()
        assert held == {what: want[what] for what in held}, f"stage {stage}"
        assert sent == rank.messages(), f"stage {stage}"


def test_published_runs_are_printed_beside_the_prediction():
    done = command("-m", "extras.plan", "published")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "median error, 10 dense" in done.stdout and "5 mixtures" in done.stdout
