"""Weights of other programs are taken name by name or refused in one line, ours become theirs.
Sampling."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sample
import train
from data.files import FileError
from experts import kind_of, on_meta, shapes_of
from mesh import Mesh
from model import build, from_seed
from run import checkpoint, weights
from run.checkpoint import MANIFEST, MODEL, initial_values, load_model
from run.flags import check_layout, parse
from run.weights import INDEX, export, read_entries, sizes_of, values
from sizes import GPTConfig, LlamaConfig, config_of
from tests.harness import VOCAB, edited, flags, flags_of, one_line, refused

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
    return flags_of([*usual.split(), *words.split()], corpus, n_hidden=21, **sizes)


def saved(cfg):
    """A checkpoint of random weights. (Biases of 0 and norms of 1 would hide errors.)"""
    config = config_of(cfg, VOCAB)
    trainer = train.Trainer(cfg, Mesh(dp=1), config, from_seed(config, 0))
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


def same(path, model):
    """Has the file, or the folder, this model's weights, bit for bit?"""
    params = dict(model.canonical_parameters())
    value = values(path, {name: param.shape for name, param in params.items()}, model.config)
    return all(torch.equal(value(name), param) for name, param in params.items())


# ---- Hugging Face's folders ----


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
        config = config_of(cfg, VOCAB)
        trainer = train.Trainer(cfg, Mesh(dp=1), config, initial_values(cfg, config, None))
        again = checkpoint.save(trainer, 0)
        assert (again / MODEL).read_bytes() == (before / MODEL).read_bytes()


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
    ({}, {"n_layer": 3, "n_head": 4, "n_embd": 64, "n_hidden": 96, "n_kv_head": 4, "head_dim": 0,
          "norm_eps": 1e-6, "untied": True, "rope_theta": 10000.0, "rope_scaling": ""}),
    ({"rope_scaling": LLAMA3}, {"rope_scaling": "8.1234567,1,4,1048576"}),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, {"rope_scaling": "2.5"}),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 500}}, {"rope_theta": 500.0}),
    ({"model_type": "qwen2", "num_key_value_heads": 2}, {"arch": "qwen2", "n_kv_head": 2}),
    ({"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 4},
     {"arch": "qwen3", "head_dim": 128, "n_kv_head": 4}),
    ({"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": None},
     {"head_dim": 0, "n_kv_head": 4})],
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
    ({"hidden_act": "gelu"}, "its hidden_act is 'gelu'; 'silu' or 'swish' can be read"),
    ({"model_type": "gemma"}, "its model_type is gemma; gpt2, llama, qwen2, qwen3 can be read"),
    *(({"hidden_size": value}, f"its hidden_size is {value!r:.40}, not a whole number above 0, up")
      for value in (None, True, "32", 0, 10**400)),
    ({"rope_theta": float("nan")}, "its rope_theta is nan, not a number above 0"),
    ({"rope_scaling": "default"}, "its rope_scaling is 'default', not an object"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "its rope_type is dynamic; default, "),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "its rope_scaling has partial_rotary_f"),
    ({"use_sliding_window": True}, "its use_sliding_window is True; False can be read"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "its layer_types is ['full_att"),
    ({**GPT2, "activation_function": "relu"}, "its activation_function is 'relu'; 'gelu_new' or "),
    ({**GPT2, "layer_norm_epsilon": 1e-6}, "its layer_norm_epsilon is 1e-06; 1e-05 can be read"),
    ({**GPT2, "scale_attn_weights": False}, "its scale_attn_weights is False; True can be read"),
    ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "its scale_attn_by_inverse_layer_idx is ")],
    ids=lambda x: str(x)[:60])
def test_config_json_of_another_model_is_one_line_with_field_and_value(given, says, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, **given}))
    with pytest.raises(ValueError) as error:
        sizes_of(tmp_path)
    assert str(error.value).startswith(f"{path}: {says}") and "\n" not in str(error.value)


# ---- files of tensors ----

NORM, WPE = "transformer.ln_f.weight", "transformer.wpe.weight"


def rewrite(path, change):
    """A file again, with change({name: tensor}) in it."""
    found = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(found)
    save_file(found, path)


def renamed(change):
    return lambda found: [found.update({change(name): found.pop(name)}) for name in list(found)]


def put(name, tensor):
    return lambda found: found.update({name: tensor})


def longer(found):
    found[WPE] = torch.cat([found[WPE], torch.zeros(1, 16)])


@pytest.mark.parametrize("change", [
    renamed(lambda name: f"_orig_mod.{name}"),  # nanoGPT's own, compiled
    renamed(lambda name: f"module.{name.replace('.attn.', '.attn._checkpoint_wrapped_module.')}"),
    longer,
    lambda found: found.pop("transformer.wte.weight"),  # the head alone
    lambda found: found.pop("lm_head.weight"),
    put("transformer.h.0.attn.bias", torch.ones(1, 1, 2, 2))])
def test_a_file_under_nanogpts_names_is_read(change, folders, tmp_path):
    path = shutil.copy(folders["gpt2"][0] / MODEL, tmp_path / "weights.safetensors")
    rewrite(path, change)
    assert same(path, load_model(folders["gpt2"][0]))


def test_biases_that_nanogpt_leaves_out_are_zeros(folders, tmp_path):
    path = shutil.copy(folders["gpt2"][0] / MODEL, tmp_path / "weights.safetensors")
    rewrite(path, lambda found: [found.pop(name) for name in list(found) if name.endswith("bias")])
    model = load_model(folders["gpt2"][0])
    for name, param in model.canonical_parameters():
        if name.endswith("bias"):
            param.data.zero_()
    assert same(path, model)


def in_several_files(exported, folder, dtype=torch.float):
    """The same weights as save_pretrained writes a large model: several files and an index."""
    folder.mkdir()
    shutil.copy(exported / "config.json", folder)
    found = {name: tensor.to(dtype) for name, tensor in load_file(exported / MODEL).items()}
    file_of = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(found)}
    for file in set(file_of.values()):
        save_file({name: found[name] for name in found if file_of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_several_files_of_16_bits_are_read(dtype, folders, tmp_path):
    folder = in_several_files(folders["untied"][1], tmp_path / "several", dtype)
    assert same(folder, load_model(folders["untied"][0]).to(dtype))


def tensors(change):
    """A function that changes {name: (shape, bytes)} in a folder's model.safetensors."""
    return lambda folder: rewrite(folder / MODEL, change)


def cut(folder):
    os.truncate(folder / MODEL, (folder / MODEL).stat().st_size - 2)


def pickled(folder):
    (folder / MODEL).rename(folder / "pytorch_model.bin")


def named(file):
    return edited(INDEX, weight_map={"model.norm.weight": file})


DAMAGES = {  # what happens to a folder of Hugging Face, of this kind: what the run says
    "missing": ("gpt2", tensors(lambda found: found.pop(NORM)), f"tensor {NORM}: missing"),
    "one bias": ("gpt2", tensors(lambda found: found.pop("transformer.ln_f.bias")),
                 "tensor transformer.ln_f.bias: missing"),
    "wider MLP": ("gpt2", tensors(put("transformer.h.0.mlp.c_fc.bias", torch.ones(99))),
                  "mlp.c_fc.bias: F32 [99], not "),
    "superfluous": ("gpt2", tensors(put("transformer.h.2.ln_1.weight", torch.ones(16))),
                    "tensor transformer.h.2.ln_1.weight: a model of these flags has none"),
    "few positions": ("gpt2", tensors(put(WPE, torch.ones(7, 16))), f"{WPE}: F32 [7, 16], not "),
    "two heads": ("gpt2", tensors(put("lm_head.weight", torch.ones(VOCAB, 16))),
                  "tensor lm_head.weight: not the embedding, but this model ties them"),
    "nan": ("gpt2", tensors(put(NORM, torch.full((16,), torch.nan))), f"{NORM}: not finite"),
    "cut": ("untied", cut, "cut off at the end of the file"),
    "a pickle": ("untied", pickled, "bin: a pickle, which may run code, is never loaded"),
    "no file": ("untied", lambda folder: (folder / MODEL).unlink(), f"{MODEL}: No such file"),
    "other heads": ("untied", edited("config.json", num_key_value_heads=4),
                    "k_proj.weight: F32 [8, 16], "),
    "an index of no file": ("several", named("b.safetensors"), "b.safetensors: No such file"),
    "an index of nothing": ("several", edited(INDEX, weight_map=7), "its weight_map is 7, not an "),
    "an index of zeros": ("several", named("a\0b"), "a\0b: embedded null byte"),
    "an index of numbers": ("several", named(7), "/7: No such file")}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_folder_is_one_line_with_file_and_tensor(how, folders, tmp_path):
    kind, damage, says = DAMAGES[how]
    folder = tmp_path / "folder"
    if kind == "several":
        in_several_files(folders["untied"][1], folder)
    else:
        shutil.copytree(folders[kind][1], folder)
    damage(folder)
    with pytest.raises(ValueError) as error:
        cfg = parse(["--init-from", str(folder)])
        check_layout(cfg, 1)
        config = config_of(cfg, VOCAB)
        shapes = shapes_of(on_meta(config))
        value = values(folder, shapes, config)
        [value(name) for name in shapes]
    said = str(error.value)
    assert said.startswith(str(folder)) and says in said and "\n" not in said, said


def test_no_pickle_is_loaded(corpus, tmp_path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model": Code()}, tmp_path / "ckpt.pt")  # nanoGPT's own
    line = refused("train.py", *flags(corpus, tmp_path / "out", init_from=tmp_path / "ckpt.pt"))
    assert line.startswith(f"train.py: {tmp_path}/ckpt.pt: a pickle, which may run code, is never")
    assert not (tmp_path / "ran").exists()


def test_sizes_that_no_shape_shows_are_compared_with_config_json(folders, tmp_path):
    for kind, given, says in (("gpt2", {"n_head": 2}, "its n_head is 2, this run's is 4"),
                              ("llama", {"rope_theta": 9}, "its rope_theta is 9.0, this run's")):
        folder = shutil.copytree(folders[kind][1], tmp_path / kind)
        edited("config.json", **given)(folder)
        with pytest.raises(FileError, match=f"{folder}: {says}"):
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
    with pytest.raises(FileError) as error:
        read(tmp_path)
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind,forged", [
    ("gpt2", {"n_layer": 10**7}), ("gpt2", {"vocab_size": 10**9}), ("gpt2", {"n_layer": "two"}),
    ("gpt2", {"n_head": 0}), ("llama", {"head_dim": -2}), ("llama", {"rope_scaling": 5})], ids=str)
def test_a_forged_manifest_builds_no_model_that_is_larger_than_its_file(kind, forged, folders,
                                                                        tmp_path):
    folder = shutil.copytree(folders[kind][0], tmp_path / "one")
    manifest = checkpoint.read_manifest(folder)
    manifest["model"].update(forged)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    says = f"^{folder}/({MODEL}, tensor transformer|{MANIFEST}: damaged, no model has its sizes)"
    with pytest.raises(FileError, match=says):
        load_model(folder)


# ---- export ----


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(corpus, folders, tmp_path, capsys,
                                                                monkeypatch):
    usual, mixture = folders["gpt2"][0], saved(small("--experts 4", corpus, tmp_path))
    before = sorted(tmp_path.rglob("*"))
    for out, to, says in (
            (usual, usual, f"{usual}: File exists"),
            (mixture, tmp_path / "hf", f"{mixture}: has experts"),
            (tmp_path / "none", tmp_path / "hf", "none: no complete checkpoint there")):
        argv = ["weights.py", "--out", out, "--to", to]
        assert says in one_line(weights.main, argv, capsys, monkeypatch)
    assert sorted(tmp_path.rglob("*")) == before


# ---- sampling ----


@pytest.mark.parametrize("config", [
    GPTConfig(VOCAB, 8, 2, 2, 12), GPTConfig(VOCAB, 8, 2, 2, 12, n_experts=4),
    LlamaConfig(VOCAB, 8, 2, 6, 24, n_kv_head=2, n_hidden=38, tied=False),
    LlamaConfig(VOCAB, 8, 2, 6, 24, n_kv_head=2, n_hidden=38, head_dim=6, qk_norm=True)])
def test_sampling_with_kept_keys_is_sampling_without_them(config):
    """... and the seed decides all draws."""
    model = build(config, dtype=torch.double, kind=kind_of(config))
    for param in model.parameters():
        param.data.mul_(5)  # so that positions matter

    def generated(**more):
        return sample.generate(model, [1, 2, 3], 12, **{
            "samples": 3, "temperature": 5.0, "top_k": 20, "seed": 7, **more})

    out, rng = torch.tensor([[1, 2, 3]] * 3), torch.Generator().manual_seed(7)
    for _ in range(12):  # beyond the window of 8
        top, index = model(out[:, -8:])[:, -1].topk(20)
        pick = torch.multinomial((top / 5).softmax(1), 1, generator=rng)
        out = torch.cat([out, index.gather(1, pick)], 1)
    assert out.tolist() == generated() and out[0].tolist() != out[1].tolist()
    assert generated(seed=1) != generated()
    assert generated(temperature=0) == generated(top_k=1)  # both: the likeliest
