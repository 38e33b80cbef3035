"""The tables that `python -m extras.show` prints for mesh, sizes and context_parallel."""

import sys

import sizes
from run.config import Parser
from run.signals import note


def mesh_command(words):
    """mesh 2 2 1 1 2: the ranks in rows; then all groups along each axis longer than 1,
    along dp and cp (replicas), and along pp and tp (one replica)."""
    given = words or ["2", "2", "1", "1", "2"]
    if len(given) != 5 or not all(size.isdecimal() and int(size) for size in given):
        note("mesh: give the sizes of dp, pp, ep, cp and tp, like 2 2 1 1 2")
        sys.exit(2)
    D, P, E, C, T = map(int, given)
    if D % E:
        note(f"mesh: ep {E} must divide dp {D}")
        sys.exit(2)
    # Imported here, because mesh.py imports torch, and a wrong command line does without torch
    from mesh import grid, lay_out
    ranks = {"rep": 1, "shard": D // E, "pp": P, "ep": E, "cp": C, "tp": T}
    print(grid(ranks))
    single = [["dp"]] if D > 1 else []
    single += [[axis] for axis in ("pp", "ep", "cp", "tp") if ranks[axis] > 1]
    replicas, one_replica = ["dp", "cp"], ["pp", "tp"]
    for axes in (*single, replicas, one_replica):
        print(f"group({', '.join(axes)}):", *lay_out(ranks, axes))


def sent_in_a_step(stage, ranks, size, microbatches):
    """What a data rank sends in a step under a ZeRO stage (docs/costs.md), in the unit of `size`,
    the size of the whole gradient. Weights are as wide as gradients."""
    halves = (2, 2, 1 + microbatches, 3 * microbatches)[stage]  # reduce-scatters and all-gathers
    return halves * (ranks - 1) / ranks * size


def sizes_command(words):
    """sizes 7e9: GB of model states that a rank holds, and GB that it sends in a step, by ZeRO
    stage and number of ranks."""
    parser = Parser(sizes.__doc__)
    parser.add_argument("parameters", nargs="?", type=float, default=7e9)
    parser.add_argument("--gpu-gb", type=float, default=80, help="memory of one device, 10^9 bytes")
    parser.add_argument("--width", type=int, default=2, choices=(2, 4, 8), help="bytes per weight")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step and rank")
    parser.add_argument("--ranks", type=int, help="this row only (else 1 to 1024)")
    args = parser.parse_args(words)
    if not (0 < args.parameters < 1e18 and 0 < args.gpu_gb < 1e18):
        parser.error("parameters and --gpu-gb must be above 0, and below 1e18")
    if args.microbatches < 1 or args.ranks is not None and args.ranks < 1:
        parser.error("--microbatches and --ranks must be above 0")
    billions = args.parameters / 1e9
    weights, gradients, optimizer = sizes.bytes_per_parameter(0, 1, args.width)
    print(f"{args.parameters:g} parameters of {args.width} bytes: weights {billions * weights:g} "
          f"GB, gradients {billions * gradients:g} GB, Adam's states {billions * optimizer:g} GB")
    print(f"{'':6}  GB held per rank, * fits into {args.gpu_gb:g} GB{'':20}"
          f"GB sent in a step, microbatches: {args.microbatches}")
    print(f"{'ranks':>6}" + "".join(f"{'ZeRO-' + str(stage):>12}" for stage in range(4))
          + f"{'ZeRO-0, 1':>14}{'ZeRO-2':>10}{'ZeRO-3':>10}")
    for ranks in [args.ranks] if args.ranks else (2**i for i in range(11)):
        row = f"{ranks:6d}"
        for stage in range(4):
            gb = billions * sum(sizes.bytes_per_parameter(stage, ranks, args.width))
            row += f"{gb:10.4g} {'*' if gb <= args.gpu_gb else ' '}"
        for stage, wide in ((1, 14), (2, 10), (3, 10)):
            sent = sent_in_a_step(stage, ranks, billions * gradients, args.microbatches)
            row += f"{sent:{wide}.4g}"
        print(row)


def visible_pairs(queries, keys):
    """The number of pairs of a query and a key that it attends to. queries, keys: positions."""
    return int((queries.unsqueeze(1) >= keys).sum())


def zigzag_table(S, ranks):
    """Lines of text: which segment is on which rank, which segments meet in which hop of ring
    attention, and how even the work is, with zigzag and without. S: number of tokens; ranks: number
    of ranks."""
    import torch

    from context_parallel import zigzag
    positions = [zigzag(S, ranks, rank) for rank in range(ranks)]  # positions of each rank's tokens
    hops = torch.full((S, S), -1)  # hops[query, key]: the hop in which the two positions meet
    for rank, queries in enumerate(positions):
        for other, keys in enumerate(positions):
            hops[queries.unsqueeze(1), keys] = (rank - other) % ranks
    segments = 2 * ranks
    lines = [f"{S} tokens in {segments} segments; "
             "a digit is the hop in which queries (rows) meet keys"]
    # All tokens of a segment meet another segment in the same hop: its first token stands for all
    firsts = range(0, S, S // segments)
    for segment, query in enumerate(firsts):
        row = " ".join(str(int(hops[query, key])) if key <= query else "." for key in firsts)
        owner = min(segment, segments - 1 - segment)  # rank r has segments r and 2N-1-r
        lines.append(f"  segment {segment:2d} of rank {owner}   {row}")
    whole = torch.arange(S)
    naive = list(whole.chunk(ranks))
    for name, split in (("zigzag", positions),
                        ("no zigzag, two neighbouring segments for each rank", naive)):
        lines.append(f"{name}: pairs of query and key on ranks 0 to {ranks - 1}")
        for hop in range(ranks):
            work = [visible_pairs(split[rank], split[(rank - hop) % ranks])
                    for rank in range(ranks)]
            lines.append(f"  hop {hop}  " + "".join(f"{n:6d}" for n in work))
        busiest = max(visible_pairs(queries, whole) for queries in split)
        times = busiest * ranks / visible_pairs(whole, whole)
        lines.append(f"  the busiest rank has {times:.2f} times the mean")
    return "\n".join(lines)
