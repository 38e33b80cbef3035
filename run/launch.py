"""Starts a command: refuses wrong flags, or runs the command again as all ranks of its layout.

`python train.py --tp 2 --pp 2` becomes the launcher: it starts four processes with the same command
line, each with its number in the environment (RANK, WORLD_SIZE, ..., like torchrun), and waits for
them. train.py calls start() before it imports torch, so the launcher, --help and a wrong flag do
not wait for torch.
`torchrun train.py --tp 2 --pp 2` starts one process, too, which becomes the launcher. With
--nproc-per-node 4 torchrun starts the ranks, and this file starts none.

Why ranks have a launcher of their own: torchrun kills the ranks that it starts 30 s after a signal,
even while they save; and it turns exit code 2 into 1.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time

from run import config, signals


def start(description, args=None):
    """Return if this process is a rank. Else start the ranks, wait for them, and exit. args: the
    flags; None: all arguments of this command line."""
    # Let torch take GPU memory in segments that grow: a freed tensor's memory then serves tensors
    # of other sizes. Set here, because torch reads it when it is imported. A user's own value
    # counts, also under the variable's older name
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        signals.before_training()
        signals.refuse_no_place()
    except ValueError as error:
        config.fail(error)
    cfg, world, ranks = config.read_command_line(description, args)
    # Print one line, once: the launcher prints it, or rank 0 of torchrun, or the only process
    is_first = signals.launched().rank == 0
    has_launcher = signals.STORE in os.environ
    if is_first and not has_launcher:
        model = {"gpt2": "GPT"}.get(cfg.arch, cfg.arch.capitalize())
        print(f"{model} of {cfg.n_layer} layers, {cfg.n_embd} wide, on {sentence(cfg, ranks)}; "
              "loading torch", flush=True)
    if ranks > world:
        try:
            tempfile.gettempdir()
        except OSError as error:  # a container whose root is read-only
            config.fail(f"{signals.in_words(error)}; the ranks meet at a file there: let TMPDIR "
                        "name a folder that can be written")
        sys.exit(launch(ranks, grace=min(10, cfg.timeout)))


def sentence(cfg, ranks):
    """The layout in words, such as "4 ranks: 2 pipeline x 2 tensor"."""
    axes = {"data": cfg.dp, "pipeline": cfg.pp, "context": cfg.cp, "tensor": cfg.tp}
    split = " x ".join(f"{size} {name}" for name, size in axes.items() if size > 1)
    return f"{ranks} ranks: {split}" if split else "one rank"


def start_rank(rank, size, store):
    """Start this command again as one rank, which will meet the others at the store."""
    threads = max(1, (os.cpu_count() or 1) // size)
    # A rank that fails prints one line: torch's C++ code is not to print warnings around it
    defaults = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank),
             "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
             signals.PARENT: str(os.getpid()),
             signals.STORE: f"{store}?rank={rank}&world_size={size}"}
    # orig_argv: with the interpreter's own flags, such as -O
    return subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]], env={**defaults, **os.environ, **place},
        # The terminal sends Ctrl-C to its foreground process group. A rank with a session of its
        # own is not in that group. It gets Ctrl-C once: from the launcher, which passes it on.
        start_new_session=True)


def wait_for_ranks(processes, grace):
    """Wait until all ranks have ended or, once one has failed, for `grace` seconds more. Returns
    their exit codes; None: still running."""
    deadline = math.inf
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or time.monotonic() >= deadline:
            return codes
        if any(codes):  # neither 0 nor None: a rank has failed
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.05)


def launch(size, grace=10):
    """Run this command again as `size` ranks on this machine. Once a rank has failed, the others
    have `grace` seconds to end. Returns 0 if all ranks end well, else the highest exit code, and at
    least 1: a rank that was ended by a signal has an exit code below 0."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"  # a file through which the ranks find one another
        processes = []  # one for each rank

        def pass_on(number, frame):
            for process in processes:
                process.send_signal(number)

        try:
            # While ranks are being started, a signal waits: then pass_on() reaches all of them
            signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPS)
            for rank in range(size):
                processes.append(start_rank(rank, size, store))
            signals.on_stop(pass_on)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPS)
            codes = wait_for_ranks(processes, grace)
            for rank, code in enumerate(codes):
                if code is not None and code < 0:  # -9: ended by signal 9, SIGKILL
                    signals.note(f"{signals.program()}: rank {rank} was ended by "
                                 f"{signals.name_of(-code)}")
        finally:
            for process in processes:
                process.kill()  # does nothing to a process that has ended
            codes = [process.wait() for process in processes]
    return max(1, *codes) if any(codes) else 0
