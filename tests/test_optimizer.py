"""AdamW is torch's, over any pieces; masters, clipping, the norm, the loss scale, skipped steps."""

import math
from types import SimpleNamespace

import pytest
import torch

from collectives import Group
from optimizer import AdamW, LossScale, learning_rate, segments_of, sums_of_squares
from shard import Tag
from tests.harness import close, flags_of, make_trainer, ranks

SHAPES = {"h.0.c_fc.weight": (6, 5), "h.0.c_fc.bias": (6,), "h.0.ln_1.weight": (5,),
          "h.0.experts.c_fc.bias": (3, 4), "wte.weight": (7, 5)}
MATRICES = ["h.0.c_fc.weight", "wte.weight"]


def tag_of(name):
    alone = Group("alone", torch.device("cpu"), [0], 0)
    return Tag(name, torch.Size(SHAPES[name]), sum_over=(alone,))


def optimizer_of(weights, names, grad_clip=1.0):
    """An AdamW over these tensors, without a reducer."""
    reducer = SimpleNamespace(weights=weights, tags=[tag_of(name) for name in names], sharded=False)
    dtype = weights[0].dtype if weights else torch.double
    cfg = SimpleNamespace(dtype=str(dtype).removeprefix("torch."), grad_clip=grad_clip,
                          weight_decay=0.1)
    return AdamW(cfg, reducer, LossScale(dtype, torch.device("cpu")))


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.double)
            for name, shape in SHAPES.items()}


@pytest.mark.parametrize("grad_clip", [0.2, 100.0, 0.0])
def test_three_steps_over_pieces_are_torchs_adamw_with_decay_of_matrices_only(grad_clip):
    """Gradients above the clip, below (their norm is about 10), and none."""
    values = drawn(0)
    want = {name: value.clone().requires_grad_() for name, value in values.items()}
    torchs = torch.optim.AdamW([
        {"params": [want[name] for name in MATRICES], "weight_decay": 0.1},
        {"params": [want[name] for name in SHAPES if name not in MATRICES], "weight_decay": 0.0}],
        betas=(0.9, 0.95), eps=1e-8)

    def pieces(tensors):
        """Each in two pieces, one of the first three elements; and an empty one."""
        halves = [half for tensor in tensors for half in tensor.view(-1).tensor_split([3])]
        return [*halves, torch.zeros(0).double()]

    names = [name for name in SHAPES for _ in range(2)] + ["wte.weight"]
    ours = optimizer_of(pieces(values.values()), names, grad_clip)
    for step, lr in enumerate((1e-2, 3e-2, 1e-3)):
        for name, grad in drawn(step + 1).items():
            want[name].grad = grad
        grads = [piece.clone() for piece in pieces(param.grad for param in want.values())]
        norm = torch.nn.utils.clip_grad_norm_(want.values(), grad_clip or math.inf)
        assert norm > 0.2, "clipping must act"
        ours.step(grads, norm, lr)
        for group in torchs.param_groups:
            group["lr"] = lr
        torchs.step()
        for name, value in values.items():
            close(value, want[name].detach(), f"step {step} {name}")


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
    ours = optimizer_of([weights], ["h.0.ln_1.weight"])
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


def first_step(rank, cfg):
    """(loss, norm, norm of the mean, norm of the mean of squares, weights) after a step."""
    trainer, data = make_trainer(cfg)
    loss, norm, _ = trainer.step(data.training(cfg, 0, trainer.mesh), 1e-2)
    means, squares = (torch.cat([state.double().flatten() for state in states])
                      for states in (trainer.optimizer.means, trainer.optimizer.squares))
    weights = torch.cat([weights.double().flatten() for weights in trainer.reducer.weights])
    return loss.item(), norm.item(), means.norm().item(), squares.norm().item(), weights


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("grad_clip", [0.2, 0.0])
def test_a_step_of_16_bits_is_float64s_but_for_rounding(corpus, dtype, grad_clip):
    """No trace of float16's loss scale of 65536. 2^-6: bfloat16 has 8 bits. The first step is lr,
    9% of the weights, times a sign; rounding chooses some of the signs."""
    words = f"--grad-clip {grad_clip} --microbatches 2 --dtype"
    (got,), (want,) = (ranks(1, first_step, flags_of([*words.split(), each], corpus))
                       for each in (dtype, "float64"))
    assert want[1] > 0.2, "clipping must act"
    close(want[2], 0.1 * (grad_clip or want[1]), "(1 - beta1) times the clipped gradient", 1e-5)
    for a, b in zip(got, want, strict=True):
        close(a, b, dtype, 2**-6)


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
    ours = optimizer_of([], [])
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
    return [optimizer.scale.value, optimizer.num_steps, *optimizer.means, *optimizer.squares,
            *(weight for _, weight in trainer.reducer.whole())]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("words", ["--dp 2 --tp 2 --zero 1", "--dp 2", "--dp 2 --zero 2",
                                   "--dp 2 --zero 3", "--pp 3"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(corpus, words, dtype):
    """It halves float16's loss scale and does not count in the bias correction: the next step is as
    if it had not been, to the bit."""
    cfg = flags_of(["--dtype", dtype, *words.split()], corpus)
    world = cfg.dp * cfg.tp * cfg.pp
    halvings = 2 if dtype == "float16" else 0
    found = ranks(world, steps_with_overflows, cfg, 2**14, (True, True, False))
    plain = ranks(world, steps_with_overflows, cfg, 2**14 / 2**halvings, (False,))
    for got, want in zip(found, plain, strict=True):
        assert all(map(torch.equal, got, want))
