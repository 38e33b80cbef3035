"""What happens to real runs: ranks that die or stop, signals, launchers, full disks. A failure ends
all ranks, with one line that says who waited for whom; nothing outlives the run; a signal saves."""

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

import train
from tests.harness import HERE, Run, children, command, flags, gone, losses, start, until

ENDLESS = 10**6  # steps


def training(corpus, out, env=None, **more):
    """(the launcher of a run that has trained its first steps, the pids of its ranks)."""
    process = start("train.py", *flags(corpus, out, **{"steps": ENDLESS, **more}), env=env)
    metrics = Path(out, "metrics.jsonl")
    until(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size > 300))
    assert process.poll() is None, process.communicate()
    return process, children(process.pid)


def ending(process):
    """(exit code, lines on standard error) of a process."""
    _, error = process.communicate(timeout=120)
    return process.returncode, error.splitlines()


# ---- a rank dies, or stops ----


def test_a_killed_rank_ends_all_with_its_number(corpus, tmp_path):
    process, ranks = training(corpus, tmp_path, dp=2, tp=2)
    os.kill(ranks[2], signal.SIGKILL)
    code, lines = ending(process)
    assert code == 1 and gone(ranks)
    assert any(re.search(r"rank \d: .* (from|to) rank 2: connection closed", line)
               for line in lines), lines
    assert lines[-1] == "train.py: rank 2 was ended by signal 9 (Killed)" and len(lines) == 2, lines


def test_a_stopped_rank_is_named_within_twice_the_timeout(corpus, tmp_path):
    process, ranks = training(corpus, tmp_path, tp=2, pp=2, timeout=4)
    os.kill(ranks[3], signal.SIGSTOP)
    begin = time.time()
    code, lines = ending(process)
    assert code == 1 and gone(ranks) and time.time() - begin < 8 + 5  # a busy machine's processes
    line, *rest = lines
    assert re.search(r"rank \d: .*rank 3: not within 4 s$", line), lines
    assert all("rank 3 was ended by" in other for other in rest), lines


def test_ranks_end_with_their_launcher_even_one_that_is_stopped(corpus, tmp_path):
    process, ranks = training(corpus, tmp_path, dp=2)
    before = set(os.listdir("/dev/shm"))
    os.kill(ranks[1], signal.SIGSTOP)
    process.kill()
    process.communicate()
    until(lambda: gone(ranks), "the ranks end")
    assert set(os.listdir("/dev/shm")) <= before


def fail_in_step(rank, *args):
    raise ValueError(f"a bug of rank {rank}")


def test_a_rank_that_never_starts_is_named(tmp_path, corpus):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = command("train.py", *flags(corpus, tmp_path, tp=2, timeout=3), env=env)
    assert done.returncode == 1
    assert done.stderr == "train.py: rank 0: waiting for rank 1 to start: not within 3 s\n"


@pytest.mark.parametrize("listens", [True, False])
def test_a_store_that_does_not_answer_is_one_line_after_the_timeout(corpus, tmp_path, listens):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = command("train.py", *flags(corpus, tmp_path, tp=2, timeout=3), env=env)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "rank 1: " in done.stderr and "the store of all ranks" in done.stderr


# ---- exit codes ----


def test_wrong_data_ends_all_ranks_with_2_though_the_starter_ignores_its_children(corpus, tmp_path):
    ignore = ("import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
              "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    done = command("-c", ignore, "train.py", *flags(corpus, tmp_path, tp=2, resume="/nonexistent"))
    assert done.returncode == 2
    assert done.stderr == "train.py: /nonexistent: no complete checkpoint there\n"


def test_torchrun_starts_the_ranks_or_one_that_starts_them(corpus, tmp_path):
    seen = []
    for count in (1, 2):
        out = tmp_path / str(count)
        done = command("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count,
                       "train.py", *flags(corpus, out, tp=2))
        assert done.returncode == 0, done.stderr
        assert "replicas agree" in done.stdout
        seen.append(losses(out))
    assert seen[0] == seen[1]


def test_launch_py_of_torch_is_answered_with_torchrun(corpus, tmp_path):
    done = command("train.py", "--local-rank=0")
    assert done.returncode == 2 and "torchrun" in done.stderr and done.stderr.count("\n") == 1


# ---- signals ----


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_the_step_and_resume_goes_on(corpus, tmp_path, number):
    process, ranks = training(corpus, tmp_path, tp=2)
    process.send_signal(number)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and not error and "stopped by a signal" in out
    saved = max(tmp_path.glob("step-*"))
    done = command("train.py", *flags(corpus, tmp_path, dp=2, resume="auto",
                                      steps=int(saved.name[5:]) + 2))
    assert done.returncode == 0 and f"resumed from {saved}" in done.stdout, done.stderr


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone",
                                           "--nproc-per-node", "2"]], ids=["ours", "torchrun"])
def test_one_signal_to_every_process_of_a_run_saves_once(corpus, tmp_path, launcher):
    """`pkill`, and systemd: each rank also gets the signal that its launcher passes on."""
    process = start(*launcher, "train.py", *flags(corpus, tmp_path, dp=2, steps=ENDLESS))
    metrics = tmp_path / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size > 300)
    for pid in [*children(process.pid), process.pid]:
        os.kill(pid, signal.SIGTERM)
    process.communicate(timeout=120)
    until(lambda: len([*tmp_path.glob("step-????????")]) == 1, "a checkpoint")


def test_a_second_signal_ends_at_once(corpus, tmp_path):
    process, ranks = training(corpus, tmp_path, tp=2)
    os.kill(ranks[1], signal.SIGSTOP)  # so that no step ends
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    until(lambda: not Path(f"/proc/{ranks[0]}").exists() or process.poll() is not None)
    code, lines = ending(process)
    assert code == 128 + signal.SIGTERM and gone(ranks) and len(lines) == 1, lines
    assert not [*tmp_path.glob("step-*")]


def test_ctrl_c_while_torch_is_loading_leaves_no_traceback(corpus, tmp_path):
    for delay in (0.05, 0.3, 1.0):
        process = start("train.py", *flags(corpus, tmp_path, tp=2))
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        code, lines = ending(process)
        assert len(lines) <= 1 and "Traceback" not in str(lines), lines


# ---- what the machine lacks ----


def test_standard_output_that_is_full_or_gone_does_not_end_a_run(corpus, tmp_path):
    with open("/dev/full", "w") as full:
        process = start("train.py", *flags(corpus, tmp_path / "full", steps=2), stdout=full)
        assert ending(process) == (0, [])
    read, write = os.pipe()
    os.close(read)
    process = start("train.py", *flags(corpus, tmp_path / "gone", steps=2), stdout=write)
    os.close(write)
    assert ending(process) == (0, [])
    assert len(losses(tmp_path / "full")) == len(losses(tmp_path / "gone")) == 2


def test_a_disk_that_fills_up_ends_all_ranks_with_the_files_name(corpus, tmp_path):
    out = tmp_path / "out"
    run = Run(2, flags(corpus, out, dp=2, n_embd=64, save_interval=1), tmp_path,
              limit=1_200_000)
    codes, line = run.wait(), run.read()
    assert codes == [2, 2], line
    assert line.count("\n") == 1 and "optimizer.safetensors" in line and "too large" in line, line
    assert not [*out.glob("step-????????")]


def test_too_little_memory_is_one_line(corpus, tmp_path):
    words = flags(corpus, tmp_path, n_embd=512, n_head=8, n_layer=8, batch_size=4096,
                  block_size=600)
    limit = "import resource, os, sys; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); "
    done = command("-c", limit + "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
                   "train.py", *words, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "out of memory; try" in done.stderr


def test_any_folder_for_temporary_files_will_do(corpus, tmp_path):
    odd = tmp_path / "a#b?c\nd e"
    odd.mkdir()
    done = command("train.py", *flags(corpus, tmp_path / "out", tp=2), env={"TMPDIR": str(odd)})
    assert done.returncode == 0 and not [*odd.iterdir()], done.stderr


def test_threads_are_those_of_the_processors_that_a_run_may_use(corpus, tmp_path):
    say = "import os; print(os.environ['OMP_NUM_THREADS'])"
    code = f"import sys; sys.orig_argv[1:] = ['-c', {say!r}]; from run.launch import launch; launch(1, 1)"
    done = command("-c", f"import os; os.sched_setaffinity(0, {{0}}); {code}")
    assert done.stdout == "1\n", done
    assert HERE.samefile(Path(train.__file__).parent) and sys.executable
