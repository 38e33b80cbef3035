"""Reads files that another program has written: a pipe, a device, 40 GB of zeros."""

import json
import os
import stat


def open_file(path):
    """Open a regular file to read its bytes. ValueError for a pipe or a device, whose read may
    never end; OSError if the file cannot be opened."""
    # O_NONBLOCK: opening a pipe would wait for its writer
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is not a regular file")
    return file


def read_json(path, limit=64 << 20):
    """The dict in a JSON file of at most `limit` bytes. ValueError, which names the file, for any
    other file."""
    with open_file(path) as file:
        text = file.read(limit + 1)
    try:
        assert len(text) <= limit
        values = json.loads(text)
        assert type(values) is dict
        return values
    except (ValueError, AssertionError, RecursionError):
        raise ValueError(f"{path}: not a JSON object, or more than {limit} bytes") from None
