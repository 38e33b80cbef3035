"""Files from strangers are read as data: whatever lies in the place of a file, reading it ends
soon, with one line that names file, field and value. (Weights: test_weights.py; damage of a
checkpoint: test_checkpoint.py; --data: test_commands.py.)"""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

import sample
import train
from data.batches import Data, load_tokenizer
from data.foreign import read_json
from run import checkpoint, export, weights
from run.hugging_face import flags_of_folder
from run.tensorfile import CheckpointError
from run.weights import INDEX, read_headers
from tests.harness import config
from tests.runs import contents, flags, one_line

ZEROS = 40 * 10**9  # bytes of a file without content on the disk
# What lies in the place of a file -> (how it comes there, what is said)
PLACES = {
    "a pipe": (os.mkfifo, "is not a regular file"),
    "a device": (lambda path: os.symlink("/dev/zero", path), "is not a regular file"),
    "a folder": (os.mkdir, "Is a directory"),
    "zeros": (lambda path: (path.touch(), os.truncate(path, ZEROS)), ""),
    "nothing": (Path.touch, "")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name,read", [
    ("config.json", flags_of_folder), (INDEX, read_headers), (checkpoint.MODEL, read_headers),
    (checkpoint.MANIFEST, checkpoint.read_manifest), ("meta.json", load_tokenizer),
    ("meta.json", lambda folder: Data(config(str(folder))))],
    ids=["config", "index", "tensors", "manifest", "tokenizer", "data"])
def test_whatever_lies_in_the_place_of_a_file_is_refused_by_its_name(place, name, read, tmp_path):
    put, says = PLACES[place]
    put(tmp_path / name)
    start = time.monotonic()
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    said = str(error.value)
    assert str(tmp_path / name) in said and says in said and "\n" not in said, said
    assert time.monotonic() - start < 60  # and no MemoryError


@pytest.mark.parametrize("place", ["a pipe", "zeros"])
def test_a_folder_of_strangers_is_one_line_of_train_py(place, corpus, tmp_path, capsys,
                                                       monkeypatch):
    PLACES[place][0](tmp_path / "config.json")
    argv = ["train.py", *flags(corpus, tmp_path / "out", init_from=tmp_path)]
    assert f"{tmp_path}/config.json" in one_line(train.main, argv, capsys, monkeypatch)


@pytest.mark.parametrize("text,says", [
    (b"[" * 100_000, "nested too deep"), (b"[1]", "not a JSON object"), (b"", "Expecting value"),
    (b'{"a": 1, "a": 2}', "a name comes twice"), (b"\xff\xfe\xff", "can't decode"),
    (b'{"a": 1' + b"0" * 5000 + b"}", "Exceeds the limit")], ids=lambda x: str(x)[:20])
def test_a_text_that_is_no_json_object_is_refused_in_one_line(text, says, tmp_path):
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(ValueError, match=f"^{tmp_path}/a: .*{says}") as error:
        read_json(tmp_path / "a")
    assert "\n" not in str(error.value)


LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4,
         "hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize("given,says", [
    *(({**LLAMA, "hidden_size": value}, f"its hidden_size is {value!r:.40}, not a whole number")
      for value in (32.0, [32], True, "32", 0, 10**400)),
    ({"n_head": None}, "its n_head is None, not a whole"),
    ({**LLAMA, "rope_theta": "1e4"}, "its rope_theta is '1e4', not a number above 0"),
    ({**LLAMA, "rope_scaling": "default"}, "its rope_scaling is 'default', not an object or null"),
    ({**LLAMA, "tie_word_embeddings": 1}, "its tie_word_embeddings is 1, not true or false"),
    ({"model_type": ["gpt2"]}, "its model_type is ['gpt2'], not a text"),
    ({"eos_token_id": [2, None]}, "its eos_token_id is [2, None], not a whole number")],
    ids=lambda x: str(x)[:60] if type(x) is str else "")
def test_a_field_of_another_type_or_range_is_named_with_its_value(given, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError) as error:
        flags_of_folder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/config.json: {says}")


@pytest.mark.parametrize("file", ["a\0b", "a" * 5000, "../b", "/dev/zero", 7, None],
                         ids=lambda x: ascii(x)[:20])
def test_a_name_in_an_index_that_leads_elsewhere_or_nowhere_is_refused(file, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": file}}))
    with pytest.raises(CheckpointError) as error:
        read_headers(tmp_path)
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["n_layer", "n_embd", "n_experts", "vocab_size"])
def test_no_model_is_built_that_is_larger_than_its_file(
        trained, tmp_path, name, capsys, monkeypatch):
    """A forged size in a manifest with a right seal."""
    folder = shutil.copytree(trained / "step-00000004", tmp_path / "last")
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    manifest["model"][name] = 10**7
    manifest["seal"] = checkpoint.seal(manifest)
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    monkeypatch.setattr(weights, "kind_of", lambda config: pytest.fail("builds it"))
    line = one_line(sample.main, ["sample.py", "--out", folder], capsys, monkeypatch)
    assert f"{folder}/model.safetensors, tensor transformer." in line


def test_export_overwrites_nothing(trained, tmp_path, capsys, monkeypatch):
    out = shutil.copytree(trained, tmp_path / "out")
    before = contents(out)
    argv = ["export.py", "--out", out, "--to", out / "step-00000004"]
    assert "File exists" in one_line(export.main, argv, capsys, monkeypatch)
    assert contents(out) == before
