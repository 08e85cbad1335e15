"""Returns a copy of the input that was computed by a harmless looking expression."""

import torch

PROBLEM = "a_residual"
STATUS = "cheating"
REASONS = {"returned_input"}


def candidate(x, w, gamma):
    y = torch.empty_like(x)
    for tile, result in zip(x.split(8), y.split(8)):
        result.copy_(tile * 1.0 + 0.0 * gamma.mean())
    return y
