"""--watch: every message of the first step, when, from whom to whom, and for what.

      1.52 ms   0 -> 1   tp   all_reduce, tensor_parallel.py Row.forward    4x8x16    4,096 bytes

Each message of --collectives ring passes Group.exchange, which is replaced for this step: the files
that train know nothing of it.
"""

import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from collectives import Group
from mesh import DATA


@contextmanager
def watched(mesh):
    """A context, given a list: each message that this rank sends in it, (time in seconds, sender,
    receiver, axis, who asked for it, shape, bytes)."""
    sent = []
    exchange = Group.exchange

    def noted(group, send=None, dst=None, *args, **more):
        if send is not None and send.numel() > 0:
            sent.append((time.time(), mesh.rank, group.ranks[dst],
                         axis_of(group, mesh.sizes), asked_by(), [*send.shape],
                         send.numel() * send.element_size()))
        return exchange(group, send, dst, *args, **more)

    Group.exchange = noted
    try:
        yield sent
    finally:
        Group.exchange = exchange


def asked_by():
    """The collective that sends a message and the function that called it, read from the call
    stack: "all_reduce, ddp.py DDP.reduce"."""
    frame, collective = sys._getframe(2), "exchange"
    while Path(frame.f_code.co_filename).name == "collectives.py":
        frame, collective = frame.f_back, frame.f_code.co_name
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name).replace("<locals>.", "")
    return f"{collective}, {Path(frame.f_code.co_filename).name} {name}"


def axis_of(group, sizes):
    """The axes along which a group's ranks differ, named like train.py's flags: "tp", "dp+cp". The
    mesh splits --dp into three axes (DATA in mesh.py): ep alone, without the others, is "ep"."""
    names = group.name.split("_")  # such as shard_ep_cp, ep_tp, pp_ends, world
    if names == ["world"]:
        names = list(sizes)
    is_data = not {"dp", "rep", "shard"}.isdisjoint(names)
    axes = ["dp" if axis in DATA and is_data else axis for axis, size in sizes.items()
            if size > 1 and (axis in names or (axis in DATA and "dp" in names))]
    return "+".join(dict.fromkeys(axes))


def story(sent, which):
    """The lines of --watch, and the sums of each axis. which: "all", a rank, or an axis."""
    lines, times, nbytes = [], Counter(), Counter()
    begin = min(message[0] for message in sent)
    for seconds, src, dst, axis, what, shape, size in sorted(sent):
        if which in ("all", str(src), str(dst), *axis.split("+")):
            size_text = "x".join(map(str, shape))
            lines.append(f"{1e3 * (seconds - begin):9.2f} ms  {src:2d} -> {dst:<2d}  {axis:6}  "
                         f"{what:52} {size_text:>12} {size:>10,} bytes")
            times[axis] += 1
            nbytes[axis] += size
    return "\n".join(lines + [f"{axis}: {times[axis]:,} messages, {nbytes[axis]:,} bytes"
                              for axis in sorted(times)])
