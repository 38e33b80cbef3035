"""A message arrives, in order and whole, over every road between ranks of CPUs; a peer that dies,
stops or never comes is one line; a stranger gets nothing; nothing is left behind; and what runs in
the background runs in order, while its caller goes on."""

import gc
import itertools
import os
import resource
import signal
import socket
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import collectives as c
from mesh import Mesh
from run.processes import init
from tests.harness import _train, equals_one_process
from tests.pool import HANG, forkserver, pool
from tests.test_collectives import every_collective
from transport import shared_memory
from transport.background import Background
from transport.gloo import Gloo
from transport.shared_memory import AHEAD, MESSAGE, PIECE, Link, SharedMemory

NUMBERS = PIECE // 4  # float32 numbers of a piece

# ---- messages through shared memory ----


def _every_kind(rank):
    """Rank 0 sends tensors of every kind, rank 1 sends them back."""
    group = Mesh(dp=2).world
    assert isinstance(group.carrier, SharedMemory) and [*group.carrier.links] == [1 - rank]
    generator = torch.Generator().manual_seed(0)
    kinds = [torch.randn((), generator=generator), torch.randn(3, 1, 5, generator=generator),
             torch.randn(5, generator=generator).bfloat16(), torch.arange(7), torch.arange(9) > 4,
             torch.randn(2, 2, dtype=torch.complex64, generator=generator), torch.empty(0),
             torch.randn(4, requires_grad=True, generator=generator),
             torch.randn(3 * NUMBERS + 5, generator=generator)]
    for sent in kinds:
        got = torch.empty_like(sent, requires_grad=False)
        if rank == 0:
            group.send(sent, 1).wait()
            group.recv(got, 1).wait()
        else:
            group.recv(got, 0).wait()
            group.send(got, 0).wait()
        assert torch.equal(got, sent), sent
    x = torch.randn(4, 6)
    for call in (partial(group.send, x.T, 1 - rank), partial(group.recv, x.T, 1 - rank)):
        with pytest.raises(c.CommunicationError, match="messages take contiguous tensors$"):
            call().wait()


def test_tensors_of_every_kind_arrive_and_strange_strides_are_refused():
    pool(2, _every_kind)


def _in_order(rank):
    """Messages of several lengths; receives that are posted first and waited for from the last."""
    group = Mesh(dp=2).world
    lengths = [1, NUMBERS + 1, 7, 3 * NUMBERS, 2, 0, 5]
    if rank == 0:
        for i, n in enumerate(lengths):
            group.send(torch.full((n,), float(i)), 1).wait()
        return []
    got = [torch.full((n,), -1.0) for n in lengths]
    works = [group.recv(each, 0) for each in got]
    for work in reversed(works):
        work.wait()
    return [each.unique().tolist() for each in got]


def test_messages_arrive_in_the_order_in_which_they_were_sent():
    assert pool(2, _in_order)[1] == [[0], [1], [2], [3], [4], [], [6]]


def buffers(group, peer):
    return group.carrier.links[peer].buffers


def _pieces(rank):
    """Two ranks exchange 20 pieces. Returns the numbers of this rank's buffers, and the largest."""
    group = Mesh(dp=2).world
    n = 20 * NUMBERS + 3
    got = torch.empty(n)
    for i in range(3):
        sent = torch.arange(n, dtype=torch.float) + rank + i
        group.exchange(sent, 1 - rank, got, 1 - rank).wait()
        assert torch.equal(got, torch.arange(n, dtype=torch.float) + (1 - rank) + i)
    mine = buffers(group, 1 - rank)
    return len(mine), max(len(each) for each in mine)


def test_a_long_message_travels_in_pieces_and_holds_a_few_buffers():
    """A rank sends piece k + AHEAD when it has received k pieces; its peer has read k - AHEAD then.
    So 2 AHEAD buffers of whole pieces do, and one for the short piece at the end; a message of the
    next exchange may need the buffers that are still on their way back."""
    for number, largest in pool(2, _pieces):
        assert largest == PIECE
        assert number <= 4 * AHEAD + 1  # of 63 pieces sent


def _combined(rank):
    """Returns whether combine() reads the very memory that the peer has written."""
    group = Mesh(dp=2).world
    link = group.carrier.links[1 - rank]
    starts = []

    def add(into, received):
        theirs = {each.data_ptr() for each in link.theirs}
        starts.append(received.data_ptr() in theirs)
        into.add_(received)

    got = torch.ones(2 * NUMBERS + 1)
    group.exchange(torch.full_like(got, 10.0 + rank), 1 - rank, got, 1 - rank, add).wait()
    assert got.eq(12.0 - rank).all()
    return starts


def test_a_receive_combines_straight_out_of_the_senders_buffer():
    assert pool(2, _combined) == [[True] * 3] * 2


def open_buffers():
    """The number of open files of this process that are buffers."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, by a thread of gloo
            found += "memfd:nanoparallel" in os.readlink(path)
    return found


def _reuse(rank):
    """Returns (buffers of this rank, open files of buffers beside one for each) after 5 all-reduces
    of three lengths, and after 100 more."""
    gc.collect()
    before = open_buffers()
    group = Mesh(dp=3).group("dp")
    links = group.carrier.links.values()
    seen = []
    for times in (5, 100):
        for _ in range(times):
            for n in (3, 1000, 100_000):
                c.all_reduce(torch.ones(n), group)
                # So nobody is ahead by a whole all-reduce
                c.all_to_all([torch.zeros(1) for _ in range(3)], [torch.ones(1)] * 3, group)
        mine = sum(len(link.buffers) for link in links)
        theirs = sum(len(link.theirs) for link in links)
        # Python's mmap keeps a file open for each buffer
        seen.append((mine, open_buffers() - before - mine - theirs))
    return seen


def test_buffers_are_reused_and_no_file_stays_open():
    """Buffers of 3 sizes to each of 2 peers; of each at most the 5 messages by which a rank may be
    ahead of its reader."""
    for (_, files), (number, files_later) in pool(3, _reuse):
        assert number <= 3 * 2 * 5 and files == files_later == 0


@pytest.mark.parametrize("length", [1, 4096, 4097, 2**16 + 1, 10**6, 2**20 + 1, PIECE])
def test_a_buffer_is_at_most_an_eighth_or_a_page_longer_than_its_message(length):
    size = shared_memory.room(length)
    assert 0 <= size - length < max(4096, length / 8) and size % 4096 == 0


def _unread(rank, world, rounds):
    """Each rank sends a thousand messages that nobody has read, more than a socket holds; some
    rounds of it. Returns the most buffers of a link."""
    group = Mesh(dp=world).world
    peers = [peer for peer in range(world) if peer != rank]
    for _ in range(rounds):
        for i in range(1000):
            for peer in peers:
                group.send(torch.full((3,), float(i)), peer).wait()
        got = torch.empty(1000, 3)
        for peer in peers:
            for i in range(1000):
                group.recv(got[i], peer).wait()
            assert got[:, 2].tolist() == [*range(1000)]
        c.all_reduce(torch.ones(1), group)  # all ranks have read all
    return max(len(buffers(group, peer)) for peer in peers)


@pytest.mark.parametrize("world,rounds", [(2, 12), (3, 2)])
def test_a_thousand_unread_messages_block_nobody_and_their_buffers_are_reused(world, rounds):
    """The socket holds the numbers of some 270 free buffers; the rest comes back when the next
    round is read. So two rounds of buffers do, and three are allowed, for twelve of messages."""
    assert max(pool(world, _unread, world, rounds)) <= 3000


def _ring_of_sends(rank, world):
    """Each rank first sends 500 messages to the next, which reads them only when it has sent its
    own: full sockets all around."""
    group = Mesh(dp=world).world
    works = [group.send(torch.full((3,), float(i)), group.next) for i in range(500)]
    got = torch.empty(500, 3)
    for i in range(500):
        group.recv(got[i], group.prev).wait()
    c.wait_all(works)
    return got[:, 0].tolist() == [*range(500)]


def test_full_sockets_all_around_a_ring_block_nobody():
    assert pool(4, _ring_of_sends, 4) == [True] * 4


def _lengths(rank):
    group = Mesh(dp=2).world
    if rank == 0:
        group.send(torch.zeros(3), 1).wait()
    else:
        with pytest.raises(c.CommunicationError, match="^rank 1: group world, receive from rank 0: "
                                                       "a message of 12 bytes for a tensor of 16$"):
            group.recv(torch.zeros(4), 0).wait()


def test_a_message_of_another_length_is_refused():
    pool(2, _lengths)


def test_what_a_sender_has_sent_before_its_end_arrives():
    """Linux says ECONNRESET once where the sender has not read all, and gives the packet then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"not read")
        theirs.send(MESSAGE.pack(1, 2, 3))
        theirs.close()
        packet, files = Link(None, ours, 1, []).next_packet()
    assert packet == MESSAGE.pack(1, 2, 3) and not files


def _two_groups(rank):
    """Two meshes of the same ranks: messages of one, in a thread, beside those of the other."""
    a, b = Mesh(dp=2).world, Mesh(dp=2)
    for i in range(20):
        x, y = torch.full((1000,), float(rank + i)), torch.full((1000,), 10.0 * rank)
        wait = b.background.start(c.all_reduce, x, a)
        c.all_reduce(y, b.world)
        wait()
        assert x.eq(1 + 2 * i).all() and y.eq(10).all()


def test_messages_of_two_groups_do_not_meet():
    pool(2, _two_groups)


# ---- other roads ----


@contextmanager
def road(rank, name):
    """As if the ranks were on several machines, or on one that forbids shared memory to some."""
    def forbidden(name):
        raise PermissionError

    places = {"mixed": rank // 2, "the last apart": rank == 3}
    if name in places:
        with patch.object(shared_memory, "machine", lambda: ["machine", places[name]]):
            yield
    elif name == "forbidden" or (name == "forbidden to rank 1" and rank == 1):
        with patch.object(os, "memfd_create", forbidden):
            yield
    else:
        yield


def linked(name, world):
    """{rank: the peers with which it shares memory}."""
    def share(a, b):
        return {"mixed": a // 2 == b // 2, "the last apart": 3 not in (a, b),
                "forbidden": False, "forbidden to rank 1": 1 not in (a, b)}[name]

    return {a: [b for b in range(world) if b != a and share(a, b)] for a in range(world)}


def _on_road(rank, world, name):
    with road(rank, name):
        group = Mesh(dp=world).group("dp")
    every_collective(rank, group)
    for hop in range(100):  # each message through a link, through gloo or, in an exchange, one each
        x = torch.full((hop,), float(rank))
        c.all_reduce(x, group)
    return [*group.carrier.links]


@pytest.mark.parametrize("name", ["mixed", "the last apart", "forbidden", "forbidden to rank 1"])
def test_collectives_equal_their_definition_over_every_road(name):
    assert pool(4, _on_road, 4, name) == [*linked(name, 4).values()]


def _gloo(rank):
    group = Mesh(dp=2, transport="gloo").world
    assert isinstance(group.carrier, Gloo)
    every_collective(rank, group)


def test_transport_gloo_shares_no_memory():
    pool(2, _gloo)


def _train_mixed(rank, cfg):
    with road(rank, "mixed"):
        return _train(rank, cfg)


def test_training_over_links_and_gloo_equals_one_process(corpus):
    """In float64, to 1e-10 (tests/harness.py)."""
    equals_one_process(corpus, _train_mixed, dp=2, pp=2, zero=3, microbatches=3)


# ---- peers that die, stop or never come ----
# Each case has processes of its own


def _process(rank, world, folder, timeout, case, pipe):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    init("cpu", HANG, f"file://{folder}/store", rank, world)
    start = time.monotonic()
    try:
        pipe.send(case(rank, partial(Mesh, timeout=timeout, dp=world), pipe))
    except c.CommunicationError as error:
        pipe.send((str(error), time.monotonic() - start))
    pipe.recv()  # stays alive until the test has looked


@contextmanager
def processes(world, case, timeout=HANG):
    """Start `world` ranks of case(rank, mesh, pipe); gives [(process, pipe)]."""
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


def joined(mesh):
    """The world's group, once all ranks have talked."""
    group = mesh().world
    c.all_reduce(torch.zeros(1), group)
    return group


def dies_before_a_receive(rank, mesh, pipe):
    group = joined(mesh)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.recv(torch.zeros(1), 1).wait()


def dies_within_an_all_reduce(rank, mesh, pipe):
    group = joined(mesh)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        c.all_reduce(torch.zeros(100), group)


def dies_before_it_has_read_what_is_sent(rank, mesh, pipe):
    group = joined(mesh)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        group.send(torch.zeros(1), 1).wait()


@pytest.mark.parametrize("case,message", [
    (dies_before_a_receive, "receive from rank 1"),
    (dies_within_an_all_reduce, "receive from rank 1, send to rank 1"),
    (dies_before_it_has_read_what_is_sent, "send to rank 1")])
def test_a_peer_that_died_ends_the_wait_with_one_line(case, message):
    """Not at the timeout, which is minutes away."""
    with processes(2, case) as [(_, pipe), _]:
        line, _ = said(pipe)
    assert line == f"rank 0: group world, {message}: connection closed by peer"


def dies_in_the_background(rank, mesh, pipe):
    group, background = joined(mesh), Background(torch.device("cpu"))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    background.start(c.all_reduce, torch.zeros(1), group)()


def test_a_peer_that_died_ends_the_wait_for_the_background_too():
    with processes(2, dies_in_the_background) as [(_, pipe), _]:
        line, _ = said(pipe)
    assert line.startswith("rank 0: group world, receive from rank 1")
    assert line.endswith(": connection closed by peer")


def stops(rank, mesh, pipe):
    group = joined(mesh)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.recv(torch.zeros(1), 1).wait()


def sends_nothing(rank, mesh, pipe):
    group = joined(mesh)
    if rank == 0:
        group.recv(torch.zeros(1), 1).wait()


def reads_nothing(rank, mesh, pipe):
    group = joined(mesh)
    while rank == 0:
        group.send(torch.zeros(1), 1).wait()


@pytest.mark.parametrize("case,message", [
    (stops, "receive from rank 1"), (sends_nothing, "receive from rank 1"),
    (reads_nothing, "send to rank 1")])
def test_a_peer_that_does_nothing_is_given_up_after_the_timeout(case, message):
    with processes(2, case, timeout=1.5) as [(_, pipe), _]:
        line, seconds = said(pipe)
    assert line == f"rank 0: group world, {message}: not within 1.5 s"
    assert seconds >= 1.5


def never_knocks(rank, mesh, pipe):
    """Rank 1 has told its card, and does not connect."""
    if rank == 1:
        tell_all = shared_memory.tell_all
        shared_memory.tell_all = lambda *args: (tell_all(*args), pipe.recv())[0]
    mesh()


def test_a_peer_that_never_connects_is_given_up_after_the_timeout():
    with processes(2, never_knocks, timeout=1.5) as [(_, pipe), _]:
        line, seconds = said(pipe)
    assert line == "rank 0: joining group world: not within 1.5 s" and seconds >= 1.5


def may_open_few_files(rank, mesh, pipe):
    group = joined(mesh)
    if rank == 1:
        group.send(torch.zeros(1 << 20), 0).wait()
        return
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1,) * 2)
    held = []
    with suppress(OSError):
        while True:  # gaps in the numbers of files
            held.append(os.dup(0))
    group.recv(torch.zeros(1 << 20), 1).wait()


def test_too_many_open_files_are_named():
    with processes(2, may_open_few_files) as [(_, pipe), _]:
        line, _ = said(pipe)
    assert line.startswith("rank 0: group world, receive from rank 1: ")
    assert "too many open files" in line.lower(), line


# ---- strangers ----


def doors(rank, mesh, pipe):
    """Every rank tells the test the name of its door. Rank 1 goes on, and knocks at rank 0's, when
    the test says so."""
    tell_all = shared_memory.tell_all

    def told(communicator, card):
        cards = tell_all(communicator, card)
        pipe.send(card[-1])
        if rank == 1:
            pipe.recv()
        return cards

    shared_memory.tell_all = told
    before = len(os.listdir("/proc/self/fd"))
    group = mesh().world
    x = torch.full((1000,), rank + 1.0)
    c.all_reduce(x, group)
    return x.unique().tolist(), len(group.carrier.links), len(os.listdir("/proc/self/fd")) - before


def knock(name):
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"\0nanoparallel-{name}")
    stranger.settimeout(HANG)
    return stranger


@pytest.mark.parametrize("number", [1, 500])
def test_strangers_of_the_same_user_are_not_let_in_and_delay_nobody(number):
    """They are silent. Each is shown out before the peer comes."""
    with processes(2, doors) as ranks:
        (_, first), (_, second) = ranks
        name = said(first)
        said(second)
        strangers = [knock(name) for _ in range(number)]
        for stranger in strangers:
            with stranger:
                assert stranger.recv(1) == b""  # closed
        second.send("go on")
        (*got, files), (*other, files_of_other) = said(first), said(second)
        assert got == other == [[3.0], 1]
        assert files == files_of_other  # of rank 0 no stranger's
        with pytest.raises(ConnectionRefusedError):
            knock(name)  # once the peers are in, nobody is


def test_strangers_that_knock_all_the_time_do_not_outlast_the_timeout():
    with processes(2, doors, timeout=1.5) as [(_, first), (_, second)]:
        name = said(first)
        said(second)
        with suppress(OSError):  # once the door is gone
            while not first.poll():
                knock(name).close()
        line, _ = said(first)
    assert line == "rank 0: joining group world: not within 1.5 s"


def test_a_process_of_another_user_is_a_stranger():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert shared_memory.process_at(ours) == os.getpid()
        with patch.object(os, "getuid", lambda: 12345):
            assert shared_memory.process_at(ours) is None


def _wrong_number(rank):
    group = Mesh(dp=2).world
    if rank == 0:
        group.carrier.links[1].outgoing.send(MESSAGE.pack(7, 4, 4096))
        group.carrier.links[1].outgoing.recv(1)  # until the other rank has looked
    else:
        with pytest.raises(c.CommunicationError, match="from rank 0: buffer 7 has not come"):
            group.recv(torch.zeros(1), 0).wait()
        group.carrier.links[0].incoming.send(b"x")


def test_a_number_of_no_buffer_is_refused():
    pool(2, _wrong_number)


# ---- nothing is left behind ----


def talks(rank, mesh, pipe):
    """Returns the names of this process's sockets. (Others of this machine may run tests, too.)"""
    group = joined(mesh)
    for n in (1, 1000, 1 << 20):
        c.all_reduce(torch.zeros(n), group)
    mine = set()
    for link in group.carrier.links.values():
        for end in (link.outgoing, link.incoming):
            mine |= {end.getsockname(), end.getpeername()}
    return {name.decode().replace("\0", "@") for name in mine if name}


def test_messages_use_no_file_and_a_kill_leaves_no_socket():
    def sockets():
        return {*Path("/proc/net/unix").read_text().split()}

    with processes(2, talks) as ranks:
        names = set().union(*[said(pipe) for _, pipe in ranks])
        assert names and names <= sockets()
        assert all(name.startswith("@nanoparallel-") for name in names)  # no path
        for process, _ in ranks:
            mapped = Path(f"/proc/{process.pid}/maps").read_text()
            assert "/memfd:nanoparallel (deleted)" in mapped  # no name in any folder
            opened = [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
            assert not any("/dev/shm" in each for each in [mapped, *opened])
    assert not names & sockets()


def _dropped(rank):
    """Returns [(open files, mapped buffers)] when a mesh has been dropped, ten times."""
    seen = []
    for _ in range(10):
        mesh = Mesh(dp=2)
        c.all_reduce(torch.zeros(1000), mesh.world)
        del mesh
        gc.collect()
        seen.append((len(os.listdir("/proc/self/fd")),
                     Path("/proc/self/maps").read_text().count("memfd:nanoparallel")))
    return seen


def test_a_mesh_that_is_dropped_takes_its_sockets_and_buffers_with_it():
    """Nine meshes would leave 18 sockets and 18 buffers. (gloo may open a file meanwhile. Its
    connections for ten meshes are made in a first call, and kept by the pool.)"""
    pool(2, _dropped)
    for seen in pool(2, _dropped):
        files, mapped = zip(*seen, strict=True)
        assert max(files) - min(files) < 9 and len(set(mapped)) == 1, seen


# ---- work in the background ----


def background():
    return Background(torch.device("cpu"))


def test_functions_run_in_the_order_in_which_they_were_started():
    runner, ran = background(), []
    waits = [runner.start(ran.append, i) for i in range(200)]
    waits[-1]()
    assert ran == [*range(200)]


def test_the_caller_goes_on_while_a_function_runs():
    """The function ends only when the caller, who has started it, lets it."""
    runner, go_on, ran = background(), threading.Event(), []
    wait = runner.start(lambda: ran.append(go_on.wait(HANG)))
    assert not ran
    go_on.set()
    wait()
    assert ran == [True]
    wait()  # a second call returns at once


def test_an_error_is_raised_where_it_is_waited_for():
    def fail():
        raise c.CommunicationError("the peer has gone")

    runner, ran = background(), []
    fine, failing = runner.start(ran.append, 1), runner.start(fail)
    for _ in range(2):
        with pytest.raises(c.CommunicationError, match="^the peer has gone$"):
            failing()
    fine()
    assert ran == [1]


def test_a_function_runs_without_autograd():
    weight = torch.ones(2, requires_grad=True)
    background().start(weight.add_, 1)()
    assert weight.tolist() == [2, 2] and weight.is_leaf


def test_the_thread_ends_with_its_object_and_holds_no_tensor():
    runner = background()
    threads = {*threading.enumerate()}
    tensor = torch.ones(10)
    storage = weakref.ref(tensor)
    wait = runner.start(tensor.add_, 1)
    thread, = {*threading.enumerate()} - threads
    wait()
    runner.start(lambda: None)()  # after it the thread has let go of the first
    del tensor, wait
    assert storage() is None
    del runner
    thread.join(HANG)
    assert not thread.is_alive()


def test_a_background_that_was_never_used_has_no_thread():
    before = threading.active_count()
    for _, runner in itertools.product(range(3), [background()]):
        assert threading.active_count() == before and runner.thread is None
