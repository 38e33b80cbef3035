"""Groups of ranks, and collectives by hand: all_reduce and its family, from sends and receives.

A rank is one process. A collective is an operation that all ranks of a group call in the same
order. Every message passes Group.exchange, where bytes are counted (but for torch's own
collectives, --collectives native, the default on GPUs). A tensor of n bytes is cut into N chunks
(torch.tensor_split, so any n); rank r owns chunk r. Sent by each rank:

    reduce_scatter    rank r ends with chunk r of the sum                 n (N-1)/N
    all_gather        each rank's own chunk is copied to all ranks        n (N-1)/N
    all_reduce        all ranks end with the sum of all: the two above    2 n (N-1)/N
    all_to_all        rank i's j-th tensor, of n/N bytes, goes to rank j  n (N-1)/N   always ours

No all-reduce can send less (Patarasuk and Yuan 2009). The ring takes 2 (N-1) hops: in a hop each
rank sends one message, which takes latency + n/N / bandwidth. (Two ranks take one hop, with n
bytes: all_reduce_of_two.) All ranks end with the same bits.

    python -m extras.show collectives  a ring of 4 processes, hop by hop, and the bytes it sends
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from transport.errors import reason_in

# ---- errors of one line ----


class CommunicationError(RuntimeError):
    """A rank died, hung or never joined: one line that names rank, operation and peer."""


@contextmanager
def naming(what):
    """Re-raise a RuntimeError, of torch or of a collective, as a CommunicationError that names
    `what`."""
    try:
        yield
    except (CommunicationError, torch.OutOfMemoryError):  # a full GPU is no error of a message
        raise
    except RuntimeError as error:
        raise CommunicationError(f"{what}: {reason_in(str(error))}") from error


# ---- messages ----


class Work:
    """A pending operation. Do not touch its tensors before wait() has returned."""

    def __init__(self, finish, what):
        self.finish = finish  # a function that blocks until the operation is complete
        self.what = what  # names the operation in an error

    def wait(self):
        """Block until the operation is complete. (On a GPU: let the current stream wait for it.) A
        second call returns at once."""
        if self.finish:
            with naming(self.what):
                self.finish()
            self.finish = None


def wait_all(works):
    for work in works:
        work.wait()


class Group:
    """Some ranks in a ring order. `rank`, and each peer that a method takes, counts within the
    group: 0 .. size - 1.

    A group of one sends nothing, and on a CPU it has no carrier. Collectives accept such a group;
    exchange() is for groups of two and more."""

    def __init__(self, name, device, ranks, rank, carrier=None, native_group=None):
        self.name = name
        self.device = device
        self.ranks = list(ranks)  # ranks of the group, numbered as in the world
        self.rank = rank  # this process's place in the group
        self.size = len(self.ranks)
        self.next = (rank + 1) % self.size
        self.prev = (rank - 1) % self.size
        self.carrier = carrier  # moves the messages (transport/)
        # torch's ProcessGroup, if the collectives are to be torch's own (--collectives native)
        self.native_group = native_group
        self.bytes_sent = 0  # by this rank, in all messages of exchange()

    def exchange(self, send=None, dst=None, recv=None, src=None, combine=None):
        """Start a send of the tensor `send` to rank dst, and a receive into `recv` from rank src;
        either may be None. Both are contiguous; an empty tensor is not sent. combine(recv,
        received): how to merge what arrives, element by element and in place; None: recv is
        overwritten. With combine, and dst = src, send and recv may be one tensor: each element is
        sent before the received one is merged into it. Returns their Work.

        This may return before either message is complete; wait() then completes both together, so
        two ranks that exchange cannot block each other. Messages from one rank to another arrive in
        the order in which they were sent. A message carries no name: a receive takes the next one,
        whatever that was sent for."""
        what = f"rank {self.ranks[self.rank]}: group {self.name}"  # for an error
        if recv is not None and recv.numel() > 0:
            what += f", receive from rank {self.ranks[src]}"
        else:
            recv = None
        if send is not None and send.numel() > 0:
            what += f", send to rank {self.ranks[dst]}"
            self.bytes_sent += send.numel() * send.element_size()
        else:
            send = None
        with naming(what):
            return Work(self.carrier.exchange(send, dst, recv, src, combine), what)

    def send(self, tensor, dst):
        return self.exchange(send=tensor, dst=dst)

    def recv(self, tensor, src):
        return self.exchange(recv=tensor, src=src)

    def start_read(self, tensor):
        """Returns a function that returns the tensor's numbers. Do not change the tensor before
        calling that function: from a GPU the numbers are copied to the host meanwhile."""
        read = self.carrier.start_read(tensor) if self.carrier else tensor.tolist

        def named_read():
            with naming(f"rank {self.ranks[self.rank]}: group {self.name}"):
                return read()

        return named_read

    def read(self, tensor):
        """Wait for a tensor; return its numbers."""
        return self.start_read(tensor)()


class WithBackward(torch.autograd.Function):
    """How messages become part of a model. y = WithBackward.apply(x, forward, backward) computes
    y = forward(x); when autograd runs backward, grad_x = backward(grad_y)."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_of_x = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_of_x(grad), None, None


# ---- the ring ----
# In each hop of a ring every rank sends one chunk to the next rank and receives another one from
# the rank before, so all links are busy all the time. Reduce-scatter on four ranks: rank 0's tensor
# is a, rank 1's b, and so on; "2: d+a" is chunk 2, so far the sum of d's and a's chunk 2:
#
#             rank 0           rank 1           rank 2           rank 3
#    hop 0    sends 3: a       sends 0: b       sends 1: c       sends 2: d
#    hop 1    sends 2: d+a     sends 3: a+b     sends 0: b+c     sends 1: c+d
#    hop 2    sends 1: c+d+a   sends 2: d+a+b   sends 3: a+b+c   sends 0: b+c+d
#    after    0 is complete    1 is complete    2 is complete    3 is complete


def flat_view(tensor):
    """A view with one dim, which the collectives cut and change in place. ValueError, before
    anything is sent, if the tensor is not contiguous, such as a transposed one."""
    if not tensor.is_contiguous():
        raise ValueError(f"a collective cannot take a tensor {list(tensor.shape)} with strides "
                         f"{list(tensor.stride())}; pass tensor.contiguous()")
    return tensor.view(-1)


def own_chunk(tensor, group):
    """The chunk of a contiguous tensor that this rank owns: a flat view."""
    return flat_view(tensor).tensor_split(group.size)[group.rank]


def maximum(into, received):
    """A combine: all_reduce(tensor, group, maximum) gives every rank the largest of each number."""
    torch.maximum(into, received, out=into)


# Torch's own collectives (--collectives native). torch 2.13 renamed two of them
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# combine -> the same operation of torch. (KeyError: another combine needs --collectives ring)
OPERATIONS = {torch.Tensor.add_: dist.ReduceOp.SUM, maximum: dist.ReduceOp.MAX}


def run_native(collective, group, *args):
    """Run one of torch's own collectives. It bypasses exchange(): bytes_sent does not count it.
    (Those that cut a tensor take equal chunks only: where N does not divide, the ring runs.)"""
    with naming(f"rank {group.ranks[group.rank]}: group {group.name}, {collective.__name__}"):
        collective(*args, group=group.native_group)


def reduce_scatter(tensor, group, combine=torch.Tensor.add_):
    """In: every rank a full tensor. Out: on rank r, chunk r is the sum over all ranks; the other
    chunks are undefined (the ring leaves partial sums there). combine(into, received): how to merge
    a received chunk into the rank's own, element by element and in place; by default it is added.

    In a model (WithBackward) its backward is an all_gather: every rank has a term in each sum, and
    d(sum)/d(term) = 1, so a rank needs the gradients of all chunks."""
    N, r = group.size, group.rank
    if group.native_group and tensor.numel() % N == 0:
        run_native(REDUCE_SCATTER, group, own_chunk(tensor, group), flat_view(tensor),
                   OPERATIONS[combine])
        return tensor
    chunks = flat_view(tensor).tensor_split(N)  # flat views, as equal as n allows
    for hop in range(N - 1):  # N = 4, r = 1: sends chunks 0 3 2, receives and adds 3 2 1
        out = chunks[(r - 1 - hop) % N]
        into = chunks[(r - 2 - hop) % N]
        group.exchange(out, group.next, into, group.prev, combine).wait()
    return tensor


def all_gather(tensor, group):
    """In: on rank r, chunk r is valid. Out: every rank has all chunks.

    In a model its backward is a reduce_scatter, if each rank's loss is a term of the total loss:
    every rank used chunk r, so the chunk's gradient is the sum of the ranks' gradients."""
    N, r = group.size, group.rank
    if group.native_group and tensor.numel() % N == 0:
        own = own_chunk(tensor, group)
        # In torch's all-gather on CPUs input and output must not overlap
        run_native(ALL_GATHER, group, flat_view(tensor), own if own.is_cuda else own.clone())
        return tensor
    chunks = flat_view(tensor).tensor_split(N)  # flat views, as equal as n allows
    for hop in range(N - 1):  # N = 4, r = 1: sends chunks 1 0 3, receives 0 3 2
        out = chunks[(r - hop) % N]
        into = chunks[(r - 1 - hop) % N]
        group.exchange(out, group.next, into, group.prev).wait()
    return tensor


def all_reduce_of_two(tensor, group, combine):
    """All-reduce of two ranks in one hop, not two: each sends all that it has, and adds what it
    receives. The bytes are the ring's, and so are the bits, because a + b = b + a."""
    own = flat_view(tensor)
    group.exchange(own, group.next, own, group.prev, combine).wait()
    return tensor


def all_reduce(tensor, group, combine=torch.Tensor.add_):
    """In: every rank a full tensor. Out: every rank the sum, in place.

    In a model its backward depends on who uses the sum. If each rank's loss is a term of the total
    loss: an all_reduce of the gradients. If all ranks compute the same loss from the sum:
    no message, the gradient passes unchanged (sum_over_ranks in tensor_parallel.py)."""
    if group.native_group:
        run_native(dist.all_reduce, group, flat_view(tensor), OPERATIONS[combine])
        return tensor
    if group.size == 2:
        return all_reduce_of_two(tensor, group, combine)
    return all_gather(reduce_scatter(tensor, group, combine), group)


def all_to_all(outputs, inputs, group):
    """In: lists of N contiguous tensors; inputs[j] is for rank j. Out: outputs[i] is what rank i
    sent to this rank. Sends all inputs but this rank's own. Its backward is an all_to_all of the
    gradients."""
    N, r = group.size, group.rank
    outputs[r].copy_(inputs[r])
    works = []
    for distance in range(1, N):  # at each distance every rank sends one tensor and receives one
        to = (r + distance) % N
        source = (r - distance) % N
        works.append(group.exchange(inputs[to], to, outputs[source], source))
    wait_all(works)


# ---- from a root: one rank that has the tensor at first ----
# (Only extras/your_model.py needs these: in train.py each rank draws or reads its own slices.)


def scatter(tensor, group, root=0):
    """In: `root` a full tensor. Out: on rank r, chunk r is root's; other chunks are unchanged."""
    chunks = flat_view(tensor).tensor_split(group.size)
    if group.rank == root:
        wait_all([group.send(chunk, r) for r, chunk in enumerate(chunks) if r != root])
    else:
        group.recv(chunks[group.rank], root).wait()
    return tensor


def broadcast(tensor, group, root=0):
    """In: `root` a full tensor. Out: every rank has it. (Were the whole tensor sent to each rank,
    `root` would send n (N-1) bytes.)"""
    return all_gather(scatter(tensor, group, root), group)
