"""Exports a checkpoint as a folder for Hugging Face's GPT2LMHeadModel and AutoTokenizer.

Four weights of each block are transposed (Conv1D), and lm_head, which is the embedding's matrix, is
left out. The tokenizer is that of the training data. None is written if the run used GPT-2's own,
which AutoTokenizer.from_pretrained("gpt2") has, or if the data has none (nanoGPT's characters).

    python -m run.export --out out --to gpt2-folder
"""

from run.command import export_flags
from run.signals import end_quietly

if __name__ == "__main__":
    end_quietly()
    export_flags(__doc__).parse_args()  # a wrong flag ends the process here, without torch

import errno
import json
from pathlib import Path

from data.tokenizer import tokenizer_files
from run import checkpoint, tensorfile
from run.files import FOLDER
from run.signals import in_words
from run.weights import CONV1D, load_model


def write_weights(path, model):
    """Write the parameters, in float32, under Hugging Face's names and shapes."""
    tensors = {}
    for name, param in model.canonical_parameters():
        values = param.data.t() if name.endswith(CONV1D) else param.data
        tensors[name.removeprefix("transformer.")] = values.contiguous()
    shapes = {name: values.shape for name, values in tensors.items()}
    head, _ = tensorfile.make_header(shapes, "F32")
    with open(path, "wb") as file:
        file.write(head)
        for values in tensors.values():
            file.write(values.numpy().tobytes())


def config_json(config, end_of_text):
    """The content of Hugging Face's config.json for a GPTConfig. end_of_text: the token that ends a
    text, or None."""
    return {"architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "n_positions": config.block_size,
            "vocab_size": config.vocab_size,
            "activation_function": "gelu_new",
            "resid_pdrop": 0.0,  # dropout
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text}


def export(folder, to):
    """Write a checkpoint to the new folder `to`: weights in float32, config.json, the tokenizer.
    Returns a sentence that says what was written. ValueError if the model is none of Hugging
    Face's, OSError if the folder exists or cannot be written."""
    model = load_model(folder)
    data = checkpoint.read_manifest(folder)["data"]  # before a run can prune the checkpoint
    config = model.config
    if config.n_experts:
        raise ValueError(f"{folder}: GPT-2 has no experts")
    if to.exists():
        raise FileExistsError(errno.EEXIST, "File exists", str(to))
    if FOLDER.fullmatch(to.name):  # a run would prune it as unfinished
        raise ValueError(f"--to {to} has a checkpoint's name; name another folder")
    part = Path(f"{to}.part")  # renamed once all files are in it
    part.mkdir(parents=True)
    write_weights(part / "model.safetensors", model)
    tokenizer = {}
    note = ""
    try:
        tokenizer = tokenizer_files(data, config)
    except (ValueError, OSError) as error:
        note = f"; without a tokenizer: {in_words(error)}"
    if tokenizer:
        end_of_text = 0  # in our own vocabularies tokens 0 to 255 are the bytes; no text has byte 0
    elif config.vocab_size > 50256:
        end_of_text = 50256  # GPT-2's own
    else:
        end_of_text = None  # not known: in nanoGPT's characters token 0 is mostly the line break
    files = {"config.json": config_json(config, end_of_text), **tokenizer}
    for name, content in files.items():
        (part / name).write_text(json.dumps(content, indent=1))
    part.rename(to)
    return f"{to}: {', '.join(['model.safetensors', *files])}, of {folder}{note}"


def main():
    parser = export_flags(__doc__)
    args = parser.parse_args()
    to = Path(args.to)
    try:
        said = checkpoint.read_newest(args.out, lambda folder: export(folder, to))
    except (ValueError, OSError) as error:
        parser.error(error)
    print(said)


if __name__ == "__main__":
    main()
