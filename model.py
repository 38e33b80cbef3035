"""GPT-2, and nothing of parallelism: a plain list of layers that x is folded through.

    layers = [Embedding, Block, ..., Block, Head]

Learned positions, pre-LayerNorm, GELU (tanh), fused c_attn, tied embedding, no biases left out, no
dropout; parts and parameters are named as in GPT-2 and nanoGPT. A pipeline stage is a slice of the
list. Attention infers its number of heads from the width that c_attn gives it, so a layer that
holds a shard of the heads just works. Radford et al. 2019; sizes as in arXiv 2104.04473:

    parameters  12 L C^2 (1 + 13/(12 C)) + (V + S) C + 2 C        FLOPs per token  6 N + 12 L C S
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    vocab_size: int = 50257
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class Embedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)

    def forward(self, idx):  # (B, T) token ids
        return self.wte(idx) + self.wpe.weight[: idx.size(1)]  # (B, T, C)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, _ = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=-1)  # (B, T, nh * hs) each
        q, k, v = (t.view(B, T, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CrossEntropy(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, logits, targets):  # (B, T, V), (B, T) -> sum over the tokens
        wide = logits.float() if logits.element_size() == 2 else logits  # exp and sum in 32 bits
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum")


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.loss = CrossEntropy(config.vocab_size)

    def forward(self, x):
        return self.lm_head(self.ln_f(x))  # (B, T, V) logits


class GPT(nn.Module):
    """The whole model. `forward(idx)` gives logits, `forward(idx, targets)` the summed loss."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        blocks = [Block(config) for _ in range(config.n_layer)]
        self.layers = nn.ModuleList([Embedding(config), *blocks, Head(config)])
        self.layers[-1].lm_head.weight = self.layers[0].wte.weight  # tied

    def forward(self, idx, targets=None):
        x = idx
        for layer in self.layers:
            x = layer(x)
        return x if targets is None else self.layers[-1].loss(x, targets)


def canonical_name(name, n_layer):
    """'layers.3.attn.c_attn.weight' -> 'transformer.h.2.attn.c_attn.weight', as nanoGPT has it. The
    two ends of the tied embedding have one name: they are one parameter."""
    _, i, local = name.split(".", 2)
    if local == "lm_head.weight":
        local = "wte.weight"
    return "transformer." + (f"h.{int(i) - 1}." if 0 < int(i) <= n_layer else "") + local


def initial_value(name, shape, config, seed):
    """The full initial value of a parameter, float32 on CPU: a pure function of (seed, name), so
    that every layout starts from the same weights. GPT-2's: N(0, 0.02), residual projections
    N(0, 0.02 / sqrt(2 L)), biases 0, LayerNorm gains 1."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if ".ln_" in name:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def layer_costs(config):
    """Forward FLOPs per token of each layer in the list, by which stages are cut."""
    L, C, S, V = config.n_layer, config.n_embd, config.block_size, config.vocab_size
    return [0, *[24 * C * C + 4 * C * S] * L, 2 * C * V]


def flops_per_token(config, n_params):
    """Forward and backward, as nanoGPT and PaLM (arXiv 2204.02311, appendix B) count them."""
    return 6 * n_params + 12 * config.n_layer * config.n_embd * config.block_size
