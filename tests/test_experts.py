"""Experts spread over ranks equal one process, which equals a loop over tokens."""

import weakref
from functools import partial

import pytest
import torch

import engine.collectives as c
import engine.ddp as ddp
import engine.expert_parallel as expert_parallel
import engine.parts as parts
import model as model_file
import train
from data.batches import Data
from experts import MixtureGPT
from model import GPT, build
from run.config import check
from sizes import GPTConfig
from tests.harness import (
    BATCH,
    SHAPE,
    VOCAB,
    close,
    config,
    equals_one_process,
    mesh_of,
    pool,
    reference,
    train_with,
)


def lopsided(name, shape, config, seed, usual=model_file.initial_value):
    """Initial values by which every token goes to expert 0 first, and none to the last one."""
    value = usual(name, shape, config, seed)
    if name.endswith("ln_2.bias"):
        value += 1
    if name.endswith("router.weight"):
        value[0] += 2 / 24  # the input of the router has a mean of 1 over its 24 numbers
        value[-1] -= 2 / 24
    return value


draws_lopsided = partial(train.Trainer, draw=lopsided)


def _lopsided(rank, cfg):
    return train_with(rank, cfg, train, "Trainer", draws_lopsided)


@pytest.mark.parametrize("flags", [
    {"dp": 2, "ep": 2, "top_k": 1}, {"dp": 2, "ep": 2, "zero": 3, "microbatches": 2},
    {"dp": 2, "ep": 2, "top_k": 1, "fast": ""},
    {"dp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 2, "zero": 2, "top_k": 1},
    {"tp": 2, "top_k": 1}, {"dp": 4, "ep": 4, "recompute": True},
    {"dp": 2, "ep": 2, "tp": 2, "microbatches": 2}], ids=str)
def test_an_expert_without_tokens_and_one_with_all(corpus, flags, monkeypatch):
    monkeypatch.setattr(model_file, "initial_value", lopsided)
    monkeypatch.setattr("tests.harness.reference", reference.__wrapped__)  # not from the cache
    equals_one_process(corpus, _lopsided, experts=4, **{"microbatches": 1, **flags})


def test_experts_are_what_a_loop_over_tokens_says():
    """Values, gradients, balance: of all N experts by their definition, token by token."""
    config = GPTConfig(VOCAB, 8, 1, 2, 12, n_experts=5, top_k=3)
    layer = build(config, dtype=torch.double, kind=MixtureGPT).layers[1].mlp
    x = torch.randn(2, 8, 12, dtype=torch.double)
    results = []
    for naive in (False, True):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        if naive:
            stacks = layer.experts.c_fc, layer.experts.c_proj
            y, balance = torch.zeros_like(x), 0.0
            for b, sequence in enumerate(given):
                chosen = torch.zeros(5, dtype=torch.double)
                for s, token in enumerate(sequence):
                    logits = layer.router.weight @ token
                    best = sorted(range(5), key=lambda i, z=logits: -z[i])[:3]
                    for i, gate in zip(best, torch.softmax(logits[best], 0), strict=True):
                        h = stacks[0].weight[i] @ token + stacks[0].bias[i]
                        h = torch.nn.functional.gelu(h, approximate="tanh")
                        y[b, s] = y[b, s] + gate * (stacks[1].weight[i] @ h + stacks[1].bias[i])
                        chosen[i] += 1
                for token in sequence:
                    p = torch.softmax(layer.router.weight @ token, 0)
                    balance = balance + (chosen * 5 / (3 * 8) * p).sum()
        else:
            y, balance = layer(given), None
            balance = layer.balance
        (y.sin().sum() + balance).backward()
        results.append([y.detach(), balance.detach(), given.grad,
                        *(p.grad.clone() for p in layer.parameters())])
    for got, want in zip(*results, strict=True):
        close(got, want, "experts")


def _left_behind(rank, cfg):
    """How many of the inputs of blocks' modules are alive when a step is over; how many there were.
    """
    mesh = mesh_of(cfg)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    if cfg.fast:
        layers = [layer for stage in trainer.pipeline.stages.values() for layer in stage.layers]
    else:
        layers = trainer.pipeline.layers
    live, calls = weakref.WeakSet(), []

    def note(module, args):
        live.add(args[0])
        calls.append(module)

    for block in layers:
        if hasattr(block, "mlp"):
            for module in (block.ln_2, block.mlp, block.attn.c_proj):
                module.register_forward_pre_hook(note)
    trainer.step(Data(cfg).training(cfg, 0, mesh), 1e-3)
    return len(live), len(calls)


@pytest.mark.parametrize("fast", ["", "all"])
def test_recomputing_experts_leaves_nothing_behind(corpus, fast):
    """A block keeps the balance term that it has computed again, and by it that graph, which must
    have no activations."""
    cfg = config(corpus, pp=2, experts=4, recompute=True, microbatches=3, fast=fast)
    live, calls = zip(*pool(check(cfg, 1), _left_behind, cfg), strict=True)
    # forward, and again: three modules in each microbatch
    assert live == (0, 0) and sum(calls) == 2 * 3 * 3 * SHAPE["n_layer"]


def test_flops_are_those_of_the_experts_that_a_token_meets():
    dense, routed = GPTConfig(50, 8, 2, 2, 16), GPTConfig(50, 8, 2, 2, 16, n_experts=8, top_k=2)
    flops = [config.flops_per_token(sum(p.numel() for p in kind(config).parameters()))
             for config, kind in ((dense, GPT), (routed, MixtureGPT))]
    # a block has a router of 16 x 8 more, and a second bias of c_proj: 16
    assert flops[1] - flops[0] == 6 * 2 * (16 * 8 + 16)


def _bug_of_experts(rank, cfg, bug):
    def averaged(self, finish=ddp.DDP.finish):
        finish(self)
        for bucket in self.buckets:
            if any("experts" in p.tag.name for p in bucket.params):
                for _, grad in self.grad_pieces(bucket):
                    grad.div_(cfg.dp)

    def fixed_gates(self, x, gates, chosen, call=expert_parallel.SpreadExperts.__call__):
        return call(self, x, gates.detach(), chosen)

    def rolled(*args, run=expert_parallel.SpreadExperts.run_at_owners):
        return run(*args).roll(1, 0)

    seen = []

    def another_microbatch(model, mesh, sp, spread=expert_parallel.spread_experts):
        spread(model, mesh, sp)
        for block in model.layers[1:-1]:
            def last(counts):
                seen.append(counts)
                return seen[max(0, len(seen) - 1 - cfg.n_layer)]
            block.mlp.sum_counts = last

    patches = {"averaged over the data ranks": (ddp.DDP, "finish", averaged),
               "gates not differentiated": (expert_parallel.SpreadExperts, "__call__",
                                            fixed_gates),
               "combined in another order": (expert_parallel.SpreadExperts, "run_at_owners",
                                             rolled),
               "counts of another microbatch": (parts, "spread_experts", another_microbatch)}
    return train_with(rank, cfg, *patches[bug])


@pytest.mark.parametrize("bug", ["averaged over the data ranks", "gates not differentiated",
                                 "combined in another order", "counts of another microbatch"])
def test_bugs_of_experts_are_noticed(corpus, bug):
    with pytest.raises(AssertionError, match="off by|copies of .* differ|replicas disagree"):
        equals_one_process(corpus, _bug_of_experts, bug, dp=2, ep=2, experts=4, microbatches=3)


def _expert_bytes(rank, cfg):
    """(bytes sent in the expert group, rows that went to other ranks or came back from this one,
    forwards of a layer, tokens counted by the routers of all ranks, experts in each weight)"""
    mesh = mesh_of(cfg)
    trainer, moved, calls = train.Trainer(cfg, mesh, VOCAB), 0, 0
    group, run = mesh.group("ep"), c.all_to_all

    def counting(outputs, inputs, group, run=expert_parallel.all_to_all):
        nonlocal moved, calls
        if inputs[0].dtype == torch.double:
            moved += sum(len(part) for i, part in enumerate(inputs) if i != group.rank)
        else:
            calls += 1
        return run(outputs, inputs, group)

    run, expert_parallel.all_to_all = expert_parallel.all_to_all, counting
    _, sums = trainer.step(Data(cfg).training(cfg, 0, mesh), 1e-3)
    expert_parallel.all_to_all = run
    loads = sums[3:].view(trainer.routing.table.shape)[:, 1:].sum().item()
    held = {len(param) for layer in trainer.pipeline.stages[0].layers[1:-1]
            for param in layer.mlp.experts.parameters()}
    return group.bytes_sent, moved, calls, loads, held


@pytest.mark.parametrize("flags", [{"dp": 4, "ep": 4}, {"dp": 4, "ep": 2, "tp": 2, "sp": True},
                                   {"dp": 2, "ep": 2, "recompute": True}], ids=str)
def test_no_token_is_lost_and_bytes_sent_are_those_of_the_counts(corpus, flags):
    cfg = config(corpus, experts=8, microbatches=3, **flags)
    got = pool(check(cfg, 1), _expert_bytes, cfg)
    each = cfg.experts // (cfg.ep * cfg.tp)
    visits = BATCH * cfg.block_size * cfg.n_layer * 2
    for sent, moved, calls, loads, held in got:
        assert loads == visits and held == {each}
        assert calls == cfg.n_layer * 3 * (2 if cfg.recompute else 1)
        assert sent == (moved * cfg.n_embd + calls * (cfg.ep - 1) * each) * 8
    # out and back, forward and backward; what was chosen is not even, but not far from it
    away = sum(moved for _, moved, *_ in got) / (6 if cfg.recompute else 4)
    assert 0.8 * visits < away / (1 - 1 / cfg.ep) < 1.2 * visits and away == int(away)
