"""Llama and Qwen compute their formulas. (Each layout equals one process: test_layouts.py; Hugging
Face's models: test_weights.py.)"""

import math

import pytest
import torch

from experts import kind_of
from llama import LlamaAttention
from model import build
from sizes import LlamaConfig
from tests.harness import VOCAB, close

SMALL = LlamaConfig(VOCAB, block_size=8, n_layer=2, n_head=6, n_embd=24, n_kv_head=2, n_hidden=37,
                    tied=False)


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
         "a key head each": {"n_kv_head": 6}, "stretched": {"rope_scaling": "4,1,4,6"},
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
    attention.positions = torch.arange(1000, 1008)
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
