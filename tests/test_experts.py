"""Experts spread over ranks equal one process, which equals a loop over tokens."""

import weakref
from functools import partial

import pytest
import torch

import ddp
import experts
import model as model_file
import train
from data.batches import Data
from experts import MixtureGPT, MixtureOfExperts
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
    reference,
    train_with,
)
from tests.pool import pool


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
    {"dp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 2, "zero": 2, "top_k": 1},
    {"dp": 4, "ep": 4, "recompute": True}, {"dp": 2, "ep": 2, "tp": 2, "sp": True}], ids=str)
def test_an_expert_without_tokens_and_one_with_all(corpus, flags, monkeypatch):
    monkeypatch.setattr(model_file, "initial_value", lopsided)
    monkeypatch.setattr("tests.harness.reference", reference.__wrapped__)  # not from the cache
    equals_one_process(corpus, _lopsided, experts=4, **{"microbatches": 1, **flags})


@pytest.mark.parametrize("flags", [
    {}, {"microbatches": 4}, {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 2, "ep": 2, "tp": 2},
    {"tp": 2}, {"tp": 2, "sp": True}, {"dp": 2, "ep": 2, "tp": 2, "sp": True, "zero": 2},
    {"cp": 2}, {"dp": 4, "ep": 2, "shard": 2, "zero": 3}], ids=str)
def test_losses_gradients_and_balance_are_one_process_in_every_layout(corpus, flags):
    """The balance loss is a sum over sequences, so no cut of the batch changes it."""
    got, want = equals_one_process(corpus, experts=4, **{"microbatches": 1, **flags})
    assert all(step["balance"] > 0 for step in want[1:])


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
    mesh = train.make_mesh(cfg, cfg.device)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    live, calls = weakref.WeakSet(), []

    def note(module, args):
        live.add(args[0])
        calls.append(module)

    for block in (layer for layers in trainer.pipeline.stages.values() for layer in layers):
        if hasattr(block, "mlp"):
            for module in (block.ln_2, block.mlp, block.attn.c_proj):
                module.register_forward_pre_hook(note)
    trainer.step(Data(cfg).training(cfg, 0, mesh), 1e-3)
    return len(live), len(calls)


def test_recomputing_experts_leaves_nothing_behind(corpus):
    """A block keeps the balance term that it has computed again, and by it that graph, which must
    have no activations."""
    cfg = config(corpus, pp=2, experts=4, recompute=True, microbatches=3)
    live, calls = zip(*pool(check(cfg, 1), _left_behind, cfg), strict=True)
    # forward, and again: three modules in each microbatch
    assert live == (0, 0) and sum(calls) == 2 * 3 * 3 * SHAPE["n_layer"]


def test_flops_are_those_of_the_experts_that_a_token_meets():
    dense, routed = GPTConfig(50, 8, 2, 2, 16), GPTConfig(50, 8, 2, 2, 16, n_experts=8, top_k=2)
    flops = [config.flops_per_token(sum(p.numel() for p in kind(config).parameters()))
             for config, kind in ((dense, GPT), (routed, MixtureGPT))]
    # a block has a router of 16 x 8 more, and a second bias of c_proj: 16
    assert flops[1] - flops[0] == 6 * 2 * (16 * 8 + 16)


def test_scores_of_a_16_bit_model_have_32_bits():
    """In 16 bits neighbouring scores are equal."""
    generator = torch.Generator().manual_seed(0)
    layer = MixtureOfExperts(GPTConfig(VOCAB, 8, 1, 1, 64, n_experts=16)).bfloat16()
    torch.nn.init.normal_(layer.router.weight, generator=generator)
    seen, layer.run_experts = [], lambda x, gates, chosen: seen.append((gates, chosen))
    x = torch.randn(64, 8, 64, generator=generator).bfloat16()
    layer(x)
    (gates, chosen), = seen
    scores, want = (x.float() @ layer.router.weight.float().T).topk(2)
    assert torch.equal(chosen, want) and gates.dtype == torch.bfloat16
    assert (gates - scores.softmax(-1)).abs().max() < 2**-8
    assert layer.balance.dtype == torch.float


def _bug_of_experts(rank, cfg, bug):
    def averaged(self, flat, reduce=ddp.DDP.reduce):
        reduce(self, flat)
        if any("experts" in param.tag.name for param in flat.params):
            flat.grads.div_(cfg.dp)

    def fixed_gates(x, gates, chosen, experts, group, call=experts.dispatch_and_combine):
        return call(x, gates.detach(), chosen, experts, group)

    def rolled(*args, run=experts.run_by_expert):
        return run(*args).roll(1, 0)

    seen = []

    def another_microbatch(model, mesh, sp, spread=experts.spread_experts):
        spread(model, mesh, sp)
        for block in model.layers[1:-1]:
            def last(counts):
                seen.append(counts)
                return seen[max(0, len(seen) - 1 - cfg.n_layer)]
            block.mlp.sum_counts = last

    patches = {"averaged over the data ranks": (ddp.DDP, "reduce", averaged),
               "gates not differentiated": (experts, "dispatch_and_combine", fixed_gates),
               "combined in another order": (experts, "run_by_expert", rolled),
               "counts of another microbatch": (train, "spread_experts", another_microbatch)}
    return train_with(rank, cfg, *patches[bug])


@pytest.mark.parametrize("bug", ["averaged over the data ranks", "gates not differentiated",
                                 "combined in another order", "counts of another microbatch"])
def test_bugs_of_experts_are_noticed(corpus, bug):
    with pytest.raises(AssertionError, match="off by|copies of .* differ|replicas disagree"):
        equals_one_process(corpus, _bug_of_experts, bug, dp=2, ep=2, experts=4, microbatches=3)


def _expert_bytes(rank, cfg):
    """(bytes sent in the expert group, rows that went to other ranks or came back from this one,
    forwards of a layer, tokens counted by the routers of all ranks, experts in each weight)"""
    mesh = train.make_mesh(cfg, cfg.device)
    trainer, moved, calls = train.Trainer(cfg, mesh, VOCAB), 0, 0
    group, usual = mesh.group("ep", "tp") if cfg.sp else mesh.group("ep"), experts.all_to_all

    def counting(outputs, inputs, group):
        nonlocal moved, calls
        if inputs[0].dtype == torch.double:
            moved += sum(len(part) for i, part in enumerate(inputs) if i != group.rank)
        else:
            calls += 1
        return usual(outputs, inputs, group)

    experts.all_to_all = counting
    try:
        _, sums = trainer.step(Data(cfg).training(cfg, 0, mesh), 1e-3)
    finally:
        experts.all_to_all = usual
    loads = sums[3:].view(trainer.routing.table.shape)[:, 1:].sum().item()
    held = {len(param) for layer in trainer.pipeline.stages[0][1:-1]
            for param in layer.mlp.experts.parameters()}
    return group.bytes_sent, moved, calls, loads, held


@pytest.mark.parametrize("flags", [{"dp": 4, "ep": 4}, {"dp": 2, "ep": 2, "tp": 2, "sp": True},
                                   {"dp": 2, "ep": 2, "recompute": True}], ids=str)
def test_no_token_is_lost_and_bytes_sent_are_those_of_the_counts(corpus, flags):
    cfg = config(corpus, experts=8, microbatches=3, **flags)
    got = pool(check(cfg, 1), _expert_bytes, cfg)
    ranks = cfg.ep * cfg.tp  # that share the experts
    each = cfg.experts // ranks
    visits = BATCH * cfg.block_size * cfg.n_layer * 2
    for sent, moved, calls, loads, held in got:
        assert loads == visits and held == {each}
        assert calls == cfg.n_layer * 3 * (2 if cfg.recompute else 1)
        assert sent == (moved * cfg.n_embd + calls * (ranks - 1) * each) * 8
    # out and back, forward and backward; what was chosen is not even, but not far from it
    away = sum(moved for _, moved, *_ in got) / (6 if cfg.recompute else 4)
    assert 0.8 * visits < away / (1 - 1 / ranks) < 1.2 * visits and away == int(away)


@pytest.mark.parametrize("n,ranks", [(4, 3), (2, 4)])
def test_ranks_that_cannot_share_the_experts_are_refused(n, ranks):
    config = GPTConfig(VOCAB, **SHAPE, n_experts=n)

    class FakeMesh:
        def group(self, *axes):
            return type("FakeGroup", (), {"size": ranks if axes == ("ep",) else 1, "rank": 0})

    with pytest.raises(ValueError, match=f"^--experts {n} must be a multiple of {ranks}, "):
        experts.spread_experts(build(config, kind=MixtureGPT), FakeMesh())
