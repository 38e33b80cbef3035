"""The fixtures of tests/, for the tests of the rooms."""

from tests.conftest import *  # noqa: F403
