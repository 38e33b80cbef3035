"""Messages through shared memory: equal over every road; what happens to peers that die, stop or
never come, and to strangers; nothing is left behind."""

import mmap
import os
import resource
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import engine.collectives as c
import engine.shared_memory as shared_memory
from engine.mesh import Mesh
from engine.shared_memory import MESSAGE, Incoming, Outgoing, abstract_name
from group import CommunicationError
from run.processes import init
from tests.harness import IN_ORDER, _train, equals_one_process, mesh_of, pool
from tests.pool import HANG, forkserver
from tests.test_collectives import all_collectives

pytestmark = pytest.mark.skipif(IN_ORDER, reason="NCCL's manner takes no shared memory")

# ---- every road ----


@contextmanager
def machines(rank, of_rank):
    """As if rank r were on machine of_rank(r)."""
    with patch.object(shared_memory, "machine", lambda: bytes([of_rank(rank)] * 16)):
        yield


# The machine of each rank. "one pair": all are on one, but rank 0 cannot connect to rank 1
ROADS = {"gloo": lambda rank: rank, "mixed": lambda rank: rank // 2,
         "one pair by gloo": lambda rank: 0}


@contextmanager
def road(rank, name):
    reach = shared_memory.Neighbours.can_reach

    def can_reach(self, peer):
        return (self.rank, peer) != (0, 1) and reach(self, peer)

    one_pair = name == "one pair by gloo"
    with machines(rank, ROADS[name]), patch.object(
            shared_memory.Neighbours, "can_reach", can_reach if one_pair else reach):
        yield


def _collectives(rank, world, name):
    with road(rank, name):
        mesh = Mesh(dp=world)
        pairs = mesh.neighbours.pairs
        assert pairs == {(b, a) for a, b in pairs}  # else the two would wait for each other
        all_collectives(rank, world, mesh.group("dp"))
        return pairs


@pytest.mark.parametrize("name", ["gloo", "mixed", "one pair by gloo"])
@pytest.mark.parametrize("world", [3, 8])
def test_collectives_equal_their_definition_over_every_road(world, name):
    """test_collectives.py has shared memory alone."""
    everyone = {(a, b) for a in range(world) for b in range(world) if a != b}
    want = {"gloo": set(), "mixed": {(a, b) for a, b in everyone if a // 2 == b // 2},
            "one pair by gloo": everyone - {(0, 1), (1, 0)}}[name]
    assert pool(world, _collectives, world, name) == [want] * world


def _training(rank, cfg, name):
    with road(rank, name):
        return _train(rank, cfg, mesh=mesh_of(cfg))


def _mixed(rank, cfg):
    return _training(rank, cfg, "mixed")


def _pair(rank, cfg):
    return _training(rank, cfg, "one pair by gloo")


def _gloo(rank, cfg):
    return _training(rank, cfg, "gloo")


@pytest.mark.parametrize("train", [_mixed, _pair, _gloo])
@pytest.mark.parametrize("flags", [
    {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "microbatches": 3}, {"cp": 4, "microbatches": 1},
    {"dp": 2, "ep": 2, "experts": 4, "sp": True, "tp": 2, "microbatches": 1}], ids=str)
def test_training_equals_one_process_over_every_road(corpus, train, flags):
    equals_one_process(corpus, train, **flags)


def _odd_messages(rank):
    """Messages of every kind from rank 0 to 1; "" or what rank 1 got that was wrong."""
    group = Mesh(dp=2).world
    kinds = [torch.randn(()), torch.randn(3, 1, 5), torch.randn(5).bfloat16(),
             torch.arange(7), torch.rand(9) > 0.5, torch.randn(2, 2, dtype=torch.complex64),
             torch.empty(0), torch.randn(12 << 20), torch.randn(4, requires_grad=True)]
    for tensor in kinds:
        group.exchange(*((tensor, 1) if rank == 0 else (None, None)),
                       *((None, None) if rank == 0 else (torch.empty_like(tensor), 0))).wait()
    torch.manual_seed(rank)
    for sent in kinds:
        if rank == 0:
            group.send(sent, 1).wait()
            got = torch.empty_like(sent)
            group.recv(got, 1).wait()
            assert torch.equal(got, sent), sent
        else:
            got = torch.empty_like(sent)
            group.recv(got, 0).wait()
            group.send(got, 0).wait()
    x = torch.randn(4, 6)
    with pytest.raises(CommunicationError, match="contiguous tensors"):
        group.send(x.T, 1 - rank)
    with pytest.raises(CommunicationError, match="contiguous tensors"):
        group.recv(x.T, 1 - rank).wait() if rank else group.send(x.T, 1)


def test_messages_of_every_kind_arrive():
    pool(2, _odd_messages)


def _a_thousand(rank):
    """Both ranks send a thousand messages that nobody has read; more than a socket holds."""
    group = Mesh(dp=2).world
    works = [group.send(torch.full((3,), float(i)), 1 - rank) for i in range(1000)]
    got = torch.empty(1000, 3)
    for i in range(1000):
        group.recv(got[i], 1 - rank).wait()
    for work in works:
        work.wait()
    assert not group.mesh.neighbours.full
    buffers = group.links[Outgoing, 1 - rank].buffers
    before = len(buffers)
    for i in range(50):  # each waits for its answer
        group.exchange(got[i], 1 - rank, torch.empty(3), 1 - rank).wait()
    return got[:, 0].tolist() == [*range(1000)] and len(buffers) == before <= 1000


def test_a_send_never_waits_for_the_receiver():
    assert pool(2, _a_thousand) == [True] * 2


def test_a_send_is_waited_for_until_the_last_number_has_left():
    """However little room the socket has each time."""
    unsent = deque(range(3))
    neighbours = SimpleNamespace(timeout=1, sleep=lambda sockets, deadline: unsent.popleft())
    Outgoing.wait(SimpleNamespace(unsent=unsent, neighbours=neighbours))
    assert not unsent


@pytest.mark.parametrize("length", [1, 4096, 4097, 2**16 + 1, 10**6, 2**20 + 1, 10**8 + 7])
def test_a_buffer_is_at_most_an_eighth_larger_than_its_message(length):
    """... or a page."""
    beyond = shared_memory.room(length) - length
    assert 0 <= beyond < max(mmap.PAGESIZE, length / 8)
    assert (length + beyond) % mmap.PAGESIZE == 0


def _receives_in_order(rank):
    """A later receive is waited for first, by another thread."""
    group = Mesh(dp=2).world
    if rank == 0:
        for i in range(4):
            group.send(torch.tensor([float(i)]), 1).wait()
        return []
    got = [torch.empty(1) for _ in range(4)]
    works = [group.recv(each, 0) for each in got]
    threads = [threading.Thread(target=works[i].wait) for i in (3, 1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each.item() for each in got]


def test_what_a_sender_has_sent_before_its_end_arrives():
    """Linux says ECONNRESET once where the sender has not read all, and gives the packet then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(b"not read")
    theirs.send(MESSAGE.pack(1, 2, 3))
    theirs.close()
    link = SimpleNamespace(socket=ours, neighbours=SimpleNamespace(timeout=1))
    assert Incoming.next_packet(link) == (MESSAGE.pack(1, 2, 3), [])
    ours.close()


def test_receives_complete_in_the_order_of_posting():
    assert pool(2, _receives_in_order)[1] == [0, 1, 2, 3]


def _lengths(rank):
    group = Mesh(dp=2).world
    if rank == 0:
        group.send(torch.zeros(3), 1).wait()
    else:
        group.recv(torch.zeros(4), 0).wait()


def test_a_message_of_another_length_is_refused():
    with pytest.raises(AssertionError, match="receive from rank 0: a message of 12 bytes for a "
                                             "tensor of 16"):
        pool(2, _lengths)


# ---- peers that die, stop or never come ----
# Each case has processes of its own


def _process(rank, world, folder, timeout, case, pipe):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    init("cpu", HANG, f"file://{folder}/store", rank, world)
    mesh = Mesh(timeout=timeout, dp=world)
    start = time.monotonic()
    try:
        pipe.send(case(mesh.world, rank))
    except CommunicationError as error:
        pipe.send(f"{error} after {time.monotonic() - start:.0f} s")
    pipe.recv()  # stays alive until the test has looked


@contextmanager
def processes(world, case, timeout=HANG):
    """Start `world` ranks of case(group, rank); gives [(process, pipe)]."""
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(world)]
        started = [context.Process(target=_process, daemon=True,
                                   args=(rank, world, folder, timeout, case, theirs))
                   for rank, (_, theirs) in enumerate(pipes)]
        for process in started:
            process.start()
        try:
            yield [*zip(started, (ours for ours, _ in pipes), strict=True)]
        finally:
            for process in started:
                process.kill()
                process.join()


def said(pipe):
    assert pipe.poll(HANG)
    return pipe.recv()


def dies_at_once(group, rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.recv(torch.zeros(1), 1).wait()


def dies_later(group, rank):
    c.all_reduce(torch.zeros(1), group)
    dies_at_once(group, rank)


def dies_before_its_turn_to_receive(group, rank):
    c.all_reduce(torch.zeros(1), group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        group.send(torch.zeros(1), 1).wait()


@pytest.mark.parametrize("case", [dies_at_once, dies_later, dies_before_its_turn_to_receive])
def test_a_peer_that_died_is_noticed_at_once(case):
    with processes(2, case) as [(_, pipe), _]:
        line = said(pipe)
    assert line.startswith("rank 0: operation ") and "rank 1" in line, line
    assert "connection closed by peer after 0 s" in line or "by peer after 1 s" in line, line


def stops(group, rank):
    c.all_reduce(torch.zeros(1), group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.recv(torch.zeros(1), 1).wait()


def never_comes(group, rank):
    if rank == 0:
        group.recv(torch.zeros(1), 1).wait()


@pytest.mark.parametrize("case", [stops, never_comes])
def test_a_peer_that_sends_nothing_is_given_up_after_the_timeout(case):
    with processes(2, case, timeout=1) as [(_, pipe), _]:
        line = said(pipe)
    assert "receive from rank 1: not within 1 s after" in line, line


def may_open_few_files(group, rank):
    if rank == 1:
        group.send(torch.zeros(1), 0).wait()
        group.recv(torch.zeros(1), 0).wait()
        return
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1,) * 2)
    group.recv(torch.zeros(1), 1).wait()


def test_too_many_open_files_are_named():
    with processes(2, may_open_few_files) as [(_, pipe), _]:
        line = said(pipe)
    assert "too many open files" in line.lower(), line


def talks(group, rank):
    """Returns the name of this rank's door."""
    for n in (1, 1000, 1 << 20):
        c.all_reduce(torch.zeros(n), group)
    return abstract_name(group.mesh.neighbours.cards[rank][1]).decode().strip("\0")


def test_nothing_is_left_after_a_kill():
    def sockets():
        return Path("/proc/net/unix").read_text()

    for _ in range(2):
        with processes(2, talks) as ranks:
            names = [said(pipe) for _, pipe in ranks]
            assert all(name in sockets() for name in names)
        assert not any(name in sockets() for name in names)
    assert not [*Path("/dev/shm").glob("*nanoparallel*")]


def _two_runs(rank):
    """Two meshes of the same ranks: two runs at once on one machine."""
    a, b = Mesh(dp=2).world, Mesh(dp=2).world
    for i in range(5):
        x, y = torch.tensor([rank + i]), torch.tensor([10 * rank])
        work = c.all_reduce(x, a, async_op=True)
        c.all_reduce(y, b)
        work.wait()
        assert (x.item(), y.item()) == (1 + 2 * i, 10)


def test_two_runs_of_one_machine_do_not_meet():
    pool(2, _two_runs)


# ---- strangers ----


def knock(address, words=b""):
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(abstract_name(address))
    if words:
        stranger.send(words)
    return stranger


def _strangers(rank):
    """Rank 0's door is found by others of this machine, before anybody has connected and after."""
    group = Mesh(dp=2).world
    neighbours = group.mesh.neighbours
    _, address = neighbours.cards[0]
    token, _ = neighbours.cards[1]  # of another rank: wrong at this door
    kept = []
    if rank == 1:
        kept = [knock(address) for _ in range(200)]  # say nothing
        kept += [knock(address, words) for words in (
            b"x", b"GET / HTTP/1.1", bytes(4096), token + bytes(4) + b"world")]
    for _ in range(3):
        x = torch.full((1000,), 1.0)
        c.all_reduce(x, group)
        assert x.eq(2).all()
        c.all_reduce(x, group.mesh.group("dp"))  # a second link, after they have come
        assert x.eq(4).all()
    ended = 0
    for stranger in kept[200:]:
        stranger.settimeout(HANG)
        ended += stranger.recv(1) == b""
    return ended, len(neighbours.waiting)


def test_strangers_get_nothing_and_disturb_nothing():
    (_, waiting), (ended, _) = pool(2, _strangers)
    assert ended == 4 and waiting <= shared_memory.WAITING


def test_a_stranger_is_named_in_one_line(capfd):
    class World:
        rank, size = 0, 1

    with patch.object(shared_memory, "all_gather", lambda tensor, world: tensor):
        neighbours = shared_memory.Neighbours(World, timeout=1)
    stranger = knock(neighbours.cards[0][1], b"x")
    stranger.setblocking(False)
    neighbours.look_outside()
    assert stranger.recv(1) == b""
    assert capfd.readouterr().err == (f"rank 0: a stranger (user {os.getuid()}) tried to connect "
                                      "to its messages\n")
    with patch.object(os, "getuid", lambda: -1):  # the right token, of another user
        stranger = knock(neighbours.cards[0][1], neighbours.token + bytes(4) + b"world")
        stranger.setblocking(False)
        neighbours.look_outside()
    assert stranger.recv(1) == b"" and not neighbours.arrived
    neighbours.close()


def _wrong_number(rank):
    group = Mesh(dp=2).world
    if rank == 0:
        group.send(torch.zeros(1), 1).wait()
        group.links[Outgoing, 1].socket.send(MESSAGE.pack(7, 4, 4096))
    else:
        group.recv(torch.zeros(1), 0).wait()
        group.recv(torch.zeros(1), 0).wait()


def test_a_wrong_number_is_refused():
    with pytest.raises(AssertionError, match="receive from rank 0: buffer 7 has not come"):
        pool(2, _wrong_number)


# ---- where there is no shared memory ----


def _without(rank, what):
    owner, name = {"memfd": (os, "memfd_create"), "credentials": (socket, "SO_PEERCRED"),
                   "sockets": (socket, "SOCK_SEQPACKET")}[what]
    kept = getattr(owner, name)
    delattr(owner, name)
    try:
        mesh = Mesh(dp=2)
        x = torch.ones(5)
        c.all_reduce(x, mesh.world)
        return x.tolist(), mesh.world.links
    finally:
        setattr(owner, name, kept)


@pytest.mark.parametrize("what", ["memfd", "credentials", "sockets"])
def test_a_system_without_it_takes_gloo(what):
    assert pool(2, _without, what) == [([2.0] * 5, {})] * 2


def _links(rank):
    mesh = Mesh(dp=2, transport="gloo")
    c.all_reduce(torch.ones(5), mesh.world)
    near = Mesh(dp=2)
    c.all_reduce(torch.ones(5), near.world)
    return mesh.world.links, {end for end, _ in near.world.links}


def test_transport_gloo_takes_no_shared_memory():
    assert pool(2, _links) == [({}, {Incoming, Outgoing})] * 2
