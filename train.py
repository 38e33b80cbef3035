"""Trains a GPT or a Llama with any combination of data, tensor, sequence, context, expert and
pipeline parallelism and ZeRO.

    python train.py                          one process
    python train.py --tp 2 --pp 2            starts four ranks itself, as does torchrun train.py ...
    torchrun --nproc-per-node 8 train.py --tp 2 --pp 2       eight: the rest is data parallel

Any layout is the same computation: the same initial weights, the same batches, and gradients that
are summed, never averaged, because the loss was first divided by the number of tokens in the whole
batch. So the losses are the same, up to the order of float additions.
"""

# `python train.py --help` lists the flags. The Trainer, first, knows nothing of run/, which has the
# flags, the launch, the log and the checkpoints. train() is the loop around it. main(), last, joins
# the ranks.

import math
import sys

# start() runs before torch is imported, which takes seconds. If a flag is wrong, start() ends the
# process. If the flags ask for more ranks than there are processes, start() starts all ranks, waits
# for them, and exits. Else this process is a rank, and start() returns
if __name__ == "__main__":
    from run.launch import start
    start(__doc__)

import torch

from collectives import all_reduce
from context_parallel import split_sequences
from data.batches import Data
from experts import on_meta, shapes_of, spread_experts
from mesh import Mesh
from model import compile_layers
from optimizer import AdamW, LossScale, learning_rate
from pipeline import Pipeline, tie_ends
from schedules import SCHEDULES, cut, placement
from shard import tag_whole
from sizes import config_of
from tensor_parallel import split_matrices
from zero import REDUCERS


class Trainer:
    """What one rank holds: its slices of the model; its reducer, optimizer and pipeline."""

    def __init__(self, cfg, mesh, config, value):
        """cfg: the flags, as attributes. mesh: the ranks on named axes (mesh.py). config: the sizes
        of the model (sizes.py). value(tag): the initial values of the slice that the tag describes,
        such as from_seed(config, 1337) of model.py."""
        self.cfg = cfg
        self.mesh = mesh
        self.config = config
        self.dtype = getattr(torch, cfg.dtype)
        self.stop_asked = False  # set by a signal to this rank
        self.grads = []  # gradients of the last step (run/log.py counts the bytes held)

        # A list of layers: GPT or Llama, with experts or without (experts.py knows all of them). On
        # the meta device, where parameters have shapes but no memory
        model = on_meta(config)
        # For checkpoints, before anything is split: {name: full shape}, and the names of trained
        # parameters (all, unless a fork freezes some)
        self.shapes = shapes_of(model)
        self.trained_names = [name for name, param in model.canonical_parameters()
                              if param.requires_grad]

        # Tag each parameter: its name, its slice, the groups of ranks to sum its gradient over.
        # The ZeRO group: ranks that hold the same slices and see different tokens. Gradients are
        # summed over it (DDP, too), and ZeRO gives each of its ranks a chunk. It lies along three
        # axes of mesh.py: shard and ep (all data ranks; under --shard R only R of them, and ranks
        # along rep hold the same chunks) and cp. (For experts spread_experts narrows it)
        zero_group = mesh.group("shard", "ep", "cp")
        tag_whole(model, zero_group, rep=mesh.group("rep"))

        # zb-h1 (schedules.py) cuts a backward in two. deferred: the list to which the first half
        # appends what the second needs for the weights' gradients. None: backwards are whole
        deferred = [] if SCHEDULES[cfg.schedule].splits_backward else None

        # Each call adapts the model, in place, to what this rank has: its tokens of each sequence,
        # its slice of each matrix, its experts; the last two also update the tags.
        # self.positions: the places of this rank's tokens in their sequence
        self.positions = split_sequences(model, mesh.group("cp"), cfg.cp_attention)
        # In a tensor group of one this still replaces the head, by one that never holds all logits
        split_matrices(model, mesh.group("tp"), cfg.sp, deferred)
        if cfg.experts:
            spread_experts(model, mesh, cfg.sp)

        # Cut the list of layers into stages, one or two for each pipeline rank. where[s]: the
        # pipeline rank of stage s; cuts[s]: (start, stop) of its layers
        self.where = placement(cfg.schedule, cfg.pp)
        self.cuts = cut(config.layer_costs(), len(self.where))
        # If first and last stage are on two ranks, both hold the tied matrix (if it is tied): tag
        # it, so that its gradient is summed over the two
        if self.where[0] != self.where[-1]:
            tie_ends(model.layers, mesh.ends("pp"))
        for block in model.layers[1:-1]:
            block.recompute = cfg.recompute
        if cfg.compile:
            compile_layers(model)
        stages = {s: list(model.layers[start:stop]) for s, (start, stop) in enumerate(self.cuts)
                  if self.where[s] == mesh.group("pp").rank}  # {stage: its layers} of this rank

        # The reducer, DDP or ZeRO, sums gradients. It lays a layer's parameters side by side for
        # that, so it also gives them their memory and initial values
        self.reducer = REDUCERS[cfg.zero](stages, value, self.dtype, mesh.device, mesh.background)
        # float16's factor of the loss: the pipeline multiplies by it, the optimizer divides
        scale = LossScale(self.dtype, mesh.device)
        self.optimizer = AdamW(cfg, self.reducer, scale)
        # Shape of an activation between two stages, (B, S, C): sequences of a microbatch, tokens of
        # a sequence that this rank has between two blocks, width
        sequences = cfg.batch_size // (cfg.dp * cfg.microbatches)
        tokens = len(self.positions) // (cfg.tp if cfg.sp else 1)
        shape = (sequences, tokens, config.n_embd)
        self.pipeline = Pipeline(stages, mesh.group("pp"), cfg, shape, self.dtype, deferred,
                                 scale.value)

    def own(self, microbatches):
        """This rank's tokens of [(ids, targets)], its microbatches of whole sequences. Targets were
        shifted before the sequence was split, so no token is lost at a cut."""
        return [(ids[:, self.positions], targets[:, self.positions])
                for ids, targets in microbatches]

    def step(self, microbatches, lr):
        """One step of training on [(ids, targets)], this data rank's microbatches. Returns three
        tensors, the same on every rank: the loss per token; the global norm of the gradients; and
        the number of ranks that were asked to stop."""
        self.grads = []  # let go of the step before: under ZeRO-2 and 3 this frees its memory
        # Forward and backward. The pipeline divides each loss by the tokens of the whole batch
        # before backward. own_loss: what this rank adds when the ranks' numbers are summed to the
        # loss per token. Ranks without the last stage add 0. The tp ranks of a tensor group have
        # the same loss, so each adds 1/tp of it
        own_loss = self.pipeline.run(self.own(microbatches), self.reducer) / self.cfg.tp
        # Gradients of what this rank's optimizer steps, summed over the groups that the tags name
        self.grads = self.reducer.gradients()
        # What this rank adds to the norm's square: a gradient that n ranks hold counts 1/n on each
        own_square = self.optimizer.square(self.grads)

        # all_reduce: every rank gets the sums over the world, which is all ranks
        own_asked = torch.full_like(own_loss, self.stop_asked)
        sums = all_reduce(torch.stack([own_loss, own_square, own_asked]), self.mesh.world)
        loss, square, asked = sums
        # If the loss is not finite, make the norm nan, so that the step is skipped
        norm = torch.where(loss.isfinite(), square.sqrt(), math.nan)

        self.optimizer.step(self.grads, norm, lr)  # clips and steps; skips if norm is not finite
        # ZeRO-1, 2: starts to send every rank the weights that others have stepped. ZeRO-3: frees
        # gathered copies of the old ones
        self.reducer.publish()
        return loss, norm, asked

    def validate(self, data, num_batches=None):
        """Returns the loss per token of the windows of val.bin (block_size tokens each), a float,
        the same on every rank. num_batches: how many batches of windows to take; None: all."""
        world = self.mesh.world
        # batches: an iterator, a list of microbatches for each batch
        num_windows, batches = data.validation(self.cfg, self.mesh, num_batches)
        # Without a reducer the pipeline runs the forwards only
        loss = sum(self.pipeline.run(self.own(microbatches)) for microbatches in batches)
        # The loss of each batch was divided by the tokens of batch_size windows: divide the sum by
        # those of num_windows instead, and by tp, because all tensor ranks have the same loss
        loss = loss * self.cfg.batch_size / num_windows / self.cfg.tp
        loss, = world.read(all_reduce(loss.view(1), world))  # waits for the device
        return loss


def make_mesh(cfg, device):
    """The ranks on the axes that the flags name."""
    return Mesh(device, cfg.timeout, native=cfg.collectives == "native", dp=cfg.dp, pp=cfg.pp,
                cp=cfg.cp, tp=cfg.tp, ep=cfg.ep, shard=cfg.shard)


# ---- the loop ----

EVAL_BATCHES = 8  # batches in a validation during the run; the last validation takes all


def is_due(steps, interval):
    return interval > 0 and steps > 0 and steps % interval == 0


def train(cfg, mesh, local_rank):
    """The run of one rank. Returns its Log."""
    from run import checkpoint
    from run.launch import on_stop
    from run.log import Log

    data = Data(cfg, local_rank)
    # The folder of the checkpoint that --resume names or finds, or None. Locks --out against a
    # second run
    resumed_from = checkpoint.lock_and_find(cfg, data, mesh.world)
    config = config_of(cfg, data.vocab_size)
    trainer = Trainer(cfg, mesh, config, checkpoint.initial_values(cfg, config, resumed_from))
    on_stop(trainer)  # a signal sets trainer.stop_asked
    first = checkpoint.load(trainer, resumed_from) if resumed_from else 0
    log = Log(trainer, data, first, resumed_from)

    for step in range(first, cfg.steps):
        if is_due(step, cfg.eval_interval):
            log.note_validation(step, trainer.validate(data, EVAL_BATCHES))
        lr = learning_rate(cfg, step)
        with log.watching(step):  # counts the time that messages take; --watch: prints them
            loss, norm, asked = trainer.step(data.training(cfg, step, mesh), lr)

        done = step + 1
        saves = is_due(done, cfg.save_interval) or done == cfg.steps
        # Reads and prints the numbers, and sets log.stopping (a signal has asked some rank to stop)
        # and log.gave_up (too many norms were not finite). On a GPU one step late, unless at_once:
        # what is saved or validated is known to be good. The numbers are the same on all ranks, so
        # all take the same branches below
        log.note_step(step, lr, loss, norm, asked,
                      at_once=saves or is_due(done, cfg.eval_interval))
        if (saves or log.stopping) and not log.gave_up:
            # save() returns None if weights are not finite; note_checkpoint then sets log.gave_up
            log.note_checkpoint(done, checkpoint.save(trainer, done, data.folder))
        if log.stopping or log.gave_up:
            break

    if cfg.eval_interval and not (log.stopping or log.gave_up):
        log.note_validation(cfg.steps, trainer.validate(data))
    log.end()
    return log


def main():
    from run.flags import read_command_line
    from run.launch import joined, place

    process = place()  # the numbers that the launcher gave this process
    # start() has read the flags, too, before torch was imported; main() may be called without it
    cfg, _ = read_command_line(__doc__, process.num_processes)
    # Meet the other ranks. An error inside ends all ranks: with one line, a bug with a traceback
    with joined(cfg, process.num_processes) as device:
        mesh = make_mesh(cfg, device)
        log = train(cfg, mesh, process.local_rank)
    # A complete run ends with a sample of text (with --eval-interval 0: without). ended_well: the
    # replicas agree, or a signal stopped the run. saved: the last checkpoint's folder
    is_complete = log.ended_well and not log.stopping and log.saved is not None
    if is_complete and cfg.eval_interval and mesh.rank == 0:
        from sample import sample_text
        log.say("a sample:\n" + sample_text(log.saved, log.data))
    sys.exit(0 if log.ended_well else 1)


if __name__ == "__main__":
    main()
