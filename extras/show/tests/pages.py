"""README.md, extras/README.md and docs/ as blocks: commands, outputs, code. For test_docs.py, and
for tests that run what a page shows."""

import re
from itertools import pairwise
from typing import NamedTuple

from tests.harness import HERE

PAGES = {str(path.relative_to(HERE)): path.read_text()
         for path in [*HERE.glob("README.md"), *HERE.glob("extras/README.md"),
                      *sorted(HERE.glob("docs/*.md"))]}


class Block(NamedTuple):
    page: str
    line: int  # its number in the page
    kind: str  # "" if indented, else the word of the fence: python, diff
    lines: list
    above: str  # the paragraph above the block

    @property
    def command(self):
        """The command whose output the block shows; "" if it shows none."""
        return self.lines[0] if is_command(self.lines[0]) and "" in self.lines[1:2] else ""

    @property
    def output(self):
        return self.lines[2:] if self.command else self.lines


def is_command(line):
    return line.split()[0:1] in (["python"], ["torchrun"], ["pip"], ["git"])


def shows_output(lines, i):
    """Is an indented line a command with its output below? Another block begins there."""
    return is_command(lines[i]) and not lines[i - 1] and not lines[i + 1]


def blocks(page, text):
    """The blocks of a page, from top to bottom."""
    lines = ["", *text.splitlines(), ""]
    above = ""
    i = 1
    while i < len(lines):
        first = i
        if lines[i].startswith("```"):
            i = lines.index("```", i + 1) + 1
            yield Block(page, first, lines[first][3:], lines[first + 1 : i - 1], above)
        elif lines[i].startswith("    ") and not lines[i - 1]:
            while i < len(lines) and (lines[i].startswith("    ") or not lines[i]):
                i += 1
            cuts = [first, *(j for j in range(first + 1, i) if shows_output(lines, j)), i]
            for start, stop in pairwise(cuts):
                inside = "\n".join(line[4:] for line in lines[start:stop]).rstrip()
                yield Block(page, start, "", inside.splitlines(), above)
        elif not lines[i]:
            i += 1
        else:
            while i < len(lines) and lines[i] and not lines[i].startswith("```"):
                i += 1
            above = " ".join(lines[first:i])


BLOCKS = [block for page, text in PAGES.items() for block in blocks(page, text)]


def masked(lines, all_numbers=False):
    """The lines, with # for each number before a unit of time, or for each number."""
    unit = "" if all_numbers else r"(?= ?(ms|s|min|minutes?|seconds?|tokens/s)\b)"
    return [re.sub(r"\d([\d.,]*\d)?(e-\d+)?" + unit, "#", line.rstrip()) for line in lines]
