"""Lets the ranks meet at a store, and ends them together when one of them fails.

The store holds keys and values that all ranks read and write: a file if run/launch.py started them,
else a server of torchrun's agent. Through the store torch connects the ranks, and the ranks that
fail agree which one of them prints the reason. A rank's life:

    meet        find the store, wait there until all ranks have started
    join        join the process group
    give_up     after a failure: print one line on one rank, end this process at once
    shutdown    after a good end, or an error of all ranks: leave the process group

An attempt: the ranks from their start to the end or failure of the run. torchrun --max-restarts
makes another attempt after a failure, with new processes at the same store.
"""

import os
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from collectives import CommunicationError, all_gather, all_reduce, maximum, naming
from data.batches import DataError
from mesh import connection_options
from run import signals
from run.config import fail
from run.tensorfile import CheckpointError

# The number of a rank in the text of a CommunicationError, such as "receive from rank 3"
PEER = re.compile(r"(?:from|to|for) rank (\d+)")
failing = threading.Lock()  # held by the thread that gives up
# Replaced in init:
place = 0, 1  # this process's rank, and the number of ranks
# The ranks' store; each key gets the prefix of this attempt. (`server` below is the same store
# without the prefix: the keys of all attempts.)
store = dist.HashStore()
# A second connection to the store. A thread of torch that waits for a key holds the first one: a
# rank that gives up could not speak through it.
last_words = store


# ---- a text from each rank ----


def all_gather_text(text, world):
    """Collective: the list of every rank's text, on every rank. White space at the end is lost."""
    # world.read(tensor) (collectives.py): wait, and return the tensor's numbers as a list
    # surrogateescape: a path may hold bytes that are no characters
    data = bytearray(text.encode(errors="surrogateescape") + b" ")  # not empty
    length = torch.tensor([len(data)], device=world.device)
    longest, = world.read(all_reduce(length, world, maximum))
    texts = torch.empty(world.size, longest, dtype=torch.uint8, device=world.device)
    # ljust: spaces at the end, so that all texts are equally long
    texts[world.rank] = torch.frombuffer(data.ljust(longest), dtype=torch.uint8)
    return [bytes(row).decode(errors="surrogateescape").rstrip()
            for row in world.read(all_gather(texts, world))]


# ---- a failure ends all ranks, with one line ----


def speaks_for_all(line, timeout):
    """Does this rank print its error? One of the ranks that give up does.

    Say rank 2 has died. Rank 1 fails, because it waits for rank 2; then rank 0 fails, because it
    waits for rank 1. Rank 1 should print: its error names the rank that died.

    1. Say at the store that this rank has failed.
    2. Wait a moment, in which the peers that this rank waited for may fail, too.
    3. If one of them has failed, wait a moment more: its error is nearer to the cause.
    4. The first rank to add to a counter prints."""
    moment = min(1.0, timeout / 4)
    last_words.set(f"rank {place[0]} has failed", "")
    time.sleep(moment)
    peers = [f"rank {peer} has failed" for peer in PEER.findall(line)]
    if any(last_words.check([peer]) for peer in peers):
        time.sleep(moment)
    return last_words.add("printed", 1) == 1


def kill_stopped():
    """Kill the ranks of this machine that were stopped (SIGSTOP): torchrun would wait for them."""
    # 0: no parent to end with (run/signals.py), so the siblings are unknown; 1: the parent had gone
    # before this rank started, or torchrun is process 1 of a container
    if signals.parent <= 1:
        return
    try:
        stats = [*Path("/proc").glob("[0-9]*/stat")]
    except OSError:  # this process may open no more files
        return
    for path in stats:
        with suppress(OSError, ValueError):  # the process has gone
            # "PID (NAME) STATE PARENT ...": NAME may have spaces and brackets in it
            state, parent = path.read_bytes().rpartition(b")")[2].split()[:2]
            if state == b"T" and int(parent) == signals.parent:
                os.kill(int(path.parent.name), signal.SIGKILL)


def give_up(error, timeout):
    """Print the error, if no other rank does, and end this process at once: its threads may be
    waiting for messages that never come.

        the store answers              speaks_for_all decides, after 2 s at most
        the store has gone             every rank prints
        the store does not answer      every rank prints, after 3 s (the timer)
        the rank's parent has gone     watch_parent (signals.py) ends this process meanwhile
    """
    failing.acquire()  # a second thread waits here until the first ends this process

    def end(speaks):
        kill_stopped()
        signals.end(1, error, speaks)

    threading.Timer(3, end, [True]).start()
    try:
        speaks = speaks_for_all(str(error), timeout)
    except RuntimeError:  # the store has gone, perhaps with this rank's parent
        time.sleep(0.5)  # time for watch_parent to end this process, if so
        speaks = True
    end(speaks)


def out_of_memory(cfg):
    """The line of a rank whose GPU is full: its peak, and flags that take less."""
    peak = torch.cuda.max_memory_allocated() / 1e9
    more_microbatches = 2 * cfg.microbatches
    tries = []
    if not cfg.recompute:
        tries.append("--recompute")
    if cfg.batch_size // cfg.dp % more_microbatches == 0:
        tries.append(f"--microbatches {more_microbatches}")
    if cfg.dp > 1 and cfg.zero < 3:
        tries.append(f"--zero {cfg.zero + 1}")
    return (f"rank {place[0]}: out of memory on the GPU; peak so far {peak:.1f} GB; "
            f"try {' or '.join(tries) or 'a smaller --batch-size'}")


# ---- the ranks meet ----


def name_attempt(server, size):
    """A prefix for the keys of this attempt, the same on all ranks. It is needed because torchrun's
    store outlives the ranks: after a restart it still has the addresses of the dead ranks.

    The count of restarts is not enough: torchrun also restarts all ranks, perhaps with another
    number of them, when a node comes or leaves; its count then stays the same. So add() numbers the
    ranks that join under one count of restarts and one size. With 0 restarts and 8 ranks: numbers 1
    to 8 are attempt 0.8.0, numbers 9 to 16 attempt 0.8.1. (If only some ranks of an attempt joined
    before the restart, the next attempt's ranks get two prefixes, and fail after --timeout.)"""
    # Tell ranks of other nodes that still wait in wait_for_start (below) to fail, so that torchrun
    # restarts them, too
    restarts = signals.launched().restarts
    server.set(f"restarted {restarts} times", "")
    joined = server.add(f"joined after {restarts} restarts, {size} ranks", 1)
    return f"attempt {restarts}.{size}.{(joined - 1) // size}"


def wait_for_start(server, timeout):
    """Wait until all ranks have started: each rank sets a key; rank 0 waits for all keys, then sets
    one for which the others wait.

    After --timeout rank 0's error names a rank that has not started. The others' errors name rank
    0, so that speaks_for_all() lets rank 0 print. If another node restarts its ranks meanwhile,
    fail at once: torchrun then restarts this rank, too, and the new ranks of both nodes meet."""
    rank, size = place
    deadline = time.monotonic() + timeout
    store.set(f"rank {rank} to start", "")
    awaited = ["rank 0 to see all ranks"]
    if rank == 0:
        awaited = [f"rank {other} to start" for other in range(size)]
    while not store.check(awaited):
        if server.check([f"restarted {signals.launched().restarts + 1} times"]):
            raise CommunicationError(f"rank {rank}: another node has restarted its ranks")
        if time.monotonic() > deadline:
            missing = [key for key in awaited if not store.check([key])]
            raise CommunicationError(f"rank {rank}: waiting for {missing[0]}: not within "
                                     f"{timeout:g} s")
        time.sleep(max(0.02, size / 500))  # many ranks ask less often: all ask one store
    if rank == 0:
        store.set("rank 0 to see all ranks", "")


def name_of_machine():
    """A text that differs from machine to machine. (Pods have names of their own.)"""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"


def number_ranks_of_machine():
    """Set LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets, but not a program that gives each
    rank its RANK and WORLD_SIZE alone (Kubernetes' PyTorchJob): count the ranks of this machine.
    Machines a b a b: the local ranks are 0 0 1 1."""
    rank, size = place
    machines = [store.get(f"machine of rank {other}") for other in range(size)]
    os.environ["LOCAL_RANK"] = str(machines[:rank].count(machines[rank]))
    os.environ["LOCAL_WORLD_SIZE"] = str(machines.count(machines[rank]))


def meet(timeout=600, url="", rank=-1, size=-1):
    """Find the store that a url, run/launch.py or torchrun's environment describes, and wait there
    until all ranks have started."""
    global place, store, last_words
    # naming(words) (collectives.py): re-raise a RuntimeError of the block as a CommunicationError
    # that begins with these words
    with naming(f"rank {os.environ.get('RANK', rank)}: looking for the store of all ranks"):
        url = url or os.environ.get(signals.STORE, "env://")
        rendezvous = dist.rendezvous(url, rank, size, timeout=timedelta(seconds=timeout))
        server, rank, size = next(rendezvous)
        place = rank, size
        attempt = name_attempt(server, size)
        store = dist.PrefixStore(attempt, server)
        last_words = dist.PrefixStore(attempt, server.clone())
        store.set(f"machine of rank {rank}", name_of_machine())
        wait_for_start(server, timeout)
        if "RANK" in os.environ and not os.environ.get("LOCAL_RANK"):
            number_ranks_of_machine()


def join(device, timeout):
    """Join the process group of the ranks that have met."""
    rank, size = place
    joining = f"rank {rank}: waiting for all ranks to join"
    # If a rank has died since wait_for_start, torch would try to connect to it again and again:
    # this timer ends the process
    late = threading.Timer(timeout, give_up, [f"{joining}: not within {timeout:g} s", timeout])
    late.start()
    device = torch.device(device)
    options = connection_options(device, timeout)
    backend = "gloo"
    if device.type == "cuda":
        backend = "nccl"
        # device_id: NCCL connects now, while the GPU has memory for it, not at the first message
        options["device_id"] = torch.device("cuda", torch.cuda.current_device())
    try:
        with naming(joining):
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    finally:
        late.cancel()


def init(device="cpu", timeout=600, url="", rank=-1, size=-1):
    """meet(), then join()."""
    meet(timeout, url, rank, size)
    join(device, timeout)


def choose_device(name):
    """The torch.device of this process: the CPU for "cpu", a GPU of its own for "cuda"."""
    if name == "cpu":
        return torch.device(name)
    local, gpus = signals.local_rank(), torch.cuda.device_count()
    if local >= gpus:  # check() (run/config.py) has seen it, unless the ranks had to be counted
        raise CommunicationError(f"rank {place[0]}: --device cuda: {local + 1} processes here but "
                                 f"{gpus} GPUs; use --device cpu")
    device = torch.device("cuda", signals.local_rank())
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # float32 products in TF32, like in nanoGPT
    return device


def shutdown(together=True):
    """Leave the process group. together: wait until all ranks have called (a barrier), because
    another rank may still be joining a group or reading this rank's messages. together=False is for
    an error that all ranks raise (CheckpointError): all of them end, so none waits."""
    if not dist.is_initialized():
        return
    if together:
        with naming(f"rank {dist.get_rank()}: waiting for all ranks to leave"):
            cuda = dist.get_backend() == "nccl"
            dist.barrier(device_ids=[torch.cuda.current_device()] if cuda else None)
    dist.destroy_process_group()


@contextmanager
def joined(cfg, world):
    """The life of a rank, as a context: join the others, give the device to compute on, leave.
    world: number of ranks. An error inside ends all ranks, with one line; exit code 2 if it is an
    error of all of them (CheckpointError), else 1."""
    try:
        if world > 1:
            meet(cfg.timeout)
        device = choose_device(cfg.device)
        if world > 1:
            join(device, cfg.timeout)
        yield device
        shutdown()
    except CheckpointError as error:
        shutdown(together=False)
        fail(error)
    except torch.OutOfMemoryError:
        give_up(out_of_memory(cfg), cfg.timeout)
    except (CommunicationError, DataError, OSError) as error:
        give_up(error, cfg.timeout)
