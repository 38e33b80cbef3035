"""Models of your own under DDP, ZeRO-1, 2 and 3: what one process computes, or one line.

28 modules as people write them, and 23 uses of a module, in the loop of your_model.py's first
lines: two replicas, three steps of two microbatches, float64, AdamW. Gradients and weights equal
one process's to 1e-10 in each stage, or, where `lines` says so, an error names the technique, the
parameter and what to do. Then 15 mistakes, and the loops and suites of others."""

import copy
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
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

# ---- modules: each function returns one, which takes x, or (ids, x, step, replica) ----


class Made(nn.Module):
    """Made of parts, and of a function: forward(this module, what it is called with)."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def listed(count, make=lambda: nn.Linear(WIDE, WIDE)):
    return nn.ModuleList([make() for _ in range(count)])


def random_param(*shape, **dtype):
    return nn.Parameter(torch.randn(shape, **dtype))


def mlp():
    return nn.Sequential(nn.Linear(WIDE, 9), nn.Tanh(), nn.Linear(9, 3))


def another_order():
    """Calls its layers in another order than it lists them, and asks for their class."""
    def forward(net, ids, x, step, replica):
        for i in (2, 0, 3, 1):
            assert isinstance(net.layers[i], nn.Linear) and type(net.layers[i]) is nn.Linear
            x = x + net.layers[i](x).tanh()
        return x

    return Made(forward, layers=listed(4))


def reused():
    """A layer runs three times."""
    layer = nn.Linear(WIDE, WIDE)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), layer, nn.GELU(),
                         layer)


def recursive():
    """A layer calls itself."""
    def forward(layer, x, depth=3):
        x = layer.linear(x).tanh()
        return layer(x, depth - 1) if depth else x

    return nn.Sequential(Made(forward, linear=nn.Linear(WIDE, WIDE)))


def convolutions():
    """channels_last, BatchNorm's buffers, an activation in place."""
    net = nn.Sequential(nn.Linear(WIDE, 48), nn.Unflatten(1, (3, 4, 4)),
                        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4),
                        nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4),
                        nn.GELU())
    return net.to(memory_format=torch.channels_last)


def transformer():
    """torch's own encoder, whose attention reads weights of a module inside; dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Linear(2, 8),
                         nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def lstm():
    return nn.Sequential(nn.Unflatten(1, (3, 2)),
                         nn.LSTM(2, 5, num_layers=2, batch_first=True, bidirectional=True))


def weight_norm():
    norm = parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(WIDE, 5)), nn.Tanh(), norm(nn.Linear(5, 5)),
                         parametrizations.spectral_norm(nn.Linear(5, 2)))


def nested():
    """ModuleDict, ParameterList, ParameterDict; lists in a list; nanoGPT's names."""
    def forward(net, ids, x, step, replica):
        h = net.transformer.wte(ids)
        for param in net.params:
            h = h * param
        h = net.transformer.lists[0][0](net.transformer.h[0](h) @ net.named["a"])
        return net.lm_head(h)

    transformer = nn.ModuleDict({
        "wte": nn.Embedding(WORDS, WIDE), "h": listed(1),
        "lists": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList()])})
    return Made(forward, params=nn.ParameterList([random_param(WIDE) for _ in range(3)]),
                named=nn.ParameterDict({"a": random_param(WIDE, 2)}), transformer=transformer,
                lm_head=nn.Linear(2, WORDS, bias=False))


def structures():
    """Layers take a keyword and a dict, and return a tuple with None, a number and a dict."""
    def of_layer(layer, x, *, scale, more):
        return (layer.linear(x) * scale, None, 3), {"bias": more["bias"] + layer.linear.bias}

    def forward(net, ids, x, step, replica):
        for layer in net.layers:
            (x, _, _), more = layer(x, scale=x.mean() + 2, more={"bias": x.sum(0)})
            x = x + more["bias"]
        return x

    return Made(forward, layers=listed(2, lambda: Made(of_layer, linear=nn.Linear(WIDE, WIDE))))


def tied():
    """The embedding is the head."""
    def forward(net, ids, x, step, replica):
        h = net.wte(ids)
        for block in net.blocks:
            h = h + block(h).tanh()
        return F.cross_entropy(net.head(h).flatten(0, 1), ids.roll(1).flatten())

    net = Made(forward, blocks=listed(2), wte=nn.Embedding(WORDS, WIDE),
               head=nn.Linear(WIDE, WORDS, bias=False))
    net.head.weight = net.wte.weight
    return net


def frozen():
    """Fine-tuning: one of two blocks is trained, and no embedding."""
    net = tied()
    net.wte.weight.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    return net


def lora():
    net = tied()
    for block in net.blocks:
        block.requires_grad_(False)
        low = Made(lambda low, weight: weight + low.a @ low.b, a=random_param(WIDE, 2),
                   b=random_param(2, WIDE))
        parametrize.register_parametrization(block, "weight", low)
    return net


def hooked():
    """Hooks on layers, on the model, on a backward, on a parameter. Two of them read weights."""
    net = tied()
    net.blocks[0].register_forward_pre_hook(lambda layer, args: (args[0] * layer.weight.mean(),))
    net.blocks[0].register_full_backward_hook(
        lambda layer, into, out: tuple(2 * grad for grad in into))
    net.blocks[1].register_forward_hook(lambda layer, args, out: out * layer.weight.mean())
    net.register_forward_hook(lambda layer, args, out: out * 2)
    net.wte.weight.register_hook(lambda grad: 2 * grad)
    return net


def two_heads():
    """One of the heads is unused in every other step, and one module always."""
    def forward(net, ids, x, step, replica):
        return net.heads[step % 2](net.body(x))

    return Made(forward, body=nn.Linear(WIDE, WIDE), heads=listed(2), never=nn.Linear(4, 4))


def one_replica():
    """Replica 0 alone uses one of the parameters, replica 1 another one."""
    def forward(net, ids, x, step, replica):
        return net.body(x) * (net.second if replica else net.first)

    return Made(forward, body=nn.Linear(WIDE, WIDE), first=random_param(WIDE),
                second=random_param(WIDE))


def scalars():
    """Parameters of 0 dims, of one element, of none; fewer elements than replicas."""
    def forward(net, ids, x, step, replica):
        return net.linear(x) * net.temperature * net.one + net.none.sum()

    return Made(forward, linear=nn.Linear(WIDE, WIDE), temperature=random_param(),
                one=random_param(1), none=random_param(0, 3))


def transposed():
    """A weight and a gradient whose elements lie in another order."""
    def forward(net, ids, x, step, replica):
        return x @ net.weight + net.bias.expand(3, 4)

    return Made(forward, weight=nn.Parameter(torch.randn(4, WIDE).t()), bias=random_param(4))


def complex_numbers():
    def forward(net, ids, x, step, replica):
        return (torch.fft.fft(net.layers[0](x)) * net.phase).abs()

    return Made(forward, layers=listed(1), phase=random_param(WIDE, dtype=torch.cdouble))


def sparse():
    """Embedding and EmbeddingBag with sparse gradients; one of them is indexed, never called."""
    def forward(net, ids, x, step, replica):
        return net.layers[0](net.wte(ids) + net.bag(ids)[:, None] + net.indexed.weight[ids])

    return Made(forward, wte=nn.Embedding(WORDS, WIDE, sparse=True), layers=listed(1),
                bag=nn.EmbeddingBag(WORDS, WIDE, sparse=True), indexed=nn.Embedding(WORDS, WIDE))


def checkpointed(reentrant=False):
    """Activation checkpointing of one's own, with dropout, of one layer and of two."""
    def forward(net, ids, x, step, replica):
        def two(x):
            return net.layers[1](net.layers[2](x).tanh()).tanh()

        x = x.clone().requires_grad_()
        for layer in net.layers:
            y = checkpoint(layer, x, use_reentrant=reentrant)
            x = x + F.dropout(y.tanh(), 0.3)
        x = checkpoint(two, x, use_reentrant=reentrant)
        return net.layers[0](net.layers[1](x))

    return Made(forward, layers=listed(4))


def reentrant():
    """torch's older checkpointing: a backward inside of the backward."""
    return checkpointed(reentrant=True)


def depth_random():
    """Python's and numpy's random numbers decide in forward."""
    def forward(net, ids, x, step, replica):
        random.seed(10 * step + replica)
        np.random.seed(10 * step + replica)
        for layer in net.layers:
            keep = [random.random() > 0.5 for _ in range(3)] + list(np.random.rand(3) > 0.5)
            x = x + layer(x).tanh() * torch.tensor(keep, dtype=x.dtype)
        return x

    return Made(forward, layers=listed(4))


def returns_weights():
    """Layers return their weights."""
    def of_layer(layer, x):
        return layer.linear(x), layer.linear.weight.t(), layer.linear.bias[None]

    def forward(net, ids, x, step, replica):
        for layer in net.layers:
            y, weight, bias = layer(x)
            x = (y @ weight + bias).tanh()
        return x

    return Made(forward, layers=listed(2, lambda: Made(of_layer, linear=nn.Linear(WIDE, WIDE))))


def passes_weights():
    """A node of the graph has saved a weight of a layer and one of the model around it."""
    def forward(net, ids, x, step, replica):
        for layer in net.layers:
            x = layer(x, net.other).tanh()
        return x

    def layer():
        return Made(lambda layer, x, other: x @ (layer.weight @ other),
                    weight=random_param(WIDE, WIDE))

    return Made(forward, other=random_param(WIDE, WIDE), layers=listed(2, layer))


def cached():
    """Layers that append to a cache; later ones read what earlier ones have put there."""
    def of_layer(layer, x, cache):
        cache.append(layer.key(x))
        keys = torch.cat(cache)
        return x + (layer.query(x) @ keys.t()).softmax(-1) @ keys

    def forward(net, ids, x, step, replica):
        cache = []
        for layer in net.layers:
            x = layer(x, cache=cache)
        return x + cache[0]

    return Made(forward, layers=listed(2, lambda: Made(
        of_layer, query=nn.Linear(WIDE, WIDE), key=nn.Linear(WIDE, WIDE))))


def two_dtypes():
    def forward(net, ids, x, step, replica):
        return net.layers[0](x) * net.gate(x.float()).double()

    return Made(forward, layers=listed(1), gate=nn.Linear(WIDE, WIDE))


# ---- uses of a module in a loop ----


def loss_of(model, ids, x, step, replica):
    out = model(x) if isinstance(model, nn.Sequential) else model(ids, x, step, replica)
    if isinstance(out, tuple):
        out = out[0]
    return out.square().mean()


def nothing(model, step=None):
    pass


@dataclass
class Kind:
    make: Callable  # makes a module
    lines: dict = field(default_factory=dict)  # {stage: what its error says}
    # What the loop does with the module
    convert: Callable = nn.Module.double
    wrapped: Callable = nothing  # when the reducer was made; in one process at the same place
    loss: Callable = loss_of  # of a microbatch
    before_gradients: Callable = nothing  # after backward. True: leave the rest of the step out
    before_step: Callable = nothing  # after gradients(). True: leave the optimizer's step out
    after: Callable = nothing  # after a step
    tolerance: float = 1e-10  # in float64


def stack():
    """The module of most uses."""
    def forward(net, ids, x, step, replica):
        return net.head(net.layers(x))

    return Made(forward, layers=nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 4)),
                head=nn.Linear(4, 2))


def reads_beside(*shape):
    """A model reads a weight of a layer beside the call of the layer."""
    def layer():
        return Made(lambda layer, x: layer.linear(x), linear=nn.Linear(WIDE, WIDE),
                    gain=random_param(*shape))

    def forward(net, ids, x, step, replica):
        for layer in net.layers:
            x = x + layer(x) * layer.gain
        return x

    return Made(forward, layers=listed(2, layer))


def other_layers():
    """Each replica runs a layer of its own."""
    return Made(lambda net, ids, x, step, replica: net.layers[replica](x), layers=listed(2))


def penalty(model, *part):
    return loss_of(model, *part) + 0.1 * sum(param.square().sum() for param in model.parameters())


def method_calls(model, ids, x, step, replica):
    """As a method that is not forward does."""
    return model.head(model.layers(x)).square().mean()


def method_reads(model, ids, x, step, replica):
    return F.linear(model.layers(x), model.head.weight).square().mean()


def gradient_penalty(model, ids, x, step, replica):
    """WGAN-GP: a gradient by the input, and a backward through it."""
    y = loss_of(model, ids, x.requires_grad_(), step, replica)
    grad, = torch.autograd.grad(y, x, create_graph=True)
    return y + grad.square().sum()


def in_autocast(model, ids, x, step, replica):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, ids, x.float(), step, replica)


def fails(model, ids, x, step, replica):
    """A forward and a backward fail, and the loop goes on."""
    with pytest.raises(IndexError):
        model(ids + WORDS, x, step, replica)
    handle = model.blocks[1].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (0 * loss_of(model, ids, x, step, replica)).backward()
    handle.remove()
    return loss_of(model, ids, x, step, replica)


def post_accumulate():
    """Hooks that run when a gradient is accumulated."""
    net = stack()
    net.seen = set()
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(net.seen.add)
    return net


def all_were_seen(model, step):
    assert model.seen == {*model.parameters()}


def wide():
    """Messages of its weights take more than a page, so the carrier has no memory from others."""
    return nn.Sequential(nn.Linear(WIDE, 200), nn.Tanh(), nn.Linear(200, 2))


def evaluate(model, step=None):
    for without_gradient in (torch.inference_mode, torch.no_grad):
        with without_gradient():
            loss_of(model, *part_of(9, 0, 0))


def drop(model, step):
    """model.zero_grad() in place of a step."""
    if step == 1:
        model.zero_grad()
    return step == 1


def two_networks():
    """A GAN in one module."""
    return Made(lambda net, ids, x, step, replica: net.D(net.G(x).tanh()) + net.D(x),
                G=nn.Sequential(nn.Linear(WIDE, WIDE)), D=nn.Linear(WIDE, 1))


def drop_a_part(model, step):
    """The discriminator drops what the generator's loss has left in it."""
    if step != 1:
        model.D.zero_grad(set_to_none=step == 0)


def clip(model, step):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def frozen_stack():
    net = stack()
    net.layers.requires_grad_(False)
    return net


def average(model, step):
    part = part_of(9, 0, 0)
    assert torch.equal(copy.deepcopy(model)(*part), model(*part))


def load(model, step):
    model.load_state_dict({name: torch.ones(param.shape).double()
                           for name, param in model.named_parameters()})


STACK = Kind(stack)
MODULES = [mlp, another_order, reused, recursive, convolutions, transformer, lstm, weight_norm,
           nested, structures, tied, frozen, lora, hooked, two_heads, one_replica, scalars,
           transposed, complex_numbers, sparse, checkpointed, reentrant, depth_random,
           returns_weights, passes_weights, cached]
KINDS = {make.__name__: Kind(make) for make in MODULES} | {
    "two_dtypes": Kind(two_dtypes, convert=lambda model: model.layers.double(),
                       tolerance=1e-5),  # a part has 32 bits
    "autocast": Kind(mlp, convert=nn.Module.float, loss=in_autocast,
                     tolerance=1e-4),  # products have 8 bits, and the weights 32
    # Weights outside of their layer's forward
    "penalty": Kind(stack, {3: FREED + " layers.0.weight are freed"}, loss=penalty),
    "reads_a_vector": Kind(lambda: reads_beside(WIDE), {3: FREED + " layers.0.gain are freed"}),
    "reads_a_scalar": Kind(reads_beside, {3: FREED + " layers.0.gain are freed"}),
    "method_reads": Kind(stack, {3: FREED + " head.weight are freed"}, loss=method_reads),
    "method_calls": Kind(stack, loss=method_calls),
    # Other forwards and backwards
    "gradient_penalty": Kind(stack, loss=gradient_penalty),
    "post_accumulate": Kind(post_accumulate, before_gradients=all_were_seen),
    "compiled": Kind(stack, wrapped=lambda model: model.compile(backend="aot_eager")),
    "other_layers": Kind(other_layers, {3: "ZeRO-3: replica"}),
    "fails": Kind(tied, loss=fails),
    "evaluates": Kind(wide, wrapped=evaluate, after=evaluate),
    # Gradients and steps left out
    "drops_a_step": Kind(stack, before_gradients=drop),
    "skips_a_step": Kind(stack, before_step=lambda model, step: step == 1),
    "drops_a_part": Kind(two_networks, before_gradients=drop_a_part),
    # Tools on the model's own parameters
    "clips": Kind(stack, dict.fromkeys((1, 2, 3), ELSEWHERE), before_step=clip),
    "freezes": Kind(stack, wrapped=lambda model: model.layers.requires_grad_(False),
                    after=lambda model, step: model.layers.requires_grad_(step > 0)),
    "unfreezes": Kind(frozen_stack, dict.fromkeys(range(4), "was frozen when the model was"),
                      after=lambda model, step: model.requires_grad_(True)),
    "converts": Kind(mlp, {0: "DDP: the memory of", 1: "ZeRO-1: the memory of",
                           2: "ZeRO-2: the memory of", 3: FREED}, wrapped=nn.Module.float,
                     loss=lambda model, ids, x, step, replica: model(x.float()).sum()),
    # Between two steps
    "averages": Kind(stack, {3: FREED}, after=average),
    "saves": Kind(stack, {3: "reducer.whole() has all weights, for state_dict()"},
                  after=lambda model, step: model.state_dict()),
    "loads": Kind(stack, {3: FREED}, after=load),
    "norms": Kind(stack, {3: FREED}, after=lambda model, step: model.head.weight.norm()),
    "initializes": Kind(stack, {3: FREED},
                        after=lambda model, step: nn.init.ones_(model.head.weight)),
}


# ---- one process, and two ranks ----


def make(kind, seed=0):
    torch.manual_seed(seed)
    model = kind.make()
    kind.convert(model)
    return model


def part_of(step, replica, k):
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + k)
    return (torch.randint(WORDS, (3, 5), generator=generator),
            torch.randn(3, WIDE, generator=generator, dtype=torch.double), step, replica)


def backward(model, step, replica, D=RANKS, loss=loss_of):
    """The microbatches of a replica; a sum over all of these is the mean loss."""
    for k in range(MICROBATCHES):
        torch.manual_seed(1000 + 100 * step + 10 * replica + k)  # of dropout
        (loss(model, *part_of(step, replica, k)) / (D * MICROBATCHES)).backward()


def take_gradients(reducer):
    for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
        weights.grad = grad


def copy_of(named):
    return {name: tensor.detach().clone() for name, tensor in named}


def one_process(kind, D=RANKS):
    """[{name: gradient} of each step], {name: weights}, {name: buffer} of each replica, which keeps
    buffers of its own."""
    model = make(kind)
    kind.wrapped(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    buffers = [copy_of(model.named_buffers()) for _ in range(D)]
    grads = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(D):
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[replica][name])
            backward(model, step, replica, D, kind.loss)
            buffers[replica] = copy_of(model.named_buffers())
        if kind.before_gradients(model, step):
            grads.append({})
            continue
        for param in model.parameters():
            param.grad = None if param.grad is None else param.grad.to_dense()
        grads.append({name: None if param.grad is None else param.grad.clone()
                      for name, param in model.named_parameters()})
        if not kind.before_step(model, step):
            optimizer.step()
        kind.after(model, step)
    return grads, copy_of(model.named_parameters()), buffers


def deviation(got, want):
    """Relative; nan where one of them is."""
    return 0.0 if want.numel() == 0 else ((got - want).norm() / (want.norm() + 1e-30)).item()


def deviations(reducer, want):
    """Those of whole weights from {name: weights}."""
    return [deviation(whole, want[tag.name]) for tag, whole in reducer.whole()]


def train(rank, kind, stage, mesh, want_grads, want_weights, want_buffers):
    """The largest deviation of a gradient, a weight or a buffer from one process's."""
    model = make(kind, seed=rank)  # the reducer gives every replica the values of replica 0
    reducer = STAGES[stage](model, mesh)
    kind.wrapped(model)
    optimizer = torch.optim.AdamW(reducer.weights, lr=0.01, weight_decay=0.1)
    worst = [0.0]
    for step in range(STEPS):
        backward(model, step, rank, mesh.world.size, kind.loss)
        if kind.before_gradients(model, step):
            continue
        take_gradients(reducer)
        for weights, tag, start in zip(reducer.weights, reducer.tags, reducer.starts, strict=True):
            grad, want = weights.grad, want_grads[step][tag.name]
            assert (grad is None) == (want is None), f"step {step}: {tag.name}"
            if grad is not None:
                want = want.flatten()[start : start + weights.numel()]
                worst.append(deviation(grad.flatten().as_subclass(torch.Tensor), want))
        if not kind.before_step(model, step):
            optimizer.step()
            reducer.publish()
        kind.after(model, step)
    if stage < 3:  # each replica's own model has the new weights, without a forward
        worst += [deviation(param.detach(), want_weights[name])
                  for name, param in model.named_parameters()]
    worst += deviations(reducer, want_weights)
    worst += [deviation(buffer.double(), want_buffers[rank][name].double())
              for name, buffer in model.named_buffers()]
    return max(worst) if all(x == x for x in worst) else float("nan")


def cells(rank, name, D=RANKS):
    """[deviation, or the text of the error] of the four stages."""
    kind = KINDS[name]
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


@pytest.mark.parametrize("name", KINDS)
def test_a_module_equals_one_process_or_is_refused_in_one_line(name):
    kind = KINDS[name]
    for found in ranks(RANKS, cells, name):
        for stage, cell in enumerate(found):
            if stage in kind.lines:
                assert kind.lines[stage] in str(cell), found
            else:
                assert isinstance(cell, float) and cell < kind.tolerance, found


@pytest.mark.parametrize("name", ["scalars", "lora", "checkpointed", "gradient_penalty"])
def test_three_replicas_equal_one_process(name):
    """Parameters have fewer elements than there are replicas, or as many as 3 does not divide."""
    for found in ranks(3, cells, name, 3):
        assert all(cell < 1e-10 for cell in found), found


# ---- mistakes: an error at the place ----


class Loop:
    """A loop, word by word; of a mistake there is a word, too."""

    def __init__(self, rank, stage, mesh):
        self.rank, self.mesh = rank, mesh
        self.model = make(KINDS["method_calls"])
        self.part = part_of(0, rank, 0)
        self.reducer = STAGES[stage](self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.reducer.weights, lr=0.1)

    def do(self, word):
        model, reducer = self.model, self.reducer
        {
            "backward": lambda: backward(model, 0, self.rank),
            "gradients": lambda: take_gradients(reducer),
            "step": self.optimizer.step,
            "publish": reducer.publish,
            "step-on-0": lambda: self.rank or self.optimizer.step(),
            "step-the-model": lambda: torch.optim.AdamW(model.parameters()).step(),
            "backward-on-1": lambda: self.rank and backward(model, 0, self.rank),
            "drop-on-1": lambda: self.rank and model.zero_grad(),
            "evaluate": lambda: evaluate(model),
            "forward": lambda: setattr(self, "loss", loss_of(model, *self.part)),
            "its-backward": lambda: self.loss.backward(),
            "read": lambda: model.head.weight.grad.abs().max(),
            "clip-pieces": lambda: nn.utils.clip_grad_norm_(reducer.weights, 1.0),
            "exchange": lambda: setattr(
                model.head, "weight", nn.Parameter(torch.ones(2, 4).double())),
            "wrap-again": lambda: type(reducer)(model, self.mesh),
            "wrap-another": lambda: type(reducer)(nn.Linear(2, 2 + self.rank), self.mesh),
            "wrap-max-norm": lambda: type(reducer)(
                nn.ModuleList([nn.Embedding(2, 2, max_norm=1.0)]), self.mesh),
            "change-saved": self.change_saved,
        }[word]()

    def change_saved(self):
        x = self.model.layers(self.part[1])
        y = self.model.head(x)
        x.detach().add_(1)
        y.sum().backward()


ALL = (0, 1, 2, 3)
MISTAKES = [  # (a loop, the stages in which it is wrong, what the error says)
    ("backward gradients step backward gradients", (1, 2), "published: call reducer.publish"),
    ("backward gradients step evaluate", (1, 2), "not published: call reducer.publish"),
    ("backward step publish", ALL, "reducer.gradients"),
    ("backward gradients step-the-model publish", (1, 2, 3), "ZeRO"),
    ("backward gradients clip-pieces", (1, 2, 3), "ZeRO: a replica has pieces of gradients"),
    ("backward read", ALL, ELSEWHERE + " head.weight is in the reducer"),
    ("backward gradients step-on-0 publish", ALL, "publish.., weights stepped: "),
    ("backward-on-1 backward gradients", ALL, "elsewhere: all have the same model"),
    ("backward drop-on-1 gradients", (2, 3), "drop gradients"),
    ("wrap-again", ALL, "is in a model that was wrapped before"),
    ("wrap-another", ALL, "is at the start, with model"),
    ("wrap-max-norm", ALL, "0 changes its weights in forward"),
    ("exchange backward gradients", ALL, ": the memory of head.weight"),
    ("forward backward gradients step publish its-backward", ALL,
     "between a forward and its backward|inplace operation"),
    ("change-saved", ALL, "inplace operation"),
]


def errors(rank, words):
    """The text of the error in each of the four stages; "": there is none."""
    found = []
    mesh = Mesh(dp=RANKS, timeout=20)
    for stage in range(4):
        loop = Loop(rank, stage, mesh)
        found.append("")
        try:
            for word in words.split():
                loop.do(word)
        except (RuntimeError, ValueError) as error:
            found[-1] = str(error)
        dist.barrier()
    return found


@pytest.mark.parametrize("words,stages,line", MISTAKES)
def test_a_mistake_is_one_line(words, stages, line):
    for found in ranks(RANKS, errors, words):
        for stage, text in enumerate(found):
            if stage in stages:
                assert re.search(line, text) and "\n" not in text, found
            else:
                assert text == "", found


# ---- resuming, two networks, bytes ----


def resumed(rank, stage):
    """Deviations of weights after four steps from those of a run that was saved after two: weights
    by whole(), and each rank its own optimizer's state."""
    def begin(weights=None, state=None):
        model = make(STACK)
        model.load_state_dict(weights or model.state_dict())
        reducer = STAGES[stage](model, Mesh(dp=RANKS))
        optimizer = torch.optim.AdamW(reducer.weights, lr=0.1)
        optimizer.load_state_dict(state or optimizer.state_dict())
        return model, reducer, optimizer

    def two_steps(model, reducer, optimizer):
        for step in range(2):
            backward(model, step, rank)
            take_gradients(reducer)
            optimizer.step()
            reducer.publish()
        return {tag.name: whole for tag, whole in reducer.whole()}

    run = begin()
    weights = two_steps(*run)
    again = begin(weights, copy.deepcopy(run[2].state_dict()))
    two_steps(*again)
    return deviations(again[1], two_steps(*run))


def two_reducers(rank, stage):
    """A GAN of two networks, each with a reducer, in the usual loop; and in one process."""
    def run(G, D, replicas, weights_of, take, publish):
        optimizers = {net: torch.optim.AdamW(weights_of(net), lr=0.1) for net in (G, D)}
        losses = {D: lambda x: (D(x) - 1).square() + D(G(x).detach()).square(),
                  G: lambda x: (D(G(x)) - 1).square()}
        for step in range(STEPS):
            for net, loss in losses.items():
                net.zero_grad()
                D.requires_grad_(net is D or step < 2)
                for replica in replicas:
                    loss(part_of(step, replica, 0)[1]).mean().div(RANKS).backward()
                take(net)
                optimizers[net].step()
                publish(net)

    torch.manual_seed(0)
    alone = nn.Linear(WIDE, WIDE).double(), nn.Sequential(nn.Linear(WIDE, 1)).double()
    pair = copy.deepcopy(alone)
    mesh = Mesh(dp=RANKS)
    reducers = {net: STAGES[stage](net, mesh) for net in pair}
    run(*alone, range(RANKS), lambda net: net.parameters(), lambda net: None, lambda net: None)
    run(*pair, [rank], lambda net: reducers[net].weights,
        lambda net: take_gradients(reducers[net]), lambda net: reducers[net].publish())
    found = []
    for want, net in zip(alone, pair, strict=True):
        found += deviations(reducers[net], dict(want.named_parameters()))
    return found


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("loop", [resumed, two_reducers])
def test_a_resumed_run_and_two_networks_equal_one_process(loop, stage):
    assert max(map(max, ranks(RANKS, loop, stage))) < 1e-10


def held_and_sent(rank):
    """(most Flats that are whole at a time, bytes of weights between steps, elements of gathers and
    of reductions, elements of the model) of a step under ZeRO-3."""
    model, mesh = make(KINDS["another_order"]), Mesh(dp=RANKS)
    reducer = your_model.ZeRO3(model, mesh)
    psi = sum(param.numel() for param in model.parameters())
    most = []
    gather = reducer.make_whole

    def watched(flat):
        gather(flat)
        most.append(len(reducer.gathers))

    reducer.make_whole = watched
    before = [mesh.groups[name].bytes_sent for name in ("shard", "dp")]
    loss_of(model, *part_of(0, rank, 0)).backward()
    gathers, sums = (mesh.groups[name].bytes_sent - sent
                     for name, sent in zip(("shard", "dp"), before, strict=True))
    held = sum(param.untyped_storage().nbytes() for param in model.parameters())
    return max(most), held, gathers / 8, sums / 8, psi


def test_zero3_has_one_layer_whole_at_a_time_and_sends_three_times_the_model():
    for most, held, gathers, sums, psi in ranks(RANKS, held_and_sent):
        assert most == 1 and held == 0
        # In forward and backward. The first of the four layers that run reads no weights in
        # backward, because its input needs no gradient. And a number with each message
        assert psi / 2 * 7 / 4 <= gathers <= psi / 2 * 7 / 4 + 10
        assert sums == psi / 2


# ---- Stanford CS336, assignment 2: its adapters, over means of gradients ----


def take_means(reducer):
    for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
        weights.grad = grad / RANKS


def get_ddp_individual_parameters(module):
    module.reducer = your_model.DDP(module, Mesh(dp=dist.get_world_size()))
    return module


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    take_means(ddp_model.reducer)


def get_sharded_optimizer(params, optimizer_class, **options):
    reducer = your_model.ZeRO1(nn.ParameterList(params), Mesh(dp=dist.get_world_size()))

    class Sharded(optimizer_class):
        def step(self):
            take_means(reducer)
            super().step()
            reducer.publish()

    return Sharded(reducer.weights, **options)


def cs336(rank, is_sharded):
    """As the assignment's tests use its adapters."""
    want, net = make(KINDS["tied"]), make(KINDS["tied"], 0 if is_sharded else rank)
    alone = torch.optim.AdamW(want.parameters(), lr=0.1)
    if is_sharded:
        optimizer = get_sharded_optimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
    else:
        net = get_ddp_individual_parameters(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(*part_of(step, rank, 0)).backward()
        if not is_sharded:
            ddp_individual_parameters_on_after_backward(net, optimizer)
        optimizer.step()
        alone.zero_grad()
        for replica in range(RANKS):
            (want(*part_of(step, replica, 0)) / RANKS).backward()
        alone.step()
    return [deviation(param.detach(), wanted) for param, wanted in
            zip(net.parameters(), want.parameters(), strict=True)]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_adapters_of_cs336_train_like_one_process(is_sharded):
    assert max(map(max, ranks(RANKS, cs336, is_sharded))) < 1e-10


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
    losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
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
    ("    losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())\n",
     "    for weights, grad in zip(reducer.weights, reducer.gradients()):\n"
     "        weights.grad = grad\n    losses.append(reducer.clip_grad_norm_(0.1).item())\n"),
    ("    optimizer.step()\n", "    optimizer.step()\n    reducer.publish()\n"),
    ("dict(model.named_parameters())", "{tag.name: whole for tag, whole in reducer.whole()}"),
]


def nanogpt(rank, stage):
    """Deviations of the losses, norms and of the checkpoint from those of one process."""
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
