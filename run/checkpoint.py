"""Checkpoints: any layout writes one, and any layout reads it.

    out/step-00000600/model.safetensors      weights, under nanoGPT's names and shapes
                      optimizer.safetensors  NAME.exp_avg, .exp_avg_sq; for 16 bits also .master
                      manifest.json          step, flags, loss scale, a checksum for each tensor

Every rank writes its own slices straight into the files, where its tags say that they belong: no
gather, and no memory but one tensor's slice on the way from a GPU. Stored per parameter: 2 + 12
bytes for 16-bit weights, 4 + 8 for float32. (lm_head.weight, though tied, is written once more:
nanoGPT loads it.) A folder is written as step-N.tmp, its manifest last, and renamed: it is complete
or does not exist.

    python train.py --tp 2 --save-interval 100        python train.py --pp 4 --resume auto
"""

import json
import os
import re
import shutil
import sys
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from collectives import all_reduce, broadcast
from group import wait_all
from model import ALIASES
from run import tensorfile
from run.schema import MANIFEST as MANIFEST_SCHEMA
from run.schema import conform, read_json
from run.signals import local_rank
from run.tensorfile import DTYPES, CheckpointError, about, checksum
from shard import bounds

MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"


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
    failed, = world.read(all_reduce(failed, world, "max"))
    if failed:
        line = torch.tensor(list(text.ljust(1024)), dtype=torch.uint8, device=world.device)
        line = broadcast(line, world, root=world.size - failed)
        raise CheckpointError(bytes(world.read(line)).decode(errors="replace").rstrip())


def seal(manifest):
    """CRC-32 of the manifest's own content."""
    content = {key: value for key, value in manifest.items() if key != "seal"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read_manifest(folder):
    path = Path(folder, MANIFEST)
    with about(path), suppress(ValueError):
        manifest = conform(read_json(path.read_bytes()), MANIFEST_SCHEMA)
        if manifest["seal"] == seal(manifest):
            return manifest
    raise CheckpointError(f"{path}: damaged; --resume PATH takes another checkpoint")


def refuse_other(folder, manifest, config):
    """CheckpointError unless the checkpoint is of this GPTConfig."""
    defaults = asdict(type(config)())
    for name, value in asdict(config).items():
        found = manifest["model"].get(name, defaults[name])
        if found != value:
            raise CheckpointError(f"{folder}: its {name} is {found}, this run's is {value}")


@cache
def skip(folder):
    """Once for each: it stays where it is, and in nobody's way."""
    if local_rank() == 0:
        print(f"{folder}: its {MANIFEST} is damaged; skipped", file=sys.stderr, flush=True)


def complete(out):
    """[(number, folder)] of the complete checkpoints in `out`, in the order they were written. One
    that was about to be replaced (put_in_place) counts until the other has its name."""
    found = []
    for folder in Path(out).glob("step-*"):
        name = folder.name.removesuffix(".old.tmp")
        there = name == folder.name or not Path(out, name).exists()
        if re.fullmatch(r"step-\d{8,}", name) and there and (folder / MANIFEST).exists():
            try:
                found.append((read_manifest(folder)["number"], folder))
            except CheckpointError:
                skip(folder)
    return sorted(found)


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
    whole = [folder for _, folder in complete(out)]
    for folder in Path(out).glob("step-*"):
        rest = folder.suffix == ".tmp" or not (folder / MANIFEST).exists()
        old = folder in whole[: len(whole) - keep if keep else 0]
        if re.fullmatch(r"step-\d{8,}(\.old)?(\.tmp)?", folder.name) and (
                old or rest and folder not in whole):
            (folder / MANIFEST).unlink(missing_ok=True)  # first: half deleted, it is not complete
            shutil.rmtree(folder)


def plan(trainer, folder):
    """[(file, code of its dtype, {tensor: shape})] of the whole model, alike on every rank."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    narrow = trainer.dtype.itemsize == 2
    kinds = (["master"] if narrow else []) + ["exp_avg", "exp_avg_sq"]
    aliases = {other: trainer.shapes[name] for name, others in ALIASES.items() for other in others}
    state = {f"{name}.{kind}": shape for name, shape in trainer.shapes.items() for kind in kinds}
    return [(Path(folder, MODEL), codes[trainer.dtype], trainer.shapes | aliases),
            (Path(folder, OPTIMIZER), "F32" if narrow else codes[trainer.dtype], state)]


def slices(trainer):
    """What this rank's optimizer steps: (bucket, the parameter's tag, index of the first element in
    the slice that the tag describes, {tensor: elements}, Adam's step)."""
    for bucket in trainer.reducer.buckets:
        for (param, weight), (_, master, _) in zip(bucket.pieces(bucket.weight_shard),
                                                   bucket.owned, strict=True):
            state = trainer.optimizer.adam.state[master]
            if not state:  # as AdamW makes it at its first step
                state.update(step=torch.zeros((), device=weight.device),
                             exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
            name = param.shard.name
            tensors = dict.fromkeys([name, *ALIASES.get(name, [])], weight)
            if bucket.master is not bucket.weight_shard:
                tensors[f"{name}.master"] = master.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                tensors[f"{name}.{kind}"] = state[kind]
            first = max(0, bucket.offset - bucket.starts[param])
            yield bucket, param.shard, first, tensors, state["step"]


def transfer(trainer, entries, saving):
    """Copies each run of this rank's slices to its place in the files {tensor: Entry}, or back. Of
    the ranks that hold the same element, one saves it and all load it."""
    for bucket, shard, first, tensors, _ in slices(trainer):
        if saving and not shard.first:
            continue
        for name, values in tensors.items():
            lo, hi = 0, len(values)
            if saving and bucket.num_shards == 1:  # data-parallel replicas share the work
                lo, hi = bounds(len(values), bucket.group)
            buffer = values[lo:hi].to("cpu", copy=True)
            data, width = memoryview(buffer.view(torch.uint8).numpy()), buffer.element_size()
            path, begin = entries[name].path, entries[name].begin
            with about(path, name), open(path, "r+b" if saving else "rb", buffering=0) as file:
                for there, here, n in shard.runs(first + lo, first + hi):
                    tensorfile.copy_bytes(file, data[here * width : (here + n) * width],
                                          begin + there * width, saving)
            if not saving:
                values.copy_(buffer)


def put_in_place(folder, final, manifest):
    """The last act of a save: the manifest, and when all is on the disk, the folder's name."""
    (folder / MANIFEST).write_text(json.dumps({**manifest, "seal": seal(manifest)}, indent=1))
    for path in (*folder.iterdir(), folder):
        to_disk(path)
    if final.exists():
        os.rename(final, f"{final}.old.tmp")
    os.rename(folder, final)
    with suppress(OSError):  # it is there
        to_disk(final.parent)  # before older ones are deleted


def to_disk(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@torch.no_grad()
def save(trainer, step, data_folder=""):
    """Write the state after `step` steps into cfg.out and return its folder; all ranks together.
    CheckpointError, on every rank, if it cannot be written: then nothing of it remains, and the
    checkpoints before it are untouched. None, and nothing is written, if it is not finite."""
    cfg, world = trainer.cfg, trainer.mesh.world
    bad = torch.tensor([float(not trainer.optimizer.finite())], device=world.device)
    if world.read(all_reduce(bad, world)) != [0]:
        return None
    final = Path(cfg.out, f"step-{step:08d}")
    folder = Path(f"{final}.tmp")
    files, heads, entries = plan(trainer, folder), {}, {}
    for path, code, shapes in files:
        heads[path], found = tensorfile.make_header(shapes, code, path)
        entries |= found
    try:
        with together(world), about(folder):
            if world.rank == 0:
                tidy(cfg.out)
                folder.mkdir()
                for path, head in heads.items():
                    path.write_bytes(head)
        with together(world):
            transfer(trainer, entries, saving=True)
        sums = torch.zeros(len(entries), dtype=torch.long, device=world.device)
        with together(world):
            for i, entry in list(enumerate(entries.values()))[world.rank :: world.size]:
                sums[i] = checksum(entry)
        sums = iter(world.read(all_reduce(sums, world)))
        with together(world), about(folder):
            if world.rank == 0:
                put_in_place(folder, final, {
                    "number": 1 + max(complete(cfg.out), default=(0,))[0], "step": step,
                    "updates": int(next(slices(trainer))[-1]),
                    "scale": trainer.scale, "good_steps": trainer.good_steps,
                    "model": asdict(trainer.model_config), "config": asdict(cfg),
                    "data": str(Path(data_folder).resolve()),
                    "checksums": {path.name: {name: next(sums) for name in shapes}
                                  for path, _, shapes in files}})
                tidy(cfg.out, cfg.keep)
    except CheckpointError:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return final


@torch.no_grad()
def load(trainer, folder):
    """Give every rank its slices of a checkpoint of any layout; returns the steps it has done.
    CheckpointError, on every rank and before anything is changed, if it is damaged, past --steps
    or of another model or dtype. Each rank verifies its share of the checksums."""
    world, entries = trainer.mesh.world, {}
    with together(world):
        manifest = read_manifest(folder)
        refuse_other(folder, manifest, trainer.model_config)
        if manifest["step"] > trainer.cfg.steps:
            raise CheckpointError(f"{folder}: is at step {manifest['step']}, past --steps "
                                  f"{trainer.cfg.steps}")
        for path, code, shapes in plan(trainer, folder):
            entries |= tensorfile.expect(path, tensorfile.read_header(path), shapes, [code])
        for entry in list(entries.values())[world.rank :: world.size]:
            checksum(entry, manifest["checksums"][entry.path.name].get(entry.name, -1))
    with together(world):
        transfer(trainer, entries, saving=False)
    for *_, adam_step in slices(trainer):
        adam_step.fill_(manifest["updates"])
    wait_all([trainer.reducer.publish(bucket) for bucket in trainer.reducer.buckets])
    trainer.scale, trainer.good_steps = manifest["scale"], manifest["good_steps"]
    return manifest["step"]
