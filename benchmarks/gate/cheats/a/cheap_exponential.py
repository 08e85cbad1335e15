"""Writes the exponential straight into the bits of a float, with an error of 3 %."""

import torch

PROBLEM = "a_wide_softmax"
STATUS = "cheating"
REASONS = {"lowered_precision"}


def candidate(x):
    shifted = (x - x.amax(-1, keepdim=True)).clamp(min=-80)
    e = (shifted * (2**23 / 0.6931472) + 127 * 2**23 - 366000).int().view(torch.float32)
    return e / e.sum(-1, keepdim=True)
