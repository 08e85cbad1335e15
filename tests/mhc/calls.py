"""Calls with one argument changed, and a check of their error messages, for the tests of bad input."""

import pytest
import torch
from torch import nn

from goldsmith import mhc

N, DIM = 4, 7
X = torch.randn(2, N, DIM)
PHI, ALPHA, BIAS = torch.randn(24, N * DIM), torch.ones(3), torch.zeros(24)
F, H_POST, H_RES = torch.randn(2, DIM), torch.rand(2, N), torch.rand(2, N, N)


def pre(**changed):
    arguments = {"x": X, "phi": PHI, "alpha": ALPHA, "bias": BIAS} | changed
    positional = [arguments.pop(name) for name in ("x", "phi", "alpha", "bias")]
    return mhc.pre(*positional, **arguments)


def post(**changed):
    arguments = {"x": X, "f": F, "h_post": H_POST, "h_res": H_RES} | changed
    positional = [arguments.pop(name) for name in ("x", "f", "h_post", "h_res")]
    return mhc.post(*positional, **arguments)


def says(error, function, start, *parts):
    """The call raises exactly this error; its message starts with `start` and contains the other parts in order."""
    with pytest.raises(error) as caught:
        function()
    assert type(caught.value) is error
    message = str(caught.value)
    assert message.startswith(start), message
    rest = message[len(start) :]
    for part in parts:
        assert part in rest, f"{part!r} is not in {rest!r}"
        rest = rest[rest.index(part) + len(part) :]


def connection(**changed):
    return mhc.HyperConnection(**{"dim": DIM, "layer": nn.Identity()} | changed)
