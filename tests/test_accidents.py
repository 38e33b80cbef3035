"""What happens to anyone: a wrong file name, a full disk, a learning rate far too high. What is not
ours is neither overwritten nor deleted, and a command ends with one line that says why."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sample
import train
from model import GPT
from run import checkpoint, export, tensorfile
from show import pictures
from sizes import GPTConfig
from tests.harness import HERE
from tests.pool import HANG
from tests.runs import Run, _main, command, flags, one_line

# ---- the first minute ----


@pytest.mark.parametrize("argv", ["--help", "--stepz 3", "--tp 3", "--tp 2 --dp 2 --zero 9"])
def test_help_and_wrong_flags_do_not_wait_for_torch(argv):
    done = command("-X", "importtime", "train.py", *argv.split())
    assert done.returncode in (0, 2) and "torch" not in re.findall(r"\| +(\S+)", done.stderr)


# ---- nothing is destroyed ----


@pytest.mark.parametrize("name,says", [
    ("metrics", "holds something else than --metrics writes; name another file"),
    ("trace", "holds something else than --trace writes; name another file")])
def test_a_file_that_is_not_ours_is_not_overwritten(
        corpus, tmp_path, name, says, capsys, monkeypatch):
    path = tmp_path / "thesis.txt"
    path.write_text("three years of work\n")
    argv = ["train.py", *flags(corpus, tmp_path / "out"), f"--{name}", path]
    assert says in one_line(train.main, argv, capsys, monkeypatch)
    assert path.read_text() == "three years of work\n"


def test_metrics_and_trace_need_two_files(corpus, tmp_path, capsys, monkeypatch):
    argv = ["train.py", *flags(corpus, tmp_path / "out", metrics=tmp_path / "x"), "--trace",
            tmp_path / "x"]
    assert "take two files" in one_line(train.main, argv, capsys, monkeypatch)


def test_export_overwrites_nothing(trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    argv = ["export.py", "--out", out, "--to", out / "step-00000004"]
    assert "File exists" in one_line(export.main, argv, capsys, monkeypatch)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_users_file_in_a_checkpoints_folder_stays(trained, tmp_path):
    """Also where the folder looks half written, is a link, or is to be pruned."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    shutil.copytree(trained, out)
    shutil.copytree(trained / "step-00000004", elsewhere)
    mine = [out / "step-00000001" / "notes", out / "step-00000002" / "notes",
            out / "step-00000009.tmp" / "notes"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (out / "step-00000008.tmp").symlink_to(elsewhere)
    (out / "step-00000007.tmp").mkdir()  # ours: an interrupted save
    (out / "step-00000007.tmp" / checkpoint.MODEL).touch()
    checkpoint.prune(out, keep=1)
    assert all(path.read_text() == "mine" for path in mine)
    assert len([*elsewhere.iterdir()]) == 3 and not (out / "step-00000007.tmp").exists()
    assert [folder.name for _, folder in checkpoint.complete(out)] == ["step-00000004"]


# ---- a run that diverges, a world that is broken ----


@pytest.mark.parametrize("name,value", [("lr", 1e308), ("lr", 1e200), ("weight_decay", 1e200)])
def test_a_run_that_diverges_says_so(corpus, tmp_path, name, value):
    run = Run(1, flags(corpus, tmp_path / "out", eval_interval=2, steps=3, **{name: value}),
              tmp_path)
    assert run.wait() == [1] and run.read().count("\n") == 1, run.read()
    assert "not finite" in run.read() and "last good checkpoint: " in run.read()


@pytest.mark.parametrize("file", [checkpoint.OPTIMIZER, checkpoint.MODEL])
@pytest.mark.parametrize("how", ["missing", "cut off"])
def test_resume_auto_goes_to_the_last_whole_checkpoint(trained, tmp_path, file, how, capsys):
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    path = out / "step-00000004" / file
    path.unlink() if how == "missing" else os.truncate(path, path.stat().st_size - 1)
    assert checkpoint.newest(out).name == "step-00000002"
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "step-00000004 skipped: " in error and file in error


def _other_code(rank, *args):
    sources = checkpoint.sources
    checkpoint.sources = lambda: sources()[rank:]
    _main(rank, *args)


def test_nodes_with_other_code_are_refused(corpus, tmp_path):
    run = Run(2, flags(corpus, tmp_path / "out", dp=2), tmp_path, fn=_other_code)
    assert run.wait() == [2, 2]
    assert run.read() == "train.py: rank 1 has other code than rank 0; all need the same\n"
    assert {Path(train.__file__), HERE / "model.py"} <= {*checkpoint.sources()}


def test_experts_count_in_the_check_of_memory(corpus, tmp_path, capsys, monkeypatch):
    argv = ["train.py", *flags(corpus, tmp_path / "out", n_embd=128), "--experts", 10**6]
    assert "of this machine's" in one_line(train.main, argv, capsys, monkeypatch)


def test_a_closed_terminal_does_not_end_a_run(corpus, tmp_path):
    argv = flags(corpus, tmp_path / "out", metrics=tmp_path / "log", resume="auto")
    script = f"exec {sys.executable} train.py {' '.join(map(str, argv))} >&- 2>&-"
    assert subprocess.run(["bash", "-c", script], cwd=HERE, timeout=HANG).returncode == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 4
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"GPT of" in
                path.read_bytes()]  # no line went into another file


@pytest.mark.parametrize("name,says", [("metrics", "is a pipe"), ("init_from", "not a file")])
def test_a_pipe_is_not_waited_for(corpus, tmp_path, name, says, capsys, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    argv = ["train.py", *flags(corpus, tmp_path / "out", **{name: tmp_path / "pipe"})]
    assert says in one_line(train.main, argv, capsys, monkeypatch)


@pytest.mark.parametrize("argv", ["plan.py --model gpt2 --gpus 8", "schedules.py 1f1b 4 8"])
def test_a_full_disk_is_one_line(argv):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, *argv.split()], stdout=full, text=True, cwd=HERE,
                              stderr=subprocess.PIPE, timeout=HANG)
    assert done.returncode == 1
    assert done.stderr == f"{argv.split()[0]}: No space left on device\n"


def test_pictures_refuse_what_is_not_their_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "x").write_text("[1]\n")
    argv = ["pictures.py", "--svg", tmp_path, "--metrics", tmp_path / "x"]
    assert "not a file that train.py --metrics wrote" in one_line(
        pictures.main, argv, capsys, monkeypatch)


def test_too_many_microbatches_are_refused_at_once():
    done = command("schedules.py", "1f1b", "4", "1000000000000")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "a million" in done.stderr


def test_too_many_samples_are_refused(trained, capsys, monkeypatch):
    argv = ["sample.py", "--out", trained, "--samples", 10**9]
    assert "must be from 1 to 1000" in one_line(sample.main, argv, capsys, monkeypatch)


def test_a_temperature_near_zero_takes_the_likeliest():
    model = GPT(GPTConfig(50, 8, 1, 2, 8))
    for param in model.parameters():
        torch.nn.init.normal_(param)
    assert sample.generate(model, [1], 6, temperature=1e-300) == sample.generate(
        model, [1], 6, temperature=0)


def test_a_tensor_of_any_name_is_named_in_one_line(trained, tmp_path, corpus, capsys, monkeypatch):
    path = tmp_path / "x.safetensors"
    text = json.dumps({"a\nb": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)  # 36 bytes are missing
    with pytest.raises(tensorfile.CheckpointError) as error:
        tensorfile.read_header(path)
    assert "\n" not in str(error.value) and "a\\nb" in str(error.value)
