"""No test can fail by another one: each finds pytest's process as the one before has found it."""

import os
import signal
import sys

import pytest
import torch

import extras.planner.__main__ as plan
import sample
import train
from data import prepare
from extras.show import draw, pictures, tables
from run import export
from tests import isolation
from tests.runs import command, one_line

MAINS = [plan.main, sample.main, train.main, prepare.main, export.main, draw.schedules_command,
         pictures.main, tables.sizes_command, tables.mesh_command]


@pytest.mark.parametrize("main", MAINS, ids=lambda main: f"{main.__module__}.{main.__name__}")
def test_after_a_command_ctrl_c_and_errors_are_pytests_again(main, capsys, monkeypatch):
    handler, hook = signal.getsignal(signal.SIGINT), sys.excepthook
    one_line(main, ["command.py", "--bogus"], capsys, monkeypatch)
    assert signal.getsignal(signal.SIGINT) is handler is not signal.SIG_DFL
    assert sys.excepthook is hook is sys.__excepthook__


def test_ctrl_c_after_a_command_is_reported(tmp_path):
    """pytest says so and in which test; without isolation.py it would end without a word."""
    (tmp_path / "test_it.py").write_text(
        "import signal\n"
        "from extras.show.draw import schedules_command\n"
        "from tests.runs import one_line\n"
        # A shell that starts pytest in the background has it ignore Ctrl-C
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def test_it(capsys, monkeypatch):\n"
        "    one_line(schedules_command, ['schedules.py', '--bogus'], capsys, monkeypatch)\n"
        "    signal.raise_signal(signal.SIGINT)\n")
    run = command("-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider",
                  tmp_path / "test_it.py")
    assert run.returncode == pytest.ExitCode.INTERRUPTED, run.stdout + run.stderr
    assert "test_it.py:7: KeyboardInterrupt" in run.stdout


def change_everything(folder):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    sys.excepthook = print
    sys.argv = ["another"]
    sys.path = [*sys.path, "another"]
    sys.stdout.reconfigure(line_buffering=not sys.stdout.line_buffering)
    os.environ["ANOTHER"] = "1"
    os.chdir(folder)
    os.umask(0o077)
    torch.set_default_dtype(torch.double)
    torch.set_num_threads(torch.get_num_threads() + 1)
    train.main = print


def test_what_a_test_leaves_changed_is_named_and_undone(tmp_path):
    before = isolation.state()
    change_everything(tmp_path)
    assert isolation.restore(before) == list(isolation.PARTS)
    assert isolation.restore(before) == [] and train.main in MAINS
