"""Write a technique yourself: empties functions of the root, in place, and says which test judges
what you write. The exercises are the table of docs/exercises.md.

    python -m extras.exercise                    the list
    python -m extras.exercise zero1              empties the functions of this exercise
    python -m extras.exercise zero1 --restore    shows how yours differ, and brings the file back

Needs git, which brings the file back. Imports nothing of the root: a file with an error of yours
can be restored, too.
"""

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent  # the repository


class Exercise(NamedTuple):
    idea: str
    file: str
    functions: list  # names, such as "ZeRO1.reduce"
    command: str  # judges the functions


def exercises():
    """{name: Exercise}, the rows of the page's table:

    | `zero1` | `zero.py` `ZeRO1.reduce`, `ZeRO1.publish` | the idea | `python test_all.py` |"""
    found = {}
    for line in (HERE / "docs/exercises.md").read_text().splitlines():
        if line.startswith("| `"):
            name, file, *functions, command = re.findall("`(.+?)`", line)
            found[name] = Exercise(line.split(" | ")[2], file, functions, command)
    return found


def find(tree, name):
    """The node of the function or method with this name in a file's syntax tree."""
    node = tree
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", "") == part)
    return node


def empty(text, functions):
    """The text of a file in which the bodies of these functions, all but their docstrings, are
    `raise NotImplementedError`."""
    lines = text.splitlines()
    nodes = [find(ast.parse(text), name) for name in functions]
    for node in sorted(nodes, key=lambda node: -node.lineno):  # the last first: numbers stay right
        first = node.body[0]
        begin = first.end_lineno if ast.get_docstring(node) else first.lineno - 1
        raises = " " * (node.col_offset + 4) + "raise NotImplementedError"
        lines[begin : node.end_lineno] = [raises]
    return "\n".join(lines) + "\n"


def main():
    found = exercises()
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=found, metavar="NAME")
    parser.add_argument("--restore", action="store_true", help="bring the file back")
    args = parser.parse_args()
    if not args.name:
        for name, exercise in found.items():
            print(f"{name:18} {exercise.idea}")
        return
    idea, file, functions, command = found[args.name]
    # Exits with 1 if the file differs from the last commit; from yours (-) to the repository's (+)
    diff = ["git", "--no-pager", "diff", "-R", "--exit-code", "HEAD", "--", file]
    if args.restore:
        subprocess.run(diff, cwd=HERE)
        sys.exit(subprocess.run(["git", "checkout", "HEAD", "--", file], cwd=HERE).returncode)
    if subprocess.run(diff, cwd=HERE, capture_output=True).returncode:
        sys.exit(f"{file} has uncommitted changes, or is in no git clone, so nothing is emptied: "
                 f"python -m extras.exercise {args.name} --restore discards all its changes")
    path = HERE / file
    path.write_text(empty(path.read_text(), functions))
    tree = ast.parse(path.read_text())
    print(f"{idea}\n\nWrite, below signature and docstring:")
    for name in functions:
        print(f"    {file}:{find(tree, name).end_lineno}    {name}")
    print(f"\nJudge it:        {command}\nA hint:          docs/exercises.md\n"
          f"Bring it back:   python -m extras.exercise {args.name} --restore")


if __name__ == "__main__":
    main()
