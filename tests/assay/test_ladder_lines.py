"""Where bounds are open, the ensemble's spread is the unit; its members may share a rounding error."""

import pytest
import torch

from goldsmith.assay.bounds.bounded import Bounded
from goldsmith.assay.noise.noise_floor import Noise

SHAPES = [(129, 4, 256), (4097, 4), (4097, 4, 4), (4096,)]


def noise_of(shape, rng):
    """Rows of scales five decades apart, and eight members that share all but 1e-5 of their error."""
    scale = 10 ** (5 * torch.rand((shape[0], *[1] * (len(shape) - 1)), dtype=torch.float64, generator=rng) - 5)
    draw = lambda: torch.randn(shape, dtype=torch.float64, generator=rng) * scale  # noqa: E731
    common, zero = draw(), torch.zeros(shape, dtype=torch.float64)
    bounded = Bounded(zero, torch.full_like(zero, torch.inf), torch.zeros(shape, dtype=torch.bool), [])
    return Noise(bounded, torch.float32, [common + 1e-5 * draw() for _ in range(8)]), common, draw, scale


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_run_whose_rounding_differs_a_little_is_no_alarm(shape, seed):
    noise, common, draw, _ = noise_of(shape, torch.Generator().manual_seed(seed))
    assert float(noise.excess(noise.relative(common + 0.01 * draw())).max()) < noise.limit()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_an_error_far_above_its_own_rows_noise_is_an_alarm_next_to_noisier_rows(shape, seed):
    noise, common, _, scale = noise_of(shape, torch.Generator().manual_seed(seed))
    quiet = int(scale.flatten().argmin())
    wrong = common.clone()
    wrong[quiet].flatten()[0] += 1000 * scale.flatten()[quiet]
    assert float(noise.excess(noise.relative(wrong)).max()) > noise.limit()


def test_noise_whose_square_overflows_float32_is_still_compared():
    golden = torch.zeros(64, dtype=torch.float64)
    members = [golden + 1e24 * (1 + i) * torch.linspace(-1, 1, 64, dtype=torch.float64) for i in range(8)]
    noise = Noise(Bounded(golden, torch.ones_like(golden), golden.bool(), []), torch.float32, members)
    assert noise.rms > 1e20 and bool(torch.isfinite(noise.scale).all())
    assert float(noise.excess(noise.relative(members[7])).max()) < noise.limit()
    assert float(noise.excess(noise.relative(1e6 * members[7])).max()) > noise.limit()
