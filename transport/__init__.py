"""How a message travels: through shared memory between ranks of one machine, else through gloo or,
between GPUs, NCCL. A reader of the techniques never needs these files: all messages pass
Group.exchange (collectives.py), which calls its carrier's exchange()."""
