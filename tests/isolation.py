"""Puts back what a command's main() changes in pytest's process.

    with as_it_was():
        main()              # takes Ctrl-C and errors for itself
"""

import os
import signal
import sys
from contextlib import contextmanager

import torch


@contextmanager
def as_it_was():
    """At the end: signal handlers, hook for errors, buffering, environment, folder and number of
    torch's threads are those of the beginning."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    hook = sys.excepthook
    streams = {stream: (stream.line_buffering, stream.errors)
               for stream in (sys.stdout, sys.stderr)}
    environment = dict(os.environ)
    folder = os.getcwd()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: C code's
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.excepthook = hook
        for stream, (line_buffering, errors) in streams.items():
            if not stream.closed:
                stream.reconfigure(line_buffering=line_buffering, errors=errors)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_num_threads(threads)
