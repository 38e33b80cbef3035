"""The first ten minutes on a GPU: prints the page docs/measured/gpu.md, whatever the figures say.

    python -m tests.first_gpu > docs/measured/gpu.md     on a GPU that nobody else uses
    python -m tests.first_gpu --dry                     on CPUs, a small model: does it all run?

In order: the GPU's tests; GPT-2 trained by train.py, with and without --compile; one step's kernels
beside those counted on meta tensors; memory of dp 2 tp 2 pp 2 on this one card. Where extras/bench/
is, also what GPT-2 should reach, by arithmetic, and python -m extras.bench --gpu. A part that fails
says so, and the next part runs; the exit code is then 1.
"""

from run.config import Parser
from run.signals import end_quietly


def first_gpu_flags():
    parser = Parser(__doc__)
    parser.add_argument("--dry", action="store_true", help="on CPUs, a small model")
    return parser


if __name__ == "__main__":
    end_quietly()
    first_gpu_flags().parse_args()  # a wrong flag ends the process here, without torch

import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch.autograd import DeviceType

import train
from run.config import Config, check_layout
from sizes import GPTConfig, peak_flops
from tests.counts import GPT2, PRODUCTS, VOCABULARY, count_step
from tests.harness import HERE, mesh_of
from tests.pool import Pool

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 4}
MODEL_FLAGS = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "microbatches", "dtype")
N_PARAMETERS = 124_439_808  # those of GPT-2, without rows that pad the vocabulary
# Part of a kernel's name, in lower case -> kind of the kernel; the first part that fits counts
KINDS = {
    "triton": "compiled", "nccl": "messages", "memcpy": "copies", "memset": "copies",
    "flash": "attention", "fmha": "attention", "sdpa": "attention", "adam": "AdamW",
    "gamma": "LayerNorm", "layer_norm": "LayerNorm", "softmax": "loss", "gemm": "products",
    "nvjet": "products", "cutlass": "products", "sm90": "products", "splitk": "products",
    "mm": "products"}


FAILED = "failed, exit code"  # how a line begins, below the output of a command


def run(*words):
    """The lines that a command of this repository prints, to stdout and stderr; and a last line, if
    it fails."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=HERE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    failed = [f"{FAILED} {done.returncode}"] if done.returncode else []
    return done.stdout.splitlines() + failed


def indented(lines):
    return ["", *(f"    {line}".rstrip() for line in lines), ""]


def tests_of_a_gpu(dry):
    which = "every_axis_meets" if dry else "cuda"
    return indented(run("test_all.py", "-n", "0", "-k", which)[-4:])


def random_data(folder):
    """A folder like nanoGPT's: no meta.json, so the vocabulary is GPT-2's."""
    rng = np.random.default_rng(0)
    for name in ("train.bin", "val.bin"):
        rng.integers(0, VOCABULARY, 1 << 18).astype("<u2").tofile(Path(folder, name))
    return folder


def steps_of_train_py(sizes, *more):
    """(the rows of its metrics, the lines that it printed) of a run of train.py."""
    words = [f"--{key.replace('_', '-')}={sizes[key]}" for key in MODEL_FLAGS]
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "out/metrics.jsonl")
        said = run("train.py", "--fast", *words, "--data", random_data(folder),
                   "--eval-interval", 0, "--out", Path(folder, "out"), *more)
        written = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line) for line in written], said


def training(dry):
    """A row for train.py with and one without --compile: medians of its own metrics."""
    sizes = {**GPT2, **(SMALL if dry else {})}
    steps = 3 if dry else 40
    lines = [f"{'':12}{'ms':>8}{'tokens/s':>12}{'MFU':>8}"]
    for label in ("without", "--compile"):
        compiled = ["--compile"] if label == "--compile" and not dry else []
        rows, said = steps_of_train_py(sizes, "--steps", steps, *compiled)
        if not rows:
            lines += [f"{label}: no step", *said[-3:]]
            continue
        ms = statistics.median(row["ms"] for row in rows[len(rows) // 3 :])
        rate = 1e3 * sizes["batch_size"] * sizes["block_size"] / ms
        mfu = "-"
        if not dry and peak_flops(torch.cuda.get_device_name()):
            flops = rate * GPTConfig().flops_per_token(N_PARAMETERS)
            mfu = f"{flops / peak_flops(torch.cuda.get_device_name()):.1%}"
        lines.append(f"{label:12}{ms:8.1f}{rate:12,.0f}{mfu:>8}")
    return indented(lines)


@contextmanager
def started(ranks):
    """A Pool of ranks, which ends with all of its memory."""
    pool = Pool()
    pool.start(ranks)
    try:
        yield pool
    finally:
        pool.stop()


def kind_of_kernel(name):
    return next((kind for part, kind in KINDS.items() if part in name.lower()),
                "elementwise and others")


def table_of_kernels(events, device):
    """{kind: (kernels, milliseconds)} of the profiler's events that ran on the device. (On a GPU
    there are events of the host, too: cudaLaunchKernel.)"""
    table = {}
    for event in events:
        if event.device_type == device:
            kind = kind_of_kernel(event.key)
            count, ms = table.get(kind, (0, 0.0))
            spent = (event.self_cpu_time_total if device == DeviceType.CPU else
                     event.self_device_time_total)
            table[kind] = count + event.count, ms + spent / 1e3
    return table


def kernels_of_a_step(rank, cfg, warm_up):
    """table_of_kernels of one step, after warm_up steps."""
    trainer = train.Trainer(cfg, mesh_of(cfg), VOCABULARY)
    ids = torch.randint(VOCABULARY, (cfg.batch_size, cfg.block_size), device=cfg.device)

    def step():
        _, sums = trainer.step([(ids, ids, 0)], cfg.lr)
        trainer.mesh.world.read(sums)

    for _ in range(warm_up):
        step()
    cuda = cfg.device == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profiler:
        step()
    return table_of_kernels(profiler.key_averages(), DeviceType.CUDA if cuda else DeviceType.CPU)


def kernels(dry):
    """One step's kernels by kind, from torch's profiler, in a process of their own: its allocator
    keeps memory, which memory() would count."""
    cuda = torch.cuda.is_available()
    cfg = Config(**{**GPT2, **(SMALL if dry else {}), "device": "cuda" if cuda else "cpu"})
    check_layout(cfg, world=1)
    with started(1) as pool:
        table, = pool(1, kernels_of_a_step, cfg, 1 if dry else 5)
    lines = [f"{'':24}{'kernels':>8}{'ms':>8}"]
    for kind, (count, ms) in sorted(table.items(), key=lambda row: -row[1][1]):
        lines.append(f"{kind:24}{count:8}{ms:8.1f}")
    counting = count_step()
    lines.append(f"counted on meta tensors: {counting.num_kernels} kernels, "
                 f"{counting.gigabytes():.0f} GB, {counting.gigabytes(but=PRODUCTS):.0f} without "
                 "the products")
    return indented(lines)


def bytes_in_use():
    """Bytes of the card that are in use, by any process; 0 without a card."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def memory_of_a_rank(rank, cfg):
    """(bytes of torch's allocator, bytes of the card in use) on one of several ranks."""
    trainer = train.Trainer(cfg, mesh_of(cfg), VOCABULARY)
    local = cfg.batch_size // cfg.dp // cfg.microbatches
    ids = torch.zeros(local, cfg.block_size, dtype=torch.long, device=trainer.mesh.device)
    for _ in range(2):
        _, sums = trainer.step([(ids, ids, 0)] * cfg.microbatches, cfg.lr)
        trainer.mesh.world.read(sums)
    reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    return reserved, bytes_in_use()


def memory(dry):
    """Eight ranks on one card: bytes that torch's allocators hold, and bytes in use on the card,
    without those in use before. The difference is CUDA's own and NCCL's."""
    cuda = torch.cuda.is_available()
    cfg = Config(**{**GPT2, **(SMALL if dry else {}), "device": "cuda" if cuda else "cpu", "dp": 2,
                    "tp": 2, "pp": 1 if dry else 2, "microbatches": 2})
    cfg.collectives = "native" if cuda else "ring"
    ranks = check_layout(cfg, world=1)  # from one process, which starts the ranks itself
    before = bytes_in_use()  # this process's own, and maybe another program's
    with started(ranks) as pool:
        held = pool(ranks, memory_of_a_rank, cfg)
    reserved = sum(bytes_ for bytes_, _ in held) / 1e9
    used = (max(bytes_ for _, bytes_ in held) - before) / 1e9
    return indented([f"{ranks} ranks: torch {reserved:.2f} GB, the card {used:.2f} GB, so "
                     f"{(used - reserved) / ranks:.2f} GB of CUDA and NCCL per rank",
                     "(ranks of one card talk over sockets: over NVLink NCCL's buffers differ)"])


def name_of_gpu():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def expected(dry):
    return indented(run("-m", "extras.bench.expected", name_of_gpu()))


def bench(dry):
    quick = ["--quick"] if dry else []
    return indented(run("-m", "extras.bench", "--gpu", *quick))


PARTS = {
    "Tests": tests_of_a_gpu, "GPT-2, 16 x 1024 tokens, by train.py": training,
    "The kernels of one step": kernels, "dp 2 tp 2 pp 2 on this card": memory}
if (HERE / "extras" / "bench").is_dir():
    PARTS |= {"What GPT-2 should reach, by arithmetic": expected,
              "Beside loops like nanoGPT's": bench}


def main():
    parser = first_gpu_flags()
    args = parser.parse_args()
    if not (args.dry or torch.cuda.is_available()):
        parser.error("there is no GPU here; --dry runs without")
    pretence = " A dry run: its figures mean nothing." if args.dry else ""
    print(f"## On a GPU\n\n`python -m tests.first_gpu` on {name_of_gpu()}, torch "
          f"{torch.__version__}.{pretence}\n")
    failed = False
    for title, part in PARTS.items():
        print(f"### {title}", flush=True)
        try:
            lines = part(args.dry)
            print("\n".join(lines), flush=True)
            failed |= any(line.strip().startswith(FAILED) for line in lines)
        except Exception as error:
            print(f"\nFailed: {type(error).__name__}: {error}\n", flush=True)
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
