"""The proof: any layout is the same computation.

    python test_all.py             this page, less than a minute; then the first case of each test
                                   in tests/, two minutes
    python test_all.py --page      this page alone; --page "--dp 2 --zero 3" a layout alone
    python test_all.py --full      this page, then all cases of all tests
    python test_all.py --extras    the tests of extras/, too
    python test_all.py -k zero     all cases of these tests, without the page; also FILE, FILE::TEST
    python test_all.py -x          other flags go to pytest

Each layout of the table below trains a small model for three steps in float64, on as many processes
as it has ranks. One process trains the same model on whole batches, in a plain loop (one_process)
that shares only the model, its initial values and the learning rates with train.py. Before the
first step the weights have the loop's bits.

The four numbers of a line: the largest difference of loss, gradients before clipping, norm and
weights from the loop's, relative to the largest value there (at least 1e-3). float64 has 16 digits,
and sums in another order cost the last one or two. (Weights lose more: the key biases of a GPT's
attention have gradients of 0 but for rounding, and AdamW divides this noise by a number as small as
1e-8.) Last, the page halves a summed gradient on one rank, and has to see the difference;
tests/test_planted.py plants bugs into the files themselves.

A fork adds its layouts to the table.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import time
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import train
from collectives import all_reduce
from data.batches import Data
from experts import balance_loss, kind_of
from model import build, from_seed
from optimizer import learning_rate
from run.flags import check_device, check_layout, parse
from sizes import config_of

TOLERANCE = 1e-10
VOCAB = 67  # no T divides it
BATCH, LENGTH = 36, 8

# Flags of train.py
LAYOUTS = """
    --dp 1
    --dp 4
    --dp 3 --microbatches 4
    --dp 4 --zero 1
    --dp 4 --zero 2 --microbatches 3
    --dp 4 --zero 3
    --dp 4 --shard 2 --zero 3
    --tp 2
    --tp 4
    --tp 4 --sp
    --cp 2
    --cp 4
    --cp 4 --cp-attention all-to-all
    --pp 4 --schedule gpipe
    --pp 4 --microbatches 2
    --pp 4 --microbatches 9
    --pp 2 --schedule interleaved
    --pp 4 --schedule zb-h1
    --pp 3 --schedule zb-h1
    --dp 4 --ep 4 --experts 8
    --dp 2 --tp 2 --pp 2
    --dp 2 --tp 2 --pp 2 --zero 1
    --dp 2 --tp 2 --pp 2 --zero 3 --recompute
    --dp 2 --cp 2 --tp 2 --sp --zero 3
    --dp 2 --ep 2 --tp 2 --sp --pp 2 --experts 4 --zero 2
    --arch llama --n-kv-head 4 --tp 4 --pp 2
    --arch llama --n-kv-head 4 --dp 2 --cp 2 --zero 3
    --arch llama --dp 2 --ep 2 --pp 2 --experts 4 --zero 1
"""


# ---- several processes ----

PROCESSES = 8  # at most, in the pool
HANG = 120  # seconds after which ranks count as hung; most tests take less than one second


class Pool:
    """Runs a function as several ranks: ranks(4, function, *args) calls function(rank, *args) in
    four processes, which form a process group of torch, and returns the list of what they return.
    The processes are kept from call to call; after a failure they start anew."""

    def __init__(self):
        self.processes = None

    def __call__(self, world, function, *args):
        if world > PROCESSES:  # its ranks would wait for each other forever
            raise ValueError(f"{world} ranks are more than test_all.PROCESSES = {PROCESSES}")
        if self.processes is None:
            # They are forked from one process that has imported train.py: in a tenth of a second
            context = torch.multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["train"])
            self.processes = ProcessPoolExecutor(PROCESSES, context)
        with tempfile.TemporaryDirectory() as folder:
            # A rank's process is busy until all ranks have met, so each rank has one of its own
            answers = [self.processes.submit(run_rank, rank, world, f"{folder}/meeting", function,
                                             args) for rank in range(world)]
            done, missing = wait(answers, HANG, return_when=FIRST_EXCEPTION)
            failed = [answer.exception() for answer in answers
                      if answer in done and answer.exception()]
            if failed or missing:
                self.stop()
                raise failed[0] if failed else TimeoutError(
                    f"{len(missing)} of {world} ranks have not ended within {HANG} s")
        return [torch.load(io.BytesIO(answer.result()), weights_only=False) for answer in answers]

    def stop(self):
        if self.processes:
            for process in self.processes._processes.values():
                process.kill()
            self.processes.shutdown()
        self.processes = None


def run_rank(rank, world, meeting, function, args):
    """One rank of a Pool. Returns the bytes of what the function returns: a tensor's shared memory
    would end with its process."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", store=dist.FileStore(meeting, world), rank=rank,
                            world_size=world, timeout=timedelta(seconds=HANG))
    try:
        value = io.BytesIO()
        torch.save(function(rank, *args), value)
        dist.barrier()  # no rank leaves while another one still needs its connections
        return value.getvalue()
    finally:
        dist.destroy_process_group()


ranks = Pool()


# ---- a layout and the loop ----


def flags_of(words, folder, **fields):
    """The Config of these flags, with the sizes of this page. fields: set after parsing, such as
    n_hidden=37, which has no flag."""
    small = f"--n-layer 3 --n-head 12 --n-embd 24 --block-size {LENGTH} --batch-size {BATCH}"
    run = ("--dtype float64 --device cpu --steps 3 --warmup-steps 1 --lr 1e-2 --min-lr 0 "
           "--grad-clip 0.2")
    cfg = parse([*small.split(), *run.split(), "--data", folder, *words])
    vars(cfg).update(fields)
    check_layout(cfg, world=1)
    check_device(cfg, 1, torch.cuda.device_count())
    return cfg


# Learning rates of the three steps: the warm-up's middle and end, the cosine's middle
RATES = [learning_rate(flags_of([], ""), step) for step in range(3)]


def batch(folder, step, length):
    """(ids, targets) of all sequences of a step, (B, S) each."""
    tokens = torch.from_numpy(np.fromfile(f"{folder}/train.bin", "<u2").astype(np.int64))
    starts = np.random.default_rng([1337, step]).integers(0, len(tokens) - length, BATCH)
    rows = torch.stack([tokens[start : start + length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


@cache
def one_process(config, folder):
    """The reference: (initial weights, [(loss, gradients, norm, weights)] of each step)."""
    model = build(config, seed=1337, dtype=torch.double, kind=kind_of(config))
    params = dict(model.canonical_parameters())
    initial = {name: p.detach().clone() for name, p in params.items()}
    decayed = [p for name, p in params.items() if p.dim() > 1 and name.endswith("weight")]
    others = [p for p in params.values() if not any(p is matrix for matrix in decayed)]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1},
                                   {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95))
    steps = []
    for step, lr in enumerate(RATES):
        ids, targets = batch(folder, step, config.block_size)
        optimizer.zero_grad()
        loss = model(ids, targets) / targets.numel()
        loss.backward()
        if config.n_experts:  # train.py prints the loss without the experts' balance loss
            loss = loss - balance_loss(model.layers) / targets.numel()
        grads = {name: p.grad.clone() for name, p in params.items()}
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 0.2)
        assert norm > 0.2, "clipping must act"
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        weights = {name: p.detach().clone() for name, p in params.items()}
        steps.append((loss.detach(), grads, norm, weights))
    return initial, steps


def whole_slices(reducer, pieces):
    """Yields (tag, this rank's whole slice) for tensors of which this rank has pieces, such as
    gradients: pieces[i] is arranged like reducer.weights[i]. Collective under ZeRO, where each
    replica has a piece: a sum puts the pieces together, each with zeros around it."""
    for piece, tag, start in zip(pieces, reducer.tags, reducer.starts, strict=True):
        whole = piece.new_zeros(tag.slice_shape.numel())
        whole[start : start + piece.numel()] = piece.flatten()
        if reducer.sharded:
            all_reduce(whole, tag.sum_over[0])
        yield tag, whole.view(tag.slice_shape)


def difference(got, want):
    """The largest difference of two tensors, divided by the largest magnitude of `want`, or by 1e-3
    if that is smaller."""
    return ((got.cpu() - want).abs().max() / want.abs().max().clamp(min=1e-3)).item()


def differences(rank, cfg, bug=False):
    """One rank of a layout. Returns (four numbers in a tensor: the largest difference of losses,
    gradients, norms and weights that this rank holds from those of one process; the names of the
    tensors it holds). bug: rank 1 halves its first gradient, after the sum over the ranks."""
    mesh = train.make_mesh(cfg, cfg.device)
    config = config_of(cfg, VOCAB)
    trainer = train.Trainer(cfg, mesh, config, from_seed(config, cfg.seed))
    initial, reference = one_process(config, cfg.data)
    held = {}
    for tag, weight in trainer.reducer.whole():
        held[tag.name] = weight.cpu()
        same = torch.equal(held[tag.name], tag.slice(initial[tag.name]))
        assert same, f"initial {tag.name} differs"
    data = Data(cfg)
    clip_and_step = trainer.optimizer.step
    raw = []  # (tag, this rank's slice of the gradient) of a step, before clipping

    def step(grads, norm, lr):
        if bug and rank == 1:
            grads[0].mul_(0.5)
        raw[:] = [(tag, grad.clone()) for tag, grad in whole_slices(trainer.reducer, grads)]
        clip_and_step(grads, norm, lr)

    trainer.optimizer.step = step
    worst = torch.zeros(4)
    for number, (loss, grads, norm, weights) in enumerate(reference):
        lr = train.learning_rate(cfg, number)
        got_loss, got_norm, _ = trainer.step(data.training(cfg, number, mesh), lr)
        grad_differences = [difference(grad, tag.slice(grads[tag.name])) for tag, grad in raw]
        weight_differences = [difference(weight, tag.slice(weights[tag.name]))
                              for tag, weight in trainer.reducer.whole()]
        found = [difference(got_loss, loss),
                 torch.tensor(grad_differences).max(),  # max keeps a nan
                 difference(got_norm, norm),
                 torch.tensor(weight_differences).max()]
        worst = worst.maximum(torch.tensor(found))
    return worst, [*held]


def run(words, folder, bug=False, **fields):
    """Train a layout on its ranks. Returns the largest differences of all ranks."""
    cfg = flags_of(words, folder, **fields)
    worst, held = zip(*ranks(cfg.dp * cfg.pp * cfg.cp * cfg.tp, differences, cfg, bug), strict=True)
    names = one_process(config_of(cfg, VOCAB), folder)[0].keys()
    assert set().union(*held) == names, "some tensor is held by no rank"
    return torch.stack(worst).amax(0)


def write_corpus(folder):
    """Write prepared data, 5000 random tokens, into a folder."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 5000).astype("<u2")
    for name in ("train", "val"):
        tokens.tofile(f"{folder}/{name}.bin")
    Path(folder, "meta.json").write_text(json.dumps({"vocab_size": VOCAB}))


def prove(layouts=LAYOUTS):
    """Run the table; return the number of layouts that differ, plus 1 if the halved gradient is
    not seen."""
    wrong = 0
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(folder)
        print(f"{'layout':62} {'loss':>7} {'grads':>7} {'norm':>7} {'weights':>7}")
        rows = [line.split() for line in layouts.strip().splitlines()]
        for words in rows:
            worst = run(words, folder)
            equal = bool((worst < TOLERANCE).all())  # a nan is not
            wrong += not equal
            print(f"{' '.join(words):62} "
                  + " ".join(f"{number:7.0e}" for number in worst.tolist())
                  + ("" if equal else "  DIFFERS"), flush=True)
        worst = run(["--dp", "2"], folder, bug=True)
        seen = not bool((worst < TOLERANCE).all())
        print("control: --dp 2 with a halved gradient on one rank",
              "differs, as it must" if seen else "IS NOT SEEN")
    print(f"{len(rows)} layout{'s' * (len(rows) > 1)} in {time.time() - begin:.0f} s: "
          + (f"{wrong} differ" if wrong else f"all within {TOLERANCE:.0e} of one process"))
    return wrong + (not seen)


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", nargs="?", const=LAYOUTS, metavar="LAYOUT",
                        help="the layouts of this page only, or one layout")
    parser.add_argument("--full", action="store_true", help="all cases of all tests")
    parser.add_argument("--extras", action="store_true", help="the tests of extras/, too")
    args, flags = parser.parse_known_args()
    if args.page and flags:
        parser.error(f"--page takes one layout, in quotes; not understood: {' '.join(flags)}")
    # Files of tests, or tests in these. (The value of a flag, such as 0 in -n 0, is no file)
    files = [flag for flag in flags if Path(flag.split("::")[0]).is_file()]
    if args.page or not ("-k" in flags or files):
        try:
            wrong = prove(args.page or LAYOUTS)
        except ValueError as error:  # an impossible layout
            parser.error(str(error))
        ranks.stop()
        if wrong or args.page:
            sys.exit(1 if wrong else 0)
        if not args.full:
            flags.append("--quick")
    here = Path(__file__).parent
    folders = [here / "tests", here / "extras"] if args.extras else [here / "tests"]
    paths = [] if files else [str(folder) for folder in folders]
    import pytest

    # Two processes run the tests, each a file at a time; -n 0 runs all in this one, as for --pdb
    sys.exit(pytest.main(["-q", "-ra", "-n", "2", "--dist", "loadfile", *paths, *flags]))


if __name__ == "__main__":
    main()
