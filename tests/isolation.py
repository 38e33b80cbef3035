"""What a test may change in pytest's process only until it ends. conftest.py checks each test.

    with as_it_was():
        main()              # of a command, which takes Ctrl-C for itself
"""

import operator
import os
import signal
import sys
import types
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tests.harness import HERE

# ---- signals, streams, environment ----


def handlers():
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def set_handlers(before):
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: C code's own
            signal.signal(number, handler)


def settings(stream):
    return stream.line_buffering, stream.errors


def streams():
    return {stream: settings(stream) for stream in (sys.stdout, sys.stderr)}


def same_streams(now, before):
    """... of those that pytest has not closed: after Ctrl-C it has, and stdout is another one."""
    return all(stream.closed or settings(stream) == old for stream, old in before.items())


def set_streams(before):
    for stream, (line_buffering, errors) in before.items():
        if not stream.closed:
            stream.reconfigure(line_buffering=line_buffering, errors=errors)


# Environment variables that no test sets: pytest changes the first, torch sets the second when a
# part of it is first imported
NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


def environment():
    return {name: value for name, value in os.environ.items() if name not in NOT_OURS}


def set_environment(before):
    for name in environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def umask():
    mask = os.umask(0)  # the only way to read the mask is to set one
    os.umask(mask)
    return mask


# ---- functions, classes and methods of this project, which a test may have replaced ----

FOLDERS = [path.parent for path in HERE.glob("*/__init__.py") if path.parent.name != "tests"]
MODULES = [*(path.stem for path in HERE.glob("*.py")),
           *(".".join(path.relative_to(HERE).with_suffix("").parts)
             for folder in FOLDERS for path in folder.rglob("*.py")
            if "tests" not in path.relative_to(HERE).parts)]


def project():
    """{(module or class, name): function or class}, of the modules that have been imported."""
    found = {}
    for module in [sys.modules[name] for name in MODULES if name in sys.modules]:
        for name, value in vars(module).items():
            if isinstance(value, (types.FunctionType, type)):
                found[module, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {(value, method): function for method, function in vars(value).items()
                          if isinstance(function, types.FunctionType)}
    return found


def same_project(now, before):
    return before.items() <= now.items()  # now there may be more: modules imported since


def set_project(before):
    now = project()
    for (owner, name), value in before.items():
        if now.get((owner, name)) is not value:
            setattr(owner, name, value)


# ---- all of it ----


class Part(NamedTuple):
    read: Callable
    put_back: Callable
    same: Callable = operator.eq


PARTS = {
    "signal handlers": Part(handlers, set_handlers),
    "blocked signals": Part(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
                            lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask)),
    "sys.excepthook": Part(lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook)),
    "sys.argv": Part(lambda: list(sys.argv), lambda argv: setattr(sys, "argv", argv)),
    "sys.path": Part(lambda: list(sys.path), lambda path: setattr(sys, "path", path)),
    "buffering of stdout or stderr": Part(streams, set_streams, same_streams),
    "environment": Part(environment, set_environment),
    "working folder": Part(os.getcwd, os.chdir),
    "umask": Part(umask, os.umask),
    "default dtype of torch": Part(torch.get_default_dtype, torch.set_default_dtype),
    "number of torch's threads": Part(torch.get_num_threads, torch.set_num_threads),
    "functions of this project": Part(project, set_project, same_project),
}


def state():
    return {name: part.read() for name, part in PARTS.items()}


def restore(before):
    """Put back what state() has read before; return the names of the parts that had changed."""
    changed = [name for name, part in PARTS.items() if not part.same(part.read(), before[name])]
    for name in changed:
        PARTS[name].put_back(before[name])
    return changed


@contextmanager
def as_it_was():
    before = state()
    try:
        yield
    finally:
        restore(before)
