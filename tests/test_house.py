"""The structure: which file may import which, what stands in the root, one name for one thing.

A fork's own files, in the root or in a folder of its own, may import anything; ENTRIES has to name
them."""

import ast
import graphlib
import re
import shutil

import pytest

import schedules
from collectives import CommunicationError, naming
from data import prepare as prepare_file
from run import export as export_file
from run.log import peak_of_process
from tests.harness import HERE
from tests.runs import command, one_line

ENTRIES = set("""
    README.md LICENSE requirements.txt requirements-dev.txt ruff.toml train.py sample.py test_all.py
    model.py llama.py experts.py sizes.py mesh.py collectives.py shard.py ddp.py zero.py
    optimizer.py tensor_parallel.py context_parallel.py schedules.py pipeline.py
    transport data run tests docs extras""".split())
ROOMS = {
    "root": """model llama experts mesh collectives shard sizes ddp zero optimizer tensor_parallel
               context_parallel schedules pipeline""".split(),
    "command": "train sample".split(), "proof": ["test_all"]}
MAY_IMPORT = {  # a file of the root, or a folder -> what its files may import
    "transport": ["transport"], "root": ["root", "transport"],
    "data": ["root", "data"], "run": ["root", "transport", "data", "run"],
    "command": ["root", "data", "run", "command"],
    "proof": ["root", "data", "run", "command", "tests"],
    "tests": ["root", "transport", "data", "run", "command", "tests"],
    "extras": ["root", "transport", "data", "run", "command", "tests", "extras"]}
FOLDERS = [path.parent for path in sorted(HERE.glob("*/__init__.py"))]
FILES = [*HERE.glob("*.py"), *(path for folder in FOLDERS for path in folder.rglob("*.py"))]
# "data.prepare": its file
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
    """transport/ imports nothing of ours, the root transport/ only, and nothing outside of extras/
    and tests/ imports these two. No circle."""
    up = [(module, other) for module, others in IMPORTS.items() for other in others
          if is_ours(module) and is_ours(other) and place(other) not in MAY_IMPORT[place(module)]
          and not other.startswith("extras.forks")]  # which patches import
    assert not up
    graphlib.TopologicalSorter(IMPORTS).prepare()  # CycleError
    assert not re.search(r"^(import|from) (?!torch|math|hashlib|sizes)",
                         HOUSE["model"].read_text(), re.MULTILINE)


def test_any_file_of_the_root_works_in_a_folder_with_the_files_that_it_imports(tmp_path):
    for module in ROOMS["root"]:
        (tmp_path / module / "transport").mkdir(parents=True)
        (tmp_path / module / "transport" / "__init__.py").touch()
        for name in needs(module):
            assert place(name) in MAY_IMPORT["root"], (module, name)
            shutil.copy(HOUSE[name], tmp_path / module / f"{name.replace('.', '/')}.py")
    run = command("-c", """
import importlib, pathlib, sys
folders = list(pathlib.Path().iterdir())
names = [folder.name for folder in folders]
for folder in folders:
    for name in list(sys.modules):  # those of the folder before
        if name in names or name.startswith("transport"):
            sys.modules.pop(name)
    sys.path[0] = str(folder.resolve())
    importlib.invalidate_caches()
    module = importlib.import_module(folder.name)
    assert pathlib.Path(module.__file__).parent == folder.resolve(), module.__file__
print(len(folders))
""", cwd=tmp_path)
    assert run.stdout == f"{len(ROOMS['root'])}\n", run.stderr


def test_messages_pass_through_the_ground():
    """Only messages, mesh, and what starts and ends the ranks, use torch.distributed."""
    talkers = {module for module, path in HOUSE.items()
               if is_ours(module) and place(module) not in ("tests", "extras") and
               re.search("import torch.distributed|torch.distributed[.]", path.read_text())}
    assert talkers <= {"mesh", "collectives", "transport.nccl", "run.processes"}


def test_one_name_means_one_thing():
    """No two top-level functions or classes of one name, but for what every file may have, and
    extras/, whose files stand alone. (A fork replaces functions by others of the same name.)"""
    where = {}
    for module, path in HOUSE.items():
        parts = module.split(".")
        apart = module == "test_all" or "tests" in parts or parts[0] == "extras"
        if is_ours(module) and not apart:
            for name in re.findall(r"^(?:def|class) (\w+)", path.read_text(), re.MULTILINE):
                where.setdefault(name, []).append(module)
    twice = {name: files for name, files in where.items() if len(files) > 1}
    wrong = {name: twice[name] for name in set(twice) - {"main"}}
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


def test_stages_are_cut_by_cost():
    assert schedules.cut([0, 5, 5, 5, 5, 20], 3) == [(0, 3), (3, 5), (5, 6)]
    assert [b - a for a, b in schedules.cut([1] * 7, 3)] in ([2, 2, 3], [2, 3, 2], [3, 2, 2])
