"""Messages between ranks of one machine, through memory that both have mapped. To learn how
training is distributed, skip this file: it is about Linux.

gloo sends through the kernel's TCP sockets: each byte is copied twice there, and a thread wakes on
both sides. Here two ranks of a group share a link: buffers that both processes have mapped, and for
each direction a Unix socket, made in connect.py, that carries the buffers' numbers.

    rank 0                                        rank 1
    send       --- buffer 3, 4096 bytes ----->    receive       buffer 3 holds a piece
               <-- 3 -------------------------                  buffer 3 is free again
    buffers 0 1 2 3      the same pages of        buffers 0 1 2 3
                         memory as those

    send       copies a piece into a free buffer and sends the buffer's number: waits for no
               receiver, until some 270 numbers are unread (push)
    receive    sleeps until a number comes, then combines straight out of the sender's buffer

A long message travels in pieces, short enough to be still in the CPU's cache when the receiver
reads them. An exchange first sends AHEAD pieces, then one after each piece that it receives. So a
link holds few buffers, unless a sender runs ahead of its receiver. Five pieces each way (s0: send
piece 0; r0: receive piece 0):

    exchange()    s0 s1
    wait()        r0 s2 r1 s3 r2 s4 r3 r4

A receiver wakes at once if its peer dies. No buffer has a name (memfd_create) and no socket a file
(abstract names): nothing outlives the processes. A link serves one thread at a time.
"""

import os
import select
import socket
import struct
import time
from array import array
from collections import deque
from contextlib import contextmanager, suppress

import torch

PIECE_SENT = struct.Struct("<II")  # number of the buffer that holds the piece; bytes of the piece
NUMBER = struct.Struct("<I")  # of a buffer that is free again
MOST_NUMBERS = 1024  # in a packet
PIECE = 2 << 20  # bytes of a buffer, of which a piece of a message takes as many as it needs
AHEAD = 2  # pieces that an exchange sends before the first one that it receives has come


def pieces_of(tensor):
    """The tensor's pieces: flat views. `.data`: autograd must not track what is written."""
    if not tensor.is_contiguous():
        raise RuntimeError("messages take contiguous tensors")
    return tensor.data.view(-1).split(PIECE // tensor.element_size())


def mapped(file):
    """A buffer: an open file of shared memory as a tensor of bytes. Closes the file; the mapping
    stays."""
    try:
        # The first message may come in inference mode, which the buffer outlives
        with torch.inference_mode(False):
            # (Python's mmap would keep a file open for each buffer)
            path = f"/proc/self/fd/{file}"
            return torch.from_file(path, shared=True, size=PIECE, dtype=torch.uint8)
    finally:
        os.close(file)


@contextmanager
def errors_of_sockets(timeout):
    """Re-raise errors of sockets as RuntimeErrors, like gloo's. (Group and Work add rank and peer.)
    """
    try:
        yield
    except (BlockingIOError, TimeoutError):  # also by SO_RCVTIMEO, which connect.py sets
        raise RuntimeError(f"not within {timeout:g} s") from None
    except (ConnectionError, EOFError):
        raise RuntimeError("connection closed by peer") from None
    except OSError as error:
        raise RuntimeError(error.strerror or str(error)) from None


class Receive:
    """A receive that was posted: pieces of a tensor that are still to come, and how to merge them.
    """

    def __init__(self, tensor, combine):
        self.missing = deque(pieces_of(tensor))
        self.combine = combine or torch.Tensor.copy_


class Link:
    """The messages between this rank and a peer of its group."""

    def __init__(self, outgoing, incoming, timeout, links):
        """outgoing: the socket over which this rank's messages go and its buffers' numbers come
        back; incoming: the same for the peer's messages. links: the links of the group, to which
        later ones are added."""
        self.outgoing, self.incoming, self.timeout, self.links = outgoing, incoming, timeout, links
        self.buffers = []  # this rank's, which the peer reads
        self.free = []  # the numbers of those that are free
        self.unsent = deque()  # pieces that are still to be sent
        self.theirs = []  # the peer's buffers
        self.posted = deque()  # Receives in the order of posting, in which messages come
        self.arrived = deque()  # (buffer, bytes) of pieces that came while a send waited
        self.to_give_back = []  # numbers of the peer's buffers that this rank has read

    # ---- send ----

    def send(self, count):
        """Send the next `count` of the unsent pieces, or as many as there are."""
        for _ in range(min(count, len(self.unsent))):
            piece = self.unsent.popleft().view(torch.uint8)
            length = piece.numel()
            number, files = self.free_buffer()
            self.buffers[number][:length].copy_(piece)
            self.push(PIECE_SENT.pack(number, length), files)

    def free_buffer(self):
        """(its number, [its open file] if it is new and the peer has yet to map it)."""
        if not self.free:
            self.take_back()
        if self.free:
            return self.free.pop(), []  # the one that came back last may still be in the cache
        file = os.memfd_create("nanoparallel")
        os.ftruncate(file, PIECE)
        self.buffers.append(mapped(os.dup(file)))  # dup: mapped() closes its file
        return len(self.buffers) - 1, [file]

    def take_back(self):
        """Read the numbers of buffers that are free again."""
        with suppress(BlockingIOError):  # the usual end: no more numbers
            while packet := self.outgoing.recv(NUMBER.size * MOST_NUMBERS, socket.MSG_DONTWAIT):
                self.free += [number for number, in NUMBER.iter_unpack(packet)]
            raise EOFError  # an empty packet: the peer has ended

    def push(self, packet, files):
        """Send a packet, and beside it open files: the peer gets copies of them. A socket holds
        some 270 packets that the peer has not read (the kernel's limit)."""
        deadline = time.monotonic() + self.timeout
        alive = [*self.links]  # links whose peers are not known to have ended
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))]
        while True:
            try:
                # (Python's socket.send_fds forgets its flags: it would wait)
                self.outgoing.sendmsg([packet], beside, socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                self.wait_for_room(alive)
        for file in files:
            os.close(file)

    def wait_for_room(self, alive):
        """Wait until the full socket has room, or a peer of this group has sent a piece; read that
        piece. So two ranks that both send more than a socket holds cannot block each other. (A
        circular wait through several groups is not broken: it needs ranks 270 packets apart.)
        alive: links; those whose peers have ended are removed."""
        poll = select.poll()
        poll.register(self.outgoing, select.POLLOUT)
        for link in alive:
            poll.register(link.incoming, select.POLLIN)
        ready = {file for file, _ in poll.poll(1e3 * self.timeout)}
        for link in [each for each in alive if each.incoming.fileno() in ready]:
            try:
                link.arrived.append(link.next_piece())
            except EOFError:  # the link's own receive will say so
                alive.remove(link)

    # ---- receive ----

    def receive_piece(self):
        """Wait for the next piece, and give it to the receive that was posted first."""
        number, length = self.arrived.popleft() if self.arrived else self.next_piece()
        first = self.posted[0]
        into = first.missing.popleft()
        if length != into.nbytes:
            raise RuntimeError(f"a message of {length} bytes for a tensor of {into.nbytes}")
        first.combine(into, self.theirs[number][:length].view(into.dtype))
        if not first.missing:
            self.posted.popleft()
        self.to_give_back.append(number)
        # Numbers for which the socket has no room go back with the next, in one packet. A sender
        # that has ended needs no buffers
        with suppress(BlockingIOError, ConnectionError):
            while self.to_give_back:
                packed = [NUMBER.pack(number) for number in self.to_give_back[:MOST_NUMBERS]]
                self.incoming.send(b"".join(packed), socket.MSG_DONTWAIT)
                del self.to_give_back[:MOST_NUMBERS]

    def next_piece(self):
        """Wait for the next piece. Returns (number of its buffer, bytes). The file of a new buffer
        comes with its first piece: map the buffer, and close the file."""
        while True:
            # The kernel reports once that the peer has ended without reading all numbers: try
            # again, because what the peer has sent is still here
            with suppress(ConnectionResetError):
                packet, files, _, _ = socket.recv_fds(self.incoming, PIECE_SENT.size, 1)
                if not packet:
                    raise EOFError
                self.theirs += [mapped(file) for file in files]
                return PIECE_SENT.unpack(packet)


class SharedMemory:
    """Carries the messages of a group: through links to the peers on this machine, and through
    `others`, gloo, to the rest."""

    def __init__(self, links, others, timeout):
        self.links = links  # {peer: Link}
        self.others = others
        self.timeout = timeout
        self.start_read = others.start_read

    def exchange(self, send, dst, recv, src, combine):
        """Like Gloo.exchange (gloo.py). Without a receive all pieces of the send leave at once.
        Beside a receive AHEAD pieces do, and then one for each piece that has come."""
        to = self.links.get(dst) if send is not None else None
        source = self.links.get(src) if recv is not None else None
        wait_for_others = None  # a peer on another machine: gloo carries that message
        if (send is not None and not to) or (recv is not None and not source):
            wait_for_others = self.others.exchange(None if to else send, dst,
                                                   None if source else recv, src, combine)
        with errors_of_sockets(self.timeout):
            if to:
                to.unsent.extend(pieces_of(send))
                to.send(AHEAD if source else len(to.unsent))
            if source:
                receive = Receive(recv, combine)
                source.posted.append(receive)

        def wait():
            with errors_of_sockets(self.timeout):
                while source and receive.missing:
                    source.receive_piece()
                    if to:
                        to.send(1)
                if to:
                    to.send(len(to.unsent))
            if wait_for_others:
                wait_for_others()

        return wait
