"""Work in the background: messages travel while the caller computes."""

import queue
import threading
from concurrent.futures import Future

import torch


class Background:
    """Runs functions one after the other, in the order in which they were started:

        GPU                  while the caller goes on, on a stream of its own, whose messages
                             overtake matrix products that are already queued on the GPU
        CPU, torch has       while the caller goes on, in a thread
        several threads
        CPU, one thread      when they are waited for. (A thread of their own would take the core
                             from the caller: a step would take 3% to 5% longer)

    Each rank starts the same functions in the same order, so their messages meet. Until a function
    has been waited for, the groups whose messages it sends belong to it: the caller sends through
    others."""

    def __init__(self, device):
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1)
        self.jobs = queue.SimpleQueue()
        # The first error of a job. Later jobs fail with it, too: the groups are out of step with
        # other ranks
        self.error = None
        self.thread = None  # made when first used

    def start(self, function, *args):
        """Start function(*args); return a function that waits for its end, and raises its error (on
        a GPU start() raises it). Until then do not touch, nor free, what the function reads or
        writes."""
        if self.stream:
            return self.start_on_stream(function, *args)
        if not self.thread and torch.get_num_threads() > 1:
            self.thread = threading.Thread(target=self.run_all, daemon=True)
            self.thread.start()
        future = Future()
        self.jobs.put((future, function, args))

        def wait():
            while not self.thread and not future.done():
                self.run(*self.jobs.get())
            future.result()

        return wait

    def run(self, future, function, args):
        try:
            if self.error:
                raise self.error
            with torch.no_grad():
                function(*args)
        except BaseException as error:
            self.error = error
            future.set_exception(error)
        else:
            future.set_result(None)

    def run_all(self):
        """In the thread."""
        while True:
            self.run(*self.jobs.get())

    def start_on_stream(self, function, *args):
        """The stream waits for what the caller's stream has so far; wait() lets the caller's stream
        wait for the function's kernels. The host waits for neither."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), torch.no_grad():
            function(*args)
            event = self.stream.record_event()

        def wait():
            torch.cuda.current_stream().wait_event(event)

        return wait
