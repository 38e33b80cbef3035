"""Prints the lines of a run, and writes JSON lines to the file of --metrics: one per step, and one
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
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from statistics import median

import torch

from mesh import grid
from run.config import MARKS, as_text
from run.files import refuse_foreign
from run.processes import all_gather_text
from run.signals import in_words, program


def is_before(line, step):
    """Is this line of --metrics whole, and of an earlier step?"""
    with suppress(ValueError, KeyError, TypeError):  # a crash may have left anything
        return line.endswith("\n") and json.loads(line)["step"] < step
    return False


def open_metrics(path, start):
    """Open the file of --metrics to append to, for a run that begins with step `start`. Cut the
    file at the first line of a step >= start, because this run writes the lines from there on, or
    at a line that a crash has left incomplete. (A validation after the last step of a shorter run
    is cut, too.)"""
    if Path(path).is_file():
        refuse_foreign("--metrics", path, MARKS["metrics"])  # again: it may be another file by now
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


class Log:
    """Speaks for all ranks of a run from step `start` on: only rank 0's calls print and write.

    On a terminal the lines that are not to stay there (most steps, the progress of a validation)
    are written over one another, in place."""

    def __init__(self, trainer, data, start, peak_flops):
        self.trainer = trainer
        self.cfg = trainer.cfg
        self.data = data
        self.start = start
        self.peak_flops = peak_flops  # FLOP/s of all GPUs together; 0: unknown
        self.silent = trainer.mesh.rank != 0
        self.metrics = None  # the open file of --metrics
        if self.cfg.metrics and not self.silent:
            try:
                self.metrics = open_metrics(self.cfg.metrics, start)
            except (OSError, ValueError) as error:
                self.lose_metrics(error)
        self.since = time.perf_counter()  # when the current step, validation or save began
        self.recent = deque(maxlen=50)  # seconds of the last steps
        self.batch_seconds = 0.0  # seconds of one batch of validation; 0: none has been run
        self.saved = None  # the last checkpoint; set in end()
        self.ending = ""  # the last lines; set in end()
        self.describe()

    def describe(self):
        """The lines before the first step: flags, model, rates, ranks, stages."""
        trainer, cfg, mesh = self.trainer, self.cfg, self.trainer.mesh
        if cfg.verbose:
            self.say(as_text(cfg))
        device = "GPU" if mesh.device.type == "cuda" else "CPU"
        plural = "es" if cfg.microbatches > 1 else ""
        self.say(f"{trainer.n_params:,} parameters, {cfg.dtype} on the {device}; {cfg.steps} steps "
                 f"of {cfg.batch_size} sequences of {cfg.block_size} tokens, {cfg.microbatches} "
                 f"microbatch{plural}")
        self.say(f"{cfg.optimizer}: learning rate up to {cfg.lr:.3g} in {cfg.warmup_steps} steps, "
                 f"then down to {cfg.min_lr:.3g}")
        if mesh.world.size > 1:
            self.say(grid(mesh.sizes))
        if len(trainer.cuts) > 1:
            for stage, (start, stop) in enumerate(trainer.cuts):
                self.say(f"  stage {stage} on p={trainer.where[stage]}: layers {start} to "
                         f"{stop - 1} of {cfg.n_layer + 2}")

    def say(self, text, file=None, stays=True):
        """Print a line. A line that does not stay is printed on a terminal only, and the next line
        replaces it."""
        if self.silent or not text:
            return
        file = file or sys.stdout
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
        """Append a line to the file of --metrics."""
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
        reason = error.strerror if isinstance(error, OSError) else in_words(error)
        self.complain(f"--metrics {self.cfg.metrics}: {reason}; the run goes on without")

    def clock(self):
        """Start the clock of a step, a validation or a save."""
        self.since = time.perf_counter()

    def resumed(self, step, folder):
        done = ", nothing left to do" if step == self.cfg.steps else ""
        self.say(f"step {step:6d}  resumed from {folder}{done}")

    def not_finite(self, skipped, step, saved):
        """skipped: how many steps up to `step` were skipped in a row; 0: a save was refused."""
        if skipped:
            what = f"loss or gradient norm was not finite for {skipped} steps up to"
        else:
            what = "weights or moments are not finite after"
        self.complain(f"{what} step {step}; last good checkpoint: {saved or 'none'}; a lower --lr "
                      "may help")

    def checkpoint(self, step, folder):
        self.say(f"step {step:6d}  saved {folder or 'nothing: weights or moments are not finite'}")
        self.clock()

    def step(self, step, loss, norm, scale, lr):
        """A step is done: write its record, and print its line."""
        cfg = self.cfg
        seconds = time.perf_counter() - self.since
        self.recent.append(seconds)
        rate = self.trainer.tokens / seconds
        loss_scale = {"scale": scale} if cfg.dtype == "float16" else {}
        experts = {}
        if cfg.experts:
            routing = self.trainer.routing
            experts = {"balance": routing.balance, "busiest": routing.busiest}
        self.write(step=step, loss=loss, grad_norm=norm, lr=lr, ms=1e3 * seconds,
                   tokens_per_s=rate, **loss_scale, **experts)

        of_experts = "".join(f"  {name} {value:.3f}" for name, value in experts.items())
        mfu = ""
        if self.peak_flops:
            flops = rate * self.trainer.model_config.flops_per_token(self.trainer.n_params)
            mfu = f"  mfu {flops / self.peak_flops:.1%}"
        minutes, left = divmod(round(self.seconds_left(step)), 60)
        is_first = step - self.start < 10
        is_last = step == cfg.steps - 1
        self.say(f"step {step:6d}  loss {loss:.4f}{of_experts}  norm {norm:.3f}  lr {lr:.2e}  "
                 f"{1e3 * seconds:.0f} ms  {rate:,.0f} tokens/s{mfu}  {minutes} min {left} s left",
                 stays=step % cfg.log_interval == 0 or is_first or is_last)
        self.clock()

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
        is_quarter = done in quarters and done < batches
        is_long = batches > self.cfg.eval_batches
        self.say(f"validation: {done} of {batches} batches, {left} s left",
                 stays=is_quarter and is_long and not sys.stdout.isatty())

    def validation(self, step, loss, last=False):
        """A validation is done: write and print nats per token and, if the data's meta.json says
        how long a token is, bits per byte."""
        bits = loss / math.log(2) / self.data.meta.get("bytes_per_token", math.nan)
        self.write(step=step, val_loss=loss, val_bits_per_byte=bits)
        line = f"step {step:6d}  validation loss {loss:.4f} nats per token"
        if math.isfinite(bits):
            line += f", {bits:.4f} bits per byte"
        gzip = self.data.meta.get("gzip_bits_per_byte")
        if last and gzip:
            line += f" (gzip -9: {gzip:.4f})"
        self.say(line)
        self.clock()

    def end(self, saved, agree):
        """Collective: prepare the last lines, to be printed once the other ranks have left. saved:
        the last checkpoint. agree: replicas_agree() of train.py."""
        world = self.trainer.mesh.world
        cuda = self.trainer.mesh.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if cuda else peak_of_process()
        by_formula, live = self.trainer.optimizer.state_bytes()  # bytes of the model states
        texts = all_gather_text(json.dumps([peak, by_formula, live]), world)
        # Three tuples: peak, by_formula and live of each rank, in the order of ranks
        peaks, predicted, measured = zip(*map(json.loads, texts), strict=True)
        highest = peaks.index(max(peaks))  # a rank
        fullest = measured.index(max(measured))  # a rank
        if self.metrics:
            self.metrics.close()
        self.saved = saved
        self.ending = (f"model states: {measured[fullest] / 1e6:.2f} MB on rank {fullest}, the "
                       f"fullest, {predicted[fullest] / 1e6:.2f} predicted; peak of the "
                       f"{'GPU' if cuda else 'process'} {max(peaks) / 1e6:.0f} MB, on rank "
                       f"{highest}\nreplicas {'agree' if agree else 'DISAGREE'}")
