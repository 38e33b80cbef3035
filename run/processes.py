"""Lets the ranks meet at a store, and ends them together when one of them fails.

The store is a server of keys and values. Through it torch sets up the communicators, and the ranks
compare their setup before the first step (checkpoint.agree) and their errors at the end.
"""

import os
import re
import signal
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from group import CommunicationError, naming
from run import signals

PEER = re.compile(r"(?:from|to|for) rank (\d+)")  # in the text of a CommunicationError
failing = threading.Lock()  # held by the thread that gives up
# Replaced in init:
place = 0, 1  # this process's rank, and the number of ranks
store = dist.HashStore()  # shared by all ranks
last_words = store  # a second connection: a thread that waits for a key blocks the first


def tell(name, value):
    """Leave a string of this rank for the others."""
    with naming(f"rank {place[0]}: telling its {name}"):
        store.set(f"{name} of rank {place[0]}", value)


def hear(name, rank):
    """Wait for the string that `rank` leaves."""
    with naming(f"rank {place[0]}: waiting for rank {rank} to tell its {name}"):
        return store.get(f"{name} of rank {rank}").decode()


def speaks_for_all(line, timeout):
    """Of all ranks that give up, does this one print its error? The first to ask does, and a rank
    asks later if its own peer has given up, too: the peer's error is nearer to the cause."""
    wait = min(1.0, timeout / 4)
    last_words.set(f"rank {place[0]} has failed", "")
    time.sleep(wait)  # the peer may be about to give up
    peers = [f"rank {peer} has failed" for peer in PEER.findall(line)]
    if peers and last_words.check(peers):
        time.sleep(wait)
    return last_words.add("printed", 1) == 1


def kill_stopped():
    """Kill the ranks of this machine that were stopped (SIGSTOP): torchrun would wait for them."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # the process has gone
            state, parent = path.read_bytes().rpartition(b")")[2].split()[:2]
            if state == b"T" and int(parent) == signals.parent > 1:
                os.kill(int(path.parent.name), signal.SIGKILL)


def give_up(error, timeout):
    """Print the error, if no other rank does, and end this process at once: its threads may be
    waiting for messages that never come."""
    if not failing.acquire(blocking=False):
        threading.Event().wait()  # until the other thread ends this process
    answers = []

    def ask():
        try:
            answers.append(speaks_for_all(str(error), timeout))
        except RuntimeError:  # the store has gone: every rank prints, unless watch_parent does
            time.sleep(0.5)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(3)  # seconds, in case the store does not answer
    if answers != [False]:
        with suppress(OSError):  # the terminal may be closed
            os.write(2, f"train.py: {error}\n".encode(errors="replace"))
    kill_stopped()
    os._exit(1)


def out_of_memory(cfg):
    """The line of a rank whose GPU is full: its peak, and flags that take less."""
    m, peak = 2 * cfg.microbatches, torch.cuda.max_memory_allocated() / 1e9
    tries = ["--recompute"] * (not cfg.recompute)
    tries += [f"--microbatches {m}"] * (cfg.batch_size // cfg.dp % m == 0)
    tries += [f"--zero {cfg.zero + 1}"] * (cfg.dp > 1 and cfg.zero < 3)
    return (f"rank {place[0]}: out of memory on the GPU; peak so far {peak:.1f} GB; "
            f"try {' or '.join(tries) or 'a smaller --batch-size'}")


@contextmanager
def in_time(seconds, what):
    """End this process with one line if the block, in which torch retries, takes longer."""
    error = CommunicationError(f"{what}: not done within {seconds:g} s")
    timer = threading.Timer(seconds, give_up, (error, seconds))
    timer.daemon = True
    timer.start()
    try:
        with naming(what):
            yield
    finally:
        timer.cancel()


def restarts():
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def name_attempt(server, size):
    """A prefix for the keys of this attempt, the same on all ranks. When torchrun restarts the
    ranks, its store still has the addresses of the dead ranks."""
    joined = server.add(f"joined after {restarts()} restarts", 1)
    return f"attempt {restarts()}.{(joined - 1) // size}"


def wait_for_start(server, timeout):
    """Wait until all ranks have started; the error names a rank that has not. If another node has
    restarted its ranks since, fail at once: torchrun restarts this rank, too, and they meet."""
    (rank, size), deadline = place, time.monotonic() + timeout
    store.set(f"rank {rank} to start", "")
    awaited = ["rank 0 to see all ranks"]
    if rank == 0:
        awaited = [f"rank {other} to start" for other in range(size)]
    while not store.check(awaited):
        if server.check([f"joined after {restarts() + 1} restarts"]):
            raise CommunicationError(f"rank {rank}: another node has restarted its ranks")
        if time.monotonic() > deadline:
            missing = [key for key in awaited if not store.check([key])]
            raise CommunicationError(f"rank {rank}: waiting for {missing[0]}: not within "
                                     f"{timeout:g} s")
        time.sleep(max(0.02, size / 500))  # all ranks ask one store
    if rank == 0:
        store.set("rank 0 to see all ranks", "")


def init(device="cpu", timeout=600, url="", rank=-1, size=-1):
    """Join the process group that a url, run/launch.py or torchrun's environment describes."""
    global place, store, last_words
    cuda, wait = torch.device(device).type == "cuda", timedelta(seconds=timeout)
    with naming(f"rank {os.environ.get('RANK', rank)}: looking for the store of all ranks"):
        url = url or os.environ.get(signals.STORE, "env://")
        server, *place = next(dist.rendezvous(url, rank, size, timeout=wait))
        rank, size = place
        attempt = name_attempt(server, size)
        store, last_words = (dist.PrefixStore(attempt, s) for s in (server, server.clone()))
        wait_for_start(server, timeout)
    with in_time(timeout, f"rank {rank}: waiting for all ranks to join"):
        # NCCL's watchdog would abort the process: let start_read raise its error first
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size,
                                timeout=wait * (2 if cuda else 1))


def choose_device(name):
    """"cpu", or this process's own GPU for "cuda"."""
    if name == "cpu":
        return torch.device(name)
    device = torch.device("cuda", signals.local_rank())
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # float32 products as TF32, as in nanoGPT
    return device


def shutdown(together=True):
    """Leave the process group; `together`: after a barrier, as another rank may still be joining a
    group or reading its messages."""
    if dist.is_initialized():
        if together:
            with naming(f"rank {dist.get_rank()}: waiting for all ranks to leave"):
                cuda = dist.get_backend() == "nccl"
                dist.barrier(device_ids=[torch.cuda.current_device()] if cuda else None)
        dist.destroy_process_group()
