"""python -m extras.exercises break: each wrong line trains a small GPT, and so does the right
one. Which of these show that it is wrong: the loss of step 1, the curve, the gradients, the doctor
(extras/doctor)?

A row is a wrong line. Its ranks are threads (extras/doctor/threads.py), which run train.py; as many
rows as there are cores run at a time, each in a process. The right run of a row has one rank,
because any layout computes the same.
"""

import codecs
import io
import json
import os
import tempfile
import textwrap
from contextlib import redirect_stdout
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

import train
from data.batches import Data
from extras.doctor.diagnose import diagnose
from extras.doctor.memory import in_memory
from extras.doctor.record import Recorder, random_value
from extras.doctor.threads import World
from extras.exercises.planted import planted
from extras.exercises.wrong_lines import WRONG_LINES, WrongLine
from model import initial_value
from optimizer import learning_rate
from run.config import Config

STEPS = 60
SEEDS = (1337, 1, 2, 3, 4, 5, 6, 7)  # seeds of the right runs; wrong runs have the first
SMOOTH = 10  # steps of a running mean
IN_A_ROW = 5  # steps in which a wrong curve must be apart from the right one, to show the bug
# Largest relative difference of equal gradients: float64 has 16 digits, and sums in another order
# lose a few
EQUAL = 1e-10
FLAGS_OF_ALL = {
    "dp": 1, "microbatches": 1, "chunks": 1, "n_layer": 2, "n_head": 4, "n_embd": 32,
    "block_size": 16, "batch_size": 24, "steps": STEPS, "lr": 1e-2, "warmup_steps": 5,
    "grad_clip": 0.0, "dtype": "float64", "device": "cpu"}
# Flags of a layout. A row's other flags change the training, so its right run has them, too
LAYOUT_FLAGS = ("dp", "pp", "cp", "tp", "sp", "zero", "microbatches")


def write_zen(folder):
    """Write a prepared corpus (data/batches.py) into the folder: the Zen of Python, which every
    Python has. A character is a token."""
    with redirect_stdout(io.StringIO()):  # the module prints itself
        import this
    text = codecs.decode(this.s, "rot13")
    words = sorted(set(text))
    ids = np.array([words.index(character) for character in text], "<u2")
    for split in ("train", "val"):
        ids.tofile(Path(folder, f"{split}.bin"))
    meta = {"vocab_size": len(words), "tokenizer": "bytes"}
    Path(folder, "meta.json").write_text(json.dumps(meta))


# ---- one run ----


class KeptDump:
    """Has the members of a Writer that a Recorder uses (extras/doctor/record.py), and keeps one
    rank's gradients and weights in memory."""

    def __init__(self, dtype):
        # The Recorder converts gradients to this dtype. (A Writer's has 32 bits at least; here all
        # tensors are float64)
        self.wide = dtype
        # {"weights-0": [(tag, this rank's slice)]}; 0: before step 1. And weights-1, weights-2,
        # gradients-1, gradients-2
        self.held = {}

    def keep(self, name, number, held):
        if number <= 2:
            self.held[f"{name}-{number}"] = [(tag, part.detach().clone()) for tag, part in held]

    def write_gradients(self, number, held):
        self.keep("gradients", number, held)

    def write_weights(self, number, held, masters):
        self.keep("weights", number, held)


def train_rank(mesh, cfg, value, steps):
    """Train on one rank. Returns ([(loss, norm) of each step], the `held` of its KeptDump).
    value: the function that makes initial values."""
    data = Data(cfg)
    trainer = train.Trainer(cfg, mesh, data.vocab_size, value)
    kept = KeptDump(trainer.dtype)
    recorder = Recorder(trainer, kept)  # keeps the weights before step 1, and gradients
    numbers = []
    for step in range(steps):
        norm, sums = trainer.step(data.training(cfg, step, mesh), learning_rate(cfg, step))
        numbers.append((sums[0].item(), norm.item()))
        recorder.write_weights()
    return numbers, kept.held


def put_together(parts):
    """Make full tensors from every rank's [(tag, slice)]. Returns {name: full tensor}, and names of
    tensors whose copies on several ranks differ: there the first rank's copy is taken."""
    full = {}
    differ = []
    for tag, part in chain(*parts):
        if tag.name not in full:
            # nan: no rank's slice is in place yet
            full[tag.name] = torch.full(tag.shape, torch.nan, dtype=part.dtype)
        held = tag.slice(full[tag.name])
        if held.isnan().all():
            tag.place(part, full[tag.name])
        elif not torch.equal(held, part) and tag.name not in differ:
            differ.append(tag.name)
    return full, differ


def train_changed(corpus, flags, changes=(), value=initial_value, steps=STEPS):
    """Train with these flags and with these changes of the code (planted.py). Returns the losses,
    and a Dump of the first two steps. value: the function that makes initial values; steps: 2 at
    least."""
    cfg = Config(data=corpus, **{"seed": SEEDS[0], **FLAGS_OF_ALL, **flags})
    world = World({axis: getattr(cfg, axis) for axis in ("dp", "pp", "cp", "tp")})
    with planted(*changes):
        ranks = world.run(partial(train_rank, cfg=cfg, value=value, steps=steps))
        states = []
        for n in range(3):
            weights, differ = put_together(held[f"weights-{n}"] for _, held in ranks)
            states.append({"weights": weights, "weights_differ": differ})
        for n in (1, 2):
            loss, norm = ranks[0][0][n - 1]
            grads, _ = put_together(held[f"gradients-{n}"] for _, held in ranks)
            states[n] |= {"loss": loss, "norm": norm, "grads": grads,
                          "lr": learning_rate(cfg, n - 1)}
        dump = in_memory(cfg, states, Data(cfg).vocab_size)
    return [loss for loss, _ in ranks[0][0]], dump


# ---- one row ----


class Outcome(NamedTuple):
    line: WrongLine
    losses: list
    off: dict  # {name: relative difference of the gradient of step 1}
    says: str  # the doctor's answer: the stage, and the name of the bug; "" if it names none


def flags_of_right(line):
    """The flags of the right run: those that are no layout."""
    return {name: value for name, value in line.layout.items() if name not in LAYOUT_FLAGS}


def losses_of_right(corpus, flags, seed):
    return train_changed(corpus, {**flags, "seed": seed})[0]


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


def examine(corpus, line, steps=STEPS):
    """Train with a wrong line. Returns its Outcome."""
    alone = flags_of_right(line)
    changes = ((line.file, line.right, line.wrong),)
    losses, mine = train_changed(corpus, line.layout, changes, steps=steps)
    _, right = train_changed(corpus, alone, steps=2)
    grads = mine.gradients(1)
    off = {name: relative(grads[name], want) for name, want in right.gradients(1).items()}
    # Random biases in the doctor's two runs, like in every dump: a bias of 0 hides bugs
    _, mine = train_changed(corpus, line.layout, changes, random_value, 2)
    _, right = train_changed(corpus, alone, (), random_value, 2)
    return Outcome(line, losses, off, first_name(diagnose(right, mine, deep=True)))


def first_name(findings):
    """The doctor's first finding that names a bug, in words; "" if no finding does."""
    return next((f"{finding.stage}: {finding.causes[0]}" for finding in findings
                 if finding.causes), "")


# ---- the table ----


def running_means(losses):
    """Entry i: the mean of losses[i] and of the SMOOTH - 1 losses before it, or of as many as there
    are."""
    return [fmean(losses[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(losses))]


def shown_from(losses, rights):
    """The step, counted from 1, from which a curve shows that a run is wrong; None: never. rights:
    losses of each right run, the one with the same seed first. A step is apart if the wrong curve
    is farther from the right one than the right curves are from each other."""
    mine, *curves = map(running_means, (losses, *rights))
    spreads = [max(step) - min(step) for step in zip(*curves, strict=True)]
    apart = [abs(loss - right) > spread
             for loss, right, spread in zip(mine, curves[0], spreads, strict=True)]
    return next((i + 1 for i in range(len(apart) - IN_A_ROW + 1)
                 if all(apart[i : i + IN_A_ROW])), None)


def first_cell(row, right):
    """The loss of step 1, or "same". right: the right run's."""
    first = f"{row.losses[0]:.4f}"
    return "same" if first == f"{right:.4f}" else first


def shown_cell(row, rights):
    shown = shown_from(row.losses, rights)
    return f"step {shown}" if shown else "never"


def gradients_cell(row):
    """The largest relative difference of a gradient of step 1, and how many gradients differ."""
    wrong = [off for off in row.off.values() if off > EQUAL]
    return f"{max(wrong):<8.2g}{len(wrong)} of {len(row.off)}" if wrong else "equal"


def outcome_table(rows, rights):
    """Yields the lines of the table. rights[i]: the losses of row i's right runs."""
    yield f"{'':54}loss of  a curve   last {SMOOTH} steps  gradients, step 1"
    yield f"    {'wrong line':50}step 1   shows it  wrong  right   off by  tensors"
    cells = []
    for number, (row, runs) in enumerate(zip(rows, rights, strict=True), 1):
        first, shown = first_cell(row, runs[0][0]), shown_cell(row, runs)
        wrong, right = (fmean(losses[-SMOOTH:]) for losses in (row.losses, runs[0]))
        grads = gradients_cell(row)
        cells.append((first, shown, grads))
        yield (f"{number:2}  {row.line.name:50}{first:9}{shown:10}{wrong:.3f}  {right:.3f}   "
               f"{grads}")
    ends = [fmean(losses[-SMOOTH:]) for losses in rights[0]]
    same = sum(first == "same" for first, _, _ in cells)
    never = sum(shown == "never" for _, shown, _ in cells)
    equal = sum(grads == "equal" for _, _, grads in cells)
    yield ""
    yield (f"Of {len(rows)} wrong lines {same} have the right loss of step 1, {never} are never "
           f"shown by a curve, and {equal} have the right")
    yield (f"gradients in step 1. The doctor names {sum(bool(row.says) for row in rows)}. The "
           f"right run's loss of step 1 is {rights[0][0][0]:.4f}.")
    yield ""
    yield (f"A curve, a running mean of {SMOOTH} steps, shows a wrong line from the first of "
           f"{IN_A_ROW} steps in which it is")
    yield (f"farther from the right one than the right runs of {len(ends)} seeds are apart (they "
           f"end at {min(ends):.3f} to {max(ends):.3f}).")


def diffs(rows):
    """Yields each row's wrong line, and what the doctor says."""
    for number, row in enumerate(rows, 1):
        line = row.line
        layout = " ".join(f"{name} {value}".removesuffix(" True")
                          for name, value in line.layout.items())
        yield ""
        yield f"{number:2}  {line.file}, {layout or 'one process'}"
        yield from (f"    - {text.strip()}" for text in line.right.splitlines())
        yield from (f"    + {text.strip()}" for text in line.wrong.splitlines())
        yield from textwrap.wrap(f"doctor: {row.says or 'knows none that fits'}", 100,
                                 initial_indent="    ", subsequent_indent=" " * 12)


# ---- all rows ----


def run_job(job):
    """Call job() in a process of the pool."""
    torch.set_num_threads(1)
    return job()


def break_all(show):
    """Train all wrong lines and their right runs. Returns the rows, a list of Outcomes; and for
    each row the losses of its right runs, a list for each seed. show(text): tells how far this is.
    """
    kinds = []  # the different flags of right runs: several rows share right runs
    for line in WRONG_LINES:
        if flags_of_right(line) not in kinds:
            kinds.append(flags_of_right(line))
    with tempfile.TemporaryDirectory() as corpus:
        write_zen(corpus)
        jobs = [partial(examine, corpus, line) for line in WRONG_LINES]
        jobs += [partial(losses_of_right, corpus, flags, seed) for flags in kinds
                 for seed in SEEDS]
        with get_context("fork").Pool(os.cpu_count()) as pool:
            results = []
            for result in pool.imap(run_job, jobs):
                results.append(result)
                show(f"{len(results)} of {len(jobs)} runs have ended")
    rows, rights = results[: len(WRONG_LINES)], results[len(WRONG_LINES) :]
    rights = [rights[i * len(SEEDS) : (i + 1) * len(SEEDS)] for i in range(len(kinds))]
    return rows, [rights[kinds.index(flags_of_right(row.line))] for row in rows]
