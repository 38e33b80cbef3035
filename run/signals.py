"""How a process is stopped: by a signal, or because the one that started it has gone. Imports no
torch, so that it works while torch is being imported."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress

STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
PARENT = "NANOPARALLEL_PARENT"  # in the environment of a rank: the process that started it
giving_up = False  # this process is about to say why it ends (processes.py)
parent = 0  # that process, or torchrun's agent; 0: this one may outlive it


def local_rank():
    """Of this process among those of its machine. The first one speaks for them."""
    alone = os.environ.get("WORLD_SIZE", "1") in ("", "1")  # then RANK is somebody else's
    said = os.environ.get("LOCAL_RANK", os.environ.get("RANK", ""))
    return int(said) if not alone and said.isdecimal() else 0


def listens(number):
    """Not to the end of its terminal, if nohup has said so."""
    return number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN


def end(text, code):
    """One line, from one process of a machine; and this process is gone, whatever it waits for."""
    with suppress(OSError):  # its terminal may have gone
        if local_rank() == 0:
            os.write(2, f"train.py: {text}\n".encode())
    os._exit(code)


def end_quietly():
    """`| head` and Ctrl-C are to end this process at once, without a traceback."""
    for name in ("SIGPIPE", "SIGINT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)


def stopped_early(number, frame):
    if not giving_up:
        end(f"stopped by {signal.Signals(number).name} before the first step", 128 + number)


def before_training():
    """A signal before on_signals ends the process with one line. Ranks end with their parent:
    torchrun's agent, or train.py's launcher. (A run without ranks outlives its shell.)"""
    for number in STOPS:
        if listens(number):
            signal.signal(number, stopped_early)
    # torch's warnings of a rank that does not answer, beside our line that names it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for stream in (sys.stdout, sys.stderr):  # whatever the terminal can show
        stream.reconfigure(errors="replace")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # the launcher's ranks start with them held
    global parent
    parent = int(os.environ.get(PARENT, os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0))
    if parent:
        threading.Thread(target=watch, daemon=True).start()


def watch():
    while True:
        end_with_parent()
        time.sleep(0.2)


def end_with_parent():
    if parent and os.getppid() != parent:
        end("the process that started the ranks has gone, so they end", 1)


def on_signals(ask_to_stop):
    """SIGTERM, Ctrl-C or a closed terminal call ask_to_stop(); the second one ends this process."""
    def ask(number, frame):
        ask_to_stop()
        signal.signal(number, signal.SIG_DFL)

    for number in STOPS:
        if listens(number):
            signal.signal(number, ask)


if sys.argv[0].endswith("train.py"):
    before_training()
