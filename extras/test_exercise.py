"""extras/exercise.py and the page of exercises: the command that judges an exercise is green as the
repository is, and red for an empty body and for each of two wrong ones; of the other tests exactly
those that run an empty body are red.

Wrong bodies are planted into this process and its ranks, and commands run in it: of 48 fresh
processes most would import torch."""

import ast
import re
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from unittest.mock import patch

import pytest

import test_all
from extras.exercise import empty, exercises, find
from test_all import Pool, ranks
from tests.harness import HERE, command
from tests.test_planted import plant

EXERCISES = exercises()
WRONG = [  # exercise, what is wrong, a text that its functions have once, the text with the bug
    ("reduce_scatter", "nothing is added", "group.prev, combine)", "group.prev)"),
    ("reduce_scatter", "a rank completes the chunk of the next one",
     "(r - 1 - hop) % N]\n        into = chunks[(r - 2 - hop) % N]",
     "(r - hop) % N]\n        into = chunks[(r - 1 - hop) % N]"),
    ("reduce_scatter", "a hop too many", "range(N - 1)", "range(N)"),
    ("all_gather", "each hop sends the own chunk", "chunks[(r - hop) % N]", "chunks[r]"),
    ("all_gather", "the first hop sends another rank's chunk",
     "(r - hop) % N]\n        into = chunks[(r - 1 - hop) % N]",
     "(r - 1 - hop) % N]\n        into = chunks[(r - 2 - hop) % N]"),
    ("all_gather", "a received chunk is added", "group.prev)", "group.prev, torch.Tensor.add_)"),
    ("ddp", "nothing travels before backward has ended",
     "while self.queue and self.queue[0].missing == 0:", "while False:"),
    ("ddp", "gradients travel in each microbatch",
     "elif not self.every_microbatch:",
     "elif self.start_reduction(flat) or not self.every_microbatch:"),
    ("ddp", "a layer travels once more, after backward",
     "while self.queue and self.queue[0].missing == 0:\n"
     "                self.start_reduction(self.queue.pop(0))",
     "if flat.missing == 0:\n                self.start_reduction(flat)"),
    ("zero1", "nothing is summed", "reduce_scatter(flat.grads, flat.group)", "pass"),
    ("zero1", "each rank's chunk begins at 0", "first_of_chunk(flat)", "0"),
    ("zero1", "the weights' chunk for the gradients'", "own_chunk(flat.grads",
     "own_chunk(flat.weights"),
    ("zero3", "nothing is freed", "flat.weights.untyped_storage().resize_(0)", "pass"),
    ("zero3", "nothing is gathered ahead", "wanted += self.flats_in(neighbour)", "pass"),
    ("zero3", "the own chunk is not there", ".copy_(self.chunks[flat])", ""),
    ("f_and_g", "f does not sum in backward", "lambda grad: sum_in_place(grad, group)",
     "lambda grad: grad"),
    ("f_and_g", "g sums in backward, too", "lambda grad: grad)",
     "lambda grad: sum_in_place(grad.clone(), group))"),
    ("f_and_g", "g does not sum", "lambda x: sum_in_place(x, group)", "lambda x: x"),
    ("column_and_row", "a column without f", "self.f(x, self.group)", "x"),
    ("column_and_row", "a row's bias is in the sum",
     "y = self.g(partial_y, self.group)\n        return y if self.bias is None else y + self.bias",
     "return self.g(partial_y if self.bias is None else partial_y + self.bias, self.group)"),
    ("column_and_row", "a row without g", "y = self.g(partial_y, self.group)", "y = partial_y"),
    ("sequence_parallel", "gather's backward does not sum",
     "lambda grad: own_tokens_of_sum(grad, group)",
     "lambda grad: grad.chunk(group.size, 1)[group.rank]"),
    ("sequence_parallel", "ranks take tokens in turn",
     "x.unflatten(1, (group.size, -1)).movedim(1, 0)",
     "x.unflatten(1, (-1, group.size)).movedim(2, 0)"),
    ("sequence_parallel", "a rank takes the next one's tokens", "summed[group.rank]",
     "summed[group.next]"),
    ("vocabulary_loss", "softmax over a rank's own words", "(log_sum - full_log_sum).exp()", "1"),
    ("vocabulary_loss", "another rank's target is the first word", ".masked_fill(outside, 0)", ""),
    ("vocabulary_loss", "the largest of the ranks' sums", ".logsumexp(0)", ".amax(0)"),
    ("merge", "the parts are averaged", "torch.sigmoid(part_lse - lse).unsqueeze(-1)", "0.5"),
    ("merge", "exp overflows", "torch.sigmoid(part_lse - lse)",
     "(part_lse.exp() / (lse.exp() + part_lse.exp()))"),
    ("merge", "the earlier keys are forgotten", "torch.logaddexp(lse, part_lse)", "part_lse"),
    ("dispatch", "runs the rows it sent", "run_by_expert(experts, rows, to_run)",
     "run_by_expert(experts, rows, to_send)"),
    ("dispatch", "rows have no gradient", "send_rows(rows, ", "send_rows(rows.detach(), "),
    ("dispatch", "outputs go back by the counts of the way there",
     "send_rows(outputs, received, sent", "send_rows(outputs, sent, received"),
    ("1f1b", "all forwards first", '["F", "B"] * (m - num_warmup)',
     '["F"] * (m - num_warmup) + ["B"] * (m - num_warmup)'),
    ("1f1b", "a warm-up of more than m", "min(P - 1 - rank, m)", "P - 1 - rank"),
    ("1f1b", "a forward too many in the warm-up", "min(P - 1 - rank, m)", "min(P - rank, m)"),
    ("interleaved", "backward begins with the first stage", "v - 1 - i // P % v", "i // P % v"),
    ("interleaved", "the earlier stages are not in the warm-up", "(v - 1) * P", "0"),
    ("interleaved", "one microbatch at a time", '("F", i // P % v)', '("F", i % v)'),
    ("zero_bubble", "each W at once", "lag = min(rank, m)", "lag = 0"),
    ("zero_bubble", "all Ws at the end", "lag = min(rank, m)", "lag = m"),
    ("zero_bubble", "the Ws that are left are forgotten", 'entries + ["W"] * lag', "entries"),
    ("norm", "each holder counts", " @ self.shares", ".sum()"),
    ("norm", "norms are added up", "(segments, self.wide)", "(segments, self.wide).sqrt()"),
    ("norm", "a gradient that others hold is left out", "@ self.shares",
     "@ (self.shares == 1).double()"),
    ("checkpoint", "a run begins before it was asked for", "max(position, start)", "position"),
    ("checkpoint", "a row of the slice for one of the tensor", "row * width",
     "row * self.slice_shape[self.dim]"),
    ("checkpoint", "a row of elements counts as one", "(range_stop - range_start) * inner",
     "range_stop - range_start"),
]


# ---- as a learner does: in a clone, by commands ----


@pytest.fixture
def clone(tmp_path):
    """A clone of this repository. Files that are not committed are in it, too."""
    if not shutil.which("git"):
        pytest.skip("git brings the file back")
    tree = tmp_path / "clone"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "out", "stdlib")
    shutil.copytree(HERE, tree, ignore=hidden)
    for words in ("init -q", "add .", "-c user.name=n -c user.email=e commit -qm whole"):
        subprocess.run(["git", *words.split()], cwd=tree, check=True)
    return tree


def test_an_exercise_is_emptied_judged_and_brought_back(clone):
    def exercise(*words):
        return command("-m", "extras.exercise", *words, cwd=clone)

    file = clone / "schedules.py"
    whole = file.read_text()
    judge = EXERCISES["1f1b"][-1]
    said = exercise("1f1b").stdout
    (number,) = re.findall(r"schedules.py:(\d+) ", said)
    assert file.read_text().splitlines()[int(number) - 1] == "    raise NotImplementedError"
    assert judge in said
    again = exercise("1f1b")  # would lose what a learner has written
    assert again.returncode == 1 and again.stderr.count("\n") == 1 and not again.stdout
    red = command(*shlex.split(judge)[1:], cwd=clone)
    assert red.returncode == 1 and "NotImplementedError" in red.stdout
    restored = exercise("1f1b", "--restore").stdout
    assert "+    num_warmup = min(P - 1 - rank, m)" in restored
    assert file.read_text() == whole


# The quick run of the tests of techniques. (Left out are tests that read the repository's text, or
# share the checkpoint of one run: they can be red without running the function)
TESTS = [*(f"tests/test_{name}.py" for name in (
            "collectives", "experts", "layouts", "models", "optimizer", "schedules", "sequences",
            "zero")),
         "tests/test_checkpoint.py::test_any_layout_reads_any_others_checkpoint_bit_for_bit"]
# For the clone's conftest.py: writes down each test, whether it failed, and whether one of its
# processes has made the file tests/reached
WRITES_DOWN = """
def pytest_runtest_logreport(report):
    from pathlib import Path
    reached = Path(__file__).with_name("reached")
    if report.when == "call" or report.failed:
        with open("rows", "a") as rows:
            print(report.nodeid, report.failed, reached.exists(), sep="\\t", file=rows)
    reached.unlink(missing_ok=True)
"""


@pytest.mark.parametrize("name", EXERCISES)
def test_exactly_the_tests_that_run_an_empty_body_are_red(clone, name, pytestconfig):
    _, file, functions, line = EXERCISES[name]
    text = (HERE / file).read_text()
    emptied = empty(text, functions)
    for function in functions:
        before, after = find(text, function), find(emptied, function)
        assert ast.dump(before.args) == ast.dump(after.args)
        assert ast.get_docstring(before) == ast.get_docstring(after)
        raises = ast.get_source_segment(emptied, after.body[-1])
        assert raises == "raise NotImplementedError"
    reached = f"open({str(clone / 'tests/reached')!r}, 'w').close()"
    (clone / file).write_text(emptied.replace(raises, f"{reached}; {raises}"))
    with open(clone / "tests/conftest.py", "a") as conftest:
        conftest.write(WRITES_DOWN)
    tests = TESTS[:1] if pytestconfig.getoption("quick", False) else TESTS
    done = command("-m", "pytest", "-q", "--quick", *tests, cwd=clone)
    rows = [row.split("\t") for row in (clone / "rows").read_text().splitlines()]
    red = [test for test, failed, _ in rows if failed == "True"]
    assert red == [test for test, _, reached in rows if reached == "True"]
    assert done.returncode == bool(red) and len(red) < len(rows), done.stdout[-3000:]
    judged = [command(*shlex.split(one)[1:], cwd=clone) for one in line.split(" && ")]
    assert 1 in [done.returncode for done in judged]


# ---- wrong bodies ----


def run_planted(rank, file, text, function, *args):
    """One rank of a test."""
    plant(file, text)
    return function(rank, *args)


@contextmanager
def planted(file, text):
    """Meanwhile the functions of this file are those of the text, in this process and its ranks."""
    usual = Pool.__call__

    def call(self, world, function, *args):
        return usual(self, world, run_planted, file, text, function, *args)

    plant(file, text)
    try:
        with patch.object(Pool, "__call__", call):
            yield
    finally:
        ranks.stop()
        plant(file, (HERE / file).read_text())


def is_green(commands):
    """Run commands of the page, joined by &&, in this process."""
    for line in commands.split(" && "):
        _, *words = shlex.split(line)
        if words[0] == "test_all.py":
            try:
                wrong = test_all.prove(words[2])
            except Exception:  # of a rank
                return False
        else:
            wrong = pytest.main([*words[2:], "-x"])
            assert wrong in (0, 1), "no test of this name"
        if wrong:
            return False
    return True


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch):
    monkeypatch.chdir(HERE)


def test_there_are_sixteen_exercises_and_three_wrong_bodies_of_each():
    assert len(EXERCISES) == 16
    assert sorted(name for name, *_ in WRONG) == sorted([*EXERCISES] * 3)


COMMANDS = {line: (name, file) for name, (_, file, _, line) in EXERCISES.items()}


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: COMMANDS[line][0])
def test_a_command_is_green_for_the_repositorys_own_body_planted_alike(line):
    _, file = COMMANDS[line]
    with planted(file, (HERE / file).read_text()):
        assert is_green(line)


@pytest.mark.parametrize("name,what,old,new", WRONG, ids=[f"{row[0]}: {row[1]}" for row in WRONG])
def test_a_wrong_body_is_red(name, what, old, new):
    _, file, functions, line = EXERCISES[name]
    text = changed = (HERE / file).read_text()
    count = 0
    for function in functions:
        whole = ast.get_source_segment(text, find(text, function))
        changed = changed.replace(whole, whole.replace(old, new))
        count += whole.count(old)
    assert count == 1, f"{file} has changed: {old}"
    with planted(file, changed):
        assert not is_green(line), what
