"""Weights of other programs are taken name by name or refused in one line, ours become theirs.
Sampling."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import sample
import train
from data.prepare import prepare
from experts import kind_of, on_meta, shapes_of
from mesh import Mesh
from model import build
from run import checkpoint, weights
from run.checkpoint import DTYPES, MANIFEST, MODEL, read_header
from run.flags import check_layout, parse
from run.weights import INDEX, export, load_model, read_entries, sizes_of, values
from sizes import GPTConfig, LlamaConfig, config_of
from tests.harness import VOCAB, config, flags, ranks, refused

LLAMA = "--arch llama --n-kv-head 2"
KINDS = {  # kind of model: its flags, and its sizes without a flag
    "gpt2": ("", {}), "llama": (LLAMA, {}), "untied": (LLAMA, {"untied": True}),
    "stretched": (LLAMA, {"rope_scaling": "4,1,4,6", "rope_theta": 500.0, "norm_eps": 3e-6}),
    "square": (LLAMA, {"head_dim": 2}),  # c_attn (16, 16)
    "linear": ("--arch llama --n-kv-head 1", {"head_dim": 2, "rope_scaling": "2.5"}),
    "qwen2": ("--arch qwen2 --n-kv-head 2", {}),
    "qwen3": ("--arch qwen3 --n-kv-head 2", {"head_dim": 6}),
    "qwen3 untied": ("--arch qwen3 --n-kv-head 2", {"head_dim": 6, "untied": True})}


def small(words, corpus, out, **sizes):
    usual = f"--n-layer 2 --n-head 4 --n-embd 16 --batch-size 4 --dtype float32 --out {out}"
    return config([*usual.split(), *words.split()], corpus, n_hidden=21, **sizes)


def saved(cfg):
    """A checkpoint of random weights. (Biases of 0 and norms of 1 would hide errors.)"""
    shape = config_of(cfg, VOCAB)
    trainer = train.Trainer(cfg, Mesh(dp=1), shape, train.from_seed(shape, 0))
    generator = torch.Generator().manual_seed(0)
    for flat in trainer.reducer.weights:
        flat.copy_(torch.randn(flat.shape, generator=generator))
    return checkpoint.save(trainer, 1)


@pytest.fixture(scope="module")
def folders(corpus, tmp_path_factory):
    """{kind: (a checkpoint, what export made of it)}."""
    made = {}
    for kind, (words, sizes) in KINDS.items():
        work = tmp_path_factory.mktemp("weights")
        made[kind] = saved(small(words, corpus, work, **sizes)), work / "hf"
        export(*made[kind])
    return made


def said_by(main, argv, capsys, monkeypatch):
    """The one line with which a command's main() refuses its command line, with exit code 2."""
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    with pytest.raises(SystemExit) as stop:
        main()
    line = capsys.readouterr().err
    assert stop.value.code == 2 and line.count("\n") == 1, line
    return line


def same(path, model):
    """Has the file, or the folder, this model's weights, bit for bit?"""
    params = dict(model.canonical_parameters())
    value = values(path, {name: param.shape for name, param in params.items()}, model.config)
    return all(torch.equal(value(name), param) for name, param in params.items())


# ---- Hugging Face's folders ----


def test_an_exported_file_has_the_published_names_and_shapes(folders):
    names = {"gpt2": {"transformer.h.1.ln_1.bias": (16,),
                      "transformer.h.1.attn.c_attn.weight": (16, 48),  # (in, out)
                      "transformer.h.1.attn.c_attn.bias": (48,),
                      "transformer.h.1.mlp.c_proj.weight": (64, 16)},
             "qwen3 untied": {"lm_head.weight": (VOCAB, 16), "model.norm.weight": (16,),
                              "model.embed_tokens.weight": (VOCAB, 16)}}
    for name, shape in {
            "input_layernorm": (16,), "self_attn.q_proj": (24, 16), "self_attn.k_proj": (12, 16),
            "self_attn.v_proj": (12, 16), "self_attn.q_norm": (6,), "self_attn.k_norm": (6,),
            "self_attn.o_proj": (16, 24), "post_attention_layernorm": (16,),
            "mlp.gate_proj": (21, 16), "mlp.up_proj": (21, 16), "mlp.down_proj": (16, 21)}.items():
        names["qwen3 untied"][f"model.layers.0.{name}.weight"] = shape
        names["qwen3 untied"][f"model.layers.1.{name}.weight"] = shape
    for kind, n in (("gpt2", 2 * 12 + 4), ("qwen3 untied", 2 * 11 + 3)):
        header = read_header(folders[kind][1] / MODEL)
        found = {name: entry.shape for name, entry in header.items()}
        assert names[kind].items() <= found.items() and len(found) == n


def test_safetensors_opens_an_exported_file_and_finds_our_values(folders):
    library = pytest.importorskip("safetensors.torch")
    ours = dict(load_model(folders["gpt2"][0]).canonical_parameters())
    theirs = library.load_file(folders["gpt2"][1] / MODEL)
    for local in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):  # Conv1D
        name = f"transformer.h.0.{local}.weight"
        assert torch.equal(theirs[name], ours[name].t())
    ours = dict(load_model(folders["untied"][0]).canonical_parameters())
    theirs = library.load_file(folders["untied"][1] / MODEL)
    for name, parts in (("attn.c_attn", "self_attn.q_proj self_attn.k_proj self_attn.v_proj"),
                        ("mlp.c_fc", "mlp.gate_proj mlp.up_proj")):
        rows = [theirs[f"model.layers.1.{part}.weight"] for part in parts.split()]
        assert torch.equal(torch.cat(rows), ours[f"transformer.h.1.{name}.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_an_exported_folder_begins_with_the_same_bits(kind, corpus, folders, tmp_path):
    """The folder gives the sizes. A checkpoint's folder, and its file, have the same weights."""
    before, exported = folders[kind]
    words = f"--init-from {exported} --batch-size 4 --dtype float32 --out {tmp_path}"
    argv = [*words.split(), "--data", corpus, "--block-size", "8", "--device", "cpu"]
    for path in (exported, before, before / MODEL):
        cfg = parse(argv)
        check_layout(cfg, 1)
        cfg.init_from = str(path)
        shape = config_of(cfg, VOCAB)
        trainer = train.Trainer(cfg, Mesh(dp=1), shape, train.initial_values(cfg, shape, None))
        again = checkpoint.save(trainer, 0)
        assert (again / MODEL).read_bytes() == (before / MODEL).read_bytes()


def has_its_slices(rank, cfg, folder):
    """Has this rank of a run that begins from cfg.init_from its slices of a checkpoint's model?"""
    params = dict(load_model(folder).canonical_parameters())
    shape = config_of(cfg, VOCAB)
    trainer = train.Trainer(cfg, train.make_mesh(cfg, cfg.device), shape,
                            train.initial_values(cfg, shape, None))
    return all(torch.equal(weight, tag.slice(params[tag.name]))
               for tag, weight in trainer.reducer.whole())


@pytest.mark.parametrize("kind,layout", [("qwen3 untied", "--tp 2 --pp 2"),
                                         ("gpt2", "--dp 2 --tp 2 --zero 3")])
def test_each_rank_takes_its_slices_of_a_folder(kind, layout, corpus, folders, tmp_path):
    words, sizes = KINDS[kind]
    cfg = small(f"{words} {layout} --init-from {folders[kind][1]}", corpus, tmp_path, **sizes)
    assert all(ranks(4, has_its_slices, cfg, folders[kind][0]))


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_our_logits_and_its_own_folder_is_read(kind, folders, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = load_model(folders[kind][0])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[kind][1]).float()
    ids = torch.arange(16).view(2, 8) * 3 % VOCAB
    expected = theirs(ids).logits
    assert (ours(ids) - expected).norm() <= 1e-5 * expected.norm()  # float32
    theirs.save_pretrained(tmp_path)
    assert same(tmp_path, ours)


SIZES = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4,
         "hidden_size": 64, "intermediate_size": 96}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.1234567, "low_freq_factor": 1.0,
          "high_freq_factor": 4, "original_max_position_embeddings": 1048576}


@pytest.mark.parametrize("given,want", [
    (GPT2, {"arch": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16}),
    ({**GPT2, "n_inner": 32, "activation_function": "gelu_pytorch_tanh"}, {"n_embd": 8}),
    ({}, {"n_layer": 3, "n_head": 4, "n_embd": 64, "n_hidden": 96, "n_kv_head": 4, "head_dim": 0,
          "norm_eps": 1e-6, "untied": True, "rope_theta": 10000.0, "rope_scaling": ""}),
    ({"rope_scaling": LLAMA3}, {"rope_scaling": "8.1234567,1,4,1048576"}),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, {"rope_scaling": "2.5"}),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 500}}, {"rope_theta": 500.0}),
    ({"model_type": "qwen2"}, {"arch": "qwen2", "head_dim": 0, "n_kv_head": 32}),
    ({"model_type": "qwen3"}, {"arch": "qwen3", "head_dim": 128, "n_kv_head": 32}),
    ({"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": None},
     {"head_dim": 0, "n_kv_head": 4}),
    ({"model_type": "mistral", "sliding_window": None}, {"arch": "llama", "n_kv_head": 8})],
    ids=str)
def test_config_json_gives_the_sizes_as_transformers_reads_them(given, want, tmp_path):
    # Not both names of a size: transformers would take the other one
    values = given if given.get("model_type") == "gpt2" else {**SIZES, **given}
    (tmp_path / "config.json").write_text(json.dumps(values))
    got = sizes_of(tmp_path)
    assert {name: got[name] for name in want} == want
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert got["n_head"] == theirs.num_attention_heads and got["n_embd"] == theirs.hidden_size
    if got["arch"] != "gpt2":
        assert got["n_kv_head"] == (theirs.num_key_value_heads or theirs.num_attention_heads)


@pytest.mark.parametrize("given,says", [
    ({"model_type": "gemma"}, "its model_type is gemma; gpt2, llama, mistral, qwen2, qwen3 can"),
    *(({"hidden_size": value}, f"its hidden_size is {value!r:.40}, not a whole number above 0, up")
      for value in (None, 32.0, [32], True, "32", 0, 10**7, 10**400)),
    ({"num_key_value_heads": 0}, "its num_key_value_heads is 0, not a whole number"),
    ({"rms_norm_eps": None}, "its rms_norm_eps is None, not a number above 0"),
    ({"rope_theta": float("nan")}, "its rope_theta is nan, not a number above 0"),
    ({"rope_scaling": "default"}, "its rope_scaling is 'default', not an object"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "its rope_type is dynamic; default, "),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "its rope_scaling has partial_rotary_f"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "its factor is None, not a number above 0"),
    ({"tie_word_embeddings": "yes"}, "its tie_word_embeddings is 'yes'; False or True can be"),
    ({"mlp_bias": True}, "its mlp_bias is True; False can be read"),
    ({"hidden_act": "gelu"}, "its hidden_act is 'gelu'; 'silu' or 'swish' can be read"),
    ({"quantization_config": {"bits": 4}}, "its quantization_config is {'bits': 4}; None can"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "its layer_types is ['full_att"),
    ({"model_type": "mistral"}, "its sliding_window is 4096; None can be read"),
    ({"model_type": "qwen2", "use_sliding_window": True}, "its use_sliding_window is True; False"),
    ({**GPT2, "activation_function": "gelu"}, "its activation_function is 'gelu'; 'gelu_new' or"),
    ({**GPT2, "layer_norm_epsilon": 1e-6}, "its layer_norm_epsilon is 1e-06; 1e-05 can be read"),
    ({**GPT2, "n_inner": 64}, "its n_inner is 64; None or 32 can be read")],
    ids=lambda x: str(x)[:60])
def test_config_json_of_another_model_is_one_line_with_field_and_value(given, says, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, **given}))
    with pytest.raises(ValueError) as error:
        sizes_of(tmp_path)
    assert str(error.value).startswith(f"{path}: {says}") and "\n" not in str(error.value)


# ---- files of tensors ----


def rewrite(path, change):
    """A file of float32 again, with change({name: (shape, bytes)}) in it."""
    data = path.read_bytes()
    tensors = {name: (entry.shape, data[entry.begin : entry.end])
               for name, entry in read_header(path).items()}
    change(tensors)
    head, _ = checkpoint.make_header({name: shape for name, (shape, _) in tensors.items()}, "F32")
    path.write_bytes(head + b"".join(data for _, data in tensors.values()))


def renamed(change):
    return lambda tensors: [tensors.update({change(name): tensors.pop(name)})
                            for name in list(tensors)]


def put(name, shape, data):
    return lambda tensors: tensors.update({name: (shape, np.array(data, "<f4").tobytes())})


def longer(tensors):
    _, data = tensors["transformer.wpe.weight"]
    tensors["transformer.wpe.weight"] = (9, 16), data + bytes(64)


@pytest.mark.parametrize("change", [
    renamed(lambda name: f"_orig_mod.{name}"),  # nanoGPT's own, compiled
    renamed(lambda name: f"module.{name.replace('.attn.', '.attn._checkpoint_wrapped_module.')}"),
    renamed(lambda name: name.removeprefix("transformer.")),
    longer,
    lambda tensors: tensors.pop("transformer.wte.weight"),  # the head alone
    lambda tensors: tensors.pop("lm_head.weight"),
    put("transformer.h.0.attn.bias", (1, 1, 2, 2), [1, 0, 1, 1])])
def test_a_file_under_nanogpts_names_is_read(change, folders, tmp_path):
    path = shutil.copy(folders["gpt2"][0] / MODEL, tmp_path / "weights.safetensors")
    rewrite(path, change)
    assert same(path, load_model(folders["gpt2"][0]))


def test_biases_that_nanogpt_leaves_out_are_zeros(folders, tmp_path):
    path = shutil.copy(folders["gpt2"][0] / MODEL, tmp_path / "weights.safetensors")
    rewrite(path, lambda tensors: [tensors.pop(name) for name in list(tensors)
                                   if name.endswith(".bias")])
    model = load_model(folders["gpt2"][0])
    for name, param in model.canonical_parameters():
        if name.endswith(".bias"):
            param.data.zero_()
    assert same(path, model)


def in_several_files(exported, folder, code="F32"):
    """The same weights as save_pretrained writes a large model: several files and an index."""
    folder.mkdir()
    shutil.copy(exported / "config.json", folder)
    entries = read_header(exported / MODEL)
    file_of = {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        tensors = {name: checkpoint.read_tensor(entry).to(DTYPES[code])
                   for name, entry in list(entries.items())[i::2]}
        head, _ = checkpoint.make_header({n: x.shape for n, x in tensors.items()}, code)
        body = [x.view(torch.uint8).numpy().tobytes() for x in tensors.values()]
        (folder / file).write_bytes(head + b"".join(body))
        file_of.update(dict.fromkeys(tensors, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return folder


@pytest.mark.parametrize("code", ["BF16", "F16"])
def test_several_files_of_16_bits_are_read(code, folders, tmp_path):
    folder = in_several_files(folders["untied"][1], tmp_path / "several", code)
    assert same(folder, load_model(folders["untied"][0]).to(DTYPES[code]))


NORM, WPE = "transformer.ln_f.weight", "transformer.wpe.weight"
TENSORS = {  # what becomes of the tensors of a GPT-2: what is said
    "missing": (lambda tensors: tensors.pop(NORM), f"tensor {NORM}: missing"),
    "one bias": (lambda tensors: tensors.pop("transformer.ln_f.bias"), "ln_f.bias: missing"),
    "superfluous": (put("transformer.h.2.ln_1.weight", (16,), [1] * 16),
                    "tensor transformer.h.2.ln_1.weight: a model of these flags has none"),
    "wrong shape": (put(NORM, (4, 4), [1] * 16), f"tensor {NORM}: F32 [4, 4], not "),
    "no shape": (put(WPE, (), [1]), f"tensor {WPE}: F32 [], not "),
    "few positions": (put(WPE, (7, 16), [1] * 112), f"tensor {WPE}: F32 [7, 16], not "),
    "untied": (put("lm_head.weight", (VOCAB, 16), [1] * 16 * VOCAB),
               "tensor lm_head.weight: not the embedding, but this model ties them"),
    "nan": (put(NORM, (16,), [1] * 15 + [np.nan]), f"tensor {NORM}: not finite")}


@pytest.mark.parametrize("how", TENSORS)
def test_other_tensors_than_the_models_are_refused_by_name(how, folders, tmp_path):
    change, says = TENSORS[how]
    path = shutil.copy(folders["gpt2"][0] / MODEL, tmp_path / "weights.safetensors")
    rewrite(path, change)
    with pytest.raises(ValueError) as error:
        same(path, load_model(folders["gpt2"][0]))
    said = str(error.value)
    assert said.startswith(f"{path}, ") and says in said and "\n" not in said, said


def edited(name, **given):
    """A function that changes fields of a JSON file in a folder."""
    def edit(folder):
        content = json.loads((folder / name).read_text())
        content.update(given)
        (folder / name).write_text(json.dumps(content))
    return edit


def spoiled(old, new):
    """A function that changes bytes of the tensors' file in a folder."""
    def spoil(folder):
        data = (folder / MODEL).read_bytes()
        assert old in data
        (folder / MODEL).write_bytes(data.replace(old, new, 1))
    return spoil


def cut(folder):
    os.truncate(folder / MODEL, (folder / MODEL).stat().st_size - 2)


def pickled(folder):
    (folder / MODEL).rename(folder / "pytorch_model.bin")


def named(file):
    return edited(INDEX, weight_map={"model.norm.weight": file})


DAMAGES = {  # what happens to a folder of an untied Llama: what the run says
    "damaged header": (spoiled(b'"shape"', b'"shape}'), "header is damaged"),
    "overlapping": (spoiled(b'offsets": [4288', b'offsets": [4284'),
                    "tensor model.layers.0.input_layernorm.weight: "),
    "cut": (cut, "cut off at the end of the file"),
    "a pickle": (pickled, "pytorch_model.bin: a pickle, which may run code, is never loaded"),
    "no file": (lambda folder: (folder / MODEL).unlink(), "model.safetensors: No such file"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: "),
    "other heads": (edited("config.json", num_key_value_heads=4), "k_proj.weight: F32 [8, 16], "),
    "deeper": (edited("config.json", num_hidden_layers=3), "tensor model.layers.2."),
    "tied": (edited("config.json", tie_word_embeddings=True), "lm_head.weight: not the embeddi"),
    "another arch": (edited("config.json", model_type="qwen3"), "q_norm.weight: missing"),
    "an index of no file": (named("b.safetensors"), "b.safetensors: No such file"),
    "an index of nothing": (edited(INDEX, weight_map=7), f"{INDEX}: its weight_map is 7, not an "),
    "an index out": (named("../a"), f"{INDEX}: its model.norm.weight is '../a', not a file's n"),
    "an index to a device": (named("/dev/zero"), "weight is '/dev/zero', not a file's name"),
    "an index of zeros": (named("a\0b"), "not a file's name"),
    "an index of numbers": (named(7), "its model.norm.weight is 7, not a file's name")}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_folder_is_one_line_with_file_and_tensor(how, corpus, folders, tmp_path):
    damage, says = DAMAGES[how]
    copy = in_several_files if how.startswith("an index") else shutil.copytree
    folder = copy(folders["untied"][1], tmp_path / "folder")
    damage(folder)
    with pytest.raises(ValueError) as error:
        cfg = parse(["--init-from", str(folder)])
        check_layout(cfg, 1)
        shape = config_of(cfg, VOCAB)
        shapes = shapes_of(on_meta(shape))
        value = values(folder, shapes, shape)
        [value(name) for name in shapes]
    said = str(error.value)
    assert said.startswith(str(folder)) and says in said and "\n" not in said, said


def test_train_py_refuses_files_in_one_line_and_runs_no_pickle(corpus, folders, tmp_path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model": Code()}, tmp_path / "ckpt.pt")  # nanoGPT's own
    folder = shutil.copytree(folders["untied"][1], tmp_path / "cut")
    cut(folder)
    other = shutil.copytree(folders["untied"][1], tmp_path / "other")
    edited("config.json", hidden_act="gelu")(other)
    for path, says in ((tmp_path / "ckpt.pt", "a pickle, which may run code, is never load"),
                       (folder / MODEL, "cut off at the end of the file"),
                       (other, "its hidden_act is 'gelu'; 'silu' or ")):
        line = refused("train.py", *flags(corpus, tmp_path / "out", init_from=path, tp=2))
        assert line.startswith(f"train.py: {path}") and says in line
    assert not (tmp_path / "ran").exists()


def test_sizes_that_no_shape_shows_are_compared_with_config_json(folders, tmp_path):
    for kind, given, says in (("gpt2", {"n_head": 2}, "its n_head is 2, this run's is 4"),
                              ("llama", {"rope_theta": 9}, "its rope_theta is 9.0, this run's")):
        folder = shutil.copytree(folders[kind][1], tmp_path / kind)
        edited("config.json", **given)(folder)
        with pytest.raises(checkpoint.CheckpointError, match=f"{folder}: {says}"):
            same(folder, load_model(folders[kind][0]))


PLACES = {  # what lies in the place of a file: how it comes there
    "a pipe": os.mkfifo, "a device": lambda path: os.symlink("/dev/zero", path),
    "a folder": os.mkdir, "nothing": Path.touch,
    "zeros": lambda path: (path.touch(), os.truncate(path, 40 * 10**9))}  # none on the disk


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name,read", [
    ("config.json", sizes_of), (INDEX, read_entries), (MODEL, read_entries),
    (MANIFEST, checkpoint.read_manifest)], ids=["config", "index", "tensors", "manifest"])
def test_what_is_no_file_of_its_kind_is_refused_by_its_name(place, name, read, tmp_path):
    PLACES[place](tmp_path / name)
    with pytest.raises((ValueError, OSError)) as error:
        read(tmp_path)
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind,forged", [
    ("gpt2", {"n_layer": 10**7}), ("gpt2", {"n_embd": 10**7}), ("gpt2", {"n_experts": 10**7}),
    ("gpt2", {"vocab_size": 10**9}), ("llama", {"n_hidden": 10**9}), ("gpt2", {"n_layer": "two"}),
    ("gpt2", {"n_head": 0}), ("llama", {"head_dim": -2}), ("llama", {"rope_scaling": 5})], ids=str)
def test_a_forged_manifest_builds_no_model_that_is_larger_than_its_file(kind, forged, folders,
                                                                        tmp_path):
    folder = shutil.copytree(folders[kind][0], tmp_path / "one")
    manifest = checkpoint.read_manifest(folder)
    manifest["model"].update(forged)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    says = f"^{folder}/({MODEL}, tensor transformer|{MANIFEST}: damaged, no model has its sizes)"
    with pytest.raises(checkpoint.CheckpointError, match=says):
        load_model(folder)


# ---- export ----


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(corpus, folders, tmp_path, capsys,
                                                                monkeypatch):
    usual = shutil.copytree(folders["gpt2"][0], tmp_path / "step-00000001")
    (tmp_path / "e").mkdir()
    mixture = saved(small("--experts 4", corpus, tmp_path / "e"))
    before = sorted(tmp_path.rglob("*"))
    for out, to, says in (
            (usual, usual, f"--to {usual} is the place of a checkpoint; name another folder"),
            (usual, usual / "hf", "is the place of a checkpoint"),
            (usual, tmp_path / "step-00000002", "is the place of a checkpoint"),
            (usual, tmp_path / "e", f"{tmp_path}/e: File exists"),
            (mixture, tmp_path / "hf", f"{mixture}: has experts"),
            (tmp_path / "none", tmp_path / "hf", "none: no complete checkpoint there")):
        argv = ["weights.py", "--out", out, "--to", to]
        assert says in said_by(weights.main, argv, capsys, monkeypatch)
    assert sorted(tmp_path.rglob("*")) == before


# ---- sampling ----


@pytest.mark.parametrize("shape", [
    GPTConfig(VOCAB, 8, 2, 2, 12), GPTConfig(VOCAB, 8, 2, 2, 12, n_experts=4),
    LlamaConfig(VOCAB, 8, 2, 6, 24, n_kv_head=2, n_hidden=38, tied=False),
    LlamaConfig(VOCAB, 8, 2, 6, 24, n_kv_head=2, n_hidden=38, head_dim=6, qk_norm=True)])
def test_sampling_with_kept_keys_is_sampling_without_them(shape):
    model = build(shape, dtype=torch.double, kind=kind_of(shape))
    for param in model.parameters():
        param.data.mul_(5)  # so that positions matter
    got = sample.generate(model, [1, 2, 3], 12, samples=3, temperature=5.0, top_k=20)
    out, rng = torch.tensor([[1, 2, 3]] * 3), torch.Generator().manual_seed(1337)
    for _ in range(12):  # beyond the window of 8
        top, index = model(out[:, -8:])[:, -1].topk(20)
        pick = torch.multinomial((top / 5).softmax(1), 1, generator=rng)
        out = torch.cat([out, index.gather(1, pick)], 1)
    assert out.tolist() == got and got[0] != got[1]


def test_a_seed_decides_all_draws_of_sample(tmp_path, capsys, monkeypatch):
    (tmp_path / "text").write_text("def f(x): return x\n" * 100)
    prepare([tmp_path / "text"], tmp_path / "data", "bytes")
    cfg = small("", str(tmp_path / "data"), tmp_path)
    shape = config_of(cfg, 256)
    trainer = train.Trainer(cfg, Mesh(dp=1), shape, train.from_seed(shape, 0))
    checkpoint.save(trainer, 0, tmp_path / "data")

    def said(*more):
        argv = ["sample.py", "--out", tmp_path, "--max-tokens", 20, "--samples", 2, *more]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        capsys.readouterr()
        sample.main()
        return capsys.readouterr().out

    usual = said()
    assert usual.count("def ") == usual.count("\n---\n") == 2
    assert said("--seed", 1337) == usual and said("--seed", 1) != usual
    assert said("--seed", 1) == said("--seed", 1)
    assert said("--top-k", 1) == said("--temperature", 0) != usual  # both: the likeliest
    argv = ["sample.py", "--out", tmp_path, "--prompt", ""]
    assert "--prompt '' must not be empty" in said_by(sample.main, argv, capsys, monkeypatch)


def test_another_programs_manifest_above_the_new_folder_does_not_matter(folders, tmp_path):
    for folder in (tmp_path, tmp_path / "a"):
        folder.mkdir(exist_ok=True)
        (folder / MANIFEST).write_text("{}")
    export(folders["gpt2"][0], tmp_path / "a" / "hf")
    assert same(tmp_path / "a" / "hf", load_model(folders["gpt2"][0]))
