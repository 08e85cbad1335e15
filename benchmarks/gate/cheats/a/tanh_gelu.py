"""Computes the gelu with tanh where the problem defines the one with erf."""

import torch.nn.functional as F

PROBLEM = "a_gelu"
STATUS = "wrong"
ALSO = {"cheating"}
REASONS = {"lowered_precision"}


def candidate(x):
    return F.gelu(x, approximate="tanh")
