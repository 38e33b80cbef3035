"""Expert parallelism: E data-parallel ranks share the experts of each block. Dispatch: an
all-to-all sends each token to the ranks of its experts. Combine: another brings the outputs back.

experts.py has all experts on one rank. Split: rank e of E has n = n_experts / E of them, from
expert e n on; their gradients are summed over the D/E ranks with the same experts.
Replicated: the router. Sent per rank, layer and microbatch if the experts are even: k B S C (E-1)/E
elements for k experts per token, as many back, and in backward the same two again.
GShard, arXiv 2006.16668.

    python -m extras.show expert_parallel        who sends what, on 4 ranks
"""

from dataclasses import replace
from functools import partial

import torch

from collectives import WithBackward, all_reduce, all_to_all
from shard import take_slice


def send_rows(x, sent, received, group, all_to_all=all_to_all):
    """Send rows of x (rows, C): the first sent[0] rows to rank 0, the next sent[1] to rank 1, ...
    Returns (sum(received), C): received[0] rows from rank 0, then received[1] from rank 1, ...
    Backward: the gradients of the rows are sent back, so the two lists change places. all_to_all:
    engine/expert_parallel.py passes its own."""
    def move(x, out, into):  # out[j] rows go to rank j, into[j] rows come from rank j
        rows = x.new_empty((sum(into), x.size(1)))
        all_to_all(rows.split(into), x.contiguous().split(out), group)
        return rows

    return WithBackward.apply(x, lambda x: move(x, sent, received),
                              lambda grad: move(grad, received, sent))


def run_by_expert(experts, rows, counts):
    """Run rows that came from E ranks on this rank's n experts. counts (E, n), on the CPU: how many
    rows came from each rank for each expert. The rows are sorted by rank, then by expert. (The
    engine's rows may be on a GPU.) Returns the outputs, in the order of the rows."""
    E, n = counts.shape
    # E = 2, n = 2, counts [[1, 1], [2, 0]]: the rows are for experts 0 1 | 0 0
    expert = torch.arange(n).repeat(E).repeat_interleave(counts.flatten())
    order = expert.argsort(stable=True).to(rows.device)  # 0 2 3 1: sorted by expert, then by rank
    outputs = torch.cat(experts(rows[order].split(counts.sum(0).tolist())))
    return outputs[order.argsort()]  # back to the order of the rows


def dispatch_and_combine(x, gates, chosen, experts, group):
    """MixtureOfExperts.run_experts where each of the group's E ranks has n experts; `experts`: this
    rank's. x (B, S, C); gates, chosen (B, S, k): weight and index of each token's experts. Returns
    (B, S, C)."""
    tokens = x.flatten(0, 1)  # (B * S, C)
    k = chosen.size(-1)
    # An assignment is a token and one of its k experts: assignment a is of token a // k.
    # Sorted by expert, and so by rank: rank 0 has the first n experts, rank 1 the next n.
    chosen = chosen.flatten()  # (B * S * k,)
    order = chosen.argsort(stable=True)
    to_send = torch.bincount(chosen, minlength=group.size * experts.c_fc.weight.size(0))
    # (E, n) each. to_send[r, i]: how many rows go to expert i of rank r; to_run[r, i]: how many
    # rows come from rank r for expert i of this rank
    to_send = to_send.view(group.size, -1)
    to_run = torch.empty_like(to_send)
    all_to_all(list(to_run), list(to_send), group)
    sent = to_send.sum(1).tolist()
    received = to_run.sum(1).tolist()

    rows = send_rows(tokens[order // k], sent, received, group)  # dispatch
    outputs = run_by_expert(experts, rows, to_run)
    outputs = send_rows(outputs, received, sent, group)  # back to the tokens' rank
    # combine: add up the outputs of a token's k experts, each times its gate
    y = torch.zeros_like(tokens)
    y.index_add_(0, order // k, gates.flatten()[order].unsqueeze(1) * outputs)
    return y.view_as(x)


def spread_experts(model, mesh, sp=False):
    """Give each rank its experts: the E ranks of the axis ep share those of each block.

    In: a MixtureGPT or MixtureLlama, tagged by tag_whole, and maybe split by tensor_parallel or
    (sp) by sequence_parallel, which leave experts whole.
    After: the parameters of experts are this rank's slices, tagged as such, and their gradients are
    to be summed over the ranks that hold the same experts.

    Each of T tensor ranks runs all tokens that it holds: under sp 1/T of them, else all, so T ranks
    repeat the same work. (engine/expert_parallel.py spreads the experts over them, too.)"""
    group = mesh.group("ep")
    same_experts = mesh.group("shard", "cp")
    share_sequences = [mesh.group("cp"), *([mesh.group("tp")] if sp else [])]

    def sum_counts(counts):  # (B, n_experts): from this rank's tokens of B sequences -> from all
        for ranks in share_sequences:
            all_reduce(counts, ranks)
        return counts

    for block in model.layers[1:-1]:
        layer = block.mlp
        n, rest = divmod(layer.n_experts, group.size)
        if rest:
            raise ValueError(f"--ep {group.size} must divide the {layer.n_experts} experts")
        own = (group.rank * n, (group.rank + 1) * n)
        for stack in (layer.experts.c_fc, layer.experts.c_proj):
            for name, full in list(stack.named_parameters()):
                # others: replicas of shards; under sp the tensor ranks
                _, *others = full.tag.sum_over
                tag = replace(full.tag, ranges=(own,), sum_over=(same_experts, *others))
                setattr(stack, name, take_slice(full, tag))
        layer.run_experts = partial(dispatch_and_combine, experts=layer.experts, group=group)
        layer.sum_counts = sum_counts
