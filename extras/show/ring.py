"""python -m extras.show collectives: one ring all-reduce, hop by hop, and the bytes that the ring's
three collectives send. Next to the ring run two all-reduces that it beats: sequential,
and through a parameter server."""

import torch

from collectives import all_gather, all_reduce, all_to_all, maximum, reduce_scatter


def pass_to(tensor, group, src, dst, add=False):
    """Copy src's tensor to dst, or add it to dst's."""
    if group.rank == src:
        group.send(tensor, dst).wait()
    elif group.rank == dst:
        received = torch.empty_like(tensor)
        group.recv(received, src).wait()
        tensor.copy_(tensor + received if add else received)


def sequential_all_reduce(tensor, group):
    """Add from rank to rank, then copy from rank to rank. For a tensor of n bytes the busiest rank
    sends 2 n bytes, n in each phase. (If there are two ranks, each sends n bytes in all.)"""
    for r in range(1, group.size):
        pass_to(tensor, group, r - 1, r, add=True)
    for r in range(group.size - 1):  # N = 4: 3 -> 0, 0 -> 1, 1 -> 2, because rank 3 has the sum
        pass_to(tensor, group, (r - 1) % group.size, r)
    return tensor


def parameter_server_all_reduce(tensor, group):
    """Rank 0 adds the tensors of all others, then sends N-1 copies of the sum: (N-1) n bytes."""
    for r in range(1, group.size):
        pass_to(tensor, group, r, 0, add=True)
    for r in range(1, group.size):
        pass_to(tensor, group, 0, r)
    return tensor


def in_bits(row):
    """A row of N numbers as text, each in N bits."""
    # % 2**64: with 64 ranks the last rank's bit is bit 63, the sign of an int64
    return " ".join(f"{int(value) % 2**64:0{len(row)}b}" for value in row)


def demo(mesh):
    """One ring all-reduce, hop by hop; then bytes against the formulas."""
    group = mesh.group("dp")
    N = group.size
    # Rank r's terms are 2^r. So bit r of a number, from the right, says whether the number contains
    # rank r's term: with N = 4, 0110 is the sum of the terms of ranks 1 and 2
    x = torch.ones(N, dtype=torch.long) << group.rank
    if group.rank == 0:
        print("a number is a chunk; its bit r, from the right, is 1 once rank r's term is in it")
    phases = iter(["start", *["reduce-scatter"] * (N - 1), *["all-gather"] * (N - 1)])

    def show():
        """Print x of all ranks, on rank 0. They send their x by mesh.world, another Group of the
        same ranks, whose exchanges are not shown."""
        rows = [torch.empty_like(x) for _ in range(N)]
        all_to_all(rows, [x] * N, mesh.world)  # sends x to each rank, so that all ranks have all x
        phase = next(phases)
        if group.rank == 0:
            print(f"{phase:14}", *(f"  rank {r}: {in_bits(row)}" for r, row in enumerate(rows)))

    exchange = group.exchange

    def shown_exchange(*args):  # every hop of the ring is one exchange
        show()
        return exchange(*args)

    group.exchange = shown_exchange
    all_reduce(x, group)
    show()
    group.exchange = exchange
    n = 840 * N  # bytes of the tensor: 210 numbers in each of N chunks
    once = 840 * (N - 1)  # bytes that a rank sends in a reduce-scatter, or in an all-gather
    formulas = {all_reduce: 2 * once, reduce_scatter: once, all_gather: once,
                sequential_all_reduce: n * min(2, N - 1), parameter_server_all_reduce: n * (N - 1)}
    if group.rank == 0:
        print(f"with a tensor of {n} bytes:")
    for fn, formula in formulas.items():
        before = group.bytes_sent
        fn(torch.ones(n // 4), group)
        busiest = all_reduce(torch.tensor([group.bytes_sent - before]), group, maximum).item()
        if group.rank == 0:
            print(f"{fn.__name__:28}the busiest rank sent {busiest:5} bytes, formula {formula:5}")
