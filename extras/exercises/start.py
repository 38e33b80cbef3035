"""Starts the processes of an attempt, collects their reports, and ends them with all that they have
started."""

import ctypes
import importlib.util
import os
import signal
import tempfile
import time
import warnings
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from extras.exercises.board import ranks_that_compute
from extras.exercises.catalogue import RANKS
from extras.exercises.judge import Report, Wrong, attempt, verdict
from run.processes import init

LIMIT = 120  # seconds after which a rank that still computes is ended


def load_forms(path, names):
    """{name: function or class} of these names in the learner's file. Raises Wrong if one is
    missing."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in names:
        if not hasattr(module, name):
            raise Wrong(f"{path.name} has no {name}: keep the signatures")
    return {name: getattr(module, name) for name in names}


def run_rank(rank, exercise, path, folder, connection):
    """Run one rank in a process of its own, and send its Report. The process ends by os._exit,
    without leaving torch's process group, because messages may still be pending."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a Report is one line, with no warning next to it
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines of the profiler (exercise 5)
    init(url=f"file://{folder}/rendezvous", rank=rank, size=RANKS)
    forms = partial(load_forms, path, exercise.forms)
    try:
        attempt(rank, exercise.judge, forms, f"{folder}/board", connection.send)
    finally:  # no traceback: where this rank cannot send, report_of says so
        os._exit(0)


def report_of(rank, receive, deadline):
    """A rank's Report, received from it; None if none comes before the deadline."""
    if not receive.poll(max(0, deadline - time.monotonic())):
        return None
    try:
        return receive.recv()
    except EOFError:
        return Report("an error", f"rank {rank} died: its process ended without a word")


def reports_until(deadline, receiving, board):
    """The Reports that come before the deadline, a time.monotonic(). If ranks send none, a Report
    names one of them. board: path of the attempt's board."""
    reports = [report_of(rank, receive, deadline) for rank, receive in enumerate(receiving)]
    late = [rank for rank, report in enumerate(reports) if report is None]
    reports = [report for report in reports if report is not None]
    if late:
        # A rank that waits for one that computes is late, too: name one that computes. (If none
        # does, a process has died, whose own Report is worse)
        computing = [rank for rank in ranks_that_compute(board) if rank in late] or late
        reports.append(Report("a hang", f"rank {computing[0]} still computes after {LIMIT} s: a "
                                        "loop that does not end?"))
    return reports


def adopt_orphans():
    """From now on this process becomes the parent of each descendant whose parent ends. On Linux;
    elsewhere nothing happens, and children() finds none."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # 36: PR_SET_CHILD_SUBREAPER


def children():
    """The ids of this process's children."""
    lists = Path("/proc/self/task").glob("*/children")  # a list for each thread
    return {int(number) for path in lists for number in path.read_text().split()}


def end_children(others):
    """Kill the children of this process but `others`, and then their children, whom this process
    has adopted meanwhile: also those in a session of their own."""
    while own := children() - others:
        for number in own:
            os.kill(number, signal.SIGKILL)  # not reaped yet: still there, or a zombie
        for number in own:
            os.waitpid(number, 0)


def run_on_ranks(exercise, path):
    """Test the learner's file, at `path`, on RANKS processes. Returns the Report to print. This
    process has imported torch, so its forks need not. It has not computed with torch: a fork of a
    process whose torch threads run can hang."""
    context = get_context("fork")
    others = children()
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        receiving, processes = [], []
        try:
            for rank in range(RANKS):
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=run_rank, args=(rank, exercise, Path(path),
                                                                 folder, send))
                process.start()
                send.close()  # so recv() raises EOFError when the process, which holds `send`, dies
                receiving.append(receive)
                processes.append(process)
            reports = reports_until(time.monotonic() + LIMIT, receiving, f"{folder}/board")
        finally:
            for process in processes:
                process.kill()
                process.join()
            end_children(others)
    return verdict(reports)
