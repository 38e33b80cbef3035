"""How a process ends: by a signal, by a failure, or with its parent.

    process                 one of STOPS                          set up by
    launcher                passes the signal on to all ranks     launch (run/launch.py)
    rank, starting          one line, exit                        before_training
    rank, training          saves after the step; again: exit     save_on_stop
    rank 0, at the end      leaves out the sample of text         skip_on_stop
    other commands          SIGINT, | head: no traceback          end_quietly

After a failure give_up (run/processes.py) ends a rank. A rank's parent is the process that started
the rank: our launcher (run/launch.py) or torchrun's agent.
"""

import os
import signal
import sys
import threading
import time
from collections import namedtuple
from contextlib import contextmanager, suppress

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Environment variables of a rank that run/launch.py started
PARENT = "NANOPARALLEL_PARENT"  # the launcher's pid
STORE = "NANOPARALLEL_STORE"  # the url of the store at which the ranks meet
# The pid of the parent with which this process is to end; 0: this process may outlive its parent.
# Set in before_training.
parent = 0


# What launchers put into the environment, run/launch.py, torchrun or a program that sets RANK and
# WORLD_SIZE alone. local_size: processes on this machine. restarts: how many times torchrun has
# restarted the ranks of this node. parent: the launcher's pid, 0 if run/launch.py is not the parent
Launched = namedtuple("Launched", "size rank local_size local_rank restarts parent")


def number_in_environment(name, default, least, most):
    """A whole number from `least` to `most` in an environment variable; `default` where that is
    missing or empty. ValueError for anything else."""
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        names = " and ".join(dict.fromkeys(["WORLD_SIZE", name]))
        raise ValueError(f"{name}={text:.40} in the environment is not a whole number from {least} "
                         f"to {most}; unset {names}, or use torchrun")
    return int(text)


def launched():
    """The Launched of this process. The only process of a run has size 1 and rank 0, whatever its
    other variables say. ValueError for a value that no launcher sets.

    Without LOCAL_RANK, as in pods, the local rank is 0 until the ranks have met: meet
    (run/processes.py) then counts those of this machine."""
    size = number_in_environment("WORLD_SIZE", 1, 1, 10**6)
    restarts = number_in_environment("TORCHELASTIC_RESTART_COUNT", 0, 0, 10**6)
    parent = number_in_environment(PARENT, 0, 0, 2**31)
    if size == 1:
        return Launched(1, 0, 1, 0, restarts, parent)
    rank = number_in_environment("RANK", "", 0, size - 1)
    local_size = number_in_environment("LOCAL_WORLD_SIZE", 1, 1, size)
    most = (local_size if os.environ.get("LOCAL_WORLD_SIZE") else size) - 1
    local_rank = number_in_environment("LOCAL_RANK", 0, 0, most)
    return Launched(size, rank, local_size, local_rank, restarts, parent)


def refuse_no_place():
    """ValueError if several ranks have no place to meet: our launcher's store, or torchrun's
    address."""
    size, rank, *_ = launched()
    store = os.environ.get(STORE)
    if store and not store.endswith(f"?rank={rank}&world_size={size}"):
        raise ValueError(f"{STORE}={store:.40} in the environment is not the store of rank {rank} "
                         f"of {size}; unset it")
    if size > 1 and not store:
        number_in_environment("MASTER_PORT", "", 1, 65535)
        if not os.environ.get("MASTER_ADDR"):
            raise ValueError(f"WORLD_SIZE={size} in the environment, but no MASTER_ADDR; unset "
                             "WORLD_SIZE, or use torchrun")


def local_rank():
    """This process's rank among those of its machine; 0 where the environment is no launcher's: a
    process that no launcher started prints its errors."""
    try:
        return launched().local_rank
    except ValueError:
        return 0


# ---- the last line ----


def program():
    """The name with which this program's lines begin: train.py or, of python -m run.weights,
    weights.py."""
    return os.path.basename(sys.argv[0])


def in_words(error):
    """An error, or a text, in one line; an OSError without its number."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return text.replace("\n", "\\n")


def note(line):
    """Print a line on stderr, which may be closed or full."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def end(code, line, speaks):
    """End this process at once, whatever its threads wait for. speaks: print the line first."""
    if speaks:
        line = f"{program()}: {in_words(line)}"
        with suppress(OSError):  # the terminal may be closed
            os.write(2, f"{line}\n".encode(errors="replace"))
    os._exit(code)


def end_quietly():
    """Let `| head`, Ctrl-C, and characters that the terminal lacks, cause no traceback."""
    if sys.stdout:  # None: closed (>&-)
        sys.stdout.reconfigure(errors="replace")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# ---- signals ----


def on_stop(handler):
    """Call handler(number, frame) when one of STOPS arrives. Under nohup SIGHUP is ignored, and
    stays ignored."""
    for number in STOPS:
        under_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not under_nohup:
            signal.signal(number, handler)


def watch_parent():
    """End this process when its parent has gone: getppid() then returns another pid."""
    while os.getppid() == parent:
        time.sleep(0.2)
    end(1, "the process that started the ranks has gone, so they end", local_rank() == 0)


def name_of(number):
    """The name of a signal: SIGKILL for 9. Some numbers have no name."""
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")


def end_on_stop(when):
    """From now on a signal ends the process with one line, such as "stopped by SIGTERM before the
    first step". when: the words after the signal's name."""
    def stop(number, frame):
        end(128 + number, f"stopped by {name_of(number)} {when}", local_rank() == 0)

    on_stop(stop)


def before_training():
    """From now on a signal ends the process with one line (end_on_stop), and a rank ends with its
    parent. A rank of train.py calls save_on_stop later on: from then on a signal does what that
    function says. ValueError, once all this is done but the parent, for a wrong environment."""
    global parent
    if sys.stdout:  # print "?" for what the terminal lacks, as in a sample of text or a file's name
        sys.stdout.reconfigure(errors="replace")
    end_on_stop("before the first step")
    # run/launch.py blocked STOPS before it started this process: let signals that came since arrive
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    if launched().parent:
        parent = launched().parent
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


@contextmanager
def skip_on_stop():
    """A signal ends this block, and the process goes on behind the block, where it ignores signals.
    The block is the last work of a run: nothing is left to save."""
    on_stop(signal.default_int_handler)  # raises KeyboardInterrupt
    with suppress(KeyboardInterrupt):
        yield
    on_stop(signal.SIG_IGN)
