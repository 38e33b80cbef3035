"""A message arrives, in order and whole, over every road between ranks of CPUs; a peer that dies,
stops or never comes is one line; a stranger gets nothing; and what runs in the background runs in
order, while its caller goes on."""

import os
import re
import resource
import signal
import socket
import tempfile
import threading
from contextlib import contextmanager, suppress
from functools import partial
from unittest.mock import patch

import pytest
import torch

import collectives as c
from mesh import Mesh
from test_all import HANG, ranks, run_rank
from tests.test_collectives import every_collective
from transport import shared_memory
from transport.background import Background
from transport.shared_memory import AHEAD, MESSAGE, PIECE, Link

NUMBERS = PIECE // 4  # float32 numbers of a piece

# ---- messages through shared memory ----


def _every_kind(rank):
    group = Mesh(dp=2).world
    assert [*group.carrier.links] == [1 - rank]
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


def test_tensors_of_every_kind_arrive_and_strange_strides_are_refused():
    ranks(2, _every_kind)


def _after_inference_mode(rank):
    group = Mesh(dp=2).world
    for mode in (True, False):
        with torch.inference_mode(mode):
            found = c.all_reduce(torch.ones(8), group)
    return found.tolist()


def test_a_buffer_made_in_inference_mode_is_used_after_it():
    assert ranks(2, _after_inference_mode) == [[2.0] * 8] * 2


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
    assert ranks(2, _in_order)[1] == [[0], [1], [2], [3], [4], [], [6]]


def _pieces(rank):
    """Two ranks add 20 pieces to each other's, three times. Returns the lengths of the buffers."""
    group = Mesh(dp=2).world
    n = 20 * NUMBERS + 3
    for i in range(3):
        sent = torch.arange(n, dtype=torch.float) + rank + i
        got = torch.ones(n)
        group.exchange(sent, 1 - rank, got, 1 - rank, torch.Tensor.add_).wait()
        assert torch.equal(got, torch.arange(n, dtype=torch.float) + (1 - rank) + i + 1)
    return [len(each) for each in group.carrier.links[1 - rank].buffers]


def test_a_long_message_travels_in_pieces_through_a_few_buffers():
    """A rank sends piece k + AHEAD when it has received k pieces; its peer has read k - AHEAD then.
    So 2 AHEAD buffers of whole pieces do, and one for the short piece at the end; a message of the
    next exchange may need the buffers that are still on their way back."""
    for lengths in ranks(2, _pieces):
        assert max(lengths) == PIECE and len(lengths) <= 4 * AHEAD + 1  # of 63 pieces sent


def _unread(rank):
    """Each rank sends a thousand messages that nobody has read, more than a socket holds; five
    rounds of it, with few open files. Returns the number of buffers of the link."""
    group = Mesh(dp=2).world
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, limits[1]))
    got = torch.empty(1000, 3)
    for _ in range(5):
        for i in range(1000):
            group.send(torch.full((3,), float(i)), 1 - rank).wait()
        for i in range(1000):
            group.recv(got[i], 1 - rank).wait()
        assert got[:, 2].tolist() == [*range(1000)]
        c.all_reduce(torch.ones(1), group)  # both ranks have read all
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return len(group.carrier.links[1 - rank].buffers)


def test_a_thousand_unread_messages_block_nobody_and_their_buffers_are_reused():
    """The socket holds the numbers of some 270 free buffers; the rest comes back when the next
    round is read. So two rounds of buffers do, and three are allowed, for five of messages."""
    assert max(ranks(2, _unread)) <= 3000


def _wrong_length(rank):
    group = Mesh(dp=2).world
    if rank == 0:
        group.send(torch.zeros(3), 1).wait()
    else:
        with pytest.raises(c.CommunicationError, match="^rank 1: group world, receive from rank 0: "
                                                       "a message of 12 bytes for a tensor of 16$"):
            group.recv(torch.zeros(4), 0).wait()


def test_a_message_of_another_length_is_refused():
    ranks(2, _wrong_length)


def test_what_a_sender_has_sent_before_its_end_arrives():
    """Linux says ECONNRESET once where the sender has not read all, and gives the packet then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"not read")
        theirs.send(MESSAGE.pack(1, 2, 3))
        theirs.close()
        link = Link(None, ours, 1, [])
        link.theirs = [None, None]
        assert link.next_message() == (1, 2)


# ---- other roads ----

# Road -> what machine() says on each of four ranks
ROADS = {"two machines": [0, 0, 1, 1], "rank 3 is another user's": [0, 0, 0, 1],
         "rank 1 may not share memory": [0, None, 0, 0], "nobody may": [None] * 4}


def _on_road(rank, places):
    with patch.object(shared_memory, "machine", lambda: places[rank]):
        group = Mesh(dp=4).world
    every_collective(rank, group)
    return [*group.carrier.links]


@pytest.mark.parametrize("road", ROADS)
def test_ranks_that_cannot_share_memory_talk_through_gloo(road):
    places = [None if where is None else ["machine", where] for where in ROADS[road]]
    for rank, links in enumerate(ranks(4, _on_road, places)):
        assert links == [peer for peer in range(4) if peer != rank and places[rank]
                         and places[peer] == places[rank]]


def test_a_machine_that_forbids_shared_memory_has_none_and_users_do_not_share():
    mine = shared_memory.machine()
    with patch.object(os, "getuid", lambda: 12345):
        assert shared_memory.machine() != mine
    with patch.object(os, "memfd_create", side_effect=PermissionError):
        assert shared_memory.machine() is None


# ---- peers that die, stop or never come ----
# Each case has processes of its own


def _send_result(rank, case, timeout, pipe):
    try:
        pipe.send(case(rank, partial(Mesh, timeout=timeout, dp=2), pipe))
    except BaseException as error:  # a CommunicationError; of pytest.raises, too, if there is none
        pipe.send(str(error))
    pipe.recv()  # stays alive until the test has looked


@contextmanager
def two(case, timeout=HANG):
    """Start two ranks of case(rank, mesh, pipe). Gives [(process, pipe)]; a pipe gives what the
    case returns, or the line of its error."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        started = [context.Process(target=run_rank, daemon=True,
                                   args=(rank, 2, f"{folder}/meeting", _send_result,
                                         (case, timeout, theirs)))
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


def fails(rank, mesh, pipe, number, transport):
    """Rank 1 gets a signal once the ranks have talked. Returns the lines with which a receive from
    it fails, and a send of more messages than a socket holds."""
    if transport == "gloo":
        shared_memory.machine = lambda: None
    group = mesh().world
    c.all_reduce(torch.zeros(1), group)
    if rank == 1:
        os.kill(os.getpid(), number)
    with pytest.raises(c.CommunicationError) as receive:
        group.recv(torch.zeros(1), 1).wait()
    with pytest.raises(c.CommunicationError) as send:
        while True:
            group.send(torch.zeros(1), 1).wait()
    return str(receive.value), str(send.value)


@pytest.mark.parametrize("number,transport,timeout,reason", [
    (signal.SIGKILL, "shared memory", HANG, "connection closed by peer$"),
    (signal.SIGKILL, "gloo", HANG, ".*Connection (closed|reset) by peer"),
    (signal.SIGSTOP, "shared memory", 2, "not within 2 s$"),
    (signal.SIGSTOP, "gloo", 2, "Timed out waiting 2000ms for recv operation to complete$")])
def test_a_peer_that_died_or_stopped_ends_a_wait_with_one_line(number, transport, timeout, reason):
    """One that died at once, not at the timeout, which is minutes away."""
    with two(partial(fails, number=number, transport=transport), timeout) as [(_, pipe), _]:
        receive, send = said(pipe)
    assert re.match(f"rank 0: group world, receive from rank 1: {reason}", receive), receive
    assert send.startswith("rank 0: group world, send to rank 1: ")
    assert "\n" not in receive + send


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
    printed = os.memfd_create("stderr")
    os.dup2(printed, 2)
    before = len(os.listdir("/proc/self/fd"))
    group = mesh().world
    x = torch.full((1000,), rank + 1.0)
    c.all_reduce(x, group)
    files = len(os.listdir("/proc/self/fd")) - before
    return x.unique().tolist(), len(group.carrier.links), files, os.pread(printed, 1000, 0)


def knock(name):
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"\0nanoparallel-{name}")
    stranger.settimeout(HANG)
    return stranger


def test_strangers_are_not_let_in_and_cost_nothing():
    """500 of the same user, who say nothing: each is shown out before the peer comes."""
    with two(doors) as [(_, first), (_, second)]:
        name = said(first)
        said(second)
        strangers = [knock(name) for _ in range(500)]
        for stranger in strangers:
            with stranger:
                assert stranger.recv(1) == b""  # closed
        second.send("go on")
        with_strangers, without = said(first), said(second)
        assert with_strangers == without  # no open file more
        assert with_strangers[:2] == ([3.0], 1) and with_strangers[3] == b""
        with pytest.raises(ConnectionRefusedError):
            knock(name)  # once the peers are in, nobody is


@pytest.mark.parametrize("strangers", [False, True])
def test_a_peer_that_never_connects_is_given_up_after_the_timeout(strangers):
    """Strangers that knock all the time do not put the end off."""
    with two(doors, 2) as [(_, first), (_, second)]:
        name = said(first)
        said(second)
        with suppress(OSError):  # once the door is gone
            while strangers and not first.poll():
                knock(name).close()
        assert said(first) == "rank 0: joining group world: not within 2 s"


def test_a_process_of_another_user_is_a_stranger():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert shared_memory.process_at(ours) == os.getpid()
        with patch.object(os, "getuid", lambda: 12345):
            assert shared_memory.process_at(ours) is None


# ---- work in the background ----


def background():
    return Background(torch.device("cpu"))


def test_functions_run_in_order_while_their_caller_goes_on():
    """The first function ends only when the caller, who has started them all, lets it."""
    runner, go_on, ran = background(), threading.Event(), []
    runner.start(lambda: ran.append(go_on.wait(HANG)))
    waits = [runner.start(ran.append, i) for i in range(200)]
    assert not ran
    go_on.set()
    waits[-1]()
    assert ran == [True, *range(200)]
    waits[-1]()  # a second call returns at once


def test_an_error_is_raised_at_the_wait_and_all_that_comes_later_fails_with_it():
    """The groups are out of step with those of other ranks then."""
    def fail():
        raise c.CommunicationError("the peer has gone")

    runner, ran = background(), []
    fine, failing, later = (runner.start(ran.append, 1), runner.start(fail),
                            runner.start(ran.append, 2))
    for wait in (failing, failing, later, runner.start(ran.append, 3)):
        with pytest.raises(c.CommunicationError, match="^the peer has gone$"):
            wait()
    fine()
    assert ran == [1]
