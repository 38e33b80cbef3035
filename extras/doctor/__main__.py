"""Which bug is this? Compares two steps of a run (MINE) with those of one process (REFERENCE).

    python -m extras.doctor.record reference --dtype float64     one process: REFERENCE
    torchrun -m extras.doctor.record mine --tp 2 --pp 2          any layout, fork or trainer: MINE
    python -m extras.doctor reference mine
    python -m extras.doctor reference mine again     AGAIN, a second run of MINE, has the same bits?

Exit code 0: equal, but for the rounding errors of MINE's dtype. 1: something differs: a line for
each comparison says where, and below it are the known bugs that give the same numbers. 2: the two
cannot be compared.
"""

import ctypes
import os
import sys
from itertools import chain

from run.config import Parser
from run.signals import end_quietly

if __name__ == "__main__":
    end_quietly()
    # Let torch's threads sleep while they wait for one another. By default they spin, which on a
    # busy machine takes most of the time. torch reads the variable when it is loaded
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = Parser(__doc__)
    parser.add_argument("reference", help="folder of one process's dump")
    parser.add_argument("mine", help="folder of the dump to examine")
    parser.add_argument("again", nargs="?", help="folder of a second run of MINE: are both equal, "
                        "bit by bit?")
    parser.add_argument("--deep", action="store_true", help="try all known bugs, however large the "
                        "model is (a small one: always)")
    args = parser.parse_args()  # a wrong flag ends the process here, without torch

from extras.doctor.again import check_again
from extras.doctor.diagnose import diagnose
from extras.doctor.dump import read_dump
from extras.doctor.words import lines
from run.config import fail

# Weights of the matrices that a token runs through x tokens of a step, below which all known bugs
# are tried without --deep. (Each bug takes a step in float64 on the CPU.)
SMALL = 1 << 34


def keep_freed_memory():
    """Let malloc keep the memory of tensors that are freed, for the next ones. Left alone, glibc
    gives each large block back to the kernel, and page faults take two fifths of the doctor's
    time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; the numbers are those of its malloc.h
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block of its own from the kernel
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never give the end of the heap back
        libc.mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads, which are the ranks


def is_small(dump):
    """Does a step take little time? dump.model is not None."""
    tokens = dump.ids(1)  # None: no step can be computed, so none takes long
    model = dump.model
    n_weights = model.n_layer * model.block_weights() + model.vocab_size * model.n_embd
    return tokens is None or n_weights * tokens.numel() < SMALL


def main():
    try:
        reference = read_dump(args.reference)
        mine = read_dump(args.mine)
        # For a model of another form --deep tries no more (diagnose.py): do not advise it
        deep = args.deep or mine.model is None or is_small(mine)
        equal = True
        findings = diagnose(reference, mine, deep)
        if args.again:
            findings = chain([check_again(mine, read_dump(args.again))], findings)
        for line, is_equal in lines(findings, mine.layout, deep):
            print(line, flush=True)
            equal = equal and is_equal
    except ValueError as error:
        fail(error)
    print("equal" if equal else "not equal")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    keep_freed_memory()
    main()
