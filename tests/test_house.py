"""The structure: which file may import which, what stands in the root, one name for one thing.

A fork's own files, in the root or in a folder of its own, may import anything; ENTRIES has to name
them. (extras/show/tests/test_docs.py has what holds for this repository's files only.)"""

import ast
import graphlib
import re
import shutil

import pytest

import schedules
from data import batches
from data import prepare as prepare_file
from data.batches import Data
from group import CommunicationError, naming
from run import export as export_file
from run.log import peak_of_process
from tests.harness import HERE, config
from tests.runs import command, one_line

ENTRIES = set("""
    README.md LICENSE requirements.txt requirements-dev.txt ruff.toml train.py sample.py test_all.py
    model.py llama.py experts.py sizes.py mesh.py group.py collectives.py shard.py ddp.py zero.py
    optimizer.py tensor_parallel.py sequence_parallel.py context_parallel.py expert_parallel.py
    schedules.py pipeline.py recompute.py data engine run tests docs extras""".split())
ROOMS = {
    "ground": "model llama experts mesh group collectives shard sizes".split(),
    "technique": """ddp zero optimizer tensor_parallel sequence_parallel context_parallel
                    expert_parallel recompute schedules pipeline""".split(),
    "command": "train sample".split(), "proof": ["test_all"]}
ROOT = ["ground", "technique"]
MAY_IMPORT = {  # a file of the root, or a folder -> what its files may import
    "ground": ["ground"], "technique": ROOT, "engine": [*ROOT, "engine"],
    "data": ["ground", "data"], "run": [*ROOT, "data", "run"],
    "command": [*ROOT, "data", "run", "command"],
    "proof": [*ROOT, "data", "run", "command", "tests"],
    "tests": [*ROOT, "engine", "data", "run", "command", "tests"],
    "extras": [*ROOT, "engine", "data", "run", "command", "tests", "extras"]}
THE_ONE_LINE = ("train", "engine.parts")  # inside of choose(): only a run with --fast imports it
FOLDERS = [path.parent for path in sorted(HERE.glob("*/__init__.py"))]
FILES = [*HERE.glob("*.py"), *(path for folder in FOLDERS for path in folder.rglob("*.py"))]
# "extras.doctor.dump": its file
HOUSE = {".".join(path.relative_to(HERE).with_suffix("").parts): path
         for path in FILES if path.name != "__init__.py"}


def place(module):
    return next((name for name, modules in ROOMS.items() if module in modules),
                module.split(".")[0])


def is_ours(module):
    """Does the module stand in this repository? Else it is a fork's own."""
    return place(module) in MAY_IMPORT


def imported(path):
    """The project's modules that a file imports anywhere: on top or inside of a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & HOUSE.keys()


IMPORTS = {module: imported(path) for module, path in HOUSE.items()}


def needs(module):
    """The module, and all that it imports, that these import, and so on."""
    found, new = set(), {module}
    while new:
        found |= new
        new = set().union(*(IMPORTS[name] for name in new)) - found
    return found


# ---- who imports whom ----


def test_the_root_has_these_files_and_folders():
    """... and no others but what commands write. extras/ may be missing."""
    suffixes = (".py", ".md", ".txt", ".toml")
    found = {path.name for path in HERE.iterdir()
             if path.suffix in suffixes or path.name in ENTRIES or path in FOLDERS}
    found |= {"extras"}
    assert found == ENTRIES, (f"name new files of the root in ENTRIES: {sorted(found - ENTRIES)}; "
                              f"missing: {sorted(ENTRIES - found)}")


def test_arrows_point_down():
    """The root imports neither the engine nor a folder; the engine imports the root; data/ and run/
    never the engine; nothing outside of extras/ and tests/ imports these two. No circle."""
    up = [(module, other) for module, others in IMPORTS.items() for other in others
          if is_ours(module) and is_ours(other) and place(other) not in MAY_IMPORT[place(module)]
          and not other.startswith("extras.forks")]  # which patches import
    assert set(up) == {THE_ONE_LINE}
    text = HOUSE["train"].read_text()
    assert len(re.findall(r"^ *(?:import|from) engine\b", text, re.MULTILINE)) == 1
    graphlib.TopologicalSorter(IMPORTS).prepare()  # CycleError
    assert not re.search(r"^(import|from) (?!torch|math|hashlib|sizes)",
                         HOUSE["model"].read_text(), re.MULTILINE)


def test_any_file_of_the_root_works_in_a_folder_with_the_files_that_it_imports(tmp_path):
    for module in ROOMS["ground"] + ROOMS["technique"]:
        (tmp_path / module).mkdir()
        for name in needs(module):
            assert place(name) in ROOT, (module, name)
            shutil.copy(HOUSE[name], tmp_path / module)
    run = command("-c", """
import importlib, pathlib, sys
folders = list(pathlib.Path().iterdir())
names = [folder.name for folder in folders]
for folder in folders:
    for name in names:  # those of the folder before
        sys.modules.pop(name, None)
    sys.path[0] = str(folder.resolve())
    importlib.invalidate_caches()
    module = importlib.import_module(folder.name)
    assert pathlib.Path(module.__file__).parent == folder.resolve(), module.__file__
print(len(folders))
""", cwd=tmp_path)
    assert run.stdout == f"{len(ROOMS['ground'] + ROOMS['technique'])}\n", run.stderr


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
               if is_ours(module) and place(module) not in ("tests", "extras") and
               re.search("import torch.distributed|torch.distributed[.]", path.read_text())}
    assert talkers <= {"mesh", "engine.mesh", "engine.group", "engine.nccl_group",
                       "engine.collectives", "run.processes"}


def test_one_name_means_one_thing():
    """No two top-level functions or classes of one name, but for a technique's in root and engine,
    what every file may have, and an exercise, which has the name of the form that it asks for. (A
    fork replaces functions by others of the same name.)"""
    where = {}
    for module, path in HOUSE.items():
        parts = module.split(".")
        apart = module == "test_all" or "tests" in parts or parts[1:2] in (["bench"], ["forks"])
        apart = apart or re.match(r"extras\.exercises\.e\d", module)
        if is_ours(module) and not apart:
            for name in re.findall(r"^(?:def|class) (\w+)", path.read_text(), re.MULTILINE):
                where.setdefault(name, []).append(module)
    twice = {name: files for name, files in where.items() if len(files) > 1}
    techniques = {name for name, files in twice.items() if len(files) == 2 and
              any(module.startswith("engine.") for module in files) and
              any(place(module) in ROOT for module in files)}
    wrong = {name: twice[name] for name in set(twice) - techniques - {"main", "demo"}}
    assert not wrong, f"rename one of each: {wrong}"


# ---- commands, messages, figures ----


@pytest.mark.parametrize("line,says", [
    ("export.py --out /nowhere --to x", "/nowhere: no complete checkpoint"),
    ("prepare.py README.md --out /proc/x", "/proc/x: cannot be written"),
    ("prepare.py /dev/null --out /proc/x", "/dev/null is not a regular file"),
    ("prepare.py --vocab-size many", "invalid int value: 'many'")])
def test_every_command_answers_nonsense_with_one_line(line, says, capsys, monkeypatch):
    main = {"export.py": export_file.main, "prepare.py": prepare_file.main}[line.split()[0]]
    assert says in one_line(main, line.split(), capsys, monkeypatch)


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


def test_stages_are_cut_by_cost():
    assert schedules.cut([0, 5, 5, 5, 5, 20], 3) == [(0, 3), (3, 5), (5, 6)]
    assert [b - a for a, b in schedules.cut([1] * 7, 3)] in ([2, 2, 3], [2, 3, 2], [3, 2, 2])


def test_every_file_of_run_has_a_promise_and_every_promise_a_test():
    defined = set()
    for path in HERE.glob("tests/test_*.py"):
        defined |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    rows = re.findall(r"^\| (?!promise|---)(.+) \| (.+) \| (.+) \|$",
                      (HERE / "run/README.md").read_text(), re.MULTILINE)
    named = {name for _, files, _ in rows for name in re.findall(r"\]\((\w+\.py)\)", files)}
    assert named == {path.name for path in HERE.glob("run/*.py")} - {"__init__.py"}
    for promise, _, tests in rows:
        assert set(tests.split(", ")) <= defined, promise
