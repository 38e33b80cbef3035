"""Saves and loads checkpoints: any layout writes one, and any layout reads it.

    out/step-00000600/model.safetensors      weights, under nanoGPT's names and shapes
                      optimizer.safetensors  NAME.exp_avg, .exp_avg_sq;
                                             for 16-bit weights also .master
                      manifest.json          step, flags, loss scale; a checksum for each
                                             tensor; "number", which counts the checkpoints
                                             of --out in the order of writing, from 1

Every rank writes its own slices straight into the files, at the places that its tags give: no
gather, and no extra memory but one tensor's slice on its way from a GPU. Bytes per parameter with
AdamW: 2 + 12 for 16-bit weights, 4 + 8 for float32.

    python train.py --tp 2 --save-interval 100        python train.py --pp 4 --resume auto
"""

import fcntl
import json
import math
import os
import re
import sys
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path

import torch

from collectives import all_reduce
from data.foreign import (
    OBJECT,
    TEXT,
    YES_NO,
    Kind,
    read_json,
    require_fields,
    whole,
)
from model import UNTIED
from run import tensorfile
from run.config import LOCK, MANIFEST, is_scaling, require
from run.processes import all_gather_text
from run.signals import local_rank, note
from run.tensorfile import DAMAGED, DTYPES, CheckpointError, about, checksum
from shard import bounds
from sizes import LlamaConfig, config_from

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
EMBEDDING = "transformer.wte.weight"
FOLDER = re.compile(r"step-\d{8,}")  # the name of a checkpoint's folder, less .tmp or .old.tmp

# A checkpoint is complete or does not exist. Its folder has these names, in this order:
#
#     step-N.tmp       files are being written, the manifest last
#     step-N           complete: step-N.tmp renamed, once all of it is on the disk
#     step-N.old.tmp   an older step-N, moved aside because a new step-N.tmp takes its name (the run
#                      went back to an earlier checkpoint and came to step N again); then deleted
#
# A crash may come between the two renames, of step-N to step-N.old.tmp and of step-N.tmp to step-N.
# Then there is no step-N, and step-N.old.tmp still counts as a complete checkpoint.


@contextmanager
def together(world):
    """All ranks leave this block, or all raise the CheckpointError of the lowest rank that failed
    in the block. Call no collectives inside: the rank that failed would miss them."""
    failed = ""
    try:
        yield
    except CheckpointError as error:
        failed = str(error)
    for error in all_gather_text(failed, world):
        if error:
            raise CheckpointError(error)


# ---- the manifest ----


def seal(manifest):
    """CRC-32 of the manifest's content. It is stored in the manifest itself, under "seal"."""
    content = {key: value for key, value in manifest.items() if key != "seal"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


COUNT = whole(0, 2**53)
CRC = whole(0, 2**32)
SCALE = Kind("a number above 0, below 2^128",
             lambda value: type(value) is float and 0 < value < 2.0**128)
NEEDED = {"seal": CRC, "number": COUNT, "step": COUNT, "updates": COUNT, "good_steps": COUNT,
          "scale": SCALE, "data": TEXT, "model": OBJECT, "config": OBJECT, "checksums": OBJECT}


# Fields of GPTConfig and LlamaConfig
KINDS_OF_SIZES = {
    float: Kind("a number from 0", lambda value: type(value) is float and 0 <= value < math.inf),
    bool: YES_NO, str: Kind("a text", lambda value: type(value) is str)}


def sound_config(values):
    """The GPTConfig or LlamaConfig with these {name: value}. Raises one of DAMAGED unless each
    value is of its type and range, and fits the others."""
    config = config_from(values)
    for field in fields(config):
        # whole numbers from 0 where 0, the default, means none
        kind = whole(min(field.default, 1)) if field.type is int else KINDS_OF_SIZES[field.type]
        require_fields(vars(config), {field.name: kind})

    def fits(condition, name):
        require(condition, f"its {name} is {getattr(config, name)}, which does not fit its other "
                "sizes")

    if not getattr(config, "head_dim", 0):
        fits(config.n_embd % config.n_head == 0, "n_head")
    fits(config.n_experts == 0 or config.top_k <= config.n_experts, "top_k")
    if isinstance(config, LlamaConfig):
        fits(config.n_head % config.n_kv_head == 0, "n_kv_head")
        fits(config.hs % 2 == 0, "n_head")
        fits(not config.rope_scaling or is_scaling(config.rope_scaling), "rope_scaling")
    return config


def refuse_unsound(manifest):
    """Raise one of DAMAGED unless every value that is read is of its type and range, and the seal
    is right."""
    require_fields(manifest, NEEDED)
    require_fields(manifest["checksums"], {MODEL: OBJECT, OPTIMIZER: OBJECT})
    for sums in manifest["checksums"].values():
        require_fields(sums, dict.fromkeys(sums, CRC))
    sound_config(manifest["model"])
    require(manifest["seal"] == seal(manifest), "the checksum differs")


def read_manifest(folder):
    """The manifest of a checkpoint. CheckpointError if it is missing or damaged."""
    path = Path(folder, MANIFEST)
    try:
        manifest = read_json(path)
        refuse_unsound(manifest)
    except DAMAGED as error:
        what = str(error).removeprefix(f"{path}: ")
        raise CheckpointError(f"{path}: damaged ({what}); take another checkpoint") from None
    return manifest


def refuse_other(folder, manifest, config):
    """CheckpointError unless the checkpoint is of this GPTConfig or LlamaConfig."""
    theirs = config_from(manifest["model"])
    if type(theirs) is not type(config):
        raise CheckpointError(f"{folder}: has a {type(theirs).__name__.removesuffix('Config')}, "
                              f"this run a {type(config).__name__.removesuffix('Config')}")
    for name, found in asdict(theirs).items():
        wanted = getattr(config, name)
        if found != wanted:
            raise CheckpointError(f"{folder}: its {name} is {found}, this run's is {wanted}")


# ---- the checkpoints in a run's folder (--out) ----


@cache
def warn(folder, error):
    """Print once that a damaged checkpoint is skipped. A step-N stays on the disk; prune() deletes
    a step-N.old.tmp."""
    if local_rank() == 0:
        note(f"{folder} skipped: {error}")


def finished(out):
    """The folders in `out` that have a manifest, except a step-N.old.tmp beside its new step-N."""
    found = set()
    for folder in Path(out).glob("step-*"):
        name = folder.name.removesuffix(".old.tmp")
        replaced = name != folder.name and Path(out, name).exists()
        if FOLDER.fullmatch(name) and not replaced and (folder / MANIFEST).exists():
            found.add(folder)
    return found


def complete(out):
    """[(number, folder)] of the complete checkpoints in `out`, in the order they were written. If a
    run saves there meanwhile, look again."""
    folders = None
    while folders != finished(out):
        folders = finished(out)
        found = []
        damaged = {}  # folder -> what is wrong with it
        for folder in folders:
            try:
                for file in (MODEL, OPTIMIZER):
                    tensorfile.read_header(folder / file)  # raises if the file is cut off
                found.append((read_manifest(folder)["number"], folder))
            except CheckpointError as error:
                damaged[folder] = str(error)
    for folder, error in sorted(damaged.items()):
        warn(folder, error)
    return sorted(found)


def newest(out):
    """The folder of the last complete checkpoint that was written to `out`, or None."""
    return max(complete(out), default=(0, None))[1]


def find(path):
    """The checkpoint at `path`: that folder itself, or the newest in it. CheckpointError if there
    is none."""
    folder = Path(path) if Path(path, MANIFEST).exists() else newest(path)
    if folder is None:
        raise CheckpointError(f"{path}: no complete checkpoint there")
    return folder


def remove(folder):
    """Delete a checkpoint's three files, and its folder if nothing else is in it. If the folder is
    a link, delete nothing."""
    if folder.is_symlink():
        return
    # The manifest first: a checkpoint that is deleted half-way is not complete
    for name in (MANIFEST, MODEL, OPTIMIZER):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # not empty
        folder.rmdir()


def prune(out):
    """Delete the remains of interrupted saves. All complete checkpoints stay."""
    whole = [folder for _, folder in complete(out)]
    for folder in Path(out).glob("step-*"):
        name = folder.name.removesuffix(".tmp").removesuffix(".old")
        unfinished = folder.suffix == ".tmp" or not (folder / MANIFEST).exists()
        if FOLDER.fullmatch(name) and unfinished and folder not in whole:
            remove(folder)


# ---- from this rank's slices to the files, and back ----


def contents_of_files(trainer, folder):
    """[(file, dtype's code in the file, {tensor: full shape})] of the whole model, the same on
    every rank."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    shapes = dict(trainer.shapes)
    shapes.setdefault(UNTIED, shapes[EMBEDDING])  # a tied matrix is stored under both of its names
    sixteen_bits = trainer.dtype.itemsize == 2
    states = {f"{name}.{kind}": trainer.shapes[name] for name in trainer.trained
              for kind in trainer.optimizer.named_states()}
    return [(Path(folder, MODEL), codes[trainer.dtype], shapes),
            (Path(folder, OPTIMIZER), "F32" if sixteen_bits else codes[trainer.dtype], states)]


def slices(trainer):
    """Yields (tag, start, {tensor's name: this rank's values}) of each parameter. The tensors: the
    weight and, unless it is frozen, the optimizer's states. Under ZeRO the values may be none.

    start: index of the piece's first element in the slice that the tag describes; above 0 where
    ZeRO has cut the slice."""
    reducer = trainer.reducer
    pieces = [*zip(reducer.weights, reducer.tags, reducer.starts, strict=True), *reducer.frozen]
    states = trainer.optimizer.named_states()
    for i, (weights, tag, start) in enumerate(pieces):
        tensors = {tag.name: weights}
        if tag.name == EMBEDDING and UNTIED not in trainer.shapes:
            tensors[UNTIED] = weights
        if i < len(reducer.weights):  # else frozen
            for kind, values in states.items():
                tensors[f"{tag.name}.{kind}"] = values[i]
        yield tag, start, {name: values.view(-1) for name, values in tensors.items()}


def transfer(trainer, entries, saving):
    """Write this rank's slices into the files, or read them from there. entries: {tensor: its place
    in a file, an Entry}. If several ranks hold the same element, one of them writes it, and all of
    them read it. (Frozen weights under ZeRO: each replica writes the same bytes.)"""
    for tag, start, tensors in slices(trainer):
        if saving and not tag.first:
            continue  # another rank of this replica writes this slice
        for name, values in tensors.items():
            first, stop = 0, len(values)
            if saving and not trainer.reducer.sharded:  # each replica holds all: it writes a part
                first, stop = bounds(len(values), tag.sum_over[0])
            transfer_runs(entries[name], tag, start + first, values[first:stop], saving)


def transfer_runs(entry, tag, start, values, saving):
    """Write `values`, the elements from index `start` on of the slice that the tag describes, to
    their places in the file of the full tensor; or read them from there.

    Full shape (2, 6), columns 1 and 2: the slice is elements 1 2 7 8 of the full tensor. With
    start = 1 three values go to elements 2 7 8, in two runs (in_full, in_values, length): (2, 0, 1)
    and (7, 1, 2)."""
    buffer = values.cpu()  # on a CPU: `values` itself, no copy
    data = memoryview(buffer.view(torch.uint8).numpy())
    width = buffer.element_size()
    with about(entry.path, entry.name), open(entry.path, "r+b" if saving else "rb") as file:
        for in_full, in_values, length in tag.runs(start, start + len(values)):
            file.seek(entry.begin + in_full * width)
            run = data[in_values * width : (in_values + length) * width]
            moved = file.write(run) if saving else file.readinto(run)
            if moved < len(run):
                raise OSError(0, "the file ends early")
    if not saving:
        values.copy_(buffer)


# ---- save ----


def sync(path):
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def share_checksums(entries, world):
    """Collective: {tensor: CRC-32} of all tensors in the files. Each rank reads its share."""
    sums = torch.zeros(len(entries), dtype=torch.long, device=world.device)
    with together(world):
        for i, entry in list(enumerate(entries.values()))[world.rank :: world.size]:
            sums[i] = checksum(entry)
    # every other rank has 0 where this rank has a checksum
    return dict(zip(entries, world.read(all_reduce(sums, world)), strict=True))


def put_in_place(folder, final, manifest):
    """Write the manifest and, once all files are on the disk, rename the folder."""
    (folder / MANIFEST).write_text(json.dumps({**manifest, "seal": seal(manifest)}, indent=1))
    for path in (*folder.iterdir(), folder):
        sync(path)
    if final.exists():
        os.rename(final, f"{final}.old.tmp")
    os.rename(folder, final)
    sync(final.parent)  # before step-N.old.tmp is deleted


def numbers_of(trainer):
    """{name: number} of the optimizer, for the manifest."""
    numbers = {name: value.item() for name, value in trainer.optimizer.numbers().items()}
    return {name: value if name == "scale" else int(value) for name, value in numbers.items()}


def is_finite(trainer):
    """Are all weights and moments of this rank finite?"""
    states = trainer.optimizer.named_states().values()
    frozen = [weights for weights, _, _ in trainer.reducer.frozen]
    held = [*trainer.reducer.weights, *frozen, *(values for kind in states for values in kind)]
    held = [values for values in held if values.numel()]
    # the largest element of each: makes no copy. An empty list, or an empty tensor, has none
    norms = [norm.double() for norm in torch._foreach_norm(held, math.inf)] if held else []
    return not norms or bool(torch.stack(norms).isfinite().all())  # one wait for the device


@torch.no_grad()
def save(trainer, step, data_folder=""):
    """Collective: write the state after `step` steps into cfg.out and return its folder, or None,
    with nothing written, if weights or moments are not finite. If a rank cannot write, every rank
    raises CheckpointError; earlier checkpoints are untouched; the next save removes the unfinished
    one."""
    cfg = trainer.cfg
    world = trainer.mesh.world
    if "False" in all_gather_text(str(is_finite(trainer)), world):
        return None
    final = Path(cfg.out, f"step-{step:08d}")
    folder = Path(f"{final}.tmp")
    files = contents_of_files(trainer, folder)
    heads = {}  # file -> its first bytes
    entries = {}  # tensor -> its Entry, of both files
    for path, code, shapes in files:
        heads[path], found = tensorfile.make_header(shapes, code, path)
        entries |= found

    # rank 0 makes the files, all ranks fill them, rank 0 makes them a checkpoint
    with together(world), about(folder):
        if world.rank == 0:
            prune(cfg.out)
            folder.mkdir()
            for path, head in heads.items():
                path.write_bytes(head)
    with together(world):
        transfer(trainer, entries, saving=True)
    sums = share_checksums(entries, world)
    with together(world), about(folder):
        if world.rank == 0:
            put_in_place(folder, final, {
                # counts checkpoints in the order of writing; a run may go back to an earlier step
                "number": 1 + max(complete(cfg.out), default=(0,))[0],
                "step": step,
                # updates: steps that were not skipped. The others: float16's loss scale
                **{"scale": 1.0, "good_steps": 0, **numbers_of(trainer)},
                "model": asdict(trainer.model_config),
                "config": asdict(cfg),
                "data": str(Path(data_folder).resolve()),
                "checksums": {path.name: {name: sums[name] for name in shapes}
                              for path, _, shapes in files}})
            prune(cfg.out)
    return final


# ---- load ----


def refuse_unfit(trainer, folder, manifest):
    """CheckpointError if this run cannot go on from the checkpoint of this manifest."""
    cfg = trainer.cfg
    refuse_other(folder, manifest, trainer.model_config)
    # unsaved: a reducer's state that differs from data rank to data rank (extras/forks/diloco.py)
    unsaved = getattr(trainer.reducer, "unsaved", "")
    if unsaved:
        raise CheckpointError(f"{folder}: has no {unsaved}, because each data rank has its own; "
                              "--init-from takes its weights alone")
    if manifest["step"] > cfg.steps:
        raise CheckpointError(f"{folder}: is at step {manifest['step']}, past --steps {cfg.steps}")


@torch.no_grad()
def load(trainer, folder):
    """Collective: give every rank its slices of a checkpoint of any layout; returns the number of
    steps done. CheckpointError, on every rank and before any state is changed, if the checkpoint is
    damaged, past --steps or of another model or dtype. Each rank checks its share of the
    checksums. If a file cannot be read after this check: CheckpointError, and some states may
    have changed."""
    world = trainer.mesh.world
    entries = {}  # tensor -> its Entry, of both files
    with together(world):
        manifest = read_manifest(folder)
        refuse_unfit(trainer, folder, manifest)
        for path, code, shapes in contents_of_files(trainer, folder):
            entries |= tensorfile.expect(path, tensorfile.read_header(path), shapes, [code])
        for entry in list(entries.values())[world.rank :: world.size]:
            # -1 equals no CRC-32: a checksum that is missing is an error
            checksum(entry, manifest["checksums"][entry.path.name].get(entry.name, -1))
    with together(world):
        transfer(trainer, entries, saving=False)
    for name, value in trainer.optimizer.numbers().items():
        value.fill_(manifest[name])
    trainer.reducer.publish()  # ZeRO-1 and 2: each rank has read its shard of the weights
    return manifest["step"]


# ---- before the first step: do all ranks have the same flags, data, files and code? Does no other
# ---- run write to --out?


def claim(out, patience):
    """Lock `out` until this process ends, and leave random bytes in its LOCK file for the other
    ranks to compare. CheckpointError if another run still writes there after `patience` seconds: a
    run that was killed may take a moment to end."""
    path = Path(out, LOCK)
    with about(path):
        # never closed, because closing it would end the lock
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        wait_for_lock(file, out, patience)
        os.truncate(file, 0)
        os.write(file, os.urandom(8))
        os.fsync(file)


def wait_for_lock(file, out, patience):
    """Return once this process has the lock on an open file."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # another process has it
            if time.monotonic() > deadline:
                raise CheckpointError(f"--out {out}: another run writes there; name another "
                                      "folder") from None
            time.sleep(0.1)
        except OSError:  # a file system without locks: go on without
            return


def digest(*path):
    """CRC-32 of a file's content; None if there is no such file."""
    path = Path(*path)
    return zlib.crc32(path.read_bytes()) if path.is_file() else None


def sources():
    """The files of the project (its root and the folders in it) that this process has imported."""
    root = Path(__file__).parent.parent
    found = set()
    for module in list(sys.modules.values()):
        file = Path(getattr(module, "__file__", None) or "/")
        if root in (file.parent, file.parent.parent, file.parent.parent.parent):
            found.add(file)
    return sorted(found)


def agree(cfg, data, world):
    """Collective: lock --out, look up the checkpoint of --resume, and compare every rank with rank
    0. CheckpointError, on every rank, if --out is taken or a rank differs."""
    with together(world):
        if world.rank == 0:
            claim(cfg.out, min(5, cfg.timeout / 2))
            # Look for the checkpoint only now that --out is locked: a run that held the lock before
            # may have saved once more
            if cfg.resume == "auto":
                cfg.resume = str(newest(cfg.out) or "no")
            elif cfg.resume != "no":
                with about(cfg.resume):
                    cfg.resume = str(find(cfg.resume))
    cfg.resume = all_gather_text(cfg.resume, world)[0]
    setup = {"flags": repr(cfg),
             # a rank that does not share rank 0's --out finds no LOCK there, or another one
             f"files in --out {cfg.out}": digest(cfg.out, LOCK),
             f"files in --resume {cfg.resume}": digest(cfg.resume, MANIFEST),
             f"data in {cfg.data}": data.fingerprint().hex(),
             "code": [digest(file) for file in sources()]}
    texts = all_gather_text(json.dumps(list(setup.values())), world)
    of_rank_0, *of_others = map(json.loads, texts)
    for rank, values in enumerate(of_others, start=1):
        for name, found, wanted in zip(setup, values, of_rank_0, strict=True):
            if found != wanted:
                raise CheckpointError(f"rank {rank} has other {name} than rank 0; all need the "
                                      "same")
