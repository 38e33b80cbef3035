"""Messages between ranks of one machine, through memory that both have mapped.

gloo sends through the kernel's TCP sockets: each byte is copied twice there, and a thread wakes on
both sides. Here two ranks of a group share a link: buffers that both processes have mapped, and for
each direction a Unix socket that carries the buffers' numbers.

    rank 0                                        rank 1
    send       --- buffer 3, 4096 bytes ----->    receive       buffer 3 holds a message
               <-- 3 -------------------------                  buffer 3 is free again
    buffers 0 1 2 3      the same pages of        buffers 0 1 2 3
                         memory as those

    send       copies a piece into a free buffer and sends its number: waits for no receiver
    receive    sleeps until a number comes, then combines straight out of the sender's buffer

A long message travels in pieces, which stay in the cache from one rank's copy to the next one's.
What one exchange sends and receives moves in turn: AHEAD pieces leave at once, and one more for
each piece that has come. So a link holds few buffers, unless a sender runs ahead of its receiver. A
receiver wakes at once if its peer dies. No buffer has a name (memfd_create) and no socket a file
(abstract names): nothing outlives the processes. A link serves one thread at a time.
"""

import json
import os
import secrets
import select
import socket
import struct
import time
from array import array
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

MESSAGE = struct.Struct("<II")  # number of the buffer; bytes of the message
NUMBER = struct.Struct("<I")  # of a buffer that is free again
CREDENTIALS = struct.Struct("3i")  # process, user, group: what SO_PEERCRED returns
# A socket of these keeps packets apart: one recv() returns one packet, and an empty one if the peer
# has closed its end
PACKETS = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
MOST = 1024  # numbers in a packet
PIECE = 2 << 20  # bytes of a buffer, of which a piece of a message takes as many as it needs
AHEAD = 2  # pieces that an exchange sends before the first one that it receives has come


def pieces_of(tensor):
    """The tensor's pieces: flat views. `.data`: autograd does not see who writes them."""
    if not tensor.is_contiguous():
        raise RuntimeError("messages take contiguous tensors")
    return tensor.data.view(-1).split(PIECE // tensor.element_size())


def mapped(file):
    """A buffer: an open file of shared memory as a tensor of bytes. Closes the file; the mapping
    stays."""
    try:
        with torch.inference_mode(False):  # the buffer outlives the mode of the first message
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
    except (BlockingIOError, TimeoutError):  # also by SO_RCVTIMEO, which connect() sets
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
        back; incoming: the same for the peer's messages. links: all links of the group."""
        self.outgoing, self.incoming, self.timeout, self.links = outgoing, incoming, timeout, links
        self.buffers = []  # this rank's, which the peer reads
        self.free = []  # the numbers of those that are free
        self.unsent = deque()  # pieces that are still to be sent
        self.theirs = []  # the peer's buffers
        self.posted = deque()  # Receives in the order of posting, in which messages come
        self.arrived = deque()  # messages read while a send found its socket full
        self.to_give_back = []  # numbers of the peer's buffers that this rank has read

    # ---- send ----

    def send(self, most):
        """Send the next `most` of the unsent pieces."""
        for _ in range(min(most, len(self.unsent))):
            piece = self.unsent.popleft().view(torch.uint8)
            length = piece.numel()
            number, files = self.free_buffer()
            self.buffers[number][:length].copy_(piece)
            self.push(MESSAGE.pack(number, length), files)

    def free_buffer(self):
        """(its number, [its open file] if it is new and the peer has yet to map it)."""
        if not self.free:
            self.take_back()
        if self.free:
            return self.free.pop(), []  # the one that came back last may still be in the cache
        file = os.memfd_create("nanoparallel")
        os.ftruncate(file, PIECE)
        self.buffers.append(mapped(os.dup(file)))
        return len(self.buffers) - 1, [file]

    def take_back(self):
        """Read the numbers of buffers that are free again."""
        with suppress(BlockingIOError):
            while packet := self.outgoing.recv(NUMBER.size * MOST, socket.MSG_DONTWAIT):
                self.free += [number for number, in NUMBER.iter_unpack(packet)]
            raise EOFError

    def push(self, packet, files):
        """Send a packet, and beside it open files: the peer gets copies of them. A socket holds
        some 270 packets that the peer has not read. While this one is full, read what the peers of
        this group have sent, so that two ranks that send to each other cannot block each other. (A
        circle through several groups is not handled: some ranks would be 270 messages apart.)"""
        deadline = time.monotonic() + self.timeout
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))]
        while True:
            try:
                # (Python's socket.send_fds forgets its flags: it would wait)
                self.outgoing.sendmsg([packet], beside, socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                poll = select.poll()
                poll.register(self.outgoing, select.POLLOUT)
                for link in self.links:
                    poll.register(link.incoming, select.POLLIN)
                ready = {file for file, _ in poll.poll(1e3 * self.timeout)}
                for link in self.links:
                    if link.incoming.fileno() in ready:
                        with suppress(EOFError):  # its own receive will say so
                            link.arrived.append(link.next_message())
        for file in files:
            os.close(file)

    # ---- receive ----

    def receive_piece(self):
        """Wait for the next piece, and give it to the receive that was posted first."""
        number, length = self.arrived.popleft() if self.arrived else self.next_message()
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
                packet = b"".join(NUMBER.pack(number) for number in self.to_give_back[:MOST])
                self.incoming.send(packet, socket.MSG_DONTWAIT)
                del self.to_give_back[:MOST]

    def next_message(self):
        """(number of the buffer, bytes), as soon as the peer has sent a message. Maps a new buffer,
        so that its file need not stay open."""
        while True:
            # The kernel reports once that the peer has ended without reading all numbers: try
            # again, because what the peer has sent is still here
            with suppress(ConnectionResetError):
                packet, files, _, _ = socket.recv_fds(self.incoming, MESSAGE.size, 1)
                if not packet:
                    raise EOFError
                self.theirs += [mapped(file) for file in files]
                return MESSAGE.unpack(packet)


class SharedMemory:
    """Carries the messages of a group: through links to the peers on this machine, and through
    `others`, gloo, to the rest."""

    def __init__(self, links, others, timeout):
        self.links = links  # {peer: Link}
        self.others = others
        self.timeout = timeout
        self.start_read = others.start_read

    def exchange(self, send, dst, recv, src, combine):
        """Like Gloo.exchange. A send alone leaves at once; of a send beside a receive AHEAD pieces
        do, and another one for each piece that has come."""
        to = self.links.get(dst) if send is not None else None
        source = self.links.get(src) if recv is not None else None
        rest = None
        if (send is not None and not to) or (recv is not None and not source):
            rest = self.others.exchange(None if to else send, dst, None if source else recv, src,
                                        combine)
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
            if rest:
                rest()

        return wait


# ---- who can share memory with this rank ----


def machine():
    """What two ranks have in common if they can share memory: the machine since its last start, the
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


def connected(name):
    """A socket that is connected to the listening socket of this name."""
    end = socket.socket(*PACKETS)
    end.connect(f"\0nanoparallel-{name}")
    return end


def connect(communicator, rank, timeout):
    """Collective: {peer: Link} to the ranks of a group that can share memory with this one.

    The ranks tell each other through gloo where they are, their process numbers and the random
    names of their listening sockets. Each connects to the ranks before it, twice, once for each
    direction, and accepts the ranks after it. No rank waits in a circle: each listens before it
    tells its name, and connecting needs no accept. The kernel says which process has connected, so
    a connection need not say anything, and that of a process that is no rank is closed."""
    mine = machine()
    name = secrets.token_hex(8)
    listener = None
    if mine:
        listener = socket.socket(*PACKETS)
        listener.bind(f"\0nanoparallel-{name}")
        listener.listen(4096)
    told = tell_all(communicator, [mine, os.getpid(), name])
    peers = {number: process for number, (place, process, _) in enumerate(told)
             if mine and place == mine and number != rank}
    ends = {number: [] for number in peers}  # of each peer the two sockets, in order of connection
    with errors_of_sockets(timeout):
        for number in peers:
            if number < rank:
                ends[number] = [connected(told[number][2]), connected(told[number][2])]
        deadline = time.monotonic() + timeout
        while any(len(pair) < 2 for pair in ends.values()):
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            end, _ = listener.accept()
            process = process_at(end)
            number = next((n for n in peers if peers[n] == process and len(ends[n]) < 2), None)
            if number is None:
                end.close()
            else:
                ends[number].append(end)
    if listener:
        listener.close()
    # The longest that a receive blocks, as C's timeval: seconds, microseconds
    limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
    links = {}
    for number, (first, second) in ends.items():
        for end in (first, second):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        # The first socket carries the messages of the lower rank, the second the other's
        outgoing, incoming = (first, second) if rank < number else (second, first)
        # links.values(): a view, which has all links once this loop has ended
        links[number] = Link(outgoing, incoming, timeout, links.values())
    return links
