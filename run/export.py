"""Exports a checkpoint as a folder for Hugging Face's GPT2LMHeadModel or LlamaForCausalLM, and
AutoTokenizer.

Names and shapes: run/hugging_face.py. A tied lm_head is left out. The tokenizer is that of the
training data. No tokenizer is written if the run used GPT-2's own, which
AutoTokenizer.from_pretrained("gpt2") has, or if the data has none (nanoGPT's characters).

    python -m run.export --out out --to gpt2-folder
"""

from run.config import Parser
from run.signals import end_quietly


def export_flags(description):
    parser = Parser(description)
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--to", required=True, help="the folder to write")
    return parser


if __name__ == "__main__":
    end_quietly()
    export_flags(__doc__).parse_args()  # a wrong flag ends the process here, without torch

import errno
import json
from pathlib import Path

from data.tokenizer import tokenizer_files
from run import checkpoint, tensorfile
from run.hugging_face import CONFIG, CONV1D, config_json, llama_names
from run.signals import in_words
from run.tensorfile import about
from run.weights import load_model
from sizes import LlamaConfig


def tensors_of(name, values, config):
    """[(Hugging Face's name, its tensor)] of our tensor `values` of this canonical name."""
    if isinstance(config, LlamaConfig):
        parts = llama_names(name, config)
        rows = [len(values) if n is None else n for _, n in parts]
        return [(theirs, part) for (theirs, _), part in zip(parts, values.split(rows), strict=True)]
    if name.endswith(CONV1D):
        values = values.t()
    return [(name.removeprefix("transformer."), values.contiguous())]


def write_weights(path, tensors):
    """Write {name: float32 tensor} as a safetensors file. CheckpointError if the disk is full."""
    shapes = {name: values.shape for name, values in tensors.items()}
    head, _ = tensorfile.make_header(shapes, "F32")
    with about(path), open(path, "wb") as file:
        file.write(head)
        for values in tensors.values():
            file.write(values.numpy().tobytes())


def export(folder, to):
    """Write a checkpoint to the new folder `to`: weights in float32, config.json, the tokenizer.
    Returns a sentence that names the files. ValueError if the checkpoint is damaged, if its model
    has experts or other parameters than Hugging Face's, if `to` has a checkpoint's name, or if the
    disk is full; OSError if the folder exists or cannot be made."""
    model = load_model(folder)
    manifest = checkpoint.read_manifest(folder)
    data = manifest["data"]
    config = model.config
    if config.n_experts:
        raise ValueError(f"{folder}: neither GPT-2 nor Llama has experts")
    if to.exists():
        raise FileExistsError(errno.EEXIST, "File exists", str(to))
    if checkpoint.FOLDER.fullmatch(to.name):  # a run would prune it as unfinished
        raise ValueError(f"--to {to} has a checkpoint's name; name another folder")
    part = Path(f"{to}.part")  # renamed once all files are in it
    if part.exists():
        raise ValueError(f"{part} is left of an export that was stopped; delete it")
    tensors = {}  # under Hugging Face's names and shapes
    for name, param in model.canonical_parameters():
        tensors.update(tensors_of(name, param.data, config))
    part.mkdir(parents=True)
    write_weights(part / "model.safetensors", tensors)
    note = ""
    try:
        tokenizer, end_of_text = tokenizer_files(data, config)
    except (ValueError, OSError) as error:
        note = f"; without a tokenizer: {in_words(error)}"
        tokenizer = {}
        # GPT-2's own, also in nanoGPT's vocabulary of 50,304. Else not known: in nanoGPT's
        # characters token 0 is mostly the line break
        end_of_text = 50256 if 50257 <= config.vocab_size <= 50304 else None
    files = {CONFIG: config_json(config, end_of_text, manifest.get("kept")), **tokenizer}
    for name, content in files.items():
        with about(part / name):
            (part / name).write_text(json.dumps(content, indent=1))
    part.rename(to)
    return f"{to}: {', '.join(['model.safetensors', *files])}, of {folder}{note}"


def main():
    parser = export_flags(__doc__)
    args = parser.parse_args()
    to = Path(args.to)
    try:
        said = export(checkpoint.find(args.out), to)
    except (ValueError, OSError) as error:
        parser.error(error)
    print(said)


if __name__ == "__main__":
    main()
