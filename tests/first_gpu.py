"""The first minutes on a GPU, one command: speed, kernels, memory, equality, checkpoints.

    python -m tests.first_gpu          one GPU that nobody else uses; within eight minutes
    python -m tests.first_gpu --dry    on CPUs, tiny: does it run? Its figures mean nothing

A part prints as soon as it is done. One that fails says why, the next one runs, and the exit code
is 1. All ranks are processes on the one card. NCCL refuses two ranks of one card on one machine, so
each rank claims a machine of its own (NCCL_HOSTID), and messages travel through sockets.
"""

import argparse
import gc
import os
import resource
import sys
import tempfile
import time
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

import model
import test_all
import train
from optimizer import BETAS
from sizes import config_of, peak_flops
from tests.harness import close, command, flags, flags_of, losses
from transport.connect import connection_options

VOCAB = 50304  # GPT-2's 50,257, rounded up to a multiple of 64
GPT2 = ("--n-layer 12 --n-head 12 --n-embd 768 --block-size 1024 --batch-size 16 --dtype bfloat16 "
        "--grad-clip 1 --timeout 60")
TINY = f"{GPT2} --n-layer 2 --n-head 2 --n-embd 16 --block-size 8 --batch-size 2"
# In float64, against test_all.py's loop. (The ring has no GPU kernel of 64 bits: see ROWS)
LAYOUTS = ("--dp 2 --collectives ring", "--dp 2 --zero 2 --microbatches 3", "--dp 4 --zero 1",
           "--dp 2 --zero 3 --recompute", "--tp 2 --sp", "--pp 2 --microbatches 4",
           "--pp 2 --schedule zb-h1", "--cp 2 --cp-attention all-to-all",
           "--dp 2 --ep 2 --experts 4", "--dp 2 --tp 2 --pp 2 --zero 1 --arch llama")


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
    trainer = train.Trainer(cfg, mesh, config, model.from_seed(config, cfg.seed))
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


# Name, step function, flags. (The last five: two ranks)
ROWS = [("nanoGPT", nanogpt_step, ""), ("nanoGPT, compiled", nanogpt_step, "--compile"),
        ("ours", our_step, ""), ("ours, --compile", our_step, "--compile")] + [
    (layout, our_step, layout)
    for layout in ("--dp 2", "--dp 2 --zero 3", "--cp 2", "--tp 2 --sp", "--pp 2")]


def measure(rank, cfg, make_step):
    """(the loss of the fifth step; milliseconds of a later step; this rank's peak in MB; the ten
    kernels of a step that take longest: [(milliseconds, how often, name)])."""
    is_gpu = cfg.device == "cuda"
    wait = torch.cuda.synchronize if is_gpu else lambda: None
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:  # a dry run's --compile needs no C++ compiler
        torch.compile = partial(torch.compile, backend="eager")
    step = make_step(cfg)
    for _ in range(5):
        loss = step().item()
    num_steps = 10 if is_gpu else 2
    wait()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    wait()
    ms = 1e3 * (time.perf_counter() - start) / num_steps
    in_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = torch.cuda.max_memory_allocated() if is_gpu else 1024 * in_kib
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if is_gpu else activity.CPU]) as profiler:
        step()  # (the profiler waits for the device at its end)
    kernels = [((event.self_device_time_total if is_gpu else event.self_cpu_time_total) / 1e3,
                event.count, event.key) for event in profiler.key_averages()]
    del step
    gc.collect()  # the memory of the next row does not begin with this one's
    return loss, ms, peak / 1e6, sorted(kernels, reverse=True)[:10]


def rank_on_card(*args):
    """test_all.run_rank, on a GPU that all ranks share."""
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    usual = dist.init_process_group

    def connect(backend, timeout, **where):
        usual("nccl", device_id=device, **where, **connection_options(device, 60))

    try:
        with patch.object(dist, "init_process_group", connect):
            return test_all.run_rank(*args)
    finally:
        torch.cuda.empty_cache()


# ---- the parts: each prints, and returns whether all is well ----


def speed(device):
    """GPT-2 124M, 16 x 1,024 tokens: nanoGPT's recipe and ours; two ranks have the losses of one"""
    peak_rate = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else 0
    print(f"    {'':18}{'ms':>8}{'tokens/s':>11}{'MFU':>7}{'peak MB':>9}{'loss':>9}", flush=True)
    longest, our_losses = {}, []
    for name, make_step, words in ROWS:
        words = f"{GPT2 if device == 'cuda' else TINY} --device {device} {words}"
        cfg = flags_of(words.split(), "")
        found = test_all.ranks(cfg.dp * cfg.cp * cfg.tp * cfg.pp, measure, cfg, make_step)
        loss, ms, peak, longest[name] = map(max, zip(*found, strict=True))
        if make_step is our_step:
            our_losses.append(loss)
        rate = 1e3 * cfg.batch_size * cfg.block_size / ms
        flops = rate * config_of(cfg, VOCAB).flops_per_token(124_439_808)
        mfu = f"{flops / peak_rate:.1%}" if peak_rate else "-"
        print(f"    {name:18}{ms:8.1f}{rate:11,.0f}{mfu:>7}{peak:9.0f}{loss:9.4f}", flush=True)
    for name in ("nanoGPT, compiled", "ours", "ours, --compile"):
        print(f"\n    the kernels of {name} that take longest: ms of a step, how often")
        for ms, count, kernel in longest[name]:
            print(f"    {ms:9.2f}{count:6}  {kernel[:80]}")
    return max(our_losses) - min(our_losses) < 0.02


def equality(device):
    """ten layouts against one process, in float64 (on CPUs two: test_all.py has proved the rest)"""
    layouts = LAYOUTS[:2] if device == "cpu" else LAYOUTS
    return test_all.prove("\n".join(f"{layout} --device {device} --timeout 60"
                                    for layout in layouts)) == 0


def resume(device):
    """train.py saves after two of four steps; a run that resumes there has the same losses"""
    with tempfile.TemporaryDirectory() as folder:
        test_all.write_corpus(folder)
        whole, resumed = f"{folder}/whole", f"{folder}/resumed"
        for out, more in ((whole, {"save_interval": 2}),
                          (resumed, {"resume": f"{whole}/step-00000002"})):
            done = command("train.py", *flags(folder, out, device=device, **more))
            assert done.returncode == 0, done.stderr
        print(f"    {losses(whole)}\n    {losses(resumed)}")
        close(losses(resumed), losses(whole)[2:])
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on CPUs, tiny sizes")
    dry = parser.parse_args().dry
    if not dry:
        if not torch.cuda.is_available():
            parser.error("there is no GPU here; --dry runs on CPUs")
        test_all.run_rank = rank_on_card
        test_all.HANG = 300  # to compile takes long
    where = "a dry run on CPUs" if dry else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}", flush=True)
    failed = []
    for part in (speed, equality, resume):
        print(f"\n{part.__name__}: {part.__doc__}", flush=True)
        start = time.time()
        good = False
        try:
            good = part("cpu" if dry else "cuda")
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
