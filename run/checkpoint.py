"""Checkpoints: any layout writes one, and any layout reads it.

    out/step-00000600/model.safetensors      weights, under nanoGPT's names and shapes
                      optimizer.safetensors  NAME.exp_avg, .exp_avg_sq; 16-bit weights: .master
                      manifest.json          step, flags, sizes of the model, loss scale

A safetensors file is a header, and then each tensor's elements, row after row. The header follows
from names, shapes and dtype. So every rank knows, without a message, where each element of the full
model lies in the file, and writes its own slices there, as its tags say (runs).
Nothing is gathered. To read, a rank maps the file into memory and takes its slices (Tag.slice).

All files are written into step-N.tmp. Once they are on the disk, the folder is renamed to step-N,
and only then it is a checkpoint, which is never deleted: a step-N that is written again (the run
went back) moves the old one aside, to step-N.old-1. A rank that cannot read or write raises a
FileError, which ends all ranks with this one line (joined in run/launch.py).

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

import numpy as np
import torch

from collectives import all_gather, all_reduce, maximum
from data.files import FileError, open_file, read_json, say
from experts import kind_of, on_meta, shapes_of
from model import UNTIED, from_seed
from run import weights
from shard import bounds
from sizes import config_from

MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"
EMBEDDING = "transformer.wte.weight"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses a longer one
# Numbers of a manifest; `number`: which checkpoint of the folder it is, in the order of writing
NUMBERS = {"number": int, "step": int, "updates": float, "scale": float, "good_steps": int}

# ---- safetensors ----

#     8 bytes    length of the header, little-endian
#     header     {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
#     data       offsets count from here

# A tensor of a file: begin and end count bytes from the start of the file
Entry = namedtuple("Entry", "path name dtype shape begin end")


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


def open_tensors(path):
    """{name: Entry} of a safetensors file. FileError if its header is damaged, or does not fit the
    file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(size, MAX_HEADER) else b""
    entries = {}
    last = start = 8 + length
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for name, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = (start + int(offset) for offset in value["data_offsets"])
            entry = Entry(path, name, value["dtype"], torch.Size(value["shape"]), begin, end)
            dtype = DTYPES.get(entry.dtype)  # None: a dtype that no model of ours has
            if begin < last or (dtype and end - begin != entry.shape.numel() * dtype.itemsize):
                raise FileError(f"{path}, tensor {name}: does not fit its place in the file")
            if end > size:
                raise FileError(f"{path}, tensor {name}: cut off at the end of the file")
            last = end
            entries[name] = entry
    except FileError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        raise FileError(f"{path}: not a safetensors file, or its header is damaged") from None
    return entries


def expect(path, entries, shapes, codes=tuple(DTYPES)):
    """FileError unless {name: shape} all have an Entry, with one of these dtypes."""
    for name, shape in shapes.items():
        if name not in entries:
            raise FileError(f"{path}, tensor {name}: missing")
        found = entries[name]
        if found.shape != torch.Size(shape) or found.dtype not in codes:
            raise FileError(f"{path}, tensor {name}: {found.dtype} {[*found.shape]}, not "
                            f"{' or '.join(codes)} {[*shape]}")


def read_tensor(entry):
    """The whole tensor of an Entry, on the CPU. The file is mapped: what is not used of the tensor
    is not read."""
    data = np.memmap(entry.path, np.uint8, "c", entry.begin, entry.end - entry.begin)
    return torch.from_numpy(data).view(DTYPES[entry.dtype]).view(entry.shape)


def runs(tag, start, stop):
    """Where elements [start, stop) of the tag's slice, flattened, lie in the flattened full tensor:
    yields (where in the full tensor, where in the values from `start` on, how many) of each
    contiguous run.

    Full shape (2, 6), dim 1, ranges [1, 3): the slice holds elements 1 2 7 8 of the full tensor, so
    runs(tag, 1, 4) yields (2, 0, 1), then (7, 1, 2)."""
    width = tag.shape[tag.dim]
    inner = tag.shape[tag.dim + 1 :].numel()  # elements of one index along dim
    position = 0  # in the flattened slice
    for row in range(tag.shape[: tag.dim].numel()):
        for range_start, range_stop in tag.ranges:
            length = (range_stop - range_start) * inner
            run_start = max(position, start)
            run_stop = min(position + length, stop)
            if run_start < run_stop:
                in_full = (row * width + range_start) * inner + (run_start - position)
                yield in_full, run_start - start, run_stop - run_start
            position += length


def write_slice(entry, tag, start, values):
    """Write `values`, the elements from index `start` on of the slice that the tag describes, to
    their places in the file of the full tensor: a contiguous run at a time."""
    data = memoryview(values.cpu().view(torch.uint8).numpy())
    width = values.element_size()
    with open(entry.path, "r+b") as file:
        for in_full, in_values, length in runs(tag, start, start + len(values)):
            file.seek(entry.begin + in_full * width)
            file.write(data[in_values * width : (in_values + length) * width])


# ---- which checkpoints there are ----


def read_manifest(folder):
    """The manifest of a checkpoint. FileError if it is missing or damaged."""
    path = Path(folder, MANIFEST)
    manifest = read_json(path)
    for name, kind in NUMBERS.items():
        value = manifest.get(name)
        if type(value) not in (int, kind) or not 0 <= value < math.inf:
            raise FileError(f"{path}: damaged: its {name} is {value!r:.40}")
    if type(manifest.get("data")) is not str:
        raise FileError(f"{path}: damaged: it names no folder of data")
    try:
        config = config_from(manifest.get("model"))
        fits = all(type(getattr(config, f.name)) is f.type for f in fields(config))
    except TypeError:  # not a dict, or not the names of a model's sizes
        fits = False
    if not fits:
        raise FileError(f"{path}: damaged, no model has its sizes")
    return manifest


def complete(out):
    """The folders of the checkpoints in `out` that can be read, in the order in which they were
    written; says which ones cannot."""
    found = []
    for folder in sorted(Path(out).glob("step-*")):
        if folder.suffix == ".tmp":
            continue  # a save that was interrupted
        try:
            for file in (MODEL, OPTIMIZER):
                open_tensors(folder / file)
            found.append((read_manifest(folder)["number"], folder))
        except FileError as error:
            say(f"{folder} skipped: {error}")
    return [folder for _, folder in sorted(found)]


def last_number(out):
    """The largest number of a checkpoint in `out`: numbers tell the order of writing, which a clock
    that was set back would not."""
    numbers = [0]
    for path in out.glob(f"step-*/{MANIFEST}"):
        with suppress(FileError):
            numbers.append(read_manifest(path.parent)["number"])
    return max(numbers)


def find(path):
    """The checkpoint at `path`: this folder itself, or the newest in it. FileError if there is
    none."""
    if os.path.exists(Path(path, MANIFEST)):
        return Path(path)
    found = complete(path)
    if not found:
        raise FileError(f"{path}: no complete checkpoint there")
    return found[-1]


def require_same(folder, theirs, config):
    """FileError unless the sizes in a folder, {name: value}, are those of this run's model."""
    ours = {"arch": config.arch, **asdict(config), "untied": not getattr(config, "tied", True)}
    for name, value in theirs.items():
        if value != ours.get(name):
            raise FileError(f"{folder}: its {name} is {value}, this run's is {ours.get(name)}; "
                            "give the flags of the run that wrote it, --init-from too")


def sizes_in(folder):
    """{name: value}: architecture and sizes of a checkpoint's model."""
    config = config_from(read_manifest(folder)["model"])
    return {"arch": config.arch, **asdict(config)}


# ---- the ranks agree ----


def all_gather_values(value, world):
    """Collective: the list of every rank's value, which may be anything that JSON has."""
    text = bytearray(json.dumps(value).encode())
    length = torch.tensor([len(text)], device=world.device)
    longest, = world.read(all_reduce(length, world, maximum))
    texts = torch.empty(world.size, longest, dtype=torch.uint8, device=world.device)
    texts[world.rank] = torch.frombuffer(text.ljust(longest), dtype=torch.uint8)
    return [json.loads(bytes(row)) for row in world.read(all_gather(texts, world))]


def wait_for_all(world, mine=True):
    """Collective: return once all ranks have come here. Returns whether all of them brought True.
    """
    number_false = torch.tensor([0.0 if mine else 1.0], device=world.device)
    return world.read(all_reduce(number_false, world)) == [0.0]


@contextmanager
def about(path):
    """Re-raise an OSError of this block as a FileError that names its file, or `path`."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{error.filename or path}: {error.strerror}") from None


def lock(out):
    """Make the folder `out` and, where the file system has locks, lock it until this process ends.
    FileError if another run writes there."""
    Path(out).mkdir(parents=True, exist_ok=True)
    file = os.open(Path(out, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)  # open until the end
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileError(f"--out {out}: another run writes there; name another folder") from None
    except OSError:
        pass  # no locks: some NFS and Lustre


def lock_and_find(cfg, data, world):
    """Collective: one run at a time writes to --out, and all ranks have the same flags and data.
    Returns the folder of the checkpoint that --resume names, or None."""
    found = []
    if world.rank == 0:
        with about(cfg.out):
            lock(cfg.out)
        if cfg.resume == "auto":
            found = complete(cfg.out)
        elif cfg.resume != "no":
            found = [find(cfg.resume)]
    settings = all_gather_values([vars(cfg), data.fingerprint()], world)
    for rank, theirs in enumerate(settings):
        if theirs != settings[0]:
            raise FileError(f"rank {rank} has other flags or data than rank 0")
    names = all_gather_values([str(folder) for folder in found], world)[0]  # rank 0's
    return Path(names[-1]) if names else None


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
    nothing written, if weights or states are not finite."""
    world = trainer.mesh.world
    pieces = [*weights_of(trainer), *states_of(trainer)]
    # The largest magnitude; isfinite() of all values would take as much memory again
    finite = all(values.norm(math.inf).isfinite() for *_, values in pieces if values.numel())
    if not wait_for_all(world, finite):
        return None
    out = Path(trainer.cfg.out)
    final = out / f"step-{step:08d}"
    folder = out / f"{final.name}.tmp"
    files = files_of(trainer, folder)
    with about(folder):
        if world.rank == 0:
            for path in out.glob("step-*.tmp"):  # what interrupted saves have left
                shutil.rmtree(path)
            folder.mkdir()
            for path, code, shapes in files:
                head, size = make_header(shapes, code)
                path.write_bytes(head)
                os.truncate(path, size)
        wait_for_all(world)
        entries = {}
        for path, _, _ in files:
            entries |= open_tensors(path)
        for name, tag, start, values in pieces:
            if any(group.rank > 0 for group in tag.shared_by):
                continue  # the first of the ranks that share this slice writes it
            begin, stop = 0, len(values)
            if not trainer.reducer.sharded:  # each rank of the ZeRO group has all: it writes a part
                begin, stop = bounds(len(values), tag.sum_over[0])
            write_slice(entries[name], tag, start + begin, values[begin:stop])
        wait_for_all(world)
        if world.rank == 0:
            numbers = trainer.optimizer.numbers().items()
            manifest = {"number": last_number(out) + 1,
                        "step": step,
                        **{name: value.item() for name, value in numbers},
                        "model": asdict(trainer.config),
                        "config": vars(trainer.cfg),  # the flags, for people
                        "data": str(Path(data_folder).resolve())}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in (*folder.iterdir(), folder):
                sync(path)
            if os.path.lexists(final):
                put_aside(final)
            os.rename(folder, final)
            sync(out)
    wait_for_all(world)  # no rank goes on before the checkpoint has its name
    return final


def initial_values(cfg, config, resumed_from):
    """value(tag) for a Trainer: this rank's slice of a weight, from the checkpoint, from
    --init-from or from the seed."""
    if resumed_from:
        return value_from(resumed_from, config, getattr(torch, cfg.dtype))
    if cfg.init_from:
        full = weights.values(cfg.init_from, shapes_of(on_meta(config)), config)
        return lambda tag: tag.slice(full(tag.name))
    return from_seed(config, cfg.seed)


def value_from(folder, config, dtype):
    """A function value(tag): this rank's slice of a weight, on the CPU, from a checkpoint of any
    layout. FileError if the checkpoint is damaged, or of another model or dtype."""
    require_same(folder, sizes_in(folder), config)
    path = Path(folder, MODEL)
    entries = open_tensors(path)
    expect(path, entries, shapes_of(on_meta(config)), [CODES[dtype]])
    return lambda tag: tag.slice(read_tensor(entries[tag.name]))


@torch.no_grad()
def load(trainer, folder):
    """Give this rank its pieces of the optimizer's states; the weights came by value_from().
    Returns the number of steps done. FileError if the checkpoint is damaged or past --steps."""
    manifest = read_manifest(folder)
    if manifest["step"] > trainer.cfg.steps:
        raise FileError(f"{folder}: is at step {manifest['step']}, past --steps "
                        f"{trainer.cfg.steps}")
    _, (path, code, shapes) = files_of(trainer, Path(folder))
    entries = open_tensors(path)
    expect(path, entries, shapes, [code])
    for name, tag, start, values in states_of(trainer):
        held = tag.slice(read_tensor(entries[name])).reshape(-1)
        values.copy_(held[start : start + len(values)])
    for name, value in trainer.optimizer.numbers().items():
        value.fill_(manifest[name])
    return manifest["step"]


def load_model(folder, device="cpu"):
    """The whole model of a checkpoint, in float32, in this process alone."""
    path = Path(folder, MODEL)
    config = config_from(read_manifest(folder)["model"])
    entries = open_tensors(path)
    # A forged manifest may name a model that takes hours to build, or all memory. So compare first
    # the number of layers with the file's, then, on the meta device, all shapes
    try:
        last = f"transformer.h.{config.n_layer - 1}.ln_1.weight"
        expect(path, entries, {last: (config.n_embd,)})
        expect(path, entries, shapes_of(on_meta(config)))
    except (ArithmeticError, RuntimeError):
        raise FileError(f"{folder}/{MANIFEST}: damaged, no model has its sizes") from None
    model = kind_of(config)(config)
    for name, param in model.canonical_parameters():
        param.data.copy_(read_tensor(entries[name]))
    return model.to(device)
