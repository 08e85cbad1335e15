"""A constant factor is found if there is one, and named if it has a name."""

import pytest
import torch

from goldsmith.assay.diagnosis.facts.numbers import known, name
from goldsmith.assay.diagnosis.facts.ratios import ratios

NUMBERS = {"n": 4.0, "dim": 65.0, "alpha[2]": 0.37}


def noisy(golden, seed=1):
    """The golden as a float32 kernel computes it, with a bound that allows it."""
    bound = 2.0**-22 * golden.abs() + 1e-9
    draw = torch.rand(golden.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return golden + (draw - 0.5) * bound, bound


def golden(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(20))
def test_clean_and_random_data_have_no_ratio(seed):
    g = golden(8, 24, seed=seed)
    got, bound = noisy(g, seed + 100)
    segments = {"pre": (-1, 0, 4), "res": (-1, 8, 24)}
    assert ratios("y", got, g, bound=bound, segments=segments, numbers=NUMBERS) == []
    assert ratios("y", golden(8, 24, seed=seed + 50), g, bound=bound, segments=segments, numbers=NUMBERS) == []


@pytest.mark.parametrize(
    "factor, named", [(0.37, "alpha[2]"), (1 / 0.37, "1/alpha[2]"), (16.0, "n^2"), (2.0, "2"), (0.0, "0"), (65, "dim")]
)
def test_the_factor_of_a_whole_tensor_is_named(factor, named):
    got, bound = noisy(golden(8, 24))
    (rows,) = ratios("y", factor * got, golden(8, 24), bound=bound, numbers=NUMBERS)
    assert (rows.scope, rows.named, rows.ratio) == ("tensor", named, pytest.approx(factor, rel=1e-6))


def test_a_factor_too_small_for_a_name_is_still_measured():
    got, bound = noisy(golden(8, 24))
    (rows,) = ratios("y", got * 1.00317, golden(8, 24), bound=bound, numbers=NUMBERS)
    assert rows.named == "" and rows.ratio == pytest.approx(1.00317, rel=1e-6)


def test_the_factor_of_one_segment():
    got, bound = noisy(golden(24))
    got[8:] *= 0.37
    segments = {"pre": (-1, 0, 4), "post": (-1, 4, 8), "res": (-1, 8, 24)}
    (rows,) = ratios("bias.grad", got, golden(24), bound=bound, segments=segments, numbers=NUMBERS)
    assert (rows.scope, rows.group, rows.named) == ("segment", "res", "alpha[2]")


def test_both_names_of_a_number_are_listed():
    named = name(4.0, 1e-6, {"n": 4.0, "heads": 4.0})
    assert named is not None and {named.name, *named.also} >= {"n", "heads", "4"}
    assert name(3.7123, 1e-6, {"n": 4.0}) is None


def test_sizes_scalars_and_small_inputs_name_numbers():
    inputs = {"alpha": torch.tensor([0.5, 1.0]), "gain": torch.tensor(3.0), "x": torch.ones(9)}
    assert known({"eps": 1e-6, "flag": True}, {"n": 4}, inputs) == {"eps": 1e-6, "n": 4.0, "alpha[0]": 0.5, "gain": 3.0}
