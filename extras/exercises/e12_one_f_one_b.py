"""Exercise 12: the order of a pipeline's actions. Return one rank's list: "F" for the forward of
the next microbatch, "B" for the backward of the oldest one in flight; m of each. GPipe: all
forwards, then all backwards. 1F1B: warm up with one forward for each later rank, then a forward
and a backward in turn, then the backwards that are left; never more than P - rank in flight.
"""


def gpipe(P, m, v, rank):
    """v is 1 here. P = 2, m = 3: both ranks F F F B B B."""
    raise NotImplementedError


def one_f_one_b(P, m, v, rank):
    """P = 3, m = 3: rank 0  F F F B B B
                     rank 1  F F B F B B
                     rank 2  F B F B F B"""
    raise NotImplementedError
