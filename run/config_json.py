"""Hugging Face's config.json, both ways: the sizes of a GPT-2, Llama, Mistral, Qwen2 or Qwen3. What
our models do not compute is refused, with field and value. Imports no torch: run/flags.py reads
config.json before torch is imported.

    python train.py --init-from FOLDER        FOLDER/config.json gives the sizes
"""

from pathlib import Path

from data.files import read_json

CONFIG = "config.json"

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


def number(settings, name):
    """The number above 0 of this name in config.json."""
    value = settings.get(name)
    if type(value) not in (int, float) or not 0 < value <= 1e300:
        raise ValueError(f"its {name} is {value!r:.40}, not a number above 0, up to 1e300")
    return float(value)


def size(settings, name):
    """The whole number above 0 of this name."""
    value = settings.get(name)
    if type(value) is not int or not 0 < value <= 10**6:
        raise ValueError(f"its {name} is {value!r:.40}, not a whole number above 0, up to 10^6")
    return value


def rotary(settings):
    """rope_theta and rope_scaling of LlamaConfig."""
    rope = {"rope_theta": settings["rope_theta"]}
    # transformers 4 writes rope_scaling; transformers 5 rope_parameters, with rope_theta in it
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.get(name) or {}
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
    settings = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, **DEFAULTS.get(kind, {}), **settings}
    names = GPT2_SIZES if kind == "gpt2" else LLAMA_SIZES
    sizes = {ours: size(settings, theirs) for ours, theirs in names.items()}
    if type(settings.get("layer_types")) is list:
        settings["layer_types"] = sorted(set(map(str, settings["layer_types"])))
    computed = {**COMPUTED[kind], "n_inner": (None, 4 * sizes["n_embd"]),
                "quantization_config": (None,)}
    for name, allowed in computed.items():
        if settings.get(name, allowed[0]) not in allowed:
            known = " or ".join(map(repr, allowed))
            raise ValueError(f"its {name} is {settings[name]!r:.60}; {known:.60} can be read")
    if kind == "gpt2":
        return {"arch": kind, **sizes}
    usual = {"num_key_value_heads": sizes["n_head"], "head_dim": sizes["n_embd"] // sizes["n_head"]}
    for name in usual:
        if settings.get(name) is None:
            settings[name] = usual[name]
    head_dim = size(settings, "head_dim")
    return {**sizes, **rotary(settings), "arch": "llama" if kind == "mistral" else kind,
            "n_kv_head": size(settings, "num_key_value_heads"),
            "head_dim": 0 if head_dim * sizes["n_head"] == sizes["n_embd"] else head_dim,
            "norm_eps": number(settings, "rms_norm_eps"),
            "untied": not settings.get("tie_word_embeddings", False)}


def sizes_of(folder):
    """{field of run.flags.Config: value} of the model in a folder's config.json. ValueError, which
    names file, field and value, if it computes something else than our models. No block_size of a
    Llama: rotary positions have no table."""
    path = Path(folder, CONFIG)
    settings = read_json(path)
    try:
        return translate(settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def settings_of(config):
    """The settings in config.json for our config, the inverse of translate(). (A checkpoint knows
    no token that begins or ends a text.)"""
    settings = {"vocab_size": config.vocab_size, "bos_token_id": None, "eos_token_id": None}
    if config.arch == "gpt2":
        return {**settings, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
                "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd,
                "n_positions": config.block_size, "activation_function": "gelu_new",
                "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # dropout
    numbers = [float(word) for word in config.rope_scaling.split(",") if word]
    kind = {0: "default", 1: "linear", 4: "llama3"}[len(numbers)]
    rope = {"rope_type": kind, **dict(zip(SCALINGS[kind], numbers, strict=True))}
    if kind == "llama3":
        rope["original_max_position_embeddings"] = int(numbers[-1])
    return {**settings, "architectures": [f"{config.arch.capitalize()}ForCausalLM"],
            "model_type": config.arch, "hidden_act": "silu", "tie_word_embeddings": config.tied,
            **{theirs: getattr(config, ours) for ours, theirs in LLAMA_SIZES.items()},
            "num_key_value_heads": config.n_kv_head, "head_dim": config.hs,
            "max_position_embeddings": config.block_size, "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta, "rope_scaling": rope if numbers else None}
