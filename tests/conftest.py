"""Fixtures that several rooms share, and --quick."""

import os

from tests.pool import _stop_pool  # noqa: F401
from tests.runs import _start_what_waits, corpus, long_corpus, trained  # noqa: F401

SLOW = ("test_faults.py", "test_checkpoint.py", "test_commands.py", "test_planner.py",
        "test_accidents.py", "test_lab.py")
LONG = ("compiled", "memory", "does_not_fit", "too_long", "flat_in_m")  # in a test's name


def pytest_configure(config):
    if hasattr(os, "SCHED_BATCH"):  # of all processes: a thread that wakes another one goes on.
        # Eight ranks on two cores take a third less time
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    config.addinivalue_line("markers", "waits: runs beside the other tests")


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="a minute: the first case of each "
                     f"test, without {', '.join(SLOW)}")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        kept, seen = [], set()
        for item in items:
            test = item.path.name, item.originalname
            slow = item.path.name in SLOW or any(word in item.name for word in LONG)
            if not slow and test not in seen:
                kept.append(item)
            seen.add(test)
        config.left_out = (f"--quick: {len(kept)} of {len(items)} tests. Left out: the other cases "
                           f"of these tests, {', '.join(SLOW)}, "
                           f"and tests of {', '.join(LONG)}")
        items[:] = kept
    items.sort(key=lambda item: item.get_closest_marker("waits") is not None)


def pytest_report_collectionfinish(config):
    return getattr(config, "left_out", [])
