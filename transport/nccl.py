"""NCCL: messages between GPUs. Skip this file if you have none.

    gloo (CPU)   a send completes when it meets its receive; wait() blocks the thread
    NCCL (GPU)   messages carry no name: between two ranks they are matched in the order of posting;
                 operations of a communicator run one after the other, in the order of posting;
                 wait() lets the GPU's queue of work (a stream) wait; the host goes on

If two ranks both post a send before the receive, on one communicator, they wait forever: each send
waits for a receive that stands behind the other rank's send. So messages to higher ranks travel on
one communicator, `up`, those to lower ranks on another, `down` (torch's own collectives on `up`):

            rank 0          rank 1
    up      send to 1       receive from 0
    down    receive from 1  send to 0

What one exchange sends and receives on the same communicator (in a ring) is posted as one batch, so
neither waits behind the other. Longer circular waits, through more ranks or microbatches, would
still be possible. The four schedules and all other messages have no such wait: tests/test_gpu.py
runs each with operations queued like this. Add a schedule of your own there; check_lists of
tests/timeline.py, in which no message blocks a rank, does not find such waits.
"""

import time

import torch
import torch.distributed as dist


class Nccl:
    """Carries the messages of one group."""

    def __init__(self, up, down, rank, timeout):
        """up, down: torch's ProcessGroups, of the same ranks."""
        self.up, self.down, self.rank, self.timeout = up, down, rank, timeout

    def exchange(self, send, dst, recv, src, combine):
        """Like Gloo.exchange, but the function that is returned lets the current stream wait."""
        landing = recv if combine is None or recv is None else torch.empty_like(recv)
        batches = {self.up: [], self.down: []}
        if recv is not None:
            way = self.up if src < self.rank else self.down
            batches[way].append(dist.P2POp(dist.irecv, landing, group=way, group_peer=src))
        if send is not None:
            way = self.up if dst > self.rank else self.down
            batches[way].append(dist.P2POp(dist.isend, send, group=way, group_peer=dst))
        works = [work for batch in batches.values() if batch
                 for work in dist.batch_isend_irecv(batch)]

        def wait():
            for work in works:
                work.wait()
            if landing is not recv:
                combine(recv, landing)

        return wait

    def start_read(self, tensor):
        """Start to copy a tensor to the host. Returns a function that waits for the copy, then
        returns the numbers. In a step the host waits for the GPU nowhere else (except in
        MixtureOfExperts.run_rows), so a rank that has died or hangs is noticed here: RuntimeError
        if the copy is not there after `timeout` seconds."""
        # (Pinned, so that the copy goes on beside the host. Tests read tensors of a CPU)
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.current_stream().record_event()

        def finish():
            deadline = time.monotonic() + self.timeout
            while not copied.query():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the GPU's messages are not done within {self.timeout:g} s")
                time.sleep(0.0002)
            return host.tolist()

        return finish
