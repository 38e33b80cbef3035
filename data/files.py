"""Opens files that may be anything: a pipe, a device, 40 GB of zeros, garbage."""

import json
import os
import stat


def open_file(path):
    """Open a regular file to read its bytes, without waiting. ValueError for a folder, a pipe or a
    device."""
    # O_NONBLOCK: opening a pipe would wait for its writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return open(descriptor, "rb")


def read_bytes(path, limit=64 << 20):
    """The bytes of a regular file. ValueError if there are more than `limit`."""
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path}: larger than {limit >> 20} MiB")
    return content


def read_json(path, limit=64 << 20):
    """The dict in a JSON file. ValueError, which names the file, for any other file."""
    content = read_bytes(path, limit)
    try:
        values = json.loads(content)
    except RecursionError:
        raise ValueError(f"{path}: nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if type(values) is not dict:
        raise ValueError(f"{path}: not a JSON object")
    return values
