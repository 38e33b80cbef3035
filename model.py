"""GPT-2 in plain PyTorch: a list of layers, called one after the other. Nothing here is parallel.

    layers = [Embedding, Block, ..., Block, Head]

Learned positions, pre-LayerNorm, GELU (tanh), one matrix (c_attn) for q, k and v, tied embedding,
no dropout; parameters are named as in GPT-2 and nanoGPT. Radford et al. 2019. Letters in shapes:
B sequences of S tokens, C wide; nh heads of hs each; N experts, k of them per token (elsewhere N is
also a number of ranks, and b the sequences of a microbatch). Sizes, for L blocks and a vocabulary
of V words (arXiv 2104.04473):

    parameters Psi = 12 L C^2 (1 + 13/(12 C)) + (V + S) C + 2 C   FLOPs per token = 6 Psi + 12 L C S

tensor_parallel.parallelize replaces linear layers, embedding and loss, shard.pad_vocabulary pads
the tied embedding, expert_parallel.spread_experts slices experts. Where another file replaces
something else, a comment names the function.
"""

import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def embedding(n, width):
    """nn.Embedding with a weight that is not drawn; build() below or Bucket (ddp.py) fills it. (To
    draw it on the meta device, as train.py would, torch imports 2 s of code.)"""
    return nn.Embedding.from_pretrained(torch.empty(n, width), freeze=False)


class Embedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = embedding(config.vocab_size, config.n_embd)
        self.wpe = embedding(config.block_size, config.n_embd)
        # The position in its sequence of each token that forward returns; None: 0 .. S-1. (--sp:
        # wte returns 1/T of the tokens, so these are S/T positions.) Replaced in
        # context_parallel.split_sequences, tensor_parallel.parallelize (--sp), sample.generate.
        self.positions = None

    def forward(self, idx):  # (B, S) token ids
        positions = self.positions
        if positions is None:
            positions = torch.arange(idx.size(1), device=idx.device)
        return self.wte(idx) + self.wpe(positions)  # (B, S, C)


def causal_attention(q, k, v):
    """Each token attends to itself and to earlier tokens. q, k, v, result: (B, nh, S, hs)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        # The attention function. Replaced in context_parallel.split_sequences, where the tokens of
        # a sequence are spread over ranks, and in sample.generate, which caches keys and values.
        self.core = causal_attention
        # Attributes that train.py excludes from torch.compile; replaced in split_sequences, too
        self.uncompiled = ()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):  # (B, S, C)
        q, k, v = self.c_attn(x).chunk(3, dim=-1)  # (B, S, nh * hs) each
        # (B, nh, S, hs) each. -1 stands for nh, or nh/T where tensor parallelism split c_attn.
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        y = self.core(q, k, v)  # (B, nh, S, hs)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, S, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):  # (B, S, C)
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # (B, S, C)


class StackedLinear(nn.Module):
    """The weights of N linear layers in one tensor: weight (N, out, in), bias (N, out)."""

    def __init__(self, N, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(N, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(N, n_out))


class Experts(nn.Module):
    """N MLPs with H hidden units each."""

    def __init__(self, N, C, H):
        super().__init__()
        self.c_fc, self.c_proj = StackedLinear(N, C, H), StackedLinear(N, H, C)

    def forward(self, inputs):
        """Run expert i on the tokens inputs[i] (n_i, C). Returns a list of outputs, (n_i, C) each.

        The experts run one after the other: on a CPU, padding all inputs to one size and batching
        them takes 1.4 to 1.8 times as long. An expert without tokens (n_i = 0) runs too, so that
        backward reaches a rank's experts even if none of them has a token."""
        outputs = []
        for x, W1, b1, W2, b2 in zip(inputs, self.c_fc.weight.unbind(), self.c_fc.bias.unbind(),
                                     self.c_proj.weight.unbind(), self.c_proj.bias.unbind(),
                                     strict=True):
            hidden = F.gelu(F.linear(x, W1, b1), approximate="tanh")  # (n_i, H)
            outputs.append(F.linear(hidden, W2, b2))  # (n_i, C)
        return outputs


class MixtureOfExperts(nn.Module):
    """Replaces the MLP with --experts N: a router and N experts. The router scores all experts for
    each token; the token runs through the k with the highest scores, and their outputs are summed,
    weighted by k gates (the softmax of those scores). An expert has 4C/k hidden units, so the layer
    has N/k times the MLP's parameters at its FLOPs. Dropless: an expert runs all its tokens."""

    # Attributes that train.py excludes from torch.compile: they send messages, sizes depend on data
    uncompiled = ("core", "all_tokens")

    def __init__(self, config):
        super().__init__()
        self.n_experts, self.top_k = config.n_experts, config.top_k
        self.router = nn.Linear(config.n_embd, config.n_experts, bias=False)
        self.experts = Experts(config.n_experts, config.n_embd, 4 * config.n_embd // config.top_k)
        # Runs the chosen experts on x. Replaced in expert_parallel.spread_experts.
        self.core = self.dispatch_and_combine
        # Sums counts (B, N), in place, over the ranks that hold other tokens of the same sequences.
        # Replaced in expert_parallel.spread_experts; one process holds all tokens.
        self.all_tokens = lambda counts: counts
        self.balance_weight = 0.01  # of balance in the loss; replaced in expert_parallel.Routing
        # Load-balance term of the last forward, summed over its tokens: 1 per token when the
        # experts are even, more when few experts get most tokens (DeepSeek-V3, arXiv 2412.19437).
        # expert_parallel.Routing.add sets it to None after backward, as it holds a graph.
        self.balance = None
        self.load = None  # (N,): how many tokens of the last forward chose each expert

    def dispatch_and_combine(self, x, gates, chosen):
        """x (B, S, C); gates, chosen (B, S, k): weight and index of each token's experts.
        Dispatch: each expert gets the tokens that chose it. Combine: the outputs of a token's k
        experts are added up, each times its gate. Returns (B, S, C)."""
        tokens, gates, chosen = x.flatten(0, 1), gates.flatten(0, 1), chosen.flatten(0, 1)
        # chosen = [[0, 2], [2, 1]]: expert 2 is choice 1 of token 0 and choice 0 of token 1, so
        # assigned[2] = ([0, 1], [1, 0])
        assigned = [(chosen == i).nonzero(as_tuple=True) for i in range(self.n_experts)]
        outputs = self.experts([tokens[token] for token, _ in assigned])  # (n_i, C) each
        y = torch.zeros_like(tokens)  # (B * S, C)
        for (token, choice), output in zip(assigned, outputs, strict=True):
            y.index_add_(0, token, gates[token, choice].unsqueeze(1) * output)
        return y.view_as(x)

    def forward(self, x):  # (B, S, C)
        wide = torch.promote_types(x.dtype, torch.float)  # the router computes in fp32 or fp64
        logits = F.linear(x.to(wide), self.router.weight.to(wide))  # (B, S, N)
        scores, chosen = logits.topk(self.top_k)  # (B, S, k) each
        # counts (B, N): how many tokens of each sequence chose each expert
        ones = torch.ones_like(scores).flatten(1)
        counts = logits.new_zeros(len(x), self.n_experts).scatter_add_(1, chosen.flatten(1), ones)
        # The balance loss multiplies each expert's share of the choices by its router probability.
        # Taken per sequence, the loss is a sum over sequences, and so the same in every layout.
        total = self.all_tokens(counts.clone())
        share = total * self.n_experts / total.sum(1, keepdim=True)  # (B, N), 1 if even
        self.balance = (share.unsqueeze(1) * logits.softmax(-1)).sum()
        self.load = counts.sum(0)
        return self.core(x, scores.softmax(-1).to(x.dtype), chosen)  # (B, S, C)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MixtureOfExperts(config) if config.n_experts else MLP(config)

    def forward(self, x):  # (B, S, C)
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def extra_loss(layers):
    """The load-balance loss of these layers' experts in the last forward, summed over tokens; None
    if no layer has experts."""
    blocks = [layer for layer in layers if isinstance(layer, Block)]
    routed = [block.mlp for block in blocks if isinstance(block.mlp, MixtureOfExperts)]
    return sum(mlp.balance_weight * mlp.balance for mlp in routed) if routed else None


ABSENT = -1  # the target of a padding token: adds nothing to the loss or to a gradient


def cross_entropy(logits, targets):  # (B, S, V), (B, S)
    """Sum over all tokens of log(sum(exp(logits))) - logits[target]."""
    wide = logits.float() if logits.element_size() == 2 else logits  # exp and sum in fp32
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum",
                           ignore_index=ABSENT)


class Head(nn.Module):
    uncompiled = ("loss",)  # sends messages under --tp

    def __init__(self, config):
        super().__init__()
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        # (x, targets) -> summed loss. Replaced in tensor_parallel.parallelize.
        self.loss = self.plain_loss

    def plain_loss(self, x, targets):
        return cross_entropy(self.lm_head(x), targets)

    def forward(self, x, targets=None):
        """x (B, S, C) -> logits (B, S, V), if lm_head is not split; given targets (B, S): the loss,
        summed over tokens."""
        x = self.ln_f(x)
        return self.lm_head(x) if targets is None else self.loss(x, targets)


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
        if targets is None:
            return head(x)
        loss, extra = head(x, targets), extra_loss(layers)
        return loss if extra is None else loss + extra

    def canonical_parameters(self):
        """Yield (name, parameter) with nanoGPT's names, the tied embedding once.

            layers.0.wte.weight            ->  transformer.wte.weight
            layers.3.attn.c_attn.weight    ->  transformer.h.2.attn.c_attn.weight"""
        for name, param in self.named_parameters():
            _, i, local = name.split(".", 2)  # "layers", "3", "attn.c_attn.weight"
            block = f"h.{int(i) - 1}." if 0 < int(i) <= self.config.n_layer else ""
            yield f"transformer.{block}{local}", param


# nanoGPT's files hold the tied embedding twice: under its canonical name, and under this one
ALIASES = {"transformer.wte.weight": ["lm_head.weight"]}


def initial_value(name, shape, config, seed):
    """The full initial value of a parameter, float32 on CPU. A pure function of seed and canonical
    name: each layout draws the same full tensor, then slices it. GPT-2's values,
    N(0, 0.02) at its width of 768 and N(0, 0.02 sqrt(768 / C)) at width C; projections into the
    residual stream are divided by sqrt(2 L), biases 0, LayerNorm weights 1."""
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float32)
    if ".ln_" in name:
        return torch.ones(shape, dtype=torch.float32)
    # sha256, not hash(): Python salts hash() anew in each process
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    std = 0.02 * math.sqrt(768 / config.n_embd)
    if name.endswith("c_proj.weight"):
        std /= math.sqrt(2 * config.n_layer)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def build(config, seed=0, dtype=torch.float32):
    """The whole model with its initial values, in one process."""
    model = GPT(config).to(dtype)
    for name, param in model.canonical_parameters():
        param.data.copy_(initial_value(name, param.shape, config, seed))
    return model
