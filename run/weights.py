"""Weights of other programs, both ways: nanoGPT's files, and Hugging Face's folders of a GPT-2,
Llama, Mistral, Qwen2 or Qwen3. A table translates the names of tensors; what it does not know is
refused in one line. Files are data: no pickle is loaded.

    python train.py --init-from FOLDER --data data/mine
    python -m run.weights --out out --to NEW_FOLDER
"""
# ruff: noqa: E402

from run.flags import Parser, fail, say


def export_flags():
    parser = Parser(__doc__)
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--to", required=True, help="the folder to write")
    return parser.parse_args()


if __name__ == "__main__":
    export_flags()  # a wrong flag ends the process here, without torch

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from data.files import read_json
from experts import kind_of, on_meta, shapes_of
from model import UNTIED
from run.checkpoint import (
    EMBEDDING,
    MANIFEST,
    MODEL,
    CheckpointError,
    about,
    expect,
    find,
    make_header,
    read_header,
    read_manifest,
    read_tensor,
)
from run.config_json import CONFIG, settings_of, sizes_of
from sizes import config_from

INDEX = "model.safetensors.index.json"  # says which file of a large model has which tensor

# ---- names of tensors ----

POSITIONS = "transformer.wpe.weight"
# What torch.compile, DDP, FSDP and activation checkpointing put into a name
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Masks of attention and rotary frequencies, which old files have, too: no parameters
UNUSED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# Hugging Face's GPT-2 has our names, but stores these matrices as (in, out), we as (out, in)
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# A Llama's names. Where there are several, our matrix is these, one below the other
LLAMA_ENDS = {EMBEDDING: "model.embed_tokens.weight",
              "transformer.ln_f.weight": "model.norm.weight",
              UNTIED: "lm_head.weight"}
LLAMA_BLOCK = {"ln_1": ["input_layernorm"],
               "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
               "attn.ln_q": ["self_attn.q_norm"],
               "attn.ln_k": ["self_attn.k_norm"],
               "attn.c_proj": ["self_attn.o_proj"],
               "ln_2": ["post_attention_layernorm"],
               "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
               "mlp.c_proj": ["mlp.down_proj"]}


def unwrapped(name):
    """The name without wrappers, and with the first word that files of an inner model lack."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    if name.startswith(("wte.", "wpe.", "h.", "ln_f.")):
        return f"transformer.{name}"
    if name.startswith(("embed_tokens.", "layers.", "norm.")):
        return f"model.{name}"
    return name


def parts_of(name, shape, config, form):
    """{name in a file: shape there} of the parts of our tensor of this canonical name. form: whose
    file it is, "ours" (also nanoGPT's), or Hugging Face's "gpt2" or "llama"."""
    if form == "gpt2" and name.endswith(CONV1D):
        return {name: shape[::-1]}
    if form != "llama":
        return {name: shape}
    if name in LLAMA_ENDS:
        return {LLAMA_ENDS[name]: shape}
    *_, i, local = name.split(".", 3)  # transformer.h.0.attn.c_attn.weight
    module, _, kind = local.rpartition(".")
    if module not in LLAMA_BLOCK:
        raise ValueError(f"Hugging Face's Llama has no tensor for {name}")
    rows = {"attn.c_attn": [config.query_width, config.kv_width, config.kv_width],
            "mlp.c_fc": [config.n_hidden] * 2}.get(module, [shape[0]])
    return {f"model.layers.{i}.{part}.{kind}": (n, *shape[1:])
            for part, n in zip(LLAMA_BLOCK[module], rows, strict=True)}


# ---- from a file ----


def files_in(folder):
    """The files with a folder's tensors."""
    index = folder / INDEX
    if not index.exists():
        pickles = sorted(folder.glob("pytorch_model*.bin"))
        return pickles if pickles and not (folder / MODEL).exists() else [folder / MODEL]
    file_of = read_json(index).get("weight_map")
    if type(file_of) is not dict:
        raise ValueError(f"{index}: its weight_map is {file_of!r:.40}, not an object")
    for name, file in file_of.items():
        # "/" could lead out of the folder; "\0" is not printable
        if type(file) is not str or "/" in file or not file.isprintable():
            raise ValueError(f"{index}: its {name} is {file!r:.40}, not a file's name")
    return [folder / file for file in sorted(set(file_of.values()))]


def read_entries(path):
    """{name: Entry} of a safetensors file, or of a folder's files."""
    entries = {}
    for file in files_in(path) if path.is_dir() else [path]:
        if file.suffix in (".pt", ".pth", ".bin"):
            raise ValueError(f"{file}: a pickle, which may run code, is never loaded; convert it "
                             "with safetensors.torch.save_file: docs/test-your-own.md")
        entries |= read_header(file)
    return entries


def form_of(entries, shapes, config):
    """Whose file has these {name: Entry}: see parts_of."""
    if any(name.startswith("model.layers.") for name in entries):
        return "llama"
    c_attn = "transformer.h.0.attn.c_attn.weight"  # of a GPT-2 never square
    if config.arch == "gpt2" and c_attn in entries:
        return "gpt2" if entries[c_attn].shape == shapes[c_attn][::-1] else "ours"
    return "ours"


def find_parts(entries, shapes, config, form):
    """{our name: its parts_of} in a file with these {name: Entry}."""
    parts = {name: parts_of(name, shape, config, form) for name, shape in shapes.items()}
    has_biases = any(name.endswith(".bias") and not name.endswith(UNUSED) for name in entries)
    if form != "llama" and not has_biases:  # nanoGPT's default. Zeros compute the same
        parts.update({name: {} for name in shapes if name.endswith(".bias")})
    if POSITIONS in shapes and POSITIONS in entries:  # values() takes the first rows of more
        longest = max(shapes[POSITIONS], entries[POSITIONS].shape)
        parts[POSITIONS] = {POSITIONS: (longest[0], *shapes[POSITIONS][1:])}
    return parts


def refuse_other_sizes(folder, config):
    """ValueError if config.json, or the manifest of a checkpoint of ours, has other sizes: a
    tensor's shape does not show n_head or rope_theta."""
    theirs = {}
    if (folder / CONFIG).exists():
        theirs = sizes_of(folder)
    elif (folder / MANIFEST).exists():
        theirs = asdict(config_from(read_manifest(folder)["model"]))
    ours = {"arch": config.arch, **asdict(config), "untied": not getattr(config, "tied", True)}
    for name, value in theirs.items():
        if name != "block_size" and value != ours.get(name):  # a longer table: see find_parts
            raise ValueError(f"{folder}: its {name} is {value}, this run's is {ours.get(name)}")


def values(path, shapes, config):
    """A function from a canonical name to the full tensor, on the CPU, of a safetensors file or a
    folder. CheckpointError, which names file and tensor: at once, if the file has not the tensors
    of these {canonical name: shape}, or has others; when a tensor is read, if it is not finite."""
    path = Path(path)
    with about(path):
        entries = {unwrapped(name): entry for name, entry in read_entries(path).items()}
        refuse_other_sizes(path if path.is_dir() else path.parent, config)
        form = form_of(entries, shapes, config)
        parts = find_parts(entries, shapes, config, form)
    wanted = {part: shape for found in parts.values() for part, shape in found.items()}
    # If tied, a file has the matrix under the head's name, the embedding's, or both
    tied = UNTIED in entries and UNTIED not in shapes
    if tied:
        embedding, = parts[EMBEDDING]
        entries.setdefault(embedding, entries[UNTIED])
        wanted[UNTIED] = shapes[EMBEDDING]
    expect(path, entries, wanted)
    for name in sorted(entries.keys() - wanted):
        if not name.endswith(UNUSED):
            raise CheckpointError(f"{path}, tensor {name}: a model of these flags has none")

    def full_tensor(name):
        if not parts[name]:
            return torch.zeros(shapes[name])
        full = torch.cat([read_tensor(entries[part]) for part in parts[name]])
        if not full.isfinite().all():
            raise CheckpointError(f"{path}, tensor {name}: not finite")
        if name == EMBEDDING and tied and not torch.equal(full, read_tensor(entries[UNTIED])):
            raise CheckpointError(f"{path}, tensor {UNTIED}: not the embedding, but this model "
                                  "ties them")
        if form == "gpt2" and name.endswith(CONV1D):
            full = full.t()
        return full[: shapes[name][0]]

    return full_tensor


def load_model(folder, device="cpu"):
    """The whole model of one of our checkpoints, in float32. CheckpointError if it is damaged."""
    path = Path(folder, MODEL)
    config = config_from(read_manifest(folder)["model"])
    # A forged manifest may name a model that takes hours to build, or all memory. So compare first
    # the number of layers with the file's, then, on the meta device, all shapes
    try:
        last = f"transformer.h.{config.n_layer - 1}.ln_1.weight"
        expect(path, read_header(path), {last: (config.n_embd,)})
        shapes = shapes_of(on_meta(config))
    except (ArithmeticError, RuntimeError):
        raise CheckpointError(f"{folder}/{MANIFEST}: damaged, no model has its sizes") from None
    full_tensor = values(path, shapes, config)
    model = kind_of(config)(config)
    for name, param in model.canonical_parameters():
        param.data.copy_(full_tensor(name))
    return model.to(device)


# ---- to a folder ----


def export(folder, to):
    """Write a checkpoint's weights in float32, and config.json, into the new folder `to`.
    ValueError if that cannot be."""
    with about(to):
        in_checkpoint = (to.parent / MANIFEST).exists() and (to.parent / MODEL).exists()
    if to.name.startswith("step-") or in_checkpoint:
        raise ValueError(f"--to {to} is the place of a checkpoint; name another folder")
    model = load_model(folder)
    config = model.config
    if config.n_experts:
        raise ValueError(f"{folder}: has experts, which neither GPT-2 nor Llama has")
    form = "gpt2" if config.arch == "gpt2" else "llama"
    tensors = {}
    for name, param in model.canonical_parameters():
        parts = parts_of(name, param.shape, config, form)
        full = param.data.t() if form == "gpt2" and name.endswith(CONV1D) else param.data
        tensors.update(zip(parts, full.split([n for n, *_ in parts.values()]), strict=True))
    head, _ = make_header({name: part.shape for name, part in tensors.items()}, "F32")
    with about(to):
        to.mkdir(parents=True)
        with open(to / MODEL, "wb") as file:
            file.write(head)
            for part in tensors.values():
                file.write(part.contiguous().numpy().data)
        (to / CONFIG).write_text(json.dumps(settings_of(config), indent=1))


def main():
    args = export_flags()
    try:
        folder = find(args.out)
        export(folder, Path(args.to))
    except ValueError as error:
        fail(error)
    say(f"{args.to}: {MODEL} and {CONFIG}, of {folder}", sys.stdout)


if __name__ == "__main__":
    main()
