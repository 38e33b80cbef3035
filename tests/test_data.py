"""data/: every layout and every run of a seed has the same batches; text becomes tokens and text
again; a file that is no data is refused in one line."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import regex
import tiktoken
import torch

from data import batches
from data.batches import Data, load_tokenizer
from data.files import FileError
from data.prepare import BYTES, PATTERN, learn_bpe, main, prepare, read_source, train_and_val
from model import ABSENT
from tests.harness import HERE, VOCAB, one_line


def flags_of(data, block_size=8, batch_size=36, microbatches=1, seed=1337):
    """The flags that data/ reads."""
    return SimpleNamespace(**{**locals(), "data": str(data)})


def random_corpus(folder, train=99, val=99):
    """Write prepared data of so many random tokens; return the folder."""
    rng = np.random.default_rng(0)
    for name, number in (("train", train), ("val", val)):
        rng.integers(0, VOCAB, number).astype("<u2").tofile(folder / f"{name}.bin")
    (folder / "meta.json").write_text(json.dumps({"vocab_size": VOCAB}))
    return folder


def place(index, of):
    """A mesh, seen from data rank `index` of `of`."""
    return SimpleNamespace(index_and_size=lambda axis: (index, of), device=torch.device("cpu"))


def joined(microbatches):
    """(ids, targets) of all microbatches."""
    return [torch.cat(part) for part in zip(*microbatches, strict=True)]


# ---- batches ----


def test_the_batch_of_a_step_is_the_same_in_every_layout(corpus):
    """... and is the one of (seed, step) by definition."""
    cfg = flags_of(corpus, seed=3)
    tokens = np.fromfile(f"{corpus}/train.bin", "<u2").astype(int)
    length = cfg.block_size
    starts = np.random.default_rng([3, 7]).integers(0, len(tokens) - length, cfg.batch_size)
    want = torch.tensor(np.stack([tokens[i : i + length + 1] for i in starts]))
    for ranks, n_microbatches in ((1, 1), (1, 4), (2, 3), (3, 2), (12, 3)):
        cfg.microbatches = n_microbatches
        data = Data(cfg)
        found = [batch for d in range(ranks) for batch in data.training(cfg, 7, place(d, ranks))]
        assert len(found) == ranks * n_microbatches
        ids, targets = joined(found)
        assert torch.equal(ids, want[:, :-1]) and torch.equal(targets, want[:, 1:])
    for seed, step in ((3, 8), (4, 7)):
        cfg.seed = seed
        assert not torch.equal(joined(Data(cfg).training(cfg, step, place(11, 12)))[0], ids[-3:])


@pytest.mark.parametrize("tokens,windows", [(64, 7), (65, 8), (9, 1)])
def test_validation_covers_every_window_once(tmp_path, tokens, windows):
    """A window of 8 needs 9 tokens; the last batch is filled up with windows that do not count."""
    cfg = flags_of(random_corpus(tmp_path, train=9, val=tokens), batch_size=4)
    values = np.fromfile(tmp_path / "val.bin", "<u2").tolist()
    rows = [values[i : i + 8] for i in range(1, tokens - 7, 8)]
    assert len(rows) == windows
    for ranks in (1, 2):
        found = []
        for d in range(ranks):
            number, each = Data(cfg).validation(cfg, place(d, ranks))
            assert number == windows
            found.append([joined(batch)[1] for batch in each])
        targets = torch.cat([part for parts in zip(*found, strict=True) for part in parts])
        assert targets.tolist() == rows + [[ABSENT] * 8] * (len(targets) - windows)
    number, each = Data(cfg).validation(cfg, place(0, 1), num_batches=1)
    assert number == min(4, windows) and len(list(each)) == 1


@pytest.mark.parametrize("vocab_size,dtype", [(65536, "<u2"), (65537, "<u4")])
def test_tokens_have_16_bits_where_these_are_enough(vocab_size, dtype, tmp_path):
    for split in ("train", "val"):
        np.array([7, vocab_size - 1] * 5).astype(dtype).tofile(tmp_path / f"{split}.bin")
    meta = {"vocab_size": vocab_size, "tokenizer": "of another program"}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert Data(flags_of(tmp_path)).train.tolist() == [7, vocab_size - 1] * 5


def test_a_folder_of_nanogpt_is_read_as_it_is(tmp_path):
    """No meta.json: GPT-2's vocabulary. Its meta.pkl is never opened: a pickle may run code."""
    for split in ("train", "val"):
        np.arange(50247, 50257).astype("<u2").tofile(tmp_path / f"{split}.bin")
    os.mkfifo(tmp_path / "meta.pkl")
    data = Data(flags_of(tmp_path))
    assert data.vocab_size == 50257 and data.val.tolist() == [*range(50247, 50257)]


def test_data_that_differ_have_other_fingerprints(tmp_path):
    """train.bin is longer than a piece."""
    def fingerprint(change=None, **tokens):
        random_corpus(tmp_path, **{"train": 40_000, "val": 300, **tokens})
        if change == "meta.json":
            (tmp_path / change).write_text(json.dumps({"vocab_size": VOCAB + 1}))
        elif change:  # change the last token
            (tmp_path / change).write_bytes((tmp_path / change).read_bytes()[:-2] + b"\7\0")
        return Data(flags_of(tmp_path)).fingerprint()

    others = [fingerprint(), fingerprint(train=40_001), fingerprint(val=301),
              *(fingerprint(name) for name in ("meta.json", "train.bin", "val.bin"))]
    assert len(set(others)) == len(others) and fingerprint() == others[0]


def test_the_first_process_of_a_machine_prepares_a_corpus_and_the_others_wait(
        corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(batches, "__file__", str(tmp_path / "batches.py"))
    monkeypatch.setattr(batches, "prepare", lambda out: shutil.copytree(corpus, out))
    monkeypatch.setattr(batches.time, "sleep", lambda seconds: Data(flags_of("stdlib")))
    assert Data(flags_of("stdlib"), local_rank=1).vocab_size == VOCAB
    assert capsys.readouterr().out == "preparing stdlib as a corpus, once\n"


# ---- what is no data ----


def zeros(path):
    path.touch()
    os.truncate(path, 40 * 10**9)  # which take no place on the disk


LINES = b"".join(b"%s %d\n" % (base64.b64encode(byte), rank) for byte, rank in BYTES.items())
SIXES = np.full(99, 6)
# What lies in the place of a file: bytes, values for meta.json, None (nothing), or a function that
# makes it
NO_DATA = [
    ("val.bin", None, "val.bin: No such file or directory"),
    ("train.bin", b"123", "train.bin is damaged: 3 bytes, not 1 tokens of uint16"),
    ("train.bin", os.mkfifo, "train.bin is not a regular file"),
    ("val.bin", (SIXES + 61).astype("<u2").tobytes(), "val.bin holds token id 67, but the vocab"),
    ("meta.json", {"val_tokens": 701}, "val.bin is damaged: 198 bytes, not 701 tokens of uint16"),
    ("meta.json", b"[" * 10**5, "meta.json: not JSON ("),
    ("meta.json", b"[1]", "meta.json: not a JSON object"),
    ("meta.json", b"{}", "meta.json: vocab_size is None, not a number above 0, up to 2^31"),
    ("meta.json", {"vocab_size": 10**12}, "vocab_size is 1000000000000, not a number abo"),
    ("meta.json", {"bytes_per_token": 0}, "bytes_per_token is 0, not a number above 0"),
    ("meta.json", {"vocab_size": 300}, "vocab_size is 300, but its tokenizer (bytes) has 256"),
    ("meta.json", {"tokenizer": ["x"]}, "tokenizer is ['x']; bpe, gpt2 and bytes can be read"),
    ("meta.json", {"tokenizer": "gpt2"}, "vocab_size is 67, but its tokenizer (gpt2) has 50257 to"),
    ("vocab.tiktoken", zeros, "vocab.tiktoken: larger than 64 MiB"),
    ("vocab.tiktoken", LINES + b"~~ 256", "vocab.tiktoken: line 257 is b'~~ 256', not a new token"),
    ("vocab.tiktoken", LINES + b"AA== 256", "vocab.tiktoken: line 257 is b'AA== 256', not a new"),
    ("vocab.tiktoken", LINES[:-9], "vocab.tiktoken: not every byte is a token")]


@pytest.mark.parametrize("name,content,says", NO_DATA, ids=[row[-1] for row in NO_DATA])
def test_what_is_no_data_is_one_line_with_file_and_value(name, content, says, tmp_path,
                                                         monkeypatch):
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: pytest.fail("tries a download"))
    path = random_corpus(tmp_path) / name
    meta = {"vocab_size": 67, "tokenizer": "bpe" if name == "vocab.tiktoken" else "bytes"}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    path.unlink(missing_ok=True)
    if isinstance(content, dict):
        content = json.dumps(meta | content).encode()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        content(path)
    with pytest.raises(FileError) as error:
        cfg = flags_of(tmp_path)
        [*Data(cfg).validation(cfg, place(0, 1))[1]]
        load_tokenizer(tmp_path)
    said = str(error.value)
    assert said.startswith(f"{tmp_path}/") and says in said and "\n" not in said, said


def test_a_folder_without_data_is_one_line_with_the_command_that_writes_it(tmp_path):
    for read in (lambda: Data(flags_of(tmp_path)), lambda: load_tokenizer(tmp_path)):
        with pytest.raises(FileError) as error:
            read()
        assert str(error.value) == (f"{tmp_path}: no prepared data there; python data/prepare.py "
                                    f"SOURCE --out {tmp_path} writes this folder")
    with pytest.raises(FileError, match="^--block-size 9 is longer than .*/train.bin allows, "):
        Data(flags_of(random_corpus(tmp_path, train=9, val=10), block_size=9))


# ---- prepare ----


def write_texts(folder, number=40):
    folder.mkdir()
    for i in range(number):
        (folder / f"{i}.txt").write_text(f"Story {i}: é 你好 <|endoftext|>\n" * (10 + i % 5))
    return folder


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes", "gpt2"])
def test_text_becomes_tokens_and_text_again_and_twice_the_same_bytes(
        tokenizer, tmp_path, monkeypatch):
    """GPT-2's tokenizer (here one of bytes in its place) ends each text with its token."""
    words = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=BYTES,
                              special_tokens={"<|endoftext|>": 50256})
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: words)
    texts = write_texts(tmp_path / "texts")
    metas = [prepare([texts], tmp_path / name, tokenizer, 300) for name in "ab"]
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
             for name in "ab"]
    assert metas[0] == metas[1] == json.loads(files[0]["meta.json"]) and files[0] == files[1]
    assert ("vocab.tiktoken" in files[0]) == (tokenizer == "bpe") and len(files[0]) <= 4

    data = Data(flags_of(tmp_path / "a"))
    assert data.vocab_size == {"bpe": 300, "bytes": 256, "gpt2": 50257}[tokenizer]
    parts = train_and_val(read_source(texts))
    for tokens, part in zip((data.train, data.val), parts, strict=True):
        end = "<|endoftext|>" if tokenizer == "gpt2" else ""
        assert load_tokenizer(tmp_path / "a").decode(tokens) == "".join(text + end for text in part)
        assert (tokens == 50256).sum() == (len(part) if tokenizer == "gpt2" else 0)
    assert metas[0]["bytes_per_token"] == len("".join(parts[1]).encode()) / len(data.val)


def slow_bpe(text, vocab_size):
    """learn_bpe by its definition: count every pair anew."""
    words = [[bytes([b]) for b in word.encode()] for word in regex.findall(PATTERN, text)]
    ranks = dict(BYTES)
    while len(ranks) < vocab_size:
        count = Counter()
        for word in words:
            count.update(a + b for a, b in zip(word, word[1:], strict=False))
        token, number = min(count.items(), key=lambda item: (-item[1], item[0]))
        if number < 2:
            break
        ranks[token] = len(ranks)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] + word[i + 1] == token:
                    word[i : i + 2] = [token]
                i += 1
    return ranks


@pytest.mark.parametrize("seed", range(20))
def test_the_vocabulary_is_that_of_its_definition(seed):
    letters = np.random.default_rng(seed).choice([*"aaéb "], 300)
    text = "".join(letters) + " some words, and some words more"
    assert [*learn_bpe(text, 290).items()] == [*slow_bpe(text, 290).items()]


def test_texts_that_repeat_are_kept_and_never_stand_in_both_splits():
    once = [(f"f{i}", f"text {i}\n" * (1 + i % 3)) for i in range(200)]
    again = [(f"copy{i}", text) for i, (_, text) in enumerate(once[::3] * 20)]
    train_texts, val_texts = train_and_val(once + again)
    assert train_and_val(again + once[::-1]) == (train_texts, val_texts)  # in any order
    assert Counter(train_texts + val_texts) == Counter(text + "\n" for _, text in once + again)
    assert not set(train_texts) & set(val_texts)
    total, held = (sum(map(len, part)) for part in (set(train_texts + val_texts), set(val_texts)))
    assert total / 20 <= held <= total / 10


def test_few_large_texts_are_cut_each_at_the_end_of_a_line():
    """... also a text and its copy, at the same place."""
    text = "".join(f"line {i}\n" for i in range(1000))
    train_texts, val_texts = train_and_val([("a", text), ("b", text), ("c", "x" * 2000)])
    assert len(set(train_texts)) == len(set(val_texts)) == 2
    assert sorted(a + b for a, b in zip(train_texts, val_texts, strict=True)) == sorted(
        [text + "\n", text + "\n", "x" * 2000 + "\n"])
    for start, end in zip(train_texts, val_texts, strict=True):
        assert 0.89 < len(start) / len(start + end) < 0.901
        assert start.endswith("\n") or start[0] == "x"


def test_files_of_a_folder_that_are_no_text_are_skipped_and_counted(tmp_path, capsys):
    for name in ("a.txt", "b/c.py", "train.bin", "b/meta.json", ".git/config", "b/.hidden",
                 "vocab.tiktoken", "b/val.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8-sig")
    for i, encoding in enumerate(["cp1252", "utf-16", "utf-16-le", "utf-32"]):
        (tmp_path / f"é{i}").write_text("a café\n", encoding=encoding)
    assert read_source(tmp_path) == [("a.txt", "a.txt"), ("b/c.py", "b/c.py")]
    assert (f"skipped 4 files of {tmp_path}, which cannot be read as UTF-8 text: é0, é1, é2, "
            "...\n") in capsys.readouterr().out


@pytest.mark.parametrize("words,says", [
    ("--vocab-size 255", "--vocab-size 255: not in 256 (every byte) to 65536"),
    ("--tokenizer x", "invalid choice: 'x'"),
    ("/nowhere", "/nowhere: not readable as UTF-8 text (/nowhere: No such file or directory); "),
    ("/dev/zero", "/dev/zero is not a regular file"),
    ("small", "small to split; give at least 1000 bytes"), ("empty", "no file of UTF-8 text in"),
    ("texts --out /proc/x", "/proc/x: cannot be written (")])
def test_what_prepare_cannot_do_is_one_line(words, says, tmp_path, capsys, monkeypatch):
    write_texts(tmp_path / "texts")
    (tmp_path / "small").write_text("a text\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert says in one_line(main, ["prepare.py", *words.split()], capsys, monkeypatch)


@pytest.mark.parametrize("stdout", ["> /dev/full", "| true", ">&-"])
def test_prepare_does_its_work_where_nobody_can_read_what_it_says(stdout, tmp_path):
    texts = write_texts(tmp_path / "texts")
    line = f"{sys.executable} data/prepare.py {texts} --out {tmp_path}/out {stdout}"
    run = subprocess.run(line, shell=True, cwd=HERE, capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")
    assert len(Data(flags_of(tmp_path / "out")).val) > 0
