"""Shows each technique at work on processes of this machine, and draws schedules and pictures.

    python -m extras.show ddp                   on 4 ranks: collectives, ddp, zero, tensor_parallel,
                                                sequence_parallel, context_parallel,
                                                expert_parallel, pipeline
    python -m extras.show collectives 3         on 3 ranks (context_parallel takes a number, too)
    python -m extras.show mesh 2 2 1 1 2        the groups of a mesh: sizes of dp pp ep cp tp
    python -m extras.show sizes 7e9             GB held and sent by a rank, by ZeRO stage
    python -m extras.show schedules 1f1b 4 8    a timeline of 4 ranks and 8 microbatches; also into
                                                a picture, --svg FILE; schedules 4 8 --compare: all
    python -m extras.show ranks --svg FILE      draws who holds what on eight ranks

Most demonstrations train a small GPT in float64, and print how far the gradients are from those of
one process: 1e-15 is rounding.
"""

import argparse
import json
import shutil
import sys
import tempfile
from functools import partial
from html import escape
from pathlib import Path
from types import SimpleNamespace

import torch

import schedules
import sizes
from collectives import all_gather, all_reduce, all_to_all, maximum, reduce_scatter
from context_parallel import all_to_all_attention, ring_attention, split_sequences, zigzag
from experts import kind_of, spread_experts
from mesh import Mesh, grid, lay_out
from model import build, causal_attention, initial_value
from pipeline import Pipeline, tie_ends
from run.checkpoint import all_gather_text
from run.flags import Parser, check_layout, in_words, parse
from schedules import SCHEDULES
from shard import tag_whole
from tensor_parallel import split_matrices
from test_all import run_rank, whole_slices
from train import Trainer, from_seed
from zero import REDUCERS

# ---- a function of a mesh, on several processes ----


def with_mesh(rank, function, layout):
    function(Mesh(**layout))
    sys.stdout.flush()


def demonstrate(function, ranks, **layout):
    """Run function(mesh) on each of `ranks` processes. Rank 0 prints."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            run_rank, (ranks, f"{folder}/meeting", with_mesh, (function, layout)), ranks,
            start_method="fork")


# 8 sequences of 8 token ids, the same on every rank
SEQUENCES = torch.randint(50, (8, 8), generator=torch.Generator().manual_seed(0))


def small_gpt(mesh, n_layer=2, **experts):
    """A tagged GPT, the same on every rank, and the sequences of this data rank."""
    config = sizes.GPTConfig(50, block_size=8, n_layer=n_layer, n_head=4, n_embd=16, **experts)
    model = build(config, dtype=torch.double, kind=kind_of(config))
    index, size = mesh.place("dp")
    tag_whole(model, mesh.group("dp"))
    return model, SEQUENCES.chunk(size)[index]


def make_reducer(zero, mesh, model, stages):
    """DDP (zero: 0) or a stage of ZeRO, for these stages of a small_gpt."""
    def value(tag):
        return initial_value(tag.name, tag.shape, model.config, seed=0)

    return REDUCERS[zero](stages, value, torch.double, mesh.device, mesh.background)


def gradients_of_one_process(config):
    """{name: gradient} of a small_gpt that trains on all sequences."""
    model = build(config, dtype=torch.double, kind=kind_of(config))
    model(SEQUENCES, SEQUENCES).backward()
    return {name: param.grad for name, param in model.canonical_parameters()}


def report_difference(name, group, pairs):
    """Print the largest relative difference on any rank of the group. pairs: [(this rank's
    gradient, one process's)]."""
    off = max((mine - alone).abs().max() / alone.abs().max() for mine, alone in pairs).view(1)
    all_reduce(off, group, maximum)
    if group.rank == 0:
        print(f"{name}: the gradients of {group.size} ranks differ from one process's by "
              f"{off.item():.0e} of their size")


def compare(name, mesh, model, reducer=None):
    """Compare the gradients of a small_gpt, summed by a reducer or here as their tags say, with
    those of one process."""
    if reducer:
        mine = list(whole_slices(reducer, reducer.gradients()))
        reducer.publish()
    else:
        mine = [(param.tag, param.grad) for param in model.parameters()]
        for tag, grad in mine:
            for group in tag.sum_over:
                all_reduce(grad, group)
    whole = build(model.config, dtype=torch.double, kind=kind_of(model.config))
    whole(SEQUENCES, SEQUENCES).backward()
    grads = {name: param.grad for name, param in whole.canonical_parameters()}
    report_difference(name, mesh.world, [(grad, tag.slice(grads[tag.name])) for tag, grad in mine])


# ---- collectives ----


def demo_collectives(mesh):
    """One ring all-reduce, hop by hop; then the bytes of the ring's collectives."""
    group = mesh.group("dp")
    N = group.size
    # Rank r's terms are 2^r. So bit r of a number, from the right, says whether the number contains
    # rank r's term: with N = 4, 0110 is the sum of the terms of ranks 1 and 2
    x = torch.ones(N, dtype=torch.long) << group.rank
    phases = iter(["start", *["reduce-scatter"] * (N - 1), *["all-gather"] * (N - 1)])

    def show():
        """Print x of all ranks, on rank 0. They send x by mesh.world, another Group of the same
        ranks, whose exchanges are not shown."""
        rows = [torch.empty_like(x) for _ in range(N)]
        all_to_all(rows, [x] * N, mesh.world)
        phase = next(phases)
        if group.rank == 0:
            cells = [" ".join(f"{number:0{N}b}" for number in row.tolist()) for row in rows]
            print(f"{phase:14}", *(f"  rank {r}: {cell}" for r, cell in enumerate(cells)))

    exchange = group.exchange

    def shown_exchange(*args):  # every hop of the ring is one exchange
        show()
        return exchange(*args)

    if group.rank == 0:
        print("a number is a chunk; its bit r, from the right, is 1 once rank r's term is in it")
    group.exchange = shown_exchange
    all_reduce(x, group)
    group.exchange = exchange
    show()
    n = 840 * N  # bytes of the tensor: 210 numbers in each of N chunks
    once = 840 * (N - 1)  # bytes that a rank sends in a reduce-scatter, or in an all-gather
    formulas = {all_reduce: 2 * once, reduce_scatter: once, all_gather: once}
    if group.rank == 0:
        print(f"with a tensor of {n} bytes:")
    for function, formula in formulas.items():
        before = group.bytes_sent
        function(torch.ones(n // 4), group)
        busiest = all_reduce(torch.tensor([group.bytes_sent - before]), group, maximum).item()
        if group.rank == 0:
            print(f"{function.__name__:16}the busiest rank sent {busiest:5} bytes, formula "
                  f"{formula:5}")


# ---- data parallelism ----


def demo_ddp(mesh):
    """Each rank runs backward on its own 2 of 8 sequences; DDP sums the gradients."""
    model, mine = small_gpt(mesh)
    reducer = make_reducer(0, mesh, model, {0: model.layers})
    reducer.expect(0, last=True)
    model(mine, mine).backward()
    compare("DDP", mesh, model, reducer)


def demo_zero(mesh):
    """Each stage of ZeRO: how many numbers rank 0 keeps, and how many its optimizer steps."""
    for zero in range(len(REDUCERS)):
        model, mine = small_gpt(mesh)
        psi = sum(param.numel() for param in model.parameters())
        reducer = make_reducer(zero, mesh, model, {0: model.layers})
        for k, rows in enumerate(mine.chunk(2)):  # two microbatches
            loss = model(rows, rows)
            reducer.expect(0, last=k == 1)
            loss.backward()
        compare(f"ZeRO-{zero}", mesh, model, reducer)
        # Elements in memory, of 8 bytes each. The parameters and reducer.weights are views of the
        # same memory, which counts once; under ZeRO-3 the parameters' is freed
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // 8
                for tensor in (*model.parameters(), *reducer.weights)}
        stepped = sum(weights.numel() for weights in reducer.weights)
        if mesh.rank == 0:
            print(f"ZeRO-{zero}: of {psi} parameters rank 0 keeps {sum(held.values())}, and its "
                  f"optimizer steps {stepped}")


# ---- tensor and sequence parallelism ----


def demo_tensor_parallel(mesh):
    """Which part of each parameter rank 0 holds."""
    model, ids = small_gpt(mesh)
    split_matrices(model, mesh.group("tp"))
    model(ids, ids).backward()
    compare("tensor_parallel", mesh, model)
    if mesh.rank == 0:
        for param in model.parameters():
            full = str([*param.tag.shape])
            print(f"{param.tag.name:34} {full:>9} on rank 0: {[*param.shape]}")


def demo_sequence_parallel(mesh):
    """Tensor parallelism alone, then with sequence parallelism: the bytes that rank 0 sends."""
    group = mesh.group("tp")
    for sp, name in ((False, "tensor_parallel"), (True, "sequence_parallel")):
        model, ids = small_gpt(mesh)
        split_sequences(model, mesh.group("cp"))
        split_matrices(model, group, sp)
        before = group.bytes_sent
        model(ids, ids).backward()
        sent = group.bytes_sent - before
        compare(name, mesh, model)
        if mesh.rank == 0:
            print(f"{name}: {sent} bytes sent")
    if mesh.rank == 0:
        print("as many: an all-reduce is a reduce-scatter, then an all-gather. Between the two, at "
              "the LayerNorms,\nsequence_parallel leaves each rank 1/4 of the tokens")


# ---- context and expert parallelism ----


def visible_pairs(queries, keys):
    """The number of pairs of a query and a key that the query attends to, by their positions."""
    return int((queries.unsqueeze(1) >= keys).sum())


def zigzag_table(S, ranks):
    """Text: which segments of S tokens meet in which hop of ring attention, and how even the work
    is, with zigzag and without."""
    positions = [zigzag(S, ranks, rank) for rank in range(ranks)]
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
    neighbours = list(whole.chunk(ranks))
    for name, split in (("zigzag", positions),
                        ("no zigzag, two neighbouring segments for each rank", neighbours)):
        lines.append(f"{name}: pairs of query and key on ranks 0 to {ranks - 1}")
        for hop in range(ranks):
            work = [visible_pairs(split[rank], split[(rank - hop) % ranks])
                    for rank in range(ranks)]
            lines.append(f"  hop {hop}  " + "".join(f"{n:6d}" for n in work))
        busiest = max(visible_pairs(queries, whole) for queries in split)
        times = busiest * ranks / visible_pairs(whole, whole)
        lines.append(f"  the busiest rank has {times:.2f} times the mean")
    return "\n".join(lines)


def demo_context_parallel(mesh):
    """Which queries meet which keys in which hop of the ring; then the gradients of both forms of
    attention."""
    group = mesh.group("cp")
    S = 8 * group.size
    if group.rank == 0:
        print(zigzag_table(S, group.size))
    generator = torch.Generator().manual_seed(0)
    # (B, nh, S, hs): as many heads as ranks, because all-to-all gives each rank a head at least
    q, k, v = (torch.randn(2, group.size, S, 8, dtype=torch.double, generator=generator)
               for _ in "qkv")

    def gradients(attention, tokens):
        """The gradients of q, k and v at these positions."""
        parts = [x[:, :, tokens].clone().requires_grad_() for x in (q, k, v)]
        # sin: without it the gradient of every result would be 1
        attention(*parts).sin().sum().backward()
        return [part.grad for part in parts]

    mine = zigzag(S, group.size, group.rank)
    alone = gradients(causal_attention, torch.arange(S))
    for attention in (ring_attention, all_to_all_attention):
        parts = gradients(partial(attention, group=group), mine)
        report_difference(attention.__name__, group, [
            (part, whole[:, :, mine]) for part, whole in zip(parts, alone, strict=True)])


def demo_expert_parallel(mesh):
    """Which rank's tokens chose which of 8 experts."""
    model, mine = small_gpt(mesh, n_experts=8, top_k=2)
    spread_experts(model, mesh)
    logits = []  # (B, S, n_experts) of the first block's router
    model.layers[1].mlp.router.register_forward_hook(lambda *args: logits.append(args[2]))
    model(mine, mine).backward()
    group = mesh.group("ep")
    chosen = logits[0].topk(2).indices  # (B, S, k)
    load = chosen.flatten().bincount(minlength=8).view(group.size, -1)  # [rank][its expert]
    loads = [torch.empty_like(load) for _ in range(group.size)]
    all_to_all(loads, [load] * group.size, group)
    if group.rank == 0:
        choices = int(load.sum())  # a token counts once for each of its k experts
        print("how often the tokens of each rank (rows) chose each expert; | separates the experts "
              "of different ranks")
        for rank, row in enumerate(loads):
            away = int(row.sum() - row[rank].sum())
            table = " |".join("".join(f"{n:4d}" for n in part) for part in row.tolist())
            print(f"rank {rank}  {table}    {away} of {choices} choices go elsewhere")
    compare("expert_parallel", mesh, model)


# ---- pipelines ----

LETTERS = """\
F0: forward of microbatch 0. B0: its backward; or its halves, I0 for the gradient of the input, W0
for those of the weights. Lower case: a rank's second chunk. Dashes: the action goes on. Dots: the
rank waits."""
FIGURES = """\
Makespan: time of a step. The bubble is the share of it in which the slowest rank waits. In flight:
microbatches whose activations rank 0, 1, ... holds at most."""


def schedule_text(times, width=160):
    """One row per rank, time from left to right, cut at the width. LETTERS explains it. times:
    Timeline.times of schedules.py, per rank [(action, start, end)]."""
    entries = [entry for row in times for entry in row]
    last_end = max(end for _, _, end in entries)
    shortest = min(end - start for _, start, end in entries)
    # A column is a character. The shortest action has room for its name and a space
    widest_name = 1 + max(len(str(action.microbatch)) for action, _, _ in entries)
    columns_per_time = (widest_name + 1) / shortest
    rows = []
    for rank, row in enumerate(times):
        line = f"rank {rank:<3}"
        drawn = 0  # columns of time in the line so far
        for (kind, stage, k), start, end in row:
            left, right = round(start * columns_per_time), round(end * columns_per_time)
            name = kind.lower() if stage // len(times) % 2 else kind
            line += "." * (left - drawn)
            # "F3--- ": of 6 columns the first 5 are filled with dashes, the last is a space
            line += f"{name}{k}".ljust(right - left - 1, "-").ljust(right - left)
            drawn = right
        line += "." * (round(last_end * columns_per_time) - drawn)
        rows.append(line if len(line) <= width else line[:width - 3] + "...")
    return "\n".join(rows)


def time_schedule(name, P, m, costs=(1, 1, 1, 0)):
    """The Timeline of a schedule. ValueError, one line, if its lists are not valid."""
    if SCHEDULES[name].in_rounds and m % P:
        raise ValueError(f"{m} microbatches must be a multiple of {P} ranks for {name}")
    lists = schedules.make_schedule(name, P, m)
    where = schedules.placement(name, P)
    schedules.validate(lists, where)
    return schedules.simulate(lists, where, costs)


def demo_pipeline(mesh):
    """Train 8 microbatches of one sequence each under two schedules."""
    group = mesh.group("pp")
    for name in ("gpipe", "1f1b"):
        model, ids = small_gpt(mesh, n_layer=6)
        tie_ends(model.layers, mesh.ends("pp"))
        start, stop = schedules.cut(model.config.layer_costs(), group.size)[group.rank]
        stages = {group.rank: list(model.layers[start:stop])}
        reducer = make_reducer(0, mesh, model, stages)
        # A batch of one sequence of one token: so the loss is divided by 1, and stays a sum
        cfg = SimpleNamespace(schedule=name, microbatches=8, batch_size=1, block_size=1)
        shape = (1, 8, 16)  # (B, S, C) of small_gpt
        pipeline = Pipeline(stages, group, cfg, shape, torch.double, deferred=None,
                            scale=torch.ones(()))
        pipeline.run([(row, row) for row in ids.split(1)], reducer)
        if group.rank == 0:
            print(schedule_text(time_schedule(name, group.size, 8).times))
        compare(name, mesh, model, reducer)
    if group.rank == 0:
        print(LETTERS)


DEMOS = {  # name: (function of a mesh, the axis of the ranks)
    "collectives": (demo_collectives, "dp"), "ddp": (demo_ddp, "dp"), "zero": (demo_zero, "dp"),
    "tensor_parallel": (demo_tensor_parallel, "tp"),
    "sequence_parallel": (demo_sequence_parallel, "tp"),
    "context_parallel": (demo_context_parallel, "cp"),
    "expert_parallel": (demo_expert_parallel, "dp"), "pipeline": (demo_pipeline, "pp")}
ANY_NUMBER = ("collectives", "context_parallel")  # run on any number of ranks; the others on 4


def demo_command(name, words):
    parser = Parser(__doc__)
    parser.add_argument("ranks", nargs="?", type=int, default=4)
    ranks = parser.parse_args(words).ranks
    if not 0 < ranks <= 60 or ranks != 4 and name not in ANY_NUMBER:
        parser.error(f"{name} runs on " + ("1 to 60 ranks" if name in ANY_NUMBER else "4 ranks"))
    run, axis = DEMOS[name]
    layout = {axis: ranks}
    if name == "expert_parallel":
        layout["ep"] = ranks
    demonstrate(run, ranks, **layout)


# ---- tables ----


def mesh_command(words):
    """mesh 2 2 1 1 2: the ranks in rows; then all groups along each axis longer than 1, along dp
    and cp (replicas), and along pp and tp (one replica)."""
    parser = Parser(mesh_command.__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[2, 2, 1, 1, 2],
                        metavar="N", help="of dp pp ep cp tp")
    given = parser.parse_args(words).sizes
    if len(given) != 5 or min(given) < 1 or given[0] % given[2]:
        parser.error("give the sizes of dp, pp, ep, cp and tp, like 2 2 1 1 2; ep must divide dp")
    D, P, E, C, T = given
    ranks = {"rep": 1, "shard": D // E, "pp": P, "ep": E, "cp": C, "tp": T}
    print(grid(ranks))
    single = [["dp"]] if D > 1 else []
    single += [[axis] for axis in ("pp", "ep", "cp", "tp") if ranks[axis] > 1]
    for axes in (*single, ["dp", "cp"], ["pp", "tp"]):
        print(f"group({', '.join(axes)}):", *lay_out(ranks, axes))


def sizes_command(words):
    """sizes 7e9: GB of model states that a rank holds, and GB that the rank sends in a step, by
    ZeRO stage and number of ranks."""
    parser = Parser(sizes_command.__doc__)
    parser.add_argument("parameters", nargs="?", type=float, default=7e9)
    parser.add_argument("--gpu-gb", type=float, default=80, help="memory of one device, 10^9 bytes")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step and rank")
    args = parser.parse_args(words)
    if not (0 < args.parameters < 1e18 and args.gpu_gb > 0 and args.microbatches > 0):
        parser.error("parameters, --gpu-gb and --microbatches must be above 0")
    billions = args.parameters / 1e9
    weights, gradients, optimizer = sizes.bytes_per_parameter(0, 1)
    print(f"{args.parameters:g} parameters of 2 bytes: weights {billions * weights:g} "
          f"GB, gradients {billions * gradients:g} GB, Adam's states {billions * optimizer:g} GB")
    print(f"{'':6}  GB held per rank, * fits into {args.gpu_gb:g} GB{'':20}"
          f"GB sent in a step, microbatches: {args.microbatches}")
    print(f"{'ranks':>6}" + "".join(f"{'ZeRO-' + str(stage):>12}" for stage in range(4))
          + f"{'ZeRO-0, 1':>14}{'ZeRO-2':>10}{'ZeRO-3':>10}")
    for ranks in (2**i for i in range(11)):
        row = f"{ranks:6d}"
        for stage in range(4):
            gb = billions * sum(sizes.bytes_per_parameter(stage, ranks))
            row += f"{gb:10.4g} {'*' if gb <= args.gpu_gb else ' '}"
        # How many reduce-scatters and all-gathers of the whole gradient's size a step has
        m = args.microbatches
        for halves, wide in ((2, 14), (1 + m, 10), (3 * m, 10)):
            row += f"{halves * (ranks - 1) / ranks * billions * gradients:{wide}.4g}"
        print(row)


# ---- pictures ----

COLORS = {"F": "#6aa0e8", "B": "#6cc08b", "I": "#6cc08b", "W": "#e8b04a"}  # of actions
LEGEND = {"F": "blue: forward", "B": "green: backward", "I": "green: gradient of the input",
          "W": "yellow: gradient of the weights"}
INK = "#7d7d7d"  # visible on a white page and on a dark one
HELD = f'stroke="{INK}" stroke-width="0.8"'
ELSEWHERE = f'stroke="{INK}" stroke-width="0.8" stroke-dasharray="2 3"'  # held by another rank
BOLD = 'font-weight="bold"'
SMALL = 'font-size="11"'


class Picture:
    """Collects shapes; str() is an SVG file. x goes right, y down, in pixels."""

    def __init__(self, title, width, height):
        self.shapes = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                       'font-size="12" font-family="sans-serif">']
        self.text(12, 22, title, style='font-size="14" font-weight="bold"')

    def text(self, x, y, words, anchor="start", color=INK, style=""):
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" '
                           f'{style}>{escape(str(words))}</text>')

    def box(self, x, y, width, height, color, style=""):
        self.shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                           f'height="{height:.1f}" fill="{color}" {style}/>')

    def __str__(self):
        return "\n".join([*self.shapes, "</svg>\n"])


def schedule_svg(times, title):
    """The timelines of schedule_text; later chunks are paler."""
    left, right, row_height = 60, 940, 26
    last_end = max(end for row in times for _, _, end in row)
    pixels_per_time = (right - left) / last_end
    picture = Picture(title, right + 12, 76 + row_height * len(times))
    for rank, row in enumerate(times):
        y = 36 + row_height * rank
        picture.text(12, y + 16, f"rank {rank}")
        for (kind, stage, k), start, end in row:
            x = left + start * pixels_per_time
            wide = (end - start) * pixels_per_time
            chunk = stage // len(times)
            picture.box(x, y, wide - 1, 22, COLORS[kind], f'opacity="{2 / (2 + chunk):.2f}"')
            font_size = min(12, 1.5 * wide / len(str(k)))
            picture.text(x + wide / 2, y + 15, k, "middle", "#222", f'font-size="{font_size:.1f}"')
    kinds = {action.kind for row in times for action, *_ in row}
    words = [meaning for kind, meaning in LEGEND.items() if kind in kinds]
    if any(action.stage >= len(times) for row in times for action, *_ in row):
        words.append("paler: later chunks")
    picture.text(left, 60 + row_height * len(times), "; ".join(words))
    return str(picture)


def closed_form(name, P, m, costs):
    """The bubble by the formula of the schedule's paper, idle / (idle + work). costs: seconds of F,
    I, W for a microbatch and all v stages of a rank, and of a message. None: there is no formula,
    or its assumptions do not hold."""
    f, i, w, comm = costs
    v = SCHEDULES[name].chunks
    # For each other rank a rank idles for an F and a B of one stage. zb-h1: for an F and an I, less
    # one W, which fills a part of the gap
    gaps = {"gpipe": f + i + w, "1f1b": f + i + w, "interleaved": f + i + w, "zb-h1": f + i - w}
    if name not in gaps or comm or (name == "zb-h1" and (w > f or m < P)):
        return None
    idle = (P - 1) * gaps[name]  # times v, like the work
    return idle / (idle + v * m * (f + i + w))


def figures(name, P, m, costs, timeline):
    """A schedule's figures, in one line. peak_in_flight counts pairs of a stage and a microbatch: a
    pair holds the activations of one stage, 1/v of the rank's layers."""
    v = SCHEDULES[name].chunks
    bubble = closed_form(name, P, m, costs)
    formula = "     -" if bubble is None else f"{bubble:6.2%}"
    share = f", each in 1/{v} of a rank's layers" if v > 1 else ""
    return (f"{name:11}  makespan {timeline.makespan:<8.6g} bubble {timeline.bubble:6.2%}  "
            f"formula {formula}  in flight {timeline.peak_in_flight}{share}")


def schedules_command(words):
    """schedules 1f1b 4 8: the timeline of a schedule, and its figures."""
    parser = Parser(schedules.__doc__)
    parser.add_argument("schedule", nargs="?", default="1f1b", choices=SCHEDULES, metavar="NAME",
                        help=", ".join(SCHEDULES))
    parser.add_argument("P", type=int, help="ranks")
    parser.add_argument("m", type=int, help="microbatches")
    parser.add_argument("--costs", default=(1, 1, 1, 0), metavar="F,I,W,comm",
                        type=lambda words: tuple(map(float, words.split(","))))
    parser.add_argument("--compare", action="store_true", help="every schedule, one line each")
    parser.add_argument("--svg", metavar="FILE", help="write the picture there as well")
    args = parser.parse_args(words)
    name, P, m = args.schedule, args.P, args.m
    if not 0 < P <= 500 or not 0 < m <= 20000 / P:
        parser.error(f"{P} ranks, {m} microbatches: at most 500 ranks, and 20,000 pairs of both")
    try:
        if args.compare:
            for name in SCHEDULES:
                if not (SCHEDULES[name].in_rounds and m % P):
                    timeline = time_schedule(name, P, m, args.costs)
                    print(figures(name, P, m, args.costs, timeline))
            print(FIGURES)
            return
        timeline = time_schedule(name, P, m, args.costs)
        if args.svg:
            title = f"{name}: {P} ranks, {m} microbatches, bubble {timeline.bubble:.1%}"
            Path(args.svg).write_text(schedule_svg(timeline.times, title))
    except (ValueError, OSError) as error:
        parser.error(in_words(error))
    print(schedule_text(timeline.times, min(160, shutil.get_terminal_size((120, 24)).columns)))
    print(figures(name, P, m, args.costs, timeline), LETTERS, FIGURES, sep="\n")


# ---- who holds what on eight ranks, by the tags of train.py's parameters ----

EIGHT = "--dp 2 --tp 2 --pp 2 --zero 1"
EIGHT_RANKS = {"dp": 2, "pp": 2, "tp": 2}
VOCAB_SIZE = 1024  # words of train.py's default data
ACROSS, DOWN = 1 / 8, 1 / 11  # pixels of an element
BOX, TALL = 402, 114  # width and height of a rank's box
NOTES = ("A block's matrices: c_attn (queries, keys, values) and c_proj; c_fc and c_proj. Rows of "
         "c_attn, c_fc and wte are split, and columns of c_proj.",
         "wte is on both stages, as embedding and as head. ZeRO cuts a layer into a chunk for each "
         "replica. Not drawn: LayerNorms and biases.")


def held_matrices(mesh):
    """[[name, full shape, dim that is split, ranges of the rank's slice, [first, last) rows of the
    slice whose AdamW states the rank has]] of this rank's matrices, in the model's order. A piece
    may begin or end within a row."""
    cfg = parse(EIGHT.split())
    check_layout(cfg, world=1)
    shape = sizes.config_of(cfg, VOCAB_SIZE)
    trainer = Trainer(cfg, mesh, shape, from_seed(shape, cfg.seed))
    reducer = trainer.reducer
    found = []
    for chunk, tag, start in zip(reducer.weights, reducer.tags, reducer.starts, strict=True):
        if len(tag.shape) == 2:
            width = tag.slice_shape[1]
            stepped = [start / width, (start + chunk.numel()) / width]
            found.append([tag.name, list(tag.shape), tag.dim, list(tag.ranges), stepped])
    order = [*trainer.shapes]
    return sorted(found, key=lambda matrix: order.index(matrix[0]))


def draw_matrix(picture, x, middle, shape, dim, ranges, stepped):
    """The full matrix, dashed; what the rank has of it; what the rank's optimizer steps."""
    height, width = shape[0] * DOWN, shape[1] * ACROSS
    top = middle - height / 2
    offset = 0  # where a range begins in the slice
    for start, stop in ranges:
        if dim == 0:  # rows; of those the optimizer steps some
            first = max(stepped[0] - offset, 0)
            last = min(stepped[1] - offset, stop - start)
            picture.box(x, top + start * DOWN, width, (stop - start) * DOWN, COLORS["F"])
            if first < last:
                picture.box(x, top + (start + first) * DOWN, width, (last - first) * DOWN,
                            COLORS["W"])
        else:  # columns; of their rows the optimizer steps some
            first, last = stepped
            left, part = x + start * ACROSS, (stop - start) * ACROSS
            picture.box(left, top, part, height, COLORS["F"])
            picture.box(left, top + first * DOWN, part, (last - first) * DOWN, COLORS["W"])
        offset += stop - start
    picture.box(x, top, width, height, "none", ELSEWHERE)
    return width


def draw_rank(picture, x, y, rank, matrices):
    """A box with the matrices of a rank, layer by layer."""
    picture.box(x, y, BOX, TALL, "none", HELD + ' rx="6"')
    picture.text(x + 8, y + 17, f"rank {rank}", style=BOLD)
    at = x + 50
    before = None  # the layer of the matrix before
    for name, *matrix in matrices:
        words = name.removeprefix("transformer.").split(".")
        layer = f"block {words[1]}" if words[0] == "h" else words[0]
        if layer != before:
            at += 11
            picture.text(at, y + TALL - 5, layer, style=SMALL)
            before = layer
        at += 5 + draw_matrix(picture, at, y + TALL / 2 - 6, *matrix)


def ranks_svg(ranks):
    """ranks: [[d, p, t], held_matrices()] of each rank, in the order of ranks."""
    left, top = 78, 60
    picture = Picture(f"Who holds what of a small GPT: train.py {EIGHT}", 900, 644)
    for rank, ((d, p, t), matrices) in enumerate(ranks):
        x = left + p * (BOX + 12)
        y = top + (2 * d + t) * (TALL + 8) + 12 * d
        draw_rank(picture, x, y, rank, matrices)
        if (d, t) == (0, 0):
            picture.text(x + BOX / 2, top - 9, f"stage {p}", "middle", style=BOLD)
        if p == 0:
            picture.text(12, y + TALL / 2 - 4, f"replica {d}", style=BOLD)
            picture.text(12, y + TALL / 2 + 12, f"slice {t}", style=BOLD)
    x, y = left, top + 4 * (TALL + 8) + 20
    for color, meaning in ((COLORS["F"], "weights: the rank's slice of the stage's matrices"),
                           (COLORS["W"], "weights whose AdamW states the rank has, and which it "
                            "steps"), ("none", "on other ranks")):
        picture.box(x, y, 12, 12, color, ELSEWHERE if color == "none" else "")
        picture.text(x + 18, y + 10, meaning, style=SMALL)
        x += 36 + 5.6 * len(meaning)
    for i, note in enumerate(NOTES):
        picture.text(left, y + 34 + 18 * i, note, style=SMALL)
    return str(picture)


def draw_eight_ranks(mesh, file):
    """Collective: rank 0 writes the picture."""
    place = [mesh.place(axis)[0] for axis in EIGHT_RANKS]
    texts = all_gather_text(json.dumps([place, held_matrices(mesh)]), mesh.world)
    if mesh.rank == 0:
        Path(file).write_text(ranks_svg(map(json.loads, texts)))


def ranks_command(words):
    """ranks --svg FILE: draws which slices and which AdamW states each of eight ranks holds."""
    parser = Parser(ranks_command.__doc__)
    parser.add_argument("--svg", metavar="FILE", required=True)
    file = parser.parse_args(words).svg
    try:
        open(file, "a").close()  # before eight processes start: can the file be written?
    except OSError as error:
        parser.error(in_words(error))
    demonstrate(partial(draw_eight_ranks, file=file), 8, **EIGHT_RANKS)


COMMANDS = {name: partial(demo_command, name) for name in DEMOS}
COMMANDS.update(mesh=mesh_command, sizes=sizes_command, schedules=schedules_command,
                ranks=ranks_command)


def main():
    parser = Parser(__doc__)
    parser.add_argument("name", choices=COMMANDS, metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGS")
    args = parser.parse_args()
    COMMANDS[args.name](args.words)


if __name__ == "__main__":
    main()
