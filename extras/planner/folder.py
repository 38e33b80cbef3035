"""The model of a folder's config.json: python -m extras.planner --model FOLDER

Reads the files of Hugging Face's GPT-2, Llama, Mistral, Qwen 2 and 3, Mixtral, and Qwen's mixtures.
Only sizes matter to a plan, so biases of queries, norms of heads and sliding windows are left out:
they are little."""

from pathlib import Path

from data.foreign import POSITIVE, YES_NO, or_null, read_json, require_fields, whole
from extras.planner.mixture import Mixture
from run.config import require
from sizes import GPTConfig, LlamaConfig

LONG = 4096  # tokens of a planned sequence, if the model takes as many
SIZE = whole(1)
# {our name: theirs}: the sizes that a config.json must have
GPT2 = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "vocab_size": "vocab_size"}
LLAMA = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
         "vocab_size": "vocab_size"}
# {model_type: fields of (number of experts, experts per token, width of an expert or of the MLP,
# width of an MLP beside the experts)}; "": it has no such thing
KINDS = {
    "llama": ("", "", "intermediate_size", ""),
    "mistral": ("", "", "intermediate_size", ""),
    "qwen2": ("", "", "intermediate_size", ""),
    "qwen3": ("", "", "intermediate_size", ""),
    "mixtral": ("num_local_experts", "num_experts_per_tok", "intermediate_size", ""),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size",
                  "shared_expert_intermediate_size"),
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "")}


def sizes_in(given, names):
    """{our name: value} of config.json's fields. names: {our name: theirs}."""
    require_fields(given, needed=dict.fromkeys(names.values(), SIZE))
    return {ours: given[theirs] for ours, theirs in names.items()}


def model_of_config(given):
    """The GPTConfig, LlamaConfig or Mixture of a config.json's dict. ValueError: field, value."""
    kind = given.get("model_type")
    require(kind in ("gpt2", *KINDS), f"its model_type is {kind!r:.40}; the planner reads gpt2, "
            f"{', '.join(KINDS)}")
    if kind == "gpt2":
        sizes = sizes_in(given, GPT2)
        require_fields(given, known={"n_positions": or_null(SIZE), "n_inner": or_null(SIZE)})
        inner = given.get("n_inner") or 4 * sizes["n_embd"]
        require(inner == 4 * sizes["n_embd"], f"its n_inner is {inner}, not 4 n_embd")
        return GPTConfig(**sizes, block_size=min(LONG, given.get("n_positions") or 1024))
    require_fields(given, known={
        "num_key_value_heads": or_null(SIZE), "head_dim": or_null(SIZE),
        "tie_word_embeddings": or_null(YES_NO), "max_position_embeddings": or_null(SIZE),
        "rope_theta": or_null(POSITIVE), "decoder_sparse_step": SIZE})
    require(given.get("decoder_sparse_step", 1) == 1 and not given.get("mlp_only_layers"),
            "some of its blocks have no experts (decoder_sparse_step, mlp_only_layers)")
    experts, per_token, width, shared = KINDS[kind]
    sizes = sizes_in(given, {**LLAMA, "n_hidden": width})
    heads = sizes["n_head"]
    kv_heads = given.get("num_key_value_heads") or heads
    require(heads % kv_heads == 0, f"its num_key_value_heads is {kv_heads}, which does not divide "
            f"num_attention_heads, {heads}")
    wide = given.get("head_dim") or sizes["n_embd"] // heads
    sizes |= {"n_kv_head": kv_heads, "tied": given.get("tie_word_embeddings") or False,
              "block_size": min(LONG, given.get("max_position_embeddings") or LONG),
              "rope_theta": float(given.get("rope_theta") or 10000.0)}
    more = {}  # what only a Mixture has
    if wide * heads != sizes["n_embd"]:
        more["head_width"] = wide
    if experts:
        chosen = sizes_in(given, {"n_experts": experts, "top_k": per_token})
        require(chosen["top_k"] <= chosen["n_experts"], f"its {per_token} is {chosen['top_k']}, "
                f"more than {experts}, {chosen['n_experts']}")
        sizes |= {**chosen, "n_hidden": sizes["n_hidden"] * chosen["top_k"]}
    if shared:
        more["shared_width"] = sizes_in(given, {"shared": shared})["shared"]
    return Mixture(**sizes, **more) if more else LlamaConfig(**sizes)


def model_of_folder(folder):
    """The model of FOLDER/config.json. ValueError, which names the file, if it describes none."""
    path = Path(folder, "config.json")
    given = read_json(path)
    try:
        return model_of_config(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
