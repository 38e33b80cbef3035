"""Files from strangers: whatever lies in a folder, a command ends soon, with one line that names
file, field and value. (Environments, flags and data: test_commands.py.)"""

import json
import os
import random
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch

import train
from data import prepare as prepare_file
from data.batches import Data, load_tokenizer
from data.foreign import MAX_JSON, open_file, parse_json, read_json
from data.prepare import learn_bpe, prepare
from run import checkpoint, tensorfile
from run.hugging_face import flags_of_folder, kept_settings
from run.weights import INDEX, kept_of, read_headers
from tests.harness import config
from tests.runs import one_line

ZEROS = 40 * 10**9  # bytes of a file without content on the disk

# What lies in the place of a file -> (how it comes there, what is said)
PLACES = {
    "a pipe": (os.mkfifo, "is not a regular file"),
    "a device": (lambda path: os.symlink("/dev/zero", path), "is not a regular file"),
    "a link to itself": (lambda path: os.symlink(path, path), "Too many levels of symbolic links"),
    "a link to nowhere": (lambda path: os.symlink("nowhere", path), "No such file or directory"),
    "a folder": (os.mkdir, "Is a directory"),
    "zeros": (lambda path: (path.touch(), os.truncate(path, ZEROS)), ""),
    "nothing": (Path.touch, "")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name,read", [
    ("config.json", flags_of_folder), ("config.json", kept_settings), (INDEX, read_headers),
    (checkpoint.MODEL, read_headers), (checkpoint.MANIFEST, checkpoint.read_manifest),
    ("meta.json", load_tokenizer), ("meta.json", lambda folder: Data(config(str(folder))))],
    ids=["config", "kept", "index", "tensors", "manifest", "tokenizer", "data"])
def test_whatever_lies_in_the_place_of_a_file_is_refused_by_its_name(place, name, read, tmp_path):
    put, says = PLACES[place]
    put(tmp_path / name)
    start = time.monotonic()
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    said = str(error.value)
    assert str(tmp_path / name) in said and says in said and "\n" not in said, said
    assert time.monotonic() - start < 20  # and no MemoryError


@pytest.mark.parametrize("place", ["a pipe", "a device", "a link to itself", "zeros"])
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_folder_of_strangers_is_one_line_of_train_py(place, name, corpus, tmp_path, capsys,
                                                       monkeypatch):
    PLACES[place][0](tmp_path / name)
    argv = ["train.py", "--init-from", tmp_path, "--data", corpus, "--device", "cpu", "--out",
            tmp_path / "out", *"--block-size 8 --n-layer 1 --n-head 1 --n-embd 8".split()]
    if name == INDEX:
        (tmp_path / "config.json").write_text(json.dumps(
            {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8}))
    assert str(tmp_path / name) in one_line(train.main, argv, capsys, monkeypatch)


@pytest.mark.parametrize("words", [
    "--init-from LONG", "--init-from LONG/model.safetensors", "--data LONG", "--out LONG",
    "--out out --metrics LONG", "--init-from empty"])
def test_a_name_that_no_file_can_have_is_one_line(words, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    argv = ["train.py", "--data", corpus, "--device", "cpu", "--block-size", "8", "--out", "out",
            *words.replace("LONG", "a" * 5000).split()]
    error = one_line(train.main, argv, capsys, monkeypatch)
    assert "File name too long" in error or "No such file" in error or "no such folder" in error


@pytest.mark.parametrize("words", ["LONG", "pipe", "text --out LONG"])
def test_a_name_that_no_text_can_have_is_one_line_of_prepare(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("a line of text\n" * 100)
    os.mkfifo("pipe")
    argv = ["prepare.py", *words.replace("LONG", "a" * 5000).split()]
    error = one_line(prepare_file.main, argv, capsys, monkeypatch)
    assert "File name too long" in error or "pipe is not a regular file" in error
    assert "Errno" not in error


LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4,
         "hidden_size": 64, "intermediate_size": 96}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
FIELDS = [  # fields of a config.json -> what is said of them
    *(({**LLAMA, name: value}, f"its {name} is {value!r:.40}, not a whole number from 1 to")
      for name in ("num_hidden_layers", "hidden_size", "num_key_value_heads", "head_dim",
                   "max_position_embeddings")
      for value in (32.0, [32], {"a": 1}, True, "32", 0, 10**400)),
    *(({name: None}, f"its {name} is None, not a whole") for name in ("n_head", "n_positions")),
    ({**LLAMA, "rms_norm_eps": True}, "its rms_norm_eps is True, not a number above 0"),
    ({**LLAMA, "rope_theta": "1e4"}, "its rope_theta is '1e4', not a number above 0"),
    ({**LLAMA, "rope_scaling": {**LLAMA3, "factor": 10**400}}, "its factor is 1000000"),
    ({**LLAMA, "rope_scaling": {"rope_type": ["llama3"]}}, "its rope_type is ['llama3'], not a te"),
    ({**LLAMA, "rope_scaling": {"type": {}}}, "its type is {}, not a text"),
    *(({**LLAMA, name: value}, f"its {name} is {value!r}, not an object or null")
      for name in ("rope_scaling", "rope_parameters") for value in (1.0, [32], "default", True)),
    ({**LLAMA, "tie_word_embeddings": 1}, "its tie_word_embeddings is 1, not true or false"),
    ({**LLAMA, "layer_types": [3, "x"]}, "its layer_types is [3, 'x'], not a list, each a text"),
    ({**LLAMA, "layer_types": 7}, "its layer_types is 7, not a list"),
    ({"model_type": ["gpt2"]}, "its model_type is ['gpt2'], not a text"),
    ({"model_type": "a\nb"}, "its model_type is a"),
    ({"model_type": None}, "its model_type is None, not a text"),
    ({"eos_token_id": {"a": 1}}, "its eos_token_id is {'a': 1}, not a whole number from -1 to"),
    ({"eos_token_id": [2, None]}, "its eos_token_id is [2, None], not a whole number"),
    ({"bos_token_id": 0.5}, "its bos_token_id is 0.5, not a whole"),
    ({"n_head": 8, "num_attention_heads": 4}, "its num_attention_heads is 4, its n_head 8")]


@pytest.mark.parametrize("given,says", FIELDS, ids=lambda x: str(x)[:80] if type(x) is str else "")
def test_a_field_of_another_type_or_range_is_named_with_its_value(given, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError) as error:
        flags_of_folder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/config.json: {says}")


TEXTS = {  # a text in the place of a JSON object -> what is said
    b"[" * 100_000: "nested too deep", b'{"a":' * 200 + b"1" + b"}" * 200: "nested too deep",
    b"[1]": "not a JSON object", b"null": "not a JSON object", b"": "Expecting value",
    b'{"a": 1, "a": 2}': "a name comes twice", b"\xff\xfe\xff": "can't decode",
    b'{"a": 1' + b"0" * 5000 + b"}": "Exceeds the limit", b'{"a": "\x00"}': "control character"}


@pytest.mark.parametrize("text,says", TEXTS.items(), ids=lambda x: str(x)[:20])
def test_a_text_that_is_no_json_object_is_refused_in_one_line(text, says, tmp_path):
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(ValueError, match=f"^{tmp_path}/a: .*{says}") as error:
        read_json(tmp_path / "a")
    assert "\n" not in str(error.value)


def test_json_of_any_usual_depth_and_length_is_read(tmp_path):
    deep = {"a": [{"b": [None, 1e400, "c"]}] * 1000}
    for _ in range(45):
        deep = {"a": [deep]}
    assert parse_json(json.dumps(deep)) == deep
    (tmp_path / "a").write_bytes(b"{}" + b" " * (MAX_JSON - 2))
    assert read_json(tmp_path / "a") == {}


@pytest.mark.parametrize("file", ["a\0b", "a" * 5000, "a\nb", "\ud800", "../b", "/dev/zero", 7,
                                  None, "", "é" * 200], ids=lambda x: ascii(x)[:20])
def test_a_name_in_an_index_that_no_file_has_is_refused(file, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": file}}))
    with pytest.raises(tensorfile.CheckpointError) as error:
        read_headers(tmp_path)
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["a pipe", "a device", "a link to itself", "a folder"])
def test_a_file_of_an_index_that_is_none_is_named(place, tmp_path):
    put, says = PLACES[place]
    put(tmp_path / "part")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": "part"}}))
    with pytest.raises(tensorfile.CheckpointError, match=f"^{tmp_path}/part:? {says}"):
        read_headers(tmp_path)


def test_a_tensor_file_that_becomes_a_pipe_after_its_header_was_read_does_not_hang(tmp_path):
    path = tmp_path / checkpoint.MODEL
    head, entries = tensorfile.make_header({"a": torch.Size((3,))}, "F64", path)
    path.write_bytes(head + bytes(24))
    assert tensorfile.read_header(path) == entries and tensorfile.checksum(entries["a"]) > 0
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(tensorfile.CheckpointError, match="model.safetensors is not a regular file"):
        tensorfile.checksum(entries["a"])


def test_settings_that_are_kept_are_refused_in_one_line_too(tmp_path):
    """... where a file is named, and its folder has a config.json."""
    (tmp_path / "config.json").write_text('{"eos_token_id": "two"}')
    cfg = config("", init_from=str(tmp_path / "model.safetensors"))
    says = "config.json: its eos_token_id is 'two', not"
    with pytest.raises(tensorfile.CheckpointError, match=says):
        kept_of(cfg)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "vocab.tiktoken"])
@pytest.mark.parametrize("place", ["a pipe", "a device", "a folder"])
def test_data_that_are_no_files_are_refused(name, place, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "data")
    if name == "vocab.tiktoken":
        meta = json.loads((tmp_path / "data/meta.json").read_text())
        (tmp_path / "data/meta.json").write_text(json.dumps({**meta, "tokenizer": "bpe"}))
    else:
        (tmp_path / "data" / name).unlink()
    PLACES[place][0](tmp_path / "data" / name)
    with pytest.raises((ValueError, OSError), match=name):
        Data(config(str(tmp_path / "data")))


def test_opening_leaves_no_file_open_and_reads_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    with open_file(tmp_path / "a") as file:
        assert file.read() == b"abc"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for put in (os.mkfifo, os.mkdir):
            put(tmp_path / put.__name__)
            with pytest.raises((ValueError, OSError)):
                open_file(tmp_path / put.__name__)
    assert not [warning for warning in said if warning.category is ResourceWarning]


def test_a_text_of_one_long_word_is_prepared_in_seconds(tmp_path):
    """A merge rewrote the whole word: 300,000 letters took minutes."""
    letters = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=300_000)
    (tmp_path / "text").write_text("".join(letters))
    start = time.process_time()
    assert prepare([tmp_path / "text"], tmp_path / "data")["vocab_size"] == 1024
    assert time.process_time() - start < 30
    assert len(learn_bpe("ab" * 1000, 300)) < 300  # pairs of pairs, until none comes twice
