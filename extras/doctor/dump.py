"""A dump: two steps of a run, as one process would write them, whatever the layout.

    DIR/dump.json                 sizes, flags, and the numbers of both steps; written last
        weights-0.safetensors     full weights before step 1, as forward uses them
        tokens-1.safetensors      ids and targets (D, m, B, S): microbatch k of data rank d is
                                  [d, k]; a target of -100 (or -1) is padding
        gradients-1.safetensors   full gradients of step 1, after all sums over ranks, before
                                  clipping, divided by the loss scale
        weights-1.safetensors     full weights after step 1
        masters-1.safetensors     16-bit weights only: their 32-bit masters (also masters-0)
        tokens-2, gradients-2, weights-2, masters-2             the same of step 2

Names and shapes are nanoGPT's, the tied matrix once, or those of foreign.py. This file
reads a dump of any trainer, of which only dump.json and weights-0 must be there;
extras/doctor/record.py writes ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from data.foreign import read_json
from experts import kind_of
from extras.doctor.foreign import NAMES, readers
from model import ABSENT
from run import tensorfile
from run.checkpoint import sound_config
from run.config import require
from run.tensorfile import DAMAGED, FLOATS, is_whole
from run.weights import read_tensor, unwrapped
from schedules import SCHEDULES
from sizes import WIDTHS, GPTConfig

DUMP, DUMP_BEGUN = "dump.json", "dump.json.tmp"  # DUMP_BEGUN becomes DUMP when all is written
DUMP_MARK = '{"format": 1'  # the first characters of both
DUMP_TENSORS = [f"{name}.safetensors" for name in (
    "weights-0", "weights-1", "weights-2", "masters-0", "masters-1", "masters-2",
    "tokens-1", "tokens-2", "gradients-1", "gradients-2")]
# Fields of Dump that are read from dump.json as they stand
JSON_FIELDS = ("names", "dtype", "grad_dtype", "layout", "loss", "optimizer", "balance", "steps")


class Tensors(Mapping):
    """{name: tensor} of a file; each is read when it is asked for, as float64 on the CPU."""

    def __init__(self, readers):
        self.readers = readers  # {name: function that reads the tensor}

    def __getitem__(self, name):
        return self.readers[name]().double()

    def __contains__(self, name):  # Mapping's own would read the tensor
        return name in self.readers

    def __iter__(self):
        return iter(self.readers)

    def __len__(self):
        return len(self.readers)


@dataclass
class Dump:
    """A dump on the disk. Tensors have nanoGPT's names and shapes or, if model is None, the
    file's own. weights(), masters(), gradients() of a file that is not there: no tensors."""
    folder: Path
    names: str  # whose names the files have: "nanogpt", "hugging_face", "megatron"
    model: GPTConfig | None  # or a LlamaConfig; None: another form
    dtype: str  # forward computes in it; under autocast weights are wider
    grad_dtype: str  # gradients are summed in it
    layout: dict  # {"dp": D, ...}, see record.LAYOUT
    loss: str  # "mean" over the tokens of the whole batch, or their "sum"
    optimizer: dict  # name, beta1, beta2, eps, weight_decay, grad_clip
    balance: float  # weight of the experts' balance loss
    steps: list  # for both steps a dict: loss and norm (may be nan), lr, scale, *_differ
    tensors: dict  # {"weights-0": Tensors}
    tokens: dict  # {"tokens-1": {"ids": Entry, "targets": Entry}}

    def weights(self, number):
        """{name: tensor} before step 1 (number 0), after step 1 or 2."""
        return self.tensors.get(f"weights-{number}", Tensors({}))

    def masters(self, number):
        return self.tensors.get(f"masters-{number}", Tensors({}))

    def gradients(self, number):
        """{name: tensor} of step 1 or 2."""
        return self.tensors.get(f"gradients-{number}", Tensors({}))

    def first_missing(self, *files):
        """The first of these files, such as "weights-1", that is not there; None if all are."""
        return next((file for file in files
                     if not self.tensors.get(file) and file not in self.tokens), None)

    def ids(self, number):
        """(D, m, B, S) int64 of step 1 or 2; None if the file is not there."""
        return self.read_tokens(number, "ids")

    def targets(self, number):
        """Like ids; ABSENT: padding. A file may have torch's -100 there, or nanoGPT's -1."""
        return self.read_tokens(number, "targets", padding=(ABSENT, -1))

    def read_tokens(self, number, name, padding=()):
        """ValueError unless all are tokens of the model, or padding, but not padding alone."""
        entries = self.tokens.get(f"tokens-{number}")
        if entries is None:
            return None
        entry = entries[name]
        tensor = read_tensor(entry)
        most = self.model.vocab_size - 1 if self.model else 2**63 - 1
        absent = torch.isin(tensor, tensor.new_tensor(padding))
        tokens = tensor[~absent]
        if len(tokens) == 0:
            raise ValueError(f"{entry.path}, tensor {name}: all are padding")
        if tokens.min() < 0 or tokens.max() > most:
            raise ValueError(f"{entry.path}, tensor {name}: {tokens.min()} to {tokens.max()}, not "
                             f"0 to {most}")
        return tensor.masked_fill(absent, ABSENT)


def read_dump(folder):
    """The Dump in a folder. ValueError of one line if it is damaged, or not a dump; only dump.json
    and weights-0.safetensors have to be there."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; python -m extras.doctor.record makes a dump")
    given, model = read_sound(folder / DUMP)
    first = tensorfile.read_header(folder / DUMP_TENSORS[0])  # weights-0
    shapes = {unwrapped(name): entry.shape for name, entry in first.items()}
    if model:
        shapes = shapes_of(model, folder / DUMP_TENSORS[0], first)
    tensors = {}
    tokens = {}
    for path in (folder / name for name in DUMP_TENSORS):
        if not path.exists():
            continue
        if path.name.startswith("tokens"):
            tokens[path.stem] = find_tokens(path, given["layout"], model)
        elif model:
            tensorfile.read_header(path)  # refuses a folder: readers() would read its files
            tensors[path.stem] = Tensors(readers(path, shapes, model, given["names"]))
        else:
            tensors[path.stem] = Tensors(find_other_form(path, shapes))
    return Dump(folder, model=model, tensors=tensors, tokens=tokens,
                **{name: given[name] for name in JSON_FIELDS})


def read_sound(path):
    """(the dict in dump.json, its GPTConfig or LlamaConfig; None for a model of another form),
    checked."""
    given = read_json(path)
    try:
        return given, refuse_unsound_dump(given)
    except KeyError as error:
        raise ValueError(f"{path}: has no {error.args[0]}") from None
    except ValueError as error:  # raised by require(): the text is the name of a bad value
        raise ValueError(f"{path}: its {error} is not that of a dump") from None
    except DAMAGED:
        raise ValueError(f"{path}: its values are not those of a dump") from None


def is_number(value, least=-math.inf):
    """Is the value a number of JSON, finite, and not below `least`?"""
    return type(value) in (int, float) and least <= value and abs(value) < 1e300


def refuse_unsound_dump(given):
    """Raise one of DAMAGED unless every value is of its type and range. (The ValueErrors of
    require() have the name of the value as their text.) Returns the model's GPTConfig or
    LlamaConfig, or None for a model of another form."""
    require(type(given["format"]) is int and given["format"] == 1, "format")
    require(given["names"] in NAMES, "names")
    for name in ("dtype", "grad_dtype"):
        require(type(given[name]) is str and given[name] in WIDTHS, name)
    require(given["loss"] in ("mean", "sum"), "loss")
    require(is_number(given["balance"], 0), "balance")
    layout = given["layout"]
    for name in ("dp", "ep", "pp", "cp", "tp", "chunks", "microbatches"):
        require(is_whole(layout[name], 10**6) and layout[name] >= 1, name)
    require(type(layout["sp"]) is bool, "sp")
    require(is_whole(layout["zero"], 3), "zero")
    for name in ("cp_attention", "schedule"):
        require(type(layout[name]) is str, name)
    optimizer = given["optimizer"]
    require(type(optimizer["name"]) is str, "optimizer")
    for name in ("beta1", "beta2", "eps", "weight_decay", "grad_clip"):
        require(is_number(optimizer[name], 0), name)
    steps = given["steps"]
    require(type(steps) is list and len(steps) == 2, "steps")
    for step in steps:
        for name in ("loss", "norm"):  # nan and inf are findings, not damage
            require(type(step[name]) is float or is_number(step[name]), name)
        require(is_number(step["lr"], 0), "lr")
        require(is_number(step["scale"], 0) and step["scale"] > 0, "scale")
        for name in ("gradients_differ", "weights_differ"):
            require(type(step[name]) is list, name)
            require(all(type(tensor) is str for tensor in step[name]), name)
    if given["model"] is None:
        return None
    try:
        config = sound_config(given["model"])
    except DAMAGED:
        raise ValueError("model") from None
    refuse_unsound_layout(layout, config)
    return config


def refuse_unsound_layout(layout, config):
    """Raise a ValueError, whose text is the name of a value, unless this layout can split this
    model, because step.py will split it. (find_tokens asks whether ranks can split the
    sequences.)"""
    P, N, T = (layout[axis] for axis in ("pp", "cp", "tp"))
    heads = getattr(config, "n_kv_head", config.n_head)
    require(heads % T == 0, "tp")
    require(layout["cp_attention"] == "ring" or heads % (T * N) == 0, "cp")
    require(config.n_experts % (layout["ep"] * T) == 0, "ep")
    require(P * layout["chunks"] <= config.n_layer + 2, "pp")  # a layer for each pipeline stage
    require(layout["schedule"] in SCHEDULES, "schedule")
    schedule = SCHEDULES[layout["schedule"]]
    require(schedule.chunks in (0, layout["chunks"]), "chunks")
    require(not schedule.in_rounds or layout["microbatches"] % P == 0, "microbatches")


def shapes_of(model, path, entries):
    """{canonical name: shape} of a model. ValueError, before a model of forged sizes is built, if
    weights-0 has too few tensors or elements for it."""
    block = model.block_weights()  # a block's elements, with top_k of the experts
    block += max(0, model.n_experts - model.top_k) * model.expert_parameters()  # the other experts
    least = model.n_layer * block + model.vocab_size * model.n_embd
    elements = sum(math.prod(entry.shape) for entry in entries.values())
    if least > elements or model.n_layer > len(entries):
        raise ValueError(f"{path}: {len(entries)} tensors of {elements} elements are too few for "
                         f"the model of {DUMP}")
    with torch.device("meta"):
        parameters = kind_of(model)(model).canonical_parameters()
        return {name: param.shape for name, param in parameters}


def find_other_form(path, shapes):
    """{name: function that reads the tensor} of a file, for a model of another form. shapes: {name:
    shape} of weights-0. ValueError unless the file has the same names and shapes, none empty."""
    entries = {unwrapped(name): entry for name, entry in tensorfile.read_header(path).items()}
    entries = tensorfile.expect(path, entries, shapes, FLOATS)
    for name, shape in shapes.items():
        if math.prod(shape) == 0:
            raise ValueError(f"{path}, tensor {name}: empty")
    return {name: partial(read_tensor, entry) for name, entry in entries.items()}


def find_tokens(path, layout, model):
    """{"ids", "targets": Entry} of a file of tokens."""
    entries = tensorfile.read_header(path)
    shape = entries["ids"].shape if "ids" in entries else ()
    tensorfile.expect(path, entries, dict.fromkeys(("ids", "targets"), shape), ["I64"])
    wanted = [layout["dp"], layout["microbatches"]]
    fits = len(shape) == 4 and list(shape[:2]) == wanted and math.prod(shape) > 0
    if not fits or (model and shape[3] > model.block_size):
        raise ValueError(f"{path}, tensor ids: {list(shape)} does not begin with {wanted}, or has "
                         "sequences longer than the model's")
    segments = 2 * layout["cp"] if layout["cp"] > 1 else 1
    slices = layout["cp"] * layout["tp"] if layout["sp"] else 1
    if model and shape[3] % math.lcm(segments, slices):
        raise ValueError(f"{path}, tensor ids: ranks cannot split sequences of {shape[3]} tokens")
    return entries
