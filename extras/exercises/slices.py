"""Judges tensor and sequence parallelism: exercises 6 to 9."""

import math

import torch

import model as model_file
import sequence_parallel
import tensor_parallel
from extras.exercises.catalogue import RANKS
from extras.exercises.judge import (
    Alone,
    Wrong,
    beside,
    check_shape,
    factor,
    in_numbers,
    same,
    trains,
    transposed,
    while_trying,
)
from shard import Tag, bounds


def random_tensor(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def explain_sum_of(got, own, summed, T):
    """How a tensor differs from the sum over T ranks, of which `own` is this rank's term."""
    if got is None:
        return "is None: no gradient came through"
    if got.shape != summed.shape:
        return f"has shape {[*got.shape]}, and should have {[*summed.shape]}"
    if same(got, own):
        return "is this rank's own term: not summed over the ranks"
    k = factor(got, summed)
    if k is not None and abs(k - 1 / T) < 1e-9:
        return f"is the sum divided by {T}: terms are summed, never averaged"
    return "differs from the sum" if k is None else f"is {in_numbers(k)} times the sum"


def explain_same_as(got, want, summed):
    """How a tensor differs from `want`, which should pass unchanged. summed: what an all-reduce
    would have made of `want`."""
    if got is None:
        return "is None: no gradient came through"
    if got.shape != want.shape:
        return f"has shape {[*got.shape]}, and should have {[*want.shape]}"
    if same(got, summed):
        return "is a sum over the ranks, and should pass unchanged"
    k = factor(got, want)
    return "differs from what came in" if k is None else (
        f"is {in_numbers(k)} times what came in, and should pass unchanged")


def through(form, name, x, grad, group):
    """Run y = form(x, group) and y.backward(grad). Returns y and the gradient of x. Raises Wrong if
    the form changes x or grad. name: the form's, for messages."""
    x = x.clone().requires_grad_()
    before, grad_before = x.detach().clone(), grad.clone()
    with while_trying(f"in {name}'s forward"):
        y = form(x, group)
    if not same(x, before):
        raise Wrong(f"{name}'s forward changes its input in place, and autograd still needs it: "
                    "clone it")
    if isinstance(y, torch.Tensor) and y.shape == grad.shape:
        if not y.requires_grad:
            raise Wrong("the result has no backward: wrap it in WithBackward.apply")
        result = y.detach().clone()
        with while_trying(f"in {name}'s backward"):
            y.backward(grad)
    else:
        result = y  # y is of a wrong type or shape: the caller's check_shape() says so
    if not same(grad, grad_before):
        raise Wrong(f"{name}'s backward changes in place the gradient that autograd gave it: "
                    "clone it")
    return result, x.grad


def judge_f_and_g(make_mesh, forms):
    mesh = make_mesh(tp=RANKS)
    group = mesh.group("tp")
    T, t = group.size, group.rank
    values = [random_tensor(2, 3, 4, seed=r) for r in range(T)]
    x = random_tensor(2, 3, 4, seed=50)  # the same on all ranks, like the gradient
    grad = random_tensor(2, 3, 4, seed=60)
    check_f_and_g(forms, values, x, grad, group)
    n = 8 * x.numel()
    facts = [beside(f"bytes sent by rank {t}, f and g", group.bytes_sent, "2 * 2 (T-1)/T n",
                    2 * 2 * (T - 1) * n // T)]
    with while_trying("tensors that are not contiguous: "
                      "clone(memory_format=torch.contiguous_format)"):
        check_f_and_g(forms, [transposed(value) for value in values], transposed(x),
                      transposed(grad), group)
    places = [(tensor_parallel, name, form) for name, form in forms.items()]
    return [*facts, trains(make_mesh, places, {"tp": 4})[1]]


def check_f_and_g(forms, values, x, grad, group):
    """Raise Wrong unless f and g are right. values: a tensor for each rank, which is f's gradient
    and g's input there; x: f's input on all ranks; grad: g's gradient on all ranks."""
    T, t = group.size, group.rank
    summed = sum(values)
    y, grad_x = through(forms["copy_to_ranks"], "f", x, values[t], group)
    check_shape("f(x)", y, x)
    if not same(y, x):
        raise Wrong(f"rank {t}: f's forward " + explain_same_as(y, x, T * x))
    if grad_x is None or not same(grad_x, summed):
        raise Wrong(f"rank {t}: the gradient in f's backward "
                    + explain_sum_of(grad_x, values[t], summed, T))
    y, grad_x = through(forms["sum_over_ranks"], "g", values[t], grad, group)
    check_shape("g(x)", y, x)
    if not same(y, summed):
        raise Wrong(f"rank {t}: the result of g's forward "
                    + explain_sum_of(y, values[t], summed, T))
    if grad_x is None or not same(grad_x, grad):
        raise Wrong(f"rank {t}: the gradient in g's backward "
                    + explain_same_as(grad_x, grad, T * grad))


def tagged_linear(n_in, n_out):
    """A linear layer, the same on every rank, whose tags say that it is whole."""
    linear = torch.nn.Linear(n_in, n_out, dtype=torch.double)
    linear.weight.data.copy_(random_tensor(n_out, n_in, seed=1))
    linear.bias.data.copy_(random_tensor(n_out, seed=2))
    for name, param in linear.named_parameters():
        param.tag = Tag(name, param.shape, 0, ((0, n_out),), sum_over=(Alone().world,))
    return linear


def judge_linear(make_mesh, forms):
    mesh = make_mesh(tp=RANKS)
    group = mesh.group("tp")
    T, t = group.size, group.rank
    f, g = tensor_parallel.copy_to_ranks, tensor_parallel.sum_over_ranks
    x = random_tensor(2, 3, 8, seed=3)
    linear = tagged_linear(8, 24)
    y = linear(x).detach()
    parts = (8, 8, 8)  # like q, k and v
    rows = [8 * part + i for part in range(3) for i in range(*bounds(8, group))]
    want = y[..., rows]
    mine = x.clone().requires_grad_()
    got = forms["Column"](linear, group, f, parts)(mine)
    check_shape("Column's output", got, want)
    if not same(got, want):
        start, stop = bounds(24, group)
        if same(got, y[..., start:stop]):
            raise Wrong(f"rank {t}: Column has 1/{T} of all rows, and should have 1/{T} of each of "
                        "the parts (q, k, v)")
        raise Wrong(f"rank {t}: Column's output "
                    + explain_bias(got, want, linear.bias.detach()[rows]))
    grad = random_tensor(2, 3, 24, seed=4)
    got.backward(grad[..., rows])
    summed = grad @ linear.weight.detach()
    own = grad[..., rows] @ linear.weight.detach()[rows]
    if mine.grad is None or not same(mine.grad, summed):
        raise Wrong(f"rank {t}: the gradient of Column's input "
                    + explain_sum_of(mine.grad, own, summed, T))
    linear = tagged_linear(8, 5)
    want = linear(x).detach()
    columns = slice(*bounds(8, group))
    row = forms["Row"](linear, group, g)
    got = row(x[..., columns].contiguous())
    check_shape("Row's output", got, want)
    if not same(got, want):
        own = x[..., columns] @ linear.weight.detach()[:, columns].T
        bias = linear.bias.detach()
        if same(got, own) or same(got, own + bias):
            raise Wrong(f"rank {t}: Row's output is this rank's partial sum: g is missing")
        raise Wrong(f"rank {t}: Row's output " + explain_bias(got, want, bias))
    places = [(tensor_parallel, name, form) for name, form in forms.items()]
    held = 8 * sum(param.numel() for param in row.parameters())
    facts = [beside("bytes of Row's parameters", held, "(out * in / T + out) * 8",
                    8 * (5 * 8 // T + 5))]
    return [*facts, trains(make_mesh, places, {"tp": 4})[1]]


def explain_bias(got, want, bias):
    """How a layer's output differs from the right one, `want`, to which the bias was added once."""
    # If got has the bias k times, this difference is k times the bias
    k = factor(got - want + bias, bias.expand_as(want))
    if same(got, want - bias):
        return "lacks the bias"
    if k is not None:
        return f"has the bias {in_numbers(k)} times: add it once, after the sum"
    return "differs from the whole layer's"


def judge_vocabulary_loss(make_mesh, forms):
    form = forms["vocabulary_loss"]
    mesh = make_mesh(tp=RANKS)
    group = mesh.group("tp")
    V = 22  # words: ranks 0 and 1 have 6, ranks 2 and 3 have 5
    words = bounds(V, group)
    targets = torch.tensor([[0, 7, 21, 3], [12, 20, model_file.ABSENT, 9]])
    whole = random_tensor(2, 4, V, seed=5)
    for big, says in ((0, ""), (800, "logits near 800: ")):  # exp(800) overflows
        logits = (whole + big).requires_grad_()
        alone = model_file.cross_entropy(logits, targets)
        alone.backward()
        mine = (whole + big)[..., slice(*words)].clone().requires_grad_()
        group.bytes_sent = 0
        loss = form(mine, targets, words, group)
        check_shape("the loss", loss, alone)
        if not same(loss, alone):
            raise Wrong(f"rank {group.rank}: {says}" + explain_loss(
                loss.item(), alone.item(), whole.detach() + big, targets, words))
        sent = group.bytes_sent
        if not loss.requires_grad:
            raise Wrong("the loss has no backward: sum with sum_over_ranks")
        loss.backward()
        want = logits.grad[..., slice(*words)]
        if not same(mine.grad, want):
            k = factor(mine.grad, want)
            raise Wrong(f"rank {group.rank}: right loss, but the gradient of the logits "
                        + ("differs" if k is None else f"is {in_numbers(k)} times one process's"))
    most = 3 * targets.numel() * 8 * 2 * (RANKS - 1) // RANKS
    if sent > most:
        raise Wrong(f"right, but this rank sent {sent} bytes, and three numbers per token are "
                    f"{most}: do not gather the logits")
    facts = [f"bytes sent by rank {group.rank}: {sent}    "
             f"formula 2 (T-1)/T * 3 * tokens * 8 = {most}"]
    places = [(tensor_parallel, "vocabulary_loss", form)]
    return [*facts, trains(make_mesh, places, {"tp": 4})[1]]


def explain_loss(got, want, logits, targets, words):
    """Which mistake gives this loss. logits: of all words."""
    if not math.isfinite(got):
        return f"the loss is {got}: exp overflows; subtract the largest logit of all ranks"
    present = targets != model_file.ABSENT
    at_target = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    # Padding that is counted adds a loss: with 0 for the target's logit (masked, because to_local()
    # says that ABSENT is outside), or with the logit of word 0
    as_masked = logits.logsumexp(-1)[~present].sum().item()
    as_word_0 = (logits.logsumexp(-1) - logits[..., 0])[~present].sum().item()
    if any(same(got, want + more) for more in (as_masked, as_word_0)):
        return "the loss counts padding: a target of ABSENT adds nothing"
    if same(got, want + at_target[present].sum().item()):
        return "the loss lacks the logit of the target"
    inside = (targets >= words[0]) & (targets < words[1])
    local = logits[..., slice(*words)].logsumexp(-1)
    if same(got, (local - at_target * inside)[present].sum().item()):
        return "the loss is of this rank's words only: sum over the ranks"
    k = got / want
    if abs(k - round(k)) < 1e-9 and k > 1:
        return f"the loss is {round(k)} times one process's"
    return (f"the loss is {got:.6g}, and one process's {want:.6g}: do all ranks subtract the same "
            "number, and add nothing for targets outside of their words?")


def judge_sequence(make_mesh, forms):
    mesh = make_mesh(tp=RANKS)
    group = mesh.group("tp")
    T, t = group.size, group.rank
    B, S, C = 2, 2 * T, 3
    mine = slice(2 * t, 2 * t + 2)
    whole = random_tensor(B, S, C, seed=6)
    grads = [random_tensor(B, S, C, seed=10 + r) for r in range(T)]
    summed = sum(grads)
    y, grad = through(forms["gather_tokens"], "gather_tokens", whole[:, mine], grads[t], group)
    check_shape("what gather_tokens returns", y, whole)
    if not same(y, whole):
        raise Wrong(f"rank {t}: what gather_tokens returns " + explain_tokens(y, whole))
    if grad is None or not same(grad, summed[:, mine]):
        raise Wrong(f"rank {t}: the gradient in gather_tokens' backward "
                    + explain_sum_of(grad, grads[t][:, mine], summed[:, mine], T))
    y, grad = through(forms["scatter_tokens"], "scatter_tokens", grads[t], whole[:, mine], group)
    check_shape("what scatter_tokens returns", y, whole[:, mine])
    if not same(y, summed[:, mine]):
        raise Wrong(f"rank {t}: what scatter_tokens returns "
                    + explain_sum_of(y, grads[t][:, mine], summed[:, mine], T))
    if grad is None or not same(grad, whole):
        raise Wrong(f"rank {t}: the gradient in scatter_tokens' backward "
                    + explain_tokens(grad, whole))
    n = 8 * whole.numel()
    facts = [beside(f"bytes sent by rank {t}, both ways", group.bytes_sent, "4 (T-1)/T n",
                    4 * (T - 1) * n // T)]
    places = [(sequence_parallel, name, form) for name, form in forms.items()]
    return [*facts, trains(make_mesh, places, {"tp": T}, sp=True)[1]]


def explain_tokens(got, want):
    """How a tensor of all tokens, (B, S, C), differs from the right one."""
    if got is None:
        return "is None: no gradient came through"
    if got.shape != want.shape:
        return f"has shape {[*got.shape]}, and should have {[*want.shape]}"
    right = [s for s in range(want.size(1)) if same(got[:, s], want[:, s])]
    if torch.equal(got.flatten().sort().values, want.flatten().sort().values):
        return "has all numbers in another order: is dim 0 of the gathered tensor the rank?"
    if right:
        return f"is right for tokens {right} only"
    k = factor(got, want)
    return "differs" if k is None else f"is {in_numbers(k)} times what it should be"
