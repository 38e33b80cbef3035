"""Models of your own under DDP, ZeRO-1, 2 and 3: what one process computes, or one line.

Each class below is a module as people write them, or a use of one, in the loop of your_model.py's
first lines: two replicas, three steps of two microbatches, float64, AdamW. Gradients and weights
equal one process's to 1e-10 in each stage, or, where `lines` says so, an error names the technique,
the parameter and what to do."""

import copy
import random
import weakref

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
from tests.harness import ranks

STAGES = (your_model.DDP, your_model.ZeRO1, your_model.ZeRO2, your_model.ZeRO3)
RANKS, MICROBATCHES, STEPS = 2, 2, 3
WIDE, WORDS = 6, 7


class Kind(nn.Module):
    """lines: {stage: what its error says}. tolerance: 1e-10, in float64."""

    lines = {}
    tolerance = 1e-10

    def loss(self, ids, x, step, replica):
        """What the loop calls: the loss of a microbatch."""
        return self(ids, x, step, replica)

    def wrapped(self):
        """Called when the reducer was made; in one process at the same place."""

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
            param.register_post_accumulate_grad_hook(lambda param: self.seen.append(param.grad.sum()))


class GradientPenalty(Stack):
    """WGAN-GP: a gradient by the input, and a backward through it."""

    def loss(self, ids, x, step, replica):
        x = x.requires_grad_()
        y = self(ids, x, step, replica)
        grad, = torch.autograd.grad(y, x, create_graph=True)
        return y + grad.square().sum()


class LogsGradients(Stack):
    """torch.autograd.grad() by the parameters, beside a backward."""

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


MODULES = [Mlp, Layers, Stack, Tied, Reused, Nested, Structures, Frozen, Unused, TwoHeads,
           OneReplica, Scalars, Convolutions, Transposed, Referred, TwoDtypes, Autocast, Complex,
           Transformer, Attention, Lstm, LoRA, WeightNorm, Sparse, Calls, Checkpointed, Reentrant,
           Dropped, Hooked, Returns, DepthRandom, Cached, AsksType, PostAccumulate,
           GradientPenalty, LogsGradients, Evaluates]


# ---- one process, and two ranks ----


def make(kind, seed=0):
    torch.manual_seed(seed)
    return kind().double()


def part_of(step, replica, k):
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + k)
    return (torch.randint(WORDS, (3, 5), generator=generator),
            torch.randn(3, WIDE, generator=generator, dtype=torch.double), step, replica)


def backward(model, step, replica):
    """The microbatches of a replica; a sum over all of these is the mean loss."""
    for k in range(MICROBATCHES):
        torch.manual_seed(1000 + 100 * step + 10 * replica + k)  # of dropout
        (model.loss(*part_of(step, replica, k)) / (RANKS * MICROBATCHES)).backward()


def copy_of(named):
    return {name: tensor.detach().clone() for name, tensor in named}


def one_process(kind):
    """[{name: gradient} of each step], {name: weights}, {name: buffer} of each replica, which keeps
    buffers of its own."""
    model = make(kind)
    model.wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    buffers = [copy_of(model.named_buffers()) for _ in range(RANKS)]
    grads = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(RANKS):
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[replica][name])
            backward(model, step, replica)
            buffers[replica] = copy_of(model.named_buffers())
        for param in model.parameters():
            param.grad = None if param.grad is None else param.grad.to_dense()
        grads.append({name: None if param.grad is None else param.grad.clone()
                      for name, param in model.named_parameters()})
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
        backward(model, step, rank)
        grads = reducer.gradients()
        for weights, grad, tag, start in zip(reducer.weights, grads, reducer.tags, reducer.starts,
                                             strict=True):
            weights.grad = grad
            want = want_grads[step][tag.name]
            assert (grad is None) == (want is None), f"step {step}: {tag.name}"
            if grad is not None:
                want = want.flatten()[start : start + weights.numel()]
                worst.append(deviation(grad.flatten().as_subclass(torch.Tensor), want))
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


def cells(rank, kind):
    """[deviation, or the text of the error] of the four stages."""
    want = one_process(kind)
    found = []
    for stage in range(4):
        mesh = Mesh(dp=RANKS, timeout=20)
        try:
            found.append(train(rank, kind, stage, mesh, *want))
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    return found


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_module_equals_one_process_or_is_refused_in_one_line(kind):
    for found in ranks(RANKS, cells, kind):
        print(kind.__name__, found)
        for stage, cell in enumerate(found):
            if stage in kind.lines:
                assert kind.lines[stage] in str(cell) and "\n" not in cell, found
            else:
                assert isinstance(cell, float) and cell < kind.tolerance, found
