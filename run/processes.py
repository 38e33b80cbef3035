"""How ranks are started, meet, and end. torchrun starts them and says by environment variables who
is who; `launch` does so on one machine. They meet at a store, a small server of keys and values,
through which torch sets up the communicators."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from group import CommunicationError, naming
from run import signals
from run.signals import PARENT, STOPS, listens

PEER = re.compile(r"(?:from|to|for) rank (\d+)")  # in the text of a CommunicationError
# Of this process, by init:
place = 0, 1  # its rank, of how many
store = None  # where ranks leave what they tell one another
last_words = None  # the same by a connection of its own, as the library may hold the other


def init(device="cpu", timeout=600, url="env://", rank=-1, size=-1):
    """Join the process group that torchrun's environment, or a url, describes."""
    global place, store, last_words
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    wait = timedelta(seconds=timeout)
    with naming(f"rank {os.environ.get('RANK', rank)}: looking for the store of all ranks"):
        server, *place = next(dist.rendezvous(url, rank, size, timeout=wait))
        rank, size = place
        name = meet(server, rank, size, timeout)
        store, last_words = (dist.PrefixStore(name, s) for s in (server, server.clone()))
    with in_time(timeout, f"rank {rank}: waiting for all ranks to join"):
        # NCCL's watchdog aborts the process: Group.read is to speak before it
        patience = wait * (2 if backend == "nccl" else 1)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)


def meet(store, rank, size, timeout):
    """A name for this attempt, the same on all ranks, once they are all there. torchrun's store has
    what earlier attempts left, addresses of dead ranks: so rank 0 makes a new name, the others
    answer it with names of their own, and rank 0 has all of these in its last word."""
    global last_words
    mine, attempt = os.urandom(8).hex(), ""
    deadline, pause = time.monotonic() + timeout, 0.001

    def read(key):
        return store.get(key).decode().split() if store.check([key]) else [""]

    if rank == 0:
        store.set("attempt", mine)
    while time.monotonic() < deadline:
        attempt, = read("attempt")
        if attempt and read(f"here {rank}") != [attempt, mine]:
            store.set(f"here {rank}", f"{attempt} {mine}")
        if rank == 0:
            here = [read(f"here {r}") for r in range(size)]
            if all(answer[0] == attempt == mine for answer in here):
                store.set("all here", " ".join(name for _, name in here))
        if mine in (names := read("all here")):
            return names[0]
        time.sleep(pause)
        pause = min(max(0.05, size / 500), 2 * pause)  # there is one store for all
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    last_words = dist.PrefixStore(f"no meeting, {attempt}, restart {restarts}", store)
    missing = [r for r in range(size) if read(f"here {r}")[0] != attempt]
    raise CommunicationError(f"rank {rank}: waiting for rank {(missing or [0])[0]} to start: not "
                             f"there within {timeout:g} s")


@contextmanager
def in_time(seconds, what):
    """Ends this process with one line if the library, which tries more than once, is not done
    inside after so long."""
    def late():
        give_up(CommunicationError(f"{what}: not done within {seconds:g} s"), seconds)

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        with naming(what):
            yield
    finally:
        timer.cancel()


def choose_device(name):
    """"cpu", or this process's own GPU for "cuda"."""
    device = torch.device(name)
    if name == "cuda":
        device = torch.device("cuda", signals.local_rank())
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # float32 products as TF32, as nanoGPT has them
    return device


def shutdown(together=True):
    """Leave the process group; `together`: once all have come, as one may still be joining a group
    or reading what was sent to it."""
    if not dist.is_initialized():
        return
    if together:
        with naming(f"rank {dist.get_rank()}: waiting for all ranks to leave"):
            cuda = dist.get_backend() == "nccl"
            dist.barrier(device_ids=[torch.cuda.current_device()] if cuda else None)
    dist.destroy_process_group()


def unlike_rank_0(name, value):
    """The ranks whose `value`, some bytes, is not rank 0's. Asks the store: no mesh exists yet."""
    tell(name, value)
    if place[0] == 0:
        unlike = [str(r) for r in range(1, place[1]) if hear(name, r) != value]
        tell(f"comparison of {name}", " ".join(unlike))
    return [*map(int, hear(f"comparison of {name}", 0).split())]


def tell(name, value):
    """Leave some bytes of this rank for the others."""
    with naming(f"rank {place[0]}: telling its {name}"):
        store.set(f"{name} of rank {place[0]}", value)


def hear(name, rank):
    """Those that `rank` leaves."""
    with naming(f"rank {place[0]}: waiting for rank {rank} to tell its {name}"):
        return store.get(f"{name} of rank {rank}")


def kill_stopped():
    """Ends those ranks of this machine that were stopped (SIGSTOP). They would hear of nothing
    else, and the process that started them would wait for them."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, starter = path.read_bytes().rpartition(b")")[2].split()[:2]
            if state == b"T" and int(starter) == signals.parent > 1:
                os.kill(int(path.parent.name), signal.SIGKILL)


def speaks_for_all(line, timeout):
    """Whether this rank is to say why it gives up. Of all ranks that do, that speaks whose own peer
    is silent, as the others only wait for such a rank."""
    rank, wait = place[0], min(1.0, timeout / 4)
    number = last_words.add("failures", 1)
    last_words.set(f"failure {number}", f"{rank} {line}")
    if number > 64:  # of thousands of ranks the first ones settle it
        return False
    time.sleep(wait)  # for the others to say so, too
    peers = {}  # of each rank that gives up
    for i in range(1, 1 + min(64, last_words.add("failures", 0))):
        if last_words.check([f"failure {i}"]):
            other, text = last_words.get(f"failure {i}").decode().split(" ", 1)
            peers[int(other)] = {int(peer) for peer in PEER.findall(text)}
    if rank != min(peers, key=lambda r: (peers[r] <= peers.keys(), r)):
        time.sleep(wait)  # if the one that is to speak knew less, and left
    return last_words.add("said", 1) == 1


def give_up(error, timeout):
    """An error that the other ranks may not have ends this one at once: its threads may wait."""
    if signals.giving_up:
        threading.Event().wait()  # for another thread that is about to end this process
    signals.giving_up = speaks = True
    text = str(error).encode(errors="replace")

    def ask():
        nonlocal speaks
        with suppress(RuntimeError):  # the store, or its machine, has gone: all speak
            speaks = speaks_for_all(text.decode(), timeout)

    try:
        signals.end_with_parent()
        if last_words:
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(3)
        if speaks:
            os.write(2, b"train.py: %s\n" % text)
        kill_stopped()
    finally:
        os._exit(1)


def launch(size, grace=10):
    """Run this command again as `size` ranks on this machine. Returns 0 if all end well, else the
    highest exit code. Signals are passed on; once a rank has failed, the others have `grace`
    seconds to end, and if this process is killed, they end by themselves (signals.py). It holds the
    store, so that it outlives every rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)), **os.environ,
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size),
           "LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True",
           PARENT: str(os.getpid())}
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until each rank is there to be told
    ranks = []
    for r in range(size):  # in sessions of their own: Ctrl-C reaches them once, from here
        try:
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], start_new_session=True,
                                          env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}))
        except OSError as error:
            for rank in ranks:
                rank.kill()
            signals.end(f"rank {r} of {size} cannot be started ({error.strerror})", 1)
    for number in STOPS:
        if listens(number):
            signal.signal(number, lambda number, _: [rank.send_signal(number) for rank in ranks])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    deadline = math.inf
    while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.05)
    names = {-number: number.name for number in signal.Signals}
    for r, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"train.py: rank {r} was ended by {names.get(code, f'signal {-code}')}",
                  file=sys.stderr)
    for rank in ranks:
        rank.kill()
    codes = [rank.wait() for rank in ranks]
    return int(max(*codes, any(codes)))  # killed by a signal, a code is negative
