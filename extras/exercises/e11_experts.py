"""Exercise 11: dispatch and combine. E ranks have n experts each: expert i is on rank i // n. Each
token chose k experts. Dispatch: for each choice the token's row goes to the rank of the expert.
Combine: the outputs come back and are added up, each times its gate. send_rows sends rows, sorted
by expert; before that, the ranks tell each other by all_to_all how many rows they will send.
"""

import torch

from collectives import all_to_all
from expert_parallel import run_by_expert, send_rows


def dispatch_and_combine(x, gates, chosen, experts, group):
    """x (B, S, C); gates, chosen (B, S, k). Returns (B, S, C). experts.c_fc.weight.size(0) is n.

    Two tokens a b with choices [2 0] and [2 1] on one of two ranks, n = 2: sorted by expert the
    rows are a b a b, for experts 0 1 2 2; counts [1 1 2 0]: two rows for rank 0, two for rank 1.
    send_rows(rows, sent, received, group): sent[r] rows go to rank r, received[r] come from it.
    run_by_expert(experts, rows, counts): counts (E, n), how many rows came from each rank for each
    of this rank's experts; returns the outputs in the order of the rows."""
    raise NotImplementedError
