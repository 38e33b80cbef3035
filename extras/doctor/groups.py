"""A parameter's place in the model, told from its name; groups of parameters.

A bug often touches one group, such as the gradients of LayerNorms, all those before block 2, or
those of experts.
"""

import math
import re

from extras.doctor.finding import first_of
from extras.doctor.step import EMBEDDING
from schedules import cut, placement

# ---- one parameter ----


def is_replicated(name):
    """Do all tensor ranks hold the whole parameter?"""
    if ".experts." in name:  # whole experts are spread over the tensor ranks
        return False
    return ".ln_" in name or "wpe" in name or name.endswith("c_proj.bias") or ".router." in name


def block_of(name):
    """The number of a parameter's block; -1 for the embeddings, infinite for the final norm and the
    head. Names may be another trainer's."""
    number = re.search(r"\.(\d+)\.", name)  # transformer.h.0.ln_1.weight
    if number:
        return int(number[1])
    return -1 if re.search(r"\b(wte|wpe|\w*embed\w*)\b", name) else math.inf


def layer_number(name, n_layer):
    """The number of a parameter's layer: 0 the embedding, n_layer + 1 the head."""
    return min(block_of(name), n_layer) + 1


def cut_by_layout(config, layout):
    """Numbers of the layers that begin a pipeline stage, without stage 0's: [2, 4] for stages of
    layers 0 1, 2 3 and 4 5. Cut like in train.py."""
    n_stages = len(placement(layout["schedule"], layout["pp"], layout["chunks"]))
    return [start for start, _ in cut(config.layer_costs(), n_stages)[1:]]


# ---- groups ----


def replicated_without(*parts):
    """A function for GROUPS: is a parameter replicated, and is none of the parts in its name?"""
    return lambda name: is_replicated(name) and not any(part in name for part in parts)


GROUPS = {  # words -> is a parameter of that name in the group?
    "all gradients": lambda name: True,
    "the gradients of LayerNorms, row biases and positions": replicated_without(".router."),
    "the gradients of LayerNorms and row biases": replicated_without(".router.", "wpe"),
    "the gradients of LayerNorms, row biases, positions and routers": is_replicated,
    "the gradients of LayerNorms, row biases and routers": replicated_without("wpe"),
    "the gradients of LayerNorms": lambda name: ".ln_" in name,
    "the gradients of the norms of queries and keys": (
        lambda name: ".ln_q." in name or ".ln_k." in name),
    "the gradients of the rows' biases": (
        lambda name: is_replicated(name) and name.endswith("c_proj.bias")),
    "the gradients of biases": lambda name: name.endswith("bias"),
    "the gradients of matrices": lambda name: name.endswith("weight") and ".ln_" not in name,
    "the gradients of tensors that are split over tp": lambda name: not is_replicated(name),
    "the gradient of the positions": lambda name: "wpe" in name,
    "the gradient of the embedding": lambda name: name == EMBEDDING,
    "the gradients of experts": lambda name: ".experts." in name,
    "the gradients of routers": lambda name: ".router." in name,
    "the gradients of all but experts": lambda name: ".experts." not in name}


def groups_by_block(names):
    """Like GROUPS: the gradients before each block, from it on, and in it."""
    blocks = sorted({block_of(name) for name in names} - {-1, math.inf})
    found = {}
    for i in blocks:
        found[f"the gradients before block {i}"] = lambda name, i=i: block_of(name) < i
        found[f"the gradients from block {i} on"] = lambda name, i=i: block_of(name) >= i
        found[f"the gradients of block {i}"] = lambda name, i=i: block_of(name) == i
    found["the gradients before the head"] = lambda name: block_of(name) < len(blocks)
    return found


def group_words(wrong, names, fits):
    """Words for the smallest group that has all wrong names and whose members all fit; without such
    a group, a list of the wrong names. names: those of all tensors. fits(name): does the cause give
    MINE's tensor? True for each wrong name."""
    sizes = {}  # words -> number of members
    for words, has in (GROUPS | groups_by_block(names)).items():
        members = [name for name in names if has(name)]
        if members and wrong <= set(members) and all(map(fits, members)):
            sizes[words] = len(members)
    if sizes:
        return min(sizes, key=sizes.get)
    return f"the gradients of {first_of(wrong)}"
