"""Side by side with torch's own: same model, same weights, same data, same processes, in one run.

Each row is a race of two step functions that take turns, step by step, each after a barrier; a step
takes as long as on its slowest rank. ratio = the peer's time / ours in neighbouring steps, its
median and quartiles: 1.2 means that we do 1.2 steps while the peer does one. The first losses are
compared, so what is timed is the same training. A rank is a process with one thread. Peak memory:
how much a process grows while it builds one side and takes two steps (Linux; resident bytes).

    python bench.py                  every row, in half an hour on two cores
    python bench.py --quick          does it run? two steps each of a smaller model: no figures
    python bench.py --only ddp       rows with that in their name; --only scaling: 1 to 8 ranks
    python bench.py --only without   what each trick of the engine earns: its peer is the engine
                                     with that one trick switched off
    python bench.py --only growth    step and memory against the length of a sequence (1 to 4 ranks)
    python bench.py --json out.json  the figures for a program
    python bench.py --gpu            one GPU, bfloat16: against a loop like nanoGPT's, and the peak

The sides of the rows: races/.
"""

from run.command import bench_flags
from run.signals import end_quietly

if __name__ == "__main__":
    end_quietly()
    bench_flags(__doc__).parse_args()  # a wrong flag ends the process here, without torch

import ctypes
import gc
import json
import math
import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist

from races import plain_side, torch_side, without
from races.gpu import on_gpu
from races.job import (
    AXES,
    JOINED,
    SIZES,
    Job,
    Row,
    collective,
    repeats,
    save_and_load,
    trainer,
)
from run.files import refuse_foreign
from run.processes import init, shutdown

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

# ---- the rows ----

# ranks and flags of the layouts that several rows have
ONE = (1, {})
D2 = (2, {"dp": 2})
D4 = (4, {"dp": 4})
ZERO1 = (2, {"dp": 2, "zero": 1})
ZERO3 = (2, {"dp": 2, "zero": 3})
ZERO3_OF_4 = (4, {"dp": 4, "zero": 3})
P2 = (2, {"pp": 2, "microbatches": 8})
T2 = (2, {"tp": 2})
T2_SP = (2, {"tp": 2, "sp": True})
C2 = (2, {"cp": 2})

# sizes of the rows of one technique
WIDE_AND_SENT = ("compute", "communication")
WIDE_AND_TINY = ("compute", "tiny")


def rows_of_training(name, peer, goal, layouts, sizes, **more):
    return [Row(name, n, size, trainer, peer, goal, flags, **more)
            for n, flags in layouts for size in sizes]


def rows_of_collectives(name, peer, kilobytes, goal=None):
    return [Row(name, n, kb, collective, peer, goal) for n in (2, 4) for kb in kilobytes]


def against_torch():
    """The rows with goals."""
    return [
        *rows_of_collectives("all_reduce", torch_side.library, (4, 64, 256), 1.25),
        *rows_of_collectives("all_reduce", torch_side.library, (1024, 4096, 16384, 65536), 0.85),
        *rows_of_collectives("reduce_scatter", torch_side.library, [65536], 1.5),
        *rows_of_collectives("all_gather", torch_side.library, [65536], 1.0),
        *rows_of_training("DDP", torch_side.ddp, 1.0, [D2, D4], WIDE_AND_SENT),
        # 4 steps in a turn: ZeRO-1's weights travel during the next step, and at the end of a turn
        # they are waited for
        *rows_of_training("ZeRO-1", torch_side.ddp_zero1, 1.0, [ZERO1], WIDE_AND_SENT, steps=4),
        *rows_of_training("ZeRO-3", torch_side.fsdp, 1.15, [ZERO3, ZERO3_OF_4], WIDE_AND_SENT),
        *rows_of_training("1F1B", torch_side.pipelining, 1.0, [P2], WIDE_AND_TINY),
        *rows_of_training("tensor parallel", torch_side.dtensor, 1.05, [T2], WIDE_AND_TINY),
        *rows_of_training("sequence parallel", torch_side.dtensor_sp, 1.1, [T2_SP], WIDE_AND_TINY),
        Row("checkpoint", 2, "compute", save_and_load, torch_side.dcp, 1.0, {"dp": 2}),
    ]


def against_limits():
    one_process = plain_side.one_process
    experts = {"dp": 2, "ep": 2, "experts": 8, "balance": 0.0}
    rows = [
        *rows_of_training("D = 2, to 2 threads", one_process, 0.95, [D2], ["compute"]),
        # 9/8: the bubble of 2 stages and 8 microbatches
        *rows_of_training("P = 2, to that + bubble", one_process, 0.95, [P2], ["compute"],
                          limit=9 / 8),
        *rows_of_training("C = 2, to 2 threads", one_process, 0.95, [C2], ["long"]),
        *rows_of_training("E = 2, to 2 threads", one_process, None, [(2, experts)], ["compute"]),
        *rows_of_training("one rank, to a plain loop", one_process, 0.95, [ONE], ["compute"]),
    ]
    for n in (1, 2, 4, 8):  # the limit is one rank's time, the work shared evenly by the cores
        layout = [(n, {"dp": n})]
        rows += rows_of_training("scaling", plain_side.one_rank, None, layout,
                                 ["2 sequences a rank"], limit=max(1, n / CORES))
        rows += rows_of_training("scaling", plain_side.one_rank, None, layout,
                                 ["8 sequences in all"], limit=1 / min(n, CORES))
    lengths = [size for size in SIZES if size.startswith("S =")]
    rows += rows_of_training("growth", one_process, None, [(n, {"cp": n}) for n in (1, 2, 4)],
                             lengths)
    return rows


def against_ourselves():
    """The root's plain forms, and the same layout in another way."""
    reducer = plain_side.plain_reducer
    return [
        *rows_of_collectives("all_reduce, to plain", plain_side.plain_ring, (4096, 65536)),
        *rows_of_training("DDP, to plain", reducer, None, [D2], WIDE_AND_SENT),
        *rows_of_training("ZeRO-1, to plain", reducer, None, [ZERO1], WIDE_AND_SENT, steps=4),
        *rows_of_training("ZeRO-3, to plain", reducer, None, [ZERO3], WIDE_AND_SENT),
        *rows_of_training("tensor parallel, to plain", plain_side.plain_tensor_parallel, None,
                          [T2], WIDE_AND_TINY),
        *rows_of_training("1F1B, to plain", plain_side.plain_pipeline, None, [P2], WIDE_AND_TINY),
        *rows_of_training("attention, to plain", plain_side.plain_attention, None, [C2], ["long"]),
        *[row for name, layout in (("one rank", ONE), ("DDP", D2), ("ZeRO-3", ZERO3),
                                   ("1F1B", P2), ("tensor parallel", T2))
          for row in rows_of_training(f"train.py, to plain.py: {name}", plain_side.all_of_plain,
                                      None, [layout], ["compute"])],
        *rows_of_training("--sp, to --tp alone", plain_side.other_flags(sp=False), None, [T2_SP],
                          WIDE_AND_TINY),
        *rows_of_training("attention, to naive split", plain_side.naive_split, None, [C2],
                          ["long"]),
        *rows_of_training("attention, to all-to-all",
                          plain_side.other_flags(cp_attention="all-to-all"), None, [C2], ["long"]),
    ]


def against_the_engine_without():
    """A row, or more, for each trick of engine/: the ratio is what the trick earns."""
    def training(name, peer, layouts, sizes, **more):
        return rows_of_training(f"{name}, without", peer, None, layouts, sizes, **more)

    def collectives(name, peer, kilobytes):
        return rows_of_collectives(f"{name}, without", peer, kilobytes)

    one_parameter_each = plain_side.other_flags(bucket_mb=1e-6)
    recompute = (2, {"pp": 2, "microbatches": 8, "schedule": "gpipe", "recompute": True})
    four = (2, {"pp": 2, "microbatches": 4})
    return [
        *collectives("ring: pieces", without.pieces, [16384, 65536]),
        *collectives("ring: early receives", without.early_receives, [16384, 65536]),
        *collectives("butterfly", without.butterfly, [4, 256, 1024, 4096]),
        *training("butterfly", without.butterfly_in_training, [T2], WIDE_AND_TINY),
        *training("DDP: buckets", one_parameter_each, [D2], WIDE_AND_SENT),
        *training("DDP: overlap", without.overlap_of_buckets, [D2], WIDE_AND_SENT),
        *training("DDP: gradient copied", without.first_gradient_copied, [D2], ["communication"]),
        *training("loss summed meanwhile", without.loss_meanwhile, [D2, D4], ["communication"]),
        *training("ZeRO-1: weights sent late", without.weights_in_background, [ZERO1],
                  WIDE_AND_SENT, steps=4),
        *training("ZeRO-3: prefetch", without.prefetch, [ZERO3], WIDE_AND_SENT),
        *training("ZeRO-3: gathers what is read", without.gathered_where_read, [ZERO3],
                  ["50257 words"]),
        *training("tensor parallel: overlap", without.overlap_of_leaving, [T2],
                  WIDE_AND_TINY),
        *training("--sp: overlap of the gather", without.overlap_of_entering, [T2_SP],
                  WIDE_AND_TINY),
        *training("--sp: saves 1/T, gathers again", without.input_gathered_again, [T2_SP],
                  ["compute"]),
        *training("one rank: torch's layers", without.own_linear_layers, [ONE], ["tiny"]),
        *training("pipeline: early receives", without.receive_early, [P2], WIDE_AND_TINY),
        *training("pipeline: freed outputs", without.freed_outputs, [recompute],
                  ["8 x 2048 tokens"]),
        *training("ring attention: overlap", without.overlap_of_hops, [C2], ["long"]),
        *training("ring attention: skip", without.hidden_skipped, [C2], ["long"]),
        *training("head in chunks", without.head_in_chunks, [ONE, four], ["50257 words"]),
        *training("fused AdamW", without.fused_adamw, [ONE], ["compute", "2 sequences a rank"]),
    ]


ROWS = [*against_torch(), *against_limits(), *against_ourselves(), *against_the_engine_without()]


# ---- the race ----


def race(row, rank, communicators, folder, seconds, least):
    """The row's figures by name, the same on each of its ranks. seconds: how long to race; least:
    pairs of turns to take even if they last longer."""
    barrier_group = communicators[row.n]["peer"]

    def highest(values):
        """The largest of the ranks' values."""
        values = torch.tensor(values, dtype=torch.double)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=barrier_group)
        return values

    def take_turn(job, step, num_steps):
        """Returns the loss of the last step. Leaves no message on its way: both sides may use the
        same communicator."""
        for _ in range(num_steps):
            loss = step()
        job.drain()
        return loss

    def clock(job, step):
        dist.barrier(barrier_group)
        start = time.perf_counter()
        take_turn(job, step, row.steps)
        return time.perf_counter() - start

    jobs = [Job(row, rank, communicators, folder) for _ in range(2)]
    steps = row.ours(jobs[0]), row.peer(jobs[1])
    losses = torch.tensor([[take_turn(job, step, 1) for job, step in zip(jobs, steps, strict=True)]
                           for _ in range(2)])
    dist.all_reduce(losses, group=barrier_group)
    assert row.name == "scaling" or torch.allclose(*losses.unbind(1), rtol=1e-3), (row, losses)
    before = jobs[0].made.bytes_sent()
    times = []  # (ours, the peer's) of each pair of turns
    pairs = 1
    while len(times) < pairs:
        first = len(times) % 2  # the side that goes first changes
        pair = {side: clock(jobs[side], steps[side]) for side in (first, 1 - first)}
        times.append([pair[0], pair[1] * row.limit])
        if len(times) == 1:
            sent = jobs[0].made.bytes_sent() - before
            (longest,) = highest([sum(pair.values())]).tolist()
            pairs = min(max(seconds / longest, least), 200)
    calls = row.steps * repeats(row)  # steps, or calls of a collective, in a turn
    times = highest(times) / calls
    ratios = times[:, 1] / times[:, 0]
    low, ratio, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    ms, peer_ms = (1e3 * times).median(0).values.tolist()
    (sent,) = highest([sent]).tolist()
    del steps, jobs  # their memory is not to be counted below
    peaks = []
    for side in (row.ours, row.peer):
        job = Job(row, rank, communicators, folder)
        peaks.append(peak(job, side))
    peak_mb, peer_peak_mb = highest(peaks).tolist()
    return dict(ratio=ratio, low=low, high=high, ms=ms, peer_ms=peer_ms, peak_mb=peak_mb,
                peer_peak_mb=peer_peak_mb, sent_mb=sent / calls / 1e6)


def peak(job, side):
    """MB by which this process grows at most while it builds a side and takes two steps."""
    def status(field):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024

    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed goes back to the system
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark starts anew
    except (OSError, AttributeError):  # not Linux, and so on every rank
        return float("nan")
    before = status("VmRSS")
    step = side(job)
    for _ in range(2):
        step()
    job.drain()
    return status("VmHWM") - before


def worker(rank, world, chosen, quick, path, folder):
    """Race the chosen rows (indices into ROWS); rank 0 prints them."""
    end_quietly()  # with the process that started this one
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers'
    init(timeout=1800, url=f"file://{folder}/rendezvous", rank=rank, size=world)
    rows = [ROWS[i] for i in chosen]
    communicators = {}  # {n: {name of a group: torch's ProcessGroup of the first n ranks}}
    for n in sorted({1, *(row.n for row in rows)}):
        named = {name: dist.new_group(range(n)) for name in JOINED}
        named.update(dict.fromkeys(AXES, dist.new_group(range(n))))
        communicators[n] = named
    if quick:
        for size in SIZES.values():
            size.update(n_layer=2, block_size=32)
    results = []
    for row in rows:
        seconds = 5 if row.size in SIZES else 2
        least = 5
        if quick:
            seconds, least = 0, 2
        if rank < row.n:
            figures = race(row, rank, communicators, folder, seconds, least)
        dist.barrier()
        if rank == 0:
            results.append(report(row, figures))
    if rank == 0 and path:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)
    shutdown()


JSON = '[\n {\n  "row": "'  # the first characters of the file of --json
HEADER = (f"{'row':38}{'n':>2}  {'size':19}{'ours ms':>9}{'peer ms':>9}{'ratio':>7}  "
          f"{'quartiles':>11}{'goal':>6}{'peak MB':>8}{'peer':>6}{'sent MB':>9}")
LINE = ("{row:38}{n:2}  {size:19}{ms:9.2f}{peer_ms:9.2f}{ratio:7.2f}  {low:.2f} - {high:.2f}"
        "{goal:>6}{peak_mb:8.0f}{peer_peak_mb:6.0f}{sent_mb:9.2f}")


def report(row, figures):
    """Print a row's figures; return them for --json, which has no nan."""
    size = row.size if row.size in SIZES else f"{row.size} KB"
    named = dict(row=row.name, n=row.n, size=size)
    print(LINE.format(**named, **figures, goal=f"{row.goal:.2f}" if row.goal else ""), flush=True)
    known = {name: None if math.isnan(figure) else figure for name, figure in figures.items()}
    return {**named, **known, "goal": row.goal}


def main():
    parser = bench_flags(__doc__)
    args = parser.parse_args()
    if args.gpu:
        if not torch.cuda.is_available() and not args.quick:
            parser.error("--gpu: there is no GPU here, and no figure without one")
        return on_gpu(args.quick)
    chosen = [i for i, row in enumerate(ROWS) if args.only.lower() in row.name.lower()
              and not (args.quick and row.n > 4) and (args.only or row.name != "growth")]
    if not chosen:
        names = ", ".join(dict.fromkeys(row.name for row in ROWS))
        parser.error(f"--only {args.only} is in no row's name; try {names}")
    if args.json:  # now, not after half an hour: can it be written?
        try:
            refuse_foreign("--json", args.json, JSON)
            open(args.json, "a").close()
        except (ValueError, OSError) as error:
            parser.error(error)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    world = max(ROWS[i].n for i in chosen)
    print(f"torch {torch.__version__}, {CORES} cores, {world} processes\n{HEADER}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(worker, (world, chosen, args.quick, args.json, folder),
                                        world)
        except torch.multiprocessing.ProcessExitedException as error:
            sys.exit(abs(error.exit_code))  # it has said why, or nobody reads what it prints


if __name__ == "__main__":
    main()
