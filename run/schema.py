"""What a JSON file from outside must look like: a table of names and tests, gone through before
anything is made of it. ValueError says which name, and what it is instead."""

import json
from itertools import pairwise


def whole(low, high=2**63):
    return lambda x: type(x) is int and low <= x < high


def number(low, high=1e300):
    return lambda x: type(x) in (int, float) and low < x < high  # not nan


def text(*choices):
    return lambda x: type(x) is str and (not choices or x in choices)


def dict_of(test):
    return lambda x: type(x) is dict and all(map(test, x.values()))


def list_of(test):
    return lambda x: type(x) is list and all(map(test, x))


def exactly(table):
    """All these names, but for those that may be missing, and no others."""
    known = {name.rstrip("?") for name in table}
    return lambda x: type(x) is dict and x.keys() <= known and all(
        test(x[name.rstrip("?")]) if name.rstrip("?") in x else name.endswith("?")
        for name, test in table.items())


def offsets(x):
    return list_of(whole(0))(x) and len(x) == 2 and x[0] <= x[1]


# name -> test; a name that ends with "?" may be missing
META = {"vocab_size": whole(1, 2**16 + 1), "tokenizer?": text("bpe", "gpt2", "bytes"),
        "pattern?": text(), "train_tokens?": whole(1), "val_tokens?": whole(1),
        "bytes_per_token?": number(0), "val_bytes?": whole(1), "gzip_bits_per_byte?": number(0),
        "source_hash?": text()}
MODEL = {"vocab_size": META["vocab_size"], **dict.fromkeys(
    ("n_layer", "n_head", "n_embd", "top_k?"), whole(1, 10**6 + 1)), "block_size": whole(1, 2**31),
    "n_experts?": whole(0, 10**6 + 1)}
SUMS = dict_of(whole(0, 2**32))
MANIFEST = {**dict.fromkeys(("number", "step", "updates", "good_steps"), whole(0, 2**53)),
            "scale": number(0, 2.0**128), "model": exactly(MODEL), "data": text(),
            "config": dict_of(lambda x: True), "seal": whole(0, 2**32),
            "checksums": exactly({"model.safetensors": SUMS, "optimizer.safetensors": SUMS})}
TENSOR = {"dtype": text(), "shape": list_of(whole(0)), "data_offsets": offsets}


def once(pairs):
    """An object's pairs as a dict; no name may come twice."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name comes twice")
    return dict(pairs)


def read_json(raw):
    """The object that these bytes are. ValueError."""
    try:
        value = json.loads(raw, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(value) is not dict:
        raise ValueError("not an object")
    return value


def conform(value, table):
    """The value, if it has what the table says. ValueError."""
    for name, test in table.items():
        known = name.rstrip("?")
        if known not in value and known == name:
            raise ValueError(f"it has no {known}")
        if known in value and not test(value[known]):
            raise ValueError(f"its {known} is {str(value[known])[:40]}")
    return value


def tensors(header):
    """A safetensors header without its metadata: tensors that do not overlap. ValueError."""
    found = {name: conform(entry, TENSOR) for name, entry in header.items()
             if name != "__metadata__" and (type(entry) is dict or conform({}, TENSOR))}
    places = sorted(entry["data_offsets"] for entry in found.values())
    if any(stop > start for (_, stop), (start, _) in pairwise(places)):
        raise ValueError("tensors overlap")
    return found
