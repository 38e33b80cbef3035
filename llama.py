"""Llama and Qwen in plain PyTorch: the GPT of model.py with other layers. Nothing here is parallel.

                    GPT-2 (model.py)               Llama
    positions       learned, added to wte          rotary: queries and keys are turned by angles
    norm            LayerNorm, 2 C parameters      RMSNorm, C parameters
    attention       nh heads of q, k and v         nh heads of q, n_kv heads of k and v
    MLP             GELU(x W1) W2, 4 C wide        (SiLU(x Wg) * (x Wu)) W2, n_hidden wide
    biases          in each matrix of a block      none
    lm_head         tied to wte                    tied, or a matrix of its own

Qwen2 has biases in c_attn. Qwen3 has an RMSNorm of each head's query and key, and heads whose width
is a size of its own (in a Llama it is C / nh).

Matrices have GPT-2's names (wte, c_attn, c_proj, c_fc, lm_head), and `parts` says which matrices
lie in one tensor (q, k, v; gate, up), so a technique that splits a GPT splits a Llama, unchanged. A
technique that splits tokens sets LlamaAttention.positions (in GPT-2 it is Embedding.positions).
Letters in shapes: those of model.py, and n_kv, the heads of keys and values. Touvron et al., arXiv
2302.13971, 2307.09288; rotary positions 2104.09864; SwiGLU 2002.05202; grouped queries 2305.13245;
Qwen3 2505.09388.

    python train.py --arch llama --n-kv-head 2
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, Attention, Block, Embedding, Head, embedding, positions_of

# The classes below inherit only methods from those of model.py: each __init__ makes all modules
# itself, so it calls nn.Module.__init__ and skips its parent's


class LlamaEmbedding(Embedding):
    def __init__(self, config):
        nn.Module.__init__(self)
        self.wte = embedding(config.vocab_size, config.n_embd)

    def forward(self, idx):  # (B, S) token ids
        return self.wte(idx)  # (B, S, C)


# ---- rotary positions ----
# A head's numbers are hs/2 pairs: number i and number i + hs/2. At position p pair i is turned by
# the angle p * frequency[i]. A query at p and a key at p', each turned by its own angle, have a dot
# product in which only p - p' is left.


def frequencies(config, dtype, device):
    """(hs/2,): theta^(-2i/hs), the angle between two neighbouring positions."""
    hs = config.hs
    frequency = config.rope_theta ** (-torch.arange(0, hs, 2, dtype=dtype, device=device) / hs)
    return stretch(frequency, config.rope_scaling) if config.rope_scaling else frequency


def stretch(frequency, scaling):
    """Lower the frequencies, for sequences longer than those of a first training. scaling "factor":
    divide all (arXiv 2306.15595). "factor,low,high,original": Llama 3.1's change. That model was
    first trained on sequences of `original` tokens, then on longer ones. Slow pairs, which turn
    less than `low` times in `original` tokens, are slowed down by `factor`; fast ones, which turn
    more than `high` times, stay; in between, interpolate linearly."""
    factor, *more = (float(number) for number in scaling.split(","))
    if not more:
        return frequency / factor
    low, high, original = more
    turns = original * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slowed down, 1: as before
    return frequency / factor * (1 - kept) + frequency * kept


def cos_and_sin(angles, dtype):
    """For rotate(), from angles (S, hs/2): cosines, and sines whose first half is negated,
    (S, 1, hs) each."""
    cos = torch.cat([angles.cos(), angles.cos()], dim=-1)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def rotate(x, cos, sin):
    """Turn the pairs of x (B, S, heads, hs): the first number becomes first * cos - second * sin,
    the second second * cos + first * sin."""
    partner = x.roll(x.size(-1) // 2, dims=-1)  # the other number of the pair
    return torch.addcmul(x * cos, partner, sin)


class LlamaAttention(Attention):
    def __init__(self, config):
        nn.Module.__init__(self)
        self.config = config
        self.head_dim = config.hs
        self.queries_per_key = config.n_head // config.n_kv_head  # query heads per key head
        self.parts = (config.query_width, config.kv_width, config.kv_width)  # rows for q, k, v
        self.c_attn = nn.Linear(config.n_embd, sum(self.parts), bias=config.qkv_bias)
        self.c_proj = nn.Linear(config.query_width, config.n_embd, bias=False)
        self.ln_q = self.ln_k = nn.Identity()
        if config.qk_norm:
            self.ln_q = nn.RMSNorm(config.hs, config.norm_eps)
            self.ln_k = nn.RMSNorm(config.hs, config.norm_eps)
        self.positions = None  # (S,), where tokens are split: set in context_parallel.py

    def forward(self, x):  # (B, S, C)
        qkv = self.c_attn(x)  # (B, S, (nh + 2 n_kv) * hs), or 1/T of it where c_attn is split
        wide = torch.promote_types(x.dtype, torch.float)  # angles have 32 bits at least
        frequency = frequencies(self.config, wide, x.device)
        angles = positions_of(qkv, self.positions).unsqueeze(1) * frequency  # (S, hs/2)
        heads = qkv.unflatten(-1, (-1, self.head_dim))  # (B, S, heads, hs)
        n_kv = heads.size(2) // (self.queries_per_key + 2)
        q, k, v = heads.split((self.queries_per_key * n_kv, n_kv, n_kv), dim=2)
        # v is a view, which would keep all of qkv in memory until backward; q and k are new tensors
        # (in Qwen3 qkv is kept anyway, by their norms)
        cos, sin = cos_and_sin(angles, x.dtype)
        q, k, v = rotate(self.ln_q(q), cos, sin), rotate(self.ln_k(k), cos, sin), v.contiguous()
        y = self.attend(*(x.transpose(1, 2) for x in (q, k, v)))  # (B, nh, S, hs)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, S, C)


def swiglu(x):
    """(..., 2 n) -> (..., n): the first half, through SiLU, is the gate of the second."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class LlamaMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.parts = (config.n_hidden, config.n_hidden)  # rows of c_fc for gate and up
        self.c_fc = nn.Linear(config.n_embd, 2 * config.n_hidden, bias=False)
        self.c_proj = nn.Linear(config.n_hidden, config.n_embd, bias=False)

    def forward(self, x):  # (B, S, C)
        return self.c_proj(swiglu(self.c_fc(x)))  # (B, S, C)


class LlamaBlock(Block):
    def __init__(self, config):
        nn.Module.__init__(self)
        self.ln_1 = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attn = LlamaAttention(config)
        self.ln_2 = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = LlamaMLP(config)


class LlamaHead(Head):
    def __init__(self, config):
        nn.Module.__init__(self)
        self.ln_f = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)


class Llama(GPT):
    """The whole model. forward(idx) returns logits; forward(idx, targets) the summed loss."""

    def __init__(self, config):
        nn.Module.__init__(self)
        self.config = config
        blocks = [LlamaBlock(config) for _ in range(config.n_layer)]
        self.layers = nn.ModuleList([LlamaEmbedding(config), *blocks, LlamaHead(config)])
        if config.tied:
            self.layers[-1].lm_head.weight = self.layers[0].wte.weight

    def positioned(self):
        return [block.attn for block in self.layers[1:-1]]
