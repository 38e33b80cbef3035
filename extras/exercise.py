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

HERE = Path(__file__).resolve().parent.parent  # the repository


def exercises():
    """{name: (idea, file, functions, the command that judges them)}, the rows of the page's table:

    | `zero1` | `zero.py` `ZeRO1.reduce`, `ZeRO1.publish` | the idea | `python test_all.py` |"""
    found = {}
    for line in (HERE / "docs/exercises.md").read_text().splitlines():
        if line.startswith("| `"):
            name, file, *functions, command = re.findall("`(.+?)`", line)
            found[name] = (line.split(" | ")[2], file, functions, command)
    return found


def find(text, name):
    """The node of the function or method with this name in a file's text."""
    node = ast.parse(text)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", "") == part)
    return node


def empty(text, functions):
    """The text of a file in which the bodies of these functions, all but their docstrings, are
    `raise NotImplementedError`."""
    for name in functions:
        node = find(text, name)
        first = node.body[0]
        begin = first.end_lineno if ast.get_docstring(node) else first.lineno - 1
        lines = text.splitlines(keepends=True)
        lines[begin : node.end_lineno] = [" " * first.col_offset + "raise NotImplementedError\n"]
        text = "".join(lines)
    return text


def main():
    found = exercises()
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=found, metavar="NAME")
    parser.add_argument("--restore", action="store_true", help="bring the file back")
    args = parser.parse_args()
    if not args.name:
        for name, (idea, *_) in found.items():
            print(f"{name:18} {idea}")
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
    text = empty((HERE / file).read_text(), functions)
    (HERE / file).write_text(text)
    print(f"{idea}\n\nWrite, below signature and docstring:")
    for name in functions:
        print(f"    {file}:{find(text, name).end_lineno}    {name}")
    print(f"\nJudge it:        {command}\nA hint:          docs/exercises.md\n"
          f"Bring it back:   python -m extras.exercise {args.name} --restore")


if __name__ == "__main__":
    main()
