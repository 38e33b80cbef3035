"""Weights of other programs, both ways: nanoGPT's files, and Hugging Face's folders of a GPT-2,
Llama, Mistral, Qwen2 or Qwen3. Tables translate names and settings; what they do not know is
refused in one line. Files are data: no pickle is loaded.

    python train.py --init-from FOLDER --data data/mine
    python -m run.weights --out out --to NEW_FOLDER
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from data.files import read_json
from sizes import config_from

# run/flags.py reads config.json with this file before torch is imported. So each function that
# needs torch, or a file of ours that imports torch, imports it by itself

CONFIG, MODEL = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"  # says which file of a large model has which tensor

# ---- config.json ----

LLAMA = {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,),
         "tie_word_embeddings": (False, True), "use_sliding_window": (False,),
         "layer_types": (None, ["full_attention"])}
# model_type: {setting: the values that our models compute; the first, if it is left out}
COMPUTED = {"gpt2": {"activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                     "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,),
                     "scale_attn_by_inverse_layer_idx": (False,), "tie_word_embeddings": (True,)},
            "llama": LLAMA, "mistral": {**LLAMA, "sliding_window": (None,)},
            "qwen2": LLAMA, "qwen3": LLAMA}
# What transformers takes for a setting that is left out, where that is not a Llama's value
DEFAULTS = {"mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
            "qwen2": {"num_key_value_heads": 32},
            "qwen3": {"num_key_value_heads": 32, "head_dim": 128}}
GPT2_SIZES = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd",
              "block_size": "n_positions"}
LLAMA_SIZES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
               "n_embd": "hidden_size", "n_hidden": "intermediate_size"}
# rope_type: its numbers, in the order of LlamaConfig.rope_scaling
SCALINGS = {"default": (), "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                       "original_max_position_embeddings")}


def positive(given, name, kinds=(int, float), most=1e300):
    """A number above 0 in these values."""
    value = given.get(name)
    if type(value) not in kinds or not 0 < value <= most:
        what = "number" if float in kinds else "whole number"
        raise ValueError(f"its {name} is {value!r:.40}, not a {what} above 0, up to {most:,}")
    return value


def size(given, name):
    return positive(given, name, (int,), 10**6)


def rope_of(given):
    """rope_theta and rope_scaling of LlamaConfig."""
    rope = {"rope_theta": given["rope_theta"]}
    # transformers 4 writes rope_scaling; transformers 5 rope_parameters, with rope_theta in it
    for name in ("rope_scaling", "rope_parameters"):
        value = given.get(name) or {}
        if type(value) is not dict:
            raise ValueError(f"its {name} is {value!r:.40}, not an object")
        rope.update(value)
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in SCALINGS:
        raise ValueError(f"its rope_type is {kind:.40}; {', '.join(SCALINGS)} can be read")
    for name in rope.keys() - {"rope_theta", "rope_type", "type", *SCALINGS[kind]}:
        raise ValueError(f"its rope_scaling has {name}, which is not known for {kind}")
    scaling = ",".join(f"{positive(rope, name):.15g}" for name in SCALINGS[kind])
    return {"rope_theta": float(positive(rope, "rope_theta")), "rope_scaling": scaling}


def sizes_in(given):
    """The sizes in the values of a config.json."""
    kind = str(given.get("model_type"))
    if kind not in COMPUTED:
        raise ValueError(f"its model_type is {kind:.40}; {', '.join(COMPUTED)} can be read")
    given = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, **DEFAULTS.get(kind, {}), **given}
    names = GPT2_SIZES if kind == "gpt2" else LLAMA_SIZES
    sizes = {ours: size(given, theirs) for ours, theirs in names.items()}
    if type(given.get("layer_types")) is list:
        given["layer_types"] = sorted(set(map(str, given["layer_types"])))
    computed = {**COMPUTED[kind], "n_inner": (None, 4 * sizes["n_embd"]),
                "quantization_config": (None,)}
    for name, allowed in computed.items():
        if given.get(name, allowed[0]) not in allowed:
            known = " or ".join(map(repr, allowed))
            raise ValueError(f"its {name} is {given[name]!r:.60}; {known:.60} can be read")
    if kind == "gpt2":
        return {"arch": kind, **sizes}
    usual = {"num_key_value_heads": sizes["n_head"], "head_dim": sizes["n_embd"] // sizes["n_head"]}
    for name in usual:
        if given.get(name) is None:
            given[name] = usual[name]
    head_dim = size(given, "head_dim")
    return {**sizes, **rope_of(given), "arch": "llama" if kind == "mistral" else kind,
            "n_kv_head": size(given, "num_key_value_heads"),
            "head_dim": 0 if head_dim * sizes["n_head"] == sizes["n_embd"] else head_dim,
            "norm_eps": float(positive(given, "rms_norm_eps")),
            "untied": not given.get("tie_word_embeddings", False)}


def sizes_of(folder):
    """{field of run.flags.Config: value} of the model in a folder's config.json. ValueError, which
    names file, field and value, if it computes something else than our models. No block_size of a
    Llama: rotary positions have no table."""
    path = Path(folder, CONFIG)
    given = read_json(path)
    try:
        return sizes_in(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def config_json(config):
    """The content of config.json. (A checkpoint knows no token that begins or ends a text.)"""
    given = {"vocab_size": config.vocab_size, "bos_token_id": None, "eos_token_id": None}
    if config.arch == "gpt2":
        return {**given, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
                "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd,
                "n_positions": config.block_size, "activation_function": "gelu_new",
                "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # dropout
    numbers = [float(word) for word in config.rope_scaling.split(",") if word]
    kind = {0: "default", 1: "linear", 4: "llama3"}[len(numbers)]
    rope = {"rope_type": kind, **dict(zip(SCALINGS[kind], numbers, strict=True))}
    if kind == "llama3":
        rope["original_max_position_embeddings"] = int(numbers[-1])
    return {**given, "architectures": [f"{config.arch.capitalize()}ForCausalLM"],
            "model_type": config.arch, "hidden_act": "silu", "tie_word_embeddings": config.tied,
            **{theirs: getattr(config, ours) for ours, theirs in LLAMA_SIZES.items()},
            "num_key_value_heads": config.n_kv_head, "head_dim": config.hs,
            "max_position_embeddings": config.block_size, "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta, "rope_scaling": rope if numbers else None}


# ---- names of tensors ----

EMBEDDING, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"
HEAD = "lm_head.weight"  # if tied, a file has the matrix under this name, the embedding's, or both
# What torch.compile, DDP, FSDP and activation checkpointing put into a name
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Masks of attention and rotary frequencies, which old files have, too: no parameters
UNUSED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# Hugging Face's GPT-2 has our names, but stores these matrices as (in, out), we as (out, in)
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# A Llama's names. Where there are several, our matrix is these, one below the other
LLAMA_ENDS = {EMBEDDING: "model.embed_tokens.weight",
              "transformer.ln_f.weight": "model.norm.weight",
              HEAD: HEAD}
LLAMA_BLOCK = {"ln_1": ["input_layernorm"],
               "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
               "attn.ln_q": ["self_attn.q_norm"],
               "attn.ln_k": ["self_attn.k_norm"],
               "attn.c_proj": ["self_attn.o_proj"],
               "ln_2": ["post_attention_layernorm"],
               "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
               "mlp.c_proj": ["mlp.down_proj"]}


def plain(name):
    """The name without wrappers, and with the first word that files of an inner model lack."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    if name.startswith(("wte.", "wpe.", "h.", "ln_f.")):
        return f"transformer.{name}"
    if name.startswith(("embed_tokens.", "layers.", "norm.")):
        return f"model.{name}"
    return name


def parts_of(name, shape, config, form):
    """{name in the file: shape there} of the tensors that are our tensor of this canonical name.
    form: whose file it is: "ours" (also nanoGPT's), or Hugging Face's "gpt2" or "llama"."""
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
    from run.checkpoint import CheckpointError, about

    index = folder / INDEX
    if not index.exists():
        pickles = sorted(folder.glob("pytorch_model*.bin"))
        return pickles if pickles and not (folder / MODEL).exists() else [folder / MODEL]
    with about(index):
        file_of = read_json(index).get("weight_map")
    if type(file_of) is not dict:
        raise CheckpointError(f"{index}: its weight_map is {file_of!r:.40}, not an object")
    for name, file in file_of.items():
        # "/" could lead out of the folder; "\0" is not printable
        if type(file) is not str or "/" in file or not file.isprintable():
            raise CheckpointError(f"{index}: its {name} is {file!r:.40}, not a file's name")
    return [folder / file for file in sorted(set(file_of.values()))]


def read_entries(path):
    """{name: Entry} of a safetensors file, or of a folder's files."""
    from run.checkpoint import CheckpointError, read_header

    entries = {}
    for file in files_in(path) if path.is_dir() else [path]:
        if file.suffix in (".pt", ".pth", ".bin"):
            raise CheckpointError(f"{file}: a pickle, which may run code, is never loaded; convert "
                                  "it with safetensors.torch.save_file: docs/test-your-own.md")
        entries |= read_header(file)
    return entries


def parts_in(entries, shapes, config):
    """(form, {our name: parts_of it}) of a file with these {name: Entry}."""
    c_attn = "transformer.h.0.attn.c_attn.weight"
    form = "ours"
    if any(name.startswith("model.layers.") for name in entries):
        form = "llama"
    elif c_attn in entries and entries[c_attn].shape == shapes[c_attn][::-1]:
        form = "gpt2"
    parts = {name: parts_of(name, shape, config, form) for name, shape in shapes.items()}
    has_biases = any(name.endswith(".bias") and not name.endswith(UNUSED) for name in entries)
    if form != "llama" and not has_biases:  # nanoGPT's default. Zeros compute the same
        parts.update({name: {} for name in shapes if name.endswith(".bias")})
    if POSITIONS in shapes and POSITIONS in entries:  # values() takes the first rows of more
        longest = max(shapes[POSITIONS], entries[POSITIONS].shape)
        parts[POSITIONS] = {POSITIONS: (longest[0], *shapes[POSITIONS][1:])}
    return form, parts


def refuse_other_sizes(folder, config):
    """CheckpointError if config.json, or the manifest of a checkpoint of ours, has other sizes: a
    tensor's shape does not show n_head or rope_theta."""
    from run.checkpoint import MANIFEST, CheckpointError, about, read_manifest

    theirs = {}
    if (folder / CONFIG).exists():
        with about(folder / CONFIG):
            theirs = sizes_of(folder)
    elif (folder / MANIFEST).exists():
        theirs = asdict(config_from(read_manifest(folder)["model"]))
    ours = {"arch": config.arch, **asdict(config), "untied": not getattr(config, "tied", True)}
    for name, value in theirs.items():
        if name != "block_size" and value != ours.get(name):  # a longer table: see parts_in
            raise CheckpointError(f"{folder}: its {name} is {value}, this run's is "
                                  f"{ours.get(name)}")


def values(path, shapes, config):
    """A function from a canonical name to the full tensor, on the CPU, of a safetensors file or a
    folder. CheckpointError, which names file and tensor: at once, if the file has not the tensors
    of these {canonical name: shape}, or has others; when a tensor is read, if it is not finite."""
    import torch

    from run.checkpoint import CheckpointError, about, expect, read_tensor

    path = Path(path)
    entries = {plain(name): entry for name, entry in read_entries(path).items()}
    refuse_other_sizes(path if path.is_dir() else path.parent, config)
    with about(path):
        form, parts = parts_in(entries, shapes, config)
    wanted = {part: shape for found in parts.values() for part, shape in found.items()}
    tied = HEAD in entries and HEAD not in shapes
    if tied:
        embedding, = parts[EMBEDDING]
        entries.setdefault(embedding, entries[HEAD])
        wanted[HEAD] = shapes[EMBEDDING]
    expect(path, entries, wanted)
    for name in sorted(entries.keys() - wanted):
        if not name.endswith(UNUSED):
            raise CheckpointError(f"{path}, tensor {name}: a model of these flags has none")

    def value(name):
        if not parts[name]:
            return torch.zeros(shapes[name])
        full = torch.cat([read_tensor(entries[part]) for part in parts[name]])
        if not full.isfinite().all():
            raise CheckpointError(f"{path}, tensor {name}: not finite")
        if name == EMBEDDING and tied and not torch.equal(full, read_tensor(entries[HEAD])):
            raise CheckpointError(f"{path}, tensor {HEAD}: not the embedding, but this model ties "
                                  "them")
        if form == "gpt2" and name.endswith(CONV1D):
            full = full.t()
        return full[: shapes[name][0]]

    return value


def load_model(folder, device="cpu"):
    """The whole model of one of our checkpoints, in float32. CheckpointError if it is damaged."""
    from experts import kind_of, on_meta, shapes_of
    from run.checkpoint import MANIFEST, CheckpointError, expect, read_header, read_manifest

    path = Path(folder, MODEL)
    config = config_from(read_manifest(folder)["model"])
    # A forged manifest may name a model that takes hours to build, or all memory. So compare first
    # the number of layers with the file's, then, on the meta device, all shapes
    try:
        last = f"transformer.h.{config.n_layer - 1}.ln_1.weight"
        expect(path, read_header(path), {last: (config.n_embd,)})
        shapes = shapes_of(on_meta(config))
    except (TypeError, ArithmeticError, RuntimeError):
        raise CheckpointError(f"{folder}/{MANIFEST}: damaged, no model has its sizes") from None
    value = values(path, shapes, config)
    model = kind_of(config)(config)
    for name, param in model.canonical_parameters():
        param.data.copy_(value(name))
    return model.to(device)


# ---- to a folder ----


def export(folder, to):
    """Write a checkpoint's weights in float32, and config.json, into the new folder `to`.
    ValueError if that cannot be."""
    from run.checkpoint import MANIFEST, about, make_header

    # (a run deletes what is unfinished in a folder step-...)
    if to.name.startswith("step-") or any((up / MANIFEST).exists() for up in to.resolve().parents):
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
        (to / CONFIG).write_text(json.dumps(config_json(config), indent=1))


def main():
    from run.flags import Parser, fail

    parser = Parser(__doc__)
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--to", required=True, help="the folder to write")
    args = parser.parse_args()  # a wrong flag ends the process here, without torch

    from run.checkpoint import find
    from run.launch import say
    try:
        folder = find(args.out)
        export(folder, Path(args.to))
    except ValueError as error:
        fail(error)
    say(f"{args.to}: {MODEL} and {CONFIG}, of {folder}", sys.stdout)


if __name__ == "__main__":
    main()
