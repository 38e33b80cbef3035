"""How ranks are started, meet, and end. torchrun starts them and says by environment variables who
is who; `launch` does so on one machine. They meet at a store, a small server of keys and values,
through which torch sets up the communicators."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from group import naming
from mesh import Mesh
from signals import PARENT, STOPS, end_with_parent, listens

PEER = re.compile(r"(?:from|to) rank (\d+)")  # in the text of a CommunicationError


def init(device="cpu", timeout=600, **rendezvous):
    """Join the process group that torchrun's environment (or `rendezvous`) describes."""
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    wait = timedelta(seconds=timeout)
    with naming(f"rank {os.environ.get('RANK', '')}: not all ranks came within {timeout} s"):
        if not rendezvous:  # torchrun's store outlives a restart: no addresses of dead ranks
            store, rank, size = next(dist.rendezvous("env://", timeout=wait))
            attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
            rendezvous = dict(store=dist.PrefixStore(attempt, store), rank=rank, world_size=size)
        # NCCL's watchdog aborts the process: Group.read is to speak before it
        patience = wait * (2 if backend == "nccl" else 1)
        dist.init_process_group(backend, timeout=patience, **rendezvous)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"process {dist.get_rank()}", f"{os.getpid()} {socket.gethostname()}")


def choose_device(name):
    """"cpu", or this process's own GPU for "cuda"."""
    device = torch.device(name)
    if name == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
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
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name} of rank {dist.get_rank()}", value)
    values = [store.get(f"{name} of rank {r}") for r in range(dist.get_world_size())]
    return [r for r, other in enumerate(values) if other != values[0]]


def kill_if_stopped(pid, host):
    """A process of this machine that was stopped (SIGSTOP) would not hear of anything else, and
    torchrun would wait for it."""
    with suppress(OSError):
        state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
        if host == socket.gethostname() and state == "T":
            os.kill(int(pid), signal.SIGKILL)


def give_up(error, timeout):
    """A CommunicationError ends this rank at once: other threads may still wait. Of all ranks that
    have one, that speaks whose own peer is silent, as the others only wait for such a rank."""
    end_with_parent()
    rank, line = dist.get_rank() if dist.is_initialized() else 0, str(error)
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=2))
        store.set(f"failed {rank}", line)
        time.sleep(min(1.0, timeout / 4))  # for the others to say so, too
        failed = [r for r in range(dist.get_world_size()) if store.check([f"failed {r}"])]
        peers = {r: {int(peer) for peer in PEER.findall(store.get(f"failed {r}").decode())}
                 for r in failed}
        speaker = min(failed, key=lambda r: (peers[r] <= {*failed}, r))
        if speaker != rank or store.add("said", 1) > 1:
            line = ""
        for r in {*range(dist.get_world_size())} - {*failed}:
            kill_if_stopped(*store.get(f"process {r}").decode().split())
    except (RuntimeError, ValueError):  # the store went down with its process: every rank speaks
        pass
    with suppress(OSError):
        os.write(2, f"train.py: {line}\n".encode() if line else b"")
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
    ranks = [subprocess.Popen([sys.executable, *sys.argv], start_new_session=True,
                              env={**env, "RANK": str(r), "LOCAL_RANK": str(r)})
             for r in range(size)]  # sessions of their own: Ctrl-C reaches them once, from here
    for number in STOPS:
        if listens(number):
            signal.signal(number, lambda number, _: [rank.send_signal(number) for rank in ranks])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    deadline = math.inf
    while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.05)
    for r, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"train.py: rank {r} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    for rank in ranks:
        rank.kill()
    codes = [rank.wait() for rank in ranks]
    return int(max(*codes, any(codes)))  # killed by a signal, a code is negative


def ranks_asked(default):
    """The number on the command line of a demonstration."""
    given = sys.argv[1:] or [str(default)]
    if len(given) > 1 or not given[0].isdecimal() or not 0 < int(given[0]) <= 64:
        print(f"{sys.argv[0]}: say how many ranks, 1 to 64", file=sys.stderr)
        sys.exit(2)
    return int(given[0])


def _demonstrate(rank, fn, sizes, rendezvous):
    torch.set_num_threads(1)
    init(rank=rank, world_size=math.prod(sizes.values()), init_method=rendezvous)
    fn(Mesh(**sizes))
    shutdown()


def demonstrate(fn, **sizes):
    """fn(mesh) in as many processes as a mesh of these sizes has: what the demonstrations run."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_demonstrate, (fn, sizes, f"file://{folder}/rendezvous"),
                                    math.prod(sizes.values()))


def report_difference(name, rank, pairs):
    """Print how far gradients are from one process's, given pairs of (this rank's, that one's)."""
    off = max((mine - alone).abs().max() / alone.abs().max() for mine, alone in pairs)
    print(f"{name:12} rank {rank}: gradients differ from one process's by {off:.0e} of their size")
