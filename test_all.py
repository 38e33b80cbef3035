"""Runs every test: python test_all.py [flags of pytest, as -k zero]. The claims are in tests/.

Two processes run the tests, each a file at a time; -n 0 runs all in this one, as for --pdb."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    flags = ["-q", "-ra", "-n", "2", "--dist", "loadfile"]
    sys.exit(pytest.main([*flags, str(Path(__file__).parent / "tests"), *sys.argv[1:]]))
