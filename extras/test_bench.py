"""extras/bench.py: a row runs, and both sides have the same losses. Times are a machine's."""

import re

from tests.harness import command


def test_a_row_is_raced_and_printed():
    done = command("-m", "extras.bench", "--only", "sequence parallel tiny")
    assert done.returncode == 0, done.stderr[-3000:]
    _, _, line = done.stdout.splitlines()
    # milliseconds of both sides, ratio, its quartiles, memory of both sides
    assert re.search(r"^sequence parallel +2 +tiny( +\d+\.\d\d){3}  \d+\.\d\d - \d+\.\d\d"
                     r"( +-?\d+){2}$", line), line
