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
    printed = ranks(4, show.lines_of, name, 4)[0]
    off = re.findall(r"differ from one process's by (\S+) of their size", printed)
    assert off and all(float(x) < 1e-12 for x in off), printed
    assert set(lines) <= set(printed.splitlines()), printed


@pytest.mark.parametrize("N", [3, 4])
def test_collectives_send_the_formula(N):
    printed = ranks(N, show.lines_of, "collectives", N)[0]
    *_, last, line = printed.splitlines()
    assert last.count("1" * N) == N * N  # N chunks on each of N ranks, with all N terms
    assert line.endswith(f" bytes, {16 * (N - 1)}, and has sent {16 * (N - 1)}"), line


def test_schedules_are_drawn_and_compared(tmp_path, capsys):
    show.schedules_command(["1f1b", "4", "8", "--svg", str(tmp_path / "1f1b.svg")])
    drawn = (tmp_path / "1f1b.svg").read_text()
    assert drawn == (HERE / "docs/pictures/1f1b.svg").read_text()
    assert "makespan 33 " in capsys.readouterr().out
    show.schedules_command(["gpipe", "2", "2"])
    assert "rank 1  ...F0 F1 B0--- B1--- ......" in capsys.readouterr().out
    show.schedules_command(["4", "8", "--compare"])
    lines = capsys.readouterr().out.splitlines()[: len(schedules.SCHEDULES)]
    assert [line.split()[0] for line in lines] == [*schedules.SCHEDULES]
    assert all(re.search(r"bubble +(\S+%)  formula +\1 ", line) for line in lines)


def test_mesh_and_sizes(capsys):
    show.mesh_command("2 2 1 1 2".split())
    assert "group(pp): [0, 2] [1, 3] [4, 6] [5, 7]" in capsys.readouterr().out
    show.sizes_command(["7e9"])
    of_8_ranks = capsys.readouterr().out.splitlines()[6].split()
    # 16, 4 + 12/8, 2 + 14/8 and 16/8 bytes of 7e9 parameters; 2, 2 and 3 times 7/8 of 14 GB
    assert of_8_ranks == "8 112 38.5 * 26.25 * 14 * 24.5 24.5 36.75".split()


@pytest.mark.parametrize("words,says", [
    ("ddp 2", "invalid choice: 2"), ("nothing", "nothing"), ("sizes -5", "above 0"),
    ("mesh 3 1 2 1 1", "ep must divide dp"), ("schedules interleaved 4 6", "multiple of 4 ranks"),
    ("schedules 1f1b 99999 9", "at most 500"), ("mesh 1000 1000 1 1 1", "at most 1000"),
    ("schedules 1f1b 2 2 --svg /nowhere/file", "/nowhere/file: No such file")])
def test_wrong_words_are_answered_with_one_line(words, says, capsys, monkeypatch):
    assert says in one_line(show.main, ["show.py", *words.split()], capsys, monkeypatch)


def test_a_command_starts_its_own_processes():
    done = command("-m", "extras.show", "collectives", 2)
    assert done.returncode == 0 and "and has sent 16" in done.stdout, done.stderr
