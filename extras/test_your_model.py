"""Models of your own under DDP, ZeRO-1, 2 and 3: what one process computes, or one line.

A table of modules as people write them, of loops, and of mistakes. In a loop: two replicas, three
steps of two microbatches, two groups of AdamW, a learning rate that falls, clipping. Raw gradients,
norm and weights equal one process's to 1e-10 in float64 in each stage or, where the table says so,
an error says what to do. Then loops of other forms, and what ZeRO-3 sends and holds."""

import copy
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
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import clip_grad_norm_, parametrize
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


def weight(*shape):
    return nn.Parameter(torch.randn(shape))


def linear():
    return nn.Linear(WIDE, WIDE)


def layers(count, forward, **makers):
    """A Sequential of layers, each of parts that the makers make."""
    return nn.Sequential(*(Made(forward, **{name: make() for name, make in makers.items()})
                           for _ in range(count)))


def stack():
    """The module of most loops."""
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


def in_any_order():
    """Layers that call themselves, in an order by Python's random numbers, one of them twice, some
    never; two share a weight. Asks for a layer's class."""
    def of_layer(layer, x, depth=2):
        x = layer.linear(x).tanh() * random.random()
        return layer(x, depth - 1) if depth else x

    def forward(net, p):
        random.seed(p.step)
        x = p.x
        for layer in random.choices(net.layers, k=5):
            assert isinstance(layer.linear, nn.Linear)
            x = x + layer(x)
        return x

    net = Made(forward, layers=layers(4, of_layer, linear=linear))
    net.layers[1].linear.weight = net.layers[2].linear.weight
    return net


def convolutions():
    """channels_last, BatchNorm, an activation in place."""
    net = nn.Sequential(nn.Linear(WIDE, 48), nn.Unflatten(1, (3, 4, 4)),
                        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4),
                        nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
    return net.to(memory_format=torch.channels_last)


def odd():
    """Lists in lists; a parameter transposed, of 0 dims, of no elements, of integers; buffers."""
    def forward(net, p):
        x = net.lists["deep"][0][0](net.lists["wte"](p.ids)) @ net.weights[0] * net.weights[1]
        return net.mask * net.noise * x + net.weights[2].sum()

    lists = nn.ModuleDict({"wte": nn.Embedding(WORDS, WIDE, padding_idx=2),
                           "deep": nn.ModuleList([nn.ModuleList([linear()]), nn.ModuleList()])})
    integers = nn.Parameter(torch.arange(4), requires_grad=False)
    net = Made(forward, lists=lists, weights=nn.ParameterList(
        [nn.Parameter(torch.randn(4, WIDE).t()), weight(), weight(0, 3), integers]))
    net.register_buffer("noise", torch.randn(4))
    net.register_buffer("mask", torch.ones(4, 4).tril()[2] > 0)
    return net


def structures():
    """Layers take keywords and a cache, return a dict with None and their weight, and leave a loss
    in an attribute. One of their experts may have no tokens."""
    def of_layer(layer, x, *, cache):
        cache.append(layer.key(x))
        scores = (x @ layer.router).softmax(-1)
        layer.balance = (layer.router * scores.mean(0)).square().sum()
        for i, expert in enumerate(layer.experts):
            rows = (scores.argmax(-1) == i).nonzero().flatten()
            x = x.index_add(0, rows, expert(x[rows]) * scores[rows, i, None])
        return {"x": x @ torch.cat(cache).t(), "no": None, "w": layer.key.weight.t()}

    def forward(net, p):
        x, cache = p.x, []
        for layer in net.layers:
            out = layer(x, cache=cache)
            x = out["x"].softmax(-1) @ torch.cat(cache) @ out["w"]
        return x + net.layers[0].balance

    return Made(forward, layers=layers(
        2, of_layer, key=linear, router=lambda: weight(WIDE, WIDE),
        experts=lambda: nn.ModuleList([linear() for _ in range(WIDE)])))


def lora():
    """Fine-tuning: embedding and first block are frozen, the second has adapters."""
    net = tied()
    net.requires_grad_(False)
    low = Made(lambda low, weight: weight + low.a @ low.b, a=weight(WIDE, 2), b=weight(2, WIDE))
    parametrize.register_parametrization(net.blocks[1], "weight", low)
    return net


def hooked():
    """Hooks on layers, on the model, on a backward, on a parameter. Two of them read weights."""
    net = tied()
    first, second = net.blocks
    first.register_forward_pre_hook(lambda layer, args: (args[0] * layer.weight.mean(),))
    first.register_full_backward_hook(lambda layer, into, out: (2 * into[0],))
    second.register_forward_hook(lambda layer, args, out: out * layer.weight.mean())
    net.register_forward_hook(lambda layer, args, out: out * 2)
    net.wte.weight.register_hook(lambda grad: 2 * grad)
    return net


def checkpointed(reentrant=False):
    """Activation checkpointing of one's own, with dropout: of a layer, of two, of a layer's part.
    Hooks of one's own on what autograd saves."""
    def of_layer(layer, x):
        part = checkpoint(lambda x: layer.gain * layer.inner(x), x, use_reentrant=reentrant)
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return layer.gain * layer.linear(x) + part

    def forward(net, p):
        x = p.x.clone().requires_grad_()
        for layer in net.layers:
            y = checkpoint(layer, x, use_reentrant=reentrant)
            x = x + F.dropout(y.tanh(), 0.3)
        return checkpoint(net.layers[1:3], x, use_reentrant=reentrant)

    return Made(forward, layers=layers(4, of_layer, linear=linear, inner=linear, gain=weight))


def uneven(choose):
    """Replica 0 alone uses a weight of each layer. One of two heads is used, a module never."""
    def forward(net, p):
        x = p.x
        for layer in net.layers:
            x = layer(x, p.replica == 0)
        return net.heads[choose(p)](x)

    return Made(forward, heads=nn.ModuleList([linear(), linear()]), never=linear(), layers=layers(
        3, lambda layer, x, scales: layer.linear(x * layer.scale if scales else x).tanh(),
        linear=linear, scale=lambda: weight(WIDE)))


# ---- what a loop does ----


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


def in_autocast(model, p):
    with torch.autocast("cpu", torch.bfloat16):
        return model(p.x.float()).square().mean()


def several(model, p):
    """Two forwards and evaluations before a backward; another backward of the same graph; a part of
    the model alone."""
    loss = loss_of(model, p) * loss_of(model, part_of(7, p.replica, 0))
    for without_gradient in (torch.inference_mode, torch.no_grad):
        with without_gradient():
            loss_of(model, part_of(9, 0, 0))
    (loss / 8).backward(retain_graph=True)
    return loss + model.blocks[p.step % 2](p.x).square().mean()


def tried_again(model, p):
    """A layer raises an error, such as of a full memory."""
    failing = patch.object(model.layers[2], "forward", side_effect=MemoryError)
    with failing, pytest.raises(MemoryError):
        loss_of(model, p)
    return loss_of(model, p)


def clip_the_model(model, *loop):
    clip_grad_norm_(model.parameters(), 1e-3)


def average(model, step):
    assert torch.equal(copy.deepcopy(model)(part_of(9, 0, 0)), model(part_of(9, 0, 0)))


def save_and_load(model, step):
    model.load_state_dict({name: param + 1 for name, param in model.state_dict().items()})


def nothing(*loop):
    """What a loop does here, but for the rows that say something else."""


@dataclass
class Row:
    make: Callable  # makes a module
    lines: dict = field(default_factory=dict)  # {stage: what its error says}. Else: equal
    convert: Callable = nn.Module.double
    wrapped: Callable = nothing  # when the reducer was made; in one process at the same place
    loss: Callable = loss_of  # gives the loss of a microbatch
    before_gradients: Callable = nothing  # after backward
    before_step: Callable = nothing  # after gradients()
    steps: Callable = lambda step: True  # does this replica step?
    publishes: bool = True
    after: Callable = nothing  # after a step
    resumes: bool = False  # in each step from the checkpoint of the step before
    tolerance: float = 1e-10  # in float64


def says(stages, line):
    return dict.fromkeys(stages, line)


ALL, ZERO, ZERO_3 = range(4), (1, 2, 3), (3,)
FREED = "the weights of .* are freed"
MARK = f"the gradient of .* is in the reducer|{FREED}"
MODULES = (stack, tied, in_any_order, convolutions, odd, structures, lora, hooked, checkpointed)
TABLE = {make.__name__: Row(make) for make in MODULES} | {
    # Attention reads weights of a module inside
    "transformer": Row(lambda: nn.Sequential(
        nn.Linear(WIDE, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3))),
    "lstm": Row(lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.LSTM(2, 5, num_layers=2))),
    "reentrant": Row(lambda: checkpointed(reentrant=True)),
    "other_weights": Row(lambda: uneven(lambda p: p.step % 2)),
    "other_layers": Row(lambda: uneven(lambda p: p.replica), says(ZERO_3, "is at .* elsewhere")),
    "two_dtypes": Row(
        lambda: layers(2, lambda layer, x: layer.linear(x) * layer.gate(x.float()).double(),
                       linear=linear, gate=linear), tolerance=1e-5,  # a part has 32 bits
        convert=lambda net: [layer.linear.double() for layer in net]),
    "autocast": Row(lambda: nn.Sequential(linear(), nn.Tanh(), linear()), loss=in_autocast,
                    convert=nn.Module.float, tolerance=1e-4),  # products have 8 bits
    # Forwards and backwards
    "penalty": Row(stack, says(ZERO_3, FREED), loss=penalty),
    "gradient_penalty": Row(stack, loss=gradient_penalty),
    "compiled": Row(stack, wrapped=lambda net: net.compile(backend="aot_eager")),
    "several": Row(tied, loss=several),
    "tried_again": Row(stack, loss=tried_again),
    # Gradients and steps
    "skips_a_step": Row(stack, steps=lambda step: step != 1),
    "freezes_for_a_step": Row(stack, after=lambda net, step: net.head.requires_grad_(step > 0)),
    "unfreezes": Row(lora, says(ALL, "was frozen when the model was"),
                     after=lambda net, step: net.requires_grad_(True)),
    "clips_the_model": Row(stack, says(ZERO, MARK), before_step=clip_the_model),
    "clips_too_early": Row(stack, says(ALL, MARK), before_gradients=clip_the_model),
    "clips_pieces": Row(
        stack, says(ZERO, "clip by reducer.clip"), before_step=lambda net, optimizer:
        clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)),
    "steps_on_one": Row(stack, says(ALL, "weights stepped: .* elsewhere"),
                        steps=lambda step: dist.get_rank()),
    "forgets_publish": Row(stack, says(ZERO, "call reducer.publish"), publishes=False),
    # Weights
    "converts": Row(stack, says(ALL, f"the memory of .* was replaced|{FREED}"),
                    wrapped=nn.Module.float, loss=lambda net, p: net.layers(p.x.float()).sum()),
    "averages": Row(stack, says(ZERO_3, FREED), after=average),
    "saves_and_loads": Row(stack, says(ZERO_3, FREED), after=save_and_load),
    "resumes": Row(stack, resumes=True),
}

# ---- one process, and several replicas ----


def part_of(step, replica, k):
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + k)
    return SimpleNamespace(
        ids=torch.randint(WORDS, (3, 5), generator=generator), step=step, replica=replica,
        x=torch.randn(3, WIDE, generator=generator, dtype=torch.double))


def take_gradients(reducer):
    for weights, grad in zip(reducer.weights, reducer.gradients(), strict=True):
        weights.grad = grad


def whole_weights(reducer):
    return {tag.name: whole for tag, whole in reducer.whole()}


def alone(model, mesh=None):
    """What a loop calls of a reducer, for one process: each gradient is in its parameter."""
    names, params = zip(*model.named_parameters(), strict=True)
    tags = [SimpleNamespace(name=name) for name in names]
    return SimpleNamespace(
        weights=params, tags=tags, starts=[0] * len(tags), publish=nothing,
        gradients=lambda: [param.grad for param in params],
        clip_grad_norm_=lambda max_norm: clip_grad_norm_(params, max_norm),
        whole=lambda: [(tag, param.detach()) for tag, param in zip(tags, params, strict=True)])


def start(row, reducer_class, seed, mesh, saved=None):
    """A model, its reducer and optimizer: new, or from a checkpoint."""
    torch.manual_seed(seed)
    model = row.make()
    row.convert(model)
    if saved:
        model.load_state_dict(saved["model"])
    reducer = reducer_class(model, mesh)
    row.wrapped(model)
    groups = {0.1: [], 0.0: []}  # by weight decay
    for tag, weights in zip(reducer.tags, reducer.weights, strict=True):
        groups[0.1 if tag.name.endswith("weight") else 0.0].append(weights)
    optimizer = torch.optim.AdamW([{"params": group, "weight_decay": decay}
                                   for decay, group in groups.items()])
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    return model, reducer, optimizer


def train(row, reducer_class, replicas, D, mesh=None):
    """The loop, for these replicas. Returns ({what: numbers}, {what: index of their first one})."""
    seed = replicas[0]  # a reducer gives every replica the values of replica 0
    model, reducer, optimizer = start(row, reducer_class, seed, mesh)
    found, starts = {}, {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        for replica in replicas:
            for k in range(MICROBATCHES):
                torch.manual_seed(1000 + 100 * step + 10 * replica + k)  # dropout's seed
                (row.loss(model, part_of(step, replica, k)) / (D * MICROBATCHES)).backward()
        row.before_gradients(model)
        take_gradients(reducer)
        for weights, tag, first in zip(reducer.weights, reducer.tags, reducer.starts, strict=True):
            found[step, tag.name] = None if weights.grad is None else weights.grad.clone()
            starts[step, tag.name] = first
        found[step, "norm"] = reducer.clip_grad_norm_(0.01)
        row.before_step(model, optimizer)
        if row.steps(step):
            optimizer.step()
        if row.publishes:
            reducer.publish()
        row.after(model, step)
        if row.resumes:
            saved = {"model": whole_weights(reducer), "optimizer": optimizer.state_dict()}
            model, reducer, optimizer = start(row, reducer_class, seed, mesh, copy.deepcopy(saved))
    if reducer_class is not your_model.ZeRO3:  # each replica's model has the new weights
        found |= {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    return found | whole_weights(reducer), starts


def difference(found, want, starts):
    """The largest relative one; nan if there is one."""
    errors = []
    for what, got in found.items():
        assert (got is None) == (want[what] is None), what
        if got is not None:
            first = starts.get(what, 0)
            part = want[what].flatten()[first : first + got.numel()]
            errors.append((got.flatten() - part).double().norm() / (part.double().norm() + 1e-30))
    return torch.stack(errors).max().item()


def cells(rank, name, D):
    """[largest difference from one process, or the text of the error] of the four stages."""
    row = TABLE[name]
    want, _ = train(row, alone, range(D), D)
    want |= {f"model.{key}": value for key, value in want.items()}
    mesh = Mesh(dp=D, timeout=20)
    answers = []
    for stage in STAGES:
        try:
            found, starts = train(row, stage, [rank], D, mesh)
            answers.append(difference(found, want, starts))
        except RuntimeError as error:
            answers.append(str(error))
        dist.barrier()
    return answers


# With three replicas: parameters have fewer elements, or a number that 3 does not divide
@pytest.mark.parametrize("name,D", [(name, RANKS) for name in TABLE] + [("odd", 3), ("lora", 3)])
def test_a_row_equals_one_process_or_is_an_error_of_one_line(name, D):
    row = TABLE[name]
    for answers in ranks(D, cells, name, D):
        for stage, answer in enumerate(answers):
            if stage in row.lines:
                assert re.search(row.lines[stage], str(answer)) and "\n" not in answer, answers
            else:
                assert isinstance(answer, float) and answer < row.tolerance, answers


# ---- loops of other forms ----


def two_networks(rank, stage):
    """A GAN of two networks, each with a reducer. D drops what the loss of G has left in it."""
    def run(reducer_class, replicas, mesh=None):
        torch.manual_seed(0)
        G, D = linear().double(), nn.Sequential(nn.Linear(WIDE, 1)).double()
        losses = {D: lambda x: (D(x) - 1).square() + D(G(x).detach()).square(),
                  G: lambda x: (D(G(x)) - 1).square()}
        reducers = {net: reducer_class(net, mesh) for net in losses}
        optimizers = {net: torch.optim.AdamW(reducers[net].weights, lr=0.1) for net in losses}
        for step in range(STEPS):
            for net, loss in losses.items():
                (optimizers[net] if step == 1 else net).zero_grad()
                D.requires_grad_(net is D or step < 2)
                for replica in replicas:
                    loss(part_of(step, replica, 0).x).mean().div(RANKS).backward()
                take_gradients(reducers[net])
                optimizers[net].step()
                reducers[net].publish()
        return whole_weights(reducers[G]) | whole_weights(reducers[D])

    return run(STAGES[stage], [rank], Mesh(dp=RANKS)), run(alone, range(RANKS))


def loop_of_the_page(rank, stage):
    """The loop of docs/your-model.md, with another class. Also: a BatchNorm keeps the statistics of
    its own replica, from those with which replica 0 began."""
    def batches(replica):
        return [(part_of(step, replica, 0).x, None) for step in range(STEPS)]

    def net(seed):
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(WIDE)
        norm.running_mean.fill_(seed)
        return nn.Sequential(norm, nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    page = (HERE / "docs/your-model.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    names = {"make_model": lambda: net(rank), "batches": batches,
             "loss_of": lambda out, y: out.square().mean()}
    with patch("torch.distributed.init_process_group"):
        exec(code.replace("ZeRO3", STAGES[stage].__name__), names)
    model, norm = net(0), net(0)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parts in zip(*map(batches, range(RANKS)), strict=True):
        optimizer.zero_grad()
        sum(model(x).square().mean() / RANKS for x, _ in parts).backward()
        optimizer.step()
        norm(parts[rank][0])
    return (whole_weights(names["reducer"]) | dict(names["model"][0].named_buffers()),
            dict(model.named_parameters()) | dict(norm.named_buffers()))


@pytest.mark.parametrize("stage", ALL)
@pytest.mark.parametrize("loop", [two_networks, loop_of_the_page])
def test_a_loop_equals_one_process(loop, stage):
    for found, want in ranks(RANKS, loop, stage):
        assert difference(found, want, {}) < 1e-10


# ---- what ZeRO-3 sends and holds ----


def sent_and_held(rank, D):
    """(elements sent, most Flats with whole weights and with whole gradients at a time, bytes of
    weights between steps) of backwards of four layers, with a weight around them."""
    def forward(net, p):
        x = p.x * net.around
        for layer in net.layers:
            x = layer(x.tanh())
        return x

    def make_whole(flat):
        your_model.ZeRO3.make_whole(reducer, flat)
        weights.append(len(reducer.gathers))
        grads.append(sum(flat.grads is not None for flat in reducer.trained_flats))

    weights, grads = [], []
    layers = nn.ModuleList([linear() for _ in range(4)])
    model = Made(forward, layers=layers, around=weight(WIDE)).double()
    mesh = Mesh(dp=D)
    reducer = your_model.ZeRO3(model, mesh)
    groups = mesh.group("shard"), mesh.group("dp")
    before = sum(group.bytes_sent for group in groups)
    with patch.object(reducer, "make_whole", make_whole):
        for k in range(MICROBATCHES):
            loss_of(model, part_of(0, rank, k)).backward()
    sent = (sum(group.bytes_sent for group in groups) - before) // 8
    held = sum(param.untyped_storage().nbytes() for param in model.parameters())
    return sent, max(weights), max(grads), held


@pytest.mark.parametrize("D", [RANKS, 3])
def test_zero3_sends_what_the_formula_says_and_holds_two_layers(D):
    elements = 4 * (WIDE + 1) * WIDE + WIDE
    gathers = MICROBATCHES * 2 * 5  # each begins with an all-reduce of three numbers
    sent = (3 * MICROBATCHES * elements + 2 * 3 * gathers) * (D - 1) // D
    assert ranks(D, sent_and_held, D) == [(sent, 2, 1, 0)] * D
