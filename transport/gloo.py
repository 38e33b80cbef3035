"""gloo: torch's messages over TCP, between any two CPUs. Its rules:

    a send completes when the peer has posted the receive for it, so post receives first
    wait() blocks the thread, so wait as late as possible
    tensors are contiguous, and on the CPU
"""

import torch


class Gloo:
    """Carries the messages of one group."""

    def __init__(self, communicator):
        self.communicator = communicator  # torch's ProcessGroup

    def exchange(self, send, dst, recv, src, combine):
        """Start a send of the tensor `send` to rank dst, and a receive into `recv` from rank src;
        None: no send, no receive. combine(recv, received) merges what arrives, in place; None:
        recv is overwritten. Returns a function that waits for both."""
        waits = []
        landing = recv if combine is None or recv is None else torch.empty_like(recv)
        if recv is not None:
            waits.append(self.communicator.recv([landing], src, 0).wait)  # 0: torch's tag, unused
        if send is not None:
            waits.append(self.communicator.send([send], dst, 0).wait)

        def wait():
            for part in waits:
                part()
            if landing is not recv:
                combine(recv, landing)

        return wait

    def start_read(self, tensor):
        """Returns a function that returns the tensor's numbers. The tensor must not change before
        the call."""
        return tensor.tolist
