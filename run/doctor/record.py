"""Writes a dump (run/doctor/dump.py): trains two steps and writes what one process would write.

    write_run       two steps of train.py's Trainer
    write_plain     two steps of plain.training_steps, with a Recorder in place of AdamW

Each rank writes its own slices straight into the files, like in run/checkpoint.py. Where ranks hold
copies of a slice, the first of these ranks writes it, so that a file is never a mixture. The names
of tensors whose copies differ are noted.

    python train.py --dump one           torchrun train.py --tp 2 --pp 2 --dump four
    python train.py --plain --dump one
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from collectives import all_gather, all_reduce, own_chunk
from model import build, generator_of, initial_value
from optimizer import AdamW, learning_rate
from run import tensorfile
from run.checkpoint import together, transfer_runs
from run.copies import Copies
from run.files import DUMP, DUMP_BEGUN, DUMP_MARK, DUMP_TENSORS
from run.tensorfile import DTYPES, CheckpointError, about
from shard import Shard

LAYOUT = ("dp", "ep", "pp", "cp", "tp", "sp", "cp_attention", "zero", "schedule", "chunks",
          "microbatches")  # the flags that are a dump's layout
EPS = {"adamw": 1e-8, "lamb": 1e-6}  # epsilon of the optimizers that divide by a root


def random_value(name, shape, config, seed):
    """initial_value, but N(0, 0.1) is added to biases and gains: a bias of 0 would hide until the
    second step that the bias is added T times."""
    value = initial_value(name, shape, config, seed)
    if name.endswith("bias") or ".ln_" in name:
        noise = torch.empty(shape, dtype=torch.float32)
        value += noise.normal_(0.0, 0.1, generator=generator_of(seed, name))
    return value


# ---- the files ----


def code_of(dtype):
    """A dtype's code in a safetensors file, such as "F32"."""
    return next(code for code, known in DTYPES.items() if known == dtype)


class Writer:
    """Writes the files of a dump. Making a Writer is a collective, and so are write_tokens,
    write_gradients, write_weights and end: if a rank cannot write, every rank raises
    CheckpointError.

    shapes: {canonical name: full shape}, the same on all ranks. dtype: that of the weights."""

    def __init__(self, cfg, mesh, model_config, shapes, dtype):
        self.cfg = cfg
        self.mesh = mesh
        self.folder = Path(cfg.dump)
        self.model_config = model_config
        self.shapes = shapes
        self.dtype = dtype
        # dtype of gradients and masters in the files
        self.wide = torch.promote_types(dtype, torch.float32)
        # dtype in which the run sums gradients; it is written into dump.json only
        self.grad_dtype = cfg.dtype if cfg.grad_dtype == "same" else cfg.grad_dtype
        self.steps = [{}, {}]  # loss, norm, scale, lr and names of differing copies, by step
        with together(mesh.world), about(self.folder):
            if mesh.rank == 0:
                self.begin()

    def begin(self):
        """On rank 0: make the folder, or empty it if it holds a dump."""
        self.folder.mkdir(parents=True, exist_ok=True)  # run/config.py has refused a foreign one
        (self.folder / DUMP_BEGUN).write_text(DUMP_MARK)
        for name in (DUMP, *DUMP_TENSORS):
            (self.folder / name).unlink(missing_ok=True)

    @torch.no_grad()
    def write_tensors(self, file, dtype, shapes, held):
        """Write one file. held: an iterator of (tag, this rank's whole slice), which may call
        collectives. The first of the ranks that hold the same slice writes it. Returns the names of
        tensors whose copies differ."""
        path = self.folder / f"{file}.safetensors"
        head, entries = tensorfile.make_header(shapes, code_of(dtype), path)
        with together(self.mesh.world), about(path):
            if self.mesh.rank == 0:
                path.write_bytes(head)
        copies = Copies()
        failed = None  # this rank's first error. The rank goes on: others wait for its messages
        for shard, values in held:
            values = values.detach().cpu().flatten().to(dtype)
            copies.add(shard, values)
            # Is this the first rank with this slice in the first replica?
            is_writer = shard.first and shard.sum_over[0].rank == 0
            if failed is None and is_writer:
                try:
                    transfer_runs(entries[shard.name], shard, start=0, values=values, saving=True)
                except CheckpointError as error:
                    failed = error
            del values  # free it before the next is made
        with together(self.mesh.world):
            if failed is not None:
                raise failed
        return copies.differing([*shapes], self.mesh.world)

    def write_tokens(self, number, batches):
        """batches: [(ids, targets, number of the first sequence)] of this rank's microbatches;
        ids and targets: (B, S)."""
        index, n_data_ranks = self.mesh.place("dp", "ep")
        replica = self.mesh.group("pp", "cp", "tp")  # its ranks have the same tokens
        ids, targets, _ = zip(*batches, strict=True)
        both = torch.stack(ids), torch.stack(targets)  # (m, B, S) each
        shape = torch.Size((n_data_ranks, *both[0].shape))
        # Tokens are not summed. sum_over[0] only names the ranks that hold the same tokens; the
        # first of these ranks writes them (write_tensors)
        held = [(Shard(name, shape, 0, ((index, index + 1),), sum_over=(replica,)), tensor)
                for name, tensor in zip(("ids", "targets"), both, strict=True)]
        shapes = dict.fromkeys(("ids", "targets"), shape)
        self.write_tensors(f"tokens-{number}", torch.int64, shapes, held)

    def write_gradients(self, number, held):
        differ = self.write_tensors(f"gradients-{number}", self.wide, self.shapes, held)
        self.steps[number - 1]["gradients_differ"] = differ

    def write_weights(self, number, held, masters):
        """held, masters: as in write_tensors. Masters are written if the weights have 16 bits;
        else the weights are the masters."""
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


def whole_slices(trainer, pieces_of, divisor=1.0):
    """Yields (tag, a copy of this rank's slice, divided by the divisor) of each parameter.
    pieces_of(bucket): (parameter, this rank's piece) pairs. Collective under ZeRO, where each
    replica has a piece of the slice: a sum puts the pieces together, because each rank has zeros
    beside its own.

    A bucket (engine/ddp.py) is a flat buffer: parameter p begins at element starts[p], and this
    rank's shard, one of num_shards, at element offset. If p is elements 100 to 159 and the shard
    begins at 120, this rank's piece begins at element 20 of the slice."""
    for bucket in trainer.reducer.buckets:
        pieces = dict(pieces_of(bucket))
        for param in bucket.params:
            whole = torch.zeros(param.numel(), dtype=trainer.optimizer.wide, device=param.device)
            if param in pieces:
                start = max(0, bucket.offset - bucket.starts[param])
                whole[start : start + pieces[param].numel()] = pieces[param]
            if bucket.num_shards > 1:
                all_reduce(whole, bucket.group)
            yield param.shard, whole.div_(divisor)
            del whole  # free it before the next is made


def write_run(trainer, data):
    """Collective: train two steps, and write their dump into cfg.dump. Held beside the training:
    one tensor's slice at a time."""
    cfg = trainer.cfg
    mesh = trainer.mesh
    writer = Writer(cfg, mesh, trainer.model_config, trainer.shapes, trainer.dtype)

    def write_weights(number):
        masters = whole_slices(trainer, lambda bucket: bucket.pieces(bucket.master))
        writer.write_weights(number, trainer.whole_weights(), masters)

    write_weights(0)
    for number in (1, 2):
        batches = data.training(cfg, number - 1, mesh)
        writer.write_tokens(number, batches)
        norm, read = trainer.gradients(batches)  # norm: a tensor on the device; read() gives floats
        writer.write_gradients(
            number, whole_slices(trainer, trainer.reducer.grad_pieces, trainer.scale))
        trainer.update(norm, learning_rate(cfg, number - 1))
        loss, norm_read, scale = read()  # waits for the device
        writer.write_numbers(number, loss, norm_read, scale)
        write_weights(number)
    writer.end()


# ---- plain.py's two steps ----


class Recorder:
    """Stands between plain.training_steps and its AdamW, and writes the gradients and weights that
    pass. make_writer: the class Writer, or a function that returns an object with a Writer's
    methods. value: the function that makes initial values."""

    def __init__(self, cfg, mesh, data, make_writer=Writer, value=random_value):
        self.cfg = cfg
        self.mesh = mesh
        self.data = data
        self.make_writer = make_writer
        self.value = value
        self.model = None  # set, like writer, in build()
        self.writer = None
        self.adamw = None  # set in make_optimizer()
        self.tags = []  # tags of the parameters that adamw steps, in its order
        self.number = 0  # steps begun

    def build(self, config, seed, dtype):
        """plain.training_steps builds the model with this function."""
        self.model = build(config, seed, dtype)
        shapes = {}
        for name, param in self.model.canonical_parameters():
            param.data.copy_(self.value(name, param.shape, config, seed))
            shapes[name] = param.shape
        self.writer = self.make_writer(self.cfg, self.mesh, config, shapes, dtype)
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
        """(tag, this rank's whole slice). chunk: under ZeRO this rank's chunk of the slice, else
        the slice. Collective under ZeRO."""
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

    def write_weights(self):
        masters = (state.master for state in self.adamw.states)
        self.writer.write_weights(self.number, self.whole_weights(),
                                  map(self.gather, self.tags, masters))


def write_plain(cfg, mesh, data, training_steps):
    """Collective: train the run's steps (two: --dump sets cfg.steps in run/config.py) by plain.py,
    and write their dump into cfg.dump. training_steps: plain.training_steps, given by the caller,
    which has imported plain.py."""
    recorder = Recorder(cfg, mesh, data)
    steps = training_steps(cfg, mesh, data, recorder.build, recorder.make_optimizer)
    for loss, norm in steps:
        recorder.writer.write_numbers(recorder.number, loss, norm, scale=1.0)
        recorder.write_weights()
    recorder.writer.end()
