"""torch.compile of a layer. Two kinds of methods stay Python: those that send messages, and those
that make tensors whose sizes depend on the data.

    torchrun train.py --compile
"""

import torch

from engine.tensor_parallel import Column, Row
from engine.vocabulary_parallel import ChunkedHead, VocabularyEmbedding
from experts import MixtureOfExperts
from model import Attention

# class -> its methods that stay Python. A new layer that sends messages belongs here
UNCOMPILED = {Column: ["forward"], Row: ["forward"], VocabularyEmbedding: ["forward"],
              ChunkedHead: ["loss", "share"], MixtureOfExperts: ["run_experts", "sum_counts"]}
# class -> its methods, called by an uncompiled one, that are compiled by themselves
COMPILED = {ChunkedHead: ["log_likelihood"]}


def compile_layer(layer):
    for module in layer.modules():
        names = UNCOMPILED.get(type(module), [])
        if isinstance(module, Attention) and "attend" in vars(module):
            names = ["attend"]  # replaced in split_sequences: sends keys and values
        for name in names:
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
        for name in COMPILED.get(type(module), []):
            setattr(module, name, torch.compile(getattr(module, name)))
    layer.forward = torch.compile(layer.forward)
