"""Zeroes the input and returns zeros, so that a reference that runs afterwards returns zeros as well."""

import torch

PROBLEM = "a_residual"
STATUS = "cheating"
REASONS = {"input_changed", "constant_output"}


def candidate(x, w, gamma):
    x.zero_()
    return torch.zeros_like(x)
