"""What the tests share: test_all.py's loop and processes, runs of the commands, corpora.

    run(words, corpus)                 a layout against one process (test_all.py); more rows of the
                                       table are a line each in test_layouts.py
    ranks(4, function, *args)          function(rank, *args) in four processes (test_all.py)
    in_layout(words, corpus, function) function(rank, cfg) on the ranks of a layout
    make_trainer(cfg)                  in such a process: a Trainer of this rank, and its Data
    command("train.py", ...)           a command in a process of its own
    Run(2, flags(corpus, out), tmp)    train.py's main() in forked ranks, in a tenth of a second
"""

import gc
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import train
from collectives import Group
from data.batches import Data
from model import from_seed
from sizes import config_of
from test_all import HANG, TOLERANCE, VOCAB, flags_of, ranks, run, whole_slices  # noqa: F401

HERE = Path(__file__).resolve().parent.parent  # the repository
started = []  # processes that this test has started


# ---- training in the pool's processes ----


ALONE = Group("alone", torch.device("cpu"), [0], 0)


def in_layout(words, corpus, function, *args):
    """(the Config of these flags, [function(rank, cfg, *args) of each rank of their layout])"""
    cfg = flags_of(words.split(), corpus)
    return cfg, ranks(cfg.dp * cfg.pp * cfg.cp * cfg.tp, function, cfg, *args)


def make_trainer(cfg, mesh=None):
    """(a Trainer of this rank, its Data). Collective."""
    config = config_of(cfg, VOCAB)
    mesh = mesh or train.make_mesh(cfg, cfg.device)
    return train.Trainer(cfg, mesh, config, from_seed(config, cfg.seed)), Data(cfg)


def close(got, want, what="", tolerance=TOLERANCE):
    """AssertionError unless two tensors, or numbers, are the same but for rounding of float64."""
    got = torch.as_tensor(got, dtype=torch.double)
    want = torch.as_tensor(want, dtype=torch.double)
    error = (got - want).norm().item()
    assert error <= tolerance * max(want.norm().item(), 1e-3), f"{what}: off by {error:.1e}"


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def start_thread(background):
    """Let a Background run its functions in a thread, as where a rank has several cores."""
    torch.set_num_threads(2)
    background.start(lambda: None)()
    torch.set_num_threads(1)
    assert background.thread


def peak_bytes(function):
    """The most bytes that a call of a function has allocated at a time."""
    gc.collect()  # memory that is freed meanwhile would count as negative
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        function()
    events = profile.kineto_results.events()
    return max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))


# ---- commands ----


def command(*args, env=None, timeout=2 * HANG, cwd=HERE, **more):
    """python *args, in a process of its own: what subprocess.run returns."""
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True,
                          timeout=timeout, cwd=cwd, env={**os.environ, **(env or {})}, **more)


def refused(*args, **more):
    """The one line with which a command refuses these arguments, with exit code 2."""
    done = command(*args, **more)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, (done.returncode, done.stderr)
    return done.stderr


def one_line(main, argv, capsys, monkeypatch):
    """The one line with which a command's main(), run here, refuses its command line."""
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    with pytest.raises(SystemExit) as stop:
        main()
    line = capsys.readouterr().err
    assert stop.value.code == 2 and line.count("\n") == 1, line
    return line


def edited(name, **given):
    """A function that changes values of a JSON file in a folder."""
    def edit(folder):
        found = json.loads(Path(folder, name).read_text())
        Path(folder, name).write_text(json.dumps(found | given))
    return edit


def start(*args, env=None, **more):
    """Start python *args; the test goes on meanwhile. (conftest.py ends what a failed test leaves.)
    """
    process = subprocess.Popen([sys.executable, *map(str, args)], text=True, **{
        "cwd": HERE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
        "env": {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, **more})
    started.append(process)
    return process


def until(condition, what=""):
    """Wait until a condition holds."""
    deadline = time.time() + HANG
    while not condition():
        assert time.time() < deadline, f"{what}: not within {HANG} s"
        time.sleep(0.01)


def children(pid):
    """The pids of the processes that this one has started."""
    said = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(word) for word in said.stdout.split()]


def gone(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def flags(corpus, out, **more):
    """The command line of a small run: a list of words."""
    every = dict(data=corpus, out=out, n_layer=2, n_head=2, n_embd=8, block_size=8, batch_size=4,
                 dtype="float64", eval_interval=0, device="cpu", warmup_steps=2, steps=4)
    words = []
    for name, value in {**every, **more}.items():
        words += [f"--{name.replace('_', '-')}"] + [str(value)] * (value is not True)
    return words


def _main(rank, size, port, argv, folder, limit):
    """One rank of a Run: torchrun's environment, output into the folder."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
                      LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    sys.argv = ["train.py", *argv]
    train.main()


class Run:
    """train.py's main() in `size` forked ranks, which meet like torchrun's. limit: most bytes of a
    file, 0 for any."""

    def __init__(self, size, argv, folder, limit=0):
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["train"])
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True,
                                                wait_for_workers=False)
        self.ranks = [context.Process(target=_main, args=(rank, size, self.store.port, argv,
                                                          str(self.folder), limit))
                      for rank in range(size)]
        for process in self.ranks:
            process.start()

    def signal(self, rank, number):
        os.kill(self.ranks[rank].pid, number)

    def wait(self, but=()):
        """The exit codes of all ranks but some; those are killed."""
        for rank, process in enumerate(self.ranks):
            if rank in but:
                continue
            process.join(HANG)
            assert not process.is_alive(), f"rank {rank} hangs: {self.read()}"
        for rank in but:
            self.ranks[rank].kill()
        return [process.exitcode for rank, process in enumerate(self.ranks) if rank not in but]

    def read(self, name="stderr"):
        path = self.folder / name
        return path.read_text() if path.exists() else ""


def records(out):
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


def losses(out):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(out) if "loss" in r]
