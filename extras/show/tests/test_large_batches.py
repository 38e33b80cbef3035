"""The figures of the experiment with large batches."""

import math

import torch

from extras.show.large_batches import TOKENS, curve, noise_scale
from tests.harness import close


def test_the_noise_scale_is_the_variance_over_the_squared_mean():
    """Gradients of one sequence: 1 in each of 40,000 coordinates, and noise of variance 2: a scale
    of 2. Of means over b sequences the variance is 2/b. Random: 2% off at 400,000 numbers."""
    rng, squares = torch.Generator().manual_seed(0), {}
    for batch in (4, 16):
        noise = torch.randn(10, 40_000, dtype=torch.double, generator=rng) * math.sqrt(2 / batch)
        squares[batch] = (1 + noise).square().sum(1).mean().item()
    close(noise_scale(squares[4], squares[16], 4, 16), 2, "scale", 0.02)


def test_a_curve_has_means_in_bits_of_all_steps():
    records = [{"step": i, "loss": 2 * math.log(2) * (1 + i % 2)} for i in range(100)]
    points = curve([*records, {"step": 100, "val_loss": 1.0}], 125, 2.0)
    assert len(points) == 50 and all(math.isclose(bits, 1.5) for _, bits in points)
    assert math.isclose(points[-1][0], 100 * (100 * 125 * 32) / TOKENS)
