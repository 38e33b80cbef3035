"""Batches from train.bin and val.bin, the same in every layout. The global batch of step i is a
pure function of (seed, i); data rank d takes its slice of it, and microbatch k its part of that, so
no rank has to tell another what it read."""

import base64
import hashlib
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from data.prepare import BYTES, PATTERN, make_encoding, prepare, regular
from model import ABSENT

META = {  # the type of each value in meta.json that is used; numbers above 0, no empty text
    "vocab_size": int, "tokenizer": str, "pattern": str, "train_tokens": int, "val_tokens": int,
    "bytes_per_token": float, "gzip_bits_per_byte": float}


class DataError(ValueError):
    """One line about a file of tokens."""


def no_duplicates(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name comes twice")
    return dict(pairs)


def read_meta(path):
    """The values in meta.json. ValueError if a value cannot be used."""
    try:
        meta = json.loads(regular(path).read_bytes(), object_pairs_hook=no_duplicates)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(meta) is not dict or "vocab_size" not in meta:
        raise ValueError("it has no vocab_size")
    for name, kind in META.items():
        value = meta.get(name, kind(1))
        good = type(value) is kind or kind is float and type(value) is int
        if not good or value == "" or kind is not str and not 0 < value < math.inf:
            raise ValueError(f"its {name} is {str(value)[:40]}")
    if meta["vocab_size"] > 2**16:
        raise ValueError(f"its vocab_size is {meta['vocab_size']}, and tokens have 16 bits")
    if meta.get("tokenizer", "gpt2") not in ("bpe", "gpt2", "bytes"):
        raise ValueError(f"its tokenizer is {meta['tokenizer'][:40]}")
    return meta


def load_tokenizer(folder):
    """The tiktoken.Encoding of a prepared folder; without a meta.json (nanoGPT's own), GPT-2's."""
    path, ranks, meta = Path(folder, "meta.json"), BYTES, {}
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder of prepared data")
    if path.exists():
        meta = read_meta(path)
    kind = meta.get("tokenizer", "gpt2")
    if kind == "bpe":
        lines = regular(Path(folder, "vocab.tiktoken")).read_text().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
        if not BYTES.keys() <= ranks.keys() or sorted(ranks.values()) != [*range(len(lines))]:
            raise ValueError("vocab.tiktoken does not number all bytes and tokens")
    encoding = make_encoding(kind, ranks, meta.get("pattern", PATTERN))
    if meta.get("vocab_size", 0) > encoding.n_vocab:
        raise ValueError(f"its vocab_size is {meta['vocab_size']}, for {encoding.n_vocab} tokens")
    return encoding


class Data:
    """The two files, memory-mapped, and the values of meta.json. The process with local_rank 0
    prepares a corpus that is missing; the others on its machine wait for it."""

    def __init__(self, cfg, local_rank=0):
        self.folder, self.block = Path(cfg.data), cfg.block_size
        named = cfg.data in ("stdlib", "shakespeare")
        if named:
            self.folder = Path(__file__).parent / cfg.data
        meta = self.folder / "meta.json"
        if named and not meta.exists() and local_rank == 0:
            print(f"preparing {cfg.data} as a corpus, once", flush=True)
            prepare((cfg.data,), self.folder)
        deadline = time.time() + 300
        while named and not meta.exists() and time.time() < deadline:  # another process prepares
            time.sleep(0.2)
        self.meta = {"vocab_size": 50257}  # nanoGPT's own folders have no meta.json: GPT-2's
        if (self.folder / "meta.pkl").exists() and not meta.exists():  # its characters: count them
            ids = [np.fromfile(regular(path), "<u2") for path in self.folder.glob("*.bin")]
            self.meta = {"vocab_size": 1 + int(max((x.max() for x in ids if len(x)), default=0))}
        try:
            if meta.exists():
                self.meta = read_meta(meta)
            if self.meta.get("tokenizer") in ("bpe", "bytes"):  # GPT-2's may need a download
                load_tokenizer(self.folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"{meta} is damaged ({error}); make it anew") from None
        self.vocab_size = self.meta["vocab_size"]
        if cfg.tp > self.vocab_size:
            raise ValueError(f"--tp {cfg.tp} must be at most the vocabulary of {self.vocab_size}")
        self.train, self.val = self.memory_map("train"), self.memory_map("val")

    def memory_map(self, split):
        """The tokens of train.bin or val.bin. ValueError: missing, damaged or too short."""
        path = self.folder / f"{split}.bin"
        if not path.exists():
            raise ValueError(f"--data {self.folder}: {path.name} is missing; "
                             f"python data/prepare.py PATH --out {self.folder} makes it")
        size, told = regular(path).stat().st_size, self.meta.get(f"{split}_tokens")
        if size != 2 * (told or size // 2):
            held = f" for {told} tokens" if told else ", not a whole number of uint16"
            raise ValueError(f"{path} is truncated: {size} bytes{held}; make it anew")
        if size // 2 <= self.block:
            raise ValueError(f"--block-size {self.block} is longer than {path}, which has "
                             f"{size // 2} tokens; take less than that")
        try:
            tokens = np.memmap(path, dtype="<u2", mode="r")
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror})") from None
        self.check_ids(tokens[: 1 << 27], path)  # what lies beyond is checked when it is read
        return tokens

    def check_ids(self, ids, path):
        if ids.max() >= self.vocab_size:
            raise DataError(f"{path} holds token id {ids.max()}, beyond the vocabulary of "
                             f"{self.vocab_size} in {self.folder}/meta.json; make it anew")

    def training(self, cfg, step, mesh):
        """The microbatches of this data rank: [(ids, targets)], each (b, S)."""
        rng = np.random.default_rng([cfg.seed, step])
        starts = rng.integers(0, len(self.train) - self.block, cfg.batch_size)
        return self.batch(cfg, self.train, starts, mesh)

    def ahead(self, cfg, mesh, start):
        """The same, called for one step after another: the next batch is read, and copied to the
        GPU, while this one is computed."""
        cuda = mesh.device.type == "cuda"
        reader = ThreadPoolExecutor(1, initializer=torch.cuda.set_device if cuda else None,
                                    initargs=(mesh.device,) * cuda)
        coming = [reader.submit(self.training, cfg, start, mesh)]

        def batches(step):
            if step + 1 < cfg.steps:
                coming.append(reader.submit(self.training, cfg, step + 1, mesh))
            return coming.pop(0).result()

        return batches

    def fingerprint(self):
        """Some bytes that differ if the data do: meta.json's content, the files' sizes, and 64
        pieces of each."""
        digest = hashlib.sha256(json.dumps(self.meta, sort_keys=True).encode())
        for tokens in (self.train, self.val):
            digest.update(b"%d" % len(tokens))
            for start in np.linspace(0, max(0, len(tokens) - (1 << 15)), 64).astype(int):
                digest.update(tokens[start : start + (1 << 15)].tobytes())
        return digest.digest()

    def validation(self, cfg, mesh, batches=None):
        """The windows of val.bin side by side, or the first `batches` batches of them: how many
        they are, and their batches. The last one is filled up with windows that do not count."""
        windows = (len(self.val) - 1) // self.block
        windows = min(windows, (batches or windows) * cfg.batch_size)
        starts = np.full((-(-windows // cfg.batch_size), cfg.batch_size), ABSENT)
        starts.flat[:windows] = np.arange(windows) * self.block
        return windows, (self.batch(cfg, self.val, row, mesh) for row in starts)

    def batch(self, cfg, tokens, starts, mesh):
        """This data rank's microbatches of the windows of `tokens` that begin at `starts`. Where a
        window is ABSENT, so are its targets, which the loss leaves out."""
        if tokens.base.size() < tokens.nbytes:  # the file's size by now; to read past it is SIGBUS
            raise DataError(f"{tokens.filename} was cut off during the run; make it anew")
        (index, number), microbatches = mesh.place("dp", "ep"), []
        for part in np.split(np.split(starts, number)[index], cfg.microbatches):
            rows = np.full((len(part), self.block + 1), ABSENT)
            for row, start in zip(rows, part, strict=True):
                if start != ABSENT:
                    row[:] = tokens[start : start + self.block + 1]
            self.check_ids(rows, self.folder)
            rows = torch.from_numpy(rows)
            if mesh.device.type == "cuda":
                rows = rows.pin_memory().to(mesh.device, non_blocking=True)
            microbatches.append((rows[:, :-1].clamp(min=0), rows[:, 1:]))
        return microbatches
