"""A pool of 8 processes, each of which waits for a function to run as one rank of a world.

    pool(4, fn, *args)                          runs fn(rank, *args) on four ranks; fn is top-level
"""

import io
import math
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta

import pytest
import torch
from torch.distributed import ProcessGroupGloo

import engine.group as engine_group
import engine.mesh as engine_mesh
import mesh as mesh_file
from run.config import Config
from run.processes import init, shutdown


class NumpyPickler(pickle.Pickler):
    """Copies tensors as numpy's arrays. torch's own way passes a file of shared memory for each."""

    def reducer_override(self, value):
        if type(value) is not torch.Tensor or value.dtype == torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (value.detach().cpu().numpy(),)


def packed(value):
    with io.BytesIO() as file:
        NumpyPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


class Communicators:
    """Keeps gloo's connections for the tests to come. To close one takes 10 ms, and Python does so
    at any time: when it collects a mesh of some test before. `asked` has the groups that all ranks
    of this test make, in this rank's order; they must make the same ones in the same order."""

    def __init__(self, folder):
        self.store = torch.distributed.FileStore(f"{folder}/groups")
        self.device = ProcessGroupGloo.create_device(interface="lo")  # a thread, shared by all
        self.kept, self.asked, self.meshes = {}, [], []
        self.usual = engine_mesh.Mesh.communicator

    def communicator(self, mesh, name, ranks):
        """Replaces communicator() of both Meshes, but for groups that call torch's functions."""
        self.asked.append((name, ranks))
        if mesh not in self.meshes:
            self.meshes.append(mesh)
        if isinstance(mesh, engine_mesh.Mesh) and (mesh.native or mesh.group_class.in_order):
            return self.usual(mesh, name, ranks)
        # A second mesh of a test has connections of its own: the first may have work under way
        number = self.meshes.index(mesh)
        key = math.prod(mesh.sizes.values()), number, name, tuple(ranks)
        if mesh.rank in ranks and key not in self.kept:
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout = [self.device], timedelta(seconds=60)
            store = torch.distributed.PrefixStore(str(key), self.store)
            self.kept[key] = ProcessGroupGloo(store, ranks.index(mesh.rank), len(ranks), options)
        return self.kept.get(key)

    def drain(self):
        """Wait for what the test has left under way, so that no message meets the next test's."""
        for mesh in self.meshes:
            for group in mesh.groups.values():
                if isinstance(group, engine_group.Group):
                    group.last.wait()
        self.meshes, self.asked = [], []


def _worker(rank, jobs, results, folder):
    torch.set_num_threads(1)
    groups = Communicators(folder)
    for owner in (engine_mesh.Mesh, mesh_file.Mesh):
        owner.communicator = lambda *args: groups.communicator(*args)
    # Lazy: the world's own connections, which only shutdown() uses, are made for the barrier
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_GLOO_LAZY_INIT="1")
    # Several ranks on one GPU: NCCL takes them for different machines
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    while True:
        number, fn, world, rendezvous, args = jobs.get()
        try:
            device = next((arg.device for arg in args if isinstance(arg, Config)), "cpu")
            init(device, 60, f"file://{rendezvous}", rank, world)
            value = fn(rank, *args)
            results.put((number, rank, packed((value, groups.asked)), None))
            groups.drain()
            shutdown()  # while the test looks at the results
        except BaseException:
            results.put((number, rank, None, traceback.format_exc()))
            shutdown(together=False)


def forkserver():
    """Processes start from one that has imported torch: in a tenth of a second."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness", "torch._dynamo"])
    return context


class Pool:
    def __init__(self):
        self.processes, self.number, self.folder = [], 0, tempfile.mkdtemp()

    def start(self, size=8):
        context = forkserver()
        self.results = context.SimpleQueue()
        self.jobs = [context.SimpleQueue() for _ in range(size)]
        folder = tempfile.mkdtemp()
        self.processes = [context.Process(target=_worker, args=(r, q, self.results, folder),
                                          daemon=True) for r, q in enumerate(self.jobs)]
        for process in self.processes:
            process.start()

    def __call__(self, world, fn, *args, timeout=120):
        """Run fn(rank, *args) on ranks 0 .. world-1 and return the list of what they returned."""
        if not self.processes:
            self.start()
        self.number += 1
        for jobs in self.jobs[:world]:
            jobs.put((self.number, fn, world, f"{self.folder}/{self.number}", args))
        values, deadline = {}, time.time() + timeout
        while len(values) < world:
            if self.results._reader.poll(max(0, deadline - time.time())):
                number, rank, value, error = self.results.get()
                if error is None:
                    values[rank] = pickle.loads(value)
                    continue
                message = f"rank {rank} of {world}:\n{error}"
            else:
                message = f"ranks {set(range(world)) - set(values)} did not answer in {timeout} s"
            self.stop()
            raise AssertionError(message)
        assert all(asked == values[0][1] for _, asked in values.values()), "other groups"
        return [values[r][0] for r in range(world)]

    def stop(self):
        for process in self.processes:
            process.kill()
        self.processes = []


pool = Pool()


@pytest.fixture(scope="session", autouse=True)
def _stop_pool():
    yield
    pool.stop()
