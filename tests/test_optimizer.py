"""AdamW is torch's, over any pieces; masters, skipped steps, the loss scale, the global norm."""

import math
from types import SimpleNamespace

import pytest
import torch

import train
from collectives import Group
from optimizer import AdamW, LossScale, clip_coefficient, decays, learning_rate, sum_of_squares
from run.config import check
from shard import Tag
from tests.harness import VOCAB, close, config
from tests.pool import pool

SHAPES = {"h.0.c_fc.weight": (6, 5), "h.0.c_fc.bias": (6,), "h.0.ln_1.weight": (5,),
          "h.0.experts.c_fc.bias": (3, 4), "wte.weight": (7, 5)}


def tag_of(name):
    alone = Group("alone", torch.device("cpu"), [0], 0)
    return Tag(name, torch.Size(SHAPES[name]), sum_over=(alone,))


def optimizer_of(weights, names, dtype="float64", **flags):
    """An AdamW over these tensors, without a reducer."""
    reducer = SimpleNamespace(weights=weights, tags=[tag_of(name) for name in names],
                              sharded=False)
    scale = LossScale(getattr(torch, dtype), torch.device("cpu"))
    return AdamW(config("", dtype=dtype, **flags), reducer, scale)


def drawn(seed, dtype=torch.double):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.double).to(dtype)
            for name, shape in SHAPES.items()}


def norm_of(grads):
    return torch.stack([grad.double().norm() for grad in grads]).norm()


@pytest.mark.parametrize("grad_clip", [0.2, 0.0])
def test_three_steps_are_torchs_adamw_with_decay_of_matrices_only(grad_clip):
    """To 1e-12 in float64: the same operations in one kernel."""
    values = drawn(0)
    want = {name: value.clone().requires_grad_() for name, value in values.items()}
    torchs = torch.optim.AdamW(
        [{"params": [want["h.0.c_fc.weight"], want["wte.weight"]], "weight_decay": 0.1},
         {"params": [want[name] for name in ("h.0.c_fc.bias", "h.0.ln_1.weight",
                                             "h.0.experts.c_fc.bias")], "weight_decay": 0.0}],
        betas=(0.9, 0.95), eps=1e-8)
    # Each weight in two pieces, one of the first three elements; and an empty one
    pieces = [piece for value in values.values() for piece in value.view(-1).tensor_split([3])]
    names = [name for name in values for _ in range(2)]
    ours = optimizer_of([*pieces, torch.zeros(0).double()], [*names, "wte.weight"],
                        grad_clip=grad_clip)
    for step, lr in enumerate((1e-2, 3e-2, 1e-3)):
        grads = drawn(step + 1)
        norm = norm_of(grads.values())
        # Copies: a step clips in place
        cut = [part.clone() for grad in grads.values() for part in grad.view(-1).tensor_split([3])]
        ours.step([*cut, torch.zeros(0).double()], norm, lr)
        for name, param in want.items():
            param.grad = grads[name]
        if grad_clip:
            factor = torch.nn.utils.clip_grad_norm_(want.values(), grad_clip)
            assert factor > grad_clip, "clipping must act"
        for group in torchs.param_groups:
            group["lr"] = lr
        torchs.step()
        for name, value in values.items():
            close(value, want[name].detach(), f"step {step} {name}", 1e-12)


def test_only_matrices_decay():
    assert [decays(tag_of(name)) for name in SHAPES] == [True, False, False, False, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masters_of_32_bits_add_up_steps_that_16_bits_would_lose(dtype):
    """1 - 0.0001 is 1 in either."""
    weights = torch.ones(5, dtype=getattr(torch, dtype))
    ours = optimizer_of([weights], ["h.0.ln_1.weight"], dtype)
    scale = ours.scale.value.item()
    grad = torch.full((5,), 0.1 * scale, dtype=weights.dtype)
    for _ in range(100):
        ours.step([grad], torch.tensor(0.1).double(), 1e-4)
    (master,) = ours.masters
    assert master.dtype == torch.float and (master - 0.99).abs().max() < 1e-5
    assert torch.equal(weights, master.to(weights.dtype)) and (weights < 1).all()
    assert ours.named_states()["master"] is ours.masters


def test_wider_weights_are_their_own_masters():
    weights = torch.ones(5)
    ours = optimizer_of([weights], ["h.0.ln_1.weight"], "float32")
    assert ours.masters[0] is weights and "master" not in ours.named_states()


@pytest.mark.parametrize("norm", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_step_that_is_not_finite_changes_nothing_and_does_not_count(dtype, norm):
    """Its number would enter the bias correction: the next step is as if it had not been."""
    def after(norms):
        weights = torch.ones(5, dtype=getattr(torch, dtype))
        ours = optimizer_of([weights], ["h.0.ln_1.weight"], dtype)
        for value in norms:
            fill = 0.1 * ours.scale.value if math.isfinite(value) else value
            grad = torch.full((5,), float(fill)).to(weights.dtype)
            ours.step([grad], torch.tensor(value).double(), 1e-2)
        return [weights, *ours.masters, *ours.means, *ours.squares, ours.num_steps]

    for got, want in zip(after([1.0, norm, norm, 1.0]), after([1.0, 1.0]), strict=True):
        close(got, want, "a skipped step", 1e-3 if dtype == "float16" else 1e-15)
    for got, want in zip(after([1.0, norm]), after([1.0]), strict=True):
        assert torch.equal(got, want)


def test_the_loss_scale_doubles_after_1000_finite_steps_and_halves_at_an_overflow():
    scale = LossScale(torch.float16, torch.device("cpu"))
    other = LossScale(torch.bfloat16, torch.device("cpu"))

    def after(*finite, scale=scale):
        for value in finite:
            scale.update(torch.tensor(value))
        return scale.value.item()

    assert after(*[True] * 999) == 2.0**16 and after(True) == 2.0**17 and after(True) == 2.0**17
    assert after(*[True] * 500) == 2.0**17 and after(False) == 2.0**16
    assert after(*[True] * 999) == 2.0**16 and after(True) == 2.0**17
    assert after(*[False] * 20) == 1.0  # no less
    assert after(*[True] * 1000, scale=other) == 1.0


# ---- the norm ----


def test_the_square_of_40_million_elements_has_four_digits():
    """A float32 sum that adds up squares one after the other is 0.3% off. Here all squares are
    equal, so that the roundings of a row of 65,536 do not cancel: 1e-5 off."""
    x = torch.full((40_000_000,), 0.1)
    close(sum_of_squares(x), len(x) * x[0].double() ** 2, "square", 1e-4)
    close(sum_of_squares(x[:7].bfloat16()), 7 * x[0].bfloat16().double() ** 2, "square", 1e-6)


def test_the_square_is_without_the_loss_scale_and_a_gradient_of_n_holders_adds_an_nth():
    ours = optimizer_of([torch.ones(5, dtype=torch.float16), torch.zeros(0)],
                        ["h.0.ln_1.weight"] * 2, "float16")
    ours.holders = [4, 1]
    grad = torch.full((5,), 2.0) * ours.scale.value
    close(ours.square([grad, torch.zeros(0)]), 5 * 2.0**2 / 4, "square", 1e-6)


def _shares(rank, cfg):
    """[(name, shape, which of its elements this rank steps, the share that it adds of each)]."""
    trainer = train.Trainer(cfg, train.make_mesh(cfg, cfg.device), VOCAB)
    reducer = trainer.reducer
    found = []
    for tag, start, weights, n in zip(reducer.tags, reducer.starts, reducer.weights,
                                      trainer.optimizer.holders, strict=True):
        numbers = torch.arange(tag.shape.numel()).view(tag.shape)  # of the full tensor
        mine = tag.slice(numbers).reshape(-1)[start : start + weights.numel()]
        found.append((tag.name, tuple(tag.shape), mine, 1 / n))
    return found


@pytest.mark.parametrize("flags", [
    {"dp": 2, "tp": 2, "pp": 2}, {"dp": 2, "tp": 2, "pp": 2, "zero": 1},
    {"dp": 4, "shard": 2, "ep": 2, "experts": 4, "zero": 3}, {"dp": 4, "shard": 2, "cp": 2},
    {"dp": 2, "ep": 2, "tp": 2, "sp": True, "experts": 4, "zero": 2},
    {"dp": 2, "ep": 2, "tp": 2, "experts": 4}, {"dp": 3, "zero": 2, "n_embd": 25, "n_head": 5}],
    ids=str)
def test_every_element_of_a_gradient_counts_once_in_the_norm(corpus, flags):
    cfg = config(corpus, **flags)
    counted = {}
    for rank in pool(check(cfg, 1), _shares, cfg):
        for name, shape, mine, share in rank:
            total = counted.setdefault(name, torch.zeros(math.prod(shape)).double())
            total[mine] += share
    for name, total in counted.items():
        close(total, torch.ones_like(total), name, 1e-12)


# ---- the learning rate ----


def test_the_learning_rate_warms_up_and_falls_along_a_cosine():
    cfg = config("", lr=1.0, min_lr=0.1, warmup_steps=4, steps=12)
    want = {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 6: 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 8: 0.55,
            10: 0.1 + 0.9 * (1 - 0.5**0.5) / 2, 12: 0.1}
    for step, lr in want.items():
        close(learning_rate(cfg, step), lr, f"learning rate of step {step}")


def test_clipping_shortens_long_gradients_and_leaves_short_ones():
    for norm, grad_clip, want in ((0.5, 1.0, 1.0), (1e-9, 1.0, 1.0), (4.0, 1.0, 0.25 - 6.25e-8),
                                  (4.0, 0.0, 1.0)):  # 0: no clipping
        close(clip_coefficient(torch.tensor(norm).double(), grad_clip), want, "coefficient", 1e-9)
