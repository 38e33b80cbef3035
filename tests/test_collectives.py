"""Collectives against their definition, bytes against the formulas; groups of the mesh."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch

import collectives as plain
import engine.collectives as c
import engine.mesh as mesh_file
import mesh as plain_mesh
from engine.group import Group, Work, queued
from engine.mesh import Mesh
from engine.nccl_group import CudaGroup
from group import CommunicationError
from group import Work as PlainWork
from run.copies import Copies
from run.processes import all_gather_text
from shard import Tag
from tests.harness import IN_ORDER, equals_one_process, pool, train_with
from tests.pool import HANG

# ---- collectives ----

SIZES = (0, 1, 2, 5, 8, 67)  # none, one, fewer than ranks, as many, more
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64)


def _mesh_group(world):
    return Mesh(dp=world, in_order=IN_ORDER).group("dp")


def _values(rank, n, dtype):  # small integers: exact in every dtype and in every order
    return (torch.arange(n) * (rank + 1) % 7 + rank).to(dtype)


def all_collectives(rank, world, g=None):
    g = g or _mesh_group(world)
    for dtype, n in itertools.product(DTYPES, SIZES):
        every = [_values(r, n, dtype) for r in range(world)]
        total, chunk = sum(every), [x.tensor_split(world) for x in every]
        own = torch.stack(every).sum(0).to(dtype).tensor_split(world)[rank]
        for reduce in (plain.all_reduce, c.all_reduce):
            assert torch.equal(reduce(every[rank].clone(), g), total), (reduce, dtype, n)
        x = every[rank].clone()
        c.all_reduce(x, g, "max")
        assert torch.equal(x, torch.stack(every).amax(0) if n else total)
        gathered = torch.cat([chunk[r][r] for r in range(world)])
        for family in (plain, c):
            x = family.reduce_scatter(every[rank].clone(), g)
            assert torch.equal(x.tensor_split(world)[rank], own)
            assert torch.equal(family.all_gather(every[rank].clone(), g), gathered)
        for family, root in itertools.product((plain, c), range(world)):
            assert torch.equal(family.broadcast(every[rank].clone(), g, root), every[root])
            x = family.scatter(every[rank].clone(), g, root)
            assert torch.equal(x.tensor_split(world)[rank], chunk[root][rank])
            x = family.gather(every[rank].clone(), g, root)
            y = family.reduce(every[rank].clone(), g, root)
            assert rank != root or torch.equal(x, gathered) and torch.equal(y, total)
        for root in range(world):
            x = c.reduce(every[rank].clone(), g, root, "max")
            assert rank != root or torch.equal(x, torch.stack(every).amax(0) if n else total)
        out = [torch.empty_like(every[r]) for r in range(world)]
        for exchange in (plain.all_to_all, c.all_to_all):
            exchange(out, [every[rank] + j for j in range(world)], g)
            assert all(torch.equal(out[r], every[r] + rank) for r in range(world))
            out = [torch.empty_like(x) for x in out]
        works = [c.all_reduce(every[rank].clone(), g, async_op=True) for _ in range(3)]
        assert all(work.wait() is None for work in works)
    c.barrier(g)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_collectives_equal_their_definition(world):
    pool(world, all_collectives, world)


def _bytes_and_bits(rank, world, n):
    g, out = _mesh_group(world), {}
    for name in ("reduce_scatter", "all_gather", "all_reduce"):
        g.bytes_sent = 0
        x = getattr(c, name)(torch.randn(n, generator=torch.Generator().manual_seed(rank)), g)
        out[name] = g.bytes_sent
    return out, x


@pytest.mark.parametrize("world,n", [
    (2, 1000), (3, 1000), (4, 1), (4, 3), (4, 1000), (8, 1000), (2, 3 << 19), (8, 3 << 19)])
def test_ring_sends_the_formula_and_replicas_get_the_same_bits(world, n):
    got = pool(world, _bytes_and_bits, world, n)
    size = [len(part) * 4 for part in torch.arange(n).tensor_split(world)]
    for r, (sent, x) in enumerate(got):
        # all but one chunk each; the ring's total is exactly 2 (N-1) times the bytes
        assert sent["reduce_scatter"] == 4 * n - size[r]
        assert sent["all_gather"] == 4 * n - size[(r + 1) % world]
        assert sent["all_reduce"] == sent["reduce_scatter"] + sent["all_gather"]
        assert torch.equal(x, got[0][1])
    assert sum(sent["all_reduce"] for sent, _ in got) == 2 * (world - 1) * 4 * n


def _bytes_of_rooted(rank, world, n, root):
    sent = {}
    for family, mesh in ((plain, plain_mesh.Mesh(dp=world)), (c, Mesh(dp=world))):
        group = mesh.group("dp")
        for name in ("scatter", "gather", "broadcast", "reduce"):
            before = group.bytes_sent
            getattr(family, name)(torch.ones(n), group, root)
            sent.setdefault(name, []).append(group.bytes_sent - before)
    return sent


@pytest.mark.parametrize("world,root", [(2, 1), (3, 0), (4, 2)])
def test_a_collective_with_a_root_sends_the_formula(world, root):
    """The table on top of collectives.py, for `root` and for another rank, by root and engine."""
    n = 60 * world  # elements
    part, all_but_one = 4 * 60, 4 * 60 * (world - 1)  # bytes of a chunk, of all chunks but one
    formulas = {"scatter": (all_but_one, 0), "gather": (0, part),
                "broadcast": (2 * all_but_one, all_but_one), "reduce": (all_but_one, 4 * n)}
    for rank, sent in enumerate(pool(world, _bytes_of_rooted, world, n, root)):
        assert sent == {name: [formula[rank != root]] * 2 for name, formula in formulas.items()}


def _refused(rank, world):
    """What a collective cannot take: each call is refused on all ranks, and nothing is sent."""
    no_view = [torch.ones(1).expand(4), torch.ones(3, 2).t(), torch.ones(8)[::2]]
    for family, group in ((plain, plain_mesh.Mesh(dp=world).group("dp")), (c, _mesh_group(world))):
        calls = [getattr(family, name) for name in (
            "all_reduce", "reduce_scatter", "all_gather", "scatter", "gather", "broadcast",
            "reduce")]
        if family is c:
            calls.append(partial(c.all_reduce, async_op=True))
        for call, x in itertools.product(calls, no_view):
            with pytest.raises(ValueError, match=r"pass tensor\.contiguous\(\)$"):
                call(x, group)
        buffer = torch.zeros(2 * world + 2)
        rows = buffer[: 2 * world].split(2)
        shifted = buffer[1 : 2 * world + 1].split(2)
        fresh = torch.zeros(world, 2).unbind()
        wrong = [(rows, rows, r"outputs\[0\] shares memory"), (rows, shifted, "shares memory"),
                 (shifted, rows, "shares memory"), (rows, no_view[:1] * world, "contiguous"),
                 (no_view[:1] * world, rows, "contiguous"),
                 (rows, fresh[1:], rf"{world} inputs, .* {world} and {world - 1}$"),
                 ([*fresh, rows[0]], rows, rf"{world} outputs .* {world + 1} and {world}$")]
        if world > 1:
            wrong.append((fresh[:1] * world, rows, "another output"))
        for outputs, inputs, says in wrong:
            with pytest.raises(ValueError, match=says):
                family.all_to_all(outputs, inputs, group)
        # Not refused: tensors that lie apart in one buffer, one input for several ranks, no bytes
        family.all_to_all(rows, [buffer[-2:]] * world, group)
        family.all_to_all([buffer[:0]] * world, [buffer[1:1]] * world, group)
        assert group.bytes_sent == 8 * (world - 1)
        assert family.all_reduce(torch.ones(3, 2), group).eq(world).all()


@pytest.mark.parametrize("world", [1, 3])
def test_a_tensor_that_a_collective_cannot_take_is_refused_before_a_message(world):
    """A stride of 0 gave 8 for 4. A collective that has begun would leave its peers waiting."""
    pool(world, _refused, world)


def _plain_and_fast(rank, world, n, piece):
    g, usual = _mesh_group(world), c.PIECE
    x = torch.randn(n, generator=torch.Generator().manual_seed(rank))
    want, fast = plain.all_reduce(x.clone(), g), x.clone()
    c.PIECE = piece
    c.all_reduce(fast, g)
    c.PIECE = usual
    return torch.equal(want, fast)


@pytest.mark.parametrize("world,n,piece", [
    (2, 5, 1 << 20), (3, 1000, 64), (4, 3 << 20, 1 << 20), (6, 67, 8)])
def test_the_fast_ring_has_the_bits_of_the_plain_one(world, n, piece):
    """A chunk travels in 1, 20, 3 and 6 pieces."""
    assert pool(world, _plain_and_fast, world, n, piece) == [True] * world


def _behind_a_ring(rank, world):
    """What every other collective gives when a ring is still under way in its group."""
    g, n = _mesh_group(world), 1 << 20  # 4 MB: hundreds of messages' time
    for _ in range(3):
        big = torch.full((n,), 1.0)
        work = c.all_reduce(big, g, async_op=True)
        rows = [torch.zeros(1) for _ in range(world)]
        c.all_to_all(rows, [torch.tensor([10.0 * rank + j]) for j in range(world)], g)
        assert torch.cat(rows).tolist() == [10.0 * r + rank for r in range(world)]
        again = c.all_reduce(torch.full((n,), 1.0), g, async_op=True)
        part = c.scatter(torch.arange(float(world)), g, 1)[rank].item()
        all_of_it = c.gather(torch.full((world,), float(rank)), g, 1)
        assert part == rank and (rank != 1 or all_of_it.tolist() == [*range(world)])
        work.wait()
        again.wait()
        assert torch.equal(big, torch.full((n,), float(world)))
    return True


def test_no_collective_overtakes_earlier_work_of_its_group():
    assert pool(3, _behind_a_ring, 3) == [True] * 3


def _behind_a_ring_of_two(rank):
    g = Mesh(dp=2).group("dp")
    for _ in range(20):
        big, small = torch.ones(4 << 20), torch.full((3,), 5.0)
        works = [c.all_reduce(x, g, async_op=True) for x in (big, small)]
        works[1].wait()
        assert small.tolist() == [10.0] * 3
        works[0].wait()
        assert big.eq(2).all()


def test_an_exchange_of_two_ranks_does_not_overtake_a_ring():
    pool(2, _behind_a_ring_of_two)


def _texts_and_copies(rank, world):
    """What run/ asks of the ranks, on groups of root and engine; one rank's copy of "b" differs."""
    for mesh in (plain_mesh.Mesh(dp=world), Mesh(dp=world, in_order=IN_ORDER)):
        assert all_gather_text("x" * rank, mesh.world) == ["x" * r for r in range(world)]
        for different, usual, other in itertools.product(range(world), *[(1.0, 2.0)] * 2):
            copies = Copies()
            for name, value in (("a", usual), ("b", other if rank == different else usual)):
                tag = Tag(name, torch.Size([1]), sum_over=(mesh.group("dp"),))
                copies.add(tag, torch.tensor([value]))
            assert copies.differing(["a", "b"], mesh.world) == ["b"] * (usual != other)


def test_run_compares_copies_and_gathers_texts_on_groups_of_root_and_engine():
    """The one copy that differs may have the largest hash or the smallest, on any rank."""
    pool(3, _texts_and_copies, 3)


class SlowGroup(Group):
    """A group whose jobs start 50 ms late, but on rank 0."""

    def submit(self, job, name):
        return super().submit(lambda: (time.sleep(0.05 if self.rank else 0), job()), name)


def _plain_behind_a_job(rank, world):
    """The engine's all-reduce in the background, and at once the root's on the same group."""
    g = _mesh_group(world)
    g = SlowGroup(g.mesh, g.name, g.ranks, g.rank, g.communicator)
    submitted = torch.full((6,), rank + 1.0)
    at_once = torch.full((6,), 10.0 * (rank + 1))
    work = c.all_reduce(submitted, g, async_op=True)
    if rank == 0:
        time.sleep(0.02)  # until its job has sent a message: the other ranks' jobs sleep
    plain.all_reduce(at_once, g)
    work.wait()
    return submitted.tolist(), at_once.tolist()


def test_the_roots_collectives_wait_for_the_jobs_of_their_group():
    """The engine's do so in queued(). Without the wait, rank 1 takes the message of rank 0's job
    for one of the root's all-reduce."""
    assert pool(3, _plain_behind_a_job, 3) == [([6.0] * 6, [60.0] * 6)] * 3


@queued
def _halves(tensor, group):
    """A collective made of collectives, like every compressed all-reduce."""
    c.reduce_scatter(tensor, group)
    c.all_gather(tensor, group)


@queued
def _in_background(tensor, group):
    """The same, and it starts its parts in the background of the background."""
    c.reduce_scatter(tensor, group, async_op=True).wait()
    c.all_gather(tensor, group, async_op=True).wait()


def _nested(rank, world):
    """Sums by a collective of collectives: waited for at once; in the background; behind a job."""
    g = _mesh_group(world)
    results = []
    for collective, async_op in ((_halves, False), (_halves, True), (_in_background, True)):
        x = torch.ones(1000)
        work = collective(x, g, async_op=async_op)
        if async_op:
            time.sleep(0.2)  # the job starts before its caller waits
            work.wait()
        results.append(x.unique().tolist())
    return results


def test_a_collective_of_collectives_sums_in_the_background_too():
    """It waited for itself once: its caller went on with a tensor that was not summed."""
    assert pool(2, _nested, 2) == [[[2.0]] * 3] * 2


def test_a_work_holds_every_thread_that_waits_for_it():
    done = []
    work = Work([lambda: (time.sleep(0.5), done.append(1))])
    with ThreadPoolExecutor(4) as threads:
        for waiting in [threads.submit(lambda: (work.wait(), len(done))[1]) for _ in range(4)]:
            assert waiting.result() == 1


@pytest.mark.parametrize("kind", [Work, PlainWork], ids=["engine", "root"])
def test_a_work_waits_once(kind):
    waited = []
    work = kind([lambda: waited.append(1)])
    work.wait()
    work.wait()
    assert waited == [1]


def test_a_work_that_failed_fails_for_everybody_who_waits():
    def fail():
        raise CommunicationError("the peer has gone")

    work = Work([fail])
    for _ in range(2):
        with pytest.raises(CommunicationError, match="the peer has gone"):
            work.wait()


class LateGroup(Group):
    """A group whose messages are as late as they may be. What is received is in place only after
    wait(); what odd ranks send is read 2 ms after the call; what is submitted starts 2 ms late."""

    def exchange(self, send=None, dst=None, recv=None, src=None, combine=None):
        waits = []
        if send is not None:
            def leave():
                time.sleep(0.002 * (self.rank % 2))
                Group.exchange(self, send, dst).wait()

            self.wait_for_jobs()
            self.sender = getattr(self, "sender", None) or ThreadPoolExecutor(1, "sender")
            waits.append(self.sender.submit(leave).result)
        if recv is not None:
            landing = torch.empty_like(recv)
            work = super().exchange(recv=landing, src=src)

            def land():
                work.wait()
                (combine or torch.Tensor.copy_)(recv, landing)

            waits.append(land)
        # combine may change what this rank sends: only after it has left
        return Work(waits if combine else reversed(waits))

    def submit(self, job, name):
        return super().submit(lambda: (time.sleep(0.002), job()), name)

    def is_running_job(self):  # what a job sends, its sender posts: it must not wait for the job
        return super().is_running_job() or threading.current_thread().name.startswith("sender")


def _late_collectives(rank, world):
    g = _mesh_group(world)
    g = LateGroup(g.mesh, g.name, g.ranks, g.rank, g.communicator)
    for n, reduce in itertools.product((1, 8, 67), (
            plain.all_reduce, c.all_reduce,
            lambda x, g: c.all_reduce(x, g, async_op=True).wait())):
        every = [_values(r, n, torch.double) for r in range(world)]
        x = every[rank].clone()
        reduce(x, g)
        got = x.clone()
        x.fill_(-1)  # the other ranks must have been sent what was here before
        assert torch.equal(got, sum(every)), n


def test_messages_that_come_late_change_no_collective():
    pool(4, _late_collectives, 4)


def _late_train(rank, cfg):
    return train_with(rank, cfg, mesh_file, "Group", LateGroup)


@pytest.mark.skipif(IN_ORDER, reason="of Group only")
@pytest.mark.parametrize("flags", [
    {"dp": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "schedule": "zb-h1"},
    {"tp": 2}, {"tp": 2, "sp": True}, {"cp": 3, "block_size": 24}], ids=str)
def test_messages_that_come_late_change_nothing(corpus, flags):
    """Whoever does not wait has the numbers of before; whoever overwrites sends what came after."""
    equals_one_process(corpus, _late_train, **{"microbatches": 2, **flags})


def _mesh(rank, names, **sizes):
    """{name: ranks of this rank's group}, the same in root and engine."""
    found = []
    for mesh in (plain_mesh.Mesh(**sizes), Mesh(**sizes)):
        groups = [mesh.group(*axes.split()) for axes in names] + [mesh.ends("pp"), mesh.world]
        assert all(mesh.place(*axes.split()) == (group.rank, group.size)
                   for axes, group in zip(names, groups, strict=False))
        found.append({group.name: group.ranks for group in groups})
    assert found[0] == found[1]
    return found[0]


def test_groups_vary_one_coordinate_t_innermost():
    got = pool(8, partial(_mesh, dp=2, pp=2, tp=2), ["dp", "pp", "tp", "pp tp", "dp tp"])
    assert got[5] == {"dp": [1, 5], "pp": [5, 7], "tp": [4, 5], "pp_ends": [5, 7],
                      "pp_tp": [4, 5, 6, 7], "dp_tp": [0, 1, 4, 5], "world": [*range(8)]}
    got = pool(8, partial(_mesh, pp=2, cp=2, tp=2), ["pp", "cp", "tp", "pp tp", "cp tp"])
    assert got[5] == {"pp": [1, 5], "cp": [5, 7], "tp": [4, 5], "pp_ends": [1, 5],
                      "pp_tp": [0, 1, 4, 5], "cp_tp": [4, 5, 6, 7], "world": [*range(8)]}
    got = pool(6, partial(_mesh, dp=1, pp=3, tp=2), ["dp"])
    assert [groups["pp_ends"] for groups in got] == [[0, 4], [1, 5], [2], [3], [0, 4], [1, 5]]


def test_data_ranks_are_replicas_of_shards_shards_and_neighbours_with_experts():
    got = pool(8, partial(_mesh, dp=4, ep=2, pp=2), ["dp", "shard", "ep", "pp", "shard ep cp"])
    assert got[5] == {"dp": [0, 1, 4, 5], "shard": [1, 5], "ep": [4, 5], "pp": [5, 7],
                      "shard_ep_cp": [0, 1, 4, 5], "pp_ends": [5, 7], "world": [*range(8)]}
    got = pool(8, partial(_mesh, dp=4, shard=2, tp=2), ["dp", "rep", "shard", "shard ep cp"])
    assert got[5] == {"dp": [1, 3, 5, 7], "rep": [1, 5], "shard": [5, 7], "shard_ep_cp": [5, 7],
                      "pp_ends": [5], "world": [*range(8)]}


def _polled(rank):
    with (patch("engine.mesh.InOrderGroup", CudaGroup),
          patch.object(CudaGroup, "record_event", lambda self: Mock())):
        group = Mesh("cpu", in_order=True, timeout=HANG, dp=2).world
        x, received = torch.full((3,), rank + 1.0), torch.zeros(3)
        for _ in range(2):
            group.exchange(x, group.next, received, group.prev).wait()
        return group.read(received)


def test_a_message_that_was_waited_for_is_done():
    """The host polls every message, also those that were waited for: gloo waits for each once."""
    assert pool(2, _polled) == [[2.0] * 3, [1.0] * 3]
