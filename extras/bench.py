"""Races our trainer against torch's own parts, and against whole trainers of others: same model,
weights and data.

    python -m extras.bench                   every row but the whole trainers
        --only zero                          rows with that in their name or size
        --picotron FOLDER --nanogpt FOLDER   whole trainers, too, from clones of theirs

A row has two sides in the same processes, of one thread each: two step functions that take turns,
each turn after a barrier. A turn is one step (or several: ROWS), and its time is the slowest
rank's. ratio: the peer's time / ours in neighbouring turns, the median and the quartiles; 1.2 means
that we do 1.2 steps while the peer does one. The losses of the first turns are compared, so both
sides do the same training. MB: by how much a side's model, optimizer and second turn raise the
memory of the rank that needs most, buffers shared with other ranks included.
"""

import ctypes
import gc
import itertools
import os
import runpy
import sys
import tempfile
import time
import warnings
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
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import collectives
import train
from experts import kind_of
from model import build, cross_entropy, from_seed
from optimizer import BETAS
from run.flags import Parser, check_layout, parse
from run.weights import parts_of, settings_of
from schedules import cut
from sizes import config_of
from test_all import run_rank


class Job:
    """What both sides of a row need on one rank: flags, sizes, our mesh, this rank's batches."""

    def __init__(self, row, cfg, args):
        """cfg: the row's flags of train.py; args: the command line."""
        self.row, self.cfg, self.args = row, cfg, args
        self.mesh = train.make_mesh(cfg, "cpu")
        self.rank, self.n = self.mesh.rank, self.mesh.world.size
        is_whole = row.size.startswith("whole")
        cfg.untied = is_whole  # a Llama's head has a matrix of its own: picotron's has
        vocab_size = 1024 if is_whole else 256
        self.config = config_of(cfg, vocab_size)
        ids = torch.randint(vocab_size, (cfg.batch_size, cfg.block_size + 1),
                            generator=torch.Generator().manual_seed(0))
        index, size = self.mesh.index_and_size("dp")
        own = ids.chunk(size)[index].chunk(cfg.microbatches)
        self.batches = [(rows[:, :-1], rows[:, 1:]) for rows in own]

    def whole_model(self):
        """Our model, not split, with the initial weights with which both sides begin."""
        return build(self.config, self.cfg.seed, kind=kind_of(self.config))

    def tensor(self):
        """A collective's tensor, of the row's size."""
        return torch.zeros(int(self.row.size.split()[0]) * 256)  # 4 bytes each


# ---- our side. Like each side below: a function from a Job to a step function ----
# step() runs one step, and returns this rank's share of the loss


def our_trainer(job):
    value = from_seed(job.config, job.cfg.seed)
    trainer = train.Trainer(job.cfg, job.mesh, job.config, value)

    def step():
        loss, _, _ = trainer.step(job.batches, job.cfg.lr)
        return loss.item() if job.rank == 0 else 0.0  # the loss of all ranks together

    return step


def calls(collective, *args):
    """A step function that calls a collective, which has no loss."""
    def step():
        collective(*args)
        return 0.0

    return step


def our_collective(job):
    return calls(getattr(collectives, job.row.name), job.tensor(), job.mesh.group("dp"))


# ---- torch's side, as in torch's tutorials ----


def gloo_collective(job):
    whole = job.tensor()
    own = torch.zeros(len(whole) // job.n)
    table = {"all_reduce": (dist.all_reduce, whole),
             "reduce_scatter": (dist.reduce_scatter_tensor, own, whole),
             "all_gather": (dist.all_gather_into_tensor, whole, own)}
    return calls(*table[job.row.name])


def adamw(job, model, kind=torch.optim.AdamW, **more):
    """torch's fused AdamW, with weight decay for matrices only. kind: the class, which may be one
    around AdamW; more: its further arguments."""
    groups = {}  # no kernel takes DTensors together with other tensors
    for param in model.parameters():
        groups.setdefault((param.dim() > 1, isinstance(param, DTensor)), []).append(param)
    return kind([{"params": params, "weight_decay": job.cfg.weight_decay if is_matrix else 0.0}
                 for (is_matrix, _), params in groups.items()],
                lr=job.cfg.lr, betas=BETAS, fused=True, **more)


def norm_of(grads):
    """The global norm. Again DTensors and other tensors apart."""
    split = [grad for grad in grads if isinstance(grad, DTensor)]
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    norm = get_total_norm(whole)  # 0 if there are none
    return torch.hypot(norm, get_total_norm(split).full_tensor()) if split else norm


def usual_step(job, optimizer, forward_backward, global_norm=norm_of):
    """The usual step: forward_backward(), which returns this rank's share of the loss; clip by the
    global norm; step the weights."""
    groups = [group["params"] for group in optimizer.param_groups]

    def step():
        loss = forward_backward()
        norm = global_norm([param.grad for params in groups for param in params])
        for params in groups:
            clip_grads_with_norm_(params, job.cfg.grad_clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def loop(job, model, optimizer, share=1.0):
    """The usual step of a model that hides its parallelism. model(ids, targets): the loss, summed
    over the tokens. share: the part of this rank's loss in the mean over all ranks. (DDP and FSDP
    average gradients over the ranks, so the loss is divided by the tokens of this rank.)"""
    tokens = sum(ids.numel() for ids, _ in job.batches)  # tokens of a step on this rank

    def forward_backward():
        total = 0.0
        for ids, targets in job.batches:
            loss = model(ids, targets) / tokens
            loss.backward()
            total += loss.item()
        return total * share

    return usual_step(job, optimizer, forward_backward)


def ddp(job, **more):
    """more: arguments of adamw."""
    model = DistributedDataParallel(job.whole_model(), gradient_as_bucket_view=True)
    return loop(job, model, adamw(job, model, **more), 1 / job.n)


def ddp_zero1(job):
    return ddp(job, kind=ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW,
               parameters_as_bucket_view=True)


def fsdp(job):
    """FSDP2, which is ZeRO-3."""
    mesh = init_device_mesh("cpu", (job.n,))
    model = job.whole_model()
    for block in model.layers[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(job, model, adamw(job, model), 1 / job.n)


def threads(job):
    """One process with as many threads as there are ranks, because torch has no ring attention for
    CPUs; the other ranks wait."""
    if job.rank > 0:
        return lambda: 0.0
    model = job.whole_model()
    step = loop(job, model, adamw(job, model))

    def threaded():
        torch.set_num_threads(job.n)
        loss = step()
        torch.set_num_threads(1)
        return loss

    return threaded


def rows_by_rank(linear, parts, n):
    """Sort the rows of a matrix that is several in one, such as q, k and v: DTensor gives rank r
    the r-th of n equal pieces, which now has the r-th piece of each part."""
    for param in linear.parameters():
        pieces = zip(*(part.chunk(n) for part in param.data.split(parts)), strict=True)
        param.data = torch.cat([piece for of_rank in pieces for piece in of_rank])


def dtensor(job):
    """Tensor parallelism by DTensor; with --sp sequence parallelism, too."""
    model = job.whole_model()
    mesh = init_device_mesh("cpu", (job.n,))
    tokens = Shard(1) if job.cfg.sp else Replicate()  # how activations lie between blocks
    column = parallel.ColwiseParallel(input_layouts=tokens)
    row = parallel.RowwiseParallel(output_layouts=tokens)
    first, *blocks, last = model.layers
    for block in blocks:
        rows_by_rank(block.attn.c_attn, block.attn.parts, job.n)
        rows_by_rank(block.mlp.c_fc, block.mlp.parts, job.n)
        parallel.parallelize_module(block, mesh, {"attn.c_attn": column, "attn.c_proj": row,
                                                  "mlp.c_fc": column, "mlp.c_proj": row})
    parallel.parallelize_module(first, mesh, {"wte": parallel.RowwiseParallel(
        input_layouts=Replicate(), output_layouts=tokens)})
    parallel.parallelize_module(last, mesh, {"lm_head": parallel.ColwiseParallel(
        input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)})
    last.lm_head.weight = first.wte.weight  # tied again
    if job.cfg.sp:
        for layer in (*blocks, last):
            norms = [name for name, _ in layer.named_children() if name.startswith("ln_")]
            plan = {name: parallel.SequenceParallel() for name in norms}
            parallel.parallelize_module(layer, mesh, plan)
        first.positions = torch.arange(job.cfg.block_size).chunk(job.n)[job.rank]
        # wpe is no DTensor, and this rank has the gradients of its own positions only: sum them
        first.wpe.weight.register_post_accumulate_grad_hook(
            lambda param: dist.all_reduce(param.grad))
    (ids, targets), = job.batches

    def forward_backward():
        with parallel.loss_parallel():
            loss = model(ids, targets) / targets.numel()
            loss.backward()
        return loss.full_tensor().item() / job.n

    return usual_step(job, adamw(job, model), forward_backward)


def pipelining(job):
    """1F1B of torch.distributed.pipelining."""
    is_last = job.rank == job.n - 1
    start, stop = cut(job.config.layer_costs(), job.n)[job.rank]
    part = nn.Sequential(*job.whole_model().layers[start:stop])
    tokens = job.cfg.batch_size * job.cfg.block_size  # tokens of a step
    stage = PipelineStage(part, job.rank, job.n, torch.device("cpu"))
    schedule = Schedule1F1B(stage, job.cfg.microbatches,
                            lambda logits, targets: cross_entropy(logits, targets) / tokens,
                            scale_grads=False)
    ids, targets = map(torch.cat, zip(*job.batches, strict=True))
    inputs = [] if is_last else [ids]
    # The matrix of embedding and head. (There are two ranks, and each has one of the two ends)
    tied = part[-1].lm_head.weight if is_last else part[0].wte.weight

    def forward_backward():
        losses = []  # losses of the microbatches; stays empty on the first rank
        schedule.step(*inputs, target=targets, losses=losses)
        dist.all_reduce(tied.grad)
        return float(sum(losses))

    def norm_of_stages(grads):
        once = [grad for grad in grads if is_last or grad is not tied.grad]
        square = norm_of(once).square()
        dist.all_reduce(square)
        return square.sqrt()

    return usual_step(job, adamw(job, part), forward_backward, norm_of_stages)


# ---- whole trainers that a user might pick instead ----
# Run from folders that have their files: nothing of theirs is in this repository or is changed

# What picotron imports and a step on CPUs never calls: kernels, downloads, data sets, the log
STAND_INS = ("flash_attn.flash_attn_interface", "flash_attn.layers.rotary",
             "flash_attn.ops.triton.layer_norm", "huggingface_hub", "datasets", "transformers",
             "safetensors", "wandb")


def load(folder, file):
    """What a file of theirs defines. (Not by import: files of ours have these names.)"""
    silent = {"print": lambda *words: None}  # nanoGPT prints its sizes
    return SimpleNamespace(**runpy.run_path(str(Path(folder, file)), silent))


class Batches:
    """In the place of picotron's data loader: gives the microbatches of a step again and again."""

    def __init__(self, microbatches):
        self.grad_acc_steps = len(microbatches)
        self.microbatches = itertools.cycle(microbatches)

    def __next__(self):
        ids, targets = next(self.microbatches)
        return {"input_ids": ids, "target_ids": targets, "hidden_states": None,
                "position_ids": torch.arange(ids.size(1))}


def fill_picotron(job, model, tp_rank):
    """Give picotron's model, or this rank's slice of it, our initial weights."""
    from picotron.checkpoint import InitializationManager

    weights = {}
    for name, param in job.whole_model().canonical_parameters():
        parts = parts_of(name, param.shape, job.config, "llama")  # {Hugging Face's name: shape}
        values = param.data.split([rows for rows, *_ in parts.values()])
        for part, whole in zip(parts, values, strict=True):
            weights[InitializationManager.convert_safetensors_to_hf_name(None, part)] = whole
    for name, param in model.named_parameters():
        own = weights[name]
        for dim, size in enumerate(param.shape):
            if size < own.size(dim):  # tensor ranks split this dim
                own = own.split(size, dim)[tp_rank]
        param.data.copy_(own)


def picotron(job):
    """picotron's Llama, tensor-parallel layers, 1F1B, DataParallelBucket, train_step, and AdamW as
    its train.py makes it: not fused, no clipping."""
    cfg = job.cfg
    # picotron reads its choices from the environment
    os.environ.update(DEVICE="cpu", DTYPE="float32", FLASH_ATTEN="0", LOCAL_RANK=str(job.rank))
    sys.modules.update((name, MagicMock()) for name in STAND_INS)
    torch.cuda.synchronize = lambda: None  # picotron's pipeline calls this after each message
    sys.path.insert(0, job.args.picotron)
    theirs = load(job.args.picotron, "train.py")
    theirs.setup_process_group_manager(cfg.tp, cfg.cp, cfg.pp, cfg.dp)
    model = theirs.Llama(SimpleNamespace(**settings_of(job.config)))
    if cfg.tp > 1:
        model = theirs.apply_tensor_parallel(model)
    if cfg.pp > 1:
        model = theirs.PipelineParallel(model, model.model_config)
    fill_picotron(job, model, theirs.pgm.process_group_manager.tp_rank)
    if cfg.dp > 1:
        model = theirs.DataParallelBucket(model)
    optimizer = theirs.AdamW(model.parameters(), lr=cfg.lr)
    batches = Batches(job.batches)
    device = torch.device("cpu")
    shape = (cfg.batch_size // cfg.dp // cfg.microbatches, cfg.block_size, cfg.n_embd)

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


def nanogpt(job):
    """nanoGPT's GPT and its optimizer. One process."""
    cfg, config = job.cfg, job.config
    theirs = load(job.args.nanogpt, "model.py")
    model = theirs.GPT(theirs.GPTConfig(config.block_size, config.vocab_size, config.n_layer,
                                        config.n_head, config.n_embd, dropout=0.0))
    # Our names are theirs. Not strict: theirs has the tied matrix under the head's name as well
    model.load_state_dict(dict(job.whole_model().canonical_parameters()), strict=False)
    optimizer = model.configure_optimizers(cfg.weight_decay, cfg.lr, BETAS, "cpu")

    def summed_loss(ids, targets):
        _, loss = model(ids.contiguous(), targets.contiguous())
        return loss * targets.numel()

    return loop(job, summed_loss, optimizer)


# ---- the rows ----
# Data parallelism is raced where computing rules and where messages rule; pipelines and tensor
# parallelism where computing rules and where layers are tiny

SIZES = {  # name: flags of train.py
    "compute": "--n-layer 6 --n-head 6 --n-embd 384 --block-size 128 --batch-size 16",
    "messages": "--n-layer 6 --n-head 6 --n-embd 384 --block-size 32 --batch-size 4",
    "tiny": "--n-layer 4 --n-head 4 --n-embd 128 --block-size 32 --batch-size 8",
    "long": "--n-layer 6 --n-head 6 --n-embd 384 --block-size 2048 --batch-size 1",
    "whole": "--n-layer 4 --n-head 8 --n-embd 256 --block-size 128 --batch-size 8",
    "whole, few": "--n-layer 4 --n-head 8 --n-embd 256 --block-size 128 --batch-size 2"}


class Row(NamedTuple):
    name: str
    size: str  # a key of SIZES, or the bytes of a collective, "64 KB"
    layout: str  # flags of train.py
    theirs: object  # Job -> step function
    ours: object = our_trainer
    steps: int = 1  # steps in a turn


PICOTRON = "--arch llama --n-kv-head 4 --grad-clip 0"
ROWS = [
    # A turn's calls have 256 KB together, or it has one call
    *(Row("all_reduce", f"{kb} KB", f"--dp {n}", gloo_collective, our_collective, max(1, 256 // kb))
      for n in (2, 4) for kb in (4, 64, 1024, 16384, 65536)),
    *(Row(name, "65536 KB", f"--dp {n}", gloo_collective, our_collective)
      for name in ("reduce_scatter", "all_gather") for n in (2, 4)),
    *(Row("DDP", size, f"--dp {n}", ddp) for n in (2, 4) for size in ("compute", "messages")),
    # 4 steps in a turn: ZeRO-1's weights travel during the next step, but a turn ends only when the
    # weights of its last step have arrived
    *(Row("ZeRO-1", size, "--dp 2 --zero 1", ddp_zero1, steps=4)
      for size in ("compute", "messages")),
    *(Row("ZeRO-3", size, f"--dp {n} --zero 3", fsdp)
      for n in (2, 4) for size in ("compute", "messages")),
    *(Row("1F1B", size, "--pp 2 --microbatches 8", pipelining) for size in ("compute", "tiny")),
    *(Row("tensor parallel", size, "--tp 2", dtensor) for size in ("compute", "tiny")),
    *(Row("sequence parallel", size, "--tp 2 --sp", dtensor) for size in ("compute", "tiny")),
    Row("tensor parallel, Llama", "compute", "--tp 2 --arch llama --n-kv-head 2", dtensor),
    Row("context parallel", "long", "--cp 2", threads),
    # Whole trainers. Each replica has 8 sequences, or 2
    *(Row(f"picotron {name}", size, f"{PICOTRON} {layout}", picotron) for name, size, layout in (
        ("one process", "whole", ""),
        ("dp 2", "whole", "--dp 2 --batch-size 16"),
        ("dp 2", "whole, few", "--dp 2 --batch-size 4"),
        ("tp 2", "whole", "--tp 2"),
        ("pp 2", "whole", "--pp 2 --microbatches 4"),
        ("dp 2 tp 2 pp 2", "whole", "--dp 2 --tp 2 --pp 2 --microbatches 4 --batch-size 16"))),
    Row("nanoGPT one process", "whole", "", nanogpt),
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


def race(rank, row, cfg, args):
    """One rank of a row. Rank 0 prints the row's line."""
    warnings.simplefilter("ignore")  # torch's side warns
    job = Job(row, cfg, args)
    steps = []  # side 0 is ours, side 1 the peer's
    losses = torch.zeros(2, 2)  # losses of the first two turns, a column for each side
    peaks = []

    def turn(side):
        """(loss of the last step, seconds) of a side's turn. No message travels when it returns."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(row.steps):
            loss = steps[side]()
        job.mesh.background.start(lambda: None)()  # returns after all that was started before
        return loss, time.perf_counter() - start

    for side, make_step in enumerate((row.ours, row.theirs)):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else the peer might reuse what our first steps freed
        before, _ = memory()
        steps.append(make_step(job))
        for number in (0, 1):  # the first turn warms up, the second shows the peak
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            losses[number, side], _ = turn(side)
        peaks.append(memory()[1] - before)
    dist.all_reduce(losses)  # the sums of the ranks' shares
    assert torch.allclose(losses[:, 0], losses[:, 1], rtol=1e-3), (row, losses)
    times = []  # seconds of a turn, [ours, the peer's] of each pair
    # Pairs for 5 seconds, but at least 5 and at most 200 pairs
    while len(times) < 5 or (len(times) < 200 and torch.stack(times).sum() < 5):
        pair = [0.0, 0.0]
        first = len(times) % 2  # the sides take turns in going first
        for side in (first, 1 - first):
            _, pair[side] = turn(side)
        times.append(highest(pair))
    ours, theirs = torch.stack(times).unbind(1)
    low, ratio, high = (theirs / ours).quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    ms, peer_ms = (1e3 * side.median().item() / row.steps for side in (ours, theirs))
    peak, peer_peak = (highest(peaks) / 1e6).tolist()
    if rank == 0:
        print(f"{row.name:24}{job.n:2}  {row.size:10}{ms:9.2f}{peer_ms:9.2f}{ratio:7.2f}  "
              f"{low:.2f} - {high:.2f}{peak:7.0f}{peer_peak:7.0f}", flush=True)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="rows with it in name or size")
    parser.add_argument("--picotron", default="", metavar="FOLDER", help="a checkout of picotron")
    parser.add_argument("--nanogpt", default="", metavar="FOLDER", help="a checkout of nanoGPT")
    args = parser.parse_args()
    given = {picotron: args.picotron, nanogpt: args.nanogpt}
    print(f"torch {torch.__version__}, {os.cpu_count()} cores\n{'row':24}{'n':>2}  {'size':10}"
          f"{'ours ms':>9}{'peer ms':>9}{'ratio':>7}  {'quartiles':>11}{'MB':>7}{'MB':>7}",
          flush=True)
    for row in ROWS:
        if given.get(row.theirs, True) and args.only.lower() in f"{row.name} {row.size}".lower():
            cfg = parse(f"{SIZES.get(row.size, '')} {row.layout}".split())
            n = check_layout(cfg, 1)
            with tempfile.TemporaryDirectory() as folder:
                # fork: ranks need not import torch once more. (This process has no threads)
                torch.multiprocessing.start_processes(
                    run_rank, (n, f"{folder}/meeting", race, (row, cfg, args)), n,
                    start_method="fork")


if __name__ == "__main__":
    main()
