"""extras/show.py: each command prints what it promises."""

import re

import pytest

import schedules
from extras import show
from tests.harness import HERE, command, one_line, ranks


@pytest.mark.parametrize("name,lines", [  # printed in docs/
    ("zero", ["ZeRO-2: of 7520 parameters rank 0 keeps 7520 weights and 1880 gradients, and its "
              "optimizer steps 1880",
              "ZeRO-3: of 7520 parameters rank 0 keeps 1880 weights and 1880 gradients, and its "
              "optimizer steps 1880"]),
    ("ddp", []),
    ("tensor_parallel", [f"{'transformer.wte.weight':34}  [50, 16] on rank 0: [13, 16]"]),
    ("sequence_parallel", ["sequence_parallel: 124424 bytes sent"]),
    ("context_parallel", ["  segment  5 of rank 2   2 1 0 3 3 0 . .",
                          "  the busiest rank has 1.73 times the mean"]),
    ("expert_parallel", ["rank 2     8   4 |   2   4 |   0   5 |   5   4    27 of 32 choices go "
                         "elsewhere"]),
    ("pipeline", [])])
def test_a_technique_prints_the_lines_of_docs_and_has_the_gradients_of_one_process(name, lines):
    printed = ranks(4, show.lines_of, name)[0]
    off = re.findall(r"differ from one process's by (\S+) of their size", printed)
    assert off and all(float(x) < 1e-12 for x in off), printed
    assert set(lines) <= set(printed.splitlines()), printed


def test_collectives_send_the_formula():
    done = command("-m", "extras.show", "collectives")  # starts its own processes
    assert done.returncode == 0, done.stderr
    *_, last, line = done.stdout.splitlines()
    assert last.count("1111") == 16  # 4 chunks on each of 4 ranks, with all 4 terms
    assert line.endswith(" bytes, 48, and has sent 48"), line


def test_schedules_are_drawn_and_compared(tmp_path, capsys):
    show.schedules_command(["1f1b", "4", "8", "--svg", str(tmp_path / "1f1b.svg")])
    drawn = (tmp_path / "1f1b.svg").read_text()
    assert drawn == (HERE / "docs/pictures/1f1b.svg").read_text()
    assert "makespan 33 " in capsys.readouterr().out
    show.schedules_command(["gpipe", "2", "2"])
    assert "rank 1  ...F0 F1 B0--- B1--- ......" in capsys.readouterr().out
    show.schedules_command(["4", "8"])
    bubbles = dict(re.findall(r"(\S+) .* bubble (\S+)  in flight \[", capsys.readouterr().out))
    assert set(bubbles) == set(schedules.SCHEDULES)  # these four by the formulas of schedules.py
    assert {"gpipe": "27.27%", "1f1b": "27.27%", "interleaved": "15.79%", "zb-h1": "11.11%"}.items(
        ) <= bubbles.items()


def test_sizes(capsys):
    show.sizes_command(["7e9"])
    of_8_ranks = capsys.readouterr().out.splitlines()[6].split()
    # 16, 4 + 12/8, 2 + 14/8 and 16/8 bytes of 7e9 parameters; 2, 2 and 3 times 7/8 of 14 GB
    assert of_8_ranks == "8 | 112 38.5 26.25 14 | 24.5 24.5 36.75".split()


@pytest.mark.parametrize("words,says", [
    ("ddp 2", "unrecognized arguments: 2"), ("nothing", "nothing"), ("sizes -5", "above 0"),
    ("schedules interleaved 4 6", "multiple of 4 ranks"), ("schedules 4 8 --svg x", "name it"),
    ("schedules 1f1b 99999 9", "at most 500"),
    ("schedules 1f1b 2 2 --svg /nowhere/file", "/nowhere/file: No such file")])
def test_wrong_words_are_answered_with_one_line(words, says, capsys, monkeypatch):
    assert says in one_line(show.main, ["show.py", *words.split()], capsys, monkeypatch)
