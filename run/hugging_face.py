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
        attn.c_proj                 attn.c_proj *            self_attn.o_proj
        ln_2                        ln_2                     post_attention_layernorm
        mlp.c_fc                    mlp.c_fc *               mlp.gate_proj, up_proj: rows
        mlp.c_proj                  mlp.c_proj *             mlp.down_proj

*: GPT-2 stores this matrix as (in, out), we store it as (out, in). rows: our matrix has the rows of
all these matrices, one matrix below the other.
(GPT-2's names are those of the hub's gpt2. GPT2LMHeadModel puts transformer. before them, like us.)

No torch here: run/config.py reads the sizes of --init-from with this file before torch is imported.
"""

import json
from pathlib import Path

from sizes import LlamaConfig

CONFIG = "config.json"
# In Hugging Face's GPT-2 these layers are Conv1D, whose weights are (in, out)
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# Names in a block: ours -> LlamaForCausalLM's. If there are several, our tensor is their rows, one
# below the other
LLAMA_BLOCK = {
    "ln_1.weight": ["input_layernorm"],
    "attn.c_attn.weight": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.c_proj.weight": ["self_attn.o_proj"],
    "ln_2.weight": ["post_attention_layernorm"],
    "mlp.c_fc.weight": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.c_proj.weight": ["mlp.down_proj"],
}
LLAMA_ENDS = {"transformer.wte.weight": "model.embed_tokens.weight",
              "transformer.ln_f.weight": "model.norm.weight",
              "lm_head.weight": "lm_head.weight"}


def llama_names(name, config):
    """[(LlamaForCausalLM's name, number of rows)] of the tensors that together are our tensor of
    this canonical name. Rows None: all."""
    if name in LLAMA_ENDS:
        return [(LLAMA_ENDS[name], None)]
    _, _, i, local = name.split(".", 3)  # transformer.h.0.ln_1.weight
    rows = {"attn.c_attn.weight": [config.n_embd, config.kv_width, config.kv_width],
            "mlp.c_fc.weight": [config.n_hidden] * 2}
    theirs = LLAMA_BLOCK[local]
    return [(f"model.layers.{i}.{part}.weight", n)
            for part, n in zip(theirs, rows.get(local, [None]), strict=True)]


# ---- config.json -> flags ----

# What transformers takes for a size that a GPT-2's config.json leaves out. (A Llama's sizes must be
# there: transformers' defaults are those of the model of 7 billion parameters)
GPT2_DEFAULTS = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
# Names by which a GPT-2's config.json may call its sizes, too
GPT2_ALIASES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
                "hidden_size": "n_embd", "max_position_embeddings": "n_positions"}
SAME_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # one function, written in three ways
# Settings of config.json that change the computation -> the one value that this code computes
GPT2_ONLY = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None,
             "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
             "add_cross_attention": False, "tie_word_embeddings": True}
LLAMA_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
GPT2_SIZES = ("n_layer", "n_head", "n_embd")  # named like our flags
LLAMA_SIZES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
               "hidden_size": "n_embd", "intermediate_size": "n_hidden"}


def read_config(folder):
    """The dict in a folder's config.json. ValueError: no such file, or no dict in it."""
    path = Path(folder, CONFIG)
    try:
        given = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if type(given) is not dict:
        raise ValueError(f"{path}: not a JSON object")
    return given


def flags_of_folder(folder):
    """The flags {name: value} of the model that a folder's config.json describes. ValueError if it
    describes a model that this code does not compute."""
    given = read_config(folder)
    try:
        given = completed(given)
        refuse_other_mathematics(given)
        return gpt2_flags(given) if kind_of_config(given) == "gpt2" else llama_flags(given)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        what = error if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{Path(folder, CONFIG)}: {what}") from None


def kind_of_config(given):
    return given.get("model_type", "gpt2")


def completed(given):
    """config.json's dict; a GPT-2's under its own names, with transformers' defaults for the sizes
    that are left out."""
    if kind_of_config(given) == "gpt2":
        given = {GPT2_ALIASES.get(name, name): value for name, value in given.items()}
        given = {**GPT2_DEFAULTS, **given}
    return given


def refuse_other_mathematics(given):
    """ValueError if a value of config.json makes that model compute something else than ours."""
    kind = kind_of_config(given)
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"its model_type is {kind}; gpt2 and llama can be read")
    if given.get("quantization_config"):
        raise ValueError("its weights are quantized (quantization_config); take the original ones")
    for name, ours in (GPT2_ONLY if kind == "gpt2" else LLAMA_ONLY).items():
        value = given.get(name, ours)
        if name == "n_inner" and value == 4 * given["n_embd"]:  # None means the same
            continue
        if name == "activation_function" and value in SAME_GELU:
            continue
        if value != ours:
            raise ValueError(f"its {name} is {value}, here it is {ours}")


def gpt2_flags(given):
    return {**{name: given[name] for name in GPT2_SIZES}, "block_size": given["n_positions"]}


def llama_flags(given):
    """The flags of a Llama's config.json. block_size is not among them: rotary positions have no
    table, so --block-size decides."""
    flags = {"arch": "llama", **{ours: given[theirs] for theirs, ours in LLAMA_SIZES.items()}}
    flags["n_kv_head"] = given.get("num_key_value_heads") or flags["n_head"]
    head_dim = given.get("head_dim") or flags["n_embd"] // flags["n_head"]
    if head_dim * flags["n_head"] != flags["n_embd"]:
        raise ValueError(f"its head_dim is {head_dim}, here it is hidden_size / "
                         f"num_attention_heads = {flags['n_embd'] / flags['n_head']:g}")
    flags["norm_eps"] = float(given.get("rms_norm_eps", 1e-6))
    flags["untied"] = not given.get("tie_word_embeddings", False)
    # transformers 4 has rope_theta and rope_scaling, transformers 5 both in rope_parameters
    rope = {"rope_theta": given.get("rope_theta", 10000.0), **(given.get("rope_scaling") or {}),
            **(given.get("rope_parameters") or {})}
    flags["rope_theta"] = float(rope["rope_theta"])
    flags["rope_scaling"] = rope_scaling(rope)
    return flags


def rope_scaling(rope):
    """The value of --rope-scaling for these settings of config.json's rotary positions: "" or
    FACTOR,LOW,HIGH,TOKENS."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return ""
    if kind != "llama3":
        raise ValueError(f"its rope_scaling is {kind}; default and llama3 can be read")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return ",".join(f"{rope[name]:.15g}" for name in names)


# ---- a GPTConfig or LlamaConfig -> config.json ----


def config_json(config, end_of_text):
    """The content of config.json. end_of_text: the token that ends a text, or None."""
    common = {"vocab_size": config.vocab_size, "bos_token_id": end_of_text,
              "eos_token_id": end_of_text}
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
        factor, low, high, original = config.rope_scaling.split(",")
        scaling = {"rope_type": "llama3", "factor": float(factor), "low_freq_factor": float(low),
                   "high_freq_factor": float(high),
                   "original_max_position_embeddings": int(float(original))}
    return {"architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{theirs: getattr(config, ours) for theirs, ours in LLAMA_SIZES.items()},
            "num_key_value_heads": config.n_kv_head,
            "max_position_embeddings": config.block_size,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": config.tied,
            **LLAMA_ONLY,
            **common}
