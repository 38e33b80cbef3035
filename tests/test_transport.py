"""A message arrives, in order and whole, over every road between ranks of CPUs; a peer that dies,
stops or never comes is one line; a process that is no rank gets nothing; and what runs in the
background runs in order, while its caller goes on."""

import gc
import os
import re
import socket
import threading
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import collectives as c
from mesh import Mesh
from tests.harness import HANG, ranks, start, start_thread
from tests.test_collectives import every_collective
from transport import connect
from transport.background import Background
from transport.shared_memory import AHEAD, PIECE, PIECE_SENT, Link

NUMBERS = PIECE // 4  # float32 numbers of a piece


def open_files():
    gc.collect()  # closes those of earlier groups
    return len(os.listdir("/proc/self/fd"))


# ---- messages through shared memory ----


def _every_kind(rank, group):
    torch.manual_seed(0)
    kinds = [torch.randn(()), torch.randn(3, 1, 5), torch.randn(5).bfloat16(), torch.arange(7),
             torch.arange(9) > 4, torch.empty(0), torch.randn(4, requires_grad=True),
             torch.randn(3 * NUMBERS + 5)]
    for sent in kinds:
        got = torch.zeros_like(sent, requires_grad=False)
        group.exchange(sent, 1 - rank, got, 1 - rank).wait()
        assert torch.equal(got, sent), sent
    for call in (group.send, group.recv):
        with pytest.raises(c.CommunicationError, match="messages take contiguous tensors$"):
            call(torch.zeros(4, 6).T, 1 - rank)


def _after_inference_mode(rank, group):
    """A buffer that was made in inference mode is used after it."""
    for mode in (True, False):
        with torch.inference_mode(mode):
            assert c.all_reduce(torch.ones(8), group).eq(2).all()


def _in_order(rank, group):
    """Messages of several lengths; receives that are posted first and waited for from the last."""
    lengths = [1, NUMBERS + 1, 7, 3 * NUMBERS, 2, 0, 5]
    got = [torch.full((n,), -1.0) for n in lengths]
    works = [group.recv(each, 1 - rank) for each in got]
    for i, n in enumerate(lengths):
        group.send(torch.full((n,), float(i)), 1 - rank)
    for work in reversed(works):
        work.wait()
    assert [each.unique().tolist() for each in got] == [[0], [1], [2], [3], [4], [], [6]]


def _in_pieces(rank, group):
    """A rank sends piece k + AHEAD when it has received k pieces; its peer has read k - AHEAD then.
    So 2 AHEAD buffers of whole pieces do, and one for the short piece at the end; a message of the
    next exchange may need the buffers that are still on their way back."""
    n = 20 * NUMBERS + 3
    for i in range(3):
        sent = torch.arange(n, dtype=torch.float) + rank + i
        got = torch.ones(n)
        group.exchange(sent, 1 - rank, got, 1 - rank, torch.Tensor.add_).wait()
        assert torch.equal(got, torch.arange(n, dtype=torch.float) + (1 - rank) + i + 1)
    lengths = [len(each) for each in group.carrier.links[1 - rank].buffers]
    assert max(lengths) == PIECE and len(lengths) <= 4 * AHEAD + 1  # of 63 pieces sent


def _unread(rank, group):
    """Each rank sends a thousand messages that nobody has read, more than a socket holds; five
    rounds of it. No buffer keeps a file open. The socket holds the numbers of some 270 free
    buffers, and the rest comes back when the next round is read: so two rounds of buffers do, and
    three are allowed."""
    files = open_files()
    got = torch.empty(1000, 3)
    for _ in range(5):
        for i in range(1000):
            group.send(torch.full((3,), float(i)), 1 - rank).wait()
        assert open_files() <= files
        for i in range(1000):
            group.recv(got[i], 1 - rank).wait()
        assert got[:, 2].tolist() == [*range(1000)]
        c.all_reduce(torch.ones(1), group)  # both ranks have read all
    assert len(group.carrier.links[1 - rank].buffers) <= 3000


def _of_another_length(rank, group):
    group.send(torch.zeros(3), 1 - rank).wait()
    with pytest.raises(c.CommunicationError, match=f"^rank {rank}: group world, receive from rank "
                       f"{1 - rank}: a message of 12 bytes for a tensor of 16$"):
        group.recv(torch.zeros(4), 1 - rank).wait()


def _between_two(rank):
    for claim in (_every_kind, _after_inference_mode, _in_order, _in_pieces, _unread,
                  _of_another_length):
        group = Mesh(dp=2).world
        assert [*group.carrier.links] == [1 - rank]
        claim(rank, group)


def test_messages_through_shared_memory_arrive_in_order_and_whole():
    ranks(2, _between_two)


def test_what_a_sender_has_sent_before_its_end_arrives():
    """Linux says ECONNRESET once where the sender has not read all, and gives the packet then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"not read")
        theirs.send(PIECE_SENT.pack(1, 2))
        theirs.close()
        link = Link(None, ours, 1, [])
        link.theirs = [None, None]
        assert link.next_piece() == (1, 2)


# ---- other roads ----

# Road -> what machine() says on each of four ranks
ROADS = {"two machines": [0, 0, 1, 1], "rank 3 is another user's": [0, 0, 0, 1],
         "rank 1 may not share memory": [0, None, 0, 0], "nobody may": [None] * 4}


def _on_road(rank, places):
    with patch.object(connect, "machine", lambda: places[rank]):
        group = Mesh(dp=4).world
    every_collective(rank, group)
    return [*group.carrier.links]


@pytest.mark.parametrize("road", ROADS)
def test_ranks_that_cannot_share_memory_talk_through_gloo(road):
    places = [None if where is None else ["machine", where] for where in ROADS[road]]
    for rank, links in enumerate(ranks(4, _on_road, places)):
        assert links == [peer for peer in range(4) if peer != rank and places[rank]
                         and places[peer] == places[rank]]


def test_a_machine_that_forbids_shared_memory_has_none():
    with patch.object(os, "memfd_create", side_effect=PermissionError):
        assert connect.machine() is None


# ---- peers that die, stop or never come ----


def _lose_the_peer(rank, road, dies, timeout):
    """Rank 1 leaves once the ranks have talked: it dies, which closes its connections, or is silent
    from then on. Returns the lines with which a receive from it fails, and a send of more messages
    than a socket holds. (test_survival.py kills and stops processes.)"""
    usual = connect.machine
    with patch.object(connect, "machine", lambda: usual() if road == "memory" else None):
        group = Mesh(dp=2, timeout=timeout).world
    c.all_reduce(torch.zeros(1), group)
    if rank == 1:
        if dies:
            dist.destroy_process_group(group.carrier.others.communicator)
            del group
            gc.collect()
        return []
    with pytest.raises(c.CommunicationError) as receive:
        group.recv(torch.zeros(1), 1).wait()
    with pytest.raises(c.CommunicationError) as send:
        while True:
            group.send(torch.zeros(1), 1).wait()
    return str(receive.value), str(send.value)


@pytest.mark.parametrize("road,dies,timeout,reason", [
    ("memory", True, 600, "connection closed by peer$"),
    ("gloo", True, 600, ".*Connection (closed|reset) by peer"),
    ("memory", False, 2, "not within 2 s$"),
    ("gloo", False, 2, "Timed out waiting 2000ms for recv operation to complete$")])
def test_a_peer_that_died_or_stopped_ends_a_wait_with_one_line(road, dies, timeout, reason):
    """One that died at once, not at the timeout, which is minutes away."""
    (receive, send), _ = ranks(2, _lose_the_peer, road, dies, timeout)
    assert re.match(f"rank 0: group world, receive from rank 1: {reason}", receive), receive
    assert send.startswith("rank 0: group world, send to rank 1: ")
    assert "\n" not in receive + send


CONNECT = """
import socket, sys
for _ in range(500):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect("\\0nanoparallel-" + sys.argv[1])
        assert end.recv(1) == b"", "accepted"
"""


def _behind_others(rank, timeout, comes):
    """A process of the same user, which is no rank and says nothing, connects to rank 0 500 times.
    Then rank 1 comes. Or nobody comes. Returns the sum of what the ranks have, or the line of an
    error."""
    names = []

    def told(communicator, value, tell_all=connect.tell_all):
        values = tell_all(communicator, value)
        names.extend(name for _, _, name in values)
        if rank == 1 and not comes:
            time.sleep(timeout + 1)
            raise RuntimeError("does not come")
        if rank == 1:
            assert start("-c", CONNECT, names[0]).wait() == 0
        return values

    try:
        with patch.object(connect, "tell_all", told):
            group = Mesh(dp=2, timeout=timeout).world
    except c.CommunicationError as error:
        return str(error)
    total = c.all_reduce(torch.ones(1), group).item()
    with (pytest.raises(ConnectionRefusedError),  # once the peers are in, nobody is
          socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late):
        late.connect(f"\0nanoparallel-{names[0]}")
    return total


@pytest.mark.parametrize("timeout,comes,want", [
    (60, True, 2), (2, False, "rank 0: joining group world: not within 2 s")])
def test_only_ranks_are_accepted_and_a_peer_that_never_comes_is_given_up(timeout, comes, want):
    assert ranks(2, _behind_others, timeout, comes)[0] == want


def test_a_process_of_another_user_is_no_rank_and_shares_no_memory():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine = connect.machine()
    with ours, theirs:
        assert connect.process_at(ours) == os.getpid()
        with patch.object(os, "getuid", lambda: 12345):
            assert connect.process_at(ours) is None
            assert connect.machine() != mine


# ---- work in the background ----


@pytest.fixture
def background():
    """A Background of a rank that has several cores."""
    runner = Background(torch.device("cpu"))
    start_thread(runner)
    return runner


def test_without_a_core_for_it_a_function_runs_when_it_is_waited_for_and_others_before_it():
    torch.set_num_threads(1)
    runner, ran = Background(torch.device("cpu")), []
    waits = [runner.start(ran.append, i) for i in range(5)]
    assert not ran
    waits[2]()
    waits[1]()
    assert ran == [0, 1, 2]
    failing = runner.start(ran.remove, 9)
    with pytest.raises(ValueError):
        failing()
    assert ran == [0, 1, 2, 3, 4]
    runner.start(ran.remove, 9)
    with pytest.raises(ValueError):  # of the function before, and this one does not run
        runner.start(ran.append, 5)()
    assert ran == [0, 1, 2, 3, 4]


def test_functions_run_in_order_while_their_caller_goes_on(background):
    """The first function ends only when the caller, who has started them all, lets it."""
    go_on, ran = threading.Event(), []
    background.start(lambda: ran.append(go_on.wait(HANG)))
    waits = [background.start(ran.append, i) for i in range(200)]
    assert not ran
    go_on.set()
    waits[-1]()
    assert ran == [True, *range(200)]
    waits[-1]()  # a second call returns at once


def test_an_error_is_raised_at_the_wait_and_all_that_comes_later_fails_with_it(background):
    """The groups are out of step with those of other ranks then."""
    def fail():
        raise c.CommunicationError("the peer has gone")

    ran = []
    fine, failing, later = (background.start(ran.append, 1), background.start(fail),
                            background.start(ran.append, 2))
    for wait in (failing, failing, later, background.start(ran.append, 3)):
        with pytest.raises(c.CommunicationError, match="^the peer has gone$"):
            wait()
    fine()
    assert ran == [1]
