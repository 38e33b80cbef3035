"""Starts the ranks, lets them meet, and ends them all: at a signal, at a failure, at the end.

    start      refuses wrong flags; runs the command again as all ranks of its layout, and waits
    joined     the life of a rank, as a context: meet the others, give the device, leave
    on_stop    a signal to save and stop

`python train.py --tp 2 --pp 2` becomes the launcher: it starts four processes with the same command
line, each with its number in the environment, like torchrun. train.py calls start() before it
imports torch, so that the launcher, --help and a wrong flag do not wait for torch. torchrun works,
too: start() then starts those ranks only that torchrun did not.

    one rank          does                               and then
    ends with 2       (wrong data: all ranks end with 2) the launcher ends with 2
    dies, or fails    the ranks that wait for it fail    one prints who waited for whom; exit code 1
    stops             they fail after --timeout          as above; the launcher kills the rest
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import ctypes
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

from run.flags import check_device, fail, in_words, program, read_command_line

STOPS = (signal.SIGINT, signal.SIGTERM)
# What the launcher tells a rank in its environment, beside torchrun's variables
LAUNCHER = "NANOPARALLEL_LAUNCHER"  # the launcher's pid
MEETING = "NANOPARALLEL_MEETING"  # the path of the file at which the ranks meet
GRACE = 10  # most seconds that the launcher gives the other ranks to end, once one has failed
# The rank that a line waits for, such as "receive from rank 3"
PEER = re.compile(r"(?:from|to|for) rank (\d+)")


def say(line, stream=None):
    """Print a line, to a stream that may be closed or on a full disk."""
    with suppress(OSError, ValueError):
        print(line, file=stream or sys.stderr, flush=True)


def number(name, default):
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        fail(f"{name}={text:.40} in the environment is not a number; unset WORLD_SIZE and {name}, "
             "or use torchrun")
    return int(text)


def place():
    """(rank, number of ranks, rank on this machine, ranks on this machine): of this process, as its
    launcher has said in the environment. The only process of a run is rank 0 of 1."""
    size = number("WORLD_SIZE", 1)
    if size == 1:
        return 0, 1, 0, 1
    return number("RANK", ""), size, number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)


# ---- start ----


def start(description):
    """Return if this process is a rank. Else start the ranks, wait for them, and exit."""
    if sys.platform == "win32":
        fail("needs Linux or macOS; on Windows use WSL")
    # Let torch take GPU memory in segments that grow; and print no warnings around our one line
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # launch() blocks them while it starts ranks
    rank, world, *_ = place()
    cfg, ranks = read_command_line(description, world)
    if rank == 0 and LAUNCHER not in os.environ:
        axes = {"data": cfg.dp, "pipeline": cfg.pp, "context": cfg.cp, "tensor": cfg.tp}
        split = " x ".join(f"{size} {name}" for name, size in axes.items() if size > 1)
        model = "GPT" if cfg.arch == "gpt2" else cfg.arch.capitalize()
        say(f"{model} of {cfg.n_layer} layers, {cfg.n_embd} wide, on "
            + (f"{ranks} ranks: {split}" if split else "one rank") + "; loading torch", sys.stdout)
    if ranks > world:
        sys.exit(launch(ranks, min(GRACE, cfg.timeout)))


def die_with_parent():
    """A rank of our launcher, or of torchrun, ends when its parent does, even if it is stopped.
    (Linux's prctl; elsewhere its messages fail once another rank has gone.)"""
    launcher = number(LAUNCHER, 0)
    if not launcher and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher and os.getppid() != launcher:  # it ended before that call
        sys.exit(1)


def available_cores():
    with suppress(AttributeError):
        return len(os.sched_getaffinity(0))  # taskset's and a container's limits
    return os.cpu_count() or 1


@contextmanager
def meeting_file():
    """(path, open files that a rank needs to inherit) of an empty file at which ranks meet."""
    if sys.platform == "linux":  # in memory, without a name: nothing stays, however the ranks end
        file = os.memfd_create("meeting", 0)
        yield f"/proc/self/fd/{file}", [file]
        os.close(file)
    else:
        with tempfile.NamedTemporaryFile() as file:
            yield file.name, []


def start_rank(rank, size, path, files):
    """Start this command again as one rank."""
    threads = max(1, available_cores() // size)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
                 LAUNCHER: os.getpid(), MEETING: path}
    # gloo: over loopback, which needs no address of this machine's name
    loopback = "lo" if sys.platform == "linux" else "lo0"
    environment = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": loopback, **os.environ,
                   **{name: str(value) for name, value in variables.items()}}
    # orig_argv: with the interpreter's own flags, such as -O. A session of its own: a terminal's
    # Ctrl-C reaches the launcher alone, which passes it on once
    return subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment,
                            pass_fds=files, start_new_session=True)


def launch(size, grace):
    """Run this command again as `size` ranks on this machine, and wait for them. Once one has
    failed, the others have `grace` seconds to end. Returns the exit code: 0 if all end well."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how ranks end
    ranks = []
    received = []  # the numbers of signals to this launcher

    def pass_on(number, frame):
        received.append(number)
        for process in ranks:
            process.send_signal(number)

    with meeting_file() as (path, files):
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until pass_on can reach all ranks
        for rank in range(size):
            ranks.append(start_rank(rank, size, path, files))
        for stop in STOPS:
            signal.signal(stop, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        deadline = math.inf
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            if any(process.returncode for process in ranks):  # neither 0 nor None
                deadline = min(deadline, time.monotonic() + grace)
            time.sleep(0.05)
        ended = [process.poll() for process in ranks]
        for process in ranks:
            process.kill()
            process.wait()
    by_signal = {rank: -code for rank, code in enumerate(ended) if code is not None and code < 0}
    if received and (by_signal or len(received) > 1):
        say(f"{program()}: stopped by {signal.Signals(received[0]).name}")
        return 128 + received[0]
    for rank, number in by_signal.items():
        say(f"{program()}: rank {rank} was ended by signal {number} "
            f"({signal.strsignal(number)})")
    return max(1, *(process.returncode for process in ranks)) if any(
        process.returncode for process in ranks) else 0


# ---- a rank: meet, train, leave ----


@contextmanager
def joined(cfg, world):
    """Meet the other ranks; give the device to compute on; leave when all have come to the end. An
    error inside ends all ranks, with one line."""
    import torch
    import torch.distributed as dist

    from collectives import CommunicationError
    from data.batches import DataError
    from run.checkpoint import CheckpointError

    rank, size, local_rank, local_ranks = place()
    store = None
    try:
        check_device(cfg, local_ranks, torch.cuda.device_count())
    except ValueError as error:
        fail(error)
    try:
        device = torch.device("cpu")
        if cfg.device == "cuda":
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")  # products in TF32, like nanoGPT
        if size > 1:
            store = meet(rank, size, cfg.timeout)
            join(store, rank, size, device, cfg.timeout)
        yield device
        if size > 1:
            dist.barrier(device_ids=[local_rank] if cfg.device == "cuda" else None)
            dist.destroy_process_group()
    except (CheckpointError, DataError) as error:
        give_up(store, rank, in_words(error), cfg.timeout, code=2)
    except (CommunicationError, OSError) as error:
        give_up(store, rank, in_words(error), cfg.timeout)
    except (MemoryError, RuntimeError) as error:
        line = reason(error, cfg)
        if line is None:
            raise
        give_up(store, rank, f"rank {rank}: {line}", cfg.timeout)


def reason(error, cfg):
    """One line for an error of memory or of --compile; None for others, whose traceback helps."""
    import torch

    text = str(error)
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if full or "allocate memory" in text or "not enough memory" in text:
        return ("out of memory; try --recompute, more --microbatches, a smaller --batch-size, or "
                "--zero with --dp")
    if cfg.compile and type(error).__module__.startswith("torch._"):
        return f"--compile: {text.strip().splitlines()[0]}"
    return None


def meet(rank, size, timeout):
    """The store, keys and values that all ranks read and write, once all ranks have come there."""
    import torch.distributed as dist

    from collectives import CommunicationError, naming

    # A port that takes the connection and says nothing would hold torch for longer
    timer = threading.Timer(timeout, give_up, [None, rank, f"rank {rank}: waiting for the store of "
                                               f"all ranks: not within {timeout:g} s", timeout])
    timer.start()
    with naming(f"rank {rank}: looking for the store of all ranks"):
        if MEETING in os.environ:
            store = dist.FileStore(os.environ[MEETING], size)
        else:
            # torchrun's agent has a store of its own, which lives on when the ranks restart
            has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            server = dist.TCPStore(os.environ.get("MASTER_ADDR", ""), number("MASTER_PORT", ""),
                                   is_master=rank == 0 and not has_agent, wait_for_workers=False,
                                   timeout=timedelta(seconds=timeout))
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), server)
    timer.cancel()
    store.set(f"rank {rank} is here", "")
    keys = [f"rank {other} is here" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise CommunicationError(f"rank {rank}: waiting for rank {missing[0]} to start: not within "
                                 f"{timeout:g} s") from None
    return store


def join(store, rank, size, device, timeout):
    """Join torch's process group."""
    import torch.distributed as dist

    from collectives import naming
    from mesh import connection_options

    what = f"rank {rank}: waiting for all ranks to join"
    timer = threading.Timer(timeout, give_up, [store, rank, f"{what}: not within {timeout:g} s",
                                               timeout])
    timer.start()
    options = connection_options(device, timeout)
    if device.type == "cuda":
        options["device_id"] = device  # NCCL connects now, while the GPU has memory for it
    with naming(what):
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank,
                                world_size=size, **options)
    timer.cancel()


def give_up(store, rank, line, timeout, code=1):
    """End this process at once, whatever its threads wait for. One of the ranks that give up prints
    its line: that one which no other failure explains.

    Say rank 2 has died. Rank 1 fails, because it waits for rank 2; then rank 0, because it waits
    for rank 1. Each says at the store that it has failed; a rank whose peer has failed, too, waits
    a moment more; the first one to add to a counter prints."""
    def end(prints):
        if prints:
            with suppress(OSError):
                os.write(2, f"{program()}: {line}\n".encode(errors="replace"))
        os._exit(code)

    if store is None:
        end(True)
    threading.Timer(3, end, [True]).start()  # the store may not answer
    try:
        moment = min(1.0, timeout / 4)
        last_words = store.clone()  # a thread of torch may hold the first connection
        last_words.set(f"rank {rank} has failed", "")
        time.sleep(moment)
        if any(last_words.check([f"rank {peer} has failed"]) for peer in PEER.findall(line)):
            time.sleep(moment)
        prints = last_words.add("printed", 1) == 1
    except RuntimeError:  # the store has gone with its process
        prints = True
    end(prints)


def on_stop(trainer):
    """INT or TERM asks the trainer to stop after the step under way; a second signal ends this
    process. (What comes within a second is the first one again: `pkill`, a launcher and torchrun
    may all send it.)"""
    first = []

    def handler(number, frame):
        if not first:
            first.append(time.monotonic())
            trainer.stop_asked = True
        elif time.monotonic() > first[0] + 1:
            os._exit(128 + number)

    for stop in STOPS:
        signal.signal(stop, handler)
