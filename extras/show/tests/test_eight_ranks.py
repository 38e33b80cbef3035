"""The picture of eight ranks."""

from extras.show.eight_ranks import LAYOUT, eight_ranks, held_matrices
from mesh import Mesh
from tests.harness import HERE
from tests.pool import pool


def _held(rank, vocab_size, file):
    """(place, held_matrices) of this rank of the picture; rank 0 draws it into the file."""
    mesh = Mesh(**LAYOUT)
    eight_ranks(mesh, vocab_size, file)
    return ([mesh.place(axis)[0] for axis in LAYOUT],
            held_matrices(mesh, vocab_size))


def test_the_picture_of_eight_ranks_is_that_of_their_tags(tmp_path):
    """In each stage the T slices of a split matrix make the whole, and of each slice the D replicas
    step every row once."""
    ranks = pool(8, _held, 1024, tmp_path / "ranks.svg")
    assert (tmp_path / "ranks.svg").read_text() == (HERE / "docs/pictures/ranks.svg").read_text()
    parts = {}  # (stage, name) -> {(d, t): HeldMatrix}
    for (d, p, t), matrices in ranks:
        for held in matrices:
            parts.setdefault((p, held.name), {})[d, t] = held
    assert len(parts) == 1 + 1 + 4 * 4 + 1  # wte, wpe, four blocks, the head
    for (_, name), of_ranks in parts.items():
        one = of_ranks[0, 0]
        for d in (0, 1):
            ranges = {tuple(piece) for t in (0, 1) for piece in of_ranks[d, t].ranges}
            edges = sorted(edge for piece in ranges for edge in piece)
            assert (edges[0], edges[-1]) == (0, one.shape[one.dim]) and edges[1:-1:2] == edges[2::2]
            assert len(ranges) == (1 if name == "wpe.weight" else 2 * len(one.ranges))
        for t in (0, 1):
            rows = of_ranks[0, t].stepped + of_ranks[1, t].stepped
            held_rows = one.shape[0]
            if one.dim == 0:
                held_rows = sum(stop - start for start, stop in of_ranks[0, t].ranges)
            assert rows == [0, held_rows / 2, held_rows / 2, held_rows]
