"""extras/show.py: each command prints what it promises."""

import io
import re
import sys
from contextlib import redirect_stdout

import pytest

import schedules
from extras import show
from mesh import Mesh
from tests.harness import HERE, command, ranks


def _demo(rank, name, layout):
    """What this rank prints in a demonstration."""
    with redirect_stdout(io.StringIO()) as printed:
        show.DEMOS[name][0](Mesh(**layout))
    return printed.getvalue()


def demo(name, n=4, **more):
    return ranks(n, _demo, name, {show.DEMOS[name][1]: n, **more})


@pytest.mark.parametrize("name,times", [
    ("ddp", 1), ("zero", 4), ("tensor_parallel", 1), ("sequence_parallel", 2),
    ("context_parallel", 2), ("expert_parallel", 1), ("pipeline", 2)])
def test_a_technique_has_the_gradients_of_one_process(name, times):
    printed, *others = demo(name, **({"ep": 4} if name == "expert_parallel" else {}))
    off = re.findall(r"differ from one process's by (\S+) of their size", printed)
    assert len(off) == times and all(float(x) < 1e-12 for x in off), printed
    assert not any(others)


@pytest.mark.parametrize("N", [3, 4])
def test_collectives_send_the_formula(N):
    printed = demo("collectives", N)[0]
    sent = re.findall(r"sent +(\d+) bytes, formula +(\d+)", printed)
    assert len(sent) == 3 and all(got == formula for got, formula in sent), printed
    *_, last = (line for line in printed.splitlines() if line.startswith("all-gather"))
    assert last.count("1" * N) == N * N  # N chunks on each of N ranks, with all N terms


def test_the_picture_of_eight_ranks_is_that_of_their_tags(tmp_path):
    ranks(8, _draw, tmp_path / "ranks.svg")
    drawn = (tmp_path / "ranks.svg").read_text()
    assert drawn == (HERE / "docs/pictures/ranks.svg").read_text()


def _draw(rank, file):
    show.draw_eight_ranks(Mesh(**show.EIGHT_RANKS), file)


def test_schedules_are_drawn_and_compared(tmp_path, capsys):
    show.schedules_command(["1f1b", "4", "8", "--svg", str(tmp_path / "1f1b.svg")])
    drawn = (tmp_path / "1f1b.svg").read_text()
    assert drawn == (HERE / "docs/pictures/1f1b.svg").read_text()
    assert "makespan 33 " in capsys.readouterr().out
    show.schedules_command(["gpipe", "2", "2"])
    assert "rank 1  ...F0 F1 B0--- B1--- ......" in capsys.readouterr().out
    show.schedules_command(["4", "8", "--compare"])
    lines = capsys.readouterr().out.splitlines()[:-2]
    assert [line.split()[0] for line in lines] == [*schedules.SCHEDULES]
    assert all(re.search(r"bubble +(\S+%)  formula +\1 ", line) for line in lines)


def test_mesh_and_sizes(capsys):
    show.mesh_command([])
    assert "group(pp): [0, 2] [1, 3] [4, 6] [5, 7]" in capsys.readouterr().out
    show.sizes_command(["7e9"])
    of_8_ranks = capsys.readouterr().out.splitlines()[6].split()
    # 16, 4 + 12/8, 2 + 14/8 and 16/8 bytes of 7e9 parameters; 2, 2 and 3 times 7/8 of 14 GB
    assert of_8_ranks == "8 112 38.5 * 26.25 * 14 * 24.5 24.5 36.75".split()


@pytest.mark.parametrize("words,says", [
    ("ddp 2", "ddp runs on 4 ranks"), ("nothing", "nothing"), ("sizes -5", "above 0"),
    ("mesh 3 1 2 1 1", "ep must divide dp"), ("schedules interleaved 4 6", "multiple of 4 ranks"),
    ("schedules 1f1b 99999 9", "at most 500"), ("ranks --svg no/x", "no/x")])
def test_wrong_words_are_answered_with_one_line(words, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["show.py", *words.split()])
    with pytest.raises(SystemExit) as stop:
        show.main()
    line = capsys.readouterr().err
    assert stop.value.code == 2 and says in line and line.count("\n") == 1


def test_a_command_starts_its_own_processes():
    done = command("-m", "extras.show", "collectives", 2)
    assert done.returncode == 0 and "formula  1680" in done.stdout, done.stderr
