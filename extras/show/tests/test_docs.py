"""What README.md and docs/ quote is what the commands print today; patches apply; figures of time
stand in docs/measured.md only; every folder of extras/ has its row, every mutant its place.

All that is so for this repository as it stands. A fork that adds a schedule, a flag or a file makes
some of it untrue, and deletes this file. Where README.md has another title, this file is skipped.

A block of a page is indented by four or fenced. These are compared, whatever page they stand on:

    a command, an empty line, lines     "python -m FOLDER ..." or "torchrun FILE ..."; "| grep WORD"
                                        keeps the lines with the word. The lines stand so in the
                                        output, without a gap. Below a paragraph that says
                                        "shortened" there may be gaps, and lines may be cut
    ```python, then an indented block   the code prints the block
    ```diff                             git applies it, at the lines that it names

Every other block is commands only, or is in OTHERWISE, with the reason. One thing is masked, on
both sides: numbers before a unit of time. LONG names the commands that are not run, or only with
FULL=1, and what of their output is compared instead."""

import ast
import importlib
import io
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tokenize
from contextlib import redirect_stdout
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest

import extras.bench.race as bench
import extras.planner.__main__ as plan
import mesh as mesh_file
from data.batches import Data
from engine.mesh import Mesh
from extras.bench.job import SIZES
from extras.forks import large_batches_curves as large_batches
from extras.planner import measure
from extras.planner.hardware import DEVICES
from extras.planner.published import RUNS
from extras.planner.tests.test_planner import _sent
from extras.show import demonstrations
from extras.show.tests.pages import BLOCKS, PAGES, blocks, is_command, masked
from extras.show.tests.test_lab import KNOWN
from run.config import Config, check_layout, parse
from schedules import SCHEDULES
from tests import mutants
from tests.harness import HERE, config, equals_one_process, needs_minutes
from tests.isolation import as_it_was
from tests.pool import HANG, pool
from tests.runs import Run, apply, flags, needs_git, start

if not (HERE / "README.md").read_text().startswith("# nanoParallel\n"):
    pytest.skip("for nanoParallel's own pages; README.md is another's", allow_module_level=True)

MEASURED = "docs/measured.md"
YOUR_OWN = "docs/test-your-own.md"
# The standard library of Python 3.11.7: the corpus that the pages' losses are of. Another release
# has another one, and other losses
CORPUS = "5ec998c1926dbc78358a4e7c3a2fc86f3c7a17aab67f990d3140431d11534f1b"

WIDTH = "120"  # columns of a terminal: pages quote what is printed without one, too

LONG = {  # {command: what is compared}
    "python train.py": "600 steps: with FULL=1; else what its last line says of the corpus",
    "python -m extras.forks.large_batches_curves --out large-batches --svg large-batches":
        "19 trainings: what the program prints, given the results on the page",
    "python -m tests.counts": "test_each_change_is_counted_as_the_page_says: four of its rows",
    "python -m extras.planner --measure": "figures of the machine: which flags are printed",
    "python -m extras.exercises break --svg docs/pictures/wrong-lines.svg":
        "test_wrong_lines.py runs two steps of each row; with FULL=1 all, and the picture",
    "python -m extras.doctor reference mine": "test_foreign.py runs the page's loops, and compares",
    "python test_all.py --page": "rounding errors; test_all.py itself holds them to 1e-10"}
OTHERWISE = {  # {page: {how a block begins: why no command prints it, or which test has it}}
    "README.md": {"row                        n": "test_readme_has_rows_of_the_bench"},
    "docs/gpus-and-nodes.md": {"#!/bin/bash": "a script for SLURM",
                               "    --master-addr": "its end, for another model",
                               "rank 0        ": "a picture"},
    "docs/measured.md": {
        "     S                N = 1": "times, rearranged by hand",
        "ms           without": "test_what_gpt2_should_reach_is_the_pages_arithmetic"},
    "docs/memory.md": dict.fromkeys(("def accumulate", "class Recomputed"),
                                    "test_the_chapters_forms_of_accumulation_and_recompute"),
    "docs/pipelines.md": {"bubble = (P-1) / (m + P-1)": "a formula"},
    "docs/runs-that-survive.md": {
        "out/step-00000600/model": "test_a_checkpoint_has_the_files_that_are_listed",
        "step    105  saved out": "test_a_signal_prints_the_lines_that_are_quoted",
        "train.py: rank 0: group pp_ends, receive from rank 1, send to rank 1: Timed":
            "test_dead_ranks_print_the_lines_that_are_quoted",
        "train.py: rank 0: group pp_ends, receive from rank 1, send to rank 1: Read":
            "test_dead_ranks_print_the_lines_that_are_quoted"},
    "docs/tensor-parallelism.md": {"without    row -> all-reduce": "a picture"}}
CODE = {  # {how code on a page begins, if no output follows: what it is}
    "grad = take_gradient(param)": "an excerpt of ddp.py",
    "num_warmup = min(P - 1 - rank, m)": "an excerpt of schedules.py",
    "parts = choose(cfg)": "the skeleton of train.py",
    "# yours.py": "run by test_your_own.py",
    "groups = [{": "run by test_your_own.py",
    "square = sum(": "run by test_your_own.py",
    "# tests/adapters.py": "run by test_your_own.py",
    '"""Write two steps of a training loop': "run by test_foreign.py, as are both loops",
    '"""Two steps of FSDP2': "run by test_foreign.py",
    '"""Two steps of transformers': "run by test_foreign.py",
    '"""A schedule of my own': "tests/test_eager.py",
    '"""A collective of my own': "tests/test_doubling.py"}

# ---- the blocks of a page (extras/show/tests/pages.py) ----

QUOTES = [block for block in BLOCKS if block.command]
# Code, and the output below it
PRINTS = [(code, below) for code, below in pairwise(BLOCKS)
          if code.kind == "python" and not below.kind and not is_command(below.lines[0])
          and (below.page, below.line) == (code.page, code.line + len(code.lines) + 3)]


def begins(block, starts):
    """Which of these strings the block begins with; None if with no one."""
    return next((words for words in starts if block.lines[0].startswith(words)), None)


def block_of(page, words):
    (found,) = (b for b in BLOCKS if b.page == page and b.lines[0].startswith(words))
    return found


def test_a_page_is_read_as_its_blocks():
    page = """Text, shortened:

    python -m extras.show sizes

    one
      two

    torchrun train.py

    three

And
```python
print(1)
```

    1

Then

    python a.py   # why
    torchrun b.py
"""
    quote, other, code, printed, commands = blocks("page", page)
    lines = ["python -m extras.show sizes", "", "one", "  two"]
    assert quote == ("page", 3, "", lines, "Text, shortened:")
    assert quote.command == "python -m extras.show sizes" and quote.output == ["one", "  two"]
    assert other == ("page", 8, "", ["torchrun train.py", "", "three"], "Text, shortened:")
    assert code == ("page", 13, "python", ["print(1)"], "And") and not code.command
    assert printed.line == 17 and printed.output == ["1"] and not printed.command
    assert commands.lines == ["python a.py   # why", "torchrun b.py"] and not commands.command


def test_every_block_is_compared_or_says_why_not():
    used = set()
    printed = [below for _, below in PRINTS]
    for block in BLOCKS:
        named = begins(block, OTHERWISE.get(block.page, {}))
        used.add((block.page, named))
        compared = block.kind == "diff" or block.command or block in printed
        if block.kind == "python":
            compared = any(block is code for code, _ in PRINTS) or begins(block, CODE)
        only_commands = all(map(is_command, filter(None, block.lines)))
        assert compared or named or only_commands, (block.page, block.line, block.lines[0])
    assert used >= {(page, words) for page, starts in OTHERWISE.items() for words in starts}
    assert {block.command for block in QUOTES} >= LONG.keys()
    assert all(any(begins(block, [words]) for block in BLOCKS) for words in CODE)


# ---- what a command prints ----


def lacking(quote, output, shortened=False):
    """The first line of the quote that the output lacks; None if it has them all."""
    if shortened:
        rest = iter(output)
        return next((line for line in filter(None, quote)
                     if not any(printed.startswith(line) for printed in rest)), None)
    places = [i for i, line in enumerate(output) if line == quote[0]]
    if not places:
        return quote[0]
    found = max((output[i : i + len(quote)] for i in places),
                key=lambda lines: sum(map(str.__eq__, lines, quote)))
    found += [None] * (len(quote) - len(found))
    return next((line for line, other in zip(quote, found, strict=True) if line != other), None)


def test_a_line_that_is_not_printed_is_found():
    output = ["a 12 ms", "b", "x", "b", "c d", "e"]
    assert lacking(["b", "c d"], output) is None
    assert lacking(["b", "e"], output) == "e"  # a gap
    assert lacking(["b", "c"], output) == "c"  # cut
    assert lacking(["e", "f"], output) == "f" and lacking(["f"], output) == "f"
    assert lacking(["b", "", "c"], output, shortened=True) is None
    assert lacking(["c d", "x"], output, shortened=True) == "x"  # in another order
    assert lacking(masked(["a 7 ms"]), masked(output)) is None
    assert masked(["step 5  1,234 tokens/s 0.5 s left"]) == ["step 5  # tokens/s # s left"]
    assert masked(["--a 1.4e-06, rank 3."], all_numbers=True) == ["--a #, rank #."]


def agree(block, output):
    quote, output = masked(block.output), masked(output)
    line = lacking(quote, output, "shortened" in block.above)
    assert line is None, (f"{block.page}:{block.line}: {block.command} does not print\n"
                          f"{line}\nbut\n" + "\n".join(output))


def _printed(rank, fn, make_mesh, sizes):
    """What this rank prints in fn(mesh)."""
    with redirect_stdout(io.StringIO()) as out:
        fn(make_mesh(**sizes))
    return out.getvalue()


@pytest.fixture
def printed(capsys, monkeypatch, tmp_path):
    """A function: the lines that a command prints. No process is started that imports torch:
    training runs in forked ranks, python -m FOLDER in this process, its demonstrations in the
    pool."""
    def train(words):
        run = Run(check_layout(parse(words), 1), [*words, "--out", tmp_path / "out"], tmp_path)
        assert not any(run.wait(seconds=6 * HANG)), run.read()
        return run.read("stdout")

    def demonstrate(fn, make_mesh=mesh_file.Mesh, **sizes):
        # ep divides the data ranks, it adds none
        ranks = math.prod(sizes.values()) // sizes.get("ep", 1)
        print(*pool(ranks, _printed, fn, make_mesh, sizes), sep="", end="")

    def run_folder(folder, words):
        monkeypatch.setattr(demonstrations, "demonstrate", demonstrate)
        monkeypatch.setattr(sys, "argv", [f"{folder}/__main__.py", *words])
        monkeypatch.setenv("COLUMNS", WIDTH)
        capsys.readouterr()
        with as_it_was():
            importlib.import_module(f"{folder}.__main__").main()
        return capsys.readouterr().out

    def lines(line):
        line, _, word = line.partition(" | grep ")
        _, *words = shlex.split(line, comments=True)
        if words[0] == "train.py":
            text = train(words[1:])
        else:
            _, folder, *words = words  # -m ROOM
            text = run_folder(folder, words)
        return [line for line in text.splitlines() if word in line]

    return lines


@cache
def losses_are_those_of_the_pages():
    return Data(Config()).meta["source_hash"] == CORPUS


def needs_the_corpus():
    if not losses_are_those_of_the_pages():
        pytest.skip("losses on the pages are of the standard library of Python 3.11.7")


USUAL = {}  # {command: its quotes}: one run for all of them
for quote in QUOTES:
    if quote.command not in LONG and " eager " not in quote.command:  # eager: the patch, below
        USUAL.setdefault(quote.command, []).append(quote)


@pytest.mark.parametrize("line", USUAL)
def test_a_command_prints_what_the_pages_quote(line, printed):
    if "train.py" in line:
        needs_the_corpus()
    output = printed(line)
    for block in USUAL[line]:
        agree(block, output)


@pytest.mark.parametrize("code,below", PRINTS, ids=[code.page for code, _ in PRINTS])
def test_code_on_a_page_prints_what_stands_below(code, below):
    with redirect_stdout(io.StringIO()) as out:
        exec("\n".join(code.lines), {})
    assert out.getvalue().splitlines() == below.lines


@pytest.mark.parametrize("words,file", [
    (words, what.split()[-1]) for words, what in CODE.items() if what.startswith("an excerpt")])
def test_an_excerpt_stands_in_its_file(words, file):
    """... without comments, which pages leave out or write anew."""
    (block,) = (block for block in BLOCKS if begins(block, [words]))

    def code(text):
        return [line.strip() for line in re.sub(r"#.*", "", text).splitlines() if line.strip()]

    assert lacking(code("\n".join(block.lines)), code((HERE / file).read_text())) is None


# ---- of long commands what does not take long ----


@needs_minutes
def test_600_steps_print_what_readme_quotes(printed):
    needs_the_corpus()
    agree(next(b for b in QUOTES if b.command == "python train.py"), printed("python train.py"))


def test_readmes_last_validation_is_of_todays_corpus_and_default_steps():
    needs_the_corpus()
    (line,) = (line for block in BLOCKS for line in block.lines if "(gzip -9: " in line)
    meta = Data(Config()).meta
    step, nats, bits, gzip = re.fullmatch(
        r"step +(\d+)  validation loss ([\d.]+) nats per token, ([\d.]+) bits per byte "
        r"\(gzip -9: ([\d.]+)\)", line).groups()
    assert int(step) == Config().steps and gzip == f"{meta['gzip_bits_per_byte']:.4f}"
    assert abs(float(nats) / math.log(2) / meta["bytes_per_token"] - float(bits)) < 1e-4


def test_the_experiment_prints_the_pages_table_from_the_pages_results(capsys, monkeypatch,
                                                                      tmp_path):
    """The four lines of the noise scale are not looked at."""
    block = next(block for block in QUOTES if "large_batches" in block.command)
    end = block.output.index("gradient noise scale, AdamW root, batch 128:")
    results = {row[:-24].strip(): row[-24:].split() for row in block.output[2:end]}
    assert results.keys() == large_batches.RULES.keys()

    def train_once(rule, batch, out):
        bits = float(results[rule][large_batches.BATCHES.index(batch)])
        return [{"step": 0, "loss": 1.0}, {"val_bits_per_byte": bits}]

    monkeypatch.setattr(large_batches, "train_once", train_once)
    monkeypatch.setattr(large_batches, "demonstrate", lambda *args, **more: None)
    monkeypatch.setattr(sys, "argv", ["large_batches.py", "--out", str(tmp_path)])
    large_batches.main()
    assert lacking(block.output[: end + 1], capsys.readouterr().out.splitlines()) is None
    assert all(re.fullmatch(r"  steps +\d+ to +\d+: +\d+ sequences, +[\d,]+ tokens", line)
               for line in block.output[end + 1 :])


def _measure(rank):
    kept = measure.seconds
    measure.seconds = lambda mesh, work, times=1: 1e-3
    try:
        return measure.measure(Mesh(dp=2))
    finally:
        measure.seconds = kept


def test_measure_prints_the_flags_that_are_quoted(capsys, monkeypatch):
    command = "python -m extras.planner --measure"
    first, line = next(b.output for b in QUOTES if b.command == command)
    assert re.findall(r"--(\S+) [\d.e-]+", line) == list(pool(2, _measure)[0])
    monkeypatch.setattr(measure, "launch", lambda n: 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(SystemExit):
        measure.main()
    assert capsys.readouterr().out == first + "\n"


def test_a_checkpoint_has_the_files_that_are_listed(trained):
    first, *others = block_of("docs/runs-that-survive.md", "out/step-").lines
    names = [Path(first.split()[0]).name, *(line.split()[0] for line in others)]
    assert sorted(names) == sorted(path.name for path in (trained / "step-00000004").iterdir())
    assert re.fullmatch(r"out/step-\d{8}/model.safetensors", first.split()[0])


def test_a_signal_prints_the_lines_that_are_quoted(corpus, tmp_path):
    quote = block_of("docs/runs-that-survive.md", "step    105  saved").lines
    run = Run(1, flags(corpus, tmp_path / "out", steps=10**6), tmp_path)
    run.until(lambda: "step      1" in run.read("stdout"))
    run.signal(0, signal.SIGTERM)
    assert run.wait() == [0], run.read()
    last = run.read("stdout").replace(str(tmp_path / "out"), "out").splitlines()[-2:]
    squeezed = [[re.sub(" +", " ", line) for line in masked(lines, all_numbers=True)]
                for lines in (quote, last)]
    assert squeezed[0] == squeezed[1]


def form(lines):
    """Lines of ranks that give up. All numbers are masked, and what depends on the moment: the
    group, its operation, and the library's words."""
    return [re.sub(r"group \w+, ((?:send to|receive from) rank #(?:, )?)+: .*", "group ...", line)
            for line in masked(lines, all_numbers=True)]


DEAD = "train.py: rank 0: group pp_ends, receive from rank 1, send to rank 1: "


@pytest.mark.parametrize("number,says,timeout", [
    pytest.param(signal.SIGSTOP, "Timed", 5, marks=needs_minutes),  # 5 s: on a quiet machine
    (signal.SIGKILL, "Read", HANG // 2)])
def test_dead_ranks_print_the_lines_that_are_quoted(corpus, tmp_path, number, says, timeout):
    run = start("train.py", *flags(corpus, tmp_path / "out", dp=2, pp=2, steps=10**6,
                                   timeout=timeout))
    for line in run.stdout:
        if line.startswith("step      2"):
            break
    ranks = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout
    (one,) = (pid for pid in map(int, ranks.split())
              if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(one, number)
    _, said = run.communicate(timeout=HANG)
    assert run.returncode == 1
    quote = block_of("docs/runs-that-survive.md", DEAD + says).lines
    assert form(said.splitlines()) == form(quote)


# ---- patches ----

PATCHES = [block for block in BLOCKS if block.kind == "diff"]


@needs_git
@pytest.mark.parametrize("where,patch", [
    *((block.page, "\n".join([*block.lines, ""])) for block in PATCHES),
    *((path.name, path.read_text()) for path in sorted(HERE.glob("extras/forks/*.patch")))])
def test_every_patch_applies_at_the_lines_that_it_names(where, patch, fork):
    reply = apply(patch, fork, "--check")
    assert "offset" not in reply and "fuzz" not in reply, (
        f"{reply}\nfor a file of extras/forks/: git apply, git diff '*.py' > FILE, "
        "git checkout '*.py'")


@pytest.fixture
def patched(fork, tmp_path):
    """A copy of the repository with the patch of test-your-own.md; a function that runs python in
    it, and returns what it prints."""
    tree = shutil.copytree(fork, tmp_path / "fork")
    (patch,) = (patch for patch in PATCHES if patch.page == YOUR_OWN)
    apply("\n".join([*patch.lines, ""]), tree)

    def python(*args):
        run = subprocess.run([sys.executable, *args], cwd=tree, capture_output=True, text=True,
                             env={**os.environ, "COLUMNS": WIDTH})
        return run.stdout + run.stderr

    return tree, python


@needs_git
def test_the_patched_schedule_is_drawn_as_the_page_quotes(patched):
    _, python = patched
    quote = block_of(YOUR_OWN, "python -m extras.show schedules eager")
    agree(quote, python(*quote.command.split()[1:]).splitlines())
    slow = python(*"-m extras.show schedules 4 8 --compare --costs 1,1,1,1".split())
    makespan = {line.split()[0]: line.split()[2] for line in slow.splitlines()}
    assert said(YOUR_OWN, r"--costs 1,1,1,1` [^`]* makespan of (\d+) for `eager` and of (\d+) for "
                "`1f1b`") == (makespan["eager"], makespan["1f1b"])


@needs_git
@needs_minutes
def test_the_pages_tests_pass_on_the_patched_tree(patched):
    """... and all tests that --quick runs."""
    tree, python = patched
    for block in BLOCKS:
        file = CODE.get(begins(block, CODE), "")
        if file.startswith("tests/"):
            (tree / file).write_text("\n".join([*block.lines, ""]))
    printed = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_eager.py",
                     "tests/test_doubling.py")
    assert re.search(r"^\d+ passed", printed, re.MULTILINE), printed[-3000:]
    printed = python("test_all.py", "--quick", "-p", "no:cacheprovider")
    assert re.search(r"^\d+ passed", printed, re.MULTILINE), printed[-3000:]


def _of_the_page(rank, *args, source, name):
    """A function that a page defines, on a rank."""
    page = {"__name__": "page"}
    exec(source, page)
    return page[name](rank, *args)


def test_the_pages_collective_passes_its_tests(corpus):
    """They need no patch, so they run here, on the pool."""
    source = "\n".join(next(b for b in BLOCKS if begins(b, ['"""A collective of my own'])).lines)
    page = {"__name__": "page"}
    exec(source, page)

    def there(fn):
        return partial(_of_the_page, source=source, name=fn.__name__)

    page["pool"] = lambda world, fn, *args: pool(world, there(fn), *args)
    page["equals_one_process"] = lambda corpus, fn, **layout: equals_one_process(
        corpus, there(fn), **layout)
    counted = page["test_doubling_gives_the_rings_sum_and_sends_the_formula"]
    _, cases = counted.pytestmark[0].args
    for world, n in cases:
        counted(world, n)
    page["test_the_root_on_doubling_equals_one_process"](corpus)
    page["test_the_engine_on_doubling_equals_one_process"](corpus)


# ---- figures on pages that commands print ----


def said(page, sentence):
    """The groups of a regular expression on a page, whose lines may break anywhere."""
    return re.search(sentence, " ".join(PAGES[page].split())).groups()


def tables_of_commands(page):
    """[(title, figures in bold, commands)] of a page's table rows that name commands."""
    for line in PAGES[page].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        commands = re.findall(r"`(python -m [^`]+)`", cells[-1]) if cells else []
        if commands:
            figures = [each for cell in cells for each in re.findall(r"\*\*(.+?)\*\*", cell)]
            yield cells[0], figures, [each.replace("\\|", "|") for each in commands]


CHECKED = {  # {page: the fewest rows}
    "docs/from-1-to-1024-gpus.md": 9, "docs/numbers-checked.md": 20}


@pytest.mark.parametrize("page,title,figures,commands", [
    pytest.param(page, *row, id=f"{Path(page).stem}: {row[0][:40]}")
    for page in CHECKED for row in tables_of_commands(page)])
def test_the_commands_of_a_row_print_its_figures(page, title, figures, commands, printed):
    output = " ".join(" ".join(printed(command)) for command in commands)
    assert figures, f"{page}: {title}: no figure in bold"
    for figure in figures:
        assert has(output, figure), f"{page}: {title}: {figure} is not in\n{output}"


def has(output, figure):
    """Is the figure in the output, as a number of its own and not a part of another?"""
    return re.search(rf"(?<![\w.]){re.escape(figure)}(?![\w%]|\.\d)", output)


def test_a_figure_is_not_found_as_a_part_of_another():
    output = "8  24.5 *  124.25  27.27%  [4, 3]  dp 3.931  (-0.5)"
    assert all(has(output, figure) for figure in ("8", "24.5", "124.25", "27.27%", "[4, 3]"))
    assert not any(has(output, figure) for figure in (
        "24", "4.5", "24.25", "27.27", "7.27%", "3.93", "931", "24.50"))


RECIPE = "docs/from-1-to-1024-gpus.md"


@pytest.mark.parametrize("line", [
    pytest.param(line, id=line.rsplit("planner ", 1)[1][:40])
    for line in PAGES[RECIPE].splitlines() if "% | `python -m extras.planner" in line])
def test_the_recipes_shares_are_the_first_rows(line):
    """Computing with the optimizer's step, exposed messages, bubble."""
    *_, computing, messages, bubble, command, _ = (cell.strip() for cell in line.split("|"))
    *_, (first, *_) = plan.searched(plan.flags().parse_args(command.strip("`").split()[3:]))
    seconds = dict(first["time_s"])
    shares = (seconds.pop("compute") + seconds.pop("optimizer"), seconds.pop("bubble"),
              sum(seconds.values()))
    assert [f"{share / first['step_s']:.0%}" for share in shares] == [computing, bubble, messages]


def test_mfus_of_published_runs_are_those_that_the_recipe_names():
    found = [run.mfu for run in RUNS if run.device.startswith("a100") and run.layout.ranks >= 128]
    low, _, high = statistics.quantiles(found, n=4)
    assert said(RECIPE, r"an MFU of (\d+) to (\d+)%") == (f"{100 * low:.0f}", f"{100 * high:.0f}")


def test_links_are_the_planners():
    """The table of docs/costs.md: each way, half of NVLink's data sheet, an eighth of the bits."""
    rows = re.findall(r"\| (.+?) \| (?:GPUs of a node|nodes) \| (\d+) (GB|Gb)/s \| ([\d.]+) \|",
                      PAGES["docs/costs.md"])
    v100, a100, h100 = (DEVICES[name] for name in ("v100", "a100-80", "h100"))
    assert [float(each_way) for *_, each_way in rows] == [
        v100.nvlink, a100.nvlink, h100.nvlink, v100.network, a100.network, h100.network]
    for _, sheet, unit, each_way in rows:
        assert float(sheet) / (2 if unit == "GB" else 8) == float(each_way)


def test_rows_with_commands_are_found():
    for page, fewest in CHECKED.items():
        found = list(tables_of_commands(page))
        rows = [line for line in PAGES[page].splitlines()
                if line.startswith("| ") and "`python -m" in line]
        assert len(found) == len(rows) >= fewest, page


def test_bubbles_on_slow_links_are_those_that_pipelines_names(printed):
    compared = printed("python -m extras.show schedules 4 8 --compare --costs 1,1,1,0.5")
    bubble = {line.split()[0]: re.search(r"bubble +(\S+)", line)[1] for line in compared
              if "  bubble " in line}
    assert said("docs/pipelines.md", r"`--costs 1,1,1,0.5`\) zb-v has a bubble of (\S+) again, "
                r"like zb-h1, and 1f1b (\S+)\. ") == (bubble["zb-v"], bubble["1f1b"])
    assert bubble["zb-h1"] == bubble["zb-v"]


def test_the_losses_that_pipelines_names_are_readmes():
    """Each of the six schedules has them, as any layout has: test_layouts.py."""
    quote = next(block for block in QUOTES if block.command.startswith("python train.py --steps 3"))
    losses = [re.search(r"loss (\S+)", line)[1] for line in quote.output]
    assert list(said("docs/pipelines.md", r"prints the losses (\S+), (\S+), (\S+) under each of "
                     "the six names")) == losses


def test_published_txt_is_what_plan_py_prints(printed):
    """... and what the pages say of its last lines."""
    lines = printed("python -m extras.planner --published")
    assert lines == (HERE / "docs/measured/published.txt").read_text().splitlines()
    found = {}
    begin = next(i for i, line in enumerate(lines) if line.startswith("fitted: "))
    for line in lines[begin:]:
        status, figures = line.split(": ", 1)
        found[status] = re.fullmatch(
            r"(\d+) rows of (\d+) sources, median error (\S+), (\d+) within 15%, largest (\S+); "
            r"baseline (\S+)", figures).groups()
    shown = {"third hold-out": "held out third", "known publishers": "known publisher",
             "20 more, chosen by a reader": "held out fourth",
             "ten more, other programs and years": "held out fifth", "54 more": "held out sixth",
             "23 more, six models": "held out seventh"}
    kinds = [name for name in found if name not in shown.values()]  # fitted, all held out, kinds
    for name, status in (shown | dict(zip(kinds, kinds, strict=True))).items():
        rows, _, error, near, largest, baseline = found[status]
        assert f"| {name} | {rows} | {error} | {near} | {largest} | {baseline} |" in (
            PAGES["docs/which-layout.md"])
    fitted, rest, known = (found[name] for name in ("fitted", "all held out", "known publisher"))
    assert said(MEASURED, r"is missed: (\S+) on the (\d+) rows that were held out, half of them "
                r"within 15% \((\d+) of \d+\), one constant MFU for each kind of GPU at "
                r"(\S+%)") == (rest[2], rest[0], rest[3], rest[5])
    assert said(MEASURED, r"Other runs of known publishers: (\S+) \((\d+) rows\)") == (
        known[2], known[0])
    rows, sources = (int(fitted[i]) + int(rest[i]) for i in (0, 1))
    assert said(MEASURED, r"predicts (\d+) published runs of (\d+) sources") == (
        str(rows), str(sources))
    plain, by_all = re.search(r"median error (\S+); .* by all others (\S+)",
                              lines[begin - 1]).groups()
    assert said("docs/which-layout.md", r"by all other runs of a program (\S+) are left of (\S+), "
                "but one run") == (by_all, plain)
    assert said("docs/which-layout.md", r"fitted on (\d+) published runs of (\d+) sources; (\d+) "
                r"runs of (\d+) other") == (*fitted[:2], *rest[:2])


def near(words, value):
    """Is a figure on a page, such as "12.7 s" or "70%", this value, rounded as far?"""
    number = words.rstrip(" s%")
    digits = len(number.partition(".")[2])
    return number == f"{value:.{digits}f}"


def published_jobs():
    """[(command, its row of the table)] of docs/which-layout.md."""
    page = "docs/which-layout.md"
    jobs = block_of(page, "python -m extras.planner --model megatron-39b").lines
    table = PAGES[page].split("| published run |")[1].split("\n\n")[0].splitlines()[2:]
    return list(zip(jobs, table, strict=True))


@pytest.mark.parametrize("job,row", [
    pytest.param(job, row, id=row.split(",")[0]) for job, row in published_jobs()])
def test_a_published_job_is_planned_as_the_table_says(job, row):
    args = plan.flags().parse_args(job.split()[3:])
    *_, layouts = plan.searched(args)
    seconds = [layout["step_s"] for layout in layouts]
    _, _, _, predicted, fastest, slower, within, _ = (cell.strip() for cell in row.split("|"))
    excess = seconds[0] / seconds[-1] - 1
    assert near(predicted, seconds[0]) and near(fastest, seconds[-1]), seconds
    assert near(slower, 100 * excess), excess
    assert within.split(":")[0] == ("yes" if excess <= plan.BAND else "no")


@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallelism_sends_what_costs_md_says(corpus, sp):
    """The two rows of its table and the notes below, in elements, from all ranks."""
    T, m = 4, 3
    cfg = config(corpus, tp=T, sp=sp, microbatches=m)
    L, B, S, C = cfg.n_layer, cfg.batch_size // m, cfg.block_size, cfg.n_embd
    all_reduce = 2 * (T - 1) / T
    halves = 2 * (4 * L + 2) + (2 * L if sp else 0)  # of all-reduces, for a microbatch
    activations = halves * (T - 1) / T * B * S * C
    loss = (T - 1) * B * S + all_reduce
    replicated = all_reduce * (6 * C * L + 2 * C + S * C) if sp else 0
    sent = sum(got["tp"] for got in pool(T, _sent, cfg)) / 8
    assert sent == T * (m * (activations + loss) + replicated)


# ---- figures of time: measured.md, and what it says of its tables ----

ROW = re.compile(r"(\S.*?) +(\d)  (\S.*?) +([\d.]+) +([\d.]+) +([\d.]+)(?:  ([\d.]+) - ([\d.]+)"
                 r"(  +[\d.]+)? +\S+ +\S+ +[\d.]+)?")
BENCH = {}  # {(row, ranks, size): the match of ROW}
for line in (HERE / "docs/measured/bench.txt").read_text().splitlines()[2:]:
    found = ROW.fullmatch(line)
    BENCH[found.group(1, 2, 3)] = found


def test_readme_has_rows_of_the_bench():
    _, *rows = block_of("README.md", "row ").lines
    found = [ROW.fullmatch(row).group(1, 2, 3, 4, 5, 6) for row in rows]
    assert found == [BENCH[figures[:3]].group(1, 2, 3, 4, 5, 6) for figures in found]
    assert len(found) >= 8


def test_measured_md_counts_the_goals_that_are_met():
    ratios = [(float(row[6]), float(row[9])) for row in BENCH.values() if row[9]]
    met = sum(ratio >= goal for ratio, goal in ratios)
    assert said(MEASURED, r"Of (\d+) goals (\d+) are met") == (str(len(ratios)), str(met))


def test_each_trick_of_the_bench_has_its_row_in_measured_md():
    """... with the ratios of bench.txt, where bench.txt has the row; a ratio is in parentheses if
    its quartiles lie on both sides of 1."""
    table = PAGES[MEASURED].split("| trick |")[1].split("\n\n")[0].splitlines()[2:]
    rows = {(row.name, str(row.n), row.size if row.size in SIZES else f"{row.size} KB")
            for row in bench.ROWS if row.name.endswith(", without")}
    names = []
    wrong = []  # as they should be
    for line in table:
        _, _, _, name, ratios, _, _ = (cell.strip() for cell in line.split("|"))
        names.append(f"{name}, without")
        for words in ratios.split(", "):
            figure, size, n = re.fullmatch(r"(\(?\d\.\d\d\)?) at (.+) on (\d)", words).groups()
            row = names[-1], n, size
            assert row in rows, words
            if row in BENCH:
                ratio, low, high = BENCH[row].group(6, 7, 8)
                want = f"({ratio})" if float(low) <= 1 <= float(high) else ratio
                if figure != want:
                    wrong.append(f"{name}: {want} at {size} on {n}")
    assert not wrong
    assert sorted(names) == sorted({name for name, _, _ in rows})


NUMBER = r"\d[\d.,]*"
RANGE = rf"{NUMBER}(?: to {NUMBER}| and {NUMBER})?"
TIME = re.compile(
    rf"\b(?:{RANGE} (?:ms|us|microseconds?|s|seconds?|min|minutes?|hours?)\b|(?:half )?an hour"
    rf"|{RANGE} times (?:as (?:fast|long|slow)|faster|slower"
    r"|(?:the|its|this \w+) (?:\w+ )?(?:speed|time))"
    rf"|{RANGE}%? (?:faster|slower|off the step)"
    rf"|{RANGE}%? of (?:a step\b|the step\b|(?:the|its|\w+'s) (?:speed|time)))")
NOT_MEASURED = {  # {file: (figures of time that are not measured, why)}
    "docs/from-1-to-1024-gpus.md": (["80% of a step"], "a rule of thumb"),
    "docs/numbers-checked.md": (["3% of the time", "34 times as fast"],
                                "what circulates, and a prediction"),
    "docs/gpus-and-nodes.md": (["5 to 10 us"], "reasoned, and the page says so"),
    "docs/runs-that-survive.md": (["5 seconds", "600 seconds", "2 to 3 seconds"],
                                  "--timeout, and the constants of run/processes.py"),
    "docs/which-layout.md": (
        ["28% slower", "23% faster", "3.6 times as slow", "1.6 times as fast", "12.7 s", "7.5 s",
         "71.0 s", "44.0 s", "96.5 s", "61.4 s", "37.4 s", "37.4 s", "6.3 s", "5.9 s", "0.42 s",
         "0.42 s"], "predictions; published speeds next to them"),
    "run/launch.py": (["30 s"], "a constant of torchrun"),
    "run/processes.py": (["2 s", "3 s"], "constants of this file")}


def prose(path):
    """The text of a page without its blocks, or the docstrings and comments of a Python file."""
    source = path.read_text()
    if path.suffix == ".md":
        inside = {i for block in blocks("", source)
                  for i in range(block.line, block.line + len(block.lines) + 2 * bool(block.kind))}
        words = [line for i, line in enumerate(source.splitlines(), 1) if i not in inside]
        return " ".join(" ".join(words).split())
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    words = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    words += [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source))
              if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return " ".join(" ".join(words).split())


def test_figures_of_time_stand_in_measured_md_only():
    """README has a few of them, too. Code outside of tests/ has none."""
    files = [HERE / page for page in PAGES if page != MEASURED]
    files += [path for path in HERE.rglob("*.py") if "tests" not in path.relative_to(HERE).parts
              and not any(part.startswith(".") for part in path.relative_to(HERE).parts)]
    for path in files:
        name = str(path.relative_to(HERE))
        figures = TIME.findall(prose(path))
        if name == "README.md":
            assert figures and all(figure in PAGES[MEASURED] for figure in figures), figures
        else:
            assert figures == NOT_MEASURED.get(name, ([],))[0], name


# ---- names that pages give ----


def test_links_lead_to_files_and_headings():
    for page, text in PAGES.items():
        text = re.sub(r"```.*?```", "", text, flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith("http"):
                file, _, heading = target.partition("#")
                path = (HERE / page).parent / file if file else HERE / page
                assert path.exists(), (page, target)
                if heading:
                    titles = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
                    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
                               for title in titles]
                    assert heading in anchors, (page, target)


TESTS = [*HERE.glob("tests/test_*.py"), *HERE.glob("extras/**/test_*.py")]


def test_tests_rooms_and_rows_that_pages_name_exist():
    tests = "".join(path.read_text() for path in TESTS)
    names = {path.stem for path in TESTS}
    for page, text in PAGES.items():
        for name in re.findall(r"`(test_\w+)`", text):
            assert f"def {name}(" in tests or name in names, (page, name)
        for name in re.findall(r'"([^"\n.]+, (?:to|without)[^"\n]*)"', text):
            assert any(row.name.startswith(name) for row in bench.ROWS), (page, name)


# ---- files, schedules, mutants ----


def test_every_folder_of_extras_has_its_row():
    rows = re.findall(r"^\| \[(\w+)\]\(", (HERE / "extras/README.md").read_text(), re.MULTILINE)
    folders = {path.parent.name for path in HERE.glob("extras/*/__init__.py")} - {"tests"}
    assert rows == sorted(folders)


def layouts_and_bugs(fork):
    """How many of each a fork's tests have."""
    tests = vars(importlib.import_module(f"extras.forks.tests.test_{fork}"))
    layouts = [mark.args[1] for test in tests.values() for mark in getattr(test, "pytestmark", [])
               if mark.args[0] in ("flags", "layout")]
    if "LAYOUTS" in tests:  # the tests train some layouts of this table
        layouts = [tests["LAYOUTS"]]
    return [str(len(cases)) for cases in (*layouts, tests["BUGS"])]


def test_the_gallery_lists_every_fork_with_its_lines_layouts_and_bugs():
    rows = re.findall(r"\(\.\./extras/forks/(\w+)\.py\) \| [^|]* \| (\d+) \| ([^|]+) \| (\d+) "
                      r"\| (\d+) \| (\d+) \|", PAGES[YOUR_OWN])
    folder = HERE / "extras/forks"
    assert {name for name, *_ in rows} == {path.stem for path in folder.glob("*.py")
                                           if (folder / f"tests/test_{path.name}").exists()}
    for name, lines, added, tests, *counts in rows:
        assert counts == layouts_and_bugs(name), name
        patch = HERE / f"extras/forks/{name}.patch"
        plus = re.findall(r"^\+[^+]", patch.read_text() if patch.exists() else "", re.MULTILINE)
        found = [len((HERE / path).read_text().splitlines())
                 for path in (f"extras/forks/{name}.py", f"extras/forks/tests/test_{name}.py")]
        assert [lines, added, tests] == [str(found[0]), str(len(plus) or "no patch"),
                                         str(found[1])], name


def test_lab_html_has_every_schedule():
    assert list(SCHEDULES) == KNOWN


def test_each_mutant_changes_one_place_and_names_a_test():
    """mutants.py takes more than an hour. Here is only seen that its table is not out of date."""
    for file, rows in mutants.MUTANTS.items():
        for old, new, tests in rows:
            assert mutants.mutant(file, old, new) != (HERE / file).read_text()
            name, expression = tests.split(":")
            assert expression and mutants.test_file(name)


def test_there_are_as_many_mutants_as_pages_say():
    count = sum(map(len, mutants.MUTANTS.values()))
    numbers = re.findall(r"more than (\d+) (?:wrong changes|mutations)", "".join(PAGES.values()))
    assert len(numbers) == 2 and len(set(numbers)) == 1 and int(numbers[0]) < count
