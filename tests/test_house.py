"""The structure: what stands in the root, who imports whom, one name for one thing.

A fork's own files, which ROOMS does not name, may import anything."""

import ast
import graphlib
import re

from tests.harness import HERE

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


def test_the_tree_of_the_readme_names_each_file_and_folder_of_the_root():
    tree = re.findall(r"^    (\w+(?:\.py|/)) {3,}", (HERE / "README.md").read_text(), re.MULTILINE)
    found = {path.name for path in HERE.glob("*.py")} | {f"{path.name}/" for path in FOLDERS}
    assert found | {"docs/", "extras/"} == set(tree)  # these two may be missing


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
    trainer, = [node for node in TREES["train"].body if getattr(node, "name", "") == "Trainer"]
    assert not imported(ast.walk(trainer))


def test_messages_pass_through_the_ground():
    """Only messages, mesh, and what lets the ranks meet, use torch.distributed."""
    talkers = {module for module, path in HOUSE.items()
               if room(module) not in ("tests", "extras", "proof")
               and "import torch.distributed" in path.read_text()}
    assert talkers <= {"mesh", "collectives", "transport.connect", "transport.nccl", "run.launch"}


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
