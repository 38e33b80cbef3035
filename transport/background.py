"""Work in the background: messages travel while the caller computes."""

import queue
import threading

import torch


class Background:
    """Runs functions one after the other, in the order in which they were started, while the caller
    goes on:

        GPU                         on a stream of its own, whose messages overtake products that
                                    the GPU has yet to compute
        CPU, OMP_NUM_THREADS > 1    in a thread
        CPU, a rank has one core    not before they are waited for: a thread would take the core
                                    from the caller, and a step would take 3% to 5% longer

    Each rank starts the same functions in the same order, so their messages meet. Until a function
    has been waited for, the groups whose messages it sends belong to it: the caller sends through
    others."""

    def __init__(self, device):
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1)
        self.jobs = queue.SimpleQueue()
        self.failed = []  # the first error of a job
        self.thread = None  # made when first used

    def start(self, function, *args):
        """Start function(*args); return a function that waits for its end and raises its error (of
        a GPU's: start() does). Do not touch what the function reads or writes before that."""
        if self.stream:
            return self.start_on_stream(function, *args)
        if not self.thread and torch.get_num_threads() > 1:
            self.thread = threading.Thread(target=run_all, args=(self.jobs, self.failed),
                                           daemon=True)
            self.thread.start()
        done = threading.Event()
        errors = []
        self.jobs.put((function, args, done, errors))

        def wait():
            while not self.thread and not done.is_set():
                run(self.jobs.get(), self.failed)
            done.wait()
            if errors:
                raise errors[0]

        return wait

    def __del__(self):
        self.jobs.put(None)  # ends the thread

    def start_on_stream(self, function, *args):
        """The stream waits for what the caller's stream has so far; wait() lets the caller's stream
        wait for the function's kernels. The host waits for neither."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), torch.no_grad():
            function(*args)
            event = self.stream.record_event()

        def wait():
            torch.cuda.current_stream().wait_event(event)
            return args  # so that `wait` keeps them: the allocator must not reuse their memory

        return wait


def run(job, failed):
    """Run a job, what start() puts into the queue. Its error is kept for the wait, and in `failed`:
    after an error the groups are out of step with other ranks, so later jobs fail with it, too."""
    function, args, done, errors = job
    try:
        if failed:
            raise failed[0]
        with torch.no_grad():
            function(*args)
    except BaseException as error:
        errors.append(error)
        failed[:] = errors
    done.set()


def run_all(jobs, failed):
    """The thread of a Background: runs what comes, until None comes."""
    while job := jobs.get():
        run(job, failed)
        del job  # while the thread waits it is to hold no tensors
