"""No test can fail by another one: each finds pytest's process as the one before has found it."""

import os
import signal
import sys
import time

import pytest
import torch

import sample
import train
from data import prepare
from run import export
from tests import isolation
from tests.pool import pool
from tests.programs import leave_ctrl_c_and_errors_to_pytest
from tests.runs import command

MAINS = [sample.main, train.main, prepare.main, export.main]


@pytest.mark.parametrize("main", MAINS, ids=lambda main: f"{main.__module__}.{main.__name__}")
def test_after_a_command_ctrl_c_and_errors_are_pytests_again(main, capsys, monkeypatch):
    leave_ctrl_c_and_errors_to_pytest(main, ["command.py", "--bogus"], capsys, monkeypatch)


def test_ctrl_c_after_a_command_is_reported(tmp_path):
    """pytest says so and in which test; without isolation.py it would end without a word."""
    (tmp_path / "test_it.py").write_text(
        "import signal\n"
        "import sample\n"
        "from tests.runs import one_line\n"
        # A shell that starts pytest in the background has it ignore Ctrl-C
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def test_it(capsys, monkeypatch):\n"
        "    one_line(sample.main, ['sample.py', '--bogus'], capsys, monkeypatch)\n"
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


def _ends(rank):
    if rank == 1:
        os._exit(3)
    time.sleep(1000)


def test_a_rank_that_ends_is_named_at_once():
    begun = time.time()
    with pytest.raises(AssertionError, match=r"ranks \[1\] of 2 have ended"):
        pool(2, _ends)
    assert time.time() - begun < 300
