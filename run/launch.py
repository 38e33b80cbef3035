"""Starts a command: refuses wrong flags, or runs the command again as all ranks of its layout.

`python train.py --tp 2 --pp 2` becomes the launcher: it starts four processes with the same command
line, each with its number in the environment (RANK, WORLD_SIZE, ..., like torchrun), and waits for
them. The launcher does not import torch, which takes 2 s: --help and a wrong flag take 0.1 s.

Why not torchrun: it kills ranks 30 s after a signal, even while they save; and it turns exit code 2
into 1.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import config, signals


def start(description):
    """Return if this process is a rank. Else start the ranks, wait for them, and exit."""
    signals.before_training()
    cfg, world, ranks = config.read_command_line(description)
    first = os.environ.get("RANK", "0") == "0"
    of_launcher = signals.STORE in os.environ  # then the launcher has printed the line
    if first and not of_launcher:
        print(f"GPT of {cfg.n_layer} layers, {cfg.n_embd} wide, on {sentence(cfg, ranks)}; "
              "loading torch", flush=True)
    if ranks > world:
        sys.exit(launch(ranks, grace=min(10, cfg.timeout)))


def sentence(cfg, ranks):
    """The layout in words, such as "4 ranks: 2 pipeline x 2 tensor"."""
    axes = {"data": cfg.dp, "pipeline": cfg.pp, "context": cfg.cp, "tensor": cfg.tp}
    split = " x ".join(f"{size} {name}" for name, size in axes.items() if size > 1)
    return f"{ranks} ranks: {split}" if split else "one rank"


def start_rank(rank, size, store):
    """Start this command again as one rank, which will meet the others at the store."""
    threads = max(1, (os.cpu_count() or 1) // size)
    defaults = {"OMP_NUM_THREADS": str(threads),
                "TORCH_CPP_LOG_LEVEL": "ERROR"}  # no warnings of torch beside our one line
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank),
             "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
             signals.PARENT: str(os.getpid()),
             signals.STORE: f"{store}?rank={rank}&world_size={size}"}
    return subprocess.Popen(
        [sys.executable, *sys.argv], env={**defaults, **os.environ, **place},
        # The terminal sends Ctrl-C to its foreground process group. A rank with a session of its
        # own is in another group, and gets it once: from the launcher, which passes it on.
        start_new_session=True)


def wait_for_ranks(ranks, grace):
    """Wait until all ranks have ended or, once one has failed, for `grace` seconds more. Returns
    their exit codes; None: still running."""
    deadline = math.inf
    while True:
        codes = [rank.poll() for rank in ranks]
        if None not in codes or time.monotonic() >= deadline:
            return codes
        if any(codes):  # neither 0 nor None: a rank has failed
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.05)


def launch(size, grace=10):
    """Run this command again as `size` ranks on this machine. Returns 0 if all end well, else the
    highest exit code. Once a rank has failed, the others have `grace` seconds to end."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()  # a file through which the ranks find one another
        # A signal that comes while ranks are being started is kept until all of them can get it
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPS)
        ranks = [start_rank(rank, size, store) for rank in range(size)]

        def pass_on(number, frame):
            for rank in ranks:
                rank.send_signal(number)

        signals.on_stop(pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPS)
        codes = wait_for_ranks(ranks, grace)
        for rank, code in enumerate(codes):
            if code is not None and code < 0:  # -9: ended by signal 9, SIGKILL
                command = Path(sys.argv[0]).name
                print(f"{command}: rank {rank} was ended by {signal.Signals(-code).name}",
                      file=sys.stderr)
        for rank in ranks:
            rank.kill()  # does nothing to a rank that has ended
        codes = [rank.wait() for rank in ranks]
    return max(1, *codes) if any(codes) else 0
