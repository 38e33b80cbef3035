"""Fixtures of all rooms, and the option --quick.

With test_all.py two processes (workers) run tests, each a file at a time; each has its own fixtures
and its own pool. Imports stand inside of the fixtures: the process that hands the files out needs
no torch.
"""

import os
import shutil

import pytest

SLOW = ("test_faults.py", "test_checkpoint.py", "test_commands.py")
# In a test's name
LONG = ("compiled", "memory", "does_not_fit", "too_long", "flat_in_m", "two_steps_say")

# ---- options ----


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="a minute: the first case of each "
                     f"test, without {', '.join(SLOW)}")


def pytest_configure(config):
    # SCHED_BATCH: a thread that wakes another keeps its core. Eight ranks on two cores then take a
    # third less time. Every process that the tests start inherits it
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        kept, seen = [], set()
        for item in items:
            test = item.path.name, item.originalname
            slow = item.path.name in SLOW or any(word in item.name for word in LONG)
            if not slow and test not in seen:
                kept.append(item)
            seen.add(test)
        items[:] = kept


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--quick"):
        terminalreporter.write_line("--quick left out: all cases of a test but its first; "
                                    f"{', '.join(SLOW)}; tests of {', '.join(LONG)}")


# ---- fixtures ----


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test():
    yield
    from tests.runs import end_all
    end_all()


@pytest.fixture(scope="session", autouse=True)
def _stop_pool():
    yield
    from tests.pool import pool
    pool.stop()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of prepared data: 5000 random tokens to train on."""
    from tests.runs import random_corpus
    return random_corpus(tmp_path_factory.mktemp("corpus"), train=5000, val=700)


@pytest.fixture(scope="session")
def learnable_corpus(tmp_path_factory):
    """A corpus of 50 random tokens, again and again: its loss falls in a few steps."""
    from tests.runs import random_corpus
    return random_corpus(tmp_path_factory.mktemp("corpus"), period=50, train=5000, val=700)


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory):
    """A corpus for sequences of a thousand tokens."""
    from tests.runs import random_corpus
    return random_corpus(tmp_path_factory.mktemp("corpus"), train=9000, val=9000)


@pytest.fixture(scope="session")
def fork(tmp_path_factory):
    """A copy of the repository, without what commands have written into it."""
    from tests.harness import HERE
    hidden = shutil.ignore_patterns(".*", "__pycache__", "out", "stdlib", "shakespeare", "*.log")
    return shutil.copytree(HERE, tmp_path_factory.mktemp("fork") / "fork", ignore=hidden)


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4 of a small run on two ranks."""
    from tests.runs import Run, flags
    folder = tmp_path_factory.mktemp("trained")
    run = Run(2, flags(corpus, folder / "out", tp=2, save_interval=2), folder)
    assert run.wait() == [0, 0], run.read()
    return folder / "out"
