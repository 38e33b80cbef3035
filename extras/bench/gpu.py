"""On one GPU: our trainer beside loops like nanoGPT's, in bfloat16. What differs between the sides:

    ours         bfloat16 weights, float32 masters and moments; --compile compiles layer by layer
    autocast     float32 weights, cast by autocast in each step, like nanoGPT's; compiled whole
    masters      bfloat16 weights, float32 masters and moments; compiled whole

In a turn each side takes one step, or twenty. A turn ends when the device has done all its work:
with one step, the host's work before the first kernel counts; with twenty, it overlaps.
"""

import gc
import math
import time
from dataclasses import dataclass, replace

import torch
import torch.nn as nn

import train
from engine.mesh import Mesh
from extras.bench.torch_side import adamw
from extras.planner.hardware import MODELS
from model import build
from run.config import Config, choose_parts
from sizes import GPTConfig, peak_flops

VOCABULARY = 50257
PADDED = 50304  # the next multiple of 64, as in nanoGPT


def model_of_peer(cfg, device):
    config = GPTConfig(PADDED, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd)
    model = build(config, cfg.seed).to(device)
    return model, torch.compile(model) if cfg.compile else model


def autocast_loop(cfg, batches, device):
    """Like nanoGPT: float32 weights, products in bfloat16 by autocast, fused AdamW, the vocabulary
    padded."""
    model, run = model_of_peer(cfg, device)
    optimizer = adamw(model.parameters(), cfg)

    def step():
        for ids, targets, _ in batches:
            with torch.autocast(device.type, torch.bfloat16):
                loss = run(ids, targets) / targets.numel() / len(batches)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def masters_loop(cfg, batches, device):
    """The same with weights and gradients in bfloat16, and float32 masters for AdamW, like ours."""
    model, run = model_of_peer(cfg, device)
    masters = [param.detach().clone() for param in model.parameters()]
    model.to(torch.bfloat16)
    weights = [*model.parameters()]
    optimizer = adamw(masters, cfg)

    def step():
        for ids, targets, _ in batches:
            loss = run(ids, targets) / targets.numel() / len(batches)
            loss.backward()
        nn.utils.clip_grad_norm_(weights, cfg.grad_clip)
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        optimizer.step()
        torch._foreach_copy_([weight.data for weight in weights], masters)
        return loss

    return step


PEERS = {"autocast": autocast_loop, "masters": masters_loop}


def our_gpu_step(cfg, batches, device):
    """Returns the step function, and the FLOPs per token of its model."""
    cfg = replace(cfg, device=device.type, collectives="native")  # which needs all of the engine
    choose_parts(cfg)
    mesh = Mesh(device, native=True)
    t = train.Trainer(cfg, mesh, VOCABULARY)

    def step():
        norm, _ = t.step(batches, cfg.lr)
        return norm

    n_params = sum(shape.numel() for shape in t.shapes.values())
    return step, t.model_config.flops_per_token(n_params)


@dataclass
class GpuSide:
    """A side of a race, and its memory: what it keeps, and its peak in a turn."""
    step: object
    kept: float
    peak: float = math.nan


def allocated(device, most=False):
    """Bytes that tensors take on a GPU now, or took at most since the last reset; nan on a CPU."""
    if device.type != "cuda":
        return math.nan
    return torch.cuda.max_memory_allocated() if most else torch.cuda.memory_allocated()


def make_side(build_step, device):
    """A GpuSide, warmed up by two steps."""
    before = allocated(device)
    step = build_step()
    for _ in range(2):
        step()
    return GpuSide(step, allocated(device) - before)


def race_on_gpu(sides, device, turns, steps):
    """Milliseconds per step of each side: a list of each. The sides take turns of so many steps.
    The first third of the turns is dropped. Fills in the sides' peaks."""
    times = [[], []]
    for _ in range(turns):
        for i, (side, taken) in enumerate(zip(sides, times, strict=True)):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            for _ in range(steps):
                side.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(1e3 * (time.perf_counter() - start) / steps)
            side.peak = allocated(device, most=True) - sides[1 - i].kept
    return [taken[len(taken) // 3 :] for taken in times]


GPU_HEADER = (f"{'model':10}{'compile':>8}{'sequences':>10}{'at once':>8}{'peer':>10}{'steps':>6}"
              f"{'ours ms':>9}{'tokens/s':>10}{'mfu':>7}{'peer ms':>9}{'ratio':>7}"
              f"{'quartiles':>13}{'goal':>6}{'peak MB':>9}{'peer':>7}")


def rows_on_gpu():
    """(model, sequences of a step, microbatches, peer, steps in a turn). 40 microbatches are
    nanoGPT's own default: there the optimizer, once a step, takes little of the time."""
    yield "gpt2", 16, 1, "autocast", 1
    yield "gpt2", 16, 1, "autocast", 20
    yield "gpt2", 16, 1, "masters", 20
    yield "gpt2", 480, 40, "autocast", 1
    yield "gpt2-xl", 4, 1, "autocast", 20
    yield "gpt2-xl", 4, 1, "masters", 20


def run_row(row, compiled, quick, device, peak_flop):
    """Race the two sides of a row and print it. peak_flop: per second."""
    name, sequences, microbatches, peer, steps = row
    shape = MODELS[name]
    if quick:
        shape = replace(shape, n_layer=2, n_embd=64, n_head=2, block_size=32)
        steps, sequences, microbatches = min(steps, 2), min(sequences, 4), min(microbatches, 2)
    cfg = Config(dp=1, n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd,
                 block_size=shape.block_size, batch_size=sequences, dtype="bfloat16",
                 compile=compiled and not quick, pad_vocab=64, microbatches=microbatches, chunks=1)
    at_once = sequences // microbatches
    rows = torch.randint(VOCABULARY, (sequences, shape.block_size + 1), device=device)
    batches = [(part[:, :-1], part[:, 1:], None) for part in rows.split(at_once)]
    flops = []

    def build_ours():
        step, per_token = our_gpu_step(cfg, batches, device)
        flops.append(per_token)
        return step

    sides = [make_side(build_ours, device),
             make_side(lambda: PEERS[peer](cfg, batches, device), device)]
    turns = 3 if quick else max(6, 30 // steps)
    times = torch.tensor(race_on_gpu(sides, device, turns, steps))
    ours, peers = times.median(1).values.tolist()
    ratios = times[1] / times[0]  # in neighbouring turns
    low, ratio, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    rate = 1e3 * sequences * shape.block_size / ours  # tokens per second
    goal = 1.0
    print(f"{name:10}{'yes' if compiled else 'no':>8}{sequences:10}{at_once:8}{peer:>10}{steps:6}"
          f"{ours:9.1f}{rate:10,.0f}{rate * flops[0] / peak_flop:7.1%}{peers:9.1f}{ratio:7.2f}  "
          f"{low:.2f} - {high:.2f}{goal:6.2f}{sides[0].peak / 1e6:9.0f}{sides[1].peak / 1e6:7.0f}",
          flush=True)


def on_gpu(quick):
    """Print a row for each model, peer and length of a turn, with and without torch.compile. "peak
    MB": the most memory that a side's own tensors take in a turn."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak_flop = peak_flops(gpu) or math.nan
    torch.set_float32_matmul_precision("high")
    print(f"torch {torch.__version__}, {gpu}, bfloat16; --compile: ours layer by layer, the peer "
          f"whole\n{GPU_HEADER}", flush=True)
    for row in rows_on_gpu():
        for compiled in (False, True):
            run_row(row, compiled, quick, device, peak_flop)
            torch.compiler.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
