"""The structure: which file may import which, sizes, names; every command answers nonsense."""

import ast
import graphlib
import os
import re
import shutil
import subprocess
from collections import deque

import pytest

import schedules
from data import batches
from data import prepare as prepare_file
from data.batches import Data
from engine.group import CommunicationError, naming
from run import export as export_file
from run.log import peak_of_process
from show import demonstrations, tables
from tests.harness import HERE, config
from tests.runs import command, one_line

ROOMS = {
    "ground": "model mesh group nccl_group collectives shard sizes".split(),
    "technique": """ddp zero optimizer tensor_parallel sequence_parallel context_parallel
                    expert_parallel schedules pipeline""".split(),
    "command": "plain train sample plan bench test_all".split()}
MAY_IMPORT = {  # room -> the rooms that its files may import
    "ground": ["ground"], "technique": ["ground", "technique", "engine"],
    "engine": ["ground", "technique", "engine"], "data": ["ground", "data"],
    "run": ["ground", "technique", "engine", "data", "run"],
    "planner": ["ground", "technique", "engine", "data", "run", "planner"],
    "show": ["ground", "technique", "engine", "data", "run", "planner", "show"],
    "experiments": ["ground", "technique", "data", "run", "planner", "show", "command"],
    "command": ["ground", "technique", "engine", "data", "run", "planner", "show", "command"]}
HOUSE = {path.stem if path.parent == HERE else f"{path.parent.name}.{path.stem}": path
         for folder in (".", "engine", "data", "run", "planner", "show", "experiments")
         for path in HERE.joinpath(folder).glob("*.py") if path.name != "__init__.py"}


def room(module):
    return next((name for name, modules in ROOMS.items() if module in modules),
                module.split(".")[0])


def imported(path):
    """The project's modules that a file imports, but for what only its demonstration needs: inside
    of demo(), or of the main guard."""
    found, nodes = set(), deque([ast.parse(path.read_text())])
    while nodes:
        node = nodes.popleft()
        guard = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        if guard or isinstance(node, ast.FunctionDef) and node.name == "demo":
            continue
        nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & HOUSE.keys()


@pytest.mark.parametrize("line,says", [
    ("collectives.py --help", "say how many ranks, 1 to 64"), ("collectives.py 0", "say how many"),
    ("context_parallel.py abc", "say how many ranks"), ("sizes.py nan", "must be above 0"),
    ("sizes.py -5", "must be above 0"), ("mesh.py 0 1 1 1 1", "give the sizes"),
    ("export.py --out /nowhere --to x", "/nowhere: no complete checkpoint"),
    ("prepare.py README.md --out /proc/x", "/proc/x: cannot be written"),
    ("prepare.py /dev/null --out /proc/x", "/dev/null is not a regular file"),
    ("prepare.py --vocab-size many", "invalid int value: 'many'")])
def test_every_command_answers_nonsense_with_one_line(line, says, capsys, monkeypatch):
    mains = {"sizes.py": tables.sizes_command, "mesh.py": tables.mesh_command,
             "export.py": export_file.main, "prepare.py": prepare_file.main}
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


@pytest.mark.waits
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


def test_arrows_point_down():
    """Techniques import the ground and one another; data/ the ground; run/ no planner/; only
    commands import run/, planner/ and show/. No circle. 22 files at the root, at most."""
    imports = {module: imported(path) for module, path in HOUSE.items()}
    up = [(module, other) for module, others in imports.items() for other in others
          if room(other) not in MAY_IMPORT[room(module)]]
    assert not up
    graphlib.TopologicalSorter(imports).prepare()  # CycleError
    assert len(list(HERE.glob("*.py"))) <= 22
    assert not re.search(r"^(import|from) (?!torch|math|hashlib|sizes)",
                         HOUSE["model"].read_text(), re.MULTILINE)


def test_messages_pass_through_the_ground():
    """Only the ground, and what starts and ends the ranks, uses torch.distributed."""
    talkers = {module for module, path in HOUSE.items() if module != "bench" and
               re.search("import torch.distributed|torch.distributed[.]", path.read_text())}
    assert talkers <= {"mesh", "group", "nccl_group", "collectives", "run.processes"}


def test_one_name_means_one_thing():
    """No two top-level functions or classes of one name, but for what every file may have."""
    where = {}
    for module, path in HOUSE.items():
        if module not in ("bench", "test_all"):
            for name in re.findall(r"^(?:def|class) (\w+)", path.read_text(), re.MULTILINE):
                where.setdefault(name, []).append(module)
    twice = {name: files for name, files in where.items() if len(files) > 1}
    assert set(twice) <= {"main", "demo"}, twice


def test_stages_are_cut_by_cost():
    assert schedules.cut([0, 5, 5, 5, 5, 20], 3) == [(0, 3), (3, 5), (5, 6)]
    assert [b - a for a, b in schedules.cut([1] * 7, 3)] in ([2, 2, 3], [2, 3, 2], [3, 2, 2])
