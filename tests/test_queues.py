"""NCCL's order of messages, on a transport of queues without tags: no deadlock, same results."""

import graphlib
import itertools
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import engine.collectives as c
import engine.group
import engine.pipeline
from data.batches import Data
from engine.group import Group, Work
from engine.mesh import Mesh
from engine.nccl_group import CudaGroup, InOrderGroup
from group import CommunicationError
from run.config import check
from schedules import lower
from tests.harness import (
    FULL,
    VOCAB,
    config,
    local_tensors,
    matches,
    reference,
    same_model,
    sizes_of,
)
from tests.isolation import as_it_was
from tests.pool import HANG
from tests.trainer import Trainer

# ---- NCCL's manner, on a transport that has nothing else ----


class Deadlock(AssertionError):
    pass


class Queues:
    """One first-in-first-out queue per rank and communicator (groups of the same ranks share one),
    no tags, sends that block until received: what may be relied on with NCCL. Ranks are threads.
    `posted` has what each rank posted, in its order, as (group, index); `matched` the pairs of
    operations that met."""

    def __init__(self, patience=HANG):
        self.lock, self.queues = threading.Lock(), {}
        self.posted, self.matched = {}, []
        self.patience = patience  # seconds without any progress: a deadlock, as nobody computes

    def post(self, group, ends):
        """ends: [("send" or "recv", tensor, peer)]. Returns a Work."""
        with self.lock:
            key = tuple(group.ranks)
            queues = self.queues.setdefault(key, [[] for _ in group.ranks])
            mine = self.posted.setdefault(group.ranks[group.rank], [])
            name = (group.name, key, group.rank, group.sequence)
            mine.append(name)
            op = SimpleNamespace(name=name, ends=list(ends), done=threading.Event())
            queues[group.rank].append(op)
            while any(self.meet(queues, r) for r in range(len(queues))):
                pass

        def wait():
            before = -1
            while not op.done.is_set() and before < len(self.matched):
                before = len(self.matched)
                op.done.wait(self.patience)
            with self.lock:
                if op.ends:
                    left = [(kind, group.ranks[peer]) for kind, _, peer in op.ends]
                    raise Deadlock(f"rank {group.ranks[group.rank]} in {op.name}: {left}")

        return SimpleNamespace(wait=wait, is_completed=lambda: not op.ends)

    def meet(self, queues, rank):
        """Let one send at the head of a queue meet a receive at the head of another."""
        if not queues[rank]:
            return False
        out = queues[rank][0]
        for kind, tensor, peer in out.ends:
            into = queues[peer][0] if kind == "send" and queues[peer] else None
            for end in into.ends if into else ():
                if (end[0], end[2]) == ("recv", rank):
                    assert end[1].numel() == tensor.numel(), "messages in another order"
                    end[1].copy_(tensor.view_as(end[1]))
                    self.matched.append((out.name, into.name))
                    out.ends.remove(next(e for e in out.ends if e[1] is tensor and e[2] == peer))
                    into.ends.remove(end)
                    for r in (rank, peer):
                        if not queues[r][0].ends:
                            queues[r].pop(0).done.set()
                    return True
        return False


def post_batch(operations):
    """In the place of torch's batch_isend_irecv. An operation's `group` posts it on a queue."""
    kinds = {dist.isend: "send", dist.irecv: "recv"}
    return [operations[0].group([(kinds[each.op], each.tensor, each.group_peer)
                                 for each in operations])]


def to_queues():
    """A context: what torch is given to post goes to the queues."""
    return patch.multiple(
        dist, batch_isend_irecv=post_batch,
        P2POp=lambda op, tensor, group, group_peer: SimpleNamespace(
            op=op, tensor=tensor, group=group, group_peer=group_peer))


class QueueGroup(InOrderGroup):
    """Submitted work is posted by the host at once, as on CUDA, and here even waited for."""

    def __init__(self, queues, *args):
        super().__init__(*args, partial(queues.post, self))

    def submit(self, job, name):
        job()
        return Work()


class QueueMesh(Mesh):
    def __init__(self, queues, rank, dp=1, pp=1, cp=1, tp=1, ep=1, shard=0):
        shard = shard or dp
        self.sizes = {"rep": dp // shard, "shard": shard // ep, "pp": pp, "ep": ep, "cp": cp,
                      "tp": tp}
        self.device, self.native = torch.device("cpu"), False
        self.timeout, self.pending = HANG, deque()
        self.queues, self.rank, self.groups = queues, rank, {}
        self.world = self.join("world", [list(range(dp * pp * cp * tp))])

    def join(self, name, rows):
        if name not in self.groups:
            row = next((row for row in rows if self.rank in row), [self.rank])
            self.groups[name] = QueueGroup(self.queues, self, name, row, row.index(self.rank))
        return self.groups[name]


def on_queues(cfg, run, queues=None):
    """[run(rank, cfg, mesh)] of ranks that are threads, and the Queues that they used."""
    world, queues = cfg.dp * cfg.pp * cfg.cp * cfg.tp, queues or Queues()
    with as_it_was(), to_queues(), ThreadPoolExecutor(world) as ranks:
        torch.set_num_threads(1)
        jobs = [ranks.submit(run, rank, cfg, QueueMesh(queues, rank, **sizes_of(cfg)))
                for rank in range(world)]
    return [job.result() for job in jobs], queues


def one_order(queues):
    """Whether all operations can be put into one order that is every rank's. Those that meet are
    one: each waits for the other. Then no choice of streams can make ranks wait in a circle."""
    met = {}

    def root(name):
        while met.setdefault(name, name) != name:
            name = met[name]
        return name

    for a, b in queues.matched:
        met[root(a)] = root(b)
    after = {}
    for names in queues.posted.values():
        for a, b in itertools.pairwise(map(root, names)):
            after.setdefault(b, set()).add(a)
    try:
        graphlib.TopologicalSorter(after).prepare()
    except graphlib.CycleError:
        return False
    return True


def _step(rank, cfg, mesh):
    trainer, data = Trainer(cfg, mesh, VOCAB), Data(cfg)
    norm, read = trainer.gradients(data.training(cfg, 0, mesh))
    grads = local_tensors(trainer, "grads")
    trainer.update(norm, cfg.lr)
    loss, norm, _ = read()
    if cfg.zero == 3:
        trainer.validation_loss(data, 1)
    assert trainer.replicas_agree()
    return [{}, {"loss": loss, "norm": norm, "grads": grads, **trainer.statistics}]


AXES = ({"dp": 2, "pp": 2, "tp": 2}, {"dp": 1, "pp": 2, "cp": 2, "tp": 2, "sp": True},
        {"dp": 2, "ep": 2, "pp": 2, "cp": 2, "experts": 4})
# Every second schedule and ZeRO stage with one of these; with FULL=1 every one with each
QUEUE_LAYOUTS = [{"schedule": name, "chunks": v, "zero": zero, **more}
                 for i, (name, v) in enumerate((("gpipe", 1), ("1f1b", 1), ("interleaved", 2),
                                                ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)))
                 for zero in range(4) for j, more in enumerate(AXES)
                 if FULL or ((i + zero) % 3 == j and (i + zero // 2) % 2)]


@pytest.mark.parametrize("flags", QUEUE_LAYOUTS, ids=lambda flags: " ".join(
    f"{k} {v}" for k, v in flags.items()))
def test_first_in_first_out_queues_without_tags_are_enough(corpus, flags):
    """Equal to one process; and all that ranks post can be put into one order."""
    cfg = config(corpus, microbatches=4, batch_size=8, **flags)
    check(cfg, 1)
    got, queues = on_queues(cfg, _step)
    matches(cfg, got, 1, ("grads",), reference(corpus, batch_size=8, **same_model(cfg)))
    assert one_order(queues)


def one_ahead(lists, where):
    """lower(), with each receive in the place of the one before: RF0 F0 RF1 F1 becomes RF0 RF1 F0
    F1."""
    ahead = []
    for actions in lower(lists, where):
        receives = [i for i, action in enumerate(actions) if action.kind in ("RF", "RB")]
        for here, following in pairwise(receives):
            actions.insert(here + 1, actions.pop(following))
        ahead.append(actions)
    return ahead


def test_both_halves_of_an_exchange_are_one_batch():
    """NCCL would run two batches one after the other: of two ranks that exchange, each would wait
    in its first."""
    batches, x = [], torch.zeros(2)
    group = InOrderGroup(Mesh(dp=1), "tp", [0, 1, 2], 1, "communicator")
    with (patch.object(dist, "P2POp", lambda *args, **more: args[0]),
          patch.object(dist, "batch_isend_irecv", lambda operations: batches.append(operations)
                       or [])):
        group.exchange(x, 2, x.clone(), 0)
        group.exchange(x, 2, x.clone(), 0, more=[(x, 0, x.clone(), 2)])
        group.send(x, 2)
    assert batches == [[dist.irecv, dist.isend], [dist.irecv, dist.isend] * 2, [dist.isend]]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_receive_posted_ahead_would_deadlock_on_nccl(corpus, schedule):
    cfg = config(corpus, microbatches=4, batch_size=4, pp=2, schedule=schedule)
    with patch.object(engine.pipeline, "lower", one_ahead), pytest.raises(Deadlock):
        on_queues(cfg, _step, Queues(patience=1.0))


class OnAStream(QueueGroup, CudaGroup):
    """A wait holds the stream: this thread goes on, and polls in read()."""

    def record_event(self):
        """Done once the operations are that this rank has posted until now."""
        before = [*self.mesh.pending]
        return SimpleNamespace(query=lambda: all(
            part.is_completed() for _, posted in before for part in posted))

    def post(self, ends):
        return [SimpleNamespace(wait=lambda: None, is_completed=work.is_completed)
                for work in super().post(ends)]


def test_a_dead_peer_is_noticed_where_the_host_waits_for_the_device():
    queues, meshes = Queues(), []
    for rank in range(3):
        mesh = QueueMesh(queues, rank, dp=3)
        mesh.timeout = 0.3
        mesh.world = OnAStream(queues, mesh, "world", range(3), rank)
        meshes.append(mesh)
    x, world = torch.zeros(4), [mesh.world for mesh in meshes]
    with to_queues():
        for group in world:
            c.reduce_scatter(x, group)
        assert world[0].read(torch.arange(3)) == [0, 1, 2]
        for group in world[:2]:  # rank 2 has died
            c.reduce_scatter(x, group)
    for rank in range(2):
        start = time.time()
        with pytest.raises(CommunicationError) as error:
            world[rank].read(x)
        assert str(error.value) == (
            f"rank {rank}: operation 3 of group world, receive from rank {(rank - 1) % 3}, "
            f"send to rank {(rank + 1) % 3}: not done within 0.3 s")
        assert 0.3 <= time.time() - start < 60  # not the patience of Queues


def on_a_stream():
    """A group of one rank that has CudaGroup's reads, and no device."""
    mesh = Mesh(dp=1, timeout=HANG)
    group = CudaGroup(mesh, "solo", [0], 0)
    group.record_event = lambda: SimpleNamespace(query=lambda: True)
    return group


def test_a_native_collective_that_hangs_is_named_where_the_host_reads():
    """Native collectives are the default on GPUs. They bypass the queues of messages: an event in
    their stream tells whether the device is past them."""
    group = on_a_stream()
    group.mesh.timeout = 0.3
    done = set()
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: "past" in done))
    late(group, 10_000)  # the copy waits for it
    with (patch.dict(engine.group.LIBRARY, all_reduce=lambda tensor, op, group: None),
          patch.object(torch.cuda, "current_stream", lambda: stream)):
        group.run_native("all_reduce", torch.zeros(2), None)
    with pytest.raises(CommunicationError, match="^rank 0: operation 1 of group solo, native "
                                                 "all_reduce: not done within 0.3 s$"):
        group.read(torch.zeros(1))
    done.add("past")
    late(group, 3)
    assert group.read(torch.zeros(1)) == [0]


def operation(what, is_completed):
    """(Work, the library's works), as start() hands them to track()."""
    part = SimpleNamespace(wait=lambda: None, is_completed=is_completed)
    return Work([part.wait], what), [part]


def test_a_read_returns_what_the_device_has_copied_and_not_what_it_is_about_to():
    """The copy to the host is posted; its numbers are there once the event has come."""
    group, posted, copy = on_a_stream(), [], torch.Tensor.copy_
    asked = []

    def arrive():
        asked.append("has the event come?")
        if len(asked) == 3:
            copy(*posted[0])
        return len(asked) >= 3

    group.record_event = lambda: SimpleNamespace(query=arrive)
    with patch("torch.Tensor.copy_", lambda host, tensor, non_blocking: posted.append(
            (host, tensor))):
        read = group.start_read(torch.tensor([3.0, 4.0]))
    posted[0][0].fill_(-1)
    assert read() == [3.0, 4.0]


def test_operations_are_forgotten_in_order_and_only_once_they_are_done():
    """The first is not done, though a later one is: a rank that hangs in it is still looked for."""
    group, done = on_a_stream(), set()
    pending = group.mesh.pending
    for name in ("first", "second", "third"):
        group.track(*operation(name, lambda name=name: name in done))
        done.add("second")
    assert [work.what for work, _ in pending] == ["first", "second", "third"]
    done.add("first")
    group.track(*operation("fourth", lambda: False))
    assert [work.what for work, _ in pending] == ["third", "fourth"]


def test_a_read_waits_for_its_copy_and_for_no_operation_of_another_stream():
    """With experts each layer reads its counts: the gather of the next layer's weights and the
    reduction of gradients go on."""
    group = on_a_stream()
    group.mesh.timeout = 0.3
    group.track(*operation("a gather on the side stream", lambda: False))
    assert group.read(torch.tensor([7])) == [7]


def late(group, times):
    """The copy of the next read comes after it was asked for so many times."""
    asked = []

    def query():
        asked.append("is it there?")
        return len(asked) > times

    group.record_event = lambda: SimpleNamespace(query=query)


def test_a_read_that_is_late_names_none_of_what_was_posted_after_it():
    group = on_a_stream()
    late(group, 3)
    group.track(*operation("before", lambda: True))
    read = group.start_read(torch.tensor([7]))
    group.mesh.pending.append(operation(
        "after", lambda: pytest.fail("asks for what was posted later")))
    assert read() == [7]


def test_a_step_that_waits_for_no_message_may_take_any_time(monkeypatch):
    """--timeout is for messages."""
    group = on_a_stream()
    group.mesh.timeout = 0.0
    group.track(*operation("done", lambda: True))
    late(group, 3)
    assert group.read(torch.tensor([7])) == [7]


def test_a_read_asks_at_once_again_for_a_millisecond(monkeypatch):
    """With experts the device has nothing to do until the host has the counts."""
    group, now, slept = on_a_stream(), [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(now[0]))

    def query():
        now[0] += 0.0004
        return now[0] > 0.0022

    group.record_event = lambda: SimpleNamespace(query=query)
    assert group.read(torch.tensor([7])) == [7]
    assert slept == pytest.approx([0.0012, 0.0016, 0.0020])


def test_a_collective_inside_a_job_leaves_the_last_work_to_its_owner(monkeypatch):
    """On the side stream it comes next. A wait there would mark the Work as complete, and the
    compute stream would not wait."""
    class Stream:
        def __init__(self):
            self.waited = []

        def wait_stream(self, other):
            pass

        def record_event(self):
            return self

        def wait_event(self, event):
            self.waited.append(event)

    compute, current = Stream(), []
    current.append(compute)

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **more: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    group = CudaGroup(Mesh(dp=1), "pair", [0, 1], 0)
    ran = []

    @engine.group.queued
    def inner(tensor, group):
        ran.append(current[-1])

    @engine.group.queued
    def outer(tensor, group):
        inner(tensor, group)
        inner(tensor, group, async_op=True)

    first = inner(torch.zeros(1), group, async_op=True)
    second = outer(torch.zeros(1), group, async_op=True)
    assert ran == [group.side_stream] * 3
    first.wait()
    second.wait()
    assert compute.waited == [group.side_stream] * 2 and group.side_stream.waited == []


def test_an_operation_that_failed_is_named_where_the_host_reads():
    group = on_a_stream()
    late(group, 3)

    def failed():
        raise RuntimeError("NCCL error: remote process exited. Check the log of another rank")

    group.track(*operation("rank 0: operation 9 of group solo, send to rank 1", failed))
    with pytest.raises(CommunicationError, match="^rank 0: operation 9 of group solo, send to rank "
                                                 "1: NCCL error: remote process exited$"):
        group.read(torch.zeros(1))


class Mute:
    """A communicator whose peers say nothing."""

    def send(self, *args):
        return SimpleNamespace(wait=self.fail)

    recv = send

    def fail(self):
        raise RuntimeError("Connection closed by peer")


def test_an_error_numbers_ranks_as_in_the_world():
    """In a group of ranks 3, 5 and 9 the last is rank 2 of the group: nobody knows it by that."""
    group = Group(Mesh(dp=1), "tp", [3, 5, 9], 1, Mute())
    x = torch.zeros(2)
    work = group.exchange(x, group.next, x.clone(), group.prev)
    with pytest.raises(CommunicationError) as error:
        work.wait()
    assert str(error.value) == ("rank 5: operation 1 of group tp, receive from rank 3, send to "
                                "rank 9: Connection closed by peer")


def test_two_groups_used_in_opposite_orders_have_no_one_order():
    queues = Queues()
    queues.posted = {0: ["a0", "b0"], 1: ["b1", "a1"]}
    queues.matched = [("a0", "a1"), ("b0", "b1")]
    assert not one_order(queues)
    queues.posted[1].reverse()
    assert one_order(queues)
