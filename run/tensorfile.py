"""The safetensors format: a JSON header, then raw data. Read and written in slices.

    8 bytes           length of the header, little-endian
    header            {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    data              each tensor's elements, row after row; offsets count from here

The header follows from names and shapes alone. So every rank knows, without a message, where each
element of the model belongs in the file. github.com/huggingface/safetensors
"""

import json
import os
import zlib
from collections import namedtuple
from contextlib import contextmanager

import torch

from run.schema import read_json, tensors

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CHUNK = 1 << 20  # bytes read at once for a checksum
# A tensor of a safetensors file; begin and end count bytes from the start of the file.
Entry = namedtuple("Entry", "path name dtype shape begin end")


class CheckpointError(ValueError):
    """One line that names the file and, if one is at fault, the tensor."""


@contextmanager
def about(path, tensor=""):
    """An OSError inside becomes a CheckpointError about its file, or else this one."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename or path}{tensor and f', tensor {tensor}'}"
        raise CheckpointError(f"{where}: {error.strerror}") from None


def locate(path, header, start):
    """{name: Entry} of a header, for data that begins at byte `start` of the file."""
    return {name: Entry(path, name, e["dtype"], tuple(e["shape"]),
                        *(start + at for at in e["data_offsets"]))
            for name, e in tensors(header).items()}


def make_header(shapes, code, path=None):
    """{name: shape} -> (the first bytes of the file, {name: Entry})."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + shape.numel() * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begins aligned
    return len(text).to_bytes(8, "little") + text, locate(path, header, 8 + len(text))


def read_header(path):
    """{name: Entry} of a safetensors file that is as long as its header says. CheckpointError."""
    with about(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length < size else b""
    try:
        entries = locate(path, read_json(text), 8 + length)
    except ValueError:
        raise CheckpointError(f"{path}: not a safetensors file, or its header is damaged") from None
    for name, entry in entries.items():
        if entry.end > size:
            raise CheckpointError(f"{path}, tensor {name}: cut off, it ends at byte {entry.end} "
                                  f"of a file of {size}")
    return entries


def expect(path, entries, shapes, dtypes):
    """The Entries of {name: shape}, each of one of the dtypes. CheckpointError if they differ."""
    for name, shape in shapes.items():
        where = f"{path}, tensor {name}"
        if name not in entries:
            raise CheckpointError(f"{where}: missing")
        _, _, dtype, found, begin, end = entries[name]
        if found != tuple(shape) or dtype not in dtypes:
            raise CheckpointError(f"{where}: {dtype} {list(found)}, not {' or '.join(dtypes)} "
                                  f"{list(shape)}")
        if end - begin != torch.Size(shape).numel() * DTYPES[dtype].itemsize:
            raise CheckpointError(f"{where}: its place in the file does not fit its shape")
    return {name: entries[name] for name in shapes}


def copy_bytes(file, data, at, write):
    """Write the bytes `data` at this place of an unbuffered file, or fill them from there."""
    file.seek(at)
    while data:  # the system may do a part at a time
        n = file.write(data) if write else file.readinto(data)
        if not n:
            raise OSError(0, "the file ends early")
        data = data[n:]


def checksum(entry, want=None):
    """CRC-32 of a tensor as it lies in the file. CheckpointError if it is not the one we want."""
    crc = 0
    with about(entry.path, entry.name), open(entry.path, "rb") as file:
        file.seek(entry.begin)
        for at in range(entry.begin, entry.end, CHUNK):
            crc = zlib.crc32(file.read(min(CHUNK, entry.end - at)), crc)
    if want not in (None, crc):
        raise CheckpointError(f"{entry.path}, tensor {entry.name}: damaged, the checksum differs")
    return crc
