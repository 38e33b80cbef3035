"""Text to tokens: writes train.bin, val.bin, meta.json and, for bpe, vocab.tiktoken.

The default corpus is the source of the Python standard library, as it lies beside the interpreter.
Files go whole to train (90% of the bytes) or to val. The .bin files are nanoGPT's, little-endian
uint16, opened with np.memmap. The bpe vocabulary is learned here (arXiv:1508.07909, over bytes as
in GPT-2) and applied by tiktoken. A loss in nats a token, divided by ln 2 and by bytes_per_token,
is in bits a byte, comparable across tokenizers and with what gzip -9 needs for the same val text.

    python data/prepare.py                        # the standard library, into data/stdlib
    python data/prepare.py shakespeare            # tiny Shakespeare, downloaded
    python data/prepare.py notes/ book.txt --out data/mine --vocab-size 4096
"""
import argparse
import base64
import gzip
import hashlib
import heapq
import json
import os
import random
import re
import sys
import sysconfig
import tempfile
import time
from array import array
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import regex  # tiktoken depends on it: \p{L} and \p{N}, which re lacks
import tiktoken

SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
               "input.txt")
# GPT-2's split into words, without its English contractions: a token never crosses a word.
PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What prepare wrote itself, and what is hidden.
NO_SOURCE = regex.compile(r"(train|val)\.bin|vocab\.tiktoken|meta\.json|\..*")
# Tests and installed packages are not the library; tables of characters are not code.
NOT_STDLIB = regex.compile(r"tests?|idle_test|(site|dist)-packages|__pycache__|encodings|pydoc_data"
                           r"|config-.*|_sysconfigdata.*|entities\.py|stringprep\.py")
BYTES = {bytes([b]): b for b in range(256)}  # {token: rank} with nothing merged
MIN_BYTES = 1_000  # less cannot be split into anything to train on
LEARN_CHARS = 8_000_000  # the vocabulary is learned on this much of train, shuffled, at most
# A long text is encoded in pieces, cut between a word and a line break: no token has both in it.
PIECES = re.compile(r"(?s).{100000,}?\w(?=\n)|.+")


def show(doing, done=""):
    """Prints the phase: on a terminal one line that the next print writes over; in a file once."""
    if sys.stdout.isatty():
        print(f"\x1b[K{doing}{done}", end="\r", flush=True)
    elif not done:
        print(doing, flush=True)


def regular(path):
    """path. ValueError if it is a pipe or a device, of which a read may never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    return path


def read_source(source):
    """[(name, text)] of one source: "stdlib", "shakespeare", a file, or a folder of text files."""
    if source == "shakespeare":
        try:
            with urlopen(SHAKESPEARE, timeout=15) as reply:
                return [(source, reply.read().decode())]
        except (OSError, HTTPException) as e:
            raise ValueError(f"shakespeare: no download ({e}); use stdlib, which needs none, or "
                             f"pass the path of a saved copy of {SHAKESPEARE}") from e
    root, skip, ending = Path(source), NO_SOURCE, ""
    if source == "stdlib":
        root, skip, ending = Path(sysconfig.get_path("stdlib")), NOT_STDLIB, ".py"
    show(f"reading {source}")
    paths = [] if root.is_dir() else [root]
    for here, folders, names in os.walk(root):  # of a file, this is nothing
        folders[:] = [name for name in folders if not skip.fullmatch(name)]  # the ones to enter
        kept = [name for name in names if name.endswith(ending) and not skip.fullmatch(name)]
        paths += [path for path in (Path(here, name) for name in kept) if path.is_file()]
    docs = []
    for path in paths:
        try:  # names relative to root: the same corpus wherever the folder lies
            docs.append((path.relative_to(root).as_posix(), regular(path).read_bytes().decode()))
        except (OSError, ValueError) as e:
            if path == root:  # asked for by name; in a folder, what is not text is passed over
                raise ValueError(f"{source}: not readable as UTF-8 text ({e}); give the path of a "
                                 "text file or a folder, or stdlib, or shakespeare") from e
    if not docs:
        raise ValueError(f"{source}: no file of UTF-8 text in {root}; give another path")
    return docs


def train_and_val(docs):
    """docs [(name, text)] -> two lists of texts, the same on every machine: whole files, up to a
    tenth of the bytes in val. Where few large files would leave val less than half as full, the
    joined text is cut at a line boundary instead."""
    # Each text once: a copy in val of a file in train would be memorised, not predicted.
    texts = [t + "\n" for t in dict.fromkeys(t for _, t in sorted(docs)) if t.strip()]
    size = {text: len(text.encode()) for text in texts}
    total = sum(size.values())
    if total < MIN_BYTES:
        raise ValueError(f"corpus: {len(texts)} usable files of {total} bytes in all, too small to "
                         f"split; give at least {MIN_BYTES} bytes of UTF-8 text")
    random.Random(1337).shuffle(texts)
    train, val, held = [], [], 0
    for text in texts:
        fits = held + size[text] <= total // 10
        (val if fits else train).append(text)
        held += size[text] * fits
    if held < total // 20:
        text, end = "".join(texts), sum(map(len, texts)) * 9 // 10
        cut = text.rfind("\n", end // 2, end) + 1 or end
        train, val = [text[:cut]], [text[cut:]]
    return train, val


def learn_bpe(text, vocab_size):
    """{token: rank}: 256 bytes, then the most frequent pair, again and again, while one occurs
    twice; ties by bytes. Pairs are counted by what they spell, since that is how tiktoken applies
    ranks. A merge visits the places of its pair, and nothing else."""
    show(f"learning {vocab_size} tokens")
    words = Counter(regex.findall(PATTERN, text))
    # All words in a row, with a byte between them where no token is. The token of bytes a to b:
    # end[a] = b and start[b] = a; elsewhere end is 0. times[a]: how often the word at a occurs.
    spelled, times, end = bytearray(1), array("i", [0]), array("i", [0])
    for word, n in words.items():  # spelled: 0 f o r 0 i n 0, end: 0 2 3 4 0 6 7 0
        spelled += word.encode() + b"\0"
        times.extend([n] * (len(spelled) - len(times)))
        end.extend([*range(len(end) + 1, len(spelled)), 0])
    spelled, start = bytes(spelled), array("i", range(-1, len(spelled) - 1))
    count, where, fresh = Counter(), defaultdict(lambda: array("i")), set()  # by what a pair spells

    def add_pair(a, c):
        count[spelled[a:c]] += times[a]
        where[spelled[a:c]].append(a)
        fresh.add(spelled[a:c])

    for a, b in enumerate(end):
        if end[b]:
            add_pair(a, end[b])
    heap, ranks = [], dict(BYTES)
    while (heap or fresh) and len(ranks) < vocab_size:
        for token in fresh:
            heapq.heappush(heap, (-count[token], token))
        fresh.clear()
        n, token = heapq.heappop(heap)
        if -n != count[token]:  # fewer by now
            fresh.add(token)
            continue
        if -n < 2:
            break
        ranks.setdefault(token, len(ranks))
        show(f"learning {vocab_size} tokens", f": {len(ranks)}")
        for a in sorted(where.pop(token)):
            left, b, c = start[a], end[a], a + len(token)  # the pair: bytes a to b, and b to c
            if end[b] == c:  # else one of the two was merged with its other neighbour
                if end[left]:
                    count[spelled[left:b]] -= times[a]
                    add_pair(left, c)
                if end[c]:
                    count[spelled[b : end[c]]] -= times[a]
                    add_pair(a, end[c])
                end[a], end[b], start[c] = c, 0, a
        del count[token]
    return ranks


def make_encoding(tokenizer, ranks=BYTES, pattern=PATTERN):
    """A tiktoken.Encoding: the given ranks, the 256 bytes unmerged, or GPT-2's."""
    if tokenizer != "gpt2":
        return tiktoken.Encoding(tokenizer, pat_str=pattern, mergeable_ranks=ranks,
                                 special_tokens={})
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as e:  # requests' errors are OSErrors
        raise ValueError(f"gpt2: tiktoken cannot download its ranks ({type(e).__name__}); use "
                         "--tokenizer bpe, or set TIKTOKEN_CACHE_DIR to a filled cache") from e


def encode(enc, texts, name, pool):
    """The tokens of all texts, one array. tiktoken releases the GIL: two threads are faster."""
    show(f"encoding {name}")
    ids, pieces = [], [piece for text in texts for piece in PIECES.findall(text)]
    for tokens in pool.map(lambda piece: np.array(enc.encode_ordinary(piece), "<u2"), pieces):
        ids.append(tokens)
        show(f"encoding {name}", f": {100 * len(ids) // len(pieces)} %")
    return np.concatenate(ids)


def write_whole(out, files):
    """{name: bytes} into out, each whole or not at all, meta.json last. That of other data goes
    first, so a run stopped half-way leaves none. One of the same data stays, as the same bytes are
    coming: two processes at once disturb no reader."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=out) as tmp:
            for name, data in files.items():
                Path(tmp, name).write_bytes(data)
            with suppress(FileNotFoundError):
                if (out / "meta.json").read_bytes() != files["meta.json"]:
                    (out / "meta.json").unlink()
            for name in files:
                os.replace(Path(tmp, name), out / name)
    except OSError as e:
        raise ValueError(f"{out}: cannot be written ({e.strerror}); python data/prepare.py --out "
                         "FOLDER prepares it elsewhere") from e


def prepare(sources=("stdlib",), out=None, tokenizer="bpe", vocab_size=1024):
    """Writes the folder out (default: data/<source>, or data/custom) and returns its meta.json."""
    start = time.perf_counter()
    sources = [sources] if isinstance(sources, str) else [str(s) for s in sources]
    if tokenizer not in ("bpe", "gpt2", "bytes"):
        raise ValueError(f"--tokenizer {tokenizer}: not one of bpe, gpt2, bytes")
    if tokenizer == "bpe" and not 256 <= vocab_size <= 65536:
        raise ValueError(f"--vocab-size {vocab_size}: not in 256 (every byte) to 65536 (uint16)")
    named = sources in (["stdlib"], ["shakespeare"])
    out = Path(out or Path(__file__).parent / (sources[0] if named else "custom"))

    docs = [doc for source in sources for doc in read_source(source)]
    parts = train_and_val(docs)
    train_bytes, val_bytes = ("".join(texts).encode() for texts in parts)
    learned = tokenizer == "bpe"
    with ThreadPoolExecutor(2) as pool:
        zipped = pool.submit(gzip.compress, val_bytes, 9)  # meanwhile, the vocabulary is learned
        ranks = learn_bpe("".join(parts[0])[:LEARN_CHARS], vocab_size) if learned else BYTES
        enc = make_encoding(tokenizer, ranks)
        train = encode(enc, parts[0], "train.bin", pool)
        val = encode(enc, parts[1], "val.bin", pool)
    assert enc.decode_bytes(val.tolist()) == val_bytes, "tokens must spell the text exactly"

    meta = {"vocab_size": enc.n_vocab, "tokenizer": tokenizer,
            **({"pattern": PATTERN} if learned else {}),
            "train_tokens": len(train), "val_tokens": len(val),
            "bytes_per_token": len(val_bytes) / len(val), "val_bytes": len(val_bytes),
            "gzip_bits_per_byte": 8 * len(zipped.result()) / len(val_bytes),
            "source": sources, "source_hash": hashlib.sha256(train_bytes + val_bytes).hexdigest()}
    files = {"train.bin": train.tobytes(), "val.bin": val.tobytes()}
    if learned:
        files["vocab.tiktoken"] = b"".join(b"%s %d\n" % (base64.b64encode(token), rank)
                                           for token, rank in ranks.items())
    write_whole(out, {**files, "meta.json": (json.dumps(meta, indent=1) + "\n").encode()})

    print(f"corpus     {', '.join(sources)}: {len(docs)} files, "
          f"{len(train_bytes) / 1e6:.2f} MB train, {len(val_bytes) / 1e6:.2f} MB val\n"
          f"vocabulary {enc.n_vocab} tokens ({tokenizer}), {meta['bytes_per_token']:.2f} bytes a "
          f"token; gzip -9 needs {meta['gzip_bits_per_byte']:.3f} bits a byte\n"
          f"tokens     {len(train):,} train, {len(val):,} val, in {out} "
          f"({time.perf_counter() - start:.1f} s)", flush=True)
    return meta


def main():
    parser = argparse.ArgumentParser(description="Text to tokens: train.bin, val.bin, meta.json.")
    parser.error = lambda message: parser.exit(2, f"prepare.py: {message}\n")
    parser.add_argument("sources", nargs="*", default=["stdlib"], metavar="SOURCE",
                        help="stdlib (default), shakespeare, or paths of text files and folders")
    parser.add_argument("--out", help="folder to write (default: data/<source>, or data/custom)")
    parser.add_argument("--tokenizer", default="bpe", help="bpe (default), gpt2 or bytes")
    parser.add_argument("--vocab-size", type=int, default=1024, help="of bpe (default: 1024)")
    try:
        prepare(**vars(parser.parse_args()))
    except ValueError as e:
        parser.exit(2, f"prepare.py: {e}\n")


if __name__ == "__main__":
    main()
