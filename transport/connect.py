"""Connects the ranks of a group: makes torch's communicators, and the carrier of the messages, an
object with exchange() and start_read() (gloo.py has the simplest).

On GPUs a group has two communicators of NCCL, one for messages to higher ranks and one for messages
to lower ranks (nccl.py). On CPUs it has one of gloo, over which the ranks of a machine find one
another, to go on through shared memory (shared_memory.py): each listens at a socket, all tell one
another its name, the higher rank of a pair connects, the lower one accepts (links_of)."""

import json
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from transport.gloo import Gloo
from transport.nccl import Nccl
from transport.shared_memory import Link, SharedMemory, errors_of_sockets

# A socket of these keeps packets apart: one recv() returns one packet, and an empty one if the peer
# has closed its end
PACKETS = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
CREDENTIALS = struct.Struct("3i")  # process, user, group: what SO_PEERCRED returns


# ---- torch's communicators ----


def connection_options(device, timeout):
    """How torch is to connect ranks on this device: keywords that init_process_group and new_group
    share. timeout: seconds. On GPUs NCCL carries the messages."""
    if device.type != "cuda":
        return {"timeout": timedelta(seconds=timeout)}
    # Twice our timeout, so that our own check (start_read in nccl.py) reports first: at this limit
    # NCCL's watchdog kills the process
    limit = timedelta(seconds=2 * timeout)
    # Sends and receives run on a stream of NCCL's own. At normal priority a message would wait
    # behind the matrix products that the GPU already has to do, whatever the priority of the stream
    # that posts the message
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = limit  # torch warns if the two differ
    return {"timeout": limit, "pg_options": options}


# ---- who can share memory with this rank ----


def machine():
    """What two ranks have in common if they can share memory: this boot of this machine, the
    namespaces of sockets and process numbers, the user. None where there is no such memory: a
    container may forbid it, and macOS has none."""
    with suppress(OSError, AttributeError):
        os.close(os.memfd_create("nanoparallel"))
        return [Path("/proc/sys/kernel/random/boot_id").read_text(),
                os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid"), os.getuid()]
    return None


def process_at(end):
    """The number of the process at the other end of a socket, or None if it is another user's."""
    process, user, _ = CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return process if user == os.getuid() else None


def tell_all(communicator, value):
    """Collective: the list of all ranks' values. A value: anything that json writes in at most 512
    bytes."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode().ljust(512)), dtype=torch.uint8)
    values = [torch.empty_like(mine) for _ in range(communicator.size())]
    communicator.allgather([values], [mine]).wait()
    return [json.loads(bytes(each.tolist())) for each in values]


def accept_peers(listener, processes, timeout):
    """Accept two connections from each of these {peer: number of its process}. Returns {peer: [its
    sockets, in order of connection]}. The kernel says whose process has connected; one that is no
    peer's is closed."""
    accepted = {peer: [] for peer in processes}
    deadline = time.monotonic() + timeout
    while any(len(sockets) < 2 for sockets in accepted.values()):
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        end, _ = listener.accept()
        process = process_at(end)
        senders = [peer for peer in processes
                   if processes[peer] == process and len(accepted[peer]) < 2]
        if senders:
            accepted[senders[0]].append(end)
        else:
            end.close()
    return accepted


def links_of(communicator, rank, timeout):
    """Collective: {peer: Link} to the ranks of a group that can share memory with this one. A pair
    of ranks has two sockets, and the higher rank makes both connections:

        rank 0  listens  <---  connects, twice  rank 1       socket 1 carries messages 0 -> 1
                                                             socket 2 carries messages 1 -> 0

    No rank waits in a circle: each listens before it tells the name of its listening socket, a
    random one, and connecting needs no accept."""
    own_machine = machine()
    name = secrets.token_hex(8)
    listener = socket.socket(*PACKETS) if own_machine else None
    if listener:
        listener.bind(f"\0nanoparallel-{name}")
        listener.listen(4096)
    told = tell_all(communicator, [own_machine, os.getpid(), name])  # over gloo
    processes = {peer: process for peer, (its_machine, process, _) in enumerate(told)
                 if own_machine and its_machine == own_machine and peer != rank}
    sockets = {}  # peer -> [socket 1, socket 2]
    with errors_of_sockets(timeout):
        for peer in processes:
            if peer < rank:
                _, _, its_name = told[peer]
                sockets[peer] = [socket.socket(*PACKETS), socket.socket(*PACKETS)]
                for end in sockets[peer]:
                    end.connect(f"\0nanoparallel-{its_name}")
        higher = {peer: process for peer, process in processes.items() if peer > rank}
        sockets |= accept_peers(listener, higher, timeout)
    if listener:
        listener.close()
    # The longest that a receive blocks, as C's timeval: seconds, microseconds
    limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
    links = {}
    for peer, (first, second) in sockets.items():
        for end in (first, second):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        outgoing, incoming = (first, second) if rank < peer else (second, first)
        # links.values(): a view, to which this loop adds the later links
        links[peer] = Link(outgoing, incoming, timeout, links.values())
    return links


# ---- a group ----


def carrier_of(communicators, rank, device, timeout):
    """The carrier of this rank's messages to the ranks of these communicators (the same ranks in
    each). Every one of these ranks calls this."""
    if device.type == "cuda":
        return Nccl(*communicators, rank, timeout)
    communicator, = communicators
    return SharedMemory(links_of(communicator, rank, timeout), Gloo(communicator), timeout)


def connect_groups(all_ranks, own_rank, device, timeout):
    """Collective over the world: connect the ranks of each list in all_ranks. own_rank: this
    process's rank in the world. Returns (carrier, ProcessGroup of torch) of the list in which it
    is. The ProcessGroup (on GPUs `up`) also runs torch's own collectives. A rank that is alone has
    none, and on a CPU no carrier.

    Every rank makes the communicators of all lists, because torch demands that."""
    is_cuda = device.type == "cuda"
    # A lone GPU has a carrier, which sends nothing, for its start_read: so the host can post the
    # next step before it reads this step's loss
    carrier = Nccl(None, None, 0, timeout) if is_cuda else None
    communicator = None
    for ranks in all_ranks:
        if len(ranks) == 1:
            continue
        communicators = [dist.new_group(ranks, **connection_options(device, timeout))
                         for _ in range(2 if is_cuda else 1)]
        if own_rank in ranks:
            communicator = communicators[0]
            carrier = carrier_of(communicators, ranks.index(own_rank), device, timeout)
    return carrier, communicator
