"""A collective gives what its definition says, the same bits on all ranks, for the bytes in the
table of collectives.py; and a mesh puts the right ranks into a group.

Most numbers are small integers, whose sums are exact in any order: results have the same bits as
the definition's."""

from unittest.mock import Mock

import pytest
import torch

import collectives as c
from mesh import Mesh, lay_out
from test_all import ranks
from tests.harness import close, random

SIZES = (0, 1, 2, 5, 12, 67)  # none, fewer than ranks, a multiple of 1, 2, 3 and 4, an odd number
WORLDS = (1, 2, 3, 4)


def values(rank, n, dtype):
    return (torch.arange(n) * (rank + 1) % 7 + rank).to(dtype)


def check_values(rank, group, n, dtype):
    N = group.size
    every = [values(r, n, dtype) for r in range(N)]
    mine = every[rank]
    total = torch.stack(every).sum(0)
    largest = torch.stack(every).amax(0) if n else total
    chunks = [x.tensor_split(N) for x in every]
    gathered = torch.cat([chunks[r][r] for r in range(N)])

    assert torch.equal(c.all_reduce(mine.clone(), group), total)
    assert torch.equal(c.all_reduce(mine.clone(), group, c.maximum), largest)
    assert torch.equal(c.all_gather(mine.clone(), group), gathered)
    for combine, want in ((torch.Tensor.add_, total), (c.maximum, largest)):
        x = c.reduce_scatter(mine.clone(), group, combine)
        assert torch.equal(c.own_chunk(x, group), want.tensor_split(N)[rank])
    for root in range(N):
        x = c.scatter(mine.clone(), group, root).tensor_split(N)
        for r in range(N):  # chunks of other ranks are as they were
            assert torch.equal(x[r], chunks[root if r == rank else rank][r])
        assert torch.equal(c.broadcast(mine.clone(), group, root), every[root])


def every_collective(rank, group):
    """AssertionError unless each collective gives what its definition says. (test_transport.py runs
    these over other roads.)"""
    for dtype in (torch.double, torch.int64):
        for n in SIZES:
            check_values(rank, group, n, dtype)
    # A tensor of several dims is changed in place
    x = torch.full((3, 5), rank + 1)
    assert c.all_reduce(x, group) is x and x.eq(sum(range(1, group.size + 1))).all()
    # Tensors of an all-to-all differ in length: rank r sends r + j numbers, 10 r + j, to rank j
    received = [torch.zeros(r + rank) for r in range(group.size)]
    inputs = [torch.full((rank + j,), 10.0 * rank + j) for j in range(group.size)]
    c.all_to_all(received, inputs, group)
    for r in range(group.size):
        assert received[r].tolist() == [10.0 * r + rank] * (r + rank)


def _definition(rank, world, native):
    every_collective(rank, Mesh(dp=world, native=native).group("dp"))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("native", [False, True])  # True: torch's own
def test_each_collective_equals_its_definition(world, native):
    ranks(world, _definition, world, native)


def test_a_group_of_one_sends_nothing_and_needs_no_carrier():
    group = Mesh().group("dp")
    every_collective(0, group)
    assert group.carrier is None and group.bytes_sent == 0
    assert group.read(torch.arange(3)) == [0, 1, 2]


# ---- bytes and bits ----


def _traffic(rank, world, n):
    """({collective: (bytes, messages) that this rank has sent}, the sum of all ranks' noise, whose
    last bits depend on the order of additions)"""
    group = Mesh(dp=world).group("dp")
    group.exchange = Mock(wraps=group.exchange)
    x = random(n, seed=rank)
    inputs = x.clone().tensor_split(world)
    outputs = [torch.empty_like(inputs[rank]) for _ in inputs]
    sent = {}
    for name, args in (("reduce_scatter", [torch.zeros(n)]), ("all_gather", [torch.zeros(n)]),
                       ("all_reduce", [x]), ("all_to_all", [outputs, inputs])):
        group.bytes_sent = 0
        group.exchange.reset_mock()
        getattr(c, name)(*args, group)
        sent[name] = group.bytes_sent, group.exchange.call_count
    return sent, x


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("n", [5, 12, (3 << 18) + 1])  # the longest travel in pieces
def test_a_rank_sends_the_bytes_of_the_table_and_all_ranks_end_with_the_same_bits(world, n):
    """All chunks but one, in the hops of the ring. Where N divides n that is n (N-1)/N."""
    chunk = [len(part) for part in torch.arange(n).tensor_split(world)]
    found = ranks(world, _traffic, world, n)
    close(found[0][1], sum(random(n, seed=r) for r in range(world)))
    for r, (sent, total) in enumerate(found):
        assert torch.equal(total, found[0][1])
        others, others_of_next = n - chunk[r], n - chunk[(r + 1) % world]
        assert sent == {
            "reduce_scatter": (4 * others, world - 1),
            "all_gather": (4 * others_of_next, world - 1),
            # float64. Two ranks swap in one hop
            "all_reduce": (8 * (others + others_of_next), 1 if world == 2 else 2 * (world - 1)),
            "all_to_all": (8 * others, world - 1)}


# ---- what is refused ----


def _refused(rank, world):
    group = Mesh(dp=world).group("dp")
    for x in (torch.ones(1).expand(4), torch.ones(3, 2).t(), torch.ones(8)[::2]):
        for collective in (c.all_reduce, c.reduce_scatter, c.all_gather, c.broadcast):
            with pytest.raises(ValueError, match=r"with strides .*; pass tensor\.contiguous\(\)$"):
                collective(x, group)
        assert x.eq(1).all()
    assert group.bytes_sent == 0
    assert c.all_reduce(torch.ones(3, 2), group).eq(world).all()  # nobody waits for anything


@pytest.mark.parametrize("world", [1, 3])
def test_a_tensor_that_is_not_contiguous_is_refused_before_a_message(world):
    """A stride of 0 gave 8 for 4. A collective that has begun would leave its peers waiting."""
    ranks(world, _refused, world)


def _native_error(rank):
    group = Mesh(dp=2, native=True).group("dp")
    with pytest.raises(c.CommunicationError,
                       match=f"^rank {rank}: group dp, all_reduce: Invalid scalar type[^\n]*$"):
        c.all_reduce(torch.ones(2, dtype=torch.int16), group)


def test_an_error_of_a_native_collective_names_rank_group_and_collective():
    ranks(2, _native_error)


@pytest.mark.parametrize("text,line", [
    ("[/w/pair.cc:5] Connection closed. This is likely a\nbug", "Connection closed"),
    ("wait timeout after 600ms, keys: /a/b", "wait timeout after 600ms"),
    ("NCCL error in: /w/Nccl.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO), NCCL 2.2\n"
     "Last error:\nCuda failure 2 'out of memory'",
     "NCCL error, unhandled cuda error: Cuda failure 2 'out of memory'"), ("", "unknown error")])
def test_an_error_of_the_library_becomes_one_line(text, line):
    with pytest.raises(c.CommunicationError, match=f"^rank 0: {line}$"), c.naming("rank 0"):
        raise RuntimeError(text)


# ---- groups of a mesh ----


def test_ranks_of_a_group_differ_in_its_axes_with_tensor_ranks_innermost():
    """The picture of mesh.py. Data ranks are replicas of shards (rep), shards, and neighbours that
    share experts (ep)."""
    sizes = {"rep": 1, "shard": 2, "pp": 2, "ep": 1, "cp": 1, "tp": 2}
    for axes, want in {"tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
                       "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
                       "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
                       "pp tp": [[0, 1, 2, 3], [4, 5, 6, 7]],
                       "dp tp": [[0, 1, 4, 5], [2, 3, 6, 7]]}.items():
        assert lay_out(sizes, axes.split()) == want
    sizes = {"rep": 2, "shard": 2, "pp": 1, "ep": 2, "cp": 1, "tp": 1}
    for axes, want in {"rep": [[0, 4], [1, 5], [2, 6], [3, 7]],
                       "shard": [[0, 2], [1, 3], [4, 6], [5, 7]],
                       "ep": [[0, 1], [2, 3], [4, 5], [6, 7]],
                       "shard ep cp": [[0, 1, 2, 3], [4, 5, 6, 7]], "dp": [[*range(8)]]}.items():
        assert lay_out(sizes, axes.split()) == want


def _ends(rank):
    mesh = Mesh(pp=3, tp=2)
    for axis in ("pp", "tp"):
        group = mesh.group(axis)
        assert group.ranks[group.rank] == rank
        assert mesh.index_and_size(axis) == (group.rank, group.size)
    return mesh.ends("pp").ranks


def test_the_ends_of_an_axis_are_a_group_and_each_rank_between_them_is_alone():
    assert ranks(6, _ends) == [[0, 4], [1, 5], [2], [3], [0, 4], [1, 5]]
