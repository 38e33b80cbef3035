"""Races our trainer against torch's own parts, and against whole trainers of others: same model,
weights and data.

    python -m extras.bench                   every row but the whole trainers
        --quick                              does each row run? small models, tensors, two turns:
                                             the figures mean nothing
        --only zero                          rows with that in their name
        --picotron FOLDER --nanogpt FOLDER   whole trainers, too, from clones of theirs
                                             (huggingface/picotron, karpathy/nanoGPT)

A row has two sides in the same processes: two step functions that take turns, each turn after a
barrier. A turn is one step (ZeRO-1: four; a small tensor's collective: several), and its time is
the slowest rank's. ratio: the peer's time / ours in neighbouring turns, the median and the
quartiles; 1.2 means that we do 1.2 steps while the peer does one. The losses of the first steps are
compared, so both sides do the same training. A rank is a process with one thread; only the peer of
"context parallel" is one process with as many threads as we have ranks: torch has no ring attention
for CPUs. MB: by how much a side's model, optimizer and second step raise the memory of the rank
that needs most, buffers shared with other ranks included.
"""

import ctypes
import gc
import importlib.util
import io
import itertools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import collectives
import train
from experts import kind_of
from model import build, cross_entropy, from_seed
from optimizer import BETAS
from run.flags import Parser, check_device, check_layout, parse
from schedules import cut
from sizes import config_of
from test_all import run_rank

SIZES = {  # name: flags of train.py
    "compute": "--n-layer 6 --n-head 6 --n-embd 384 --block-size 128 --batch-size 16",
    "messages": "--n-layer 6 --n-head 6 --n-embd 384 --block-size 32 --batch-size 4",
    "tiny": "--n-layer 4 --n-head 4 --n-embd 128 --block-size 32 --batch-size 8",
    "long": "--n-layer 6 --n-head 6 --n-embd 384 --block-size 2048 --batch-size 1",
    "whole": "--n-layer 4 --n-head 8 --n-embd 256 --block-size 128 --batch-size 8",
    "whole, few": "--n-layer 4 --n-head 8 --n-embd 256 --block-size 128 --batch-size 2"}
QUICK = "--n-layer 2 --n-head 4 --n-embd 32 --block-size 32"  # replaces those of the size


class Row(NamedTuple):
    name: str
    n: int  # ranks
    size: object  # a key of SIZES, or the KB of a collective's tensor
    peer: Callable  # Job -> step function
    layout: str = ""  # flags of train.py
    steps: int = 1  # steps in a turn; of a collective: calls
    vocab_size: int = 256
    untied: bool = False  # has a Llama's head a matrix of its own? (No flag says so)


class Job:
    """What both sides of a row need on one rank: flags, sizes, this rank's batches, our mesh."""

    def __init__(self, row, rank, args):
        """args: the command line."""
        self.row, self.rank, self.args = row, rank, args
        self.n = row.n
        self.numel = 0  # elements of a collective's tensor
        if row.size not in SIZES:
            self.numel = 256 * min(row.size, 1024 if args.quick else row.size)  # 4 bytes each
        quick = QUICK if args.quick else ""
        words = f"{SIZES.get(row.size, '')} {quick} {row.layout} --device cpu"
        self.cfg = parse(words.split())
        check_layout(self.cfg, 1)
        check_device(self.cfg, 1, 0)
        self.cfg.untied = row.untied
        cfg = self.cfg
        self.config = config_of(cfg, row.vocab_size)  # the sizes of the model
        self.mesh = train.make_mesh(cfg, "cpu")
        ids = torch.randint(row.vocab_size, (cfg.batch_size, cfg.block_size + 1),
                            generator=torch.Generator().manual_seed(0))
        # Neighbours in number belong to one replica; each replica has its own sequences
        mine = ids.chunk(cfg.dp)[rank * cfg.dp // row.n].chunk(cfg.microbatches)
        self.batches = [(rows[:, :-1], rows[:, 1:]) for rows in mine]

    def whole_model(self):
        """Our model, not split, with the initial weights with which both sides begin."""
        return build(self.config, self.cfg.seed, kind=kind_of(self.config))


# ---- both sides: a function of a Job returns a step function ----
# step() runs one step, and returns this rank's share of the loss; of a collective it is one call


def ours(job):
    if job.row.size not in SIZES:
        collective = getattr(collectives, job.row.name)
        tensor = torch.zeros(job.numel)
        group = job.mesh.group("dp")
        return lambda: collective(tensor, group)
    value = from_seed(job.config, job.cfg.seed)
    trainer = train.Trainer(job.cfg, job.mesh, job.config, value)

    def step():
        loss, _, _ = trainer.step(job.batches, job.cfg.lr)
        return loss.item() if job.rank == 0 else 0.0  # the loss of all ranks together

    return step


# ---- torch's side, as in torch's tutorials ----
# DDP and FSDP average gradients over the ranks, so in loop() a loss is divided by the tokens of
# this rank, not by those of all ranks


def adamw(params, cfg, kind=torch.optim.AdamW, **more):
    """torch's fused AdamW, with weight decay for matrices only. kind: the class, which may be one
    around AdamW; more: its further arguments."""
    matrices = []
    others = []
    for param in params:
        (matrices if param.dim() > 1 else others).append(param)
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay},
              {"params": others, "weight_decay": 0.0}]
    return kind(groups, lr=cfg.lr, betas=BETAS, fused=True, **more)


def loop(job, model, optimizer, share=1.0):
    """The usual training step, for models that hide their parallelism. share: the part of this
    rank's loss in the mean over all ranks."""
    tokens = sum(ids.numel() for ids, _ in job.batches)  # tokens of a step on this rank

    def step():
        total = 0.0
        for ids, targets in job.batches:
            loss = model(ids, targets) / tokens
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), job.cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return total * share

    return step


def torch_collective(job):
    """gloo's, of the row's name."""
    whole = torch.zeros(job.numel)
    own = torch.zeros(job.numel // job.n)
    calls = {"all_reduce": lambda: dist.all_reduce(whole),
             "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole),
             "all_gather": lambda: dist.all_gather_into_tensor(whole, own)}
    return calls[job.row.name]


def ddp(job):
    model = job.whole_model()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return loop(job, wrapped, adamw(model.parameters(), job.cfg), 1 / job.n)


def ddp_zero1(job):
    """DistributedDataParallel with ZeroRedundancyOptimizer."""
    model = job.whole_model()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters(), job.cfg, ZeroRedundancyOptimizer,
                      optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True)
    return loop(job, wrapped, optimizer, 1 / job.n)


def fsdp(job):
    """FSDP2, which is ZeRO-3."""
    mesh = init_device_mesh("cpu", (job.n,))
    model = job.whole_model()
    for block in model.layers[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(job, model, adamw(model.parameters(), job.cfg), 1 / job.n)


def rows_by_rank(linear, parts, n):
    """Sort the rows of a matrix that is several in one, such as q, k and v: DTensor gives rank r
    the r-th of n equal pieces, which now has the r-th piece of each part."""
    for param in linear.parameters():
        pieces = zip(*(part.chunk(n) for part in param.data.split(parts)), strict=True)
        param.data = torch.cat([piece for of_rank in pieces for piece in of_rank])


def split_by_dtensor(job, model, mesh, sp):
    """Replace the model's matrices by DTensors; sp: for sequence parallelism."""
    tokens = Shard(1) if sp else Replicate()  # how activations lie between blocks
    column = ColwiseParallel(input_layouts=tokens)
    row = RowwiseParallel(output_layouts=tokens)
    first, *blocks, last = model.layers
    for block in blocks:
        rows_by_rank(block.attn.c_attn, block.attn.parts, job.n)
        rows_by_rank(block.mlp.c_fc, block.mlp.parts, job.n)
        parallelize_module(block, mesh, {"attn.c_attn": column, "attn.c_proj": row,
                                         "mlp.c_fc": column, "mlp.c_proj": row})
    parallelize_module(first, mesh, {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)})
    parallelize_module(last, mesh, {"lm_head": ColwiseParallel(
        input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)})
    last.lm_head.weight = first.wte.weight  # tied again
    if sp:
        for layer in (*blocks, last):
            parallelize_module(layer, mesh, {name: SequenceParallel() for name, _ in
                                             layer.named_children() if name.startswith("ln_")})
        own_positions = torch.arange(job.cfg.block_size).chunk(job.n)[job.rank]
        first.positions = own_positions
        # wpe is no DTensor, and this rank has the gradients of its own positions only: sum them
        first.wpe.weight.register_post_accumulate_grad_hook(
            lambda param: dist.all_reduce(param.grad))


def dtensor(job):
    """Tensor parallelism by DTensor; with --sp sequence parallelism, too."""
    model = job.whole_model()
    split_by_dtensor(job, model, init_device_mesh("cpu", (job.n,)), job.cfg.sp)
    ids, targets = job.batches[0]
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizers = [(params, adamw(params, job.cfg)) for params in (split, whole)]

    def step():
        with loss_parallel():
            loss = model(ids, targets) / targets.numel()
            loss.backward()
        # The global norm: of DTensors and of other tensors apart, then of both
        norm_of_split = nn.utils.get_total_norm([p.grad for p in split]).full_tensor()
        norm = torch.hypot(norm_of_split, nn.utils.get_total_norm([p.grad for p in whole]))
        for params, optimizer in optimizers:
            nn.utils.clip_grads_with_norm_(params, job.cfg.grad_clip, norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss.full_tensor().item() / job.n

    return step


def pipelining(job):
    """1F1B of torch.distributed.pipelining."""
    cfg = job.cfg
    last = job.rank == job.n - 1
    model = job.whole_model()
    tokens = cfg.batch_size * cfg.block_size  # tokens of a step
    start, stop = cut(model.config.layer_costs(), job.n)[job.rank]
    part = nn.Sequential(*model.layers[start:stop])
    stage = PipelineStage(part, job.rank, job.n, torch.device("cpu"))
    schedule = Schedule1F1B(stage, cfg.microbatches,
                            lambda logits, targets: cross_entropy(logits, targets) / tokens,
                            scale_grads=False)
    all_ids, all_targets = zip(*job.batches, strict=True)
    ids, targets = torch.cat(all_ids), torch.cat(all_targets)
    params = list(part.parameters())
    # The matrix of embedding and head. (There are two ranks, and each has one of the two ends)
    tied = part[-1].lm_head.weight if last else part[0].wte.weight
    optimizer = adamw(params, cfg)

    def step():
        losses = []
        if last:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step(ids)
        dist.all_reduce(tied.grad)
        grads = [p.grad for p in params if last or p is not tied]  # `tied` counts once in the norm
        square = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(params, cfg.grad_clip, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().item() if last else 0.0

    return step


def threads(job):
    """One process with as many threads as there are ranks; the other ranks wait."""
    if job.rank > 0:
        return lambda: 0.0
    model = job.whole_model()
    step = loop(job, model, adamw(model.parameters(), job.cfg))

    def threaded():
        torch.set_num_threads(job.n)
        loss = step()
        torch.set_num_threads(1)
        return loss

    return threaded


# ---- whole trainers that a user might pick instead ----
# Imported from folders that have their files: nothing of theirs is in this repository or is changed

# What picotron imports and a step on CPUs never calls: kernels, downloads, data sets, the log
STAND_INS = ("flash_attn.flash_attn_interface", "flash_attn.layers.rotary",
             "flash_attn.ops.triton.layer_norm", "huggingface_hub", "datasets", "transformers",
             "safetensors", "wandb")


def load(name, path):
    """The module in this file, under a name of ours: their model.py and train.py are not ours."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def load_picotron(folder, rank):
    """picotron's train.py, with all that it imports from its other files."""
    # picotron reads its choices from the environment
    os.environ.update(DEVICE="cpu", DTYPE="float32", FLASH_ATTEN="0", LOCAL_RANK=str(rank))
    for name in STAND_INS:
        sys.modules[name] = MagicMock()
    torch.cuda.synchronize = lambda: None  # picotron's pipeline calls this after each message
    sys.path.insert(0, str(folder))
    return load("picotron_train", folder / "train.py")


class Batches:
    """In the place of picotron's data loader: gives the microbatches of a step again and again."""

    def __init__(self, microbatches):
        self.grad_acc_steps = len(microbatches)
        self.microbatches = itertools.cycle(microbatches)

    def __next__(self):
        ids, targets = next(self.microbatches)
        return {"input_ids": ids, "target_ids": targets, "hidden_states": None,
                "position_ids": torch.arange(ids.size(1))}


def picotron_weights(ours):
    """{picotron's name of a module: (its whole matrix, the dim that tensor ranks split)}; a norm,
    which is not split, has None. ours: a whole Llama (llama.py)."""
    first, *blocks, last = ours.layers
    found = {"embedding": (first.wte.weight, 0), "final_norm": (last.ln_f.weight, None),
             "final_proj": (last.lm_head.weight, 0)}
    for i, block in enumerate(blocks):
        q, k, v = block.attn.c_attn.weight.split(block.attn.parts)
        gate, up = block.mlp.c_fc.weight.split(block.mlp.parts)
        here = {"input_layernorm": (block.ln_1.weight, None), "attention.q_proj": (q, 0),
                "attention.k_proj": (k, 0), "attention.v_proj": (v, 0),
                "attention.out_proj": (block.attn.c_proj.weight, 1),
                "post_attention_layernorm": (block.ln_2.weight, None),
                "mlp.gate_proj": (gate, 0), "mlp.up_proj": (up, 0),
                "mlp.down_proj": (block.mlp.c_proj.weight, 1)}
        found |= {f"decoder_layers.{i}.{name}": pair for name, pair in here.items()}
    return found


def picotron(job):
    """picotron's Llama, tensor-parallel layers, 1F1B, DataParallelBucket, train_step, and AdamW as
    its train.py makes it: not fused, no clipping."""
    cfg, config = job.cfg, job.config
    theirs = load_picotron(Path(job.args.picotron).resolve(), job.rank)
    theirs.setup_process_group_manager(cfg.tp, cfg.cp, cfg.pp, cfg.dp)
    ranks = theirs.pgm.process_group_manager
    model = theirs.Llama(SimpleNamespace(
        vocab_size=config.vocab_size, max_position_embeddings=config.block_size,
        hidden_size=config.n_embd, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head,
        intermediate_size=config.n_hidden, rope_theta=config.rope_theta,
        rms_norm_eps=config.norm_eps))
    if cfg.tp > 1:
        model = theirs.apply_tensor_parallel(model)
    if cfg.pp > 1:
        model = theirs.PipelineParallel(model, model.model_config)
    weights = picotron_weights(job.whole_model())
    for name, param in model.named_parameters():
        whole, dim = weights[name.removesuffix(".weight")]
        mine = whole if dim is None else whole.chunk(cfg.tp, dim)[ranks.tp_rank]
        param.data.copy_(mine)
    if cfg.dp > 1:
        model = theirs.DataParallelBucket(model)
    optimizer = theirs.AdamW(model.parameters(), lr=cfg.lr)
    batches = Batches(job.batches)
    device = torch.device("cpu")
    shape = (cfg.batch_size // cfg.dp // cfg.microbatches, config.block_size, config.n_embd)

    def step():
        optimizer.zero_grad()
        if cfg.pp > 1:
            loss = theirs.train_step_pipeline_1f1b(model, batches, shape, device, torch.float32)
        else:
            loss = theirs.train_step(model, batches, device)
        loss = theirs.average_loss_across_dp_cp_ranks(loss, device)
        optimizer.step()
        if cfg.dp > 1:
            model.reset()
        # All replicas and tensor ranks of the last stage have the same mean; others have 0
        return loss / (cfg.dp * cfg.tp)

    return step


class NanoGPT(nn.Module):
    """Sums the loss of nanoGPT's model over the tokens, as loop() expects."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, targets):
        _, loss = self.model(ids.contiguous(), targets.contiguous())
        return loss * targets.numel()


def nanogpt(job):
    """nanoGPT's GPT and its optimizer. One process."""
    cfg, config = job.cfg, job.config
    theirs = load("nanogpt_model", Path(job.args.nanogpt, "model.py"))
    with redirect_stdout(io.StringIO()):  # it prints its number of parameters
        model = theirs.GPT(theirs.GPTConfig(
            block_size=config.block_size, vocab_size=config.vocab_size, n_layer=config.n_layer,
            n_head=config.n_head, n_embd=config.n_embd, dropout=0.0, bias=True))
        optimizer = model.configure_optimizers(cfg.weight_decay, cfg.lr, BETAS, "cpu")
    params = dict(model.named_parameters())
    for name, param in job.whole_model().canonical_parameters():
        params[name].data.copy_(param)
    return loop(job, NanoGPT(model), optimizer)


# ---- the rows ----
# Data parallelism is raced where computing rules and where messages rule; pipelines and tensor
# parallelism where computing rules and where layers are tiny

P2 = "--pp 2 --microbatches 8"
LLAMA = "--tp 2 --arch llama --n-kv-head 2"
PICOTRON = "--arch llama --n-kv-head 4 --grad-clip 0"
ROWS = [
    # A turn's calls have 256 KB together, or it has one call
    *(Row("all_reduce", n, kb, torch_collective, f"--dp {n}", steps=max(1, 256 // kb))
      for n in (2, 4) for kb in (4, 64, 1024, 16384, 65536)),
    *(Row(name, n, 65536, torch_collective, f"--dp {n}")
      for name in ("reduce_scatter", "all_gather") for n in (2, 4)),
    *(Row("DDP", n, size, ddp, f"--dp {n}") for n in (2, 4) for size in ("compute", "messages")),
    # 4 steps in a turn: ZeRO-1's weights travel during the next step, but a turn ends only when the
    # weights of its last step have arrived
    *(Row("ZeRO-1", 2, size, ddp_zero1, "--dp 2 --zero 1", steps=4)
      for size in ("compute", "messages")),
    *(Row("ZeRO-3", n, size, fsdp, f"--dp {n} --zero 3")
      for n in (2, 4) for size in ("compute", "messages")),
    *(Row("1F1B", 2, size, pipelining, P2) for size in ("compute", "tiny")),
    *(Row("tensor parallel", 2, size, dtensor, "--tp 2") for size in ("compute", "tiny")),
    *(Row("sequence parallel", 2, size, dtensor, "--tp 2 --sp") for size in ("compute", "tiny")),
    Row("tensor parallel, Llama", 2, "compute", dtensor, LLAMA),
    Row("context parallel", 2, "long", threads, "--cp 2"),
    # Whole trainers. Each replica has 8 sequences, or 2
    *(Row(f"picotron {name}", n, size, picotron, f"{PICOTRON} {layout}", vocab_size=1024,
          untied=True) for name, n, size, layout in (
        ("one process", 1, "whole", ""),
        ("dp 2", 2, "whole", "--dp 2 --batch-size 16"),
        ("dp 2", 2, "whole, few", "--dp 2 --batch-size 4"),
        ("tp 2", 2, "whole", "--tp 2"),
        ("pp 2", 2, "whole", "--pp 2 --microbatches 4"),
        ("dp 2 tp 2 pp 2", 8, "whole",
         "--dp 2 --tp 2 --pp 2 --microbatches 4 --batch-size 16"))),
    Row("nanoGPT one process", 1, "whole", nanogpt, vocab_size=1024),
]


# ---- the race ----


def highest(values):
    """The largest of the ranks' values, element by element."""
    values = torch.tensor(values, dtype=torch.double)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def memory():
    """(bytes of this process without those of files, their peak so far)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kb = {words[0]: int(words[1]) for words in map(str.split, lines) if words[-1] == "kB"}
    return 1e3 * (kb["VmRSS:"] - kb["RssFile:"]), 1e3 * (kb["VmHWM:"] - kb["RssFile:"])


def race(row, rank, args):
    """(milliseconds of our step, of the peer's, quartiles of the ratio, bytes of ours, of the
    peer's), the same on each rank."""
    job = Job(row, rank, args)
    steps = []  # side 0 is ours, side 1 the peer's
    losses = torch.zeros(2, 2)  # losses of the first two steps, a column for each side
    peaks = []

    def turn(side, num_steps):
        """Take steps of one side. No message travels when this returns."""
        for _ in range(num_steps):
            loss = steps[side]()
        job.mesh.background.start(lambda: None)()  # returns after all that was started before
        return loss

    def seconds_of_turn(side):
        dist.barrier()
        start = time.perf_counter()
        turn(side, row.steps)
        return time.perf_counter() - start

    for side, make_step in enumerate((ours, row.peer)):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else the side might reuse what others have freed
        before, _ = memory()
        steps.append(make_step(job))
        for number in (0, 1):  # the first step warms up, the second shows the peak
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            loss = turn(side, 1)
            if row.size in SIZES:
                losses[number, side] = loss
        peaks.append(memory()[1] - before)
    dist.all_reduce(losses)  # the sums of the ranks' shares
    assert torch.allclose(losses[:, 0], losses[:, 1], rtol=1e-3), (row, losses)
    # Pairs of turns, as many as fit into some seconds by the first pair's time, 5 to 200
    seconds = 5 if row.size in SIZES else 2
    times = []  # [ours, the peer's] of each pair
    pairs = 1
    while len(times) < pairs:
        pair = [0.0, 0.0]
        first = len(times) % 2  # the sides take turns in going first
        for side in (first, 1 - first):
            pair[side] = seconds_of_turn(side)
        times.append(pair)
        if len(times) == 1:
            longest = highest([sum(pair)]).item()
            pairs = 2 if args.quick else int(min(max(seconds / longest, 5), 200))
    times = highest(times) / row.steps
    ratios = times[:, 1] / times[:, 0]
    quartiles = ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.double))
    ms = (1e3 * times).median(0).values
    return *ms.tolist(), *quartiles.tolist(), *highest(peaks).tolist()


def race_all(rank, rows, args):
    """One of the processes that race these rows, which have the same number of ranks."""
    warnings.simplefilter("ignore")  # torch's side warns
    for row in rows:
        ms, peer_ms, low, ratio, high, peak, peer_peak = race(row, rank, args)
        gc.collect()
        dist.barrier()
        size = row.size if row.size in SIZES else f"{row.size} KB"
        if rank == 0:
            print(f"{row.name:24}{row.n:2}  {size:10}{ms:9.2f}{peer_ms:9.2f}{ratio:7.2f}  "
                  f"{low:.2f} - {high:.2f}{peak / 1e6:7.0f}{peer_peak / 1e6:7.0f}", flush=True)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="does each row run?")
    parser.add_argument("--only", default="", metavar="NAME", help="rows whose name contains it")
    parser.add_argument("--picotron", default="", metavar="FOLDER", help="a checkout of picotron")
    parser.add_argument("--nanogpt", default="", metavar="FOLDER", help="a checkout of nanoGPT")
    args = parser.parse_args()
    given = {picotron: args.picotron, nanogpt: args.nanogpt}
    for folder in filter(None, given.values()):
        if not Path(folder, "train.py").is_file():
            parser.error(f"{folder} has no train.py; give the folder of a checkout")
    every = [row for row in ROWS if given.get(row.peer, True)]
    rows = [row for row in every if args.only.lower() in row.name.lower()]
    if not rows:
        names = ", ".join(dict.fromkeys(row.name for row in every))
        parser.error(f"--only {args.only} is in no row's name; try {names}")
    print(f"torch {torch.__version__}, {os.cpu_count()} cores\n{'row':24}{'n':>2}  {'size':10}"
          f"{'ours ms':>9}{'peer ms':>9}{'ratio':>7}  {'quartiles':>11}{'MB':>7}{'MB':>7}",
          flush=True)
    for n in sorted({row.n for row in rows}):
        same = [row for row in rows if row.n == n]
        with tempfile.TemporaryDirectory() as folder:
            # fork: ranks need not import torch once more. (This process has no threads)
            torch.multiprocessing.start_processes(
                run_rank, (n, f"{folder}/meeting", race_all, (same, args)), n,
                start_method="fork")


if __name__ == "__main__":
    main()
