"""The manner of GPUs, without a GPU: what NCCL promises is enough for each schedule, ring and
exchange; the background runs on a stream; a step makes the host wait nowhere; a hang is a line.

The stand-in for NCCL: an operation of a communicator blocks the later ones of this communicator on
its rank until it is matched; messages have no tags; wait() blocks. Ranks are threads."""

import itertools
import threading
import weakref
from collections import defaultdict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call, patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import collectives as c
import mesh
import test_all
import train
from context_parallel import CUDNN, EFFICIENT, FLASH, choose_kernel, kernel, kernel_backward
from mesh import Mesh
from sizes import config_of
from tests.counts import count_step
from tests.harness import TOLERANCE, VOCAB, flags_of, make_trainer, run
from tests.test_collectives import every_collective
from transport.background import Background
from transport.nccl import Nccl

# ---- a stand-in for NCCL ----


class Deadlock(AssertionError):
    pass


here = threading.local()  # a rank's number, its Queues, how many communicators it has made
Communicator = namedtuple("Communicator", "number way ranks")
Operation = namedtuple("Operation", "op tensor group group_peer")  # in the place of dist.P2POp


class Queues:
    """First-in-first-out queues of batches, one for each rank and communicator. It knows when all
    ranks wait, so a deadlock is found at once, and never by a timeout."""

    def __init__(self, world):
        self.changed = threading.Condition()
        self.running = world  # ranks that have not ended
        self.waiting = {}  # rank -> the batch that it waits for, empty once all its peers came
        self.deadlock = False
        self.queues = defaultdict(deque)  # (communicator, rank in it) -> batches: lists

    def post(self, batch):
        communicator = batch[0].group
        with self.changed:
            self.queues[communicator, communicator.ranks.index(here.rank)].append(batch)
            while self.match(communicator):
                pass

    def match(self, communicator):
        """Let a send at the head of a queue meet a receive at the head of another. Returns whether
        there was a pair."""
        heads = [queue[0] if queue else [] for queue in (
            self.queues[communicator, rank] for rank in range(len(communicator.ranks)))]
        for rank, batch in enumerate(heads):
            for send in batch:
                for recv in heads[send.group_peer] if send.op is dist.isend else []:
                    if recv.op is dist.irecv and recv.group_peer == rank:
                        assert recv.tensor.numel() == send.tensor.numel(), "in another order"
                        recv.tensor.copy_(send.tensor.view_as(recv.tensor))
                        self.end(communicator, rank, send)
                        self.end(communicator, send.group_peer, recv)
                        return True
        return False

    def end(self, communicator, rank, operation):
        batch = self.queues[communicator, rank][0]
        batch[:] = [each for each in batch if each is not operation]
        if not batch:
            self.queues[communicator, rank].popleft()
            self.changed.notify_all()

    def wait(self, batch):
        with self.changed:
            self.waiting[here.rank] = batch
            self.look()
            while batch and not self.deadlock:
                self.changed.wait()
            if batch:
                raise Deadlock(f"rank {here.rank} waits for {[each[2:] for each in batch]}")

    def look(self):
        """Has every rank that has not ended something to wait for?"""
        if sum(map(bool, self.waiting.values())) == self.running > 0:
            self.deadlock = True
            self.changed.notify_all()

    def rank_has_ended(self):
        with self.changed:
            self.running -= 1
            self.look()


def new_communicator(ranks, **options):
    here.communicators += 1
    return Communicator(here.communicators, "up", tuple(ranks))


def post_batch(operations):
    """In the place of torch's batch_isend_irecv."""
    batch = [*operations]
    here.queues.post(batch)
    return [SimpleNamespace(wait=lambda: here.queues.wait(batch), is_completed=lambda: not batch)]


class QueueMesh(Mesh):
    """A mesh of threads, whose groups have NCCL's carrier."""

    down = "down"  # "up": one communicator for both ways

    def connect(self, name, ranks, communicators):
        up, = communicators
        rank = ranks.index(self.rank)
        carrier = Nccl(up, up._replace(way=self.down), rank, self.timeout)
        return c.Group(name, self.device, ranks, rank, carrier)


class AtOnce:
    """In the place of a Background: the host posts at once, as for a stream, and even waits."""

    def __init__(self, device):
        pass

    def start(self, function, *args):
        with torch.no_grad():
            function(*args)
        return lambda: None


def threads(world, function, *args):
    """In the place of test_all.ranks: [function(rank, *args) of each rank]."""
    queues = Queues(world)

    def rank_of(rank):
        here.rank, here.queues, here.communicators = rank, queues, 0
        try:
            return function(rank, *args)
        finally:
            queues.rank_has_ended()

    with (patch.multiple(dist, is_initialized=lambda: True, get_rank=lambda: here.rank,
                         get_world_size=lambda: world, new_group=new_communicator,
                         P2POp=Operation, batch_isend_irecv=post_batch),
          patch.object(mesh, "Background", AtOnce), patch.object(train, "Mesh", QueueMesh),
          patch.object(Nccl, "start_read", lambda carrier, tensor: tensor.tolist),
          ThreadPoolExecutor(world) as pool):
        jobs = [pool.submit(rank_of, rank) for rank in range(world)]
        errors = [job.exception() for job in jobs]
    # A rank that failed lets others wait: its error is the cause
    for error in sorted(filter(None, errors), key=lambda error: isinstance(error, Deadlock)):
        raise error
    return [job.result() for job in jobs]


# ---- no deadlock ----


def _collectives(rank, world):
    every_collective(rank, QueueMesh(dp=world).group("dp"))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives_complete_on_queues_without_tags(world):
    threads(world, _collectives, world)


def trains(words, corpus):
    """Three steps of a layout equal those of one process, to 1e-10 in float64 (test_all.py)."""
    cfg = flags_of(words.split(), corpus)
    test_all.one_process(config_of(cfg, VOCAB), corpus)  # once, not in each thread
    with patch.object(test_all, "ranks", threads):
        _, worst = run(words.split(), corpus)
    assert worst.max() < TOLERANCE


@pytest.mark.parametrize("schedule", [
    "gpipe --microbatches 2", "1f1b --microbatches 2", "1f1b --microbatches 9",
    "interleaved --n-layer 8 --microbatches 12", "zb-h1 --microbatches 1",
    "zb-h1 --microbatches 9"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_schedule_completes_on_queues_without_tags(corpus, schedule, pp):
    """Fewer microbatches than ranks, where the schedule allows them, and more."""
    trains(f"--pp {pp} --schedule {schedule}", corpus)


@pytest.mark.parametrize("layout", [
    "--cp 3 --block-size 12", "--cp 4", "--cp 2 --cp-attention all-to-all --dp 2",
    "--dp 3 --zero 1", "--dp 2 --pp 2 --tp 2 --zero 3", "--pp 2 --cp 2 --tp 2 --sp",
    "--dp 2 --ep 2 --experts 4"])
def test_every_axis_completes_on_queues_without_tags(corpus, layout):
    trains(f"{layout} --microbatches 2", corpus)


def test_one_communicator_for_both_ways_would_deadlock(corpus):
    """What transport/nccl.py has two for; and the queues do find a deadlock."""
    with patch.object(QueueMesh, "down", "up"), pytest.raises(Deadlock):
        trains("--pp 2 --microbatches 6", corpus)


# ---- the background on a stream ----


def fake_cuda():
    """(a mock of torch.cuda that notes its calls in their order, a context that puts it there)."""
    cuda = Mock(stream=MagicMock())
    return cuda, patch.multiple(torch.cuda, Stream=cuda.Stream, stream=cuda.stream,
                                current_stream=cuda.current_stream)


def test_the_background_of_a_gpu_waits_for_what_was_computed_and_is_waited_for_by_an_event():
    """... and has no thread: the host goes on anyway."""
    cuda, there = fake_cuda()
    device, caller = torch.device("cuda"), cuda.current_stream()
    event = cuda.Stream().record_event()
    cuda.reset_mock()
    with there:
        runner = Background(device)
        wait = runner.start(cuda.function, "an argument")
        assert cuda.mock_calls == [
            call.Stream(device, priority=-1), call.current_stream(),
            call.Stream().wait_stream(caller), call.stream(runner.stream),
            call.stream().__enter__(), call.function("an argument"), call.Stream().record_event(),
            call.stream().__exit__(None, None, None)]
        cuda.reset_mock()
        wait()
        assert cuda.mock_calls == [call.current_stream(),
                                   call.current_stream().wait_event(event)]
    assert runner.thread is None


def test_the_background_of_a_gpu_keeps_its_tensors_until_it_was_waited_for():
    """Else the allocator would give their memory to somebody else, while the stream reads it."""
    tensor = torch.ones(3)
    held = weakref.ref(tensor)
    with fake_cuda()[1]:
        wait = Background(torch.device("cuda")).start(torch.zeros(3).add_, tensor)
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


def _step(rank, cfg):
    trainer, data = make_trainer(cfg)
    batches = data.training(cfg, 0, trainer.mesh)
    with NoHostWait():
        trainer.step(batches, cfg.lr)


@pytest.mark.parametrize("layout", [
    "--dp 2 --zero 1 --dtype float16", "--dp 2 --zero 3 --recompute", "--tp 2 --sp",
    "--pp 2 --schedule zb-h1 --microbatches 2", "--cp 2"])
def test_a_step_makes_the_host_wait_nowhere(corpus, layout):
    threads(2, _step, flags_of(layout.split(), corpus))


# ---- a read ----


def reading(done, timeout, pending=()):
    """A Group whose device has finished when done() says so, and a context around its reads."""
    carrier = Nccl("up", "down", 0, timeout)
    carrier.pending.extend(pending)
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=done))
    group = c.Group("world", torch.device("cpu"), [0, 1], 0, carrier)
    return group, patch.object(torch.cuda, "current_stream", lambda: stream)


def test_a_read_of_a_gpu_that_hangs_ends_with_one_line_after_the_timeout():
    group, streams = reading(lambda: False, 0.3)
    with streams, pytest.raises(c.CommunicationError) as error:
        group.read(torch.zeros(2))
    assert str(error.value) == (
        "rank 0: group world: the GPU's messages are not done within 0.3 s")


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


# ---- what a GPU's kernels are given ----


@pytest.mark.parametrize("chosen", [CUDNN, FLASH, EFFICIENT], ids=lambda chosen: chosen.name)
@pytest.mark.parametrize("causal", [True, False])
def test_the_ring_hands_a_gpus_attention_kernels_what_they_take(chosen, causal, monkeypatch):
    """Torch checks the arguments on the meta device, and gives the shapes of the results. Two heads
    of queries share one of the keys, and there are fewer keys."""
    q, k = (torch.empty(2, heads, tokens, 16, dtype=torch.bfloat16, device="meta")
            for heads, tokens in ((4, 24), (2, 12)))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **more: chosen.value)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert choose_kernel(q, k, k) == chosen
    out, lse, rest = kernel(chosen, q, k, k, causal)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float
    assert len(rest) == 2
    grads = kernel_backward(chosen, out, q, k, k, out, lse, rest, causal)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_a_lone_gpu_starts_to_copy_numbers_before_they_are_read():
    """tolist() would wait for the next step, too, which the host has posted meanwhile."""
    cuda, there = fake_cuda()
    with there, patch.object(dist, "is_initialized", lambda: False):
        world = Mesh("cuda").world
        cuda.reset_mock()
        read = world.start_read(torch.tensor([3.0]))
        assert cuda.mock_calls == [call.current_stream(), call.current_stream().record_event()]
        assert world.size == 1 and read() == [3.0]


def test_a_step_of_gpt2_takes_no_tensor_of_the_host_and_at_most_800_operations():
    """GPT-2 124M without --compile: 763 of torch 2.13. The host launches each one."""
    counting, _ = count_step()
    assert not counting.of_host
    assert 500 < counting.kernels.total() < 800
