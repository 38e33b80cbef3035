"""The bench's lines and figures: not its times, which are those of a machine."""

import io
import re
from contextlib import redirect_stdout
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import extras.bench.race as bench
from extras.bench import gpu
from extras.bench.expected import ATTENTION, expected
from run.config import Config
from sizes import peak_flops
from tests import first_gpu
from tests.counts import PRODUCTS, count_step
from tests.harness import HERE
from tests.pool import pool
from tests.programs import (
    refuse_an_unknown_flag_before_torch,
    refuse_to_write_over,
)


def test_an_unknown_flag_is_one_line_before_torch_is_imported():
    refuse_an_unknown_flag_before_torch(["-m extras.bench"])


@pytest.mark.parametrize("line,says", [
    ("bench --quick --only ddp --json mine", "holds something else than --json"),
    ("bench --quick --only ddp --json no/x", "no/x: No such file or directory")])
def test_nothing_is_written_over(line, says, tmp_path, capsys, monkeypatch):
    refuse_to_write_over(["mine"], bench.main, line, says, tmp_path, capsys, monkeypatch)


def test_the_benchs_mb_are_millions_of_bytes(monkeypatch):
    """Of a process that /proc says has grown by 2,000,000 kB, which are KiB."""
    monkeypatch.setattr(bench, "open", lambda *args: io.StringIO(
        "VmHWM:\t 2001000 kB\nVmRSS:\t 1000 kB\n"), raising=False)
    job = SimpleNamespace(drain=lambda: None)
    assert bench.peak(job, lambda job: lambda: None) == 2048


# ---- one GPU ----


def _losses_of_peers(rank):
    """{peer: its losses in four steps} of a small model, on a CPU."""
    cfg = Config(dp=1, n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, lr=1e-2,
                 dtype="bfloat16", microbatches=2, chunks=1, grad_clip=1.0)
    rows = torch.randint(gpu.VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(0))
    batches = [(part[:, :-1], part[:, 1:], None) for part in rows.split(2)]
    device = torch.device("cpu")
    steps = {name: make(cfg, batches, device) for name, make in gpu.PEERS.items()}
    ours, _ = gpu.our_gpu_step(cfg, batches, device)
    ours()
    return {name: [step().item() for _ in range(4)] for name, step in steps.items()}


def test_the_peers_of_a_gpu_train_alike_and_their_losses_fall():
    """float32 weights under autocast, and bfloat16 weights with float32 masters."""
    losses, = pool(1, _losses_of_peers)
    for autocast, masters in zip(*losses.values(), strict=True):
        assert abs(autocast - masters) < 0.02 * autocast, losses
    assert all(values[-1] < 0.9 * values[0] for values in losses.values()), losses


def _rows_of_the_bench(rank):
    """What `python -m extras.bench --gpu --quick` prints, for two of its rows."""
    rows = [*gpu.rows_on_gpu()][3::2]
    printed, precision = io.StringIO(), torch.get_float32_matmul_precision()
    with (patch.object(gpu, "rows_on_gpu", lambda: rows), redirect_stdout(printed),
          patch("sys.argv", ["bench", "--gpu", "--quick"])):
        bench.main()
    torch.set_float32_matmul_precision(precision)
    return [row[0] for row in rows], printed.getvalue().splitlines()


def test_bench_gpu_prints_a_row_for_each_peer_with_and_without_compile():
    """In pretence, on a CPU. Each peer, one microbatch and several; memory and MFU are a GPU's."""
    (names, (about, header, *lines)), = pool(1, _rows_of_the_bench)
    assert names == ["gpt2", "gpt2-xl"] and "cpu, bfloat16" in about
    for line, (name, compiled, at_once, peer) in zip(lines, [
            ("gpt2", "no", 2, "autocast"), ("gpt2", "yes", 2, "autocast"),
            ("gpt2-xl", "no", 4, "masters"), ("gpt2-xl", "yes", 4, "masters")], strict=True):
        words = line.replace(" - ", "-").split()
        assert words[:6:2] == [name, "4", peer] and words[1:4:2] == [compiled, str(at_once)], line
        assert len(words) == 15 and len(line) == len(header), line
        ours, rate, peers = (float(words[i].replace(",", "")) for i in (6, 7, 9))
        assert ours > 0 and peers > 0 and abs(rate * ours / 1e3 / (4 * 32) - 1) < 0.1, line
        assert words[8] == "nan%" and words[-2:] == ["nan", "nan"], line


# ---- what GPT-2 should reach ----


def test_what_gpt2_should_reach_is_the_pages_arithmetic():
    """Without this repository's formulas: 989 TFLOP/s, 3350 GB/s, 124,439,808 parameters."""
    lines = expected("NVIDIA H100 80GB HBM3")
    assert "\n".join(f"    {line}" for line in lines) in (HERE / "docs/measured.md").read_text()
    tokens, (plain, compiled) = 16 * 1024, (count_step(), count_step(fused_loss=True))
    products = 1e3 * 6 * 124_439_808 * tokens / (0.78 * 989e12)
    attention = 1e3 * 6 * 12 * 768 * 1024 * tokens / (0.38 * 989e12)
    peak = 1e3 * (6 * 124_439_808 + 12 * 12 * 768 * 1024) * tokens / 989e12
    for column, counting in ((1, plain), (2, compiled)):
        moved = counting.gigabytes(but=(*PRODUCTS, *ATTENTION)) / (0.66 * 3.35)
        want = [products, attention, moved, 1.5e-3 * counting.num_kernels]
        rows = [re.split(r" {2,}", line) for line in lines[1:]]
        got = [float(row[column]) for row in rows[:6]]
        assert got == pytest.approx([*want, sum(want), peak], abs=0.15), rows
        assert float(rows[6][column][:-1]) == pytest.approx(100 * peak / sum(want), abs=1), rows


@pytest.mark.parametrize("gpu,name,hbm", [
    ("NVIDIA A100-SXM4-80GB", "a100-80", 2039), ("NVIDIA A100 80GB PCIe", "a100-80", 1935),
    ("NVIDIA A100-SXM4-40GB", "a100-40", 1555), ("NVIDIA H100 PCIe", "h100", 2000),
    ("NVIDIA H100 NVL", "h100", 3900), ("NVIDIA H100 80GB HBM3", "h100", 3350),
    ("NVIDIA H200", "h200", 4800), ("Quadro P400", "h200", 4800)])
def test_each_card_is_expected_to_read_at_its_own_bandwidth(gpu, name, hbm):
    lines = expected(gpu)
    assert any(f"of {hbm} GB/s" in line for line in lines), lines
    assert f"on {name}, if no kernel" in lines[-1]
    peak = peak_flops(gpu) or 989e12
    assert any(f"of {peak / 1e12:.0f} TFLOP/s" in line for line in lines), lines


def test_the_page_of_the_first_ten_minutes_has_both(monkeypatch):
    monkeypatch.setattr(first_gpu, "run", lambda *words: [" ".join(words)])
    titles = {"What GPT-2 should reach, by arithmetic": "    -m extras.bench.expected no GPU",
              "Beside loops like nanoGPT's": "    -m extras.bench --gpu --quick"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {title: first_gpu.PARTS[title](True)[1] for title in titles} == titles
