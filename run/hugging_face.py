"""Hugging Face's folders, written by save_pretrained() of transformers: config.json, and tensors
under other names.

    ours                        GPT-2                    LlamaForCausalLM
    transformer.wte.weight      wte.weight               model.embed_tokens.weight
    transformer.wpe.weight      wpe.weight               -
    transformer.ln_f            ln_f                     model.norm
    lm_head.weight              -                        lm_head.weight, if it is not tied
    in transformer.h.0.         in h.0.                  in model.layers.0.
        ln_1                        ln_1                     input_layernorm
        attn.c_attn                 attn.c_attn *            self_attn.q_proj, k_proj, v_proj: rows
        attn.ln_q, ln_k             -                        self_attn.q_norm, k_norm (Qwen3)
        attn.c_proj                 attn.c_proj *            self_attn.o_proj
        ln_2                        ln_2                     post_attention_layernorm
        mlp.c_fc                    mlp.c_fc *               mlp.gate_proj, up_proj: rows
        mlp.c_proj                  mlp.c_proj *             mlp.down_proj

*: GPT-2 stores this matrix as (in, out), we store it as (out, in). rows: our matrix has the rows of
all these matrices, one matrix below the other.
(GPT-2's names are those of the hub's gpt2. GPT2LMHeadModel puts transformer. before them, like us.
Qwen2's, Qwen3's and Mistral's names are Llama's.)

No torch here: run/config.py reads the sizes of --init-from with this file before torch is imported.
"""

from pathlib import Path

from data.foreign import (
    OBJECT,
    POSITIVE,
    TEXT,
    YES_NO,
    either,
    list_of,
    or_null,
    read_json,
    require_fields,
    whole,
)
from sizes import LlamaConfig

CONFIG = "config.json"
# In Hugging Face's GPT-2 these layers are Conv1D, whose weights are (in, out)
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# Names in a block: ours -> LlamaForCausalLM's. If there are several, our tensor is their rows, one
# below the other
LLAMA_BLOCK = {
    "ln_1": ["input_layernorm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.ln_q": ["self_attn.q_norm"],
    "attn.ln_k": ["self_attn.k_norm"],
    "attn.c_proj": ["self_attn.o_proj"],
    "ln_2": ["post_attention_layernorm"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.c_proj": ["mlp.down_proj"],
}
LLAMA_ENDS = {"transformer.wte.weight": "model.embed_tokens.weight",
              "transformer.ln_f.weight": "model.norm.weight",
              "lm_head.weight": "lm_head.weight"}


def llama_names(name, config):
    """[(LlamaForCausalLM's name, number of rows)] of the tensors that together are our tensor of
    this canonical name. Rows None: all. ValueError if LlamaForCausalLM has none."""
    if name in LLAMA_ENDS:
        return [(LLAMA_ENDS[name], None)]
    *_, i, local = name.split(".", 3)  # transformer.h.0.ln_1.weight
    local, _, kind = local.rpartition(".")  # "ln_1", "weight" (Qwen2's c_attn also has a "bias")
    if local not in LLAMA_BLOCK or kind not in ("weight", "bias"):
        raise ValueError(f"LlamaForCausalLM has no tensor for {name}")
    rows = {"attn.c_attn": [config.query_width, config.kv_width, config.kv_width],
            "mlp.c_fc": [config.n_hidden] * 2}
    return [(f"model.layers.{i}.{part}.{kind}", n)
            for part, n in zip(LLAMA_BLOCK[local], rows.get(local, [None]), strict=True)]


# ---- config.json -> flags ----

SAME = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu_python_tanh": "gelu_new",
        "gelu_accurate": "gelu_new", "swish": "silu"}  # other names for the same function
# Settings of config.json that change the computation -> the one value that this code computes
ONLY = {"gpt2": {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None,
                 "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
                 "add_cross_attention": False, "tie_word_embeddings": True},
        "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        "mistral": {"hidden_act": "silu", "sliding_window": None},
        "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
        "qwen3": {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}}
# What transformers takes for a setting that is left out, if that is another value than a Llama's
DEFAULTS = {"mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
            "qwen2": {"num_key_value_heads": 32},
            "qwen3": {"num_key_value_heads": 32, "head_dim": 128}}
# Sizes of a GPT-2, named like our flags -> (another name for the same, the value without either):
# those of transformers' GPT2Config
GPT2_SIZES = {"n_head": ("num_attention_heads", 12), "n_layer": ("num_hidden_layers", 12),
              "n_embd": ("hidden_size", 768)}
GPT2_POSITIONS = {"n_positions": ("max_position_embeddings", 1024)}
LLAMA_SIZES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
               "hidden_size": "n_embd", "intermediate_size": "n_hidden"}


SIZE = whole(1)
TOKEN = whole(-1)  # some files have -1 for none
# Fields of config.json that are more than a size, a number or one of ONLY
FIELDS = {"model_type": TEXT, "tie_word_embeddings": YES_NO, "max_position_embeddings": SIZE,
          "rope_scaling": or_null(OBJECT), "rope_parameters": or_null(OBJECT),
          "layer_types": or_null(list_of(TEXT)), "bos_token_id": or_null(TOKEN),
          "eos_token_id": or_null(either(TOKEN, list_of(TOKEN))), "pad_token_id": or_null(TOKEN)}


def read_config(folder):
    """The dict in a folder's config.json. ValueError: no such file, or no such dict in it."""
    return read_json(Path(folder, CONFIG), known=FIELDS)


def flags_of_folder(folder):
    """The flags {name: value} of the model that a folder's config.json describes. ValueError if it
    describes a model that this code does not compute."""
    given = read_config(folder)
    try:
        given = {**DEFAULTS.get(kind_of_config(given), {}), **given}
        refuse_other_mathematics(given)
        return gpt2_flags(given) if kind_of_config(given) == "gpt2" else llama_flags(given)
    except ValueError as error:
        raise ValueError(f"{Path(folder, CONFIG)}: {error}") from None


def kind_of_config(given):
    return given.get("model_type", "gpt2")


def refuse_other_mathematics(given):
    """ValueError if a value of config.json makes that model compute something else than ours."""
    kind = kind_of_config(given)
    if kind not in ONLY:
        raise ValueError(f"its model_type is {kind}; {', '.join(ONLY)} can be read")
    if given.get("quantization_config"):
        raise ValueError("its weights are quantized (quantization_config); take the original ones")
    others = set(given.get("layer_types") or ()) - {"full_attention"}
    if others:
        raise ValueError(f"its layer_types has {min(others)}; full_attention can be read")
    for name, ours in ONLY[kind].items():
        value = given.get(name, ours)
        if name == "n_inner" and value == 4 * gpt2_flags(given)["n_embd"]:  # None means the same
            continue
        if SAME.get(str(value), value) != ours:
            raise ValueError(f"its {name} is {value}, here it is {ours}")


def size(given, *names, default=None):
    """A size in config.json, which has it under one of these names. ValueError if it is no size, if
    two names contradict, or if none is there and there is no default."""
    found = {name: given[name] for name in names if name in given}
    require_fields(found, known=dict.fromkeys(names, SIZE))
    for name, value in found.items():
        if value != found.get(names[0], value):
            raise ValueError(f"its {name} is {value}, its {names[0]} {found[names[0]]}")
    if not found and default is None:
        raise ValueError(f"it has no {names[0]}; add that line")
    return next(iter(found.values()), default)


def number(given, name, default):
    """A number above 0 in config.json."""
    value = given.get(name, default)
    require_fields({name: value}, {name: POSITIVE})
    return float(value)


def gpt2_flags(given):
    flags = {name: size(given, name, other, default=default)
             for name, (other, default) in {**GPT2_SIZES, **GPT2_POSITIONS}.items()}
    flags["block_size"] = flags.pop("n_positions")
    return flags


def llama_flags(given):
    """The flags of a Llama's config.json. block_size is not among them: rotary positions have no
    table, so --block-size decides. (transformers has defaults for the four sizes, too: the 7B
    model's. A smaller folder that lacks one would fail at some tensor, so name the size.)"""
    kind = kind_of_config(given)
    flags = {"arch": "llama" if kind == "mistral" else kind,  # Mistral without its window: a Llama
             **{ours: size(given, theirs) for theirs, ours in LLAMA_SIZES.items()}}
    flags["n_kv_head"] = flags["n_head"]
    if given.get("num_key_value_heads") is not None:
        flags["n_kv_head"] = size(given, "num_key_value_heads")
    flags["head_dim"] = 0  # the width / n_head
    if given.get("head_dim") is not None:
        head_dim = size(given, "head_dim")
        flags["head_dim"] = head_dim if head_dim * flags["n_head"] != flags["n_embd"] else 0
    flags["norm_eps"] = number(given, "rms_norm_eps", 1e-6)
    flags["untied"] = not given.get("tie_word_embeddings", False)
    # transformers 4 has rope_theta and rope_scaling, transformers 5 both in rope_parameters
    rope = {"rope_theta": given.get("rope_theta", 10000.0), **(given.get("rope_scaling") or {}),
            **(given.get("rope_parameters") or {})}
    flags["rope_theta"] = number(rope, "rope_theta", 10000.0)
    flags["rope_scaling"] = rope_scaling(rope)
    return flags


# config.json's rope_type -> its names of --rope-scaling's numbers
SCALINGS = {"linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                       "original_max_position_embeddings")}


def rope_scaling(rope):
    """The value of --rope-scaling for these settings of config.json's rotary positions: "",
    FACTOR or FACTOR,LOW,HIGH,TOKENS."""
    require_fields(rope, known={"rope_type": TEXT, "type": TEXT})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return ""
    if kind not in SCALINGS:
        raise ValueError(f"its rope_scaling is {kind}; default, linear and llama3 can be read")
    return ",".join(f"{number(rope, name, None):.15g}" for name in SCALINGS[kind])


# ---- a GPTConfig or LlamaConfig -> config.json ----


# Settings that no flag changes: a run from a folder hands them on to run.export
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")


def kept_settings(folder):
    """{name: value} of KEPT in a folder's config.json."""
    given = read_config(folder)
    return {name: given[name] for name in KEPT if name in given}


def config_json(config, end_of_text, kept=None):
    """The content of config.json. end_of_text: the token that ends a text, or None. kept: what
    kept_settings() said of the folder with which the training began; what is not in there has
    transformers' default, so it is left out."""
    if kept is None:
        kept = {"bos_token_id": end_of_text, "eos_token_id": end_of_text,
                "max_position_embeddings": config.block_size}
    else:
        kept = dict(kept)
    # a GPT-2's table has block_size positions, and transformers has another name for their number
    most = kept.pop("max_position_embeddings", 2048)  # the default of LlamaConfig
    common = {"vocab_size": config.vocab_size, **kept}
    if not isinstance(config, LlamaConfig):
        return {"architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                **{name: getattr(config, name) for name in GPT2_SIZES},
                "n_positions": config.block_size,
                "activation_function": "gelu_new",
                "resid_pdrop": 0.0,  # dropout
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                **common}
    scaling = None
    if config.rope_scaling:
        numbers = [float(number) for number in config.rope_scaling.split(",")]
        kind = "linear" if len(numbers) == 1 else "llama3"
        scaling = {"rope_type": kind, **dict(zip(SCALINGS[kind], numbers, strict=True))}
        if kind == "llama3":
            scaling["original_max_position_embeddings"] = int(numbers[-1])
    return {"architectures": [f"{config.arch.capitalize()}ForCausalLM"],
            "model_type": config.arch,
            **{theirs: getattr(config, ours) for theirs, ours in LLAMA_SIZES.items()},
            "num_key_value_heads": config.n_kv_head,
            "head_dim": config.hs,
            "max_position_embeddings": max(most, config.block_size),
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": config.tied,
            **ONLY[config.arch],
            **common}
