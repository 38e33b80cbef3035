"""Which bug is this? Compares two steps of a run (MINE) with those of one process (REFERENCE).

    python train.py --dump reference --dtype float64         one process: REFERENCE
    torchrun train.py --tp 2 --pp 2 --dump mine              any layout, fork or trainer: MINE
    python -m run.doctor reference mine

Exit code 0: equal, to the rounding of MINE's dtype, which is measured. 1: something differs; the
first thing that does is named where a known bug gives the same numbers. 2: cannot be compared.
"""

import sys

from run.command import doctor_flags
from run.signals import end_quietly

if __name__ == "__main__":
    end_quietly()
    sys.argv[0] = "doctor"  # with which error lines begin
    args = doctor_flags(__doc__).parse_args()  # a wrong flag ends the process here, without torch

from run.config import fail
from run.doctor.diagnose import diagnose
from run.doctor.dump import read_dump
from run.doctor.words import lines

# Parameters x tokens up to which all known bugs are tried without --deep: seconds
SMALL = 1 << 34


def main():
    try:
        reference = read_dump(args.reference)
        mine = read_dump(args.mine)
        equal = True
        for line, is_equal in lines(diagnose(reference, mine, args.deep or is_small(mine)),
                                    mine.layout):
            print(line, flush=True)
            equal = equal and is_equal
    except ValueError as error:
        fail(error)
    print("equal" if equal else "not equal")
    sys.exit(not equal)


def is_small(mine):
    tokens = mine.ids(1)
    n = sum(weight.numel() for weight in mine.weights(0).values())
    return tokens is None or n * tokens.numel() < SMALL


if __name__ == "__main__":
    main()
