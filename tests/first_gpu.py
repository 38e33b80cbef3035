"""The first minutes on a GPU, one command: speed, kernels, memory, equality, checkpoints.

    python -m tests.first_gpu          one GPU that nobody else uses; within eight minutes
    python -m tests.first_gpu --dry    on CPUs, tiny: does it run? Its figures mean nothing

A part prints as soon as it is done. One that fails says why, the next one runs, and the exit code
is 1. All ranks are processes on the one card. NCCL refuses two ranks of one card on one machine, so
each rank claims a machine of its own (NCCL_HOSTID), and messages travel through sockets.
"""

import argparse
import gc
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

import model
import test_all
import train
from mesh import connection_options
from optimizer import BETAS
from sizes import config_of, peak_flops
from tests import counts
from tests.counts import GPT2, VOCAB, config_from

TINY = "--n-layer 2 --n-head 4 --n-embd 32 --block-size 32 --batch-size 4 --dtype bfloat16"
# In float64, against test_all.py's loop. (The ring has no GPU kernel of 64 bits: see two_ranks)
LAYOUTS = ("--dp 2 --collectives ring", "--dp 2 --zero 2 --microbatches 3", "--dp 4 --zero 1",
           "--dp 2 --zero 3 --recompute", "--tp 2 --sp", "--pp 2 --microbatches 4",
           "--pp 2 --schedule zb-h1", "--cp 2 --cp-attention all-to-all",
           "--dp 2 --ep 2 --experts 4", "--dp 2 --tp 2 --pp 2 --zero 1 --arch llama")
# A part of a kernel's name, in lower case -> its kind; the first one that fits counts
KINDS = {"triton": "compiled", "nccl": "messages", "memcpy": "copies", "memset": "copies",
         "flash": "attention", "fmha": "attention", "sdpa": "attention", "cudnn": "attention",
         "adam": "AdamW", "softmax": "loss", "layer_norm": "LayerNorm", "gamma": "LayerNorm",
         "gemm": "products", "nvjet": "products", "cutlass": "products", "mm": "products"}


# ---- two step functions, always on the same batch ----


def batch_of(cfg):
    """(B, S + 1) token ids, the same on all ranks."""
    ids = torch.randint(VOCAB, (cfg.batch_size, cfg.block_size + 1),
                        generator=torch.Generator().manual_seed(0))
    return ids.to(cfg.device)


def our_step(cfg):
    """A step of train.py's Trainer on this rank."""
    mesh = train.make_mesh(cfg, cfg.device)
    config = config_of(cfg, VOCAB)
    trainer = train.Trainer(cfg, mesh, config, train.from_seed(config, cfg.seed))
    index, num_replicas = mesh.index_and_size("dp")
    mine = batch_of(cfg).chunk(num_replicas)[index].chunk(cfg.microbatches)
    batches = [(rows[:, :-1], rows[:, 1:]) for rows in mine]
    return lambda: trainer.step(batches, 6e-4)[0]


def nanogpt_step(cfg):
    """A step by nanoGPT's recipe: weights of 32 bits under autocast, the logits of all tokens at
    once, clipping at 1, torch's fused AdamW, the model compiled as a whole."""
    gpt = model.build(config_of(cfg, VOCAB), cfg.seed).to(cfg.device)
    params = list(gpt.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
         {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}],
        lr=6e-4, betas=BETAS, fused=True)
    forward = torch.compile(gpt) if cfg.compile else gpt
    rows = batch_of(cfg)

    def step():
        with torch.autocast(cfg.device, torch.bfloat16):
            loss = forward(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def timed(step, cfg, num_steps):
    """(the last loss, milliseconds of a step, peak in MB). Warms up, and compiles, first."""
    cuda = cfg.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(max(1, num_steps // 4)):
        step()
    wait()
    start = time.perf_counter()
    for _ in range(num_steps):
        loss = step()
    wait()
    ms = 1e3 * (time.perf_counter() - start) / num_steps
    in_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = torch.cuda.max_memory_allocated() if cuda else 1024 * in_kib
    return loss.item(), ms, peak / 1e6


def timed_rank(rank, cfg, num_steps):
    return timed(our_step(cfg), cfg, num_steps)


def kernels_of(step, cfg):
    """{kind: [kernels, milliseconds]} of a step on the device, by torch's profiler."""
    activity = torch.profiler.ProfilerActivity
    cuda = cfg.device == "cuda"
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profiler:
        step()  # (the profiler waits for the device at its end)
    found = {}
    for event in profiler.key_averages():
        if cuda and event.device_type == torch.autograd.DeviceType.CPU:
            continue  # cudaLaunchKernel and the like
        kinds = [kind for part, kind in KINDS.items() if part in event.key.lower()]
        row = found.setdefault(kinds[0] if kinds else "others, elementwise", [0, 0.0])
        row[0] += event.count
        row[1] += (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3
    return found


# ---- the parts: each prints, and returns whether all is well ----


def speed(dry):
    """GPT-2 124M, 16 x 1,024 tokens; nanoGPT's recipe, and ours"""
    words = TINY if dry else GPT2
    peak_rate = 0 if dry else peak_flops(torch.cuda.get_device_name())
    print(f"    {'':18}{'ms':>8}{'tokens/s':>11}{'MFU':>7}{'peak MB':>9}{'loss':>8}", flush=True)
    tables = {}
    for name, make_step, flag in (("nanoGPT", nanogpt_step, ""), ("ours", our_step, ""),
                                  ("nanoGPT, compiled", nanogpt_step, "--compile"),
                                  ("ours, --compile", our_step, "--compile")):
        cfg = config_from(f"{words} {flag} --device {'cpu' if dry else 'cuda'}")
        if not dry:
            torch.cuda.reset_peak_memory_stats()
        step = make_step(cfg)
        loss, ms, peak = timed(step, cfg, 2 if dry else 30)
        tables[name] = kernels_of(step, cfg)
        del step
        gc.collect()  # the memory of the next one does not begin with this one's
        rate = 1e3 * cfg.batch_size * cfg.block_size / ms
        flops = rate * config_of(cfg, VOCAB).flops_per_token(124_439_808)
        mfu = f"{flops / peak_rate:.1%}" if peak_rate else "-"
        print(f"    {name:18}{ms:8.1f}{rate:11,.0f}{mfu:>7}{peak:9.0f}{loss:8.3f}", flush=True)
    print("\n    kernels and ms of a step" + "".join(f"{name:>18}" for name in tables))
    for kind in sorted(set().union(*tables.values())):
        rows = [table.get(kind, (0, 0.0)) for table in tables.values()]
        print(f"    {kind:24}" + "".join(f"{count:9}{ms:9.2f}" for count, ms in rows))
    return True


def rank_on_card(rank, world, meeting, function, args):
    """test_all.run_rank, on a GPU that all ranks share."""
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.set_num_threads(1)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(meeting, world), rank=rank,
                            world_size=world, device_id=device, **connection_options(device, 60))
    try:
        value = io.BytesIO()
        torch.save(function(rank, *args), value)
        dist.barrier(device_ids=[0])
        return value.getvalue()
    finally:
        torch.cuda.empty_cache()
        dist.destroy_process_group()


def equality(dry):
    """ten layouts against one process, in float64"""
    more = "--device cpu" if dry else "--device cuda --timeout 60"
    return test_all.prove("\n".join(f"{layout} {more}" for layout in LAYOUTS)) == 0


def two_ranks(dry):
    """two ranks in bfloat16 have the losses of one; what a rank holds, for ZeRO-3 too"""
    words = f"{TINY if dry else GPT2} --timeout 60"
    print(f"    {'':18}{'ms':>8}{'peak MB':>9}{'loss':>9}", flush=True)
    losses = []
    for layout in ("--dp 1", "--dp 2", "--dp 2 --zero 3", "--cp 2", "--tp 2 --sp", "--pp 2"):
        cfg = config_from(f"{words} {layout} --device {'cpu' if dry else 'cuda'}")
        found = test_all.ranks(cfg.dp * cfg.cp * cfg.tp * cfg.pp, timed_rank, cfg, 4)
        loss, ms, peak = map(max, zip(*found, strict=True))
        losses.append(loss)
        print(f"    {layout:18}{ms:8.1f}{peak:9.0f}{loss:9.4f}", flush=True)
    return max(losses) - min(losses) < 0.02


def resume(dry):
    """train.py saves after two of four steps; a run that resumes there has the same losses"""
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        test_all.write_corpus(folder)
        for out, more in (("whole", "--save-interval 2"),
                          ("resumed", f"--resume {folder}/whole/step-00000002")):
            words = (f"train.py {TINY} --dtype float64 --steps 4 --eval-interval 0 {more} "
                     f"--data {folder} --out {folder}/{out} --device {'cpu' if dry else 'cuda'}")
            subprocess.run([sys.executable, *words.split()], check=True, timeout=120,
                           stdout=subprocess.DEVNULL, cwd=Path(test_all.__file__).parent)
            lines = Path(folder, out, "metrics.jsonl").read_text().splitlines()
            losses.append([json.loads(line)["loss"] for line in lines])
            print(f"    {losses[-1]}")
    return all(abs(a - b) < 1e-10 for a, b in zip(losses[0][2:], losses[1], strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on CPUs, tiny sizes")
    dry = parser.parse_args().dry
    if not dry and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry runs on CPUs")
    where = "a dry run on CPUs" if dry else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}\n", flush=True)
    counts.main()
    # A dry run's ranks are test_all.py's, and its --compile needs no C++ compiler
    change = (patch.object(torch, "compile", partial(torch.compile, backend="eager")) if dry else
              patch.object(test_all, "run_rank", rank_on_card))
    failed = []
    for part in (speed, equality, two_ranks, resume):
        print(f"\n{part.__name__}: {part.__doc__}", flush=True)
        start = time.time()
        good = False
        try:
            with change:
                good = part(dry)
        except Exception as error:
            print(f"    {type(error).__name__}: {error}")
        if not good:
            failed.append(part.__name__)
        print(f"    {time.time() - start:.0f} s{'' if good else ', FAILED'}", flush=True)
    test_all.ranks.stop()
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall parts are well")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
