"""What a test may change in pytest's process only until it ends. conftest.py checks each test.

    with as_it_was():
        main()              # of a command, which takes Ctrl-C for itself
"""

import os
import signal
import sys
import types
from contextlib import contextmanager

import torch

from tests.harness import HERE

# Environment variables that are no test's: pytest changes the first, torch sets the second when a
# part of it is first imported
NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


def _umask():
    mask = os.umask(0)  # the only way to read the mask is to set one
    os.umask(mask)
    return mask


def _streams():
    return [(stream, stream.line_buffering, stream.errors) for stream in (sys.stdout, sys.stderr)]


def _environment():
    return {name: value for name, value in os.environ.items() if name not in NOT_OURS}


def _set_environment(variables):
    for name in _environment().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _set_handlers(handlers):
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: C code's own
            signal.signal(number, handler)


def _set_streams(streams):
    for stream, line_buffering, errors in streams:
        stream.reconfigure(line_buffering=line_buffering, errors=errors)


def _project():
    """{(owner, name): function, class or method} of all modules of this project but the tests."""
    found = {}
    for module in [sys.modules[name] for name in MODULES if name in sys.modules]:
        for name, value in vars(module).items():
            if isinstance(value, (types.FunctionType, type)):
                found[module, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {(value, method): function for method, function in vars(value).items()
                          if isinstance(function, types.FunctionType)}
    return found


def _set_project(attributes):
    for (owner, name), value in attributes.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)


FOLDERS = [path.parent for path in HERE.glob("*/__init__.py") if path.parent.name != "tests"]
MODULES = [*(path.stem for path in HERE.glob("*.py")),
           *(f"{folder.name}.{path.stem}" for folder in FOLDERS for path in folder.glob("*.py"))]
# What a process has one of: (how to read it, how to put it back)
PARTS = {
    "signal handlers": (lambda: {n: signal.getsignal(n) for n in signal.valid_signals()},
                        _set_handlers),
    "blocked signals": (lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
                        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask)),
    "sys.excepthook": (lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook)),
    "sys.argv": (lambda: list(sys.argv), lambda argv: setattr(sys, "argv", argv)),
    "sys.path": (lambda: list(sys.path), lambda path: setattr(sys, "path", path)),
    "buffering of stdout and stderr": (_streams, _set_streams),
    "environment": (_environment, _set_environment),
    "working folder": (os.getcwd, os.chdir),
    "umask": (_umask, os.umask),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "functions of the project": (_project, _set_project),
}


def state():
    return {name: read() for name, (read, _) in PARTS.items()}


def _is_as_before(name, before):
    now = PARTS[name][0]()
    if name == "functions of the project":  # a module that was imported meanwhile is no change
        return all(now.get(place) is value for place, value in before.items())
    return now == before


def restore(before):
    """Put back what state() has found before; return the names of the parts that had changed."""
    changed = [name for name in PARTS if not _is_as_before(name, before[name])]
    for name in changed:
        PARTS[name][1](before[name])
    return changed


@contextmanager
def as_it_was():
    before = state()
    try:
        yield
    finally:
        restore(before)
