"""The engine's parts, under the names by which train.py knows the root's.

    mesh        Mesh, all_reduce      GPUs, torch's own collectives, messages in the background
    cp          split_sequences       torch's fused kernel in each hop of the ring
    tp          tensor_parallel       messages during the products; also sequence_parallel
    ep          spread_experts        over tensor ranks, too
    ddp         Reducer               DDP, ZeRO-1, 2, 3: buckets that travel during backward
    optimizer   Optimizer             fused AdamW; float16's loss scale
    pp          Pipeline              all schedules

A part has the same members here and in the root, so train.py need not know which of the two it has.
What several parts of a run share is made here: the queue of weight gradients that zero bubble
defers, the loss scale. Which flag needs which part: run/config.py.
"""

import torch

from engine.collectives import all_reduce, barrier
from engine.compiled import compile_layer
from engine.context_parallel import split_sequences
from engine.expert_parallel import spread_experts
from engine.mesh import Mesh
from engine.optimizer import AdamW, LossScale
from engine.pipeline import Deferred, Pipeline
from engine.tensor_parallel import parallelize
from engine.zero import REDUCERS
from schedules import splits_backward

NAMES = {"mesh": ("Mesh", "all_reduce"), "cp": ("split_sequences",),
         "tp": ("tensor_parallel", "sequence_parallel"), "ep": ("spread_experts",),
         "ddp": ("Reducer",), "optimizer": ("Optimizer",), "pp": ("Pipeline",)}


def replace(parts, cfg):
    """Replace those attributes of `parts` that cfg.fast names."""
    engine = Engine(cfg)
    for part in cfg.fast.split(","):
        for name in NAMES[part]:
            setattr(parts, name, getattr(engine, name))


class Engine:
    """The engine's parts of one run. A method has the name of the part that it makes, so `Mesh` in
    its own body means the imported class."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.dtype = getattr(torch, cfg.dtype)
        # check() (run/config.py) resolves "auto": a Trainer sees it only in tests that skip check()
        self.device = torch.device("cpu" if cfg.device == "auto" else cfg.device)
        self.deferred = Deferred()
        self.scale = LossScale(self.dtype, self.device)
        self.all_reduce = all_reduce
        self.split_sequences = split_sequences
        self.spread_experts = spread_experts

    def Mesh(self, device, timeout, **sizes):
        return Mesh(device, timeout, native=self.cfg.collectives == "native",
                    transport=self.cfg.transport, **sizes)

    def tensor_parallel(self, model, group, sp=False):
        defer = self.deferred.add if splits_backward(self.cfg.schedule) else None
        parallelize(model, group, sp, defer)

    def sequence_parallel(self, model, group):
        self.tensor_parallel(model, group, sp=True)

    def Reducer(self, stages, value):
        cfg = self.cfg
        if cfg.compile:  # now that all layers have their parallel forms
            for layer in (layer for layers in stages.values() for layer in layers):
                compile_layer(layer)
        return REDUCERS[cfg.zero](
            stages, None, value, self.dtype, self.device)

    def Optimizer(self, cfg, reducer):
        return AdamW(cfg, reducer, self.scale)

    def Pipeline(self, stages, group, cfg, shape, dtype):
        if self.device.type == "cuda":  # NCCL connects a group's ranks at the first use: now
            for ranks in group.mesh.groups.values():
                barrier(ranks)
        return Pipeline(stages, group, cfg, shape, dtype, self.deferred, self.scale)
