"""Models of your own under DDP, ZeRO-1, 2 and 3: what one process computes, or one line.

A table of modules as people write them, and of uses of a module, in the loop of your_model.py's
first lines: two replicas, three steps of two microbatches, float64, AdamW. Gradients, weights and
buffers equal one process's to 1e-10 in each stage or, where the table says so, an error names the
technique, the parameter and what to do. Then mistakes, and the loops of others."""

import copy
import io
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from extras import your_model
from mesh import Mesh
from tests.harness import HERE, ranks

STAGES = (your_model.DDP, your_model.ZeRO1, your_model.ZeRO2, your_model.ZeRO3)
RANKS, MICROBATCHES, STEPS = 2, 2, 3
WIDE, WORDS = 6, 7

# ---- modules: of a part p of a batch, which has ids, x, step and replica ----


class Made(nn.Module):
    """Made of parts, and of a function: forward(this module, what it is called with)."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def weight(*shape, **dtype):
    return nn.Parameter(torch.randn(shape, **dtype))


def linear():
    return nn.Linear(WIDE, WIDE)


def layers(count, forward, **makers):
    """A Sequential of layers, each of parts that the makers make."""
    return nn.Sequential(*(Made(forward, **{name: make() for name, make in makers.items()})
                           for _ in range(count)))


def stack():
    """The module of most uses."""
    return Made(lambda net, p: net.head(net.layers(p.x)), head=nn.Linear(4, 2),
                layers=nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 4)))


def tied():
    """The embedding is the head."""
    def forward(net, p):
        logits = net.head(net.blocks(net.wte(p.ids)).tanh())
        return F.cross_entropy(logits.flatten(0, 1), p.ids.roll(1).flatten())

    net = Made(forward, blocks=nn.Sequential(linear(), linear()), wte=nn.Embedding(WORDS, WIDE),
               head=nn.Linear(WIDE, WORDS, bias=False))
    net.head.weight = net.wte.weight
    return net


def depth_random():
    """Random layers in a random order, by Python's random numbers. Asks for a layer's class."""
    def forward(net, p):
        random.seed(p.step)
        x = p.x
        for layer in random.sample([*net.layers], 3):
            assert isinstance(layer.linear, nn.Linear) and type(layer) is Made
            x = layer(x)
        return x

    return Made(forward, layers=layers(
        4, lambda layer, x: x + layer.linear(x).tanh() * random.random(), linear=linear))


def reused():
    """A layer runs three times, two share a weight, and one calls itself."""
    def forward(layer, x, depth=3):
        x = layer.linear(x).tanh()
        return layer(x, depth - 1) if depth else x

    layer, one, two = linear(), linear(), linear()
    two.weight = one.weight
    return nn.Sequential(layer, one, nn.Tanh(), layer, two, nn.GELU(), nn.Sequential(layer),
                         Made(forward, linear=linear()))


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
    return nn.Sequential(nn.Unflatten(1, (3, 2)), nn.LSTM(2, 5, num_layers=2, bidirectional=True))


def weight_norm():
    norm = parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(WIDE, 5)), nn.Tanh(), norm(nn.Linear(5, 5)),
                         parametrizations.spectral_norm(nn.Linear(5, 2)))


def nested():
    """ModuleDict, ParameterList, ParameterDict; lists in a list."""
    def forward(net, p):
        h = net.transformer.wte(p.ids) * net.params[0] * net.params[1]
        h = net.transformer.lists[0][0](net.transformer.h[0](h) @ net.named["a"])
        return net.lm_head(h)

    transformer = nn.ModuleDict({
        "wte": nn.Embedding(WORDS, WIDE, padding_idx=2), "h": nn.ModuleList([linear()]),
        "lists": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList()])})
    return Made(forward, params=nn.ParameterList([weight(WIDE), weight(WIDE)]),
                named=nn.ParameterDict({"a": weight(WIDE, 2)}), transformer=transformer,
                lm_head=nn.Linear(2, WORDS, bias=False))


def structures():
    """Layers take keywords and a cache, and return a tuple with None, a dict and their weight."""
    def of_layer(layer, x, *, cache, more):
        cache.append(layer.key(x))
        return (layer.linear(x) @ torch.cat(cache).t(), None, 3), {
            "bias": more["bias"] + layer.linear.bias, "weight": layer.linear.weight.t()}

    def forward(net, p):
        x, cache = p.x, []
        for layer in net.layers:
            (scores, _, _), more = layer(x, cache=cache, more={"bias": x.sum(0)})
            x = scores.softmax(-1) @ torch.cat(cache) @ more["weight"] + more["bias"]
        return x

    return Made(forward, layers=layers(2, of_layer, linear=linear, key=linear))


def passes_weights():
    """A node of the graph has saved a weight of a layer and one of the model around it."""
    def forward(net, p):
        first, second = net.layers
        return second(first(p.x, net.other).tanh(), net.other)

    return Made(forward, other=weight(WIDE, WIDE), layers=layers(
        2, lambda layer, x, other: x @ (layer.weight @ other), weight=lambda: weight(WIDE, WIDE)))


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
        low = Made(lambda low, weight: weight + low.a @ low.b, a=weight(WIDE, 2), b=weight(2, WIDE))
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


def odd_tensors():
    """Parameters of 0 dims, of one element, of none, of integers; a transposed weight; buffers."""
    def forward(net, p):
        return net.body(p.x) @ net.weight * net.temperature * net.one + net.none.sum()

    net = Made(forward, body=linear(), temperature=weight(), one=weight(1), none=weight(0, 3),
               weight=nn.Parameter(torch.randn(4, WIDE).t()),
               index=nn.Parameter(torch.arange(4), requires_grad=False))
    net.register_buffer("mask", torch.rand(3) > 0.5)
    net.register_buffer("empty", torch.zeros(0, 3))
    return net


def complex_numbers():
    def of_layer(layer, x):
        return (torch.fft.fft(layer.linear(x)) @ layer.phase.mH).abs() * layer.phase.real.sum()

    return layers(2, of_layer, linear=linear,
                  phase=lambda: weight(WIDE, WIDE, dtype=torch.cdouble))


def sparse():
    """Embedding and EmbeddingBag with sparse gradients; one of them is indexed, never called."""
    def forward(net, p):
        return net.layers(net.wte(p.ids) + net.bag(p.ids)[:, None] + net.indexed.weight[p.ids])

    return Made(forward, wte=nn.Embedding(WORDS, WIDE, sparse=True), layers=nn.Sequential(linear()),
                bag=nn.EmbeddingBag(WORDS, WIDE, sparse=True), indexed=nn.Embedding(WORDS, WIDE))


def checkpointed(reentrant=False):
    """Activation checkpointing of one's own, with dropout: of a layer, of two, of a layer's part"""
    def of_layer(layer, x):
        return layer.linear(x) + checkpoint(layer.inner, x, use_reentrant=reentrant)

    def forward(net, p):
        x = p.x.clone().requires_grad_()
        for layer in net.layers:
            y = checkpoint(layer, x, use_reentrant=reentrant)
            x = x + F.dropout(y.tanh(), 0.3)
        return checkpoint(net.layers[1:3], x, use_reentrant=reentrant)

    return Made(forward, layers=layers(4, of_layer, linear=linear, inner=linear))


def two_dtypes():
    return layers(2, lambda layer, x: layer.linear(x) * layer.gate(x.float()).double(),
                  linear=linear, gate=linear)


def heads(choose):
    """Uses one of two heads, and one module never."""
    return Made(lambda net, p: net.heads[choose(p)](net.body(p.x)), body=linear(),
                heads=nn.ModuleList([linear(), linear()]), never=nn.Linear(4, 4))


def one_replica():
    """Each replica uses one of two parameters."""
    return Made(lambda net, p: net.body(p.x) * net.params[p.replica], body=linear(),
                params=nn.ParameterList([weight(WIDE), weight(WIDE)]))


def reads_beside(read, gain):
    """The model reads a weight, or a view that a layer keeps, beside the call of the layer."""
    def of_layer(layer, x):
        layer.kept = read is read_kept and layer.gain[:]
        return layer.linear(x)

    return Made(lambda net, p: net.layers(p.x) * read(net.layers[0]),
                layers=layers(2, of_layer, linear=linear, gain=gain))


def read_gain(layer):
    return layer.gain


def read_kept(layer):
    return layer.kept


def with_hooks(hook):
    """Hooks that run when autograd has added to a gradient."""
    net = stack()
    net.seen = set()
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda param: hook(net, param))
    return net


# ---- uses of a module in a loop: losses, and what happens between two lines ----


def loss_of(model, p):
    out = model(p.x) if isinstance(model, nn.Sequential) else model(p)
    return (out[0] if isinstance(out, tuple) else out).square().mean()


def penalty(model, p):
    return loss_of(model, p) + 0.1 * sum(param.square().sum() for param in model.parameters())


def gradient_penalty(model, p):
    """WGAN-GP: a gradient by the input, and a backward through it."""
    p.x.requires_grad_()
    y = loss_of(model, p)
    grad, = torch.autograd.grad(y, p.x, create_graph=True)
    return y + grad.square().sum()


def by_torch_func(model, p):
    return torch.func.grad(lambda x: model.head(model.layers(x)).mean())(p.x).square().sum()


def functional(model, p):
    return torch.func.functional_call(model, dict(model.named_parameters()), (p,)).square().mean()


def in_autocast(model, p):
    with torch.autocast("cpu", torch.bfloat16):
        return model(p.x.float()).square().mean()


def several(model, p):
    """Two forwards and an evaluation before a backward; another backward of the same graph; a part
    of the model alone."""
    loss = loss_of(model, p) * loss_of(model, part_of(7, p.replica, 0))
    evaluate(model)
    (loss / 8).backward(retain_graph=True)
    return loss + model.blocks[p.step % 2](p.x).square().mean()


def fails(model, p):
    """A forward and a backward fail, and the loop goes on."""
    with pytest.raises(IndexError):
        model(SimpleNamespace(ids=p.ids + WORDS))
    handle = model.blocks[1].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (0 * loss_of(model, p)).backward()
    handle.remove()
    return loss_of(model, p)


def evaluate(model, *loop):
    for without_gradient in (torch.inference_mode, torch.no_grad):
        with without_gradient():
            loss_of(model, part_of(9, 0, 0))


def average(model, step):
    assert torch.equal(copy.deepcopy(model)(part_of(9, 0, 0)), model(part_of(9, 0, 0)))


def load(model, step):
    model.load_state_dict({name: torch.ones(param.shape).double()
                           for name, param in model.named_parameters()})


def drop(model, optimizer, step):
    """zero_grad() in place of a step."""
    if step == 1:
        optimizer.zero_grad()
    return step == 1


def drop_a_part(model, optimizer, step):
    """The discriminator drops what the generator's loss has left in it."""
    if step != 1:
        model.D.zero_grad(set_to_none=step == 0)


def set_gradients(model, optimizer, step):
    for param in model.parameters():
        param.grad = torch.ones(param.shape).double()


def nothing(*loop):
    pass


@dataclass
class Kind:
    make: Callable  # makes a module
    lines: dict = field(default_factory=dict)  # {stage: what its error says}. Else: equal
    # What the loop does with the module
    convert: Callable = nn.Module.double
    wrapped: Callable = nothing  # when the reducer was made; in one process at the same place
    loss: Callable = loss_of  # gives the loss of a microbatch
    before_gradients: Callable = nothing  # after backward. True: leave the rest of the step out
    before_step: Callable = nothing  # after gradients(). True: leave the optimizer's step out
    after: Callable = nothing  # after a step
    tolerance: float = 1e-10  # in float64


def all_say(line):
    return dict.fromkeys(range(4), line)


MODULES = (stack, depth_random, reused, convolutions, transformer, lstm, weight_norm, nested,
           structures, passes_weights, tied, frozen, lora, hooked, odd_tensors, complex_numbers,
           sparse, checkpointed, one_replica)
FREED = {3: "ZeRO-3: the weights of"}
MARK = ": the gradient of head.weight is in the reducer"
STACK = Kind(stack)
KINDS = {make.__name__: Kind(make) for make in MODULES} | {
    "reentrant": Kind(lambda: checkpointed(reentrant=True)),
    "two_dtypes": Kind(two_dtypes, convert=lambda net: [layer.linear.double() for layer in net],
                       tolerance=1e-5),  # a part has 32 bits
    "autocast": Kind(lambda: nn.Sequential(linear(), nn.Tanh(), linear()), loss=in_autocast,
                     convert=nn.Module.float, tolerance=1e-4),  # products have 8 bits
    "two_heads": Kind(lambda: heads(lambda p: p.step % 2)),
    "other_layers": Kind(lambda: heads(lambda p: p.replica), {3: "ZeRO-3: replica"}),
    "lazy": Kind(lambda: nn.Sequential(nn.LazyLinear(2)), all_say("0.weight has no values yet")),
    # Weights outside of their layer's forward
    "penalty": Kind(stack, FREED, loss=penalty),
    "reads_a_vector": Kind(lambda: reads_beside(read_gain, lambda: weight(WIDE)), FREED),
    "reads_a_scalar": Kind(lambda: reads_beside(read_gain, weight), FREED),
    "keeps_a_view": Kind(lambda: reads_beside(read_kept, lambda: weight(WIDE)),
                         {3: "is kept after the step by a view"}),
    "method_reads": Kind(stack, FREED, loss=lambda net, p: F.linear(
        net.layers(p.x), net.head.weight).square().mean()),
    "method_calls": Kind(stack, loss=lambda net, p: net.head(net.layers(p.x)).square().mean()),
    # Other forwards and backwards
    "gradient_penalty": Kind(stack, loss=gradient_penalty),
    "functional": Kind(stack, loss=functional),
    "by_torch_func": Kind(stack, {3: "inside of torch.func's transforms"}, loss=by_torch_func),
    "compiled": Kind(stack, wrapped=lambda net: net.compile(backend="aot_eager")),
    "several": Kind(tied, loss=several),
    "fails": Kind(tied, loss=fails),
    "evaluates": Kind(lambda: nn.Sequential(nn.Linear(WIDE, 200), nn.Linear(200, 2)),
                      wrapped=evaluate, after=evaluate),
    # Gradients: of hooks, by hand, dropped, frozen
    "post_accumulate": Kind(lambda: with_hooks(lambda net, param: net.seen.add(param)),
                            after=lambda net, step: net.seen.remove(net.head.weight)),
    "steps_in_backward": Kind(lambda: with_hooks(lambda net, param: setattr(param, "grad", None)),
                              all_say("a hook steps head.")),
    "sets_gradients": Kind(stack, all_say(" was set by hand"), before_gradients=set_gradients),
    "drops_a_step": Kind(stack, before_gradients=drop),
    "skips_a_step": Kind(stack, before_step=lambda net, step: step == 1),
    "drops_a_part": Kind(lambda: Made(
        lambda net, p: net.D(net.G(p.x).tanh()) + net.D(p.x), G=nn.Sequential(linear()),
        D=nn.Linear(WIDE, 1)), before_gradients=drop_a_part),
    "clips": Kind(stack, dict.fromkeys((1, 2, 3), MARK), before_step=lambda net, step:
                  nn.utils.clip_grad_norm_(net.head.parameters(), 1e-3) is None),
    "freezes": Kind(stack, wrapped=lambda net: net.layers.requires_grad_(False),
                    after=lambda net, step: net.layers.requires_grad_(step > 0)),
    "unfreezes": Kind(frozen, all_say("was frozen when the model was"),
                      after=lambda net, step: net.requires_grad_(True)),
    # Between two steps
    "converts": Kind(stack, all_say("the memory of|ZeRO-3: the weights of"),
                     wrapped=nn.Module.float, loss=lambda net, p: net.layers(p.x.float()).sum()),
    "grows": Kind(stack, all_say("more.weight is new"),
                  after=lambda net, step: setattr(net, "more", linear())),
    "averages": Kind(stack, FREED, after=average),
    "saves": Kind(stack, FREED, after=lambda net, step: net.state_dict()),
    "pickles": Kind(linear, all_say("save its state_dict|ZeRO-3: the weights of"),
                    loss=lambda net, p: net(p.x).sum(),
                    after=lambda net, step: torch.save(net, io.BytesIO())),
    "loads": Kind(stack, FREED, after=load),
    "norms": Kind(stack, FREED, after=lambda net, step: net.head.weight.norm()),
    "initializes": Kind(stack, FREED, after=lambda net, step: nn.init.ones_(net.head.weight)),
}

# ---- one process, and two ranks ----


def make(kind, seed=0):
    torch.manual_seed(seed)
    model = kind.make()
    kind.convert(model)
    return model


def part_of(step, replica, k):
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + k)
    return SimpleNamespace(
        ids=torch.randint(WORDS, (3, 5), generator=generator), step=step, replica=replica,
        x=torch.randn(3, WIDE, generator=generator, dtype=torch.double))


def backward(model, step, replica, D=RANKS, loss=loss_of):
    """The microbatches of a replica; a sum over all of these is the mean loss."""
    for k in range(MICROBATCHES):
        torch.manual_seed(1000 + 100 * step + 10 * replica + k)  # of dropout
        (loss(model, part_of(step, replica, k)) / (D * MICROBATCHES)).backward()


def take_gradients(reducer):
    for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
        weights.grad = grad


def whole_weights(reducer):
    return {tag.name: whole for tag, whole in reducer.whole()}


class Alone:
    """What train() calls of a reducer, for one process: each gradient is in its parameter."""

    def __init__(self, model, mesh):
        self.named = dict(model.named_parameters())
        self.weights = [*self.named.values()]
        self.tags = [SimpleNamespace(name=name) for name in self.named]
        self.starts = [0] * len(self.tags)

    def gradients(self):
        return [None if param.grad is None else param.grad.to_dense() for param in self.weights]

    def whole(self):
        return [(tag, param.detach()) for tag, param in zip(self.tags, self.weights, strict=True)]

    def publish(self):
        pass


def train(kind, reducer_class, replicas, D, mesh=None):
    """The loop, for these replicas. Returns {(step, name): (first element, gradient)}, {name:
    weights}, {replica: {name: buffer}}: each replica keeps its own buffers."""
    model = make(kind, replicas[0])  # a reducer gives every replica the values of replica 0
    reducer = reducer_class(model, mesh)
    kind.wrapped(model)
    optimizer = torch.optim.AdamW(reducer.weights, lr=0.01, weight_decay=0.1)
    buffers = dict.fromkeys(replicas, copy.deepcopy(dict(model.named_buffers())))
    grads = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in replicas:
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[replica][name])
            backward(model, step, replica, D, kind.loss)
            buffers[replica] = copy.deepcopy(dict(model.named_buffers()))
        if kind.before_gradients(model, optimizer, step):
            continue
        take_gradients(reducer)
        for weights, tag, start in zip(reducer.weights, reducer.tags, reducer.starts, strict=True):
            grad = weights.grad
            grads[step, tag.name] = start, grad if grad is None else grad.clone().flatten()
        if not kind.before_step(model, step):
            optimizer.step()
            reducer.publish()
        kind.after(model, step)
    weights = whole_weights(reducer)
    if reducer_class is not your_model.ZeRO3:  # each replica's model has the new weights
        named = dict(model.named_parameters())
        assert all(torch.equal(named[name], value) for name, value in weights.items())
    return grads, weights, buffers


def deviation(got, want):
    """Relative; nan where one of them is."""
    got, want = got.to(torch.cdouble), want.to(torch.cdouble)
    return 0.0 if want.numel() == 0 else ((got - want).norm() / (want.norm() + 1e-30)).item()


def deviations(got, want):
    """Of {name: tensor}."""
    return [deviation(tensor.detach(), want[name].detach()) for name, tensor in got.items()]


def cells(rank, name, D=RANKS):
    """[largest deviation from one process, or the text of the error] of the four stages."""
    kind = KINDS[name]
    want_grads, want, want_buffers = train(kind, Alone, range(D), D)
    found = []
    mesh = Mesh(dp=D, timeout=20)
    for stage in STAGES:
        try:
            grads, weights, buffers = train(kind, stage, [rank], D, mesh)
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
        else:
            worst = deviations(weights, want) + deviations(buffers[rank], want_buffers[rank])
            for place, (start, grad) in grads.items():
                _, whole = want_grads[place]
                assert (grad is None) == (whole is None), place
                if grad is not None:
                    worst.append(deviation(grad, whole[start : start + grad.numel()]))
            found.append(max(worst) if all(x == x for x in worst) else float("nan"))
        dist.barrier()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_module_equals_one_process_or_is_refused_in_one_line(name):
    kind = KINDS[name]
    for found in ranks(RANKS, cells, name):
        for stage, cell in enumerate(found):
            if stage in kind.lines:
                assert re.search(kind.lines[stage], str(cell)), found
            else:
                assert isinstance(cell, float) and cell < kind.tolerance, found


@pytest.mark.parametrize("name", ["odd_tensors", "lora", "checkpointed", "gradient_penalty"])
def test_three_replicas_equal_one_process(name):
    """Parameters have fewer elements than there are replicas, or as many as 3 does not divide."""
    for found in ranks(3, cells, name, 3):
        assert all(cell < 1e-10 for cell in found), found


# ---- mistakes: an error at the place ----


def words_of(rank, stage, mesh):
    """What a loop does, and mistakes in it, by a word."""
    model = make(STACK)
    reducer = stage(model, mesh)
    optimizer = torch.optim.AdamW(reducer.weights, lr=0.1)
    losses = []

    def change_saved():
        x = model.layers(part_of(0, rank, 0).x)
        y = model.head(x)
        x.detach().add_(1)
        y.sum().backward()

    def replace():
        model.head.weight = nn.Parameter(torch.ones(2, 4).double())

    return {
        "backward": lambda: backward(model, 0, rank),
        "backward-on-1": lambda: rank and backward(model, 0, rank),
        "forward": lambda: losses.append(loss_of(model, part_of(0, rank, 0))),
        "its-backward": lambda: losses[0].backward(),
        "evaluate": lambda: evaluate(model),
        "gradients": lambda: take_gradients(reducer),
        "step": optimizer.step,
        "step-on-0": lambda: rank or optimizer.step(),
        "step-the-model": lambda: torch.optim.AdamW(model.parameters()).step(),
        "publish": reducer.publish,
        "read": lambda: model.head.weight.grad.abs().max(),
        "drop-on-1": lambda: rank and model.zero_grad(),
        "clip-pieces": lambda: nn.utils.clip_grad_norm_(reducer.weights, 1.0),
        "change-saved": change_saved,
        "replace": replace,
        "wrap-again": lambda: stage(model, mesh),
        "wrap-another": lambda: stage(nn.Linear(2, 2 + rank), mesh),
        "wrap-max-norm": lambda: stage(nn.ModuleList([nn.Embedding(2, 2, max_norm=1.0)]), mesh),
    }


ALL = (0, 1, 2, 3)
MISTAKES = [  # (a loop, the stages in which it is wrong, what the error says)
    ("backward gradients step backward gradients", (1, 2, 3), "published: call reducer.publish"),
    ("backward gradients step evaluate", (1, 2, 3), "not published: call reducer.publish"),
    ("backward gradients publish backward step", ALL, "reducer.gradients"),
    ("backward gradients step-the-model publish", (1, 2, 3), "ZeRO"),
    ("backward gradients clip-pieces", (1, 2, 3), "ZeRO: a replica has pieces of gradients"),
    ("backward read", ALL, MARK),
    ("backward gradients step-on-0 publish", ALL, "publish.., weights stepped: "),
    ("backward-on-1 backward gradients", ALL, "elsewhere: all have the same model"),
    ("backward drop-on-1 gradients", (2, 3), "drop gradients"),
    ("wrap-again", ALL, "is in a model that was wrapped before"),
    ("wrap-another", ALL, "is at the start, with model"),
    ("wrap-max-norm", ALL, "0 changes its weights in forward"),
    ("replace backward gradients", ALL, ": head.weight is new"),
    ("forward backward gradients step publish its-backward", ALL, "inplace operation"),
    ("change-saved", ALL, "inplace operation"),
]


def errors(rank, words):
    """The text of the error in each of the four stages; "": there is none."""
    found = []
    mesh = Mesh(dp=RANKS, timeout=20)
    for stage in STAGES:
        found.append("")
        loop = words_of(rank, stage, mesh)
        try:
            for word in words.split():
                loop[word]()
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


# ---- two networks, bytes, a loop in nanoGPT's form, the loop of the page ----


def two_networks(rank, stage):
    """Deviations of a GAN of two networks, each with a reducer, from one process's."""
    def run(reducer_class, replicas, mesh=None):
        torch.manual_seed(0)
        G, D = linear().double(), nn.Sequential(nn.Linear(WIDE, 1)).double()
        reducers = {net: reducer_class(net, mesh) for net in (G, D)}
        optimizers = {net: torch.optim.AdamW(reducers[net].weights, lr=0.1) for net in (G, D)}
        losses = {D: lambda x: (D(x) - 1).square() + D(G(x).detach()).square(),
                  G: lambda x: (D(G(x)) - 1).square()}
        for step in range(STEPS):
            for net, loss in losses.items():
                net.zero_grad()
                D.requires_grad_(net is D or step < 2)
                for replica in replicas:
                    loss(part_of(step, replica, 0).x).mean().div(RANKS).backward()
                take_gradients(reducers[net])
                optimizers[net].step()
                reducers[net].publish()
        return whole_weights(reducers[G]) | whole_weights(reducers[D])

    return deviations(run(STAGES[stage], [rank], Mesh(dp=RANKS)), run(Alone, range(RANKS)))


def in_nanogpts_form(rank, stage):
    """Deviations of a loop with two groups of weight decay, a schedule, clipping, evaluation and a
    checkpoint after two steps, from which a second run goes on."""
    def run(reducer_class, replicas, steps, mesh=None, checkpoint=None):
        model = make(KINDS["tied"])
        model.load_state_dict(checkpoint["model"] if checkpoint else {}, strict=False)  # tied
        reducer = reducer_class(model, mesh)
        decayed = [name == "weight" for name in [tag.name.split(".")[-1] for tag in reducer.tags]]
        optimizer = torch.optim.AdamW(
            [{"params": [weights for weights, is_decayed in zip(reducer.weights, decayed,
                                                                strict=True) if is_decayed is one],
              "weight_decay": 0.1 * one} for one in (True, False)], betas=(0.9, 0.95))
        if checkpoint:
            optimizer.load_state_dict(checkpoint["optimizer"])
        found = {}
        for step in steps:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            for replica in replicas:
                backward(model, step, replica)
            take_gradients(reducer)
            if mesh:
                norm = reducer.clip_grad_norm_(0.1)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            reducer.publish()
            optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                found |= {f"norm {step}": norm, f"loss {step}": loss_of(model, part_of(9, 0, 0))}
        checkpoint = {"model": whole_weights(reducer), "optimizer": optimizer.state_dict()}
        return found | checkpoint["model"], checkpoint

    want, _ = run(Alone, range(RANKS), range(4))
    mesh = Mesh(dp=RANKS)
    _, checkpoint = run(STAGES[stage], [rank], range(2), mesh)
    got, _ = run(STAGES[stage], [rank], range(2, 4), mesh, copy.deepcopy(checkpoint))
    return deviations(got, want)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("loop", [two_networks, in_nanogpts_form])
def test_loops_of_others_equal_one_process(loop, stage):
    assert max(map(max, ranks(RANKS, loop, stage))) < 1e-10


def held_and_sent(rank):
    """(most Flats that are whole at a time, bytes of weights between steps, elements of gathers and
    of reductions, elements of the model) of a step of four layers under ZeRO-3."""
    model = nn.Sequential(*[linear() for _ in range(4)]).double()
    mesh = Mesh(dp=RANKS)
    reducer = your_model.ZeRO3(model, mesh)
    most = []
    with patch.object(reducer, "make_whole", lambda flat: (
            your_model.ZeRO3.make_whole(reducer, flat), most.append(len(reducer.gathers)))):
        before = [mesh.groups[name].bytes_sent for name in ("shard", "dp")]
        loss_of(model, part_of(0, rank, 0)).backward()
    gathers, sums = (mesh.groups[name].bytes_sent - sent
                     for name, sent in zip(("shard", "dp"), before, strict=True))
    held = sum(param.untyped_storage().nbytes() for param in model.parameters())
    return max(most), held, gathers / 8, sums / 8, sum(param.numel() for param in reducer.params)


def test_zero3_has_one_layer_whole_at_a_time_and_sends_three_times_the_model():
    for most, held, gathers, sums, psi in ranks(RANKS, held_and_sent):
        assert most == 1 and held == 0
        # In forward and backward. The first of the four layers reads no weights in backward,
        # because its input needs no gradient. And a number with each message
        assert psi / 2 * 7 / 4 <= gathers <= psi / 2 * 7 / 4 + 10
        assert sums == psi / 2


def loop_of_page(rank, name):
    """Deviations of the weights that the loop of docs/your-model.md trains, under this class."""
    def batches(replica):
        return [(part_of(step, replica, 0).x, None) for step in range(STEPS)]

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
    return deviations(whole_weights(names["reducer"]), dict(alone.named_parameters()))


@pytest.mark.parametrize("name", ["ZeRO3", "ZeRO2", "ZeRO1", "DDP"])
def test_the_loop_of_the_page_trains(name):
    assert max(map(max, ranks(RANKS, loop_of_page, name))) < 1e-10
