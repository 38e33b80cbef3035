"""The fixtures of tests/, for the tests of extras/. (The options --quick and --reversed are for
tests/ only.)"""

from tests.conftest import (  # noqa: F401
    _no_run_outlives_its_test,
    _process_stays_as_it_was,
    _stop_pool,
    corpus,
    fork,
    learnable_corpus,
    long_corpus,
    pytest_configure,
    trained,
)
