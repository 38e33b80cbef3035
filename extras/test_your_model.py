"""Models of your own under DDP, ZeRO-1, 2 and 3: what one process computes, or one line.

Each class below is a module as people write them, or a use of one, in the loop of your_model.py's
first lines: two replicas, three steps of two microbatches, float64, AdamW. Gradients and weights
equal one process's to 1e-10 in each stage, or, where `lines` says so, an error names the technique,
the parameter and what to do."""

import copy
import random
import re
import weakref
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from extras import your_model
from mesh import Mesh
from model import build
from sizes import GPTConfig
from tests.harness import HERE, ranks

STAGES = (your_model.DDP, your_model.ZeRO1, your_model.ZeRO2, your_model.ZeRO3)
RANKS, MICROBATCHES, STEPS = 2, 2, 3
WIDE, WORDS = 6, 7
FREED = "ZeRO-3: the weights of"  # how the lines begin
ELSEWHERE = ": the gradient of"
REPLACED = {stage: f"{name}: the memory of" for stage, name in enumerate(
    ["DDP", "ZeRO-1", "ZeRO-2"])} | {3: FREED}


class Kind(nn.Module):
    """lines: {stage: what its error says}. tolerance: 1e-10, in float64."""

    lines = {}
    tolerance = 1e-10

    def loss(self, ids, x, step, replica):
        """What the loop calls: the loss of a microbatch."""
        return self(ids, x, step, replica)

    def wrapped(self):
        """Called when the reducer was made; in one process at the same place."""

    def before_gradients(self, step):
        """Called after the backwards of a step. True: leave the rest of the step out."""

    def before_step(self, step):
        """Called when the optimizer's weights have their gradients. True: leave its step out."""

    def after(self, step):
        """Called after each step of the optimizer."""


# ---- modules ----


class Mlp(Kind):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, 9), nn.Linear(9, 3)

    def forward(self, ids, x, step, replica):
        return self.second(self.first(x).tanh()).square().mean()


class Layers(Kind):
    """Calls its layers in another order than it lists them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDE, WIDE) for _ in range(4)])

    def forward(self, ids, x, step, replica):
        for i in (2, 0, 3, 1):
            x = x + self.layers[i](x).tanh()
        return x.square().mean()


class Stack(Kind):
    """A Sequential."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, ids, x, step, replica):
        return self.head(self.layers(x)).square().mean()


class Tied(Kind):
    """The embedding is the head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDE, WIDE) for _ in range(2)])
        self.wte = nn.Embedding(WORDS, WIDE)
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids, x, step, replica):
        h = self.wte(ids)
        for block in self.blocks:
            h = h + block(h).tanh()
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.roll(1).flatten())


class Reused(Kind):
    """A layer runs three times."""

    def __init__(self):
        super().__init__()
        layer = nn.Linear(WIDE, WIDE)
        self.layers = nn.ModuleList([layer, nn.Linear(WIDE, WIDE), layer])

    def forward(self, ids, x, step, replica):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.layers[0](x).square().mean()


class Nested(Kind):
    """ModuleDict, ParameterList, ParameterDict; lists in a list; nanoGPT's names."""

    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList([torch.randn(WIDE) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDE, 2))})
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(WORDS, WIDE), "h": nn.ModuleList([nn.Linear(WIDE, WIDE)]),
            "lists": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList()])})
        self.lm_head = nn.Linear(2, WORDS, bias=False)

    def forward(self, ids, x, step, replica):
        h = self.transformer.wte(ids)
        for param in self.params:
            h = h * param
        h = self.transformer.lists[0][0](self.transformer.h[0](h) @ self.named["a"])
        return F.cross_entropy(self.lm_head(h).flatten(0, 1), ids.flatten())


class Structured(nn.Module):
    """Takes a keyword and a dict; returns a tuple with None, a number and a dict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x, *, scale, more):
        return (self.linear(x) * scale, None, 3), {"bias": more["bias"] + self.linear.bias}


class Structures(Kind):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Structured(), Structured()])

    def forward(self, ids, x, step, replica):
        for layer in self.layers:
            (x, _, _), more = layer(x, scale=x.mean() + 2, more={"bias": x.sum(0)})
            x = x + more["bias"]
        return x.square().mean()


class Frozen(Tied):
    """Fine-tuning: one of two blocks is trained, and no embedding."""

    def __init__(self):
        super().__init__()
        self.wte.weight.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class Unused(Mlp):
    def __init__(self):
        super().__init__()
        self.never = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(2, 2)])


class TwoHeads(Kind):
    """One of the heads is unused in every other step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(WIDE, WIDE)
        self.heads = nn.ModuleList([nn.Linear(WIDE, 2), nn.Linear(WIDE, 2)])

    def forward(self, ids, x, step, replica):
        return self.heads[step % 2](self.body(x)).square().mean()


class OneReplica(Kind):
    """Replica 0 alone uses one of the parameters, replica 1 another one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(WIDE, WIDE)
        self.first, self.second = (nn.Parameter(torch.randn(WIDE)) for _ in range(2))

    def forward(self, ids, x, step, replica):
        return (self.body(x) * (self.first, self.second)[replica]).square().mean()


class Scalars(Kind):
    """Parameters of 0 dims, of one element, of none; fewer elements than replicas."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.one, self.none = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0, 3))

    def forward(self, ids, x, step, replica):
        return (self.linear(x) * self.temperature * self.one).square().mean() + self.none.sum()


class Convolutions(Kind):
    """channels_last, BatchNorm's buffers, an activation in place, a residual."""

    def __init__(self):
        super().__init__()
        self.conv, self.more = (nn.Conv2d(n, 4, 3, padding=1, bias=False) for n in (3, 4))
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.to(memory_format=torch.channels_last)

    def forward(self, ids, x, step, replica):
        x = torch.outer(x.flatten(), x.flatten())[:12, :12].reshape(1, 3, 6, 8)
        x = self.norms[0](self.conv(x.to(memory_format=torch.channels_last))).relu_()
        return F.relu(x + self.norms[1](self.more(x)), inplace=True).square().mean()


class Transposed(Kind):
    """A weight and a gradient whose elements lie in another order."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, WIDE).t()), nn.Parameter(torch.ones(4))

    def forward(self, ids, x, step, replica):
        return (x @ self.weight).square().mean() + (self.bias.expand(3, 4) * 1.0).sum()


class Referred(Mlp):
    """Holds weak references to its parameters, and an attribute on one of them."""

    def __init__(self):
        super().__init__()
        self.seen = [weakref.ref(param) for param in self.parameters()]
        self.first.weight.factor = 3.0

    def forward(self, ids, x, step, replica):
        return self.seen[0]().factor * super().forward(ids, x, step, replica)


class TwoDtypes(Mlp):
    tolerance = 1e-5  # a part has 32 bits

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(3, 3, dtype=torch.float32)

    def double(self):
        self.first.double(), self.second.double()
        return self

    def forward(self, ids, x, step, replica):
        y = self.second(self.first(x).tanh())
        return (y * self.gate(y.float()).double()).square().mean()


class Autocast(Stack):
    tolerance = 1e-4  # products have 8 bits, and the layers' weights 32

    def double(self):
        return self

    def forward(self, ids, x, step, replica):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, x.float(), step, replica)


class Complex(Kind):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDE, WIDE)])
        self.phase = nn.Parameter(torch.randn(WIDE, dtype=torch.cdouble))

    def double(self):
        self.layers.double()
        return self

    def forward(self, ids, x, step, replica):
        return (torch.fft.fft(self.layers[0](x)) * self.phase).abs().square().mean()


class Transformer(Kind):
    """A class token; torch's own encoder, whose attention reads weights of a module inside."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(2, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids, x, step, replica):
        x = torch.cat([self.token.expand(3, -1, -1), self.patches(x.view(3, 3, 2))], 1)
        return self.encoder(x)[:, 0].square().mean()


class Attention(Kind):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.MultiheadAttention(WIDE, 2, bias=False, add_bias_kv=True)])

    def forward(self, ids, x, step, replica):
        y, weights = self.layers[0](x, x, x)
        return y.square().mean() + weights.square().mean()


class Lstm(Kind):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORDS, 4)
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, ids, x, step, replica):
        return self.lstm(self.wte(ids))[0].square().mean()


class Low(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDE, 2)), nn.Parameter(torch.randn(2, WIDE))

    def forward(self, weight):
        return weight + self.a @ self.b


class LoRA(Tied):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.requires_grad_(False)
            parametrize.register_parametrization(block, "weight", Low())


class WeightNorm(Kind):
    def __init__(self):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.Sequential(norm(nn.Linear(WIDE, 5)), nn.Tanh(), norm(nn.Linear(5, 5)))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 2))

    def forward(self, ids, x, step, replica):
        return self.last(self.layers(x)).square().mean()


class Sparse(Kind):
    """Embedding and EmbeddingBag with sparse gradients; one of them is indexed, never called."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDE, sparse=True)
        self.bag = nn.EmbeddingBag(WORDS, WIDE, sparse=True)
        self.indexed = nn.Embedding(WORDS, WIDE)
        self.layers = nn.ModuleList([nn.Linear(WIDE, 2)])

    def forward(self, ids, x, step, replica):
        h = self.wte(ids) + self.bag(ids)[:, None] + self.indexed.weight[ids]
        return self.layers[0](h).square().mean()


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x, depth):
        x = self.linear(x).tanh()
        return self(x, depth - 1) if depth else x


class Calls(Kind):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Recursive()])

    def forward(self, ids, x, step, replica):
        return self.layers[0](x, 3).square().mean()


class Checkpointed(Layers):
    """Activation checkpointing of one's own, with dropout, of one layer and of two."""

    reentrant = False

    def forward(self, ids, x, step, replica):
        def two(x):
            return self.layers[1](self.layers[2](x).tanh()).tanh()

        x = x.clone().requires_grad_()
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=self.reentrant)
            x = x + F.dropout(y.tanh(), 0.3)
        x = checkpoint(two, x, use_reentrant=self.reentrant)
        return self.layers[0](self.layers[1](x)).square().mean()


class Reentrant(Checkpointed):
    """torch's older checkpointing: a backward inside of the backward."""

    reentrant = True


class Dropped(Kind):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDE, 9), nn.Dropout(0.4),
                                    nn.Sequential(nn.Linear(9, 9), nn.Dropout(0.4), nn.GELU()))

    def forward(self, ids, x, step, replica):
        return self.layers(x).square().mean()


class Hooked(Tied):
    """Hooks on layers, on the model and on a parameter. Two of them read weights."""

    def __init__(self):
        super().__init__()
        self.blocks[0].register_forward_pre_hook(
            lambda layer, args: (args[0] * layer.weight.mean(),))
        self.blocks[1].register_forward_hook(lambda layer, args, out: out * layer.weight.mean())
        self.register_forward_pre_hook(
            lambda model, args: (args[0], args[1] * model.wte.weight.mean(), *args[2:]))
        self.register_forward_hook(lambda layer, args, out: out * 2)
        self.wte.weight.register_hook(lambda grad: 2 * grad)

    def forward(self, ids, x, step, replica):
        return super().forward(ids, x, step, replica) + x.square().mean()


class Returned(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x):
        return self.linear(x), self.linear.weight.t(), self.linear.bias[None]


class Returns(Kind):
    """A layer returns its weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Returned(), Returned()])

    def forward(self, ids, x, step, replica):
        for layer in self.layers:
            y, weight, bias = layer(x)
            x = (y @ weight + bias).tanh()
        return x.square().mean()


class Passed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE))

    def forward(self, x, other):
        return x @ (self.weight @ other)


class Passes(Kind):
    """A node of the graph has saved a weight of a layer and one of the model around it."""

    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.randn(WIDE, WIDE))
        self.layers = nn.ModuleList([Passed(), Passed()])

    def forward(self, ids, x, step, replica):
        for layer in self.layers:
            x = layer(x, self.other).tanh()
        return x.square().mean()


class DepthRandom(Layers):
    """Python's and numpy's random numbers decide in forward."""

    def forward(self, ids, x, step, replica):
        random.seed(10 * step + replica)
        np.random.seed(10 * step + replica)
        for layer in self.layers:
            keep = [random.random() > 0.5 for _ in range(3)] + list(np.random.rand(3) > 0.5)
            x = x + layer(x).tanh() * torch.tensor(keep, dtype=x.dtype)
        return x.square().mean()


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x, cache):
        cache.append(self.key(x))
        keys = torch.cat(cache)
        return x + (self.query(x) @ keys.t()).softmax(-1) @ keys


class Cached(Kind):
    """Layers that append to a cache; later ones read what earlier ones have put there."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Caching(), Caching()])

    def forward(self, ids, x, step, replica):
        cache = []
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x.square().mean() + cache[0].square().mean()


class AsksType(Kind):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)])

    def forward(self, ids, x, step, replica):
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.Linear) and type(layer.weight) is not int:
                x = x.tanh()
        return x.square().mean()


class PostAccumulate(Stack):
    """Hooks that run when a gradient is accumulated."""

    def __init__(self):
        super().__init__()
        self.seen = []
        for param in self.parameters():
            param.register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad.sum()))


class GradientPenalty(Stack):
    """WGAN-GP: a gradient by the input, and a backward through it."""

    def loss(self, ids, x, step, replica):
        x = x.requires_grad_()
        y = self(ids, x, step, replica)
        grad, = torch.autograd.grad(y, x, create_graph=True)
        return y + grad.square().sum()


class LogsGradients(Stack):
    """torch.autograd.grad() by the parameters, beside a backward."""

    lines = {3: FREED}

    def loss(self, ids, x, step, replica):
        y = self(ids, x, step, replica)
        torch.autograd.grad(y, [*self.parameters()], retain_graph=True)
        return y


class Evaluates(Stack):
    def after(self, step):
        with torch.inference_mode():
            self(*part_of(9, 0, 0))
        with torch.no_grad():
            self(*part_of(9, 0, 0))
        self.eval(), self.train()


class TwoForwards(Stack):
    """Two forwards, then one backward; a backward within the loss, and the graph is kept."""

    def loss(self, ids, x, step, replica):
        y = self(ids, x, step, replica) + self(ids, x + 1, step, replica)
        y.backward(retain_graph=True)
        return y


class BackwardHooks(Layers):
    """Hooks on the backward of modules."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.register_full_backward_hook(
                lambda layer, into, out: tuple(x if x is None else 2 * x for x in into))


class Offloads(Layers):
    """What autograd saves goes to the CPU: hooks around those of ZeRO-3."""

    def forward(self, *part):
        with torch.autograd.graph.save_on_cpu():
            return super().forward(*part)


class Functional(Stack):
    def loss(self, *part):
        return torch.func.functional_call(self, dict(self.named_parameters()), part)


class Method(Kind):
    """A method that is not forward, which calls modules."""

    def __init__(self):
        super().__init__()
        self.encoder, self.layers = nn.Linear(WIDE, 4), nn.ModuleList([nn.Linear(4, 2)])

    def loss(self, ids, x, step, replica):
        return self.layers[0](self.encoder(x).tanh()).square().mean()


class TwoNetworks(Kind):
    """A GAN in one module: the discriminator drops what the generator's loss has left in it."""

    def __init__(self):
        super().__init__()
        self.G, self.D = nn.Sequential(nn.Linear(WIDE, WIDE)), nn.Linear(WIDE, 1)

    def loss(self, ids, x, step, replica):
        return self.D(self.G(x).tanh()).square().mean() + self.D(x).sum()

    def before_gradients(self, step):
        if step != 1:
            self.D.zero_grad()


# ---- uses ----


class Penalty(Stack):
    """A penalty on all weights, in the loss."""

    lines = {3: FREED + " layers.0.weight are freed"}

    def loss(self, *part):
        return self(*part) + 0.1 * sum(param.square().sum() for param in self.parameters())


class Gain(nn.Linear):
    def __init__(self):
        super().__init__(WIDE, WIDE)
        self.gain, self.gate = nn.Parameter(torch.ones(2)), nn.Parameter(torch.tensor(0.5))


class ReadBeside(Kind):
    """A model that reads weights of a layer beside the call of the layer."""

    lines = {3: FREED + " layers.0.gain are freed"}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Gain(), Gain()])

    def forward(self, ids, x, step, replica):
        for layer in self.layers:
            x = (layer(x).unflatten(-1, (3, 2)) * layer.gain).flatten(-2).tanh()
        return x.square().mean()


class ReadScalar(ReadBeside):
    lines = {3: FREED + " layers.0.gate are freed"}

    def forward(self, ids, x, step, replica):
        for layer in self.layers:
            x = x + layer.gate * layer(x)
        return x.square().mean()


class MethodReads(Stack):
    """A method that is not forward, which reads weights."""

    lines = {3: FREED + " head.weight are freed"}

    def loss(self, ids, x, step, replica):
        return F.linear(self.layers(x), self.head.weight).square().mean()


class DropsStep(Stack):
    def before_gradients(self, step):
        if step == 1:
            self.zero_grad()
        return step == 1


class DropsZeros(Tied):
    def before_gradients(self, step):
        self.blocks.zero_grad(set_to_none=False)


class SkipsStep(Stack):
    def before_step(self, step):
        return step == 1


class Clips(Stack):
    """torch's clip_grad_norm_ on the model's own parameters, where every loop has it."""

    lines = {1: ELSEWHERE, 2: ELSEWHERE, 3: ELSEWHERE}

    def before_step(self, step):
        nn.utils.clip_grad_norm_(self.parameters(), 1e-3)


class ClipsEarly(Stack):
    lines = {stage: ELSEWHERE for stage in range(4)}

    def before_gradients(self, step):
        nn.utils.clip_grad_norm_(self.parameters(), 1e-3)


class Unfreezes(Stack):
    lines = {stage: "was frozen when the model was wrapped" for stage in range(4)}

    def __init__(self):
        super().__init__()
        self.layers.requires_grad_(False)

    def after(self, step):
        self.requires_grad_(True)


class UnfreezesLater(Stack):
    """Wrapped unfrozen, frozen for two steps."""

    def wrapped(self):
        self.layers.requires_grad_(False)

    def after(self, step):
        self.layers.requires_grad_(step > 0)


class Converts(Stack):
    lines = REPLACED

    def wrapped(self):
        self.float()

    def loss(self, ids, x, step, replica):
        return self(ids, x.float(), step, replica)


class Exchanges(Stack):
    lines = {**REPLACED, 3: "ZeRO-3: the memory of head.weight"}

    def wrapped(self):
        self.head.weight = nn.Parameter(torch.ones(2, 4).double())


class Averages(Stack):
    lines = {3: FREED}

    def after(self, step):
        part = part_of(9, 0, 0)
        assert torch.equal(copy.deepcopy(self)(*part), self(*part))


class Saves(Stack):
    lines = {3: "reducer.whole() has all weights, for state_dict()"}

    def after(self, step):
        self.load_state_dict(self.state_dict())


class Loads(Stack):
    lines = {3: FREED}

    def after(self, step):
        self.load_state_dict({name: torch.ones(param.shape).double()
                              for name, param in self.named_parameters()})


class Clamps(Stack):
    """WGAN's clipping of weights."""

    lines = {3: FREED}

    def after(self, step):
        for param in self.parameters():
            param.data.clamp_(-0.1, 0.1)


class Flattens(Stack):
    lines = REPLACED

    def after(self, step):
        vector = nn.utils.parameters_to_vector(self.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, self.parameters())


class Norms(Stack):
    lines = {3: FREED}

    def after(self, step):
        sum(param.norm() for param in self.parameters())


class Initializes(Stack):
    lines = {3: FREED}

    def after(self, step):
        nn.init.ones_(self.head.weight)


class OtherLayers(Kind):
    """Each replica runs a layer of its own."""

    lines = {3: "ZeRO-3: replica"}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDE, WIDE) for _ in range(2)])

    def forward(self, ids, x, step, replica):
        return self.layers[replica](x).square().mean()


class Renormalizes(Kind):
    """An Embedding that changes its weights in forward."""

    lines = {stage: "wte changes its weights in forward" for stage in range(4)}

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDE, max_norm=1.0)

    def forward(self, ids, x, step, replica):
        return self.wte(ids).square().mean()


class OtherOrder(OtherLayers):
    def forward(self, ids, x, step, replica):
        first, second = self.layers[::-1] if replica else self.layers
        return second(first(x)).square().mean()


class Fails(Tied):
    """A forward and a backward that fail, and the loop goes on."""

    def loss(self, ids, x, step, replica):
        with pytest.raises(IndexError):
            self(ids + WORDS, x, step, replica)
        handle = self.blocks[1].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (0 * self(ids, x, step, replica)).backward()
        handle.remove()
        return self(ids, x, step, replica)


class Compiled(Stack):
    def wrapped(self):
        self.compile(backend="aot_eager")


MODULES = [Mlp, Layers, Stack, Tied, Reused, Nested, Structures, Frozen, Unused, TwoHeads,
           OneReplica, Scalars, Convolutions, Transposed, Referred, TwoDtypes, Autocast, Complex,
           Transformer, Attention, Lstm, LoRA, WeightNorm, Sparse, Calls, Checkpointed, Reentrant,
           Dropped, Hooked, Returns, Passes, DepthRandom, Cached, AsksType, PostAccumulate,
           GradientPenalty, LogsGradients, Evaluates, TwoForwards, BackwardHooks, Offloads,
           Functional, Method, TwoNetworks]
USES = [Penalty, ReadBeside, ReadScalar, MethodReads, DropsStep, DropsZeros, SkipsStep, Clips,
        ClipsEarly, Unfreezes, UnfreezesLater, Converts, Exchanges, Averages, Saves, Loads, Clamps,
        Flattens, Norms, Initializes, Renormalizes, OtherLayers, OtherOrder, Fails, Compiled]


# ---- one process, and two ranks ----


def make(kind, seed=0):
    torch.manual_seed(seed)
    return kind().double()


def part_of(step, replica, k):
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + k)
    return (torch.randint(WORDS, (3, 5), generator=generator),
            torch.randn(3, WIDE, generator=generator, dtype=torch.double), step, replica)


def backward(model, step, replica, D=RANKS):
    """The microbatches of a replica; a sum over all of these is the mean loss."""
    for k in range(MICROBATCHES):
        torch.manual_seed(1000 + 100 * step + 10 * replica + k)  # of dropout
        (model.loss(*part_of(step, replica, k)) / (D * MICROBATCHES)).backward()


def copy_of(named):
    return {name: tensor.detach().clone() for name, tensor in named}


def one_process(kind, D=RANKS):
    """[{name: gradient} of each step], {name: weights}, {name: buffer} of each replica, which keeps
    buffers of its own."""
    model = make(kind)
    model.wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    buffers = [copy_of(model.named_buffers()) for _ in range(D)]
    grads = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(D):
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[replica][name])
            backward(model, step, replica, D)
            buffers[replica] = copy_of(model.named_buffers())
        if model.before_gradients(step):
            grads.append({})
            continue
        for param in model.parameters():
            param.grad = None if param.grad is None else param.grad.to_dense()
        grads.append({name: None if param.grad is None else param.grad.clone()
                      for name, param in model.named_parameters()})
        if not model.before_step(step):
            optimizer.step()
        model.after(step)
    return grads, copy_of(model.named_parameters()), buffers


def deviation(got, want):
    """Relative; nan where one of them is."""
    return 0.0 if want.numel() == 0 else ((got - want).norm() / (want.norm() + 1e-30)).item()


def train(rank, kind, stage, mesh, want_grads, want_weights, want_buffers):
    """The largest deviation of a gradient, a weight or a buffer from one process's."""
    model = make(kind, seed=rank)  # the reducer gives every replica the values of replica 0
    reducer = STAGES[stage](model, mesh)
    model.wrapped()
    optimizer = torch.optim.AdamW(reducer.weights, lr=0.01, weight_decay=0.1)
    worst = [0.0]
    for step in range(STEPS):
        backward(model, step, rank, mesh.world.size)
        if model.before_gradients(step):
            continue
        grads = reducer.gradients()
        for weights, grad, tag, start in zip(reducer.weights, grads, reducer.tags, reducer.starts,
                                             strict=True):
            weights.grad = grad
            want = want_grads[step][tag.name]
            assert (grad is None) == (want is None), f"step {step}: {tag.name}"
            if grad is not None:
                want = want.flatten()[start : start + weights.numel()]
                worst.append(deviation(grad.flatten().as_subclass(torch.Tensor), want))
        if not model.before_step(step):
            optimizer.step()
            reducer.publish()
        model.after(step)
    if stage < 3:  # each replica's own model has the new weights, without a forward
        worst += [deviation(param.detach(), want_weights[name])
                  for name, param in model.named_parameters()]
    worst += [deviation(whole, want_weights[tag.name]) for tag, whole in reducer.whole()]
    worst += [deviation(buffer.double(), want_buffers[rank][name].double())
              for name, buffer in model.named_buffers()]
    return max(worst) if all(x == x for x in worst) else float("nan")


def cells(rank, kind, D=RANKS):
    """[deviation, or the text of the error] of the four stages."""
    want = one_process(kind, D)
    found = []
    mesh = Mesh(dp=D, timeout=20)
    for stage in range(4):
        try:
            found.append(train(rank, kind, stage, mesh, *want))
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    return found


@pytest.mark.parametrize("kind", MODULES + USES, ids=lambda kind: kind.__name__)
def test_a_module_equals_one_process_or_is_refused_in_one_line(kind):
    for found in ranks(RANKS, cells, kind):
        for stage, cell in enumerate(found):
            if stage in kind.lines:
                assert kind.lines[stage] in str(cell), found
            else:
                assert isinstance(cell, float) and cell < kind.tolerance, found


@pytest.mark.parametrize("kind", [Scalars, LoRA, Checkpointed, GradientPenalty])
def test_three_replicas_equal_one_process(kind):
    """Parameters have fewer elements than there are replicas, or as many as 3 does not divide."""
    for found in ranks(3, cells, kind, 3):
        assert all(cell < 1e-10 for cell in found), found


# ---- what is done wrong: an error at its place ----


def in_step(model, reducer, optimizer, rank):
    """One step of the loop."""
    backward(model, 0, rank)
    for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
        weights.grad = grad
    optimizer.step()
    reducer.publish()


def never_publishes(model, reducer, optimizer, rank):
    for _ in range(2):
        backward(model, 0, rank)
        for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
            weights.grad = grad
        optimizer.step()


def forgets_the_gradients(model, reducer, optimizer, rank):
    backward(model, 0, rank)
    optimizer.step()
    reducer.publish()


def evaluates_before_publishing(model, reducer, optimizer, rank):
    backward(model, 0, rank)
    for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
        weights.grad = grad
    optimizer.step()
    with torch.no_grad():
        model(*part_of(0, 0, 0))


def steps_the_models_parameters(model, reducer, optimizer, rank):
    in_step(model, reducer, torch.optim.AdamW(model.parameters()), rank)


def clips_pieces(model, reducer, optimizer, rank):
    backward(model, 0, rank)
    for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
        weights.grad = grad
    nn.utils.clip_grad_norm_(reducer.weights, 1.0)


def reads_a_gradient(model, reducer, optimizer, rank):
    backward(model, 0, rank)
    model.head.weight.grad.abs().max()


def steps_alone(model, reducer, optimizer, rank):
    backward(model, 0, rank)
    for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
        weights.grad = grad
    if rank == 0:
        optimizer.step()
    reducer.publish()


def runs_one_more_backward(model, reducer, optimizer, rank):
    if rank:
        backward(model, 0, rank)
    in_step(model, reducer, optimizer, rank)


def drops_alone(model, reducer, optimizer, rank):
    backward(model, 0, rank)
    if rank:
        model.zero_grad()
    reducer.gradients()


def wraps_twice(model, reducer, optimizer, rank):
    type(reducer)(model, Mesh(dp=RANKS, timeout=20))


def has_another_model(model, reducer, optimizer, rank):
    type(reducer)(nn.Linear(2, 2 + rank), Mesh(dp=RANKS, timeout=20))


def steps_before_backward(model, reducer, optimizer, rank):
    loss = model.loss(*part_of(0, rank, 0))
    in_step(model, reducer, optimizer, rank)
    loss.backward()


def changes_what_was_saved(model, reducer, optimizer, rank):
    x = model.layers(part_of(0, rank, 0)[1])
    y = model.head(x)
    x.detach().add_(1)
    y.sum().backward()


WRONG = [  # (what is done, the stages in which that is wrong, what the error says)
    (never_publishes, (1, 2), "but not published: call reducer.publish"),
    (evaluates_before_publishing, (1, 2), "but not published: call reducer.publish"),
    (forgets_the_gradients, (0, 1, 2, 3), "reducer.gradients"),
    (steps_the_models_parameters, (1, 2, 3), "ZeRO"),
    (clips_pieces, (1, 2, 3), "ZeRO: a replica has pieces of gradients"),
    (reads_a_gradient, (0, 1, 2, 3), ELSEWHERE + " head.weight is in the reducer"),
    (steps_alone, (0, 1, 2, 3), "publish.., weights stepped: "),
    (runs_one_more_backward, (0, 1, 2, 3), "elsewhere: all have the same model"),
    (drops_alone, (2, 3), "drop gradients"),
    (wraps_twice, (0, 1, 2, 3), "is in a model that was wrapped before"),
    (has_another_model, (0, 1, 2, 3), "is at the start, with model"),
    (steps_before_backward, (0, 1, 2, 3), "between a forward and its backward|inplace operation"),
    (changes_what_was_saved, (0, 1, 2, 3), "inplace operation"),
]


def errors(rank, function):
    """The text of the error in each of the four stages; "": there is none."""
    found = []
    mesh = Mesh(dp=RANKS, timeout=20)
    for stage in range(4):
        model = make(Stack)
        reducer = STAGES[stage](model, mesh)
        optimizer = torch.optim.SGD(reducer.weights, lr=0.1)
        try:
            function(model, reducer, optimizer, rank)
            found.append("")
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
        dist.barrier()
    return found


@pytest.mark.parametrize("function,stages,line", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_is_one_line(function, stages, line):
    for found in ranks(RANKS, errors, function):
        for stage, text in enumerate(found):
            wrong = stage in stages
            assert bool(text) == wrong and (not wrong or re.search(line, text)), found
            assert "\n" not in text


# ---- clipping, two networks, bytes ----


def clipped(rank, stage):
    """Deviations of the norm, and of the weights after a step."""
    model, alone = make(Mlp, rank), make(Mlp)
    reducer = STAGES[stage](model, Mesh(dp=RANKS))
    backward(model, 0, rank)
    for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
        weights.grad = grad
    norm = reducer.clip_grad_norm_(1e-3)
    torch.optim.SGD(reducer.weights, lr=1.0).step()
    reducer.publish()
    for replica in range(RANKS):
        backward(alone, 0, replica)
    want = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    want_weights = dict(alone.named_parameters())
    return [deviation(norm, want)] + [deviation(whole, want_weights[tag.name])
                                      for tag, whole in reducer.whole()]


@pytest.mark.parametrize("stage", range(4))
def test_the_norm_and_what_it_clips_are_those_of_one_process(stage):
    assert max(map(max, ranks(RANKS, clipped, stage))) < 1e-10


def resumed(rank, stage):
    """Deviations of weights after four steps from those of a run that was saved after two: weights
    by whole(), and each rank its own optimizer's state."""
    def begin(weights=None, state=None):
        model = make(Stack)
        model.load_state_dict(weights or model.state_dict())
        reducer = STAGES[stage](model, Mesh(dp=RANKS))
        optimizer = torch.optim.AdamW(reducer.weights, lr=0.1)
        optimizer.load_state_dict(state or optimizer.state_dict())
        return model, reducer, optimizer, rank

    def whole(reducer):
        return {tag.name: whole for tag, whole in reducer.whole()}

    run = begin()
    in_step(*run), in_step(*run)
    again = begin(whole(run[1]), copy.deepcopy(run[2].state_dict()))
    for one in (run, again):
        in_step(*one), in_step(*one)
    want = whole(run[1])
    return [deviation(got, want[name]) for name, got in whole(again[1]).items()]


@pytest.mark.parametrize("stage", range(4))
def test_a_run_resumes_from_whole_weights_and_each_ranks_own_moments(stage):
    assert max(map(max, ranks(RANKS, resumed, stage))) < 1e-10


def two_networks(rank, stage):
    """A GAN of two networks, each with a reducer, in the usual loop; and in one process."""
    def networks():
        torch.manual_seed(0)
        return nn.Linear(WIDE, WIDE).double(), nn.Sequential(nn.Linear(WIDE, 1)).double()

    def run(G, D, replicas, weights_of, sums, publish):
        of_G, of_D = (torch.optim.AdamW(weights_of(net), lr=0.1) for net in (G, D))
        for step in range(STEPS):
            D.zero_grad()
            for replica in replicas:
                x = part_of(step, replica, 0)[1]
                ((D(x) - 1).square() + D(G(x).detach()).square()).mean().div(RANKS).backward()
            sums(D), of_D.step(), publish(D)
            G.zero_grad()
            D.requires_grad_(step < 2)
            for replica in replicas:
                x = part_of(step, replica, 0)[1]
                (D(G(x)) - 1).square().mean().div(RANKS).backward()
            sums(G), of_G.step(), publish(G)
            D.requires_grad_(True)

    def nothing(net):
        pass

    def sums(net):
        for weights, grad in zip(reducers[net].weights, reducers[net].gradients(), strict=True):
            weights.grad = grad

    alone, pair, mesh = networks(), networks(), Mesh(dp=RANKS)
    reducers = {net: STAGES[stage](net, mesh) for net in pair}
    run(*alone, range(RANKS), lambda net: net.parameters(), nothing, nothing)
    run(*pair, [rank], lambda net: reducers[net].weights, sums, lambda net: reducers[net].publish())
    return [deviation(whole, dict(want.named_parameters())[tag.name])
            for want, net in zip(alone, pair, strict=True) for tag, whole in reducers[net].whole()]


@pytest.mark.parametrize("stage", range(4))
def test_a_gan_of_two_networks_equals_one_process(stage):
    assert max(map(max, ranks(RANKS, two_networks, stage))) < 1e-10


def held_and_sent(rank):
    """(most Flats that are whole at a time, bytes of weights between steps, elements of gathers and
    of reductions, elements of the model) of a step under ZeRO-3."""
    model, mesh = make(Layers), Mesh(dp=RANKS)
    reducer = your_model.ZeRO3(model, mesh)
    psi = sum(param.numel() for param in model.parameters())
    most = []
    gather = reducer.make_whole

    def watched(flat):
        gather(flat)
        most.append(len(reducer.gathers))

    reducer.make_whole = watched
    before = [mesh.groups[name].bytes_sent for name in ("shard", "dp")]
    model.loss(*part_of(0, rank, 0)).backward()
    gathers, sums = (mesh.groups[name].bytes_sent - sent
                     for name, sent in zip(("shard", "dp"), before, strict=True))
    held = sum(param.untyped_storage().nbytes() for param in model.parameters())
    return max(most), held, gathers / 8, sums / 8, psi


def seen_by_hooks_around(rank):
    """The shapes of what hooks around the model get to save: in one process, under ZeRO-3."""
    model, shapes = make(Layers), []

    def pack(tensor):
        shapes[-1].append(tuple(tensor.shape))
        return tensor.detach()

    for wrap in (lambda: None, lambda: your_model.ZeRO3(model, Mesh(dp=RANKS))):
        wrap()
        shapes.append([])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.loss(*part_of(0, rank, 0))
    return shapes


def test_hooks_around_zero3s_such_as_checkpoints_get_all_but_the_weights():
    for alone, got in ranks(RANKS, seen_by_hooks_around):
        assert got == [shape for shape in alone if shape != (WIDE, WIDE)]
        assert len(got) >= 8


def test_zero3_has_one_layer_whole_at_a_time_and_sends_three_times_the_model():
    for most, held, gathers, sums, psi in ranks(RANKS, held_and_sent):
        assert most == 1 and held == 0
        # In forward and backward. The first of the four layers that run reads no weights in
        # backward, because its input needs no gradient. And a number with each message
        assert psi / 2 * 7 / 4 <= gathers <= psi / 2 * 7 / 4 + 10
        assert sums == psi / 2


# ---- Stanford CS336, assignment 2: its adapters ----


def replicas_mean(reducer):
    """The assignment averages."""
    for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
        weights.grad = None if grad is None else grad / dist.get_world_size()


class Replicated(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.reducer = your_model.DDP(module, Mesh(dp=dist.get_world_size()))

    def forward(self, *inputs):
        return self.module(*inputs)


def get_ddp_individual_parameters(module):
    return Replicated(module)


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    replicas_mean(ddp_model.reducer)


def get_sharded_optimizer(params, optimizer_class, **options):
    reducer = your_model.ZeRO1(nn.ParameterList(params), Mesh(dp=dist.get_world_size()))

    class Sharded(optimizer_class):
        def step(self):
            replicas_mean(reducer)
            super().step()
            reducer.publish()

    return Sharded(reducer.weights, **options)


def cs336(rank, what):
    """As the assignment's tests use its adapters: another seed on each rank, the mean of losses."""
    want, model = make(Tied), make(Tied, 0 if what == "sharded" else rank)
    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    reference = torch.optim.AdamW(want.parameters(), **options)
    if what == "sharded":
        net, optimizer = model, get_sharded_optimizer(model.parameters(), torch.optim.AdamW,
                                                      **options)
    else:
        net = get_ddp_individual_parameters(model)
        optimizer = torch.optim.AdamW(net.parameters(), **options)
    for step in range(5):
        optimizer.zero_grad(), reference.zero_grad()
        net(*part_of(step, rank, 0)).backward()
        if what == "ddp":
            ddp_individual_parameters_on_after_backward(net, optimizer)
        optimizer.step()
        for replica in range(RANKS):
            (want(*part_of(step, replica, 0)) / RANKS).backward()
        reference.step()
    return [deviation(param.detach(), wanted) for param, wanted in
            zip(model.parameters(), want.parameters(), strict=True)]


@pytest.mark.parametrize("what", ["ddp", "sharded"])
def test_the_adapters_of_cs336_train_like_one_process(what):
    assert max(map(max, ranks(RANKS, cs336, what))) < 1e-10


# ---- nanoGPT's loop, and what changes in it ----

LOOP = """
model = make_model()
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1},
                               {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95))
for step in range(3):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (step + 1)
    for micro_step in range(4):
        x, y = get_batch(step, micro_step)
        loss = model(x, y) / y.numel() / 4
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        losses.append(model(*get_batch(9, 0)).item())
checkpoint = {"model": dict(model.named_parameters())}
"""
CHANGES = [
    ("model = make_model()\n", "model = make_model()\nmesh = Mesh(dp=2)\n"
                               "reducer = Reducer(model, mesh)\n"
                               "tagged = list(zip(reducer.weights, reducer.tags))\n"),
    ("[p for p in model.parameters() if p.dim() >= 2]",
     "[p for p, tag in tagged if len(tag.shape) >= 2]"),
    ("[p for p in model.parameters() if p.dim() < 2]",
     "[p for p, tag in tagged if len(tag.shape) < 2]"),
    ("for micro_step in range(4)", "for micro_step in range(mesh.rank, 4, 2)"),
    ("    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
     "    for weights, grad in zip(reducer.weights, reducer.gradients()):\n"
     "        weights.grad = grad\n    reducer.clip_grad_norm_(0.1)\n"),
    ("    optimizer.step()\n", "    optimizer.step()\n    reducer.publish()\n"),
    ("dict(model.named_parameters())", "{tag.name: whole for tag, whole in reducer.whole()}"),
]


def nanogpt(rank, stage):
    """Deviations of the losses and of the checkpoint from those of one process."""
    def get_batch(step, micro_step):
        generator = torch.Generator().manual_seed(10 * step + micro_step)
        ids = torch.randint(WORDS, (2, 9), generator=generator)
        return ids[:, :-1], ids[:, 1:]

    def run(code, **names):
        names |= {"torch": torch, "get_batch": get_batch, "losses": [], "make_model": lambda: build(
            GPTConfig(WORDS, block_size=8, n_layer=2, n_head=2, n_embd=8), dtype=torch.double)}
        exec(code, names)
        return names["losses"], names["checkpoint"]["model"]

    code = LOOP
    for old, new in CHANGES:
        assert old in code
        code = code.replace(old, new)
    want_losses, want = run(LOOP)
    losses, got = run(code, Mesh=Mesh, Reducer=STAGES[stage])
    return [deviation(torch.tensor(losses), torch.tensor(want_losses)),
            *(deviation(got[name], want[name].detach()) for name in got)]


@pytest.mark.parametrize("stage", range(4))
def test_nanogpts_loop_with_a_dozen_new_lines_is_that_of_one_process(stage):
    assert sum(old.count("\n") or 1 for old, _ in CHANGES) <= 7
    assert sum(new.count("\n") or 1 for _, new in CHANGES) <= 13
    # (the biases of keys have gradients of rounding errors, which AdamW makes steps of)
    assert max(map(max, ranks(RANKS, nanogpt, stage))) < 1e-9


def loop_of_page(rank, name):
    """Deviations of the weights that the loop of docs/your-model.md trains, under this class."""
    def batches(replica):
        return [(part_of(step, replica, 0)[1], None) for step in range(STEPS)]

    def net(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    page = (HERE / "docs/your-model.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1].replace("ZeRO3", name)
    names = {"make_model": lambda: net(rank), "batches": batches,
             "loss_of": lambda out, y: out.square().mean()}
    with patch("torch.distributed.init_process_group"):
        exec(code, names)
    alone = net(0)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    for parts in zip(*map(batches, range(RANKS)), strict=True):
        optimizer.zero_grad()
        sum(alone(x).square().mean() / RANKS for x, _ in parts).backward()
        optimizer.step()
    want = dict(alone.named_parameters())
    return [deviation(whole, want[tag.name]) for tag, whole in names["reducer"].whole()]


@pytest.mark.parametrize("name", ["ZeRO3", "ZeRO2", "ZeRO1", "DDP"])
def test_the_loop_of_the_page_trains(name):
    assert max(map(max, ranks(RANKS, loop_of_page, name))) < 1e-10
