"""Side by side with torch's own: same model, same weights, same data, same processes, in one run.

Each row is a race of two step functions that take turns, each turn after a barrier. A turn is one
step (ZeRO-1: 4 steps; a small tensor's collective: several calls); its time is the slowest rank's.
ratio = the peer's time / ours in neighbouring turns, its median and quartiles: 1.2 means that we do
1.2 steps while the peer does one. (In "scaling" and "+ bubble" the peer's time is first multiplied
by a limit, see against_limits: 1.0 is the best that the cores allow.) The first losses are compared
(except in "scaling"), so both sides do the same training. A rank is a process with one thread; only
the peer of "to 2 threads" and "growth" is one process with as many threads as we have ranks. Peak
memory: how much a process grows while it builds one side and takes two steps (Linux; resident
bytes).

    python -m extras.bench             every row but growth's (how long: docs/measured.md)
        --quick          does it run? small model, two turns per side, rows of up to 4 ranks: its
                         figures mean nothing
        --only ddp       rows with that in their name; --only scaling: 1 to 8 ranks
        --only without   rows named "..., without": the gain from a trick of the engine. The peer is
                         the engine with this one trick switched off
        --only growth    step and memory against the length of a sequence (1 to 4 ranks)
        --json out.json  the figures for a program
        --gpu            one GPU, bfloat16: against two loops like nanoGPT's; our MFU

The sides of the rows: job.py (ours), torch_side.py, plain_side.py, without.py, gpu.py.
"""

from extras.bench import bench_flags
from run.signals import end_quietly

if __name__ == "__main__":
    end_quietly()
    args = bench_flags(__doc__).parse_args()  # a wrong flag ends the process here, without torch
    from extras.bench.race import main
    main(args)
