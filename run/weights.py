"""Reads the weights of any program that has this model: this one, nanoGPT, Hugging Face.

    written by            names                                       shape of a block's four
                                                                      matrices
    this one, nanoGPT     transformer.h.0.attn.c_attn.weight, ...     (out, in)
    after torch.compile   _orig_mod.transformer. ...                  (out, in)
    Hugging Face          h.0.attn.c_attn.weight, ...                 (in, out)

CONV1D below names the four. lm_head.weight and transformer.wte.weight are one matrix; a file may
have both names or one.
"""

import json
from pathlib import Path

import torch

from experts import kind_of
from run import tensorfile
from run.checkpoint import MANIFEST, MODEL, read_manifest, refuse_other
from run.tensorfile import DAMAGED, DTYPES, CheckpointError, about, checksum
from sizes import GPTConfig

# In Hugging Face's GPT-2 these layers are Conv1D, whose weights are (in, out)
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def refuse_config(path, config):
    """CheckpointError if Hugging Face's config.json describes another model of the same shapes."""
    try:
        given = dict(json.loads(path.read_bytes()))
    except (OSError, *DAMAGED) as error:
        raise CheckpointError(f"{path}: {error}") from None
    for name, ours in (("n_head", config.n_head), ("activation_function", "gelu_new")):
        if given.get(name, ours) != ours:
            raise CheckpointError(f"{path}: its {name} is {given[name]}, here it is {ours}")


def canonical(name):
    """Our name for a tensor of nanoGPT (with or without torch.compile) or of Hugging Face."""
    name = name.removeprefix("_orig_mod.")
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def find_tensors(path, shapes, config):
    """Read a safetensors file's header. Returns ({our name: Entry}, endings of the names whose
    tensors are (in, out) in this file: CONV1D for Hugging Face's, else ()). CheckpointError unless
    the file has tensors of these {name: shape}, and no others."""
    entries = {canonical(name): entry for name, entry in tensorfile.read_header(path).items()}
    table, head = "transformer.wte.weight", "lm_head.weight"
    if head in entries:
        entries.setdefault(table, entries[head])
        if checksum(entries[table]) != checksum(entries[head]):
            raise CheckpointError(f"{path}: {head} is not {table}; this model ties them")
    probe = entries.get("transformer.h.0.attn.c_attn.weight")
    is_conv1d = probe and probe.shape == (config.n_embd, 3 * config.n_embd)
    transposed = CONV1D if is_conv1d else ()
    wanted = {}  # {name: shape in this file}
    for name, shape in shapes.items():
        wanted[name] = shape
        if name.endswith(transposed):  # if transposed is (), no name does
            wanted[name] = torch.Size(reversed(shape))
    tensorfile.expect(path, entries, wanted, DTYPES)
    for name in entries.keys() - wanted.keys() - {head}:  # tensors that the model does not need
        if not name.endswith((".attn.bias", ".attn.masked_bias")):  # masks, which old files have
            raise CheckpointError(f"{path}: has {name}, which a model of these flags lacks")
    return entries, transposed


def read_weights(path, shapes, config):
    """Check that a safetensors file has tensors of these {name: shape}, and no others, and return a
    function from a name to the full tensor, on CPU. CheckpointError, also if a manifest or Hugging
    Face's config.json beside the file describes another model."""
    path = Path(path)
    entries, transposed = find_tensors(path, shapes, config)
    if path.with_name("config.json").exists():
        refuse_config(path.with_name("config.json"), config)
    if path.name == MODEL and path.with_name(MANIFEST).exists():
        manifest = read_manifest(path.parent)
        refuse_other(path, manifest, config)
        for name in shapes:
            # -1 equals no CRC-32: a checksum that is missing is an error
            checksum(entries[name], manifest["checksums"][MODEL].get(name, -1))

    def get(name):
        entry = entries[name]
        with about(path, name), open(path, "rb") as file:
            file.seek(entry.begin)
            data = bytearray(file.read(entry.end - entry.begin))
        tensor = torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
        return tensor.t() if name.endswith(transposed) else tensor

    return get


def load_model(folder, device="cpu"):
    """The whole model of a checkpoint, in float32. CheckpointError if damaged or not finite."""
    config = GPTConfig(**read_manifest(folder)["model"])
    model = kind_of(config)(config)
    shapes = {name: param.shape for name, param in model.canonical_parameters()}
    get = read_weights(Path(folder, MODEL), shapes, config)
    for name, param in model.canonical_parameters():
        param.data.copy_(get(name))
        if not param.isfinite().all():
            raise CheckpointError(f"{folder}: {name} is not finite; take an earlier checkpoint")
    return model.to(device)
