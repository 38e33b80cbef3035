"""A Group on NCCL (engine/group.py has the one on gloo). Skip it if you have no GPU.

    gloo (CPU)   a send completes when it meets its receive; wait() blocks the thread
    NCCL (CUDA)  between two ranks, operations are matched in the order in which both posted them;
                 there are no tags; wait() makes the current stream wait, and the host goes on

So no receive is posted early, and both directions of an exchange are posted as one batch; otherwise
two ranks that first send to each other would wait forever. InOrderGroup does this on CPU, too, so
tests run it without a GPU. CudaGroup adds the streams.
"""

import time
from collections import deque
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from engine.group import LIBRARY, Group, Work
from group import CommunicationError, naming


class InOrderGroup(Group):
    """Posts both directions of an exchange as one operation."""

    def post(self, ends):
        operations = [dist.P2POp(operation, tensor, group=self.communicator, group_peer=peer)
                      for operation, tensor, peer in ends]
        return dist.batch_isend_irecv(operations) if operations else []


def is_done(work, posted):
    """posted: the library's works. Has the device finished them? If so, calls work.wait(): if
    the operation failed and its owner has not waited for it yet, this raises its error. (If an
    operation fails after wait() has returned, NCCL's watchdog kills the process.)"""
    done = all(part.is_completed() for part in posted)
    if done:
        work.wait()
    return done


class CudaGroup(InOrderGroup):
    """Two more streams per group. Submitted collectives run on one, so that they overlap with
    compute. The pipeline's receives run on the other: on the compute stream a receive would start
    only after all computation that was posted before."""

    is_shared = True  # the host posts all messages, on every rank in one order
    runs_on_streams = True
    gathers_in_place = True

    def __init__(self, *args):
        super().__init__(*args)
        self.side_stream = None  # submit() runs jobs there; made when first used
        self.receive_stream = None  # recv_new() posts its receives there; made when first used
        self.ran_native = None  # the event of the last run_native()

    def track(self, work, posted):
        """Append a Work to mesh.pending, for start_read(); drop those that are done."""
        pending = self.mesh.pending
        while pending and is_done(*pending[0]):
            pending.popleft()
        pending.append((work, posted))

    def start_read(self, tensor):
        """Start to copy a tensor to the host. Returns a function, which waits for the copy, and so
        for what the current stream has until now, and returns the numbers. Operations on other
        streams may go on. The host waits for no message elsewhere, so a rank that died or hangs is
        noticed there."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=True)
        copied = self.record_event()
        before = deque(self.mesh.pending)

        def first_pending():
            """Names the first of these operations that the device has not finished; "" if there is
            none. CommunicationError if one failed."""
            while before:
                work, posted = before[0]
                with naming(work.what):
                    if not is_done(work, posted):
                        return work.what
                before.popleft()
            return ""

        def finish():
            start = time.monotonic()
            while not copied.query():
                waited = time.monotonic() - start
                pending = first_pending()
                if pending and waited > self.mesh.timeout:
                    raise CommunicationError(
                        f"{pending}: not done within {self.mesh.timeout:g} s")
                if waited > 0.001:  # with experts, each layer is idle until its counts are read
                    time.sleep(0.0002)
            return host.tolist()

        return finish

    def is_running_job(self):
        """Is the current stream the one of submitted jobs? Then a collective comes after the
        group's earlier ones already. (A wait for group.last would count as the wait of that Work's
        owner, whose own stream would wait for nothing.)"""
        return (self.side_stream is not None
                and torch.cuda.current_stream() == self.side_stream)

    def record_event(self):  # a method: tests of this class on a CPU replace it
        return torch.cuda.current_stream().record_event()

    def recv_new(self, shape, dtype, src):
        self.receive_stream = self.receive_stream or torch.cuda.Stream(self.device, priority=-1)
        if self.ran_native:
            # A communicator's operations must not overlap. With P = 2 this group is also pp_ends
            # (Mesh.join), whose all-reduce of the tied gradient may still run
            self.receive_stream.wait_event(self.ran_native)
        with torch.cuda.stream(self.receive_stream):
            tensor, work = super().recv_new(shape, dtype, src)
        # The tensor's memory belongs to the receive stream. record_stream keeps the allocator from
        # giving it to the next receive while the compute stream still reads it.
        use = partial(tensor.record_stream, torch.cuda.current_stream())
        return tensor, Work([work.wait, use])

    def run_native(self, name, *args):
        """Run the collective in the order of the current stream. mesh.pending gets an event, not
        the library's Work: a Work keeps its tensors alive until is_done() asks it."""
        def post():
            LIBRARY[name](*args, group=self.communicator)
            self.ran_native = torch.cuda.current_stream().record_event()
            return [SimpleNamespace(wait=lambda: None, is_completed=self.ran_native.query)]

        self.start(f"native {name}", post).wait()

    def submit(self, job, name):
        """Post job()'s messages on the side stream, behind what the compute stream has so far."""
        self.side_stream = self.side_stream or torch.cuda.Stream(self.device, priority=-1)
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            job()
            event = self.side_stream.record_event()

        def wait():
            torch.cuda.current_stream().wait_event(event)
            # Returned only so that this function holds job, and job its tensors: the allocator does
            # not know that the side stream reads them, and could give their memory to the compute
            # stream
            return job

        self.last = Work([wait], f"group {self.name}")
        return self.last
