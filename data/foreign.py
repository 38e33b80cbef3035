"""Reads files that another program has written, of any kind: a pipe, a device, 40 GB of zeros.

    open_file         opens a regular file; never waits
    read_foreign      the bytes of a file of usual size
    parse_json        bytes -> the object in them
    read_json         the object in a JSON file, whose fields are of their kinds
    require_fields    is each field of an object of its kind?

What they refuse is a ValueError of one line that names file, field and value. No torch here:
run/config.py reads the sizes of --init-from before torch is imported.
"""

import json
import os
import stat
from collections import namedtuple

MAX_JSON = 64 << 20  # bytes of a JSON file
MAX_DEPTH = 100  # objects and lists inside of one another
# What a field may be. words: for a message; fits(value): is it one?
Kind = namedtuple("Kind", "words fits")


def whole(least, most=2**31):
    """The kind of whole numbers from `least` to `most`: in JSON neither 1.0 nor true."""
    return Kind(f"a whole number from {least:,} to {most:,}",
                lambda value: type(value) is int and least <= value <= most)


def either(kind, other):
    return Kind(f"{kind.words} or {other.words}",
                lambda value: kind.fits(value) or other.fits(value))


def or_null(kind):
    return either(kind, Kind("null", lambda value: value is None))


def list_of(kind):
    return Kind(f"a list, each {kind.words}",
                lambda value: type(value) is list and all(map(kind.fits, value)))


# (float() takes larger whole numbers, too, but not 10**400)
POSITIVE = Kind("a number above 0, up to 1e300",
                lambda value: type(value) in (int, float) and 0 < value <= 1e300)
TEXT = Kind("a text", lambda value: type(value) is str and value != "")
YES_NO = Kind("true or false", lambda value: type(value) is bool)
OBJECT = Kind("an object", lambda value: type(value) is dict)
# Neither a path, which may lead out of the folder, nor a name that no file can have. isprintable():
# no "\0", no line break, no half of a character
FILE_NAME = Kind("the name of a file", lambda value: type(value) is str and value.isprintable()
                 and "/" not in value and len(value) < 256)


def open_file(path):
    """Open a regular file to read its bytes. ValueError for a pipe or a device, whose read may
    never end; OSError if the file cannot be opened."""
    # O_NONBLOCK: opening a pipe would wait for its writer
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is not a regular file")
    return file


def no_duplicates(pairs):
    """The dict of a JSON object; ValueError if a name comes twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name comes twice")
    return values


def parse_json(text):
    """The object in these bytes. ValueError: no JSON, no object, nested too deep, a name twice."""
    try:
        values = json.loads(text, object_pairs_hook=no_duplicates)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(values) is not dict:
        raise ValueError("not a JSON object")
    level = [values]  # all objects and lists that lie equally deep
    for _ in range(MAX_DEPTH):
        inside = [each.values() if type(each) is dict else each for each in level]
        level = [value for each in inside for value in each if type(value) in (dict, list)]
    if level:
        raise ValueError("nested too deep")
    return values


def require_fields(values, needed=None, known=None):
    """ValueError unless each field of an object is of its kind. needed: {name: Kind} of fields that
    have to be there; known: of fields that may be there. All others pass."""
    for name in needed or {}:
        if name not in values:
            raise ValueError(f"it has no {name}")
    for name, kind in {**(needed or {}), **(known or {})}.items():
        if name in values and not kind.fits(values[name]):
            raise ValueError(f"its {name} is {values[name]!r:.40}, not {kind.words}")


def read_foreign(path):
    """The bytes of a regular file of at most MAX_JSON bytes. ValueError, which names the file, for
    any other file, and for one that cannot be read."""
    try:
        with open_file(path) as file:
            data = file.read(MAX_JSON + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_JSON:
        raise ValueError(f"{path}: more than {MAX_JSON >> 20} MiB")
    return data


def read_json(path, needed=None, known=None):
    """The object in a JSON file, whose fields are as require_fields wants them. ValueError, which
    names the file, for any other file."""
    text = read_foreign(path)
    try:
        values = parse_json(text)
        require_fields(values, needed, known)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return values
