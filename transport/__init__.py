"""How a message travels: between GPUs NCCL; between CPUs of one machine shared memory, else gloo. A
reader of the techniques never needs these files: all messages but those of torch's own collectives
pass Group.exchange (collectives.py), which calls its carrier's exchange()."""
