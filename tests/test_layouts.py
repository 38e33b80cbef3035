"""Every layout equals one process: layouts beyond test_all.py's page, validation, fewer bits within
their rounding, the bytes of a step."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experts import kind_of
from model import build
from sizes import config_of
from test_all import BATCH, TOLERANCE, one_process
from tests.harness import VOCAB, close, in_layout, make_trainer, run, whole_slices

# Flags of train.py, with the page's sizes: 36 sequences of 8 tokens, 67 words; 3 blocks, 24 wide. A
# width of 25: D divides few sizes. A fork adds its layouts
EVERY = """
    --tp 3 --sp --block-size 24 --microbatches 2 --recompute
    --dp 3 --zero 1 --microbatches 4 --recompute --n-embd 25 --n-head 5
    --dp 3 --zero 2 --microbatches 4 --recompute --n-embd 25 --n-head 5
    --dp 3 --zero 3 --microbatches 4 --recompute --n-embd 25 --n-head 5
    --dp 6 --shard 3 --zero 1 --microbatches 2
    --dp 4 --shard 2 --zero 2 --microbatches 3 --n-embd 25 --n-head 5
    --dp 4 --shard 1 --zero 3
    --dp 4 --shard 2 --cp 2
    --dp 2 --tp 2 --zero 3 --collectives native --microbatches 2
    --tp 3 --pp 2 --schedule gpipe --microbatches 2
    --pp 4 --microbatches 3 --n-embd 25 --n-head 5 --recompute
    --dp 2 --pp 4 --microbatches 2 --zero 2
    --pp 3 --schedule interleaved --microbatches 9 --zero 1 --n-layer 4
    --dp 2 --pp 2 --schedule interleaved --microbatches 6 --zero 3 --recompute
    --schedule interleaved --microbatches 3 --zero 2
    --dp 2 --tp 2 --pp 2 --schedule zb-h1 --microbatches 3 --zero 2
    --dp 2 --pp 2 --schedule zb-h1 --microbatches 1 --zero 3
    --dp 2 --cp 3 --block-size 24 --zero 2 --cp-attention all-to-all --microbatches 3
    --cp 3 --block-size 24 --tp 2 --sp --zero 3
    --cp 2 --tp 2 --pp 2 --sp --microbatches 3 --recompute
    --dp 3 --ep 3 --experts 3 --top-k 1 --pp 2 --microbatches 2
    --tp 2 --experts 3 --top-k 3
    --dp 2 --ep 2 --cp 2 --experts 4 --zero 2
    --dp 4 --ep 2 --shard 2 --experts 4 --zero 3 --top-k 1
    --dp 2 --ep 2 --tp 2 --experts 4
    --arch qwen2 --n-kv-head 4 --tp 2 --pp 2 --schedule zb-h1
    --arch llama --n-kv-head 3 --tp 3 --zero 2 untied n_hidden=37
    --arch llama --n-kv-head 4 --dp 2 --pp 2 --tp 2 --sp --zero 3 --recompute untied
    --arch qwen3 --n-kv-head 3 --cp 2 --dp 2 --zero 1 head_dim=6
    --arch qwen3 --n-kv-head 6 --tp 2 --pp 2 head_dim=6
"""  # last: sizes of a Llama without a flag, which a folder of Hugging Face gives


@pytest.mark.parametrize("words", EVERY.strip().splitlines(), ids=str.strip)
def test_layout_equals_one_process(corpus, words):
    """In float64, to 1e-10: loss, raw gradients, norm and weights of three steps. The initial
    weights have one process's bits."""
    sizes = dict(re.findall(r" (n_hidden|head_dim|untied)=?(\d*)", words))
    flags = [word for word in words.split() if word.partition("=")[0] not in sizes]
    worst = run(flags, corpus, **{name: int(value or True) for name, value in sizes.items()})
    assert (worst < TOLERANCE).all(), worst


# ---- validation ----


def _validation(rank, cfg):
    trainer, data = make_trainer(cfg)
    return [trainer.validate(data, batches) for batches in (1, 9, None)]


@pytest.mark.parametrize("words", [
    "--cp 2 --dp 2 --zero 3", "--cp 2 --pp 2 --microbatches 3",
    "--dp 3 --tp 2 --microbatches 4",  # the last batch's windows are those of one rank
    "--tp 2 --sp --dp 2 --ep 2 --experts 4"])
def test_validation_takes_each_window_once(corpus, words):
    """624 windows of 8 in 5000 tokens, 36 in a batch: the first batch, nine of them, all."""
    cfg, found = in_layout(words, corpus, _validation)
    val = torch.from_numpy(np.fromfile(f"{corpus}/val.bin", "<u2").astype(np.int64))
    windows, targets = val[: 624 * 8].view(624, 8), val[1 : 624 * 8 + 1].view(624, 8)
    config = config_of(cfg, VOCAB)
    model = build(config, cfg.seed, torch.double, kind_of(config))
    with torch.no_grad():
        each = F.cross_entropy(model(windows).movedim(-1, 1), targets, reduction="none").mean(1)
    want = torch.stack([each[:36].mean(), each[: 9 * 36].mean(), each.mean()])
    for losses in found:
        close(losses, want, words)


# ---- fewer bits ----


def _narrow(rank, cfg):
    """Of a step: (are the initial weights one process's, rounded; how far the gradients that this
    rank's AdamW has seen are from one process's, clipped, in parts of their norm; loss; norm)"""
    trainer, data = make_trainer(cfg)
    initial, steps = one_process(config_of(cfg, VOCAB), cfg.data)
    _, gradients, want_norm, _ = steps[0]
    equal = all(torch.equal(weight, tag.slice(initial[tag.name]).to(weight.dtype))
                for tag, weight in trainer.reducer.whole())
    loss, norm, _ = trainer.step(data.training(cfg, 0, trainer.mesh), 1e-2)
    [*trainer.reducer.whole()]  # under ZeRO new weights are on their way, in the same groups
    # The mean of gradients after one step is (1 - beta1) times the gradient, of 32 bits
    pairs = [(mean.double().flatten() / 0.1, tag.slice(gradients[tag.name]).flatten())
             for tag, mean in whole_slices(trainer.reducer, trainer.optimizer.means)]
    got, want = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    want = want * 0.2 / want_norm
    return equal, ((got - want).norm() / want.norm()).item(), loss.item(), norm.item()


@pytest.mark.parametrize("words", [
    "--dp 2 --zero 3 --tp 2 --microbatches 2", "--dp 2 --pp 2 --zero 1 --microbatches 3",
    "--cp 2 --tp 2 --sp", "--dp 2 --ep 2 --experts 4 --zero 2"])
@pytest.mark.parametrize("dtype,tolerance", [
    ("float32", 2**-18), ("bfloat16", 2**-4), ("float16", 2**-7)])
def test_fewer_bits_train_as_far_as_rounding_allows(corpus, words, dtype, tolerance):
    """A rounding is off by 2^-24 of the value in float32, 2^-12 in float16, 2^-9 in bfloat16. A
    gradient passes some thirty roundings here: 2^5 or 2^6 times that is allowed, of all gradients
    together. (Single ones, such as those of key biases, are nothing but rounding.) The loss, a mean
    over 288 tokens, is four times as exact. Of float16's loss scale nothing is left."""
    cfg, found = in_layout(f"{words} --dtype {dtype}", corpus, _narrow)
    want_loss, _, want_norm, _ = one_process(config_of(cfg, VOCAB), corpus)[1][0]
    for equal, off, loss, norm in found:
        assert equal and off <= tolerance
        close(loss, want_loss, "loss", tolerance / 4)
        close(norm, want_norm, "norm", tolerance)


# ---- bytes ----


def _bytes(rank, cfg):
    """Of a step: ({group: elements sent}, what this rank has of the model)"""
    trainer, data = make_trainer(cfg)
    trainer.step(data.training(cfg, 0, trainer.mesh), 1e-3)
    groups = trainer.mesh.groups
    (begin, stop), = [cut for cut, where in zip(trainer.cuts, trainer.where, strict=True)
                      if where == groups["pp"].rank]
    held = {"embedding": begin == 0, "head": stop == cfg.n_layer + 2}
    held["blocks"] = stop - begin - held["embedding"] - held["head"]
    for name in ("tp", "pp_ends"):  # elements whose gradients are also summed over this group
        held[name] = sum(flat.weights.numel() for flat in trainer.reducer.trained_flats
                         if groups.get(name) in flat.others)
    return {name: group.bytes_sent // 8 for name, group in groups.items()}, held


@pytest.mark.parametrize("words", [
    "--dp 2 --tp 2 --pp 2 --microbatches 3", "--tp 4 --microbatches 2", "--tp 4 --sp",
    "--tp 2 --sp --pp 2 --microbatches 3 --recompute"])
def test_tensor_and_pipeline_ranks_send_the_bytes_of_the_formulas(corpus, words):
    """(Those of data and context ranks: test_zero.py, test_sequences.py.)"""
    cfg, got = in_layout(words, corpus, _bytes)
    T = cfg.tp
    tokens = BATCH * cfg.block_size // cfg.dp  # of a step, on a rank
    activation = tokens * cfg.n_embd
    # To recompute a block repeats its forward's messages but the last, a half of an all-reduce
    # under --sp, because backward needs nothing that the block computes from that
    of_block = 4 + (1.5 if cfg.recompute else 0)
    want_tp = 0
    for sent, held in got:
        # Stage 0 of two sends activations, stage 1 their gradients
        assert sent["pp"] == (activation // (T if cfg.sp else 1) if cfg.pp == 2 else 0)
        assert sent.get("pp_ends", 0) == held["pp_ends"]
        # All-reduces: of a block four, of the embedding and of the head one. The head sums one more
        # number of a microbatch, and gathers one of each token
        reduced = (held["blocks"] * of_block + held["embedding"] + held["head"]) * activation
        reduced += cfg.microbatches * held["head"] + held["tp"]
        want_tp += reduced * 2 * (T - 1) / T + held["head"] * tokens * (T - 1)
        assert (held["tp"] > 0) == cfg.sp
    # T ranks together: where T does not divide a number of elements, some send more
    assert sum(sent["tp"] for sent, _ in got) == round(want_tp)
    # Loss, norm, stop
    assert sum(sent["world"] for sent, _ in got) == 2 * (len(got) - 1) * 3
    others = {"pp", "pp_ends", "tp", "world"} | ({"shard_ep_cp"} if cfg.dp > 1 else set())
    assert not any(sent[name] for sent, _ in got for name in sent.keys() - others)
