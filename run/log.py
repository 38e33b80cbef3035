"""Prints the lines of a run, and writes JSON lines to metrics.jsonl in --out: one per step, and one
per validation."""

import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

from data.foreign import parse_json
from mesh import grid
from optimizer import learning_rate
from run.checkpoint import read_manifest
from run.processes import all_gather_text
from run.signals import in_words, program
from sizes import bytes_per_parameter, peak_flops

# The run gives up after so many steps in a row whose loss or norm is not finite (float16: counted
# only once the loss scale is down to 1)
MAX_SKIPPED = 5
LOG_INTERVAL = 20  # steps between printed lines, after the first ten
METRICS = "metrics.jsonl"  # in --out


def is_before(line, step):
    """Is this line of metrics.jsonl whole, and of an earlier step?"""
    with suppress(ValueError, KeyError, TypeError):  # a crash may have left anything
        return line.endswith("\n") and parse_json(line)["step"] < step
    return False


def open_metrics(path, start):
    """Open metrics.jsonl to append to, for a run that begins with step `start`. Cut the file at the
    first line of a step >= start, because this run writes the lines from there on, or at a line
    that a crash has left incomplete. (A validation after the last step of a shorter run is cut,
    too.)"""
    if Path(path).is_file():
        with open(path, "r+", encoding="latin-1") as file:  # one character per byte
            kept = takewhile(lambda line: is_before(line, start), file.readlines())
            file.truncate(sum(map(len, kept)))
    return open(path, "a")


def peak_of_process():
    """The most bytes that this process has held at one time."""
    with suppress(OSError), open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    # Another system than Linux. (On Linux ru_maxrss is wrong: it starts with the parent's peak.)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def predicted_bytes(trainer):
    """Bytes of weights, gradients and optimizer states on this rank, by the formula of zero.py."""
    cfg, reducer = trainer.cfg, trainer.reducer
    width = trainer.dtype.itemsize
    total = 0.0
    for tag in reducer.tags:
        parts = bytes_per_parameter(cfg.zero, tag.sum_over[0].size, width)
        total += tag.slice_shape.numel() * sum(parts)
    for _, tag, _ in reducer.frozen:
        weights, *_ = bytes_per_parameter(cfg.zero, tag.sum_over[0].size, width)
        total += tag.slice_shape.numel() * weights
    return round(total)


def held_bytes(trainer):
    """Bytes of weights, gradients and optimizer states that this rank holds after a step, in live
    storages: tensors may share one, so each counts once."""
    reducer = trainer.reducer
    states = trainer.optimizer.named_states().values()
    held = [*reducer.weights, *trainer.grads, *(values for kind in states for values in kind),
            *(weights for weights, _, _ in reducer.frozen)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    return sum(storages.values())


class Log:
    """Speaks for all ranks of a run from step `start` on: only rank 0's calls print and write. On
    every rank it reads the numbers of the steps, and so knows whether the run is over.

    On a terminal the lines that are not to stay there (most steps, the progress of a validation)
    are written over one another, in place."""

    def __init__(self, trainer, data, start):
        self.trainer = trainer
        self.cfg = trainer.cfg
        self.world = trainer.mesh.world
        self.data = data
        self.start = start
        self.tokens = self.cfg.batch_size * self.cfg.block_size  # tokens of a step
        self.n_params = sum(shape.numel() for shape in trainer.shapes.values())
        self.silent = trainer.mesh.rank != 0
        # FLOP/s of all GPUs together, known for 16 bits only; 0: the log leaves MFU out
        is_cuda = trainer.mesh.device.type == "cuda"
        sixteen = is_cuda and trainer.dtype.itemsize == 2
        self.peak_flops = self.world.size * peak_flops(torch.cuda.get_device_name()) \
            if sixteen else 0.0
        # Steps whose numbers are not read: (step, learning rate, read). On a GPU one step stays
        # unread, so that the host posts the next step while the device still computes this one
        self.unread = deque()
        self.most_unread = int(is_cuda)
        self.done = start  # steps that were posted
        self.skipped = 0  # steps in a row that were not finite
        self.stopping = False  # has a signal to any rank asked the run to stop?
        self.healthy = True  # could the last checkpoint be saved, with finite weights?
        self.saved = None if self.cfg.resume == "no" else self.cfg.resume  # the last checkpoint
        self.ending = ""  # the last lines; set in end()
        self.ended_well = False  # set in end()
        self.metrics = None  # the open metrics.jsonl
        if not self.silent:
            try:
                self.metrics = open_metrics(Path(self.cfg.out, METRICS), start)
            except OSError as error:
                self.lose_metrics(error)
        self.recent = deque(maxlen=50)  # seconds of the last steps
        self.batch_seconds = 0.0  # seconds of one batch of validation; 0: none has been run
        self.describe()
        if self.saved:
            done = ", nothing left to do" if start == self.cfg.steps else ""
            self.say(f"step {start:6d}  resumed from {self.saved}{done}")
            self.say_how_the_rate_jumps()
        self.since = time.perf_counter()  # when the current step, validation or save began

    def say_how_the_rate_jumps(self):
        """A line if the checkpoint's run would have gone on at another learning rate: its schedule
        had other --steps, say."""
        cfg = self.cfg
        if self.silent or self.start == cfg.steps:
            return
        then = SimpleNamespace(**{**asdict(cfg), **read_manifest(self.saved)["config"]})
        # past the end of its schedule a rate stays
        was = then.min_lr if self.start >= then.steps else learning_rate(then, self.start)
        now = learning_rate(cfg, self.start)
        if now != was:
            changed = [f"--{name.replace('_', '-')} was {getattr(then, name)}, is "
                       f"{getattr(cfg, name)}" for name in ("steps", "lr", "min_lr", "warmup_steps")
                       if getattr(then, name) != getattr(cfg, name)]
            self.say(f"the learning rate goes on at {now:.3g}, the checkpoint's run would have gone"
                     f" on at {was:.3g}: {', '.join(changed)}")

    def describe(self):
        """The lines before the first step: parts, model, rates, ranks, stages."""
        trainer, cfg, mesh = self.trainer, self.cfg, self.trainer.mesh
        device = "GPU" if mesh.device.type == "cuda" else "CPU"
        plural = "es" if cfg.microbatches > 1 else ""
        self.say(f"{self.n_params:,} parameters, {cfg.dtype} on the {device}; {cfg.steps} steps "
                 f"of {cfg.batch_size} sequences of {cfg.block_size} tokens, {cfg.microbatches} "
                 f"microbatch{plural}")
        self.say(f"learning rate up to {cfg.lr:.3g} in {cfg.warmup_steps} steps, "
                 f"then down to {cfg.min_lr:.3g}")
        if mesh.world.size > 1:
            self.say(grid(mesh.sizes))
        if len(trainer.cuts) > 1:
            for stage, (start, stop) in enumerate(trainer.cuts):
                self.say(f"  stage {stage} on p={trainer.where[stage]}: layers {start} to "
                         f"{stop - 1} of {cfg.n_layer + 2} (embedding, blocks, head)")

    @property
    def gave_up(self):
        return self.skipped >= MAX_SKIPPED

    @property
    def is_over(self):
        return self.stopping or self.gave_up

    def say(self, text, file=None, stays=True):
        """Print a line. A line that does not stay is printed on a terminal only, and the next line
        replaces it."""
        file = file or sys.stdout
        if self.silent or not text or file is None:  # None: closed (>&-)
            return
        try:
            # on a terminal: back to the first column, and clear the line that did not stay
            clear = "\r\x1b[K" if file.isatty() else ""
            if stays:
                print(clear + text, file=file, flush=True)
            elif clear:
                fits = shutil.get_terminal_size().columns - 1
                print(clear + text[:fits], file=file, end="", flush=True)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # from now on: into nothing
            if file is not sys.stdout:
                return
            if isinstance(error, BrokenPipeError):  # the reader has gone, like a closed terminal
                signal.raise_signal(signal.SIGHUP)
            else:
                self.complain(f"standard output: {in_words(error)}; the run goes on without")

    def complain(self, text):
        self.say(f"{program()}: {text}", file=sys.stderr)

    def write(self, **record):
        """Append a line to metrics.jsonl."""
        if not self.metrics:
            return
        # JSON has no nan and no infinity: write null
        record = {k: v if math.isfinite(v) else None for k, v in record.items()}
        try:
            print(json.dumps(record), file=self.metrics, flush=True)
        except OSError as error:
            self.lose_metrics(error)

    def lose_metrics(self, error):
        self.metrics = None
        self.complain(f"{Path(self.cfg.out, METRICS)}: {error.strerror}; the run goes on without")

    # ---- what a run tells the log, in the order of train.py ----

    @contextmanager
    def watching(self, step):
        """A context around a step: --watch notes the messages of the first step."""
        if self.cfg.watch and step == self.start:
            from run.watch import Watch
            watch = Watch(self.trainer.mesh)
            with watch.step():
                yield
            self.say(watch.story(self.cfg.watch))
        else:
            yield

    def step(self, step, lr, norm, sums):
        """A step was posted. norm, sums: what Trainer.step returned."""
        scale = self.trainer.optimizer.numbers().get("scale", torch.ones_like(norm))
        numbers = torch.cat([torch.stack([norm, scale.to(norm.dtype)]), sums])
        self.unread.append((step, lr, self.world.start_read(numbers)))
        self.done = step + 1
        saves = self.cfg.save_interval and self.done % self.cfg.save_interval == 0
        self.catch_up(0 if saves or self.done == self.cfg.steps else self.most_unread)

    def catch_up(self, unread=0):
        """Read and print all steps but the last `unread`."""
        while len(self.unread) > unread:
            step, lr, read = self.unread.popleft()
            norm, scale, loss, asked, _, *statistics = read()  # waits for the device
            self.stopping |= asked > 0
            self.skipped = 0 if math.isfinite(norm) or scale > 1 else self.skipped + 1
            self.print_step(step, lr, norm, scale, loss, statistics)
            if self.gave_up:
                self.not_finite(step)
                self.unread.clear()

    def print_step(self, step, lr, norm, scale, loss, statistics):
        """Write a step's record, and print its line."""
        cfg = self.cfg
        seconds = time.perf_counter() - self.since
        self.recent.append(seconds)
        rate = self.tokens / seconds
        loss_scale = {"scale": scale} if cfg.dtype == "float16" else {}
        experts = self.trainer.routing.read(statistics, self.tokens)
        self.write(step=step, loss=loss, grad_norm=norm, lr=lr, ms=1e3 * seconds,
                   tokens_per_s=rate, **loss_scale, **experts)

        of_experts = "".join(f"  {name} {value:.3f}" for name, value in experts.items())
        mfu = ""
        if self.peak_flops:
            flops = rate * self.trainer.model_config.flops_per_token(self.n_params)
            mfu = f"  mfu {flops / self.peak_flops:.1%}"
        minutes, left = divmod(round(self.seconds_left(step)), 60)
        is_first = step - self.start < 10
        is_last = step == cfg.steps - 1
        self.say(f"step {step:6d}  loss {loss:.4f}{of_experts}  norm {norm:.3f}  lr {lr:.2e}  "
                 f"{1e3 * seconds:.0f} ms  {rate:,.0f} tokens/s{mfu}  {minutes} min {left} s left",
                 stays=step % LOG_INTERVAL == 0 or is_first or is_last)
        self.since = time.perf_counter()

    def seconds_left(self, step):
        """Seconds from the end of this step to the end of the run, for all steps and all batches of
        validation that are still to come."""
        cfg = self.cfg
        step_seconds = median(self.recent)
        batches = 0
        if cfg.eval_interval:
            windows = len(self.data.val) // cfg.block_size
            all_batches = windows / cfg.batch_size
            # validations come before the steps that eval_interval divides, and after the last step
            validations = (cfg.steps - 1) // cfg.eval_interval - step // cfg.eval_interval
            batches = validations * min(cfg.eval_batches, all_batches) + all_batches
        # Until a validation has been timed: forward alone takes a third of a step's time
        batch_seconds = self.batch_seconds or step_seconds / 3
        return (cfg.steps - 1 - step) * step_seconds + batches * batch_seconds

    def validating(self, done, batches):
        """Print a validation's progress: `done` of its `batches` batches are computed. On a
        terminal each call prints a line, which the next line replaces. A file gets a line at each
        quarter of a long validation, of more than --eval-batches batches: only the validation after
        the last step can have so many."""
        self.batch_seconds = (time.perf_counter() - self.since) / done
        left = round((batches - done) * self.batch_seconds)
        quarters = [math.ceil(batches * quarter / 4) for quarter in (1, 2, 3)]
        is_long = batches > self.cfg.eval_batches
        self.say(f"validation: {done} of {batches} batches, {left} s left",
                 stays=done in quarters and is_long and not sys.stdout.isatty())

    def validation(self, step, loss, last=False):
        """A validation is done: write and print nats per token and, if the data's meta.json says
        how long a token is, bits per byte. loss: None if a signal came meanwhile (in training the
        run then stops after the next step)."""
        if loss is None:
            self.stopping |= last
            return
        bits = loss / math.log(2) / self.data.meta.get("bytes_per_token", math.nan)
        self.write(step=step, val_loss=loss, val_bits_per_byte=bits)
        line = f"step {step:6d}  validation loss {loss:.4f} nats per token"
        if math.isfinite(bits):
            line += f", {bits:.4f} bits per byte"
        gzip = self.data.meta.get("gzip_bits_per_byte")
        if last and gzip:
            line += f" (gzip -9: {gzip:.4f})"
        self.say(line)
        self.since = time.perf_counter()

    def checkpoint(self, folder):
        """A checkpoint was saved; None: nothing, because weights or moments are not finite."""
        self.saved = folder or self.saved
        self.healthy = folder is not None
        where = folder or "nothing: weights or moments are not finite"
        self.say(f"step {self.done:6d}  saved {where}")
        self.since = time.perf_counter()

    def not_finite(self, step):
        if self.skipped:
            what = f"loss or gradient norm was not finite for {self.skipped} steps up to"
        else:
            what = "weights or moments are not finite after"
        self.complain(f"{what} step {step}; last good checkpoint: {self.saved or 'none'}; a lower "
                      "--lr may help")

    def end_early(self):
        """A signal, or too many steps that were not finite, have ended the run."""
        if not self.gave_up:
            if self.skipped or not self.healthy:
                self.not_finite(self.done - 1)
            self.say("stopped by a signal; --resume auto goes on from "
                     f"{self.saved or 'the start'}")
            self.ended_well = self.saved is not None

    def end(self, agree):
        """Collective: prepare the last lines, to be printed once the other ranks have left. agree:
        do the replicas have the same weights?"""
        if self.skipped or not self.healthy:
            self.not_finite(self.done - 1)
        self.ended_well = agree and self.healthy and not self.skipped
        cuda = self.trainer.mesh.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if cuda else peak_of_process()
        numbers = [peak, predicted_bytes(self.trainer), held_bytes(self.trainer)]
        texts = all_gather_text(json.dumps(numbers), self.world)
        # Three tuples, in the order of ranks
        peaks, predicted, measured = zip(*map(json.loads, texts), strict=True)
        highest = peaks.index(max(peaks))  # a rank
        fullest = measured.index(max(measured))  # a rank
        if self.metrics:
            self.metrics.close()
        self.ending = (f"model states: {measured[fullest] / 1e6:.2f} MB on rank {fullest}, the "
                       f"fullest, {predicted[fullest] / 1e6:.2f} predicted; peak of the "
                       f"{'GPU' if cuda else 'process'} {max(peaks) / 1e6:.0f} MB, on rank "
                       f"{highest}\nreplicas {'agree' if agree else 'DISAGREE'}")
