"""Bugs are planted and taken back (planted.py); each of bugs.py changes numbers in its layouts."""

import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import model
import schedules
import train
from collectives import WithBackward
from data import batches
from engine import ddp, zero
from engine import optimizer as engine_optimizer
from engine.sequence_parallel import Region
from extras.doctor.dump import read_dump
from extras.doctor.tests import bugs
from extras.exercises.planted import CannotPlant, changed_text, class_of, planted
from group import CommunicationError, naming
from run.config import check
from shard import Tag
from tests.harness import FULL, config
from tests.pool import pool

# ---- planting ----


def _seen(rank, changes, ask):
    """What ask() returns before the changes, with them, and after they are taken back."""
    before = ask()
    with planted(*changes):
        during = ask()
    return before, during, ask()


def _subclass():
    """A method of DDP, by its subclass ZeRO-1, in another module."""
    reducer = SimpleNamespace(launch_rest=lambda: None)
    zero.ZeRO1.end_backward(reducer)
    return reducer.in_backward


def _imported():
    """A function, by the name under which engine/optimizer.py imported it."""
    return round(engine_optimizer.clip_coefficient(torch.tensor(2.0), 1.0).item(), 5)


def _property():
    return Tag("w", torch.Size([1]), shared_by=(SimpleNamespace(size=3),)).num_sharing


def _nested():
    """A function that a function returns."""
    region = Region(group=None)
    return region.start(lambda *args, **more: None, torch.zeros(1), async_op=False)().item()


def _static():
    """The forward of an autograd.Function."""
    return WithBackward.apply(torch.ones(1), lambda x: 2 * x, None).item()


def _constants():
    return model.ABSENT, batches.ABSENT, ddp.DDP.every_microbatch, zero.ZeRO1.every_microbatch


def _generator():
    """A context manager."""
    with pytest.raises(CommunicationError) as error, naming("sending"):
        raise RuntimeError("closed")
    return str(error.value)


def _cached():
    return schedules.splits_backward("1f1b")


@pytest.mark.parametrize("ask,before,during,changes", [
    (_subclass, False, None, [("engine/ddp.py", "self.in_backward = self.is_expected = False\n"
                               "        self.launch_rest", "self.in_backward = None\n"
                               "        self.launch_rest")]),
    (_imported, 0.5, 2.0, [("optimizer.py", "(grad_clip / (norm + 1e-6))", "(norm / grad_clip)"),
                           ("optimizer.py", ".clamp(max=1.0)", "")]),
    (_property, 3, 1, [("shard.py", "group.size for group in self.shared_by)",
                        "1 for group in self.shared_by)")]),
    (_nested, 0.0, 1.0, [("engine/sequence_parallel.py", "            return tensor\n",
                          "            return tensor + 1\n")]),
    (_static, 2.0, 1.0, [("collectives.py", "return forward(x)", "return x.clone()")]),
    (_constants, (-100, -100, False, False), (-2, -2, True, True), [
        ("model.py", "ABSENT = -100", "ABSENT = -2"),
        ("engine/ddp.py", "every_microbatch = False", "every_microbatch = True")]),
    (_generator, "sending: closed", "asleep: closed",
     [("group.py", 'f"{what}: {reason_in', 'f"asleep: {reason_in')]),
    (_cached, False, True, [("schedules.py", 'any(action[0] == "W"', 'any(action[0] == "B"')]),
], ids=["subclass", "imported", "property", "nested", "static", "constants", "generator", "cached"])
def test_a_change_is_planted_seen_and_gone(ask, before, during, changes):
    assert pool(1, _seen, changes, ask) == [(before, during, before)]


@pytest.mark.parametrize("changes,says", [
    ([("optimizer.py", "no such line", "")], "contains 'no such line' 0 times"),
    ([("optimizer.py", "import", "")], "contains 'import' "),
    ([("optimizer.py", "# the same tensor, if", "# the tensor, if")], "nothing but comments"),
    ([("engine/ddp.py", "    unsaved = \"\"\n", "    one = 1\n    unsaved = \"\"\n")], "is added"),
    ([("group.py", "@contextmanager\n", "")], "cannot swap"),
    ([("model.py", "seed=0,", "seed=1,")], "cannot swap"),
    ([("shard.py", "dim: int = 0", "dim: int = 1")], "cannot swap"),
    # and what was planted before the refused one is taken back
    ([("shard.py", "group.size for group", "1 for group"), ("optimizer.py", "import", "")],
     "contains 'import' "),
], ids=str)
def test_what_cannot_be_planted_is_refused(changes, says):
    assert _property() == 3
    with pytest.raises(CannotPlant, match=re.escape(says)), planted(*changes):
        pass
    assert _property() == 3


def test_a_class_is_found_that_a_decorator_has_replaced_by_a_subclass():
    """Like a fork may do with train.py's Trainer; in that fork, too."""
    usual = class_of(train.Trainer, "Trainer")
    before = usual.step.__code__
    bug = next(bug for bug in bugs.BUGS if bug.name == "the norm is not the root of the sum of "
               "squares")
    with patch.object(train, "Trainer", type("Subclass", (usual,), {})):
        with planted(*bug.changes):
            assert usual.step.__code__ is not before
        assert usual.step.__code__ is before


# ---- the table ----


def test_each_row_has_a_name_of_its_own_a_stage_and_two_layouts_that_can_be(corpus):
    assert len({bug.name for bug in bugs.BUGS}) == len(bugs.BUGS)
    for bug in bugs.BUGS:
        assert bug.stage in bugs.STAGES and len({*bug.layouts}) == 2
        assert all(check(config(corpus, **bugs.flags_of(layout)), 1) <= 8
                   for layout in bug.layouts)


def test_each_mutants_layouts_can_be(corpus):
    for mutant in bugs.MUTANTS:
        assert all(check(config(corpus, **bugs.flags_of(layout)), 1) <= 8
                   for layout in mutant.layouts)


def test_each_rows_changes_have_their_places():
    for bug in bugs.BUGS:
        changes = {}  # file -> [(old, new)]
        for file, old, new in bug.setting + bug.changes:
            changes.setdefault(file, []).append((old, new))
        for file, pairs in changes.items():
            changed_text(file, pairs)  # CannotPlant, if a file has not one such place


def test_there_are_90_right_runs_that_can_be(corpus):
    assert len(bugs.RIGHT_RUNS) >= 90
    for flags in bugs.RIGHT_RUNS:
        assert check(config(corpus, **flags), 1) <= 8


def numbers(folder):
    """{(what, step, which stage shows it): a tensor} of all numbers in a dump, in the order in
    which a run goes through them."""
    dump = read_dump(folder)
    found = {(name, 0, "initial values"): value for name, value in dump.weights(0).items()}
    for number, step in enumerate(dump.steps, 1):
        # (D, m, B, S): the same order in each layout
        found["ids", number, "data"] = dump.ids(number).double().flatten()
        found["targets", number, "data"] = dump.targets(number).double().flatten()
        found["loss", number, "loss"] = torch.tensor(step["loss"], dtype=torch.double)
        for name, value in dump.gradients(number).items():
            found[name, number, "gradients"] = value
        found["norm", number, "norm"] = torch.tensor(step["norm"], dtype=torch.double)
        for name, value in dump.weights(number).items():
            found[name, number, "update"] = value
    return found


def numbers_that_differ(got, want):
    """Keys of numbers(), in a run's order."""
    assert got.keys() == want.keys()
    # A gradient that is zero in exact arithmetic is compared absolutely; nan is off, too. With too
    # many sequences the tokens have another shape
    return [what for what, value in want.items() if got[what].shape != value.shape
            or not (got[what] - value).norm() <= 1e-9 * max(value.norm(), 1e-3)]


@pytest.fixture(scope="module")
def right(corpus, tmp_path_factory):
    """A function that returns the numbers of one process; each run is made once."""
    known = {}

    def numbers_of(bug, layout):
        key = bug.setting, tuple(sorted(bugs.alone(layout).items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("right") / "dump"
            known[key] = numbers(bugs.reference_of(corpus, bug, layout, "float64", folder))
        return known[key]

    return numbers_of


SAMPLE = bugs.BUGS if FULL else bugs.BUGS[::5]
CASES = [(bug, layout) for bug in SAMPLE for layout in bug.layouts[: 2 if FULL else 1]]


@pytest.mark.parametrize("bug,layout", CASES, ids=[f"{bug.name}-{layout}" for bug, layout in CASES])
def test_a_planted_bug_changes_numbers(corpus, right, tmp_path, bug, layout):
    """Against one process, and first those of its stage."""
    got = numbers(bugs.dump_of(corpus, bug, layout, "float64", tmp_path / "dump"))
    off = numbers_that_differ(got, right(bug, layout))
    assert off and off[0][2] == bug.stage, off[:3]
