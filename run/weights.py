"""Weights of other programs, both ways: nanoGPT's files, and Hugging Face's folders of a GPT-2,
Llama, Qwen2 or Qwen3. Tables translate sizes and names of tensors; what they do not know, or what
our models do not compute, is refused in one line. Files are data: no pickle is loaded.

    python train.py --init-from FOLDER --data data/mine
    python -m run.weights --out out --to NEW_FOLDER

run/flags.py reads a config.json here before torch is imported: functions that need torch import it.
"""

import json
from pathlib import Path

from data.files import FileError, read_json, say

CONFIG, INDEX = "config.json", "model.safetensors.index.json"

# ---- config.json: sizes, and what is computed with them ----

# Settings that no tensor's name or shape shows, with the values that our models compute; the first
# is also what a file means that leaves the setting out
LLAMA = {"hidden_act": ("silu", "swish"), "use_sliding_window": (False,),
         "layer_types": (None, ["full_attention"])}
COMPUTED = {"gpt2": {"activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                     "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,),
                     "scale_attn_by_inverse_layer_idx": (False,)},
            "llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA}
# Sizes: {field of run.flags.Config: setting}
GPT2_SIZES = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd",
              "block_size": "n_positions"}
LLAMA_SIZES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
               "n_embd": "hidden_size", "n_hidden": "intermediate_size"}
# rope_type: its numbers, in the order of LlamaConfig.rope_scaling
SCALINGS = {"default": (), "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                       "original_max_position_embeddings")}


def number(settings, name, default=None, whole=False):
    """The number above 0 of this name in config.json."""
    value = settings.get(name, default)
    kinds, most, words = ((int,), 1e6, "whole number") if whole else ((int, float), 1e15, "number")
    if type(value) not in kinds or not 0 < value <= most:
        raise ValueError(f"its {name} is {value!r:.40}, not a {words} above 0, up to {most:.0f}")
    return value if whole else float(value)


def rotary(settings):
    """rope_theta and rope_scaling of LlamaConfig."""
    rope = {"rope_theta": settings.get("rope_theta", 10000.0)}
    # transformers 4 writes rope_scaling; transformers 5 rope_parameters, with rope_theta in it
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.get(name, {})
        if type(value) is not dict:
            raise ValueError(f"its {name} is {value!r:.40}, not an object")
        rope.update(value)
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in SCALINGS:
        raise ValueError(f"its rope_type is {kind:.40}; {', '.join(SCALINGS)} can be read")
    for name in rope.keys() - {"rope_theta", "rope_type", "type", *SCALINGS[kind]}:
        raise ValueError(f"its rope_scaling has {name}, which is not known for {kind}")
    scaling = ",".join(f"{number(rope, name):.15g}" for name in SCALINGS[kind])
    return {"rope_theta": number(rope, "rope_theta"), "rope_scaling": scaling}


def translate(settings):
    """{field of run.flags.Config: value} of a config.json's settings."""
    kind = str(settings.get("model_type"))
    if kind not in COMPUTED:
        raise ValueError(f"its model_type is {kind:.40}; {', '.join(COMPUTED)} can be read")
    settings = {name: value for name, value in settings.items() if value is not None}
    if type(settings.get("layer_types")) is list:
        settings["layer_types"] = sorted(set(map(str, settings["layer_types"])))
    for name, allowed in COMPUTED[kind].items():
        if settings.get(name, allowed[0]) not in allowed:
            known = " or ".join(map(repr, allowed))
            raise ValueError(f"its {name} is {settings[name]!r:.60}; {known:.60} can be read")
    names = GPT2_SIZES if kind == "gpt2" else LLAMA_SIZES
    sizes = {ours: number(settings, theirs, whole=True) for ours, theirs in names.items()}
    if kind == "gpt2":
        return {"arch": kind, **sizes}
    n_head, n_embd = sizes["n_head"], sizes["n_embd"]
    head_dim = number(settings, "head_dim", n_embd // n_head, whole=True)
    return {"arch": kind, **sizes, **rotary(settings),
            "n_kv_head": number(settings, "num_key_value_heads", n_head, whole=True),
            "head_dim": 0 if head_dim * n_head == n_embd else head_dim,
            "norm_eps": number(settings, "rms_norm_eps", 1e-6),
            "untied": not settings.get("tie_word_embeddings", False)}


def sizes_of(folder):
    """{field of run.flags.Config: value} of the model in a folder's config.json. FileError, which
    names file, field and value, if it computes something else than our models. No block_size of a
    Llama: rotary positions have no table."""
    path = Path(folder, CONFIG)
    settings = read_json(path)
    try:
        return translate(settings)
    except ValueError as error:
        raise FileError(f"{path}: {error}") from None


def settings_of(config):
    """The settings in config.json for our config, the inverse of translate(). (A checkpoint knows
    no token that begins or ends a text.)"""
    settings = {"vocab_size": config.vocab_size, "bos_token_id": None, "eos_token_id": None}
    if config.arch == "gpt2":
        return {**settings, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
                **{theirs: getattr(config, ours) for ours, theirs in GPT2_SIZES.items()}}
    numbers = [json.loads(word) for word in config.rope_scaling.split(",") if word]
    kind = {0: "default", 1: "linear", 4: "llama3"}[len(numbers)]
    rope = {"rope_type": kind, **dict(zip(SCALINGS[kind], numbers, strict=True))}
    return {**settings, "architectures": [f"{config.arch.capitalize()}ForCausalLM"],
            "model_type": config.arch, "tie_word_embeddings": config.tied,
            **{theirs: getattr(config, ours) for ours, theirs in LLAMA_SIZES.items()},
            "num_key_value_heads": config.n_kv_head, "head_dim": config.hs,
            "max_position_embeddings": config.block_size, "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta, "rope_scaling": rope if numbers else None}


# ---- names of tensors ----

EMBEDDING, POSITIONS, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
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


def unwrapped(name):
    """The name without wrappers, and with the first word that files of an inner model lack."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    if name.startswith(("wte.", "wpe.", "h.", "ln_f.")):
        return f"transformer.{name}"
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
        raise FileError(f"Hugging Face's Llama has no tensor for {name}")
    rows = {"attn.c_attn": [config.query_width, config.kv_width, config.kv_width],
            "mlp.c_fc": [config.n_hidden] * 2}.get(module, [shape[0]])
    return {f"model.layers.{i}.{part}.{kind}": (n, *shape[1:])
            for part, n in zip(LLAMA_BLOCK[module], rows, strict=True)}


# ---- from a file or a folder ----


def files_in(path):
    """The files with a folder's tensors; a file: itself."""
    index = path / INDEX  # says which file of a large model has which tensor
    if not path.is_dir():
        return [path]
    if not index.exists():
        alone = path / "model.safetensors"
        return [alone] if alone.exists() else [*path.glob("pytorch_model*.bin"), alone]
    file_of = read_json(index).get("weight_map")
    if type(file_of) is not dict:
        raise FileError(f"{index}: its weight_map is {file_of!r:.40}, not an object")
    return [path / file for file in sorted(set(map(str, file_of.values())))]


def read_entries(path):
    """{our or Hugging Face's name: Entry} of a safetensors file, or of a folder's files."""
    from run.checkpoint import open_tensors

    entries = {}
    for file in files_in(path):
        if file.suffix in (".pt", ".pth", ".bin"):
            raise FileError(f"{file}: a pickle, which may run code, is never loaded; convert it "
                            "with safetensors.torch.save_file: docs/test-your-own.md")
        entries |= {unwrapped(name): entry for name, entry in open_tensors(file).items()}
    return entries


def find_parts(entries, shapes, config):
    """(whose file has these {name: Entry}: see parts_of; {our name: its parts_of})."""
    c_attn = "transformer.h.0.attn.c_attn.weight"  # of a GPT-2 never square
    form = "ours"
    if any(name.startswith("model.layers.") for name in entries):
        form = "llama"
    elif config.arch == "gpt2" and c_attn in entries:
        form = "gpt2" if entries[c_attn].shape == shapes[c_attn][::-1] else "ours"
    parts = {name: parts_of(name, shape, config, form) for name, shape in shapes.items()}
    has_biases = any(name.endswith(".bias") and not name.endswith(UNUSED) for name in entries)
    if form != "llama" and not has_biases:  # nanoGPT's default. Zeros compute the same
        parts.update({name: {} for name in shapes if name.endswith(".bias")})
    if POSITIONS in shapes and POSITIONS in entries:  # values() takes the first rows of more
        longest = max(shapes[POSITIONS], entries[POSITIONS].shape)
        parts[POSITIONS] = {POSITIONS: (longest[0], *shapes[POSITIONS][1:])}
    return form, parts


def values(path, shapes, config):
    """A function from a canonical name to the full tensor, on the CPU, of a safetensors file or a
    folder. FileError, which names file and tensor: at once, if the file has not the tensors of
    these {canonical name: shape}, or has others; when a tensor is read, if it is not finite."""
    import torch

    from run.checkpoint import MANIFEST, expect, read_tensor, require_same, sizes_in

    path = Path(path)
    entries = read_entries(path)
    # A tensor's shape does not show n_head or rope_theta. (Of positions there may be more)
    folder = path if path.is_dir() else path.parent
    sizes = (sizes_of(folder) if (folder / CONFIG).exists() else
             sizes_in(folder) if (folder / MANIFEST).exists() else {})
    require_same(folder, {**sizes, "block_size": config.block_size}, config)
    form, parts = find_parts(entries, shapes, config)
    wanted = {part: shape for found in parts.values() for part, shape in found.items()}
    # If tied, a file has the matrix under the head's name, the embedding's, or both
    tied = HEAD in entries and HEAD not in shapes
    if tied:
        embedding, = parts[EMBEDDING]
        entries.setdefault(embedding, entries[HEAD])
        wanted[HEAD] = shapes[EMBEDDING]
    expect(path, entries, wanted)
    for name in sorted(entries.keys() - wanted):
        if not name.endswith(UNUSED):
            raise FileError(f"{path}, tensor {name}: a model of these flags has none")

    def full_tensor(name):
        if not parts[name]:
            return torch.zeros(shapes[name])
        full = torch.cat([read_tensor(entries[part]) for part in parts[name]])
        if not full.isfinite().all():
            raise FileError(f"{path}, tensor {name}: not finite")
        if name == EMBEDDING and tied and not torch.equal(full, read_tensor(entries[HEAD])):
            raise FileError(f"{path}, tensor {HEAD}: not the embedding, but this model ties them")
        if form == "gpt2" and name.endswith(CONV1D):
            full = full.t()
        return full[: shapes[name][0]]

    return full_tensor


# ---- to a folder ----


def export(checkpoint, to):
    """Write a checkpoint's weights in float32, and config.json, into the new folder `to`. FileError
    if that cannot be."""
    from run.checkpoint import MODEL, load_model, make_header

    model = load_model(checkpoint)
    config = model.config
    if config.n_experts:
        raise FileError(f"{checkpoint}: has experts, which neither GPT-2 nor Llama has")
    settings = json.dumps(settings_of(config), indent=1)
    form = "gpt2" if config.arch == "gpt2" else "llama"
    tensors = {}
    for name, param in model.canonical_parameters():
        parts = parts_of(name, param.shape, config, form)
        full = param.data.t() if form == "gpt2" and name.endswith(CONV1D) else param.data
        tensors.update(zip(parts, full.split([n for n, *_ in parts.values()]), strict=True))
    head, _ = make_header({name: part.shape for name, part in tensors.items()}, "F32")
    to.mkdir(parents=True)
    with open(to / MODEL, "wb") as file:
        file.write(head)
        for part in tensors.values():
            file.write(part.contiguous().numpy().data)
    (to / CONFIG).write_text(settings)


def main():
    from run.flags import Parser, fail

    parser = Parser(__doc__)
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--to", required=True, help="the folder to write")
    args = parser.parse_args()  # a wrong flag ends the process here, without torch
    from run.checkpoint import find
    try:
        folder = find(args.out)
        export(folder, Path(args.to))
    except (OSError, ValueError) as error:
        fail(error)
    say(f"{args.to}: model.safetensors and {CONFIG}, of {folder}", "stdout")


if __name__ == "__main__":
    main()
