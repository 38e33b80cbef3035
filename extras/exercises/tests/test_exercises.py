"""The exercises: the repository's own forms are right, typical wrong ones are told apart in words,
and a hang is named."""

import ast
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.func import functional_call

import collectives
import context_parallel
import ddp
import engine.collectives
import engine.ddp
import expert_parallel
import optimizer
import pipeline
import schedules
import tensor_parallel
import zero
from collectives import WithBackward, all_gather, own_chunk, reduce_scatter
from expert_parallel import dispatch_and_combine
from extras.exercises import __main__ as program
from extras.exercises import quiz, start
from extras.exercises.board import ENDED, JOINS, RECV, WAITS, Board
from extras.exercises.catalogue import EXERCISES, RANKS
from extras.exercises.judge import Report, Wrong, attempt, said_by, verdict, while_trying
from extras.exercises.messages import explain_sum
from extras.exercises.orders import play_form
from extras.exercises.start import load_forms
from model import ABSENT, cross_entropy
from recompute import recompute
from sequence_parallel import all_tokens, gather_tokens, own_tokens_of_sum, scatter_tokens
from shard import Tag, bounds
from tensor_parallel import Column, Row, sum_of_copy, sum_over_ranks, to_local
from tests.harness import HERE, pool
from tests.isolation import as_it_was
from tests.pool import HANG
from tests.runs import one_line

BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


def _attempts(rank, name, cases, folder):
    """One rank's Reports of several attempts. cases: [{name: function}], or None for the file.

    The pool's gloo connects two ranks when both first use their connection. A rank whose peer never
    does would block in the send itself, before it can report: here connect at once, like the
    command does."""
    exercise = BY_NAME[name]
    reports = []
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    for number, forms in enumerate(cases):
        found = partial(dict, forms)
        if forms is None:
            found = partial(load_forms, HERE / f"extras/exercises/{name}.py", exercise.forms)
        attempt(rank, exercise.judge, found, f"{folder}/{number}", reports.append)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    return reports


def told(name, cases):
    """What the tester tells of each attempt."""
    with tempfile.TemporaryDirectory() as folder:
        per_rank = pool(RANKS, _attempts, name, cases, folder)
    return [verdict(reports) for reports in zip(*per_rank, strict=True)]


# ---- the collectives ----


def scatter_ring(tensor, group, combine=torch.Tensor.add_, send=1, take=2, hops=None, divide=1,
                 split=torch.Tensor.tensor_split, waits=True):
    """A ring reduce-scatter that sends chunk (r - send - hop), and receives (r - take - hop)."""
    N, r = group.size, group.rank
    chunks = split(tensor.view(-1), N)
    for hop in range(N - 1 if hops is None else hops):
        into = chunks[(r - take - hop) % N]
        received = torch.zeros_like(into)
        work = group.exchange(chunks[(r - send - hop) % N], group.next, received, group.prev)
        if waits:
            work.wait()
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


def scatter_one_hop_more(tensor, group, combine=torch.Tensor.add_):
    return scatter_ring(tensor, group, combine, hops=group.size)


def scatter_returns_nothing(tensor, group, combine=torch.Tensor.add_):
    scatter_ring(tensor, group, combine)


def scatter_doubled(tensor, group, combine=torch.Tensor.add_):
    """Sends each chunk with what lies behind it: right, and more bytes."""
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    for hop in range(N - 1):
        out, into = chunks[(r - 1 - hop) % N], chunks[(r - 2 - hop) % N]
        received = torch.empty_like(into).repeat(2)
        group.exchange(out.repeat(2), group.next, received, group.prev).wait()
        combine(into, received[: into.numel()])
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


def gather_returns_nothing(tensor, group):
    gather_ring(tensor, group)


def gather_hop_missing(tensor, group):
    return gather_ring(tensor, group, hops=group.size - 2)


def gather_own_chunk_only(tensor, group):
    """Sends its own chunk in each hop."""
    N, r = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(N)
    for hop in range(N - 1):
        received = torch.empty_like(chunks[(r - 1) % N])
        group.exchange(chunks[r], group.next, received, group.prev).wait()
        chunks[(r - 1 - hop) % N].fill_(received[0])
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
    waits_at_once = False
    sends_last = True
    sends_empty = False
    late = False
    empties = True

    def __init__(self, stages, value=None):
        super().__init__(stages, value=value)
        self.bucket, self.works = [], []
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.collect)

    def collect(self, param):
        if not self.late and sum(p.numel() for p in self.bucket) + param.numel() > self.limit:
            self.send()
        self.bucket.append(param)

    def send(self):
        if self.bucket or self.sends_empty:
            flat = torch.cat([param.grad.flatten() for param in self.bucket]) / self.divide
            group = self.bucket[0].tag.sum_over[0]
            work = engine.collectives.all_reduce(flat, group, async_op=True)
            if self.waits_at_once:
                work.wait()
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
        self.bucket = []
        if self.empties:
            self.works = []
        for param in self.params:
            param.grad = None
        return grads


class Averages(Buckets):
    divide = RANKS


class NeverWaits(Buckets):
    waits = False


class ForgetsTheLast(Buckets):
    sends_last = False


class ForgetsTheLastOfADict(Buckets):
    """Finds no sum for a parameter of the last bucket."""

    sends_last = False

    def gradients(self):
        sums = {param: None for bucket, *_ in self.works for param in bucket}
        grads = super().gradients()
        return [grads[i] for i, param in enumerate(self.params) if sums[param] is None]


class WaitsAtOnce(Buckets):
    waits_at_once = True


class NeverEmpties(Buckets):
    empties = False


class KeepsBuffers(Buckets):
    """Empties its list, and keeps the last flat tensor in another one."""

    def __init__(self, stages, value=None):
        super().__init__(stages, value=value)
        self.kept = []

    def gradients(self):
        grads = super().gradients()
        self.kept.append(grads[0]._base)  # the tied matrix becomes complete last
        return grads


class SendsEmpty(Buckets):
    """Sends what it has when the first gradient is larger than a bucket: nothing."""

    def send(self):
        self.sends_empty = True
        super().send()


class InOrderOfArrival(Buckets):
    def gradients(self):
        order = [param for bucket, *_ in self.works for param in bucket] + self.bucket
        grads = dict(zip(self.params, super().gradients(), strict=True))
        return [grads[param] for param in order]


class OneEach(Buckets):
    limit = 1


class SendsWhatIsTooLarge(Buckets):
    def collect(self, param):
        self.bucket.append(param)
        if sum(p.numel() for p in self.bucket) >= self.limit:
            self.send()


class KeepsSums(Buckets):
    def gradients(self):
        grads = super().gradients()
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        return grads


class AfterBackward(Buckets):
    late = True


class TheEngines(ddp.DDP):
    """engine/ddp.py's DDP with the members of the root's."""

    def __init__(self, stages, value=None):
        self.params = ddp.parameters_of(stages)
        values = {p.tag.name: p.data.clone() for p in self.params if not p.is_meta}
        self.ours = engine.ddp.DDP(stages, None, value or (lambda tag: values[tag.name]),
                                   torch.double, "cpu", 8 * 600)
        self.weights = [param.data for param in self.params]
        self.tags = [param.tag for param in self.params]
        self.ours.expect(0, last=True)

    def gradients(self):
        grads = {tag.name: grad.clone() for grad, tag in
                 zip(self.ours.gradients(), self.ours.tags, strict=True)}
        self.ours.expect(0, last=True)  # drops the gradients
        return [grads[param.tag.name].view_as(param) for param in self.params]


class StepsWhole(zero.ZeRO1):
    def __init__(self, stages, value=None):
        super().__init__(stages, value=value)
        self.weights = [param.data for param in self.params]


class StepsCopies(zero.ZeRO1):
    def __init__(self, stages, value=None):
        super().__init__(stages, value=value)
        self.weights = [weight.clone() for weight in self.weights]


class StepsRecorded(zero.ZeRO1):
    def __init__(self, stages, value=None):
        super().__init__(stages, value=value)
        self.weights = [own_chunk(param, param.tag.sum_over[0]) for param in self.params]


class NeverPublishes(zero.ZeRO1):
    def publish(self):
        pass


class GathersChunks(zero.ZeRO1):
    def publish(self):
        for param, weight in zip(self.params, self.weights, strict=True):
            all_gather(weight, param.tag.sum_over[0])


class KeepsGradients(zero.ZeRO1):
    def gradients(self):
        return [own_chunk(reduce_scatter(param.grad, param.tag.sum_over[0]),
                          param.tag.sum_over[0]) for param in self.params]


class AllReduces(zero.ZeRO1):
    def gradients(self):
        for param in self.params:
            all_gather(reduce_scatter(param.grad, param.tag.sum_over[0]),
                       param.tag.sum_over[0])
            param.kept = own_chunk(param.grad, param.tag.sum_over[0])
            param.grad = None
        return [param.kept for param in self.params]


class AveragesChunks(zero.ZeRO1):
    def gradients(self):
        return [grad / RANKS for grad in super().gradients()]


def gather_without_backward(chunk, shape, replicas):
    return zero.gather_weight(chunk.detach(), shape, replicas)


def gather_own_gradient(chunk, shape, replicas):
    def forward(chunk):
        return zero.gather_weight(chunk.detach(), shape, replicas)

    return WithBackward.apply(chunk, forward, lambda grad: own_chunk(grad, replicas).clone())


def gather_in_place(chunk, shape, replicas):
    def forward(chunk):
        return zero.gather_weight(chunk.detach(), shape, replicas)

    return WithBackward.apply(
        chunk, forward, lambda grad: own_chunk(reduce_scatter(grad, replicas), replicas))


def gather_clone_as_it_lies(chunk, shape, replicas):
    """Its clone of a transposed gradient is transposed, too."""
    def forward(chunk):
        whole = chunk.new_empty(shape)
        own_chunk(whole, replicas).copy_(chunk)
        return all_gather(whole, replicas)

    def backward(grad):
        return own_chunk(reduce_scatter(grad.clone(), replicas), replicas).clone()

    return WithBackward.apply(chunk, forward, backward)


def gather_float32(chunk, shape, replicas):
    return zero.gather_weight(chunk, shape, replicas).float()


def gather_average(chunk, shape, replicas):
    return zero.gather_weight(chunk, shape, replicas) / 1 + (
        0 if not chunk.requires_grad else chunk.register_hook(lambda grad: grad / RANKS) and 0)


def gather_nothing(chunk, shape, replicas):
    whole = chunk.new_zeros(shape)
    own_chunk(whole, replicas).copy_(chunk.detach())
    return whole


def gather_flat(chunk, shape, replicas):
    return zero.gather_weight(chunk, shape, replicas).flatten()


class Keeps(zero.Gathered):
    def forward(self, *inputs):
        return self.run({}, inputs, {})


class KeepsWhatItClosesOver(zero.Gathered):
    """Gathers outside of the function that recompute() runs."""

    def forward(self, *inputs):
        whole = {name: zero.gather_weight(chunk, shape, chunk.tag.sum_over[0])
                 for name, (chunk, shape) in self.chunks.items()}
        return recompute(lambda *x: functional_call(self.layer, whole, x), *inputs)


class KeepsNothing(zero.Gathered):
    """Frees the weights, and the graph with them."""

    def forward(self, *inputs):
        with torch.no_grad():
            return self.run({}, inputs, {})


# ---- tensor and sequence parallelism ----


def nothing(x, group):
    return WithBackward.apply(x, lambda x: x.clone(), lambda grad: grad.clone())


def sum_both_ways(x, group):
    return WithBackward.apply(x, lambda x: sum_of_copy(x, group),
                              lambda grad: sum_of_copy(grad, group))


def average_backward(x, group):
    return WithBackward.apply(x, lambda x: x, lambda grad: sum_of_copy(grad, group) / group.size)


def sum_in_place(x, group):
    return WithBackward.apply(x, lambda x: collectives.all_reduce(x, group), lambda grad: grad)


def sum_gradient_in_place(x, group):
    return WithBackward.apply(x, lambda x: x, lambda grad: collectives.all_reduce(grad, group))


def sum_as_it_lies(x, group):
    """Its clone of a transposed tensor is transposed, too."""
    return WithBackward.apply(x, lambda x: collectives.all_reduce(x.clone(), group),
                              lambda grad: grad)


def sum_gradient_as_it_lies(x, group):
    return WithBackward.apply(x, lambda x: x,
                              lambda grad: collectives.all_reduce(grad.clone(), group))


def sum_without_backward(x, group):
    return sum_of_copy(x.detach(), group)


class AllRows(Column):
    def __init__(self, linear, group, f, parts=()):
        super().__init__(linear, group, f)


class NoF(Column):
    def __init__(self, linear, group, f, parts=()):
        super().__init__(linear, group, lambda x, group: x, parts)


class NoBias(Column):
    def forward(self, x):
        return torch.nn.functional.linear(self.f(x, self.group), self.weight)


class BiasOnEach(Row):
    def forward(self, x):
        return self.g(torch.nn.functional.linear(x, self.weight, self.bias), self.group)


class NoG(Row):
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class HoldsAll(Row):
    """Slices the whole W in forward."""

    def __init__(self, linear, group, g):
        super().__init__(linear, group, g)
        self.weight = linear.weight

    def forward(self, x):
        columns = slice(*bounds(self.weight.size(1), self.group))
        return self.g(torch.nn.functional.linear(x, self.weight[:, columns]),
                      self.group) + self.bias


class Whole(Column):
    def __init__(self, linear, group, f, parts=()):
        super().__init__(linear, group, f, parts)
        self.weight, self.bias = linear.weight, linear.bias


def loss_of_all_words(logits, targets, words, group, overflow=False, padding=False, target=True):
    """vocabulary_loss with one thing missing."""
    largest = collectives.all_reduce(logits.detach().amax(-1), group, collectives.maximum)
    if overflow:
        largest = torch.zeros_like(largest)
    sum_exp = (logits - largest.unsqueeze(-1)).exp().sum(-1)
    local, outside = to_local(targets, *words)
    at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
    sum_exp, at_target = sum_over_ranks(torch.stack([sum_exp, at_target]), group)
    losses = sum_exp.log() + largest - (at_target if target else 0)
    return losses.sum() if padding else losses.masked_fill(targets == ABSENT, 0).sum()


def loss_of_own_words(logits, targets, words, group):
    local, outside = to_local(targets, *words)
    at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
    losses = logits.logsumexp(-1) - at_target
    return losses.masked_fill(targets == ABSENT, 0).sum()


def loss_of_own_largest(logits, targets, words, group):
    with patch.object(tensor_parallel, "all_reduce", lambda x, *_: x):
        largest = logits.detach().amax(-1)
    sum_exp = (logits - largest.unsqueeze(-1)).exp().sum(-1)
    local, outside = to_local(targets, *words)
    at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
    sum_exp, at_target = sum_over_ranks(torch.stack([sum_exp, at_target]), group)
    return (sum_exp.log() + largest - at_target).masked_fill(targets == ABSENT, 0).sum()


def loss_of_gathered_logits(logits, targets, words, group):
    widest = 6
    padded = torch.nn.functional.pad(logits, (0, widest - logits.size(-1)), value=-1e30)
    whole = gather_with_own_gradient(padded.movedim(-1, 0).reshape(1, widest, -1), group)
    whole = whole.view(widest * group.size, *targets.shape).movedim(0, -1)
    row = torch.cat([torch.arange(*bounds(22, _of(group, r))) * 0 + widest * r + torch.arange(
        bounds(22, _of(group, r))[1] - bounds(22, _of(group, r))[0]) for r in range(group.size)])
    return cross_entropy(whole[..., row], targets)


def _of(group, rank):
    return SimpleNamespace(size=group.size, rank=rank)


def tokens_in_ranks_order(x, group):
    """Forgets that each rank's tokens lie within each sequence."""
    def forward(x):
        parts = x.new_empty((group.size, *x.shape))
        parts[group.rank] = x
        return all_gather(parts, group).view(x.size(0), -1, x.size(2))

    return WithBackward.apply(x, forward, lambda grad: own_tokens_of_sum(grad, group))


def gather_with_own_gradient(x, group):
    return WithBackward.apply(x, lambda x: all_tokens(x, group), lambda grad: grad.unflatten(
        1, (group.size, -1))[:, group.rank].clone())


def scatter_without_sum(x, group):
    return WithBackward.apply(x, lambda x: x.unflatten(1, (group.size, -1))[:, group.rank].clone(),
                              lambda grad: all_tokens(grad, group))


def scatter_with_own_gradient(x, group):
    def backward(grad):
        whole = grad.new_zeros((grad.size(0), group.size, *grad.shape[1:]))
        whole[:, group.rank] = grad
        return whole.flatten(1, 2)

    return WithBackward.apply(x, lambda x: own_tokens_of_sum(x, group), backward)


def scatter_average(x, group):
    return scatter_tokens(x, group) / group.size


def scatter_after_all_reduce(x, group):
    def forward(x):
        return sum_of_copy(x, group).unflatten(1, (group.size, -1))[:, group.rank].clone()

    return WithBackward.apply(x, forward, lambda grad: all_tokens(grad, group))


# ---- sequences and experts ----


def quarters(S, size, rank):
    return torch.arange(S).tensor_split(size)[rank]


def stripes(S, size, rank):
    return torch.arange(rank, S, size)


def late_first(S, size, rank):
    segments = torch.arange(S).tensor_split(2 * size)
    return torch.cat([segments[2 * size - 1 - rank], segments[rank]])


def overlapping(S, size, rank):
    segments = torch.arange(S).tensor_split(2 * size)
    return torch.cat([segments[rank], segments[rank + 1]])


def ring(q, k, v, group, masked=True, scaled=True, hops=None, merge="sums", subtract=True,
         pass_on=context_parallel.pass_on):
    """ring_attention with one thing wrong. merge="softmaxes": adds up what each hop gives; a sum's
    name: rescales that sum only."""
    N = group.size
    S = N * q.size(2)
    positions = context_parallel.zigzag(S, N, group.rank)
    kv = torch.stack([k, v])
    largest = q.new_full((*q.shape[:-1], 1), -math.inf)
    numerator = denominator = total = 0.0
    for hop in range(hops or N):
        theirs = context_parallel.zigzag(S, N, (group.rank - hop) % N)
        scores = q @ kv[0].mT / (math.sqrt(q.size(-1)) if scaled else 1)
        if masked:
            scores = scores.masked_fill(theirs > positions.unsqueeze(1), -math.inf)
        total = total + scores.softmax(-1).nan_to_num() @ kv[1]
        new = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
        if not subtract:
            new = torch.zeros_like(new)
            largest = torch.zeros_like(new)
        weights = (scores - new).exp()
        shrink = (largest - new).exp()
        numerator = numerator * (shrink if merge in ("sums", "numerator") else 1)
        numerator = numerator + weights @ kv[1]
        denominator = denominator * (shrink if merge in ("sums", "denominator") else 1)
        denominator = denominator + weights.sum(-1, keepdim=True)
        largest = new
        if hop < N - 1:
            kv = pass_on(kv, group)
    return total if merge == "softmaxes" else numerator / denominator


def pass_values(kv, group):
    return torch.stack([kv[0], context_parallel.pass_on(kv[1], group)])


def pass_without_backward(kv, group):
    return context_parallel.pass_on(kv.detach(), group)


def one_pass_more(q, k, v, group):
    y = ring(q, k, v, group)
    context_parallel.pass_on(torch.stack([k, v]), group)  # on one rank from itself to itself
    return y


def combine_wrong(x, gates, chosen, experts, group, gated=True, back=True, both=True,
                  trained=True):
    """dispatch_and_combine with one thing wrong."""
    if not trained:
        gates = gates.detach()
    if not gated:
        gates = torch.ones_like(gates)
    if not both:
        gates = torch.stack([gates[..., 0], torch.zeros_like(gates[..., 1])], -1)
    if not back:
        y = dispatch_and_combine(x, gates, chosen, experts, group)
        return y.flatten(0, 1).roll(1, 0).view_as(y)
    return dispatch_and_combine(x, gates, chosen, experts, group)


def counts_unsent(x, gates, chosen, experts, group):
    """Takes what it sends for what it receives."""
    with patch.object(expert_parallel, "all_to_all", lambda outputs, inputs, group: [
            out.copy_(own) for out, own in zip(outputs, inputs, strict=True)]):
        return dispatch_and_combine(x, gates, chosen, experts, group)


def combine_twice(x, gates, chosen, experts, group):
    return 2 * dispatch_and_combine(x, gates, chosen, experts, group)


# ---- schedules ----


def warm_up_too_long(P, m, v, rank):
    return schedules.weave(["F"] * m, ["B"] * m, P - rank)


def no_warm_up(P, m, v, rank):
    return ["F", "B"] * m


def one_backward_missing(P, m, v, rank):
    return schedules.one_f_one_b(P, m, v, rank)[:-1]


def one_more_on_rank_0(P, m, v, rank):
    return schedules.one_f_one_b(P, m, v, rank) + ["F", "B"] * (rank == 0)


def no_warm_up_on_rank_1(P, m, v, rank):
    return (no_warm_up if rank == 1 else schedules.one_f_one_b)(P, m, v, rank)


def backward_first(P, m, v, rank):
    return ["B"] * m + ["F"] * m


def digits(P, m, v, rank):
    return ["F0"] * m + ["B0"] * m


def interleaved_of(P, m, v, rank, num_warmup=None, order=None, reverse=True):
    chunks = order(P, m, v) if order else [i // P % v for i in range(m * v)]
    warm = num_warmup(P, v, rank) if num_warmup else (v - 1) * P + 2 * (P - 1 - rank)
    letter = schedules.letter
    return schedules.weave(["F" + letter(c) for c in chunks],
                           ["B" + letter(v - 1 - c if reverse else c) for c in chunks],
                           warm if v > 1 else P - 1 - rank)


def warm_up_once(P, v, rank):
    return (v - 1) * P + P - 1 - rank


def warm_up_of_1f1b(P, v, rank):
    return P - 1 - rank


def warm_up_thrice(P, v, rank):
    return (v - 1) * P + 3 * (P - 1 - rank)


def chunk_by_chunk(P, m, v):
    return [i // m for i in range(m * v)]


def no_weights(P, m, v, rank):
    return [action for action in schedules.zero_bubble(1, P, m, v, rank) if action != "W"]


def weights_first(P, m, v, rank):
    return ["F"] * m + ["W", "I"] * m


# ---- tags, norm, checkpoint ----


def tie_without_sum(all_layers, group):
    if group.size > 1 and all_layers[0].wte.weight is all_layers[-1].lm_head.weight:
        all_layers[0].wte.weight.tag.shared_by += (group,)


def tie_without_copies(all_layers, group):
    if group.size > 1 and all_layers[0].wte.weight is all_layers[-1].lm_head.weight:
        all_layers[0].wte.weight.tag.sum_over += (group,)


def tie_without_replicas(all_layers, group):
    if group.size > 1 and all_layers[0].wte.weight is all_layers[-1].lm_head.weight:
        all_layers[0].wte.weight.tag.sum_over = (group,)
        all_layers[0].wte.weight.tag.shared_by += (group,)


def tie_always(all_layers, group):
    if group.size > 1:
        all_layers[0].wte.weight.tag.sum_over += (group,)
        all_layers[0].wte.weight.tag.shared_by += (group,)


SQUARE = optimizer.AdamW.square  # kept, because the attempt takes its place


def right_square(grads, holders):
    return SQUARE(SimpleNamespace(holders=holders), grads)


def square_of(grads, holders, power=1, root=False):
    square = sum(grad.double().square().sum() / n**power
                 for grad, n in zip(grads, holders, strict=True))
    return square.sqrt() if root else square


def averaged_square(grads, holders):
    return right_square(grads, holders) / RANKS


def sum_of_norms(grads, holders):
    return sum(grad.double().norm() / n for grad, n in zip(grads, holders, strict=True))


def square_in_place(grads, holders):
    return sum(grad.mul_(grad).sum() / n for grad, n in zip(grads, holders, strict=True))


def runs_from(tag, start, stop, change):
    """Tag.runs, with each run changed."""
    return [change(run, start) for run in tag.runs(start, stop)]


def counted_from_the_slice(run, start):
    return run[0], run[1] + start, run[2]


def runs_of_whole_slice(tag, start, stop):
    return list(tag.runs(0, 10**6))


def runs_of_first_range(tag, start, stop):
    return list(replace(tag, ranges=tag.ranges[:1]).runs(start, stop))


def runs_along_dim_0(tag, start, stop):
    return list(replace(tag, dim=0, ranges=((0, tag.shape[0]),)).runs(start, stop))


def runs_of_one(tag, start, stop):
    for index, position, length in tag.runs(start, stop):
        for i in range(length):
            yield index + i, position + i, 1


def runs_twice(tag, start, stop):
    return list(tag.runs(start, stop)) * 2


CASES = {  # {exercise: (the repository's forms, [(wrong forms, words that tell)])}
    "e01_reduce_scatter": ({"reduce_scatter": collectives.reduce_scatter}, [
        (partial(scatter_ring, send=0, take=1), "complete here is chunk 1"),
        (average_scatter, "its own chunk 0 is divided by 4"),
        (hop_missing, "2 hops were made, and 3 are needed"),
        (copies_instead, "lacks the term of ranks 0, 2 and 3: what came has overwritten rank 0's"),
        (only_sends, "waits until rank 1 receives its message 1"),
        (partial(scatter_ring, waits=False),
         "rank 0: hop 1 was not waited for: group.exchange(...).wait()"),
        (scatter_one_hop_more, "right, but in 4 hops (calls of exchange): N - 1 = 3"),
        (scatter_of_all, "right, but in 6 hops"),
        (scatter_doubled, "right, but bytes sent by rank 0: 112, and the formula 8 bytes x (n - "
                          "own chunk) says 56"),
        (scatter_returns_nothing, "NoneType was returned: return the tensor that came in")]),
    "e02_all_gather": ({"all_gather": collectives.all_gather}, [
        (gather_hop_missing, "is unchanged: nothing arrived"),
        (partial(gather_ring, first=1), "before it had received it; in the first hop a rank sends "
                                        "its own chunk"),
        (gather_own_chunk_only, "chunk 1 holds the chunk of rank 3"),
        (gather_all_to_one, "rank 0 waits for message 1 from rank 1"),
        (gather_whole_tensors, "right, but bytes sent by rank 0: 240"),
        (gather_returns_nothing, "NoneType was returned: return the tensor that came in"),
        (partial(gather_ring, combine=torch.Tensor.add_), "chunks are copied, not added")]),
    "e03_all_reduce": ({"BucketDDP": TheEngines}, [
        (Averages, "is divided by 4: gradients are summed, never averaged"),
        (NeverWaits, "all-reduces were not waited for"),
        (WaitsAtOnce, "each of 3 buckets was waited for before backward ended: no overlap"),
        (NeverEmpties, "after step 2 BucketDDP still holds 4 of step 1's buckets: empty"),
        (KeepsBuffers, "after step 2 BucketDDP still holds 1 of step 1's buckets: empty"),
        (SendsEmpty, "(a first gradient of 900 numbers, more than BUCKET)"),
        (InOrderOfArrival, "return gradients in the order of self.params"),
        (ForgetsTheLastOfADict, ": the parameter transformer."),
        (ForgetsTheLast, "is this rank's own term: not summed over the replicas"),
        (OneEach, "put parameters side by side into buckets"),
        (AfterBackward, "no bucket was on its way when backward ended"),
        (SendsWhatIsTooLarge, "send a bucket when the next gradient would make it larger"),
        (KeepsSums, "leaves param.grad: the next step would add to it"),
        (ddp.DDP, "no all-reduce ran in the background")]),
    "e04_zero1": ({"ZeRO1": zero.ZeRO1}, [
        (StepsWhole, "this rank's chunk has"),
        (StepsCopies, "keep a view, so that a step changes the parameter"),
        (StepsRecorded, "take the chunks of param.data"),
        (NeverPublishes, "is the old one: every rank needs the new chunks of all ranks"),
        (GathersChunks, "is neither old nor new: all_gather takes the whole parameter"),
        (KeepsGradients, "leaves param.grad: the next step would add to it"),
        (AllReduces, "right, but bytes sent by rank"),
        (AveragesChunks, "is divided by 4: gradients are summed, never averaged")]),
    "e05_zero3": ({"gather_weight": zero.gather_weight, "Gathered": zero.Gathered}, [
        (gather_without_backward, "gather_weight() has no backward"),
        (gather_own_gradient, "is this rank's own term: not summed over the replicas"),
        (gather_average, "is divided by 4: gradients are summed, never averaged"),
        (gather_nothing, "chunks of other ranks are missing"),
        (gather_in_place, "changes in place the gradient that autograd gave it"),
        (gather_float32, "is torch.float32, and should be torch.float64"),
        (gather_flat, "has shape [15], and should have [3, 5]"),
        (gather_clone_as_it_lies, "(a gradient that is not contiguous: "
                                  "clone(memory_format=torch.contiguous_format))"),
        ({"Gathered": Keeps}, "the gathered weights are not freed"),
        ({"Gathered": KeepsWhatItClosesOver}, "gather in the function that recompute() runs"),
        ({"Gathered": KeepsNothing}, "the layer runs without autograd")]),
    "e06_f_and_g": ({"copy_to_ranks": tensor_parallel.copy_to_ranks,
                     "sum_over_ranks": sum_over_ranks}, [
        ({"copy_to_ranks": nothing}, "the gradient in f's backward is this rank's own term"),
        ({"copy_to_ranks": average_backward}, "f's backward is the sum divided by 4"),
        ({"copy_to_ranks": sum_both_ways}, "f's forward is a sum over the ranks"),
        ({"sum_over_ranks": nothing}, "the result of g's forward is this rank's own term"),
        ({"sum_over_ranks": sum_both_ways}, "the gradient in g's backward is a sum over the ranks"),
        ({"sum_over_ranks": sum_in_place}, "g's forward changes its input in place"),
        ({"copy_to_ranks": sum_in_place}, "f's forward changes its input in place"),
        ({"copy_to_ranks": sum_gradient_in_place},
         "f's backward changes in place the gradient that autograd gave it"),
        ({"copy_to_ranks": sum_gradient_as_it_lies},
         "(in f's backward) (tensors that are not contiguous: clone(memory_format="),
        ({"sum_over_ranks": sum_as_it_lies}, "(in g's forward) (tensors that are not contiguous: "),
        ({"sum_over_ranks": sum_without_backward}, "the result has no backward")]),
    "e07_column_and_row": ({"Column": Column, "Row": Row}, [
        ({"Column": AllRows}, "should have 1/4 of each of the parts (q, k, v)"),
        ({"Column": NoF}, "the gradient of Column's input is this rank's own term"),
        ({"Column": NoBias}, "Column's output lacks the bias"),
        ({"Column": Whole}, "Column's output has shape [2, 3, 24], and should have [2, 3, 6]"),
        ({"Row": BiasOnEach}, "Row's output has the bias 4 times: add it once, after the sum"),
        ({"Row": NoG}, "Row's output is this rank's partial sum: g is missing"),
        ({"Row": HoldsAll}, "right, but bytes of Row's parameters: 360, and the formula")]),
    "e08_vocabulary_loss": ({"vocabulary_loss": tensor_parallel.vocabulary_loss}, [
        (partial(loss_of_all_words, overflow=True), "exp overflows"),
        (partial(loss_of_all_words, padding=True), "the loss counts padding"),
        (partial(loss_of_all_words, target=False), "the loss lacks the logit of the target"),
        (loss_of_own_words, "the loss is of this rank's words only"),
        (loss_of_own_largest, "do all ranks subtract the same number"),
        (loss_of_gathered_logits, "do not gather the logits")]),
    "e09_sequence_parallel": ({"gather_tokens": gather_tokens, "scatter_tokens": scatter_tokens}, [
        ({"gather_tokens": tokens_in_ranks_order}, "has all numbers in another order"),
        ({"gather_tokens": gather_with_own_gradient},
         "the gradient in gather_tokens' backward is this rank's own term"),
        ({"scatter_tokens": scatter_without_sum},
         "what scatter_tokens returns is this rank's own term"),
        ({"scatter_tokens": scatter_with_own_gradient},
         "the gradient in scatter_tokens' backward is right for tokens [0, 1] only"),
        ({"scatter_tokens": scatter_average}, "is the sum divided by 4"),
        ({"scatter_tokens": scatter_after_all_reduce}, "right, but bytes sent by rank")]),
    "e10_ring_attention": ({"zigzag": context_parallel.zigzag,
                            "ring_attention": context_parallel.ring_attention}, [
        ({"zigzag": quarters}, "the ranks' queries meet [10, 26] keys: all ranks should"),
        ({"zigzag": stripes}, "the ranks' queries meet [16, 20] keys"),
        ({"zigzag": late_first}, "rank 0 has [6, 7, 0, 1], and segments 0 and 3 are"),
        ({"zigzag": overlapping}, "each token must be on one rank"),
        ({"ring_attention": partial(ring, masked=False)}, "the causal mask is missing"),
        ({"ring_attention": partial(ring, scaled=False)},
         "on one rank, where nothing travels, the result has scores that are not divided by sqrt"),
        ({"ring_attention": partial(ring, pass_on=pass_values)},
         "differs: whose keys are these after each hop"),
        ({"ring_attention": partial(ring, hops=1)}, "has met this rank's own keys only"),
        ({"ring_attention": partial(ring, merge="softmaxes")},
         "keep numerator and denominator apart"),
        ({"ring_attention": partial(ring, merge="unshrunk")}, "has sums that are not rescaled"),
        ({"ring_attention": partial(ring, merge="numerator")},
         "has a rescaled numerator, but the denominator is not"),
        ({"ring_attention": partial(ring, merge="denominator")},
         "has a rescaled denominator, but the numerator is not"),
        ({"ring_attention": partial(ring, subtract=False)},
         "with large scores the result is not finite"),
        ({"ring_attention": one_pass_more}, "right, but bytes sent forward by this rank"),
        ({"ring_attention": partial(ring, pass_on=pass_without_backward)},
         "the gradient of k differs")]),
    "e11_experts": ({"dispatch_and_combine": expert_parallel.dispatch_and_combine}, [
        (partial(combine_wrong, gated=False), "without their gates"),
        (partial(combine_wrong, both=False), "of one of a token's k experts only"),
        (partial(combine_wrong, back=False), "has the outputs at other tokens"),
        (combine_twice, "is 2 times what it should be"),
        (partial(combine_wrong, trained=False), "a training step (dp 4 x ep 4)"),
        (counts_unsent, "bytes to rank")]),
    "e12_one_f_one_b": ({"gpipe": schedules.gpipe, "one_f_one_b": schedules.one_f_one_b}, [
        ({"one_f_one_b": warm_up_too_long}, "in flight, and should have at most"),
        ({"one_f_one_b": no_warm_up}, "who waits, and for what?"),
        ({"one_f_one_b": one_backward_missing}, "rank 0 runs 2 backwards, and should run m = 3"),
        ({"one_f_one_b": one_more_on_rank_0}, "rank 0 runs 4 forwards, and should run m = 3"),
        ({"one_f_one_b": no_warm_up_on_rank_1}, "(look at rank 1's list of one_f_one_b first)"),
        ({"one_f_one_b": backward_first}, "misordered: rank"),
        ({"one_f_one_b": digits}, "'F0' is no action"),
        ({"gpipe": schedules.one_f_one_b}, "a backward comes before the last forward")]),
    "e13_interleaved": ({"interleaved": schedules.interleaved}, [
        (partial(interleaved_of, num_warmup=warm_up_once), "messages of 0.1 F: it takes"),
        (partial(interleaved_of, num_warmup=warm_up_of_1f1b), "misordered: rank"),
        (partial(interleaved_of, num_warmup=warm_up_thrice), "deadlock: rank 0 at F(stage 4"),
        (partial(interleaved_of, order=chunk_by_chunk), "waits for F(stage 6, microbatch 0)"),
        (partial(interleaved_of, reverse=False), "at B(stage 0, microbatch 0) waits")]),
    "e14_own_schedule": ({"own_schedule": partial(schedules.zero_bubble, 1)}, [
        (schedules.one_f_one_b, "a bubble of 27.27% is not below 1F1B's"),
        (schedules.gpipe, "rank 0 has 8 in flight, and may have 4"),
        (partial(schedules.zero_bubble, 2), "rank 0 has 7 in flight, and may have 4"),
        (no_weights, "W(stage 0, microbatch 0) is missing"),
        (weights_first, 'entry 8 of the list, "W", comes before its "I"')]),
    "e15_tied_norm": ({"tie_ends": pipeline.tie_ends, "square": right_square}, [
        ({"tie_ends": tie_without_sum}, "sum_over lacks the two stages"),
        ({"tie_ends": tie_without_copies}, "shared_by lacks the two stages"),
        ({"tie_ends": tie_without_replicas}, "drops the replicas from sum_over"),
        ({"tie_ends": tie_always}, "tags a matrix that is not tied"),
        ({"square": partial(square_of, power=0)}, "each of its n holders adds 1/n of its square"),
        ({"square": partial(square_of, power=2)}, "divide the square of a gradient by n"),
        ({"square": partial(square_of, root=True)}, "is a root: train.py takes the root"),
        ({"square": averaged_square}, "is 1/4 of the right one: squares are never averaged"),
        ({"square": sum_of_norms}, "is a sum of norms"),
        ({"square": square_in_place}, "changes the gradients")]),
    "e16_checkpoint": ({"runs": Tag.runs}, [
        (partial(runs_from, change=counted_from_the_slice), "count the second number from start"),
        (runs_of_whole_slice, "elements outside of start and stop are in the runs"),
        (runs_of_first_range, "of the full tensor are missing"),
        (runs_along_dim_0, "is said to lie at"),
        (runs_of_one, "a run is as long as elements lie side by side"),
        (runs_twice, "comes twice")]),
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


@pytest.mark.parametrize("c", range(RANKS))
def test_an_averaged_chunk_is_told_as_averaged_on_each_rank(c):
    """10^k / 4 is a whole number for k > 1, so a fraction of 1/4 shows in chunk 0 only."""
    right = sum(10.0 ** (r + RANKS * c) for r in range(RANKS))
    assert explain_sum(right, c, RANKS) == ""
    assert explain_sum(right / RANKS, c, RANKS).startswith("is divided by 4")


def test_an_exception_is_told_in_one_line():
    """A layer in a TypeError is written over many lines, like a parameter in a KeyError."""
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError) as error:
        layer(*layer[0])
    assert said_by(error.value) == (
        "Sequential( ... ) argument after * must be an iterable, not Linear")
    layer[0].weight.tag = Tag("h.0.weight", layer[0].weight.shape)
    assert said_by(KeyError(layer[0].weight)) == "the parameter h.0.weight"
    assert said_by(KeyError(layer[0].bias)) == "a tensor"
    with pytest.raises(Wrong) as wrong, while_trying("in step 2"):
        raise Wrong("differs")
    assert said_by(wrong.value) == "differs (in step 2)"


def one_backward_whole(P, m, v, rank):
    """The repository's zb-h1, but rank 0 runs "B" in the place of its first "I" "W"."""
    actions = schedules.zero_bubble(1, P, m, v, rank)
    if rank == 0:
        first = actions.index("I")
        actions[first : first + 2] = ["B"]
    return actions


def test_a_schedule_may_split_some_of_its_backwards():
    """B and I count together: the I after the B is of microbatch 1."""
    split = play_form(partial(schedules.zero_bubble, 1), 4, 8)
    mixed = play_form(one_backward_whole, 4, 8)
    assert (mixed.makespan, mixed.peak_in_flight) == (split.makespan, split.peak_in_flight)


# ---- the files ----


def test_an_exercise_is_one_file_with_a_task_and_a_body_to_write():
    files = sorted(path.stem for path in HERE.glob("extras/exercises/e[0-9]*.py"))
    assert files == [exercise.name for exercise in EXERCISES] == list(CASES)
    for number, exercise in enumerate(EXERCISES, 1):
        tree = ast.parse(Path(HERE, f"extras/exercises/{exercise.name}.py").read_text())
        task = ast.get_docstring(tree)
        assert task.startswith(f"Exercise {number}: ")
        written = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        assert tuple(node.name for node in written) == exercise.forms
        for node in written:
            inner = [node] if isinstance(node, ast.FunctionDef) else [
                part for part in node.body if isinstance(part, ast.FunctionDef)]
            assert ast.get_docstring(node), "a worked example"
            for function in inner:
                assert ast.unparse(function.body[-1]) == "raise NotImplementedError"


def test_every_form_of_an_exercise_stands_where_it_says():
    """What is printed after an exercise is solved names a file and what to look for in it."""
    for exercise in EXERCISES:
        for part in exercise.where.split("; "):
            file, name = re.match(r"([\w/]+\.py): (\w+)", part).groups()
            assert re.search(rf"(def|class) {name}\b", Path(HERE, file).read_text())


def test_an_attempt_may_fail_in_other_ways():
    """Names are kept; an error comes before a difference, and that before a hang."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "e01_reduce_scatter.py")
        path.write_text("def reduce_scater(): pass")
        with pytest.raises(Wrong, match="e01_reduce_scatter.py has no reduce_scatter"):
            load_forms(path, ("reduce_scatter",))
    reports = [Report("wrong", "a"), Report("a hang", "b"), Report("an error", "c")]
    assert verdict(reports).line == "c" and verdict(reports[:2]).line == "a"
    # A rank whose peer has ended knows less than the peer
    assert verdict([Report("a lost message", "d"), *reports[:1]]).line == "a"


def test_a_line_that_is_no_python_is_named(tmp_path):
    """By its place in the learner's file, not by a place in importlib."""
    path = tmp_path / "e01_reduce_scatter.py"
    path.write_text("def reduce_scatter(tensor, group):\n    return tensor +\n")
    reports = []
    with (patch.object(torch.distributed, "get_world_size", lambda: RANKS),
          patch.object(Board, "wait_for_all", lambda board: None)):
        attempt(0, lambda make_mesh, forms: [], partial(load_forms, path, ("reduce_scatter",)),
                tmp_path / "board", reports.append)
    assert [report.line for report in reports] == [
        "rank 0: SyntaxError in e01_reduce_scatter.py, line 2: invalid syntax"]


def test_a_rank_sends_its_report_before_it_waits_for_the_others(tmp_path):
    """Another rank may compute forever."""
    happened = []
    with (patch.object(torch.distributed, "get_world_size", lambda: RANKS),
          patch.object(Board, "wait_for_all", lambda board: happened.append("waits"))):
        attempt(0, lambda make_mesh, forms: ["12"], dict, tmp_path / "board", happened.append)
    assert happened == [Report("right", "", ("12",)), "waits"]


class Unreadable(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), SystemExit(0),
                                   Unreadable()], ids=repr)
def test_whatever_an_attempt_raises_is_told(error, tmp_path):
    def judge(make_mesh, forms):
        raise error

    told = []
    with (patch.object(torch.distributed, "get_world_size", lambda: RANKS),
          patch.object(Board, "wait_for_all", lambda board: None)):
        attempt(0, judge, dict, tmp_path / "board", told.append)
    report, = told
    says = f"rank 0: {type(error).__name__} in test_exercises.py, line "
    assert report.kind == "an error" and report.line.startswith(says)
    assert report.line.endswith("its text cannot be read") == (type(error) is Unreadable)


def test_at_the_limit_a_rank_that_computes_is_named(tmp_path):
    """Ranks 0 and 3 wait for rank 2: rank 0 for a message, rank 3 for a job that waits for a
    message. Rank 1 has sent its report."""
    path = tmp_path / "board"
    boards = [Board(path, rank, RANKS) for rank in range(RANKS)]
    boards[0].write(WAITS, 0, RECV, 2, 0, 0)
    boards[1].write(ENDED)
    boards[3].write(JOINS)
    boards[3].write(WAITS, 0, RECV, 2, 3, 0, thread=1)
    pipes = [Pipe(duplex=False) for _ in range(RANKS)]
    pipes[1][1].send(Report("right", ""))
    reports = start.reports_until(0.0, [receive for receive, _ in pipes], path)
    assert verdict(reports).line == "rank 2 still computes after 120 s: a loop that does not end?"
    boards[2].write(ENDED)
    pipes[2][1].send(Report("wrong", "a"))
    assert verdict(start.reports_until(0.0, [receive for receive, _ in pipes], path)).line == "a"


def raises(tensor, group, combine=None):
    if group.rank == 2:
        raise IndexError("no such chunk")
    return collectives.reduce_scatter(tensor, group)


def returns_at_once(tensor, group, combine=None):
    if group.rank == 2:
        return tensor
    return collectives.reduce_scatter(tensor, group)


def other_size(tensor, group, combine=None):
    received = torch.empty_like(tensor)
    group.exchange(tensor[: 1 + group.rank].clone(), group.next, received, group.prev).wait()
    return tensor


def test_an_error_of_one_rank_is_told_and_not_that_the_others_wait_for_it():
    error, hang, size = told("e01_reduce_scatter", [
        {"reduce_scatter": form} for form in (raises, returns_at_once, other_size)])
    assert error.kind == "an error"
    assert "rank 2: IndexError in test_exercises.py, line" in error.line
    # Rank 2 was wrong, too: said is what differs there, and not who waits
    assert hang.kind == "wrong" and hang.line.startswith("rank 2: its own chunk 2 lacks")
    assert re.match(r"rank \d sends \d+ bytes to rank \d, and rank \d receives", size.line)


# ---- the command ----


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """extras/exercises/ as a learner's own folder; a function that runs the command in this
    process."""
    folder = tmp_path / "exercises"
    folder.mkdir()
    for exercise in EXERCISES:
        shutil.copy(HERE / f"extras/exercises/{exercise.name}.py", folder)
    monkeypatch.setattr(program, "FOLDER", folder)
    for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, "1" if name.startswith("OMP") else "ERROR"))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["exercises", *words])
        with as_it_was():
            try:
                program.main()
            except SystemExit as stop:
                return stop.code
        return 0

    return run


def test_the_list_says_what_is_solved_and_hints_come_one_at_a_time(learner, capsys, monkeypatch):
    monkeypatch.setattr(start, "run_on_ranks", lambda exercise, path: Report("right", "", ("12",)))
    assert learner() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EXERCISES) + 2
    assert all(line.endswith("to do") for line in lines[: len(EXERCISES)])
    assert not any(exercise.where in line for exercise in EXERCISES for line in lines)
    hints = []
    for _ in range(4):
        assert learner("2", "--hint") == 0
        hints.append(capsys.readouterr().out)
    assert [hint[:13] for hint in hints] == [f"hint {n} of 3: " for n in (1, 2, 3, 3)]
    assert learner("2") == 0
    out = capsys.readouterr().out
    assert "right\n  12\nthe repository's form: collectives.py: all_gather\n" in out
    learner()
    assert capsys.readouterr().out.splitlines()[1].endswith(" solved")
    with open(program.FOLDER / "e02_all_gather.py", "a") as file:
        file.write("\n")
    learner()
    assert capsys.readouterr().out.splitlines()[1].endswith("changed since it was solved")


@pytest.mark.parametrize("words,says", [
    (["17"], "17: say which exercise, 1 to 16, quiz or break"), (["x"], "x: say which"),
    (["--hint"], "--hint needs the number"), (["quiz", "--hint"], "--hint needs the number"),
    (["break", "--hint"], "--hint needs the number"),
    (["3", "--svg", "x.svg"], "--svg is for break only"),
    (["break", "--svg", "/proc/x"], "/proc/x: No such file"),
    (["break", "--svg", __file__], "holds something else than --svg writes")])
def test_a_wrong_command_line_is_answered_in_one_line(words, says, capsys, monkeypatch):
    assert says in one_line(program.main, ["exercises", *words], capsys, monkeypatch)


def command_with(answer, number, folder):
    """Run the whole command, in processes of its own, for an exercise whose file has this text."""
    for path in HERE.glob("*"):
        if path.name not in ("extras", ".git", "out"):
            (folder / path.name).symlink_to(path)
    shutil.copytree(HERE / "extras", folder / "extras")
    file = folder / f"extras/exercises/{EXERCISES[number - 1].name}.py"
    file.write_text(answer)
    return subprocess.run([sys.executable, "-m", "extras.exercises", str(number)], cwd=folder,
                          text=True, capture_output=True, timeout=HANG)


def test_a_hang_is_named_by_the_command_within_seconds(tmp_path):
    """Exit code 1, no solution named."""
    run = command_with("def all_gather(tensor, group):\n"
                       "    group.recv(tensor, group.prev).wait()\n", 2, tmp_path)
    assert run.returncode == 1
    assert "a hang: rank 0 waits for message 1 from rank 3 in group dp; rank 1 waits" in run.stdout
    assert "the repository's form" not in run.stdout and run.stderr == ""


LEAVES_PROCESSES = """
import os
import subprocess
from multiprocessing import get_context
from pathlib import Path
from time import sleep

from collectives import all_gather as right

if not Path(f"{os.getpid()}.began").exists():
    Path(f"{os.getpid()}.began").touch()
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started = [subprocess.Popen(["sleep", "100"], **quiet),
               subprocess.Popen(["sleep", "100"], start_new_session=True, **quiet),
               subprocess.Popen(["sh", "-c", "sleep 100 & echo $! > $PPID.shell; wait"], **quiet)]
    started.append(get_context("fork").Process(target=sleep, args=(100,)))
    started[-1].start()
    Path(f"{os.getpid()}.started").write_text(" ".join(str(child.pid) for child in started))
    while not Path(f"{os.getpid()}.shell").exists() or not Path(f"{os.getpid()}.shell").read_text():
        sleep(0.01)


def all_gather(tensor, group):
    return right(tensor, group)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux")
def test_no_process_that_an_answer_has_started_is_left(tmp_path):
    """A child, one in a session of its own, a child's child, and a fork."""
    run = command_with(LEAVES_PROCESSES, 2, tmp_path)
    assert run.returncode == 0, run.stdout
    files = [*tmp_path.glob("*.started"), *tmp_path.glob("*.shell")]
    numbers = [int(number) for file in files for number in file.read_text().split()]
    assert len(numbers) == 5 * RANKS
    left = [number for number in numbers if Path(f"/proc/{number}").exists()]
    for number in left:
        os.kill(number, 9)
    assert not left


# ---- the quiz ----


def test_the_quiz_takes_the_computed_answers_and_prints_how_they_come_about():
    questions = [make() for make in quiz.QUESTIONS]
    answers = iter([f"{question.answer:.6g} GB" for question in questions])
    said = []
    assert quiz.ask_all(lambda prompt: next(answers), said.append) == 0
    assert said.count("right") == len(questions) >= 10
    assert all(f"   {line}" in said for question in questions for line in question.derivation)
    answers = iter(["1", "", *["0"] * (len(questions) - 2)])
    said.clear()
    assert quiz.ask_all(lambda prompt: next(answers), said.append) == 1
    wrong, skipped = (next(line for line in said[i:] if "answer" in line) for i in (0, 4))
    assert wrong == "wrong: the answer is 112, because"
    assert skipped == "the answer is 7, because"
    # By hand, from the papers' formulas
    assert [round(question.answer, 4) for question in questions] == [
        112, 7, 1.1417, 7568, 38.5, 1, 8.75, 147, 20, 4, 12.5829, 100.6633, 256, 5.6875, 3.25]


def test_the_quiz_ignores_what_follows_the_number():
    question = quiz.states_of_7b()
    assert all(quiz.is_right(question, text) for text in ("112", " 112 GB", "112GB", "112,0%"))
    assert quiz.is_right(question, "1.12e2 GB")
    assert not quiz.is_right(question, "11.2GB")
    assert quiz.is_right(question, "GB") is None


def test_the_quiz_counts_wrong_answers_and_asks_again_for_a_number():
    lines = iter(["many", "113,5", "", "99"])

    def ask(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    said = []
    assert quiz.ask_all(ask, said.append) == 1
    assert said[1] == "right" and said[-1] == "1 of 15 right"
