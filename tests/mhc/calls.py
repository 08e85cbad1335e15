"""Calls with one argument changed, and what they must say, for the tests of bad input."""

import pytest
import torch
from torch import nn

from goldsmith import mhc

N, DIM = 4, 7
X = torch.randn(2, N, DIM)
PHI, ALPHA, BIAS = torch.randn(24, N * DIM), torch.ones(3), torch.zeros(24)
F, H_POST, H_RES = torch.randn(2, DIM), torch.rand(2, N), torch.rand(2, N, N)


def pre(**changed):
    given = {"x": X, "phi": PHI, "alpha": ALPHA, "bias": BIAS} | changed
    positional = [given.pop(name) for name in ("x", "phi", "alpha", "bias")]
    return mhc.pre(*positional, **given)


def post(**changed):
    given = {"x": X, "f": F, "h_post": H_POST, "h_res": H_RES} | changed
    positional = [given.pop(name) for name in ("x", "f", "h_post", "h_res")]
    return mhc.post(*positional, **given)


def says(error, function, *lines):
    with pytest.raises(error) as caught:
        function()
    assert type(caught.value) is error
    assert str(caught.value).splitlines() == list(lines)


def connection(**changed):
    return mhc.HyperConnection(**{"dim": DIM, "layer": nn.Identity()} | changed)
