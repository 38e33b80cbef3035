"""extras/compare.py: forty layouts are equal; planted bugs are named, or said to fit nothing; loops
of other projects."""

import io
import re
import shutil
from contextlib import redirect_stdout

import pytest
import torch
import torch.nn.functional as F

from extras import compare
from test_all import LAYOUTS
from tests.harness import HERE, command, flags_of, ranks
from tests.test_planted import BUGS, plant

# Right layouts: those of test_all.py's page, and twelve more
RIGHT = (LAYOUTS.strip() + """
    --dp 2 --zero 1 --microbatches 3
    --dp 3 --zero 2
    --dp 2 --zero 3 --microbatches 2 --recompute
    --dp 4 --shard 2 --zero 1
    --tp 3 --microbatches 2
    --tp 2 --sp --zero 1 --dp 2
    --cp 2 --cp-attention all-to-all --zero 2
    --cp 2 --tp 2 --pp 2 --microbatches 2
    --pp 2 --schedule interleaved --tp 2 --sp --microbatches 4
    --pp 2 --schedule zb-h1 --tp 2 --microbatches 4
    --dp 2 --ep 2 --experts 4 --zero 3
    --arch qwen3 --n-kv-head 4 --dp 2 --tp 2 --sp""").splitlines()

# Ten bugs of tests/test_planted.py, most of which other projects have had: flags of the model and
# the layout; the stage that differs first; what the report says
NAMED = {
    "gradients are averaged over the replicas":
        ("--dp 2 --microbatches 3", "step 0 gradients", "2 = dp: divided by them (averaged)"),
    "the loss is a mean of the microbatches' means":
        ("--dp 2 --microbatches 3", "step 0 loss", "6 = dp x microbatches: each counts"),
    "ZeRO-2 forgets the microbatches before":
        ("--dp 2 --zero 2 --microbatches 3", "step 0 gradients",
         "count (rank 0: 0 0 1, rank 1: 0 0 1) times"),
    "all replicas read the same sequences":
        ("--dp 2", "step 0 tokens", "of ONE are on no rank"),
    "each tensor rank draws its slice anew":
        ("--tp 2", "initial weights", compare.FITS_NONE),
    "--sp does not sum LayerNorm's gradients":
        ("--tp 2 --sp", "step 0 gradients", "this rank's own terms only: not summed"),
    "the two ends' terms of the tied matrix are not summed":
        ("--pp 2 --microbatches 2", "step 0 gradients", "this rank's own terms only: not summed"),
    "replicated parameters count T times in the norm":
        ("--tp 2", "step 0 norm", "each rank with a copy counts it"),
    "a row's bias is added on each rank":
        ("--tp 2", "step 0 gradients", compare.FITS_NONE),
    "targets are shifted after the sequence is split":
        ("--cp 2", "step 0 tokens", "rank 0's targets at positions [1, 7]"),
}


@pytest.fixture(scope="module")
def one_process(corpus, tmp_path_factory):
    """A function from flags of the model to the folder with the record of one process."""
    found = {}

    def record(words):
        if words not in found:
            found[words] = tmp_path_factory.mktemp("one")
            record_layout(corpus, found[words], words)
        return found[words]

    return record


def record_with_bug(rank, cfg, folder, file, text):
    """One rank of our trainer with this text of a file."""
    plant(file, text)
    try:
        compare.record_ours(rank, cfg, folder)
    finally:
        plant(file, (HERE / file).read_text())


def record_layout(corpus, folder, words, *bug):
    cfg = flags_of(words.split(), corpus)
    function = record_with_bug if bug else compare.record_ours
    ranks(cfg.dp * cfg.pp * cfg.cp * cfg.tp, function, cfg, str(folder), *bug)


def printed(one, other):
    with redirect_stdout(io.StringIO()) as text:
        equal = compare.report(one, other)
    said = text.getvalue()
    assert said.endswith("\nequal\n") == equal, said
    return said


@pytest.mark.parametrize("layout", RIGHT, ids=str.strip)
def test_a_right_layout_is_equal(corpus, tmp_path, one_process, layout):
    record_layout(corpus, tmp_path, layout)
    model = " ".join(re.findall(r"--(?:arch|n-kv-head|experts) \S+", layout))
    said = printed(one_process(model), tmp_path)
    assert said.count(" equal\n") == 11, said  # initial weights, five of each step


@pytest.mark.parametrize("name", NAMED)
def test_a_planted_bug_is_named_or_fits_none(corpus, tmp_path, one_process, name):
    file, old, new = next(bug[1:4] for bug in BUGS if bug[0] == name)
    layout, stage, words = NAMED[name]
    text = (HERE / file).read_text()
    assert text.count(old) == 1
    record_layout(corpus, tmp_path, layout, file, text.replace(old, new))
    said = printed(one_process(""), tmp_path)
    assert words in said and f"\nfirst difference: {stage}\n" in said, said


def test_exact_gelu_is_found(corpus, tmp_path, one_process):
    """nanoGPT's; GPT-2 has the tanh approximation. The first loss is off in the seventh digit."""
    text = (HERE / "model.py").read_text()
    exact = text.replace('approximate="tanh"', 'approximate="none"')
    record_layout(corpus, tmp_path, "", "model.py", exact)
    said = printed(one_process(""), tmp_path)
    got, want = map(float, re.search(r"loss +differs: (\S+) on rank 0, not (\S+):", said).groups())
    assert 1e-9 < abs(got / want - 1) < 1e-5 and compare.FITS_NONE in said, said
    assert "times ONE's" not in said, said


# ---- a loop of another project ----


def train_pipeline(rank, world, folder, m, divisor):
    """Two steps of a pipeline of `world` stages, whose messages are left out: a rank computes all
    stages, and records its own. The loss of a microbatch is divided by `divisor` before its
    backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 6),
                                torch.nn.Linear(6, 11)).double()
    ids, targets = torch.randint(11, (2, 2, m, 4, 5))  # (step, microbatch, B, S) each
    own = {name: param for name, param in model.named_parameters()
           if world == 1 or (int(name[0]) < 2) == (rank == 0)}
    for step in (0, 1):
        model.zero_grad()
        loss = 0.0
        for k in range(m):
            y = F.cross_entropy(model(ids[step, k]).flatten(0, 1), targets[step, k].flatten())
            loss += y.item() / m
            (y / divisor).backward()
        compare.record(folder, step, loss if rank == world - 1 else None,
                       {name: param.grad for name, param in own.items()}, own, rank,
                       layout={"pp": world, "microbatches": m})
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
    compare.record(folder, 2, weights=own, rank=rank)


def test_a_pipeline_like_picotrons_has_gradients_m_times_too_large(tmp_path):
    """... whose one process divides by m, its pipeline does not; the losses that it prints are
    right."""
    for name, world, divisor in (("one", 1, 3), ("right", 2, 3), ("wrong", 2, 1)):
        for rank in range(world):
            train_pipeline(rank, world, tmp_path / name, 3, divisor)
    assert "differ" not in printed(tmp_path / "one", tmp_path / "right")
    said = printed(tmp_path / "one", tmp_path / "wrong")
    assert "step 0 loss        equal\n" in said, said
    assert "5 of 5\n    3 times ONE's: 3 = microbatches: each counts" in said, said


def test_the_commands(tmp_path, one_process):
    done = command("-m", "extras.compare", "record", tmp_path / "other", "--tp", 2)
    assert done.returncode == 0, done.stderr
    shutil.copy(HERE / "extras/compare.py", tmp_path)  # into another project
    done = command("compare.py", one_process(""), "other", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("\nequal\n"), done.stdout + done.stderr
