"""What a run says: lines on the terminal, and a JSON line per step in the file of --metrics."""

import json
import math
import os
import resource
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

import torch

import sample
from collectives import all_reduce
from data.batches import load_tokenizer
from mesh import grid
from planner.hardware import DEVICES


def is_before(line, step):
    """Whether a line of --metrics is whole and of a step before this one."""
    with suppress(ValueError, KeyError, TypeError):
        return line.endswith("\n") and json.loads(line)["step"] < step
    return False


def peak_of_process():
    """Most bytes that this process has held. (ru_maxrss begins with its parent's.)"""
    with suppress(OSError), open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


class Log:
    """Of a run from step `start` on. Rank 0 speaks, the other ranks' calls do nothing."""

    def __init__(self, trainer, data, start):
        cfg, mesh = trainer.cfg, trainer.mesh
        self.cfg, self.trainer, self.data, self.start = cfg, trainer, data, start
        self.silent = mesh.rank != 0
        self.cuda = mesh.device.type == "cuda"
        gpu = torch.cuda.get_device_name() if self.cuda and trainer.dtype.itemsize == 2 else ""
        # FLOPs per second that all GPUs together can do, 0 where that is not known
        known = [1e12 * device.tflops for name, device in DEVICES.items()
                 if name.split("-")[0] in gpu.lower()]
        self.peak = mesh.world.size * (known or [0.0])[0]
        self.metrics = None  # the file, if there is one
        if cfg.metrics and not self.silent:
            if Path(cfg.metrics).is_file():
                # Drop lines of step `start` and later, and what a crash left: they come anew.
                with open(cfg.metrics, "r+", encoding="latin-1") as file:  # a character is a byte
                    kept = takewhile(lambda line: is_before(line, start), file.readlines())
                    file.truncate(sum(map(len, kept)))
            self.metrics = open(cfg.metrics, "a")
        self.saved = self.ending = None  # folder of the last checkpoint; the last lines
        self.agree = True  # whether the replicas do
        self.began = self.since = time.perf_counter()  # the run; the step under way
        self.say(" ".join(f"{k}={v}" for k, v in asdict(cfg).items() if v != ""))
        shared = f" ({cfg.ep} of them share the experts)" if cfg.experts else ""
        self.say(f"{trainer.n_params:,} parameters on {mesh.world.size} ranks = {cfg.dp} data"
                 f"{shared} x {cfg.pp} pipeline x {cfg.cp} context x {cfg.tp} tensor; "
                 f"{cfg.microbatches} microbatches of "
                 f"{cfg.batch_size // cfg.dp // cfg.microbatches} sequences\n{grid(mesh.sizes)}")
        for s, (p, (a, b)) in enumerate(zip(trainer.where, trainer.cuts, strict=True)):
            self.say(f"  stage {s} on p={p}: layers {a} to {b - 1} of {cfg.n_layer + 2}")
        held = sum(bucket.numel for bucket in trainer.reducer.buckets)
        states = trainer.optimizer.state_bytes()[0]
        self.say(f"model states: {states / 1e6:.2f} MB per rank predicted, {states / held:.4g} "
                 "bytes for each of its parameters")

    def say(self, text, file=None):
        if not self.silent:
            try:
                print(text, file=file or sys.stdout, flush=True)
            except OSError:  # nobody reads any more; the run goes on
                self.silent = self.silent or file is None
                os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())

    def write(self, **record):
        if self.metrics:  # JSON has no nan and no infinity
            record = {k: v if math.isfinite(v) else None for k, v in record.items()}
            try:
                print(json.dumps(record), file=self.metrics, flush=True)
            except OSError as error:
                self.metrics = None
                self.say(f"train.py: --metrics {self.cfg.metrics}: {error.strerror}; the run goes "
                         "on without", file=sys.stderr)

    def resumed(self, step, folder):
        done = ", nothing left to do" if step == self.cfg.steps else ""
        self.say(f"step {step:6d}  resumed from {folder}{done}")

    def not_finite(self, steps, step, saved):
        self.say(f"train.py: loss or gradient norm was not finite for {steps} steps up to step "
                 f"{step}; last good checkpoint: {saved or 'none'}", file=sys.stderr)

    def checkpoint(self, step, folder):
        self.say(f"step {step:6d}  saved {folder or 'nothing: weights or moments are not finite'}")
        self.clock()

    def clock(self):
        self.since = time.perf_counter()  # a step begins now

    def step(self, step, loss, norm, lr):
        cfg, now = self.cfg, time.perf_counter()
        ms, rate = 1e3 * (now - self.since), self.trainer.tokens / (now - self.since)
        scale = {"scale": self.trainer.scale} if cfg.dtype == "float16" else {}
        routing = self.trainer.routing
        routed = {name: getattr(routing, name) for name in ("balance", "busiest")}
        routed = routed if cfg.experts else {}
        self.write(step=step, loss=loss, grad_norm=norm, lr=lr, ms=ms, tokens_per_s=rate, **scale,
                   **routed)
        left = cfg.steps - step - 1
        if step % cfg.log_interval == 0 or not left:
            seconds = round(left * (now - self.began) / (step + 1 - self.start))
            flops = rate * self.trainer.model_config.flops_per_token(self.trainer.n_params)
            mfu = f"  mfu {flops / self.peak:.1%}" if self.peak else ""
            eta = f"  {seconds // 60} min {seconds % 60} s left" if left else ""
            routed = "".join(f"  {name} {value:.3f}" for name, value in routed.items())
            self.say(f"step {step:6d}  loss {loss:.4f}{routed}  norm {norm:.3f}  lr {lr:.2e}  "
                     f"{ms:.0f} ms  {rate:,.0f} tokens/s{mfu}{eta}")
        self.clock()

    def validation(self, step, loss, last=False):
        bits = loss / math.log(2) / self.data.meta.get("bytes_per_token", math.nan)
        self.write(step=step, val_loss=loss, val_bits_per_byte=bits)
        known = f", {bits:.4f} bits per byte" if math.isfinite(bits) else ""
        self.say(f"step {step:6d}  validation loss {loss:.4f} nats per token{known}")
        gzip = self.data.meta.get("gzip_bits_per_byte")
        if last and gzip is not None:
            self.say(f"gzip -9 needs {gzip:.4f} bits per byte for the same text: the model "
                     f"{'beats' if bits < gzip else 'does not yet beat'} it")
        self.clock()

    def end(self, saved, agree):
        """Note the last words, while the run is still there. Collective."""
        world, held = self.trainer.mesh.world, ""
        if self.cuda:
            held = f" ({torch.cuda.max_memory_reserved() / 1e6:.0f} MB reserved)"
        peaks = torch.zeros(world.size, dtype=torch.double, device=world.device)
        peaks[world.rank] = torch.cuda.max_memory_allocated() if self.cuda else peak_of_process()
        peaks = world.read(all_reduce(peaks, world))
        self.saved, self.agree = saved, agree
        self.ending = (f"model states: {self.trainer.optimizer.state_bytes()[1] / 1e6:.2f} MB on "
                       f"this rank measured; peak of the {'GPU' if self.cuda else 'process'} "
                       f"{max(peaks) / 1e6:.0f} MB{held}, on rank {peaks.index(max(peaks))}\n"
                       f"replicas {'agree' if agree else 'DISAGREE'}")

    def last_words(self):
        """After the other ranks have left: first a sample, out of the checkpoint just saved. It
        takes the whole model in this process's memory, in float32, and no run fails for it."""
        if self.silent or not self.ending:
            return
        if self.cfg.eval_interval and self.agree:
            try:
                model = sample.load_model(self.saved)
                ids, = sample.generate(model, self.data.val[:16].tolist(), 96)
                text = load_tokenizer(self.data.folder).decode(ids)
            except (ValueError, OSError, RuntimeError) as error:  # no tokenizer, logits of nan, ...
                text = f"(none: {error})"
            self.say("a sample:\n" + "\n".join("  | " + line for line in text.splitlines()))
        self.say(self.ending)
