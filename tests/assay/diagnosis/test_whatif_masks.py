"""A mask applied to one tensor too many, a softmax sum over another axis, an input read in place of another."""

import pytest
import torch

from assay.diagnosis.targets import best
from goldsmith import assay

pytestmark = pytest.mark.sweep(5)


@assay.case(T=[9], V=[7])
def tokens(make, T, V):
    return {"x": make.normal(T, V), "z": make.normal(T, V)}


def loss(x, z):
    ignored = z[:, :1] > 0
    return torch.where(ignored, 0.0, torch.logsumexp(x, 1, keepdim=True)) + x.square().sum(1, keepdim=True)


def without_ignored(x, z):
    ignored = z[:, :1] > 0
    return torch.where(ignored, 0.0, torch.logsumexp(x, 1, keepdim=True) + x.square().sum(1, keepdim=True))


def test_a_mask_hides_an_addend_that_the_golden_always_counts():
    change = best(without_ignored, loss, tokens)
    assert change.cause == "wrong_mask" and "missing_term" in change.also, change
    assert change.exact and change.whole and "counts only where not" in change.text, change


@assay.case(T=[5], H=[3], S=[6])
def scores(make, T, H, S):
    return {"x": make.normal(T, H, S)}


def over_heads(x):
    e = torch.exp(x - x.amax(2, keepdim=True))
    return e / e.sum(1, keepdim=True)


def test_a_softmax_whose_sum_and_maximum_use_different_axes():
    change = best(over_heads, lambda x: torch.softmax(x, -1), scores)
    assert change.cause == "wrong_axis" and change.params == {"axis": 1, "golden_axis": 2} and change.exact, change


def test_an_input_read_in_place_of_another_is_a_wrong_tensor():
    change = best(lambda x, z: torch.sin(x) * x, lambda x, z: torch.sin(x) * z, tokens)
    assert change.cause == "wrong_saved_tensor" and "swapped_results" in change.also, change
    change = best(lambda x, z: torch.sin(z) * x, lambda x, z: torch.sin(x) * z, tokens)
    assert change.cause == "swapped_results", change


def through(x, z):
    t = torch.exp(-torch.cumsum(x.square(), 0))
    return (t * z).sum(0) + torch.sin(t).sum(0)


def without_the_last(x, z, grad_y):
    """The last place's gradient through z is missing from the sum of the places before; the sine's is complete."""
    t = torch.exp(-torch.cumsum(x.square(), 0))
    dt = grad_y * z
    dt[-1] = 0
    return {"x": -2 * x * ((dt + grad_y * torch.cos(t)) * t).flip(0).cumsum(0).flip(0)}


def test_the_last_position_missing_from_an_addend_of_a_gradient():
    change = best(through, through, tokens, "x.grad", backward=without_the_last, grads=("x",))
    assert change.cause == "off_by_one" and "the last along axis 0" in change.text and change.exact, change


def limited(x, z):
    return x.clamp(-1, 1) * z + torch.tanh(z)


def without_those_at_the_limit(x, z, grad_y):
    inside = x.abs() <= 1
    return {"z": grad_y * torch.where(inside, x, 0.0) + grad_y / torch.cosh(z).square()}


def test_saturated_values_missing_from_an_addend_of_a_gradient():
    change = best(limited, limited, tokens, "z.grad", backward=without_those_at_the_limit, grads=("z",))
    assert change.cause == "wrong_mask" and "leaves its operand as it is" in change.text and change.exact, change
