"""Parser: the argparse.ArgumentParser of the commands. A wrong command line prints one line.
(data/prepare.py and tests/mutants.py make parsers of their own.)

Here too: the flags of sample.py and run/export.py. These programs read their flags before they
import torch, so that --help and a wrong flag do not wait for torch. The flags of train.py:
run/config.py.
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
