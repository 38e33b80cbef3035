"""A pool of 8 processes, each of which waits for a function to run as one rank of a world.

    pool(4, fn, *args)                          runs fn(rank, *args) on four ranks; fn is top-level
"""

import io
import math
import os
import pickle
import shutil
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
from torch.distributed import ProcessGroupGloo

from mesh import Mesh
from run.config import Config
from run.processes import init, shutdown

# Seconds after which a test waits no longer, and fails. Minutes, because a busy machine is no
# failure; they cost nothing where all is well
HANG = 600


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
    """Keeps this rank's connections to other ranks from test to test.

    A mesh would make connections of its own, and close them when Python collects the mesh: at any
    time, perhaps within a later test, and at 10 ms each. So Mesh.communicator() is replaced by the
    one below."""

    def __init__(self, folder):
        self.store = torch.distributed.FileStore(f"{folder}/groups")  # where ranks find each other
        self.device = ProcessGroupGloo.create_device(interface="lo")  # a thread, shared by all
        # {(ranks of the world, which mesh of the test, its ranks, how many before): connections}
        self.kept = {}
        # Groups that this test has made, in order. The pool compares them: all ranks of a mesh must
        # make the same groups in the same order, also those to which they do not belong
        self.asked = []
        self.usual = Mesh.communicator

    def communicator(self, mesh, ranks):
        """The kept connections of a group; None where this rank is not in it."""
        number = self.asked.count(ranks)
        self.asked.append(ranks)
        # Groups that call torch's own collectives need a process group that torch knows
        if mesh.native or mesh.device.type == "cuda":
            return self.usual(mesh, ranks)
        # Each group of a test has connections of its own
        key = math.prod(mesh.sizes.values()), number, tuple(ranks)
        if mesh.rank in ranks and key not in self.kept:
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout = [self.device], timedelta(seconds=HANG)
            store = torch.distributed.PrefixStore(str(key), self.store)
            self.kept[key] = ProcessGroupGloo(store, ranks.index(mesh.rank), len(ranks), options)
        return self.kept.get(key)


def _worker(rank, jobs, results, folder):
    torch.set_num_threads(1)
    groups = Communicators(folder)
    Mesh.communicator = lambda *args: groups.communicator(*args)
    # Lazy: the world's own connections, which only shutdown() uses, are made for the barrier
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_GLOO_LAZY_INIT="1")
    # Several ranks on one GPU: NCCL takes them for different machines
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    while True:
        try:
            number, fn, world, rendezvous, args = jobs.recv()
        except EOFError:  # pytest has ended, however it did
            return
        try:
            device = next((arg.device for arg in args if isinstance(arg, Config)), "cpu")
            init(device, HANG, f"file://{rendezvous}", rank, world)
            value = fn(rank, *args)
            results.put((number, rank, packed((value, groups.asked)), None))
            groups.asked = []
            shutdown()  # while the test looks at the results
        except BaseException:
            results.put((number, rank, None, traceback.format_exc()))
            shutdown(together=False)


def forkserver():
    """Processes start from one that has imported torch: in a tenth of a second."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    return context


class Pool:
    """Starts its processes when first called, and anew after a failure."""

    def __init__(self):
        self.processes, self.number = [], 0

    def start(self, size=8):
        context = forkserver()
        self.folder = tempfile.mkdtemp()
        self.results = context.SimpleQueue()
        # Only this process holds the sending ends: when it ends, the others read an end of file
        receiving, self.jobs = zip(*(context.Pipe(duplex=False) for _ in range(size)), strict=True)
        self.processes = [context.Process(target=_worker, daemon=True,
                                          args=(rank, jobs, self.results, self.folder))
                          for rank, jobs in enumerate(receiving)]
        for process in self.processes:
            process.start()

    def __call__(self, world, fn, *args, timeout=HANG):
        """Run fn(rank, *args) on ranks 0 .. world-1 and return the list of what they returned."""
        if not self.processes:
            self.start()
        self.number += 1
        for jobs in self.jobs[:world]:
            jobs.send((self.number, fn, world, f"{self.folder}/{self.number}", args))
        values, deadline = {}, time.time() + timeout
        ends = {process.sentinel: rank for rank, process in enumerate(self.processes[:world])}
        while len(values) < world:
            ready = wait([self.results._reader, *ends], max(0, deadline - time.time()))
            if self.results._reader in ready:
                number, rank, value, error = self.results.get()
                if error is None:
                    values[rank] = pickle.loads(value)
                    continue
                message = f"rank {rank} of {world}:\n{error}"
            elif ready:
                message = f"ranks {[ends[end] for end in ready]} of {world} have ended, no answer"
            else:
                message = f"ranks {set(range(world)) - set(values)} did not answer in {timeout} s"
            self.stop()
            raise AssertionError(message)
        assert all(asked == values[0][1] for _, asked in values.values()), "other groups"
        return [values[r][0] for r in range(world)]

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        if self.processes:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.processes = []


pool = Pool()  # of this process: with test_all.py each worker has one
