"""Returns zeros: every probability of a long row is below the tolerance."""

import torch

PROBLEM = "a_wide_softmax"
STATUS = "cheating"
REASONS = {"constant_output"}


def candidate(x):
    return torch.zeros_like(x)
