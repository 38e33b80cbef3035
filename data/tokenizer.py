"""The tokenizer of a folder that data/prepare.py made, in the format of Hugging Face: run/export.py
writes the files. AutoTokenizer and tiktoken then give a text the same tokens."""

from data.batches import load_tokenizer


def byte_characters():
    """{byte: character} of GPT-2's files: a printable byte is written as itself, the others as the
    characters from 256 on, in order: byte 0 as chr(256), byte 32 (a space) as chr(288)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    for i, byte in enumerate(others):
        characters[byte] = chr(256 + i)
    return characters


def merges_of(ranks):
    """[(left, right)]: every pair of tokens that together spell a third token, in the order of the
    third token's rank. ranks: {token: rank}. (tiktoken calls a token's id its rank: tokens that
    were learned first have the lowest.) tiktoken merges any two neighbours that spell a token, the
    token of lowest rank first. tokenizer.json says the same in another way: it lists the pairs to
    merge, and the first in the list is merged first.
    ranks = {..., ab: 256, bc: 257, abc: 258} gives a b, b c, a bc, ab c."""
    merges = []
    for token in sorted(ranks, key=ranks.get):
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in ranks and right in ranks:
                merges.append((left, right))
    return merges


def tokenizer_json(encoding):
    """A tiktoken.Encoding as the content of tokenizer.json."""
    character = byte_characters()
    ranks = encoding._mergeable_ranks
    spelled = {token: "".join(character[byte] for byte in token) for token in ranks}
    words = {"type": "Split", "pattern": {"Regex": encoding._pat_str}, "behavior": "Isolated",
             "invert": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                  "use_regex": False}
    model = {"type": "BPE",
             "ignore_merges": True,  # a whole word that is a token is that token
             "merges": [[spelled[left], spelled[right]] for left, right in merges_of(ranks)],
             "vocab": {spelled[token]: rank for token, rank in ranks.items()}}
    return {"version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, bytes_only]},
            "post_processor": None,
            "decoder": bytes_only,
            "model": model}


def tokenizer_files(data, config):
    """{name: content} of the tokenizer of the folder `data`, for a model of this GPTConfig, and the
    token that ends a text. ValueError if there is no tokenizer to write, or if its size is
    not the model's vocabulary."""
    encoding = load_tokenizer(data)
    if encoding.name == "gpt2":
        raise ValueError(f"the tokenizer of {data} is GPT-2's own; "
                         "AutoTokenizer.from_pretrained('gpt2') has it")
    if encoding.n_vocab != config.vocab_size:
        raise ValueError(f"the tokenizer of {data} has {encoding.n_vocab} tokens, the model "
                         f"{config.vocab_size}")
    # in our own vocabularies tokens 0 to 255 are the bytes; no text has byte 0
    return {"tokenizer.json": tokenizer_json(encoding),
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast",
                                      "model_max_length": config.block_size}}, 0
