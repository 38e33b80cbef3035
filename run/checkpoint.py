"""Checkpoints: any layout writes one, and any layout reads it.

    out/step-00000600/model.safetensors      weights, under nanoGPT's names and shapes
                      optimizer.safetensors  NAME.exp_avg, .exp_avg_sq; 16-bit weights: .master
                      manifest.json          step, flags, sizes of the model, loss scale

A safetensors file is a JSON header and then the data:

    8 bytes       length of the header, little-endian
    header        {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    data          each tensor's elements, row after row; offsets count from here

The header follows from names, shapes and dtype. So every rank knows, without a message, where each
element of the full model lies in the file, and writes or reads its own slices there, as its tags
say (Tag.runs in shard.py). Nothing is gathered. (ZeRO writes its piece of a slice and reads its
pieces of the states; of a weight it reads the whole slice, then keeps its piece.)

All files are written into step-N.tmp. Once they are on the disk, the folder is renamed to step-N,
and only then it is a checkpoint, which is never deleted: a step-N that is written again (the run
went back) moves the old one aside, to step-N.old-1.

    python train.py --tp 2 --save-interval 100        python train.py --pp 4 --resume auto
"""

import fcntl
import json
import math
import os
import shutil
from collections import namedtuple
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path

import torch

from collectives import all_gather, all_reduce, maximum
from data.files import open_file, read_json
from experts import on_meta, shapes_of
from model import UNTIED
from run.flags import in_words, say
from shard import bounds
from sizes import config_from

MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"
EMBEDDING = "transformer.wte.weight"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses a longer one
# A tensor of a file: begin and end count bytes from the start of the file
Entry = namedtuple("Entry", "path name dtype shape begin end")


class CheckpointError(ValueError):
    """A file or a folder cannot be used: one line that names it and, where known, the tensor."""


@contextmanager
def about(path, tensor=""):
    """Re-raise an OSError or ValueError of this block as a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        line = in_words(error)
        # It may name the file, or a file in the folder `path`
        if not getattr(error, "filename", None) and not line.startswith(str(path)):
            line = f"{path}, tensor {tensor}: {line}" if tensor else f"{path}: {line}"
        raise CheckpointError(line) from None


# ---- safetensors ----


def make_header(shapes, code):
    """(a file's bytes before its data, the file's size) for {name: shape}: tensors of one dtype,
    side by side in this order."""
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    head = len(text).to_bytes(8, "little") + text
    return head, len(head) + end


def read_header(path):
    """{name: Entry} of a safetensors file. CheckpointError if it is damaged, or shorter than its
    header says."""
    with about(path), open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(size, MAX_HEADER) else b""
    try:
        return entries_of(path, json.loads(text), 8 + length, size)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: not a safetensors file, or its header is damaged") from None


def entries_of(path, header, start, size):
    """{name: Entry} of a header, for data that begins at byte `start` of a file of `size` bytes."""
    entries = {}
    last = start
    header.pop("__metadata__", None)
    for name, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (start + offset for offset in value["data_offsets"])
        shape, code = torch.Size(value["shape"]), value["dtype"]
        if code in DTYPES and end - begin != shape.numel() * DTYPES[code].itemsize:
            raise CheckpointError(f"{path}, tensor {name}: {end - begin} bytes for {[*shape]}")
        if begin < last:
            raise CheckpointError(f"{path}, tensor {name}: overlaps another one")
        if end > size:
            raise CheckpointError(f"{path}, tensor {name}: cut off at the end of the file")
        last = end
        entries[name] = Entry(path, name, code, shape, begin, end)
    return entries


def expect(path, entries, shapes, codes=tuple(DTYPES)):
    """CheckpointError unless {name: shape} all have an Entry, with one of these dtypes."""
    for name, shape in shapes.items():
        if name not in entries:
            raise CheckpointError(f"{path}, tensor {name}: missing")
        found = entries[name]
        if found.shape != torch.Size(shape) or found.dtype not in codes:
            raise CheckpointError(f"{path}, tensor {name}: {found.dtype} {[*found.shape]}, not "
                                  f"{' or '.join(codes)} {[*shape]}")


def read_tensor(entry):
    """The whole tensor of an Entry, on the CPU."""
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    with about(entry.path, entry.name), open_file(entry.path) as file:
        file.seek(entry.begin)
        if file.readinto(tensor.flatten().view(torch.uint8).numpy()) < tensor.nbytes:
            raise ValueError("the file ends early")
    return tensor


def runs_in_file(entry, tag, start, values):
    """Where `values`, the elements from index `start` on of the slice that the tag describes, lie
    in the file of the full tensor. Yields (place in the file, view of the bytes in memory) of each
    contiguous run. `values` is on the CPU.

    Full shape (2, 6), columns 1 and 2: the slice is elements 1 2 7 8 of the full tensor. With
    start = 1 three values lie at elements 2 7 8: two runs, of one and of two values."""
    data = memoryview(values.view(torch.uint8).numpy())
    width = values.element_size()
    for in_full, in_values, length in tag.runs(start, start + len(values)):
        run = data[in_values * width : (in_values + length) * width]
        yield entry.begin + in_full * width, run


def write_slice(entry, tag, start, values):
    with about(entry.path, entry.name), open(entry.path, "r+b") as file:
        for place, run in runs_in_file(entry, tag, start, values.cpu()):
            file.seek(place)
            file.write(run)


def read_slice(entry, tag, start, values):
    buffer = torch.empty_like(values, device="cpu")
    with about(entry.path, entry.name), open(entry.path, "rb") as file:
        for place, run in runs_in_file(entry, tag, start, buffer):
            file.seek(place)
            if file.readinto(run) < len(run):
                raise ValueError("the file ends early")
    values.copy_(buffer)


# ---- the ranks agree ----


def all_gather_text(text, world):
    """Collective: the list of every rank's text. (A text may hold a path, whose bytes need not be
    UTF-8: Python's str has surrogates for these bytes.)"""
    data = bytearray(text.encode(errors="surrogatepass") + b"\0")
    length = torch.tensor([len(data)], device=world.device)
    longest, = world.read(all_reduce(length, world, maximum))
    texts = torch.empty(world.size, longest, dtype=torch.uint8, device=world.device)
    texts[world.rank] = torch.frombuffer(data.ljust(longest, b"\0"), dtype=torch.uint8)
    return [bytes(row).decode(errors="surrogatepass").rstrip("\0")
            for row in world.read(all_gather(texts, world))]


@contextmanager
def together(world):
    """All ranks leave this block, or all raise the CheckpointError of the lowest rank that failed
    in it. Call no collectives inside: the rank that failed would miss them."""
    failed = ""
    try:
        yield
    except CheckpointError as error:
        failed = str(error)
    for error in all_gather_text(failed, world):
        if error:
            raise CheckpointError(error)


# ---- which checkpoints there are ----


def read_manifest(folder):
    """The manifest of a checkpoint. CheckpointError if it is missing or damaged."""
    path = Path(folder, MANIFEST)
    with about(path):
        manifest = read_json(path)
        step, model = manifest.get("step"), manifest.get("model")
        if type(step) is not int or step < 0 or type(model) is not dict:
            raise ValueError("damaged: it has no step, or no model")
        try:
            config = config_from(model)
        except TypeError as error:
            raise ValueError(f"damaged: {error}") from None
        for f in fields(config):
            if type(getattr(config, f.name)) is not f.type:
                raise ValueError(f"damaged, no model has its sizes: {f.name} is "
                                 f"{getattr(config, f.name)!r:.40}")
        for name in ("number", "updates", "good_steps", "scale"):
            value = manifest.get(name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"damaged: its {name} is {value!r:.40}")
    return manifest


def complete(out):
    """[(number, folder)] of the checkpoints in `out` that can be read, in the order in which they
    were written; says which ones cannot."""
    found = []
    for folder in sorted(Path(out).glob("step-*")):
        if folder.suffix == ".tmp":
            continue  # a save that was interrupted
        try:
            for file in (MODEL, OPTIMIZER):
                read_header(folder / file)
            found.append((read_manifest(folder)["number"], folder))
        except CheckpointError as error:
            say(f"{folder} skipped: {error}")
    return sorted(found)


def last_number(out):
    """The largest number of a checkpoint in `out`: numbers tell the order of writing, which a clock
    that was set back would not."""
    numbers = [0]
    for path in out.glob(f"step-*/{MANIFEST}"):
        with suppress(CheckpointError):
            numbers.append(read_manifest(path.parent)["number"])
    return max(numbers)


def find(path):
    """The checkpoint at `path`: this folder itself, or the newest in it. CheckpointError if there
    is none."""
    with about(path):
        if Path(path, MANIFEST).exists():
            return Path(path)
        found = complete(path)
    if not found:
        raise CheckpointError(f"{path}: no complete checkpoint there")
    return found[-1][1]


def lock_and_find(cfg, data, world):
    """Collective: one run at a time writes to --out, and all ranks have the same flags and data.
    Returns the folder of the checkpoint that --resume names, or None."""
    found = ""
    with together(world):
        if world.rank == 0:
            lock(cfg.out)
            if cfg.resume == "auto":
                for _, folder in complete(cfg.out):
                    found = str(folder)  # the last one
            elif cfg.resume != "no":
                found = str(find(cfg.resume))
    texts = all_gather_text(f"{cfg}, data {data.fingerprint()}", world)
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise CheckpointError(f"rank {rank} has other flags or data than rank 0")
    found = all_gather_text(found, world)[0]
    return Path(found) if found else None


def lock(out):
    """Make the folder `out` and, where the file system has locks, lock it until this process ends.
    CheckpointError if another run writes there."""
    path = Path(out, ".lock")
    with about(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # open until this process ends
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"--out {out}: another run writes there; name another folder") \
                from None
        except OSError:
            pass  # no locks: some NFS and Lustre


# ---- save and load ----


def weights_of(trainer):
    """Yields (tensor's name, tag, start, values): this rank's piece of each weight. start: index of
    the first value in the slice that the tag describes; above 0 where ZeRO has cut the slice."""
    reducer = trainer.reducer
    trained = zip(reducer.tags, reducer.starts, reducer.weights, strict=True)
    for tag, start, values in [*trained, *reducer.frozen]:
        yield tag.name, tag, start, values.view(-1)
        if tag.name == EMBEDDING and UNTIED not in trainer.shapes:
            yield UNTIED, tag, start, values.view(-1)  # a tied matrix is stored under both names


def states_of(trainer):
    """Yields the same of each state of the optimizer."""
    reducer = trainer.reducer
    for kind, pieces in trainer.optimizer.named_states().items():
        for values, tag, start in zip(pieces, reducer.tags, reducer.starts, strict=True):
            yield f"{tag.name}.{kind}", tag, start, values.view(-1)


def files_of(trainer, folder):
    """[(path, dtype's code, {tensor: full shape})] of the two files, the same on every rank."""
    shapes = dict(trainer.shapes)
    shapes.setdefault(UNTIED, shapes[EMBEDDING])  # tied: see weights_of
    states = {f"{name}.{kind}": trainer.shapes[name] for name in trainer.trained_names
              for kind in trainer.optimizer.named_states()}
    wide = torch.promote_types(trainer.dtype, torch.float32)
    return [(folder / MODEL, CODES[trainer.dtype], shapes),
            (folder / OPTIMIZER, CODES[wide], states)]


def is_finite(trainer):
    """Are all weights and states of this rank finite?"""
    pieces = [*weights_of(trainer), *states_of(trainer)]
    held = [values for _, _, _, values in pieces if values.numel()]
    if not held:
        return True
    norms = torch._foreach_norm(held, math.inf)
    return bool(torch.stack([norm.double() for norm in norms]).isfinite().all())


def put_aside(folder):
    """Rename a folder to the first of its names with .old-1, .old-2, ... that is free."""
    number = 1
    while os.path.lexists(f"{folder}.old-{number}"):
        number += 1
    os.rename(folder, f"{folder}.old-{number}")


def sync(path):
    """Wait until a file, or the names in a folder, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


@torch.no_grad()
def save(trainer, step, data_folder=""):
    """Collective: write the state after `step` steps into --out. Returns the folder; None, with
    nothing written, if weights or states are not finite. If a rank cannot write, every rank raises
    a CheckpointError, and the earlier checkpoints stay."""
    world = trainer.mesh.world
    if "False" in all_gather_text(str(is_finite(trainer)), world):
        return None
    out = Path(trainer.cfg.out)
    final = out / f"step-{step:08d}"
    folder = out / f"{final.name}.tmp"
    files = files_of(trainer, folder)
    with together(world), about(folder):
        if world.rank == 0:
            for path in out.glob("step-*.tmp"):  # what interrupted saves have left
                shutil.rmtree(path)
            folder.mkdir()
            for path, code, shapes in files:
                head, size = make_header(shapes, code)
                path.write_bytes(head)
                os.truncate(path, size)
    with together(world):
        entries = {name: entry for path, _, _ in files for name, entry in read_header(path).items()}
        for name, tag, start, values in [*weights_of(trainer), *states_of(trainer)]:
            if not tag.writes_checkpoint:
                continue  # another rank of this replica writes this slice
            begin, stop = 0, len(values)
            if not trainer.reducer.sharded:  # each replica holds all, and writes a part
                begin, stop = bounds(len(values), tag.sum_over[0])
            write_slice(entries[name], tag, start + begin, values[begin:stop])
    with together(world), about(folder):
        if world.rank == 0:
            numbers = trainer.optimizer.numbers().items()
            manifest = {"number": last_number(out) + 1,
                        "step": step,
                        **{name: value.item() for name, value in numbers},
                        "model": asdict(trainer.model_config),
                        "config": vars(trainer.cfg),  # the flags, for people
                        "data": str(Path(data_folder).resolve())}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in (*folder.iterdir(), folder):
                sync(path)
            if os.path.lexists(final):
                put_aside(final)
            os.rename(folder, final)
            sync(out)
    return final


def value_from(folder, config, dtype):
    """A function value(tag): this rank's slice of a weight, on the CPU, from a checkpoint of any
    layout. CheckpointError if the checkpoint is damaged, or of another model or dtype. (Not
    collective: a rank that cannot read fails alone, and ends the others.)"""
    theirs = config_from(read_manifest(folder)["model"])
    for name, wanted in {"arch": config.arch, **asdict(config)}.items():
        found = getattr(theirs, name, None)
        if found != wanted:
            raise CheckpointError(f"{folder}: its {name} is {found}, this run's is {wanted}; give "
                                  "the flags of the run that wrote it, --init-from too")
    path = Path(folder, MODEL)
    entries = read_header(path)
    expect(path, entries, shapes_of(on_meta(config)), [CODES[dtype]])

    def value(tag):
        part = torch.empty(tag.slice_shape, dtype=dtype)
        read_slice(entries[tag.name], tag, 0, part.view(-1))
        return part

    return value


@torch.no_grad()
def load(trainer, folder):
    """Collective: give every rank its pieces of the optimizer's states; the weights came by
    value_from(). Returns the number of steps done. CheckpointError, on every rank, if the
    checkpoint is damaged or past --steps."""
    world = trainer.mesh.world
    with together(world):
        manifest = read_manifest(folder)
        if manifest["step"] > trainer.cfg.steps:
            raise CheckpointError(f"{folder}: is at step {manifest['step']}, past --steps "
                                  f"{trainer.cfg.steps}")
        _, (path, code, shapes) = files_of(trainer, Path(folder))
        entries = read_header(path)
        expect(path, entries, shapes, [code])
        for name, tag, start, values in states_of(trainer):
            read_slice(entries[name], tag, start, values)
    for name, value in trainer.optimizer.numbers().items():
        value.fill_(manifest[name])
    return manifest["step"]
