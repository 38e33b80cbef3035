"""The streams of nccl_group.py without a GPU: every technique with real numbers, over gloo.

Stand-ins for CUDA's streams and events run everything at once, on CPU tensors, and record which
stream has waited for which. Two uses of the same bytes, one of them a write, must be ordered by
such waits. Freed memory goes at once to what comes next on the stream that allocated it: that
stream, or one told by record_stream, must be behind every use.
"""

import inspect
import time
import traceback
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import group
import mesh
from nccl_group import CudaGroup
from tests.harness import HERE, _train, config, equals_one_process, mesh_of, pool


class Stream:
    """A stream, or an event, which is a stream that stands still. behind: {stream: how many of its
    operations come before the next one here}, a vector clock."""

    def __init__(self, device, behind=()):
        self.device, self.behind = device, dict(behind)

    def wait_stream(self, other):
        for stream, n in other.behind.items():
            self.behind[stream] = max(n, self.behind.get(stream, 0))

    wait_event = wait_stream

    def record_event(self):
        return Stream(self.device, self.behind)

    def query(self):
        if self.device.polling:
            self.device.host.wait_event(self)
        return all(self.device.host.behind.get(s, 0) >= n for s, n in self.behind.items())


def tensors(values):
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tensors(value)
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel():
            yield value


@cache
def written(func):
    """Places and names of the arguments that an operation writes."""
    found = [(i, a.name) for i, a in enumerate(func._schema.arguments)
             if a.alias_info and a.alias_info.is_write]
    return [i for i, _ in found], {name for _, name in found}


class Device(TorchDispatchMode):
    """One rank's GPU. errors: what a real one might have done in another order."""

    def __init__(self):
        super().__init__()
        self.errors, self.works = [], []
        self.memory = {}  # storage -> stream that allocated it, streams recorded, uses
        self.landing = {}  # storage -> functions that complete the receives into it
        self.nccl = {}  # communicator -> its own stream
        self.host = Stream(self)  # what the host has seen to be done
        self.off = False  # True: our own doing
        self.polling = False  # False: the host is far ahead of the device
        self.current = Stream(self)

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # True would import a compiler

    def of(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memory:
            self.memory[storage._cdata] = SimpleNamespace(stream=self.current, also=set(), uses={})
            finalize(storage, self.free, storage._cdata).atexit = False
        return self.memory[storage._cdata]

    def error(self, what, tensor=""):
        lines = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_stack()
                 if Path(f.filename).parent == HERE]
        self.errors.append(f"{what} {tensor} at {' '.join(lines)}")

    def free(self, storage):
        memory = self.memory.pop(storage, None)
        behind = Stream(self)
        for stream in (self.host, memory.stream, *memory.also) if memory else ():
            behind.wait_stream(stream)
        for uses in memory.uses.values() if memory else ():
            if any(behind.behind.get(s, 0) < n for use in uses for s, n in use.items()):
                self.error("freed in use")
                break

    def resize(self, storage, size):
        if size == 0:
            self.free(storage._cdata)
        return torch._C.StorageBase.resize_(storage, size)

    def operate(self, what, stream, reads, writes):
        """One operation on a stream."""
        stream.wait_event(self.host)
        stream.behind[stream] = stream.behind.get(stream, 0) + 1
        for write, values in enumerate((reads, writes)):
            for tensor in tensors(values):
                self.use(what, stream, tensor, write)

    def use(self, what, stream, tensor, write):
        first = tensor.storage_offset() * tensor.element_size()
        last = first + tensor.element_size() * (
            1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))
        uses = self.of(tensor).uses
        for (a, b), old in list(uses.items()):
            if a < last and first < b:
                clash = {**old[1], **old[0]} if write else old[1]
                for s in clash:
                    n = max(old[1].get(s, 0), old[0].get(s, 0) if write else 0)
                    if stream.behind.get(s, 0) < n:
                        self.error(f"{what} {'writes' if write else 'reads'}", [*tensor.shape])
                if write and first <= a and b <= last:
                    del uses[a, b]
        uses.setdefault((first, last), ({}, {}))[write][stream] = stream.behind[stream]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.off or func.is_view:
            return func(*args, **kwargs)
        places, names = written(func)
        writes = [args[i] for i in places if i < len(args)]
        writes += [kwargs[name] for name in names & kwargs.keys()]
        inputs = [*args, *kwargs.values()]
        self.land(inputs)
        result = func(*args, **kwargs)
        held = {t.untyped_storage()._cdata for t in tensors(inputs)}
        new = [t for t in tensors([result]) if t.untyped_storage()._cdata not in held]
        if new or writes or not isinstance(result, torch.Tensor):  # else: a view
            self.operate(func.__name__, self.current, inputs, [writes, new])
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host.wait_stream(self.current)
        return result

    @contextmanager
    def apart(self):
        kept, self.off = self.off, True
        yield
        self.off = kept

    def land(self, values):
        for tensor in tensors(values):
            for finish in self.landing.pop(tensor.untyped_storage()._cdata, ()):
                finish()

    def batch(self, operations):
        """dist.batch_isend_irecv: on the communicator's stream, behind the current one."""
        nccl = self.nccl.setdefault(operations[0].group, Stream(self))
        nccl.wait_stream(self.current)
        ends = [[op.tensor for op in operations if op.op is kind]
                for kind in (dist.isend, dist.irecv)]
        self.operate("message", nccl, *ends)
        event = nccl.record_event()
        with self.apart():
            self.land(ends[0])
            buffers = [op.tensor.clone() for op in operations]
            works = REAL_BATCH([dist.P2POp(op.op, buffer, group=op.group, group_peer=op.group_peer)
                                for op, buffer in zip(operations, buffers, strict=True)])

        def finish():
            with self.apart():
                while works:
                    works.pop().wait()
                for op, buffer in zip(operations, buffers, strict=True):
                    if op.op is dist.irecv and buffers:
                        op.tensor.data.copy_(buffer)
                buffers.clear(), operations.clear(), ends.clear()

        def wait():
            finish()
            self.current.wait_event(event)

        for tensor in ends[1]:
            self.landing.setdefault(tensor.untyped_storage()._cdata, []).append(finish)
        self.works.append(finish)
        return [SimpleNamespace(wait=wait, is_completed=event.query)]

    def native(self, real):
        """One of NCCL's collectives, posted without async_op: on the current stream."""
        def run(out, *args, group):
            with self.apart():
                self.land([out, args])
                real(out, *args, group=group)
            self.operate(real.__name__, self.current, args, [out])
        return run

    @contextmanager
    def on(self, stream):
        kept, self.current = self.current, stream
        yield
        self.current = kept

    def sleep(self, seconds):
        self.polling = True

    def tolist(self, tensor):
        self.host.wait_event(self.current)
        self.polling = False
        return torch._C.TensorBase.tolist(tensor)

    @contextmanager
    def in_place_of_cuda(self):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("Stream", lambda *a, **k: Stream(self)), ("stream", self.on),
                                ("current_stream", lambda: self.current)):
                patch.setattr(torch.cuda, name, value)
            patch.setattr(torch.Tensor, "record_stream", lambda t, s: self.of(t).also.add(s))
            patch.setattr(torch.Tensor, "tolist", lambda t: self.tolist(t))
            patch.setattr(torch.UntypedStorage, "resize_", lambda s, n: self.resize(s, n))
            patch.setattr(dist, "batch_isend_irecv", self.batch)
            patch.setattr(time, "sleep", self.sleep)
            patch.setattr(mesh, "InOrderGroup", CudaGroup)
            for name, real in group.LIBRARY.items():
                patch.setitem(group.LIBRARY, name, self.native(real))
            with self:
                yield patch
            for finish in self.works:
                finish()


REAL_BATCH = dist.batch_isend_irecv


def _on_streams(rank, cfg):
    device = Device()
    with device.in_place_of_cuda():
        trace = _train(rank, cfg, mesh=mesh_of(cfg, in_order=True))
    assert not device.errors, "\n".join(device.errors[:10])
    return trace


@pytest.mark.parametrize("flags", [
    {"dp": 2, "tp": 2, "microbatches": 3, "bucket_mb": 0.01},
    {"dp": 2, "zero": 1, "pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 2,
     "collectives": "native"},
    {"dp": 2, "zero": 2, "cp": 2, "microbatches": 3, "recompute": True},
    {"dp": 2, "zero": 3, "tp": 2, "sp": True, "microbatches": 2, "collectives": "native"},
    {"dp": 2, "ep": 2, "experts": 4, "zero": 3, "cp": 2, "cp_attention": "all-to-all"},
    {"dp": 2, "zero": 2, "pp": 2, "schedule": "zb-h1", "tp": 2, "microbatches": 3},
    {"dp": 2, "zero": 3, "pp": 2, "schedule": "zb-v", "chunks": 2, "microbatches": 3},
    {"dp": 2, "ep": 2, "experts": 4, "tp": 2, "pp": 2, "microbatches": 3, "collectives": "native"},
    {"pp": 2, "cp": 2, "tp": 2, "sp": True, "microbatches": 4, "schedule": "1f1b"},
], ids=lambda flags: " ".join(f"{k} {v}" for k, v in flags.items()))
def test_the_cuda_manner_equals_one_process(corpus, flags):
    equals_one_process(corpus, _on_streams, **flags)
