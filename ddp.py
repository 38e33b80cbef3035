"""Data parallelism: D replicas of the model, each with 1/D of the batch; gradients are summed.

Split: the batch. Replicated: weights, gradients, optimizer states. Sent per rank and step:
2 (D-1)/D Psi elements for Psi parameters, whatever the number of microbatches. (With --cp the ranks
that share a sequence sum their gradients, too: then D counts all these ranks.)

No average is taken. The loss was divided by the number of tokens in the whole batch before
backward, so the sum of the ranks' gradients is the gradient of the whole batch. A layer's gradients
are summed in one all-reduce, which runs while backward computes those of the next layer down. With
several microbatches it runs during the last backward only. A rank of one thread runs all of them
after backward (transport/background.py). PyTorch Distributed, arXiv 2006.15704.

    time ->
    computes  forward | backward: head | block 3 | block 2 | block 1 | embedding |           | AdamW
    all-reduces                        | head    | block 3 | block 2 | block 1   | embedding |

    python train.py --dp 2
    python -m extras.show ddp       a small GPT on 4 ranks
"""

import torch

from collectives import all_reduce


class Flat:
    """One tensor for those parameters of a layer that have their gradients summed over the same
    groups. Each parameter is a view of the tensor, and one all-reduce sums a layer. (Separate
    Flats: a weight that two layers share; experts; frozen ones; replicated ones under --sp.)
    The tensor is padded to a multiple of D, and ZeRO (zero.py) cuts it into D chunks, one for each
    rank of the ZeRO group (shard.py).

    D = 2; of a layer with c_attn of 12 elements, c_proj of 4, LayerNorm of 5; padding 1:

        |c_attn, 12                         |c_proj, 4  |LayerNorm, 5  |1 |
        |chunk 0, 11, of rank 0          |chunk 1, of rank 1              |

    Here each parameter gets its memory and its value: train.py makes the model on the meta device,
    where tensors have shapes only."""

    def __init__(self, params, value, dtype, device):
        """value(tag): the initial value of the parameter with this tag, on the CPU."""
        self.params = params
        self.is_trained = params[0].requires_grad  # else frozen: no gradients, no optimizer states
        self.group, *self.others = params[0].tag.sum_over  # the ZeRO group; others
        self.offsets = {}  # parameter -> index of its first element in the Flat
        numel = 0
        for param in params:
            self.offsets[param] = numel
            numel += param.numel()
        numel += -numel % self.group.size
        self.weights = torch.zeros(numel, dtype=dtype, device=device)
        self.grads = None  # their gradients, arranged like the weights
        self.grad_views = {}  # parameter -> its gradient's place in self.grads
        self.missing = 0  # while in DDP.queue: gradients that are yet to be collected
        for param in params:
            view = self.view(self.weights, param)
            view.copy_(value(param.tag))
            # .data: a tensor with a version counter of its own, so that ZeRO-3 may refill the Flat
            # between forward and backward without an error of autograd
            real = torch.nn.Parameter(view.data, param.requires_grad)
            real.tag = param.tag
            # A parameter on the meta device cannot get memory: exchange the contents, so that
            # `param`, the object to which layers refer, becomes `real`
            torch.utils.swap_tensors(param, real)

    def view(self, tensor, param):
        """tensor: arranged like the weights. Returns a parameter's part of it."""
        return tensor.narrow(0, self.offsets[param], param.numel()).view(param.shape)

    def pieces(self, part, first):
        """part: a stretch of the weights or gradients, which begins at index `first` of the Flat.
        Returns (tag, start, values) for each parameter. values: its elements within the part, one
        dim; start: the index in the parameter of the first of them. A parameter outside of the part
        has no elements there, and is listed all the same: every rank lists the same parameters in
        the same order."""
        found = []
        for param, offset in self.offsets.items():
            low = max(offset, first)
            high = min(offset + param.numel(), first + part.numel())
            if low < high:
                found.append((param.tag, low - offset, part[low - first : high - first]))
            else:
                found.append((param.tag, 0, part[:0]))
        return found

    def slices(self):
        """Yields (tag, a copy of the whole slice) of each parameter."""
        for param in self.params:
            yield param.tag, param.detach().clone()


def flats_of(stages, value, dtype, device):
    """Lay the parameters of some stages, {stage: [layers]}, into Flats. Yields (stage, Flat), those
    of a stage in the order in which backward completes them.

    Stage 0 of a GPT with a tied matrix, [embedding, block, head]. The two users of wte make it a
    Flat of its own, complete only after backward has passed the embedding, the earlier of the two:

        users                 parameters                yielded
        embedding and head    wte                       last
        embedding             wpe                       third
        block                 ln_1, c_attn, ...         second
        head                  ln_f                      first"""
    users = {}  # parameter -> the layers that use it, (stage, index), in the order of forward
    for stage, layers in stages.items():
        for i, layer in enumerate(layers):
            for param in layer.parameters():
                users.setdefault(param, []).append((stage, i))
    alike = {}  # (users, groups, is it trained?) -> the parameters of a Flat
    for param, used_by in users.items():
        key = (tuple(used_by), param.tag.sum_over, param.requires_grad)
        alike.setdefault(key, []).append(param)
    for (used_by, *_), params in reversed(alike.items()):
        stage, _ = used_by[0]  # a tied weight: its first user, which backward reaches last
        yield stage, Flat(params, value, dtype, device)


class DDP:
    """Sums gradients over the replicas.

    In: this rank's pipeline stages, {stage: [layers]}, whose parameters are tagged (shard.py).
    value(tag): this rank's slice of the initial value of the parameter with this tag. background:
    runs messages while backward goes on (transport/background.py). ZeRO (zero.py) shards what is
    replicated here. All four classes have the same members:

        weights        what this rank's optimizer steps, in place: for each parameter its elements
                       as a flat tensor (ZeRO: those in this rank's chunk)
        tags, starts   the tag of each of `weights`, and the index in the tag's slice at which it
                       starts
        frozen         (tag, start, weights) of parameters that are not trained
        expect()       before a backward of a stage. is_final: the stage's last one in this step
        complete()     in place of expect(), after a backward that was cut in two (pipeline.py)
        gradients()    after the last backward of a step: the gradient of each of `weights`, summed
                       over the ranks that the tag names. Lets each param.grad go (None)
        publish()      after the optimizer's step: sends new weights, if the next forward needs them
                       on every rank
        whole()        (tag, this rank's whole slice) of every parameter
        sharded        True under ZeRO: each replica's optimizer steps different pieces

    The path of a gradient: autograd computes param.grad and calls grad_added(); collect() moves it
    into Flat.grads; once the Flat is complete, start_reduction() starts the sum over the ranks;
    gradients() waits for it. Two Flats, A of the last layer with parameters a and b, B with c; two
    microbatches:

        expect(stage, is_final=False)    the queue stays empty
        grad_added(a), (b), (c)          into Flat.grads
        expect(stage, is_final=True)     queue: A, missing 2; B, missing 1
        grad_added(a)                    added to Flat.grads; A.missing 1
        grad_added(b)                    A.missing 0: A leaves the queue, its sum starts
        grad_added(c)                    B, too, while A's gradients travel
        gradients()                      waits for both
    """

    sharded = False
    every_microbatch = False  # True: reduce each microbatch's gradients. False: once, their sum

    def __init__(self, stages, value, dtype, device, background):
        self.background = background
        # {stage: its trained Flats, in the order in which backward completes them}
        self.flats = {stage: [] for stage in stages}
        self.frozen_flats = []
        pieces_of = {}  # Flat -> the pieces of its weights that this rank steps
        for stage, flat in flats_of(stages, value, dtype, device):
            if flat.is_trained:
                self.flats[stage].append(flat)
            else:
                self.frozen_flats.append(flat)
            # Now, before the next Flat is made: ZeRO-3 frees all but these pieces
            pieces_of[flat] = self.pieces_to_step(flat)
        self.trained_flats = [flat for stage in stages for flat in self.flats[stage]]
        self.home = {}  # parameter -> its Flat
        for flat in self.trained_flats + self.frozen_flats:
            self.home |= dict.fromkeys(flat.params, flat)
        self.queue = []  # Flats whose messages the current backward is to start, in this order
        self.reductions = {}  # Flat -> a function that waits until reduce() has ended
        for flat in self.trained_flats:
            for param in flat.params:
                param.register_post_accumulate_grad_hook(self.grad_added)
        pieces = [piece for flat in self.trained_flats for piece in pieces_of[flat]]
        self.tags = [tag for tag, _, _ in pieces]
        self.starts = [start for _, start, _ in pieces]
        self.weights = [weights for _, _, weights in pieces]
        self.frozen = [piece for flat in self.frozen_flats for piece in pieces_of[flat]]

    def pieces_to_step(self, flat):
        """The pieces of a Flat's weights that this rank steps: all. Called once for each Flat."""
        return flat.pieces(flat.weights, 0)

    def expect(self, stage, is_final):
        if is_final or self.every_microbatch:
            self.start_rest()  # what the backward before has left: Flats that lack a gradient
            self.queue = [*self.flats[stage]]
            for flat in self.queue:
                flat.missing = len(flat.params)

    def complete(self, stage, is_final):
        self.expect(stage, is_final)
        self.start_rest()

    def grad_added(self, param):
        """Called by autograd when param.grad is complete, once in each backward. (For a tied
        weight: after the gradients of both its users.)"""
        flat = self.home[param]
        if flat in self.queue:
            self.collect(param, flat)
            flat.missing -= 1
            # In the order of the queue, which is the same on all replicas. A message carries no
            # name: in another order one replica's block 2 would be added to another's block 3
            while self.queue and self.queue[0].missing == 0:
                self.start_reduction(self.queue.pop(0))
        elif not self.every_microbatch:  # a microbatch whose gradients are not yet to be sent
            self.collect(param, flat)
        # Else ZeRO-2 or 3, before the expect() of this stage (such as under zb-h1): the gradient
        # stays in param.grad, and start_reduction() collects it

    def start_rest(self):
        """Start all Flats that are still in the queue. A gradient that no backward has computed
        counts as zeros."""
        while self.queue:
            self.start_reduction(self.queue.pop(0))

    def collect(self, param, flat):
        """Move a gradient into its Flat. A step's first backward makes a new param.grad: copy it,
        and let param.grad be a view of the Flat, to which the other microbatches add."""
        if flat.grads is None:
            flat.grads = torch.empty_like(flat.weights)
            flat.grad_views = {each: flat.view(flat.grads, each) for each in flat.params}
        view = flat.grad_views[param]
        if param.grad is view:
            return  # autograd has added to it
        if param.grad is None:
            view.zero_()
        else:
            view.copy_(param.grad)
        param.grad = view

    def start_reduction(self, flat):
        """Start to sum the gradients of a Flat over the replicas."""
        if flat.missing:
            for param in flat.params:  # (collect skips those that it has collected)
                self.collect(param, flat)
        self.reductions[flat] = self.background.start(self.reduce, flat)

    def reduce(self, flat):
        all_reduce(flat.grads, flat.group)

    def wait_for_reduction(self, flat):
        """Wait until a Flat's gradients are summed over the replicas. Returns (this rank's part of
        the gradients, index of the part's first element in the Flat)."""
        self.reductions.pop(flat)()
        return flat.grads, 0

    def gradients(self):
        self.start_rest()
        found = []
        for flat in self.trained_flats:
            part, first = self.wait_for_reduction(flat)
            for group in flat.others:  # --shard's copies, --sp's replicated parameters, tied ends
                all_reduce(part, group)
            found += [values for _, _, values in flat.pieces(part, first)]
            for param in flat.params:
                param.grad = None
        return found

    def publish(self):
        """Nothing to send: every rank has stepped every weight, with the same gradients."""

    def whole(self):
        """For tests, and for the comparison of the replicas at the end. Collective under ZeRO-3."""
        for flat in self.trained_flats + self.frozen_flats:
            yield from flat.slices()
