"""The doctor that was copied out works without this repository."""

import re
import shutil
import sys
from modulefinder import ModuleFinder

import pytest
import torch

from extras.doctor import alone
from tests.harness import HERE
from tests.runs import command, one_line, rewrite

FLAGS = "--n-layer 2 --n-head 2 --n-embd 16 --block-size 12 --batch-size 12 --microbatches 3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Has a copy of the doctor and nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    alone.copy_doctor(folder)
    return folder


def run_alone(folder, *args):
    """python -m *args in the folder, without PYTHONPATH. It loads no file of the repository."""
    run = command("-v", "-s", "-m", *args, cwd=folder, env={"PYTHONPATH": ""})
    mine = [path for path in alone.imported_files() if str(path) in run.stderr]
    copies = str(folder / "doctor" / "files" / "run" / "config.py")
    assert copies in run.stderr and not mine, mine
    return run


def test_the_copy_needs_numpy_and_torch_only():
    """... and a tokenizer's packages where data are prepared; to compare loads none of these."""
    finder = ModuleFinder(path=[str(HERE)])
    for module in alone.COMMANDS.values():
        finder.import_hook(module)
    others = {name.split(".")[0] for name in finder.badmodules} - sys.stdlib_module_names
    assert others == {"numpy", "torch", "regex", "tiktoken", "tokenizers"}


def test_the_copy_holds_no_test_and_no_other_room():
    rooms = {path.relative_to(HERE).parts[:2] for path in alone.imported_files()
             if path.is_relative_to(HERE / "extras")}
    assert rooms == {("extras", "__init__.py"), ("extras", "doctor")}
    assert not any("tests" in path.relative_to(HERE).parts for path in alone.imported_files())


def test_the_copy_makes_a_reference_and_names_a_bug(folder, corpus):
    run = run_alone(folder, "doctor.record", "reference", *FLAGS.split(), "--data", corpus)
    assert run.stdout.endswith("dump of two steps in reference\n"), run.stdout

    mine = folder / "mine"
    shutil.copytree(folder / "reference", mine)
    run = run_alone(folder, "doctor", "reference", "mine")
    assert (run.returncode, run.stdout.splitlines()[-1]) == (0, "equal"), run.stdout
    loaded = set(re.findall(r"^import '(\w+)'", run.stderr, re.MULTILINE))
    assert "torch" in loaded and not loaded & {"regex", "tiktoken", "tokenizers"}

    def triple(tensors):
        for name, (shape, data) in tensors.items():
            tripled = 3 * torch.frombuffer(bytearray(data), dtype=torch.float32)
            tensors[name] = (shape, tripled.numpy().tobytes())

    rewrite(mine / "gradients-1.safetensors", triple, code="F32")
    run = run_alone(folder, "doctor", "reference", "mine")
    assert run.returncode == 1
    assert "-> all gradients: 3 times: not divided by the microbatches\n" in run.stdout, run.stdout


def test_the_folder_is_not_overwritten(folder, capsys, monkeypatch):
    error = one_line(alone.main, ["alone.py", folder], capsys, monkeypatch)
    assert error == f"alone.py: {folder / 'doctor'} is there; remove it, or name another folder\n"
