"""Peers of the engine that are ours, too: the root's plain forms, the same layout in another way,
and one process or rank as a limit."""

from types import SimpleNamespace

import torch
import torch.nn as nn

import collectives
import context_parallel
import engine.context_parallel
import plain
import tensor_parallel
import train
from collectives import all_reduce
from group import Group
from optimizer import clip_coefficient, decays
from pipeline import run_layers, run_pipeline
from races.job import repeated, trainer
from races.torch_side import adamw, loop, whole_model
from races.without import swapped
from schedules import SCHEDULES, cut
from shard import tag_whole
from zero import REDUCERS

# ---- the root's plain forms ----
# A row compares one technique. So where a plain form fits into the engine's trainer, the engine
# does all else. Where it does not fit, a plain loop does all else, with torch's fused AdamW.
# (all_of_plain compares all techniques together.)


def plain_ring(job):
    """The root's all_reduce."""
    tensor = torch.zeros(256 * job.row.size)  # 4 bytes each: row.size KiB
    group = job.mesh(Group).group("dp")
    return repeated(job, lambda: collectives.all_reduce(tensor, group))


def plain_reducer(job):
    """A plain loop with the root's DDP, ZeRO-1, 2 or 3. Nothing overlaps: messages travel after
    backward or, in ZeRO-2 and 3, between the operations of forward and backward."""
    cfg = job.cfg
    model = whole_model(job)
    group = job.mesh(Group).group("dp")
    tag_whole(model, data=group)
    layers = list(model.layers)
    reducer = REDUCERS[cfg.zero](layers)
    # Not torch_side.adamw, because ZeRO's weights are flat chunks: their tags tell the matrices
    matrices = []
    others = []
    for weight, param in zip(reducer.weights, reducer.params, strict=True):
        (matrices if decays(param.shard) else others).append(weight)
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay},
              {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), fused=True)
    ((ids, targets, _),) = job.batches

    def step():
        loss = run_layers(layers, ids, targets) / (targets.numel() * job.n)
        loss.backward()
        grads = reducer.gradients()
        square = nn.utils.get_total_norm(grads).square()
        if cfg.zero > 0:  # each rank has other chunks of the gradients
            all_reduce(square, group)
        torch._foreach_mul_(grads, clip_coefficient(square.sqrt(), cfg.grad_clip))
        for weight, grad in zip(reducer.weights, grads, strict=True):
            weight.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        reducer.publish()
        return loss.item()

    return step


def plain_tensor_parallel(job):
    """The trainer with the root's columns and rows, which wait for their messages, and with the
    root's head."""
    def parallelize(model, group, sp, defer):
        tensor_parallel.tensor_parallel(model, group)

    with swapped(train, parallelize=parallelize):
        return trainer(job)


def plain_pipeline(job):
    """A plain loop with the root's 1F1B."""
    cfg = job.cfg
    last = job.rank == job.n - 1
    group = job.mesh(Group).group("pp")
    model = whole_model(job)
    start, stop = cut(model.config.layer_costs(), job.n)[job.rank]
    layers = model.layers[start:stop]
    tied = model.layers[0].wte.weight
    params = list(layers.parameters())
    optimizer = adamw(params, cfg)
    order = SCHEDULES["1f1b"].actions(job.n, cfg.microbatches, 1, job.rank)
    shape = (cfg.batch_size // cfg.microbatches, cfg.block_size, cfg.n_embd)
    tokens = cfg.batch_size * cfg.block_size  # tokens of a step

    def step():
        loss = run_pipeline(layers, group, order, job.batches, shape, tokens, torch.float32)
        all_reduce(tied.grad, group)  # these rows have two ranks: both are ends, and hold `tied`
        grads = [p.grad for p in params if last or p is not tied]  # `tied` counts once in the norm
        square = all_reduce(nn.utils.get_total_norm(grads).square(), group)
        nn.utils.clip_grads_with_norm_(params, cfg.grad_clip, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def plain_attention(job):
    """The trainer with the root's ring attention."""
    with swapped(engine.context_parallel, KINDS={"ring": context_parallel.ring_attention}):
        return trainer(job)


def all_of_plain(job):
    """All of plain.py, AdamW too."""
    constant_rate = {"warmup_steps": 0, "steps": 10**6, "min_lr": job.cfg.lr}
    job.plan({**job.row.layout, **constant_rate})
    data = SimpleNamespace(vocab_size=job.vocabulary,
                           training=lambda cfg, step, mesh: job.batches)
    steps = plain.training_steps(job.cfg, job.mesh(Group), data)

    def step():
        loss, norm = next(steps)
        return loss if job.rank == 0 else 0.0

    return step


# ---- the same layout in another way ----


def other_flags(**flags):
    """The trainer with other flags."""
    def peer(job):
        job.plan({**job.row.layout, **flags})
        return trainer(job)

    return peer


def naive_split(job):
    """Ring attention without zigzag: rank r has segment r of N. Its queries attend to all segments
    before, and to none behind."""
    def in_order(S, size, rank):
        return torch.arange(S).chunk(size)[rank]

    def visible(rank, key_rank, half):
        seen = slice(None) if key_rank <= rank else slice(0)  # all of the segment, or nothing
        return seen, seen, key_rank == rank

    compute = engine.context_parallel.kernel
    compute_backward = engine.context_parallel.kernel_backward

    # In a hop in which nothing is visible q, k and v are empty: return empty results, and do not
    # call torch's kernels

    def kernel(chosen, q, k, v, causal):
        if q.size(2) == 0:
            return q, q[..., 0], ()  # out, logsumexp, the rest
        return compute(chosen, q, k, v, causal)

    def kernel_backward(chosen, grad, q, k, v, *args):
        if q.size(2) == 0:
            return q, k, v  # their gradients
        return compute_backward(chosen, grad, q, k, v, *args)

    with swapped(context_parallel, zigzag=in_order):
        step = trainer(job)

    def naive_step():
        with swapped(engine.context_parallel, visible=visible, kernel=kernel,
                     kernel_backward=kernel_backward):
            return step()

    return naive_step


# ---- limits: rank 0 does the work, and the other ranks wait ----


def one_process(job):
    """A plain loop with as many threads as there are ranks."""
    # flags of the row; all others are one process's
    kept = ("microbatches", "experts", "balance", "arch", "n_kv_head", "n_hidden")
    job.plan({name: getattr(job.cfg, name) for name in kept})
    if job.rank > 0:
        return lambda: 0.0
    model = whole_model(job)
    step = loop(job, model, adamw(model.parameters(), job.cfg))

    def threaded():
        torch.set_num_threads(job.n)
        loss = step()
        torch.set_num_threads(1)
        return loss

    return threaded


def one_rank(job):
    """The trainer on one rank. Its batch: the row's or, if the row's grows with the number of
    ranks, one rank's share."""
    job.n = 1
    job.plan({})
    return trainer(job) if job.rank == 0 else lambda: 0.0
