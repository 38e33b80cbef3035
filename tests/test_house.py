"""TODO"""

import os
import re
import shutil
import subprocess

import pytest

import mesh as mesh_file
import schedules
import zero
from data import batches
from data import prepare as prepare_file
from data.batches import Data
from group import CommunicationError, naming
from run import demonstrations
from run import export as export_file
from run.log import peak_of_process
from tests.harness import HERE, config
from tests.runs import command, one_line

TALKERS = ("mesh.py", "group.py", "nccl_group.py", "collectives.py")
HOUSE = [path for path in HERE.glob("*.py") if path.name not in ("bench.py", "test_all.py")]


@pytest.mark.parametrize("line,says", [
    ("collectives.py --help", "say how many ranks, 1 to 64"), ("collectives.py 0", "say how many"),
    ("context_parallel.py abc", "say how many ranks"), ("zero.py nan", "must be above 0"),
    ("zero.py -5", "must be above 0"), ("mesh.py 0 1 1 1 1", "give the sizes"),
    ("export.py --out /nowhere --to x", "/nowhere: no complete checkpoint"),
    ("prepare.py README.md --out /proc/x", "/proc/x: cannot be written"),
    ("prepare.py --vocab-size many", "invalid int value: 'many'")])
def test_every_command_answers_nonsense_with_one_line(line, says, capsys, monkeypatch):
    mains = {"zero.py": zero.main, "mesh.py": mesh_file.main, "export.py": export_file.main,
             "prepare.py": prepare_file.main}
    main = mains.get(line.split()[0], lambda: demonstrations.ranks_asked(4))
    assert says in one_line(main, line.split(), capsys, monkeypatch)


@pytest.mark.skipif(not shutil.which("git"), reason="git applies the patch")
def test_the_readmes_patch_is_one_that_git_takes(tmp_path):
    shutil.copy(HERE / "schedules.py", tmp_path)
    patch = re.search(r"```diff\n(.*?)```", (HERE / "README.md").read_text(), re.S)[1]
    subprocess.run(["git", "apply"], input=patch.encode(), cwd=tmp_path, check=True,
                   env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)})
    assert "def eager(P, m, v, rank)" in (tmp_path / "schedules.py").read_text()


def test_the_librarys_line_is_cut_to_what_it_says():
    with (pytest.raises(CommunicationError, match=r"^rank 0: sending: Connection closed by peer$"),
          naming("rank 0: sending")):
        raise RuntimeError("[/w/pair.cc:5] Connection closed by peer. This is likely a ... GLHF!")


def test_a_peak_is_that_of_the_process_and_not_of_its_parent():
    held = bytearray(b"x") * (600 << 20)
    child = command("-c", "from run import log; print(log.peak_of_process())")
    assert int(child.stdout) < len(held) < peak_of_process()


def test_preparing_the_corpus_is_said(corpus, tmp_path, monkeypatch, capsys):
    def prepare(sources, folder):
        shutil.copytree(corpus, folder)

    monkeypatch.setattr(batches, "__file__", str(tmp_path / "batches.py"))
    monkeypatch.setattr(batches, "prepare", prepare)
    Data(config("stdlib"))
    assert capsys.readouterr().out == "preparing stdlib as a corpus, once\n"


def test_the_house_is_in_order():
    """Messages pass through four files only; the model knows of none."""
    for path in HOUSE:
        text = path.read_text()
        talks = "torch.distributed" in text.replace("torch.distributed's", "")
        assert talks == (path.name in TALKERS), path.name
    assert not re.search(r"^(import|from) (?!torch|math|hashlib|sizes)",
                         (HERE / "model.py").read_text(), re.MULTILINE)


def test_one_name_means_one_thing():
    """No two top-level functions or classes of one name, but for what every file may have."""
    where = {}
    for path in [*HOUSE, *(HERE / "data").glob("*.py")]:
        for name in re.findall(r"^(?:def|class) (\w+)", path.read_text(), re.MULTILINE):
            where.setdefault(name, []).append(path.name)
    twice = {name: files for name, files in where.items() if len(files) > 1}
    assert set(twice) <= {"main", "demo"}, twice


def test_stages_are_cut_by_cost():
    assert schedules.cut([0, 5, 5, 5, 5, 20], 3) == [(0, 3), (3, 5), (5, 6)]
    assert [b - a for a, b in schedules.cut([1] * 7, 3)] in ([2, 2, 3], [2, 3, 2], [3, 2, 2])
