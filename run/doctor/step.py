"""One step of a run, computed again in one process: loss and gradients, taken apart into terms.

Threads (threads.py) are the C context and T tensor ranks of the run's layout, and run the root's
plain forms. Data ranks and microbatches follow one after the other, because nothing but a sum ties
them. So each gradient is known as a sum of terms, one for each (data rank, microbatch, context
rank, tensor rank); the embedding's and the head's terms of a tied matrix are apart, too. A bug that
leaves out or weighs terms (not summed over the data ranks, the last microbatch only) is a sum of
the same terms with other weights. Any other bug is run: the forms are changed, then the step is
computed once more (causes.py).
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from collectives import all_reduce
from context_parallel import all_to_all_attention, ring_attention, split_sequences
from experts import MixtureOfExperts, balance_loss, kind_of
from model import ABSENT, UNTIED
from run.doctor.threads import World
from sequence_parallel import gather_tokens, positions_of_own_tokens, scatter_tokens
from shard import tag_replicated, tag_whole
from tensor_parallel import (
    Column,
    Row,
    VocabularyEmbedding,
    copy_to_ranks,
    sum_over_ranks,
    vocabulary_loss,
)

EMBEDDING = "transformer.wte.weight"
# Elements of a tensor that are compared while causes are tried. Of a longer tensor, as many evenly
# spaced ones. (Whether a run is right at all, all elements say.)
SAMPLED = 1 << 16


def sampled(tensor):
    flat = tensor.flatten()
    return flat[:: -(-flat.numel() // SAMPLED)]


@dataclass
class Terms:
    """What a step computes, before any sum over ranks and microbatches.

    losses     (D, m, C, T): sums over the tokens of a microbatch that a context rank has. The T
               tensor ranks have the same, but where a bug makes them differ
    gradients  {name: (D, m, C, R, n)} of the summed loss: n sampled elements of the full tensor.
               R = 1 for a tensor that is split over the tensor ranks; else R = T: copies of a
               replicated tensor's gradient or, where they see different tokens, terms of it
    is_summed  {name: are the R ones terms?}
    full       {name: the full gradient}: all terms, summed one after the other
    tokens     (D, m): tokens that count
    positions  number of tokens, padding too
    divisor    what the loss is divided by: all tokens or, if it is a sum, 1
    tied       are embedding and head one matrix, whose terms are apart here?
    """
    losses: torch.Tensor
    gradients: dict
    is_summed: dict
    full: dict
    tokens: torch.Tensor
    positions: int
    divisor: int
    tied: bool

    def loss(self):
        """The loss that a run prints: the mean over the T ranks (train.py)."""
        return self.losses.mean(-1).sum().item() / self.divisor


@dataclass
class Change:
    """A bug that is run: another line in the plain forms."""
    words: str
    before: object = None  # before(model): changes the whole model
    after: object = None  # after(model, mesh): changes a rank's part of it
    forward: bool = True  # does the loss change, too?
    by_microbatch: bool = False  # does the change depend on what a microbatch is?
    feed: object = None  # feed(ids, targets, k, mesh, positions): in the place of step.own_tokens


def split_but_experts(model, group, f, g):
    """Like tensor_parallel.split_layers, but experts stay whole on each rank."""
    embedding, *blocks, head = model.layers
    embedding.wte = VocabularyEmbedding(embedding.wte, group, g)
    for block in blocks:
        block.attn.c_attn = Column(block.attn.c_attn, group, f, block.attn.parts)
        block.attn.c_proj = Row(block.attn.c_proj, group, g)
        if not isinstance(block.mlp, MixtureOfExperts):
            block.mlp.c_fc = Column(block.mlp.c_fc, group, f, block.mlp.parts)
            block.mlp.c_proj = Row(block.mlp.c_proj, group, g)
    head.lm_head = Column(head.lm_head, group, f)
    head.loss = partial(vocabulary_loss, words=embedding.wte.words, group=group)


def tag_experts(model, E, mesh):
    """A run spreads whole experts over the T ranks; here all T compute all of them. So that the
    gradient of an expert is that of its own rank, the others' is zero, and the T are summed."""
    group = mesh.group("tp")
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts) and group.size > 1:
            is_own = served(layer.n_experts, E, group.size, group.rank)
            for param in layer.experts.parameters():
                others = ~is_own.view(-1, *[1] * (param.dim() - 1))
                param.register_hook(partial(torch.masked_fill, mask=others, value=0.0))
                param.shard = replace(param.shard, sum_over=(*param.shard.sum_over, group))


def served(n_experts, E, T, t):
    """(n_experts,) bool: which experts tensor rank t has. E x T ranks share them: for E = 2, T = 2
    and 8 experts the ranks with t = 0 have 0 1 4 5."""
    owners = torch.arange(n_experts).view(E, T, -1)
    found = torch.zeros(n_experts, dtype=torch.bool)
    found[owners[:, t].flatten()] = True
    return found


class SimulatedStep:
    """A step of a run: the sizes, and what went into it. run() computes it."""

    def __init__(self, config, layout, balance, weights, ids, targets, is_mean=True):
        """config: GPTConfig or LlamaConfig; layout: the dict of a dump; balance: weight of the
        experts' balance loss; weights {name: full tensor}; ids, targets (D, m, B, S); is_mean: the
        loss is a mean over all tokens, not a sum."""
        self.config = config
        self.layout = layout
        self.balance = balance
        self.weights = weights
        self.ids = ids
        self.targets = targets
        self.is_mean = is_mean
        self.sizes = {"cp": layout["cp"], "tp": layout["tp"]}

    def whole_model(self, dtype):
        """The model with these weights. A tied matrix is two parameters here."""
        model = kind_of(self.config)(self.config).to(dtype)
        model.layers[-1].lm_head.weight = torch.nn.Parameter(model.layers[0].wte.weight.clone())
        for name, param in model.canonical_parameters():
            param.data.copy_(self.weights[self.stored(name)])
        return model

    def stored(self, name):
        """The name of the tensor in the run's files: a tied head is the embedding's matrix."""
        return EMBEDDING if name not in self.weights else name

    def parallel(self, model, mesh):
        """Split a whole model as the run's layout says. Returns this rank's positions."""
        context, tensor = mesh.group("cp"), mesh.group("tp")
        ring = self.layout["cp_attention"] == "ring"
        sp = self.layout["sp"] and tensor.size > 1
        tag_whole(model, data=context)
        positions = split_sequences(model, context,
                                    ring_attention if ring else all_to_all_attention)
        f, g = (gather_tokens, scatter_tokens) if sp else (copy_to_ranks, sum_over_ranks)
        split_but_experts(model, tensor, f, g)
        tag_replicated(model, tensor, sum_gradients=sp)
        tag_experts(model, self.layout["ep"], mesh)
        if sp:
            positions_of_own_tokens(model, tensor)
        sharing = mesh.group("cp", "tp") if sp else context  # ranks that share a sequence
        for layer in model.modules():
            if isinstance(layer, MixtureOfExperts):
                layer.balance_weight = self.balance
                layer.sum_counts = partial(all_reduce, group=sharing)
        return positions

    def tags(self):
        """[{name: tag}] of each tensor rank: which slice it holds."""
        def rank(mesh):
            model = self.whole_model(torch.double)
            self.parallel(model, mesh)
            return {param.shard.name: param.shard for param in model.parameters()}
        return World({"cp": 1, "tp": self.layout["tp"]}).run(rank)

    def merged(self):
        """The same step with all sequences in one microbatch of one data rank: sooner computed."""
        tokens = [part.flatten(0, 2)[None, None] for part in (self.ids, self.targets)]
        return SimulatedStep(self.config, self.layout, self.balance, self.weights, *tokens,
                             self.is_mean)

    def run(self, cause=None, dtype=torch.double, grad_dtype=torch.double, scale=1.0,
            losses_only=False):
        """The Terms of the step, computed in this dtype and summed in grad_dtype. cause: what to do
        otherwise (causes.py). scale: the loss is multiplied by it, the gradients divided by it.
        losses_only: forward only, no gradients."""
        boards = {}  # name -> (C, R, full shape): the gradients of one microbatch
        is_summed = {}
        D, m, B, _ = self.ids.shape
        world = World(self.sizes)
        C, T = self.sizes.values()
        losses = torch.zeros(D, m, C, T, dtype=torch.double)
        found = {}  # name -> its sampled gradients, by microbatch
        full = {}

        def rank(mesh):
            torch.set_grad_enabled(not losses_only)  # of this thread
            model = self.whole_model(dtype)
            if cause and cause.before:
                cause.before(model)
            positions = self.parallel(model, mesh)
            own = partial(own_tokens, positions=positions)
            if cause and cause.after:
                cause.after(model, mesh)
            if cause and cause.feed:
                own = partial(cause.feed, mesh=mesh, positions=positions)
            c, t = mesh.group("cp").rank, mesh.group("tp").rank
            if mesh.rank == 0:
                for param in model.parameters():
                    tag = param.shard
                    R = 1 if param.shape != tag.shape else T
                    boards[tag.name] = torch.zeros(C, R, *tag.shape, dtype=torch.double)
                    is_summed[tag.name] = len(tag.sum_over) > 1
            world.barrier.wait()
            for d in range(D):
                for k in range(m):
                    loss = model(*own(self.ids[d], self.targets[d], k))
                    balance = balance_loss(model.layers)
                    losses[d, k, c, t] = loss.item() - (0 if balance is None else balance.item())
                    if losses_only:
                        continue
                    (loss * scale).backward()
                    for param in model.parameters():
                        tag = param.shard
                        grad = 0 if param.grad is None else param.grad.double() / scale
                        if param.shape == tag.shape:
                            board = boards[tag.name][c, min(t, len(boards[tag.name][c]) - 1)]
                            board.copy_(torch.as_tensor(grad))
                        else:
                            put_slice(boards[tag.name][c, 0], tag, grad)
                        param.grad = None
                    world.barrier.wait()
                    if mesh.rank == 0:
                        for name, board in boards.items():
                            copies = [[sampled(copy) for copy in copies] for copies in board]
                            found.setdefault(name, []).append(
                                torch.stack([torch.stack(row) for row in copies]))
                            add_up(full, self.stored(name), board, is_summed[name], grad_dtype)
                    world.barrier.wait()

        world.run(rank)
        gradients = {name: torch.stack(rows).unflatten(0, (D, m)) for name, rows in found.items()}
        tokens = (self.targets != ABSENT).sum((-1, -2))
        divisor = tokens.sum().item() if self.is_mean else 1
        return Terms(losses, gradients, is_summed, full, tokens, self.targets.numel(), divisor,
                     tied=UNTIED not in self.weights)


def add_up(full, name, board, is_summed, dtype):
    """Add the terms of a microbatch to full[name]. board: (C, R, full shape). Like a run, round to
    dtype after each sum."""
    for copies in board:
        for term in copies if is_summed else copies[:1]:
            before = full.get(name, torch.zeros_like(term))
            full[name] = (before + term).to(dtype).double()


def own_tokens(ids, targets, k, positions):
    """(ids, targets) that this rank is fed as microbatch k. ids, targets: (m, B, S)."""
    return ids[k][:, positions], targets[k][:, positions]


def put_slice(full, tag, values):
    """Copy a rank's slice to its place in the full tensor."""
    begin = 0
    for start, stop in tag.ranges:
        length = stop - start
        part = values if isinstance(values, int) else values.narrow(tag.dim, begin, length)
        full.narrow(tag.dim, start, length).copy_(torch.as_tensor(part))
        begin += length
