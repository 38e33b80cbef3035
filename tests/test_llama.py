"""Llama and Qwen: their formulas, Hugging Face's models, folders both ways, sampling, messages.
(That each layout equals one process: test_layouts.py.)"""

import json
import math
import shutil

import pytest
import torch

import sample
import train
from data.batches import Data
from experts import kind_of
from llama import LlamaAttention
from model import build
from run import checkpoint, tensorfile
from run import export as export_file
from run.config import check, check_layout, parse
from run.hugging_face import flags_of_folder
from run.weights import INDEX, load_model, read_weights
from sizes import LlamaConfig, config_of
from tests.harness import VOCAB, close, config
from tests.pool import pool
from tests.runs import Run, flags, one_line

SMALL = LlamaConfig(VOCAB, block_size=8, n_layer=2, n_head=6, n_embd=24, n_kv_head=2, n_hidden=37,
                    tied=False)
STRETCHED = "4,1,4,6"  # --rope-scaling


def large(config, dtype=torch.double):
    """A model with weights so large that positions and norms matter to every logit."""
    model = build(config, dtype=torch.double, kind=kind_of(config))
    generator = torch.Generator()
    for i, (_, param) in enumerate(model.canonical_parameters()):
        noise = torch.randn(param.shape, dtype=torch.double, generator=generator.manual_seed(i))
        param.data.add_(0.5 * noise)
    return model.to(dtype)


def by_formula(model, ids):
    """Logits (S, V), token by token and head by head, in float64. Rotary positions as
    multiplication by a complex number."""
    config = model.config
    p = {name: param.detach().double() for name, param in model.canonical_parameters()}
    hs = config.head_dim or config.n_embd // config.n_head
    turns = []  # (S, hs/2): exp(i angle)
    for position in range(len(ids)):
        row = []
        for pair in range(hs // 2):
            frequency = config.rope_theta ** (-2 * pair / hs)
            if "," not in config.rope_scaling:
                frequency /= float(config.rope_scaling or 1)
            else:  # the formula of Llama 3.1's reference code, by wavelength
                factor, low, high, original = map(float, config.rope_scaling.split(","))
                wavelength = 2 * math.pi / frequency
                if wavelength > original / low:
                    frequency /= factor
                elif wavelength >= original / high:
                    smooth = (original / wavelength - low) / (high - low)
                    frequency = (1 - smooth) * frequency / factor + smooth * frequency
            row.append(complex(math.cos(position * frequency), math.sin(position * frequency)))
        turns.append(row)
    turns = torch.tensor(turns, dtype=torch.complex128)

    def norm(name, x):
        return x / (x.square().mean(1, keepdim=True) + config.norm_eps).sqrt() * p[name + ".weight"]

    def turned(x):  # (S, hs)
        pairs = torch.complex(x[:, : hs // 2], x[:, hs // 2 :]) * turns
        return torch.cat([pairs.real, pairs.imag], 1)

    def attention(name, x):
        rows = x @ p[name + ".c_attn.weight"].T
        if config.qkv_bias:
            rows += p[name + ".c_attn.bias"]
        rows = [*rows.split(hs, 1)]  # heads of q, then of k, then of v
        n_kv = config.n_kv_head
        for i in range(config.n_head + n_kv):
            if config.qk_norm:
                rows[i] = norm(name + (".ln_q" if i < config.n_head else ".ln_k"), rows[i])
        heads = []
        for i in range(config.n_head):
            shared = i * n_kv // config.n_head
            q, k = turned(rows[i]), turned(rows[config.n_head + shared])
            v = rows[config.n_head + n_kv + shared]
            weights = (q @ k.T / math.sqrt(hs)).exp().tril()
            heads.append(weights @ v / weights.sum(1, keepdim=True))
        return torch.cat(heads, 1) @ p[name + ".c_proj.weight"].T

    x = p["transformer.wte.weight"][ids]
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        x = x + attention(block + ".attn", norm(block + ".ln_1", x))
        hidden = norm(block + ".ln_2", x) @ p[block + ".mlp.c_fc.weight"].T
        gate, up = hidden[:, : config.n_hidden], hidden[:, config.n_hidden :]
        x = x + (gate / (1 + (-gate).exp()) * up) @ p[block + ".mlp.c_proj.weight"].T
    head = "transformer.wte.weight" if config.tied else "lm_head.weight"
    return norm("transformer.ln_f", x) @ p[head].T


KINDS = {"untied": {}, "tied": {"tied": True}, "multi-query": {"n_kv_head": 1},
         "a key head each": {"n_kv_head": 6}, "stretched": {"rope_scaling": STRETCHED},
         # the first of the two pairs turns fast (4.8 times in 30 tokens), or 2.4 times in 15
         "one pair stays": {"rope_scaling": "4,1,4,30"},
         "one pair between": {"rope_scaling": "4,1,4,15"},
         "linear": {"rope_scaling": "2.5"},
         "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True, "head_dim": 6},
         "narrow heads": {"head_dim": 2}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_llama_by_its_formulas(kind):
    model = large(LlamaConfig(**{**vars(SMALL), **KINDS[kind]}))
    ids = torch.arange(8) * 5 % VOCAB
    logits = by_formula(model, ids)
    close(model(ids.view(1, 8)).detach()[0], logits, "logits")
    loss = sum(row.logsumexp(0) - row[i] for row, i in zip(logits, ids, strict=True))
    close(model(ids.view(1, 8), ids.view(1, 8)).detach(), loss, "summed loss")


def test_angles_of_late_positions_have_32_bits_in_a_16_bit_model():
    """Attention depends on differences of positions only. In bfloat16, 1000 and 1001 are equal."""
    attention = large(SMALL).layers[1].attn.bfloat16()
    x = torch.randn(1, 8, SMALL.n_embd, generator=torch.Generator().manual_seed(0)).bfloat16()
    early = attention(x)
    attention.positions = lambda x: torch.arange(1000, 1000 + x.size(1))
    late = attention(x)
    assert (late - early).norm() < 2**-5 * early.norm()


@pytest.mark.parametrize("hs", [2, 4])
def test_attention_gets_contiguous_heads_that_keep_no_memory_of_others(hs):
    """torch's fused attention wants the first; a view of v would keep q and k until backward."""
    attention = LlamaAttention(LlamaConfig(**{**vars(SMALL), "n_embd": 6 * hs, "n_kv_head": 1}))
    heads = []
    attention.attend = lambda *qkv: heads.extend(qkv) or qkv[0]
    attention(torch.randn(3, 5, 6 * hs))
    for x in heads:  # (B, nh, S, hs)
        assert x.transpose(1, 2).is_contiguous() and x.untyped_storage().nbytes() == x.nbytes


@pytest.mark.parametrize("head_dim,width", [(0, 24), (6, 36)])
def test_flops_and_parameters_are_counted_like_the_models(head_dim, width):
    config = LlamaConfig(**{**vars(SMALL), "head_dim": head_dim})
    model = build(config, kind=kind_of(config))
    blocks = sum(p.numel() for n, p in model.canonical_parameters()
                 if p.dim() > 1 and ".h." in n) // 2
    assert config.block_weights() == blocks
    costs = config.layer_costs()
    assert costs == [0, *[2 * blocks + 4 * width * 8] * 2, 2 * 24 * VOCAB]
    assert config.flops_per_token(0) == 12 * 2 * width * 8
    shape = LlamaConfig(**{**vars(SMALL), "n_hidden": 38, "n_experts": 5})
    experts = build(shape, kind=kind_of(shape)).canonical_parameters()
    held = sum(p.numel() for n, p in experts if ".h.0.mlp.experts." in n)
    assert held == 5 * shape.expert_parameters()


# ---- sampling ----


@pytest.mark.parametrize("more", [{}, {"n_experts": 4}, KINDS["qwen2"], KINDS["qwen3"]], ids=str)
def test_sampling_with_kept_keys_is_sampling_without_them(more):
    shape = {**vars(SMALL), "n_hidden": 38, **more}
    model = large(LlamaConfig(**shape))
    ids = [1, 2, 3]
    got = sample.generate(model, ids, 12, samples=3, temperature=5.0, top_k=20)
    out = torch.tensor([ids] * 3)
    generator = torch.Generator().manual_seed(1337)
    for _ in range(12):  # beyond the window of 8
        top, index = model(out[:, -8:])[:, -1].topk(20)
        pick = torch.multinomial((top / 5).softmax(1), 1, generator=generator)
        out = torch.cat([out, index.gather(1, pick)], 1)
    assert out.tolist() == got and got[0] != got[1]


def test_the_cache_holds_the_heads_of_keys_only():
    cache = sample.CachedAttention()
    q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 2, 4, 8)
    assert cache(q, k, k).shape == q.shape and cache.keys.shape == k.shape


# ---- Hugging Face ----


TRAINED = {  # kind of model -> its flags
    "untied": {"untied": True},
    "stretched": {"rope_scaling": STRETCHED, "rope_theta": 500.0, "norm_eps": 3e-6},
    "multi-query": {"tp": 1, "n_kv_head": 1},
    "narrow heads": {"head_dim": 2, "rope_scaling": "2.5"},
    "qwen2": {"arch": "qwen2"}, "qwen3": {"arch": "qwen3", "head_dim": 6, "untied": True}}


def _one_step(rank, cfg):
    """Trains a step, and returns the folder of the checkpoint."""
    trainer = train.Trainer(cfg, train.make_mesh(cfg, cfg.device), VOCAB)
    trainer.step(Data(cfg).training(cfg, 0, trainer.mesh), 4e-3)
    return checkpoint.save(trainer, 1, cfg.data)


@pytest.fixture(scope="module")
def folders(corpus, tmp_path_factory):
    """{kind: (a checkpoint of a run of one step, the folder that run.export made of it)}."""
    made = {}
    for kind, more in TRAINED.items():
        work = tmp_path_factory.mktemp("llama")
        given = {"arch": "llama", "n_head": 4, "n_embd": 16, "n_hidden": 21, "n_kv_head": 2,
                 "dtype": "float32", "steps": 1, "tp": 2, "block_size": 48, "n_layer": 2,
                 "batch_size": 4, "microbatches": 1, "out": str(work), **more}
        cfg = config(corpus, **given)
        saved = pool(check(cfg, 1), _one_step, cfg)[0]
        export_file.export(saved, work / "exported")
        made[kind] = saved, work / "exported"
    return made


@pytest.mark.parametrize("kind", TRAINED)
def test_an_exported_folder_starts_the_same_model_bit_for_bit(corpus, folders, tmp_path, kind):
    """Its sizes come from config.json. The run saves before a first step what it has read."""
    saved, exported = folders[kind]
    run = Run(1, ["--init-from", exported, "--data", corpus, "--out", tmp_path / "out", "--steps",
                  "0", "--device", "cpu", "--eval-interval", "0", "--batch-size", "12",
                  "--block-size", "48"], tmp_path)
    assert run.wait() == [0], run.read()
    again = (tmp_path / "out/step-00000000" / checkpoint.MODEL).read_bytes()
    assert again == (saved / checkpoint.MODEL).read_bytes()


@pytest.mark.parametrize("kind", TRAINED)
def test_logits_gradients_and_text_are_transformers(folders, kind):
    transformers = pytest.importorskip("transformers")
    saved, exported = folders[kind]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).float()
    ours = load_model(saved)
    ids = torch.arange(16).view(2, 8) * 3 % VOCAB
    logits = ours(ids)
    expected = theirs(ids).logits
    assert (logits - expected).norm() <= 2e-6 * expected.norm()
    for each in (logits, expected):
        each.logsumexp(-1).sum().backward()
    grads = dict(theirs.named_parameters())
    for name, param in ours.canonical_parameters():
        for theirs_name, part in export_file.tensors_of(name, param.grad, ours.config):
            want = grads[theirs_name].grad
            assert (part - want).norm() <= 1e-4 * want.norm(), name
    text = sample.generate(ours, [1, 2], 40, temperature=0)[0]
    greedy = theirs.generate(torch.tensor([[1, 2]]), max_new_tokens=40, do_sample=False,
                             eos_token_id=None, pad_token_id=0)
    assert text == greedy[0].tolist()


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_folder_of_transformers_is_its_model(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    more = {"head_dim": 8} if kind in ("Mistral", "Qwen3") else {}
    theirs = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=3, rope_theta=900.0, initializer_range=0.4,
        sliding_window=None, **more))
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(torch.randn_like(param) / 4)  # biases of 0 and norms of 1 would hide errors
    theirs.save_pretrained(tmp_path)
    config = config_of(parse(["--init-from", str(tmp_path)]), VOCAB)
    ours = kind_of(config)(config)
    get = read_weights(tmp_path, {name: p.shape for name, p in ours.canonical_parameters()}, config)
    for name, param in ours.canonical_parameters():
        param.data.copy_(get(name))
    ids = torch.arange(16).view(2, 8) * 3 % VOCAB
    expected = theirs(ids).logits
    assert (ours(ids) - expected).norm() <= 2e-6 * expected.norm()


def test_the_model_without_its_head_is_read_too(tmp_path):
    """LlamaModel.save_pretrained() writes no "model." before its names."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaModel(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True))
    theirs.save_pretrained(tmp_path)
    config = config_of(parse(["--init-from", str(tmp_path)]), VOCAB)
    shapes = {name: p.shape for name, p in kind_of(config)(config).canonical_parameters()}
    get = read_weights(tmp_path, shapes, config)
    assert torch.equal(get("transformer.wte.weight"), theirs.embed_tokens.weight)
    assert torch.equal(get("transformer.h.1.mlp.c_proj.weight"),
                       theirs.layers[1].mlp.down_proj.weight)


def test_tokens_and_positions_of_a_folder_are_kept_until_the_export(corpus, folders, tmp_path):
    """... also by a run that is resumed, and by one that starts from such a checkpoint."""
    shutil.copytree(folders["multi-query"][1], tmp_path / "hf")
    theirs = {"eos_token_id": [2, 3], "max_position_embeddings": 64}
    _edit_config(**theirs)(tmp_path / "hf")
    given = json.loads((tmp_path / "hf/config.json").read_text())
    del given["bos_token_id"]  # then transformers has one of its own
    (tmp_path / "hf/config.json").write_text(json.dumps(given))
    runs = {"first": ["--steps", 1, "--init-from", tmp_path / "hf"],
            "resumed": ["--steps", 2, "--resume", tmp_path / "first", "--arch", "llama",
                        *"--n-layer 2 --n-head 4 --n-embd 16 --n-kv-head 1".split()],
            "from ours": ["--steps", 0, "--init-from", tmp_path / "first/step-00000001", "--arch",
                          "llama", *("--n-layer 2 --n-head 4 --n-embd 16 "
                                     "--n-kv-head 1").split()]}
    for name, argv in runs.items():
        run = Run(1, [*argv, "--data", corpus, "--out", tmp_path / name, "--device", "cpu",
                      "--eval-interval", 0, "--batch-size", 4, "--block-size", 8], tmp_path)
        assert run.wait() == [0], run.read()
        saved = checkpoint.newest(tmp_path / name)
        export_file.export(saved, tmp_path / f"{name} exported")
        written = json.loads((tmp_path / f"{name} exported/config.json").read_text())
        assert theirs.items() <= written.items() and "bos_token_id" not in written, name


def sharded(exported, folder, dtype):
    """The same weights as save_pretrained writes a large model: several files and an index."""
    shutil.copytree(exported, folder)
    path = folder / checkpoint.MODEL
    entries = tensorfile.read_header(path)
    data = path.read_bytes()
    weight_map = {}
    for i, names in enumerate((list(entries)[::2], list(entries)[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        values = {name: torch.frombuffer(bytearray(data[entries[name].begin : entries[name].end]),
                                         dtype=torch.float) for name in names}
        code = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
        head, _ = tensorfile.make_header({n: torch.Size(entries[n].shape) for n in names}, code)
        body = b"".join(value.to(dtype).view(torch.uint8).numpy().tobytes()
                        for value in values.values())
        (folder / file).write_bytes(head + body)
        weight_map.update(dict.fromkeys(names, file))
    path.unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_folder_in_several_files_and_in_16_bits_is_read(folders, tmp_path, dtype):
    saved, exported = folders["untied"]
    folder = sharded(exported, tmp_path / "sharded", dtype)
    _add_tensor(folder, "model.layers.0.self_attn.rotary_emb.inv_freq")  # old folders have it
    model = load_model(saved)
    shapes = {name: param.shape for name, param in model.canonical_parameters()}
    get = read_weights(folder, shapes, model.config)
    for name, param in model.canonical_parameters():
        assert torch.equal(get(name), param.data.to(dtype)), name


def _edit_config(**values):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return edit


def _edit_index(change):
    def edit(folder):
        path = folder / INDEX
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))
    return edit


def _add_tensor(folder, name="model.layers.0.extra"):
    head, _ = tensorfile.make_header({name: torch.Size([1])}, "F32")
    (folder / "model-3.safetensors").write_bytes(head + bytes(4))
    _edit_index(lambda files: files.update({name: "model-3.safetensors"}))(folder)


DAMAGES = {  # what happens to a sharded folder -> what the run says, in one line
    "a missing shard": (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
                        "model-00002-of-00002.safetensors: No such file"),
    "an index that lies": (_edit_index(lambda files: files.update(
        {"model.norm.weight": "model-00001-of-00002.safetensors"
         if files["model.norm.weight"].startswith("model-00002")
         else "model-00002-of-00002.safetensors"})), "names model-0000"),
    "an index to elsewhere": (_edit_index(lambda files: files.update(
        {"model.norm.weight": "../config.json"})),
        "its model.norm.weight is '../config.json', not the name of a file"),
    "no index": (lambda folder: (folder / INDEX).write_text("[1]"), f"{INDEX}: not a JSON object"),
    "nothing": (lambda folder: (folder / INDEX).unlink(), "model.safetensors: No such file"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: "),
    "config lacks a size": (lambda folder: (folder / "config.json").write_text(
        '{"model_type": "llama"}'), "config.json: it has no num_hidden_layers; add that line"),
    "config has half a head": (_edit_config(num_attention_heads=2.5),
                               "its num_attention_heads is 2.5, not a whole number from 1 to"),
    "no epsilon": (_edit_config(rms_norm_eps=None), "its rms_norm_eps is None, not a number"),
    "no factor": (_edit_config(rope_scaling={"rope_type": "llama3"}), "its factor is None, not a"),
    "gemma": (_edit_config(model_type="gemma"), "its model_type is gemma; gpt2, llama, mistral, q"),
    "a Llama as a GPT-2": (_edit_config(model_type="gpt2", tie_word_embeddings=True),
                           "has the tensors of a Llama; add --arch llama"),
    "quantized": (_edit_config(quantization_config={"quant_method": "gptq"}), "quantized"),
    "another rope": (_edit_config(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
                     "its rope_scaling is yarn; default, linear and llama3 can be read"),
    "biases": (_edit_config(attention_bias=True), "its attention_bias is True, here it is False"),
    "gelu": (_edit_config(hidden_act="gelu"), "its hidden_act is gelu, here it is silu"),
    "wide heads": (_edit_config(head_dim=8), "q_proj.weight: F32 [16, 16], not "),
    "a window": (_edit_config(model_type="mistral"), "its sliding_window is 4096, here it is None"),
    "a window in Qwen": (_edit_config(model_type="qwen2", use_sliding_window=True),
                         "its use_sliding_window is True, here it is False"),
    "a layer with a window": (
        _edit_config(model_type="qwen3", layer_types=["full_attention", "sliding_attention"]),
        "its layer_types has sliding_attention; full_attention can be read"),
    "no Qwen3": (_edit_config(model_type="qwen3", head_dim=4),
                 "q_norm.weight: missing"),
    "other heads": (_edit_config(num_key_value_heads=4), "k_proj.weight: F32 [8, 16], not"),
    "deeper": (_edit_config(num_hidden_layers=3), "model.layers.2."),
    "tied": (_edit_config(tie_word_embeddings=True), "is not model.embed_tokens.weight"),
    "a foreign tensor": (_add_tensor, "has model.layers.0.extra, which a model of these flags"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_and_foreign_folders_are_one_line(corpus, folders, tmp_path, how, capsys,
                                                  monkeypatch):
    damage, says = DAMAGES[how]
    folder = sharded(folders["untied"][1], tmp_path / "folder", torch.float32)
    damage(folder)
    argv = ["train.py", "--init-from", folder, "--data", corpus, "--out", tmp_path / "out",
            "--steps", "0", "--device", "cpu", "--block-size", "8", "--batch-size", "4"]
    assert says in one_line(train.main, argv, capsys, monkeypatch)


def test_flags_say_what_config_json_says_and_flags_win(folders):
    exported = folders["stretched"][1]
    assert flags_of_folder(exported) == {
        "arch": "llama", "n_layer": 2, "n_head": 4, "n_embd": 16, "n_hidden": 21, "n_kv_head": 2,
        "norm_eps": 3e-6, "untied": False, "rope_theta": 500.0, "rope_scaling": STRETCHED,
        "head_dim": 0}
    cfg = train.read_command_line.__globals__["parse"](["--init-from", str(exported), "--n-layer",
                                                        "3"])
    assert (cfg.arch, cfg.n_layer, cfg.n_hidden) == ("llama", 3, 21)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_checkpoint_gives_the_sizes_that_have_no_flag(corpus, folders, tmp_path, kind):
    """To a run that starts from its weights, and to one that goes on from it."""
    saved, _ = folders[kind]
    model = {**{"arch": "llama", "n_head": 4, "n_embd": 16, "n_kv_head": 2, "n_layer": 2,
                "block_size": 48, "dtype": "float32"},
             **{name: value for name, value in TRAINED[kind].items()
                if name in ("arch", "n_kv_head")}}
    for name, given in (("weights", {"init_from": saved, "steps": 0}),
                        ("file", {"init_from": saved / checkpoint.MODEL, "steps": 0}),
                        ("on", {"resume": saved, "steps": 1}),
                        ("last", {"resume": saved.parent, "steps": 1})):
        out = tmp_path / name
        run = Run(1, flags(corpus, out, **model, **given), tmp_path)
        assert run.wait() == [0], run.read()
        if "init_from" in given:
            again = (out / "step-00000000" / checkpoint.MODEL).read_bytes()
            assert again == (saved / checkpoint.MODEL).read_bytes()


@pytest.mark.parametrize("given,wanted", [(0, 0), (4, 0), (6, 6)])
def test_the_usual_width_of_a_head_is_one_value_however_it_is_given(given, wanted, corpus):
    """Checkpoints have it: a run that gives the flag resumes one of a run that does not."""
    cfg = config(corpus, arch="llama", n_head=6, n_embd=24, head_dim=given)
    check_layout(cfg, 1)
    assert cfg.head_dim == wanted


FLAGS = [  # flags -> what the one line says
    ("--arch llama --n-kv-head 3", "--n-kv-head 3 must divide --n-head 4; try 1 or 2 or 4"),
    ("--arch llama --n-kv-head 2 --tp 4", "--tp 4 must divide --n-kv-head 2; try 1 or 2"),
    ("--arch llama --n-kv-head 2 --cp 4 --cp-attention all-to-all",
     "--tp 1 x --cp 4 must divide --n-kv-head 2; try 1 or 2"),
    ("--arch llama --n-head 4 --n-embd 12",
     "--n-embd 12 / --n-head 4: heads of 3 numbers; rotary positions need an even number"),
    ("--n-kv-head 2", "--n-kv-head 2 is for --arch llama"),
]


@pytest.mark.parametrize("given,says", FLAGS)
def test_flags_of_a_llama_that_do_not_fit_are_one_line(given, says, corpus, tmp_path, capsys,
                                                       monkeypatch):
    argv = ["train.py", "--data", corpus, "--out", tmp_path / "out", "--block-size", "8",
            "--batch-size", "4", *given.split()]
    assert says in one_line(train.main, argv, capsys, monkeypatch)
