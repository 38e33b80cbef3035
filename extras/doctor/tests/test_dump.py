"""Dumps: any layout writes what one process writes, copies that differ are named, damage is a line.
"""

import json
import math
import os
import re
import shutil
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import engine.zero as engine_zero
import train
import zero
from data.batches import Data
from experts import balance_loss, kind_of
from extras.doctor import record
from extras.doctor.dump import DUMP, DUMP_BEGUN, read_dump
from extras.doctor.groups import layer_number
from extras.doctor.record import Writer, random_value, write_run
from extras.planner.tests.test_planner import peak_of
from model import ABSENT
from optimizer import decays, learning_rate
from run.checkpoint import EMBEDDING
from run.config import Config, check
from run.hugging_face import CONV1D
from shard import Tag
from tests.harness import VOCAB, close, config, mesh_of, pool
from tests.runs import Run, _main, command, flags, one_line, rewrite

# ---- any layout writes what one process writes ----


def trainer_of(cfg):
    return train.Trainer(cfg, mesh_of(cfg), VOCAB, random_value)


def _dump(rank, cfg, folder, spoil=None):
    """spoil: see below, "copies that differ"."""
    trainer = trainer_of(cfg)
    with spoil_gradient(trainer, *spoil) if spoil else nullcontext():
        write_run(trainer, Data(cfg), folder)


def dump_config(corpus, **layout):
    """(Config, number of ranks)."""
    cfg = config(corpus, steps=2, **{"microbatches": 1, "block_size": 12, **layout})
    return cfg, check(cfg, 1)


def dump_of(corpus, folder, *spoil, **layout):
    """The Dump that the ranks of this layout write."""
    cfg, world = dump_config(corpus, **layout)
    pool(world, _dump, cfg, folder, *spoil)
    return read_dump(folder)


def dumps_of_one_process(corpus, tmp_path_factory):
    """A function from flags of a model to the Dump that one process writes of it, made once."""
    found = {}

    def dump_of_one_process(**model):
        if str(model) not in found:
            found[str(model)] = dump_of(corpus, tmp_path_factory.mktemp("dump"), **model)
        return found[str(model)]

    return dump_of_one_process


@pytest.fixture(scope="session")
def one(corpus, tmp_path_factory):
    return dumps_of_one_process(corpus, tmp_path_factory)


def every_tensor(dump):
    """Yields (file, name, tensor) of all that is no token."""
    for file, tensors in dump.tensors.items():
        for name, tensor in tensors.items():
            yield file, name, tensor


def sequences(tokens):
    """(D, m, B, S) -> (D m B, S): the batch, however it is split."""
    return tokens.flatten(0, 2)


def same_dump(got, want):
    """AssertionError unless two dumps are equal but for rounding of float64."""
    assert got.tensors.keys() == want.tensors.keys() and got.tokens.keys() == want.tokens.keys()
    for file, name, tensor in every_tensor(want):
        if file == "weights-0":
            assert torch.equal(got.tensors[file][name], tensor), name
        close(got.tensors[file][name], tensor, f"{file} {name}")
    for number in (1, 2):
        assert torch.equal(sequences(got.ids(number)), sequences(want.ids(number)))
        assert torch.equal(sequences(got.targets(number)), sequences(want.targets(number)))
        mine, theirs = got.steps[number - 1], want.steps[number - 1]
        close(mine["loss"], theirs["loss"], "loss")
        close(mine["norm"], theirs["norm"], "norm")
        assert mine["lr"] == theirs["lr"] and mine["scale"] == theirs["scale"] == 1
        assert mine["gradients_differ"] == mine["weights_differ"] == []
    for name in ("model", "names", "dtype", "grad_dtype", "loss", "optimizer", "balance"):
        assert getattr(got, name) == getattr(want, name), name


ROOT = {"fast": ""}
EXPERTS = {"experts": 4, "batch_size": 12}
LLAMA = {"arch": "llama", "n_kv_head": 3, "n_hidden": 37, "n_embd": 24, "block_size": 24,
         "batch_size": 12}


@pytest.mark.parametrize("model,layout", [
    ({}, {"pp": 3, "schedule": "interleaved", "chunks": 2, "microbatches": 3, "n_layer": 4}),
    ({}, {"pp": 2, "schedule": "zb-v", "chunks": 2, "microbatches": 3, "zero": 1, "dp": 2}),
    ({}, {"tp": 3, "sp": True, "pp": 2, "zero": 2}),
    ({}, {"tp": 4, "dp": 2, "zero": 1, "pad_vocab": 16}),
    ({}, {"dp": 3, "zero": 3, "tp": 2, "microbatches": 2}),
    ({}, {"cp": 2, "dp": 2, "tp": 2, "zero": 3}),
    ({}, {"dp": 4, "recompute": True}),
    ({}, {"dp": 4, "shard": 2, "zero": 2}),
    (EXPERTS, {"dp": 4, "ep": 2, "tp": 2, "sp": True}),
    (EXPERTS, {"dp": 2, "ep": 2, "zero": 3, "cp": 2}),
    (LLAMA, {"tp": 3, "pp": 2, "dp": 1, "microbatches": 2}),
    # the root's parts
    ({}, ROOT),
    ({}, ROOT | {"dp": 3, "zero": 1, "tp": 2}),
    ({}, ROOT | {"dp": 2, "zero": 3, "tp": 2, "pp": 2, "microbatches": 3}),
    ({}, ROOT | {"cp": 2, "tp": 3, "sp": True, "recompute": True}),
    ({}, ROOT | {"dp": 4, "shard": 2, "zero": 3, "microbatches": 3}),
    (EXPERTS, ROOT | {"dp": 4, "ep": 2, "tp": 2, "sp": True}),
    (EXPERTS, ROOT | {"dp": 4, "ep": 2, "tp": 2, "zero": 3}),
    (EXPERTS, ROOT | {"dp": 2, "ep": 2, "cp": 2, "pp": 2, "zero": 2, "microbatches": 3}),
    # some of the engine's
    ({}, {"fast": "pp,optimizer", "dp": 2, "zero": 3, "pp": 2, "microbatches": 3}),
    ({}, {"fast": "ddp", "dp": 2, "zero": 3, "tp": 2})], ids=str)
def test_any_layout_dumps_what_one_process_dumps(corpus, one, tmp_path, model, layout):
    depth = {name: layout[name] for name in ("n_layer",) if name in layout}
    got = dump_of(corpus, tmp_path / "dump", **{**model, **layout})
    same_dump(got, one(**model, **depth))
    assert got.layout.items() >= {name: value for name, value in layout.items()
                                  if name in got.layout}.items()
    assert got.ids(1).shape[:2] == (layout.get("dp", 1), layout.get("microbatches", 1))


@pytest.mark.parametrize("model", [{}, EXPERTS, LLAMA], ids=str)
def test_a_dump_is_two_steps_of_a_plain_loop(one, model):
    """Each step begins at the dump's own weights: a loss of its tokens, raw gradients, their norm,
    and torch's AdamW. Half the rate, then all of it."""
    dump = one(**model)
    network = kind_of(dump.model)(dump.model).double()
    params = dict(network.canonical_parameters())
    for param, value in zip(params.values(), dump.weights(0).values(), strict=True):
        param.data.copy_(value)
    biases = [value for name, value in dump.weights(0).items() if name.endswith("bias")]
    gains = [value for name, value in dump.weights(0).items()
             if ".ln_" in name and name.endswith("weight")]
    assert (not biases or 0.07 < torch.cat([bias.flatten() for bias in biases]).std() < 0.13)
    assert 0.07 < torch.cat(gains).std() < 0.13 and 0.9 < torch.cat(gains).mean() < 1.1
    matrices = [decays(Tag(name, param.shape)) for name, param in params.items()]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p, is_matrix in zip(params.values(), matrices, strict=True)
                     if is_matrix == kind], "weight_decay": 0.1 * kind} for kind in (True, False)],
        betas=(dump.optimizer["beta1"], dump.optimizer["beta2"]), eps=dump.optimizer["eps"])
    blocks = network.layers[1:-1]
    for block in blocks if dump.model.n_experts else ():
        block.mlp.balance_weight = dump.balance
    for number, lr in ((1, 5e-3), (2, 1e-2)):
        step = dump.steps[number - 1]
        loss = network(sequences(dump.ids(number)), sequences(dump.targets(number)))
        loss = loss / dump.ids(number).numel()
        optimizer.zero_grad()
        loss.backward()
        balance = balance_loss(blocks) or torch.zeros(())
        close(step["loss"], loss.detach() - balance.detach() / dump.ids(number).numel(), "loss")
        for name, grad in dump.gradients(number).items():
            close(grad, params[name].grad, f"gradient {name}")
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), dump.optimizer["grad_clip"])
        close(step["norm"], norm, "norm")
        assert step["norm"] > dump.optimizer["grad_clip"] and step["lr"] == lr
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for name, weight in dump.weights(number).items():
            close(weight, params[name].detach(), f"weight {name}")


@pytest.mark.parametrize("layout", [
    {"dtype": "float16", "tp": 2, "zero": 1, "dp": 2}, {"dtype": "bfloat16", "dp": 3, "zero": 3},
    {"dtype": "bfloat16", "grad_dtype": "float32", "pp": 2, "microbatches": 2},
    ROOT | {"dtype": "bfloat16", "tp": 2, "dp": 2, "zero": 2},
    # float16 takes the engine's optimizer and pipeline; the rest is the root's
    ROOT | {"dtype": "float16", "dp": 3, "zero": 3}], ids=str)
def test_in_16_bits_gradients_are_unscaled_and_weights_are_rounded_masters(corpus, tmp_path,
                                                                            layout):
    dump = dump_of(corpus, tmp_path / "dump", **layout)
    dtype = getattr(torch, layout["dtype"])
    assert (dump.dtype, dump.grad_dtype) == (layout["dtype"],
                                             layout.get("grad_dtype", layout["dtype"]))
    for number in (0, 1, 2):
        for name, master in dump.masters(number).items():
            assert torch.equal(master.to(dtype).double(), dump.weights(number)[name]), name
    for number in (1, 2):
        step = dump.steps[number - 1]
        assert step["scale"] == (2.0**16 if dtype == torch.float16 else 1)
        squares = [grad.square().sum() for grad in dump.gradients(number).values()]
        close(torch.stack(squares).sum().sqrt(), step["norm"], "norm", 1e-5)
        assert step["gradients_differ"] == step["weights_differ"] == []


# ---- copies that differ ----


def spoil_gradient(trainer, rank, name):
    """From now on this rank adds 1 to the first element of its copy of a gradient. It must not
    write the copy: if two ranks did, the file would have that of the later one."""
    reducer = trainer.reducer
    usual = reducer.gradients
    write = record.transfer_runs

    def written(entry, *args, **more):
        assert trainer.mesh.rank != rank or entry.name != name, "a second rank writes the tensor"
        return write(entry, *args, **more)

    def gradients():
        grads = usual()
        for tag, grad in zip(reducer.tags, grads, strict=True):
            if trainer.mesh.rank == rank and tag.name == name:
                grad.view(-1)[0] += 1
        return grads

    reducer.gradients = gradients
    return patch.object(record, "transfer_runs", written)


@pytest.mark.parametrize("name,layout", [
    ("transformer.h.1.attn.c_attn.weight", {"dp": 2}),  # replicas
    ("transformer.h.0.attn.c_proj.bias", {"tp": 2}),  # tensor ranks
    ("transformer.ln_f.weight", {"tp": 2, "sp": True}),
    (EMBEDDING, {"pp": 2, "microbatches": 2}),  # both ends
    ("transformer.h.2.mlp.c_proj.bias", {"tp": 2, "dp": 2, "zero": 2}),
    ("transformer.h.1.attn.c_attn.weight", ROOT | {"dp": 2}),
    ("transformer.h.2.mlp.c_proj.bias", ROOT | {"tp": 2, "dp": 2, "zero": 2}),
    (EMBEDDING, ROOT | {"pp": 2, "microbatches": 2})], ids=str)
def test_copies_that_differ_are_named_and_the_file_has_the_first_ranks(corpus, one, tmp_path, name,
                                                                        layout):
    """The last rank's copy is spoiled (of --dp 2 --tp 2 under ZeRO: its piece). In the second step
    this rank's weight is another one, and so is all that follows from it."""
    last = math.prod(layout.get(axis, 1) for axis in ("dp", "pp", "tp")) - 1
    dump = dump_of(corpus, tmp_path / "dump", (last, name), **layout)
    first, second = dump.steps
    assert first["gradients_differ"] == first["weights_differ"] == [name]
    assert name in second["weights_differ"]
    for tensor, want in one().gradients(1).items():
        close(dump.gradients(1)[tensor], want, tensor)


def _dump_unpublished(rank, cfg, folder):
    zero_1 = engine_zero.ZeRO1 if cfg.fast else zero.ZeRO1
    with patch.object(zero_1, "publish", lambda reducer: None):
        _dump(rank, cfg, folder)


@pytest.mark.parametrize("layout", [{}, ROOT], ids=str)
def test_weights_are_those_that_forward_uses(corpus, one, tmp_path, layout):
    """ZeRO-1 without its all-gather: rank 0 goes on with its own half of the new weights, and with
    the old other half. (The optimizers of both ranks together hold all of the new ones.)"""
    cfg, world = dump_config(corpus, dp=2, zero=1, **layout)
    pool(world, _dump_unpublished, cfg, tmp_path / "dump")
    dump = read_dump(tmp_path / "dump")
    assert [*dump.weights(0)] == dump.steps[0]["weights_differ"]
    old = torch.cat([weight.flatten() for weight in one().weights(0).values()])
    used = torch.cat([weight.flatten() for weight in dump.weights(1).values()])
    assert 0.4 < (used == old).double().mean() < 0.6


# ---- memory ----


def _growth(rank, cfg, folder):
    """(bytes of this rank's weights, of the largest of them, of the largest layer; the most that
    writing any file of a dump allocates at a time)."""
    trainer = trainer_of(cfg)
    bytes_of = {}  # number of a layer -> [bytes of its weights]
    for tag, weights in trainer.reducer.whole():
        number = layer_number(tag.name, cfg.n_layer)
        bytes_of.setdefault(number, []).append(weights.nbytes)
    peaks = []

    def watched(*args, usual=Writer.write_tensors):
        returned = []
        peaks.append(peak_of(lambda: returned.append(usual(*args))))
        return returned[0]

    with patch.object(Writer, "write_tensors", watched):
        write_run(trainer, Data(cfg), folder)
    layers = bytes_of.values()
    return sum(map(sum, layers)), max(map(max, layers)), max(map(sum, layers)), max(peaks)


@pytest.mark.parametrize("layout", [
    {"dp": 2, "arch": "llama"}, {"dp": 2, "tp": 2, "zero": 1}, {"dp": 2, "zero": 3},
    ROOT | {"dp": 2, "arch": "llama"}, ROOT | {"dp": 2, "tp": 2, "zero": 1},
    ROOT | {"dp": 2, "zero": 3}], ids=str)
def test_writing_holds_one_slice_at_a_time(corpus, tmp_path, layout):
    """Its copy and, while it is summed, its messages. ZeRO-3: and one layer, gathered, and the
    layer that is freed then. 16 KB for small things."""
    cfg = config(corpus, n_layer=8, n_embd=96, microbatches=1, steps=2, **layout)
    for own, largest, layer, peak in pool(check(cfg, 1), _growth, cfg, tmp_path / "dump"):
        slices = 1 + (cfg.zero > 0)
        gathered = 2 * layer if cfg.zero == 3 else 0
        assert largest <= peak <= slices * largest + gathered + (16 << 10)
        assert peak < own / 3


def _peaks(rank, cfg, folder):
    """(the most bytes that this rank allocates at a time in a run of two steps, the same with a
    dump). Each is measured twice, because the profiler may lose the events of a run."""
    def train_two_steps(trainer, data):
        for number in (0, 1):
            batches = data.training(cfg, number, trainer.mesh)
            norm, sums = trainer.step(batches, learning_rate(cfg, number))

    def peak(run):
        return max(peak_of(lambda: run(trainer_of(cfg), Data(cfg)))
                   for _ in range(2))

    return peak(train_two_steps), peak(partial(write_run, folder=folder))


@pytest.mark.parametrize("layout", [
    {"dp": 2, "tp": 2, "zero": 1, "dtype": "bfloat16"}, {"dp": 2, "zero": 3}], ids=str)
def test_a_dump_adds_nothing_to_the_peak_of_a_run(corpus, tmp_path, layout):
    """Copies of a slice are fewer bytes than what a step needs beside weights and moments, even of
    few tokens."""
    cfg = config(corpus, n_layer=8, n_embd=96, batch_size=4, microbatches=1, steps=2, **layout)
    peaks = pool(check(cfg, 1), _peaks, cfg, tmp_path / "dump")
    without, dumped = map(max, zip(*peaks, strict=True))
    assert dumped <= without


# ---- the command ----


def _record(rank, *args):
    _main(rank, *args, program=record)


def recording(size, folder, words, tmp_path, fn=_record, **more):
    """The command in `size` forked ranks: a Run."""
    return Run(size, [folder, *words], tmp_path, fn=fn, **more)


def test_a_dump_is_one_line_and_nothing_else_and_replaces_a_dump(corpus, tmp_path):
    """No checkpoint, no folder --out. The dump before had masters, which the new one has not."""
    out, folder = tmp_path / "out", tmp_path / "deep" / "dump"
    for dtype, files_of_weights in (("bfloat16", 3), ("float64", 0)):
        run = recording(2, folder, flags(corpus, out, tp=2, dtype=dtype), tmp_path)
        assert run.wait() == [0, 0] and not run.read(), run.read()
        assert run.read("stdout") == f"dump of two steps in {folder}\n"
        assert len([*folder.glob("masters-*")]) == files_of_weights
    assert read_dump(folder).dtype == "float64" and not out.exists()
    assert not Path(folder, DUMP_BEGUN).exists()


def test_a_dump_has_a_step_of_the_warm_up_and_one_at_the_full_rate(corpus, tmp_path):
    """... whatever the flags say, of which each would change a rate."""
    words = flags(corpus, "out", lr=1e-2, steps=9, warmup_steps=5)
    run = recording(1, tmp_path / "dump", words, tmp_path)
    assert run.wait() == [0], run.read()
    assert [step["lr"] for step in read_dump(tmp_path / "dump").steps] == [5e-3, 1e-2]


@pytest.mark.parametrize("starts", ["", "-m torch.distributed.run"], ids=["python", "torchrun"])
def test_one_process_starts_all_ranks(corpus, tmp_path, starts):
    run = command(*starts.split(), "-m", "extras.doctor.record", tmp_path / "dump",
                  *flags(corpus, "out", tp=2, dp=2))
    assert run.returncode == 0, run.stderr
    assert run.stdout == ("GPT of 2 layers, 8 wide, on 4 ranks: 2 data x 2 tensor; loading torch\n"
                          f"dump of two steps in {tmp_path}/dump\n")
    layout = read_dump(tmp_path / "dump").layout
    assert layout["tp"] == layout["dp"] == 2


@pytest.mark.parametrize("words", ["", "--help", "x --help", "x --tp 3", "x --stepz 3"])
def test_help_and_wrong_flags_do_not_wait_for_torch(words):
    run = command("-X", "importtime", "-m", "extras.doctor.record", *words.split())
    loaded = re.findall(r"\| +(\S+)", run.stderr)
    assert run.returncode in (0, 2) and "run.config" in loaded and "torch" not in loaded


def _record_slowly(rank, *args):
    """Each batch takes a second to read."""
    training = Data.training

    def slowly(*args):
        print("reads", flush=True)
        time.sleep(1)
        return training(*args)

    Data.training = slowly
    _record(rank, *args)


def test_a_signal_says_that_the_dump_is_not_complete(corpus, tmp_path):
    run = recording(1, tmp_path / "dump", flags(corpus, "out"), tmp_path, fn=_record_slowly)
    run.until(lambda: "reads" in run.read("stdout"))
    run.signal(0, signal.SIGINT)
    assert run.wait() == [128 + signal.SIGINT]
    assert run.read() == "record.py: stopped by SIGINT before the dump was complete\n"
    assert not (tmp_path / "dump" / DUMP).exists()


def test_a_full_disk_is_one_line_and_no_dump(corpus, tmp_path):
    """A limit of 2000 bytes a file, which weights-0 exceeds; a later run takes the folder."""
    folder = tmp_path / "dump"
    run = recording(2, folder, flags(corpus, "out", dp=2, zero=3), tmp_path, limit=2000)
    assert run.wait() == [2, 2] and run.read().count("\n") == 1
    assert "weights-0.safetensors" in run.read() and "File too large" in run.read()
    with pytest.raises(ValueError, match="dump.json: No such file"):
        read_dump(folder)
    record.refuse_wrong_folder(str(folder), Config())


REFUSED = {  # the arguments: the line
    "D --trace t.json": "a dump takes no --trace; leave it out",
    "D --metrics m.json": "a dump takes no --metrics", "D --keep 1": "a dump takes no --keep",
    "D --resume auto": "a dump takes no --resume", "D --save-interval 2": "no --save-interval",
    "D --watch --dp 2": "a dump takes no --watch", "D --dropout 0.1": "a dump takes no --dropout",
    "--sp": "name a folder before --sp", "file": "file: Not a directory",
    "full": "full holds something else than a dump; name another folder",
    "almost": "almost holds something else", "other": "other holds something else",
    "alone": "alone holds something else",
    "mine --init-from mine/weights-0.safetensors": "would write over --init-from",
    "out/step-00000004 --out out": "would be in the checkpoint"}


@pytest.mark.parametrize("line", REFUSED)
def test_what_a_dump_cannot_be_is_one_line(corpus, tmp_path, line, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"full/notes.txt": "", "almost/dump.json": '{"format": 1', "almost/notes": "",
                       "other/dump.json": '{"mine": 1}', "alone/weights-0.safetensors": "",
                       "mine/dump.json": '{"format": 1', "mine/weights-0.safetensors": ""}.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("file").touch()
    folder, *words = line.split()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    error = one_line(record.main, ["record.py", folder, *flags(corpus, "out"), *words], capsys,
                     monkeypatch)
    assert error.startswith("record.py: ") and REFUSED[line] in error
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


# ---- reading ----


@pytest.fixture(scope="session")
def small(one):
    return one().folder


def to_hugging_face(tensors):
    """GPT-2's own names, its four matrices (in, out)."""
    for name, (shape, data) in [*tensors.items()]:
        del tensors[name]
        if name.endswith(CONV1D):
            matrix = torch.frombuffer(bytearray(data), dtype=torch.double).view(shape)
            shape, data = shape[::-1], matrix.t().contiguous().numpy().tobytes()
        tensors[name.removeprefix("transformer.")] = shape, data


def test_hugging_faces_names_and_shapes_are_read_as_ours(one, small, tmp_path):
    folder = Path(shutil.copytree(small, tmp_path / "dump"))
    for kind in ("weights-0", "weights-1", "weights-2", "gradients-1", "gradients-2"):
        rewrite(folder / f"{kind}.safetensors", to_hugging_face)
    change_json(folder, names="hugging_face")
    got = read_dump(folder)
    assert got.names == "hugging_face"
    for file, name, tensor in every_tensor(one()):
        assert torch.equal(got.tensors[file][name], tensor), (file, name)


def test_a_dump_of_another_form_has_its_own_names_and_may_lack_files(small, tmp_path):
    """Here nothing but weights-0 and gradients-1."""
    folder = Path(shutil.copytree(small, tmp_path / "dump"))
    change_json(folder, model=None)
    for path in folder.glob("*.safetensors"):
        if path.stem not in ("weights-0", "gradients-1"):
            path.unlink()
        else:
            rewrite(path, lambda tensors: tensors.update(new=tensors.pop("transformer.ln_f.bias")))
    got = read_dump(folder)
    assert got.model is None and "new" in got.weights(0) and got.ids(1) is None
    assert got.gradients(1)["new"].shape == (24,)
    assert got.gradients(1).keys() == got.weights(0).keys()
    assert not got.gradients(2) and not got.weights(1) and not got.masters(0)


def change_json(folder, **values):
    path = Path(folder, DUMP)
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


GONE = object()


def inside(*place):
    """A function that puts a value into dump.json: ("layout", "dp", 2) into its layout. GONE: takes
    the name out."""
    def change(folder):
        *keys, last, value = place
        path = Path(folder, DUMP)
        given = json.loads(path.read_text())
        inner = given
        for key in keys:
            inner = inner[key]
        inner[last] = value
        if value is GONE:
            del inner[last]
        path.write_text(json.dumps(given))
    return change


def in_file(name, change):
    return lambda folder: change(Path(folder, name))


def in_tensors(name, change, code="F64"):
    return lambda folder: rewrite(Path(folder, name), change, code)


def of(text):
    """A function that makes this text the content of a file."""
    return lambda path: path.write_bytes(text)


def cut(length):
    """A function that makes a file so long, in bytes."""
    return lambda path: os.truncate(path, length)


def replaced(make):
    """A function that puts a folder or a pipe in the place of a file."""
    def change(path):
        path.unlink()
        make(path)
    return change


def first_id(value, name="ids"):
    def change(tensors):
        shape, data = tensors[name]
        tensors[name] = shape, value.to_bytes(8, "little", signed=True) + data[8:]
    return change


def flatten_ids(tensors):
    tensors.update({name: ((36, 12), data) for name, (_, data) in tensors.items()})


def huge_header(path):
    """A header of 1 TB, in a file of 2 TB that holds next to nothing."""
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{")
    os.truncate(path, 2 << 40)


TENSOR, WEIGHTS, IDS = "gradients-1.safetensors", "weights-0.safetensors", "tokens-2.safetensors"
NOT_THERE = ": No such file or directory"
DAMAGE = {  # what happens to the folder: (how, the line)
    "gone": (shutil.rmtree, "dump: no such folder; python -m extras.doctor.record makes"),
    "no dump.json": (in_file(DUMP, os.unlink), DUMP + NOT_THERE),
    "no weights-0": (in_file(WEIGHTS, os.unlink), WEIGHTS + NOT_THERE),
    "dump.json cut off": (in_file(DUMP, cut(99)), "dump.json: Unterminated string"),
    "dump.json deep": (in_file(DUMP, of(b"[" * 10**5)), "dump.json: nested too deep"),
    "dump.json huge": (in_file(DUMP, cut(1 << 40)), "dump.json: more than 64 MiB"),
    "dump.json a list": (in_file(DUMP, of(b"[1]")), "dump.json: not a JSON object"),
    "dump.json no text": (in_file(DUMP, of(b"\xff")), "dump.json: 'utf-8' codec"),
    "dump.json a folder": (in_file(DUMP, replaced(os.mkdir)), "dump.json: Is a directory"),
    "dump.json a pipe": (in_file(DUMP, replaced(os.mkfifo)), "dump.json is not a regular file"),
    "format 2": (inside("format", 2), "its format is not that of a dump"),
    "format true": (inside("format", True), "its format is not"),
    "names": (inside("names", "deepspeed"), "its names is not"),
    "names a list": (inside("names", [[]]), "its names is not"),
    "dtype": (inside("dtype", "int8"), "its dtype is not"),
    "grad dtype a list": (inside("grad_dtype", []), "its grad_dtype is not"),
    "no loss": (inside("loss", GONE), "has no loss"),
    "balance": (inside("balance", math.nan), "its balance is not"),
    "layout a list": (inside("layout", [2]), "its values are not"),
    "dp true": (inside("layout", "dp", True), "its dp is not"),
    "dp 0": (inside("layout", "dp", 0), "its dp is not"),
    "dp 10^9": (inside("layout", "dp", 10**9), "its dp is not"),
    "no tp": (inside("layout", "tp", GONE), "has no tp"),
    "zero 4": (inside("layout", "zero", 4), "its zero is not"),
    "sp 0": (inside("layout", "sp", 0), "its sp is not"),
    "tp 10^6": (inside("layout", "tp", 10**6), "its tp is not"),
    "cp 10^6": (inside("layout", "cp", 10**6), "cannot split sequences of 12 tokens"),
    "pp 10^6": (inside("layout", "pp", 10**6), "its pp is not"),
    "schedule": (inside("layout", "schedule", "dualpipe"), "its schedule is not"),
    "beta nan": (inside("optimizer", "beta1", math.nan), "its beta1 is not"),
    "eps 10^400": (inside("optimizer", "eps", 10**400), "its eps is not"),
    "three steps": (inside("steps", [{}] * 3), "its steps is not"),
    "loss a text": (inside("steps", 0, "loss", "nan"), "its loss is not"),
    "lr nan": (inside("steps", 0, "lr", math.nan), "its lr is not"),
    "scale 0": (inside("steps", 1, "scale", 0.0), "its scale is not"),
    "no norm": (inside("steps", 1, "norm", GONE), "has no norm"),
    "differ": (inside("steps", 0, "weights_differ", [1]), "its weights_differ is not"),
    "10^9 layers": (inside("model", "n_layer", 10**9), "too few for the model of dump.json"),
    "10^9 wide": (inside("model", "n_embd", 12 * 10**8), "are too few for the model"),
    "10^9 words": (inside("model", "vocab_size", 10**9), "are too few for the model"),
    "layers true": (inside("model", "n_layer", True), "its model is not"),
    "unknown size": (inside("model", "n_heads", 2), "its model is not"),
    "one layer more": (inside("model", "n_layer", 4), "too few for the model of dump.json"),
    "one layer less": (inside("model", "n_layer", 2), "which a model of these flags lacks"),
    "longer sequences": (inside("model", "block_size", 16), "wpe.weight: 12 positions; take --b"),
    "weights cut off": (in_file(WEIGHTS, cut(9000)), "cut off at the end"),
    "header cut off": (in_file(TENSOR, cut(99)), "its header is damaged"),
    "empty file": (in_file(TENSOR, cut(0)), "its header is damaged"),
    "header huge": (in_file(TENSOR, huge_header), "not a safetensors file, or its header is damag"),
    "a folder": (in_file(TENSOR, replaced(os.mkdir)), TENSOR + ": Is a directory"),
    "a pipe": (in_file(TENSOR, replaced(os.mkfifo)), TENSOR + " is not a regular file"),
    "tokens a pipe": (in_file(IDS, replaced(os.mkfifo)), IDS + " is not a regular file"),
    "tensor missing": (in_tensors(TENSOR, lambda t: t.pop("transformer.ln_f.bias")),
                       "ln_f.bias: missing"),
    "tensor more": (in_tensors(TENSOR, lambda t: t.update(more=((1,), bytes(8)))),
                    "has transformer.more, which a model of these flags lacks"),
    "no targets": (in_tensors(IDS, lambda t: t.pop("targets"), "I64"), "targets: missing"),
    "flat ids": (in_tensors(IDS, flatten_ids, "I64"), "does not begin with [1, 1]"),
    "ids of other ranks": (inside("layout", "dp", 2), "does not begin with [2, 1]"),
    "id 67": (in_tensors(IDS, first_id(VOCAB), "I64"), "tensor ids: 0 to 67, not 0 to 66"),
    "id -1": (in_tensors(IDS, first_id(-1), "I64"), "tensor ids: -1 to 66, not 0 to 66")}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_dump_is_one_line(small, tmp_path, how):
    folder = Path(shutil.copytree(small, tmp_path / "dump"))
    spoil, says = DAMAGE[how]
    spoil(folder)
    with pytest.raises(ValueError) as error:
        dump = read_dump(folder)
        dump.ids(2)
    assert says in str(error.value) and "\n" not in str(error.value), error.value


def _with_first_target(folder, value):
    """The targets of step 2, the first one replaced."""
    in_tensors(IDS, first_id(value, "targets"), "I64")(folder)
    return read_dump(folder).targets(2)


def test_padding_is_torchs_minus_100_or_nanogpts_minus_1(small, tmp_path):
    folder = Path(shutil.copytree(small, tmp_path / "dump"))
    as_torch, as_nanogpt = (_with_first_target(folder, value) for value in (-100, -1))
    assert as_torch.flatten()[0] == ABSENT and torch.equal(as_torch, as_nanogpt)
    assert as_torch.eq(ABSENT).sum() == 1
    for value in (-2, -99, -101):
        with pytest.raises(ValueError, match=f"tensor targets: {value} to 66, not 0 to 66"):
            _with_first_target(folder, value)


def test_a_loss_that_is_not_finite_is_no_damage(small, tmp_path):
    folder = Path(shutil.copytree(small, tmp_path / "dump"))
    inside("steps", 0, "loss", math.nan)(folder)
    inside("steps", 1, "norm", math.inf)(folder)
    first, second = read_dump(folder).steps
    assert math.isnan(first["loss"]) and second["norm"] == math.inf
