"""Fixtures, and the option --quick. With test_all.py two processes run tests, each a file at a
time; each has its own fixtures and its own ranks."""

import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="the first case of each test")


def pytest_configure(config):
    os.environ.pop("PYTHONUNBUFFERED", None)  # a command buffers its lines, as in most shells
    # SCHED_BATCH: a thread that wakes another keeps its core. Eight ranks on two cores then take a
    # third less time. Every process that the tests start inherits it
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        first = {(item.path.name, item.originalname): item for item in reversed(items)}
        items[:] = [item for item in items if item in first.values()]


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test():
    yield
    from tests.harness import started
    for process in started:
        process.kill()
        process.communicate()
    started.clear()


@pytest.fixture(scope="session", autouse=True)
def _stop_ranks():
    yield
    from test_all import ranks
    ranks.stop()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of prepared data: 5000 random tokens."""
    from test_all import write_corpus
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return str(folder)


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4 of a small run on two ranks."""
    from tests.harness import Run, flags
    folder = tmp_path_factory.mktemp("trained")
    run = Run(2, flags(corpus, folder / "out", tp=2, save_interval=2), folder)
    assert run.wait() == [0, 0], run.read()
    return folder / "out"
