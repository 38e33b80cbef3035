"""Runs every test: python test_all.py [flags of pytest, as -k zero]. The claims are in tests/."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-x", str(Path(__file__).parent / "tests"), *sys.argv[1:]]))
