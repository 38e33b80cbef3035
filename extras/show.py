"""Shows each technique at work on four processes of this machine, and draws schedules.

    python -m extras.show ddp                   also collectives, zero, tensor_parallel,
                                                sequence_parallel, context_parallel,
                                                expert_parallel, pipeline
    python -m extras.show schedules 1f1b 4 8    a timeline of 4 ranks and 8 microbatches; also into
                                                a picture: --svg FILE
    python -m extras.show schedules 4 8         the bubble of every schedule
    python -m extras.show sizes 7e9             GB held and sent by a rank, by ZeRO stage

Most demonstrations run one step of a small GPT in float64 by train.py's Trainer, and print how far
the gradients are from those of one process: 1e-15 is rounding.
"""

import argparse
import io
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch

import sizes
from collectives import all_gather, all_reduce, maximum, reduce_scatter
from context_parallel import zigzag
from data.files import drop
from experts import kind_of
from mesh import Mesh
from model import build, from_seed
from run.flags import Parser, check_layout, in_words, parse
from schedules import SCHEDULES, make_lists, placement
from test_all import difference, ranks, whole_slices
from tests.timeline import check_lists, simulate
from train import Trainer, make_mesh

# ---- a small GPT on N processes. Every rank prints; rank 0's lines are shown ----

N = 4
SMALL = ("--n-layer 2 --n-head 4 --n-embd 16 --block-size 8 --batch-size 8 --microbatches 1 "
         "--dtype float64")
# 8 sequences of 8 token ids, of 50 words; each is its own target
SEQUENCES = torch.randint(50, (8, 8), generator=torch.Generator().manual_seed(0))


def small_gpt(words):
    """train.py's Trainer of this rank under these flags, after a forward and a backward."""
    cfg = parse(f"{SMALL} {words}".split())
    check_layout(cfg, world=1)
    shape = sizes.config_of(cfg, vocab_size=50)
    trainer = Trainer(cfg, make_mesh(cfg, "cpu"), shape, from_seed(shape, seed=0))
    index, size = trainer.mesh.index_and_size("dp")
    microbatches = SEQUENCES.chunk(size)[index].chunk(cfg.microbatches)
    trainer.pipeline.run(trainer.own([(part, part) for part in microbatches]), trainer.reducer)
    return trainer


def compare(name, trainer):
    """Print how far the gradients, summed, are from one process's. Frees ZeRO-3's whole weights."""
    alone = build(trainer.config, dtype=torch.double, kind=kind_of(trainer.config))
    (alone(SEQUENCES, SEQUENCES) / SEQUENCES.numel()).backward()
    want = {name: param.grad for name, param in alone.canonical_parameters()}
    reducer, world = trainer.reducer, trainer.mesh.world
    off = [difference(grad, tag.slice(want[tag.name]))
           for tag, grad in whole_slices(reducer, reducer.gradients())]
    worst = all_reduce(torch.tensor([max(off)]), world, maximum)
    [*reducer.whole()]
    print(f"{name}: the gradients of {world.size} ranks differ from one process's by "
          f"{worst.item():.0e} of their size")


def of_all_ranks(x, group):
    """The tensors x of the group's ranks, stacked."""
    rows = x.new_empty(group.size, *x.shape)
    rows[group.rank] = x
    return all_gather(rows, group)


# ---- techniques ----


def demo_collectives(rank):
    """One ring all-reduce, hop by hop, and the bytes that it sends."""
    mesh = Mesh(dp=N)
    group = mesh.group("dp")
    # Rank r's terms are 2^r. So bit r of a number, from the right, says whether the number contains
    # rank r's term: 0110 is the sum of the terms of ranks 1 and 2
    x = torch.ones(N, dtype=torch.long) << rank
    states = []  # x before each hop, and at the end
    exchange = group.exchange

    def watched_exchange(*args):  # every hop of the ring is one exchange
        states.append(x.clone())
        return exchange(*args)

    group.exchange = watched_exchange
    all_gather(reduce_scatter(x, group), group)
    states.append(x)
    print("a number is a chunk; its bit r, from the right, is 1 once rank r's term is in it")
    names = ["start", *["reduce-scatter"] * (N - 1), *["all-gather"] * (N - 1)]
    hops = of_all_ranks(torch.stack(states), mesh.world).unbind(1)  # of each: (rank, chunk)
    for name, hop in zip(names, hops, strict=True):
        cells = [" ".join(f"{number:0{N}b}" for number in row) for row in hop.tolist()]
        print(f"{name:14}", *(f"  rank {r}: {cell}" for r, cell in enumerate(cells)))
    formula = 2 * (N - 1) * x.nbytes // N
    print(f"a rank sends 2 (N-1)/N of {x.nbytes} bytes, {formula}, and has sent "
          f"{group.bytes_sent}")


def demo_ddp(rank):
    """Each rank runs backward on its own 2 of 8 sequences; DDP sums the gradients."""
    compare("DDP", small_gpt(f"--dp {N}"))


def demo_zero(rank):
    """Each stage of ZeRO: how many numbers rank 0 keeps, and how many its optimizer steps."""
    for zero in range(4):
        trainer = small_gpt(f"--dp {N} --zero {zero} --microbatches 2")
        compare(f"ZeRO-{zero}", trainer)
        reducer = trainer.reducer
        psi = sum(shape.numel() for shape in trainer.shapes.values())
        stepped = sum(weights.numel() for weights in reducer.weights)
        # Numbers of 8 bytes. What ZeRO-1 and 2 step is a part of this memory; ZeRO-3 has freed it
        whole = sum(flat.weights.untyped_storage().nbytes() // 8 for flat in reducer.trained_flats)
        gradients = sum(flat.grads.numel() for flat in reducer.trained_flats
                        if flat.grads is not None)
        print(f"ZeRO-{zero}: of {psi} parameters rank 0 keeps {max(whole, stepped)} weights and "
              f"{max(gradients, stepped)} gradients, and its optimizer steps {stepped}")


def demo_tensor_parallel(rank):
    """Which part of each parameter rank 0 holds."""
    trainer = small_gpt(f"--tp {N}")
    compare("tensor_parallel", trainer)
    tags = {tag.name: tag for tag in trainer.reducer.tags}
    for name, shape in trainer.shapes.items():
        print(f"{name:34} {[*shape]!s:>9} on rank 0: {[*tags[name].slice_shape]}")


def demo_sequence_parallel(rank):
    """Tensor parallelism alone, then with sequence parallelism: the bytes that rank 0 sends."""
    for name, words in (("tensor_parallel", ""), ("sequence_parallel", "--sp")):
        trainer = small_gpt(f"--tp {N} {words}")
        sent = trainer.mesh.group("tp").bytes_sent  # before the gradients of LayerNorms are summed
        compare(name, trainer)
        print(f"{name}: {sent} bytes sent")


def demo_context_parallel(rank):
    """Which segments of a sequence meet in which round of ring attention, and how even the work of
    N ranks is, with zigzag and without; then both forms of attention."""
    S = 8 * N
    owner = [*range(N), *reversed(range(N))]  # the rank that owns each segment
    print(f"{S} tokens in {2 * N} segments; a digit is the round in which queries (rows) meet keys")
    for query in range(2 * N):
        rounds = [str((owner[query] - owner[key]) % N) if key <= query else "."
                  for key in range(2 * N)]
        print(f"  segment {query:2d} of rank {owner[query]}   {' '.join(rounds)}")
    for name, split in (("zigzag", [zigzag(S, N, r) for r in range(N)]),
                        ("no zigzag, two neighbouring segments for each rank",
                         torch.arange(S).chunk(N))):
        print(f"{name}: pairs of query and key on ranks 0 to {N - 1}")
        of_rank = torch.zeros(N)
        for i in range(N):
            # A query attends to the keys whose positions are not after its own
            pairs = [int((split[r].unsqueeze(1) >= split[(r - i) % N]).sum()) for r in range(N)]
            print(f"  round {i}  {pairs}")
            of_rank += torch.tensor(pairs)
        print(f"  the busiest rank has {of_rank.max() / of_rank.mean():.2f} times the mean")
    for kind in ("ring", "all-to-all"):
        compare(f"{kind} attention", small_gpt(f"--cp {N} --cp-attention {kind}"))


def demo_expert_parallel(rank):
    """Which rank's tokens chose which of 8 experts."""
    trainer = small_gpt(f"--dp {N} --ep {N} --experts 8")
    logits = []  # (B, S, experts) of the first block's router
    router = trainer.pipeline.stages[0][1].mlp.router
    router.register_forward_hook(lambda *args: logits.append(args[2]))
    ids = SEQUENCES.chunk(N)[rank]
    trainer.pipeline.run(trainer.own([(ids, ids)]))  # forward only
    chosen = logits[0].topk(2).indices  # (B, S, k)
    load = chosen.flatten().bincount(minlength=8).view(N, -1)  # [rank][its expert]
    loads = of_all_ranks(load, trainer.mesh.group("ep"))
    choices = int(load.sum())  # a token counts once for each of its k experts
    print("how often the tokens of each rank (rows) chose each expert; | separates the experts "
          "of different ranks")
    for r, row in enumerate(loads):
        away = int(row.sum() - row[r].sum())
        table = " |".join("".join(f"{n:4d}" for n in part) for part in row.tolist())
        print(f"rank {r}  {table}    {away} of {choices} choices go elsewhere")
    compare("expert_parallel", trainer)


def demo_pipeline(rank):
    """8 microbatches of one sequence each, under every schedule."""
    for name in SCHEDULES:
        compare(name, small_gpt(f"--pp {N} --n-layer 6 --microbatches 8 --schedule {name}"))


DEMOS = {"collectives": demo_collectives, "ddp": demo_ddp, "zero": demo_zero,
         "tensor_parallel": demo_tensor_parallel, "sequence_parallel": demo_sequence_parallel,
         "context_parallel": demo_context_parallel, "expert_parallel": demo_expert_parallel,
         "pipeline": demo_pipeline}


def lines_of(rank, name):
    """What this rank prints in a demonstration."""
    with redirect_stdout(io.StringIO()) as printed:
        DEMOS[name](rank)
    return printed.getvalue()


def demo_command(name, words):
    Parser(DEMOS[name].__doc__).parse_args(words)  # no flags but --help
    printed = ranks(N, lines_of, name)[0]
    ranks.stop()
    print(printed, end="")


# ---- schedules ----

WORDS = """\
F0: forward of microbatch 0. B0: its backward; or its halves, I0 for the gradient of the input, W0
for those of the weights. Lower case: a rank's second stage. Dashes: the action goes on. Dots: the
rank waits. Makespan: time of a step. Bubble: the largest share of that time in which a rank waits.
In flight: microbatches whose activations rank 0, 1, ... holds at most. Long rows are cut."""


def schedule_text(times):
    """One row per rank, time from left to right, cut at the terminal's width. WORDS explains it.
    times: Timeline.times of tests/timeline.py, per rank [(action, start, end)]."""
    width = shutil.get_terminal_size((160, 24)).columns
    entries = [entry for row in times for entry in row]
    # A column is a character. The shortest action has room for its name and a space
    longest_name = 1 + max(len(str(action.microbatch)) for action, _, _ in entries)
    columns_per_time = (longest_name + 1) / min(end - start for _, start, end in entries)
    rows = []
    for rank, row in enumerate(times):
        line = begin = f"rank {rank:<3}"
        for (kind, stage, k), start, end in row:
            left, right = round(start * columns_per_time), round(end * columns_per_time)
            name = kind.lower() if stage // len(times) % 2 else kind
            line = line.ljust(len(begin) + left, ".")
            # "F3--- ": of 6 columns the first 5 are filled with dashes, the last is a space
            line += f"{name}{k}".ljust(right - left - 1, "-") + " "
        step = round(max(end for _, _, end in entries) * columns_per_time)
        rows.append(line.ljust(len(begin) + step, ".")[:width])
    return "\n".join(rows)


COLORS = {"F": ("#6aa0e8", "blue: forward"), "B": ("#6cc08b", "green: backward"),
          "I": ("#6cc08b", "green: gradient of the input"),
          "W": ("#e8b04a", "yellow: gradient of the weights")}  # of actions
INK = "#7d7d7d"  # visible on a white page and on a dark one


def draw_schedule(file, title, times):
    """Write the timelines of schedule_text as an SVG file; a rank's later stages are paler. x goes
    right, y down, in pixels."""
    left, right, row_height = 60, 940, 26
    bottom = 60 + row_height * len(times)
    pixels_per_time = (right - left) / max(end for row in times for _, _, end in row)
    shapes = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 12} {bottom + 16}" '
              'font-size="12" font-family="sans-serif">',
              f'<text x="12" y="22" fill="{INK}" font-size="14" font-weight="bold">{title}</text>']
    for rank, row in enumerate(times):
        y = 36 + row_height * rank
        shapes.append(f'<text x="12" y="{y + 16}" fill="{INK}">rank {rank}</text>')
        for (kind, stage, k), start, end in row:
            x = left + start * pixels_per_time
            wide = (end - start) * pixels_per_time
            opacity = 2 / (2 + stage // len(times))
            font_size = min(12, 1.5 * wide / len(str(k)))
            shapes += [f'<rect x="{x:.1f}" y="{y}" width="{wide - 1:.1f}" height="22" '
                       f'fill="{COLORS[kind][0]}" opacity="{opacity:.2f}"/>',
                       f'<text x="{x + wide / 2:.1f}" y="{y + 15}" fill="#222" '
                       f'text-anchor="middle" font-size="{font_size:.1f}">{k}</text>']
    kinds = {action.kind for row in times for action, *_ in row}
    meanings = "; ".join(meaning for kind, (_, meaning) in COLORS.items() if kind in kinds)
    shapes.append(f'<text x="{left}" y="{bottom}" fill="{INK}">{meanings}</text>')
    Path(file).write_text("\n".join([*shapes, "</svg>\n"]))


def four_numbers(words):
    first, second, third, fourth = map(float, words.split(","))
    return first, second, third, fourth


def schedules_command(words):
    """schedules 1f1b 4 8: the timeline of a schedule, and its figures. schedules 4 8: the figures
    of every schedule, one line each."""
    parser = Parser(schedules_command.__doc__)
    parser.add_argument("schedule", nargs="?", choices=SCHEDULES, metavar="NAME",
                        help=", ".join(SCHEDULES))
    parser.add_argument("P", type=int, help="ranks")
    parser.add_argument("m", type=int, help="microbatches")
    parser.add_argument("--costs", type=four_numbers, default=(1, 1, 1, 0), metavar="F,I,W,comm")
    parser.add_argument("--svg", metavar="FILE", help="write NAME's picture there")
    args = parser.parse_args(words)
    P, m = args.P, args.m
    if not 0 < P <= 500 or not 0 < m <= 20000 / P:
        parser.error(f"{P} ranks, {m} microbatches: at most 500 ranks, and 20,000 pairs of both")
    fitting = [name for name in SCHEDULES if m % P == 0 or not SCHEDULES[name].in_rounds]
    if args.schedule not in (None, *fitting):
        parser.error(f"{m} microbatches must be a multiple of {P} ranks for {args.schedule}")
    if args.svg and not args.schedule:
        parser.error(f"--svg {args.svg} is for one schedule; name it")
    for name in [args.schedule] if args.schedule else fitting:
        try:
            lists, where = make_lists(name, P, m), placement(name, P)
            check_lists(lists, where)
            timeline = simulate(lists, where, args.costs)
            if args.svg:
                title = f"{name}: {P} ranks, {m} microbatches, bubble {timeline.bubble:.1%}"
                draw_schedule(args.svg, title, timeline.times)
        except (OSError, ValueError) as error:
            parser.error(in_words(error))
        if args.schedule:
            print(schedule_text(timeline.times))
        v = SCHEDULES[name].stages_per_rank
        share = f", each in 1/{v} of a rank's layers" if v > 1 else ""
        print(f"{name:11}  makespan {timeline.makespan:<8.6g} bubble {timeline.bubble:6.2%}  "
              f"in flight {timeline.peak_in_flight}{share}")
    print(WORDS)


# ---- the command ----


def sizes_command(words):
    """sizes 7e9: GB of model states that a rank holds, and GB that the rank sends in a step, by
    ZeRO stage and number of ranks."""
    parser = Parser(sizes_command.__doc__)
    parser.add_argument("parameters", type=float)
    parser.add_argument("--microbatches", type=int, default=1, help="of a step and rank")
    args = parser.parse_args(words)
    billions, m = args.parameters / 1e9, args.microbatches
    if not min(billions, m) > 0:
        parser.error("parameters and --microbatches must be above 0")
    weights, gradients, optimizer = sizes.bytes_per_parameter(0, 1)
    print(f"{args.parameters:g} parameters of 2 bytes: weights {billions * weights:g} "
          f"GB, gradients {billions * gradients:g} GB, Adam's states {billions * optimizer:g} GB")
    print(f"{'':6} | {'GB held per rank':40} | GB sent in a step, microbatches: {m}")
    row = "{:>6} | {:>9} {:>9} {:>9} {:>9}  | {:>9} {:>9} {:>9}"
    print(row.format("ranks", *(f"ZeRO-{stage}" for stage in range(4)), "ZeRO-0, 1", "ZeRO-2",
                     "ZeRO-3"))
    for D in (2**i for i in range(11)):
        held = [billions * sum(sizes.bytes_per_parameter(stage, D)) for stage in range(4)]
        # How many reduce-scatters and all-gathers of the whole gradient's size a step has
        sent = [halves * (D - 1) / D * billions * gradients for halves in (2, 1 + m, 3 * m)]
        print(row.format(D, *(f"{gb:.4g}" for gb in (*held, *sent))))


COMMANDS = {"schedules": schedules_command, "sizes": sizes_command}


def main():
    parser = Parser(__doc__)
    names = [*DEMOS, *COMMANDS]
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGS")
    args = parser.parse_args()
    if args.name in COMMANDS:
        COMMANDS[args.name](args.words)
    else:
        demo_command(args.name, args.words)


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has closed the pipe
        drop(sys.stdout)
