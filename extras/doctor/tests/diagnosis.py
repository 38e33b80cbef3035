"""What the doctor says of a layout that does not equal one process: for the message of a test that
fails, here and in forks."""

import torch

from experts import kind_of
from extras.doctor.diagnose import diagnose
from extras.doctor.memory import in_memory
from extras.doctor.words import lines
from sizes import config_of


def is_known(cfg, trace, vocab_size):
    """Has the trace the tensors of this repository's model, all trained? A fork's may have
    others, which the doctor cannot compute."""
    config = config_of(cfg, vocab_size)
    with torch.device("meta"):
        names = dict(kind_of(config)(config).canonical_parameters()).keys()
    return trace[0]["weights"].keys() == trace[1]["grads"].keys() == names


def diagnosis(cfg, mine, reference, vocab_size):
    """The doctor's lines on what differs."""
    if not is_known(cfg, reference, vocab_size):
        return "a model that the doctor does not know"
    dumps = [in_memory(cfg, trace, vocab_size) for trace in (reference, mine)]
    said = lines(diagnose(*dumps), dumps[1].layout)
    return "\n".join(line for line, is_equal in said if not is_equal)
