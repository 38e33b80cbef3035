"""Judges the collectives: reduce-scatter and all-gather (exercises 1 and 2).

Rank r's term of chunk c is 10^(r + N c). So digit r + N c of a sum is the number of times that rank
r's term of chunk c is in the sum."""

import torch

import collectives
from collectives import maximum
from extras.exercises.catalogue import RANKS
from extras.exercises.judge import Wrong, beside, same, trains


def terms(total, N):
    """counts[c][r]: how often rank r's term of chunk c is in this sum."""
    digits = f"{round(total):0{N * N}d}"[::-1]  # the last digit, of 10^0, first
    return [[int(digits[r + N * c]) for r in range(N)] for c in range(N)]


def ranks_in_words(ranks):
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def explain_sum(total, c, N):
    """What is wrong with the sum of chunk c; "" if it is right."""
    right = sum(10.0 ** (r + N * c) for r in range(N))
    # The average of chunk 0 is a fraction, 1111 / 4; that of a later chunk is whole, 11110000 / 4
    is_fraction = total != round(total) and total * N == round(total * N)
    if is_fraction or total * N == right:
        return f"is divided by {N}: sums are never averaged here"
    if total < 0 or total >= 10 ** (N * N):
        return "is no sum of the ranks' terms"
    counts = terms(total, N)
    own = counts[c]
    foreign = [other for other in range(N) if other != c and any(counts[other])]
    if foreign and not any(own):
        return f"holds terms of chunk {foreign[0]}"
    if foreign:
        return f"has terms of chunk {foreign[0]} added to it"
    missing = [r for r in range(N) if own[r] == 0]
    if c in missing and any(own):
        return (f"lacks the term of {ranks_in_words(missing)}: what came has overwritten rank "
                f"{c}'s own term; receive into a new tensor, and add")
    if missing:
        return f"lacks the term of {ranks_in_words(missing)}: not summed"
    often = [r for r in range(N) if own[r] > 1]
    return f"has the term of {ranks_in_words(often)} {own[often[0]]} times" if often else ""


def check_waits(group):
    if group.not_waited_for:
        raise Wrong(f"rank {group.rank}: hop {min(group.not_waited_for)} was not waited for: "
                    "group.exchange(...).wait()")


def check_end(returned, tensor, hops, N):
    """Raise Wrong unless the form returned the tensor that it got, after at most N - 1 hops."""
    if hops > N - 1:
        raise Wrong(f"right, but in {hops} hops (calls of exchange): N - 1 = {N - 1} are enough")
    if not isinstance(returned, torch.Tensor):
        raise Wrong(f"right, but {type(returned).__name__} was returned: return the tensor that "
                    "came in")
    if returned.shape != tensor.shape or returned.data_ptr() != tensor.data_ptr():
        raise Wrong("right, but another tensor was returned: return the one that came in")


def judge_reduce_scatter(make_mesh, forms):
    form = forms["reduce_scatter"]
    mesh = make_mesh(dp=RANKS)
    group = mesh.group("dp")
    N, r = group.size, group.rank
    n = 10  # chunks of 3 3 2 2
    x = torch.cat([torch.full_like(chunk, 10.0 ** (r + N * c)) for c, chunk in
                   enumerate(torch.zeros(n, dtype=torch.double).tensor_split(N))])
    returned = form(x, group)
    sent, hops = group.bytes_sent, group.hops
    check_waits(group)
    chunks = x.tensor_split(N)
    for value in chunks[r].tolist():
        said = explain_sum(value, r, N)
        if said:
            complete = [c for c in range(N) if not explain_sum(chunks[c][0].item(), c, N)]
            if complete:
                said += f"; complete here is chunk {complete[0]}: start one chunk earlier or later"
            elif hops != N - 1:
                said += f"; {hops} hops were made, and {N - 1} are needed"
            raise Wrong(f"rank {r}: its own chunk {r} {said}")
    check_end(returned, x, hops, N)
    # A rank sends every chunk but its own, which it receives last
    facts = [beside(f"bytes sent by rank {r}", sent, "8 bytes x (n - own chunk)",
                    8 * (n - chunks[r].numel())),
             beside("hops", hops, "N - 1", N - 1)]
    # Three ranks (rank 3 is alone, and has nothing to do). Of 2 numbers one chunk is empty
    for size in (2, 7):
        three = mesh.join("three", [[0, 1, 2], [3]])
        y = torch.arange(size, dtype=torch.double) + 10 * three.rank
        want = three.size * torch.arange(size, dtype=torch.double) + 10 * sum(range(three.size))
        form(y, three)
        own = y.tensor_split(three.size)[three.rank]
        if not same(own, want.tensor_split(three.size)[three.rank]):
            raise Wrong(f"right on {N} ranks with {n} numbers, wrong on {three.size} with {size}: "
                        f"rank {three.rank} has {own.tolist()}")
    largest = torch.full((N,), float(r))
    form(largest, group, maximum)
    if largest[r] != N - 1:
        raise Wrong("combine is ignored: call combine(into, received)")
    return [*facts, trains(make_mesh, [(collectives, "reduce_scatter", form)], {"dp": 4})[1]]


def judge_all_gather(make_mesh, forms):
    form = forms["all_gather"]
    mesh = make_mesh(dp=RANKS)
    group = mesh.group("dp")
    N, r = group.size, group.rank
    n = 10
    # Before: chunk c of rank r is filled with 100 r + c, its own chunk r with 1000 + r
    chunks = [torch.full_like(chunk, 1000.0 + r if c == r else 100.0 * r + c) for c, chunk in
              enumerate(torch.zeros(n, dtype=torch.double).tensor_split(N))]
    x = torch.cat(chunks)
    returned = form(x, group)
    sent, hops = group.bytes_sent, group.hops
    check_waits(group)
    for c, chunk in enumerate(x.tensor_split(N)):
        value = chunk[0].item()
        if not same(chunk, torch.full_like(chunk, 1000.0 + c)):
            if value == 100 * r + c:
                said = "is unchanged: nothing arrived"
            elif value < 100 * N:
                said = (f"is not valid: rank {int(value // 100)} sent its chunk {int(value % 100)} "
                        "before it had received it; in the first hop a rank sends its own chunk")
            elif value in range(1000, 1000 + N):
                said = f"holds the chunk of rank {int(value - 1000)}"
            else:
                said = f"holds {value:g}: chunks are copied, not added"
            raise Wrong(f"rank {r}: chunk {c} {said}")
    check_end(returned, x, hops, N)
    # A rank sends every chunk but the next rank's
    facts = [beside(f"bytes sent by rank {r}", sent, "8 bytes x (n - chunk of the next rank)",
                    8 * (n - chunks[group.next].numel())),
             beside("hops", hops, "N - 1", N - 1)]
    for size in (2, 7):  # three ranks, like in judge_reduce_scatter
        three = mesh.join("three", [[0, 1, 2], [3]])
        want = torch.arange(size, dtype=torch.double)
        y = torch.zeros_like(want)
        collectives.own_chunk(y, three).copy_(collectives.own_chunk(want, three))
        form(y, three)
        if not same(y, want):
            raise Wrong(f"right on {N} ranks with {n} numbers, wrong on {three.size} with {size}: "
                        f"rank {three.rank} has {y.tolist()}")
    return [*facts, trains(make_mesh, [(collectives, "all_gather", form)], {"dp": 4})[1]]
