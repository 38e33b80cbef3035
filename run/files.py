"""Which file does a path name, and whose is it? Checks before a command writes its files.

    refuse_same      no output is an input, another output, or in a checkpoint's folder
    refuse_foreign   a file that is to be written is new, empty, or begins like ours
    write_new        no file exists with other content than the new one; then writes them

What they refuse is a ValueError of one line: flag, path, fix. A file that cannot be read or written
is an OSError. No torch here.
"""

import os
import re
from pathlib import Path

MANIFEST = "manifest.json"  # makes the folder of a checkpoint complete (run/checkpoint.py)
FOLDER = re.compile(r"step-\d{8,}")  # the name of that folder, less .tmp or .old.tmp
LOCK = ".lock"  # in --out: locked by the run that writes there (claim in run/checkpoint.py)


def is_same(path, other):
    """Do two paths lead to one file? (Symbolic links, hard links and `..` are followed.)"""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def checkpoint_around(path, out):
    """The checkpoint's folder in which this path lies, or None. Such a folder has a checkpoint's
    name (step-N), and has a manifest or lies in `out`, where a run may still write a manifest."""
    for folder in Path(os.path.realpath(path)).parents:
        # lower(): where a file system ignores case, STEP-00000001 is the same folder
        name = folder.name.lower().removesuffix(".tmp").removesuffix(".old")
        is_checkpoint = os.path.exists(Path(folder, MANIFEST))
        may_become_one = is_same(folder.parent, out)
        if FOLDER.fullmatch(name) and (is_checkpoint or may_become_one):
            return folder
    return None


def refuse_same(outputs, inputs, out):
    """ValueError if an output is an input, another output, or in a checkpoint's folder. outputs and
    inputs: [(flag with its value, path of a file)]. out: the folder of --out."""
    for i, (flag, path) in enumerate(outputs):
        if os.path.exists(path) and not os.path.isfile(path):
            # A device has no content to lose. Folders and pipes are refused elsewhere, such as by
            # check_writable (run/config.py)
            continue
        folder = checkpoint_around(path, out)
        if folder:
            raise ValueError(f"{flag} would be in the checkpoint {folder}; name another file")
        for other, taken in [*outputs[:i], *inputs]:
            if is_same(path, taken):
                raise ValueError(f"{flag} would write over {other}; take two files")


def refuse_foreign(flag, path, mark):
    """Refuse a file with content that does not begin with `mark`. (A file that a crash has cut off
    within the mark is ours, too.) OSError if it cannot be read."""
    if os.path.isfile(path):
        with open(path, "rb") as file:
            begin = file.read(len(mark))
        if not mark.encode().startswith(begin):
            raise ValueError(f"{flag} {path} holds something else than {flag} writes; name another "
                             "file")


def write_new(flag, texts):
    """Write {path: text}. The command, not the user, has chosen these names, so a file that exists
    may be the user's own. Writes all files or, if one exists with other content, none (ValueError).
    OSError if a file cannot be written."""
    for path, text in texts.items():
        if path.exists() and not (path.is_file() and path.read_text(errors="replace") == text):
            raise ValueError(f"{path} exists, with other content; name another folder for {flag}")
    for path, text in texts.items():
        path.write_text(text)
