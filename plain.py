"""Data, tensor and pipeline parallelism and ZeRO, in their plain forms, train a GPT on one page.

A rank is one process; there are D x P x T. D replicas of the model each train on 1/D of the batch.
A replica is cut into P stages of consecutive layers, and each matrix of a stage into T slices, one
for each of the stage's T ranks. A replica's batch goes through the stages in microbatches. ZeRO
shards over the replicas what each of them would hold whole: ZeRO-1 the optimizer states, ZeRO-2 the
gradients too, ZeRO-3 the weights too. Left out: split sequences, experts, schedules with several
stages per rank or with a backward in two parts.

    python plain.py                                          one process
    torchrun plain.py --dp 2 --tp 2 --pp 2 --zero 3          one process, which starts all eight

(`python plain.py --dp 2 ...` does the same; with --nproc-per-node 8 torchrun starts the ranks.)
Every layout prints the losses and norms of `python train.py`. `train.py --plain` trains with this
page, train.py alone with the fast forms of the same techniques (engine/).
"""

import sys

import torch

from collectives import all_reduce
from data.batches import Data
from group import Group
from mesh import Mesh
from model import build
from optimizer import AdamW, global_norm
from pipeline import run_pipeline, tie_ends
from run.config import fail, read_command_line
from run.launch import launch
from run.processes import init, shutdown
from run.signals import before_training, local_rank
from schedules import SCHEDULES, cut
from shard import tag_whole
from sizes import GPTConfig
from tensor_parallel import tensor_parallel
from zero import REDUCERS

FLAGS = {  # train.py has the same defaults, but for steps, dp and microbatches
    "dp": 1, "pp": 1, "tp": 1, "zero": 0, "schedule": "1f1b", "microbatches": 4, "steps": 3,
    "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128, "dtype": "float32",
    "batch_size": 32, "lr": 4e-3, "min_lr": 0.0, "warmup_steps": 150, "weight_decay": 0.1,
    "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "seed": 1337, "data": "stdlib",
    "watch": ""}


# The ranks form a grid D x P x T. A group has the ranks that differ in the named places only:
#     mesh.group("dp")          same stage, same slice, all replicas
#     mesh.group("pp")          same replica, same slice, all stages
#     mesh.group("tp")          same replica, same stage, all slices
#     mesh.group("pp", "tp")    same replica, all its stages and slices


def part_of_model(cfg, mesh, vocab_size, build):
    """The layers of this rank's pipeline stage, with this rank's slice of each matrix. Each layout
    starts from the same whole model, so from the same weights."""
    config = GPTConfig(vocab_size, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd)
    model = build(config, cfg.seed, getattr(torch, cfg.dtype))
    # Tag each parameter: its name, its slice, the groups of ranks to sum its gradient over
    tag_whole(model, data=mesh.group("dp"))
    tensor_parallel(model, mesh.group("tp"))
    # Embedding and head, on the first and the last stage (the ends), share one matrix: tag it, so
    # that both gradients are summed
    tie_ends(model.layers, mesh.ends("pp"))
    pipeline = mesh.group("pp")
    start, stop = cut(config.layer_costs(), pipeline.size)[pipeline.rank]
    return model.layers[start:stop]


def training_steps(cfg, mesh, data, build=build, optimizer=AdamW):
    """Yields (loss, gradient norm) of each step, the same on every rank. build, optimizer: other
    ones for a test or a dump."""
    layers = part_of_model(cfg, mesh, data.vocab_size, build)
    dtype = getattr(torch, cfg.dtype)
    # DDP, ZeRO1, ZeRO2, or ZeRO3, which wraps the layers. reducer.weights: the part of each
    # parameter that the optimizer updates here: under DDP all of it, under ZeRO this rank's chunk
    reducer = REDUCERS[cfg.zero](layers)
    tags = [param.shard for param in reducer.params]
    adamw = optimizer(cfg, reducer.weights, tags)
    # The ranks that together hold every summed gradient. DDP: one replica. ZeRO, from stage 1 on:
    # all ranks, because a rank gets the sum of its own chunk of each gradient only
    norm_group = mesh.world if cfg.zero else mesh.group("pp", "tp")
    pipeline = mesh.group("pp")
    # This rank's actions in order, such as "F0" "F0" "B0" "F0" "B0" "B0": forward or backward of
    # the next microbatch. Each "0" is the rank's only stage; the argument 1: one stage per rank
    order = SCHEDULES[cfg.schedule].actions(pipeline.size, cfg.microbatches, 1, pipeline.rank)
    sequences = cfg.batch_size // cfg.dp // cfg.microbatches  # sequences of a microbatch
    shape = (sequences, cfg.block_size, cfg.n_embd)  # shape of an activation
    tokens = cfg.batch_size * cfg.block_size  # tokens of a step, on all ranks

    for step in range(cfg.steps):
        batches = data.training(cfg, step, mesh)  # this replica's microbatches

        # forward and backward: stages pass on activations and gradients, T ranks sum partial sums
        loss = run_pipeline(layers, pipeline, order, batches, shape, tokens, dtype)

        # sum each gradient over the replicas; the tied matrix's also over the two stages that
        # hold it
        grads = reducer.gradients()
        for grad, tag in zip(grads, tags, strict=True):
            for group in tag.sum_over[1:]:  # sum_over[0] is the replicas
                all_reduce(grad, group)

        # clip by the global norm, and step
        norm = global_norm(grads, tags, norm_group)
        adamw.step(grads, norm)
        reducer.publish()  # ZeRO-1 and 2: every rank gets the chunks that other ranks have stepped

        # each replica's last stage has a part of the loss
        loss = all_reduce(torch.tensor(loss, dtype=torch.double), mesh.group("dp", "pp"))
        yield loss.item(), norm.item()


def main():
    before_training("without a checkpoint")  # Ctrl-C: "stopped by SIGINT without a checkpoint"
    # A wrong flag prints one line and ends the process. running: number of processes
    cfg, running, ranks = read_command_line(__doc__, FLAGS)
    if running == 1 and ranks > 1:  # start all ranks, and wait for them
        sys.exit(launch(ranks))
    if running > 1:
        init()
    mesh = Mesh(Group, dp=cfg.dp, pp=cfg.pp, tp=cfg.tp)
    # The process with local rank 0 prepares the corpus of its machine; the others wait
    try:
        data = Data(cfg, local_rank())
    except ValueError as error:
        fail(error)  # one line, exit code 2
    steps = training_steps(cfg, mesh, data)
    if cfg.watch:  # print every message of the first step
        from run.watch import watch_first
        steps = watch_first(steps, mesh, cfg.watch)
    for step, (loss, norm) in enumerate(steps):
        if mesh.rank == 0:
            print(f"step {step:6d}  loss {loss:.4f}  norm {norm:.3f}", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
