"""The structure: what stands in the root, who imports whom, one name for one thing.

A fork's own files may import anything; ENTRIES has to name those in the root."""

import ast
import graphlib
import re
import shutil

from run.log import peak_of_process
from tests.harness import HERE, command

ENTRIES = set("""
    README.md LICENSE requirements.txt requirements-dev.txt ruff.toml train.py sample.py test_all.py
    model.py llama.py experts.py sizes.py mesh.py collectives.py shard.py ddp.py zero.py
    optimizer.py tensor_parallel.py context_parallel.py schedules.py pipeline.py
    transport data run tests docs extras""".split())
ROOMS = {
    "root": """model llama experts mesh collectives shard sizes ddp zero optimizer tensor_parallel
               context_parallel schedules pipeline""".split(),
    "command": "train sample".split(), "proof": ["test_all"]}
MAY_IMPORT = {  # a room -> those of which its files may import
    "transport": ["transport"],
    "root": ["root", "transport"],
    "data": ["root", "data"],
    "run": ["root", "transport", "data", "run"],
    "command": ["root", "data", "run", "command"],
    "proof": ["root", "data", "run", "command"],
    "tests": ["root", "transport", "data", "run", "command", "proof", "tests"],
    "extras": ["root", "transport", "data", "run", "command", "proof", "tests", "extras"]}
FOLDERS = [path.parent for path in sorted(HERE.glob("*/__init__.py"))]
FILES = [*HERE.glob("*.py"), *(path for folder in FOLDERS for path in folder.rglob("*.py"))]
HOUSE = {".".join(path.relative_to(HERE).with_suffix("").parts): path
         for path in FILES if path.name != "__init__.py"}


def room(module):
    return next((name for name, modules in ROOMS.items() if module in modules),
                module.split(".")[0])


def imported(nodes):
    """The project's modules that these nodes of a file import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & HOUSE.keys()


TREES = {module: ast.parse(path.read_text()) for module, path in HOUSE.items()}
IMPORTS = {module: imported(ast.walk(tree)) for module, tree in TREES.items()}
AT_ONCE = {module: imported(tree.body) for module, tree in TREES.items()}


def test_the_root_has_these_files_and_folders():
    suffixes = (".py", ".md", ".txt", ".toml")
    found = {path.name for path in HERE.iterdir()
             if path.suffix in suffixes or path.name in ENTRIES or path in FOLDERS}
    assert found | {"extras", "docs"} == ENTRIES  # these two may be missing


def test_arrows_point_down():
    """transport/ imports nothing of ours, the root transport/ only; only tests and extras import
    extras/ and tests/; what is imported at once has no circle."""
    up = [(module, other) for module, others in IMPORTS.items() for other in others
          if room(module) in MAY_IMPORT and room(other) in MAY_IMPORT
          and room(other) not in MAY_IMPORT[room(module)]]
    assert not up
    graphlib.TopologicalSorter(AT_ONCE).prepare()  # CycleError
    assert not re.search(r"^(import|from) (?!torch|math|hashlib|sizes)",
                         HOUSE["model"].read_text(), re.MULTILINE)


def test_the_trainer_needs_nothing_of_run():
    at_once = {module for module in AT_ONCE["train"] if room(module) == "run"}
    assert at_once <= {"run.launch"}  # under if __name__ == "__main__"


def test_any_file_of_the_root_works_in_a_folder_with_the_files_that_it_imports(tmp_path):
    for module in ROOMS["root"]:
        (tmp_path / module / "transport").mkdir(parents=True)
        (tmp_path / module / "transport" / "__init__.py").touch()
        found, new = set(), {module}
        while new:  # the files that it imports, that these import, and so on
            found |= new
            new = set().union(*(IMPORTS[name] for name in new)) - found
        for name in found:
            shutil.copy(HOUSE[name], tmp_path / module / f"{name.replace('.', '/')}.py")
    done = command("-c", """
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
    assert done.stdout == f"{len(ROOMS['root'])}\n", done.stderr


def test_messages_pass_through_the_ground():
    """Only messages, mesh, and what lets the ranks meet, use torch.distributed."""
    talkers = {module for module, path in HOUSE.items()
               if room(module) not in ("tests", "extras", "proof")
               and "import torch.distributed" in path.read_text()}
    assert talkers <= {"mesh", "collectives", "transport.nccl", "run.launch"}


def test_one_name_means_one_thing():
    """No two top-level functions or classes of one name, outside of tests and extras, whose files
    stand alone."""
    where = {}
    for module, tree in TREES.items():
        if room(module) not in ("tests", "extras", "proof"):
            for node in tree.body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "main":
                    where.setdefault(node.name, []).append(module)
    assert not {name: files for name, files in where.items() if len(files) > 1}


def test_no_code_is_dead():
    """Each top-level function, class and constant is named somewhere else than where it is made."""
    words = {}
    for path in (*FILES, *HERE.glob("*.md")):
        for word in re.findall(r"\w+", path.read_text()):
            words[word] = words.get(word, 0) + 1
    dead = [f"{module}.{name}" for module, tree in TREES.items()
            if room(module) not in ("tests", "extras", "proof")
            for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign))
            for name in [getattr(node, "name", None) or getattr(node.targets[0], "id", None)]
            if name and words[name] == 1]
    assert not dead


def test_a_peak_is_that_of_the_process_and_not_of_its_parent():
    held = bytearray(b"x") * (600 << 20)
    child = command("-c", "from run import log; print(log.peak_of_process())")
    assert int(child.stdout) < len(held) < peak_of_process()
