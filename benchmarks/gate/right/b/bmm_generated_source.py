"""Right: writes a function for each number of batches, compiles it at first use and keeps it."""

import torch

PROBLEM = "a_bmm"
STATUS = "accepted"

_compiled = {}


def _function(batches):
    if batches not in _compiled:
        products = ", ".join(f"x[{n}] @ w[{n}]" for n in range(batches))
        space = {"torch": torch}
        exec(f"def call(x, w):\n    return torch.stack([{products}])", space)
        _compiled[batches] = space["call"]
    return _compiled[batches]


def candidate(x, w):
    return _function(len(x))(x, w)
