"""What the doctor says of a layout that does not equal one process: for the message of a test that
fails, here and in forks."""

from dataclasses import dataclass

import torch

from data.batches import Data
from experts import kind_of
from run.config import Config
from run.doctor.diagnose import diagnose
from run.doctor.dump import Dump
from run.doctor.words import lines
from sizes import config_of


@dataclass
class InMemory(Dump):
    """A Dump whose tensors were never written."""

    def read_tokens(self, number, name, least):
        return self.tokens[f"tokens-{number}"][name]


class Place:
    """In the place of a mesh: a data rank's index is all that Data asks for."""

    device = torch.device("cpu")

    def __init__(self, index, size):
        self.where = index, size

    def place(self, *axes):
        return self.where


def tokens_of(cfg, step):
    """{"ids", "targets": (D, m, B, S)} of a step."""
    data = Data(cfg)
    ranks = [data.training(cfg, step, Place(d, cfg.dp)) for d in range(cfg.dp)]
    return {name: torch.stack([torch.stack([batch[i] for batch in rank]) for rank in ranks])
            for i, name in enumerate(("ids", "targets"))}


def in_memory(cfg: Config, trace, vocab_size):
    """A Dump of the first two steps of a trace: [{"weights"}, {"loss", "norm", "grads", "weights"},
    ...] with full tensors."""
    layout = ("dp", "ep", "pp", "cp", "tp", "sp", "cp_attention", "zero", "schedule", "chunks",
              "microbatches")
    tensors = {f"weights-{n}": trace[n]["weights"] for n in (0, 1, 2)}
    tensors |= {f"gradients-{n}": trace[n]["grads"] for n in (1, 2)}
    tokens = {f"tokens-{n}": tokens_of(cfg, n - 1) for n in (1, 2)}
    numbers = [{name: trace[n][name] for name in ("loss", "norm", "lr")} for n in (1, 2)]
    steps = [{**step, "scale": 1.0, "gradients_differ": [], "weights_differ": []}
             for step in numbers]
    optimizer = {"name": cfg.optimizer, "beta1": cfg.beta1, "beta2": cfg.beta2, "eps": 1e-8,
                 "weight_decay": cfg.weight_decay, "grad_clip": cfg.grad_clip}
    return InMemory(cfg.out, "nanogpt", config_of(cfg, vocab_size), cfg.dtype, cfg.dtype,
                    {name: getattr(cfg, name) for name in layout}, "mean", optimizer,
                    cfg.balance if cfg.experts else 0.0, steps, tensors, tokens)


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
    return "\n".join(line for line, is_equal in lines(diagnose(*dumps)) if not is_equal)
