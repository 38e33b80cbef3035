"""Collectives by hand: all_reduce and its family, from sends and receives.

A collective is an operation that all ranks of a group call in the same order. A tensor of n bytes
is cut into N chunks (torch.tensor_split, so any n); rank r owns chunk r. Sent by each rank:

    reduce_scatter    each rank ends with the sum of its own chunk        n (N-1)/N
    all_gather        each rank's own chunk is copied to all ranks        n (N-1)/N
    all_reduce        all ranks end with the sum of all: the two above    2 n (N-1)/N
    all_to_all        rank i's j-th tensor, of n/N bytes, goes to rank j  n (N-1)/N

Four have a root, one rank with the whole at first or at last. Sent: by the root   by another rank
    scatter           the root's chunks go to their owners             n (N-1)/N     0
    gather            the owners' chunks go to the root                0             n/N
    broadcast         its tensor to all: scatter, then all_gather      2 n (N-1)/N   n (N-1)/N
    reduce            the sum to it: reduce_scatter, then gather       n (N-1)/N     n

No all-reduce can send less (Patarasuk and Yuan 2009). The ring takes 2 (N-1) hops: in a hop each
rank sends one message. All ranks end with the same bits.

    python -m extras.show collectives  a ring of 4 processes, hop by hop, and the bytes it sends
"""

import torch

from group import wait_all

# In each hop of a ring every rank sends one chunk to the next rank and receives another one from
# the rank before, so all links are busy all the time. Reduce-scatter on four ranks: rank 0's tensor
# is a, rank 1's b, and so on; "2: d+a" is chunk 2, so far the sum of d's and a's chunk 2:
#
#             rank 0           rank 1           rank 2           rank 3
#    hop 0    sends 3: a       sends 0: b       sends 1: c       sends 2: d
#    hop 1    sends 2: d+a     sends 3: a+b     sends 0: b+c     sends 1: c+d
#    hop 2    sends 1: c+d+a   sends 2: d+a+b   sends 3: a+b+c   sends 0: b+c+d
#    at last  0 is complete    1 is complete    2 is complete    3 is complete


def flat(tensor):
    """A view with one dim, which the collectives cut and change in place. ValueError, before
    anything is sent, if the tensor does not lie in memory element by element, such as a transposed
    one, or one of expand(), whose elements share their memory."""
    if not tensor.is_contiguous():
        raise ValueError(f"a collective cannot take a tensor {list(tensor.shape)} with strides "
                         f"{list(tensor.stride())}; pass tensor.contiguous()")
    return tensor.view(-1)


def own_chunk(tensor, group):
    """The chunk of a contiguous tensor that this rank owns: a flat view."""
    return flat(tensor).tensor_split(group.size)[group.rank]


def reduce_scatter(tensor, group, combine=torch.Tensor.add_):
    """In: every rank a full tensor. Out: chunk r of rank r is the sum over all ranks; the other
    chunks hold partial sums. combine(into, received): how to merge a received chunk into the rank's
    own, in place; by default it is added.

    In a model (WithBackward) its backward is an all_gather: every rank has a term in each sum, and
    d(sum)/d(term) = 1, so a rank needs the gradients of all chunks."""
    N, r = group.size, group.rank
    chunks = flat(tensor).tensor_split(N)  # flat views, as equal as n allows
    for hop in range(N - 1):  # N = 4, r = 1: sends chunks 0 3 2, receives and adds 3 2 1
        out = chunks[(r - 1 - hop) % N]
        into = chunks[(r - 2 - hop) % N]
        received = torch.empty_like(into)
        group.exchange(out, group.next, received, group.prev).wait()
        combine(into, received)
    return tensor


def all_gather(tensor, group):
    """In: chunk r of rank r is valid. Out: every rank has all chunks. Its backward is
    reduce_scatter: every rank used chunk r, so its gradient is the sum of the ranks' gradients."""
    N, r = group.size, group.rank
    chunks = flat(tensor).tensor_split(N)  # flat views, as equal as n allows
    for hop in range(N - 1):  # N = 4, r = 1: sends chunks 1 0 3, receives 0 3 2
        out = chunks[(r - hop) % N]
        into = chunks[(r - 1 - hop) % N]
        group.exchange(out, group.next, into, group.prev).wait()
    return tensor


def all_reduce(tensor, group, combine=torch.Tensor.add_):
    """In: every rank a full tensor. Out: every rank the sum, in place."""
    return all_gather(reduce_scatter(tensor, group, combine), group)


def maximum(into, received):
    """A combine: all_reduce(tensor, group, maximum) gives every rank the largest of each number."""
    torch.maximum(into, received, out=into)


def refuse_wrong_lists(outputs, inputs, group):
    """ValueError unless all_to_all can take these lists: N contiguous tensors each, and no output
    in the memory of another tensor. (What arrives there would overwrite what is yet to be sent.)"""
    N = group.size
    if not len(outputs) == len(inputs) == N:
        raise ValueError(f"all_to_all takes {N} outputs and {N} inputs, one for each rank, not "
                         f"{len(outputs)} and {len(inputs)}")
    # Where each tensor begins and ends in memory. (An empty one: 0 and 0)
    ranges = [(flat(x).data_ptr(), x.data_ptr() + x.nbytes) for x in [*outputs, *inputs]]
    for i, (start, stop) in enumerate(ranges[:N]):
        if any(start < other_stop and other_start < stop
               for other_start, other_stop in ranges[i + 1 :]):
            raise ValueError(f"all_to_all: outputs[{i}] shares memory with an input or another "
                             "output; pass outputs that have memory of their own")


def all_to_all(outputs, inputs, group):
    """In: lists of N tensors; inputs[j] is for rank j. Out: outputs[i] is what rank i sent to this
    rank. Sends all inputs but this rank's own. Its backward is an all_to_all of the gradients."""
    refuse_wrong_lists(outputs, inputs, group)
    N, r = group.size, group.rank
    outputs[r].copy_(inputs[r])
    works = []
    for distance in range(1, N):  # at each distance every rank sends one tensor and receives one
        to = (r + distance) % N
        source = (r - distance) % N
        works.append(group.exchange(inputs[to], to, outputs[source], source))
    wait_all(works)


# ---- four with a root: the one rank that has the tensor at first, or the result at last ----


def scatter(tensor, group, root=0):
    """In: `root` a full tensor. Out: chunk r of rank r is root's; other chunks are unchanged."""
    chunks = flat(tensor).tensor_split(group.size)
    if group.rank == root:
        wait_all([group.send(chunk, r) for r, chunk in enumerate(chunks) if r != root])
    else:
        group.recv(chunks[group.rank], root).wait()
    return tensor


def gather(tensor, group, root=0):
    """In: chunk r of rank r is valid. Out: `root` has all chunks; other ranks' are unchanged."""
    chunks = flat(tensor).tensor_split(group.size)
    if group.rank == root:
        wait_all([group.recv(chunk, r) for r, chunk in enumerate(chunks) if r != root])
    else:
        group.send(chunks[group.rank], root).wait()
    return tensor


def broadcast(tensor, group, root=0):
    """In: `root` a full tensor. Out: every rank has it. (Were the whole tensor sent to each rank,
    `root` would send n (N-1) bytes.)"""
    return all_gather(scatter(tensor, group, root), group)


def reduce(tensor, group, root=0, combine=torch.Tensor.add_):
    """In: every rank a full tensor. Out: `root` has the sum; the others' chunks hold partial sums.
    """
    return gather(reduce_scatter(tensor, group, combine), group, root)


class WithBackward(torch.autograd.Function):
    """How messages become part of a model. y = WithBackward.apply(x, forward, backward) computes
    y = forward(x); when autograd runs backward, grad_x = backward(grad_y)."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_of_x = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_of_x(grad), None, None
