"""A dump that was never written: two steps of a run whose tensors are in this process's memory."""

from dataclasses import dataclass

import torch

from data.batches import Data
from extras.doctor.dump import Dump
from extras.doctor.record import LAYOUT
from run.config import Config
from schedules import chunks_of
from sizes import config_of


@dataclass
class InMemory(Dump):
    """A Dump whose tensors and tokens are in memory: tokens has tensors in place of Entries."""

    def read_tokens(self, number, name, padding=()):
        return self.tokens[f"tokens-{number}"][name]


class Place:
    """Stands in for a mesh in Data.training, which asks for the data rank's index, the number of
    data ranks, and the device."""

    device = torch.device("cpu")

    def __init__(self, index, size):
        self.where = index, size

    def place(self, *axes):
        return self.where


def tokens_of_step(cfg, step):
    """{"ids", "targets": (D, m, B, S)} of a step."""
    data = Data(cfg)
    # For each data rank [(ids, targets, number of the first sequence)], by microbatch
    ranks = [data.training(cfg, step, Place(d, cfg.dp)) for d in range(cfg.dp)]

    def stacked(i):
        return torch.stack([torch.stack([batch[i] for batch in rank]) for rank in ranks])

    return {"ids": stacked(0), "targets": stacked(1)}


def in_memory(cfg: Config, states, vocab_size):
    """A Dump of a run's first two steps. states: a dict before step 1, {"weights"}, and one after
    each step, {"loss", "norm", "lr", "grads", "weights"}, with full tensors; exercises/break_it.py
    and tests/harness.py make such lists. A state may have "gradients_differ" and "weights_differ",
    too: names of tensors whose copies differ between ranks."""
    tensors = {f"weights-{n}": states[n]["weights"] for n in (0, 1, 2)}
    tensors |= {f"gradients-{n}": states[n]["grads"] for n in (1, 2)}
    tokens = {f"tokens-{n}": tokens_of_step(cfg, n - 1) for n in (1, 2)}
    steps = []
    for n in (1, 2):
        numbers = {name: states[n][name] for name in ("loss", "norm", "lr")}
        differ = {name: states[n].get(name, []) for name in ("gradients_differ", "weights_differ")}
        steps.append({**numbers, "scale": 1.0, **differ})
    layout = {name: getattr(cfg, name) for name in LAYOUT}
    layout["chunks"] = chunks_of(cfg.schedule, cfg.chunks)  # 0: the flag was left to be chosen
    optimizer = {"name": cfg.optimizer, "beta1": cfg.beta1, "beta2": cfg.beta2, "eps": 1e-8,
                 "weight_decay": cfg.weight_decay, "grad_clip": cfg.grad_clip}
    return InMemory(folder=cfg.out, names="nanogpt", model=config_of(cfg, vocab_size),
                    dtype=cfg.dtype, grad_dtype=cfg.dtype,
                    layout=layout, loss="mean",
                    optimizer=optimizer, balance=cfg.balance if cfg.experts else 0.0,
                    steps=steps, tensors=tensors, tokens=tokens)
