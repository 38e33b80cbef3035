"""GPT-2 in plain PyTorch: a list of layers, called one after the other. Nothing here is parallel.

    layers = [Embedding, Block, ..., Block, Head]

Learned positions, pre-LayerNorm, GELU (tanh), one matrix (c_attn) for q, k and v, tied embedding,
no dropout. Radford et al. 2019. Letters in shapes, here and in all files: B sequences of S tokens,
C wide; nh heads of hs each; L blocks, V words in the vocabulary. Sizes:

    parameters Psi = 12 L C^2 (1 + 13/(12 C)) + (V + S) C + 2 C           (arXiv 2104.04473)
    FLOPs per token, forward and backward = 6 Psi + 12 L C S              (arXiv 2204.02311)

Other files replace or set parts of these layers:

    part                              why                    function          file
    c_attn, c_fc, c_proj, wte, Head   matrices are split     split_matrices    tensor_parallel.py
    Embedding.positions               tokens are split       split_sequences   context_parallel.py
                                      tokens are split again split_matrices    tensor_parallel.py
                                      a token at a time      next_logits       sample.py
    Attention.attend                  tokens are split       split_sequences   context_parallel.py
                                      a cache of keys        generate          sample.py
    Block.mlp                         experts                MixtureGPT        experts.py

Attention.parts, MLP.parts: how many rows each matrix has in a tensor that holds several; tensor
parallelism splits each of them. experts.py has GPTs with experts, llama.py a Llama.
"""

import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def embedding(n, width):
    """nn.Embedding without random values: build() fills it; in train.py, ddp.Flat does. (On the
    meta device of train.py, where tensors have no memory, nn.Embedding's draw would import
    torch.compile, which takes seconds.)"""
    return nn.Embedding.from_pretrained(torch.empty(n, width), freeze=False)


def positions_of(x, positions):
    """(S,): the position of each token of x (B, S, ...) in its sequence. positions: those that this
    process has; None: all."""
    return torch.arange(x.size(1), device=x.device) if positions is None else positions


class Embedding(nn.Module):
    backward_reads_weights = False  # ZeRO-3 (zero.py) need not gather them for backward

    def __init__(self, config):
        super().__init__()
        self.wte = embedding(config.vocab_size, config.n_embd)
        self.wpe = embedding(config.block_size, config.n_embd)
        self.positions = None  # (S,); None: all, in order. train.py always sets them

    def forward(self, idx):  # (B, S) token ids
        return self.wte(idx) + self.wpe(positions_of(idx, self.positions))  # (B, S, C)


def causal_attention(q, k, v):
    """Each token attends to itself and to earlier tokens. q, k, v, result: (B, nh, S, hs). In
    sample.py q may be the last token alone, which sees all keys. In llama.py k and v have fewer
    heads, each for several heads of q. ring_attention in context_parallel.py computes the same
    where the tokens are on several ranks."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.parts = (config.n_embd,) * 3  # rows of q, k and v in c_attn
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    # Replaced where tokens are split (context_parallel.split_sequences), and in sample.py
    def attend(self, q, k, v):  # (B, nh, S, hs) each, and the result
        return causal_attention(q, k, v)

    def forward(self, x):  # (B, S, C)
        q, k, v = self.c_attn(x).chunk(3, dim=-1)  # (B, S, nh * hs) each
        # (B, nh, S, hs) each. -1 stands for nh, or nh/T where tensor parallelism split c_attn.
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        y = self.attend(q, k, v)  # (B, nh, S, hs)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, S, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.parts = (4 * config.n_embd,)  # c_fc is a single matrix
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):  # (B, S, C)
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # (B, S, C)


class Block(nn.Module):
    # Activation checkpointing: backward computes the block once more from its input, so only the
    # input is kept, B S C elements, not some 16 times as many. That costs a third more FLOPs per
    # step, and the forward's messages are sent twice. Chen et al., arXiv 1604.06174
    recompute = False  # set by train.py (--recompute)

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):  # (B, S, C)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False, preserve_rng_state=False)
        return self.compute(x)

    def compute(self, x):  # (B, S, C)
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


# A target to be ignored, in loss and gradient: windows of such targets fill up the last batch of a
# validation (data/batches.py). torch's default ignore_index
ABSENT = -100


def cross_entropy(logits, targets):  # (B, S, V), (B, S)
    """Sum over all tokens of log(sum(exp(logits))) - logits[target]."""
    wide = logits.float() if logits.element_size() == 2 else logits  # exp and sum in fp32
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum",
                           ignore_index=ABSENT)


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x, targets=None):
        """x (B, S, C) -> logits (B, S, V); given targets (B, S): the loss, summed over tokens. (In
        training VocabularyHead of tensor_parallel.py takes this layer's place.)"""
        logits = self.lm_head(self.ln_f(x))
        return logits if targets is None else cross_entropy(logits, targets)


UNTIED = "lm_head.weight"  # the head's matrix has this name if it is not the embedding's


class GPT(nn.Module):
    """The whole model. forward(idx) returns logits; forward(idx, targets) the summed loss."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        blocks = [Block(config) for _ in range(config.n_layer)]
        self.layers = nn.ModuleList([Embedding(config), *blocks, Head(config)])
        self.layers[-1].lm_head.weight = self.layers[0].wte.weight  # tied: one parameter, two uses

    def forward(self, idx, targets=None):  # (B, S) each
        *layers, head = self.layers
        x = idx
        for layer in layers:
            x = layer(x)
        return head(x, targets)

    def canonical_parameters(self):
        """Yield (name, parameter) with the names of GPT-2 and nanoGPT, the tied embedding once.

            layers.0.wte.weight            ->  transformer.wte.weight
            layers.3.attn.c_attn.weight    ->  transformer.h.2.attn.c_attn.weight
            layers.5.lm_head.weight        ->  lm_head.weight, if it is not tied"""
        for name, param in self.named_parameters():
            _, i, local = name.split(".", 2)  # "layers", "3", "attn.c_attn.weight"
            block = f"h.{int(i) - 1}." if 0 < int(i) <= self.config.n_layer else ""
            yield local if local == UNTIED else f"transformer.{block}{local}", param

    def positioned(self):
        """Modules with an attribute `positions`. A technique that splits the tokens sets it."""
        return [self.layers[0]]


def compile_layers(model):
    """torch.compile the embedding and each block (--compile). A module lists in `uncompiled` the
    methods that stay Python: they send messages, or make tensors whose size depends on the data."""
    first, *blocks, _ = model.layers
    for module in model.modules():
        for name in getattr(module, "uncompiled", ()):
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
    first.forward = torch.compile(first.forward)
    for block in blocks:
        block.compute = torch.compile(block.compute)


def generator_of(seed, name):
    """The source of the random values of the parameter with this canonical name."""
    # sha256, not hash(): Python salts hash() anew in each process. 7 bytes fit a seed (int64)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def initial_value(name, shape, config, seed):
    """The full initial value of a parameter, float32 on CPU. It depends on the seed, the canonical
    name and the model's sizes, never on the layout: each layout draws the same full tensor, then
    slices it. Matrices have GPT-2's standard deviation, 0.02 at width 768: here 0.02 sqrt(768 / C)
    at width C. Projections into the residual stream are divided by sqrt(2 L); biases are 0,
    LayerNorm weights 1."""
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float32)
    if ".ln_" in name:
        return torch.ones(shape, dtype=torch.float32)
    std = 0.02 * math.sqrt(768 / config.n_embd)
    if name.endswith("c_proj.weight"):
        std /= math.sqrt(2 * config.n_layer)
    return torch.empty(shape, dtype=torch.float32).normal_(
        0.0, std, generator=generator_of(seed, name))


def from_seed(config, seed):
    """A function from a tag (shard.py) to the tag's slice of the initial value."""
    return lambda tag: tag.slice(initial_value(tag.name, tag.shape, config, seed))


def build(config, seed=0, dtype=torch.float32, kind=GPT):
    """The whole, unsplit model with its initial values, the same on every rank that calls it. kind:
    GPT, or a subclass (experts.kind_of)."""
    model = kind(config).to(dtype)
    for name, param in model.canonical_parameters():
        param.data.copy_(initial_value(name, param.shape, config, seed))
    return model
