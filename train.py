"""Trains a GPT on D x T x P ranks: data, tensor and pipeline parallelism, composed.

    mesh -> model -> tensor parallel shards -> pipeline stages -> DDP or ZeRO -> step loop

    torchrun train.py --tp 2 --pp 2          relaunches itself with as many processes as it needs
    torchrun --nproc-per-node 8 train.py --tp 2 --pp 2          data parallelism is what is left

Any layout is the same computation: the same initial weights, the same batches, gradients only ever
summed, and so the same losses. `python train.py --help` lists the flags.
"""

import hashlib
import json
import math
import os
import resource
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint as recompute

import checkpoint
import pipeline
from collectives import (
    CommunicationError,
    all_gather,
    all_reduce,
    broadcast,
    first_to_fail,
    init,
    launch,
    make_mesh,
    no_span,
    shutdown,
    unlike_rank_0,
)
from config import DTYPES, check, fail, parse
from data.batches import Data
from data.prepare import load_tokenizer
from ddp import DDP
from model import (
    GPT,
    Block,
    GPTConfig,
    canonical_name,
    flops_per_token,
    initial_value,
    layer_costs,
)
from tensor_parallel import parallelize
from timeline import Tracer, report
from zero import Optimizer, ZeRO, bytes_per_parameter

MAX_SKIPPED = 5  # steps in a row without a finite gradient, then the run gives up
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16, NVIDIA's data sheets


class Stage(torch.nn.Module):
    """A slice of the list of layers; the last one ends in the loss."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, targets=None):
        for layer in self.layers:
            x = layer(x)
        return x if targets is None else self.layers[-1].loss(x, targets)


class Trainer:
    """One rank's part of the model, of the optimizer and of the step."""

    def __init__(self, cfg, mesh, vocab_size):
        self.cfg, self.mesh, self.dtype = cfg, mesh, DTYPES[cfg.dtype]
        shape = GPTConfig(vocab_size, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd)
        with torch.device("meta"):
            model = GPT(shape)
        self.model_config, self.n_params = shape, sum(p.numel() for p in model.parameters())
        self.shapes = {canonical_name(name, cfg.n_layer): p.shape
                       for name, p in model.named_parameters()}
        given = None
        if cfg.init_from and cfg.resume == "no":
            with checkpoint.together(mesh.world):
                given = checkpoint.read_weights(cfg.init_from, self.shapes, shape)
        self.lists = pipeline.make_schedule(cfg.schedule, cfg.pp, cfg.microbatches, cfg.chunks)
        self.deferred = parallelize(model, mesh.tp, partial(canonical_name, n_layer=cfg.n_layer),
                                    split_backward=any(a.kind == "W" for a in self.lists[0]))

        self.where = pipeline.placement(cfg.schedule, cfg.pp, cfg.chunks)
        pipeline.validate(self.lists, self.where)
        self.actions = pipeline.lower(self.lists, self.where)[mesh.pp.rank]
        forwards = [[a for a in actions if a.kind == "F"] for actions in self.lists]
        self.forwards = pipeline.lower(forwards, self.where)[mesh.pp.rank]
        self.cuts = pipeline.cut(layer_costs(shape), len(self.where))
        layers = {s: model.layers[a:b] for s, (a, b) in enumerate(self.cuts)
                  if self.where[s] == mesh.pp.rank}
        self.tie = mesh.tie if self.where[0] != self.where[-1] else None
        if self.tie and self.tie.size > 1:
            model.layers[0].wte.weight.tag.copies = 2

        def initial(tag):
            return tag.slice(given(tag.name) if given else
                             initial_value(tag.name, tag.shape, shape, cfg.seed))

        args = layers, mesh.dp, self.dtype, mesh.world.device, initial
        self.dp = ZeRO(cfg.zero, *args) if cfg.zero else DDP(*args, int(cfg.bucket_mb * 2**20))
        self.stages = {s: Stage(part) for s, part in layers.items()}
        for layer in (layer for part in layers.values() for layer in part):
            if cfg.compile:
                layer.forward = torch.compile(layer.forward)
            if cfg.recompute and isinstance(layer, Block):
                # inside of the layer's hooks, so that recomputing does not gather and free again
                layer.forward = partial(recompute, layer.forward, use_reentrant=False)
        self.optimizer = Optimizer(self.dp, cfg.lr, (cfg.beta1, cfg.beta2), cfg.weight_decay)
        self.span = no_span
        self.scale = 2.0**16 if cfg.dtype == "float16" else 1.0
        self.good_steps = 0
        self.stop_asked = self.stopping = False  # by a signal to this rank; to any rank

    def run(self, actions, batches):
        cfg = self.cfg
        rows = cfg.batch_size // (cfg.dp * cfg.microbatches)
        return pipeline.run(actions, self.stages, self.where, self.mesh.pp, batches,
                            (rows, cfg.block_size, cfg.n_embd), self.dtype, self.dp, self.deferred,
                            tokens=cfg.batch_size * cfg.block_size, scale=self.scale,
                            span=self.span)

    def gradients(self, batches):
        """Forward and backward of all microbatches. Returns loss and global gradient norm, the same
        on every rank; the gradients stay in the shards, summed over all ranks with a part in them.
        """
        self.dp.zero_grad()
        loss = self.run(self.actions, batches)
        self.dp.finish(self.tie)
        total = torch.stack([loss / self.mesh.tp.size, self.optimizer.grad_square(),
                             loss.new_tensor(self.stop_asked)])
        loss, square, self.stopping = all_reduce(total, self.mesh.world).tolist()
        return loss, math.sqrt(square) / self.scale

    def update(self, norm, lr):
        """Clip and step; skip it if the norm is not finite. All ranks have the same norm."""
        if math.isfinite(norm):
            clip = self.cfg.grad_clip
            coefficient = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
            with self.span("optimizer"):
                self.optimizer.step(lr, coefficient / self.scale)
        if self.cfg.dtype == "float16":  # dynamic loss scaling
            self.good_steps = self.good_steps + 1 if math.isfinite(norm) else 0
            if self.good_steps == 0 or self.good_steps % 1000 == 0:
                self.scale = max(1.0, self.scale * (2.0 if self.good_steps else 0.5))

    def validate(self, data, batches):
        """Mean loss over the first `batches` batches of the validation windows, on every rank."""
        loss = sum(self.run(self.forwards, data.validation(self.cfg, i, self.mesh))
                   for i in range(batches))
        return all_reduce(loss.view(1) / self.mesh.tp.size, self.mesh.world).item() / batches

    @torch.no_grad()
    def generate(self, ids, n, temperature=0.8, top_k=50):
        """n more token ids after the list `ids`, in every replica, by all ranks together."""
        pp, tp, device = self.mesh.pp, self.mesh.tp, self.mesh.world.device
        rng = torch.Generator().manual_seed(self.cfg.seed)
        for _ in range(n):
            x = torch.tensor([ids[-self.cfg.block_size :]], device=device)
            shape = 1, x.size(1), self.cfg.n_embd
            token = torch.zeros(1, dtype=torch.long)
            for s, rank in enumerate(self.where):
                if s and rank != self.where[s - 1]:
                    if pp.rank == self.where[s - 1]:
                        pp.send(x.contiguous(), rank).wait()
                    if pp.rank == rank:
                        x = torch.empty(shape, dtype=self.dtype, device=device)
                        pp.recv(x, self.where[s - 1]).wait()
                if pp.rank == rank:
                    x = self.stages[s](x)
                    self.dp.after("F", s, False)
            if pp.rank == self.where[-1]:
                logits = torch.zeros(self.model_config.vocab_size, device=device)
                logits.tensor_split(tp.size)[tp.rank].copy_(x[0, -1])
                logits = all_gather(logits, tp).cpu() / temperature
                top, index = logits.nan_to_num().topk(min(top_k, len(logits)))
                token[0] = index[torch.multinomial(top.softmax(0), 1, generator=rng)]
            ids = ids + broadcast(token.to(device), pp, root=self.where[-1]).tolist()
        return ids

    def replicas_agree(self):
        """Whether every weight that several ranks hold has the same bits on all of them."""
        hashes = {"dp": [], "tp": [], "tie": []}
        for layer in (layer for stage in self.stages.values() for layer in stage.layers):
            self.dp.use([layer])
            for param in layer.parameters():
                copy = param.detach().cpu().clone()  # numpy would pin the storage that ZeRO-3 frees
                data = copy.view(torch.uint8).numpy().tobytes()
                value = int.from_bytes(hashlib.sha256(data).digest()[:7], "little")
                hashes["dp"].append(value)
                if param.numel() == param.tag.shape.numel():
                    hashes["tp"].append(value)
                if param.tag.tied and self.tie:
                    hashes["tie"].append(value)
        self.dp.use()
        differ = torch.zeros(1, dtype=torch.long, device=self.mesh.world.device)
        for name, values in hashes.items():
            group = getattr(self.mesh, name)
            high = torch.tensor(values, dtype=torch.long, device=group.device)
            low = -high
            all_reduce(high, group, "max"), all_reduce(low, group, "max")
            differ += (high != -low).sum()
        return all_reduce(differ, self.mesh.world).item() == 0


def learning_rate(cfg, step):
    """Linear warm-up, then a cosine from lr to min_lr."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / (cfg.warmup_steps + 1)
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, done))) * (cfg.lr - cfg.min_lr)


def open_log(path, start):
    """The log, to be written from step `start` on: what it holds of that and later steps, and a
    line that a crash cut off, will come anew."""
    log = open(path, "a+" if start else "w+")
    log.seek(0)
    kept = 0
    for line in iter(log.readline, ""):
        if not line.endswith("\n") or json.loads(line)["step"] >= start:
            break
        kept = log.tell()
    log.truncate(kept)
    return log


def stop_on_signals(trainer):
    """SIGTERM and Ctrl-C ask the run to stop after the step under way; the second one ends it."""
    def ask(number, frame):
        trainer.stop_asked = True
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)


def train(cfg, data, mesh):
    """The run of one rank: rank 0 prints and writes the log. Returns whether it ended well."""
    first = mesh.world.rank == 0
    trainer = Trainer(cfg, mesh, data.vocab_size)
    stop_on_signals(trainer)
    config, n_params = trainer.model_config, trainer.n_params
    saved = None if cfg.resume == "no" else cfg.resume  # folder of the last good checkpoint
    start = checkpoint.load(trainer, saved) if saved else 0
    if start > cfg.steps:
        raise checkpoint.CheckpointError(f"{saved}: is at step {start}, past --steps {cfg.steps}")
    log = open_log(cfg.log, start) if first and cfg.log else None
    say = print if first else (lambda *args, **kwargs: None)
    say(" ".join(f"{k}={v}" for k, v in asdict(cfg).items() if v != ""))
    say(f"{n_params:,} parameters on {mesh.world.size} ranks = {cfg.dp} data x {cfg.pp} pipeline x "
        f"{cfg.tp} tensor; {cfg.microbatches} microbatches of "
        f"{cfg.batch_size // cfg.dp // cfg.microbatches} sequences\n{mesh.grid()}")
    for s, (a, b) in enumerate(trainer.cuts):
        say(f"  stage {s} on p={trainer.where[s]}: layers {a} to {b - 1} of {config.n_layer + 2}")
    say(f"model states: {trainer.optimizer.state_bytes()[0] / 1e6:.2f} MB per rank predicted, "
        f"{sum(bytes_per_parameter(cfg.zero, cfg.dp, trainer.dtype.itemsize)):.4g} bytes for each "
        "of its parameters")
    peak = mesh.world.device.type == "cuda" and trainer.dtype.itemsize == 2 and next(
        (f for name, f in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)

    def write(record):
        if log:  # JSON has no nan and no infinity
            record = {k: v if math.isfinite(v) else None for k, v in record.items()}
            print(json.dumps(record), file=log, flush=True)

    def evaluate(step, batches):
        loss = trainer.validate(data, batches)
        bits = loss / math.log(2) / data.meta.get("bytes_per_token", math.nan)
        write({"step": step, "val_loss": loss, "val_bits_per_byte": bits})
        known = f", {bits:.4f} bits per byte" if math.isfinite(bits) else ""
        say(f"step {step:6d}  validation loss {loss:.4f} nats per token{known}")
        return bits

    def save(step):
        nonlocal saved, started
        saved = checkpoint.save(trainer, step, data.folder)
        say(f"step {step:6d}  saved {saved}", flush=True)
        started = time.perf_counter()

    if saved:
        say(f"step {start:6d}  resumed from {saved}", flush=True)
    tracer = Tracer(mesh) if cfg.trace else None
    done, skipped, started = start, 0, time.perf_counter()
    for step in range(start, cfg.steps):
        if cfg.eval_interval and step and step % cfg.eval_interval == 0:
            evaluate(step, cfg.eval_batches)
            started = time.perf_counter()
        lr = learning_rate(cfg, step)
        batches = data.training(cfg, step, mesh)
        if tracer:
            trainer.span = tracer.at(step, on=2 <= step - start < 5)
        loss, norm = trainer.gradients(batches)
        norm = norm if math.isfinite(loss) else math.nan
        skipped = 0 if math.isfinite(norm) or trainer.scale > 1 else skipped + 1
        trainer.update(norm, lr)
        if tracer:
            trainer.span = tracer.at(None, on=False)
        seconds, started = time.perf_counter() - started, time.perf_counter()
        rate = cfg.batch_size * cfg.block_size / seconds
        scale = {"scale": trainer.scale} if cfg.dtype == "float16" else {}
        write({"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "ms": 1e3 * seconds,
               "tokens_per_s": rate, **scale})
        if step % cfg.log_interval == 0 or step == cfg.steps - 1:
            flops = rate * flops_per_token(config, n_params)
            say(f"step {step:6d}  loss {loss:.4f}  norm {norm:.3f}  lr {lr:.2e}  "
                f"{1e3 * seconds:.0f} ms  {rate:,.0f} tokens/s"
                + (f"  mfu {flops / peak / mesh.world.size:.1%}" if peak else ""), flush=True)
        done = step + 1
        if skipped == MAX_SKIPPED:
            say(f"train.py: loss or gradient norm was not finite for {skipped} steps up to step "
                f"{step}; last good checkpoint: {saved or 'none'}", file=sys.stderr)
            return False
        if trainer.stopping:
            break
        if cfg.save_interval and done % cfg.save_interval == 0 and done < cfg.steps:
            save(done)
    if done > start or not saved:
        save(done)
    if trainer.stopping:
        say(f"stopped by a signal; --resume auto goes on from step {done}", flush=True)
        return True
    if tracer and tracer.events:
        say(report(cfg.trace, tracer, mesh, trainer.lists, trainer.where))
    if cfg.eval_interval:
        windows = (len(data.val) - 1) // cfg.block_size
        bits = evaluate(cfg.steps, max(1, windows // cfg.batch_size))
        say(compared_with_gzip(bits, data.meta) + sample(trainer, data))
    agree = trainer.replicas_agree()
    say(memory(trainer) + "\nreplicas " + ("agree" if agree else "DISAGREE"), flush=True)
    return agree


def compared_with_gzip(bits, meta):
    gzip = meta.get("gzip_bits_per_byte")
    return "" if gzip is None else (
        f"gzip -9 needs {gzip:.4f} bits per byte for the same text: the model "
        f"{'beats' if bits < gzip else 'does not yet beat'} it\n")


def sample(trainer, data):
    """Collective. Text that goes on from the beginning of the validation data, for rank 0."""
    ids = trainer.generate(data.val[:16].tolist(), 96)
    try:
        text = load_tokenizer(data.folder).decode(ids) if trainer.mesh.world.rank == 0 else ""
    except ValueError as error:  # GPT-2's own tokenizer has to be downloaded
        text = f"(token ids {ids}: {error})"
    return "a sample:\n" + "\n".join("  | " + line for line in text.splitlines())


def memory(trainer):
    cuda = trainer.mesh.world.device.type == "cuda"
    unit = 1 if sys.platform == "darwin" else 1024
    peak = (torch.cuda.max_memory_allocated() if cuda
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    return (f"model states: {trainer.optimizer.state_bytes()[1] / 1e6:.2f} MB on this rank "
            f"measured; peak of the {'GPU' if cuda else 'process'} {peak / 1e6:.0f} MB")


def refuse_unlike(cfg):
    """CheckpointError if a rank was started with other flags, or sees another checkpoint."""
    same = json.dumps(asdict(cfg)).encode()
    if cfg.resume != "no":
        same += Path(cfg.resume, checkpoint.MANIFEST).read_bytes()
    unlike = unlike_rank_0(hashlib.sha256(same).digest())
    if unlike:
        raise checkpoint.CheckpointError(f"rank {unlike[0]} has other flags or another checkpoint "
                                         "than rank 0; start all with the same")


def main():
    cfg = parse(sys.argv[1:], __doc__)
    world = int(os.environ.get("WORLD_SIZE", 1))
    try:
        ranks = check(cfg, world)
        data = Data(cfg)
    except ValueError as error:
        fail(error)
    if ranks > world:  # started as one process: start as many as the layout takes
        sys.exit(launch(ranks))
    device = torch.device("cpu")
    if cfg.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    try:
        if world > 1:
            init(device, cfg.timeout)
            refuse_unlike(cfg)
        agree = train(cfg, data, make_mesh(cfg.dp, cfg.pp, cfg.tp, device,
                                           cfg.collectives == "native", cfg.timeout))
        shutdown()
    except checkpoint.CheckpointError as error:
        shutdown(together=False)
        fail(error)
    except CommunicationError as error:
        if first_to_fail():
            print(f"train.py: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # at once: other threads may still wait for that rank
    sys.exit(not agree)


if __name__ == "__main__":
    main()
