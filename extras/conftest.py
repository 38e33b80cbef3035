"""The fixtures of tests/, for the tests of extras/."""

from tests.conftest import _stop_ranks, corpus  # noqa: F401
