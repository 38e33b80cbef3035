"""Writes a dump (extras/doctor/dump.py): trains two steps and writes what one process would write.

    python -m extras.doctor.record FOLDER                     one process
    python -m extras.doctor.record FOLDER --tp 2 --pp 2       starts four ranks, and waits for them
    torchrun -m extras.doctor.record FOLDER --tp 2 --pp 2     the same

FOLDER is new, or empty, or holds a dump, which is replaced. The flags are train.py's, but for the
number of steps: one of the warm-up, then one at the full rate. No checkpoint is written.

A Recorder stands in the place of the optimizer, and writes the gradients that it gets and the
weights before and after. Each rank writes its own slices straight into the files, like in
run/checkpoint.py. Where ranks hold copies of a slice, the first of these ranks writes it, so that a
file is never a mixture. The names of tensors whose copies differ are noted.
"""

import json
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path

from run.config import check, fail, given, read_command_line, require
from run.launch import start

# Before torch is imported, like in train.py. The first argument is FOLDER
if __name__ == "__main__":
    asks_for_help = sys.argv[1:] in ([], ["-h"], ["--help"])
    start(__doc__, ["--help"] if asks_for_help else sys.argv[2:])

import torch

import train
from data.batches import Data
from extras.doctor.dump import DUMP, DUMP_BEGUN, DUMP_MARK, DUMP_TENSORS
from model import generator_of, initial_value
from optimizer import learning_rate
from run import signals, tensorfile
from run.checkpoint import together, transfer_runs
from run.copies import Copies, whole_slices
from run.files import refuse_same
from run.processes import joined
from run.tensorfile import DTYPES, CheckpointError, about
from shard import Tag

# Flags of train.py that are refused: a dump saves, resumes, logs, traces and watches nothing, and
# drops nothing at random
NOT_IN_DUMP = ("save_interval", "keep", "resume", "metrics", "trace", "watch", "dropout")
LAYOUT = ("dp", "ep", "pp", "cp", "tp", "sp", "cp_attention", "zero", "schedule", "chunks",
          "microbatches")  # the flags that are a dump's layout
EPS = {"adamw": 1e-8, "lamb": 1e-6}  # epsilon of the optimizers that divide by a root


def random_value(name, shape, config, seed):
    """initial_value, but N(0, 0.1) is added to biases and gains: a bias of 0 would hide until the
    second step that the bias is added T times."""
    value = initial_value(name, shape, config, seed)
    if name.endswith("bias") or ".ln_" in name:
        noise = torch.empty(shape, dtype=torch.float32)
        value += noise.normal_(0.0, 0.1, generator=generator_of(seed, name))
    return value


# ---- the files ----


def code_of(dtype):
    """A dtype's code in a safetensors file, such as "F32"."""
    return next(code for code, known in DTYPES.items() if known == dtype)


class Writer:
    """Writes the files of a dump. Making a Writer is a collective, and so are write_tokens,
    write_gradients, write_weights and end: if a rank cannot write, every rank raises
    CheckpointError.

    folder: its path; refuse_wrong_folder has said that it may be written. shapes: {canonical name:
    full shape}, the same on all ranks. dtype: that of the weights."""

    def __init__(self, folder, cfg, mesh, model_config, shapes, dtype):
        self.folder = Path(folder)
        self.cfg = cfg
        self.mesh = mesh
        self.model_config = model_config
        self.shapes = shapes
        self.dtype = dtype
        # dtype of gradients and masters in the files
        self.wide = torch.promote_types(dtype, torch.float32)
        # dtype in which the run sums gradients; it is written into dump.json only
        self.grad_dtype = cfg.dtype if cfg.grad_dtype == "same" else cfg.grad_dtype
        self.steps = [{}, {}]  # loss, norm, scale, lr and names of differing copies, by step
        with together(mesh.world), about(self.folder):
            if mesh.rank == 0:
                self.begin()

    def begin(self):
        """On rank 0: make the folder, or empty it if it holds a dump."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / DUMP_BEGUN).write_text(DUMP_MARK)
        for name in (DUMP, *DUMP_TENSORS):
            (self.folder / name).unlink(missing_ok=True)

    @torch.no_grad()
    def write_tensors(self, file, dtype, shapes, held):
        """Write one file. held: an iterator of (tag, this rank's whole slice), which may call
        collectives. The first of the ranks that hold the same slice writes it. Returns the names of
        tensors whose copies differ."""
        path = self.folder / f"{file}.safetensors"
        head, entries = tensorfile.make_header(shapes, code_of(dtype), path)
        with together(self.mesh.world), about(path):
            if self.mesh.rank == 0:
                path.write_bytes(head)
        copies = Copies()
        failed = None  # this rank's first error. The rank goes on: others wait for its messages
        for tag, values in held:
            values = values.detach().cpu().flatten().to(dtype)
            copies.add(tag, values)
            # Is this the first rank with this slice in the first replica?
            is_writer = tag.first and tag.sum_over[0].rank == 0
            if failed is None and is_writer:
                try:
                    transfer_runs(entries[tag.name], tag, start=0, values=values, saving=True)
                except CheckpointError as error:
                    failed = error
            del values  # free it before the next is made
        with together(self.mesh.world):
            if failed is not None:
                raise failed
        return copies.differing([*shapes], self.mesh.world)

    def write_tokens(self, number, batches):
        """batches: [(ids, targets, number of the first sequence)] of this rank's microbatches;
        ids and targets: (B, S)."""
        index, n_data_ranks = self.mesh.place("dp")
        replica = self.mesh.group("pp", "cp", "tp")  # its ranks have the same tokens
        ids, targets, _ = zip(*batches, strict=True)
        both = torch.stack(ids), torch.stack(targets)  # (m, B, S) each
        shape = torch.Size((n_data_ranks, *both[0].shape))
        # Tokens are not summed. sum_over[0] only names the ranks that hold the same tokens; the
        # first of these ranks writes them (write_tensors)
        held = [(Tag(name, shape, 0, ((index, index + 1),), sum_over=(replica,)), tensor)
                for name, tensor in zip(("ids", "targets"), both, strict=True)]
        shapes = dict.fromkeys(("ids", "targets"), shape)
        self.write_tensors(f"tokens-{number}", torch.int64, shapes, held)

    def write_gradients(self, number, held):
        differ = self.write_tensors(f"gradients-{number}", self.wide, self.shapes, held)
        self.steps[number - 1]["gradients_differ"] = differ

    def write_weights(self, number, held, masters):
        """held, masters: as in write_tensors. Masters are written if the weights have 16 bits;
        else the weights are the masters."""
        differ = self.write_tensors(f"weights-{number}", self.dtype, self.shapes, held)
        if number > 0:
            self.steps[number - 1]["weights_differ"] = differ
        if self.wide != self.dtype:
            self.write_tensors(f"masters-{number}", self.wide, self.shapes, masters)

    def write_numbers(self, number, loss, norm, scale):
        self.steps[number - 1].update(loss=loss, norm=norm, scale=scale,
                                      lr=learning_rate(self.cfg, number - 1))

    def end(self):
        """Write dump.json, which makes the dump complete."""
        cfg = self.cfg
        content = {"format": 1,
                   "names": "nanogpt",
                   "model": asdict(self.model_config),
                   "dtype": cfg.dtype,
                   "grad_dtype": self.grad_dtype,
                   "layout": {name: getattr(cfg, name) for name in LAYOUT},
                   "loss": "mean",
                   "optimizer": {"name": cfg.optimizer, "beta1": cfg.beta1, "beta2": cfg.beta2,
                                 "eps": EPS.get(cfg.optimizer, 0.0),
                                 "weight_decay": cfg.weight_decay, "grad_clip": cfg.grad_clip},
                   "balance": cfg.balance if cfg.experts else 0.0,
                   "steps": self.steps}
        begun = self.folder / DUMP_BEGUN
        with together(self.mesh.world), about(begun):
            if self.mesh.rank == 0:
                begun.write_text(json.dumps(content))
                begun.rename(self.folder / DUMP)


# ---- two steps ----


class Recorder:
    """Has the members of an optimizer that Trainer.step calls (train.py), and calls those of the
    trainer's optimizer, which it replaces."""

    def __init__(self, trainer, writer):
        """writer: a Writer, or an object with its methods."""
        self.trainer = trainer
        self.optimizer = trainer.optimizer
        self.writer = writer
        self.number = 0  # steps begun
        trainer.optimizer = self
        self.write_weights()

    def square(self, grads):
        return self.optimizer.square(grads)

    def numbers(self):
        return self.optimizer.numbers()

    def step(self, grads, norm, lr):
        self.number += 1
        scale = self.scale()  # before the step, which may change the scale

        def unscaled(held):
            tag, grad = held
            return tag, grad.to(self.writer.wide).div_(scale)

        # map(), because a loop's variable would keep a slice while the next is made
        slices = map(unscaled, whole_slices(self.trainer.reducer, grads))
        self.writer.write_gradients(self.number, slices)
        self.optimizer.step(grads, norm, lr)

    def scale(self):
        """The loss scale, a number; 1 but for float16."""
        return float(self.numbers().get("scale", 1.0))

    def write_weights(self):
        """Write the weights as they are now."""
        reducer = self.trainer.reducer
        masters = self.optimizer.named_states().get("master", reducer.weights)
        self.writer.write_weights(self.number, reducer.whole(), whole_slices(reducer, masters))


def write_run(trainer, data, folder):
    """Collective: train two steps, and write their dump into the folder. trainer: a Trainer of
    train.py, with initial values of random_value. Held beside the training: one tensor's slice at a
    time."""
    cfg = trainer.cfg
    mesh = trainer.mesh
    writer = Writer(folder, cfg, mesh, trainer.model_config, trainer.shapes, trainer.dtype)
    recorder = Recorder(trainer, writer)
    for number in (1, 2):
        batches = data.training(cfg, number - 1, mesh)
        writer.write_tokens(number, batches)
        scale = recorder.scale()
        norm, sums = trainer.step(batches, learning_rate(cfg, number - 1))
        loss, norm = mesh.world.read(torch.stack([sums[0], norm]))
        writer.write_numbers(number, loss, norm, scale)
        recorder.write_weights()
    writer.end()


# ---- the command ----


def refuse_wrong_flags(cfg):
    """ValueError for a flag of NOT_IN_DUMP."""
    for f in fields(cfg):
        require(f.name not in NOT_IN_DUMP or getattr(cfg, f.name) == f.default,
                f"a dump takes no --{f.name.replace('_', '-')}; leave it out")


def begins_like_ours(path):
    """Does a file begin with DUMP_MARK? (A crash may have cut it off within the mark.)"""
    with open(path, "rb") as file:
        return DUMP_MARK.encode().startswith(file.read(len(DUMP_MARK)))


def holds_a_dump(folder):
    """Does the folder hold a dump, complete or begun, and nothing else?"""
    paths = [*Path(folder).iterdir()]
    marked = [path for path in paths if path.name in (DUMP, DUMP_BEGUN)]
    return (bool(marked) and all(path.is_file() for path in paths)
            and {path.name for path in paths} <= {DUMP, DUMP_BEGUN, *DUMP_TENSORS}
            and all(begins_like_ours(path) for path in marked))


def refuse_wrong_folder(folder, cfg):
    """ValueError unless the folder is new, or empty, or holds a dump, which is none of the run's
    inputs. OSError if it cannot be read."""
    require(not folder.startswith("-"), f"name a folder before {folder}")
    if os.path.lexists(folder) and any(Path(folder).iterdir()):
        require(holds_a_dump(folder), f"{folder} holds something else than a dump; name another "
                "folder")
    outputs = [(f"a dump in {folder}", Path(folder, name))
               for name in (DUMP, DUMP_BEGUN, *DUMP_TENSORS)]
    inputs = [(given(cfg, "init_from"), cfg.init_from)] if cfg.init_from else []
    refuse_same(outputs, inputs, cfg.out)


def main():
    folder, *flags = sys.argv[1:]
    cfg, world, _ = read_command_line(__doc__, flags)  # as start() did
    # Two steps, whatever the flags say: one of the warm-up, one at the full rate
    cfg.steps, cfg.warmup_steps, cfg.warmup_tokens = 2, 1, 0
    try:
        refuse_wrong_flags(cfg)
        refuse_wrong_folder(folder, cfg)
        check(cfg, world)
        data = Data(cfg, signals.local_rank())
    except (ValueError, OSError) as error:
        fail(error)
    with joined(cfg, world) as device:
        signals.end_on_stop("before the dump was complete")
        mesh = train.choose(cfg).Mesh(device, cfg.timeout, dp=cfg.dp, pp=cfg.pp, cp=cfg.cp,
                                      tp=cfg.tp, ep=cfg.ep, shard=cfg.shard)
        write_run(train.Trainer(cfg, mesh, data.vocab_size, random_value), data, folder)
        if mesh.rank == 0:
            print(f"dump of two steps in {folder}", flush=True)


if __name__ == "__main__":
    main()
