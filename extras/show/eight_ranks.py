"""Draws who holds what of a GPT on train.py's eight ranks: which stage, which slice of each matrix,
which chunk of AdamW's states. Eight processes make a Trainer of train.py. Drawn is what the tags of
their parameters say (shard.py), and where ZeRO-1's chunks lie.

    python -m extras.show.eight_ranks --svg docs/pictures        writes docs/pictures/ranks.svg
"""

from run.config import Parser
from run.signals import end_quietly


def eight_ranks_flags():
    parser = Parser(__doc__)
    parser.add_argument("--svg", metavar="FOLDER", required=True, help="write ranks.svg there")
    return parser


if __name__ == "__main__":
    end_quietly()
    eight_ranks_flags().parse_args()  # a wrong flag ends the process here, without torch

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.batches import Data
from extras.show.chapters import BOLD, ELSEWHERE, HELD, SMALL
from extras.show.demonstrations import demonstrate
from extras.show.draw import COLORS, Picture
from run.config import check_layout, parse
from run.files import write_new
from run.processes import all_gather_text
from train import Trainer

WORDS_OF_RUN = "--dp 2 --tp 2 --pp 2 --zero 1"
LAYOUT = {"dp": 2, "pp": 2, "tp": 2}


class HeldMatrix(NamedTuple):
    """What one rank holds of one matrix of the model."""
    name: str
    shape: list  # of the full matrix
    dim: int  # that is split
    ranges: list  # [start, stop) pieces of that dim: the rank's slice
    stepped: list  # [first, last) rows of the slice whose AdamW states the rank has; fractions


# ---- on each rank ----


def flags_of_run():
    """The Config of WORDS_OF_RUN."""
    cfg = parse(WORDS_OF_RUN.split())
    check_layout(cfg, world=1)
    return cfg


def held_matrices(mesh, vocab_size):
    """[HeldMatrix] of this rank, in the order of its layers."""
    reducer = Trainer(flags_of_run(), mesh, vocab_size).reducer
    found = []
    for chunk, tag, start in zip(reducer.weights, reducer.tags, reducer.starts, strict=True):
        if len(tag.shape) == 2:
            width = tag.slice_shape[1]
            stepped = [start / width, (start + chunk.numel()) / width]
            found.append(HeldMatrix(tag.name.removeprefix("transformer."), list(tag.shape), tag.dim,
                              list(tag.ranges), stepped))
    return found


def eight_ranks(mesh, vocab_size, file):
    """Collective: rank 0 writes the SVG into the file."""
    place = [mesh.place(axis)[0] for axis in LAYOUT]
    held = held_matrices(mesh, vocab_size)
    texts = all_gather_text(json.dumps([place, held]), mesh.world)
    if mesh.rank == 0:
        ranks = []
        for place, held in map(json.loads, texts):
            ranks.append((place, [HeldMatrix(*fields) for fields in held]))
        Path(file).write_text(ranks_svg(ranks))


# ---- the drawing ----

WEIGHTS, STEPPED = COLORS["F"], COLORS["W"]
ACROSS, DOWN = 1 / 8, 1 / 11  # pixels of an element
LEFT, TOP, BOX, TALL = 78, 60, 402, 114  # where the boxes of ranks begin; their width and height
MEANINGS = {  # {color: its meaning}
    WEIGHTS: "weights: the rank's slice of the stage's matrices",
    STEPPED: "weights whose AdamW states the rank has, and which it steps",
    "none": "on other ranks"}
NOTES = ("A block's matrices: c_attn (queries, keys, values) and c_proj; c_fc and c_proj. Rows of "
         "c_attn, c_fc and wte are split, and columns of c_proj.",
         "wte is on both stages, as embedding and as head. Not drawn: LayerNorms and biases.")


def draw_matrix(picture, x, middle, held):
    """The full matrix, dashed; what the rank has of it; what its optimizer steps. Returns the
    width."""
    height, width = held.shape[0] * DOWN, held.shape[1] * ACROSS
    top = middle - height / 2
    offset = 0  # of a range in the slice
    for start, stop in held.ranges:
        if held.dim == 0:  # rows; of those the optimizer steps some
            first = max(held.stepped[0] - offset, 0)
            last = min(held.stepped[1] - offset, stop - start)
            picture.box(x, top + start * DOWN, width, (stop - start) * DOWN, WEIGHTS)
            if first < last:
                picture.box(x, top + (start + first) * DOWN, width, (last - first) * DOWN, STEPPED)
        else:  # columns; of their rows the optimizer steps some
            first, last = held.stepped
            left, part = x + start * ACROSS, (stop - start) * ACROSS
            picture.box(left, top, part, height, WEIGHTS)
            picture.box(left, top + first * DOWN, part, (last - first) * DOWN, STEPPED)
        offset += stop - start
    picture.box(x, top, width, height, "none", ELSEWHERE)
    return width


def draw_rank(picture, x, y, rank, matrices):
    """A box with the matrices of a rank."""
    picture.box(x, y, BOX, TALL, "none", HELD + ' rx="6"')
    picture.text(x + 8, y + 17, f"rank {rank}", style=BOLD)
    at = x + 50
    before = None  # the layer of the matrix before
    for held in matrices:
        words = held.name.split(".")
        layer = f"block {words[1]}" if words[0] == "h" else words[0]
        if layer != before:
            at += 11
            picture.text(at, y + TALL - 5, layer, style=SMALL)
            before = layer
        at += 5 + draw_matrix(picture, at, y + TALL / 2 - 6, held)


def ranks_svg(ranks):
    """ranks: ((d, p, t), [HeldMatrix]) of each rank, in the order of ranks."""
    picture = Picture(f"Who holds what of a small GPT: train.py {WORDS_OF_RUN}", 900, 644)
    for rank, ((d, p, t), matrices) in enumerate(ranks):
        x = LEFT + p * (BOX + 12)
        y = TOP + (2 * d + t) * (TALL + 8) + 12 * d
        draw_rank(picture, x, y, rank, matrices)
        if (d, t) == (0, 0):
            picture.text(x + BOX / 2, TOP - 9, f"stage {p}", "middle", style=BOLD)
        if p == 0:
            picture.text(12, y + TALL / 2 - 4, f"replica {d}", style=BOLD)
            picture.text(12, y + TALL / 2 + 12, f"slice {t}", style=BOLD)
    x, y = LEFT, TOP + 4 * (TALL + 8) + 20
    for color, meaning in MEANINGS.items():
        picture.box(x, y, 12, 12, color, ELSEWHERE if color == "none" else "")
        picture.text(x + 18, y + 10, meaning, style=SMALL)
        x += 36 + 5.4 * len(meaning)
    for i, note in enumerate(NOTES):
        picture.text(LEFT, y + 34 + 18 * i, note, style=SMALL)
    return str(picture)


def main():
    parser = eight_ranks_flags()
    args = parser.parse_args()
    vocab_size = Data(flags_of_run()).vocab_size
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ranks.svg")
        demonstrate(partial(eight_ranks, vocab_size=vocab_size, file=file), **LAYOUT)
        svg = file.read_text()
    try:
        Path(args.svg).mkdir(parents=True, exist_ok=True)
        write_new("--svg", {Path(args.svg, file.name): svg})
    except (ValueError, OSError) as error:
        parser.error(error)


if __name__ == "__main__":
    main()
