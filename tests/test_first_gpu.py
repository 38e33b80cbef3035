"""What a first run on GPUs meets, shown without one: how torch connects the ranks, and the lines
that are printed."""

from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from engine.group import CommunicationError, naming
from engine.mesh import Mesh, connection_options
from run import processes


@pytest.fixture
def nccl(monkeypatch):
    """A stand-in for NCCL's options, which torch for CPUs lacks."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace),
                        raising=False)


# ---- how torch connects the ranks ----


def test_the_watchdogs_limit_is_twice_ours_and_messages_have_priority(nccl):
    options = connection_options(torch.device("cuda", 0), 30)
    assert options["timeout"] == timedelta(seconds=60)
    assert vars(options["pg_options"]) == {"is_high_priority_stream": True,
                                           "_timeout": timedelta(seconds=60)}
    assert connection_options(torch.device("cpu"), 30) == {"timeout": timedelta(seconds=30)}


@pytest.mark.parametrize("device,of_world", [
    ("cuda", []), ("cpu", [[0, 1, 2, 3]])])
def test_the_same_ranks_have_one_communicator_on_gpus(nccl, monkeypatch, device, of_world):
    """Each takes half a GB of a card. On CPUs each group has a thread, and so one of its own."""
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append((ranks, options)))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    mesh = Mesh(device, timeout=30, dp=2, ep=1, pp=1, cp=1, tp=2)
    replicas, replica = mesh.replicas(), mesh.one_replica()
    assert [group.ranks for group in (replicas, replica, mesh.group("tp"))] == [
        [0, 2], [2, 3], [2, 3]]
    is_one = replica is mesh.group("tp")
    assert is_one == (device == "cuda") and mesh.same_experts() is not replica
    of_pairs = [[0, 2], [1, 3], [0, 1], [2, 3]]  # of replicas(), of one_replica()
    more = [] if is_one else [[0, 1], [2, 3], [0, 2], [1, 3]]  # of "tp", of same_experts()
    assert [ranks for ranks, _ in made] == of_world + of_pairs + more
    limit = timedelta(seconds=60 if is_one else 30)
    assert all(options["timeout"] == limit for _, options in made)


def test_nccl_connects_at_init_and_not_when_the_card_is_full(nccl, monkeypatch):
    asked = {}
    monkeypatch.setattr(dist, "init_process_group",
                        lambda backend, **options: asked.update(options, backend=backend))
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: iter([(
        SimpleNamespace(set=lambda *args: None, add=lambda *args: 1, clone=dist.HashStore), 0, 1)]))
    monkeypatch.setattr(dist, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(processes, "wait_for_start", lambda *args: None)
    for name in ("place", "store", "last_words"):
        monkeypatch.setattr(processes, name, None)
    with patch.object(torch.cuda, "current_device", lambda: 3):
        processes.init("cuda", 30)
    assert (asked["backend"], asked["device_id"]) == ("nccl", torch.device("cuda", 3))
    assert asked["timeout"] == timedelta(seconds=60)
    assert asked["pg_options"].is_high_priority_stream
    asked.clear()
    processes.init("cpu", 30)
    assert asked["backend"] == "gloo" and "device_id" not in asked


# ---- lines ----

NCCL_ERROR = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled \
cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""


def test_nccls_own_reason_is_kept():
    with pytest.raises(CommunicationError) as error, naming("rank 3: joining group tp"):
        raise RuntimeError(NCCL_ERROR)
    assert str(error.value) == ("rank 3: joining group tp: NCCL error, unhandled cuda error: "
                                "Cuda failure 2 'out of memory'")
