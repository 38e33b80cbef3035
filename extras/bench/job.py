"""Rows of a race, and our side of it: the trainer of train.py, its checkpoint, its collectives.

A row names two sides. A side is a function that takes a Job and returns a step function. Each call
of the step function runs one step and returns this rank's share of the loss.
"""

import os
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import torch

import engine.collectives
import engine.group
import engine.mesh
import group
import mesh
import train
from engine.shared_memory import Neighbours
from run import checkpoint
from run.config import Config, choose_parts

SMALL = dict(n_layer=6, n_head=6, n_embd=384)
# name -> model, tokens per sequence, and batch_size: sequences in all or, if negative, sequences of
# each data rank
SIZES = {
    "compute": dict(SMALL, block_size=128, batch_size=16),
    "communication": dict(SMALL, block_size=32, batch_size=-1),
    "tiny": dict(n_layer=4, n_head=4, n_embd=128, block_size=32, batch_size=8),
    "2 sequences a rank": dict(SMALL, block_size=128, batch_size=-2),
    "8 sequences in all": dict(SMALL, block_size=128, batch_size=8),
    "long": dict(SMALL, block_size=2048, batch_size=1),
    "8 x 2048 tokens": dict(n_layer=2, n_head=4, n_embd=128, block_size=2048, batch_size=8),
    "50257 words": dict(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=4),
} | {f"S = {S}": dict(n_layer=2, n_head=4, n_embd=128, block_size=S, batch_size=1)
     for S in (256, 512, 1024, 2048, 4096, 8192)}


class Row(NamedTuple):
    name: str
    n: int  # ranks
    size: object  # a key of SIZES, or the KB of a collective
    ours: object  # Job -> step function
    peer: object  # likewise
    goal: float | None  # the ratio aimed at
    layout: dict = {}  # flags of Config; --fast if there is no "fast" among them
    limit: float = 1.0  # the peer's time is multiplied by this factor (bench.against_limits)
    steps: int = 1  # steps in a turn


class Job:
    """All that a side of a row needs on one rank: flags, batches, communicators."""

    def __init__(self, row, rank, communicators, folder):
        """communicators: {n: {name: torch's ProcessGroup of the first n ranks}}."""
        self.row = row
        self.rank = rank
        self.n = row.n  # ranks
        self.communicators = communicators
        self.folder = folder  # for checkpoints
        self.peer_group = communicators[row.n]["peer"]  # for torch's side
        self.vocabulary = 50257 if row.size == "50257 words" else 256
        self.last_mesh = None  # the mesh that mesh() made last
        # Waits for messages that still travel after a step. Replaced in trainer()
        self.drain = lambda: None
        if row.size in SIZES:
            self.plan(row.layout)

    def plan(self, layout):
        """Make cfg and this rank's batches for a layout, which may be another one than the row's.
        The data is the same in each, but for sizes that say sequences of each data rank."""
        cfg = Config(**{"dp": 1, "microbatches": 1, "chunks": 1, "fast": "all",
                        **SIZES[self.row.size], **layout})
        choose_parts(cfg)
        if cfg.batch_size < 0:  # sequences of each data rank
            cfg.batch_size *= -cfg.dp
        generator = torch.Generator().manual_seed(0)
        shape = (cfg.batch_size, cfg.block_size + 1)
        ids = torch.randint(self.vocabulary, shape, generator=generator)
        mine = ids.chunk(cfg.dp)[self.rank % cfg.dp].chunk(cfg.microbatches)
        self.cfg = cfg
        self.batches = [(rows[:, :-1], rows[:, 1:], None) for rows in mine]

    def mesh(self, plain=False):
        """The row's ranks along the one axis that its layout has. plain: of the root's Group, which
        knows nothing of --fast."""
        layout = self.row.layout or {"dp": self.n}
        # max() takes the first of equal sizes. ep comes first, because where dp and ep are equal
        # the experts are shared by all data ranks
        axis = max(("ep", "dp", "pp", "cp", "tp"), key=lambda axis: layout.get(axis, 1))
        group_class = group.Group if plain else engine.group.Group
        self.last_mesh = RowMesh(self.rank, self.communicators[self.n], axis, self.n, group_class)
        return self.last_mesh


class RowMesh(engine.mesh.Mesh):
    """The first n ranks of the bench, with communicators that all rows share: Mesh would make new
    ones for each row."""

    def __init__(self, rank, communicators, axis, n, group_class):
        """Sets the attributes that the two Mesh classes set (mesh.py, engine/mesh.py), but makes no
        communicators. Left out are timeout, which is read when a communicator is made, and what
        GPUs share. communicators: {name of a group: torch's ProcessGroup}; axis: that of the n
        ranks. "dp": the data ranks, over all of which ZeRO shards."""
        self.rank = rank
        self.communicators = communicators
        self.sizes = dict.fromkeys(AXES, 1) | {"shard" if axis == "dp" else axis: n}
        self.group_class = group_class
        self.device = torch.device("cpu")
        self.native = False
        self.pending = deque()
        self.groups = {}
        self.world = self.join("world", [list(range(n))])
        if group_class is engine.group.Group and n > 1:
            self.meet()

    def meet(self):
        self.neighbours = Neighbours(self.world, timeout=1800)

    def join(self, name, rows):
        """Like the root: a group for each name, also of the root's Group."""
        return mesh.Mesh.join(self, name, rows)

    def communicator(self, name, ranks):
        return self.communicators[name]

    def bytes_sent(self):
        return sum(each.bytes_sent for each in self.groups.values())

    def drain(self):
        """Wait for all messages that travel in the background: only the engine's groups have any.
        """
        for each in self.groups.values():
            if isinstance(each, engine.group.Group):
                each.last.wait()


# Axes of the mesh, the outermost first. Groups along one of them share a communicator, because a
# row has one axis with more than one rank. Names of the other groups that a side may make:
AXES = ("rep", "shard", "pp", "ep", "cp", "tp")
JOINED = ("dp", "shard_ep_cp", "shard_cp", "pp_ends", "world", "peer")


def trainer(job):
    """The trainer of train.py, with the parts that job.cfg.fast names."""
    mesh = job.mesh(plain=not job.cfg.fast)
    t = train.Trainer(job.cfg, mesh, job.vocabulary)
    job.drain = mesh.drain

    def step():
        _, sums = t.step(job.batches, job.cfg.lr)
        return sums[0].item() if job.rank == 0 else 0.0  # the loss of all ranks together

    return step


def save_and_load(job):
    """Save a checkpoint and load it, after a first step: the peer takes one, too, because its
    optimizer has no moments before (torch_side.dcp)."""
    cfg = replace(job.cfg, out=f"{job.folder}/ours")
    os.makedirs(cfg.out, exist_ok=True)
    t = train.Trainer(cfg, job.mesh(), job.vocabulary)
    t.step(job.batches, cfg.lr)

    def step():
        checkpoint.load(t, checkpoint.save(t, 1, job.folder))
        return 0.0

    return step


def repeats(row):
    """How many calls of a collective are one step: as many as have 256 KB together, or one."""
    return 1 if row.size in SIZES else max(1, 256 // row.size)


def repeated(job, call):
    """A step function that calls a collective repeats() times."""
    def step():
        for _ in range(repeats(job.row)):
            call()
        return 0.0

    return step


def collective(job):
    """The engine's collective of the row's name; all_reduce for any other name."""
    function = getattr(engine.collectives, job.row.name, engine.collectives.all_reduce)
    tensor = torch.zeros(256 * job.row.size)  # 4 bytes each: row.size KiB
    ranks = job.mesh().group("dp")
    assert ranks.size == job.n  # or nothing would be sent, very fast
    return repeated(job, lambda: function(tensor, ranks))
