"""What python -m extras.show and the programs next to it print, refuse and write."""

import gc
import itertools
import json
import shlex
import sys
from functools import partial

import pytest
import torch

import extras.show.__main__ as show
import schedules
from extras.planner import hardware, memory, traffic
from extras.show import draw, pictures
from extras.show import memory as show_memory
from extras.show import tables as show_tables
from extras.show.tests.pages import BLOCKS
from model import build
from recompute import recompute
from sizes import WIDTHS, GPTConfig, bytes_per_parameter
from tests.harness import close
from tests.isolation import as_it_was
from tests.programs import (
    leave_ctrl_c_and_errors_to_pytest,
    refuse_an_unknown_flag_before_torch,
    refuse_to_write_over,
    tree,
)
from tests.runs import command, one_line

# ---- like all programs ----


def test_an_unknown_flag_is_one_line_before_torch_is_imported():
    refuse_an_unknown_flag_before_torch([
        "-m extras.show.pictures", "-m extras.show.eight_ranks",
        "-m extras.show mesh", "-m extras.show sizes", "-m extras.show schedules"])


@pytest.mark.parametrize("line", ["show schedules --bogus", "show sizes --bogus",
                                  "show mesh --bogus", "pictures.py --bogus"])
def test_after_them_ctrl_c_and_errors_are_pytests_again(line, capsys, monkeypatch):
    main = pictures.main if line.startswith("pictures") else show.main
    leave_ctrl_c_and_errors_to_pytest(main, line.split(), capsys, monkeypatch)


@pytest.mark.parametrize("line,says", [
    ("collectives --help", "say how many ranks, 1 to 64"), ("collectives 0", "say how many"),
    ("context_parallel abc", "say how many ranks"), ("ddp 2", "ddp runs on 4 ranks"),
    ("sizes nan", "must be above 0"), ("sizes -5", "must be above 0"),
    ("sizes --ranks 0", "must be above 0"), ("sizes --microbatches 0", "must be above 0"),
    ("mesh 0 1 1 1 1", "give the sizes"), ("nothing", "nothing is unknown; try collectives, ddp")])
def test_nonsense_is_answered_with_one_line(line, says, capsys, monkeypatch):
    assert says in one_line(show.main, ["show", *line.split()], capsys, monkeypatch)


# ---- sizes ----


@pytest.mark.parametrize("m", [1, 4])
def test_sizes_prints_what_the_planner_counts(m, capsys):
    """Held and sent, for 7e9 parameters on 6 ranks: a number that is no power of two."""
    with as_it_was():
        show_tables.sizes_command(["7e9", "--ranks", "6", "--microbatches", str(m)])
    *_, row = capsys.readouterr().out.splitlines()
    ranks, *figures = map(float, row.replace("*", "").split())
    job = memory.Job(hardware.MODELS["gpt2"], 6)
    want = [7 * sum(bytes_per_parameter(stage, 6)) for stage in range(4)]
    for stage in (1, 2, 3):
        layout = memory.Layout(dp=6, zero=stage, microbatches=m)
        sent = traffic.dp_messages(job, layout, 7, 6, gathered=14)
        want.append(sum(times * gb for _, _, times, gb in sent))
    assert ranks == 6 and figures == [float(f"{gb:.4g}") for gb in want]


# ---- schedules ----


def test_schedules_are_drawn_compared_and_written(tmp_path, capsys):
    def run(line):
        with as_it_was():
            draw.schedules_command(shlex.split(line))
        return capsys.readouterr().out

    assert json.loads(run("1f1b 4 8 --json")) == {
        "makespan": 33, "bubble": 3 / 11, "peak_in_flight": [4, 3, 2, 1]}
    assert run("gpipe 2 2").splitlines()[1] == "rank 1  ...F0 F1 B0--- B1--- ......"
    *lines, explained, _ = run("4 8 --compare").splitlines()
    assert explained.startswith("Makespan: ")
    compared = {line.split()[0]: line for line in lines}
    assert list(compared) == list(schedules.SCHEDULES)
    assert compared["1f1b"].endswith("in flight [4, 3, 2, 1]")
    assert compared["interleaved"].endswith(
        "in flight [11, 9, 7, 5], each in 1/2 of a rank's layers")
    # rank 1: F0 3-5, B0 5-7, F1 7-9, B1 9-11; rank 0 has its gradient one later
    assert "makespan 14 " in run("1f1b 2 2 --costs 2,1,1,1")
    run(f"zb-v 2 4 --svg '{tmp_path}/x.svg'")
    assert (tmp_path / "x.svg").read_text().count("<rect") == 2 * 2 * 4 * 3
    assert json.loads(run("interleaved 4 8 --json"))["bubble"] == 3 / 19  # two chunks
    for bad in ("1f1b 0 8", "interleaved 4 6", "wave 2 2", "1f1b 2 2 --costs 1", "1f1b 2"):
        with pytest.raises(SystemExit) as stop:
            run(bad)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_too_many_microbatches_are_refused_at_once():
    done = command("-m", "extras.show", "schedules", "1f1b", "4", "1000000000000")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "a million" in done.stderr


# ---- pictures ----


@pytest.mark.parametrize("main,line,says", [
    (show.main, "show schedules 1f1b 2 4 --svg mine", "holds something else than --svg"),
    (pictures.main, "pictures.py --svg .",
     "way.svg exists, with other content; name another folder for --svg"),
    (pictures.main, "pictures.py --svg /proc/x", "/proc/x: No such file or directory"),
    (show.main, "show schedules 1f1b 2 4 --svg no/x", "no/x: No such file or dir")])
def test_nothing_is_written_over(main, line, says, tmp_path, capsys, monkeypatch):
    refuse_to_write_over(["mine", "way.svg"], main, line, says, tmp_path, capsys, monkeypatch)


def test_a_picture_that_is_the_same_is_written_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--svg", str(tmp_path)])
    pictures.main()
    before = tree(tmp_path)
    pictures.main()
    assert before == tree(tmp_path) and len(before) == len(pictures.DRAWINGS)


@pytest.mark.parametrize("text", [
    "[1]", "\\x00", '{"step": "a", "loss": 1}', '{"step": 0, "loss": "x"}',
    '{"step": 0, "loss": NaN}', '{"step": 0, "loss": 1e999}', f'{{"step": {10**400}, "loss": 1}}',
    '{"step": -1, "loss": 1}', '{"step": 0, "loss": ' + "[" * 100_000,
    '{"step": 0, "busiest": [1]}', '{"step": true}', '{"a": 1}'], ids=lambda text: text[:30])
def test_pictures_refuse_what_is_not_their_file(tmp_path, text, capsys, monkeypatch):
    (tmp_path / "x").write_text(text + "\n")
    argv = ["pictures.py", "--svg", tmp_path, "--metrics", tmp_path / "x"]
    assert "not a file that train.py --metrics wrote" in one_line(
        pictures.main, argv, capsys, monkeypatch)


def test_a_run_that_diverged_is_drawn(tmp_path):
    """... with some ticks, not with one for each of 10^30 nats."""
    lines = [{"step": step, "loss": 10.0**step} for step in range(31)]
    (tmp_path / "x").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, svg = pictures.metrics_svg([str(tmp_path / "x")])
    assert svg.count("<text") < 50


def test_pictures_of_more_runs_than_colors_are_refused(tmp_path, capsys, monkeypatch):
    for folder in range(7):
        (tmp_path / str(folder)).mkdir()
        for name in ("same", f"own{folder}"):
            (tmp_path / str(folder) / name).write_text('{"step": 0, "loss": 1}\n')
    for name in ("same", "own*"):
        argv = ["pictures.py", "--svg", tmp_path, "--metrics", *tmp_path.glob(f"*/{name}")]
        assert "takes up to 6 files, of different names" in one_line(
            pictures.main, argv, capsys, monkeypatch)


# ---- memory ----

MEMORY = "docs/memory.md"


@pytest.mark.parametrize("words,sequences,dtype,recomputed", show_memory.ROWS, ids=lambda x: str(x))
def test_bytes_kept_for_backward_are_those_of_the_formula(words, sequences, dtype, recomputed):
    """But for the loss, positions and, per recomputed block, the state of torch's random numbers.
    """
    config = show_memory.CONFIG
    kept = show_memory.kept_bytes(config, sequences, dtype, recomputed)
    wanted = show_memory.bytes_by_formula(config, sequences, WIDTHS[dtype], recomputed)
    assert 0 <= kept - wanted <= (6000 * config.n_layer if recomputed else 1100)


def test_float16_keeps_what_bfloat16_keeps():
    config = GPTConfig(67, 16, 2, 2, 8)
    sixteen = [show_memory.kept_bytes(config, 2, dtype, False) for dtype in ("bfloat16", "float16")]
    assert sixteen[0] == sixteen[1] < show_memory.kept_bytes(config, 2, "float32", False)


def peak_of_segments(blocks, k, x):
    """The most bytes that exist at a time in forward and backward of these blocks, k of which are
    recomputed at once. x and gradients of parameters are not counted."""
    for param in blocks.parameters():
        param.grad = torch.zeros_like(param)
    gc.collect()
    gc.disable()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        y = x
        for i in range(0, len(blocks), k):
            y = recompute(blocks[i : i + k], y)
        y.sum().backward()
    gc.enable()
    events = profile.kineto_results.events()
    return max(itertools.accumulate(event.nbytes() for event in events
                                    if event.name() == "[memory]"))


def test_recomputing_k_blocks_at_once_holds_the_pages_sum():
    """L C / k + 16 C k per token, and some gradients, as many for any k: of 16 blocks k = 1 holds
    the least, and not k = 4, the square root."""
    L, tokens = 16, 8 * 64
    config = GPTConfig(67, 64, L, 4, 64)
    blocks = torch.nn.Sequential(*build(config).layers[1:-1])
    x = torch.randn(8, 64, 64, requires_grad=True)
    # The bytes per token that another block adds: the head's part is the same, and drops out
    one, two = (show_memory.bytes_by_formula(GPTConfig(67, 1, n, 4, 64), 1, 4, False)
                for n in (1, 2))
    block, one_input = tokens * (two - one), x.nbytes
    peaks = {k: peak_of_segments(blocks, k, x) for k in (1, 2, 4, 8)}
    for k, peak in peaks.items():
        assert 0 <= peak - (L // k * one_input + k * block) < 0.4 * block
    assert sorted(peaks, key=peaks.get) == [1, 2, 4, 8]


def test_the_chapters_forms_of_accumulation_and_recompute_give_the_same_gradients():
    page = {"torch": torch}
    for block in BLOCKS:
        if block.page == MEMORY and block.kind == "python":
            exec("\n".join(block.lines), page)
    config = GPTConfig(67, 8, 2, 2, 8)
    batch = torch.arange(64).view(2, 4, 8)
    grads = []
    for K, recomputed in ((1, False), (2, False), (4, True)):
        model = build(config, dtype=torch.double)
        if recomputed:
            for layer in model.layers[1:-1]:
                layer.forward = partial(page["Recomputed"].apply, layer.forward)
        page["accumulate"](model, batch, K, tokens=32)
        grads.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    for other in grads[1:]:
        close(other, grads[0], "gradients")
