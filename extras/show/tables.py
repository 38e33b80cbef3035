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


def sizes_command(words):
    """sizes 7e9: GB of model states per rank, by ZeRO stage and number of ranks."""
    parser = Parser(sizes.__doc__)
    parser.add_argument("parameters", nargs="?", type=float, default=7e9)
    parser.add_argument("--gpu-gb", type=float, default=80, help="memory of one device, 10^9 bytes")
    parser.add_argument("--width", type=int, default=2, choices=(2, 4, 8), help="bytes per weight")
    args = parser.parse_args(words)
    if not (0 < args.parameters < 1e18 and 0 < args.gpu_gb < 1e18):
        parser.error("parameters and --gpu-gb must be above 0, and below 1e18")
    print(f"GB of model states per rank, {args.parameters:g} parameters of {args.width} bytes with "
          f"Adam; * fits into {args.gpu_gb:g} GB")
    print(f"{'ranks':>6}" + "".join(f"{'ZeRO-' + str(stage):>14}" for stage in range(4)))
    for ranks in (2**i for i in range(11)):
        row = f"{ranks:6d}"
        for stage in range(4):
            gb = args.parameters * sum(sizes.bytes_per_parameter(stage, ranks, args.width)) / 1e9
            row += f"{gb:12.4g} {'*' if gb <= args.gpu_gb else ' '}"
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
