"""What all ranks must have alike before the first step: flags, --out, checkpoint, data. Compared by
way of the store, so before any communicator exists; nodes may be machines of their own."""

import errno
import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path

from run import processes
from run.checkpoint import MANIFEST, newest
from run.processes import hear, tell, unlike_rank_0
from run.tensorfile import CheckpointError, about

held = []  # the lock of this run on its --out, until the process ends


def claim(out, patience):
    """Locks `out` for this run. CheckpointError if another one goes on writing there; one that was
    killed may need a moment to be gone."""
    with about(Path(out, ".lock")):
        file = os.open(Path(out, ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        held.append(file)
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(f"--out {out}: another run writes there; name another "
                                          "folder") from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                break  # a file system without locks
        os.truncate(file, 0)
        os.write(file, os.urandom(8))  # what the other nodes are to see
        os.fsync(file)


def agree(cfg, data):
    """Takes --out for this run, then looks which checkpoint --resume auto is. CheckpointError if
    another run has --out, or a rank has other flags, another --out, checkpoint or data than rank
    0."""
    (rank, size), error, last = processes.place, "", cfg.resume
    if rank == 0:
        try:
            claim(cfg.out, min(5, cfg.timeout / 2))
            with about(cfg.out):
                last = str(newest(cfg.out) or "no") if cfg.resume == "auto" else cfg.resume
        except CheckpointError as refused:
            error = str(refused)
        if size > 1:
            tell("claim", os.fsencode(error))
            tell("last checkpoint", os.fsencode(last))
    if error := os.fsdecode(hear("claim", 0)) if rank else error:
        raise CheckpointError(error)
    if cfg.resume == "auto":
        cfg.resume = os.fsdecode(hear("last checkpoint", 0)) if rank else last
    if size == 1:
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
    same("checkpoint", os.fsencode(cfg.resume) + content(Path(cfg.resume, MANIFEST)),
         f"has another checkpoint than rank 0 in --resume {cfg.resume}; start all with the same")
    same("data", data.fingerprint(), f"has other data in {data.folder} than rank 0; prepare it "
         "once, then share or copy the folder")
