"""What happens to anyone: a wrong file name, a full disk, a learning rate far too high. What is not
ours is neither overwritten nor deleted, and a command ends with one line that says why."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sample
import train
from data import prepare
from data.batches import Data
from model import GPT
from run import checkpoint, config, export, launch, log, signals, tensorfile, weights
from sizes import GPTConfig
from tests.harness import HERE
from tests.isolation import as_it_was
from tests.pool import HANG
from tests.programs import (
    refuse_an_unknown_flag_before_torch,
    refuse_to_write_over,
    tree,
)
from tests.runs import Run, _main, command, flags, one_line

# ---- the first minute ----


@pytest.mark.parametrize("argv", ["--help", "--stepz 3", "--tp 3", "--tp 2 --dp 2 --zero 9"])
def test_help_and_wrong_flags_do_not_wait_for_torch(argv):
    done = command("-X", "importtime", "train.py", *argv.split())
    assert done.returncode in (0, 2) and "torch" not in re.findall(r"\| +(\S+)", done.stderr)


PROGRAMS = ["sample.py", "-m run.export", "-m tests.first_gpu", "data/prepare.py",
            "tests/mutants.py"]


def test_an_unknown_flag_of_any_program_is_one_line_before_torch_is_imported():
    refuse_an_unknown_flag_before_torch(PROGRAMS)


def test_a_line_about_a_name_with_a_line_break_is_one_line(capsys, monkeypatch):
    for main, argv in ((train.main, ["train.py", "--data", "a\nb"]),
                       (train.main, ["train.py", "--a\nb"]),
                       (sample.main, ["sample.py", "--out", "a\nb"]),
                       (export.main, ["export.py", "--out", "a\nb", "--to", "c"]),
                       (prepare.main, ["prepare.py", "a\nb"])):
        assert "a\\nb" in one_line(main, argv, capsys, monkeypatch)


def test_ranks_get_the_interpreters_flags(monkeypatch):
    started = []
    monkeypatch.setattr(launch.subprocess, "Popen", lambda args, **more: started.extend(args))
    given = "-Werror -X utf8 -m extras.planner --measure".split()
    monkeypatch.setattr(sys, "orig_argv", ["python3", *given])
    launch.start_rank(0, 2, "file:///store")
    assert started == [sys.executable, *given]
    monkeypatch.undo()
    done = subprocess.run([sys.executable, "-O", "-c", "from run import launch; "
                           "launch.subprocess.Popen = lambda args, **more: print(args); "
                           "launch.start_rank(0, 2, '')"],
                          text=True, capture_output=True, cwd=HERE, timeout=HANG)
    assert "'-O'" in done.stdout, done


def test_checking_the_flags_leaves_no_file_open(corpus, tmp_path):
    cfg = config.Config(data=corpus, out=str(tmp_path), metrics=str(tmp_path / "m"), device="cpu",
                        block_size=8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config.check(cfg, 1)
        config.check_outputs(cfg)
    assert not [warning for warning in said if warning.category is ResourceWarning]


def _start_one_of_two(rank, size, store, started):
    if rank == 1:
        raise OSError(24, "Too many open files")
    started.append(subprocess.Popen(["sleep", "600"]))
    return started[0]


def test_a_rank_that_cannot_be_started_ends_those_that_were(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "start_rank", partial(_start_one_of_two, started=started))
    with as_it_was(), pytest.raises(OSError, match="Too many open files"):
        launch.launch(2)
    assert started[0].poll() == -signal.SIGKILL


def _main_with_few_files(rank, *args):
    """Rank 1 may open no more files once the ranks have met."""
    digest = checkpoint.digest

    def digest_without_files(*path):
        if rank == 1:
            signals.parent = os.getppid()  # like a rank that torchrun has started
            lowest_free = os.dup(0)
            os.close(lowest_free)
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, most))
        return digest(*path)

    checkpoint.digest = digest_without_files
    _main(rank, *args)


def test_too_few_open_files_are_one_line(corpus, tmp_path):
    run = Run(2, flags(corpus, tmp_path / "out", dp=2), tmp_path, fn=_main_with_few_files)
    assert run.wait() == [1, 1]
    assert run.read() == f"train.py: {tmp_path}/out/.lock: Too many open files\n"


# ---- nobody reads what is printed, or the disk is full ----


def _main_into_a_fifo(rank, size, port, argv, folder, limit):
    """stdout is a pipe, whose reader goes."""
    pipe = Path(folder, "stdout")  # _main opens it
    if rank == 0:
        os.mkfifo(pipe)
    while not pipe.exists():
        time.sleep(0.01)
    _main(rank, size, port, argv, folder, limit)


def test_a_run_whose_reader_has_gone_saves_and_ends(corpus, tmp_path):
    """... like a run whose terminal is closed: | head."""
    run = Run(2, flags(corpus, tmp_path / "out", dp=2, steps=10**6), tmp_path,
              fn=_main_into_a_fifo)
    run.until((run.folder / "stdout").exists)
    with open(run.folder / "stdout") as pipe:
        for line in pipe:
            if line.startswith("step      2"):
                break
    assert run.wait() == [0, 0] and run.read() == ""
    assert checkpoint.newest(tmp_path / "out")


def say(monkeypatch, path):
    """What becomes of two lines that a run's Log prints into `path`."""
    lines = object.__new__(log.Log)
    lines.silent = False
    with open(path, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        lines.say("one")
        lines.say("two")
        monkeypatch.undo()


def test_a_run_goes_on_where_the_disk_of_its_lines_is_full_and_says_so(monkeypatch, capsys):
    say(monkeypatch, "/dev/full")
    assert capsys.readouterr().err.endswith(
        ": standard output: No space left on device; the run goes on without\n")


def test_a_program_ends_quietly_also_under_other_names_of_a_signal():
    assert signals.name_of(9) == "SIGKILL" and signals.name_of(40) == "signal 40"


# ---- a signal when all is done ----


def _main_with_ctrl_c(rank, *args, at):
    """Rank 1 gets Ctrl-C while it validates: `at` is how many batches the validation may have, None
    for the last one. Rank 0 prints each batch."""
    def validation(self, cfg, mesh, batches=None, real=Data.validation):
        windows, each = real(self, cfg, mesh, batches)

        def watched():
            for i, batch in enumerate(each):
                if batches == at and rank == 1 and i == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                if batches == at and rank == 0:
                    print("batch", i, flush=True)
                yield batch

        return windows, watched()

    Data.validation = validation
    _main(rank, *args)


@pytest.mark.parametrize("at,last", [(8, 2), (None, 4)], ids=["midway", "at the end"])
def test_ctrl_c_during_a_validation_ends_the_run_with_its_checkpoint(corpus, tmp_path, at, last):
    argv = flags(corpus, tmp_path / "out", dp=2, eval_interval=2, eval_batches=8, save_interval=2)
    run = Run(2, argv, tmp_path, fn=partial(_main_with_ctrl_c, at=at))
    assert run.wait() == [0, 0] and run.read() == ""
    said = run.read("stdout")
    assert re.findall(r"batch \d+", said) == ["batch 0", "batch 1"]
    newest = checkpoint.newest(tmp_path / "out")
    assert said.endswith(f"stopped by a signal; --resume auto goes on from {newest}\n")
    assert int(newest.name[5:]) == last + (at is not None)  # midway: after one more step


def test_ctrl_c_during_the_sample_leaves_it_out():
    with as_it_was():
        with signals.skip_on_stop():
            signal.raise_signal(signal.SIGINT)
            pytest.fail("went on")
        signal.raise_signal(signal.SIGTERM)  # nothing is left to do: ignored


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


ONE_FILE = {  # flags (here D is the folder of --data, O that of --out) -> what the line says
    "--metrics m --trace m": "--trace m would write over --metrics m",
    "--metrics m --trace sub/../m": "--trace sub/../m would write over --metrics m",
    "--metrics m --trace ./m": "would write over",
    "--metrics m --trace link-to-m": "--trace link-to-m would write over --metrics m",
    "--metrics old --trace hard-link-of-old": "would write over",
    "--metrics m --trace linked-folder/m": "would write over",
    "--metrics D/meta.pkl": "--metrics D/meta.pkl would write over --data D",
    "--trace D/vocab.tiktoken": "--trace D/vocab.tiktoken would write over --data D",
    "--metrics D/train.bin": "would write over",
    "--trace link-to-val": "--trace link-to-val would write over --data D",
    "--metrics O/.lock": "--metrics O/.lock would write over --out O",
    "--trace O/step-00000004/model.safetensors": "would be in the checkpoint",
    "--trace O/step-00000009.tmp/trace": "would be in the checkpoint",
    "--metrics other/step-00000004/log": "would be in the checkpoint",
    "--metrics sub/config.json --init-from sub/w": "would write over --init-from sub/w",
    "--trace sub/w --init-from sub/w": "would write over --init-from sub/w",
    "--init-from O/step-00000004/model.safetensors": "which this run may replace; name another",
    "--init-from O/step-00000004.old.tmp/model.safetensors": "which this run may replace"}


@pytest.mark.parametrize("words,says", ONE_FILE.items())
def test_no_output_is_an_input_another_output_or_in_a_checkpoint(
        corpus, trained, tmp_path, words, says, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, "D")
    shutil.copytree(trained / "step-00000004", "other/step-00000004")
    Path("sub").mkdir()
    Path("linked-folder").symlink_to(".")
    Path("link-to-m").symlink_to("m")
    Path("link-to-val").symlink_to("D/val.bin")
    Path("old").write_text('{"step": 0}\n')
    os.link("old", "hard-link-of-old")
    before = tree(tmp_path)
    argv = ["train.py", *flags("D", "O"), *words.split()]
    line = one_line(train.main, argv, capsys, monkeypatch)
    assert says in line and line.rstrip().endswith(("two files", "another file", "another --out"))
    assert tree(tmp_path) == before


def _main_with_swapped_files(rank, size, port, argv, folder, limit):
    """After the flags were checked, other files take the places of --metrics and --trace."""
    def agree(*args, real=checkpoint.agree):
        for name in ("m", "t"):
            Path(folder).with_name(name).write_text("three years of work\n")
        return real(*args)

    checkpoint.agree = agree
    _main(rank, size, port, argv, folder, limit)


def test_whose_a_file_is_is_asked_again_when_it_is_written(corpus, tmp_path):
    argv = flags(corpus, tmp_path / "out", metrics=tmp_path / "m", trace=tmp_path / "t")
    run = Run(1, argv, tmp_path, fn=_main_with_swapped_files)
    assert run.wait() == [0], run.read()
    assert run.read().startswith(f"train.py: --metrics {tmp_path}/m: ")
    assert run.read().endswith("; the run goes on without\n") and run.read().count("\n") == 1
    assert "LOST, --trace" in run.read("stdout")
    for name in "mt":
        assert (tmp_path / name).read_text() == "three years of work\n"


def test_a_metrics_file_that_cannot_be_opened_does_not_end_the_run(tmp_path, capsys):
    lines = object.__new__(log.Log)
    lines.silent, lines.cfg = False, SimpleNamespace(metrics="m")
    lines.lose_metrics(OSError(28, "No space left on device", "m"))
    assert "--metrics m: No space left on device; the run goes on" in capsys.readouterr().err


@pytest.mark.parametrize("main,line,says", [
    (prepare.main, "prepare.py train.bin --out .", "--out . has the source train.bin, which would"),
    (export.main, "export.py --out run --to run/step-00000010", "has a checkpoint's name; name"),
    (export.main, "export.py --out run --to /proc/x", "/proc/x.part: No such file or directory")])
def test_what_other_commands_would_write_over_stays(
        trained, tmp_path, main, line, says, capsys, monkeypatch):
    shutil.copytree(trained, tmp_path / "run")
    refuse_to_write_over(["train.bin"], main, line, says, tmp_path, capsys, monkeypatch)


def test_export_overwrites_nothing(trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    argv = ["export.py", "--out", out, "--to", out / "step-00000004"]
    assert "File exists" in one_line(export.main, argv, capsys, monkeypatch)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (tmp_path / "new.part").mkdir()
    argv[-1] = tmp_path / "new"
    assert one_line(export.main, argv, capsys, monkeypatch) == (
        f"export.py: {tmp_path}/new.part is left of an export that was stopped; delete it\n")


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


# ---- manifests that are forged, with a right seal ----


def forge(folder, change):
    """change(manifest), then seal it and write it again."""
    path = folder / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps({**manifest, "seal": checkpoint.seal(manifest)}))


@pytest.mark.parametrize("config", ["gone", [], None, "x", 7, {"optimizer": ["adamw"]},
                                    {"optimizer": "x"}], ids=str)
def test_a_manifest_whose_config_is_no_config_is_one_line(
        corpus, trained, tmp_path, config, capsys, monkeypatch):
    last = tmp_path / "last"
    shutil.copytree(trained / "step-00000004", last)
    forge(last, lambda manifest: manifest.pop("config") if config == "gone" else
          manifest.update(config=config))
    argv = ["train.py", *flags(corpus, tmp_path / "out", resume=last)]
    line = one_line(train.main, argv, capsys, monkeypatch)
    assert line.startswith(f"train.py: {last}/manifest.json: damaged (it")
    assert line.endswith("); take another checkpoint\n")


HOSTILE = (0, 1, -1, 3, 10**7, 10**9, 2**31, 2**53, 2**64, 10**400, 1.0, 1e300, float("inf"),
           float("nan"), True, None, "4", "", [], [4], {}, {"a": 1})
LEFT_OUT = object()


def test_every_value_of_a_manifest_is_checked_before_a_model_is_built(
        trained, tmp_path, capsys, monkeypatch):
    """Each is replaced by each of HOSTILE, and left out. (Also the sound one ends with a line: the
    corpus of the tests has no tokenizer of its size.)"""
    folder = tmp_path / "last"
    shutil.copytree(trained / "step-00000004", folder)
    path = folder / checkpoint.MANIFEST
    sound = path.read_text()
    sizes = GPTConfig(**json.loads(sound)["model"])
    built = []
    kind_of = weights.kind_of
    monkeypatch.setattr(weights, "kind_of", lambda config: built.append(config) or kind_of(config))
    places = [(name,) for name in json.loads(sound)]
    places += [("model", name) for name in json.loads(sound)["model"]]
    places += [("checksums", checkpoint.MODEL), ("config", "optimizer")]
    for *above, name in places:
        for value in (*HOSTILE, LEFT_OUT):
            path.write_text(sound)

            def change(manifest, above=above, name=name, value=value):
                for key in above:
                    manifest = manifest[key]
                if value is LEFT_OUT:
                    del manifest[name]
                else:
                    manifest[name] = value

            forge(folder, change)
            one_line(sample.main, ["sample.py", "--out", folder], capsys, monkeypatch)
            for shape in built:
                assert replace(shape, n_head=2, top_k=2, n_layer=2) == sizes, (name, value)
                assert shape.n_layer <= 2


@pytest.mark.parametrize("name,value", [("n_layer", 10**7), ("n_embd", 10**9), ("n_experts", 10**9),
                                        ("vocab_size", 2**31), ("block_size", 2**31)])
def test_no_model_is_built_that_is_larger_than_its_file(
        trained, tmp_path, name, value, capsys, monkeypatch):
    shutil.copytree(trained / "step-00000004", tmp_path / "last")
    forge(tmp_path / "last", lambda manifest: manifest["model"].update({name: value}))
    monkeypatch.setattr(weights, "kind_of", lambda config: pytest.fail("builds it"))
    for main, argv in ((sample.main, ["sample.py", "--out", tmp_path / "last"]),
                       (export.main, ["export.py", "--out", tmp_path / "last", "--to", "x"])):
        line = one_line(main, argv, capsys, monkeypatch)
        assert f"{tmp_path}/last/model.safetensors, tensor transformer." in line


# ---- a checkpoint that a run prunes while another program reads it ----


def save_another_and_prune(out):
    """What a run with --keep 1 does: step 6 is saved, steps 2 and 4 are deleted."""
    six = out / "step-00000006"
    if not six.exists():
        shutil.copytree(out / "step-00000004", six)
        forge(six, lambda manifest: manifest.update(number=manifest["number"] + 1))
        for step in (2, 4):
            checkpoint.remove(out / f"step-{step:08d}")


@pytest.mark.parametrize("when", ["while its header is read", "while its weights are read"])
def test_a_checkpoint_that_is_pruned_while_it_is_read_is_looked_up_again(
        trained, tmp_path, when, capsys, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    if when == "while its header is read":
        read = tensorfile.read_header
        monkeypatch.setattr(tensorfile, "read_header",
                            lambda path: save_another_and_prune(out) or read(path))
    else:
        read = weights.find_tensors
        monkeypatch.setattr(weights, "find_tensors",
                            lambda *args: save_another_and_prune(out) or read(*args))
    line = one_line(sample.main, ["sample.py", "--out", out], capsys, monkeypatch)
    assert line.startswith("sample.py: the tokenizer has 256 tokens")  # after all has been read
    monkeypatch.undo()
    assert [folder.name for _, folder in checkpoint.complete(out)] == ["step-00000006"]


def _main_as_a_program(*args):
    signals.before_training()
    _main(*args)


def test_a_run_in_a_folder_of_any_name_resumes(corpus, tmp_path):
    """A name may hold bytes that are no characters."""
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    for _ in range(2):
        run = Run(2, flags(corpus, out, dp=2, resume="auto"), tmp_path, fn=_main_as_a_program)
        assert run.wait() == [0, 0], run.read()
    assert "nothing left to do" in run.read("stdout")


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


@pytest.mark.parametrize("name,says", [("metrics", "is a pipe"),
                                       ("init_from", "is not a regular file")])
def test_a_pipe_is_not_waited_for(corpus, tmp_path, name, says, capsys, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    argv = ["train.py", *flags(corpus, tmp_path / "out", **{name: tmp_path / "pipe"})]
    assert says in one_line(train.main, argv, capsys, monkeypatch)


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
