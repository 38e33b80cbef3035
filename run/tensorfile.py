"""The format of safetensors files: a JSON header, then raw data.

    8 bytes           length of the header, little-endian
    header            {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    data              each tensor's elements, row after row; offsets count from here

This file makes and reads headers, and computes checksums. The data itself: checkpoint.py reads and
writes slices of tensors; weights.py reads and writes whole tensors. The header follows
from names, shapes and the dtype, so every rank knows without a message where each element of the
model belongs in the file.
github.com/huggingface/safetensors
"""

import json
import os
import zlib
from collections import namedtuple
from contextlib import contextmanager
from itertools import pairwise

import torch

from data.foreign import open_file, parse_json

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES = {**FLOATS, "I64": torch.int64}
MAX_HEADER = 100_000_000  # bytes of a header; the safetensors library refuses a longer one
READ_BYTES = 1 << 20  # bytes read at once for a checksum
# What reading damaged JSON may raise. (AttributeError: a list where a dict should be.)
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
# A tensor of a safetensors file. dtype: its code, such as "F32". begin and end count bytes from the
# start of the file, not from the start of the data as in the header.
Entry = namedtuple("Entry", "path name dtype shape begin end")


class CheckpointError(ValueError):
    """A file cannot be used or, in run/checkpoint.py, the ranks differ or --out is taken. One line,
    which names the file and the tensor if they are at fault."""

    def __init__(self, message):
        super().__init__(message.replace("\n", "\\n"))  # a tensor's name may have line breaks


@contextmanager
def about(path, tensor=""):
    """Re-raise an OSError of this block as a CheckpointError that names the error's own file or, if
    the error has none, `path`; and a ValueError, which names its file by itself."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        where = str(error.filename or path)
        if tensor:
            where += f", tensor {tensor}"
        raise CheckpointError(f"{where}: {error.strerror}") from None


@contextmanager
def open_tensors(path, tensor=""):
    """Open a safetensors file, as a context, to read its header or this tensor. CheckpointError if
    it cannot be opened or is a pipe or a device; also for an error of the block (about)."""
    with about(path, tensor), open_file(path) as file:
        yield file


def is_whole(value, most=2**53):
    """Is it an int (in JSON: neither 1.0 nor true) from 0 to `most`?"""
    return type(value) is int and 0 <= value <= most


def locate(path, header, start):
    """{name: Entry} of a header, for data that begins at byte `start` of the file. A damaged header
    raises one of DAMAGED."""
    entries = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        dtype = value["dtype"]
        shape = value["shape"]
        begin, end = value["data_offsets"]
        if type(dtype) is not str or not all(map(is_whole, [*shape, begin, end - begin])):
            raise ValueError(name)
        entries[name] = Entry(path, name, dtype, tuple(shape), start + begin, start + end)
    places = sorted((entry.begin, entry.end) for entry in entries.values())
    for (_, end), (next_begin, _) in pairwise(places):
        if next_begin < end:
            raise ValueError("two tensors overlap")
    return entries


def make_header(shapes, code, path=None):
    """{name: shape} -> (the first bytes of the file, {name: Entry}), for a file in which all
    tensors have the dtype of this code and lie side by side in this order."""
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin = end
        end = begin + shape.numel() * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8 bytes
    first_bytes = len(text).to_bytes(8, "little") + text
    return first_bytes, locate(path, header, start=len(first_bytes))


def read_header(path):
    """{name: Entry} of a safetensors file. CheckpointError if it is damaged, or shorter than its
    header says."""
    with open_tensors(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        # a damaged length may be huge: read nothing, which is no JSON either
        text = file.read(length) if length <= min(size, MAX_HEADER) else b""
    try:
        entries = locate(path, parse_json(text), 8 + length)
    except DAMAGED:
        raise CheckpointError(f"{path}: not a safetensors file, or its header is damaged") from None
    for name, entry in entries.items():
        if entry.end > size:
            raise CheckpointError(f"{path}, tensor {name}: cut off at the end of the file")
    return entries


def expect(path, entries, shapes, dtypes):
    """The Entries of {name: shape}. CheckpointError if a tensor is missing, has another shape or
    none of the `dtypes` (codes), or not as many bytes as its shape and dtype imply."""
    for name, shape in shapes.items():
        where = f"{path}, tensor {name}"
        if name not in entries:
            raise CheckpointError(f"{where}: missing")
        entry = entries[name]
        if entry.shape != tuple(shape) or entry.dtype not in dtypes:
            raise CheckpointError(f"{where}: {entry.dtype} {list(entry.shape)}, not "
                                  f"{' or '.join(dtypes)} {list(shape)}")
        has = entry.end - entry.begin
        n_bytes = torch.Size(shape).numel() * DTYPES[entry.dtype].itemsize
        if has != n_bytes:
            raise CheckpointError(f"{where}: {has} bytes, not {n_bytes}")
    return {name: entries[name] for name in shapes}


def checksum(entry, want=None):
    """CRC-32 of a tensor's bytes in the file. CheckpointError if `want` is given and differs."""
    crc = 0
    with open_tensors(entry.path, entry.name) as file:
        file.seek(entry.begin)
        for begin in range(entry.begin, entry.end, READ_BYTES):
            crc = zlib.crc32(file.read(min(READ_BYTES, entry.end - begin)), crc)
    if want not in (None, crc):
        raise CheckpointError(f"{entry.path}, tensor {entry.name}: damaged, the checksum differs")
    return crc
