"""Trains a GPT or a Llama with any combination of data, tensor, sequence, context, expert and
pipeline parallelism and ZeRO.

    python train.py                          one process
    python train.py --tp 2 --pp 2            starts four ranks itself, as does torchrun train.py ...
    torchrun --nproc-per-node 8 train.py --tp 2 --pp 2       eight: the rest is data parallel

Any layout is the same computation: the same initial weights, the same batches, and gradients that
are summed, never averaged, because the loss was divided by the tokens of the whole batch first. So
the losses are the same, up to the order of float additions.
"""

# This page composes the other files; `python train.py --help` lists the flags.

import gc
import math
import sys

if getattr(sys.flags, "safe_path", False):  # under PYTHONSAFEPATH Python leaves this folder out
    sys.path.insert(0, __file__.rpartition("/")[0] or ".")

from run.launch import start

# start() runs before torch is imported, which takes seconds. It ends the process if a flag is wrong
# (checked() below refuses what this machine lacks). If the flags ask for more ranks than there are
# processes, start() starts all ranks, waits for them, and exits. Else this process is a rank, and
# start() returns. __doc__: the text of --help
if __name__ == "__main__":
    start(__doc__)

import torch

from collectives import all_reduce
from context_parallel import split_sequences
from data.batches import Data
from experts import MixtureOfExperts, kind_of, spread_experts
from mesh import Mesh
from model import Attention, Block, initial_value
from optimizer import AdamW, LossScale, learning_rate
from pipeline import Pipeline, tie_ends
from run import checkpoint, signals
from run.config import checked, read_command_line
from run.copies import replicas_agree
from run.log import Log
from run.processes import joined
from run.routing import Routing
from run.tensorfile import about
from run.weights import values
from sample import sample_text
from schedules import cut, placement, splits_backward
from shard import tag_whole
from sizes import config_of
from tensor_parallel import Column, Row, VocabularyEmbedding, VocabularyHead, split_matrices
from zero import REDUCERS


def make_mesh(cfg, device):
    """The ranks on the axes that the flags name."""
    return Mesh(device, cfg.timeout, cfg.collectives == "native", cfg.transport, dp=cfg.dp,
                pp=cfg.pp, cp=cfg.cp, tp=cfg.tp, ep=cfg.ep, shard=cfg.shard)


def compile_layers(layers):
    """torch.compile each layer (--compile). What sends messages, and what makes tensors whose sizes
    depend on the data, stays Python."""
    for layer in layers:
        for module in layer.modules():
            names = []
            if isinstance(module, (Column, Row, VocabularyEmbedding, VocabularyHead)):
                names = ["forward"]
            elif isinstance(module, MixtureOfExperts):
                names = ["run_experts", "sum_counts"]
            elif isinstance(module, Attention) and "attend" in vars(module):
                names = ["attend"]  # replaced in split_sequences
            for name in names:
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
        if isinstance(layer, Block):
            layer.compute = torch.compile(layer.compute)
        elif not isinstance(layer, VocabularyHead):
            layer.forward = torch.compile(layer.forward)


def initial_slices(cfg, shapes, config, draw):
    """A function value(tag): the slice with which this rank begins, of the run's dtype, on the CPU.
    The values are those of --init-from, or draw(name, shape, config, seed); zeros if a checkpoint
    is going to replace them."""
    if cfg.resume == "no" and cfg.init_from:
        full = values(cfg.init_from, shapes, config)
    elif cfg.resume == "no":
        def full(name):
            return draw(name, shapes[name], config, cfg.seed)
    else:
        def full(name):
            return torch.zeros(()).expand(shapes[name])

    def value(tag):
        # a copy: a view of the slice would keep the full tensor in memory
        return tag.slice(full(tag.name)).to(getattr(torch, cfg.dtype), copy=True,
                                            memory_format=torch.contiguous_format)

    return value


class Trainer:
    """What one rank holds: its slices of the model; its reducer, optimizer and pipeline."""

    def __init__(self, cfg, mesh, vocab_size, draw=initial_value):
        """draw: makes the initial value of a parameter; another one for a test."""
        self.cfg = cfg
        self.mesh = mesh
        self.dtype = getattr(torch, cfg.dtype)
        self.stop_asked = False  # by a signal to this rank
        self.grads = []  # gradients of the last step; kept for the log, which counts their bytes

        # The whole model on the meta device: shapes without memory
        self.model_config = config_of(cfg, vocab_size)
        kind = kind_of(self.model_config)  # GPT, Llama, or one of them with experts
        with torch.device("meta"):
            model = kind(self.model_config)
        # Taken before parameters are split. (Only a fork has parameters that are not trained)
        self.shapes = {name: param.shape for name, param in model.canonical_parameters()}
        self.trained = [name for name, param in model.canonical_parameters() if param.requires_grad]

        # Tag each parameter: its name, its slice, the groups of ranks to sum its gradient over.
        # Replicas hold the same weights, but see different sequences (the axes shard and ep of
        # mesh.py) or different tokens of a sequence (cp). rep: more data ranks, if ZeRO shards over
        # some of them only (--shard)
        replicas = mesh.group("shard", "ep", "cp")
        tag_whole(model, replicas, rep=mesh.group("rep"))

        # Each call changes the model in place: to this rank's tokens of each sequence, to its slice
        # of each matrix, to its experts; and updates the tags of what it splits. In a group of one
        # rank nothing is split. self.positions: where this rank's tokens stand in their sequence
        self.positions = split_sequences(model, mesh.group("cp"), cfg.cp_attention)
        # Where a zero-bubble schedule leaves the gradients of matrices that are to come later
        deferred = [] if splits_backward(cfg.schedule) else None
        split_matrices(model, mesh.group("tp"), cfg.sp, deferred)
        if cfg.experts:
            spread_experts(model, mesh, cfg.sp)

        # Cut the list of layers into stages, cfg.chunks for each pipeline rank. where[s]: the
        # pipeline rank of stage s; cuts[s]: (begin, stop) of its layers
        self.where = placement(cfg.schedule, cfg.pp, cfg.chunks)
        self.cuts = cut(self.model_config.layer_costs(), len(self.where))
        # Are first and last stage on two ranks? (Not with --pp 1)
        if self.where[0] != self.where[-1]:
            # Both ranks hold the tied matrix: tag it, so that its gradient is summed over the two
            tie_ends(model.layers, mesh.ends("pp"))
        stages = {}  # {stage: its layers} of this rank
        for s, (begin, stop) in enumerate(self.cuts):
            if self.where[s] == mesh.group("pp").rank:
                stages[s] = list(model.layers[begin:stop])
        # Sets the weight of the experts' balance loss, and counts their tokens for the log
        self.routing = Routing(stages, self.cuts, cfg, mesh)

        for layers in stages.values():
            for layer in layers:
                if isinstance(layer, Block):
                    layer.recompute = cfg.recompute
            if cfg.compile:
                compile_layers(layers)

        # The reducer, DDP or ZeRO, gets each parameter's initial value from value(tag), which makes
        # this rank's slice. What is wrong with --init-from ends all ranks with one line
        with checkpoint.together(mesh.world), about(cfg.init_from):
            value = initial_slices(cfg, self.shapes, self.model_config, draw)
            self.reducer = REDUCERS[cfg.zero](stages, value, self.dtype, mesh.device,
                                              mesh.background)
        scale = LossScale(self.dtype, mesh.device)
        self.optimizer = AdamW(cfg, self.reducer, scale)
        # Shape of an activation between two stages, (B, S, C): sequences of a microbatch, tokens of
        # a sequence that this rank has between two blocks, width
        sequences = cfg.batch_size // (cfg.dp * cfg.microbatches)
        tokens = len(self.positions) // (cfg.tp if cfg.sp else 1)
        shape = (sequences, tokens, cfg.n_embd)
        self.pipeline = Pipeline(stages, mesh.group("pp"), cfg, shape, self.dtype, deferred,
                                 scale.value)

    def own(self, batches):
        """[(ids, targets)], a microbatch each, with this rank's tokens only. Targets were shifted
        before the sequence was split, so no token is lost at a cut."""
        return [(ids[:, self.positions], targets[:, self.positions]) for ids, targets in batches]

    def step(self, batches, lr):
        """One step of training. Returns (norm, sums), tensors, the same on every rank. norm: the
        global norm of the gradients; nan if the loss is not finite. sums: loss per token, number of
        ranks that were asked to stop, square of the norm, then the experts' statistics."""
        self.routing.clear()
        self.grads = []  # free those of the step before
        # Forward and backward. loss: this rank's part of the loss per token; 0 unless it has the
        # last stage
        loss = self.pipeline.run(self.own(batches), self.reducer)
        self.grads = self.reducer.gradients()  # summed as the tags say

        # All sums over all ranks in one all-reduce, in place. T tensor ranks compute the same loss:
        # each adds 1/T
        asked = torch.full_like(loss, self.stop_asked)
        square = self.optimizer.square(self.grads)  # this rank's part of the norm's square
        sums = torch.cat([torch.stack([loss / self.cfg.tp, asked, square]), self.routing.sums()])
        all_reduce(sums, self.mesh.world)
        loss, _, square = sums[:3]  # now of all ranks
        norm = torch.where(loss.isfinite(), square.sqrt(), math.nan)

        self.optimizer.step(self.grads, norm, lr)  # clips, steps; nothing if the norm is not finite
        self.reducer.publish()  # ZeRO-1, 2: every rank gets the weights that others have stepped
        return norm, sums

    def validate(self, data, log, num_batches=None):
        """Returns the mean loss over the windows (block_size tokens each) of val.bin, the same on
        every rank; None if a signal to any rank came meanwhile. num_batches: validate only so many
        batches of windows; None: all windows."""
        world = self.mesh.world
        # windows: their number; each_batch: an iterator over batches, lists of microbatches
        windows, each_batch = data.validation(self.cfg, self.mesh, num_batches)
        total = math.ceil(windows / self.cfg.batch_size)  # batches
        loss = torch.zeros(1, dtype=torch.double, device=self.mesh.device)
        for i, microbatches in enumerate(each_batch):
            loss += self.pipeline.run(self.own(microbatches))
            log.validating(i + 1, total)
            # All ranks leave the loop together: a rank that went on alone would wait forever
            asked = torch.full_like(loss, self.stop_asked)
            (num_asked,) = world.read(all_reduce(asked, world))
            if num_asked > 0:
                return None
        # Each batch's loss was divided by the tokens of a batch: divide by those of all windows
        # instead, and by T, because all T ranks have the same loss
        loss *= self.cfg.batch_size / windows / self.cfg.tp
        return world.read(all_reduce(loss, world))[0]

    def ask_to_stop(self):
        self.stop_asked = True


def is_due(step, interval):
    return interval > 0 and step > 0 and step % interval == 0


def train(cfg, data, mesh):
    """The run of one rank. Returns its Log."""
    trainer = Trainer(cfg, mesh, data.vocab_size)
    signals.save_on_stop(trainer.ask_to_stop)
    # main() has called checkpoint.agree(): cfg.resume is a folder or "no"
    first = 0 if cfg.resume == "no" else checkpoint.load(trainer, cfg.resume)
    log = Log(trainer, data, first)
    # The objects made so far live until the end: Python's gc need not scan them again and again
    gc.collect()
    gc.freeze()

    for step in range(first, cfg.steps):
        if is_due(step, cfg.eval_interval):
            log.catch_up()  # a GPU's steps are printed one step late: print the last one first
            # validate() returns None after a signal. The next step's all-reduce counts the request,
            # and the loop ends once the log has read that count
            log.validation(step, trainer.validate(data, log, cfg.eval_batches))
        lr = learning_rate(cfg, step)
        with log.watching(step):  # --watch records the first step
            norm, sums = trainer.step(data.training(cfg, step, mesh), lr)
        log.step(step, lr, norm, sums)
        # is_over: after a signal, or after too many steps that were not finite. The log knows this
        # from norm and sums, the same on all ranks, so all ranks leave the loop at the same step
        if log.is_over:
            break
        if is_due(step + 1, cfg.save_interval) and step + 1 < cfg.steps:
            log.checkpoint(checkpoint.save(trainer, step + 1, data.folder))

    log.catch_up()
    nothing_new = log.done == first and log.saved  # --resume found a complete run
    if not log.gave_up and not nothing_new:
        log.checkpoint(checkpoint.save(trainer, log.done, data.folder))
    if cfg.eval_interval and not log.is_over:
        log.validation(cfg.steps, trainer.validate(data, log), last=True)
    if log.is_over:  # perhaps only now: a signal may have come during that validation
        log.end_early()
    else:
        log.end(replicas_agree(trainer))
    return log


def main():
    cfg, world, _ = read_command_line(__doc__)  # as start() did. world: number of processes
    data = checked(cfg, world, Data)  # the flags that depend on this machine; then the data
    with joined(cfg, world) as device:  # an error inside ends all ranks, with one line
        mesh = make_mesh(cfg, device)
        checkpoint.agree(cfg, data, mesh.world)  # same flags, data and code? Resolves --resume
        log = train(cfg, data, mesh)
    # A complete run ends with a sample of text (with --eval-interval 0: without)
    if log.ending and log.ended_well and cfg.eval_interval and mesh.rank == 0:
        with signals.skip_on_stop():
            log.say("a sample:\n" + sample_text(log.saved, data))
    log.say(log.ending)
    sys.exit(0 if log.ended_well else 1)


if __name__ == "__main__":
    main()
