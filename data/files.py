"""Opens files that may be anything: a pipe, a device, 40 GB of zeros, garbage. Prints to streams
that nobody may read."""

import json
import os
import stat
import sys


class FileError(ValueError):
    """A file or folder, or what the flags ask of it, cannot be used: one line that names it.
    run/launch.py prints the line and ends all ranks."""


def open_file(path):
    """Open a regular file to read its bytes, without waiting. FileError for a folder, a pipe or a
    device."""
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a name with "\0" in it
        raise FileError(f"{path}: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{path} is not a regular file")
    return open(descriptor, "rb")


def read_bytes(path, limit=64 << 20):
    """The bytes of a regular file. FileError if there are more than `limit`."""
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise FileError(f"{path}: larger than {limit >> 20} MiB")
    return content


def read_json(path):
    """The dict in a JSON file. FileError for any other file."""
    try:
        values = json.loads(read_bytes(path))
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON ({error})") from None
    if type(values) is not dict:
        raise FileError(f"{path}: not a JSON object")
    return values


def drop(stream):
    """Let a stream that cannot be written to lead nowhere: what its buffer still holds, Python
    would write once more at exit, and exit with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(line, name="stderr"):
    """Print a line to sys.stderr or sys.stdout, which may be closed or on a full disk."""
    stream = getattr(sys, name)
    try:
        print(line, file=stream, flush=True)
    except OSError:
        drop(stream)
    except ValueError:  # closed, or not its encoding's characters
        pass
