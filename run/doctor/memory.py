"""A dump that was never written: two steps of a run whose tensors this process has."""

from dataclasses import dataclass

import torch

from data.batches import Data
from run.config import Config
from run.doctor.dump import Dump
from run.doctor.record import LAYOUT
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


def tokens_of_step(cfg, step):
    """{"ids", "targets": (D, m, B, S)} of a step."""
    data = Data(cfg)
    ranks = [data.training(cfg, step, Place(d, cfg.dp)) for d in range(cfg.dp)]
    return {name: torch.stack([torch.stack([batch[i] for batch in rank]) for rank in ranks])
            for i, name in enumerate(("ids", "targets"))}


def in_memory(cfg: Config, trace, vocab_size):
    """A Dump of the first two steps of a trace: [{"weights"}, {"loss", "norm", "lr", "grads",
    "weights"}, ...] with full tensors; "differ": names of weights whose copies differ after the
    step, if that is known."""
    tensors = {f"weights-{n}": trace[n]["weights"] for n in (0, 1, 2)}
    tensors |= {f"gradients-{n}": trace[n]["grads"] for n in (1, 2)}
    tokens = {f"tokens-{n}": tokens_of_step(cfg, n - 1) for n in (1, 2)}
    numbers = [{name: trace[n][name] for name in ("loss", "norm", "lr")} for n in (1, 2)]
    steps = [{**step, "scale": 1.0, "gradients_differ": [],
              "weights_differ": trace[n].get("differ", [])} for n, step in enumerate(numbers, 1)]
    optimizer = {"name": cfg.optimizer, "beta1": cfg.beta1, "beta2": cfg.beta2, "eps": 1e-8,
                 "weight_decay": cfg.weight_decay, "grad_clip": cfg.grad_clip}
    return InMemory(cfg.out, "nanogpt", config_of(cfg, vocab_size), cfg.dtype, cfg.dtype,
                    {name: getattr(cfg, name) for name in LAYOUT}, "mean", optimizer,
                    cfg.balance if cfg.experts else 0.0, steps, tensors, tokens)
