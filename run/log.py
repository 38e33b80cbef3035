"""Prints the lines of a run, and writes them to metrics.jsonl in --out as JSON: one line per step,
and one per validation. At the end of a run it compares the replicas.

    step 40  loss 3.1415  norm 1.234  lr 1.07e-03  52 ms  78,900 tokens/s  comm 12%  0 min 9 s left

comm: the share of the step in which rank 0's own thread waited for messages. (On a GPU, and in
torch's own collectives, that thread does not wait in Work.wait: the log leaves it out.)
"""

import hashlib
import json
import math
import resource
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from statistics import median

import torch

from collectives import Work, all_reduce, maximum
from mesh import grid
from run.checkpoint import all_gather_text, put_aside
from run.flags import program, say
from run.watch import story, watched
from sizes import bytes_per_parameter, peak_flops
from transport.background import Background

MAX_SKIPPED = 5  # the run gives up after so many steps in a row whose norm is not finite
LOG_INTERVAL = 20  # steps between printed lines, after the first ten
METRICS = "metrics.jsonl"


def layers_in_words(start, stop, n_layer):
    """The layers [start, stop) of a model whose list begins with the embedding and ends with the
    head: "embedding, blocks 0 to 2"."""
    words = ["embedding"] if start == 0 else []
    first, last = max(start, 1) - 1, min(stop - 1, n_layer) - 1
    if first <= last:
        words.append(f"blocks {first} to {last}")
    if stop == n_layer + 2:
        words.append("head")
    return ", ".join(words)


class Log:
    """Reads each step's numbers on every rank, so that all ranks know when the run is over; rank 0
    prints and writes them."""

    def __init__(self, trainer, data, first, resumed_from=None):
        """first: the step with which the run begins."""
        self.trainer, self.data, self.cfg = trainer, data, trainer.cfg
        self.first = self.done = first
        self.world = trainer.mesh.world
        self.n_params = sum(shape.numel() for shape in trainer.shapes.values())
        self.is_cuda = trainer.mesh.device.type == "cuda"
        self.unread = deque()  # (step, lr, read) of steps that were posted
        self.skipped = 0  # steps in a row that were not finite
        self.stop_asked = False  # has a signal to any rank asked the run to stop?
        self.saved = resumed_from  # the folder of the last checkpoint
        self.ended_well = False  # set in end()
        self.finite = True  # was the last save's state finite?
        self.recent = deque(maxlen=50)  # seconds of the last steps
        self.metrics = None
        if trainer.mesh.rank == 0:
            with self.writing():
                interval, steps = self.cfg.eval_interval, self.cfg.steps
                validates = interval > 0 and (first % interval == 0 or first == steps)
                self.metrics = open_metrics(Path(self.cfg.out, METRICS), first, validates)
            self.describe()
            if resumed_from:
                self.say(f"step {first:6d}  resumed from {resumed_from}")
        counts = not self.is_cuda and self.cfg.collectives == "ring"
        self.waiting = Waiting() if counts else None
        self.since = time.perf_counter()

    def say(self, line):
        if self.trainer.mesh.rank == 0:
            say(line, sys.stdout)

    def complain(self, line):
        if self.trainer.mesh.rank == 0:
            say(f"{program()}: {line}")

    @contextmanager
    def writing(self):
        """A metrics.jsonl that cannot be written costs one line, not the run."""
        try:
            yield
        except OSError as error:
            self.metrics = None
            self.complain(f"{self.cfg.out}/{METRICS}: {error.strerror}; the run goes on without")

    def write(self, **record):
        if self.metrics:
            with self.writing():  # JSON has no nan and no infinity: null
                record = {k: v if math.isfinite(v) else None for k, v in record.items()}
                print(json.dumps(record), file=self.metrics, flush=True)

    def describe(self):
        trainer, cfg = self.trainer, self.cfg
        device = "GPU" if self.is_cuda else "CPU"
        self.say(f"{self.n_params:,} parameters, {cfg.dtype} on the {device}; {cfg.steps} steps of "
                 f"{cfg.batch_size} sequences of {cfg.block_size} tokens, {cfg.microbatches} "
                 f"microbatch{'es' * (cfg.microbatches > 1)}")
        if self.world.size > 1:
            self.say(grid(trainer.mesh.sizes))
        if len(trainer.cuts) > 1:
            for stage, (start, stop) in enumerate(trainer.cuts):
                self.say(f"  stage {stage} on pipeline rank {trainer.where[stage]}: "
                         f"{layers_in_words(start, stop, cfg.n_layer)}")

    # ---- what train.py tells the log ----

    @property
    def gave_up(self):
        return self.skipped >= MAX_SKIPPED

    @property
    def is_over(self):
        return self.stop_asked or self.gave_up

    @contextmanager
    def watching(self, step):
        """A context around a step: --watch prints the messages of the first one."""
        if not self.cfg.watch or step > self.first:
            yield
            return
        with watched(self.trainer.mesh) as sent:
            yield
        texts = all_gather_text(json.dumps(sent), self.world)
        self.say(story([message for text in texts for message in json.loads(text)],
                       self.cfg.watch))

    def step(self, step, lr, loss, norm, asked):
        """A step was posted. Its numbers are tensors, the same on every rank; asked: how many ranks
        were asked to stop. A GPU's are read one step late, so that the host posts the next step
        meanwhile; but before a checkpoint at once, so that is_over is known."""
        scale = self.trainer.optimizer.numbers()["scale"]
        numbers = torch.stack([value.double() for value in (loss, norm, asked, scale)])
        self.unread.append((step, lr, self.world.start_read(numbers)))
        self.done = step + 1
        saves = self.cfg.save_interval and self.done % self.cfg.save_interval == 0
        self.catch_up(unread=1 if self.is_cuda and not saves else 0)

    def catch_up(self, unread=0):
        """Read and print all steps but the last `unread`."""
        while len(self.unread) > unread:
            step, lr, read = self.unread.popleft()
            loss, norm, asked, scale = read()  # waits for the device
            self.stop_asked |= asked > 0
            # A scale above 1 (float16) is halved after such a step, and may be the cause
            self.skipped = 0 if math.isfinite(norm) or scale > 1 else self.skipped + 1
            self.print_step(step, lr, loss, norm, scale)

    def print_step(self, step, lr, loss, norm, scale):
        cfg = self.cfg
        seconds = time.perf_counter() - self.since
        self.recent.append(seconds)
        rate = cfg.batch_size * cfg.block_size / seconds
        comm = {"comm": min(1.0, self.waiting.pop() / seconds)} if self.waiting else {}
        loss_scale = {"scale": scale} if cfg.dtype == "float16" else {}
        self.write(step=step, loss=loss, grad_norm=norm, lr=lr, ms=1e3 * seconds,
                   tokens_per_s=rate, **comm, **loss_scale)
        self.since = time.perf_counter()
        near_an_end = step - self.first < 10 or step == cfg.steps - 1
        if self.trainer.mesh.rank > 0 or not (near_an_end or step % LOG_INTERVAL == 0):
            return
        share = f"  comm {comm['comm']:.0%}" if comm else ""
        if self.is_cuda and self.trainer.dtype.itemsize == 2:
            peak = self.world.size * peak_flops(torch.cuda.get_device_name())
            flops = rate * self.trainer.model_config.flops_per_token(self.n_params)
            share += f"  mfu {flops / peak:.1%}" if peak else ""
        minutes, rest = divmod(round((cfg.steps - 1 - step) * median(self.recent)), 60)
        self.say(f"step {step:6d}  loss {loss:.4f}  norm {norm:.3f}  lr {lr:.2e}  "
                 f"{1e3 * seconds:.0f} ms  {rate:,.0f} tokens/s{share}  "
                 f"{minutes} min {rest} s left")

    def validation(self, step, loss, last=False):
        """Print and write a validation's loss, per token and, if the data's meta.json says how long
        a token is, per byte."""
        bits = loss / math.log(2) / self.data.meta.get("bytes_per_token", math.nan)
        self.write(step=step, val_loss=loss, val_bits_per_byte=bits)
        line = f"step {step:6d}  validation loss {loss:.4f} nats per token"
        if math.isfinite(bits):
            line += f", {bits:.4f} bits per byte"
        gzip = self.data.meta.get("gzip_bits_per_byte")
        self.say(line + (f" (gzip -9: {gzip:.4f})" if last and gzip else ""))
        self.since = time.perf_counter()

    def checkpoint(self, folder):
        """A checkpoint was saved; None: none, because weights or states are not finite."""
        self.saved = folder or self.saved
        self.finite = folder is not None
        self.say(f"step {self.done:6d}  saved {folder or 'nothing: weights are not finite'}")
        self.since = time.perf_counter()

    def end(self):
        """Collective: print the last lines, and set ended_well."""
        if self.gave_up or not self.finite:
            self.complain(f"the loss or the gradients' norm was not finite up to step "
                          f"{self.done - 1}; last good checkpoint: {self.saved or 'none'}; a lower "
                          "--lr may help")
            return
        if self.stop_asked:
            self.say(f"stopped by a signal; --resume auto goes on from {self.saved}")
            self.ended_well = True
            return
        agree = replicas_agree(self.trainer)
        peak = torch.cuda.max_memory_allocated() if self.is_cuda else peak_of_process()
        numbers = held_bytes(self.trainer), predicted_bytes(self.trainer), peak
        texts = all_gather_text(json.dumps(numbers), self.world)
        held, predicted, peaks = zip(*map(json.loads, texts), strict=True)  # in the order of ranks
        fullest = held.index(max(held))
        self.say(f"model states: {held[fullest] / 1e6:.2f} MB on rank {fullest}, the fullest, "
                 f"{predicted[fullest] / 1e6:.2f} predicted; peak of the "
                 f"{'GPU' if self.is_cuda else 'process'} {max(peaks) / 1e6:.0f} MB, on rank "
                 f"{peaks.index(max(peaks))}\nreplicas {'agree' if agree else 'DISAGREE'}")
        self.ended_well = agree


def open_metrics(path, first, validates=False):
    """metrics.jsonl to append to. A run that begins anew (first = 0) puts an earlier run's file
    aside. One that goes on from step `first` removes the lines that it writes again, and what a
    crash has left behind the last whole line. validates: does it validate before its first step?
    If not, the validation at the end of the earlier run stays."""
    kept = []
    if first == 0 and path.is_file() and path.stat().st_size:
        put_aside(path)
    elif path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                stays = "val_loss" in record and record["step"] == first and not validates
                if record["step"] < first or stays:
                    kept.append(line + "\n")
    path.write_text("".join(kept))
    return open(path, "a")


class Waiting:
    """Counts, from now on, the seconds in which this process's own thread waits for messages: for
    the end of a Work, and of what runs in the background. Replaces Work.wait and Background.start
    for that: the files that train know nothing of the log."""

    def __init__(self):
        self.seconds = 0.0
        start = Background.start

        @wraps(start)
        def timed_start(*args):
            return self.timed(start(*args))

        Work.wait = self.timed(Work.wait)
        Background.start = timed_start

    def timed(self, wait):
        @wraps(wait)
        def timed_wait(*args):
            begin = time.perf_counter()
            wait(*args)
            if threading.current_thread() is threading.main_thread():
                self.seconds += time.perf_counter() - begin

        return timed_wait

    def pop(self):
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


# ---- at the end: memory, and do replicas agree? ----


def peak_of_process():
    """The most bytes that this process has held at one time."""
    with suppress(OSError), open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, else KiB
    return peak if sys.platform == "darwin" else peak * 1024


def predicted_bytes(trainer):
    """Bytes of weights, gradients and optimizer states on this rank, by the formula of zero.py."""
    reducer, zero, width = trainer.reducer, trainer.cfg.zero, trainer.dtype.itemsize
    total = 0.0
    for tag in reducer.tags:
        total += tag.slice_shape.numel() * sum(
            bytes_per_parameter(zero, tag.sum_over[0].size, width))
    for tag, _, _ in reducer.frozen:
        total += tag.slice_shape.numel() * bytes_per_parameter(zero, tag.sum_over[0].size, width)[0]
    return round(total)


def held_bytes(trainer):
    """Bytes of weights, gradients and optimizer states that this rank holds after a step: of live
    storages, of which several tensors may be views."""
    reducer = trainer.reducer
    states = [values for kind in trainer.optimizer.named_states().values() for values in kind]
    held = [*reducer.weights, *trainer.grads, *states, *(w for _, _, w in reducer.frozen)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    return sum(storages.values())


def replicas_agree(trainer):
    """Collective: do all ranks that hold the same slice of a weight hold the same bits? Compared by
    hashes."""
    world = trainer.mesh.world
    hashes = {}  # group of ranks that hold the same slices -> {name: hash of this rank's}
    for tag, weights in trainer.reducer.whole():
        content = weights.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest = int.from_bytes(hashlib.sha256(content).digest()[:7], "little")
        for group in (tag.sum_over[0], *tag.shared_by):
            hashes.setdefault(group, []).append(digest)
    differing = torch.zeros(1, device=world.device)
    for group in sorted(hashes, key=lambda group: group.name):  # all ranks in one order
        own = torch.tensor(hashes[group], device=world.device)
        # If hashes differ, at least one rank's is not the largest, and that rank notices
        differing += (all_reduce(own.clone(), group, maximum) != own).any()
    return world.read(all_reduce(differing, world)) == [0]
