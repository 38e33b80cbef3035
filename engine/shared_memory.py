"""Messages between ranks of one machine, through memory that both have mapped.

gloo sends them through the kernel's TCP sockets: each byte is copied twice there, and a thread of
gloo wakes on both sides. Here a link joins two ranks of a group, in one direction: a Unix socket
for numbers, and buffers that both processes have mapped.

    rank 0                                        rank 1
    Outgoing   --- buffer 3, 4096 bytes ----->    Incoming      buffer 3 holds a message
               <-- 3 -------------------------                  buffer 3 is free
    buffers 0 1 2 3      the same pages of        buffers 0 1 2 3
                         memory as those

    send       copies the tensor into a free buffer, and writes the buffer's number to the socket
    receive    reads the number; copies from the buffer, or adds; writes the number back

A send does not wait for the receiver: a link has as many buffers as it ever had messages on their
way. A receiver sleeps in the kernel until a number comes, and wakes at once if the peer dies. No
buffer has a name (memfd_create), no socket a file (abstract names): nothing outlives the processes.

Who may connect: a process of the same user that knows the random token of this rank. The ranks tell
each other their tokens through gloo.
"""

import mmap
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import torch

from collectives import all_gather

MESSAGE = struct.Struct("<IQQ")  # number of the buffer; bytes of the message; bytes of the buffer
NUMBER = struct.Struct("<I")  # of a buffer that is free again; of a rank
CREDENTIALS = struct.Struct("3i")  # process, user, group: what SO_PEERCRED returns
TOKEN = 16  # bytes
WAITING = 64  # connections that have not said yet who they are; older ones are closed


def content(tensor):
    """The tensor's bytes. `.data`: autograd does not see who writes them, as with gloo."""
    if not tensor.is_contiguous():
        raise RuntimeError("messages take contiguous tensors")
    return tensor.data.view(-1).view(torch.uint8)


def room(length):
    """Bytes of the buffer for a message: an eighth more at most, and whole pages, so that messages
    of nearly one length share their buffers."""
    step = max(mmap.PAGESIZE, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def mapped(file, size):
    """An open file of shared memory as a tensor of bytes. Closes the file; the mapping stays."""
    try:
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)


@contextmanager
def errors_of_sockets():
    """OSErrors as RuntimeErrors, like those of gloo: group.naming adds rank and operation."""
    try:
        yield
    except (ConnectionError, EOFError):
        raise RuntimeError("connection closed by peer") from None
    except OSError as error:
        raise RuntimeError(error.strerror or str(error)) from None


# ---- a link ----


class Outgoing:
    """The sender's end of a link."""

    def __init__(self, neighbours, group, peer):
        with errors_of_sockets():
            self.socket = neighbours.connect(peer, group)
        neighbours.ends.append(self.socket)
        self.neighbours = neighbours
        self.buffers = []
        self.free = {}  # bytes of a buffer -> the numbers of those that are free
        self.unsent = deque()  # (packet, files) that the socket has no room for
        self.lock = threading.Lock()  # a thread that sleeps sends what another left unsent

    def send(self, tensor):
        """Copy the tensor into a buffer and send the buffer's number."""
        message = content(tensor)
        size = room(message.numel())
        with errors_of_sockets():
            with self.lock:
                self.take_back()
                free = self.free.setdefault(size, [])
                # The buffer that came back last may still be in the cache
                number, files = (free.pop(), []) if free else self.new_buffer(size)
                self.buffers[number][: message.numel()].copy_(message)
                self.unsent.append((MESSAGE.pack(number, message.numel(), size), files))
            self.flush()

    def new_buffer(self, size):
        """(its number, [its open file], for the peer). A page takes memory once it was written."""
        file = os.memfd_create("nanoparallel")
        os.ftruncate(file, size)
        self.buffers.append(mapped(os.dup(file), size))
        return len(self.buffers) - 1, [file]

    def take_back(self):
        """Read the numbers of buffers that are free again."""
        while True:
            try:
                packet = self.socket.recv(NUMBER.size)
            except BlockingIOError:
                return
            if not packet:
                raise EOFError
            number, = NUMBER.unpack(packet)
            self.free[self.buffers[number].numel()].append(number)

    def flush(self):
        """Send what is unsent, as much as the socket takes."""
        with self.lock:
            while self.unsent:
                packet, files = self.unsent[0]
                try:
                    socket.send_fds(self.socket, [packet], files)
                except BlockingIOError:
                    self.neighbours.full.add(self)
                    return
                self.unsent.popleft()
                for file in files:
                    os.close(file)
            self.neighbours.full.discard(self)

    def wait(self):
        """Wait until the numbers of all messages have left: nearly always they have. (A socket
        holds a few hundred that the peer has not read.)"""
        deadline = time.monotonic() + self.neighbours.timeout
        with errors_of_sockets():
            while self.unsent:
                self.neighbours.sleep([], deadline)


class Receive:
    """A receive that was posted. combine(tensor, message), if given, takes the place of a copy."""

    def __init__(self, link, tensor, combine):
        self.link, self.tensor, self.combine = link, tensor, combine
        self.content = content(tensor)
        self.is_done = False

    def wait(self):
        with errors_of_sockets(), self.link.lock:
            self.link.read_until_done(self)


class Incoming:
    """The receiver's end of a link. Messages go to the receives in the order of posting, whichever
    is waited for first."""

    def __init__(self, neighbours, group, peer):
        self.neighbours, self.group, self.peer = neighbours, group, peer
        self.socket = None  # until the first message is awaited
        self.buffers = []
        self.posted = deque()
        self.read = deque()  # numbers of buffers to give back
        self.lock = threading.Lock()  # held by the thread that reads

    def post(self, tensor, combine):
        self.posted.append(Receive(self, tensor, combine))
        return self.posted[-1]

    def read_until_done(self, receive):
        if not self.socket:
            self.socket = self.neighbours.accept(self.peer, self.group)
        while not receive.is_done:
            first = self.posted[0]
            self.deliver(first, *self.next_packet())
            first.is_done = True
            self.posted.popleft()

    def next_packet(self):
        """(packet, files) from the socket, as soon as there is one."""
        deadline = time.monotonic() + self.neighbours.timeout
        while True:
            try:
                packet, files, _, _ = socket.recv_fds(self.socket, MESSAGE.size, 1)
            except BlockingIOError:
                self.neighbours.sleep([self.socket], deadline)
                continue
            except ConnectionResetError:  # said once: the sender has ended without reading all
                continue  # numbers; what it sent is still here
            if not packet:
                raise EOFError
            return packet, files

    def deliver(self, receive, packet, files):
        number, length, size = MESSAGE.unpack(packet)
        self.buffers += [mapped(file, size) for file in files]
        if number >= len(self.buffers):  # Linux drops a file that this process may not open
            raise RuntimeError(f"buffer {number} has not come: too many open files (ulimit -n)?")
        if length != receive.content.numel():
            raise RuntimeError(f"a message of {length} bytes for a tensor of "
                               f"{receive.content.numel()}")
        message = self.buffers[number][:length]
        if receive.combine:
            receive.combine(receive.tensor,
                            message.view(receive.tensor.dtype).view_as(receive.tensor))
        else:
            receive.content.copy_(message)
        self.read.append(number)
        # What cannot be given back now is given back with the next. A sender that has ended needs
        # no buffers
        with suppress(BlockingIOError, ConnectionError):
            while self.read:
                self.socket.send(NUMBER.pack(self.read[0]))
                self.read.popleft()


# ---- who is on this machine ----


def machine():
    """16 bytes that processes of one machine share: of its name, and of the number that Linux draws
    when it starts. Where something is missing (macOS has no memfd_create) no two are equal."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not (hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED") and boot.exists()):
        return secrets.token_bytes(16)
    return sha256(f"{socket.gethostname()} {boot.read_text()}".encode()).digest()[:16]


def abstract_name(address):
    """A socket's abstract name, which is no file."""
    return b"\0nanoparallel-" + address.hex().encode()


class Neighbours:
    """The ranks that this rank can reach through shared memory, and its door: the socket at which
    they connect."""

    def __init__(self, world, timeout):
        """Collective. The ranks tell each other their machines, tokens and addresses; each tries to
        connect to all others of its machine; two that reached each other are neighbours. timeout:
        seconds that a wait may last."""
        self.rank, self.timeout = world.rank, timeout
        self.full = set()  # the Outgoings that have something unsent
        self.arrived = {}  # (rank, group) -> a socket for which no Incoming has asked yet
        self.waiting = []  # sockets at the door that have not said yet who they are
        self.lock = threading.Lock()  # of arrived and waiting
        self.ends = []  # sockets to close
        here, self.token, address = machine(), secrets.token_bytes(TOKEN), secrets.token_bytes(8)
        self.door = self.open_door(address)
        cards = torch.empty(world.size, 16 + TOKEN + 8, dtype=torch.uint8)
        cards[self.rank] = torch.frombuffer(bytearray(here + self.token + address),
                                            dtype=torch.uint8)
        cards = [bytes(card) for card in all_gather(cards, world).tolist()]
        self.cards = [(card[16 : 16 + TOKEN], card[16 + TOKEN :]) for card in cards]
        reached = torch.zeros(world.size, world.size, dtype=torch.bool)
        for peer, card in enumerate(cards):
            if self.door and peer != self.rank and card[:16] == here:
                reached[self.rank, peer] = self.can_reach(peer)
        all_gather(reached, world)
        # The pairs of neighbours, of all ranks
        self.pairs = {*map(tuple, (reached & reached.T).nonzero().tolist())}
        if self.door:
            self.look_outside()

    def are(self, rank, other):
        """Are these two ranks of the world neighbours?"""
        return (rank, other) in self.pairs

    def open_door(self, address):
        """A socket that listens; None where there are no such sockets."""
        try:
            door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            door.bind(abstract_name(address))
        except (OSError, AttributeError):
            return None
        self.ends.append(door)
        door.listen(4096)
        door.setblocking(False)
        return door

    def connect(self, peer, group):
        """A socket to a rank, for the messages of a group."""
        token, address = self.cards[peer]
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.settimeout(self.timeout)
            link.connect(abstract_name(address))
            link.sendall(token + NUMBER.pack(self.rank) + group.encode())
            link.setblocking(False)
        except OSError:
            link.close()
            raise
        return link

    def can_reach(self, peer):
        try:
            self.connect(peer, "").close()
        except OSError:
            return False
        return True

    def accept(self, peer, group):
        """Wait for the socket that this peer connects, for the messages of a group."""
        deadline = time.monotonic() + self.timeout
        alive, has_ended = None, False  # alive: a socket to the peer, which ends when the peer does
        try:
            while True:
                with self.lock:
                    self.look_outside()
                    link = self.arrived.pop((peer, group), None)
                if link:
                    return link
                if has_ended:  # before the last look outside
                    raise EOFError
                try:
                    alive = alive or self.connect(peer, "")
                    # Not for long: another thread may let in whom this thread waits for
                    has_ended = alive in self.sleep([self.door, alive, *self.waiting], deadline,
                                                    most=0.05)
                except ConnectionError:
                    has_ended = True
        finally:
            if alive:
                alive.close()

    def look_outside(self):
        """Let in who stands at the door and knows the token; send strangers away, with a line."""
        while True:
            try:
                link, _ = self.door.accept()
            except BlockingIOError:
                break
            link.setblocking(False)
            self.waiting.append(link)
        for link in [*self.waiting]:
            try:
                said = link.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                said = b""
            self.waiting.remove(link)
            self.let_in(link, said)
        while len(self.waiting) > WAITING:
            self.waiting.pop(0).close()

    def let_in(self, link, said):
        _, user, _ = CREDENTIALS.unpack(
            link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        token, words = said[:TOKEN], said[TOKEN:]
        if user != os.getuid() or not secrets.compare_digest(token, self.token):
            print(f"rank {self.rank}: a stranger (user {user}) tried to connect to its messages",
                  file=sys.stderr, flush=True)
            link.close()
            return
        self.ends.append(link)
        peer, = NUMBER.unpack(words[: NUMBER.size])
        group = words[NUMBER.size :].decode()
        if group:  # else the peer tries whether it can connect, or waits for this rank's end
            self.arrived[peer, group] = link

    def sleep(self, sockets, deadline, most=None):
        """Sleep until one of the sockets has something to read, or has ended, or one that was full
        has room; return those of `sockets`. most: seconds."""
        left = deadline - time.monotonic()
        if left < 0:
            raise RuntimeError(f"not within {self.timeout:g} s")
        poll = select.poll()
        for one in sockets:
            poll.register(one, select.POLLIN)
        full = [*self.full]
        for link in full:
            poll.register(link.socket, select.POLLOUT)
        ready = {file for file, _ in poll.poll(1e3 * min(left, most or left))}
        for link in full:
            link.flush()
        return [one for one in sockets if one.fileno() in ready]

    def close(self):
        for one in [*self.ends, *self.waiting]:
            one.close()
