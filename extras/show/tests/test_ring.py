"""The ring's demonstration, and the all-reduces that it is compared with."""

import contextlib
import io
import re

import pytest
import torch

from extras.show import ring
from mesh import Mesh
from tests.pool import pool


def _sums(rank, world):
    group = Mesh(dp=world).group("dp")
    every = [torch.arange(8) * (r + 1) % 7 + r for r in range(world)]
    for reduce in (ring.sequential_all_reduce, ring.parameter_server_all_reduce):
        assert torch.equal(reduce(every[rank].clone(), group), sum(every)), reduce


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_all_reduces_beside_the_ring_equal_the_definition(world):
    pool(world, _sums, world)


def _shown(rank, world):
    """What the ring's demonstration prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        ring.demo(Mesh(dp=world))
    return shown.getvalue()


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_demonstration_of_the_ring_sends_what_its_formulas_say(world):
    lines = pool(world, _shown, world)[0].splitlines()
    figures = [re.findall(r"sent +(\d+) bytes, formula +(\d+)", line) for line in lines[-5:]]
    assert all(sent == formula for ((sent, formula),) in figures)
    assert lines[0].startswith("a number is a chunk")
    assert lines[-6] == f"with a tensor of {840 * world} bytes:"
    hops = lines[1:-6]  # in the end every chunk has the terms of all ranks
    assert len(hops) == 1 + 2 * (world - 1) and hops[-1].count("1" * world) == world**2


def test_the_terms_of_64_ranks_are_told_apart():
    terms = torch.ones(64, dtype=torch.long) << torch.arange(64)
    assert ring.in_bits(terms).split() == [f"{1 << rank:064b}" for rank in range(64)]
    assert ring.in_bits(terms.sum().expand(64)).split() == ["1" * 64] * 64
