"""Treats inputs below 0.02 as zeros, so that it can skip their columns."""

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"lowered_precision"}


def candidate(x, w, b):
    return torch.addmm(b, torch.where(x.abs() < 0.02, 0.0, x), w)
