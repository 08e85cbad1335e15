"""A mask applied to one tensor too many, a softmax sum over another axis, an input read in place of another."""

import pytest
import torch

from assay.diagnosis.targets import best
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[9], V=[7])
def tokens(make, T, V):
    return {"x": make.normal(T, V), "z": make.normal(T, V)}


def loss(x, z):
    ignored = z[:, :1] > 0
    return torch.where(ignored, 0.0, torch.logsumexp(x, 1, keepdim=True)) + x.square().sum(1, keepdim=True)


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
