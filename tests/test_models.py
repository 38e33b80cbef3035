"""The models are GPT-2, Llama and Qwen by their formulas: logits and losses, initial values, the
loss in chunks, and the FLOPs and parameters that sizes.py counts."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experts import kind_of, on_meta
from mesh import Mesh
from model import ABSENT, build, initial_value
from shard import bounds, tag_whole
from sizes import GPTConfig, LlamaConfig
from tensor_parallel import VocabularyLoss, split_matrices
from tests.harness import ALONE, VOCAB, close, peak_bytes, random, ranks

GPT = GPTConfig(VOCAB, block_size=8, n_layer=2, n_head=6, n_embd=24)
LLAMA = LlamaConfig(VOCAB, 8, 2, 6, 24, n_kv_head=2, n_hidden=38, tied=False)


# ---- formulas, for one sequence: its token ids, and {canonical name: parameter} ----


def attend(q, k, v):
    """One head, (S, hs) each: no token sees a later one."""
    weights = (q @ k.T / math.sqrt(q.size(1))).exp().tril()
    return weights @ v / weights.sum(1, keepdim=True)


def gpt_logits(config, p, ids):
    def linear(name, x):
        return F.linear(x, p[name + ".weight"], p[name + ".bias"])

    def norm(name, x):
        return F.layer_norm(x, (config.n_embd,), p[name + ".weight"], p[name + ".bias"])

    x = p["transformer.wte.weight"][ids] + p["transformer.wpe.weight"][: len(ids)]
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        q, k, v = linear(block + ".attn.c_attn", norm(block + ".ln_1", x)).chunk(3, 1)
        heads = [attend(*(each.chunk(config.n_head, 1)[h] for each in (q, k, v)))
                 for h in range(config.n_head)]
        x = x + linear(block + ".attn.c_proj", torch.cat(heads, 1))
        hidden = F.gelu(linear(block + ".mlp.c_fc", norm(block + ".ln_2", x)), approximate="tanh")
        x = x + linear(block + ".mlp.c_proj", hidden)
    return norm("transformer.ln_f", x) @ p["transformer.wte.weight"].T


def frequency(config, pair, hs):
    """The angle between two neighbouring positions. Llama 3.1's change is one of wavelengths."""
    plain = config.rope_theta ** (-2 * pair / hs)
    if not config.rope_scaling:
        return plain
    factor, *more = map(float, config.rope_scaling.split(","))
    if not more:
        return plain / factor
    low, high, original = more
    wavelength = 2 * math.pi / plain
    if wavelength < original / high:
        return plain
    if wavelength > original / low:
        return plain / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * plain / factor + smooth * plain


def llama_logits(config, p, ids):
    """A rotary position is a product with a complex number."""
    nh, n_kv = config.n_head, config.n_kv_head
    hs = config.head_dim or config.n_embd // nh
    angles = torch.tensor([[position * frequency(config, pair, hs) for pair in range(hs // 2)]
                           for position in range(len(ids))], dtype=torch.double)
    turns = torch.polar(torch.ones_like(angles), angles)  # (S, hs/2): exp(i angle)

    def norm(name, x):
        return F.rms_norm(x, x.shape[1:], p[name + ".weight"], config.norm_eps)

    def turned(name, x):  # (S, hs)
        x = norm(name, x) if config.qk_norm else x
        pairs = torch.complex(*x.chunk(2, 1)) * turns
        return torch.cat([pairs.real, pairs.imag], 1)

    x = p["transformer.wte.weight"][ids]
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        qkv = norm(block + ".ln_1", x) @ p[block + ".attn.c_attn.weight"].T
        qkv = (qkv + p.get(block + ".attn.c_attn.bias", 0)).split(hs, 1)
        queries = [turned(block + ".attn.ln_q", q) for q in qkv[:nh]]
        keys = [turned(block + ".attn.ln_k", k) for k in qkv[nh : nh + n_kv]]
        values = qkv[nh + n_kv :]
        heads = [attend(q, keys[h * n_kv // nh], values[h * n_kv // nh])
                 for h, q in enumerate(queries)]
        x = x + torch.cat(heads, 1) @ p[block + ".attn.c_proj.weight"].T
        gate, up = (norm(block + ".ln_2", x) @ p[block + ".mlp.c_fc.weight"].T).chunk(2, 1)
        x = x + (F.silu(gate) * up) @ p[block + ".mlp.c_proj.weight"].T
    return norm("transformer.ln_f", x) @ p.get("lm_head.weight", p["transformer.wte.weight"]).T


KINDS = {"gpt2": GPT, "llama": LLAMA, "tied": replace(LLAMA, tied=True),
         "multi-query": replace(LLAMA, n_kv_head=1), "own keys": replace(LLAMA, n_kv_head=6),
         "linear": replace(LLAMA, rope_scaling="2.5"),
         # the first of two pairs turns 4.8 times in 30 tokens, 2.4 times in 15, once in 6
         "one pair as before": replace(LLAMA, rope_scaling="4,1,4,30"),
         "one pair between": replace(LLAMA, rope_scaling="4,1,4,15"),
         "all pairs slower": replace(LLAMA, rope_scaling="4,1,4,6"),
         "qwen2": replace(LLAMA, qkv_bias=True),
         "qwen3": replace(LLAMA, qk_norm=True, head_dim=6)}


def large(config):
    """A model in float64 whose weights are so large that each of them matters to every logit: no
    bias is 0, no norm's weight is 1."""
    model = build(config, dtype=torch.double, kind=kind_of(config))
    for i, (_, param) in enumerate(model.canonical_parameters()):
        param.data.add_(0.3 * random(*param.shape, seed=i))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_loss_are_those_of_the_formulas(kind):
    config = KINDS[kind]
    model = large(config)
    p = {name: param.detach() for name, param in model.canonical_parameters()}
    ids = torch.arange(8) * 5 % VOCAB
    targets = ids + 1
    logits = (llama_logits if isinstance(config, LlamaConfig) else gpt_logits)(config, p, ids)
    close(model(ids.view(1, 8)).detach()[0], logits, "logits")
    loss = F.cross_entropy(logits, targets, reduction="sum")
    close(model(ids.view(1, 8), targets.view(1, 8)).detach(), loss, "summed loss")


def test_angles_of_late_positions_have_32_bits_in_a_16_bit_model():
    """Attention depends on differences of positions only. In bfloat16, 1000 and 1001 are equal."""
    attention = large(LLAMA).layers[1].attn.bfloat16()
    x = random(1, 8, LLAMA.n_embd).bfloat16()
    early = attention(x)
    attention.positions = torch.arange(1000, 1008)
    assert (attention(x) - early).norm() < 2**-5 * early.norm()


# ---- initial values ----


def test_initial_values_are_gpt_2s_and_depend_on_seed_and_name():
    config = GPTConfig(n_layer=8, n_embd=192)  # a quarter of GPT-2's width: twice its 0.02

    def value(name, seed=1):
        return initial_value("transformer." + name, torch.Size((500, 192)), config, seed)

    for name, std in (("wte.weight", 0.04), ("wpe.weight", 0.04), ("h.0.attn.c_attn.weight", 0.04),
                      ("h.0.mlp.c_fc.weight", 0.04), ("h.0.mlp.router.weight", 0.04),
                      ("h.0.attn.c_proj.weight", 0.01),  # by sqrt(2 * 8 layers) smaller
                      ("h.7.mlp.c_proj.weight", 0.01)):
        assert abs(value(name).std() / std - 1) < 0.01 and abs(value(name).mean()) < std / 50, name
    assert value("h.0.ln_1.weight").eq(1).all() and value("ln_f.bias").eq(0).all()
    first = value("h.0.mlp.c_fc.weight")
    assert torch.equal(first, value("h.0.mlp.c_fc.weight"))
    assert not torch.equal(first, value("h.0.mlp.c_fc.weight", seed=2))
    assert not torch.equal(first, value("h.1.mlp.c_fc.weight"))


# ---- the loss, in chunks and over a split vocabulary ----


def loss_case(dtype):
    """(x, weight, targets): chunks of 512 and 88 tokens. Every seventh target is padding. The
    first hundred are almost certain: of a probability near 1 the gradient p - 1 keeps few digits if
    p is rounded to 16 bits first."""
    x, weight = random(600, 24).to(dtype), random(VOCAB, 24, seed=1).to(dtype)
    targets = torch.arange(600) * 5 % VOCAB
    targets[:100] = (x @ weight.T)[:100].argmax(-1)
    targets[::7] = ABSENT
    return x, weight, targets


def _loss_in_chunks(rank, T, dtype):
    """(loss, this rank's term of the gradient of x, the gradient of its words, the loss alone)"""
    group = Mesh(tp=T).group("tp")
    x, weight, targets = loss_case(dtype)
    words = bounds(VOCAB, group)
    rows = weight[slice(*words)].clone().requires_grad_()
    loss = VocabularyLoss.apply(x.requires_grad_(), rows, targets, words, 512, group)
    (loss / 600).backward()
    with torch.no_grad():
        again = VocabularyLoss.apply(x, rows, targets, words, 512, group)
    return loss.detach(), x.grad, rows.grad, again


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16, torch.float16], ids=str)
def test_the_loss_in_chunks_is_the_plain_loss(T, dtype):
    """In 16 bits: the loss of the rounded logits, but summed in 32, where it would have two or
    three digits; gradients are rounded at last."""
    x, weight, targets = loss_case(dtype)
    logits = (x @ weight.T).double().requires_grad_()
    want = F.cross_entropy(logits, targets, reduction="sum", ignore_index=ABSENT)
    (want / 600).backward()
    losses, terms, rows, again = zip(*ranks(T, _loss_in_chunks, T, dtype), strict=True)
    wide = dtype == torch.double
    for loss, alone in zip(losses, again, strict=True):
        close(loss, want.detach(), "loss", 1e-10 if wide else 1e-6)
        assert torch.equal(loss, alone) and loss.element_size() >= 4
    tolerance = 1e-10 if wide else 2**-7
    term = sum(term.double() for term in terms)
    close(term, logits.grad @ weight.double(), "gradient of x", tolerance)
    assert term[::7].eq(0).all()
    close(torch.cat(rows), logits.grad.T @ x.double(), "gradient of the words", tolerance)


def test_the_gradient_of_the_words_stays_in_float16s_range():
    """The sum over 1024 tokens is -89600, beyond float16's 65504; divided by them it is small."""
    weight = torch.zeros(8, 1024).half().requires_grad_()
    x = torch.zeros(1024, 1024).half()
    x[:, 0] = 100
    targets = torch.zeros(1024, dtype=torch.long)
    (VocabularyLoss.apply(x, weight, targets, (0, 8), 512, ALONE) / 1024).backward()
    close(weight.grad[0, 0], -87.5, "gradient", 1e-3)


def test_the_logits_of_all_tokens_are_never_in_memory_at_once():
    x, weight = (torch.randn(n, 8, requires_grad=True) for n in (4096, 1000))
    targets = torch.zeros(4096, dtype=torch.long)

    def loss_and_gradients():
        VocabularyLoss.apply(x, weight, targets, (0, 1000), 512, ALONE).backward()

    chunk = 512 * 1000 * 4  # bytes of logits; their shares, and the mask, are as large
    assert chunk <= peak_bytes(loss_and_gradients) < 4 * chunk < 4096 * 1000 * 4


def test_on_a_gpu_each_rank_takes_as_many_tokens_at_a_time(monkeypatch):
    """4 does not divide 50,257 words, but the ranks gather together. Meta tensors, as on a GPU."""
    taken = set()
    monkeypatch.setattr(VocabularyLoss, "apply", lambda *args: taken.add(args[4]))
    for rank in range(4):
        group = SimpleNamespace(size=4, rank=rank)
        model = on_meta(replace(GPT, vocab_size=50257, n_head=4))
        tag_whole(model, ALONE, ALONE)
        split_matrices(model, group)
        head = model.layers[-1]
        head.f = lambda x, group: x
        head(torch.empty(1, 16384, 24, device="meta"), torch.empty(1, 16384, device="meta"))
    assert taken == {(1 << 27) // 12565}


# ---- what sizes.py counts ----


@pytest.mark.parametrize("config", [
    GPT, LLAMA, replace(LLAMA, qk_norm=True, head_dim=6), replace(GPT, n_experts=5, top_k=3),
    replace(LLAMA, n_experts=5)], ids=["gpt2", "llama", "qwen3", "experts", "experts of a llama"])
def test_flops_are_those_that_torch_counts(config):
    """A token's, forward: 2 for each weight of the k experts that it meets, attention's without
    regard to the mask. Backward has twice as many."""
    model = build(config, kind=kind_of(config))
    ids = torch.arange(16).view(2, 8)
    # this kernel is made of products that torch counts
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(ids, ids)
        assert counter.get_total_flops() == 16 * sum(config.layer_costs())
        loss.backward()
    routers = config.n_layer * config.n_embd * config.n_experts
    matrices = config.n_layer * config.block_weights() + config.n_embd * VOCAB + routers
    total = config.flops_per_token(matrices)
    if config.n_experts:  # those that a token skips were not in `matrices`
        total += 6 * config.n_layer * (config.n_experts - config.top_k) * config.expert_parameters()
    assert counter.get_total_flops() == 16 * total


def test_parameters_are_counted_like_the_models():
    L, C, V, S = GPT.n_layer, GPT.n_embd, VOCAB, GPT.block_size
    count = sum(param.numel() for param in build(GPT).parameters())
    assert count == 12 * L * C**2 + 13 * L * C + (V + S) * C + 2 * C  # model.py's formula
    for config in (replace(GPT, n_experts=5, top_k=3), replace(LLAMA, n_experts=5)):
        block = build(config, kind=kind_of(config)).layers[1]
        held = sum(param.numel() for param in block.mlp.experts.parameters())
        assert held == 5 * config.expert_parameters()
