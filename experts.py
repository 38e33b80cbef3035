"""Mixture of experts: a GPT whose blocks have a router and experts instead of an MLP. And expert
parallelism, the last third of this file: ranks of a group each have some of the experts.

The router scores all experts for each token; the token runs through the k with the highest scores,
and their outputs are summed, weighted by k gates (the softmax of those scores). An expert is 1/k as
wide as the MLP, so a block has n_experts / k times the MLP's parameters at the MLP's FLOPs.
Dropless: an expert runs all tokens that choose it. Shazeer et al., arXiv 1701.06538; Switch
Transformer, arXiv 2101.03961.

Expert parallelism, GShard, arXiv 2006.16668. Split: the E ranks along the axis ep have 1/E of the
experts each; with --sp the E T ranks along ep and tp 1/(E T). An expert's gradients are summed over
the ranks that have it. Replicated: the router. Dispatch: an all-to-all sends each token to the
ranks of its experts. Combine: another one brings the outputs back. Sent per rank, block and
microbatch if all experts get equally many tokens: k B S C (E-1)/E elements for k experts per token,
as many back, and in backward the same two again (with --sp, E T for E, and S/T for S). With --cp or
--sp, an all-reduce of B n_experts counts for the balance loss, too.

    python train.py --experts 8 --ep 4
    python -m extras.show expert_parallel  # on 4 ranks
"""

from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from collectives import WithBackward, all_reduce, all_to_all
from llama import Llama, swiglu
from model import GPT
from shard import take_slice
from sizes import LlamaConfig

BALANCE = 0.01  # weight of the balance loss


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


class Experts(nn.Module):
    """n_experts MLPs like the one of a GPT or Llama without experts, each 1/k as wide."""

    def __init__(self, config):
        super().__init__()
        n, C = config.n_experts, config.n_embd
        self.is_llama = isinstance(config, LlamaConfig)  # SwiGLU, and no biases
        hidden = (config.n_hidden if self.is_llama else 4 * C) // config.top_k
        self.c_fc = StackedLinear(n, C, 2 * hidden if self.is_llama else hidden, not self.is_llama)
        self.c_proj = StackedLinear(n, hidden, C, not self.is_llama)

    def activation(self, x):
        return swiglu(x) if self.is_llama else F.gelu(x, approximate="tanh")

    def forward(self, inputs):
        """Run expert i on the tokens inputs[i] (n_i, C). Returns a list of outputs, (n_i, C) each.

        The experts run one after the other: on a CPU, padding all inputs to one size and batching
        them takes longer (docs/measured.md). An expert without tokens (n_i = 0) runs too: so
        backward sends this rank's all-to-alls, for which other ranks wait."""
        outputs = []
        for x, (W1, b1), (W2, b2) in zip(inputs, self.c_fc.each(), self.c_proj.each(), strict=True):
            hidden = self.activation(F.linear(x, W1, b1))  # (n_i, hidden)
            outputs.append(F.linear(hidden, W2, b2))  # (n_i, C)
        return outputs


class Router(nn.Linear):
    """The experts' scores for each token, in 32 bits at least: rounded scores choose other experts.
    """

    def forward(self, x):  # (B, S, C) -> (B, S, n_experts)
        wide = torch.promote_types(x.dtype, torch.float)
        return F.linear(x.to(wide), self.weight.to(wide))


class MixtureOfExperts(nn.Module):
    """A router and its experts, in place of a block's MLP."""

    uncompiled = ("run_experts", "sum_choices")  # messages, and data-dependent sizes (model.py)

    def __init__(self, config):
        super().__init__()
        self.n_experts = config.n_experts
        self.top_k = config.top_k
        self.router = Router(config.n_embd, config.n_experts, bias=False)
        self.experts = Experts(config)
        # The balance loss of the last forward (DeepSeek-V3, arXiv 2412.19437), a sum over tokens:
        # 1 per token if all experts get equally many, more if the likely ones get most of them
        self.balance = None

    def run_experts(self, x, gates, chosen):
        """x (B, S, C); gates, chosen (B, S, k): weight and index of each token's experts.
        Dispatch: each expert gets the tokens that chose it. Combine: the outputs of a token's k
        experts are added up, each times its gate. Returns (B, S, C)."""
        flat_x = x.flatten(0, 1)  # (B * S, C)
        # A row is a token and one of its k experts: row a, before it is sorted, is of token a // k.
        # Sorted by expert: chosen [[0, 2], [2, 1]] gives the order 0 3 1 2, so the tokens 0 1 0 1
        row_to_expert = chosen.flatten()  # (B * S * k,)
        order = row_to_expert.argsort(stable=True)
        row_to_token = order // self.top_k  # the token of each sorted row
        counts = torch.zeros(self.n_experts, dtype=torch.long, device=x.device)
        counts.scatter_add_(0, row_to_expert, torch.ones_like(row_to_expert))  # rows per expert
        outputs = self.run_rows(flat_x[row_to_token], counts)  # (B * S * k, C)
        y = torch.zeros_like(flat_x)
        y.index_add_(0, row_to_token, gates.flatten()[order].unsqueeze(1) * outputs)
        return y.view_as(x)

    # Replaced in replace_methods (below), where experts are on several ranks
    def run_rows(self, rows, counts):
        """rows (B * S * k, C), sorted by expert; counts (n_experts,): how many rows each expert
        has. Returns the experts' outputs, in the order of the rows."""
        return torch.cat(self.experts(rows.split(counts.tolist())))

    # Replaced in replace_methods, where ranks have different tokens of a sequence
    def sum_choices(self, choices):
        """choices (B, n_experts): how many of this process's tokens of each sequence chose each
        expert. Returns those of all tokens of the sequences: here this process has all."""
        return choices

    def forward(self, x):  # (B, S, C)
        logits = self.router(x)  # (B, S, n_experts)
        scores, chosen = logits.topk(self.top_k)  # (B, S, k) each
        # choices (B, n_experts): how many tokens of each sequence chose each expert
        ones = torch.ones_like(scores).flatten(1)
        choices = logits.new_zeros(len(x), self.n_experts).scatter_add_(1, chosen.flatten(1), ones)
        # The balance loss of a token: the sum over experts of ratio x the router's probability.
        # ratio: the expert's choices over those that it would have, were all chosen equally often.
        # Counted in each sequence: counts of a batch would depend on how the batch is cut
        total = self.sum_choices(choices)
        ratio = total * self.n_experts / total.sum(1, keepdim=True)  # (B, n_experts), 1 if even
        self.balance = (ratio.unsqueeze(1) * logits.softmax(-1)).sum()
        return self.run_experts(x, scores.softmax(-1).to(x.dtype), chosen)  # (B, S, C)


def balance_loss(layers):
    """The balance loss of these layers' experts in the last forward, summed over tokens; None
    if no layer has experts."""
    terms = [module.balance for layer in layers for module in layer.modules()
             if isinstance(module, MixtureOfExperts)]
    return BALANCE * sum(terms) if terms else None


class MixtureGPT(GPT):
    """A GPT with experts in each block. Given targets, forward returns the summed loss with the
    balance loss in it."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.layers[1:-1]:
            block.mlp = MixtureOfExperts(config)

    def forward(self, idx, targets=None):  # (B, S) each
        result = super().forward(idx, targets)
        return result if targets is None else result + balance_loss(self.layers)


class MixtureLlama(MixtureGPT, Llama):
    """A Llama with experts in each block. Python looks for a method in MixtureGPT, then in Llama,
    then in GPT: so super().__init__ in MixtureGPT is Llama's."""


# ---- the model of a config (here, because this file knows all four classes) ----


def kind_of(config):
    """The class of the model that a GPTConfig or LlamaConfig describes."""
    if isinstance(config, LlamaConfig):
        return MixtureLlama if config.n_experts else Llama
    return MixtureGPT if config.n_experts else GPT


def on_meta(config):
    """The whole model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return kind_of(config)(config)


def shapes_of(model):
    """{canonical name: full shape} of a model's parameters."""
    return {name: param.shape for name, param in model.canonical_parameters()}


# ---- expert parallelism ----


def send_rows(x, sent, received, group):
    """Send rows of x (rows, C): the first sent[0] rows to rank 0, the next sent[1] to rank 1, ...
    Returns (sum(received), C): received[0] rows from rank 0, then received[1] from rank 1, ...
    Backward: the gradients of the rows are sent back, so the two lists change places."""
    def move(x, sent, received):
        rows = x.new_empty((sum(received), x.size(1)))
        all_to_all(rows.split(received), x.contiguous().split(sent), group)
        return rows

    return WithBackward.apply(x, lambda x: move(x, sent, received),
                              lambda grad: move(grad, received, sent))


def run_by_expert(experts, rows, counts):
    """Run rows from all ranks of a group on this rank's n experts. counts (group.size, n), on the
    CPU: how many rows came from each rank for each expert. The rows are sorted by rank, then by
    expert. Returns the outputs, in the order of the rows."""
    num_ranks, n = counts.shape
    # 2 ranks, n = 2, counts [[1, 1], [2, 0]]: the rows are for experts 0 1 | 0 0
    row_to_expert = torch.arange(n).repeat(num_ranks).repeat_interleave(counts.flatten())
    order = row_to_expert.argsort(stable=True)  # 0 2 3 1: sorted by expert, then by rank
    order = order.to(rows.device, non_blocking=True)
    outputs = torch.cat(experts(rows[order].split(counts.sum(0).tolist())))
    return outputs[order.argsort()]  # back to the order of the rows


def run_on_ranks(rows, counts, experts, group):
    """MixtureOfExperts.run_rows where each rank of the group has n experts: rank 0 the first
    n, rank 1 the next n. experts: this rank's. rows (B * S * k, C), sorted by expert and so by
    rank; counts (group.size * n,). Returns the outputs, in the order of the rows."""
    counts = counts.view(group.size, -1)  # (group.size, n)
    incoming = torch.empty_like(counts)
    all_to_all(list(incoming), list(counts), group)
    # (group.size, n) each. to_send[r, i]: how many rows go to expert i of rank r; to_run[r, i]: how
    # many rows come from rank r for expert i of this rank
    both = torch.stack([counts, incoming])
    to_send, to_run = torch.tensor(group.read(both))  # the block's one wait for the device
    sent = to_send.sum(1).tolist()
    received = to_run.sum(1).tolist()
    rows = send_rows(rows, sent, received, group)
    outputs = run_by_expert(experts, rows, to_run)
    return send_rows(outputs, received, sent, group)  # back to the tokens' rank


def replace_methods(mixture, group, sequence_groups):
    """Replace the two methods of a MixtureOfExperts that need messages. sequence_groups: groups
    whose ranks have different tokens of the same sequences."""
    def run_rows(rows, counts):
        return run_on_ranks(rows, counts, mixture.experts, group)

    def sum_choices(choices):  # (B, n_experts): of this rank's tokens of B sequences -> of all
        for each in sequence_groups:
            all_reduce(choices, each)  # in place: nobody else reads them
        return choices

    if group.size > 1:
        mixture.run_rows = run_rows
    mixture.sum_choices = sum_choices  # a group of one sends nothing


def spread_experts(model, mesh, sp=False):
    """Divide each block's experts among the ranks of the axis ep and, under sp, where tensor ranks
    have different tokens, of the axis tp as well.

    In: a MixtureGPT or MixtureLlama, tagged by tag_whole, and maybe split by split_matrices, which
    leaves experts whole.
    After: the parameters of experts are this rank's slices, tagged as such, and their gradients are
    to be summed over the ranks that hold the same experts.

    Without sp the T tensor ranks with the same place on the axis ep hold the same tokens and the
    same experts, and repeat the same work.

    An expert's tag         without sp                      with sp
        sum_over            shard x cp, then rep            shard x cp, then rep
        shared_by           rep and tp                      rep (tensor ranks hold other experts)"""
    tp = mesh.group("tp")
    group = mesh.group("ep", "tp") if sp else mesh.group("ep")
    same_experts = mesh.group("shard", "cp")
    sequence_groups = [mesh.group("cp"), tp] if sp else [mesh.group("cp")]
    for block in model.layers[1:-1]:
        mixture = block.mlp
        n = mixture.n_experts // group.size
        own = (group.rank * n, (group.rank + 1) * n)
        for stack in (mixture.experts.c_fc, mixture.experts.c_proj):
            for name, full in list(stack.named_parameters()):
                _, *sums = full.tag.sum_over  # instead of the first, the ZeRO group: same_experts
                shared_by = full.tag.shared_by
                if sp:
                    sums = [each for each in sums if each is not tp]
                    shared_by = tuple(each for each in shared_by if each is not tp)
                tag = replace(full.tag, ranges=(own,), shared_by=shared_by,
                              sum_over=(same_experts, *sums))
                setattr(stack, name, take_slice(full, tag))
        replace_methods(mixture, group, sequence_groups)
