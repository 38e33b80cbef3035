"""Checkpoints: any layout writes one, and any layout reads it.

    out/step-00000600/model.safetensors      weights, under nanoGPT's names and shapes
                      optimizer.safetensors  NAME.exp_avg, NAME.exp_avg_sq; of 16 bits NAME.master
                      manifest.json          step, flags, loss scale, a checksum for each tensor

A safetensors file is a JSON header, then raw data. The header follows from names and shapes alone,
so every rank knows where each element belongs and writes its own slices there: no gather, and no
memory but one tensor's slice on the way from a GPU. Stored per parameter: 2 + 12 bytes for 16-bit
weights, 4 + 8 for float32. (lm_head.weight is written again, though tied: nanoGPT loads it.)

A folder is written as step-N.tmp, its manifest last, and renamed: it is complete or does not exist.

    python train.py --tp 2 --save-interval 100        python train.py --pp 4 --resume auto
"""

import json
import math
import os
import re
import shutil
import zlib
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from collectives import all_reduce, broadcast

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"
CHUNK = 1 << 20  # bytes read at once for a checksum


class CheckpointError(ValueError):
    """One line that names the file and, if one is at fault, the tensor."""


@contextmanager
def naming(path, tensor=""):
    """An OSError inside becomes a CheckpointError about its file, or else this one."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename or path}{tensor and f', tensor {tensor}'}"
        raise CheckpointError(f"{where}: {error.strerror}") from None


@contextmanager
def together(world):
    """All ranks leave this block, or all raise the CheckpointError of the first one that failed in
    it. No collectives inside: the rank that failed would miss them."""
    text = b""
    try:
        yield
    except CheckpointError as error:
        text = str(error).encode()[:1024]
    failed = torch.tensor([world.size - world.rank if text else 0], device=world.device)
    failed = all_reduce(failed, world, "max").item()
    if failed:
        line = torch.tensor(list(text.ljust(1024)), dtype=torch.uint8, device=world.device)
        line = broadcast(line, world, root=world.size - failed)
        raise CheckpointError(bytes(line.tolist()).decode(errors="replace").rstrip())


# ---- the format ----


class Entry(NamedTuple):
    """A tensor of a safetensors file; begin and end count bytes from the start of the file."""

    dtype: str
    shape: tuple
    begin: int
    end: int


def make_header(shapes, code):
    """{name: shape} -> (the first bytes of the file, {name: Entry})."""
    entries, at = {}, 0
    for name, shape in shapes.items():
        size = shape.numel() * DTYPES[code].itemsize
        entries[name] = Entry(code, tuple(shape), at, at + size)
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}} | {
        name: {"dtype": e.dtype, "shape": e.shape, "data_offsets": [e.begin, e.end]}
        for name, e in entries.items()}).encode()
    text += b" " * (-len(text) % 8)  # data begins aligned
    head = len(text).to_bytes(8, "little") + text
    return head, {name: e._replace(begin=e.begin + len(head), end=e.end + len(head))
                  for name, e in entries.items()}


def read_header(path):
    """{name: Entry} of a safetensors file that is as long as its header says. CheckpointError."""
    with naming(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length < size else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: Entry(e["dtype"], tuple(e["shape"]), *(8 + length + at
                               for at in e["data_offsets"])) for name, e in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path}: not a safetensors file, or its header is damaged") from None
    for name, entry in entries.items():
        if entry.end > size:
            raise CheckpointError(f"{path}, tensor {name}: cut off, it ends at byte {entry.end} "
                                  f"of a file of {size}")
    return entries


def expect(path, entries, shapes, dtypes):
    """CheckpointError unless the file has a tensor of each {name: shape}, of one of the dtypes."""
    for name, shape in shapes.items():
        if name not in entries:
            raise CheckpointError(f"{path}, tensor {name}: missing")
        entry = entries[name]
        if entry.shape != tuple(shape) or entry.dtype not in dtypes:
            raise CheckpointError(f"{path}, tensor {name}: {entry.dtype} {list(entry.shape)}, not "
                                  f"{' or '.join(dtypes)} {list(shape)}")
        if entry.end - entry.begin != math.prod(shape) * DTYPES[entry.dtype].itemsize:
            raise CheckpointError(f"{path}, tensor {name}: its place in the file does not fit its "
                                  "shape")


def runs(tag, start, stop):
    """Where elements [start, stop) of the flattened shard that `tag` describes lie in the flattened
    full tensor: (index there, index after start, length) of each contiguous run."""
    width, inner = tag.shape[tag.dim], tag.shape[tag.dim + 1 :].numel()
    at = 0
    for row in range(tag.shape[: tag.dim].numel()):
        for a, b in tag.ranges:
            lo, hi = max(at, start), min(at + (b - a) * inner, stop)
            if lo < hi:
                yield (row * width + a) * inner + lo - at, lo - start, hi - lo
            at += (b - a) * inner


def move(file, data, at, write):
    """Write the bytes `data` at this place of an unbuffered file, or fill them from there."""
    file.seek(at)
    while data:  # the system may do a part at a time
        n = file.write(data) if write else file.readinto(data)
        if not n:
            raise OSError(0, "the file ends early")
        data = data[n:]


def checksum(path, name, entry, want=None):
    """CRC-32 of a tensor as it lies in the file. CheckpointError if it is not the one we want."""
    crc = 0
    with naming(path, name), open(path, "rb") as file:
        file.seek(entry.begin)
        for at in range(entry.begin, entry.end, CHUNK):
            crc = zlib.crc32(file.read(min(CHUNK, entry.end - at)), crc)
    if want not in (None, crc):
        raise CheckpointError(f"{path}, tensor {name}: damaged, the checksum differs")
    return crc


# ---- which checkpoints there are ----


def seal(manifest):
    """CRC-32 of the manifest's own content."""
    content = {key: value for key, value in manifest.items() if key != "seal"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read_manifest(folder):
    path = Path(folder, MANIFEST)
    with naming(path):
        text = path.read_bytes()
    try:
        manifest = json.loads(text)
        if manifest["seal"] == seal(manifest):
            return manifest
    except (ValueError, TypeError, KeyError):
        pass
    raise CheckpointError(f"{path}: damaged; --resume PATH takes another checkpoint")


def refuse_other(folder, manifest, config):
    """CheckpointError unless the checkpoint is of this GPTConfig."""
    for name, value in asdict(config).items():
        if manifest["model"][name] != value:
            raise CheckpointError(f"{folder}: its {name} is {manifest['model'][name]}, this run's "
                                  f"is {value}")


def complete(out):
    """[(number, folder)] of the complete checkpoints in `out`, in the order they were written."""
    return sorted((read_manifest(folder)["number"], folder) for folder in Path(out).glob("step-*")
                  if re.fullmatch(r"step-\d{8,}", folder.name) and (folder / MANIFEST).exists())


def newest(out):
    """The folder of the last complete checkpoint that was written to `out`, or None."""
    return max(complete(out), default=(0, None))[1]


def find(path):
    """The checkpoint at `path`: that folder itself, or the newest in it. CheckpointError: none."""
    folder = Path(path) if Path(path, MANIFEST).exists() else newest(path)
    if folder is None:
        raise CheckpointError(f"{path}: no complete checkpoint there")
    return folder


def tidy(out, keep=0):
    """Delete what interrupted saves left, and all but the last `keep` complete checkpoints."""
    old = [folder for _, folder in complete(out)][:-keep] if keep else []
    for folder in Path(out).glob("step-*"):
        ours = re.fullmatch(r"step-\d{8,}(\.old)?(\.tmp)?", folder.name)
        if folder in old or ours and (folder.suffix or not (folder / MANIFEST).exists()):
            (folder / MANIFEST).unlink(missing_ok=True)  # half deleted, it must not exist
            shutil.rmtree(folder)


# ---- saving and loading ----


def plan(trainer):
    """[(file name, code of its dtype, {tensor: shape})] of the whole model, alike on every rank."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    narrow = trainer.dtype.itemsize == 2
    kinds = [*["master"] * narrow, "exp_avg", "exp_avg_sq"]
    model = {**trainer.shapes, "lm_head.weight": trainer.shapes["transformer.wte.weight"]}
    state = {f"{name}.{kind}": shape for name, shape in trainer.shapes.items() for kind in kinds}
    return [(MODEL, codes[trainer.dtype], model),
            (OPTIMIZER, "F32" if narrow else codes[trainer.dtype], state)]


def slices(trainer):
    """What this rank's optimizer steps: (tag, index of the first element in the flattened shard
    that the tag describes, {tensor: elements}, Adam's step)."""
    for bucket in trainer.dp.buckets:
        first = {p.tag.name: max(0, bucket.offset - at) for p, at in bucket.starts.items()}
        pieces = bucket.pieces(bucket.offset, bucket.weight_shard)
        for (tag, weight), (_, master, _) in zip(pieces, bucket.steps, strict=True):
            state = bucket.adam.state[master]
            if not state:  # as AdamW makes it at its first step
                state["step"] = torch.zeros((), device=weight.device)
                state["exp_avg"] = torch.zeros_like(master)
                state["exp_avg_sq"] = torch.zeros_like(master)
            tensors = {tag.name: weight}
            if tag.tied:
                tensors["lm_head.weight"] = weight
            if bucket.master is not bucket.weight_shard:
                tensors[f"{tag.name}.master"] = master.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                tensors[f"{tag.name}.{kind}"] = state[kind].detach()
            yield tag, first[tag.name], tensors, state["step"]


def transfer(trainer, files, saving):
    """Each run of this rank's slices to its place in the files {path: entries}, or from there. Of
    the ranks that hold the same element, one saves it and all load it."""
    mesh, replicas = trainer.mesh, trainer.optimizer.replicas if saving else 1
    places = {name: (path, entry) for path, entries in files.items()
              for name, entry in entries.items()}
    for tag, first, tensors, _ in slices(trainer):
        replicated = sum(b - a for a, b in tag.ranges) == tag.shape[tag.dim]
        if saving and (replicated and mesh.tp.rank or tag.tied and mesh.tie.rank):
            continue
        for name, values in tensors.items():
            part = mesh.dp.rank if replicas > 1 else 0  # data-parallel replicas share the work
            lo, hi = (len(values) * i // replicas for i in (part, part + 1))
            buffer = values[lo:hi].to("cpu", copy=True)
            data, width = memoryview(buffer.view(torch.uint8).numpy()), buffer.element_size()
            path, entry = places[name]
            with naming(path, name), open(path, "r+b" if saving else "rb", buffering=0) as file:
                for there, here, n in runs(tag, first + lo, first + hi):
                    move(file, data[here * width : (here + n) * width],
                         entry.begin + there * width, saving)
            if not saving:
                values.copy_(buffer)


def share(files, world):
    """(index, path, tensor, entry) of the tensors whose checksums are this rank's work."""
    tensors = [(path, *item) for path, entries in files.items() for item in entries.items()]
    return [(i, *tensors[i]) for i in range(world.rank, len(tensors), world.size)]


def put_in_place(folder, final, manifest):
    """The last act of a save: the manifest, and when all is on the disk, the folder's name."""
    (folder / MANIFEST).write_text(json.dumps({**manifest, "seal": seal(manifest)}, indent=1))
    for path in (*folder.iterdir(), folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    if final.exists():
        os.rename(final, f"{final}.old.tmp")
    os.rename(folder, final)


@torch.no_grad()
def save(trainer, step, data_folder=""):
    """Write the state after `step` steps into cfg.out and return its folder; all ranks together.
    CheckpointError, on every rank, if it cannot be written: then nothing of it remains, and the
    checkpoints before it are untouched."""
    cfg, world = trainer.cfg, trainer.mesh.world
    final = Path(cfg.out, f"step-{step:08d}")
    folder = Path(f"{final}.tmp")
    heads = {folder / name: make_header(shapes, code) for name, code, shapes in plan(trainer)}
    files = {path: entries for path, (_, entries) in heads.items()}
    try:
        with together(world), naming(folder):
            if world.rank == 0:
                tidy(cfg.out)
                folder.mkdir()
                for path, (head, _) in heads.items():
                    path.write_bytes(head)
        with together(world):
            transfer(trainer, files, saving=True)
        sums = torch.zeros(sum(map(len, files.values())), dtype=torch.long, device=world.device)
        with together(world):
            for i, path, name, entry in share(files, world):
                sums[i] = checksum(path, name, entry)
        sums = iter(all_reduce(sums, world).tolist())
        with together(world), naming(folder):
            if world.rank == 0:
                put_in_place(folder, final, {
                    "number": 1 + max(complete(cfg.out), default=(0,))[0], "step": step,
                    "updates": int(next(slices(trainer))[-1]),
                    "scale": trainer.scale, "good_steps": trainer.good_steps,
                    "model": asdict(trainer.model_config), "config": asdict(cfg),
                    "data": str(Path(data_folder).resolve()),
                    "checksums": {path.name: {name: next(sums) for name in entries}
                                  for path, entries in files.items()}})
                tidy(cfg.out, cfg.keep)
    except CheckpointError:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return final


@torch.no_grad()
def load(trainer, folder):
    """Give every rank its slices of a checkpoint of any layout; returns the steps it has done.
    CheckpointError, on every rank and before anything is changed, if it is damaged or of another
    model or dtype. Each rank verifies its share of the checksums."""
    world, dp, files = trainer.mesh.world, trainer.dp, {}
    with together(world):
        manifest = read_manifest(folder)
        refuse_other(folder, manifest, trainer.model_config)
        for name, code, shapes in plan(trainer):
            path = Path(folder, name)
            entries = read_header(path)
            expect(path, entries, shapes, [code])
            files[path] = {name: entries[name] for name in shapes}
        for _, path, name, entry in share(files, world):
            checksum(path, name, entry, manifest["checksums"][path.name][name])
    with together(world):
        transfer(trainer, files, saving=False)
    for *_, adam_step in slices(trainer):
        adam_step.fill_(manifest["updates"])
    for work in [dp.publish(bucket) for bucket in dp.buckets]:
        work.wait()
    trainer.scale, trainer.good_steps = manifest["scale"], manifest["good_steps"]
    return manifest["step"]


# Hugging Face's GPT-2 has Conv1D layers, whose weights are (in, out).
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def read_weights(path, shapes, config):
    """Check that a safetensors file has tensors of these {name: shape}, and return a function from
    a name to the full tensor, on CPU. Reads model.safetensors of ours (against the manifest beside
    it), of nanoGPT, and of Hugging Face's GPT-2. CheckpointError."""
    path, entries = Path(path), read_header(path)
    names = {name: name if name in entries else name.removeprefix("transformer.")
             for name in shapes}
    probe = "transformer.h.0.attn.c_attn.weight"
    entry = entries.get(names[probe])
    flipped = CONV1D if entry and entry.shape == tuple(shapes[probe])[::-1] else ()
    expect(path, entries, {names[name]: tuple(shape)[::-1] if name.endswith(flipped) else shape
                           for name, shape in shapes.items()}, DTYPES)
    if path.name == MODEL and path.with_name(MANIFEST).exists():
        manifest = read_manifest(path.parent)
        refuse_other(path, manifest, config)
        for name in shapes:
            checksum(path, name, entries[name], manifest["checksums"][MODEL][name])

    def get(name):
        entry = entries[names[name]]
        with naming(path, name), open(path, "rb") as file:
            file.seek(entry.begin)
            data = bytearray(file.read(entry.end - entry.begin))
        tensor = torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
        return tensor.t() if name.endswith(flipped) else tensor

    return get
