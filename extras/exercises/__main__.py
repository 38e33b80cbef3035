"""Write the techniques yourself: each exercise is one file in extras/exercises/, tested on real
processes.

    python -m extras.exercises                 the list, and what is solved
    python -m extras.exercises 3               test exercise 3: right, or what differs
    python -m extras.exercises 3 --hint        the next hint
    python -m extras.exercises quiz            questions with a number for an answer
    python -m extras.exercises break           fifteen wrong lines: does a loss curve show them?
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from run.config import Parser
from run.files import refuse_foreign
from run.signals import end_quietly

FOLDER = Path(__file__).parent
# In FOLDER: {name of an exercise: {"solved": hash of its file, "hints": number of hints shown}}
KEPT_IN = "solved.json"


def hash_of(name):
    return hashlib.sha256(Path(FOLDER, f"{name}.py").read_bytes()).hexdigest()


def read_progress(folder):
    """The content of KEPT_IN; {} if the file is not there, or cannot be read."""
    with suppress(OSError, ValueError):
        return json.loads(Path(folder, KEPT_IN).read_text())
    return {}


def keep(folder, progress):
    Path(folder, KEPT_IN).write_text(json.dumps(progress, indent=1))


def state_of(name, progress):
    """The state of an exercise: "to do", "begun", "solved", or "changed since it was solved"."""
    solved = progress.get(name, {}).get("solved")
    if solved is None:
        text = Path(FOLDER, f"{name}.py").read_bytes()  # in whatever encoding
        return "to do" if b"raise NotImplementedError" in text else "begun"
    return "solved" if solved == hash_of(name) else "changed since it was solved"


def overview(exercises, progress):
    """Yields the lines of the list."""
    for number, exercise in enumerate(exercises, 1):
        yield (f"{number:3}  extras/exercises/{exercise.name + '.py':28} {exercise.title:52} "
               f"{state_of(exercise.name, progress)}")
    yield ""
    yield ("Write the body; python -m extras.exercises 1 tests the first, 1 --hint helps, quiz "
           "asks, break shows wrong lines")


def next_hint(exercise, progress):
    """The next hint or, if all were shown, the last one again. Counts it in `progress`."""
    entry = progress.setdefault(exercise.name, {})
    shown = min(entry.get("hints", 0), len(exercise.hints) - 1)
    entry["hints"] = shown + 1
    return f"hint {shown + 1} of {len(exercise.hints)}: {exercise.hints[shown]}"


def test(number, exercise, progress):
    """Test an exercise, and print the result. Returns the exit code. If the attempt is right, notes
    that in `progress`."""
    from extras.exercises.catalogue import RANKS
    from extras.exercises.start import run_on_ranks
    print(f"exercise {number}, {exercise.title}: extras/exercises/{exercise.name}.py on "
          f"{RANKS} processes", flush=True)
    report = run_on_ranks(exercise, Path(FOLDER, f"{exercise.name}.py"))
    if report.kind != "right":
        print(f"{report.kind}: {report.line}")
        return 1
    print("right", *report.facts, sep="\n  ")
    print("the repository's form:", exercise.where)
    progress.setdefault(exercise.name, {})["solved"] = hash_of(exercise.name)
    return 0


def check_picture(svg):
    """Fail now, and not after the trainings. ValueError: the file holds something else than a
    picture. OSError: it cannot be written."""
    refuse_foreign("--svg", svg, "<svg ")  # a file that begins otherwise is not overwritten
    Path(svg).touch()


def break_all_lines(svg):
    """Print the table of the wrong lines. If a file is given, svg, write the picture into it."""
    from extras.exercises.break_it import SEEDS, STEPS, break_all, diffs, outcome_table
    from extras.exercises.panels import panels_svg
    from extras.exercises.wrong_lines import WRONG_LINES

    def show(text):
        """On a terminal a line that the next one writes over."""
        if sys.stdout.isatty():
            print(f"\x1b[K{text}", end="\r", flush=True)

    print(f"{len(WRONG_LINES)} wrong lines train for {STEPS} steps each, and right runs of "
          f"{len(SEEDS)} seeds", flush=True)
    rows, rights = break_all(show)
    print()
    print(*outcome_table(rows, rights), *diffs(rows), sep="\n")
    if svg:
        Path(svg).write_text(panels_svg(rows, rights))


def main():
    end_quietly()
    parser = Parser(__doc__)
    parser.add_argument("which", nargs="?", default="", metavar="N",
                        help="a number, quiz or break")
    parser.add_argument("--hint", action="store_true", help="show the next hint of exercise N")
    parser.add_argument("--svg", metavar="FILE", help="with break: write the picture there, too")
    args = parser.parse_args()
    if args.svg and args.which != "break":
        parser.error("--svg is for break only: python -m extras.exercises break --svg FILE")
    if args.which == "quiz" and not args.hint:
        from extras.exercises.quiz import ask_all
        sys.exit(ask_all(input, print))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch prints no warnings
    if args.which == "break" and not args.hint:
        if args.svg:
            try:
                check_picture(args.svg)
            except (ValueError, OSError) as error:
                parser.error(error)
        break_all_lines(args.svg)
        return
    from extras.exercises.catalogue import EXERCISES
    progress = read_progress(FOLDER)
    if not args.which and not args.hint:
        print(*overview(EXERCISES, progress), sep="\n")
        return
    if not args.which.isdecimal() or not 1 <= int(args.which) <= len(EXERCISES):
        if args.hint:
            parser.error(f"--hint needs the number of an exercise, 1 to {len(EXERCISES)}: "
                         "python -m extras.exercises 3 --hint")
        parser.error(f"{args.which}: say which exercise, 1 to {len(EXERCISES)}, quiz or break")
    exercise = EXERCISES[int(args.which) - 1]
    code = 0
    if args.hint:
        print(next_hint(exercise, progress))
    else:
        code = test(int(args.which), exercise, progress)
    try:
        keep(FOLDER, progress)
    except OSError as error:
        parser.error(error)
    sys.exit(code)


if __name__ == "__main__":
    main()
