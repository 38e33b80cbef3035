"""Starts the processes of an attempt, and collects their reports."""

import importlib.util
import os
import tempfile
import time
import warnings
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch._dynamo  # autograd's functions need it: imported once, before processes are forked

from exercises.catalogue import RANKS
from exercises.judge import Report, Wrong, attempt, verdict
from run.processes import init

LIMIT = 120  # seconds after which a rank that still computes is ended


def load_forms(path, names):
    """{name: function or class} of the learner's file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in names:
        if not hasattr(module, name):
            raise Wrong(f"{path.name} has no {name}: keep the signatures")
    return {name: getattr(module, name) for name in names}


def run_rank(rank, exercise, path, folder, connection):
    """One rank, in a process of its own. Ends without leaving the process group: messages may be on
    their way."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # what is wrong is told in one line
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which exercise 5 uses
    init(url=f"file://{folder}/rendezvous", rank=rank, size=RANKS)
    forms = partial(load_forms, path, exercise.forms)
    connection.send(attempt(rank, exercise.judge, forms, f"{folder}/board"))
    os._exit(0)


def run_on_ranks(exercise, path):
    """The Report to tell of an attempt. This process has imported torch, and has not used it: so
    its forks start at once."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        receiving, processes = [], []
        for rank in range(RANKS):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(rank, exercise, Path(path), folder,
                                                             send))
            process.start()
            send.close()
            receiving.append(receive)
            processes.append(process)
        deadline = time.monotonic() + LIMIT
        reports = [report_of(rank, receive, deadline) for rank, receive in enumerate(receiving)]
        for process in processes:
            process.kill()
            process.join()
    return verdict(reports)


def report_of(rank, receive, deadline):
    if not receive.poll(max(0, deadline - time.monotonic())):
        return Report("a hang", f"rank {rank} still computes after {LIMIT} s: a loop that does not "
                                "end?")
    try:
        return receive.recv()
    except EOFError:
        return Report("an error", f"rank {rank} died: its process ended without a word")
