"""Fixtures that several rooms share, and --quick."""

from tests.harness import _stop_pool, corpus, long_corpus  # noqa: F401
from tests.runs import trained  # noqa: F401

SLOW = ("test_faults.py", "test_checkpoint.py", "test_commands.py", "test_planner.py")


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="under a minute: the first case of each "
                     f"test, without {', '.join(SLOW)}")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        kept, seen = [], set()
        for item in items:
            test = item.path.name, item.originalname
            if item.path.name not in SLOW and test not in seen:
                kept.append(item)
            seen.add(test)
        config.left_out = (f"--quick: {len(kept)} of {len(items)} tests. Left out: the other cases "
                           f"of these tests, and {', '.join(SLOW)}")
        items[:] = kept


def pytest_report_collectionfinish(config):
    return getattr(config, "left_out", [])
