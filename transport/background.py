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
        self.thread = None  # made when first used

    def start(self, function, *args):
        """Start function(*args); return a function that waits for its end and raises its error. Do
        not touch what the function reads or writes before that."""
        if self.stream:
            return self.start_on_stream(function, *args)
        if not self.thread and torch.get_num_threads() > 1:
            self.thread = threading.Thread(target=run_all, args=(self.jobs,), daemon=True)
            self.thread.start()
        done = threading.Event()
        errors = []
        self.jobs.put((function, args, done, errors))

        def wait():
            while not self.thread and not done.is_set():
                job = self.jobs.get()
                run(*job)
                if job[-1]:  # its error: what comes later is out of step with other ranks
                    raise job[-1][0]
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


def run(function, args, done, errors):
    """Run a job, what start() puts into the queue. Keeps its error for the wait."""
    try:
        with torch.no_grad():
            function(*args)
    except BaseException as error:
        errors.append(error)
    done.set()


def run_all(jobs):
    """The thread of a Background: runs what comes, until None comes. After an error the groups are
    out of step with other ranks: what comes later fails with the same error."""
    errors = []
    while job := jobs.get():
        if errors:
            *_, done, later = job
            later += errors
            done.set()
        else:
            run(*job)
            errors = job[-1]
        del job  # while the thread waits it is to hold no tensors
