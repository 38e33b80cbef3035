"""Names and orders of other trainers: from a tensor in their file to ours.

    ours                        Megatron-core's GPTModel
    transformer.wte.weight      embedding.word_embeddings.weight, with rows that pad the vocabulary
    transformer.wpe.weight      embedding.position_embeddings.weight
    transformer.ln_f            decoder.final_layernorm
    lm_head.weight              output_layer.weight, padded too, if it is not tied
    in transformer.h.0.         in decoder.layers.0.
        ln_1                        input_layernorm or, fused, self_attention.linear_qkv.layer_norm_
        attn.c_attn                 self_attention.linear_qkv, q, k and v of a head side by side
        attn.c_proj                 self_attention.linear_proj
        ln_2                        pre_mlp_layernorm or, fused, mlp.linear_fc1.layer_norm_
        mlp.c_fc                    mlp.linear_fc1
        mlp.c_proj                  mlp.linear_fc2

run/weights.py has the names of nanoGPT and Hugging Face. It also takes out the parts that wrappers
(torch.compile, DDP, FSDP) put into a name. Megatron's names for experts are not known here.
"""

from functools import partial

import torch

from model import UNTIED
from run import tensorfile
from run.checkpoint import EMBEDDING
from run.tensorfile import FLOATS
from run.weights import find_tensors, load_parts, read_tensor, refuse_more, unwrapped

NAMES = ("nanogpt", "hugging_face", "megatron")
MEGATRON_ENDS = {EMBEDDING: "embedding.word_embeddings.weight",
                 "transformer.wpe.weight": "embedding.position_embeddings.weight",
                 "transformer.ln_f.weight": "decoder.final_layernorm.weight",
                 "transformer.ln_f.bias": "decoder.final_layernorm.bias",
                 UNTIED: "output_layer.weight"}
MEGATRON_BLOCK = {"ln_1": "input_layernorm",
                  "attn.c_attn": "self_attention.linear_qkv",
                  "attn.c_proj": "self_attention.linear_proj",
                  "ln_2": "pre_mlp_layernorm",
                  "mlp.c_fc": "mlp.linear_fc1",
                  "mlp.c_proj": "mlp.linear_fc2"}
# A norm that is fused with the matrix that follows it has this name
FUSED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_",
         "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def megatron_name(name):
    """Megatron's name for the tensor of this canonical name, with norms that are not fused."""
    if name in MEGATRON_ENDS:
        return MEGATRON_ENDS[name]
    _, _, i, local = name.split(".", 3)  # transformer.h.0.attn.c_attn.weight
    module, _, kind = local.rpartition(".")
    return f"decoder.layers.{i}.{MEGATRON_BLOCK[module]}.{kind}"


def unfused(name):
    """A norm's name, such as decoder.layers.0.input_layernorm.weight, in place of its fused one;
    other names unchanged."""
    for apart, fused in FUSED.items():
        name = name.replace(fused, apart)
    return name


def q_k_v(tensor, config):
    """Megatron's order of rows to ours. Megatron has, for each head of k and v, the heads of q that
    share it, then k, then v; ours has all heads of q, then those of k, then those of v."""
    groups = getattr(config, "n_kv_head", config.n_head)  # heads of k, and of v
    of_q = config.n_head // groups  # heads of q that share a head of k and v
    hs = config.n_embd // config.n_head
    heads = tensor.unflatten(0, (groups, of_q + 2, hs))
    parts = heads[:, :of_q], heads[:, of_q], heads[:, of_q + 1]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def read_megatron(entry, name, shape, config):
    """Our tensor of this canonical name and shape."""
    tensor = read_tensor(entry)
    if ".c_attn." in name:
        return q_k_v(tensor, config)
    return tensor[: shape[0]]  # without rows that pad the vocabulary


def find_megatron(path, shapes, config):
    """{canonical name: function that reads the tensor}. The file must have all these tensors, else
    ValueError. It may have two more kinds, which Megatron adds: ._extra_state and, in a tied model,
    output_layer.weight, a copy of the embedding. A model with experts: ValueError."""
    if config.n_experts:
        raise ValueError(f"{path}: experts under Megatron's names are not known; take nanoGPT's "
                         "names")
    entries = {unfused(unwrapped(name)): entry
               for name, entry in tensorfile.read_header(path).items()}
    names = {name: megatron_name(name) for name in shapes}
    wanted = {}
    for name, theirs in names.items():
        wanted[theirs] = shapes[name]
        if name in (EMBEDDING, UNTIED) and theirs in entries:
            vocab_size, width = shapes[name]
            shape = entries[theirs].shape
            rows = max(vocab_size, shape[0]) if shape else vocab_size  # more rows: padding
            wanted[theirs] = torch.Size((rows, width))
    tensorfile.expect(path, entries, wanted, FLOATS)
    refuse_more(path, entries, {*wanted, MEGATRON_ENDS[UNTIED]}, ("._extra_state",))
    return {name: partial(read_megatron, entries[theirs], name, shapes[name], config)
            for name, theirs in names.items()}


def readers(path, shapes, config, names):
    """{canonical name: function that reads the tensor} of a file. shapes: {canonical name: shape}.
    names: whose names the file has, one of NAMES. ValueError unless the file has tensors of these
    names and shapes, and no others (but see find_megatron)."""
    if names == "megatron":
        return find_megatron(path, shapes, config)
    return {name: partial(load_parts, places, shapes[name])
            for name, places in find_tensors(path, shapes, config).items()}
