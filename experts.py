"""Mixture of experts in plain PyTorch: a GPT whose blocks have a router and experts instead of
an MLP. Nothing here is parallel: expert_parallel.py spreads the experts over ranks.

The router scores all experts for each token; the token runs through the k with the highest scores,
and their outputs are summed, weighted by k gates (the softmax of those scores). An expert is 1/k as
wide as the MLP, so a layer has n_experts / k times the MLP's parameters at the MLP's FLOPs.
Dropless: an expert runs all tokens that choose it. Shazeer et al., arXiv 1701.06538; Switch
Transformer, arXiv 2101.03961.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from llama import Llama, swiglu
from model import GPT
from sizes import LlamaConfig


class StackedLinear(nn.Module):
    """The weights of n linear layers in one tensor: weight (n, out, in), bias (n, out) or None."""

    def __init__(self, n, n_in, n_out, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n, n_out)) if bias else None

    def each(self):
        """Yields (weight, bias) of each of the n layers."""
        weights = self.weight.unbind()
        biases = [None] * len(weights) if self.bias is None else self.bias.unbind()
        return zip(weights, biases, strict=True)


def gelu(x):
    return F.gelu(x, approximate="tanh")


class Experts(nn.Module):
    """n_experts MLPs, each 1/k as wide as the MLP of a GPT without experts."""

    def __init__(self, config):
        super().__init__()
        n, C = config.n_experts, config.n_embd
        hidden = 4 * C // config.top_k
        self.activation = gelu
        self.c_fc = StackedLinear(n, C, hidden)
        self.c_proj = StackedLinear(n, hidden, C)

    def forward(self, inputs):
        """Run expert i on the tokens inputs[i] (n_i, C). Returns a list of outputs, (n_i, C) each.

        The experts run one after the other: on a CPU, padding all inputs to one size and batching
        them takes longer (docs/measured.md). An expert without tokens (n_i = 0) runs too, so that
        backward reaches a rank's experts even if none of them has a token."""
        outputs = []
        for x, (W1, b1), (W2, b2) in zip(inputs, self.c_fc.each(), self.c_proj.each(), strict=True):
            hidden = self.activation(F.linear(x, W1, b1))  # (n_i, hidden)
            outputs.append(F.linear(hidden, W2, b2))  # (n_i, C)
        return outputs


class LlamaExperts(Experts):
    """n_experts MLPs like a Llama's: SwiGLU, no biases."""

    def __init__(self, config):
        nn.Module.__init__(self)
        n, C = config.n_experts, config.n_embd
        hidden = config.n_hidden // config.top_k
        self.activation = swiglu
        self.c_fc = StackedLinear(n, C, 2 * hidden, bias=False)
        self.c_proj = StackedLinear(n, hidden, C, bias=False)


class Router(nn.Linear):
    """The experts' scores for each token, in fp32 or fp64: rounded scores choose other experts."""

    def forward(self, x):  # (B, S, C) -> (B, S, n_experts)
        wide = torch.promote_types(x.dtype, torch.float)
        return F.linear(x.to(wide), self.weight.to(wide))


class MixtureOfExperts(nn.Module):
    """Replaces a block's MLP. expert_parallel.py replaces two methods: run_experts, where experts
    are on several ranks, and sum_counts, where ranks share a sequence."""

    def __init__(self, config):
        super().__init__()
        self.n_experts = config.n_experts
        self.top_k = config.top_k
        self.router = Router(config.n_embd, config.n_experts, bias=False)
        self.experts = (LlamaExperts if isinstance(config, LlamaConfig) else Experts)(config)
        self.balance_weight = 0.01  # weight of `balance` in the loss
        # Load-balance term of the last forward, the sum over its tokens: each adds 1 if all experts
        # get equally many tokens, more if few get most of them (DeepSeek-V3, arXiv 2412.19437)
        self.balance = None
        self.load = None  # (n_experts,): how many tokens of the last forward chose each expert
        # (1 + n_experts,): sums of `balance` and of `load`. run/routing.py replaces it by a row of
        # its table
        self.statistics = torch.zeros(1 + config.n_experts, dtype=torch.double, device="cpu")

    def run_experts(self, x, gates, chosen):
        """x (B, S, C); gates, chosen (B, S, k): weight and index of each token's experts.
        Dispatch: each expert gets the tokens that chose it. Combine: the outputs of a token's k
        experts are added up, each times its gate. Returns (B, S, C)."""
        tokens = x.flatten(0, 1)  # (B * S, C)
        gates = gates.flatten(0, 1)  # (B * S, k)
        chosen = chosen.flatten(0, 1)
        # chosen = [[0, 2], [2, 1]]: expert 2 is choice 1 of token 0 and choice 0 of token 1, so
        # assigned[2] = ([0, 1], [1, 0])
        assigned = [(chosen == i).nonzero(as_tuple=True) for i in range(self.n_experts)]
        outputs = self.experts([tokens[token] for token, _ in assigned])  # (n_i, C) each
        y = torch.zeros_like(tokens)
        for (token, choice), output in zip(assigned, outputs, strict=True):
            y.index_add_(0, token, gates[token, choice].unsqueeze(1) * output)
        return y.view_as(x)

    def sum_counts(self, counts):
        """counts (B, n_experts): how many of this process's tokens of each sequence chose each
        expert. Returns the counts of all tokens of the sequences: here this process has all."""
        return counts

    def forward(self, x):  # (B, S, C)
        logits = self.router(x)  # (B, S, n_experts)
        scores, chosen = logits.topk(self.top_k)  # (B, S, k) each
        # counts (B, n_experts): how many tokens of each sequence chose each expert
        ones = torch.ones_like(scores).flatten(1)
        counts = logits.new_zeros(len(x), self.n_experts).scatter_add_(1, chosen.flatten(1), ones)
        # The balance loss multiplies each expert's share of the choices by its router probability.
        # Per sequence: a product of means over the batch would depend on how the batch is cut
        total = self.sum_counts(counts.clone())  # a clone, because a replacement sums in place
        share = total * self.n_experts / total.sum(1, keepdim=True)  # (B, n_experts), 1 if even
        self.balance = (share.unsqueeze(1) * logits.softmax(-1)).sum()
        self.load = counts.sum(0)
        return self.run_experts(x, scores.softmax(-1).to(x.dtype), chosen)  # (B, S, C)


def balance_loss(layers):
    """The load-balance loss of these layers' experts in the last forward, summed over tokens; None
    if no layer has experts. Also adds to the statistics of the experts, for the log: call it once
    after each forward."""
    routed = [module for layer in layers for module in layer.modules()
              if isinstance(module, MixtureOfExperts)]
    for mlp in routed:
        mlp.statistics[0] += mlp.balance.detach()
        mlp.statistics[1:] += mlp.load
    return sum(mlp.balance_weight * mlp.balance for mlp in routed) if routed else None


class MixtureGPT(GPT):
    """A GPT with experts in each block. Given targets, forward returns the summed loss with the
    load-balance loss in it."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.layers[1:-1]:
            block.mlp = MixtureOfExperts(config)

    def forward(self, idx, targets=None):  # (B, S) each
        result = super().forward(idx, targets)
        return result if targets is None else result + balance_loss(self.layers)


class MixtureLlama(MixtureGPT, Llama):
    """A Llama with experts in each block: MixtureGPT's methods, Llama's layers."""


def kind_of(config):
    """The class of the model that a GPTConfig or LlamaConfig describes."""
    if isinstance(config, LlamaConfig):
        return MixtureLlama if config.n_experts else Llama
    return MixtureGPT if config.n_experts else GPT
