"""Weights from and for other programs, and sampling."""

import json
import math
import os
import shutil
import sys

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F

import sample
import train
from data.batches import Data, load_tokenizer
from data.prepare import prepare
from data.tokenizer import tokenizer_files
from experts import kind_of
from mesh import Mesh
from model import build
from run import checkpoint, tensorfile, weights
from run import export as export_file
from run.hugging_face import config_json, flags_of_folder, llama_names
from run.weights import load_model, read_weights
from sizes import GPTConfig, LlamaConfig
from tests.harness import VOCAB, config
from tests.isolation import as_it_was
from tests.runs import Run, _main, flags, one_line, rewrite

# The weights that GPT-2's published file (huggingface.co/openai-community/gpt2, model.safetensors)
# holds as (in, out), said again here: of the four only attn.c_proj is square, so no shape tells
PUBLISHED = {"h.0.attn.c_attn.weight": (768, 2304), "h.0.attn.c_proj.weight": (768, 768),
             "h.0.mlp.c_fc.weight": (768, 3072), "h.0.mlp.c_proj.weight": (3072, 768)}
IN_OUT = tuple(name.removeprefix("h.0.") for name in PUBLISHED)


def nanogpt_shapes(V, S, L, C):
    """state_dict of nanoGPT's GPT with biases (github.com/karpathy/nanoGPT, model.py)."""
    block = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "ln_2": (C,),
             "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    parts = {**{f"h.{i}.{k}": v for i in range(L) for k, v in block.items()}, "ln_f": (C,)}
    return {"lm_head.weight": (V, C), "transformer.wte.weight": (V, C),
            "transformer.wpe.weight": (S, C),
            **{f"transformer.{k}.weight": v for k, v in parts.items()},
            **{f"transformer.{k}.bias": v[:1] for k, v in parts.items()}}


def gpt2_shapes(V, S, L, C):
    """GPT-2's published file, without masks: nanoGPT's names but for the first word, no lm_head,
    and four matrices a block the other way round."""
    shapes = {}
    for name, shape in nanogpt_shapes(V, S, L, C).items():
        if name != "lm_head.weight":
            other_way = name.endswith(IN_OUT)
            shapes[name.removeprefix("transformer.")] = shape[::-1] if other_way else shape
    return shapes


def test_gpt2s_shapes_are_the_published_ones():
    shapes = gpt2_shapes(50257, 1024, 12, 768)
    assert PUBLISHED.items() <= shapes.items() and len(shapes) == 148
    assert shapes["wte.weight"] == (50257, 768) and shapes["h.11.attn.c_attn.bias"] == (2304,)


def test_the_model_file_is_nanogpts_by_name_and_shape_and_opens_with_safetensors(trained):
    path = trained / "step-00000004" / checkpoint.MODEL
    found = {name: e.shape for name, e in tensorfile.read_header(path).items()}
    assert found == nanogpt_shapes(VOCAB, 8, 2, 8)
    tensors = pytest.importorskip("safetensors.torch").load_file(path)
    config = GPTConfig(VOCAB, 8, 2, 2, 8)
    get = read_weights(path, {n: torch.Size(s) for n, s in found.items()}, config)
    assert all(torch.equal(tensors[name], get(name)) for name in found)
    assert torch.equal(tensors["lm_head.weight"], tensors["transformer.wte.weight"])


@pytest.mark.parametrize("kind", ["ours", "gpt2"])
def test_a_run_starts_from_a_weights_file(corpus, trained, tmp_path, kind):
    def as_hugging_face_has_it(tensors):
        del tensors["lm_head.weight"]
        for name, (shape, data) in list(tensors.items()):
            del tensors[name]
            if name.endswith(IN_OUT):
                data = np.frombuffer(data).reshape(shape).T.tobytes()
                shape = shape[::-1]
            tensors[name.removeprefix("transformer.")] = shape, data
        tensors["h.0.attn.bias"] = (1, 1, 8, 8), bytes(512)  # old files have both
        tensors["h.0.attn.masked_bias"] = (), bytes(8)

    ours = trained / "step-00000004" / checkpoint.MODEL
    path = shutil.copy(ours, tmp_path / "weights.safetensors")
    if kind == "gpt2":
        rewrite(path, as_hugging_face_has_it)
    run = Run(4, flags(corpus, tmp_path / "out", pp=2, tp=2, steps=0, init_from=path), tmp_path)
    assert run.wait() == [0] * 4, run.read()
    assert (tmp_path / "out/step-00000000" / checkpoint.MODEL).read_bytes() == ours.read_bytes()
    other = Run(1, flags(corpus, tmp_path / "o", n_embd=12, init_from=path), tmp_path)
    assert other.wait() == [2] and "wte.weight: F64 [67, 8], not " in other.read()


def test_a_checkpoints_folder_is_as_good_as_its_file(corpus, trained, tmp_path):
    """... and is refused for another model whose tensors have the same shapes."""
    folder = trained / "step-00000004"
    run = Run(1, flags(corpus, tmp_path / "out", steps=0, init_from=folder), tmp_path)
    assert run.wait() == [0], run.read()
    again = (tmp_path / "out/step-00000000" / checkpoint.MODEL).read_bytes()
    assert again == (folder / checkpoint.MODEL).read_bytes()
    other = Run(1, flags(corpus, tmp_path / "o", n_head=4, init_from=folder), tmp_path)
    assert other.wait() == [2] and "its n_head is 2, this run's is 4" in other.read()


def _untied(tensors):
    shape, data = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = shape, data[::-1]


@pytest.mark.parametrize("given,says", [
    ({"n_head": "12"}, "its n_head is '12', not a whole number from 1 to 2,147,483,648"),
    ({"n_layer": None}, "its n_layer is None, not a whole number from 1 to 2,147,483,648"),
    ({"n_head": 12, "num_attention_heads": 6}, "its num_attention_heads is 6, its n_head 12"),
    ({"n_positions": 0}, "its n_positions is 0, not a whole number from 1 to 2,147,483,648"),
    ({"activation_function": "gelu"}, "its activation_function is gelu, here it is gelu_new")])
def test_a_field_of_config_json_that_cannot_be_is_named(given, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=f"config.json: {says}$"):
        flags_of_folder(tmp_path)


def test_gpt2s_weights_train_in_shorter_sequences(corpus, trained, tmp_path):
    """The first positions of the table are taken, like nanoGPT's crop_block_size does; a longer
    block has no positions."""
    export_file.export(trained / "step-00000004", tmp_path / "hf")
    argv = ["--init-from", tmp_path / "hf", "--data", corpus, "--steps", 0, "--device", "cpu",
            "--batch-size", 4, "--eval-interval", 0]
    run = Run(1, [*argv, "--out", tmp_path / "out", "--block-size", 5], tmp_path)
    assert run.wait() == [0], run.read()
    short, whole = load_model(tmp_path / "out/step-00000000"), load_model(trained / "step-00000004")
    ids = torch.arange(5).view(1, 5)
    assert torch.equal(short(ids), whole(ids)) and short.config.block_size == 5
    run = Run(1, [*argv, "--out", tmp_path / "o", "--block-size", 9], tmp_path)
    says = "hf, tensor transformer.wpe.weight: 8 positions; take --block-size 8"
    assert run.wait() == [2] and says in run.read()


OTHERS = {  # what becomes of the file's tensors -> what the run says, or nothing
    "compiled": (lambda tensors: [tensors.update({"_orig_mod." + name: tensors.pop(name)})
                                  for name in list(tensors)], ""),
    "head only": (lambda tensors: tensors.pop("transformer.wte.weight"), ""),
    "untied": (_untied, "lm_head.weight is not transformer.wte.weight; this model ties them"),
    "deeper": (lambda tensors: tensors.update({"transformer.h.2.ln_1.weight": tensors[
        "transformer.ln_f.weight"]}), "has transformer.h.2.ln_1.weight, which a model of these"),
    "no bias": (lambda tensors: tensors.pop("transformer.ln_f.bias"),
                "tensor transformer.ln_f.bias: missing"),
    "narrow": (lambda tensors: tensors.update({"transformer.wpe.weight": (
        (4, 16), tensors["transformer.wpe.weight"][1])}), "transformer.wpe.weight"),
    "heads": (None, "config.json: its n_head is 4, here it is 2"),
    "activation": (None, "config.json: its activation_function is relu, here it is gelu_new"),
    "fewer words": (lambda tensors: [tensors.update({name: (
        (66, 8), tensors[name][1][: -len(tensors[name][1]) // 67])}) for name in (
            "transformer.wte.weight", "lm_head.weight")], "a vocabulary of 66, that of --data has"),
    "nan": (lambda tensors: tensors.update({"transformer.ln_f.weight": (
        (8,), np.full(8, np.nan).tobytes())}), "safetensors, tensor transformer.ln_f.weight: not "
        "finite"),
    "pickle": (None, "ckpt.pt: not a safetensors file"),
}


@pytest.mark.parametrize("how", OTHERS)
def test_weights_of_others_are_taken_or_refused_in_one_line(corpus, trained, tmp_path, how):
    change, says = OTHERS[how]
    ours = trained / "step-00000004" / checkpoint.MODEL
    path = shutil.copy(ours, tmp_path / ("ckpt.pt" if how == "pickle" else "model.safetensors"))
    if how == "pickle":
        torch.save({"transformer.wte.weight": torch.ones(67, 8)}, path)
    if change:
        rewrite(path, change)
    elif how != "pickle":
        value = {"heads": {"n_head": 4}, "activation": {"activation_function": "relu"}}[how]
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 8}
        (tmp_path / "config.json").write_text(json.dumps({**sizes, **value}))
    run = Run(1, flags(corpus, tmp_path / "out", steps=0, init_from=path), tmp_path)
    assert run.wait() == [2 if says else 0] and says in run.read(), run.read()
    assert run.read().count("\n") == bool(says)
    if not says:
        assert (tmp_path / "out/step-00000000" / checkpoint.MODEL).read_bytes() == ours.read_bytes()


def test_a_model_without_biases_and_with_more_positions_is_taken(corpus, trained, tmp_path):
    """nanoGPT's default has no biases: zeros. A shorter block takes the first positions."""
    ours = trained / "step-00000004" / checkpoint.MODEL
    path = shutil.copy(ours, tmp_path / "model.safetensors")
    rewrite(path, lambda tensors: [tensors.pop(name) for name in list(tensors)
                                   if name.endswith(".bias")])
    model = load_model(trained / "step-00000004")
    shapes = {name: p.shape for name, p in model.canonical_parameters()}
    shapes["transformer.wpe.weight"] = torch.Size((5, 8))
    get = read_weights(path, shapes, model.config)
    for name, param in model.canonical_parameters():
        want = torch.zeros_like(param) if name.endswith("bias") else param.data
        assert torch.equal(get(name).float(), want[: shapes[name][0]].float()), name


def test_tables_with_fewer_rows_than_columns_are_taken(tmp_path):
    """A model of characters has 65 words, of 384 numbers each."""
    model = build(GPTConfig(6, 8, 1, 2, 12))
    path = tmp_path / "model.safetensors"
    tensors = {name: param.data for name, param in model.canonical_parameters()}
    export_file.write_weights(path, tensors)
    get = read_weights(path, {name: x.shape for name, x in tensors.items()}, model.config)
    assert all(torch.equal(get(name), x) for name, x in tensors.items())


def test_a_file_that_is_cut_off_after_its_header_was_read_is_named(trained, tmp_path):
    path = shutil.copy(trained / "step-00000004" / checkpoint.MODEL, tmp_path)
    model = load_model(trained / "step-00000004")
    get = read_weights(path, {n: p.shape for n, p in model.canonical_parameters()}, model.config)
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(tensorfile.CheckpointError, match=f"^{path}, tensor .*: cut off at the end"):
        for name, _ in model.canonical_parameters():
            get(name)


LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4,
         "hidden_size": 64, "intermediate_size": 96}
GPT2_DEFAULTS = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024}


@pytest.mark.parametrize("given,want", [
    ({}, GPT2_DEFAULTS), ({"model_type": "gpt2", "n_embd": 96}, {**GPT2_DEFAULTS, "n_embd": 96}),
    ({"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 3,
      "max_position_embeddings": 32}, {"n_layer": 3, "n_head": 4, "n_embd": 64, "block_size": 32}),
    ({"n_inner": 3072, "activation_function": "gelu_fast"}, GPT2_DEFAULTS),
    ({"activation_function": "gelu_pytorch_tanh"}, GPT2_DEFAULTS),
    (LLAMA, {"n_layer": 3, "n_head": 4, "n_embd": 64, "n_hidden": 96, "n_kv_head": 4,
             "norm_eps": 1e-6, "untied": True}),
    ({**LLAMA, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.1234567, "low_freq_factor": 1.0, "high_freq_factor": 4,
        "original_max_position_embeddings": 1048576}}, {"rope_scaling": "8.1234567,1,4,1048576"}),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.5}}, {"rope_scaling": "2.5"}),
    ({**LLAMA, "model_type": "qwen3"}, {"head_dim": 128, "n_kv_head": 32}),
    ({**LLAMA, "model_type": "qwen3", "head_dim": 16, "num_key_value_heads": None},
     {"arch": "qwen3", "head_dim": 0, "n_kv_head": 4}),
    ({**LLAMA, "model_type": "qwen2"}, {"arch": "qwen2", "head_dim": 0, "n_kv_head": 32}),
    ({**LLAMA, "model_type": "mistral", "sliding_window": None}, {"arch": "llama", "n_kv_head": 8}),
    ({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
     {"rope_theta": 500.0, "rope_scaling": ""}),
], ids=str)
def test_what_config_json_leaves_out_is_transformers_default(given, want, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(given))
    got = flags_of_folder(tmp_path)
    assert {name: got[name] for name in want} == want
    transformers = pytest.importorskip("transformers")
    kind = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}.get(
        given.get("model_type"), "GPT2")
    theirs = getattr(transformers, f"{kind}Config").from_dict(given)
    assert got["n_layer"] == theirs.num_hidden_layers and got["n_embd"] == theirs.hidden_size
    assert got["n_head"] == theirs.num_attention_heads
    if kind != "GPT2":
        assert got["n_kv_head"] == (theirs.num_key_value_heads or theirs.num_attention_heads)
        width = getattr(theirs, "head_dim", None) or got["n_embd"] // got["n_head"]
        assert (got["head_dim"] or got["n_embd"] // got["n_head"]) == width
    else:
        x = torch.linspace(-6, 6, 1001)
        act = transformers.activations.ACT2FN[theirs.activation_function]
        assert torch.allclose(act(x), F.gelu(x, approximate="tanh"), atol=1e-6)


@pytest.mark.parametrize("given,says", [
    ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "is dynamic"),
    ({"model_type": "llama", "mlp_bias": True}, "its mlp_bias is True, here it is False"),
    ({"model_type": "llama", "attention_bias": True}, "its attention_bias is True"),
    ({"model_type": "llama", "hidden_act": "gelu"}, "its hidden_act is gelu, here it is silu"),
    ({"scale_attn_by_inverse_layer_idx": True}, "its scale_attn_by_inverse_layer_idx is True"),
    ({"n_embd": 96, "n_inner": 3072}, "its n_inner is 3072"),
    ({"layer_norm_epsilon": 1e-6}, "its layer_norm_epsilon is 1e-06"),
    ({"model_type": "gemma"}, "its model_type is gemma; gpt2, llama, mistral, qwen2, qwen3 can"),
    ({"model_type": "mistral"}, "its sliding_window is 4096, here it is None")], ids=str)
def test_another_model_in_config_json_is_refused(given, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=says):
        flags_of_folder(tmp_path)


def test_a_checkpoint_becomes_a_hugging_face_folder(trained, tmp_path):
    new = tmp_path / "new"
    said = export_file.export(trained / "step-00000004", new)
    assert "without a tokenizer: the tokenizer of" in said and "256 tokens, the model 67" in said
    model = load_model(trained / "step-00000004")
    shapes = {name: p.shape for name, p in model.canonical_parameters()}
    get = read_weights(new / "model.safetensors", shapes, model.config)
    assert all(torch.equal(get(name), p.data) for name, p in model.canonical_parameters())
    given = json.loads((new / "config.json").read_text())
    assert given.items() >= {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8,
                             "n_positions": 8, "vocab_size": VOCAB, "resid_pdrop": 0.0,
                             "activation_function": "gelu_new"}.items()


def test_an_exported_file_has_gpt2s_names_shapes_and_values(trained, tmp_path):
    export_file.export(trained / "step-00000004", tmp_path / "new")
    path = tmp_path / "new" / "model.safetensors"
    found, raw = tensorfile.read_header(path), path.read_bytes()
    assert {name: entry.shape for name, entry in found.items()} == gpt2_shapes(VOCAB, 8, 2, 8)
    for name, param in load_model(trained / "step-00000004").canonical_parameters():
        entry = found[name.removeprefix("transformer.")]
        values = np.frombuffer(raw[entry.begin : entry.end], "<f4").reshape(entry.shape)
        want = param.detach().numpy()
        assert np.array_equal(values, want.T if name.endswith(IN_OUT) else want), name
    length = int.from_bytes(raw[:8], "little")  # transformers opens no file without the format
    assert json.loads(raw[8 : 8 + length])["__metadata__"] == {"format": "pt"}


def _export(rank, *args):
    _main(rank, *args, program=export_file)


def test_an_export_to_a_full_disk_is_one_line_with_the_file(trained, tmp_path):
    run = Run(1, ["--out", trained, "--to", tmp_path / "new"], tmp_path, limit=1000,
              fn=_export)
    says = f"export.py: {tmp_path}/new.part/model.safetensors: File too large\n"
    assert run.wait() == [2] and run.read() == says


@pytest.mark.parametrize("name", ["h.0.attn.c_attn.lora_A", "h.0.attn.gate.weight", "extra"])
def test_a_parameter_that_llama_lacks_is_named(name):
    with pytest.raises(ValueError, match=f"has no tensor for transformer.{name}$"):
        llama_names(f"transformer.{name}", LlamaConfig(VOCAB))


def test_config_json_of_a_llama_says_how_long_its_sequences_are():
    """max_position_embeddings: no less than it was trained on; and whole numbers."""
    config = LlamaConfig(VOCAB, block_size=4096, rope_scaling="8,1,4,8192")
    written = config_json(config, None, {"max_position_embeddings": 64})
    numbers = (written["max_position_embeddings"],
               written["rope_scaling"]["original_max_position_embeddings"])
    assert repr(numbers) == "(4096, 8192)"


def test_numbers_of_a_file_begin_at_a_multiple_of_8_bytes():
    """Some readers map a file into memory, and read float64 in place."""
    for n in range(1, 9):
        head, entries = tensorfile.make_header({"a" * n: torch.Size((3,))}, "F64")
        assert len(head) % 8 == 0 == entries["a" * n].begin % 8


def test_a_header_may_be_as_long_as_in_the_safetensors_library(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    library = pytest.importorskip("safetensors")
    for length in (tensorfile.MAX_HEADER, tensorfile.MAX_HEADER + 1):
        path.write_bytes(length.to_bytes(8, "little") + b" " * 100)  # refused: it ends too early
        with pytest.raises(library.SafetensorError) as error:
            library.safe_open(path, "pt")
        assert ("too large" in str(error.value)) == (length > tensorfile.MAX_HEADER)
    head, entries = tensorfile.make_header({"a": torch.Size((3,))}, "F64", path)
    path.write_bytes(head + bytes(24))
    monkeypatch.setattr(tensorfile, "MAX_HEADER", len(head) - 8)
    assert tensorfile.read_header(path) == entries
    monkeypatch.setattr(tensorfile, "MAX_HEADER", len(head) - 9)
    with pytest.raises(tensorfile.CheckpointError, match="not a safetensors file, or its header"):
        tensorfile.read_header(path)


@pytest.mark.parametrize("words,end", [(50256, None), (50257, 50256), (50304, 50256),
                                       (65536, None)])
def test_gpt2s_own_tokenizer_ends_a_text_with_token_50256(words, end, tmp_path, monkeypatch):
    """A vocabulary of 50256 tokens has no such token, one of 65,536 is another tokenizer's."""
    model = build(GPTConfig(words, 8, 1, 1, 2))
    monkeypatch.setattr(export_file, "load_model", lambda folder: model)
    monkeypatch.setattr(checkpoint, "read_manifest", lambda folder: {"data": "nowhere"})
    assert "without a tokenizer" in export_file.export("a", tmp_path / "new")
    assert json.loads((tmp_path / "new/config.json").read_text())["eos_token_id"] == end


def test_hugging_faces_gpt2_computes_our_logits(trained, tmp_path):
    new = tmp_path / "new"
    export_file.export(trained / "step-00000004", new)
    model = load_model(trained / "step-00000004")
    theirs = pytest.importorskip("transformers").GPT2LMHeadModel.from_pretrained(new).eval()
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert (theirs(ids).logits - model(ids)).abs().max() < 1e-5


@pytest.mark.parametrize("meta,says", [
    ({"vocab_size": 49152}, "its vocab_size is 49152, GPT-2's tokenizer has 50257 tokens"),
    ({"vocab_size": 50304, "tokenizer": "gpt2"}, "its vocab_size is 50304, GPT-2's"),
    ({"vocab_size": 50257, "tokenizer": "HuggingFaceTB/SmolLM-135M"},
     "its tokenizer is HuggingFaceTB/SmolLM-135M; bpe, gpt2 and bytes can")])
def test_words_of_another_tokenizer_are_not_gpt2s(meta, says, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: pytest.fail("takes GPT-2's words"))
    shutil.copytree(corpus, tmp_path / "data")
    (tmp_path / "data/meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=f"meta.json: {says}"):
        load_tokenizer(tmp_path / "data")
    assert Data(config(str(tmp_path / "data"))).vocab_size == meta["vocab_size"]  # can be trained


def test_a_damaged_manifest_is_one_line_without_another_commands_flag(trained, tmp_path, capsys,
                                                                       monkeypatch):
    folder = shutil.copytree(trained / "step-00000004", tmp_path / "one")
    (folder / checkpoint.MANIFEST).write_text("{}")
    for argv in (["sample.py", "--out", folder], ["export.py", "--out", folder, "--to", "new"]):
        main = sample.main if argv[0] == "sample.py" else export_file.main
        error = one_line(main, argv, capsys, monkeypatch)
        assert "manifest.json: damaged (it has no seal); take another checkpoint" in error


def test_hugging_faces_tokenizers_opens_ours(tmp_path):
    text = "a = aa + aaa  # 3 + 33\n\n\tif a: 'héß 你好 😀'\n" * 40
    (tmp_path / "text").write_text(text)
    prepare([tmp_path / "text"], tmp_path / "data", vocab_size=280)
    files, end = tokenizer_files(tmp_path / "data", GPTConfig(280))
    (tmp_path / "tokenizer.json").write_text(json.dumps(files["tokenizer.json"]))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for words in (text, "aaaaaaa\t\t aaaa 333  \n\n \x00 ñ"):
        ids = load_tokenizer(tmp_path / "data").encode_ordinary(words)
        assert theirs.encode(words).ids == ids and theirs.decode(ids) == words


def test_weights_that_are_not_finite_are_neither_sampled_nor_exported(corpus, tmp_path, capsys,
                                                                      monkeypatch):
    """save() writes none; a file from elsewhere may have some, under right checksums."""
    cfg = config(corpus, n_layer=1, microbatches=1, out=str(tmp_path))
    trainer = train.Trainer(cfg, Mesh(dp=1), VOCAB)
    trainer.reducer.weights[-1].view(-1)[-1] = math.nan
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "is_finite", lambda trainer: True)
        folder = checkpoint.save(trainer, 1)
    says = f"{folder}: {trainer.reducer.tags[-1].name} is not finite; take an earlier checkpoint"
    with pytest.raises(tensorfile.CheckpointError) as error:
        load_model(folder)
    assert str(error.value) == says
    assert says in one_line(sample.main, ["sample.py", "--out", folder], capsys, monkeypatch)


def test_no_experts_of_a_llama_are_built_that_are_larger_than_their_file(
        corpus, tmp_path, monkeypatch):
    cfg = config(corpus, n_layer=1, microbatches=1, arch="llama", n_kv_head=2, n_hidden=38,
                 experts=2, out=str(tmp_path))
    folder = checkpoint.save(train.Trainer(cfg, Mesh(dp=1), VOCAB), 1)
    assert load_model(folder).config.n_hidden == 38
    manifest = checkpoint.read_manifest(folder)
    manifest["model"]["n_hidden"] = 2**30
    manifest["seal"] = checkpoint.seal(manifest)
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    monkeypatch.setattr(weights, "kind_of", lambda config: pytest.fail("builds it"))
    with pytest.raises(tensorfile.CheckpointError, match="tensor .*experts.c_fc.weight"):
        load_model(folder)


# ---- sampling ----


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    """The folder of a checkpoint of an untrained model, whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "text").write_text("def f(x): return x\n" * 100)
    (folder / "out").mkdir()
    prepare([folder / "text"], folder / "data", "bytes")
    cfg = config(str(folder / "data"), n_layer=1, microbatches=1, out=str(folder / "out"))
    checkpoint.save(train.Trainer(cfg, Mesh(dp=1), 256), 0, folder / "data")
    return folder / "out"


def test_a_seed_decides_all_draws_of_sample(of_bytes, capsys, monkeypatch):
    def said(*more):
        argv = ["sample.py", "--out", of_bytes, "--max-tokens", 20, "--samples", 2, *more]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        with as_it_was():
            sample.main()
        out = capsys.readouterr().out
        assert out.count("def ") == out.count("\n---\n") == 2
        return out

    usual = said()
    assert said("--seed", 1337) == usual and said("--seed", 1) != usual
    assert said("--seed", 1) == said("--seed", 1)
    assert said("--top-k", 1) == said("--temperature", 0) != usual  # both: the likeliest


def test_sample_takes_a_prompt_and_the_models_own_tokenizer(trained, of_bytes, capsys, monkeypatch):
    for argv, says in ((["--out", of_bytes, "--prompt", ""], "--prompt '' must not be empty"),
                       (["--out", trained], "the tokenizer has 256 tokens, the model 67; --data")):
        assert says in one_line(sample.main, ["sample.py", *argv], capsys, monkeypatch)


def test_top_k_0_draws_from_all_tokens_and_k_from_the_k_likeliest():
    rng = torch.Generator().manual_seed(0)
    logits = torch.arange(200.0).div(1000).expand(4000, 200)  # almost equally likely
    for top_k, drawn in ((0, range(200)), (3, (197, 198, 199)), (500, range(200))):
        picks = sample.pick_tokens(logits, 1.0, top_k, rng)
        assert picks.unique().tolist() == [*drawn]
    coldest = sample.pick_tokens(torch.tensor([[1.0, 3.0, 2.0]]), 1e-308, 0, rng)
    assert coldest.tolist() == [[1]]  # the likeliest, and no overflow


@pytest.mark.parametrize("experts", [0, 4])
def test_sampling_with_kept_keys_is_sampling_without_them(trained, experts):
    model, ids = load_model(trained / "step-00000004").double(), [1, 2, 3]
    if experts:
        shape = GPTConfig(VOCAB, 8, 2, 2, 12, n_experts=experts)
        model = build(shape, dtype=torch.double, kind=kind_of(shape))
    got = sample.generate(model, ids, 12, samples=3, top_k=20)  # beyond the window of 8
    out, rng = torch.tensor([ids] * 3), torch.Generator().manual_seed(1337)
    for _ in range(12):
        top, index = model(out[:, -8:])[:, -1].topk(20)
        pick = torch.multinomial((top / 0.8).softmax(1), 1, generator=rng)
        out = torch.cat([out, index.gather(1, pick)], 1)
    assert out.tolist() == got and got[0] != got[1]
