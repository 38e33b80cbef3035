"""The manner of GPUs, without a GPU: what NCCL promises is enough for each schedule, ring and
exchange; the background runs on a stream; a step makes the host wait nowhere; a hang is a line.

The stand-in for NCCL: an operation of a communicator blocks the later ones of this communicator on
its rank until it is matched; messages have no tags; wait() blocks. Ranks are threads."""

import itertools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import collectives as c
import train
from context_parallel import ring_attention, zigzag
from data.batches import Data
from mesh import Mesh
from model import causal_attention
from optimizer import AdamW, LossScale
from run.config import check
from run.copies import whole_slices
from tests.harness import VOCAB, bare, close, config, matches, reference, same_model
from tests.isolation import as_it_was
from transport.background import Background
from transport.nccl import Nccl

# ---- a stand-in for NCCL ----


class Deadlock(AssertionError):
    pass


class Queues:
    """First-in-first-out queues of operations, one for each rank and communicator. It knows when
    all ranks wait, so a deadlock is found at once, and never by a timeout."""

    def __init__(self, world):
        self.changed = threading.Condition()
        self.running = world  # ranks that have not ended
        self.waiting = []  # operations that a rank waits for
        self.queues = {}  # communicator -> a queue per rank
        self.failed = None

    def post(self, communicator, rank, size, ends):
        """ends: [["send" or "recv", tensor, peer]] of one operation."""
        with self.changed:
            queues = self.queues.setdefault(communicator, [[] for _ in range(size)])
            operation = SimpleNamespace(ends=ends, rank=rank, communicator=communicator)
            queues[rank].append(operation)
            while self.match(queues):
                pass
            return operation

    def match(self, queues):
        """Let a send at the head of a queue meet a receive at the head of another."""
        for rank, queue in enumerate(queues):
            for send in queue[0].ends if queue else []:
                peer = send[2]
                for recv in queues[peer][0].ends if send[0] == "send" and queues[peer] else []:
                    if recv[0] == "recv" and recv[2] == rank:
                        assert recv[1].numel() == send[1].numel(), "messages in another order"
                        recv[1].copy_(send[1].view_as(recv[1]))
                        for at, end in ((rank, send), (peer, recv)):
                            self.end(queues[at], end)
                        return True
        return False

    def end(self, queue, end):
        operation = queue[0]
        operation.ends = [each for each in operation.ends if each is not end]
        if not operation.ends:
            queue.pop(0)
            self.waiting = [each for each in self.waiting if each is not operation]
            self.changed.notify_all()

    def wait(self, operation):
        with self.changed:
            if operation.ends:
                self.waiting.append(operation)
                self.look()
            while operation.ends and not self.failed:
                self.changed.wait()
            if operation.ends:
                raise Deadlock(self.failed)

    def look(self):
        """Has every rank that has not ended something to wait for?"""
        if len(self.waiting) == self.running > 0:
            self.failed = "; ".join(f"rank {each.rank} of {each.communicator}: "
                                    f"{[(kind, peer) for kind, _, peer in each.ends]}"
                                    for each in self.waiting)
            self.changed.notify_all()

    def rank_has_ended(self):
        with self.changed:
            self.running -= 1
            self.look()


class Communicator:
    """In the place of torch's ProcessGroup."""

    def __init__(self, queues, name, rank, size):
        self.queues, self.name, self.rank, self.size = queues, name, rank, size


def post_batch(operations):
    """In the place of torch's batch_isend_irecv."""
    group = operations[0].group
    kinds = {dist.isend: "send", dist.irecv: "recv"}
    posted = group.queues.post(group.name, group.rank, group.size, [
        [kinds[each.op], each.tensor, each.group_peer] for each in operations])
    return [SimpleNamespace(wait=lambda: group.queues.wait(posted),
                            is_completed=lambda: not posted.ends)]


def fake_operation(op, tensor, group, group_peer):
    return SimpleNamespace(op=op, tensor=tensor, group=group, group_peer=group_peer)


class InlineReads(Nccl):
    def start_read(self, tensor):
        return tensor.tolist


class AtOnce:
    """In the place of a Background: the host posts at once, as for a stream, and even waits."""

    def start(self, function, *args):
        with torch.no_grad():
            function(*args)
        return lambda: None


class QueueMesh(Mesh):
    """A mesh of threads, whose groups have NCCL's carrier. ways: communicators of a group."""

    def __init__(self, queues, rank, ways=2, dp=1, pp=1, cp=1, tp=1, ep=1, shard=0):
        shard = shard or dp
        self.sizes = {"rep": dp // shard, "shard": shard // ep, "pp": pp, "ep": ep, "cp": cp,
                      "tp": tp}
        self.device, self.native, self.timeout = torch.device("cpu"), False, 600
        self.queues, self.rank, self.ways, self.groups = queues, rank, ways, {}
        self.background = AtOnce()
        self.world = self.join("world", [[*range(dp * pp * cp * tp)]])

    def join(self, name, rows):
        if name not in self.groups:
            ranks = next((row for row in rows if self.rank in row), [self.rank])
            rank, size = ranks.index(self.rank), len(ranks)
            up, down = (Communicator(self.queues, (name, tuple(ranks), way), rank, size)
                        for way in (0, self.ways - 1))
            carrier = InlineReads(up, down, rank, self.timeout) if size > 1 else None
            self.groups[name] = c.Group(name, self.device, ranks, rank, carrier)
        return self.groups[name]


def on_queues(run, ways=2, **sizes):
    """[run(mesh)] of each rank."""
    world = sizes.get("dp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)
    queues = Queues(world)

    def rank_of(rank):
        try:
            return run(QueueMesh(queues, rank, ways, **sizes))
        finally:
            queues.rank_has_ended()

    with (as_it_was(), patch.object(dist, "batch_isend_irecv", post_batch),
          patch.object(dist, "P2POp", fake_operation), ThreadPoolExecutor(world) as threads):
        torch.set_num_threads(1)
        jobs = [threads.submit(rank_of, rank) for rank in range(world)]
        errors = [job.exception() for job in jobs]
    # A rank that failed lets others wait: its error is the cause
    for error in sorted(filter(None, errors), key=lambda error: isinstance(error, Deadlock)):
        raise error
    return [job.result() for job in jobs]


# ---- no deadlock ----


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives_complete_on_queues_without_tags(world):
    def run(mesh):
        group = mesh.group("dp")
        every = [torch.arange(7.0) * (r + 1) for r in range(world)]
        for root in range(world):
            assert torch.equal(c.all_reduce(every[group.rank].clone(), group), sum(every))
            assert torch.equal(c.broadcast(every[group.rank].clone(), group, root), every[root])
            x = c.reduce(every[group.rank].clone(), group, root)
            assert group.rank != root or torch.equal(x, sum(every))
        received = [torch.empty(r + group.rank + 1) for r in range(world)]
        c.all_to_all(received, [torch.full((j + group.rank + 1,), 10.0 * group.rank + j)
                                for j in range(world)], group)
        assert [x[0].item() for x in received] == [10.0 * r + group.rank for r in range(world)]

    on_queues(run, dp=world)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring_attention_completes_on_queues_without_tags(world):
    """... and equals attention over the whole sequence, in float64 to 1e-10."""
    def draw(n):
        return torch.randn(2, 4, 24, 8, dtype=torch.double,
                           generator=torch.Generator().manual_seed(n))

    q, k, v = (draw(i).requires_grad_() for i in range(3))
    whole = causal_attention(q, k, v)
    wanted = torch.autograd.grad(whole, (q, k, v), draw(3))

    def run(mesh):
        group = mesh.group("cp")
        mine = zigzag(24, world, group.rank)
        parts = [x.detach()[:, :, mine].requires_grad_() for x in (q, k, v)]
        out = ring_attention(*parts, group)
        close(out.detach(), whole.detach()[:, :, mine], "out")
        grads = torch.autograd.grad(out, parts, draw(3)[:, :, mine].contiguous())
        for got, want in zip(grads, wanted, strict=True):
            close(got, want[:, :, mine], "gradient")

    on_queues(run, cp=world)


def one_step(cfg):
    """A function of a mesh that trains one step; returns what matches() compares."""
    def run(mesh):
        trainer = train.Trainer(cfg, mesh, VOCAB)
        kept = []
        step = trainer.optimizer.step

        def keep(grads, norm, lr):
            kept.extend((bare(tag), x.clone())
                        for tag, x in whole_slices(trainer.reducer, grads))
            step(grads, norm, lr)

        trainer.optimizer.step = keep
        norm, sums = trainer.step(Data(cfg).training(cfg, 0, mesh), cfg.lr)
        return [{}, {"loss": sums[0].item(), "norm": norm.item(), "grads": kept}]

    return run


def trains(corpus, ways=2, **flags):
    cfg = config(corpus, batch_size=24, **flags)
    check(cfg, 1)
    sizes = {axis: getattr(cfg, axis) for axis in ("dp", "pp", "cp", "tp", "ep", "shard")}
    got = on_queues(one_step(cfg), ways, **sizes)
    want = reference(corpus, batch_size=24, **{
        name: value for name, value in same_model(cfg).items() if name != "batch_size"})
    matches(cfg, got, 1, ("grads",), want)


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)]


@pytest.mark.parametrize("schedule,chunks", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_schedule_completes_on_queues_without_tags(corpus, schedule, chunks, pp):
    """... with the gradients of one process, in float64 to 1e-10. Fewer microbatches than ranks,
    where the schedule allows them, and more."""
    for microbatches in (pp, 2 * pp) if schedule == "interleaved" else (1, 2, 6):
        trains(corpus, pp=pp, schedule=schedule, chunks=chunks, microbatches=microbatches,
               n_layer=10)


@pytest.mark.parametrize("flags", [
    {"dp": 2, "pp": 2, "tp": 2, "zero": 3}, {"dp": 3, "zero": 1}, {"dp": 2, "tp": 2, "zero": 2},
    {"pp": 2, "cp": 2, "tp": 2, "sp": True}, {"cp": 2, "cp_attention": "all-to-all", "dp": 2}],
    ids=str)
def test_every_axis_completes_on_queues_without_tags(corpus, flags):
    trains(corpus, microbatches=2, **flags)


def test_one_communicator_for_both_directions_would_deadlock(corpus):
    """What transport/nccl.py has two for; and the queues do find a deadlock."""
    with pytest.raises(Deadlock):
        trains(corpus, ways=1, pp=2, microbatches=6, schedule="1f1b")


def test_both_halves_of_an_exchange_on_one_communicator_are_one_batch():
    """A ring of two: rank 0 sends up and receives from above, on two communicators. A ring of
    three: rank 0 sends up to 1 and receives from 2, which is above; rank 1 receives from 0 and
    sends to 2, both upward."""
    x, posted = torch.zeros(2), []
    with (patch.object(dist, "batch_isend_irecv", lambda batch: posted.append(
            [(each.op, each.group, each.group_peer) for each in batch]) or []),
          patch.object(dist, "P2POp", fake_operation)):
        Nccl("up", "down", 1, 1).exchange(x, 2, x.clone(), 0, None)
        assert posted == [[(dist.irecv, "up", 0), (dist.isend, "up", 2)]]
        posted.clear()
        Nccl("up", "down", 0, 1).exchange(x, 1, x.clone(), 2, None)
        assert posted == [[(dist.isend, "up", 1)], [(dist.irecv, "down", 2)]]


# ---- the background on a stream ----


@contextmanager
def fake_streams():
    """Gives the list of what happens on torch.cuda's streams."""
    happened = []

    class Stream:
        def __init__(self, *args, priority=0):
            self.name = f"side stream, priority {priority}" if args else "caller's stream"

        def wait_stream(self, other):
            happened.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            happened.append(f"event on {self.name}")
            return f"event of {self.name}"

        def wait_event(self, event):
            happened.append(f"{self.name} waits for {event}")

    now = [Stream()]

    @contextmanager
    def on(stream):
        now.append(stream)
        yield
        now.pop()

    with patch.multiple(torch.cuda, Stream=Stream, stream=on, current_stream=lambda: now[-1]):
        yield happened, lambda: now[-1].name


def test_the_background_of_a_gpu_waits_for_what_was_computed_and_is_waited_for_by_an_event():
    """... and has no thread: the host goes on anyway."""
    with fake_streams() as (happened, current):
        runner = Background(torch.device("cuda"))
        side, caller = "side stream, priority -1", "caller's stream"
        wait = runner.start(lambda: happened.append(f"function on {current()}"))
        assert runner.thread is None
        assert happened == [f"{side} waits for {caller}", f"function on {side}", f"event on {side}"]
        happened.clear()
        wait()
        assert happened == [f"{caller} waits for event of {side}"]
        assert current() == caller


def test_the_background_of_a_gpu_keeps_its_tensors_until_it_was_waited_for():
    """Else the allocator would give their memory to somebody else, while the stream reads it."""
    with fake_streams():
        tensor = torch.ones(3)
        held = weakref.ref(tensor)
        wait = Background(torch.device("cuda")).start(tensor.add_, tensor)
        del tensor
        assert held() is not None
        wait()
        del wait
        assert held() is None


# ---- the host waits nowhere, but where it reads ----


class HostWait(AssertionError):
    pass


class NoHostWait(TorchDispatchMode):
    """Refuses what makes the host wait for a GPU: item(), bool(), float(), equal(), and indices
    whose number the GPU has to tell."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # True would import the compiler
    WAITS = ("_local_scalar_dense", "is_nonzero", "item", "nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = [x for x in args[1] if x is not None and x.dtype == torch.bool] if (
            name == "index") else []
        if name in self.WAITS or masks:
            raise HostWait(str(func))
        return func(*args, **(kwargs or {}))


def test_item_bool_and_masks_are_host_waits():
    x = torch.ones(3)
    for wait in (lambda: x.sum().item(), lambda: bool(x.sum() > 1), lambda: float(x[0]),
                 lambda: x[x > 0], lambda: torch.equal(x, x)):
        with NoHostWait(), pytest.raises(HostWait):
            wait()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("finite", [True, False])
def test_norm_clipping_and_the_decision_to_step_stay_on_the_device(dtype, finite):
    kind = getattr(torch, dtype)
    tag = SimpleNamespace(name="a.weight", shape=(4, 3), holders=lambda sharded: 2)
    reducer = SimpleNamespace(weights=[torch.ones(12, dtype=kind), torch.ones(0, dtype=kind)],
                              tags=[tag, tag], sharded=True)
    scale = LossScale(kind, torch.device("cpu"))
    cfg = SimpleNamespace(dtype=dtype, grad_clip=1.0, weight_decay=0.1)
    optimizer = AdamW(cfg, reducer, scale)
    grads = [torch.full((12,), 1.0 if finite else torch.inf, dtype=kind), torch.ones(0, dtype=kind)]
    with NoHostWait():
        norm = optimizer.square(grads).sqrt()
        optimizer.step(grads, norm, 0.1)
    moved = not reducer.weights[0].eq(1).all()
    assert moved == finite and optimizer.num_steps.item() == finite
    assert scale.value.item() == (2.0**16 if dtype == "float16" else 1) * (
        0.5 if dtype == "float16" and not finite else 1)


@pytest.mark.parametrize("flags", [
    {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3, "recompute": True}, {"tp": 2, "sp": True},
    {"pp": 2, "schedule": "zb-h1"}, {"cp": 2}], ids=str)
def test_a_step_makes_the_host_wait_nowhere(corpus, flags):
    cfg = config(corpus, batch_size=4, microbatches=2, **flags)
    check(cfg, 1)

    def run(mesh):
        trainer = train.Trainer(cfg, mesh, VOCAB)
        batches = Data(cfg).training(cfg, 0, mesh)
        with NoHostWait():
            trainer.step(batches, cfg.lr)

    on_queues(run, **{axis: getattr(cfg, axis) for axis in ("dp", "pp", "cp", "tp")})


# ---- a read ----


def reading(done, timeout, pending=()):
    """A Group whose device has finished when done() says so."""
    carrier = Nccl("up", "down", 0, timeout)
    carrier.pending.extend(pending)
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=done))
    group = c.Group("world", torch.device("cpu"), [0, 1], 0, carrier)
    return group, patch.object(torch.cuda, "current_stream", lambda: stream)


def test_a_read_of_a_gpu_that_hangs_ends_with_one_line_after_the_timeout():
    group, streams = reading(lambda: False, 0.3)
    start = time.monotonic()
    with streams, pytest.raises(c.CommunicationError) as error:
        group.read(torch.zeros(2))
    assert str(error.value) == (
        "rank 0: group world: the GPU's messages are not done within 0.3 s")
    assert time.monotonic() - start >= 0.3


def test_a_read_returns_what_the_device_has_copied_and_not_what_it_is_about_to():
    asked, posted, copy = itertools.count(1), [], torch.Tensor.copy_

    def done():
        if next(asked) < 3:
            return False
        copy(*posted[0])
        return True

    group, streams = reading(done, 600)
    with streams, patch("torch.Tensor.copy_", lambda host, tensor, non_blocking: posted.append(
            (host, tensor))):
        read = group.start_read(torch.tensor([3.0, 4.0]))
        posted[0][0].fill_(-1)
        assert read() == [3.0, 4.0]


def test_a_read_raises_the_error_of_a_message_that_failed():
    def fail():
        raise RuntimeError("[/w/Nccl.cpp:5] remote process exited. Check the logs")

    failed = SimpleNamespace(is_completed=lambda: True, wait=fail)
    group, streams = reading(lambda: False, 600, [failed])
    with streams, pytest.raises(c.CommunicationError,
                                match="^rank 0: group world: remote process exited$"):
        group.read(torch.zeros(1))


def test_messages_are_forgotten_in_order_once_the_gpu_has_done_them():
    done = set()
    carrier = Nccl("up", "down", 0, 1)

    def post(name):
        work = SimpleNamespace(name=name, is_completed=lambda: name in done, wait=lambda: None)
        with (patch.object(dist, "batch_isend_irecv", lambda batch: [work]),
              patch.object(dist, "P2POp", fake_operation)):
            carrier.exchange(torch.zeros(1), 1, None, None, None)

    for name in ("first", "second", "third"):
        post(name)
        done.add("second")
    assert [work.name for work in carrier.pending] == ["first", "second", "third"]
    done.add("first")
    post("fourth")
    assert [work.name for work in carrier.pending] == ["third", "fourth"]
