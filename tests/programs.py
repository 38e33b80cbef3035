"""What every program does: with a wrong flag, with a file that is not ours, and that it leaves
pytest's process as it was. The tests of each folder call these checks with its programs.
"""

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.harness import HERE
from tests.pool import HANG
from tests.runs import one_line


def run_all(commands, **more):
    """Run these command lines, two at a time. Returns {command line: its CompletedProcess}."""
    def run(line):
        return subprocess.run([sys.executable, *line.split()], text=True, cwd=HERE, timeout=HANG,
                              stdin=subprocess.DEVNULL, **more)

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(commands, threads.map(run, commands), strict=True))


def refuse_an_unknown_flag_before_torch(programs):
    """AssertionError unless the line about --bogus comes before torch is imported."""
    done = run_all([f"-X importtime {program} --bogus" for program in programs],
                   capture_output=True)
    for line, run in done.items():
        imported = re.findall(r"^import time:.*\| +(\S+)$", run.stderr, re.MULTILINE)
        said = [text for text in run.stderr.splitlines() if not text.startswith("import time:")]
        assert run.returncode == 2 and len(said) == 1 and not run.stdout, (line, said, run.stdout)
        assert "argparse" in imported and "torch" not in imported, line


def tree(folder):
    """{path: content} of all files in a folder, and None for each folder in it."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refuse_to_write_over(names, main, line, says, folder, capsys, monkeypatch):
    """AssertionError unless the command says so in one line, and all files stay. names: files that
    are not ours, in the folder in which the command runs."""
    monkeypatch.chdir(folder)
    for name in names:
        Path(name).write_text("three years of work\n" * 100)
    before = tree(folder)
    said = one_line(main, line.split(), capsys, monkeypatch)
    assert says in said and "[Errno" not in said and tree(folder) == before


def leave_ctrl_c_and_errors_to_pytest(main, argv, capsys, monkeypatch):
    handler, hook = signal.getsignal(signal.SIGINT), sys.excepthook
    one_line(main, argv, capsys, monkeypatch)
    assert signal.getsignal(signal.SIGINT) is handler is not signal.SIG_DFL
    assert sys.excepthook is hook is sys.__excepthook__
