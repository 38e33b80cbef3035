"""A collective gives what its formula says, the same bits on all ranks, for the bytes in the table
of collectives.py; and a mesh puts the right ranks into a group.

Numbers are small integers, which are exact in each dtype and in every order of additions, so most
results are compared bit for bit."""

import itertools
from functools import partial

import pytest
import torch

import collectives as c
from mesh import Mesh
from run.processes import all_gather_text
from tests.pool import pool

SIZES = (0, 1, 2, 5, 12, 67)  # none, fewer than ranks, a multiple of 1, 2, 3 and 4, an odd number
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64)
WORLDS = (1, 2, 3, 4)


def values(rank, n, dtype=torch.float32):
    return (torch.arange(n) * (rank + 1) % 7 + rank).to(dtype)


def noise(rank, n, dtype=torch.float32):
    """Numbers whose sum depends on the order of additions."""
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def every_collective(rank, group):
    """AssertionError unless each collective gives what its definition says. (test_transport.py runs
    these over other roads.)"""
    N = group.size
    for dtype, n in itertools.product(DTYPES, SIZES):
        every = [values(r, n, dtype) for r in range(N)]
        total = torch.stack(every).sum(0).to(dtype)
        largest = torch.stack(every).amax(0) if n else total
        chunks = [x.tensor_split(N) for x in every]
        gathered = torch.cat([chunks[r][r] for r in range(N)])

        def mine(every=every):
            return every[rank].clone()

        assert torch.equal(c.all_reduce(mine(), group), total)
        assert torch.equal(c.all_reduce(mine(), group, c.maximum), largest)
        assert torch.equal(c.all_gather(mine(), group), gathered)
        for combine, want in ((torch.Tensor.add_, total), (c.maximum, largest)):
            x = c.reduce_scatter(mine(), group, combine)
            assert torch.equal(c.own_chunk(x, group), want.tensor_split(N)[rank])
        for root in range(N):
            x = c.scatter(mine(), group, root).tensor_split(N)
            for r in range(N):  # chunks of other ranks are as they were
                assert torch.equal(x[r], chunks[root if r == rank else rank][r])
            assert torch.equal(c.gather(mine(), group, root),
                               gathered if rank == root else every[rank])
            assert torch.equal(c.broadcast(mine(), group, root), every[root])
            x = c.reduce(mine(), group, root)
            y = c.reduce(mine(), group, root, c.maximum)
            assert rank != root or (torch.equal(x, total) and torch.equal(y, largest))
        received = [torch.empty_like(each) for each in every]
        c.all_to_all(received, [every[rank] + j for j in range(N)], group)
        assert all(torch.equal(received[r], every[r] + rank) for r in range(N))


def _definition(rank, world):
    every_collective(rank, Mesh(dp=world).group("dp"))


@pytest.mark.parametrize("world", WORLDS)
def test_each_collective_equals_its_definition(world):
    pool(world, _definition, world)


def _shapes(rank):
    """A tensor of several dims is changed in place; tensors of an all-to-all differ in length."""
    group = Mesh(dp=3).group("dp")
    x = torch.full((3, 5), rank + 1.0)
    result = c.all_reduce(x, group)
    assert result is x and x.eq(6).all()
    # Rank r sends r + j + 1 elements to rank j
    received = [torch.zeros(r + rank + 1) for r in range(3)]
    c.all_to_all(received, [torch.full((rank + j + 1,), 10.0 * rank + j) for j in range(3)], group)
    for r in range(3):
        assert received[r].tolist() == [10.0 * r + rank] * (r + rank + 1)


def test_a_collective_takes_tensors_of_any_shape_and_all_to_all_of_unequal_lengths():
    pool(3, _shapes)


# ---- bytes and bits ----


def _bytes(rank, world, n):
    """{collective: (bytes, messages) that this rank has sent}; the sum that it has."""
    group = Mesh(dp=world).group("dp")
    rows = [*torch.ones(n).tensor_split(world)]
    calls = {name: partial(getattr(c, name), noise(rank, n), group)
             for name in ("reduce_scatter", "all_gather", "all_reduce")}
    # Rank j gets the j-th chunk
    calls["all_to_all"] = partial(c.all_to_all, [rows[rank].clone() for _ in rows], rows, group)
    calls |= {name: partial(getattr(c, name), torch.ones(n), group, world - 1)
              for name in ("scatter", "gather", "broadcast", "reduce")}
    exchange = group.exchange
    sent = {}
    for name, call in calls.items():
        messages = []

        def counted(send=None, dst=None, *args, messages=messages, **more):
            if send is not None:
                messages.append(dst)
            return exchange(send, dst, *args, **more)

        group.exchange = counted
        group.bytes_sent = 0
        call()
        sent[name] = group.bytes_sent, len(messages)
    return sent, calls["all_reduce"].args[0]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("n", [1, 12, 1000, 3 << 19])
def test_a_rank_sends_the_bytes_of_the_table_in_the_hops_of_the_ring(world, n):
    got = pool(world, _bytes, world, n)
    size = [4 * len(part) for part in torch.arange(n).tensor_split(world)]
    for r, (sent, _) in enumerate(got):
        # All chunks but one. Where N divides n that is n (N-1)/N bytes
        assert sent["reduce_scatter"] == (4 * n - size[r], world - 1)
        assert sent["all_gather"] == (4 * n - size[(r + 1) % world], world - 1)
        # Two ranks swap in one hop
        all_reduce = (4 * n, 1) if world == 2 else (
            8 * n - size[r] - size[(r + 1) % world], 2 * (world - 1))
        assert sent["all_reduce"] == all_reduce
        assert sent["all_to_all"] == (4 * n - size[r], world - 1)
        if n % world == 0:
            share = 4 * n * (world - 1) // world
            root = r == world - 1
            assert [sent[name][0] for name in (
                "reduce_scatter", "all_gather", "all_reduce", "all_to_all")] == [
                share, share, 2 * share, share]
            assert sent["scatter"][0] == (share if root else 0)
            assert sent["gather"][0] == (0 if root else size[r])
            assert sent["broadcast"][0] == (2 * share if root else share)
            assert sent["reduce"][0] == (share if root else share + size[r])
    assert sum(sent["all_reduce"][0] for sent, _ in got) == 2 * (world - 1) * 4 * n


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("n", [5, 1001, (3 << 19) + 1])
def test_all_ranks_end_with_the_same_bits(world, n):
    """The order of additions differs from chunk to chunk, and not from rank to rank. The sum is
    right to rounding: float32 has 7 digits."""
    got = [x for _, x in pool(world, _bytes, world, n)]
    assert all(torch.equal(x, got[0]) for x in got)
    want = sum(noise(r, n).double() for r in range(world))
    assert (got[0] - want).norm() <= 1e-6 * want.norm()


# ---- torch's own collectives ----


def _native(rank, world):
    ring = Mesh(dp=world).group("dp")
    native = Mesh(dp=world, native=True).group("dp")
    every_collective(rank, native)
    for n in (12 * world, 12 * world + 1, 0):
        x, y = noise(rank, n, torch.float64), noise(rank, n, torch.float64)
        native.bytes_sent = ring.bytes_sent = 0
        own = c.own_chunk(c.reduce_scatter(x.clone(), native), native)
        torch.testing.assert_close(own, c.own_chunk(c.reduce_scatter(y.clone(), ring), ring),
                                   rtol=1e-12, atol=1e-12)
        assert torch.equal(c.all_gather(x.clone(), native), c.all_gather(y.clone(), ring))
        # Torch's own bypass exchange(). They want chunks of one length: others take the ring
        assert native.bytes_sent == (ring.bytes_sent if n % world else 0)
        native.bytes_sent = 0
        torch.testing.assert_close(c.all_reduce(x, native), c.all_reduce(y, ring),
                                   rtol=1e-12, atol=1e-12)
        assert native.bytes_sent == 0


@pytest.mark.parametrize("world", (2, 3, 4))
def test_native_collectives_equal_the_ring(world):
    pool(world, _native, world)


def _native_error(rank):
    group = Mesh(dp=2, native=True).group("dp")
    with pytest.raises(c.CommunicationError,
                       match=f"^rank {rank}: group dp, all_reduce: Invalid scalar type[^\n]*$"):
        c.all_reduce(torch.ones(2, dtype=torch.int16), group)


def test_an_error_of_a_native_collective_names_rank_group_and_collective():
    pool(2, _native_error)


# ---- what is refused ----


def _refused(rank, world):
    """What a collective cannot take: refused on all ranks, before anything is sent."""
    group = Mesh(dp=world).group("dp")
    strange = [torch.ones(1).expand(4), torch.ones(3, 2).t(), torch.ones(8)[::2]]
    names = ("all_reduce", "reduce_scatter", "all_gather", "scatter", "gather", "broadcast",
             "reduce")
    for name, x in itertools.product(names, strange):
        before = x.clone()
        with pytest.raises(ValueError, match=r"with strides .*; pass tensor\.contiguous\(\)$"):
            getattr(c, name)(x, group)
        assert torch.equal(x, before)
    assert group.bytes_sent == 0
    assert c.all_reduce(torch.ones(3, 2), group).eq(world).all()  # nobody waits for anything


@pytest.mark.parametrize("world", [1, 3])
def test_a_tensor_with_wrong_strides_is_refused_before_a_message(world):
    """A stride of 0 gave 8 for 4. A collective that has begun would leave its peers waiting."""
    pool(world, _refused, world)


def test_a_group_of_one_sends_nothing_and_needs_no_carrier():
    group = Mesh().group("dp")
    every_collective(0, group)
    assert group.carrier is None and group.bytes_sent == 0
    assert group.read(torch.arange(3)) == [0, 1, 2]


def test_a_work_is_waited_for_once():
    waited = []
    work = c.Work(lambda: waited.append(1), "an operation")
    work.wait()
    work.wait()
    assert waited == [1]


# ---- in a model ----


def _backward(rank, world, n):
    """Each rank's gradient of sum over ranks r of (result of r * weights of r)."""
    group = Mesh(dp=world).group("dp")
    weights = [noise(10 + r, n, torch.float64) for r in range(world)]
    own = torch.arange(n).tensor_split(world)[rank]

    def sum_of_chunks(grad):  # the backward of all_gather
        mine = torch.zeros_like(grad)
        mine[own] = c.reduce_scatter(grad.clone(), group)[own]
        return mine

    x = noise(rank, n, torch.float64).requires_grad_()
    y = c.WithBackward.apply(x, lambda x: c.all_gather(x.clone(), group), sum_of_chunks)
    (y * weights[rank]).sum().backward()
    want = torch.zeros(n, dtype=torch.double)
    want[own] = sum(weights)[own]
    torch.testing.assert_close(x.grad, want, rtol=1e-12, atol=1e-12)


def test_the_backward_of_all_gather_is_reduce_scatter():
    pool(3, _backward, 3, 8)


# ---- what run/ sends, and the groups of a mesh ----


def _texts(rank, world):
    return all_gather_text("ä" * rank, Mesh(dp=world).world)


def test_texts_of_any_length_reach_all_ranks():
    assert pool(3, _texts, 3) == [["", "ä", "ää"]] * 3


def _groups(rank, names, **sizes):
    """{name: ranks of this rank's group}."""
    mesh = Mesh(**sizes)
    groups = [mesh.group(*axes.split()) for axes in names]
    for axes, group in zip(names, groups, strict=True):
        assert mesh.place(*axes.split()) == (group.rank, group.size)
        assert group.ranks[group.rank] == rank
    return {group.name: group.ranks for group in [*groups, mesh.ends("pp"), mesh.world]}


def test_groups_vary_one_coordinate_with_tensor_ranks_innermost():
    got = pool(8, partial(_groups, dp=2, pp=2, tp=2), ["dp", "pp", "tp", "pp tp", "dp tp"])
    assert got[5] == {"dp": [1, 5], "pp": [5, 7], "tp": [4, 5], "pp_ends": [5, 7],
                      "pp_tp": [4, 5, 6, 7], "dp_tp": [0, 1, 4, 5], "world": [*range(8)]}
    got = pool(8, partial(_groups, pp=2, cp=2, tp=2), ["pp", "cp", "tp", "pp tp", "cp tp"])
    assert got[5] == {"pp": [1, 5], "cp": [5, 7], "tp": [4, 5], "pp_ends": [1, 5],
                      "pp_tp": [0, 1, 4, 5], "cp_tp": [4, 5, 6, 7], "world": [*range(8)]}
    got = pool(6, partial(_groups, dp=1, pp=3, tp=2), ["dp"])
    assert [groups["pp_ends"] for groups in got] == [[0, 4], [1, 5], [2], [3], [0, 4], [1, 5]]


def test_data_ranks_are_replicas_of_shards_shards_and_neighbours_with_experts():
    got = pool(8, partial(_groups, dp=4, ep=2, pp=2), ["dp", "shard", "ep", "pp", "shard ep cp"])
    assert got[5] == {"dp": [0, 1, 4, 5], "shard": [1, 5], "ep": [4, 5], "pp": [5, 7],
                      "shard_ep_cp": [0, 1, 4, 5], "pp_ends": [5, 7], "world": [*range(8)]}
    got = pool(8, partial(_groups, dp=4, shard=2, tp=2), ["dp", "rep", "shard", "shard ep cp"])
    assert got[5] == {"dp": [1, 3, 5, 7], "rep": [1, 5], "shard": [5, 7], "shard_ep_cp": [5, 7],
                      "pp_ends": [5], "world": [*range(8)]}
