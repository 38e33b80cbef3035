"""Exports a checkpoint as a folder for Hugging Face's GPT2LMHeadModel and AutoTokenizer.

Four weights of a block are transposed (Conv1D), the tied lm_head is left out. The tokenizer is the
byte-level BPE of the training data; GPT-2's own has no file here.

    python -m run.export --out out --to gpt2-folder
"""

import argparse
import json
from pathlib import Path

from data.batches import load_tokenizer
from run import checkpoint, tensorfile
from run.weights import CONV1D, load_model


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
    """{name: content} of the tokenizer of a prepared folder. ValueError if it has none to write."""
    encoding = load_tokenizer(data)
    if encoding.name == "gpt2":
        raise ValueError("it is GPT-2's own; AutoTokenizer.from_pretrained('gpt2') has it")
    if encoding.n_vocab != config.vocab_size:
        raise ValueError(f"that of {data} has {encoding.n_vocab} tokens, the model "
                         f"{config.vocab_size}")
    return {"tokenizer.json": tokenizer_json(encoding),
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast",
                                      "model_max_length": config.block_size}}


def export(folder, to):
    """Write a checkpoint to the new folder `to`: weights in float32, config.json, the tokenizer.
    Returns a sentence that says what was written. ValueError."""
    if to.exists() and any(to.iterdir()):
        raise ValueError(f"--to {to}: has files already; name a new folder")
    model = load_model(folder)
    config = model.config
    if config.n_experts:
        raise ValueError(f"{folder}: GPT-2 has no experts")
    tensors = {}
    for name, param in model.canonical_parameters():
        x = param.data.t() if name.endswith(CONV1D) else param.data
        tensors[name.removeprefix("transformer.")] = x.contiguous()
    head, _ = tensorfile.make_header({name: x.shape for name, x in tensors.items()}, "F32")
    to.mkdir(parents=True, exist_ok=True)
    with open(to / "model.safetensors", "wb") as file:
        file.write(head)
        for x in tensors.values():
            file.write(x.numpy().tobytes())
    end_of_text = 50256 if config.vocab_size > 50256 else 0  # GPT-2's; else byte 0, not in any text
    files = {"config.json": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": config.n_layer,
        "n_head": config.n_head, "n_embd": config.n_embd, "n_positions": config.block_size,
        "n_ctx": config.block_size, "vocab_size": config.vocab_size,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True,
        "bos_token_id": end_of_text, "eos_token_id": end_of_text}}
    note = ""
    try:
        files |= tokenizer_files(checkpoint.read_manifest(folder)["data"], config)
    except (ValueError, OSError) as error:
        note = f"; without a tokenizer: {error}"
    for name, content in files.items():
        (to / name).write_text(json.dumps(content, indent=1))
    return f"{to}: {', '.join(['model.safetensors', *files])}, of {folder}{note}"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"export.py: {message}\n")
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--to", required=True, help="the folder to write")
    args = parser.parse_args()
    try:
        print(export(checkpoint.find(args.out), Path(args.to)))
    except (ValueError, OSError) as error:
        parser.exit(2, f"export.py: {error}\n")


if __name__ == "__main__":
    main()
