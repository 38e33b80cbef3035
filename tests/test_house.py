"""The structure: which file may import which, sizes, names; every command answers nonsense.

A fork's own files, in the root or in a folder of its own, may import anything (test_docs.py has
what holds for this repository's files only)."""

import ast
import graphlib
import re
import shutil
from collections import deque

import pytest

import schedules
from data import batches
from data import prepare as prepare_file
from data.batches import Data
from extras.show import demonstrations, tables
from group import CommunicationError, naming
from run import export as export_file
from run.log import peak_of_process
from tests.harness import HERE, config
from tests.runs import command, one_line

ROOMS = {
    "ground": "model llama experts mesh group collectives shard sizes".split(),
    "technique": """ddp zero optimizer tensor_parallel sequence_parallel context_parallel
                    expert_parallel recompute schedules pipeline""".split(),
    "command": "train sample plan bench test_all".split()}
ROOT = ["ground", "technique"]
# What extras/planner/ may use of the engine, to measure a machine: messages
MESSAGES = ["engine.collectives", "engine.group", "engine.mesh"]
MAY_IMPORT = {  # room -> the rooms, or modules, that its files may import
    "ground": ["ground"], "technique": ROOT, "engine": [*ROOT, "engine"],
    "data": ["ground", "data"], "run": [*ROOT, "data", "run"],
    "planner": [*ROOT, *MESSAGES, "data", "run", "planner"],
    "show": [*ROOT, "engine", "data", "run", "planner", "show"],
    "command": [*ROOT, "engine", "data", "run", "planner", "show", "races", "command"],
    "races": [*ROOT, "engine", "data", "run", "planner", "races", "command"],
    "experiments": [*ROOT, "engine", "data", "run", "planner", "show", "command"],
    "exercises": [*ROOT, "engine", "data", "run", "planner", "show", "command", "exercises"],
    "forks": [*ROOT, "engine", "data", "run", "command", "forks"]}
FOLDERS = [path.parent for path in sorted(HERE.glob("*/__init__.py"))
           if path.parent.name != "tests"]
FILES = [*HERE.glob("*.py"), *(path for folder in FOLDERS for path in folder.rglob("*.py"))]
# "extras.doctor.dump": its file
HOUSE = {".".join(path.relative_to(HERE).with_suffix("").parts): path
         for path in FILES if path.name != "__init__.py"}


def room(module):
    return next((name for name, modules in ROOMS.items() if module in modules),
                module.split(".")[0])


def is_ours(module):
    """Does the module stand in a room of this repository? Else it is a fork's own."""
    return room(module) in MAY_IMPORT


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


def test_arrows_point_down():
    """The root imports neither the engine nor a room; the engine imports the root; data/ and run/
    neither the engine nor extras/planner/; extras/planner/ of the engine only messages; only
    commands, extras/show/ and extras/exercises/ import them, and nothing imports extras/exercises/.
    No circle."""
    imports = {module: imported(path) for module, path in HOUSE.items()}
    up = [(module, other) for module, others in imports.items() for other in others
          if is_ours(module) and is_ours(other) and room(other) != "forks"  # which patches import
          and not {room(other), other} & {*MAY_IMPORT[room(module)]}]
    assert not up
    # Of the files that train, one line of train.py imports the engine, if a part of it is asked for
    trains = [module for module in imports if module in ("train", "sample") or room(module) in
              ("run", "data", *ROOT)]
    assert {(module, other) for module in trains for other in imports[module]
            if room(other) == "engine"} == {("train", "engine.parts")}
    text = HOUSE["train"].read_text()
    assert len(re.findall(r"^ *(?:import|from) engine\b", text, re.MULTILINE)) == 1
    graphlib.TopologicalSorter(imports).prepare()  # CycleError
    assert not re.search(r"^(import|from) (?!torch|math|hashlib|sizes)",
                         HOUSE["model"].read_text(), re.MULTILINE)


def test_the_root_runs_without_the_other_floors():
    """What is imported inside of a function would be seen here."""
    names = ", ".join(ROOMS["ground"] + ROOMS["technique"])
    rooms = tuple(folder.name for folder in FOLDERS)
    run = command("-c", f"import sys, {names}; print([name for name in sys.modules "
                        f"if name.split('.')[0] in {rooms}])")
    assert run.stdout == "[]\n", run.stderr


def test_the_engine_inherits_from_no_layer_of_the_root():
    """Whoever changes a plain layer changes no fast one: only groups and meshes are extended."""
    roots = {name for module in ROOMS["technique"] + ["model", "llama", "experts"]
             for name in re.findall(r"^class (\w+)", HOUSE[module].read_text(), re.MULTILINE)}
    for module, path in HOUSE.items():
        if module.startswith("engine."):
            own = set(re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE))
            engine = {name for m, p in HOUSE.items() if m.startswith("engine.")
                      for name in re.findall(r"^class (\w+)", p.read_text(), re.MULTILINE)}
            bases = set(re.findall(r"^class \w+\(([\w.]+)\)", path.read_text(), re.MULTILINE))
            assert not {base for base in bases if base in roots - engine - own}, (module, bases)


def test_messages_pass_through_the_ground():
    """Only the ground, its engine, and what starts and ends the ranks, use torch.distributed."""
    talkers = {module for module, path in HOUSE.items()
               if is_ours(module) and module != "bench" and room(module) != "races" and
               re.search("import torch.distributed|torch.distributed[.]", path.read_text())}
    assert talkers <= {"mesh", "engine.mesh", "engine.group", "engine.nccl_group",
                       "engine.collectives", "run.processes", "extras.exercises.board",
                       "extras.exercises.judge"}


def test_one_name_means_one_thing():
    """No two top-level functions or classes of one name, but for a technique's on its two floors,
    what every file may have, and an exercise, which has the name of the form that it asks for. (A
    fork replaces functions by others of the same name.)"""
    where = {}
    for module, path in HOUSE.items():
        is_exercise = re.match(r"exercises\.e\d", module)
        apart = module in ("bench", "test_all") or room(module) in ("races", "forks") or is_exercise
        if is_ours(module) and not apart:
            for name in re.findall(r"^(?:def|class) (\w+)", path.read_text(), re.MULTILINE):
                where.setdefault(name, []).append(module)
    twice = {name: files for name, files in where.items() if len(files) > 1}
    floors = {name for name, files in twice.items() if len(files) == 2 and
              any(module.startswith("engine.") for module in files) and
              any(room(module) in ROOT for module in files)}
    assert set(twice) - floors <= {"main", "demo"}, twice


def test_stages_are_cut_by_cost():
    assert schedules.cut([0, 5, 5, 5, 5, 20], 3) == [(0, 3), (3, 5), (5, 6)]
    assert [b - a for a, b in schedules.cut([1] * 7, 3)] in ([2, 2, 3], [2, 3, 2], [3, 2, 2])
