"""Shows a technique at work, on processes of this machine; or a table, or a schedule.

    python -m extras.show ddp                   each of these on 4 ranks: collectives, ddp, zero,
                                                tensor_parallel, sequence_parallel,
                                                context_parallel, expert_parallel, pipeline;
                                                engine.ddp, engine.tensor_parallel,
                                                engine.context_parallel, engine.pipeline
    python -m extras.show collectives 3         on 3 ranks (context_parallel takes a number, too)
    python -m extras.show mesh 2 2 1 1 2        the groups of a mesh: sizes of dp pp ep cp tp
    python -m extras.show memory                what one process keeps for backward
    python -m extras.show sizes 7e9             GB held and sent by a rank, by ZeRO stage
    python -m extras.show schedules 1f1b 4 8    a timeline of 4 ranks and 8 microbatches;
                                                schedules 4 8 --compare: all schedules
"""

import sys

from run.signals import end_quietly, note, program


def usage(line):
    """Print a line about a wrong command, and end."""
    note(f"{program()}: {line}")
    sys.exit(2)


def ranks_asked(words):
    """The number of ranks on the command line, or 4."""
    if words and (len(words) > 1 or not words[0].isdecimal() or not 0 < int(words[0]) <= 64):
        usage("say how many ranks, 1 to 64")
    return int(words[0]) if words else 4


def main():
    end_quietly()
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(__doc__, end="")
    if name in ("mesh", "sizes", "schedules"):  # do not need torch, which takes seconds to import
        from extras.show import draw, tables
        commands = {"mesh": tables.mesh_command, "sizes": tables.sizes_command,
                    "schedules": draw.schedules_command}
        return commands[name](words)
    if name == "memory":
        from extras.show.memory import memory_command
        return memory_command()
    from extras.show.demonstrations import demonstrate
    from extras.show.demos import DEMOS
    if name not in DEMOS:
        known = [*DEMOS, "memory", "mesh", "sizes", "schedules"]
        usage(f"{name} is unknown; try {', '.join(known)}")
    demo = DEMOS[name]
    if words and not demo.any_number:
        usage(f"{name} runs on 4 ranks; leave out {' '.join(words)}")
    demonstrate(demo.run, demo.make_mesh, **{demo.axis: ranks_asked(words)}, ep=demo.ep)


if __name__ == "__main__":
    main()
