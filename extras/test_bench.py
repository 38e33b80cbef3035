"""extras/bench.py: each row runs, and both sides have the same losses. Times are a machine's."""

import re
import subprocess
import sys

from extras.bench import ROWS
from tests.harness import HERE


def test_every_row_is_raced_and_printed():
    done = subprocess.run([sys.executable, "-m", "extras.bench", "--quick"], cwd=HERE,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    _, _, *lines = done.stdout.splitlines()
    wanted = sorted((row.name, row.n) for row in ROWS)
    assert sorted((line[:24].strip(), int(line[24:26])) for line in lines) == wanted
    for line in lines:  # milliseconds of both sides, ratio, its quartiles, memory of both sides
        assert re.search(r"( +\d+\.\d\d){3}  \d+\.\d\d - \d+\.\d\d( +-?\d+){2}$", line), line
