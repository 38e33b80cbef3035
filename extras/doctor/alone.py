"""Copies the doctor out of this repository: FOLDER/doctor, for a machine that has numpy and torch.

    python -m extras.doctor.alone FOLDER

    cd FOLDER
    python -m doctor.record reference      extras.doctor.record, with the same flags
    python -m doctor reference mine        extras.doctor, with the same flags

FOLDER/doctor/files gets the files of this repository that the two commands import, unchanged. They
import one another from there: it is the first entry of sys.path, whatever PYTHONPATH says.
"""

import shutil
from modulefinder import ModuleFinder
from pathlib import Path

from run.config import Parser, fail, require

HERE = Path(__file__).parents[2]  # the repository
COMMANDS = {"__main__.py": "extras.doctor.__main__", "record.py": "extras.doctor.record"}
COMMAND = '''"""python -m {module}, from the files beside this one."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "files"))
runpy.run_module("{module}", run_name="__main__")
'''


def imported_files():
    """The repository's files that the commands import, on top of a file or inside of a function,
    and the commands."""
    finder = ModuleFinder(path=[str(HERE)])  # finds neither torch nor Python's library
    for module in COMMANDS.values():
        finder.import_hook(module)
    paths = [module.__file__ for module in finder.modules.values()]
    return sorted(Path(path) for path in paths if path)  # None: built into Python


def copy_doctor(folder):
    """ValueError if folder/doctor is there."""
    doctor = Path(folder) / "doctor"
    require(not doctor.exists(), f"{doctor} is there; remove it, or name another folder")
    files = imported_files()
    for path in files:
        copy = doctor / "files" / path.relative_to(HERE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for name, module in COMMANDS.items():
        (doctor / name).write_text(COMMAND.format(module=module))
    print(f"{len(files)} files in {doctor / 'files'}")


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", help="gets the folder doctor")
    try:
        copy_doctor(parser.parse_args().folder)
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
