"""Parser: the argparse.ArgumentParser of the commands. A wrong command line prints one line.
(data/prepare.py and tests/mutants.py make parsers of their own.)

Here too: the flags of sample.py, run/export.py, bench.py, tests/first_gpu.py and extras/show/.
These programs read their flags before they import torch, so that --help and a wrong flag do not
wait for torch. This file can be imported without torch; the files with their main() functions
cannot. The flags of train.py: run/config.py.
"""

import argparse

from run.signals import in_words, program


class Parser(argparse.ArgumentParser):
    """ArgumentParser, but a wrong command line prints one line and exits with code 2, and flags
    cannot be abbreviated."""

    def __init__(self, description):
        super().__init__(prog=program(), description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        """Called by argparse, with a text, and by main() of a command, with an exception."""
        self.exit(2, f"{self.prog}: {in_words(message)}\n")

    def print_help(self, file=None):
        """Raises OSError if the output cannot be written; argparse's print_help() hides that."""
        print(self.format_help(), file=file, end="")


def sample_flags():
    parser = Parser("Text from a checkpoint.")
    parser.add_argument("--prompt", default="def ", help="the text to go on from (def )")
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--data", help="folder of the tokenizer (the one of the training data)")
    parser.add_argument("--samples", type=int, default=1, help="number of continuations (1)")
    parser.add_argument("--max-tokens", type=int, default=200, help="length of each (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, default=50,
                        help="draw from the K likeliest tokens; 0: from all (50)")
    parser.add_argument("--seed", type=int, default=1337, help="decides all draws (1337)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(cpu)")
    return parser


def export_flags(description):
    parser = Parser(description)
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--to", required=True, help="the folder to write")
    return parser


def bench_flags(description):
    parser = Parser(description)
    parser.add_argument("--quick", action="store_true",
                        help="does it run? small model, two turns per side, rows of up to 4 ranks")
    parser.add_argument("--only", default="", metavar="NAME", help="rows whose name contains it")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--gpu", action="store_true", help="only the rows for one GPU")
    return parser


def first_gpu_flags(description):
    parser = Parser(description)
    parser.add_argument("--dry", action="store_true", help="on CPUs, a small model")
    return parser


def large_batches_flags(description):
    parser = Parser(description)
    parser.add_argument("--out", default="large-batches", help="folder for metrics (large-batches)")
    parser.add_argument("--svg", metavar="FOLDER", help="write large-batches.svg there")
    return parser


def eight_ranks_flags(description):
    parser = Parser(description)
    parser.add_argument("--svg", metavar="FOLDER", required=True, help="write ranks.svg there")
    return parser
