"""Batches from train.bin and val.bin, the same in every layout.

The batch of step i, over all ranks, is a pure function of (seed, i): batch_size sequences, each a
window of block_size + 1 tokens that begins at a random place. Data rank d takes the d-th of D equal
slices of the batch, and microbatch k the k-th part of the slice. So no rank has to tell another
what it read.

Each file holds tokens only, in little-endian uint16 (uint32 for a vocabulary of more than 65,536),
the texts one after the other; a folder's meta.json says how many tokens and which vocabulary
(data/prepare.py writes all of them). A folder without meta.json, like nanoGPT's, has GPT-2's.
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

from data.files import FileError, open_file, read_bytes, read_json, say
from data.prepare import BYTES, make_encoding, prepare, token_type
from model import ABSENT  # -100: a target that the loss leaves out; as a start: no window

GPT2_TOKENS = 50257
MAX_PREPARING = 300  # seconds to wait for another process that prepares the corpus


# ---- the vocabulary of a prepared folder ----


def read_meta(folder):
    """The values of meta.json. FileError if one that this project reads is no number above 0."""
    path = folder / "meta.json"
    if not os.path.lexists(path):
        if not (folder / "train.bin").exists():
            raise FileError(f"{folder}: no prepared data there; python data/prepare.py SOURCE "
                            f"--out {folder} writes this folder")
        return {"vocab_size": GPT2_TOKENS}
    meta = read_json(path)
    for name in ("vocab_size", *meta.keys() & {"bytes_per_token"}):
        value = meta.get(name)
        if type(value) not in (int, float) or not 0 < value <= 2**31:
            raise FileError(f"{path}: {name} is {value!r:.40}, not a number above 0, up to 2^31")
    return {**meta, "vocab_size": int(meta["vocab_size"])}


def read_ranks(path):
    """{token: rank} of vocab.tiktoken, whose lines are TOKEN_IN_BASE64 RANK, in order of rank."""
    ranks = {}
    for line in read_bytes(path).splitlines():
        try:
            word, rank = line.split()
            token = base64.b64decode(word, validate=True)
            fits = int(rank) == len(ranks) and token not in ranks
        except ValueError:
            fits = False
        if not fits:
            raise FileError(f"{path}: line {len(ranks) + 1} is {line[:40]!r}, not a new token in "
                            f"base64 and its rank {len(ranks)}")
        ranks[token] = len(ranks)
    if not BYTES.keys() <= ranks.keys():
        raise FileError(f"{path}: not every byte is a token")
    return ranks


def load_tokenizer(folder):
    """The tiktoken.Encoding of a prepared folder. FileError for the tokens of another tokenizer,
    which meta.json names or whose number is not that of GPT-2's."""
    folder = Path(folder)
    meta = read_meta(folder)
    name = meta.get("tokenizer", "gpt2")
    if name not in ("bpe", "gpt2", "bytes"):
        raise FileError(f"{folder}/meta.json: tokenizer is {name!r:.40}; bpe, gpt2 and bytes can "
                        "be read")
    ranks = read_ranks(folder / "vocab.tiktoken") if name == "bpe" else BYTES
    n_tokens = GPT2_TOKENS if name == "gpt2" else len(ranks)
    if meta["vocab_size"] != n_tokens:
        raise FileError(f"{folder}/meta.json: vocab_size is {meta['vocab_size']}, but its "
                        f"tokenizer ({name}) has {n_tokens} tokens")
    return make_encoding(name, ranks)


# ---- the batches of a prepared folder ----


def prepare_or_wait(folder, local_rank):
    """Return once the folder has a meta.json, which prepare() writes last, or after MAX_PREPARING
    seconds. The process with local_rank 0 prepares; the others on its machine wait for it."""
    meta = folder / "meta.json"
    if not meta.exists() and local_rank == 0:
        say("preparing stdlib as a corpus, once", "stdout")
        prepare(out=folder)
    deadline = time.time() + MAX_PREPARING
    while not meta.exists() and time.time() < deadline:
        time.sleep(0.2)


class Data:
    """The two files, memory-mapped, and the values of meta.json. FileError: what is wrong with
    them, at the start or, because batches are read then, during the run."""

    def __init__(self, cfg, local_rank=0):
        self.folder = Path(cfg.data)
        self.block = cfg.block_size
        if cfg.data == "stdlib":
            self.folder = Path(__file__).parent / "stdlib"
            prepare_or_wait(self.folder, local_rank)
        self.meta = read_meta(self.folder)  # at least {"vocab_size": ...}
        self.vocab_size = self.meta["vocab_size"]
        self.train = self.memory_map("train")
        self.val = self.memory_map("val")

    def memory_map(self, split):
        """The tokens of train.bin or val.bin. FileError if they are damaged."""
        path = self.folder / f"{split}.bin"
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
        dtype = np.dtype(token_type(self.vocab_size))
        n_tokens = self.meta.get(f"{split}_tokens", size // dtype.itemsize)
        if size / dtype.itemsize != n_tokens:
            raise FileError(f"{path} is damaged: {size} bytes, not {n_tokens} tokens of {dtype}")
        if n_tokens <= self.block:
            raise FileError(f"--block-size {self.block} is longer than {path} allows, which has "
                            f"{n_tokens} tokens; take less than that")
        return np.memmap(path, dtype=dtype, mode="r")

    def fingerprint(self):
        """A hash of the vocabulary, and of 64 pieces and the length of each file. Other data have
        another hash, unless they differ between the pieces of a file of millions of tokens only."""
        digest = hashlib.sha256(json.dumps(self.meta, sort_keys=True).encode())
        length = 1 << 15  # tokens of a piece
        for tokens in (self.train, self.val):
            digest.update(b"%d" % len(tokens))
            for start in np.linspace(0, max(0, len(tokens) - length), 64).astype(int):
                digest.update(tokens[start : start + length].tobytes())
        return digest.hexdigest()

    def training(self, cfg, step, mesh):
        """This data rank's microbatches of a step: [(ids, targets)], (B, S) each."""
        rng = np.random.default_rng([cfg.seed, step])
        starts = rng.integers(0, len(self.train) - self.block, cfg.batch_size)
        return self.batch(cfg, self.train, starts, mesh)

    def validation(self, cfg, mesh, num_batches=None):
        """(number of windows, an iterator over their batches). val.bin has a window every
        block_size tokens. num_batches: how many batches of windows to take, from the first on;
        None: all. The last batch is filled up with windows that do not count.

        block_size 8, batch_size 4, 65 tokens: 8 windows, at 0 8 16 24 and 32 40 48 56. With 57
        tokens there are 7 windows, and the last start is ABSENT."""
        windows = (len(self.val) - 1) // self.block
        if num_batches:
            windows = min(windows, num_batches * cfg.batch_size)
        num_batches = math.ceil(windows / cfg.batch_size)
        starts = np.full(num_batches * cfg.batch_size, ABSENT)
        starts[:windows] = np.arange(windows) * self.block
        starts = starts.reshape(num_batches, cfg.batch_size)
        return windows, (self.batch(cfg, self.val, row, mesh) for row in starts)

    def batch(self, cfg, tokens, starts, mesh):
        """This data rank's microbatches of the windows of `tokens` that begin at `starts`. Where a
        start is ABSENT, so are the window's targets, which the loss leaves out."""
        index, n_data_ranks = mesh.index_and_size("dp")
        own_starts = np.split(starts, n_data_ranks)[index]
        microbatches = []
        for part in np.split(own_starts, cfg.microbatches):
            windows = np.full((len(part), self.block + 1), ABSENT)  # (B, S + 1)
            for window, start in zip(windows, part, strict=True):
                if start != ABSENT:
                    window[:] = tokens[start : start + self.block + 1]
            if windows.max() >= self.vocab_size:
                raise FileError(f"{tokens.filename} holds token id {windows.max()}, but the "
                                f"vocabulary of {self.folder} has {self.vocab_size} tokens")
            windows = torch.from_numpy(windows)
            if mesh.device.type == "cuda":
                windows = windows.pin_memory().to(mesh.device, non_blocking=True)
            ids = windows[:, :-1].clamp(min=0)  # (B, S); the embedding has no row for ABSENT
            targets = windows[:, 1:]  # (B, S): the token after each of the ids
            microbatches.append((ids, targets))
        return microbatches
