"""python -m extras.exercises break: docs/what-a-loss-curve-hides.md says what its wrong lines
do."""

import re
import subprocess
import sys
import tempfile

import pytest
import torch

from extras.exercises import break_it
from extras.exercises.break_it import train_changed, write_zen
from extras.exercises.wrong_lines import WRONG_LINES
from tests.harness import HERE, close, needs_minutes
from tests.pool import HANG, pool

COMMAND = "    python -m extras.exercises break --svg docs/pictures/wrong-lines.svg\n\n"
PAGE = (HERE / "docs/what-a-loss-curve-hides.md").read_text()
PICTURE = (HERE / "docs/pictures/wrong-lines.svg").read_text()
RANKS = 4  # ranks of the pool share the rows


def quoted():
    """The lines that the page quotes of the command."""
    block = re.match(r"(    .*\n|\n)*", PAGE[PAGE.index(COMMAND) + len(COMMAND):])[0]
    return [line.removeprefix("    ") for line in block.rstrip().splitlines()]


def _examine(rank, folder):
    return [break_it.examine(folder, line, steps=2) for line in WRONG_LINES[rank::RANKS]]


def test_the_page_says_of_each_wrong_line_what_two_steps_say():
    """Its loss and gradients of step 1, and the doctor's words."""
    with tempfile.TemporaryDirectory() as folder:
        write_zen(folder)
        parts = pool(RANKS, _examine, folder)
    rows = [parts[i % RANKS][i // RANKS] for i in range(len(WRONG_LINES))]
    lines = quoted()
    right = float(re.search(r"loss of step 1 is ([\d.]+)\.", PAGE)[1])
    for number, row in enumerate(rows, 1):
        begin = f"{number:2}  {row.line.name:50}{break_it.first_cell(row, right):9}"
        (line,) = (line for line in lines if line.startswith(begin))
        assert line.endswith(break_it.gradients_cell(row))
        assert row.says, "the doctor names none"
    assert list(break_it.diffs(rows)) == lines[-len(list(break_it.diffs(rows))):]


def _right(rank, folder, line):
    """Losses and weights of a row's layout without its wrong line, and of one process."""
    runs = [train_changed(folder, line.layout, steps=2),
            train_changed(folder, break_it.flags_of_right(line), steps=2)]
    return [(losses, {**dump.weights(2)}) for losses, dump in runs]


@pytest.mark.parametrize("line", [line for line in WRONG_LINES if {"sp", "cp"} & {*line.layout}],
                         ids=lambda line: line.name)
def test_a_layout_is_right_without_the_wrong_line(line):
    """As threads, with another rank's tokens in the same process."""
    with tempfile.TemporaryDirectory() as folder:
        write_zen(folder)
        ((got, weights), (want, right)), = pool(1, _right, folder, line)
    close(got, want, "losses")
    for name, tensor in right.items():
        close(weights[name], tensor, name)


def test_a_curve_shows_what_is_apart_some_steps_in_a_row():
    """With two right runs that are 0.1 apart, by hand: a mean of 10 steps that has k steps of
    0.26 in it is off by 0.026 k, more than 0.1 from k = 4 on."""
    right = [3.0] * 40
    rights = [right, [loss + 0.1 for loss in right]]
    assert break_it.shown_from(right, rights) is None
    for change, shown in ((0.05, None), (0.26, 24), (-0.26, 24)):
        assert break_it.shown_from(right[:20] + [3 + change] * 20, rights) == shown
    # Two steps that cancel in the mean are apart for three steps
    blip = right[:20] + [5, 3, 3, 1] + right[24:]
    assert break_it.shown_from(blip, rights) is None


def test_the_picture_is_that_of_the_pages_table():
    """Each wrong line has a panel, and a bar where the table says that the curve shows it."""
    lines = quoted()
    for number, line in enumerate(WRONG_LINES, 1):
        row = next(row for row in lines if row.startswith(f"{number:2}  {line.name}"))
        shown = re.search(r"  (step \d+|never)  ", row)[1]
        panel = PICTURE.split(f">{number}  ")[1].split('font-size="11.5"')[0]
        assert (f">{shown}<" in panel) == (shown != "never")
        assert panel.replace("&#x27;", "'").startswith(line.name)


def test_the_page_counts_what_the_table_has():
    said = re.search(r"A curve shows (\d+) of the (\d+). The gradients of step 1 show (\d+). The "
                     r"doctor, .*, names (\d+).", PAGE)
    counts = re.search(r"Of (\d+) wrong lines \d+ have the right loss of step 1, (\d+) are never "
                       r"shown by a curve, and (\d+) .* names (\d+).", " ".join(quoted()))
    rows, never, equal, named = map(int, counts.groups())
    assert [*map(int, said.groups())] == [rows - never, rows, rows - equal, named]


def test_copies_that_differ_are_named_and_the_first_one_counts():
    class Tag:
        name, shape, dim, ranges = "w", torch.Size((2,)), 0, ((0, 2),)

        def slice(self, full):
            return full

        def place(self, part, full):
            full.copy_(part)

    full, differ = break_it.put_together([[(Tag(), torch.zeros(2))], [(Tag(), torch.ones(2))]])
    assert full["w"].tolist() == [0, 0] and differ == ["w"]


@needs_minutes
def test_the_command_prints_the_page_and_draws_its_picture(tmp_path):
    file = tmp_path / "x.svg"
    run = subprocess.run([sys.executable, "-m", "extras.exercises", "break", "--svg", file],
                         cwd=HERE,
                         text=True, capture_output=True, timeout=HANG)
    assert run.stdout.splitlines() == quoted() and run.stderr == ""
    assert file.read_text() == PICTURE
