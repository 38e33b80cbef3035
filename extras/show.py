"""Shows each technique at work on processes of this machine, and draws schedules and pictures.

    python -m extras.show ddp                   on 4 ranks: collectives, ddp, zero, tensor_parallel,
                                                sequence_parallel, context_parallel,
                                                expert_parallel, pipeline
    python -m extras.show collectives 3         on 3 ranks
    python -m extras.show mesh 2 2 1 1 2        the groups of a mesh: sizes of dp pp ep cp tp
    python -m extras.show sizes 7e9             GB held and sent by a rank, by ZeRO stage
    python -m extras.show schedules 1f1b 4 8    a timeline of 4 ranks and 8 microbatches; also into
                                                a picture, --svg FILE; schedules 4 8 --compare: all
    python -m extras.show ranks --svg FILE      draws who holds what on eight ranks

Most demonstrations run one step of a small GPT in float64 by train.py's Trainer, and print how far
the gradients are from those of one process: 1e-15 is rounding.
"""

import argparse
import shutil
import tempfile
from functools import partial
from html import escape
from pathlib import Path

import torch

import schedules
import sizes
from collectives import all_gather, all_reduce, all_to_all, maximum, reduce_scatter
from context_parallel import zigzag
from experts import kind_of
from mesh import Mesh, grid, lay_out
from model import build
from run.checkpoint import all_gather_text
from run.flags import Parser, check_layout, in_words, parse
from schedules import SCHEDULES
from test_all import difference, run_rank, whole_slices
from train import Trainer, from_seed, make_mesh

# ---- a small GPT on several processes ----

SMALL = ("--n-layer 2 --n-head 4 --n-embd 16 --block-size 8 --batch-size 8 --microbatches 1 "
         "--dtype float64")
# 8 sequences of 8 token ids, of 50 words; each is its own target
SEQUENCES = torch.randint(50, (8, 8), generator=torch.Generator().manual_seed(0))


def demonstrate(function, ranks, *args):
    """Run function(rank, *args) on each of `ranks` processes. Rank 0 prints."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            run_rank, (ranks, f"{folder}/meeting", function, args), ranks, start_method="fork")


def make_trainer(words, vocab_size):
    """train.py's Trainer of this rank, under these flags. Collective."""
    cfg = parse(words.split())
    check_layout(cfg, world=1)
    shape = sizes.config_of(cfg, vocab_size)
    return Trainer(cfg, make_mesh(cfg, "cpu"), shape, from_seed(shape, seed=0))


def own_batches(trainer):
    """The microbatches of this rank."""
    index, size = trainer.mesh.index_and_size("dp")
    rows = SEQUENCES.chunk(size)[index].chunk(trainer.cfg.microbatches)
    return trainer.own([(part, part) for part in rows])


def small_gpt(words):
    """A Trainer that has run forward and backward, under these flags."""
    trainer = make_trainer(f"{SMALL} {words}", vocab_size=50)
    trainer.pipeline.run(own_batches(trainer), trainer.reducer)
    return trainer


def compare(name, trainer):
    """Print how far the gradients, summed, are from one process's. Frees ZeRO-3's whole weights."""
    alone = build(trainer.model_config, dtype=torch.double, kind=kind_of(trainer.model_config))
    (alone(SEQUENCES, SEQUENCES) / SEQUENCES.numel()).backward()
    want = {name: param.grad for name, param in alone.canonical_parameters()}
    reducer, world = trainer.reducer, trainer.mesh.world
    off = [difference(grad, tag.slice(want[tag.name]))
           for tag, grad in whole_slices(reducer, reducer.gradients())]
    worst = all_reduce(torch.tensor([max(off)]), world, maximum)
    [*reducer.whole()]
    if world.rank == 0:
        print(f"{name}: the gradients of {world.size} ranks differ from one process's by "
              f"{worst.item():.0e} of their size")


def of_all_ranks(x, group):
    """[x of each rank of the group]."""
    rows = [torch.empty_like(x) for _ in range(group.size)]
    all_to_all(rows, [x] * group.size, group)
    return rows


# ---- collectives ----


def demo_collectives(rank, N):
    """One ring all-reduce, hop by hop; then the bytes of the ring's collectives."""
    mesh = Mesh(dp=N)
    group = mesh.group("dp")
    # Rank r's terms are 2^r. So bit r of a number, from the right, says whether the number contains
    # rank r's term: with N = 4, 0110 is the sum of the terms of ranks 1 and 2
    x = torch.ones(N, dtype=torch.long) << rank
    phases = iter(["start", *["reduce-scatter"] * (N - 1), *["all-gather"] * (N - 1)])

    def show():
        """Print x of all ranks. They send x by mesh.world, another Group of the same ranks, whose
        exchanges are not shown."""
        rows = of_all_ranks(x, mesh.world)
        phase = next(phases)
        if rank == 0:
            cells = [" ".join(f"{number:0{N}b}" for number in row.tolist()) for row in rows]
            print(f"{phase:14}", *(f"  rank {r}: {cell}" for r, cell in enumerate(cells)))

    exchange = group.exchange

    def shown_exchange(*args):  # every hop of the ring is one exchange
        show()
        return exchange(*args)

    if rank == 0:
        print("a number is a chunk; its bit r, from the right, is 1 once rank r's term is in it")
    group.exchange = shown_exchange
    all_reduce(x, group)
    group.exchange = exchange
    show()
    once = 840 * (N - 1)  # bytes that a rank sends of 840 N, in a reduce-scatter or an all-gather
    if rank == 0:
        print(f"with a tensor of {840 * N} bytes:")
    for function, formula in ((all_reduce, 2 * once), (reduce_scatter, once), (all_gather, once)):
        before = group.bytes_sent
        function(torch.ones(210 * N), group)
        busiest = all_reduce(torch.tensor([group.bytes_sent - before]), group, maximum).item()
        if rank == 0:
            print(f"{function.__name__:16}the busiest rank sent {busiest:5} bytes, formula "
                  f"{formula:5}")


# ---- techniques ----


def demo_ddp(rank, N):
    """Each rank runs backward on its own 2 of 8 sequences; DDP sums the gradients."""
    compare("DDP", small_gpt(f"--dp {N}"))


def demo_zero(rank, N):
    """Each stage of ZeRO: how many numbers rank 0 keeps, and how many its optimizer steps."""
    for zero in range(4):
        trainer = small_gpt(f"--dp {N} --zero {zero} --microbatches 2")
        compare(f"ZeRO-{zero}", trainer)
        reducer = trainer.reducer
        # Elements in memory, of 8 bytes each. What ZeRO-1 and 2 step are views of the Flats, whose
        # memory counts once; ZeRO-3 has freed the Flats
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // 8
                for tensor in (*(flat.weights for flat in reducer.trained_flats), *reducer.weights)}
        if rank == 0:
            psi = sum(shape.numel() for shape in trainer.shapes.values())
            stepped = sum(weights.numel() for weights in reducer.weights)
            print(f"ZeRO-{zero}: of {psi} parameters rank 0 keeps {sum(held.values())}, and its "
                  f"optimizer steps {stepped}")


def demo_tensor_parallel(rank, N):
    """Which part of each parameter rank 0 holds."""
    trainer = small_gpt(f"--tp {N}")
    compare("tensor_parallel", trainer)
    tags = {tag.name: tag for tag in trainer.reducer.tags}
    if rank == 0:
        for name, shape in trainer.shapes.items():
            print(f"{name:34} {[*shape]!s:>9} on rank 0: {[*tags[name].slice_shape]}")


def demo_sequence_parallel(rank, N):
    """Tensor parallelism alone, then with sequence parallelism: the bytes that rank 0 sends."""
    for name, words in (("tensor_parallel", ""), ("sequence_parallel", "--sp")):
        trainer = small_gpt(f"--tp {N} {words}")
        sent = trainer.mesh.group("tp").bytes_sent  # before the gradients of LayerNorms are summed
        compare(name, trainer)
        if rank == 0:
            print(f"{name}: {sent} bytes sent")


def visible_pairs(queries, keys):
    """The number of pairs of a query and a key that the query attends to, by their positions."""
    return int((queries.unsqueeze(1) >= keys).sum())


def zigzag_table(S, N):
    """Text: which segments of S tokens meet in which hop of ring attention, and how even the work
    of N ranks is, with zigzag and without."""
    segments = range(2 * N)
    owner = [min(segment, 2 * N - 1 - segment) for segment in segments]
    lines = [f"{S} tokens in {2 * N} segments; "
             "a digit is the hop in which queries (rows) meet keys"]
    for query in segments:
        hops = [str((owner[query] - owner[key]) % N) if key <= query else "." for key in segments]
        lines.append(f"  segment {query:2d} of rank {owner[query]}   {' '.join(hops)}")
    neighbours = torch.arange(S).chunk(N)
    for name, split in (("zigzag", [zigzag(S, N, rank) for rank in range(N)]),
                        ("no zigzag, two neighbouring segments for each rank", neighbours)):
        lines.append(f"{name}: pairs of query and key on ranks 0 to {N - 1}")
        work = [[visible_pairs(split[rank], split[(rank - hop) % N]) for rank in range(N)]
                for hop in range(N)]
        for hop, row in enumerate(work):
            lines.append(f"  hop {hop}  " + "".join(f"{pairs:6d}" for pairs in row))
        of_rank = torch.tensor(work).sum(0)
        times = of_rank.max() / of_rank.double().mean()
        lines.append(f"  the busiest rank has {times:.2f} times the mean")
    return "\n".join(lines)


def demo_context_parallel(rank, N):
    """Which queries meet which keys in which hop of the ring; both forms of attention."""
    if rank == 0:
        print(zigzag_table(8 * N, N))
    for kind in ("ring", "all-to-all"):
        compare(f"{kind} attention", small_gpt(f"--cp {N} --cp-attention {kind}"))


def demo_expert_parallel(rank, N):
    """Which rank's tokens chose which of 8 experts."""
    trainer = small_gpt(f"--dp {N} --ep {N} --experts 8")
    logits = []  # (B, S, experts) of the first block's router
    router = trainer.pipeline.stages[0][1].mlp.router
    router.register_forward_hook(lambda *args: logits.append(args[2]))
    trainer.pipeline.run(own_batches(trainer))  # forward only
    chosen = logits[0].topk(2).indices  # (B, S, k)
    load = chosen.flatten().bincount(minlength=8).view(N, -1)  # [rank][its expert]
    loads = of_all_ranks(load, trainer.mesh.group("ep"))
    if rank == 0:
        choices = int(load.sum())  # a token counts once for each of its k experts
        print("how often the tokens of each rank (rows) chose each expert; | separates the experts "
              "of different ranks")
        for r, row in enumerate(loads):
            away = int(row.sum() - row[r].sum())
            table = " |".join("".join(f"{n:4d}" for n in part) for part in row.tolist())
            print(f"rank {r}  {table}    {away} of {choices} choices go elsewhere")
    compare("expert_parallel", trainer)


def demo_pipeline(rank, N):
    """8 microbatches of one sequence each under two schedules."""
    for name in ("gpipe", "1f1b"):
        if rank == 0:
            print(schedule_text(time_schedule(name, N, 8).times))
        words = f"--pp {N} --n-layer 6 --microbatches 8 --schedule {name}"
        compare(name, small_gpt(words))
    if rank == 0:
        print(LETTERS)


# ---- schedules ----

LETTERS = """\
F0: forward of microbatch 0. B0: its backward; or its halves, I0 for the gradient of the input, W0
for those of the weights. Lower case: a rank's second stage. Dashes: the action goes on. Dots: the
rank waits."""
FIGURES = """\
Makespan: time of a step. The bubble is the share of it in which the slowest rank waits. In flight:
microbatches whose activations rank 0, 1, ... holds at most."""


def time_schedule(name, P, m, costs=(1, 1, 1, 0)):
    """The Timeline of a schedule. ValueError, one line, if its lists are not valid."""
    if SCHEDULES[name].in_rounds and m % P:
        raise ValueError(f"{m} microbatches must be a multiple of {P} ranks for {name}")
    lists = schedules.make_schedule(name, P, m)
    where = schedules.placement(name, P)
    schedules.validate(lists, where)
    return schedules.simulate(lists, where, costs)


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


def figures(name, P, m, costs, timeline):
    """A schedule's figures, in one line. peak_in_flight counts pairs of a stage and a microbatch: a
    pair holds the activations of one stage, 1/v of the rank's layers."""
    f, i, w, comm = costs
    v = SCHEDULES[name].stages_per_rank
    # The bubble by the formula of the schedule's paper, idle / (idle + work). For each other rank a
    # rank idles for an F and a B of one stage. zb-h1: for an F and an I, less one W, which fills a
    # part of the gap. Times v, like the work
    gap = {"gpipe": f + i + w, "1f1b": f + i + w, "interleaved": f + i + w, "zb-h1": f + i - w}
    formula = "     -"
    if name in gap and not comm and (name != "zb-h1" or (w <= f and m >= P)):
        idle = (P - 1) * gap[name]
        formula = f"{idle / (idle + v * m * (f + i + w)):6.2%}"
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
    chosen = [name]
    if args.compare:
        chosen = [each for each in SCHEDULES if m % P == 0 or not SCHEDULES[each].in_rounds]
    try:
        timelines = {name: time_schedule(name, P, m, args.costs) for name in chosen}
    except ValueError as error:
        parser.error(in_words(error))
    timeline = timelines[chosen[0]]
    if args.svg:
        title = f"{name}: {P} ranks, {m} microbatches, bubble {timeline.bubble:.1%}"
        draw_schedule(args.svg, title, timeline.times)
    if not args.compare:
        print(schedule_text(timeline.times, min(160, shutil.get_terminal_size((120, 24)).columns)))
    for name, timeline in timelines.items():
        print(figures(name, P, m, args.costs, timeline))
    print(FIGURES if args.compare else f"{LETTERS}\n{FIGURES}")


# ---- tables ----


def mesh_command(words):
    """mesh 2 2 1 1 2: the ranks in rows; then all groups along each axis longer than 1, along dp
    and cp (replicas), and along pp and tp (one replica)."""
    parser = Parser(mesh_command.__doc__)
    parser.add_argument("sizes", nargs=5, type=int, metavar="N", help="of dp pp ep cp tp")
    D, P, E, C, T = parser.parse_args(words).sizes
    if min(D, P, E, C, T) < 1 or D % E or D * P * C * T > 1000:
        parser.error(f"sizes {words}: at least 1 each, at most 1000 ranks, and ep must divide dp")
    ranks = {"rep": 1, "shard": D // E, "pp": P, "ep": E, "cp": C, "tp": T}
    print(grid(ranks))
    longer = [[axis] for axis, size in zip(("dp", "pp", "ep", "cp", "tp"), (D, P, E, C, T),
                                           strict=True) if size > 1]
    for axes in (*longer, ["dp", "cp"], ["pp", "tp"]):
        print(f"group({', '.join(axes)}):", *lay_out(ranks, axes))


def sizes_command(words):
    """sizes 7e9: GB of model states that a rank holds, and GB that the rank sends in a step, by
    ZeRO stage and number of ranks."""
    parser = Parser(sizes_command.__doc__)
    parser.add_argument("parameters", nargs="?", type=float, default=7e9)
    parser.add_argument("--gpu-gb", type=float, default=80, help="memory of one device, 10^9 bytes")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step and rank")
    args = parser.parse_args(words)
    m = args.microbatches
    if not (0 < args.parameters < 1e18 and args.gpu_gb > 0 and m > 0):
        parser.error("parameters, --gpu-gb and --microbatches must be above 0")
    billions = args.parameters / 1e9
    weights, gradients, optimizer = sizes.bytes_per_parameter(0, 1)
    print(f"{args.parameters:g} parameters of 2 bytes: weights {billions * weights:g} "
          f"GB, gradients {billions * gradients:g} GB, Adam's states {billions * optimizer:g} GB")
    print(f"{'':6}  GB held per rank, * fits into {args.gpu_gb:g} GB{'':20}"
          f"GB sent in a step, microbatches: {m}")
    print(f"{'ranks':>6}" + "".join(f"{'ZeRO-' + str(stage):>12}" for stage in range(4))
          + f"{'ZeRO-0, 1':>14}{'ZeRO-2':>10}{'ZeRO-3':>10}")
    for ranks in (2**i for i in range(11)):
        row = f"{ranks:6d}"
        for stage in range(4):
            gb = billions * sum(sizes.bytes_per_parameter(stage, ranks))
            row += f"{gb:10.4g} {'*' if gb <= args.gpu_gb else ' '}"
        # How many reduce-scatters and all-gathers of the whole gradient's size a step has
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
SMALL_TEXT = 'font-size="11"'


class Picture:
    """Collects shapes of an SVG file. x goes right, y down, in pixels."""

    def __init__(self):
        self.shapes = []

    def text(self, x, y, words, anchor="start", color=INK, style=""):
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" '
                           f'{style}>{escape(str(words))}</text>')

    def box(self, x, y, width, height, color, style=""):
        self.shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                           f'height="{height:.1f}" fill="{color}" {style}/>')


def write_svg(file, title, width, height, shapes):
    """Write an SVG file with a title above these shapes."""
    head = Picture()
    head.text(12, 22, title, style='font-size="14" font-weight="bold"')
    begin = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             'font-size="12" font-family="sans-serif">')
    Path(file).write_text("\n".join([begin, *head.shapes, *shapes, "</svg>\n"]))


def draw_schedule(file, title, times):
    """The timelines of schedule_text; a rank's later stages are paler."""
    left, right, row_height = 60, 940, 26
    last_end = max(end for row in times for _, _, end in row)
    pixels_per_time = (right - left) / last_end
    picture = Picture()
    for rank, row in enumerate(times):
        y = 36 + row_height * rank
        picture.text(12, y + 16, f"rank {rank}")
        for (kind, stage, k), start, end in row:
            x = left + start * pixels_per_time
            wide = (end - start) * pixels_per_time
            number = stage // len(times)  # among those of the rank
            picture.box(x, y, wide - 1, 22, COLORS[kind], f'opacity="{2 / (2 + number):.2f}"')
            font_size = min(12, 1.5 * wide / len(str(k)))
            picture.text(x + wide / 2, y + 15, k, "middle", "#222", f'font-size="{font_size:.1f}"')
    kinds = {action.kind for row in times for action, *_ in row}
    words = [meaning for kind, meaning in LEGEND.items() if kind in kinds]
    if any(action.stage >= len(times) for row in times for action, *_ in row):
        words.append("paler: a rank's later stages")
    picture.text(left, 60 + row_height * len(times), "; ".join(words))
    write_svg(file, title, right + 12, 76 + row_height * len(times), picture.shapes)


# ---- who holds what on eight ranks, by the tags of train.py's parameters ----

EIGHT = "--dp 2 --tp 2 --pp 2 --zero 1"
ACROSS, DOWN = 1 / 8, 1 / 11  # pixels of an element
BOX, TALL = 402, 114  # width and height of a rank's box
LEFT, TOP = 78, 60  # where the boxes begin
NOTES = ("A block's matrices: c_attn (queries, keys, values) and c_proj; c_fc and c_proj. Rows of "
         "c_attn, c_fc and wte are split, and columns of c_proj.",
         "wte is on both stages, as embedding and as head. ZeRO cuts a layer into a chunk for each "
         "replica. Not drawn: LayerNorms and biases.")


def draw_matrix(picture, x, middle, tag, begin, end):
    """The full matrix, dashed; this rank's slice of it; rows [begin, end) of the slice, whose AdamW
    states this rank has: they may begin or end within a row. Returns the width in pixels."""
    rows, columns = tag.shape
    y = middle - rows * DOWN / 2
    before = 0  # rows of the slice before this range
    for start, stop in tag.ranges:
        if tag.dim == 0:
            top, bottom, left, right = start, stop, 0, columns
            first, last = max(start, start + begin - before), min(stop, start + end - before)
        else:
            top, bottom, left, right = 0, rows, start, stop
            first, last = begin, end
        for color, a, b in ((COLORS["F"], top, bottom), (COLORS["W"], first, last)):
            if a < b or tag.dim == 1:  # a box of columns may be empty
                picture.box(x + left * ACROSS, y + a * DOWN, (right - left) * ACROSS,
                            (b - a) * DOWN, color)
        before += stop - start
    picture.box(x, y, columns * ACROSS, rows * DOWN, "none", ELSEWHERE)
    return columns * ACROSS


def draw_rank(picture, trainer):
    """A box with the matrices of this rank, layer by layer."""
    mesh, reducer = trainer.mesh, trainer.reducer
    d, p, t = (mesh.index_and_size(axis)[0] for axis in ("dp", "pp", "tp"))
    x, y = LEFT + p * (BOX + 12), TOP + (2 * d + t) * (TALL + 8) + 12 * d
    picture.box(x, y, BOX, TALL, "none", HELD + ' rx="6"')
    picture.text(x + 8, y + 17, f"rank {mesh.rank}", style=BOLD)
    at = x + 50
    before = None  # the layer of the matrix before
    stepped = {tag.name: (tag, start, start + chunk.numel()) for chunk, tag, start
               in zip(reducer.weights, reducer.tags, reducer.starts, strict=True)}
    for name in trainer.shapes:
        if name not in stepped or len(trainer.shapes[name]) < 2:
            continue
        tag, begin, end = stepped[name]
        words = name.removeprefix("transformer.").split(".")
        layer = f"block {words[1]}" if words[0] == "h" else words[0]
        if layer != before:
            at += 11
            picture.text(at, y + TALL - 5, layer, style=SMALL_TEXT)
            before = layer
        width = tag.slice_shape[1]
        at += 5 + draw_matrix(picture, at, y + TALL / 2 - 6, tag, begin / width, end / width)
    if (d, t) == (0, 0):
        picture.text(x + BOX / 2, TOP - 9, f"stage {p}", "middle", style=BOLD)
    if p == 0:
        picture.text(12, y + TALL / 2 - 4, f"replica {d}", style=BOLD)
        picture.text(12, y + TALL / 2 + 12, f"slice {t}", style=BOLD)


def draw_legend(picture, x, y):
    left = x
    for color, style, meaning in (
            (COLORS["F"], "", "weights: the rank's slice of the stage's matrices"),
            (COLORS["W"], "", "weights whose AdamW states the rank has, and which it steps"),
            ("none", ELSEWHERE, "on other ranks")):
        picture.box(x, y, 12, 12, color, style)
        picture.text(x + 18, y + 10, meaning, style=SMALL_TEXT)
        x += 36 + 5.6 * len(meaning)
    for i, note in enumerate(NOTES):
        picture.text(left, y + 34 + 18 * i, note, style=SMALL_TEXT)


def draw_eight_ranks(rank, file):
    """Each rank draws its box, the last one also the legend; rank 0 writes the picture."""
    trainer = make_trainer(EIGHT, vocab_size=1024)  # train.py's default data
    picture = Picture()
    draw_rank(picture, trainer)
    if rank == 7:
        draw_legend(picture, LEFT, TOP + 4 * (TALL + 8) + 20)
    shapes = all_gather_text("\n".join(picture.shapes), trainer.mesh.world)
    if rank == 0:
        write_svg(file, f"Who holds what of a small GPT: train.py {EIGHT}", 900, 644, shapes)


def ranks_command(words):
    """ranks --svg FILE: draws which slices and which AdamW states each of eight ranks holds."""
    parser = Parser(ranks_command.__doc__)
    parser.add_argument("--svg", metavar="FILE", required=True)
    demonstrate(draw_eight_ranks, 8, parser.parse_args(words).svg)


# ---- the command ----

DEMOS = {"collectives": demo_collectives, "ddp": demo_ddp, "zero": demo_zero,
         "tensor_parallel": demo_tensor_parallel, "sequence_parallel": demo_sequence_parallel,
         "context_parallel": demo_context_parallel, "expert_parallel": demo_expert_parallel,
         "pipeline": demo_pipeline}


def demo_command(name, words):
    parser = Parser(DEMOS[name].__doc__)
    numbers = range(1, 61) if name == "collectives" else [4]
    parser.add_argument("ranks", nargs="?", type=int, default=4, choices=numbers, metavar="RANKS")
    ranks = parser.parse_args(words).ranks
    demonstrate(DEMOS[name], ranks, ranks)


COMMANDS = {name: partial(demo_command, name) for name in DEMOS}
COMMANDS.update(mesh=mesh_command, sizes=sizes_command, schedules=schedules_command,
                ranks=ranks_command)


def main():
    parser = Parser(__doc__)
    parser.add_argument("name", choices=COMMANDS, metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGS")
    args = parser.parse_args()
    try:
        COMMANDS[args.name](args.words)
    except OSError as error:  # a picture that cannot be written
        parser.error(in_words(error))


if __name__ == "__main__":
    main()
