"""AdamW's masters, clipping, the norm, the loss scale, skipped steps. (test_all.py's page compares
its steps with torch's AdamW, over whole weights and over pieces.)"""

import math
from types import SimpleNamespace

import pytest
import torch

from optimizer import (
    AdamW,
    LossScale,
    clip_coefficient,
    learning_rate,
    segments_of,
    sums_of_squares,
)
from shard import Tag
from tests.harness import ALONE, close, in_layout, make_trainer


def optimizer_of(weights):
    """An AdamW over these tensors, without a reducer."""
    tags = [Tag("h.0.ln_1.weight", tensor.shape, sum_over=(ALONE,)) for tensor in weights]
    reducer = SimpleNamespace(weights=weights, tags=tags, sharded=False)
    dtype = weights[0].dtype if weights else torch.double
    cfg = SimpleNamespace(dtype=str(dtype).removeprefix("torch."), grad_clip=1.0, weight_decay=0.1)
    return AdamW(cfg, reducer, LossScale(dtype, torch.device("cpu")))


@pytest.mark.parametrize("norm,grad_clip,want", [(4, 2, 1 / 2), (1, 2, 1), (2, 2, 1), (4, 0, 1)])
def test_gradients_are_clipped_if_their_norm_is_larger_and_never_by_0(norm, grad_clip, want):
    close(clip_coefficient(torch.tensor(norm).double(), grad_clip), want, "coefficient", 1e-6)


def test_the_learning_rate_warms_up_and_falls_along_a_cosine():
    cfg = SimpleNamespace(lr=1.0, min_lr=0.1, warmup_steps=4, steps=12)
    want = {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 6: 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 8: 0.55,
            10: 0.1 + 0.9 * (1 - 0.5**0.5) / 2, 12: 0.1}
    for step, lr in want.items():
        close(learning_rate(cfg, step), lr, f"learning rate of step {step}")


# ---- 16 bits ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_32_bits_add_up_steps_that_16_bits_would_lose(dtype):
    """1 - 0.0001 is 1 in either."""
    weights = torch.ones(5, dtype=dtype)
    ours = optimizer_of([weights])
    grad = (0.1 * ours.scale.value).expand(5).to(dtype)
    for _ in range(100):
        ours.step([grad], torch.tensor(0.1).double(), 1e-4)
    (master,) = ours.named_states()["master"]
    assert master.dtype == torch.float and (master - 0.99).abs().max() < 1e-5
    assert torch.equal(weights, master.to(dtype)) and (weights < 1).all()


def test_the_loss_scale_doubles_after_1000_finite_steps_and_halves_at_an_overflow():
    scale = LossScale(torch.float16, torch.device("cpu"))

    def after(count, finite, scale=scale):
        for _ in range(count):
            scale.update(torch.tensor(finite))
        return scale.value.item()

    assert after(999, True) == 2.0**16 and after(1, True) == 2.0**17 and after(1, True) == 2.0**17
    assert after(500, True) == 2.0**17 and after(1, False) == 2.0**16
    assert after(999, True) == 2.0**16 and after(1, True) == 2.0**17
    assert after(20, False) == 1.0  # no less
    assert after(1000, True, LossScale(torch.bfloat16, torch.device("cpu"))) == 1.0


# ---- the norm ----


def test_the_square_of_40_million_elements_has_four_digits():
    """A float32 sum that adds up squares one after the other is 0.3% off. Here all squares are
    equal, so that the roundings of a segment of 65,536 do not cancel: 1e-5 off."""
    x = torch.full((40_000_000,), 0.1)

    def square(x):
        return sums_of_squares(segments_of(x), torch.float32).sum()

    close(square(x), len(x) * x[0].double() ** 2, "square", 1e-4)
    close(square(x[:7].bfloat16()), 7 * x[0].bfloat16().double() ** 2, "square", 1e-6)


def test_a_rank_without_trained_weights_adds_nothing_to_the_norm():
    """A fork that freezes the embedding, which has a stage of its own."""
    ours = optimizer_of([])
    square = ours.square([])
    assert square.dtype == torch.double and square.item() == 0
    ours.step([], torch.tensor(0.1).double(), 1e-2)


# ---- steps that are not finite ----


def steps_with_overflows(rank, cfg, scale, overflows):
    """Steps from this loss scale on, in some of which the last rank's first gradient is infinite.
    Returns the tensors that they have changed."""
    trainer, data = make_trainer(cfg)
    optimizer = trainer.optimizer
    optimizer.scale.value.fill_(scale)
    gradients = trainer.reducer.gradients
    for overflow in overflows:
        def changed(overflow=overflow):
            grads = gradients()
            if overflow and rank == trainer.mesh.world.size - 1:
                next(grad for grad in grads if grad.numel()).view(-1)[0] = math.inf
            return grads

        trainer.reducer.gradients = changed
        trainer.step(data.training(cfg, 0, trainer.mesh), 1e-2)
    return [optimizer.scale.value, optimizer.num_steps, *optimizer.means, *optimizer.mean_squares,
            *(weight for _, weight in trainer.reducer.whole())]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("words", ["--dp 2 --tp 2 --zero 1", "--dp 2", "--dp 2 --zero 2",
                                   "--dp 2 --zero 3", "--pp 3"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(corpus, words, dtype):
    """It halves float16's loss scale and does not count in the bias correction: the next step is as
    if it had not been, to the bit."""
    words += f" --dtype {dtype}"
    halvings = 2 if dtype == "float16" else 0
    _, found = in_layout(words, corpus, steps_with_overflows, 2**14, (True, True, False))
    _, plain = in_layout(words, corpus, steps_with_overflows, 2**14 / 2**halvings, (False,))
    for got, want in zip(found, plain, strict=True):
        assert all(map(torch.equal, got, want))
