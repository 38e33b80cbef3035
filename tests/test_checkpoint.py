"""Checkpoints: any layout reads any other's, bit for bit; nothing complete is ever deleted; damage
is one line that names file and tensor."""

import json
import math
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

import train
from data.files import FileError
from mesh import Mesh
from run import checkpoint
from run.checkpoint import MANIFEST, MODEL, OPTIMIZER, initial_values
from run.flags import check_layout, parse
from sizes import config_of
from test_all import one_process
from tests.harness import (
    VOCAB,
    Run,
    close,
    edited,
    flags,
    flags_of,
    losses,
    make_trainer,
    ranks,
    records,
    until,
    whole_slices,
)

# ---- any layout reads any other's ----


def assert_holds(trainer, folder):
    """Every slice on this rank has the bits of the checkpoint's full tensor, and the optimizer's
    numbers are the manifest's. Collective."""
    entries = checkpoint.open_tensors(folder / MODEL) | checkpoint.open_tensors(folder / OPTIMIZER)
    held = {f".{kind}": values for kind, values in trainer.optimizer.named_states().items()}
    for kind, values in {"": trainer.reducer.weights, **held}.items():
        for tag, whole in whole_slices(trainer.reducer, values):
            full = checkpoint.read_tensor(entries[tag.name + kind])
            assert torch.equal(whole, tag.slice(full)), tag.name + kind
    manifest = checkpoint.read_manifest(folder)
    for name, value in trainer.optimizer.numbers().items():
        assert value == manifest[name], name


def hop(rank, words, corpus, sizes, step, folder):
    """Load, take one step, save. Returns (loss, the new folder, the optimizer's numbers)."""
    cfg = flags_of(words.split(), corpus, **sizes)
    config = config_of(cfg, VOCAB)
    trainer = train.Trainer(cfg, train.make_mesh(cfg, cfg.device), config,
                            initial_values(cfg, config, folder))
    numbers = trainer.optimizer.numbers()
    if folder:
        assert checkpoint.load(trainer, folder) == step
        assert_holds(trainer, folder)
    elif cfg.dtype == "float16":
        numbers["scale"].fill_(4096.0)  # the default would hide that it is lost
    loss, _, _ = trainer.step(train.Data(cfg).training(cfg, step, trainer.mesh),
                              train.learning_rate(cfg, step))
    folder = checkpoint.save(trainer, step + 1)
    assert_holds(trainer, folder)
    return loss.item(), folder, {name: value.item() for name, value in numbers.items()}


LLAMA = dict(arch="llama", n_kv_head=3, n_hidden=37, block_size=24, untied=True)
WALKS = {
    "gpt": ({}, "--dp 2 --tp 2", "--pp 4 --microbatches 3", "--dp 3 --zero 3"),
    "zero": ({}, "--dp 2 --tp 3 --zero 1", "--cp 2 --tp 2 --sp --pp 2",
             "--dp 4 --shard 2 --zero 2"),
    "stages": ({}, "--dp 2 --tp 2 --pp 2 --zero 3", "--pp 2 --schedule interleaved", "--dp 1"),
    "experts": ({"experts": 4}, "--dp 4 --ep 4", "--tp 2 --pp 2", "--dp 2 --ep 2 --zero 3"),
    "llama": (LLAMA, "--tp 3 --pp 2", "--dp 2 --cp 2 --zero 3", "--tp 3 --sp"),
    "float16": ({"dtype": "float16"}, "--dp 2 --zero 1", "--tp 2 --pp 2", "--dp 3 --zero 3")}


@pytest.mark.parametrize("walk", WALKS)
def test_any_layout_reads_any_others_checkpoint_bit_for_bit(corpus, tmp_path, walk):
    """A step in each of three layouts, with a checkpoint between two: in float64 the losses are
    those of one process. (The third loss follows from the moments that the second layout read.)"""
    sizes, *layouts = WALKS[walk]
    sizes = {**sizes, "out": str(tmp_path)}
    folder = None
    for step, words in enumerate(layouts):
        cfg = flags_of(words.split(), corpus, **sizes)
        found = ranks(cfg.dp * cfg.pp * cfg.cp * cfg.tp, hop, words, corpus, sizes, step, folder)
        loss, folder, numbers = found[0]
        if cfg.dtype == "float64":
            close(loss, one_process(config_of(cfg, VOCAB), corpus)[1][step][0], words)
        else:
            assert numbers == {"scale": 4096.0, "updates": step + 1, "good_steps": step + 1}


def test_a_run_that_is_killed_and_resumed_in_another_layout_has_the_losses_of_the_whole(
        corpus, tmp_path):
    """... and its metrics.jsonl has each step once."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    # Learning rates that do not depend on --steps: the first run has no end
    same = dict(batch_size=6, min_lr=0.004)
    run = Run(2, flags(corpus, killed, tp=2, steps=10**6, save_interval=2, **same), tmp_path)
    until((killed / "step-00000004").exists, "a checkpoint")
    run.signal(1, signal.SIGKILL)
    assert run.wait(but=[1]) == [1], run.read()
    steps = int(checkpoint.find(killed).name[5:]) + 3
    for out, layout in ((killed, dict(dp=3, zero=3, resume="auto")), (whole, {})):
        run = Run(layout.get("dp", 1), flags(corpus, out, steps=steps, **layout, **same), tmp_path)
        assert not any(run.wait()), run.read()
    assert [record["step"] for record in records(killed)] == [*range(steps)]
    for got, want in zip(losses(killed), losses(whole), strict=True):
        close(got, want, f"step {want[0]}")


# ---- nothing complete is deleted ----


def small_trainer(corpus, out):
    """A Trainer of this process alone."""
    return make_trainer(flags_of([], corpus, out=str(out), n_layer=1), Mesh())[0]


def names(out):
    return sorted(path.name for path in out.glob("step-*"))


def contents(folder):
    """{file's name: bytes} of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_newest_is_the_one_written_last_and_a_step_written_again_is_kept(corpus, tmp_path):
    trainer = small_trainer(corpus, tmp_path)
    third = checkpoint.save(trainer, 3)
    edited(MANIFEST, number=10**19)(third)  # as if a clock had said so that was set back since
    before = contents(third)
    checkpoint.save(trainer, 2)  # the run went back
    assert checkpoint.find(tmp_path).name == "step-00000002"
    for again in (1, 2):
        assert checkpoint.save(trainer, 3) == third == checkpoint.find(tmp_path)
        assert (tmp_path / f"step-00000003.old-{again}" / MANIFEST).exists()
    assert contents(tmp_path / "step-00000003.old-1") == before
    assert len(checkpoint.complete(tmp_path)) == len(names(tmp_path)) == 4


def test_only_a_whole_checkpoint_is_found_and_nothing_but_an_interrupted_save_is_removed(
        corpus, tmp_path, capsys):
    """A folder .tmp is an interrupted save: the next one removes it. What has no manifest, or a
    link to nothing, is named and stays."""
    trainer = small_trainer(corpus, tmp_path)
    whole = checkpoint.save(trainer, 1)
    for name in ("step-00000002", "step-00000003", "step-00000004.tmp", "step-00000006.tmp"):
        shutil.copytree(whole, tmp_path / name)
        if name != "step-00000006.tmp":
            (tmp_path / name / MANIFEST).unlink()
    (tmp_path / "step-00000003" / MANIFEST).symlink_to("/nowhere")
    capsys.readouterr()
    assert checkpoint.find(tmp_path) == whole
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}/{name} skipped: {tmp_path}/{name}/{MANIFEST}: No such file or directory"
        for name in ("step-00000002", "step-00000003")]
    checkpoint.save(trainer, 7)
    assert names(tmp_path) == [f"step-0000000{i}" for i in (1, 2, 3, 7)]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(corpus, tmp_path):
    done = []
    sync, rename = checkpoint.sync, os.rename
    with (patch.object(checkpoint, "sync", lambda path: [done.append(Path(path).name), sync(path)]),
          patch.object(os, "rename", lambda *names: [done.append("rename"), rename(*names)])):
        checkpoint.save(small_trainer(corpus, tmp_path), 2)
    *files, folder, renamed, out = done
    assert sorted(files) == [MANIFEST, MODEL, OPTIMIZER]
    assert (folder, renamed, out) == ("step-00000002.tmp", "rename", tmp_path.name)


# ---- what is saved, and where ----


def train_and_spoil(rank, cfg, value, state=None):
    """Train, and after step 3 put `value` into a weight of rank 1, or into this state of it in the
    optimizer. Returns (did the run end well?, its lines)."""
    step, lines = train.Trainer.step, []

    def spoiled(trainer, *args):
        numbers = step(trainer, *args)
        [*trainer.reducer.whole()]  # ZeRO: the new weights have arrived
        if trainer.optimizer.num_steps == 3 and rank == 1:
            pieces = {None: trainer.reducer.weights, **trainer.optimizer.named_states()}[state]
            next(piece for piece in pieces if piece.numel()).view(-1)[0] = value
        return numbers

    with (patch.object(train.Trainer, "step", spoiled), patch("run.launch.on_stop"),
          patch("run.log.say", lambda line, name: lines.append(line))):
        log = train.train(cfg, train.make_mesh(cfg, cfg.device), 0)
    return log.ended_well, lines


@pytest.mark.parametrize("value,state", [
    (math.nan, None), (math.inf, "exp_avg"), (math.inf, "exp_avg_sq")])
def test_what_is_not_finite_is_not_saved_and_the_last_good_checkpoint_is_named(
        corpus, tmp_path, value, state):
    words = "--dp 2 --zero 1 --steps 4 --save-interval 1"
    cfg = flags_of(words.split(), corpus, out=str(tmp_path))
    (well, lines), (other, _) = ranks(2, train_and_spoil, cfg, value, state)
    assert not well and not other and names(tmp_path) == ["step-00000001", "step-00000002"]
    assert "step      3  saved nothing: weights are not finite" in lines
    assert not any(line.startswith("step      3  loss") for line in lines)  # ends at once
    assert f"last good checkpoint: {tmp_path}/step-00000002; a lower --lr may help" in lines[-1]


@pytest.mark.parametrize("words", ["--dp 2", "--dp 2 --zero 2", "--tp 2"])
def test_replicas_that_differ_are_noticed_at_the_end(corpus, tmp_path, words):
    cfg = flags_of(words.split(), corpus, out=str(tmp_path))
    (well, lines), (other, _) = ranks(2, train_and_spoil, cfg, 5.0)
    assert not well and not other and lines[-1].endswith("replicas DISAGREE")


def test_one_run_at_a_time_writes_to_a_folder(corpus, tmp_path):
    """The file .lock may be another program's: nothing is written into it."""
    (tmp_path / ".lock").write_text("of another program")
    checkpoint.lock(tmp_path)  # until this process ends
    run = Run(2, flags(corpus, tmp_path, dp=2), tmp_path)
    assert max(run.wait()) == 2
    assert run.read() == (f"train.py: --out {tmp_path}: another run writes there; name another "
                          "folder\n")
    assert (tmp_path / ".lock").read_text() == "of another program"
    with patch("fcntl.flock", side_effect=OSError(37, "No locks available")):
        checkpoint.lock(tmp_path)  # a file system without locks


def begin_otherwise(rank, cfg):
    world = train.make_mesh(cfg, cfg.device).world
    for lr, fingerprint in ((0.1 + rank, "the same"), (0.1, f"of rank {rank}")):
        cfg.lr = lr
        data = Mock(fingerprint=lambda fingerprint=fingerprint: fingerprint)
        with (patch("run.checkpoint.lock"),
              pytest.raises(FileError, match="^rank 1 has other flags or data than rank 0$")):
            checkpoint.lock_and_find(cfg, data, world)


def test_ranks_whose_flags_or_data_differ_are_refused(corpus, tmp_path):
    ranks(2, begin_otherwise, flags_of(["--dp", "2"], corpus, out=str(tmp_path)))


# ---- damage ----


def cut_off(path):
    os.truncate(path, path.stat().st_size - 100)


def header(change):
    """A function that changes the header of a folder's model.safetensors."""
    def rewrite(folder):
        raw = (folder / MODEL).read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        values = json.loads(raw[8:end])
        change(values)
        text = json.dumps(values).encode()
        (folder / MODEL).write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
    return rewrite


WPE = "transformer.wpe.weight"
NO_HEADER = "model.safetensors: not a safetensors file, or its header is damaged"
DAMAGE = {  # what is done to the folder, the flags of the run that resumes, what the line says
    "cut off": (lambda folder: cut_off(folder / OPTIMIZER), {},
                "optimizer.safetensors, tensor transformer.ln_f.bias.exp_avg: cut off at the end"),
    "a list": (lambda folder: (folder / MODEL).write_bytes(b"\2" + bytes(7) + b"[]"), {},
               NO_HEADER),
    "no file": (lambda folder: (folder / MODEL).unlink(), {}, "model.safetensors: No such file or"),
    "dtype's code": (header(lambda values: values[WPE].update(dtype=["F64"])), {}, NO_HEADER),
    "huge": (header(lambda values: values[WPE].update(shape=[10**30])), {}, NO_HEADER),
    "offsets": (header(lambda values: values[WPE].update(data_offsets=[0, "x"])), {}, NO_HEADER),
    "overlap": (header(lambda values: values[WPE].update(data_offsets=[0, 512])), {},
                "model.safetensors, tensor transformer.wte.weight: does not fit its place"),
    "no JSON": (lambda folder: (folder / MANIFEST).write_text("{"), {}, "manifest.json: not JSON"),
    "no step": (edited(MANIFEST, step="4"), {}, "manifest.json: damaged: its step is '4'"),
    "field": (edited(MANIFEST, model={"heads": 2}), {}, "json: damaged, no model has its sizes"),
    "dtype": (lambda folder: None, {"dtype": "float32"},
              "model.safetensors, tensor transformer.wte.weight: F64 [67, 8], not F32 [67, 8]"),
    "another model": (lambda folder: None, {"n_layer": 3}, ": its n_layer is 2, this run's is 3"),
    "past": (lambda folder: None, {"steps": 3}, "step-00000004: is at step 4, past --steps 3")}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_one_line_that_names_file_and_tensor(corpus, trained, tmp_path, how):
    spoil, more, says = DAMAGE[how]
    last = shutil.copytree(trained / "step-00000004", tmp_path / "step-00000004")
    spoil(last)
    before = contents(last)
    cfg = parse(flags(corpus, tmp_path / "out", **{"steps": 6, "resume": last, **more}))
    check_layout(cfg, 1)
    with patch("run.launch.on_stop"), pytest.raises(FileError) as error:
        train.train(cfg, Mesh(), 0)
    line = str(error.value)
    assert says in line and str(last) in line and "\n" not in line, line
    assert contents(last) == before and not names(tmp_path / "out")


def test_resume_auto_goes_on_from_the_last_whole_checkpoint(corpus, trained, tmp_path):
    """The damaged one is named, and stays where it is."""
    out = shutil.copytree(trained, tmp_path / "out")
    last = out / "step-00000004"
    cut_off(last / OPTIMIZER)
    run = Run(2, flags(corpus, out, dp=2, steps=5, resume="auto"), tmp_path)
    assert run.wait() == [0, 0] and f"resumed from {out}/step-00000002" in run.read("stdout")
    assert run.read().startswith(f"{last} skipped: ") and run.read().count("\n") == 1
    assert names(out) == ["step-00000002", "step-00000004", "step-00000005"]


def test_a_log_that_a_crash_has_left_goes_on_after_its_last_whole_line(corpus, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    path = out / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n[1]\n{"step": "x"}\n\xff\xfe\n{"step": 4}\n{"step": 3')
    run = Run(1, flags(corpus, out, steps=6, resume="auto"), tmp_path)
    assert run.wait() == [0], run.read()
    assert [record["step"] for record in records(out)] == [0, 4, 5]
