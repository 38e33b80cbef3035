"""Races the rows of python -m extras.bench: what a row is, how a turn is timed, the rows, and the
processes that run them. (__main__.py says what the columns mean.)"""

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

from extras.bench import bench_flags, plain_side, torch_side, without
from extras.bench.gpu import on_gpu
from extras.bench.job import (
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
from run.signals import end_quietly

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

# ---- the rows ----
# A Row (job.py) races two sides on n ranks, for one layout and one size of model or tensor.
# A side is a function that takes a Job and returns a step function. Each call of the step function
# runs one step and returns this rank's share of the loss. Here our side is the trainer of train.py
# --fast, its checkpoint (one row), or a collective of the engine. Goals are ratios. Row(
#     name,
#     number of ranks,
#     size: a model's name in SIZES, or the KB of a collective's tensor,
#     our side,
#     the peer's side,
#     goal,
#     flags of the layout,
#     limit=factor on the peer's time, in ratio and "peer ms",
#     steps=steps in a turn)

# (ranks, flags) of the layouts that several rows have
ONE = (1, {})
D2 = (2, {"dp": 2})
D4 = (4, {"dp": 4})
ZERO1 = (2, {"dp": 2, "zero": 1})
ZERO3 = (2, {"dp": 2, "zero": 3})
ZERO3_OF_4 = (4, {"dp": 4, "zero": 3})
P2 = (2, {"pp": 2, "microbatches": 8})
T2 = (2, {"tp": 2})
T2_SP = (2, {"tp": 2, "sp": True})
N2 = (2, {"cp": 2})
LLAMA = {"arch": "llama", "n_kv_head": 2, "n_hidden": 1024}

# Names of SIZES (job.py). Data parallelism is raced in a size whose steps are mostly compute,
# and in one whose steps are mostly messages; pipeline and tensor parallelism in the first of these,
# and in a size whose messages are tiny
COMPUTE_AND_COMMUNICATION = ("compute", "communication")
COMPUTE_AND_TINY = ("compute", "tiny")


def rows_of_training(name, peer, layouts, sizes, goal=None, **more):
    """A Row for each layout and size. more: further fields of Row."""
    return [Row(name, n, size, trainer, peer, goal, flags, **more)
            for n, flags in layouts for size in sizes]


def rows_of_collectives(name, peer, kilobytes, goal=None):
    """A Row for each size of tensor, on 2 and on 4 ranks."""
    return [Row(name, n, kb, collective, peer, goal) for n in (2, 4) for kb in kilobytes]


def against_torch():
    """The engine against torch's own."""
    return [
        *rows_of_collectives("all_reduce", torch_side.library,
                             (4, 64, 256, 1024, 4096, 16384, 65536), goal=2.0),
        *rows_of_collectives("reduce_scatter", torch_side.library, [65536], goal=8.0),
        *rows_of_collectives("all_gather", torch_side.library, [65536], goal=4.0),
        *rows_of_training("DDP", torch_side.ddp, [D2, D4], COMPUTE_AND_COMMUNICATION, goal=1.0),
        # 4 steps in a turn: ZeRO-1's weights travel during the next step, but a turn ends only when
        # the weights of its last step have arrived
        *rows_of_training("ZeRO-1", torch_side.ddp_zero1, [ZERO1], COMPUTE_AND_COMMUNICATION,
                          goal=1.0, steps=4),
        *rows_of_training("ZeRO-3", torch_side.fsdp, [ZERO3, ZERO3_OF_4],
                          COMPUTE_AND_COMMUNICATION, goal=1.15),
        *rows_of_training("1F1B", torch_side.pipelining, [P2], COMPUTE_AND_TINY, goal=1.0),
        *rows_of_training("tensor parallel", torch_side.dtensor, [T2], COMPUTE_AND_TINY,
                          goal=1.05),
        *rows_of_training("sequence parallel", torch_side.dtensor_sp, [T2_SP], COMPUTE_AND_TINY,
                          goal=1.1),
        *rows_of_training("Llama, tensor parallel", torch_side.dtensor, [(2, {"tp": 2, **LLAMA})],
                          ["compute"], goal=1.05),
        Row("checkpoint", 2, "compute", save_and_load, torch_side.dcp, 1.0, {"dp": 2}),
    ]


def against_limits():
    """The engine against the best speed that these cores allow, computed from the time of one
    process."""
    threads = plain_side.one_process  # with as many threads as the row has ranks
    # balance 0, because race() compares losses, and only the other loop's has a balance loss in it
    experts = (2, {"dp": 2, "ep": 2, "experts": 8, "balance": 0.0})
    rows = [
        *rows_of_collectives("all_reduce, to the memory's limit", plain_side.copies_and_sums,
                             (1024, 16384, 65536)),
        *rows_of_training("D = 2, to 2 threads", threads, [D2], ["compute"], goal=0.95),
        # 2 stages and 8 microbatches have a bubble of 1/9, so a step takes 9/8 of its work's time
        *rows_of_training("P = 2, to 2 threads + bubble", threads, [P2], ["compute"], goal=0.95,
                          limit=9 / 8),
        *rows_of_training("N = 2, to 2 threads", threads, [N2], ["long"], goal=0.95),
        *rows_of_training("E = 2, to 2 threads", threads, [experts], ["compute"]),
        *rows_of_training("one rank, to a plain loop", threads, [ONE], ["compute"], goal=0.95),
        *rows_of_training("Llama, one rank, to a plain loop", threads, [(1, LLAMA)], ["compute"],
                          goal=0.95),
    ]
    # "scaling": the peer is one rank on one core; n ranks run on min(n, CORES) cores. If the cores
    # share the work evenly, a step of the n ranks takes `limit` times the peer's:
    #     size                  work                     limit
    #     2 sequences a rank    n times the peer's       max(1, n / CORES)
    #     8 sequences in all    the same as the peer's   1 / min(n, CORES)
    for n in (1, 2, 4, 8):
        layout = [(n, {"dp": n})]
        rows += rows_of_training("scaling", plain_side.one_rank, layout, ["2 sequences a rank"],
                                 limit=max(1, n / CORES))
        rows += rows_of_training("scaling", plain_side.one_rank, layout, ["8 sequences in all"],
                                 limit=1 / min(n, CORES))
    lengths = [size for size in SIZES if size.startswith("S =")]
    context = [(n, {"cp": n}) for n in (1, 2, 4)]
    rows += rows_of_training("growth", threads, context, lengths)
    return rows


def against_ourselves():
    """The engine against the root: with one part of the root, or with all (--fast left out); and
    against the same layout in another way."""
    root_has = plain_side.root_has
    reducer = root_has("ddp")
    # The engine's columns keep a weight until backward, which the root's ZeRO-3 frees (run/config)
    zero3 = root_has("ddp", "tp")
    rows = [
        *rows_of_collectives("all_reduce, to plain", plain_side.plain_ring, (4096, 65536)),
        *rows_of_training("DDP, to plain", reducer, [D2], COMPUTE_AND_COMMUNICATION),
        *rows_of_training("ZeRO-1, to plain", reducer, [ZERO1], COMPUTE_AND_COMMUNICATION, steps=4),
        *rows_of_training("ZeRO-3, to plain", zero3, [ZERO3], COMPUTE_AND_COMMUNICATION),
        *rows_of_training("tensor parallel, to plain", root_has("tp"), [T2], COMPUTE_AND_TINY),
        *rows_of_training("1F1B, to plain", root_has("pp"), [P2], COMPUTE_AND_TINY),
        *rows_of_training("attention, to plain", root_has("cp"), [N2], ["long"]),
    ]
    layouts = {"one rank": ONE, "DDP": D2, "ZeRO-3": ZERO3, "1F1B": P2, "tensor parallel": T2}
    for name, layout in layouts.items():
        rows += rows_of_training(f"--fast, to plain: {name}", plain_side.all_of_the_root, [layout],
                                 ["compute"])
    no_sp = plain_side.other_flags(sp=False)
    all_to_all = plain_side.other_flags(cp_attention="all-to-all")
    return [
        *rows,
        *rows_of_training("--sp, to --tp alone", no_sp, [T2_SP], COMPUTE_AND_TINY),
        *rows_of_training("attention, to naive split", plain_side.naive_split, [N2], ["long"]),
        *rows_of_training("attention, to all-to-all", all_to_all, [N2], ["long"]),
    ]


def against_the_engine_without():
    """A row, or more, for each trick of engine/ that matters on CPUs: the ratio is what the trick
    earns."""
    def training(name, peer, layouts, sizes, **more):
        return rows_of_training(f"{name}, without", peer, layouts, sizes, **more)

    def collectives(name, peer, kilobytes):
        return rows_of_collectives(f"{name}, without", peer, kilobytes)

    one_parameter_each = plain_side.other_flags(bucket_mb=1e-6)
    recompute = (2, {"pp": 2, "microbatches": 8, "schedule": "gpipe", "recompute": True})
    P2_M4 = (2, {"pp": 2, "microbatches": 4})
    return [
        *collectives("shared memory", without.shared_memory, [4, 1024, 65536]),
        *training("shared memory", without.shared_memory_in_training, [D2, ZERO3],
                  COMPUTE_AND_COMMUNICATION),
        *training("shared memory", without.shared_memory_in_training, [T2, P2], COMPUTE_AND_TINY),
        *collectives("ring: pieces", without.pieces, [16384, 65536]),
        *collectives("two ranks swap", without.swap, [4, 1024, 65536]),
        *training("two ranks swap", without.swap_in_training, [T2], COMPUTE_AND_TINY),
        *training("DDP: buckets", one_parameter_each, [D2], COMPUTE_AND_COMMUNICATION),
        *training("DDP: overlap", without.overlap_of_buckets, [D2], COMPUTE_AND_COMMUNICATION),
        *training("DDP: gradient copied", without.first_gradient_copied, [D2], ["communication"]),
        *training("ZeRO-1: weights in background", without.weights_in_background, [ZERO1],
                  COMPUTE_AND_COMMUNICATION, steps=4),
        *training("ZeRO-3: prefetch", without.prefetch, [ZERO3], COMPUTE_AND_COMMUNICATION),
        *training("ZeRO-3: gathers what is read", without.gathered_where_read, [ZERO3],
                  ["50257 words"]),
        *training("tensor parallel: overlap", without.overlap_of_leaving, [T2], COMPUTE_AND_TINY),
        *training("--sp: overlap of the gather", without.overlap_of_entering, [T2_SP],
                  COMPUTE_AND_TINY),
        *training("--sp: saves 1/T, gathers again", without.input_gathered_again, [T2_SP],
                  ["compute"]),
        *training("one rank: torch's layers", without.torchs_linear_layers, [ONE], ["tiny"]),
        *training("pipeline: freed outputs", without.freed_outputs, [recompute],
                  ["8 x 2048 tokens"]),
        *training("ring attention: overlap", without.overlap_of_hops, [N2], ["long"]),
        *training("ring attention: skip", without.hidden_skipped, [N2], ["long"]),
        *training("head in chunks", without.head_in_chunks, [ONE, P2_M4], ["50257 words"]),
        *training("fused AdamW", without.fused_adamw, [ONE], ["compute", "2 sequences a rank"]),
    ]


ROWS = [*against_torch(), *against_limits(), *against_ourselves(), *against_the_engine_without()]


# ---- the race ----


def race(row, rank, communicators, folder, seconds, least):
    """The row's figures by name, the same on each of its ranks. communicators: {n: {name: torch's
    ProcessGroup of the first n ranks}}. seconds: how long to race; least: the number of pairs of
    turns to take even if they last longer."""
    # "peer" is the communicator of torch's side. Between turns that side sends nothing, so barriers
    # can use it
    barrier_group = communicators[row.n]["peer"]

    def highest(values):
        """The largest of the ranks' values."""
        values = torch.tensor(values, dtype=torch.double)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=barrier_group)
        return values

    def take_turn(job, step, num_steps):
        """Take num_steps steps of a side, and return the loss of the last. No message travels when
        this returns, because both sides may use the same communicator."""
        for _ in range(num_steps):
            loss = step()
        job.drain()
        return loss

    def clock(job, step):
        """Seconds of a turn, on this rank."""
        dist.barrier(barrier_group)
        start = time.perf_counter()
        take_turn(job, step, row.steps)
        return time.perf_counter() - start

    # Side 0 is ours, side 1 the peer's. Two steps of each, to warm up: their losses are compared
    jobs = [Job(row, rank, communicators, folder) for _ in range(2)]
    steps = [row.ours(jobs[0]), row.peer(jobs[1])]
    losses = torch.tensor([[take_turn(jobs[side], steps[side], 1) for side in (0, 1)]
                           for _ in range(2)])
    dist.all_reduce(losses, group=barrier_group)  # [step, side]: the sum of the ranks' shares
    if row.name != "scaling":  # there the peer, one rank, may have fewer sequences
        ours, peers = losses.unbind(1)
        assert torch.allclose(ours, peers, rtol=1e-3), (row, losses)
    # The race: pairs of turns
    before = jobs[0].last_mesh.bytes_sent()  # our side's mesh: the peer's Job has another one
    times = []  # (ours, the peer's) of each pair
    pairs = 1  # the first pair's time tells how many pairs to take
    while len(times) < pairs:
        first = len(times) % 2  # the sides take turns in going first
        pair = {side: clock(jobs[side], steps[side]) for side in (first, 1 - first)}
        # A row's limit counts in the ratio, and in the "peer ms" of the table
        times.append([pair[0], pair[1] * row.limit])
        if len(times) == 1:
            sent = jobs[0].last_mesh.bytes_sent() - before  # in our turn
            (longest,) = highest([sum(pair.values())]).tolist()
            pairs = min(max(seconds / longest, least), 200)
    calls = row.steps * repeats(row)  # steps, or calls of a collective, in a turn
    times = highest(times) / calls
    ratios = times[:, 1] / times[:, 0]
    low, ratio, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    ms, peer_ms = (1e3 * times).median(0).values.tolist()
    (sent,) = highest([sent]).tolist()
    # Peak memory: each side is built once more, alone
    del steps, jobs
    peaks = []
    for side in (row.ours, row.peer):
        job = Job(row, rank, communicators, folder)
        peaks.append(peak(job, side))
    peak_mb, peer_peak_mb = highest(peaks).tolist()
    return dict(ratio=ratio, low=low, high=high, ms=ms, peer_ms=peer_ms, peak_mb=peak_mb,
                peer_peak_mb=peer_peak_mb, sent_mb=sent / calls / 1e6)


def peak(job, side):
    """MB (10^6 bytes) by which this process grows at most while it builds a side and takes two
    steps; nan where that cannot be measured."""
    def status(field):
        """A size of this process in MB: VmRSS, now; VmHWM, its high-water mark."""
        with open("/proc/self/status") as file:
            kib = next(int(line.split()[1]) for line in file if line.startswith(field))
        return kib * 1024 / 1e6

    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed goes back to the system
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark starts anew
    except (OSError, AttributeError):  # not Linux: then every rank returns here
        return float("nan")
    before = status("VmRSS")
    step = side(job)
    for _ in range(2):
        step()
    job.drain()
    return status("VmHWM") - before


def worker(rank, world, chosen, quick, path, folder):
    """One of the processes: race the chosen rows (indices into ROWS). Rank 0 prints them, and
    writes them to `path` (--json). folder: for checkpoints, and for the ranks to meet."""
    end_quietly()  # no traceback at Ctrl-C
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's side warns
    init(timeout=1800, url=f"file://{folder}/rendezvous", rank=rank, size=world)
    rows = [ROWS[i] for i in chosen]
    communicators = {}  # {n: {name of a group: torch's ProcessGroup of the first n ranks}}
    for n in sorted({1, *(row.n for row in rows)}):  # 1: plain_side.one_rank has a mesh of one rank
        # JOINED: names of the groups that are not along a single axis. Each has a communicator
        named = {name: dist.new_group(range(n)) for name in JOINED}
        # The groups along single axes share one communicator: in each row only one axis has more
        # than one rank, so only the group of that axis sends messages
        named.update(dict.fromkeys(AXES, dist.new_group(range(n))))
        communicators[n] = named
    if quick:
        for size in SIZES.values():
            size.update(n_layer=2, block_size=32)
    results = []
    for row in rows:
        seconds = 5 if row.size in SIZES else 2  # for a row of training, or of collectives
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


def main(args=None):
    parser = bench_flags(__doc__)
    args = args or parser.parse_args()
    if args.gpu:
        if not torch.cuda.is_available() and not args.quick:
            parser.error("--gpu: there is no GPU here, and no figure without one")
        return on_gpu(args.quick)
    chosen = [i for i, row in enumerate(ROWS) if args.only.lower() in row.name.lower()]
    if args.quick:  # without the rows of 8 ranks, which would start 8 processes
        chosen = [i for i in chosen if ROWS[i].n <= 4]
    if not args.only:
        chosen = [i for i in chosen if ROWS[i].name != "growth"]
    if not chosen:
        names = ", ".join(dict.fromkeys(row.name for row in ROWS))
        parser.error(f"--only {args.only} is in no row's name; try {names}")
    if args.json:  # now, and not after all rows: can the file be written?
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
            # The process that failed has printed why (or its output has no reader). Only pass on
            # its exit code
            sys.exit(abs(error.exit_code))


if __name__ == "__main__":
    main()
