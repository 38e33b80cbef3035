"""Corpora for tests; runs of the commands in this process, in forked ranks, under a launcher."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from run import tensorfile
from tests.harness import HERE, VOCAB
from tests.isolation import as_it_was
from tests.pool import HANG, forkserver, pool

started = []  # what start() has started in this test

# ---- a corpus ----


def random_corpus(folder, period=0, **tokens):
    """period: the tokens repeat after so many, so that a model can learn them; 0: never."""
    rng = np.random.default_rng(0)
    for split, n in tokens.items():
        ids = np.resize(rng.integers(0, VOCAB, period or n), n)
        ids.astype("<u2").tofile(folder / f"{split}.bin")
    meta = {"vocab_size": VOCAB, "tokenizer": "bytes", "bytes_per_token": 1.0}
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


# ---- a copy of the repository (the fixture `fork`) ----

needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git applies the patches")


def apply(patch, folder, *more):
    """Apply a patch (a text) in a folder that is not under git; return what git says."""
    done = subprocess.run(
        ["git", "apply", "--verbose", *more], input=patch, text=True, cwd=folder,
        capture_output=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)})
    assert done.returncode == 0, done.stderr
    return done.stderr


# ---- the command line ----


def command(*args, env=None, timeout=HANG, cwd=HERE):
    """python *args, in a process of its own."""
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True,
                          timeout=timeout, cwd=cwd, env={**os.environ, **(env or {})})


def start(*args, **more):
    """Start python *args; the test goes on meanwhile, and reads what it prints."""
    run = subprocess.Popen([sys.executable, *map(str, args)], text=True, **{
        "cwd": HERE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more})
    started.append(run)
    return run


def end_all():
    """End what a test has started and, where it has failed, left running. (Ranks end with the
    process that has started them.) The pool's processes stay."""
    for run in started:
        run.kill()
        run.wait()
    started.clear()
    for process in multiprocessing.active_children():
        if process not in pool.processes:
            process.kill()


def one_line(main, argv, capsys, monkeypatch):
    """Run a command's main() in this process. It must end with one line and exit code 2; return
    the line."""
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    with as_it_was(), pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    return error


def _main(rank, size, port, argv, folder, limit, program=train):
    """One rank of a run of train.py, or of another command, in a forked process: torchrun's
    environment, output into the folder."""
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
    words = argv[rank] if isinstance(argv[0], list) else argv
    sys.argv = [Path(program.__file__).name, *map(str, words)]
    program.main()


class Run:
    """train.py's main in `size` forked ranks: argv for all, or a list with one for each. limit:
    bytes that a file may have, 0 for any. fn runs in each rank, in the place of _main."""

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

    def until(self, condition, seconds=HANG):
        deadline = time.time() + seconds
        while not condition():
            assert time.time() < deadline and any(r.is_alive() for r in self.ranks), self.read()
            time.sleep(0.002)

    def signal(self, rank, number):
        os.kill(self.ranks[rank].pid, number)

    def wait(self, seconds=HANG, but=()):
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
                 dtype="float64", eval_interval=0, device="cpu", warmup_steps=2,
                 steps=4, timeout=HANG // 2)
    words = []
    for name, value in {**every, **more}.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(value)
    return words


def losses(log):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in
            map(json.loads, Path(log).read_text().splitlines())]


def launched(argv):
    """Start train.py on two ranks, by its own launcher. Returns the launcher, and the ranks' pids
    in no order."""
    run = start("train.py", *argv, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def ranks():
        said = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True)
        return list(map(int, said.stdout.split()))

    while len(ranks()) < 2 and run.poll() is None:
        time.sleep(0.05)
    return run, ranks()


def gone(pids, seconds=HANG):
    """Wait until these processes have ended; False if one has not."""
    deadline = time.time() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.time() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("step*/*") if path.is_file()}


def rewrite(path, change, code="F64"):
    """A safetensors file again, with change({name: (shape, bytes)}) in it. code: of its dtype."""
    entries, raw = tensorfile.read_header(path), path.read_bytes()
    tensors = {n: (e.shape, raw[e.begin : e.end]) for n, e in entries.items()}
    change(tensors)
    head, _ = tensorfile.make_header({n: torch.Size(s) for n, (s, _) in tensors.items()}, code)
    path.write_bytes(head + b"".join(data for _, data in tensors.values()))
