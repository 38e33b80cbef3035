"""The errors of torch's message libraries, shortened."""

import re

NOISE = (  # in the first line of an error
    r"^\[\S*\] ",  # C++ location: [/w/pair.cc:5]
    r" in: \S+(?=,)",  # C++ location: in: /w/Nccl.cpp:77
    r"\. (This is|Check) .*",  # hints
    r" \(run with .*",
    r", keys: .*",  # the store's keys
)


def reason_in(text):
    """An error of a library in one line, without NOISE. NCCL names the cause in the line after
    "Last error:"; the cause is put at the end.

        [/w/pair.cc:5] Connection closed by peer. This is likely ...    Connection closed by peer
        wait timeout after 600ms, keys: /a/b                            wait timeout after 600ms

        NCCL error in: /w/Nccl.cpp:77, unhandled cuda error (run ...
        Last error:
        Cuda failure 2 'out of memory'
            -> NCCL error, unhandled cuda error: Cuda failure 2 'out of memory'
    """
    first, *_ = text.splitlines() or ["unknown error"]
    for pattern in NOISE:
        first = re.sub(pattern, "", first)
    _, _, last_error = text.partition("Last error:")
    return ": ".join([first, *last_error.strip().splitlines()[:1]])
