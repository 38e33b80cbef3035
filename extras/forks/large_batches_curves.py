"""Does a larger batch still learn? The same tokens in batches of 32, 128 and 512 sequences: AdamW
with its rate unscaled, scaled linearly and by the root, LAMB by the root, LARS by both. Then the
gradient noise scale (arXiv 1812.06162), which says where a larger batch stops to pay.

    git apply extras/forks/large_batches.patch
    python -m extras.forks.large_batches_curves --out large-batches --svg docs/pictures

Rates were chosen at batch 32, by the validation loss after 600 steps: docs/large-batches.md.
"""

from run.config import Parser
from run.signals import end_quietly


def large_batches_flags():
    parser = Parser(__doc__)
    parser.add_argument("--out", default="large-batches", help="folder for metrics (large-batches)")
    parser.add_argument("--svg", metavar="FOLDER", help="write large-batches.svg there")
    return parser


if __name__ == "__main__":
    end_quietly()
    large_batches_flags().parse_args()  # a wrong flag ends the process here, without torch

import json
import os
import subprocess
import sys
import time
from math import log
from pathlib import Path
from statistics import fmean

import torch

import engine.mesh
from data.batches import Data
from engine.collectives import all_reduce
from extras.planner.table import table
from extras.show.demonstrations import demonstrate
from extras.show.draw import curves_svg
from run.config import Config, check
from run.files import write_new

# fast: LAMB and LARS are engine/'s only, so that all rules train with the same parts
MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "fast": "all"}
TOKENS = 1600 * 32 * MODEL["block_size"]  # 1600, 400 or 100 steps
WARMUP = TOKENS // 10
RULES = {  # name: flags
    "AdamW": {"optimizer": "adamw", "lr": 8e-3},
    "AdamW linear": {"optimizer": "adamw", "lr": 8e-3, "scale_lr": "linear"},
    "AdamW root": {"optimizer": "adamw", "lr": 8e-3, "scale_lr": "sqrt"},
    "LAMB": {"optimizer": "lamb", "lr": 2e-2},
    "LAMB root": {"optimizer": "lamb", "lr": 2e-2, "scale_lr": "sqrt"},
    "LARS root": {"optimizer": "lars", "lr": 1e-2, "scale_lr": "sqrt", "weight_decay": 5e-4},
    "LARS linear": {"optimizer": "lars", "lr": 1e-2, "scale_lr": "linear", "weight_decay": 5e-4}}
BATCHES = (32, 128, 512)


def flags_of(rule, batch):
    steps = TOKENS // (batch * MODEL["block_size"])
    return {**MODEL, **RULES[rule], "batch_size": batch, "steps": steps, "warmup_tokens": WARMUP}


def train_once(rule, batch, out):
    """Train, unless the file of --metrics is there; returns its records."""
    path = Path(out, f"{rule.replace(' ', '-')}-{batch}.jsonl")
    flags = {**flags_of(rule, batch), "eval_interval": 10**9, "metrics": f"{path}.part",
             "out": f"{out}/checkpoints"}
    if not path.exists():
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        Path(flags["metrics"]).unlink(missing_ok=True)
        subprocess.run([sys.executable, "train.py", *words], check=True, stdout=subprocess.DEVNULL)
        os.rename(flags["metrics"], path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(records, batch, bytes_per_token):
    """[(percent of the tokens, bits per byte)]: means of the loss over each 50th of the run."""
    records = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    per = max(1, len(records) // 50)
    percent = 100 * batch * MODEL["block_size"] / TOKENS
    return [((step + 1) * percent, fmean(loss for _, loss in records[i - per + 1 : i + 1])
             / log(2) / bytes_per_token)
            for i, (step, _) in enumerate(records) if i % per == per - 1]


def noise_scale(small, large, b, B):
    """The batch at which noise and signal of the gradient are equal. small: mean square of the mean
    gradient's norm over b sequences; large: over B. Of the true gradient G and the variance V of a
    sequence's they are |G|^2 + V/b and |G|^2 + V/B: solve for V / |G|^2 (appendix A.1)."""
    return (small - large) / (1 / b - 1 / B) * (B - b) / (B * large - b * small)


def demo(mesh):
    """Train at batch 128 on two ranks; print the noise scale of each quarter of the run, from
    |gradient of one rank| and |gradient of all|."""
    from optimizer import learning_rate
    from train import Trainer

    cfg = Config(**flags_of("AdamW root", 128), dp=2, device="cpu")
    check(cfg, 2)
    data = Data(cfg, mesh.rank)
    trainer = Trainer(cfg, mesh, data.vocab_size)
    B, b = 128, 64  # sequences in the batch, and on a rank
    squares = []  # of each step: the square of this rank's gradient
    norms = []  # of each step: the square of the batch's
    reduce = trainer.reducer.launch

    def launch(bucket):  # the gradients of this rank, just before they are summed
        squares[-1] += bucket.grad.double().square().sum()
        reduce(bucket)

    trainer.reducer.launch = launch
    for step in range(cfg.steps):
        squares.append(torch.zeros((), dtype=torch.double))
        norm, _ = trainer.step(data.training(cfg, step, mesh), learning_rate(cfg, step))
        norms.append(norm.item() ** 2)
    # the loss was divided by all tokens, so a rank's gradient is 1/2 of the mean over its own
    squares = (all_reduce(torch.stack(squares), mesh.world) * 2**2 / 2).tolist()
    for quarter in range(4 * (mesh.rank == 0)):
        part = slice(quarter * cfg.steps // 4, (quarter + 1) * cfg.steps // 4)
        batch = noise_scale(fmean(squares[part]), fmean(norms[part]), b, B)
        print(f"  steps {part.start:3d} to {part.stop:3d}: {batch:6.0f} sequences, "
              f"{batch * cfg.block_size:8,.0f} tokens")


def main():
    parser = large_batches_flags()
    args = parser.parse_args()
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        if args.svg:  # now, and not after the runs: can the file be written?
            picture = Path(args.svg, "large-batches.svg")
            picture.parent.mkdir(parents=True, exist_ok=True)
            write_new("--svg", {picture: ""})
    except (ValueError, OSError) as error:
        parser.error(error)
    begin, bits, curves = time.time(), {}, {}
    per_token = Data(Config(**MODEL)).meta["bytes_per_token"]
    for batch in BATCHES:
        for rule in RULES:
            same = next(name for name in RULES if name.split()[0] == rule.split()[0])
            records = train_once(rule if batch > 32 else same, batch, args.out)  # 32 is the base
            bits[rule, batch] = records[-1]["val_bits_per_byte"]
            print(f"{batch:4} {rule:12} {bits[rule, batch]:.4f} bits per byte, after "
                  f"{time.time() - begin:.0f} s", flush=True)
            drawn = batch == 512 and rule not in ("LAMB", "LARS linear")  # six curves
            if drawn or (rule, batch) == ("AdamW", 32):
                curves[f"{rule}, {batch}"] = curve(records, batch, per_token)
    rows = [["batch", *map(str, BATCHES)]]
    rows += [[rule, *(f"{bits[rule, batch]:.4f}" for batch in BATCHES)] for rule in RULES]
    print(table(f"final bits per byte of validation, after {TOKENS:,} tokens", rows))
    print("gradient noise scale, AdamW root, batch 128:")
    demonstrate(demo, engine.mesh.Mesh, dp=2)
    if args.svg:
        svg = curves_svg(curves, "The same tokens in large batches", "percent of the tokens",
                         "training loss, bits per byte", range(0, 101, 25), range(1, 6))
        picture.write_text(svg)
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
