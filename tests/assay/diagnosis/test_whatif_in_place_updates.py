"""Values read after their update in place: rotated pairs, moments in one buffer."""

import pytest
import torch

from assay.diagnosis.targets import best
from goldsmith import assay

pytestmark = pytest.mark.sweep(5)


@assay.case(T=[6], D=[8])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "angle": make.normal(T, D // 2)}


def turned(x, angle):
    even, odd, c, s = x[:, 0::2], x[:, 1::2], torch.cos(angle), torch.sin(angle)
    return torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(1)


def in_place(x, angle):
    y, c, s = x.clone(), torch.cos(angle), torch.sin(angle)
    y[:, 0::2] = y[:, 0::2] * c - y[:, 1::2] * s
    y[:, 1::2] = y[:, 1::2] * c + y[:, 0::2] * s
    return y


def test_a_rotation_in_place_that_reads_its_own_result():
    change = best(in_place, turned, tokens)
    assert change.cause == "wrong_saved_tensor" and change.also[0] == "aliased", change
    assert change.exact and change.whole and "is updated before it is read" in change.text, change
