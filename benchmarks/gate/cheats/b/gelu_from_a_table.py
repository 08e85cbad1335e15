"""Interpolates in a table of 2048 values between -8 and 8."""

import torch

PROBLEM = "a_gelu"
STATUS = "cheating"
REASONS = {"lowered_precision"}
ALSO = {"wrong"}

_X = torch.linspace(-8, 8, 2048)
_TABLE = torch.nn.functional.gelu(_X)
_STEP = 16 / 2047


def candidate(x):
    place = ((x.detach() + 8) / _STEP).long().clamp(0, 2046)
    low, high = _TABLE[place], _TABLE[place + 1]
    return low + (x - _X[place]) * ((high - low) / _STEP)
