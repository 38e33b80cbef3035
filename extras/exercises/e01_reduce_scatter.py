"""Exercise 1: ring reduce-scatter. N ranks have a tensor each, cut into N chunks (the first ones
may be larger). Make chunk r of rank r the sum of all ranks' chunks r, in place, in N - 1 hops: in
a hop each rank sends one chunk to group.next and adds the one that came from group.prev, which
may have another size. (Many texts let rank r end with chunk r + 1: here it is chunk r.)
group.size, group.rank: who you are. group.exchange(send, dst, recv, src).wait() is a hop.
"""

import torch


def reduce_scatter(tensor, group, combine=torch.Tensor.add_):
    """In: a full tensor. Out: the same tensor, whose chunk group.rank is summed; its other chunks
    may hold anything. combine(into, received) is how to add, in place. Returns the tensor.

    Three ranks with [1 2 3], [10 20 30] and [100 200 300]: at the end rank 0 has 111 in chunk 0,
    rank 1 has 222 in chunk 1, rank 2 has 333 in chunk 2. Hop by hop, rank 0 sends chunks 2 1."""
    chunks = tensor.view(-1).tensor_split(group.size)  # flat views: write into them
    raise NotImplementedError
