"""The streams of engine/nccl_group.py without a GPU: every technique with real numbers, over gloo.

Stand-ins for CUDA's streams and events run everything at once, on CPU tensors, and record which
stream has waited for which. Two uses of the same memory, one of them a write, must be ordered by
such waits. Freed memory goes at once to what comes next on the stream that allocated it: that
stream, or one told by record_stream, must be behind every use. tests/mutants.py removes waits.
"""

import time
import traceback
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import engine.collectives as collectives
import engine.group as group
import engine.mesh as mesh
from engine.nccl_group import CudaGroup
from tests.harness import _train, config, equals_one_process, local_tensors, mesh_of, pool

LIBRARY = {**group.LIBRARY}  # gloo's


class Stream:
    """A stream, or an event, which is a stream that stands still. behind: {stream: how many of its
    operations come before the next one here}, a vector clock."""

    polled = False  # True: the host has polled, and slept, until the device is done
    host = None  # a Stream: what the host has waited for; made by Device

    def __init__(self, behind=()):
        self.behind = dict(behind)

    def wait_stream(self, other):
        for stream, n in other.behind.items():
            self.behind[stream] = max(n, self.behind.get(stream, 0))

    wait_event = wait_stream

    def record_event(self):
        return Stream(self.behind)

    def query(self):
        if Stream.polled:
            Stream.host.wait_stream(self)
        return Stream.polled


def tensors(values):
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tensors(value)
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel():
            yield value


class Device(TorchDispatchMode):
    """A stand-in for one rank's GPU, and for NCCL's part of torch.distributed."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # True would import the compiler

    def __init__(self):
        super().__init__()
        self.current, self.recording = Stream(), True
        self.memory = {}  # storage -> (streams that may have it once it is freed, its uses)
        # NCCL's own stream, and a tensor that stands for the order of its operations
        self.communicators = defaultdict(lambda: (Stream(), torch.empty(1)))
        self.errors = []  # what a GPU might have done in another order
        self.copies = set()  # storages of the host, which the device fills while the host goes on
        Stream.host = Stream()

    def of(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memory:
            self.memory[storage._cdata] = [self.current], {}
            finalize(storage, self.free, storage._cdata).atexit = False
        return self.memory[storage._cdata]

    def check(self, what, stream, uses):
        if any(stream.behind.get(other, 0) < n for other, n in uses):
            self.errors.append(f"{what}\n{''.join(traceback.format_stack(limit=12))}")

    def free(self, storage):
        self.copies.discard(storage)
        (streams, uses), behind = self.memory.pop(storage, ((), {})), Stream()
        for stream in streams:
            behind.wait_stream(stream)
        self.check("freed in use", behind, [(stream, n) for (stream, _), n in uses.items()])

    def resize(self, storage, size):
        if size == 0:
            self.free(storage._cdata)
        return torch._C.StorageBase.resize_(storage, size)

    def operate(self, name, stream, reads, writes):
        """One operation on a stream."""
        stream.behind[stream] = stream.behind.get(stream, 0) + 1
        for write, x in [(False, x) for x in tensors(reads)] + [(True, x) for x in tensors(writes)]:
            _, uses = self.of(x)  # {(stream, is it a write?): the last one}; reads need no order
            self.check(name, stream, [(s, n) for (s, wrote), n in uses.items() if write or wrote])
            if write:
                uses.clear()  # a stream that is behind this write is behind them
            uses[stream, write] = stream.behind[stream]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.recording and not func.is_view:
            writes = [x for x, to in zip(args, func._schema.arguments, strict=False)
                      if to.alias_info and to.alias_info.is_write] + [(kwargs or {}).get("out")]
            held = {x.untyped_storage()._cdata for x in tensors([args, writes])}
            new = [x for x in tensors([result]) if x.untyped_storage()._cdata not in held]
            if new or [*tensors(writes)] or not isinstance(result, torch.Tensor):  # else: a view
                self.operate(func.__name__, self.current, args, [writes, new])
            if func.overloadpacket is torch.ops.aten.copy_ and True in args[2:]:  # non_blocking
                self.copies.add(args[0].untyped_storage()._cdata)
        return result

    def to_list(self, tensor, real=torch.Tensor.tolist):
        """The host reads a tensor. If the device copies it, only after the copy."""
        if tensor.untyped_storage()._cdata in self.copies:
            _, uses = self.of(tensor)
            self.check("read by the host", Stream.host, [(s, n) for (s, _), n in uses.items()])
        return real(tensor)

    def batch(self, operations, real=dist.batch_isend_irecv):
        """On NCCL's own stream for this communicator, behind the current one."""
        nccl, order = self.communicators[operations[0].group]
        nccl.wait_stream(self.current)
        reads, writes = ([x.tensor for x in operations if x.op is kind]
                         for kind in (dist.isend, dist.irecv))
        self.operate("message", nccl, reads, [writes, order])
        event, Stream.polled = nccl.record_event(), False
        with patch.multiple(self, recording=False):
            works = real(operations)

        def wait():
            while works:
                works.pop().wait()  # gloo's: once
            self.current.wait_event(event)
            for held in (reads, writes, operations):  # by NCCL's Work, until wait()
                held.clear()

        return [SimpleNamespace(wait=wait, is_completed=event.query)]

    def native(self, real):
        """One of NCCL's collectives without async_op: on the current stream."""
        def run(out, *inputs, group):
            with patch.multiple(self, recording=False):
                # NCCL gathers in place; gloo wants a copy
                apart = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
                real(out, *apart, group=group)
            self.operate(real.__name__, self.current, inputs, [out, self.communicators[group][1]])

        return run

    def look(self, trainer, kind):
        """What only the tests look at. They wait for no stream: that would hide a missing wait."""
        def gather(flat, members, all_gather=LIBRARY["all_gather"]):
            own = collectives.own_chunk(flat, members).clone()
            all_gather(flat, own, group=members.communicator)

        with patch.multiple(self, recording=False), patch.object(collectives, "all_gather", gather):
            return local_tensors(trainer, kind)


@contextmanager
def stand_ins():
    """CUDA's streams and NCCL are a Device. At the end: was everything in order?"""
    device = Device()
    with (patch.multiple(torch.cuda, Stream=lambda *args, **kwargs: Stream(),
                         current_stream=lambda: device.current,
                         stream=lambda stream: patch.multiple(device, current=stream)),
          patch("torch.Tensor.record_stream", lambda x, stream: device.of(x)[0].append(stream)),
          patch("torch.UntypedStorage.resize_", lambda x, size: device.resize(x, size)),
          patch("torch.Tensor.tolist", lambda x: device.to_list(x)),
          patch.object(dist, "batch_isend_irecv", device.batch),
          patch.object(time, "sleep", lambda seconds: setattr(Stream, "polled", True)),
          patch.object(mesh, "InOrderGroup", CudaGroup),
          patch.dict(group.LIBRARY, {name: device.native(real) for name, real in LIBRARY.items()}),
          patch("tests.harness.local_tensors", device.look), device):
        yield
    assert not device.errors, "\n".join(device.errors[:3])


def _on_streams(rank, cfg):
    with stand_ins():
        return _train(rank, cfg, mesh=mesh_of(cfg, in_order=True))


LAYOUTS = {  # of four ranks
    "experts_tp": {"dp": 2, "tp": 2, "experts": 4, "microbatches": 2, "bucket_mb": 0.01},
    "experts_swap": {"dp": 2, "ep": 2, "experts": 4, "cp": 2, "cp_attention": "all-to-all",
                     "zero": 3},
    "experts_1f1b": {"dp": 2, "ep": 2, "experts": 4, "pp": 2, "collectives": "native"},
    "ring_zero2": {"cp": 4, "zero": 2, "microbatches": 2, "recompute": True},
    "ring_1f1b": {"cp": 2, "pp": 2, "microbatches": 3},
    "sp_zero3": {"tp": 2, "sp": True, "dp": 2, "zero": 3, "collectives": "native"},
    "interleaved_zero1": {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 2,
                          "dp": 2, "zero": 1, "collectives": "native"},
    "zb_h1_tp": {"pp": 2, "schedule": "zb-h1", "tp": 2, "microbatches": 2},
    "zb_v_zero3": {"pp": 2, "schedule": "zb-v", "chunks": 2, "microbatches": 3, "dp": 2, "zero": 3}}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_cuda_manner_equals_one_process(corpus, name):
    equals_one_process(corpus, _on_streams, **LAYOUTS[name])


def _sum_what_nothing_else_holds(rank, cfg):
    with stand_ins():
        group = mesh_of(cfg, in_order=True).world
        work = group.submit(partial(collectives.all_reduce, torch.ones(1000), group), "a sum")
        work.wait()


def test_a_job_holds_its_tensors_until_it_has_been_waited_for(corpus):
    pool(2, _sum_what_nothing_else_holds, config(corpus, dp=2))
