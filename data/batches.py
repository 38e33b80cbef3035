"""Batches from train.bin and val.bin, the same in every layout.

The batch of step i, over all ranks, is a pure function of (seed, i): batch_size sequences, each a
window of block_size + 1 tokens that begins at a random place. Data rank d takes the d-th of D equal
slices of the batch, and microbatch k the k-th part of the slice. So no rank has to tell another
what it read.

Each file holds tokens only, in little-endian uint16 (uint32 for a vocabulary of more than 65,536),
the texts one after the other; a folder's meta.json says how many tokens and which vocabulary
(data/prepare.py writes all of them).
"""

import base64
import hashlib
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch

from data.foreign import POSITIVE, TEXT, open_file, read_json, whole
from data.prepare import (
    BYTES,
    PATTERN,
    advice,
    make_encoding,
    prepare,
    token_type,
)
from model import ABSENT  # -100: a target that the loss leaves out; as a start: no window

# Fields of meta.json that this project reads; the first has to be there, others may be
SIZE_OF_META = {"vocab_size": whole(1)}
META = {"tokenizer": TEXT, "pattern": TEXT, "train_tokens": whole(1, 2**53),
        "val_tokens": whole(1, 2**53), "bytes_per_token": POSITIVE, "gzip_bits_per_byte": POSITIVE}
# How many tokens of a file are checked at the start. The others are checked when they are read
CHECKED_AT_START = 1 << 27
MAX_PREPARING = 300  # seconds to wait for another process that prepares the corpus


class DataError(ValueError):
    """A file of tokens is damaged. One line. Unlike other ValueErrors it may come during the run,
    because batches are read then, too: joined (run/processes.py) then ends all ranks."""


# ---- a prepared folder ----


def load_tokenizer(folder):
    """The tiktoken.Encoding of a prepared folder. A folder without meta.json, like nanoGPT's, has
    GPT-2's tokens. ValueError for the tokens of another tokenizer, which meta.json names or whose
    number is not GPT-2's."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder of prepared data")
    path = Path(folder, "meta.json")
    meta = read_json(path, SIZE_OF_META, META) if os.path.lexists(path) else {}
    kind = meta.get("tokenizer", "gpt2")
    if kind not in ("bpe", "gpt2", "bytes"):
        raise ValueError(f"{path}: its tokenizer is {kind[:40]}; bpe, gpt2 and bytes "
                         "can be read")
    if kind == "gpt2" and meta.get("vocab_size", 50257) != 50257:
        raise ValueError(f"{path}: its vocab_size is {meta['vocab_size']}, GPT-2's tokenizer has "
                         "50257 tokens")
    ranks = read_ranks(Path(folder, "vocab.tiktoken")) if kind == "bpe" else BYTES
    encoding = make_encoding(kind, ranks, meta.get("pattern", PATTERN))
    if meta.get("vocab_size", 0) > encoding.n_vocab:
        raise ValueError(f"meta.json's vocab_size is {meta['vocab_size']}, for "
                         f"{encoding.n_vocab} tokens")
    return encoding


def read_ranks(path):
    """{token: rank} of vocab.tiktoken, which has a line "TOKEN_IN_BASE64 RANK" for each token."""
    ranks = {}
    with open_file(path) as file:
        lines = file.read().splitlines()
    for line in lines:
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    if not BYTES.keys() <= ranks.keys() or sorted(ranks.values()) != [*range(len(lines))]:
        raise ValueError("vocab.tiktoken does not number all bytes and tokens")
    return ranks


# ---- the batches of a prepared folder ----


class Data:
    """The two files, memory-mapped, and the values of meta.json. The process with local_rank 0
    prepares a corpus that is missing; the others on its machine wait for it."""

    def __init__(self, cfg, local_rank=0):
        self.folder = Path(cfg.data)
        self.block = cfg.block_size
        if cfg.data in ("stdlib", "shakespeare"):
            self.folder = Path(__file__).parent / cfg.data
            self.prepare_or_wait(cfg.data, local_rank)
        # The fix that errors name
        self.fix = advice(self.folder)
        self.meta = self.find_meta()  # at least {"vocab_size": ...}
        self.vocab_size = self.meta["vocab_size"]
        if cfg.tp > self.vocab_size:
            raise ValueError(f"--tp {cfg.tp} must be at most the vocabulary of {self.vocab_size}")
        self.train = self.memory_map("train")
        self.val = self.memory_map("val")

    def prepare_or_wait(self, corpus, local_rank):
        """Return once the folder has a meta.json, which prepare() writes last, or after
        MAX_PREPARING seconds."""
        meta = self.folder / "meta.json"
        if not meta.exists() and local_rank == 0:
            print(f"preparing {corpus} as a corpus, once", flush=True)
            prepare((corpus,), self.folder)
        deadline = time.time() + MAX_PREPARING
        while not meta.exists() and time.time() < deadline:
            time.sleep(0.2)

    def find_meta(self):
        """The values of meta.json. A folder without it, like nanoGPT's, has GPT-2's vocabulary."""
        path = self.folder / "meta.json"
        if not os.path.lexists(path):
            return {"vocab_size": 50257}
        try:
            meta = read_json(path, SIZE_OF_META, META)
            # (GPT-2's may need a download, another's a package)
            if meta.get("tokenizer") in ("bpe", "bytes"):
                load_tokenizer(self.folder)  # raises if it is damaged
        except (OSError, ValueError) as error:
            raise ValueError(f"--data {self.folder} is damaged ({error}); {self.fix}") from None
        return meta

    def memory_map(self, split):
        """The tokens of train.bin or val.bin. ValueError: missing, damaged or too short."""
        path = self.folder / f"{split}.bin"
        if not path.exists():
            raise ValueError(f"--data {self.folder}: {path.name} is missing; {self.fix}")
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
        tokens_of_meta = self.meta.get(f"{split}_tokens")
        dtype = np.dtype(token_type(self.vocab_size))
        width = dtype.itemsize
        if tokens_of_meta and size != width * tokens_of_meta:
            raise ValueError(f"{path} does not fit its meta.json: {size} bytes for "
                             f"{tokens_of_meta} tokens of {width} bytes; {self.fix}")
        if size % width:
            raise ValueError(f"{path} is truncated: {size} bytes, not a whole number of {dtype}; "
                             + self.fix)
        if size // width <= self.block:
            raise ValueError(f"--block-size {self.block} is longer than {path} allows, which "
                             f"has {size // width} tokens; take less than that")
        try:
            tokens = np.memmap(path, dtype=dtype, mode="r")
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror})") from None
        self.check_ids(tokens[:CHECKED_AT_START], path)
        # numpy's tofile() without a type writes 64 bits: after each token three zeros
        foreign = not tokens_of_meta and width == 2
        if foreign and not tokens[1:CHECKED_AT_START:2].any():
            raise ValueError(f"{path}: every second token is 0, so its tokens have more bytes than "
                             f"those of {dtype}; write them with astype('{dtype.str}')")
        return tokens

    def check_ids(self, ids, path):
        """DataError if a token is not in the vocabulary."""
        if ids.max() >= self.vocab_size:
            raise DataError(f"{path} holds token id {ids.max()}, but the vocabulary of "
                            f"{self.folder} has {self.vocab_size} tokens; {self.fix}")

    def training(self, cfg, step, mesh):
        """This data rank's microbatches of a step: [(ids, targets)], (B, S) each."""
        rng = np.random.default_rng([cfg.seed, step])
        starts = rng.integers(0, len(self.train) - self.block, cfg.batch_size)
        return self.batch(cfg, self.train, starts, mesh)

    def fingerprint(self):
        """A hash of meta.json's values, of the files' lengths, and of 64 pieces of each file. Other
        data have another hash, unless they differ only between the pieces of a file of more than 2
        million tokens."""
        digest = hashlib.sha256(json.dumps(self.meta, sort_keys=True).encode())
        length = 1 << 15  # tokens of a piece
        for tokens in (self.train, self.val):
            digest.update(b"%d" % len(tokens))
            for start in np.linspace(0, max(0, len(tokens) - length), 64).astype(int):
                digest.update(tokens[start : start + length].tobytes())
        return digest.digest()

    def validation(self, cfg, mesh, batches=None):
        """(number of windows, an iterator over their batches). val.bin has a window every
        block_size tokens. batches: how many batches of windows to take, from the first on; None:
        all. The last batch is filled up with windows that do not count.

        block_size 8, batch_size 4, 65 tokens: 8 windows, at 0 8 16 24 and 32 40 48 56. With 57
        tokens there are 7 windows, and the last start is ABSENT."""
        windows = (len(self.val) - 1) // self.block
        if batches:
            windows = min(windows, batches * cfg.batch_size)
        n_batches = math.ceil(windows / cfg.batch_size)
        starts = np.full(n_batches * cfg.batch_size, ABSENT)
        starts[:windows] = np.arange(windows) * self.block
        starts = starts.reshape(n_batches, cfg.batch_size)
        return windows, (self.batch(cfg, self.val, row, mesh) for row in starts)

    def batch(self, cfg, tokens, starts, mesh):
        """This data rank's microbatches of the windows of `tokens` that begin at `starts`. Where a
        start is ABSENT, so are the window's targets, which the loss leaves out."""
        # tokens.base is the mmap; its size() is the file's size now. Reading beyond it would kill
        # the process (SIGBUS).
        if tokens.base.size() < tokens.nbytes:
            raise DataError(f"{tokens.filename} was cut off during the run; {self.fix}")
        index, n_data_ranks = mesh.place("dp")
        own_starts = np.split(starts, n_data_ranks)[index]
        microbatches = []
        for part in np.split(own_starts, cfg.microbatches):
            windows = np.full((len(part), self.block + 1), ABSENT)
            for window, start in zip(windows, part, strict=True):
                if start != ABSENT:
                    window[:] = tokens[start : start + self.block + 1]
            self.check_ids(windows, self.folder)
            windows = torch.from_numpy(windows)
            if mesh.device.type == "cuda":
                windows = windows.pin_memory().to(mesh.device, non_blocking=True)
            ids = windows[:, :-1].clamp(min=0)  # (B, S); the embedding has no row for ABSENT
            targets = windows[:, 1:]  # (B, S): the token after each of the ids
            microbatches.append((ids, targets))
        return microbatches
