"""Other trainers: the loops of docs/check-your-own-trainer.md are equal, and wrong ones are named;
names and orders of Megatron-core; wrong maps; models of another form.

The page's code, commands and tables are taken from the page."""

import importlib.util
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from run.config import check_layout, parse
from run.doctor.diagnose import check_initial_weights, diagnose
from run.doctor.dump import Tensors, read_dump
from run.doctor.words import lines
from run.files import DUMP
from run.hugging_face import CONV1D
from tests.harness import HERE, pool
from tests.runs import Run, rewrite
from tests.test_docs import BLOCKS, PAGES, masked
from tests.test_dump import LLAMA, change_json, dump_of, every_tensor

PAGE = "docs/check-your-own-trainer.md"
DUMPING, *LOOPS = ("\n".join(block.lines) for block in BLOCKS
                   if block.page == PAGE and block.kind == "python")
QUOTED = [block.output for block in BLOCKS
          if block.page == PAGE and block.command.startswith("python -m run.doctor")]
NEEDS = ["torch", "transformers"]  # of each loop


def wrong_loops():
    """[(number of the loop, a part of it, what that becomes, what the doctor says)] of the page's
    tables."""
    found = []
    for number, table in enumerate(PAGES[PAGE].split("| in the loop |")[1:]):
        for row in table.split("\n\n")[0].splitlines()[2:]:
            _, part, becomes, says, _ = (cell.strip() for cell in row.split("|"))
            found.append((number, part.strip("`"), becomes.strip("`"), says))
    return found


def _train(rank, loop, folder):
    """Run a loop of the page as one rank, in a folder that has the reference."""
    module = ModuleType("dumping")
    exec(DUMPING, module.__dict__)
    page = {"__name__": "page"}
    sys.modules["dumping"] = module
    try:
        os.chdir(folder)
        exec(loop, page)
        page["train"]("mine")
    finally:
        os.chdir(HERE)
        del sys.modules["dumping"]


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A folder with the page's reference, of a random corpus."""
    folder = tmp_path_factory.mktemp("foreign")
    command = next(line for block in BLOCKS if block.page == PAGE for line in block.lines
                   if line.startswith("python train.py --dump reference"))
    words = [*command.split()[2:], "--data", corpus, "--dump", str(folder / "reference")]
    run = Run(check_layout(parse(words), 1), words, folder)
    assert run.wait() == [0], run.read()
    return folder


def run_loop(folder, number, changes=()):
    """The Dump of a loop of the page with changes [(part, what it becomes)]."""
    if importlib.util.find_spec(NEEDS[number]) is None:
        pytest.skip(f"{NEEDS[number]} is not installed")
    loop = LOOPS[number]
    for part, becomes in changes:
        assert loop.count(part) == 1
        loop = loop.replace(part, becomes)
    shutil.rmtree(folder / "mine", ignore_errors=True)
    pool(2, _train, loop, folder)
    return read_dump(folder / "mine")


def answer(reference, mine):
    """(the lines that the doctor prints, the causes in them)."""
    findings = list(diagnose(reference, mine))
    printed = list(lines(findings))
    end = "equal" if all(equal for _, equal in printed) else "not equal"
    causes = [words for finding in findings for words in finding.causes]
    return [*(line for line, _ in printed), end], causes


def of_another_form(folder, name):
    """The dump of that name again, as if its model had a form that is not known."""
    copy = shutil.copytree(folder / name, folder / f"{name}-foreign", dirs_exist_ok=True)
    change_json(copy, model=None)
    return read_dump(copy)


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=NEEDS)
def test_a_right_loop_is_equal_and_prints_what_the_page_quotes(folder, number):
    mine = run_loop(folder, number)
    printed, causes = answer(read_dump(folder / "reference"), mine)
    assert not causes and printed == QUOTED[0]


@pytest.mark.parametrize("number,part,becomes,says", wrong_loops())
def test_a_wrong_loop_is_named_as_the_page_says(folder, number, part, becomes, says):
    mine = run_loop(folder, number, [(part, becomes)])
    printed, causes = answer(read_dump(folder / "reference"), mine)
    assert causes and all(says in words for words in causes), printed
    assert printed[-1] == "not equal"
    for quote in QUOTED[1:]:
        if any(says in line for line in quote):
            assert masked(printed, all_numbers=True) == masked(quote, all_numbers=True)


def test_the_page_has_three_wrong_loops_of_each_and_quotes_one():
    numbers = [number for number, *_ in wrong_loops()]
    assert all(numbers.count(number) >= 3 for number in range(len(LOOPS)))
    assert any(says in line for *_, says in wrong_loops() for line in QUOTED[1])
