"""Reads the weights of any program that has these models: this one, nanoGPT, Hugging Face.

    written by              names
    this one, nanoGPT       transformer.h.0.attn.c_attn.weight, ...; run/checkpoint.py
    in a wrapper            _orig_mod.transformer. ..., module.transformer. ...: see WRAPPERS
    Hugging Face's GPT-2    h.0.attn.c_attn.weight, ..., four of a block transposed
    Hugging Face's Llama    model.layers.0.self_attn.q_proj.weight, ...; run/hugging_face.py

If head and embedding are tied, they are one matrix. A file may have it under the embedding's name,
under the head's (lm_head.weight; in the code UNTIED) or under both.
"""

import os
from dataclasses import asdict
from pathlib import Path

import torch

from data.foreign import FILE_NAME, OBJECT, read_json
from experts import kind_of
from model import UNTIED
from run import tensorfile
from run.checkpoint import EMBEDDING, MODEL, read_manifest, refuse_other, together
from run.config import MANIFEST
from run.hugging_face import CONFIG, CONV1D, LLAMA_ENDS, flags_of_folder, kept_settings, llama_names
from run.tensorfile import DTYPES, FLOATS, CheckpointError, about, checksum, open_tensors
from sizes import LlamaConfig, config_from

INDEX = "model.safetensors.index.json"  # says which file of a folder has which tensor
# Parts of a name that torch.compile, DDP, FSDP and checkpointing put in where they wrap a module
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
POSITIONS = "transformer.wpe.weight"
MASKS = (".attn.bias", ".attn.masked_bias")  # old files have them; no parameters


def read_headers(path):
    """{name: Entry} of a safetensors file or, for a folder, of all files that its index names. (A
    folder without an index: of its model.safetensors.)"""
    if not path.is_dir():
        return tensorfile.read_header(path)
    index = path / INDEX
    if not os.path.lexists(index):
        return tensorfile.read_header(path / MODEL)
    with about(index):
        file_of = read_json(index, {"weight_map": OBJECT})["weight_map"]
    entries = {}
    for tensor, file in file_of.items():
        if not FILE_NAME.fits(file):
            raise CheckpointError(f"{index}: its {tensor} is {file!r:.40}, not {FILE_NAME.words}")
    for file in sorted(set(file_of.values())):
        entries |= tensorfile.read_header(path / file)
    for name, file in file_of.items():
        if name not in entries or entries[name].path != path / file:
            raise CheckpointError(f"{index}: names {file} for {name}, which is not there")
    return entries


def refuse_config(folder, config):
    """CheckpointError if Hugging Face's config.json describes another model. (Some differences,
    such as n_head or rope_theta, do not show in the tensors' shapes.)"""
    with about(folder / CONFIG):
        flags = flags_of_folder(folder)
    theirs = {"arch": "gpt2", **flags}
    theirs.pop("block_size", None)  # GPT-2: find_tensors compares wpe's shape; a Llama takes any
    ours = {**asdict(config), "arch": "gpt2"}
    if isinstance(config, LlamaConfig):
        ours.update(arch=config.arch, untied=not config.tied)
    for name, value in theirs.items():
        if value != ours[name]:
            raise CheckpointError(f"{folder / CONFIG}: its {name} is {value}, here it is "
                                  f"{ours[name]}")


def unwrapped(name):
    """The name without its wrappers: module.h.0._orig_mod.ln_1.weight -> h.0.ln_1.weight."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def canonical(name):
    """Our name for a tensor of nanoGPT or of Hugging Face's GPT-2."""
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def find_tensors(path, shapes, config):
    """Find the tensors of these {canonical name: shape} in a file or a folder. Returns {canonical
    name: [(Entry, is it stored as (in, out)?)]}. If there are several entries (a Llama's q, k and
    v), our tensor is their rows, one below the other; if there is none, zeros. CheckpointError
    unless the file has these tensors and no others. (refuse_more lets the head's matrix and old
    masks pass.)"""
    entries = {unwrapped(name): entry for name, entry in read_headers(path).items()}
    if "embed_tokens.weight" in entries:  # LlamaModel alone, as in Qwen3-Embedding: no "model."
        entries = {name if name == UNTIED else f"model.{name}": entry
                   for name, entry in entries.items()}
    if any(name.startswith("model.layers.") for name in entries):
        return find_llama(path, entries, shapes, config)
    entries = {canonical(name): entry for name, entry in entries.items()}
    require_one_tied(path, entries, shapes, EMBEDDING)
    # nanoGPT's default has no biases: zeros compute the same
    has_biases = any(name.endswith(".bias") and not name.endswith(MASKS) for name in entries)
    zeros = [name for name in shapes if name.endswith(".bias") and not has_biases]
    # Hugging Face's GPT-2 stores four matrices of a block as (in, out): those named in CONV1D
    probe = entries.get("transformer.h.0.attn.c_attn.weight")
    is_conv1d = probe and probe.shape == (config.n_embd, 3 * config.n_embd)
    transposed = CONV1D if is_conv1d else ()
    wanted = {}  # {name: shape in this file}
    for name, shape in shapes.items():
        if name in zeros:
            continue
        wanted[name] = shape
        if name == POSITIONS and name in entries:
            rows = max(entries[name].shape[:1], default=0)
            if rows < shape[0]:
                raise CheckpointError(f"{path}, tensor {name}: {rows} positions; take "
                                      f"--block-size {rows}")
            wanted[name] = torch.Size((rows, *shape[1:]))  # of a longer table the first rows
        if name.endswith(transposed):  # False for all names if transposed is ()
            wanted[name] = torch.Size(reversed(shape))
    tensorfile.expect(path, entries, wanted, FLOATS)
    # UNTIED: a file may have the head's matrix next to the embedding's. Old files also have masks
    refuse_more(path, entries, {*wanted, UNTIED}, MASKS)
    return {name: [(entries[name], name.endswith(transposed))] for name in wanted} | {
        name: [] for name in zeros}


def find_llama(path, entries, shapes, config):
    """find_tensors() under LlamaForCausalLM's names."""
    if not isinstance(config, LlamaConfig):
        raise CheckpointError(f"{path}: has the tensors of a Llama; add --arch llama, or "
                              f'"model_type": "llama" to its {CONFIG}')
    if config.n_experts:
        raise CheckpointError(f"{path}: a LlamaForCausalLM has no experts; leave out --experts")
    require_one_tied(path, entries, shapes, LLAMA_ENDS[EMBEDDING])
    found = {}
    wanted = {}  # {name in the file: shape}
    for name, shape in shapes.items():
        with about(path):
            parts = llama_names(name, config)  # [(name in the file, number of rows; None: all)]
        for theirs, rows in parts:
            wanted[theirs] = shape if rows is None else torch.Size((rows, *shape[1:]))
        found[name] = [theirs for theirs, _ in parts]
    tensorfile.expect(path, entries, wanted, FLOATS)
    # old files also have the rotary frequencies
    refuse_more(path, entries, {*wanted, UNTIED}, (".rotary_emb.inv_freq",))
    return {name: [(entries[part], False) for part in parts] for name, parts in found.items()}


def require_one_tied(path, entries, shapes, embedding):
    """If the model ties head and embedding: where the file has the head alone, add its Entry to
    `entries` as the embedding's, too; CheckpointError if the file has both, and they differ.
    embedding: the name of the embedding in this file."""
    if UNTIED in entries and UNTIED not in shapes:
        entries.setdefault(embedding, entries[UNTIED])
        if checksum(entries[embedding]) != checksum(entries[UNTIED]):
            raise CheckpointError(f"{path}: {UNTIED} is not {embedding}; this model ties them")
    rows = max(entries[embedding].shape[:1], default=0) if embedding in entries else 0
    if rows not in (0, shapes[EMBEDDING][0]):
        raise CheckpointError(f"{path}: a vocabulary of {rows}, that of --data has "
                              f"{shapes[EMBEDDING][0]}; prepare it with this model's tokenizer")


def refuse_more(path, entries, wanted, harmless):
    """CheckpointError if the file has a tensor that is not in `wanted`, unless its name has one of
    the endings `harmless`."""
    for name in entries.keys() - wanted:
        if not name.endswith(harmless):
            raise CheckpointError(f"{path}: has {name}, which a model of these flags lacks")


def read_tensor(entry):
    """The tensor of an Entry, on CPU."""
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    with open_tensors(entry.path, entry.name) as file:
        file.seek(entry.begin)
        had = file.readinto(tensor.flatten().view(torch.uint8).numpy())
    if had < entry.end - entry.begin:  # the file has shrunk since its header was read
        raise CheckpointError(f"{entry.path}, tensor {entry.name}: cut off at the end of the file")
    return tensor


def load_parts(places, shape):
    """A tensor of this shape, on CPU, from the places that find_tensors found for it."""
    if not places:
        return torch.zeros(shape)
    parts = []
    for entry, is_conv1d in places:
        tensor = read_tensor(entry)
        parts.append(tensor.t() if is_conv1d else tensor)
    return torch.cat(parts) if len(parts) > 1 else parts[0][: shape[0]]


def read_weights(path, shapes, config):
    """Check that a safetensors file, or a folder of Hugging Face, has tensors of these {name:
    shape} and no others (see find_tensors), and return a function from a name to the full tensor,
    on CPU. CheckpointError, also if a manifest or a config.json next to the file describes another
    model."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    file = path / MODEL if path.is_dir() else path
    if os.path.lexists(folder / CONFIG):
        refuse_config(folder, config)
    found = find_tensors(path, shapes, config)
    if file.name == MODEL and (folder / MANIFEST).exists():  # a checkpoint of ours
        manifest = read_manifest(folder)
        refuse_other(path, manifest, config)
        for name, places in found.items():
            (entry, _), = places  # under our own names a tensor is in one place
            # -1 equals no CRC-32: a checksum that is missing is an error
            checksum(entry, manifest["checksums"][MODEL].get(name, -1))

    return lambda name: load_parts(found[name], shapes[name])


def kept_of(cfg):
    """What checkpoints of this run keep of the folder of --init-from, for run.export; None: there
    is no such folder. (load() in checkpoint.py replaces it by what the checkpoint has kept.)"""
    path = Path(cfg.init_from)
    folder = path if path.is_dir() else path.parent
    if cfg.init_from and (folder / MANIFEST).exists():  # a checkpoint of ours
        return read_manifest(folder).get("kept")
    if cfg.init_from and os.path.lexists(folder / CONFIG):
        with about(folder / CONFIG):
            return kept_settings(folder)
    return None


def initial_slices(cfg, shapes, config, mesh, draw):
    """A function value(tag): the slice with which this rank begins, of the run's dtype, on the
    CPU. The values are those of --init-from, or draw(name, shape, config, seed); zeros if a
    checkpoint is going to replace them. Collective: CheckpointError on all ranks if --init-from
    cannot be read on one, or is not finite."""
    given = None  # a function from a name to the full tensor
    if cfg.init_from and cfg.resume == "no":
        with together(mesh.world):
            given = read_weights(cfg.init_from, shapes, config)
            for name in [*shapes][mesh.world.rank :: mesh.world.size]:  # each rank reads its share
                if not given(name).isfinite().all():
                    raise CheckpointError(f"{cfg.init_from}, tensor {name}: not finite")

    def value(tag):
        if cfg.resume != "no":
            full = torch.zeros(()).expand(tag.shape)
        elif given:
            full = given(tag.name)
        else:
            full = draw(tag.name, tag.shape, config, cfg.seed)
        # a copy: a view of the slice would keep the full tensor in memory
        return tag.slice(full).to(getattr(torch, cfg.dtype), copy=True,
                                  memory_format=torch.contiguous_format)

    return value


def refuse_sizes(path, config):
    """CheckpointError if the file has not the sizes of this configuration, which comes from a
    manifest: to build a model of forged sizes could take hours, or all memory."""
    C = config.n_embd
    wanted = {EMBEDDING: (config.vocab_size, C),
              f"transformer.h.{config.n_layer - 1}.ln_1.weight": (C,)}
    if isinstance(config, LlamaConfig):
        wanted["transformer.h.0.attn.c_attn.weight"] = (
            config.query_width + 2 * config.kv_width, C)
    else:
        wanted["transformer.wpe.weight"] = (config.block_size, C)
    if config.n_experts:
        wanted["transformer.h.0.mlp.router.weight"] = (config.n_experts, C)
        if isinstance(config, LlamaConfig):  # (a GPT-2's are at most 4 C wide)
            expert = (2 * (config.n_hidden // config.top_k), C)
            wanted["transformer.h.0.mlp.experts.c_fc.weight"] = (config.n_experts, *expert)
    elif isinstance(config, LlamaConfig):
        wanted["transformer.h.0.mlp.c_fc.weight"] = (2 * config.n_hidden, C)
    tensorfile.expect(path, tensorfile.read_header(path), wanted, FLOATS)


def load_model(folder, device="cpu"):
    """The whole model of a checkpoint, in float32. CheckpointError if damaged or not finite."""
    config = config_from(read_manifest(folder)["model"])
    refuse_sizes(Path(folder, MODEL), config)
    model = kind_of(config)(config)
    shapes = {name: param.shape for name, param in model.canonical_parameters()}
    get = read_weights(Path(folder, MODEL), shapes, config)
    for name, param in model.canonical_parameters():
        param.data.copy_(get(name))
        if not param.isfinite().all():
            raise CheckpointError(f"{folder}: {name} is not finite; take an earlier checkpoint")
    return model.to(device)
