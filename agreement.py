"""What all ranks must have alike before the first step: flags, --out, checkpoint, data. Compared by
way of the store, so before any communicator exists; nodes may be machines of their own."""

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from checkpoint import MANIFEST
from processes import unlike_rank_0
from tensorfile import CheckpointError

held = []  # the lock of this run on its --out, until the process ends


def claim(out):
    """Whether no other run writes to `out`. One that was killed may need a moment to be gone."""
    try:
        file = open(Path(out, ".lock"), "r+b" if Path(out, ".lock").exists() else "w+b")
    except OSError as error:
        raise CheckpointError(f"--out {out} cannot be written ({error.strerror})") from None
    for _ in range(50):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate()
            file.write(os.urandom(8))
            file.flush()
            held.append(file)
            return True
        time.sleep(0.1)
    return False


def refuse_unlike(cfg, data, rank, world):
    """CheckpointError if a rank has other flags, another --out, checkpoint or data than rank 0, or
    if another run has its --out."""
    mine = b"claimed" if rank or claim(cfg.out) else b"taken"
    if unlike_rank_0("claim", mine) if world > 1 else mine == b"taken":
        raise CheckpointError(f"--out {cfg.out}: another run writes there; name another folder")
    if world == 1:
        return

    def content(path):
        return path.read_bytes() if path.is_file() else b""

    def same(name, value, complaint):
        if unlike := unlike_rank_0(name, value):
            raise CheckpointError(f"rank {unlike[0]} {complaint}")

    same("flags", repr(replace(cfg, resume="")).encode(),
         "has other flags than rank 0; start all with the same")
    same("out", content(Path(cfg.out, ".lock")), f"does not see what rank 0 writes to --out "
         f"{cfg.out}; all nodes need to share that folder")
    same("checkpoint", cfg.resume.encode() + content(Path(cfg.resume, MANIFEST)),
         f"has another checkpoint than rank 0 in --resume {cfg.resume}; start all with the same")
    same("data", data.fingerprint(), f"has other data in {data.folder} than rank 0; prepare it "
         "once, then share or copy the folder")
