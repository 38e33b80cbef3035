"""A fork's first run of the tests is green: with the patch of docs/test-your-own.md, and with each
patch of extras/forks/.

Each fork's own tests are a file: test_muon.py and so on. They run in this repository, too: there a
rank replaces, in its process, the names that the patch replaces in the files. (test_docs.py sees
that all patches apply.)"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.harness import HERE, needs_minutes
from tests.runs import apply, needs_git

PAGE = HERE / "docs/test-your-own.md"
PATCHES = {path.stem: path.read_text() for path in sorted(HERE.glob("extras/forks/*.patch"))}
if PAGE.exists():
    # A schedule, without a file and tests of its own
    PATCHES["eager"] = re.search(r"```diff\n(.*?)```", PAGE.read_text(), re.S)[1]


def test_a_fork_is_a_file_its_patch_and_its_tests():
    for name in PATCHES.keys() - {"eager"}:
        folder = HERE / "extras/forks"
        assert (folder / f"{name}.py").exists() and (folder / f"tests/test_{name}.py").exists()


def test_test_docs_can_be_deleted():
    """docs/test-your-own.md tells a fork to delete it: nothing may need it."""
    users = [path.name for path in HERE.rglob("*.py")
             if re.search("^(from|import) .*test_docs", path.read_text(), re.MULTILINE)]
    assert not users


@needs_git
@needs_minutes
@pytest.mark.parametrize("name", PATCHES)
def test_the_quick_tests_pass_in_every_fork(name, fork, tmp_path):
    tree = shutil.copytree(fork, tmp_path / "fork")
    apply(PATCHES[name], tree)
    runs = [["test_all.py", "--quick"]]
    if name != "eager":
        runs.append(["-m", "pytest", "-q", f"extras/forks/tests/test_{name}.py"])
    for words in runs:
        run = subprocess.run([sys.executable, *words, "-p", "no:cacheprovider"], cwd=tree,
                             capture_output=True, text=True, env={**os.environ, "FULL": ""})
        assert run.returncode == 0, run.stdout[-3000:]
