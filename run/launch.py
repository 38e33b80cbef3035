"""Starts the ranks, lets them meet, and ends them all: at a signal, at a failure, at the end.

    start      refuses wrong flags; runs the command again as all ranks of its layout, and waits
    joined     the life of a rank, as a context: meet the others, give the device, leave
    on_stop    a signal to save and stop

`python train.py --tp 2 --pp 2` becomes the launcher of four processes with the same command line.
torchrun may start all ranks, or one process, which then becomes the launcher.

    a rank                        the other ranks                            exit code
    finds wrong data or files     find them too, or wait for it and fail     2
    dies, or fails                fail: they wait for it                     1
    hangs (SIGSTOP)               fail after --timeout                       1
    gets a signal                 save after the step, too, and end          0
    gets a second one later       fail                                       128 + its number
"""

import signal

# Ctrl-C ends the process without a traceback, from here on: the imports take a tenth of a second,
# those of train.py some more. (A module that is not a command imports this one in a function.)
signal.signal(signal.SIGINT, signal.SIG_DFL)

import atexit
import ctypes
import gc
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from data.files import say
from run.flags import check_device, fail, in_words, program, read_command_line

IS_LINUX = sys.platform == "linux"
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # they ask a run to save and stop
# What the launcher tells a rank in its environment, beside torchrun's variables
LAUNCHER = "NANOPARALLEL_LAUNCHER"  # the launcher's pid
MEETING = "NANOPARALLEL_MEETING"  # the path of the file at which the ranks meet
GRACE = 10  # most seconds that the launcher gives the other ranks to end, once one has failed
# The ranks that a CommunicationError says it waited for, such as "receive from rank 3"
# (Group.exchange in collectives.py; join)
PEER = re.compile(r"(?:from|to|for) rank (\d+)")


class Place(NamedTuple):
    rank: int
    num_processes: int
    local_rank: int  # on this machine
    local_ranks: int


def place():
    """The Place of this process, as its launcher has said in the environment. The only process of a
    run is rank 0 of 1."""
    try:
        world = int(os.environ.get("WORLD_SIZE", 1))
        if world == 1:
            return Place(0, 1, 0, 1)
        return Place(int(os.environ["RANK"]), world, int(os.environ.get("LOCAL_RANK", 0)),
                     int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    except (KeyError, ValueError) as error:
        fail(f"WORLD_SIZE, RANK in the environment are not torchrun's ({error}); unset WORLD_SIZE, "
             "or use torchrun")


def ignore_signals():
    """From here on signals come too late. (At its end Python restores the default, and a signal
    that repeats an earlier one would end the process.)"""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# ---- start ----


def start(description):
    """Return if this process is a rank. Else start the ranks, wait for them, and exit. train.py
    calls this before it imports torch: neither the launcher nor a wrong flag waits for torch."""
    if sys.platform == "win32":
        fail("needs Linux or macOS; on Windows use WSL")
    # Let torch take GPU memory in segments that grow; and print no warnings around our one line
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a rank's launcher has blocked them
    die_with_parent()
    world = place().num_processes
    cfg, ranks = read_command_line(description, world)
    if ranks > world:
        sys.exit(launch(ranks, min(GRACE, cfg.timeout / 2)))


def die_with_parent():
    """A rank of our launcher, or of torchrun, ends when its parent does, even if it is stopped.
    (Linux's prctl; elsewhere its messages fail once another rank has gone.)"""
    launcher = int(os.environ.get(LAUNCHER, 0))
    if IS_LINUX and (launcher or "TORCHELASTIC_RUN_ID" in os.environ):
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher and os.getppid() != launcher:  # it ended before that call
        sys.exit(1)


def available_cores():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))  # taskset's and a container's limits
    return os.cpu_count() or 1


def start_rank(rank, size, meeting):
    """Start this command again as one rank. meeting: the file at which the ranks meet."""
    threads = max(1, available_cores() // size)
    loopback, path = "lo0", meeting.name
    if IS_LINUX:  # the file has no name: nothing stays, however the ranks end
        loopback, path = "lo", f"/proc/self/fd/{meeting.fileno()}"
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
                 LAUNCHER: os.getpid(), MEETING: path}
    # gloo: over loopback, which needs no address of this machine's name
    environment = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": loopback, **os.environ,
                   **{name: str(value) for name, value in variables.items()}}
    # orig_argv: with the interpreter's own flags, such as -O. A session of its own: a terminal's
    # Ctrl-C reaches the launcher alone, which passes it on once
    return subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment,
                            pass_fds=[meeting.fileno()], start_new_session=True)


def launch(size, grace):
    """Run this command again as `size` ranks on this machine, and wait for them. Once one has
    failed, the others have `grace` seconds to end. Returns the exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how ranks end
    ranks = []  # Popens
    received = []  # the numbers of signals to this launcher

    def pass_on(number, frame):
        received.append(number)
        for process in ranks:
            process.send_signal(number)

    # Linux: a file without a name
    with (tempfile.TemporaryFile if IS_LINUX else tempfile.NamedTemporaryFile)() as meeting:
        # A signal waits until all ranks have started, and in a rank, which inherits this, until it
        # has imported this module: Python would print a traceback before
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        ranks = [start_rank(rank, size, meeting) for rank in range(size)]
        for number in SIGNALS:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        deadline = math.inf
        codes = [None] * size  # None: the rank is still there
        while None in codes and time.monotonic() < deadline:
            if any(codes):  # neither 0 nor None
                deadline = min(deadline, time.monotonic() + grace)
            time.sleep(0.05)
            codes = [process.poll() for process in ranks]
        for process in ranks:
            process.kill()
            process.wait()
    ignore_signals()
    return exit_code(codes, received)


def exit_code(codes, received):
    """The launcher's exit code, and a line for what no rank could print. codes: how each rank has
    ended: its exit code, or minus the signal that ended it; None: the launcher killed it.
    received: the signals that the launcher has passed on."""
    if all(code == 0 for code in codes):
        return 0
    for number in received:
        if -number in codes or 128 + number in codes:  # no rank was ready to save, or a second one
            say(f"{program()}: stopped by {signal.Signals(number).name}")
            return 128 + number
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            say(f"{program()}: rank {rank} was ended by signal {-code} "
                f"({signal.strsignal(-code)})")
    return max([1, *(code for code in codes if code is not None)])


# ---- a rank: meet, train, leave ----


@contextmanager
def joined(cfg, world):
    """Meet the other ranks; give the device to compute on; leave when all have come to the end. An
    error inside ends all ranks: wrong data, a message, a file or memory with one line, others with
    a traceback."""
    import torch
    import torch.distributed as dist

    from collectives import naming

    gc.freeze()  # Python need not look through what the imports have made, not even at its end
    rank, _, local_rank, local_ranks = place()
    store = None
    try:
        try:
            check_device(cfg, local_ranks, torch.cuda.device_count())
            device = torch.device("cpu")
            if cfg.device == "cuda":
                device = torch.device("cuda", local_rank)
                torch.cuda.set_device(device)
                torch.set_float32_matmul_precision("high")  # products in TF32, like nanoGPT
            if world > 1:
                store = meet(rank, world, cfg.timeout)
                join(store, rank, world, device, cfg.timeout)
        except ValueError as error:  # --device, or no MASTER_PORT
            fail(error)
        yield device
        if world > 1:
            with naming(f"rank {rank}: waiting for all ranks to end"):
                dist.barrier(device_ids=[local_rank] if cfg.device == "cuda" else None)
            dist.destroy_process_group()
    except Exception as error:
        line, code = explain(error, rank, cfg)
        if line is None:
            raise
        abort(store, rank, line, cfg.timeout, code)


def explain(error, rank, cfg):
    """(one line, exit code) for an error that a rank may meet; (None, 1) for one of ours, whose
    traceback helps."""
    import torch

    from collectives import CommunicationError
    from data.files import FileError

    text = str(error)
    if isinstance(error, FileError):
        return in_words(error), 2
    if isinstance(error, (CommunicationError, OSError)):
        return in_words(error), 1
    full = "allocate memory" in text or "not enough memory" in text
    if full or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return (f"rank {rank}: out of memory; try --recompute, more --microbatches, a smaller "
                "--batch-size, or --zero with --dp"), 1
    if cfg.compile and type(error).__module__.startswith("torch._"):
        return f"rank {rank}: --compile: {text.strip().splitlines()[0]}", 1
    return None, 1


@contextmanager
def at_most(seconds, store, rank, what):
    """Name this block in errors, and end this process unless the block ends in time: torch may wait
    for longer than it is told, such as for a port that takes the connection and says nothing."""
    from collectives import naming

    line = f"rank {rank}: {what}"
    timer = threading.Timer(seconds, abort,
                            [store, rank, f"{line}: not within {seconds:g} s", seconds])
    timer.daemon = True
    try:
        with naming(line):
            timer.start()
            yield
    finally:
        timer.cancel()


def meet(rank, size, timeout):
    """The store: keys and values that all ranks read and write."""
    import torch.distributed as dist

    with at_most(2 * timeout, None, rank, "meeting at the store of all ranks"):
        if MEETING in os.environ:
            store = dist.FileStore(os.environ[MEETING], size)
        else:  # at MASTER_ADDR and MASTER_PORT: torchrun's store, or else one of rank 0
            found, _, _ = next(dist.rendezvous("env://", rank, size,
                                               timeout=timedelta(seconds=timeout)))
            # torchrun's lives on when it starts the ranks again
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), found)
        store.set(f"rank {rank} is here", "")
    return store


def join(store, rank, size, device, timeout):
    """Join torch's process group, once all ranks have come to the store."""
    import torch.distributed as dist

    from collectives import CommunicationError
    from transport.connect import connection_options

    keys = [f"rank {other} is here" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise CommunicationError(f"rank {rank}: waiting for rank {missing[0]} to start: not within "
                                 f"{timeout:g} s") from None
    options = connection_options(device, timeout)
    if device.type == "cuda":
        options["device_id"] = device  # NCCL connects now, while the GPU has memory for it
    with at_most(2 * timeout, store, rank, "waiting for all ranks to join"):
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank,
                                world_size=size, **options)


def abort(store, rank, line, timeout, code=1):
    """End this process at once, whatever its threads wait for. One of the ranks that abort prints
    its line: the line that no other failure explains.

    Say rank 2 has died. Rank 1 fails, because it waits for rank 2; then rank 0, because it waits
    for rank 1. Each says at the store that it has failed; a rank whose peer has failed, too, waits
    a moment more; the first one to add to a counter prints."""
    def end(prints):
        if prints:
            say(f"{program()}: {line}")
        os._exit(code)

    if store is None:
        end(True)
    # A closed connection is seen at once. Ranks that wait for a silent one give up at nearly the
    # same time, but on a busy machine some are late
    moment = min(3.0 if "not within" in line else 1.0, timeout / 3)
    try:
        threading.Timer(2 * moment + 3, end, [True]).start()  # the store may not answer
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
    first = []  # when the first signal came

    def handler(number, frame):
        if not first:
            first.append(time.monotonic())
            trainer.stop_asked = True
        elif time.monotonic() > first[0] + 1:
            os._exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, handler)
    atexit.register(ignore_signals)
