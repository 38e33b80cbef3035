"""Where in the model a parameter stands, and groups of parameters that have a name."""

import math
import re

from run.doctor.step import EMBEDDING
from schedules import cut, placement


def is_replicated(name):
    """Do all tensor ranks hold the whole parameter?"""
    return ".ln_" in name or "wpe" in name or name.endswith("c_proj.bias") or ".router." in name


def block_of(name):
    """The number of a parameter's block; -1 for the embedding, infinite for what follows."""
    number = re.search(r"\.(\d+)\.", name)  # transformer.h.0.ln_1.weight
    if number:
        return int(number[1])
    return -1 if re.search(r"\b(wte|wpe|\w*embed\w*)\b", name) else math.inf


def layer_number(name, n_layer):
    """The number of a parameter's layer: 0 the embedding, n_layer + 1 the head."""
    return min(block_of(name), n_layer) + 1


def cut_by_layout(config, layout):
    """The layers before which a boundary of the pipeline lies, as train.py cuts it."""
    stages = len(placement(layout["schedule"], layout["pp"], layout["chunks"]))
    return [start for start, _ in cut(config.layer_costs(), stages)[1:]]


def group_words(wrong, tensors, fits):
    """Words for the set of tensors that a share explains. wrong: those that differ; fits(name):
    does the share give MINE's tensor? None: no group that has a name."""
    groups = {
        "all gradients": lambda name: True,  # (or all that the cause can change)
        "the gradients of LayerNorms, row biases and positions": lambda name: is_replicated(name),
        "the gradients of LayerNorms and row biases":
            lambda name: is_replicated(name) and "wpe" not in name,
        "the gradients of LayerNorms": lambda name: ".ln_" in name,
        "the gradients of the rows' biases": lambda name: name.endswith("c_proj.bias"),
        "the gradients of biases": lambda name: name.endswith("bias"),
        "the gradients of matrices": lambda name: name.endswith("weight") and ".ln_" not in name,
        "the gradients of tensors that are split over tp": lambda name: not is_replicated(name),
        "the gradient of the positions": lambda name: "wpe" in name,
        "the gradient of the embedding": lambda name: name == EMBEDDING,
        "the gradients of experts": lambda name: ".experts." in name,
        "the gradients of routers": lambda name: ".router." in name,
        "the gradients of all but experts": lambda name: ".experts." not in name,
    }
    blocks = sorted({block_of(name) for name in tensors} - {-1, math.inf})
    for i in blocks:
        groups[f"the gradients before block {i}"] = lambda name, i=i: block_of(name) < i
        groups[f"the gradients from block {i} on"] = lambda name, i=i: block_of(name) >= i
        groups[f"the gradients of block {i}"] = lambda name, i=i: block_of(name) == i
    groups["the gradients before the head"] = lambda name: block_of(name) < len(blocks)
    fitting = {}  # words -> number of members
    for words, has in groups.items():
        members = [name for name in tensors if has(name)]
        if members and wrong <= set(members) and all(map(fits, members)):
            fitting[words] = len(members)
    if fitting:
        return min(fitting, key=fitting.get)
    if all(map(fits, wrong)):
        names = sorted(wrong)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"the gradients of {', '.join(names[:3])}{more}"
    return None
