"""One step of a run, computed again in one process: loss and gradients, taken apart into terms.

The N context and T tensor ranks of the run's layout are threads (threads.py), which run the root's
plain forms. Data ranks and microbatches follow one after the other, because nothing but a sum ties
them. So each gradient is known as a sum of terms, one for each (data rank, microbatch, context
rank, tensor rank); a tied matrix's terms from the embedding and from the head are apart, too.

    a Share (shares.py)    a bug that leaves out terms or weighs them, such as "not summed over the
                           data ranks": other weights for the same terms; nothing is run again
    a Change (changes/)    any other bug: a line of the forms is changed, and the step is run again

Held: the weights in float64; N x T models, each whole until it is split; one microbatch's gradients
of all N x T ranks; at most SAMPLED elements of each tensor for each term; one sum of full size.
Pipeline ranks and ZeRO change no number: they are left out.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from collectives import all_reduce
from context_parallel import split_sequences
from experts import MixtureOfExperts, balance_loss, kind_of
from extras.doctor.threads import World
from model import ABSENT, UNTIED
from sequence_parallel import gather_tokens, positions_of_own_tokens, scatter_tokens
from shard import tag_replicated, tag_whole
from tensor_parallel import copy_to_ranks, split_layers, sum_over_ranks

EMBEDDING = "transformer.wte.weight"
# While causes are tried, at most so many elements of a tensor are compared. (Whether MINE's tensor
# differs at all is asked of all its elements.)
SAMPLED = 1 << 16


def sampled(tensor):
    """(n,): all elements or, of a tensor longer than SAMPLED, every 2nd, 3rd, ... of them."""
    flat = tensor.flatten()
    stride = math.ceil(flat.numel() / SAMPLED)
    return flat[::stride]


@dataclass
class Terms:
    """What a step computes. `full` is the gradient of the whole batch; losses and gradients are not
    summed over ranks and microbatches.

    losses     (D, m, N, T): sum of the losses of a context rank's tokens of a microbatch. The T
               tensor ranks have the same, unless a Change makes them differ
    gradients  {name: (D, m, N, R, n)}: what each context and tensor rank has after the backward of
               a microbatch's loss, with the experts' balance loss; n sampled elements of the
               full tensor. R is T, or 1 for a tensor that is split over the tensor ranks. A tied
               matrix has a name for each end (in full only one)
    is_summed  {name: are the R gradients terms of a sum? If not, they are copies of one term}
    full       {name: full gradient}: the sum of all terms, divided by the divisor
    tokens     (D, m): number of tokens that count: all but padding
    n_tokens   number of all tokens, padding too
    divisor    the sums of losses and gradients are divided by it (full is already): the number of
               all tokens that count or, if the run's loss is a sum, 1
    tied       are embedding and head one matrix? Gradients has the terms of both ends apart

    For D = 2, m = 3, N = 1, T = 2 a LayerNorm's gradients[name][1, 2, 0] are two rows: data rank
    1's gradient of its last microbatch on tensor rank 0, and on tensor rank 1. Without --sp the
    rows are copies; with --sp each tensor rank has other tokens, and the rows are terms.
    """
    losses: torch.Tensor
    gradients: dict
    is_summed: dict
    full: dict
    tokens: torch.Tensor
    n_tokens: int
    divisor: int
    tied: bool

    def loss(self):
        """The loss that a run prints: the mean over the T ranks (train.py)."""
        return self.losses.mean(-1).sum().item() / self.divisor


@dataclass
class Change:
    """A bug that is run: these functions change each rank's model before the step."""
    words: str  # what the doctor prints
    before: object = None  # before(model): changes the whole model, which is split afterwards
    after: object = None  # after(model, mesh): changes the part of the model that this rank has
    feed: object = None  # feed(ids, targets, k, mesh, positions), called in place of own_tokens
    forward: bool = True  # False: the loss stays right, only gradients change
    by_microbatch: bool = False  # does the bug depend on which sequences are in one microbatch?
    together: int = 1  # with by_microbatch: so many data ranks' microbatches are run as one
    rounds: bool = False  # does the bug round to 16 bits? Its noise is measured (gradients.py)


UNCHANGED = Change("the right step")


def served(n_experts, E, T, t):
    """(n_experts,) bool: which experts tensor rank t has. E x T ranks share them: for E = 2, T = 2
    and 8 experts the ranks with t = 0 have 0 1 4 5."""
    owners = torch.arange(n_experts).view(E, T, -1)
    found = torch.zeros(n_experts, dtype=torch.bool)
    found[owners[:, t].flatten()] = True
    return found


def expert_gradients_of_one_rank(model, E, mesh):
    """Give an expert a gradient on one tensor rank only.

    In a run an expert is on one of the T tensor ranks; here all T ranks compute all experts, and
    get equal gradients. Set an expert's gradient to zero on all ranks but its own, and tag it as
    summed over the T ranks. The T terms are then those of the run: a Share of tensor rank t's terms
    has the gradients of t's experts only. (Not under --sp: there each tensor rank has other tokens,
    and the gradient is summed already.)"""
    group = mesh.group("tp")
    if group.size == 1:
        return
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            is_own = served(layer.n_experts, E, group.size, group.rank)
            for param in layer.experts.parameters():  # (n_experts, ...)
                others = ~is_own.view(-1, *[1] * (param.dim() - 1))
                param.register_hook(partial(torch.masked_fill, mask=others, value=0.0))
                param.tag = replace(param.tag, sum_over=(*param.tag.sum_over, group))


def own_tokens(ids, targets, k, positions):
    """(ids, targets) of this rank's tokens in microbatch k. ids, targets: (m, B, S)."""
    return ids[k][:, positions], targets[k][:, positions]


class Boards:
    """Where the threads put their gradients of one microbatch; rank 0 then adds the gradients up.

    A board is (N, R, full shape). For N = 1 and T = 2

        ln_1.weight (3,)        R = 2: rank 0 writes board[0, 0], rank 1 writes board[0, 1]
        c_fc.weight (4, 3)      R = 1: rank 0 writes board[0, 0, :2], rank 1 board[0, 0, 2:]
    """

    def __init__(self, N, T, dtype, grad_dtype, stored):
        """dtype: that of the gradients. grad_dtype: gradients are summed in it. stored(name): the
        name under which the sum is kept, the same for both ends of a tied matrix."""
        self.N = N
        self.T = T
        # dtype of the boards and of the tensors that hold the sums, 32 bits at least
        self.wide = torch.promote_types(torch.promote_types(dtype, grad_dtype), torch.float)
        self.grad_dtype = grad_dtype
        self.stored = stored
        self.boards = {}  # name -> (N, R, full shape)
        self.is_summed = {}  # like Terms.is_summed
        self.sampled = {}  # name -> [(N, R, n)], microbatch after microbatch
        self.full = {}  # stored name -> full gradient, summed so far

    def make(self, model):
        """Called by rank 0: boards for the parameters of its part of the model."""
        for param in model.parameters():
            tag = param.tag
            R = self.T if param.shape == tag.shape else 1
            # Not filled with zeros: the ranks fill each board, all of it
            self.boards[tag.name] = torch.empty(self.N, R, *tag.shape, dtype=self.wide)
            # The first group of sum_over is the context ranks, always; a second one is the tensor
            # ranks, whose gradients are then terms of a sum
            self.is_summed[tag.name] = len(tag.sum_over) > 1

    def put(self, model, c, t, scale):
        """Called by each rank: move its gradients, divided by the loss scale, to their boards."""
        for param in model.parameters():
            tag = param.tag
            board = self.boards[tag.name][c]  # (R, full shape)
            if param.grad is None:  # an expert that got no tokens has no gradient
                grad = torch.zeros(param.shape, dtype=self.wide)
            else:
                grad = param.grad.to(self.wide).div_(scale)
            if param.shape == tag.shape:
                board[t].copy_(grad)
            else:
                tag.place(grad, board[0])
            param.grad = None

    def add(self):
        """Called by rank 0: keep samples of all terms, and add the terms to the sums."""
        for name, board in self.boards.items():
            samples = torch.stack([sampled(term) for term in board.flatten(0, 1)])  # (N R, n)
            samples = samples.unflatten(0, board.shape[:2])  # (N, R, n)
            self.sampled.setdefault(name, []).append(samples.double())
            for ranks in board:  # (R, full shape)
                terms = ranks if self.is_summed[name] else ranks[:1]  # else they are copies
                for term in terms:
                    self.add_term(self.stored(name), term)

    def add_term(self, name, term):
        """Add a term to a sum, which is rounded like a run's."""
        if name in self.full:
            self.full[name].add_(term)
        else:
            self.full[name] = term.clone()
        if self.grad_dtype != self.wide:
            self.full[name].copy_(self.full[name].to(self.grad_dtype))


class SimulatedStep:
    """A step of a run: its sizes, and what goes into it. run() computes it."""

    def __init__(self, config, layout, balance, weights, ids=None, targets=None, is_mean=True):
        """config: GPTConfig or LlamaConfig. layout: a dump's dict. balance: weight of the experts'
        balance loss. weights: {name: full tensor}. ids, targets: (D, m, B, S); None for a step of
        which only tags() is called. is_mean: is the loss a mean over all tokens? Else it is their
        sum."""
        self.config = config
        self.layout = layout
        self.balance = balance
        self.weights = weights
        self.ids = ids
        self.targets = targets
        self.is_mean = is_mean
        self.sizes = {"cp": layout["cp"], "tp": layout["tp"]}

    def whole_model(self, dtype):
        """The model with these weights. A tied matrix is two parameters here, so that its two
        terms are apart."""
        with torch.device("meta"):  # draws no initial values
            model = kind_of(self.config)(self.config).to(dtype)
            model.layers[-1].lm_head.weight = torch.nn.Parameter(model.layers[0].wte.weight.clone())
        attributes = [vars(param).copy() for param in model.parameters()]
        model.to_empty(device="cpu")  # new parameters, without their attributes (sees_own_heads)
        for param, kept in zip(model.parameters(), attributes, strict=True):
            vars(param).update(kept)
        for name, param in model.canonical_parameters():
            param.data.copy_(self.weights[self.stored(name)])
        return model

    def stored(self, name):
        """The name of a parameter in the run's files, where a tied head is the embedding's."""
        return name if name in self.weights else EMBEDDING

    def parallel(self, model, mesh):
        """Split a whole model like the run's layout. Returns this rank's positions: (S/N,)."""
        context = mesh.group("cp")
        tensor = mesh.group("tp")
        sp = self.layout["sp"] and tensor.size > 1
        f, g = (gather_tokens, scatter_tokens) if sp else (copy_to_ranks, sum_over_ranks)
        tag_whole(model, replicas=context)
        positions = split_sequences(model, context, self.layout["cp_attention"])
        split_layers(model, tensor, f, g)
        tag_replicated(model, tensor, sum_gradients=sp)
        if sp:
            positions_of_own_tokens(model, tensor)
        else:
            expert_gradients_of_one_rank(model, self.layout["ep"], mesh)
        sharing = mesh.group("cp", "tp") if sp else context  # ranks that share a sequence
        for layer in model.modules():
            if isinstance(layer, MixtureOfExperts):
                layer.balance_weight = self.balance
                layer.sum_counts = partial(all_reduce, group=sharing)
        return positions

    def tags(self):
        """[{name: tag}], for each tensor rank: which slice of each tensor does the rank hold?"""
        def rank(mesh):
            model = self.whole_model(torch.double)
            self.parallel(model, mesh)
            return {param.tag.name: param.tag for param in model.parameters()}
        return World({"cp": 1, "tp": self.layout["tp"]}).run(rank)

    def divisor(self):
        """See Terms."""
        return (self.targets != ABSENT).sum().item() if self.is_mean else 1

    def merged(self):
        """The same step with all sequences in one microbatch of one data rank, which is faster."""
        ids = self.ids.flatten(0, 2)[None, None]  # (1, 1, D m B, S)
        targets = self.targets.flatten(0, 2)[None, None]
        return SimulatedStep(self.config, self.layout, self.balance, self.weights, ids, targets,
                             self.is_mean)

    def together(self, E):
        """The same step in which E data ranks, one after the other, are one: E microbatches, those
        of all these ranks, are one."""
        D, m, B, S = self.ids.shape
        ids, targets = (x.view(D // E, E, m, B, S).transpose(1, 2).reshape(D // E, m, E * B, S)
                        for x in (self.ids, self.targets))
        return SimulatedStep(self.config, self.layout, self.balance, self.weights, ids, targets,
                             self.is_mean)

    def prepare(self, mesh, change, dtype):
        """(model, own) of one rank, with the change. own(ids, targets, k): microbatch k's tokens of
        this rank, (ids, targets)."""
        model = self.whole_model(dtype)
        if change.before:
            change.before(model)
        # Sequences may be shorter than the model allows: split_sequences takes block_size for S
        model.config = replace(model.config, block_size=self.ids.size(-1))
        positions = self.parallel(model, mesh)
        if change.after:
            change.after(model, mesh)
        if change.feed:
            return model, partial(change.feed, mesh=mesh, positions=positions)
        return model, partial(own_tokens, positions=positions)

    def run(self, change=UNCHANGED, dtype=torch.double, grad_dtype=torch.double, scale=1.0,
            losses_only=False):
        """The Terms of the step with a change, computed in dtype and summed in grad_dtype. scale:
        the loss scale, by which the loss is multiplied, and gradients are divided. losses_only:
        forward only; gradients and full stay empty."""
        D, m, _, _ = self.ids.shape
        N = self.sizes["cp"]
        T = self.sizes["tp"]
        world = World(self.sizes)
        losses = torch.zeros(D, m, N, T, dtype=torch.double)
        boards = Boards(N, T, dtype, grad_dtype, self.stored)

        def rank(mesh):
            torch.set_grad_enabled(not losses_only)  # torch keeps this switch for each thread
            model, own = self.prepare(mesh, change, dtype)
            c = mesh.group("cp").rank
            t = mesh.group("tp").rank
            if mesh.rank == 0:
                boards.make(model)
            world.barrier.wait()  # the boards are there
            for d, k in product(range(D), range(m)):
                loss = model(*own(self.ids[d], self.targets[d], k))
                # The model's loss has the balance loss in it; the loss that a run prints has not
                balance = balance_loss(model.layers)
                losses[d, k, c, t] = loss.item() - (0 if balance is None else balance.item())
                if losses_only:
                    continue
                (loss * scale).backward()
                boards.put(model, c, t, scale)
                world.barrier.wait()  # all ranks have put their gradients
                if mesh.rank == 0:
                    boards.add()
                world.barrier.wait()  # the boards have been read

        world.run(rank)
        gradients = {name: torch.stack(terms).unflatten(0, (D, m))
                     for name, terms in boards.sampled.items()}
        for full in boards.full.values():
            full.div_(self.divisor())
        tokens = (self.targets != ABSENT).sum((-1, -2))  # (D, m)
        return Terms(losses, gradients, boards.is_summed, boards.full, tokens,
                     self.targets.numel(), self.divisor(), tied=UNTIED not in self.weights)
