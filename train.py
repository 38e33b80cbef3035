"""Trains a GPT or a Llama by data, pipeline, context, tensor and expert parallelism, composed.

    python train.py                          one process
    torchrun train.py --tp 2 --pp 2          starts four ranks, and waits for them
    torchrun --nproc-per-node 8 train.py --tp 2 --pp 2          eight: the rest is data parallel
    torchrun train.py --tp 2 --plain         the root's plain files train (plain.py), not engine/

Any layout is the same computation: the same initial weights, the same batches, gradients that are
only ever summed, and so the same losses. `python train.py --help` lists the flags.
"""

import gc
import math
import sys
import time
from collections import deque
from contextlib import nullcontext
from functools import partial

from run.launch import start

# Wrong flags end the process here. If the flags ask for more ranks than there are, start()
# starts all ranks, waits for them, and exits. Else this process is a rank, and goes on. All this
# before torch is imported, which takes seconds.
if __name__ == "__main__":
    start(__doc__)

import torch
from torch.utils.checkpoint import checkpoint as recompute

import mesh as mesh_file
from collectives import own_chunk
from data.batches import Data, DataError
from engine.collectives import all_reduce, barrier
from engine.compiled import compile_layer
from engine.context_parallel import split_sequences
from engine.dropout import Dropout
from engine.expert_parallel import spread_experts
from engine.layerwise import OPTIMIZERS
from engine.mesh import Mesh
from engine.pipeline import Deferred, Pipeline, Stage
from engine.tensor_parallel import parallelize
from engine.vocabulary_parallel import pad_vocabulary
from engine.zero import REDUCERS
from experts import kind_of
from group import CommunicationError, Group
from model import Block, initial_value
from optimizer import clip_coefficient, learning_rate
from pipeline import tie_ends
from plain import training_steps
from planner.hardware import peak_flops
from run import checkpoint, signals
from run.ahead import compute_ahead, threads_per_rank
from run.config import as_text, check, fail, read_command_line
from run.copies import Copies
from run.doctor.record import random_value, write_plain, write_run
from run.log import Log
from run.processes import choose_device, give_up, init, out_of_memory, shutdown
from run.routing import Routing
from run.timeline import Tracer, report
from run.weights import read_weights
from sample import sample_text
from schedules import cut, lower, make_schedule, placement, splits_backward, validate
from shard import tag_whole
from sizes import config_of

# The run gives up after so many steps in a row whose loss or norm is not finite (float16: counted
# only once the loss scale is down to 1)
MAX_SKIPPED = 5


class Trainer:
    """One rank's part of the model, of the optimizer and of the step."""

    def __init__(self, cfg, mesh, vocab_size):
        self.cfg = cfg
        self.mesh = mesh
        self.dtype = getattr(torch, cfg.dtype)
        model = self.whole_model(vocab_size)

        # 1. context and tensor parallel: which tokens, which slices of the matrices; 2. experts
        self.positions = split_sequences(model, mesh.group("cp"), cfg.cp_attention)
        deferred = Deferred()
        defer = deferred.add if splits_backward(cfg.schedule) else None
        parallelize(model, mesh.group("tp"), sp=cfg.sp, defer=defer)
        pad_vocabulary(model, cfg.pad_vocab or 1)
        if cfg.experts:
            spread_experts(model, mesh, cfg.sp)
        own_positions = self.positions  # positions of the tokens that this rank has between blocks
        if cfg.sp:
            own_positions = own_chunk(self.positions, mesh.group("tp"))
        dropout = Dropout(cfg.dropout, cfg.seed)
        dropout.attach(model, own_positions)

        # 3. pipeline: which layers, and which actions in which order
        # where[s]: the pipeline rank of stage s; lists: the actions of all ranks, without messages
        self.lists, self.where, self.actions, self.forwards = self.plan_actions()
        if self.where[0] != self.where[-1]:  # embedding and head are on two ranks
            tie_ends(model.layers, mesh.ends("pp"))
        self.cuts = cut(self.model_config.layer_costs(), len(self.where))
        layers = {s: model.layers[first:stop] for s, (first, stop) in enumerate(self.cuts)
                  if self.where[s] == mesh.group("pp").rank}
        self.stages = {s: Stage(part) for s, part in layers.items()}
        self.routing = Routing(layers, self.cuts, cfg, mesh)

        # 4. DDP or ZeRO: which part of weights, gradients and optimizer states. Allocates them
        grad_dtype = self.dtype if cfg.grad_dtype == "same" else torch.float
        self.reducer = REDUCERS[cfg.zero](layers, self.dtype, mesh.device, self.initial_values,
                                          int(cfg.bucket_mb * 2**20), grad_dtype)
        # The ranks that together hold every gradient: one replica (with --ep the E replicas that
        # share the experts) or, under ZeRO, all ranks
        norm_group = mesh.one_replica() if cfg.zero == 0 else mesh.in_step()
        self.optimizer = OPTIMIZERS[cfg.optimizer](self.reducer, norm_group, cfg, self.shapes)

        for layer in (layer for part in layers.values() for layer in part):
            if cfg.compile:
                compile_layer(layer)
            if cfg.recompute and isinstance(layer, Block):
                # ZeRO-3's hooks stay outside: recomputing does not gather the weights once more
                # (no state of torch's generators is kept: dropout draws from its own)
                layer.forward = partial(recompute, layer.forward, use_reentrant=False,
                                        preserve_rng_state=False, context_fn=dropout.again)
        shape = (cfg.batch_size // (cfg.dp * cfg.microbatches), len(own_positions), cfg.n_embd)
        self.pipeline = Pipeline(self.stages, self.where, mesh.group("pp"), shape, self.dtype,
                                 self.reducer, deferred, dropout)
        self.tokens = cfg.batch_size * cfg.block_size  # tokens of a step, on all ranks
        # On the device: the loss's factor, and steps in a row with finite gradients
        self.scale = torch.tensor(2.0**16 if cfg.dtype == "float16" else 1.0, device=mesh.device)
        self.good_steps = torch.zeros((), dtype=torch.long, device=mesh.device)
        self.stop_asked = False  # by a signal to this rank
        self.stopping = False  # by a signal to any rank; set when a step is read

    def whole_model(self, vocab_size):
        """The model on the meta device: shapes without memory. Its parameters are tagged."""
        self.model_config = config_of(self.cfg, vocab_size)
        with torch.device("meta"):
            model = kind_of(self.model_config)(self.model_config)
        tag_whole(model, data=self.mesh.replicas())
        self.shapes = {name: p.shape for name, p in model.canonical_parameters()}
        self.trained = [name for name, p in model.canonical_parameters() if p.requires_grad]
        self.n_params = sum(shape.numel() for shape in self.shapes.values())
        return model

    def plan_actions(self):
        """Returns (lists, where, this rank's actions in training, those in validation: forwards
        only). This rank's actions include the messages."""
        cfg = self.cfg
        rank = self.mesh.group("pp").rank
        lists = make_schedule(cfg.schedule, cfg.pp, cfg.microbatches, cfg.chunks)
        where = placement(cfg.schedule, cfg.pp, cfg.chunks)
        validate(lists, where)
        forwards = [[a for a in actions if a.kind == "F"] for actions in lists]
        return lists, where, lower(lists, where)[rank], lower(forwards, where)[rank]

    def initial_values(self, tags):
        """Yields the values of these tags' slices: random, or from --init-from; zeros if a
        checkpoint is going to replace them."""
        cfg, shapes, config = self.cfg, self.shapes, self.model_config
        # --dump adds noise to biases and gains: with biases of 0 no dump shows a bug that adds a
        # bias T times
        draw = random_value if cfg.dump else initial_value
        given = None  # a function from a name to the full tensor
        if cfg.init_from and cfg.resume == "no":
            with checkpoint.together(self.mesh.world):  # an error on one rank ends all
                given = read_weights(cfg.init_from, shapes, config)

        def value(tag):
            if cfg.resume != "no":
                return tag.slice(torch.zeros(()).expand(tag.shape))
            if given:
                return tag.slice(given(tag.name))
            return tag.slice(draw(tag.name, tag.shape, config, cfg.seed))

        return compute_ahead(value, tags, threads_per_rank())

    def own(self, batches):
        """[(ids, targets, first)], a microbatch each, with this rank's tokens only. first: number
        of the microbatch's first sequence, counted from the start of the run, for dropout. Targets
        were shifted before the sequence was split, so no token is lost at a cut."""
        return [(ids[:, self.positions], targets[:, self.positions], first)
                for ids, targets, first in batches]

    def gradients(self, batches):
        """Forward and backward of all microbatches, and the sum of the gradients over the ranks.
        Returns (norm, read). norm: the global gradient norm, a tensor on the device, the same on
        every rank; nan if the loss is not finite. read() waits for the step, and returns loss, norm
        and loss scale as numbers. After: reducer.grad_pieces has the gradients, summed as the tags
        say."""
        # forward and backward; the reducer sums gradients while backward goes on
        self.reducer.zero_grad()
        loss = self.run_microbatches(self.actions, batches, self.scale)
        self.reducer.finish()

        # one all-reduce for three things: the loss, of which each of the T ranks that have it adds
        # 1/T; requests to stop; the experts' statistics
        asked = torch.full_like(loss, self.stop_asked)
        sums = torch.cat([torch.stack([loss / self.mesh.sizes["tp"], asked]),
                          self.routing.sums.flatten()])
        all_reduce(sums, self.mesh.world)

        square = all_reduce(self.optimizer.grad_square(), self.optimizer.norm_group)
        norm = torch.where(sums[0].isfinite(), square.sqrt() / self.scale, math.nan)
        numbers = torch.cat([torch.stack([norm, self.scale]), sums])
        return norm, partial(self.finish_read, self.mesh.world.start_read(numbers))

    def finish_read(self, read):
        """The one place in a step where the host waits for the device (with --experts each layer
        waits once, too)."""
        norm, scale, loss, asked, *statistics = read()
        self.stopping = bool(asked)
        self.routing.read(statistics, self.tokens)
        return loss, norm, scale

    def run_microbatches(self, actions, batches, scale=1.0):
        """This rank's part of the mean loss, without the experts' balance loss."""
        self.routing.sums.zero_()  # forward hooks of the blocks add to them (run/routing.py)
        loss = self.pipeline.execute(actions, self.own(batches), self.tokens, scale)
        return loss - self.routing.part_of_loss() / self.tokens

    def update(self, norm, lr):
        """Clip and step; skip it if the norm is not finite. All ranks have the same norm."""
        finite = norm.isfinite()
        with self.mesh.span("optimizer"):
            coefficient = clip_coefficient(norm, self.cfg.grad_clip)
            self.optimizer.step(lr, coefficient / self.scale, finite)
        if self.cfg.dtype == "float16":  # dynamic loss scaling
            self.good_steps = (self.good_steps + 1) * finite
            grow = torch.where(self.good_steps % 1000 == 0, 2.0, 1.0)
            factor = torch.where(finite, grow, 0.5)
            self.scale = (self.scale * factor).clamp(min=1.0)

    def validation_loss(self, data, batches=None, show=lambda done, batches: None):
        """Mean loss, the same on every rank, over the windows (block_size tokens each) of val.bin:
        over all, or over the first `batches` batches. Calls show(batches done, number of all).
        None if a signal to any rank came meanwhile."""
        windows, each_batch = data.validation(self.cfg, self.mesh, batches)
        loss = torch.zeros(1, dtype=torch.double, device=self.mesh.device)
        for i, microbatches in enumerate(each_batch):
            loss += self.run_microbatches(self.forwards, microbatches)
            show(i + 1, -(-windows // self.cfg.batch_size))
            asked = torch.full_like(loss, self.stop_asked)
            if self.mesh.world.read(all_reduce(asked, self.mesh.world)) != [0]:
                return None
        # run_microbatches() divided by the tokens of a batch: divide by those of all windows
        # instead, and by T, because all T ranks have the same loss
        loss *= self.cfg.batch_size / windows / self.mesh.sizes["tp"]
        return self.mesh.world.read(all_reduce(loss, self.mesh.world))[0]

    def whole_weights(self):
        """Collective under ZeRO. Yields (tag, a copy on the CPU of this rank's slice) of each
        weight, as forward uses it."""
        seen = set()  # two layers may share a weight
        for layer in (layer for stage in self.stages.values() for layer in stage.layers):
            self.reducer.gather_weights([layer])
            for param in layer.parameters():
                if param not in seen:
                    seen.add(param)
                    # A copy: callers make a numpy array of it, and torch cannot resize a storage
                    # that numpy shares; but ZeRO-3 resizes this one, to free the weights
                    yield param.shard, param.detach().cpu().clone()
        self.reducer.release_weights()

    def replicas_agree(self):
        """Does every weight that several ranks hold have the same bits on all of them?"""
        copies = Copies()
        for shard, weight in self.whole_weights():
            copies.add(shard, weight)
        return not copies.differing([*self.shapes], self.mesh.world)

    def ask_to_stop(self):
        self.stop_asked = True


def steps_read_late(mesh):
    """How many steps may stay unread once a step is posted. On a GPU one, so that the host posts
    the next step while the device still computes this one."""
    return int(mesh.device.type == "cuda")


def make_watch(mesh):
    """Returns a Watch. The import is here, so a run without --watch never loads run/watch.py."""
    from run.watch import Watch
    return Watch(mesh)


def train(cfg, data, mesh):
    """The run of one rank. Returns (did it end well?, its Log)."""
    trainer = Trainer(cfg, mesh, data.vocab_size)
    signals.save_on_stop(trainer.ask_to_stop)
    for group in mesh.groups.values():  # NCCL connects a group's ranks at the first use: now
        barrier(group)
    # The last good checkpoint. checkpoint.agree() has set cfg.resume to a folder, or to "no"
    saved = None if cfg.resume == "no" else cfg.resume
    start = checkpoint.load(trainer, saved) if saved else 0
    # FLOP/s of all GPUs, for the log's MFU; known for 16 bits only. 0: the log leaves MFU out
    sixteen = mesh.device.type == "cuda" and trainer.dtype.itemsize == 2
    flops = peak_flops(torch.cuda.get_device_name()) * mesh.world.size if sixteen else 0.0
    log = Log(trainer, data, start, flops)
    if saved:
        log.resumed(start, saved)

    def save(step):
        """Returns the folder; None, and nothing is saved, if weights or moments are not finite."""
        nonlocal saved
        folder = checkpoint.save(trainer, step, data.folder)
        saved = folder or saved
        log.checkpoint(step, folder)
        return folder

    unread = deque()  # (step, learning rate, read) of steps whose losses are not read
    skipped = 0  # steps in a row that were not finite

    def catch_up(late=0):
        """Read and log all steps but the last `late`."""
        nonlocal skipped
        while len(unread) > late:
            step, lr, read = unread.popleft()
            loss, norm, scale = read()
            skipped = 0 if math.isfinite(norm) or scale > 1 else skipped + 1
            log.step(step, loss, norm, scale, lr)

    tracer = Tracer(mesh) if cfg.trace else None
    batches_of = data.ahead(cfg, mesh, start)  # a thread reads the batch of the next step
    done = start  # steps
    log.clock()
    for step in range(start, cfg.steps):
        if cfg.eval_interval and step and step % cfg.eval_interval == 0:
            catch_up()
            loss = trainer.validation_loss(data, cfg.eval_batches, log.validating)
            # None: a signal came. The run stops when the next step is read (on a GPU a step later)
            if loss is not None:
                log.validation(step, loss)
        batches = batches_of(step)
        lr = learning_rate(cfg, step)
        traced = tracer and 2 <= step - start < 5  # three steps, after two to warm up
        watch = make_watch(mesh) if cfg.watch and step == start else None
        with (tracer.at(step) if traced else nullcontext(),
              watch.step() if watch else nullcontext()):
            norm, read = trainer.gradients(batches)  # forward, backward, sum over the ranks
            trainer.update(norm, lr)  # clip, step, send the new weights
        if watch:
            log.say(watch.story(cfg.watch))
        unread.append((step, lr, read))
        done = step + 1
        if done == start + 2:
            # The objects made so far live until the end: freeze them, so that Python's gc never
            # scans them again
            gc.collect()
            gc.freeze()
        saving = cfg.save_interval and done % cfg.save_interval == 0 and done < cfg.steps
        catch_up(0 if saving or done == cfg.steps else steps_read_late(mesh))
        if skipped >= MAX_SKIPPED:
            log.not_finite(skipped, step - len(unread), saved)
            return False, log
        if trainer.stopping:
            break
        if saving:
            save(done)
    catch_up()

    if done == start and saved:  # no step was run: the loaded checkpoint is the last one
        healthy = True
    else:
        healthy = bool(save(done)) and not skipped
    if not healthy:
        log.not_finite(skipped, done - 1, saved)
    if tracer and tracer.events and not trainer.stopping:
        log.say(report(cfg.trace, tracer, mesh, trainer.lists, trainer.where))
    if cfg.eval_interval and not trainer.stopping:
        loss = trainer.validation_loss(data, show=log.validating)
        if loss is None:
            trainer.stopping = True
        else:
            log.validation(cfg.steps, loss, last=True)
    if trainer.stopping:
        log.say(f"stopped by a signal; --resume auto goes on from {saved or 'the start'}")
        return saved is not None, log
    agree = trainer.replicas_agree()
    log.end(saved, agree)
    return agree and healthy, log


def train_plain(cfg, data):
    """--plain: the page of plain.py trains, under this program's flags and data."""
    signals.end_on_stop("in --plain, which saves nothing")
    mesh = mesh_file.Mesh(Group, timeout=cfg.timeout, dp=cfg.dp, pp=cfg.pp, tp=cfg.tp)
    say = print if mesh.rank == 0 else lambda *args, **more: None
    if mesh.world.size > 1:
        say(mesh_file.grid(mesh.sizes))
    if cfg.verbose:
        say(as_text(cfg))
    say("--plain: the files of the root train; no validation, no checkpoint", flush=True)
    since = time.perf_counter()
    steps = training_steps(cfg, mesh, data)
    if cfg.watch:
        from run.watch import watch_first
        steps = watch_first(steps, mesh, cfg.watch)
    for step, (loss, norm) in enumerate(steps):
        seconds = time.perf_counter() - since
        since += seconds
        if step < 10 or step % cfg.log_interval == 0 or step == cfg.steps - 1:
            tokens = cfg.batch_size * cfg.block_size
            say(f"step {step:6d}  loss {loss:.4f}  norm {norm:.3f}  "
                f"lr {learning_rate(cfg, step):.2e}  {1e3 * seconds:.0f} ms  "
                f"{tokens / seconds:,.0f} tokens/s", flush=True)


def dump_two_steps(cfg, data, mesh):
    """--dump: two steps, by this page or by that of plain.py, for python -m run.doctor."""
    signals.end_on_stop("in --dump, which is not complete")
    if cfg.plain:
        write_plain(cfg, mesh, data, training_steps)
    else:
        write_run(Trainer(cfg, mesh, data.vocab_size), data)
    if mesh.rank == 0:
        print(f"dump of two steps in {cfg.dump}", flush=True)


def main():
    cfg, world, _ = read_command_line(__doc__)
    try:
        check(cfg, world)
        data = Data(cfg, signals.local_rank())
    except (ValueError, OSError) as error:
        fail(error)
    device = choose_device(cfg.device)
    try:
        if world > 1:
            init(device, cfg.timeout)
        if cfg.plain and not cfg.dump:
            train_plain(cfg, data)
            return shutdown()
        mesh = Mesh(device, cfg.collectives == "native", cfg.timeout,
                    dp=cfg.dp // cfg.ep, ep=cfg.ep, pp=cfg.pp, cp=cfg.cp, tp=cfg.tp)
        if cfg.dump:
            dump_two_steps(cfg, data, mesh)
            return shutdown()
        # Do all ranks have the same flags, data and code? Also resolves --resume
        checkpoint.agree(cfg, data, mesh.world)
        ended_well, log = train(cfg, data, mesh)
        shutdown()
    except checkpoint.CheckpointError as error:
        shutdown(together=False)
        fail(error)
    except torch.OutOfMemoryError:
        give_up(out_of_memory(cfg), cfg.timeout)
    except BrokenPipeError:
        # The reader of --plain's output has gone (| head): no failure. The excepthook of
        # run/signals.py ends the run
        raise
    except (CommunicationError, DataError, OSError) as error:
        give_up(error, cfg.timeout)
    # A run that ends without log.end(), which sets `ending` and `saved`, has ending "": it prints
    # no sample, and say("") prints nothing
    if ended_well and log.ending and cfg.eval_interval and mesh.rank == 0:
        with signals.skip_on_stop():
            log.say("a sample:\n" + sample_text(log.saved, data))
    log.say(log.ending)
    sys.exit(not ended_well)


if __name__ == "__main__":
    main()
