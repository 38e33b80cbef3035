"""Weights from and for other programs, and sampling."""

import json
import shutil

import numpy as np
import pytest
import tokenizers
import torch

import sample
from data.batches import load_tokenizer
from data.prepare import prepare
from data.tokenizer import tokenizer_files
from experts import kind_of
from model import build
from run import checkpoint, tensorfile
from run import export as export_file
from run.weights import CONV1D, load_model, read_weights
from sizes import GPTConfig
from tests.harness import VOCAB
from tests.runs import Run, flags, one_line, rewrite


def nanogpt_shapes(V, S, L, C):
    """state_dict of nanoGPT's GPT with biases (github.com/karpathy/nanoGPT, model.py)."""
    block = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "ln_2": (C,),
             "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    parts = {**{f"h.{i}.{k}": v for i in range(L) for k, v in block.items()}, "ln_f": (C,)}
    return {"lm_head.weight": (V, C), "transformer.wte.weight": (V, C),
            "transformer.wpe.weight": (S, C),
            **{f"transformer.{k}.weight": v for k, v in parts.items()},
            **{f"transformer.{k}.bias": v[:1] for k, v in parts.items()}}


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
            if name.endswith(CONV1D):
                data = np.frombuffer(data).reshape(shape).T.tobytes()
                shape = shape[::-1]
            tensors[name.removeprefix("transformer.")] = shape, data
        tensors["h.0.attn.bias"] = (1, 1, 8, 8), bytes(512)

    ours = trained / "step-00000004" / checkpoint.MODEL
    path = shutil.copy(ours, tmp_path / "weights.safetensors")
    if kind == "gpt2":
        rewrite(path, as_hugging_face_has_it)
    run = Run(4, flags(corpus, tmp_path / "out", pp=2, tp=2, steps=0, init_from=path), tmp_path)
    assert run.wait() == [0] * 4, run.read()
    assert (tmp_path / "out/step-00000000" / checkpoint.MODEL).read_bytes() == ours.read_bytes()
    other = Run(1, flags(corpus, tmp_path / "o", n_embd=12, init_from=path), tmp_path)
    assert other.wait() == [2] and "wte.weight: F64 [67, 8], not " in other.read()


def _untied(tensors):
    shape, data = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = shape, data[::-1]


OTHERS = {  # what becomes of the file's tensors -> what the run says, or nothing
    "compiled": (lambda tensors: [tensors.update({"_orig_mod." + name: tensors.pop(name)})
                                  for name in list(tensors)], ""),
    "head only": (lambda tensors: tensors.pop("transformer.wte.weight"), ""),
    "untied": (_untied, "lm_head.weight is not transformer.wte.weight; this model ties them"),
    "deeper": (lambda tensors: tensors.update({"transformer.h.2.ln_1.weight": tensors[
        "transformer.ln_f.weight"]}), "has transformer.h.2.ln_1.weight, which a model of these"),
    "no bias": (lambda tensors: tensors.pop("transformer.ln_f.bias"),
                "tensor transformer.ln_f.bias: missing"),
    "heads": (None, "config.json: its n_head is 4, here it is 2"),
    "activation": (None, "config.json: its activation_function is relu, here it is gelu_new"),
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
        (tmp_path / "config.json").write_text(json.dumps(value))
    run = Run(1, flags(corpus, tmp_path / "out", steps=0, init_from=path), tmp_path)
    assert run.wait() == [2 if says else 0] and says in run.read(), run.read()
    assert run.read().count("\n") == bool(says)
    if not says:
        assert (tmp_path / "out/step-00000000" / checkpoint.MODEL).read_bytes() == ours.read_bytes()


def test_a_checkpoint_becomes_a_hugging_face_folder(trained, tmp_path):
    new = tmp_path / "new"
    said = export_file.export(trained / "step-00000004", new)
    assert "without a tokenizer: the tokenizer of" in said and "256 tokens, the model 67" in said
    model = load_model(trained / "step-00000004")
    shapes = {name: p.shape for name, p in model.canonical_parameters()}
    get = read_weights(new / "model.safetensors", shapes, model.config)
    assert all(torch.equal(get(name), p.data) for name, p in model.canonical_parameters())
    theirs = pytest.importorskip("transformers").GPT2LMHeadModel.from_pretrained(new).eval()
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert (theirs(ids).logits - model(ids)).abs().max() < 1e-5


def test_a_run_on_nanogpts_characters_ends_without_a_tokenizer_and_says_so(corpus, tmp_path):
    """Ids of characters are no ids of GPT-2: neither a sample nor an export may take its tokenizer.
    """
    folder = tmp_path / "characters"
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        shutil.copy(f"{corpus}/{name}", folder)
    (folder / "meta.pkl").touch()
    run = Run(1, flags(folder, tmp_path / "out", steps=1, eval_interval=1), tmp_path)
    assert run.wait() == [0], run.read()
    says = f"{folder}: its tokens are characters (meta.pkl)"
    assert f"a sample:\n  | (none: {says}" in run.read("stdout")
    said = export_file.export(tmp_path / "out/step-00000001", tmp_path / "new")
    assert f"; without a tokenizer: {says}" in said and said.count("\n") == 0
    written = json.loads((tmp_path / "new/config.json").read_text())
    assert written["eos_token_id"] is None  # token 0 is a character, mostly the line break


def test_a_damaged_manifest_is_one_line_without_another_commands_flag(trained, tmp_path, capsys,
                                                                       monkeypatch):
    folder = shutil.copytree(trained / "step-00000004", tmp_path / "one")
    (folder / checkpoint.MANIFEST).write_text("{}")
    for argv in (["sample.py", "--out", folder], ["export.py", "--out", folder, "--to", "new"]):
        main = sample.main if argv[0] == "sample.py" else export_file.main
        error = one_line(main, argv, capsys, monkeypatch)
        assert "manifest.json: damaged; take another checkpoint" in error


def test_hugging_faces_tokenizers_opens_ours(tmp_path):
    text = "a = aa + aaa  # 3 + 33\n\n\tif a: 'héß 你好 😀'\n" * 40
    (tmp_path / "text").write_text(text)
    prepare([tmp_path / "text"], tmp_path / "data", vocab_size=280)
    files = tokenizer_files(tmp_path / "data", GPTConfig(280))
    (tmp_path / "tokenizer.json").write_text(json.dumps(files["tokenizer.json"]))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for words in (text, "aaaaaaa\t\t aaaa 333  \n\n \x00 ñ"):
        ids = load_tokenizer(tmp_path / "data").encode_ordinary(words)
        assert theirs.encode(words).ids == ids and theirs.decode(ids) == words


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
