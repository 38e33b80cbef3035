"""What the doctor says of a layout that does not equal one process: for the message of a test that
fails, here and in forks."""

from run.doctor.diagnose import diagnose
from run.doctor.memory import in_memory
from run.doctor.words import lines


def diagnosis(cfg, mine, reference, vocab_size):
    """The doctor's lines on what differs."""
    dumps = [in_memory(cfg, trace, vocab_size) for trace in (reference, mine)]
    return "\n".join(line for line, is_equal in lines(diagnose(*dumps)) if not is_equal)
