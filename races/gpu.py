"""On one GPU: our trainer beside a loop like nanoGPT's, in bfloat16."""

import gc
import math
import time
from dataclasses import replace

import torch
import torch.nn as nn

import train
from engine.mesh import Mesh
from model import build
from planner.hardware import MODELS, peak_flops
from races.job import AXES
from races.torch_side import adamw
from run.config import Config
from sizes import GPTConfig

VOCABULARY = 50257
PADDED = 50304  # the next multiple of 64, as in nanoGPT


def plain_gpu_loop(cfg, batch, device):
    """Like nanoGPT: float32 weights, products in bfloat16 by autocast, fused AdamW, the vocabulary
    padded."""
    config = GPTConfig(PADDED, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd)
    model = build(config, cfg.seed).to(device)
    optimizer = adamw(model.parameters(), cfg)
    ids, targets, _ = batch
    run = torch.compile(model) if cfg.compile else model

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            loss = run(ids, targets) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def our_gpu_step(cfg, batch, device):
    """Returns the step function, and the FLOPs per token of its model."""
    mesh = Mesh(device, native=True, **dict.fromkeys(AXES, 1))
    t = train.Trainer(cfg, mesh, VOCABULARY)

    def step():
        norm, read = t.gradients([batch])
        t.update(norm, cfg.lr)
        loss, norm, scale = read()
        return loss

    return step, t.model_config.flops_per_token(t.n_params)


def race_on_gpu(sides, device, turns):
    """Milliseconds that each side's step takes: a list of each. The sides take turns; a step ends
    when the device has done all its work. The first third of the turns is dropped."""
    times = [[], []]
    for _ in range(turns):
        for side, taken in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(1e3 * (time.perf_counter() - start))
    return [taken[len(taken) // 3 :] for taken in times]


def on_gpu(quick):
    """Print a row for each model, with and without torch.compile. "held MB": the peak of the GPU
    memory that torch reserves for both sides together."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak = peak_flops(gpu) or math.nan
    torch.set_float32_matmul_precision("high")
    print(f"torch {torch.__version__}, {gpu}, bfloat16\n{'model':10}{'compile':>8}{'sequences':>10}"
          f"{'ours ms':>9}{'tokens/s':>10}{'mfu':>7}{'peer ms':>9}{'ratio':>7}  {'quartiles':>11}"
          f"{'goal':>6}{'held MB':>9}")
    for name, sequences in (("gpt2", 16), ("gpt2-xl", 4)):
        shape = MODELS[name]
        if quick:
            shape = replace(shape, n_layer=2, n_embd=64, n_head=2, block_size=32)
        for compiled in (False, True):
            cfg = Config(dp=1, n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd,
                         block_size=shape.block_size, batch_size=sequences, dtype="bfloat16",
                         compile=compiled and not quick, pad_vocab=64, microbatches=1, chunks=1)
            rows = torch.randint(VOCABULARY, (sequences, shape.block_size + 1), device=device)
            batch = rows[:, :-1], rows[:, 1:], None
            step, flops = our_gpu_step(cfg, batch, device)
            sides = step, plain_gpu_loop(cfg, batch, device)
            times = torch.tensor(race_on_gpu(sides, device, turns=3 if quick else 30))
            ours, peer = times.median(1).values.tolist()
            ratios = times[1] / times[0]  # in neighbouring steps
            low, ratio, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
            rate = 1e3 * sequences * shape.block_size / ours  # tokens per second
            held = torch.cuda.max_memory_reserved() / 1e6 if device.type == "cuda" else math.nan
            goal = 1.0
            print(f"{name:10}{'yes' if compiled else 'no':>8}{sequences:10}{ours:9.1f}"
                  f"{rate:10,.0f}{rate * flops / peak:7.1%}{peer:9.1f}{ratio:7.2f}  "
                  f"{low:.2f} - {high:.2f}{goal:6.2f}{held:9.0f}", flush=True)
            del step, sides
            torch.compiler.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
