"""Trains a GPT or a Llama by data, pipeline, context, tensor and expert parallelism, composed.

    python train.py                          one process
    torchrun train.py --tp 2 --pp 2          starts four ranks, and waits for them
    torchrun --nproc-per-node 8 train.py --tp 2 --pp 2          eight: the rest is data parallel
    torchrun train.py --tp 2 --pp 2 --fast   the same with the parts of engine/

This page composes the files beside it. Any layout is the same computation: the same initial
weights, the same batches, gradients that are only ever summed, and so the same losses.
`python train.py --help` lists the flags.
"""

import gc
import math
import sys
from types import SimpleNamespace

from run.launch import start

# Wrong flags end the process here. If the flags ask for more ranks than there are, start()
# starts all ranks, waits for them, and exits. Else this process is a rank, and goes on. All this
# before torch is imported, which takes seconds.
if __name__ == "__main__":
    start(__doc__)

import torch

from collectives import all_reduce
from context_parallel import split_sequences
from data.batches import Data
from expert_parallel import spread_experts
from experts import kind_of
from mesh import Mesh
from model import initial_value
from optimizer import AdamW, learning_rate
from pipeline import Pipeline, tie_ends
from recompute import recompute_blocks
from run import checkpoint, signals
from run.config import checked, read_command_line
from run.copies import replicas_agree
from run.log import Log
from run.processes import joined
from run.routing import Routing
from run.weights import initial_slices
from sample import sample_text
from schedules import cut, placement
from sequence_parallel import sequence_parallel
from shard import tag_whole
from sizes import config_of
from tensor_parallel import tensor_parallel
from zero import REDUCERS


def choose(cfg):
    """The parts that train: the root's; where cfg.fast names a part, engine/'s (engine/parts.py
    lists their names)."""
    parts = SimpleNamespace(
        Mesh=Mesh, all_reduce=all_reduce, split_sequences=split_sequences,
        tensor_parallel=tensor_parallel, sequence_parallel=sequence_parallel,
        spread_experts=spread_experts, Reducer=REDUCERS[cfg.zero], Optimizer=AdamW,
        Pipeline=Pipeline, recompute_blocks=recompute_blocks)
    if cfg.fast:
        import engine.parts
        engine.parts.replace(parts, cfg)
    return parts


class Trainer:
    """One rank's part of the model, and of all that trains it."""

    def __init__(self, cfg, mesh, vocab_size, draw=initial_value):
        """draw: makes the initial value of a parameter; another one for a dump or a test."""
        self.cfg = cfg
        self.mesh = mesh
        self.dtype = getattr(torch, cfg.dtype)
        self.parts = parts = choose(cfg)
        self.stop_asked = False  # by a signal to this rank
        self.grads = []  # the gradients of the last step

        # The whole model on the meta device: shapes without memory. Tag each parameter: its name,
        # its slice, the groups of ranks to sum its gradient over
        self.model_config = config_of(cfg, vocab_size)
        with torch.device("meta"):
            model = kind_of(self.model_config)(self.model_config)
        tag_whole(model, mesh.group("shard", "ep", "cp"), copies=mesh.group("rep"))
        self.shapes = {name: param.shape for name, param in model.canonical_parameters()}
        self.trained = [name for name, p in model.canonical_parameters() if p.requires_grad]

        # Which tokens of each sequence, which slice of each matrix, which experts this rank has
        self.positions = parts.split_sequences(model, mesh.group("cp"), cfg.cp_attention)
        split = parts.sequence_parallel if cfg.sp else parts.tensor_parallel
        split(model, mesh.group("tp"))
        if cfg.experts:
            parts.spread_experts(model, mesh, cfg.sp)

        # Which layers. where[s]: the pipeline rank of stage s; cuts[s]: (start, stop) of its layers
        self.where = placement(cfg.schedule, cfg.pp, cfg.chunks)
        self.cuts = cut(self.model_config.layer_costs(), len(self.where))
        if self.where[0] != self.where[-1]:  # embedding and head are on two ranks
            tie_ends(model.layers, mesh.ends("pp"))
        stages = {s: list(model.layers[first:stop]) for s, (first, stop) in enumerate(self.cuts)
                  if self.where[s] == mesh.group("pp").rank}
        self.routing = Routing(stages, self.cuts, cfg, mesh)  # counts the experts' tokens

        # DDP or ZeRO asks for one slice after the other: no rank ever has the whole model
        value = initial_slices(cfg, self.shapes, self.model_config, mesh, draw)
        self.reducer = parts.Reducer(stages, value)
        self.optimizer = parts.Optimizer(cfg, self.reducer)
        if cfg.recompute:
            parts.recompute_blocks(stages)

        sequences = cfg.batch_size // (cfg.dp * cfg.microbatches)  # in a microbatch
        tokens = len(self.positions) // (cfg.tp if cfg.sp else 1)  # of a sequence, between blocks
        self.pipeline = parts.Pipeline(stages, mesh.group("pp"), cfg,
                                       (sequences, tokens, cfg.n_embd), self.dtype)

    def own(self, batches):
        """[(ids, targets, number of the first sequence)], a microbatch each, with this rank's
        tokens only. Targets were shifted before the sequence was split, so no token is lost at a
        cut."""
        return [(ids[:, self.positions], targets[:, self.positions], first)
                for ids, targets, first in batches]

    def step(self, batches, lr):
        """One step of training. Returns (norm, sums), tensors that are the same on every rank:
        norm, the gradients' global norm, nan if the loss is not finite; sums, see below."""
        self.routing.clear()
        self.grads = []  # frees them
        loss = self.pipeline.run(self.own(batches), self.reducer)  # forward and backward
        self.grads = self.reducer.gradients()  # summed as the tags say

        # One all-reduce for four things: the loss, of which each of the T ranks that have it adds
        # 1/T; requests to stop; the square of the gradients' norm; the experts' statistics
        asked = torch.full_like(loss, self.stop_asked)
        parts = torch.stack([loss / self.cfg.tp, asked, self.optimizer.square(self.grads)])
        sums = torch.cat([parts, self.routing.sums()])
        self.parts.all_reduce(sums, self.mesh.world)
        norm = torch.where(sums[0].isfinite(), sums[2].sqrt(), math.nan)

        self.optimizer.step(self.grads, norm, lr)  # clips, steps; nothing if the norm is not finite
        self.reducer.publish()  # ZeRO-1, 2: every rank gets the weights that others have stepped
        return norm, sums

    def validate(self, data, log, batches=None):
        """Mean loss, the same on every rank, over the windows (block_size tokens each) of val.bin:
        over all, or over the first `batches` batches. None if a signal to any rank came meanwhile.
        """
        windows, each_batch = data.validation(self.cfg, self.mesh, batches)
        sums = torch.zeros(2, dtype=torch.double, device=self.mesh.device)  # loss, requests to stop
        for i, microbatches in enumerate(each_batch):
            sums[0] += self.pipeline.run(self.own(microbatches))
            log.validating(i + 1, -(-windows // self.cfg.batch_size))
            sums[1] = self.stop_asked
            asked = self.parts.all_reduce(sums[1:].clone(), self.mesh.world)
            if self.mesh.world.read(asked) != [0]:
                return None
        # Each batch's loss was divided by the tokens of a batch: divide by those of all windows
        # instead, and by T, because all T ranks have the same loss
        sums *= self.cfg.batch_size / windows / self.cfg.tp
        return self.mesh.world.read(self.parts.all_reduce(sums, self.mesh.world))[0]

    def ask_to_stop(self):
        self.stop_asked = True


def is_due(step, interval):
    return interval > 0 and step > 0 and step % interval == 0


def train(cfg, data, mesh):
    """The run of one rank. Returns its Log."""
    trainer = Trainer(cfg, mesh, data.vocab_size)
    signals.save_on_stop(trainer.ask_to_stop)
    # checkpoint.agree() has set cfg.resume to a folder, or to "no"
    first = 0 if cfg.resume == "no" else checkpoint.load(trainer, cfg.resume)
    log = Log(trainer, data, first)
    batches = data.ahead(cfg, mesh, first)  # a thread reads the batch of the next step
    # The objects made so far live until the end: Python's gc need not scan them again and again
    gc.collect()
    gc.freeze()

    for step in range(first, cfg.steps):
        if is_due(step, cfg.eval_interval):
            log.catch_up()
            log.validation(step, trainer.validate(data, log, cfg.eval_batches))
        lr = learning_rate(cfg, step)
        with log.watching(step):
            norm, sums = trainer.step(batches(step), lr)
        log.step(step, lr, norm, sums)
        if log.is_over:  # a signal, or too many steps that were not finite
            break
        if is_due(step + 1, cfg.save_interval) and step + 1 < cfg.steps:
            log.checkpoint(checkpoint.save(trainer, step + 1, data.folder))

    log.catch_up()
    if not log.gave_up and (log.done > first or not log.saved):
        log.checkpoint(checkpoint.save(trainer, log.done, data.folder))
    if cfg.eval_interval and not log.is_over:
        log.validation(cfg.steps, trainer.validate(data, log), last=True)
    log.end(log.is_over or replicas_agree(trainer))
    return log


def main():
    cfg, world, _ = read_command_line(__doc__)
    data = checked(cfg, world, Data)
    with joined(cfg, world) as device:  # an error inside ends all ranks, with one line
        mesh = choose(cfg).Mesh(device, cfg.timeout, dp=cfg.dp, pp=cfg.pp, cp=cfg.cp, tp=cfg.tp,
                                ep=cfg.ep, shard=cfg.shard)
        if cfg.dump:
            from run.doctor.record import write_dump
            return write_dump(cfg, mesh, data, Trainer)
        checkpoint.agree(cfg, data, mesh.world)  # same flags, data and code? Resolves --resume
        log = train(cfg, data, mesh)
    if log.ended_well and cfg.eval_interval and mesh.rank == 0:
        with signals.skip_on_stop():
            log.say("a sample:\n" + sample_text(log.saved, data))
    log.say(log.ending)
    sys.exit(not log.ended_well)


if __name__ == "__main__":
    main()
