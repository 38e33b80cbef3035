"""Fixtures that several rooms share."""

from tests.harness import _stop_pool, corpus, long_corpus  # noqa: F401
from tests.runs import trained  # noqa: F401
