"""The whole project on one page: ranks train a GPT together, each technique in its plainest form.

A rank is one process. D replicas of the model each train on 1/D of the batch. A replica is cut into
P stages of consecutive layers, for P ranks, and each matrix of a block into T slices, for T ranks.
A replica's batch goes through its stages in microbatches.

    python plain.py                                          one process
    torchrun plain.py --dp 2 --tp 2 --pp 2 --zero 1          eight: it starts the other seven

Every layout prints the losses and norms of `python train.py`. (In float32 the last
digit may differ after some ten steps, as between any two layouts: sums are rounded in another
order. After step 150 the learning rate depends on --steps.)

A step meets the techniques in the order of this page: this rank's part of the model, forward and
backward of the microbatches, sum of the gradients, clipping, AdamW. train.py composes the fast
forms of the same techniques. Here nothing overlaps, embedding and head are whole on all T ranks,
1F1B is the only schedule, ZeRO-1 the only ZeRO, on CPUs, without checkpoints; split sequences and
experts are left out.
"""

import argparse
import os
import sys

import torch

from collectives import own_chunk, plain_all_reduce
from data.batches import Data
from mesh import Mesh
from model import build
from optimizer import clip_coefficient, decays, learning_rate
from pipeline import Stage, plain_1f1b, tie_ends
from run.launch import launch
from run.processes import init, shutdown
from run.signals import local_rank
from schedules import cut
from shard import tag_whole
from sizes import GPTConfig
from tensor_parallel import plain_tensor_parallel
from zero import plain_zero_step

FLAGS = {  # train.py has the same defaults, but for steps, dp and microbatches
    "dp": 1, "pp": 1, "tp": 1, "zero": 0, "microbatches": 4, "steps": 3,
    "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128, "dtype": "float32",
    "batch_size": 32, "lr": 4e-3, "min_lr": 0.0, "warmup_steps": 150, "weight_decay": 0.1,
    "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "seed": 1337, "data": "stdlib"}


# ---- 1. this rank's part of the model: slices of matrices, then a stage ----


def part_of_model(cfg, mesh, vocab_size):
    """The layers of this rank's pipeline stage, with this rank's slice of each block's matrices.
    Each layout starts from the same whole model, so from the same weights."""
    config = GPTConfig(vocab_size, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd)
    model = build(config, cfg.seed, getattr(torch, cfg.dtype))
    # Tag each parameter: its name, its slice, the groups of ranks to sum its gradient over
    tag_whole(model, data=mesh.group("dp"))
    plain_tensor_parallel(model, mesh.group("tp"))
    # Embedding and head, on the first and the last stage (the ends), share one matrix: tag it, so
    # that both gradients are summed
    tie_ends(model.layers, mesh.ends("pp"))
    pipeline = mesh.group("pp")
    start, stop = cut(config.layer_costs(), pipeline.size)[pipeline.rank]
    return Stage(model.layers[start:stop])


class Flat:
    """A stage's parameters side by side, in four flat buffers: then one message sums the gradients
    of all parameters, and ZeRO can give each data rank 1/D of the elements."""

    def __init__(self, params, weight_decay):
        self.weights = torch.cat([param.detach().flatten() for param in params])
        self.grad, self.decay, self.share = (torch.zeros_like(self.weights) for _ in range(3))
        start = 0
        for param in params:
            part = slice(start, start + param.numel())
            # param and param.grad become views: autograd adds in place
            param.data = self.weights[part].view(param.shape)
            param.grad = self.grad[part].view(param.shape)
            self.decay[part] = weight_decay if decays(param.shard) else 0.0
            # In the global norm each element counts once: each of the `copies` ranks of a replica
            # that hold it adds 1/copies of its square
            self.share[part] = 1 / param.shard.copies
            start += param.numel()


# ---- 2. AdamW, on all elements or on this rank's 1/D (arXiv 1711.05101) ----


class AdamW:
    def __init__(self, cfg, flat, norm_group, own):
        """own(buffer): the elements that this rank steps. norm_group: the ranks that together hold
        every gradient of the model."""
        self.cfg, self.norm_group, self.num_steps = cfg, norm_group, 0
        self.decay, self.share = own(flat.decay), own(flat.share)
        self.mean = torch.zeros_like(own(flat.weights))  # of the gradients so far
        self.square = torch.zeros_like(self.mean)  # of their squares

    def step(self, weights, grad):
        """One step, in place. Returns the global gradient norm, the same on every rank."""
        norm_square = (grad.double().square() * self.share).sum()
        norm = plain_all_reduce(norm_square, self.norm_group).sqrt()
        grad *= clip_coefficient(norm, self.cfg.grad_clip)
        beta1, beta2, lr = self.cfg.beta1, self.cfg.beta2, learning_rate(self.cfg, self.num_steps)
        self.num_steps += 1
        self.mean.lerp_(grad, 1 - beta1)
        self.square.lerp_(grad.square(), 1 - beta2)
        mean = self.mean / (1 - beta1**self.num_steps)  # both means began at 0
        square = self.square / (1 - beta2**self.num_steps)
        weights -= lr * (self.decay * weights + mean / (square.sqrt() + 1e-8))
        return norm.item()


# ---- 3. the steps ----


def training_steps(cfg, mesh, data):
    """Yields (loss, gradient norm) of each step, the same on every rank."""
    replicas, pipeline = mesh.group("dp"), mesh.group("pp")
    stage = part_of_model(cfg, mesh, data.vocab_size)
    params = list(stage.parameters())
    flat = Flat(params, cfg.weight_decay)
    if cfg.zero:  # each data rank steps 1/D: only all ranks together hold every gradient
        adamw = AdamW(cfg, flat, mesh.world, lambda buffer: own_chunk(buffer, replicas))
    else:
        adamw = AdamW(cfg, flat, mesh.group("pp", "tp"), lambda buffer: buffer)
    tokens = cfg.batch_size * cfg.block_size  # of a step, on all ranks
    sequences = cfg.batch_size // cfg.dp // cfg.microbatches  # of a microbatch
    for step in range(cfg.steps):
        flat.grad.zero_()
        batches = data.training(cfg, step, mesh)  # this data rank's microbatches

        # forward and backward: stages pass on activations and gradients, T ranks sum partial sums
        loss = plain_1f1b(stage, pipeline, batches, (sequences, cfg.block_size, cfg.n_embd), tokens)

        # sum of the gradients: of the tied embedding over its two stages, then of all over replicas
        for param in params:
            for group in param.shard.sum_over[1:]:  # [0] is the replicas: one sum of `flat` follows
                plain_all_reduce(param.grad, group)
        if cfg.zero:
            norm = plain_zero_step(flat.weights, flat.grad, replicas, adamw.step)
        else:
            plain_all_reduce(flat.grad, replicas)
            norm = adamw.step(flat.weights, flat.grad)

        # each data rank's last stage has a part of the loss
        loss = torch.tensor(loss, dtype=torch.double)
        plain_all_reduce(loss, mesh.group("dp", "pp"))
        yield loss.item(), norm


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in FLAGS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default,
                            help=f"({default})")
    cfg = parser.parse_args()
    ranks, world = cfg.dp * cfg.pp * cfg.tp, int(os.environ.get("WORLD_SIZE", 1))
    if (cfg.n_head % cfg.tp or cfg.batch_size % (cfg.dp * cfg.microbatches) or cfg.zero > 1
            or cfg.pp > cfg.n_layer + 2):
        parser.error("--tp must divide --n-head; --dp x --microbatches must divide --batch-size; "
                     "--pp is at most --n-layer + 2; --zero is 0 or 1")
    if ranks > world:  # started as one process: start all
        sys.exit(launch(ranks))
    if world > 1:
        init()
    mesh = Mesh(dp=cfg.dp, pp=cfg.pp, tp=cfg.tp)
    for step, (loss, norm) in enumerate(training_steps(cfg, mesh, Data(cfg, local_rank()))):
        if mesh.rank == 0:
            print(f"step {step:6d}  loss {loss:.4f}  norm {norm:.3f}", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
