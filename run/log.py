"""Prints the lines of a run, and writes them to metrics.jsonl in --out as JSON: one line per step,
and one per validation. At the end of a run it compares the replicas.

    step 40  loss 3.1415  norm 1.234  lr 1.07e-03  52 ms  78,900 tokens/s  comm 12%

comm: the share of the step in which rank 0's own thread waited for messages. (On a GPU, and in
torch's own collectives, that thread does not wait in Work.wait: the log leaves it out.)

--watch prints every message of the first step: when, from whom to whom, and for what.

      1.52 ms   0 -> 1   tp   all_reduce, tensor_parallel.py Row.forward    4x8x16    4,096 bytes

The files that train know nothing of the log: watching() replaces Work.wait, Background.start and,
for --watch, Group.exchange during a step.
"""

import hashlib
import json
import math
import sys
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from collectives import Group, Work, all_reduce, maximum
from data.files import say
from mesh import DATA, lay_out
from run.checkpoint import about, all_gather_values, put_aside
from run.flags import program
from sizes import peak_flops
from transport.background import Background

MAX_SKIPPED = 5  # the run gives up after so many steps in a row whose norm is not finite
LOG_INTERVAL = 20  # steps between printed lines, after the first ten
METRICS = "metrics.jsonl"


class Log:
    """Reads each step's numbers on every rank, so that all ranks know when the run is over; rank 0
    prints and writes them."""

    def __init__(self, trainer, data, first, resumed_from=None):
        """first: the step with which the run begins."""
        self.trainer, self.data, self.cfg = trainer, data, trainer.cfg
        self.first = self.done = first  # done: steps done, those before a resume too
        self.world = trainer.mesh.world
        self.n_params = sum(shape.numel() for shape in trainer.shapes.values())
        self.is_cuda = trainer.mesh.device.type == "cuda"
        self.unread = deque()  # (step, lr, read) of steps that were posted
        self.skipped = 0  # steps in a row that were not finite
        self.gave_up = False  # were MAX_SKIPPED steps, or the weights to be saved, not finite?
        self.stopping = False  # has a signal to any rank asked the run to stop?
        self.saved = resumed_from  # the folder of the last checkpoint
        self.ended_well = False  # set in end()
        self.waited = 0.0  # seconds in which this rank waited for messages in this step
        self.metrics = None
        if trainer.mesh.rank == 0:
            self.metrics = open_metrics(Path(self.cfg.out, METRICS), first)
            self.describe()
            if resumed_from:
                self.say(f"step {first:6d}  resumed from {resumed_from}"
                         + ("; no step is left to do" if first == self.cfg.steps else ""))
        self.since = time.perf_counter()

    def say(self, line, name="stdout"):
        if self.trainer.mesh.rank == 0:
            say(line, name)

    def write(self, **record):
        if self.metrics:  # JSON has no nan and no infinity: null
            record = {k: v if math.isfinite(v) else None for k, v in record.items()}
            with about(self.metrics.name):
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
            layers = ["embedding", *(f"block {i}" for i in range(cfg.n_layer)), "head"]
            for stage, (start, stop) in enumerate(trainer.cuts):
                ends = dict.fromkeys([layers[start], layers[stop - 1]])  # one name, if they are one
                self.say(f"  stage {stage} on pipeline rank {trainer.where[stage]}: "
                         + " to ".join(ends))

    # ---- what train.py tells the log ----

    @contextmanager
    def watching(self, step):
        """A context around a step: counts the seconds in which this rank waits for messages;
        --watch prints the messages of the first step."""
        self.waited = 0.0
        start = Background.start
        with (replaced(Work, "wait", self.timed(Work.wait)),
              replaced(Background, "start", lambda *args: self.timed(start(*args)))):
            if not self.cfg.watch or step > self.first:
                yield
                return
            with watched(self.trainer.mesh) as sent:
                yield
        found = all_gather_values(sent, self.world)
        self.say(story([message for messages in found for message in messages]))

    def timed(self, wait):
        """The function `wait`; the seconds that the main thread spends in it are counted."""
        def timed_wait(*args):
            before, begin = self.waited, time.perf_counter()
            wait(*args)
            if threading.current_thread() is threading.main_thread():
                # `before`: those of a wait within this wait count once
                self.waited = before + time.perf_counter() - begin

        return timed_wait

    def note_step(self, step, lr, loss, norm, asked, at_once):
        """A step was posted. Its numbers are tensors, the same on every rank; asked: how many ranks
        were asked to stop. A GPU's are read and printed one step late, so that the host can post
        the next step while the GPU computes, unless at_once. Sets `stopping` and `gave_up`."""
        scale = self.trainer.optimizer.numbers()["scale"]
        numbers = torch.stack([value.double() for value in (loss, norm, asked, scale)])
        self.unread.append((step, lr, self.world.start_read(numbers)))
        self.done = step + 1
        self.catch_up(unread=1 if self.is_cuda and not at_once else 0)
        if self.stopping:
            self.catch_up()

    def catch_up(self, unread=0):
        """Read and print all steps but the last `unread`."""
        while len(self.unread) > unread:
            step, lr, read = self.unread.popleft()
            loss, norm, asked, scale = read()  # waits for the device
            self.stopping |= asked > 0
            # A scale above 1 (float16) is halved after such a step, and may be the cause
            self.skipped = 0 if math.isfinite(norm) or scale > 1 else self.skipped + 1
            self.gave_up |= self.skipped == MAX_SKIPPED
            self.print_step(step, lr, loss, norm, scale)

    def print_step(self, step, lr, loss, norm, scale):
        cfg = self.cfg
        seconds = time.perf_counter() - self.since
        self.since = time.perf_counter()
        rate = cfg.batch_size * cfg.block_size / seconds
        more = {"scale": scale} if cfg.dtype == "float16" else {}
        line = (f"step {step:6d}  loss {loss:.4f}  norm {norm:.3f}  lr {lr:.2e}  "
                f"{1e3 * seconds:.0f} ms  {rate:,.0f} tokens/s")
        if not self.is_cuda and cfg.collectives == "ring":
            more["comm"] = self.waited / seconds
            line += f"  comm {more['comm']:.0%}"
        if self.is_cuda and self.trainer.dtype.itemsize == 2:
            peak = self.world.size * peak_flops(torch.cuda.get_device_name())
            flops = rate * self.trainer.config.flops_per_token(self.n_params)
            line += f"  mfu {flops / peak:.1%}" if peak else ""
        self.write(step=step, loss=loss, grad_norm=norm, lr=lr, ms=1e3 * seconds,
                   tokens_per_s=rate, **more)
        if step - self.first < 10 or step == cfg.steps - 1 or step % LOG_INTERVAL == 0:
            self.say(line)

    def note_validation(self, step, loss):
        """Print and write a validation's loss, per token and, if the data's meta.json says how long
        a token is, per byte."""
        bits = loss / math.log(2) / self.data.meta.get("bytes_per_token", math.nan)
        self.write(step=step, val_loss=loss, val_bits_per_byte=bits)
        line = f"step {step:6d}  validation loss {loss:.4f} nats per token"
        self.say(line + (f", {bits:.4f} bits per byte" if math.isfinite(bits) else ""))
        self.since = time.perf_counter()

    def note_checkpoint(self, step, folder):
        """A checkpoint was saved; None: none, because weights or states are not finite."""
        self.saved = folder or self.saved
        self.gave_up |= folder is None
        self.say(f"step {step:6d}  saved {folder or 'nothing: weights are not finite'}")
        self.since = time.perf_counter()

    def end(self):
        """Collective: print the last lines, and set ended_well."""
        self.catch_up()
        if self.gave_up:
            self.say(f"{program()}: the loss, the gradients' norm or a weight was not finite up to "
                     f"step {self.done - 1}; last good checkpoint: {self.saved or 'none'}; a lower "
                     "--lr may help", "stderr")
            return
        if self.stopping:
            self.say(f"stopped by a signal; --resume auto goes on from {self.saved}")
            self.ended_well = True
            return
        self.ended_well = replicas_agree(self.trainer)
        held = torch.tensor([held_bytes(self.trainer)], device=self.world.device)
        most, = self.world.read(all_reduce(held, self.world, maximum))
        self.say(f"weights, gradients and optimizer states: {most / 1e6:.2f} MB on the fullest rank"
                 f"\nreplicas {'agree' if self.ended_well else 'DISAGREE'}")


def grid(sizes):
    """The ranks as text: a row for each group of tensor ranks, with its places on the other axes
    (those of size 1 are left out). d: number of the data rank.
    {shard: 2, pp: 1, tp: 2} gives "  d=0  ranks  0  1" and "  d=1  ranks  2  3"."""
    lines = []
    for ranks in lay_out(sizes, ["tp"]):
        line = "  "
        for axis in ("dp", "pp", "cp"):
            mine = next(group for group in lay_out(sizes, [axis]) if ranks[0] in group)
            if len(mine) > 1:
                line += f"{axis[0]}={mine.index(ranks[0])} "
        lines.append(f"{line} ranks " + " ".join(f"{rank:2d}" for rank in ranks))
    return "\n".join(lines)


def open_metrics(path, first):
    """metrics.jsonl to append to. A run that begins anew (first = 0) puts an earlier run's file
    aside. One that goes on from step `first` removes the lines of the steps that it repeats, and
    what a crash has left behind the last whole line. The earlier run's validation of step `first`
    stays. (If this run validates there, too, the file has both: the later one counts.)"""
    if first == 0 and path.exists():
        put_aside(path)
    kept = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                # A validation of step `first` was before this step
                end = first + 1 if "val_loss" in record else first
                if record["step"] < end:
                    kept.append(line + "\n")
    path.write_text("".join(kept))
    return open(path, "a")


# ---- --watch ----


@contextmanager
def replaced(owner, name, function):
    """A context in which this function stands for the method owner.name."""
    usual = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, usual)


@contextmanager
def watched(mesh):
    """A context, given a list: each message that this rank sends in it, (time in seconds, sender,
    receiver, axis, who asked for it, shape, bytes). Messages of --collectives ring all pass
    Group.exchange."""
    sent = []
    exchange = Group.exchange

    def noted(group, send=None, dst=None, *args, **more):
        if send is not None and send.numel() > 0:
            sent.append((time.time(), mesh.rank, group.ranks[dst],
                         axis_of(group, mesh.sizes), asked_by(), [*send.shape],
                         send.numel() * send.element_size()))
        return exchange(group, send, dst, *args, **more)

    with replaced(Group, "exchange", noted):
        yield sent


def asked_by():
    """The collective that sends a message and the function that called it, read from the call
    stack: "all_reduce, ddp.py DDP.reduce"."""
    frame, collective = sys._getframe(2), "exchange"
    while Path(frame.f_code.co_filename).name == "collectives.py":
        frame, collective = frame.f_back, frame.f_code.co_name
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name).replace("<locals>.", "")
    return f"{collective}, {Path(frame.f_code.co_filename).name} {name}"


def axis_of(group, sizes):
    """The axes along which a group's ranks differ, named like train.py's flags: "tp", "dp+cp". The
    mesh splits --dp into three axes (DATA in mesh.py): ep alone, without the others, is "ep"."""
    names = group.name.replace("dp", "_".join(DATA)).split("_")  # such as shard_ep_cp, pp_ends
    if names == ["world"]:
        names = list(sizes)
    axes = [axis for axis in names if sizes.get(axis, 1) > 1]
    if "rep" in names or "shard" in names:
        axes = ["dp" if axis in DATA else axis for axis in axes]
    return "+".join(dict.fromkeys(axes))


def story(sent):
    """The lines of --watch, and the sums of each axis."""
    lines, times, nbytes = [], Counter(), Counter()
    begin = min((message[0] for message in sent), default=0)
    for seconds, src, dst, axis, what, shape, size in sorted(sent):
        size_text = "x".join(map(str, shape))
        lines.append(f"{1e3 * (seconds - begin):9.2f} ms  {src:2d} -> {dst:<2d}  {axis:6}  "
                     f"{what:52} {size_text:>12} {size:>10,} bytes")
        times[axis] += 1
        nbytes[axis] += size
    sums = [f"{axis}: {times[axis]:,} messages, {nbytes[axis]:,} bytes" for axis in sorted(times)]
    return "\n".join(lines + (sums or ["--watch: no messages in this step"]))


# ---- at the end: memory, and do replicas agree? ----


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
    own = {}  # {name of a weight and ranges of its slice: hash}
    for tag, weights in trainer.reducer.whole():
        content = weights.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        own[f"{tag.name} {tag.ranges}"] = hashlib.sha256(content).hexdigest()
    hashes = {}  # the same, with the set of all ranks' hashes
    for theirs in all_gather_values(own, trainer.mesh.world):
        for piece, digest in theirs.items():
            hashes.setdefault(piece, set()).add(digest)
    return all(len(different) == 1 for different in hashes.values())
