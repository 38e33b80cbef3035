"""The manner of GPUs, without a GPU: what NCCL promises is enough for each schedule, ring and
exchange; the background runs on a stream; a step makes the host wait nowhere; a hang is a line."""

import itertools
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call, patch

import pytest
import torch
import torch.distributed as dist

import collectives as c
from context_parallel import CUDNN, EFFICIENT, FLASH, choose_kernel, kernel, kernel_backward
from mesh import Mesh
from test_all import differences
from tests.counts import Counting, count_step
from tests.harness import TOLERANCE, in_layout, make_trainer
from transport import connect
from transport.background import Background
from transport.nccl import Nccl

# ---- a stand-in for NCCL ----
# An operation of a communicator blocks the later ones of this communicator on its rank until it is
# matched, and messages have no tags. Here a thread runs the batches of a communicator one after the
# other, over gloo, whose sends complete when the peer has posted the receive

Operation = namedtuple("Operation", "op tensor group group_peer")  # in the place of dist.P2POp


class Communicator:
    def __init__(self, gloo, tag):
        self.gloo, self.tag = gloo, tag  # a tag for each communicator: gloo keeps them apart
        self.thread = ThreadPoolExecutor(1)

    def run(self, batch):
        works = [getattr(self.gloo, "send" if each.op is dist.isend else "recv")(
            [each.tensor], each.group_peer, self.tag) for each in batch]
        for work in works:
            work.wait()


def post_batch(batch):
    """In the place of torch's batch_isend_irecv."""
    communicator = batch[0].group
    wait = communicator.thread.submit(communicator.run, batch).result
    return [SimpleNamespace(wait=wait)]


def on_queues(rank, cfg, function, ways=2):
    """Call the function where all groups have NCCL's carrier. ways = 1: one communicator for both
    ways."""
    def carrier_of(communicators, rank, device, timeout):
        gloo, = communicators
        up, *down = [Communicator(gloo, tag) for tag in range(ways)]
        return Nccl(up, *(down or [up]), rank, timeout)

    with (patch.multiple(dist, P2POp=Operation, batch_isend_irecv=post_batch),
          patch.object(Nccl, "start_read", lambda carrier, tensor: tensor.tolist),
          patch.object(connect, "carrier_of", carrier_of)):
        return function(rank, cfg)


# ---- no deadlock ----

# Fewer microbatches than ranks, where the schedule allows them, and more
SCHEDULES = ["gpipe --microbatches 2", "1f1b --microbatches 2", "1f1b --microbatches 9",
             "interleaved --n-layer 8 --microbatches 12", "zb-h1 --microbatches 1",
             "zb-h1 --microbatches 9"]
AXES = ["--dp 2 --pp 2 --tp 2 --zero 3", "--pp 2 --cp 2 --tp 2 --sp", "--cp 3 --block-size 12",
        "--cp 4", "--cp 2 --cp-attention all-to-all --dp 2", "--dp 3 --zero 1",
        "--dp 2 --ep 2 --experts 4"]


@pytest.mark.parametrize("layout", [f"{words} --microbatches 2" for words in AXES] + [
    f"--pp {pp} --schedule {words}" for pp in (2, 3, 4) for words in SCHEDULES])
def test_every_axis_and_schedule_completes_on_queues_without_tags(corpus, layout):
    """... and equals one process."""
    for worst, _ in in_layout(layout, corpus, on_queues, differences)[1]:
        assert (worst < TOLERANCE).all()


def test_one_communicator_for_both_ways_would_deadlock(corpus):
    """What transport/nccl.py has two for; and the stand-in does find a deadlock."""
    gone = "Timed out waiting 3000ms|closed by peer|Application timeout"
    with pytest.raises(c.CommunicationError, match=gone):
        in_layout("--pp 2 --microbatches 6 --timeout 3", corpus, on_queues, differences, 1)


# ---- the background on a stream ----


def fake_cuda():
    """(a mock of torch.cuda that notes its calls in their order, a context that puts it there)"""
    cuda = Mock(stream=MagicMock())
    return cuda, patch.multiple(torch.cuda, Stream=cuda.Stream, stream=cuda.stream,
                                current_stream=cuda.current_stream)


def test_the_background_of_a_gpu_waits_for_what_was_computed_and_is_waited_for_by_an_event():
    """... and has no thread: the host goes on anyway."""
    cuda, there = fake_cuda()
    caller, event = cuda.current_stream(), cuda.Stream().record_event()
    cuda.reset_mock()
    device = torch.device("cuda")
    with there:
        runner = Background(device)
        wait = runner.start(cuda.function, 3)
        assert cuda.mock_calls == [
            call.Stream(device, priority=-1), call.current_stream(),
            call.Stream().wait_stream(caller), call.stream(runner.stream),
            call.stream().__enter__(), call.function(3), call.Stream().record_event(),
            call.stream().__exit__(None, None, None)]
        cuda.reset_mock()
        wait()
        assert cuda.mock_calls == [call.current_stream(), call.current_stream().wait_event(event)]
    assert runner.thread is None


# ---- the host launches, and waits nowhere but where it reads ----


class Host(Counting):
    """Refuses what makes the host wait for a GPU: item(), bool(), float(), equal(), and indices
    whose number the GPU has to tell."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # True would import the compiler
    WAITS = ("_local_scalar_dense", "is_nonzero", "item", "nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = [x for x in args[1] if x is not None and x.dtype == torch.bool] if (
            name == "index") else []
        if name in self.WAITS or masks:
            raise AssertionError(f"{func} makes the host wait")
        return super().__torch_dispatch__(func, types, args, kwargs)


def at_once(background, function, *args):
    """In the place of Background.start: the host posts at once, as for a stream."""
    with torch.no_grad():
        function(*args)
    return lambda: None


def _step(rank, cfg):
    trainer, data = make_trainer(cfg)
    batches = data.training(cfg, 0, trainer.mesh)
    with Host(), patch.object(Background, "start", at_once):
        trainer.step(batches, cfg.lr)


@pytest.mark.parametrize("layout", [
    "--dp 2 --zero 1 --dtype float16", "--dp 2 --zero 3 --recompute", "--tp 2 --sp",
    "--pp 2 --schedule zb-h1 --microbatches 2", "--cp 2"])
def test_a_step_makes_the_host_wait_nowhere(corpus, layout):
    in_layout(layout, corpus, _step)


def test_a_step_of_gpt2_takes_no_tensor_of_the_host_and_at_most_800_operations():
    """GPT-2 124M without --compile: 763 of torch 2.13. The host launches each one."""
    counting, _ = count_step()
    assert not counting.of_host
    assert 500 < counting.kernels.total() < 800


# ---- a read ----


def start_read(tensor, done, timeout=600):
    """Start to read a tensor of a device that has finished when done() says so. Returns a function
    that returns its numbers."""
    carrier = Nccl("up", "down", 0, timeout)
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=done))
    with patch.object(torch.cuda, "current_stream", lambda: stream):
        return c.Group("world", torch.device("cpu"), [0, 1], 0, carrier).start_read(tensor)


def test_a_read_of_a_gpu_that_hangs_ends_with_one_line():
    line = "^rank 0: group world: the GPU's messages are not done within 0.3 s$"
    with pytest.raises(c.CommunicationError, match=line):
        start_read(torch.zeros(2), lambda: False, timeout=0.3)()


def test_a_read_returns_what_the_device_has_copied_and_not_what_it_is_about_to():
    asked, posted, copy = itertools.count(1), [], torch.Tensor.copy_

    def done():
        if next(asked) < 3:
            return False
        copy(*posted)
        return True

    with patch("torch.Tensor.copy_", lambda host, tensor, non_blocking: posted.extend(
            (host, tensor))):
        read = start_read(torch.tensor([3.0, 4.0]), done)
        posted[0].fill_(-1)
        assert read() == [3.0, 4.0]


def test_a_lone_gpu_starts_to_copy_numbers_before_they_are_read():
    """tolist() would wait for the next step, too, which the host has posted meanwhile."""
    cuda, there = fake_cuda()
    with there, patch.object(dist, "is_initialized", lambda: False):
        world = Mesh("cuda").world
        cuda.reset_mock()
        read = world.start_read(torch.tensor([3.0]))
        assert cuda.mock_calls == [call.current_stream(), call.current_stream().record_event()]
        assert read() == [3.0]


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
