"""Judges data parallelism and ZeRO: exercises 3 to 5."""

import math

import torch

import train
import zero
from collectives import own_chunk
from extras.exercises.catalogue import RANKS
from extras.exercises.e03_all_reduce import BUCKET
from extras.exercises.judge import (
    Wrong,
    beside,
    check_shape,
    factor,
    in_numbers,
    placed,
    same,
    trains,
    transposed,
    while_trying,
)
from model import build
from shard import Tag, tag_whole
from sizes import GPTConfig

SMALL = GPTConfig(21, block_size=4, n_layer=2, n_head=4, n_embd=8)


def gradients_of(tokens):
    """{name: gradient} of the small GPT in one process."""
    model = build(SMALL, dtype=torch.double)
    model(tokens, tokens).backward()
    return {name: param.grad for name, param in model.canonical_parameters()}


def small_model(group):
    """Returns a tagged GPT, this rank's tokens, the gradients from all ranks' tokens, and the
    gradients from this rank's tokens."""
    model = build(SMALL, dtype=torch.double)
    tag_whole(model, group)
    tokens = torch.randint(21, (group.size, 1, 4), generator=torch.Generator().manual_seed(0))
    mine = tokens[group.rank]
    return model, mine, gradients_of(tokens.flatten(0, 1)), gradients_of(mine)


def explain_gradient(got, want, own, N):
    """How a gradient differs from the sum over N replicas, of which `own` is this rank's term."""
    if got is None:
        return "is None"
    if got.shape != want.shape:
        return f"has shape {[*got.shape]}, and should have {[*want.shape]}"
    k = factor(got, want)
    if k is not None and abs(k - 1 / N) < 1e-9:
        return f"is divided by {N}: gradients are summed, never averaged"
    if k is not None:
        return f"is {in_numbers(k)} times the sum: summed once too often?"
    if same(got, own):
        return "is this rank's own term: not summed over the replicas"
    return "differs from the sum over the replicas"


def explain_new(chunk, old):
    """What publish() made of a chunk, which is not the new one."""
    if same(chunk, old):
        return "is the old one: every rank needs the new chunks of all ranks"
    return "is neither old nor new: all_gather takes the whole parameter"


def check_cleared(params):
    if any(param.grad is not None for param in params):
        raise Wrong("gradients() leaves param.grad: the next step would add to it")


def check_sums(reducer, grads, whole, terms, group):
    """Raise Wrong unless grads are the sums over all ranks, `whole`, in the order of
    reducer.params. terms: this rank's terms of the sums. whole, terms: {name: gradient}."""
    if grads is None or len(grads) != len(reducer.params):
        raise Wrong("gradients() returns a list: a summed gradient for each of self.params")
    if group.unjoined:
        raise Wrong(f"rank {group.rank}: gradients() has returned, and {group.unjoined} of "
                    f"{group.submitted} all-reduces were not waited for")
    for grad, param in zip(grads, reducer.params, strict=True):
        name = param.tag.name
        if grad is None or not same(grad, whole[name]):
            others = [other for other, summed in whole.items()
                      if grad is not None and same(grad, summed)]
            said = explain_gradient(grad, whole[name], terms[name], group.size)
            if others:
                said = f"is that of {others[0]}: return gradients in the order of self.params"
            raise Wrong(f"rank {group.rank}: the gradient of {name} {said}")


def check_second_step(reducer, model, mine, whole, terms, group):
    """Raise Wrong if the sums of a second step differ, or a bucket of the first is still held."""
    first = group.buffers
    group.buffers = []
    with while_trying("in step 2"):
        model(mine, mine).backward()
        check_sums(reducer, reducer.gradients(), whole, terms, group)
    again = {id(buffer()) for buffer in group.buffers}  # a form may use its buffers again
    held = {id(buffer()) for buffer in first if buffer() is not None} - again
    if held:
        raise Wrong(f"right sums, but after step 2 BucketDDP still holds {len(held)} of step 1's "
                    "buckets: empty its list in gradients()")


def check_large_first(form, group):
    """Raise Wrong if the sums differ for two layers whose first gradient is larger than BUCKET."""
    layers = [torch.nn.Linear(2, 3, bias=False, dtype=torch.double),
              torch.nn.Linear(3, BUCKET // 2, bias=False, dtype=torch.double)]
    inputs = torch.arange(2.0 * group.size, dtype=torch.double).view(-1, 2)  # a row for each rank
    for i, layer in enumerate(layers):
        shape = layer.weight.shape
        layer.weight.data.copy_(torch.arange(shape.numel()).view(shape) % 7 - 2)
        layer.weight.tag = Tag(f"layers.{i}.weight", shape, 0, ((0, shape[0]),),
                                   sum_over=(group,))

    def gradients_of_rows(rows):
        weights = [layer.weight for layer in layers]
        grads = torch.autograd.grad(layers[1](layers[0](rows)).sum(), weights)
        return {weight.tag.name: grad for weight, grad in zip(weights, grads, strict=True)}

    mine = inputs[group.rank : group.rank + 1]
    whole, terms = gradients_of_rows(inputs), gradients_of_rows(mine)
    largest = layers[1].weight.numel()
    with while_trying(f"a first gradient of {largest} numbers, more than BUCKET"):
        reducer = form({0: layers})
        layers[1](layers[0](mine)).sum().backward()
        check_sums(reducer, reducer.gradients(), whole, terms, group)


def judge_buckets(make_mesh, forms):
    form = forms["BucketDDP"]
    mesh = make_mesh(dp=RANKS)
    group = mesh.group("dp")
    model, mine, whole, terms = small_model(group)
    reducer = form({0: model.layers})
    model(mine, mine).backward()
    begun, on_their_way = group.submitted, group.unjoined
    check_sums(reducer, reducer.gradients(), whole, terms, group)
    check_cleared(reducer.params)
    psi = sum(param.numel() for param in reducer.params)
    if group.submitted == 0:
        raise Wrong("right sums, but no all-reduce ran in the background: async_op=True")
    if group.submitted >= len(reducer.params):
        raise Wrong(f"right sums, but {group.submitted} all-reduces for {len(reducer.params)} "
                    "parameters: put parameters side by side into buckets")
    if begun == 0:
        raise Wrong("right sums, but no bucket was on its way when backward ended: no overlap")
    if on_their_way == 0:
        raise Wrong(f"right sums, but each of {begun} buckets was waited for before backward "
                    "ended: no overlap; wait() in gradients()")
    # Messages of the ring are chunks, 1/RANKS of a bucket. group.largest: bytes of the largest
    # message; a number has 8 bytes
    if group.largest // 8 > math.ceil(BUCKET / RANKS):
        raise Wrong(f"right sums, but a chunk of {group.largest // 8} numbers was sent: send a "
                    f"bucket when the next gradient would make it larger than {BUCKET}, {RANKS} "
                    f"chunks of {math.ceil(BUCKET / RANKS)}")
    facts = [f"buckets: {group.submitted} for {len(reducer.params)} parameters; on their way when "
             f"backward ended: {on_their_way}",
             f"bytes sent by rank {group.rank}: {group.bytes_sent}    formula 2 (N-1)/N n = "
             f"{2 * (RANKS - 1) * 8 * psi // RANKS}"]
    check_second_step(reducer, model, mine, whole, terms, group)
    check_large_first(form, group)
    reducers = (form, *zero.REDUCERS[1:])
    return [*facts, trains(make_mesh, [(train, "REDUCERS", reducers)], {"dp": 4})[1]]


def judge_zero1(make_mesh, forms):
    form = forms["ZeRO1"]
    mesh = make_mesh(dp=RANKS)
    group = mesh.group("dp")
    model, mine, whole, terms = small_model(group)
    reducer = form({0: model.layers})
    params = reducer.params
    for weight, param in zip(reducer.weights, params, strict=True):
        chunk = own_chunk(param.data, group)
        if weight.numel() != chunk.numel():
            raise Wrong(f"self.weights has {weight.numel()} of the {param.numel()} numbers of "
                        f"{param.tag.name}: this rank's chunk has {chunk.numel()}")
        if weight.requires_grad:
            raise Wrong("autograd records what is done to self.weights: take the chunks of "
                        "param.data, because the optimizer steps them in place")
        if weight.numel() and weight.data_ptr() != chunk.data_ptr():
            raise Wrong(f"self.weights has other memory than this rank's chunk of "
                        f"{param.tag.name}: keep a view, so that a step changes the parameter")
    model(mine, mine).backward()
    before = {param.tag.name: param.detach().clone() for param in params}
    for weight, grad, param in zip(reducer.weights, reducer.gradients(), params, strict=True):
        name = param.tag.name
        want = own_chunk(whole[name], group)
        if grad is None or not same(grad, want):
            own = own_chunk(terms[name], group)
            raise Wrong(f"rank {group.rank}: the gradient of its chunk of {name} "
                        + explain_gradient(grad, want, own, group.size))
        weight.sub_(grad)
    check_cleared(params)
    reducer.publish()
    for param in params:
        old = before[param.tag.name]
        new = old - whole[param.tag.name]
        parts = [tensor.detach().view(-1).tensor_split(RANKS) for tensor in (param, old, new)]
        for rank, (chunk, was, want) in enumerate(zip(*parts, strict=True)):
            if not same(chunk, want):
                raise Wrong(f"after publish(), rank {group.rank}: chunk {rank} of "
                            f"{param.tag.name} " + explain_new(chunk, was))
    psi = sum(param.numel() for param in params)
    own = sum(own_chunk(param.data, group).numel() for param in params)
    of_next = sum(param.data.view(-1).tensor_split(RANKS)[group.next].numel() for param in params)
    facts = [beside(f"bytes sent by rank {group.rank}", group.bytes_sent,
                    "8 bytes x 2 (D-1)/D Psi", 8 * (2 * psi - own - of_next)),
             f"parameters that this rank's optimizer steps: {own} of {psi}    formula Psi / D = "
             f"{psi / RANKS:g}"]
    reducers = (zero.REDUCERS[0], form, *zero.REDUCERS[2:])
    return [*facts, trains(make_mesh, [(train, "REDUCERS", reducers)], {"dp": 4}, zero=1)[1]]


# Its weights have many more bytes than its activations
WIDE = GPTConfig(21, block_size=4, n_layer=4, n_head=4, n_embd=64)


def judge_zero3(make_mesh, forms):
    form = forms["gather_weight"]
    mesh = make_mesh(dp=RANKS)
    group = mesh.group("dp")
    N, r = group.size, group.rank
    whole = torch.arange(15, dtype=torch.double).view(3, 5)
    chunk = own_chunk(whole, group).clone().requires_grad_()
    got = form(chunk, whole.shape, group)
    check_shape("what gather_weight() returns", got, whole)
    if not same(got, whole):
        raise Wrong(f"rank {r}: gather_weight() returns {got.flatten().tolist()}, and the "
                    "parameter is 0.0 to 14.0: chunks of other ranks are missing")
    grads = [(whole + 1) ** (rank + 1) for rank in range(N)]  # each rank's gradient of the whole
    if not got.requires_grad:
        raise Wrong("gather_weight() has no backward: wrap it in WithBackward.apply")
    brought = grads[r].clone()
    got.backward(brought)
    if not same(brought, grads[r]):
        raise Wrong("gather_weight()'s backward changes in place the gradient that autograd gave "
                    "it: reduce_scatter a clone")
    want = own_chunk(sum(grads), group)
    if chunk.grad is None or not same(chunk.grad, want):
        raise Wrong(f"rank {r}: the gradient of the chunk "
                    + explain_gradient(chunk.grad, want, own_chunk(grads[r], group), N))
    chunk.grad = None
    with while_trying("a gradient that is not contiguous: "
                      "clone(memory_format=torch.contiguous_format)"):
        form(chunk, whole.shape, group).backward(transposed(grads[r]))
        if not same(chunk.grad, want):
            raise Wrong(f"rank {r}: the gradient of the chunk differs")
    places = [(zero, name, forms[name]) for name in ("gather_weight", "Gathered")]
    held, psi = held_after_forward(group, places)
    if held > 8 * psi / 2:
        raise Wrong(f"right numbers, but after forward this rank holds {held} bytes more than "
                    f"before, and all weights have {8 * psi}: the gathered weights are not freed; "
                    "gather in the function that recompute() runs; tensors outside of it are kept")
    facts = [f"bytes held after forward, beyond the chunks: {held}    all weights have {8 * psi}"]
    mesh, line = trains(make_mesh, places, {"dp": 4}, zero=3)
    # train.py shards over these axes; trains() makes two steps
    sent = mesh.group("shard", "ep", "cp").bytes_sent // 2
    model = build(SMALL, dtype=torch.double)
    # The tied matrix counts twice: ZeRO-3 gathers it for both ends
    gathered = sum(param.numel() for layer in model.layers for param in layer.parameters())
    formula = 3 * 8 * gathered * (RANKS - 1) // RANKS
    return [*facts, f"bytes sent by rank {r} in a step: {sent}    formula 8 bytes x 3 m Psi "
            f"(D-1)/D = {formula}, with the tied matrix twice in Psi", line]


def held_after_forward(group, places):
    """Run a forward of a wide GPT with the attempt in these places. Returns the bytes that are then
    allocated and were not before, and Psi."""
    model = build(WIDE, dtype=torch.double)
    psi = sum(param.numel() for param in model.parameters())
    tag_whole(model, group)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with placed(places):
        zero.ZeRO3({0: model.layers})
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            loss = model(tokens, tokens)  # keeps the graph, with all tensors that the graph saves
    if not loss.requires_grad:
        raise Wrong("no gradient comes through Gathered: the layer runs without autograd")
    events = profile.kineto_results.events()
    # nbytes() is positive when memory is allocated, negative when memory is freed
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    return held, psi
