"""The tokenizer of a prepared folder as files that Hugging Face's AutoTokenizer opens. tiktoken and
they give a text the same tokens."""

from data.batches import load_tokenizer


def byte_characters():
    """{byte: character} of GPT-2's files: a printable byte is itself, the others come after 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)}


def tokenizer_json(encoding):
    """A tiktoken.Encoding as the content of tokenizer.json. tiktoken merges any two neighbours that
    spell a token, the token of lowest rank first; the file lists all these pairs in that order."""
    character, ranks = byte_characters(), encoding._mergeable_ranks
    spell = {token: "".join(character[byte] for byte in token) for token in ranks}
    in_order = sorted((rank, token) for token, rank in ranks.items() if len(token) > 1)
    merges = [[spell[token[:i]], spell[token[i:]]] for _, token in in_order
              for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    split = {"type": "Split", "pattern": {"Regex": encoding._pat_str}, "behavior": "Isolated",
             "invert": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                  "use_regex": False}
    return {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_only]},
            "decoder": bytes_only,
            "model": {"type": "BPE", "ignore_merges": True, "merges": merges,
                      "vocab": {spell[token]: rank for token, rank in ranks.items()}}}


def tokenizer_files(data, config):
    """{name: content} for a model of this GPTConfig. ValueError if there is none to write."""
    encoding = load_tokenizer(data)
    if encoding.name == "gpt2":
        raise ValueError("it is GPT-2's own; AutoTokenizer.from_pretrained('gpt2') has it")
    if encoding.n_vocab != config.vocab_size:
        raise ValueError(f"that of {data} has {encoding.n_vocab} tokens, the model "
                         f"{config.vocab_size}")
    return {"tokenizer.json": tokenizer_json(encoding),
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast",
                                      "model_max_length": config.block_size}}
