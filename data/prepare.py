"""Text to tokens: writes train.bin, val.bin, meta.json and, for bpe, vocab.tiktoken.

The default corpus is the source of the Python standard library, which lies next to the interpreter.
Whole files go to val (up to 10% of the bytes) or to train; where the files are too few and too
large for that, the end of each goes to val. The .bin files are like nanoGPT's: little-endian
uint16, opened with np.memmap; GPT-2's tokenizer ends each text with its token 50256. The bpe
vocabulary is learned here (arXiv 1508.07909, over bytes as in GPT-2) and applied by tiktoken. A
loss in nats per token, divided by ln 2 and by bytes_per_token, is in bits per byte: so losses of
different tokenizers can be compared.

    python data/prepare.py                        # the standard library, into data/stdlib
    python data/prepare.py notes/ book.txt --out data/mine --vocab-size 4096
"""

import argparse
import base64
import heapq
import json
import os
import random
import re
import signal
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project's folder

import numpy as np

from data.files import FileError, open_file, say

# GPT-2's split of a text into words, without its rule for English contractions (he's). No token
# crosses from one word to the next. "if x1 == 2:" is split into if, " x", 1, " ==", " 2", ":"
PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Names that are skipped in a folder: files that prepare itself wrote, and hidden ones
NO_SOURCE = re.compile(r"(train|val)\.bin|vocab\.tiktoken|meta\.json|\..*")
# Names that are skipped in the standard library: tests and installed packages are not the library,
# tables of characters and of help texts are no code, config-* and _sysconfigdata* differ from
# machine to machine
NOT_STDLIB = re.compile(r"tests?|idle_test|(site|dist)-packages|__pycache__|encodings|pydoc_data"
                        r"|config-.*|_sysconfigdata.*|entities\.py|stringprep\.py")
BYTE = [bytes([b]) for b in range(256)]
BYTES = {byte: rank for rank, byte in enumerate(BYTE)}  # {token: rank} before anything is merged
MIN_BYTES = 1_000  # a smaller corpus is refused
# The vocabulary is learned from this many characters at the start of train (the files are shuffled)
LEARN_CHARS = 8_000_000


# ---- read the texts ----


def read_text(path):
    """The text of a file. ValueError if the file is no text in UTF-8."""
    with open_file(path) as file:
        content = file.read()
    if b"\0" in content:  # UTF-16, or no text
        raise ValueError("bytes of 0")
    return content.decode("utf-8-sig")  # without the mark with which Windows begins a file


def read_source(source):
    """[(name, text)] of one source: "stdlib", a file, or a folder of text files. Prints how many
    files of a folder are skipped."""
    say(f"reading {source}", "stdout")
    root, skip, pattern = Path(source), NO_SOURCE, "*"
    if source == "stdlib":
        root, skip, pattern = Path(sysconfig.get_path("stdlib")), NOT_STDLIB, "*.py"
    if not root.is_dir():
        try:
            return [(".", read_text(root))]
        except ValueError as error:
            raise FileError(f"{source}: not readable as UTF-8 text ({error}); give the path of a "
                            "text file or a folder, or stdlib") from error
    docs = []
    skipped = []
    for path in sorted(root.rglob(pattern)):
        name = path.relative_to(root)  # the same corpus wherever the folder lies
        if any(map(skip.fullmatch, name.parts)) or not path.is_file():
            continue
        try:
            docs.append((name.as_posix(), read_text(path)))
        except ValueError:
            skipped.append(name.as_posix())
    if skipped:
        say(f"skipped {len(skipped)} files of {source}, which cannot be read as UTF-8 text: "
            f"{', '.join(skipped[:3])}{', ...' if len(skipped) > 3 else ''}", "stdout")
    if not docs:
        raise FileError(f"{source}: no file of UTF-8 text in {root}; give another path")
    return docs


def train_and_val(docs):
    """docs [(name, text)] -> two lists of texts, the same on every machine: whole texts, up to a
    tenth of the bytes in val. If val would hold less than a twentieth, because the texts are few
    and large, each text is cut at a line instead.

    A text that repeats is kept as often as it occurs, and all its copies go the same way: the model
    would know a text of val by heart that stands in train, too. Where the bytes are divided, each
    text counts once."""
    copies = Counter(text + "\n" for _, text in sorted(docs) if text.strip())
    texts = list(copies)
    size = {text: len(text.encode()) for text in texts}
    total = sum(size.values())
    if total < MIN_BYTES:
        raise FileError(f"corpus: {len(texts)} usable texts of {total} bytes in all, too small to "
                        f"split; give at least {MIN_BYTES} bytes of UTF-8 text")
    rng = random.Random(1337)
    rng.shuffle(texts)
    held = set()  # texts of val
    val_bytes = 0
    for text in texts:
        if val_bytes + size[text] <= total // 10:
            held.add(text)
            val_bytes += size[text]
    repeats = [text for text in texts for _ in range(copies[text] - 1)]
    rng.shuffle(repeats)
    texts += repeats
    train = [text for text in texts if text not in held]
    val = [text for text in texts if text in held]
    if val_bytes < total // 20:
        train = []
        val = []
        for text in texts:
            end = len(text) * 9 // 10
            newline = text.rfind("\n", end // 2, end)  # the last one before `end`; -1: none
            cut = newline + 1 if newline >= 0 else end
            train.append(text[:cut])
            val.append(text[cut:])
    return train, val


# ---- learn a vocabulary ----


def pairs_of(word):
    """What the neighbours in a list of tokens spell."""
    return [first + second for first, second in pairwise(word)]


def merge_pair(word, pair):
    """A list of tokens again, with `pair` in the place of any two neighbours that spell it, from
    left to right: [a a a b] becomes [aa a b]."""
    merged = []
    for token in word:
        if merged and merged[-1] + token == pair:
            merged[-1] = pair
        else:
            merged.append(token)
    return merged


def learn_bpe(text, vocab_size):
    """{token: rank}: 256 bytes; then, again and again, the most frequent pair of neighbours becomes
    a token and is merged wherever it stands, until there are vocab_size tokens, or no pair occurs
    twice.

    Pairs that spell the same bytes, such as (a, bc) and (ab, c), count as one, because that is how
    tiktoken applies ranks; so `pair` is their bytes. Of pairs that are equally frequent the first
    in the order of bytes wins. The text "aab aab ab" has the words aab, " aab", " ab":

        pair    occurs    the words then                   new token
        ab      3         [a ab] [" " a ab] [" " ab]       ab, rank 256
        aab     2         [aab]  [" " aab]  [" " ab]       aab, rank 257
    """
    import regex  # has \p{L} and \p{N}, which re lacks; installed with tiktoken
    found = Counter(regex.findall(PATTERN, text))
    times = list(found.values())  # how often each different word occurs
    words = []  # the tokens of each
    count = Counter()  # pair -> how often it occurs
    where = defaultdict(set)  # pair -> indices of the words in which it occurs, or has occurred
    for i, word in enumerate(found):
        words.append([BYTE[byte] for byte in word.encode()])
        for pair in pairs_of(words[i]):
            count[pair] += times[i]
            where[pair].add(i)
    # Entries (-count, pair): the largest count is on top of the heap. A pair whose count changes
    # gets another entry; the one before is out of date
    heap = [(-n, pair) for pair, n in count.items()]
    heapq.heapify(heap)
    ranks = dict(BYTES)
    while heap and len(ranks) < vocab_size:
        minus_n, pair = heapq.heappop(heap)
        if -minus_n != count[pair]:  # out of date
            continue
        if count[pair] < 2:
            break
        ranks[pair] = len(ranks)
        change = Counter()  # pair -> how much more often it occurs now
        for i in where.pop(pair):
            for old in pairs_of(words[i]):
                change[old] -= times[i]
            words[i] = merge_pair(words[i], pair)
            for new in pairs_of(words[i]):
                change[new] += times[i]
                where[new].add(i)
        for changed, n in change.items():
            if n:
                count[changed] += n
                heapq.heappush(heap, (-count[changed], changed))
    return ranks


# ---- encode, and write ----


def make_encoding(tokenizer, ranks=BYTES):
    """A tiktoken.Encoding. tokenizer gpt2 has GPT-2's own vocabulary; bpe and bytes take `ranks`
    {token: rank}. The default ranks, BYTES, merge nothing."""
    import tiktoken  # here: a model that is only compared or computed needs no tokenizer
    if tokenizer != "gpt2":
        return tiktoken.Encoding(tokenizer, pat_str=PATTERN, mergeable_ranks=ranks,
                                 special_tokens={})
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # errors of its downloads are OSErrors
        raise FileError("gpt2: tiktoken cannot download GPT-2's vocabulary "
                        f"({type(error).__name__}); let TIKTOKEN_CACHE_DIR name a folder that has "
                        "it, or train on data of data/prepare.py --tokenizer bpe") from error


def token_type(vocab_size):
    """numpy's name for the tokens in a .bin file: little-endian uint16 or uint32."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def encode(enc, texts):
    """The tokens of all texts, one array. GPT-2's tokenizer ends each text with a token."""
    dtype = token_type(enc.n_vocab)
    end_of_text = np.array([enc.eot_token] if enc.name == "gpt2" else [], dtype)
    parts = []
    for text in texts:
        # disallowed_special=(): "<|endoftext|>" in a text is spelled like any other word
        tokens = enc.encode_to_numpy(text, disallowed_special=())
        parts.append(np.append(tokens, end_of_text).astype(dtype))
    return np.concatenate(parts)


def write_whole(out, files):
    """Write {name: bytes} into the folder `out`, in the order of the dict, each file whole or not
    at all: a run that has a file open keeps the old one. meta.json is last: others wait for it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=out) as tmp:
            for name, content in files.items():
                Path(tmp, name).write_bytes(content)
            for name in files:
                os.replace(Path(tmp, name), out / name)
    except OSError as error:
        raise FileError(f"{out}: cannot be written ({error.strerror}); python data/prepare.py "
                        "--out FOLDER prepares it elsewhere") from error


def prepare(sources=("stdlib",), out=None, tokenizer="bpe", vocab_size=1024):
    """Write the folder `out` and return the values of its meta.json. Default: data/stdlib for that
    source alone, else data/custom. FileError: sources that cannot be read, or a folder that cannot
    be written."""
    sources = [str(source) for source in sources]
    learned = tokenizer == "bpe"
    if learned and not 256 <= vocab_size <= 65536:
        raise FileError(f"--vocab-size {vocab_size}: not in 256 (every byte) to 65536 (uint16)")
    if out is None:
        out = Path(__file__).parent / ("stdlib" if sources == ["stdlib"] else "custom")
    out = Path(out)
    docs = [doc for source in sources for doc in read_source(source)]
    train_texts, val_texts = train_and_val(docs)
    ranks = BYTES
    if learned:
        say(f"learning {vocab_size} tokens", "stdout")
        ranks = learn_bpe("".join(train_texts)[:LEARN_CHARS], vocab_size)
    say("encoding", "stdout")
    enc = make_encoding(tokenizer, ranks)
    train = encode(enc, train_texts)
    val = encode(enc, val_texts)

    meta = {"vocab_size": enc.n_vocab, "tokenizer": enc.name, "source": sources,
            "train_tokens": len(train), "val_tokens": len(val),
            "bytes_per_token": len("".join(val_texts).encode()) / len(val)}
    files = {"train.bin": train.tobytes(), "val.bin": val.tobytes()}
    if learned:
        lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
        files["vocab.tiktoken"] = b"".join(lines)
    files["meta.json"] = (json.dumps(meta, indent=1) + "\n").encode()
    write_whole(out, files)

    say(f"corpus     {', '.join(sources)}: {len(docs)} files\n"
        f"vocabulary {enc.n_vocab} tokens ({enc.name}), {meta['bytes_per_token']:.2f} bytes a "
        "token\n"
        f"tokens     {len(train):,} train, {len(val):,} val, in {out}", "stdout")
    return meta


def main():
    parser = argparse.ArgumentParser(description="Text to tokens: train.bin, val.bin, meta.json.")
    parser.error = lambda message: parser.exit(2, f"prepare.py: {message}\n")
    parser.add_argument("sources", nargs="*", default=["stdlib"], metavar="SOURCE",
                        help="stdlib (default), or paths of text files and folders")
    parser.add_argument("--out", help="folder to write (default: data/stdlib for that "
                        "source alone, else data/custom)")
    parser.add_argument("--tokenizer", default="bpe", choices=["bpe", "gpt2", "bytes"],
                        help="bpe (default) learns a vocabulary")
    parser.add_argument("--vocab-size", type=int, default=1024,
                        help="tokens of a bpe vocabulary (default: 1024)")
    args = parser.parse_args()
    try:
        prepare(**vars(args))
    except ValueError as error:
        parser.error(str(error).replace("\n", "\\n"))


if __name__ == "__main__":
    main()
