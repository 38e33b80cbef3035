"""Corpora for tests; runs of the commands in this process, in forked ranks, under a launcher."""

import inspect
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from run import tensorfile
from tests.harness import FULL, HERE, VOCAB
from tests.pool import forkserver

ENVIRONMENT = dict(os.environ)  # of all commands: that of this process changes while they start
# Starting a process looks at all others first: it would take the exit code that a thread waits for
multiprocessing.process._cleanup = lambda: None

# ---- a corpus ----


def random_corpus(folder, **tokens):
    rng = np.random.default_rng(0)
    for split, n in tokens.items():
        rng.integers(0, VOCAB, n).astype("<u2").tofile(folder / f"{split}.bin")
    meta = {"vocab_size": VOCAB, "tokenizer": "bytes", "bytes_per_token": 1.0}
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return random_corpus(tmp_path_factory.mktemp("corpus"), train=5000, val=700)


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory):
    return random_corpus(tmp_path_factory.mktemp("corpus"), train=9000, val=9000)


# ---- the command line ----


def command(*args, env=None, timeout=120):
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True,
                          timeout=timeout, cwd=HERE, env={**ENVIRONMENT, **(env or {})})


def one_line(main, argv, capsys, monkeypatch):
    """What a command says, run in this process, that ends with one line and exit code 2."""
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    return error


def _main(rank, size, port, argv, folder, limit):
    """One rank of a run, as torchrun would start it, forked from a process that has torch."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port,
                        "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
                        "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        os.environ[name] = str(value)
    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    sys.argv = ["train.py", *map(str, argv[rank] if isinstance(argv[0], list) else argv)]
    train.main()


class Run:
    """train.py's main in `size` forked ranks, under a wall limit; argv for all, or one for each."""

    def __init__(self, size, argv, folder, limit=0, fn=_main):
        context = forkserver()
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True,
                                                wait_for_workers=False)
        self.ranks = [context.Process(target=fn, args=(r, size, self.store.port, argv,
                                                       str(self.folder), limit))
                      for r in range(size)]
        for rank in self.ranks:
            rank.start()

    def until(self, condition, seconds=60):
        deadline = time.time() + seconds
        while not condition():
            assert time.time() < deadline and any(r.is_alive() for r in self.ranks), self.read()
            time.sleep(0.002)

    def signal(self, rank, number):
        os.kill(self.ranks[rank].pid, number)

    def wait(self, seconds=60, but=()):
        """Exit codes of all ranks but some; those are killed."""
        deadline = time.time() + seconds
        for i, rank in enumerate(self.ranks):
            rank.join(0 if i in but else max(0, deadline - time.time()))
        late = [i for i, rank in enumerate(self.ranks) if rank.is_alive() and i not in but]
        for rank in self.ranks:
            rank.kill()
            rank.join()
        assert not late, (late, self.read())
        return [rank.exitcode for i, rank in enumerate(self.ranks) if i not in but]

    def read(self, name="stderr"):
        path = self.folder / name
        return path.read_text() if path.exists() else ""


def flags(corpus, out, **more):
    every = dict(data=corpus, out=out, n_layer=2, n_head=2, n_embd=8, block_size=8, batch_size=4,
                 dtype="float64", eval_interval=0, device="cpu", warmup_steps=2, log_interval=1,
                 steps=4, timeout=30)
    return [x for k, v in {**every, **more}.items() for x in (f"--{k.replace('_', '-')}", v)]


def losses(log):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in
            map(json.loads, Path(log).read_text().splitlines())]


STORM = [(8 if FULL else 5, {"zero": 2, "dp": 2}), (4, {"tp": 2, "sp": True}),
         (4, {"cp": 2, "zero": 3}), (4, {"dp": 2, "ep": 2, "experts": 4, "zero": 3})]


def launched(argv, agent=False):
    """A process that starts two ranks of train.py, itself or as torchrun's agent, and their pids,
    in no order."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] * agent
    run = subprocess.Popen([sys.executable, *torchrun, "train.py", *map(str, argv)], cwd=HERE,
                           text=True, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"},
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ranks():
        said = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True)
        return list(map(int, said.stdout.split()))

    while len(ranks()) < 2 and run.poll() is None:
        time.sleep(0.05)
    return run, ranks()


def gone(pids, seconds):
    deadline = time.time() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.time() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4 of a small run on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    run = Run(2, flags(corpus, folder / "out", tp=2, save_interval=2), folder)
    assert run.wait() == [0, 0], run.read()
    return folder / "out"


def _result(run, test, **given):
    return test(**given) if run.cancel() else run.result()


@pytest.fixture(scope="session", autouse=True)
def _start_what_waits(request, tmp_path_factory):
    """Tests marked `waits` run one after the other in a thread, beside all others, and are looked
    at last; those that it has not begun by then run as usual. They are given their parameters,
    tmp_path and fixtures of the session. They use neither the pool nor what belongs to this process
    (capsys, monkeypatch), and measure no time."""
    with ThreadPoolExecutor(1) as threads:
        for item in request.session.items:
            if item.get_closest_marker("waits"):
                given = dict(item.callspec.params) if hasattr(item, "callspec") else {}
                for name in inspect.signature(item.obj).parameters.keys() - given.keys():
                    given[name] = (tmp_path_factory.mktemp("waits") if name == "tmp_path" else
                                   request.getfixturevalue(name))
                run = threads.submit(item.obj, **given)
                item.obj = partial(_result, run, item.obj)
        yield
        threads.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():  # none, but where a test has failed
            process.kill()


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("step*/*") if path.is_file()}


def rewrite(path, change):
    """A safetensors file again, with change({name: (shape, bytes)}) in it."""
    entries, raw = tensorfile.read_header(path), path.read_bytes()
    tensors = {n: (e.shape, raw[e.begin : e.end]) for n, e in entries.items()}
    change(tensors)
    head, _ = tensorfile.make_header({n: torch.Size(s) for n, (s, _) in tensors.items()}, "F64")
    path.write_bytes(head + b"".join(data for _, data in tensors.values()))
