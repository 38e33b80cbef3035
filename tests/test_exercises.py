"""The exercises: the repository's own forms are right, typical wrong ones are told apart in words,
and a hang is named."""

import tempfile
from functools import partial

import pytest
import torch

import collectives
import ddp
import engine.collectives
import engine.ddp
from collectives import own_chunk
from exercises.catalogue import EXERCISES, RANKS
from exercises.judge import attempt, verdict
from exercises.start import load_forms
from tests.harness import HERE, pool

BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


def _attempts(rank, name, cases, folder):
    """One rank's Reports of several attempts. cases: [{name: function}], or None for the file."""
    exercise = BY_NAME[name]
    reports = []
    for number, forms in enumerate(cases):
        found = partial(dict, forms)
        if forms is None:
            found = partial(load_forms, HERE / f"exercises/{name}.py", exercise.forms)
        reports.append(attempt(rank, exercise.judge, found, f"{folder}/{number}"))
    return reports


def told(name, cases):
    """What the tester tells of each attempt."""
    with tempfile.TemporaryDirectory() as folder:
        per_rank = pool(RANKS, _attempts, name, cases, folder)
    return [verdict(reports) for reports in zip(*per_rank, strict=True)]


# ---- the collectives ----


def scatter_ring(tensor, group, combine=torch.Tensor.add_, send=1, take=2, hops=None, divide=1,
                 split=torch.Tensor.tensor_split):
    """A ring reduce-scatter that sends chunk (r - send - hop), and receives (r - take - hop)."""
    N, r = group.size, group.rank
    chunks = split(tensor.view(-1), N)
    for hop in range(N - 1 if hops is None else hops):
        into = chunks[(r - take - hop) % N]
        received = torch.empty_like(into)
        group.exchange(chunks[(r - send - hop) % N], group.next, received, group.prev).wait()
        combine(into, received)
    chunks[r].div_(divide)
    return tensor


def average_scatter(tensor, group, combine=torch.Tensor.add_):
    return scatter_ring(tensor, group, combine, divide=group.size)


def hop_missing(tensor, group, combine=torch.Tensor.add_):
    return scatter_ring(tensor, group, combine, hops=group.size - 2)


def copies_instead(tensor, group, combine=None):
    return scatter_ring(tensor, group, torch.Tensor.copy_)


def only_sends(tensor, group, combine=None):
    for _ in range(group.size - 1):
        group.send(tensor[:1].clone(), group.next).wait()
    return tensor


def scatter_of_all(tensor, group, combine=torch.Tensor.add_):
    collectives.all_reduce(tensor, group, combine)
    return tensor


def gather_ring(tensor, group, first=0, hops=None, backwards=False, combine=None):
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    for hop in range(N - 1 if hops is None else hops):
        into = chunks[(r - 1 - first - hop) % N]
        received = torch.empty_like(into)
        group.exchange(chunks[(r - first - hop) % N], group.next, received, group.prev).wait()
        into.copy_(received) if combine is None else combine(into, received)
    return tensor


def gather_hop_missing(tensor, group):
    return gather_ring(tensor, group, hops=group.size - 2)


def gather_own_chunk_only(tensor, group):
    """Sends its own chunk in each hop."""
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    for hop in range(N - 1):
        received = torch.empty_like(chunks[(r - 1) % N])
        group.exchange(chunks[r], group.next, received, group.prev).wait()
        chunks[(r - 1 - hop) % N].copy_(received[: chunks[(r - 1 - hop) % N].numel()])
    return tensor


def gather_all_to_one(tensor, group):
    """Every rank waits for rank 0, and rank 0 for all."""
    for src in range(group.size):
        if src != group.rank:
            group.recv(own_chunk(tensor, group), src).wait()
    return tensor


def gather_whole_tensors(tensor, group):
    N, r = group.size, group.rank
    for distance in range(1, N):
        received = torch.empty_like(tensor)
        group.exchange(tensor, (r + distance) % N, received, (r - distance) % N).wait()
        src = (r - distance) % N
        tensor.tensor_split(N)[src].copy_(received.tensor_split(N)[src])
    return tensor


# ---- data parallelism ----


class Buckets(ddp.DDP):
    """Exercise 3, solved on the root's groups: what engine/ddp.py does, less its buffers."""

    limit = 600
    divide = 1
    waits = True
    sends_last = True
    late = False

    def __init__(self, layers):
        super().__init__(layers)
        self.bucket, self.works = [], []
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.collect)

    def collect(self, param):
        if not self.late and sum(p.numel() for p in self.bucket) + param.numel() > self.limit:
            self.send()
        self.bucket.append(param)

    def send(self):
        if self.bucket:
            flat = torch.cat([param.grad.flatten() for param in self.bucket]) / self.divide
            group = self.bucket[0].shard.sum_over[0]
            work = engine.collectives.all_reduce(flat, group, async_op=True)
            self.works.append((self.bucket, flat, work))
            self.bucket = []

    def gradients(self):
        if self.sends_last:
            self.send()
        for bucket, flat, work in self.works:
            if self.waits:
                work.wait()
            for param, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                param.grad = part.view_as(param)
        grads = [param.grad for param in self.params]
        self.works, self.bucket = [], []
        for param in self.params:
            param.grad = None
        return grads


class Averages(Buckets):
    divide = RANKS


class NeverWaits(Buckets):
    waits = False


class ForgetsTheLast(Buckets):
    sends_last = False


class OneEach(Buckets):
    limit = 1


class AfterBackward(Buckets):
    late = True


class TheEngines(ddp.DDP):
    """engine/ddp.py's DDP with the members of the root's."""

    def __init__(self, layers):
        values = {p.shard.name: p.data.clone() for layer in layers for p in layer.parameters()}
        self.params = ddp.parameters_of(layers)
        self.ours = engine.ddp.DDP({0: layers}, torch.double, "cpu",
                                   lambda tag: values[tag.name], 8 * 600)
        self.weights = [param.data for param in self.params]
        self.ours.expect(0)

    def gradients(self):
        self.ours.flush()
        self.ours.finish()
        grads = {param: piece.view_as(param).clone() for bucket in self.ours.buckets
                 for param, piece in self.ours.grad_pieces(bucket)}
        self.ours.zero_grad()
        self.ours.expect(0)
        return [grads[param] for param in self.params]


CASES = {  # {exercise: (the repository's forms, [(wrong forms, words that tell)])}
    "e01_reduce_scatter": ({"reduce_scatter": collectives.reduce_scatter}, [
        (partial(scatter_ring, send=0, take=1), "complete here is chunk 1"),
        (average_scatter, "its own chunk 0 is divided by 4"),
        (hop_missing, "lacks the term of rank 1"),
        (copies_instead, "lacks the term of ranks 0 and 2 and 3"),
        (only_sends, "waits until rank 1 receives its message 1"),
        (scatter_of_all, "right, but bytes sent by this rank: 1")]),
    "e02_all_gather": ({"all_gather": collectives.all_gather}, [
        (gather_hop_missing, "is what stood there before: nothing arrived"),
        (partial(gather_ring, first=1), "sent on before the valid chunk had arrived"),
        (gather_own_chunk_only, "chunk 2 holds the chunk of rank 3"),
        (gather_all_to_one, "rank 0 waits for message 1 from rank 1"),
        (gather_whole_tensors, "right, but bytes sent by this rank: 240"),
        (partial(gather_ring, combine=torch.Tensor.add_), "chunks are copied, not added")]),
    "e03_all_reduce": ({"BucketDDP": TheEngines}, [
        (Averages, "is divided by 4: gradients are summed, never averaged"),
        (NeverWaits, "all-reduces were not waited for"),
        (ForgetsTheLast, "is this rank's own term: not summed over the replicas"),
        (OneEach, "put parameters side by side into buckets"),
        (AfterBackward, "no bucket was on its way when backward ended"),
        (ddp.DDP, "no all-reduce ran in the background")]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_repositorys_form_is_right_and_wrong_ones_are_told_apart(name):
    forms, wrong = CASES[name]
    only = next(iter(forms))
    cases = [case if isinstance(case, dict) else {only: case} for case, _ in wrong]
    empty, right, *others = told(name, [None, forms, *({**forms, **case} for case in cases)])
    assert right.kind == "right", right.line
    assert empty.kind == "not written"
    said = [report.line for report in others]
    for line, (_, words) in zip(said, wrong, strict=True):
        assert words in line, said
    assert len(set(said)) == len(said) >= 5
