"""Saves or ends a run on SIGTERM, Ctrl-C or a closed terminal; ends ranks whose parent has died.

    process          SIGINT, SIGTERM, SIGHUP                  set up by
    launcher         passes the signal on to all ranks        launch
    rank, starting   one line, exit                           before_training
    rank, training   saves after the step; again: exit        save_on_stop
    other commands   exit without a traceback (SIGINT)        end_quietly

A rank's parent is the process that started it: our launcher (run/launch.py) or torchrun's agent.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Environment variables of a rank that run/launch.py started
PARENT = "NANOPARALLEL_PARENT"  # the launcher's pid
STORE = "NANOPARALLEL_STORE"  # the url of the store at which the ranks meet
# The pid of this process's parent, with which this process is to end. 0: it may outlive its parent.
# Set in before_training.
parent = 0


def local_rank():
    """This process's rank among those of its machine, from torchrun's environment; 0 without."""
    alone = os.environ.get("WORLD_SIZE", "") in ("", "1")
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", ""))
    return int(rank) if rank.isdecimal() and not alone else 0


def end(code, line, speaks):
    """End this process at once, whatever its threads wait for; print the line if it `speaks`."""
    with suppress(OSError):  # the terminal may be closed
        if speaks:
            os.write(2, f"train.py: {line}\n".encode(errors="replace"))
    os._exit(code)


def reopen():
    """Let a process whose stdin, stdout or stderr is closed (>&-) print into nothing."""
    # Closed file numbers from 0 to 2 would be given to the next files that this process opens, and
    # its printed lines would go there: fill these numbers with /dev/null. (open takes the lowest.)
    number = os.open(os.devnull, os.O_RDWR)
    while number < 3:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    if sys.stdout is None:  # Python found it closed
        sys.stdout = open(os.devnull, "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def end_quietly():
    """Let `| head`, Ctrl-C and a full disk end this process without a traceback."""
    def one_line(kind, error, trace):
        if not isinstance(error, OSError):
            return sys.__excepthook__(kind, error, trace)
        os.write(2, f"{os.path.basename(sys.argv[0])}: {error.strerror or error}\n".encode())
        os._exit(1)

    reopen()
    sys.excepthook = one_line
    # Flush at each line, so that a full disk raises at once and not when Python exits
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def on_stop(handler):
    """Call handler(number, frame) when one of STOPS arrives. Under nohup SIGHUP is ignored, and
    stays ignored."""
    for number in STOPS:
        under_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not under_nohup:
            signal.signal(number, handler)


def watch_parent():
    """End this process when its parent has gone: getppid() then gives another pid."""
    while os.getppid() == parent:
        time.sleep(0.2)
    end(1, "the process that started the ranks has gone, so they end", local_rank() == 0)


def before_training():
    """Until save_on_stop, a signal ends the process with one line. Ranks end with their parent."""
    global parent
    reopen()
    # A sample of text may have characters that the terminal lacks: print "?" for them
    sys.stdout.reconfigure(errors="replace")

    def stop(number, frame):
        line = f"stopped by {signal.Signals(number).name} before the first step"
        end(128 + number, line, local_rank() == 0)

    on_stop(stop)
    # run/launch.py blocked STOPS before it started this process: a signal that came since comes now
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    if PARENT in os.environ:
        parent = int(os.environ[PARENT])
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent started this process
        parent = os.getppid()
    else:
        parent = 0
    if parent:
        threading.Thread(target=watch_parent, daemon=True).start()


def save_on_stop(ask_to_stop):
    """A signal calls ask_to_stop(); a second signal of the same kind ends this process."""
    def ask(number, frame):
        ask_to_stop()
        signal.signal(number, signal.SIG_DFL)

    on_stop(ask)
