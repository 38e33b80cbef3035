"""Experts are what a loop over tokens says, on one rank or spread over several, whatever the
tokens choose; and they send what the counts say."""

from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F

import experts
import model as model_file
from experts import MixtureGPT, MixtureOfExperts
from model import build
from sizes import GPTConfig
from test_all import BATCH, TOLERANCE, differences, one_process
from tests.harness import VOCAB, close, in_layout, make_trainer, random

SHAPE = GPTConfig(VOCAB, 8, 1, 2, 12, n_experts=5, top_k=3)


# ---- by definition ----


def by_token(layer, x):
    """(y, balance): each token through its 3 of 5 experts; each sequence's balance."""
    fc, proj = layer.experts.c_fc, layer.experts.c_proj
    outputs, balance = [], 0.0
    for sequence in x:
        counts = torch.zeros(5, dtype=torch.double)
        probabilities = []
        for token in sequence:
            scores = layer.router.weight @ token
            chosen = sorted(range(5), key=lambda i, scores=scores: -scores[i])[:3]
            y = 0.0
            for i, gate in zip(chosen, scores[chosen].softmax(0), strict=True):
                hidden = F.gelu(fc.weight[i] @ token + fc.bias[i], approximate="tanh")
                y = y + gate * (proj.weight[i] @ hidden + proj.bias[i])
                counts[i] += 1
            outputs.append(y)
            probabilities.append(scores.softmax(0))
        share = counts * 5 / counts.sum()  # 1 if the experts are even
        balance = balance + (share * sum(probabilities)).sum()
    return torch.stack(outputs).view_as(x), balance


def test_experts_are_what_a_loop_over_tokens_says():
    """Values and all gradients; the gates' and the balance loss's reach the router."""
    layer = build(SHAPE, dtype=torch.double, kind=MixtureGPT).layers[1].mlp
    for param in layer.parameters():  # biases that are not 0
        param.data.add_(0.3 * random(*param.shape))
    results = []
    for compute in (lambda x: (layer(x), layer.balance), lambda x: by_token(layer, x)):
        layer.zero_grad()
        x = random(2, 8, 12).requires_grad_()
        y, balance = compute(x)
        (y.sin().sum() + balance).backward()
        results.append([y.detach(), balance.detach(), x.grad,
                        *(param.grad.clone() for param in layer.parameters())])
    for got, want in zip(*results, strict=True):
        close(got, want, "experts")


def test_scores_of_a_16_bit_model_have_32_bits():
    """In 16 bits neighbouring scores are equal."""
    layer = MixtureOfExperts(GPTConfig(VOCAB, 8, 1, 1, 64, n_experts=16)).bfloat16()
    layer.router.weight.data.copy_(random(16, 64))
    seen = []
    layer.run_experts = lambda x, gates, chosen: seen.append((gates, chosen))
    x = random(64, 8, 64).bfloat16()
    layer(x)
    (gates, chosen), = seen
    scores, want = (x.float() @ layer.router.weight.float().T).topk(2)
    assert torch.equal(chosen, want)
    assert (gates - scores.softmax(-1)).abs().max() < 2**-8
    assert layer.balance.dtype == torch.float


# ---- spread over ranks ----


def lopsided(name, shape, config, seed, usual=model_file.initial_value):
    """Initial values by which every token goes to expert 0 first, and none to the last one."""
    value = usual(name, shape, config, seed)
    if name.endswith("ln_2.bias"):
        value += 1
    if name.endswith("router.weight"):
        value[0] += 8 / 24  # the input of the router has a mean of 1 over its 24 numbers
        value[-1] -= 8 / 24
    return value


def _lopsided(rank, cfg):
    """(the largest differences from one process, the numbers of tokens of this rank's experts)"""
    one_process.cache_clear()  # it has kept a run with the usual initial values
    with (patch.object(model_file, "initial_value", lopsided),
          patch.object(experts, "run_by_expert", Mock(wraps=experts.run_by_expert)) as run):
        worst, _ = differences(rank, cfg)
    one_process.cache_clear()
    return worst, {number for call in run.call_args_list for number in call.args[2].sum(0).tolist()}


@pytest.mark.parametrize("words", [
    "--top-k 1 --dp 2 --ep 2", "--dp 2 --ep 2 --zero 3 --microbatches 2",
    "--top-k 1 --dp 2 --ep 2 --pp 2 --schedule zb-h1 --microbatches 2 --zero 2",
    "--dp 4 --ep 4 --recompute", "--dp 2 --ep 2 --tp 2 --sp"])
def test_an_expert_without_tokens_and_one_with_all(corpus, words):
    cfg, found = in_layout(f"--experts 4 {words}", corpus, _lopsided)
    worst, seen = zip(*found, strict=True)
    assert (torch.stack(worst) < TOLERANCE).all(), worst
    assert {0, BATCH * cfg.block_size // cfg.microbatches} <= set().union(*seen)


def _bytes(rank, cfg):
    """(bytes sent in the expert group; rows that went to other ranks or came back from this one;
    those that stayed; forwards of a layer; experts in each weight)"""
    trainer, data = make_trainer(cfg)
    group = trainer.mesh.group("ep", "tp") if cfg.sp else trainer.mesh.group("ep")
    with patch.object(experts, "all_to_all", Mock(wraps=experts.all_to_all)) as all_to_all:
        trainer.step(data.training(cfg, 0, trainer.mesh), 1e-3)
    inputs = [call.args[1] for call in all_to_all.call_args_list]
    rows = [[len(part) for part in parts] for parts in inputs if parts[0].dtype == torch.double]
    kept = sum(lengths[group.rank] for lengths in rows)
    held = {len(param) for layer in trainer.pipeline.stages[0][1:-1]
            for param in layer.mlp.experts.parameters()}
    # The other all_to_alls are of the counts
    return group.bytes_sent, sum(map(sum, rows)) - kept, kept, len(inputs) - len(rows), held


@pytest.mark.parametrize("words", ["--dp 4 --ep 4", "--dp 2 --ep 2 --tp 2 --sp",
                                   "--dp 2 --ep 2 --recompute"])
def test_no_token_is_dropped_and_bytes_sent_are_those_of_the_counts(corpus, words):
    cfg, got = in_layout(f"--experts 8 --microbatches 3 {words}", corpus, _bytes)
    N = cfg.ep * cfg.tp  # ranks that share the experts
    for sent, moved, _, calls, held in got:
        assert held == {8 // N}
        assert calls == cfg.n_layer * 3 * (2 if cfg.recompute else 1)
        assert sent == (moved * cfg.n_embd + calls * (N - 1) * 8 // N) * 8
    # out and back, forward (once more if recomputed) and backward
    passes = 6 if cfg.recompute else 4
    assignments = BATCH * cfg.block_size * cfg.n_layer * cfg.top_k
    moved, kept = (sum(rank[i] for rank in got) for i in (1, 2))
    assert moved + kept == passes * assignments
