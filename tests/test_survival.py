"""What happens to real runs: ranks that die or stop, signals, launchers, full disks. A failure ends
all ranks, with one line that says who waited for whom; nothing outlives the run; a signal saves."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from run.launch import MEETING, exit_code, explain
from tests.harness import HERE, Run, children, command, flags, gone, losses, start, until

ENDLESS = 10**6  # steps


def wait_for_steps(out, process=None):
    """Wait until a run has trained its first steps, or has ended."""
    metrics = Path(out, "metrics.jsonl")
    until(lambda: (process and process.poll() is not None)
          or (metrics.exists() and metrics.stat().st_size > 300))


def training(corpus, out, env=None, **more):
    """(the launcher of a run that has trained its first steps, the pids of its ranks)."""
    process = start("train.py", *flags(corpus, out, **{"steps": ENDLESS, **more}), env=env)
    wait_for_steps(out, process)
    assert process.poll() is None, process.communicate()
    return process, children(process.pid)


def ending(process):
    """(exit code, lines on standard error) of a process."""
    _, error = process.communicate(timeout=120)
    return process.returncode, error.splitlines()


# ---- a rank dies, or stops ----


def test_a_killed_rank_ends_all_with_its_number(corpus, tmp_path):
    process, ranks = training(corpus, tmp_path, dp=2)
    os.kill(ranks[1], signal.SIGKILL)
    code, lines = ending(process)
    assert code == 1 and gone(ranks) and len(lines) == 2, lines
    assert re.search(r"rank 0: .* (from|to) rank 1: connection closed", lines[0]), lines
    assert lines[1] == "train.py: rank 1 was ended by signal 9 (Killed)"


@pytest.mark.parametrize("stopped", [3, 0])
def test_a_stopped_rank_is_named_within_twice_the_timeout(corpus, tmp_path, stopped):
    """... and the launcher, whichever rank it polls first, ends that rank."""
    # (8 s: a busy machine may keep a rank waiting for 3)
    process, ranks = training(corpus, tmp_path, tp=2, pp=2, timeout=8)
    os.kill(ranks[stopped], signal.SIGSTOP)
    begin = time.time()
    code, lines = ending(process)
    assert time.time() - begin < 2 * 8 + 5  # a busy machine's processes
    assert code == 1 and gone(ranks) and len(lines) == 1, lines
    assert re.fullmatch(rf".*rank \d: .*rank {stopped}: not within 8 s", lines[0]), lines


def shared_files():
    """The names in /dev/shm, but for the locks of other programs' multiprocessing."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def test_ranks_end_with_their_launcher_even_one_that_is_stopped_and_nothing_stays(corpus, tmp_path):
    odd = tmp_path / "a#b?c\nd e"  # any folder for temporary files will do
    odd.mkdir()
    before = shared_files()
    process, ranks = training(corpus, tmp_path, dp=2, env={"TMPDIR": str(odd)})
    os.kill(ranks[1], signal.SIGSTOP)
    process.kill()
    process.communicate()
    until(lambda: gone(ranks), "the ranks end")
    assert shared_files() <= before and not [*odd.iterdir()]


def test_a_rank_that_never_starts_is_named_once(tmp_path, corpus):
    size = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", MEETING: str(tmp_path / "meeting")}
    runs = [start("train.py", *flags(corpus, tmp_path, pp=3, timeout=6),
                  env={**size, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    endings = [ending(process) for process in runs]
    assert [code for code, _ in endings] == [1, 1]
    line, = [line for _, lines in endings for line in lines]
    assert re.fullmatch(r"train.py: rank [01]: waiting for rank 2 to start: not within 6 s", line)


@pytest.mark.parametrize("rank,meets_at,says", [
    (0, "free port", "meeting at the store of all ranks: .* 1/2 clients joined."),
    (1, "free port", "meeting at the store of all ranks: .*"),
    (1, "silent port", "meeting at the store of all ranks: not within 4 s")])
def test_a_rank_that_meets_nobody_is_one_line(corpus, tmp_path, rank, meets_at, says):
    """At a port where it is alone, or where a program never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(server.getsockname()[1])}
        if meets_at == "free port":
            server.close()
        done = command("train.py", *flags(corpus, tmp_path, tp=2, timeout=2), env=env)
    assert done.returncode == 1
    assert re.fullmatch(f"train.py: rank {rank}: {says}\n", done.stderr), done.stderr


LEAVES_EARLY = """
import os
from run.flags import read_command_line
from run.launch import joined, start
start("")
cfg, _ = read_command_line("", 2)
with joined(cfg, 2):
    if os.environ["RANK"] == "1":
        os._exit(0)
"""


def test_a_rank_that_leaves_early_is_one_line():
    done = command("-c", LEAVES_EARLY, "--dp", 2, "--device", "cpu", "--timeout", 20)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "rank 0: waiting for all ranks to end: " in done.stderr


def test_torchrun_starts_the_ranks_again_and_they_resume(corpus, tmp_path):
    process = start("-m", "torch.distributed.run", "--standalone", "--max-restarts", "1",
                    "--nproc-per-node", "2", "train.py",
                    *flags(corpus, tmp_path, dp=2, steps=ENDLESS, save_interval=50, resume="auto"))
    until(lambda: [*tmp_path.glob("step-????????")], "a checkpoint")
    first = set(children(process.pid))
    os.kill(min(first), signal.SIGKILL)
    until(lambda: process.poll() or first.isdisjoint(children(process.pid)), "the ranks end")
    saved = max(tmp_path.glob("step-????????"))
    until(lambda: process.poll() or max(tmp_path.glob("step-????????")) > saved, "a checkpoint")
    process.terminate()
    out, error = process.communicate(timeout=120)
    assert "resumed from" in out, error


# ---- exit codes ----


@pytest.mark.parametrize("codes,received,want,says", [
    ([0, 0], [15], 0, ""),
    ([1, None], [], 1, ""),  # None: had to be killed
    ([1, -9], [15], 1, "rank 1 was ended by signal 9 (Killed)"),
    ([-2, -2], [2], 130, "stopped by SIGINT"),  # before a rank was ready to save
    ([143, 1], [15, 15], 143, "stopped by SIGTERM")])
def test_the_exit_code_tells_how_the_ranks_have_ended(codes, received, want, says, capsys):
    assert exit_code(codes, received) == want
    assert capsys.readouterr().err.partition(": ")[2].strip() == says


def test_wrong_data_ends_all_ranks_with_2_though_the_starter_ignores_its_children(corpus, tmp_path):
    ignore = ("import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
              "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    done = command("-c", ignore, "train.py", *flags(corpus, tmp_path, tp=2, resume="/nonexistent"))
    assert done.returncode == 2
    assert done.stderr == "train.py: /nonexistent: no complete checkpoint there\n"


# ---- signals ----


def test_ctrl_c_saves_after_the_step_and_resume_goes_on(corpus, tmp_path):
    """A second one within a second is the first one again."""
    process, ranks = training(corpus, tmp_path, tp=2)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and not error and "stopped by a signal" in out
    saved, = tmp_path.glob("step-*")
    run = Run(2, flags(corpus, tmp_path, dp=2, resume="auto", steps=int(saved.name[5:]) + 2),
              tmp_path)
    assert run.wait() == [0, 0] and f"resumed from {saved}" in run.read("stdout"), run.read()


@pytest.mark.parametrize("launcher", ["-m torch.distributed.run --nproc-per-node 2 --standalone",
                                      ""], ids=["torchrun", "ours"])
def test_one_signal_to_every_process_of_a_run_saves_once(corpus, tmp_path, launcher):
    """`pkill`, and systemd: each rank also gets the signal that its launcher passes on."""
    process = start(*launcher.split(), "train.py", *flags(corpus, tmp_path, dp=2, steps=ENDLESS))
    wait_for_steps(tmp_path, process)
    for pid in [*children(process.pid), process.pid]:
        os.kill(pid, signal.SIGTERM)
    process.communicate(timeout=120)
    until(lambda: len([*tmp_path.glob("step-????????")]) == 1, "a checkpoint")


def test_a_second_signal_ends_at_once(corpus, tmp_path):
    run = Run(2, flags(corpus, tmp_path, tp=2, steps=ENDLESS), tmp_path)
    wait_for_steps(tmp_path)
    run.signal(1, signal.SIGSTOP)  # so that no step ends
    run.signal(0, signal.SIGTERM)
    time.sleep(1.2)
    run.signal(0, signal.SIGTERM)
    assert run.wait(but=[1]) == [128 + signal.SIGTERM]
    assert not [*tmp_path.glob("step-*")]


@pytest.mark.parametrize("delay", [0, 0.4])
def test_ctrl_c_while_torch_is_loading_leaves_no_traceback(corpus, tmp_path, delay):
    """As soon as run/launch.py, the first module of ours, imports others (such as _ctypes)."""
    process = start("train.py", *flags(corpus, tmp_path, tp=2))
    until(lambda: "_ctypes" in Path(f"/proc/{process.pid}/maps").read_text())
    time.sleep(delay)
    ranks = children(process.pid)
    process.send_signal(signal.SIGINT)
    code, lines = ending(process)
    assert code and len(lines) <= 1 and "Traceback" not in str(lines), lines
    until(lambda: gone(ranks), "the ranks end")


# ---- what the machine lacks ----


def test_standard_output_that_is_full_or_gone_does_not_end_a_run(corpus, tmp_path):
    read, gone_pipe = os.pipe()
    os.close(read)
    with open("/dev/full", "w") as full:
        runs = [start("train.py", *flags(corpus, tmp_path / str(i), steps=2), stdout=stream)
                for i, stream in enumerate((full, gone_pipe))]
    os.close(gone_pipe)
    assert [ending(process) for process in runs] == [(0, [])] * 2
    assert len(losses(tmp_path / "0")) == len(losses(tmp_path / "1")) == 2


@pytest.mark.parametrize("size,saves,limit,file", [(2, 1, 4_200_000, "optimizer.safetensors"),
                                                   (1, 0, 300, "metrics.jsonl")])
def test_a_disk_that_fills_up_ends_all_ranks_with_the_files_name(corpus, tmp_path, size, saves,
                                                                 limit, file):
    out = tmp_path / "out"
    run = Run(size, flags(corpus, out, dp=size, n_embd=128, save_interval=saves), tmp_path, limit)
    codes, line = run.wait(), run.read()
    assert max(codes) == 2, line
    assert line.count("\n") == 1 and file in line and "too large" in line, line
    assert not [*out.glob("step-????????")]


def test_too_little_memory_is_one_line(corpus, tmp_path):
    words = flags(corpus, tmp_path, n_embd=512, n_head=8, n_layer=8, batch_size=4096,
                  block_size=600)
    limit = "import resource, os, sys; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); "
    done = command("-c", limit + "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
                   "train.py", *words, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "out of memory; try" in done.stderr


def test_an_error_of_the_compiler_is_one_line():
    class Failed(RuntimeError):
        __module__ = "torch._inductor.exc"

    error = Failed("PermissionError: /cache\nten more lines")
    line = "rank 3: --compile: PermissionError: /cache"
    assert explain(error, 3, SimpleNamespace(compile=True)) == (line, 1)
    assert explain(error, 3, SimpleNamespace(compile=False))[0] is None  # ours: its traceback


def test_a_container_that_forbids_shared_memory_trains(corpus, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.memfd_create\n")
    done = command("train.py", *flags(corpus, tmp_path / "out", dp=2, steps=1),
                   env={"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)})
    assert done.returncode == 0 and "replicas agree" in done.stdout, done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"sitecustomize.py", "__pycache__", "out"}


def test_windows_is_one_line():
    done = command("-c", "import sys; sys.platform = 'win32'; from run.launch import start; "
                   "start('')")
    line = f"{done.stderr.partition(':')[0]}: needs Linux or macOS; on Windows use WSL\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_a_hostname_of_64_characters_trains(corpus, tmp_path):
    """gloo's own choice of an address would look it up: "File name too long"."""
    own_name = ["unshare", "--map-root-user", "--uts"]
    if subprocess.run([*own_name, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of one's own")
    words = [sys.executable, str(HERE / "train.py"), *flags(corpus, tmp_path, dp=2, steps=1)]
    script = f"hostname {'h' * 64} && exec {shlex.join(words)}"
    done = subprocess.run([*own_name, "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_are_those_of_the_processors_that_a_run_may_use():
    done = command("-c", "import os; os.sched_setaffinity(0, {0}); from run import launch; "
                   "print(launch.available_cores())")
    assert done.stdout == "1\n", done.stderr
