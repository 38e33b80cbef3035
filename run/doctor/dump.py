"""A dump: two steps of a run, as one process would write them, whatever the layout.

    DIR/dump.json                 sizes, flags, and the numbers of both steps; written last
        weights-0.safetensors     full weights as forward uses them, before the first step
        tokens-1.safetensors      ids, targets, (D, m, B, S): microbatch k of data rank d at [d, k];
                                  a target of -1 is padding
        gradients-1.safetensors   full gradients of step 1 after all sums over ranks, before
                                  clipping, divided by the loss scale
        weights-1.safetensors     full weights after step 1
        masters-1.safetensors     16-bit weights only: the 32-bit masters (also masters-0)
        tokens-2, gradients-2, weights-2, masters-2             the same of step 2

Names and shapes are nanoGPT's, the tied matrix once. Biases and gains begin at random values: those
of initial_value, 0 and 1, would hide a bias that is added T times until the second step.

write_run (train.py) and write_plain (plain.py) make one, each rank writing its own slices straight
into the files, as run/checkpoint.py does; read_dump reads one, from any trainer.

    python train.py --dump one           torchrun train.py --tp 2 --pp 2 --dump four
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from collectives import all_gather, own_chunk
from engine.collectives import all_reduce
from experts import kind_of
from model import build, generator_of, initial_value
from optimizer import AdamW, learning_rate
from run import tensorfile
from run.checkpoint import sound_config, together, transfer_runs
from run.config import require
from run.copies import Copies
from run.files import DUMP, DUMP_BEGUN, DUMP_MARK, DUMP_TENSORS
from run.tensorfile import DAMAGED, DTYPES, FLOATS, CheckpointError, about, is_whole
from run.weights import find_tensors, load_parts, read_tensor
from shard import Shard
from sizes import WIDTHS, GPTConfig

LAYOUT = ("dp", "ep", "pp", "cp", "tp", "sp", "cp_attention", "zero", "schedule", "chunks",
          "microbatches")  # flags
EPS = {"adamw": 1e-8, "lamb": 1e-6}  # of optimizers that divide by a root
MAX_JSON = 64 << 20  # bytes of dump.json
MAX_RANKS = 10**6


def random_value(name, shape, config, seed):
    """initial_value, but biases and gains deviate from it by N(0, 0.1)."""
    value = initial_value(name, shape, config, seed)
    if name.endswith("bias") or ".ln_" in name:
        value += torch.empty(shape).normal_(0.0, 0.1, generator=generator_of(seed, name))
    return value


# ---- write ----


def code_of(dtype):
    """A dtype's code in a safetensors file, such as "F32"."""
    return next(code for code, known in DTYPES.items() if known == dtype)


class Writer:
    """Writes the files of a dump. All methods are collectives. If a rank cannot write, every rank
    raises CheckpointError.

    shapes: {canonical name: full shape}, the same on all ranks. dtype: of the weights."""

    def __init__(self, cfg, mesh, model_config, shapes, dtype):
        self.cfg = cfg
        self.mesh = mesh
        self.folder = Path(cfg.dump)
        self.model_config = model_config
        self.shapes = shapes
        self.dtype = dtype
        self.wide = torch.promote_types(dtype, torch.float32)  # of masters and of gradients
        self.grad_dtype = cfg.dtype if cfg.grad_dtype == "same" else cfg.grad_dtype
        self.steps = [{}, {}]  # the numbers of both steps
        with together(mesh.world), about(self.folder):
            if mesh.rank == 0:
                self.begin()

    def begin(self):
        """Make the folder, or empty it if it holds a dump."""
        self.folder.mkdir(parents=True, exist_ok=True)  # run/config.py has refused a foreign one
        (self.folder / DUMP_BEGUN).write_text(DUMP_MARK)
        for name in (DUMP, *DUMP_TENSORS):
            (self.folder / name).unlink(missing_ok=True)

    def write_tensors(self, file, dtype, shapes, held):
        """Write one file. held: yields (tag, this rank's whole slice), which may take collectives.
        Of the ranks that hold the same slice the first one writes. Returns the names of tensors
        whose copies differ."""
        path = self.folder / f"{file}.safetensors"
        head, entries = tensorfile.make_header(shapes, code_of(dtype), path)
        with together(self.mesh.world), about(path):
            if self.mesh.rank == 0:
                path.write_bytes(head)
        copies = Copies()
        failed = None  # this rank's first error: it goes on, because others wait for its messages
        for shard, values in held:
            values = values.detach().cpu().flatten()
            copies.add(shard, values)
            if failed is None and shard.first and shard.sum_over[0].rank == 0:
                try:
                    transfer_runs(entries[shard.name], shard, 0, values.to(dtype), saving=True)
                except CheckpointError as error:
                    failed = error
        with together(self.mesh.world):
            if failed is not None:
                raise failed
        return copies.differing([*shapes], self.mesh.world)

    def write_tokens(self, number, batches):
        """batches: [(ids, targets)] of this rank's microbatches, (B, S) each."""
        index, n_data_ranks = self.mesh.place("dp", "ep")
        replica = self.mesh.group("pp", "cp", "tp")  # its ranks have the same tokens
        both = [torch.stack(tensors) for tensors in zip(*batches, strict=True)]  # (m, B, S) each
        shape = torch.Size((n_data_ranks, *both[0].shape))
        held = [(Shard(name, shape, 0, ((index, index + 1),), sum_over=(replica,)), tensor)
                for name, tensor in zip(("ids", "targets"), both, strict=True)]
        shapes = dict.fromkeys(("ids", "targets"), shape)
        self.write_tensors(f"tokens-{number}", torch.int64, shapes, held)

    def write_gradients(self, number, held):
        differ = self.write_tensors(f"gradients-{number}", self.wide, self.shapes, held)
        self.steps[number - 1]["gradients_differ"] = differ

    def write_weights(self, number, held, masters):
        """masters: like held. Written if they are not the weights themselves."""
        differ = self.write_tensors(f"weights-{number}", self.dtype, self.shapes, held)
        if number > 0:
            self.steps[number - 1]["weights_differ"] = differ
        if self.wide != self.dtype:
            self.write_tensors(f"masters-{number}", self.wide, self.shapes, masters)

    def write_numbers(self, number, loss, norm, scale):
        self.steps[number - 1].update(loss=loss, norm=norm, scale=scale,
                                      lr=learning_rate(self.cfg, number - 1))

    def end(self):
        """Write dump.json, which makes the dump complete."""
        cfg = self.cfg
        given = {"format": 1,
                 "names": "nanogpt",
                 "model": asdict(self.model_config),
                 "dtype": cfg.dtype,
                 "grad_dtype": self.grad_dtype,
                 "layout": {name: getattr(cfg, name) for name in LAYOUT},
                 "loss": "mean",
                 "optimizer": {"name": cfg.optimizer, "beta1": cfg.beta1, "beta2": cfg.beta2,
                               "eps": EPS.get(cfg.optimizer, 0.0),
                               "weight_decay": cfg.weight_decay, "grad_clip": cfg.grad_clip},
                 "balance": cfg.balance if cfg.experts else 0.0,
                 "steps": self.steps}
        begun = self.folder / DUMP_BEGUN
        with together(self.mesh.world), about(begun):
            if self.mesh.rank == 0:
                begun.write_text(json.dumps(given))
                begun.rename(self.folder / DUMP)


# ---- train.py's two steps ----


def whole_slices(trainer, pieces_of):
    """Yields (tag, this rank's slice) of each parameter, from the pieces that ZeRO leaves to each
    rank. pieces_of(bucket): (parameter, this rank's piece)."""
    for bucket in trainer.reducer.buckets:
        pieces = dict(pieces_of(bucket))
        for param in bucket.params:
            piece = pieces.get(param)
            if bucket.num_shards > 1:
                whole = torch.zeros(param.numel(), device=param.device,
                                    dtype=trainer.optimizer.wide)
                if piece is not None:
                    start = max(0, bucket.offset - bucket.starts[param])
                    whole[start : start + piece.numel()] = piece
                piece = all_reduce(whole, bucket.group)  # the others add zeros
            yield param.shard, piece


def write_run(trainer, data):
    """Collective: train two steps, and write their dump into cfg.dump. Held beside the training:
    one tensor's slice at a time."""
    cfg = trainer.cfg
    mesh = trainer.mesh
    writer = Writer(cfg, mesh, trainer.model_config, trainer.shapes, trainer.dtype)

    def write_weights(number):
        masters = whole_slices(trainer, lambda bucket: bucket.pieces(bucket.master))
        writer.write_weights(number, trainer.whole_weights(), masters)

    with torch.no_grad():
        write_weights(0)
    for number in (1, 2):
        batches = data.training(cfg, number - 1, mesh)
        writer.write_tokens(number, batches)
        norm, read = trainer.gradients(batches)
        with torch.no_grad():
            summed = whole_slices(trainer, trainer.reducer.grad_pieces)
            unscaled = ((shard, grad.to(writer.wide) / trainer.scale) for shard, grad in summed)
            writer.write_gradients(number, unscaled)
        trainer.update(norm, learning_rate(cfg, number - 1))
        writer.write_numbers(number, *read())
        with torch.no_grad():
            write_weights(number)
    writer.end()


# ---- plain.py's two steps ----


class Recorder:
    """Stands between plain.training_steps and its AdamW, and writes what passes."""

    def __init__(self, cfg, mesh, data):
        self.cfg = cfg
        self.mesh = mesh
        self.data = data
        self.model = None  # these three are set by build() and make_optimizer()
        self.writer = None
        self.adamw = None
        self.tags = []  # of what the optimizer steps
        self.number = 0  # the step that is being trained: 1 or 2

    def build(self, config, seed, dtype):
        """plain.training_steps builds the model with this function."""
        self.model = build(config, seed, dtype)
        shapes = {}
        for name, param in self.model.canonical_parameters():
            param.data.copy_(random_value(name, param.shape, config, seed))
            shapes[name] = param.shape
        self.writer = Writer(self.cfg, self.mesh, config, shapes, dtype)
        return self.model

    def make_optimizer(self, cfg, weights, tags):
        """plain.training_steps makes its optimizer with this function."""
        self.adamw = AdamW(cfg, weights, tags)
        self.tags = tags
        self.write_weights()
        return self

    def step(self, grads, norm):
        self.number += 1
        self.writer.write_tokens(self.number, self.data.training(self.cfg, self.number - 1,
                                                                 self.mesh))
        wide = (grad.to(self.writer.wide) for grad in grads)
        self.writer.write_gradients(self.number, map(self.gather, self.tags, wide))
        self.adamw.step(grads, norm)

    def gather(self, tag, chunk):
        """(tag, this rank's whole slice), from this rank's chunk of it under ZeRO."""
        if self.cfg.zero == 0:
            return tag, chunk
        lengths = [stop - start for start, stop in tag.ranges]
        numel = tag.shape.numel() // tag.shape[tag.dim] * sum(lengths)
        whole = chunk.new_empty(numel)
        replicas = tag.sum_over[0]
        own_chunk(whole, replicas).copy_(chunk)
        return tag, all_gather(whole, replicas)

    def whole_weights(self):
        """Yields (tag, this rank's slice) of each weight, as forward uses it."""
        params = {param.shard.name: param for param in self.model.parameters()}
        for tag, state in zip(self.tags, self.adamw.states, strict=True):
            if self.cfg.zero == 3:  # forward gathers the chunks; the parameter is empty
                yield self.gather(tag, state.weights)
            else:
                yield tag, params[tag.name]

    @torch.no_grad()
    def write_weights(self):
        masters = (state.master for state in self.adamw.states)
        self.writer.write_weights(self.number, self.whole_weights(),
                                  map(self.gather, self.tags, masters))


def write_plain(cfg, mesh, data, training_steps):
    """Collective: train two steps by plain.training_steps, and write their dump into cfg.dump."""
    recorder = Recorder(cfg, mesh, data)
    steps = training_steps(cfg, mesh, data, recorder.build, recorder.make_optimizer)
    for loss, norm in steps:
        recorder.writer.write_numbers(recorder.number, loss, norm, scale=1.0)
        recorder.write_weights()
    recorder.writer.end()


# ---- read ----


class Tensors(Mapping):
    """{name: tensor} of a file; each is read when it is asked for, as float64 on the CPU. Empty if
    there is no such file."""

    def __init__(self, places):
        self.places = places  # {name: [(Entry, is it (in, out)?)]}, see weights.find_tensors

    def __getitem__(self, name):
        return load_parts(self.places[name]).double()

    def __iter__(self):
        return iter(self.places)

    def __len__(self):
        return len(self.places)


@dataclass
class Dump:
    """A dump on the disk. Tensors have nanoGPT's names and shapes, if `model` is there."""
    folder: Path
    names: str  # as in the files: nanogpt, hugging_face
    model: GPTConfig | None  # or LlamaConfig; None: a model of another form
    dtype: str  # of weights and activations
    grad_dtype: str  # of summed gradients
    layout: dict
    loss: str  # "mean" over the tokens of the whole batch, or "sum"
    optimizer: dict
    balance: float
    steps: list  # the numbers of both steps; loss and norm may be nan
    files: dict  # {"weights-0": Tensors}, of the files that are there

    def weights(self, number):
        """Tensors before the first step (0), after the first (1) or second one (2)."""
        return self.files.get(f"weights-{number}", Tensors({}))

    def masters(self, number):
        return self.files.get(f"masters-{number}", Tensors({}))

    def gradients(self, number):
        """Tensors of step 1 or 2."""
        return self.files.get(f"gradients-{number}", Tensors({}))

    def ids(self, number):
        """(D, m, B, S) int64 of step 1 or 2; None if there is no such file."""
        return self.tokens(number, "ids", 0)

    def targets(self, number):
        """Like ids; -1: padding."""
        return self.tokens(number, "targets", -1)

    def tokens(self, number, name, least):
        if f"tokens-{number}" not in self.files:
            return None
        entry = self.files[f"tokens-{number}"][name]
        tensor = read_tensor(entry)
        most = self.model.vocab_size - 1 if self.model else math.inf
        if tensor.min() < least or tensor.max() > most:
            raise ValueError(f"{entry.path}, tensor {name}: {int(tensor.min())} to "
                             f"{int(tensor.max())}, not {least} to {most}")
        return tensor


def read_dump(folder):
    """The Dump in a folder. ValueError of one line if it is damaged, or not a dump; only dump.json
    and weights-0.safetensors have to be there."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; train.py --dump makes a dump")
    given, model = read_json(folder / DUMP)
    first = tensorfile.read_header(folder / DUMP_TENSORS[0])  # weights-0
    shapes = {name: entry.shape for name, entry in first.items()}
    if model:
        shapes = shapes_of(model, folder / DUMP_TENSORS[0], first)
    files = {}
    for name in DUMP_TENSORS:
        path = folder / name
        if not path.exists():
            continue
        if name.startswith("tokens"):
            files[path.stem] = find_tokens(path, given["layout"], model)
        elif model:
            tensorfile.read_header(path)  # refuses a folder, which find_tensors would take
            files[path.stem] = Tensors(find_tensors(path, shapes, model))
        else:
            files[path.stem] = Tensors(find_foreign(path, shapes))
    return Dump(folder, given["names"], model, given["dtype"], given["grad_dtype"],
                given["layout"], given["loss"], given["optimizer"], given["balance"],
                given["steps"], files)


def read_json(path):
    """(the dict in dump.json, its GPTConfig or None), checked."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a file")
    with about(path), open(path, "rb") as file:
        text = file.read(MAX_JSON + 1)
    try:
        require(len(text) <= MAX_JSON, "size")
        given = json.loads(text)
        require(type(given) is dict, "format")
        return given, refuse_unsound_dump(given)
    except KeyError as error:
        raise ValueError(f"{path}: its {error.args[0]} is missing") from None
    except (*DAMAGED, OverflowError) as error:
        words = str(error) if type(error) is ValueError and len(str(error)) < 40 else "content"
        raise ValueError(f"{path}: its {words} is damaged, or not that of a dump") from None


def is_number(value, least=-math.inf):
    """Is it a number of JSON, finite, and not below `least`?"""
    return type(value) in (int, float) and least <= value and abs(value) < 1e300


def refuse_unsound_dump(given):
    """Raise one of DAMAGED, with the name of a value, unless every value is of its type and range.
    Returns the model's GPTConfig, or None for a foreign model."""
    require(type(given["format"]) is int and given["format"] == 1, "format")
    require(given["names"] in ("nanogpt", "hugging_face"), "names")
    for name in ("dtype", "grad_dtype"):
        require(type(given[name]) is str and given[name] in WIDTHS, name)
    require(given["loss"] in ("mean", "sum"), "loss")
    require(is_number(given["balance"], 0), "balance")
    layout = given["layout"]
    for name in ("dp", "ep", "pp", "cp", "tp", "chunks", "microbatches"):
        require(is_whole(layout[name], MAX_RANKS) and layout[name] >= 1, name)
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
        return sound_config(given["model"])
    except DAMAGED:
        raise ValueError("model") from None


def shapes_of(model, path, entries):
    """{canonical name: shape} of a model. ValueError, before a model of forged sizes is built, if
    weights-0 has too few tensors or elements for it."""
    blocks = model.block_weights() + (
        max(0, model.n_experts - model.top_k) * model.expert_parameters())
    least = model.n_layer * blocks + model.vocab_size * model.n_embd
    elements = sum(math.prod(entry.shape) for entry in entries.values())
    if least > elements or model.n_layer > len(entries):
        raise ValueError(f"{path}: {len(entries)} tensors of {elements} elements are too few for "
                         f"the model of {DUMP}")
    with torch.device("meta"):
        parameters = kind_of(model)(model).canonical_parameters()
        return {name: param.shape for name, param in parameters}


def find_foreign(path, shapes):
    """{name: [(Entry, False)]} of a file of a model of another form: the names and shapes of
    weights-0."""
    entries = tensorfile.expect(path, tensorfile.read_header(path), shapes, FLOATS)
    for name, shape in shapes.items():
        if math.prod(shape) == 0:
            raise ValueError(f"{path}, tensor {name}: empty")
    return {name: [(entry, False)] for name, entry in entries.items()}


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
    return entries
