"""Text to tokens: writes train.bin, val.bin, meta.json and, for bpe, vocab.tiktoken.

The default corpus is the source of the Python standard library, which lies next to the interpreter.
Files go whole to train (90% of the bytes) or to val; where they are too few and too large for that,
the joined text is cut at a line. The .bin files are like nanoGPT's: little-endian uint16, opened
with np.memmap; GPT-2's tokenizer ends each text with its token 50256. The bpe vocabulary is learned
here (arXiv 1508.07909, over bytes like in GPT-2) and applied by tiktoken. A loss in nats per token,
divided by ln 2 and by bytes_per_token, is in bits per byte: so losses of different tokenizers can
be compared with one another, and with the bits that gzip -9 needs per byte of val.bin's text.

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
import signal
import sys
import sysconfig
import tempfile
import time
from array import array
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import numpy as np

if not __package__:  # python data/prepare.py: the project's folder is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.files import open_file

SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
               "input.txt")
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
# A long text is encoded in pieces, so that two threads share it. Each piece ends at the first place
# beyond 100,000 characters where a line break follows a letter, a digit or "_" (\w),
# because no token joins these two; the last piece is the rest (.+).
PIECES = re.compile(r"(?s).{100000,}?\w(?=\n)|.+")


def show(doing, progress=""):
    """Print what is being done: in a file one line, without progress; on a terminal a line that the
    next print writes over."""
    if sys.stdout.isatty():
        print(f"\x1b[K{doing}{progress}", end="\r", flush=True)
    elif not progress:
        print(doing, flush=True)


# ---- read the texts ----


def download_shakespeare():
    try:
        with urlopen(SHAKESPEARE, timeout=15) as reply:
            return reply.read().decode()
    except (OSError, HTTPException) as error:
        raise ValueError(f"shakespeare: no download ({error}); use stdlib, which needs none, or "
                         f"pass the path of a saved copy of {SHAKESPEARE}") from error


def files_under(root, skip, ending):
    """All files with this ending in a folder and in the folders below; `skip` matches the names of
    files and folders to leave out."""
    found = []
    for here, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not skip.fullmatch(name)]  # os.walk enters these
        for name in names:
            path = Path(here, name)
            if name.endswith(ending) and not skip.fullmatch(name) and path.is_file():
                found.append(path)
    return found


def read_text(path):
    """The text of a file. ValueError if it is no text in UTF-8."""
    with open_file(path) as file:
        data = file.read()
    if b"\0" in data:  # UTF-16, or no text
        raise ValueError("not UTF-8 text: has bytes of 0")
    try:
        return data.decode("utf-8-sig")  # without the mark with which Windows begins a file
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None


def read_source(source):
    """[(name, text)] of one source: "stdlib", "shakespeare", a file, or a folder of text files.
    Prints how many files of a folder it skips, and why."""
    if source == "shakespeare":
        return [(source, download_shakespeare())]
    root = Path(source)
    skip = NO_SOURCE
    ending = ""
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        skip = NOT_STDLIB
        ending = ".py"
    show(f"reading {source}")
    paths = sorted(files_under(root, skip, ending)) if root.is_dir() else [root]
    docs = []
    skipped = defaultdict(list)  # reason -> names of files
    for path in paths:
        # a name relative to root: the same corpus wherever the folder lies
        name = path.relative_to(root).as_posix()
        try:
            docs.append((name, read_text(path)))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)  # an OSError without its number
            if path == root:  # the user has named this file; in a folder, skip what is not text
                raise ValueError(f"{source}: not readable as UTF-8 text ({reason}); give the path "
                                 "of a text file or a folder, or stdlib, or shakespeare") from error
            skipped[reason].append(name)
    for reason, names in skipped.items():
        print(f"skipped {len(names)} of {len(paths)} files of {source}: {reason} ({names[0]}"
              f"{', ...' if len(names) > 1 else ''})", flush=True)
    if not docs:
        raise ValueError(f"{source}: no file of UTF-8 text in {root}; give another path")
    return docs


def train_and_val(docs):
    """docs [(name, text)] -> two lists of texts, the same on every machine: whole files, up to a
    tenth of the bytes in val. If val would hold less than a twentieth, because the files are few
    and large, the joined text is cut at a line boundary instead."""
    # Each text once: if val had a copy of a text of train, the model would have memorised it
    texts = list(dict.fromkeys(text for _, text in sorted(docs)))
    texts = [text + "\n" for text in texts if text.strip()]
    size = {text: len(text.encode()) for text in texts}
    total = sum(size.values())
    if total < MIN_BYTES:
        raise ValueError(f"corpus: {len(texts)} usable files of {total} bytes in all, too small to "
                         f"split; give at least {MIN_BYTES} bytes of UTF-8 text")
    random.Random(1337).shuffle(texts)
    train = []
    val = []
    val_bytes = 0
    for text in texts:
        if val_bytes + size[text] <= total // 10:
            val.append(text)
            val_bytes += size[text]
        else:
            train.append(text)
    if val_bytes >= total // 20:
        return train, val
    val = []
    joined = "".join(texts)
    end = len(joined) * 9 // 10
    newline = joined.rfind("\n", end // 2, end)  # the last one before `end`; -1: none
    cut = newline + 1 if newline >= 0 else end
    start = 0  # of a text in the joined text
    train = []
    for text in texts:
        train.append(text[: max(0, cut - start)])
        val.append(text[max(0, cut - start) :])
        start += len(text)
    return [text for text in train if text], [text for text in val if text]


# ---- learn a vocabulary ----


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

    A merge looks at the places of its pair alone, so that a text of one long word is no slower.
    """
    import regex  # has \p{L} and \p{N}, which re lacks; installed with tiktoken
    show(f"learning {vocab_size} tokens")
    found = Counter(regex.findall(PATTERN, text))
    # The tokens of all different words, one after the other, with None between two words. A merge
    # puts the new token in the place of its left part; `left` and `right` leave out the other place
    tokens = [None]
    times = array("q", [0])  # how often the word of this token occurs
    for word, number in found.items():
        letters = [BYTE[byte] for byte in word.encode()]
        tokens += [*letters, None]
        times.extend([number] * (len(letters) + 1))
    left = array("q", range(-1, len(tokens) - 1))  # place of the token before this one
    right = array("q", range(1, len(tokens) + 1))  # place of the token behind this one
    count = defaultdict(int)  # pair -> how often it occurs
    where = defaultdict(partial(array, "q"))  # pair -> places where it begins, or has begun
    for i, (first, second) in enumerate(pairwise(tokens)):
        if first and second:
            count[first + second] += times[i]
            where[first + second].append(i)

    # Entries (-count, pair): the largest count is on top of the heap. An entry may be out of date:
    # a pair that got rarer has an entry with too large a count, which is corrected when the entry
    # reaches the top. A pair whose count rises gets a new entry. So an entry on top that is up to
    # date has the most frequent pair.
    heap = [(-n, pair) for pair, n in count.items()]
    heapq.heapify(heap)
    ranks = dict(BYTES)
    while heap and len(ranks) < vocab_size:
        minus_n, pair = heapq.heappop(heap)
        if -minus_n != count[pair]:  # out of date
            heapq.heappush(heap, (-count[pair], pair))
            continue
        if count[pair] < 2:
            break
        # This token is new: once a pair is merged, no two neighbours spell it again
        ranks[pair] = len(ranks)
        show(f"learning {vocab_size} tokens", f": {len(ranks)}")
        risen = set()
        for i in sorted(where.pop(pair)):  # from left to right: [a a a b] becomes [aa a b]
            j = right[i]
            if not tokens[i] or not tokens[j] or tokens[i] + tokens[j] != pair:  # it has gone
                continue
            before, behind = left[i], right[j]  # places
            # h i j k -> h ij k: the pairs (h, i), (i, j) and (j, k) go, (h, ij) and (ij, k) come
            count[pair] -= times[i]
            if tokens[before]:
                count[tokens[before] + tokens[i]] -= times[i]
            if tokens[behind]:
                count[tokens[j] + tokens[behind]] -= times[i]
            tokens[i], tokens[j] = pair, None
            right[i], left[behind] = behind, i
            for begin, end in ((before, i), (i, behind)):
                if tokens[begin] and tokens[end]:
                    new = tokens[begin] + tokens[end]
                    count[new] += times[i]
                    where[new].append(begin)
                    risen.add(new)
        for new in risen:
            heapq.heappush(heap, (-count[new], new))
    return ranks


# ---- encode, and write ----


def make_encoding(tokenizer, ranks=BYTES, pattern=PATTERN):
    """A tiktoken.Encoding. tokenizer gpt2 takes GPT-2's own ranks and pattern; bpe and bytes take
    `ranks` {token: rank} and `pattern`. The default ranks, BYTES, merge nothing."""
    import tiktoken  # here: a model that is only compared or computed needs no tokenizer
    if tokenizer != "gpt2":
        return tiktoken.Encoding(tokenizer, pat_str=pattern, mergeable_ranks=ranks,
                                 special_tokens={})
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # errors of its downloads are OSErrors
        raise ValueError(f"gpt2: tiktoken cannot download its ranks ({type(error).__name__}); use "
                         "--tokenizer bpe, or set TIKTOKEN_CACHE_DIR to a filled cache") from error


def token_type(vocab_size):
    """numpy's name for the tokens in a .bin file: little-endian uint16 or uint32."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def end_of_text(enc):
    """[the token that ends a text], or [] if the tokenizer has none: GPT-2's is 50256."""
    return [*enc._special_tokens.values()]


def encode(enc, texts, name, pool):
    """The tokens of all texts, one array; each text ends with the tokenizer's end of text, if there
    is one. tiktoken releases the GIL: two threads are faster."""
    def encode_piece(piece):
        ids = end_of_text(enc) if piece is None else enc.encode_ordinary(piece)
        return np.array(ids, token_type(enc.n_vocab))

    show(f"encoding {name}")
    pieces = []  # None: the end of a text
    for text in texts:
        pieces += [*PIECES.findall(text), None]
    ids = []
    for tokens in pool.map(encode_piece, pieces):
        ids.append(tokens)
        show(f"encoding {name}", f": {100 * len(ids) // len(pieces)} %")
    return np.concatenate(ids)


def advice(out):
    """What errors about the data in the folder `out` tell the user to do."""
    return f"python data/prepare.py SOURCE --out {out} writes this folder"


def write_whole(out, files):
    """Write {name: bytes} into the folder `out` in the order of the dict, whose last name has to be
    meta.json; each file whole or not at all.

    A meta.json marks a folder as complete. If the folder has the meta.json of other data, delete
    that first: a process that is stopped half-way then leaves an unmarked folder. A meta.json of
    the same data stays, because the files are replaced by equal ones: two processes that prepare
    the same corpus at once disturb no reader."""
    mark = out / "meta.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=out) as tmp:
            for name, data in files.items():
                Path(tmp, name).write_bytes(data)
            with suppress(FileNotFoundError):
                if mark.read_bytes() != files["meta.json"]:
                    mark.unlink()
            for name in files:
                os.replace(Path(tmp, name), out / name)
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error.strerror}); python data/prepare.py "
                         "--out FOLDER prepares it elsewhere") from error


def prepare(sources=("stdlib",), out=None, tokenizer="bpe", vocab_size=1024):
    """Write the folder `out` and return the values of its meta.json. Default: data/stdlib or
    data/shakespeare for that source alone, else data/custom. ValueError: sources that cannot be
    read, or a folder that cannot be written."""
    start = time.perf_counter()
    sources = [sources] if isinstance(sources, str) else [str(s) for s in sources]
    if tokenizer not in ("bpe", "gpt2", "bytes"):
        raise ValueError(f"--tokenizer {tokenizer}: not one of bpe, gpt2, bytes")
    learned = tokenizer == "bpe"
    if learned and not 256 <= vocab_size <= 65536:
        raise ValueError(f"--vocab-size {vocab_size}: not in 256 (every byte) to 65536 (uint16)")
    if out is None:
        is_named = sources in (["stdlib"], ["shakespeare"])
        out = Path(__file__).parent / (sources[0] if is_named else "custom")
    out = Path(out)
    docs = [doc for source in sources for doc in read_source(source)]
    train_texts, val_texts = train_and_val(docs)
    train_bytes = "".join(train_texts).encode()
    val_bytes = "".join(val_texts).encode()
    with ThreadPoolExecutor(2) as pool:
        zipped = pool.submit(gzip.compress, val_bytes, 9)  # while the vocabulary is learned
        ranks = BYTES
        if learned:
            ranks = learn_bpe("".join(train_texts)[:LEARN_CHARS], vocab_size)
        enc = make_encoding(tokenizer, ranks)
        train = encode(enc, train_texts, "train.bin", pool)
        val = encode(enc, val_texts, "val.bin", pool)
        gzip_bytes = len(zipped.result())
    in_text = val[~np.isin(val, end_of_text(enc))].tolist()
    assert enc.decode_bytes(in_text) == val_bytes, "tokens must spell the text exactly"

    meta = {"vocab_size": enc.n_vocab,
            "tokenizer": enc.name,
            **({"pattern": PATTERN} if learned else {}),
            "train_tokens": len(train),
            "val_tokens": len(val),
            "bytes_per_token": len(val_bytes) / len(val),
            "val_bytes": len(val_bytes),
            "gzip_bits_per_byte": 8 * gzip_bytes / len(val_bytes),
            "source": sources,
            "source_hash": hashlib.sha256(train_bytes + val_bytes).hexdigest()}
    files = {"train.bin": train.tobytes(), "val.bin": val.tobytes()}
    if learned:
        lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
        files["vocab.tiktoken"] = b"".join(lines)
    files["meta.json"] = (json.dumps(meta, indent=1) + "\n").encode()
    write_whole(out, files)

    print(f"corpus     {', '.join(sources)}: {len(docs)} files, "
          f"{len(train_bytes) / 1e6:.2f} MB train, {len(val_bytes) / 1e6:.2f} MB val\n"
          f"vocabulary {enc.n_vocab} tokens ({enc.name}), {meta['bytes_per_token']:.2f} bytes a "
          f"token; gzip -9 needs {meta['gzip_bits_per_byte']:.3f} bits a byte\n"
          f"tokens     {len(train):,} train, {len(val):,} val, in {out} "
          f"({time.perf_counter() - start:.1f} s)", flush=True)
    return meta


def main():
    parser = argparse.ArgumentParser(description="Text to tokens: train.bin, val.bin, meta.json.")
    parser.error = lambda message: parser.exit(2, f"prepare.py: {message}\n")
    parser.add_argument("sources", nargs="*", default=["stdlib"], metavar="SOURCE",
                        help="stdlib (default), shakespeare, or paths of text files and folders")
    parser.add_argument("--out", help="folder to write (default: data/stdlib or "
                        "data/shakespeare for that source alone, else data/custom)")
    parser.add_argument("--tokenizer", default="bpe", help="bpe (default), gpt2, bytes")
    parser.add_argument("--vocab-size", type=int, default=1024,
                        help="tokens of a bpe vocabulary (default: 1024)")
    args = parser.parse_args()
    try:
        prepare(**vars(args))
    except (ValueError, OSError) as error:
        # an OSError without its number
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        parser.exit(2, "prepare.py: " + what.replace("\n", "\\n") + "\n")


if __name__ == "__main__":
    for number in (signal.SIGPIPE, signal.SIGINT):  # | head and Ctrl-C end it without a traceback
        signal.signal(number, signal.SIG_DFL)
    main()
