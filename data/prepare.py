"""Text to tokens: writes train.bin, val.bin, meta.json and, for bpe, vocab.tiktoken.

The default corpus needs no download: the source of the Python standard library, as it lies beside
the interpreter. Files go whole to train (90% of the bytes) or to val (10%). The .bin files are
nanoGPT's, raw little-endian uint16: 2 bytes a token, opened with np.memmap, never loaded whole.

The bpe vocabulary is learned here (byte-pair encoding, arXiv:1508.07909, over bytes as in GPT-2)
and applied by tiktoken. A loss in nats a token becomes bits a byte, comparable across tokenizers,
as loss / ln 2 / bytes_per_token; meta.json also holds what gzip -9 needs for the same val text.

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
from collections import Counter, defaultdict
from contextlib import suppress
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import regex  # tiktoken depends on it: \p{L} and \p{N}, which re lacks
import tiktoken

SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
               "input.txt")
# GPT-2's split into words, without its English contractions: a token never crosses a word.
PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HIDDEN = re.compile(r"\..*")
# Tests and installed packages are not the library; tables of characters are not code.
NOT_STDLIB = re.compile(r"tests?|idle_test|(site|dist)-packages|__pycache__|encodings|pydoc_data"
                        r"|config-.*|_sysconfigdata.*|entities\.py|stringprep\.py")
OUTPUTS = ("train.bin", "val.bin", "vocab.tiktoken", "meta.json")  # meta.json last: it says done
MIN_BYTES = 1_000  # less cannot be split into anything to train on
LEARN_CHARS = 8_000_000  # the vocabulary is learned on this much of train, shuffled, at most


def walk(folder, skip):
    """The files under folder for which no part of the path below it is in skip."""
    for here, dirs, names in os.walk(folder):
        dirs[:] = [name for name in dirs if not skip.fullmatch(name)]  # pruned, not descended into
        yield from (Path(here, n) for n in names if not skip.fullmatch(n) and n not in OUTPUTS)


def read_source(source):
    """[(name, text)] of one source: "stdlib", "shakespeare", a file, or a folder of text files."""
    if source == "shakespeare":
        try:
            with urlopen(SHAKESPEARE, timeout=15) as reply:
                return [(source, reply.read().decode())]
        except (OSError, HTTPException) as e:
            raise ValueError(f"shakespeare: no download ({e}); use stdlib, which needs none, or "
                             f"pass the path of a saved copy of {SHAKESPEARE}") from e
    root = Path(sysconfig.get_path("stdlib") if source == "stdlib" else source)
    if source == "stdlib":
        paths = [path for path in walk(root, NOT_STDLIB) if path.suffix == ".py"]
    else:
        paths = [path for path in walk(root, HIDDEN) if path.is_file()] if root.is_dir() else [root]
    docs = []
    for path in paths:
        try:  # names relative to root: the same corpus wherever the folder lies
            docs.append((path.relative_to(root).as_posix(), path.read_bytes().decode()))
        except (OSError, UnicodeDecodeError) as e:
            if path == root:  # asked for by name; in a folder, what is not text is passed over
                raise ValueError(f"{source}: not readable as UTF-8 text ({e}); give the path of a "
                                 "text file or a folder, or stdlib, or shakespeare") from e
    if not docs:
        raise ValueError(f"{source}: no file of UTF-8 text in {root}; give another path")
    return docs


def split(docs):
    """docs [(name, text)] -> (train, val), two lists of texts, the same on every machine.

    Whole files go to val up to a tenth of the bytes. Where that leaves val less than half filled
    (one file, or a few large ones), the joined text is cut at a line boundary instead.
    """
    # Each text once: a copy in val of a file in train would be memorised, not predicted.
    texts = [t + "\n" for t in dict.fromkeys(t for _, t in sorted(docs)) if t.strip()]
    total = sum(len(t.encode()) for t in texts)
    if total < MIN_BYTES:
        raise ValueError(f"corpus: {len(texts)} usable files of {total} bytes in all, too small to "
                         f"split; give at least {MIN_BYTES} bytes of UTF-8 text")
    random.Random(1337).shuffle(texts)
    train, val, held = [], [], 0
    for text in texts:
        size = len(text.encode())
        fits = held + size <= total // 10
        (val if fits else train).append(text)
        held += size * fits
    if held < total // 20:
        text, end = "".join(texts), sum(map(len, texts)) * 9 // 10
        cut = text.rfind("\n", end // 2, end) + 1 or end
        train, val = [text[:cut]], [text[cut:]]
    return train, val


def merge(parts, token):
    """parts (bytes objects) with each neighbouring pair that spells token made one part."""
    out, i = [], 0
    while i < len(parts):
        pair = i + 1 < len(parts) and parts[i] + parts[i + 1] == token
        out.append(token if pair else parts[i])
        i += 2 if pair else 1
    return out


def learn_bpe(text, vocab_size):
    """{token: rank}: 256 bytes, then the most frequent pair, again and again; ties by bytes.

    Pairs are counted by what they spell, since that is how tiktoken applies ranks. Only the words
    that hold the merged pair are recounted. Ends below vocab_size once no pair occurs twice.
    """
    words = Counter(regex.findall(PATTERN, text))
    freqs = list(words.values())
    parts = [[bytes([b]) for b in word.encode()] for word in words]
    count, where, changed = Counter(), defaultdict(set), set()  # by the token that a pair spells

    def tally(i, sign):
        for a, b in pairwise(parts[i]):
            count[a + b] += sign * freqs[i]
            where[a + b].add(i)
            changed.add(a + b)

    for i in range(len(parts)):
        tally(i, +1)
    heap, ranks = [], {bytes([b]): b for b in range(256)}
    while (heap or changed) and len(ranks) < vocab_size:
        for token in changed:
            heapq.heappush(heap, (-count[token], token))
        changed.clear()
        n, token = heapq.heappop(heap)
        if -n < 2:
            break
        if -n == count[token]:  # else stale: a newer entry was pushed when the count changed
            ranks.setdefault(token, len(ranks))
            for i in where.pop(token):
                tally(i, -1)
                parts[i] = merge(parts[i], token)
                tally(i, +1)
    return ranks


def make_encoding(tokenizer, ranks=None, pattern=PATTERN):
    """A tiktoken.Encoding: the given ranks, the 256 bytes unmerged, or GPT-2's."""
    if tokenizer == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as e:  # requests' errors are OSErrors
            raise ValueError(f"gpt2: tiktoken cannot download its ranks ({type(e).__name__}); use "
                             "--tokenizer bpe, or set TIKTOKEN_CACHE_DIR to a filled cache") from e
    ranks = ranks or {bytes([b]): b for b in range(256)}
    return tiktoken.Encoding(tokenizer, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def load_tokenizer(folder):
    """The tiktoken.Encoding of a prepared folder; without a meta.json (nanoGPT's own), GPT-2's."""
    folder, ranks = Path(folder), None
    if not (folder / "meta.json").exists():
        return make_encoding("gpt2")
    meta = json.loads((folder / "meta.json").read_text())
    if meta["tokenizer"] == "bpe":
        lines = (folder / "vocab.tiktoken").read_text().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    return make_encoding(meta["tokenizer"], ranks, meta.get("pattern", PATTERN))


def write(out, files):
    """{name: bytes} into out: each file whole or not at all, and meta.json only after the others.

    A meta.json of other data goes first, so a run stopped half-way leaves none. One of the same
    data stays, as the same bytes are coming: two processes at once disturb no reader.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=out) as tmp:
            for name, data in files.items():
                Path(tmp, name).write_bytes(data)
            with suppress(FileNotFoundError):
                if (out / "meta.json").read_bytes() != files["meta.json"]:
                    (out / "meta.json").unlink()
            for name in [name for name in OUTPUTS if name in files]:
                os.replace(Path(tmp, name), out / name)
    except OSError as e:
        raise ValueError(f"--out {out}: cannot be written ({e.strerror}); name another") from e


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
    train, val = split(docs)
    train_bytes, val_bytes = ("".join(texts).encode() for texts in (train, val))

    ranks = learn_bpe("".join(train)[:LEARN_CHARS], vocab_size) if tokenizer == "bpe" else None
    enc = make_encoding(tokenizer, ranks)
    bins = [np.concatenate([np.array(enc.encode_ordinary(text), dtype="<u2") for text in texts])
            for texts in (train, val)]
    assert enc.decode_bytes(bins[1].tolist()) == val_bytes, "tokens must spell the text exactly"

    meta = {"vocab_size": enc.n_vocab, "tokenizer": tokenizer,
            **({"pattern": PATTERN} if tokenizer == "bpe" else {}),
            "train_tokens": len(bins[0]), "val_tokens": len(bins[1]),
            "bytes_per_token": len(val_bytes) / len(bins[1]), "val_bytes": len(val_bytes),
            "gzip_bits_per_byte": 8 * len(gzip.compress(val_bytes, 9)) / len(val_bytes),
            "source": sources, "source_hash": hashlib.sha256(train_bytes + val_bytes).hexdigest()}
    files = {"train.bin": bins[0].tobytes(), "val.bin": bins[1].tobytes(),
             "meta.json": (json.dumps(meta, indent=1) + "\n").encode()}
    if ranks:
        files["vocab.tiktoken"] = b"".join(b"%s %d\n" % (base64.b64encode(token), rank)
                                           for token, rank in ranks.items())
    write(out, files)

    print(f"corpus     {', '.join(sources)}: {len(docs)} files, "
          f"{len(train_bytes) / 1e6:.2f} MB train, {len(val_bytes) / 1e6:.2f} MB val")
    print(f"vocabulary {enc.n_vocab} tokens ({tokenizer}), {meta['bytes_per_token']:.2f} bytes a "
          f"token; gzip -9 needs {meta['gzip_bits_per_byte']:.3f} bits a byte")
    print(f"tokens     {len(bins[0]):,} train, {len(bins[1]):,} val, in {out} "
          f"({time.perf_counter() - start:.1f} s)", flush=True)
    return meta


def main():
    parser = argparse.ArgumentParser(description="Text to tokens: train.bin, val.bin, meta.json.")
    parser.add_argument("sources", nargs="*", default=["stdlib"], metavar="SOURCE",
                        help="stdlib (default), shakespeare, or paths of text files and folders")
    parser.add_argument("--out", help="folder to write (default: data/<source>, or data/custom)")
    parser.add_argument("--tokenizer", default="bpe", help="bpe (default), gpt2 or bytes")
    parser.add_argument("--vocab-size", type=int, default=1024, help="of bpe (default: 1024)")
    args = parser.parse_args()
    try:
        prepare(args.sources, args.out, args.tokenizer, args.vocab_size)
    except ValueError as e:
        sys.exit(print(f"prepare.py: {e}", file=sys.stderr) or 2)


if __name__ == "__main__":
    main()
