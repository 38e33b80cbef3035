"""The fixtures of tests/ that tests of extras/ use."""

from tests.conftest import _stop_pool, corpus  # noqa: F401
