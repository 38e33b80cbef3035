"""Checkpoints: any layout reads any other's, and damage is one line that names file and tensor."""

import json
import math
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

import sample
import train
from data.batches import Data
from mesh import Mesh
from optimizer import AdamW
from run import checkpoint
from run.config import LOCK, check
from run.copies import whole_slices
from sizes import LlamaConfig
from tests.harness import (
    FULL,
    VOCAB,
    _train,
    assemble,
    bare,
    close,
    config,
    local_tensors,
    pool,
)
from tests.runs import Run, contents, flags, one_line, rewrite

# ---- checkpoints and faults ----


def gathered_state(trainer):
    """({kind: [(tag, this rank's whole tensor)]} of what a checkpoint holds, over ZeRO's pieces;
    {number of updates})."""
    found = {"weights": local_tensors(trainer, "weights")}
    for kind, pieces in trainer.optimizer.named_states().items():
        found[kind] = [(bare(tag), whole) for tag, whole in whole_slices(trainer.reducer, pieces)]
    return found, {int(trainer.optimizer.numbers()["updates"])}


def _hop(rank, cfg, folder):
    """Load, take one step, save: (state as loaded, loss, state as saved, the new folder)."""
    mesh = train.make_mesh(cfg, cfg.device)
    trainer, data = train.Trainer(cfg, mesh, VOCAB), Data(cfg)
    step = checkpoint.load(trainer, folder) if folder else 0
    before = gathered_state(trainer) if folder else None
    _, sums = trainer.step(data.training(cfg, step, mesh), train.learning_rate(cfg, step))
    folder = checkpoint.save(trainer, step + 1)
    return before, sums[0].item(), gathered_state(trainer), folder


def _losses(rank, cfg, steps):
    return [step["loss"] for step in _train(rank, cfg, steps, kinds=())[1:]]


WALK = [dict(dp=2, tp=2), dict(pp=4, microbatches=3), dict(dp=3, zero=3),
        dict(tp=3, pp=2, zero=1), dict(dp=2, pp=2, tp=2, zero=3, microbatches=2), dict(),
        dict(dp=2, pp=3, zero=2),
        dict(tp=4, pp=2, microbatches=2), dict(dp=4, tp=2, zero=1, batch_size=36), dict(pp=5),
        dict(dp=2, pp=2, schedule="zb-h1", microbatches=3, zero=2),
        dict(pp=3, schedule="interleaved", chunks=2, microbatches=3),
        dict(cp=2, tp=2, sp=True, pp=2), dict(cp=4, dp=2, zero=3)]


WALK_WITH_EXPERTS = [dict(dp=4, ep=4), dict(), dict(dp=2, ep=2, zero=3), dict(tp=2, pp=2),
                     dict(dp=4, ep=2, tp=2, sp=True, zero=1)]


WALK_OF_LLAMA = [dict(tp=3, pp=2), dict(), dict(dp=2, zero=3, cp=2), dict(tp=3, sp=True),
                 dict(pp=2, schedule="zb-h1", microbatches=3)]


# ZeRO over all data ranks and, with shard, over two of four
WALK_OF_SHARDS = [
    dict(dp=2, tp=2, zero=1), dict(dp=4, shard=2, zero=3, microbatches=3),
    dict(dp=4, shard=2, zero=2), dict(dp=4, shard=2, zero=1), dict(dp=3, zero=3),
    dict(dp=4, shard=2, tp=2, zero=2), dict(dp=4, shard=2)]


@pytest.mark.parametrize("dtype,more,walk", [
    ("float64", {}, WALK if FULL else WALK[1::2]),
    ("bfloat16", {}, WALK if FULL else WALK[::2]),
    ("float64", {}, WALK_OF_SHARDS),
    ("float64", {"experts": 4}, WALK_WITH_EXPERTS),
    ("float64", {"arch": "llama", "n_kv_head": 3, "n_hidden": 37, "block_size": 24},
     WALK_OF_LLAMA),
    ("float64", {"arch": "llama", "n_kv_head": 6, "n_hidden": 37, "block_size": 24, "untied": True},
     WALK_OF_LLAMA[::2])],
    ids=["float64", "bfloat16", "shards", "experts", "llama", "untied"])
def test_any_layout_reads_any_others_checkpoint_bit_for_bit(
        corpus, tmp_path, dtype, more, walk):
    """A walk in random order. Losses of float64: to 1e-10 those of the run that never stopped."""
    order = np.random.default_rng(0).permutation(len(walk))
    walk_through(corpus, tmp_path, [walk[i] for i in order], dtype=dtype, **more)


def walk_through(corpus, out, walk, dtype="float64", **more):
    """A step in each layout of a list, with a checkpoint between two steps."""
    flags = dict(dtype=dtype, out=str(out), n_layer=5, steps=len(walk), **more,
                 batch_size=12)
    if dtype == "float64":
        (want,) = pool(1, _losses, config(corpus, **flags, microbatches=1), len(walk))
    folder = last = None
    for i, layout in enumerate(walk):
        cfg = config(corpus, **flags, **{k: v for k, v in layout.items() if k not in flags})
        got = pool(check(cfg, 1), _hop, cfg, folder)
        folder = got[0][3]
        for which, want_steps in ((0, {i}), (2, {i + 1})):
            if which == 0 and not i:
                continue
            assert set().union(*(rank[which][1] for rank in got)) == want_steps
        saved = {kind: assemble([rank[2][0][kind] for rank in got]) for kind in got[0][2][0]}
        assert saved.keys() == {"weights", "exp_avg", "exp_avg_sq",
                                *(["master"] if dtype == "bfloat16" else [])}
        if i:
            for kind, before in last.items():
                loaded = assemble([rank[0][0][kind] for rank in got])
                assert loaded.keys() == before.keys()
                for name, value in before.items():
                    assert torch.equal(loaded[name], value), (layout, kind, name)
        last = saved
        if dtype == "float64":
            close(got[0][1], want[i], f"loss {layout}")


class Averaging(AdamW):
    """With a state of its own beside the moments: an average of the weights."""

    def __init__(self, *args):
        super().__init__(*args)
        self.averages = [torch.zeros_like(master) for master in self.masters]

    def step(self, *args):
        super().step(*args)
        for average, master in zip(self.averages, self.masters, strict=True):
            average.lerp_(master, 0.5)

    def named_states(self):
        return super().named_states() | {"average": self.averages}


def _averaging(rank, cfg, folder):
    with patch.object(train, "AdamW", Averaging):
        return _hop(rank, cfg, folder)


def test_a_state_that_an_optimizer_adds_is_saved_and_loaded_in_any_layout(corpus, tmp_path):
    folder, saved = None, {}
    for layout in ({"dp": 2, "tp": 2, "zero": 2}, {"pp": 3}, {"dp": 3, "zero": 3},
                   {"dp": 2, "zero": 1}):
        cfg = config(corpus, out=str(tmp_path), microbatches=1, **layout)
        got = pool(check(cfg, 1), _averaging, cfg, folder)
        if saved:  # by the layout before
            loaded = assemble([rank[0][0]["average"] for rank in got])
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        folder = got[0][3]
        saved = assemble([rank[2][0]["average"] for rank in got])
        assert all(value.any() for value in saved.values())


def _growth(rank, cfg):
    """Bytes by which this rank's memory peaked above what it held, in save and in load."""
    trainer = train.Trainer(cfg, train.make_mesh(cfg, cfg.device), VOCAB)
    own = sum(t.nbytes for *_, tensors in checkpoint.slices(trainer) for t in tensors.values())
    largest = 4 * max(tag.slice_shape.numel() for tag in trainer.reducer.tags)

    def status(key):
        line = next(x for x in open("/proc/self/status") if x.startswith(key))
        return 1024 * int(line.split()[1])

    grown = []
    for fn, arg in ((checkpoint.save, 0), (checkpoint.load, Path(cfg.out, "step-00000000"))):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status("VmRSS")
        fn(trainer, arg)
        grown.append(status("VmHWM") - before)
    return own, largest, grown


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux measures it")
@pytest.mark.parametrize("layout", [dict(dp=2, tp=2, zero=3), dict(dp=2, tp=2)], ids=str)
def test_no_rank_holds_more_than_its_slices_and_one_buffer(corpus, tmp_path, layout):
    cfg = config(corpus, n_layer=8, n_embd=384, dtype="float32", out=str(tmp_path), **layout)
    for own, largest, grown in pool(check(cfg, 1), _growth, cfg):
        assert own > 4 * (largest + (8 << 20))  # so that a second copy of the slices would show
        assert all(peak < largest + (8 << 20) for peak in grown), (own, largest, grown)


# ---- a save is whole, or there is none ----


def _one_infinite_piece(rank, cfg):
    """What save() returns where rank 1 has one infinite number, in each tensor of its state."""
    trainer = train.Trainer(cfg, train.make_mesh(cfg, cfg.device), VOCAB)
    reducer = trainer.reducer
    held = next(i for i, weights in enumerate(reducer.weights) if weights.numel())
    states = [reducer.weights, *trainer.optimizer.named_states().values()]
    returned = []
    for values in [state[held].view(-1) for state in states]:
        kept = values[0].item()
        if rank == 1:
            values[0] = math.inf
        went_on = AssertionError(f"rank {rank} goes on, and would wait for rank 1")
        with patch.object(checkpoint, "contents_of_files", side_effect=went_on):
            returned.append(checkpoint.save(trainer, 1))
        values[0] = kept
    return returned


def test_no_rank_saves_if_one_ranks_shard_is_not_finite(corpus, tmp_path):
    """Weights, or either moment."""
    cfg = config(corpus, dp=2, zero=1, microbatches=1, out=str(tmp_path))
    check(cfg, 1)
    assert pool(2, _one_infinite_piece, cfg) == [[None] * 3] * 2 and not [
        path for path in tmp_path.iterdir() if path.name != LOCK]


def small_trainer(corpus, out):
    return train.Trainer(config(corpus, n_layer=1, microbatches=1, out=str(out)), Mesh(dp=1), VOCAB)


def test_a_save_that_fails_between_its_two_renames_leaves_the_checkpoint_before(
        corpus, tmp_path, monkeypatch):
    """The same step a second time, in a run that went back: the older one still counts."""
    trainer = small_trainer(corpus, tmp_path)
    checkpoint.save(trainer, 3)

    def fail_at_the_second(source, target, rename=os.rename):
        if Path(source).name == "step-00000003.tmp":
            raise OSError(5, "Input/output error", str(source))
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fail_at_the_second)
        with pytest.raises(checkpoint.CheckpointError, match="Input/output error"):
            checkpoint.save(trainer, 3)
    assert checkpoint.load(trainer, checkpoint.find(tmp_path)) == 3
    assert checkpoint.save(trainer, 3) == checkpoint.newest(tmp_path)
    checkpoint.prune(tmp_path)
    assert [path.name for path in tmp_path.glob("step*")] == ["step-00000003"]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts(corpus, tmp_path, monkeypatch):
    """Its files and their names before the rename, its own name before older ones are deleted."""
    trainer, done = small_trainer(corpus, tmp_path), []
    for owner, name in ((checkpoint, "sync"), (os, "rename"), (checkpoint, "prune")):
        usual = getattr(owner, name)

        def noted(path, *more, name=name, usual=usual):
            done.append((name, Path(path).name))
            return usual(path, *more)

        monkeypatch.setattr(owner, name, noted)
    folder, out = "step-00000002.tmp", tmp_path.name
    checkpoint.save(trainer, 2)
    files = (checkpoint.MANIFEST, checkpoint.MODEL, checkpoint.OPTIMIZER)
    assert done[0] == ("prune", out) and done[4:] == [
        ("sync", folder), ("rename", folder), ("sync", out), ("prune", out)]
    assert sorted(done[1:4]) == [("sync", file) for file in sorted(files)]


def test_a_file_that_is_cut_off_after_its_check_is_named(corpus, tmp_path, monkeypatch):
    trainer = small_trainer(corpus, tmp_path)
    folder = checkpoint.save(trainer, 1)
    path = folder / checkpoint.OPTIMIZER

    def cut_off(entry, want):
        os.truncate(path, path.stat().st_size - 8) if entry.path == path else None

    monkeypatch.setattr(checkpoint, "checksum", cut_off)
    with pytest.raises(checkpoint.CheckpointError, match=f"^{path}, .*: the file ends early$"):
        checkpoint.load(trainer, folder)


@pytest.mark.parametrize("changes", [{"data": None}, {"model": {"n_head": 3}}, {"scale": 0.0},
                                     {"scale": math.inf}, {"step": -1},
                                     {"model": asdict(LlamaConfig(VOCAB, n_embd=24, n_head=8,
                                                                  n_kv_head=8))}], ids=str)
def test_a_forged_value_of_a_sealed_manifest_is_damage(trained, tmp_path, changes):
    """A width of 8 has no 3 heads; a loss is divided by its scale; rotary positions turn pairs, and
    heads of 3 numbers have none."""
    path = Path(shutil.copy(trained / "step-00000004" / checkpoint.MANIFEST, tmp_path))
    manifest = json.loads(path.read_text())
    assert checkpoint.read_manifest(tmp_path) == manifest
    for name, value in changes.items():
        manifest[name] = manifest[name] | value if type(value) is dict else value
    path.write_text(json.dumps({**manifest, "seal": checkpoint.seal(manifest)}))
    says = r"damaged \(its .*\); take another checkpoint"
    with pytest.raises(checkpoint.CheckpointError, match=says):
        checkpoint.read_manifest(tmp_path)


def test_each_run_marks_its_folder_with_other_bytes(tmp_path):
    """By them ranks know that they share --out. Old marks are no longer there."""
    marks = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        lock = tmp_path / name / ".lock"
        lock.write_bytes(b"the mark of an earlier run")
        checkpoint.claim(lock.parent, 0)
        marks.append(lock.read_bytes())
    assert [len(mark) for mark in marks] == [8, 8] and marks[0] != marks[1]


# ---- damage ----

HEADERS = {  # what becomes of the header's text
    "a dtype that is a list": lambda text: text.replace('"F64"', "[1]", 1),
    "a float offset": lambda text: re.sub(r"\[(\d+), (\d+)\]}", r"[\1.5, \2]}", text, count=1),
    "an overlap": lambda text: re.sub(r"\[(\d+), (\d+)\]}}$", r"[0, \2]}}", text.rstrip()),
    "an offset into the header": lambda text: text.replace("[0, ", "[-8, ", 1),
    "a name twice": lambda text: text.rstrip()[:-1] + ', "lm_head.weight": {}}',
    "a header that is deep": lambda text: "[" * 100_000}


MANIFESTS = {  # what is put into a manifest, and what is said about it
    "forged step": ({"step": "4"}, "its step is '4', not a whole number from 0 to 9,007,199,254"),
    "forged depth": ({"model": {"n_layer": "two"}}, "its n_layer is 'two', not a whole number"),
    "forged heads": ({"model": {"n_head": 0}}, "its n_head is 0, not a whole number from 1 to"),
    "forged name": ({"model": {"n_heads": 2}}, "GPTConfig.__init__() got an unexpected keyword"),
    "forged size": ({"model": {"n_embd": 2**60}}, "its n_embd is 1152921504606846976, not a"),
    "forged scale": ({"scale": None}, "its scale is None, not a number above 0, below 2^128"),
    "forged infinity": ({"scale": 10**400}, "its scale is 1000000"),
    "forged number": ({"number": 2**63 - 1}, "its number is 9223372036854775807, not a whole"),
    "forged checksums": ({"checksums": [1]}, "its checksums is [1], not an object"),
    "forged checksum files": ({"checksums": {}}, "it has no model.safetensors"),
    "forged kept": ({"kept": {"eos_token_id": {"a": 1}}}, "its eos_token_id is {'a': 1}, not a")}


def spoil(folder, how):
    model, optimizer = folder / checkpoint.MODEL, folder / checkpoint.OPTIMIZER
    manifest = folder / checkpoint.MANIFEST
    if how == "truncated":
        os.truncate(optimizer, optimizer.stat().st_size - 100)
    elif how == "gone":
        model.unlink()
    elif how == "a tensor missing":
        rewrite(model, lambda tensors: tensors.pop("transformer.ln_f.weight"))
    elif how == "wrong shape":
        rewrite(model, lambda tensors: tensors.update({
            "transformer.wpe.weight": ((4, 16), tensors["transformer.wpe.weight"][1])}))
    elif how in MANIFESTS:  # with a right seal
        changed = json.loads(manifest.read_text())
        for name, value in MANIFESTS[how][0].items():
            changed[name] = changed[name] | value if name == "model" else value
        manifest.write_text(json.dumps({**changed, "seal": checkpoint.seal(changed)}))
    elif how == "forged sums":  # with a right seal
        changed = json.loads(manifest.read_text())
        changed["checksums"][checkpoint.MODEL] = {}
        manifest.write_text(json.dumps({**changed, "seal": checkpoint.seal(changed)}))
    elif how == "deep":
        manifest.write_text("[" * 100_000)
    elif how in HEADERS:
        raw = model.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        text = HEADERS[how](raw[8 : 8 + length].decode()).encode()
        model.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    elif how == "another model":
        changed = json.loads(manifest.read_text())
        changed["model"]["n_layer"] = 3
        manifest.write_text(json.dumps({**changed, "seal": checkpoint.seal(changed)}))
    else:  # a bit flipped, in that file, so many bytes from its start or end
        path, at = {"manifest": (manifest, 30), "header": (model, 40), "data": (optimizer, -1),
                    "weights": (model, -VOCAB * 64 - 1)}[how]
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)


DAMAGE = [
    ("truncated", "optimizer.safetensors, tensor transformer.ln_f.bias.exp_avg: cut off"),
    ("data", "optimizer.safetensors, tensor transformer.ln_f.bias.exp_avg_sq: damaged, the check"),
    ("weights", "model.safetensors, tensor transformer.ln_f.bias: damaged, the check"),
    ("header", "model.safetensors: not a safetensors file, or its header is damaged"),
    ("manifest", "manifest.json: damaged ("),
    ("gone", "model.safetensors: No such file or directory"),
    ("a tensor missing", "model.safetensors, tensor transformer.ln_f.weight: missing"),
    ("wrong shape", "model.safetensors, tensor transformer.wpe.weight: "),
    ("another model", ": its n_layer is 3, this run's is 2"),
    ("forged sums", "model.safetensors, tensor transformer.wte.weight: damaged, the checksum"),
    ("deep", "manifest.json: damaged (nested too deep); take another checkpoint"),
    *((how, f"manifest.json: damaged ({says}") for how, (_, says) in MANIFESTS.items()),
    *((how, "model.safetensors: not a safetensors file, or its header is damaged")
      for how in HEADERS),
]


@pytest.mark.parametrize("how,says", DAMAGE)
def test_damage_is_one_line_that_names_file_and_tensor(corpus, trained, tmp_path, how, says):
    out = shutil.copytree(trained, tmp_path / "out")
    last = out / "step-00000004"
    spoil(last, how)
    before = contents(out)
    run = Run(2, flags(corpus, out, dp=2, steps=6, resume=last), tmp_path)
    assert run.wait() == [2, 2] and says in run.read(), run.read()
    assert run.read().count("\n") == 1 and contents(out) == before


@pytest.mark.parametrize("how,says", [row for row in DAMAGE if "optimizer" not in row[1]])
def test_damaged_weights_are_one_line_also_where_a_run_starts_and_in_sample(
        corpus, trained, tmp_path, how, says, capsys, monkeypatch):
    out = shutil.copytree(trained, tmp_path / "out")
    last = out / "step-00000004"
    spoil(last, how)
    before = contents(out)
    argv = flags(corpus, tmp_path / "new", init_from=last / checkpoint.MODEL)
    error = one_line(train.main, ["train.py", *argv], capsys, monkeypatch)
    assert error.startswith("train.py: ") and says in error, error
    error = one_line(sample.main, ["sample.py", "--out", last], capsys, monkeypatch)
    says = "h.2.ln_1.weight: missing" if how == "another model" else says
    assert error.startswith("sample.py: ") and says in error, error
    assert contents(out) == before and not contents(tmp_path / "new")
