"""GPT-2, and nothing of parallelism: a plain list of layers that x goes through in turn.

    layers = [Embedding, Block, ..., Block, Head]

B sequences of S tokens, C wide, nh heads of hs each, L blocks, V tokens in the vocabulary, Psi
parameters. Learned positions, pre-LayerNorm, GELU (tanh), q, k and v from one matrix (c_attn), tied
embedding, no dropout; named as in GPT-2 and nanoGPT. Attention infers its number of heads from the
width of what c_attn gives it, so a layer that holds a shard of the heads just works. Radford et al.
2019; sizes as in arXiv 2104.04473:

    parameters  12 L C^2 (1 + 13/(12 C)) + (V + S) C + 2 C      FLOPs per token  6 Psi + 12 L C S
"""

import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Embedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.positions = None  # of these tokens in their sequence; may be set from outside

    def forward(self, idx):  # (B, S) token ids
        at = self.positions
        if at is None:
            at = torch.arange(idx.size(1), device=idx.device)
        return self.wte(idx) + self.wpe(at)  # (B, S, C)


def causal_attention(q, k, v):
    """Each token looks at itself and at those before it. (B, nh, S, hs) each, and so the result."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.core = causal_attention  # what lets tokens see one another; may be set from outside
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        q, k, v = self.c_attn(x).chunk(3, dim=-1)  # (B, S, nh * hs) each
        q, k, v = (heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for heads in (q, k, v))
        y = self.core(q, k, v)  # (B, nh, S, hs)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, S, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class StackedLinear(nn.Module):
    """N linear layers: weight (N, out, in), bias (N, out)."""

    def __init__(self, N, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(N, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(N, n_out))


class Experts(nn.Module):
    """N MLPs, H wide inside."""

    def __init__(self, N, C, H):
        super().__init__()
        self.c_fc, self.c_proj = StackedLinear(N, C, H), StackedLinear(N, H, C)

    def forward(self, parts):
        """parts[i] (n_i, C) are the rows for expert i -> a list of the same shapes. One after the
        other: padded and batched they take 1.4 to 1.8 times as long on a CPU. An expert without
        rows runs, too, so that its gradient is zero, not missing."""
        weights = (part.unbind() for part in (self.c_fc.weight, self.c_fc.bias,
                                              self.c_proj.weight, self.c_proj.bias))
        return [F.linear(F.gelu(F.linear(part, w, b), approximate="tanh"), v, c)
                for part, w, b, v, c in zip(parts, *weights, strict=True)]


class MixtureOfExperts(nn.Module):
    """A router and N experts in the place of an MLP. Each token goes through k of them, each 4C/k
    wide inside: N/k times the MLP's parameters, and its FLOPs. No token is dropped."""

    def __init__(self, config):
        super().__init__()
        self.n_experts, self.top_k = config.n_experts, config.top_k
        self.router = nn.Linear(config.n_embd, config.n_experts, bias=False)
        self.experts = Experts(config.n_experts, config.n_embd, 4 * config.n_embd // config.top_k)
        self.core = self.visit  # how tokens meet experts; may be set from outside
        self.all_tokens = lambda counts: counts  # sums over whoever has other tokens of a sequence
        # Of the last forward: a sum over its tokens, of 1 for each if all experts have the same to
        # do (DeepSeek-V3, arXiv 2412.19437); and how many tokens chose each expert
        self.balance = self.load = None
        self.balance_weight = 0.01  # of balance in the loss; may be set from outside

    @torch.compiler.disable  # sizes depend on the data
    def visit(self, x, gates, chosen):
        """x (B, S, C); gates, chosen (B, S, k). Each expert takes the tokens that chose it, and
        what it says is added to theirs, weighed by the gate."""
        tokens, gates, chosen = (part.flatten(0, 1) for part in (x, gates, chosen))
        visits = [(chosen == i).nonzero(as_tuple=True) for i in range(self.n_experts)]
        said = self.experts([tokens[at] for at, _ in visits])
        y = torch.zeros_like(tokens)
        for (at, choice), out in zip(visits, said, strict=True):
            y.index_add_(0, at, gates[at, choice].unsqueeze(1) * out)
        return y.view_as(x)

    def forward(self, x):  # (B, S, C)
        wide = torch.promote_types(x.dtype, torch.float)  # the router's, 32 bits at least
        logits = F.linear(x.to(wide), self.router.weight.to(wide))  # (B, S, N)
        top, chosen = logits.topk(self.top_k)  # (B, S, k)
        each = torch.zeros_like(logits[:, 0]).scatter_add_(
            1, chosen.flatten(1), torch.ones_like(top).flatten(1))  # (B, N)
        total = self.all_tokens(each.clone())
        share = total * self.n_experts / total.sum(1, keepdim=True)  # 1 if even
        self.balance = (share.unsqueeze(1) * logits.softmax(-1)).sum()
        self.load = each.sum(0)
        return self.core(x, top.softmax(-1).to(x.dtype), chosen)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MixtureOfExperts(config) if config.n_experts else MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def extra_loss(layers):
    """What experts among these layers add to the loss, by the last forward: a sum over its tokens;
    None where there are none."""
    blocks = [layer for layer in layers if isinstance(layer, Block)]
    routed = [block.mlp for block in blocks if isinstance(block.mlp, MixtureOfExperts)]
    return sum(mlp.balance_weight * mlp.balance for mlp in routed) if routed else None


ABSENT = -1  # a target that does not count


class CrossEntropy(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, logits, targets):  # (B, S, V), (B, S) -> sum over the tokens
        wide = logits.float() if logits.element_size() == 2 else logits  # exp and sum in 32 bits
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum",
                               ignore_index=ABSENT)


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.loss = CrossEntropy(config.vocab_size)

    def forward(self, x):
        return self.lm_head(self.ln_f(x))  # (B, S, V) logits


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
        if targets is None:
            return x
        loss, extra = self.layers[-1].loss(x, targets), extra_loss(self.layers)
        return loss if extra is None else loss + extra

    def canonical_parameters(self):
        """(name, parameter), named as nanoGPT has them: 'transformer.h.2.attn.c_attn.weight'. The
        two ends of the tied embedding are one parameter."""
        for name, param in self.named_parameters():  # layers.3.attn.c_attn.weight
            _, i, local = name.split(".", 2)
            block = f"h.{int(i) - 1}." if 0 < int(i) <= self.config.n_layer else ""
            yield f"transformer.{block}{local}", param


# Names under which nanoGPT's files hold the same tensor a second time.
ALIASES = {"transformer.wte.weight": ["lm_head.weight"]}


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


def build(config, seed=0, dtype=torch.float32):
    """The whole model with its initial values, in one process."""
    model = GPT(config).to(dtype)
    for name, param in model.canonical_parameters():
        param.data.copy_(initial_value(name, param.shape, config, seed))
    return model
