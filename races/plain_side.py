"""Our other sides of a row: the root's plain forms, the same layout in another way, and limits."""

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

# ---- the root's plain forms. Each is beside the engine's techniques wherever it can be, and steps
# with torch's fused AdamW, so that the row compares one technique and not all of them ----


def plain_ring(job):
    tensor = torch.zeros(256 * job.row.size)
    group = job.mesh(Group).group("dp")
    return repeated(job, lambda: collectives.all_reduce(tensor, group))


def plain_reducer(job):
    """A plain loop with the root's DDP, ZeRO-1, 2 or 3. All work on their messages is behind
    backward, or in ZeRO-2 and 3 between its operations."""
    cfg = job.cfg
    model = whole_model(job)
    group = job.mesh(Group).group("dp")
    tag_whole(model, data=group)
    layers = list(model.layers)
    reducer = REDUCERS[cfg.zero](layers)
    pairs = list(zip(reducer.weights, reducer.params, strict=True))
    optimizer = torch.optim.AdamW(
        [{"params": [weight for weight, param in pairs if decays(param.shard) == matrices],
          "weight_decay": cfg.weight_decay if matrices else 0.0} for matrices in (True, False)],
        lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), fused=True)
    ((ids, targets),) = job.batches

    def step():
        loss = run_layers(layers, ids, targets) / (targets.numel() * job.n)
        loss.backward()
        grads = reducer.gradients()
        square = nn.utils.get_total_norm(grads).square()
        if cfg.zero > 0:  # each rank has other chunks
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
    """The trainer with the root's columns and rows, which wait for their messages, and its head."""
    def parallelize(model, group, sp, defer):
        tensor_parallel.tensor_parallel(model, group)

    with swapped(train, parallelize=parallelize):
        return trainer(job)


def plain_pipeline(job):
    """The root's 1F1B."""
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
        all_reduce(tied.grad, group)  # two ranks: both are ends
        grads = [p.grad for p in params if last or p is not tied]
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
    """plain.py, all of it, AdamW too."""
    constant = {"warmup_steps": 0, "steps": 10**6, "min_lr": job.cfg.lr}  # the learning rate
    job.plan({**job.row.layout, **constant})
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
    """Rank c has segment c of N: it meets all of those before it, and none of those behind it."""
    def in_order(S, size, rank):
        return torch.arange(S).chunk(size)[rank]

    def visible(rank, key_rank, half):
        seen = slice(None) if key_rank <= rank else slice(0)  # all of the segment, or nothing
        return seen, seen, key_rank == rank

    compute = engine.context_parallel.kernel
    compute_backward = engine.context_parallel.kernel_backward

    def kernel(q, k, v, causal):
        return compute(q, k, v, causal) if q.size(2) else (q, q[..., 0], ())

    def kernel_backward(grad, q, k, v, *args):
        return compute_backward(grad, q, k, v, *args) if q.size(2) else (q, k, v)

    with swapped(context_parallel, zigzag=in_order):
        step = trainer(job)

    def naive_step():
        with swapped(engine.context_parallel, visible=visible, kernel=kernel,
                     kernel_backward=kernel_backward):
            return step()

    return naive_step


# ---- limits: one process does the work while the other ranks look on ----


def one_process(job):
    """A plain loop with as many threads as there are ranks."""
    same = ("microbatches", "experts", "balance")
    job.plan({name: getattr(job.cfg, name) for name in same})
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
    """The trainer on one rank: the whole batch, or one rank's share if the batch grows with the
    ranks."""
    job.n = 1
    job.plan({})
    return trainer(job) if job.rank == 0 else lambda: 0.0
